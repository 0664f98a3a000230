"""Readers of files: a reader of each format, over a stream of each compression."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import itertools
import json
import lzma
import os
import re
import struct
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nalanda.common.errors import DiskFull, InputError, first_line, no_room
from nalanda.data.records import Document, Fields, Left, document_in, document_of, field_of

BLOCK = 1 << 17
"""Bytes read at a time."""

SLICE = 1 << 10
"""Compressed bytes per call: zstandard makes up to 128 kB of 4 bytes, so a call gives 32 MB at most."""

WINDOW = 128 << 20
"""Bytes that a compressed stream may refer back to; more where a document may be larger."""

DAMAGE = (
    EOFError,
    OSError,
    UnicodeDecodeError,
    csv.Error,
    lzma.LZMAError,
    struct.error,
    tarfile.TarError,
    zlib.error,
)
"""What reading raises for content that is corrupt or truncated; pyarrow has errors of its own."""

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow stream."""

T = TypeVar("T")

Documents = Iterator[tuple[Document | Left, int]]
"""Documents, each with the number of its row."""


class Reader(Protocol):
    """Reads the documents of one file. The same file must give the same documents each time. Memory is
    bounded by a small multiple of `fields.max_bytes`, however much a compressed file holds."""

    def __call__(
        self, path: Path, fields: Fields, start: int
    ) -> Iterator[tuple[Document | Left, int]]:
        """Reads on behind the first `start` rows.

        Args:
            path: the file, which is not empty.
            fields: the fields of a record that hold a document, and what is left out.
            start: rows to pass over; a row is whatever the format repeats (a line, a table row).

        Yields:
            `(document, row)` for the rows after `start`, with `row` counted from 1 at the top of the file,
            so that reading with `start=row` resumes after this document. Rows without content may be passed
            over but count. For a document above `fields.max_bytes`, yield `fields.oversized(where)` in its
            place, and `fields.unusable(where, why)` for a record without usable text: they raise where such
            documents are refused.

        Raises:
            InputError: names the path and the line or row that cannot be read.
        """
        ...


# ------------------------------ compressions


def read_blocks(path: Path, fields: Fields) -> Iterator[bytes]:
    """The decompressed content of a file, a bounded number of bytes at a time. Raises one of `DAMAGE`."""
    return COMPRESSIONS[compression_of(path.name)](path, max(WINDOW, fields.max_bytes))


def _read_plain(path: Path, window: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _read_gzip(path: Path, window: int) -> Iterator[bytes]:
    with gzip.open(path) as file:
        while block := file.read1(BLOCK):  # `read` loses what came before an error
            yield block


def _read_bzip2(path: Path, window: int) -> Iterator[bytes]:
    return _read_streams(path, bz2.BZ2Decompressor, window)


def _read_xz(path: Path, window: int) -> Iterator[bytes]:
    # The decoder takes a little more than the window, which its limit counts.
    limit = window + (1 << 20)
    return _read_streams(
        path, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=limit), window
    )


def _read_streams(path: Path, new: Callable[[], Any], window: int) -> Iterator[bytes]:
    """The content of all streams. (The modules' own files take a damaged second stream for the end.)"""
    stream, data, streams = None, b"", 0
    with path.open("rb") as file:
        while True:
            # The decompressor first gives all of what it holds; then it needs input.
            if not data and (stream is None or stream.needs_input):
                data = file.read(BLOCK)
                if not data:
                    break

            if stream is None:
                data = data.lstrip(b"\0") if streams else data  # padding between streams
                if not data:
                    continue
                stream, streams = new(), streams + 1

            try:
                yield stream.decompress(data, BLOCK)
            except lzma.LZMAError as error:
                if "emory usage limit" in str(error):
                    raise EOFError(_describe_window(window)) from None
                raise

            data = b""  # the rest is in the decompressor
            if stream.eof:
                data, stream = stream.unused_data, None

    if stream:
        raise EOFError("the last stream has no end")


