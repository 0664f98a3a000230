"""Measures rows that are cut over processes, on this CPU over gloo: errors, memory and time."""

import json as jsonlib
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from nalanda.model import FEATURE_MAPS, MIXERS, NalandaConfig, NalandaForCausalLM, build_feature_map
from nalanda.model.context import Context
from nalanda_lab.track import figures_file, plain_table, track

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.3,
}
TOKENS = 120
"""Of a row, for errors."""
DOCUMENTS = (5, 23, 52, 40)
"""Lengths that together fill a row: documents end, begin and lie inside parts, and pass through one."""
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 512,
    "tie_word_embeddings": True,
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "gated_deltanet, nala": {"mixer": "gated_deltanet", "feature_map": "nala", "expand_k": 0.5},
    "linear_attention": {"mixer": "linear_attention"},
}


def bench_context(
    *, processes: tuple[int, ...] = (2, 3), length: int = 65536, json: str | Path | None = None
) -> dict[str, Any]:
    """Prints two tables, and returns and optionally writes their figures.

    Errors: of tiny float64 models of every mixer and map, two rows of 120 tokens, one document each and
    packed: the largest difference to whole rows, of logits, loss and all gradients, each relative to the
    largest value of its tensor; of each mixer's maps the worst is printed, `json` has all. Memory and time: a
    training step of one row of `length` tokens at the demo's shape, on one process and on two, a thread each:
    what is kept for the backward, and the peak.
    """
    write = figures_file(json)
    console = Console(highlight=False, emoji=False)
    errors: dict[str, dict[str, list[float]]] = {name: {} for name in _cases()}
    for number in track(processes, "errors"):
        for name, largest in _launch(number, _errors).items():
            errors[name][str(number)] = largest
    _print_errors(console, errors, processes)

    steps: dict[str, dict[str, Any]] = {}
    for name in track(SYSTEMS, "memory"):
        one, two = (_launch(number, _step, name, length) for number in (1, 2))
        steps[name] = {"one": one, "two": two}
    _print_steps(console, steps, length)

    result = {"torch": torch.__version__, "errors": errors, "length": length, "steps": steps}
    write(result)
    return result


def _print_errors(
    console: Console, errors: dict[str, dict[str, list[float]]], processes: tuple[int, ...]
) -> None:
    """Prints the worst errors of each mixer's maps. errors: by case and number of processes."""
    heads = [head for n in processes for head in (f"{n}: logits", "loss", "gradients")]
    rows = []
    for mixer in MIXERS:
        maps = [each for name, each in errors.items() if name.split(" + ")[0] == mixer]
        cells = []
        for number in processes:
            of_maps = zip(*(each[str(number)] for each in maps), strict=True)
            cells += [f"{max(values):.0e}" for values in of_maps]
        rows.append([mixer, *cells])
    console.print(plain_table(["worst map of", *heads], rows))


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


def _cases() -> dict[str, dict[str, Any]]:
    """Every mixer with every map that it takes."""
    cases = {}
    for mixer, kind in MIXERS.items():
        for feature_map in FEATURE_MAPS if kind.rule.map else [None]:
            case: dict[str, Any] = {"mixer": mixer, "feature_map": feature_map}
            if mixer == "linear_attention" and feature_map:
                positive = build_feature_map(feature_map, num_heads=1, head_dim=4).nonnegative
                case["mixer_options"] = {"denominator": positive}
            try:
                NalandaConfig(**TINY, **case)
            except ValueError:
                continue
            cases[f"{mixer} + {feature_map or '–'}"] = case
    return cases


def _launch(processes: int, work: Callable, *arguments: Any) -> Any:
    """Runs `work(context, *arguments)` on so many processes, and returns the first one's result."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (processes, folder, work, arguments), nprocs=processes)
        return jsonlib.loads((Path(folder) / "result.json").read_text())


def _run(rank: int, processes: int, folder: str, work: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    result = work(Context(), *arguments)
    if rank == 0:
        (Path(folder) / "result.json").write_text(jsonlib.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _errors(context: Context) -> dict[str, list[float]]:
    """By case: the largest relative error of logits, loss and gradients."""
    errors = {}
    ids = torch.randint(61, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *DOCUMENTS, *DOCUMENTS[::-1]]).cumsum(0)
    for name, case in _cases().items():
        torch.manual_seed(0)
        model: Any = NalandaForCausalLM(NalandaConfig(**TINY, **case)).double()
        worst = [0.0, 0.0, 0.0]
        for cu_seqlens in (None, bounds):
            expected = _gradients(model, ids, cu_seqlens, None)
            cut = _gradients(model, ids, cu_seqlens, context)
            for i, (tensors, references) in enumerate(zip(cut, expected, strict=True)):
                differences = map(_relative, tensors, references)
                worst[i] = max(worst[i], *differences)
        errors[name] = worst
    return errors


def _gradients(
    model: Any, ids: Tensor, cu_seqlens: Tensor | None, context: Context | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(logits), (loss) and gradients of whole rows, whether they are cut or not."""
    model.zero_grad()
    options: Any = {"cu_seqlens": cu_seqlens, "use_cache": False, "context": context}
    model.train()
    loss = model(ids, labels=ids, num_items_in_batch=1, **options).loss
    loss.backward()
    with torch.no_grad():
        logits, loss = model(ids, **options).logits, loss.detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if context is not None:
        logits = context.gather(logits).movedim(0, 1).flatten(1, 2)
        for x in (loss, *gradients):
            dist.all_reduce(x)
    return [logits], [loss], [x.clone() for x in gradients]


def _relative(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest value; 0 for gradients that are nothing but rounding."""
    scale = float(b.abs().max())
    return float((a - b).abs().max()) / scale if scale > 1e-9 else 0.0


def _step(context: Context, name: str, length: int) -> dict[str, float]:
    """A step's seconds, the bytes that autograd keeps, and the rise of the peak memory.

    Each is of the process that has the most.
    """
    torch.manual_seed(0)
    model: Any = NalandaForCausalLM(NalandaConfig(**SMALL, **SYSTEMS[name])).train()
    ids = torch.randint(4096, (1, length), generator=torch.Generator().manual_seed(0))
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
