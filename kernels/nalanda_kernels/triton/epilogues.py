"""Elementwise work between matrix products, in one pass each way: SwiGLU, and RMSNorm with what surrounds it.

For rows x, y `[V]`, a weight w and a gate g, with s = x + y, r = 1/√(mean s² + ε) and n = r s,

    h = n ⊙ w ⊙ SiLU(g).

Backward, for the gradients ds of s and dh of h, with e = dh ⊙ SiLU(g):

    dx = dy = ds + r (w ⊙ e − n mean(w ⊙ e ⊙ n)),    dw = Σ e ⊙ n,    dg = dh ⊙ n ⊙ w ⊙ SiLU'(g).

y, g and ds may be absent. Only s, w and g are kept for the backward; r is cheaper to compute again than to
read. Each program sums dw over its rows, and torch adds these sums in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.autograd import RMSNorm, SwiGLU
from nalanda_kernels.tensors import rows_of
from nalanda_kernels.triton.common import FUSION, name_of, power_of_two
from nalanda_kernels.triton.tiles import DTYPES, load

TILE = 2048  # entries of a tile, unless a row has more
WIDEST = 16384


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def swiglu_kernel(a, b, y, a_stride, b_stride, rows, N, BT: tl.constexpr, BN: tl.constexpr):
    """y = SiLU(a) ⊙ b, a tile [BT, BN] of rows [rows, N]."""
    # int64: rows × columns may exceed 2³¹.
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    c = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    m = (r < rows) & (c < N)
    a_ = load(a + r * a_stride + c, m)
    b_ = load(b + r * b_stride + c, m)
    tl.store(y + r * N + c, (a_ * tl.sigmoid(a_) * b_).to(y.dtype.element_ty), m)


@triton.jit
def swiglu_backward_kernel(
    a, b, d_y, d_a, d_b, a_stride, b_stride, rows, N, BT: tl.constexpr, BN: tl.constexpr
):
    """da = dy ⊙ b ⊙ SiLU'(a) and db = dy ⊙ SiLU(a), a tile as in `swiglu_kernel`."""
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    c = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    m = (r < rows) & (c < N)
    a_ = load(a + r * a_stride + c, m)
    b_ = load(b + r * b_stride + c, m)
    d = load(d_y + r * N + c, m)
    s = tl.sigmoid(a_)
    tl.store(d_b + r * N + c, (d * a_ * s).to(d_b.dtype.element_ty), m)
    # SiLU'(a) = σ(a) (1 + a (1 − σ(a))).
    tl.store(d_a + r * N + c, (d * b_ * s * (1 + a_ * (1 - s))).to(d_a.dtype.element_ty), m)


