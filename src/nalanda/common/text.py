"""Words for people: the nearest name, sizes, durations, URLs without their secrets."""

from __future__ import annotations

import re
import typing
from typing import Any

from nalanda.model import options


def redact(text: str) -> str:
    """`text` without the passwords and query strings of its URLs."""
    text = re.sub(r"(\w://)[^/\s@'\"]+@", r"\1***@", text)
    return re.sub(r"(?<=[\w/.~-])\?[^\s'\"()<>]*=[^\s'\"()<>]*", "?***", text)


# ------------------------------ URLs


def is_url(source: Any) -> bool:
    """Whether `source` is an http(s) URL, or a list of them."""
    if isinstance(source, list):
        return bool(source) and all(map(is_url, source))
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean steps?`, or what there is."""
    known = sorted(known)
    if close := options.nearest(name, known):
        return f"; did you mean {close}?"
    return f"; there are {', '.join(known)}" if known else ""


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`, `4 d 07 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return (
        f"{minutes // 60} h {minutes % 60:02d} min" if hours < 72 else f"{hours // 24} d {hours % 24:02d} h"
    )


def _si(number: float) -> str:
    for unit in ("", " K", " M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g} G"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    raise AssertionError
