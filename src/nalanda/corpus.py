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
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.machinery import BuiltinImporter, ExtensionFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nalanda.errors import InputError

if TYPE_CHECKING:
    from nalanda.data import DataConfig

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
FOLDERS = ("train", "validation", "test")  # what the parts of a directory are called
DOWNLOADED_SHARDS = 256  # into which a downloaded dataset is cut, so that their order can be shuffled


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

    def read(self, cursor: Any) -> Iterator[tuple[str, Any]]:
        """Documents behind `cursor` (None: from the beginning), each with the cursor that lies behind it."""
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


def open_corpus(data: DataConfig, split: str) -> Corpus:
    """The documents of `split`, "train" or "validation", as `data` describes them.

    Raises:
        InputError: nothing is there, or it is not in a form that can be read.
    """
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

    def __init__(self, corpus: Corpus, *, seed: int, buffer_size: int, epochs: int | None):
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
            "buffer": list(self.buffer),
        }

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.shard, self.cursor = state["epoch"], state["shard"], state["cursor"]
        self.documents, self.buffer = state["documents"], list(state["buffer"])

    @property
    def ended(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    def __iter__(self) -> Iterator[str]:
        while not self.ended:
            yield from self.rest_of_epoch()

    def rest_of_epoch(self) -> Iterator[str]:
        """The documents that this epoch has not given yet; behind the last one the next epoch begins."""
        shards = self.corpus.shards
        order = range(len(shards))
        if not self.ordered:
            order = sorted(order, key=lambda index: self.draw("shard", index))
        while self.shard < len(order):
            for text, cursor in shards[order[self.shard]].read(self.cursor):
                self.cursor = cursor
                if not self.corpus.keep(text):
                    continue
                if len(self.buffer) < self.buffer_size:
                    self.buffer.append(text)
                    continue
                if self.buffer:
                    place = self.draw("document", self.documents) % len(self.buffer)
                    text, self.buffer[place] = self.buffer[place], text
                self.documents += 1
                yield text
            self.shard, self.cursor = self.shard + 1, None
        while self.buffer:
            text = self.buffer.pop(self.draw("document", self.documents) % len(self.buffer))
            self.documents += 1
            yield text
        if not self.documents:
            raise InputError(
                "the corpus is empty: no document with text is left for this split; look at data.source "
                "and data.validation_share, or give a data.validation_source"
            )
        self.epoch, self.shard, self.documents = self.epoch + 1, 0, 0

    def draw(self, what: str, number: int) -> int:
        return _hash(f"{self.seed}/{self.epoch}/{what}/{number}")


def _open(data: DataConfig, source: str, split: str) -> tuple[list[Shard], bool]:
    """The shards of `split`, and whether the source itself keeps the two splits apart."""
    if source == "python":
        texts = python_splits(data.validation_share)[split]
        return [TextShard(name, text) for name, text in texts.items()], True
    root = Path(source).expanduser()
    if root.exists() or glob.has_magic(source):
        files, separate = _find_files(root, split)
        return [FileShard(path, name, data.text_field) for name, path in files.items()], separate
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not source.endswith(SUFFIXES):
        return _open_hub(data, source, split)
    raise InputError(
        f"data.source {source!r} does not exist; give python, a local file, directory or glob, "
        "or a Hub dataset id such as cerebras/SlimPajama-627B"
    )


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
    text_field: str

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.path.stat().st_size}"

    @property
    def single(self) -> bool:
        return self.path.suffix == ".txt"

    def read(self, cursor: int | None) -> Iterator[tuple[str, int]]:
        if self.single:
            return iter([] if cursor else [(_read_txt(self.path), 1)])
        if not self.path.stat().st_size:
            raise InputError(f"{self.path}, line 1: the file is empty; fetch it again or remove it")
        read = _read_parquet if self.path.suffix == ".parquet" else _read_jsonl
        return read(self.path, self.text_field, cursor or 0)


