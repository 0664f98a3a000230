"""NaLa's exponent before training: its page has the figures of the records, and the records those of the code."""

import json
import math

import pytest
import torch
from nalanda_lab import exponents, fork_levels
from pages import ROOT

from nalanda.config.load import load_config
from nalanda.config.model import build_model_config

PAGE = (ROOT / "docs/norm_awareness.md").read_text(encoding="utf-8")
RECORDS = json.loads((ROOT / "lab/records/exponents.json").read_text(encoding="utf-8"))
LARGE = [RECORDS[name] for name in exponents.RECIPES]
SMALL = [record for name, record in RECORDS.items() if name not in exponents.RECIPES]
FIRST = "| ‖q‖ before training |"


def written(records: list[dict], key: str, digits: int) -> str:
    """The mean over models, and the largest deviation of one of them, as the page writes both."""
    mean = sum(record[key]["mean"] for record in records) / len(records)
    return f"{mean:.{digits}f} ± {max(record[key]['sd'] for record in records):.{digits}f}"


def test_the_page_has_the_figures_of_the_records():
    rows = [FIRST + "".join(f" {written(each, 'length', 1)} |" for each in (LARGE, SMALL))]
    for name in exponents.MAPS:
        cells = "".join(
            f" {written(each, name, 2 if name == 'nala' else 3)} |" for each in (LARGE, SMALL)
        )
        rows.append(f"| p of `{name}` |{cells}")
    assert [row for row in rows if row not in PAGE] == []


def test_the_text_has_the_limits_of_the_exponent_and_the_trained_heads():
    ends = [
        p
        for mixer in fork_levels.MIXERS
        for p in fork_levels.own_exponents(fork_levels.read_tar(exponents.TRAINED), mixer)
    ]
    assert f"a mean p of {min(ends):.2f} to {max(ends):.2f}" in PAGE
    assert f"shorter than {math.atanh(4.3 / 3 - 0.5):.1f} have a p below 4.3" in PAGE
    assert f"{1 - math.tanh(4.2) ** 2:.3f}" == "0.001", "a thousandth of the slope at 0"


def test_three_maps_have_one_exponent():
    lengths = torch.linspace(0, 10, 50)
    paper = exponents.exponent("nala_paper", lengths, 128)
    torch.testing.assert_close(paper, 3 * (0.5 + lengths.tanh()))
    for name in ("nala_released", "nala_code"):
        assert torch.equal(exponents.exponent(name, lengths, 128), paper)
    mine = exponents.exponent("nala", lengths, 128)
    torch.testing.assert_close(mine, 2 * (0.5 + (lengths / math.sqrt(128)).tanh()))


@pytest.mark.parametrize("name", exponents.RECIPES)
def test_a_layer_of_a_recipe_has_the_recorded_lengths(name):
    config = build_model_config(load_config(name, ["model.num_hidden_layers=1"]))
    found = exponents.measure(config)
    assert found["length"]["mean"] == pytest.approx(RECORDS[name]["by_layer"][0], abs=0.15)
    assert found["nala_paper"]["sd"] < 0.003 < 0.03 < found["nala"]["sd"]


def test_the_command_draws_and_writes(tmp_path, monkeypatch):
    small = {name: config for name, config in exponents.configs().items() if "2 M" in name}
    monkeypatch.setattr(exponents, "configs", lambda: small)
    monkeypatch.setattr(exponents, "RECIPES", ())
    drawn = []
    monkeypatch.setattr(exponents, "draw", lambda records, file: drawn.append((len(records), file)))
    found = exponents.exponents(str(tmp_path))
    assert drawn == [(3, tmp_path / "norm_awareness.png")]
    assert json.loads((tmp_path / "exponents.json").read_text()) == found
    for name, record in found.items():  # the same model on another processor
        assert record["length"]["mean"] == pytest.approx(RECORDS[name]["length"]["mean"], abs=1e-3)


def test_the_picture_is_drawn(tmp_path):
    exponents.draw(RECORDS, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
