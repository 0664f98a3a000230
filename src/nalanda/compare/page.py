"""Writes what a study says: on the terminal, as compare.json, as a table in Markdown, and as a page."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from nalanda.common.files import write_atomically
from nalanda.common.terminal import narrowed, stdout
from nalanda.common.text import duration, markdown_table, redact, si, size, without_infinities
from nalanda.common.versions import versions
from nalanda.compare.plan import StudyRun
from nalanda.compare.results import Result
from nalanda.compare.study import Study, study_text
from nalanda.compare.tasks import TaskScore
from nalanda.compare.verdict import LEVEL, StudyVerdict, write_interval
from nalanda.compare.widths import CLOSE, KEYS
from nalanda.report.figures import COLOURS
from nalanda.report.page import render
from nalanda.report.page_run import line_look
from nalanda.report.panels import INK, colour_panel, make_panel, show_values

HEADINGS = (
    *("arm", "rate", "seeds", "bits a byte", "nats a token", "perplexity", "sd"),
    *("parameters", "FLOPs a token", "state", "tokens", "time"),
)


@dataclass(frozen=True)
class Report:
    """All that a study's files say."""

    study: Study
    verdict: StudyVerdict
    runs: Sequence[StudyRun]
    results: Mapping[str, Result]
    figures: Mapping[str, Mapping[str, Any]]
    """Of each arm, its recipe's rate and the figures of its model (`nalanda info`)."""
    notes: Sequence[str]
    scores: Sequence[TaskScore] = ()
    samples: Sequence[tuple[str, str, str]] = ()
    """(arm, prompt, continuation)"""
    looks: Sequence[tuple[int, float]] = ()
    """Seeds and margin of each verdict that the study has had, this one included."""


def differs(value: float, reference: float | None) -> bool:
    """Whether a figure is more than 2 % from that of the first arm."""
    return bool(reference and value and abs(value / reference - 1) > CLOSE)


def arm_rows(report: Report) -> list[list[str]]:
    """A row of cells for each arm. A figure more than 2 % beyond that of the first arm is marked ≠."""
    verdict, figures = report.verdict, report.figures
    first = next(iter(verdict.arms))

    def model_figure(arm: str, key: str, write: Any, reference: str = first) -> str:
        value, other = (figures[each].get(KEYS[key]) for each in (arm, reference))
        if value is None:
            return "–"
        return write(value) + " ≠" * differs(value, other)

    rows = []
    for name, arm in verdict.arms.items():
        seeds = f"{arm.runs - len(arm.diverged)}"
        if arm.diverged:
            seeds += f" of {arm.runs}"

        # A state that grows has its size at one length, which no fixed one must equal.
        fixed = next((arm for arm in verdict.arms if not figures[arm].get("state_grows")), name)
        grows = bool(figures[name].get("state_grows"))
        state = model_figure(name, "state", size, name if grows else fixed) + ", grows" * grows
        rows.append(
            [
                name,
                f"{arm.rate or figures[name]['rate']:g}",
                seeds,
                "–" if arm.bits is None else f"{arm.bits:.4f}",
                f"{arm.loss:.4f}" if math.isfinite(arm.loss) else "–",
                f"{math.exp(min(arm.loss, 700)):.4g}" if math.isfinite(arm.loss) else "–",
                "–" if arm.spread is None else f"{arm.spread:.4f}",
                model_figure(name, "parameters", si),
                model_figure(name, "flops", si),
                state,
                si(arm.tokens) + " ≠" * differs(arm.tokens, verdict.arms[first].tokens),
                duration(arm.seconds) if math.isfinite(arm.seconds) else "–",
            ]
        )
    return rows


def score_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of the tasks: each arm's mean, and each pair's difference. Told ones are marked *."""
    pairs = [(gap.first, gap.second) for gap in (report.scores[0].gaps if report.scores else [])]
    headings = ["task", *report.verdict.arms, *(f"{a} − {b}" for a, b in pairs)]
    rows = []
    for score in report.scores:
        means = [
            f"{score.means[arm]:.4f}" if arm in score.means else "–" for arm in report.verdict.arms
        ]
        gaps = [
            write_interval(gap.mean, gap.low, gap.high, signed=True) + "*" * gap.told
            for gap in score.gaps
        ]
        rows.append([f"{score.task} {score.metric}", *means, *gaps])
    return headings, rows


def print_report(report: Report) -> None:
    """Prints the arms, the sentences and the notes."""
    console = stdout()
    optional = ("FLOPs a token", "perplexity", "tokens", "nats a token", "time", "state", "rate")
    console.print(narrowed(make_table(HEADINGS, arm_rows(report)), console, optional))
    for line in [*report.verdict.sentences, *report.notes]:
        console.print(line, soft_wrap=True)


def print_scores(report: Report) -> None:
    """Prints the tasks."""
    stdout().print(make_table(*score_rows(report)))


def make_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def as_markdown(report: Report) -> str:
    """The tables and the sentences, for a README."""
    parts = [markdown_table(HEADINGS, arm_rows(report))]
    if report.scores:
        parts.append(markdown_table(*score_rows(report)))
    parts.append("\n".join(f"- {line}" for line in [*report.verdict.sentences, *report.notes]))
    return "\n\n".join(parts) + "\n"


def as_json(report: Report) -> str:
    """All of the study: its text, each run's result, each arm's figures, each pair's difference."""
    verdict, results = report.verdict, report.results
    record = {
        "study": asdict(report.study),
        "unit": verdict.unit,
        "level": LEVEL,
        "margin": verdict.margin,
        "looks": list(report.looks),
        "arms": {
            name: {**asdict(arm), **{key: report.figures[name].get(KEYS[key]) for key in KEYS}}
            for name, arm in verdict.arms.items()
        },
        "pairs": [{**asdict(gap), "told": gap.told} for gap in verdict.gaps],
        "sentences": verdict.sentences,
        "notes": list(report.notes),
        "tasks": [asdict(score) for score in report.scores],
        "runs": {
            run.name: {"rate": run.rate, "trial": run.trial, **asdict(results[run.name])}
            for run in report.runs
        },
        "versions": versions(),
    }
    finite = redact_all(without_infinities(record, lambda number: None))
    return json.dumps(finite, indent=1, ensure_ascii=False) + "\n"


