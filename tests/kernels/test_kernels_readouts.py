"""Kernels of readouts with denominators, in whole mixers, against the torch path in float64."""

from kernel_device import DEVICE, INTERPRETED  # isort: skip  (before any kernel)
import copy
import warnings

import nalanda_kernels
import pytest
import torch
from drawn import drawn
from nalanda_kernels.triton import recurrence

from nalanda import NalandaConfig
from nalanda.model.feature_maps import EPS, build_feature_map, opposite
from nalanda.model.mixers import build_mixer
from nalanda.model.ops import linear_attention
from nalanda.model.sequences import Sequences

pytestmark = pytest.mark.slow

MIXERS = {
    "linear_attention": {},
    "nala": {},
    "mala": {},
    "mala, inverse_t": {"mixer_options": {"scale": "inverse_t"}},
    "mala, literal": {"mixer_options": {"scale": "literal"}},
    "pola": {"num_heads": 2},
}
SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "num_heads": 1,
    "head_dim": 12,
    "expand_v": 20 / 12,
    "conv_size": 0,
}
# Largest error relative to the largest entry of the same tensor.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _poison():
    """Fills torch.empty with NaN and makes it an error if no kernel serves a call."""
    torch.use_deterministic_algorithms(True, warn_only=not INTERPRETED)
    with warnings.catch_warnings():
        if INTERPRETED:
            warnings.simplefilter("error")
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the readouts' op."""
    found, real = [], recurrence.normalized_attention

    def call(*inputs, **options):
        out = real(*inputs, **options)
        found.append(options)
        return out

    monkeypatch.setattr(recurrence, "normalized_attention", call)
    return found


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def build(name):
    config = NalandaConfig(**SIZES | MIXERS[name], mixer=name.split(",")[0])
    module = build_mixer(config.mixer, config, 0)
    torch.manual_seed(0)
    return drawn(module, 0.5).to(DEVICE)


def hold(mine, theirs, tolerance):
    assert mine.keys() == theirs.keys()
    for name, right in theirs.items():
        assert mine[name].shape == right.shape, name
        error = (mine[name].double() - right).abs().max() / right.abs().max().clamp(min=1e-300)
        assert error <= tolerance, f"{name} is off by {float(error):.1e}"


