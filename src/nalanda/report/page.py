"""Writes a page about runs, one HTML file: curves, events, recipes, versions and samples."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError, output_file
from nalanda.common.text import redact
from nalanda.report.figures import COLOURS
from nalanda.report.plot import TEXTS, count_seeds, smoothed
from nalanda.report.runs import check_run_folder, read_recipe, read_run
from nalanda.train.log import read_facts, read_metrics

CURVES = {
    "loss": "Training loss, nats a token",
    "val_loss": "Validation loss, nats a token",
    "val_bpb": "Validation, bits a byte",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens a second",
    "data_seconds": "Wait for rows, seconds a step",
}
"""Title of each panel, by its key in metrics.jsonl."""

EVENTS = {
    "skipped": ("x", "×"),
    "rollback": ("inverted_triangle", "▼"),
    "loss scale": ("diamond", "◆"),
    "unsound": ("square", "■"),
    "slow rank": ("circle", "●"),
}
"""Events of the guards, and slow processes: the marker of Bokeh on the curves, and the sign in the list."""

DASHES = ("solid", "dashed", "dotted")
"""Names that Bokeh and CSS share: with the colours, 21 runs differ."""

Table = list[tuple[str, list[str]]]
"""Rows, as (name, a cell for each run)."""


@dataclass
class PageRun:
    """A run as its page shows it. Nested values of `config`, and `facts` of run.json, stand by `key.key`."""

    name: str
    colour: str
    dash: str
    summary: dict[str, Any]
    recipe: str
    config: dict[str, Any]
    facts: dict[str, Any]
    lines: list[dict]
    events: list[dict]
    samples: Sequence[tuple[str, str]]


def write_page(
    folders: Sequence[Path],
    output: str | Path | None = None,
    samples: Sequence[Sequence[tuple[str, str]]] = (),
) -> Path:
    """Writes the page of one or several runs, and returns its path.

    Args:
        output: the file; by default report.html in the run, or beside the first of several.
        samples: of each run, prompts and their continuations.

    Raises:
        InputError: a folder is no run, or has unreadable files.
    """
    # Paths tell folders of one name apart.
    runs = [read_page_run(folder, number) for number, folder in enumerate(folders)]
    if len({run.name for run in runs}) < len(runs):
        for run, folder in zip(runs, folders, strict=True):
            run.name = str(folder)
    for run, texts in zip(runs, samples, strict=False):
        run.samples = texts
    # A run's own page stays when runs are compared.
    folder = folders[0] if len(folders) == 1 else folders[0].parent
    file = output_file(output or folder / "report.html", "--output")

    page = render(
        "page.html",
        draw_panels(runs),
        runs=runs,
        seeds=count_seeds([run.config for run in runs]) if len(runs) > 1 else "",
        curves=CURVES,
        signs={kind: sign for kind, (_, sign) in EVENTS.items()},
        tables=make_tables(runs),
        redact=redact,
    )
    file.write_text(page, encoding="utf-8", errors="replace")
    return file


def render(template: str, figures: dict[str, Any], **values: Any) -> str:
    """A page of `template` with Bokeh's `figures` by name, in one file that needs no network.

    template: a file beside this one, or in a folder of this package, whose blocks fill base.html. It gets the
        figures as `panels`.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    # Bokeh's core alone, without widgets and tables, is a third of its scripts.
    library = Resources(mode="inline", components=["bokeh"], log_level="error").render_js()
    script, panels = components(figures) if figures else ("", {})

    # Names, recipes and samples are foreign text, which the template escapes. What Bokeh writes is HTML.
    here = Path(__file__).parent
    loader = FileSystemLoader([here, here.parent], encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    return environment.get_template(template).render(
        panels={key: Markup(panel) for key, panel in panels.items()},
        scripts=Markup(library + script),
        **values,
    )


def read_page_run(folder: Path, number: int) -> PageRun:
    """The run in `folder`, whose number chooses its look. Raises InputError if it is none."""
    check_run_folder(folder)
    recipe = folder / "config.yaml"
    try:
        config = read_recipe(folder) if recipe.is_file() else {}
    except ValueError as error:
        raise InputError(f"{folder}: unreadable: {error}") from None
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "step" in line]

    return PageRun(
        name=folder.resolve().name,
        colour=COLOURS[number % len(COLOURS)],
        dash=DASHES[number // len(COLOURS) % len(DASHES)],
        summary=vars(read_run(folder)),
        recipe=recipe.read_text("utf-8", "replace") if recipe.is_file() else "",
        config=flatten(config),
        facts=flatten(read_facts(folder)),
        lines=[line for line in lines if "event" not in line],
        events=[line for line in lines if "event" in line],
        samples=(),
    )


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Nested values by `key.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


# ------------------------------ tables


def make_tables(runs: Sequence[PageRun]) -> dict[str, Table]:
    """Where the runs stand, the settings in which they differ, and their data and versions."""
    configs = [run.config for run in runs]
    state = ("state", "problem", "model", "parameters", "step", "steps", "loss")
    speed = ("val_ppl", "val_bpb", "tokens_per_second", "mfu")

    # The folder always differs, and changes nothing.
    settings = [key for config in configs for key in config if key != "output_dir"]
    differing = [row for row in make_rows(configs, settings) if len(set(row[1])) > 1]

    # Keys that say which texts these are; the others stand in the recipe.
    data = [f"data.{key}" for key in (*TEXTS, "seq_len")]
    tokenizer = [f"tokenizer.{key}" for key in ("path", "train", "vocab_size")]
    facts = [key for run in runs for key in run.facts]
    return {
        "state": make_rows([run.summary for run in runs], [*state, *speed]),
        "differing": differing,
        "about": make_rows([r.config | r.facts for r in runs], data + tokenizer + facts),
    }


def make_rows(values: Sequence[dict[str, Any]], keys: Sequence[str]) -> Table:
    """A row for each of the keys that has a value in any run."""
    rows = [(key, [write_cell(each.get(key)) for each in values]) for key in dict.fromkeys(keys)]
    return [(key, cells) for key, cells in rows if set(cells) != {"–"}]


def write_cell(value: Any) -> str:
    """A value as a person reads it, without the passwords of URLs."""
    if value in (None, "", []):
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return redact(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


# ------------------------------ curves


def draw_panels(runs: Sequence[PageRun]) -> dict[str, Any]:
    """Bokeh's figures by their key, with one x axis; none for a key without values."""
    from bokeh.models import CrosshairTool, Span

    # Steps of different sizes do not compare, tokens do.
    sizes = {size for run in runs for size in step_sizes(run)}
    axis = "tokens" if len(sizes) > 1 else "step"
    crosshair = CrosshairTool(overlay=Span(dimension="height", line_color="#999999"))

    figures: dict[str, Any] = {}
    for key in CURVES:
        series = [read_points(run, key) for run in runs]
        values = [value for points in series for value in points["value"] if math.isfinite(value)]
        if not values:
            continue

        # On a linear axis the initial fall from ln(vocabulary) would flatten the rest.
        steep = key == "loss" and max(values) > 2 * min(values) > 0
        panel = make_panel(axis, "log" if steep else "linear")
        # All panels share the line under the pointer, and the zoom.
        panel.add_tools(crosshair)
        panel.x_range = next(iter(figures.values()), panel).x_range
        figures[key] = panel

        for run, points in zip(runs, series, strict=True):
            if points["step"]:
                draw_run(panel, key, run, points, axis)
        borders = {(event[axis] - (axis == "step"), event["name"]) for event in stages_of(runs)}
        for at, name in sorted(borders):
            draw_border(panel, at, name)
    return figures


def stages_of(runs: Sequence[PageRun]) -> list[dict]:
    """The events with which stages began."""
    return [event for run in runs for event in run.events if event["event"] == "stage"]


def step_sizes(run: PageRun) -> set[Any]:
    """The tokens of a step, in each stage of a run."""
    names = {key.split(".")[1] for key in run.config if key.startswith("stages.")}
    keys = ["train.tokens_per_step", *(f"stages.{name}.train.tokens_per_step" for name in names)]
    return {run.config.get(key) for key in keys if key in run.config} or {None}


def draw_border(panel: Any, at: float, name: str) -> None:
    """Draws the beginning of a stage: a line with its name."""
    from bokeh.models import Label, Span

    look: Any = {"line_color": "#666666", "line_dash": "dotted"}
    panel.add_layout(Span(location=at, dimension="height", **look))
    panel.add_layout(
        Label(x=at, y=6, y_units="screen", x_offset=3, text=name, text_font_size="11px")
    )


def read_points(run: PageRun, key: str) -> dict[str, list[float]]:
    """The columns step, tokens and value of a curve. Values that are not finite are gaps."""
    lines = [line for line in run.lines if isinstance(line.get(key), int | float)]
    return {
        "step": [line["step"] for line in lines],
        "tokens": [line.get("tokens", math.nan) for line in lines],
        "value": [line[key] if math.isfinite(line[key]) else math.nan for line in lines],
    }


def make_panel(axis: str, scale: Any) -> Any:
    from bokeh.models import PrintfTickFormatter
    from bokeh.plotting import figure

    panel = figure(
        height=250,
        sizing_mode="stretch_width",
        x_axis_label=axis,
        y_axis_type=scale,
        tools="xbox_zoom,box_zoom,reset,save",
        active_drag=None,  # a finger on a panel scrolls the page
        toolbar_location="above",
        outline_line_color=None,
    )
    panel.toolbar.logo, panel.toolbar.autohide = None, True
    panel.grid.grid_line_color = "#e5e5e5"
    panel.axis.minor_tick_line_color = None
    panel.axis.axis_label_text_font_style = "normal"
    panel.axis.formatter = PrintfTickFormatter(format="%.4g")
    return panel


def draw_run(panel: Any, key: str, run: PageRun, points: dict[str, list], axis: str) -> None:
    """Draws a run's curve, which shows its values under the pointer, and the guards' events on it."""
    import numpy as np
    from bokeh.models import ColumnDataSource, HoverTool

    # The losses are pale behind their running means.
    noisy = key == "loss"
    mean = smoothed(points["value"]) if noisy else points["value"]
    columns: Any = {name: np.array(column, float) for name, column in points.items()}
    source = ColumnDataSource(columns | {"mean": np.array(mean)})
    look = {"source": source, "line_color": run.colour, "line_dash": run.dash}
    line = panel.line(axis, "value", name=run.name, line_alpha=0.35 if noisy else 1, **look)
    panel.line(axis, "mean", line_width=2 if noisy else 1.3, **look)
    if len(columns["step"]) < 30:  # validations, or a run's first steps
        panel.scatter(axis, "value", source=source, size=5, color=run.colour)

    # One line for each run: higher boxes would cover one another.
    hover = HoverTool(renderers=[line], mode="vline", visible=False)
    hover.tooltips = "<b>$name</b> @value{%.5g}, step @step{0,0}"
    hover.formatters = {"@value": "printf"}
    panel.add_tools(hover)

    # Events stand on the curve, between the steps that were logged.
    for event in run.events:
        if key in ("loss", "grad_norm") and event["event"] in EVENTS:
            at, level = (
                np.interp(event["step"], columns["step"], columns[name]) for name in (axis, "value")
            )
            marker, _ = EVENTS[event["event"]]
            panel.scatter([at], [level], marker=marker, size=10, color=run.colour, line_width=2)
