"""DeltaNet and Gated DeltaNet."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Heads, Mixer, State, StateSpec
from .layers import Fp32Module, at_least_fp32
from .ops import delta_rule, delta_rule_flops
from .sequences import Sequences


class Decay(Fp32Module):
    """Log-decay per head of Gated DeltaNet and Mamba 2: g = −exp(A_log) · softplus(a + dt_bias).

    Its parameters stay fp32: in bf16, A_log would change in steps of 1 %.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))

    def forward(self, a: Tensor) -> Tensor:  # [B, T, H]
        return -self.A_log.exp() * F.softplus(at_least_fp32(a) + self.dt_bias)

    def initial(self) -> dict[str, Tensor]:
        """A ~ U(0, 16); softplus(dt_bias) log-uniform in [1e-3, 0.1]."""
        A = torch.empty_like(self.A_log).uniform_(0, 16).clamp_min_(1e-4)
        dt = 10 ** torch.empty_like(self.dt_bias).uniform_(-3, -1)
        return {"A_log": A.log(), "dt_bias": dt + torch.log(-torch.expm1(-dt))}  # the inverse of softplus


class DeltaNet(Mixer):
    """DeltaNet (Yang et al. 2024): S_t = (I − β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t.

    A short convolution precedes q, k and v. SiLU follows for v; the feature map, in place of SiLU, and an L2
    norm for q and k. β = σ(W_b x). The output is RMS-normed per head, and gated if `use_gate` (default: no).

    Options: `allow_neg_eigval` doubles β, so that the transition's eigenvalue 1 − β reaches −1.
    `num_v_heads`, a multiple of `num_heads`, gives each query/key head several value heads (default: one).
    Cost per token and head with F features: 6FV + 2·64·(3F + 2V) FLOPs. State: F × V in fp32.
    """

    equation = "S ← (I − β k kᵀ) S + β k vᵀ; o = Sᵀq"
    source = "arXiv 2406.06484"
    conv_size = 4
    map_name = "silu"
    gated = False
    decays = False

    def __init__(
        self, config, layer_idx: int, *, allow_neg_eigval: bool = False, num_v_heads: int | None = None
    ):
        if num_v_heads is not None and (num_v_heads < 1 or num_v_heads % config.num_heads):
            raise ValueError(f"num_v_heads={num_v_heads} must be a multiple of num_heads={config.num_heads}")
        super().__init__(config, layer_idx, v_heads=num_v_heads)
        self.beta_scale = 2.0 if allow_neg_eigval else 1.0
        self.b_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
        if self.decays:
            self.a_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
            self.decay = Decay(self.num_v_heads)

    def heads(self, x: Tensor, seq: Sequences, state: State, new: State | None) -> Heads:
        heads = super().heads(x, seq, state, new)
        if not self.conv_size:
            heads["v"] = F.silu(heads["v"])
        heads["beta"] = self.beta_scale * at_least_fp32(heads["b"]).sigmoid()
        return heads | ({"g": self.decay(heads["a"])} if self.decays else {})

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | {"b": self.b_proj} | ({"a": self.a_proj} if self.decays else {})

    def mix(self, heads: Heads, seq: Sequences, state: State, new: State | None) -> Tensor:
        o, final = delta_rule(
            heads["q"],
            heads["k"],
            heads["v"],
            heads["beta"],
            heads.get("g"),
            feature_map=self.feature_map,
            qk_norm="l2",
            initial_state=state.get("recurrent"),
            output_final_state=new is not None,
            cu_seqlens=seq.cu_seqlens,
            mode="recurrent" if heads["q"].shape[1] == 1 else "chunk",
        )
        if new is not None and final is not None:
            new["recurrent"] = final
        return o

    def step_options(self) -> dict:
        decay = (self.decay.A_log, self.decay.dt_bias) if self.decays else None
        rule = {"delta": True, "beta_scale": self.beta_scale, "decay": decay}
        return rule | {"qk_norm": "l2", "silu": True}

    def state_spec(self, T: int) -> StateSpec:
        shape = (self.num_v_heads, self.feature_map.feature_dim, self.V)
        return {"recurrent": (shape, torch.float32), **super().state_spec(T)}

    def flops(self, T: int) -> float:
        rule = delta_rule_flops(self.num_v_heads, self.feature_map.feature_dim, self.V)
        return rule + super().flops(T)


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang et al. 2025): DeltaNet with a decay of the state by exp(g_t) before each write.

    g is `Decay` of W_a x. The output gate is SiLU(W_g x), unless `use_gate` is off.
    """

    equation = "S ← e^g (I − β k kᵀ) S + β k vᵀ; o = Sᵀq"
    source = "arXiv 2412.06464"
    gated = True
    decays = True
