"""Token sets: a corpus tokenised once, in shards that are read in place, with an index of their sums.

A token set is a directory:

    index.json              written last: settings, the tokenizer's fingerprint, each shard with its sums
    tokenizer/              as `save_pretrained` writes it
    train/00000.tokens      little-endian uint16, or uint32 for a larger vocabulary
    train/00000.docs        D document ends in tokens, int64, then D sources, uint16, both little-endian
    validation/…

A document's source is the position of its name in its shard's `sources` in the index. The bytes depend on the
listing of the source and the settings, not on the process that wrote a shard or the time. During preparation
`preparing/` has the plan and a record of every finished shard.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nalanda.common.errors import InputError, first_line
from nalanda.common.files import append_record, read_records, sha256_of, write_atomically

FORMAT, VERSION = "nalanda token shards", 1

SPLITS = ("train", "validation")

OPEN_FILES = 100
"""Files that this process keeps open, if it may open four times as many; a shard has two."""

DOCS = np.dtype([("end", "<i8"), ("source", "<u2")])
"""The columns of a .docs file, one after the other."""

PAGE = 4096 // DOCS["end"].itemsize
"""Document ends that are read at a time: a page of the file."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype of the tokens of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def is_token_set(path: str | os.PathLike) -> bool:
    """Whether a directory is a finished token set, of any version."""
    try:
        with (Path(path).expanduser() / "index.json").open("rb") as file:
            return FORMAT.encode() in file.read(256)
    except (OSError, RuntimeError):  # RuntimeError: ~ before a user that is not here
        return False


def refuse_token_set(location: str) -> NoReturn:
    """Raises `InputError` for a token set where texts are read."""
    raise InputError(
        f"data.source: {location} is a token set, and texts are needed here; to train on it, "
        f"set tokenizer={location}/tokenizer"
    )


def is_begun(directory: Path) -> bool:
    """Whether a directory is a token set, finished or in the making."""
    return is_token_set(directory) or (directory / "preparing" / "settings.json").exists()


def megatron_splits(source: str | list[str]) -> dict[str, Path]:
    """The prefixes of a Megatron set (megatron.py) by split; {} if `source` is none.

    source: PREFIX, PREFIX.idx or PREFIX.bin, or a directory with train.idx and perhaps validation.idx.
    """
    if not isinstance(source, str):
        return {}
    path = Path(source).expanduser()
    if path.is_dir():
        prefixes = {split: path / split for split in SPLITS if (path / f"{split}.idx").is_file()}
        return prefixes if "train" in prefixes else {}
    if path.suffix in (".idx", ".bin"):
        return {"train": path.with_suffix("")}
    # Beside a file of texts, such an index is that of another program.
    has_index = path.with_name(f"{path.name}.idx").is_file() and not path.exists()
    return {"train": path} if has_index else {}


