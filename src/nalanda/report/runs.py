"""Lists runs, and reads the files in their folders."""

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from nalanda.common.errors import InputError, first_line
from nalanda.common.files import alone, read_recipe
from nalanda.common.terminal import narrowed, stdout
from nalanda.common.text import fixed, si
from nalanda.config.schema import DataConfig
from nalanda.train.log import last_metrics, read_facts

SILENT = 3600.0
"""Seconds without new metrics after which a run on another machine counts as dead."""


@dataclass
class RunSummary:
    """A run as recorded in its folder; None where that holds no value."""

    name: str
    state: str
    """One of running, finished, interrupted, failed, empty, unreadable, killed (its process is gone,
    and recorded no end)."""
    changed: float
    """Time of the last change, in seconds since the epoch."""
    model: str = "–"
    problem: str | None = None
    parameters: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    val_ppl: float | None = None
    val_bpb: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None


def find_runs(directory: str | Path) -> list[Path]:
    """The folders of runs at or below `directory`, behind links too. Raises InputError.

    Folders within a run are left out, and a link to a folder that was found before.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; name a directory that holds runs")
    runs, seen = [], set()
    for folder, below, files in os.walk(directory, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)

        if {"config.yaml", "run.json"} & set(files):
            runs.append(Path(folder))
            # os.walk then does not descend: folders within a run are its own.
            below.clear()
        else:
            names = [name for name in below if not name.startswith(".")]
            # Links last: a run that is here too has its own name.
            below[:] = sorted(names, key=lambda name: (Path(folder, name).is_symlink(), name))
    return runs


def run_recipe(folder: Path) -> dict:
    """The recipe of the run in a folder; {} where it has none.

    Raises `InputError` for a folder that is no run; of a folder of runs it names some.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory; name the folder of a run")
    records = ("config.yaml", "run.json", "metrics.jsonl")
    if any((folder / name).is_file() for name in records):
        try:
            return read_recipe(folder) if (folder / "config.yaml").is_file() else {}
        except ValueError as error:
            raise InputError(f"{folder}: unreadable: {error}") from None

    runs = sorted({file.parent for name in records for file in folder.glob(f"*/{name}")})
    if runs:
        named = " ".join(map(str, runs[:3]))
        raise InputError(f"{folder}: a folder of runs; name some of them, such as {named}")
    raise InputError(f"{folder}: not a run; name a folder with a metrics.jsonl")


def read_run(folder: Path, name: str | None = None) -> RunSummary:
    """The run in `folder`; if that cannot be read, `state` is unreadable and `problem` says why."""
    files = [folder / name for name in ("metrics.jsonl", "run.json", "config.yaml")]
    changed = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    run = RunSummary(name or str(folder), "unreadable", changed)
    try:
        config, facts = read_recipe(folder), read_facts(folder)
        validates = bool((config.get("validation") or {}).get("every", 1))
        newest, last = _last_lines(folder, validates)
        arms = facts.get("arms")  # of `nalanda linearize`
        run.model = f"fit of {', '.join(arms)}" if arms else _model_name(config["model"])
        steps = config["linearize" if arms else "train"]["steps"]
        run.parameters, run.steps = facts.get("parameters"), steps
        run.loss, run.mfu = last.get("loss"), last.get("mfu")
        run.tokens_per_second = last.get("tokens_per_second")
        run.val_ppl, run.val_bpb = last.get("val_ppl"), last.get("val_bpb")
        # run.json is not written at every step, so the metrics may be ahead.
        run.step = max(facts.get("step", 0), newest)
        run.problem = facts.get("reason")
        run.state = facts.get("state", "empty")
        if run.state == "running" and not _is_alive(folder, facts, run.changed):
            run.state = "killed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        run.state = "unreadable"
        missing = "missing key " if isinstance(error, KeyError) else ""
        run.problem = f"{missing}{first_line(error)}"
    return run


def overview(directory: str | Path) -> list[RunSummary]:
    """All runs at or below `directory`, the last changed first. Raises InputError."""
    directory = Path(directory)
    named = [(folder, folder.relative_to(directory)) for folder in find_runs(directory)]
    runs = [read_run(f, str(n) if n.name else directory.resolve().name) for f, n in named]
    return sorted(runs, key=lambda run: (-run.changed, run.name))


def print_runs(runs: Sequence[RunSummary]) -> None:
    """Prints a table of the runs, then their problems. A narrow terminal gets fewer columns."""
    console = stdout()
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for heading in ("run", "state", "model"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "state")
    for heading in ("params", "step", "loss", "val ppl", "bits/B", "tok/s", "MFU", "changed"):
        table.add_column(heading, justify="right", no_wrap=True)
    colours = {"running": "green", "killed": "yellow", "failed": "red", "unreadable": "red"}
    for run in runs:
        step = None if run.step is None else f"{run.step:,}"
        if step and run.steps:
            step += f"/{run.steps:,}"
        # (value, how it is written); a dash stands for None.
        figures: tuple[tuple[Any, Callable[[Any], str]], ...] = (
            (run.parameters, si),
            (step, str),
            (run.loss, "{:.3f}".format),
            (run.val_ppl, lambda value: fixed(value, ",.2f")),
            (run.val_bpb, "{:.3f}".format),
            (run.tokens_per_second, si),
            (run.mfu, "{:.0%}".format),
        )
        table.add_row(
            run.name,
            Text(run.state, colours.get(run.state, "default")),
            run.model.replace(" + ", " +\n").replace(", ", ",\n"),
            *("–" if value is None else form(value) for value, form in figures),
            _format_time(run.changed),
        )
    # On a narrow terminal the first of these columns go first.
    console.print(
        narrowed(table, console, ("MFU", "params", "bits/B", "tok/s", "model", "val ppl"))
    )
    for run in runs:
        if run.problem:
            console.print(f"{run.name}: {run.problem}", soft_wrap=True)


