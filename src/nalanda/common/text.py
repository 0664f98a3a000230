"""Text for messages and files: the nearest name, sizes, durations, tables, URLs without their secrets. A short hash."""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any


def redact(text: str) -> str:
    """`text` without the passwords and query strings of its URLs."""
    # A password may have an @ or, as keys of S3 do, a slash. A port and a path with an @ are no password.
    # Azure's CONTAINER@ACCOUNT is none either.
    text = re.sub(r"\b(?!(?:abfss?|az)://[^/\s:@'\"]*@)(\w+://)[^/\s'\"]+@", r"\1***@", text)
    text = re.sub(r"(\w://)[^/\s:@'\"]*:(?!\d+/)((?!\w://)[^\s'\"])*@", r"\1***@", text)
    return re.sub(r"(?<=[\w/.~-])\?[^\s'\"()<>]*=[^\s'\"()<>]*", "?***", text)


def scheme_of(text: str) -> str:
    """The scheme of a URL, before its `://`, in lower case; "" for other text."""
    scheme = re.match(r"([A-Za-z][A-Za-z\d+.-]*)://", text)
    return scheme[1].lower() if scheme else ""


def is_url(source: Any) -> bool:
    """Whether `source` is a URL of any scheme, or a list of them."""
    if isinstance(source, list):
        return bool(source) and all(map(is_url, source))
    return isinstance(source, str) and bool(scheme_of(source))


def local_path(source: Any) -> Any:
    """The path that a file:// URL names, also in a list; anything else is unchanged."""
    if isinstance(source, list):
        return [local_path(each) for each in source]
    if not isinstance(source, str):
        return source
    return re.sub(r"(?i)^file://(localhost(?=/))?", "", source)


def digest(text: str) -> str:
    """64 bits of BLAKE2b in hexadecimal."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def closest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The one of `names` that `name` may be a misspelling of, or None."""
    matches = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def suggest(name: str, names: Iterable[str], section: str = "") -> str:
    """`; did you mean train.steps?`, for the section `train.`, or the list of `names`."""
    names = sorted(names)
    initials = "".join(word[:1] for word in name.split("_"))  # learning_rate is lr
    if close := closest(name, names) or next((x for x in names if x == initials), None):
        return f"; did you mean {section}{close}?"
    return f"; there are {', '.join(names)}" if names else ""


def option_of(field: str) -> str:
    """The option of the command line for a field: `--save-state` for `save_state`."""
    return f"--{field.replace('_', '-')}"


def wrap_line(line: str, width: int) -> str:
    """`line` as lines of at most `width`, unless a word is longer. A number stays with the word behind it.

    The further lines stand under the text behind a label, as in `memory     36 MiB …`.
    """
    label = re.match(r"\S+ {2,}", line)
    # textwrap breaks no line at a no-break space.
    glued = re.sub(r"(?<=\d) (?=\S)", "\N{NO-BREAK SPACE}", line)
    lines = textwrap.wrap(
        glued,
        width,
        subsequent_indent=" " * (label.end() if label else 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`, `4 d 07 h`, `192 years`; `unknown` for NaN and infinity."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    if hours >= 2 * 8766:
        return f"{hours / 8766:,.0f} years"
    if hours >= 72:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def si(number: float) -> str:
    """`12.3 K`, `340 M`, `15.73 G`, `989 T`."""
    for unit, digits in (("", 3), (" K", 3), (" M", 3), (" G", 4), (" T", 4), (" P", 4)):
        if round(number, digits - 3) < 1000:
            return f"{number:.{digits}g}{unit}"
        number /= 1000
    return f"{number:.4g} E"


def fixed(number: float, form: str) -> str:
    """A number in a form such as `.2f`; `5.54e+34` in place of so many places, as of a model that diverged."""
    return f"{number:{form}}" if number < 1e9 else f"{number:.3g}"


def size(count: float) -> str:
    """Bytes as `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def beside_least(value: float | None, values: Iterable[float | None]) -> str:
    """`, 2.0 ×`: how many times a value is the least of several; "" up to 1.02 times, or for no value."""
    least = min(filter(None, values), default=None)
    if not value or least is None or value <= 1.02 * least:
        return ""
    return f", {value / least:.1f} ×"


def markdown_table(
    header: Sequence[str], lines: Sequence[Sequence[str]], left: int | None = None
) -> str:
    """A table in Markdown; all columns but the first `left` are right-aligned. None: no column is."""
    count = len(header) if left is None else left
    marks = ["---"] * count + ["---:"] * (len(header) - count)
    rows = [[cell.replace("|", "\\|") for cell in line] for line in [header, marks, *lines]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def without_infinities(value: Any, write: Callable[[float], Any] = str) -> Any:
    """`value` with what `write` makes of infinities and NaN, which JSON lacks; by default their text."""
    if isinstance(value, dict):
        return {key: without_infinities(each, write) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(each, write) for each in value]
    return write(value) if isinstance(value, float) and not math.isfinite(value) else value