class TokenSet:
    """All tokens of a split, "train" or "validation": documents in a line, `[bos] tokens [eos]`.

    It holds no open file, so it may be pickled, and read by threads and forked processes. A row is read
    by its bytes: of a cold disk only its own pages, and a file that has become shorter is an `InputError`.

    Attributes:
        identity: a hash of the tokens, documents and sources, whatever the directory is called.
        tokens, documents: their numbers.
        files: the files, with the sizes and sums in the index.
        settings: the settings that the tokens depend on: bos, eos, tokenizer (its fingerprint), vocab_size, …
        ends: the ids of bos and eos.
    Raises:
        InputError: the set or split does not exist, or a file's size is not that of the index.
    """

    def __init__(self, path: str | os.PathLike, split: str):
        path = Path(path).expanduser()
        index = read_index(path)
        self.directory = path / split

        self._shards = shard_entries(path, index, split)
        if not self._shards:
            raise InputError(
                f"{path}: no documents for {split}; prepare it with another validation share or source"
            )
        # Sizes are compared at once; the sums, which need all bytes, by `SumCheck`.
        self.files = [file for shard in self._shards for file in shard.files()]
        for file in self.files:
            file.check_size()

        tokenizer = index["tokenizer"]
        self.settings: dict[str, Any] = {
            **index["settings"],
            "tokenizer": tokenizer["fingerprint"],
            "vocab_size": tokenizer["vocab_size"],
        }
        self.ends = {name: tokenizer[name] for name in ("bos", "eos")}

        # The first token and document of each shard, and the totals: [shards + 1].
        self._tokens = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._documents = np.cumsum([0, *(shard.documents for shard in self._shards)])
        self.tokens = int(self._tokens[-1])
        self.documents = int(self._documents[-1])

        # Without the names of shards, which say nothing about the content.
        content = [index["dtype"]]
        for shard in index[split]["shards"]:
            content.append([shard["tokens"], shard["sources"], shard["files"]])
        self.identity = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), int32 [stop - start]."""
        _check_range(start, stop, self.tokens, "tokens")
        out = np.empty(stop - start, np.int32)
        for shard, base, low, high in self._shards_between(start, stop):
            # The shard's tokens [low, high) are [base + low, base + high) of the split.
            out[base + low - start : base + high - start] = shard.tokens_between(low, high)
        return out

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) where documents begin, int64, counted from the split's first token."""
        _check_range(start, stop, self.tokens, "tokens")
        # A document begins where the one before it ends; the first of a shard begins at 0.
        starts = [np.zeros(0, np.int64)]
        for shard, base, low, high in self._shards_between(start, stop):
            if low == 0:
                starts.append(np.array([base], np.int64))
            starts.append(base + shard.ends_between(low, high))
        return np.concatenate(starts)

    def document(self, number: int) -> tuple[np.ndarray, str]:
        """Tokens, int32, and source of document `number`."""
        _check_range(number, number + 1, self.documents, "documents")
        position = int(np.searchsorted(self._documents, number, "right")) - 1
        shard = self._shards[position]
        number -= int(self._documents[position])  # within the shard

        # It begins where the document before it ends.
        low = int(shard.ends(number - 1, number)[0]) if number else 0
        high = int(shard.ends(number, number + 1)[0])
        # -1 < low < high < tokens + 1: the document has a token, and lies inside the shard.
        shard.check_ends(np.array([-1, low, high, shard.tokens + 1]))

        source = int(shard.source_numbers(number, number + 1)[0])
        if source >= len(shard.sources):
            raise shard.damaged(
                "docs", f"document {number} has source {source} of {len(shard.sources)}"
            )
        return np.array(shard.tokens_between(low, high), np.int32), shard.sources[source]

    def _shards_between(self, start: int, stop: int) -> Iterator[tuple[Entry, int, int, int]]:
        """The shards that [start, stop) touches, each with its first token and its own range of tokens."""
        position = int(np.searchsorted(self._tokens, start, "right")) - 1
        while start < stop:  # a shard a turn
            base = int(self._tokens[position])
            end = min(stop, int(self._tokens[position + 1]))
            yield self._shards[position], base, start - base, end - base
            start = end
            position += 1


class SumCheck:
    """Compares files with the sums in their index, in a thread, up to the first damaged one.

    record: a file that keeps which files were found whole. One that has not changed since is not read again,
    so a start goes on where the one before it stopped.

    Attributes:
        problem: one line about the damaged file, or None.
        settled: whether every process has compared its files and found no damage.
    """

    settled = False

    def __init__(self, files: list[StatedFile], record: Path | None = None):
        self.problem: str | None = None
        self._files = files
        self._record = record
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nalanda-sums", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether this process has compared its files."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        records = read_records(self._record)
        compared = {tuple(stamp) for stamp in records if isinstance(stamp, list)}
        for file in self._files:
            if self._closed.is_set() or self.problem:
                return

            # Taken before the file is read: one that changes meanwhile is read again.
            stamp = file.stamp()
            if stamp in compared:
                continue
            self.problem = file.damage(sums=True)
            if self.problem is None:
                append_record(self._record, stamp)

    def wait(self, beat: Callable[[], None] = lambda: None) -> str | None:
        """`problem`, after all files were read. `beat` is called every second."""
        while self._thread.is_alive():
            self._thread.join(1.0)
            beat()
        return self.problem

    def close(self) -> None:
        self._closed.set()


