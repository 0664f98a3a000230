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
        None  # of q, k and v, [·, W] or [·, 1, W]; None or empty for none
    )
    silu: bool = False  # whether SiLU follows the convolution of v
    norm: tuple[Tensor, float] | None = (
        None  # weight [V] and ε of the RMSNorm of each head of the output
    )
    gate_activation: str = "silu"  # or "sigmoid"
    out: dict[str, Tensor] | None = (
        None  # contiguous, for the new state, none of `state`'s own; None: new
    )
