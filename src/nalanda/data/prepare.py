"""Prepares a token set (`token_set.py` has its format): many processes, each writing whole shards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from nalanda.common.errors import DiskFull, InputError, first_line, local_output, no_room
from nalanda.common.files import rename_synced
from nalanda.common.plugins import import_plugins, imported
from nalanda.common.processes import end_with_parent
from nalanda.common.progress import Progress
from nalanda.common.text import duration, is_url, redact
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.corpus import Corpus, check_apart, describe_files, open_corpora, unless_blank
from nalanda.data.documents import (
    BLOCK,
    Document,
    Fields,
    FileShard,
    Left,
    Shard,
    TextShard,
    digest,
    document_in,
    read_jsonl,
    read_parquet,
    reader_of,
    split_lines,
    take_documents,
)
from nalanda.data.hashes import FileHashes, sample_of
from nalanda.data.hold_out import CutFile, HoldOut
from nalanda.data.inspect import ByteProgress, check_set
from nalanda.data.records import left_out
from nalanda.data.token_set import (
    FORMAT,
    SPLITS,
    VERSION,
    Entry,
    is_token_set,
    read_index,
    token_dtype,
    totals,
)
from nalanda.data.tokenizer import build_tokenizer, describe_tokenizer, encoder, load_tokenizer
from nalanda.data.urls import identity_of

PRELOAD = ["nalanda.data.prepare", "transformers.models.auto.tokenization_auto"]
"""Modules that every worker imports."""

URLS = "urls.json"
"""File beside the plan, readable by its owner alone, that has sources whose URLs may hold a password or a
signature. `prepare` removes it when the work ends, `Preparation.seal` with the plan."""

LEFTOVER = re.compile(r"\.(\d+(\.docs)?|index\.json)\.\d+")
"""A file that a killed process left (`ShardWriter`, `write_whole`)."""

SHARD_FILE = re.compile(r"\d+\.(tokens|docs)")

HASHES = "hashes.jsonl"
"""File beside the plan that keeps the hashes of the source's files while the set is made."""

HASHING = 8
"""Files hashed at a time."""

GROUP = 1 << 20
"""Characters tokenised at a time."""

SMALLEST, LARGEST = 1 << 20, 256 << 20
"""Bounds of the default bytes of input of a shard."""


# ------------------------------ the plan


class Unit(NamedTuple):
    """A part of a source's shard: all of it, the lines that begin in bytes [start, stop), or such rows."""

    corpus: str
    """Split that the shard's corpus was opened for."""
    shard: int
    identity: str
    weight: int
    """Bytes of input."""
    start: int = 0
    stop: int | None = None
    content: str = ""
    """Hash of the shard (`contents_of`)."""
    path: str = ""
    """Place of a local file."""

    @property
    def key(self) -> str:
        """What the tokens of the unit depend on, beside the settings."""
        return f"{self.content} {self.start} {self.stop} {self.corpus} {self.identity}"

    @staticmethod
    def of(key: str) -> Unit:
        """The unit of a key, without its weight and its place in the source."""
        content, start, stop, corpus, identity = key.split(" ", 4)
        return Unit(
            corpus, 0, identity, 0, int(start), None if stop == "None" else int(stop), content
        )


def contents_of(
    corpus: Corpus, split: str, hashes: FileHashes, earlier: Iterable[Unit]
) -> list[str]:
    """`Corpus.content` of each shard, made in the way of an earlier one."""
    likes = {unit.identity: unit.content for unit in earlier if unit.corpus == split}

    def content(number: int) -> str:
        return corpus.content(number, hashes, likes.get(corpus.shards[number].identity, ""))

    with ThreadPoolExecutor(HASHING) as pool:
        return [*pool.map(content, range(len(corpus.shards)))]


def plan_units(corpus: Corpus, split: str, limit: int, contents: list[str]) -> Iterator[Unit]:
    """The units of a corpus; a large .jsonl or .parquet file is cut into parts of about `limit` bytes."""
    for number, (shard, content) in enumerate(zip(corpus.shards, contents, strict=True)):
        size = _size(shard)
        path = str(shard.path) if isinstance(shard, FileShard) else ""
        weight = limit if size is None else size
        unit = Unit(split, number, shard.identity, weight, content=content, path=path)
        parts: list[Unit] = []
        large = isinstance(shard, FileShard) and unit.weight > limit
        if large and _is_plain_jsonl(shard.path):
            cuts = [*range(0, unit.weight, limit), unit.weight]
            parts = [
                unit._replace(weight=b - a, start=a, stop=b) for a, b in itertools.pairwise(cuts)
            ]
        elif large and reader_of(shard.path) is read_parquet:
            parts = [
                unit._replace(weight=w, start=a, stop=b) for a, b, w in _row_groups(shard.path)
            ]
        yield from parts or [unit]


