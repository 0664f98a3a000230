"""Runs a study: trains what runs.jsonl has no line for. `report` makes tables and pictures of the lines."""

import contextlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from nalanda.bench.baselines import Bigram
from nalanda.common.errors import InputError
from nalanda.config.load import section
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare import prepare
from nalanda.data.token_set import TokenSet, is_token_set, read_index
from nalanda.data.tokenizer import build_tokenizer
from nalanda.train.build import open_batches
from nalanda.train.log import read_facts, read_metrics, versions
from nalanda.train.loop import train
from nalanda_eval import recall
from nalanda_eval.analysis import gradient_spread
from nalanda_eval.studies.plan import (
    MIXERS_OWN,
    Trial,
    bigram_settings,
    chosen,
    finalists,
    run_config,
    screening,
)
from nalanda_eval.studies.spec import load_study, mqar, title
from nalanda_eval.sweep import Jobs, Record, follow, key, records

SPREAD_ROWS = 16
"""Validation rows that the spread of gradients is measured on."""


def run_study(directory: Path, *, text: str | None = None, workers: int = 2) -> None:
    """Trains what the study lacks: every system with one seed, then the finalists with the seeds of `finals`.

    For each seed it also measures bigrams of the tokens that the language models see.

    Args:
        directory: a folder with study.yaml and lm.yaml. Its `runs.jsonl` gets a line for each finished run;
            `work` holds the tokenised text and unfinished runs.
        text: a corpus, as `data.source` of a recipe; by default lm.yaml's.
        workers: processes, of one thread each.

    Raises:
        InputError: settings that cannot work, or a text other than that of the recorded runs.
    """
    console = Console()
    study, questions, lm = load_study(directory)
    first, notes = screening(study, questions, lm)
    file, work = directory / "runs.jsonl", directory / "work"
    prepared = prepare_text(lm, text, work, workers)
    mine = text_facts(prepared)
    for record in records(file).values():
        if (other := record.get("text", mine))["fingerprint"] != mine["fingerprint"]:
            raise InputError(
                f"{file}: has runs on another text, {other['name']}, than {mine['name']}; give that one with "
                "--text, or another folder"
            )
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    follow(jobs(first, lm, prepared, work), file, workers, console, describe_trial)
    best = chosen(study, first, records(file))
    for question, won in best.items():
        console.print(f"best of {question}: {won}", markup=False, highlight=False)
    last, _ = finalists(study, questions, lm, best)
    asked = [bigram_settings(seed, lm) for seed in (study.seed, *study.finals.seeds)]
    baselines = {key(settings): partial(measure_bigrams, settings, lm, prepared) for settings in asked}
    follow({**baselines, **jobs(last, lm, prepared, work)}, file, workers, console, describe_trial)


def prepare_text(lm: dict[str, Any], text: str | None, work: Path, workers: int) -> Path:
    """Tokenises the text into `work`, unless an earlier call did, and returns the token set's folder."""
    place = work / "text"
    source = text or lm["data"]["source"]
    if is_token_set(place):
        held = read_index(place)["settings"]["source"]
        if text is not None and held != source:
            raise InputError(f"{place}: holds {held}; remove it, or give another folder for {source}")
        return place
    data = section(DataConfig, lm["data"] | {"source": source}, "data.")
    tokenizer = section(TokenizerConfig, lm["tokenizer"], "tokenizer.")
    prepare(data, tokenizer, place, workers=workers, say=lambda line: print(line, flush=True))
    return place


def text_facts(text: Path) -> dict[str, Any]:
    """A prepared text's name, fingerprint of documents and tokens, vocabulary size and training tokens."""
    index = read_index(text)
    made = [index["settings"]["corpus"], index["tokenizer"]["fingerprint"]]
    source = index["settings"]["source"]
    return {
        "name": Path(source).name if isinstance(source, str) else ", ".join(source),
        "fingerprint": sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16],
        "vocab_size": index["tokenizer"]["vocab_size"],
        "tokens": index["train"]["tokens"],
    }


def jobs(trials: Iterable[Trial], lm: dict[str, Any], text: Path, work: Path) -> Jobs:
    """The runs of the trials for `sweep`; settings that several trials share are trained once."""
    found: dict[str, Any] = {}
    for trial in trials:
        for settings in trial.settings:
            if trial.task == "lm":
                found[key(settings)] = partial(train_lm, settings, lm, text, work)
            else:
                task, training = mqar(settings), section(recall.Training, settings["training"], "")
                arguments = settings["model"], task, settings["seed"], training
                found[key(settings)] = partial(recall.run_recall, *arguments)
    return found


