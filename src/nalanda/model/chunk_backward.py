"""The chunkwise form of the recurrences in `ops`, backward. Shapes and symbols are those of `chunk_forward`.

Here d stands for gradients and S' for the state after the chunk. The backward needs no gradient of T, U or W.
For V' = TX with X = β(V − eᵞ R S), so that dA = −dX V'⊤:

    dV' = tril(Δ QK⊤)⊤ dO + e^{γ_C − γ} K dS'         dX = T⊤ dV'         dA = −tril(dX V'⊤, −1)
    dS = e^{γ_C} dS' + (eᵞ Q)⊤ dO − W⊤ dV'

Four terms decay at token t, and dg_t sums their shares:

    pairs (i, j) with j < t ≤ i        reads of S by i ≥ t        writes of j < t to S'        S as it becomes S'

No differences are taken, so small gradients stay exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call, group_of
from .chunk_channels import channel_gradients
from .chunk_forward import Chunk, read_chunk
from .chunk_order import Segment, order_of, ranked, unranked


class Gradients(NamedTuple):
    """The gradients of a call's tensors but the state and cu_seqlens; empty for absent tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    erase: Tensor
    write: Tensor


class DecayShares:
    """The shares of dg in a segment's chunks, as the parts of the backward add them up."""

    def __init__(self, chunk: Chunk, d_q: Tensor, d_k: Tensor, d_all: Tensor):
        """The shares of reads, writes and S itself, for d_q and d_k [P, C, K] through S and S'.

        d_all: e^{γ_C} times its gradient, [P, K, 1].
        """
        # d_q and d_k have their decays in them, so x·dx is the gradient of the exponent.
        reads, writes = chunk.q * d_q, chunk.k * d_k
        if chunk.by_channel:
            # S decays by every g of the chunk, as if the last token read it.
            reads[:, -1:] += d_all.mT
            self.reads, self.writes = reads, writes  # [P, C, K]
        else:
            self.reads, self.writes = reads.sum(-1, True), writes.sum(-1, True)  # [P, C, 1]
            self.all = d_all.sum(1, True)  # [P, 1, 1]
        self.pairs: Tensor = reads.new_empty(0)  # [P, C, C], of a decay per head

    def by_head(self) -> Tensor:
        """dg [P, C] of a decay per head, from all shares."""
        C = self.reads.shape[1]
        from_t_on = self.reads.new_ones(C, C).triu()

        # [P, C, 1], the four terms of dg_t in turn.
        d_g = torch.zeros_like(self.writes)
        d_g[:, 1:] = self.writes[:, :-1].cumsum(1)  # writes of j < t
        d_g += self.all  # S as it becomes S'
        d_g += from_t_on @ self.reads  # reads by i ≥ t
        # Entry (t, j) sums the pairs of i ≥ t; the mask keeps j < t.
        d_g += (from_t_on @ self.pairs).tril_(-1).sum(-1, keepdim=True)
        return d_g.squeeze(-1)


