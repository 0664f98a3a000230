"""Plots loss curves, and holds the palette and style of all pictures."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nalanda.common.errors import InputError, output_file
from nalanda.config.load import differences
from nalanda.report.runs import read_lines, read_recipe

# Okabe and Ito's palette, for colour-blind readers; lines and markers differ too, for prints in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)))
MARKERS = "os^DvPX"
GREY = "#666666"
STYLE = {
    "font.size": 10, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.fontsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e5e5e5", "grid.linewidth": 0.6, "lines.linewidth": 1.6, "lines.markersize": 4.5,
    "legend.frameon": False, "pdf.fonttype": 42, "savefig.dpi": 200,
}  # fmt: skip

X = Literal["tokens", "steps", "hours"]
Point = tuple[float, float, float, float]
"""(step, tokens, hours of training, loss)"""


@dataclass
class Curve:
    """A run's losses."""

    name: str
    config: dict
    train: list[Point]
    validation: list[Point]
    events: list[tuple[int, str]]
    """[(step, kind)]"""
    bits_per_byte: float | None = None
    """Of the last validation."""


def curve(folder: str | Path) -> Curve:
    """The losses of the run in `folder`. Raises InputError if it is not a run or has no training loss yet."""
    folder = Path(folder)
    file = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory; name the folder of a run")
    try:
        lines = list(read_lines(folder))
        config = read_recipe(folder) if (folder / "config.yaml").is_file() else {}
        train, validation, events = [], [], []
        hours, before, bits = 0.0, 0, None
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
                bits = line.get("val_bpb")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: unreadable: {str(error).strip().splitlines()[0]}") from None
    if not train:
        raise InputError(f"{file}: no training loss to draw yet")
    return Curve(folder.resolve().name, config, train, validation, events, bits)


def labels(curves: Sequence[Curve]) -> list[str]:
    """A legend entry for each run: the settings in which the runs differ, otherwise the folder's name."""
    found: dict[str, None] = {}
    for other in curves[1:]:
        found |= dict.fromkeys(differences(curves[0].config, other.config))
    # Left out: sections that change no curve, and keys that an older recipe lacks because they are newer. A
    # recipe may leave out keys of the model.
    keys = [
        key
        for section in ("model", "optim", "schedule", "train", "data", "tokenizer", "seed")
        for key in found
        if key.split(".")[0] == section and (section == "model" or all(_has(c.config, key) for c in curves))
    ]
    # Models of different kinds differ in all keys: only the first four fit into a legend.
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
    """Draws the losses of runs into one picture and returns its path, `png`.

    Training losses are lines, smoothed over the raw values. Validation losses are dots. Skipped steps and
    rollbacks are marked.

    x: tokens, steps, or hours of training (without validation and saving).

    Raises:
        InputError: no run is named, or one has nothing to draw.
    """
    from matplotlib import rc_context, ticker
    from matplotlib.figure import Figure

    curves = [curve(folder) for folder in folders]
    if not curves:
        raise InputError("name at least one run to draw")
    png = output_file(png, "--output")
    alone, axis = len(curves) == 1, {"steps": 0, "tokens": 1, "hours": 2}[x]
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        marked = set()
        for i, (c, label) in enumerate(zip(curves, labels(curves), strict=True)):
            look: dict[str, Any] = {"color": COLOURS[i % 7], "linestyle": LINES[i // 7 % 7]}
            xs, losses = [point[axis] for point in c.train], [point[3] for point in c.train]
            drawn = smoothed(losses) if smooth else losses
            if smooth:
                axes.plot(xs, losses, color=look["color"], alpha=0.35 if alone else 0.18, linewidth=0.8)
            axes.plot(xs, drawn, **look, label="training" if alone else label)
            if c.validation:
                vx, vy = [point[axis] for point in c.validation], [point[3] for point in c.validation]
                bits = f", {c.bits_per_byte:.3f} bits per byte" if c.bits_per_byte is not None else ""
                end = f"validation, final {vy[-1]:.3f} (perplexity {math.exp(min(vy[-1], 700)):.4g}{bits})"
                dots: dict[str, Any] = {"color": COLOURS[1], "label": end, "linewidth": 1.2}
                if not alone:
                    dots = {"linestyle": "", "markeredgecolor": "white", "color": look["color"]}
                axes.plot(vx, vy, marker="o", zorder=3, **dots)
            steps = [point[0] for point in c.train]
            for step, kind in c.events:
                if kind in ("skipped", "rollback"):
                    place, height = _between(step, steps, xs), _between(step, steps, drawn)
                    mark = {"skipped": "x", "rollback": "v"}[kind]
                    edge = {"markeredgecolor": look["color"] if kind == "skipped" else "white"}
                    axes.plot([place], [height], mark, color=look["color"], markersize=9, zorder=4, **edge)
                    marked.add((kind, mark))
        if not alone and any(c.validation for c in curves):
            axes.plot([], [], "o", color=GREY, label="validation")
        for kind, mark in sorted(marked):
            label = "skipped step" if kind == "skipped" else kind
            axes.plot([], [], mark, color=GREY, markersize=7, label=label)

        losses = [point[3] for c in curves for point in c.train if math.isfinite(point[3])]
        # On a linear axis the initial fall from ln(vocabulary) would flatten the rest.
        if losses and max(losses) > 2 * min(losses) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        if x == "tokens":
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(_count))
        axes.set(xlabel="hours of training" if x == "hours" else x, ylabel="loss (nats per token)")
        axes.set(title=curves[0].name if alone else f"{len(curves)} runs")
        axes.set_xlim(left=0)
        axes.legend(loc="upper right", fontsize=9 if len(curves) < 6 else 7)
        figure.savefig(png)
    return png


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
    """`lr 0.003`, or only the value where that is a name: `gla`, `adamw`."""
    if isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False)
    text = f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)
    text = text if len(text) <= 24 else f"{text[:23]}…"
    return text if key in ("model.mixer", "optim.name", "schedule.name") else f"{name} {text}"


def _between(step: float, steps: Sequence[float], values: Sequence[float]) -> float:
    """`values` at `step`, interpolated linearly between `steps`."""
    import numpy as np

    return float(np.interp(step, steps, values))


def smoothed(values: Sequence[float], half: int | None = None) -> list[float]:
    """Means over `half` values to each side, by default a fortieth of the curve.

    Near the start the window shrinks on both sides, so that the initial fall is not drawn late; at the end it
    is cut off.
    """
    half, means = half or max(1, len(values) // 40), []
    for i in range(len(values)):
        window = values[i - min(half, i) : i + min(half, i) + 1]
        means.append(math.fsum(window) / len(window))
    return means


def _count(number: float, place: int | None = None) -> str:
    """A token count as `500 M` or `1.5 B`."""
    for unit in ("", " K", " M", " B"):
        if number < 1000:
            return f"{number:g}{unit}"
        number /= 1000
    return f"{number:g} T"
