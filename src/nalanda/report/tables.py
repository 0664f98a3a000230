"""Tables of recipes (`recipes.py`), token mixers and feature maps, generated from the code for `nalanda info`."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nalanda.common.terminal import plain_console
from nalanda.common.text import markdown_table
from nalanda.model import FEATURE_MAPS, MIXERS, NalandaConfig, build_feature_map
from nalanda.model.options import is_option
from nalanda.report.keys import key_rows
from nalanda.report.recipes import print_recipes, print_table, recipe_rows, store_rows
from nalanda.testing import build, norm_awareness, normal

SHAPE = {"hidden_size": 1024, "num_heads": 8, "num_hidden_layers": 1}
LENGTH = 2048
NORMS = "‖q‖ / ‖k‖"


def mixer_rows() -> list[dict[str, Any]]:
    """A row for each mixer: its equation, and the cost of one layer of 8 heads of 128."""
    rows = []
    for name, kind in MIXERS.items():
        config = NalandaConfig(mixer=name, **SHAPE)
        mixer = config.distinct_mixers()[name]
        # Two lengths tell whether the state grows.
        state, longer = (config.state_bytes(T, torch.bfloat16) for T in (LENGTH, 2 * LENGTH))
        rows.append(
            {
                "mixer": name,
                "computes": kind.equation,
                "source": kind.source,
                "feature map": kind.rule.map or "–",
                "convolution": kind.rule.conv or "–",
                "gate": {None: "–", False: "off", True: "on"}[kind.rule.gated],
                "MFLOPs a token": f"{mixer.flops(LENGTH) / 1e6:.2f}",
                "state, KiB": f"{state / 1024:,.0f}" + (" and growing" if longer > state else ""),
                NORMS: norms(name, kind.rule.map),
                "options": options(kind),
            }
        )
    return rows


def map_rows() -> list[dict[str, Any]]:
    """A row for each feature map."""
    rows = []
    for name, kind in FEATURE_MAPS.items():
        phi = build_feature_map(name, num_heads=1, head_dim=128)
        features = {128: "K", 256: "2K"}.get(phi.feature_dim, str(phi.feature_dim))
        rows.append(
            {
                "feature_map": name,
                "φ": phi.equation,
                "source": phi.source,
                "features": features,
                "φ(q)·φ(k) ≥ 0": "yes" if phi.nonnegative else "no",
                NORMS: norms("deltanet", name),
                "options": options(kind),
            }
        )
    return rows


def all_rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of all three tables."""
    return {"recipes": recipe_rows(), "mixers": mixer_rows(), "feature_maps": map_rows()}


def norms(mixer: str, feature_map: str | None) -> str:
    """`norm_awareness` of an untrained layer with two heads of 64, whose queries have a spread near 1."""
    layer: Any = build(mixer, feature_map, num_hidden_layers=1, head_dim=64).model.layers[0]
    # x [B, T, D] = [2, 32, 24]; D is that of `build`
    changes = norm_awareness(layer.mixer, normal(2, 32, 24))
    return " / ".join(f"{change:.2f}" if change >= 1e-3 else "–" for change in changes)


def options(kind: Any) -> str:
    """The keyword-only options of a constructor, each with its default."""
    parameters = inspect.signature(kind).parameters.values()
    named = [f"{p.name}={p.default}" for p in parameters if is_option(p)]
    return ", ".join(named) or "–"


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, without the columns of `LEFT_OUT`."""
    rows = [{name: cell for name, cell in row.items() if name not in LEFT_OUT} for row in rows]

    header = list(rows[0])
    code = header[0]
    body = [[f"`{row[code]}`", *map(str, list(row.values())[1:])] for row in rows]
    return markdown_table(header, body)


def print_tables(tables: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the tables of `all_rows`."""
    console = plain_console()
    recipes, mixers, maps = tables.values()
    print_recipes(recipes)

    mixers = [row | {"taps": row["convolution"]} for row in mixers]
    columns = ["mixer", "feature map", "taps", "gate", "MFLOPs a token", "state, KiB", NORMS]
    title = f"Token mixers: one layer of 8 heads × 128 at length {LENGTH}"
    print_table(console, title, mixers, columns)
    print_table(console, "What they compute", mixers, ["mixer", "computes", "source"])

    columns = [name for name in maps[0] if name not in ("options", "source")]
    print_table(console, "Feature maps", maps, columns)


TABLES: dict[str, dict[str, Callable[[], list[dict[str, Any]]]]] = {
    "docs/mixers.md": {"mixers": mixer_rows, "maps": map_rows},
    "docs/recipes.md": {"recipes": recipe_rows},
    # Without keys of `data.mixture` that mean the same as those of `data`.
    "docs/keys.md": {
        "keys": lambda: [x for x in key_rows() if not x["meaning"].startswith("As `data.")]
    },
}
"""The generated tables of each page, by the name between `<!-- -->` above them."""

LEFT_OUT = {"training GFLOPs a token", "tokens", "source", "parameter count", "state bytes"}
"""Columns that pages leave out: `nalanda info` prints them, and docs/formulas.md has the sources."""


def updated(page: str, text: str) -> str:
    """The text of a page with its tables made anew.

    Raises ValueError for a table that is not there.
    """
    for name, rows in TABLES[page].items():
        table = f"<!-- {name} -->\n{markdown(rows())}\n<!-- end -->"
        pattern = rf"<!-- {name} -->\n.*?<!-- end -->"
        text, count = re.subn(pattern, lambda _, table=table: table, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(
                f"{page}: needs one place for its table: <!-- {name} --> and <!-- end -->"
            )
    return text


if __name__ == "__main__":  # `make tables`
    store_rows()
    for name in TABLES:
        page = Path(name)
        page.write_text(updated(name, page.read_text(encoding="utf-8")), encoding="utf-8")
