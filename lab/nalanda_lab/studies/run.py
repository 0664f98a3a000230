"""Runs a study: trains what runs.jsonl has no line for. `report` makes tables and pictures of the lines."""

import contextlib
import itertools
import json
import math
import time
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from nalanda_eval.baselines import Bigram

from nalanda.common.errors import InputError
from nalanda.common.versions import versions
from nalanda.config.load import section
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare import prepare, token_settings
from nalanda.data.token_set import is_token_set, read_index
from nalanda.data.tokenizer import build_tokenizer
from nalanda.train.build import open_batches
from nalanda_lab import recall
from nalanda_lab.studies.paired import by_document, cpu_model, train_paired
from nalanda_lab.studies.plan import (
    CALIBRATION,
    System,
    best_recall_rate,
    bigram_settings,
    chosen_rate,
    equal_rates,
    final_loss,
    final_settings,
    recall_models,
    recall_run,
    run_config,
    systems,
)
from nalanda_lab.studies.spec import Study, check_followed, load_study
from nalanda_lab.sweep import Jobs, Record, follow, key, records


def run_study(directory: Path, *, text: str | None = None, workers: int = 2) -> None:
    """Trains what the study lacks: the calibration, then each size, then recall; last, runs at equal rates.

    In the first three the rates are chosen first. For every seed and budget it also measures bigrams of the
    tokens that the models see.

    Args:
        directory: a folder with study.yaml and lm.yaml. Its `runs.jsonl` gets a line for each finished run;
            `work` holds the tokenised text and unfinished runs.
        text: a corpus, as `data.source` of a recipe; by default that in `work`, or else lm.yaml's.
        workers: processes, of one thread each.

    Raises:
        InputError: settings that cannot work, or a text or tokenizer other than that in `work` or of the
            recorded runs.
    """
    study, lm = load_study(directory)
    check_followed(lm, directory / "lm.yaml")
    planned = systems(study, lm)
    file, work = directory / "runs.jsonl", directory / "work"
    prepared = prepare_text(lm, text, work, workers)
    mine, recorded = text_facts(prepared), records(file)
    others = {record.get("machine") for record in recorded.values()} - {None, here := cpu_model()}
    if others:
        print(
            f"{file}: has runs made on {', '.join(sorted(map(str, others)))}; this is {here}. Processors "
            "differ in rounding, which can move a run's loss by a good part of what another seed does",
            flush=True,
        )
    for record in recorded.values():
        if (other := record.get("text", mine))["fingerprint"] != mine["fingerprint"]:
            raise InputError(
                f"{file}: has runs on another text, {other['name']}, than {mine['name']}; give that one with "
                "--text, or another folder"
            )

    def train(asked: list[dict[str, Any]]) -> None:
        jobs = {
            key(settings): partial(train_lm, settings, lm, prepared, work) for settings in asked
        }
        follow(jobs, file, workers, describe_run)

    asked = [
        bigram_settings(seed, tokens, lm)
        for seed, tokens in itertools.product(study.seeds, study.budgets)
    ]
    jobs: Jobs = {
        key(settings): partial(measure_bigrams, settings, lm, prepared) for settings in asked
    }
    follow(jobs, file, workers, describe_run)
    calibration = [system for system in planned if system.group == CALIBRATION]
    rest = [system for system in planned if system.group != CALIBRATION]
    for part in (calibration, *([s for s in rest if s.size == size] for size in study.sizes)):
        train_part(part, study, lm, file, train)
    train_recall(study, file, workers)
    alike = equal_rates(planned, study)
    train(
        [
            final_settings(s, rate, seed, study, lm)
            for seed in study.seeds
            for s, rate in alike.items()
        ]
    )


def train_part(
    part: list[System], study: Study, lm: dict[str, Any], file: Path, train: Any
) -> None:
    """Chooses the systems' rates, rung by rung, and trains them with every seed."""
    while True:
        found = records(file)
        choices = [chosen_rate(system, study, lm, found) for system in part]
        todo = [
            settings for _, asked in choices for settings in asked if key(settings) not in found
        ]
        if not todo:
            break
        train(todo)
    train(
        [
            final_settings(system, rate, seed, study, lm)
            for seed in study.seeds
            for system, (rate, _) in zip(part, choices, strict=True)
            if rate is not None
        ]
    )