def redact_all(value: Any) -> Any:
    """`value` of JSON, without the passwords and query strings of the URLs in its texts."""
    if isinstance(value, dict):
        return {key: redact_all(each) for key, each in value.items()}
    if isinstance(value, list):
        return [redact_all(each) for each in value]
    return redact(value) if isinstance(value, str) else value


# ------------------------------ the page


def write_files(folder: Path, report: Report) -> list[Path]:
    """Writes compare.json, compare.md and compare.html, and returns their paths."""
    texts = {
        "compare.json": as_json(report),
        "compare.md": as_markdown(report),
        "compare.html": as_html(report),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text.encode("utf-8", "replace"))
    return [folder / name for name in texts]


def as_html(report: Report) -> str:
    study, verdict = report.study, report.verdict
    panels = {"curves": draw_curves(report.runs, report.results)}
    if verdict.gaps:
        panels["gaps"] = draw_gaps(verdict)
    intervals = [write_interval(gap.mean, gap.low, gap.high, signed=True) for gap in verdict.gaps]
    settings = [
        [name, redact(study.recipe_of(name)), redact(" ".join(words)) or "–"]
        for name, words in study.settings.items()
    ]
    lost = [run for run in report.runs if report.results[run.name].diverged]
    return render(
        "compare/page.html",
        panels,
        title=", ".join(study.arms),
        verdict=verdict,
        notes=report.notes,
        headings=HEADINGS,
        rows=arm_rows(report),
        gaps=list(zip(verdict.gaps, intervals, strict=True)),
        level=LEVEL,
        scores=score_rows(report) if report.scores else None,
        lost=[[run.name, redact(report.results[run.name].reason)] for run in lost],
        samples=report.samples,
        settings=settings,
        study=redact(study_text(study)),
    )


def draw_curves(runs: Sequence[StudyRun], results: Mapping[str, Result]) -> Any:
    """Validation losses of the arms: the mean over the seeds, and a band of one standard deviation."""
    panel = make_panel("tokens", "log")
    panel.height, panel.yaxis.axis_label = 420, "nats a token"
    panel.x_range.start = 0  # one validation alone would span two tokens
    for number, arm in enumerate(dict.fromkeys(run.arm for run in runs)):
        curves = [
            dict(results[run.name].curve)
            for run in runs
            if run.arm == arm and not run.trial and results[run.name].finished
        ]
        # Tokens at which every seed was validated.
        tokens = sorted(set.intersection(*map(set, curves))) if curves else []
        if not tokens:
            continue
        losses = np.array([[curve[t] for t in tokens] for curve in curves])  # [seeds, tokens]
        mean = losses.mean(0)
        spread = losses.std(0, ddof=1) if len(losses) > 1 else np.zeros_like(mean)

        colour, dash = line_look(number)
        panel.varea(tokens, mean - spread, mean + spread, color=colour, alpha=0.15)
        line = panel.line(
            tokens, mean, color=colour, line_dash=dash, line_width=2, legend_label=arm, name=arm
        )
        panel.scatter(tokens, mean, color=colour, size=5)
        show_values(panel, line, "y")
    panel.legend.background_fill_alpha, panel.legend.label_text_color = 0, INK
    return panel


def draw_gaps(verdict: StudyVerdict) -> Any:
    """The difference of each pair with its interval, beside the margin that matters."""
    from bokeh.models import BoxAnnotation, FactorRange, Range1d, Span, Whisker
    from bokeh.models import ColumnDataSource as Columns
    from bokeh.plotting import figure

    names = [f"{gap.first} − {gap.second}" for gap in verdict.gaps][::-1]
    values = verdict.gaps[::-1]
    # Whiskers do not count where a range is found by itself.
    ends = [0, -verdict.margin, verdict.margin]
    ends += [end for gap in values for end in (gap.low, gap.high, *gap.differences)]
    room = 0.05 * (max(ends) - min(ends))
    panel = figure(
        x_range=Range1d(start=min(ends) - room, end=max(ends) + room),
        y_range=FactorRange(factors=names),
        height=80 + 34 * len(names),
        sizing_mode="stretch_width",
        x_axis_label=f"difference in {verdict.unit}",
        toolbar_location=None,
    )
    colour_panel(panel)
    panel.ygrid.grid_line_color = None
    panel.add_layout(
        BoxAnnotation(
            left=-verdict.margin, right=verdict.margin, fill_color="#999999", fill_alpha=0.12
        )
    )
    panel.add_layout(Span(location=0, dimension="height", line_color=INK))

    colours = [COLOURS[1] if gap.told else COLOURS[0] for gap in values]
    source = Columns(
        {
            "name": names,
            "mean": [gap.mean for gap in values],
            "low": [gap.low for gap in values],
            "high": [gap.high for gap in values],
            "colour": colours,
        }
    )
    whisker = Whisker(base="name", lower="low", upper="high", source=source, dimension="width")
    whisker.line_color, whisker.line_width = "colour", 2
    panel.add_layout(whisker)
    panel.scatter("mean", "name", source=source, size=8, color="colour")
    for name, gap in zip(names, values, strict=True):
        panel.scatter(gap.differences, [name] * len(gap.differences), size=4, color=INK, alpha=0.6)
    return panel