def _is_plain_jsonl(path: Path) -> bool:
    """Whether a file may be cut at its lines: a plugin's reader of some .jsonl reads it otherwise."""
    return reader_of(path) is read_jsonl and path.suffix.lower() == ".jsonl"


def _size(shard: Shard) -> int | None:
    """Bytes of input, or None if only reading tells."""
    if isinstance(shard, FileShard):
        return shard.size
    return (
        len(shard.text.encode()) if isinstance(shard, TextShard) else getattr(shard, "size", None)
    )


def _density(shard: Shard) -> int:
    """About the bytes of text in a byte of input, so that the bar moves within a large file."""
    return (
        3
        if isinstance(shard, FileShard) and shard.path.suffix.lower() in (".gz", ".zst", ".parquet")
        else 1
    )


def _row_groups(path: Path) -> list[tuple[int, int, int]]:
    """(first row, row after the last, bytes) of each row group; [] for a damaged file, left to its reader."""
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.read_metadata(path)
    except (ArrowException, OSError):
        return []
    found, row = [], 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        size = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        if group.num_rows:
            found.append((row, row + group.num_rows, size))
        row += group.num_rows
    return found


def group_units(units: Iterable[Unit], limit: int) -> list[list[Unit]]:
    """Groups of consecutive units of up to `limit` bytes together; a larger unit is a group. In a group,
    neighbouring parts of a shard become one, which is read at once."""
    groups: list[list[Unit]] = []
    weight = limit
    for unit in units:
        if weight + unit.weight > limit:
            groups.append([])
            weight = 0
        groups[-1].append(unit)
        weight += unit.weight
    return [join_parts(group) for group in groups]


def join_parts(units: Iterable[Unit]) -> list[Unit]:
    """The units, neighbouring parts of a shard as one."""
    joined: list[Unit] = []
    for unit in units:
        last = joined[-1] if joined else None
        if last and (last.corpus, last.shard, last.stop) == (unit.corpus, unit.shard, unit.start):
            joined[-1] = last._replace(weight=last.weight + unit.weight, stop=unit.stop)
        else:
            joined.append(unit)
    return joined


def plan_jobs(
    units: list[Unit], limit: int, made: Mapping[str, list[str]]
) -> tuple[list[list[Unit]], list[str | None]]:
    """Groups of all units in their order, and for each the name of the shard that is made of it already.

    A made shard is kept if its units are there, unchanged and next to each other. What lies between kept ones
    is grouped anew (`group_units`), so the documents' order is that of the source.

    made: the keys of the units of each shard, by its name.
    """
    firsts: dict[tuple, list[str]] = {}
    for name, keys in made.items():
        first = Unit.of(keys[0])
        firsts.setdefault((first.corpus, first.identity, first.start), []).append(name)
    places = {(unit.corpus, unit.identity, unit.stop): place for place, unit in enumerate(units)}

    def kept_at(place: int) -> tuple[str, int] | None:
        """The made shard of the units from `place` on, and the place after it."""
        first = units[place]
        for name in firsts.get((first.corpus, first.identity, first.start), ()):
            last = Unit.of(made[name][-1])
            end = places.get((last.corpus, last.identity, last.stop), -1) + 1
            if [unit.key for unit in join_parts(units[place:end])] == made[name]:
                return name, end
        return None

    jobs: list[list[Unit]] = []
    names: list[str | None] = []
    between: list[Unit] = []

    def group() -> None:
        jobs.extend(group_units(between, limit))
        names.extend([None] * (len(jobs) - len(names)))
        between.clear()

    place = 0
    while place < len(units):
        if found := kept_at(place):
            group()
            names.append(found[0])
            jobs.append(join_parts(units[place : found[1]]))
            place = found[1]
        else:
            between.append(units[place])
            place += 1
    group()
    return jobs, names


def name_shards(names: list[str | None], taken: Container[str]) -> list[str]:
    """A name for each shard, those without one getting numbers that no kept shard has and none in `taken`."""
    numbers = (f"{number:05d}" for number in itertools.count())
    free = (name for name in numbers if name not in taken and name not in names)
    return [name or next(free) for name in names]


