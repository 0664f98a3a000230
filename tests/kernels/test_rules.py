"""The table of rules × executors: sequences with every gradient, and tokens one by one, against `minimal.py`."""

from kernel_device import DEVICE  # isort: skip  (before any kernel)

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels import KERNELS, Unsupported
from nalanda_kernels.cpu import build as library
from op_inputs import KINDS, LENGTHS, ROWS, call, cases, errors, hold, make, minimal, run

from nalanda.model import one_token
from nalanda.model.rule import Rule

TOKEN = {"cpu": (torch.float32, 1e-5), "triton": (torch.float32, 1e-5)}
every_kind = pytest.mark.parametrize("kind", KINDS)


def on_device(**inputs):
    there = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    o, state = call(**there, backend="triton")
    return o.cpu(), state.cpu()


def near(found, expected, tolerance):
    [error] = errors({"": found}, {"": expected}).values()
    assert error <= tolerance, f"off by {error:.1e}"


# `test_kernels_chunk` has the other rows on Triton's kernels.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("executor", "row", "kind"),
    [
        *(("torch", *case) for case in cases()),
        *(
            (executor, *case)
            for executor in ("reference", "recurrent")
            for case in cases()
            if case[0] not in LENGTHS
        ),
        *(("triton", *case) for case in cases(["one_token"])),
    ],
)
def test_sequences(executor, row, kind):
    """Outputs, the last state and every gradient. Executors without chunks have shorter sequences."""
    sizes = {"length": 70, "heads": 1, "value_heads": 2, "k_dim": 12, "v_dim": 10}
    if executor == "triton":
        inputs, options = ROWS[row].make(kind, **sizes)
        hold(inputs, torch.float32, 3e-5, function=on_device, **options)
        return

    mode = executor
    if executor == "torch":
        mode, sizes = "chunk", sizes | {"length": 130, "v_dim": 120}  # for chunks of 64 on a CPU
    inputs, options = ROWS[row].make(kind, **sizes)
    hold(inputs, torch.float64, max(1e-11, ROWS[row].rough), mode, **options)
    if executor != "reference" or row == "resets":
        hold(inputs, torch.float32, ROWS[row].exact or 2e-5, mode, **options)


@every_kind
@pytest.mark.parametrize("executor", ["reference", "recurrent", "chunk", "triton"])
def test_nothing_but_empty_sequences(executor, kind):
    mode, function = ("chunk", on_device) if executor == "triton" else (executor, call)
    inputs = {
        n: x if x is None else x.float() for n, x in make(1, 0, kind=kind, sequences=3).items()
    }
    bounds = torch.zeros(4, dtype=torch.int64)
    results = run(inputs, mode, torch.float32, function=function, cu_seqlens=bounds)
    assert results["o"].shape == inputs["v"].shape
    assert torch.equal(results["state"], inputs["initial_state"])
    assert results["initial_state"].abs().sum() > 0  # the gradient passes through


def projections(kind, dtype, N=2, T=3, H=2, HV=4, K=12, V=10):
    """What a layer projects for T tokens of N sequences, in float64 rounded to `dtype`, their state, and the layer."""
    generator = torch.Generator().manual_seed(len(kind))

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()

    x = {
        "q": draw(N, T, H * K),
        "k": F.normalize(draw(N, T, H, K), dim=-1),
        "v": draw(N, T, HV * V),
    }
    x["k"] = x["k"].flatten(2).to(dtype).double()
    gates = "gdn2" in kind
    if kind.endswith("delta"):
        x["b"] = draw(N, T, HV * K if gates else HV)
    if gates:
        x["w"] = draw(N, T, HV * V)
    if kind.startswith(("gated", "vector")):
        channels = (K,) if kind.startswith("vector") else ()
        x["g"] = F.logsigmoid(draw(N, T, HV, *channels) + 1).to(dtype).double()
    delta = kind.endswith("delta")
    rule = Rule(
        write="delta" if delta else "add",
        beta_scale=1.0 if gates or not delta else 2.0,
        value_silu=False,
        norm=None,
    )
    layer = SimpleNamespace(rule=rule, num_heads=H, num_v_heads=HV, K=K, V=V)
    return x, draw(N, HV, K, V), layer


def expected_of(x, state, layer):
    """Outputs and the last state by `minimal`."""
    N, T = x["q"].shape[:2]
    heads = {"q": layer.num_heads, "k": layer.num_heads, "v": layer.num_v_heads}
    inputs = {name: x[name].view(N, T, heads[name], -1) for name in heads}
    if "b" in x:
        shares = layer.rule.beta_scale * x["b"].sigmoid()
        inputs["beta"] = shares if "w" not in x else torch.ones(N, T, layer.num_v_heads).double()
        if "w" in x:
            inputs["erase"] = shares.view(N, T, layer.num_v_heads, -1)
            inputs["write"] = x["w"].sigmoid().view(N, T, layer.num_v_heads, -1)
    return minimal(**inputs, g=x.get("g"), initial_state=state)


@pytest.mark.sampled
@every_kind
@pytest.mark.parametrize("executor", TOKEN)
def test_tokens(kind, executor):
    dtype, tolerance = TOKEN[executor]
    if executor == "cpu":
        try:
            library.library()
        except Unsupported as reason:
            pytest.skip(f"no C++ compiler: {reason}")

    x, state, layer = projections(kind, dtype)
    expected, last = expected_of(x, state, layer)
    device = DEVICE if executor == "triton" else "cpu"
    state, outputs = {"recurrent": state.to(device, dtype)}, []
    for t in range(x["q"].shape[1]):
        now = {name: y[:, t : t + 1].to(device, dtype).contiguous() for name, y in x.items()}
        step = KERNELS["step"][executor].load()
        o, state = step(lambda now=now: now, state, **one_token.step_fields(layer, dtype))
        outputs.append(o.cpu())
    near(torch.cat(outputs, 1), expected, tolerance)
    near(state["recurrent"].cpu(), last, tolerance)


def test_a_reset_costs_no_digits_behind_it():
    """The kernel's cumulative decay is in fp64: in fp32 the weak decays behind a strong one lose digits."""
    inputs = make(1, 40, kind="gated_linear", heads=1, value_heads=1, k_dim=4, v_dim=4)
    inputs["g"][:, 5] = -100.0

    def outputs(*given, **options):
        return {"o": run(*given, **options)["o"]}

    hold(inputs, torch.float32, 1e-6, function=on_device, run=outputs)
