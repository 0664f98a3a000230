"""The chunkwise form of the recurrences in `ops`, as one differentiable operator.

`chunk_order` says which chunks are computed together, `chunk_forward` has the formulas and the forward,
`chunk_backward` the backward.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call, dtype_of
from .chunk_backward import chunk_backward, empty_gradients
from .chunk_forward import Chunk, chunk_forward
from .chunk_order import chunk_of
from .layers import no_autocast, once_differentiable

TENSORS = len(Call._fields)


def run_chunkwise(call: Call, scale: float, chunk_size: int, backend: str) -> tuple[Tensor, Tensor]:
    """The outputs and the final states. backend: "auto", or "torch" for no kernel in any part."""
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call)
    run = chunk_op if torch.compiler.is_compiling() else ChunkRecurrence.apply
    o, state, _ = run(*call, scale, chunk_size, backend, save)
    return o, state


class ChunkRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        saved_chunks: list[Chunk] = []
        call = Call(*inputs[:TENSORS])
        outputs = chunk_forward(call, *inputs[TENSORS:], saved_chunks=saved_chunks)
        # Saved as inputs are, so that the backward frees them and checkpointing drops them.
        of_chunks = [chunk.tensors() for chunk in saved_chunks]
        ctx.chunks = [(names, len(tensors)) for names, tensors in of_chunks]
        _setup_context(ctx, inputs, outputs, [x for _, tensors in of_chunks for x in tensors])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # read once: checkpointing refuses a second time
        tensors = iter(saved[TENSORS + 1 :])
        saved_chunks = [
            Chunk.of_tensors(names, [*itertools.islice(tensors, count)])
            for names, count in ctx.chunks
        ]
        backward = functools.partial(_backward, saved_chunks=saved_chunks)
        return _gradients(backward, ctx, saved[: TENSORS + 1], *grads)


# The flat edge: what autograd and torch.compile call takes tensors and numbers, not NamedTuples.


def _forward(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    return chunk_forward(Call(*inputs[:TENSORS]), *inputs[TENSORS:])


def _backward(
    d_o: Tensor, d_final: Tensor | None, *inputs, saved_chunks: list[Chunk] | None = None
) -> tuple[Tensor, ...]:
    call = Call(*inputs[:TENSORS])
    return chunk_backward(d_o, d_final, call, *inputs[TENSORS:], saved_chunks=saved_chunks)


def _setup_context(ctx, inputs, output, of_chunks: Sequence[Tensor | None] = ()) -> None:
    """Saves the call, the states and the tensors of the chunks, in this order."""
    *tensors, ctx.scale, ctx.chunk_size, ctx.backend, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2], *of_chunks)


def _gradients(
    function: Callable, ctx, saved: Sequence[Any], d_o: Tensor | None, d_final: Tensor | None, _
) -> tuple[Tensor | None, ...]:
    """One gradient for each input of the operator."""
    *inputs, states = saved
    call = Call(*inputs)
    # None where only the final state has a gradient.
    d_o = torch.zeros_like(call.v) if d_o is None else d_o
    with no_autocast(call.v):
        grads = function(d_o, d_final, *call, states, ctx.scale, ctx.chunk_size, ctx.backend)

    # Operators return empty tensors in place of absent gradients; autograd wants None.
    grads: list[Any] = [None if x is None else d_x for x, d_x in zip(call[:-1], grads, strict=True)]
    if call.initial_state is not None:
        grads[-1] = grads[-1].to(call.initial_state.dtype)  # states are fp32 at least
    return *grads, *[None] * 5  # of cu_seqlens, scale, chunk_size, backend and save


# torch.compile sees the chunkwise form as one operator and its backward as another, not as an unrolled loop.
# Their namespace is this module's name, so that copies of this file in checkpoints do not clash.

_NAMESPACE = re.sub(r"\W", "_", __name__)
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor? erase, Tensor? write, "
    "Tensor? initial_state, Tensor? cu_seqlens"
)
chunk_op = torch.library.custom_op(
    f"{_NAMESPACE}::chunk_recurrence",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}, float scale, int chunk_size, str backend, bool save) -> (Tensor, Tensor, Tensor)",
)
_chunk_backward_op = torch.library.custom_op(
    f"{_NAMESPACE}::chunk_recurrence_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor d_o, Tensor? d_final, {_INPUTS}, Tensor states, float scale, int chunk_size, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@chunk_op.register_fake
def _(*inputs):
    call, (_, chunk_size, _, save) = Call(*inputs[:TENSORS]), inputs[TENSORS:]
    batch, length, heads, V = call.v.shape
    K = call.q.shape[3]

    chunks = 0
    if save and call.cu_seqlens is None and isinstance(length, int):
        # Without cu_seqlens each row has as many chunks.
        chunks = -(-length // chunk_of(chunk_size, [length], call.q, call.v)) * batch
    elif save:  # the number of chunks depends on the values of cu_seqlens, or on a dynamic length
        chunks = torch.library.get_ctx().new_dynamic_size()

    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    state = call.v.new_empty(_sequences(call), heads, K, V, dtype=dtype_of(call))
    return o, state, state.new_empty(chunks * heads, K, V)


@_chunk_backward_op.register_fake
def _(d_o, d_final, *inputs):
    call, states = Call(*inputs[:TENSORS]), inputs[TENSORS]
    d_initial = states.new_empty(_sequences(call), call.v.shape[2], *states.shape[1:])
    return *empty_gradients(call), d_initial


def _sequences(call: Call) -> int:
    return call.v.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1


def _operator_gradients(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(_chunk_backward_op, ctx, ctx.saved_tensors, *grads)


chunk_op.register_autograd(_operator_gradients, setup_context=_setup_context)
