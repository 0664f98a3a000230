"""Names of number formats: one set for recipes, options and messages, and other programs' spellings of them."""

from collections.abc import Sequence
from typing import Any

from nalanda.common.errors import InputError

TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's name of each format that it has under another one."""

SPELLINGS = {torch_name: name for name, torch_name in TORCH_NAMES.items()} | {
    "f32": "fp32",  # llama.cpp's
    "f16": "fp16",
}

LOADED = ("auto", "fp32", "bf16", "fp16", "fp64")
"""Formats in which a model may be loaded; auto: the one in which it was saved."""

WEIGHTS = ("int8",)
"""Narrower formats that matrices may be rounded to as a model is loaded."""

STATES = ("fp32", "bf16", "int8", "fp8")
"""Formats that a state may be kept in."""


def short_name(value: Any) -> Any:
    """The name of a format here, for one of its spellings; any other value is unchanged."""
    return SPELLINGS.get(value, value) if isinstance(value, str) else value


def choose_format(name: str, choices: Sequence[str], option: str) -> str:
    """The one of `choices` that `name` spells. Raises `InputError`, which begins with `option`."""
    if (short := short_name(name)) in choices:
        return short
    raise InputError(f"{option} {name}: unknown; choose {', '.join(choices)}")
