"""A model to keep: the zoo's hybrid of 30 M, trained for a call's minutes, and its weights in bf16.

How many steps fit is not known before. So the rate stays up for most of the time, and a second launch goes on from the
checkpoint with the fall of `wsd`, whose length follows from the steps that are behind it.
"""

import itertools
import json
import math
import shutil
import statistics
import tarfile
import time
from pathlib import Path

from gpu.card import OUT_OF_TIME, Card, Case, Values
from gpu.curves import ending_in, points
from gpu.results import BYTES
from gpu.train import (
    COMPARED,
    SETTINGS,
    Trained,
    find_problems,
    read_facts,
    read_lines,
    run_trainer,
    text_of,
    text_settings,
)

GROUP = "A model to keep"
RECIPE = "hybrid_30m"
STEADY = 0.75  # of the training's time; the second launch loads and compiles again
FALL = 0.2  # of all steps
AFTER = 75  # seconds behind the training: weights, samples, scores
SHARD = BYTES - (1 << 16)  # the most of a file's tensors; it has a header too
PROMPTS = ("def read_lines(path):", "The scheduler", "It was a")


def folder_of(card: Card) -> Path:
    """The folder of the run and the model. Another call on the same machine goes on there."""
    return card.work / "keep"


# ------------------------------ training


def sets_of(card: Card) -> dict[str, Path]:
    """The token sets by name: the web's, and Python's text, if the bundle has it with the same tokenizer."""
    web = text_of(card, "web")
    python = web if card.dry else web.with_name("python")
    return {"web": web} | ({"python": python} if python.exists() else {})


def mix(sets: dict[str, Path]) -> list[str]:
    """Settings that mix token sets by their sizes, with the tokenizer of the first."""
    parts = [
        f"{{name: {name}, source: {folder}, weight: {count_tokens(folder)}}}"
        for name, folder in sets.items()
    ]
    size = index_of(sets["web"])["tokenizer"]["vocab_size"]
    mixture = ["data.source=''", f"data.mixture=[{', '.join(parts)}]", f"model.vocab_size={size}"]
    return [*text_settings(sets["web"]), *mixture]


def index_of(folder: Path) -> Values:
    return json.loads((folder / "index.json").read_text())


def count_tokens(folder: Path) -> int:
    return index_of(folder)["train"]["tokens"]


def settings_of(card: Card) -> list[str]:
    T, rows, tokens = (32, 2, 128) if card.dry else (1024, 64, 65536)
    every, held_out = (2, 4) if card.dry else (250, 256)
    settings = [*SETTINGS, *mix(sets_of(card)), "optim.lr=3.0e-3"]
    settings += ["schedule.name=wsd", f"schedule.decay_share={FALL}"]
    settings += [f"schedule.warmup_steps={1 if card.dry else 200}"]
    settings += [f"data.seq_len={T}", f"data.max_validation_rows={held_out}"]
    settings += [f"train.tokens_per_step={tokens}", f"train.micro_batch_size={rows}"]
    settings += [f"validation.every={every}", f"log.every={1 if card.dry else 10}"]
    settings += [f"checkpoint.every={every}", "checkpoint.keep_last=1"]
    if card.dry:
        settings += ["model.num_hidden_layers=4", "model.hidden_size=32", "model.head_dim=16"]
    return settings


def train_model(card: Card) -> Values:
    """Trains until the call's time is nearly over. A run that was cut goes on, on the same machine."""
    run, settings = folder_of(card) / "run", settings_of(card)
    most = 4 if card.dry else 100_000
    before = read_facts(run / "run.json")
    steps = before.get("steps", most)
    if steps == most:  # the rate does not fall yet
        with ending_in(card, STEADY * minutes_of(card)):
            ended = run_trainer(card, RECIPE, run, *settings, f"train.steps={most}")
        saved = ended.facts.get("saved", 0)
        if not saved or ended.problem not in ("", OUT_OF_TIME):
            return describe(card, ended)
        bring_weights(card)  # for the case that the rest does not come
        steps = math.ceil(saved / (1 - FALL))

    if before.get("state") == "finished" and before["steps"] != most:
        ended = Trained(read_lines(run / "metrics.jsonl"), before)
    else:
        with ending_in(card, minutes_of(card)):
            ended = run_trainer(card, RECIPE, run, *settings, f"train.steps={steps}")
    return describe(card, ended)


def minutes_of(card: Card) -> float:
    """What the training has left."""
    return max(0.0, (card.end - time.monotonic() - (0 if card.dry else AFTER)) / 60)


