"""What a model says about the implementations of its layers, held to those that run."""

import sys
import types

import nalanda_kernels
import pytest
import torch
from nalanda_kernels import Unsupported, watch
from nalanda_kernels.cpu import build as library
from tiny_models import build, ids

from nalanda.model import MIXERS, decoding, ops, program

GREEDY = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
HYBRID = {"mixer": ["gated_deltanet", "softmax", "gated_deltanet"], "num_hidden_layers": 3}


try:
    library.library()
except Unsupported as reason:
    pytest.skip(f"no C++ compiler: {reason}", allow_module_level=True)


def tiny(**options):
    return build(**{"eos_token_id": None} | options).float().eval()


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_token_is_computed_by_the_executor_that_is_named(mixer):
    model = tiny(mixer=mixer)
    [row] = model.executors()
    assert row.layers == tuple(range(len(model.model.layers)))
    assert (row.mixer, row.sequence) == (mixer, "torch")
    cache = model.generate(ids(1, 5), **GREEDY).past_key_values
    in_python = len(cache.decoder.in_python) > 0
    assert row.token == ("torch" if in_python else "C++ program")
    assert any("no C++ program" in reason for reason in row.reasons) == in_python


def test_layers_of_one_kind_are_one_line():
    attention, delta = None, None
    for row in tiny(**HYBRID).executors():
        delta = row if row.mixer == "gated_deltanet" else delta
        attention = row if row.mixer == "softmax" else attention
    assert delta.layers == (0, 2)
    assert attention.layers == (1,)
    assert str(delta).startswith(
        "layers 0, 2 gated_deltanet: sequences torch, a token C++ program;"
    )
    assert str(attention).startswith("layer 1 softmax: ")


@pytest.mark.parametrize("change", ["hook", "environment", "dtypes", "capture"])
def test_the_reason_against_a_program_is_said(change, monkeypatch):
    model = tiny(**HYBRID)
    reason = "the weights are sharded or quantized"
    if change == "hook":
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        reason = "model.layers.1.mlp has a hook or an adapter, or is compiled"
    elif change == "environment":
        monkeypatch.setenv(program.ENVIRONMENT, "0")
        reason = "decoding of whole tokens is turned off in this process"
    elif change == "capture":
        decoding.DecoderChoice.uncapturable[model] = reason
    else:
        model.model.layers[1].mlp.up_proj.bfloat16()
        reason = "weights in torch.bfloat16 beside torch.float32"
    for row in model.executors():
        assert row.token == {"softmax": "torch", "gated_deltanet": "cpu"}[row.mixer]
        assert row.reasons[-1] == f"no C++ program: {reason}"


@pytest.fixture
def two_backends(monkeypatch):
    """Of the delta rule: "first" refuses every call, "second" serves it."""

    def refuse(*inputs, **options):
        raise Unsupported("keys of this kind")

    def serve(*inputs, **options):
        return ops.delta_rule(*inputs, **options, backend="torch")

    module = types.ModuleType("two_backends")
    module.first, module.second = refuse, serve
    monkeypatch.setitem(sys.modules, "two_backends", module)
    rows = {
        name: nalanda_kernels.Kernel(f"two_backends:{name}", ("cpu",), "torch")
        for name in ("first", "second")
    }
    monkeypatch.setitem(nalanda_kernels.KERNELS, "delta_rule", rows)


@pytest.mark.filterwarnings("ignore:delta_rule")
def test_the_backend_that_serves_and_the_one_that_refuses_are_named(two_backends):
    row = tiny(mixer="deltanet").executors()[0]
    assert row.sequence == "second"
    assert row.reasons == ("delta_rule: first cannot serve keys of this kind",)


@pytest.mark.filterwarnings("ignore:delta_rule")
def test_a_watch_sees_what_happens_within_it(two_backends):
    q, k, v = torch.randn(3, 1, 4, 1, 2).unbind()
    beta = torch.rand(1, 4, 1)
    with watch() as outer, watch() as inner:
        ops.delta_rule(q, k, v, beta)
    ops.linear_attention(q, k, v)
    assert inner == outer
    found = [(x.op, x.backend, x.refusal) for x in outer]
    assert ("delta_rule", "first", "keys of this kind") in found
    assert ("delta_rule", "second", None) in found
    assert {op for op, *_ in found} == {"delta_rule"}
