"""Attention inside non-overlapping blocks of `block_size` tokens, with softmax or ReLU scores.

TransNormer's DiagAttention (Qin et al. 2022, arXiv 2210.10340). For one block let S = scale · QK⊤, P its
masked softmax or ReLU, and dP = dO V⊤:

    O = PV         dV = P⊤ dO      dS = P ∘ (dP − Σ_j P ∘ dP) for softmax, dP where P > 0 for ReLU
    dQ = scale · dS K              dK = scale · dS⊤ Q

A program handles one block of a head, or all whole blocks that fit a tile of 16. It reads every input once;
the backward keeps only the inputs. Products are ordered for Hopper ("Hopper's assembler" in
`kernels/README.md`): O⊤ = V⊤P⊤ with P⊤ from KQ⊤, dV⊤ = dO⊤P, dK⊤ = Q⊤dS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.autograd import once_differentiable
from nalanda_kernels.triton.common import (
    FUSION,
    PRECISION,
    TAGS,
    architecture,
    chunks_of,
    name_of,
    on_its_device,
    power_of_two,
)

# By tile height BT: rows of (itemsize, features, most BK and BV, num_warps). The first row that covers the
# element's bytes and the head's features applies. Wider heads are read in several tiles.
_BLOCKS = {
    16: ((2, 128, 128, 1), (2, 256, 128, 2), (4, 64, 64, 2), (4, 256, 64, 4)),
    32: ((2, 128, 128, 2), (2, 256, 128, 4), (4, 64, 64, 4), (4, 256, 64, 8)),
    64: ((2, 128, 128, 4), (2, 256, 128, 8), (4, 256, 64, 8)),
    128: ((2, 256, 64, 8),),
}


@triton.jit
def _locate_rows(starts, counts, H, SPAN: tl.constexpr, BT: tl.constexpr):
    """The program's rows of x [tokens · H, …], and the mask of those inside its span."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    i = tl.arange(0, BT)
    # Rows of a head are H apart; `counts` reaches the sequence's end, SPAN the last whole block.
    return (tl.load(starts + n) + i) * H + h, i < tl.minimum(tl.load(counts + n), SPAN)


@triton.jit
def _locate_tile(rows, real, first, N: tl.constexpr, BN: tl.constexpr):
    """Offsets and mask of BN columns from `first` on, in rows of N columns."""
    c = first + tl.arange(0, BN)
    return rows[:, None] * N + c[None, :], real[:, None] & (c < N)[None, :]


@triton.jit
def _read(x, rows, real, first, N: tl.constexpr, BN: tl.constexpr):
    """A tile [BT, BN] of x; 0 outside the span and the columns."""
    at, mask = _locate_tile(rows, real, first, N, BN)
    return tl.load(x + at, mask, other=0.0)


@triton.jit
def _write_transposed(x, y, rows, real, first, N: tl.constexpr, BN: tl.constexpr):
    """Stores y [BN, BT] as BN columns of x, from `first` on."""
    c = first + tl.arange(0, BN)
    tl.store(
        x + rows[None, :] * N + c[:, None],
        y.to(x.dtype.element_ty),
        real[None, :] & (c < N)[:, None],
    )


@triton.jit
def _scores(q, k, rows, real, scale, K: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr):
    """S = scale · QK⊤, and the last tiles of Q and K that were read. With q and k exchanged it gives S⊤."""
    q_ = _read(q, rows, real, 0, K, BK)
    k_ = _read(k, rows, real, 0, K, BK)
    s = tl.dot(q_, tl.trans(k_), input_precision=PREC)
    # Heads wider than BK are summed over tiles.
    for first in range(BK, K, BK):
        q_, k_ = _read(q, rows, real, first, K, BK), _read(k, rows, real, first, K, BK)
        s = tl.dot(q_, tl.trans(k_), s, input_precision=PREC)
    return s * scale, q_, k_


