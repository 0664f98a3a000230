"""What a recipe comes to, before anything is allocated: parameters, FLOPs, state, memory, tokens."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nalanda import NalandaConfig
from nalanda.common.errors import InputError
from nalanda.config.load import RunConfig, load_config, nearest
from nalanda.data.offline import offline
from nalanda.data.tokenizer import build_tokenizer
from nalanda.model.layers import Sequences
from nalanda.model.modeling import Block
from nalanda.train import parallel
from nalanda.train.log import (
    PEAK_FLOPS,
    UTILISATION,
    duration,
    flops_per_token,
    known_peak,
    peak_flops,
    run_time,
    time_left,
)
from nalanda.train.loop import build_model_config, config_source
from nalanda.train.memory import parameters as count_parameters
from nalanda.train.optim import parameter_groups


def info(
    recipe: str,
    overrides: list[str],
    processes: int = 1,
    *,
    memory: bool = True,
    device: str | None = None,
) -> dict[str, Any]:
    """The figures of a recipe as `nalanda info` prints them; bytes, FLOPs, tokens and seconds are plain
    numbers.

    memory: whether activations are counted, which takes a second.
    device: "here", "cpu" (both are measured if no data sheet is known) or a GPU's name, each process's; for
        an estimate of the time.
    Raises InputError for a recipe that cannot be trained, or an unknown device.
    """
    config = offline(load_config(recipe, overrides))
    accumulation = config.accumulation(processes)
    keys = config.model
    if "vocab_size" not in keys and isinstance(config_source(keys), type):
        keys["vocab_size"] = 64 * math.ceil(vocabulary(config) / 64)  # as training rounds it
    model_config = build_model_config(config)
    count_parameters(model_config)  # refuses sizes that no tensor may have
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    outside = {
        id(m.weight): m.weight.numel()
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m
    }
    train, seq_len = config.train, config.data.seq_len
    flops, flops_source = flops_per_token(model, seq_len)
    ours = isinstance(model_config, NalandaConfig)
    activations = None
    if ours and memory:
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        activations = activation_bytes(
            model_config, train.micro_batch_size, seq_len, dtype, train.gradient_checkpointing
        )
    weights = held_bytes(model, config, processes, shards(config, processes))
    training_flops = flops * train.steps * train.tokens_per_step
    peak, peak_source = peak_of(device, train.precision) if device else (None, None)
    return {
        "recipe": recipe,
        "model": model_config.model_type,
        "mixer": getattr(model_config, "mixer", None),
        "feature_map": getattr(model_config, "feature_map", None),
        "parameters": parameters,
        "parameters_without_embeddings": parameters - sum(outside.values()),
        "training_flops_per_token": flops,
        "flops_source": flops_source,
        "state_bytes_per_sequence": model_config.state_bytes(seq_len) if ours else None,
        "state_grows": ours and model_config.state_bytes(2 * seq_len) > model_config.state_bytes(seq_len),
        "weights_and_optimizer_bytes": weights,
        "activation_bytes": activations,
        "memory_bytes_per_device": None if activations is None else weights + activations,
        "seq_len": seq_len,
        "rows_per_step": train.tokens_per_step // seq_len,
        "accumulation": accumulation,
        "processes": processes,
        "steps": train.steps,
        "tokens": train.steps * train.tokens_per_step,
        "training_flops": training_flops,
        "peak_flops_per_device": peak,
        "peak_source": peak_source,
        "seconds": list(run_time(training_flops, peak * processes)) if peak else None,
    }


def peak_of(device: str, precision: str) -> tuple[float, str]:
    """The peak in FLOPs a second of "here", "cpu" or a GPU by name, and where it comes from."""
    if device in ("here", "cpu"):
        gpu = device == "here" and torch.cuda.is_available()
        return peak_flops(torch.device("cuda" if gpu else "cpu"), precision)
    if known := known_peak(device, precision):
        return known
    raise InputError(f"--device: no data sheet of {device}{nearest(device, [*PEAK_FLOPS, 'cpu'])}")


def shards(config: RunConfig, processes: int) -> int:
    """Among how many processes one copy of the weights is shared, as far as the recipe says."""
    kind = config.train.parallel
    return {"fsdp": processes, "hybrid": config.train.shard_size or processes}.get(kind, 1)


def held_bytes(model: nn.Module, config: RunConfig, processes: int, shards: int) -> int:
    """Bytes of fp32 weights, gradients and moments that one device holds; under DDP its buckets of gradients
    as well, under FSDP2 what is gathered at a time: the root, two blocks, and a block's gradient."""
    groups = parameter_groups(model, config.optim)
    total = sum(p.numel() * (12 if g["kind"] == "muon" else 16) for g in groups for p in g["params"])
    parameters = sum(p.numel() for p in model.parameters())
    if shards == 1:
        return total + (4 * parameters if processes > 1 else 0)
    blocks = [sum(p.numel() for p in block.parameters()) for block in parallel.units(model)]
    return total // shards + 4 * (parameters - sum(blocks)) + 3 * 4 * max(blocks, default=0)


def estimate(config: RunConfig, facts: dict, model: nn.Module) -> str:
    """Time and memory of a run whose model is there, in a line. facts: as run.json has them."""
    split = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    count = 1
    if split is not None:
        sizes = zip(split.placements, split.device_mesh.shape, strict=True)
        count = math.prod(n for placement, n in sizes if placement.is_shard())
    held = held_bytes(model, config, facts["processes"], count)
    memory = f"{size(held)} a device for weights, gradients and moments"
    if isinstance(model.config, NalandaConfig):
        train = config.train
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        kept = activation_bytes(
            model.config, train.micro_batch_size, config.data.seq_len, dtype, train.gradient_checkpointing
        )
        memory += f", at most {size(kept)} for activations"
    return f"{time_range(time_left(config, facts))}; {memory}"


