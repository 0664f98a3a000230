"""Lists of runs, including damaged ones, and pictures of their losses."""

import io
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest
import yaml
from filelock import FileLock
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import nalanda_cli
from nalanda.common.errors import InputError
from nalanda.common.terminal import narrowed
from nalanda.report import plot as plots
from nalanda.report import runs
from nalanda.report.page import write_number
from nalanda.report.plot import _caption, _title, curve, labels, plot, smoothed
from nalanda.report.runs import RunSummary
from nalanda.train.log import describe_perplexity


def make(
    folder: Path, *, lines: list[dict] | None = None, facts: dict | None = None, **settings
) -> Path:
    """A run's folder; settings: `model__mixer="gla"`."""
    config = {"output_dir": str(folder), "model": {"mixer": "gla"}, "optim": {"lr": 0.001}}
    config |= {"train": {"steps": 100}, "seed": 0}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        config[section] = {**config[section], name: value} if name else value
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def losses(count: int, *, rate: float = 3600.0, events: dict[int, str] | None = None) -> list[dict]:
    lines = []
    for step in range(1, count + 1):
        if step in (events or {}):
            lines.append({"step": step, "event": events[step], "reason": "inf", "loss": "inf"})
            continue
        loss = 3 + 5 * math.exp(-step / 9)
        lines.append(
            {
                "step": step,
                "tokens": step * 512,
                "loss": loss,
                "tokens_per_second": rate,
                "mfu": 0.25,
            }
        )
        if step % 20 == 0:
            lines.append(
                {"step": step, "tokens": step * 512, "val_loss": loss, "val_ppl": math.exp(loss)}
            )
    return lines


def dead() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_list(tmp_path, monkeypatch, capsys):
    here, facts = platform.node(), {"parameters": 2_400_000, "step": 40}
    make(
        tmp_path / "done",
        lines=losses(40),
        facts={**facts, "state": "finished"},
        model__feature_map="nala",
    )
    make(
        tmp_path / "deep" / "live",
        lines=losses(3),
        facts={"state": "running", "host": here, "pid": os.getpid()},
    )
    make(
        tmp_path / "gone", lines=losses(3), facts={"state": "running", "host": here, "pid": dead()}
    )
    own = {"state": "running", "host": here, "pid": os.getpid()}
    make(tmp_path / "held", lines=losses(3), facts=own)
    make(
        tmp_path / "reused", lines=losses(3), facts=own
    )  # the process of this number is another one
    (tmp_path / "reused" / ".lock").touch()
    held = FileLock(tmp_path / "held" / ".lock")
    held.acquire()
    make(
        tmp_path / "failed", lines=losses(3), facts={"state": "failed", "reason": "the loss is nan"}
    )
    make(tmp_path / "new", model={"auto": "state-spaces/mamba-130m"})
    make(tmp_path / "hybrid", model__mixer=["gla", "gla", "softmax"], facts=facts)
    (tmp_path / "done" / "final").mkdir()
    (tmp_path / "done" / "final" / "run.json").write_text("{}")  # a model, not a run
    (tmp_path / "elsewhere").mkdir()
    make(tmp_path / "torn", facts={"state": "finished"})
    (tmp_path / "torn" / "run.json").write_text('{"state": "fin')
    make(tmp_path / "no-yaml").joinpath("config.yaml").write_text("a: [")
    make(tmp_path / "no-recipe").joinpath("config.yaml").write_text("- 1")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text("[]")
    (tmp_path / "gone" / "metrics.jsonl").open("a").write('{"step": 4, "lo')  # killed while writing
    for i, name in enumerate(["new", "done"]):
        for file in (tmp_path / name).iterdir():
            os.utime(file, (2e9 + i, 2e9 + i))

    found = {run.name: run for run in runs.overview(tmp_path)}
    held.release()
    assert list(found)[:2] == ["done", "new"]  # last changed first
    assert {name: run.state for name, run in found.items()} == {
        "done": "finished",
        "deep/live": "running",
        "gone": "killed",
        "held": "running",
        "reused": "killed",
        "failed": "failed",
        "new": "empty",
        "hybrid": "empty",
        "torn": "unreadable",
        "no-yaml": "unreadable",
        "no-recipe": "unreadable",
        "bare": "unreadable",
    }
    done = found["done"]
    assert (done.model, done.step, done.steps, done.parameters) == (
        "gla + nala",
        40,
        100,
        2_400_000,
    )
    assert done.loss == pytest.approx(3 + 5 * math.exp(-40 / 9))
    assert done.val_ppl == pytest.approx(math.exp(done.loss))
    assert (done.tokens_per_second, done.mfu) == (3600.0, 0.25)
    assert found["gone"].step == 3
    assert found["new"].model == "mamba-130m"
    assert found["hybrid"].model == "2 × gla, 1 × softmax"
    assert found["failed"].problem == "the loss is nan"
    assert found["no-yaml"].problem == "config.yaml is not YAML"
    assert found["bare"].problem == "config.yaml is missing"

    def printed(width: int, *shown: runs.RunSummary) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        runs.print_runs(shown)
        return capsys.readouterr().out

    text = printed(120, *found.values())
    for part in ("40/100", "2.4 M", "25%", "3.6 K", "torn", "failed: the loss is nan", "2 × gla,"):
        assert part in text, part
    heading = printed(80, *found.values()).splitlines()[0].split()
    assert heading == [
        word for word in text.splitlines()[0].split() if word not in ("MFU", "params")
    ]
    assert printed(46, found["done"]).split()[:6] == ["run", "state", "step", "loss", "val", "ppl"]
    monkeypatch.delenv("COLUMNS", raising=False)
    runs.print_runs(list(found.values()))  # to no terminal: every column
    assert capsys.readouterr().out.splitlines()[0].split() == text.splitlines()[0].split()
    # A run on another machine is judged by its last change.
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert runs.read_run(tmp_path / "gone").state == "running"
    old = time.time() - runs.SILENT - 60
    for file in (tmp_path / "deep" / "live").iterdir():
        os.utime(file, (old, old))
    assert runs.read_run(tmp_path / "deep" / "live").state == "killed"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"auto": "state-spaces/mamba-130m"}, "mamba-130m"),
        ({"init_from": "runs/fit/hybrid"}, "hybrid"),
        # Every run has one of this name.
        ({"init_from": "/data/runs/hybrid/final"}, "hybrid/final"),
        ({"init_from": "runs/demo/final-ema-0.999"}, "demo/final-ema-0.999"),
        ({"init_from": "final"}, "final"),
        ({"init_from": "runs/demo/final", "mixer": "gla"}, "gla"),
    ],
)
def test_a_model_that_was_trained_before_is_called_by_its_folder(tmp_path, model, name):
    assert runs.read_run(make(tmp_path / "run", model=model)).model == name


