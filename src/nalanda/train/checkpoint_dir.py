"""The checkpoint folders of a run: finding, marking and pruning them."""

import json
from collections.abc import Callable
from itertools import filterfalse
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.common.files import discard, verify_manifest, write_atomically
from nalanda.common.text import suggest
from nalanda.config.schema import CheckpointConfig

MARK = "unsound.txt"


def latest_checkpoint(
    directory: Path,
    say: Callable[[str], None] = print,
    complete: Callable[[Path], object] = lambda path: None,
    passed_over: Callable[[Path], bool] = lambda path: False,
) -> Path | None:
    """The newest usable checkpoint, or None. Calls `say` for each newer one that is unusable.

    complete: called with each before it is read, such as to fetch files that its folder lacks. passed_over: whether
    one is left out without a word.
    """
    for path in filterfalse(passed_over, reversed(checkpoint_folders(directory))):
        complete(path)
        problem = why_unusable(path)
        if problem is None:
            return path
        say(f"{path}: {problem.replace(':', ', passed over:', 1)}")
    return None


def why_unusable(path: Path) -> str | None:
    """`damaged: …` if a byte differs, `unsound: …` if it was marked so, None for a usable checkpoint."""
    problem = verify_manifest(path)
    if problem is not None:
        return f"damaged: {problem}"
    reason = unsound_reason(path)
    return None if reason is None else f"unsound: {reason}"


def describe_unusable(directory: Path) -> str:
    """Why each checkpoint of the directory is unusable; "" if there is none."""
    folders = checkpoint_folders(directory)
    return "; ".join(f"{path.name} is {why_unusable(path)}" for path in folders)


def unsound_reason(path: Path) -> str | None:
    """The reason that `mark_unsound` wrote, or None."""
    file = path / MARK
    if not file.is_file():
        return None
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[0] if lines else "?"


def mark_unsound(path: Path, reason: str) -> None:
    """Marks a checkpoint that no run may resume from. Removing `MARK` undoes it."""
    write_atomically(path / MARK, f"{reason}\n")


def checkpoint_folders(directory: Path) -> list[Path]:
    """Checkpoint folders, oldest first, damaged ones included."""
    folders = [p for p in directory.glob("step-*") if p.name.removeprefix("step-").isdecimal()]
    return sorted(folders, key=step_of)


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first. Raises `InputError` if it has none."""
    if folders := checkpoint_folders(run_dir / "checkpoints"):
        return folders
    if not run_dir.is_dir():
        runs = [path.name for path in run_dir.parent.glob("*") if path.is_dir()]
        raise InputError(f"{run_dir}: no such run{suggest(run_dir.name, runs)}")
    raise InputError(f"{run_dir}: no checkpoints here; name the folder of a run")


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def prune(directory: Path, config: CheckpointConfig, step: int) -> None:
    """Removes checkpoints up to `step`, and the remains of interrupted saves.

    The last `keep_last` stay, and multiples of `keep_every`, and the one that a rollback would take. Later
    ones are from before a rollback or damaged, and are not counted.
    """
    folders = [path for path in checkpoint_folders(directory) if step_of(path) <= step]
    last_good = next((p for p in reversed(folders) if not saved_between_bad_steps(p)), None)
    for path in folders[: -config.keep_last]:
        if path != last_good and not config.keeps_for_good(step_of(path)):
            # Renamed first: if the process is killed, the rest is not taken for a checkpoint.
            path.rename(directory / f".tmp-{path.name}-old")
    for remains in directory.glob(".tmp-step-*"):
        discard(remains)


def saved_between_bad_steps(path: Path) -> bool:
    """Whether a stop saved the checkpoint behind a step that was left out."""
    return bool(_trainer_state(path).get("bad"))


def saved_before_sums(path: Path) -> bool:
    """Whether the checkpoint was saved before all files of the token sets were compared with their sums."""
    return _trainer_state(path).get("sums_compared") is False


def _trainer_state(path: Path) -> dict:
    """The contents of trainer.json; {} if it is damaged."""
    try:
        return json.loads((path / "trainer.json").read_text())
    except (OSError, ValueError):
        return {}


def find_checkpoint(path: str | Path, step: int | None = None, *, check: bool = True) -> Path:
    """The checkpoint at `path`, or of the run at `path`: that of `step`, or the newest usable one.

    check: whether the files are compared with their sums.

    Raises:
        InputError: no such checkpoint, or it is damaged.
    """
    path = Path(path)
    folder = path / "checkpoints"
    # Of a run, the newest usable one.
    if folder.is_dir() and step is None:
        newest = next(reversed(checkpoint_folders(folder)), None)
        checkpoint = latest_checkpoint(folder) if check else newest
        if checkpoint is None:
            raise InputError(f"{folder}: there is no whole checkpoint")
        return checkpoint

    # A step of a run, or a checkpoint itself.
    if folder.is_dir():
        checkpoint = folder / f"step-{step}"
        if not checkpoint.is_dir():
            steps = ", ".join(str(step_of(p)) for p in checkpoint_folders(folder)) or "none"
            raise InputError(f"{folder}: no step {step}; there are {steps}")
    else:
        checkpoint = path
        if not (path / "manifest.json").is_file():
            raise InputError(f"{path}: neither a run's folder nor one of its checkpoints/step-N")
        if step is not None:
            raise InputError(f"{path}: one checkpoint already; leave --step out")
    problem = verify_manifest(checkpoint) if check else None
    if problem:
        raise InputError(f"{checkpoint}: damaged: {problem}")
    return checkpoint
