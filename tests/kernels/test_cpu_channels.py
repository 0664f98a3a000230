"""Scores of decays by channel in C++ against float64: values, decays, and every gradient."""

import pytest
import torch
from nalanda_kernels import Unsupported, watch
from nalanda_kernels.cpu import build
from nalanda_kernels.cpu.channels import channel_gradients, channel_scores
from torch import Tensor

from nalanda import ops

try:
    build.library()
except Unsupported as reason:
    pytest.skip(f"no C++ compiler: {reason}", allow_module_level=True)

TOLERANCE = 2e-6  # of a result's largest entry
SHAPES = [(3, 64, 128), (2, 64, 7), (2, 16, 33), (5, 2, 16), (3, 1, 5), (0, 64, 8)]  # P, C, K


@pytest.fixture(autouse=True)
def poison():
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def draw(P: int, C: int, K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, R, K and decays between almost none and a reset."""
    torch.manual_seed(0)
    q, r, k = (torch.randn(P, C, K) for _ in range(3))
    strength = torch.tensor([0.01, 0.5, 5.0, 60.0])[torch.randint(4, (P, 1, K))]
    g = -torch.rand(P, C, K) * strength
    g[:, 7::20, ::3] = -torch.inf
    return q, r, k, g


def reference(q: Tensor, r: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """eᵞ, e^{γ_C − γ}, tril(Δ QK⊤) and tril(Δ RK⊤, −1): each Δ_ij is its own product."""
    P, C, K = q.shape
    e, delta = g.exp(), q.new_zeros(P, C, C, K)
    for i in range(C):
        for j in range(i + 1):
            delta[:, i, j] = e[:, j + 1 : i + 1].prod(1)
    scores = [torch.einsum("pik,pijk,pjk->pij", x, delta, k) for x in (q, r)]
    return e.cumprod(1), delta[:, -1], scores[0], scores[1].tril(-1)


def check(found: Tensor, expected: Tensor, name: str) -> None:
    error, largest = (
        (x.abs().max() if x.numel() else 0) for x in (found.double() - expected, expected)
    )
    assert error <= TOLERANCE * largest, f"{name} is off by {error / largest:.1e}"


@pytest.mark.parametrize("two", [True, False], ids=["with R", "without R"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores(shape, two):
    q, r, k, g = draw(*shape)
    found = channel_scores((q, r) if two else (q,), k, g)
    expected = reference(*(x.double() for x in (q, r, k, g)))
    assert len(found) == 3 + two
    for i, x in enumerate(found):
        check(x, expected[i], f"result {i}")


@pytest.mark.parametrize("kind", ["with R", "without R", "R is K"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, kind):
    """dg takes shares of reads and of writes as well, and d_q, d_r and d_k keep what is in them."""
    q, r, k, g = draw(*shape)
    d_scores = torch.randn(2, *shape[:2], shape[1])
    q_before, r_before, k_before, reads, writes = torch.randn(5, *shape)
    d_q, d_r, d_k, d_g = q_before.clone(), r_before.clone(), k_before.clone(), reads.clone()

    rows, d_rows = {
        "with R": ((q, r), (d_q, d_r)),
        "without R": ((q,), (d_q,)),
        "R is K": ((q, k), (d_q, d_k)),
    }[kind]
    assert channel_gradients(rows, k, g, [*d_scores][: len(rows)], d_rows, d_k, d_g, writes)

    wide = [x.double().requires_grad_() for x in (q, k if kind == "R is K" else r, k, g)]
    qk, rk = reference(*wide)[2:]
    loss = (qk * d_scores[0]).sum() + (rk * d_scores[1]).sum() * (len(rows) - 1)
    of_q, of_r, of_k, of_g = torch.autograd.grad(loss, wide, materialize_grads=True)
    of_g = of_g + reads.double().flip(1).cumsum(1).flip(1)
    of_g[:, 1:] += writes.double().cumsum(1)[:, :-1]

    check(d_q, q_before + of_q, "d_q")
    check(d_k, k_before + of_k + (of_r if kind == "R is K" else 0), "d_k")
    check(d_g, of_g, "d_g")
    if kind == "with R":
        check(d_r, r_before + of_r, "d_r")


def test_threads_change_no_bit():
    q, r, k, g = draw(5, 32, 40)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(channel_scores((q, r), k, g))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_other_dtypes_and_gaps_are_torchs():
    q, r, k, g = draw(2, 16, 8)
    assert channel_scores((q.double(), r.double()), k.double(), g.double()) is None
    assert channel_scores((q.mT.contiguous().mT, r), k, g) is None
    assert channel_scores([x[:, :6].contiguous() for x in (q, r)], k[:, :6], g[:, :6]) is None


def test_no_number_spreads_to_later_tokens_alone():
    """An infinite query of the first token has no part in the others' outputs."""
    q, k, v = (torch.randn(1, 8, 1, 8) for _ in range(3))
    q[0, 0] = torch.inf
    v.requires_grad_()
    o, _ = ops.linear_attention(q, k, v, -torch.rand(1, 8, 1, 8))
    (d_v,) = torch.autograd.grad(o[:, 1:].sum(), v)
    assert d_v[:, 1:].isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_recurrence_takes_it_unless_it_asks_for_torch(backend):
    """In the backward too, which runs outside the call."""
    shape = 1, 70, 2, 16
    q, k, v, g = (torch.randn(shape, requires_grad=True) for _ in range(4))
    with watch() as attempts:
        o, _ = ops.delta_rule(q, k, v, torch.rand(shape[:3]), -g.exp(), backend=backend)
        o.sum().backward()
    served = {attempt.op for attempt in attempts if attempt.backend == "cpu"}
    expected = {"channel_scores", "channel_gradients"} if backend == "auto" else set()
    assert served == expected
