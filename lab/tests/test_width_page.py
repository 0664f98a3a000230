"""The page on widths has the figures of its records."""

import json
import math
import tarfile

import pytest
from nalanda_lab import width
from pages import ROOT

PAGE = " ".join((ROOT / "lab/pages/width.md").read_text(encoding="utf-8").split())
TITLES = {"gated_deltanet + nala": "Gated DeltaNet + NaLa", "transnormer": "TransNormer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("width")
    with tarfile.open(ROOT / "lab/records/width.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def losses(folder):
    losses, tokens = width.read_losses(folder)
    assert tokens == 999424
    return losses


def test_best_rates_and_losses(losses):
    rows = width.best_rates(losses)
    assert len(rows) == 4
    for row in rows:
        name = f"{TITLES[row['mixer']]}, {'µP' if row['parametrization'] == 'mup' else 'standard'}"
        rates = " | ".join(f"{rate:.4f}" for rate in row["rates"])
        losses = ", ".join(f"{loss:.2f}" for loss in row["losses"])
        spread = f"{row['spread']:.2f}"
        spread = f"**{spread}**" if row["parametrization"] == "mup" else spread
        assert f"| {name} | {rates} | {spread} | {losses} |" in PAGE


def test_gains(losses):
    found = width.gains(losses)
    assert len(found) == 8
    cells = {(name, size, rates): width.write_mean(gap) for name, size, rates, gap in found}
    for name, title in TITLES.items():
        for size in (256, 512):
            both = " | ".join(cells[name, size, rates] for rates in ("best", "narrow"))
            assert f"| {title}, width {size} | {both} |" in PAGE


def test_transnormers_rate_goes_on_falling(losses, folder):
    """The loss at 0.002 less that at 0.004, and the vertex at 1024 with the curvature of 512."""
    series = [losses["transnormer", "mup", size] for size in (128, 256, 512)]
    found = [width.means_of(each) for each in series]
    differences = [each[0.002] - each[0.004] for each in found]
    wide = {
        r["settings"]["rate"]: r["budgets"][-1]["loss"]
        for r in map(json.loads, (folder / "width_1024.jsonl").read_text().splitlines())
        if r["head"] == "1/√c" and r["settings"]["model"]["mixer"] != "gated_deltanet"
    }
    differences.append(wide[0.002] - wide[0.004])
    assert ", ".join(f"{x:+.3f}".replace("-", "−") for x in differences) in PAGE

    left, middle, right = (found[2][rate] for rate in (0.001, 0.002, 0.004))
    curvature = left - 2 * middle + right  # of an octave, twice the parabola's factor
    vertex = 0.002 * 2 ** (0.5 + differences[3] / curvature)
    narrow = width.best_rate(list(found[0]), list(found[0].values()))
    assert f"{vertex:.4f}" in PAGE
    assert f"{narrow / vertex:.1f}" == "1.6"
    assert "1.6 times" in PAGE
    assert narrow / vertex > math.sqrt(2)
