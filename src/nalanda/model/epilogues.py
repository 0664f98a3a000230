"""Elementwise work between matrix products: SwiGLU, residual and norm, a head's norm and gate.

Each is one kernel where one serves the call. torch.compile fuses the torch code itself, and with more of what
surrounds it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import by_kernel
from .layers import RMSNorm, altered, linear_dtype, overrides, unrecorded
from .projections import matrix_of


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


FEW = 16
"""Rows of a decoded token, at most, whose GLU is two launches."""


def glu_of_few_rows(x: Tensor, y: Tensor, norm: RMSNorm, mlp: Any) -> Tensor | None:
    """x + y, and the GLU of its norm added, without gradients; None if no kernel serves.

    mlp: the decoder's `GLU`.
    """
    if not unrecorded() or x.numel() > FEW * x.shape[-1]:
        return None
    # Whatever hangs on the modules must run: hooks, adapters, other precisions.
    if altered(mlp) or not _plain(norm):
        return None
    matrices = [matrix_of(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    dtypes = {None if matrix is None else matrix.dtype for matrix in matrices}
    if dtypes != {x.dtype} or y.dtype != x.dtype or linear_dtype(x) != x.dtype:
        return None
    return by_kernel("glu_rows", "auto", x, x, y, norm.weight, norm.eps, *matrices)


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
    return _by_kernel("rms_norm", x, norm.weight, norm.eps, **options) if _plain(norm) else None


def _plain(norm: RMSNorm) -> bool:
    """Whether a kernel may read the norm's weight: an adapter has none, an offloaded one is not in memory.

    A subclass with a forward of its own computes something else.
    """
    is_rms_norm = isinstance(norm, RMSNorm) and not overrides(norm)
    return is_rms_norm and not norm.weight.is_meta and not altered(norm)


def _by_kernel(op: str, x: Tensor, *inputs, **options):
    return (
        None if torch.compiler.is_compiling() else by_kernel(op, "auto", x, x, *inputs, **options)
    )