def describe_changes(before: Iterable[Unit], now: Iterable[Unit]) -> str:
    """Which files changed, came and went, in a few words."""
    old, new = (
        {(u.corpus, _file_of(u)): (u.identity, u.content) for u in units} for units in (before, now)
    )
    words = [
        f"{name} changed"
        for (split, name), what in old.items()
        if new.get((split, name), what) != what
    ]
    words += [f"{name} is gone" for split, name in old if (split, name) not in new]
    words += [f"{name} is new" for split, name in new if (split, name) not in old]
    return ", ".join(words[:3]) + (f" and {len(words) - 3:,} more" if words[3:] else "")


def _file_of(unit: Unit) -> str:
    return re.sub(r":\d+$", "", unit.identity)


def _read(shard: Shard, unit: Unit) -> Iterator[Document | Left]:
    if unit.stop is None:
        yield from (document for document, _ in shard.read(None))
    elif isinstance(shard, FileShard) and _is_plain_jsonl(shard.path):
        yield from _read_lines(shard, unit.start, unit.stop)
    else:
        for document, row in shard.read(unit.start):
            yield document
            if row >= unit.stop:
                return


def _read_lines(shard: FileShard, start: int, stop: int) -> Iterator[Document | Left]:
    """The documents of lines that begin in bytes [start, stop)."""
    with shard.path.open("rb") as file:
        file.seek(place := max(0, start - 1))
        lines = split_lines(iter(partial(file.read, BLOCK), b""), shard.fields._replace(skip=True))
        if start:  # skips the line that the part before reads
            place += next(lines, (b"", 0))[1] + 1
        for line, size in lines:
            if place >= stop:
                return
            if line is None and shard.fields.skip:
                yield Left.OVERSIZED
            elif line is None or line.strip():
                try:
                    document = document_in(line or b"", shard.fields, "")
                except ValueError:  # the file's own reader names the line
                    document = next(shard.read(_lines_before(shard.path, place)))[0]
                yield document
            place += size + 1


def _lines_before(path: Path, place: int) -> int:
    count = 0
    with path.open("rb") as file:
        while place > 0 and (chunk := file.read(min(place, 1 << 20))):
            count += chunk.count(b"\n")
            place -= len(chunk)
    return count


# ------------------------------ writing a set


class ShardWriter:
    """A shard that is being written, under names that no reader opens."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path, self.dtype = path, dtype
        self.partial = path.with_name(f".{path.name}.{os.getpid()}")
        self.tokens = self.text_bytes = 0
        self.sum = sha256()
        self.file = self.partial.open("wb")
        self.ends: list[int] = []
        self.sources: list[int] = []
        self.numbers: dict[str, int] = {}  # source → position, in the order of appearance
        self.counts: dict[str, list[int]] = {}  # source → documents, tokens, in the same order

    def add(self, tokens: np.ndarray, source: str, text_bytes: int) -> None:
        """Appends a document of the named source, with the bytes of its text, unless it has no token."""
        if not len(tokens):
            return
        source = source.encode(errors="replace").decode()  # half a surrogate cannot be written
        content = tokens.astype(self.dtype).tobytes()
        self.file.write(content)
        self.sum.update(content)
        self.tokens += len(tokens)
        self.text_bytes += text_bytes
        self.ends.append(self.tokens)
        self.sources.append(self.numbers.setdefault(source, len(self.numbers)))
        counts = self.counts.setdefault(source, [0, 0])
        counts[0] += 1
        counts[1] += len(tokens)

    def close(self) -> dict | None:
        """Syncs and renames the shard; returns its entry in the index, or None without a document."""
        if not self.ends:
            self.abandon()
            return None
        if len(self.counts) > 1 << 16:
            raise InputError(
                f"data.source_field: names {len(self.counts):,} sources, above 65,536; set another field"
            )
        self.file.close()
        docs = np.array(self.ends, "<i8").tobytes() + np.array(self.sources, "<u2").tobytes()
        write_whole(self.path.with_suffix(".docs"), docs)
        rename_synced(self.partial, self.path.with_suffix(".tokens"))
        return {
            "name": self.path.name,
            "documents": len(self.ends),
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "sources": self.counts,
            "files": {
                "tokens": [self.tokens * self.dtype.itemsize, self.sum.hexdigest()],
                "docs": [len(docs), sha256(docs).hexdigest()],
            },
        }

    def abandon(self) -> None:
        try:
            self.file.close()  # writes what is left, which a full disk refuses
        finally:
            self.partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """`files.write_atomically` for a file that several processes may write at once."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    rename_synced(partial, path)


