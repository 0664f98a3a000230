"""Prepares a token set (`token_set.py` has its format): plans the shards, has them made, and writes the index."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nalanda.common.errors import (
    DiskFull,
    InputError,
    first_line,
    local_output,
    no_room,
    output_folder,
)
from nalanda.common.files import alone, write_atomically
from nalanda.common.plugins import imported
from nalanda.common.progress import Progress
from nalanda.common.text import digest, duration, redact
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.corpus import Corpus, check_apart, describe_files
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
)
from nalanda.data.prepare_run import (
    HASHES,
    URLS,
    Preparation,
    make_here,
    make_in_processes,
    read_json_if_whole,
    tidy,
)
from nalanda.data.sources import open_corpora
from nalanda.data.token_set import SPLITS, is_begun, is_token_set, read_index, token_dtype
from nalanda.data.tokenizer import build_tokenizer, describe_tokenizer, encoder, load_tokenizer


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
        with Progress("reading the source, preparing the tokenizer"):
            preparation = begin(data, tokenizer, directory, shard_bytes=shard_bytes, say=say)
        if preparation is None:
            check_set(directory)
            say(f"{directory}: prepared already, with these settings")
            return read_index(directory)

        count = len(preparation.jobs)
        todo = [number for number in range(count) if preparation.record(number) is None]
        if len(todo) < count:
            say(f"{count - len(todo)} of {count} shards are finished already")

        workers = max(1, min(workers, len(todo)))
        started = time.monotonic()
        text, errors = _make_shards(preparation, todo, workers)
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            finished = f"{count - len(errors)} of {count} shards are finished and kept"
            # Of the first error's type, which decides the exit code.
            raise type(errors[0])(f"{errors[0]}{more}; {finished}")

        seconds = max(time.monotonic() - started, 1e-3)
        say(
            f"{text / 1e6:,.1f} MB of text in {duration(seconds)}, {text / 1e6 / seconds:.2f} MB/s with "
            f"{workers} worker{'s' * (workers > 1)}"
        )
        return preparation.seal()


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Keeps a second preparation out of the directory. The lock ends with its process.

    Raises:
        InputError: another process prepares there, the directory has other files, or nothing may be written there.
    """
    _refuse_other_files(directory)
    work = directory / "preparing"
    taken = f"{directory}: another process is preparing it; wait for it, or name another directory"
    lock: contextlib.AbstractContextManager[bool] = alone(work / ".lock", taken)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError:
        if not is_token_set(directory):
            output_folder(directory, "output")
        # A finished set that is read-only; a lock would make the target of a dangling link.
        lock = contextlib.nullcontext(False)
    try:
        with lock as locked:
            try:
                yield
            finally:
                if locked:
                    (work / ".lock").unlink(missing_ok=True)
    finally:
        for empty in (work, directory):  # a refused first try leaves nothing
            with contextlib.suppress(OSError):
                empty.rmdir()


def _make_shards(
    preparation: Preparation, todo: list[int], workers: int
) -> tuple[int, list[InputError]]:
    """Makes the shards `todo`. Returns the bytes of text, and the errors of shards that cannot be made."""
    make = make_in_processes if workers > 1 else make_here
    errors: list[InputError] = []
    try:
        with ByteProgress("tokenising", preparation.weights, todo) as progress:
            for number, error in make(preparation, todo, workers, progress):
                if error:
                    errors.append(error)
                    progress.say(f"shard {number}: {error}; the others continue")
    except OSError as error:
        directory = preparation.directory
        if not no_room(error):
            raise InputError(f"{directory}: {first_line(error)}") from None
        raise DiskFull(
            f"{directory}: no space left; make room, and run the same command again"
        ) from None
    finally:
        # Secrets in URLs go with the work, however it ends.
        (preparation.directory / "preparing" / URLS).unlink(missing_ok=True)
    return progress.text, errors


