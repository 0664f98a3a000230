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
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from nalanda.common.errors import InputError
from nalanda.common.text import is_url, redact
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
    digest,
    files_of,
    hash_text,
    is_single,
    not_blank,
    reader_of,
    split_of,
    suffixes,
)
from nalanda.data.hashes import SAMPLES, WHOLE, FileHashes, is_stated, sample_of
from nalanda.data.hold_out import NONE, HoldOut, choose, cut_shard
from nalanda.data.hub import is_hub_id, open_hub
from nalanda.data.python_docs import python_splits
from nalanda.data.readers import documents_among, refuse_two_kinds
from nalanda.data.records import left_out
from nalanda.data.stores import StoreShard, open_urls
from nalanda.data.token_set import SPLITS, is_token_set, megatron_splits

LARGE = 64 << 20
"""Bytes up to which a file is hashed whole; of a larger one samples are."""

AT_ONCE = 4 << 30
"""Bytes of a corpus hashed in all; where whole files would be more, all are sampled."""

SMALLEST, LARGEST = 1 << 12, 1 << 16
"""Bytes of a sample."""

Walk = Callable[[Path], "list[tuple[Path, _File]]"]
"""Gives the files below a folder, sorted."""


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
    return source == "python" or _expanded(source).exists() or glob.has_magic(source)


