"""The recurrences against other definitions of them, their properties, and how they choose a backend.

`tests/kernels/test_rules.py` has the table of rules × executors × inputs.
"""

import importlib
import inspect
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import nalanda_kernels
import pytest
import torch
import torch.nn.functional as F
from op_inputs import DECAYS, KINDS, call, doubling_map, make, run, with_resets
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from nalanda import ops
from nalanda.model.call import Inputs
from nalanda.model.chunk import chunk_op
from nalanda.model.chunk_forward import Chunk
from nalanda.model.rwkv7 import STRONGEST
from nalanda.model.sequences import Sequences
from nalanda.testing import build

# Largest error relative to the largest entry of the same tensor.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2}
every_kind = pytest.mark.parametrize("kind", KINDS)
# Each op, each input, and each shape of a decay occurs among these.
some_kinds = pytest.mark.parametrize("kind", ["gated_linear", "vector_delta", "gdn2_delta"])
every_decay = pytest.mark.parametrize("kind", DECAYS)


def assert_same(results, expected, dtype=torch.float64, tolerance=None):
    assert results.keys() == expected.keys()
    for name, right in expected.items():
        error = (results[name].double() - right).abs().max() / right.abs().max().clamp(min=1e-300)
        assert error <= (tolerance or TOLERANCE[dtype]), f"{name} is off by {error:.1e}"


def test_reference_is_the_recurrence():
    x = {
        name: t[0, :, 0] if t.ndim > 2 and name != "initial_state" else t
        for name, t in make(1, 5).items()
    }
    state, outputs = x["initial_state"][0, 0], []
    for q, k, v, beta, g in zip(x["q"], x["k"], x["v"], x["beta"], x["g"], strict=True):
        state = g.exp() * (
            torch.eye(8, dtype=torch.float64) - beta * k.outer(k)
        ) @ state + beta * k.outer(v)
        outputs.append(8**-0.5 * q @ state)
    results = run(make(1, 5), "reference")
    torch.testing.assert_close(results["o"][0, :, 0], torch.stack(outputs))
    torch.testing.assert_close(results["state"][0, 0], state)


def against_peer(mode, names, peer, dtype=torch.float32, **sizes):
    """Holds the op, and all gradients of `names`, to a reference of flash-linear-attention's in fp32."""
    kind = "vector_gdn2_delta" if "erase" in names else "vector_delta"
    inputs = {
        n: x for n, x in make(2, 70, kind=kind, **sizes).items() if n in (*names, "initial_state")
    }
    if "beta" not in names:
        inputs["beta"] = torch.ones(*inputs["v"].shape[:3], dtype=torch.float64)

    def theirs(mode, output_final_state, **inputs):
        given = [inputs[name] for name in names]
        return peer(*given, initial_state=inputs["initial_state"].float(), output_final_state=True)

    kept = ("o", "state", *names)
    ours, theirs = run(inputs, mode), run(inputs, mode, dtype, function=theirs)
    assert_same({n: theirs[n] for n in kept}, {n: ours[n] for n in kept}, dtype)


every_mode = pytest.mark.parametrize("mode", ["chunk", "recurrent", "reference"])


@every_mode
def test_a_decay_per_channel_is_kda(mode):
    naive = pytest.importorskip("fla.ops.kda.naive")
    against_peer(mode, ("q", "k", "v", "g", "beta"), naive.naive_recurrent_kda, value_heads=4)


@every_mode
def test_a_decay_per_channel_is_that_of_transformers(mode):
    """Their two functions in torch have the scale of the op's default and read one head of keys for each of
    values."""
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    names = ("q", "k", "v", "g", "beta")
    for function in (theirs.chunk_kimi_delta_attention, theirs.recurrent_kimi_delta_attention):
        against_peer(mode, names, inspect.unwrap(function))


