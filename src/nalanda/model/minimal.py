"""Every recurrence of these models as one function, to read before the fast forms of it.

A head's state S of [K, V] starts at zero or where an earlier call stopped. For each token it decays, the value
stored under the erased key is taken out, and the new value is written:

    S_t = (I − k_t (e_t ⊙ k_t)⊤) Diag(e^{g_t}) S_{t−1} + k_t (w_t ⊙ v_t)⊤        o_t = scale · S_t⊤ q_t

The rules differ in g [K], e [K] and w [V] alone:

    rule                                    g               e           w
    linear attention, TransNormer           0               0           1
    RetNet; Mamba 2                         one a head      0           1; Δ
    Mamba 3, with k and v one token late    one a head      0           its own
    gated linear attention                  one a channel   0           1
    DeltaNet, DeltaProduct                  0               β           β
    Gated DeltaNet; KDA                     a head; channel β           β
    Comba                                   one a head      βe^−g       β
    Gated DeltaNet 2                        one a channel   its own     its own
    RWKV-7, with k = aκ; k                  a channel; 0    1/(aw); 0   0; 1

DeltaProduct and RWKV-7 have several tokens here for one of the text. Nothing imports this file: `ops.py`,
`chunk_forward.py` and the kernels compute the same faster, and tests hold each of them to this function.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    e: Tensor,
    w: Tensor,
    *,
    state: Tensor | None = None,
    bounds: list[int] | None = None,
    feature_map: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    qk_norm: bool = False,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Runs a rule over time, chunk by chunk.

    Args:
        q, k: `[B, T, H, ·]`, before the map. v, w: `[B, T, HV, V]`, HV a multiple of H.
        g, e: `[B, T, HV, K]`, K after the map; g is the natural logarithm of the decay, ≤ 0.
        state: `[N, HV, K, V]`, zero by default; N is B, or the number of documents.
        bounds: where the documents of one row begin and end (B = 1): 0, …, T. They see nothing of each other.
        feature_map: maps (q, k) to features, of any width. qk_norm: whether features then get length 1.
        scale: of the readout; by default K^-½.

    Returns o `[B, T, HV, V]` and the states `[N, HV, K, V]` behind the last tokens.
    """
    # The features that enter the state, [B, T, H, K].
    if feature_map is not None:
        q, k = feature_map(q, k)
    if qk_norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)

    # One head of q and k serves HV / H heads of v. Time comes last but one: [B, HV, T, ·].
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q, k, v, g, e, w = (x.transpose(1, 2) for x in (q, k, v, g, e, w))
    # e^−750 is 0 in float64 too, and −∞ − (−∞) would be no number.
    g = g.clamp(min=-750)

    packed = bounds is not None
    N = len(bounds) - 1 if packed else len(q)
    if state is None:
        state = q.new_zeros(N, q.shape[1], q.shape[3], v.shape[3])

    outputs, states = [], []
    for n, (begin, end) in enumerate(pairwise(bounds if packed else [0, q.shape[2]])):
        S = state[n : n + 1] if packed else state

        for start in range(begin, end, chunk_size):
            # A chunk's C tokens: Q, K, γ, E [·, C, K] and V, W [·, C, V].
            now = slice(start, min(start + chunk_size, end))
            Q, K, V, E, W = (x[:, :, now] for x in (q, k, v, e, w))

            # γ_i: the log-decay from the chunk's start to behind that of token i.
            decay = g[:, :, now].cumsum(2)
            # e^(γ_i − γ_j), the decay of what token j wrote until token i; 0 for j > i. [·, C, C, K]
            between = decay[..., :, None, :] - decay[..., None, :, :]
            future = torch.ones(between.shape[2:4], dtype=torch.bool, device=q.device).triu(1)
            between = between.masked_fill(future[..., None], -torch.inf).exp()

            # L_ij: how much of token j's write the erased key of token i finds, for j < i.
            overlap = torch.einsum("bhik,bhijk,bhjk->bhij", E * K, between, K).tril(-1)
            # What token i writes: u_i = w_i ⊙ v_i − (e_i ⊙ k_i)⊤ Diag(e^γ_i) S − Σ_j L_ij u_j. [·, C, V]
            alone = W * V - (E * K * decay.exp()) @ S
            identity = torch.eye(len(future), dtype=q.dtype, device=q.device)
            U = torch.linalg.solve_triangular(identity + overlap, alone, upper=False)

            # o_i = S⊤ (e^γ_i ⊙ q_i) + Σ_{j ≤ i} (q_i⊤ Diag(e^(γ_i − γ_j)) k_j) u_j
            read = torch.einsum("bhik,bhijk,bhjk->bhij", Q, between, K)
            outputs.append((Q * decay.exp()) @ S + read @ U)

            # S ← Diag(e^γ_C) S + Σ_j Diag(e^(γ_C − γ_j)) k_j u_j⊤
            last = decay[:, :, -1:]
            S = last.exp().mT * S + ((last - decay).exp() * K).mT @ U

        states.append(S)
    return torch.cat(outputs, 2).transpose(1, 2), torch.cat(states)
