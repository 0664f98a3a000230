"""The rule of a layer: what a mixer computes between its projections and o_proj."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """A class states its defaults; a layer's own `rule` has the config's choices and its options in their place.

    It holds no tensors. F is the number of features of a head, V that of values, W and b are projections of x.
    """

    write: Literal["own", "add", "delta", "rows"] = "own"
    """A mixer's own `mix`; S ← S + k vᵀ; the delta rule, which erases the value under k first; kept keys and values."""
    decay: Literal["none", "given", "head", "channel", "dt", "retention", "sigmoid"] = "none"
    """Of S before each write: none; g of the mixer's own, which attention adds to its scores; `delta.Decay`;
    `delta.ChannelDecay`; that of `linear.Discretization`, whose step multiplies v; 1 − 2^(−5−h) for head h;
    σ(W₂ W₁ x + b)^(1/temperature)."""
    temperature: float = 16.0
    erase: bool = False
    """Whether gates by channel for what is erased and written stand in β's place."""
    steps: int = 1
    """Keys and values that a head has for each token; its k and v are `[B, T, steps·H, ·]`, step by step."""
    beta_scale: float = 1.0
    """β = beta_scale · σ(b)."""
    norm_write: bool = False
    """Whether the step is 1 − e^(−β‖k‖²/K), divided by the squared length of the features."""

    read: Literal["plain", "sum", "mala", "pola"] = "plain"
    """Sᵀq; divided by the sum of its weights; MALA's difference of the two; or that sum once for each half of v."""
    scale: float | None = None
    """Of Sᵀq; None: F^-½."""
    magnitude: Literal["code", "inverse_t", "literal"] = "code"
    """MALA's factor of the difference, see `linear.MALA`."""
    norm_read: bool = False
    """Whether the output is multiplied by ½ + tanh(‖q‖/√K)."""

    map: str | None = None
    """Feature map if the config leaves it open; None: it never has one."""
    qk_norm: Literal["l2", "rms", "none"] = "none"
    """Norm of the features."""
    rotate: Literal["none", "rope", "lrpe", "features"] = "none"
    """Positions of q and k: none; rotary angles of base `theta`, before the map; `transnormer.LRPE`, behind it;
    those angles behind the map, above the denominator and not in it."""
    theta: float = 10000.0
    conv: int | None = None
    """Taps of the short convolutions of q, k and v if the config leaves them open; None: it never has any."""
    value_silu: bool = True
    """Whether SiLU follows the short convolution of v."""
    shared_qk: bool = False
    """Whether q and k are one projection."""

    value_conv: int = 0
    """Taps of the convolution of v that is added to the output if the config leaves them open; 0: none."""
    shared_filters: bool = False
    """Whether the heads share the filters of that convolution."""
    norm: Literal["head", "layer", "rms"] | None = "head"
    """Of the output: RMSNorm of each head; LayerNorm over all; a norm over all of the mixer's own; none."""
    gated: bool | None = None
    """Whether it has an output gate if the config leaves it open; None: it never has one."""
    gate: Literal["silu", "sigmoid", "plain"] = "silu"
    """Activation of the output gate."""
    gate_before: Literal["o_proj", "norm", "conv"] = "o_proj"
    """What the gate precedes: o_proj alone; the norm too; or the convolution of v, and so all."""

    cut: bool = False
    """Whether it serves rows that are cut over processes (`seq.parts`); other mixers are refused there."""
    unmasked: bool = False
    """Whether it serves sequences whose tokens see both ways (`seq.bidirectional`). Others mix each way, and both
    results are added, if the config has `directions` 2."""

    @property
    def projected(self) -> tuple[str, ...]:
        """Which of q, k and v have a projection of x, and a short convolution."""
        return ("q", "v") if self.shared_qk else ("q", "k", "v")

    @property
    def silu_before_write(self) -> bool:
        """Whether SiLU precedes the values: behind their short convolution, or for a delta rule without one."""
        return self.value_silu and (self.write == "delta" or bool(self.conv))

    @property
    def by_head(self) -> bool:
        """Whether a head's output needs no other head until o_proj."""
        return self.norm in ("head", None)

    @property
    def streams(self) -> int:
        """Parts of v with weights of their own."""
        return 2 if self.read == "pola" else 1
