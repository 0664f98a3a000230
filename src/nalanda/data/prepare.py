"""Prepares a token set (`token_set.py` has its format): plans the shards, has them made, and writes the index."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nalanda.common.errors import DiskFull, InputError, first_line, local_output, no_room
from nalanda.common.plugins import imported
from nalanda.common.progress import Progress
from nalanda.common.text import duration, redact
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.corpus import Corpus, check_apart, describe_files, open_corpora
from nalanda.data.documents import digest
from nalanda.data.hashes import FileHashes
from nalanda.data.hold_out import CutFile
from nalanda.data.inspect import ByteProgress, check_set
from nalanda.data.prepare_plan import (
    Unit,
    change_urls,
    contents_of,
    describe_changes,
    name_shards,
    plan_jobs,
    plan_units,
    sources_of,
    token_settings,
    usual_shard_bytes,
    without_secrets,
)
from nalanda.data.prepare_run import (
    HASHES,
    URLS,
    Preparation,
    make_here,
    make_in_processes,
    read_json_if_whole,
    tidy,
    write_whole,
)
from nalanda.data.token_set import SPLITS, is_token_set, read_index, token_dtype
from nalanda.data.tokenizer import build_tokenizer, describe_tokenizer, load_tokenizer


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
    run = make_in_processes if workers > 1 and len(todo) > 1 else make_here
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
    recorded = index["settings"] if index else read_json_if_whole(work / "settings.json")
    shard_bytes = shard_bytes or (recorded or {}).get("shard_bytes") or usual_shard_bytes(parts)
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
    sources = sources_of(data)
    redacted = {key: change_urls(redact, value) for key, value in sources.items()}
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


def _earlier_records(work: Path, index: dict | None, made: str) -> dict[str, dict]:
    """The records of the shards that were made with the present settings, by name."""
    found: dict[str, dict] = {}
    if index and index.get("made") == made:
        found = {name: {**record, "made": made} for name, record in index["records"].items()}
        for split in SPLITS:
            for shard in index[split]["shards"]:
                found[shard["name"]][split] = shard
    for file in sorted(work.glob("[0-9]*.json")):
        record = read_json_if_whole(file)
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
    plan = read_json_if_whole(work / "plan.json") or {}
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
    recorded = without_secrets(recorded, settings)
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
