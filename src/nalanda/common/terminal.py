"""The terminal as tables and lines see it: plain text, in which brackets and colons stand for themselves."""

import os
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def plain_console() -> Console:
    """The terminal, for text without rich's markup."""
    return Console(emoji=False, markup=False, highlight=False)


def stdout() -> Console:
    """`plain_console`. Where there is no terminal, nor COLUMNS, lines may be as long as they need."""
    console = plain_console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 1000
    return console


def narrowed(table: Table, console: Console, dispensable: Sequence[str]) -> Table:
    """`table` without the first of the `dispensable` columns, as many as the console is too narrow for."""
    unlimited = console.options.update(max_width=1000)
    for heading in dispensable:
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        columns = (column for column in table.columns if column.header != heading)
        table.columns = Table(*columns).columns  # which numbers them anew
    return table
