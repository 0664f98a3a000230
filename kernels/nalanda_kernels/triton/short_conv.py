"""Short causal depthwise convolution, y_t = act(Σ_i w_i ⊙ x_{t−W+1+i}), packed or dense, and its backward.

A program handles a block of channels and up to `SIZE` tokens of one sequence, so two scalars bound what it
reads. The W shifted tiles of x come from caches: every element of x, y and their gradients crosses device
memory once. Token s has dx = Σ_j w_{W−1−j} ⊙ dz_{s+j} with dz = dy ⊙ act'(z); z is recomputed from x if there
is an activation. The state's gradient is the same sum at the W − 1 places before the first token.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalanda_kernels import Unsupported, interpreting
from nalanda_kernels.triton.common import bounds_of, chunks_between, power_of_two

SIZE = 64  # tokens per program; the partial sums of dweight are then 4 % of the traffic
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def load_taps(weight, c, D: tl.constexpr, W: tl.constexpr):
    """W tiles [1, BD] in fp32 of weight [D, W]."""
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (tl.load(weight + c * W + i, mask=c < D, other=0.0).to(tl.float32)[None, :],)  # noqa: RUF005
    return taps


@triton.jit
def load_input(
    x, state, row, rows, n, first, end, c, D: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr
):
    """[BT, BD] of x at `row` [BT]; up to W − 1 places before the sequence, of the state; elsewhere 0."""
    m, of = (c < D)[None, :], rows & (row >= first) & (row < end)
    y = tl.load(x + row[:, None] * D + c[None, :], mask=of[:, None] & m, other=0.0)
    if HAS_STATE:
        place = row - first + (W - 1)
        of = rows & (place >= 0) & (row < first)
        p = state + (n * (W - 1) + place)[:, None] * D + c[None, :]
        y += tl.load(p, mask=of[:, None] & m, other=0.0).to(tl.float32)
    return y


@triton.jit
def load_place(places, i):
    """The block's sequence, that sequence's first token and end, and the block's first token; int64."""
    p = places + 4 * i
    return tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)


