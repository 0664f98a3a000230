"""Recall of token mixers: small decoders trained on generated tasks at equal parameters and equal state.

`run_recall` trains one model on one task with one seed and learning rate, and returns its record. `recall`
plans a sweep of such runs, trains those without a record in DIR/runs.jsonl, and writes results.json, .md and
pictures.
"""

import contextlib
import dataclasses
import itertools
import json
import math
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
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from nalanda.common.errors import InputError, output_folder
from nalanda.common.files import write_atomically
from nalanda.common.text import size, suggest
from nalanda.config.load import parse_yaml
from nalanda.config.schema import OptimConfig, ScheduleConfig
from nalanda.inference.load import choose_device
from nalanda.model import FEATURE_MAPS, MIXERS, NalandaConfig, NalandaForCausalLM
from nalanda.model.options import check_names, check_types
from nalanda.report.figures import GREY, drawing, files, in_panels, log_axis
from nalanda.train.log import versions
from nalanda.train.optim import build_optimizer, learning_rate
from nalanda_eval.report import markdown_table
from nalanda_eval.sweep import Jobs, follow, key
from nalanda_eval.synthetic import (
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
)

# Softmax attention, without convolutions, must first learn that a value follows its key. With this
# initializer_range it did within 500 steps of the quick MQAR, with twice this range not within 800.
MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "initializer_range": 0.06,
}
SIGNED = ("deltanet:allow_neg_eigval=true", "gated_deltanet:allow_neg_eigval=true")
STATES = (2048, 8192, 32768)
"""Bytes of a sequence's state."""
CLOSE = 0.02
"""Relative tolerance of parameters, and of states if head sizes allow it."""
FAR = 0.1
"""Relative distance of the state beyond which a model is left out."""

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
    """Points of the curve, each a score on 64 rows of each case."""
    curriculum: bool = False
    """Whether the trained cases come in turn, not mixed: `Task.batches`."""


class Reader(nn.Module):
    """The decoder on a task's inputs: tokens `[n, T]`, or numbers `[n, T, dim]` through a linear layer.

    Returns the head's outputs where an answer is asked, `[asked, vocab_size]`.
    """

    def __init__(self, config: NalandaConfig, task: Task):
        super().__init__()
        self.read_in = nn.Linear(task.dim, config.hidden_size) if isinstance(task, Regression) else None
        self.decoder = NalandaForCausalLM(config)

    def forward(self, inputs: Tensor, asked: Tensor) -> Tensor:
        given = {"input_ids": inputs} if self.read_in is None else {"inputs_embeds": self.read_in(inputs)}
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
    model: dict[str, Any], task: Task, seed: int, training: Training | None = None, device: str = "cpu"
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
        and their mean `score`: accuracies, or relative errors of a regression, with those of least squares in
        `reference`; `validation`, the mean score on other rows, for choosing settings; `curve`, [step, mean
        training loss since the last point, score on a part of the test]; `parameters`; `state_bytes` after
        the longest trained length, and `state_grows`; `flops_per_token` of a forward pass at that length;
        `seconds`, `device`, `versions`.

    Raises:
        ValueError: the keys give no valid model.
    """
    training = training or Training()
    start, config = time.perf_counter(), configured(model, task.vocab_size)
    length = max(task.length(case) for case in task.trained)
    net = seeded_reader(config, task, seed).to(device)
    optim = OptimConfig(lr=training.lr, weight_decay=training.weight_decay)
    schedule = ScheduleConfig(warmup_steps=training.steps // 10)
    optimizer = build_optimizer(net, optim)
    tests = fixed_batches(task, training.rows, "test")
    part = [(inputs[:64], labels[:64]) for inputs, labels in tests]
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
        "validation": fmean(evaluate_recall(net, fixed_batches(task, training.rows, "validation"))),
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
    return json.loads(json.dumps(record))  # as read from a file: tuples become lists


def recall_settings(model: dict[str, Any], task: Task, seed: int, training: Training) -> dict[str, Any]:
    """Everything that determines a run; as JSON it is the record's key."""
    return {
        "task": dataclasses.asdict(task),  # pyrefly: ignore[bad-argument-type]
        "model": MODEL | model,
        "seed": seed,
        "training": dataclasses.asdict(training),
    }