def _read_zstandard(path: Path, window: int) -> Iterator[bytes]:
    """The content of all frames. (zstandard's own reader takes a truncated frame for the end of the file.)"""
    import zstandard

    window = min(window, 1 << 31)  # the library's bound
    frame = None
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            for start in range(0, len(block), SLICE):
                chunk = block[start : start + SLICE]
                while chunk:
                    if frame is None:
                        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
                        frame = decompressor.decompressobj()
                    try:
                        yield frame.decompress(chunk)
                    except zstandard.ZstdError as error:
                        if "too much memory" in str(error):
                            raise EOFError(_describe_window(window)) from None
                        raise EOFError(error) from None
                    # The next frame may begin within the slice.
                    chunk = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    if frame:
        raise EOFError("the last frame has no end")


def _describe_window(window: int) -> str:
    return (
        f"it was compressed with a window above {window >> 20} MiB; "
        "raise data.max_document_bytes to that window"
    )


COMPRESSIONS: dict[str, Callable[[Path, int], Iterator[bytes]]] = {
    "": _read_plain,
    ".gz": _read_gzip,
    ".zst": _read_zstandard,
    ".zstd": _read_zstandard,
    ".bz2": _read_bzip2,
    ".xz": _read_xz,
}
"""The decompressed blocks of a file, by its last suffix."""


@contextmanager
def _naming_damage(where: Callable[[], str], *more: type[Exception]) -> Iterator[None]:
    """Raises an `InputError` that begins with `where()` in place of one of `DAMAGE` or `more`."""
    try:
        yield
    except (*DAMAGE, *more) as error:
        raise InputError(f"{where()}: corrupt or truncated ({first_line(error)})") from None


def check_compression(path: Path, fields: Fields) -> None:
    """Raises `InputError` if the sums of a compressed file do not fit its content."""
    # A copy in the cache may be gone by now.
    if not compression_of(path.name) or not path.exists():
        return
    try:
        for _ in read_blocks(path, fields):
            pass
    except DAMAGE as error:
        raise InputError(
            f"{path}: corrupt or truncated ({first_line(error)}); restore it from its source"
        ) from None


def compression_of(name: str) -> str:
    """The suffix of a compression that `name` ends in; "" if there is none."""
    return next((c for c in COMPRESSIONS if c and name.lower().endswith(c)), "")


@contextmanager
def _decompressed_copy(path: Path, fields: Fields) -> Iterator[Path]:
    """A file with the decompressed content, for a format that is not read from front to back."""
    if not compression_of(path.name):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="nalanda-") as file:
        for block in read_blocks(path, fields):
            try:
                # Flushed, so that a full disk fails here, and a reader by name sees all.
                file.write(block)
                file.flush()
            except OSError as error:
                if not no_room(error):
                    raise
                folder = os.path.dirname(file.name)
                raise DiskFull(
                    f"{path}: no space left in {folder}, where it is decompressed; "
                    "make room, or set TMPDIR to another folder"
                ) from None
        yield Path(file.name)


# ------------------------------ text, lines, values


class _Piece:
    """The bytes of a record. Once they are too many, none are held."""

    def __init__(self, fields: Fields):
        self.fields, self.parts, self.size = fields, [], 0

    def add(self, fragment: bytes) -> bool:
        """Returns whether reading may go on: it may not for a record that will be refused."""
        self.size += len(fragment)
        if self.size <= self.fields.max_bytes:
            self.parts.append(fragment)
            return True
        self.parts.clear()
        return self.fields.skip

    def take(self) -> bytes | Left:
        """The bytes so far; the next record begins."""
        fits = self.size <= self.fields.max_bytes
        content = b"".join(self.parts) if fits else Left.OVERSIZED
        self.parts, self.size = [], 0
        return content


def split_lines(blocks: Iterable[bytes], fields: Fields) -> Iterator[tuple[bytes | Left, int]]:
    """Yields lines without their ends, and their lengths in bytes.

    A line above `fields.max_bytes` is not held. It is the last, unless lines too long are skipped.
    """
    piece = _Piece(fields)
    for block in blocks:
        *ends, rest = block.split(b"\n")
        for end in ends:
            # The first line end completes what earlier blocks began.
            piece.add(end)
            size = piece.size
            yield piece.take(), size
        if not piece.add(rest):
            break
    if size := piece.size:
        yield piece.take(), size


