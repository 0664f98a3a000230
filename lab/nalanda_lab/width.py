"""Models of several widths: whether activations keep their size, and where the best rate lies.

Both compare the standard parametrization with µP (`nalanda.model.width`). The base is a recipe's model. A wider one
has more heads of the same size, and a GLU that is wider by the same factor.
"""

import argparse
import inspect
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from nalanda.common.errors import InputError, output_folder
from nalanda.common.progress import Progress
from nalanda.compare.options import Execution
from nalanda.compare.runs import Runner
from nalanda.compare.study import load_arms, read_study
from nalanda.compare.verdict import Gap, gap_by_seed
from nalanda.config.load import load_config
from nalanda.config.schema import OptimConfig
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.model.projections import FusedLinears
from nalanda.report.figures import drawing, files, in_panels, log_axis
from nalanda.train.optim import build_optimizer
from nalanda_lab.estimate import half_width, signed
from nalanda_lab.track import figures_file, plain_table

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
    recipe: str,
    overrides: list[str] | None,
    widths: list[int],
    steps: int,
    output: str,
    json: str | None = None,
) -> list[dict[str, Any]]:
    """Measures, prints and draws `coordinates` for a recipe's model and optimizer.

    Raises:
        InputError: fewer than two widths, or one that no whole number of heads fills.
    """
    config = load_config(recipe, overrides or [])
    sizes = sorted(set(widths))
    if len(sizes) < 2:
        raise InputError("--widths: give at least two, since an exponent is measured")
    directory = output_folder(output, "--output")
    write = figures_file(json)

    model = {key: value for key, value in config.model.items() if key not in ("auto", "init_from")}
    rows = coordinates(model, config.optim, sizes, steps)
    console = Console(highlight=False, emoji=False)
    print_coordinates(rows, sizes, console)
    about = f"{steps} steps of {config.optim.name} at {config.optim.lr:g}, {ROWS} rows of {LENGTH} bytes, 2 seeds."
    picture = draw_coordinates(rows, sizes, directory / "coordinates", about)[0]
    console.print(f"\n{picture}", style="dim", soft_wrap=True)
    write({"widths": sizes, "rows": rows})
    return rows


def print_coordinates(rows: list[dict[str, Any]], widths: list[int], console: Console) -> None:
    """Prints slopes of both parametrizations side by side."""
    slopes: dict[str, list[str]] = {}
    for row in rows:
        cells = [f"{row[name]:+.2f}" for name in ("start_slope", "change_slope")]
        slopes.setdefault(row["kind"], [row["kind"]]).extend(cells)
    heads = ["standard\nstart", "standard\nchange", "µP\nstart", "µP\nchange"]
    console.print(f"exponent of the width in an activation's size, widths {widths}", style="bold")
    console.print(plain_table(["output of", *heads], slopes.values()))


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

Series = tuple[str, str, int]
"""(mixer's name, parametrization, width)."""
Losses = dict[Series, dict[float, dict[int, float]]]
"""Of each series the loss at a rate, by seed; inf where a run failed."""


def transfer(folder: str) -> None:
    """Prints and draws where the best rates lie.

    folder: of width.yaml, as `nalanda compare` leaves it, or of the records of the study before.
    """
    losses, tokens = read_losses(Path(folder))
    rows = best_rates(losses)
    print_transfer(rows, gains(losses), Console(highlight=False, emoji=False))
    draw_transfer(losses, tokens, rows, Path(folder) / "transfer")


def read_losses(folder: Path) -> tuple[Losses, int]:
    """The losses, and the tokens of a run. Raises `InputError` for a folder without either."""
    records = folder / "transfer.jsonl"
    losses: Losses = {}

    def add(model: dict[str, Any], rate: float, seed: int, loss: float) -> None:
        mixer = model["mixer"]
        name = f"{mixer} + {model['feature_map']}" if isinstance(mixer, str) else "transnormer"
        series = (name, model.get("parametrization", "standard"), model["hidden_size"])
        losses.setdefault(series, {}).setdefault(rate, {})[seed] = loss

    tokens = 0
    if records.is_file():
        for record in map(json.loads, records.read_text().splitlines()):
            settings = record["settings"]
            loss = math.inf if "failed" in record else record["budgets"][-1]["loss"]
            add(settings["model"], settings["rate"], settings["seed"], loss)
            tokens = settings["budgets"][-1]
        return losses, tokens

    study = read_study(str(folder))
    runner = Runner(study, load_arms(study), Execution())
    runner.look()
    for run in runner.runs:
        result = runner.result_of(run)
        if run.trial and run.rate and result.ended:
            add(runner.configs[run.arm].model, run.rate, run.seed, result.loss)
            tokens = max(tokens, result.tokens)
    return losses, tokens


