"""The trainer on the 340 M recipes, beside flash-linear-attention's models."""

import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from gpu.card import Card, Case, Values

FLAGSHIP = "nala_gated_deltanet_340m"
LLAMA = "model={auto: llama, num_hidden_layers: 24, hidden_size: 1024, num_attention_heads: 16}"
PEERS = {  # recipe → the peer's recipe, and its changes
    FLAGSHIP: ["fla/gated_deltanet_340m"],
    "gated_deltanet_340m": ["fla/gated_deltanet_340m"],
    "transformer_340m": ["transformer_340m", LLAMA, "model.intermediate_size=2816"],
}
SETTINGS = ["data.streaming=false", "train.precision=bf16", "schedule.warmup_steps=1"]
SETTINGS += ["log.tensorboard=false", "validation.every=0", "checkpoint.every=0"]
MICRO_BATCHES = 8
"""Of a step. Recipes have 32; with one the optimizer and the wait for the loss would count too much."""
DRY = ("model.num_hidden_layers=1", "model.hidden_size=32", "model.head_dim=16")


def run_trainer(card: Card, recipe: str, *settings: str, **variables: str) -> list[Values]:
    """The lines of the log of a run. Raises RuntimeError with the trainer's last line."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [f"recipes/{recipe}.yaml", *settings, f"output_dir={folder}/run"]
        code, last = card.python(
            ["recipes/pretrain.py", *chosen], TOKENIZERS_PARALLELISM="false", **variables
        )
        if code:
            raise RuntimeError(last)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line]


def prepare_text(card: Card, entries: int) -> Path:
    """The text that ships with Python, as tokens, prepared once. entries: of its vocabulary."""
    folder = (card.output / "text").resolve()
    if not folder.exists():
        command = ["data", "prepare", "python", str(folder), "--vocab-size", str(entries)]
        card.python(["-m", "nalanda_cli", *command])
    return folder


def train_pair(card: Card, *, recipe: str, T: int) -> Values:
    """Our model eager and compiled, and fla's; the flagship also on fla's kernels and on torch's ops.

    Losses are of the same step, weights and batches, so those of our model must agree.
    """
    steps, every, entries = (2, 1, 300) if card.dry else (10, 2, 32000)
    text = prepare_text(card, entries)
    common = [*SETTINGS, f"data.source={text}", f"tokenizer={text}/tokenizer", f"data.seq_len={T}"]
    common += [
        f"train.tokens_per_step={MICRO_BATCHES * card.tokens}",
        f"train.steps={steps}",
        f"log.every={every}",
    ]
    common += [f"train.micro_batch_size={max(1, card.tokens // T)}", f"model.vocab_size={entries}"]
    common += DRY if card.dry else ()

    peer, *changes = PEERS[recipe]
    runs = {  # name → recipe, settings, backend
        "ours": (recipe, ["train.compile=false"], "auto"),
        "compiled": (recipe, ["train.compile=true"], "auto"),
        "peer": (peer, ["train.compile=false", *changes], "auto"),
    }
    if recipe == FLAGSHIP:
        runs |= {name: (recipe, ["train.compile=false"], name) for name in ("fla", "torch")}
    values: Values = {}
    errors: dict[str, str] = {}
    for name, (chosen, more, backend) in runs.items():
        variables = {} if backend == "auto" else {"NALANDA_BACKEND": backend}
        try:
            lines = run_trainer(card, chosen, *more, *common, **variables)
        except RuntimeError as error:
            errors[name] = str(error)
            continue
        last = lines[len(lines) // 2 :]  # the first steps compile
        values[f"{name}, tokens/s"] = statistics.median(line["tokens_per_second"] for line in last)
        if name in ("ours", "compiled"):
            values[f"{name}, MFU"] = statistics.median(line["mfu"] for line in last)
        if name != "peer":
            values[f"{name}, loss"] = lines[-1]["loss"]
    for name in ("peer", "fla"):
        if {"ours, tokens/s", f"{name}, tokens/s"} <= values.keys():
            values[f"ours / {name}"] = values["ours, tokens/s"] / values[f"{name}, tokens/s"]
    return values | ({"errors": errors} if errors else {})


def train_cases(card: Card) -> list[Case]:
    cases = []
    for T in card.lengths:
        for recipe in [FLAGSHIP] if card.dry else PEERS:
            targets = {"compiled, tokens/s": 128_000} if card.lengths[0] == T else {}
            if recipe == FLAGSHIP:
                targets |= {"ours / peer": 0.95, "ours / fla": 1.25}
            run = partial(train_pair, recipe=recipe, T=T)
            cases.append(Case("Training", f"{recipe}, T = {T}", run, targets))
    return cases


def tune(card: Card) -> Values:
    """`nalanda tune`: the table is written after each change."""
    minutes = f"{(card.end - time.monotonic() - 20) / 60:.2f}"
    file = str((card.output / "blocks.json").resolve())
    code, last = card.python(["-m", "nalanda_kernels.tune", "--json", file, "--minutes", minutes])
    if code and not card.dry:
        raise RuntimeError(last)
    return {"last line": last}
