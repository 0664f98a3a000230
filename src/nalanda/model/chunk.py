"""The chunkwise form of the recurrences in `ops`, as one differentiable operator."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunk_backward import chunk_backward, empty_grads
from .chunk_forward import Chunk, chunk_forward
from .chunk_order import chunk_of, wide_dtype
from .layers import no_autocast


class ChunkRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        kept: list[Chunk] = []
        outputs = chunk_forward(*args, kept=kept)
        # Saved as inputs are, so that the backward frees them and checkpointing drops them.
        parts = [chunk.tensors() for chunk in kept]
        ctx.parts = [(names, len(tensors)) for names, tensors in parts]
        _setup_context(ctx, args, outputs, [x for _, tensors in parts for x in tensors])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # read once: checkpointing refuses a second time
        tensors = iter(saved[_SAVED:])
        kept = [Chunk.of_tensors(names, [*itertools.islice(tensors, n)]) for names, n in ctx.parts]
        return _gradients(functools.partial(chunk_backward, kept=kept), ctx, saved[:_SAVED], *grads)


_SAVED = 10
"""The nine tensors among the op's inputs, and the states."""


def _setup_context(ctx, inputs, output, kept: Sequence[Tensor | None] = ()) -> None:
    *tensors, ctx.scale, ctx.chunk_size, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2], *kept)


def _gradients(
    function: Callable, ctx, saved: Sequence[Any], d_o: Tensor | None, d_final: Tensor | None, _
) -> tuple[Tensor | None, ...]:
    *inputs, states = saved
    v, initial_state = inputs[2], inputs[7]
    d_o = torch.zeros_like(v) if d_o is None else d_o
    with no_autocast(v):
        grads = function(d_o, d_final, *inputs, states, ctx.scale, ctx.chunk_size)
    *grads, d_initial = (
        None if x is None else dx for x, dx in zip(inputs[:-1], grads, strict=True)
    )
    if d_initial is not None:
        d_initial = d_initial.to(initial_state.dtype)
    return *grads, d_initial, None, None, None, None


# torch.compile sees the chunkwise form as one operator and its backward as another, not as an unrolled loop.
# Their namespace is this module's name, so that copies of this file in checkpoints do not clash.

_NAMESPACE = re.sub(r"\W", "_", __name__)
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor? erase, Tensor? write, "
    "Tensor? initial_state, Tensor? cu_seqlens"
)
chunk_op = torch.library.custom_op(
    f"{_NAMESPACE}::chunk_recurrence",
    chunk_forward,
    mutates_args=(),
    schema=f"({_INPUTS}, float scale, int chunk_size, bool save) -> (Tensor, Tensor, Tensor)",
)
_chunk_backward_op = torch.library.custom_op(
    f"{_NAMESPACE}::chunk_recurrence_backward",
    chunk_backward,
    mutates_args=(),
    schema=f"(Tensor d_o, Tensor? d_final, {_INPUTS}, Tensor states, float scale, int chunk_size) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@chunk_op.register_fake
def _(q, k, v, beta, g, erase, write, initial_state, cu_seqlens, scale, chunk_size, save):
    batch, length, heads, width = v.shape
    rows = 0
    if save and cu_seqlens is None and isinstance(length, int):
        rows = -(-length // chunk_of(chunk_size, [length], q, v)) * batch
    elif save:  # the number of chunks depends on the values of cu_seqlens, or on a dynamic length
        rows = torch.library.get_ctx().new_dynamic_size()
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = wide_dtype(q, k, v, beta, g, erase, write, initial_state)
    state = v.new_empty(sequences, heads, q.shape[3], width, dtype=dtype)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    return o, state, state.new_empty(rows * heads, q.shape[3], width)


@_chunk_backward_op.register_fake
def _(
    d_o,
    d_final,
    q,
    k,
    v,
    beta,
    g,
    erase,
    write,
    initial_state,
    cu_seqlens,
    states,
    scale,
    chunk_size,
):
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    d_initial = states.new_empty(sequences, v.shape[2], *states.shape[1:])
    return *empty_grads(q, k, v, beta, g, erase, write), d_initial


def _operator_gradients(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(_chunk_backward_op, ctx, ctx.saved_tensors, *grads)


chunk_op.register_autograd(_operator_gradients, setup_context=_setup_context)
