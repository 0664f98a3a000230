"""Recall of token mixers: small decoders trained on generated tasks at equal parameters and equal state.

`run_recall` trains one model on one task with one seed and learning rate, and returns its record. `recall`
plans a sweep of such runs, trains those without a record in DIR/runs.jsonl, and writes results.json, .md and
pictures.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from nalanda.common.errors import InputError, output_folder
from nalanda.common.files import write_atomically
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
from nalanda_lab.recall_report import draw_recall, print_recall, recall_markdown
from nalanda_lab.sweep import Jobs, follow, key
from nalanda_lab.synthetic import (
    IGNORED,
    MQAR,
    TASKS,
    Copying,
    ListOps,
    Needle,
    Needles,
    Regression,
    StateTracking,
    Task,
    best_constant,
)

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


class Reader(nn.Module):
    """The decoder on a task's inputs: tokens `[n, T]`, or numbers `[n, T, dim]` through a linear layer.

    Returns the head's outputs where an answer is asked, `[asked, vocab_size]`.
    """

    def __init__(self, config: NalandaConfig, task: Task):
        super().__init__()
        self.read_in = (
            nn.Linear(task.dim, config.hidden_size) if isinstance(task, Regression) else None
        )
        self.decoder = NalandaForCausalLM(config)

    def forward(self, inputs: Tensor, asked: Tensor) -> Tensor:
        given = (
            {"input_ids": inputs}
            if self.read_in is None
            else {"inputs_embeds": self.read_in(inputs)}
        )
        h = self.decoder.model(**given, use_cache=False).last_hidden_state
        return self.decoder.lm_head(h[asked])


def seeded_reader(config: NalandaConfig, task: Task, seed: int) -> Reader:
    """A model whose weights of one name and shape are those of every other model of this seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Reader(config, task)
        for name, module in net.decoder.named_modules():
            torch.manual_seed(seed + crc32(name.encode()))
            net.decoder._init_weights(module)
    return net


def asked(labels: Tensor) -> Tensor:
    return ~labels.isnan() if labels.is_floating_point() else labels != IGNORED


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
        `settings`, from `recall_settings`, the record's key; `scores` of the test, one for each of `cases`,
        and their mean `score`: accuracies, with those of the best constant answer in `chance`, or relative
        errors of a regression, with those of least squares in `reference`; `validation`, the mean score on
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
    start, config = time.perf_counter(), configured(model, task.vocab_size)
    length = max(task.length(case) for case in task.trained)
    net = seeded_reader(config, task, seed).to(device)
    optim = OptimConfig(lr=training.lr, weight_decay=training.weight_decay)
    schedule = ScheduleConfig(warmup_steps=training.steps // 10)
    optimizer = build_optimizer(net, optim)
    tests, held = (fixed_batches(task, training.rows, split) for split in ("test", "validation"))
    part = [(inputs[:64], labels[:64]) for inputs, labels in held]
    ends = {round(training.steps * (i + 1) / training.points) for i in range(training.points)}
    in_turn = training.steps if training.curriculum else None
    data, losses, curve = task.batches(seed, training.batch_size, "train", in_turn), [], []
    for step in range(1, training.steps + 1):
        inputs, labels = (x.to(device) for x in next(data))
        where = asked(labels)
        loss = objective(net(inputs, where), labels[where])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training.steps, training.lr, schedule)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step in ends:
            loss_now = torch.stack(losses).mean().item()
            curve.append([step, loss_now, fmean(evaluate_recall(net, part))])
            losses.clear()
    scores = evaluate_recall(net, tests)
    record = {
        "settings": recall_settings(model, task, seed, training),
        "cases": list(task.cases),
        "scores": scores,
        "score": fmean(scores),
        "validation": fmean(evaluate_recall(net, held)),
        "curve": curve,
        "parameters": sum(p.numel() for p in net.parameters()),
        "state_bytes": config.state_bytes(length, torch.float32),
        "state_grows": grows(config),
        "flops_per_token": config.flops_per_token(length),
        "seconds": time.perf_counter() - start,
        "device": device,
        "versions": versions(),
    }
    if isinstance(task, Regression):
        record["reference"] = [
            relative_error(task.least_squares(inputs), labels[:, -1]) for inputs, labels in tests
        ]
    else:
        record["chance"] = [best_constant(labels) for _, labels in tests]
    return json.loads(json.dumps(record))  # as read from a file: tuples become lists