def configured(model: dict[str, Any], vocab_size: int = 1) -> NalandaConfig:
    keys: dict[str, Any] = MODEL | model | {"vocab_size": vocab_size}
    return NalandaConfig(**keys | {"bos_token_id": None, "eos_token_id": None})


def grows(config: NalandaConfig) -> bool:
    return config.state_bytes(2) > config.state_bytes(1)


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


# ------------------------------ equal parameters, equal state


def parse(mixer: str, feature_map: str | None) -> dict[str, Any]:
    """Model keys of `name` or `name:option=value:option=value`, with a feature map if the mixer has one."""
    name, *options = mixer.split(":")
    if name not in MIXERS:
        raise InputError(f"--mixers: unknown mixer {name!r}{suggest(name, MIXERS)}")
    if not all("=" in option for option in options):
        raise InputError(f"--mixers: {mixer!r}: write options as {name}:option=value")
    values = {name: parse_yaml(text, mixer) for name, text in (o.split("=", 1) for o in options)}
    try:
        check_names(values, MIXERS[name])
    except TypeError as error:
        raise InputError(f"--mixers: {mixer!r}: {error}") from None
    return {"mixer": name, "mixer_options": values, "feature_map": feature_map}


def label(model: dict[str, Any]) -> str:
    """`deltanet + silu`, `deltanet(allow_neg_eigval) + silu`."""
    options = [k if v is True else f"{k}={v}" for k, v in model["mixer_options"].items()]
    name = model["mixer"] + (f"({', '.join(options)})" if options else "")
    return " + ".join(filter(None, [name, model["feature_map"]]))


