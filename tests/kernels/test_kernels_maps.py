"""The feature map kernels against the model's own in float64: features and every gradient."""

from kernel_device import DEVICE  # isort: skip  (before any kernel)
import copy

import pytest
import torch
import triton
import triton.language as tl
from nalanda_kernels import Unsupported
from nalanda_kernels.triton.feature_maps import describe, features, features_backward, map_features

from nalanda.model.feature_maps import build_feature_map
from nalanda.model.ops import _map

TOLERANCE = {
    torch.float32: 2e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}  # of a row's largest entry
ANGLES = ("direction", "rms", 20.0, "raw", "relu_split")
PLAIN = [(name, {}) for name in ("identity", "silu", "relu", "elu", "elu1", "exp")]
NALA = [("nala", {"angle": angle}) for angle in ANGLES]
NALA += [
    ("nala", {"power": 3.0, "power_norm": "raw"}),
    ("nala", {"power": 2.5, "direction_scale": "unit"}),
    ("nala", {"power": 1.0, "angle": "relu_split"}),
    ("nala_paper", {}),
    ("nala_released", {}),
    ("nala_code", {}),
    ("nala", {"query_power": 2.0, "direction_scale": "none", "angle": "relu_split"}),
    ("angle", {}),
    ("nala", {"query_power": 1.74, "direction_scale": "unit"}),
    ("nala", {"query_power": 3.0, "key_power": 1.5, "angle": "relu_split"}),
    ("nala", {"key_power": 1.0, "angle": "raw"}),
]
POLA = [("pola", {}), ("pola", {"scale": False, "alpha": 3.0})]
each = {
    "argvalues": PLAIN + NALA,
    "ids": lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x,
}
each_norm = pytest.mark.parametrize("qk_norm", [None, "l2"])
pytestmark = pytest.mark.filterwarnings("ignore:nala. power", "ignore:overflow")


@pytest.fixture(autouse=True)
def poison():
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def rows(generator, *shape, dtype=torch.float32) -> torch.Tensor:
    """Rows of all sizes: exact zeros, below the floor of bases, sparse, small, and above the clamp of exp.

    In fp16 only of zeros and of ones: the gradients of others leave its range.
    """
    x = torch.randn(*shape, generator=generator)
    flat = x.view(-1, shape[-1])
    flat[2::10] = 0
    if dtype != torch.float16:
        flat[1::5] *= 1e-2
        flat[7::10] *= 1e-7
        flat[3::10, ::2] = 0
        flat[4::10, 0] = 12
        flat[5::10] *= 3
    return x.to(dtype)


def parameterise(feature_map, generator) -> None:
    for w in feature_map.parameters():
        w.data = 0.5 * torch.randn(w.shape, generator=generator)


def assert_close(x, y, tolerance, floor: float = 1e-3):
    """Compares rows, relative to the row's largest entry or to `floor` times the largest of all."""
    size = y.abs().amax(-1, keepdim=True)
    error = (x.double() - y).abs() / size.clamp_min(floor * float(size.max()))
    assert error.max() <= tolerance, float(error.max())


@triton.jit
def registers_kernel(
    x,
    d,
    phi,
    dx,
    T,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    MAP: tl.constexpr,
    IS_Q: tl.constexpr,
):
    """phi [2, BT, BK] and dx [BT, BK] in full, masked entries included."""
    t, c = tl.arange(0, BT)[:, None], tl.arange(0, BK)[None, :]
    m = (t < T) & (c < K)
    raw = tl.load(x + t * K + c, m, other=0.0)
    d1 = tl.load(d + t * (K * MAP.halves) + c, m, other=0.0)
    d2 = tl.load(d + t * (K * MAP.halves) + K * (MAP.halves - 1) + c, m, other=0.0)
    f1, f2 = features(raw, m, MAP, IS_Q)
    tl.store(phi + t * BK + c, f1)
    tl.store(phi + (BT + t) * BK + c, f2)
    d1, d2 = tl.where(m, d1, 7.0), tl.where(m, d2, 7.0)  # a product may leave anything there
    tl.store(dx + t * BK + c, features_backward(raw, m, d1, d2, MAP, IS_Q))


