"""The curves of a page, drawn by Bokeh in colours for light and dark pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nalanda.report.page_run import PageRun, line_look
from nalanda.report.plot import smoothed

TITLES = {
    "val_bpb": "Validation, bits a byte",
    "val_loss": "Validation loss, nats a token",
    "loss": "Training loss, nats a token",
    "kl": "Divergence from the teacher, nats a token",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "mfu": "MFU, % of the peak",
    "tokens_per_second": "Tokens a second",
    "data_seconds": "Wait for data, seconds a step",
}
"""Title of each panel, by its key in metrics.jsonl."""

MAIN = ("val_bpb", "val_loss", "loss")
"""The large panel is the first of these that all runs with a later one have."""

EVENTS = {
    "skipped": ("x", "×"),
    "rollback": ("inverted_triangle", "▼"),
    "loss scale": ("diamond", "◆"),
    "unsound": ("square", "■"),
    "slow rank": ("circle", "●"),
}
"""Events of the guards, and slow processes: the marker of Bokeh on the curves, and the sign in the list."""

INK, RULE = "#757a82", "#80808040"
"""Axes and grids, which can be read on white and on black."""

TEXT: Any = {"text_font_size": "12px", "text_color": INK}
"""Names in a panel."""


@dataclass
class Panel:
    """A figure of Bokeh with its title. It draws one or several keys of metrics.jsonl."""

    title: str
    keys: list[str]
    figure: Any = None
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    """The name, colour and dash of each key, if there are several."""


def draw_panels(runs: Sequence[PageRun]) -> dict[str, Panel]:
    """The panels of some runs by key, with one x axis; the large one comes first."""
    from bokeh.models import CrosshairTool, Span

    # Steps of different sizes do not compare, tokens do.
    sizes = {size for run in runs for size in step_sizes(run)}
    axis = "tokens" if len(sizes) > 1 else "step"
    crosshair = CrosshairTool(overlay=Span(dimension="height", line_color="#999999"))

    panels = choose_panels(runs)
    x_range = None
    for number, (name, panel) in enumerate(panels.items()):
        series = [(run, key, read_points(run, key)) for run in runs for key in panel.keys]
        values = [v for _, _, points in series for v in points["value"] if math.isfinite(v)]

        # On a linear axis the initial fall from ln(vocabulary) would flatten the rest.
        steep = name == "loss" and max(values) > 2 * min(values) > 0
        panel.figure = figure = make_panel(axis, "log" if steep else "linear")
        figure.height = 250 if number else 430
        # All panels share the line under the pointer, and the zoom.
        figure.add_tools(crosshair)
        figure.x_range = x_range = x_range or figure.x_range

        if len(panel.keys) > 1:
            names = [key.partition("/")[2] for key in panel.keys]
            panel.legend = [(source, *line_look(i)) for i, source in enumerate(names)]
        for run, key, points in series:
            if points["step"]:
                run_look = run.name, run.colour, run.dash
                look = panel.legend[panel.keys.index(key)] if panel.legend else run_look
                draw_run(figure, key, run, points, axis, *look)
        if len(runs) == 1:
            draw_baselines(figure, name, runs[0], series[0][2][axis], max(values))
        stages = [event for run in runs for event in run.events if event["event"] == "stage"]
        borders = {(event[axis] - (axis == "step"), event["name"]) for event in stages}
        for at, stage in sorted(borders):
            draw_border(figure, at, stage)
    return panels


def choose_panels(runs: Sequence[PageRun]) -> dict[str, Panel]:
    """The panels that have values, without their figures. No two have the same curve."""
    keys_by_run = [
        {key for line in run.lines for key, v in line.items() if _is_finite(v)} for run in runs
    ]
    every = set().union(*keys_by_run)
    validated = [keys for keys in keys_by_run if "val_loss" in keys]
    bits = bool(validated) and all("val_bpb" in keys for keys in validated)

    keys = [key for key in TITLES if key in every]
    # Bits a byte are the loss in another unit, and the speed of one run is its MFU.
    if bits:
        keys.remove("val_loss")
    if len(runs) == 1 and "mfu" in every and "tokens_per_second" in every:
        keys.remove("tokens_per_second")
    main = next((key for key in MAIN if key in keys and (key != "val_bpb" or bits)), None)
    if main:
        keys.insert(0, keys.pop(keys.index(main)))
    # Of a fit of layers, which has no loss, each arm's error comes first.
    arms = sorted(key for key in every if key.startswith("error/"))
    panels = {key: Panel(f"Relative error of {key.partition('/')[2]}", [key]) for key in arms}
    if len(runs) == 1 and len(arms) > 1:
        panels = {"arms": Panel("Relative error by arm", arms)}
    panels |= {key: Panel(TITLES[key], [key]) for key in keys}

    kind, unit = ("val_bpb", "bits a byte") if bits else ("val_ppl", "perplexity")
    sources = sorted(key for key in every if key.startswith(f"{kind}/"))
    if len(runs) == 1 and sources:
        panels["sources"] = Panel(f"Validation by source, {unit}", sources)
    for key in sources if len(runs) > 1 else []:
        panels[key] = Panel(f"Validation on {key.partition('/')[2]}, {unit}", [key])

    # Numbers that a mixer logs in validation, by names of its own.
    validations = [line for run in runs for line in run.lines if "val_loss" in line]
    for key in sorted(every & set().union(*validations)):
        if not key.startswith("val_") and key not in _COUNTS:
            title = key.replace("_", " ")
            panels[key] = Panel(f"{title[:1].upper()}{title[1:]}, mean over layers", [key])
    return panels


_COUNTS = ("step", "tokens")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def step_sizes(run: PageRun) -> set[Any]:
    """The tokens of a step, in each stage of a run."""
    names = {key.split(".")[1] for key in run.config if key.startswith("stages.")}
    keys = ["train.tokens_per_step", *(f"stages.{name}.train.tokens_per_step" for name in names)]
    return {run.config.get(key) for key in keys if key in run.config} or {None}


def read_points(run: PageRun, key: str) -> dict[str, list[float]]:
    """The columns step, tokens and value of a curve. Values that are not finite are gaps; shares are in percent."""
    factor = 100 if key == "mfu" else 1
    lines = [line for line in run.lines if isinstance(line.get(key), int | float)]
    return {
        "step": [line["step"] for line in lines],
        "tokens": [line.get("tokens", math.nan) for line in lines],
        "value": [factor * line[key] if math.isfinite(line[key]) else math.nan for line in lines],
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
    )
    colour_panel(panel)
    panel.toolbar.logo, panel.toolbar.autohide = None, True
    panel.axis.minor_tick_line_color = None
    # As many digits as a tick between two neighbouring steps needs; fewer would round it to another step.
    panel.axis.formatter = PrintfTickFormatter(format="%.9g")
    return panel


def colour_panel(panel: Any) -> None:
    """Gives a figure the colours of a page, light or dark."""
    # The page's own colour shows through.
    panel.background_fill_color = panel.border_fill_color = panel.outline_line_color = None
    panel.grid.grid_line_color = RULE
    panel.axis.axis_line_color = panel.axis.major_tick_line_color = INK
    panel.axis.axis_label_text_color = panel.axis.major_label_text_color = INK
    panel.axis.axis_label_text_font_style = "normal"


def show_values(panel: Any, line: Any, column: str, more: str = "") -> None:
    """Shows the line's name, its value in a column and `more` under the pointer."""
    from bokeh.models import HoverTool

    # One line for each run: higher boxes would cover one another.
    hover = HoverTool(renderers=[line], mode="vline", visible=False)
    hover.tooltips = f"<b>$name</b> @{column}{{%.5g}}{more}"
    hover.formatters = {f"@{column}": "printf"}
    panel.add_tools(hover)


