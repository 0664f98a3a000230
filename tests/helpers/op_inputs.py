"""The table of inputs for every rule, and how an executor of the rules is held to `minimal.py`."""

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from nalanda import ops
from nalanda.model.minimal import chunkwise

KINDS = (
    *("delta", "gated_delta", "linear", "gated_linear", "vector_linear", "vector_delta"),
    *("gdn2_delta", "gated_gdn2_delta", "vector_gdn2_delta"),
)
"""Of `make`: every rule of the recurrences."""
DECAYS = tuple(kind for kind in KINDS if kind.startswith(("gated", "vector")))
DELTA = tuple(kind for kind in KINDS if kind.endswith("delta"))


def make(
    batch,
    length,
    *,
    kind="gated_delta",
    heads=2,
    value_heads=2,
    k_dim=8,
    v_dim=6,
    sequences=None,
    initial=True,
):
    """Inputs in float64; keys have unit length, as in the models. kind: delta or linear; gated_, with a decay
    per head; vector_, with one per key channel; gdn2_, with gates of what is erased and written."""
    generator = torch.Generator().manual_seed(length + 1000 * value_heads)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    channels = (k_dim,) if kind.startswith("vector") else ()
    inputs = {
        "q": normal(batch, length, heads, k_dim),
        "k": F.normalize(normal(batch, length, heads, k_dim), dim=-1),
        "v": normal(batch, length, value_heads, v_dim),
        "beta": normal(batch, length, value_heads).sigmoid() * 2
        if kind.endswith("delta")
        else None,
        "g": F.logsigmoid(normal(batch, length, value_heads, *channels) + 1)
        if kind.startswith(("gated", "vector"))
        else None,
        "initial_state": normal(sequences or batch, value_heads, k_dim, v_dim) if initial else None,
    }
    if "gdn2" in kind:
        inputs["erase"] = normal(batch, length, value_heads, k_dim).sigmoid() * 1.5
        inputs["write"] = normal(batch, length, value_heads, v_dim).sigmoid() * 2
    return inputs


def call(q, k, v, beta=None, g=None, **options):  # options: erase and write too
    op = ops.linear_attention if beta is None else functools.partial(ops.delta_rule, beta=beta)
    return op(q, k, v, g=g, **options)


def run(inputs, mode, dtype=torch.float64, function=call, **options):
    """Outputs, final state, and the gradients of a fixed random combination of both, by name."""
    inputs = {
        name: x.to(torch.promote_types(dtype, torch.float32) if name == "initial_state" else dtype)
        for name, x in inputs.items()
        if x is not None
    }
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o, state = function(**leaves, mode=mode, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state)]
    ((o * weights[0]).sum() + (state * weights[1]).sum()).backward()
    return {"o": o.detach(), "state": state.detach()} | {name: x.grad for name, x in leaves.items()}


def minimal(q, k, v, beta=None, g=None, erase=None, write=None, **options):
    """`chunkwise` with the arguments of the ops: β and the gates as e and w."""
    feature_map = options.pop("feature_map", None)
    with torch.no_grad():
        features = (k if feature_map is None else feature_map(q, k)[1]).shape[-1]

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
        feature_map=feature_map,
        qk_norm=options.pop("qk_norm", None) == "l2",
        scale=options.pop("scale", None),
    )


RESETS = (-1e3, -1e4, -1e8, -torch.inf)


def with_resets(inputs, *strengths):
    """Puts these decays among ordinary ones: alone, adjacent, and at both ends of chunks."""
    places = (t for t in (5, 29, 33, 34, 63, 64, 90) if t < inputs["g"].shape[1])
    for t, g in zip(places, itertools.cycle(strengths)):
        inputs["g"][:, t] = g
    return {name: x if x is None else x.float().double() for name, x in inputs.items()}


# ------------------------------------------------------------------------------------------- the table of inputs


@dataclass(frozen=True)
class Row:
    """Inputs of the rules `kinds`."""

    length: int | None = None
    """None: the executor's own, some chunks with an odd tail."""
    kinds: tuple[str, ...] = KINDS
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Those of `make`."""
    bounds: tuple[int, ...] | None = None
    """Of packed documents."""
    int32: bool = False
    """Whether the bounds are 32-bit integers."""
    change: Callable[[dict], dict | None] = lambda inputs: None
    """Changes the inputs, or returns others."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the call."""
    exact: float | None = None
    """The largest error in fp32, where it is not the executor's."""
    rough: float = 0.0
    """The largest error in float64, if `minimal.py` itself loses digits there."""

    def make(self, kind: str, length: int, **sizes) -> tuple[dict, dict]:
        """Inputs in float64, and the options of the call."""
        options = dict(self.options)
        sizes = {"batch": 1, "length": self.length or length} | sizes | self.sizes
        if self.bounds is not None:
            sizes |= {"length": self.bounds[-1], "sequences": len(self.bounds) - 1}
            options["cu_seqlens"] = torch.tensor(
                self.bounds, dtype=torch.int32 if self.int32 else torch.int64
            )
        inputs = make(kind=kind, **sizes)
        return self.change(inputs) or inputs, options


