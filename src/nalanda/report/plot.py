"""Loss curves in one picture, and the palette of all pictures."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nalanda.common.errors import InputError, output_file
from nalanda.config.load import differences
from nalanda.report.runs import read_lines, read_recipe


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
        lines, config = (
            list(read_lines(folder)),
            read_recipe(folder) if (folder / "config.yaml").is_file() else {},
        )
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
