"""Tables and figures of what `recall` found."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from nalanda_eval.report import markdown_table
from rich import box
from rich.console import Console
from rich.table import Table

from nalanda.common.text import size
from nalanda.report.figures import GREY, drawing, files, in_panels, log_axis
from nalanda_lab.synthetic import Task


def tables(
    rows: list[dict], tasks: dict[str, Task]
) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, cells) for each task."""
    found = []
    for name in dict.fromkeys(row["task"] for row in rows):
        task, mine = tasks[name], [row for row in rows if row["task"] == name]

        def value(mean: float, spread: float = 0.0, error: bool = task.error) -> str:
            scale, form = (1, ".3f") if error else (100, ".1f")
            return f"{scale * mean:{form}}" + (f" ± {scale * spread:{form}}" if spread else "")

        what = (
            "relative error; predicting 0 has 1"
            if task.error
            else f"accuracy, %; chance {value(fmean(chance_by_case(task, mine)))}, the best constant answer"
        )
        title = f"{name}: {what}; by {task.axis}"
        cases = [case_name(case) for case in task.cases]
        header = ["model", "equal", *cases, "mean", "lr", "parameters", "state", "MFLOPs"]
        lines = [
            [
                row["model"],
                row["match"],
                *itertools.starmap(value, zip(row["scores"], row["spreads"], strict=True)),
                value(row["score"], row["spread"]),
                f"{row['lr']:g}",
                f"{row['parameters']:,}",
                size(row["state_bytes"]) + (", grows" if row["state_grows"] else ""),
                f"{row['flops_per_token'] / 1e6:.3f}",
            ]
            for row in mine
        ]
        if reference := mine[0].get("reference"):
            blank = ["–"] * 4
            lines.append(
                [
                    "least squares",
                    mine[-1]["match"],
                    *map(value, reference),
                    value(fmean(reference)),
                    *blank,
                ]
            )
        found.append((title, header, lines))
    return found


def chance_by_case(task: Task, rows: list[dict]) -> list[float]:
    """By case the score of the best constant answer to the test rows; of guessing, in older records."""
    return next((row["chance"] for row in rows if "chance" in row), [task.chance] * len(task.cases))


def case_name(case: Any) -> str:
    return "–".join(map(str, case)) if isinstance(case, (tuple, list)) else f"{case:g}"


def recall_markdown(rows: list[dict], tasks: dict[str, Task], notes: list[str]) -> str:
    """The tables in Markdown."""
    blocks = [
        f"## {title}\n\n{markdown_table(header, lines)}"
        for title, header, lines in tables(rows, tasks)
    ]
    return "\n\n".join(["# Recall", *blocks, *notes]) + "\n"


def print_recall(
    rows: list[dict], tasks: dict[str, Task], notes: list[str], console: Console
) -> None:
    """Prints the tables, one for each way of matching, without learning rates."""
    for title, header, lines in tables(rows, tasks):
        console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
        shown = [i for i, head in enumerate(header) if head not in ("equal", "lr")]
        for match, group in itertools.groupby(lines, lambda line: line[1]):
            if match:
                console.print(f"equal {match}", style="dim", highlight=False)
            table = Table(
                box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1)
            )
            for i in shown:
                narrow = i > 0 and not any("±" in line[i] for line in lines)
                table.add_column(
                    header[i], justify="right" if i else "left", no_wrap=narrow, overflow="fold"
                )
            for line in group:
                table.add_row(*(line[i] for i in shown))
            console.print(table, markup=False)
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


ROWS = 4
"""Rows of panels of a figure; what is left is drawn in another."""


