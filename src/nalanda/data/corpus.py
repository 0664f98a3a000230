"""The corpus of a split: shards of local files, URLs, the Hub or this Python, and a stream over them.

A shard (`documents.Shard`) reads its documents in a fixed order and gives with each one a cursor, plain JSON,
from which a later reading resumes.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from nalanda.common.errors import InputError
from nalanda.common.text import digest, is_url
from nalanda.config.schema import DataConfig
from nalanda.data.documents import (
    EMPTY,
    NAMES,
    SECOND,
    Document,
    Fields,
    FileShard,
    Left,
    Shard,
    TextShard,
    files_of,
    hash_text,
    identity_of_shard,
    is_single,
    not_blank,
    reader_of,
    split_of,
)
from nalanda.data.hashes import SAMPLES, WHOLE, FileHashes, is_stated, sample_of
from nalanda.data.hold_out import NONE, HoldOut, choose, cut_shard
from nalanda.data.hub import is_hub_id, open_hub
from nalanda.data.python_docs import python_splits
from nalanda.data.readers import documents_among, refuse_two_kinds, suffixes
from nalanda.data.records import describe_left, left_out
from nalanda.data.token_set import is_begun, megatron_splits
from nalanda.data.urls import RemoteShard, identity_of, name_of_source, open_urls

LARGE = 64 << 20
"""Bytes of the largest file that is hashed whole; larger ones are sampled."""

AT_ONCE = 4 << 30
"""Bytes of a corpus hashed in all; where whole files would be more, all are sampled."""

SMALLEST, LARGEST = 1 << 12, 1 << 16
"""Bytes of a sample."""

Find = Callable[["str | tuple[str, ...]"], "_Listing"]
"""`_find_files`, which lists a source once."""


def source_of(data: DataConfig, split: str) -> str | list[str]:
    """The source that `split` is read from."""
    return (
        data.validation_source if split == "validation" and data.validation_source else data.source
    )


def is_local(source: str | list[str]) -> bool:
    """Whether the documents of `source` are files of this machine or belong to its Python."""
    if isinstance(source, list):
        return not any(map(is_url, source))
    if is_url(source):
        return False
    return source == "python" or Path(source).exists() or glob.has_magic(source)


def open_texts(
    data: DataConfig, splits: Sequence[str], validation: bool | None = None
) -> dict[str, Corpus]:
    """The documents of each split of one source, which is no token set. It is listed once.

    validation: whether something must be held out (`hold_out.choose`). None: for validation, and for training too
        unless `validation_share` is below `hold_out.NONE`.

    Raises:
        InputError: the source does not exist, or cannot be read.
    """
    if validation is None:
        validation = "validation" in splits or data.validation_share >= NONE
    find = functools.cache(_find_files)
    corpora: dict[str, Corpus] = {}
    for split in splits:
        train = corpora.get("train")
        if train and train.hold_out:
            # Both splits share the shards and the choice; each takes its part of a text.
            corpora[split] = replace(train, split=split)
        else:
            corpora[split] = _open_corpus(data, split, validation, find)
    return corpora


def _open_corpus(data: DataConfig, split: str, validation: bool, find: Find) -> Corpus:
    """The documents of a single source. Raises `InputError` for settings that do not fit it."""
    source = source_of(data, split)
    shards, counts = _open_shards(data, source, split, find)
    joined = data.documents == "joined"
    if counts.get("validation") or data.validation_source:  # nothing must be held out
        return Corpus(shards, joined=joined, counts=counts, split=split)

    lone = len(shards) == 1 and shards[0].single
    if joined and not lone:
        raise InputError(
            f"data.documents: joined: {source} has no validation part, and the last share is held out of a "
            "single .txt file only; give data.validation_source"
        )
    if lone and not joined:
        # A lone text becomes many documents, which can be held out and shuffled.
        shards = [cut_shard(shards[0])]
    chosen, note = choose(shards, data.validation_share, validation=validation, joined=joined)
    return Corpus(shards, joined=joined, counts=counts, split=split, hold_out=chosen, note=note)


def check_apart(train: Corpus, validation: Corpus) -> None:
    """Raises `InputError` if a file of `data.validation_source` is trained on too."""
    trained = {_location_of(shard) for shard in train.shards}
    for location in map(_location_of, validation.shards):
        if location is not None and location in trained:
            raise InputError(
                f"data.validation_source: {location} is a training file too; leave it out of one, or "
                "leave validation_source out and data.validation_share is held out"
            )


def _location_of(shard: Shard) -> str | None:
    """The path or URL of a shard, by which two names of a file are one; None for a text of this Python."""
    if isinstance(shard, FileShard):
        return str(shard.path.resolve())
    if isinstance(shard, RemoteShard):
        return identity_of(shard.url)
    return None if isinstance(shard, TextShard) else identity_of_shard(shard)


def describe_files(data: DataConfig, counts: Mapping[str, int]) -> str:
    """How many files each split of `data.source` has, and what is left out; "" for a single file."""
    if sum(counts.values()) < 2:
        return ""
    train = counts["train"] or counts[""]
    validation = 0 if data.validation_source else counts["validation"]
    line = f"{name_of_source(data.source)}: {train} file{'s' * (train != 1)} for training"
    if validation:
        line += f", {validation} for validation"

    omitted = {}
    for key, count in counts.items():
        # Suffixes begin with a dot; other keys are splits, `EMPTY` and `SECOND`.
        if key.startswith("."):
            omitted["without suffix" if key == "." else f"that end in {key}"] = count
    omitted["empty"] = counts[EMPTY]
    omitted["that are second names of a file"] = counts[SECOND]
    omitted["of a test split"] = counts["test"]
    omitted["of no split"] = counts[""] if counts["train"] else 0
    omitted["of a validation split"] = counts["validation"] - validation
    reasons = ", ".join(f"{count} {reason}" for reason, count in omitted.items() if count)
    return f"{line}; left out: {reasons}" if reasons else line


def _open_shards(
    data: DataConfig, source: str | list[str], split: str, find: Find
) -> tuple[list[Shard], dict[str, int]]:
    """The shards of `split`, and `Corpus.counts`."""
    if isinstance(source, list) and is_local(source):
        return _file_shards(data, find(tuple(source)), split)
    if isinstance(source, list) or is_url(source):
        return open_urls(data, source, split)
    # A name of its own, also where a folder is called so.
    if source == "python":
        texts = python_splits(data.validation_share)[split]
        return [TextShard(name, text) for name, text in texts.items()], {"validation": 1}

    root = Path(source)
    if is_local(source) and data.validation_split != DataConfig.validation_split:
        raise InputError(
            "data.validation_split: only Hub datasets take it; leave it out, or give data.validation_source=FILE"
        )
    # Before local files, since a Megatron set may be a folder.
    if megatron_splits(source):
        raise InputError(
            f"data.source: {source} is a Megatron set; make a token set of it: nalanda data prepare {source} "
            "OUT --tokenizer ITS_TOKENIZER"
        )
    if any(root.glob("train/*.tokens")):
        raise InputError(
            f"data.source: {source} is a token set without a whole index.json; copy or prepare it again"
        )
    if is_local(source):
        return _file_shards(data, find(source), split)
    if is_hub_id(source):
        shards, separate = open_hub(data, source, split)
        return shards, {"validation": int(separate)}
    raise InputError(
        f"data.source: {source!r} does not exist; give python, a local file, directory or glob, a URL, "
        "or a Hub dataset id such as HuggingFaceFW/fineweb-edu"
    )


class _File(NamedTuple):
    """A file of the listing."""

    path: Path
    size: int
    real: str
    """Its path without links."""
    is_link: bool


class _Listing(NamedTuple):
    """The files of a source on this machine."""

    source: str
    """Its name in messages."""
    splits: dict[str, dict[str, Path]]
    """By split, "" for those of none, and by name, sorted."""
    counts: Counter[str]
    """`Corpus.counts`."""


def _find_files(source: str | tuple[str, ...]) -> _Listing:
    """The files of a folder, a file or a glob, or of several of them.

    In a folder the outermost folder that names a split decides, or else the file's own name. Of a glob every
    file is taken.
    """
    if isinstance(source, tuple):
        return _find_listed(source)
    root = Path(source)
    counts: Counter[str] = Counter()
    if root.is_dir():

        def split_of_name(name: str) -> str:
            return split_of(Path(name).parts[:-1], Path(name).name)

        splits = _by_split(_list_folder(root, counts), split_of_name, counts)
    else:
        splits = _by_split(_list_glob(root), lambda name: "", counts)
        if counts[EMPTY] and root.is_file():
            raise InputError(f"{root}, line 1: the file is empty; fetch it again or name another")
    return _Listing(str(root), splits, counts)


def _find_listed(sources: tuple[str, ...]) -> _Listing:
    """`_find_files` of several files, globs and folders.

    As with URLs, the innermost folder that names a split decides, below the folder that they share, or else
    the file's own name.
    """
    counts: Counter[str] = Counter()
    listed: dict[str, _File] = {}
    for source in sources:
        root = Path(source)
        if not root.exists() and not glob.has_magic(source):
            raise InputError(
                f"data.source: {source!r} does not exist; a list has files, folders and globs, or URLs"
            )
        files = _list_folder(root, counts) if root.is_dir() else _list_glob(root)
        if not files:
            raise InputError(f"data.source: {source}: no documents; leave it out")
        for name, file in files.items():
            path = f"{source}/{name}" if root.is_dir() else name
            # Two of the sources may name one file.
            counts[SECOND] += path in listed
            listed[path] = file

    # The folder that all files share names no split.
    folders = {name: file.path.parent.absolute() for name, file in listed.items()}
    shared = Path(os.path.commonpath(folders.values()))

    def split_of_name(name: str) -> str:
        if len(listed) == 1:  # nothing is beside it
            return ""
        return split_of(reversed(folders[name].relative_to(shared).parts), listed[name].path.name)

    splits = _by_split(listed, split_of_name, counts)
    return _Listing(f"{sources[0]} and others", splits, counts)


def _by_split(
    listed: dict[str, _File], split_of_name: Callable[[str], str], counts: Counter[str]
) -> dict[str, dict[str, Path]]:
    """The files of each split, without empty ones, and each by one of its names. The others are counted."""
    splits: dict[str, dict[str, Path]] = {split: {} for split in (*NAMES, "")}
    names: dict[tuple[str, str], str] = {}  # of each file in a split
    for name, file in listed.items():
        if not file.size and not is_single(file.path.name):
            counts[EMPTY] += 1
            continue

        split = split_of_name(name)
        first = names.setdefault((split, file.real), name)
        if first != name:
            counts[SECOND] += 1
            # The file itself goes before a link to it, else the first name counts.
            if file.is_link or not listed[first].is_link:
                continue
            del splits[split][first]
            names[split, file.real] = name
        splits[split][name] = file.path
    counts.update({split: len(files) for split, files in splits.items()})
    return splits


def _file_shards(
    data: DataConfig, listing: _Listing, split: str
) -> tuple[list[Shard], dict[str, int]]:
    """The files of `split`, and `Corpus.counts`. Raises `InputError` if there are none, or of two kinds."""
    source, splits, counts = listing
    files = files_of(splits, split)
    for name in files:
        if name.encode(errors="replace").decode() != name:
            raise InputError(f"{name!r}: the name is not UTF-8; rename the file")
    if not files:
        kinds = []
        for kind, count in counts.items():
            if count:
                kinds.append(f"{count} {'without suffix' if kind == '.' else kind}")
        present = f"found {', '.join(kinds)}; " if kinds else ""
        advice = "; name plain text .txt" if kinds else ""
        raise InputError(
            f"{source}: no documents for {split}; {present}files may end in "
            f"{', '.join(suffixes())}{advice}"
        )
    refuse_two_kinds(source, (path.name for path in files.values()))
    return [FileShard(path, name, Fields.of(data)) for name, path in files.items()], counts


def _list_glob(root: Path) -> dict[str, _File]:
    """A file, or the files of a glob, by their paths. Raises `InputError` for one without a reader."""
    paths = [root] if root.is_file() else sorted(map(Path, glob.glob(str(root), recursive=True)))
    # A pattern that goes through folders leaves out those that a walk leaves out.
    searched = Path(str(root).partition("**")[0])
    is_made = functools.cache(lambda folder: _is_made(folder, {*os.listdir(folder)}))
    files = {}
    for path in filter(Path.is_file, paths):
        if any(is_made(folder) for folder in path.parents if searched in folder.parents):
            continue
        reader_of(path)
        real = os.path.realpath(path)
        files[path.as_posix()] = _File(path, path.stat().st_size, real, path.is_symlink())
    return files


def _list_folder(root: Path, counts: Counter[str]) -> dict[str, _File]:
    """The files of a folder that hold documents, by their relative paths, in order. Others are counted."""
    walked = sorted(_walk_folder(root), key=lambda pair: os.fspath(pair[0]))
    listed = {name.as_posix(): file for name, file in walked}
    return documents_among(_follow_lists(listed, counts), counts)


def _follow_lists(listed: dict[str, _File], counts: Counter[str]) -> dict[str, _File]:
    """The files, where folders of `save_to_disk` have those that their state.json lists, in its order."""
    folders: dict[str, set[str]] = {}
    for name in listed:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, set()).add(file)

    files = dict(listed)
    for folder, names in folders.items():
        below = f"{folder}/" if folder else ""
        if "dataset_dict.json" in names:
            files.pop(f"{below}dataset_dict.json")
        if not {"state.json", "dataset_info.json"} <= names:
            continue
        data_files = _read_list(listed[f"{below}state.json"].path)
        for name in data_files:
            if name not in names:
                raise InputError(
                    f"{below}{name}: in the list of state.json, but missing; save the dataset again"
                )

        # Taken out and put back, so that the order is that of the list.
        for name in sorted(names):
            files.pop(f"{below}{name}")
            if name not in ("state.json", "dataset_info.json", *data_files):
                counts[Path(name).suffix or "."] += 1
        files |= {f"{below}{name}": listed[f"{below}{name}"] for name in data_files}
    return files


def _read_list(state: Path) -> list[str]:
    """The files of a dataset that `save_to_disk` of the datasets library wrote, in order."""
    try:
        content = json.loads(state.read_bytes())
        names = [file["filename"] for file in content["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{state}: does not list the dataset's files; save the dataset again"
        ) from None
    if content.get("_indices_data_files"):
        raise InputError(
            f"{state}: an old version saved a selection of rows; load the dataset and save it again"
        )
    return names


def _walk_folder(root: Path) -> Iterator[tuple[Path, _File]]:
    """The files below a folder, by relative path, without hidden ones and those of runs (`_is_made`). A link to a
    folder is followed once.

    Raises `InputError` for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror}); make it readable, or name the files"
        )

    entered: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        # Links last, so that a folder is entered by its own name where it has one below the root.
        visible = [name for name in folders if name[0] != "."]
        folders[:] = sorted(visible, key=lambda name: (Path(folder, name).is_symlink(), name))
        # A folder of two names is read once, and a link to a folder above it ends here.
        real = os.path.realpath(folder)
        is_output = Path(folder) != root and _is_made(Path(folder), {*folders, *files})
        if real in entered or is_output:
            folders.clear()
            continue
        entered.add(real)
        for name in files:
            path = Path(folder, name)
            if name[0] != "." and (file := _describe_file(path, real)):
                yield path.relative_to(root), file