@triton.jit
def norm_kernel(
    x,
    add,
    weight,
    gate,
    total,
    y,
    gate_stride,
    rows,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """s = x + add and h = n ⊙ w ⊙ SiLU(g) of BT rows of V columns; a row of the gate has H of them."""
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    c = tl.arange(0, BV)[None, :]
    m = (r < rows) & (c < V)
    at = r * V + c

    # The sum is rounded as it is stored, so that the backward reads the same.
    s = load(x + at, m)
    if add is not None:
        s = (s + load(add + at, m)).to(total.dtype.element_ty)
        tl.store(total + at, s, m)
        s = s.to(tl.float32)

    h = s * tl.rsqrt(tl.sum(s * s, 1) / V + eps)[:, None]
    h *= load(weight + c, c < V)
    if gate is not None:
        # Row r is head r % H of token r // H.
        g = load(gate + r // H * gate_stride + r % H * V + c, m)
        h *= g * tl.sigmoid(g)
    tl.store(y + at, h.to(y.dtype.element_ty), m)


@triton.jit
def norm_backward_kernel(
    total,
    weight,
    gate,
    d_total,
    d_y,
    d_x,
    d_add,
    d_gate,
    d_weight,
    gate_stride,
    rows,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """dx, dadd and dgate of SPAN rows, and the program's row of the sums of d_weight [programs, V]."""
    c = tl.arange(0, BV)[None, :]
    w = load(weight + c, c < V)
    dw = tl.zeros([BV], tl.float32)
    first = tl.program_id(0).to(tl.int64) * SPAN

    for i in range(0, SPAN, BT):
        r = first + i + tl.arange(0, BT)[:, None]
        m = (r < rows) & (c < V)
        at = r * V + c

        # n = r s, and d = dh, then e = dh ⊙ SiLU(g).
        n = load(total + at, m)
        scale = tl.rsqrt(tl.sum(n * n, 1) / V + eps)[:, None]  # r of the docstring
        n *= scale
        d = load(d_y + at, m)

        if gate is not None:
            g = load(gate + r // H * gate_stride + r % H * V + c, m)
            s = tl.sigmoid(g)
            # dg first, while d is dh: dh ⊙ n ⊙ w ⊙ SiLU'(g).
            tl.store(
                d_gate + at, (d * n * w * s * (1 + g * (1 - s))).to(d_gate.dtype.element_ty), m
            )
            d *= g * s

        # Through w and the norm: r (w ⊙ e − n mean(w ⊙ e ⊙ n)).
        # Σ e ⊙ n; rows past the end are 0.
        dw += tl.sum(d * n, 0)
        d *= w
        d = scale * (d - n * (tl.sum(d * n, 1) / V)[:, None])

        if d_total is not None:
            # The residual stream's own gradient ds.
            d += load(d_total + at, m)

        tl.store(d_x + at, d.to(d_x.dtype.element_ty), m)
        if d_add is not None:
            tl.store(d_add + at, d.to(d_add.dtype.element_ty), m)

    if d_weight is not None:
        i = tl.arange(0, BV)
        tl.store(d_weight + tl.program_id(0).to(tl.int64) * V + i, dw, i < V)


# -------------------------------------------------------------------------------------------------- SwiGLU


def _swiglu_tile_sizes(rows: int, N: int) -> tuple[tuple[int, int], dict[str, int]]:
    BN = min(power_of_two(N), 1024)
    BT = TILE // BN
    return (triton.cdiv(rows, BT), triton.cdiv(N, BN)), {"BT": BT, "BN": BN, "num_warps": 4}


def _swiglu(a: Tensor, b: Tensor, y: Tensor) -> None:
    rows, N = a.shape
    grid, tiles = _swiglu_tile_sizes(rows, N)
    if rows:
        swiglu_kernel[grid](a, b, y, a.stride(0), b.stride(0), rows, N, **tiles, **FUSION)


def _swiglu_backward(a: Tensor, b: Tensor, d_y: Tensor, d_a: Tensor, d_b: Tensor) -> None:
    rows, N = a.shape
    grid, tiles = _swiglu_tile_sizes(rows, N)
    if rows:
        strides = a.stride(0), b.stride(0)
        swiglu_backward_kernel[grid](a, b, d_y, d_a, d_b, *strides, rows, N, **tiles, **FUSION)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """SiLU(a) ⊙ b of equal shapes, computed in fp32, in the dtype to which both promote.

    Raises Unsupported for other dtypes than fp32, bf16 and fp16, and for no columns.
    """
    if a.dtype not in DTYPES or b.dtype not in DTYPES:
        raise Unsupported(f"{name_of(a.dtype)} and {name_of(b.dtype)} inputs")
    if a.shape != b.shape or not a.ndim or not a.shape[-1]:
        raise Unsupported(f"shapes {list(a.shape)} and {list(b.shape)}")
    N = a.shape[-1]
    return SwiGLU.apply(_swiglu, _swiglu_backward, rows_of(a, N), rows_of(b, N)).view(a.shape)


# ------------------------------------------------------------------------------------------------- RMSNorm


def _norm_tile_sizes(V: int) -> dict[str, int]:
    BV = power_of_two(V)
    return {"V": V, "BT": max(1, TILE // BV), "BV": BV, "num_warps": min(max(4, BV // 512), 16)}


def _rms_norm(x, add, weight, gate, total, y, H: int, eps: float) -> None:
    (rows, V), stride = x.shape, 0 if gate is None else gate.stride(0)
    tiles = _norm_tile_sizes(V)
    grid = (triton.cdiv(rows, tiles["BT"]),)
    if rows:
        norm_kernel[grid](x, add, weight, gate, total, y, stride, rows, eps, H=H, **tiles, **FUSION)


def _rms_norm_backward(
    total, weight, gate, d_total, d_y, d_x, d_add, d_gate, H: int, eps: float, needs_sums: bool
) -> Tensor | None:
    (rows, V), stride = total.shape, 0 if gate is None else gate.stride(0)
    tiles = _norm_tile_sizes(V)
    # A program's sums are as wide as a row: a few percent of the traffic with so many rows.
    span = max(16, 8192 // tiles["BV"])
    grid = (triton.cdiv(rows, span),)
    sums = total.new_empty(*grid, V, dtype=torch.float32) if needs_sums else None
    if rows:
        grads = d_total, d_y, d_x, d_add, d_gate, sums
        norm_backward_kernel[grid](
            total, weight, gate, *grads, stride, rows, eps, H=H, SPAN=span, **tiles, **FUSION
        )
    return sums


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    add: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """s = x + add and s / √(mean s² + ε) ⊙ weight ⊙ SiLU(gate), over the last dimension, computed in fp32.

    x: `[…, V]`; add: as x, or None for zeros; weight: `[V]`.
    gate: None for no gate, or as many entries as x, `[…, H·V]` for x `[…, H, V]`.
    dtype: of the norm. The sum has the dtype to which x and add promote; without `add` it is x.

    Raises Unsupported for other dtypes than fp32, bf16 and fp16, and V not from 1 to 16384.
    """
    V, tensors = weight.numel(), [z for z in (x, weight, add, gate) if z is not None]
    shapes = ", ".join(str(list(z.shape)) for z in tensors)
    if dtype not in DTYPES or any(z.dtype not in DTYPES for z in tensors):
        raise Unsupported(
            f"{', '.join(name_of(z.dtype) for z in tensors)} inputs to {name_of(dtype)}"
        )
    if (
        not 0 < V <= WIDEST
        or x.shape[-1:] != weight.shape
        or (add is not None and add.shape != x.shape)
    ):
        raise Unsupported(f"shapes {shapes}")
    if gate is not None:
        if gate.numel() != x.numel() or not gate.shape[-1] or gate.shape[-1] % V:
            raise Unsupported(f"shapes {shapes}")
        # A row of the gate [H·V] belongs to H rows of x [V].
        gate = rows_of(gate, gate.shape[-1])

    x_, add = (None if z is None else rows_of(z, V).contiguous() for z in (x, add))
    inputs = x_, add, weight.contiguous(), gate, float(eps), dtype
    total, y = RMSNorm.apply(_rms_norm, _rms_norm_backward, *inputs)
    return total.view(x.shape), y.view(x.shape)