@pytest.mark.parametrize("width", range(16, 32))
def test_a_narrow_table_has_fewer_columns_and_no_shortened_text(width):
    console = Console(width=width, file=io.StringIO())
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    words = ("first", "second", "third", "fourth", "last")
    for word in words:
        table.add_column(word, no_wrap=True)
    table.add_row(*words)
    console.print(narrowed(table, console, ("fourth", "second")))
    lines = console.file.getvalue().splitlines()
    fitting = (words, ("first", "second", "third", "last"), ("first", "third", "last"))
    shown = next(names for names in fitting if len(" ".join(names)) <= width)
    assert [line.split() for line in lines] == [[*shown]] * 2


def test_the_time_of_a_change_is_told_in_short(tmp_path, monkeypatch, capsys):
    now = datetime(2026, 3, 28, 14, 5)
    clock = mock.Mock(fromtimestamp=datetime.fromtimestamp, now=lambda: now)
    monkeypatch.setattr(runs, "datetime", clock)
    run = runs.read_run(make(tmp_path / "run", lines=losses(3), facts={"state": "finished"}))
    times = {
        "00:01": now.replace(hour=0, minute=1),
        "03-27 23:59": now.replace(day=27, hour=23, minute=59),
        "2025-12-31": now.replace(2025, 12, 31),
    }
    monkeypatch.setenv("COLUMNS", "120")
    runs.print_runs([replace(run, changed=then.timestamp()) for then in times.values()])
    _, *lines = capsys.readouterr().out.splitlines()
    assert all(map(str.endswith, lines, times)), lines


def test_events_and_their_losses_are_no_losses(tmp_path):
    folder = make(
        tmp_path / "run",
        lines=losses(30, events={30: "skipped", 7: "rollback"}),
        facts={"step": 20},
    )
    run = runs.read_run(folder)
    assert run.loss == pytest.approx(3 + 5 * math.exp(-29 / 9))
    assert run.step == 30
    c = curve(folder)
    assert c.events == [(7, "rollback"), (30, "skipped")]
    assert len(c.train) == 28
    step, tokens, hours, loss = c.train[-1]
    assert (step, tokens) == (29, 29 * 512)
    assert hours == pytest.approx(29 * 512 / 3600 / 3600)  # with the tokens of skipped steps
    assert [point[0] for point in c.validation] == [20]
    assert c.validation[0][3] == loss or c.validation[0][3] > 3


