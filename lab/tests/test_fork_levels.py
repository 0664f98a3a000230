"""The page of the fork experiment has the figures of its records."""

import pytest
from nalanda_lab import fork_levels
from nalanda_lab.estimate import write_gap
from nalanda_lab.fork import FIRST
from pages import ROOT

from nalanda.config.load import read_yaml

PAGE = (ROOT / "lab/pages/study.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def records():
    return fork_levels.read_tar(ROOT / "lab/records/fork.tar.xz")


def test_every_printed_row_is_on_the_page(records):
    rows = [line for line in fork_levels.report(records).splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| own − held")]
    assert len(rows) == 7 + 3 + 4
    assert [row for row in rows if row not in PAGE] == []


def test_the_text_has_the_controls_figures(records):
    control = write_gap(fork_levels.gap(records, "softmax", 80, "own", "held"), 5)
    assert control in PAGE
    assert "sd over seeds 0.144; 10 of 82 documents have 53 %" in fork_levels.shares(records)
    assert "60 % of seed 3 less seed 1" in fork_levels.shares(records)
    assert "0.144" in PAGE
    assert "53 % of own − held, and 60 %" in PAGE
    ends = [p for mixer in fork_levels.MIXERS for p in fork_levels.own_exponents(records, mixer)]
    assert f"{min(ends):.2f} to {max(ends):.2f}" in PAGE


def test_the_gap_at_80_percent_is_the_sum_of_its_parts(records):
    for mixer in fork_levels.MIXERS:
        whole, first, second = (
            fork_levels.gap(records, mixer, 80, a, b).mean
            for a, b in (("own", "blind"), ("own", "free"), ("free", "blind"))
        )
        assert whole == pytest.approx(first + second, abs=1e-12)


def test_every_gap_is_drawn(tmp_path, records):
    fork_levels.draw(records, read_yaml(FIRST), tmp_path / "fork.png")
    assert (tmp_path / "fork.png").stat().st_size > 10_000
