"""Progress of long work: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Self, TextIO

from nalanda.common.text import duration, wrap_line

FIRST, LAST = 10.0, 60.0
"""Seconds between two lines without a terminal: at the beginning, and after some minutes."""

BAR = 10
"""Columns that texts leave to the bar on a narrow terminal."""


def first_process() -> bool:
    """Whether this is the first process of a launch, which alone writes to the terminal."""
    return os.environ.get("RANK", "0") == "0"


class Pace:
    """Says when the next line is due. The pauses grow, so that a log of days stays short."""

    def __init__(self) -> None:
        self.begun = self.said = time.monotonic()

    def due(self) -> bool:
        now = time.monotonic()
        # A quarter of the time so far, within `FIRST` and `LAST`.
        if now - self.said < min(LAST, max(FIRST, (now - self.begun) / 4)):
            return False
        self.said = now
        return True


class Progress:
    """Shows what is under way, how much of it is done, and the time left. A context manager.

    A terminal gets a bar, or a clock if `total` is None. Elsewhere, and on a dumb terminal, lines are written at the
    pace of `Pace`.
    Only the first process of a launch shows anything.

    what: one or a few words, such as `reading`.
    total: units of the whole work; 0 if `to` will tell.
    unit: their name; "%" shows shares.
    start: units done before, for example by an interrupted command.
    stream: by default stderr.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        *,
        start: int = 0,
        stream: TextIO | None = None,
        quiet: bool = False,
    ):
        self.what = what
        self.total = total
        self.unit = unit
        self.start = start
        self.done: float = start
        self.stream = stream or sys.stderr
        self.quiet = quiet or not first_process()
        self.pace = Pace()
        self.bar = None
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        # A terminal that cannot move its cursor, such as Emacs' shell, shows no bar, and gets lines.
        if self.stream.isatty() and (bar := self._make_bar()).console.is_interactive:
            self.bar = bar
            self.bar.start()
        elif self.total is None:
            threading.Thread(target=self._write_clock, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        if self.bar:
            self.bar.stop()
            self.bar = None

    def advance(self, count: float = 1, note: str = "") -> None:
        """`count` more units are done."""
        self.to(self.done + count, note)

    def to(
        self,
        done: float,
        note: str = "",
        *,
        details: Sequence[str] = (),
        total: float | None = None,
        left: float | None = None,
        end: bool = False,
    ) -> None:
        """`done` units of `total` are done, with those of before.

        note: text beside the count. details: more texts, the most important first; a terminal shows those
        that fit, and gets lines too. left: seconds, if they are known better than from the speed so far. end:
        write a line even if none is due.
        """
        self.done = done
        if total is not None:
            self.total = total
        if self.quiet:
            return

        if left is None and done > self.start and self.total:
            # The speed of this command alone, without what was done before.
            seconds = time.monotonic() - self.pace.begun
            left = (self.total - done) * seconds / (done - self.start)
        eta = f"ETA {duration(left)}" if left and left > 0 else ""
        count = self._write_count()
        if self.bar:
            room = self.bar.console.width - len(f"{self.what} ⠋ ") - BAR
            text = _join_fitting(room, [count, note], details, eta)
            self.bar.update(
                self.bar.task_ids[0], completed=done, total=self.total or None, text=text
            )
        if self.bar and not details:
            return
        if end or (self.pace.due() and done < (self.total or 0)):
            room = self.bar.console.width if self.bar else None
            self.say(_join_fitting(room, [f"{self.what} {count}", note], details, eta))

    def call(self, what: str) -> None:
        """Renames what is under way."""
        self.what = what
        if self.bar:
            self.bar.update(self.bar.task_ids[0], description=what)

    def say(self, line: str) -> None:
        """Writes a line, above the bar if there is one. A narrow terminal gets it in several."""
        if self.quiet:
            return
        if self.bar:
            console = self.bar.console
            lines = wrap_line(line, console.width)
            console.print(lines, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self.stream, flush=True)

    def _write_count(self) -> str:
        if self.unit == "%":
            return f"{self.done / self.total:4.0%}" if self.total else ""
        if not self.total:
            return f"{self.done:,} {self.unit}".rstrip()
        total = f"{self.total:,}"
        return f"{self.done:>{len(total)},}/{total} {self.unit}".rstrip()

    def _write_clock(self) -> None:
        """Without a terminal and a total: writes a line when one is due."""
        while not self.ended.wait(1.0):
            if self.pace.due():
                self.say(f"{self.what} … {duration(time.monotonic() - self.pace.begun)}")

    def _make_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        pace = TimeElapsedColumn() if self.total is None else BarColumn(bar_width=None)
        columns = [
            TextColumn("{task.description}", markup=False),
            SpinnerColumn(),
            pace,
            TextColumn("{task.fields[text]}", markup=False),
        ]
        bar = Bar(
            *columns,
            console=Console(file=self.stream, emoji=False),
            transient=True,
            refresh_per_second=4,
            # Prints to the terminal go above the bar; prints to a file stay there.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        text = self._write_count() if self.total else ""
        bar.add_task(self.what, total=self.total or None, completed=self.start, text=text)
        return bar


def _join_fitting(room: int | None, texts: Sequence[str], details: Sequence[str], eta: str) -> str:
    """The texts, the first of the details that fit into `room` columns, and the ETA if it fits, too.

    room: None for as many as there are.
    """
    fitting = list(details)
    line = _join_texts(*texts, *fitting, eta)
    while room is not None and len(line) > room and fitting:
        fitting.pop()
        line = _join_texts(*texts, *fitting, eta)
    if room is not None and len(line) > room:
        line = _join_texts(*texts)
    return line


def _join_texts(*texts: str) -> str:
    return "  ".join(text for text in texts if text)
