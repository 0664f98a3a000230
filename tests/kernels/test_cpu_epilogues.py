"""SwiGLU, norms and short convolutions in C++ against float64: values, and the gradient of every input."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels import Unsupported
from nalanda_kernels.cpu import build
from nalanda_kernels.cpu.epilogues import rms_norm, short_convs, swiglu
from nalanda_kernels.cpu.step import linear_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nalanda.model import epilogues, projections

try:
    build.library()
except Unsupported as reason:
    pytest.skip(f"no C++ compiler: {reason}", allow_module_level=True)

FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {FP32: 2e-6, BF16: 1.6e-2}  # of a result's largest entry; bf16 is rounded twice
EPS = 1e-5


@pytest.fixture(autouse=True)
def poison():
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    """A leaf that is a slice of NaN."""
    poisoned = torch.full((*shape[:-1], shape[-1] + 3), float("nan"), dtype=dtype)
    x = poisoned[..., : shape[-1]]
    return x.copy_(torch.randn(shape)).requires_grad_()


def check(call, reference, leaves: list[Tensor]) -> None:
    """Outputs and gradients of call(*leaves) against those of `reference` in float64."""
    wide = [x.detach().double().requires_grad_() for x in leaves]
    outputs, expected = call(*leaves), reference(*wide)
    given = [torch.randn_like(y) for y in outputs]
    found = [*outputs, *torch.autograd.grad(outputs, leaves, given)]
    wanted = torch.autograd.grad(expected, wide, [d.double() for d in given])
    assert [d.dtype for d in found[len(outputs) :]] == [x.dtype for x in leaves]
    for x, y in zip(found, [*expected, *wanted], strict=True):
        assert x.shape == y.shape
        error = (x.double() - y).abs().max()
        assert error <= TOLERANCE[x.dtype] * max(1.0, float(y.detach().abs().max()))


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (FP32, BF16)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5, 33), (600, 130)])
def test_swiglu(shape, dtypes):
    torch.manual_seed(0)
    a, b = (draw(*shape, dtype=dtype) for dtype in dtypes)
    a.data[..., ::3] *= 30  # saturated gates
    check(lambda a, b: [swiglu(a, b)], lambda a, b: [F.silu(a) * b], [a, b])


NORMS = {  # shape of x, what is beside it; dtypes of x, weight, the other, and the norm
    "residual": ((2, 9, 96), "add", FP32, FP32, BF16, BF16),
    "residual of one dtype": ((600, 100), "add", BF16, BF16, BF16, BF16),
    "wide rows": ((3, 5000), "add", FP32, FP32, FP32, FP32),
    "norm alone": ((37, 64), None, FP32, FP32, FP32, BF16),
    "heads": ((2, 70, 2, 64), "gate", BF16, FP32, BF16, BF16),
    "odd heads": ((1, 300, 3, 65), "gate", FP32, FP32, FP32, FP32),
}


@pytest.mark.parametrize("case", NORMS)
def test_rms_norm(case):
    (*rows, V), other, *dtypes, dtype = NORMS[case]
    torch.manual_seed(0)
    x, weight = draw(*rows, V, dtype=dtypes[0]), draw(V, dtype=dtypes[1])
    x.data[..., 0, :] *= 1e-3
    beside = {"add": (*rows, V), "gate": (*rows[:-1], rows[-1] * V)}
    leaves = [x, weight] + ([draw(*beside[other], dtype=dtypes[2])] if other else [])

    def ours(x, weight, y=None):
        total, h = rms_norm(x, weight, EPS, dtype=dtype, **{other: y} if other else {})
        return [total, h] if other == "add" else [h]

    def reference(x, weight, y=None):
        total = x + y if other == "add" else x
        h = F.rms_norm(total, (V,), weight, EPS)
        if other == "gate":
            h = h * F.silu(y).view(h.shape)
        return [total, h] if other == "add" else [h]

    check(ours, reference, leaves)


def convolve(x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """By torch's conv1d, a sequence at a time."""
    (B, T, D), W = x.shape, weight.shape[1]
    bounds = range(0, B * T + 1, T) if cu_seqlens is None else cu_seqlens.tolist()
    rows = []
    for n, (first, end) in enumerate(itertools.pairwise(bounds)):
        past = x.new_zeros(W - 1, D) if state is None else state[n]
        laid = torch.cat([past, x.reshape(-1, D)[first:end]])
        rows.append(F.conv1d(laid.T[None], weight[:, None], groups=D)[0].T)
    return torch.cat(rows).view(x.shape)


