"""`nalanda-lab train`: every row is there. Speeds are not judged."""

from pathlib import Path

import pytest
from nalanda_lab.speed.train import KINDS, OURS, bench_train

from nalanda.common.errors import InputError


@pytest.mark.slow
def test_all_models_take_turns(tmp_path):
    checkout, file = Path(__file__).parents[2], tmp_path / "figures.json"
    rows = {
        row["model"]: row
        for row in bench_train(threads=1, rounds=1, against=checkout, json=file)["rows"]
    }
    ours = {f"{name}, {kind}" for name in OURS for kind in KINDS}
    peers = {"Qwen3.5, dense", "Llama, dense", "Llama, packed"}
    assert rows.keys() == ours | peers | {f"earlier {name}" for name in ours}
    for name, row in rows.items():
        assert row["tokens_per_second"] > 0
        assert row["ratios"].keys() == {"Llama", "Qwen3.5"} | (
            {"earlier"} if name in ours else set()
        )
    assert file.is_file()


def test_against_something_else(tmp_path):
    with pytest.raises(InputError, match="no checkout of Nalanda"):
        bench_train(against=tmp_path)
