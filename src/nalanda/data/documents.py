"""Documents of local files: the table of readers by suffix, and what a record must have."""

from __future__ import annotations

import functools
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from nalanda.common.errors import InputError, first_line
from nalanda.config.schema import MAX_DOCUMENT, DataConfig

NAMES = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|eval"}
"""The splits, and the names of folders and files that hold them."""

BLOCK = 1 << 17
"""Bytes read at a time."""

SLICE = 1 << 10
"""Compressed bytes per call: zstandard makes up to 128 kB of 4 bytes, so a call gives 32 MB at most."""

WINDOW = 128 << 20
"""Bytes that a zstandard frame may refer back to; more where a document may be larger."""


class Document(NamedTuple):
    text: str
    source: str = ""
    """Name of the part of the corpus that it is from; "" where the corpus names none."""


class Fields(NamedTuple):
    """Where a record holds a document, and how large it may be."""

    text: str
    """Name of the field with the text."""
    source: str
    """Name of the field with the source; a dot leads into a nested field."""
    max_bytes: int = MAX_DOCUMENT
    """Most bytes of a document, counted as its line stands in the file."""
    skip: bool = False
    """Whether a larger document is left out instead of refused."""

    @staticmethod
    def of(data: DataConfig) -> Fields:
        return Fields(data.text_field, data.source_field, data.max_document_bytes, data.oversized == "skip")

    def oversized(self, where: str, size: int | None = None) -> None:
        """Returns if documents above `max_bytes` are left out. Raises `InputError` if they are refused."""
        if not self.skip:
            stated = f"{size:,}" if size else f"more than {self.max_bytes:,}"
            raise InputError(
                f"{where}: a document of {stated} bytes, and data.max_document_bytes is {self.max_bytes:,}; "
                "raise it, or leave such documents out with data.oversized: skip"
            )


class Shard(Protocol):
    """A part of a corpus that is read in order."""

    @property
    def identity(self) -> str:
        """Name and size. A saved position is only valid for shards of the same identity."""
        ...

    @property
    def single(self) -> bool:
        """Whether the shard is one document, so that shuffling shards shuffles documents."""
        ...

    def read(self, cursor: Any) -> Iterator[tuple[Document | None, Any]]:
        """Yields the documents after `cursor` (None: from the start), each with the cursor after it.

        A document that is left out for its size is None.
        """
        ...


def not_blank(text: str) -> bool:
    return bool(text) and not text.isspace()


def digest(text: str) -> str:
    """64 bits of BLAKE2b in hexadecimal."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def hash_text(text: str) -> int:
    return int(digest(text), 16)


D = TypeVar("D", Document, Document | None)

T = TypeVar("T")


def take_documents(documents: Iterator[D], characters: int) -> list[D]:
    """The next documents, up to the one that completes `characters`; [] at the end."""
    group = []
    for document in documents:
        group.append(document)
        characters -= len(getattr(document, "text", ""))
        if characters <= 0:
            break
    return group


# ------------------------------ files


@dataclass(frozen=True)
class FileShard:
    """A local file. The cursor is the number of rows read."""

    path: Path
    name: str
    fields: Fields

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.size}"

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the file when first asked; reading is refused once the file has another size."""
        return self._size()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read any more ({error.strerror}); restore it") from None

    @property
    def single(self) -> bool:
        return is_single(self.path.name)

    def read(self, cursor: int | None) -> Iterator[tuple[Document | None, int]]:
        if self.size != (now := self._size()):
            raise InputError(
                f"{self.path}: changed while in use, from {self.size} to {now} bytes; restore it, "
                "or start a new run from the checkpoint's weights with model.init_from"
            )
        if not self.size and not self.single:
            raise InputError(f"{self.path}, line 1: the file is empty; fetch it again or remove it")
        return reader_of(self.path)(self.path, self.fields, cursor or 0)


@dataclass(frozen=True)
class TextShard:
    """One document in memory."""

    single = True
    name: str
    text: str = field(repr=False)

    @property
    def identity(self) -> str:
        return f"{self.name}:{len(self.text)}"

    def read(self, cursor: int | None) -> Iterator[tuple[Document, int]]:
        return iter([] if cursor else [(Document(self.text), 1)])


# ------------------------------ readers


