"""The folder of a run: its lock, its records, and the checkpoint to resume from."""

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Container, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from nalanda.common.errors import Diverged, InputError, explained, first_line, output_folder
from nalanda.common.files import (
    alone,
    missing_folders,
    remove_new_folders,
    verify_manifest,
    write_atomically,
)
from nalanda.common.text import redact
from nalanda.common.versions import versions
from nalanda.config.load import differences, parts_of, read_sections, recipe_of
from nalanda.config.model import build_model_config, config_source, recorded_model, written_out
from nalanda.config.schema import RunConfig
from nalanda.model import NalandaConfig
from nalanda.train import tensor_files
from nalanda.train.checkpoint_dir import (
    MARK,
    checkpoint_folders,
    describe_unusable,
    latest_checkpoint,
    mark_unsound,
    saved_between_bad_steps,
    step_of,
)
from nalanda.train.log import read_facts, write_facts

IDENTITY = ("model", "tokenizer", "data", "seed")
"""Sections of the recipe that identify a run: its checkpoints fit no other values."""

MOVABLE = {
    "data.source",
    "data.validation_source",
    "data.workers",
    "data.retries",
    "data.verify",
    "data.max_document_bytes",
    "data.oversized",
    "data.unusable",
    "data.max_validation_rows",
}
"""Keys of these sections that may change. data/resume.py checks the files of the sources."""


def last_good(
    directory: Path,
    suspect: Path | None = None,
    reason: str = "",
    complete: Callable[[Path], object] = lambda path: None,
) -> Path | None:
    """The newest usable checkpoint that was not saved between bad steps.

    suspect: a checkpoint after which no step was good. An older one is preferred; if there is one, the
    suspect is marked unsound, with `reason`.
    """

    def passed_over(path: Path) -> bool:
        # Only older ones are of use: the suspect did not help.
        is_newer = suspect is not None and step_of(path) >= step_of(suspect)
        return is_newer or saved_between_bad_steps(path)

    checkpoint = latest_checkpoint(directory, lambda line: None, complete, passed_over)
    if checkpoint and suspect:
        mark_unsound(suspect, f"no step behind it was good: {reason}")
    return checkpoint or suspect


def rollback_message(step: int, why: str, back: Path | None, saved: Path | None) -> str:
    """Says why the run stops after bad steps.

    back: the checkpoint that did not help. saved: the one that the stop has saved.
    """
    last = "there is no checkpoint from before them"
    if back:
        last = f"going back to {back}, whose weights and moments are finite, did not help"
    advice = "train.resume=step-N resumes from a checkpoint of your choice"
    if saved:
        last += f", so what was learnt is saved in {saved}"
        advice = "the same command then skips their rows. If the data are sound, raise guard.sigma"
    return f"step {step}: {why}; {last}. Lower optim.lr or lengthen schedule.warmup_steps; {advice}"


def no_checkpoint_message(run_dir: Path) -> str:
    """Says why none of a run's checkpoints can be resumed from, and what to do."""
    problems = describe_unusable(run_dir / "checkpoints") or "none is left"
    return (
        f"{run_dir}: no checkpoint can be resumed from ({problems}). Put one back "
        f"from a copy, or move {run_dir} away to start over; nothing was changed"
    )


def is_exported(final: Path) -> bool:
    """Whether the model folder has a config and readable weights."""
    try:
        files = list(final.glob("*.safetensors"))
        return bool(
            files
            and all(map(tensor_files.shapes, files))
            and (final / "config.json").stat().st_size
        )
    except (InputError, OSError):
        return False


def record_recipe(run_dir: Path, recipe: RunConfig, model: Any) -> None:
    """Writes `recipe` to config.yaml.

    model: the model's config. The defaults of one of Nalanda's are written out: config.yaml then trains the
        same model under other defaults.
    """
    if config_source(recipe.model) is NalandaConfig:
        recipe = dataclasses.replace(recipe, model=recorded_model(recipe.model, model))
    write_atomically(run_dir / "config.yaml", recipe.to_yaml())