class StatedFile(NamedTuple):
    """A file with the size and sum that the index states."""

    path: Path
    size: int
    sha256: str

    def check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise InputError(f"{self.path}: {first_line(error)}; prepare the set again") from None
        if size != self.size:
            raise InputError(
                f"{self.path}: {size:,} bytes, and the index says {self.size:,}; copy or prepare it again"
            )

    def stamp(self) -> tuple | None:
        """Facts that change with the file or with its sum in the index; None if it cannot be found."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        times = status.st_mtime_ns, status.st_ctime_ns
        return os.path.abspath(self.path), status.st_size, *times, status.st_ino, self.sha256

    def damage(self, *, sums: bool) -> str | None:
        """A line about the damage: another size or, with `sums`, another content. None: it is whole."""
        try:
            self.check_size()
            if sums and sha256_of(self.path) != self.sha256:
                return f"{self.path}: damaged, its SHA-256 is not that of the index; copy or prepare it again"
        except (InputError, OSError) as error:
            return str(error)
        return None


class Entry:
    """A shard as the index describes it; its ids lie below `vocabulary`.

    Raises:
        KeyError, TypeError, ValueError: the entry contradicts itself.
    """

    def __init__(self, path: Path, entry: dict, dtype: str, vocabulary: int = 1 << 32):
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocabulary = vocabulary
        self.stated = entry
        self.tokens = entry["tokens"]
        self.documents = entry["documents"]
        self.counts = entry["sources"]  # name → [documents, tokens]
        self.sources = list(self.counts)
        self._files = {  # [bytes, SHA-256] of each
            kind: StatedFile(path.with_suffix(f".{kind}"), *entry["files"][kind])
            for kind in ("tokens", "docs")
        }

        # Columns of equal length: a document has an end and a source, a token an id.
        stated = [file.size for file in self.files()]
        sizes = [self.tokens * self.dtype.itemsize, self.documents * DOCS.itemsize]
        if stated != sizes or not self.tokens >= self.documents > 0:
            raise ValueError(f"{entry['name']}: {self.tokens} tokens, {self.documents} documents")
        # [documents, tokens]
        totals = [sum(column) for column in zip(*self.counts.values(), strict=True)]
        if totals != [self.documents, self.tokens]:
            raise ValueError(f"{entry['name']}: its sources are not the sum of its documents")

    def files(self) -> list[StatedFile]:
        return [*self._files.values()]

    def tokens_between(self, low: int, high: int) -> np.ndarray:
        """The shard's tokens [low, high). Raises `InputError` for an id outside of the vocabulary."""
        tokens = self._read_column("tokens", self.dtype, low, high)
        # Ids are unsigned, so the largest one is enough.
        if len(tokens) and (largest := int(tokens.max())) >= self.vocabulary:
            position = low + int(tokens.argmax())
            raise self.damaged(
                "tokens", f"token {position} is {largest}, in a vocabulary of {self.vocabulary}"
            )
        return tokens

    def ends(self, low: int, high: int) -> np.ndarray:
        """The ends of documents [low, high), int64; only the last document's is checked."""
        ends = self._read_column("docs", DOCS["end"], low, high)
        if high == self.documents and ends[-1] != self.tokens:
            raise self._disordered()
        return ends

    def source_numbers(self, low: int, high: int) -> np.ndarray:
        """The positions of the sources of documents [low, high), uint16, unchecked."""
        offset = self.documents * DOCS["end"].itemsize
        return self._read_column("docs", DOCS["source"], low, high, offset)

    def _read_column(
        self, kind: str, dtype: np.dtype, low: int, high: int, offset: int = 0
    ) -> np.ndarray:
        """Items [low, high) of the column of a file that begins at `offset`."""
        size = dtype.itemsize
        content = _read_bytes(self._files[kind], offset + low * size, offset + high * size)
        return np.frombuffer(content, dtype)

    def ends_between(self, low: int, high: int) -> np.ndarray:
        """The ends in [low, high), int64, where low < high."""
        first, ends = self._find_end(low)  # first: the document behind these ends
        while ends[-1] < high and first < self.documents:
            stop = min(first + PAGE, self.documents)
            ends = np.concatenate([ends, self.ends(first, stop)])
            first = stop

        count = int(ends.searchsorted(high))  # those below `high`; the next one shows their order
        self.check_ends(ends[: count + 1])
        # The last end is the number of tokens, so a whole file has one at or above `high`.
        if count == len(ends):
            raise self._disordered()
        return ends[:count]

    def _find_end(self, low: int) -> tuple[int, np.ndarray]:
        """The first end >= `low` with the ends behind it on its page, and the number of the document after
        those.

        Documents are about equally long, so the page is guessed from `low`: that reads one page or two, and
        halving eight. Every third guess halves, so the search is short in any file.
        """
        # Ends in front of `first` are below `low`, those behind `last` are not.
        first, last = 0, self.documents - 1  # the document is one of these, or the one after them
        before, after = 0, self.tokens  # the ends in front of and behind these documents
        result = self.documents, np.zeros(0, np.int64)
        for turn in itertools.count(1):
            if first > last:
                break

            # Interpolation, and every third time bisection; then the page that holds the guess.
            share = (low - before) / max(1, after - before) if turn % 3 else 0.5
            guess = first + int(min(max(share, 0.0), 1.0) * (last - first))
            start = guess // PAGE * PAGE
            stop = min(start + PAGE, self.documents)
            ends = self.ends(start, stop)

            if ends[-1] < low:  # the page lies in front
                first, before = stop, int(ends[-1])
                continue
            result = stop, ends[ends.searchsorted(low) :]
            if ends[0] < low:  # the first end >= low is on this page
                break
            last, after = start - 1, int(ends[0])  # or on one before it

        if not len(result[1]):
            raise self._disordered()
        return result

    def check_ends(self, ends: np.ndarray) -> None:
        """Raises `InputError` unless each end lies after the one before."""
        if (np.diff(ends) <= 0).any():
            raise self._disordered()

    def check(self, kind: str) -> None:
        """Checks a whole file, "tokens" or "docs"; reading checks only what it reads. Raises `InputError`."""
        _open.cache_clear()  # the file may be another by now
        if kind == "tokens":
            # In pieces, which bounds the memory.
            for low in range(0, self.tokens, 1 << 22):
                self.tokens_between(low, min(low + (1 << 22), self.tokens))
            return

        ends = self.ends(0, self.documents)  # [D]
        sources = self.source_numbers(0, self.documents)  # [D]
        self.check_ends(np.concatenate([[0], ends]))
        # Counted by source, as the index has them.
        documents = np.bincount(sources, minlength=len(self.sources))
        tokens = np.bincount(sources, np.diff(ends, prepend=0), len(self.sources))
        if np.stack([documents, tokens], 1).tolist() != [*self.counts.values()]:
            raise self.damaged("docs", "its documents by source are not those of the index")

    def _disordered(self) -> InputError:
        return self.damaged("docs", "its documents do not follow one another up to the last token")

    def damaged(self, kind: str, how: str) -> InputError:
        return InputError(
            f"{self.path.with_suffix(f'.{kind}')}: damaged, {how}; copy or prepare it again"
        )


