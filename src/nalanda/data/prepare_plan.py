"""The plan of a token set: which parts of the source make which shard, and what the bytes depend on.

    shard of the source   a file, or a part of a hub's dataset (`documents.Shard`)
    unit                  a part of such a shard that is read at once
    job                   the units of one shard of the token set, in the order of the source

Nothing here writes.
"""

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
from nalanda.data.documents import FileShard, Shard, TextShard, identity_of_shard
from nalanda.data.hashes import AT_A_TIME, FileHashes
from nalanda.data.readers import read_jsonl, read_parquet, reader_of
from nalanda.data.urls import identity_of

SMALLEST, LARGEST = 1 << 20, 256 << 20
"""Bounds of the default bytes of input of a shard."""

# ------------------------------ units


class Unit(NamedTuple):
    """A part of a source's shard: all of it, the lines that begin in bytes [start, stop), or rows of a table."""

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
    """Path of a local file; "" for anything else."""

    @property
    def key(self) -> str:
        """A text that changes with the tokens of the unit; the settings apart."""
        return f"{self.content} {self.start} {self.stop} {self.corpus} {self.identity}"

    @staticmethod
    def of(key: str) -> Unit:
        """The unit of a key, without its weight, its number in the corpus and its path."""
        content, start, stop, corpus, identity = key.split(" ", 4)
        return Unit(
            corpus=corpus,
            shard=0,
            identity=identity,
            weight=0,
            start=int(start),
            stop=None if stop == "None" else int(stop),
            content=content,
        )


def contents_of(
    corpus: Corpus, split: str, hashes: FileHashes, earlier: Iterable[Unit]
) -> list[str]:
    """`Corpus.content` of each shard, made in the way of an earlier one."""
    likes = {unit.identity: unit.content for unit in earlier if unit.corpus == split}

    def content(number: int) -> str:
        like = likes.get(identity_of_shard(corpus.shards[number]), "")
        return corpus.content(number, hashes, like)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return [*pool.map(content, range(len(corpus.shards)))]


def plan_units(corpus: Corpus, split: str, limit: int, contents: list[str]) -> Iterator[Unit]:
    """The units of a corpus; a large .jsonl or .parquet file is cut into parts of about `limit` bytes."""
    for number, (shard, content) in enumerate(zip(corpus.shards, contents, strict=True)):
        size = size_of(shard)
        unit = Unit(
            corpus=split,
            shard=number,
            identity=identity_of_shard(shard),
            weight=limit if size is None else size,
            content=content,
            path=str(shard.path) if isinstance(shard, FileShard) else "",
        )
        large = isinstance(shard, FileShard) and unit.weight > limit
        yield from _cut_unit(unit, limit) if large else [unit]


def _cut_unit(unit: Unit, limit: int) -> list[Unit]:
    """The parts of a large file: lines of a .jsonl, row groups of a .parquet. Any other file is one part."""
    path = Path(unit.path)
    if is_plain_jsonl(path):
        # A bound may lie inside a line, which belongs to the part where it begins.
        bounds = [*range(0, unit.weight, limit), unit.weight]
        return [
            unit._replace(weight=stop - start, start=start, stop=stop)
            for start, stop in itertools.pairwise(bounds)
        ]

    if reader_of(path) is read_parquet:
        # A part for each row group; `group_units` joins them up to the limit.
        groups = [
            unit._replace(weight=size, start=first, stop=behind)
            for first, behind, size in _row_groups(path)
        ]
        return groups or [unit]

    return [unit]


def is_plain_jsonl(path: Path) -> bool:
    """Whether a file may be cut at its lines: a plugin's reader of some .jsonl reads it otherwise."""
    return reader_of(path) is read_jsonl and path.suffix.lower() == ".jsonl"


def size_of(shard: Shard) -> int | None:
    """Bytes of input, or None if only reading tells."""
    return len(shard.text.encode()) if isinstance(shard, TextShard) else shard.size


def _row_groups(path: Path) -> list[tuple[int, int, int]]:
    """(first row, row after the last, bytes) of each row group; [] for a damaged file, left to its reader."""
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.read_metadata(path)
    except (ArrowException, OSError):
        return []

    groups = []
    row = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        if group.num_rows:  # an empty one would be a part without a row to stop at
            groups.append((row, row + group.num_rows, size))
        row += group.num_rows
    return groups


# ------------------------------ jobs


