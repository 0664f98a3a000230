"""Feature maps of queries and keys with their L2 norm: inside other kernels, or as kernels of their own.

Each entry of a row x [K] has a magnitude M and, in NaLa, an angle θ = π/4·tanh a. The features are
[M cos θ; M sin θ], or M in the half of x's sign and 0 in the other. Both have Σφ² = ΣM², so the norm needs
one sum. Let r = 1/√(Σx² + ε), a = αrx (or x) and M = |b|^p. Queries have b = s·x·r (or x) and
p = λ(½ + tanh(ν/r)), or a constant p; keys have b = x and a constant p. With ρ = 1/√(ΣM² + ε) and the
gradient (d1, d2) of φ in the frame of θ,

    G = cos θ d1 + sin θ d2,    A = π/4 (1 − tanh² a) M (cos θ d2 − sin θ d1),    c = ρ² ΣMG,

the gradient with respect to ln |b| is p E with E = ρ M (G − cM), and

    dx = p E/x + α r ρ A − x r² (p ΣE + ρ ΣAa) + x r λν (1 − tanh²(ν/r)) ΣE ln |b|,

without the terms of r if none of b, p and a contains r, and without the last if p is constant. All sums but
Σx² take one sweep, because ΣE = ρεc and the others are linear in sums without ρ and c. Without the norm,
ρ = 1, c = 0 and ΣE = ΣMG.
(NaLa: arXiv 2506.21137. PolaFormer: arXiv 2501.15061.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nalanda_kernels import Unsupported
from nalanda_kernels.autograd import once_differentiable
from nalanda_kernels.maps import Map, describe, exponents_and_units
from nalanda_kernels.triton.common import FUSION, name_of, power_of_two
from nalanda_kernels.triton.tiles import DTYPES, load

EPS = tl.constexpr(1e-6)  # added in norms; the floor of every base
LOG2_E = tl.constexpr(1.4426950408889634)
PI = tl.constexpr(3.141592653589793)
FAST_LOG = tl.constexpr(torch.version.hip is None)


# --------------------------------------------------------------------------------------- inside other kernels
#
# An instruction on every entry of a [64, 128] tile takes 64 cycles, a matrix product perhaps 500. So these
# functions avoid division, use the hardware's ex2, lg2 and rsqrt (error 2^-22), and take few steps.


@triton.jit
def exp(x):
    """e^x by the hardware's 2^x."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def log(x):
    """ln x for normal x > 0; its error is 2e-7, absolute near 1 and relative elsewhere."""
    return libdevice.fast_logf(x) if FAST_LOG else tl.log(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^{−x}), as a square of rsqrt; a division costs more."""
    # Where e^{−x} overflows to ∞, rsqrt gives 0.
    root = tl.rsqrt(1 + exp(-x))
    return root * root


@triton.jit
def inverse_length(x):
    """1/√(Σx² + 1e-6) of each row, [BT, 1]."""
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def expm1(x):
    """e^x − 1 for x ≤ 0, with a small relative error near 0 too."""
    near = 0.166662419 + x * (0.0416300728 + x * (0.00818961363 + x * 0.00112340422))
    # Below −½ the difference loses few digits.
    return tl.where(x > -0.5, x * (1 + x * (0.499999819 + x * near)), exp(x) - 1)


@triton.jit
def plain(x, m, MAP: tl.constexpr):
    """f(x) of the elementwise maps, 0 where not m."""
    f = x
    if MAP.name == "silu":
        f = x * sigmoid(x)
    elif MAP.name == "relu":
        f = tl.maximum(x, 0.0)
    elif MAP.name == "elu":
        # `where` computes both sides: the minimum keeps e^x finite.
        f = tl.where(x > 0, x, expm1(tl.minimum(x, 0.0)))
    elif MAP.name == "elu1":
        f = tl.where(x > 0, 1 + x, exp(tl.minimum(x, 0.0)))
    elif MAP.name == "exp":
        f = exp(tl.minimum(x, 10.0))
    # f(0) may not be 0: padding must be, for norms and sums.
    return tl.where(m, f, 0.0)


@triton.jit
def plain_slope(x, MAP: tl.constexpr):
    """f'(x) of the elementwise maps."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if MAP.name == "silu":
        s = sigmoid(x)
        slope = s * (1 + x * (1 - s))
    elif MAP.name == "relu":
        slope = tl.where(x > 0, 1.0, 0.0)
    elif MAP.name == "elu" or MAP.name == "elu1":
        slope = exp(tl.minimum(x, 0.0))
    elif MAP.name == "exp":
        slope = tl.where(x > 10, 0.0, exp(tl.minimum(x, 10.0)))
    return slope