# ------------------------------ the plan, begun or resumed


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
    _check_settings(data, tokenizer, shard_bytes)
    _refuse_other_files(directory)

    # The source, and the settings that the bytes of the set depend on.
    corpora = open_corpora(data)
    train = corpora["train"]
    prints = _fingerprints(data, corpora)
    # Documents that are held out come from the corpus for training, which is read for both splits.
    sources = {"train": train} if train.hold_out else corpora
    earlier = EarlierWork.of(directory)
    shard_bytes = shard_bytes or earlier.settings.get("shard_bytes")
    shard_bytes = shard_bytes or usual_shard_bytes(sources.values())
    settings = token_settings(data, tokenizer, prints, shard_bytes)
    _refuse_other_settings(directory, earlier.settings, settings)

    # The tokenizer. That of a finished set is in its index, and is built only if there is work to do.
    save_tokenizer = partial(_save_tokenizer, data, tokenizer, directory, settings, train, say)
    if earlier.index:
        described = earlier.index["tokenizer"]
    else:
        for line in (describe_files(data, train.counts), train.note):
            if line:
                say(line)
        described = save_tokenizer()

    # The jobs, and the names of shards that are made of the same units with the same settings.
    cut = any(isinstance(shard, CutFile) for shard in train.shards)
    version = digest(json.dumps([{**settings, "corpus": None}, described, cut, train.hold_out]))
    records = earlier.records(version)
    earlier_units = earlier.units()
    jobs, names = _plan_jobs(directory, sources, shard_bytes, records, earlier_units)
    finished = earlier.index.get("records", {})  # by name, also of shards without a document
    if earlier.index and names == [*finished]:
        tidy(directory, earlier.index)
        return None

    changes = describe_changes(earlier_units, itertools.chain(*jobs)) if earlier_units else ""
    if changes:
        say(f"{names.count(None)} of {len(jobs)} shards are made again: {changes}")
    if earlier.index and save_tokenizer() != described:
        raise InputError(
            f"{directory / 'tokenizer'}: not the tokenizer that the index names; copy it again"
        )

    # New shards get numbers that the finished set does not use: it stays whole until the index is replaced.
    plan = {
        "settings": settings,
        "tokenizer": described,
        "dtype": token_dtype(described["vocab_size"]).name,
        "cut": cut,
        "hold_out": train.hold_out,
        "made": version,
        "jobs": jobs,
        "names": name_shards(names, finished),
        "kept": {name: records[name] for name in names if name and name in finished},
    }
    _write_plan(directory, data, plan)
    return Preparation(directory)


def _fingerprints(data: DataConfig, corpora: Mapping[str, Corpus]) -> dict[str, str]:
    """The fingerprint of each split's corpus. Raises `InputError` if both have the same files."""
    prints = {split: corpus.fingerprint for split, corpus in corpora.items()}
    if data.validation_source:
        if prints["train"] == prints["validation"]:  # two folders of equal names and sizes
            prints["validation"] += " of validation_source"
        check_apart(**corpora)
    return prints


def _plan_jobs(
    directory: Path,
    sources: Mapping[str, Corpus],
    shard_bytes: int,
    records: Mapping[str, dict],
    earlier_units: list[Unit],
) -> tuple[list[list[Unit]], list[str | None]]:
    """`plan_jobs` of each split's corpus, one after another."""
    work = directory / "preparing"
    # The hashes of a preparation that was stopped are found again.
    hashes = FileHashes(work / HASHES if work.is_dir() else None)
    keys = {name: record["units"] for name, record in records.items()}

    jobs: list[list[Unit]] = []
    names: list[str | None] = []
    for split, corpus in sources.items():
        contents = contents_of(corpus, split, hashes, earlier_units)
        units = [*plan_units(corpus, split, shard_bytes, contents)]
        jobs_of_split, names_of_split = plan_jobs(units, shard_bytes, keys)
        jobs += jobs_of_split
        names += names_of_split
    return jobs, names


def _write_plan(directory: Path, data: DataConfig, plan: dict[str, Any]) -> None:
    """Writes the plan and the data's settings. URLs that may hold a secret go to a file of their own."""
    sources = sources_of(data)
    redacted = {key: change_urls(redact, source) for key, source in sources.items()}
    plan = {**plan, "data": asdict(data) | redacted}
    if imported:
        plan["plugins"] = imported

    for split in SPLITS:
        (directory / split).mkdir(exist_ok=True)
    work = directory / "preparing"
    write_atomically(work / "plan.json", json.dumps(plan).encode())
    (work / URLS).unlink(missing_ok=True)
    if redacted != sources:
        write_atomically(work / URLS, json.dumps(sources), private=True)


