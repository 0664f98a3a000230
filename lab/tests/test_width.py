"""The coordinate check: flat under µP, growing in the standard parametrization."""

import json

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