def describe(card: Card, ended: Trained) -> Values:
    errors = find_problems(card, RECIPE, ended)
    if not ended.losses:
        return {"errors": errors or {"run": "no step"}}
    last = max(ended.losses)
    tokens = max(line.get("tokens", 0) for line in ended.lines)
    epoch = sum(map(count_tokens, sets_of(card).values()))
    values: Values = {"steps": last, "tokens": tokens, "epochs": tokens / epoch}
    timed = [x for x in ended.lines if "tokens_per_second" in x and x["step"] > COMPARED]
    rates = [line["tokens_per_second"] for line in timed]
    values |= {"tokens/s": statistics.median(rates)} if rates else {}
    values |= {"loss": ended.losses[last], "curve": points(ended)}
    if ended.validation:
        values["validation"] = [*ended.validation.items()]
        values["validation loss"] = ended.validation[max(ended.validation)]
    return values | ({"errors": errors} if errors else {})


# ------------------------------ what comes back


def bring_weights(card: Card) -> Values:
    """Writes the newest checkpoint in bf16 into the card's output, in files that come back.

    model-….safetensors: the weights. model.tar.xz: the rest of the model's folder, and the run's metrics.
    """
    from nalanda.inference.load import load_model
    from nalanda.train.export import export

    run, folder = folder_of(card) / "run", folder_of(card) / RECIPE
    if not (run / "checkpoints").exists():
        raise RuntimeError("no checkpoint on this machine; training must run first")
    export(run, folder, replace=True)
    model, _ = load_model(str(folder), dtype="bf16")
    for file in folder.glob("*.safetensors*"):  # in fp32
        file.unlink()
    model.save_pretrained(folder, max_shard_size=SHARD)
    shutil.copyfile(run / "metrics.jsonl", folder / "metrics.jsonl")

    for file in card.output.glob("*.safetensors"):  # of an earlier checkpoint
        file.unlink()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        shutil.copyfile(file, card.output / file.name)
    with tarfile.open(card.output / "model.tar.xz", "w:xz") as archive:
        for file in sorted({*folder.iterdir()} - {*files}):
            archive.add(file, f"{RECIPE}/{file.name}")
    size = sum(file.stat().st_size for file in files)
    step = read_facts(folder / "run.json")["step"]
    facts: Values = {"step": step, "parameters": model.num_parameters()}
    return facts | {"files": len(files), "MB": size / 1e6}


def score(card: Card) -> Values:
    """Bits a byte of the weights that come back, beside bigrams of the same text: on all rows, and by source."""
    from nalanda_eval.baselines import Bigram, measure_perplexity

    from nalanda.config.load import load_config
    from nalanda.data.text_bytes import text_bytes
    from nalanda.inference.load import load_model
    from nalanda.train.build import open_batches
    from nalanda.train.loss import count_bytes, count_labels

    config = load_config(folder_of(card) / "run" / "config.yaml")
    model, tokenizer = load_model(str(folder_of(card) / RECIPE))
    batches, validation = open_batches(config, tokenizer)
    trained = config.train.steps * config.accumulation(processes=1)
    epoch = sum(map(count_tokens, sets_of(card).values()))
    once = epoch // (config.train.micro_batch_size * config.data.seq_len)
    seen = itertools.islice(batches, min(trained, once))
    sides = {
        "bits a byte": lambda x: measure_perplexity(model, x),
        "bigrams": Bigram(seen, len(tokenizer)).perplexity,
    }
    batches.close()

    sizes = text_bytes(tokenizer)
    if sizes is None:
        raise RuntimeError("the tokenizer loses bytes")
    values: Values = {}
    for name, measure in sides.items():
        by_source, total, length = {}, 0.0, 0
        for source, part in validation.items():
            bits = math.log2(measure(part)) * sum(map(count_labels, part))
            count = sum(count_bytes(row, sizes) for row in part)
            by_source[source or "all"] = round(bits / count, 3)
            total, length = total + bits, length + count
        values |= {name: total / length, f"{name}, by source": by_source}
    return values


def sample(card: Card) -> Values:
    """What the weights that come back write after each prompt."""
    from nalanda.inference.generate import generate
    from nalanda.inference.options import Sampling

    model = str(folder_of(card) / RECIPE)
    sampling = Sampling(max_new_tokens=4 if card.dry else 100, temperature=0.7, seed=1)
    return {prompt: generate(model, prompt, sampling=sampling, stream=False) for prompt in PROMPTS}


def keep_cases(card: Card) -> list[Case]:
    runs = {"training": train_model, "weights": bring_weights, "samples": sample, "scores": score}
    return [Case(GROUP, name, run) for name, run in runs.items()]