@triton.jit
def guarded_log(b):
    """ln of max(|b|, 1e-6)."""
    return log(tl.maximum(tl.abs(b), EPS))


@triton.jit
def over_base(b, log_b, p):
    """|b|^p / b, exactly 0 where |b| ≤ 1e-6. Times b it is the power, times p the power's derivative."""
    # |b|^{p−2} b.
    return tl.where(tl.abs(b) > EPS, tl.exp2(log_b * ((p - 2) * LOG2_E)), 0.0) * b


@triton.jit
def nala_base(x, r, MAP: tl.constexpr, IS_Q: tl.constexpr):
    """The signed base b, M/b, ln |b| (used for queries only) and the exponent p; r is `inverse_length(x)`."""
    FIXED: tl.constexpr = MAP.query_power if IS_Q else MAP.key_power
    p = tl.full(r.shape, FIXED, tl.float32)
    if FIXED == 0:
        # ½ + tanh y is 2σ(2y) − ½, with y = ν/r.
        p = MAP.power * (2 * sigmoid((2 * MAP.n_scale) / r) - 0.5)
    if IS_Q and MAP.scale != 0:
        # b = s x r.
        x *= MAP.scale * r

    # M/b for the exponent; powers of integers need no logarithm.
    log_b = guarded_log(x)
    if FIXED == 1.0:
        # |b|/b is the sign.
        over = tl.where(tl.abs(x) > EPS, tl.where(x > 0, 1.0, -1.0), 0.0)
    elif FIXED == 2.0:
        over = tl.where(tl.abs(x) > EPS, x, 0.0)
    elif FIXED == 3.0:
        over = tl.where(tl.abs(x) > EPS, x * tl.abs(x), 0.0)
    else:
        over = over_base(x, log_b, p)
    return x, over, log_b, p


@triton.jit
def nala_factor(r, MAP: tl.constexpr):
    """αr, the factor of x in tanh's argument."""
    factor = tl.full(r.shape, 1.0, tl.float32)
    if MAP.angle == "direction":
        factor = MAP.alpha * r
    return factor


@triton.jit
def nala_angle(x, factor):
    """sin θ, cos θ and dθ/da for θ = π/4·tanh a, a = x·factor: Chebyshev in tanh²/4, error 1e-7."""
    # σ(2a) is root²; then tanh a = 2w and tanh² a = 4u.
    root = tl.rsqrt(1 + tl.exp2(x * (-2 * LOG2_E * factor)))
    w = root * root - 0.5  # σ(2a) − ½
    u = w * w
    sin = w * (1.570796322 + u * (-0.6459634776 + u * (0.0796802176 - u * 0.00460215721)))
    cos = 1 + u * (-1.233697 + u * (0.2535985712 - u * 0.0204081584))
    # π/4 (1 − tanh² a).
    return sin, cos, 0.25 * PI - PI * u


@triton.jit
def halves(M, x, MAP: tl.constexpr):
    """Magnitudes M, normed if MAP.l2, in the half of x's sign, and 0 in the other."""
    if MAP.l2:
        M *= inverse_length(M)
    return tl.where(x > 0, M, 0.0), tl.where(x < 0, M, 0.0)


@triton.jit
def features(x, m, MAP: tl.constexpr, IS_Q: tl.constexpr):
    """φ(x) as two tiles, normed if MAP.l2; the same tile twice if MAP.halves is 1. Not for Pola.

    x: [BT, BK] fp32, 0 outside m. m: [BT, BK] bool, real rows and columns below K. φ is exactly 0 outside m.
    """
    if MAP.name == "nala":
        r = inverse_length(x)
        b, over, _, _ = nala_base(x, r, MAP, IS_Q)
        # [BT, BK]
        M = over * b
        if MAP.angle == "relu_split":
            f1, f2 = halves(M, x, MAP)
        else:
            if MAP.l2:
                # Σφ² = ΣM², so M is normed before it is turned.
                M *= inverse_length(M)
            sin, cos, _ = nala_angle(x, nala_factor(r, MAP))
            f1, f2 = M * cos, M * sin
    else:
        f1 = plain(x, m, MAP)
        if MAP.l2:
            f1 *= inverse_length(f1)
        f2 = f1
    return f1, f2


