"""The coordinate check: flat under µP, growing in the standard parametrization."""

import itertools
import json
import math
from pathlib import Path

import pytest
from nalanda_lab import width
from nalanda_lab.commands import main

from nalanda.common.errors import InputError
from nalanda.compare.study import load_arms, read_study, study_text
from nalanda.config.schema import OptimConfig

MODEL = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
STUDY = Path(width.__file__).with_name("width.yaml")
BASE = {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 64}
BASE |= {"intermediate_size": 256, "initializer_range": 0.05, "tie_word_embeddings": True}
MODELS = {
    "gated_deltanet": {"mixer": "gated_deltanet", "feature_map": "nala", "expand_k": 0.5},
    "transnormer": {
        "mixer": ["diag_attention", "norm_attention"],
        "mixer_options": {"diag_attention": {"block_size": 64}},
    },
}
"""The models of lab/records/width.tar.xz, at their base."""
FINISHED = {"state": "finished", "step": 488, "steps": 488}
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


def run_of(name: str, which: str, size: int, rate: float, seed: int) -> tuple[str, dict]:
    """The folder of a run of the study, and its loss: best at 0.002 under µP, at 0.001 for wide standard models."""
    best = 0.001 if which == "standard" and size > 128 else 0.002
    loss = 4 + (math.log2(rate / best)) ** 2 + 0.01 * seed - (0.1 if which == "mup" else 0)
    return f"{name}-{which}-{size}/rate-{rate:g}-seed-{seed}", {"val_loss": loss, "tokens": 999424}


def test_the_transfer_reads_the_study_that_compare_has_run(tmp_path, capsys):
    study = read_study(str(STUDY), [f"output_dir={tmp_path}", "data.source=unset"])
    configs = load_arms(study)
    (tmp_path / "compare.yaml").write_text(study_text(study))
    parts = (("gated_deltanet", "transnormer"), width.PARAMETRIZATIONS, (128, 256, 512))
    for series in itertools.product(*parts):
        config = configs["-".join(map(str, series))]
        widened = width.widened(BASE | MODELS[series[0]], series[2], series[1])
        assert config.model == {key: widened[key] for key in config.model}
        for rate, seed in itertools.product(study.rates, (101, 102)):
            name, line = run_of(*series, rate, seed)
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "run.json").write_text(json.dumps(FINISHED))
            config.optim.lr = rate
            (tmp_path / name / "config.yaml").write_text(config.to_yaml())
            line |= {"step": 488, "time": 0.0}
            (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    # A grid whose end is best has an octave more, which nobody has trained: the others are read all the same.
    losses, tokens = width.read_losses(tmp_path)
    assert tokens == 999424
    assert len(losses) == 12
    assert {tuple(sorted(each)) for each in losses.values()} == {tuple(study.rates)}
    main(["transfer", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "transnormer, width 512, µP less standard, at the narrowest model's rate: −1.100 ± 0.000"
        in printed
    )
    assert (tmp_path / "transfer.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("widths", "message"), [([32], "at least two"), ([32, 40], "num_heads would be 2.5")]
)
def test_widths_that_cannot_work_are_refused(widths, message, tmp_path):
    changes = [
        "model.hidden_size=32",
        "model.head_dim=16",
        "model.num_heads=2",
        "model.intermediate_size=64",
    ]
    with pytest.raises(InputError, match=message):
        width.check_coordinates("demo", changes, widths, 1, str(tmp_path))
