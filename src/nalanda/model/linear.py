"""Linear attention: mixers with a state S = Σ φ(k) vᵀ. They differ in its decay and its readout."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Mixer
from .call import Inputs
from .delta import Decay
from .layers import RMSNorm, at_least_fp32, fp32_parameter
from .options import check_names, check_types
from .recurrent import LayerState, stream_width
from .rule import Rule
from .sequences import Sequences
from .soft import PooledLandmarks


class NormalizedAttention(Mixer):
    """Mixers that divide by the sum of a token's weights, φ(q_t)ᵀ Σ_{j≤t} φ(k_j) + ε t."""

    rule = Rule(
        write="add",
        read="sum",
        scale=1.0,
        map="elu1",
        conv=4,
        gated=False,
        norm=None,
        cut=True,
        unmasked=True,
    )

    def rotate_features(self, theta: float | None) -> None:
        """Lets φ(q) and φ(k) rotate by angles of base `theta`. Raises ValueError for one that cannot work."""
        if theta is None:
            return
        if not self.bidirectional:
            raise ValueError(f"rope_theta={theta}: encoders rotate features; set is_decoder: false")
        if theta <= 0:
            raise ValueError(f"rope_theta={theta} must be positive")
        width = stream_width(self)
        if width % 4:
            raise ValueError(
                f"rope_theta={theta} rotates {width} features together; set head_dim to a multiple of 4"
            )
        self.rule = replace(self.rule, rotate="features", theta=theta)


class LinearAttention(NormalizedAttention):
    """Linear attention (Katharopoulos et al. 2020): o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + ε t).

    S_t = Σ_{j≤t} φ(k_j) v_jᵀ and z_t = Σ_{j≤t} φ(k_j). The epsilon grows with t, as both sums do.

    Options: `denominator` (default: yes) needs a map with φ(q)·φ(k) ≥ 0. Without it, o_t = F^-½ φ(q_t)ᵀ S_t,
    RMS-normed per head. Default map: 1 + ELU.
    Cost per token and head with F features: 4FV + 2·64·(F + V) FLOPs. State: F × V and z, in fp32.
    """

    equation = "S ← S + k vᵀ, z ← z + k; o = Sᵀq / zᵀq"
    source = "arXiv 2006.16236"
    other_readout = ", or mixer_options denominator=false"

    def __init__(self, config, layer_idx: int, *, denominator: bool = True):
        if not denominator:
            self.rule = replace(self.rule, read="plain", scale=None, norm=self.rule.norm or "head")
        super().__init__(config, layer_idx)


class NaLaAttention(NormalizedAttention):
    """NaLaFormer's block (2025), causal: `LinearAttention` with the NaLa map and the denominator.

    A LayerNorm over all heads follows, and a gate SiLU(W_g x), unless `use_gate` is off.
    Option of encoders: `rope_theta`, the base of rotary angles of φ(q) and φ(k), by row and column in
    images. The features with cos θ and those with sin θ rotate apart. Angles enter the sum over values but
    not the denominator; the releases have 10000.
    """

    equation = "S ← S + k vᵀ, z ← z + k; o = Sᵀq / zᵀq, LayerNorm"
    source = "arXiv 2506.21137"
    rule = replace(NormalizedAttention.rule, map="nala", gated=True, norm="layer")

    def __init__(self, config, layer_idx: int, *, rope_theta: float | None = None):
        super().__init__(config, layer_idx)
        self.rotate_features(rope_theta)


def negative_weights(mixer: Mixer, x: Tensor) -> Tensor:
    """The share of negative ones among the weights of the tokens that a token sees."""
    weights = mixer.weights(x)  # [B, heads, T, T]
    seen = torch.ones_like(weights[0, 0], dtype=torch.bool)
    if not mixer.bidirectional:
        seen = seen.tril()
    return (weights[..., seen] < 0).float().mean()


class MALA(NormalizedAttention):
    """Magnitude-aware linear attention (MALA, 2025), causal. With s_j = c_t φ(q_t)·φ(k_j) and z_t = Σ s_j,

        o_t = Σ_{j≤t} (β_t s_j − γ_t) v_j,    β = 1 + 1/z,  γ = z/t,

    so the weights of a row sum to 1 and sharpen as the query grows. Some may be negative; training logs their
    share. With r = φ(q)ᵀS and the mean value v̄, it is computed as o = r/Σs + c (r − Σs · v̄).

    Options: `scale`, c_t: "code" (default, K^-½/t as in the released code), "inverse_t" (1/t) or "literal"
    (1 as in the paper; ‖w‖₁ grows with t, so the difference loses digits). `rope_theta` as in
    `NaLaAttention`; rows then sum to 1 only approximately. Default map: 1 + ELU.
    Cost: that of `LinearAttention`, plus 4V. State: F × (V + 1) and Σv in fp32; the cache holds t.
    """

    equation = "S ← S + k vᵀ, z ← z + k; o = Sᵀq / zᵀq + c (Sᵀq − zᵀq v̄)"
    source = "arXiv 2507.00698"
    rule = replace(NormalizedAttention.rule, read="mala")
    metrics: ClassVar = {"negative_weights": negative_weights}

    def __init__(
        self, config, layer_idx: int, *, scale: str = "code", rope_theta: float | None = None
    ):
        if scale not in ("code", "inverse_t", "literal"):
            raise ValueError(
                f"mala: scale={scale!r} is unknown; choose one of code, inverse_t, literal"
            )
        self.rule = replace(self.rule, magnitude=scale)
        super().__init__(config, layer_idx)
        self.rotate_features(rope_theta)


