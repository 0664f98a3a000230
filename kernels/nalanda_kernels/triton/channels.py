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
    square,
    store_rows,
    unit_lower_inverse,
)


@triton.jit
def thirds(x):
    """x as a sum of three bf16, which keep all of its digits."""
    a = x.to(tl.bfloat16)
    x -= a.to(tl.float32)
    b = x.to(tl.bfloat16)
    return a, b, (x - b.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def load_decays(g, row, rows, h, HV, F: tl.constexpr, i_f, BT: tl.constexpr, BC: tl.constexpr):
    """The log-decays of a tile in thirds; at least −104.5, where e^g is 0 in fp32, because 0 · ∞ is NaN."""
    x = load_rows(g, row, rows, h, HV, F, i_f, BT, BC).to(tl.float32)
    return thirds(tl.where(x < -104.5, -104.5, x))


@triton.jit
def sums(of, a, b, c):
    """Σ_u of_tu x_u for a mask `of` and x in thirds: exact products on tensor cores, and no differences.

    A difference of two γ would lose the digits that an earlier strong decay takes from both.
    """
    of = of.to(tl.bfloat16)
    return tl.dot(of, a, tl.dot(of, b, tl.dot(of, c)))


@triton.jit
def between(t, u, n):
    """Whether g_u decays from the border of t's pair of spans of 2ⁿ tokens to t, or from t to the border."""
    border = ((t >> n) | 1) << n  # the first token of the second span
    return ((border <= u) & (u <= t)) | ((t < u) & (u < border))


@triton.jit
def paired(i, j, n):
    """Whether i is in the second span of 2ⁿ tokens of a pair and j in the first."""
    return (((i >> n) ^ (j >> n)) == 1) & (i > j)


@triton.jit
def load_keys(
    k,
    erase,
    row,
    rows,
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
    x = load_rows(k, row, rows, h // (HV // H), H, F, i_f, BT, BC)
    if ERASE:
        e = load_rows(erase, row, rows, h, HV, F, i_f, BT, BC).to(tl.float32)
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
    """As `prepare`, and eᵞ ⊙ q, e^{γ_C − γ} ⊙ k, eᵞ ⊙ erase ⊙ k and e^{γ_C}, which the other kernels read.

    PAIRS: whether P and (I + A)⁻¹ are wanted; the backward has them already.
    """
    LEVELS: tl.constexpr = 4 + (BT > 16) + (BT > 32)
    i_c, h = tl.program_id(0), tl.program_id(1)
    row, rows = load_chunk(start, count, i_c, BT)
    t = tl.arange(0, BT)
    i, j = t[:, None], t[None, :]
    p = tl.zeros([BT, BT], tl.float32)
    a = tl.zeros([BT, BT], tl.float32)
    for i_f in range(0, tl.cdiv(F, BC)):
        x = load_rows(q, row, rows, h // (HV // H), H, F, i_f, BT, BC)
        y, r = load_keys(k, erase, row, rows, h, H, HV, F, ERASE, i_f, BT, BC)
        g1, g2, g3 = load_decays(g, row, rows, h, HV, F, i_f, BT, BC)
        f = tl.exp(sums(j <= i, g1, g2, g3))
        store_rows(q_in, x.to(tl.float32) * f, row, rows, h, HV, F, i_f, BT, BC)
        if DELTA:
            store_rows(reads, r.to(tl.float32) * f, row, rows, h, HV, F, i_f, BT, BC)
        c = i_f * BC + tl.arange(0, BC)
        last = tl.sum(tl.where(i == BT - 1, f, 0.0), 0)  # padding does not decay
        tl.store(channel_decays + (i_c.to(tl.int64) * HV + h) * F + c, last, mask=c < F)
        f = tl.exp(sums(j > i, g1, g2, g3))
        store_rows(k_out, y.to(tl.float32) * f, row, rows, h, HV, F, i_f, BT, BC)
        if PAIRS:
            p += tl.where(i == j, tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)[:, None], 0.0)
            for n in range(0, LEVELS):
                f = tl.exp(sums(between(i, j, n), g1, g2, g3))
                # f⊤ is a product of its own, because compilers have erred with a product's transpose.
                of = between(j, i, n).to(tl.bfloat16)
                f_t = tl.dot(tl.trans(g1), of, tl.dot(tl.trans(g2), of, tl.dot(tl.trans(g3), of)))
                early = (tl.trans(y).to(tl.float32) * tl.exp(f_t)).to(y.dtype)
                late = (x.to(tl.float32) * f).to(x.dtype)
                p += tl.where(paired(i, j, n), tl.dot(late, early, input_precision=PREC), 0.0)
                if DELTA:
                    late = (r.to(tl.float32) * f).to(x.dtype)
                    a += tl.where(paired(i, j, n), tl.dot(late, early, input_precision=PREC), 0.0)
    if PAIRS:
        tl.store(square(scores, i_c, h, HV, BT), (p * scale).to(scores.dtype.element_ty))
        if DELTA:
            a = unit_lower_inverse(a * load_gate(beta, row, rows, h, HV, BT)[None, :], BT)
            tl.store(square(inverse, i_c, h, HV, BT), a.to(inverse.dtype.element_ty))


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
    """Gradients of a tile of channels of q, k, g and erase, and that tile's share for β.

    The gradient of g_u sums what passes through e^g_u: reads of S by i ≥ u, writes of j < u to S', S
    itself, and pairs j < u ≤ i, found span by span. What k writes is βk.
    """
    LEVELS: tl.constexpr = 4 + (BT > 16) + (BT > 32)
    i_f, i_c = tl.program_id(0) % tl.cdiv(F, BC), tl.program_id(0) // tl.cdiv(F, BC)
    h = tl.program_id(1)
    row, rows = load_chunk(start, count, i_c, BT)
    t, c = tl.arange(0, BT), i_f * BC + tl.arange(0, BC)
    i, j = t[:, None], t[None, :]
    dq = tl.zeros([BT, BC], tl.float32)
    dw = tl.zeros([BT, BC], tl.float32)  # of βk as what is written
    dr = tl.zeros([BT, BC], tl.float32)  # of erase ⊙ k as what is read
    carried = tl.zeros([BC], tl.float32)
    for i_v in range(0, tl.cdiv(V, BV)):
        v = i_v * BV + tl.arange(0, BV)
        at = ((i_c.to(tl.int64) * HV + h) * F + c)[:, None] * V + v[None, :]
        inside = (c < F)[:, None] & (v < V)[None, :]
        before = tl.load(s + at, mask=inside, other=0.0)
        after = tl.load(d_s + at, mask=inside, other=0.0)
        x = load_rows(d_o, row, rows, h, HV, V, i_v, BT, BV)
        dq = tl.dot(x, tl.trans(before), dq, input_precision=PREC)
        x = load_rows(e, row, rows, h, HV, V, i_v, BT, BV)
        dw = tl.dot(x, tl.trans(after), dw, input_precision=PREC)
        if DELTA:
            x = load_rows(d_v, row, rows, h, HV, V, i_v, BT, BV)
            dr = tl.dot(x, tl.trans(before), dr, input_precision=PREC)
        carried += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)

    x = load_rows(q, row, rows, h // (HV // H), H, F, i_f, BT, BC)
    y, r = load_keys(k, erase, row, rows, h, H, HV, F, ERASE, i_f, BT, BC)
    dtype = x.dtype
    x, w, r = x.to(tl.float32), y.to(tl.float32), r.to(tl.float32)
    b = tl.full([BT], 1.0, tl.float32)
    if DELTA:
        b = load_gate(beta, row, rows, h, HV, BT)
        w *= b[:, None]
    g1, g2, g3 = load_decays(g, row, rows, h, HV, F, i_f, BT, BC)
    f = tl.exp(sums(j <= i, g1, g2, g3))
    dq *= f * scale
    share = x * dq
    if DELTA:
        dr *= -f
        share += r * dr
    s1, s2, s3 = thirds(share)
    dg = sums(j >= i, s1, s2, s3)
    dg += (carried * tl.sum(tl.where(i == BT - 1, f, 0.0), 0))[None, :]
    dw *= tl.exp(sums(j > i, g1, g2, g3))
    s1, s2, s3 = thirds(w * dw)
    dg += sums(j < i, s1, s2, s3)

    d_p = tl.load(square(d_scores, i_c, h, HV, BT))
    d_a = tl.load(square(d_keys, i_c, h, HV, BT))
    diagonal = tl.sum(tl.where(i == j, d_p.to(tl.float32), 0.0), 1)[:, None]
    dq += diagonal * w
    dw += diagonal * x
    for n in range(0, LEVELS):
        f = tl.exp(sums(between(i, j, n), g1, g2, g3))
        early, late = (w * f).to(dtype), (x * f).to(dtype)
        block = tl.where(paired(i, j, n), d_p, 0.0).to(dtype)
        z = f * tl.dot(block, early, input_precision=PREC)
        dq += z
        share = x * z
        z = tl.dot(tl.trans(block), late, input_precision=PREC)
        if DELTA:
            late = (r * f).to(dtype)
            block = tl.where(paired(i, j, n), d_a, 0.0).to(dtype)
            z = tl.dot(tl.trans(block), late, z, input_precision=PREC)
            through = f * tl.dot(block, early, input_precision=PREC)
            dr += through
            share += r * through
        z *= f
        dw += z
        s1, s2, s3 = thirds(share + w * z)
        dg += sums(between(j, i, n), s1, s2, s3)

    store_rows(d_q, dq, row, rows, h, HV, F, i_f, BT, BC)
    y = y.to(tl.float32)
    dk = dw
    if DELTA:
        shares = (i_f.to(tl.int64) * tokens + row + t) * HV + h
        tl.store(d_beta + shares, tl.sum(dw * y, 1), mask=rows)
        dk *= b[:, None]
        if ERASE:
            store_rows(d_erase, dr * y, row, rows, h, HV, F, i_f, BT, BC)
            dr *= load_rows(erase, row, rows, h, HV, F, i_f, BT, BC).to(tl.float32)
        dk += dr
    store_rows(d_k, dk, row, rows, h, HV, F, i_f, BT, BC)
    store_rows(d_g, dg, row, rows, h, HV, F, i_f, BT, BC)
