"""Checks values from JSON or YAML against annotations, and names of options against signatures."""

import difflib
import inspect
import math
import re
import types
import typing


def fits(value, wanted) -> bool:
    """Whether `value` has the annotated type. An int is a float; a bool is no number; a tuple is a list."""
    kind, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is typing.Any:
        return True
    if kind in (types.UnionType, typing.Union):
        return any(fits(value, choice) for choice in parts)
    if kind is list:
        return isinstance(value, (list, tuple)) and all(fits(x, parts[0]) for x in value)
    if wanted in (int, float) and isinstance(value, (int, float)):
        number = math.isfinite(value) and not isinstance(value, bool)
        return number and (wanted is float or type(value) is int)
    return isinstance(value, kind or wanted)


def check_types(values: dict, annotations: dict, where: str = "") -> None:
    """Raises ValueError for the first of `values` without its annotated type."""
    for name, value in values.items():
        wanted = annotations.get(name, typing.Any)
        if not fits(value, wanted):
            kind = wanted.__name__ if isinstance(wanted, type) else str(wanted)
            raise ValueError(f"{where}{name}={value!r} must be {kind}")


OF_SUBCLASSES = ("k_heads", "v_heads", "taps")
"""Keyword-only parameters that subclasses set; not options."""


def is_option(parameter: inspect.Parameter) -> bool:
    """Whether users may set it: keyword-only, with a default. Without one, the builder gives it."""
    named = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
    return named and parameter.name not in OF_SUBCLASSES


def defaults(function) -> dict:
    """The options of `function` that have another default than None."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if is_option(p) and p.default is not None}


def beyond(base: dict, options: dict) -> dict:
    """The options that `base` lacks or has another value for."""
    return {
        name: value
        for name, value in options.items()
        if name not in base
        or base[name] != value
        or isinstance(base[name], bool) != isinstance(value, bool)
    }


def check_names(options: dict, function) -> None:
    """Raises TypeError for the first of `options` that is no option of `function`."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    choices = [p.name for p in parameters if is_option(p)]
    for name in options:
        if name not in choices:
            listed = f"; there are {', '.join(choices)}" if choices else "; it has none"
            raise TypeError(f"no option {name!r}{did_you_mean(name, choices) or listed}")


ALIASES = {
    "attention": "softmax",
    "deltanet2": "gated_deltanet2",
    "deltarule": "deltanet",
    "forgettingtransformer": "forgetting",
    "fox": "forgetting",
    "gateddeltaproduct": "delta_product",
    "gateddeltarule": "gated_deltanet",
    "gatedlinearattention": "gla",
    "gdn": "gated_deltanet",
    "gdn2": "gated_deltanet2",
    "kimi": "kda",
    "kimideltaattention": "kda",
    "kimilinear": "kda",
    "linear": "linear_attention",
    "mamba": "mamba2",
    "map": "feature_map",
    "mha": "softmax",
    "nalaformer": "nala",
    "none": "identity",
    "polaformer": "pola",
    "retnet": "retention",
    "rwkv": "rwkv7",
    "ssd": "mamba2",
    "ssm": "mamba2",
    "swish": "silu",
    "transformer": "softmax",
    "transnormer": "norm_attention",
}
"""Other names of mixers, feature maps and keys, in small letters and digits. They are only suggested."""


def nearest(name: str, names: typing.Iterable[str]) -> str | None:
    """The one of `names` that `name` means or may be a misspelling of, or None if none is similar."""
    plain = {re.sub("[^a-z0-9]", "", choice): choice for choice in sorted(names)}
    key = re.sub("[^a-z0-9]", "", str(name).lower())
    if ALIASES.get(key) in plain.values():
        return ALIASES[key]
    matches = difflib.get_close_matches(key, plain, n=1, cutoff=0.5)
    return plain[matches[0]] if matches else None


def did_you_mean(name: str, names: typing.Iterable[str]) -> str:
    """`, did you mean 'gla'?`, or an empty string."""
    near = nearest(name, names)
    return f", did you mean {near!r}?" if near else ""
