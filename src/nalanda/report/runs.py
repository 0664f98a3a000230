"""What runs there are, and their loss curves in one picture."""

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from nalanda import NalandaConfig
from nalanda.common.errors import InputError, output_file
from nalanda.config.load import differences, read_yaml
from nalanda.train import log as metrics

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


def find(directory: str | Path) -> list[Path]:
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


def read(folder: Path, name: str | None = None) -> Run:
    """What `folder` tells of its run; one that cannot be read says so in `state` and `problem`."""
    files = [f for f in (folder / n for n in ("metrics.jsonl", "run.json", "config.yaml")) if f.is_file()]
    run = Run(name or str(folder), "unreadable", max((f.stat().st_mtime for f in files), default=0.0))
    try:
        config, facts = _config(folder), metrics.read_facts(folder)
        if not isinstance(facts, dict):
            raise ValueError("run.json holds no facts")
        lines = list(_lines(folder))
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
    named = [(folder, folder.relative_to(directory)) for folder in find(directory)]
    runs = [read(f, str(n) if n.name else directory.resolve().name) for f, n in named]
    return sorted(runs, key=lambda run: (-run.changed, run.name))


def show(runs: Sequence[Run], console: Console | None = None) -> None:
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
            _text(run.parameters, metrics._si),
            step,
            _text(run.loss, "{:.3f}".format),
            _text(run.val_ppl, "{:,.2f}".format),
            _text(run.tokens_per_second, metrics._si),
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


def to_json(runs: Sequence[Run]) -> str:
    return json.dumps([asdict(run) for run in runs], indent=1, ensure_ascii=False)


@dataclass
class Curve:
    """A run's losses. Each list of points is [(step, tokens, hours of training, loss)]."""

    name: str
    config: dict
    train: list[tuple[float, float, float, float]]
    validation: list[tuple[float, float, float, float]]
    events: list[tuple[int, str]]
    """[(step, kind)]"""


X = Literal["tokens", "steps", "hours"]
# Wong's palette (Nature Methods, 2011), which colour-blind readers tell apart, without its yellow.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
GREY, FAINT = "#718096", "#e2e8f0"


