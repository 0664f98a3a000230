"""The table of rules × executors: sequences with every gradient, and tokens one by one, against `minimal.py`."""

from kernel_device import DEVICE  # isort: skip  (before any kernel)
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels import KERNELS, Unsupported
from nalanda_kernels.cpu import build as library
from op_inputs import KINDS, call, make, minimal, run

from nalanda.model import one_token

SEQUENCE = {
    "reference": ("reference", "torch", torch.float64, 1e-10),
    "recurrent": ("recurrent", "torch", torch.float64, 1e-10),
    "torch": ("chunk", "torch", torch.float64, 1e-10),
    "triton": ("chunk", "triton", torch.float32, 3e-5),
}
"""Executors: mode, backend, dtype, and the largest error as a share of a tensor's largest entry."""
TOKEN = {
    "torch": (torch.float64, 1e-12),
    "cpu": (torch.float32, 1e-5),
    "triton": (torch.float32, 1e-5),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def near(found, expected, tolerance):
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
    assert error <= tolerance, f"off by {float(error):.1e}"


def on_device(backend, **inputs):
    there = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    o, state = call(**there, backend=backend)
    return o.cpu(), state.cpu()


@every_kind
@pytest.mark.parametrize(
    ("executor", "length"),
    [
        *(
            (executor, length)
            for executor in SEQUENCE
            for length in (1, 67)
            if executor != "triton"
        ),
        ("triton", 1),
        pytest.param("triton", 67, marks=pytest.mark.slow),
    ],
)
def test_sequences(kind, executor, length):
    mode, backend, dtype, tolerance = SEQUENCE[executor]
    inputs = make(2, length, kind=kind, value_heads=4, k_dim=12, v_dim=10)
    rounded = {name: x if x is None else x.to(dtype).double() for name, x in inputs.items()}
    expected = run(rounded, mode, function=lambda mode, output_final_state, **x: minimal(**x))
    function = call if backend == "torch" else functools.partial(on_device, backend)
    with warnings.catch_warnings(action="error"):  # such as the one that another backend serves
        found = run(inputs, mode, dtype, function=function)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        near(tensor, expected[name], tolerance)


def projections(kind, dtype, N=3, T=5, H=2, HV=4, K=12, V=10):
    """What a layer projects for T tokens of N sequences, in float64 rounded to `dtype`, and its rule of a token."""
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
    scale = 1.0 if gates or not delta else 2.0
    rule = {"delta": delta, "beta_scale": scale}
    sizes = {"key_dim": K, "value_dim": V, "num_heads": H, "num_v_heads": HV}
    return x, draw(N, HV, K, V), one_token.Token(dtype=dtype, **sizes, **rule)


def expected_of(x, state, token):
    """Outputs and the last state by `minimal`."""
    N, T = x["q"].shape[:2]
    heads = {"q": token.num_heads, "k": token.num_heads, "v": token.num_v_heads}
    inputs = {name: x[name].view(N, T, heads[name], -1) for name in heads}
    if "b" in x:
        shares = token.beta_scale * x["b"].sigmoid()
        inputs["beta"] = shares if "w" not in x else torch.ones(N, T, token.num_v_heads).double()
        if "w" in x:
            inputs["erase"] = shares.view(N, T, token.num_v_heads, -1)
            inputs["write"] = x["w"].sigmoid().view(N, T, token.num_v_heads, -1)
    return minimal(**inputs, g=x.get("g"), initial_state=state)


@every_kind
@pytest.mark.parametrize("executor", TOKEN)
def test_tokens(kind, executor):
    dtype, tolerance = TOKEN[executor]
    if executor == "cpu":
        try:
            library.library()
        except Unsupported as reason:
            pytest.skip(f"no C++ compiler: {reason}")

    x, state, token = projections(kind, dtype)
    expected, last = expected_of(x, state, token)
    device = DEVICE if executor == "triton" else "cpu"
    state, outputs = {"recurrent": state.to(device, dtype)}, []
    for t in range(x["q"].shape[1]):
        now = {name: y[:, t : t + 1].to(device, dtype).contiguous() for name, y in x.items()}
        if executor == "torch":
            o, state = one_token.step(lambda now=now: now, state, token)
        else:
            step = KERNELS["step"][executor].load()
            o, state = step(lambda now=now: now, state, **token._asdict())
        outputs.append(o.cpu())
    near(torch.cat(outputs, 1), expected, tolerance)
    near(state["recurrent"].cpu(), last, tolerance)


def test_a_reset_costs_no_digits_behind_it():
    """The kernel's cumulative decay is in fp64: in fp32 the weak decays behind a strong one lose digits."""
    inputs = make(1, 40, kind="gated_linear", heads=1, value_heads=1, k_dim=4, v_dim=4)
    inputs["g"][:, 5] = -100.0
    rounded = {name: x if x is None else x.float().double() for name, x in inputs.items()}
    expected = run(rounded, "reference")
    found = run(rounded, "chunk", torch.float32, function=functools.partial(on_device, "triton"))
    near(found["o"], expected["o"], 1e-6)
