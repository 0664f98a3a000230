"""SwiGLU, RMSNorm and short convolutions as autograd has them, on any device.

A Function takes two functions of the device before its tensors: `run` makes or fills the outputs, and
`run_backward` the gradients.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def once_differentiable(backward: Callable) -> Callable:
    """A Function's backward whose result has no derivative. Raises RuntimeError where one could be asked for.

    torch's decorator alone leaves what lies behind it out of a second derivative by `torch.autograd.grad`.
    """
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = type(ctx).__name__
            raise RuntimeError(
                f"create_graph=True: {name} has no derivative; take the difference of two gradients"
            )
        return once(ctx, *grads)

    return run


class SwiGLU(torch.autograd.Function):
    """a, b `[rows, N]` to SiLU(a) ⊙ b, in the dtype to which both promote."""

    @staticmethod
    def forward(ctx, run, run_backward, a, b):
        ctx.run_backward = run_backward
        ctx.save_for_backward(a, b)
        y = a.new_empty(a.shape, dtype=torch.promote_types(a.dtype, b.dtype))
        run(a, b, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        a, b = ctx.saved_tensors
        d_a, d_b = a.new_empty(a.shape), b.new_empty(b.shape)
        ctx.run_backward(a, b, d_y.contiguous(), d_a, d_b)
        return None, None, d_a, d_b


class RMSNorm(torch.autograd.Function):
    """x, add `[rows, V]`, weight `[V]`, gate `[rows / H, H·V]` to x + add and the norm, both `[rows, V]`.

    `run_backward` returns partial sums of the weight's gradient, fp32 `[·, V]`; None where nothing needs them.
    """

    @staticmethod
    def forward(ctx, run, run_backward, x, add, weight, gate, eps, dtype):
        total = x
        if add is not None:
            total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, add.dtype))
        y = x.new_empty(x.shape, dtype=dtype)
        H = 1 if gate is None else gate.shape[1] // x.shape[1]
        run(x, add, weight, gate, total, y, H, eps)

        ctx.save_for_backward(total, weight, gate)
        # Either result may be unused; its gradient is then None.
        ctx.set_materialize_grads(False)
        ctx.run_backward, ctx.numbers = run_backward, (H, eps)
        ctx.dtypes = x.dtype, None if add is None else add.dtype
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total, d_y):
        total, weight, gate = ctx.saved_tensors
        dtype, added = ctx.dtypes
        d_total = None if d_total is None else d_total.contiguous()
        d_y = torch.zeros_like(total) if d_y is None else d_y.contiguous()

        d_x = total.new_empty(total.shape, dtype=dtype)
        # dx = dadd: where dtypes agree, one tensor is both.
        d_add = None if added in (None, dtype) else total.new_empty(total.shape, dtype=added)
        d_gate = None if gate is None else gate.new_empty(gate.shape)
        tensors = total, weight, gate, d_total, d_y, d_x, d_add, d_gate
        sums = ctx.run_backward(*tensors, *ctx.numbers, ctx.needs_input_grad[4])
        d_weight = None if sums is None else sums.sum(0).to(weight.dtype)
        return None, None, d_x, d_x if added == dtype else d_add, d_weight, d_gate, None, None


class ShortConvs(torch.autograd.Function):
    """xs `[B, T, D]`, weights `[D, W]` and states `[N, W − 1, D]`, or none, to ys `[B, T, D]`.

    bounds: of the sequences, as the device takes them. `run` returns ys, and `run_backward` lists of dxs, dweights
    and dstates.
    """

    @staticmethod
    def forward(ctx, run, run_backward, count, bounds, silu, *tensors):
        ctx.run_backward, ctx.count, ctx.bounds, ctx.silu = run_backward, count, bounds, silu
        ctx.save_for_backward(*tensors)
        return tuple(run(*in_threes(tensors, count), bounds, silu))

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_ys):
        inputs = in_threes(ctx.saved_tensors, ctx.count)
        gradients = ctx.run_backward(d_ys, *inputs, ctx.bounds, ctx.silu)
        return None, None, None, None, None, *itertools.chain(*gradients)


def in_threes(tensors: Sequence[Tensor], count: int) -> tuple[Sequence[Tensor], ...]:
    """xs, weights and states of `count` convolutions."""
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
