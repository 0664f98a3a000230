"""The page on widths has the figures of its records."""

import json
import math
import tarfile

import pytest
from nalanda_lab import width
from pages import ROOT

from nalanda.config.load import parse_yaml

PAGE = " ".join((ROOT / "lab/pages/width.md").read_text(encoding="utf-8").split())
STUDY = parse_yaml(width.STUDY.read_text(encoding="utf-8"), "width.yaml")
TITLES = {"gated_deltanet + nala": "Gated DeltaNet + NaLa", "transnormer": "TransNormer"}


@pytest.fixture(scope="module")
def records():
    """The records of each file, as lists."""
    with tarfile.open(ROOT / "lab/records/width.tar.xz") as tar:
        return {
            member.name.removesuffix(".jsonl"): [json.loads(line) for line in file]
            for member in tar
            if (file := tar.extractfile(member))
        }


def test_best_rates_and_losses(records):
    for row in width.best_rates(STUDY, records["transfer"]):
        name = f"{TITLES[row['mixer']]}, {'µP' if row['parametrization'] == 'mup' else 'standard'}"
        rates = " | ".join(f"{rate:.4f}" for rate in row["rates"])
        losses = ", ".join(f"{loss:.2f}" for loss in row["losses"])
        spread = f"{row['spread']:.2f}"
        spread = f"**{spread}**" if row["parametrization"] == "mup" else spread
        assert f"| {name} | {rates} | {spread} | {losses} |" in PAGE


def test_gains(records):
    found = width.gains(STUDY, records["transfer"])
    assert len(found) == 8
    cells = {(name, size, rates): gap.text() for name, size, rates, gap in found}
    for name, title in TITLES.items():
        for size in (256, 512):
            both = " | ".join(cells[name, size, rates] for rates in ("best", "narrow"))
            assert f"| {title}, width {size} | {both} |" in PAGE


def test_transnormers_rate_goes_on_falling(records):
    """The loss at 0.002 less that at 0.004, and the vertex at 1024 with the curvature of 512."""
    losses = width.losses_by_rate(STUDY, records["transfer"])
    places = [STUDY["rates"].index(rate) for rate in (0.002, 0.004)]
    found = [losses["transnormer", "mup", size] for size in (128, 256, 512)]
    differences = [each[places[0]] - each[places[1]] for each in found]
    wide = {
        r["settings"]["rate"]: r["budgets"][-1]["loss"]
        for r in records["width_1024"]
        if r["head"] == "1/√c" and r["settings"]["model"]["mixer"] != "gated_deltanet"
    }
    differences.append(wide[0.002] - wide[0.004])
    assert ", ".join(f"{x:+.3f}".replace("-", "−") for x in differences) in PAGE

    left, middle, right = (found[2][i] for i in (places[0] - 1, *places))
    curvature = left - 2 * middle + right  # of an octave, twice the parabola's factor
    vertex = 0.002 * 2 ** (0.5 + differences[3] / curvature)
    narrow = width.best_rate(STUDY["rates"], found[0])
    assert f"{vertex:.4f}" in PAGE
    assert f"{narrow / vertex:.1f}" == "1.6"
    assert "1.6 times" in PAGE
    assert narrow / vertex > math.sqrt(2)
