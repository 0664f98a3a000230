"""Records: where a record holds a document, and what becomes of one that holds none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from nalanda.common.errors import InputError, first_line
from nalanda.config.schema import MAX_DOCUMENT, DataConfig


class Document(NamedTuple):
    text: str
    source: str = ""
    """Name of the part of the corpus that it is from; "" where the corpus names none."""


class Left(Enum):
    """Stands in the place of a document that is left out. The value is its key in a state."""

    OVERSIZED = "skipped"
    """Above `data.max_document_bytes`."""
    UNUSABLE = "unusable"
    """Without usable text."""


def left_out(state: Mapping[str, Any]) -> Counter[str]:
    """How many documents were left out, by the values of `Left`, as a state or an index holds them."""
    return Counter({kind.value: count for kind in Left if (count := state.get(kind.value))})


def describe_left(left: Mapping[str, int]) -> str:
    """Such as "3 documents without usable text, 1 above data.max_document_bytes were left out"; or ""."""
    whys = {Left.UNUSABLE: "without usable text", Left.OVERSIZED: "above data.max_document_bytes"}
    counts = [(left.get(kind.value, 0), why) for kind, why in whys.items()]
    parts = [f"{count:,} {why}" for count, why in counts if count]
    if not parts:
        return ""
    first, *more = parts
    number, why = first.split(" ", 1)
    verb = f" {'was' if number == '1' and not more else 'were'} left out"
    return ", ".join([f"{number} document{'s' * (number != '1')} {why}", *more]) + verb


class UnusableRecord(InputError):
    """A record without usable text, which is refused."""


class Fields(NamedTuple):
    """Where a record holds a document, how large it may be, and what is left out."""

    text: str
    """Field with the text (`field_of`)."""
    source: str
    """Field with the source."""
    max_bytes: int = MAX_DOCUMENT
    """Most bytes of a document, counted as its line stands in the file."""
    skip: bool = False
    """Whether a larger document is left out instead of refused."""
    skip_unusable: bool = False
    """Whether a record without usable text is left out instead of refused."""

    @staticmethod
    def of(data: DataConfig) -> Fields:
        skip, skip_unusable = data.oversized == "skip", data.unusable == "skip"
        return Fields(
            data.text_field, data.source_field, data.max_document_bytes, skip, skip_unusable
        )

    def oversized(self, where: str, size: int | None = None) -> Left:
        """Returns if documents above `max_bytes` are left out. Raises `InputError` if they are refused."""
        if self.skip:
            return Left.OVERSIZED
        stated = f"{size:,}" if size else f"more than {self.max_bytes:,}"
        raise InputError(
            f"{where}: a document of {stated} bytes, and data.max_document_bytes is {self.max_bytes:,}; "
            "raise it, or leave such documents out with data.oversized: skip"
        )

    def unusable(self, where: str, why: str) -> Left:
        """Returns if records without usable text are left out. Raises `UnusableRecord` if they are refused."""
        if self.skip_unusable:
            return Left.UNUSABLE
        raise UnusableRecord(f"{where}: {why}; set data.unusable=skip to leave it out")


_MISSING: Any = object()


def field_of(record: Any, path: str, default: Any = None) -> Any:
    """The value of a field. A dot leads into a nested field, unless a field's own name has it."""
    if not isinstance(record, dict):
        return default
    if path in record:
        return record[path]
    head, dot, rest = path.partition(".")
    return field_of(record.get(head), rest, default) if dot else default


def document_in(line: bytes | str, fields: Fields, where: str) -> Document | Left:
    """The document of a line of JSON. Raises `InputError` if it has none and `fields` refuse that."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return fields.unusable(where, f"not JSON, or cut short ({first_line(error)})")
    return document_of(record, fields, where)


def document_of(record: Any, fields: Fields, where: str) -> Document | Left:
    """The document of a record. Raises `InputError` if it has none and `fields` refuse that.

    where: the file and row, with which the message begins.
    """
    if not isinstance(record, dict):
        return fields.unusable(where, f"not an object with a field {fields.text!r}")
    text = field_of(record, fields.text, _MISSING)
    if text is _MISSING:
        names = ", ".join(map(str, record)) or "none"
        texts = [name for name, value in record.items() if isinstance(value, str)]
        setting = f"data.text_field={texts[0]}" if len(texts) == 1 else "data.text_field"
        why = f"no field {fields.text!r} (there are: {names}); set {setting}"
        return fields.unusable(where, why)
    if not isinstance(text, str):
        return fields.unusable(
            where, f"field {fields.text!r} is not text but {type(text).__name__}"
        )
    source = field_of(record, fields.source, "")
    # Numbered sources become names; True and False, which are numbers too, do not.
    if isinstance(source, (int, float)) and not isinstance(source, bool):
        source = str(source)
    return Document(_in_utf_8(text), _in_utf_8(source) if isinstance(source, str) else "")


def _in_utf_8(text: str) -> str:
    """The text with ? for each half of a surrogate pair: JSON allows one alone, UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
