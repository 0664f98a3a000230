"""Whole models on the kernels: every mixer gives the torch path's logits, state and gradients."""

from kernel_device import interpreted_only  # isort: skip  (before any kernel)
import importlib.util
from pathlib import Path

import nalanda_kernels
import pytest
import torch
from tiny_models import build, ids

from nalanda import NalandaCache
from nalanda.model import MIXERS

pytestmark = interpreted_only
KERNELS = {  # the kernels that serve a mixer's tokens; no other kernel may serve them
    "deltanet": {"delta_rule", "short_convs"},
    "gated_deltanet": {"delta_rule", "short_convs"},
    "linear_attention": {"normalized_attention", "short_convs"},
    "nala": {"normalized_attention", "short_convs"},
    "mala": {"normalized_attention", "short_convs", "map_features"},  # map_features: in steps
    "pola": {"normalized_attention", "short_convs", "map_features"},
    "soft": {"linear_attention", "short_convs"},
    "retention": {"linear_attention"},
    "gla": set(),
    "softmax": set(),
    "diag_attention": {"block_attention"},
    "norm_attention": {"linear_attention", "map_features"},
}


@pytest.mark.filterwarnings("ignore:.*a decay for each key channel", "ignore:.*feature map Soft")
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer(mixer, monkeypatch):
    """Packed documents in training, then a prompt and a step of generation."""
    model = build(mixer, dtype=torch.float32, num_hidden_layers=1).train()
    tokens, served = ids(1, 20), set()
    serve = nalanda_kernels.serve

    def watched(op, *rest, **options):
        result = serve(op, *rest, **options)
        served.update({op} if result is not None else {})
        return result

    monkeypatch.setattr(nalanda_kernels, "serve", watched)

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(tokens, labels=tokens, position_ids=torch.cat([torch.arange(7), torch.arange(13)])[None])
        out.loss.backward()
        grads = [x.grad.clone() for x in model.parameters()]
        cache = NalandaCache(1)
        with torch.no_grad():
            prompt = model(tokens[:, :9], past_key_values=cache).logits
            step = model(tokens[:, 9:10], past_key_values=cache).logits
        return [out.loss.detach(), prompt, step, *cache.states[0].values(), *grads]

    expected = results()
    assert not served
    with nalanda_kernels.use_backend("triton"):
        found = results()
    assert served - {"step"} == KERNELS[mixer]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5 * max(1.0, float(b.abs().max())))


def test_few_frames_lie_between_an_op_and_its_launch():
    path = Path(__file__).parents[2] / "kernels" / "frames.py"
    spec = importlib.util.spec_from_file_location("frames", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, call in module.calls().items():
        found = module.frames(call)
        files = {frame.partition(":")[0] for frame in found}
        assert 0 < len(found) <= 8, (name, found)
        assert len(files) <= 4, (name, found)
