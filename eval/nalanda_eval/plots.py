"""What `analysis` measured, as figures for a paper and a table for a terminal."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nalanda.report.plot import COLOURS, GREY, LINES, MARKERS, STYLE


def draw_analysis(result: dict[str, Any], directory: Path) -> list[Path]:
    """One figure a question, each as PNG and PDF, from what `analyze` measured; returns their places."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    layers, uniform, maps = result["layers"], result["uniform"], result["map_entropy"]
    weighed = [layer for layer in layers if "entropy" in layer]

    def plot_maps(axes: Any) -> None:
        # All but softmax lie close together: a second look at them, where softmax leaves room.
        close, highest = axes.inset_axes((0.1, 0.1, 0.5, 0.62)), math.log(maps["keys"])
        for a in (axes, close):
            for (name, values), colour, line in zip(maps["entropy"].items(), COLOURS, LINES, strict=True):
                if a is axes or name != "softmax":
                    a.plot(maps["query_norm"], values, color=colour, linestyle=line, label=name)
            a.axhline(highest, color=GREY, linewidth=0.8, label="uniform, log n")
            a.set(xscale="log", xlim=(maps["query_norm"][0], maps["query_norm"][-1]))
        axes.set_ylim(0, 1.05 * highest)
        close.tick_params(labelsize=8)

    def plot_heads(axes: Any, metric: str) -> None:
        x, y = [layer["layer"] for layer in weighed], [layer[metric] for layer in weighed]
        heads = [(i, head) for i, layer in zip(x, weighed, strict=True) for head in layer["heads"][metric]]
        axes.scatter(*zip(*heads, strict=True), s=12, color=COLOURS[5], lw=0, clip_on=False, label="one head")
        axes.plot(x, y, color=COLOURS[0], marker="o", clip_on=False, label="mean of heads")
        if metric == "negative_share":
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            axes.set_ylim(top=max(0.55, 1.05 * max(head for _, head in heads)))
        else:
            axes.axhline(uniform[metric], color=GREY, linestyle="--", linewidth=1, label="uniform weights")

    def plot_names(axes: Any, section: str) -> None:
        for i, name in enumerate(dict.fromkeys(name for layer in layers for name in layer[section])):
            points = [(layer["layer"], layer[section][name]) for layer in layers if name in layer[section]]
            look = {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "linestyle": LINES[i % 7]}
            axes.plot(*zip(*points, strict=True), **look, label=name)

    def plot_windows(axes: Any) -> None:
        last, windows = len(layers) - 1, result["windows"]
        few = len(weighed) <= 8
        for i, local in ((layer["layer"], layer["local_score"]) for layer in weighed):
            label = f"layer {i}" if few or i in (0, last // 2, last) else None
            shade = matplotlib.colormaps["viridis"](0.85 * i / max(1, last))  # its yellow is too light
            axes.plot(windows, local, color=shade, linestyle=LINES[i % 4] if few else "-", label=label)
        axes.plot(windows, uniform["local_score"], color=GREY, linestyle=LINES[6], label="uniform weights")
        axes.set(xlim=(0, 1), ylim=(0, 1.02))

    nats, window = "entropy of positive weights (nats)", "window r (share of the length)"
    figures: list[tuple] = [("map_entropy", "query norm ‖q‖ / √K", nats, plot_maps)]
    if weighed:
        figures += [
            ("entropy", "layer", nats, plot_heads, "entropy"),
            ("negative_share", "layer", "negative weights (share)", plot_heads, "negative_share"),
            ("local_score", window, "accumulated |weight| (share of a row)", plot_windows),
            (
                "effective_rank_weights",
                "layer",
                "effective rank of the weights",
                plot_heads,
                "effective_rank",
            ),
        ]
    figures += [
        ("effective_rank_projections", "layer", "effective rank of the matrix", plot_names, "projections"),
        ("gradient_relative_std", "layer", "gradient norm (std / mean)", plot_names, "gradients"),
    ]
    written = []
    for name, x, y, plot, *what in figures:
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(6.4, 3.6), layout="constrained")
            axes = figure.subplots()
            of_maps = f"K = {maps['head_dim']}, n = {maps['keys']} keys"
            axes.set(title=of_maps if plot is plot_maps else result["model"], xlabel=x, ylabel=y)
            plot(axes, *what)
            if x == "layer":
                axes.set(xlim=(-0.5, len(layers) - 0.5), ylim=(0, None))
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            handles, labels = axes.get_legend_handles_labels()
            labels = [label.replace("_", " ") if what == ["gradients"] else label for label in labels]
            figure.legend(handles, labels, loc="outside right center")
            for suffix in ("png", "pdf"):
                written.append(directory / f"{name}.{suffix}")
                figure.savefig(written[-1])
    return written


def print_analysis(result: dict[str, Any], directory: Path, console: Console | None = None) -> None:
    """The table, a row a layer, and the places of the files."""
    console = console or Console(highlight=False)
    tenth = result["windows"].index(0.1)
    table = Table("layer", "mixer", box=None, pad_edge=False)
    table.columns[1].no_wrap = True
    for head in ("entropy\nnats", "negative", "within\nT/10", "effective\nrank", "gradient\nstd/mean"):
        table.add_column(head, justify="right")
    rows: list[dict] = [*result["layers"], {"layer": "", "mixer": "uniform"} | result["uniform"]]
    for row in rows:
        cells = (
            (row.get("entropy"), ".2f"),
            (row.get("negative_share"), ".1%"),
            (row.get("local_score", {tenth: None})[tenth], ".1%"),
            (row.get("effective_rank"), ".1f"),
            (row.get("gradients", {}).get("mixer_output"), ".3f"),
        )
        shown = ("–" if value is None else format(value, form) for value, form in cells)
        table.add_row(str(row["layer"]), row["mixer"], *shown)
    heading = f"{result['model']}, {result['rows']} × {result['length']} tokens"
    console.print(heading, style="bold", markup=False, soft_wrap=True)
    console.print(table)
    for note in result["notes"]:
        console.print(note, style="dim", markup=False, soft_wrap=True)
    console.print(f"\nfigures (.png, .pdf) and numbers in {directory}:", markup=False, soft_wrap=True)
    names = [name.removesuffix(".png") for name in result["figures"] if name.endswith(".png")]
    console.print("  " + ", ".join(["analysis.json", *names]), markup=False)