@triton.jit
def features_backward(x, m, d1, d2, MAP: tl.constexpr, IS_Q: tl.constexpr):
    """The gradient of Σ φ1·d1 + φ2·d2 with respect to x, [BT, BK] fp32, 0 outside m. Not for Pola.

    x, m: as in `features`. d1, d2: [BT, BK] fp32, finite outside m; d2 is unused if MAP.halves is 1.
    """
    if MAP.name == "nala":
        dx = nala_backward(x, d1, d2, MAP, IS_Q)
    else:
        dx = d1
        if MAP.l2:
            f = plain(x, m, MAP)
            rho = inverse_length(f)
            # Through φ = ρ f and ρ = 1/√(Σf² + ε).
            dx = rho * d1 - f * (rho * rho * rho * tl.sum(f * d1, 1)[:, None])
        dx = tl.where(m, dx * plain_slope(x, MAP), 0.0)
    return dx


@triton.jit
def nala_backward(x, d1, d2, MAP: tl.constexpr, IS_Q: tl.constexpr):
    """The gradient of NaLa's features, dx of this module's docstring.

    G and `turn` (A · αr) are in the frame of θ. coef collects the factors of x, before ρ.
    """
    BENT: tl.constexpr = IS_Q and MAP.query_power == 0  # p depends on ‖q‖
    DIVIDED: tl.constexpr = IS_Q and MAP.scale != 0  # b contains r
    r = inverse_length(x)
    b, over, log_b, p = nala_base(x, r, MAP, IS_Q)
    M = over * b
    slope = over * (p * (MAP.scale * r) if DIVIDED else p)  # p M/x

    coef = tl.zeros_like(r)
    if MAP.angle == "relu_split":
        # Only the half in which M is has a gradient.
        G = tl.where(x > 0, d1, d2)
        dx = slope * G
    else:
        factor = nala_factor(r, MAP)
        sin, cos, dtheta = nala_angle(x, factor)
        G = cos * d1 + sin * d2
        # A · αr, and Aa = x · turn.
        turn = dtheta * (M * (cos * d2 - sin * d1)) * factor
        dx = slope * G + turn
        if MAP.angle != "raw":
            # a contains r: −x r² ΣAa.
            coef = (r * r) * tl.sum(x * turn, 1)[:, None]

    # From here on G is MG.
    G *= M

    # The last term: x λν (1 − tanh²) ΣE ln |b|.
    if BENT:
        n = (2 * MAP.n_scale) / r
        # 1 − tanh² as a product keeps its digits where tanh saturates.
        bend = r * (4 * MAP.power * MAP.n_scale) * (sigmoid(n) * sigmoid(-n))
        # ΣE ln |b| without the norm's part.
        coef -= bend * tl.sum(G * log_b, 1)[:, None]

    if MAP.l2:
        square = M * M
        # ρ² and c [BT, 1].
        square_rho = 1 / (tl.sum(square, 1)[:, None] + EPS)
        c = square_rho * tl.sum(G, 1)[:, None]
        if BENT:
            # E = ρ (MG − cM²): the norm's part of ΣE ln |b|.
            coef += c * bend * tl.sum(square * log_b, 1)[:, None]
        if DIVIDED:
            # ΣE = ρεc.
            coef += c * (r * r) * p * EPS
        dx = tl.sqrt(square_rho) * (dx - c * (slope * M) - coef * x)
    else:
        if DIVIDED:
            # Without the norm ΣE = ΣMG.
            coef += (r * r) * p * tl.sum(G, 1)[:, None]
        dx -= coef * x
    return dx


# -------------------------------------------------------------------------------------- one pass over q and k
#
# A program handles BT tokens of one head of q or k. Heads of the same tokens are neighbouring programs, which
# share cache lines. One launch serves q and k: a branch on the head costs less than a second launch.


@triton.jit
def pola_base(x, p, unit, h, K: tl.constexpr, MAP: tl.constexpr, BK: tl.constexpr):
    """The signed base b = x·unit, M/b, ln |b|, and p and unit of head h, [1, BK]."""
    c = tl.arange(0, BK)
    exponent = tl.load(p + h * K + c, c < K, other=2.0)[None, :]  # [1, BK]
    scale = tl.full((1, BK), 1.0, tl.float32)
    if MAP.scaled:
        scale = tl.load(unit + h * K + c, c < K, other=1.0)[None, :]
    b = x * scale
    log_b = guarded_log(b)
    return b, over_base(b, log_b, exponent), log_b, exponent, scale


