"""The work on a planned token set: shards are made, by one process or many, and the index is written."""

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
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from nalanda.common.errors import InputError, first_line
from nalanda.common.files import rename_synced, write_atomically
from nalanda.common.plugins import import_plugins
from nalanda.common.processes import end_with_parent
from nalanda.config.schema import DataConfig
from nalanda.data.corpus import Corpus
from nalanda.data.documents import (
    Document,
    Fields,
    FileShard,
    Left,
    Shard,
    identity_of_shard,
    not_blank,
    take_documents,
)
from nalanda.data.hashes import FileHashes, sample_of
from nalanda.data.hold_out import CutFile, HoldOut
from nalanda.data.inspect import ByteProgress
from nalanda.data.prepare_plan import Unit, file_of, is_plain_jsonl
from nalanda.data.readers import BLOCK, split_lines
from nalanda.data.records import document_in, left_out
from nalanda.data.sources import open_corpora
from nalanda.data.token_set import SPLITS, Entry, write_index
from nalanda.data.tokenizer import encoder, load_tokenizer

PRELOAD = ["nalanda.data.prepare_run", "transformers.models.auto.tokenization_auto"]
"""Modules that every worker imports."""

URLS = "urls.json"
"""File beside the plan, readable by its owner alone, that has sources whose URLs may hold a password or a
signature. `prepare` removes it when the work ends, `Preparation.seal` with the plan."""

LEFTOVER = re.compile(r"\.(\d+(\.docs)?|index\.json)\.\d+")
"""A file that a killed process left (`ShardWriter`, `write_atomically`)."""

SHARD_FILE = re.compile(r"\d+\.(tokens|docs)")

HASHES = "hashes.jsonl"
"""File beside the plan that keeps the hashes of the source's files while the set is made."""

GROUP = 1 << 20
"""Characters tokenised at a time."""


# ------------------------------ reading a unit


def _read_unit(shard: Shard, unit: Unit) -> Iterator[Document | Left]:
    if unit.stop is None:
        yield from (document for document, _ in shard.read(None))
    elif isinstance(shard, FileShard) and is_plain_jsonl(shard.path):
        yield from _read_lines(shard, unit.start, unit.stop)
    else:
        for document, row in shard.read(unit.start):
            yield document
            if row >= unit.stop:
                return


def _read_lines(shard: FileShard, start: int, stop: int) -> Iterator[Document | Left]:
    """The documents of lines that begin in bytes [start, stop)."""
    with shard.path.open("rb") as file:
        position = max(0, start - 1)  # one byte before: a line may begin at `start` itself
        file.seek(position)
        blocks = iter(partial(file.read, BLOCK), b"")
        lines = split_lines(blocks, shard.fields._replace(skip=True))
        if start:  # skips the line that the part before reads
            position += next(lines, (b"", 0))[1] + 1

        for line, size in lines:
            if position >= stop:
                return
            if isinstance(line, Left):  # longer than a document may be
                yield line if shard.fields.skip else _document_at(shard, position)
            elif line.strip():
                try:
                    document = document_in(line, shard.fields, "")
                except ValueError:
                    document = _document_at(shard, position)
                yield document
            position += size + 1


def _document_at(shard: FileShard, position: int) -> Document | Left:
    """The document of the line at a byte, by the file's own reader, whose errors name the line."""
    return next(shard.read(_count_lines(shard.path, position)))[0]


