"""Draws loss curves."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nalanda.common.errors import InputError, first_line, output_file
from nalanda.common.text import si
from nalanda.config.load import differences
from nalanda.data.records import field_of
from nalanda.report.figures import GREY, Look, drawing, files, in_panels, log_axis, look
from nalanda.report.runs import layers, run_recipe, same_amount, validated_of, validation_of
from nalanda.train.log import with_hours


class Point(NamedTuple):
    """A loss, and where in the training it was measured. `plot` takes an x axis by its name."""

    steps: int
    tokens: float
    hours: float
    loss: float


@dataclass
class Curve:
    """A run's losses."""

    name: str
    config: dict
    train: list[Point]
    validation: list[Point]
    events: list[tuple[int, str]]
    """[(step, kind)]"""
    stages: dict[str, int]
    """Steps before each stage, by its name."""
    last: dict[str, Any]
    """The line of the last validation in metrics.jsonl; {} without one."""

    @property
    def broken_at(self) -> int | None:
        """The first step of the training losses at the end that are not finite; None if the last one is."""
        backwards = reversed(self.train)
        end = list(itertools.takewhile(lambda point: not math.isfinite(point.loss), backwards))
        return end[-1].steps if end else None


def curve(folder: str | Path) -> Curve:
    """The losses of the run in `folder`. Raises InputError if it is not a run or has no training loss yet."""
    folder = Path(folder)
    file = folder / "metrics.jsonl"
    config = run_recipe(folder)
    try:
        train, validation, events = [], [], []
        stages: dict[str, int] = {}
        last: dict[str, Any] = {}
        for line, hours in with_hours(folder):
            # A line is an event, a training loss, or a validation.
            step = line["step"]
            if line.get("event") == "stage":
                stages[str(line["name"])] = step - 1
            elif "event" in line:
                events.append((step, str(line["event"])))
            elif "loss" in line:
                train.append(Point(step, line["tokens"], hours, float(line["loss"])))
            elif "val_loss" in line:
                validation.append(Point(step, line["tokens"], hours, float(line["val_loss"])))
                last = line
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: unreadable: {first_line(error)}") from None
    if not train:
        raise InputError(f"{file}: no training loss to draw yet")
    return Curve(folder.resolve().name, config, train, validation, events, stages, last)


SECTIONS = ("model", "optim", "schedule", "stages", "train", "data", "tokenizer")
"""Sections of a recipe that change a curve, besides the seed."""


def labels(curves: Sequence[Curve]) -> list[str]:
    """A name for each run: the settings in which the runs differ if these are few, otherwise the folder's."""
    differing: dict[str, None] = {}
    for other in curves[1:]:
        differing |= dict.fromkeys(differences(curves[0].config, other.config))
    if "model.feature_map" in differing:  # the name tells more than the options
        options = [key for key in differing if key.startswith("model.feature_map_options")]
        differing = {key: None for key in differing if key not in options}

    # Left out: sections that change no curve, and keys that an older recipe lacks because they are newer. A
    # recipe may leave out keys of the model.
    keys = [
        key
        for section in (*SECTIONS, "seed")
        for key in differing
        if key.split(".")[0] == section
        and (section == "model" or all(field_of(c.config, key, ...) is not ... for c in curves))
    ]
    folders = [c.name for c in curves]
    folders_differ = len(set(folders)) == len(folders)
    if len(keys) > 4 and folders_differ:  # models of different kinds differ in all keys
        return folders

    names = [key.rpartition(".")[2] for key in keys]
    texts = []
    for c in curves:
        values = [field_of(c.config, key) for key in keys]
        parts = [
            _setting(key, name if names.count(name) == 1 else key, value)
            for key, name, value in zip(keys, names, values, strict=True)
        ]
        texts.append(", ".join(parts[:4]) + (", …" if len(parts) > 4 else ""))
    if not keys or len(set(texts)) < len(texts):
        texts = [
            f"{name}: {text}" if text else name for name, text in zip(folders, texts, strict=True)
        ]
    return texts