class Reader(Protocol):
    """Reads the documents of one file. The same file must give the same documents each time. Memory is
    bounded by a small multiple of `fields.max_bytes`, however much a compressed file holds."""

    def __call__(self, path: Path, fields: Fields, start: int) -> Iterator[tuple[Document | None, int]]:
        """Reads on behind the first `start` rows.

        Args:
            path: the file. It is not empty, unless it is a .txt file.
            fields: the fields of a record that hold a document, and the size limit.
            start: rows to pass over; a row is whatever the format repeats (a line, a table row).

        Yields:
            `(document, row)` for the rows after `start`, with `row` counted from 1 at the top of the file,
            so that reading with `start=row` resumes after this document. Rows without content may be passed
            over but count. For a document above `fields.max_bytes`, call `fields.oversized(where)`, which
            raises or returns; then yield None in its place.

        Raises:
            InputError: names the path and the line or row that cannot be read.
        """
        ...


def reader_of(path: Path) -> Reader:
    """The reader of the longest suffix that fits. Raises `InputError` if none does."""
    if not (suffix := suffix_of(path.name)):
        raise InputError(f"{path}: no reader for this suffix; files may end in {', '.join(READERS)}")
    return READERS[suffix]


def suffixes() -> tuple[str, ...]:
    """The suffixes that have a reader now."""
    return tuple(READERS)


def suffix_of(name: str) -> str:
    """The longest suffix with a reader that `name` ends in, in either case; "" if there is none."""
    return max((s for s in READERS if name.lower().endswith(s.lower())), key=len, default="")


def is_single(name: str) -> bool:
    """Whether a file of this name is one document."""
    return name.lower().endswith(".txt")


def split_of(folders: Iterable[str], file: str) -> str:
    """The split of a file: that of the first of `folders` which names one (`NAMES`), or else of its own name,
    such as val.jsonl or train-00001-of-00009.parquet; "" for none."""
    stem = re.sub(r"[-_.]\d.*", "", file[: len(file) - len(suffix_of(file))])
    found = (
        split
        for name in (*folders, stem)
        for split, names in NAMES.items()
        if re.fullmatch(names, name, re.I)
    )
    return next(found, "")


def files_of(parts: dict[str, T], split: str) -> T:
    """The files of `split` among those by `NAMES` and "", for no split; some may be empty.

    Files of no split are for training if none are named so. Validation falls back on the files of training,
    of which a share is held out, and on those of a test, which a source of its own may have alone.
    """
    train = parts["train"] or parts[""]
    return train if split == "train" else parts["validation"] or train or parts["test"]


def read_txt(path: Path, fields: Fields, start: int) -> Iterator[tuple[Document | None, int]]:
    if start:
        return
    if (size := path.stat().st_size) > fields.max_bytes:
        fields.oversized(str(path), size)
        yield None, 1
        return
    content = path.read_bytes()
    try:
        yield Document(content.decode()), 1
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None


def read_jsonl(path: Path, fields: Fields, start: int) -> Iterator[tuple[Document | None, int]]:
    lines = split_lines(_blocks(path, fields), fields)
    row = 0
    while True:
        try:
            found = next(lines, None)
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(f"{path}, line {row + 1}: corrupt or truncated ({first_line(error)})") from None
        if found is None:
            return
        row += 1
        where, line = f"{path}, line {row}", found[0]
        if line is None:
            fields.oversized(where)
        if row > start and (line is None or line.strip()):
            yield None if line is None else document_in(line, fields, where), row


def split_lines(blocks: Iterable[bytes], fields: Fields) -> Iterator[tuple[bytes | None, int]]:
    """Yields lines without their ends, and their lengths in bytes.

    A line above `fields.max_bytes` is None, and no more than that of it is held. Unless such lines are
    skipped, it is the last.
    """
    parts, size = [], 0
    for block in blocks:
        *ends, rest = block.split(b"\n")
        for end in ends:
            size += len(end)
            yield b"".join([*parts, end]) if size <= fields.max_bytes else None, size
            parts, size = [], 0
        size += len(rest)
        if size <= fields.max_bytes:
            parts.append(rest)
        elif fields.skip:
            parts.clear()
        else:
            break
    if size:
        yield b"".join(parts) if size <= fields.max_bytes else None, size


def _blocks(path: Path, fields: Fields) -> Iterator[bytes]:
    """The decompressed content of a file, a bounded number of bytes at a time."""
    if path.suffix.lower() == ".zst":
        yield from _decompress_zst(path, max(WINDOW, fields.max_bytes))
    elif path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            while block := file.read1(BLOCK):  # `read` loses what came before an error
                yield block
    else:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                yield block