def _last_lines(folder: Path, validates: bool) -> tuple[int, dict]:
    """The step of the newest line of metrics, and the newest values of the losses. Reads only the end.

    validates: whether there may be validation losses to look for.
    """
    step, newest = None, {}
    for line in last_metrics(folder / "metrics.jsonl"):
        # The newest line alone: before it may be events of steps that a rollback has undone. Its own event, and that
        # of a stage, have the number of the step to come.
        if step is None:
            step = line["step"] - (line.get("event") in ("rollback", "stage"))
        if "event" not in line:
            # Lines come from the end: values that are there already are newer.
            newest = line | newest
        if "loss" in newest and ("val_ppl" in newest or not validates):
            break
    return step or 0, newest


def layers(mixer: str | list[str] | dict[str, list[str]]) -> str:
    """The mixers of a model, or of its pattern: `gla`, or layers counted as `3 × gla, 1 × softmax`."""
    if isinstance(mixer, str):
        return mixer
    names = mixer["pattern"] if isinstance(mixer, dict) else mixer
    if len(names) == 1:
        return names[0]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def validated_of(line: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    """How much a validation read, by its line of metrics.jsonl: "labels", and "bytes" of their text where it has
    bits a byte."""
    labels, bits = line.get("val_tokens"), line.get("val_bpb")
    if not labels or not bits or not math.isfinite(bits):
        return (("labels", labels),) if labels else ()
    return ("labels", labels), ("bytes", labels * line["val_loss"] / math.log(2) / bits)


def validation_of(recipe: dict) -> dict[str, Any]:
    """The keys that say on what a model is validated at the end, with their values."""
    data = vars(DataConfig()) | (recipe.get("data") or {})
    for stage in (recipe.get("stages") or {}).values():
        stage_data = stage.get("data") or {}
        # A mixture replaces a source, and a source a mixture.
        if stage_data.get("mixture"):
            data["source"] = None
        elif stage_data.get("source"):
            data["mixture"] = None
        data |= stage_data

    names = ["validation_source", "validation_split", "name", "revision", "text_field"]
    if not data["validation_source"]:
        # A part or a share of the training text.
        names += ["source", "mixture", "train_split", "validation_share"]
    names += ["mask_share", "whole_words"]
    return {f"data.{name}": data[name] or None for name in names}


SAME_AMOUNT = 0.01
"""Validations that differ by more than this share read other texts."""


def same_amount(amounts: Sequence[float]) -> bool:
    """Whether validations read equally much; where an amount is not known, 0, they may have."""
    return not all(amounts) or max(amounts) - min(amounts) <= SAME_AMOUNT * max(amounts)


def _model_name(model: dict) -> str:
    """`gated_deltanet + nala`, `3 × gla, 1 × softmax`, or the name in `auto` or `init_from`; of a run `demo/final`."""
    if foreign := model.get("auto") or ("mixer" not in model and model.get("init_from")):
        path = Path(str(foreign))
        return "/".join(path.parts[-2:]) if path.name.startswith("final") else path.name
    mixer = model.get("mixer")
    if mixer is None:
        from nalanda.model.configuration import NalandaConfig  # takes seconds: it imports torch

        mixer = NalandaConfig().mixer
    return " + ".join(filter(None, [layers(mixer), model.get("feature_map")]))


def _is_alive(folder: Path, facts: dict, changed: float) -> bool:
    """Whether a "running" process exists; on another machine, whether the run has changed recently."""
    pid, host = facts.get("pid"), facts.get("host")
    if pid and host == platform.node():
        try:
            # Signal 0 does nothing but ask whether the process exists.
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process
            pass
        return _is_locked(folder / ".lock")  # another process may have got the number since
    return time.time() - changed < SILENT


def _is_locked(file: Path) -> bool:
    """Whether a process holds the lock; True where that cannot be told."""
    if not file.exists():
        return True
    try:
        with alone(file, "a run holds it") as has_locks:
            return not has_locks
    except InputError:
        return True


def _format_time(changed: float) -> str:
    """`14:05` today, `03-28 14:05` this year, otherwise `2024-03-28`."""
    if not changed:
        return "–"
    then, now = datetime.fromtimestamp(changed), datetime.now()
    if then.year != now.year:
        return f"{then:%Y-%m-%d}"
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%m-%d %H:%M}"
