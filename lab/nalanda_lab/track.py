"""Items of a long measurement, with its progress."""

from collections.abc import Collection, Iterator
from typing import TypeVar

from nalanda.common.progress import Progress

T = TypeVar("T")


def track(items: Collection[T], what: str, *, quiet: bool = False) -> Iterator[T]:
    """The items, with a `Progress` over their count."""
    with Progress(what, len(items), quiet=quiet) as progress:
        for item in items:
            yield item
            progress.advance()
