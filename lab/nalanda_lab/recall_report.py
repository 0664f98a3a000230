"""Tables and figures of the results of `recall`."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from nalanda.common.text import markdown_table, size
from nalanda.report.figures import (
    GREY,
    MOST,
    Look,
    beside_reference,
    drawing,
    files,
    in_panels,
    log_axis,
)
from nalanda_lab.synthetic import Task


def recall_markdown(rows: list[dict], tasks: dict[str, Task], notes: list[str]) -> str:
    """A table for each task, in Markdown."""
    blocks = ["# Recall"]
    for name in dict.fromkeys(row["task"] for row in rows):
        task, of_task = tasks[name], [row for row in rows if row["task"] == name]
        chance = f"chance {_percent(fmean(of_task[0]['chance']))}, the best constant answer"
        cases = map(case_name, task.cases)
        header = ["model", "equal", *cases, "mean", "lr", "parameters", "state", "MFLOPs"]
        blocks.append(f"## {name}: accuracy, %; {chance}; by {task.axis}")
        blocks.append(markdown_table(header, [_line(row) for row in of_task], 2))
    return "\n\n".join([*blocks, *notes])


def _line(row: dict) -> list[str]:
    """The cells of a model."""
    cases = zip(row["scores"], row["spreads"], strict=True)
    return [
        row["model"],
        row["match"],
        *(_percent(score, spread) for score, spread in cases),
        _percent(row["score"], row["spread"]),
        f"{row['lr']:g}",
        f"{row['parameters']:,}",
        size(row["state_bytes"]) + (", grows" if row["state_grows"] else ""),
        f"{row['flops_per_token'] / 1e6:.3f}",
    ]


def _percent(mean: float, spread: float = 0.0) -> str:
    """An accuracy with its deviation."""
    deviation = f" ± {100 * spread:.1f}" if spread else ""
    return f"{100 * mean:.1f}{deviation}"


def case_name(case: Any) -> str:
    return "–".join(map(str, case)) if isinstance(case, (tuple, list)) else f"{case:g}"


ROWS = 4
"""Rows of panels of a figure; what is left is drawn in another."""


def percents(shares: Iterable[float]) -> list[float]:
    return [100 * share for share in shares]


class _Figures:
    """The figures of one task."""

    def __init__(self, task: Task, rows: list[dict], looks: dict[str, dict], directory: Path):
        """rows: of this task. looks: the style of each model's line."""
        self.task, self.rows, self.looks, self.directory = task, rows, looks, directory
        seeds = rows[0]["seeds"]
        self.over = f"over n = {seeds} seeds" if seeds > 1 else "of n = 1 seed, so without bars"
        self.bars = "; bars: ± 1 standard deviation" if seeds > 1 else ""
        self.chance = rows[0]["chance"]
        best = max(rows, key=lambda row: row["score"])
        found = f"highest mean accuracy {100 * best['score']:.0f} %"
        self.title = f"{task.name}: {found}, {best['model']}"

    def finish(self, axes: Any, places: Iterable[float], chance: Iterable[float]) -> None:
        """Draws chance, and labels the axis of the scores."""
        style = {"color": GREY, "linestyle": ":", "linewidth": 1}
        axes.plot(places, percents(chance), label="chance", **style)
        axes.set(ylabel="accuracy (%)", ylim=(0, 102))

    def draw_cases(self, groups: list[tuple[str, list[str]]], suffix: str) -> list[Path]:
        """Scores by case, a panel for each (kind, models) and way of matching."""
        matches = list(dict.fromkeys(row["match"] for row in self.rows))
        file = self.directory / f"{self.task.name}_cases{suffix}"
        caption = f"Points: means {self.over}{self.bars}."
        count, columns = len(groups) * len(matches), len(matches)
        with drawing(
            file, self.title, caption, count, columns=columns, sharey=True, height=2.2
        ) as panels:
            pairs = itertools.product(groups, matches)
            for axes, ((kind, models), match) in zip(panels, pairs, strict=True):
                axes.set_title(f"{kind}, equal {match}".removeprefix(", "))
                self._draw_panel(axes, models, match)
        return files(file)

    def _draw_panel(self, axes: Any, models: list[str], match: str) -> None:
        places = range(len(self.task.cases))  # evenly spaced: cases are doubling sizes or bands
        for row in self.rows:
            if row["match"] == match and row["model"] in models:
                y, bar = percents(row["scores"]), percents(row["spreads"])
                look = self.looks[row["model"]]
                axes.errorbar(places, y, bar, clip_on=False, label=row["model"], **look)

        axis = self.task.axis if "(" in self.task.axis else f"{self.task.axis} (number)"
        axes.set_xticks(places, map(case_name, self.task.cases))
        axes.set_xlabel(axis)
        self.finish(axes, places, self.chance)

    def draw_states(self, groups: list[tuple[str, list[str]]], suffix: str) -> list[Path]:
        """Mean scores by the size of the state, a panel for each (kind, models)."""
        file = self.directory / f"{self.task.name}_state{suffix}"
        caption = (
            f"Points: means {self.over} and the cases{self.bars}. "
            "Hollow: a state that grows, at its longest."
        )
        with drawing(file, self.title, caption, len(groups), height=2.4, sharey=True) as panels:
            for axes, (kind, models) in zip(panels, groups, strict=True):
                for name in models:
                    self._draw_line(axes, name)
                axes.set(title=kind, xlabel="state of a sequence (bytes, fp32)")
                axes.margins(x=0.1)
                self.finish(axes, axes.get_xlim(), [fmean(self.chance)] * 2)
                powers = [2**k for k in range(50)]
                log_axis(axes.xaxis, powers, lambda n: size(n).replace(".0 ", " "))
        return files(file)

    def _draw_line(self, axes: Any, name: str) -> None:
        """A model's scores at each size of its state."""
        at_size = {
            row["state_bytes"]: row
            for row in self.rows
            if row["model"] == name and row["match"].startswith("state")
        }
        if not at_size:
            return
        sizes, look = sorted(at_size), self.looks[name]
        if any(row["state_grows"] for row in at_size.values()):
            look = look | {"linestyle": "", "marker": look["marker"] or "o", "mfc": "white"}
        y = percents(at_size[x]["score"] for x in sizes)
        bar = percents(at_size[x]["spread"] for x in sizes)
        axes.errorbar(sizes, y, bar, clip_on=False, label=name, **look)


