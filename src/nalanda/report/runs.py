"""What runs there are, and their loss curves in one picture."""

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nalanda.common.errors import InputError
from nalanda.common.text import si
from nalanda.config.load import read_yaml
from nalanda.train.log import read_facts, read_metrics

SILENT = 3600.0
"""Seconds without a line of metrics after which a run on another machine is taken for dead."""


@dataclass
class Run:
    """A run as its folder tells it; None is what it does not tell."""

    name: str
    state: str
    """running, finished, interrupted, failed; stale: running, but its process is gone; empty; unreadable."""
    changed: float
    """Seconds since the epoch."""
    model: str = "–"
    problem: str | None = None
    parameters: int | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    val_ppl: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None


def find_runs(directory: str | Path) -> list[Path]:
    """The folders of runs at or below `directory`, those within a run left out. Raises `InputError`."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; runs stand in their recipes' output_dir")
    found = []
    for folder, below, files in os.walk(directory):
        if {"config.yaml", "run.json"} & set(files):
            found.append(Path(folder))
            below.clear()
        else:
            below[:] = sorted(name for name in below if not name.startswith("."))
    return found


def read_run(folder: Path, name: str | None = None) -> Run:
    """What `folder` tells of its run; one that cannot be read says so in `state` and `problem`."""
    files = [f for f in (folder / n for n in ("metrics.jsonl", "run.json", "config.yaml")) if f.is_file()]
    run = Run(name or str(folder), "unreadable", max((f.stat().st_mtime for f in files), default=0.0))
    try:
        config, facts = read_recipe(folder), read_facts(folder)
        if not isinstance(facts, dict):
            raise ValueError("run.json holds no facts")
        lines = list(read_lines(folder))
        losses = [line for line in lines if "loss" in line and "event" not in line]
        last = losses[-1] if losses else {}
        run.model = _model(config["model"])
        run.parameters, run.steps = facts.get("parameters"), config["train"]["steps"]
        run.loss, run.mfu = last.get("loss"), last.get("mfu")
        run.tokens_per_second = last.get("tokens_per_second")
        run.val_ppl = next((line["val_ppl"] for line in reversed(lines) if "val_ppl" in line), None)
        run.step = max([facts.get("step", 0), *(line["step"] for line in lines[-1:])])
        run.problem = facts.get("reason")
        run.state = facts.get("state", "empty")
        if run.state == "running" and not _alive(facts, run.changed):
            run.state = "stale"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        line = (str(error).strip().splitlines() or [""])[0]
        run.state = "unreadable"
        run.problem = f"no {line}" if isinstance(error, KeyError) else line or type(error).__name__
    return run


def overview(directory: str | Path) -> list[Run]:
    """Every run below `directory`, what changed last first. Raises `InputError`."""
    directory = Path(directory)
    named = [(folder, folder.relative_to(directory)) for folder in find_runs(directory)]
    runs = [read_run(f, str(n) if n.name else directory.resolve().name) for f, n in named]
    return sorted(runs, key=lambda run: (-run.changed, run.name))


def print_runs(runs: Sequence[Run], console: Console | None = None) -> None:
    """The runs as a table, and what is wrong with those where something is."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for heading in ("run", "state", "model"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "state")
    for heading in ("params", "step", "loss", "val ppl", "tok/s", "MFU", "changed"):
        table.add_column(heading, justify="right", no_wrap=True)
    colours = {"running": "green", "stale": "yellow", "failed": "red", "unreadable": "red"}
    for run in runs:
        step = None if run.step is None else f"{run.step:,}/{run.steps:,}" if run.steps else f"{run.step:,}"
        cells = (
            _text(run.parameters, si),
            step,
            _text(run.loss, "{:.3f}".format),
            _text(run.val_ppl, "{:,.2f}".format),
            _text(run.tokens_per_second, si),
            _text(run.mfu, "{:.0%}".format),
            _when(run.changed),
        )
        state = f"[{colours.get(run.state, 'default')}]{run.state}"
        table.add_row(
            _plain(run.name),
            state,
            _plain((run.model or "").replace(" + ", " +\n")),
            *(cell or "–" for cell in cells),
        )
    console.print(table)
    for run in runs:
        if run.problem:
            console.print(f"{run.name}: {run.problem}", markup=False, highlight=False, soft_wrap=True)


def runs_to_json(runs: Sequence[Run]) -> str:
    return json.dumps([asdict(run) for run in runs], indent=1, ensure_ascii=False)


def read_recipe(folder: Path) -> dict:
    try:
        config = read_yaml(folder / "config.yaml")
    except FileNotFoundError:
        raise ValueError("config.yaml is missing") from None
    except InputError:
        raise ValueError("config.yaml is not YAML") from None
    if not isinstance(config, dict):
        raise ValueError("config.yaml is no recipe")
    return config


def read_lines(folder: Path) -> Iterator[dict]:
    file = folder / "metrics.jsonl"
    return read_metrics(file) if file.is_file() else iter(())


def _model(model: dict) -> str:
    """`gated_deltanet + nala`, `3 × gla, 1 × softmax`, or what `auto` and `init_from` name."""
    if foreign := model.get("auto") or ("mixer" not in model and model.get("init_from")):
        return Path(str(foreign)).name
    mixer = model.get("mixer")
    if mixer is None:
        from nalanda.model.configuration import NalandaConfig  # takes seconds: it imports torch

        mixer = NalandaConfig().mixer
    names = [mixer] if isinstance(mixer, str) else list(mixer)
    counted = [f"{names.count(m)} × {m}" if len(names) > 1 else m for m in dict.fromkeys(names)]
    return " + ".join(filter(None, [", ".join(counted), model.get("feature_map")]))


def _alive(facts: dict, changed: float) -> bool:
    """Whether the process that says "running" does: asked of this machine, or judged by the file's age."""
    pid, host = facts.get("pid"), facts.get("host")
    if pid and host == platform.node():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's, but alive
            return True
        return True
    return time.time() - changed < SILENT


def _when(changed: float) -> str:
    """`14:05` today, `03-28 14:05` before, `2024-03-28` in another year."""
    if not changed:
        return "–"
    then, now = datetime.fromtimestamp(changed), datetime.now()
    if then.year != now.year:
        return f"{then:%Y-%m-%d}"
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%m-%d %H:%M}"


def _text(value: float | None, form: Any) -> str | None:
    return None if value is None else form(value)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
