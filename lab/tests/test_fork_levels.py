"""The page of the fork experiment has the figures of its records."""

import pytest
from nalanda_lab import fork_levels
from pages import ROOT

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
    control = fork_levels.write_gap(fork_levels.gap(records, "softmax", 80, "own", "held"))
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
