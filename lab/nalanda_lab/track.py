"""What measurements share: conditions, progress, sides that take turns, a table, and a file for the figures."""

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.table import Table

from nalanda.common.errors import output_file
from nalanda.common.files import write_atomically
from nalanda.common.progress import Progress

T = TypeVar("T")


def track(items: Collection[T], what: str) -> Iterator[T]:
    """The items, with a `Progress` over their count."""
    with Progress(what, len(items)) as progress:
        for item in items:
            yield item
            progress.advance()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """In this context torch has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def on_cpu(
    threads: int, what: str, set_up: Callable[[], object] = lambda: None, **facts: Any
) -> Iterator[dict[str, Any]]:
    """In this context torch has so many threads. Prints what is measured, and gives its conditions, with `facts`.

    set_up: called with these threads, before the route of products is told.
    """
    # Older code has no routes, and `speed.train` imports this file there.
    from nalanda.common.products import product_route
    from nalanda.common.versions import cpu_model, list_versions, versions

    with torch_threads(threads):
        set_up()
        machine, products, used = cpu_model(), product_route(), versions()
        print(
            f"{what}; {threads} threads of {machine}, {products} products, {list_versions([used])}"
        )
        conditions = {"machine": machine, "threads": threads, "products": products}
        yield conditions | {"versions": used} | facts


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


def ratios_of(a: Iterable[float], b: Iterable[float]) -> list[float]:
    """The ratios within the rounds: what else the machine does hits both sides."""
    return [x / y for x, y in zip(a, b, strict=True)]


def median_ratio(a: Iterable[float], b: Iterable[float]) -> float:
    return statistics.median(ratios_of(a, b))


def figures_file(name: str | Path | None) -> Callable[[Any], None]:
    """Writes figures to the file of `--json`, if it is given. Raises `InputError` for a file that cannot be."""
    file = None if name is None else output_file(name, "--json")

    def write(figures: Any) -> None:
        if file is not None:
            file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    return write


def publish(folder: Path, name: str, text: str, content: dict[str, Any]) -> None:
    """Writes a text in Markdown as NAME.md and `content` as NAME.json, and prints the text."""
    figures = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(folder / f"{name}.json", figures + "\n")
    write_atomically(folder / f"{name}.md", text + "\n")
    print(f"{text}\n\n{name}.md, .json and figures in {folder}")


def plain_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, **options: Any
) -> Table:
    """A table whose columns but the first `left` are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, **options)
    for i, head in enumerate(header):
        side = "left" if i < left else "right"
        table.add_column(head, justify=side, no_wrap=i < left, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