@triton.jit
def forward_kernel(
    x, weight, state, y, places,
    D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, HAS_STATE: tl.constexpr,
    SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n, first, end, start = load_place(places, tl.program_id(0))
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    w = load_taps(weight, c, D, W)
    count = tl.minimum(end - start, SIZE).to(tl.int32)
    for i_t in range(0, count, BT):
        t = i_t + tl.arange(0, BT)
        row, rows = start + t, t < count
        z = tl.zeros([BT, BD], dtype=tl.float32)
        for i in tl.static_range(W):
            z += w[i] * load_input(x, state, row + (i - W + 1), rows, n, first, end, c, D, W, HAS_STATE)
        if SILU:
            z = z * tl.sigmoid(z)
        p = y + row[:, None] * D + c[None, :]
        tl.store(p, z.to(y.dtype.element_ty), mask=rows[:, None] & (c < D)[None, :])


@triton.jit
def d_input(
    x, w, state, d_y, row, rows, n, first, end, c,
    D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, HAS_STATE: tl.constexpr, DW: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradient of the input at `row` [BT, BD]; rows may lie before the sequence.

    With DW also the W tiles [BD] of Σ dz_row ⊙ x_{row−W+1+i}.
    """
    inputs = ()  # x from `row` − W + 1 on, in its own dtype to save registers
    for j in tl.static_range(2 * W - 1 if SILU else W if DW else 0):
        inputs = inputs + (load_input(x, state, row + (j - W + 1), rows, n, first, end, c, D, W, HAS_STATE),)  # noqa: RUF005
    dx = tl.zeros([BT, BD], dtype=tl.float32)
    dw = ()
    for s in tl.static_range(W):
        of = rows & (row + s >= first) & (row + s < end)
        p = d_y + (row + s)[:, None] * D + c[None, :]
        dz = tl.load(p, mask=of[:, None] & (c < D)[None, :], other=0.0).to(tl.float32)
        if SILU:
            z = tl.zeros([BT, BD], dtype=tl.float32)
            for i in tl.static_range(W):
                z += w[i] * inputs[s + i]
            half = tl.sigmoid(z)
            dz *= half * (1.0 + z * (1.0 - half))
        dx += w[W - 1 - s] * dz
        if DW and s == 0:
            for i in tl.static_range(W):
                dw = dw + (tl.sum(dz * inputs[i], 0),)  # noqa: RUF005
    return dx, dw


@triton.jit
def backward_kernel(
    x, weight, state, d_y, d_x, d_weight, places,
    D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, HAS_STATE: tl.constexpr,
    SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx, and the program's row of the partial sums of dweight [blocks, W, D]."""
    i_c = tl.program_id(0)
    n, first, end, start = load_place(places, i_c)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    w = load_taps(weight, c, D, W)
    count = tl.minimum(end - start, SIZE).to(tl.int32)
    dw = ()
    for _ in tl.static_range(W):
        dw = dw + (tl.zeros([BD], dtype=tl.float32),)  # noqa: RUF005
    for i_t in range(0, count, BT):
        t = i_t + tl.arange(0, BT)
        row, rows = start + t, t < count
        dx, part = d_input(x, w, state, d_y, row, rows, n, first, end, c, D, W, SILU, HAS_STATE, True, BT, BD)
        p = d_x + row[:, None] * D + c[None, :]
        tl.store(p, dx.to(d_x.dtype.element_ty), mask=rows[:, None] & (c < D)[None, :])
        total = ()
        for i in tl.static_range(W):
            total = total + (dw[i] + part[i],)  # noqa: RUF005
        dw = total
    for i in tl.static_range(W):
        tl.store(d_weight + (i_c.to(tl.int64) * W + i) * D + c, dw[i], mask=c < D)


@triton.jit
def state_kernel(
    x, weight, state, d_y, d_state, bounds, N,
    D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dstate [N, W−1, D]; a tile's row is one place of one sequence."""
    i = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    n, rows = i // (W - 1), i < N * (W - 1)
    first = tl.load(bounds + n, mask=rows, other=0)
    end = tl.load(bounds + n + 1, mask=rows, other=0)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    w = load_taps(weight, c, D, W)
    row = first - (W - 1) + i % (W - 1)
    dx, _ = d_input(x, w, state, d_y, row, rows, n, first, end, c, D, W, SILU, True, False, BT, BD)
    p = d_state + i[:, None] * D + c[None, :]
    tl.store(p, dx.to(d_state.dtype.element_ty), mask=rows[:, None] & (c < D)[None, :])


# -------------------------------------------------------------------------------------------------- launches


class Places(NamedTuple):
    """Where the blocks lie, on the device.

    blocks: int64 [blocks, 4]: the sequence, its first token, its end, and the block's first token.
    bounds: int64 [N + 1], where sequences begin.
    """

    blocks: Tensor
    bounds: Tensor


def places_of(x: Tensor, cu_seqlens: Tensor | None) -> Places:
    """The places of x `[B, T, D]`. Raises ValueError if cu_seqlens does not rise from 0 to T."""
    batch, length, _ = x.shape
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens: B = {batch}; flatten the batch into one row, B = 1")
    bounds = None if cu_seqlens is None else bounds_of(cu_seqlens, length)
    return _places(batch, length, bounds, x.device)


@functools.lru_cache(maxsize=32)  # all layers ask for the same one, forward and backward
def _places(batch: int, length: int, bounds: tuple[int, ...] | None, device: torch.device) -> Places:
    start, count, cu, first, *_ = chunks_between(batch, length, bounds, SIZE, torch.device("cpu"))
    n = torch.arange(len(first) - 1).repeat_interleave(first.diff())
    table = torch.stack([n, cu[n], start + count, start], 1)
    return Places(table.to(device, non_blocking=True), cu.to(device, non_blocking=True))


def _tiles(kernel: str, D: int, W: int, silu: bool) -> dict[str, int]:
    """Tile sizes. One warp has whole rows of its channels, so sums over tokens stay within a thread.

    Registers limit the rows of a step: with SiLU the backward holds 2W − 1 rows of x for each.
    """
    BD, BT = 256 if W <= 4 else 128, 4
    if kernel != "forward":
        BD, BT = 128 if silu else BD, 1 if W > 4 else 2
    BT = SIZE if interpreting() else BT  # the interpreter needs as long for one row as for many
    return {"BD": min(BD, power_of_two(D)), "BT": BT, "num_warps": 1}


def _launch(kernel, name: str, rows: int, weight: Tensor, silu: bool, *tensors, **options) -> None:
    D, W = weight.shape
    tiles = _tiles(name, D, W, silu)
    grid = (rows if name != "state" else triton.cdiv(rows, tiles["BT"]), triton.cdiv(D, tiles["BD"]))
    kernel[grid](*tensors, D=D, W=W, SILU=silu, **options, **tiles)


def _forward(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> Tensor:
    y, blocks = torch.empty_like(x), places_of(x, cu_seqlens).blocks
    options = {"HAS_STATE": state is not None, "SIZE": SIZE}
    _launch(forward_kernel, "forward", len(blocks), weight, silu, x, weight, state, y, blocks, **options)
    return y


def _backward(
    d_y: Tensor, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dstate; dstate is empty if there is no state."""
    (D, W), (blocks, bounds) = weight.shape, places_of(x, cu_seqlens)
    d_x, d_state = torch.empty_like(x), x.new_empty(0) if state is None else torch.empty_like(state)
    inputs, like = (x, weight, state, d_y.contiguous()), (weight, silu)
    parts = x.new_empty(len(blocks), W, D, dtype=torch.float32)
    options = {"HAS_STATE": state is not None, "SIZE": SIZE}
    _launch(backward_kernel, "backward", len(blocks), *like, *inputs, d_x, parts, blocks, **options)
    if state is not None:
        N = len(state)
        _launch(state_kernel, "state", N * (W - 1), *like, *inputs, d_state, bounds, N)
    return d_x, parts.sum(0).T.to(weight.dtype, memory_format=torch.contiguous_format), d_state


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(function, ctx, d_y: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_weight, d_state = function(d_y, *ctx.saved_tensors, ctx.silu)
    return d_x, d_weight, d_state if ctx.needs_input_grad[2] else None, None, None


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        _setup_context(ctx, args, None)
        return _forward(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        return _gradients(_backward, ctx, d_y)


# torch.compile sees forward and backward as one operator each. Eager calls avoid the operators' overhead.
_forward_op = torch.library.custom_op("nalanda_kernels::short_conv", _forward, mutates_args=())
_backward_op = torch.library.custom_op("nalanda_kernels::short_conv_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(x, weight, state, cu_seqlens, silu):
    return torch.empty_like(x)


@_backward_op.register_fake
def _(d_y, x, weight, state, cu_seqlens, silu):
    d_state = x.new_empty(0) if state is None else torch.empty_like(state)
    return torch.empty_like(x), torch.empty_like(weight), d_state


_forward_op.register_autograd(
    lambda ctx, d_y: _gradients(_backward_op, ctx, d_y), setup_context=_setup_context
)


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """y_t = act(Σ_i w_i ⊙ x_{t−W+1+i}) within each sequence.

    x: `[B, T, D]`, or packed `[1, ΣT, D]` with cu_seqlens (integers `[N + 1]` on the host).
    weight: `[D, W]`, 2 ≤ W ≤ 8; the last tap multiplies the token itself.
    state: `[N, W−1, D]`, the inputs before the first token, oldest first; None for zeros.
    activation: None or "silu".

    Returns y in the dtype of x, and the new state if output_final_state. Sums are fp32.
    Raises Unsupported for other dtypes or widths, or no tokens.
    """
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise Unsupported(f"no {x.dtype} inputs with {weight.dtype} weights")
    if not 2 <= weight.shape[1] <= 8:
        raise Unsupported(f"{weight.shape[1]} taps are not 2 to 8")
    if activation not in (None, "silu"):
        raise Unsupported(f"no activation {activation!r}")
    if not x.numel():
        raise Unsupported("there is no token")
    state = None if state is None else state.to(x.dtype).contiguous()
    x = x.contiguous()
    function = _forward_op if torch.compiler.is_compiling() else _ShortConv.apply
    y = function(x, weight.contiguous(), state, cu_seqlens, activation == "silu")
    return y, _last(x, state, weight.shape[1] - 1, cu_seqlens) if output_final_state else None


def _last(x: Tensor, state: Tensor | None, past: int, cu_seqlens: Tensor | None) -> Tensor:
    """The last `past` inputs of each sequence, `[N, past, D]`, by torch, which differentiates it."""
    if cu_seqlens is None:
        if x.shape[1] < past:
            x = torch.cat([x.new_zeros(len(x), past, x.shape[2]) if state is None else state, x], 1)
        return x[:, x.shape[1] - past :].clone()  # a view would keep all of x alive
    first, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    row = end + torch.arange(-past, 0)
    inside = row >= first
    taken = x[0][row.clamp_min(0).to(x.device, non_blocking=True)]
    if bool(inside.all()):
        return taken
    inside = inside.to(x.device, non_blocking=True)[..., None]
    if state is None:
        return taken.where(inside, 0.0)
    place = (row - first + past).clamp(0, past - 1).to(x.device, non_blocking=True)
    return taken.where(inside, state.gather(1, place[..., None].expand(-1, -1, x.shape[2])))
