"""examples/torchtitan: torchtitan's processes train a recipe as `nalanda train` does."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import ROOT, environment, launched, start, tiny_recipe, write_recipe, write_texts
from transformers import AutoModelForCausalLM

FOLDER = ROOT / "examples" / "torchtitan"
SCRIPT = str(FOLDER / "pretrain.py")
STEPS = 20

pytestmark = [
    pytest.mark.slow,
    # `make` installs it; a plain `pip install -e '.[dev]'` does not.
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="pip install --no-deps -r examples/torchtitan/requirements.txt",
    ),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tokenizer) -> Path:
    """Two layers, 20 steps of 8 rows; rows hold several documents."""
    folder = tmp_path_factory.mktemp("titan")
    write_texts(folder / "text.jsonl", 400, (4, 12, 40))
    tokenizer.save_pretrained(folder / "tokenizer")
    recipe = tiny_recipe(
        folder,
        {"mixer": "gated_deltanet", "feature_map": "nala", "head_dim": 16, "intermediate_size": 64},
        {"steps": STEPS, "tokens_per_step": 512, "micro_batch_size": 4, "z_loss": 1e-3},
        tokenizer={"path": str(folder / "tokenizer")},
        data={"source": str(folder / "text.jsonl"), "seq_len": 64},
        optim={"lr": 3e-3, "max_grad_norm": 0.5},
        schedule={"warmup_steps": 5},
        validation={"every": 0},
        checkpoint={"every": 10},
    )
    return write_recipe(folder / "recipe.yaml", recipe)


@pytest.fixture(scope="module")
def ours(recipe) -> Path:
    """The folder of `nalanda train` of the recipe."""
    run = recipe.parent / "ours"
    process = start(recipe, run)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return run


def train(recipe: Path, run: Path, *words: str, processes: int, fails: bool = False) -> str:
    return launched(
        SCRIPT, str(recipe), f"output_dir={run}", *words, processes=processes, fails=fails
    )


def curves(run: Path) -> dict[str, torch.Tensor]:
    """Loss and gradient norm of each step of a run of torchtitan, by all its starts."""
    found: dict[str, dict[int, float]] = {"loss": {}, "grad_norm": {}}
    for file in sorted(run.glob("tb/*/events*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for name, tag in (("loss", "loss_metrics/global_avg_loss"), ("grad_norm", "grad_norm")):
            found[name] |= {event.step: event.value for event in events.Scalars(tag)}
    return {name: torch.tensor([v for _, v in sorted(at.items())]) for name, at in found.items()}


def expected(run: Path) -> dict[str, torch.Tensor]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: torch.tensor([line[name] for line in lines]) for name in ("loss", "grad_norm")}


WAYS = {
    "replicas": (2, ["train.micro_batch_size=2", "--parallelism.data_parallel_replicate_degree=2"]),
    "pipeline, recomputed": (
        2,
        ["train.gradient_checkpointing=true", "--parallelism.pipeline_parallel_degree=2"],
    ),
    "heads and FSDP2": (4, ["train.micro_batch_size=2", "--parallelism.tensor_parallel_degree=2"]),
}
"""Beside FSDP2 and one process, which the next test has."""


@pytest.mark.parametrize("way", WAYS)
def test_it_follows_nalanda_train(way, recipe, ours, tmp_path):
    processes, words = WAYS[way]
    train(recipe, tmp_path / "run", *words, processes=processes)
    found, right = curves(tmp_path / "run"), expected(ours)
    assert len(found["loss"]) == STEPS
    assert found["loss"][-1] < found["loss"][0] - 0.5
    torch.testing.assert_close(found, right, rtol=1e-4, atol=0)


def test_it_resumes_and_its_weights_are_a_model_folder(recipe, ours, tmp_path):
    """Ten steps on two processes, the rest on one: rows, moments and rates go on."""
    run = tmp_path / "run"
    stop = ["train.micro_batch_size=2", "--lr_scheduler.total_steps=20", "--training.steps=10"]
    train(recipe, run, *stop, processes=2)
    train(recipe, run, processes=1)
    found, right = curves(run), expected(ours)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=0)

    launched(SCRIPT, "export", str(run), processes=1)
    models = [AutoModelForCausalLM.from_pretrained(each / "final") for each in (run, ours)]
    tokens = torch.arange(1, 33)[None]
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    torch.testing.assert_close(*logits, rtol=0, atol=5e-3)
    assert (run / "final" / "tokenizer.json").is_file()
    assert f"{STEPS} steps" in (run / "final" / "README.md").read_text()


def test_a_wrong_key_is_one_line(recipe, tmp_path):
    printed = train(recipe, tmp_path / "run", "train.stepz=3", processes=1, fails=True)
    assert any(line.startswith("train.stepz") for line in printed.splitlines()), printed[-3000:]


CHECKS = """
import io, pickle, sys
from types import SimpleNamespace
from pretrain import InputError, Metadata, load_config
from titan_model import check
from nalanda.config.model import build_model_config

def line(call, *arguments):
    try:
        call(*arguments)
    except InputError as error:
        print(error)

def refused(*keys, **degrees):
    none = dict.fromkeys(["pipeline", "tensor", "context"], 1)
    degrees = {f"{name}_parallel_degree": n for name, n in (none | degrees).items()}
    recipe = load_config(sys.argv[1], [*keys])
    training = SimpleNamespace(seq_len=recipe.data.seq_len)
    titan = SimpleNamespace(parallelism=SimpleNamespace(**degrees), training=training)
    line(check, recipe, build_model_config(recipe), titan)

refused(context=2)
refused("model.tie_word_embeddings=true", pipeline=2)
refused(tensor=3)
refused(tensor=2, pipeline=2)
refused("stages.late.after_step=4")
refused("train.ema=[0.9]")
refused("train.resume=4")
refused("optim.name=muon", tensor=2)

class Harm:
    def __reduce__(self):
        return print, ("harm",)

line(Metadata(io.BytesIO(pickle.dumps(Harm()))).load)
"""


def test_what_it_refuses(recipe, tmp_path):
    (tmp_path / "checks.py").write_text(CHECKS)
    child = environment()
    child["PYTHONPATH"] += os.pathsep + str(FOLDER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "checks.py"), str(recipe)],
        env=child,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert done.returncode == 0, done.stderr[-3000:]
    context, tied, heads, *unread, pickled = lines
    keys = ["stages", "train.ema", "train.resume", "optim.name"]
    assert [line.split(":")[0] for line in unread] == keys
    assert context.startswith("train.context_parallel: ")
    assert tied.startswith("model.tie_word_embeddings: ")
    assert "3" in heads
    assert pickled == ".metadata: names builtins.print; take a checkpoint of torchtitan's"
