"""The chunkwise form of the recurrences in `ops`, forward and backward, in torch.

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences; C tokens a
chunk, R chunks of a segment ("rows"), P = R·HV pairs of a chunk and a head.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layers import no_autocast

# Tokens per head in a segment. On a CPU about as many as the last-level cache holds (6 kB each at K = V =
# 128, 9 kB with decays per key channel); elsewhere many, to fill the device within bounded memory.
_CPU_TOKENS = 2048
_DEVICE_TOKENS = 262144
# Up to this many, a CPU's backward computes no chunk again: a fifth of the time for 5 to 8 kB each.
_KEPT_TOKENS = 16384


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of computations with these tensors, fp32 or float64."""
    return functools.reduce(
        torch.promote_types, (x.dtype for x in tensors if x is not None), torch.float32
    )


def bounds_of(cu_seqlens: Tensor, length: int) -> tuple[int, ...]:
    """The bounds as integers. Raises ValueError if they do not rise from 0 to `length`."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: does not rise from 0 to the {length} tokens; pass cumulative lengths"
        )
    return bounds


# ------------------------------------------------------------------------------------------------- layout


class _Segment:
    """Consecutive steps that are computed at once; see `_Layout`."""

    def __init__(self, layout: "_Layout", steps: slice, first: int):
        self.layout, self.steps, self.counts = layout, steps, layout.counts[steps]
        self.rows = sum(self.counts)
        if not layout.plain:
            here = slice(first * layout.chunk, (first + self.rows) * layout.chunk)
            self.token, self.real = (
                x[here].view(self.rows, 1, 1, layout.chunk) for x in (layout.token, layout.real)
            )
            self._made: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def read(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """[B, T, H, …] → [R·H·group, C, …], each head repeated `group` times; padded positions are 0."""
        if not self.layout.plain:
            rows, padding, _, _ = self._places(x.shape[2], group)
            y = x.flatten(0, 2).index_select(0, rows).index_fill_(0, padding, 0)
            return y.unflatten(0, (-1, self.layout.chunk)).to(dtype)
        y = self._by_chunk(x).unsqueeze(3)
        y = y.expand(-1, -1, -1, group, *y.shape[4:])  # [·, ·, H, group, C, …]
        return torch.empty(y.shape, dtype=dtype, device=y.device).copy_(y).flatten(0, 3)

    def write(self, x: Tensor, y: Tensor, group: int) -> None:
        """Puts [R·H·group, C, …] into x, [B, T, H, …]; the heads of a group are summed."""
        if group > 1:
            y = y.unflatten(0, (-1, group)).sum(1)
        if self.layout.plain:
            into = self._by_chunk(x)
            into.copy_(y.view(into.shape))
        else:
            _, _, real, rows = self._places(x.shape[2])
            y = y.flatten(0, 1).to(x.dtype)
            y = y if len(real) == len(y) else y.index_select(0, real)
            x.flatten(0, 2).index_copy_(0, rows, y)

    def _places(self, heads: int, group: int = 1) -> tuple[Tensor, ...]:
        """The positions [R, heads·group, C] and the rows of x as [B·T·heads, …]. Four flat tensors: each
        position's row; the padded positions; the others; their rows. Made on the host, without waiting."""
        if (heads, group) not in self._made:
            head = torch.arange(heads)[:, None, None].expand(-1, group, 1)
            rows = (self.token * heads + head).flatten()
            real = self.real.expand(-1, heads, group, -1).flatten()
            places = rows, (~real).nonzero().flatten(), real.nonzero().flatten(), rows[real]
            self._made[heads, group] = tuple(
                x.to(self.layout.device, non_blocking=True) for x in places
            )
        return self._made[heads, group]

    def _by_chunk(self, x: Tensor) -> Tensor:
        return (
            x.unflatten(1, (-1, self.layout.chunk))[:, self.steps].transpose(0, 1).transpose(2, 3)
        )


