"""A run as its page shows it, read from the files in its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError, first_line
from nalanda.common.files import read_object
from nalanda.common.scores import Score, find_results, read_scores
from nalanda.report.figures import COLOURS
from nalanda.report.runs import RunSummary, read_run, run_recipe
from nalanda.train.log import read_facts, with_hours

DASHES = ("solid", "dashed", "dotted")
"""Names that Bokeh and CSS share: with the colours, 21 lines differ."""


def line_look(number: int) -> tuple[str, str]:
    """Colour and dash of a line of a page."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


@dataclass
class PageRun:
    """A run as its page shows it. Nested values of `config`, and `facts` of run.json, stand by `key.key`."""

    name: str
    folder: Path
    colour: str
    dash: str
    summary: RunSummary
    recipe: str
    config: dict[str, Any]
    facts: dict[str, Any]
    lines: list[dict]
    events: list[dict]
    hours: float
    """Hours of training, without validation and saving."""
    scores: list[Score]
    """Of the evaluations of `final`."""
    baselines: dict[str, dict[str, float]]
    """Metrics of simpler models on the same rows, by name."""
    samples: Sequence[tuple[str, str]] = ()
    cost: str | None = None
    """Of all hours of training, with its currency."""


def read_page_run(folder: Path, number: int) -> PageRun:
    """The run in `folder`, whose number chooses its look. Raises InputError if it is none."""
    config, recipe = run_recipe(folder), folder / "config.yaml"
    colour, dash = line_look(number)
    timed = [*with_hours(folder)]
    lines = [line for line, _ in timed]

    return PageRun(
        name=folder.resolve().name,
        folder=folder,
        colour=colour,
        dash=dash,
        summary=read_run(folder),
        recipe=recipe.read_text("utf-8", "replace") if recipe.is_file() else "",
        config=flatten(config),
        facts=flatten(read_facts(folder)),
        lines=[line for line in lines if "event" not in line],
        events=[line for line in lines if "event" in line],
        hours=timed[-1][1] if timed else 0.0,
        scores=read_run_scores(folder),
        baselines=read_baselines(folder),
    )


def read_run_scores(folder: Path) -> list[Score]:
    """The scores of the run's `final`. Its place decides, and its step where the results have one.

    Its weights are not read: that would take torch, and the time to load them.
    """
    final = folder.resolve() / "final"
    if not final.is_dir():
        return []
    step = read_facts(final).get("step")

    def is_of(record: dict[str, Any]) -> bool:
        # The run may have been moved since.
        recorded = Path(str(record.get("place", ""))).parts[-2:]
        return recorded == final.parts[-2:] and record.get("step", step) in (step, None)

    return read_scores(find_results(folder), is_of)


def read_baselines(folder: Path) -> dict[str, dict[str, float]]:
    """The contents of baselines.json, which the demo writes; {} without it."""
    file = folder / "baselines.json"
    baselines = read_object(file) if file.is_file() else {}
    try:
        return {
            name: {key: float(value) for key, value in values.items()}
            for name, values in baselines.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: unreadable: {first_line(error)}") from None


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Nested values by `key.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def last_value(run: PageRun, key: str) -> Any:
    """The newest value of a key of metrics.jsonl, or None."""
    return next((line[key] for line in reversed(run.lines) if key in line), None)
