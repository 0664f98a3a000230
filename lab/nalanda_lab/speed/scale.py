"""Holds the predictions of `nalanda info --processes` against steps of two processes on this machine."""

import json as jsonlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from nalanda.config.schema import OptimConfig
from nalanda.model.context import Context
from nalanda.report.info import describe_recipe
from nalanda.train import parallel
from nalanda.train.flops import matmul_flops
from nalanda.train.optim import build_optimizer
from nalanda_lab.planner import UPDATE, Cluster, Split, count, predict
from nalanda_lab.track import figures_file, plain_table, track

RECIPE = "demo"
MODELS = {
    "gated_deltanet, nala": [],
    "gla": ["model.mixer=gla", "model.feature_map=null", "model.expand_k=1"],
    "softmax": ["model.mixer=softmax", "model.feature_map=null", "model.expand_k=1"],
}
"""Settings that make each model from the demo's."""
ROWS, PROCESSES = 4, 2
SPLITS = [
    Split("ddp", micro=ROWS // PROCESSES),
    Split("fsdp", micro=ROWS // PROCESSES),
    Split("ddp", PROCESSES, ROWS),
]


def bench_scale(*, rounds: int = 10, json: str | Path | None = None) -> dict:
    """Predicts steps at the demo's shape on two processes over gloo, of one thread each, and times them.

    Measures in both processes at once: the rates of matrix products, of copies and of gloo, gloo's latency,
    the share of the peak at which a model computes its 4 whole rows of 512 tokens, and steps of each split.
    They take turns, and the fastest of the rounds counts, since other work on the machine only slows them.
    `nalanda_lab.planner` predicts the splits from the other figures.

    Raises InputError for a file that cannot be written.
    """
    write = figures_file(json)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, (folder, rounds), nprocs=PROCESSES)
        measured = jsonlib.loads(Path(folder, "measured.json").read_text())
    links = {key: measured[key] for key in ("peak", "hbm", "nvlink", "latency")}

    rows = []
    for model, seconds in measured["seconds"].items():
        counts = count(RECIPE, MODELS[model])
        update = UPDATE * counts.parameters / (links["hbm"] * 1e9)
        work = 3 * counts.flops * ROWS * counts.seq_len
        mfu = work / (seconds.pop("whole") - update) / (links["peak"] * 1e12)
        cluster = Cluster(PROCESSES, node=PROCESSES, mfu=mfu, overlap=0, **links)
        for split in SPLITS:
            rows.append(
                {
                    "model": model,
                    "mfu": mfu,
                    "split": str(split),
                    "predicted": predict(counts, cluster, split).step,
                    "measured": seconds[str(split)],
                }
            )
    _print_rows(links, rows)
    figures = {"rounds": rounds, **links, "rows": rows}
    write(figures)
    return figures


def _measure(rank: int, folder: str, rounds: int) -> None:
    """Runs one of the processes; the first writes the figures."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)

    steps = {model: _steps(overrides, rank) for model, overrides in MODELS.items()}
    block, message, large = torch.ones(2**24), torch.ones(1), torch.ones(2**22)
    target = torch.empty_like(block)
    rates: dict[str, list[float]] = {"copy": [], "message": [], "large": []}
    seconds: dict[str, dict[str, list[float]]] = {model: {} for model in MODELS}
    dist.barrier()
    peak = matmul_flops(torch.device("cpu"), torch.float32)
    for i in track(range(-2, rounds), "rounds", quiet=rank > 0):  # the first rounds warm up
        rates["copy"].append(_seconds(lambda: target.copy_(block)))
        rates["message"].append(_seconds(lambda: dist.all_reduce(message)))
        rates["large"].append(_seconds(lambda: dist.all_reduce(large)))
        for model, named in steps.items():
            for name, step in named.items():
                took = _seconds(step)
                seconds[model].setdefault(name, []).extend([took] * (i >= 0))

    best = {name: min(values) for name, values in rates.items()}
    latency = best["message"] / 2  # a ring's all-reduce among two is two messages
    fastest = {
        model: {name: min(times) for name, times in each.items()} for model, each in seconds.items()
    }
    figures = {
        "peak": peak / 1e12,
        "hbm": 2 * block.nbytes / best["copy"] / 1e9,
        "nvlink": large.nbytes / (best["large"] - best["message"]) / 1e9,
        "latency": latency * 1e6,
        "seconds": fastest,
    }
    if rank == 0:
        Path(folder, "measured.json").write_text(jsonlib.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(run: Callable[[], object]) -> float:
    """Seconds of `run` in the slowest process; all begin together."""
    dist.barrier()
    start = time.perf_counter()
    run()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _steps(overrides: list[str], rank: int) -> dict[str, Callable[[], None]]:
    """The steps of a model by name: `whole` without an exchange, then by `SPLITS`."""

    def step(model: nn.Module, rows: torch.Tensor, **options: Context) -> Callable[[], None]:
        optimizer = build_optimizer(model, OptimConfig())
        model.train()

        def run() -> None:
            model(rows, labels=rows, use_cache=False, **options).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    def built() -> nn.Module:
        _, model = describe_recipe(RECIPE, overrides)
        torch.manual_seed(0)
        return type(model)(model.config)

    config, _ = describe_recipe(RECIPE, overrides)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(4096, (ROWS, config.data.seq_len), generator=generator)
    share = rows.chunk(PROCESSES)[rank]
    sharded = built()
    parallel.shard(
        sharded, parallel.units(sharded), init_device_mesh("cpu", (PROCESSES,)), dtype=None
    )
    ddp, fsdp, context = map(str, SPLITS)
    return {
        "whole": step(built(), rows),
        ddp: step(DistributedDataParallel(built()), share),
        fsdp: step(sharded, share),
        context: step(DistributedDataParallel(built()), rows, context=Context()),
    }


def _print_rows(links: dict[str, float], rows: list[dict]) -> None:
    console = Console(highlight=False, emoji=False)
    console.print(
        f"two processes, one thread each: {1e3 * links['peak']:.0f} GFLOP/s, copies at {links['hbm']:.1f} "
        f"GB/s, gloo at {links['nvlink']:.2f} GB/s and {links['latency']:.0f} µs a message",
        soft_wrap=True,
    )
    lines = []
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        times = f"{1e3 * predicted:.0f} ms", f"{1e3 * measured:.0f} ms"
        share, ratio = f"{100 * row['mfu']:.0f} %", f"{measured / predicted:.2f}"
        lines.append([row["model"], row["split"], share, *times, ratio])
    header = ["model", "split", "MFU", "predicted", "measured", "measured ÷ predicted"]
    console.print(plain_table(header, lines, left=2))
    console.print("fastest of the rounds; MFU of whole rows in each process, measured", style="dim")
