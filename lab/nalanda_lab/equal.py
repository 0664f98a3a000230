"""Small decoders of equal parameters and equal state, for comparisons of mixers and feature maps."""

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import torch

from nalanda.common.errors import InputError
from nalanda.common.text import size, suggest
from nalanda.config.load import parse_yaml
from nalanda.model import FEATURE_MAPS, MIXERS, NalandaConfig, NalandaForCausalLM
from nalanda.model.options import check_names

# Softmax attention, without convolutions, must first learn that a value follows its key. With this
# initializer_range it did within 500 steps of the quick MQAR, with twice this range not within 800.
MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "initializer_range": 0.06,
}
CLOSE = 0.02
"""Relative tolerance of parameters, and of states if head sizes allow it."""
FAR = 0.1
"""Relative distance of the state beyond which a model is left out."""


def configured(model: dict[str, Any], vocab_size: int = 1) -> NalandaConfig:
    """The config of a model's keys, read as saved ones: records outlive a default."""
    keys: dict[str, Any] = MODEL | model | {"vocab_size": vocab_size}
    return NalandaConfig.from_dict(keys | {"bos_token_id": None, "eos_token_id": None})


def grows(config: NalandaConfig) -> bool:
    return config.state_bytes(2) > config.state_bytes(1)


def parse(mixer: str, feature_map: str | None) -> dict[str, Any]:
    """Model keys of `name` or `name:option=value:option=value`, with a feature map if the mixer has one."""
    name, *options = mixer.split(":")
    if name not in MIXERS:
        raise InputError(f"--mixers: unknown mixer {name!r}{suggest(name, MIXERS)}")
    if not all("=" in option for option in options):
        raise InputError(f"--mixers: {mixer!r}: write options as {name}:option=value")
    values = {name: parse_yaml(text, mixer) for name, text in (o.split("=", 1) for o in options)}
    try:
        check_names(values, MIXERS[name])
    except TypeError as error:
        raise InputError(f"--mixers: {mixer!r}: {error}") from None
    return {"mixer": name, "mixer_options": values, "feature_map": feature_map}


def label(model: dict[str, Any]) -> str:
    """`deltanet + silu`, `deltanet(allow_neg_eigval) + silu`."""
    options = [k if v is True else f"{k}={v}" for k, v in model["mixer_options"].items()]
    name = model["mixer"] + (f"({', '.join(options)})" if options else "")
    return " + ".join(filter(None, [name, model["feature_map"]]))


def models(
    mixers: Iterable[str], maps: Iterable[str], base: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Every mixer with every map ("own": its default), and a note for each mixer on the maps it refuses.

    Mixers without a feature map are listed once.
    """
    by_label: dict[str, dict] = {}
    refused: dict[str, list[tuple[str, str]]] = {}
    for mixer in mixers:
        default_map = MIXERS[parse(mixer, None)["mixer"]].rule.map
        for feature_map in maps if default_map else (None,):
            if feature_map and feature_map not in (*FEATURE_MAPS, "own"):
                raise InputError(
                    f"--maps: unknown map {feature_map!r}{suggest(feature_map, FEATURE_MAPS)}"
                )
            model = parse(mixer, default_map if feature_map == "own" else feature_map)
            try:
                NalandaConfig(**base | model)
            except ValueError as error:
                refused.setdefault(mixer, []).append((feature_map or "no map", str(error)))
            else:
                by_label[label(model)] = model
    notes = [
        f"{mixer} is left out with {', '.join(name for name, _ in pairs)}: {pairs[0][1]}"
        for mixer, pairs in refused.items()
    ]
    return list(by_label.values()), notes


def count(model: dict[str, Any]) -> int:
    """Parameters without those of the task's vocabulary, which all models share."""
    with torch.device("meta"):
        return sum(p.numel() for p in NalandaForCausalLM(configured(model)).parameters())


def most_parameters(base: dict[str, Any]) -> int:
    """Parameters of the largest mixer with its own map: the common target, whichever models are compared."""
    counts = []
    for name in MIXERS:
        with contextlib.suppress(ValueError):  # sizes that do not suit a mixer
            counts.append(count(base | {"mixer": name}))
    return max(counts)


def with_parameters(model: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The model with the width of the GLU that comes nearest to `wanted` parameters. Raises `InputError`."""
    config = configured(model)
    column = 3 * config.hidden_size * config.num_hidden_layers
    width = config.intermediate_size + round((wanted - count(model)) / column)
    if width < 1:
        raise InputError("more parameters than the others, even without a GLU")
    return model | {"intermediate_size": width}


def with_state(model: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The model with the head sizes K and V whose fp32 state comes nearest to `wanted` bytes.

    K and V are even, at most 1 : 2; of several within `CLOSE` the squarest is taken. A model whose state
    grows is not changed. Raises `InputError`.
    """

    def sized(K: int, V: int) -> dict[str, Any]:
        return model | {"head_dim": K, "expand_v": V / K}

    def measured(K: int, V: int) -> int:
        return configured(sized(K, V)).state_bytes(1, torch.float32)

    if grows(configured(model)):
        return model
    # Bilinear in K and V for every mixer: four sizes determine it.
    b22, b24, b42, b44 = (measured(K, V) for K in (2, 4) for V in (2, 4))
    by_k, by_v, by_both = (b42 - b22) / 2, (b24 - b22) / 2, (b44 - b42 - b24 + b22) / 4

    def distance(sizes: tuple[int, int]) -> tuple[float, float]:
        K, V = sizes
        total = b22 + by_k * (K - 2) + by_v * (V - 2) + by_both * (K - 2) * (V - 2)
        return max(CLOSE, abs(total / wanted - 1)), abs(math.log(V / K))

    even = range(2, 258, 2)
    fitting = ((K, V) for K in even for V in even if K <= 2 * V and V <= 2 * K and K * (V / K) == V)
    K, V = min(fitting, key=distance)
    if abs(measured(K, V) / wanted - 1) > FAR:
        raise InputError(f"no head sizes come within {FAR:.0%} of a state of {size(wanted)}")
    return sized(K, V)
