"""The chunkwise form of the recurrences in `ops`, backward.

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences; C tokens a
chunk, R chunks of a segment ("rows"), P = R·HV pairs of a chunk and a head.
"""

import torch
from torch import Tensor

from .chunk_forward import Chunk, read_chunk
from .chunk_order import order_of, ranked, unranked

# The backward (d for gradients, S' the state after the chunk) needs no gradient of T, U or W, because
# V' = TX with X = β(V − eᵞ K S) gives dA = −dX V'⊤:
#
#     dV' = tril(Δ QK⊤)⊤ dO + e^{γ_C − γ} K dS'         dX = T⊤ dV'         dA = −tril(dX V'⊤, −1)
#     dS = e^{γ_C} dS' + (eᵞ Q)⊤ dO − W⊤ dV'
#
# dg_t sums the shares of all that decays at token t: pairs (i, j) with j < t ≤ i, reads of S by i ≥ t, writes
# of j < t to S', and S itself as it becomes S'. No differences are taken, so small gradients stay exact.


def chunk_backward(
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
    kept: list[Chunk] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, the gates and the initial state; recomputes all but the states and the `kept`."""
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    dtype = states.dtype
    order = order_of(q, v, cu_seqlens, chunk_size)
    c = order.chunk
    straddling = torch.ones(c, c, dtype=dtype, device=v.device).triu()
    d_q, d_k, d_v, d_beta, d_g, d_erase, d_write = empty_grads(q, k, v, beta, g, erase, write)
    d_state = ranked(d_final, order, dtype, v.new_empty(order.sequences, heads, *states.shape[1:]))
    first = len(states)
    for index, segment in reversed([*enumerate(order.segments)]):
        first -= segment.rows * heads
        s = states[first : first + segment.rows * heads]
        if kept:
            chunk = kept[index]
            v_, v_new = chunk.v, chunk.v_new
        else:
            chunk, v_ = read_chunk(segment, q, k, v, beta, g, erase, write, scale, dtype)
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
    return d_q, d_k, d_v, d_beta, d_g, d_erase, d_write, unranked(d_state, order, heads)


def empty_grads(q, k, v, *gates) -> tuple[Tensor, ...]:
    """Uninitialised gradients, empty for absent inputs, because operators may not return None."""
    like = (q, k, v, *(v[:0] if x is None else x for x in gates))
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
