"""What measurements share: progress, sides that take turns, a table, and a file for the figures."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.table import Table

from nalanda.common.errors import output_file
from nalanda.common.progress import Progress

T = TypeVar("T")


def track(items: Collection[T], what: str, *, quiet: bool = False) -> Iterator[T]:
    """The items, with a `Progress` over their count."""
    with Progress(what, len(items), quiet=quiet) as progress:
        for item in items:
            yield item
            progress.advance()


def take_turns(
    sides: dict[T, Callable[[], float]], rounds: int, what: str, warm: int = 1
) -> dict[T, list[float]]:
    """The seconds of each side in so many rounds, after `warm` others. A side measures itself once.

    Every second round goes in the other order, so that no side always follows the same one.
    """
    seconds: dict[T, list[float]] = {name: [] for name in sides}
    for i in track(range(-warm, rounds), what):
        for name in sides if i % 2 else reversed(sides):
            took = sides[name]()
            if i >= 0:
                seconds[name].append(took)
    return seconds


def figures_file(name: str | Path | None) -> Callable[[Any], None]:
    """Writes figures to the file of `--json`, if it is given. Raises `InputError` for a file that cannot be."""
    file = None if name is None else output_file(name, "--json")

    def write(figures: Any) -> None:
        if file is not None:
            file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    return write


def plain_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, **options: Any
) -> Table:
    """A table whose columns but the first `left` are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, **options)
    for i, head in enumerate(header):
        side = "left" if i < left else "right"
        table.add_column(head, justify=side, no_wrap=i < left)
    for row in rows:
        table.add_row(*row)
    return table
