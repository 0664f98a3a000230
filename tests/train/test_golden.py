"""A golden curve: 50 losses and gradient norms of a tiny run must equal those of golden.json.

The model has two mixers, gated_deltanet under the NaLa map and softmax. It trains in fp32 on one thread, from
a corpus made here, so that only the code can change the curve.

Tolerances: on one machine the curve repeats to the bit. With another instruction set, or initial weights that
differ by 1e-7, losses differ by 2e-7 and gradient norms by 8e-7, relative; `LOSS` and `NORM` leave room for
other CPUs and torch releases. An embedding initialised 1 % larger moves losses by 5e-4 and norms by 6e-3.

If a change is meant to move the curve, run `PYTHONPATH=tests/helpers python tests/train/test_golden.py
--write` and say why in the commit.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from training import tiny_recipe, write_texts

from nalanda.common import products
from nalanda.common.products import set_product_route
from nalanda.config.load import section
from nalanda.config.schema import RunConfig
from nalanda.train import launch
from nalanda.train.log import read_metrics
from nalanda.train.loop import train

TABLE = Path(__file__).with_name("golden.json")
LOSS, NORM = 1e-4, 1e-3
"""Relative tolerances."""


def curve(folder: Path) -> dict[str, list[float]]:
    """Trains 50 steps; returns the loss and the gradient norm of each."""
    write_texts(folder / "corpus.jsonl", 600, range(1, 41))
    recipe = tiny_recipe(
        folder,
        model={
            "mixer": ["gated_deltanet", "softmax"],
            "feature_map": "nala",
            "feature_map_options": {"power": 2.0},
        },
        train={"steps": 50, "tokens_per_step": 512, "micro_batch_size": 4},
        output_dir=str(folder / "run"),
        seed=1,
        tokenizer={"train": "bpe", "vocab_size": 300},
        data={"source": str(folder / "corpus.jsonl"), "seq_len": 64},
        optim={"lr": 5e-3},
        schedule={"warmup_steps": 5},
        validation={"every": 0},
        checkpoint={"every": 0},
    )
    lines = list(read_metrics(train(section(RunConfig, recipe, "")) / "metrics.jsonl"))
    return {key: [line[key] for line in lines if key in line] for key in ("loss", "grad_norm")}


def rounds_to_bf16() -> bool:
    """Whether oneDNN's products lose digits on this processor, so that no run takes them."""
    x = torch.full((64, 64), 1 + 2**-12)
    try:
        set_product_route("onednn")
        return bool((x @ torch.eye(64) != x).any())
    finally:
        set_product_route("default")


@pytest.mark.sampled
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("route", products.PRECISIONS)
def test_a_tiny_run_follows_the_golden_curve(tmp_path, monkeypatch, route):
    if route == "onednn" and rounds_to_bf16():
        pytest.skip("this processor multiplies in bf16")
    monkeypatch.setattr(launch, "choose_product_route", lambda: route)
    try:
        expected, found = json.loads(TABLE.read_text()), curve(tmp_path)
    finally:
        set_product_route("default")

    assert json.loads((tmp_path / "run/run.json").read_text())["products"] == route
    assert len(found["loss"]) == 50
    assert found["loss"] == pytest.approx(expected["loss"], rel=LOSS)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    with tempfile.TemporaryDirectory() as folder:
        TABLE.write_text(json.dumps(curve(Path(folder)), indent=1) + "\n")
