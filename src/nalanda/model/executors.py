"""What computes each layer of a model on its device, and why nothing faster does.

`executors` lets a layer of each kind read some tokens, and one more, so it tells what happens, not what should.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from . import kernels
from .cache import NalandaCache
from .decoding import DecoderChoice, choose_decoder
from .program import NotServed, ProgramDecoder, build_program
from .sequences import Sequences

RECURRENCES = ("delta_rule", "linear_attention", "normalized_attention", "block_attention")
TOKEN_OPS = ("fused_step", "step")
TOKENS = 65
"""Tokens that a layer reads: more than one chunk."""


class LayerExecutors(NamedTuple):
    """The executors of layers of one kind."""

    layers: tuple[int, ...]
    mixer: str
    sequence: str
    """Of training and prompts: a backend of `nalanda_kernels`, or "torch"."""
    token: str
    """Of a generated token: "CUDA graph" or "C++ program" for all layers at once; else a backend, or "torch"."""
    reasons: tuple[str, ...]
    """Why nothing faster serves the layers, a sentence each."""

    def __str__(self) -> str:
        name = "layer" if len(self.layers) == 1 else "layers"
        return f"{name} {_ranges(self.layers)} {self.mixer}: {self.text}"

    @property
    def text(self) -> str:
        return "; ".join([f"sequences {self.sequence}, a token {self.token}", *self.reasons])


@torch.no_grad()
def executors(model: Any) -> list[LayerExecutors]:
    """The executors of each kind of layer, in the order of their first layers.

    model: a causal `NalandaForCausalLM` on the device, and in the dtype, that it will run in.
    """
    kinds: dict[tuple, list[int]] = {}
    for i, layer in enumerate(model.model.layers):
        mixer = layer.mixer
        sizes = (mixer.num_heads, mixer.num_v_heads, mixer.K, mixer.V)
        kinds.setdefault((type(mixer), mixer.rule, sizes), []).append(i)

    states: dict[int, dict] = {}
    rows = [_read(model, tuple(layers), states) for layers in kinds.values()]
    with choose_decoder(model) as choice:
        in_python, reason = _whole_token(model, choice, [states[i] for i in sorted(states)])
    decoder = "CUDA graph" if model.device.type == "cuda" else "C++ program"
    return [_with_decoder(row, decoder, in_python, reason) for row in rows]


def _read(model: Any, layers: tuple[int, ...], states: dict[int, dict]) -> LayerExecutors:
    """The executors of one layer's calls, without decoders of whole tokens. Fills the states of all its layers."""
    mixer, weight = model.model.layers[layers[0]].mixer, next(model.model.layers.parameters())
    x = torch.zeros(1, TOKENS, model.config.hidden_size, device=weight.device, dtype=weight.dtype)
    watch = nullcontext({}) if kernels.package is None else kernels.package.watch()
    with watch as attempts:
        _, state = mixer(x, Sequences(device=weight.device), {})
        of_sequence = list(attempts)
        attempts.clear()
        past = torch.tensor([TOKENS])
        mixer(x[:, :1], Sequences(None, past, None, weight.device), state)
    states |= dict.fromkeys(layers, state)
    sequence, token = _served(of_sequence, RECURRENCES), _served(attempts, TOKEN_OPS)
    reasons = [
        f"{attempt.op}: {attempt.backend} cannot serve {attempt.refusal}"
        for attempt in (*of_sequence, *attempts)
        if attempt.refusal
    ]
    if sequence == "torch" and not reasons:
        reasons = [f"no kernel for {weight.device.type} computes its sequences"]
    name = model.config.layer_mixers[layers[0]]
    return LayerExecutors(layers, name, sequence, token, tuple(dict.fromkeys(reasons)))


def recurrences(attempts: Iterable[Any]) -> dict[str, str]:
    """Each recurrence that `nalanda_kernels.watch` saw, with the backend that served it."""
    return {a.op: a.backend for a in attempts if a.op in RECURRENCES and a.refusal is None}


def _served(attempts: Iterable[Any], names: tuple[str, ...]) -> str:
    """The backend that served one of these ops; "torch" without one."""
    serving = [a.backend for a in attempts if a.op in names and a.refusal is None]
    return serving[-1] if serving else "torch"


def _whole_token(
    model: Any, choice: DecoderChoice | None, states: list[dict]
) -> tuple[dict[int, str], str | None]:
    """Layers that a decoder of whole tokens leaves to Python, with reasons; and why no such decoder serves."""
    if choice is None:
        return {}, "decoding of whole tokens is turned off in this process"
    if choice.key is None or choice.reason:  # the latter of an earlier capture
        return {}, choice.reason
    if model.device.type == "cuda":
        return {}, None

    cache = NalandaCache(len(states))
    cache.states, cache.lengths = states, torch.tensor([TOKENS])
    try:
        decoder: ProgramDecoder = build_program(model, cache)
    except NotServed as refusal:
        return {}, str(refusal)
    return {i: reason for i, (_, reason) in decoder.in_python.items()}, None


def _with_decoder(
    row: LayerExecutors, decoder: str, in_python: dict[int, str], reason: str | None
) -> LayerExecutors:
    """The row, with its token by the decoder of whole tokens if that serves it."""
    refused = reason or in_python.get(row.layers[0])
    if refused is None:
        return row._replace(token=decoder)
    return row._replace(reasons=(*row.reasons, f"no {decoder}: {refused}"))


def _ranges(numbers: tuple[int, ...]) -> str:
    """Rising integers in short, such as 0–2, 4."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ends)
