"""The one function for all recurrences, against the ops: outputs, states and every gradient, in float64."""

import pytest
import torch
from covering import covering
from op_inputs import KINDS, LENGTHS, make, minimal, run, with_resets

from nalanda.model.feature_maps import build_feature_map


def assert_same(inputs, mode="chunk", features=None, **options):
    def function(mode, output_final_state, **tensors):
        extra = {} if features is None else {"features": features}
        return minimal(**tensors, **extra, **options)

    ours, ops = run(inputs, mode, function=function), run(inputs, mode, **options)
    assert ours.keys() == ops.keys()
    for name, expected in ops.items():
        error = (ours[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
        assert error <= 1e-11, f"{name} is off by {error:.1e}"


@covering(
    strength=1, times=2, kind=KINDS, value_heads=(2, 4), initial=(True, False), length=LENGTHS
)
def test_it_is_every_op(kind, value_heads, initial, length):
    inputs = make(2, length, value_heads=value_heads, kind=kind, initial=initial)
    assert_same(inputs)
    if length < 100:
        assert_same(inputs, "reference")


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_are_apart(kind):
    bounds = torch.tensor([0, 1, 40, 40, 113, 150])
    assert_same(make(1, 150, kind=kind, sequences=5), cu_seqlens=bounds)


@pytest.mark.parametrize("name", ["silu", "nala", "elu1"])
@pytest.mark.parametrize("qk_norm", [None, "l2"])
def test_maps_and_norms(name, qk_norm):
    feature_map = build_feature_map(name, num_heads=2, head_dim=8).double()
    inputs = make(2, 67, kind="gated_delta", initial=False)
    features = feature_map(inputs["q"], inputs["k"])[0].shape[-1]
    assert_same(inputs, features=features, feature_map=feature_map, qk_norm=qk_norm, scale=0.3)


def test_a_reset_forgets_all():
    inputs = with_resets(make(2, 127, kind="vector_delta"), -1e3, -torch.inf)
    function = run(inputs, "chunk", function=lambda mode, output_final_state, **x: minimal(**x))
    for name in ("o", "state", "q", "k", "v", "beta"):
        torch.testing.assert_close(function[name], run(inputs, "chunk")[name], rtol=0, atol=1e-10)
