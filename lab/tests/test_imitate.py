"""`nalanda-lab imitate`: NaLa's exponent lets ‖q‖ set the sharpness; the teacher and the readouts by hand."""

import json
import re

import pytest
import torch
from nalanda_lab.imitate import CONSTANTS, READOUTS, SEEDS, Student, draw, imitate, imitate_once
from pages import ROOT

from nalanda.model import FEATURE_MAPS
from nalanda.model.ops import delta_rule

SIZE = {"steps": 100, "width": 16}
"""Smallest size that decides: at 60 steps some seeds still learn faster with a constant."""


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


@pytest.mark.parametrize("constant", CONSTANTS)
def test_nala_beats_a_constant_exponent_in_all_seeds(constant):
    nala, other = (imitate_once(name, "denominator 24", **SIZE) for name in ("nala", constant))
    gaps = [a - b for a, b in zip(nala, other, strict=True)]
    assert len(gaps) == 3
    assert all(gap > 0.002 for gap in gaps), gaps


def test_only_the_length_of_a_query_sets_the_teachers_sharpness():
    q, k, v, target = draw(generators(2), 64, 8, 24, 16)
    norm = q.norm(dim=-1)
    assert 0.5 <= norm.min() < 0.6
    assert 7 < norm.max() <= 8
    weights = (q @ k.mT).softmax(-1)
    torch.testing.assert_close(weights @ v, target)
    entropy = torch.special.entr(weights).sum(-1)
    assert entropy[norm < 1].mean() > 3 * entropy[norm > 4].mean()


def test_the_delta_readout_is_that_of_the_op():
    q, k, v, _ = (x.double() for x in draw(generators(2), 3, 5, 24, 8))
    student = Student("silu", "delta rule 24", 8, generators(2)).double()
    silu = torch.nn.functional.silu
    # [rows, T, seeds, width]; the op reads every query behind the last key.
    keys, queries = (
        silu(x @ weight).transpose(1, 2)
        for x, weight in ((k, student.k_weight), (q, student.q_weight))
    )
    state = delta_rule(
        *(keys, keys, v.transpose(1, 2), torch.full(keys.shape[:3], 0.5, dtype=torch.float64)),
        qk_norm="l2",
        output_final_state=True,
    )[1]
    unit = queries / (queries.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    expected = torch.einsum("btsk,bskv->bstv", unit, state)
    torch.testing.assert_close(student(q, k, v), expected)


def test_the_table_has_every_map(capsys, tmp_path):
    file = tmp_path / "scores.json"
    found = imitate(steps=1, width=4, json=file)
    assert json.loads(file.read_text()) == found
    assert set(found["delta rule 24"]) == {"softmax", *CONSTANTS, *FEATURE_MAPS}
    assert not {"silu", "soft"} & set(found["denominator 64"])
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in FEATURE_MAPS)
    assert text.count("nala less p = ") == len(READOUTS) * len(CONSTANTS)
    assert all(len(each) == SEEDS for scores in found.values() for each in scores.values())


def test_the_page_has_the_means_of_the_record():
    record = json.loads((ROOT / "lab/records/imitate.json").read_text(encoding="utf-8"))
    page = (ROOT / "lab/pages/analysis.md").read_text(encoding="utf-8").replace("**", "")
    rows = {}
    for row in re.findall(r"^\| ([^|]*[a-z][^|]*) \| (.*) \|$", page, re.MULTILINE):
        cells = [cell.strip().split(", ") for cell in row[1].split("|")]
        names = re.findall(r"`(\w+)`", row[0]) or ["softmax"]
        if constant := re.search(r"p = [\d.]+", row[0]):
            names = [f"nala, {constant[0]}"]
        for i, name in enumerate(names):
            rows[name] = [cell[min(i, len(cell) - 1)] for cell in cells]
    for readout, cells in zip(READOUTS, range(3), strict=True):
        for name, values in record[readout].items():
            assert rows[name][cells] == f"{sum(values) / 3:.3f}", (readout, name)