class EarlierWork(NamedTuple):
    """A finished set or a plan that was begun, if an earlier call left one in the directory."""

    directory: Path
    index: dict[str, Any]
    """Of a finished set; else {}."""
    settings: dict[str, Any]
    """Settings that the work was begun with; {} if there is no earlier work."""

    @staticmethod
    def of(directory: Path) -> EarlierWork:
        if is_token_set(directory):
            index = read_index(directory)
            return EarlierWork(directory, index, index["settings"])
        settings = read_json_if_whole(directory / "preparing" / "settings.json")
        return EarlierWork(directory, {}, settings)

    def records(self, version: str) -> dict[str, dict]:
        """The records of the shards that were made with the present settings, by name."""
        records: dict[str, dict] = {}
        # A finished set has its records in the index, and their entries by split.
        if self.index.get("made") == version:
            for name, record in self.index["records"].items():
                records[name] = {**record, "made": version}
            for split in SPLITS:
                for shard in self.index[split]["shards"]:
                    records[shard["name"]][split] = shard

        # Shards that were made since have a file each.
        for file in sorted((self.directory / "preparing").glob("[0-9]*.json")):
            record = read_json_if_whole(file)
            if record.get("made") == version:
                records[file.stem] = record
        return records

    def units(self) -> list[Unit]:
        """The units of the finished set, or else of the plan that was begun."""
        if self.index:
            records = self.index.get("records", {}).values()
            return [Unit.of(key) for record in records for key in record["units"]]

        plan = read_json_if_whole(self.directory / "preparing" / "plan.json")
        return [Unit(*unit) for job in plan.get("jobs", ()) for unit in job]


# ------------------------------ what is refused


def _check_settings(data: DataConfig, tokenizer: TokenizerConfig, shard_bytes: int | None) -> None:
    if data.mixture:
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
    if shard_bytes is not None and shard_bytes < 1:
        raise InputError(f"shard_bytes: {shard_bytes} bytes hold nothing; take 1 MB or more")


def _refuse_other_files(directory: Path) -> None:
    """Raises `InputError` if the directory has other files than those of a set."""
    if is_begun(directory):
        return
    if directory.exists() and any(path.name != "preparing" for path in directory.iterdir()):
        raise InputError(f"{directory}: not empty and not a token set; name another directory")


def _refuse_other_settings(
    directory: Path, recorded: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Raises `InputError` if the set was begun with other settings. The source's files may differ."""
    if not recorded:
        return
    for key in settings | recorded:
        if key != "corpus" and recorded.get(key) != settings.get(key):
            raise InputError(
                f"{directory}: was prepared with {key} {json.dumps(recorded.get(key))}, and this is "
                f"{json.dumps(settings.get(key))}; name another directory, or remove it"
            )


# ------------------------------ the tokenizer


def _save_tokenizer(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    directory: Path,
    settings: dict[str, Any],
    corpus: Corpus,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Builds the tokenizer and saves it whole, unless an earlier call did.

    Then it writes the settings, which claim the directory. Returns `describe_tokenizer`.
    """
    saved, work = directory / "tokenizer", directory / "preparing"
    partial_folder = work / "tokenizer"
    new = not saved.exists()
    if new:
        shutil.rmtree(partial_folder, ignore_errors=True)  # perhaps made with other settings
        if tokenizer.train:
            size = tokenizer.vocab_size or "all"
            say(f"training a tokenizer of {size} {tokenizer.train} tokens …")

    work.mkdir(parents=True, exist_ok=True)
    folder = partial_folder if new else saved  # a trained one is saved there
    built = build_tokenizer(tokenizer, data, folder, lambda: corpus)
    encoder(built, data)  # reports a lack of bos or eos once, before the shards
    if new and not folder.exists():
        built.save_pretrained(folder)

    # The saved one must give the tokens of the one that was built.
    described = describe_tokenizer(load_tokenizer(folder))
    if described != describe_tokenizer(built):
        raise InputError(
            f"tokenizer: not the one in {saved}; restore it, or name another directory"
        )
    # Settings first: a directory with a tokenizer alone would be refused as not empty.
    write_atomically(work / "settings.json", json.dumps(settings).encode())
    if new:
        folder.replace(saved)
    return described
