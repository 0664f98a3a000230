"""Documents of local files: one reader for each kind, and what a record must have."""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nalanda.common.errors import InputError, first_line
from nalanda.config.schema import MAX_DOCUMENT, DataConfig

FOLDERS = ("train", "validation", "test")  # what the parts of a directory are called


BLOCK = 1 << 17  # bytes that are read at a time


SLICE = 1 << 10  # of compressed bytes: zstandard makes up to 128 kB of 4, so that a call gives 32 MB at most


WINDOW = 128 << 20  # bytes that a zstandard frame may refer back to; more where a document may be larger


WHOLE = 64 << 20  # bytes of a file that is hashed whole; of a larger one samples


AT_ONCE = 4 << 30  # bytes to hash at a start; where whole files would be more, all are sampled


SAMPLES = 16  # of a file, head and tail among them


class Document(NamedTuple):
    text: str
    source: str = ""  # which part of a mixture it is from, where the corpus says so


class Fields(NamedTuple):
    """Where a record has what a document needs; a dot leads into a field."""

    text: str
    source: str
    max_bytes: int = MAX_DOCUMENT  # of a document, as its line has it
    skip: bool = False  # a larger one is left out, not refused

    @staticmethod
    def of(data: DataConfig) -> Fields:
        return Fields(data.text_field, data.source_field, data.max_document_bytes, data.oversized == "skip")

    def oversized(self, where: str, size: int | None = None) -> None:
        """Returns if a document of more than `max_bytes` is to be left out; raises `InputError` if not."""
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
        """Name and size: a saved position is only good for the same shards."""
        ...

    @property
    def single(self) -> bool:
        """Whether the shard is one document, so that to shuffle shards is to shuffle documents."""
        ...

    def read(self, cursor: Any) -> Iterator[tuple[Document | None, Any]]:
        """Documents behind `cursor` (None: from the beginning), each with the cursor that lies behind it.
        One that is left out for its size is None."""
        ...


def not_blank(text: str) -> bool:
    return bool(text) and not text.isspace()


def hash_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class FileShard:
    """A local file; the cursor is the number of lines or rows read."""

    path: Path
    name: str
    fields: Fields

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.size}"

    @functools.cached_property
    def size(self) -> int:
        """When it was first asked for; it stays so, or the shard is another."""
        return self._size()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise InputError(f"{self.path} cannot be read any more ({error.strerror})") from None

    @property
    def single(self) -> bool:
        return self.path.suffix == ".txt"

    def read(self, cursor: int | None) -> Iterator[tuple[Document | None, int]]:
        if self.size != (now := self._size()):
            raise InputError(
                f"{self.path} changed while it is in use: {self.size} bytes are {now} now; restore it, "
                "or start a new run from the checkpoint's weights with model.init_from"
            )
        if not self.size and not self.single:
            raise InputError(f"{self.path}, line 1: the file is empty; fetch it again or remove it")
        read = next(read for suffix, read in READERS.items() if self.path.name.endswith(suffix))
        return read(self.path, self.fields, cursor or 0)


def _hash_file(path: Path, size: int, whole: int, sample: int) -> str:
    length = size if size <= max(whole, SAMPLES * sample) else sample
    places = [(size - length) * i // (SAMPLES - 1) for i in range(SAMPLES)] if length < size else [0]
    digest = blake2b(str(size).encode(), digest_size=8)
    try:
        with path.open("rb", buffering=0) as file:
            for place in places:
                file.seek(place)
                left = length
                while left and (piece := file.read(min(left, 1 << 20))):
                    digest.update(piece)
                    left -= len(piece)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _read_txt(path: Path, fields: Fields, start: int) -> Iterator[tuple[Document | None, int]]:
    if start:
        return
    if (size := path.stat().st_size) > fields.max_bytes:
        yield fields.oversized(str(path), size), 1
        return
    content = path.read_bytes()
    try:
        yield Document(content.decode()), 1
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None


def _read_jsonl(path: Path, fields: Fields, start: int) -> Iterator[tuple[Document | None, int]]:
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


def document_in(line: bytes, fields: Fields, where: str) -> Document:
    """The document of a line of .jsonl. Raises `InputError` where it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON, or cut short ({first_line(error)})") from None
    return document_of(record, fields, where)


def split_lines(blocks: Iterable[bytes], fields: Fields) -> Iterator[tuple[bytes | None, int]]:
    """Lines without their ends, and their lengths in bytes. Of a line above `fields.max_bytes` no more than
    that is ever held; it is None. Unless such lines are skipped, it is the last that is given."""
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
    """The content of a file, a bounded number of bytes at a time, however much was compressed into few."""
    if path.suffix == ".zst":
        yield from _decompress_zst(path, max(WINDOW, fields.max_bytes))
    elif path.suffix == ".gz":
        with gzip.open(path) as file:
            while block := file.read1(BLOCK):  # not `read`, which loses what came before an error
                yield block
    else:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                yield block


def _decompress_zst(path: Path, window: int) -> Iterator[bytes]:
    """The content of all frames. zstandard's own reader takes a truncated frame for the end of the file."""
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
                                "data.max_document_bytes allows as much"
                            ) from None
                        raise EOFError(error) from None
                    chunk = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    if frame:
        raise EOFError("the last frame has no end")


