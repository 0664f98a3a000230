"""Recall of token mixers: small decoders trained on generated tasks at equal parameters and equal state.

`run_recall` trains one model on one task with one seed and learning rate, and returns its record. `recall`
plans a sweep of such runs, trains those without a record in DIR/runs, and writes results.json, .md and
pictures.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from nalanda.common.errors import InputError, output_folder
from nalanda.common.text import size, suggest
from nalanda.common.versions import list_versions, versions
from nalanda.config.load import parse_yaml
from nalanda.config.schema import OptimConfig, ScheduleConfig
from nalanda.inference.load import choose_device
from nalanda.model import FEATURE_MAPS, MIXERS, NalandaConfig, NalandaForCausalLM
from nalanda.model.options import check_types
from nalanda.train.optim import build_optimizer, learning_rate
from nalanda_lab.equal import (
    MODEL,
    configured,
    grows,
    label,
    models,
    most_parameters,
    with_parameters,
    with_state,
)
from nalanda_lab.paired import take_step
from nalanda_lab.recall_report import draw_recall, recall_markdown
from nalanda_lab.sweep import Jobs, follow, key
from nalanda_lab.synthetic import IGNORED, TASKS, Task, best_constant
from nalanda_lab.track import publish

SIGNED = ("deltanet:allow_neg_eigval=true", "gated_deltanet:allow_neg_eigval=true")
STATES = (2048, 8192, 32768)
"""Bytes of a sequence's state."""

# ------------------------------ one run


@dataclass(frozen=True)
class Training:
    steps: int = 600
    batch_size: int = 32
    lr: float = 3e-3
    weight_decay: float = 0.1
    rows: int = 512
    """Rows of each case in test and validation."""
    points: int = 10
    """Points of the curve, each a score on 64 validation rows of each case."""
    curriculum: bool = False
    """Whether the trained cases come in turn, not mixed: `Task.batches`."""


def seeded_model(config: NalandaConfig, seed: int) -> NalandaForCausalLM:
    """A model whose weights of one name and shape are those of every other model of this seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = NalandaForCausalLM(config)
        for name, module in net.named_modules():
            torch.manual_seed(seed + crc32(name.encode()))
            net._init_weights(module)
    return net


def answers(net: NalandaForCausalLM, ids: Tensor, asked: Tensor) -> Tensor:
    """The logits `[A, vocab_size]` at the A positions of `asked`, bool `[n, T]`."""
    out = net.model(ids, use_cache=False)
    return net.lm_head(out.last_hidden_state[asked])


def run_recall(
    model: dict[str, Any],
    task: Task,
    seed: int,
    training: Training | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Trains a model on a task and returns a record of JSON values.

    Data and their order depend only on task, seed and batch size, and weights of one name and shape on the
    seed: runs of one seed are paired. Test and validation rows are the same for all seeds. The caller's
    random state is restored. On a CPU, equal calls with equally many threads give equal records, except
    `seconds`.

    Args:
        model: keys of `NalandaConfig`, over those of `MODEL`.
        task: one of `TASKS`, or another instance of their classes.
        seed: seed of the weights and of the training data.

    Returns:
        `settings`, from `recall_settings`, the record's key; `scores` of the test, an accuracy for each of `cases`,
        and their mean `score`; `chance`, the accuracies of the best constant answer; `validation`, the mean score on
        other rows, for choosing settings; `curve`, [step, mean training loss since the last point, score on a
        part of the validation]; `parameters`; `state_bytes` after
        the longest trained length, and `state_grows`; `flops_per_token` of a forward pass at that length;
        `seconds`, `device`, `versions`.

    Raises:
        ValueError: the keys give no valid model.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of dropout
        return _run_recall(model, task, seed, training or Training(), device)


def _run_recall(
    model: dict[str, Any], task: Task, seed: int, training: Training, device: str
) -> dict[str, Any]:
    started = time.perf_counter()
    config = configured(model, task.vocab_size)
    net: Any = seeded_model(config, seed)
    net.to(device)
    optim = OptimConfig(lr=training.lr, weight_decay=training.weight_decay)
    schedule = ScheduleConfig(warmup_steps=training.steps // 10)
    optimizer = build_optimizer(net, optim)

    tests = fixed_batches(task, training.rows, "test")
    held_out = fixed_batches(task, training.rows, "validation")
    # Points of the curve are measured on fewer rows.
    sample = [(ids[:64], labels[:64]) for ids, labels in held_out]
    points = {round(training.steps * (i + 1) / training.points) for i in range(training.points)}

    curriculum = training.steps if training.curriculum else None
    batches = task.batches(seed, training.batch_size, "train", curriculum)
    losses, curve = [], []
    for step in range(1, training.steps + 1):
        ids, labels = (x.to(device) for x in next(batches))
        asked = labels != IGNORED
        loss = F.cross_entropy(answers(net, ids, asked), labels[asked])
        loss.backward()
        rate = learning_rate(step, training.steps, training.lr, schedule)
        take_step(optimizer, net, rate, optim.max_grad_norm)

        losses.append(loss.detach())
        if step in points:
            mean_loss = torch.stack(losses).mean().item()
            curve.append([step, mean_loss, fmean(evaluate_recall(net, sample))])
            losses.clear()

    scores = evaluate_recall(net, tests)
    length = max(task.length(case) for case in task.trained)
    record = {
        "settings": recall_settings(model, task, seed, training),
        "cases": list(task.cases),
        "scores": scores,
        "score": fmean(scores),
        "chance": [best_constant(labels) for _, labels in tests],
        "validation": fmean(evaluate_recall(net, held_out)),
        "curve": curve,
        "parameters": sum(p.numel() for p in net.parameters()),
        "state_bytes": config.state_bytes(length, torch.float32),
        "state_grows": grows(config),
        "flops_per_token": config.flops_per_token(length),
        "seconds": time.perf_counter() - started,
        "device": device,
        "versions": versions(),
    }
    return json.loads(json.dumps(record))  # as read from a file: tuples become lists


def recall_settings(
    model: dict[str, Any], task: Task, seed: int, training: Training
) -> dict[str, Any]:
    """Everything that determines a run; as JSON it is the record's key."""
    return {
        "task": dataclasses.asdict(task),
        "model": MODEL | model,
        "seed": seed,
        "training": dataclasses.asdict(training),
    }