def train_recall(study: Study, file: Path, workers: int) -> None:
    """Trains every form of every mixer on recall: with all rates, then with every seed at the best one."""
    if study.recall is None:
        return
    models = recall_models(study)
    choosing = [
        recall_run(model, study, rate, study.rates.seed)
        for model, rate in itertools.product(models.values(), study.recall.rates)
    ]
    follow(jobs_of(choosing), file, workers, describe_run)
    found = records(file)
    best = {name: best_recall_rate(model, study, found) for name, model in models.items()}
    judging = [
        recall_run(models[name], study, rate, seed)
        for seed in study.recall.seeds
        for name, rate in best.items()
        if rate is not None
    ]
    follow(jobs_of(judging), file, workers, describe_run)


def jobs_of(runs: list[tuple]) -> Jobs:
    return {key(recall.recall_settings(*run)): partial(recall.run_recall, *run) for run in runs}


def prepare_text(lm: dict[str, Any], text: str | None, work: Path, workers: int) -> Path:
    """Tokenises the text into `work`, unless an earlier call did, and returns the token set's folder.

    text: by default that of the earlier call, or else lm's. Raises `InputError` if the earlier call had
    another text, or other settings that the tokens depend on.
    """
    place = work / "text"
    held = read_index(place)["settings"] if is_token_set(place) else {}
    source = text or held.get("source") or lm["data"]["source"]
    data = section(DataConfig, lm["data"] | {"source": source}, "data.")
    tokenizer = section(TokenizerConfig, lm["tokenizer"], "tokenizer.")
    if held:
        held["tokenizer"] = asdict(
            TokenizerConfig(**held["tokenizer"])
        )  # an older set has fewer keys
        asked = token_settings(data, tokenizer, held["corpus"], held["shard_bytes"])
        for name in asked | held:
            if asked.get(name) != held.get(name):
                before, now = (json.dumps(settings.get(name)) for settings in (held, asked))
                raise InputError(
                    f"{place}: was prepared with {name} {before}, and this is {now}; remove it, or give "
                    "another folder"
                )
        if source not in (text, lm["data"]["source"]):
            print(f"{place}: the text is {source}, as before; --text names another", flush=True)
        return place
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


def train_lm(settings: dict[str, Any], lm: dict[str, Any], text: Path, work: Path) -> Record:
    """The record of a language model; see `train_paired`."""
    config = run_config(settings, lm, str(text))
    return train_paired(settings, config, text, work) | {"text": text_facts(text)}


def measure_bigrams(settings: dict[str, Any], lm: dict[str, Any], text: Path) -> Record:
    """The record of a bigram baseline: `loss`, in nats a token, on the models' validation rows, and
    `documents`, the tokens of each document there.

    `baselines.Bigram` counts the tokens that every model of the seed has seen at that budget.
    """
    start = time.perf_counter()
    config = run_config(settings, lm, str(text))
    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    batches, validation = open_batches(config, tokenizer)
    with contextlib.closing(batches):
        steps = settings["tokens"] // config.train.tokens_per_step
        seen = itertools.islice(batches, steps * config.accumulation(processes=1))
        rows = list(itertools.chain(*validation.values()))
        found = Bigram(seen, len(tokenizer)).perplexity(rows)
    counts = by_document(
        [row["labels"][:, 1:] != -100 for row in rows], rows, tokenizer.bos_token_id
    )
    facts = {"machine": cpu_model(), "threads": torch.get_num_threads(), "versions": versions()}
    seconds = time.perf_counter() - start
    return {
        "settings": settings,
        "loss": math.log(found),
        "documents": counts,
        "text": text_facts(text),
        **facts,
        "seconds": seconds,
    }


def describe_run(record: Record) -> str:
    asked = record["settings"]
    if "bigrams" in asked:
        return f"bigrams of {asked['tokens']:,} tokens, seed {asked['seed']}: {record['loss']:.3f}"
    model = asked["model"]
    options = [
        f"{k}={v}"
        for part in ("mixer_options", "feature_map_options")
        for k, v in model.get(part, {}).items()
    ]
    name = " ".join([str(model["mixer"]), str(model.get("feature_map") or ""), *options])
    if "task" in asked:
        return f"recall, {name}, rate {asked['training']['lr']:g}, seed {asked['seed']}: {record['score']:.3f}"
    loss = f"{final_loss(record):.3f} nats" if "failed" not in record else "diverged"
    return f"{name}, rate {asked['rate']:g}, seed {asked['seed']}, {asked['budgets'][-1]:,} tokens: {loss}"
