"""Whether what a JSON or YAML file gives is of the type that a field or an option is annotated with."""

import math
import types
import typing


def fits(value, wanted) -> bool:
    """An int is a float too, and must be finite; a bool is neither; a tuple is a list."""
    kind, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is typing.Any:
        return True
    if kind in (types.UnionType, typing.Union):
        return any(fits(value, part) for part in parts)
    if kind is list:
        return isinstance(value, (list, tuple)) and all(fits(x, parts[0]) for x in value)
    if wanted in (int, float) and isinstance(value, (int, float)):
        return (
            not isinstance(value, bool) and math.isfinite(value) and (wanted is float or type(value) is int)
        )
    return isinstance(value, kind or wanted)


def check_types(values: dict, annotations: dict, where: str = "") -> None:
    """Raises ValueError for the first of `values` that is not of its annotated type."""
    for name, value in values.items():
        wanted = annotations.get(name, typing.Any)
        if not fits(value, wanted):
            words = wanted.__name__ if isinstance(wanted, type) else str(wanted)
            raise ValueError(f"{where}{name}={value!r} must be {words}")