@every_mode
def test_erase_and_write_are_those_of_gated_deltanet_2(mode):
    naive = pytest.importorskip("fla.ops.gdn2.naive")
    against_peer(mode, ("q", "k", "v", "g", "erase", "write"), naive.naive_recurrent_gdn2)


@every_mode
def test_steps_between_tokens_are_deltaproduct(mode):
    """A token of n steps is n tokens of the op: the first decays, the last is read."""
    naive, n = pytest.importorskip("fla.ops.gated_delta_product.naive"), 3
    x = make(2, 30 * n)
    first, last = (x[name].unflatten(1, (-1, n)) for name in ("g", "q"))
    o, state = naive.naive_recurrent_gated_delta_product(
        *(last[:, :, -1], x["k"], x["v"], first[:, :, 0], x["beta"]),
        scale=8**-0.5,
        initial_state=x["initial_state"].float(),
        output_final_state=True,
        num_householder=n,
    )
    first[:, :, 1:] = 0
    ours, final = call(**x, mode=mode, output_final_state=True)
    assert_same({"o": o, "state": state}, {"o": ours[:, n - 1 :: n], "state": final}, torch.float32)


@every_mode
def test_two_steps_are_rwkv7(mode, monkeypatch):
    """The generalised delta rule Diag(w) + b a⊤: one step decays and erases, the next one writes."""
    naive = pytest.importorskip("fla.ops.generalized_delta_rule.dplr.naive")
    # Theirs computes in fp32: here in float64.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    layer = build("rwkv7", head_dim=8, expand_v=1.5).model.layers[0].mixer
    x = make(2, 70, k_dim=8, v_dim=12, kind="vector_delta")
    x = {name: x[name] for name in ("q", "k", "v", "g", "initial_state")}
    x |= {"a": torch.rand_like(x["k"]), "erased": F.normalize(torch.randn_like(x["k"]), dim=-1)}
    x["g"] = x["g"].clamp_min(STRONGEST)

    def ours(mode, output_final_state, q, k, v, g, a, erased, initial_state):
        keys, erase = torch.cat([a * erased, k], 2), (-g).exp() / a
        inputs = Inputs(q, keys, v, g=g, erase=erase)
        o, state = layer.mix(inputs, Sequences(), {"recurrent": initial_state})
        return o, state["recurrent"]

    def theirs(mode, output_final_state, q, k, v, g, a, erased, initial_state):
        tokens = (y.transpose(1, 2) for y in (q * 8**0.5, k, v, -erased, a * erased, g))
        o, state = naive.dplr_recurrence(*tokens, initial_state=initial_state)
        return o.transpose(1, 2), state

    right = run(x, mode, function=theirs)
    in_torch = ops._run_in_torch
    monkeypatch.setattr(ops, "_run_in_torch", lambda c, o: in_torch(c, o._replace(mode=mode)))
    assert_same(run(x, mode, function=ours), right)


@every_mode
@pytest.mark.parametrize("strongest", [2.0, 20.0])
def test_a_step_that_holds_the_decay_is_comba(mode, strongest, monkeypatch):
    """Their form by chunks reads before the decay; the one by token reads behind it, so it is another rule."""
    naive = pytest.importorskip("fla.ops.comba.naive")
    # Theirs computes in fp32: here in float64.
    wide = {"float": torch.float64, "float32": torch.float64}
    monkeypatch.setattr(naive, "torch", types.SimpleNamespace(**vars(torch) | wide))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    layer = build("comba", head_dim=8, num_heads=2).model.layers[0].mixer
    layer.feature_map = layer.correction = None  # those of a layer are in test_mixers.py
    x = make(2, 70, v_dim=12)
    x |= {"beta": x["beta"] / 2, "g": -strongest * torch.rand_like(x["g"]) ** 4}

    def ours(mode, output_final_state, initial_state, **tokens):
        o, state = layer.mix(Inputs(**tokens), Sequences(), {"recurrent": initial_state})
        return o, state["recurrent"]

    def of_fla(function):
        def theirs(mode, output_final_state, q, k, v, beta, g, initial_state):
            q, k = ops.l2norm(q), ops.l2norm(k)
            tokens = {"q": q, "k": k, "v": v, "p": k, "g": g, "beta": beta}
            return function(**tokens, initial_state=initial_state, output_final_state=True)

        return theirs

    right = run(x, mode, function=of_fla(naive.naive_chunk_comba))
    behind = run(x, mode, function=of_fla(naive.naive_recurrent_comba))
    in_torch = ops._run_in_torch
    monkeypatch.setattr(ops, "_run_in_torch", lambda c, o: in_torch(c, o._replace(mode=mode)))
    found = run(x, mode, function=ours)
    assert_same(found, right)
    assert (found["o"] - behind["o"]).abs().max() > 0.02 * behind["o"].abs().max()


