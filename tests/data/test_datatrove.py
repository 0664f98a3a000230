"""examples/datatrove: the same token set, made by datatrove's tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

from nalanda.config.load import load_config
from nalanda.data.prepare import prepare
from nalanda.data.token_set import is_token_set

pytest.importorskip("datatrove")

SCRIPT = ROOT / "examples/datatrove/prepare.py"
RECIPE = """
output_dir: runs/x
model: {mixer: deltanet, hidden_size: 32, num_hidden_layers: 1, num_heads: 2, vocab_size: 300}
tokenizer: TOKENIZER
data: {source: SOURCE, seq_len: 16, validation_share: 0.2}
train: {steps: 1, tokens_per_step: 32, micro_batch_size: 2}
"""


@pytest.fixture
def recipe(tmp_path, tokenizer) -> Path:
    """A recipe of 2.6 MB of text in two files, so that it takes three shards of 1 MiB."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    (tmp_path / "in").mkdir()
    for number in range(2):
        lines = [json.dumps({"text": f"{number} {line} " + 600 * "a"}) for line in range(2100)]
        (tmp_path / f"in/{number}.jsonl").write_text("\n".join(lines))

    path = tmp_path / "recipe.yaml"
    settings = {"TOKENIZER": tmp_path / "tokenizer", "SOURCE": tmp_path / "in"}
    text = RECIPE
    for name, value in settings.items():
        text = text.replace(name, str(value))
    path.write_text(text)
    return path


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [*map(str, arguments)], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def prepared(recipe: Path, folder: Path) -> dict[str, bytes]:
    """The files of the set that this process makes."""
    config = load_config(recipe)
    prepare(config.data, config.tokenizer, folder, shard_bytes=1 << 20)
    return contents(folder)


@pytest.mark.slow
def test_tasks_on_one_machine_write_the_same_bytes(tmp_path, recipe):
    out = tmp_path / "out"
    command = [sys.executable, SCRIPT, recipe, out, "--tasks", 2, "--shard-mb", 1]
    run(*command)
    assert contents(out) == prepared(recipe, tmp_path / "one")
    assert json.loads((tmp_path / "out-logs/shards/stats.json").read_text())
    assert "prepared already" in run(*command).stdout


@pytest.mark.slow
def test_slurm_gets_an_array_and_then_an_index(tmp_path, recipe):
    """With a stand-in for Slurm: the submitted tasks, run one by one, make the same set."""
    commands = {
        "sbatch": f'echo "$@" >> {tmp_path}/calls; cat "${{@: -1}}" >> {tmp_path}/calls; echo job 7',
        "scontrol": "echo localhost",
    }
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    out = tmp_path / "out"
    slurm = ["--partition", "cpu", "--time", "01:00:00", "--sbatch", "account=me"]
    run(sys.executable, SCRIPT, recipe, out, "--tasks", 2, "--shard-mb", 1, *slurm, PATH=path)
    assert not is_token_set(out)
    calls = (tmp_path / "calls").read_text()
    for option in (
        "--partition=cpu",
        "--time=01:00:00",
        "--account=me",
        "--array=0-1",
        "--dependency=afterok:7",
    ):
        assert option in calls

    for job, task in (("shards", 1), ("shards", 0), ("index", 0)):
        task_of = {"SLURM_NODELIST": "localhost", "SLURM_ARRAY_TASK_ID": str(task), "PATH": path}
        run("launch_pickled_pipeline", f"{out}-logs/{job}/executor.pik", **task_of)
    assert contents(out) == prepared(recipe, tmp_path / "one")
