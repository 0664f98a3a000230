"""The plan of a token set: which parts of the source make which shard, and what the bytes depend on. Writes nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from nalanda.common.text import is_url
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.corpus import Corpus
from nalanda.data.documents import FileShard, Shard, TextShard, read_jsonl, read_parquet, reader_of
from nalanda.data.hashes import FileHashes
from nalanda.data.urls import identity_of

SMALLEST, LARGEST = 1 << 20, 256 << 20
"""Bounds of the default bytes of input of a shard."""

HASHING = 8
"""Files hashed at a time."""


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
        size = size_of(shard)
        path = str(shard.path) if isinstance(shard, FileShard) else ""
        weight = limit if size is None else size
        unit = Unit(split, number, shard.identity, weight, content=content, path=path)
        parts: list[Unit] = []
        large = isinstance(shard, FileShard) and unit.weight > limit
        if large and is_plain_jsonl(shard.path):
            cuts = [*range(0, unit.weight, limit), unit.weight]
            parts = [
                unit._replace(weight=b - a, start=a, stop=b) for a, b in itertools.pairwise(cuts)
            ]
        elif large and reader_of(shard.path) is read_parquet:
            parts = [
                unit._replace(weight=w, start=a, stop=b) for a, b, w in _row_groups(shard.path)
            ]
        yield from parts or [unit]


def is_plain_jsonl(path: Path) -> bool:
    """Whether a file may be cut at its lines: a plugin's reader of some .jsonl reads it otherwise."""
    return reader_of(path) is read_jsonl and path.suffix.lower() == ".jsonl"


def size_of(shard: Shard) -> int | None:
    """Bytes of input, or None if only reading tells."""
    if isinstance(shard, FileShard):
        return shard.size
    return (
        len(shard.text.encode()) if isinstance(shard, TextShard) else getattr(shard, "size", None)
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
        {(u.corpus, file_of(u)): (u.identity, u.content) for u in units} for units in (before, now)
    )
    words = [
        f"{name} changed"
        for (split, name), what in old.items()
        if new.get((split, name), what) != what
    ]
    words += [f"{name} is gone" for split, name in old if (split, name) not in new]
    words += [f"{name} is new" for split, name in new if (split, name) not in old]
    return ", ".join(words[:3]) + (f" and {len(words) - 3:,} more" if words[3:] else "")


def file_of(unit: Unit) -> str:
    return re.sub(r":\d+$", "", unit.identity)


def usual_shard_bytes(parts: Mapping[str, Corpus]) -> int:
    """A 64th of the input, within bounds."""
    total = sum(size_of(shard) or LARGEST for corpus in parts.values() for shard in corpus.shards)
    return min(LARGEST, max(SMALLEST, total // 64))


def token_settings(
    data: DataConfig, tokenizer: TokenizerConfig, prints: dict[str, str], shard_bytes: int
) -> dict:
    """The settings that the bytes of a set depend on."""
    keys = ["text_field", "source_field", "bos", "eos", "documents"]
    if prints["train"] == prints["validation"]:
        keys.append("validation_share")
    found = {key: change_urls(identity_of, source) for key, source in sources_of(data).items()}
    found |= {key: getattr(data, key) for key in keys}
    if data.oversized == "skip":
        found["max_document_bytes"] = data.max_document_bytes
    return {**found, "corpus": prints, "tokenizer": asdict(tokenizer), "shard_bytes": shard_bytes}


def sources_of(data: DataConfig) -> dict[str, Any]:
    return {"source": data.source, "validation_source": data.validation_source}


def change_urls(change: Callable[[str], str], source: Any) -> Any:
    """A source, or each of several, with its URLs changed by `identity_of` or `redact`."""
    if isinstance(source, list):
        return [change_urls(change, each) for each in source]
    return change(source) if is_url(source) else source


def without_secrets(begun: dict, settings: dict) -> dict:
    """The settings of an earlier version, which stored URLs as they were given."""
    found = {key: begun.get(key) for key in ("source", "validation_source")}
    return begun | {
        key: change_urls(identity_of, old) for key, old in found.items() if old != settings[key]
    }
