"""The maps' formulas, written out once more in plain float64 and compared."""

import math

import pytest
import torch

from nalanda.model import FEATURE_MAPS, build_feature_map

K = 16
READINGS = [
    {"angle": angle, "power": power, "power_norm": norm, "direction_scale": scale}
    for angle in ("direction", "rms", "raw", "relu_split")
    for power in (2.0, 3.0)
    for norm in ("raw", "rms")
    for scale in ("unit", "sqrt")
]


def draw(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def nala(options: dict):
    return build_feature_map("nala", num_heads=2, head_dim=K, **options)


@pytest.mark.parametrize("options", READINGS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_nala_product(options):
    """φ_q·φ_k = Σ |s·d(q)_i|^p |k_i|^λ cos(θ_q,i − θ_k,i), terms ≥ 0; without an angle, same signs only."""
    q, k = draw(3, 5, 2, K), draw(3, 5, 2, K, seed=1)
    phi_q, phi_k = nala(options)(q, k)
    assert phi_q.shape == phi_k.shape == (3, 5, 2, 2 * K)
    n, nk = ((x.square().sum(-1, keepdim=True) + 1e-6) ** 0.5 for x in (q, k))
    s = math.sqrt(K) if options["direction_scale"] == "sqrt" else 1.0
    p = options["power"] * (0.5 + torch.tanh(n / math.sqrt(K) if options["power_norm"] == "rms" else n))
    weight = (s * q / n).abs() ** p * k.abs() ** options["power"]
    if options["angle"] == "relu_split":
        factor = (q.sign() == k.sign()).double()
    else:
        argument = {
            "direction": lambda x, n: x / n,
            "rms": lambda x, n: math.sqrt(K) * x / n,
            "raw": lambda x, n: x,
        }[options["angle"]]
        angle = [math.pi / 4 * torch.tanh(argument(x, n)) for x, n in ((q, n), (k, nk))]
        factor = torch.cos(angle[0] - angle[1])
    terms = weight * factor
    torch.testing.assert_close((phi_q * phi_k).sum(-1), terms.sum(-1), rtol=1e-12, atol=1e-12)
    assert (terms >= 0).all()
    torch.testing.assert_close(phi_q.square().sum(-1), ((s * q / n).abs() ** (2 * p)).sum(-1))


def test_nala_presets_are_the_sources_readings():
    q, k = draw(1, 3, 2, K), draw(1, 3, 2, K, seed=1)
    for preset, angle in (("nala_paper", "direction"), ("nala_released", "relu_split")):
        options = {"angle": angle, "power": 3, "power_norm": "raw", "direction_scale": "unit"}
        ours = build_feature_map(preset, num_heads=2, head_dim=K)(q, k)
        for a, b in zip(ours, nala(options)(q, k), strict=True):
            assert torch.equal(a, b)


def test_nala_entropy_falls_with_the_query_norm():
    """Entropy of the weights as one direction's query grows; under a homogeneous map it stays."""
    direction, k = draw(200, 1, 1, K), draw(200, 64, 1, K, seed=1)

    def entropy(feature_map, scale):
        phi_q, phi_k = feature_map(scale * direction, k)
        w = (phi_q * phi_k).sum(-1).squeeze(-1)
        w = w / w.sum(-1, keepdim=True)
        return torch.special.entr(w).sum(-1).mean()

    norm_aware = build_feature_map("nala", num_heads=1, head_dim=K)
    falling = torch.stack([entropy(norm_aware, s) for s in (0.1, 0.3, 1.0, 3.0)])
    assert (falling.diff() < 0).all()
    relu = build_feature_map("relu", num_heads=1, head_dim=K)
    assert entropy(relu, 1.0) == pytest.approx(float(entropy(relu, 3.0)), abs=1e-9)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_zero_and_tiny_inputs(name):
    """φ(0) of NaLa is exactly 0, and every gradient is finite, at 0 and at sizes below the epsilon."""
    feature_map = build_feature_map(name, num_heads=2, head_dim=K)
    for size in (0.0, 1e-30, 1e-6, 1e-3, 1e3):
        q, k = (draw(1, 4, 2, K, seed=s).float().mul_(size).requires_grad_() for s in (0, 1))
        phi = feature_map(q, k)
        sum(x.square().sum() for x in phi).backward()
        assert all(x.isfinite().all() for x in (*phi, q.grad, k.grad))
        if size == 0.0 and name.startswith("nala"):
            assert all((x == 0).all() for x in phi)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_gradients_are_the_formulas(name):
    feature_map = build_feature_map(name, num_heads=2, head_dim=4)
    q, k = draw(1, 2, 2, 4).requires_grad_(), draw(1, 2, 2, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(feature_map, (q, k))


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computed_in_fp32(name, dtype):
    feature_map = build_feature_map(name, num_heads=2, head_dim=K)
    q, k = (draw(1, 4, 2, K, seed=s, spread=20).to(dtype) for s in (0, 1))
    for half, full in zip(feature_map(q, k), feature_map(q.double(), k.double()), strict=True):
        assert half.dtype == torch.float32
        torch.testing.assert_close(half.double(), full, rtol=1e-4, atol=1e-5)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="choose one of"):
        build_feature_map("softmax", num_heads=1, head_dim=4)
    with pytest.raises(TypeError, match="powr"):
        build_feature_map("nala", num_heads=1, head_dim=4, powr=2)