@contextlib.contextmanager
def record_state(run_dir: Path, facts: dict) -> Iterator[None]:
    """Writes `facts` to run.json, with its process, and again at the end.

    The state is running, then finished, interrupted or failed; `finished` is set within.
    """
    facts |= {"state": "running", "host": platform.node(), "pid": os.getpid()}
    facts["command"] = shlex.join([Path(sys.argv[0]).name, *map(redact, sys.argv[1:])])
    write_facts(run_dir, facts)
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, SystemExit | KeyboardInterrupt)
        facts |= {"state": "interrupted" if stopped else "failed"}
        if not stopped:
            facts["reason"] = first_line(explained(error) or error)
            facts["diverged"] = isinstance(error, Diverged)
        raise
    finally:
        facts["ended"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_facts(run_dir, facts)


def claim(run_dir: Path, config: RunConfig) -> tuple[dict[str, list], dict, Path | None]:
    """Takes the locked `run_dir` for the run `config`, which may be new or resumed.

    Returns the settings that changed since the run stopped, `{key: [old, new]}`; the contents of run.json;
    and the checkpoint to resume from, None for a new run.

    Raises:
        InputError: the folder has another run, or one that cannot be resumed. Nothing in it was changed.
    """
    file, folder = run_dir / "config.yaml", run_dir / "checkpoints"
    saved = checkpoint_folders(folder)
    begun = has_logged(run_dir) or any(folder.glob("*"))
    if not file.is_file() and begun:
        raise InputError(
            f"{file} is missing: restore it, or put the recipe there that the run started with"
        )

    # Nothing may be changed before the last refusal below.
    try:
        facts = read_facts(run_dir)
    except InputError as error:
        print(f"{error}; writing a new one", flush=True)
        facts = {}
    if "arms" in facts:
        raise InputError(f"{run_dir} holds a fit of layers; choose another output_dir")
    changes = changes_since(file, config, saved)
    if begun:
        refuse_another_run(run_dir, changes)

    resume = checkpoint_of(run_dir, config, changes if begun else {})
    steps = config.train.steps
    # A finished run passes: it has nothing left to train. Another run's last checkpoint is no model of this run.
    least = step_of(resume) + (resume.parent != folder) if resume else 0
    if resume and least > steps and facts.get("state") != "finished":
        raise InputError(
            f"train.steps: {steps}, but {run_dir} goes on from {resume.name}: set {least} or more, or train.resume to "
            "an earlier checkpoint"
        )
    if resume and begun:
        refuse_begun_stages(run_dir, config, changes, step_of(resume))
    # Starting over would write over a run whose checkpoints are lost or damaged. Without run.json one that has logged
    # may have had some.
    if resume is None and (saved or facts.get("saved", has_logged(run_dir))):
        raise InputError(no_checkpoint_message(run_dir))

    if not saved and any(section_of(key) in IDENTITY for key in changes):
        # Nothing was saved yet, for example because of bad data: the run starts over.
        shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
        changes = {}
    for name, version in versions().items():  # other code may round otherwise
        before = facts.get("versions", {}).get(name, version)
        if before != version:
            changes[f"version of {name}"] = (before, version)

    if not saved:  # else once this start is set up: a refused one leaves no trace
        try:
            write_atomically(file, config.to_yaml())
        except OSError as error:
            raise InputError(f"output_dir: {explained(error) or error}") from None
    return {key: list(values) for key, values in changes.items()}, facts, resume


def keep_warmup(config: RunConfig, changes: dict[str, list], facts: dict) -> None:
    """Gives a resumed run its recorded warm-up, unless the command or a changed recipe sets another.

    changes, facts: as `claim` returns them; the change is taken away.
    """
    key, schedule = "schedule.warmup_steps", config.schedule
    recorded, of_recipe = changes.get(key, [config.train.steps + 1])[0], schedule.recipe_warmup
    stays = of_recipe != schedule.warmup_steps or of_recipe == facts.get("recipe_warmup")
    if of_recipe and stays and recorded <= config.train.steps:
        schedule.warmup_steps = recorded
        del changes[key]


def section_of(key: str) -> str:
    """The section of a recipe's key."""
    return key.split(".")[0]


def changes_since(file: Path, config: RunConfig, saved: list[Path]) -> dict[str, tuple]:
    """The settings of `config` that differ from the recipe in `file`, if there is one.

    saved: as for `models_of`.
    """
    if not file.is_file():
        return {}
    recorded = read_recorded_recipe(file)
    old_model, new_model = models_of(recorded, config, saved)
    old = recorded.to_dict() | {"model": old_model}
    new = config.to_dict() | {"model": new_model}
    changes = differences(old, new)
    changes.pop("output_dir", None)  # the folder was moved
    return changes


def refuse_another_run(
    run_dir: Path, changes: dict[str, tuple], identity: Container[str] = IDENTITY, kind: str = "run"
) -> None:
    """Raises `InputError` if `changes` have a setting that identifies a run, or another `kind` of work.

    identity: sections, and single keys.
    """
    for key, (old, new) in changes.items():
        if (section_of(key) in identity or key in identity) and key not in MOVABLE:
            setting = f"{key}={old if isinstance(old, str) else json.dumps(old)}"
            advice = f"leave out {key}" if old is None else f"set {shlex.quote(setting)}"
            raise InputError(
                f"{run_dir} holds another {kind}: {key} is {old!r} there and {new!r} here; {advice} to go on "
                "with it, or choose another output_dir"
            )


def refuse_begun_stages(
    run_dir: Path, config: RunConfig, changes: dict[str, tuple], step: int
) -> None:
    """Raises `InputError` if `changes` have a setting that identifies a run, of a stage that began before `step`."""
    recorded = read_recorded_recipe(run_dir / "config.yaml")
    begun = recorded.begun_stages(step) | config.begun_stages(step)

    judged = set()
    for key in changes:
        section, name, inner = parts_of(key)
        # "": a stage that was added or removed.
        identifies = section_of(inner) in ("", "after_step", *IDENTITY) and inner not in MOVABLE
        if section == "stages" and name in begun and identifies:
            judged.add(key)
    refuse_another_run(run_dir, changes, judged)


def refuse_other_data(run_dir: Path, changes: dict[str, list]) -> None:
    """Raises `InputError` if a finished run is asked to train on another source; a run that goes on compares texts."""
    if "data.source" in changes:
        old, new = changes["data.source"]
        raise InputError(
            redact(
                f"{run_dir} is finished, with data.source={old}: choose another output_dir for {new}"
            )
        )


def models_of(recorded: RunConfig, config: RunConfig, saved: list[Path]) -> tuple[dict, dict]:
    """The models of the run in a folder and of the recipe `config`, with the keys that both have.

    saved: the run's checkpoints. They tell a model of Nalanda's as it was trained, whatever the defaults are
    now.
    """
    described = None
    with contextlib.suppress(InputError):  # such as a model on a hub that is out of reach
        described = build_model_config(config)
    if not isinstance(described, NalandaConfig):
        return recorded.model, config.model

    before = None
    for path in reversed(saved):  # the newest that can be read
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            text = (path / "config.json").read_bytes()
            files = json.loads((path / "manifest.json").read_bytes())["files"]
            if files["config.json"]["sha256"] == sha256(text).hexdigest():  # else it is damaged
                before = NalandaConfig.from_dict(json.loads(text))
                break
    if before is None:
        with contextlib.suppress(InputError):
            before = build_model_config(recorded)

    new = written_out(described)
    old = written_out(before) if isinstance(before, NalandaConfig) else dict(recorded.model)
    # Their defaults are the tokenizer's and data.seq_len.
    for name in ("vocab_size", "max_position_embeddings"):
        if name not in config.model:
            new[name] = old.get(name)
    # `written_out` has the model's own keys alone, and init_from is one of the recipe.
    for model, recipe in ((old, recorded), (new, config)):
        if "init_from" in recipe.model:
            model["init_from"] = recipe.model["init_from"]
    return old, new


def read_recorded_recipe(file: Path) -> RunConfig:
    """The recipe of a run. Raises `InputError` if the file is damaged."""
    try:
        sections = read_sections(file)
        model = sections.get("model")
        if isinstance(model, dict) and "feature_map_options" in model:
            sections["model"] = NalandaConfig.migrated(model)
        return recipe_of(sections, file.parent)
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file}: the run's recipe is damaged ({error}); restore a copy, put the recipe there that "
            "the run started with, or choose another output_dir"
        ) from None