def curve(folder: str | Path) -> Curve:
    """Raises:
    InputError: the folder is no run, or has no training loss yet.
    """
    folder = Path(folder)
    file = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory; name the folder of a run")
    try:
        lines, config = list(_lines(folder)), _config(folder) if (folder / "config.yaml").is_file() else {}
        train, validation, events = [], [], []
        hours, before = 0.0, 0
        for line in lines:
            step = line["step"]
            if "event" in line:
                events.append((step, str(line["event"])))
            elif "loss" in line:
                if rate := line.get("tokens_per_second"):
                    hours += (line["tokens"] - before) / rate / 3600
                before = line["tokens"]
                train.append((step, line["tokens"], hours, float(line["loss"])))
            elif "val_loss" in line:
                validation.append((step, line["tokens"], hours, float(line["val_loss"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: unreadable: {str(error).strip().splitlines()[0]}") from None
    if not train:
        raise InputError(f"{file}: no training loss to draw yet")
    return Curve(folder.resolve().name, config, train, validation, events)


def labels(curves: Sequence[Curve]) -> list[str]:
    """What sets each run apart from the others: the settings in which they differ, else the folder's name."""
    found: dict[str, None] = {}
    for other in curves[1:]:
        found |= dict.fromkeys(differences(curves[0].config, other.config))
    # Saving and logging change no curve, and a key that only one has came with a later version, except for a
    # model's, whose recipe need not name all.
    keys = [
        key
        for section in ("model", "optim", "schedule", "train", "data", "tokenizer", "seed")
        for key in found
        if key.split(".")[0] == section and (section == "model" or all(_has(c.config, key) for c in curves))
    ]
    # A model of another kind differs in all its keys, and ten settings are no legend: the first few speak.
    names = [key.rpartition(".")[2] for key in keys]
    texts = []
    for c in curves:
        values = [_value(c.config, key) for key in keys]
        parts = [
            _setting(key, name if names.count(name) == 1 else key, value)
            for key, name, value in zip(keys, names, values, strict=True)
        ]
        texts.append(", ".join(parts[:4]) + (", …" if len(parts) > 4 else ""))
    if not keys or len(set(texts)) < len(texts):
        names = [c.name for c in curves]
        texts = [f"{name}: {text}" if text else name for name, text in zip(names, texts, strict=True)]
    return texts


def plot(folders: Sequence[str | Path], png: str | Path, *, x: X = "tokens", smooth: bool = True) -> Path:
    """Draws the runs' losses into one picture: training, smoothed over the raw line, and validation as dots;
    skipped steps and rollbacks are marked. Returns `png`.

    x: tokens, steps, or hours of training (neither validation nor saving).

    Raises:
        InputError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = [curve(folder) for folder in folders]
    if not curves:
        raise InputError("name at least one run to draw")
    png = output_file(png, "--output")
    alone, axis = len(curves) == 1, {"steps": 0, "tokens": 1, "hours": 2}[x]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    marked = set()
    for i, (c, label) in enumerate(zip(curves, labels(curves), strict=True)):
        colour, style = PALETTE[i % len(PALETTE)], ("-", "--", ":")[i // len(PALETTE) % 3]
        xs, losses = [point[axis] for point in c.train], [point[3] for point in c.train]
        drawn = smoothed(losses) if smooth else losses
        if smooth:
            axes.plot(xs, losses, color=colour, alpha=0.35 if alone else 0.18, linewidth=0.8)
        axes.plot(xs, drawn, style, color=colour, linewidth=1.8, label="training" if alone else label)
        if c.validation:
            vx, vy = [point[axis] for point in c.validation], [point[3] for point in c.validation]
            end = f"validation, in the end {vy[-1]:.3f} (perplexity {math.exp(min(vy[-1], 700)):.4g})"
            look: dict[str, Any] = {"linewidth": 1.2, "label": end, "color": PALETTE[1]}
            if not alone:
                look = {"linestyle": "", "markeredgecolor": "white", "color": colour}
            axes.plot(vx, vy, marker="o", markersize=4.5, zorder=3, **look)
        steps = [point[0] for point in c.train]
        for step, kind in c.events:
            if kind not in ("skipped", "rollback"):
                continue
            place, height = _between(step, steps, xs), _between(step, steps, drawn)
            mark = {"skipped": "x", "rollback": "v"}[kind]
            edge = {"markeredgecolor": colour if kind == "skipped" else "white", "markeredgewidth": 1.2}
            axes.plot([place], [height], mark, color=colour, markersize=9, zorder=4, **edge)
            marked.add((kind, mark))
    if not alone and any(c.validation for c in curves):
        axes.plot([], [], "o", color=GREY, markersize=4.5, label="validation")
    for kind, mark in sorted(marked):
        axes.plot([], [], mark, color=GREY, markersize=7, label={"skipped": "skipped step"}.get(kind, kind))

    losses = [point[3] for c in curves for point in c.train if math.isfinite(point[3])]
    # The first steps fall from ln(vocabulary) and would flatten all that follows on a linear axis.
    if losses and max(losses) > 2 * min(losses) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    if x == "tokens":
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_count))
    axes.set_xlim(left=0)
    axes.set_xlabel({"tokens": "tokens", "steps": "steps", "hours": "hours of training"}[x], color=GREY)
    axes.set_ylabel("loss, nats a token", color=GREY)
    title = curves[0].name if alone else f"{len(curves)} runs"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(True, which="major", color=FAINT, linewidth=0.8)
    axes.tick_params(colors=GREY, which="both", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#cbd5e0")
    axes.legend(frameon=False, loc="upper right", fontsize=10 if len(curves) < 6 else 8)
    figure.tight_layout()
    figure.savefig(png)
    plt.close(figure)
    return png


def _config(folder: Path) -> dict:
    try:
        config = read_yaml(folder / "config.yaml")
    except FileNotFoundError:
        raise ValueError("config.yaml is missing") from None
    except InputError:
        raise ValueError("config.yaml is not YAML") from None
    if not isinstance(config, dict):
        raise ValueError("config.yaml is no recipe")
    return config


def _lines(folder: Path) -> Iterator[dict]:
    file = folder / "metrics.jsonl"
    return metrics.read(file) if file.is_file() else iter(())


def _model(model: dict) -> str:
    """`gated_deltanet + nala`, `3 × gla, 1 × softmax`, or what `auto` and `init_from` name."""
    if foreign := model.get("auto") or ("mixer" not in model and model.get("init_from")):
        return Path(str(foreign)).name
    mixer = model.get("mixer", NalandaConfig().mixer)
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


def _value(config: dict, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None  # type: ignore[assignment]
    return config


def _has(config: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return False
        config = config[part]
    return True


def _setting(key: str, name: str, value: Any) -> str:
    """`lr 0.003`; names that speak for themselves are left out: `gla`, `nala`."""
    if isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False)
    text = f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)
    text = text if len(text) <= 24 else f"{text[:23]}…"
    return text if key in ("model.mixer", "optim.name", "schedule.name") else f"{name} {text}"


def _between(step: float, steps: Sequence[float], values: Sequence[float]) -> float:
    """`values` at `step`, on straight lines between `steps`."""
    import numpy as np

    return float(np.interp(step, steps, values))


def smoothed(values: Sequence[float], half: int | None = None) -> list[float]:
    """Means over `half` values to either side, by default a fortieth of the curve. At the beginning centred
    on fewer, so that the fall is not drawn late; at the end over those that there are."""
    half, means = half or max(1, len(values) // 40), []
    for i in range(len(values)):
        window = values[i - min(half, i) : i + min(half, i) + 1]
        means.append(math.fsum(window) / len(window))
    return means


def _count(number: float, place: int | None = None) -> str:
    """`500 M`, `1.5 B`, as token counts are spoken of."""
    for unit in ("", " K", " M", " B"):
        if number < 1000:
            return f"{number:g}{unit}"
        number /= 1000
    return f"{number:g} T"