@pytest.mark.parametrize("kind", ["linear", "gated_linear", "vector_linear"])
def test_linear_attention_is_the_masked_quadratic_form(kind):
    x = make(2, 9, kind=kind, value_heads=4, initial=False)
    q, k = (x[name].repeat_interleave(2, 2) for name in ("q", "k"))  # each head serves two of v
    g = torch.zeros_like(k) if x["g"] is None else x["g"].view(*x["v"].shape[:3], -1).expand_as(k)
    gamma = g.cumsum(1)
    decay = (gamma[:, :, None] - gamma[:, None]).exp()  # [B, T, T, H, K]
    scores = torch.einsum("bihk,bijhk,bjhk->bhij", q, decay, k).tril()
    o = torch.einsum("bhij,bjhv->bihv", scores, x["v"]) / 8**0.5
    torch.testing.assert_close(run(x, "reference")["o"], o)


@pytest.mark.parametrize("kind", ["gated_delta", "vector_linear", "vector_gdn2_delta"])
def test_any_chunk_size_gives_the_same(kind):
    # Wide enough for whole chunks of 128 on a CPU.
    inputs = make(1, 137, kind=kind, k_dim=12, v_dim=250)
    expected = run(inputs, "reference")
    for chunk_size in (1, 8, 64, 128):
        assert_same(run(inputs, "chunk", chunk_size=chunk_size), expected)


