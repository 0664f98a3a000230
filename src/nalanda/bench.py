"""Speed of the ops beside a peer's, measured in one run, and only after the two are shown to agree."""

import inspect
import json as jsonlib
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from nalanda.errors import InputError
from nalanda.model import ops

HEAD_DIM = 128  # K and V
SHAPES = ((2048, 8), (8192, 4))  # (T, H), beside the peer
LONG = (8192, 16384, 32768, 65536)  # T of the linearity row, with 4 heads
TOLERANCE = 1e-4  # of the largest entry, between two fp32 results

Function = Callable[..., torch.Tensor]


def bench_ops(
    *, threads: int = 2, json: str | Path | None = None, repeats: int = 7, long: bool = True
) -> dict:
    """Times `delta_rule`, forward and backward in fp32 on the CPU, beside transformers' torch path.

    Prints the agreement of outputs and gradients; per shape the median milliseconds of both (runs alternate),
    the median ratio of neighbouring runs, and the share that ours has of the machine's matrix-product rate
    (three times the forward's FLOPs, recomputation not counted); and the time a token up to T = 65 536.

    Args:
        threads: that torch may use.
        json: a file for the same figures.
        repeats: timed runs of each side and shape, after one for warming up.
        long: whether to measure long sequences, which takes a minute or two.

    Raises:
        InputError: ours and the peer disagree; nothing is timed then.
    """
    console, before = Console(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        console.print(
            f"delta rule, forward + backward, fp32, B = 1, K = V = {HEAD_DIM}, {threads} threads, "
            f"{platform.machine()}, torch {torch.__version__}\n"
            f"peer: torch_chunk_gated_delta_rule of transformers {version('transformers')}"
        )
        _print_agreement(console)
        rows = [_compare(T, H, gated, repeats) for T, H in SHAPES for gated in (True, False)]
        _print_rows(console, rows)
        linearity = _linearity(repeats) if long else []
        _print_linearity(console, linearity)
    finally:
        torch.set_num_threads(before)
    figures = {"threads": threads, "torch": torch.__version__, "shapes": rows, "linearity": linearity}
    if json is not None:
        Path(json).write_text(jsonlib.dumps(figures, indent=2) + "\n")
    return figures


def _ours(q, k, v, beta, g) -> torch.Tensor:
    return ops.delta_rule(q, k, v, beta, g, backend="torch")[0]


def _peer() -> Function:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    # The public name prefers a GPU kernel where one is installed, also on a CPU.
    rule = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)

    def peer(q, k, v, beta, g):  # knows no rule without decay
        return rule(q, k, v, g=torch.zeros_like(beta) if g is None else g, beta=beta)[0]

    return peer


def _inputs(T: int, H: int, gated: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Leaves q, k, v, beta, g (k of unit length, β in (0, 1)), and a gradient of the output."""
    generator = torch.Generator().manual_seed(T)
    q, k, v, d_o = (torch.randn(1, T, H, HEAD_DIM, generator=generator) for _ in range(4))
    beta, g = (torch.randn(1, T, H, generator=generator) for _ in range(2))
    inputs = [q, F.normalize(k, dim=-1), v, beta.sigmoid(), F.logsigmoid(g + 3) if gated else None]
    return [None if x is None else x.requires_grad_() for x in inputs], d_o


def _run(
    function: Function, inputs: list[torch.Tensor | None], d_o: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    o = function(*inputs)
    return o, *torch.autograd.grad(o, [x for x in inputs if x is not None], d_o)


def _seconds(function: Function, inputs: list[torch.Tensor | None], d_o: torch.Tensor) -> float:
    start = time.perf_counter()
    _run(function, inputs, d_o)
    return time.perf_counter() - start


def _print_agreement(console: Console) -> None:
    for gated in (True, False):
        inputs, d_o = _inputs(1000, 4, gated)
        pairs = zip(_run(_ours, inputs, d_o), _run(_peer(), inputs, d_o), strict=True)
        errors = [((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs]
        named = dict(zip(("o", "dq", "dk", "dv", "dbeta", "dg"), errors, strict=False))
        text = ", ".join(f"{name} {error:.0e}" for name, error in named.items())
        console.print(f"largest difference from the peer, {'gated' if gated else 'ungated'}: {text}")
        if not max(errors) < TOLERANCE:  # NaN fails too
            raise InputError(f"delta_rule and the peer differ by {max(errors):.1e}: nothing is timed")


def _matmul_rate(size: int = 1536) -> float:
    """FLOP/s of one big fp32 product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    start = time.perf_counter()
    torch.mm(a, b)
    return 2 * size**3 / (time.perf_counter() - start)


def _compare(T: int, H: int, gated: bool, repeats: int) -> dict:
    inputs, d_o = _inputs(T, H, gated)
    peer = _peer()
    for warm_up in (_ours, peer):
        _run(warm_up, inputs, d_o)
    measured = [
        (_seconds(_ours, inputs, d_o), _seconds(peer, inputs, d_o), _matmul_rate()) for _ in range(repeats)
    ]
    ours, theirs, rate = (statistics.median(column) for column in zip(*measured, strict=True))
    flops = 3 * T * ops.delta_rule_flops(H, HEAD_DIM, HEAD_DIM)
    return {
        "T": T,
        "H": H,
        "gated": gated,
        "ours_ms": 1e3 * ours,
        "peer_ms": 1e3 * theirs,
        "ratio": statistics.median(theirs / ours for ours, theirs, _ in measured),
        "matmul_gflops": rate / 1e9,
        "matmul_share": flops / ours / rate,
    }


def _linearity(repeats: int) -> list[dict]:
    """Time a token at growing T, relative to the shortest; lengths alternate as the sides do."""
    cases = {T: _inputs(T, 4, gated=True) for T in LONG}
    seconds = {T: [] for T in LONG}
    for _ in range(1 + repeats // 2):
        for T, case in cases.items():
            seconds[T].append(_seconds(_ours, *case))
    per_token = {T: statistics.median(times[1:] or times) / T for T, times in seconds.items()}
    return [
        {"T": T, "H": 4, "us_per_token": 1e6 * cost, "relative": cost / per_token[LONG[0]]}
        for T, cost in per_token.items()
    ]


def _print_rows(console: Console, rows: list[dict]) -> None:
    table = Table("T", "H", "decay", "ours ms", "peer ms", "ratio", "matmul GFLOP/s", "share of it")
    for row in rows:
        table.add_row(
            f"{row['T']}", f"{row['H']}", "yes" if row["gated"] else "no", f"{row['ours_ms']:.0f}",
            f"{row['peer_ms']:.0f}", f"{row['ratio']:.1f}×", f"{row['matmul_gflops']:.0f}",
            f"{row['matmul_share']:.0%}",
        )  # fmt: skip
    console.print(table)


def _print_linearity(console: Console, rows: list[dict]) -> None:
    for row in rows:
        cost = f"{row['us_per_token']:.1f} µs a token, {row['relative']:.2f}× that of T = {LONG[0]}"
        console.print(f"T = {row['T']:6d}, H = {row['H']}: {cost}")