def models(
    mixers: Iterable[str], maps: Iterable[str], base: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Every mixer with every map ("own": its default), and a note for each mixer on the maps it refuses.

    Mixers without a feature map are listed once.
    """
    found: dict[str, dict] = {}
    refused: dict[str, list[tuple[str, str]]] = {}
    for mixer in mixers:
        own = MIXERS[parse(mixer, None)["mixer"]].map_name
        for feature_map in maps if own else (None,):
            if feature_map and feature_map not in (*FEATURE_MAPS, "own"):
                raise InputError(f"--maps: unknown map {feature_map!r}{suggest(feature_map, FEATURE_MAPS)}")
            model = parse(mixer, own if feature_map == "own" else feature_map)
            try:
                NalandaConfig(**base | model)
            except ValueError as error:
                refused.setdefault(mixer, []).append((feature_map or "no map", str(error)))
            else:
                found[label(model)] = model
    notes = [
        f"{mixer} is left out with {', '.join(name for name, _ in pairs)}: {pairs[0][1]}"
        for mixer, pairs in refused.items()
    ]
    return list(found.values()), notes


def count(model: dict[str, Any]) -> int:
    """Parameters without those of the task's vocabulary, which all models share."""
    with torch.device("meta"):
        return sum(p.numel() for p in NalandaForCausalLM(configured(model)).parameters())


def most_recall_parameters(base: dict[str, Any]) -> int:
    """Parameters of the largest mixer with its own map: the common target, whichever models are compared."""
    found = []
    for name in MIXERS:
        with contextlib.suppress(ValueError):  # sizes that do not suit a mixer
            found.append(count(base | {"mixer": name}))
    return max(found)


def with_parameters(model: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The model with the width of the GLU that comes nearest to `wanted` parameters. Raises `InputError`."""
    config = configured(model)
    column = 3 * config.hidden_size * config.num_hidden_layers
    width = config.intermediate_size + round((wanted - count(model)) / column)
    if width < 1:
        raise InputError("more parameters than the others, even without a GLU")
    return model | {"intermediate_size": width}


def with_state(model: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The model with the head sizes K and V whose fp32 state comes nearest to `wanted` bytes.

    K and V are even, at most 1 : 2; of several within `CLOSE` the squarest is taken. A model whose state
    grows is not changed. Raises `InputError`.
    """

    def sized(K: int, V: int) -> dict[str, Any]:
        return model | {"head_dim": K, "expand_v": V / K}

    def measured(K: int, V: int) -> int:
        return configured(sized(K, V)).state_bytes(1, torch.float32)

    if grows(configured(model)):
        return model
    # Bilinear in K and V for every mixer: four sizes determine it.
    b22, b24, b42, b44 = (measured(K, V) for K in (2, 4) for V in (2, 4))
    by_k, by_v, by_both = (b42 - b22) / 2, (b24 - b22) / 2, (b44 - b42 - b24 + b22) / 4

    def distance(sizes: tuple[int, int]) -> tuple[float, float]:
        K, V = sizes
        total = b22 + by_k * (K - 2) + by_v * (V - 2) + by_both * (K - 2) * (V - 2)
        return max(CLOSE, abs(total / wanted - 1)), abs(math.log(V / K))

    even = range(2, 258, 2)
    fitting = ((K, V) for K in even for V in even if K <= 2 * V and V <= 2 * K and K * (V / K) == V)
    K, V = min(fitting, key=distance)
    if abs(measured(K, V) / wanted - 1) > FAR:
        raise InputError(f"no head sizes come within {FAR:.0%} of a state of {size(wanted)}")
    return sized(K, V)


# ------------------------------ the sweep


@dataclass(frozen=True)
class RecallTrial:
    """A row of the results: a model on a task, and what it was matched in."""

    task: Task
    match: str
    name: str
    model: dict[str, Any]


def plan_recall(
    tasks: Iterable[Task], candidates: list[dict[str, Any]], base: dict[str, Any],
    match: str, states: Iterable[int],
) -> tuple[list[RecallTrial], list[str]]:  # fmt: skip
    """The trials, all at equal parameters, and notes on what is left out."""
    matches: list[tuple[str, int | None]] = [("parameters", None)] if match != "state" else []
    if match != "parameters":
        matches += [(f"state {size(wanted)}", wanted) for wanted in states]
    most, matched, refused = most_recall_parameters(base), [], {}
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


# ------------------------------ results


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
            t.lr: [found[key(recall_settings(trial.model, trial.task, seed, t))] for seed in range(seeds)]
            for t in trainings
        }
        lr = min(by_lr, key=lambda lr: sign * fmean(record["validation"] for record in by_lr[lr]))
        best = by_lr[lr]
        columns = [[*record["scores"], record["score"]] for record in best]
        means = [fmean(column) for column in zip(*columns, strict=True)]
        spreads = [stdev(column) if seeds > 1 else 0.0 for column in zip(*columns, strict=True)]
        rows.append(
            {"task": trial.task.name, "match": trial.match, "model": trial.name, "lr": lr, "seeds": seeds}
            | {"scores": means[:-1], "spreads": spreads[:-1], "score": means[-1], "spread": spreads[-1]}
            | {name: best[0][name] for name in SHARED if name in best[0]}
        )
    return rows


SHARED = ("cases", "parameters", "state_bytes", "state_grows", "flops_per_token", "reference")


def tables(rows: list[dict], tasks: dict[str, Task]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, cells) for each task."""
    found = []
    for name in dict.fromkeys(row["task"] for row in rows):
        task, mine = tasks[name], [row for row in rows if row["task"] == name]

        def value(mean: float, spread: float = 0.0, error: bool = task.error) -> str:
            scale, form = (1, ".3f") if error else (100, ".1f")
            return f"{scale * mean:{form}}" + (f" ± {scale * spread:{form}}" if spread else "")

        what = (
            "relative error; predicting 0 has 1"
            if task.error
            else f"accuracy, %; chance {value(task.chance)}"
        )
        title = f"{name}: {what}; by {task.axis}"
        cases = [case_name(case) for case in task.cases]
        header = ["model", "equal", *cases, "mean", "lr", "parameters", "state", "MFLOPs"]
        lines = [
            [
                row["model"],
                row["match"],
                *itertools.starmap(value, zip(row["scores"], row["spreads"], strict=True)),
                value(row["score"], row["spread"]),
                f"{row['lr']:g}",
                f"{row['parameters']:,}",
                size(row["state_bytes"]) + (", grows" if row["state_grows"] else ""),
                f"{row['flops_per_token'] / 1e6:.3f}",
            ]
            for row in mine
        ]
        if reference := mine[0].get("reference"):
            blank = ["–"] * 4
            lines.append(
                ["least squares", mine[-1]["match"], *map(value, reference), value(fmean(reference)), *blank]
            )
        found.append((title, header, lines))
    return found


def case_name(case: Any) -> str:
    return "–".join(map(str, case)) if isinstance(case, (tuple, list)) else f"{case:g}"


def recall_markdown(rows: list[dict], tasks: dict[str, Task], notes: list[str]) -> str:
    """The tables in Markdown."""
    blocks = [
        f"## {title}\n\n{markdown_table(header, lines)}" for title, header, lines in tables(rows, tasks)
    ]
    return "\n\n".join(["# Recall", *blocks, *notes]) + "\n"


def print_recall(rows: list[dict], tasks: dict[str, Task], notes: list[str], console: Console) -> None:
    """Prints the tables, one for each way of matching, without learning rates."""
    for title, header, lines in tables(rows, tasks):
        console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
        shown = [i for i, head in enumerate(header) if head not in ("equal", "lr")]
        for match, group in itertools.groupby(lines, lambda line: line[1]):
            if match:
                console.print(f"equal {match}", style="dim", highlight=False)
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
            for i in shown:
                narrow = i > 0 and not any("±" in line[i] for line in lines)
                table.add_column(header[i], justify="right" if i else "left", no_wrap=narrow, overflow="fold")
            for line in group:
                table.add_row(*(line[i] for i in shown))
            console.print(table)
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


ROWS = 4
"""Rows of panels of a figure; what is left is drawn in another."""


def draw_recall(rows: list[dict], tasks: dict[str, Task], directory: Path) -> list[Path]:
    """Draws each task's score by case, a panel for each way of matching, and its mean score by state size.

    The second figure is drawn only if states were matched. Of many models, each mixer has panels of its own.
    """
    names = list(dict.fromkeys(row["model"] for row in rows))
    softmax = next((name for name in names if name.startswith("softmax")), None)
    groups, looks = in_panels(names, softmax, lambda name: name.partition(" + ")[0])
    seeds = rows[0]["seeds"]
    over = f"over n = {seeds} seeds" if seeds > 1 else "of n = 1 seed, so without bars"
    bars = "; bars: ± 1 standard deviation" if seeds > 1 else ""
    written = []

    def scaled(task: Task, values: Iterable[float]) -> list[float]:
        return [max(x, 1e-4) if task.error else 100 * x for x in values]

    def finish(axes: Any, task: Task) -> None:
        label = "predicting 0" if task.error else "chance"
        axes.axhline(*scaled(task, [task.chance]), color=GREY, linestyle=":", linewidth=1, label=label)
        if task.error:
            log_axis(axes.yaxis)
            axes.set(ylabel="relative error (ratio)")
        else:
            axes.set(ylabel="accuracy (%)", ylim=(0, 102))

    for task in (tasks[name] for name in dict.fromkeys(row["task"] for row in rows)):
        mine = [row for row in rows if row["task"] == task.name]
        matches = list(dict.fromkeys(row["match"] for row in mine))
        best = (min if task.error else max)(mine, key=lambda row: row["score"])
        what, score = (
            ("error", f"{best['score']:.3f}") if task.error else ("accuracy", f"{100 * best['score']:.0f} %")
        )
        matched = [row for row in mine if row["match"].startswith("state")]
        title = f"{task.name}: {'lowest' if task.error else 'highest'} mean {what} {score}, {best['model']}"
        present = [(kind, group) for kind, group in groups if any(row["model"] in group for row in mine)]
        axis = task.axis if "(" in task.axis else f"{task.axis} (number)"
        for page in range(0, len(present), ROWS):
            few = present[page : page + ROWS]
            number = f"_{page // ROWS + 1}" if page else ""
            file = directory / f"{task.name}_cases{number}"
            written += files(file)
            shape = {
                "panels": len(few) * len(matches),
                "columns": len(matches),
                "sharey": True,
                "height": 2.2,
            }
            with drawing(file, title, f"Points: means {over}{bars}.", **shape) as panels:
                places = range(len(task.cases))  # evenly spaced: cases are doubling sizes or bands
                for a, ((kind, group), match) in zip(panels, itertools.product(few, matches), strict=True):
                    for row in (row for row in mine if row["match"] == match and row["model"] in group):
                        y, bar = (scaled(task, row[part]) for part in ("scores", "spreads"))
                        a.errorbar(places, y, bar, clip_on=False, **looks[row["model"]], label=row["model"])
                    if reference := mine[0].get("reference"):
                        a.plot(
                            places, scaled(task, reference), color=GREY, linestyle="--", label="least squares"
                        )
                    a.set_title(f"{kind}, equal {match}".removeprefix(", "))
                    a.set_xticks(places, map(case_name, task.cases))
                    a.set_xlabel(axis)
                    finish(a, task)
            if not matched:
                continue
            file = directory / f"{task.name}_state{number}"
            written += files(file)
            caption = f"Points: means {over} and the cases{bars}. Hollow: a state that grows, at its longest."
            with drawing(file, title, caption, len(few), height=2.4, sharey=True) as panels:
                for a, (kind, group) in zip(panels, few, strict=True):
                    for name in group:
                        line = {row["state_bytes"]: row for row in matched if row["model"] == name}
                        if not line:
                            continue
                        x, style = sorted(line), looks[name]
                        y, bar = (scaled(task, [line[at][part] for at in x]) for part in ("score", "spread"))
                        if any(row["state_grows"] for row in line.values()):
                            style = style | {
                                "linestyle": "",
                                "marker": style["marker"] or "o",
                                "mfc": "white",
                            }
                        a.errorbar(x, y, bar, clip_on=False, **style, label=name)
                    a.set(title=kind, xlabel="state of a sequence (bytes, fp32)")
                    a.margins(x=0.1)
                    finish(a, task)
                    log_axis(a.xaxis, [2**k for k in range(50)], lambda n: size(n).replace(".0 ", " "))
    return written


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
    ([name for name in QUICK if name not in ("mqar", "parity")], ["deltanet"], ["own"], "parameters"),
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
    console, output = Console(), output_folder(output, "--output")
    device = choose_device(device)
    known, base, training = override(QUICK if quick else TASKS, overrides or [])
    for name in tasks or ():
        if name not in known:
            raise InputError(f"--tasks: unknown task {name!r}{suggest(name, known)}")
    if match not in (None, "parameters", "state", "both"):
        raise InputError(f"--match: {match!r}: use parameters, state or both")
    training = dataclasses.replace(training, steps=steps or (QUICK_STEPS if quick else training.steps))
    trainings = [dataclasses.replace(training, lr=lr) for lr in lrs or [training.lr]]
    seeds = seeds or (1 if quick else 3)
    full = [(EVERY, mixers or [*MIXERS, *SIGNED], maps or [*FEATURE_MAPS], "both")]
    trials: list[RecallTrial] = []
    notes: dict[str, None] = {}
    for every, some_mixers, some_maps, default in QUICK_SWEEP if quick and not (mixers or maps) else full:
        asked_for = [known[name] for name in tasks or every if name in every or not quick]
        sizes = states or (QUICK_STATES if quick else STATES)
        candidates, refused = models(some_mixers, some_maps, base)
        found, left_out = plan_recall(asked_for, candidates, base, match or default, sizes)
        trials += found
        notes |= dict.fromkeys(refused + left_out)
    jobs = [
        (trial.model, trial.task, seed, t) for seed in range(seeds) for trial in trials for t in trainings
    ]
    records = follow(recall_jobs(jobs, device), output / "runs.jsonl", workers, describe_recall)
    rows, lines = summary(trials, records, seeds, trainings), list(notes)
    figures = draw_recall(rows, known, output)
    results = {"rows": rows, "notes": lines, "figures": [f.name for f in figures], "versions": versions()}
    write_atomically(output / "results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_atomically(output / "results.md", recall_markdown(rows, known, lines))
    print_recall(rows, known, lines, console)
    console.print(f"tables, numbers and figures in {output}", markup=False, highlight=False, soft_wrap=True)
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
            raise InputError(f"{section}: no such section{suggest(section, [*tasks, 'model', 'training'])}")
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
