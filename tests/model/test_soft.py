"""SOFT's kernel, landmarks and inverses against their definitions in plain float64."""

import math

import pytest
import torch

from nalanda.model import build_feature_map
from nalanda.model.soft import (
    cholesky_inverse,
    gaussian_kernel,
    landmark_weights,
    newton_inverse,
    soft_attention,
    soft_factors,
)

K, M = 16, 6


def draw(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def soft_similarity(q: torch.Tensor, **options) -> torch.Tensor:
    """Ŝ `[B, H, T, T]` itself; q and options as for `soft_attention`."""
    P, W = soft_factors(q, **options)
    return P.mT @ W @ P


def kernel(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    squares = (x[..., :, None, :] - z[..., None, :, :]).square().sum(-1)
    return torch.exp(-squares / (2 * math.sqrt(x.shape[-1])))


def weights(Z: torch.Tensor, ridge: float, normalized: bool) -> torch.Tensor:
    A = kernel(Z, Z)
    W = torch.linalg.inv(A + ridge * torch.eye(A.shape[-1], dtype=A.dtype))
    if not normalized:
        return W
    D = torch.diag_embed(A.sum(-1) ** -0.5)
    return D @ W @ D


def spectral(X: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(X, 2)


def test_kernel():
    x, z = draw(2, 3, 7, K), draw(3, M, K, seed=1)  # z is broadcast over the batch
    torch.testing.assert_close(
        gaussian_kernel(x, z), kernel(x, z.expand(2, 3, M, K)), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(
        gaussian_kernel(x, x).diagonal(dim1=-2, dim2=-1), torch.ones(2, 3, 7).double()
    )
    # A shared offset of x and z, here 100 in every coordinate, must not cause cancellation in fp32.
    x, z = ((100 + y).float() for y in (x, z.expand(2, 3, M, K)))
    torch.testing.assert_close(
        gaussian_kernel(x, z).double(), kernel(x.double(), z.double()), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("inverse", ["cholesky", "newton"])
@pytest.mark.parametrize("ridge", [0.0, 0.01, 0.5])
def test_landmark_weights(normalized, inverse, ridge):
    Z = draw(2, M, K, spread=K**-0.25)
    W = landmark_weights(Z, ridge, normalized, inverse)
    torch.testing.assert_close(W, weights(Z, ridge, normalized), rtol=1e-9, atol=1e-9)
    single = landmark_weights(Z.float(), ridge, normalized, inverse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(landmark_weights(Z.float(), ridge, normalized, inverse), single)
    torch.testing.assert_close(single.double(), W, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["soft", "softpp"])
@pytest.mark.parametrize(
    "options", [{}, {"ridge": 0.1, "inverse": "newton"}], ids=["default", "newton"]
)
def test_map(name, options):
    """φ_q·φ_k = κ(q, Z) W κ(Z, k), the regularised Nyström entry, for each head with its own landmarks."""
    feature_map = build_feature_map(name, num_heads=2, head_dim=K, landmarks=M, **options).double()
    Z = draw(2, M, K, seed=3, spread=K**-0.25)
    feature_map.load_state_dict({"landmarks": Z})
    q, k = draw(3, 5, 2, K), draw(3, 7, 2, K, seed=1)
    phi_q, phi_k = feature_map(q, k)
    assert phi_q.shape == (3, 5, 2, M)
    torch.testing.assert_close(
        phi_k.transpose(1, 2), kernel(k.transpose(1, 2), Z.expand(3, 2, M, K))
    )
    Pq, Pk = (kernel(x.transpose(1, 2), Z.expand(3, 2, M, K)) for x in (q, k))
    expected = Pq @ weights(Z, options.get("ridge", 0.01), name == "softpp") @ Pk.mT
    torch.testing.assert_close(
        torch.einsum("bthm,bshm->bhts", phi_q, phi_k), expected, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("T", [1, 3, 8, 30])
@pytest.mark.parametrize("normalized", [False, True])
def test_similarity(T, normalized):
    """Ŝ = PᵀWP with the means of windows of 4 as landmarks, the last window shorter: PSD, of rank ≤ m."""
    q = draw(2, T, 3, K, spread=0.7)
    S = soft_similarity(q, normalized=normalized, inverse="cholesky")
    x = q.transpose(1, 2)
    Z = torch.stack([x[:, :, t : t + 4].mean(2) for t in range(0, T, 4)], 2)
    P = kernel(Z, x)
    torch.testing.assert_close(S, P.mT @ weights(Z, 0.01, normalized) @ P, rtol=1e-9, atol=1e-9)
    eigenvalues = torch.linalg.eigvalsh(S)  # rising
    assert (eigenvalues > -1e-12).all()
    assert (eigenvalues[..., : T - Z.shape[2]] < 1e-12).all()
    assert (eigenvalues[..., T - Z.shape[2] :] > 1e-9).all()


def test_similarity_of_all_tokens_as_landmarks_is_the_kernel():
    q = draw(2, 10, 3, K)
    S = soft_similarity(q, window=1, normalized=False, inverse="cholesky", ridge=0.0)
    x = q.transpose(1, 2)
    torch.testing.assert_close(S, kernel(x, x), rtol=1e-9, atol=1e-9)


def test_normalising_never_raises_the_norm():
    """‖D^-½A†D^-½‖ ≤ ‖A†‖, with and without a ridge, for landmarks near and far."""
    for seed, spread in enumerate((0.1, 0.3, 1.0, 3.0)):
        Z = draw(4, M, K, seed=seed, spread=spread)
        for ridge in (0.0, 0.01):
            plain, normal = (spectral(landmark_weights(Z, ridge, flag)) for flag in (False, True))
            assert (normal <= plain * (1 + 1e-9)).all()
            assert spread > 0.5 or (normal < 0.5 * plain).all()  # near landmarks: D is large


@pytest.mark.parametrize(
    "options", [{}, {"normalized": False}, {"inverse": "cholesky", "window": 3, "ridge": 1.0}]
)
def test_attention_is_the_similarity_times_v(options):
    """Attention forms no T × T matrix, and runs in fp32 for half precision, also under autocast."""
    T = 34
    q, v = draw(2, T, 3, K).requires_grad_(), draw(2, T, 3, 5, seed=1).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(tuple(x.shape)) or x, lambda x: x
    ):
        o = soft_attention(q, v, **options)
    assert saved
    assert all(shape[-2:] != (T, T) for shape in saved)
    torch.testing.assert_close(o, torch.einsum("bhts,bshv->bthv", soft_similarity(q, **options), v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = soft_attention(q.bfloat16(), v.float(), **options)
    torch.testing.assert_close(half, soft_attention(q.bfloat16().float(), v.float(), **options))
    assert soft_attention(q, v.bfloat16()).dtype == torch.bfloat16


def test_attention_gradients():
    q, v = draw(1, 6, 2, 4).requires_grad_(), draw(1, 6, 2, 3, seed=1).requires_grad_()
    for inverse in ("cholesky", "newton"):
        assert torch.autograd.gradcheck(
            lambda q, v, i=inverse: soft_attention(q, v, inverse=i), (q, v)
        )


def matrix(condition: float, size: int = 12, seed: int = 0) -> torch.Tensor:
    """Symmetric with eigenvalues spread evenly in the logarithm from 1 to 1/condition."""
    Q = torch.linalg.qr(draw(size, size, seed=seed)).Q
    return Q @ torch.diag(condition ** -torch.linspace(0, 1, size, dtype=torch.float64)) @ Q.mT


def residual(A: torch.Tensor, iterations: int) -> torch.Tensor:
    return spectral(torch.eye(A.shape[-1], dtype=A.dtype) - newton_inverse(A, iterations) @ A)


def test_newton_residual():
    """‖I − YA‖ = (1 − r^-2)^(2^iterations), r = ‖A‖₁/σ_min: 20 iterations are precise up to r ≈ 275."""
    A = torch.stack([matrix(c) for c in (2.0, 50.0, 500.0, 1e4)])
    r = torch.linalg.matrix_norm(A, 1) * spectral(torch.linalg.inv(A))
    for n in (1, 5, 20):
        torch.testing.assert_close(residual(A, n), (1 - r**-2) ** 2**n, rtol=1e-6, atol=1e-10)
    assert (residual(A[:2], 20) < 1e-6).all()
    assert (residual(A[2:], 20) > 0.01).all()
    assert residual(A[2], 25) < 1e-6


@pytest.mark.parametrize(("condition", "iterations"), [(2.0, 20), (100.0, 20), (500.0, 25)])
def test_newton_inverse(condition, iterations):
    """The inverse and its gradient, for a batch, in float64 and in fp32."""
    A = torch.stack([matrix(condition, seed=s) for s in range(3)]).requires_grad_()
    cotangent = draw(3, 12, 12, seed=9)
    ours, exact = newton_inverse(A, iterations), torch.linalg.inv(A)
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    (dA,), (expected,) = (torch.autograd.grad(Y, A, cotangent) for Y in (ours, exact))
    torch.testing.assert_close(dA, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    single = newton_inverse(A.float(), iterations).double()
    assert (spectral(single - exact) < 1e-6 * condition * spectral(exact)).all()


def test_newton_gradcheck():
    A = matrix(20.0, size=4).requires_grad_()
    assert torch.autograd.gradcheck(newton_inverse, A)
    assert torch.autograd.gradgradcheck(newton_inverse, A)


def test_newton_stops_short_where_landmarks_are_close():
    """20 iterations miss A's smallest directions; the Cholesky factor of A + 0.01·I is precise in fp32."""
    Z = draw(32, 64, spread=0.1 * 64**-0.25)
    ridged = kernel(Z, Z) + 0.01 * torch.eye(32, dtype=torch.float64)
    exact = torch.linalg.inv(ridged)
    assert torch.linalg.cond(ridged) > 1000
    assert spectral(newton_inverse(ridged) - exact) > 0.3 * spectral(exact)
    assert spectral(newton_inverse(ridged, 40) - exact) < 1e-6 * spectral(exact)
    assert spectral(cholesky_inverse(ridged.float()).double() - exact) < 1e-4 * spectral(exact)


def test_coincident_landmarks():
    """Equal landmarks, as in a map with zero weights: values and gradients are finite with a ridge."""
    Z = torch.zeros(2, M, K, requires_grad=True)
    W = landmark_weights(Z)
    W.square().sum().backward()
    assert W.isfinite().all()
    assert Z.grad.isfinite().all()


def test_an_indefinite_matrix_is_not_inverted_in_silence():
    A = torch.stack([torch.eye(3), -torch.eye(3)])
    good, bad = cholesky_inverse(A)
    torch.testing.assert_close(good, torch.eye(3))
    assert bad.isnan().any()


def test_bad_options_are_refused():
    q = torch.zeros(1, 4, 1, K)
    with pytest.raises(ValueError, match="cholesky, newton"):
        soft_attention(q, q, inverse="qr")
    with pytest.raises(ValueError, match="window=0"):
        soft_attention(q, q, window=0)
    with pytest.raises(TypeError, match="windw"):
        soft_attention(q, q, windw=2)