class PolaAttention(NormalizedAttention):
    """PolaFormer (2025), causal. φ splits q and k by sign, with learnt powers: [relu(x)^p; relu(−x)^p].

    The query [q⁺; q⁻] reads the first half of v, and [q⁻; q⁺], of opposite signs, the second half. Each has
    its own denominator. A depthwise convolution of v (`value_conv`: by default 5 taps, filters shared by
    heads) is added. Their sum is multiplied by G = W_g x, without activation.

    Options: `gate_first` multiplies by G before the convolution is added (default: after). The map's options
    (`alpha`, `scale`) are feature_map_options. `feature_map: polapp` takes PolaFormer++'s. V must be even.
    Cost: that of `LinearAttention` with twice the heads of V/2, plus 10V. State: 2 × 2K × (V/2 + 1) in fp32,
    and the last 4 values of v for the convolution.
    """

    equation = "S ← S + k vᵀ, z ← z + k, once over keys of q's sign, once over others; o = (Sᵀq / zᵀq + conv v) ⊙ W x"
    source = "arXiv 2501.15061"
    rule = replace(
        NormalizedAttention.rule,
        read="pola",
        map="pola",
        value_conv=5,
        shared_filters=True,
        gated=True,
        gate="plain",
    )

    def __init__(self, config, layer_idx: int, *, gate_first: bool = False):
        if config.feature_map not in (None, "pola", "polapp"):
            raise ValueError(
                f"pola: feature_map is {config.feature_map!r}; it needs 'pola' or 'polapp'"
            )
        if config.value_dim % 2:
            raise ValueError(
                f"pola: head_dim·expand_v is {config.value_dim}; it must be even to halve v"
            )
        if gate_first:
            self.rule = replace(self.rule, gate_before="conv")
        super().__init__(config, layer_idx)


