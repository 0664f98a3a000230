"""Measures the speed of the ops beside a peer's, after checking that their results agree."""

import inspect
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from nalanda.common.allocator import keep_freed_memory
from nalanda.common.errors import InputError
from nalanda.model import ops
from nalanda_lab.track import figures_file, median_ratio, on_cpu, plain_table, take_turns

CASES = ("gated delta rule", "delta rule", "linear attention")
CHANNEL_CASES = ("KDA", "Gated DeltaNet 2")
"""Delta rules with gates by channel; `speed cpu` times them beside the gated delta rule."""
HEAD_DIM = 128
"""K and V."""
SHAPES = ((2048, 8), (8192, 4))
"""(T, H) of the comparison with the peer."""
LONG = (8192, 16384, 32768, 65536)
"""T of the linearity measurement, with 4 heads."""
TOLERANCE = 1e-4
"""Largest difference between two fp32 results, relative to the largest entry."""

Function = Callable[..., torch.Tensor]


def bench_ops(*, threads: int = 2, json: str | Path | None = None, repeats: int = 7) -> dict:
    """Times `delta_rule` and `linear_attention`, forward and backward in fp32 on the CPU.

    The peers are transformers' torch paths: Qwen3-Next's gated delta rule and MiniMax's lightning attention.
    Prints the agreement of outputs and gradients, then per shape the median milliseconds of both (runs
    alternate), the median ratio of neighbouring runs, and our share of the machine's matrix-product rate
    (three times the forward FLOPs, without recomputation). Last, the time per token up to T = 65 536.

    Args:
        threads: number of threads for torch.
        json: file for the figures.
        repeats: timed runs per side and shape, after one warm-up.

    Raises:
        InputError: ours and the peer disagree; nothing is timed.
    """
    write, console = figures_file(json), Console(emoji=False)
    what = (
        f"forward + backward, fp32, B = 1, K = V = {HEAD_DIM}; peers: torch_chunk_gated_delta_rule (Qwen3-Next) "
        "and MiniMaxLightningAttention of transformers"
    )
    with on_cpu(threads, what, keep_freed_memory) as conditions:
        _print_agreement(console)
        rows = [_compare(case, T, H, repeats) for case in CASES for T, H in SHAPES]
        _print_rows(console, rows)
        linearity = _linearity(repeats)
        _print_linearity(console, linearity)
    figures = conditions | {"shapes": rows, "linearity": linearity}
    write(figures)
    return figures


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


def _product(size: int = 1536) -> float:
    """Seconds a FLOP of one large fp32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    start = time.perf_counter()
    torch.mm(a, b)
    return (time.perf_counter() - start) / (2 * size**3)


def _compare(case: str, T: int, H: int, repeats: int) -> dict:
    inputs, d_o = _inputs(case, T, H)
    sides: dict[str, Callable[[], float]] = {"product": _product}
    for name, function in (("ours", _ours(case)), ("peer", _peer(case, H))):
        sides[name] = partial(_seconds, function, inputs, d_o)
    seconds = take_turns(sides, repeats, f"{case}, T = {T}")
    ours, peer, product = (statistics.median(seconds[x]) for x in ("ours", "peer", "product"))
    count = ops.linear_attention_flops if case == "linear attention" else ops.delta_rule_flops
    return {
        "case": case,
        "T": T,
        "H": H,
        "ours_ms": 1e3 * ours,
        "peer_ms": 1e3 * peer,
        "ratio": median_ratio(seconds["peer"], seconds["ours"]),
        "matmul_gflops": 1e-9 / product,
        "matmul_share": 3 * T * count(H, HEAD_DIM, HEAD_DIM) * product / ours,
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


def _print_linearity(console: Console, rows: list[dict]) -> None:
    for row in rows:
        cost = (
            f"{row['us_per_token']:.1f} µs per token, {row['relative']:.2f}× that of T = {LONG[0]}"
        )
        console.print(f"T = {row['T']:6d}, H = {row['H']}: {cost}")
