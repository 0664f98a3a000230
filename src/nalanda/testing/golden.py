"""Golden vectors: every rule and every feature map in float64, for ports to other languages and hardware.

    python -m nalanda.testing.golden golden.safetensors

docs/golden.md defines the tensors.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import save_file
from torch import Tensor

from nalanda.common.versions import versions
from nalanda.model import FEATURE_MAPS, ops
from nalanda.testing import build_map

B, T, H, HV, K, V = 2, 7, 2, 4, 4, 3
"""Rows, tokens, heads of q and k, heads of v, channels of keys, channels of values."""

SHAPES = {
    "beta": (B, T, HV),
    "g": (B, T, HV),
    "g_channel": (B, T, HV, K),
    "erase": (B, T, HV, K),
    "write": (B, T, HV, V),
}

RULES: dict[str, tuple[str, ...]] = {
    "linear_attention": (),
    "scalar_decay": ("g",),  # RetNet, Mamba 2, Mamba 3
    "gated_linear_attention": ("g_channel",),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("beta", "g"),
    "kimi_delta_attention": ("beta", "g_channel"),
    "comba": ("beta", "g", "erase"),
    "gated_delta_rule_2": ("beta", "g_channel", "erase", "write"),
    "rwkv7": ("beta", "g_channel", "erase"),
}
"""Inputs of each rule beside q, k, v and the state."""


def golden_vectors() -> dict[str, Tensor]:
    """Inputs, outputs, states and gradients by `rule/name` and `map/name`, all float64."""
    vectors: dict[str, Tensor] = {}
    for name in RULES:
        vectors |= {f"rules/{name}/{key}": x for key, x in rule_vectors(name)}
    for name in FEATURE_MAPS:
        vectors |= {f"maps/{name}/{key}": x for key, x in map_vectors(name)}
    return {
        name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in vectors.items()
    }


def rule_vectors(rule: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a rule."""
    draw = normal_numbers(list(RULES).index(rule))
    inputs = {"q": draw(B, T, H, K), "k": draw(B, T, H, K), "v": draw(B, T, HV, V)}
    for name in RULES[rule]:
        x = draw(*SHAPES[name])
        # A logarithm of a decay is at most 0; gates are between 0 and 1.
        gate = -torch.nn.functional.softplus(x) if name.startswith("g") else x.sigmoid()
        inputs[name.removesuffix("_channel")] = gate
    inputs["initial_state"] = draw(B, HV, K, V)
    if "beta" in inputs:
        inputs["k"] = ops.l2norm(inputs["k"])
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}

    op: Callable = ops.delta_rule if "beta" in inputs else ops.linear_attention
    o, state = op(**inputs, output_final_state=True, mode="reference")
    yield from inputs.items()
    yield from (("o", o), ("final_state", state))
    yield from gradient_vectors({"o": o, "final_state": state}, inputs, draw)


def map_vectors(name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a map with its parameters at their initial values."""
    draw = normal_numbers(100 + list(FEATURE_MAPS).index(name))
    feature_map = build_map(name, num_heads=H, head_dim=K).double()
    inputs = {"q": draw(B, T, H, K), "k": draw(B, T, H, K)}
    inputs = {key: x.detach().requires_grad_() for key, x in inputs.items()}

    outputs = dict(zip(("phi_q", "phi_k"), feature_map(**inputs), strict=True))
    parameters = {f"parameter.{key}": p for key, p in feature_map.named_parameters()}
    yield from inputs.items()
    yield from parameters.items()
    yield from outputs.items()
    yield from gradient_vectors(outputs, inputs | parameters, draw)


def gradient_vectors(
    outputs: dict[str, Tensor], inputs: dict[str, Tensor], draw: Callable
) -> Iterator[tuple[str, Tensor]]:
    """Random gradients of the outputs, and those of the inputs that follow, as `grad.NAME`."""
    cotangents = {name: draw(*x.shape) for name, x in outputs.items()}
    gradients = torch.autograd.grad(
        list(outputs.values()), list(inputs.values()), list(cotangents.values()), allow_unused=True
    )
    yield from ((f"grad.{name}", x) for name, x in cotangents.items())
    for name, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None:
            yield f"grad.{name}", gradient


def normal_numbers(seed: int) -> Callable[..., Tensor]:
    """A function that draws normal numbers of a shape."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the golden vectors.")
    parser.add_argument("file", help="safetensors file to write")
    save_file(golden_vectors(), parser.parse_args().file, versions())