@triton.jit
def _weights(s, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr, BT: tl.constexpr, J: tl.constexpr):
    """P of the scores S, or P⊤ of S⊤; J is the axis of the tokens that are seen.

    A token always sees itself; none sees a later one, so padding stays unseen.
    """
    i, j = tl.expand_dims(tl.arange(0, BT), J), tl.expand_dims(tl.arange(0, BT), 1 - J)
    # Several small blocks share a tile: a token sees its own alone.
    seen = (i >= j) & (i // BLOCK == j // BLOCK)
    if SOFTMAX:
        s = tl.where(seen, s, float("-inf"))
        # The token itself is seen, so the maximum is finite.
        p = tl.exp(s - tl.expand_dims(tl.max(s, J), J))
        p = p / tl.expand_dims(tl.sum(p, J), J)
    else:
        # NaN stays NaN, as in torch's ReLU.
        p = tl.where(seen, tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
    return p


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    o,
    starts,
    counts,
    scale,
    H,
    SOFTMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """O⊤ = V⊤P⊤ of one span of a head, BV columns at a time."""
    rows, real = _locate_rows(starts, counts, H, SPAN, BT)
    # S⊤ and P⊤ [BT, BT]: rows are the tokens that are seen.
    s, _, _ = _scores(k, q, rows, real, scale, K, BK, PREC)
    p = _weights(s, SOFTMAX, BLOCK, BT, 0).to(v.dtype.element_ty)
    for first in range(0, V, BV):
        o_ = tl.dot(tl.trans(_read(v, rows, real, first, V, BV)), p, input_precision=PREC)
        _write_transposed(o, o_, rows, real, first, V, BV)


@triton.jit
def _write_dqk(
    d_q,
    d_k,
    d_s,
    q_,
    k_,
    rows,
    real,
    first,
    scale,
    K: tl.constexpr,
    BK: tl.constexpr,
    PREC: tl.constexpr,
):
    """Stores BK columns of dQ = scale · dS K and dK⊤ = scale · Q⊤dS."""
    at, mask = _locate_tile(rows, real, first, K, BK)
    dq_ = tl.dot(d_s, k_, input_precision=PREC) * scale
    tl.store(d_q + at, dq_.to(d_q.dtype.element_ty), mask)
    dk_ = tl.dot(tl.trans(q_), d_s, input_precision=PREC) * scale
    _write_transposed(d_k, dk_, rows, real, first, K, BK)


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    d_o,
    d_q,
    d_k,
    d_v,
    starts,
    counts,
    scale,
    H,
    SOFTMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """dV⊤ = dO⊤P, dP = dO V⊤, dS, and then dQ and dK, of one span of a head."""
    rows, real = _locate_rows(starts, counts, H, SPAN, BT)
    # S and P [BT, BT]; P in fp32 for dS, cast for products.
    s, q_, k_ = _scores(q, k, rows, real, scale, K, BK, PREC)
    p = _weights(s, SOFTMAX, BLOCK, BT, 1)
    p_ = p.to(v.dtype.element_ty)

    # dP = dO V⊤ [BT, BT], and BV columns of dV⊤ at a time.
    d_p = tl.zeros([BT, BT], tl.float32)
    for first in range(0, V, BV):
        v_, do_ = _read(v, rows, real, first, V, BV), _read(d_o, rows, real, first, V, BV)
        d_p = tl.dot(do_, tl.trans(v_), d_p, input_precision=PREC)
        _write_transposed(
            d_v, tl.dot(tl.trans(do_), p_, input_precision=PREC), rows, real, first, V, BV
        )

    # dS [BT, BT].
    if SOFTMAX:
        d_s = p * (d_p - tl.sum(p * d_p, 1)[:, None])
    else:
        # Unseen pairs have P = 0.
        d_s = tl.where(p > 0, d_p, 0.0)
    d_s = d_s.to(q.dtype.element_ty)

    # The tiles of Q and K that were read last are still in registers.
    LAST: tl.constexpr = (K - 1) // BK * BK
    _write_dqk(d_q, d_k, d_s, q_, k_, rows, real, LAST, scale, K, BK, PREC)
    for first in range(0, LAST, BK):
        q_, k_ = _read(q, rows, real, first, K, BK), _read(k, rows, real, first, K, BK)
        _write_dqk(d_q, d_k, d_s, q_, k_, rows, real, first, scale, K, BK, PREC)


def sizes(block_size: int, key_dim: int, value_dim: int, itemsize: int) -> dict[str, int]:
    """Compile-time sizes: a program has `SPAN` tokens in tiles BT × BK and BT × BV; and its warps."""
    BT = power_of_two(block_size)

    # The first row that covers the widest head.
    rows = (r for r in _BLOCKS[BT] if itemsize <= r[0] and max(key_dim, value_dim) <= r[1])
    _, _, widest, warps = next(rows)
    BK, BV = (min(power_of_two(n), widest) for n in (key_dim, value_dim))
    # Whole blocks that fit the tile.
    return {"SPAN": BT // block_size * block_size, "BT": BT, "BK": BK, "BV": BV, "num_warps": warps}


def _launch(
    kernel, like: Tensor, tensors: tuple[Tensor, ...], cu_seqlens, block_size, softmax, scale
) -> None:
    B, T, H, V = like.shape
    K = tensors[0].shape[3]

    # One program for each span of each head.
    options = sizes(block_size, K, V, like.element_size())
    chunks = chunks_of((B, T), cu_seqlens, options["SPAN"], like.device)

    if chunks.total * H == 0:
        return
    kernel[(chunks.total * H,)](
        *tensors,
        chunks.start,
        chunks.count,
        scale,
        H,
        SOFTMAX=softmax,
        BLOCK=block_size,
        K=K,
        V=V,
        PREC=PRECISION,
        num_stages=1,
        **options,
        **FUSION,
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    softmax: bool,
    scale: float,
) -> Tensor:
    o = torch.empty_like(v)
    _launch(forward_kernel, v, (q, k, v, o), cu_seqlens, block_size, softmax, scale)
    return o


def _backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    softmax: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    inputs = (q, k, v, d_o.contiguous())
    _launch(backward_kernel, v, (*inputs, *grads), cu_seqlens, block_size, softmax, scale)
    return grads


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.block_size, ctx.softmax, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(function, ctx, d_o: Tensor) -> tuple[Tensor | None, ...]:
    grads = function(d_o, *ctx.saved_tensors, ctx.block_size, ctx.softmax, ctx.scale)
    # cu_seqlens and the three options have no gradient.
    return *grads, None, None, None, None


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        _setup_context(ctx, args, None)
        return _forward(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o):
        return _gradients(_backward, ctx, d_o)


# torch.compile sees forward and backward as one operator each. Eager calls avoid the operators' overhead.
_forward_op = torch.library.custom_op(
    "nalanda_kernels::block_attention", on_its_device(_forward), mutates_args=(), tags=TAGS
)
_backward_op = torch.library.custom_op(
    "nalanda_kernels::block_attention_backward", _backward, mutates_args=(), tags=TAGS
)


@_forward_op.register_fake
def _(q, k, v, *options):
    return torch.empty_like(v)


@_backward_op.register_fake
def _(d_o, q, k, v, *options):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_forward_op.register_autograd(
    lambda ctx, d_o: _gradients(_backward_op, ctx, d_o), setup_context=_setup_context
)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    scores: str = "softmax",
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`o_t = Σ_j p_tj v_j` over j ≤ t in the block of t (DiagAttention, arXiv 2210.10340).

    Args:
        q: `[B, T, H, K]`, K ≤ 256; fp32, bf16 or fp16. k likewise.
        v: `[B, T, H, V]`, V ≤ 256, of the same dtype.
        block_size: tokens in a block, at most 128, or 64 in fp32; the first block starts at a sequence's
            first token.
        scores: p is the "softmax" of scale · q_t·k_j over these j, or its "relu" without normalisation.
        scale: factor of q·k; by default K^-0.5.
        cu_seqlens: `[N + 1]` integers on the host, the bounds of sequences packed into one row (B = 1);
            sequences may be empty.

    Returns:
        o `[B, T, H, V]` in v's dtype. Scores and sums are fp32.

    Raises:
        Unsupported: sizes or dtypes that the kernels lack.
        ValueError: shapes that do not match, or an unknown option.
    """
    _check_call(q, k, v, block_size, scores, cu_seqlens)
    _check_limits(q, k, v, block_size)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    call = _forward_op if torch.compiler.is_compiling() else _BlockAttention.apply
    inputs = (x.contiguous() for x in (q, k, v))
    return call(*inputs, cu_seqlens, block_size, scores == "softmax", scale)


def _check_call(
    q: Tensor, k: Tensor, v: Tensor, block_size: int, scores: str, cu_seqlens: Tensor | None
) -> None:
    """Raises ValueError for a call that no backend could serve."""
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        raise ValueError(f"q, k, v: {shapes}; must be [B, T, H, K], [B, T, H, K] and [B, T, H, V]")
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1 token")
    if scores not in ("softmax", "relu"):
        raise ValueError(f"scores={scores!r}: must be softmax or relu")
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: B = {q.shape[0]}; flatten the batch into one row, B = 1")


def _check_limits(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> None:
    """Raises Unsupported for sizes and dtypes that the kernels lack."""
    if q.shape[2] != v.shape[2]:
        raise Unsupported(f"{q.shape[2]} heads of q with {v.shape[2]} heads of v")
    if block_size > max(_BLOCKS):
        raise Unsupported(f"block_size={block_size}: at most {max(_BLOCKS)}")
    if q.element_size() > 2 and block_size > 64:  # their tiles exceed an A100's shared memory
        raise Unsupported(f"block_size={block_size}: at most 64 with {name_of(q.dtype)}")
    # Triton's ptxas 12.8 compiles products of 64 rows wrongly there: dQ off by 70 % on an H100, right by 13.4.
    if q.is_cuda and q.element_size() > 2 and block_size > 32 and architecture() == "sm_90":
        raise Unsupported(f"block_size={block_size} in fp32 on sm_90: at most 32")
    if not 0 < q.shape[3] <= 256 or not 0 < v.shape[3] <= 256:
        raise Unsupported(f"K={q.shape[3]} and V={v.shape[3]}: both must be from 1 to 256")
    supported = v.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not supported or not q.dtype == k.dtype == v.dtype:
        dtypes = ", ".join(name_of(x.dtype) for x in (q, k, v))
        raise Unsupported(f"q, k and v in {dtypes}: all must be fp32, bf16 or fp16")
