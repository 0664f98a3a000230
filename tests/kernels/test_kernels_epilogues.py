"""SwiGLU, and RMSNorm with residual or gate, against float64: values and every gradient."""

from kernel_device import DEVICE  # isort: skip  (before any kernel)

import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels import Unsupported
from nalanda_kernels.triton.epilogues import rms_norm, swiglu
from nalanda_kernels.triton.glu import glu_rows
from torch import Tensor

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FP32: 1e-5, BF16: 8e-3, FP16: 1e-3}  # of a result's largest entry
EPS = 1e-5


@pytest.fixture(autouse=True)
def poison():
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def draw(generator, *shape, dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def check(call, reference, leaves: dict[str, Tensor]) -> None:
    """Outputs and gradients of `call(**leaves)` against those of `reference` in float64."""
    mine = {name: x.to(DEVICE).requires_grad_() for name, x in leaves.items()}
    wide = {name: x.double().requires_grad_() for name, x in leaves.items()}
    outputs, expected = call(**mine), reference(**wide)
    generator = torch.Generator().manual_seed(1)
    given = [draw(generator, *y.shape, dtype=y.dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, list(mine.values()), [d.to(DEVICE) for d in given])
    wanted = torch.autograd.grad(expected, list(wide.values()), [d.double() for d in given])
    assert [d.dtype for d in gradients] == [x.dtype for x in leaves.values()]
    for found, y in zip([*outputs, *gradients], [*expected, *wanted], strict=True):
        assert found.shape == y.shape
        found, y = found.detach().cpu(), y.detach()
        error = (found.double() - y).abs()
        assert error.max() <= TOLERANCE[found.dtype] * max(1.0, float(y.abs().max()))


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        ((3, 64), (FP32, FP32)),
        ((2, 5, 33), (BF16, BF16)),
        ((3, 1100), (FP16, FP16)),
        ((1, 1), (FP32, BF16)),
        ((0, 8), (FP32, FP32)),
    ],
)
def test_swiglu(shape, dtypes):
    generator = torch.Generator().manual_seed(0)
    a, b = (draw(generator, *shape, dtype=dtype) for dtype in dtypes)
    if a.numel() == 0:
        assert swiglu(a.to(DEVICE), b.to(DEVICE)).shape == shape
        return
    a.view(-1)[::3] *= 30  # saturated gates
    check(lambda a, b: (swiglu(a, b),), lambda a, b: (F.silu(a) * b,), {"a": a, "b": b})


@pytest.mark.parametrize(
    ("shape", "N", "dtype"),
    [((1, 1, 96), 40, FP32), ((3, 1, 300), 16, BF16), ((16, 1, 64), 90, FP16), ((2, 64), 8, BF16)],
)
def test_glu_of_few_rows(shape, N, dtype):
    """Matrices lie side by side, as in evaluation."""
    generator = torch.Generator().manual_seed(0)
    D = shape[-1]
    x, y = (draw(generator, *shape, dtype=dtype) for _ in range(2))
    weight = draw(generator, D, dtype=FP32)
    joined = draw(generator, 2 * N, D, dtype=dtype) * D**-0.5
    down = draw(generator, D, N, dtype=dtype) * N**-0.5
    on_device = [z.to(DEVICE) for z in (x, y, weight, joined, down)]
    x_, y_, weight_, joined_, down_ = on_device
    result = glu_rows(x_, y_, weight_, EPS, joined_[:N], joined_[N:], down_)

    s, h = normed(x.double(), weight.double(), y.double())
    a, b = (h @ matrix.double().T for matrix in joined.split(N))
    expected = s + (F.silu(a) * b) @ down.double().T
    assert result.shape == shape
    assert result.dtype == dtype
    error = (result.cpu().double() - expected).abs().max()
    assert error <= 2 * TOLERANCE[dtype] * float(expected.abs().max())


def test_glu_refuses_many_rows_and_several_dtypes():
    x, matrix = torch.ones(17, 8, device=DEVICE), torch.ones(4, 8, device=DEVICE)
    weight, down = torch.ones(8, device=DEVICE), matrix.T.contiguous()
    with pytest.raises(Unsupported, match="17 rows"):
        glu_rows(x, x, weight, EPS, matrix, matrix, down)
    with pytest.raises(Unsupported, match="bfloat16 and float32 inputs"):
        glu_rows(x[:2].bfloat16(), x[:2], weight, EPS, matrix, matrix, down)


def normed(x, weight, y=None, gate=None):
    s = x if y is None else x + y
    h = F.rms_norm(s, weight.shape, weight, EPS)
    return s, h if gate is None else h * F.silu(gate).view(h.shape)


