"""The checkpoint folders of a run: finding, marking and pruning them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.common.files import verify_manifest, write_atomically
from nalanda.config.schema import CheckpointConfig

MARK = "unsound.txt"


def latest_checkpoint(directory: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest usable checkpoint, or None. Calls `say` for each newer one that is unusable."""
    for path in reversed(checkpoint_folders(directory)):
        problem = why_unusable(path)
        if problem is None:
            return path
        say(f"{path}: {problem.replace(':', ', passed over:', 1)}")
    return None


def why_unusable(path: Path) -> str | None:
    """`damaged: …` if a byte differs, `unsound: …` if it was marked so, None for a usable checkpoint."""
    if (problem := verify_manifest(path)) is not None:
        return f"damaged: {problem}"
    return None if (reason := unsound_reason(path)) is None else f"unsound: {reason}"


def unsound_reason(path: Path) -> str | None:
    """The reason that `mark_unsound` wrote, or None."""
    file = path / MARK
    return (
        (file.read_text(errors="replace").strip().splitlines() or ["?"])[0]
        if file.is_file()
        else None
    )


def mark_unsound(path: Path, reason: str) -> None:
    """Marks a checkpoint that no run may resume from. Removing `MARK` undoes it."""
    write_atomically(path / MARK, f"{reason}\n")


def checkpoint_folders(directory: Path) -> list[Path]:
    """Checkpoint folders, oldest first, damaged ones included."""
    found = [p for p in directory.glob("step-*") if p.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of)


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first. Raises `InputError` if it has none."""
    if found := checkpoint_folders(run_dir / "checkpoints"):
        return found
    raise InputError(f"{run_dir}: no checkpoints here; name the folder of a run")


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def prune(directory: Path, config: CheckpointConfig, step: int) -> None:
    """Removes checkpoints up to `step`, and the remains of interrupted saves. The last `keep_last` stay, and
    multiples of `keep_every`, and the one that a rollback would take. Later ones are from before a rollback
    or damaged, and are not counted."""
    folders = [p for p in checkpoint_folders(directory) if step_of(p) <= step]
    good = next((p for p in reversed(folders) if not saved_between_bad_steps(p)), None)
    for path in folders[: -config.keep_last]:
        if path != good and not (config.keep_every and step_of(path) % config.keep_every == 0):
            # Renamed first: if the process is killed, the rest is not taken for a checkpoint.
            path.rename(directory / f".tmp-{path.name}-old")
    for part in directory.glob(".tmp-step-*"):
        shutil.rmtree(part, ignore_errors=True)


def saved_between_bad_steps(path: Path) -> bool:
    """Whether a stop saved the checkpoint behind a step that was left out."""
    return bool(_trainer_state(path).get("bad"))


def saved_before_sums(path: Path) -> bool:
    """Whether the checkpoint was saved before all files of the token sets were compared with their sums."""
    return _trainer_state(path).get("sums_compared") is False


def _trainer_state(path: Path) -> dict:
    """Of the checkpoint; {} if it is damaged."""
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
    if not folder.is_dir():
        if step is not None or not (path / "manifest.json").is_file():
            raise InputError(
                f"{path}: expected a run's folder, or one of its checkpoints/step-N without --step"
            )
        found = path
    elif step is None:
        found = (
            latest_checkpoint(folder) if check else next(reversed(checkpoint_folders(folder)), None)
        )
        if found is None:
            raise InputError(f"{folder}: there is no whole checkpoint")
        return found
    else:
        found = folder / f"step-{step}"
        if not found.is_dir():
            there = ", ".join(str(step_of(p)) for p in checkpoint_folders(folder)) or "none"
            raise InputError(f"{folder}: no step {step}; there are {there}")
    if check and (problem := verify_manifest(found)):
        raise InputError(f"{found}: damaged: {problem}")
    return found