def plot(
    folders: Sequence[str | Path], png: str | Path | None = None, *, x: str = "tokens"
) -> Path:
    """Draws the losses of runs into a figure and its PDF, and returns the path of the PNG.

    Training losses are lines, running means over the raw values. Validation losses are markers. Skips and
    rollbacks are marked.

    png: by default loss.png in the run, or in the current folder for several.
    x: tokens, steps, or hours of training (without validation and saving).

    Raises:
        InputError: no run is named, or one has nothing to draw; or `x` is none of these.
    """
    if x not in ("tokens", "steps", "hours"):
        raise InputError(f"--x {x}: unknown; choose tokens, steps or hours")
    curves = [curve(folder) for folder in folders]
    if not curves:
        raise InputError("name at least one run to draw")
    inside_run = Path(folders[0], "loss.png") if len(curves) == 1 else "loss.png"
    png = output_file(png or inside_run, "--output")
    names = labels(curves)
    groups, looks = in_panels(range(len(curves)))
    title, caption = _title(curves), _caption(curves, names)
    height = 2.8 if len(groups) == 1 else 2.2

    with drawing(png, title, caption, len(groups), height=height, sharey=True) as panels:
        for axes, members in zip(panels, groups, strict=True):
            for i in members:
                name = names[i] if len(curves) > 1 else None
                _draw_run(axes, curves[i], looks[i], name, x)

        # On a linear axis the initial fall from ln(vocabulary) would flatten the rest.
        losses = [p.loss for c in curves for p in c.train if math.isfinite(p.loss)]
        steep = losses and max(losses) > 2 * min(losses) > 0
        for axes in panels:
            if steep:
                log_axis(axes.yaxis)
            axes.set(xlabel=f"training ({x})", xlim=(0, None))
            axes.set_ylabel("loss (nats a token)")
            if x == "tokens":
                axes.xaxis.set_major_formatter(lambda number, _: si(number))
    return files(png)[0]