def test_a_run_that_went_back_is_at_the_steps_that_it_makes_again(tmp_path):
    lines = losses(50, events=dict.fromkeys(range(46, 51), "skipped"))
    undone = [line for line in lines if line["step"] <= 25 or "event" in line]
    undone.append({"step": 26, "event": "rollback", "reason": "", "to": 25, "at": 50})
    again = losses(30)[26:]
    steps = [runs.read_run(make(tmp_path / "back", lines=undone)).step]
    steps.append(runs.read_run(make(tmp_path / "on", lines=undone + again)).step)
    border = [*losses(20), staged(21, "anneal")]
    steps.append(runs.read_run(make(tmp_path / "border", lines=border)).step)
    assert steps == [25, 30, 20]
    bad = [{"step": step, "event": "skipped"} for step in (1, 2)]
    lines = [*bad, {"step": 1, "event": "rollback", "reason": "", "to": 0, "at": 2}]
    assert not runs.read_run(make(tmp_path / "start", lines=lines)).step


def test_a_perplexity_of_many_digits_leaves_room_for_the_others(tmp_path, monkeypatch, capsys):
    lost = {"step": 9, "tokens": 1, "val_loss": 80.0, "val_ppl": math.exp(80)}
    run = runs.read_run(make(tmp_path / "run", lines=[*losses(9), lost]), "run")
    monkeypatch.setenv("COLUMNS", "80")
    runs.print_runs([run, replace(run, val_ppl=1234.5)])
    heading, *rows = capsys.readouterr().out.splitlines()
    assert "tok/s" in heading
    assert [row.split()[6] for row in rows] == ["5.54e+34", "1,234.50"]
    assert describe_perplexity({"val_ppl": math.exp(80)}) == "perplexity 5.54e+34"
    assert write_number(math.exp(80)) == "5.541e+34"


def staged(step: int, name: str) -> dict:
    return {"step": step, "tokens": (step - 1) * 512, "event": "stage", "name": name, "reason": ""}


@pytest.mark.parametrize(("x", "at"), [("steps", 20), ("tokens", 20 * 512)])
def test_a_stage_begins_at_a_line_with_its_name(tmp_path, monkeypatch, x, at):
    lines = [*losses(20), staged(21, "anneal"), *losses(40)[21:]]
    one, other = (make(tmp_path / name, lines=lines, seed=name) for name in ("a", "b"))
    drawn, draw = [], plots._draw_run
    monkeypatch.setattr(plots, "_draw_run", lambda axes, *r: drawn.append(axes) or draw(axes, *r))
    plot([one, other], tmp_path / "loss.png", x=x)
    named = [text for text in drawn[0].texts if text.get_text() == "anneal"]
    assert [text.xy[0] for text in named] == [at]  # once, though both runs have it
    assert curve(one).events == []
    assert "Dotted: beginnings of stages." in _caption([curve(one)], ["a"])


