"""Mamba 3 (Lahoti et al. 2026): linear attention that weighs two tokens a write and turns q and k by angles of x."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Mixer, StateSpec, convolve
from .call import Inputs, wide_dtype
from .delta import Decay
from .layers import Fp32Module, PreviousToken, RMSNorm, at_least_fp32, fp32_parameter, rotate
from .ops import linear_attention_flops
from .plans import own_heads, own_outputs
from .recurrent import LayerState, mix_sum
from .rule import Rule
from .sequences import Sequences

LEAST_RATE = 1e-4
"""Of A, so that each head forgets."""


class HeadNumbers(Fp32Module):
    """What each head of Mamba 3 learns: biases of its step and of its q and k, and D, of the skip."""

    def __init__(self, num_heads: int, width: int):
        super().__init__()
        self.dt_bias = fp32_parameter(num_heads)
        self.D = fp32_parameter(num_heads)
        self.q_bias = fp32_parameter(num_heads, width)
        self.k_bias = fp32_parameter(num_heads, width)

    def initial(self) -> dict[str, Tensor]:
        """softplus(dt_bias) log-uniform in [1e-3, 0.1]; the others are 1."""
        dt = 10 ** torch.empty_like(self.dt_bias).uniform_(-3, -1)
        dt_bias = Decay.parameters_of(torch.ones_like(dt), dt)["dt_bias"]
        ones = {name: torch.ones_like(getattr(self, name)) for name in ("D", "q_bias", "k_bias")}
        return {"dt_bias": dt_bias} | ones

    def forward(self, q: Tensor, k: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k `[B, T, HV, K]` and the projection of the step `[B, T, HV]` with their biases; and D `[HV]`."""
        q, k = at_least_fp32(q) + self.q_bias, at_least_fp32(k) + self.k_bias
        dt = F.softplus(at_least_fp32(dt) + self.dt_bias)
        return q, k, dt, self.D.clone()  # the wrapper that shards or offloads D frees its own