class _Layout:
    """The order of the chunks of all sequences. Step s has chunk s of every sequence that is long enough.

    Sequences are ranked by their number of chunks, longest first. So the chunks of a step are a block of
    rows, and their states a prefix of the states. `counts[s]` sequences have a chunk s.
    """

    def __init__(
        self, shape: tuple[int, int], bounds: tuple[int, ...] | None, chunk: int, device, rows: int
    ):
        batch, length = shape
        cu = torch.arange(batch + 1) * length if bounds is None else torch.tensor(bounds)
        lengths = cu.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        self.chunk, self.device, self.sequences, self.rank = chunk, device, len(lengths), None
        self.plain = bounds is None and length % chunk == 0
        if self.plain:
            self.counts = [batch] * (length // chunk)
        else:
            chunks = (lengths + chunk - 1) // chunk
            rank = torch.argsort(chunks, descending=True, stable=True)
            active = torch.arange(-(-longest // chunk))[:, None] < chunks[rank]
            step, place = active.nonzero(as_tuple=True)
            token = (cu[rank[place]] + step * chunk)[:, None] + torch.arange(chunk)
            real = token < cu[rank[place] + 1][:, None]
            self.counts = active.sum(1).tolist()
            self.token, self.real = token.where(real, 0).flatten(), real.flatten()
            if not torch.equal(rank, torch.arange(len(rank))):
                self.rank = rank.to(device)
        self.segments, start, first, size = [], 0, 0, 0
        for step, count in enumerate(self.counts):
            size += count
            if step + 1 == len(self.counts) or size + self.counts[step + 1] > rows:
                self.segments.append(_Segment(self, slice(start, step + 1), first))
                start, first, size = step + 1, first + size, 0


def _chunk_of(chunk_size: int, lengths: list[int], q: Tensor, v: Tensor) -> int:
    """The tokens of a chunk: at most chunk_size, fewer where that is faster with the same result."""
    longest = max(lengths, default=0)
    chunk = min(chunk_size, _power_of_two(longest))  # no sequence needs more
    if (
        v.device.type == "cpu"
    ):  # work within chunks grows with C, between them with 1/C, padding with C
        chunk = min(chunk, max(32, _power_of_two((q.shape[3] + v.shape[3]) // 4)))
        if min(lengths, default=0) < longest:
            mean = sum(lengths) // len(lengths)
            chunk = min(chunk, max(min(32, _power_of_two(mean)), _power_of_two(mean // 4)))
    return chunk


def _power_of_two(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << max(n - 1, 0).bit_length()


_layout = functools.lru_cache(maxsize=16)(
    _Layout
)  # all layers ask for the same one, forward and backward


def _layout_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> _Layout:
    batch, length, heads, _ = v.shape
    bounds = None if cu_seqlens is None else bounds_of(cu_seqlens, length)
    lengths = [length] * batch if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
    chunk = _chunk_of(chunk_size, lengths, q, v)
    tokens = _CPU_TOKENS if v.device.type == "cpu" else _DEVICE_TOKENS
    return _layout((batch, length), bounds, chunk, v.device, max(1, tokens // (chunk * heads)))


# -------------------------------------------------------------------------------------------- chunkwise form
#
# Let γ be the sum of g within a chunk up to and including a token, Δ_ij = exp(γ_i − γ_j) for i ≥ j, else 0.
# Linear attention is
#
#     O = eᵞ Q S + tril(Δ QK⊤) V        S ← e^{γ_C} S + (e^{γ_C − γ} K)⊤ V
#
# and the delta rule is the same with V' in place of V:
#
#     A = tril(β_i Δ_ij k_i⊤k_j, −1)    T = (I + A)⁻¹    U = T(βV)    W = T(β eᵞ K)    V' = U − W S
#
# A decay per key channel makes Δ_ij a vector inside the sums k_i⊤k_j and q_i⊤k_j. The gates of what is erased
# and written put R = erase ⊙ K for the first K of KK⊤ and for that of W and X, and write ⊙ V for V.
#
# Only V' and S depend on earlier chunks. Padding has β = k = g = 0: it neither writes nor decays, so γ_C is
# that of the last real token. No factor exceeds 1. Each γ_i − γ_j is its own sum of g after j up to i. A
# difference would lose the digits that an earlier strong decay takes from both γ, and after a reset (g = −∞)
# it would be ∞ − ∞.
#
# The backward (d for gradients, S' the state after the chunk) needs no gradient of T, U or W, because
# V' = TX with X = β(V − eᵞ K S) gives dA = −dX V'⊤:
#
#     dV' = tril(Δ QK⊤)⊤ dO + e^{γ_C − γ} K dS'         dX = T⊤ dV'         dA = −tril(dX V'⊤, −1)
#     dS = e^{γ_C} dS' + (eᵞ Q)⊤ dO − W⊤ dV'
#
# dg_t sums the shares of all that decays at token t: pairs (i, j) with j < t ≤ i, reads of S by i ≥ t, writes
# of j < t to S', and S itself as it becomes S'. No differences are taken, so small gradients stay exact.


class _Chunk:
    """Tensors of forward and backward. Q (already scaled), K and erase are [P, C, K], β [P, C], g
    [P, C (, K)].

    Without β there are no T and W, and V' = V. All attributes but `factors` are tensors or None.
    """

    v: Tensor  # set where the backward needs them
    v_new: Tensor

    def __init__(
        self, q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor | None, erase: Tensor | None
    ):
        self.q, self.k, self.g, self.erase = q, k, g, erase
        self.erased = k if erase is None else erase * k
        kk: list[Tensor] = []
        if g is None:
            self.qk = (q @ k.mT).tril_()  # tril(Δ QK⊤), [P, C, C]
            self.q_in, self.k_out = q, k
        else:
            if self.vector:
                self.decay_in, self.decay_out, self.factors = _factors(g)
                self.qk, *kk = self._vector_scores((q,) if beta is None else (q, self.erased))
                self.qk.diagonal(0, 1, 2).copy_((q * k).sum(-1))
            else:
                least = math.log(
                    torch.finfo(g.dtype).tiny
                )  # e^x below the normal numbers is slow on CPUs
                past = g.new_ones(q.shape[1], q.shape[1]).tril_(-1)
                self.delta = (past * g.clamp_min(least)[..., None]).cumsum_(
                    1
                )  # Σ of g_t, j < t ≤ i
                self.delta = _flushed(self.delta.clamp_min_(least).exp_()).tril_()
                self.qk = (q @ k.mT).mul_(self.delta)
                self.decay_in = _flushed(g.cumsum(1).exp_())[..., None]
                self.decay_out = self.delta[:, -1, :, None]
            self.decay = self.decay_in[:, -1:].mT  # e^{γ_C}, [P, K or 1, 1]
            self.q_in, self.k_out = q * self.decay_in, k * self.decay_out
        if beta is not None:
            self.beta = beta[..., None]
            if self.vector:
                (self.kk,) = kk
            else:
                self.kk = self.erased @ k.mT  # tril(Δ RK⊤, −1), [P, C, C]
                (self.kk if g is None else self.kk.mul_(self.delta)).tril_(-1)
            eye = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
            self.t = torch.linalg.solve_triangular(
                (self.kk * self.beta).mT, eye, upper=True, left=False, unitriangular=True
            ).mT  # transposed twice, because the result of the routine is stored column by column
            self.t_beta = self.t * beta[..., None, :]
            if self.vector:
                self.w = self.t_beta @ (self.erased * self.decay_in)
            else:
                self.w = (
                    self.t_beta if g is None else self.t_beta * self.decay_in.mT
                ) @ self.erased

    def tensors(self) -> tuple[list[str], list[Tensor | None]]:
        """The names of the attributes, and their tensors, followed by those of `factors`."""
        attributes = dict(vars(self))
        factors = attributes.pop("factors", ())
        return list(attributes), [*attributes.values(), *itertools.chain.from_iterable(factors)]

    @classmethod
    def of_tensors(cls, names: list[str], tensors: Sequence[Any]) -> "_Chunk":
        """The chunks with these `tensors()`."""
        chunk = cls.__new__(cls)
        vars(chunk).update(zip(names, tensors, strict=False))
        factors = tensors[len(names) :]
        chunk.factors = list(zip(factors[::2], factors[1::2], strict=True))
        return chunk

    @property
    def vector(self) -> bool:
        """Whether decays are by key channel."""
        return self.g is not None and self.g.ndim == 3

    def _vector_scores(self, rows: tuple[Tensor, ...]) -> list[Tensor]:
        """tril(Δ XK⊤, −1) for each X [P, C, K] of `rows`."""
        p, c, _ = self.k.shape
        scores = [self.k.new_zeros(p, c, c) for _ in rows]
        for late, early in self.factors:
            size = late.shape[2]
            k_early = self.k.unflatten(1, (-1, 2, size))[:, :, 0] * early
            for x, score in zip(rows, scores, strict=True):
                later = x.unflatten(1, (-1, 2, size))[:, :, 1] * late
                block = later @ k_early.mT if size > 1 else (later * k_early).sum(-1, keepdim=True)
                _below_diagonal(score, size).copy_(block)
        return scores

    def vector_scores_backward(
        self, d_scores: list[Tensor], d_rows: list[Tensor], dk: Tensor, since: Tensor, until: Tensor
    ) -> None:
        """Gradients through the scores of Q (and R), from those of the scores, d_scores [P, C, C].

        Adds to d_rows, of Q (and of R, which may be dk), and to dk. since, until: of γ and γ_C − γ without
        the scores; `since` becomes that of g, by adding up what `_factors` multiplies, longest spans first.
        """
        for late, early in reversed(self.factors):
            size = late.shape[2]
            k, dk_, since_, until_ = (
                x.unflatten(1, (-1, 2, size)) for x in (self.k, dk, since, until)
            )
            since_[:, :, 0, -1].add_(since_[:, :, 1].sum(2))
            since_[:, :, 1, -1].add_(until_[:, :, 0].sum(2))
            k_early, of_k = k[:, :, 0] * early, None
            for x, dx, d_score in zip((self.q, self.erased), d_rows, d_scores, strict=False):
                x, dx = (y.unflatten(1, (-1, 2, size))[:, :, 1] for y in (x, dx))
                later, block = x * late, _below_diagonal(d_score, size)
                of_x = block @ k_early if size > 1 else block * k_early
                dx.addcmul_(late, of_x)
                since_[:, :, 1].addcmul_(later, of_x)
                moved = block.mT @ later if size > 1 else later.mul_(block)
                of_k = moved if of_k is None else of_k.add_(moved)
            assert of_k is not None
            dk_[:, :, 0].addcmul_(early, of_k)
            until_[:, :, 0].addcmul_(k_early, of_k)


# A decay per key channel does not factor out of QK⊤, and e^{−γ} would overflow. But for tokens of two
# neighbouring spans with border m, e^{γ_i − γ_j} = e^{γ_i − γ_m} · e^{γ_m − γ_j}, and neither factor
# exceeds 1. Spans of 1, 2, 4, … C/2 tokens cover every pair i > j once. The factors of longer spans are
# products of those of shorter ones, so each token takes one exponential, and a decay of 0 gives no NaN.


def _flushed(x: Tensor) -> Tensor:
    """x ≥ 0, in place: what comes near the smallest normal number becomes 0. CPUs are slow below that."""
    return torch.threshold_(x, torch.finfo(x.dtype).tiny * 2**27, 0)


def _factors(g: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Of g [P, C, K]: eᵞ, e^{γ_C − γ}, and for spans of 1, 2, 4, … tokens (e^{γ_i − γ_m}, e^{γ_m − γ_j}) of
    the second and the first span of each pair, [P, pairs, span, K]."""
    since, until, factors, size = _flushed(g.exp()), torch.ones_like(g), [], 1
    while size < g.shape[1]:
        since_, until_ = (x.unflatten(1, (-1, 2, size)) for x in (since, until))
        late, early = since_[:, :, 1], until_[:, :, 0]
        factors.append((late.clone(), early.clone()))
        _flushed(early.mul_(late[:, :, -1:]))
        _flushed(late.mul_(since_[:, :, 0, -1:]))
        size *= 2
    return since, until, factors


def _below_diagonal(x: Tensor, size: int) -> Tensor:
    """The blocks of [P, C, C] that pair the second span with the first: a view [P, pairs, size, size]."""
    x = x.unflatten(2, (-1, 2, size)).unflatten(1, (-1, 2, size))[:, :, 1, :, :, 0]
    return x.diagonal(0, 1, 3).movedim(3, 1)


def _read_chunk(
    segment: _Segment, q, k, v, beta, g, erase, write, scale: float, dtype
) -> tuple[_Chunk, Tensor]:
    """The chunks of a segment, and their values [P, C, V], gated."""
    group = v.shape[2] // q.shape[2]
    q, k = (segment.read(x, group, dtype) for x in (q, k))
    beta, g, erase = (None if x is None else segment.read(x, 1, dtype) for x in (beta, g, erase))
    v = segment.read(v, 1, dtype)
    if write is not None:
        v.mul_(segment.read(write, 1, dtype))
    return _Chunk(q.mul_(scale), k, beta, g, erase), v


def _chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
    save: bool,
    kept: list[_Chunk] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and, if `save`, the state before each chunk [P, K, V] in the layout's order.

    kept: gets each segment's chunks, with V and V', if they are few.
    """
    heads = v.shape[2]
    dtype = wide_dtype(q, k, v, beta, g, erase, write, initial_state)
    layout = _layout_of(q, v, cu_seqlens, chunk_size)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = _ranked(
        initial_state, layout, dtype, v.new_empty(layout.sequences, heads, q.shape[3], v.shape[3])
    )
    total = sum(layout.counts) * heads
    saved = state.new_empty(total if save else 0, *state.shape[1:])
    few = v.device.type == "cpu" and total * layout.chunk <= _KEPT_TOKENS
    first = 0
    for segment in layout.segments:
        chunk, v_ = _read_chunk(segment, q, k, v, beta, g, erase, write, scale, dtype)
        pairs = segment.rows * heads
        states = saved[first : first + pairs] if save else state.new_empty(pairs, *state.shape[1:])
        v_new = v_ if beta is None else chunk.t_beta @ v_
        row = 0
        for count in segment.counts:
            now, active = slice(row, row + count * heads), state[: count * heads]
            states[now].copy_(active)
            if beta is not None:
                v_new[now].baddbmm_(chunk.w[now], active, alpha=-1)
            if g is not None:
                active.mul_(chunk.decay[now])
            active.baddbmm_(chunk.k_out[now].mT, v_new[now])
            row += count * heads
        segment.write(o, torch.bmm(chunk.q_in, states).baddbmm_(chunk.qk, v_new), 1)
        first += pairs
        if save and few and kept is not None:
            chunk.v, chunk.v_new = v_, v_new
            kept.append(chunk)
    return o, _unranked(state, layout, heads), saved


def _chunk_backward(
    d_o: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    scale: float,
    chunk_size: int,
    kept: list[_Chunk] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, the gates and the initial state; recomputes all but the states and the `kept`."""
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    dtype = states.dtype
    layout = _layout_of(q, v, cu_seqlens, chunk_size)
    c = layout.chunk
    straddling = torch.ones(c, c, dtype=dtype, device=v.device).triu()
    d_q, d_k, d_v, d_beta, d_g, d_erase, d_write = _empty_grads(q, k, v, beta, g, erase, write)
    d_state = _ranked(
        d_final, layout, dtype, v.new_empty(layout.sequences, heads, *states.shape[1:])
    )
    first = len(states)
    for index, segment in reversed([*enumerate(layout.segments)]):
        first -= segment.rows * heads
        s = states[first : first + segment.rows * heads]
        if kept:
            chunk = kept[index]
            v_, v_new = chunk.v, chunk.v_new
        else:
            chunk, v_ = _read_chunk(segment, q, k, v, beta, g, erase, write, scale, dtype)
            v_new = (
                v_ if beta is None else torch.bmm(chunk.t_beta, v_).baddbmm_(chunk.w, s, alpha=-1)
            )
        q_, k_, g_, do_ = chunk.q, chunk.k, chunk.g, segment.read(d_o, 1, dtype)
        dv_new = chunk.qk.mT @ do_
        d_next = torch.empty_like(s)  # of the state after each chunk
        row = len(s)
        for count in reversed(segment.counts):
            row -= count * heads
            now, active = slice(row, row + count * heads), d_state[: count * heads]
            d_next[now].copy_(active)
            dv_new[now].baddbmm_(chunk.k_out[now], active)
            if g is not None:
                active.mul_(chunk.decay[now])
            active.baddbmm_(chunk.q_in[now].mT, do_[now])
            if beta is not None:
                active.baddbmm_(chunk.w[now].mT, dv_new[now], alpha=-1)

        # Linear attention with the values V'.
        dx, d_qk = dv_new, (do_ @ v_new.mT).tril_()
        dq, dk = do_ @ s.mT, v_new @ d_next.mT
        dg = reads = writes = pairs = d_qk.new_empty(0)
        if g_ is not None:
            dq.mul_(chunk.decay_in)
            dk.mul_(chunk.decay_out)
            whole = chunk.decay * (s * d_next).sum(-1, keepdim=True)  # [P, K, 1]
            reads, writes = q_ * dq, k_ * dk
            if chunk.vector:
                reads[:, -1:] += whole.mT
            else:
                reads, dg = (
                    reads.sum(-1, True),
                    torch.zeros_like(whole.sum(1, True).expand(-1, c, 1)),
                )
                dg[:, 1:] = writes.sum(-1, True)[:, :-1].cumsum(1)
                dg += whole.sum(1, True)
        d_scores, d_rows = [d_qk], [dq]
        if chunk.vector:
            diagonal = d_qk.diagonal(0, 1, 2)[..., None]
            dq.addcmul_(diagonal, k_)
            dk.addcmul_(diagonal, q_)
        else:
            if g_ is not None:
                pairs = (d_qk * chunk.qk).tril_(-1)
                d_qk.mul_(chunk.delta)
            dq.baddbmm_(d_qk, k_)
            dk.baddbmm_(d_qk.mT, q_)
        # The delta rule: gradients through V' = TX.
        d_erased = dk
        if beta is not None:
            dx = chunk.t.mT @ dv_new
            d_kk = (dx @ v_new.mT).neg_()  # dA
            through_a = d_kk * chunk.kk
            d_in = dx @ s.mT
            if g_ is not None:
                d_in.mul_(chunk.decay_in)
            if chunk.erase is not None:
                d_erased = torch.zeros_like(d_in)
            d_erased.addcmul_(d_in, chunk.beta, value=-1)
            read = d_in.mul_(chunk.erased)
            read = read if chunk.vector else read.sum(-1, keepdim=True)
            segment.write(d_beta, (dx * v_).sum(-1) + through_a.sum(-1) - read.sum(-1), 1)
            if g_ is not None:
                reads.addcmul_(read, chunk.beta, value=-1)
            d_kk.mul_(chunk.beta)
            if chunk.vector:
                d_scores, d_rows = [d_qk, d_kk], [dq, d_erased]
            else:
                if g_ is not None:
                    pairs += through_a.mul_(chunk.beta)
                    d_kk.mul_(chunk.delta)
                d_kk.tril_(-1)
                if chunk.erase is None:
                    dk.baddbmm_(d_kk + d_kk.mT, k_)
                else:
                    d_erased.baddbmm_(d_kk, k_)
                    dk.baddbmm_(d_kk.mT, chunk.erased)
            dx.mul_(chunk.beta)
        if g_ is not None:
            if chunk.vector:
                chunk.vector_scores_backward(d_scores, d_rows, dk, reads, writes)
                segment.write(d_g, reads, 1)
            else:
                dg += straddling @ reads
                dg += (straddling @ pairs).tril_(-1).sum(-1, keepdim=True)
                segment.write(d_g, dg.squeeze(-1), 1)
        if chunk.erase is not None:
            segment.write(d_erase, k_ * d_erased, 1)
            dk.addcmul_(chunk.erase, d_erased)
        if write is not None:
            segment.write(d_write, segment.read(v, 1, dtype).mul_(dx), 1)
            dx = segment.read(write, 1, dtype).mul_(dx)
        segment.write(d_q, dq.mul_(scale), group)
        segment.write(d_k, dk, group)
        segment.write(d_v, dx, 1)
    return d_q, d_k, d_v, d_beta, d_g, d_erase, d_write, _unranked(d_state, layout, heads)


def _empty_grads(q, k, v, *gates) -> tuple[Tensor, ...]:
    """Uninitialised gradients, empty for absent inputs, because operators may not return None."""
    like = (q, k, v, *(v[:0] if x is None else x for x in gates))
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)


def _ranked(state: Tensor | None, layout: _Layout, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A working copy of the states [N, HV, K, V], or zeros: [N·HV, K, V] in the layout's order."""
    if state is None:
        return torch.zeros_like(like, dtype=dtype).flatten(0, 1)
    state = state if layout.rank is None else state[layout.rank]
    return torch.empty_like(like, dtype=dtype).copy_(state).flatten(0, 1)


def _unranked(state: Tensor, layout: _Layout, heads: int) -> Tensor:
    state = state.unflatten(0, (layout.sequences, heads))
    return (
        state if layout.rank is None else torch.empty_like(state).index_copy_(0, layout.rank, state)
    )


class ChunkRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        kept: list[_Chunk] = []
        outputs = _chunk_forward(*args, kept=kept)
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
        kept = [_Chunk.of_tensors(names, [*itertools.islice(tensors, n)]) for names, n in ctx.parts]
        return _gradients(
            functools.partial(_chunk_backward, kept=kept), ctx, saved[:_SAVED], *grads
        )


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
    _chunk_forward,
    mutates_args=(),
    schema=f"({_INPUTS}, float scale, int chunk_size, bool save) -> (Tensor, Tensor, Tensor)",
)
_chunk_backward_op = torch.library.custom_op(
    f"{_NAMESPACE}::chunk_recurrence_backward",
    _chunk_backward,
    mutates_args=(),
    schema=f"(Tensor d_o, Tensor? d_final, {_INPUTS}, Tensor states, float scale, int chunk_size) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@chunk_op.register_fake
def _(q, k, v, beta, g, erase, write, initial_state, cu_seqlens, scale, chunk_size, save):
    batch, length, heads, width = v.shape
    rows = 0
    if save and cu_seqlens is None and isinstance(length, int):
        rows = -(-length // _chunk_of(chunk_size, [length], q, v)) * batch
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
    return *_empty_grads(q, k, v, beta, g, erase, write), d_initial


def _operator_gradients(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(_chunk_backward_op, ctx, ctx.saved_tensors, *grads)


chunk_op.register_autograd(_operator_gradients, setup_context=_setup_context)
