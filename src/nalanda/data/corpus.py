"""The corpus of a split: shards of local files, URLs, the Hub or this Python, and a stream over them.

A shard (`documents.Shard`) reads its documents in a fixed order and gives with each one a cursor, plain JSON,
from which a later reading resumes.
"""

from __future__ import annotations

import functools
import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

from nalanda.common.errors import InputError
from nalanda.common.text import is_url, redact
from nalanda.config.schema import DataConfig
from nalanda.data.documents import (
    NAMES,
    Document,
    Fields,
    FileShard,
    Shard,
    TextShard,
    digest,
    files_of,
    hash_text,
    is_single,
    not_blank,
    reader_of,
    split_of,
    suffix_of,
    suffixes,
)
from nalanda.data.hub import is_hub_id, open_hub
from nalanda.data.python_docs import python_splits
from nalanda.data.token_set import is_token_set, megatron_splits
from nalanda.data.urls import open_urls

WHOLE = 64 << 20
"""Bytes up to which a file is hashed whole; of a larger one samples are."""

AT_ONCE = 4 << 30
"""Bytes hashed at a start; where whole files would be more, all are sampled."""

SAMPLES = 16
"""Samples of a file, head and tail included."""


def source_of(data: DataConfig, split: str) -> str | list[str]:
    """The source that `split` is read from."""
    return data.validation_source if split == "validation" and data.validation_source else data.source


def is_local(source: str | list[str]) -> bool:
    """Whether the documents of `source` are files of this machine or belong to its Python."""
    if isinstance(source, list) or is_url(source):
        return False
    return source == "python" or Path(source).expanduser().exists() or glob.has_magic(source)


def open_corpus(data: DataConfig, split: str) -> Corpus:
    """The documents of `split`, "train" or "validation", as `data` describes them.

    Raises:
        InputError: the source does not exist or cannot be read.
    """
    if data.mixture and not (split == "validation" and data.validation_source):
        return Corpus([MixtureShard(data, split)])
    source = source_of(data, split)
    shards, counts = _open_shards(data, source, split)
    separate = bool(counts.get("validation") or data.validation_source)
    if data.documents == "joined":
        if not separate:
            raise InputError(
                f"data.documents: joined: {source} has no validation part, and one text has no documents to "
                "hold out; give data.validation_source"
            )
        return Corpus(shards, lambda text: True, ordered=True, counts=counts)
    if separate:
        return Corpus(shards, counts=counts)
    part = split == "validation"
    return Corpus(
        shards, lambda text: not_blank(text) and held_out(text, data.validation_share) == part, counts=counts
    )


def held_out(text: str, share: float) -> bool:
    """Whether a document is for validation. The text alone decides, so all its copies are in one split."""
    return hash_text(text) < share * 2**64


def check_apart(train: Corpus, validation: Corpus) -> None:
    """Raises `InputError` if a file of `data.validation_source` is trained on too."""
    known = {_place(shard) for shard in train.shards} - {None}
    if common := next((shard for shard in validation.shards if _place(shard) in known), None):
        raise InputError(
            f"data.validation_source: {_place(common)} is a training file too; leave it out of one, or "
            "leave validation_source out and data.validation_share is held out"
        )


def _place(shard: Shard) -> str | None:
    if isinstance(shard, FileShard):
        return str(shard.path.resolve())
    return None if isinstance(shard, TextShard) else shard.identity


def describe_files(data: DataConfig, counts: Mapping[str, int]) -> str:
    """How many files each split of `data.source` has, and what is left out; "" for a single file."""
    if sum(counts.values()) < 2:
        return ""
    left = {key: count for key, count in counts.items() if count and key.startswith(".")}
    left = {f"that end in {key}" if len(key) > 1 else "without suffix": n for key, n in left.items()}
    left["of a test split"] = counts["test"]
    left["of no split"] = counts[""] if counts["train"] else 0
    own = counts["validation"]
    if data.validation_source:
        left["of a validation split"], own = own, 0
    name = data.source if isinstance(data.source, str) else f"{data.source[0]} and others"
    train = counts["train"] or counts[""]
    line = f"{redact(name)}: {train} file{'s' * (train != 1)} for training"
    line += f", {own} for validation" if own else ""
    rest = ", ".join(f"{count} {what}" for what, count in left.items() if count)
    return f"{line}; left out: {rest}" if rest else line


