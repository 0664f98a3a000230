"""The delta rules: DeltaNet, Gated DeltaNet, KDA, Gated DeltaNet 2, DeltaProduct."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Mixer
from .feature_maps import Elementwise
from .layers import Fp32Module, at_least_fp32, fp32_parameter
from .rule import Rule


class Decay(Fp32Module):
    """Log-decay per head of Gated DeltaNet and Mamba 2: g = −exp(A_log) · softplus(a + dt_bias).

    Its parameters stay fp32: in bf16, A_log would change in steps of 1 %.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.A_log = fp32_parameter(num_heads)
        self.dt_bias = fp32_parameter(num_heads)

    def forward(self, a: Tensor) -> Tensor:  # [B, T, H]
        return -self.A_log.exp() * F.softplus(at_least_fp32(a) + self.dt_bias)

    least = 0.0

    def initial(self) -> dict[str, Tensor]:
        """A ~ U(`least`, 16); softplus(dt_bias) log-uniform in [1e-3, 0.1]."""
        A = torch.empty_like(self.A_log).uniform_(self.least, 16).clamp_min_(1e-4)
        dt = 10 ** torch.empty_like(self.dt_bias).uniform_(-3, -1)
        return self.parameters_of(A, dt)

    @staticmethod
    def parameters_of(A: Tensor, dt: Tensor) -> dict[str, Tensor]:
        """The parameters with g = −A·dt at a = 0."""
        return {
            "A_log": A.log(),
            "dt_bias": dt + torch.log(-torch.expm1(-dt)),
        }  # the inverse of softplus


class ChannelDecay(Decay):
    """`Decay` of each of F key channels of a head: a and dt_bias have H·F entries, A_log has H."""

    least = 1.0

    def __init__(self, num_heads: int, channels: int):
        super().__init__(num_heads)
        self.dt_bias = fp32_parameter(num_heads * channels)

    def forward(self, a: Tensor) -> Tensor:  # [B, T, H·F] to [B, T, H, F]
        dt = F.softplus(at_least_fp32(a) + self.dt_bias)
        return -self.A_log.exp()[:, None] * dt.unflatten(-1, (len(self.A_log), -1))


