"""Elementwise work between matrix products: SwiGLU, residual and norm, a head's norm and gate.

Each is one kernel where one serves the call. torch.compile fuses the torch code itself, and with more of what
surrounds it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import RMSNorm, linear_dtype
from .ops import by_kernel


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """SiLU(a) ⊙ b."""
    served = _by_kernel("swiglu", a, b)
    return F.silu(a) * b if served is None else served


def add_norm(x: Tensor, y: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + y and its norm, in `linear_dtype(x)`; y None: x itself and its norm.

    Use the returned sum: its backward adds both gradients in one kernel.
    """
    served = _norm_by_kernel(x, norm, add=y, dtype=linear_dtype(x))
    if served is not None:
        return served
    x = x if y is None else x + y
    return x, norm(x)


def norm_gate(
    o: Tensor, norm: RMSNorm, gate: Tensor | None, dtype: torch.dtype, activation: str = "silu"
) -> Tensor:
    """norm(o) ⊙ SiLU(gate), o `[…, H, V]` and gate `[…, H·V]` or None for no gate: `[…, H·V]` in `dtype`.

    activation: silu, or sigmoid in its place.
    """
    # The norm's kernel knows SiLU alone.
    if gate is not None and activation == "sigmoid":
        return norm_gate(o, norm, None, dtype) * gate.sigmoid().to(dtype)
    served = _norm_by_kernel(o, norm, gate=gate, dtype=dtype)
    if served is not None:
        return served[1].flatten(-2)
    y = norm(o).flatten(-2).to(dtype)
    return y if gate is None else y * F.silu(gate)


def _norm_by_kernel(x: Tensor, norm: RMSNorm, **options):
    # An adapter around a norm has no weight of its own; an offloaded weight is in memory only in its module.
    if not isinstance(norm, RMSNorm) or norm.weight.is_meta:
        return None
    return _by_kernel("rms_norm", x, norm.weight, norm.eps, **options)


def _by_kernel(op: str, x: Tensor, *inputs, **options):
    return (
        None if torch.compiler.is_compiling() else by_kernel(op, "auto", x, x, *inputs, **options)
    )