class _OpenFile(io.FileIO):
    """A file that is open for reading at random; it is closed with the last reference to it."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        if hasattr(os, "posix_fadvise"):  # else the kernel would read megabytes ahead
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        self.close()  # so that Python does not warn of it


def _most_open() -> int:
    """`OPEN_FILES`, or a quarter of what the process may open."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return OPEN_FILES
    return min(OPEN_FILES, max(2, allowed // 4))


@functools.lru_cache(maxsize=_most_open())
def _open(file: StatedFile) -> _OpenFile:
    file.check_size()
    return _OpenFile(file.path)


def _read_bytes(file: StatedFile, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file. Raises `InputError` if it is shorter, or cannot be read.

    A thread that reads holds its file, so another that opens the next one does not close it.
    """
    try:
        opened = _open(file)
        content = b""
        while len(content) < stop - start:  # the system gives at most 2 GiB at a time
            more = os.pread(opened.fileno(), stop - start - len(content), start + len(content))
            if not more:
                raise InputError(
                    f"{file.path}: ends before byte {stop:,}, and the index says {file.size:,} bytes; "
                    "copy or prepare it again"
                )
            content += more
    except (OSError, InputError) as error:
        _open.cache_clear()  # a file that is put back in its place is opened anew
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file.path}: cannot be read ({first_line(error)}); restore it") from None
    return content


def _check_range(start: int, stop: int, count: int, what: str) -> None:
    if not 0 <= start <= stop <= count:
        raise IndexError(f"{what} {start} to {stop} of {count}")


def read_index(path: str | os.PathLike) -> dict:
    """The index of a token set. Raises `InputError` if the directory has none that this version reads."""
    path = Path(path).expanduser() / "index.json"
    try:
        index = json.loads(path.read_bytes())
        if index["format"] != FORMAT:
            raise KeyError
    except FileNotFoundError:
        raise InputError(f"{path}: does not exist; nalanda data prepare makes one") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{path}: damaged, or not the index of a token set; copy or prepare it again"
        ) from None
    if index.get("version") != VERSION:
        raise InputError(
            f"{path}: version {index.get('version')}, and this Nalanda reads {VERSION}; prepare the set again"
        )

    try:
        # An index that was cut or edited shows here, before a row is read.
        _check_totals(path.parent, index)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: damaged, it contradicts itself ({first_line(error)}); copy or prepare it again"
        ) from None
    return index


def write_index(
    directory: Path,
    shards: Mapping[str, list[dict]],
    *,
    dtype: str,
    settings: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    **more: Any,
) -> dict:
    """Writes the index, with which a set is finished. Returns it.

    shards: the entries of each split's shards. tokenizer: from `describe_tokenizer`. more: further keys.
    """
    splits = {split: totals(shards[split]) for split in SPLITS}
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "settings": settings,
        "tokenizer": tokenizer,
        "sources": sorted({name for split in splits.values() for name in split["sources"]}),
        **splits,
        **more,
    }
    write_atomically(directory / "index.json", json.dumps(index, indent=1, ensure_ascii=False))
    return index


def _check_totals(path: Path, index: dict) -> None:
    """Raises `ValueError`, or another error, if the index is not the sum of its shards, or lacks bos and eos."""
    if not {"bos", "eos"} <= index["tokenizer"].keys():
        raise ValueError("its tokenizer names no bos and eos")
    for split in SPLITS:
        entries = [entry.stated for entry in shard_entries(path, index, split)]
        if index[split] != totals(entries):
            raise ValueError(f"{split} is not the sum of its shards")

    if index["sources"] != sorted({name for split in SPLITS for name in index[split]["sources"]}):
        raise ValueError("its sources are not those of its shards")


def shard_entries(path: str | os.PathLike, index: dict, split: str) -> list[Entry]:
    """The shards of a split."""
    dtype = index["dtype"]
    vocabulary = index["tokenizer"]["vocab_size"]
    return [
        Entry(Path(path) / split / shard["name"], shard, dtype, vocabulary)
        for shard in index[split]["shards"]
    ]


def totals(shards: list[dict]) -> dict:
    """The index's entry of a split, from the entries of its shards."""
    sources: dict[str, list[int]] = {}
    for shard in shards:
        for name, counts in shard["sources"].items():
            before = sources.get(name, [0, 0])
            # A new list: the shards' own entries stay as they are.
            sources[name] = [before[0] + counts[0], before[1] + counts[1]]
    sums = {
        key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "text_bytes")
    }
    return {**sums, "sources": dict(sorted(sources.items())), "shards": shards}