def has_logged(run_dir: Path) -> bool:
    """Whether metrics.jsonl has a line. It is opened before the first step."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def checkpoint_of(run_dir: Path, config: RunConfig, changes: dict[str, tuple]) -> Path | None:
    """The checkpoint from which a run goes on, or begins; None for a new run of its own.

    changes: the settings that changed since the run in the folder stopped.
    """
    folder, name = run_dir / "checkpoints", config.train.resume
    # `train.resume` counts once: a later start with the same value goes on from the newest.
    if name is None or ("train.resume" not in changes and checkpoint_folders(folder)):
        return latest_checkpoint(folder)
    # Another run's only begins a new one.
    if len(Path(str(name)).parts) > 1 and "train.resume" in changes:
        raise InputError(
            f"train.resume: {name} is of another run, and {run_dir} has begun; choose another output_dir"
        )
    return choose_checkpoint(folder, name)


def choose_checkpoint(directory: Path, name: str | int) -> Path:
    """The checkpoint `name`: `step-N` or N in `directory`, or the path of another run's `step-N`.

    Raises `InputError` if there is none, or it is damaged.
    """
    path = Path(str(name)).expanduser()
    if len(path.parts) > 1:
        directory = path.parent
    folders = checkpoint_folders(directory)
    chosen = directory / f"step-{path.name.removeprefix('step-')}"
    if chosen not in folders:
        names = ", ".join(path.name for path in folders) or "none"
        raise InputError(f"train.resume: {directory} has no {path.name}; there are {names}")
    if (problem := verify_manifest(chosen)) is not None:
        raise InputError(f"train.resume: {chosen} is damaged: {problem}")
    return chosen


def make_newest(chosen: Path) -> None:
    """Renames the checkpoints after `chosen` to `later-step-N`, and takes its mark away."""
    (chosen / MARK).unlink(missing_ok=True)
    for path in [p for p in checkpoint_folders(chosen.parent) if step_of(p) > step_of(chosen)]:
        # later-step-N, later-step-N.2, …: what was set aside before stays.
        names = (f"later-{path.name}{f'.{n}' * (n > 1)}" for n in itertools.count(1))
        aside = next(a for a in map(path.with_name, names) if not a.exists())
        path.rename(aside)
        print(f"{path} is set aside as {aside.name}", flush=True)


def refuse_other_files(run_dir: Path) -> None:
    """Raises `InputError` if the folder has files, and none of a run."""
    names = set()
    if run_dir.is_dir():
        names = {path.name for path in run_dir.iterdir()} - {".lock"}
    of_a_run = {"config.yaml", "run.json", "metrics.jsonl", "hashes.jsonl", "checkpoints"}
    if run_dir.is_file() or (names and not names & of_a_run):
        raise InputError(
            f"{run_dir} has files that are no run of Nalanda's; choose another output_dir"
        )


def refuse_other_recipe(run_dir: Path, config: RunConfig) -> None:
    """Raises `InputError` if the folder has a run that `config` cannot resume."""
    saved = checkpoint_folders(run_dir / "checkpoints")
    if saved:
        refuse_another_run(run_dir, changes_since(run_dir / "config.yaml", config, saved))


@contextlib.contextmanager
def lock_run_dir(run_dir: Path, config: RunConfig) -> Iterator[None]:
    """Locks the run's folder, and makes it if needed. Only the process with the lock may write there; a
    process that a launcher left behind may still be running.

    A folder that it made is removed if the run fails before it has written anything. A tokenizer that was trained is
    kept, for the next start with the same data.

    Raises:
        InputError: another process has the lock, the folder cannot be made, or it has other files than a run.
    """
    missing = missing_folders(run_dir)
    refuse_other_files(run_dir)
    output_folder(run_dir, "output_dir")
    taken = f"{run_dir}: another process is training there; stop it or choose another output_dir"
    with alone(run_dir / ".lock", taken, seconds=5) as locked:
        if not locked:
            print(
                f"{run_dir}: this file system has no locks; start no second run there", flush=True
            )
        # Behind the lock: a start that does not get it removes no folder of another.
        try:
            yield
        except Exception:
            prepared = config.tokenizer.train and (run_dir / "tokenizer").exists()
            if not (has_logged(run_dir) or prepared or checkpoint_folders(run_dir / "checkpoints")):
                remove_new_folders(missing)
            raise
