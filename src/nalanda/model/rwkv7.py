"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456): a delta rule that erases with one key and writes with another."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Mixer, StateSpec, convolve
from .call import Call, Inputs, Options
from .layers import Fp32Module, PreviousToken, at_least_fp32, fp32_parameter
from .ops import delta_rule_flops, l2norm
from .plans import LOCAL
from .projections import apply_linear
from .recurrent import LayerState, by_step, recurrence
from .rule import Rule
from .sequences import Sequences

STRONGEST = -math.exp(-0.5)
"""The least log-decay: a channel keeps at least e^−0.61 = 0.545 of its state in a token."""
LEAST_LOGIT = -14.0
"""Of the in-context rate a, so a ≥ 8.3e-7: the erased key is κ, formed as aκ times 1/a."""


def place(size: int) -> Tensor:
    """The place of each of `size` channels, from 0 to 1."""
    return torch.arange(size, dtype=torch.float32) / max(size - 1, 1)


def low_rank(name: str, chosen: int | None, factor: float, size: int) -> int:
    """The rank of a gate: `chosen`, or factor · √size to the nearest 32, and 32 at least. Raises ValueError below 1."""
    if chosen is None:
        return max(32, 32 * round(factor * size**0.5 / 32))
    if chosen < 1:
        raise ValueError(f"rwkv7: {name}={chosen} must be at least 1")
    return chosen


