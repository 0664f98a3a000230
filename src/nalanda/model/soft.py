"""SOFT (arXiv 2110.11945) and SOFT++ (arXiv 2207.03341): softmax-free attention through landmarks.

The similarity κ(q, k) = exp(−‖q − k‖²/(2√K)) of T tokens is approximated by Nyström's method from m landmarks
Z. With P = κ(Z, x) `[m, T]`, A = κ(Z, Z) `[m, m]`, D = diag(A·1) and A† ≈ (A + ρI)^-1:

    SOFT    Ŝ = Pᵀ A† P,        SOFT++    Ŝ = Pᵀ D^-½ A† D^-½ P.

Ŝ is positive semidefinite with a rank of at most m. This holds for the whole matrix only: a causal mask keeps
its (regularised) Nyström entries, but the masked Ŝ is neither symmetric nor PSD. `Soft` and `SoftPP` in
feature_maps.py are the causal form with learnt landmarks. This file has the code that both share, and the
bidirectional form, whose landmarks are pooled from the sequence.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import at_least_fp32, no_autocast

INVERSES = ("cholesky", "newton")


def gaussian_kernel(x: Tensor, z: Tensor) -> Tensor:
    """κ(x, z) = exp(−‖x − z‖²/(2√K)), x `[…, T, K]` and z `[…, m, K]` to `[…, T, m]`, in their own dtype.

    The distance is ‖x‖² + ‖z‖² − 2x·z, one matrix product. Subtracting the mean of z from both first changes
    no distance, but avoids cancellation where x and z share a large offset.
    """
    centre = z.mean(-2, keepdim=True).detach()  # no gradient: a shift changes nothing
    x, z = x - centre, z - centre
    # ‖x‖² + ‖z‖², […, T, m]
    squares = x.square().sum(-1, keepdim=True) + z.square().sum(-1).unsqueeze(-2)
    # Rounding may leave a squared distance below 0.
    return (-(squares - 2 * x @ z.mT).clamp_min(0) / (2 * math.sqrt(x.shape[-1]))).exp()


class _NewtonInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A: Tensor, iterations: int) -> Tensor:
        # A/‖A‖₁² starts within reach: the eigenvalues of I − A Y are in [0, 1).
        Y = A / A.abs().sum(-2).amax(-1)[..., None, None].square()
        for _ in range(iterations):
            Y = 2 * Y - Y @ A @ Y
        ctx.save_for_backward(Y)
        return Y

    @staticmethod
    def backward(ctx, dY: Tensor) -> tuple[Tensor, None]:
        (Y,) = ctx.saved_tensors
        with no_autocast(Y):
            return -Y.mT @ dY @ Y.mT, None  # d(A⁻¹) = −A⁻¹ dA A⁻¹


def newton_inverse(A: Tensor, iterations: int = 20) -> Tensor:
    """A^-1 by Newton–Raphson, A_{k+1} = 2A_k − A_k A A_k from A_0 = A/‖A‖₁² (SOFT, with this A_0 for theirs).

    A: symmetric positive definite `[…, m, m]`. Each step squares the residual I − A_k A: with r = ‖A‖₁/σ_min
    its norm after n steps is (1 − r^-2)^(2^n). It starts to fall at n ≈ 2·log₂ r and reaches fp32's precision
    4 steps later. After 20 steps it is 1e-6 at r = 275, 1.5 % at 500, 12 % at 700; for larger r the result
    remains too small in A's smallest directions.

    The backward is that of the inverse, −Yᵀ(∇Y)Yᵀ, with the computed Y; no iterate is saved.
    """
    return _NewtonInverse.apply(A, iterations)


def cholesky_inverse(A: Tensor) -> Tensor:
    """A^-1 of a symmetric positive definite A `[…, m, m]`; NaN where A is not positive definite.

    Raises nothing, because checking would make the host wait for the device.
    """
    L, failed = torch.linalg.cholesky_ex(A)
    return torch.cholesky_inverse(L.masked_fill(failed[..., None, None] != 0, math.nan))


def landmark_weights(
    Z: Tensor,
    ridge: float = 0.01,
    normalized: bool = True,
    inverse: str = "cholesky",
    iterations: int = 20,
) -> Tensor:
    """W with Ŝ = PᵀWP: (A + ρI)^-1, or normalized D^-½(A + ρI)^-1 D^-½, with A = κ(Z, Z), D = diag(A·1).

    Z: landmarks `[…, m, K]` of at least fp32; W is `[…, m, m]` in their dtype, also under autocast.
    ridge: ρ; if positive, the Cholesky factor exists even where landmarks coincide.
    inverse: "cholesky", or "newton" with `iterations` steps; see `newton_inverse` for its limits.

    Raises ValueError for an unknown inverse.
    """
    if inverse not in INVERSES:
        raise ValueError(f"inverse={inverse!r} is not one of {', '.join(INVERSES)}")
    with no_autocast(Z):
        A = gaussian_kernel(Z, Z)
        ridged = A + ridge * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        if inverse == "cholesky":
            W = cholesky_inverse(ridged)
        else:
            W = newton_inverse(ridged, iterations)
        if normalized:
            root = A.sum(-1).rsqrt()  # D^-½; each sum is ≥ 1 because it includes κ(z, z) = 1
            W = root[..., :, None] * W * root[..., None, :]
        return W


def pool_landmarks(x: Tensor, window: int = 4, grid: tuple[int, int] | None = None) -> Tensor:
    """Means over windows of time, x `[…, T, K]` to `[…, ⌈T/window⌉, K]`; the last window may be shorter.

    grid: the T tokens are an image of (rows, columns) patches; windows are window × window.
    """
    if window < 1:
        raise ValueError(f"window={window}: landmarks are means of at least 1 token")
    channels = x.mT.flatten(0, -3)  # [·, K, T]: pooling is over the last dimension
    if grid is None:
        pooled = F.avg_pool1d(channels, window, ceil_mode=True)  # [·, K, m]
    else:
        pooled = F.avg_pool2d(channels.unflatten(2, grid), window, ceil_mode=True).flatten(2)
    return pooled.mT.unflatten(0, x.shape[:-2])


def soft_factors(
    q: Tensor,
    *,
    window: int = 4,
    normalized: bool = True,
    inverse: str = "newton",
    ridge: float = 0.01,
    iterations: int = 20,
    grid: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(P, W) of Ŝ = PᵀWP for q = k `[B, T, H, K]`: `[B, H, m, T]` and `[B, H, m, m]`, in fp32 at least."""
    with no_autocast(q):
        x = at_least_fp32(q).transpose(1, 2)  # [B, H, T, K]
        Z = pool_landmarks(x, window, grid)
        return gaussian_kernel(Z, x), landmark_weights(Z, ridge, normalized, inverse, iterations)