def draw_recall(rows: list[dict], tasks: dict[str, Task], directory: Path) -> list[Path]:
    """Draws each task's score by case, a panel for each way of matching, and its mean score by state size.

    The second figure is drawn only if states were matched. Of many models, each mixer has panels of its own.
    """
    names = list(dict.fromkeys(row["model"] for row in rows))
    softmax = next((name for name in names if name.startswith("softmax")), None)
    groups, looks = in_panels(names, softmax, lambda name: name.partition(" + ")[0])
    seeds = rows[0]["seeds"]
    over = f"over n = {seeds} seeds" if seeds > 1 else "of n = 1 seed, so without bars"
    bars = "; bars: ± 1 standard deviation" if seeds > 1 else ""
    written = []

    def scaled(task: Task, values: Iterable[float]) -> list[float]:
        return [max(x, 1e-4) if task.error else 100 * x for x in values]

    def finish(axes: Any, task: Task, places: Iterable[float], chance: Iterable[float]) -> None:
        label = "predicting 0" if task.error else "chance"
        axes.plot(places, scaled(task, chance), color=GREY, linestyle=":", linewidth=1, label=label)
        if task.error:
            log_axis(axes.yaxis)
            axes.set(ylabel="relative error (ratio)")
        else:
            axes.set(ylabel="accuracy (%)", ylim=(0, 102))

    for task in (tasks[name] for name in dict.fromkeys(row["task"] for row in rows)):
        mine = [row for row in rows if row["task"] == task.name]
        matches = list(dict.fromkeys(row["match"] for row in mine))
        best = (min if task.error else max)(mine, key=lambda row: row["score"])
        what, score = (
            ("error", f"{best['score']:.3f}")
            if task.error
            else ("accuracy", f"{100 * best['score']:.0f} %")
        )
        matched = [row for row in mine if row["match"].startswith("state")]
        chance = chance_by_case(task, mine)
        title = f"{task.name}: {'lowest' if task.error else 'highest'} mean {what} {score}, {best['model']}"
        present = [
            (kind, group) for kind, group in groups if any(row["model"] in group for row in mine)
        ]
        axis = task.axis if "(" in task.axis else f"{task.axis} (number)"
        for page in range(0, len(present), ROWS):
            few = present[page : page + ROWS]
            number = f"_{page // ROWS + 1}" if page else ""
            file = directory / f"{task.name}_cases{number}"
            written += files(file)
            shape = {
                "panels": len(few) * len(matches),
                "columns": len(matches),
                "sharey": True,
                "height": 2.2,
            }
            with drawing(file, title, f"Points: means {over}{bars}.", **shape) as panels:
                places = range(len(task.cases))  # evenly spaced: cases are doubling sizes or bands
                for a, ((kind, group), match) in zip(
                    panels, itertools.product(few, matches), strict=True
                ):
                    for row in (
                        row for row in mine if row["match"] == match and row["model"] in group
                    ):
                        y, bar = (scaled(task, row[part]) for part in ("scores", "spreads"))
                        a.errorbar(
                            places, y, bar, clip_on=False, **looks[row["model"]], label=row["model"]
                        )
                    if reference := mine[0].get("reference"):
                        a.plot(
                            places,
                            scaled(task, reference),
                            color=GREY,
                            linestyle="--",
                            label="least squares",
                        )
                    a.set_title(f"{kind}, equal {match}".removeprefix(", "))
                    a.set_xticks(places, map(case_name, task.cases))
                    a.set_xlabel(axis)
                    finish(a, task, places, chance)
            if not matched:
                continue
            file = directory / f"{task.name}_state{number}"
            written += files(file)
            caption = f"Points: means {over} and the cases{bars}. Hollow: a state that grows, at its longest."
            with drawing(file, title, caption, len(few), height=2.4, sharey=True) as panels:
                for a, (kind, group) in zip(panels, few, strict=True):
                    for name in group:
                        line = {row["state_bytes"]: row for row in matched if row["model"] == name}
                        if not line:
                            continue
                        x, style = sorted(line), looks[name]
                        y, bar = (
                            scaled(task, [line[at][part] for at in x])
                            for part in ("score", "spread")
                        )
                        if any(row["state_grows"] for row in line.values()):
                            style = style | {
                                "linestyle": "",
                                "marker": style["marker"] or "o",
                                "mfc": "white",
                            }
                        a.errorbar(x, y, bar, clip_on=False, **style, label=name)
                    a.set(title=kind, xlabel="state of a sequence (bytes, fp32)")
                    a.margins(x=0.1)
                    finish(a, task, a.get_xlim(), [fmean(chance)] * 2)
                    log_axis(
                        a.xaxis, [2**k for k in range(50)], lambda n: size(n).replace(".0 ", " ")
                    )
    return written
