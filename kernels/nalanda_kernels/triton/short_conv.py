"""Short causal depthwise convolution, y_t = act(Σ_i w_i ⊙ x_{t−W+1+i}), packed or dense, and its backward.

A program handles a block of channels and up to `SIZE` tokens of one sequence, so two scalars bound what it
reads. The W shifted tiles of x come from caches: every element of x, y and their gradients crosses device
memory once. Token s has dx = Σ_j w_{W−1−j} ⊙ dz_{s+j} with dz = dy ⊙ act'(z); z is recomputed from x if there
is an activation. The state's gradient is the same sum at the W − 1 places before the first token.

One launch does several convolutions of the same tokens, as a layer has for q, k and v. Kernels take tuples
with an entry for each, and a program's block of channels lies in one of them.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalanda_kernels import Unsupported, interpreting
from nalanda_kernels.autograd import ShortConvs, in_threes
from nalanda_kernels.tensors import bounds_of, last_inputs
from nalanda_kernels.triton.common import (
    FUSION,
    TAGS,
    chunks_between,
    name_of,
    on_its_device,
    power_of_two,
)
from nalanda_kernels.triton.tiles import DTYPES, load

SIZE = 64  # tokens per program; the partial sums of dweight are then 4 % of the traffic


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def load_taps(weight, c, D: tl.constexpr, W: tl.constexpr):
    """W tiles [1, BD] in fp32 of weight [D, W]."""
    # A tuple of tiles, because a tile [W, BD] could not be indexed.
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (load(weight + c * W + i, c < D)[None, :],)  # noqa: RUF005
    return taps


@triton.jit
def load_input(x, state, stride, row, real, n, first, end, c, D: tl.constexpr, W: tl.constexpr):
    """[BT, BD] of x at `row` [BT]; up to W − 1 places before the sequence, of the state; elsewhere 0."""
    m = (c < D)[None, :]
    inside = real & (row >= first) & (row < end)
    y = tl.load(x + row[:, None] * stride + c[None, :], mask=inside[:, None] & m, other=0.0)

    if state is not None:
        # The state's last row W − 2 is the token before the sequence.
        past = row - first + (W - 1)
        inside = real & (past >= 0) & (row < first)
        p = state + (n * (W - 1) + past)[:, None] * D + c[None, :]
        y += load(p, inside[:, None] & m)
    return y


@triton.jit
def load_block(blocks, i):
    """The block's sequence, that sequence's first token and end, and the block's first token; int64."""
    p = blocks + 4 * i
    return tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)