def _expanded(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:
        raise InputError(
            f"data.source: {source}: there is no such user here; write the whole path"
        ) from None


def open_corpus(data: DataConfig, split: str, *, validation: bool | None = None) -> Corpus:
    """The documents of `split`, "train" or "validation", as `data` describes them (`open_corpora`)."""
    return open_corpora(data, validation=validation, splits=(split,))[split]


def open_corpora(
    data: DataConfig, *, validation: bool | None = True, splits: Sequence[str] = SPLITS
) -> dict[str, Corpus]:
    """The documents of each split, as `data` describes them. A source is walked once.

    Args:
        validation: whether something must be held out (`hold_out.choose`). None: for validation, and for
            training too unless `validation_share` is below `hold_out.NONE`.
    Raises:
        InputError: the source does not exist, cannot be read, or is a token set.
    """
    for location in [source_of(data, split) for split in splits]:
        if location and isinstance(location, str) and is_token_set(location):
            refuse_token_set(location)
    return open_texts(data, validation=validation, splits=splits)


def refuse_token_set(location: str) -> NoReturn:
    """Raises `InputError` for a token set where texts are read."""
    raise InputError(
        f"data.source: {location} is a token set, and texts are needed here; give its source"
    )


def open_texts(
    data: DataConfig, *, validation: bool | None = True, splits: Sequence[str] = SPLITS
) -> dict[str, Corpus]:
    """`open_corpora` of a source that is known to be no token set."""
    if validation is None:
        validation = "validation" in splits or data.validation_share >= NONE
    walk = functools.cache(lambda root: sorted(_walk(root), key=lambda found: os.fspath(found[0])))
    corpora: dict[str, Corpus] = {}
    for split in splits:
        train = corpora.get("train")
        if data.mixture and not (split == "validation" and data.validation_source):
            corpora[split] = _open_mixture(data, split, validation)
        elif train and train.hold_out:
            part = partial(train.hold_out.part, split=split)
            corpora[split] = replace(train, part=part, split=split)
        else:
            corpora[split] = _open_corpus(data, split, validation, walk)
    return corpora


def _open_mixture(data: DataConfig, split: str, validation: bool) -> Corpus:
    corpora = {
        name: open_corpus(part, split, validation=validation) for name, part in data.parts().items()
    }
    return Corpus([MixtureShard(corpora, {part.name: part.weight for part in data.mixture})])


def _open_corpus(data: DataConfig, split: str, validation: bool, walk: Walk) -> Corpus:
    source = source_of(data, split)
    shards, counts = _open_shards(data, source, split, walk)
    joined = data.documents == "joined"
    if counts.get("validation") or data.validation_source:
        part = str if joined else unless_blank  # joined lines keep the blank ones
        return Corpus(shards, part, ordered=joined, counts=counts, split=split)

    lone = len(shards) == 1 and shards[0].single
    if joined and not lone:
        raise InputError(
            f"data.documents: joined: {source} has no validation part, and the last share is held out of a "
            "single .txt file only; give data.validation_source"
        )
    if lone and not joined:
        shards = [cut_shard(shards[0])]
    chosen, note = choose(shards, data.validation_share, validation=validation, joined=joined)
    return Corpus(
        shards,
        partial(chosen.part, split=split),
        ordered=joined,
        counts=counts,
        split=split,
        hold_out=chosen,
        note=note,
    )


def held_out(text: str, share: float) -> bool:
    """Whether a document is for validation. The text alone decides, so all its copies are in one split."""
    return HoldOut(share).holds(hash_text(text))


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
    if isinstance(shard, StoreShard):
        return redact(shard.url)
    return None if isinstance(shard, TextShard) else shard.identity


def describe_files(data: DataConfig, counts: Mapping[str, int]) -> str:
    """How many files each split of `data.source` has, and what is left out; "" for a single file."""
    if sum(counts.values()) < 2:
        return ""
    left = {key: count for key, count in counts.items() if count and key.startswith(".")}
    left = {
        f"that end in {key}" if len(key) > 1 else "without suffix": n for key, n in left.items()
    }
    left |= {"empty": counts[EMPTY], "that are second names of a file": counts[SECOND]}
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


def _open_shards(
    data: DataConfig, source: str | list[str], split: str, walk: Walk
) -> tuple[list[Shard], dict[str, int]]:
    """The shards of `split`, and `Corpus.counts`."""
    if isinstance(source, list) and is_local(source):
        files, counts = _find_listed(source, split, walk)
        return [FileShard(path, name, Fields.of(data)) for name, path in files.items()], counts
    if isinstance(source, list) or is_url(source):
        return open_urls(data, source, split)
    if source == "python":
        texts = python_splits(data.validation_share)[split]
        return [TextShard(name, text) for name, text in texts.items()], {"validation": 1}
    root = _expanded(source)
    if megatron_splits(source):
        raise InputError(
            f"data.source: {source} is a Megatron set; make a token set of it: nalanda data prepare {source} "
            "OUT --tokenizer ITS_TOKENIZER"
        )
    if is_local(source):
        files, counts = _find_files(root, split, walk)
        return [FileShard(path, name, Fields.of(data)) for name, path in files.items()], counts
    if is_hub_id(source):
        shards, separate = open_hub(data, source, split)
        return shards, {"validation": int(separate)}
    raise InputError(
        f"data.source: {source!r} does not exist; give python, a local file, directory or glob, a URL, "
        "or a Hub dataset id such as HuggingFaceFW/fineweb-edu"
    )


class _File(NamedTuple):
    """A file that was found."""

    path: Path
    size: int
    real: str
    """Its path without links."""
    is_link: bool


def _find_files(root: Path, split: str, walk: Walk) -> tuple[dict[str, Path], dict[str, int]]:
    """Files by name, sorted, and `Corpus.counts`. In a directory the outermost folder that names a split
    decides, or else the file's own name. Of a glob every file is taken."""
    counts: Counter[str] = Counter()
    if root.is_dir():
        found = _in_folder(root, counts, walk)
        parts = _by_split(
            found, lambda name: split_of(Path(name).parts[:-1], Path(name).name), counts
        )
    else:
        parts = _by_split(_of_glob(root), lambda name: "", counts)
        if counts[EMPTY] and root.is_file():
            raise InputError(f"{root}, line 1: the file is empty; fetch it again or name another")
    return _chosen(str(root), parts, split, counts)


def _find_listed(
    sources: list[str], split: str, walk: Walk
) -> tuple[dict[str, Path], dict[str, int]]:
    """The same of several files, globs and folders. As with URLs, the innermost folder that names a split
    decides, below the folder that they share, or else the file's own name."""
    counts: Counter[str] = Counter()
    found: dict[str, _File] = {}
    for source in sources:
        root = _expanded(source)
        if not root.exists() and not glob.has_magic(source):
            raise InputError(
                f"data.source: {source!r} does not exist; a list has files, folders and globs, or URLs"
            )
        files = _in_folder(root, counts, walk) if root.is_dir() else _of_glob(root)
        if not files:
            raise InputError(f"data.source: {source}: no documents; leave it out")
        for name, file in files.items():
            path = f"{source}/{name}" if root.is_dir() else name
            counts[SECOND] += path in found
            found[path] = file
    shared = len(Path(os.path.commonpath([file.path.parent for file in found.values()])).parts)

    def part_of(name: str) -> str:
        path = found[name].path
        return split_of(reversed(path.parts[shared:-1]), path.name)

    parts = _by_split(found, part_of if len(found) > 1 else lambda name: "", counts)
    return _chosen(f"{sources[0]} and others", parts, split, counts)


def _by_split(
    found: dict[str, _File], part_of: Callable[[str], str], counts: Counter[str]
) -> dict[str, dict[str, Path]]:
    """The files of each split, without empty ones, and each by one of its names. The others are counted."""
    parts: dict[str, dict[str, Path]] = {part: {} for part in (*NAMES, "")}
    known: dict[tuple[str, str], str] = {}
    for name, file in found.items():
        if not file.size and not is_single(file.path.name):
            counts[EMPTY] += 1
            continue
        part = part_of(name)
        first = known.setdefault((part, file.real), name)
        if first != name:
            counts[SECOND] += 1
            if file.is_link or not found[first].is_link:
                continue
            del parts[part][first]
            known[part, file.real] = name
        parts[part][name] = file.path
    return parts


def _chosen(
    source: str, parts: dict[str, dict[str, Path]], split: str, counts: Counter[str]
) -> tuple[dict[str, Path], dict[str, int]]:
    """The files of `split`, and `Corpus.counts`. Raises `InputError` if there are none, or of two kinds."""
    files = files_of(parts, split)
    counts.update({part: len(found) for part, found in parts.items()})
    if odd := next(
        (name for name in files if name.encode(errors="replace").decode() != name), None
    ):
        raise InputError(f"{odd!r}: the name is not UTF-8; rename the file")
    if not files:
        seen = [
            f"{n} {'without suffix' if kind == '.' else kind}" for kind, n in counts.items() if n
        ]
        what = f"found {', '.join(seen)}; " if seen else ""
        raise InputError(
            f"{source}: no documents for {split}; {what}files may end in {', '.join(suffixes())}"
        )
    refuse_two_kinds(source, (path.name for path in files.values()))
    return files, counts


def _of_glob(root: Path) -> dict[str, _File]:
    """A file, or the files of a glob, by their paths. Raises `InputError` for one without a reader."""
    paths = [root] if root.is_file() else sorted(map(Path, glob.glob(str(root), recursive=True)))
    found = {path.as_posix(): path for path in paths if path.is_file()}
    for path in found.values():
        reader_of(path)
    return {
        name: _File(path, path.stat().st_size, os.path.realpath(path), path.is_symlink())
        for name, path in found.items()
    }


def _in_folder(root: Path, counts: Counter[str], walk: Walk) -> dict[str, _File]:
    """The files of a folder that hold documents, by their relative paths, in order. Others are counted."""
    every = {name.as_posix(): file for name, file in walk(root)}
    found = _without_lists(every, counts)
    read = documents_among(found)
    kept = {}
    for name, file in found.items():
        if name in read:
            kept[name] = file
        else:
            counts[Path(name).suffix or "."] += 1
    return kept


def _without_lists(found: dict[str, _File], counts: Counter[str]) -> dict[str, _File]:
    """The files, where folders of `save_to_disk` have those that their state.json lists, in its order."""
    folders: dict[str, set[str]] = {}
    for name in found:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, set()).add(file)

    kept = dict(found)
    for folder, names in folders.items():
        below = f"{folder}/" if folder else ""
        if "dataset_dict.json" in names:
            kept.pop(f"{below}dataset_dict.json")
        if not {"state.json", "dataset_info.json"} <= names:
            continue
        listed = _listed(found[f"{below}state.json"].path)
        for name in listed:
            if name not in names:
                raise InputError(
                    f"{below}{name}: in the list of state.json, but missing; save the dataset again"
                )
        for name in sorted(names):
            file = kept.pop(f"{below}{name}")
            if name not in ("state.json", "dataset_info.json", *listed):
                counts[Path(name).suffix or "."] += 1
        kept |= {f"{below}{name}": found[f"{below}{name}"] for name in listed}
    return kept


