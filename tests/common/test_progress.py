"""Progress on a terminal and without one."""

import io
import itertools
import re

import pytest

from nalanda.common import progress
from nalanda.common.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds on the clock of `Progress`, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "FIRST", 10.0)
    monkeypatch.setattr(progress, "LAST", 60.0)
    return now


def open_terminal(monkeypatch, width: int = 80) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    return terminal


def test_lines_come_by_time(clock, capsys):
    with Progress("reading", 4000, "tokens", start=1000) as shown:
        for done, seconds in ((1200, 9.0), (1500, 2.0), (1600, 1.0), (2000, 9.0), (4000, 50.0)):
            clock[0] += seconds
            shown.to(done, "of a book")
    assert capsys.readouterr().err.splitlines() == [
        "reading 1,500/4,000 tokens  of a book  ETA 55 s",
        "reading 2,000/4,000 tokens  of a book  ETA 42 s",
    ]


def test_pauses_grow_up_to_a_minute(clock):
    pace, lines = progress.Pace(), []
    for second in range(3 * 3600):
        clock[0] = float(second)
        lines += [second] * pace.due()
    pauses = [b - a for a, b in itertools.pairwise(lines)]
    assert (lines[0], pauses[0], pauses[-1]) == (10, 10, 60)
    assert pauses == sorted(pauses)
    assert len(lines) < 300


def test_a_total_may_come_later_and_shares_have_no_unit(clock, capsys):
    with Progress("model", 0, "%") as shown:
        clock[0] = 20.0
        shown.to(25, total=100)
        shown.call("other")
        clock[0] = 40.0
        shown.advance(25)
    assert capsys.readouterr().err == "model  25%  ETA 60 s\nother  50%  ETA 40 s\n"


def test_work_of_unknown_length_says_how_long_it_lasts(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "LAST", 0.0)
    shown = Progress("loading")
    waits = iter([False, False, True])
    monkeypatch.setattr(shown.ended, "wait", lambda seconds: next(waits))
    shown._write_clock()
    assert capsys.readouterr().err == "loading … 0 s\n" * 2


def test_short_work_without_a_terminal_says_nothing(capsys):
    with Progress("running", 2) as shown:
        shown.advance()
    with Progress("loading"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [None, 4])
def test_a_terminal_gets_a_bar_that_goes(monkeypatch, total):
    terminal = open_terminal(monkeypatch)
    with Progress("reading [it]", total) as shown:
        if total:
            shown.to(1, "half [x]")
        shown.say("a [bold] line")
    text = terminal.getvalue()
    assert "reading [it]" in text
    assert "⠋" in text  # it moves before the first unit is done
    assert "a [bold] line\n" in text
    assert ("1/4  half [x]" in text) == bool(total)
    assert text.endswith("\x1b[2K")  # the last line is erased


@pytest.mark.parametrize("terminal", ["dumb", "unknown"])
def test_a_terminal_without_a_cursor_gets_lines(monkeypatch, clock, terminal):
    stream = open_terminal(monkeypatch)
    monkeypatch.setenv("TERM", terminal)
    with Progress("reading", 4, "files") as shown:
        clock[0] = 20.0
        shown.advance()
    assert stream.getvalue() == "reading 1/4 files  ETA 60 s\n"


STEP = "step 26,000/28,672  loss 2.5417  401 K tok/s  MFU 46.2%  grad norm 0.55  lr 5.43e-05  ETA 3 h 05 min"
MEMORY = "memory     36.1 MiB a device for weights, gradients and moments, at most 190.7 MiB for activations"


@pytest.mark.parametrize("width", [120, 80, 40])
def test_lines_fit_the_terminal_and_no_number_is_cut(monkeypatch, width):
    terminal = open_terminal(monkeypatch, width)
    _, note, *details, _ = STEP.split("  ")
    with Progress("step", 28_672) as shown:
        shown.to(26_000, note, details=details, left=11_100)
        bar = shown.bar.tasks[0].fields["text"]
        shown.bar.stop()
        terminal.truncate(terminal.seek(0))
        shown.to(26_000, note, details=details, left=11_100, end=True)
        shown.say(MEMORY)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width

    # Of the step what fits; of other lines all, further lines under the text.
    first = next(i for i, line in enumerate(lines) if line.startswith("memory"))
    step, memory = " ".join(lines[:first]), lines[first:]
    assert set(re.split(" {2,}", step)) <= set(re.split(" {2,}", STEP))
    assert {120: STEP, 80: STEP.replace("  grad norm 0.55  lr 5.43e-05", "")}.get(
        width, step
    ) == step
    assert "step 26,000/28,672  loss 2.5417" in re.sub(" {2,}", "  ", step)
    assert " ".join(" ".join(memory).split()) == " ".join(MEMORY.split())
    assert all(line.startswith(" " * 11) for line in memory[1:])
    assert len(f"step ⠋ {bar}") < width
    assert set(re.split(" {2,}", bar)) <= {"26,000/28,672", *STEP.split("  ")}


def test_work_of_unknown_length_counts_what_is_done(monkeypatch, capsys):
    terminal = open_terminal(monkeypatch)
    with Progress("reading", unit="rows") as shown:
        shown.advance(1500, "of a book")
    assert "1,500 rows  of a book" in terminal.getvalue()
    monkeypatch.setattr("sys.stderr", terminal := io.StringIO())
    with Progress("reading", unit="rows") as shown:
        shown.to(2, end=True)
    assert terminal.getvalue() == "reading 2 rows\n"


def test_what_is_printed_under_a_bar_goes_where_it_was_sent(monkeypatch, capsys):
    """With a bar on the terminal and stdout in a file."""
    terminal = open_terminal(monkeypatch)
    with Progress("reading", 4):
        print("text")
    assert capsys.readouterr().out == "text\n"
    assert "text" not in terminal.getvalue()


def test_one_process_of_a_launch_speaks(monkeypatch):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    with Progress("reading", 4) as shown:
        shown.to(4, end=True)
        shown.say("line")
    assert terminal.getvalue() == ""
