"""Inputs of the ops, and a call that returns outputs, states and gradients."""

import functools
import itertools

import torch
import torch.nn.functional as F

from nalanda import ops

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


RESETS = (-1e3, -1e4, -1e8, -torch.inf)


def with_resets(inputs, *strengths):
    """Puts these decays among ordinary ones: alone, adjacent, and at both ends of chunks."""
    for t, g in zip((5, 29, 33, 34, 63, 64, 90), itertools.cycle(strengths)):
        inputs["g"][:, t] = g
    return {name: x if x is None else x.float().double() for name, x in inputs.items()}
