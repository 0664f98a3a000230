"""The style of all figures: palette, panels, names at the ends of lines, caption, PNG and PDF."""

import math
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

# Okabe and Ito's palette, for colour-blind readers; lines and markers differ too, for prints in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)))
MARKERS = "os^DvPX"
GREY = "#666666"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.titlesize": 9,
    "figure.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "errorbar.capsize": 2,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
    "text.parse_math": False,  # a dollar in a name is a dollar
}
FALLBACKS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Microsoft YaHei",
    "Hiragino Sans GB",
    "Arial Unicode MS",
)
"""Fonts for characters that matplotlib's own font lacks, such as Chinese."""
COLUMN, PAGE = 3.4, 7.0
"""Widths of one and two columns of a paper, in inches."""
MOST = 6
"""Series of a panel."""
Look = dict[str, Any]


def look(i: int) -> Look:
    """Colour, dash and marker of series i; 49 differ."""
    other = (i + i // 7) % 7
    return {"color": COLOURS[i % 7], "linestyle": LINES[other], "marker": MARKERS[other]}


REFERENCE: Look = {"color": GREY, "linestyle": "-", "marker": ""}


def in_panels(names: Sequence[Any]) -> tuple[list[list[Any]], dict[Any, Look]]:
    """The names of panels of at most `MOST` series, and how each name is drawn in all of them.

    Of more names the first is the reference, see `beside_reference`.
    """
    if len(names) <= MOST:
        return [list(names)], {name: look(i) for i, name in enumerate(names)}
    return beside_reference(names[0], names[1:])


def beside_reference(
    reference: Any, names: Sequence[Any]
) -> tuple[list[list[Any]], dict[Any, Look]]:
    """As `in_panels`, of panels that all repeat the reference in grey."""
    panels = []
    looks = {reference: REFERENCE}
    step = MOST - 1
    for start in range(0, len(names), step):
        series = names[start : start + step]
        panels.append([reference, *series])
        looks |= {name: look(i) for i, name in enumerate(series)}
    return panels, looks


def log_axis(
    axis: Any, ticks: Iterable[float] | None = None, write: Callable[[float], str] | None = None
) -> None:
    """Makes an axis, which has its data, logarithmic, with plain numbers."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        NullFormatter,
        NullLocator,
    )

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    low, high = axis.get_view_interval()
    if high < 1.01 * low:  # a single place, but for rounding
        low, high = low / 2, high * 2
        getattr(axis.axes, f"set_{axis.axis_name}lim")(low, high)
    decades = math.log10(high / low)
    # The fewer decades, the more numbers within one: an axis needs some to be read.
    subs: tuple[float, ...] = (1,)
    if decades < 1:
        subs = (1, 1.5, 2, 3, 4, 5, 6, 8)
    elif decades < 3:
        subs = (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=subs) if ticks is None else FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda number, _: (write or _write_plain)(number)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _write_plain(number: float) -> str:
    """`0.001`, `1000`, `10⁻⁵`."""
    if 1e-4 < number < 1e6:
        return f"{number:g}"
    digits, exponent = f"{number:e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if float(digits) == 1 else f"{float(digits):g}·{power}"


def files(file: Path) -> list[Path]:
    """The PNG and the PDF that `drawing` writes for `file`, which may have one of these suffixes."""
    stem = file.name.removesuffix(".png").removesuffix(".pdf")
    return [file.with_name(f"{stem}.{suffix}") for suffix in ("png", "pdf")]


@contextmanager
def drawing(
    file: Path,
    title: str,
    caption: str,
    panels: int = 1,
    *,
    columns: int = 2,
    height: float = 2.0,
    **share: Any,
) -> Iterator[list[Any]]:
    """Panels (matplotlib axes) to draw into; then the figure is finished and written to `files(file)`.

    Lines with a label get it at their end: in every panel of at most two columns, else in the rightmost that
    has the line. The same panels give the same bytes.

    Args:
        title: what is seen. caption: what lines, bars and bands mean, n and seeds.
        columns: of panels. height: of a row of panels, in inches.
        share: `sharex`, `sharey` of `Figure.subplots`; of shared y axes only the first names the unit.
    """
    from matplotlib import font_manager, rc_context
    from matplotlib.figure import Figure

    installed = set(font_manager.get_font_names())
    families = ["sans-serif", *(name for name in FALLBACKS if name in installed)]
    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    letters = int(72 * PAGE / 4.2)  # of 8 points
    caption, title = textwrap.fill(caption, letters), textwrap.fill(title, int(0.7 * letters))
    lines = caption.count("\n") + 1.2 * title.count("\n") + 3
    with rc_context(STYLE | {"font.family": families}), _missing_glyphs_in_one_line(file):
        figure = Figure((PAGE, rows * height + lines * 0.14), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
        for unused in axes[panels:]:
            unused.remove()
        yield axes[:panels]
        figure.suptitle(title, x=0.01, ha="left")
        figure.supxlabel(caption, x=0.01, ha="left", size=8, color=GREY)
        named: set[tuple[int, str]] = set()
        # From right to left: a name stands at the rightmost panel that has its line.
        for i, panel in reversed(list(enumerate(axes[:panels]))):
            label = "" if share.get("sharey") and i % columns else panel.get_ylabel()
            panel.set_ylabel(textwrap.fill(label, int(17.5 * (height - 0.3))))
            named |= _name_lines(panel, i // columns, named if columns > 2 else set())
        layout: Any = figure.get_layout_engine()
        for _ in range(2):  # names that stand higher than the panel make it lower
            layout.execute(figure)
            for panel in axes[:panels]:
                _spread_names(panel)
        figure.set_layout_engine("none")
        png, pdf = files(file)
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(pdf, metadata=dict.fromkeys(("CreationDate", "Creator", "Producer")))


@contextmanager
def _missing_glyphs_in_one_line(file: Path) -> Iterator[None]:
    """Prints a line about the characters of a figure that no font has, in place of matplotlib's many warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.filterwarnings("always", r"Glyph \d+ .*missing from font")
        yield

    missing = {}
    for each in seen:
        if glyph := re.match(r"Glyph (\d+) .*missing from font", str(each.message)):
            missing[chr(int(glyph[1]))] = None
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if missing:
        from matplotlib import get_cachedir

        print(
            f"{file}: no font has {' '.join(missing)}; install Noto Sans CJK, and remove {get_cachedir()}, "
            "where matplotlib lists the fonts",
            file=sys.stderr,
        )


def _name_lines(panel: Any, row: int, named: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Writes the names of a panel's lines beside it, at the height of their ends.

    named: (row, name) of names that stand in a panel to the right. Returns those that it adds.
    """
    import numpy as np
    from matplotlib.colors import to_rgb

    panel.get_xlim(), panel.get_ylim()  # the transforms do not fit new data to the panel themselves
    added = set()
    for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
        line = handle[0] if isinstance(handle, tuple) else handle  # an errorbar is a tuple
        # [points, 2], from data to fractions of the panel
        to_panel = line.get_transform() - panel.transAxes
        points = to_panel.transform(np.asarray(line.get_xydata(), float))
        points = points[np.isfinite(points).all(1)]
        if (row, name) in named or not len(points):
            continue
        added.add((row, name))

        text = textwrap.fill(re.sub(r"(?<=\S)\(", " (", name), 24)
        # In fractions of the panel; a line may end outside.
        end = points[-1].clip(0, 1)
        # Yellow is too light to read.
        darker = [0.75 * channel for channel in to_rgb(line.get_color())]
        panel.annotate(
            text,
            end,
            (1.05, end[1]),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=darker,
            linespacing=1,
            annotation_clip=False,
            gid="name",
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "lw": 0.5,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )
    return added


def _spread_names(panel: Any) -> None:
    """Moves a panel's names apart, as little as their order and heights allow."""
    from matplotlib.text import Text

    texts = sorted((t for t in panel.texts if t.get_gid() == "name"), key=lambda text: text.xy[1])
    # The extent of an annotation includes its stroke to the line, that of a text does not.
    sizes = [1.1 * Text.get_window_extent(text).height / panel.bbox.height for text in texts]
    below = [sum(sizes[:i]) + size / 2 for i, size in enumerate(sizes)]  # of a stack of all, from 0
    free = [text.xy[1] - b for text, b in zip(texts, below, strict=True)]
    room = 1 - sum(sizes)
    n = len(texts)
    for i, text in enumerate(texts):  # isotonic regression
        # Its max-min formula: the largest over j ≤ i of the smallest mean of free[j…k] over k ≥ i.
        lift = max(min(fmean(free[j : k + 1]) for k in range(i, n)) for j in range(i + 1))
        # Within the panel; a stack that is higher than it sticks out equally far at both ends.
        lift = min(max(lift, min(0, room / 2)), max(room, room / 2))
        text.set_y(lift + below[i])
