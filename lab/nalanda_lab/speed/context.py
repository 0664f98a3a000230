"""Measures memory and time of rows that are cut over processes, on this CPU over gloo."""

import json as jsonlib
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.model.context import Context
from nalanda_lab.speed.train import HEADS, SIZES, VOCABULARY
from nalanda_lab.track import figures_file, plain_table, track

SYSTEMS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "gated_deltanet, nala": {"mixer": "gated_deltanet", "feature_map": "nala", "expand_k": 0.5},
    "linear_attention": {"mixer": "linear_attention"},
}


def bench_context(*, length: int = 65536, json: str | Path | None = None) -> dict[str, Any]:
    """Prints memory and time of training steps on rows cut over processes, returns and optionally writes them.

    A step is of one row of `length` tokens at the demo's shape, on one process and on two, a thread each: what is
    kept for the backward, and the peak. That cut rows are exact is tested for every mixer: `nalanda.testing`.
    """
    write = figures_file(json)
    steps: dict[str, dict[str, Any]] = {}
    for name in track(SYSTEMS, "memory"):
        one, two = (_launch(number, name, length) for number in (1, 2))
        steps[name] = {"one": one, "two": two}
    _print_steps(Console(highlight=False, emoji=False), steps, length)

    result = {"torch": torch.__version__, "length": length, "steps": steps}
    write(result)
    return result


def _print_steps(console: Console, steps: dict[str, dict[str, Any]], length: int) -> None:
    """Prints memory and time of a step. steps: by system, on "one" process and on "two"."""
    heads = ["kept by 1", "each of 2", "peak of 1", "each of 2", "time 2 / 1"]
    rows = []
    for name, step in steps.items():
        one, two = step["one"], step["two"]
        sizes = [one["saved"], two["saved"], one["peak"], two["peak"]]
        cells = [f"{size / 2**20:,.0f} MiB" for size in sizes]
        rows.append([name, *cells, f"{two['seconds'] / one['seconds']:.2f}"])
    console.print(plain_table([f"{length:,} tokens", *heads], rows))


def _launch(processes: int, name: str, length: int) -> dict[str, float]:
    """`_step` on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (processes, folder, name, length), nprocs=processes)
        return jsonlib.loads((Path(folder) / "result.json").read_text())


def _run(rank: int, processes: int, folder: str, name: str, length: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    result = _step(Context(), name, length)
    if rank == 0:
        (Path(folder) / "result.json").write_text(jsonlib.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _step(context: Context, name: str, length: int) -> dict[str, float]:
    """A step's seconds, the bytes that autograd keeps, and the rise of the peak memory.

    Each is of the process that has the most.
    """
    torch.manual_seed(0)
    model: Any = NalandaForCausalLM(
        NalandaConfig(num_heads=HEADS, **SIZES, **SYSTEMS[name])
    ).train()
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    options: Any = {"context": context} if context.size > 1 else {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}  # bytes of each storage, by its address

    def record(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    # A short step first, so that the peak is that of the long one alone.
    short = ids[:, : 64 * context.size]
    model(short, labels=short, **options).loss.backward()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        loss = model(ids, labels=ids, num_items_in_batch=length - 1, **options).loss
    loss.backward()
    seconds = time.perf_counter() - began
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    figures = torch.tensor([seconds, sum(saved.values()), peak], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return dict(zip(("seconds", "saved", "peak"), figures.tolist(), strict=True))
