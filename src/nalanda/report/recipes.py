"""The table of recipes. Imports torch only for recipes whose figures are not stored."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from nalanda.common.files import sha256_of
from nalanda.common.terminal import plain_console
from nalanda.common.text import beside_least, size
from nalanda.config.load import shipped_recipes as recipe_files
from nalanda.report.runs import layers

STORED = Path(__file__).with_name("recipes.json")
"""A row of the table for each recipe that ships, with the SHA-256 sum of its file. `make tables` writes it."""

WIDTHS = {"parameters": 100, "tokens": 120, "training GFLOPs a token": 150}
"""The narrowest terminals, in characters, that show these columns of the recipes."""

LEGEND = (
    "MiB: a sequence's state; where it grows, after a row of training. *: larger than in a recipe of the same "
    "mixers and size, so a gain may be the state's."
)


def recipe_rows() -> list[dict[str, Any]]:
    """A row for each recipe that ships with Nalanda: the stored one, unless the file is new or changed."""
    stored = json.loads(STORED.read_bytes())
    rows = []
    for name, file in recipe_files().items():
        entry = stored.get(name, {})
        is_current = entry.get("sha256") == sha256_of(file)
        rows.append(entry["row"] if is_current else compute_row(name, file))
    return [row | {"state": row["state"] + _larger(row, rows)} for row in rows]


def _larger(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """How many times a state is the smallest among recipes of the same mixers and size; "" up to 1.02 times.

    A gain of such a recipe may be the state's.
    """
    alike = [
        x["state bytes"]
        for x in rows
        if x["mixer"] == row["mixer"]
        and abs(x["parameter count"] / row["parameter count"] - 1) < 0.02
    ]
    return beside_least(row["state bytes"], alike)


def store_rows() -> None:
    """Writes the rows of all recipes to `STORED`."""
    table = {
        name: {"sha256": sha256_of(file), "row": compute_row(name, file)}
        for name, file in recipe_files().items()
    }
    STORED.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def compute_row(name: str, file: Path) -> dict[str, Any]:
    """The row of a recipe, from its model on the meta device."""
    from nalanda.report.info import info  # takes seconds: it imports torch

    f = info(str(file), [], memory=False)
    state, billions = f["state_bytes_per_sequence"], f["tokens"] / 1e9
    grows = f" at {f['seq_len']}, growing" if f["state_grows"] else ""
    return {
        "recipe": name,
        "mixer": layers(f["mixer"] or "") or f["model"],
        "feature map": f["feature_map"] or "–",
        "parameters": f"{f['parameters'] / 1e6:.1f} M",
        "training GFLOPs a token": f"{f['training_flops_per_token'] / 1e9:.3f}",
        "state": "–" if state is None else size(state) + grows,
        "tokens": f"{billions:.2f} B" if billions > 0.1 else f"{1000 * billions:.2f} M",
        "parameter count": f["parameters"],
        "state bytes": state,
    }


def print_recipes(rows: list[dict[str, Any]]) -> None:
    """Prints the rows of `recipe_rows`, with the columns for which the terminal is wide enough."""
    console = plain_console()
    columns = ["recipe", "mixer", "map", "MiB"]
    columns += [name for name, width in WIDTHS.items() if console.width >= width]
    table_rows = []
    for row in rows:
        # Each kind of layer of a hybrid has its line.
        by_line = row["mixer"].replace(", ", "\n")
        state = "–" if row["state bytes"] is None else f"{row['state bytes'] / 2**20:.1f}"
        state += "*" if row["state"].endswith("×") else ""
        table_rows.append(row | {"mixer": by_line, "map": row["feature map"], "MiB": state})
    print_table(console, "Recipes", table_rows, columns)
    console.print(LEGEND, style="dim")


def print_table(
    console: Console, title: str, rows: list[dict[str, Any]], columns: list[str]
) -> None:
    """Prints the first of the columns, as many as fit without a break inside a word."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    room = console.width
    for i, column in enumerate(columns):
        cells = [column, *(str(row[column]) for row in rows)]
        longest = max(cell_len(word) for cell in cells for word in cell.split())
        room -= longest + 3  # with the lines around it
        if room < 0:
            columns = columns[:i]
            break
        table.add_column(column, no_wrap=i == 0, overflow="fold", min_width=longest)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console.print(table)