def _open_shards(data: DataConfig, source: str | list[str], split: str) -> tuple[list[Shard], dict[str, int]]:
    """The shards of `split`, and `Corpus.counts`."""
    if isinstance(source, list) or is_url(source):
        return open_urls(data, source, split)
    if source == "python":
        texts = python_splits(data.validation_share)[split]
        return [TextShard(name, text) for name, text in texts.items()], {"validation": 1}
    root = Path(source).expanduser()
    if is_token_set(root):
        raise InputError(f"data.source: {source} is a token set, and texts are needed here; give its source")
    if megatron_splits(source):
        raise InputError(
            f"data.source: {source} is a Megatron set; make a token set of it: nalanda data prepare {source} "
            "OUT --tokenizer ITS_TOKENIZER"
        )
    if is_local(source):
        files, counts = _find_files(root, split)
        return [FileShard(path, name, Fields.of(data)) for name, path in files.items()], counts
    if is_hub_id(source):
        shards, separate = open_hub(data, source, split)
        return shards, {"validation": int(separate)}
    raise InputError(
        f"data.source: {source!r} does not exist; give python, a local file, directory or glob, "
        "or a Hub dataset id such as HuggingFaceFW/fineweb-edu"
    )


def _find_files(root: Path, split: str) -> tuple[dict[str, Path], dict[str, int]]:
    """Files by name, sorted, and `Corpus.counts`. In a directory the outermost folder that names a split
    decides, or else the file's own name. Of a glob every file is taken."""
    if root.is_dir():
        parts: dict[str, dict[str, Path]] = {part: {} for part in (*NAMES, "")}
        counts: Counter[str] = Counter()
        for name in sorted(_walk(root), key=os.fspath):
            if suffix_of(name.name):
                parts[split_of(name.parts[:-1], name.name)][name.as_posix()] = root / name
            else:
                counts[name.suffix or "."] += 1
        counts.update({part: len(found) for part, found in parts.items()})
        files = files_of(parts, split)
    else:
        found = [root] if root.is_file() else sorted(map(Path, glob.glob(str(root), recursive=True)))
        files = {path.as_posix(): path for path in found if path.is_file()}
        for path in files.values():
            reader_of(path)
        counts = Counter({"": len(files)})
    if odd := next((name for name in files if name.encode(errors="replace").decode() != name), None):
        raise InputError(f"{odd!r}: the name is not UTF-8; rename the file")
    if not files:
        raise InputError(f"{root}: no documents for {split}; files may end in {', '.join(suffixes())}")
    if len({is_single(path.name) for path in files.values()}) == 2:
        raise InputError(
            f"{root}: .txt files lie beside shards; name the files to read, such as {root}/**/*.jsonl"
        )
    return files, counts