def draw_border(panel: Any, at: float, name: str) -> None:
    """Draws the beginning of a stage: a line with its name."""
    from bokeh.models import Label, Span

    look: Any = {"line_color": INK, "line_dash": "dotted"}
    panel.add_layout(Span(location=at, dimension="height", **look))
    panel.add_layout(Label(x=at, y=6, y_units="screen", x_offset=3, text=name, **TEXT))


def draw_baselines(
    panel: Any, key: str, run: PageRun, places: Sequence[float], highest: float
) -> None:
    """Draws each baseline with this key as a line across the panel, with its name. highest: of the curve."""
    from bokeh.models import Label

    for name, values in run.baselines.items():
        # One that is far off would flatten the curve.
        level = values.get(key)
        if level is None or level > 1.3 * highest:
            continue
        ends = [min(places) if len(places) > 1 else 0, max(places)]
        panel.line(ends, [level, level], line_color=INK, line_dash="dashed", line_width=1.5)
        label = f"{name} {level:.4g}"
        panel.add_layout(
            Label(x=ends[1], y=level, y_offset=3, text=label, text_align="right", **TEXT)
        )


def draw_run(
    panel: Any,
    key: str,
    run: PageRun,
    points: dict[str, list],
    axis: str,
    label: str,
    colour: str,
    dash: str,
) -> None:
    """Draws a run's curve, which shows its values under the pointer, and the guards' events on it."""
    from bokeh.models import ColumnDataSource

    # The losses are pale behind their running means.
    noisy = key == "loss"
    mean = smoothed(points["value"]) if noisy else points["value"]
    columns: Any = {name: np.array(column, float) for name, column in points.items()}
    source = ColumnDataSource(columns | {"mean": np.array(mean)})
    look = {"source": source, "line_color": colour, "line_dash": dash}
    line = panel.line(axis, "value", name=label, line_alpha=0.35 if noisy else 1, **look)
    panel.line(axis, "mean", line_width=2, **look)
    if len(columns["step"]) < 30:  # validations, or a run's first steps
        panel.scatter(axis, "value", source=source, size=5, color=colour)
    show_values(panel, line, "value", ", step @step{0,0}")

    # Events stand on the curve, between the steps that were logged.
    for kind, (marker, _) in EVENTS.items():
        steps = [event["step"] for event in run.events if event["event"] == kind]
        if key in ("loss", "grad_norm") and steps:
            at, level = (
                np.interp(steps, columns["step"], columns[name]) for name in (axis, "value")
            )
            panel.scatter(at, level, marker=marker, size=10, color=colour, line_width=2)
