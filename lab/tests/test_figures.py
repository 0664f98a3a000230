"""What a reader of any figure may rely on, checked on every maker with made-up records."""

import itertools
import math
import re
from pathlib import Path

import pytest
import yaml
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from nalanda_eval.perplexity import draw_perplexity
from nalanda_lab.lra import QUICK_ARENA, draw_arena
from nalanda_lab.plots import draw_analysis
from nalanda_lab.recall import QUICK
from nalanda_lab.recall_report import draw_recall, panels_by_mixer
from nalanda_lab.speed.decode import FLOOR, OURS, PEER, draw_decode

from nalanda.report.figures import COLUMN, GREY, MOST, PAGE, drawing, files, in_panels, look
from nalanda.report.plot import plot


def make_losses(folder: Path, runs: int) -> None:
    for i in range(runs):
        run = folder / f"run{i}"
        run.mkdir(parents=True)
        recipe = {"model": {"mixer": "gla"}, "optim": {"lr": 0.001 * (i + 1)}, "seed": 3}
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))
        lines = [
            f'{{"step": {s}, "tokens": {512 * s}, "loss": {9 / s**0.1}, "tokens_per_second": 9.0}}\n'
            for s in range(1, 30)
        ]
        lines.append(
            f'{{"step": 29, "tokens": {512 * 29}, "val_loss": {6 + 0.01 * i}, "val_bpb": 2.0}}\n'
        )
        lines.append('{"step": 9, "event": "skipped", "reason": "inf"}\n')
        (run / "metrics.jsonl").write_text("".join(lines))
    plot(sorted(folder.glob("run*")), folder / "loss.png")


def make_decode(folder: Path) -> None:
    rows = [
        {"model": name, "context": context, "ms": ms, "fastest_ms": 0.9 * ms}
        for name in (*OURS, PEER, FLOOR)
        for context in (1024, 4096)
        for ms in [3.0 * (context / 1024 if name == "softmax" else 1)]
    ]
    draw_decode(
        {"rows": rows, "rounds": 8, "threads": 1, "shape": {"layers": 2, "width": 8}}, folder / "d"
    )


def make_recall(folder: Path, mixers: int, seeds: int) -> None:
    maps, rows = ("silu", "nala(power=3, angle=rms)", "relu"), []
    names = ["softmax", *(f"mixer{i} + {name}" for i in range(mixers) for name in maps)]
    for task, name, match in itertools.product(
        ("mqar", "copying"), names, ("parameters", "state 2.0 KiB")
    ):
        cases = len(QUICK[task].cases)
        rows.append(
            {
                "task": task,
                "model": name,
                "match": match,
                "seeds": seeds,
                "state_grows": name == "softmax",
            }
            | {"scores": [0.5] * cases, "spreads": [0.01] * cases, "score": 0.5, "spread": 0.01}
            | {"state_bytes": 2048, "chance": [0.1] * cases}
        )
    draw_recall(rows, QUICK, folder)


def make_arena(folder: Path) -> None:
    rows = [
        {"model": f"mixer{i}", "seeds": 2, "accuracy": dict.fromkeys(QUICK_ARENA, 0.1 * i)}
        | {"spread": dict.fromkeys(QUICK_ARENA, 0.02)}
        for i in range(9)
    ]
    draw_arena(rows, QUICK_ARENA, folder / "lra")


def make_perplexity(folder: Path, models: int) -> None:
    ends = [0, 1, 2, 4, 8, 16, 32, 64]
    curve = [
        {"after": a, "up_to": b, "rows": 5, "one_pass": 3.0, "windows": 3.1, "difference": -0.1}
        | {"one_pass_stderr": 0.1, "windows_stderr": 0.1, "difference_stderr": 0.02}
        for a, b in itertools.pairwise(ends)
    ]
    facts = {
        "window": 16,
        "length": 256,
        "bytes": 1000,
        "one_pass": {"perplexity": 20.0, "bits_per_byte": 1.0},
        "curve": curve,
    }
    found = [{"name": f"runs/m{i}/final"} | facts for i in range(models)]
    draw_perplexity({"text": "python", "models": found}, folder)


def make_analysis(folder: Path, depth: int) -> None:
    metrics = ("entropy", "negative_share", "effective_rank")
    windows = [0.0, 0.1, 0.5, 1.0]
    layers = [
        {
            "layer": i,
            "local_score": [0.1, 0.3, 0.7, 1.0],
            "heads": {name: [0.2, 0.4] for name in metrics},
        }
        | dict.fromkeys(metrics, 0.3 + 0.01 * i)
        | {part: dict.fromkeys("abcdefgh", 1.0 + i) for part in ("projections", "gradients")}
        for i in range(depth)
    ]
    result = {
        "layers": layers,
        "windows": windows,
        "rows": 4,
        "length": 32,
        "seed": 0,
        "gradient_batches": 8,
        "uniform": {"entropy": 3.0, "effective_rank": 2.0, "local_score": [0.1, 0.2, 0.6, 1.0]},
    }
    draw_analysis(result, folder)