def recall_settings(
    model: dict[str, Any], task: Task, seed: int, training: Training
) -> dict[str, Any]:
    """Everything that determines a run; as JSON it is the record's key."""
    return {
        "task": dataclasses.asdict(task),  # pyrefly: ignore[bad-argument-type]
        "model": MODEL | model,
        "seed": seed,
        "training": dataclasses.asdict(training),
    }


def fixed_batches(task: Task, rows: int, split: str) -> list[tuple[Tensor, Tensor]]:
    """A batch of each case, the same at every call."""
    draw = torch.Generator().manual_seed(0)
    return [task.batch(draw, rows, split, case) for case in task.cases]


def objective(out: Tensor, labels: Tensor) -> Tensor:
    """out `[asked, vocab_size]`, labels `[asked]`: cross-entropy, or the squared error of float labels."""
    if labels.is_floating_point():
        return F.mse_loss(out[:, 0], labels)
    return F.cross_entropy(out, labels)


def relative_error(guess: Tensor, y: Tensor) -> float:
    return ((guess - y).square().sum() / y.square().sum()).item()


@torch.no_grad()
def evaluate_recall(net: Reader, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The score on each batch: the accuracy, or the relative error of float answers."""
    device, scores = net.decoder.device, []
    net.eval()
    for inputs, labels in batches:
        where = asked(labels)
        out, right = net(inputs.to(device), where.to(device)).cpu(), labels[where]
        if right.is_floating_point():
            scores.append(relative_error(out[:, 0], right))
        else:
            scores.append((out.argmax(-1) == right).double().mean().item())
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
    matches: list[tuple[str, int | None]] = [("parameters", None)] if match != "state" else []
    if match != "parameters":
        matches += [(f"state {size(wanted)}", wanted) for wanted in states]
    most, matched, refused = most_parameters(base), [], {}
    for (title, wanted), model in itertools.product(matches, candidates):
        try:
            sized = base | model if wanted is None else with_state(base | model, wanted)
            matched.append((title, label(model), with_parameters(sized, most)))
        except ValueError as error:
            refused.setdefault(f"{title}: {error}", []).append(label(model))
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


SHARED = (
    "cases",
    "parameters",
    "state_bytes",
    "state_grows",
    "flops_per_token",
    "chance",
    "reference",
)


def summary(
    trials: Iterable[RecallTrial], records: Iterable[dict], seeds: int, trainings: list[Training]
) -> list[dict]:
    """A row for each trial: means and standard deviations over seeds, at the best learning rate.

    The best rate has the best mean validation. `records` must have every run of the trials.
    """
    found = {key(record["settings"]): record for record in records}
    rows = []
    for trial in trials:
        sign = 1 if trial.task.error else -1
        by_lr = {
            t.lr: [
                found[key(recall_settings(trial.model, trial.task, seed, t))]
                for seed in range(seeds)
            ]
            for t in trainings
        }
        found_at = {lr: sign * fmean(r["validation"] for r in mine) for lr, mine in by_lr.items()}
        lr = min(found_at, key=lambda lr: (isnan(found_at[lr]), found_at[lr]))
        best = by_lr[lr]
        columns = [[*record["scores"], record["score"]] for record in best]
        means = [fmean(column) for column in zip(*columns, strict=True)]
        spreads = [stdev(column) if seeds > 1 else 0.0 for column in zip(*columns, strict=True)]
        rows.append(
            {
                "task": trial.task.name,
                "match": trial.match,
                "model": trial.name,
                "lr": lr,
                "seeds": seeds,
            }
            | {
                "scores": means[:-1],
                "spreads": spreads[:-1],
                "score": means[-1],
                "spread": spreads[-1],
            }
            | {name: best[0][name] for name in SHARED if name in best[0]}
        )
    return rows


# ------------------------------ the command

EVERY = [name for name in TASKS if name != "listops_lra"]
QUICK: dict[str, Task] = {
    task.name: task
    for task in (
        MQAR(pairs=(2, 4, 8, 12), sequence=48, values=16),
        Needle(sequence=32, values=16),
        Needles(keys=(2, 4, 8, 12), sequence=40, values=16),
        Copying(lengths=(4, 8, 16), longer=(24,), symbols=16),
        StateTracking("parity", "Z2", trained_length=16),
        StateTracking("modular", "Z5", trained_length=16),
        StateTracking("s3", "S3", trained_length=8),
        StateTracking("a5", "A5", trained_length=8),
        StateTracking("s5", "S5", trained_length=8),
        Regression(examples=(1, 2, 4, 8)),
        ListOps(bands=((4, 12), (12, 24))),
    )
}
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

    `output` also gets runs.jsonl, a line for each finished run, which is not trained again.

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
    console, output = Console(emoji=False), output_folder(output, "--output")
    device = choose_device(device)
    known, base, training = override(QUICK if quick else TASKS, overrides or [])
    for name in tasks or ():
        if name not in known:
            raise InputError(f"--tasks: unknown task {name!r}{suggest(name, known)}")
    if match not in (None, "parameters", "state", "both"):
        raise InputError(f"--match: {match!r}: use parameters, state or both")
    training = dataclasses.replace(
        training, steps=steps or (QUICK_STEPS if quick else training.steps)
    )
    trainings = [dataclasses.replace(training, lr=lr) for lr in lrs or [training.lr]]
    seeds = seeds or (1 if quick else 3)
    full = [(EVERY, mixers or [*MIXERS, *SIGNED], maps or [*FEATURE_MAPS], "both")]
    trials: list[RecallTrial] = []
    notes: dict[str, None] = {}
    for every, some_mixers, some_maps, default in (
        QUICK_SWEEP if quick and not (mixers or maps) else full
    ):
        asked_for = [known[name] for name in tasks or every if name in every or not quick]
        sizes = states or (QUICK_STATES if quick else STATES)
        candidates, refused = models(some_mixers, some_maps, base)
        found, left_out = plan_recall(asked_for, candidates, base, match or default, sizes)
        trials += found
        notes |= dict.fromkeys(refused + left_out)
    jobs = [
        (trial.model, trial.task, seed, t)
        for seed in range(seeds)
        for trial in trials
        for t in trainings
    ]
    records = follow(recall_jobs(jobs, device), output / "runs.jsonl", workers, describe_recall)
    rows, lines = summary(trials, records, seeds, trainings), list(notes)
    figures, made = (
        draw_recall(rows, known, output),
        list_versions(r.get("versions", {}) for r in records),
    )
    results = {"rows": rows, "notes": lines, "figures": [f.name for f in figures], "versions": made}
    write_atomically(
        output / "results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    )
    write_atomically(output / "results.md", recall_markdown(rows, known, lines))
    print_recall(rows, known, lines, console)
    console.print(
        f"tables, numbers and figures in {output}", markup=False, highlight=False, soft_wrap=True
    )
    return rows


def override(
    tasks: dict[str, Task], overrides: Iterable[str]
) -> tuple[dict[str, Task], dict[str, Any], Training]:
    """Tasks, model keys and training, changed by `SECTION.KEY=VALUE`. Raises `InputError`."""
    changes: dict[str, dict[str, Any]] = {}
    for text in overrides:
        path, equals, value = text.partition("=")
        section, _, name = path.partition(".")
        if not equals or not name:
            raise InputError(f"{text}: write SECTION.KEY=VALUE")
        if section not in (*tasks, "model", "training"):
            raise InputError(
                f"{section}: no such section{suggest(section, [*tasks, 'model', 'training'])}"
            )
        changes.setdefault(section, {})[name] = listless(parse_yaml(value, text))

    def changed(section: str, thing: Any) -> Any:
        known = {field.name: field.type for field in dataclasses.fields(thing)}
        for name in changes.get(section, {}):
            if name not in known:
                raise InputError(f"{section}.{name}: no such setting{suggest(name, known)}")
        try:
            check_types(changes.get(section, {}), known, f"{section}.")
            return dataclasses.replace(thing, **changes.get(section, {}))
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
