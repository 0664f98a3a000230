"""The kernels of the chunkwise form, forward and backward: linear attention and the delta rule.

`kernels/README.md` has the derivation; `recurrence.py` launches the kernels.

Shapes: BT tokens a chunk, F = halves × K features a head (tiles of BK ≥ K columns), V values in tiles of BV.
Kernels form features in registers when they read q and k. Under the map "stored", q and k hold features.

Linear attention may divide by its sums (`Readout`). Let r = φ(q)ᵀS, d = φ(q)ᵀz, t the number of tokens read
and D = d + 1e-6 t; for MALA also c_t and u = Σ_{j≤t} v_j. Every readout is o = w (r + a u) with w = 1/D + c
and a = −c d/(t w). Backward: dR = w dO, d_d = −(dO·R)/D² − (c/t) dO·u with R = O/w − a u, and du = a dR.
"""

import ast
import dataclasses
import functools

import triton
import triton.language as tl

from nalanda_kernels.triton.feature_maps import EPS, features, features_backward


@dataclasses.dataclass(frozen=True)
class Readout:
    """The readout, a compile-time constant of kernels.

    name: "", r · scale; "mean", r/D; "mala", r/D + c(r − d u/t).
    magnitude: MALA's c: "code" and "inverse_t", root/t; "literal", 1.
    root: K^-½ for "code", else 1.
    mirrored: queries of odd heads of v have their two halves of features swapped (Pola).
    """

    name: str = ""
    magnitude: str = ""
    root: float = 1.0
    mirrored: bool = False

    def text(self) -> str:
        """The readout as an argument of an operator."""
        return repr(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Readout":
        return Readout(*ast.literal_eval(text))


# ------------------------------------------------------------------------------------------ parts of kernels


@triton.jit
def load_chunk(start, count, i_c, BT: tl.constexpr):
    """First token of the chunk as int64, and the mask of its real tokens [BT]."""
    return tl.load(start + i_c), tl.arange(0, BT) < tl.load(count + i_c)


@triton.jit
def load_half(
    x,
    half,
    row,
    real,
    h,
    H,
    K: tl.constexpr,
    HALVES: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """[BT, BK], one half of a tensor [tokens, H, HALVES · K]."""
    c = tl.arange(0, BK)
    p = x + ((row + tl.arange(0, BT)) * H + h)[:, None] * (K * HALVES) + half * K + c[None, :]
    return tl.load(p, mask=real[:, None] & (c < K)[None, :], other=0.0)


@triton.jit
def store_features(
    x,
    f1,
    f2,
    row,
    real,
    h,
    H,
    K: tl.constexpr,
    HALVES: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Stores both halves [BT, BK] of features into a tensor [tokens, H, HALVES · K]."""
    c = tl.arange(0, BK)
    m = real[:, None] & (c < K)[None, :]
    p = x + ((row + tl.arange(0, BT)) * H + h)[:, None] * (K * HALVES) + c[None, :]
    tl.store(p, f1, mask=m)
    if HALVES == 2:
        tl.store(p + K, f2, mask=m)


@triton.jit
def load_features(
    x,
    row,
    real,
    h,
    H,
    K: tl.constexpr,
    MAP: tl.constexpr,
    IS_Q: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    swap=0,
):
    """Both halves of φ(x) in the dtype of x, [BT, BK] each. With one half the second repeats the first.

    swap: 1 exchanges stored halves.
    """

    if MAP.name == "stored":
        # With swap the second half is read as the first.
        f1 = load_half(x, swap, row, real, h, H, K, MAP.halves, BT, BK)
        f2 = f1
        if MAP.halves == 2:
            f2 = load_half(x, 1 - swap, row, real, h, H, K, 2, BT, BK)
    else:
        # x [tokens, H, K] before the map, which needs fp32; the result is cast once, as torch's is.
        raw = load_half(x, 0, row, real, h, H, K, 1, BT, BK)
        m = real[:, None] & (tl.arange(0, BK) < K)[None, :]  # [BT, BK]
        g1, g2 = features(raw.to(tl.float32), m, MAP, IS_Q)
        f1 = g1.to(raw.dtype)
        f2 = g2.to(raw.dtype)
    return f1, f2


@triton.jit
def load_rows(x, row, real, h, H, V: tl.constexpr, i_v, BT: tl.constexpr, BV: tl.constexpr):
    """[BT, BV] of a tensor [tokens, H, V]."""
    c = i_v * BV + tl.arange(0, BV)
    p = x + ((row + tl.arange(0, BT)) * H + h)[:, None] * V + c[None, :]
    # Padding is 0, so it adds nothing to products and sums.
    return tl.load(p, mask=real[:, None] & (c < V)[None, :], other=0.0)


@triton.jit
def store_rows(x, tile, row, real, h, H, V: tl.constexpr, i_v, BT: tl.constexpr, BV: tl.constexpr):
    """Stores a tile [BT, BV] into a tensor [tokens, H, V]."""
    c = i_v * BV + tl.arange(0, BV)
    p = x + ((row + tl.arange(0, BT)) * H + h)[:, None] * V + c[None, :]
    tl.store(p, tile.to(x.dtype.element_ty), mask=real[:, None] & (c < V)[None, :])


@triton.jit
def load_gate(x, row, real, h, H, BT: tl.constexpr):
    """[BT] in fp32 of a tensor [tokens, H]."""
    return tl.load(x + (row + tl.arange(0, BT)) * H + h, mask=real, other=0.0).to(tl.float32)


@triton.jit
def load_gamma(g, row, real, h, H, BT: tl.constexpr):
    """γ [BT], the cumulative sum of g, in fp64.

    After a strong decay γ is large, and differences of γ still need the digits of weak decays. g is at least
    −104.5, where e^g is 0 in fp32, because −∞ − (−∞) is NaN.
    """
    gates = load_gate(g, row, real, h, H, BT)
    return tl.cumsum(tl.where(gates < -104.5, -104.5, gates).to(tl.float64), 0)


@triton.jit
def store_decays(decays, gamma, row, real, h, HV, BT: tl.constexpr):
    """Stores what later passes read of γ [BT]: e^γ, e^{γ_C − γ}, and γ as a sum of two fp32. Returns e^{γ_C − γ}."""
    at = decays + ((row + tl.arange(0, BT)) * HV + h) * 4
    high = gamma.to(tl.float32)
    last = tl.min(gamma, 0)  # γ never rises, and padding does not change it
    # The difference precedes the cast: γ in fp64 may be far larger than it.
    to_end = tl.exp((last - gamma).to(tl.float32))
    tl.store(at, tl.exp(high), mask=real)
    tl.store(at + 1, to_end, mask=real)
    tl.store(at + 2, high, mask=real)
    tl.store(at + 3, (gamma - high).to(tl.float32), mask=real)
    return to_end


@triton.jit
def load_growth(decays, row, real, h, HV, BT: tl.constexpr):
    """e^γ [BT], the decay from the chunk's start to each token, as `store_decays` left it."""
    return tl.load(decays + ((row + tl.arange(0, BT)) * HV + h) * 4, mask=real, other=1.0)


@triton.jit
def load_decays(decays, row, end, h, HV, GATED: tl.constexpr, BT: tl.constexpr):
    """e^γ and e^{γ_C − γ} [BT], and e^{γ_C}, in fp32; 1 without gates. end: the token behind the last one.

    With gates, padding has 0, which copies fill in: 1 would take a comparison for each token. It scales zeros.
    """
    if GATED:
        t = row + tl.arange(0, BT)
        at = decays + (t * HV + h) * 4
        decay_in = tl.load(at, mask=t < end, other=0.0)  # from the chunk's start to a token
        decay_out = tl.load(at + 1, mask=t < end, other=0.0)  # from a token to the chunk's end
        # e^γ of the last token.
        last = tl.minimum(row + BT, end) - 1
        decay_all = tl.load(decays + (last * HV + h) * 4)
    else:
        # Computed: with constants, Triton for Blackwell fills tiles that products may still read.
        gamma = tl.zeros([BT], tl.float32)
        last = tl.min(gamma, 0)
        decay_in = tl.exp(gamma)
        decay_out = tl.exp(last - gamma)
        decay_all = tl.exp(last)
    return decay_in, decay_out, decay_all


@triton.jit
def square_at(x, i_c, h, H, BT: tl.constexpr):
    """Pointers to the [BT, BT] of a chunk and head."""
    # int64, because chunks · heads · BT² may exceed 2³¹.
    t = tl.arange(0, BT)
    return x + (i_c.to(tl.int64) * H + h) * BT * BT + t[:, None] * BT + t[None, :]


@triton.jit
def state_tile(
    i,
    half,
    K: tl.constexpr,
    V: tl.constexpr,
    HALVES: tl.constexpr,
    i_v,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Offsets and mask of the [BK, BV] of one half of the i-th state."""
    # A state is [HALVES · K, V]; all chunks' states together may exceed 2³¹ entries.
    f, c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    offsets = (i.to(tl.int64) * (HALVES * K) + half * K + f)[:, None] * V + c[None, :]
    return offsets, (f < K)[:, None] & (c < V)[None, :]


@triton.jit
def identity(half, K: tl.constexpr, V: tl.constexpr, i_v, BK: tl.constexpr, BV: tl.constexpr):
    """[BK, BV] of one half of [0, I], whose V columns of zeros precede those of I."""
    f, c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    return tl.where((f < K)[:, None] & (c[None, :] == V + half * K + f[:, None]), 1.0, 0.0)


@triton.jit
def vector_at(i, half, N: tl.constexpr, HALVES: tl.constexpr, BN: tl.constexpr):
    """Offsets and mask of one half of the i-th vector [HALVES · N], which has an entry for each state row."""
    c = tl.arange(0, BN)
    return i.to(tl.int64) * (HALVES * N) + half * N + c, c < N


@triton.jit
def load_vector(x, i, K: tl.constexpr, HALVES: tl.constexpr, i_v, BK: tl.constexpr):
    """Both halves [BK] of the i-th vector, in the program of the first columns; 0 in the others."""
    at, m = vector_at(i, 0, K, HALVES, BK)
    m &= i_v == 0
    z1 = tl.load(x + at, mask=m, other=0.0)
    z2 = tl.load(x + at + (HALVES - 1) * K, mask=m, other=0.0)
    return z1, z2


@triton.jit
def store_vector(x, z1, z2, i, K: tl.constexpr, HALVES: tl.constexpr, i_v, BK: tl.constexpr):
    """Stores both halves of the i-th vector, in the program of the first columns."""
    at, m = vector_at(i, 0, K, HALVES, BK)
    m &= i_v == 0
    tl.store(x + at, z1, mask=m)
    if HALVES == 2:
        tl.store(x + at + K, z2, mask=m)


@triton.jit
def load_state(
    x,
    i,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    HALVES: tl.constexpr,
    START: tl.constexpr,
    i_v,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Both halves [BK, BV] of the i-th state of W columns in fp32.

    Without START it is 0. If W > V it is [0, I]: the columns of V become U and those of I become M.
    """
    offsets, inside = state_tile(i, 0, K, W, HALVES, i_v, BK, BV)
    if START:
        s1 = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        s2 = tl.load(x + offsets + (HALVES - 1) * K * W, mask=inside, other=0.0).to(tl.float32)
    else:
        s1 = identity(0, K, V, i_v, BK, BV) if W > V else tl.zeros([BK, BV], tl.float32)
        s2 = identity(1, K, V, i_v, BK, BV) if W > V else tl.zeros([BK, BV], tl.float32)
    return s1, s2


@triton.jit
def store_state(
    x,
    s1,
    s2,
    i,
    K: tl.constexpr,
    W: tl.constexpr,
    HALVES: tl.constexpr,
    i_v,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Stores both halves [BK, BV] of the i-th state of W columns, in the dtype of x."""
    offsets, inside = state_tile(i, 0, K, W, HALVES, i_v, BK, BV)
    tl.store(x + offsets, s1.to(x.dtype.element_ty), mask=inside)
    if HALVES == 2:
        tl.store(x + offsets + K * W, s2.to(x.dtype.element_ty), mask=inside)


@triton.jit
def dot_halves(x1, x2, y1, y2, HALVES: tl.constexpr, PREC: tl.constexpr):
    """x₁y₁ + x₂y₂ in fp32; with one half, x₁y₁."""
    product = tl.dot(x1, y1, input_precision=PREC)
    if HALVES == 2:
        product = tl.dot(x2, y2, product, input_precision=PREC)
    return product


@triton.jit
def load_channel_decays(channel_decays, i, K: tl.constexpr, HALVES: tl.constexpr, BK: tl.constexpr):
    """Both halves of e^{γ_C} of the i-th chunk and head, as columns [BK, 1]."""
    at, m = vector_at(i, 0, K, HALVES, BK)
    decay1 = tl.load(channel_decays + at, mask=m, other=0.0)[:, None]
    decay2 = tl.load(channel_decays + at + (HALVES - 1) * K, mask=m, other=0.0)[:, None]
    return decay1, decay2


@triton.jit
def store_sum(x, f1, f2, weights, i, K: tl.constexpr, HALVES: tl.constexpr, BK: tl.constexpr):
    """Stores Σ_t weights_t f_t of a chunk as the i-th vector of x, to spare the sequential pass that work."""
    at, m = vector_at(i, 0, K, HALVES, BK)
    tl.store(x + at, tl.sum(f1.to(tl.float32) * weights[:, None], 0), mask=m)
    if HALVES == 2:
        tl.store(x + at + K, tl.sum(f2.to(tl.float32) * weights[:, None], 0), mask=m)


@triton.jit
def swapped(h, READ: tl.constexpr):
    """1 for heads with mirrored queries, else 0."""
    return h % 2 if READ.mirrored else 0


@triton.jit
def tokens_read(positions, P, row, real, BT: tl.constexpr):
    """t of each token in fp32, from 1; 1 for padding. Rows of a batch share P positions."""
    position = tl.load(positions + (row + tl.arange(0, BT)) % P, mask=real, other=0)
    return (position + 1).to(tl.float32)


@triton.jit
def weigh(den, t, READ: tl.constexpr):
    """1/D, c, the weight w and MALA's share a of o = w (r + a Σv)."""
    # D is above 0: d ≥ 0 and t ≥ 1, for padding too.
    inverse = 1 / (den + EPS * t)
    c = tl.zeros_like(t)
    if READ.name == "mala":
        c += 1.0
        if READ.magnitude != "literal":
            c = READ.root / t
    weight = inverse + c
    # From w (r + a u) = r/D + c (r − d u/t).
    return inverse, c, weight, -c * den / (t * weight)


@triton.jit
def pair_decays(gamma, BT: tl.constexpr):
    """exp(γ_i − γ_j) for i ≥ j, else 0. The mask precedes exp, so no factor exceeds 1."""
    t = tl.arange(0, BT)
    exponent = (gamma[:, None] - gamma[None, :]).to(tl.float32)  # [BT, BT]
    return tl.exp(tl.where(t[:, None] >= t[None, :], exponent, float("-inf")))


@triton.jit
def load_pair_decays(decays, row, real, h, HV, BT: tl.constexpr):
    """`pair_decays` of the γ that `store_decays` left as two fp32, which keep the digits of their difference."""
    t = tl.arange(0, BT)
    at = decays + ((row + t) * HV + h) * 4
    high = tl.load(at + 2, mask=real, other=0.0)
    low = tl.load(at + 3, mask=real, other=0.0)
    exponent = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])  # [BT, BT]
    # Pairs of padding are 0 elsewhere, but must not be infinite here.
    pairs = (t[:, None] >= t[None, :]) & real[:, None]
    return tl.exp(tl.where(pairs, exponent, float("-inf")))


@triton.jit
def diagonal_blocks(lower, below: tl.constexpr, BT: tl.constexpr, S: tl.constexpr):
    """The diagonal blocks [S, S] of L [BT, BT], `below` (0 or 1) blocks below the diagonal: [BT/S, S, S]."""
    N: tl.constexpr = BT // S
    n = tl.arange(0, N)
    # Axes [block row, row, block column, column]; one block column is left in each block row.
    on_block = n[:, None, None, None] == (n + below)[None, None, :, None]
    return tl.sum(tl.where(on_block, tl.reshape(lower, [N, S, N, S]), 0.0), 2)


@triton.jit
def doubled(inverse, lower, BT: tl.constexpr, S: tl.constexpr):
    """Inverses of blocks of 2S from those of S: [[X, 0], [Y, Z]]⁻¹ = [[X⁻¹, 0], [−Z⁻¹YX⁻¹, Z⁻¹]]."""
    P: tl.constexpr = BT // (2 * S)
    # X⁻¹ and Z⁻¹ of each pair, [P, S, S].
    x, z = tl.split(tl.permute(tl.reshape(inverse, [P, 2, S, S]), (0, 2, 3, 1)))
    # Y is in the pair's lower block row; the first block of a pair is for a later doubling.
    _, y = tl.split(
        tl.permute(tl.reshape(diagonal_blocks(lower, 1, BT, S), [P, 2, S, S]), (0, 2, 3, 1))
    )

    # −Z⁻¹YX⁻¹; the compiler refuses a batch of one.
    if P == 1:
        y = tl.dot(tl.reshape(y, [S, S]), tl.reshape(x, [S, S]), input_precision="ieee")
        y = tl.reshape(tl.dot(tl.reshape(z, [S, S]), y, input_precision="ieee"), [P, S, S])
    else:
        y = tl.dot(z, tl.dot(y, x, input_precision="ieee"), input_precision="ieee")

    # Axes [P, row, column, block column, block row].
    rows = tl.join(tl.join(x, tl.zeros_like(x)), tl.join(-y, z))
    return tl.reshape(tl.permute(rows, (0, 4, 1, 3, 2)), [P, 2 * S, 2 * S])


@triton.jit
def unit_lower_inverse(lower, BT: tl.constexpr):
    """(I + L)⁻¹ in fp32 for strictly lower triangular L [BT, BT], BT ≤ 64.

    Substitution inverts blocks of 16, row i of all blocks at once; then pairs of blocks are joined. Tensor
    cores are not used: their fp32 products cost more in registers than they save in time.
    """
    r = tl.arange(0, 16)
    blocks = diagonal_blocks(lower, 0, BT, 16)  # [BT/16, 16, 16]
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(blocks)

    # Row i of an inverse is that of I, less line i of the block times the rows above.
    for i in range(1, 16):
        is_row = (r == i)[None, :, None]
        line = tl.sum(tl.where(is_row, blocks, 0.0), 1)  # [BT/16, 16]
        inverse -= tl.where(is_row, tl.sum(line[:, :, None] * inverse, 1)[:, None, :], 0.0)

    if BT > 16:
        inverse = doubled(inverse, lower, BT, 16)
    if BT > 32:
        inverse = doubled(inverse, lower, BT, 32)
    return tl.reshape(inverse, [BT, BT])


@triton.jit
def apply(inverse, x, PREC: tl.constexpr):
    """(I + L)⁻¹ x in fp32. An inverse in fp32 beside 16-bit x is taken as a sum of two of x's type.

    Its rows of alternating ±β cancel where a token repeats and β is near 2. Rounded to 16 bits they cancel
    only in part, and the rest would lengthen the state from chunk to chunk.
    """
    high = inverse.to(x.dtype)
    if inverse.dtype == x.dtype:
        return tl.dot(high, x, input_precision=PREC)
    # What rounding took from `high`: both together have twice the digits.
    low = (inverse - high.to(tl.float32)).to(x.dtype)
    return tl.dot(high, x, tl.dot(low, x))


# --------------------------------------------------------------------------------------------------- forward


@triton.jit
def prepare(
    q,
    k,
    beta,
    g,
    decays,
    inverse,
    scores,
    q_features,
    k_features,
    z_sums,
    start,
    count,
    scale,
    H,
    HV,
    K: tl.constexpr,
    MAP: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    READ: tl.constexpr,
    FUSED: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PREC: tl.constexpr,
):
    """Computes the parts of a chunk that do not need S.

        P = scale · tril(Δ QK⊤),        (I + L)⁻¹ with L = tril(Δ KK⊤, −1) diag β

    L scales columns by β. The A of torch's chunk form and of fla, diag β tril(Δ KK⊤, −1), scales rows.
    It also stores what later passes read: φ(k), unless k is "stored" already, decays, and the chunk's sum for z.
    FUSED: also φ(q), for a `states` that computes the outputs.
    """
    i_c, h = tl.program_id(0), tl.program_id(1)
    row, real = load_chunk(start, count, i_c, BT)
    hk = h // (HV // H)  # HV / H heads of v share a head of q and k

    k1, k2 = load_features(k, row, real, hk, H, K, MAP, False, BT, BK)  # [BT, BK] each
    t = tl.arange(0, BT)

    # Features for the passes to come; one head of v stores them for its group.
    stored = real & (h % (HV // H) == 0)
    if MAP.name != "stored":
        store_features(k_features, k1, k2, row, stored, hk, H, K, MAP.halves, BT, BK)

    q1, q2 = load_features(q, row, real, hk, H, K, MAP, True, BT, BK, swapped(h, READ))
    if MAP.name != "stored" and FUSED:
        store_features(q_features, q1, q2, row, stored, hk, H, K, MAP.halves, BT, BK)

    # Δ_ij = e^{γ_i − γ_j} for i ≥ j, [BT, BT], and e^{γ_C − γ} [BT].
    if GATED:
        gamma = load_gamma(g, row, real, h, HV, BT)
        to_end = store_decays(decays, gamma, row, real, h, HV, BT)
        delta = pair_decays(gamma, BT)
    else:
        to_end = tl.full([BT], 1.0, tl.float32)
        delta = tl.where(t[:, None] >= t[None, :], 1.0, 0.0)

    # z after the chunk is e^{γ_C} z + Σ_t e^{γ_C − γ_t} k_t; here the second term.
    if READ.name != "":
        store_sum(z_sums, k1, k2, to_end, i_c * HV + h, K, MAP.halves, BK)

    # QK⊤ [BT, BT]: a row for each reader i, a column for each writer j.
    p = dot_halves(q1, q2, tl.trans(k1), tl.trans(k2), MAP.halves, PREC)
    tl.store(square_at(scores, i_c, h, HV, BT), (p * delta * scale).to(scores.dtype.element_ty))

    # L_ij = β_j Δ_ij k_i·k_j for i > j.
    if DELTA:
        lower = dot_halves(k1, k2, tl.trans(k1), tl.trans(k2), MAP.halves, PREC)
        lower = tl.where(t[:, None] > t[None, :], lower * delta, 0.0)
        # β is the writer's, because E has no β yet.
        lower *= load_gate(beta, row, real, h, HV, BT)[None, :]
        solved = unit_lower_inverse(lower, BT)
        tl.store(square_at(inverse, i_c, h, HV, BT), solved.to(inverse.dtype.element_ty))


@triton.jit
def states(
    q,
    k,
    reads,
    channel_decays,
    v,
    beta,
    decays,
    inverse,
    scores,
    s,
    e,
    o,
    z_sums,
    zs,
    us,
    s_start,
    z_start,
    u_start,
    s_end,
    z_end,
    u_end,
    decay,
    bounds,
    first,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    MAP: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    CHANNELS: tl.constexpr,
    READ: tl.constexpr,
    START: tl.constexpr,
    END: tl.constexpr,
    AFFINE: tl.constexpr,
    FUSED: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Runs through the chunks of a sequence; stores S before each chunk, and the error E of its prediction of v.

        E = (I + L)⁻¹ (V − eᵞ K S),        S ← e^{γ_C} S + (e^{γ_C − γ} β K)⊤ E

    Linear attention has E = V and β = 1. If the readout needs them, also z = Σk, with the decay of S, and u = Σv.

    AFFINE: only what each sequence does to any S before it, S' = M S + U. The pass over [v, 0] from [0, I]
    ends with [U, M], F × (V + F). Without the delta rule it ends with U, and `decay` is M.

    FUSED: stores the outputs O instead of S and E, which no backward will read. Not with a readout.

    CHANNELS: decays per key channel, with e^{γ_C} in `channel_decays`. `reads` are the keys that read S, k
    those that write to it, both with their decays.
    """
    W: tl.constexpr = V + K * MAP.halves if AFFINE and DELTA else V  # columns of the state
    # A program has BV columns: columns of S and E do not depend on each other.
    i_v, i_s = tl.program_id(0) % tl.cdiv(W, BV), tl.program_id(0) // tl.cdiv(W, BV)
    n, h = i_s // HV, i_s % HV
    hk = h // (HV // H)
    # The sequence's first token and first chunk.
    bos, chunk = tl.load(bounds + n), tl.load(first + n)
    end = tl.load(bounds + n + 1)

    # S in fp32, one tile [BK, BV] for each half of the features.
    s1, s2 = load_state(s_start, i_s, K, V, W, MAP.halves, START, i_v, BK, BV)

    total = 1.0  # the decay of all chunks
    if READ.name != "":
        # z by half [BK], and u of this block of V [BV].
        z1 = tl.zeros([BK], tl.float32)
        z2 = tl.zeros([BK], tl.float32)
        u = tl.zeros([BV], tl.float32)
        at_u = i_s.to(tl.int64) * V + i_v * BV + tl.arange(0, BV)
        mu = i_v * BV + tl.arange(0, BV) < V

        if START:
            z1, z2 = load_vector(z_start, i_s, K, MAP.halves, i_v, BK)
            if READ.name == "mala":
                u = tl.load(u_start + at_u, mask=mu, other=0.0)

    chunks = tl.load(first + n + 1) - chunk
    for i in tl.range(0, chunks, disable_licm=True):  # hoisted, addresses spill
        index = (chunk + i).to(tl.int64) * HV + h

        # S, z and u before the chunk.
        if not (AFFINE or FUSED):
            # Rounded for `outputs` and the backward; the pass itself goes on in fp32.
            store_state(s, s1, s2, index, K, V, MAP.halves, i_v, BK, BV)
        if READ.name != "":
            store_vector(zs, z1, z2, index, K, MAP.halves, i_v, BK)
            if READ.name == "mala":
                tl.store(us + index * V + i_v * BV + tl.arange(0, BV), u, mask=mu)

        # The keys that write (k) and read (r), and how S decays through the chunk.
        row = bos + i * BT
        real = row + tl.arange(0, BT) < end
        # With CHANNELS these are 1: k and `reads` have their decays already.
        decay_in, decay_out, decay_all = load_decays(decays, row, end, h, HV, GATED, BT)
        total *= decay_all
        k1, k2 = load_features(k, row, real, hk, H, K, MAP, False, BT, BK)
        r1, r2, decay1, decay2 = k1, k2, decay_all, decay_all
        if CHANNELS:
            decay1, decay2 = load_channel_decays(channel_decays, index, K, MAP.halves, BK)
            if DELTA:
                r1, r2 = load_features(reads, row, real, hk, H, K, MAP, False, BT, BK)

        # What is written, [BT, BV].
        # Columns past V are 0, as M needs.
        v_new = load_rows(v, row, real, h, HV, V, i_v, BT, BV)
        dtype = v_new.dtype
        if DELTA:
            # E = (I + L)⁻¹ (V − eᵞ K S), [BT, BV].
            read = dot_halves(r1, r2, s1.to(dtype), s2.to(dtype), MAP.halves, PREC)
            residual = (v_new.to(tl.float32) - decay_in[:, None] * read).to(dtype)
            error = apply(tl.load(square_at(inverse, chunk + i, h, HV, BT)), residual, PREC)
            if not (AFFINE or FUSED):
                # Only now β and the decay: `outputs` and the backward need E without them.
                store_rows(e, error, row, real, h, HV, V, i_v, BT, BV)
            b = load_gate(beta, row, real, h, HV, BT)
            decay_out *= b
            written = (error * b[:, None]).to(dtype)
            v_new = (error * decay_out[:, None]).to(dtype)
        else:
            if READ.name == "mala":
                # u has no decay: a magnitude forbids gates.
                u += tl.sum(v_new.to(tl.float32), 0)
            written = v_new
            v_new = (v_new.to(tl.float32) * decay_out[:, None]).to(dtype)

        if FUSED and not AFFINE:
            # O = scale · eᵞ Q S + P diag(β) E, [BT, BV]. P is the first operand, as it is loaded.
            q1, q2 = load_features(q, row, real, hk, H, K, MAP, True, BT, BK)
            out = dot_halves(q1, q2, s1.to(dtype), s2.to(dtype), MAP.halves, PREC)
            out *= (decay_in * scale)[:, None]
            p = tl.load(square_at(scores, chunk + i, h, HV, BT))
            out = tl.dot(p, written, out, input_precision=PREC)
            store_rows(o, out, row, real, h, HV, V, i_v, BT, BV)

        if READ.name != "":
            sum1, sum2 = load_vector(z_sums, index, K, MAP.halves, i_v, BK)
            z1 = z1 * decay_all + sum1
            z2 = z2 * decay_all + sum2

        # S after the chunk: its decay, and what K writes, summed in fp32.
        s1 = tl.dot(tl.trans(k1), v_new, s1 * decay1, input_precision=PREC)
        if MAP.halves == 2:
            s2 = tl.dot(tl.trans(k2), v_new, s2 * decay2, input_precision=PREC)

    if AFFINE and not DELTA:
        tl.store(decay + i_s, total, mask=i_v == 0)
    if END:
        store_state(s_end, s1, s2, i_s, K, W, MAP.halves, i_v, BK, BV)
        if READ.name != "":
            store_vector(z_end, z1, z2, i_s, K, MAP.halves, i_v, BK)
            if READ.name == "mala":
                tl.store(u_end + at_u, u, mask=mu)


@triton.jit
def compose(
    affine,
    decay,
    starts,
    s_start,
    s_end,
    parts,
    HV,
    F: tl.constexpr,
    V: tl.constexpr,
    DELTA: tl.constexpr,
    START: tl.constexpr,
    END: tl.constexpr,
    REVERSE: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Computes S before each segment and S after all, from what each segment does to a state: S' = M S + U.

    affine: [U, M] of each segment, or U alone with `decay` as M. parts: each sequence's first segment.
    REVERSE: from the last segment to the first.
    """
    W: tl.constexpr = V + F if DELTA else V
    # A program has BV columns of S, as in `states`.
    i_v, i_s = tl.program_id(0) % tl.cdiv(V, BV), (tl.program_id(0) // tl.cdiv(V, BV)).to(tl.int64)
    n, h = i_s // HV, i_s % HV
    first, last = tl.load(parts + n).to(tl.int64), tl.load(parts + n + 1).to(tl.int64) - 1
    r, c = tl.arange(0, BF), i_v * BV + tl.arange(0, BV)

    # S before the first segment, in tiles of BF rows.
    i = last if REVERSE else first
    for f in range(0, F, BF):
        m, at = (f + r < F)[:, None] & (c < V)[None, :], (f + r)[:, None] * V + c[None, :]
        s = tl.zeros([BF, BV], tl.float32)
        if START:
            s = tl.load(s_start + i_s * F * V + at, mask=m, other=0.0).to(tl.float32)
        tl.store(starts + (i * HV + h) * F * V + at, s, mask=m)

    # Then S before the next one; after the last it is the end.
    for _ in range(first, last + 1):
        tl.debug_barrier()  # S, stored by all threads of the program, is read by all
        index = i * HV + h
        i += -1 if REVERSE else 1
        inside = (i >= first) & (i <= last)
        for f in range(0, F, BF):
            m, at = (f + r < F)[:, None] & (c < V)[None, :], (f + r)[:, None] * V + c[None, :]
            # A segment's row of [U, M]; s begins as U, [BF, BV].
            row = affine + (index * F + f + r)[:, None] * W
            s = tl.load(row + c[None, :], mask=m, other=0.0)

            if DELTA:
                for x in range(0, F, BF):
                    mm = (f + r < F)[:, None] & (x + r < F)[None, :]
                    # A row of tiles of M [BF, BF] times a column of tiles of the old S [BF, BV].
                    M = tl.load(row + (V + x + r)[None, :], mask=mm, other=0.0)
                    of_s = starts + index * F * V + (x + r)[:, None] * V + c[None, :]
                    before = tl.load(of_s, mask=(x + r < F)[:, None] & (c < V)[None, :], other=0.0)
                    s = tl.dot(M, before, s, input_precision=PREC)
            else:
                # M is a number, the segment's decay.
                s += tl.load(decay + index) * tl.load(
                    starts + index * F * V + at, mask=m, other=0.0
                )

            tl.store(starts + (i * HV + h) * F * V + at, s, mask=m & inside)
            if END:
                tl.store(s_end + i_s * F * V + at, s, mask=m & ~inside)


@triton.jit
def outputs(
    q,
    e,
    beta,
    decays,
    scores,
    s,
    zs,
    us,
    o,
    den,
    positions,
    P,
    start,
    count,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    MAP: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    READ: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Computes O = scale · eᵞ Q S + P diag(β) E; with a readout, its o and its denominator d.

    It computes O⊤: then loaded tiles are the first operands of products, and those formed here the second.
    """
    i_v, i_c = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    h = tl.program_id(1)
    row, real = load_chunk(start, count, i_c, BT)

    # S of earlier chunks: scale · eᵞ Q S, transposed [BV, BT].
    q1, q2 = load_features(q, row, real, h // (HV // H), H, K, MAP, True, BT, BK, swapped(h, READ))
    o1, inside = state_tile(i_c * HV + h, 0, K, V, MAP.halves, i_v, BK, BV)
    s1 = tl.load(s + o1, mask=inside, other=0.0)
    o_tile = tl.dot(tl.trans(s1), tl.trans(q1), input_precision=PREC)
    if MAP.halves == 2:
        s2 = tl.load(s + o1 + K * V, mask=inside, other=0.0)
        o_tile = tl.dot(tl.trans(s2), tl.trans(q2), o_tile, input_precision=PREC)
    o_tile *= scale
    if GATED:
        grown = load_growth(decays, row, real, h, HV, BT)
        o_tile *= grown[None, :]

    # Tokens of this chunk: P, and the readout.
    p = tl.load(square_at(scores, i_c, h, HV, BT))
    dtype = p.dtype
    if READ.name != "":
        # d = eᵞ q·z for earlier chunks, and P's row sums for this one (scale is 1 here).
        oz, mz = vector_at(i_c * HV + h, 0, K, MAP.halves, BK)
        d = tl.sum(q1.to(tl.float32) * tl.load(zs + oz, mask=mz, other=0.0)[None, :], 1)
        if MAP.halves == 2:
            d += tl.sum(q2.to(tl.float32) * tl.load(zs + oz + K, mask=mz, other=0.0)[None, :], 1)
        if GATED:
            d *= grown
        d += tl.sum(p.to(tl.float32), 1)
        tl.store(den + (row + tl.arange(0, BT)) * HV + h, d, mask=real & (i_v == 0))
        _, _, weight, share = weigh(d, tokens_read(positions, P, row, real, BT), READ)
        if READ.name == "mala":
            t, c = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
            # a u: for earlier chunks in O⊤; in this one v_j is in u_i for i ≥ j, so a_i joins P_ij.
            u = tl.load(us + (i_c.to(tl.int64) * HV + h) * V + c, mask=c < V, other=0.0)
            o_tile += share[None, :] * u[:, None]
            p = tl.where(t[:, None] >= t[None, :], p.to(tl.float32) + share[:, None], 0.0).to(dtype)

    if DELTA:
        # P diag(β) E; under linear attention e is v.
        p = (p.to(tl.float32) * load_gate(beta, row, real, h, HV, BT)[None, :]).to(dtype)
    error = load_rows(e, row, real, h, HV, V, i_v, BT, BV)
    o_tile = tl.dot(tl.trans(error), tl.trans(p), o_tile, input_precision=PREC)

    if READ.name != "":
        o_tile *= weight[None, :]
    store_rows(o, tl.trans(o_tile), row, real, h, HV, V, i_v, BT, BV)


# -------------------------------------------------------------------------------------------------- backward


@triton.jit
def readout_gradients(
    q,
    d_o,
    o,
    v,
    decays,
    us,
    den,
    positions,
    P,
    d_r,
    d_den,
    shares,
    dz_sums,
    du_sums,
    start,
    count,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    MAP: tl.constexpr,
    GATED: tl.constexpr,
    READ: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Computes the gradients of r and of the denominator d, MALA's a, and the chunk's sums for those of z and u.

    The formulas are those of this module's docstring. All other gradients follow from these.
    """
    i_c, h = tl.program_id(0), tl.program_id(1)
    row, real = load_chunk(start, count, i_c, BT)
    gates = (row + tl.arange(0, BT)) * HV + h
    t = tokens_read(positions, P, row, real, BT)
    inverse, c, weight, share = weigh(tl.load(den + gates, mask=real, other=0.0), t, READ)

    # by_o = dO·O and by_u = dO·u, [BT].
    by_o = tl.zeros([BT], tl.float32)
    by_u = tl.zeros([BT], tl.float32)
    for i_v in range(0, tl.cdiv(V, BV)):
        # Tiles [BT, BV] of dO, O, and for MALA u up to each token.
        d_out = load_rows(d_o, row, real, h, HV, V, i_v, BT, BV).to(tl.float32)
        by_o += tl.sum(d_out * load_rows(o, row, real, h, HV, V, i_v, BT, BV).to(tl.float32), 1)

        if READ.name == "mala":
            x = load_rows(v, row, real, h, HV, V, i_v, BT, BV)
            j = i_v * BV + tl.arange(0, BV)
            at = (i_c.to(tl.int64) * HV + h) * V + j
            u = tl.load(us + at, mask=j < V, other=0.0)[None, :] + tl.cumsum(x.to(tl.float32), 0)
            by_u += tl.sum(d_out * u, 1)
            # du = Σ_t a_t dR_t with dR = w dO: u before the chunk is in the u of all its tokens.
            tl.store(du_sums + at, tl.sum(d_out * (weight * share)[:, None], 0), mask=j < V)

        store_rows(d_r, d_out * weight[:, None], row, real, h, HV, V, i_v, BT, BV)

    # dO·R, and the gradient of d.
    # R is not kept: R = O/w − a u.
    by_r = by_o / weight - share * by_u
    d = -by_r * inverse * inverse - c / t * by_u
    tl.store(d_den + gates, d, mask=real)
    if READ.name == "mala":
        tl.store(shares + gates, share, mask=real)

    # The chunk's sum for the gradient of z.
    # z before the chunk reaches token t through e^{γ_t}.
    if GATED:
        d *= load_growth(decays, row, real, h, HV, BT)
    q1, q2 = load_features(q, row, real, h // (HV // H), H, K, MAP, True, BT, BK, swapped(h, READ))
    store_sum(dz_sums, q1, q2, d, i_c * HV + h, K, MAP.halves, BK)


@triton.jit
def state_gradients(
    q,
    k,
    reads,
    channel_decays,
    d_o,
    shares,
    dz_sums,
    du_sums,
    beta,
    decays,
    inverse,
    scores,
    d_s,
    d_zs,
    d_v,
    s_start,
    z_start,
    u_start,
    s_end,
    z_end,
    u_end,
    decay,
    bounds,
    first,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    MAP: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    CHANNELS: tl.constexpr,
    READ: tl.constexpr,
    START: tl.constexpr,
    END: tl.constexpr,
    AFFINE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Runs through the chunks of a sequence backwards: gradients of S, z and u after each chunk, and of v.

        dV = (I + L)⁻⊤ β (e^{γ_C − γ} K dS + P⊤ dO),        dS ← e^{γ_C} dS + (scale · eᵞ Q)⊤ dO − (eᵞ K)⊤ dV

    Linear attention has dV without (I + L)⁻⊤ and β, and dS without its last term. The pass starts from gradients
    of the last state and ends with those of the first. AFFINE and CHANNELS: as in `states`; q has its decays too.
    """
    W: tl.constexpr = V + K * MAP.halves if AFFINE and DELTA else V  # columns of the state
    # A program has BV columns of dS, as in `states`.
    i_v, i_s = tl.program_id(0) % tl.cdiv(W, BV), tl.program_id(0) // tl.cdiv(W, BV)
    n, h = i_s // HV, i_s % HV
    hk = h // (HV // H)
    bos, chunk = tl.load(bounds + n), tl.load(first + n)
    end = tl.load(bounds + n + 1)

    # dS in fp32, one tile [BK, BV] for each half of the features.
    s1, s2 = load_state(s_start, i_s, K, V, W, MAP.halves, START, i_v, BK, BV)

    total = 1.0  # the decay of all chunks
    if READ.name != "":
        z1 = tl.zeros([BK], tl.float32)
        z2 = tl.zeros([BK], tl.float32)
        u = tl.zeros([BV], tl.float32)
        at_u = i_s.to(tl.int64) * V + i_v * BV + tl.arange(0, BV)
        mu = i_v * BV + tl.arange(0, BV) < V

        if START:
            z1, z2 = load_vector(z_start, i_s, K, MAP.halves, i_v, BK)
            if READ.name == "mala":
                u = tl.load(u_start + at_u, mask=mu, other=0.0)

    chunks = tl.load(first + n + 1) - chunk
    for j in tl.range(0, chunks, disable_licm=True):  # hoisted, addresses spill
        i = chunks - 1 - j
        index = (chunk + i).to(tl.int64) * HV + h

        # dS, dz and du after the chunk.
        if not AFFINE:
            # Rounded for the kernels of the inputs' gradients; the pass itself goes on in fp32.
            store_state(d_s, s1, s2, index, K, V, MAP.halves, i_v, BK, BV)
        if READ.name != "":
            store_vector(d_zs, z1, z2, index, K, MAP.halves, i_v, BK)

        row = bos + i * BT
        real = row + tl.arange(0, BT) < end
        d_out = load_rows(d_o, row, real, h, HV, V, i_v, BT, BV)
        dtype = d_out.dtype
        decay_in, decay_out, decay_all = load_decays(decays, row, end, h, HV, GATED, BT)
        total *= decay_all

        # The gradient of what k wrote, [BT, BV].
        k1, k2 = load_features(k, row, real, hk, H, K, MAP, False, BT, BK)
        # From later chunks, through dS after this one.
        d_new = dot_halves(k1, k2, s1.to(dtype), s2.to(dtype), MAP.halves, PREC)
        d_new *= decay_out[:, None]

        p = tl.load(square_at(scores, chunk + i, h, HV, BT))
        if READ.name == "mala":
            # v_j is in u_i for i ≥ j: within the chunk a_i joins P_ij, later tokens come by du.
            t, share = tl.arange(0, BT), load_gate(shares, row, real, h, HV, BT)
            p = tl.where(t[:, None] >= t[None, :], p.to(tl.float32) + share[:, None], 0.0).to(
                p.dtype
            )
            d_new += u[None, :]
            c = i_v * BV + tl.arange(0, BV)
            u += tl.load(du_sums + index * V + c, mask=mu, other=0.0)
        # From this chunk's outputs: P⊤ dO.
        d_new = tl.dot(tl.trans(p), d_out, d_new, input_precision=PREC)

        if DELTA:
            # dE [BT, BV], then dV = (I + L)⁻⊤ dE.
            d_new = (d_new * load_gate(beta, row, real, h, HV, BT)[:, None]).to(dtype)
            d_new = apply(tl.trans(tl.load(square_at(inverse, chunk + i, h, HV, BT))), d_new, PREC)
        if not AFFINE:
            store_rows(d_v, d_new, row, real, h, HV, V, i_v, BT, BV)

        # dS before the chunk: its decay, what k read of it, and what q read.
        decay1, decay2 = decay_all, decay_all
        if CHANNELS:
            decay1, decay2 = load_channel_decays(channel_decays, index, K, MAP.halves, BK)
            if DELTA:
                # The keys that read S are others than those that wrote.
                k1, k2 = load_features(reads, row, real, hk, H, K, MAP, False, BT, BK)
        s1 *= decay1
        s2 *= decay2

        if DELTA:
            # The prediction eᵞ K S enters the error with a minus.
            d_new = (d_new * -decay_in[:, None]).to(dtype)
            s1 = tl.dot(tl.trans(k1), d_new, s1, input_precision=PREC)
            if MAP.halves == 2:
                s2 = tl.dot(tl.trans(k2), d_new, s2, input_precision=PREC)

        # O has scale · eᵞ Q S.
        d_out = (d_out.to(tl.float32) * (decay_in * scale)[:, None]).to(dtype)
        q1, q2 = load_features(q, row, real, hk, H, K, MAP, True, BT, BK, swapped(h, READ))
        if READ.name != "":
            sum1, sum2 = load_vector(dz_sums, index, K, MAP.halves, i_v, BK)
            z1 = z1 * decay_all + sum1
            z2 = z2 * decay_all + sum2

        s1 = tl.dot(tl.trans(q1), d_out, s1, input_precision=PREC)
        if MAP.halves == 2:
            s2 = tl.dot(tl.trans(q2), d_out, s2, input_precision=PREC)

    if AFFINE and not DELTA:
        tl.store(decay + i_s, total, mask=i_v == 0)
    if END:
        store_state(s_end, s1, s2, i_s, K, W, MAP.halves, i_v, BK, BV)
        if READ.name != "":
            store_vector(z_end, z1, z2, i_s, K, MAP.halves, i_v, BK)
            if READ.name == "mala":
                tl.store(u_end + at_u, u, mask=mu)


@triton.jit
def pair_gradients(
    k,
    e,
    d_o,
    d_den,
    d_v,
    beta,
    decays,
    scores,
    d_scores,
    d_keys,
    d_beta,
    d_g,
    start,
    count,
    scale,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    MAP: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    CHANNELS: tl.constexpr,
    READ: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Computes the gradients of QK⊤ and of KK⊤ (summed with its transpose) within a chunk.

    Also the shares of β_j and of the decays between j and i that come from pairs (i, j). CHANNELS: only the
    gradients, without β and decays, and KK⊤'s without its transpose.
    """
    i_c, h = tl.program_id(0), tl.program_id(1)
    row, real = load_chunk(start, count, i_c, BT)
    end = row + tl.load(count + i_c)
    t = tl.arange(0, BT)
    pairs_o = tl.zeros([BT, BT], tl.float32)  # dO E⊤
    pairs_v = tl.zeros([BT, BT], tl.float32)  # dV E⊤

    for i_v in range(0, tl.cdiv(V, BV)):
        error = tl.trans(load_rows(e, row, real, h, HV, V, i_v, BT, BV))  # [BV, BT]
        d_out = load_rows(d_o, row, real, h, HV, V, i_v, BT, BV)
        pairs_o = tl.dot(d_out, error, pairs_o, input_precision=PREC)
        if DELTA:
            d_out = load_rows(d_v, row, real, h, HV, V, i_v, BT, BV)
            pairs_v = tl.dot(d_out, error, pairs_v, input_precision=PREC)

    if READ.name != "":
        # d_i is the sum of P_ij over j, so each pair of row i has its gradient.
        pairs_o += load_gate(d_den, row, real, h, HV, BT)[:, None]

    if GATED:
        delta = load_pair_decays(decays, row, real, h, HV, BT)
    else:
        delta = tl.where(t[:, None] >= t[None, :], 1.0, 0.0)

    # With CHANNELS `channel_gradients` multiplies the keys by β.
    b = tl.full([BT], 1.0, tl.float32)
    if DELTA and not CHANNELS:
        b = load_gate(beta, row, real, h, HV, BT)

    # dP = Δ ∘ dO E⊤ · β · scale, the gradient of QK⊤.
    at = square_at(d_scores, i_c, h, HV, BT)
    tl.store(at, (pairs_o * delta * (b * scale)[None, :]).to(d_scores.dtype.element_ty))

    if CHANNELS:
        if DELTA:
            # dL = −dV E⊤ for i > j.
            d_kk = tl.where(t[:, None] > t[None, :], -pairs_v, 0.0)
            tl.store(square_at(d_keys, i_c, h, HV, BT), d_kk.to(d_keys.dtype.element_ty))
    elif DELTA or GATED:
        p = tl.load(square_at(scores, i_c, h, HV, BT)).to(tl.float32)
        # P_ij dO_i·E_j, the share of β_j and of ln Δ_ij (still without β).
        pairs = tl.where(t[:, None] >= t[None, :], pairs_o * p, 0.0)
        gates = (row + t) * HV + h

        # That of KK⊤, with its transpose, and what β and Δ share of these pairs.
        if DELTA:
            d_kk = tl.where(t[:, None] > t[None, :], pairs_v * delta, 0.0)
            k1, k2 = load_features(k, row, real, h // (HV // H), H, K, MAP, False, BT, BK)
            kk = dot_halves(k1, k2, tl.trans(k1), tl.trans(k2), MAP.halves, PREC)
            # L_ij has β_j and Δ_ij too: less Δ_ij (k_i·k_j) (dV_i·E_j).
            pairs -= d_kk * kk
            d_kk *= -b[None, :]
            # K is on both sides of KK⊤: with its transpose one product gives dK.
            at = square_at(d_keys, i_c, h, HV, BT)
            tl.store(at, (d_kk + tl.trans(d_kk)).to(d_keys.dtype.element_ty))
            # Over the readers i of a writer j.
            tl.store(d_beta + gates, tl.sum(pairs, 0), mask=real)

        if GATED:
            # g_t is in γ_i − γ_j for j < t ≤ i; pairs i = j have no decay.
            pairs = tl.where(t[:, None] > t[None, :], pairs * b[None, :], 0.0)
            pairs = tl.cumsum(pairs, 1)  # Σ over j ≤ t − 1: column j is for t = j + 1
            pairs = tl.where(t[:, None] > t[None, :], pairs, 0.0)  # and over i ≥ t
            t = (t + 1) % BT  # the last column is 0, as the first token's gradient is
            tl.store(d_g + (row + t) * HV + h, tl.sum(pairs, 0), mask=row + t < end)


@triton.jit
def input_gradients(
    q,
    k,
    e,
    d_o,
    d_den,
    d_v,
    beta,
    decays,
    s,
    zs,
    d_s,
    d_zs,
    d_scores,
    d_keys,
    d_q,
    d_k,
    d_beta,
    d_g,
    start,
    count,
    scale,
    tokens,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    MAP: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    READ: tl.constexpr,
    PIPELINED: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Computes the gradients of one half of the features of q and k, and that half's shares for β and g.

        dQ = scale · eᵞ dO S⊤ + dP K,        dK = e^{γ_C − γ} β E dS'⊤ − eᵞ dV S⊤ + dP⊤ Q + d(KK⊤) K

    S is the state before the chunk, dS' the gradient of the one after it. With one half, gradients of the raw q
    and k: the backward of map and norm is the epilogue. PIPELINED: the loop has more than one stage.
    """
    half, i_c = tl.program_id(0) % MAP.halves, tl.program_id(0) // MAP.halves
    h = tl.program_id(1)
    row, real = load_chunk(start, count, i_c, BT)
    hk = h // (HV // H)
    end = row + tl.load(count + i_c)
    decay_in, decay_out, decay_all = load_decays(decays, row, end, h, HV, GATED, BT)

    # [BT, BK], and `state_products`, S·dS' of each feature [BK].
    dq = tl.zeros([BT, BK], tl.float32)
    dk = tl.zeros([BT, BK], tl.float32)  # through what k writes to the next state
    dk_read = tl.zeros([BT, BK], tl.float32)  # through what k reads of the last state
    state_products = tl.zeros([BK], tl.float32)
    squares = tl.zeros([BV, BV], tl.float32)  # or S⊤ dS', whose diagonal has the same sum
    diagonal = 0.0

    if READ.name != "":
        oz, mz = vector_at(i_c * HV + h, half, K, MAP.halves, BK)
        # z is one more column of S, with v = 1, whose output gradient is d_den.
        z = tl.load(zs + oz, mask=mz, other=0.0)
        dz = tl.load(d_zs + oz, mask=mz, other=0.0)
        dq += load_gate(d_den, row, real, h, HV, BT)[:, None] * z[None, :]
        dk += dz[None, :]
        state_products += z * dz

    for i_v in range(0, tl.cdiv(V, BV)):
        at, inside = state_tile(i_c * HV + h, half, K, V, MAP.halves, i_v, BK, BV)
        # S before the chunk and dS' after it, [BK, BV].
        before = tl.load(s + at, mask=inside, other=0.0)
        after = tl.load(d_s + at, mask=inside, other=0.0)
        dq = tl.dot(
            load_rows(d_o, row, real, h, HV, V, i_v, BT, BV),
            tl.trans(before),
            dq,
            input_precision=PREC,
        )
        dk = tl.dot(
            load_rows(e, row, real, h, HV, V, i_v, BT, BV),
            tl.trans(after),
            dk,
            input_precision=PREC,
        )

        if DELTA:
            x = load_rows(d_v, row, real, h, HV, V, i_v, BT, BV)
            dk_read = tl.dot(x, tl.trans(before), dk_read, input_precision=PREC)
        if GATED:
            # S' has e^{γ_C} S, so every g_t of the chunk gets e^{γ_C} S·dS'.
            if PIPELINED:
                # The copies of the next step wait for products; for a sum by threads they do not.
                squares = tl.dot(tl.trans(before), after, squares, input_precision=PREC)
            else:
                state_products += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
    if GATED and PIPELINED:
        # Here, because the squares would take registers to the end.
        c = tl.arange(0, BV)
        diagonal = tl.sum(tl.sum(tl.where(c[:, None] == c[None, :], squares, 0.0), 1), 0)
    d_p = tl.load(square_at(d_scores, i_c, h, HV, BT))

    if MAP.halves == 2:
        # Two halves are stored: their map is applied before this kernel.
        k1 = load_half(k, half, row, real, hk, H, K, 2, BT, BK)
    else:
        k1, _ = load_features(k, row, real, hk, H, K, MAP, False, BT, BK)

    # The decays of QS, and of what K writes, at each token.
    dq *= (decay_in * scale)[:, None]
    dk *= decay_out[:, None]

    # The shares for β, and for the decays: what k writes and reads.
    if DELTA or GATED:
        # This half's row in the shares [halves + 1, B · T, HV].
        gates = (half.to(tl.int64) * tokens + row + tl.arange(0, BT)) * HV + h
        writes = tl.sum(dk * k1.to(tl.float32), 1)
        reads = tl.zeros([BT], tl.float32)
        if DELTA:
            # The error has −eᵞ K S.
            dk_read *= decay_in[:, None]
            reads -= tl.sum(dk_read * k1.to(tl.float32), 1)
            # Before β, k·dk of the writes is β's share; with β it is the decay's.
            tl.store(d_beta + gates, writes, mask=real)
            b = load_gate(beta, row, real, h, HV, BT)
            writes *= b
            dk = dk * b[:, None] - dk_read

    swap = swapped(h, READ)
    if MAP.halves == 2:
        # Half `half` of the queries as read, after a mirrored head's swap.
        q1 = load_half(q, half ^ swap, row, real, hk, H, K, 2, BT, BK)
    else:
        q1, _ = load_features(q, row, real, hk, H, K, MAP, True, BT, BK)

    # g_t has a share of all that passes token t.
    if GATED:
        reads += tl.sum(dq * q1.to(tl.float32), 1)
        # Reads at i ≥ t pass e^{g_t} from the chunk's start, writes at j < t on the way to its end.
        t = tl.arange(0, BT)
        # No difference of sums: the token's own write may be far larger.
        earlier = tl.where(t[:, None] > t[None, :], writes[None, :], 0.0)
        d_gamma = tl.cumsum(reads, 0, reverse=True) + tl.sum(earlier, 1)
        through = decay_all * (tl.sum(state_products, 0) + diagonal)
        tl.store(d_g + gates, d_gamma + through, mask=real)

    # Pairs within the chunk.
    dq = tl.dot(d_p, k1, dq, input_precision=PREC)
    store_gradient(d_q, dq, q, row, real, h, H, HV, half ^ swap, K, MAP, True, BT, BK)
    dk = tl.dot(tl.trans(d_p), q1, dk, input_precision=PREC)
    if DELTA:
        # The gradient of KK⊤ is stored with its transpose.
        dk = tl.dot(tl.load(square_at(d_keys, i_c, h, HV, BT)), k1, dk, input_precision=PREC)
    store_gradient(d_k, dk, k, row, real, h, H, HV, half, K, MAP, False, BT, BK)


@triton.jit
def store_gradient(
    d_x,
    dx,
    x,
    row,
    real,
    h,
    H,
    HV,
    half,
    K: tl.constexpr,
    MAP: tl.constexpr,
    IS_Q: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Stores the gradient of one half of the features; with one half, of the raw x."""
    t, c = tl.arange(0, BT), tl.arange(0, BK)
    m = real[:, None] & (c < K)[None, :]
    if MAP.halves == 1 and MAP.name != "stored":
        hk = h // (HV // H)
        raw = tl.load(x + ((row + t) * H + hk)[:, None] * K + c[None, :], mask=m, other=0.0).to(
            tl.float32
        )
        dx = features_backward(raw, m, dx, dx, MAP, IS_Q)
    # By head of v; the sum over a group's heads comes after the kernel.
    at = ((row + t) * HV + h)[:, None] * (K * MAP.halves) + half * K + c[None, :]
    tl.store(d_x + at, dx.to(d_x.dtype.element_ty), mask=m)