def soft_attention(q: Tensor, v: Tensor, **options) -> Tensor:
    """Ŝv, bidirectional SOFT(++) for the Long Range Arena: every token sees every token.

    q: `[B, T, H, K]`, queries and keys at once; v: `[B, T, H, V]`. Returns `[B, T, H, V]` in v's dtype,
    without forming Ŝ. With m = ⌈T/window⌉ landmarks a head costs O(Tm(K + V) + m³) (m³ per Newton step).
    options: those of `soft_factors`: window 4 (and stride), normalized True (SOFT++; False: SOFT), inverse
        "newton", ridge 0.01 (the papers have none), iterations 20; grid as in `pool_landmarks`.

    Raises ValueError for an unknown inverse or a window below 1, TypeError for an unknown option.
    """
    with no_autocast(q):
        P, W = soft_factors(q, **options)
        # From the right, so that no [T, T] matrix exists: [B, H, m, V] twice, then [B, H, T, V].
        o = P.mT @ (W @ (P @ v.to(P.dtype).transpose(1, 2)))
    return o.transpose(1, 2).to(v.dtype)


class PooledLandmarks(nn.Module):
    """`soft_attention` with these options, for the mixer `soft` where tokens see both ways.

    window: tokens a landmark is the mean of, in images window × window; inverse, ridge and iterations as in
    `soft_attention`.
    """

    flops = 0.0

    def __init__(
        self,
        normalized: bool,
        *,
        window: int = 4,
        inverse: str = "newton",
        ridge: float = 0.01,
        iterations: int = 20,
    ):
        super().__init__()
        if inverse not in INVERSES:
            raise ValueError(f"soft: inverse={inverse!r} must be one of {', '.join(INVERSES)}")
        if window < 1 or iterations < 1 or ridge < 0:
            raise ValueError(
                f"soft: window={window} and iterations={iterations} must be ≥ 1, ridge={ridge} ≥ 0"
            )
        self.normalized, self.window, self.inverse = normalized, window, inverse
        self.ridge, self.iterations = float(ridge), iterations

    def forward(self, q: Tensor, v: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        names = ("normalized", "window", "inverse", "ridge", "iterations")
        return soft_attention(q, v, grid=grid, **{name: getattr(self, name) for name in names})

    def flops_at(self, sides: tuple[int, ...], K: int, V: int) -> float:
        """FLOPs per token and head of a sequence, sides (T,), or an image, sides (rows, columns)."""
        T, m = math.prod(sides), math.prod(-(-side // self.window) for side in sides)
        # Two products of 2m³ FLOPs a Newton step, once a sequence; so T tokens share them.
        inverse = m**3 * (4 * self.iterations if self.inverse == "newton" else 1)
        return 2.0 * m * (K + 2 * V) + (2.0 * m**2 * (K + V) + inverse) / T

    def extra_repr(self) -> str:
        return f"window={self.window}, ridge={self.ridge:g}, inverse={self.inverse}"
