"""The chunkwise form of the recurrences in `ops`, forward.

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences; C tokens a
chunk, R chunks of a segment ("rows"), P = R·HV pairs of a chunk and a head.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .chunk_order import Segment, order_of, ranked, unranked, wide_dtype

# Up to this many, a CPU's backward computes no chunk again: a fifth of the time for 5 to 8 kB each.
SAVED_TOKENS = 16384

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


class Chunk:
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
    def of_tensors(cls, names: list[str], tensors: Sequence[Any]) -> "Chunk":
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


def read_chunk(
    segment: Segment, q, k, v, beta, g, erase, write, scale: float, dtype
) -> tuple[Chunk, Tensor]:
    """The chunks of a segment, and their values [P, C, V], gated."""
    group = v.shape[2] // q.shape[2]
    q, k = (segment.read(x, group, dtype) for x in (q, k))
    beta, g, erase = (None if x is None else segment.read(x, 1, dtype) for x in (beta, g, erase))
    v = segment.read(v, 1, dtype)
    if write is not None:
        v.mul_(segment.read(write, 1, dtype))
    return Chunk(q.mul_(scale), k, beta, g, erase), v


def chunk_forward(
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
    kept: list[Chunk] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and, if `save`, the state before each chunk [P, K, V] in the order of the chunks.

    kept: gets each segment's chunks, with V and V', if they are few.
    """
    heads = v.shape[2]
    dtype = wide_dtype(q, k, v, beta, g, erase, write, initial_state)
    order = order_of(q, v, cu_seqlens, chunk_size)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = ranked(
        initial_state, order, dtype, v.new_empty(order.sequences, heads, q.shape[3], v.shape[3])
    )
    total = sum(order.counts) * heads
    saved = state.new_empty(total if save else 0, *state.shape[1:])
    few = v.device.type == "cpu" and total * order.chunk <= SAVED_TOKENS
    first = 0
    for segment in order.segments:
        chunk, v_ = read_chunk(segment, q, k, v, beta, g, erase, write, scale, dtype)
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
    return o, unranked(state, order, heads), saved