class TokenShift(Fp32Module):
    """x_t + μ ⊙ (x_{t−1} − x_t), with a learnt μ `[D]` for each projection."""

    tp_style = None
    powers = {"q": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "gate": 0.2}  # noqa: RUF012

    def __init__(self, size: int, names: list[str], depth: float):
        """depth: of the layer, from 0 for the first to almost 1."""
        super().__init__()
        self.names, self.size, self.depth = names, size, depth
        for name in names:
            setattr(self, f"x_{name}", fp32_parameter(size))

    def initial(self) -> dict[str, Tensor]:
        """μ falls from 1 in the first channel to almost 0 in the last, and faster in later layers."""
        share = torch.arange(self.size, dtype=torch.float32) / self.size
        return {
            f"x_{name}": 1 - share ** (self.powers[name] * (1 - self.depth)) for name in self.names
        }

    def forward(self, x: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
        """x `[B, T, D]` and x_{t−1} to the input of each projection, in the dtype of x."""
        wide = at_least_fp32(x)
        change = previous - wide
        shares = (getattr(self, f"x_{name}").to(wide.dtype) for name in self.names)
        return tuple(torch.addcmul(wide, change, share).to(x.dtype) for share in shares)


class Rates(Fp32Module):
    """The numbers of each key channel that shape decays, rates and keys."""

    names = ("w_bias", "a_bias", "k_k", "k_a", "r_k")

    def __init__(self, num_heads: int, head_dim: int, layer_idx: int, num_layers: int):
        super().__init__()
        self.heads = num_heads, head_dim
        self.depth = layer_idx / max(num_layers - 1, 1)
        for name in self.names:
            setattr(self, name, fp32_parameter(num_heads * head_dim))

    def initial(self) -> dict[str, Tensor]:
        """Those of flash-linear-attention: a layer begins with decays of all strengths."""
        H, K = self.heads
        n = place(H * K)
        within = 2 * place(K).repeat(H) - 1  # from −1 to 1 in each head
        zigzag = within * within.abs()
        return {
            "w_bias": 6 * n ** (1 + self.depth**0.3) - 5.5 + 2.5 * zigzag,
            "a_bias": 0.3 * zigzag + 0.4 * (n - 0.5) - 0.19,
            "k_k": 0.71 - 0.1 * (n - 0.5),
            "k_a": torch.full_like(n, 1.02),
            "r_k": torch.full_like(n, -0.04),
        }

    def forward(self, q: Tensor, k: Tensor, w: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        """The keys of a token's two steps, of q and k `[B, T, H, K]` and the projections w and a `[B, T, H·K]`.

        Returns aκ, k̃, the gate that makes κ/w of aκ, and log w, `[B, T, H, K]`; and q·(r_k ⊙ k̃) `[B, T, H]`.
        """
        K = self.heads[1]
        w_bias, a_bias, k_k, k_a, r_k = (
            getattr(self, name).unflatten(0, (-1, K)) for name in self.names
        )
        q, k = at_least_fp32(q), at_least_fp32(k)
        w, a = (at_least_fp32(x).unflatten(-1, (-1, K)) for x in (w, a))

        g = STRONGEST * (w + w_bias).sigmoid()
        logit = (a + a_bias).clamp_min(LEAST_LOGIT)
        rate = logit.sigmoid()
        erased = rate * l2norm(k * k_k)
        written = k * (1 + (rate - 1) * k_a)
        # The op erases what lies under erase ⊙ aκ. For κ/w that is 1/(aw), and 1/a = 1 + e^−logit.
        erase = (-g).exp() * (1 + (-logit).exp())
        return erased, written, erase, g, (q * r_k * written).sum(-1)


class HeadNorm(nn.Module):
    """LayerNorm of each head with a weight and a bias for each channel of each, in fp32 at least."""

    tp_style = LOCAL

    def __init__(self, num_heads: int, size: int, eps: float, first: float):
        """first: the initial weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads * size))
        self.bias = nn.Parameter(torch.empty(num_heads * size))
        self.eps, self.first = eps, first

    def initial(self) -> dict[str, Tensor]:
        return {
            "weight": torch.full_like(self.weight, self.first),
            "bias": torch.zeros_like(self.bias),
        }

    def forward(self, x: Tensor) -> Tensor:
        """x `[B, T, H, V]` to `[B, T, H·V]`."""
        x = at_least_fp32(x)
        normed = F.layer_norm(x, x.shape[-1:], eps=self.eps).flatten(-2)
        return torch.addcmul(self.bias.to(x.dtype), normed, self.weight.to(x.dtype))


class RWKV7(Mixer):
    """RWKV-7 (Peng et al. 2025): a delta rule with a decay and a rate a_t for each key channel,

        S_t = (Diag(w_t) − (a_t ⊙ κ_t) κ_tᵀ) S_{t-1} + k̃_t v_tᵀ, o_t = S_tᵀ q_t.

    κ = k ⊙ k_k, of length 1, is the key that is erased, and k̃ = k ⊙ (1 + (a − 1) ⊙ k_a) the one that is written.
    log w = −e^−½ σ(W₂ tanh(W₁ x) + b), so w ≥ 0.545, and a = σ(A₂ A₁ x + b), which is ≥ 8e-7 here. The heads are
    normed by `HeadNorm`, (q·(r_k ⊙ k̃)) v is added, and the sum is multiplied by U₂ σ(U₁ x), unless `use_gate` is off.

    A token is two steps of the delta rule. The first decays, erases κ/w and writes nothing: (I − (aκ)(κ/w)ᵀ) Diag(w).
    The second adds k̃ vᵀ.

    Each projection reads x_t + μ ⊙ (x_{t−1} − x_t), see `TokenShift`. The paper's values of later layers are mixed
    with the first layer's. Here they are not, because no layer hands values on to another. `Rates`, `TokenShift` and
    `HeadNorm` begin as published; matrices begin as in every mixer, where the authors' W_o is zero.

    Options: `token_shift` (default: in decoders, which alone can have it); `decay_rank`, `rate_rank` and `gate_rank`,
    those of W, A and U (default: as in flash-linear-attention, they grow with √D).
    Cost: twice that of KDA's rule. State: K × V in fp32, and the last token `[D]`.
    """

    equation = "S ← (Diag(w) − (a ⊙ κ) κᵀ) S + k vᵀ; o = Sᵀq, LayerNorm, + (q·k) v"
    source = "arXiv 2503.14456"
    rule = Rule(write="own", scale=1.0, norm=None, gated=True, gate="plain", cut=True)

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        token_shift: bool | None = None,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        gate_rank: int | None = None,
    ):
        if token_shift and not config.is_decoder:
            raise ValueError(
                "rwkv7: token_shift=True sees the past alone; leave it out in encoders"
            )
        super().__init__(config, layer_idx)
        D, H, K, V, L = config.hidden_size, self.num_heads, self.K, self.V, config.num_hidden_layers
        of_decay = low_rank("decay_rank", decay_rank, 2.5 * K / 64, D)
        of_rate = low_rank("rate_rank", rate_rank, 2.5 * K / 64, D)
        of_gate = low_rank("gate_rank", gate_rank, 5, D)

        # Gates have a low rank: down, then up to all heads.
        self.w_proj = nn.Linear(D, of_decay, bias=False)
        self.w_up_proj = nn.Linear(of_decay, H * K, bias=False)
        self.a_proj = nn.Linear(D, of_rate, bias=False)
        self.a_up_proj = nn.Linear(of_rate, H * K, bias=False)
        if self.rule.gated:
            self.g_proj = nn.Linear(D, of_gate, bias=False)
            self.g_up_proj = nn.Linear(of_gate, H * V, bias=False)
        self.rates = Rates(H, K, layer_idx, L)
        # As published, later layers begin with larger outputs.
        first = ((layer_idx + 1) / L) ** 0.7
        self.o_norm: Any = HeadNorm(H, V, K * config.norm_eps, first)
        shifts = config.is_decoder if token_shift is None else token_shift
        self.shift = TokenShift(D, [*self.linears()], layer_idx / L) if shifts else None
        self.previous = PreviousToken()

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | {"w": self.w_proj, "a": self.a_proj}

    def up_projections(self) -> dict[str, nn.Linear]:
        ups = {"w": self.w_up_proj, "a": self.a_up_proj}
        return ups | ({"gate": self.g_up_proj} if self.rule.gated else {})

    def is_whole(self, state: str) -> bool:
        return state == "conv_x"

    def project_tokens(
        self, x: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[dict[str, Tensor], LayerState]:
        """Each projection reads its mixture of x and the token before; gates then pass their second one."""
        if self.shift is None:
            return super().project_tokens(x, seq, state)
        (previous,), new = convolve({"conv_x": self.previous}, [x], seq, state)

        def project(*shifted: Tensor) -> dict[str, Tensor]:
            layers = zip(self.linears().items(), shifted, strict=True)
            return self.project_up({name: apply_linear(layer, y) for (name, layer), y in layers})

        return seq.in_columns(project, *self.shift(x, previous)), new

    def project_up(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        activated = {"w": torch.tanh(outputs["w"])}
        if self.rule.gated:
            activated["gate"] = torch.sigmoid(outputs["gate"])
        return super().project_up(outputs | activated)

    def gates(self, projected: dict[str, Tensor], inputs: Inputs) -> Inputs:
        """g, the erase gate `[B, T, H, K]`, and in k both keys of a token, `[B, T, 2·H, K]`: aκ, then k̃."""
        erased, written, erase, g, skip = self.rates(
            inputs.q, inputs.k, projected["w"], projected["a"]
        )
        # fp16 has too few digits for aκ where a is small.
        dtype = torch.float32 if inputs.k.dtype == torch.float16 else inputs.k.dtype
        k = torch.cat([erased, written], 2).to(dtype)
        return inputs._replace(k=k, g=g, erase=erase, skip=skip)

    def mix(
        self, inputs: Inputs, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        k, v, erase = inputs.k, inputs.v.to(inputs.k.dtype), inputs.erase
        assert erase is not None
        # The first step writes nothing, the second erases nothing.
        two = inputs._replace(
            v=torch.cat([torch.zeros_like(v), v], 2),
            beta=erase.new_ones(k.shape[:3]),
            erase=torch.cat([erase, torch.zeros_like(erase)], 2),
        )
        steps = by_step(two, 2)
        # Where a exceeds w, a token turns what it erases into its negative.
        options = Options(scale=self.rule.scale, allow_neg_eigval=True)
        q = steps.q.to(k.dtype)
        call = Call(q, steps.k, steps.v, steps.beta, steps.g, steps.erase)
        o, new = recurrence(call, options, seq.repeated(2), state, steps=2)
        return o[:, 1::2], new

    def read_out(self, o: Tensor, inputs: Inputs, x: Tensor) -> Tensor:
        assert inputs.skip is not None
        skip = inputs.skip[..., None] * at_least_fp32(inputs.v)  # [B, T, H, V]
        y = (self.o_norm(o) + skip.flatten(-2)).to(x.dtype)
        return self.o_proj(y if inputs.gate is None else y * inputs.gate)

    def state_spec(self, T: int) -> StateSpec:
        spec: StateSpec = {"recurrent": ((self.num_heads, self.K, self.V), torch.float32)}
        if self.shift is not None:
            spec["conv_x"] = ((1, self.o_proj.out_features), None)
        return spec | super().state_spec(T)

    def flops(self, T: int) -> float:
        return super().flops(T) + 2 * delta_rule_flops(
            self.num_heads, self.K, self.V, channels=True
        )