def _walk(root: Path) -> Iterator[Path]:
    """The files below a folder, as relative paths, without hidden ones. A link to a folder is followed once.

    Raises `InputError` for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror}); make it readable, or name the files"
        )

    entered: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        place = Path(folder)
        folders[:] = sorted(
            (name for name in folders if name[0] != "."), key=lambda n: ((place / n).is_symlink(), n)
        )
        if (real := os.path.realpath(folder)) in entered:
            folders.clear()
            continue
        entered.add(real)
        for name in files:
            if name[0] != "." and (place / name).is_file():
                yield (place / name).relative_to(root)


@dataclass
class Corpus:
    """The shards of one split, and which of their documents belong to it."""

    shards: list[Shard]
    keep: Callable[[str], bool] = not_blank
    """The test that a text must pass to belong to the split."""
    ordered: bool = False
    """Whether the documents are one text and so never shuffled."""
    counts: Mapping[str, int] = field(default_factory=Counter)
    """Files of the source by split, "" for those of none, and those without a reader by suffix."""

    @property
    def fingerprint(self) -> str:
        return digest("\n".join(s.identity for s in self.shards))

    @functools.cached_property
    def hashed(self) -> tuple[int, int]:
        """Bytes up to which a file is hashed whole, and bytes of each sample of a larger one."""
        sizes = [shard.size for shard in self.shards if isinstance(shard, FileShard)]
        whole = WHOLE if sum(size for size in sizes if size <= WHOLE) <= AT_ONCE else 0
        return whole, min(1 << 16, max(1 << 12, AT_ONCE // (SAMPLES * max(1, len(sizes)))))

    def content(self, number: int) -> str:
        """A hash of a shard's content, which sees edits that leave the size unchanged.

        A file of up to `WHOLE` bytes is hashed whole. A larger one is hashed at `SAMPLES` places, spread
        evenly from head to tail; so is every file if those up to `WHOLE` exceed `AT_ONCE` together. The hash
        of a remote shard is "": its name, with its revision, stands for its content.
        """
        shard = self.shards[number]
        if isinstance(shard, FileShard):
            return _hash_file(shard.path, shard.size, *self.hashed)
        return digest(shard.text) if isinstance(shard, TextShard) else ""

    def contents(self, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """The hashes of all shards by name, `known` ones not computed again; {} if some are remote."""
        if not all(isinstance(shard, (FileShard, TextShard)) for shard in self.shards):
            return {}
        names = [str(getattr(shard, "path", shard.identity)) for shard in self.shards]
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda i: known.get(names[i]) or self.content(i), range(len(names)))
            return dict(zip(names, found, strict=True))


def _hash_file(path: Path, size: int, whole: int, sample: int) -> str:
    length = size if size <= max(whole, SAMPLES * sample) else sample
    places = [(size - length) * i // (SAMPLES - 1) for i in range(SAMPLES)] if length < size else [0]
    found = blake2b(str(size).encode(), digest_size=8)
    try:
        with path.open("rb", buffering=0) as file:
            for place in places:
                file.seek(place)
                left = length
                while left and (piece := file.read(min(left, 1 << 20))):
                    found.update(piece)
                    left -= len(piece)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); restore it") from None
    return found.hexdigest()


class DocumentStream:
    """The documents of a corpus, each once an epoch, for `epochs` epochs or without end (None).

    The order depends only on `seed` and the epoch: a permutation of the shards, then, where shards hold many
    documents, a shuffle buffer from which each new document draws another. Each draw is a hash of its
    position, so no random generator is part of the state. An ordered corpus is not shuffled.

    Raises:
        InputError: an epoch has no document, or a shard cannot be read.
    """

    def __init__(self, corpus: Corpus, *, seed: int | str, buffer_size: int, epochs: int | None):
        self.corpus, self.seed, self.epochs = corpus, seed, epochs
        self.permuted = all(shard.single for shard in corpus.shards)  # permuting shards permutes documents
        self.ordered = corpus.ordered
        self.buffer_size = 0 if self.permuted or self.ordered else buffer_size
        self.load_state_dict({"epoch": 0, "shard": 0, "cursor": None, "documents": 0, "buffer": []})

    def state_dict(self) -> dict:
        """Plain JSON: the epoch, the position in it, and the documents in the buffer."""
        return {
            "epoch": self.epoch,
            "shard": self.shard,  # position in this epoch's permutation
            "cursor": self.cursor,  # in that shard
            "documents": self.documents,  # given in this epoch
            "buffer": [list(document) for document in self.buffer],
            **({"skipped": self.skipped} if self.skipped else {}),  # oversized ones, in all epochs
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
        """The documents that this epoch has not given yet; then the state is the start of the next epoch."""
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
                "data.source: the corpus is empty, no document with text is left for this split; look at "
                "data.source and data.validation_share, or give a data.validation_source"
            )
        self.epoch, self.shard, self.documents = self.epoch + 1, 0, 0

    def draw(self, what: str, number: int, epoch: int | None = None) -> int:
        """A pseudo-random number of 64 bits."""
        return hash_text(f"{self.seed}/{self.epoch if epoch is None else epoch}/{what}/{number}")


class MixtureShard:
    """All documents of a mixture, each once, its components in proportion to their weights in characters."""

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