def test_strong_decays_leave_nothing_below_the_normal_numbers():
    """A CPU multiplies such numbers many times slower."""
    q, k = (torch.rand(2, 64, 8) for _ in range(2))
    chunk = Chunk(q, k, torch.rand(2, 64), torch.full((2, 64), -5.0), None, "auto")
    for x in (chunk.qk, chunk.kk, chunk.q_in, chunk.k_out):
        assert not ((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any()


@every_decay
def test_a_reset_begins_a_sequence(kind):
    inputs, bounds = make(1, 130, kind=kind, sequences=1), [0, 20, 64, 65, 130]
    inputs["g"][:, bounds[1:-1]] = -torch.inf
    o, state = call(**inputs, output_final_state=True)
    start = F.pad(inputs.pop("initial_state"), (0, 0) * 3 + (0, 3))
    separate, states = call(
        **inputs, initial_state=start, output_final_state=True, cu_seqlens=torch.tensor(bounds)
    )
    torch.testing.assert_close(o, separate)
    torch.testing.assert_close(state, states[-1:])


@pytest.mark.parametrize(
    ("kind", "resets"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in DECAYS)]
)
def test_a_prefix_does_not_see_what_follows(kind, resets):
    """Outputs of a prefix, and their gradients, are those of the prefix alone."""
    inputs, cut = make(1, 130, kind=kind), 77
    if resets:
        inputs = with_resets(inputs, -torch.inf)

    def prefix(length):
        leaves = {
            name: (x if name == "initial_state" else x[:, :length]).clone().requires_grad_()
            for name, x in inputs.items()
            if x is not None
        }
        o = call(**leaves)[0][:, :cut]
        o.square().sum().backward()
        return {"o": o.detach()} | {name: x.grad for name, x in leaves.items()}

    whole, alone = prefix(130), prefix(cut)
    assert all((x[:, cut:] == 0).all() for name, x in whole.items() if name != "initial_state")
    assert_same({n: x[:, :cut] if n != "initial_state" else x for n, x in whole.items()}, alone)


@pytest.mark.parametrize("packed", [False, True])
@every_kind
def test_a_sequence_does_not_see_the_other(packed, kind):
    inputs = make(2, 100, kind=kind, initial=False)
    inputs["v"][0, 50:] = torch.nan  # neither the other row, nor this row's past
    if packed:
        inputs = {name: None if x is None else x.flatten(0, 1)[None] for name, x in inputs.items()}
    o, _ = call(**inputs, cu_seqlens=torch.tensor([0, 100, 200]) if packed else None, chunk_size=2)
    o = o.view(2, 100, *o.shape[2:])
    assert o[1].isfinite().all()
    assert o[0, :50].isfinite().all()
    assert o[0, 50:].isnan().all()


def test_initial_state_is_left_alone():
    inputs = make(2, 70)
    before = inputs["initial_state"].clone()
    for mode in ("chunk", "recurrent", "reference"):
        ops.delta_rule(**inputs, mode=mode)
        assert torch.equal(inputs["initial_state"], before)


MODES = [("chunk", "chunk"), ("chunk", "recurrent"), ("recurrent", "chunk")]


@pytest.mark.parametrize(
    ("kind", "split", "modes"),
    [
        # Each pair of two of the three.
        (kind, split, MODES[(i + j) % 3])
        for i, kind in enumerate(["gated_delta", "vector_linear", "vector_gdn2_delta"])
        for j, split in enumerate([1, 16, 63, 64, 65, 128])
    ],
)
def test_state_carries_over(kind, split, modes):
    inputs = make(2, 129, kind=kind)
    whole, last = call(**inputs, output_final_state=True)
    state, parts = inputs["initial_state"], []
    for mode, piece in zip(modes, (slice(0, split), slice(split, None)), strict=True):
        some = {n: x[:, piece] for n, x in inputs.items() if x is not None and n != "initial_state"}
        o, state = call(**some, initial_state=state, output_final_state=True, mode=mode)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["chunk", "recurrent", "reference"])
@pytest.mark.parametrize("kind", ["gated_delta", "vector_linear", "vector_gdn2_delta"])
def test_half_precision_inputs_and_fp32_inside(dtype, mode, kind):
    inputs = {name: x.to(dtype) for name, x in make(2, 130, kind=kind).items() if x is not None}
    inputs["initial_state"] = inputs["initial_state"].float()
    results = run(inputs, mode, dtype)
    assert results["o"].dtype == results["q"].dtype == results["g"].dtype == dtype
    assert results["state"].dtype == results["initial_state"].dtype == torch.float32
    exact = run({name: x.double() for name, x in inputs.items()}, "reference")
    # Only results in half precision are rounded: o and the gradients, not the state.
    assert (results["state"] - exact["state"]).abs().max() < 2e-5 * exact["state"].abs().max()
    assert_same(results, exact, torch.bfloat16)
    assert (results["o"] - exact["o"]).abs().max() < torch.finfo(dtype).eps * exact["o"].abs().max()