def _count_lines(path: Path, stop: int) -> int:
    """The number of lines that end in bytes [0, stop)."""
    count = 0
    with path.open("rb") as file:
        while stop > 0 and (block := file.read(min(stop, 1 << 20))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def _text_per_byte(shard: Shard) -> int:
    """About the bytes of text in a byte of input, so that the bar moves within a large file."""
    compressed = (".gz", ".zst", ".parquet")
    return 3 if isinstance(shard, FileShard) and shard.path.suffix.lower() in compressed else 1


# ------------------------------ writing a shard


class ShardWriter:
    """A shard that is being written, under names that no reader opens."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.path = path
        self.dtype = dtype
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

        # An int64 and a uint16 a document, written when the shard is closed.
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
        # The tokens get their name last: a shard with tokens is whole.
        write_atomically(self.path.with_suffix(".docs"), docs)
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
        """Closes the file and removes it. A shard that is closed stays."""
        try:
            self.file.close()  # writes what is left, which a full disk refuses
        finally:
            self.partial.unlink(missing_ok=True)


# ------------------------------ the planned work


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

        secrets = read_json_if_whole(path.with_name(URLS))
        self.data = DataConfig(**plan["data"] | secrets)
        self.settings = plan["settings"]
        self.tokenizer = plan["tokenizer"]
        self.dtype = np.dtype(plan["dtype"]).newbyteorder("<")

        self.jobs = [[Unit(*unit) for unit in job] for job in plan["jobs"]]
        self.weights = [sum(unit.weight for unit in job) for job in self.jobs]
        self.names = plan["names"]
        self.kept = plan["kept"]  # records of shards of a finished set
        self.made = plan["made"]  # changes with the settings and the tokenizer

        self.cut = plan["cut"]
        self.hold_out = HoldOut(*plan["hold_out"]) if plan["hold_out"] else None
        self.hashes = FileHashes(path.with_name(HASHES))

    @functools.cached_property
    def encode(self) -> Callable[[list[str]], list[np.ndarray]]:
        return encoder(load_tokenizer(self.directory / "tokenizer"), self.data)

    @functools.cached_property
    def corpora(self) -> dict[str, Corpus]:
        return open_corpora(self.data)

    def _open_shard(self, unit: Unit) -> Shard:
        """The shard of a unit. Raises `InputError` if it is another than when the work was planned."""
        if unit.path:  # a local file, which is opened without walking the source
            kind = CutFile if self.cut else FileShard
            shard: Shard = kind(Path(unit.path), file_of(unit), Fields.of(self.data))
        else:
            shard = self.corpora[unit.corpus].shards[unit.shard]

        if (now := identity_of_shard(shard)) != unit.identity:
            raise InputError(f"{unit.identity}: now {now}; run the same command again")

        if isinstance(shard, FileShard):
            # Hashed as for the plan, so that the two hashes can be compared.
            content = self.hashes.of(shard.path, sample_of(unit.content))
        else:
            content = self.corpora[unit.corpus].content(unit.shard, self.hashes)
        if content != unit.content:
            raise InputError(f"{unit.identity}: has other content now; run the same command again")
        return shard

    def record(self, number: int) -> dict | None:
        """A finished shard's record, or None if the record or a file of its size is missing."""
        # Damage of the record or a file counts as no record: the shard is made again.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = self.kept.get(self.names[number])
            record = record or read_json_if_whole(self._record_path(number))
            units = [unit.key for unit in self.jobs[number]]
            if record["made"] != self.made or record["units"] != units:
                return None

            for split, entry in record_entries(record).items():
                shard = Entry(self.directory / split / entry["name"], entry, self.dtype.name)
                for file in shard.files():
                    file.check_size()
            return record
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
        record = self.record(number)
        if record is not None:
            text = sum(entry["text_bytes"] for entry in record_entries(record).values())
            report(self.weights[number], text)
            return record

        units = self.jobs[number]
        splits = SPLITS if self.hold_out else (units[0].corpus,)
        with _one_thread(), contextlib.ExitStack() as stack:
            writers = {}
            for split in splits:
                path = self.directory / split / self.names[number]
                writers[split] = ShardWriter(path, self.dtype)
                # On an error the unfinished files go; after `close` it finds nothing to remove.
                stack.callback(writers[split].abandon)
            documents_left_out = self._write_units(units, writers, report)
            entries = {split: writer.close() for split, writer in writers.items()}

        record = {split: entry for split, entry in entries.items() if entry}
        record |= {"made": self.made, "units": [unit.key for unit in units]}
        record |= documents_left_out
        # Written last: a shard with a record is finished.
        write_atomically(self._record_path(number), json.dumps(record).encode())
        return record

    def _write_units(
        self, units: list[Unit], writers: dict[str, ShardWriter], report: Callable[[int, int], None]
    ) -> Counter[str]:
        """Tokenises the units into the writers, one a split. Returns how many documents were left out, by reason."""
        reasons: Counter[str] = Counter()
        weight = text = 0  # bytes of input and of text before the unit
        for unit in units:
            shard = self._open_shard(unit)
            documents = _read_unit(shard, unit)
            written = text
            while group := take_documents(documents, GROUP):
                reasons.update(each.value for each in group if isinstance(each, Left))
                self._write_group([each for each in group if isinstance(each, Document)], writers)

                # How far this is in a compressed file is guessed from its text.
                written = sum(writer.text_bytes for writer in writers.values())
                read = min(unit.weight, (written - text) // _text_per_byte(shard))
                report(weight + read, written)

            weight, text = weight + unit.weight, written
            report(weight, text)
        return reasons

    def _write_group(self, documents: list[Document], writers: dict[str, ShardWriter]) -> None:
        # The splits that a document belongs to, each with its part of it.
        parts: list[tuple[Document, str]] = []
        for document, split in itertools.product(documents, writers):
            if self.hold_out:
                text = self.hold_out.part(document.text, split)
            else:
                text = document.text if not_blank(document.text) else None
            if text is not None:
                parts.append((document._replace(text=text), split))

        # All texts at once: the tokenizer is called once a group.
        token_ids = self.encode([document.text for document, _ in parts])
        for (document, split), tokens in zip(parts, token_ids, strict=True):
            writers[split].add(tokens, document.source, len(document.text.encode()))

    def seal(self) -> dict:
        """Writes the index, then removes the plan and what is left of earlier work. Returns the index.

        Raises:
            InputError: shards are missing, or none has a document.
        """
        records = map(self.record, range(len(self.jobs)))
        by_name = {name: record for name, record in zip(self.names, records, strict=True) if record}
        missing = [number for number, name in enumerate(self.names) if name not in by_name]
        if missing:
            raise InputError(
                f"{self.directory}: {len(missing)} of {len(self.jobs)} shards are missing, the first is number "
                f"{missing[0]}; run the same command again"
            )

        shards = {
            # A record lacks a split that none of its documents belongs to.
            split: [record[split] for record in by_name.values() if split in record]
            for split in SPLITS
        }
        if not shards["train"]:
            source = self.settings["source"]
            raise InputError(f"{source}: no document with text; name another source or text field")

        index = write_index(
            self.directory,
            shards,
            dtype=self.dtype.name,
            settings=self.settings,
            tokenizer=self.tokenizer,
            **sum(map(left_out, by_name.values()), Counter()),
            # What a later preparation compares, to keep the shards of unchanged files.
            made=self.made,
            records={
                name: {key: value for key, value in record.items() if key not in (*SPLITS, "made")}
                for name, record in by_name.items()
            },
        )
        tidy(self.directory, index)
        return index


def tidy(directory: Path, index: dict) -> None:
    """Removes the files of a finished set that its index does not name.

    They are the plan, files of killed processes, and shards of an earlier index.
    """
    folders = [directory / split for split in SPLITS]
    for folder in [*folders, directory]:
        for file in folder.glob(".*"):
            if LEFTOVER.fullmatch(file.name):
                file.unlink(missing_ok=True)

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


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


# ------------------------------ this process, or many


Outcomes = Iterator[tuple[int, InputError | None]]
"""The number of each shard that is done, with its error."""


def make_here(
    preparation: Preparation, todo: list[int], workers: int, progress: ByteProgress
) -> Outcomes:
    for number in todo:
        try:
            preparation.make(number, partial(progress.set, number))
            yield number, None
        except InputError as error:
            yield number, error


def make_in_processes(
    preparation: Preparation, todo: list[int], workers: int, progress: ByteProgress
) -> Outcomes:
    # Workers are forked from a server that has imported everything once and has no threads.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    # Weight and text of each shard, then whether to stop; without a lock, which a killed worker would keep.
    board = context.RawArray("q", 2 * len(preparation.jobs) + 1)
    pool = ProcessPoolExecutor(
        workers, context, initializer=_start_worker, initargs=(str(preparation.directory), board)
    )

    try:
        futures = {pool.submit(_make_in_worker, number): number for number in todo}
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
        # Workers stop at their next report, else the pool would wait for their shards.
        board[2 * len(preparation.jobs)] = 1
        pool.shutdown(cancel_futures=True)


_worker: tuple[Preparation, Any]
"""The plan and the board of this worker."""


def _start_worker(directory: str, board: Any) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process says when to stop
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    end_with_parent()
    _worker = Preparation(directory), board


class _Stopped(Exception):
    """The main process wants no more shards."""


def _make_in_worker(number: int) -> None:
    preparation, board = _worker

    def report(weight: int, text: int) -> None:
        board[2 * number], board[2 * number + 1] = weight, text
        if board[2 * len(preparation.jobs)]:
            raise _Stopped

    preparation.make(number, report)