def group_units(units: Iterable[Unit], limit: int) -> list[list[Unit]]:
    """Groups of consecutive units of up to `limit` bytes together; a larger unit is a group.

    Neighbouring parts of a shard become one in a group, so they are read at once.
    """
    groups: list[list[Unit]] = []
    weight = limit  # so that the first unit begins a group
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
    units: list[Unit], limit: int, keys_by_shard: Mapping[str, list[str]]
) -> tuple[list[list[Unit]], list[str | None]]:
    """Groups of all units in their order, and for each the name of the shard that is made of it already.

    A made shard is kept if its units are there, unchanged and next to each other. Units between kept shards
    are grouped anew (`group_units`), so the documents' order is that of the source.

    keys_by_shard: the keys of the units of each shard, by its name.
    """
    # Made shards by the unit that they begin with, and positions behind the units that they may end with.
    names_by_first: dict[tuple, list[str]] = {}
    for name, keys in keys_by_shard.items():
        first = Unit.of(keys[0])
        names_by_first.setdefault((first.corpus, first.identity, first.start), []).append(name)

    ends = {(unit.corpus, unit.identity, unit.stop): i for i, unit in enumerate(units, 1)}

    def shard_at(start: int) -> tuple[str, int] | None:
        """The made shard of the units from `start` on, and the position after it."""
        first = units[start]
        for name in names_by_first.get((first.corpus, first.identity, first.start), ()):
            # Jobs may have been grouped otherwise then: the parts are joined before their keys are compared.
            last = Unit.of(keys_by_shard[name][-1])
            # 0: the last unit is gone, and no units end there.
            stop = ends.get((last.corpus, last.identity, last.stop), 0)
            if [unit.key for unit in join_parts(units[start:stop])] == keys_by_shard[name]:
                return name, stop
        return None

    jobs: list[list[Unit]] = []
    names: list[str | None] = []
    between: list[Unit] = []  # units since the last kept shard

    def group_between() -> None:
        groups = group_units(between, limit)
        jobs.extend(groups)
        names.extend([None] * len(groups))
        between.clear()

    position = 0
    while position < len(units):
        shard = shard_at(position)
        if shard is None:
            between.append(units[position])
            position += 1
            continue

        name, stop = shard
        # What lies before a kept shard becomes jobs of its own, so the order stays.
        group_between()
        jobs.append(join_parts(units[position:stop]))
        names.append(name)
        position = stop

    group_between()
    return jobs, names


def name_shards(names: list[str | None], taken: Container[str]) -> list[str]:
    """A name for each shard, those without one getting numbers that no kept shard has and none in `taken`."""
    numbers = (f"{number:05d}" for number in itertools.count())
    free = (name for name in numbers if name not in taken and name not in names)
    return [name or next(free) for name in names]


def describe_changes(before: Iterable[Unit], now: Iterable[Unit]) -> str:
    """Which files changed, came and went, in a few words."""
    old = _contents_by_file(before)
    new = _contents_by_file(now)

    changes = [f"{key[1]} changed" for key in old if key in new and new[key] != old[key]]
    changes += [f"{key[1]} is gone" for key in old if key not in new]
    changes += [f"{key[1]} is new" for key in new if key not in old]

    rest = f" and {len(changes) - 3:,} more" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + rest


def _contents_by_file(units: Iterable[Unit]) -> dict[tuple[str, str], tuple[str, str]]:
    """(split, file) → (identity, content)."""
    return {(unit.corpus, file_of(unit)): (unit.identity, unit.content) for unit in units}


def file_of(unit: Unit) -> str:
    """The name of a unit's file, without the size that its identity ends in."""
    return re.sub(r":\d+$", "", unit.identity)


def usual_shard_bytes(corpora: Iterable[Corpus]) -> int:
    """A 64th of the input, within bounds."""
    shards = itertools.chain.from_iterable(corpus.shards for corpus in corpora)
    # A shard of unknown size counts as a large one.
    total = sum(size_of(shard) or LARGEST for shard in shards)
    return min(LARGEST, max(SMALLEST, total // 64))


# ------------------------------ settings


def token_settings(
    data: DataConfig, tokenizer: TokenizerConfig, prints: dict[str, str], shard_bytes: int
) -> dict:
    """The settings that the bytes of a set depend on."""
    settings = {key: change_urls(identity_of, source) for key, source in sources_of(data).items()}

    keys = ["text_field", "source_field", "bos", "eos", "documents"]
    if prints["train"] == prints["validation"]:  # documents are held out
        keys.append("validation_share")
    settings |= {key: getattr(data, key) for key in keys}
    if data.oversized == "skip":
        settings["max_document_bytes"] = data.max_document_bytes

    return {
        **settings,
        "corpus": prints,
        "tokenizer": asdict(tokenizer),
        "shard_bytes": shard_bytes,
    }


def sources_of(data: DataConfig) -> dict[str, Any]:
    return {"source": data.source, "validation_source": data.validation_source}


def change_urls(change: Callable[[str], str], source: Any) -> Any:
    """A source, or each of several, with its URLs changed by `identity_of` or `redact`."""
    if isinstance(source, list):
        return [change_urls(change, each) for each in source]
    return change(source) if is_url(source) else source
