"""`nalanda-lab speed cpu`: every row runs, and its ratios are those of its record. Speeds are not judged."""

import dataclasses
import json

import pytest
from nalanda_lab.commands import app
from nalanda_lab.speed import cpu
from pages import ROOT
from typer.testing import CliRunner

from nalanda.common.errors import InputError

TINY = dict(zip(cpu.NAMES, (32, 1, 2, 16, 32), strict=True)) | {"vocab_size": 272}
ARGUMENTS = ("speed", "cpu", "--threads", "1", "--repeats", "3", "--output")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(cpu, "SHAPES", dict.fromkeys(cpu.SHAPES, TINY))
    monkeypatch.setattr(cpu, "TOKENS", dict.fromkeys(cpu.TOKENS, 1))
    monkeypatch.setattr(cpu, "BATCHES", dict.fromkeys(cpu.BATCHES, (1, 16)))
    monkeypatch.setattr(cpu, "CONTEXT", 32)
    monkeypatch.setattr(cpu, "MAPPED", (1, 16, 2, 8))
    monkeypatch.setattr(cpu, "ROWS_OF_HEADS", dict.fromkeys(cpu.ROWS_OF_HEADS, (16, 1)))
    for name in ("TRAINED", "SOFTMAX"):
        monkeypatch.setattr(cpu, name, TINY)


def table(folder, *options):
    words = [*ARGUMENTS, str(folder), *options]
    return CliRunner().invoke(app, words, catch_exceptions=False).stdout


def lines(text):
    """The columns of the table's lines by their names."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {name.strip(): [column.strip() for column in rest] for name, *rest in rows}


@pytest.mark.parametrize("name", cpu.ROWS)
def test_every_row_runs(name, tmp_path, tiny):
    row = cpu.ROWS[name]
    if cpu.missing_module(row):
        pytest.skip("llama.cpp is an extra")
    columns = lines(table(tmp_path, "--rows", name, "--repeats", "1"))
    record = json.loads((tmp_path / f"{name}.json").read_text())

    for line in row.lines:
        before, now, _, ratio = columns[line.name]
        assert before.endswith(" ms") or name.startswith("int8")
        assert now == cpu.milliseconds(1e3 * record["seconds"][line.ours][0])
        median = record["seconds"][line.numerator][0] / record["seconds"][line.denominator][0]
        assert ratio.startswith(f"{median:.2f} (")


def test_ratios_come_from_the_records(tmp_path, tiny, monkeypatch):
    table(tmp_path, "--rows", "map")
    file = tmp_path / "map.json"
    record = json.loads(file.read_text())
    record["seconds"] = {"map, before": [0.8, 0.9, 0.6], "map, now": [0.1, 0.1, 0.1]}
    file.write_text(json.dumps(record))
    monkeypatch.setattr(cpu, "measure", None)  # a row with a record is not measured again
    columns = lines(table(tmp_path, "--rows", "map"))["NaLa's map with its norm"]
    assert columns == ["800 ms", "100 ms", "1.00", "8.00 (7.00 to 8.50)"]

    # Ratios within a round, 5, 10 and 2, and not the quotient of the medians, 3.
    record["seconds"] = {"map, before": [0.5, 0.3, 0.2], "map, now": [0.1, 0.03, 0.1]}
    file.write_text(json.dumps(record))
    text = table(tmp_path, "--rows", "map")
    assert "| 5.00 (3.50 to 7.50) |" in text
    assert "Time of map, now in map: " in text


def test_our_time_by_the_scalar_rules():
    line = cpu.against_scalar("KDA", "2048 × 8")
    seconds = {
        line.numerator: [1.4],
        line.denominator: [1.0],
        line.before[0]: [3.4],
        line.before[1]: [2.0],
    }
    figures = cpu.figures_of(line, seconds)
    assert figures["ratio"] == 1.4
    assert figures["ratio_before"] == 1.7
    assert (figures["before"], figures["now"]) == (3400, 1400)


def test_other_settings_are_measured_again(tmp_path, tiny):
    table(tmp_path, "--rows", "map")
    table(tmp_path, "--rows", "map", "--repeats", "2")
    record = json.loads((tmp_path / "map.json").read_text())
    assert [len(seconds) for seconds in record["seconds"].values()] == [2, 2]


def test_a_missing_package_is_a_line(tmp_path, monkeypatch):
    row = dataclasses.replace(cpu.ROWS["llama_cpp"], needs=("no_such_package",))
    monkeypatch.setitem(cpu.ROWS, "llama_cpp", row)
    columns = lines(table(tmp_path, "--rows", "llama_cpp"))
    assert columns["token, 30 M, f32: llama.cpp"][-1] == "no_such_package is not installed"
    assert not list(tmp_path.iterdir())


def test_unknown_rows():
    with pytest.raises(InputError, match="--rows: no row 'tokens'"):
        cpu.bench_cpu(rows=["tokens"])


def test_the_page_has_the_lines_of_the_command():
    page = (ROOT / "lab/pages/speed.md").read_text()
    columns = lines(page.partition("<!-- nala speed cpu -->")[2].partition("<!-- end -->")[0])
    shown = [line.name for row in cpu.ROWS.values() for line in row.lines]
    assert [name for name in columns if name] == shown