@triton.jit
def forward_part(
    x,
    phi,
    p,
    unit,
    t,
    h,
    N,
    H,
    K: tl.constexpr,
    MAP: tl.constexpr,
    IS_Q: tl.constexpr,
    BK: tl.constexpr,
):
    """Stores φ of BT tokens of head h of x."""
    c = tl.arange(0, BK)[None, :]
    # Rows of x [tokens, H, K].
    at = t[:, None] * H + h
    m = (t < N)[:, None] & (c < K)
    raw = load(x + at * K + c, m)

    if MAP.name == "pola":
        b, over, _, _, _ = pola_base(raw, p, unit, h, K, MAP, BK)
        f1, f2 = halves(over * b, raw, MAP)
    else:
        f1, f2 = features(raw, m, MAP, IS_Q)

    to = phi + at * (K * MAP.halves) + c
    tl.store(to, f1.to(phi.dtype.element_ty), m)
    if MAP.halves == 2:
        tl.store(to + K, f2.to(phi.dtype.element_ty), m)


@triton.jit
def backward_part(
    x,
    dphi,
    dx,
    p,
    unit,
    dp,
    dunit,
    t,
    h,
    N,
    H,
    K: tl.constexpr,
    MAP: tl.constexpr,
    IS_Q: tl.constexpr,
    BK: tl.constexpr,
):
    """Stores dx of BT tokens of head h, and for Pola the program's sums of dp and dunit [K]."""
    c = tl.arange(0, BK)[None, :]
    at = t[:, None] * H + h
    m = (t < N)[:, None] & (c < K)
    raw = load(x + at * K + c, m)
    of = dphi + at * (K * MAP.halves) + c
    d1 = load(of, m)
    d2 = load(of + K, m) if MAP.halves == 2 else d1

    if MAP.name == "pola":
        b, over, log_b, exponent, scale = pola_base(raw, p, unit, h, K, MAP, BK)
        M = over * b
        # M is in the half of x's sign, so its gradient is too.
        dM = tl.where(raw > 0, d1, d2)
        if MAP.l2:
            rho = inverse_length(M)
            dM = rho * (dM - M * (rho * rho * tl.sum(dM * M, 1)[:, None]))

        # The gradient of b, and the sums of this program's tokens.
        d = exponent * over * dM
        i = tl.arange(0, BK)
        # ∂M/∂p = M ln |b|.
        tl.store(dp + i, tl.sum(dM * M * log_b, 0), i < K)
        if MAP.scaled:
            # b = x · unit.
            tl.store(dunit + i, tl.sum(d * raw, 0), i < K)
        d *= scale
    else:
        d = features_backward(raw, m, d1, d2, MAP, IS_Q)

    tl.store(dx + at * K + c, d.to(dx.dtype.element_ty), m)