@pytest.mark.parametrize("bounds", [None, [0, 2, 3, 30]])
def test_new_states_are_the_last_inputs(bounds):
    """Shorter sequences keep some of the old state."""
    torch.manual_seed(0)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    x, taps, state = torch.randn(1, 30, 6), torch.randn(6, 4), torch.randn(3, 3, 6)
    state = state[:1] if bounds is None else state
    _, (new,) = short_convs([x], [taps], [state], cu_seqlens=cu_seqlens, output_final_state=True)
    for n, (first, end) in enumerate(itertools.pairwise(bounds or [0, 30])):
        assert torch.equal(new[n], torch.cat([state[n], x[0, first:end]])[-3:])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 2, 3, 30]])
@pytest.mark.parametrize(("D", "W"), [(6, 2), (64, 4), (130, 5)])
def test_short_convs(D, W, bounds, carried, dtype):
    """Two at once, of different widths, one with SiLU behind it."""
    torch.manual_seed(0)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    B, N = (2, 2) if bounds is None else (1, 3)
    widths = D, D + 5
    leaves = [draw(B, 30 // B, width, dtype=dtype) for width in widths]
    leaves += [draw(width, W, dtype=FP32) for width in widths]
    leaves += [draw(N, W - 1, width, dtype=dtype) for width in widths] if carried else []

    def ours(*leaves):
        options = {"cu_seqlens": cu_seqlens, "activations": [None, "silu"]}
        return short_convs(leaves[:2], leaves[2:4], [*leaves[4:]] or None, **options)[0]

    def reference(*leaves):
        states = leaves[4:] or (None, None)
        y, z = (convolve(leaves[i], leaves[2 + i], states[i], cu_seqlens) for i in range(2))
        # SiLU reads z as it is rounded.
        return [y, F.silu(z + (z.to(dtype) - z).detach())]

    check(ours, reference, leaves)


def test_threads_do_not_change_results():
    x, y, gate = (torch.randn(4, 300, 128, requires_grad=True) for _ in range(3))
    weight, taps = torch.randn(128, requires_grad=True), torch.randn(128, 4, requires_grad=True)
    threads, outcomes = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            total, h = rms_norm(x, weight, EPS, dtype=FP32, add=y, gate=gate)
            (z,), _ = short_convs([swiglu(total, h)], [taps])
            outcomes.append([z, *torch.autograd.grad(z.sum(), [x, y, gate, weight, taps])])
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)


def test_bounds_are_checked():
    x, taps = torch.ones(1, 8, 4), torch.ones(4, 2)
    for bounds in ([0, 9], [0, 5, 3, 8], [1, 8]):
        with pytest.raises(ValueError, match="cu_seqlens: does not rise from 0 to the 8 tokens"):
            short_convs([x], [taps], cu_seqlens=torch.tensor(bounds))


def test_what_is_left_to_torch():
    x, weight = torch.ones(2, 8), torch.ones(8)
    assert swiglu(x.double(), x.double()) is None
    assert swiglu(x[:0], x[:0]) is None
    assert rms_norm(x, weight, EPS, dtype=torch.float64) is None
    assert rms_norm(x.half(), weight, EPS, dtype=FP32) is None
    assert short_convs([x[None]], [weight[:, None].expand(8, 9)]) is None


def test_states_of_other_shapes_are_torchs():
    x, taps = torch.randn(2, 9, 6), torch.randn(6, 4)
    for shape in ((1, 3, 6), (2, 2, 6), (2, 3, 5)):
        assert short_convs([x], [taps], [torch.randn(shape)]) is None


def test_rows_of_another_width_are_torchs():
    """They would be counted as more rows than there are."""
    assert linear_rows(torch.ones(4, 8), torch.ones(64, 4)) is None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        projections.linear_rows(torch.ones(4, 8), torch.ones(64, 4))


def test_tensors_without_memory_are_torchs():
    """Fake tensors, and those in transforms of functions, have none for C++ to read."""
    a, b = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    with FakeTensorMode() as mode:
        assert epilogues.swiglu(*map(mode.from_tensor, (a, b))).shape == a.shape
    torch.testing.assert_close(torch.func.vmap(epilogues.swiglu)(a, b), F.silu(a) * b)
    slope = torch.func.grad(lambda a: epilogues.swiglu(a, b).sum())(a)
    expected = torch.func.grad(lambda a: (F.silu(a) * b).sum())(a)
    torch.testing.assert_close(slope, expected)
