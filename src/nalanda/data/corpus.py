"""Where documents come from: local files, datasets of the Hugging Face Hub, and the running Python itself.

A corpus is a list of shards. A shard reads its documents in a fixed order and gives with each one a cursor
(plain JSON) from which another reading goes on behind it.
"""

from __future__ import annotations

import functools
import glob
import gzip
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.machinery import BuiltinImporter, ExtensionFileLoader
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nalanda.common.errors import InputError, first_line

if TYPE_CHECKING:
    from nalanda.data.loader import DataConfig

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
FOLDERS = ("train", "validation", "test")  # what the parts of a directory are called
MAX_DOCUMENT = 64 << 20  # bytes of a document, unless the recipe says otherwise
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


@dataclass
class Corpus:
    """The shards of one split, and which of their documents belong to it."""

    shards: list[Shard]
    keep: Callable[[str], bool] = not_blank
    ordered: bool = False  # one text: its documents are never shuffled

    @property
    def fingerprint(self) -> str:
        return blake2b("\n".join(s.identity for s in self.shards).encode(), digest_size=8).hexdigest()

    @functools.cached_property
    def hashed(self) -> tuple[int, int]:
        """Bytes up to which a file is hashed whole, and bytes of each of the samples of a larger one."""
        sizes = [shard.size for shard in self.shards if isinstance(shard, FileShard)]
        whole = WHOLE if sum(size for size in sizes if size <= WHOLE) <= AT_ONCE else 0
        return whole, min(1 << 16, max(1 << 12, AT_ONCE // (SAMPLES * max(1, len(sizes)))))

    def content(self, number: int) -> str:
        """A hash of what is in a shard, which its size does not tell.

        A file of up to `WHOLE` bytes is hashed whole, a larger one at `SAMPLES` places, spread evenly from
        its head to its tail; so is every file of a corpus whose small ones are above `AT_ONCE` together. The
        hash is "" of what lies elsewhere: there the name, with its revision, stands for the content.
        """
        shard = self.shards[number]
        if isinstance(shard, FileShard):
            return _hash_file(shard.path, shard.size, *self.hashed)
        return f"{_hash(shard.text):016x}" if isinstance(shard, TextShard) else ""

    def contents(self, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """The hashes of all shards by their names, those that are `known` taken from there; {} where some
        shards lie elsewhere."""
        if not all(isinstance(shard, (FileShard, TextShard)) for shard in self.shards):
            return {}
        names = [str(getattr(shard, "path", shard.identity)) for shard in self.shards]
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda i: known.get(names[i]) or self.content(i), range(len(names)))
            return dict(zip(names, found, strict=True))


def open_corpus(data: DataConfig, split: str) -> Corpus:
    """The documents of `split`, "train" or "validation", as `data` describes them.

    Raises:
        InputError: nothing is there, or it is not in a form that can be read.
    """
    if data.mixture and not (split == "validation" and data.validation_source):
        return Corpus([MixtureShard(data, split)])
    source = data.validation_source if data.validation_source and split == "validation" else data.source
    shards, separate = _open(data, source, split)
    separate = separate or bool(data.validation_source)
    if data.documents == "joined":
        if not separate:
            raise InputError(
                f"data.documents: joined: {source} has no validation part, and one text has no documents to "
                "hold out; give data.validation_source"
            )
        return Corpus(shards, lambda text: True, ordered=True)
    if separate:
        return Corpus(shards)
    part = split == "validation"
    return Corpus(shards, lambda text: not_blank(text) and held_out(text, data.validation_share) == part)


def held_out(text: str, share: float) -> bool:
    """Whether a document is for validation. Its text alone decides: copies of a document never part."""
    return _hash(text) < share * 2**64


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class DocumentStream:
    """The documents of a corpus, each once an epoch, `epochs` times or without end.

    The order depends on `seed` and the epoch alone: a permutation of the shards, then, where shards hold many
    documents, a buffer from which every new document draws one out. No random generator is kept: each draw is
    a hash of its place, so that the state is all there is. An ordered corpus is read as it stands.

    Raises:
        InputError: an epoch has no document, or a shard cannot be read.
    """

    def __init__(self, corpus: Corpus, *, seed: int | str, buffer_size: int, epochs: int | None):
        self.corpus, self.seed, self.epochs = corpus, seed, epochs
        self.permuted = all(shard.single for shard in corpus.shards)  # to order shards is to order documents
        self.ordered = corpus.ordered
        self.buffer_size = 0 if self.permuted or self.ordered else buffer_size
        self.load_state_dict({"epoch": 0, "shard": 0, "cursor": None, "documents": 0, "buffer": []})

    def state_dict(self) -> dict:
        """Plain JSON: the epoch, the place in it, and the documents in the buffer."""
        return {
            "epoch": self.epoch,
            "shard": self.shard,  # in this epoch's order
            "cursor": self.cursor,  # in the shard
            "documents": self.documents,  # given in this epoch
            "buffer": [list(document) for document in self.buffer],
            **({"skipped": self.skipped} if self.skipped else {}),  # for their size, in all epochs
        }

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.shard, self.cursor = state["epoch"], state["shard"], state["cursor"]
        self.documents, self.buffer = state["documents"], [Document(*pair) for pair in state["buffer"]]
        self.skipped = state.get("skipped", 0)

    @property
    def ended(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    def __iter__(self) -> Iterator[Document]:
        while not self.ended:
            yield from self.rest_of_epoch()

    def texts(self) -> Iterator[str]:
        return (document.text for document in self)

    def rest_of_epoch(self) -> Iterator[Document]:
        """The documents that this epoch has not given yet; behind the last one the next epoch begins."""
        shards = self.corpus.shards
        order = range(len(shards))
        if not self.ordered:
            order = sorted(order, key=lambda index: self.draw("shard", index))
        while self.shard < len(order):
            for document, cursor in shards[order[self.shard]].read(self.cursor):
                self.cursor = cursor
                if document is None:
                    self.skipped += 1
                    continue
                if not self.corpus.keep(document.text):
                    continue
                if len(self.buffer) < self.buffer_size:
                    self.buffer.append(document)
                    continue
                if self.buffer:
                    place = self.draw("document", self.documents) % len(self.buffer)
                    document, self.buffer[place] = self.buffer[place], document
                self.documents += 1
                yield document
            self.shard, self.cursor = self.shard + 1, None
        while self.buffer:
            document = self.buffer.pop(self.draw("document", self.documents) % len(self.buffer))
            self.documents += 1
            yield document
        if not self.documents:
            raise InputError(
                "the corpus is empty: no document with text is left for this split; look at data.source "
                "and data.validation_share, or give a data.validation_source"
            )
        self.epoch, self.shard, self.documents = self.epoch + 1, 0, 0

    def draw(self, what: str, number: int, epoch: int | None = None) -> int:
        return _hash(f"{self.seed}/{self.epoch if epoch is None else epoch}/{what}/{number}")


def _open(data: DataConfig, source: str | list[str], split: str) -> tuple[list[Shard], bool]:
    """The shards of `split`, and whether the source itself keeps the two splits apart."""
    if isinstance(source, list) or source.startswith(("http://", "https://")):
        from nalanda.data.urls import open_urls

        return open_urls(data, source, split)
    if source == "python":
        texts = python_splits(data.validation_share)[split]
        return [TextShard(name, text) for name, text in texts.items()], True
    root = Path(source).expanduser()
    if is_prepared(root):
        raise InputError(f"{source} is a prepared set: it has tokens, and here texts are needed")
    if is_local(source):
        files, separate = _find_files(root, split)
        return [FileShard(path, name, Fields.of(data)) for name, path in files.items()], separate
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not source.endswith(SUFFIXES):
        from nalanda.data.urls import open_hub

        return open_hub(data, source, split)
    raise InputError(
        f"data.source {source!r} does not exist; give python, a local file, directory or glob, "
        "or a Hub dataset id such as cerebras/SlimPajama-627B"
    )


def is_local(source: str | list[str]) -> bool:
    """Whether the documents of `source` are files of this machine, or its Python's."""
    if isinstance(source, list) or source.startswith(("http://", "https://")):
        return False
    return source == "python" or Path(source).expanduser().exists() or glob.has_magic(source)


def is_prepared(source: str | os.PathLike) -> bool:
    from nalanda.data import token_set as prepared

    return prepared.is_prepared(source)


class MixtureShard:
    """The documents of a mixture's components, each once; while all last, by their weights in characters."""

    single = False

    def __init__(self, data: DataConfig, split: str):
        self.parts = {name: open_corpus(part, split) for name, part in data.parts().items()}
        self.weights = {part.name: part.weight for part in data.mixture}

    @property
    def identity(self) -> str:
        return " ".join(f"{name}:{corpus.fingerprint}" for name, corpus in self.parts.items())

    def read(self, cursor: int | None) -> Iterator[tuple[Document, int]]:
        left = {
            name: iter(DocumentStream(corpus, seed=0, buffer_size=0, epochs=1))
            for name, corpus in self.parts.items()
        }
        given, number = dict.fromkeys(left, 0), 0
        while left:
            name = min(left, key=lambda name: given[name] / self.weights[name])
            if (document := next(left[name], None)) is None:
                del left[name]
                continue
            given[name] += len(document.text)
            number += 1
            if number > (cursor or 0):
                yield document, number


# ------------------------------ local files


def _find_files(root: Path, split: str) -> tuple[dict[str, Path], bool]:
    """Files by name, sorted, and whether validation has files of its own."""
    if root.is_dir():
        names = [n for n in glob.glob("**/*", root_dir=root, recursive=True) if n.endswith(SUFFIXES)]
        files = {Path(n).as_posix(): root / n for n in sorted(names) if (root / n).is_file()}
        parts = {part: {n: p for n, p in files.items() if n.startswith(f"{part}/")} for part in FOLDERS}
        separate = bool(parts["validation"])
        if split == "validation" and separate:
            files = parts["validation"]
        else:
            files = parts["train"] or {n: p for n, p in files.items() if n.split("/")[0] not in FOLDERS}
    else:
        found = [root] if root.is_file() else sorted(map(Path, glob.glob(str(root), recursive=True)))
        files = {path.as_posix(): path for path in found if path.is_file()}
        separate = False
        for path in files.values():
            if not path.name.endswith(SUFFIXES):
                raise InputError(f"{path} is none of the kinds that can be read: {', '.join(SUFFIXES)}")
    if not files:
        raise InputError(f"no documents for {split} in {root}; readable files are {', '.join(SUFFIXES)}")
    if len({path.suffix == ".txt" for path in files.values()}) == 2:
        raise InputError(
            f"{root} holds .txt files beside shards; name the ones that are meant: {root}/**/*.jsonl"
        )
    return files, separate


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
        if self.single:
            return iter([] if cursor else [(_read_txt(self.path, self.size, self.fields), 1)])
        if not self.size:
            raise InputError(f"{self.path}, line 1: the file is empty; fetch it again or remove it")
        read = _read_parquet if self.path.suffix == ".parquet" else _read_jsonl
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


def _read_txt(path: Path, size: int, fields: Fields) -> Document | None:
    if size > fields.max_bytes:
        return fields.oversized(str(path), size)
    content = path.read_bytes()
    try:
        return Document(content.decode())
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


# Tests, tables, what is generated at build time, and the topics, which are read as text.
NOT_PROSE = {
    "__phello__", "__pycache__", "_bundled", "dist-packages", "encodings", "idle_test", "lib-dynload",
    "lib2to3", "pydoc_data", "site-packages", "test", "tests",
}  # fmt: skip
SHORTEST_DOCUMENT = 256  # characters
LETTERS = 0.7  # of a document, spaces included; tables of numbers have fewer
PASSAGE = 60  # characters; two documents that share a passage as long as this belong together


@functools.cache
def python_splits(share: float) -> dict[str, dict[str, str]]:
    """The running Python's documents by name: those of "train" and those of "validation"."""
    train, validation = split_families(without_copies(python_documents()), share)
    return {"train": train, "validation": validation}


def python_documents(only: Container[str] | None = None) -> dict[str, str]:
    """Text that every Python brings along: its language reference, its library's sources with the docstrings
    in them, and the docstrings of the modules that are written in C.

    Args:
        only: names of top-level modules (and "reference"), for a part of it.
    Raises:
        InputError: this Python comes without its library's sources or its language reference.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError(
            f"{sys.executable} has no pydoc_data.topics; install its full standard library"
        ) from None
    names = sorted(n for n in sys.stdlib_module_names if only is None or n in only)
    documents = {}
    if only is None or "reference" in only:
        documents = {f"reference/{name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_path("stdlib"))
    for name in names:
        for path in [library / f"{name}.py", *(library / name).rglob("*.py")]:
            parts = path.relative_to(library).parts
            if path.is_file() and not NOT_PROSE.intersection(parts):
                documents["/".join(parts)] = path.read_text(encoding="utf-8", errors="replace")
        documents[f"{name} (C)"] = _c_docstrings(name)
    documents = {name: _tidy(text) for name, text in sorted(documents.items())}
    documents = {n: t for n, t in documents.items() if len(t) >= SHORTEST_DOCUMENT and _is_prose(t)}
    if not documents:
        raise InputError(f"{library} holds no sources of the standard library; install all of it")
    return documents


def _c_docstrings(name: str) -> str:
    """The docstrings of a module without a Python source, laid out as one; "" for other modules."""
    if name.startswith(("_test", "_xx", "xx")) or name == "readline":  # importing readline may print
        return ""
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or not (
            spec.loader is BuiltinImporter or isinstance(spec.loader, ExtensionFileLoader)
        ):
            return ""
        module = importlib.import_module(name)
    except (ImportError, ValueError):  # built for another system, or __main__
        return ""
    parts = [f'"""{inspect.getdoc(module) or ""}"""']
    for key, value in sorted(vars(module).items()):
        if key.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if key.endswith("hook"):  # sys.excepthook and its kin: a program may have put its own there
            continue
        parts.append(_definition(key, value, ""))
        if inspect.isclass(value) and value.__module__ == name:
            members = sorted((k, v) for k, v in vars(value).items() if not k.startswith("_"))
            parts += [_definition(k, v, "    ") for k, v in members if inspect.isroutine(v)]
    return "\n\n".join(filter(None, parts)) if len(parts) > 1 else ""


def _definition(name: str, value: Any, indent: str) -> str:
    text = inspect.getdoc(value)
    if not text:
        return ""
    signature = re.sub(r"\$\w+(, )?", "", getattr(value, "__text_signature__", None) or "")
    head = f"class {name}:" if inspect.isclass(value) else f"def {name}{signature or '(...)'}:"
    body = f'"""{text}"""'.replace("\n", f"\n{indent}    ")
    return f"{indent}{head}\n{indent}    {body}"


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.expandtabs().splitlines()).strip() + "\n"


def _is_prose(text: str) -> bool:
    return sum(c.isalpha() or c.isspace() for c in text) >= LETTERS * len(text)


def _passages(text: str) -> dict[str, int]:
    """Paragraphs and docstrings of some length, spaces normalised, with their lengths."""
    blocks = (" ".join(block.split()) for block in re.split(r'\n\s*\n|"""|' + "'''", text))
    return {block: len(block) for block in blocks if len(block) >= PASSAGE}


def without_copies(documents: dict[str, str]) -> dict[str, str]:
    """Leaves out documents of which more than half stands in others: the longest of each kind stays."""
    seen: set[str] = set()
    kept = set()
    for name in sorted(documents, key=lambda n: (-len(documents[n]), n)):
        passages = _passages(documents[name])
        if 2 * sum(size for block, size in passages.items() if block in seen) <= sum(passages.values()):
            kept.add(name)
            seen.update(passages)
    return {name: text for name, text in documents.items() if name in kept}


def split_families(documents: dict[str, str], share: float) -> tuple[dict[str, str], dict[str, str]]:
    """Holds out about `share` of the characters. Documents that share a passage (a C module and its Python
    twin, two classes with one docstring) are a family and stay together: training sees nothing held out.
    """
    head = {name: name for name in documents}  # union-find

    def find(name: str) -> str:
        while head[name] != name:
            name = head[name]
        return name

    owner: dict[str, str] = {}
    for name, text in documents.items():
        for block in _passages(text):
            head[find(name)] = find(owner.setdefault(block, name))
    families: dict[str, list[str]] = {}
    for name in documents:
        families.setdefault(find(name), []).append(name)

    room = share * sum(map(len, documents.values()))
    validation = set()
    for members in sorted(families.values(), key=lambda members: _hash(members[0])):
        size = sum(len(documents[name]) for name in members)
        if size <= room:
            room -= size
            validation.update(members)
    return (
        {name: text for name, text in documents.items() if name not in validation},
        {name: text for name, text in documents.items() if name in validation},
    )
