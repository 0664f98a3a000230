"""docs/delta_rules.md: its figures are the code's."""

from pathlib import Path

import pytest

from nalanda import NalandaConfig
from nalanda.config.load import shipped_recipes
from nalanda.convert.fla import FORMATS
from nalanda.report.tables import SHAPE

PAGE = (Path(__file__).parents[2] / "docs" / "delta_rules.md").read_text(encoding="utf-8")
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.splitlines()
    if line.count("|") == 5 and "`" in line
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_mixers(row):
    name, parameters, recipes, theirs = (cell.strip("`") for cell in row)
    mixer = NalandaConfig(mixer=name, **SHAPE).distinct_mixers()[name]
    assert parameters == f"{sum(p.numel() for p in mixer.parameters()) / 1e6:.2f} M"
    assert set(recipes.split("`, `")) <= shipped_recipes().keys()
    assert theirs not in FORMATS or FORMATS[theirs].mixer == name


def test_rows_are_all_there():
    assert len(ROWS) == 8
