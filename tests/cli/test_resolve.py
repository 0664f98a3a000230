"""Every command that takes a model or a run takes a run, `final`, a checkpoint and an exported folder."""

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from covering import slow_but_for
from training import configured

import nalanda_cli
from nalanda.common.errors import InputError
from nalanda.common.next_steps import next_steps
from nalanda.train.export import export
from nalanda.train.loop import train
from nalanda.train.resolve import resolve, run_of

SETTINGS = ("train.steps=6", "checkpoint.every=2", "data.seq_len=16", "train.tokens_per_step=64")


@pytest.fixture(scope="module")
def place(recipe, tmp_path_factory) -> Path:
    """A folder with runs/done, runs/cut, which was interrupted, and an exported model."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    place = tmp_path_factory.mktemp("resolve")
    done = train(configured(recipe, place / "runs" / "done", *SETTINGS, "validation.every=0"))
    cut = shutil.copytree(done, place / "runs" / "cut")
    shutil.rmtree(cut / "final")
    facts = json.loads((cut / "run.json").read_text()) | {"state": "interrupted", "steps": 60}
    (cut / "run.json").write_text(json.dumps(facts))
    (cut / "checkpoints" / "step-6" / "model.safetensors").write_bytes(b"torn")
    export(done, place / "exported")
    return place


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("NALANDA_NEXT_STEPS", "0")


NAMED = {
    "runs/done": "runs/done/final",
    "runs/done/final": "runs/done/final",
    "runs/done/checkpoints/step-2": "runs/done/checkpoints/step-2",
    "runs/cut": "runs/cut/checkpoints/step-4",
    "exported": "exported",
    "done": "runs/done/final",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_means_one_model_and_its_tokenizer(name, capsys):
    capsys.readouterr()  # of the training
    found = resolve(name)
    assert found.model == NAMED[name]
    assert list(Path(found.tokenizer).glob("tokenizer.json"))
    said = capsys.readouterr().err.splitlines()
    lines = {
        "runs/cut": "model: runs/cut, step 4 of 60 (interrupted)",
        "runs/done": "model: runs/done, step 6 of 6 (finished)",
    }
    lines["done"] = lines["runs/done"]
    expected = [lines[name]] if name in lines else []
    assert [line for line in said if "passed over" not in line] == expected
    assert resolve(found.model) == found  # what was taken means itself
    assert resolve(str(Path(found.model).resolve())).run == found.run


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    "command",
    [
        "generate {} state --max-new-tokens 2 --temperature 0",
        "convert {} {out}/made --to llama",
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in (
                "perplexity {} --text text.txt --tokens 40 --length 32 --output {out}",
                "eval {} --tasks task.yaml --limit 2 --output {out}",
            )
        ),
    ],
    ids=lambda command: command.split()[0],
)
def test_commands_on_models(command, name, place, tmp_path, capsys, monkeypatch):
    (place / "text.txt").write_text("state gate decay query key value " * 40)
    (place / "task.jsonl").write_text('{"text": "state gate"}\n{"text": "key value"}\n')
    (place / "task.yaml").write_text(TASK)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    words = [word.format(name, out=tmp_path) for word in command.split()]
    if words[0] != "convert":
        nalanda_cli.main(words)
        return
    with pytest.raises(
        SystemExit
    ):  # this mixer is none of llama's: the model is found, and refused for that
        nalanda_cli.main(words)
    assert "can become" in capsys.readouterr().err


TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: task.jsonl}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: byte_perplexity}]
"""


PARTS = ("runs/done", "runs/done/final", "runs/done/checkpoints/step-2", "done")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but_for(["runs/done/checkpoints/step-2", "done"], PARTS))
def test_commands_on_runs(name, place, tmp_path, capsys):
    assert run_of(name).resolve() == place / "runs" / "done"
    nalanda_cli.main(["plot", name, "--output", str(tmp_path / "loss.png")])
    page = tmp_path / "report.html"
    nalanda_cli.main(["report", name, "--samples", "1", "--output", str(page)])
    assert re.search("What it writes .+</h2>\n<pre><b>.+</b>", page.read_text(encoding="utf-8"))
    nalanda_cli.main(["verify", name])
    nalanda_cli.main(["export", name, str(tmp_path / "made")])
    assert capsys.readouterr().out.count(": whole, finite, loadable") == 3
    step = json.loads((tmp_path / "made" / "run.json").read_text())["step"]
    assert step == (2 if name.endswith("step-2") else 6)
    assert (tmp_path / "made" / "tokenizer.json").is_file()


def test_a_run_without_a_whole_model_says_why(place, tmp_path):
    run = shutil.copytree(place / "runs" / "cut", tmp_path / "run")
    for folder in (run / "checkpoints").iterdir():
        (folder / "trainer.json").unlink()
    why = "no final, and step-2 is damaged: trainer.json is missing; step-4 is damaged"
    with pytest.raises(InputError, match=re.escape(why)) as caught:
        resolve(str(run))
    assert "\n" not in str(caught.value)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(InputError, match="no final, and no checkpoint is saved; train it further"):
        resolve(str(run))


def test_a_run_with_a_recipes_name_is_still_a_run(place):
    shutil.copytree(place / "runs" / "cut", place / "runs" / "demo")
    assert resolve("demo").model == "runs/demo/checkpoints/step-4"


def test_what_a_training_says_to_do_next_needs_no_network(place, capsys):
    hints = next_steps("train", of=Path("runs/done"), run=Path("runs/done"))
    assert [hint.split()[1] for hint in hints] == ["report", "generate", "verify"]
    for hint in hints:
        nalanda_cli.main(shlex.split(hint)[1:])