class ChunkGradients:
    """The gradients of a segment's chunks, from those of its outputs, V' and states.

    state: S before each chunk, d_after: dS', [P, K, V]. d_o and d_v_new: [P, C, V]. backend: as in `chunk`.
    """

    beta: Tensor  # [P, C], set where there is β
    shares: DecayShares  # set where there is a decay

    def __init__(
        self,
        chunk: Chunk,
        state: Tensor,
        d_after: Tensor,
        d_o: Tensor,
        d_v_new: Tensor,
        backend: str,
    ):
        self.chunk, self.state, self.d_v_new, self.backend = chunk, state, d_v_new, backend
        self.q = d_o @ state.mT  # [P, C, K], through S
        self.k = chunk.v_new @ d_after.mT  # [P, C, K], through S'
        self.v = d_v_new  # [P, C, V]; of X with β
        self.erased = self.k  # of R, [P, C, K]: a tensor of its own only where R is not K

        if chunk.g is not None:
            self.q.mul_(chunk.decay_in)
            self.k.mul_(chunk.decay_out)
            # [P, K, 1], also for a decay per head, whose shares sum over K.
            d_all = chunk.decay_all * (state * d_after).sum(-1, keepdim=True)
            self.shares = DecayShares(chunk, self.q, self.k, d_all)

        # QK⊤ first: it sets `shares.pairs`, to which A adds. Channel scores last: they end the shares.
        self.qk = (d_o @ chunk.v_new.mT).tril_()  # [P, C, C]
        if not chunk.by_channel:
            self._through_qk()
        if chunk.delta_rule:
            self._through_delta_rule()
        elif chunk.by_channel:
            self._through_channel_scores([self.qk], [chunk.q], [self.q])

    def _through_qk(self) -> None:
        """From QK⊤ to Q and K, without decays or with one per head."""
        chunk = self.chunk
        if chunk.g is not None:
            # chunk.qk has Δ in it, so this is the gradient of each γ_i − γ_j.
            self.shares.pairs = (self.qk * chunk.qk).tril_(-1)
            self.qk.mul_(chunk.delta)  # from here of QK⊤ without Δ
        self.q.baddbmm_(self.qk, chunk.k)
        self.k.baddbmm_(self.qk.mT, chunk.q)

    def _through_delta_rule(self) -> None:
        """From V' = TX to V, K, R and β."""
        chunk = self.chunk
        d_x = chunk.t.mT @ self.d_v_new  # [P, C, V]
        d_a = (d_x @ chunk.v_new.mT).neg_()  # [P, C, C]
        through_a = d_a * chunk.kk  # β's share in A; kk masks dA, which is full
        through_x = d_x @ self.state.mT  # [P, C, K], of −β eᵞ R
        if chunk.g is not None:
            through_x.mul_(chunk.decay_in)
        if chunk.erase is not None:
            self.erased = torch.zeros_like(through_x)  # apart from dK until `write` passes the gate
        # dR = −β eᵞ dX S⊤; through_x has eᵞ now.
        self.erased.addcmul_(through_x, chunk.beta, value=-1)

        # β scales V and R in X, and A.
        read = through_x.mul_(chunk.erased)  # [P, C, K], in place: through_x is used up
        if not chunk.by_channel:
            read = read.sum(-1, keepdim=True)
        # dβ_i = dX_i·(V − eᵞ R S)_i + Σ_j dA_ij kk_ij
        self.beta = (d_x * chunk.v).sum(-1) + through_a.sum(-1) - read.sum(-1)
        if chunk.g is not None:
            self.shares.reads.addcmul_(read, chunk.beta, value=-1)
        d_kk = d_a.mul_(chunk.beta)

        if chunk.by_channel:
            rows, d_rows = [chunk.q, chunk.erased], [self.q, self.erased]
            self._through_channel_scores([self.qk, d_kk], rows, d_rows)
        else:
            self._through_kk(d_kk, through_a)
        self.v = d_x.mul_(chunk.beta)

    def _through_kk(self, d_kk: Tensor, through_a: Tensor) -> None:
        """From RK⊤ to R and K, without decays or with one per head."""
        chunk = self.chunk
        if chunk.g is not None:
            self.shares.pairs += through_a.mul_(chunk.beta)  # A has Δ in it, like QK⊤
            d_kk.mul_(chunk.delta)
        d_kk.tril_(-1)
        if chunk.erase is None:
            self.k.baddbmm_(d_kk + d_kk.mT, chunk.k)  # R = K: both factors of KK⊤ at once
        else:
            self.erased.baddbmm_(d_kk, chunk.k)
            self.k.baddbmm_(d_kk.mT, chunk.erased)

    def _through_channel_scores(
        self, d_scores: list[Tensor], rows: list[Tensor], d_rows: list[Tensor]
    ) -> None:
        """From the scores [P, C, C] of rows Q, and R, to d_rows and to K. Turns the shares of reads into dg."""
        chunk, shares = self.chunk, self.shares
        assert chunk.g is not None
        channel_gradients(
            rows,
            chunk.k,
            chunk.g,
            d_scores,
            d_rows,
            self.k,
            shares.reads,
            shares.writes,
            self.backend,
        )

    def write(self, segment: Segment, call: Call, target: Gradients, scale: float) -> None:
        """Passes the gates and writes the gradients into `target`."""
        chunk, group, dtype = self.chunk, group_of(call), self.q.dtype
        if chunk.delta_rule:
            segment.write(target.beta, self.beta)
        if chunk.g is not None:
            d_g = self.shares.reads if chunk.by_channel else self.shares.by_head()
            segment.write(target.g, d_g)

        if chunk.erase is not None:
            # R = erase ⊙ K
            segment.write(target.erase, chunk.k * self.erased)
            self.k.addcmul_(chunk.erase, self.erased)
        if call.write is not None:
            # The values are write ⊙ v; self.v is their gradient.
            segment.write(target.write, segment.read(call.v, 1, dtype).mul_(self.v))
            self.v = segment.read(call.write, 1, dtype).mul_(self.v)

        # chunk.q is scale · q. A group's heads are summed.
        segment.write(target.q, self.q.mul_(scale), group)
        segment.write(target.k, self.k, group)
        segment.write(target.v, self.v)


