"""`nalanda study claims`: the measures on cases made by hand, the rule, and the report from records alone."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from nalanda_lab.studies import claims
from nalanda_lab.studies.claims_report import CARE, PAGES, Check, page_outcome, report_claims
from nalanda_lab.sweep import records

from nalanda.common.errors import InputError
from nalanda.model import NalandaConfig
from nalanda.model.mixers import build_mixer
from nalanda.model.soft import newton_inverse


def mixer(name: str, **keys):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
    }
    found = build_mixer(
        name, NalandaConfig(vocab_size=8, mixer=name, conv_size=0, **sizes, **keys), 0
    )
    for module in found.modules():
        for key, value in getattr(module, "initial", dict)().items():
            getattr(module, key).data.copy_(value)
    return found.double()


X = torch.randn(3, 32, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_spearman_is_scipys():
    from scipy.stats import spearmanr

    x, y = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0))
    y = y + x
    wanted = [spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert claims.spearman(x, y).tolist() == pytest.approx(wanted)
    assert claims.spearman(x, -x.exp()).tolist() == pytest.approx([-1] * 4)


@pytest.mark.parametrize(
    ("name", "keys", "moves"),
    [
        ("linear_attention", {"feature_map": "relu"}, False),  # the denominator cancels the norm
        ("nala", {}, True),
        (
            "nala",
            {"feature_map_options": {"power_norm": "raw"}},
            False,
        ),  # tanh 40 = 1: p is constant
    ],
)
def test_swapped_norms_matter_where_p_depends_on_them(name, keys, moves):
    layer = mixer(name, **keys)
    x = 3 * X if moves else 400 * X
    before = layer.weights(x)
    with claims.changed_norms([layer], claims.swapped):
        gap = (layer.weights(x) - before).abs().max()
    assert (gap > 1e-2) if moves else (gap < 1e-6)
    assert torch.equal(layer.weights(x), before)  # the context leaves nothing behind


def test_norms_are_swapped_between_rows():
    norm = torch.arange(6.0).view(2, 3, 1, 1)
    assert claims.swapped(norm).flatten().tolist() == [3, 4, 5, 0, 1, 2]
    assert claims.mean_norm(norm).flatten().tolist() == [2.5] * 6


def test_swapping_a_constant_p_changes_nothing():
    layer, found = mixer("nala"), []
    for change in (claims.mean_norm, lambda norm: claims.swapped(claims.mean_norm(norm))):
        with claims.changed_norms([layer], change):
            found.append(layer.weights(X))
    assert torch.equal(*found)


def test_entropy_against_norms():
    """By hand: equal weights are at 0, one weight at log n; scaling norms sharpens softmax attention only."""
    T = 8
    assert claims.below_uniform(torch.ones(1, 1, T, T).tril()).abs().max() < 1e-6
    assert claims.below_uniform(torch.eye(T)[None, None])[0, 0].exp().tolist() == pytest.approx(
        [5, 6, 7, 8]
    )
    softmax, relu = (
        claims.measure_norms(layer, 3 * X)
        for layer in (mixer("softmax"), mixer("linear_attention", feature_map="relu"))
    )
    below = [sum(row) for row in softmax["scaled"]]  # entropy less log n, by rising norms
    assert below == sorted(below, reverse=True)
    assert max(softmax["correlation"]) < -0.3
    assert max(softmax["swapped"]) > max(softmax["correlation"])
    assert relu["scaled"][0] == pytest.approx(relu["scaled"][-1], abs=1e-4)
    assert relu["swapped"] == pytest.approx(relu["correlation"])
    assert [len(head) for head in relu["bins"]] == [claims.BINS] * 2


def test_pola_at_powers_of_one():
    """At p = 1 the two streams' similarities differ by q·k, and the exponents come back."""
    layer = mixer("pola")
    before = layer.weights(X)
    with torch.no_grad(), claims.power_one(layer):
        q, _ = layer.feature_map(*(torch.randn(1, 4, 2, 8, dtype=torch.float64) for _ in "qk"))
        assert torch.equal(q[..., :8] * q[..., 8:], torch.zeros(1, 4, 2, 8, dtype=torch.float64))
        assert not torch.allclose(layer.weights(X), before)
    assert torch.equal(layer.weights(X), before)


def test_signs_by_hand():
    weights = torch.tensor([[1.0, 0, 0, 0], [2, -1, 0, 0], [3, -1, -1, 0], [1, 1, 0, -2]])[
        None, None
    ]
    assert claims.signs_by_row(weights, (1, 2, 4)) == {
        "negative": [0, 0.5, 0.25],
        "norm": [1, 3, 4],
    }