NORMS = {  # shape of x, whether it has y and a gate; dtypes of x, weight, y or gate, and the norm
    "residual": ((2, 9, 96), "y", FP32, FP32, BF16, BF16),
    "residual of one dtype": ((2, 3, 100), "y", BF16, BF16, BF16, BF16),
    "one row": ((1, 1024), "y", FP32, FP32, FP32, FP32),
    "wide rows": ((19, 5000), "y", FP32, BF16, FP16, FP16),
    "widest row": ((1, 16384), "", FP32, FP32, FP32, FP32),
    "norm alone": ((37, 64), "", FP32, FP32, FP32, BF16),
    "heads": ((2, 70, 2, 64), "gate", BF16, FP32, BF16, BF16),
    "odd heads": ((1, 7, 3, 65), "gate", FP32, FP32, FP32, FP32),
    "wide heads": ((1, 20, 2, 512), "gate", FP32, FP32, BF16, BF16),
    "narrow heads": ((1, 3, 2, 1), "gate", FP16, FP16, FP16, FP16),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", NORMS)
def test_rms_norm(case):
    shape, other, *dtypes = NORMS[case]
    generator = torch.Generator().manual_seed(0)
    x = draw(generator, *shape, dtype=dtypes[0])
    x[..., 0, :] *= 1e-3
    leaves = {"x": x, "weight": 1 + draw(generator, shape[-1], dtype=dtypes[1])}
    if other:
        flat = shape if other == "y" else (*shape[:-2], shape[-2] * shape[-1])
        leaves[other] = draw(generator, *flat, dtype=dtypes[2])

    def call(x, weight, y=None, gate=None):
        total, h = rms_norm(x, weight, EPS, dtype=dtypes[3], add=y, gate=gate)
        assert h.dtype == dtypes[3]
        return total, h

    check(call, normed, leaves)
    check(
        lambda **x: call(**x)[1:], lambda **x: normed(**x)[1:], leaves
    )  # as the last norm of a model


PARTS = {
    "columns": lambda x: x[..., 48:96],
    "every second column": lambda x: x[..., 48::2],
    "another order of rows": lambda x: x.transpose(0, 1)[..., :48],
}


@pytest.mark.parametrize("part", PARTS)
def test_inputs_that_are_parts_of_others(part):
    """And gradients that are expanded, as those of a sum."""
    generator, pick = torch.Generator().manual_seed(0), PARTS[part]
    wide, weight = (draw(generator, *shape, dtype=FP32) for shape in ((2, 5, 3 * 48), (24,)))
    leaves = {"a": wide, "b": draw(generator, *pick(wide).shape, dtype=FP32), "weight": weight}

    def call(a, b, weight):
        _, h = rms_norm(b.unflatten(-1, (2, 24)), weight, EPS, dtype=FP32, gate=pick(a))
        return swiglu(pick(a), b), swiglu(b, pick(a)), h, h.sum()

    def reference(a, b, weight):
        _, h = normed(b.unflatten(-1, (2, 24)), weight, gate=pick(a).reshape(-1))
        return F.silu(pick(a)) * b, F.silu(b) * pick(a), h, h.sum()

    check(call, reference, leaves)


@pytest.mark.parametrize("frozen", ["x", "weight", "add"])
def test_frozen_inputs(frozen):
    generator = torch.Generator().manual_seed(0)
    x, add = (draw(generator, 5, 40, dtype=FP32).to(DEVICE) for _ in range(2))
    leaves = {"x": x, "weight": torch.ones(40, device=DEVICE), "add": add}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    total, h = rms_norm(leaves["x"], leaves["weight"], EPS, dtype=FP32, add=leaves["add"])
    (total.sum() + h.square().sum()).backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is None] == [frozen]


def test_sums_of_weights_do_not_depend_on_order():
    """The same gradients twice: no atomics."""
    x, w = torch.randn(300, 64, device=DEVICE), torch.ones(64, device=DEVICE, requires_grad=True)
    first, second = (
        torch.autograd.grad(rms_norm(x, w, EPS, dtype=FP32)[1].sum(), w)[0] for _ in "12"
    )
    assert torch.equal(first, second)


def test_without_rows():
    x, w = (
        torch.empty(2, 0, 3, 8, device=DEVICE, requires_grad=True),
        torch.ones(8, device=DEVICE).requires_grad_(),
    )
    total, h = rms_norm(x, w, EPS, dtype=BF16, gate=torch.empty(2, 0, 24, device=DEVICE))
    (total.sum() + h.float().sum()).backward()
    assert (x.grad.shape, h.shape, h.dtype) == (x.shape, x.shape, BF16)
    assert w.grad.eq(0).all()


def test_unsupported():
    x, w = torch.ones(3, 8), torch.ones(8)
    calls = [
        lambda: swiglu(x.double(), x),
        lambda: swiglu(x, x[:1]),
        lambda: swiglu(x[:, :0], x[:, :0]),
        lambda: rms_norm(x.double(), w, EPS, dtype=FP32),
        lambda: rms_norm(x, w, EPS, dtype=torch.float64),
        lambda: rms_norm(x, w[:4], EPS, dtype=FP32),
        lambda: rms_norm(x, w, EPS, dtype=FP32, add=x[:1]),
        lambda: rms_norm(x, w, EPS, dtype=FP32, gate=torch.ones(2, 12)),
        lambda: rms_norm(torch.ones(1, 16385), torch.ones(16385), EPS, dtype=FP32),
    ]
    for call in calls:
        with pytest.raises(Unsupported):
            call()
