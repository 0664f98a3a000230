"""docs/delta_rules.md: its figures are the code's."""

from pathlib import Path

import pytest

from nalanda import NalandaConfig
from nalanda.config.load import shipped_recipes
from nalanda.convert.fla import FORMATS
from nalanda.model import FEATURE_MAPS, MIXERS
from nalanda.report.tables import LENGTH, SHAPE

PAGE = (Path(__file__).parents[2] / "docs" / "delta_rules.md").read_text(encoding="utf-8")
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.splitlines()
    if line.count("|") == 9 and "`" in line
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_mixers(row):
    name, equation, parameters, mflops, state, recipes, theirs, source = (
        cell.strip("`") for cell in row
    )
    config = NalandaConfig(mixer=name, **SHAPE)
    mixer = config.distinct_mixers()[name]
    assert equation.split(":")[-1].strip() in MIXERS[name].equation
    assert MIXERS[name].source.split()[-1] in source
    assert parameters == f"{sum(p.numel() for p in mixer.parameters()) / 1e6:.2f} M"
    assert mflops == f"{mixer.flops(LENGTH) / 1e6:.2f}"
    assert state == f"{config.state_bytes(LENGTH) / 1024:.0f}"
    assert set(recipes.split("`, `")) <= shipped_recipes().keys()
    assert theirs not in FORMATS or FORMATS[theirs].mixer == name


def test_rows_and_maps_are_all_there():
    assert len(ROWS) == 6
    assert all(f"`{name}`" in PAGE.split("## Maps")[1] for name in FEATURE_MAPS)
