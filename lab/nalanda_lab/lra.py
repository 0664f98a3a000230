"""`nalanda-lab lra`: Long Range Arena (arXiv 2011.04006) for the mixers as encoders, and their speed.

`run_lra` trains one model on one task; `lra` plans the runs, trains those without a record in DIR/runs,
and writes results.json, .md and a picture. `lra_speed` times training steps beside softmax attention.
"""

import copy
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nalanda.common.errors import InputError, output_folder
from nalanda.common.text import markdown_table, suggest
from nalanda.common.versions import list_versions, versions
from nalanda.config.schema import OptimConfig, ScheduleConfig
from nalanda.inference.load import choose_device
from nalanda.model import MIXERS, NalandaConfig
from nalanda.model.heads import NalandaForSequenceClassification
from nalanda.report.figures import COLOURS, GREY, drawing, files
from nalanda.train.optim import build_optimizer, learning_rate
from nalanda_lab.equal import MODEL, label, models
from nalanda_lab.lra_data import ARENA, QUICK_ARENA, ArenaTask, prepare
from nalanda_lab.paired import take_step
from nalanda_lab.sweep import follow, key
from nalanda_lab.synthetic import best_constant
from nalanda_lab.track import publish, take_turns

# (layers, width, heads, width of the GLU, batch, learning rate). `skyformer` is that of code/config.py in
# github.com/pkuzengqi/Skyformer, with PolaFormer's rate for pathfinder. `transnormer_paper` is appendix E of
# TransNormer's paper, `transnormer` the script_lra.py of github.com/OpenNLPLab/Transnormer.
# Skyformer's feed-forward has two matrices of width 128. Three of width 85 have as many weights.
SIZES: dict[str, dict[str, tuple[int, int, int, int, int, float]]] = {
    "skyformer": {
        "listops": (2, 64, 2, 85, 32, 1e-4),
        "text": (2, 64, 2, 85, 32, 1e-4),
        "retrieval": (2, 64, 2, 85, 16, 2e-4),
        "image": (2, 64, 2, 85, 256, 1e-4),
        "pathfinder": (2, 64, 2, 85, 128, 5e-4),
    },
    "transnormer_paper": {
        "listops": (2, 64, 2, 85, 32, 1e-4),
        "text": (2, 64, 2, 85, 16, 1e-4),
        "retrieval": (2, 64, 2, 85, 16, 2e-4),
        "image": (2, 64, 2, 85, 256, 1e-4),
        "pathfinder": (2, 64, 2, 85, 128, 2e-4),
    },
    "transnormer": {
        "listops": (4, 128, 8, 512, 128, 1e-4),
        "text": (4, 128, 8, 512, 64, 1e-3),
        "retrieval": (4, 128, 4, 512, 64, 1e-3),
        "image": (12, 128, 4, 256, 200, 1e-3),
        "pathfinder": (4, 128, 8, 128, 128, 5e-4),
    },
    "quick": dict.fromkeys(ARENA, (2, 64, 2, 128, 32, 3e-3))
    | {"pathfinder": (2, 64, 2, 128, 16, 3e-3)},
}
ARENA_STEPS, QUICK_ARENA_STEPS = 50_000, 200
"""Steps of a run; the first as in Skyformer's code."""
SAME_SHAPE = ("skyformer", "transnormer_paper")
# Published accuracies in the order of ARENA, and our sizes that have the published shape. PolaFormer's table
# is in its repository's README, the linear transformer's row in LRA's, the others in the papers.
PUBLISHED: tuple[tuple[str, tuple[str, ...], tuple[float | None, ...]], ...] = (
    ("Transformer (PolaFormer)", SAME_SHAPE, (38.71, 61.55, 80.93, 39.14, 70.39)),
    ("PolaFormer, α = 3", SAME_SHAPE, (37.35, 73.06, 80.50, 42.15, 70.53)),
    ("PolaFormer, α = 5", SAME_SHAPE, (38.76, 72.33, 80.37, 41.91, 68.98)),
    ("PolaFormer, α = 7", SAME_SHAPE, (37.60, 71.93, 81.47, 42.77, 69.09)),
    ("TransNormer T1", SAME_SHAPE, (41.03, 66.90, 83.11, 51.60, 75.92)),
    ("TransNormer T2", SAME_SHAPE, (41.60, 72.20, 83.82, 49.60, 76.80)),
    ("SOFT", (), (37.40, 63.49, 81.77, 46.91, None)),
    ("Linear Transformer (LRA)", (), (16.13, 65.90, 53.09, 42.34, 75.30)),
)
TRANSNORMER = {  # DiagAttention in the first half of the layers, NormAttention in the second
    "transnormer_t1": ("relu", "elu"),
    "transnormer_t2": ("softmax", "elu1"),
}
QUICK_MIXERS = ("softmax", "linear_attention", "mala", "pola", "soft", "transnormer_t2", "deltanet")


