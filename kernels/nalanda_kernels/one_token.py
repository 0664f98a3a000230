"""The rule of one token, as callers of API 3 describe it to kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Token(NamedTuple):
    """The rule of one token, its sizes, and the layers around it."""

    dtype: torch.dtype  # of the output
    key_dim: int
    value_dim: int
    num_heads: int
    num_v_heads: int
    feature_map: Any = None
    qk_norm: str | None = None
    scale: float | None = None  # of the readout; None: F^-½
    steps: int = 1  # of the rule, one after another; the decay precedes the first
    delta: bool = False  # the delta rule, or linear attention
    beta_scale: float = 1.0  # β = beta_scale·σ(b)
    decay: tuple[Tensor, Tensor] | None = None  # A_log [HV] and dt_bias
    denominator: bool = False
    filters: dict[str, Tensor] | None = (
        None  # of q, k and v, [·, W] or [·, 1, W], and `local`, of v in o; None or empty for none
    )
    silu: bool = False  # whether SiLU follows the convolution of v
    norm: tuple[Tensor, float] | None = (
        None  # weight and ε of the output's norm: [V] of each head, [HV·V] over all of them
    )
    norm_bias: Tensor | None = None  # of a LayerNorm; None: RMSNorm
    gate_activation: str = "silu"  # or "sigmoid"
    # "retention", 1 − 2^(−5−h) of head h; "sigmoid", σ(a)^(1/temperature); else by `decay` or g
    decay_kind: str = "none"
    temperature: float = 0.0
    frequencies: Tensor | None = None  # [K/2], of rotations of q and k without convolution
    skip: Tensor | None = (
        None  # D of Mamba 2 [HV]: the step Δ of the decay multiplies v, and D v is added
    )
    magnitude: float = 0.0  # of MALA, divided by the tokens seen if `by_count`
    by_count: bool = False
    swapped: bool = False  # odd heads of v read Pola's query of opposite signs
    gate_first: bool = False  # the gate precedes the convolution of v and the norm
    out: dict[str, Tensor] | None = (
        None  # contiguous, for the new state, none of `state`'s own; None: new
    )