def decays(*where: slice):
    def change(inputs):
        for places in where:
            inputs["g"][:, places] = -20.0

    return change


def zero_rows(inputs):
    for name in ("q", "k", "v", "beta"):
        if inputs[name] is not None:
            inputs[name][:, 10:30] = 0
    inputs["k"][:, 40] = 0


def identical_keys(inputs):
    """One key that every token overwrites, under decays that forget little."""
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["beta"] = torch.ones_like(inputs["beta"])
    if inputs["g"] is not None:
        inputs["g"] = inputs["g"] * 1e-3


def reflections(inputs):
    inputs["beta"] = torch.full_like(inputs["beta"], 2.0)


def doubling_map(q, k):
    return tuple(torch.cat((x.cos() * x.abs(), x.sin() * x.abs()), -1) for x in (q, k))


def doubled(size: float):
    """Keys of this length, and the other inputs as wide as the features of `doubling_map`."""

    def change(inputs):
        inputs["k"] = inputs["k"] * size
        inputs["initial_state"] = inputs["initial_state"].repeat(1, 1, 2, 1)
        for name in ("g", "erase"):
            if inputs.get(name) is not None and inputs[name].ndim == 4:
                inputs[name] = inputs[name].repeat(1, 1, 1, 2)

    return change


GROUPS = {"batch": 2, "heads": 2, "value_heads": 4}
NOTHING = {"initial": False}
NORMED = {"feature_map": doubling_map, "qk_norm": "l2", "scale": 0.3}
ROWS = {
    "one_token": Row(1),
    "part_of_a_chunk": Row(15, sizes=NOTHING),
    "one_less": Row(63),
    "whole_chunks": Row(64, sizes=NOTHING),
    "one_more": Row(65),
    "groups": Row(sizes=GROUPS),
    "nothing_before": Row(sizes=GROUPS | NOTHING),
    "packed": Row(bounds=(0, 0, 1, 16, 16, 81, 110, 110)),
    "packed_groups": Row(
        bounds=(0, 1, 64, 64, 128, 193, 193), int32=True, sizes={"heads": 2, "value_heads": 4}
    ),
    "zero_rows": Row(change=zero_rows, options={"qk_norm": "l2"}),
    "strong_decays": Row(kinds=DECAYS, change=decays(slice(None)), rough=1e-6),
    "some_strong_decays": Row(kinds=DECAYS, change=decays(slice(30, 40), slice(60, 68))),
    "every_7th_decay_is_strong": Row(kinds=DECAYS, change=decays(slice(0, None, 7))),
    "resets": Row(kinds=DECAYS, change=lambda x: with_resets(x, *RESETS), exact=2e-6),
    "identical_keys": Row(kinds=("delta", "gated_delta", "vector_delta"), change=identical_keys),
    "reflections": Row(kinds=("delta",), change=reflections),
    "map": Row(change=doubled(0.5), options={"feature_map": doubling_map}),
    "map_and_norm": Row(change=doubled(3.0), options=NORMED),
}
"""Every kind of input. Chunks have 64 tokens, or 32 or 16 in some of Triton's kernels."""
LENGTHS = ("part_of_a_chunk", "one_less", "whole_chunks", "one_more", "packed_groups")
"""Rows that differ in their chunks alone."""


def cases(rows=tuple(ROWS), kinds=KINDS) -> list[tuple[str, str]]:
    """The names of rows and of the rules that these have."""
    return [(row, kind) for row in rows for kind in ROWS[row].kinds if kind in kinds]


def errors(found, expected) -> dict[str, float]:
    """The largest error of each tensor, as a share of its largest entry."""
    return {
        name: float((x.double() - expected[name]).abs().max())
        / max(float(expected[name].abs().max()), 1e-300)
        for name, x in found.items()
    }


def hold(inputs, dtype, tolerance, mode="chunk", function=call, run=run, **options):
    """Holds an executor, on buffers full of NaN, to `minimal.py` in float64 on the same rounded inputs.

    function: calls the executor. run: by default with every gradient. Returns the executor's results.
    """
    rounded = {name: x if x is None else x.to(dtype).double() for name, x in inputs.items()}

    def expected_of(mode, output_final_state, allow_neg_eigval=False, **tensors):
        return minimal(**tensors)

    expected = run(rounded, mode, torch.float64, function=expected_of, **options)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        assert torch.empty(1).isnan().all()
        with warnings.catch_warnings(action="error"):  # such as the one that another backend serves
            found = run(inputs, mode, dtype, function=function, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.keys() == expected.keys()
    wrong = {name: f"{x:.1e}" for name, x in errors(found, expected).items() if not x <= tolerance}
    assert not wrong, f"off by {wrong}"
    return found