def train_lm(settings: dict[str, Any], lm: dict[str, Any], text: Path, work: Path) -> Record:
    """Trains a language model and returns its record. Its folder in `work` is removed afterwards.

    Returns:
        `settings`; `score`, the validation loss in nats a token; `scores`, perplexities by source; `curve`,
        [step, training loss]; `parameters`, `state_bytes` (fp32, after a row), `state_grows`;
        `flops_per_token` of a forward pass; `gradient_spread` by layer, see `analysis`; `tokens`, `seconds`,
        `device`, `versions`. A diverged run has the reason in `failed`, and no scores.
    """
    start = time.perf_counter()
    place = work / sha256(key(settings).encode()).hexdigest()[:16]
    recipe = lm | settings | {"output_dir": str(place), "tokenizer": str(text / "tokenizer")}
    config = run_config(key(recipe | {"data": lm["data"] | {"source": str(text)}}))
    work.mkdir(parents=True, exist_ok=True)
    failed = None
    with place.with_suffix(".log").open("a") as log, contextlib.redirect_stdout(log):
        try:
            train(config)
        except InputError as error:
            failed = str(error)
            if not (place / "metrics.jsonl").is_file():  # bad input, not training that diverged
                raise
    facts, lines = read_facts(place), list(read_metrics(place / "metrics.jsonl"))
    length = config.data.seq_len
    shape = recall.configured(settings["model"], text_facts(text)["vocab_size"])
    record = {
        "settings": settings,
        "curve": [[line["step"], line["loss"]] for line in lines if "loss" in line],
        "parameters": facts["parameters"],
        "state_bytes": shape.state_bytes(length, torch.float32),
        "state_grows": recall.grows(shape),
        "flops_per_token": shape.flops_per_token(length),
        "tokens": config.train.steps * config.train.tokens_per_step,
        "text": text_facts(text),
        "seconds": time.perf_counter() - start,
        "device": facts["device"],
        "versions": facts["versions"],
    }
    if failed:
        record["failed"] = failed
    else:
        measured = next(line for line in reversed(lines) if "val_loss" in line)
        named = {k.removeprefix("val_ppl/"): v for k, v in measured.items() if k.startswith("val_ppl/")}
        model = AutoModelForCausalLM.from_pretrained(place / "final", dtype=torch.float32)
        tokens = torch.as_tensor(TokenSet(text, "validation").read(0, SPREAD_ROWS * length))
        record |= {
            "score": measured["val_loss"],
            "scores": named,
            "gradient_spread": gradient_spread(model, tokens.view(SPREAD_ROWS, length)),
        }
    shutil.rmtree(place)
    place.with_suffix(".log").unlink()
    return json.loads(json.dumps(record))


def measure_bigrams(settings: dict[str, Any], lm: dict[str, Any], text: Path) -> Record:
    """The record of a bigram baseline: keys as in `train_lm`, where they apply.

    `baselines.Bigram` counts the tokens that every language model of the seed trains on. Its loss, in nats a
    token, is measured on their validation rows.
    """
    start = time.perf_counter()
    recipe = lm | {"seed": settings["seed"], "tokenizer": str(text / "tokenizer")}
    config = run_config(key(recipe | {"data": lm["data"] | {"source": str(text)}}))
    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    batches, validation = open_batches(config, tokenizer)
    with contextlib.closing(batches):
        seen = itertools.islice(batches, config.train.steps * config.accumulation(processes=1))
        found = Bigram(seen, len(tokenizer)).perplexity(itertools.chain(*validation.values()))
    return {
        "settings": settings,
        "score": math.log(found),
        "tokens": config.train.steps * config.train.tokens_per_step,
        "text": text_facts(text),
        "seconds": time.perf_counter() - start,
        "device": "cpu",
        "versions": versions(),
    }


def describe_trial(record: Record) -> str:
    asked = record["settings"]
    if "bigrams" in asked:
        return f"lm, seed {asked['seed']}: bigrams {record['score']:.3f}"
    model, task = asked["model"], "recall" if "task" in asked else "lm"
    mixer = model["mixer"] if isinstance(model["mixer"], str) else " ".join(model["mixer"])
    name = title({k: model[k] for k in MIXERS_OWN if k in model} | {"mixer": mixer})
    result = f"{record['score']:.3f}" if "score" in record else "diverged"
    return f"{task}, seed {asked['seed']}: {name} {result}"