def panels_by_mixer(names: list[str]) -> tuple[list[tuple[str, list[str]]], dict[str, Look]]:
    """Titles and models of panels, and how each model is drawn.

    Of many models, each mixer has panels of its own beside softmax, or else beside the first model.
    """
    if len(names) <= MOST:
        panels, looks = in_panels(names)
        return [("", models) for models in panels], looks
    reference = next((name for name in names if name.startswith("softmax")), names[0])
    mixers: dict[str, list[str]] = {}
    for name in names:
        if name != reference:
            mixers.setdefault(name.partition(" + ")[0], []).append(name)

    # Models that are alone in their mixer share the panels without a title.
    groups = {title: models for title, models in mixers.items() if len(models) > 1}
    if single := [models[0] for models in mixers.values() if len(models) == 1]:
        groups[""] = single

    titled, looks = [], {}
    for title, models in groups.items():
        panels, of_models = beside_reference(reference, models)
        titled += [(title, panel) for panel in panels]
        looks |= of_models
    return titled, looks


def draw_recall(rows: list[dict], tasks: dict[str, Task], directory: Path) -> list[Path]:
    """Draws each task's score by case, a panel for each way of matching, and its mean score by state size.

    The second figure is drawn only if states were matched. Of many models, each mixer has panels of its own.
    """
    names = list(dict.fromkeys(row["model"] for row in rows))
    groups, looks = panels_by_mixer(names)

    written: list[Path] = []
    for name in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == name]
        figures = _Figures(tasks[name], of_task, looks, directory)
        models = {row["model"] for row in of_task}
        present = [(kind, group) for kind, group in groups if models.intersection(group)]
        for first in range(0, len(present), ROWS):
            page = present[first : first + ROWS]
            suffix = f"_{first // ROWS + 1}" if first else ""
            written += figures.draw_cases(page, suffix)
            if any(row["match"].startswith("state") for row in of_task):
                written += figures.draw_states(page, suffix)
    return written