def _read_parquet(path: Path, fields: Fields, start: int) -> Iterator[tuple[Document | None, int]]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    options: Any = {"page_checksum_verification": True}
    try:
        with parquet.ParquetFile(path, **options) as file:
            names = file.schema_arrow.names
            if fields.text not in names:
                document_of(dict.fromkeys(names), fields, f"{path}, row 1")
            columns = [name for name in names if name in (fields.text, fields.source.split(".")[0])]
            for group in range(file.num_row_groups):
                rows, stated = file.metadata.row_group(group).num_rows, _stated(file, group, fields.text)
                if row + rows <= start:
                    row += rows
                    continue
                # No value of a column is larger than the column, so that few groups need a look at each.
                large = stated > fields.max_bytes
                if large and rows == 1 and stated > fields.max_bytes + BLOCK:
                    row += 1
                    yield fields.oversized(f"{path}, row {row}"), row
                    continue
                few, reader = max(1, min(256, 4 * fields.max_bytes // max(1, stated))), nullcontext(file)
                if large:  # a value that many rows share is then held once
                    shared = {"metadata": file.metadata, "read_dictionary": [fields.text]}
                    few, reader = 256, parquet.ParquetFile(path, **options, **shared)
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


def _stated(file: Any, group: int, name: str) -> int:
    """Bytes of a column in a row group, as the file states them."""
    found = file.metadata.row_group(group)
    columns = [found.column(i) for i in range(found.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == name)


def _records(batch: Any, fields: Fields) -> Iterator[dict | None]:
    """The rows of a batch, one at a time; None for one whose text is too large."""
    texts = batch.column(batch.schema.get_field_index(fields.text))
    for i in range(batch.num_rows):
        text = getattr(texts[i], "value", texts[i]) if texts[i].is_valid else None
        large = hasattr(text, "as_buffer") and text.as_buffer().size > fields.max_bytes
        yield None if large else batch.slice(i, 1).to_pylist()[0]


def document_of(record: Any, fields: Fields, where: str) -> Document:
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
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell and UTF-8 cannot
        text = text.encode(errors="replace").decode()
    source: Any = record
    for name in fields.source.split("."):
        source = source.get(name) if isinstance(source, dict) else None
    return Document(text, source if isinstance(source, str) else "")


Reader = Callable[[Path, Fields, int], Iterator[tuple[Document | None, int]]]
READERS: dict[str, Reader] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".parquet": _read_parquet,
}
"""Suffix of a file's name to the function that reads its documents."""


def register_reader(suffix: str, read: Reader) -> None:
    """Adds a kind of file: `read(path, fields, start)` yields each document behind the first `start`, or None
    for one that is left out for its size, with the number of documents read so far.

    Raises ValueError for a suffix that is taken or is none, or for a `read` that cannot be called.
    """
    if READERS.get(suffix, read) is not read:
        raise ValueError(f"register_reader({suffix!r}): the suffix is taken; choose another")
    if not suffix.startswith(".") or suffix == "." or not callable(read):
        raise ValueError(f"register_reader({suffix!r}): expected a suffix such as .csv, and a function")
    READERS[suffix] = read


# ------------------------------ Python


@dataclass(frozen=True)
class TextShard:
    """One document in memory."""

    name: str
    text: str = field(repr=False)

    @property
    def identity(self) -> str:
        return f"{self.name}:{len(self.text)}"

    @property
    def single(self) -> bool:
        return True

    def read(self, cursor: int | None) -> Iterator[tuple[Document, int]]:
        return iter([] if cursor else [(Document(self.text), 1)])
