"""The chunkwise kernels against the float64 reference: outputs, states, all gradients."""

from kernel_device import DEVICE, interpreted_only  # isort: skip  (before any kernel)
import itertools
import warnings

import nalanda_kernels
import pytest
import torch
from op_inputs import LENGTHS, RESETS, call, make, run, with_resets

from nalanda import ops
from nalanda.model.feature_maps import build_feature_map

pytestmark = pytest.mark.slow

every_kind = pytest.mark.parametrize("kind", ["delta", "gated_delta", "linear", "gated_linear"])
# Largest error relative to the largest entry of the same tensor.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def hold(inputs, dtype=torch.float32, tolerance=None, **options):
    """Runs the kernels on buffers full of NaN, and the reference on the same rounded inputs in float64."""
    rounded = {n: x if x is None else x.to(dtype).double() for n, x in inputs.items()}
    expected = run(rounded, "reference", **options)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        with warnings.catch_warnings(action="error"):  # such as the warning that another backend serves
            results = run(inputs, "chunk", dtype, function=on_device, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert results.keys() == expected.keys()
    for name, right in expected.items():
        error = (results[name].double() - right).abs().max() / right.abs().max().clamp(min=1e-300)
        assert error <= (tolerance or TOLERANCE[dtype]), f"{name} is off by {error:.1e}"


def on_device(feature_map=None, **inputs):
    """The kernels' result, moved to the CPU, where tests make and compare tensors."""
    there = {
        n: x.to(DEVICE) if isinstance(x, torch.Tensor) and n != "cu_seqlens" else x for n, x in inputs.items()
    }
    if isinstance(feature_map, torch.nn.Module):
        feature_map = feature_map.to(DEVICE)
    o, state = call(**there, feature_map=feature_map, backend="triton")
    return o.cpu(), state.cpu()


def one_head(length, kind, **sizes):
    return make(1, length, kind=kind, **{"heads": 1, "value_heads": 1, "k_dim": 12, "v_dim": 20} | sizes)


@pytest.mark.parametrize("length", LENGTHS)
@every_kind
def test_every_length(kind, length):
    hold(one_head(length, kind, initial=length % 2 == 1))  # with and without an initial state


@every_kind
def test_batches_and_groups_of_value_heads(kind):
    hold(make(2, 40, kind=kind, heads=2, value_heads=4, k_dim=16, v_dim=16))


@every_kind
def test_packed(kind):
    bounds = [0, 0, 1, 16, 16, 81, 110, 110]
    inputs = one_head(bounds[-1], kind, sequences=len(bounds) - 1)
    hold(inputs, cu_seqlens=torch.tensor(bounds))


@every_kind
def test_nothing_but_empty_sequences(kind):
    inputs = {n: x if x is None else x.float() for n, x in one_head(0, kind, sequences=3).items()}
    options = {"cu_seqlens": torch.zeros(4, dtype=torch.int64)}
    results = run(inputs, "chunk", torch.float32, function=on_device, **options)
    assert torch.equal(results["state"].float(), inputs["initial_state"])
    assert results["initial_state"].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gated_delta", "gated_linear"])
def test_half_precision(kind, dtype):
    hold(one_head(130, kind, k_dim=32, v_dim=32), dtype)


@pytest.mark.parametrize("kind", ["delta", "gated_delta"])
def test_identical_keys_with_beta_one(kind):
    inputs = one_head(100, kind)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["beta"] = torch.ones_like(inputs["beta"])
    if inputs["g"] is not None:
        inputs["g"] = inputs["g"] * 1e-3
    hold(inputs)
    hold(inputs, torch.bfloat16, tolerance=0.06)  # intermediates are bf16


def test_beta_two_reflects():
    inputs = one_head(100, "delta")
    inputs["beta"] = torch.full_like(inputs["beta"], 2.0)
    hold(inputs)


@pytest.mark.parametrize("where", [slice(None), slice(30, 40), slice(0, None, 7)], ids=["all", "some", "7th"])
@pytest.mark.parametrize("kind", ["gated_delta", "gated_linear"])
def test_strong_decay(kind, where):
    inputs = one_head(100, kind)
    inputs["g"][:, where] = -20.0
    hold(inputs)


@pytest.mark.parametrize("kind", ["gated_delta", "gated_linear"])
def test_resets_cost_no_digits(kind):
    hold(with_resets(one_head(100, kind), *RESETS), tolerance=2e-6)


@every_kind
def test_zero_rows(kind):
    inputs = one_head(70, kind)
    for name in ("q", "k", "v") + ("beta",) * kind.endswith("delta"):
        inputs[name][:, 10:30] = 0
    inputs["k"][:, 40] = 0
    hold(inputs, qk_norm="l2")


MAPS = [
    ("silu", {}), ("elu1", {}), ("nala", {}), ("nala_paper", {}), ("nala_released", {}), ("pola", {}),
    ("soft", {}), ("nala", {"angle": "raw", "power": 2.5, "power_norm": "raw"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), MAPS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("kind", ["gated_delta", "linear"])
def test_maps_and_norm_are_formed_inside(kind, name, options):
    if kind == "linear" and name in ("nala_paper", "nala_released"):
        pytest.skip("as under the delta rule")
    inputs = one_head(70, kind, initial=False)
    inputs["k"] = inputs["k"] * 3
    inputs["q"][:, 5], inputs["k"][:, 6] = 0, 0
    torch.manual_seed(0)
    feature_map = build_feature_map(name, num_heads=1, head_dim=12, **options)
    for parameter, value in getattr(feature_map, "initial", dict)().items():
        getattr(feature_map, parameter).data.copy_(value)
    hold(inputs, feature_map=feature_map, qk_norm="l2" if kind == "gated_delta" else None)
    if name == "nala" and not options:
        hold(inputs, torch.bfloat16, feature_map=feature_map, qk_norm="l2")


def test_a_map_of_ones_own_is_called():
    hold(one_head(40, "delta", initial=False), feature_map=lambda q, k: (q.cos(), k.sin()), qk_norm="l2")


def test_wide_heads():
    """More than 128 features are two halves; K not a power of two is masked; V has several blocks."""
    hold(one_head(20, "gated_delta", k_dim=260, v_dim=72))
    hold(one_head(20, "linear", k_dim=131, v_dim=8))  # odd: one tile
    silu = build_feature_map("silu", num_heads=1, head_dim=130)
    hold(one_head(20, "delta", k_dim=130, v_dim=300), feature_map=silu, qk_norm="l2")


@interpreted_only
@every_kind
def test_one_operator_for_the_compiler(kind):
    inputs = {n: x.float() for n, x in one_head(40, kind).items() if x is not None}
    expected = run(inputs, "chunk", torch.float32, function=on_device, qk_norm="l2")
    torch._dynamo.reset()
    compiled = torch.compile(on_device, backend="aot_eager", fullgraph=True)
    results = run(inputs, "chunk", torch.float32, function=compiled, qk_norm="l2")
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@interpreted_only
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.zeros(1, 20, 1, 600), "k": torch.zeros(1, 20, 1, 600)}, "600 features a head"),
        ({"q": torch.zeros(1, 20, 1, 12).double()}, "torch.float64 inputs"),
    ],
    ids=["features", "float64"],
)
def test_what_it_cannot_is_served_by_torch(change, reason):
    inputs = {n: x.float() for n, x in one_head(20, "delta", initial=False).items() if x is not None} | change
    nalanda_kernels._say_once.cache_clear()
    with pytest.warns(UserWarning, match=f"delta_rule: not by triton, {reason}"):
        o, _ = ops.delta_rule(**inputs, backend="triton")
    assert torch.equal(o, ops.delta_rule(**inputs, backend="torch")[0])


@interpreted_only
def test_a_state_of_the_wrong_width():
    inputs = {n: x.float() for n, x in one_head(20, "delta").items() if x is not None}
    feature_map = build_feature_map("nala", num_heads=1, head_dim=12)
    with pytest.raises(ValueError, match="initial_state: K = 12; q and k have 24 features"):
        ops.delta_rule(**inputs, feature_map=feature_map, backend="triton")


def test_chunks_of_packed_sequences():
    from nalanda_kernels.triton.common import chunks_of

    bounds = [0, 0, 1, 16, 16, 81, 110, 110]
    found = chunks_of((1, 110), torch.tensor(bounds), 16, torch.device("cpu"))
    expected = [
        (start, stop - start)
        for first, stop in itertools.pairwise(bounds)
        for start in range(first, stop, 16)
    ]
    assert list(zip(found.start.tolist(), found.count.tolist(), strict=True)) == expected
    assert found.first.tolist() == [0, 0, 1, 2, 2, 7, 9, 9]
    with pytest.raises(ValueError, match="cu_seqlens: does not rise from 0 to the 110 tokens"):
        chunks_of((1, 110), torch.tensor([0, 120]), 16, torch.device("cpu"))