class Preparation:
    """The plan that `begin` wrote in a directory. Any process may open it and make any of the shards."""

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        path = self.directory / "preparing" / "plan.json"
        try:
            plan = json.loads(path.read_bytes())
        except OSError as error:
            raise InputError(
                f"{path}: {first_line(error)}; begin with nalanda data prepare"
            ) from None
        import_plugins(plan.get("plugins", ()))
        self.settings, self.tokenizer = plan["settings"], plan["tokenizer"]
        self.dtype = np.dtype(plan["dtype"]).newbyteorder("<")
        self.data = DataConfig(**plan["data"] | (_json(path.with_name(URLS)) or {}))
        self.jobs = [[Unit(*unit) for unit in job] for job in plan["jobs"]]
        self.weights = [sum(unit.weight for unit in job) for job in self.jobs]
        self.names, self.kept, self.made = plan["names"], plan["kept"], plan["made"]
        self.cut = plan["cut"]
        self.hold_out = HoldOut(*plan["hold_out"]) if plan["hold_out"] else None
        self.hashes = FileHashes(path.with_name(HASHES))

    @functools.cached_property
    def encode(self) -> Callable[[list[str]], list[np.ndarray]]:
        return encoder(load_tokenizer(self.directory / "tokenizer"), self.data)

    @functools.cached_property
    def corpora(self) -> dict[str, Corpus]:
        return open_corpora(self.data)

    def _open(self, unit: Unit) -> Shard:
        """The shard of a unit. Raises `InputError` if it is another than when the work was planned."""
        if unit.path:
            kind = CutFile if self.cut else FileShard
            shard: Shard = kind(Path(unit.path), _file_of(unit), Fields.of(self.data))
        else:
            shard = self.corpora[unit.corpus].shards[unit.shard]
        if shard.identity != unit.identity:
            raise InputError(f"{unit.identity}: now {shard.identity}; run the same command again")
        if isinstance(shard, FileShard):
            content = self.hashes.of(shard.path, sample_of(unit.content))
        else:
            content = self.corpora[unit.corpus].content(unit.shard)
        if content != unit.content:
            raise InputError(f"{shard.identity}: has other content now; run the same command again")
        return shard

    def _parts(self, document: Document, splits: Sequence[str]) -> Iterator[tuple[Document, str]]:
        """The splits that a document belongs to, each with its part of it."""
        for split in splits:
            text = (
                self.hold_out.part(document.text, split)
                if self.hold_out
                else unless_blank(document.text)
            )
            if text is not None:
                yield document._replace(text=text), split

    def record(self, number: int) -> dict | None:
        """A finished shard's record, or None if the record or a file of its size is missing."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            if (found := self.kept.get(self.names[number])) is None:
                found = json.loads(self._record_path(number).read_bytes())
            if found["made"] != self.made or found["units"] != [
                unit.key for unit in self.jobs[number]
            ]:
                return None
            for split, entry in record_entries(found).items():
                for file in Entry(
                    self.directory / split / entry["name"], entry, self.dtype.name
                ).files():
                    file.check_size()
            return found
        return None

    def _record_path(self, number: int) -> Path:
        return self.directory / "preparing" / f"{self.names[number]}.json"

    def make(self, number: int, report: Callable[[int, int], None] = lambda *done: None) -> dict:
        """Makes a shard, unless it is finished, and returns its record.

        The record has an entry for each split and, if documents were left out, their numbers (`Left`).

        Args:
            report: called from time to time with the bytes of input and of text that are done.
        Raises:
            InputError: the source cannot be read or has changed; nothing of this shard is kept.
            OSError: the directory cannot be written.
        """
        if (record := self.record(number)) is not None:
            text = sum(entry["text_bytes"] for entry in record_entries(record).values())
            report(self.weights[number], text)
            return record
        units = self.jobs[number]
        left: Counter[str] = Counter()
        splits = SPLITS if self.hold_out else (units[0].corpus,)
        with _one_thread(), contextlib.ExitStack() as stack:
            writers = {}
            for split in splits:
                writers[split] = ShardWriter(
                    self.directory / split / self.names[number], self.dtype
                )
                stack.callback(writers[split].abandon)
            weight = text = 0
            for unit in units:
                shard = self._open(unit)
                documents, read = _read(shard, unit), text
                while group := take_documents(documents, GROUP):
                    left.update(found.value for found in group if isinstance(found, Left))
                    chosen = [
                        found
                        for document in group
                        if isinstance(document, Document)
                        for found in self._parts(document, splits)
                    ]
                    for (document, split), tokens in zip(
                        chosen, self.encode([document.text for document, _ in chosen]), strict=True
                    ):
                        writers[split].add(tokens, document.source, len(document.text.encode()))
                    read = sum(writer.text_bytes for writer in writers.values())
                    report(weight + min(unit.weight, (read - text) // _density(shard)), read)
                weight, text = weight + unit.weight, read
                report(weight, read)
            record = {
                split: entry for split, writer in writers.items() if (entry := writer.close())
            }
        record |= {"made": self.made, "units": [unit.key for unit in units]}
        record |= left
        write_whole(self._record_path(number), json.dumps(record).encode())
        return record

    def seal(self) -> dict:
        """Writes the index, then removes the plan and what is left of earlier work. Returns the index.

        Raises:
            InputError: shards are missing.
        """
        records = [self.record(number) for number in range(len(self.jobs))]
        missing = [number for number, record in enumerate(records) if record is None]
        if missing:
            raise InputError(
                f"{self.directory}: {len(missing)} of {len(records)} shards are missing, the first is number "
                f"{missing[0]}; run the same command again"
            )
        splits = {
            split: totals([record[split] for record in records if record and split in record])
            for split in SPLITS
        }
        if not splits["train"]["documents"]:
            source = self.settings["source"]
            raise InputError(f"{source}: no document with text; name another source or text field")
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "settings": self.settings,
            "tokenizer": self.tokenizer,
            "sources": sorted({name for split in splits.values() for name in split["sources"]}),
            **splits,
        }
        index |= sum(map(left_out, filter(None, records)), Counter())
        index["made"] = self.made
        index["records"] = {
            name: {key: value for key, value in record.items() if key not in (*SPLITS, "made")}
            for name, record in zip(self.names, records, strict=True)
            if record
        }
        write_whole(
            self.directory / "index.json", json.dumps(index, indent=1, ensure_ascii=False).encode()
        )
        tidy(self.directory, index)
        return index


def tidy(directory: Path, index: dict) -> None:
    """Removes from a finished set what its index does not name: the plan, files of killed processes, and
    shards of an earlier index."""
    for place in [directory / split for split in SPLITS] + [directory]:
        for leftover in place.glob(".*"):
            if LEFTOVER.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)
    for split in SPLITS:
        named = {shard["name"] for shard in index[split]["shards"]}
        for file in (directory / split).glob("*"):
            if SHARD_FILE.fullmatch(file.name) and file.stem not in named:
                file.unlink(missing_ok=True)
    shutil.rmtree(directory / "preparing", ignore_errors=True)


def record_entries(record: dict) -> dict[str, dict]:
    """The index entries of a shard's record, by split."""
    return {split: record[split] for split in SPLITS if split in record}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Turns off the tokenizer's threads, since processes share the cores."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def begin(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    directory: str | os.PathLike,
    *,
    shard_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Preparation | None:
    """Plans the work in `directory`, or resumes the plan there. Returns None if the set is finished.

    Raises:
        InputError: the source or the tokenizer cannot be opened; the directory holds something else, or was
            begun with other settings.
    """
    directory = local_output(directory, "output")
    _check(data, tokenizer, shard_bytes)
    _refuse_other_files(directory)
    corpora = open_corpora(data)
    prints = {split: corpus.fingerprint for split, corpus in corpora.items()}
    if data.validation_source and prints["train"] == prints["validation"]:
        prints["validation"] += " of validation_source"  # two folders of equal names and sizes
    if data.validation_source:
        check_apart(**corpora)
    hold_out = corpora["train"].hold_out
    parts = {split: corpora[split] for split in (SPLITS[:1] if hold_out else SPLITS)}

    work, saved = directory / "preparing", directory / "tokenizer"
    index = read_index(directory) if is_token_set(directory) else None
    recorded = index["settings"] if index else _json(work / "settings.json")
    shard_bytes = shard_bytes or (recorded or {}).get("shard_bytes") or _usual_shard_bytes(parts)
    settings = token_settings(data, tokenizer, prints, shard_bytes)
    _refuse_other_settings(directory, recorded, settings)
    known = index is not None and "records" in index
    if index and not known and index["settings"]["corpus"] == prints:  # made by an earlier version
        tidy(directory, index)
        return None

    if index and known:
        made_with = index["tokenizer"]
    else:
        for line in filter(
            None, (describe_files(data, corpora["train"].counts), corpora["train"].note)
        ):
            say(line)
        made_with = _save_tokenizer(data, tokenizer, saved, work, settings, say, corpora["train"])

    cut = any(isinstance(shard, CutFile) for shard in corpora["train"].shards)
    made = digest(json.dumps([{**settings, "corpus": None}, made_with, cut, hold_out]))
    records = _earlier_records(work, index, made)
    before = _earlier_units(work, index)
    hashes = FileHashes(work / HASHES if work.is_dir() else None)
    jobs: list[list[Unit]] = []
    kept: list[str | None] = []
    for split, corpus in parts.items():
        units = [
            *plan_units(corpus, split, shard_bytes, contents_of(corpus, split, hashes, before))
        ]
        more, names = plan_jobs(
            units, shard_bytes, {name: r["units"] for name, r in records.items()}
        )
        jobs += more
        kept += names
    if index and known and kept == [*index["records"]]:
        tidy(directory, index)
        return None

    if before and (changes := describe_changes(before, itertools.chain(*jobs))):
        say(f"{kept.count(None)} of {len(jobs)} shards are made again: {changes}")
    elif index and not known:
        say(
            f"{directory}: changed since it was prepared, and its index names no files; all is made again"
        )
    train = corpora["train"]
    if known and _save_tokenizer(data, tokenizer, saved, work, settings, say, train) != made_with:
        raise InputError(f"{saved}: not the tokenizer that the index names; copy it again")
    taken = _names_in(index) if index else set()
    sources = _sources(data)
    redacted = {key: _with_urls(redact, value) for key, value in sources.items()}
    plan = {
        "settings": settings,
        "tokenizer": made_with,
        "dtype": token_dtype(made_with["vocab_size"]).name,
        "data": asdict(data) | redacted,
        "cut": cut,
        "hold_out": hold_out,
        "made": made,
        "jobs": jobs,
        "names": name_shards(kept, taken),
        "kept": {name: records[name] for name in kept if name and name in taken},
        **({"plugins": imported} if imported else {}),
    }
    for split in SPLITS:
        (directory / split).mkdir(exist_ok=True)
    write_whole(work / "plan.json", json.dumps(plan).encode())
    (work / URLS).unlink(missing_ok=True)
    if redacted != sources:
        with open(os.open(work / URLS, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(sources, file)
    return Preparation(directory)


def _usual_shard_bytes(parts: Mapping[str, Corpus]) -> int:
    """A 64th of the input, within bounds."""
    total = sum(_size(shard) or LARGEST for corpus in parts.values() for shard in corpus.shards)
    return min(LARGEST, max(SMALLEST, total // 64))


def _earlier_records(work: Path, index: dict | None, made: str) -> dict[str, dict]:
    """The records of the shards that were made with the present settings, by name."""
    found: dict[str, dict] = {}
    if index and index.get("made") == made:
        found = {name: {**record, "made": made} for name, record in index["records"].items()}
        for split in SPLITS:
            for shard in index[split]["shards"]:
                found[shard["name"]][split] = shard
    for file in sorted(work.glob("[0-9]*.json")):
        record = _json(file)
        if isinstance(record, dict) and record.get("made") == made:
            found[file.stem] = record
    return found


def _names_in(index: dict) -> set[str]:
    """The names of the shards of a finished set, also of those without a document."""
    return {shard["name"] for split in SPLITS for shard in index[split]["shards"]} | {
        *index.get("records", ())
    }


def _earlier_units(work: Path, index: dict | None) -> list[Unit]:
    """The units of the finished set, or else of the plan that was begun."""
    if index:
        return [
            Unit.of(key) for record in index.get("records", {}).values() for key in record["units"]
        ]
    plan = _json(work / "plan.json") or {}
    return [Unit(*unit) for unit in itertools.chain(*plan["jobs"])] if "names" in plan else []


def _check(data: DataConfig, tokenizer: TokenizerConfig, shard_bytes: int | None) -> None:
    if getattr(data, "mixture", None):
        raise InputError(
            "data.mixture: cannot be prepared; prepare each of its sources, with one tokenizer"
        )
    data.check()
    tokenizer.check()
    if data.documents == "joined":
        raise InputError(
            "data.documents: joined is read as text, not from a token set; train on data.source itself"
        )
    if isinstance(data.source, str) and is_token_set(data.source):
        raise InputError(
            f"data.source: {data.source} is a token set already; name texts, or --format megatron"
        )
    if (
        tokenizer.path
        and tokenizer.path[0] in "~/."
        and not os.path.exists(os.path.expanduser(tokenizer.path))
    ):
        raise InputError(
            f"tokenizer: {tokenizer.path} does not exist; give a folder, a file or a hub id"
        )
    if shard_bytes is not None and shard_bytes < 1:
        raise InputError(f"shard_bytes: {shard_bytes} bytes hold nothing; take 1 MB or more")


def _refuse_other_files(directory: Path) -> None:
    """Raises `InputError` if the directory has other files than those of a set."""
    begun = is_token_set(directory) or (directory / "preparing" / "settings.json").exists()
    if (
        not begun
        and directory.exists()
        and any(path.name != "preparing" for path in directory.iterdir())
    ):
        raise InputError(f"{directory}: not empty and not a token set; name another directory")


def _refuse_other_settings(
    directory: Path, recorded: dict | None, settings: dict[str, Any]
) -> None:
    """Raises `InputError` if the set was begun with other settings. The source's files may differ."""
    if recorded is None:
        return
    recorded = _without_secrets(recorded, settings)
    for key in settings | recorded:
        if key != "corpus" and recorded.get(key) != settings.get(key):
            raise InputError(
                f"{directory}: was prepared with {key} {json.dumps(recorded.get(key))}, and this is "
                f"{json.dumps(settings.get(key))}; name another directory, or remove it"
            )


def _save_tokenizer(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    saved: Path,
    work: Path,
    settings: dict[str, Any],
    say: Callable[[str], None],
    corpus: Corpus,
) -> dict[str, Any]:
    """Builds the tokenizer and saves it whole, unless an earlier call did. Then the settings are written,
    which claim the directory. Returns `describe_tokenizer`."""
    new, partial = not saved.exists(), work / "tokenizer"
    if new:
        shutil.rmtree(partial, ignore_errors=True)  # perhaps made with other settings
        if tokenizer.train:
            say(
                f"training a tokenizer of {tokenizer.vocab_size or 'all'} {tokenizer.train} tokens …"
            )
    work.mkdir(parents=True, exist_ok=True)
    directory = partial if new else saved  # a trained one is saved there
    built = build_tokenizer(tokenizer, data, directory, lambda: corpus)
    if new and not partial.exists():
        built.save_pretrained(partial)
    if (
        made_with := describe_tokenizer(load_tokenizer(partial if new else saved))
    ) != describe_tokenizer(built):
        raise InputError(
            f"tokenizer: not the one in {saved}; restore it, or name another directory"
        )
    write_whole(work / "settings.json", json.dumps(settings).encode())
    if new:
        partial.replace(saved)
    return made_with


def token_settings(
    data: DataConfig, tokenizer: TokenizerConfig, prints: dict[str, str], shard_bytes: int
) -> dict:
    """The settings that the bytes of a set depend on."""
    keys = ["text_field", "source_field", "bos", "eos", "documents"]
    if prints["train"] == prints["validation"]:
        keys.append("validation_share")
    found = {key: _with_urls(identity_of, source) for key, source in _sources(data).items()}
    found |= {key: getattr(data, key) for key in keys}
    if data.oversized == "skip":
        found["max_document_bytes"] = data.max_document_bytes
    return {**found, "corpus": prints, "tokenizer": asdict(tokenizer), "shard_bytes": shard_bytes}


def _sources(data: DataConfig) -> dict[str, Any]:
    return {"source": data.source, "validation_source": data.validation_source}


def _with_urls(change: Callable[[str], str], source: Any) -> Any:
    """A source, or each of several, with its URLs changed by `identity_of` or `redact`."""
    if isinstance(source, list):
        return [_with_urls(change, each) for each in source]
    return change(source) if is_url(source) else source


def _without_secrets(begun: dict, settings: dict) -> dict:
    """The settings of an earlier version, which stored URLs as they were given."""
    found = {key: begun.get(key) for key in ("source", "validation_source")}
    return begun | {
        key: _with_urls(identity_of, old) for key, old in found.items() if old != settings[key]
    }


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


# ------------------------------ many processes


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    directory: str | os.PathLike,
    *,
    workers: int = 1,
    shard_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """Tokenises a corpus into `directory` and returns the index. Shards of an earlier call are kept.

    Args:
        data, tokenizer: as in a recipe.
        workers: processes; 1 works in this process.
        shard_bytes: bytes of input for a shard; by default a 64th of the input, between 1 and 256 MiB.
        say: prints a line.
    Raises:
        InputError: as in `begin`; or files of the source are damaged: the other shards are finished and kept.
    """
    directory = local_output(directory, "output")
    with alone_in(directory):
        return _prepare(data, tokenizer, directory, workers, shard_bytes, say)


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Keeps a second preparation out of the directory. The lock ends with its process.

    Raises:
        InputError: another process prepares there, or the directory has other files.
    """
    _refuse_other_files(directory)
    work = directory / "preparing"
    lock = FileLock(work / ".lock")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"{directory}: another process is preparing it; wait for it, or name another directory"
        ) from None
    except (
        OSError,
        NotImplementedError,
    ):  # a finished set that is read-only, or a file system without locks
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            (work / ".lock").unlink(missing_ok=True)
            lock.release()
        for empty in (work, directory):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    directory: str | os.PathLike,
    workers: int,
    shard_bytes: int | None,
    say: Callable[[str], None],
) -> dict:
    with Progress("reading the source, preparing the tokenizer"):
        preparation = begin(data, tokenizer, directory, shard_bytes=shard_bytes, say=say)
    if preparation is None:
        check_set(directory)
        say(f"{directory}: prepared already, with these settings")
        return read_index(directory)
    numbers = range(len(preparation.jobs))
    todo = [number for number in numbers if preparation.record(number) is None]
    if len(todo) < len(numbers):
        say(f"{len(numbers) - len(todo)} of {len(numbers)} shards are finished already")
    begun = time.monotonic()
    run = _in_processes if workers > 1 and len(todo) > 1 else _in_this_process
    errors: list[InputError] = []
    try:
        with ByteProgress("tokenising", preparation.weights, todo) as progress:
            for number, error in run(preparation, todo, workers, progress):
                if error:
                    errors.append(error)
                    progress.say(f"shard {number}: {error}; the others continue")
    except OSError as error:
        if not no_room(error):
            raise InputError(f"{directory}: {first_line(error)}") from None
        raise DiskFull(
            f"{directory}: no space left; make room, and run the same command again"
        ) from None
    finally:
        (preparation.directory / "preparing" / URLS).unlink(missing_ok=True)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        finished = f"{len(numbers) - len(errors)} of {len(numbers)} shards are finished and kept"
        raise type(errors[0])(f"{errors[0]}{more}; {finished}")
    text, seconds = progress.text, max(time.monotonic() - begun, 1e-3)
    say(
        f"{text / 1e6:,.1f} MB of text in {duration(seconds)}, {text / 1e6 / seconds:.2f} MB/s with "
        f"{min(workers, max(1, len(todo)))} worker{'s' * (min(workers, len(todo)) > 1)}"
    )
    return preparation.seal()


Outcomes = Iterator[tuple[int, InputError | None]]


def _in_this_process(
    preparation: Preparation, todo: list[int], workers: int, progress: ByteProgress
) -> Outcomes:
    for number in todo:
        try:
            preparation.make(number, partial(progress.set, number))
            yield number, None
        except InputError as error:
            yield number, error


def _in_processes(
    preparation: Preparation, todo: list[int], workers: int, progress: ByteProgress
) -> Outcomes:
    # Forked from a server that has imported everything once and has no threads.
    server = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if server else "spawn")
    if server:
        context.set_forkserver_preload(PRELOAD)
    # Weight and text of each shard, then whether to stop; without a lock, which a killed worker would keep.
    board = context.RawArray("q", 2 * len(preparation.jobs) + 1)
    pool = ProcessPoolExecutor(
        min(workers, len(todo)),
        context,
        initializer=_start,
        initargs=(str(preparation.directory), board),
    )
    try:
        futures = {pool.submit(_make, number): number for number in todo}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=0.25, return_when=FIRST_COMPLETED)
            for number in todo:
                progress.set(number, board[2 * number], board[2 * number + 1])
            for future in done:
                error = future.exception()
                if error is not None and not isinstance(error, InputError):
                    raise error
                yield futures[future], error
    except BrokenProcessPool:
        raise InputError(
            f"{preparation.directory}: a worker was killed, perhaps for its memory; take fewer workers, "
            "and run the same command again to resume"
        ) from None
    finally:
        board[2 * len(preparation.jobs)] = 1
        pool.shutdown(cancel_futures=True)


_mine: tuple[Preparation, Any]


def _start(directory: str, board: Any) -> None:
    global _mine
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process says when to stop
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    end_with_parent()
    _mine = Preparation(directory), board


class _Stopped(Exception):
    pass


def _make(number: int) -> None:
    preparation, board = _mine

    def report(weight: int, text: int) -> None:
        board[2 * number], board[2 * number + 1] = weight, text
        if board[2 * len(preparation.jobs)]:
            raise _Stopped

    preparation.make(number, report)