def results(function, backend, leaves):
    """Outputs by name, and the gradients of their sum under random weights, the same in every dtype."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    with nalanda_kernels.use_backend(backend):
        outputs = function(leaves)
        loss = sum(
            (o * draw(*o.shape, seed=i).to(o.dtype)).sum() for i, o in enumerate(outputs.values())
        )
        grads = torch.autograd.grad(loss, list(leaves.values()))
    return {n: o.detach() for n, o in outputs.items()} | {
        f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def check_mixer(name, B, T, cu=None, past=None, dtype=torch.float32):
    """y, the new state, and gradients of x, the parameters and the initial state."""
    module = build(name)
    module = module.to(dtype)
    wide = copy.deepcopy(module).double()
    leaves = {"x": draw(B, T, SIZES["hidden_size"]).to(dtype), **dict(module.named_parameters())}
    if past is not None:
        for i, (part, (shape, kind)) in enumerate(module.state_spec(T).items()):
            leaves[f"state {part}"] = draw(len(past), *shape, seed=i).abs().to(kind or dtype)

    def run(module):
        def function(leaves):
            state = {n.split()[1]: x for n, x in leaves.items() if n.startswith("state ")}
            parameters = {n: leaves[n] for n, _ in module.named_parameters()}
            arguments = (leaves["x"], Sequences(cu, past), state)
            y, new = torch.func.functional_call(module, parameters, arguments)
            return {"y": y} | {f"new {n}": x for n, x in sorted(new.items())}

        return function

    mine = results(run(module), "triton", leaves)
    theirs = results(run(wide), "torch", {n: x.double() for n, x in leaves.items()})
    for n in (n for n in mine if n in ("new recurrent", "new value_sum")):
        assert mine[n].dtype == torch.float32
    hold(mine, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("name", MIXERS)
def test_packed_sequences_with_initial_states(name, calls):
    """Sequences of two chunks and of one, one empty and one of a single token, all with an initial state."""
    cu, past = torch.tensor([0, 0, 33, 34, 50]), torch.tensor([3, 5, 0, 7])
    check_mixer(name, 1, 50, cu, past)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["linear_attention", "mala"])
def test_a_batch_from_nothing(name, calls):
    check_mixer(name, 2, 35)
    assert calls[0]["positions"].shape == (1, 35)  # one row for the whole batch


def test_a_batch_with_a_past(calls):
    check_mixer("mala", 2, 3, past=torch.tensor([2, 9]))
    assert calls[0]["positions"].shape == (2, 3)


@pytest.mark.parametrize("name", ["nala", "mala"])
def test_bf16(name, calls):
    check_mixer(name, 1, 70, torch.tensor([0, 3, 70]), dtype=torch.bfloat16)
    assert len(calls) == 1


def test_one_token_is_decoded_by_the_torch_path(calls):
    check_mixer("mala", 2, 1, past=torch.tensor([2, 9]))
    assert not calls


def composed(q, k, v, g, state, positions, cu, mirrored):
    """The mean's readout by a column of ones, over features."""
    if mirrored:
        q, k = torch.stack([q, opposite(q)], 3).flatten(2, 3), k.repeat_interleave(2, 2)
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o, new = linear_attention(
        q,
        k,
        v,
        g,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=cu,
        backend="torch",
    )
    return o[..., :-1] / (o[..., -1:] + EPS * (positions + 1)[..., None, None]), new


def check_op(
    H, HV, T, K=12, name="elu1", cu=None, mirrored=False, decay=True, zeros=False, function=None
):
    """The op itself, with a decay and a state, against that composition."""
    N = 1 if cu is None else len(cu) - 1
    positions = Sequences(cu).positions(T, torch.device(DEVICE))
    feature_map = None if name is None else build_feature_map(name, num_heads=H, head_dim=K)
    F = K if feature_map is None else feature_map.feature_dim
    leaves = {
        "q": draw(1, T, H, K),
        "k": draw(1, T, H, K, seed=1),
        "v": draw(1, T, HV, 20, seed=2),
        "g": -draw(1, T, HV, seed=3).abs() / 4,
        "state": draw(N, HV, F, 21, seed=4).abs(),
    }
    if name is None:  # q and k are features
        leaves |= {n: leaves[n].abs() for n in ("q", "k")}
    if zeros:
        leaves["state"].zero_()
        leaves["q"] *= 1e-6  # so small that ε matters
        leaves["q"][:, 5:9] = 0
        leaves["k"][:, :12] = -1
    if not decay:
        del leaves["g"]

    def kernel(x):
        o, state, _ = (function or recurrence.normalized_attention)(
            x["q"],
            x["k"],
            x["v"],
            x.get("g"),
            feature_map=feature_map,
            positions=positions,
            mirrored=mirrored,
            initial_state=x["state"],
            output_final_state=True,
            cu_seqlens=cu,
        )
        return {"o": o, "new": state}

    def torch_path(x):
        q, k = (x["q"], x["k"]) if feature_map is None else feature_map(x["q"], x["k"])
        o, state = composed(q, k, x["v"], x.get("g"), x["state"], positions, cu, mirrored)
        return {"o": o, "new": state}

    mine = results(kernel, "triton", leaves)
    hold(mine, results(torch_path, "torch", {n: x.double() for n, x in leaves.items()}), 1e-5)
    return mine


@pytest.mark.parametrize("name", ["elu1", "nala"])
def test_decay_and_groups_of_value_heads(name):
    check_op(2, 4, 45, name=name)


