"""Shards of local files, and the splits that folders and names tell."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nalanda.common.errors import InputError
from nalanda.common.text import digest
from nalanda.data.readers import check_compression, is_single, reader_of, register_reader, suffix_of
from nalanda.data.records import Document, Fields, Left, UnusableRecord, document_of

__all__ = ["document_of", "register_reader"]  # what readers of your own import from here

NAMES = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|eval"}
"""The splits, and the names of folders and files that hold them."""


class Shard(Protocol):
    """A part of a corpus that is read in order."""

    @property
    def name(self) -> str:
        """A name that no other shard of the listing has."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes of a file, characters of a text in memory; None where only reading tells."""
        ...

    @property
    def single(self) -> bool:
        """Whether the shard is one document, so that shuffling shards shuffles documents."""
        ...

    def read(self, cursor: Any) -> Iterator[tuple[Document | Left, Any]]:
        """Yields the documents after `cursor` (None: from the start), each with the cursor after it.

        A `Left` is in the place of a document that is left out.
        """
        ...


def identity_of_shard(shard: Shard) -> str:
    """Name and size. A saved position is only valid for shards of the same identity."""
    return shard.name if shard.size is None else f"{shard.name}:{shard.size}"


def not_blank(text: str) -> bool:
    return bool(text) and not text.isspace()


def hash_text(text: str) -> int:
    return int(digest(text), 16)


D = TypeVar("D", Document, Document | Left)

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

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the file when first asked; reading is refused once the file has another size."""
        return self._size()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be read any more ({error.strerror}); restore it"
            ) from None

    @property
    def single(self) -> bool:
        return is_single(self.path.name)

    def read(self, cursor: int | None) -> Iterator[tuple[Document | Left, int]]:
        # In a file of another size, saved positions may count other rows.
        if self.size != (now := self._size()):
            raise InputError(
                f"{self.path}: changed while in use, from {self.size} to {now} bytes; restore it, "
                "or start a new run from the checkpoint's weights with model.init_from"
            )
        if not self.size:
            return
        try:
            yield from reader_of(self.path)(self.path, self.fields, cursor or 0)
        except UnusableRecord:
            # Damage that a decompressor passes on looks like such a record, and its sum comes at the end.
            check_compression(self.path, self.fields)
            raise


@dataclass(frozen=True)
class TextShard:
    """One document in memory."""

    single = True
    name: str
    text: str = field(repr=False)

    @property
    def size(self) -> int:
        return len(self.text)

    def read(self, cursor: int | None) -> Iterator[tuple[Document, int]]:
        return iter([] if cursor else [(Document(self.text), 1)])


def split_of(folders: Iterable[str], file: str) -> str:
    """The split of a file by the first of `folders` that names one (`NAMES`), else by its own name; "" for
    none. Names are val.jsonl, train-00001-of-00009.parquet and the like."""
    # train-00001-of-00009.parquet → train
    stem = re.sub(r"[-_.]\d.*", "", file[: len(file) - len(suffix_of(file))])
    for name in (*folders, stem):
        for split, names in NAMES.items():
            if re.fullmatch(names, name, re.I):
                return split
    return ""


EMPTY, SECOND = "empty", "second"
"""Keys of `Corpus.counts`: files without a byte, and further names of files that are read."""


def files_of(splits: dict[str, T], split: str) -> T:
    """The files of `split` among those by `NAMES` and "", for no split; some may be empty.

    Files of no split are for training if none are named so. Validation falls back on the files of training,
    and a share of them is held out. A source for validation may have files of a test alone: those come last.
    """
    train = splits["train"] or splits[""]
    if split == "train":
        return train
    return splits["validation"] or train or splits["test"]