@pytest.mark.sampled
@each_norm
@pytest.mark.parametrize(("name", "options"), **each)
def test_in_registers(name, options, qk_norm):
    T, K, BT, BK = 13, 24, 16, 32
    generator = torch.Generator().manual_seed(0)
    feature_map = build_feature_map(name, num_heads=1, head_dim=K, **options)
    MAP, parameters = describe(feature_map, qk_norm, K)
    assert parameters == ()
    q, k = (rows(generator, T, K).view(1, T, 1, K) for _ in "qk")
    leaves = [x.double().requires_grad_() for x in (q, k)]
    expected = _map(*leaves, feature_map, qk_norm)
    d = torch.randn(1, T, 1, MAP.halves * K, generator=generator)
    gradients = torch.autograd.grad(expected, leaves, [d.double()] * 2)
    for x, y, g, is_q in zip((q, k), expected, gradients, (True, False), strict=True):
        phi, dx = torch.empty(2, BT, BK, device=DEVICE), torch.empty(BT, BK, device=DEVICE)
        registers_kernel[(1,)](x.to(DEVICE), d.to(DEVICE), phi, dx, T, K, BT, BK, MAP, is_q)
        phi, dx = phi.cpu(), dx.cpu()
        for tile in (*phi, dx):
            assert (tile[T:] == 0).all()
            assert (tile[:, K:] == 0).all()
        got = torch.cat([*phi[: MAP.halves, :T, :K]], -1)
        assert_close(got, y.detach().view(T, -1), TOLERANCE[torch.float32])
        assert_close(dx[:T, :K], g.view(T, K), TOLERANCE[torch.float32])


def compare(name, options, qk_norm, dtype=torch.float32, shape=(2, 9, 2, 24), k_heads=None):
    B, T, H, K = shape
    generator = torch.Generator().manual_seed(1)
    feature_map = build_feature_map(name, num_heads=H, head_dim=K, **options)
    parameterise(feature_map, generator)
    q = rows(generator, *shape, dtype=dtype)
    k = rows(generator, B, T, k_heads or H, K, dtype=dtype)
    reference = copy.deepcopy(feature_map).double()
    wide = [x.double().requires_grad_() for x in (q, k)]
    parameters = list(feature_map.to(DEVICE).parameters())
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k)] + parameters
    got = map_features(*leaves[:2], feature_map, qk_norm)
    d = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in got]
    gradients = torch.autograd.grad(got, leaves, [x.to(DEVICE) for x in d])
    expected = _map(*wide, reference, qk_norm)
    wanted = torch.autograd.grad(
        expected, wide + list(reference.parameters()), [x.double() for x in d]
    )
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == dtype
        assert_close(x.detach().cpu(), y.detach(), TOLERANCE[dtype])
    for x, y, leaf in zip(gradients, wanted, leaves, strict=True):
        assert x.dtype == leaf.dtype
        assert x.shape == leaf.shape
        assert_close(x.cpu(), y, TOLERANCE[dtype] if leaf.ndim == 4 else 2e-5)


@each_norm
@pytest.mark.parametrize(
    ("name", "options"), [*POLA, PLAIN[1], PLAIN[4], NALA[1], NALA[3]], ids=each["ids"]
)
def test_one_pass(name, options, qk_norm):
    compare(name, options, qk_norm)


@pytest.mark.parametrize(("name", "options"), [POLA[0], PLAIN[1], NALA[1]], ids=each["ids"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, options, dtype):
    compare(name, options, "l2", dtype)


@pytest.mark.parametrize("T", [1, 15, 64, 65])
def test_many_blocks_of_tokens(T):
    compare("pola", {}, "l2", shape=(1, T, 1, 128))


def test_heads_of_their_own():
    compare("nala", {}, "l2", shape=(1, 40, 3, 200), k_heads=1)
    compare("identity", {}, "l2", shape=(1, 5, 1, 3), k_heads=2)


def test_without_tokens():
    feature_map = build_feature_map("pola", num_heads=2, head_dim=8)
    parameterise(feature_map, torch.Generator())
    parameters = list(feature_map.to(DEVICE).parameters())
    q = torch.empty(1, 0, 2, 8, device=DEVICE)
    phi, _ = map_features(q, q, feature_map)
    assert phi.shape == (1, 0, 2, 16)
    for g in torch.autograd.grad(phi.sum(), parameters):
        assert (g == 0).all()


def test_identity_is_not_copied():
    q = torch.randn(1, 3, 1, 8)
    for feature_map in (None, build_feature_map("identity", num_heads=1, head_dim=8)):
        assert map_features(q, q, feature_map)[0] is q


def test_a_norm_of_the_maps_own():
    compare("relu", {"norm": "l2"}, None)


@pytest.mark.parametrize(
    ("feature_map", "qk_norm"),
    [
        (build_feature_map("soft", num_heads=1, head_dim=8), None),
        (build_feature_map("nala_learned", num_heads=1, head_dim=8), None),
        (build_feature_map("nala", num_heads=1, head_dim=8, signs="keep"), None),
        (build_feature_map("exp", num_heads=1, head_dim=8, norm="sum"), None),
        (build_feature_map("relu", num_heads=1, head_dim=8, norm="l2"), "l2"),
        (lambda q, k: (q, k), None),
    ],
)
def test_unsupported_maps(feature_map, qk_norm):
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(Unsupported):
        map_features(q, q, feature_map, qk_norm)


def test_unsupported_tensors():
    for q in (torch.randn(1, 3, 1, 8).double(), torch.randn(1, 3, 1, 257)):
        with pytest.raises(Unsupported):
            map_features(q, q, None, "l2")