def means_of(by_rate: dict[float, dict[int, float]]) -> dict[float, float]:
    """The mean loss over seeds at each rate."""
    return {rate: statistics.mean(by_rate[rate].values()) for rate in sorted(by_rate)}


def best_of(means: dict[float, float]) -> float:
    return min(means, key=means.__getitem__)


def widths_of(losses: Losses, name: str) -> list[int]:
    return sorted({width for mixer, _, width in losses if mixer == name})


def gains(losses: Losses) -> list[tuple[str, int, str, Gap]]:
    """(mixer, width, rates, µP less standard) for each wider model, paired by the seeds that both have finished.

    rates: `best`, each parametrization at the rate of least mean loss, or `narrow`, both at that of the
    narrowest model.
    """
    found = []
    for name in sorted({mixer for mixer, *_ in losses}):
        narrowest, *wider = widths_of(losses, name)
        narrow = best_of(means_of(losses[name, "mup", narrowest]))
        for width in wider:
            pair = [losses[name, which, width] for which in ("mup", "standard")]
            best = [best_of(means_of(each)) for each in pair]
            for rates, chosen in (("best", best), ("narrow", [narrow, narrow])):
                each = [
                    {seed: loss for seed, loss in by_rate[rate].items() if math.isfinite(loss)}
                    for by_rate, rate in zip(pair, chosen, strict=True)
                ]
                if gap := gap_by_seed("mup", "standard", *each):
                    found.append((name, width, rates, gap))
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


def best_rates(losses: Losses) -> list[dict[str, Any]]:
    """A row for each mixer and parametrization: the best rate at each width, and their spread as a factor."""
    rows = []
    names = sorted({mixer for mixer, *_ in losses})
    for name, parametrization in itertools.product(names, PARAMETRIZATIONS):
        widths = widths_of(losses, name)
        series = [means_of(losses[name, parametrization, width]) for width in widths]
        rates = [best_rate(list(each), list(each.values())) for each in series]
        row = {"mixer": name, "parametrization": parametrization, "rates": rates}
        row |= {"spread": max(rates) / min(rates), "losses": [min(x.values()) for x in series]}
        rows.append(row)
    return rows


def print_transfer(
    rows: list[dict[str, Any]], gains: list[tuple[str, int, str, Gap]], console: Console
) -> None:
    lines = []
    for row in rows:
        rates = "  ".join(f"{rate:.4f}" for rate in row["rates"])
        losses = "  ".join(f"{loss:.3f}" for loss in row["losses"])
        cells = [row["mixer"], row["parametrization"], rates, f"{row['spread']:.2f}", losses]
        lines.append(cells)
    header = ["mixer", "parametrization", "best rate by width", "spread", "loss"]
    console.print(plain_table(header, lines, left=2), markup=False)
    for name, width, rates, gap in gains:
        where = "each at its best rate" if rates == "best" else "at the narrowest model's rate"
        console.print(f"{name}, width {width}, µP less standard, {where}: {write_mean(gap)} nats")


def write_mean(gap: Gap) -> str:
    """`+0.012 ± 0.003`."""
    return f"{signed(gap.mean, '.3f')} ± {half_width(gap):.3f}"


def draw_transfer(
    losses: Losses, tokens: int, rows: list[dict[str, Any]], file: Path
) -> list[Path]:
    """Draws loss over rate, a panel for each mixer and parametrization and a line for each width."""
    spreads = {
        p: max(row["spread"] for row in rows if row["parametrization"] == p)
        for p in PARAMETRIZATIONS
    }
    title = "Best rates differ over widths by up to "
    title += f"{spreads['mup']:.2f} times under µP, {spreads['standard']:.2f} without"
    seeds = max(len(by_seed) for by_rate in losses.values() for by_seed in by_rate.values())
    caption = f"Means over n = {seeds} seeds, {tokens:,} tokens a run. Dotted: the best rate."
    _, looks = in_panels(sorted({width for *_, width in losses}))
    with drawing(file, title, caption, len(rows), height=2.6) as panels:
        for axes, row in zip(panels, rows, strict=True):
            widths = widths_of(losses, row["mixer"])
            for width, rate in zip(widths, row["rates"], strict=True):
                means = means_of(losses[row["mixer"], row["parametrization"], width])
                axes.plot(list(means), list(means.values()), **looks[width], label=f"width {width}")
                axes.axvline(rate, color=looks[width]["color"], linestyle=":", linewidth=0.8)
            which = "µP" if row["parametrization"] == "mup" else "standard"
            axes.set(title=f"{row['mixer']}, {which}", xlabel="rate", ylabel="loss (nats a token)")
            log_axis(axes.xaxis, sorted({rate for each in losses.values() for rate in each}))
    return files(file)
