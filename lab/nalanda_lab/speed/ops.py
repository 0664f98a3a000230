"""Measures the speed of the ops beside a peer's, after checking that their results agree."""

import inspect
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from nalanda.common.allocator import keep_freed_memory
from nalanda.common.errors import InputError
from nalanda.common.products import product_route
from nalanda.model import ops
from nalanda_lab.track import figures_file, plain_table, take_turns, track

CASES = ("gated delta rule", "delta rule", "linear attention")
CHANNEL_CASES = ("KDA", "Gated DeltaNet 2")
"""Delta rules with gates by channel; timed beside the gated delta rule."""
HEAD_DIM = 128
"""K and V."""
SHAPES = ((2048, 8), (8192, 4))
"""(T, H) of the comparison with the peer."""
LONG = (8192, 16384, 32768, 65536)
"""T of the linearity measurement, with 4 heads."""
TOLERANCE = 1e-4
"""Largest difference between two fp32 results, relative to the largest entry."""

Function = Callable[..., torch.Tensor]


def bench_ops(
    *, threads: int = 2, json: str | Path | None = None, repeats: int = 7, long: bool = True
) -> dict:
    """Times `delta_rule` and `linear_attention`, forward and backward in fp32 on the CPU.

    The peers are transformers' torch paths: Qwen3-Next's gated delta rule and MiniMax's lightning attention.
    Prints the agreement of outputs and gradients, then per shape the median milliseconds of both (runs
    alternate), the median ratio of neighbouring runs, and our share of the machine's matrix-product rate
    (three times the forward FLOPs, without recomputation). Then come the delta rules with gates by channel,
    as multiples of the gated delta rule's time; last, the time per token up to T = 65 536.

    Args:
        threads: number of threads for torch.
        json: file for the figures.
        repeats: timed runs per side and shape, after one warm-up.
        long: whether to measure long sequences, which takes a minute or two.

    Raises:
        InputError: ours and the peer disagree; nothing is timed.
    """
    write = figures_file(json)
    console, before = Console(emoji=False), torch.get_num_threads()
    torch.set_num_threads(threads)
    keep_freed_memory()
    try:
        console.print(
            f"forward + backward, fp32, B = 1, K = V = {HEAD_DIM}, {threads} threads, "
            f"{platform.machine()}, torch {torch.__version__}, {product_route()} products\n"
            f"peers: torch_chunk_gated_delta_rule (Qwen3-Next) and MiniMaxLightningAttention of transformers "
            f"{version('transformers')}"
        )
        _print_agreement(console)
        rows = [_compare(*each, repeats) for each in track(_shapes(CASES), "against the peer")]
        _print_rows(console, rows)
        shapes = track(_shapes(CHANNEL_CASES), "gates by channel")
        channels = [_against_scalar(*each, repeats) for each in shapes]
        _print_channels(console, channels)
        linearity = _linearity(repeats) if long else []
        _print_linearity(console, linearity)
    finally:
        torch.set_num_threads(before)
    figures = {
        "threads": threads,
        "torch": torch.__version__,
        "shapes": rows,
        "channels": channels,
        "linearity": linearity,
    }
    write(figures)
    return figures


def _shapes(cases: Iterable[str]) -> list[tuple[str, int, int]]:
    return [(case, T, H) for case in cases for T, H in SHAPES]


def _ours(case: str) -> Function:
    def ours(q, k, v, beta, g, erase=None, write=None) -> torch.Tensor:
        if case == "linear attention":
            return ops.linear_attention(q, k, v, g, scale=1.0)[0]
        return ops.delta_rule(q, k, v, beta, g, erase, write)[0]

    return ours


def _peer(case: str, H: int) -> Function:
    if case == "linear attention":
        attention = _lightning_attention(H)

        def peer(q, k, v, beta, g):  # has fixed decays, which `_inputs` gives ours too
            o = attention(torch.cat([q, k, v], -1).flatten(2), None, None)[0]  # [B, T, H·V]
            return o.unflatten(2, (H, HEAD_DIM))

        return peer

    # flash-linear-attention warns of a CPU, where it is installed.
    with warnings.catch_warnings(action="ignore"):
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    # The public name uses a GPU kernel where installed, even on a CPU.
    rule = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)

    def peer(q, k, v, beta, g):  # has no rule without decay
        return rule(q, k, v, g=torch.zeros_like(beta) if g is None else g, beta=beta)[0]

    return peer