def chunk_backward(
    d_o: Tensor,
    d_final: Tensor | None,
    call: Call,
    states: Tensor,
    scale: float,
    chunk_size: int,
    backend: str,
    saved_chunks: list[Chunk] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of the call's tensors but cu_seqlens. Recomputes all but the states and the saved chunks."""
    heads, K, V = call.v.shape[2], *states.shape[1:]
    dtype = states.dtype
    order = order_of(call, chunk_size)
    gradients = empty_gradients(call)

    d_state = call.v.new_empty(order.sequences, heads, K, V, dtype=dtype)
    d_state = ranked(d_final, order, d_state)  # [N·HV, K, V], longest sequences first

    last = len(states)
    for index, segment in reversed([*enumerate(order.segments)]):
        first = last - segment.rows * heads
        state, last = states[first:last], first

        if saved_chunks:
            chunk = saved_chunks[index]
        else:
            chunk = read_chunk(segment, call, scale, dtype, backend)
            chunk.v_new = chunk.v
            if chunk.delta_rule:
                # V' = U − W S from the saved states, without their recurrence.
                chunk.v_new = torch.bmm(chunk.t_beta, chunk.v).baddbmm_(chunk.w, state, alpha=-1)

        d_o_chunks = segment.read(d_o, 1, dtype)
        d_v_new = chunk.qk.mT @ d_o_chunks  # tril(Δ QK⊤)⊤ dO, [P, C, V]
        d_after = pass_back(chunk, segment, d_state, d_o_chunks, d_v_new)
        parts = ChunkGradients(chunk, state, d_after, d_o_chunks, d_v_new, backend)
        parts.write(segment, call, gradients, scale)

    return *gradients, unranked(d_state, order, heads)


def pass_back(
    chunk: Chunk, segment: Segment, d_state: Tensor, d_o: Tensor, d_v_new: Tensor
) -> Tensor:
    """The recurrence over a segment's chunks, from the last to the first. Returns dS' of each, [P, K, V].

    d_state: [N·HV, K, V], becomes that before the segment. d_v_new: [P, C, V], takes what comes through S'.
    """
    heads = len(d_v_new) // max(1, segment.rows)
    d_after = d_state.new_empty(len(d_v_new), *d_state.shape[1:])
    row = len(d_after)
    for count in reversed(segment.counts):
        row -= count * heads
        now = slice(row, row + count * heads)  # the chunks of this step
        active = d_state[: count * heads]  # the sequences that have one

        d_after[now].copy_(active)
        # dV' before dS: it reads dS' undecayed, and W⊤ dV' below needs all of it.
        d_v_new[now].baddbmm_(chunk.k_out[now], active)
        if chunk.g is not None:
            active.mul_(chunk.decay_all[now])
        active.baddbmm_(chunk.q_in[now].mT, d_o[now])
        if chunk.delta_rule:
            active.baddbmm_(chunk.w[now].mT, d_v_new[now], alpha=-1)
    return d_after


def empty_gradients(call: Call) -> Gradients:
    """Uninitialised gradients, empty for absent tensors, because operators may not return None."""
    none = call.v[:0]
    like = (none if x is None else x for x in call[: len(Gradients._fields)])
    return Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like))