def _decompress_zst(path: Path, window: int) -> Iterator[bytes]:
    """The content of all frames. (zstandard's own reader takes a truncated frame for the end of the file.)"""
    import zstandard

    frame = None
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            for start in range(0, len(block), SLICE):
                chunk = block[start : start + SLICE]
                while chunk:
                    frame = frame or zstandard.ZstdDecompressor(max_window_size=window).decompressobj()
                    try:
                        yield frame.decompress(chunk)
                    except zstandard.ZstdError as error:
                        if "too much memory" in str(error):
                            raise EOFError(
                                f"it was compressed with a window above {window >> 20} MiB; "
                                "raise data.max_document_bytes to that window"
                            ) from None
                        raise EOFError(error) from None
                    chunk = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    if frame:
        raise EOFError("the last frame has no end")


def read_parquet(path: Path, fields: Fields, start: int) -> Iterator[tuple[Document | None, int]]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    options: Any = {"page_checksum_verification": True}
    try:
        # Opened once: a shard of a URL may leave its cache while it is read.
        with pyarrow.OSFile(str(path)) as handle, parquet.ParquetFile(handle, **options) as file:
            names = file.schema_arrow.names
            if fields.text not in names:
                document_of(dict.fromkeys(names), fields, f"{path}, row 1")
            columns = [name for name in names if name in (fields.text, fields.source.split(".")[0])]
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start:
                    row += rows
                    continue
                stated = _column_bytes(file, group, fields.text)
                # No value is larger than its column, so only large columns need a look at each value.
                large = stated > fields.max_bytes
                if large and rows == 1 and stated > fields.max_bytes + BLOCK:
                    row += 1
                    yield fields.oversized(f"{path}, row {row}"), row
                    continue
                few, reader = max(1, min(256, 4 * fields.max_bytes // max(1, stated))), nullcontext(file)
                if large:  # as a dictionary, a value that many rows share is held once
                    shared = {"metadata": file.metadata, "read_dictionary": [fields.text]}
                    few, reader = 256, parquet.ParquetFile(handle, **options, **shared)
                with reader as opened:
                    for batch in opened.iter_batches(few, row_groups=[group], columns=columns):
                        for record in _records(batch, fields) if large else batch.to_pylist():
                            row += 1
                            where = f"{path}, row {row}"
                            if row <= start:
                                continue
                            if record is None:
                                yield fields.oversized(where), row
                            else:
                                yield document_of(record, fields, where), row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}, row {row + 1}: corrupt or truncated ({first_line(error)})") from None


def _column_bytes(file: Any, group: int, name: str) -> int:
    """Uncompressed bytes of a column in a row group, as the file's metadata states them."""
    found = file.metadata.row_group(group)
    columns = [found.column(i) for i in range(found.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == name)


def _records(batch: Any, fields: Fields) -> Iterator[dict | None]:
    """The rows of a batch one at a time; None for a row whose text is too large."""
    texts = batch.column(batch.schema.get_field_index(fields.text))
    for i in range(batch.num_rows):
        text = getattr(texts[i], "value", texts[i]) if texts[i].is_valid else None
        large = hasattr(text, "as_buffer") and text.as_buffer().size > fields.max_bytes
        yield None if large else batch.slice(i, 1).to_pylist()[0]


READERS: dict[str, Reader] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".jsonl.zst": read_jsonl,
    ".parquet": read_parquet,
}
"""The reader of each suffix. A row here is all that another file type needs."""


def register_reader(suffix: str, read: Reader) -> None:
    """Adds the reader of another suffix. Raises ValueError for a suffix that is taken, or is not one."""
    if READERS.get(suffix, read) is not read:
        raise ValueError(f"register_reader({suffix!r}): the suffix is taken; choose another")
    if not suffix.startswith(".") or suffix == "." or not callable(read):
        raise ValueError(f"register_reader({suffix!r}): expected a suffix such as .csv, and a function")
    READERS[suffix] = read


# ------------------------------ records


def document_in(line: bytes, fields: Fields, where: str) -> Document:
    """The document of a line of JSON. Raises `InputError` if it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON, or cut short ({first_line(error)})") from None
    return document_of(record, fields, where)


def document_of(record: Any, fields: Fields, where: str) -> Document:
    """The document of a record. Raises `InputError` if it has none; `where` begins the message."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: not an object with a field {fields.text!r}")
    if fields.text not in record:
        names = ", ".join(map(str, record)) or "none"
        raise InputError(f"{where}: no field {fields.text!r} (there are: {names}); set data.text_field")
    text = record[fields.text]
    if not isinstance(text, str):
        raise InputError(f"{where}: field {fields.text!r} is not text but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: valid in JSON, not in UTF-8
        text = text.encode(errors="replace").decode()
    source: Any = record
    for name in fields.source.split("."):
        source = source.get(name) if isinstance(source, dict) else None
    return Document(text, source if isinstance(source, str) else "")