@triton.jit
def forward_kernel(
    x,
    weight,
    state,
    y,
    stride,
    blocks,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """y of SIZE tokens and BD channels of one of the convolutions; each argument is a tuple of theirs."""
    # Blocks of channels are counted over all convolutions; i_c becomes the number within one.
    i_c = tl.program_id(1)
    for p in tl.static_range(len(D)):
        if (i_c >= 0) & (i_c < tl.cdiv(D[p], BD)):
            forward_block(
                x[p],
                weight[p],
                state[p],
                y[p],
                stride[p],
                blocks,
                i_c,
                D[p],
                W,
                SILU[p],
                SIZE,
                BT,
                BD,
            )
        i_c -= tl.cdiv(D[p], BD)


@triton.jit
def forward_block(
    x,
    weight,
    state,
    y,
    stride,
    blocks,
    i_c,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """y_t = act(Σ_i w_i ⊙ x_{t−W+1+i}) of a block of one convolution, BT tokens at a time."""
    # A block never crosses the border of a sequence.
    n, first, end, start = load_block(blocks, tl.program_id(0))
    c = i_c * BD + tl.arange(0, BD)
    w = load_taps(weight, c, D, W)
    count = tl.minimum(end - start, SIZE).to(tl.int32)

    for i_t in range(0, count, BT):
        t = i_t + tl.arange(0, BT)
        # row counts over the batch, t over the block.
        row, real = start + t, t < count

        # [BT, BD]
        z = tl.zeros([BT, BD], dtype=tl.float32)
        for i in tl.static_range(W):
            # Places before the sequence come from the state, or are 0.
            z += w[i] * load_input(
                x, state, stride, row + (i - W + 1), real, n, first, end, c, D, W
            )

        if SILU:
            z = z * tl.sigmoid(z)
        p = y + row[:, None] * D + c[None, :]
        tl.store(p, z.to(y.dtype.element_ty), mask=real[:, None] & (c < D)[None, :])


@triton.jit
def d_input(
    x,
    w,
    state,
    d_y,
    stride,
    row,
    real,
    n,
    first,
    end,
    c,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    DW: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """The gradient of the input at `row` [BT, BD]; rows may lie before the sequence.

        dx_s = Σ_j w_{W−1−j} ⊙ dz_{s+j},        dz = dy ⊙ act'(z)

    With DW also the W tiles [BD] of Σ dz_row ⊙ x_{row−W+1+i}.
    """
    inputs = ()  # x from `row` − W + 1 on, in its own dtype to save registers
    # SiLU's z at row + s needs x up to row + s; dweight alone x up to `row`.
    for j in tl.static_range(2 * W - 1 if SILU else W if DW else 0):
        inputs = inputs + (  # noqa: RUF005
            load_input(x, state, stride, row + (j - W + 1), real, n, first, end, c, D, W),
        )

    dx = tl.zeros([BT, BD], dtype=tl.float32)
    dw = ()
    for s in tl.static_range(W):
        # dz is 0 after the sequence, and before its first token.
        inside = real & (row + s >= first) & (row + s < end)
        p = d_y + (row + s)[:, None] * D + c[None, :]
        dz = load(p, inside[:, None] & (c < D)[None, :])

        # z again, from the inputs; then SiLU'.
        if SILU:
            z = tl.zeros([BT, BD], dtype=tl.float32)
            for i in tl.static_range(W):
                z += w[i] * inputs[s + i]
            sigmoid = tl.sigmoid(z)
            dz *= sigmoid * (1.0 + z * (1.0 - sigmoid))

        # y_{row+s} has w_{W−1−s} ⊙ x_row.
        dx += w[W - 1 - s] * dz
        # Each dz once: that of the row itself.
        if DW and s == 0:
            for i in tl.static_range(W):
                dw = dw + (tl.sum(dz * inputs[i], 0),)  # noqa: RUF005
    return dx, dw


@triton.jit
def backward_kernel(
    x,
    weight,
    state,
    d_y,
    d_x,
    d_weight,
    stride,
    blocks,
    ALL,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """dx, and partial sums of dweight, of one block of one of the convolutions."""
    i_c, before = tl.program_id(1), 0
    for p in tl.static_range(len(D)):
        if (i_c >= 0) & (i_c < tl.cdiv(D[p], BD)):
            backward_block(
                x[p],
                weight[p],
                state[p],
                d_y[p],
                d_x[p],
                d_weight + before,
                stride[p],
                blocks,
                ALL,
                i_c,
                D[p],
                W,
                SILU[p],
                SIZE,
                BT,
                BD,
            )
        i_c -= tl.cdiv(D[p], BD)
        # The convolutions' channels lie side by side in d_x and d_weight.
        before += D[p]


@triton.jit
def backward_block(
    x,
    weight,
    state,
    d_y,
    d_x,
    d_weight,
    stride,
    blocks,
    ALL,
    i_c,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """dx, in rows of all ALL channels, and the program's partial sums of dweight [blocks, W, ALL]."""
    i = tl.program_id(0)
    n, first, end, start = load_block(blocks, i)
    c = i_c * BD + tl.arange(0, BD)
    w = load_taps(weight, c, D, W)
    # The last block of a sequence may be shorter.
    count = tl.minimum(end - start, SIZE).to(tl.int32)

    # Sums over the block's tokens, W tiles [BD] in registers.
    dw = ()
    for _ in tl.static_range(W):
        dw = dw + (tl.zeros([BD], dtype=tl.float32),)  # noqa: RUF005

    for i_t in range(0, count, BT):
        t = i_t + tl.arange(0, BT)
        row, real = start + t, t < count
        dx, dw_tile = d_input(
            x, w, state, d_y, stride, row, real, n, first, end, c, D, W, SILU, True, BT, BD
        )
        p = d_x + row[:, None] * ALL + c[None, :]
        tl.store(p, dx.to(d_x.dtype.element_ty), mask=real[:, None] & (c < D)[None, :])

        # Tuples cannot be changed: a new one for each step.
        total = ()
        for i_w in tl.static_range(W):
            total = total + (dw[i_w] + dw_tile[i_w],)  # noqa: RUF005
        dw = total

    for i_w in tl.static_range(W):
        tl.store(d_weight + (i.to(tl.int64) * W + i_w) * ALL + c, dw[i_w], mask=c < D)


@triton.jit
def state_kernel(
    x,
    weight,
    state,
    d_y,
    d_state,
    stride,
    bounds,
    N,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """dstate [N, W−1, D]; a tile's row is one place of one sequence."""
    i = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    n, real = i // (W - 1), i < N * (W - 1)
    # [BT], each row's own sequence.
    first = tl.load(bounds + n, mask=real, other=0)
    end = tl.load(bounds + n + 1, mask=real, other=0)

    # The place, counted over the batch; it lies before its sequence.
    row, i_c = first - (W - 1) + i % (W - 1), tl.program_id(1)

    for p in tl.static_range(len(D)):
        if (i_c >= 0) & (i_c < tl.cdiv(D[p], BD)):
            c = i_c * BD + tl.arange(0, BD)
            w = load_taps(weight[p], c, D[p], W)

            # A place before the sequence is read by the first W − 1 tokens alone.
            dx, _ = d_input(
                x[p],
                w,
                state[p],
                d_y[p],
                stride[p],
                row,
                real,
                n,
                first,
                end,
                c,
                D[p],
                W,
                SILU[p],
                False,
                BT,
                BD,
            )

            at = d_state[p] + i[:, None] * D[p] + c[None, :]
            tl.store(
                at, dx.to(d_state[p].dtype.element_ty), mask=real[:, None] & (c < D[p])[None, :]
            )
        i_c -= tl.cdiv(D[p], BD)


# -------------------------------------------------------------------------------------------------- launches


class BlockTable(NamedTuple):
    """Where the blocks lie, on the device.

    blocks: int64 [blocks, 4]: the sequence, its first token, its end, and the block's first token.
    bounds: int64 [N + 1], where sequences begin.
    """

    blocks: Tensor
    bounds: Tensor


def block_table(x: Tensor, cu_seqlens: Tensor | None) -> BlockTable:
    """The table of x `[B, T, D]`. Raises ValueError if cu_seqlens does not rise from 0 to T."""
    batch, length, _ = x.shape
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens: B = {batch}; flatten the batch into one row, B = 1")
    bounds = None if cu_seqlens is None else bounds_of(cu_seqlens, length)
    return _block_table(batch, length, bounds, x.device)


@functools.lru_cache(maxsize=32)  # all layers ask for the same one, forward and backward
def _block_table(
    batch: int, length: int, bounds: tuple[int, ...] | None, device: torch.device
) -> BlockTable:
    start, count, cu, first, *_ = chunks_between(batch, length, bounds, SIZE, torch.device("cpu"))
    # The sequence of each block; `count` reaches to the sequence's end.
    n = torch.arange(len(first) - 1).repeat_interleave(first.diff())
    table = torch.stack([n, cu[n], start + count, start], 1)
    return BlockTable(table.to(device, non_blocking=True), cu.to(device, non_blocking=True))


def _tile_sizes(kernel: str, D: int, W: int, silu: bool) -> dict[str, int]:
    """Tile sizes. One warp has whole rows of its channels, so sums over tokens stay within a thread.

    Registers limit the rows of a step: with SiLU the backward holds 2W − 1 rows of x for each.
    """
    BD, BT = 256 if W <= 4 else 128, 4
    if kernel != "forward":
        BD, BT = 128 if silu else BD, 1 if W > 4 else 2
    BT = SIZE if interpreting() else BT  # the interpreter needs as long for one row as for many
    return {"BD": min(BD, power_of_two(D)), "BT": BT, "num_warps": 1}


def _launch(
    kernel, name: str, count: int, weights: Sequence[Tensor], silu: Sequence[bool], **values
):
    """Launches a kernel of all convolutions over so many blocks, or places of a state. name: as in `_tile_sizes`."""
    widths, W = tuple(map(len, weights)), weights[0].shape[1]
    tiles = _tile_sizes(name, max(widths), W, any(silu))
    # All convolutions take tiles for the widest, so that their blocks can be counted together.
    blocks = sum(triton.cdiv(D, tiles["BD"]) for D in widths)

    grid = (count if name != "state" else triton.cdiv(count, tiles["BT"]), blocks)
    kernel[grid](
        **values, weight=tuple(weights), D=widths, W=W, SILU=tuple(silu), **tiles, **FUSION
    )


def _forward(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    silu: Sequence[bool],
) -> list[Tensor]:
    ys, blocks = [x.new_empty(x.shape) for x in xs], block_table(xs[0], cu_seqlens).blocks
    _launch(
        forward_kernel,
        "forward",
        len(blocks),
        weights,
        silu,
        x=tuple(xs),
        state=_or_none(states, xs),
        y=tuple(ys),
        stride=_token_strides(xs),
        blocks=blocks,
        SIZE=SIZE,
    )
    return ys


def _or_none(states: Sequence[Tensor], xs: Sequence[Tensor]) -> tuple:
    return tuple(states) or (None,) * len(xs)


def _token_strides(xs: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x.stride(1) for x in xs)


def _backward(
    d_ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    silu: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """dx `[B, T, ΣD]` and dweight `[ΣD, W]` of all convolutions side by side, and a list of dstates."""
    widths, W = [*map(len, weights)], weights[0].shape[1]
    blocks, bounds = block_table(xs[0], cu_seqlens)
    # [B, T, ΣD]
    d_x = xs[0].new_empty(*xs[0].shape[:2], sum(widths))
    d_weight = d_x.new_empty(len(blocks), W, sum(widths), dtype=torch.float32)  # a block's sums
    shared = {
        "x": tuple(xs),
        "state": _or_none(states, xs),
        "d_y": tuple(d.contiguous() for d in d_ys),
        "stride": _token_strides(xs),
    }
    _launch(
        backward_kernel,
        "backward",
        len(blocks),
        weights,
        silu,
        **shared,
        d_x=d_x.split(widths, -1),
        d_weight=d_weight,
        blocks=blocks,
        ALL=sum(widths),
        SIZE=SIZE,
    )

    d_states = [torch.empty_like(state) for state in states]
    if states:
        N = len(states[0])
        count = N * (W - 1)
        more = {"d_state": tuple(d_states), "bounds": bounds, "N": N}
        _launch(state_kernel, "state", count, weights, silu, **shared, **more)
    # [blocks, W, ΣD] to [ΣD, W]; the order of the sum is fixed.
    d_weight = d_weight.sum(0).T.to(weights[0].dtype).contiguous()
    return d_x, d_weight, d_states


def _gradients(
    backward, d_ys, xs, weights, states, cu_seqlens, silu
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """dxs, dweights and dstates, by `_backward` or its operator."""
    d_x, d_weight, d_states = backward(d_ys, xs, weights, states, cu_seqlens, silu)
    sizes = [*map(len, weights)]
    # Views of one tensor: the backward of the product that made x reads all of them at once.
    return [*d_x.split(sizes, -1)], [*d_weight.split(sizes)], d_states


# torch.compile sees forward and backward as one operator each. Eager calls avoid the operators' overhead.
_forward_op = torch.library.custom_op(
    "nalanda_kernels::short_convs",
    on_its_device(_forward),
    mutates_args=(),
    tags=TAGS,
    schema="(Tensor[] xs, Tensor[] weights, Tensor[] states, Tensor? cu_seqlens, bool[] silu) -> Tensor[]",
)
_backward_op = torch.library.custom_op(
    "nalanda_kernels::short_convs_backward",
    _backward,
    mutates_args=(),
    tags=TAGS,
    schema="(Tensor[] d_ys, Tensor[] xs, Tensor[] weights, Tensor[] states, Tensor? cu_seqlens, bool[] silu) "
    "-> (Tensor, Tensor, Tensor[])",
)


@_forward_op.register_fake
def _(xs, weights, states, cu_seqlens, silu):
    return [x.new_empty(x.shape) for x in xs]


@_backward_op.register_fake
def _(d_ys, xs, weights, states, cu_seqlens, silu):
    D, x, weight = sum(map(len, weights)), xs[0], weights[0]
    d_states = [torch.empty_like(state) for state in states]
    return x.new_empty(*x.shape[:2], D), weight.new_empty(D, weight.shape[1]), d_states


def _setup_context(ctx, inputs, output) -> None:
    xs, weights, states, cu_seqlens, ctx.silu = inputs
    ctx.count = len(xs)
    ctx.save_for_backward(cu_seqlens, *xs, *weights, *states)


def _op_backward(ctx, d_ys) -> tuple:
    cu_seqlens, *tensors = ctx.saved_tensors
    inputs = *in_threes(tensors, ctx.count), cu_seqlens, ctx.silu
    return *_gradients(_backward_op, d_ys, *inputs), None, None


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)


def short_convs(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    states: Sequence[Tensor] | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    activations: Sequence[str | None] = (None,),
    output_final_state: bool = False,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Several convolutions of the same tokens, y_t = act(Σ_i w_i ⊙ x_{t−W+1+i}) within each sequence.

    xs: `[B, T, D]` each, or packed `[1, ΣT, D]` with cu_seqlens (integers `[N + 1]` on the host).
    weights: `[D, W]` each, 2 ≤ W ≤ 8; the last tap multiplies the token itself.
    states: `[N, W−1, D]` each, the inputs before the first token, oldest first; None for zeros.
    activations: None or "silu" each.

    Returns each y in the dtype of x, and the new states if output_final_state. Sums are fp32.
    Raises Unsupported for other dtypes or widths, inputs or weights that differ in theirs, or no tokens.
    """
    input_dtypes, weight_dtypes = {x.dtype for x in xs}, {w.dtype for w in weights}
    for dtypes in (input_dtypes, weight_dtypes):
        if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
            inputs, others = _join_names(input_dtypes), _join_names(weight_dtypes)
            raise Unsupported(f"{inputs} inputs with {others} weights")
    widths = {w.shape[1] for w in weights}
    if len(widths) > 1 or not 2 <= min(widths) <= 8:
        raise Unsupported(f"{', '.join(map(str, sorted(widths)))} taps: from 2 to 8")
    if not set(activations) <= {None, "silu"}:
        unknown = next(x for x in activations if x not in (None, "silu"))
        raise Unsupported(f"the activation {unknown!r}")
    if not xs[0].numel():
        raise Unsupported("inputs without tokens")

    past = [state.to(xs[0].dtype).contiguous() for state in states or ()]
    xs, weights = [*map(_align_rows, xs)], [weight.contiguous() for weight in weights]
    silu = [activation == "silu" for activation in activations]
    if torch.compiler.is_compiling():
        ys = _forward_op(xs, weights, past, cu_seqlens, silu)
    else:
        arguments = len(xs), cu_seqlens, silu
        run_backward = functools.partial(_gradients, _backward)
        ys = ShortConvs.apply(_forward, run_backward, *arguments, *xs, *weights, *past)

    if not output_final_state:
        return [*ys], None
    # The new state is the last W − 1 inputs.
    gap = weights[0].shape[1] - 1
    states = past or [None] * len(xs)
    return [*ys], [
        last_inputs(x, state, gap, cu_seqlens) for x, state in zip(xs, states, strict=True)
    ]


def _join_names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(map(name_of, dtypes)))


def _align_rows(x: Tensor) -> Tensor:
    """x `[B, T, D]` whose tokens are equally far apart, as those of a slice of channels are."""
    fits = x.stride(2) == 1 and (len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # also where T = 1
