"""The chunkwise form of the recurrences in `ops`, forward.

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences. A chunk has
C tokens, a segment R chunks and P = R·HV pairs of a chunk and a head.

Let γ be the sum of g within a chunk up to and including a token, Δ_ij = exp(γ_i − γ_j) for i ≥ j, else 0.
Linear attention is

    O = eᵞ Q S + tril(Δ QK⊤) V        S ← e^{γ_C} S + (e^{γ_C − γ} K)⊤ V

and the delta rule is the same with V' in place of V:

    A = tril(β_i Δ_ij k_i⊤k_j, −1)    T = (I + A)⁻¹    U = T(βV)    W = T(β eᵞ K)    V' = U − W S

A decay per key channel makes Δ_ij a vector inside the sums k_i⊤k_j and q_i⊤k_j. The erase gate puts
R = erase ⊙ K for the first K of KK⊤ and for that of W. The write gate puts write ⊙ V for V.

Only V' and S depend on earlier chunks. Padding has β = k = g = 0: it neither writes nor decays, so γ_C is
that of the last real token. No factor exceeds 1. Each γ_i − γ_j is its own sum of g after j up to i. A
difference would lose the digits that an earlier strong decay takes from both γ, and after a reset (g = −∞)
it would be ∞ − ∞.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call, dtype_of, group_of
from .chunk_channels import channel_scores, flushed
from .chunk_order import Segment, order_of, ranked, unranked

# Up to so many tokens times heads, a CPU's backward computes no chunk again: a fifth of the time for 5 to 7 kB
# each. Training saves all where memory is free (`train.build.check_machine`); the values are the same.
FEW_TOKENS = 16384
SAVED_TOKENS: int = FEW_TOKENS


class Chunk:
    """The quantities of a segment's chunks that both forward and backward need.

    Attributes that a rule does not need are missing. All are tensors or None.
    """

    q: Tensor  # [P, C, K], scaled
    k: Tensor  # [P, C, K]
    v: Tensor  # [P, C, V], gated
    v_new: Tensor  # V', [P, C, V]; without β it is v
    g: Tensor | None  # [P, C] or [P, C, K]
    erase: Tensor | None  # [P, C, K]

    qk: Tensor  # tril(Δ QK⊤), [P, C, C]
    q_in: Tensor  # eᵞ Q, [P, C, K]
    k_out: Tensor  # e^{γ_C − γ} K, [P, C, K]

    # With a decay.
    decay_in: Tensor  # eᵞ, [P, C, K or 1]
    decay_out: Tensor  # e^{γ_C − γ}, [P, C, K or 1]
    decay_all: Tensor  # e^{γ_C}, [P, K or 1, 1]
    delta: Tensor  # Δ of a decay per head, [P, C, C]

    # With β.
    beta: Tensor  # [P, C, 1]
    erased: Tensor  # R, [P, C, K]; K without `erase`
    kk: Tensor  # tril(Δ RK⊤, −1), [P, C, C]
    t: Tensor  # T, [P, C, C]
    t_beta: Tensor  # Tβ, [P, C, C]
    w: Tensor  # W, [P, C, K]

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        beta: Tensor | None,
        g: Tensor | None,
        erase: Tensor | None,
        backend: str,
    ):
        self.q, self.k, self.g, self.erase = q, k, g, erase
        self.erased = k if erase is None else erase * k

        if g is None:
            self.qk = (q @ k.mT).tril_()
            self.q_in, self.k_out = q, k
        else:
            if self.by_channel:
                self._decay_by_channel(g, beta is not None, backend)
            else:
                self._decay_by_head(g)
            self.decay_all = self.decay_in[:, -1:].mT  # [P, K or 1, 1], scales the rows of S
            self.q_in, self.k_out = q * self.decay_in, k * self.decay_out

        if beta is not None:
            self._invert(beta)

    @property
    def by_channel(self) -> bool:
        """Whether decays are per key channel."""
        return self.g is not None and self.g.ndim == 3

    @property
    def delta_rule(self) -> bool:
        """Whether there is β."""
        return "beta" in vars(self)

    def _decay_by_head(self, g: Tensor) -> None:
        """Sets Δ, QK⊤ and the decays of g [P, C]."""
        C = g.shape[1]
        least = math.log(torch.finfo(g.dtype).tiny)  # e^x below the normal numbers is slow on CPUs
        past = g.new_ones(C, C).tril_(-1)
        sums = (past * g.clamp_min(least)[..., None]).cumsum_(1)  # Σ of g_t, j < t ≤ i

        self.delta = flushed(sums.clamp_min_(least).exp_()).tril_()
        self.qk = (self.q @ self.k.mT).mul_(self.delta)
        self.decay_in = flushed(g.cumsum(1).exp_())[..., None]
        self.decay_out = self.delta[:, -1, :, None]  # the last row of Δ, e^{γ_C − γ}

    def _decay_by_channel(self, g: Tensor, delta_rule: bool, backend: str) -> None:
        """Sets QK⊤, for the delta rule RK⊤, and the decays of g [P, C, K]."""
        rows = [self.q, self.erased] if delta_rule else [self.q]
        decays, scores = channel_scores(rows, self.k, g, backend)
        self.decay_in, self.decay_out = decays
        self.qk, *kk = scores
        if delta_rule:
            (self.kk,) = kk

    def _invert(self, beta: Tensor) -> None:
        """Sets T = (I + A)⁻¹ and W, for β [P, C]."""
        self.beta = beta[..., None]
        if not self.by_channel:
            self.kk = self.erased @ self.k.mT
            if self.g is not None:
                self.kk.mul_(self.delta)
            self.kk.tril_(-1)

        # Transposed twice, because the routine stores its result column by column.
        eye = torch.eye(self.k.shape[1], dtype=self.k.dtype, device=self.k.device)
        A = self.kk * self.beta  # β_i scales row i; below the diagonal only
        self.t = torch.linalg.solve_triangular(
            A.mT, eye, upper=True, left=False, unitriangular=True
        ).mT
        self.t_beta = self.t * beta[..., None, :]

        if self.by_channel:
            self.w = self.t_beta @ (self.erased * self.decay_in)
        elif self.g is not None:
            # One decay a token factors out of the features, so it may scale the columns of Tβ.
            self.w = (self.t_beta * self.decay_in.mT) @ self.erased
        else:
            self.w = self.t_beta @ self.erased

    def tensors(self) -> tuple[list[str], list[Tensor | None]]:
        """The names of the attributes, and the attributes."""
        return list(vars(self)), [*vars(self).values()]

    @classmethod
    def of_tensors(cls, names: list[str], tensors: Sequence[Any]) -> "Chunk":
        """The chunks with these `tensors()`."""
        chunk = cls.__new__(cls)
        vars(chunk).update(zip(names, tensors, strict=True))
        return chunk


def read_chunk(
    segment: Segment, call: Call, scale: float, dtype: torch.dtype, backend: str
) -> Chunk:
    """The chunks of a segment, with their gated values."""

    def read(x: Tensor | None) -> Tensor | None:
        return None if x is None else segment.read(x, 1, dtype)

    group = group_of(call)
    q, k = (segment.read(x, group, dtype) for x in (call.q, call.k))
    beta, g, erase = read(call.beta), read(call.g), read(call.erase)

    chunk = Chunk(q.mul_(scale), k, beta, g, erase, backend)
    chunk.v = segment.read(call.v, 1, dtype)
    if call.write is not None:
        chunk.v.mul_(segment.read(call.write, 1, dtype))
    return chunk


def chunk_forward(
    call: Call,
    scale: float,
    chunk_size: int,
    backend: str,
    save: bool,
    saved_chunks: list[Chunk] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and, if `save`, the state before each chunk [P, K, V] in the chunks' order.

    saved_chunks: takes each segment's chunks, if `save` and they are few.
    """
    q, v = call.q, call.v
    heads, K, V = v.shape[2], q.shape[3], v.shape[3]
    dtype = dtype_of(call)
    order = order_of(call, chunk_size)

    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = v.new_empty(order.sequences, heads, K, V, dtype=dtype)
    state = ranked(call.initial_state, order, state)  # [N·HV, K, V], longest sequences first

    total = sum(order.counts) * heads
    saved = state.new_empty(total if save else 0, K, V)
    few = v.device.type == "cpu" and total * order.chunk <= SAVED_TOKENS

    first = 0
    for segment in order.segments:
        chunk = read_chunk(segment, call, scale, dtype, backend)
        pairs = segment.rows * heads
        # A view of `saved`, into which `pass_states` writes.
        states = saved[first : first + pairs] if save else state.new_empty(pairs, K, V)
        first += pairs

        chunk.v_new = chunk.v if call.beta is None else chunk.t_beta @ chunk.v  # U
        pass_states(chunk, segment, state, states)

        # O = eᵞ Q S + tril(Δ QK⊤) V', [P, C, V]
        inside = torch.bmm(chunk.q_in, states).baddbmm_(chunk.qk, chunk.v_new)
        segment.write(o, inside)
        if save and few and saved_chunks is not None:
            saved_chunks.append(chunk)
    return o, unranked(state, order, heads), saved


def pass_states(chunk: Chunk, segment: Segment, state: Tensor, states: Tensor) -> None:
    """The recurrence over a segment's chunks, which turns U into V'.

    state: [N·HV, K, V], becomes that behind the segment. states: takes the state before each chunk, [P, K, V].
    """
    heads = len(states) // max(1, segment.rows)
    row = 0
    for count in segment.counts:
        now = slice(row, row + count * heads)  # the chunks of this step
        active = state[: count * heads]  # the sequences that have one
        row = now.stop

        states[now].copy_(active)
        if chunk.delta_rule:
            # V' = U − W S, with S before its decay: W has eᵞ already.
            chunk.v_new[now].baddbmm_(chunk.w[now], active, alpha=-1)
        if chunk.g is not None:
            active.mul_(chunk.decay_all[now])
        # S ← e^{γ_C} S + (e^{γ_C − γ} K)⊤ V', in place in `state`.
        active.baddbmm_(chunk.k_out[now].mT, chunk.v_new[now])
