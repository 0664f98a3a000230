"""The one function for all recurrences, against the ops: outputs, states and every gradient, in float64."""

import pytest
import torch
from covering import covering
from op_inputs import LENGTHS, make, run, with_resets

from nalanda.model.feature_maps import build_feature_map
from nalanda.model.minimal import chunkwise

KINDS = (
    *("delta", "gated_delta", "linear", "gated_linear", "vector_linear", "vector_delta"),
    *("gdn2_delta", "gated_gdn2_delta", "vector_gdn2_delta"),
)


def minimal(q, k, v, beta=None, g=None, erase=None, write=None, **options):
    """`chunkwise` with the arguments of the ops: β and the gates as e and w."""
    features = (
        g.shape[-1] if g is not None and g.ndim == 4 else options.pop("features", k.shape[-1])
    )
    by_channel = (*v.shape[:3], features)
    if g is None:
        g = v.new_zeros(by_channel)
    elif g.ndim == 3:
        g = g[..., None].expand(by_channel)

    e, w = v.new_zeros(by_channel), torch.ones_like(v)
    if beta is not None:
        e = beta[..., None] * (v.new_ones(by_channel) if erase is None else erase)
        w = beta[..., None] * (torch.ones_like(v) if write is None else write)

    bounds = options.pop("cu_seqlens", None)
    return chunkwise(
        *(q, k, v, g, e, w),
        state=options.pop("initial_state", None),
        bounds=None if bounds is None else bounds.tolist(),
        feature_map=options.pop("feature_map", None),
        qk_norm=options.pop("qk_norm", None) == "l2",
        scale=options.pop("scale", None),
        chunk_size=options.pop("chunk_size", 64),
    )


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