class DeltaNet(Mixer):
    """DeltaNet (Yang et al. 2024): S_t = (I − β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t.

    A short convolution precedes q, k and v. SiLU follows for v; the feature map, in place of SiLU, and an L2
    norm for q and k. β = σ(W_b x). The output is RMS-normed per head, and gated if `use_gate` (default: no).

    Options: `allow_neg_eigval` doubles β, so that the transition's eigenvalue 1 − β reaches −1; in bf16 and
    fp16, β is then divided by the squared length of keys that rounding made longer than 1.
    `num_v_heads`, a multiple of `num_heads`, gives each query/key head several value heads (default: one).
    `value_silu`, whether SiLU follows v's convolution (yes); without it v can be that of softmax attention.

    The L2 norm erases the lengths of φ(q) and φ(k), and the output norm that of o. Two options bring the
    lengths of q and k before the map back, per head:

    norm_write: β' = 1 − exp(−β‖k‖²/K) in place of β, in (0, 1) for every k. With the identity as map this is
        the continuous rule's exact solution for the unit key and a step β‖k‖²/K (compare arXiv 2512.12602).
    norm_read: o ← RMSNorm(o)·(½ + tanh(‖q‖/√K)), the function of the norm in NaLa's exponent.

    qk_norm: `l2`; `none`, the features as they are; `rms`, φ/rms(φ), of length √F. The state is stable while
        β‖k‖² ≤ 2 for the keys as the op reads them. So `none` needs a map that has a norm of its own, or
        norm_write, which divides the step by that length: S ← (I − α k kᵀ) S + α k vᵀ, α = β'/‖k‖². So does
        `rms`, where √F cancels: it gives the result of `l2`. Under `none` a short key writes a long value,
        and only ‖φ(q)‖ is erased, by the output norm.

    Cost per token and head with F features: 6FV + 2·64·(3F + 2V) + 64²/3 FLOPs. State: F × V in fp32.
    """

    equation = "S ← (I − β k kᵀ) S + β k vᵀ; o = Sᵀq"
    source = "arXiv 2406.06484"
    rule = Rule(write="delta", qk_norm="l2", map="silu", conv=4, gated=False, cut=True)
    gate_bias = True
    """Whether an output gate of low rank has a bias."""

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        allow_neg_eigval: bool = False,
        num_v_heads: int | None = None,
        norm_write: bool = False,
        norm_read: bool = False,
        qk_norm: str = "l2",
        value_silu: bool = True,
    ):
        if allow_neg_eigval and norm_write:
            raise ValueError(
                "allow_neg_eigval doubles β, norm_write keeps it in (0, 1): take one of them"
            )
        if qk_norm not in ("l2", "rms", "none"):
            raise ValueError(f"qk_norm={qk_norm!r} must be one of l2, rms, none")
        self.rule = replace(
            self.rule,
            beta_scale=2.0 if allow_neg_eigval else 1.0,
            norm_write=norm_write,
            norm_read=norm_read,
            qk_norm=qk_norm,
            value_silu=value_silu,
        )
        super().__init__(config, layer_idx, v_heads=num_v_heads)

        # β‖k‖² ≤ 2 needs keys of length 1, or a step that is divided by their length.
        phi = self.feature_map
        bounded = qk_norm == "none" and isinstance(phi, Elementwise) and phi.norm is not None
        if qk_norm != "l2" and not norm_write and not bounded:
            cure = ""
            if qk_norm == "none":
                cure = ", or a map's own norm: feature_map_options norm: l2"
            raise ValueError(
                f"qk_norm={qk_norm}: β‖k‖² may exceed 2 and the state grow: set norm_write{cure}"
            )

        self.add_gates(config.hidden_size)

    def add_gates(self, D: int) -> None:
        """The layers of β, or of the erase and the write gate, and of the decay."""
        HV, V, features = self.num_v_heads, self.V, self.feature_map.feature_dim
        self.b_proj = nn.Linear(D, self.rule.steps * HV, bias=False)
        if self.rule.decay == "head":
            self.a_proj = nn.Linear(D, HV, bias=False)
            self.decay = Decay(HV)
        elif self.rule.decay == "channel":
            # Both gates have the rank V: down to V, then up to all heads.
            self.a_proj = nn.Linear(D, V, bias=False)
            self.a_up_proj = nn.Linear(V, HV * features, bias=False)
            self.decay = ChannelDecay(HV, features)
            if self.rule.gated:
                self.g_proj = nn.Linear(D, V, bias=False)
                self.g_up_proj = nn.Linear(V, HV * V, bias=self.gate_bias)
        if self.rule.erase:
            # An erase gate has F entries a head in place of one.
            self.b_proj = nn.Linear(D, HV * features, bias=False)
            self.w_proj = nn.Linear(D, HV * V, bias=False)

    def linears(self) -> dict[str, nn.Linear]:
        named = {name: getattr(self, f"{name}_proj", None) for name in ("b", "a", "w")}
        return super().linears() | {name: x for name, x in named.items() if x is not None}

    def up_projections(self) -> dict[str, nn.Linear]:
        if self.rule.decay != "channel":
            return {}
        return {"a": self.a_up_proj} | ({"gate": self.g_up_proj} if self.rule.gated else {})


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang et al. 2025): DeltaNet with a decay of the state by exp(g_t) before each write.

    g is `Decay` of W_a x. The output gate is SiLU(W_g x), unless `use_gate` is off.
    """

    equation = "S ← e^g (I − β k kᵀ) S + β k vᵀ; o = Sᵀq"
    source = "arXiv 2412.06464"
    rule = replace(DeltaNet.rule, decay="head", gated=True)


class KDA(DeltaNet):
    """Kimi Delta Attention (Kimi Linear, 2025): Gated DeltaNet with a decay for each key channel,

        S_t = (I − β_t k_t k_tᵀ) Diag(e^{g_t}) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t.

    g is `ChannelDecay` of W₂ W₁ x, β = σ(W_b x). The RMS-normed heads are multiplied by σ(U₂ U₁ x + b),
    unless `use_gate` is off. Both projections to gates have the rank V. A map of F features has F decays.

    Options: `gate_bias`, whether there is a b (yes, as in flash-linear-attention; Kimi Linear has none); and
    those of `DeltaNet`. Cost: its rule's, with decays inside the products. State: F × V.
    """

    equation = "S ← (I − β k kᵀ) Diag(e^g) S + β k vᵀ; o = Sᵀq"
    source = "arXiv 2510.26692"
    rule = replace(DeltaNet.rule, decay="channel", gated=True, gate="sigmoid")

    def __init__(self, config, layer_idx: int, *, gate_bias: bool = True, **options):
        self.gate_bias = gate_bias
        super().__init__(config, layer_idx, **options)


class GatedDeltaNet2(DeltaNet):
    """Gated DeltaNet 2 (2026): `KDA` with a gate of its own for what is erased and one for what is written,

        S_t = (I − k_t (e_t ⊙ k_t)ᵀ) Diag(e^{g_t}) S_{t-1} + k_t (w_t ⊙ v_t)ᵀ, o_t = S_tᵀ q_t.

    e = σ(W_e x) has an entry for each of a head's F features, w = σ(W_w x) one for each of its V values;
    where all are β it is KDA.

    Options: `allow_neg_eigval` doubles e. `num_v_heads` as in `DeltaNet`.
    Cost: KDA's, and two projections. State: F × V in fp32.
    """

    equation = "S ← (I − k (e ⊙ k)ᵀ) Diag(e^g) S + k (w ⊙ v)ᵀ; o = Sᵀq"
    source = "arXiv 2605.22791"
    rule = replace(KDA.rule, erase=True)

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        allow_neg_eigval: bool = False,
        num_v_heads: int | None = None,
    ):
        super().__init__(
            config, layer_idx, allow_neg_eigval=allow_neg_eigval, num_v_heads=num_v_heads
        )


class DeltaProduct(DeltaNet):
    """DeltaProduct (Siems et al. 2025): n steps of the delta rule a token, each with a key, value and β,

        S ← (I − β_i k_i k_iᵀ) S + β_i k_i v_iᵀ for i = 1 … n; o_t = S_tᵀ q_t.

    So a token multiplies the state by a product of n generalised Householder transformations. With β near 2
    each is a reflection: by the paper, one layer can express parity with n = 1, rotations and the group S3
    with n = 2, and the group S5 with n = 4. All else
    is as in `DeltaNet`, with an output gate.

    Options: `num_householder`, n (2). `allow_neg_eigval` (yes) doubles β. `use_forget_gate` (no): the
    `Decay` of Gated DeltaNet before a token's first step. `num_v_heads` as in `DeltaNet`.
    Cost: n times DeltaNet's rule and convolutions, over the n·T steps in one row. State: F × V in fp32.
    """

    equation = "n times a token: S ← (I − β k kᵀ) S + β k vᵀ; o = Sᵀq"
    source = "arXiv 2502.10297"
    rule = replace(DeltaNet.rule, gated=True)

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        num_householder: int = 2,
        allow_neg_eigval: bool = True,
        use_forget_gate: bool = False,
        num_v_heads: int | None = None,
    ):
        if num_householder < 1:
            raise ValueError(f"num_householder={num_householder}: a token takes 1 step or more")
        decay = "head" if use_forget_gate else "none"
        self.rule = replace(self.rule, steps=num_householder, decay=decay)
        super().__init__(
            config, layer_idx, allow_neg_eigval=allow_neg_eigval, num_v_heads=num_v_heads
        )
