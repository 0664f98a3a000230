"""`nalanda-lab train`: every row is there. Speeds are not judged."""

from pathlib import Path

import pytest
from nalanda_lab.speed.train import KINDS, OURS, bench_train

from nalanda.common.errors import InputError


@pytest.mark.slow
def test_models_of_two_checkouts_take_turns(tmp_path):
    checkout, file = Path(__file__).parents[2], tmp_path / "figures.json"
    rows = bench_train(str(checkout), threads=1, rounds=1, json=file)["rows"]
    assert [row["model"] for row in rows] == [f"{name}, {kind}" for name in OURS for kind in KINDS]
    assert all(row["tokens_per_second"] > 0 and row["ratio"] > 0 for row in rows)
    assert file.is_file()


def test_against_something_else(tmp_path):
    with pytest.raises(InputError, match="no checkout of Nalanda"):
        bench_train(str(tmp_path))