def test_the_legend_tells_what_differs(tmp_path):
    def legend(*settings: dict) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return labels(
            [curve(make(folder / f"run{i}", lines=losses(3), **s)) for i, s in enumerate(settings)]
        )

    assert legend({}, {"optim__lr": 0.01}) == ["lr 0.001", "lr 0.01"]
    assert legend({}, {"model__mixer": "retnet"}, {"model__mixer": "gla", "seed": 1}) == [
        "gla, seed 0",
        "retnet, seed 0",
        "gla, seed 1",
    ]
    assert legend({"model__k": 1, "optim__k": 1}, {"optim__k": 2}) == [
        "model.k 1, optim.k 1",
        "model.k –, optim.k 2",
    ]
    # Options of two maps are told by the maps' names.
    mapped = {"model__feature_map": "nala", "model__feature_map_options": {"power": 2.0}}
    assert legend(mapped, {"model__feature_map": "silu", "model__feature_map_options": {}}) == [
        "feature_map nala",
        "feature_map silu",
    ]
    steeper = mapped | {"model__feature_map_options": {"power": 3.0}}
    assert legend(mapped, steeper) == ["power 2", "power 3"]
    # Keys of later versions and keys that change no curve are left out; the model comes first.
    later = {"train__z_loss": 0.0, "log": {"every": 1}, "seed": 1, "model__mixer": "nala"}
    assert legend({}, later) == ["gla, seed 0", "nala, seed 1"]
    assert legend({}, {}) == ["run0", "run1"]  # nothing differs
    assert legend({}, {}, {"seed": 1}) == ["run0: seed 0", "run1: seed 0", "run2: seed 1"]
    assert legend({}, {f"model__k{i}": i for i in range(9)}) == ["run0", "run1"]


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures that are saved."""
    import matplotlib.figure

    figures = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **options):
        figures.append(figure)
        return save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("x", ["tokens", "steps", "hours"])
def test_several_runs_in_one_picture(tmp_path, x, drawn):
    events = {31: "skipped", 40: "rollback", 50: "interrupted"}
    lines = [losses(60), losses(60, events=events)]
    for line in itertools.chain(*lines):
        if "val_loss" in line:
            line["val_loss"] += 1
    folders = [make(tmp_path / f"run{i}", lines=lines[i], seed=i) for i in (0, 1)]
    png = plot(folders, tmp_path / "pictures" / "loss.png", x=x)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    axes = drawn[0].axes[0]
    ends = {"tokens": 60 * 512, "steps": 60, "hours": 60 * 512 / 3600 / 3600}
    assert [text.get_text() for text in axes.texts] == ["seed 0", "seed 1"]
    # A name hangs on the run's last validation.
    markers = [line for line in axes.lines if line.get_label() in ("seed 0", "seed 1")]
    to_panel = markers[0].get_transform() - axes.transAxes
    last = 1 + 3 + 5 * math.exp(-60 / 9)
    for text, line in zip(axes.texts, markers, strict=True):
        assert line.get_xdata()[-1] == pytest.approx(ends[x])
        assert line.get_ydata()[-1] == pytest.approx(last)
        assert text.xy == pytest.approx(to_panel.transform((ends[x], last)))
    caption = drawn[0].get_supxlabel()
    assert all(
        what in caption
        for what in ("validation", "rollback", "skipped step", "n = 2 runs, seeds 0, 1")
    )
    assert max(max(line.get_xdata(), default=0) for line in axes.lines) == pytest.approx(ends[x])
    marks = {line.get_marker(): line for line in axes.lines if len(line.get_xdata()) == 1}
    place, height = (float(v[0]) for v in marks["x"].get_data())
    assert place == pytest.approx(ends[x] * 31 / 60, rel=0.02)
    assert height == pytest.approx(3 + 5 * math.exp(-31 / 9), abs=0.05)


@pytest.mark.parametrize(
    ("settings", "bits", "title"),
    [
        (
            {"optim__lr": 0.01},
            [2.0, 1.0],
            "Last validation losses of 2 runs, one seed each: 1.000 to 2.000 nats a token",
        ),
        (
            {"tokenizer": {"train": "bpe", "vocab_size": 9}},
            [1.0, 2.0],
            "Last .* one seed each: 1.000 to 2.000 bits a byte",
        ),
        (
            {"tokenizer": {"train": "bpe", "vocab_size": 9}},
            [None, 2.0],
            "Validation loss of 2 runs",
        ),
        ({"data__source": "b"}, [1.0, 2.0], "Validation loss of 2 runs"),
        (
            {"data__source": "b", "data__validation_source": "v"},
            [1.0, 2.0],
            "Last .* one seed each: 1.000 to 2.000 bits a byte",
        ),
        ({"data__revision": "b"}, [1.0, 2.0], "Validation loss of 2 runs"),
        ({"stages": {"b": {"data": {"source": "b"}}}}, [1.0, 2.0], "Validation loss of 2 runs"),
        ({"data__seq_len": 2}, [2.0, 1.0], "Last .* one seed each: 1.000 to 2.000 nats a token"),
        ({"seed": 7}, [2.0, 1.0], "Last .* 2 runs, 2 seeds: 1.000 to 2.000 nats a token"),
    ],
)
def test_only_losses_that_compare_are_compared(tmp_path, settings, bits, title):
    """A trained tokenizer is one of its corpus. The second run has the lower loss a token."""
    own = {"validation_source": "v"} if "data__validation_source" in settings else {}
    base = {"tokenizer": {"train": "bpe", "vocab_size": 8}, "data": {"source": "a"} | own}
    curves = [
        replace(
            curve(make(tmp_path / f"run{i}", lines=losses(1), **base | more)),
            last={} if bits[i] is None else {"val_bpb": bits[i]},
            validation=[plots.Point(1, 1, 1, 2.0 - i)],
        )
        for i, more in enumerate(({}, settings))
    ]
    assert re.fullmatch(title, _title(curves))
    texts = {"data__source", "data__revision", "stages"} & settings.keys() and not own
    assert ("validation texts differ" in _caption(curves, labels(curves))) == bool(texts)
    assert ("tokenizers differ" in _caption(curves, labels(curves))) == bool(
        {"tokenizer", "data__source", "data__revision"} & settings.keys()
    )


def test_validations_that_read_more_text_are_not_compared(tmp_path):
    """As of rows that hold more tokens. Under two tokenizers bytes decide, not tokens."""

    def titled(tokens: int, **settings) -> str:
        bits = {"val_tokens": tokens, "val_bpb": tokens / 1000}  # both read as many bytes
        runs = [
            losses(20),
            [{**line, **(bits if "val_loss" in line else {})} for line in losses(20)],
        ]
        runs[0][-1] |= {"val_tokens": 1000, "val_bpb": 1.0}
        folder = tmp_path / f"{tokens}-{len(settings)}"
        made = [make(folder / "a", lines=runs[0]), make(folder / "b", lines=runs[1], **settings)]
        return _title([curve(run) for run in made])

    assert titled(1005).startswith("Last validation losses of 2 runs")
    assert titled(1500) == "Validation loss of 2 runs"
    assert titled(1500, tokenizer="other").endswith("1.000 to 1.500 bits a byte")


@pytest.mark.slow
def test_no_run_of_another_length_is_named_the_best(tmp_path):
    """As the tutorial's: a run of all tokens, and one of a quarter of them."""
    runs = [
        make(tmp_path / "a", lines=losses(80), train__steps=80),
        make(tmp_path / "b", lines=losses(20), train__steps=20),
    ]
    curves = [curve(run) for run in runs]
    assert _title(curves) == "Validation loss of 2 runs of different length"
    caption = _caption(curves, ["a", "b"])
    assert "The runs differ in length, 10.2 K to 41 K tokens, so none is named the best." in caption
    at_20 = 3 + 5 * math.exp(-20 / 9)
    assert f"after 10.2 K, the last that all have: {at_20:.3f} (a), {at_20:.3f} (b)." in caption
    assert plot(runs, tmp_path / "loss.png").is_file()

    same = [curves[0], replace(curves[0], name="c")]
    assert _title(same).startswith("Last validation losses of 2 runs, one seed each: ")
    assert "Compared: the last validation losses, after 41 K tokens." in _caption(same, ["a", "c"])