def fixed_batches(task: Task, rows: int, split: str) -> list[tuple[Tensor, Tensor]]:
    """A batch of each case, the same at every call."""
    draw = torch.Generator().manual_seed(0)
    return [task.batch(draw, rows, split, case) for case in task.cases]


@torch.no_grad()
def evaluate_recall(net: NalandaForCausalLM, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The accuracy on each batch."""
    scores = []
    net.eval()
    for ids, labels in batches:
        asked = labels != IGNORED
        guesses = answers(net, ids.to(net.device), asked.to(net.device)).argmax(-1).cpu()
        scores.append((guesses == labels[asked]).double().mean().item())
    net.train()
    return scores


# ------------------------------ the sweep


@dataclass(frozen=True)
class RecallTrial:
    """A row of the results: a model on a task, and what it was matched in."""

    task: Task
    match: str
    name: str
    model: dict[str, Any]


def plan_recall(
    tasks: Iterable[Task],
    candidates: list[dict[str, Any]],
    base: dict[str, Any],
    match: str,
    states: Iterable[int],
) -> tuple[list[RecallTrial], list[str]]:
    """The trials, all at equal parameters, and notes on what is left out."""
    # (title, bytes of state or None): the ways of matching.
    matches: list[tuple[str, int | None]] = []
    if match != "state":
        matches.append(("parameters", None))
    if match != "parameters":
        matches += [(f"state {size(count)}", count) for count in states]

    parameters = most_parameters(base)
    matched, refused = [], {}
    for (title, state_bytes), candidate in itertools.product(matches, candidates):
        model = base | candidate
        try:
            if state_bytes is not None:
                model = with_state(model, state_bytes)
            matched.append((title, label(candidate), with_parameters(model, parameters)))
        except ValueError as error:
            refused.setdefault(f"{title}: {error}", []).append(label(candidate))

    notes = [f"left out at equal {reason}: {', '.join(names)}" for reason, names in refused.items()]
    return [RecallTrial(task, *model) for task in tasks for model in matched], notes


Job = tuple[dict[str, Any], Task, int, Training]
"""Arguments of `run_recall`."""


def recall_jobs(jobs: Iterable[Job], device: str) -> Jobs:
    """The jobs as arguments of `sweep`."""
    return {key(recall_settings(*job)): partial(run_recall, *job, device=device) for job in jobs}


def describe_recall(record: dict[str, Any]) -> str:
    chosen = record["settings"]
    return f"{chosen['task']['name']}: {label(chosen['model'])} {record['score']:.3f}"


SHARED = ("cases", "parameters", "state_bytes", "state_grows", "flops_per_token", "chance")
"""Figures that the runs of a row have in common."""


def summary(
    trials: Iterable[RecallTrial], records: Iterable[dict], seeds: int, trainings: list[Training]
) -> list[dict]:
    """A row for each trial: means and standard deviations over seeds, at the best learning rate.

    The best rate has the best mean validation. `records` must have every run of the trials.
    """
    by_key = {key(record["settings"]): record for record in records}
    return [_summarised(trial, by_key, seeds, trainings) for trial in trials]


def _summarised(
    trial: RecallTrial, by_key: dict[str, dict], seeds: int, trainings: list[Training]
) -> dict[str, Any]:
    """The row of a trial. by_key: the records."""
    runs: dict[float, list[dict]] = {}  # by learning rate, one for each seed
    for training in trainings:
        settings = [
            recall_settings(trial.model, trial.task, seed, training) for seed in range(seeds)
        ]
        runs[training.lr] = [by_key[key(each)] for each in settings]

    means = {lr: fmean(run["validation"] for run in each) for lr, each in runs.items()}
    lr = max(means, key=means.__getitem__)
    best = runs[lr]

    # A column for each case, and one for the mean over cases.
    columns = list(zip(*([*run["scores"], run["score"]] for run in best), strict=True))
    *scores, score = map(fmean, columns)
    *spreads, spread = (stdev(column) if seeds > 1 else 0.0 for column in columns)
    row = {
        "task": trial.task.name,
        "match": trial.match,
        "model": trial.name,
        "lr": lr,
        "seeds": seeds,
        "scores": scores,
        "spreads": spreads,
        "score": score,
        "spread": spread,
    }
    return row | {name: best[0][name] for name in SHARED}


# ------------------------------ the command

EVERY = [name for name in TASKS if name != "listops_lra"]
SMALL: dict[str, dict[str, Any]] = {
    "mqar": {"pairs": (2, 4, 8, 12), "sequence": 48, "values": 16},
    "needles": {"keys": (2, 4, 8, 12), "sequence": 40, "values": 16},
    "copying": {"lengths": (4, 8, 16), "longer": (24,), "symbols": 16},
    "parity": {"trained_length": 16},
    "modular": {"trained_length": 16},
    "s3": {"trained_length": 8},
    "a5": {"trained_length": 8},
    "s5": {"trained_length": 8},
    "listops": {"bands": ((4, 12), (12, 24))},
}
QUICK = {name: dataclasses.replace(TASKS[name], **sizes) for name, sizes in SMALL.items()}
QUICK_STATES, QUICK_STEPS = (2048, 4096), 500
# (tasks, mixers, maps, match): the most telling comparisons for a few minutes, one run of the rest.
QUICK_SWEEP = (
    (["mqar"], ["linear_attention", "deltanet", "softmax"], ["own"], "state"),
    (["parity"], ["deltanet", SIGNED[0]], ["own"], "parameters"),
    (
        [name for name in QUICK if name not in ("mqar", "parity")],
        ["deltanet"],
        ["own"],
        "parameters",
    ),
)


def recall(
    *,
    tasks: list[str] | None = None,
    mixers: list[str] | None = None,
    maps: list[str] | None = None,
    seeds: int | None = None,
    match: str | None = None,
    states: list[int] | None = None,
    lrs: list[float] | None = None,
    steps: int | None = None,
    overrides: list[str] | None = None,
    output: str | Path = "runs/recall",
    workers: int = 2,
    device: str | None = None,
    quick: bool = False,
) -> list[dict[str, Any]]:
    """Trains every mixer × map on every task, prints tables, and writes results.json, .md and pictures.

    `output` also gets runs/, a file for each finished run, which is not trained again.

    Args:
        tasks: names from `TASKS`; by default all except ListOps of the published size.
        mixers: names from `MIXERS`, with options such as `deltanet:allow_neg_eigval=true`; by default all,
            and the delta rules with negative eigenvalues.
        maps: names from `FEATURE_MAPS`, or "own", each mixer's default map; by default all.
        seeds: number of seeds, from 0; by default 3. All models see the same data of a seed.
        match: "parameters", "state", or by default "both". All models of a task have equal parameters, by the
            GLU's width; "state" also chooses head sizes for equal bytes of state.
        states: bytes of a sequence's fp32 state; each model is trained once for each.
        lrs: learning rates, of which the best by validation is reported.
        steps: steps of each run.
        overrides: `SECTION.KEY=VALUE`, where the section is a task's name, `model` or `training`.
        workers: processes, of one thread each.
        device: by default the GPU if there is one, else the CPU.
        quick: small tasks, one seed, and, unless mixers or maps are given, a few models.

    Returns:
        The rows of results.json.

    Raises:
        InputError: an unknown name, or invalid values.
    """
    output = output_folder(output, "--output")
    device = choose_device(device)
    all_tasks, base, training = override(QUICK if quick else TASKS, overrides or [])
    for name in tasks or ():
        if name not in all_tasks:
            raise InputError(f"--tasks: unknown task {name!r}{suggest(name, all_tasks)}")
    if match not in (None, "parameters", "state", "both"):
        raise InputError(f"--match: {match!r}: use parameters, state or both")

    steps = steps or (QUICK_STEPS if quick else training.steps)
    training = dataclasses.replace(training, steps=steps)
    trainings = [dataclasses.replace(training, lr=lr) for lr in lrs or [training.lr]]
    seeds = seeds or (1 if quick else 3)
    sweeps = [(EVERY, mixers or [*MIXERS, *SIGNED], maps or [*FEATURE_MAPS], "both")]
    if quick and not (mixers or maps):
        sweeps = list(QUICK_SWEEP)

    trials: list[RecallTrial] = []
    notes: dict[str, None] = {}  # in order, each once
    for every, some_mixers, some_maps, default_match in sweeps:
        chosen = [all_tasks[name] for name in tasks or every if name in every or not quick]
        sizes = states or (QUICK_STATES if quick else STATES)
        candidates, refused = models(some_mixers, some_maps, base)
        planned, left_out = plan_recall(chosen, candidates, base, match or default_match, sizes)
        trials += planned
        notes |= dict.fromkeys(refused + left_out)

    jobs = [
        (trial.model, trial.task, seed, each)
        for seed in range(seeds)
        for trial in trials
        for each in trainings
    ]
    records = follow(recall_jobs(jobs, device), output / "runs", workers, describe_recall)
    rows = summary(trials, records, seeds, trainings)
    figures = draw_recall(rows, all_tasks, output)
    results = {
        "rows": rows,
        "notes": list(notes),
        "figures": [file.name for file in figures],
        "versions": list_versions(record.get("versions", {}) for record in records),
    }
    publish(output, "results", recall_markdown(rows, all_tasks, list(notes)), results)
    return rows


def override(
    tasks: dict[str, Task], overrides: Iterable[str]
) -> tuple[dict[str, Task], dict[str, Any], Training]:
    """Tasks, model keys and training, changed by `SECTION.KEY=VALUE`. Raises `InputError`."""
    changes: dict[str, dict[str, Any]] = {}
    sections = [*tasks, "model", "training"]
    for text in overrides:
        path, equals, value = text.partition("=")
        section, _, name = path.partition(".")
        if not equals or not name:
            raise InputError(f"{text}: write SECTION.KEY=VALUE")
        if section not in sections:
            raise InputError(f"{section}: no such section{suggest(section, sections)}")
        changes.setdefault(section, {})[name] = listless(parse_yaml(value, text))

    def changed(section: str, settings: Any) -> Any:
        types = {field.name: field.type for field in dataclasses.fields(settings)}
        values = changes.get(section, {})
        for name in values:
            if name not in types:
                raise InputError(f"{section}.{name}: no such setting{suggest(name, types)}")
        try:
            check_types(values, types, f"{section}.")
            return dataclasses.replace(settings, **values)
        except ValueError as error:
            raise InputError(str(error)) from None

    return (
        {name: changed(name, task) for name, task in tasks.items()},
        MODEL | changes.get("model", {}),
        changed("training", Training()),
    )


def listless(value: Any) -> Any:
    """The value with tuples in place of lists: tasks are hashable."""
    return tuple(map(listless, value)) if isinstance(value, list) else value