class SoftAttention(Mixer):
    """SOFT++ (Lu et al. 2021, 2024), causal: o_t = κ(q_t, Z) W Σ_{j≤t} κ(Z, k_j) v_jᵀ.

    κ is a Gaussian kernel; q = k is one projection. The landmarks Z are learnt: pooled ones would leak the
    future. W is the regularised inverse of κ(Z, Z), normalised on both sides (`feature_map: softpp`, the
    default) or not (`soft`). The causal mask keeps the Nyström entries, but the masked matrix is not positive
    semidefinite. The output is RMS-normed per head.

    The map's options (`landmarks`, `ridge`, `inverse`, `iterations`) are feature_map_options.
    Where tokens see both ways, the landmarks are means of the sequence, as published: then the options are
    those of `soft.PooledLandmarks`, and the matrix is positive semidefinite.
    Cost: that of `LinearAttention` with F = m landmarks, plus 2m(2K + m) for the map. State: m × V in fp32.
    """

    equation = "S ← S + κ(Z, k) vᵀ; o = SᵀW κ(Z, q), q = k"
    source = "arXiv 2110.11945, 2207.03341"
    rule = Rule(
        write="add",
        scale=1.0,
        map="softpp",
        conv=4,
        shared_qk=True,
        gated=False,
        cut=True,
        unmasked=True,
    )

    def __init__(self, config, layer_idx: int):
        if config.feature_map not in (None, "soft", "softpp"):
            raise ValueError(
                f"soft: feature_map is {config.feature_map!r}; it needs 'soft' or 'softpp', and for "
                "another map take mixer 'linear_attention'"
            )
        if not config.is_decoder:
            self.rule = replace(self.rule, write="own")
        super().__init__(config, layer_idx)
        self.grid = config.grid

    def build_map(self, config) -> Any:
        if not self.bidirectional:
            return super().build_map(config)
        options = config.feature_map_options
        check_names(options, PooledLandmarks)
        check_types(options, PooledLandmarks.__init__.__annotations__, "feature_map_options: ")
        return PooledLandmarks(self.rule.map == "softpp", **options)

    def mix(
        self, inputs: Inputs, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        if not seq.bidirectional:
            return super().mix(inputs, seq, state)
        if seq.cu_seqlens is None:
            return self.feature_map(inputs.q, inputs.v, seq.grid), {}
        return self.mix_packed(inputs.q, inputs.v, seq), {}

    @torch.compiler.disable  # the lengths are values of cu_seqlens
    def mix_packed(self, q: Tensor, v: Tensor, seq: Sequences) -> Tensor:
        sequences = zip(seq.split(q), seq.split(v), strict=True)
        return torch.cat([self.feature_map(*sequence) for sequence in sequences], 1)

    def flops(self, T: int) -> float:
        pooled = 0.0
        if self.bidirectional:
            pooled = self.num_heads * self.feature_map.flops_at(self.grid or (T,), self.K, self.V)
        return pooled + super().flops(T)


class Retention(Mixer):
    """RetNet's retention (Sun et al. 2023): S_t = (1 − 2^{−5−h}) S_{t-1} + k_t v_tᵀ for head h = 0, 1, …

    q and k are rotated by their positions. The output is RMS-normed per head and gated by SiLU(W_g x).
    Option: `rope_theta`, the base of the rotary angles.
    Cost: that of `LinearAttention`. State: K × V in fp32.
    """

    equation = "S ← (1 − 2^(−5−h)) S + k vᵀ; o = Sᵀq, q and k rotated"
    source = "arXiv 2307.08621"
    rule = Rule(write="add", decay="retention", rotate="rope", gated=True, cut=True)

    def __init__(self, config, layer_idx: int, *, rope_theta: float = 10000.0):
        if not rope_theta > 0:
            raise ValueError(f"retention: rope_theta={rope_theta} must be positive")
        if config.key_dim % 2:
            raise ValueError(
                f"retention: head_dim·expand_k is {config.key_dim}; rotation needs an even one"
            )
        self.rule = replace(self.rule, theta=rope_theta)
        super().__init__(config, layer_idx)


class GLA(Mixer):
    """Gated linear attention (Yang et al. 2023): S_t = Diag(α_t) S_{t-1} + k_t v_tᵀ.

    α_t = σ(W₂ W₁ x + b)^{1/16} is a decay per key channel, from a projection of rank 16. The output is
    RMS-normed per head and gated by SiLU(W_g x).
    Options: `gate_rank` (16) and `gate_temperature` (16, the root of the decay).
    Cost: that of `LinearAttention`. State: K × V in fp32.
    """

    equation = "S ← Diag(α) S + k vᵀ; o = Sᵀq"
    source = "arXiv 2312.06635"
    rule = Rule(write="add", decay="sigmoid", gated=True, cut=True)

    def __init__(
        self, config, layer_idx: int, *, gate_rank: int = 16, gate_temperature: float = 16.0
    ):
        if gate_rank < 1 or gate_temperature <= 0:
            raise ValueError(
                f"gla: gate_rank={gate_rank} and gate_temperature={gate_temperature} must be > 0"
            )
        self.rule = replace(self.rule, temperature=float(gate_temperature))
        super().__init__(config, layer_idx)
        down = nn.Linear(config.hidden_size, gate_rank, bias=False)
        # A list, which takes no hooks for calls: each layer is called by itself.
        self.gk_proj: Any = nn.ModuleList([down, nn.Linear(gate_rank, self.num_heads * self.K)])

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | {"a": self.gk_proj[0]}

    def up_projections(self) -> dict[str, nn.Linear]:
        return {"a": self.gk_proj[1]}


class Discretization(Decay):
    """Mamba 2's step Δ = softplus(a + dt_bias) and log-decay −exp(A_log)·Δ per head; and D, of the skip."""

    least = 1.0

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        self.D = fp32_parameter(num_heads)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, T, H]; D: [H]
        dt = F.softplus(at_least_fp32(a) + self.dt_bias)
        g = -self.A_log.exp() * dt
        return dt, g, self.D.clone()  # the wrapper that shards or offloads D frees its own

    def initial(self) -> dict[str, Tensor]:
        """Those of `Decay` with A ~ U(1, 16); D = 1."""
        return super().initial() | {"D": torch.ones_like(self.D)}


class Mamba2(Mixer):
    """Mamba 2 (Dao and Gu 2024): S_t = e^{−Δ_t A} S_{t-1} + Δ_t k_t v_tᵀ, o_t = S_tᵀ q_t + D v_t.

    It calls q, k and v C, B and x. Δ, of W_a x, and A have a number a head, see `Discretization`. The output
    is multiplied by SiLU(W_g x), then RMS-normed over all heads.

    Options: `num_v_heads`, a multiple of `num_heads`: the heads; `num_heads` are its groups of B and C.
    Cost: that of `LinearAttention`, plus 2V. State: F × V in fp32.
    """

    equation = "S ← e^(−ΔA) S + Δ k vᵀ; o = Sᵀq + D v"
    source = "arXiv 2405.21060"
    rule = Rule(
        write="add",
        decay="dt",
        scale=1.0,
        map="silu",
        conv=4,
        gated=True,
        gate_before="norm",
        norm="rms",
        cut=True,
    )

    def __init__(self, config, layer_idx: int, *, num_v_heads: int | None = None):
        super().__init__(config, layer_idx, v_heads=num_v_heads)
        self.a_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
        self.discretization = Discretization(self.num_v_heads)
        self.o_norm = RMSNorm(self.num_v_heads * self.V, config.norm_eps)

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | {"a": self.a_proj}