@triton.jit
def forward_kernel(
    q,
    k,
    phi_q,
    phi_k,
    p,
    unit,
    N,
    HQ,
    HK,
    K: tl.constexpr,
    MAP: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """φ(q) and φ(k): a program has BT tokens of one head of either."""
    h = tl.program_id(0) % (HQ + HK)
    t = (tl.program_id(0) // (HQ + HK)).to(tl.int64) * BT + tl.arange(0, BT)
    if h < HQ:
        forward_part(q, phi_q, p, unit, t, h, N, HQ, K, MAP, True, BK)
    else:
        forward_part(k, phi_k, p, unit, t, h - HQ, N, HK, K, MAP, False, BK)


@triton.jit
def backward_kernel(
    q,
    k,
    dphi_q,
    dphi_k,
    dq,
    dk,
    p,
    unit,
    dp,
    dunit,
    N,
    HQ,
    HK,
    K: tl.constexpr,
    MAP: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """dq and dk from dφ, by the formulas of this module's docstring; a program as in `forward_kernel`."""
    h = tl.program_id(0) % (HQ + HK)
    t = (tl.program_id(0) // (HQ + HK)).to(tl.int64) * BT + tl.arange(0, BT)
    if MAP.name == "pola":  # a row of partial sums for each program
        # A row of [programs, K]; programs run over blocks of tokens, then heads.
        dp += tl.program_id(0).to(tl.int64) * K
        if MAP.scaled:
            dunit += tl.program_id(0).to(tl.int64) * K
    if h < HQ:
        backward_part(q, dphi_q, dq, p, unit, dp, dunit, t, h, N, HQ, K, MAP, True, BK)
    else:
        backward_part(k, dphi_k, dk, p, unit, dp, dunit, t, h - HQ, N, HK, K, MAP, False, BK)


TILE, WARPS = 2048, 4  # entries and warps per program


def map_features(
    q: Tensor, k: Tensor, feature_map, qk_norm: str | None = None
) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k), normed, `[B, T, H, K] → [B, T, H, F]`, computed in fp32 and cast once to q's dtype.

    q and k may have different numbers of heads. Pola's parameters get gradients, summed in a fixed order.

    Raises Unsupported for float64, K > 256 and maps that `describe` refuses.
    """
    K = q.shape[-1]
    if q.dtype not in DTYPES or k.dtype not in DTYPES:
        raise Unsupported(f"{name_of(q.dtype)} and {name_of(k.dtype)} inputs")
    if K > 256:
        raise Unsupported(f"K = {K}: at most 256")
    if q.shape[:2] != k.shape[:2] or k.shape[-1] != K:
        raise Unsupported(f"q {list(q.shape)} and k {list(k.shape)}")

    MAP, parameters = describe(feature_map, qk_norm, K)
    if not MAP.l2 and MAP.name == "identity":
        return q, k.to(q.dtype)
    # q and k share the parameters, so their heads must agree.
    if any(w.shape != (x.shape[2], K) for w in parameters for x in (q, k)):
        raise Unsupported(
            f"parameters {list(parameters[0].shape)} for q {list(q.shape)}, k {list(k.shape)}"
        )

    p, unit = exponents_and_units(MAP, parameters)
    return _MapFeatures.apply(q.contiguous(), k.contiguous(), p, unit, MAP)


def _grid(q: Tensor, k: Tensor) -> tuple[int, dict]:
    """The number of blocks of tokens, and the kernels' last arguments."""
    N, K = q.shape[0] * q.shape[1], q.shape[3]
    BK = power_of_two(K)
    BT = TILE // BK
    sizes = {
        "N": N,
        "HQ": q.shape[2],
        "HK": k.shape[2],
        "K": K,
        "BT": BT,
        "BK": BK,
        "num_warps": WARPS,
    }
    return -(-N // BT), sizes


def form_features(
    q: Tensor, k: Tensor, MAP: Map, p: Tensor | None = None, unit: Tensor | None = None
):
    """φ(q) and φ(k) in q's dtype; q and k must be contiguous. p, unit: Pola's exponents and scales."""
    phi = [
        torch.empty(*x.shape[:3], MAP.halves * x.shape[3], dtype=q.dtype, device=q.device)
        for x in (q, k)
    ]
    count, sizes = _grid(q, k)
    if count:
        forward_kernel[(count * (q.shape[2] + k.shape[2]),)](
            q, k, *phi, p, unit, MAP=MAP, **sizes, **FUSION
        )
    return phi


def unform_features(
    q: Tensor,
    k: Tensor,
    dphi_q: Tensor,
    dphi_k: Tensor,
    MAP: Map,
    p: Tensor | None = None,
    unit: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, p and unit from those of the features of `form_features`."""
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    count, sizes = _grid(q, k)
    heads, H, K = q.shape[2] + k.shape[2], q.shape[2], q.shape[3]
    # By block of tokens and head, those of q before those of k.
    partial = [None if x is None else x.new_empty(count, heads, K) for x in (p, unit)]
    if count:
        inputs = q, k, dphi_q.contiguous(), dphi_k.contiguous(), dq, dk, p, unit
        backward_kernel[(count * heads,)](*inputs, *partial, MAP=MAP, **sizes, **FUSION)
    # Over blocks, and over q and k.
    sums = (None if x is None else x.view(-1, H, K).sum(0) for x in partial)
    return dq, dk, *sums


class _MapFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, p, unit, MAP):
        ctx.save_for_backward(q, k, p, unit)
        ctx.MAP = MAP
        return tuple(form_features(q, k, MAP, p, unit))

    @staticmethod
    @once_differentiable
    def backward(ctx, dphi_q, dphi_k):
        q, k, p, unit = ctx.saved_tensors
        return *unform_features(q, k, dphi_q, dphi_k, ctx.MAP, p, unit), None