def _read_txt(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None


def _read_jsonl(path: Path, text_field: str, start: int) -> Iterator[tuple[str, int]]:
    lines = _lines(path)
    row = 0
    while True:
        try:
            line = next(lines, None)
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(f"{path}, line {row + 1}: corrupt or truncated ({_first_line(error)})") from None
        if line is None:
            return
        row += 1
        if row <= start or not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {row}: not JSON, or cut short ({_first_line(error)})") from None
        yield _text_of(record, text_field, f"{path}, line {row}"), row


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix == ".zst":
        tail = b""
        for chunk in _decompress_zst(path):
            *lines, tail = (tail + chunk).split(b"\n")
            yield from lines
        if tail:
            yield tail
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _decompress_zst(path: Path) -> Iterator[bytes]:
    """The content of all frames. zstandard's own reader takes a truncated frame for the end of the file."""
    import zstandard

    frame = None
    with path.open("rb") as file:
        while chunk := file.read(1 << 17):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                try:
                    yield frame.decompress(chunk)
                except zstandard.ZstdError as error:
                    raise EOFError(error) from None
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame:
        raise EOFError("the last frame has no end")


def _read_parquet(path: Path, text_field: str, start: int) -> Iterator[tuple[str, int]]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            if text_field not in file.schema_arrow.names:
                _text_of(dict.fromkeys(file.schema_arrow.names), text_field, f"{path}, row 1")
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start:
                    row += rows
                    continue
                for batch in file.iter_batches(256, row_groups=[group], columns=[text_field]):
                    for record in batch.to_pylist():
                        row += 1
                        if row > start:
                            yield _text_of(record, text_field, f"{path}, row {row}"), row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}, row {row + 1}: corrupt or truncated ({_first_line(error)})") from None


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise InputError(f"{where}: not an object with a field {text_field!r}")
    if text_field not in record:
        fields = ", ".join(map(str, record)) or "none"
        raise InputError(f"{where}: no field {text_field!r} (there are: {fields}); set data.text_field")
    text = record[text_field]
    if not isinstance(text, str):
        raise InputError(f"{where}: field {text_field!r} is not text but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell and UTF-8 cannot
        text = text.encode(errors="replace").decode()
    return text


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ------------------------------ the Hub


def _open_hub(data: DataConfig, source: str, split: str) -> tuple[list[Shard], bool]:
    import datasets

    try:
        names = datasets.get_dataset_split_names(source, data.name)
        separate = data.validation_split in names
        chosen = data.validation_split if split == "validation" and separate else data.train_split
        dataset: Any = datasets.load_dataset(source, data.name, split=chosen, streaming=data.streaming)
    except Exception as error:  # datasets, huggingface_hub and httpx have no common one
        raise InputError(
            f"data.source {source!r} is neither a local path nor a Hub dataset that can be loaded "
            f"({_first_line(error)})"
        ) from None
    if not data.streaming:
        dataset = dataset.to_iterable_dataset(num_shards=max(1, min(DOWNLOADED_SHARDS, len(dataset))))
    count = dataset.num_shards
    return [
        HubShard(dataset, f"{source}/{data.name}/{chosen}", data.text_field, i, count) for i in range(count)
    ], separate


@dataclass(frozen=True)
class HubShard:
    """One of the files behind a Hub dataset; the cursor is the dataset's own state."""

    dataset: Any = field(repr=False)
    name: str
    text_field: str
    index: int
    count: int

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.index}/{self.count}"

    @property
    def single(self) -> bool:
        return False

    def read(self, cursor: dict | None) -> Iterator[tuple[str, dict]]:
        dataset = self.dataset.shard(num_shards=self.count, index=self.index)
        if cursor:
            dataset.load_state_dict(cursor)
        for record in dataset:
            yield _text_of(record, self.text_field, self.identity), dataset.state_dict()


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

    def read(self, cursor: int | None) -> Iterator[tuple[str, int]]:
        return iter([] if cursor else [(self.text, 1)])


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
