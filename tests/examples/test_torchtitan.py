"""examples/torchtitan: torchtitan's processes train a recipe as `nalanda train` does."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import ROOT, launched, start, tiny_recipe, write_recipe, write_texts
from transformers import AutoModelForCausalLM

from nalanda.model.configuration import NalandaConfig

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


HAS_PLAN = bool(NalandaConfig().base_model_tp_plan)
WAYS = {
    "one process": (1, []),
    "FSDP2": (2, ["train.micro_batch_size=2"]),
    "replicas": (2, ["train.micro_batch_size=2", "--parallelism.data_parallel_replicate_degree=2"]),
    "recomputed": (1, ["train.gradient_checkpointing=true"]),
    "pipeline": (2, ["--parallelism.pipeline_parallel_degree=2"]),
    "heads": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "heads and FSDP2": (4, ["train.micro_batch_size=2", "--parallelism.tensor_parallel_degree=2"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_follows_nalanda_train(way, recipe, ours, tmp_path):
    processes, words = WAYS[way]
    if way.startswith("heads") and not HAS_PLAN:
        pytest.skip("NalandaConfig has no plan of tensor parallelism")
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


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--parallelism.context_parallel_degree=2"], "train.context_parallel: "),
        (
            ["model.tie_word_embeddings=true", "--parallelism.pipeline_parallel_degree=2"],
            "model.tie_word_embeddings: ",
        ),
        (["train.stepz=3"], "train.stepz"),
    ],
)
def test_what_it_refuses(words, problem, recipe, tmp_path):
    printed = train(recipe, tmp_path / "run", *words, processes=2, fails=True)
    assert any(line.startswith(problem) for line in printed.splitlines()), printed[-3000:]
