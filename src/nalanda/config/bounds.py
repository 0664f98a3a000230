"""Bounds of a recipe's values, written beside their types: `Annotated[int, at_least(1)]`."""

import os
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import fields
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from nalanda.common.errors import InputError


class Bound(NamedTuple):
    """A condition on a number."""

    words: str
    holds: Callable[[Any], bool]


def at_least(n: float) -> Bound:
    """The bound [n, ∞)."""
    return Bound(f"{n:g} or more", lambda value: value >= n)


def between(low: int, high: int) -> Bound:
    """The bound [low, high]."""
    return Bound(f"{low:,} to {high:,}", lambda value: low <= value <= high)


POSITIVE = Bound("a positive number", lambda value: value > 0)
BETWEEN_0_AND_1 = Bound("a number between 0 and 1", lambda value: 0 < value < 1)
SHARE = Bound("a number in [0, 1]", lambda value: 0 <= value <= 1)
DECAY = Bound("a number in [0, 1)", lambda value: 0 <= value < 1)


def check_bounds(section: Any, where: str) -> None:
    """Raises `InputError` for the first value of a section outside its bound or its choices.

    where: the section's key. Null is within every bound, and each number of a tuple must be.
    """
    for name, hint in annotations(type(section)).items():
        value = getattr(section, name)
        numbers = value if isinstance(value, tuple) else [value]
        for bound in getattr(hint, "__metadata__", ()):
            if not all(number is None or bound.holds(number) for number in numbers):
                printed = list(value) if isinstance(value, tuple) else value
                raise InputError(f"{where}.{name}: expected {bound.words}, got {printed!r}")
        if get_origin(hint) is Literal:
            check_choice(value, get_args(hint), f"{where}.{name}")


def check_choice(value: Any, choices: Iterable[Any], key: str) -> None:
    """Raises `InputError` unless `value` is one of `choices`; 1 is not true."""
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return
    names = [str(c).lower() if isinstance(c, bool) else str(c) for c in choices]
    raise InputError(f"{key}: expected one of {', '.join(names)}; got {value!r}")


def check_new_name(name: Any, key: str, marks: str = "_-", taken: Container[str] = ()) -> None:
    """Raises `InputError` for a name that can be no folder's, or that is taken.

    key: the section of names. marks: signs that a name may have beside letters and digits. taken: names in small
    letters; capitals make no other folder on some systems.
    """
    if not isinstance(name, str):
        raise InputError(f"{key}: the name {name!r} is no text; quote it")
    if not re.fullmatch(rf"\w[\w{re.escape(marks)}]{{0,63}}", name):
        raise InputError(
            f"{key}.{name}: a name has letters, digits and {' '.join(marks)} alone, begins with a letter or digit, and "
            "has at most 64 characters"
        )
    if name.lower() in taken:
        raise InputError(f"{key}.{name}: the folder has {name.lower()} already; take another name")


def check_seed(seed: int | None, name: str = "seed") -> None:
    """Raises `InputError` for a seed that not all of Python, numpy and torch accept."""
    if seed is not None and not 0 <= seed < 2**32:
        raise InputError(f"{name}: expected 0 to {2**32 - 1}, got {seed}")


def expand_home(value: Any, key: str) -> Any:
    """A path with the user's home in place of `~`, also in a list; other values as they are.

    Raises `InputError` for the home of an unknown user.
    """
    if isinstance(value, list):
        return [expand_home(each, key) for each in value]
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    path = os.path.expanduser(value)
    if path == value and not os.path.lexists(value):
        raise InputError(f"{key}: {value}: there is no such user; write the whole path")
    return path


@cache
def annotations(section: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields, with their bounds."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in fields(section)}
