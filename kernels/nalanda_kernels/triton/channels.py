"""The parts of the chunkwise kernels that a decay per key channel needs, forward and backward.

`kernels/README.md` has the derivation. These kernels read features, fold the decays into copies of them, and
leave the states and the outputs to the kernels of `chunk.py`.

Shapes: BT tokens a chunk, F features a head in tiles of BC, V values in tiles of BV.

A decay per key channel stands inside the sums q_iᵀk_j, and e^{−γ} would overflow. But let the chunk be cut
into spans of 2ⁿ tokens. For tokens i and j of two neighbouring spans with a border m between them,
e^{γ_i − γ_j} = e^{γ_i − γ_m} · e^{γ_m − γ_j}, and neither factor exceeds 1. Spans of 1, 2, 4, … BT/2 tokens
cover every pair i > j once, by a product of whole tiles each, of which only those pairs are kept.
"""

import triton
import triton.language as tl

from nalanda_kernels.triton.chunk import (
    load_chunk,
    load_gate,
    load_rows,
    square_at,
    store_rows,
    unit_lower_inverse,
)


@triton.jit
def thirds(x):
    """x as a sum of three bf16, which keep all of its digits."""
    # Each third has 8 of fp32's 24 bits.
    a = x.to(tl.bfloat16)
    x -= a.to(tl.float32)
    b = x.to(tl.bfloat16)
    return a, b, (x - b.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def load_decays(g, row, real, h, HV, F: tl.constexpr, i_f, BT: tl.constexpr, BC: tl.constexpr):
    """The log-decays of a tile in thirds; at least −104.5, where e^g is 0 in fp32, because 0 · ∞ is NaN."""
    x = load_rows(g, row, real, h, HV, F, i_f, BT, BC).to(tl.float32)
    return thirds(tl.where(x < -104.5, -104.5, x))


@triton.jit
def sums(mask, a, b, c):
    """Σ_u of_tu x_u for a mask `of` and x in thirds: exact products on tensor cores, and no differences.

    A difference of two γ would lose the digits that an earlier strong decay takes from both.
    """
    mask = mask.to(tl.bfloat16)
    # The smallest third first, all in one fp32 sum.
    return tl.dot(mask, a, tl.dot(mask, b, tl.dot(mask, c)))


@triton.jit
def between(t, u, n):
    """Whether g_u decays from the border of t's pair of spans of 2ⁿ tokens to t, or from t to the border."""
    border = ((t >> n) | 1) << n  # the first token of the second span
    # In the second span g from the border to t; in the first g after t, before the border.
    return ((border <= u) & (u <= t)) | ((t < u) & (u < border))


@triton.jit
def paired(i, j, n):
    """Whether i is in the second span of 2ⁿ tokens of a pair and j in the first."""
    # Neighbours of one pair: the spans' numbers differ in the last bit alone.
    return (((i >> n) ^ (j >> n)) == 1) & (i > j)


@triton.jit
def load_keys(
    k,
    erase,
    row,
    real,
    h,
    H,
    HV,
    F: tl.constexpr,
    ERASE: tl.constexpr,
    i_f,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """A tile of k, and of the keys that the delta rule reads with, erase ⊙ k."""
    x = load_rows(k, row, real, h // (HV // H), H, F, i_f, BT, BC)
    if ERASE:
        # erase is by head of v, k by head of q.
        e = load_rows(erase, row, real, h, HV, F, i_f, BT, BC).to(tl.float32)
        return x, (x.to(tl.float32) * e).to(x.dtype)
    return x, x


@triton.jit
def prepare_channels(
    q,
    k,
    beta,
    g,
    erase,
    inverse,
    scores,
    q_in,
    k_out,
    reads,
    channel_decays,
    start,
    count,
    scale,
    H,
    HV,
    F: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE: tl.constexpr,
    PAIRS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    PREC: tl.constexpr,
):
    """As `prepare`; also stores the four products that the other kernels read.

        q_in = eᵞ ⊙ q,    k_out = e^{γ_C − γ} ⊙ k,    reads = eᵞ ⊙ erase ⊙ k,    channel_decays = e^{γ_C}

    PAIRS: whether P and (I + L)⁻¹ are wanted; the backward has them already.
    """
    LEVELS: tl.constexpr = 4 + (BT > 16) + (BT > 32)  # log₂ BT
    i_c, h = tl.program_id(0), tl.program_id(1)
    row, real = load_chunk(start, count, i_c, BT)
    t = tl.arange(0, BT)
    i, j = t[:, None], t[None, :]
    p = tl.zeros([BT, BT], tl.float32)
    lower = tl.zeros([BT, BT], tl.float32)

    # A tile of BC channels at a time: what they add to P and L, and their decays.
    for i_f in range(0, tl.cdiv(F, BC)):
        # Tiles [BT, BC].
        q_tile = load_rows(q, row, real, h // (HV // H), H, F, i_f, BT, BC)
        k_tile, read = load_keys(k, erase, row, real, h, H, HV, F, ERASE, i_f, BT, BC)
        g1, g2, g3 = load_decays(g, row, real, h, HV, F, i_f, BT, BC)

        # From the chunk's start to a token.
        factor = tl.exp(sums(j <= i, g1, g2, g3))
        store_rows(q_in, q_tile.to(tl.float32) * factor, row, real, h, HV, F, i_f, BT, BC)
        if DELTA:
            store_rows(reads, read.to(tl.float32) * factor, row, real, h, HV, F, i_f, BT, BC)

        # Through the whole chunk; padding does not decay.
        c = i_f * BC + tl.arange(0, BC)
        # The last row of eᵞ, as a sum over rows: a tile has no index.
        last = tl.sum(tl.where(i == BT - 1, factor, 0.0), 0)
        tl.store(channel_decays + (i_c.to(tl.int64) * HV + h) * F + c, last, mask=c < F)

        # From a token to the chunk's end.
        factor = tl.exp(sums(j > i, g1, g2, g3))
        store_rows(k_out, k_tile.to(tl.float32) * factor, row, real, h, HV, F, i_f, BT, BC)

        # Pairs i = j, then i > j span by span.
        if PAIRS:
            # No decay lies between a token and itself.
            p += tl.where(
                i == j, tl.sum(q_tile.to(tl.float32) * k_tile.to(tl.float32), 1)[:, None], 0.0
            )
            for n in range(0, LEVELS):
                factor = tl.exp(sums(between(i, j, n), g1, g2, g3))
                # f⊤ is a product of its own, because compilers have erred with a product's transpose.
                mask = between(j, i, n).to(tl.bfloat16)
                log_factor = tl.dot(
                    tl.trans(g1), mask, tl.dot(tl.trans(g2), mask, tl.dot(tl.trans(g3), mask))
                )
                # early [BC, BT] decays up to the border, late [BT, BC] from it: no factor exceeds 1.
                early = (tl.trans(k_tile).to(tl.float32) * tl.exp(log_factor)).to(k_tile.dtype)
                late = (q_tile.to(tl.float32) * factor).to(q_tile.dtype)
                p += tl.where(paired(i, j, n), tl.dot(late, early, input_precision=PREC), 0.0)
                if DELTA:
                    late = (read.to(tl.float32) * factor).to(q_tile.dtype)
                    lower += tl.where(
                        paired(i, j, n), tl.dot(late, early, input_precision=PREC), 0.0
                    )

    if PAIRS:
        tl.store(square_at(scores, i_c, h, HV, BT), (p * scale).to(scores.dtype.element_ty))
        if DELTA:
            # β is the writer's, as in `prepare`.
            lower *= load_gate(beta, row, real, h, HV, BT)[None, :]
            solved = unit_lower_inverse(lower, BT)
            tl.store(square_at(inverse, i_c, h, HV, BT), solved.to(inverse.dtype.element_ty))


@triton.jit
def channel_gradients(
    q,
    k,
    e,
    d_o,
    d_v,
    beta,
    g,
    erase,
    s,
    d_s,
    d_scores,
    d_keys,
    d_q,
    d_k,
    d_beta,
    d_g,
    d_erase,
    start,
    count,
    scale,
    tokens,
    H,
    HV,
    F: tl.constexpr,
    V: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Computes the gradients of a tile of channels of q, k, g and erase, and that tile's share for β.

    The gradient of g_u sums all that passes through e^g_u. S itself, reads of S by i ≥ u and writes by j < u
    pass it, and pairs j < u ≤ i. k writes βk.
    """
    LEVELS: tl.constexpr = 4 + (BT > 16) + (BT > 32)
    i_f, i_c = tl.program_id(0) % tl.cdiv(F, BC), tl.program_id(0) // tl.cdiv(F, BC)
    h = tl.program_id(1)
    row, real = load_chunk(start, count, i_c, BT)
    t, c = tl.arange(0, BT), i_f * BC + tl.arange(0, BC)
    i, j = t[:, None], t[None, :]

    # [BT, BC] each. state_products: S · dS' of each channel [BC].
    dq = tl.zeros([BT, BC], tl.float32)
    d_written = tl.zeros([BT, BC], tl.float32)  # of βk as what is written
    d_read = tl.zeros([BT, BC], tl.float32)  # of erase ⊙ k as what is read
    state_products = tl.zeros([BC], tl.float32)

    for i_v in range(0, tl.cdiv(V, BV)):
        v = i_v * BV + tl.arange(0, BV)
        at = ((i_c.to(tl.int64) * HV + h) * F + c)[:, None] * V + v[None, :]
        inside = (c < F)[:, None] & (v < V)[None, :]
        # S before the chunk and dS' after it, [BC, BV].
        before = tl.load(s + at, mask=inside, other=0.0)
        after = tl.load(d_s + at, mask=inside, other=0.0)

        # dO S⊤ for q.
        x = load_rows(d_o, row, real, h, HV, V, i_v, BT, BV)
        dq = tl.dot(x, tl.trans(before), dq, input_precision=PREC)
        # E dS'⊤ for what is written.
        x = load_rows(e, row, real, h, HV, V, i_v, BT, BV)
        d_written = tl.dot(x, tl.trans(after), d_written, input_precision=PREC)
        if DELTA:
            # dV S⊤ for what reads S in the error.
            x = load_rows(d_v, row, real, h, HV, V, i_v, BT, BV)
            d_read = tl.dot(x, tl.trans(before), d_read, input_precision=PREC)

        state_products += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)

    # From here on x is q, [BT, BC].
    x = load_rows(q, row, real, h // (HV // H), H, F, i_f, BT, BC)
    k_tile, read = load_keys(k, erase, row, real, h, H, HV, F, ERASE, i_f, BT, BC)

    dtype = x.dtype
    x, written, read = x.to(tl.float32), k_tile.to(tl.float32), read.to(tl.float32)
    b = tl.full([BT], 1.0, tl.float32)
    if DELTA:
        b = load_gate(beta, row, real, h, HV, BT)
        written *= b[:, None]

    # Reads of S, through the decay from the chunk's start.
    g1, g2, g3 = load_decays(g, row, real, h, HV, F, i_f, BT, BC)
    factor = tl.exp(sums(j <= i, g1, g2, g3))
    dq *= factor * scale
    # A term times its gradient is the gradient of the term's log-decay.
    shared = x * dq

    if DELTA:
        # The error has −eᵞ K S.
        d_read *= -factor
        shared += read * d_read
    s1, s2, s3 = thirds(shared)
    # g_u is in the decay of every read at t ≥ u.
    dg = sums(j >= i, s1, s2, s3)

    # S itself through the whole chunk, and writes, through the decay to its end.
    dg += (state_products * tl.sum(tl.where(i == BT - 1, factor, 0.0), 0))[None, :]
    d_written *= tl.exp(sums(j > i, g1, g2, g3))
    # And in that of every write at t < u.
    s1, s2, s3 = thirds(written * d_written)
    dg += sums(j < i, s1, s2, s3)

    # Gradients of the pairs, [BT, BT]; without the delta rule d_keys is d_scores, and unused.
    d_p = tl.load(square_at(d_scores, i_c, h, HV, BT))
    d_lower = tl.load(square_at(d_keys, i_c, h, HV, BT))

    # Pairs i = j, then i > j span by span. A pair shares its decay among the tokens between.
    diagonal = tl.sum(tl.where(i == j, d_p.to(tl.float32), 0.0), 1)[:, None]
    dq += diagonal * written
    d_written += diagonal * x
    for n in range(0, LEVELS):
        factor = tl.exp(sums(between(i, j, n), g1, g2, g3))
        early, late = (written * factor).to(dtype), (x * factor).to(dtype)

        # The pair (i, j) gives f_i f_j dP_ij w_j to q_i, and f_i f_j dP_ij q_i to w_j.
        block = tl.where(paired(i, j, n), d_p, 0.0).to(dtype)
        d_pair = factor * tl.dot(block, early, input_precision=PREC)
        dq += d_pair
        shared = x * d_pair
        d_pair = tl.dot(tl.trans(block), late, input_precision=PREC)
        if DELTA:
            # And L's pairs: dL_ij w_j to what reads, dL_ij r_i to what is written.
            late = (read * factor).to(dtype)
            block = tl.where(paired(i, j, n), d_lower, 0.0).to(dtype)
            d_pair = tl.dot(tl.trans(block), late, d_pair, input_precision=PREC)
            through = factor * tl.dot(block, early, input_precision=PREC)
            d_read += through
            shared += read * through

        d_pair *= factor
        d_written += d_pair
        s1, s2, s3 = thirds(shared + written * d_pair)
        # g_u is in the factor of each t with u between t and its border.
        dg += sums(between(j, i, n), s1, s2, s3)

    store_rows(d_q, dq, row, real, h, HV, F, i_f, BT, BC)
    k_tile = k_tile.to(tl.float32)

    # w = βk and r = erase ⊙ k, so dk = β dw + erase ⊙ dr.
    dk = d_written
    if DELTA:
        shares = (i_f.to(tl.int64) * tokens + row + t) * HV + h
        tl.store(d_beta + shares, tl.sum(d_written * k_tile, 1), mask=real)
        dk *= b[:, None]
        if ERASE:
            store_rows(d_erase, d_read * k_tile, row, real, h, HV, F, i_f, BT, BC)
            d_read *= load_rows(erase, row, real, h, HV, F, i_f, BT, BC).to(tl.float32)
        dk += d_read
    store_rows(d_k, dk, row, real, h, HV, F, i_f, BT, BC)
    store_rows(d_g, dg, row, real, h, HV, F, i_f, BT, BC)