def time_range(seconds: Sequence[float]) -> str:
    """`3 h 05 min to 6 h 10 min, assuming 20 to 40 % of the peak`."""
    low, high = (round(100 * share) for share in UTILISATION)
    shortest, longest = map(duration, seconds)
    return f"{shortest} to {longest}, assuming {low} to {high} % of the peak"


def vocabulary(config: RunConfig) -> int:
    """Tokens of the recipe's tokenizer. One that is not trained yet has the size that it is told to have;
    where it is told none, the words of the training documents are counted."""
    trained = Path(config.output_dir) / "tokenizer"
    if config.tokenizer.train and config.tokenizer.vocab_size:
        return config.tokenizer.vocab_size
    with tempfile.TemporaryDirectory() as unused:  # a folder that only `nalanda train` may begin
        directory = trained if trained.exists() else Path(unused) / "tokenizer"
        return len(build_tokenizer(config.tokenizer, config.data, directory))


def activation_bytes(
    config: NalandaConfig, rows: int, seq_len: int, dtype: torch.dtype, checkpointing: bool
) -> int:
    """Bytes that one micro-batch keeps for the backward pass, and the loss's block of logits.

    One block of each kind is run on tensors without memory while autograd's saved tensors are added up;
    kernels that keep less than the torch path make this an upper bound.
    """
    blocks = {}
    for name in dict.fromkeys(config.layer_mixers):
        # A run asks before its first step: its random state must not notice.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            block = Block(config, config.layer_mixers.index(name)).to(dtype)
            x = torch.empty(rows, seq_len, config.hidden_size, dtype=dtype, requires_grad=True)
        blocks[name] = saved_bytes(block, x)
    stream = rows * seq_len * config.hidden_size * dtype.itemsize
    if checkpointing:
        kept = stream * config.num_hidden_layers + max(blocks.values())
    else:
        kept = sum(blocks[name] for name in config.layer_mixers)
    logits = 2 * 4 * 2**26  # the loss's block of logits and its gradient, fp32
    return kept + 3 * stream + logits


class _FusedAttention(torch.autograd.Function):
    """What fused attention keeps: its inputs, its output and a row's log-sum-exp. Tensors without memory
    would take the form that keeps T × T probabilities."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, o, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return o


def saved_bytes(block: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages that `block(x)` keeps for its backward pass, its parameters left out."""
    own = {p.untyped_storage()._cdata for p in block.parameters()}
    held: list[torch.Tensor] = []  # alive until they are counted: only then is a storage's address its own

    def keep(t: torch.Tensor) -> torch.Tensor:
        held.append(t)
        return t

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return _FusedAttention.apply(q, k, v)

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with hooks, mock.patch.object(F, "scaled_dot_product_attention", attend):
        _ = block(x, Sequences())
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(count for address, count in storages.items() if address not in own)


def show(figures: dict[str, Any], console: Console | None = None) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    f = figures
    per_step = f["rows_per_step"]
    table.add_row("model", f["model"], " + ".join(x for x in (layers(f), f["feature_map"]) if x))
    table.add_row("parameters", f"{f['parameters'] / 1e6:,.1f} M", f"{f['parameters']:,}")
    table.add_row(
        "  without embeddings",
        f"{f['parameters_without_embeddings'] / 1e6:,.1f} M",
        "neither embedding nor head",
    )
    table.add_row(
        "training FLOPs a token", f"{f['training_flops_per_token'] / 1e9:,.3f} G", f["flops_source"]
    )
    if f["state_bytes_per_sequence"] is not None:
        table.add_row(
            "state a sequence",
            size(f["state_bytes_per_sequence"]),
            f"after {f['seq_len']} tokens, and growing" if f["state_grows"] else "of any length; bf16 model",
        )
    table.add_row(
        "weights and optimizer",
        size(f["weights_and_optimizer_bytes"]),
        "fp32 weights, gradients, moments; what the processes share",
    )
    if f["activation_bytes"] is not None:
        table.add_row(
            "activations",
            size(f["activation_bytes"]),
            "a micro-batch's; kernels keep less",
        )
        table.add_row("memory a device", size(f["memory_bytes_per_device"]), "the two together")
    table.add_row(
        "steps",
        f"{f['steps']:,}",
        f"{per_step} rows each, {f['accumulation']} micro-batches on {f['processes']} process(es)",
    )
    table.add_row("tokens", f"{f['tokens'] / 1e9:,.3f} B", f"{f['tokens']:,}")
    table.add_row("training FLOPs", f"{f['training_flops']:.3g}", "")
    if f["seconds"]:
        each = f"{f['peak_flops_per_device'] / 1e12:.3g} TFLOP/s ({f['peak_source']})"
        table.add_row("time", "", f"{time_range(f['seconds'])} of {f['processes']} × {each}")
    (console or Console()).print(table)


def layers(figures: dict[str, Any]) -> str:
    """The mixers of a recipe: `gla`, or `3 × diag_attention, 3 × norm_attention`; "" without one."""
    mixer = figures["mixer"] or ""
    names = [mixer] if isinstance(mixer, str) else mixer
    return ", ".join(f"{names.count(m)} × {m}" if len(names) > 1 else m for m in dict.fromkeys(names))


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    raise AssertionError
