"""Measures training steps on the CPU, beside transformers' Qwen3.5 and Llama and beside an earlier commit."""

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nalanda_kernels
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
from nalanda_lab.track import figures_file, plain_table, take_turns

try:
    from nalanda.common import products
    from nalanda.common.allocator import keep_freed_memory
except ImportError:  # `_earlier` runs this file with older code
    products = keep_freed_memory = None

HEADS, HEAD_DIM, ROWS, LENGTH = 2, 128, 4, 512
LAYERS, VOCABULARY = 2, 4096
SIZES: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": LAYERS, "intermediate_size": 512}
SIZES |= {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
"""The shape of recipes/demo.yaml, 2.4 M parameters."""
OURS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"expand_k": 0.5},
    "gated_deltanet, nala": {"expand_k": 0.5, "feature_map": "nala"},
}
KINDS = ("dense", "packed")
PEERS = ("Llama, dense", "Qwen3.5, dense")

Step = Callable[[], float]
"""Makes one training step; returns its seconds."""


def bench_train(
    *,
    threads: int = 2,
    rounds: int = 15,
    against: str | Path | None = None,
    json: str | Path | None = None,
) -> dict:
    """Times training steps on 4 rows of 512 tokens, in fp32 on the CPU: forward, backward, clipping, AdamW.

    Compares, at the demo's shape: ours with two maps, and transformers' Qwen3.5 with linear attention in all
    layers and Llama. `dense` rows hold one document each, `packed` ones about four; Qwen3.5 does not keep
    these apart and has no packed row. The models take turns, one step each a round.

    Prints the median tokens a second, and the median ratios to the peers' speeds within a round.

    Args:
        threads: number of threads for torch.
        rounds: steps of each model.
        against: another checkout of Nalanda. Its models take turns with these, in a process of their own.
        json: file for the figures.

    Raises:
        InputError: `against` is no checkout, or its code makes no steps.
    """
    write = figures_file(json)
    if against is not None and not Path(against, "src", "nalanda").is_dir():
        raise InputError(
            f"--against {against}: no checkout of Nalanda; give a folder with src/nalanda"
        )
    assert products is not None
    console, before = Console(highlight=False, emoji=False), torch.get_num_threads()
    route = products.product_route()
    prepare(threads)
    try:
        console.print(
            f"training, fp32, {SIZES}, {HEADS} heads of {HEAD_DIM}, {ROWS} rows × {LENGTH}, {threads} "
            f"threads, {platform.machine()}, torch {torch.__version__}, {products.product_route()} products, "
            f"transformers {version('transformers')}",
            soft_wrap=True,
        )
        steps = ours() | _peers()
        if against is not None:
            steps |= _earlier(Path(against), threads)
        rows = _measure(steps, rounds)
    finally:
        torch.set_num_threads(before)
        products.set_product_route(route)
    _print_rows(console, rows)
    figures = {"threads": threads, "rounds": rounds, "torch": torch.__version__, "rows": rows}
    write(figures)
    return figures


def prepare(threads: int) -> None:
    """Sets this process up as `nalanda train` does."""
    torch.set_num_threads(threads)
    if products is None or keep_freed_memory is None:
        return  # an earlier commit did nothing more
    torch.set_flush_denormal(True)
    keep_freed_memory()
    products.set_product_route(products.choose_product_route())


def _measure(steps: dict[str, Step], rounds: int) -> list[dict]:
    seconds = take_turns(steps, rounds, "training", warm=2)

    def ratio(peer: str, name: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[peer], seconds[name], strict=True))

    return [
        {
            "model": name,
            "tokens_per_second": ROWS * LENGTH / statistics.median(times),
            "ratios": {peer.split(",")[0]: ratio(peer, name) for peer in PEERS}
            | ({"earlier": ratio(f"earlier {name}", name)} if f"earlier {name}" in steps else {}),
        }
        for name, times in seconds.items()
    ]


def ours() -> dict[str, Step]:
    """The steps of our models by name; each model steps on rows of both kinds."""
    steps = {}
    for name, options in OURS.items():
        model = NalandaForCausalLM(
            NalandaConfig(mixer="gated_deltanet", num_heads=HEADS, **SIZES, **options)
        )
        steps |= {f"{name}, {kind}": training_step(model, _batch(kind)) for kind in KINDS}
    return steps


def _peers() -> dict[str, Step]:
    with warnings.catch_warnings(
        action="ignore"
    ):  # from flash-linear-attention, where that is installed
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

    nalanda_kernels.keep_fla_off_cpus(qwen3_5)
    config = Qwen3_5TextConfig(
        **SIZES,
        layer_types=["linear_attention"] * LAYERS,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=HEAD_DIM // 2,
        linear_value_head_dim=HEAD_DIM,
    )
    steps = {"Qwen3.5, dense": training_step(Qwen3_5ForCausalLM(config), _batch("dense"))}
    llama = build_llama(**SIZES, num_attention_heads=HEADS)
    return steps | {f"Llama, {kind}": training_step(llama, _batch(kind)) for kind in KINDS}


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
            raise InputError(
                f"--against {checkout}: its code makes no training steps; its error is above"
            )
        return float(answer)

    return {
        f"earlier {name}, {kind}": partial(ask, f"{name}, {kind}")
        for name in OURS
        for kind in KINDS
    }


def _print_rows(console: Console, rows: list[dict]) -> None:
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratios"]))
    lines = []
    for row in rows:
        ratios = (f"{row['ratios'][peer]:.2f}×" if peer in row["ratios"] else "" for peer in peers)
        lines.append([row["model"], f"{row['tokens_per_second']:,.0f}", *ratios])
    console.print(plain_table(["", "tokens/s", *(f"÷ {peer}" for peer in peers)], lines))
    console.print("medians; ratios of speeds within a round; peers dense", style="dim")


if __name__ == "__main__":  # answers `_earlier`
    prepare(int(sys.argv[1]))
    steps = ours()
    for line in sys.stdin:
        print(steps[line.strip()](), flush=True)