def _draw_run(axes: Any, run: Curve, style: Look, name: str | None, x: str) -> None:
    """Draws a run's losses and events. name: None for the only run, whose lines are called by their kind."""
    xs, raw = [getattr(point, x) for point in run.train], [point.loss for point in run.train]
    line = style | {"marker": "" if len(xs) > 1 else "."}  # a line of one point is invisible
    drawn = smoothed(raw)
    alpha = 0.35 if name is None else 0.18
    axes.plot(xs, raw, color=line["color"], alpha=alpha, linewidth=0.6)
    (means,) = axes.plot(xs, drawn, **line, label="training" if name is None else name)

    # A name stands at a point: of a validation that is not finite there is none.
    if validation := [point for point in run.validation if math.isfinite(point.loss)]:
        dots = look(1) | {"label": "validation"}
        if name is not None:
            # The run's name stands at the loss that the title counts.
            means.set_label("_training")
            dots = style | {"linestyle": "", "marker": style["marker"] or "o", "label": name}
            dots["markeredgecolor"] = "white"
        ends = [getattr(point, x) for point in validation]
        axes.plot(ends, [point.loss for point in validation], **dots, zorder=3)

    # Events stand on the curve, between the steps that were logged.
    steps = [point.steps for point in run.train]
    for step, kind in run.events:
        if kind in MARKS:
            at, level = np.interp(step, steps, xs), np.interp(step, steps, drawn)
            axes.plot([at], [level], MARKS[kind], color=line["color"], markersize=7, zorder=4)

    for stage, step in run.stages.items():
        at = np.interp(step, steps, xs)
        axes.axvline(at, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
        # Runs that share a border share its name.
        if (at, stage) not in [(text.xy[0], text.get_text()) for text in axes.texts]:
            anchor = {
                "xy": (at, 1),
                "xycoords": ("data", "axes fraction"),
                "textcoords": "offset points",
            }
            axes.annotate(
                stage, xytext=(2, -2), rotation=90, va="top", size=8, color=GREY, **anchor
            )


MARKS = {"skipped": "x", "rollback": "v"}


def _title(curves: Sequence[Curve]) -> str:
    """The last validation loss, or the span of several that compare; before all, that a run is broken."""
    if broken := [c for c in curves if c.broken_at is not None]:
        if len(curves) == 1:
            return f"{broken[0].name}: no finite training loss from step {broken[0].broken_at} on"
        return f"Training loss of {len(curves)} runs, of which {len(broken)} ended without a finite one"
    ends = [c.validation[-1].loss for c in curves if c.validation]
    ends = [loss for loss in ends if math.isfinite(loss)]
    # A run without a finite validation loss: no lowest one can be named.
    if len(ends) < len(curves):
        return f"Training loss of {curves[0].name if len(curves) == 1 else f'{len(curves)} runs'}"
    # Losses a token compare under one tokenizer alone, bits a byte under any.
    bits = [c.last["val_bpb"] for c in curves if "val_bpb" in c.last]
    tokenizers_differ = _differ(curves, _tokenizer)
    if not _validated_alike(curves) or (tokenizers_differ and len(bits) < len(curves)):
        return f"Validation loss of {len(curves)} runs"
    if _lengths_differ(curves):
        return f"Validation loss of {len(curves)} runs of different length"

    if len(curves) > 1:
        # No run is called the best: it may be by its seed.
        losses, unit = (bits, "bits a byte") if tokenizers_differ else (ends, "nats a token")
        span = f"{min(losses):.3f} to {max(losses):.3f} {unit}"
        return f"Last validation losses of {len(curves)} runs, {count_seeds([c.config for c in curves])}: {span}"

    figures = [f"perplexity {math.exp(min(ends[0], 700)):.4g}"]
    figures += [f"{figure:.3f} bits a byte" for figure in bits]
    return f"{curves[0].name}: validation loss {ends[0]:.3f} ({', '.join(figures)})"


def count_seeds(configs: Sequence[dict]) -> str:
    """The seeds of each setting: `one seed each`, `1 to 3 seeds each`, or of a lone setting `3 seeds`.

    configs: recipes, whose values may stand by `key.key`.
    """
    seeds: dict[str, set[Any]] = {}
    for config in configs:
        of_curve = {key: each for key, each in config.items() if key.split(".")[0] in SECTIONS}
        setting = json.dumps(of_curve, sort_keys=True, default=str)
        seeds.setdefault(setting, set()).add(config.get("seed"))

    counts = [len(each) for each in seeds.values()]
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "one seed each"
    span = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"{span} seeds{' each' * (len(seeds) > 1)}"


def _caption(curves: Sequence[Curve], names: Sequence[str]) -> str:
    parts = ["Lines: running means of the training loss, over the logged values (pale)."]
    if any(c.validation for c in curves):
        parts.append(f"{'Markers' if len(curves) > 1 else 'Squares'}: validation.")
    if _differ(curves, _tokenizer):
        parts.append("The runs' tokenizers differ, so their losses a token do not compare.")
    if not _validated_alike(curves):
        parts.append("Their validation texts differ, so their validation losses do not compare.")
    parts.append(_compared(curves, names))
    # The marks of `_draw_run`.
    kinds = {kind for c in curves for _, kind in c.events}
    if "skipped" in kinds:
        parts.append("×: skipped step.")
    if "rollback" in kinds:
        parts.append("▼: rollback.")
    if any(c.stages for c in curves):
        parts.append("Dotted: beginnings of stages.")
    broken = [
        f"{name} from step {c.broken_at}"
        for c, name in zip(curves, names, strict=True)
        if c.broken_at
    ]
    if broken:
        parts.append(f"Without a finite training loss: {', '.join(broken)} on.")
    seeds = sorted({str(c.config.get("seed", "unknown")) for c in curves})
    count = f"n = {len(curves)} run{'s' * (len(curves) > 1)}"
    return " ".join(
        [*filter(None, parts), f"{count}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}."]
    )


def _lengths_differ(curves: Sequence[Curve]) -> bool:
    """Whether the last validations are after different numbers of tokens, by more than 1 %."""
    ends = [c.validation[-1].tokens for c in curves]
    return max(ends) > 1.01 * min(ends)


def _compared(curves: Sequence[Curve], names: Sequence[str]) -> str:
    """The tokens at which validation losses of several runs compare; of different lengths, the losses too."""
    if len(curves) == 1 or not all(c.validation for c in curves) or not _validated_alike(curves):
        return ""
    ends = [c.validation[-1].tokens for c in curves]
    common = min(ends)
    if not _lengths_differ(curves):
        return f"Compared: the last validation losses, after {si(common)} tokens."

    text = f"The runs differ in length, {si(common)} to {si(max(ends))} tokens, so none is named the best."
    if _differ(curves, _tokenizer) or any(c.validation[0].tokens > common for c in curves):
        return text
    losses = []
    for c, name in zip(curves, names, strict=True):
        tokens, values = [p.tokens for p in c.validation], [p.loss for p in c.validation]
        losses.append(f"{np.interp(common, tokens, values):.3f} ({name})")
    return f"{text} Nats a token after {si(common)}, the last that all have: {', '.join(losses)}."


TEXTS = (
    *("source", "mixture", "validation_source", "validation_share", "name", "revision"),
    *("text_field", "train_split", "validation_split"),
)
"""Keys of `data` that say which texts a run trains on, and so a trained tokenizer; and which it holds out."""


def _differ(curves: Sequence[Curve], key: Callable[[dict], Any]) -> bool:
    return len({json.dumps(key(c.config), sort_keys=True, default=str) for c in curves}) > 1


def _tokenizer(config: dict) -> list:
    texts = TEXTS if field_of(config, "tokenizer.train") else ()
    return [
        field_of(config, "tokenizer"),
        *(field_of(config, f"data.{key}") or None for key in texts),
    ]


def _validated_alike(curves: Sequence[Curve]) -> bool:
    """Whether the last validations are on the same text, and read equally much of it."""
    # Tokens hold more or less text by their tokenizer.
    unit = "bytes" if _differ(curves, _tokenizer) else "labels"
    amounts = [dict(validated_of(c.last)).get(unit, 0) for c in curves]
    return not _differ(curves, validation_of) and same_amount(amounts)


def _setting(key: str, name: str, value: Any) -> str:
    """`lr 0.003`, or only the value where that is a name: `gla`, `adamw`."""
    if key == "model.mixer" and value:
        value = layers(value)
    elif isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False)
    text = "–" if value is None else str(value)
    if isinstance(value, float):
        text = f"{value:g}"
    if len(text) > 24:
        text = f"{text[:23]}…"
    return text if key in ("model.mixer", "optim.name", "schedule.name") else f"{name} {text}"


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over a fortieth of the curve to each side.

    Near the start the window shrinks on both sides, so that the initial fall is not drawn late; at the end it
    is cut off.
    """
    half = max(1, len(values) // 40)
    at = np.arange(len(values))
    reach = np.minimum(half, at)
    start = at - reach
    count = np.minimum(2 * reach + 1, len(values) - start)

    # A window's sum is that of stretches of 1, 2, 4, … values. None is subtracted, so a NaN stays in its windows.
    stretches, totals, size = np.array(values, float), np.zeros(len(values)), 1
    with np.errstate(invalid="ignore", over="ignore"):
        while size <= 2 * half + 1:
            has = count & size > 0
            totals[has] += stretches[start[has]]
            start[has] += size
            stretches = stretches[:-size] + stretches[size:]
            size *= 2
        return (totals / count).tolist()