def _lightning_attention(H: int) -> torch.nn.Module:
    """MiniMax's layer reduced to its recurrence: no projections, activation, norm or gate."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    class Open(torch.nn.Module):
        def forward(self, x):
            return x.new_full((), 100.0)  # its sigmoid is 1

    sizes = {"hidden_size": 3 * H * HEAD_DIM, "num_attention_heads": H, "head_dim": HEAD_DIM}
    config = MiniMaxConfig(**sizes, num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    layer = MiniMaxLightningAttention(config, 0)
    for name in ("qkv_proj", "act_fn", "norm", "out_proj"):
        setattr(layer, name, torch.nn.Identity())
    layer.output_gate = Open()  # pyrefly: ignore[bad-assignment]
    return layer


def _inputs(case: str, T: int, H: int) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """The case's leaf tensors q, k, v, beta, g, and a gradient of o.

    k has unit length, β is in (0, 1). Gated DeltaNet 2 has β = 1, and erase and write too.
    """
    generator = torch.Generator().manual_seed(T)
    q, k, v, d_o = (torch.randn(1, T, H, HEAD_DIM, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v)]
    if case == "linear attention":
        g = -_lightning_attention(H).slope_rate.flatten()  # pyrefly: ignore[not-callable]
        return [*leaves, None, g.expand(1, T, H).contiguous()], d_o
    if case in CHANNEL_CASES:
        gates = [torch.randn(1, T, H, HEAD_DIM, generator=generator) for _ in range(3)]
        g = F.logsigmoid(gates.pop() + 3).requires_grad_()
        if case == "KDA":
            return [*leaves, gates[0][..., 0].sigmoid().requires_grad_(), g], d_o
        erase, write = (x.sigmoid().requires_grad_() for x in gates)
        return [*leaves, torch.ones(1, T, H), g, erase, write], d_o

    beta, g = (torch.randn(1, T, H, generator=generator) for _ in range(2))
    g = F.logsigmoid(g + 3).requires_grad_() if case == "gated delta rule" else None
    return [*leaves, beta.sigmoid().requires_grad_(), g], d_o


def _run(
    function: Function, inputs: list[torch.Tensor | None], d_o: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    o = function(*inputs)
    return o, *torch.autograd.grad(o, [x for x in inputs if x is not None and x.requires_grad], d_o)


def _seconds(function: Function, inputs: list[torch.Tensor | None], d_o: torch.Tensor) -> float:
    start = time.perf_counter()
    _run(function, inputs, d_o)
    return time.perf_counter() - start


def timed_case(case: str, T: int, H: int) -> Callable[[], float]:
    """Measures a case of ours once, forward and backward; returns its seconds."""
    return partial(_seconds, _ours(case), *_inputs(case, T, H))


def _print_agreement(console: Console) -> None:
    for case in CASES:
        inputs, d_o = _inputs(case, 1000, 4)
        ours, peers = _run(_ours(case), inputs, d_o), _run(_peer(case, 4), inputs, d_o)
        errors = []
        for x, expected in zip(ours, peers, strict=True):
            errors.append(((x - expected).abs().max() / expected.abs().max()).item())
        named = dict(zip(("o", "dq", "dk", "dv", "dbeta", "dg"), errors, strict=False))
        text = ", ".join(f"{name} {error:.0e}" for name, error in named.items())
        console.print(f"largest difference from the peer, {case}: {text}")
        if not max(errors) < TOLERANCE:  # NaN fails too
            raise InputError(
                f"{case}: ours and the peer differ by {max(errors):.1e}, so nothing is timed"
            )


def _matmul_rate(size: int = 1536) -> float:
    """FLOP/s of one large fp32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    start = time.perf_counter()
    torch.mm(a, b)
    return 2 * size**3 / (time.perf_counter() - start)


def _compare(case: str, T: int, H: int, repeats: int) -> dict:
    inputs, d_o = _inputs(case, T, H)
    ours, peer = _ours(case), _peer(case, H)
    for warm_up in (ours, peer):
        _run(warm_up, inputs, d_o)
    measured = [
        (_seconds(ours, inputs, d_o), _seconds(peer, inputs, d_o), _matmul_rate())
        for _ in range(repeats)
    ]
    ours_s, peer_s, rate = map(statistics.median, zip(*measured, strict=True))
    count = ops.linear_attention_flops if case == "linear attention" else ops.delta_rule_flops
    return {
        "case": case,
        "T": T,
        "H": H,
        "ours_ms": 1e3 * ours_s,
        "peer_ms": 1e3 * peer_s,
        "ratio": statistics.median(peer / ours for ours, peer, _ in measured),
        "matmul_gflops": rate / 1e9,
        "matmul_share": 3 * T * count(H, HEAD_DIM, HEAD_DIM) / ours_s / rate,
    }


def _against_scalar(case: str, T: int, H: int, repeats: int) -> dict:
    """A delta rule with gates by channel beside that with a decay per head; the runs alternate."""
    calls = [timed_case(name, T, H) for name in (CASES[0], case)]
    runs = [[call() for call in calls] for _ in range(1 + repeats)][1:]
    ratio = statistics.median(time / scalar for scalar, time in runs)
    return {
        "case": case,
        "T": T,
        "H": H,
        "ms": 1e3 * statistics.median(x for _, x in runs),
        "ratio": ratio,
    }


def _linearity(repeats: int) -> list[dict]:
    """Time per token at growing T, relative to the shortest; the lengths take turns."""
    cases = {T: timed_case(CASES[0], T, 4) for T in LONG}
    seconds = take_turns(cases, max(1, repeats // 2), "long rows")
    per_token = {T: statistics.median(times) / T for T, times in seconds.items()}
    return [
        {"T": T, "H": 4, "us_per_token": 1e6 * cost, "relative": cost / per_token[LONG[0]]}
        for T, cost in per_token.items()
    ]


def _print_rows(console: Console, rows: list[dict]) -> None:
    header = ["", "T", "H", "ours ms", "peer ms", "ratio", "matmul GFLOP/s", "share of it"]
    form = "{case}|{T}|{H}|{ours_ms:.0f}|{peer_ms:.0f}|{ratio:.1f}×|{matmul_gflops:.0f}|{matmul_share:.0%}"
    console.print(plain_table(header, [form.format(**row).split("|") for row in rows]))


def _print_channels(console: Console, rows: list[dict]) -> None:
    for row in rows:
        each = 1e3 * row["ms"] / row["T"] / row["H"]
        cost = f"{row['ms']:.0f} ms, {row['ratio']:.2f}× the {CASES[0]}, {each:.1f} µs per token and head"
        console.print(f"{row['case']}, T = {row['T']}, H = {row['H']}: {cost}")


def _print_linearity(console: Console, rows: list[dict]) -> None:
    for row in rows:
        cost = (
            f"{row['us_per_token']:.1f} µs per token, {row['relative']:.2f}× that of T = {LONG[0]}"
        )
        console.print(f"T = {row['T']:6d}, H = {row['H']}: {cost}")
