"""The coordinate check: flat under µP, growing in the standard parametrization."""

import json
import math

import pytest
from nalanda_lab import width
from nalanda_lab.commands import main

from nalanda.common.errors import InputError
from nalanda.config.schema import OptimConfig

MODEL = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
MIXERS = {
    "gated_deltanet + nala": {"mixer": "gated_deltanet", "feature_map": "nala"},
    "transnormer": {"mixer": "norm_attention"},
    "gla": {"mixer": "gla"},
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", MIXERS)
def test_activations_keep_their_size_under_mup(name, optimizer):
    optim = OptimConfig(name=optimizer, lr=4e-3)
    rows = width.coordinates(MODEL | MIXERS[name], optim, [32, 64, 128, 256], steps=3, seeds=2)
    slopes = {(row["parametrization"], row["kind"]): row["change_slope"] for row in rows}
    of_mup = {kind: slope for (which, kind), slope in slopes.items() if which == "mup"}
    assert {"q_proj", "mixer", "mlp", "lm_head"} <= of_mup.keys()

    # Small widths have slopes of their own: 0.35 is far below the standard ones.
    assert max(map(abs, of_mup.values())) < 0.35, of_mup
    assert slopes["standard", "mlp"] > 1
    assert slopes["standard", "lm_head"] > 0.35


def test_the_command_writes_a_picture_and_refuses_widths(tmp_path, capsys):
    arguments = [
        "coordinates",
        "demo",
        "model.hidden_size=32",
        "model.head_dim=16",
        "model.num_heads=2",
    ]
    arguments += ["model.intermediate_size=64", "model.num_hidden_layers=1", "--steps", "1"]
    figures = tmp_path / "figures.json"
    main([*arguments, "--widths", "32,64", "--output", str(tmp_path), "--json", str(figures)])
    assert "exponent of the width" in capsys.readouterr().out
    assert (tmp_path / "coordinates.png").stat().st_size > 10_000
    assert json.loads(figures.read_text())["widths"] == [32, 64]


def test_the_best_rate_is_a_parabolas_vertex():
    rates = [0.001, 0.002, 0.004, 0.008]
    losses = [(math.log2(rate) - math.log2(0.003)) ** 2 for rate in rates]
    assert width.best_rate(rates, losses) == pytest.approx(0.003)
    assert width.best_rate(rates, [3.0, 2.0, 1.0, math.inf]) == 0.004  # beside a failed run
    assert width.best_rate(rates, [1.0, 2.0, 3.0, 4.0]) == 0.001  # at an end


def test_transfer_trains_every_run_once_and_draws_the_rates(tmp_path, capsys):
    study = tmp_path / "study.yaml"
    text = width.STUDY.read_text().replace("widths: [128, 256, 512]", "widths: [128, 256]")
    text = text.replace("vocab_size: 2048", "vocab_size: 300").replace(
        "max_validation_rows: 256", "max_validation_rows: 8"
    )
    text = text.replace("tokens: 999424", "tokens: 4096").replace("seeds: [1, 2]", "seeds: [1]")
    text = text.replace("rates: [0.001, 0.002, 0.004, 0.008, 0.016]", "rates: [0.001, 0.004]")
    study.write_text(text)
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"text": " ".join(f"word{(i * j) % 97}" for j in range(200))} for i in range(80)]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))

    width.transfer(str(corpus), str(tmp_path / "out"), 1, study_file=study)
    records = (tmp_path / "out/transfer.jsonl").read_text().splitlines()
    assert len(records) == 2 * 2 * 2 * 2  # mixers, parametrizations, widths, rates
    assert (tmp_path / "out/transfer.png").stat().st_size > 10_000
    assert "spread" in capsys.readouterr().out

    # µP at the base width is the standard parametrization.
    by_run = {}
    for record in map(json.loads, records):
        model = record["settings"]["model"]
        series = str(model["mixer"]), model["hidden_size"], record["settings"]["rate"]
        by_run.setdefault(series, {})[model["parametrization"]] = record["budgets"][0]["loss"]
    for (_, size, _), losses in by_run.items():
        assert (losses["mup"] == losses["standard"]) == (size == 128)

    width.transfer(None, str(tmp_path / "out"), 1, study_file=study)  # no run again
    assert len((tmp_path / "out/transfer.jsonl").read_text().splitlines()) == len(records)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (["32"], "at least two"),
        (["a", "b"], "give numbers"),
        (["32", "40"], "num_heads would be 2.5"),
    ],
)
def test_widths_that_cannot_work_are_refused(widths, message, tmp_path):
    from nalanda.config.load import load_config

    changes = [
        "model.hidden_size=32",
        "model.head_dim=16",
        "model.num_heads=2",
        "model.intermediate_size=64",
    ]
    with pytest.raises(InputError, match=message):
        width.check_coordinates(load_config("demo", changes), widths, 1, str(tmp_path))
