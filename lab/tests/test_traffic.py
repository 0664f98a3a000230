"""Bytes that kernels move in Triton's interpreter: the counter on known kernels, then limits of ours."""

import interpreter  # noqa: F401
import pytest
import torch
import triton
import triton.language as tl
from nalanda_lab.kernels import traffic
from nalanda_lab.kernels.static import CASES, LIMITS, Case, limits, ours


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n, other=0.0).to(y.dtype.element_ty), at < n)


@triton.jit
def whole(x, y, total, last, BLOCK: tl.constexpr):
    row = tl.load(x + tl.arange(0, BLOCK))  # without a mask
    tile = tl.load(
        tl.make_block_ptr(y, (8, 10), (10, 1), (0, 0), (8, 16), (1, 0)),
        boundary_check=(1,),
        padding_option="zero",
    )
    tl.atomic_add(total, tl.sum(row, 0) + tl.sum(tl.sum(tile, 1), 0))
    tl.atomic_cas(last, 0, 1)


@triton.autotune(
    [triton.Config({"TIMES": n}, num_warps=w) for n in (3, 1, 2) for w in (2, 4)], key=[]
)
@triton.jit
def again(x, y, TIMES: tl.constexpr):
    for _ in range(TIMES):
        tl.store(y + tl.arange(0, 16), tl.load(x + tl.arange(0, 16)))


def test_masked_lanes_do_not_count():
    x, y = torch.ones(100), torch.zeros(100, dtype=torch.bfloat16)
    with traffic.counting() as found:
        copy[(2,)](x, y, 100, BLOCK=64)
    assert dict(found.loads) == {"copy": 400}
    assert dict(found.stores) == {"copy": 200}
    assert y.sum() == 100


def test_unmasked_loads_block_pointers_and_atomics_count():
    x, y, total, last = (
        torch.ones(32),
        torch.ones(8, 10),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int32),
    )
    with traffic.counting() as found:
        whole[(3,)](x, y, total, last, BLOCK=32)
    assert found.loads["whole"] == 3 * (32 * 4 + 80 * 4 + 4 + 4)
    assert found.stores["whole"] == 3 * (4 + 4)


def test_of_what_is_autotuned_the_least_counts():
    x, y = torch.ones(16), torch.zeros(16)
    with traffic.counting() as found:
        again[(1,)](x, y)
    assert found.total == 2 * 64


def test_torch_between_kernels_counts_and_views_do_not():
    x, y = torch.ones(4, 8), torch.ones(4, 8)
    with traffic.counting() as found:
        x.add_(y.T.contiguous().T)
        y.view(-1).zero_()
        torch.empty_like(x)
        torch.arange(1000)
    assert found.loads == {"torch: clone": 128, "torch: add_": 256, "torch: zero_": 0}
    assert found.stores == {"torch: clone": 128, "torch: add_": 128, "torch: zero_": 128}


def test_nothing_is_counted_or_changed_after_it():
    x, y = torch.ones(64), torch.zeros(64)
    with traffic.counting() as found:
        pass
    copy[(1,)](x, y, 64, BLOCK=64)
    assert found.total == 0
    assert y.sum() == 64


def test_floor():
    gated = traffic.floor(traffic.CASES["flagship"])
    assert gated == {"forward": 2 * (256 + 512) + 8, "backward": 2 * (2 * (256 + 256) + 256) + 16}


def test_bytes_by_token_and_head_do_not_depend_on_their_number():
    case = Case(K=16, V=16, H=1, map="nala", gated=True)
    more = Case(K=16, V=16, H=2, map="nala", gated=True)
    one, other = (
        traffic.totals(traffic.our_count(c, B, T)) for c, B, T in ((case, 1, 64), (more, 2, 128))
    )
    for name in traffic.PASSES:
        assert one[name] == pytest.approx(other[name], rel=0.03)


@pytest.mark.parametrize("name", ["nala_deltanet", "flagship"])
def test_nala_moves_at_most_60_percent_of_what_the_peer_moves(name):
    """At the real widths. The peer's kernels are counted the same way, its maps as passes (`peer_count`)."""
    case, theirs = traffic.CASES[name], traffic.totals(limits()["peer_traffic"][name])
    ours = traffic.totals(traffic.our_count(case, T=128))
    for part, least in traffic.floor(case).items():
        assert least < ours[part] <= 0.6 * theirs[part], (part, ours[part] / theirs[part])


@pytest.mark.parametrize(("name", "forward", "backward"), [("flagship", 10_841, 24_077)])
def test_bytes_by_token_and_head_do_not_rise(name, forward, backward):
    count = traffic.totals(traffic.our_count(traffic.CASES[name], T=128))
    assert count["forward"] <= forward + 1
    assert count["backward"] <= backward + 1


@pytest.mark.parametrize(
    ("name", "most"), [("gated_deltanet", 3_376), ("nala_deltanet", 4_876), ("kda", 5_340)]
)
def test_bytes_without_gradients_do_not_rise(name, most):
    """S and the errors are neither stored nor read; training's forward takes 4,281, 6,033 and 7,585."""
    case = traffic.CASES[name]
    call = ours(case, 1, 128)
    with torch.no_grad(), traffic.counting() as found:
        call()
    assert "outputs" not in found.loads
    assert found.total / (128 * case.H) <= most + 1


def test_limits_are_recorded_for_cases_that_exist():
    assert LIMITS.exists()
    assert set(limits()["peer_traffic"]) == set(traffic.CASES)
    for table in (*limits()["limits"].values(), limits()["peer"]):
        assert all(job in CASES for jobs in table.values() for job in jobs)