# ------------------------------ one run


class ArenaNet(nn.Module):
    """An encoder with a linear head; for pairs an MLP on both texts' means, product and difference."""

    def __init__(self, config: NalandaConfig, pairs: bool):
        super().__init__()
        self.encoder, self.score = NalandaForSequenceClassification(config), None
        if pairs:
            D, classes = config.hidden_size, self.encoder.score.out_features
            self.encoder.score = nn.Identity()  # pyrefly: ignore[bad-assignment]
            self.score = nn.Sequential(nn.Linear(4 * D, D), nn.ReLU(), nn.Linear(D, classes))

    def forward(self, ids: Tensor) -> Tensor:
        """ids `[n, T]`, or `[n, 2, T]` for pairs; 0 is padding. Returns scores `[n, classes]`."""
        rows = ids.flatten(0, -2).long()  # [n or 2n, T]
        real = rows != 0
        longest = int(real.any(0).sum())
        mask = None if bool(real.all()) else real[:, :longest].long()
        out = self.encoder(rows[:, :longest], attention_mask=mask).logits
        if self.score is None:
            return out

        a, b = out.unflatten(0, (-1, 2)).unbind(1)  # [n, D] each
        return self.score(torch.cat([a, b, a * b, a - b], -1))


def arena_config(model: dict[str, Any], size: str, task: ArenaTask) -> NalandaConfig:
    """The config of a model of `arena_models` for a task. Raises ValueError if it is no encoder."""
    layers, width, heads, glu, *_ = SIZES[size][task.name]
    keys: dict[str, Any] = dict(model)
    if model["mixer"] in TRANSNORMER:
        scores, feature_map = TRANSNORMER[model["mixer"]]
        half = layers // 2
        keys |= {
            "mixer": ["diag_attention"] * half + ["norm_attention"] * (layers - half),
            "mixer_options": {"diag_attention": {"scores": scores}},
            "feature_map": feature_map,
            "use_bias": True,
        }
    elif not MIXERS[model["mixer"]].rule.unmasked:
        keys["directions"] = 2
    keys["num_labels"] = task.classes
    return NalandaConfig(
        **keys,
        vocab_size=task.vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_heads=heads,
        intermediate_size=glu,
        dropout=0.0 if size == "quick" else 0.1,
        position_embedding="sinusoidal",
        scale_embeddings=True,
        initializer_range=0.06,
        is_decoder=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def arena_settings(
    model: dict[str, Any], task: ArenaTask, file: Path, size: str, seed: int, steps: int
) -> dict[str, Any]:
    """Everything that determines a run; as JSON it is the record's key."""
    settings = {
        "task": dataclasses.asdict(task),
        "data": file.stem,
        "model": model,
        "size": size,
        "settings": SIZES[size][task.name],
        "seed": seed,
        "steps": steps,
    }
    return json.loads(json.dumps(settings))  # as read from a file: tuples become lists


def run_lra(
    model: dict[str, Any],
    task: ArenaTask,
    file: Path,
    size: str,
    seed: int,
    steps: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Trains a model on a task and returns a record of JSON values.

    Args:
        model: of `arena_models`.
        file: of `prepare`. size: of `SIZES`.
        seed: seed of the weights and of the order of the rows.

    Returns:
        `settings`; `accuracy` on the test rows of the weights that are best on the validation rows, of ten
        points of the training; `chance`, that of the best constant answer to the test rows; `curve`, [step,
        mean loss since the last point, accuracy in validation];
        `parameters`, `seconds`, `device`, `versions`.
    """
    started = time.perf_counter()
    *_, batch, lr = SIZES[size][task.name]
    with np.load(file) as arrays:
        rows = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ArenaNet(arena_config(model, size, task), rows["train_ids"].ndim == 3).to(device)
        optim = OptimConfig(lr=lr, weight_decay=0.0)
        schedule = ScheduleConfig(name="linear", warmup_steps=max(1, steps // 50), min_lr_ratio=0.0)
        optimizer = build_optimizer(net, optim)

        draw = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.int64)  # of the rows that this epoch has not given
        losses, curve = [], []
        best, weights = -1.0, net.state_dict()
        for step in range(1, steps + 1):
            if len(order) < batch:
                order = torch.randperm(len(rows["train_ids"]), generator=draw)
            chosen, order = order[:batch], order[batch:]
            scores = net(rows["train_ids"][chosen].to(device))
            loss = F.cross_entropy(scores.float(), rows["train_labels"][chosen].to(device))
            loss.backward()
            rate = learning_rate(step, steps, lr, schedule)
            take_step(optimizer, net, rate, optim.max_grad_norm)

            losses.append(loss.detach())
            if step % math.ceil(steps / 10) == 0 or step == steps:
                held_out = rows["validation_ids"], rows["validation_labels"]
                score = accuracy(net, *held_out, batch)
                curve.append([step, torch.stack(losses).mean().item(), score])
                losses.clear()
                if score >= best:
                    best, weights = score, copy.deepcopy(net.state_dict())
    net.load_state_dict(weights)
    return {
        "settings": arena_settings(model, task, file, size, seed, steps),
        "chance": best_constant(rows["test_labels"]),
        "accuracy": accuracy(net, rows["test_ids"], rows["test_labels"], batch),
        "curve": curve,
        "parameters": sum(p.numel() for p in net.parameters()),
        "seconds": time.perf_counter() - started,
        "device": device,
        "versions": versions(),
    }


@torch.no_grad()
def accuracy(net: nn.Module, ids: Tensor, labels: Tensor, batch: int) -> float:
    """The share of rows whose label has the highest score."""
    device = next(net.parameters()).device
    right = 0
    net.eval()
    for some, answers in zip(ids.split(batch), labels.split(batch), strict=True):
        guesses = net(some.to(device)).argmax(-1).cpu()
        right += (guesses == answers).sum().item()
    net.train()
    return right / len(labels)


def arena_models(
    mixers: Iterable[str], maps: Iterable[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The models that can be encoders, and notes on the others. mixers: as in `recall`, or of TRANSNORMER."""
    mixers = list(mixers)
    candidates, notes = models([name for name in mixers if name not in TRANSNORMER], maps, MODEL)
    for name in mixers:
        if name in TRANSNORMER:
            candidates.append({"mixer": name, "mixer_options": {}, "feature_map": None})

    encoders = []
    for model in candidates:
        try:
            arena_config(model, "quick", QUICK_ARENA["image"])
        except ValueError as error:
            notes.append(f"{label(model)} is left out: {error}")
        else:
            encoders.append(model)
    return encoders, notes


# ------------------------------ results


def arena_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model: by task mean accuracy over seeds, deviation and chance; parameters; seconds."""
    runs: dict[str, dict[str, list[dict]]] = {}  # by model and task
    for record in records:
        chosen = record["settings"]
        tasks = runs.setdefault(label(chosen["model"]), {})
        tasks.setdefault(chosen["task"]["name"], []).append(record)

    rows = []
    for name, tasks in runs.items():
        scores = {task: [run["accuracy"] for run in each] for task, each in tasks.items()}
        first = {task: each[0] for task, each in tasks.items()}
        rows.append(
            {
                "model": name,
                "accuracy": {task: fmean(each) for task, each in scores.items()},
                "spread": {t: stdev(each) if len(each) > 1 else 0.0 for t, each in scores.items()},
                "chance": {t: run["chance"] for t, run in first.items() if "chance" in run},
                "seeds": max(map(len, tasks.values())),
                "parameters": max(run["parameters"] for each in tasks.values() for run in each),
                "seconds": sum(fmean(run["seconds"] for run in each) for each in tasks.values()),
            }
        )
    return rows


def arena_chance(rows: list[dict[str, Any]], tasks: dict[str, ArenaTask]) -> dict[str, float]:
    """By task the accuracy of the best constant answer to the test rows; of guessing, in older records."""
    chance: dict[str, float] = {}
    for row in rows:
        chance |= row.get("chance", {})
    return {name: chance.get(name, 1 / task.classes) for name, task in tasks.items()}


def arena_table(
    rows: list[dict[str, Any]], tasks: dict[str, ArenaTask], size: str
) -> tuple[list[str], list[list[str]]]:
    """Header and lines: chance, ours, and published rows with a word on what they can be compared with."""
    chance = arena_chance(rows, tasks)
    lines = [["chance", "–", *(f"{100 * level:.1f}" for level in chance.values()), "–", "–", "–"]]
    for row in rows:
        accuracies, spreads = row["accuracy"], row["spread"]
        cells = []
        for task in tasks:
            if task not in accuracies:
                cells.append("–")
                continue
            deviation = f" ± {100 * spreads[task]:.1f}" if spreads[task] else ""
            cells.append(f"{100 * accuracies[task]:.1f}{deviation}")
        complete = len(accuracies) == len(tasks)
        mean = f"{100 * fmean(accuracies.values()):.1f}" if complete else "–"
        sizes = f"{row['parameters']:,}", f"{row['seconds']:,.0f}"
        lines.append([row["model"], "ours", *cells, mean, *sizes])

    for name, same_shape, accuracies in PUBLISHED:
        note = f"published, {'same size' if size in same_shape else 'not comparable'}"
        published = dict(zip(ARENA, accuracies, strict=True))
        scores = [score for task in tasks if (score := published[task]) is not None]
        cells = ["–" if published[task] is None else f"{published[task]:.1f}" for task in tasks]
        mean = f"{fmean(scores):.1f}" if len(scores) == len(tasks) else "–"
        lines.append([name, note, *cells, mean, "–", "–"])
    return ["model", "from", *tasks, "mean", "parameters", "seconds"], lines


def draw_arena(rows: list[dict[str, Any]], tasks: dict[str, ArenaTask], file: Path) -> list[Path]:
    """A panel for each task: the models' accuracies, with deviations over seeds, and chance."""
    seeds = max(row["seeds"] for row in rows)
    bars = "; bars: ± 1 standard deviation" if seeds > 1 else ", so without bars"
    caption = f"Dots: means over n = {seeds} seed{'s' * (seeds > 1)}{bars}. Dashed: chance."
    highest, best, task = max(
        ((score, row["model"], task) for row in rows for task, score in row["accuracy"].items()),
        key=lambda x: x[0],
    )
    title = f"Long Range Arena: highest accuracy {best} on {task}, {100 * highest:.0f} %"
    with drawing(
        file, title, caption, len(tasks), columns=3, height=0.8 + 0.16 * len(rows), sharey=True
    ) as panels:
        for panel, (name, level) in zip(panels, arena_chance(rows, tasks).items(), strict=True):
            panel.axvline(100 * level, color=GREY, linestyle="--", linewidth=1)
            for i, row in enumerate(reversed(rows)):  # the first is at the top
                if name in row["accuracy"]:
                    x, bar = 100 * row["accuracy"][name], 100 * row["spread"][name]
                    panel.errorbar(x, i, xerr=bar or None, marker="o", color=COLOURS[0])
            panel.set(
                title=name, xlabel="accuracy (%)", xlim=(0, 100), ylim=(-0.5, len(rows) - 0.5)
            )
            panel.set_yticks(range(len(rows)), [row["model"] for row in reversed(rows)])
    return files(file)


# ------------------------------ speed and memory


def peak_bytes(step: Callable[[], object], device: str) -> int:
    """The most memory that tensors made by `step` hold at once."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before

    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:  # the profiler writes to stderr that it starts and stops
        os.dup2(nowhere.fileno(), 2)
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                step()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)

    live = peak = 0
    for event in profiled.profiler.kineto_results.events():  # pyrefly: ignore[missing-attribute]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def lra_speed(
    candidates: list[dict[str, Any]],
    lengths: Iterable[int],
    size: str,
    device: str,
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """Seconds and peak memory of a training step on one row of bytes, at each length, beside softmax (SDPA).

    Models take turns in one process, and the fastest of the rounds counts. A row for each model and length:
    `seconds`, `bytes`, and `speed` and `memory`, softmax's over the model's.
    """
    (reference,), _ = arena_models(["softmax"], ["own"])
    softmax = label(reference)
    rows = []
    for length in lengths:
        task = ArenaTask("text", length, 2)
        ids = torch.randint(1, 256, (1, length), device=device)
        steps = {}
        for model in [reference, *(each for each in candidates if label(each) != softmax)]:
            net = ArenaNet(arena_config(model, size, task), pairs=False).to(device)
            steps[label(model)] = partial(training_step, net, ids)

        peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
        turns = take_turns(steps, rounds, f"{length:,} tokens")
        seconds = {name: min(each) for name, each in turns.items()}
        for name in steps:
            rows.append(
                {
                    "model": name,
                    "length": length,
                    "seconds": seconds[name],
                    "bytes": peaks[name],
                    "speed": seconds[softmax] / seconds[name],
                    "memory": peaks[softmax] / peaks[name],
                }
            )
    return rows


def training_step(net: ArenaNet, ids: Tensor) -> float:
    """The seconds of a forward and a backward pass, to their end."""
    start = time.perf_counter()
    net(ids).logsumexp(-1).sum().backward()
    net.zero_grad()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def lengths_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of `lra_speed`: a line for each model."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    of_model: dict[str, list[dict]] = {}
    for row in rows:
        of_model.setdefault(row["model"], []).append(row)

    lines = []
    for name, each in of_model.items():
        speeds = [f"{row['speed']:.2f}×" for row in each]
        sizes = [f"{row['bytes'] / 2**20:,.0f}" for row in each]
        lines.append([name, *speeds, *sizes])
    return ["model", *(f"speed {n:,}" for n in lengths), *(f"MiB {n:,}" for n in lengths)], lines


# ------------------------------ the command


def lra(
    *,
    tasks: list[str] | None = None,
    mixers: list[str] | None = None,
    maps: list[str] | None = None,
    data: str | Path | None = None,
    size: str | None = None,
    seeds: int = 1,
    steps: int | None = None,
    output: str | Path = "runs/lra",
    workers: int = 2,
    device: str | None = None,
    quick: bool = False,
    speed: bool = False,
) -> list[dict[str, Any]]:
    """Trains every model on every task, prints a table, and writes results.json, .md and the figure lra.

    `output` also gets runs/, a file for each finished run, which is not trained again, and the tasks' rows as arrays.

    Args:
        tasks: names from `ARENA`; by default all, without `data` those that are generated.
        mixers: as in `recall`, or transnormer_t1 and _t2; by default all, and both of these.
        maps: names from `FEATURE_MAPS`, or "own", each mixer's default map, which is the default.
        data: folder of the tasks' files, TASK/SPLIT*.jsonl or .parquet.
        size: a name from `SIZES`; by default skyformer, quick's own.
        seeds: number of seeds, from 0.
        steps: steps of each run.
        workers: processes, of one thread each.
        device: by default the GPU if there is one, else the CPU.
        quick: small tasks that need no files, and unless mixers are given a few models.
        speed: only times training steps at 1 K to 8 K tokens, and writes speed.json and .md.

    Returns:
        The rows of results.json, or of speed.json.

    Raises:
        InputError: an unknown name, or files that are missing or have other columns.
    """
    folder = output_folder(output, "--output")
    device = choose_device(device)
    arena = QUICK_ARENA if quick else ARENA
    size = size or ("quick" if quick else "skyformer")
    for name in tasks or ():
        if name not in arena:
            raise InputError(f"--tasks: unknown name {name!r}{suggest(name, arena)}")
    if size not in SIZES:
        raise InputError(f"--size: unknown name {size!r}{suggest(size, SIZES)}")
    candidates, notes = arena_models(
        mixers or (QUICK_MIXERS if quick else [*MIXERS, *TRANSNORMER]), maps or ["own"]
    )
    if not candidates:
        raise InputError(f"--mixers: none of them can be an encoder: {'; '.join(notes)}")

    if speed:
        lengths = (256, 512, 1024) if quick else (1024, 2048, 4096, 8192)
        rows = lra_speed(candidates, lengths, size, device)
        title = "Training step on one row, beside softmax (SDPA): times as fast, and peak MiB of tensors"
        table = markdown_table(*lengths_table(rows), 1)
        publish_table("speed", title, rows, table, notes, [versions()], folder)
        return rows

    chosen = {name: task for name, task in arena.items() if not tasks or name in tasks}
    if data is None and not tasks and not quick:
        chosen = {name: task for name, task in chosen.items() if not task.columns}
        notes.append(
            "text, retrieval and image are left out: name their folder with --data (docs/lra.md)"
        )
    source = None if data is None else Path(data).expanduser()
    paths = {name: prepare(task, source, folder / "data") for name, task in chosen.items()}
    total = steps or (QUICK_ARENA_STEPS if quick else ARENA_STEPS)
    runs = [
        (model, task, paths[name], size, seed, total)
        for seed in range(seeds)
        for name, task in chosen.items()
        for model in candidates
    ]
    jobs = {key(arena_settings(*run)): partial(run_lra, *run, device=device) for run in runs}
    records = follow(jobs, folder / "runs", workers, describe_arena)

    rows = arena_rows(records)
    order = [label(model) for model in candidates]
    rows.sort(key=lambda row: order.index(row["model"]))
    draw_arena(rows, chosen, folder / "lra")
    title = "Long Range Arena: accuracy, %" + ("; small tasks" if quick else "")
    table = markdown_table(*arena_table(rows, chosen, size), 2)
    made = [record.get("versions", {}) for record in records]
    publish_table("results", title, rows, table, notes, made, folder)
    return rows


def publish_table(
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    table: str,
    notes: list[str],
    made: list[dict[str, str]],
    folder: Path,
) -> None:
    """Writes and prints the results of a command. made: versions of what made them."""
    content = {"rows": rows, "notes": notes, "versions": list_versions(made)}
    publish(folder, name, "\n\n".join([f"# {title}", table, *notes]), content)


def describe_arena(record: dict[str, Any]) -> str:
    chosen = record["settings"]
    return f"{chosen['task']['name']}: {label(chosen['model'])} {record['accuracy']:.3f}"
