"""Figures and table of `analysis`."""

from pathlib import Path
from typing import Any

from rich.console import Console

from nalanda.report.figures import COLOURS, MOST, REFERENCE, drawing, files, in_panels, look
from nalanda_lab.track import plain_table


def draw_analysis(result: dict[str, Any], directory: Path) -> list[Path]:
    """Draws the figures of an `analyze` result, and returns their paths."""
    layers, uniform, windows = (result[name] for name in ("layers", "uniform", "windows"))
    weighed, written = [layer for layer in layers if "entropy" in layer], []
    one = "of one model, so of one training seed"
    read = f"n = {result['rows']} rows of {result['length']} tokens, drawn with seed {result['seed']}, {one}."

    def sheet(name: str, title: str, caption: str, panels: int = 1, **options: Any) -> Any:
        written.extend(files(directory / name))
        height = 2.5 if panels == 1 else 2.2
        return drawing(directory / name, title, caption, panels, height=height, **options)

    def by_layer(axes: Any, what: str) -> None:
        axes.set(xlabel="layer (number)", ylabel=what, ylim=(0, None))
        axes.locator_params("x", integer=True)

    def draw_heads(name: str, metric: str, quantity: str, unit: str, scale: float = 1) -> None:
        most = max if metric == "negative_share" else min
        found = most(weighed, key=lambda layer: layer[metric])
        title = f"{quantity}: {'most' if most is max else 'lowest'} in layer {found['layer']}"
        heads = [(x["layer"], scale * head) for x in weighed for head in x["heads"][metric]]
        mean = [(x["layer"], scale * x[metric]) for x in weighed]
        caption = f"Pale dots: a head. Line: mean of a layer's heads. Means over {read}"
        with sheet(name, f"{title}, {scale * found[metric]:.3g} {unit.split()[0]}", caption) as [
            axes
        ]:
            axes.plot(*zip(*heads, strict=True), "o", color=COLOURS[5], markersize=3)
            axes.plot(*zip(*mean, strict=True), **look(0), label="mean of heads")
            if metric in uniform and most is min:
                axes.axhline(scale * uniform[metric], **REFERENCE, label="uniform weights")
            by_layer(axes, f"{quantity[0].lower()}{quantity[1:]} ({unit})")

    def draw_names(name: str, section: str, quantity: str, unit: str, caption: str) -> None:
        points: dict[str, list[tuple[int, float]]] = {}
        for layer in layers:
            for part, value in layer.get(section, {}).items():
                points.setdefault(
                    part.replace("_", " ") if section == "gradients" else part, []
                ).append((layer["layer"], value))
        if not points:  # transformers' layers give no q and k
            return
        groups, looks = in_panels(list(points))
        value, layer, part = max((y, x, part) for part, mine in points.items() for x, y in mine)
        title = f"{quantity}: largest for {part} of layer {layer}, {value:.3g}"
        with sheet(name, title, f"Markers: a layer. {caption}", len(groups), sharey=True) as panels:
            for axes, mine in zip(panels, groups, strict=True):
                for part in mine:
                    axes.plot(*zip(*points[part], strict=True), **looks[part], label=part)
                by_layer(axes, f"{quantity[0].lower()}{quantity[1:]} ({unit})")

    if weighed:
        draw_heads("entropy", "entropy", "Entropy of positive weights", "nats")
        draw_heads("negative_share", "negative_share", "Negative weights", "% of a row", 100)
        draw_heads(
            "effective_rank_weights", "effective_rank", "Effective rank of weights", "dimensions"
        )
        shown = sorted({round(i * (len(weighed) - 1) / (MOST - 1)) for i in range(MOST)})
        tenth, narrow = windows.index(0.1), [w for w in windows if w <= 0.5]  # beyond, all near 1
        most = max(weighed, key=lambda layer: layer["local_score"][tenth])
        title = f"Weights within a tenth of the length: most in layer {most['layer']}, "
        some = f"{len(shown)} of {len(weighed)} layers. " if len(shown) < len(weighed) else ""
        with sheet(
            "local_score",
            f"{title}{100 * most['local_score'][tenth]:.0f} %",
            f"Lines: means over heads. {some}Means over {read}",
        ) as [axes]:
            for i, layer in enumerate(weighed[i] for i in shown):
                axes.plot(
                    narrow,
                    layer["local_score"][: len(narrow)],
                    **look(i),
                    label=f"layer {layer['layer']}",
                )
            axes.plot(
                narrow, uniform["local_score"][: len(narrow)], **REFERENCE, label="uniform weights"
            )
            axes.set(
                xlabel="window (share of the length)",
                ylabel="accumulated |weight| (share of a row)",
            )
            axes.set(xlim=(0, None), ylim=(0, 1.02))
    draw_names(
        "signs_of_pairs",
        "signs",
        "Signs of q and k",
        "share",
        f"Strong: a query and the key of its largest weight. Means over {read}",
    )
    draw_names(
        "key_norms",
        "key_norms",
        "Spread of key lengths",
        "std/mean",
        f"Over tokens, means over heads; {read}",
    )
    draw_names(
        "effective_rank_projections",
        "projections",
        "Effective rank of matrices",
        "dimensions",
        f"n = 1 matrix each, {one}.",
    )
    draw_names(
        "gradient_relative_std",
        "gradients",
        "Spread of gradient norms",
        "std/mean",
        f"Over n = {result['gradient_batches']} rows as batches, {one}.",
    )
    return written


def print_analysis(result: dict[str, Any], directory: Path) -> None:
    """Prints the table, one row a layer, and where the files are."""
    tenth = result["windows"].index(0.1)
    names = ["entropy\nnats", "negative", "within\nT/10", "effective\nrank"]
    names += ["same\nsigns", "‖k‖\nspread", "gradient\nstd/mean"]
    lines = []
    for row in [*result["layers"], {"layer": "", "mixer": "uniform"} | result["uniform"]]:
        cells = (
            (row.get("entropy"), ".2f"),
            (row.get("negative_share"), ".1%"),
            (row.get("local_score", {tenth: None})[tenth], ".1%"),
            (row.get("effective_rank"), ".1f"),
            (row.get("signs", {}).get("equal in strong pairs"), ".1%"),
            (row.get("key_norms", {}).get("spread of ‖k‖"), ".2f"),
            (row.get("gradients", {}).get("mixer_output"), ".3f"),
        )
        shown = ("–" if value is None else format(value, form) for value, form in cells)
        lines.append([str(row["layer"]), row["mixer"], *shown])

    print(f"{result['model']}, {result['rows']} × {result['length']} tokens")
    Console(emoji=False).print(plain_table(["layer", "mixer", *names], lines, left=2), markup=False)
    print(*result["notes"], sep="\n")
    figures = [name.removesuffix(".png") for name in result["figures"] if name.endswith(".png")]
    print(f"figures (.png, .pdf) and numbers in {directory}:")
    print(", ".join(["analysis.json", *figures]))
