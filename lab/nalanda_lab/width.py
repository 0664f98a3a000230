"""Models of several widths: whether activations keep their size, and where the best rate lies.

Both compare the standard parametrization with µP (`nalanda.model.width`). The base is a recipe's model. A wider one
has more heads of the same size, and a GLU that is wider by the same factor.
"""

import argparse
import inspect
import itertools
import json as jsonlib
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from nalanda.common.errors import InputError, output_file, output_folder
from nalanda.common.progress import Progress
from nalanda.config.load import parse_yaml, section
from nalanda.config.schema import OptimConfig, RunConfig
from nalanda.inference.load import choose_device
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.model.projections import FusedLinears
from nalanda.report.figures import drawing, files, in_panels, log_axis
from nalanda.train.optim import build_optimizer
from nalanda_lab.estimate import Gap, paired_gap
from nalanda_lab.paired import train_paired
from nalanda_lab.sweep import Record, follow, key
from nalanda_lab.texts import prepare_text

STUDY = Path(__file__).with_name("width.yaml")
PARAMETRIZATIONS = ("standard", "mup")
BYTES = 256
"""The vocabulary of the coordinate check, whose text is read as bytes."""
ROWS, LENGTH = 4, 128


def widened(model: dict[str, Any], width: int, parametrization: str) -> dict[str, Any]:
    """The keys of `model` at another width, with heads of its size.

    Raises:
        InputError: a head does not fit the width a whole number of times.
    """
    base = NalandaConfig(**model)
    sizes = {}
    for name in ("hidden_size", "num_heads", "intermediate_size"):
        size = getattr(base, name) * width / base.hidden_size
        if size != round(size):
            raise InputError(
                f"--widths {width}: {name} would be {size:g}; take a multiple of a head"
            )
        sizes[name] = round(size)
    keys = model | sizes | {"head_dim": base.head_dim, "parametrization": parametrization}
    return keys | ({"base_width": base.hidden_size} if parametrization == "mup" else {})


