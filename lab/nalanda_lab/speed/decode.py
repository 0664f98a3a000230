"""Measures decoding time per token at growing contexts, beside transformers' Qwen3-Next and softmax."""

import json as jsonlib
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from nalanda_kernels import take_torch_path
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nalanda.common.errors import output_file
from nalanda.common.products import product_route
from nalanda.common.progress import track
from nalanda.inference.generate import cache_bytes
from nalanda.model import NalandaCache, NalandaConfig, NalandaForCausalLM
from nalanda.report.figures import REFERENCE, drawing, files, log_axis, look

LAYERS, WIDTH, HEADS, HEAD_DIM, INNER, VOCABULARY = 8, 512, 4, 128, 1536, 4096
CONTEXTS = (1024, 4096, 16384, 65536)
OURS = {
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "gated_deltanet, nala": {"mixer": "gated_deltanet", "feature_map": "nala"},
    "softmax": {"mixer": "softmax"},
}
PEER = "Qwen3-Next"
FLOOR = "matrix products alone"
SOFTMAX_INTERVAL = 8
"""Rounds per measurement of softmax, which takes up to a hundred times as long."""

Step = Callable[[], Any]
"""Decodes one token after a context, without changing the context."""


def bench_decode(
    *,
    threads: int = 2,
    rounds: int = 40,
    read: bool = False,
    json: str | Path | None = None,
    png: str | Path | None = None,
) -> dict:
    """Times one token at batch 1 in fp32 on the CPU after contexts of 1 k to 64 k tokens.

    Compares, at the same shape: ours with two maps, our softmax baseline, transformers' Qwen3-Next with
    linear attention in all layers, and a model's matrix products alone, the floor for any model of the shape.
    Each round measures each of them once at each context. Ours and softmax are whole models as `generate`
    calls them. Of the peer, only embedding, layers, norm and head are called, without its masks.

    Prints per context the median milliseconds, the median ratio of the peer's time to ours within a round,
    the growth from the shortest context, and the bytes of state.

    Args:
        threads: number of threads for torch.
        rounds: measurements of each model at each context; softmax gets an eighth of them.
        read: whether to read the longer contexts too, which takes minutes. By default recurrent models read
            1 k tokens and only count the others; softmax gets random keys and values.
        json, png: files for the figures and for a picture.
    """
    file = None if json is None else output_file(json, "--json")
    picture = None if png is None else output_file(png, "--png")
    console, before = Console(highlight=False, emoji=False), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        console.print(
            f"one token, batch 1, fp32, {LAYERS} layers × {WIDTH}, {HEADS} heads of {HEAD_DIM}, {threads} "
            f"threads, {platform.machine()}, torch {torch.__version__}, {product_route()} products, "
            f"transformers {version('transformers')}",
            soft_wrap=True,
        )
        with torch.inference_mode():
            rows = _measure(rounds, read)
    finally:
        torch.set_num_threads(before)
    _print_rows(console, rows)
    figures = {
        "machine": f"{platform.machine()}, {platform.processor() or platform.system()}",
        "threads": threads,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "shape": {
            "layers": LAYERS,
            "width": WIDTH,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "inner": INNER,
        },
        "rounds": rounds,
        "states_read": read,
        "rows": rows,
    }
    if file is not None:
        file.write_text(jsonlib.dumps(figures, indent=2) + "\n")
    if picture is not None:
        console.print(
            f"picture: {', '.join(map(str, draw_decode(figures, picture)))}", soft_wrap=True
        )
    return figures


def _measure(rounds: int, read: bool) -> list[dict]:
    torch.manual_seed(0)
    steps: dict[tuple[str, int], tuple[Step, int]] = {}
    for name, options in OURS.items():
        steps |= {(name, context): step for context, step in _ours(options, read).items()}
    with warnings.catch_warnings(
        action="ignore"
    ):  # from flash-linear-attention, where that is installed
        peer = _peer()
    for name, step in ((PEER, peer), (FLOOR, _products())):
        steps |= {(name, context): step for context in CONTEXTS}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for i in track(range(-1, rounds), "decoding"):
        for key, (step, _) in steps.items():
            if key[0] == "softmax" and i > 0 and i % SOFTMAX_INTERVAL:
                continue
            start = time.perf_counter()
            step()
            if i >= 0:  # the first round warms up
                seconds[key].append(time.perf_counter() - start)
    return [
        {
            "model": name,
            "context": context,
            "ms": 1e3 * statistics.median(times),
            "fastest_ms": 1e3 * min(times),
            "ratio_to_peer": _ratio(seconds[PEER, context], times),
            "growth": _ratio(times, seconds[name, CONTEXTS[0]]),
            "state_bytes": steps[name, context][1],
        }
        for (name, context), times in seconds.items()
    ]