def test_one_runs_picture(tmp_path):
    folder = make(tmp_path / "run", lines=losses(60))
    assert plot([folder]).stat().st_size > 10_000
    assert (folder / "loss.png").is_file()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text())
    assert plot([tmp_path / "plain"], tmp_path / "a.png").is_file()  # no recipe is needed for one
    with pytest.raises(InputError, match="a folder of runs; name some of them"):
        plot([tmp_path], tmp_path / "none.png")
    make(tmp_path / "odd", lines=[{"step": 1, "loss": 3.0}])
    with pytest.raises(InputError, match="odd: unreadable"):
        plot([tmp_path / "odd"], tmp_path / "none.png")


@pytest.mark.filterwarnings("error")
def test_characters_without_a_font_are_one_line(tmp_path, capsys):
    file = plot([make(tmp_path / "run \ue123\ue124", lines=losses(3))], tmp_path / "a.png")
    assert file.is_file()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no font has \ue123 \ue124; install Noto Sans CJK" in line


def test_a_lone_loss_is_a_dot_and_no_empty_line(tmp_path, drawn):
    plot([make(tmp_path / "run", lines=losses(1))])
    axes = drawn[0].axes[0]
    (name,) = axes.texts
    (line,) = (line for line in axes.lines if line.get_label() == name.get_text())
    assert line.get_marker() == "."


def test_a_curve_whose_validations_are_nan_has_its_name(tmp_path, drawn):
    lines = [line | ({"val_loss": "nan"} if "val_loss" in line else {}) for line in losses(60)]
    plot([make(tmp_path / str(i), lines=lines, seed=i) for i in (0, 1)], tmp_path / "a.png")
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["seed 0", "seed 1"]