@pytest.mark.parametrize("condition", [10.0, 500.0, 1e5])
def test_newton_residuals_at_a_known_condition(condition):
    """‖A‖₁/σ_min = r of a diagonal A is its condition; σ_min leaves a residual of (1 − r⁻²)^(2²⁰)."""
    A = torch.diag(torch.logspace(0, -math.log10(condition), 6, dtype=torch.float64))[None]
    found = claims.inverse_residuals(A, newton_inverse(A, 20))
    residual = (1 - condition**-2) ** 2**20
    assert found["ratio"] == pytest.approx([condition])
    assert found["inverse"] == pytest.approx([residual], abs=1e-8)
    assert found["weighted"][0] <= residual + 1e-8  # the smallest directions hardly count
    Z = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    assert len(claims.newton_residuals(Z)["inverse"]) == 6


def test_the_rule():
    def outcome(values: list[float], side: str = "below", bound: float = 0.0) -> str:
        return Check("", values, side, bound).outcome()

    assert outcome([-1.0, -1.1, -0.9]) == outcome([1.0, 1.1, 0.9], "above") == "reproduces"
    assert outcome([1.0, 1.1, 0.9]) == outcome([0.2, 0.2], bound=0.1) == "does not"
    assert outcome([-1.0, 1.0]) == outcome([-1.0]) == outcome([0.0, 0.0]) == "cannot be told"
    mean, half = Check("", [1.0, 2.0, 3.0]).interval
    assert (mean, half) == (2, pytest.approx(2.4841, abs=1e-4))
    checks = [Check("", values) for values in ([-1.0, -1.1], [1.0, 1.1], [1.0, -1.0])]
    assert page_outcome(checks[:1]) == "reproduces"
    assert page_outcome(checks) == "does not"
    assert page_outcome(checks[::2]) == "cannot be told"


# ------------------------------ the command


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("claims"), random.Random(0)
    for part, count in (("train", 60), ("validation", 24)):
        (folder / "text" / part).mkdir(parents=True)
        words = [
            " ".join(draw.choices(["state", "gate", "query", "key", "norm"], k=60))
            for _ in range(count)
        ]
        lines = [
            json.dumps({"text": text, "meta": {"redpajama_set_name": "web"}}) for text in words
        ]
        (folder / "text" / part / "a.jsonl").write_text("\n".join(lines) + "\n")
    claims.measure_claims(folder / "out", text=str(folder / "text"), quick=True)
    return folder / "out"


@pytest.mark.slow
def test_records_alone_make_the_same_files(measured, tmp_path):
    found = records(measured / "claims.jsonl")
    assert list(found) == [claims.key(asked) for asked in claims.claim_settings(claims.QUICK)]
    assert all(record["cpu"] and record["threads"] == 1 for record in found.values())
    assert str(measured.parent) not in (measured / "claims.jsonl").read_text()
    first = {path.name: path.read_bytes() for path in report_claims(measured, quick=True)}
    assert set(first) == {
        "CLAIMS.md",
        *(f"{name}.{suffix}" for name in PAGES for suffix in ("png", "pdf")),
    }
    (tmp_path / "claims.jsonl").write_bytes((measured / "claims.jsonl").read_bytes())
    claims.measure_claims(tmp_path, quick=True)  # has every record: reads no text
    assert {path.name: path.read_bytes() for path in report_claims(tmp_path, quick=True)} == first


def test_words_are_kept_and_missing_pages_left_out(measured, tmp_path):
    kept = [
        line
        for line in (measured / "claims.jsonl").read_text().splitlines()
        if '"system": "MALA' in line
    ]
    (tmp_path / "claims.jsonl").write_text("\n".join(kept) + "\n")
    report_claims(tmp_path, quick=True)
    text = (tmp_path / "CLAIMS.md").read_text()
    assert text.startswith(CARE)
    assert "## MALA" in text
    assert "## SOFT" not in text
    (tmp_path / "CLAIMS.md").write_text(
        text.replace("claims` -->\n\n<!--", "claims` -->\n\nMine.\n\n<!--")
    )
    report_claims(tmp_path, quick=True)
    assert "Mine." in (tmp_path / "CLAIMS.md").read_text()


def test_records_of_another_size_are_not_counted(measured, tmp_path):
    file = tmp_path / "claims.jsonl"
    [line] = [
        x for x in (measured / "claims.jsonl").read_text().splitlines() if '"system": "SOFT"' in x
    ]
    file.write_text(f"{line}\n")
    report_claims(tmp_path, quick=True)
    first = (tmp_path / "CLAIMS.md").read_text()
    longer = json.loads(line)
    longer["settings"]["train"]["steps"] = 800
    file.write_text(f"{line}\n{json.dumps(longer)}\n")
    report_claims(tmp_path, quick=True)
    assert (tmp_path / "CLAIMS.md").read_text() == first
    with pytest.raises(InputError, match="no record of this size"):
        report_claims(tmp_path)


def test_the_shipped_pages_begin_with_what_two_seeds_can_tell():
    shipped = Path(__file__).parents[1] / "records" / "study" / "claims" / "CLAIMS.md"
    assert shipped.read_text().startswith(f"{CARE}\n\n# ")


def test_nothing_recorded_is_said(tmp_path):
    with pytest.raises(InputError, match="no record"):
        report_claims(tmp_path)