class Mamba3(Mixer):
    """Mamba 3 (Lahoti et al. 2026), with one input and output a head (SISO):

        S_t = α_t S_{t-1} + (1 − λ_t) Δ_t α_t k_{t-1} v_{t-1}ᵀ + λ_t Δ_t k_t v_tᵀ, o_t = S_tᵀ q_t + D v_t.

    This is the trapezoidal rule, where λ = 1 is the rule of Mamba 2. Δ = softplus(W_Δ x + b), α = e^(−ΔA) with
    A = softplus(W_A x), and λ = σ(W_λ x) have a number a head. q and k are RMS-normed, a head's bias is added, and
    pairs of their first entries turn by angles that grow by π tanh(W_θ x) Δ a token, as a complex state does. The
    output is multiplied by SiLU(W_g x), unless `use_gate` is off. There is no convolution and no norm of the output.

    It is linear attention that writes the token before, once its whole weight is known:

        P_t = α_t P_{t-1} + α_t (λ_{t-1} Δ_{t-1} + (1 − λ_t) Δ_t) k_{t-1} v_{t-1}ᵀ,
        o_t = P_tᵀ q_t + (λ_t Δ_t q_t·k_t + D) v_t.

    Options: `num_v_heads`, a multiple of `num_heads`: the heads; `num_heads` are its groups of q and k.
    `rope_fraction`, the share of q and k that turns (½). In encoders both directions have states of their own.
    Cost: that of `LinearAttention`. State: K × V, an angle a pair and the last k in fp32, and the last v.
    """

    equation = "S ← α S + (1−λ) Δα k₋ v₋ᵀ + λΔ k vᵀ; o = Sᵀq + D v, q and k rotated"
    source = "arXiv 2603.15569"
    rule = Rule(write="own", scale=1.0, norm=None, gated=True, cut=True)

    def __init__(
        self, config, layer_idx: int, *, num_v_heads: int | None = None, rope_fraction: float = 0.5
    ):
        super().__init__(config, layer_idx, v_heads=num_v_heads)
        D, HV = config.hidden_size, self.num_v_heads
        self.pairs = int(self.K * rope_fraction) // 2
        if not 0 < rope_fraction <= 1 or not self.pairs:
            raise ValueError(
                f"mamba3: rope_fraction={rope_fraction} must be at most 1 and rotate a pair of the "
                f"{self.K} entries of a key"
            )
        self.a_proj = nn.Linear(D, HV, bias=False)
        self.dt_proj = nn.Linear(D, HV, bias=False)
        self.lambda_proj = nn.Linear(D, HV, bias=False)
        self.angle_proj = nn.Linear(D, self.pairs, bias=False)
        self.q_norm: Any = RMSNorm(self.K, config.norm_eps)
        self.k_norm: Any = RMSNorm(self.K, config.norm_eps)
        self.numbers = HeadNumbers(HV, self.K)
        self.previous = PreviousToken()

    def linears(self) -> dict[str, nn.Linear]:
        named = {name: getattr(self, f"{name}_proj") for name in ("a", "dt", "lambda", "angle")}
        return super().linears() | named

    def columns(self) -> dict[str, nn.Linear]:
        layers = super().columns()
        del layers["angle"]  # all heads share the angles
        return layers

    def project_tokens(
        self, x: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[dict[str, Tensor], LayerState]:
        """q and k are RMS-normed."""
        outputs, new = super().project_tokens(x, seq, state)
        outputs = own_outputs(self, outputs)  # the norms learn of these heads alone
        for name, norm in (("q", self.q_norm), ("k", self.k_norm)):
            heads = outputs[name].unflatten(-1, (-1, self.K))
            outputs[name] = seq.in_columns(norm, heads).flatten(-2)
        return outputs, new

    def gates(self, projected: dict[str, Tensor], inputs: Inputs) -> Inputs:
        """q and k `[B, T, HV, K]`, Δ, log α and λ `[B, T, HV]`, and the angles since the token before."""
        group = self.num_v_heads // self.num_heads
        q, k = (x.repeat_interleave(group, 2) for x in (inputs.q, inputs.k))
        q, k, dt, skip = self.numbers(q, k, projected["dt"])
        rate = F.softplus(at_least_fp32(projected["a"])).clamp_min(LEAST_RATE)
        turn = math.pi * torch.tanh(at_least_fp32(projected["angle"]))  # [B, T, pairs]
        turn = turn[:, :, None].expand(-1, -1, self.num_v_heads, -1)
        turn = own_heads(self, turn, 2)
        return inputs._replace(
            q=q,
            k=k,
            dt=dt,
            g=-rate * dt,
            beta=at_least_fp32(projected["lambda"]).sigmoid(),
            angles=dt[..., None] * turn,
            skip=skip,
        )

    def mix(
        self, inputs: Inputs, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        q, k, v, share = inputs.q, inputs.k, inputs.v, inputs.beta
        g, dt, skip = inputs.g, inputs.dt, inputs.skip
        assert share is not None
        assert g is not None
        assert dt is not None
        assert skip is not None
        own_weight = share * dt  # [B, T, HV], a token's weight before the next one is known
        angles = self.angles(inputs, seq, state)
        q_turned, k_turned = (rotate_heads(x, angles) for x in (q, k))

        # fp32 but for v: in an angle's gradient those of all later tokens cancel.
        step = torch.cat([own_weight, angles.flatten(2)], -1)
        in_fp32 = dict.fromkeys(("conv_k", "conv_step"), self.previous)
        (k_before, step_before), new = convolve(in_fp32, [k_turned.flatten(2), step], seq, state)
        (v_before,), of_values = convolve({"conv_v": self.previous}, [v.flatten(2)], seq, state)
        weight = g.exp() * (step_before[..., : own_weight.shape[-1]] + (1 - share) * dt)

        v = at_least_fp32(v)
        values = weight[..., None] * v_before.view_as(v)
        written = Inputs(q_turned, k_before.view_as(k_turned), values, g=g)
        o, of_sum = mix_sum(self, written, seq, state)
        return o + (own_weight * (q * k).sum(-1) + skip)[..., None] * v, new | of_values | of_sum

    def angles(self, inputs: Inputs, seq: Sequences, state: LayerState | None) -> Tensor:
        """How far q and k have turned since the text began, from 0 to 2π, `[B, T, HV, pairs]`."""
        assert inputs.angles is not None
        held = None
        if state:
            held = seq.of_rows(state["conv_step"])[:, 0, inputs.angles.shape[2] :]
            held = held.view(-1, *inputs.angles.shape[2:])
        return seq.sums(inputs.angles, held).remainder(2 * math.pi).to(wide_dtype(inputs.v))

    def state_spec(self, T: int) -> StateSpec:
        HV, K, V = self.num_v_heads, self.K, self.V
        return {
            "recurrent": ((HV, K, V), torch.float32),
            "conv_k": ((1, HV * K), torch.float32),
            "conv_v": ((1, HV * V), None),
            "conv_step": ((1, HV * (1 + self.pairs)), torch.float32),
        } | super().state_spec(T)

    def flops(self, T: int) -> float:
        HV, K, V = self.num_v_heads, self.K, self.V
        return super().flops(T) + linear_attention_flops(HV, K, V) + 2.0 * HV * (K + V)


def rotate_heads(x: Tensor, angles: Tensor) -> Tensor:
    """`layers.rotate` of x `[B, T, H, K]` by angles of each head, `[B, T, H, R/2]`."""
    return rotate(x.flatten(1, 2)[:, :, None], angles.flatten(1, 2)).view_as(x)
