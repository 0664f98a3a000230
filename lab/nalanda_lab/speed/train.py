"""Measures training steps on the CPU beside those of another checkout; `speed cpu` has them beside a peer."""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from nalanda.common.errors import InputError
from nalanda.config.schema import OptimConfig
from nalanda.data.packing import Row, collate
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.train import parallel
from nalanda.train.loss import count_labels, summed_loss
from nalanda.train.optim import build_optimizer
from nalanda_lab.track import figures_file, median_ratio, on_cpu, plain_table, take_turns

try:
    from nalanda.common import products
    from nalanda.common.allocator import keep_freed_memory
except ImportError:  # `_earlier` runs this file with older code
    products = keep_freed_memory = None

HEADS, HEAD_DIM, ROWS, LENGTH = 2, 128, 4, 512
VOCABULARY = 4096
SIZES: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512}
SIZES |= {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
"""The shape of recipes/demo.yaml, 2.4 M parameters."""
OURS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"mixer": "gated_deltanet", "expand_k": 0.5},
    "gated_deltanet, nala": {"mixer": "gated_deltanet", "expand_k": 0.5, "feature_map": "nala"},
}
KINDS = ("dense", "packed")

Step = Callable[[], float]
"""Makes one training step; returns its seconds."""


def bench_train(
    against: str, *, threads: int = 2, rounds: int = 15, json: str | Path | None = None
) -> dict[str, Any]:
    """Times training steps on 4 rows of 512 tokens, in fp32 on the CPU: forward, backward, clipping, AdamW.

    Compares models of the demo's shape, with two maps, to those of another checkout. `dense` rows hold one document
    each, `packed` ones about four. The models take turns, one step each a round.

    Prints the median tokens a second, and the median ratio to the other checkout's speed within a round.

    Args:
        against: another checkout of Nalanda. Its models run in a process of their own.
        threads: number of threads for torch.
        rounds: steps of each model.
        json: file for the figures.

    Raises:
        InputError: `against` is no checkout, or its code makes no steps.
    """
    write = figures_file(json)
    if not Path(against, "src", "nalanda").is_dir():
        raise InputError(f"{against}: no checkout of Nalanda; give a folder with src/nalanda")
    assert products is not None
    route = products.product_route()
    what = f"training, fp32, {SIZES}, {HEADS} heads of {HEAD_DIM}, {ROWS} rows × {LENGTH}"
    try:
        with on_cpu(threads, what, prepare, rounds=rounds) as conditions:
            here, there = ours(), _earlier(Path(against), threads)
            sides = here | {f"earlier {name}": step for name, step in there.items()}
            seconds = take_turns(sides, rounds, "training", warm=2)
    finally:
        products.set_product_route(route)

    rows = [
        {
            "model": name,
            "tokens_per_second": ROWS * LENGTH / statistics.median(seconds[name]),
            "ratio": median_ratio(seconds[f"earlier {name}"], seconds[name]),
        }
        for name in here
    ]
    lines = [[r["model"], f"{r['tokens_per_second']:,.0f}", f"{r['ratio']:.2f}×"] for r in rows]
    Console(emoji=False).print(plain_table(["", "tokens/s", f"÷ {against}"], lines))
    write(conditions | {"rows": rows})
    return conditions | {"rows": rows}


def prepare() -> None:
    """Sets this process up as `nalanda train` does."""
    if products is None or keep_freed_memory is None:
        return  # an earlier commit did nothing more
    torch.set_flush_denormal(True)
    keep_freed_memory()
    products.set_product_route(products.choose_product_route())


def ours() -> dict[str, Step]:
    """The steps of our models by name; each model steps on rows of both kinds."""
    steps = {}
    for name, options in OURS.items():
        model = NalandaForCausalLM(NalandaConfig(num_heads=HEADS, **SIZES, **options))
        steps |= {f"{name}, {kind}": training_step(model, _batch(kind)) for kind in KINDS}
    return steps


def build_llama(**sizes: Any) -> Any:
    """transformers' Llama of these keys of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes))


def _batch(kind: str) -> dict[str, Any]:
    return random_batch(ROWS, LENGTH, VOCABULARY, documents=3 if kind == "packed" else 0)


def random_batch(rows: int, length: int, vocabulary: int, documents: float = 0) -> dict[str, Any]:
    """Rows of random tokens; each holds one document, and on average `documents` more."""
    generator, drawn = np.random.default_rng(0), []
    for _ in range(rows):
        first = generator.random(length) < documents / length
        first[0] = True
        drawn.append(Row(generator.integers(vocabulary, size=length), np.flatnonzero(first)))
    return collate(drawn, length, padding=0)


def training_step(model: Any, batch: dict[str, Any], dtype: torch.dtype = torch.float32) -> Step:
    """Forward under autocast to `dtype`, backward, clipping and AdamW."""
    optim = OptimConfig()
    optimizer, labels = build_optimizer(model, optim), count_labels(batch)
    model.train()

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2):
            loss = summed_loss(model, batch, model.device) / labels
        loss.backward()
        parallel.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def _earlier(checkout: Path, threads: int) -> dict[str, Step]:
    """The steps of `ours` with another checkout's code: this file runs there as a script."""
    lab = Path(__file__).parents[2]  # this file's other imports
    folders = (checkout.resolve() / "src", checkout.resolve() / "kernels", lab)
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, __file__, str(threads)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    questions, answers = process.stdin, process.stdout
    assert questions is not None
    assert answers is not None

    def ask(name: str) -> float:
        with contextlib.suppress(BrokenPipeError):
            print(name, file=questions, flush=True)
        if not (answer := answers.readline()):
            raise InputError(f"{checkout}: its code makes no training steps; its error is above")
        return float(answer)

    names = [f"{name}, {kind}" for name in OURS for kind in KINDS]
    return {name: partial(ask, name) for name in names}


if __name__ == "__main__":  # answers `_earlier`
    torch.set_num_threads(int(sys.argv[1]))
    prepare()
    steps = ours()
    for line in sys.stdin:
        print(steps[line.strip()](), flush=True)