def _is_made(folder: Path, names: set[str]) -> bool:
    """Whether a folder with these names is that of a run, its model, a study or a token set. Their records are no
    documents."""
    of_a_run = "config.yaml" in names and not names.isdisjoint({".lock", "run.json"})
    of_a_set = not names.isdisjoint({"index.json", "preparing"}) and is_begun(folder)
    return of_a_run or of_a_set or "compare.yaml" in names


def _describe_file(path: Path, folder: str) -> _File | None:
    """A regular file in a folder that is given without links, or a link to one; else None."""
    try:
        status = os.lstat(path)
        is_link = stat.S_ISLNK(status.st_mode)
        if is_link:
            status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or a link to nothing
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    real = os.path.realpath(path) if is_link else os.path.join(folder, path.name)
    return _File(path, status.st_size, real, is_link)


@dataclass
class Corpus:
    """The shards of one split, and which of their documents belong to it."""

    shards: list[Shard]
    joined: bool = False
    """Whether the documents are one text, to which blank lines belong."""
    ordered: bool = False
    """Whether the documents are never shuffled, as joined ones are."""
    counts: Mapping[str, int] = field(default_factory=Counter)
    """Files of the source by split, "" for those of none; those left out by suffix, `EMPTY` or `SECOND`."""
    split: str = "train"
    hold_out: HoldOut | None = None
    """What is held out; None if the source has a validation part of its own."""
    note: str = ""
    """A line about what is held out, "" where the source has a validation part of its own."""

    def part(self, text: str) -> str | None:
        """The part of a text that belongs to the split, or None."""
        if self.hold_out:
            return self.hold_out.part(text, self.split)
        return text if self.joined or not_blank(text) else None

    def once(self, seed: int = 0) -> DocumentStream:
        """Each document once, its shards in an order of their own."""
        return DocumentStream(self, seed=seed, buffer_size=0, epochs=1)

    @property
    def fingerprint(self) -> str:
        return digest("\n".join(map(identity_of_shard, self.shards)))

    @functools.cached_property
    def names(self) -> list[str]:
        """The name of each shard. Listings are by name, so no two are equal."""
        return [shard.name for shard in self.shards]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The size of each shard; 0 for one of http(s) or the hub."""
        return [shard.size or 0 for shard in self.shards]

    @functools.cached_property
    def hashed(self) -> tuple[int, int]:
        """Bytes of the largest file that is hashed whole, and bytes of each sample of a larger one."""
        sizes = [shard.size for shard in self.shards if isinstance(shard, FileShard)]
        small = sum(size for size in sizes if size <= LARGE)
        limit = LARGE if small <= AT_ONCE else 0
        # The samples of all files are about `AT_ONCE` bytes together, as far as the bounds allow.
        sample = AT_ONCE // (SAMPLES * max(1, len(sizes)))
        return limit, min(LARGEST, max(SMALLEST, sample))

    def content(self, number: int, hashes: FileHashes, like: str = "") -> str:
        """A hash of a shard's content, which sees edits that leave the size unchanged.

        A file of up to `LARGE` bytes is hashed whole. A larger one is hashed at `SAMPLES` places, spread
        evenly from head to tail. If all up to `LARGE` exceed `AT_ONCE` together, they are sampled too. The hash
        of a file in a store is what the store states. Of other remote shards it is "": the name, with its
        revision, stands for the content.

        Args:
            number: the shard's place in the listing.
            hashes: keeps the hashes of files.
            like: an earlier hash of the shard. This one is then made the same way, so they can be compared.
        """
        shard = self.shards[number]
        if isinstance(shard, RemoteShard):
            return shard.file.content
        if not isinstance(shard, FileShard):
            return digest(shard.text) if isinstance(shard, TextShard) else ""

        limit, sample = self.hashed
        if like and not is_stated(like):
            sample = sample_of(like)
        elif shard.size <= limit:
            sample = WHOLE
        return hashes.of(shard.path, sample)


class DocumentStream:
    """The documents of a corpus, each once an epoch, for `epochs` epochs or without end (None).

    The order depends only on `seed` and the epoch. It is a permutation of the shards. Where shards hold many
    documents, a shuffle buffer follows, and each new document draws another one from it. Each draw is a hash
    of its position, so no random generator is part of the state. An ordered corpus is not shuffled.

    Where the listing changed within an epoch (data/resume.py), the state holds the order of that epoch.

    Raises:
        InputError: an epoch has no document, or a shard cannot be read.
    """

    def __init__(self, corpus: Corpus, *, seed: int | str, buffer_size: int, epochs: int | None):
        self.corpus, self.seed, self.epochs = corpus, seed, epochs
        # Where each shard is one document, a permutation of the shards shuffles the documents.
        self.permuted = all(shard.single for shard in corpus.shards)
        self.ordered = corpus.ordered or corpus.joined
        self.buffer_size = 0 if self.permuted or self.ordered else buffer_size
        start = {"epoch": 0, "shard": 0, "cursor": None, "digest": "", "documents": 0, "buffer": []}
        self.load_state_dict(start)

    def state_dict(self) -> dict:
        """Plain JSON: the epoch, the position in it, and the documents in the buffer."""
        state = {
            "epoch": self.epoch,
            "shard": self.shard,  # position in this epoch's permutation
            "cursor": self.cursor,  # in that shard
            "digest": self.digest,  # of what was read of that shard
            "documents": self.documents,  # given in this epoch
            "buffer": [list(document) for document in self.buffer],
            **self.left,
        }
        if self.order:  # of this epoch's shards, by their numbers
            state["order"] = self.order
        return state

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.shard, self.cursor = state["epoch"], state["shard"], state["cursor"]
        self.documents = state["documents"]
        self.buffer = [Document(*pair) for pair in state["buffer"]]
        self.left = left_out(state)  # in all epochs, by kind
        self.order = state.get("order")
        self.digest = state["digest"]

    def place(self, epoch: int) -> list:
        """How far `epoch` was read: the position in its permutation (-1: the end), the cursor, the digest."""
        if self.epoch > epoch:
            return [-1, None, ""]
        return [self.shard, self.cursor, self.digest]

    def permutation(self, count: int) -> list[int]:
        """The order in which this epoch reads so many shards."""
        if self.ordered:
            return list(range(count))
        return sorted(range(count), key=lambda index: self.draw("shard", index))

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
        order = self.order or self.permutation(len(shards))
        read, blank, left_before = 0, 0, self.left.copy()
        while self.shard < len(order):
            shard = shards[order[self.shard]]
            for document, cursor in shard.read(self.cursor):
                # Before the yield, so that a state taken at a document is behind it.
                self.cursor = cursor
                if isinstance(document, Left):
                    self.left[document.value] += 1
                    continue
                read += 1
                # Of all rows, also those of the other split: a resume reads the file without the choice.
                if isinstance(shard, FileShard):
                    self.digest = digest_rows(self.digest, cursor, document.text)
                if (text := self.corpus.part(document.text)) is None:
                    blank += not not_blank(document.text)
                    continue
                document = document._replace(text=text)

                # A full buffer gives a random one of its documents for each new one.
                if len(self.buffer) < self.buffer_size:
                    self.buffer.append(document)
                    continue
                if self.buffer:
                    index = self.draw("document", self.documents) % len(self.buffer)
                    document, self.buffer[index] = self.buffer[index], document
                self.documents += 1
                yield document
            self.shard, self.cursor, self.digest = self.shard + 1, None, ""

        # The shards are at their end: the buffer is emptied, in an order drawn the same way.
        while self.buffer:
            document = self.buffer.pop(self.draw("document", self.documents) % len(self.buffer))
            self.documents += 1
            yield document
        if not self.documents:
            raise InputError(self._why_empty(read, blank, self.left - left_before))
        # The order of a changed listing was for this epoch alone.
        self.epoch, self.shard, self.documents, self.order = self.epoch + 1, 0, 0, None

    def _why_empty(self, read: int, blank: int, left: Counter[str]) -> str:
        """The message where none of `read` documents, some of them blank, is for this split. left: how many were
        left out besides, by kind."""
        hold_out = self.corpus.hold_out
        line = f"data.source: the corpus is empty for {self.corpus.split}: "
        if not read and left:
            keys = "data.text_field and data.max_document_bytes"
            return f"{line}{describe_left(left)}; look at data.source, {keys}"
        if not read:
            return f"{line}it has no documents; give it text"
        line += f"of {read:,} documents "
        if read == blank or hold_out is None:
            return f"{line}all are blank; look at data.source and data.text_field"
        side = "none falls" if self.corpus.split == "validation" else "all fall"
        share = f"{side} under data.validation_share {hold_out.share:g}"
        return f"{line}({blank:,} blank) {share}; change it, or give a data.validation_source"

    def draw(self, what: str, number: int | str, epoch: int | None = None) -> int:
        """A pseudo-random number of 64 bits."""
        return hash_text(f"{self.seed}/{self.epoch if epoch is None else epoch}/{what}/{number}")


def digest_rows(before: str, row: int, text: str) -> str:
    """The digest of a file's documents up to `row`, which has `text`. before: of those up to the last one."""
    return digest(f"{before} {row} {text}")


class MixtureShard:
    """All documents of a mixture, each once, its components in proportion to their weights in characters."""

    name, size, single = "mixture", None, False

    def __init__(self, corpora: dict[str, Corpus], weights: dict[str, float]):
        self.corpora, self.weights = corpora, weights

    def read(self, cursor: int | None) -> Iterator[tuple[Document, int]]:
        streams = {}
        for name, corpus in self.corpora.items():
            streams[name] = iter(corpus.once())

        characters = dict.fromkeys(streams, 0)
        number = 0
        while streams:
            # The component that is furthest behind its weight gives the next document.
            name = min(streams, key=lambda name: characters[name] / self.weights[name])
            document = next(streams[name], None)
            if document is None:
                del streams[name]
                continue
            characters[name] += len(document.text)
            number += 1
            # A resume reads all components from the start, and passes over the documents up to its cursor.
            if number > (cursor or 0):
                yield document, number
