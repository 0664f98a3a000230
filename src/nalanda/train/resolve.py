"""The model and the run that a name means, for every command. Imports neither torch nor transformers."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.common.progress import first_process
from nalanda.config.model_folder import check_name, tokenizer_files
from nalanda.train.checkpoint_dir import (
    checkpoint_folders,
    describe_unusable,
    latest_checkpoint,
    step_of,
)
from nalanda.train.log import read_facts

RUNS = Path("runs")
"""The folder of runs that are named without it."""


@dataclass(frozen=True)
class Resolved:
    """The model, tokenizer and run of a name."""

    model: str
    """A folder with config and weights, or an id on the hub."""
    tokenizer: str
    """The folder or id of its tokenizer: the model's, or for a checkpoint its run's."""
    run: Path | None = None
    """The run of the model, if it lies in one."""


def resolve(name: str) -> Resolved:
    """The model of a run, of a checkpoint `step-N` of one, of a model folder, or of the hub.

    Of a run it is `final`, else the newest whole checkpoint; a line on stderr says which. A run in `runs` is
    found by its name alone.

    Raises:
        InputError: there is no such model, or nothing whole in the run.
    """
    path = find_run(name)
    if _is_run(path):
        path = _newest_model(path)
    elif not path.exists():
        check_name(name)
        return Resolved(name, name)

    check_name(str(path))
    run, model = _run_around(path), str(path)
    # Checkpoints of a run have no tokenizer of their own.
    if run is None or tokenizer_files(path) or not (run / "tokenizer").is_dir():
        return Resolved(model, model, run)
    return Resolved(model, str(run / "tokenizer"), run)


def resolve_all(names: Sequence[str] | None) -> list[str]:
    """The models that the names mean. Raises `InputError` as `resolve`, also without names."""
    if not names:
        raise InputError("no model given: name a run, a checkpoint directory or a hub id")
    return [resolve(name).model for name in names]


def run_of(name: str) -> Path:
    """The run that a command on runs means by its folder, its name in `runs`, its `final` or a `step-N`."""
    path = find_run(name)
    around = None if _is_run(path) else _run_around(path)
    return around or path


def exported(name: str) -> Path:
    """The source of `nalanda export`: a checkpoint `step-N` itself, else the run."""
    path = Path(name).expanduser()
    return path if path.name.startswith("step-") else run_of(name)


def find_run(name: str) -> Path:
    """The path `name`, or if there is none the run of that name in `runs`."""
    path = Path(name).expanduser()
    # Only a bare name is looked up in `runs`, and what lies at the path itself comes first.
    inside = RUNS / name
    lone = path.name == name and name not in ("", ".", "..")
    return inside if lone and not path.exists() and _is_run(inside) else path


def _is_run(path: Path) -> bool:
    """Whether this is the folder of a run. A model folder has a run.json too, and its config beside."""
    marks = ("checkpoints", "final", "metrics.jsonl", "run.json")
    return not (path / "config.json").exists() and any((path / mark).exists() for mark in marks)


def _run_around(path: Path) -> Path | None:
    """The run whose `final`, `final-ema-D` or checkpoint this is."""
    # Absolute, since a relative path may not name its parents; links are not followed.
    path = Path.cwd() / path
    if re.fullmatch("final(-ema-.+)?", path.name) and _is_run(path.parent):
        return path.parent
    if path.parent.name == "checkpoints" and path in checkpoint_folders(path.parent):
        return path.parents[1]
    return None


def _newest_model(run: Path) -> Path:
    """`final`, else the newest whole checkpoint. Says which."""
    facts = read_facts(run)
    if arms := facts.get("arms"):
        raise InputError(f"{run}: a fit of layers; name a model in it, such as {run / arms[0]}")
    final, folder = run / "final", run / "checkpoints"
    if (final / "config.json").is_file():
        step, model = read_facts(final).get("step", facts.get("step")), final
    else:
        model = latest_checkpoint(folder, lambda line: print(line, file=sys.stderr))
        if model is None:
            why = describe_unusable(folder) or "no checkpoint is saved"
            raise InputError(
                f"{run}: the run has no whole model yet: no final, and {why}; train it further"
            )
        step = step_of(model)

    # transformers does not read the parts of a sharded checkpoint.
    if (model / "model").is_dir():
        raise InputError(
            f"{model}: its weights are in parts; join them first: nalanda export {run} OUT"
        )
    if first_process():
        steps = f" of {facts['steps']}" if "steps" in facts else ""
        state = f" ({facts['state']})" if "state" in facts else ""
        print(f"model: {run}, step {step}{steps}{state}", file=sys.stderr, flush=True)
    return model