_STRING_END = re.compile(rb'["\\]')

_MARK = re.compile(rb'["\[\]{},]')


def split_array(blocks: Iterable[bytes], fields: Fields) -> Iterator[bytes | Left]:
    """The values of a JSON array as bytes. One above `fields.max_bytes` is not held. It is the last, unless
    values too large are skipped."""
    depth, in_string, escaped, piece = 0, False, False, _Piece(fields)
    blocks = iter(blocks)
    for block in blocks:
        start = position = 0  # of the value, and of the scan, in this block
        while position < len(block):
            # The character behind a backslash, which may begin the next block.
            if escaped:
                escaped, position = False, position + 1
                continue

            # Only these marks change the state; all else is passed over.
            match = (_STRING_END if in_string else _MARK).search(block, position)
            if not match:
                break
            mark, position = match[0], match.end()
            if in_string:
                # A backslash keeps the string open, a quote ends it.
                escaped, in_string = mark == b"\\", mark == b"\\"
            elif mark == b'"':
                in_string = True
            elif mark in b"[{":
                depth += 1
                start = position if depth == 1 else start
            elif mark in b"]}":
                depth -= 1

            # A value ends at a comma between values, or at the end of the array.
            if depth == 0 or (depth == 1 and mark == b"," and not in_string):
                piece.add(block[start : position - 1])
                start = position
                value = piece.take()
                # Nothing before the closing bracket is no value: of an empty array, or behind a last comma.
                if depth or isinstance(value, Left) or value.strip():
                    yield value

            if depth == 0:
                rest = itertools.chain([block[position:]], blocks)
                if any(content.strip() for content in rest):
                    raise EOFError("text follows the end of the array")
                return

        if depth and not piece.add(block[start:]):
            yield piece.take()
            return
    raise EOFError("the array has no end")


_FIELD_END = re.compile(rb"[,\n]")


def split_table(blocks: Iterable[bytes], fields: Fields) -> Iterator[bytes | Left]:
    """The rows of a CSV file as bytes, a row that quotes line ends as one. Bounded as `split_array` is."""
    quoted, doubled, begins, piece = False, False, True, _Piece(fields)
    for block in blocks:
        start = position = 0  # of the row, and of the scan, in this block
        while position < len(block):
            if doubled:  # a quote within quotes: their end, or the first of two
                doubled, quoted = False, block[position : position + 1] == b'"'
                position += quoted
                continue

            if quoted:
                # Within quotes only a quote counts, so line ends pass.
                quote = block.find(b'"', position)
                doubled = quote >= 0
                position = quote + 1 if doubled else len(block)
                continue

            # A quote opens a field only at its beginning.
            if begins and block[position : position + 1] == b'"':
                quoted, begins, position = True, False, position + 1
                continue

            end = _FIELD_END.search(block, position)
            begins = end is not None
            position = end.end() if end else len(block)
            if end and end[0] == b"\n":
                piece.add(block[start : position - 1])
                yield piece.take()
                start = position

        if not piece.add(block[start:]):
            yield piece.take()
            return

    if quoted and not doubled:
        raise EOFError("a quoted field has no end")
    if piece.size:
        yield piece.take()


def _parse_pieces(
    path: Path,
    pieces: Iterator[bytes | Left],
    fields: Fields,
    start: int,
    what: str,
    parse: Callable[[bytes, Fields, str], Document | Left | None] = document_in,
) -> Documents:
    """The documents of a file's pieces behind the first `start`.

    what: the word for a piece in messages. parse: makes the document of a piece, or None of a blank one; its
    last argument names the piece in messages.
    """
    row = 0
    with _naming_damage(lambda: f"{path}, {what} {row + 1}"):
        for row, piece in enumerate(pieces, 1):
            where = f"{path}, {what} {row}"
            # Before `start` too, a piece that is refused is refused.
            if isinstance(piece, Left):
                piece = fields.oversized(where)
            if row <= start:
                continue
            if isinstance(piece, Left):
                yield piece, row
            elif (document := parse(piece, fields, where)) is not None:
                yield document, row


