"""The folder of a run: who holds it, what it holds, where it resumes from."""

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from nalanda.common.errors import InputError, explained, output_folder
from nalanda.common.files import verify_manifest, write_atomically
from nalanda.config.load import differences, load_config
from nalanda.config.schema import RunConfig
from nalanda.train import checkpoint
from nalanda.train import log as metrics
from nalanda.train.checkpoint_dir import (
    MARK,
    checkpoint_folders,
    latest_checkpoint,
    mark_unsound,
    step_of,
    why_unusable,
)

IDENTITY = ("model", "tokenizer", "data", "seed")
"""What makes a run this run: with another value of these, its checkpoints mean something else."""

MOVABLE = {"data.source", "data.validation_source", "data.workers", "data.retries", "data.verify"}
MOVABLE |= {"data.max_document_bytes", "data.oversized"}
"""What may change even so: a corpus may move, and is known again by what is in it; a document that is too
large may be let in, or left out."""


def last_good(directory: Path, suspect: Path | None = None, reason: str = "") -> Path | None:
    """The newest usable checkpoint that was not saved between bad steps.

    suspect: one that the run went back to in vain. One before it is preferred; if there is one, the suspect
    is marked with `reason`.
    """
    for path in reversed(checkpoint_folders(directory)):
        if suspect is not None and step_of(path) >= step_of(suspect):
            continue
        if why_unusable(path) is not None or _between_bad_steps(path):
            continue
        if suspect is not None:
            mark_unsound(suspect, f"no step behind it was good: {reason}")
        return path
    return suspect


def _between_bad_steps(path: Path) -> bool:
    return bool(json.loads((path / "trainer.json").read_text()).get("bad"))


def rollback_message(step: int, why: str, back: Path | None) -> str:
    last = "no checkpoint was saved yet"
    if back:
        last = f"going back to {back}, whose weights and moments are finite, did not help"
    return (
        f"step {step}: {why}; {last}. Lower optim.lr or lengthen schedule.warmup_steps; "
        "train.resume=step-N resumes from a checkpoint of your choice"
    )


def no_checkpoint_message(run_dir: Path) -> str:
    """Why a run that has saved something cannot be resumed, and what to do."""
    found = [f"{p.name} is {why_unusable(p)}" for p in checkpoint_folders(run_dir / "checkpoints")]
    return (
        f"{run_dir}: no checkpoint can be resumed from ({'; '.join(found) or 'none is left'}). Put one back "
        f"from a copy, or move {run_dir} away to start over; nothing was changed"
    )


def is_exported(final: Path) -> bool:
    """Whether the model folder has weights that can be read, and a config."""
    try:
        files = list(final.glob("*.safetensors"))
        return bool(files and all(map(checkpoint.shapes, files)) and (final / "config.json").stat().st_size)
    except (InputError, OSError):
        return False


@contextlib.contextmanager
def record_state(run_dir: Path, facts: dict) -> Iterator[None]:
    """run.json says "running" while the run does, and afterwards how it ended."""
    metrics.write_facts(run_dir, facts)
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, SystemExit | KeyboardInterrupt)
        facts |= {"state": "interrupted" if stopped else "failed"}
        if not stopped:
            facts["reason"] = (str(explained(error) or error).splitlines() or [type(error).__name__])[0]
        raise
    finally:
        metrics.write_facts(run_dir, facts)