@pytest.mark.slow
def test_a_run_that_ended_without_a_loss_says_so(tmp_path):
    """A line that just ends looks like a run that was stopped."""
    lines = losses(30)
    for line in lines:
        if line["step"] in (5, 26, 27, 28, 29, 30):
            line["loss"] = math.nan if line["step"] % 2 else "inf"
    broken, whole = (
        make(tmp_path / "broken", lines=lines),
        make(tmp_path / "whole", lines=losses(30)),
    )
    one, two = [curve(broken)], [curve(broken), curve(whole)]
    assert _title(one) == "broken: no finite training loss from step 26 on"
    assert _title(two) == "Training loss of 2 runs, of which 1 ended without a finite one"
    assert "Without a finite training loss: a from step 26 on." in _caption(two, ["a", "b"])
    assert plot([broken], tmp_path / "loss.png").is_file()


def test_smoothing_keeps_the_fall_and_calms_the_end():
    values = [10.0, 8.0, 6.0, *[3.0, 5.0] * 60]
    smooth = smoothed(values)
    assert smooth[:3] == [10.0, 8.0, pytest.approx(6.4)]
    assert all(3.5 < value < 4.5 for value in smooth[-20:])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 79, 80, 81, 641])
def test_smoothing_takes_the_mean_of_each_window(count):
    """Also of losses that fall by 12 decades, with a gap. A gap stays in the windows that have it."""
    values = [10.0 ** (6 - 12 * i / max(1, count)) for i in range(count)]
    if count > 3:
        values[count // 3] = math.nan
    half = max(1, count // 40)
    windows = [values[i - min(half, i) : i + min(half, i) + 1] for i in range(count)]
    means = [math.fsum(window) / len(window) for window in windows]
    assert smoothed(values) == pytest.approx(means, rel=1e-14, abs=0, nan_ok=True)


def test_a_long_curve_is_smoothed_in_few_calls():
    """A call for each point, over a fortieth of the points, would make a page of 10^6 lines wait for hours."""
    calls = []
    sys.setprofile(lambda frame, event, called: calls.append(event))
    try:
        smoothed([float(i) for i in range(100_000)])
    finally:
        sys.setprofile(None)
    assert len(calls) < 1000


def test_a_loss_that_is_no_number_is_text_in_json(tmp_path, capsys):
    line = {"step": 1, "tokens": 512, "loss": "nan"}
    make(tmp_path / "run", lines=[line], facts={"state": "failed"})
    nalanda_cli.main(["runs", str(tmp_path), "--json"])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    [run] = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert run["loss"] == "nan"


@pytest.mark.slow
def test_commands(tmp_path, monkeypatch):
    from nalanda_cli import app

    monkeypatch.chdir(tmp_path)
    folders = [
        make(tmp_path / "runs" / name, lines=losses(9), optim__lr=lr)
        for name, lr in (("a", 1.0), ("b", 2.0))
    ]
    call = CliRunner().invoke
    out = call(app, ["runs"]).stdout
    assert "a" in out
    assert "9/100" in out
    assert {r["name"] for r in json.loads(call(app, ["runs", "runs", "--json"]).stdout)} == {
        "a",
        "b",
    }
    assert isinstance(call(app, ["runs", "nowhere"]).exception, InputError)
    assert call(app, ["plot", str(folders[0])]).exit_code == 0
    assert (folders[0] / "loss.png").is_file()
    assert call(app, ["plot", *map(str, folders), "--x", "hours"]).exit_code == 0
    assert (tmp_path / "loss.png").is_file()
    assert isinstance(call(app, ["plot", "runs/a", "--x", "parsecs"]).exception, InputError)


def test_runs_behind_links_are_found_once(tmp_path):
    elsewhere = make(tmp_path / "disk" / "old", facts={})
    make(tmp_path / "runs" / "new", facts={})
    links = {"archive": elsewhere.parent, "latest": tmp_path / "runs" / "new", "up": tmp_path}
    for name, target in links.items():
        (tmp_path / "runs" / name).symlink_to(target)
    found = runs.overview(tmp_path / "runs")
    assert sorted(run.name for run in found) == ["archive/old", "new"]


def test_a_folder_without_runs(tmp_path):
    assert runs.overview(tmp_path) == []
    make(tmp_path / "only", facts={})
    assert runs.overview(tmp_path / "only")[0].name == "only"
    assert RunSummary("x", "empty", 0.0).model == "–"