def _ratio(a: list[float], b: list[float]) -> float:
    """The median of what measurements of the same round say: what else the machine does hits both."""
    shorter = min(len(a), len(b))
    a, b = (x if len(x) == shorter else x[::SOFTMAX_INTERVAL] for x in (a, b))
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _model(options: dict) -> NalandaForCausalLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_heads": HEADS, "head_dim": HEAD_DIM}
    return NalandaForCausalLM(
        NalandaConfig(vocab_size=VOCABULARY, **sizes, **heads, **options)
    ).eval()


def _products() -> tuple[Step, int]:
    layers = [m for m in _model(OURS["gated_deltanet"]).modules() if isinstance(m, torch.nn.Linear)]
    inputs = {layer.in_features: torch.randn(1, 1, layer.in_features) for layer in layers}
    return lambda: [F.linear(inputs[layer.in_features], layer.weight) for layer in layers], 0


def _ours(options: dict, read: bool) -> dict[int, tuple[Step, int]]:
    model, cache = _model(options), NalandaCache(LAYERS)
    tokens, found = torch.randint(VOCABULARY, (1, CONTEXTS[-1])), {}
    for context in CONTEXTS:
        missing = tokens[:, cache.seen_tokens : context]
        if context == CONTEXTS[0] or (read and options["mixer"] != "softmax"):
            for piece in missing.split(2048, 1):
                model.model(piece, past_key_values=cache)
        else:
            if options["mixer"] == "softmax":
                cache.states = [
                    {name: torch.randn(1, context, HEADS, HEAD_DIM) for name in ("k", "v")}
                    for _ in range(LAYERS)
                ]
            cache.seen(missing.shape[1], torch.tensor([missing.shape[1]]))
        found[context] = _step(model, cache.fork(), tokens[:, :1]), cache.nbytes
    return found


def _step(model: NalandaForCausalLM, cache: NalandaCache, token: Tensor) -> Step:
    return lambda: model(token, past_key_values=cache.fork())


def _peer() -> tuple[Step, int]:
    """Its state has one size and counts no tokens, so one cache stands for every context."""
    from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    take_torch_path(qwen3_next)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        layer_types=["linear_attention"] * LAYERS,
        mlp_only_layers=list(range(LAYERS)),
        num_experts=0,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
    )
    model = Qwen3NextForCausalLM(config).eval()
    cache = DynamicCache(config=config)

    def run(tokens: Tensor) -> Tensor:
        x = model.model.embed_tokens(tokens)
        for layer in model.model.layers:
            x = layer(x, position_embeddings=None, attention_mask=None, past_key_values=cache)
        return model.lm_head(model.model.norm(x))

    tokens = torch.randint(VOCABULARY, (1, CONTEXTS[0]))
    run(tokens)
    return lambda: run(tokens[:, :1]), cache_bytes(cache)


def _print_rows(console: Console, rows: list[dict]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for head in ("context", "ms", "peer / it", "growth", "state"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["model"] if row["context"] == CONTEXTS[0] else "",
            f"{row['context'] // 1024} k",
            f"{row['ms']:.1f}",
            f"{row['ratio_to_peer']:.2f}×",
            f"{row['growth']:.2f}×",
            f"{row['state_bytes'] / 2**20:.1f} MiB",
            end_section=row["context"] == CONTEXTS[-1],
        )
    console.print(table)
    console.print(f"medians; peer: {PEER}; growth: from {CONTEXTS[0] // 1024} k", style="dim")


def draw_decode(figures: dict[str, Any], file: Path) -> list[Path]:
    """Draws milliseconds a token against the context, a line for each model."""
    rows, rounds = figures["rows"], figures["rounds"]
    models, contexts = (
        sorted({row[name] for row in rows}, key=[row[name] for row in rows].index)
        for name in ("model", "context")
    )
    at_end = {row["model"]: row["ms"] for row in rows if row["context"] == contexts[-1]}
    least = min((name for name in at_end if name != FLOOR), key=lambda name: at_end[name])
    end, best = f"{contexts[-1] // 1024} k tokens", f"{least}, {at_end[least]:.1f} ms a token"
    shape, many = figures["shape"], -(-rounds // SOFTMAX_INTERVAL)
    caption = (
        f"Markers: medians over n = {rounds} rounds (softmax: {many}); bars: down to the fastest. Batch 1, "
        f"fp32, {figures['threads']} threads; {shape['layers']} layers × {shape['width']}, random weights of "
        "one seed (0)."
    )
    with drawing(file, f"Lowest median behind {end} on a CPU: {best}", caption, height=3) as [axes]:
        for i, name in enumerate(models):
            mine = [row for row in rows if row["model"] == name]
            ms = [row["ms"] for row in mine]
            bars = [row["ms"] - row["fastest_ms"] for row in mine]
            style = REFERENCE if name == FLOOR else look(i)
            axes.errorbar(
                [row["context"] for row in mine], ms, [bars, [0] * len(ms)], **style, label=name
            )
        log_axis(axes.xaxis, contexts, lambda n: f"{n / 1024:g} k")
        log_axis(axes.yaxis)
        axes.set(xlabel="context (tokens)", ylabel="time (ms a token)")
    return files(file)
