"""Names of models: they stand in tables as they are, and differ from names of recipes."""

import pytest
from nalanda_lab import lra
from nalanda_lab.names import is_model
from nalanda_lab.plots import print_analysis
from nalanda_lab.recall_report import print_recall
from nalanda_lab.synthetic import TASKS
from rich.console import Console


@pytest.mark.parametrize("name", ["m[lr=1]", "odd[/b]", "a|b", ":smile:"])
def test_names_of_models_are_no_markup(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    console = Console(emoji=False)
    trial = {"task": "needle", "match": "parameters", "model": name, "lr": 0.1, "scores": [0.5] * 5}
    trial |= {"spreads": [0.0] * 5, "score": 0.5, "spread": 0.0, "parameters": 9, "state_bytes": 9}
    trial |= {"state_grows": False, "flops_per_token": 9, "seeds": 1}
    print_recall([trial], TASKS, [], console)
    lra.show(["model", "listops"], [[name, "0.5"]], console)
    layer = {"layer": 0, "mixer": name}
    facts = {
        "layers": [layer],
        "uniform": {},
        "windows": [0.1],
        "model": name,
        "rows": 1,
        "length": 8,
    }
    print_analysis(facts | {"notes": [], "figures": []}, "d")
    assert capsys.readouterr().out.count(name) == 4


def test_a_recipes_name_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "recipe.yaml").write_text("")
    names = ("demo", "mine", "other", "runs/demo", "runs/recipe.yaml", "owner/name")
    assert [name for name in names if is_model(name)] == ["mine", "runs/demo", "owner/name"]