@every_kind
def test_autocast_does_not_reach_inside(kind):
    inputs = {name: x.float() for name, x in make(1, 70, kind=kind).items() if x is not None}
    expected = run(inputs, "chunk", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = run(inputs, "chunk", torch.float32)
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@every_kind
def test_maps_computed_again_in_the_backward_give_the_same(kind, monkeypatch):
    """As on a GPU, where the intermediates of maps are not kept."""
    inputs = make(1, 65, kind=kind, initial=False)
    wide = ("g",) * kind.startswith("vector") + ("erase",) * ("gdn2" in kind)
    inputs |= {name: inputs[name].repeat(1, 1, 1, 2) for name in wide}
    options = {"feature_map": doubling_map, "qk_norm": "l2"}
    expected, calls = run(inputs, "chunk", **options), []

    def counted(q, k):
        calls.append(1)
        return doubling_map(q, k)

    monkeypatch.setattr(ops, "_scarce_memory", lambda x: True)
    results = run(inputs, "chunk", **options | {"feature_map": counted})
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert len(calls) == 2
    calls.clear()
    with torch.no_grad():
        call(**inputs, **options | {"feature_map": counted})
    assert len(calls) == 1


def test_map_and_norm_run_in_fp32_with_one_cast():
    seen = []

    def spy(q, k):
        seen.extend((q.dtype, k.dtype))
        return q * 1e6, k * 1e6  # squares leave the range of fp16

    inputs = {name: x.half() for name, x in make(1, 20, initial=False).items() if x is not None}
    o, _ = ops.delta_rule(**inputs, feature_map=spy, qk_norm="l2")
    assert seen == [torch.float32, torch.float32]
    assert o.isfinite().all()


def test_l2norm():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.l2norm, x)
    torch.testing.assert_close(
        ops.l2norm(x).norm(dim=-1), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0
    )
    zero = torch.zeros(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(ops.l2norm(zero).sum(), zero)
    assert ops.l2norm(zero).abs().max() == 0
    torch.testing.assert_close(slope, torch.full((2, 4), 1e3))


@every_kind
@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 90, 200)], ids=["dense", "packed"])
def test_kept_chunks_are_the_recomputed_ones(kind, bounds, monkeypatch):
    """Short batches keep the forward's chunks; long ones compute them again, a segment at a time."""
    order = importlib.import_module("nalanda.model.chunk_order")
    forward = importlib.import_module("nalanda.model.chunk_forward")
    inputs = make(1, 200, value_heads=4, kind=kind, sequences=bounds and len(bounds) - 1)
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    monkeypatch.setattr(order, "_CPU_TOKENS", 300)
    order._order.cache_clear()
    kept = run(inputs, "chunk", **options)
    monkeypatch.setattr(forward, "SAVED_TOKENS", 0)
    again = run(inputs, "chunk", **options)
    order._order.cache_clear()
    assert all(torch.equal(kept[name], x) for name, x in again.items())


class Live(TorchDispatchMode):
    """The storages that operators made, while the mode is on, and that are still in memory."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, made = (
            {
                x.untyped_storage()._cdata: x
                for x in tree_leaves(values)
                if isinstance(x, torch.Tensor)
            }
            for values in ((args, kwargs), result)
        )
        for key in made.keys() - given.keys():  # a view has the storage of an input
            storage = made[key].untyped_storage()
            self.storages[key] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes(self) -> int:
        return sum(size for weak, size in self.storages.values() if not weak.expired())


@every_kind
@pytest.mark.parametrize("checkpointed", [False, True])
def test_nothing_the_backward_needs_outlives_it(checkpointed, kind):
    """Nor the forward, where a checkpoint computes it again."""
    inputs = {
        name: x.requires_grad_() for name, x in make(1, 128, kind=kind).items() if x is not None
    }

    def loss_of(*tensors):
        return call(**dict(zip(inputs, tensors, strict=True)))[0].sum()

    with Live() as live:
        if checkpointed:
            loss = checkpoint(
                loss_of, *inputs.values(), use_reentrant=False, preserve_rng_state=False
            )
            assert live.bytes() == loss.nbytes
        else:
            loss = loss_of(*inputs.values())
            assert live.bytes() > 10 * loss.nbytes  # the graph holds what the backward reads
        torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        assert live.bytes() == loss.nbytes


@every_kind
def test_hooks_of_saved_tensors_see_all_that_the_backward_needs(kind):
    """So offloading can move it, and the estimate of a run's memory counts it."""
    inputs = {
        name: x.requires_grad_() for name, x in make(1, 128, kind=kind).items() if x is not None
    }
    with Live() as live, torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
        loss = call(**inputs)[0].sum()
        assert live.bytes() == loss.nbytes