MAKERS = {
    "plot": lambda folder: make_losses(folder, 1),
    "plot of eight": lambda folder: make_losses(folder, 8),
    "decode": make_decode,
    "recall": lambda folder: make_recall(folder, mixers=1, seeds=1),
    "recall of many": lambda folder: make_recall(folder, mixers=5, seeds=3),
    "lra": make_arena,
    "perplexity": lambda folder: make_perplexity(folder, 2),
    "perplexity of seven": lambda folder: make_perplexity(folder, 7),
    "analyze": lambda folder: make_analysis(folder, 9),
}


@pytest.mark.parametrize("name", MAKERS)
def test_any_figure_can_be_printed(name, tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: figures.update({path.name: figure})
    )
    MAKERS[name](tmp_path)
    assert figures
    for name, figure in figures.items():
        assert {path.name for path in files(tmp_path / name)} <= figures.keys()
        if name.endswith("png"):
            check(figure)


def check(figure: Figure) -> None:
    assert figure.get_figwidth() in (COLUMN, PAGE)
    assert figure.get_suptitle()
    caption = figure.get_supxlabel()
    assert re.search(r"\bn = \d", caption)
    assert "seed" in caption
    assert re.search(r"(?i)\b(lines?|dots?|markers?|points?|bars?)\b", caption)
    width, height = figure.bbox.size
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_visible():
            assert text.get_fontsize() >= 8
    for text in (figure._suptitle, figure._supxlabel):
        box = text.get_window_extent()
        assert box.x0 >= 0 <= box.y0
        assert box.x1 <= width
        assert box.y1 <= height + 1
    names = []
    for axes in figure.axes:
        for low, high in (axes.get_xlim(), axes.get_ylim()):
            assert low < high
        box = axes.yaxis.label.get_window_extent()
        assert (
            not axes.get_ylabel() or 0 <= box.y0 < box.y1 <= figure._suptitle.get_window_extent().y0
        )
        words = [label.get_text() for label in axes.get_yticklabels()]
        first = axes.get_subplotspec().is_first_col()
        assert re.search(r"\(.+\)$", axes.get_xlabel())
        assert (
            re.search(r"(?s)\(.+\)$", axes.get_ylabel())
            or not first
            or any(re.search("[a-z]", w) for w in words)
        )
        handles, _ = axes.get_legend_handles_labels()
        lines = [handle[0] if isinstance(handle, tuple) else handle for handle in handles]
        series = [
            (to_hex(line.get_color()), line.get_linestyle(), line.get_marker()) for line in lines
        ]
        assert len([colour for colour, *_ in series if colour != GREY]) <= MOST
        assert len(set(series)) == len(series)
        names += [text for text in axes.texts if text.get_gid() == "name"]
    boxes = [Text.get_window_extent(text) for text in names]
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
    for box in boxes:
        assert box.x1 <= width + 1


def test_the_same_records_make_the_same_bytes(tmp_path):
    for part in ("a", "b"):
        make_losses(tmp_path / part, 2)
        make_decode(tmp_path / part)
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / part).rglob("*.p*")}
        for part in ("a", "b")
    ]
    assert found[0].keys() == {"d.png", "d.pdf", "loss.png", "loss.pdf"}
    assert found[0] == found[1]
    assert not any(re.search(rb"CreationDate|Software", content) for content in found[0].values())


@pytest.mark.parametrize("many", [1, 6, 7, 11, 30])
def test_panels_hold_every_name_once_and_the_reference_always(many):
    names = [f"{'ab'[i % 2]} + {i}" for i in range(many)]
    for panels, looks in (in_panels(names), by_mixer(names)):
        assert all(len(mine) <= MOST and mine[0] == names[0] for mine in panels)
        assert sorted(name for mine in panels for name in mine[1:]) == sorted(names[1:])
        assert looks.keys() == set(names)


def by_mixer(names):
    titled, looks = panels_by_mixer(names)
    for title, mine in titled:
        assert {name[0] for name in mine[1:]} <= set(title or "ab")
    return [mine for _, mine in titled], looks


def test_forty_nine_series_differ():
    assert len({tuple(map(str, look(i).values())) for i in range(49)}) == 49
    assert math.isclose(PAGE, 2 * COLUMN, abs_tol=0.3)


def test_a_dollar_in_a_name_is_a_dollar(tmp_path):
    with drawing(tmp_path / "figure", "m$_{$", "n = 1 seed, m$_{$") as [axes]:
        axes.plot([1, 2], label="m$_{$")
    assert (tmp_path / "figure.png").is_file()