def claim(run_dir: Path, config: RunConfig) -> tuple[dict[str, list], dict, Path | None]:
    """Makes `run_dir`, which is held, this run's.

    Returns the settings that changed since it stopped, `{key: [old, new]}`; what run.json says; and the
    checkpoint to resume from, None at the beginning.

    Raises:
        InputError: it holds another run, or one that cannot be resumed. Nothing in the folder was changed.
    """
    file, folder = run_dir / "config.yaml", run_dir / "checkpoints"
    changes: dict[str, tuple] = {}
    others: list[str] = []
    saved, begun = checkpoint_folders(folder), (run_dir / "metrics.jsonl").exists() or folder.exists()
    if file.is_file():
        changes = differences(read_recorded_recipe(file).to_dict(), config.to_dict())
        changes.pop("output_dir", None)  # the folder was moved
        others = [key for key in changes if key.split(".")[0] in IDENTITY and key not in MOVABLE]
        if others and begun:
            old, new = changes[others[0]]
            raise InputError(
                f"{run_dir} holds another run: {others[0]} is {old!r} there and {new!r} here; "
                "choose another output_dir"
            )
    elif begun:
        raise InputError(
            f"{file} is missing: put it back, or write there the recipe that the run was begun with"
        )
    try:
        facts = metrics.read_facts(run_dir)
    except InputError as error:
        print(f"{error}; it is written anew", flush=True)
        facts = {}
    if config.train.resume is not None and ("train.resume" in changes or not saved):
        choose_checkpoint(folder, config.train.resume)
    resume = latest_checkpoint(folder)
    if resume is None and (saved or ever_saved(run_dir, facts)):
        raise InputError(no_checkpoint_message(run_dir))
    if not saved and changes.keys() & {*others, *MOVABLE}:
        # Stopped before anything was kept, by bad data for one: there is nothing to lose.
        shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
        changes = {}
    try:
        write_atomically(file, config.to_yaml())
    except OSError as error:
        raise InputError(f"output_dir: {explained(error) or error}") from None
    return {key: list(values) for key, values in changes.items()}, facts, resume


def read_recorded_recipe(file: Path) -> RunConfig:
    """The recipe that a run recorded. Raises `InputError`, which names the file as damaged."""
    try:
        return load_config(file)
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file}: the run's own record of its recipe is damaged ({error}); put a copy back, or write "
            "there the recipe that the run was begun with"
        ) from None


def ever_saved(run_dir: Path, facts: dict) -> bool:
    """Whether the run has saved a checkpoint, by run.json, or without one by how far metrics.jsonl goes."""
    if "saved" in facts:
        return facts["saved"] > 0
    file = run_dir / "metrics.jsonl"
    every = read_recorded_recipe(run_dir / "config.yaml").checkpoint if file.is_file() else None
    if every is None or not every.every:
        return False
    # A line behind a step means that its save has returned; an asynchronous one ends before the next begins.
    last = max((line["step"] for line in metrics.read_metrics(file)), default=0)
    return last > every.every * (2 if every.asynchronous else 1)


def choose_checkpoint(directory: Path, name: str | int) -> None:
    """Makes checkpoint `name`, `step-N` or N, the newest one; later ones stay there as `later-step-M`.

    Raises:
        InputError: there is no such checkpoint, or it is damaged. Nothing was changed.
    """
    there = checkpoint_folders(directory)
    chosen = next((p for p in there if p.name == f"step-{str(name).removeprefix('step-')}"), None)
    if chosen is None:
        names = ", ".join(p.name for p in there) or "none"
        raise InputError(f"train.resume: {directory} has no {name}; there are {names}")
    if (problem := verify_manifest(chosen)) is not None:
        raise InputError(f"train.resume: {chosen} is damaged: {problem}")
    (chosen / MARK).unlink(missing_ok=True)
    for path in there[there.index(chosen) + 1 :]:
        names = (f"later-{path.name}{f'.{n}' * (n > 1)}" for n in itertools.count(1))
        aside = next(a for a in map(path.with_name, names) if not a.exists())
        path.rename(aside)
        print(f"{path} is set aside as {aside.name}", flush=True)


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Holds the run's folder, which is made where there is none. One who does not hold it changes nothing
    there: a process that a launcher left behind would go on writing beside this one.

    Raises:
        InputError: another process holds it, it cannot be made, or it holds something that is no run.
    """
    names = {path.name for path in run_dir.iterdir()} - {".lock"} if run_dir.is_dir() else set()
    if run_dir.is_file() or (
        names and not names & {"config.yaml", "run.json", "metrics.jsonl", "checkpoints"}
    ):
        raise InputError(f"{run_dir} holds files that are no run of Nalanda's; choose another output_dir")
    output_folder(run_dir, "output_dir")
    lock = FileLock(run_dir / ".lock")  # the system's kind, which ends with the process, however that ends
    try:
        lock.acquire(timeout=5)
    except Timeout:
        raise InputError(
            f"{run_dir}: another process is training there; stop it or choose another output_dir"
        ) from None
    except (OSError, NotImplementedError):
        print(f"{run_dir}: this file system has no locks: nothing keeps a second run out of it", flush=True)
        yield
        return
    try:
        yield
    finally:
        lock.release()
