"""Measures decoding time per token at growing contexts, beside transformers' Qwen3-Next and softmax."""

import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nalanda_kernels import keep_fla_off_cpus
from rich.console import Console
from torch import Tensor
from torch.profiler import record_function

from nalanda.common.errors import output_file
from nalanda.inference.generate import cache_bytes
from nalanda.model import NalandaCache, NalandaConfig, NalandaForCausalLM
from nalanda.model.decoding import choose_decoder
from nalanda.model.ops import by_kernel
from nalanda.report.figures import REFERENCE, drawing, files, log_axis, look
from nalanda_lab.track import figures_file, median_ratio, on_cpu, plain_table, take_turns

LAYERS, WIDTH, HEADS, HEAD_DIM, INNER, VOCABULARY = 8, 512, 4, 128, 1536, 4096
CONTEXTS = (1024, 4096, 16384, 65536)
OURS = {
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "gated_deltanet, nala": {"mixer": "gated_deltanet", "feature_map": "nala"},
    "softmax": {"mixer": "softmax"},
}
PEER = "Qwen3-Next"
FLOOR = "matrix products alone"
TOKENS = 4
"""Tokens of a measurement, after one that is not timed."""
TIMED = "timed calls"

Step = Callable[[], float]
"""Decodes tokens after a context, without changing the context; returns seconds a token."""


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
        rounds: measurements of each model at each context.
        read: whether to read the longer contexts too, which takes minutes. By default recurrent models read
            1 k tokens and only count the others; softmax gets random keys and values.
        json, png: files for the figures and for a picture.
    """
    write = figures_file(json)
    picture = None if png is None else output_file(png, "--png")
    console = Console(highlight=False, emoji=False)
    shape = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "head_dim": HEAD_DIM, "inner": INNER}
    what = f"one token, batch 1, fp32, {LAYERS} layers × {WIDTH}, {HEADS} heads of {HEAD_DIM}"
    facts = {"shape": shape, "rounds": rounds, "states_read": read}
    with on_cpu(threads, what, **facts) as conditions, torch.inference_mode():
        rows = _measure(rounds, read)
    _print_rows(console, rows)
    figures = conditions | {"rows": rows}
    write(figures)
    if picture is not None:
        drawn = ", ".join(map(str, draw_decode(figures, picture)))
        console.print(f"picture: {drawn}", soft_wrap=True)
    return figures


def _measure(rounds: int, read: bool) -> list[dict]:
    torch.manual_seed(0)
    steps: dict[tuple[str, int], tuple[Step, int]] = {}
    for name, options in OURS.items():
        steps |= {(name, context): step for context, step in _ours(options, read).items()}

    # The peer's state has one size and counts no tokens, so one cache stands for every context.
    peer, cache = qwen3_next(_shape(), CONTEXTS[0])
    peer_step = partial(timed_calls, peer, TOKENS), cache_bytes(cache)
    products = products_of(_model(OURS["gated_deltanet"]))
    floor_step = partial(timed_calls, products, TOKENS), 0
    for name, step in ((PEER, peer_step), (FLOOR, floor_step)):
        steps |= {(name, context): step for context in CONTEXTS}

    seconds = take_turns({key: step for key, (step, _) in steps.items()}, rounds, "decoding")
    return [
        {
            "model": name,
            "context": context,
            "ms": 1e3 * statistics.median(times),
            "fastest_ms": 1e3 * min(times),
            "ratio_to_peer": median_ratio(seconds[PEER, context], times),
            "growth": median_ratio(times, seconds[name, CONTEXTS[0]]),
            "state_bytes": steps[name, context][1],
        }
        for (name, context), times in seconds.items()
    ]


def _shape() -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_heads": HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "vocab_size": VOCABULARY,
    }


def _model(options: dict) -> NalandaForCausalLM:
    return NalandaForCausalLM(NalandaConfig(**_shape(), **options)).eval()


def products_of(model: NalandaForCausalLM) -> Callable[[], None]:
    """A model's matrix products alone, for one token: one program where kernels serve it."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weight = layers[-1].weight
    program = by_kernel("token", "auto", weight, 1, model.dtype, weight.dtype)
    if program is not None:
        for layer in layers:
            program.linear(program.array("x", layer.in_features).zero_(), layer, "y")
        program.finish()
        program.take(1)
        # A program has the weights' addresses. The layers own the weights.
        return lambda: program.run(0, len(layers))

    inputs = {
        layer.in_features: torch.zeros(1, 1, layer.in_features, dtype=model.dtype)
        for layer in layers
    }

    def products() -> None:
        with torch.inference_mode():
            for layer in layers:
                layer(inputs[layer.in_features])

    return products