# ------------------------------ the coordinate check


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Outputs of the modules while inside, by kind: a projection's last name, `mixer`, `mlp`, `norm`, `lm_head`."""
    outputs: dict[str, list[Tensor]] = {}

    def record(kind: str, y: Any) -> None:
        tensor = y[0] if isinstance(y, tuple) else y
        outputs.setdefault(kind, []).append(tensor.detach().float())

    def watched(project: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        def call(x: Tensor) -> dict[str, Tensor]:
            rows = project(x)
            for name, y in rows.items():
                record(f"{name}_proj", y)
            return rows

        return call

    handles, fused = [], []
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in ("mixer", "mlp", "norm", "lm_head"):
            handles.append(
                module.register_forward_hook(lambda _m, _x, y, kind=kind: record(kind, y))
            )
        if isinstance(module, FusedLinears):
            fused.append(module)
            module.project = watched(module.project)  # pyrefly: ignore[missing-attribute]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
        for module in fused:
            del module.project


def text_rows() -> Tensor:
    """`[ROWS, LENGTH]` bytes of a module of Python."""
    text = inspect.getsource(argparse).encode()[: ROWS * LENGTH]
    return torch.tensor(list(text)).view(ROWS, LENGTH)


def changes(
    keys: dict[str, Any], optim: OptimConfig, steps: int, seed: int
) -> dict[str, list[float]]:
    """How far the outputs of each kind of module have moved from their first values, after 0 to `steps` steps.

    A distance is the root mean square over tokens, channels and layers. Entry 0 is the size itself at the start.
    """
    torch.manual_seed(seed)
    model = NalandaForCausalLM(NalandaConfig(**keys, vocab_size=BYTES))
    optimizer = build_optimizer(model, optim)
    rows = text_rows()

    first: dict[str, list[Tensor]] = {}
    moved: dict[str, list[float]] = {}
    for step in range(steps + 1):
        with recorded(model) as outputs:
            loss = model(rows, labels=rows, use_cache=False).loss
        if step == 0:
            first = {kind: list(tensors) for kind, tensors in outputs.items()}
        for kind, tensors in outputs.items():
            pairs = zip(tensors, first[kind], strict=True)
            squares = [(y - (y0 if step else 0)).square().mean() for y, y0 in pairs]
            moved.setdefault(kind, []).append(torch.stack(squares).mean().sqrt().item())

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return moved


def slope(widths: list[int], sizes: list[float]) -> float:
    """Exponent s of size ~ width^s, by least squares over the logarithms."""
    x, y = [math.log(width) for width in widths], [math.log(size) for size in sizes]
    return statistics.linear_regression(x, y).slope


def coordinates(
    model: dict[str, Any], optim: OptimConfig, widths: list[int], steps: int, seeds: int = 2
) -> list[dict[str, Any]]:
    """A row for each parametrization and kind of module: `start` and `change`, the sizes by width, and slopes.

    `start` is the size before the first step; `change` the distance from it after the last one. Sizes are means
    over seeds.
    """
    rows = []
    with Progress("training", len(PARAMETRIZATIONS) * len(widths) * seeds, "runs") as progress:
        done = 0
        for parametrization in PARAMETRIZATIONS:
            by_width: dict[int, list[dict[str, list[float]]]] = {}
            for width in widths:
                for seed in range(seeds):
                    keys = widened(model, width, parametrization)
                    by_width.setdefault(width, []).append(changes(keys, optim, steps, seed))
                    done += 1
                    progress.to(done)
            for kind in by_width[widths[0]][0]:
                row: dict[str, Any] = {"parametrization": parametrization, "kind": kind}
                for name, step in (("start", 0), ("change", -1)):
                    sizes = [
                        statistics.mean(run[kind][step] for run in by_width[w]) for w in widths
                    ]
                    row |= {name: sizes, f"{name}_slope": slope(widths, sizes)}
                rows.append(row)
    return rows


def check_coordinates(
    config: RunConfig, widths: list[str], steps: int, output: str, json: str | None = None
) -> list[dict[str, Any]]:
    """Measures, prints and draws `coordinates` for a recipe's model and optimizer.

    Raises:
        InputError: widths that are no numbers, fewer than two, or that no whole number of heads fills.
    """
    try:
        sizes = sorted({int(width) for width in widths})
    except ValueError:
        raise InputError(f"--widths {','.join(widths)}: give numbers with commas") from None
    if len(sizes) < 2:
        raise InputError("--widths: give at least two, since an exponent is measured")
    directory = output_folder(output, "--output")
    file = None if json is None else output_file(json, "--json")

    model = {key: value for key, value in config.model.items() if key not in ("auto", "init_from")}
    rows = coordinates(model, config.optim, sizes, steps)
    console = Console(highlight=False, emoji=False)
    print_coordinates(rows, sizes, console)
    about = f"{steps} steps of {config.optim.name} at {config.optim.lr:g}, {ROWS} rows of {LENGTH} bytes, 2 seeds."
    picture = draw_coordinates(rows, sizes, directory / "coordinates", about)[0]
    console.print(f"\n{picture}", style="dim", soft_wrap=True)
    if file is not None:
        file.write_text(jsonlib.dumps({"widths": sizes, "rows": rows}, indent=2) + "\n")
    return rows


def print_coordinates(rows: list[dict[str, Any]], widths: list[int], console: Console) -> None:
    """Prints slopes of both parametrizations side by side."""
    table = Table("output of", box=None, pad_edge=False)
    for head in ("standard\nstart", "standard\nchange", "µP\nstart", "µP\nchange"):
        table.add_column(head, justify="right")
    slopes: dict[str, list[str]] = {}
    for row in rows:
        cells = [f"{row[name]:+.2f}" for name in ("start_slope", "change_slope")]
        slopes.setdefault(row["kind"], []).extend(cells)
    for kind, cells in slopes.items():
        table.add_row(kind, *cells)
    console.print(
        f"exponent of the width in an activation's size, widths {', '.join(map(str, widths))}",
        style="bold",
    )
    console.print(table)


def draw_coordinates(
    rows: list[dict[str, Any]], widths: list[int], file: Path, about: str
) -> list[Path]:
    """Draws the change of each output over width, a panel for each parametrization."""
    # The last norm of tied embeddings shrinks on purpose: it has the head's factor.
    mup = [row for row in rows if row["parametrization"] == "mup" and row["kind"] != "norm"]
    worst = max(mup, key=lambda row: abs(row["change_slope"]))
    title = f"Change of activations over width: µP's largest exponent is {worst['change_slope']:+.2f} ({worst['kind']})"
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    caption = f"Root mean square of an output's distance from its first value. {about}\n"
    caption += "With tied embeddings the last norm carries the head's factor, 1 / √width."
    _, looks = in_panels(kinds)
    with drawing(file, title, caption, 2, height=2.8, sharey=True) as panels:
        for axes, parametrization in zip(panels, PARAMETRIZATIONS, strict=True):
            for row in rows:
                if row["parametrization"] == parametrization:
                    axes.plot(widths, row["change"], **looks[row["kind"]], label=row["kind"])
            axes.set(
                title="µP" if parametrization == "mup" else "standard",
                xlabel="width",
                ylabel="change (RMS)",
            )
            log_axis(axes.xaxis, widths)
            log_axis(axes.yaxis)
    return files(file)


# ------------------------------ the transfer of rates


def transfer_settings(study: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of all runs, seed by seed, narrow models first."""
    settings = []
    sweep_over = (
        study["seeds"],
        study["widths"],
        study["mixers"].items(),
        PARAMETRIZATIONS,
        study["rates"],
    )
    for seed, width, (_, mixer), parametrization, rate in itertools.product(*sweep_over):
        model = widened(study["base"] | mixer, width, parametrization)
        fixed = {"budgets": [study["tokens"]], "cooldown": study["cooldown"], "lengths": {}}
        settings.append({"model": model, "seed": seed, "rate": rate} | fixed)
    return settings


def transfer(
    text: str | None, out: str, workers: int, device: str | None = None, study_file: Path = STUDY
) -> None:
    """Trains what the folder `out` has no record of, then prints and draws where the best rates lie.

    text: a corpus, as `data.source`; default: that of an earlier call.
    device: of all runs, which share it; by default a GPU, if there is one.
    """
    device = choose_device(device)
    study = parse_yaml(study_file.read_text(encoding="utf-8"), str(study_file))
    folder = output_folder(out, "--output")
    token_set = prepare_text(study["recipe"], text, folder, 1)

    jobs = {}
    for settings in transfer_settings(study):
        recipe = study["recipe"] | {"seed": settings["seed"], "optim": {"lr": settings["rate"]}}
        recipe |= {"model": settings["model"], "tokenizer": f"{token_set}/tokenizer"}
        recipe |= {"data": recipe["data"] | {"source": str(token_set)}}
        config = section(RunConfig, recipe, "")
        jobs[key(settings)] = partial(
            train_paired, settings, config, token_set, folder / "work", device
        )

    records = follow(jobs, folder / "transfer.jsonl", workers, describe_run)
    rows = best_rates(study, records)
    print_transfer(rows, gains(study, records), Console(highlight=False, emoji=False))
    draw_transfer(study, records, rows, folder / "transfer")


def describe_run(record: Record) -> str:
    settings = record["settings"]
    model = settings["model"]
    result = record.get("failed") or f"{record['budgets'][-1]['loss']:.4f}"
    name = f"{model['parametrization']} {model['hidden_size']} {model['mixer']}"
    return f"{name} rate {settings['rate']:g} seed {settings['seed']}: {result}"


Series = tuple[str, str, int]
"""(mixer's name, parametrization, width)."""


def losses_by_seed(
    study: dict[str, Any], records: list[Record]
) -> dict[Series, list[dict[int, float]]]:
    """The losses at each rate by seed; inf where a run failed."""
    losses: dict[Series, list[dict[int, float]]] = {}
    for name, mixer in study["mixers"].items():
        for record in records:
            settings = record["settings"]
            model = settings["model"]
            if model["mixer"] != mixer["mixer"]:
                continue
            series = (name, model["parametrization"], model["hidden_size"])
            by_rate = losses.setdefault(series, [{} for _ in study["rates"]])
            loss = math.inf if "failed" in record else record["budgets"][-1]["loss"]
            by_rate[study["rates"].index(settings["rate"])][settings["seed"]] = loss
    return losses


def losses_by_rate(study: dict[str, Any], records: list[Record]) -> dict[Series, list[float]]:
    """The mean loss over seeds at each rate; inf where a run failed."""
    return {
        series: [statistics.mean(each.values()) for each in by_rate]
        for series, by_rate in losses_by_seed(study, records).items()
    }


def gains(study: dict[str, Any], records: list[Record]) -> list[tuple[str, int, str, Gap]]:
    """(mixer, width, rates, µP less standard) for each wider model, paired by seed; inf where a run failed.

    rates: `best`, each parametrization at the rate of least mean loss, or `narrow`, both at that of the
    narrowest model.
    """
    losses, means = losses_by_seed(study, records), losses_by_rate(study, records)
    narrowest, *wider = study["widths"]
    found = []
    for name, width in itertools.product(study["mixers"], wider):
        pair = [(name, which, width) for which in ("mup", "standard")]
        best = [means[series].index(min(means[series])) for series in pair]
        base = means[name, "mup", narrowest]
        narrow = base.index(min(base))
        for rates, places in (("best", best), ("narrow", [narrow, narrow])):
            pairs = [losses[series][i] for series, i in zip(pair, places, strict=True)]
            seeds = sorted(pairs[0].keys() & pairs[1].keys())
            if len(seeds) > 1:
                first, second = (np.array([each[seed] for seed in seeds]) for each in pairs)
                found.append((name, width, rates, paired_gap(first, second)))
    return found


def best_rate(rates: list[float], losses: list[float]) -> float:
    """The rate of least loss: the vertex of a parabola through the best rate of the grid and its neighbours.

    At an end of the grid, or beside a failed run, it is the grid's own.
    """
    best = min(range(len(rates)), key=losses.__getitem__)
    if best in (0, len(rates) - 1):
        return rates[best]
    x0, x1, x2 = (math.log2(rate) for rate in rates[best - 1 : best + 2])
    y0, y1, y2 = losses[best - 1 : best + 2]
    left, right = (y0 - y1) / (x1 - x0), (y2 - y1) / (x2 - x1)  # both at least 0
    if not math.isfinite(left + right) or left + right == 0:
        return rates[best]
    # The derivative is −left half a step before the middle, and right half a step behind it.
    return 2 ** ((x0 + x1) / 2 + (x2 - x0) / 2 * left / (left + right))


def best_rates(study: dict[str, Any], records: list[Record]) -> list[dict[str, Any]]:
    """A row for each mixer and parametrization: the best rate at each width, and their spread as a factor."""
    losses = losses_by_rate(study, records)
    rows = []
    for name, parametrization in itertools.product(study["mixers"], PARAMETRIZATIONS):
        series = [losses[name, parametrization, width] for width in study["widths"]]
        rates = [best_rate(study["rates"], each) for each in series]
        row = {"mixer": name, "parametrization": parametrization, "rates": rates}
        rows.append(
            row | {"spread": max(rates) / min(rates), "losses": [min(each) for each in series]}
        )
    return rows


def print_transfer(
    rows: list[dict[str, Any]], gains: list[tuple[str, int, str, Gap]], console: Console
) -> None:
    table = Table("mixer", "parametrization", "best rate by width", "spread", "loss", box=None)
    for row in rows:
        rates = "  ".join(f"{rate:.4f}" for rate in row["rates"])
        losses = "  ".join(f"{loss:.3f}" for loss in row["losses"])
        table.add_row(row["mixer"], row["parametrization"], rates, f"{row['spread']:.2f}", losses)
    console.print(table, markup=False)
    for name, width, rates, gap in gains:
        where = "each at its best rate" if rates == "best" else "at the narrowest model's rate"
        console.print(f"{name}, width {width}, µP less standard, {where}: {gap.text()} nats")


def draw_transfer(
    study: dict[str, Any], records: list[Record], rows: list[dict[str, Any]], file: Path
) -> list[Path]:
    """Draws loss over rate, a panel for each mixer and parametrization and a line for each width."""
    spreads = {
        p: max(row["spread"] for row in rows if row["parametrization"] == p)
        for p in PARAMETRIZATIONS
    }
    title = "Best rates differ over widths by up to "
    title += f"{spreads['mup']:.2f} times under µP, {spreads['standard']:.2f} without"
    caption = f"Means over n = {len(study['seeds'])} seeds, {study['tokens']:,} tokens a run. Dotted: the best rate."
    losses = losses_by_rate(study, records)
    _, looks = in_panels(study["widths"])
    with drawing(file, title, caption, len(rows), height=2.6) as panels:
        for axes, row in zip(panels, rows, strict=True):
            for width, rate in zip(study["widths"], row["rates"], strict=True):
                series = losses[row["mixer"], row["parametrization"], width]
                axes.plot(study["rates"], series, **looks[width], label=f"width {width}")
                axes.axvline(rate, color=looks[width]["color"], linestyle=":", linewidth=0.8)
            which = "µP" if row["parametrization"] == "mup" else "standard"
            axes.set(title=f"{row['mixer']}, {which}", xlabel="rate", ylabel="loss (nats a token)")
            log_axis(axes.xaxis, study["rates"])
    return files(file)