def _listed(state: Path) -> list[str]:
    """The files of a dataset that `save_to_disk` of the datasets library wrote, in order."""
    try:
        found = json.loads(state.read_bytes())
        listed = [file["filename"] for file in found["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{state}: does not list the dataset's files; save the dataset again"
        ) from None
    if found.get("_indices_data_files"):
        raise InputError(
            f"{state}: an old version saved a selection of rows; load the dataset and save it again"
        )
    return listed


def _walk(root: Path) -> Iterator[tuple[Path, _File]]:
    """The files below a folder, by relative path, without hidden ones. A link to a folder is followed once.

    Raises `InputError` for a folder that cannot be read."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror}); make it readable, or name the files"
        )

    entered: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        place = Path(folder)
        folders[:] = sorted(
            (name for name in folders if name[0] != "."),
            key=lambda n: ((place / n).is_symlink(), n),
        )
        if (real := os.path.realpath(folder)) in entered:
            folders.clear()
            continue
        entered.add(real)
        for name in files:
            if name[0] != "." and (file := _file(place / name, real)):
                yield (place / name).relative_to(root), file


def _file(path: Path, folder: str) -> _File | None:
    """A regular file in a folder that is given without links, or a link to one; else None."""
    try:
        found = os.lstat(path)
        is_link = stat.S_ISLNK(found.st_mode)
        if is_link:
            found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or a link to nothing
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    real = os.path.realpath(path) if is_link else os.path.join(folder, path.name)
    return _File(path, found.st_size, real, is_link)


def unless_blank(text: str) -> str | None:
    """The text, or None if it is only white space."""
    return text if not_blank(text) else None


@dataclass
class Corpus:
    """The shards of one split, and which of their documents belong to it."""

    shards: list[Shard]
    part: Callable[[str], str | None] = unless_blank
    """The part of a text that belongs to the split, or None."""
    ordered: bool = False
    """Whether the documents are one text and so never shuffled."""
    counts: Mapping[str, int] = field(default_factory=Counter)
    """Files of the source by split, "" for those of none; those left out by suffix, `EMPTY` or `SECOND`."""
    split: str = "train"
    hold_out: HoldOut | None = None
    """What is held out; None if the source has a validation part of its own."""
    note: str = ""
    """A line about what is held out, "" where the source has a validation part of its own."""

    @property
    def fingerprint(self) -> str:
        return digest("\n".join(s.identity for s in self.shards))

    @functools.cached_property
    def names(self) -> list[str]:
        """A name of each shard, which no other shard of the corpus has."""
        named = (FileShard, StoreShard, TextShard)
        names = [
            shard.name if isinstance(shard, named) else shard.identity for shard in self.shards
        ]
        seen: Counter[str] = Counter()
        for place, name in enumerate(names):
            seen[name] += 1
            if seen[name] > 1:
                names[place] = f"{name} ({seen[name]})"
        return names

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The size of each shard; 0 for a remote one."""
        return [
            shard.size
            if isinstance(shard, (FileShard, StoreShard))
            else len(getattr(shard, "text", ""))
            for shard in self.shards
        ]

    @functools.cached_property
    def hashed(self) -> tuple[int, int]:
        """Bytes up to which a file is hashed whole, and bytes of each sample of a larger one."""
        sizes = [shard.size for shard in self.shards if isinstance(shard, FileShard)]
        whole = LARGE if sum(size for size in sizes if size <= LARGE) <= AT_ONCE else 0
        return whole, min(LARGEST, max(SMALLEST, AT_ONCE // (SAMPLES * max(1, len(sizes)))))

    def content(self, number: int, hashes: FileHashes | None = None, like: str = "") -> str:
        """A hash of a shard's content, which sees edits that leave the size unchanged.

        A file of up to `LARGE` bytes is hashed whole. A larger one is hashed at `SAMPLES` places, spread
        evenly from head to tail; so is every file if those up to `LARGE` exceed `AT_ONCE` together. The hash
        of a file in a store is what the store states. Of other remote shards it is "": the name, with its
        revision, stands for the content.

        Args:
            number: the shard's place in the listing.
            hashes: keeps the hashes of files.
            like: an earlier hash of the shard. This one is then made the same way, so they can be compared.
        """
        shard = self.shards[number]
        if isinstance(shard, StoreShard):
            return shard.content
        if not isinstance(shard, FileShard):
            return digest(shard.text) if isinstance(shard, TextShard) else ""

        whole, sample = self.hashed
        if ":" in like and not is_stated(
            like
        ):  # earlier versions did not write how a hash was made
            sample = sample_of(like)
        elif shard.size <= whole:
            sample = WHOLE
        return (hashes or FileHashes()).of(shard.path, sample)


class DocumentStream:
    """The documents of a corpus, each once an epoch, for `epochs` epochs or without end (None).

    The order depends only on `seed` and the epoch: a permutation of the shards, then, where shards hold many
    documents, a shuffle buffer from which each new document draws another. Each draw is a hash of its
    position, so no random generator is part of the state. An ordered corpus is not shuffled.

    Where the listing changed within an epoch (data/resume.py), the state holds the order of that epoch.

    Raises:
        InputError: an epoch has no document, or a shard cannot be read.
    """

    def __init__(self, corpus: Corpus, *, seed: int | str, buffer_size: int, epochs: int | None):
        self.corpus, self.seed, self.epochs = corpus, seed, epochs
        self.permuted = all(
            shard.single for shard in corpus.shards
        )  # permuting shards permutes documents
        self.ordered = corpus.ordered
        self.buffer_size = 0 if self.permuted or self.ordered else buffer_size
        self.load_state_dict({"epoch": 0, "shard": 0, "cursor": None, "documents": 0, "buffer": []})

    def state_dict(self) -> dict:
        """Plain JSON: the epoch, the position in it, and the documents in the buffer."""
        return {
            "epoch": self.epoch,
            "shard": self.shard,  # position in this epoch's permutation
            "cursor": self.cursor,  # in that shard
            "digest": self.digest,  # of what was read of that shard
            "documents": self.documents,  # given in this epoch
            "buffer": [list(document) for document in self.buffer],
            **self.left,
            **(
                {"order": self.order} if self.order else {}
            ),  # of this epoch's shards, by their numbers
        }

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.shard, self.cursor = state["epoch"], state["shard"], state["cursor"]
        self.documents, self.buffer = (
            state["documents"],
            [Document(*pair) for pair in state["buffer"]],
        )
        self.left, self.order = (
            left_out(state),
            state.get("order"),
        )  # left out in all epochs, by kind
        # An earlier version's state within a shard has no digest. None: it is not known until the next shard.
        self.digest: str | None = state.get("digest", "" if self.cursor is None else None)

    @property
    def skipped(self) -> int:
        """Documents left out, in all epochs."""
        return self.left.total()

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
        read = blank = 0
        while self.shard < len(order):
            shard = shards[order[self.shard]]
            for document, cursor in shard.read(self.cursor):
                self.cursor = cursor
                if isinstance(document, Left):
                    self.left[document.value] += 1
                    continue
                read += 1
                if self.digest is not None and isinstance(shard, FileShard):
                    self.digest = digest_rows(self.digest, cursor, document.text)
                if (text := self.corpus.part(document.text)) is None:
                    blank += not not_blank(document.text)
                    continue
                document = document._replace(text=text)
                if len(self.buffer) < self.buffer_size:
                    self.buffer.append(document)
                    continue
                if self.buffer:
                    place = self.draw("document", self.documents) % len(self.buffer)
                    document, self.buffer[place] = self.buffer[place], document
                self.documents += 1
                yield document
            self.shard, self.cursor, self.digest = self.shard + 1, None, ""
        while self.buffer:
            document = self.buffer.pop(self.draw("document", self.documents) % len(self.buffer))
            self.documents += 1
            yield document
        if not self.documents:
            raise InputError(self._why_empty(read, blank))
        self.epoch, self.shard, self.documents, self.order = self.epoch + 1, 0, 0, None

    def _why_empty(self, read: int, blank: int) -> str:
        """What to say where `read` documents, some of them blank, gave none."""
        hold_out = self.corpus.hold_out
        line = f"data.source: the corpus is empty for {self.corpus.split}: of {read:,} documents "
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

    single = False

    def __init__(self, corpora: dict[str, Corpus], weights: dict[str, float]):
        self.corpora, self.weights = corpora, weights

    @property
    def identity(self) -> str:
        return " ".join(f"{name}:{corpus.fingerprint}" for name, corpus in self.corpora.items())

    def read(self, cursor: int | None) -> Iterator[tuple[Document, int]]:
        left = {
            name: iter(DocumentStream(corpus, seed=0, buffer_size=0, epochs=1))
            for name, corpus in self.corpora.items()
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