def _ours(options: dict, read: bool) -> dict[int, tuple[Step, int]]:
    model, cache = _model(options), NalandaCache(LAYERS)
    tokens, steps = torch.randint(VOCABULARY, (1, CONTEXTS[-1])), {}
    for context in CONTEXTS:
        missing = tokens[:, cache.seen_tokens : context]
        if context == CONTEXTS[0] or (read and options["mixer"] != "softmax"):
            for piece in missing.split(2048, 1):
                model.model(piece, past_key_values=cache)
        else:
            if options["mixer"] == "softmax":
                cache.states = random_keys(context, LAYERS, HEADS, HEAD_DIM)
            cache.seen(missing.shape[1], torch.tensor([missing.shape[1]]))
        steps[context] = partial(timed_tokens, model, cache.fork(), TOKENS), cache.nbytes
    return steps


def random_keys(context: int, layers: int, heads: int, head_dim: int) -> list[dict[str, Tensor]]:
    """States of softmax attention behind `context` tokens, which nobody has read."""
    shape = (1, context, heads, head_dim)
    return [{"k": torch.randn(shape), "v": torch.randn(shape)} for _ in range(layers)]


def timed_tokens(
    model: NalandaForCausalLM, cache: NalandaCache, tokens: int, as_generate: bool = True
) -> float:
    """Seconds a token of all texts, in a fork of the cache. One token before, untimed, gives the fork its memory.

    as_generate: in the context that `generate` opens, where a token is one program.
    """
    token, fork = torch.zeros(cache.batch_size, 1, dtype=torch.int64), cache.fork()
    with torch.inference_mode(), choose_decoder(model) if as_generate else nullcontext():
        return timed_calls(lambda: model(token, past_key_values=fork), tokens)


def timed_calls(call: Callable[[], object], calls: int) -> float:
    """Seconds a call, after one that is not timed. A profile shows the others inside of `TIMED`."""
    call()
    with record_function(TIMED):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls


def qwen3_next(shape: dict[str, Any], context: int) -> tuple[Callable[[], Tensor], Any]:
    """A token of transformers' Qwen3-Next with linear attention in all layers, and its cache.

    Embedding, layers, norm and head are called, without the masks of the whole model.
    """
    with warnings.catch_warnings(action="ignore"):  # from flash-linear-attention, if installed
        from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM
        from transformers.models.qwen3_next import modeling_qwen3_next

    keep_fla_off_cpus(modeling_qwen3_next)
    layers, heads, head_dim = shape["num_hidden_layers"], shape["num_heads"], shape["head_dim"]
    config = Qwen3NextConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=layers,
        layer_types=["linear_attention"] * layers,
        mlp_only_layers=list(range(layers)),
        num_experts=0,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
    )
    model = Qwen3NextForCausalLM(config).eval()
    cache = DynamicCache(config=config)

    def run(tokens: Tensor) -> Tensor:
        x = model.model.embed_tokens(tokens)
        for layer in model.model.layers:
            x = layer(x, position_embeddings=None, attention_mask=None, past_key_values=cache)
        return model.lm_head(model.model.norm(x))

    tokens = torch.randint(shape["vocab_size"], (1, context))
    with torch.inference_mode():
        run(tokens)
    return torch.inference_mode()(lambda: run(tokens[:, :1])), cache


def _print_rows(console: Console, rows: list[dict]) -> None:
    form = "{model}|{k} k|{ms:.1f}|{ratio_to_peer:.2f}×|{growth:.2f}×|{mib:.1f} MiB"
    lines = []
    for row in rows:
        sizes = {"k": row["context"] // 1024, "mib": row["state_bytes"] / 2**20}
        lines.append(form.format(**row, **sizes).split("|"))
    console.print(plain_table(["", "context", "ms", "peer / it", "growth", "state"], lines))
    console.print(f"medians; peer: {PEER}; growth: from {CONTEXTS[0] // 1024} k", style="dim")


def draw_decode(figures: dict[str, Any], file: Path) -> list[Path]:
    """Draws milliseconds a token against the context, a line for each model."""
    rows = figures["rows"]
    models, contexts = (
        sorted({row[name] for row in rows}, key=[row[name] for row in rows].index)
        for name in ("model", "context")
    )
    at_end = {row["model"]: row["ms"] for row in rows if row["context"] == contexts[-1]}
    least = min((name for name in at_end if name != FLOOR), key=lambda name: at_end[name])
    end, best = f"{contexts[-1] // 1024} k tokens", f"{least}, {at_end[least]:.1f} ms a token"
    shape = figures["shape"]
    caption = (
        f"Markers: medians over n = {figures['rounds']} rounds; bars: to the fastest. Batch 1, "
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
