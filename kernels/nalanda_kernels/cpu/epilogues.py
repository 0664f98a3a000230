"""SwiGLU, RMSNorm with residual and gate, and short convolutions in one pass each way, on a CPU.

Each takes fp32 and bf16, mixed too, and computes in fp32. It returns None for other dtypes and where torch.compile
traces: torch computes these. It raises Unsupported where the library cannot be built.
"""

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.feature_maps import DTYPES
from nalanda_kernels.cpu.structures import MOST_TAPS, SPAN, Array
from nalanda_kernels.tensors import bounds_of, last_inputs, rows_of

ENTRIES_A_THREAD = 8192  # for fewer a thread costs more than it gains


def swiglu(a: Tensor, b: Tensor) -> Tensor | None:
    """SiLU(a) ⊙ b of equal shapes, in the dtype to which both promote."""
    if not _fit(a, b) or a.shape != b.shape:
        return None
    N = a.shape[-1]
    return _SwiGLU.apply(rows_of(a, N), rows_of(b, N)).view(a.shape)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        y = a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, b.dtype))
        _run("swiglu", [a, b, y], [], *a.shape)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        d_a, d_b = a.new_empty(a.shape), b.new_empty(b.shape)
        _run("swiglu_backward", [a, b, d_y.contiguous(), d_a, d_b], [], *a.shape)
        return d_a, d_b


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
    total, y = _RMSNorm.apply(rows_of(x, V), add, weight, gate, float(eps), dtype)
    return total.view(x.shape), y.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    """x, add `[rows, V]`, weight `[V]`, gate `[rows / H, H·V]` to x + add and the norm, both `[rows, V]`."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        add: Tensor | None,
        weight: Tensor,
        gate: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        (rows, V), total = x.shape, x
        if add is not None:
            total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, add.dtype))
        y = x.new_empty(x.shape, dtype=dtype)
        H = 1 if gate is None else gate.shape[1] // V
        _run("rms_norm", [x, add, gate, total, y], [_wide(weight)], rows, H, V, eps)

        ctx.save_for_backward(total, weight, gate)
        # Either result may be unused; its gradient is then None.
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.dtypes = eps, (x.dtype, None if add is None else add.dtype)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total: Tensor | None, d_y: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, gate = ctx.saved_tensors
        (rows, V), (dtype, added) = total.shape, ctx.dtypes
        d_total = None if d_total is None else d_total.contiguous()
        d_y = torch.zeros_like(total) if d_y is None else d_y.contiguous()

        d_x = total.new_empty(rows, V, dtype=dtype)
        # dx = dadd: where dtypes agree, one tensor is both.
        d_add = None if added in (None, dtype) else total.new_empty(rows, V, dtype=added)
        d_gate = None if gate is None else gate.new_empty(gate.shape)
        d_weight = total.new_empty(-(-rows // SPAN), V, dtype=torch.float32)
        H = 1 if gate is None else gate.shape[1] // V
        arrays, weights = [total, gate, d_total, d_y, d_x, d_add, d_gate], [_wide(weight), d_weight]
        _run("rms_norm_backward", arrays, weights, rows, H, V, ctx.eps)
        d_weight = d_weight.sum(0).to(weight.dtype)
        return d_x, d_x if added == dtype else d_add, d_weight, d_gate, None, None


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
    ys = _ShortConvs.apply(len(xs), cu_seqlens, silu, *xs, *weights, *past)
    if not output_final_state:
        return [*ys], None
    before = past or [None] * len(xs)
    after = (last_inputs(x, state, W - 1, cu_seqlens) for x, state in zip(xs, before, strict=True))
    return [*ys], [*after]


class _ShortConvs(torch.autograd.Function):
    """xs `[B, T, D]`, weights `[D, W]` and states `[N, W − 1, D]`, or none, to ys `[B, T, D]`."""

    @staticmethod
    def forward(
        ctx, count: int, cu_seqlens: Tensor | None, silu: list[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        bounds = _bounds(tensors[0], cu_seqlens)
        ctx.count, ctx.bounds, ctx.silu = count, bounds, silu
        ctx.save_for_backward(*tensors)
        ys = []
        for x, weight, state, active in _each(tensors, count, silu):
            ys.append(y := x.new_empty(x.shape))
            pointers, sizes = [_wide(weight.T), bounds], (len(bounds) - 1, *weight.shape, active)
            _run("short_conv", [*map(_flat, (x, state, y))], pointers, *sizes)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_ys: Tensor) -> tuple[Tensor | None, ...]:
        tensors, n = ctx.saved_tensors, ctx.count
        xs, weights, states = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        widths = [*map(len, weights)]
        # Views of one tensor: the backward of the product that made x reads all of them at once.
        d_xs = xs[0].new_empty(*xs[0].shape[:2], sum(widths)).split(widths, -1)
        d_states = [
            torch.empty_like(state, memory_format=torch.contiguous_format) for state in states
        ]
        d_weights = [
            weight.new_zeros(weight.shape[::-1], dtype=torch.float32) for weight in weights
        ]

        gradients = zip(d_ys, d_xs, d_states or [None] * n, d_weights, strict=True)
        for (x, weight, state, active), (d_y, d_x, d_state, d_weight) in zip(
            _each(tensors, n, ctx.silu), gradients, strict=True
        ):
            arrays = [*map(_flat, (x, state, d_y, d_x, d_state))]
            pointers = [_wide(weight.T), d_weight, ctx.bounds]
            sizes = len(ctx.bounds) - 1, *weight.shape, active
            _run("short_conv_backward", arrays, pointers, *sizes)
        d_weights = [d.T.to(weight.dtype) for d, weight in zip(d_weights, weights, strict=True)]
        return None, None, None, *d_xs, *d_weights, *d_states


def _each(
    tensors: Sequence[Tensor], count: int, silu: list[bool]
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, bool]]:
    """x, weight, state or None, and whether SiLU follows, of each convolution."""
    xs, weights, states = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    return zip(xs, weights, states or [None] * count, silu, strict=True)


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
    known = all(x.dtype in DTYPES and x.is_cpu for x in tensors)
    return known and tensors[0].numel() > 0 and not torch.compiler.is_compiling()


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
    threads = max(1, min(torch.get_num_threads(), entries // ENTRIES_A_THREAD))
    getattr(library(), name)(
        *(ctypes.byref(_array(x)) for x in arrays),
        *(ctypes.c_void_p(x.data_ptr()) for x in pointers),
        *(ctypes.c_float(x) if isinstance(x, float) else ctypes.c_long(x) for x in sizes),
        threads,
    )