@pytest.mark.sampled
@every_kind
def test_gradcheck(kind):
    inputs = make(1, 5, heads=1, value_heads=2, k_dim=3, v_dim=2, kind=kind, sequences=2)
    inputs = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}

    def function(*tensors):
        cu_seqlens = torch.tensor([0, 2, 5])
        given = dict(zip(inputs, tensors, strict=True))
        return call(**given, chunk_size=2, cu_seqlens=cu_seqlens, output_final_state=True)

    assert torch.autograd.gradcheck(function, tuple(inputs.values()))


@pytest.mark.sampled
@every_kind
def test_gradients_through_one_output_only(kind):
    inputs = {
        name: x.requires_grad_() for name, x in make(1, 70, kind=kind).items() if x is not None
    }
    for pick in (0, 1):
        chunk, reference = (
            torch.autograd.grad(
                call(**inputs, mode=mode, output_final_state=True)[pick].sum(),
                list(inputs.values()),
                materialize_grads=True,
            )
            for mode in ("chunk", "reference")
        )
        for ours, theirs in zip(chunk, reference, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_the_final_state_is_returned_only_on_request():
    inputs = make(1, 20)
    for mode in ("chunk", "recurrent", "reference"):
        assert call(**inputs, mode=mode)[1] is None


def test_strided_inputs():
    inputs = make(2, 64)
    mixed = torch.cat((inputs["q"].flatten(2), inputs["k"].flatten(2)), -1)
    q, k = (x.unflatten(2, (2, 8)) for x in mixed.split(16, -1))  # views, as projections give them
    assert not q.is_contiguous()
    for length in (64, 63):
        cut = {name: x if name == "initial_state" else x[:, :length] for name, x in inputs.items()}
        views = cut | {"q": q[:, :length], "k": k[:, :length]}
        torch.testing.assert_close(
            ops.delta_rule(**views)[0], ops.delta_rule(**cut, mode="reference")[0]
        )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@some_kinds
def test_torch_compile_sees_one_operator(packed, kind):
    inputs = make(1, 130, kind=kind, sequences=3 if packed else 1)
    options = {"cu_seqlens": torch.tensor([0, 5, 40, 130]) if packed else None, "qk_norm": "l2"}
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    expected = run(inputs, "chunk", **options)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    assert_same(run(inputs, "chunk", function=compiled, **options), expected)
    assert sum("chunk_recurrence" in target for target in graphs[0]) == 1
    assert not any("bmm" in target for target in graphs[0])
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(run(inputs, "chunk", function=compiled, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "gated_delta"])
def test_one_graph_serves_all_lengths(kind):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for length in (130, 70, 200):
        inputs = make(2, length, kind=kind)
        assert_same(run(inputs, "chunk", function=compiled), run(inputs, "chunk"))
    assert counter.frame_count == 1


@pytest.mark.slow
@some_kinds
def test_operators_are_declared_as_they_behave(kind):
    inputs = {
        name: x if x is None else x.requires_grad_() for name, x in make(1, 70, kind=kind).items()
    }
    names = ("q", "k", "v", "beta", "g", "erase", "write", "initial_state")
    inputs = [inputs.get(name) for name in names]
    torch.library.opcheck(chunk_op, (*inputs, None, 1.0, 64, "auto", True))


def load_copy(monkeypatch, kernels):
    """The file as copied with a checkpoint: under another name, with other kernels or none."""
    monkeypatch.setitem(sys.modules, "nalanda_kernels", kernels)
    package = types.ModuleType("copied_with-a")
    package.__path__ = [str(Path(ops.__file__).parent)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    try:
        return importlib.import_module("copied_with-a.ops")
    finally:
        for name in [name for name in sys.modules if name.startswith("copied_with-a.")]:
            del sys.modules[name]


def test_works_without_kernels(monkeypatch, recwarn):
    module = load_copy(monkeypatch, None)
    inputs = make(1, 20)
    assert torch.equal(module.delta_rule(**inputs)[0], ops.delta_rule(**inputs)[0])
    assert not recwarn.list
    copied_op = module.run_chunkwise.__globals__["chunk_op"]
    assert copied_op._qualname != chunk_op._qualname  # copies have operators of their own


def fake_kernels(monkeypatch, serves=True, name="fake"):
    """A backend called `name` that adds the number of gates to v, or raises Unsupported."""

    def kernel(q, k, v, *gates, **options):
        if not serves:
            raise nalanda_kernels.Unsupported("its mood")
        return v + len(gates), None

    module = types.ModuleType("fake_kernels")
    module.kernel = kernel
    monkeypatch.setitem(sys.modules, "fake_kernels", module)
    entry = nalanda_kernels.Kernel("fake_kernels:kernel", devices=("cpu",), needs="torch")
    rows = {op: {name: entry} for op in ("delta_rule", "linear_attention")}
    monkeypatch.setattr(nalanda_kernels, "KERNELS", rows)


def test_a_registered_kernel_is_found(monkeypatch):
    fake_kernels(monkeypatch, name="triton")
    module = ops
    inputs = make(1, 20)
    for backend in ("auto", "triton"):
        assert torch.equal(module.delta_rule(**inputs, backend=backend)[0], inputs["v"] + 2)
        linear = {name: x for name, x in inputs.items() if name != "beta"}
        assert torch.equal(module.linear_attention(**linear, backend=backend)[0], inputs["v"] + 1)
    torch.testing.assert_close(
        module.delta_rule(**inputs, backend="torch")[0],
        ops.delta_rule(**inputs, mode="reference")[0],
    )


def test_the_choice_of_a_backend(monkeypatch):
    fake_kernels(monkeypatch)
    inputs = make(1, 20)
    fake, torch_path = inputs["v"] + 2, ops.delta_rule(**inputs, mode="recurrent")[0]

    def chosen():
        return torch.equal(ops.delta_rule(**inputs)[0], fake)

    assert chosen()
    with nalanda_kernels.use_backend("torch"):
        assert not chosen()
        torch.testing.assert_close(ops.delta_rule(**inputs)[0], torch_path)
        with nalanda_kernels.use_backend("auto"):
            assert chosen()
        assert torch.equal(
            ops.delta_rule(**inputs, backend="fake")[0], fake
        )  # the argument overrides all
    with (
        nalanda_kernels.use_backend("triton"),
        pytest.raises(ValueError, match="choose one of auto, torch, fake"),
    ):
        ops.delta_rule(**inputs)
    assert chosen()


def test_the_environment_names_a_backend():
    program = (
        "import nalanda_kernels; print(nalanda_kernels.candidates('delta_rule', 'auto', 'cuda'))"
    )
    environment = {**os.environ, "NALANDA_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


def test_an_unknown_backend_is_refused_where_it_was_named(monkeypatch):
    with pytest.raises(
        ValueError, match=r"^backend='bogus': no delta_rule for cpu; choose one of auto"
    ):
        nalanda_kernels.candidates("delta_rule", "bogus", "cpu")
    monkeypatch.setattr(
        nalanda_kernels, "_chosen", ["bogus"]
    )  # as the environment sets it at the start
    with pytest.raises(ValueError, match=r"^NALANDA_BACKEND='bogus': no delta_rule"):
        nalanda_kernels.candidates("delta_rule", "auto", "cpu")


def test_a_backend_that_cannot_says_why_once_and_the_next_one_serves(monkeypatch):
    fake_kernels(monkeypatch, serves=False)
    inputs = make(1, 20)
    with pytest.warns(
        UserWarning, match="delta_rule: fake cannot serve its mood; trying the next backend"
    ):
        o, _ = ops.delta_rule(**inputs)
    torch.testing.assert_close(o, ops.delta_rule(**inputs, mode="recurrent")[0])
    with warnings.catch_warnings(action="error"):
        assert torch.equal(ops.delta_rule(**inputs, backend="fake")[0], o)


def test_kernels_of_another_api_are_refused_once(monkeypatch):
    with pytest.warns(UserWarning, match="API 7"):
        module = load_copy(monkeypatch, types.SimpleNamespace(API=7))
    with warnings.catch_warnings(action="error"):
        module.delta_rule(**make(1, 20))
    with pytest.raises(ValueError, match=r"choose one of auto, torch$"):
        module.delta_rule(**make(1, 20), backend="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 20, 2, 7)}, "both must be"),
        ({"v": torch.zeros(2, 19, 2, 6)}, "v: .* must be"),
        ({"v": torch.zeros(2, 20, 3, 6)}, "must be a multiple"),
        ({"beta": torch.zeros(2, 20, 2, 1)}, "beta: .* must be"),
        ({"g": torch.zeros(2, 20, 1)}, "g: .* must be"),
        ({"initial_state": torch.zeros(1, 2, 8, 6)}, "initial_state: .* must be"),
        ({"initial_state": torch.zeros(2, 2, 9, 6)}, "K = 9; q and k have 8"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "B = 1"),
        ({"cu_seqlens": torch.tensor([0.0, 20.0])}, "integers"),
        ({"chunk_size": 48}, "power of two"),
        ({"chunk_size": 0}, "power of two"),
        ({"mode": "parallel"}, "mode=.* must be"),
        ({"qk_norm": "l1"}, "qk_norm=.* must be"),
        ({"backend": "cuda"}, "choose one of auto, torch"),
        ({"beta": None, "g": torch.zeros(2, 20, 2, 7)}, "g: 7 key channels"),
        ({"beta": None, "g": torch.zeros(2, 20)}, r"\[B, T, HV\] or \[B, T, HV, K\]"),
        ({"g": torch.zeros(2, 20, 2, 7)}, "g: 7 key channels"),
        ({"erase": torch.zeros(2, 20, 2)}, r"erase: .* must be \[B, T, HV, K\]"),
        ({"erase": torch.zeros(2, 20, 2, 7)}, "erase: 7 key channels"),
        ({"write": torch.zeros(2, 20, 2, 8)}, r"write: .* must be \[B, T, HV, V\]"),
    ],
)
def test_bad_input_is_said_in_one_line(change, message):
    inputs = {name: x.float() for name, x in make(2, 20).items()}
    with pytest.raises(ValueError, match=message) as error:
        call(**(inputs | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bounds", [[0, 10, 19], [1, 20], [0, 12, 8, 20], [0, 21]])
@pytest.mark.parametrize("mode", ["chunk", "recurrent", "reference"])
def test_bad_bounds(bounds, mode):
    inputs = make(1, 20, initial=False)
    with pytest.raises(ValueError, match="cu_seqlens: does not rise from 0 to the 20 tokens"):
        ops.delta_rule(**inputs, cu_seqlens=torch.tensor(bounds), mode=mode)


def test_flops_are_those_of_the_products():
    # Per token and head at K = V = 128, C = 64: 3 products with the state, 5 within the chunk, the inverse.
    expected = 2 * (3 * 128**2 + 5 * 64 * 128 + 64**2 / 6)
    assert ops.delta_rule_flops(1, 128, 128, 64) == pytest.approx(expected)
    halved = expected - 2 * 64 * 128  # of two products with K, half each
    assert ops.delta_rule_flops(1, 128, 128, 64, channels=True) == pytest.approx(halved)
    assert ops.delta_rule_flops(8, 256, 128) > 8 * ops.delta_rule_flops(1, 128, 128)
    assert ops.linear_attention_flops(1, 128, 96, 64) == 2 * (2 * 128 * 96 + 64 * 128 + 64 * 96)