@pytest.mark.parametrize("name", [None, "elu1", "nala"])
def test_decay_of_mirrored_queries(name):
    check_op(1, 2, 45, name=name, mirrored=True)


def test_no_weight_at_all():
    """If every φ(q)·φ(k) is 0, o is 0 and gradients are finite: those of 0/ε."""
    mine = check_op(1, 1, 40, name="relu", zeros=True, decay=False)
    assert not mine["o"][:, :12].any()


def test_one_operator_for_the_compiler():
    torch._dynamo.reset()
    compiled = torch.compile(recurrence.normalized_attention, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        mine = check_op(1, 1, 40, function=compiled)
    plain = check_op(1, 1, 40)
    assert all(torch.equal(mine[n], plain[n]) for n in plain)


@pytest.mark.parametrize("magnitude", ["", "code"])
def test_what_the_compiler_is_told(magnitude):
    read = recurrence.Readout("mala" if magnitude else "mean", magnitude, 0.5)
    assert recurrence.Readout.parse(read.text()) == read
    stored = recurrence.Map("stored").text()
    inputs = [draw(1, 40, 1, n).abs().requires_grad_() for n in (12, 12, 20)]
    starts = [draw(1, 1, *n).requires_grad_() for n in ((12, 20), (12,), (20,))]
    starts[2] = starts[2] if magnitude else None
    positions = torch.arange(40, device=DEVICE)[None]
    gates = None, None, None
    check_operator(
        *inputs, *gates, *starts, positions, None, stored, read.text(), 1.0, True, False, False
    )


def check_operator(*arguments):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(recurrence._forward_op, arguments, test_utils=tests)


def test_what_the_compiler_is_told_of_gates_by_channel():
    read, stored = recurrence.Readout(), recurrence.Map("stored").text()
    q, k, v, g, erase = (draw(1, 20, 1, n).requires_grad_() for n in (12, 12, 20, 12, 12))
    beta, start = draw(1, 20, 1).requires_grad_(), draw(1, 1, 12, 20).requires_grad_()
    options = start, None, None, None, None, stored, read.text(), 1.0, True
    check_operator(q, k, v, beta, -g.abs(), erase, *options, False, False)
    check_operator(q, k, v, None, -g.abs(), None, *options, False, False)
    check_operator(*(x.detach() for x in (q, k, v, beta)), None, None, *options, False, True)
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in (q, k, v))
    check_operator(
        q, k, v, beta, None, None, *options, True, False
    )  # keeps more digits than it is given


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"v": torch.zeros(1, 4, 1, 20).double()}, {}, "float64 inputs"),
        ({"g": torch.zeros(1, 4, 1, 12)}, {}, "a decay for each key channel"),
        ({"g": torch.zeros(1, 4, 1)}, {"magnitude": "code"}, "a decay under a magnitude"),
    ],
    ids=["float64", "channels", "magnitude"],
)
def test_what_it_cannot(change, options, reason):
    inputs = {
        "q": torch.zeros(1, 4, 1, 12),
        "k": torch.zeros(1, 4, 1, 12),
        "v": torch.zeros(1, 4, 1, 20),
    }
    with pytest.raises(nalanda_kernels.Unsupported, match=reason):
        recurrence.normalized_attention(
            **inputs | change, positions=torch.arange(4)[None], **options
        )


def test_half_precision_is_computed_in_fp32():
    q, k, v = (draw(1, 20, 1, n).to(torch.float16) for n in (12, 12, 20))
    positions = torch.arange(20, device=DEVICE)[None]
    options = {
        "feature_map": build_feature_map("elu1", num_heads=1, head_dim=12),
        "positions": positions,
    }
    o, state, total = recurrence.normalized_attention(q, k, v, **options)
    assert o.dtype == torch.float32
    assert state is total is None
    assert torch.equal(
        o, recurrence.normalized_attention(q.float(), k.float(), v.float(), **options)[0]
    )