def _parse_line(line: bytes, fields: Fields, where: str) -> Document | Left | None:
    return document_in(line, fields, where) if line.strip() else None


def read_txt(path: Path, fields: Fields, start: int) -> Documents:
    """The whole file as one document."""
    if start:
        return
    # The size of a compressed file says nothing about its text.
    size = None if compression_of(path.name) else path.stat().st_size
    text = _Piece(fields)
    line = 1
    with _naming_damage(lambda: f"{path}, line {line}"):
        for block in read_blocks(path, fields):
            line += block.count(b"\n")
            text.add(block)
            # The rest of a text that is too large is not read.
            if text.size > fields.max_bytes:
                break

    content = text.take()
    if isinstance(content, Left):
        yield fields.oversized(str(path), size), 1
        return
    yield _decode_text(content, fields, str(path), ", line "), 1


def _decode_text(content: bytes, fields: Fields, where: str, line: str = "") -> Document | Left:
    """A document of bytes, without a byte-order mark. line: words before the number of a line."""
    try:
        return Document(content.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        return fields.unusable(
            f"{where}{line}{number}" if line else where,
            f"not UTF-8 ({error.reason}; iconv converts files)",
        )


def read_jsonl(path: Path, fields: Fields, start: int) -> Documents:
    """JSON Lines: an object a line."""
    lines = (line for line, _ in split_lines(read_blocks(path, fields), fields))
    return _parse_pieces(path, lines, fields, start, "line", _parse_line)


def read_json(path: Path, fields: Fields, start: int) -> Documents:
    """An array of objects, or JSON Lines by the name of .json; the first character tells."""
    if not _is_array(path, fields):
        yield from read_jsonl(path, fields, start)
        return
    values = split_array(read_blocks(path, fields), fields)
    yield from _parse_pieces(path, values, fields, start, "item")


def _is_array(path: Path, fields: Fields) -> bool:
    """Whether the first character of a JSON file begins an array."""
    with suppress(*DAMAGE):  # reading the documents finds the damage again
        for block in read_blocks(path, fields):
            if begin := block.removeprefix(codecs.BOM_UTF8).lstrip():
                return begin[:1] == b"["
    return False


def read_csv(path: Path, fields: Fields, start: int) -> Documents:
    """A table whose first row names the columns."""
    # The library refuses cells above a limit of its own, which is 128 KiB at first.
    if csv.field_size_limit() < fields.max_bytes:
        csv.field_size_limit(fields.max_bytes)
    lines = split_table(read_blocks(path, fields), fields)
    with _naming_damage(lambda: f"{path}, line 1"):
        header = next(lines, b"")
        names = _split_cells(
            b"" if isinstance(header, Left) else header.removeprefix(codecs.BOM_UTF8)
        )

    def parse(line: bytes, fields: Fields, where: str) -> Document | Left | None:
        if not line.strip():
            return None
        try:
            cells = _split_cells(line)
        except UnicodeDecodeError as error:
            return fields.unusable(where, f"not UTF-8 ({first_line(error)})")
        except csv.Error as error:
            return fields.unusable(where, f"not CSV ({first_line(error)})")
        # A row may lack its last cells, or have some without a name.
        return document_of(dict(zip(names, cells, strict=False)), fields, where)

    yield from _parse_pieces(path, lines, fields, start, "row", parse)


def _split_cells(line: bytes) -> list[str]:
    """The cells of a row. Raises `csv.Error` or `UnicodeDecodeError`."""
    return next(csv.reader([line.removesuffix(b"\r").decode()]), [])


# ------------------------------ tables by columns


def read_parquet(path: Path, fields: Fields, start: int) -> Documents:
    """A Parquet file, by batches of a row group."""
    import pyarrow
    from pyarrow import parquet

    row = 0
    options: Any = {"page_checksum_verification": True}
    # Opened once: a shard of a URL may leave its cache while it is read.
    with (
        _naming_damage(lambda: f"{path}, row {row + 1}", pyarrow.ArrowException),
        _decompressed_copy(path, fields) as plain,
        pyarrow.OSFile(str(plain)) as handle,
        parquet.ParquetFile(handle, **options) as file,
    ):
        names = file.schema_arrow.names
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if row + count <= start:
                row += count
                continue

            stated = _count_column_bytes(file, group, fields.text)
            # No value is larger than its column.
            large = stated > fields.max_bytes
            # A lone row is as large as its column, overhead apart: it is left out without being read.
            if large and count == 1 and stated > fields.max_bytes + BLOCK:
                row += 1
                yield fields.oversized(f"{path}, row {row}"), row
                continue

            # No row exceeds its column, so a batch has at most 4 · max_bytes of text.
            at_once = max(1, min(256, 4 * fields.max_bytes // max(1, stated)))
            reader = file
            if large:  # as a dictionary, a value that many rows share is held once
                at_once = 256
                shared = {"metadata": file.metadata, "read_dictionary": [fields.text]}
                reader = parquet.ParquetFile(handle, **options, **shared)
            columns = [fields.text, fields.source]  # those that the file has are read
            for batch in reader.iter_batches(at_once, row_groups=[group], columns=columns):
                # Rows up to `start`, in the group or the batch where it lies.
                passed = min(batch.num_rows, max(0, start - row))
                row += passed
                batch = batch.slice(passed)
                for document in _documents_of_batch(batch, names, fields, path, row):
                    row += 1
                    yield document, row


def _count_column_bytes(file: Any, group: int, name: str) -> int:
    """Uncompressed bytes of a column in a row group, as the file's metadata states them."""
    described = file.metadata.row_group(group)
    total = 0
    for number in range(described.num_columns):
        column = described.column(number)  # a struct has one for each of its fields
        if f"{column.path_in_schema}.".startswith(f"{name}."):
            total += column.total_uncompressed_size
    return total


def read_arrow(path: Path, fields: Fields, start: int) -> Documents:
    """An Arrow file or stream, as `save_to_disk` of the datasets library writes them."""
    import pyarrow

    row = 0
    # Mapped, so that a batch takes no memory and one that is passed over is not read.
    with (
        _naming_damage(lambda: f"{path}, row {row + 1}", pyarrow.ArrowException),
        _decompressed_copy(path, fields) as plain,
        plain.open("rb") as opened,
        pyarrow.memory_map(str(plain)) as handle,
    ):
        size = handle.size()
        names, batches = _open_batches(handle, fields)
        while True:
            # To read a page of the map that the file has lost would end the process.
            if os.fstat(opened.fileno()).st_size != size:
                raise EOFError("it was cut short while it was read")
            batch = next(batches, None)
            if batch is None:
                break

            # Rows up to `start`, where it lies in this batch.
            passed = min(batch.num_rows, max(0, start - row))
            row += passed
            batch = batch.slice(passed)
            for first in range(0, batch.num_rows, 256):
                piece = batch.slice(first, 256)
                for document in _documents_of_batch(piece, names, fields, path, row):
                    row += 1
                    yield document, row


def _open_batches(handle: Any, fields: Fields) -> tuple[list[str], Iterator[Any]]:
    """The names of all columns, and the batches of an Arrow file, without columns that hold neither text nor source."""
    from pyarrow import ipc

    is_file = handle.read_at(6, 0) == b"ARROW1"
    opened = (ipc.open_file if is_file else ipc.open_stream)(handle)
    names = opened.schema.names
    # A file's messages begin behind ARROW1 and two bytes of padding.
    _check_expansion(handle, 8 if is_file else 0, max(WINDOW, 4 * fields.max_bytes))
    columns = {fields.text, fields.source}
    columns |= {name.split(".")[0] for name in columns}  # of a field of a struct, the struct
    numbers = [number for number, name in enumerate(names) if name in columns]
    options = ipc.IpcReadOptions(included_fields=numbers)
    handle.seek(0)

    def read_file() -> Iterator[Any]:
        reader = ipc.open_file(handle, options=options)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)

    def read_stream() -> Iterator[Any]:
        yield from ipc.open_stream(handle, options=options)

        # The library takes a stream that was cut between two messages for a whole one.
        end = max(0, handle.tell() - len(END_OF_STREAM))
        if handle.read_at(len(END_OF_STREAM), end) != END_OF_STREAM:
            raise EOFError("the stream has no end")

    return names, read_file() if is_file else read_stream()


def _check_expansion(handle: Any, start: int, most: int) -> None:
    """Raises `EOFError` for a batch whose compressed buffers make more than `most` bytes together.

    pyarrow would expand and hold them all. It neither limits nor tells their sizes, so they are read from the
    message. start: where the messages begin.
    """
    from pyarrow import ArrowException, ipc

    handle.seek(start)
    with suppress(ArrowException, OSError):  # damage is found by reading
        for message in ipc.MessageReader.open_stream(handle):
            size = 0 if message.type == "schema" else _expanded_bytes(message)
            if size > most:
                raise EOFError(
                    f"a compressed batch of {size:,} bytes, above {most:,}; write smaller batches"
                )


def _expanded_bytes(message: Any) -> int:
    """Bytes of a batch's compressed buffers once they are expanded.

    The message's header is a flatbuffer of Arrow's Message.fbs, which pyarrow does not open in Python.
    """
    data = message.metadata.to_pybytes()

    def number(kind: str, offset: int) -> int:
        return struct.unpack_from(f"<{kind}", data, offset)[0]

    def field(table: int, index: int) -> int:
        """The offset of a table's field; 0 if the table lacks it."""
        # The table's list of offsets: its size and the table's, uint16 each, then one for each field.
        offsets = table - number("i", table)
        if 4 + 2 * index >= number("H", offsets):
            return 0
        within = number("H", offsets + 4 + 2 * index)
        return table + within if within else 0

    def follow(offset: int) -> int:
        return offset + number("I", offset)

    # Message.header, which of a DictionaryBatch has the batch in its `data`
    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    if not field(batch, 3):  # RecordBatch.compression
        return 0

    # RecordBatch.buffers: their count, then (offset in the body, length) of each, int64 both
    buffers = follow(field(batch, 2))
    first, total = buffers + 4, 0
    entries = data[first : first + 16 * number("I", buffers)]
    for offset, length in struct.iter_unpack("<qq", entries):
        if length >= 8:  # a buffer begins with its expanded size; -1: it is not compressed
            head = message.body.slice(offset, 8).to_pybytes()
            total += max(0, int.from_bytes(head, "little", signed=True))
    return total


def _find_column(rows: Any, path: str) -> Any:
    """The column of a field (`field_of`) in an array of structs; None: no such field."""
    from pyarrow import compute, types

    if not types.is_struct(rows.type):
        return None
    head, dot, rest = path.partition(".")
    if rows.type.get_field_index(path) >= 0:  # a name with dots comes before a path
        head, dot = path, ""
    number = rows.type.get_field_index(head)
    if number < 0:
        return None
    # pyarrow makes this function when it is imported.
    column = compute.struct_field(rows, number)  # pyrefly: ignore[missing-attribute]
    return _find_column(column, rest) if dot else column


def _documents_of_batch(
    batch: Any, names: list[str], fields: Fields, path: Path, row: int
) -> Iterator[Document | Left]:
    """The documents of a batch, whose first row is the one after `row`. names: all columns of the file."""
    from pyarrow import nulls, types

    rows = batch.to_struct_array()
    texts, sources = _find_column(rows, fields.text), _find_column(rows, fields.source)
    if texts is None:
        for number in range(row + 1, row + 1 + batch.num_rows):
            yield document_of(dict.fromkeys(names), fields, f"{path}, row {number}")
        return

    if sources is None:
        sources = nulls(len(texts))

    # All at once, if none may be too large. In a dictionary many rows may share a large one.
    if texts.nbytes <= fields.max_bytes and not types.is_dictionary(texts.type):
        try:
            pairs = [*zip(texts.to_pylist(), sources.to_pylist(), strict=True)]
        except UnicodeDecodeError:  # of one row, which is found below
            pass
        else:
            for text, source in pairs:
                row += 1
                record = {fields.source: source, fields.text: text}
                yield document_of(record, fields, f"{path}, row {row}")
            return

    # Else one by one.
    for value, source in zip(texts, sources, strict=True):
        row += 1
        where = f"{path}, row {row}"
        # In a dictionary the text lies within the value. Its buffer tells the size without a copy.
        text = getattr(value, "value", value) if value.is_valid else None
        if hasattr(text, "as_buffer") and text.as_buffer().size > fields.max_bytes:
            yield fields.oversized(where)
            continue
        try:
            record = {fields.source: source.as_py(), fields.text: value.as_py()}
        except UnicodeDecodeError as error:
            yield fields.unusable(where, f"not UTF-8 ({error.reason})")
            continue
        yield document_of(record, fields, where)


# ------------------------------ archives

_MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")
"""Key and ending of a member. The samples of a webdataset are neighbouring members of one key."""


class _Forward:
    """A file that is read once, from front to back, with no read above `most` bytes."""

    def __init__(self, blocks: Iterator[bytes], most: int):
        self.blocks, self.most = filter(None, blocks), most
        self.block, self.used, self.position, self.last = b"", 0, 0, b""

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        while self.position < position and self.read(min(BLOCK, position - self.position)):
            pass

    def read(self, size: int) -> bytes:
        if size > self.most:
            raise EOFError(f"a header of {size:,} bytes")
        pieces = []
        while size:
            if self.used == len(self.block):
                self.block, self.used = next(self.blocks, b""), 0
                if not self.block:
                    break
            piece = self.block[self.used : self.used + size]
            pieces.append(piece)
            self.used += len(piece)
            self.position += len(piece)
            size -= len(piece)
        # It tells how the archive ended: a whole one ends in a block of zeros.
        self.last = b"".join(pieces)
        return self.last


def read_tar(path: Path, fields: Fields, start: int) -> Documents:
    """A webdataset: text is in a sample's .txt, or in a field of its .json, which also names the source."""
    for row, sample in _read_samples(path, fields, start):
        where = f"{path}, row {row}"
        if Left.OVERSIZED in sample.values():
            yield fields.oversized(where), row
            continue

        try:
            record: Any = json.loads(sample["json"]) if "json" in sample else {}
        except (ValueError, RecursionError) as error:
            yield fields.unusable(where, f"not JSON, or cut short ({first_line(error)})"), row
            continue

        # The text is in .txt, and .json only names the source; or .json has both.
        if "txt" in sample:
            document = _decode_text(sample["txt"], fields, where)
            if isinstance(document, Document):
                source = field_of(record, fields.source)
                record = {fields.source: source, fields.text: document.text}
                document = document_of(record, fields, where)
            yield document, row
        elif sample:
            yield document_of(record, fields, where), row
        else:
            yield fields.unusable(where, "a sample without .txt and .json"), row


def _read_samples(path: Path, fields: Fields, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The samples behind the first `start`: the contents of their .txt and .json."""
    row, key, sample = 0, None, {}
    with _naming_damage(lambda: f"{path}, row {max(row, 1)}"):
        file: Any = _Forward(read_blocks(path, fields), max(1 << 20, fields.max_bytes))
        archive: Any = tarfile.TarFile(fileobj=file)
        with archive:
            while member := archive.next():
                archive.members.clear()  # it would keep all of them
                match = _MEMBER.fullmatch(member.name)
                if not match or not member.isfile():
                    continue
                if match[1] != key:  # the next sample begins
                    if row > start:
                        yield row, sample
                    row, key, sample = row + 1, match[1], {}
                ending = match[2].lower()
                if row <= start or ending not in ("txt", "json"):
                    continue
                if member.size > fields.max_bytes:
                    sample[ending] = Left.OVERSIZED
                elif content := archive.extractfile(member):
                    sample[ending] = content.read(member.size)
            # The library takes a damaged header, or none, for the end.
            if file.last != bytes(tarfile.BLOCKSIZE):
                raise EOFError("a header is damaged, or the archive has no end")
            for _ in file.blocks:  # so that the compression's own check is made
                pass
    if row > start:
        yield row, sample


# ------------------------------ the table

FORMATS: dict[str, Reader] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".tar": read_tar,
}
"""The reader of each format. A row here is all that another format needs."""

READERS: dict[str, Reader] = {
    form + compression: read for form, read in FORMATS.items() for compression in COMPRESSIONS
}
"""The reader of each suffix."""

NOTES = {".json", ".csv"}
"""Formats that often describe a folder's documents (`documents_among`)."""

FIRST = {".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"}
"""Suffixes that no plugin may take. Plugins took others before Nalanda read them."""


def register_reader(suffix: str, read: Reader) -> None:
    """Adds the reader of another suffix. Raises ValueError for a suffix that is taken, or is not one."""
    registered = READERS.get(suffix.lower(), read)
    may_replace = suffix.lower() not in FIRST and registered in FORMATS.values()
    if registered is not read and not may_replace:
        raise ValueError(f"register_reader({suffix!r}): the suffix is taken; choose another")
    if not suffix.startswith(".") or suffix == "." or not callable(read):
        raise ValueError(
            f"register_reader({suffix!r}): expected a suffix such as .csv, and a function"
        )
    READERS[suffix.lower()] = read


def reader_of(path: Path) -> Reader:
    """The reader of the longest suffix that fits. Raises `InputError` if none does."""
    if not (suffix := suffix_of(path.name)):
        raise InputError(
            f"{path}: no reader for this suffix; files may end in {', '.join(suffixes())}; "
            "name plain text .txt"
        )
    return READERS[suffix]


def suffixes() -> tuple[str, ...]:
    """The suffixes that have a reader now, as messages list them."""
    more = [s for s in READERS if s not in FORMATS and READERS[s] not in FORMATS.values()]
    *formats, last = FORMATS
    compressions = "/".join(c for c in COMPRESSIONS if c)
    return (*more, *formats, f"{last} (or these with {compressions})")


def suffix_of(name: str) -> str:
    """The longest suffix with a reader that `name` ends in, in either case; "" if there is none."""
    name = name.lower()
    dot = name.find(".")
    while dot >= 0:
        if name[dot:] in READERS:
            return name[dot:]
        dot = name.find(".", dot + 1)
    return ""


def documents_among(files: Mapping[str, T], counts: Counter[str]) -> dict[str, T]:
    """The files of a folder that hold its documents, by name; the others are counted by their suffixes.

    Plain .json and .csv files often describe documents, so they are taken only where no other file is.
    """
    formats = {name: suffix_of(name) for name in files}
    builtin = {suffix for suffix in NOTES if READERS[suffix] is FORMATS[suffix]}
    shards = {suffix for suffix in formats.values() if suffix and suffix not in builtin}
    notes: set[str] = set()
    if shards:
        notes = builtin
    elif ".csv" in formats.values():
        notes = builtin & {".json"}

    documents = {}
    for name, suffix in formats.items():
        if suffix and suffix not in notes:
            documents[name] = files[name]
        else:
            counts[Path(name).suffix or "."] += 1
    return documents


def refuse_two_kinds(source: str, names: Iterable[str]) -> None:
    """Raises `InputError` if files of one document lie beside files of many."""
    if len({is_single(name) for name in names}) == 2:
        raise InputError(
            f"{source}: .txt files lie beside shards; name the files to read, such as {source}/**/*.jsonl"
        )


def is_single(name: str) -> bool:
    """Whether a file of this name is one document."""
    return name[: len(name) - len(compression_of(name))].lower().endswith(".txt")
