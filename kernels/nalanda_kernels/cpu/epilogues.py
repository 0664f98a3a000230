"""SwiGLU, RMSNorm with residual and gate, and short convolutions in one pass each way, on a CPU.

Each takes fp32 and bf16, mixed too, and computes in fp32. It returns None for other dtypes and where torch.compile
traces: torch computes these. It raises Unsupported where the library cannot be built.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nalanda_kernels.autograd import RMSNorm, ShortConvs, SwiGLU
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.feature_maps import DTYPES
from nalanda_kernels.cpu.structures import MOST_TAPS, SPAN, Array
from nalanda_kernels.tensors import bounds_of, last_inputs, pointer, rows_of, threads

ENTRIES_A_THREAD = 8192  # for fewer a thread costs more than it gains


def swiglu(a: Tensor, b: Tensor) -> Tensor | None:
    """SiLU(a) ⊙ b of equal shapes, in the dtype to which both promote."""
    if not _fit(a, b) or a.shape != b.shape:
        return None
    N = a.shape[-1]
    return SwiGLU.apply(_swiglu, _swiglu_backward, rows_of(a, N), rows_of(b, N)).view(a.shape)


def _swiglu(a: Tensor, b: Tensor, y: Tensor) -> None:
    _run("swiglu", [a, b, y], [], *a.shape)


def _swiglu_backward(a: Tensor, b: Tensor, d_y: Tensor, d_a: Tensor, d_b: Tensor) -> None:
    _run("swiglu_backward", [a, b, d_y, d_a, d_b], [], *a.shape)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    add: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """As `nalanda_kernels.triton.epilogues.rms_norm`."""
    V, others = weight.numel(), [y for y in (add, gate) if y is not None]
    if not _fit(x, weight, *others) or dtype not in DTYPES or x.shape[-1] != V:
        return None
    if any(y.numel() != x.numel() for y in others) or (gate is not None and gate.shape[-1] % V):
        return None
    gate = None if gate is None else rows_of(gate, gate.shape[-1])
    add = None if add is None else rows_of(add, V)
    inputs = rows_of(x, V), add, weight, gate, float(eps), dtype
    total, y = RMSNorm.apply(_rms_norm, _rms_norm_backward, *inputs)
    return total.view(x.shape), y.view(x.shape)


def _rms_norm(x, add, weight, gate, total, y, H: int, eps: float) -> None:
    rows, V = x.shape
    _run("rms_norm", [x, add, gate, total, y], [_wide(weight)], rows, H, V, eps)


def _rms_norm_backward(
    total, weight, gate, d_total, d_y, d_x, d_add, d_gate, H: int, eps: float, _needs_sums: bool
) -> Tensor:
    rows, V = total.shape
    sums = total.new_empty(-(-rows // SPAN), V, dtype=torch.float32)
    arrays = [total, gate, d_total, d_y, d_x, d_add, d_gate]
    _run("rms_norm_backward", arrays, [_wide(weight), sums], rows, H, V, eps)
    return sums


def short_convs(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    states: Sequence[Tensor] | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    activations: Sequence[str | None] = (None,),
    output_final_state: bool = False,
) -> tuple[list[Tensor], list[Tensor] | None] | None:
    """As `nalanda_kernels.triton.short_conv.short_convs`."""
    W = weights[0].shape[1]
    if W > MOST_TAPS or not _fit(*xs, *weights):
        return None
    past = [state.to(xs[0].dtype) for state in states or ()]
    N = len(xs[0]) if cu_seqlens is None else len(cu_seqlens) - 1
    if any(y.shape != (N, W - 1, x.shape[2]) for x, y in zip(xs, past, strict=False)):
        return None
    silu = [activation == "silu" for activation in activations]
    arguments = len(xs), _bounds(xs[0], cu_seqlens), silu
    ys = ShortConvs.apply(_short_convs, _short_convs_backward, *arguments, *xs, *weights, *past)
    if not output_final_state:
        return [*ys], None
    before = past or [None] * len(xs)
    after = (last_inputs(x, state, W - 1, cu_seqlens) for x, state in zip(xs, before, strict=True))
    return [*ys], [*after]


def _short_convs(xs, weights, states, bounds: Tensor, silu: Sequence[bool]) -> list[Tensor]:
    ys = [x.new_empty(x.shape) for x in xs]
    each = zip(xs, states or [None] * len(xs), ys, strict=True)
    for arrays, weight, active in zip(each, weights, silu, strict=True):
        pointers, sizes = [_wide(weight.T), bounds], (len(bounds) - 1, *weight.shape, active)
        _run("short_conv", [*map(_flat, arrays)], pointers, *sizes)
    return ys


def _short_convs_backward(
    d_ys, xs, weights, states, bounds: Tensor, silu: Sequence[bool]
) -> tuple[Sequence[Tensor], ...]:
    widths = [*map(len, weights)]
    # Views of one tensor: the backward of the product that made x reads all of them at once.
    d_xs = xs[0].new_empty(*xs[0].shape[:2], sum(widths)).split(widths, -1)
    d_weights = [weight.new_zeros(weight.shape[::-1], dtype=torch.float32) for weight in weights]
    d_states = [torch.empty_like(state, memory_format=torch.contiguous_format) for state in states]

    none = [None] * len(xs)
    each = zip(xs, states or none, d_ys, d_xs, d_states or none, strict=True)
    for arrays, weight, d_weight, active in zip(each, weights, d_weights, silu, strict=True):
        pointers, sizes = [_wide(weight.T), d_weight, bounds], (len(bounds) - 1, *weight.shape)
        _run("short_conv_backward", [*map(_flat, arrays)], pointers, *sizes, active)
    return d_xs, [d.T.to(w.dtype) for d, w in zip(d_weights, weights, strict=True)], d_states


def _flat(x: Tensor | None) -> Tensor | None:
    """x `[B, T, D]` as `[B·T, D]`."""
    return None if x is None else rows_of(x, x.shape[2])


def _bounds(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Where sequences begin and the last one ends, int64 `[N + 1]`."""
    B, T = x.shape[:2]
    if cu_seqlens is None:
        return torch.arange(0, B * T + 1, T, device="cpu")
    return torch.tensor(bounds_of(cu_seqlens, T), device="cpu")


def _fit(*tensors: Tensor) -> bool:
    """Whether the C++ has these dtypes, and a call of it something to do."""
    are_readable = all(x.dtype in DTYPES and x.is_cpu for x in tensors)
    return are_readable and tensors[0].numel() > 0 and not torch.compiler.is_compiling()


def _wide(x: Tensor) -> Tensor:
    """x in fp32, without gaps."""
    return x.float().contiguous()


def _array(x: Tensor | None) -> Array:
    if x is None:
        return Array()
    return Array(x.data_ptr(), x.stride(0), x.dtype == torch.bfloat16)


def _run(
    name: str, arrays: Sequence[Tensor | None], pointers: Sequence[Tensor], *sizes: float
) -> None:
    """Calls the C++: tensors `[rows, ·]`, then addresses, sizes, and as many threads as the work is worth."""
    entries = max(x.numel() for x in arrays if x is not None)
    getattr(library(), name)(
        *(ctypes.byref(_array(x)) for x in arrays),
        *map(pointer, pointers),
        *(ctypes.c_float(x) if isinstance(x, float) else ctypes.c_long(x) for x in sizes),
        threads(entries // ENTRIES_A_THREAD),
    )
