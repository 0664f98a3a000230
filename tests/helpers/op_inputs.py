"""Inputs of the ops, and a call that returns outputs, states and gradients."""

import functools
import itertools

import torch
import torch.nn.functional as F

from nalanda import ops
from nalanda.model.minimal import chunkwise

KINDS = (
    *("delta", "gated_delta", "linear", "gated_linear", "vector_linear", "vector_delta"),
    *("gdn2_delta", "gated_gdn2_delta", "vector_gdn2_delta"),
)
"""Of `make`: every rule of the recurrences."""

LENGTHS = (1, 15, 63, 64, 65, 127, 200)


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


RESETS = (-1e3, -1e4, -1e8, -torch.inf)


def with_resets(inputs, *strengths):
    """Puts these decays among ordinary ones: alone, adjacent, and at both ends of chunks."""
    for t, g in zip((5, 29, 33, 34, 63, 64, 90), itertools.cycle(strengths)):
        inputs["g"][:, t] = g
    return {name: x if x is None else x.float().double() for name, x in inputs.items()}
