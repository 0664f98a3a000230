"""Estimates a recipe's parameters, FLOPs, state, memory, tokens and time without allocating the model."""

import copy
from typing import Any

import torch
from rich.table import Table

from nalanda.common.errors import InputError
from nalanda.common.number_formats import TORCH_NAMES
from nalanda.common.terminal import plain_console
from nalanda.common.text import size, suggest
from nalanda.config.load import load_config
from nalanda.config.model import in_one_line, is_encoder
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.report.runs import layers
from nalanda.train.estimate import (
    exchanged_bytes,
    meta_model,
    run_time,
    stage_figures,
    tensor_parallel_share,
    time_range,
)
from nalanda.train.flops import PEAK_FLOPS, flops_per_token, known_peak, peak_flops
from nalanda.train.needs import needs_of


def info(
    recipe: str,
    overrides: list[str],
    processes: int | None = None,
    *,
    memory: bool = True,
    device: str | None = None,
    tp: int | None = None,
) -> dict[str, Any]:
    """The figures that `nalanda info` prints for a recipe, as plain numbers.

    processes: of the launch; by default those of one context.
    memory: whether to count activations and what contexts exchange, and to run a layer of each kind, which
        takes seconds.
    device: device of each process, for the time: a GPU's name, "here" or "cpu" (both are measured if no data
        sheet is known).
    tp: degree of tensor parallelism, for what each of its processes holds.

    Raises InputError for a recipe that cannot be trained, or an unknown device.
    """
    config = load_config(recipe, overrides)
    model: Any = meta_model(config)
    train, seq_len = config.train, config.data.seq_len
    processes = processes or train.context_parallel
    accumulation = config.accumulation(processes)

    model_config: Any = model.config
    ours = isinstance(model_config, NalandaConfig)
    stateful = ours and not is_encoder(model_config)
    parameters = model.num_parameters()
    embeddings = {  # tied ones count once
        id(m.weight): m.weight.numel()
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m
    }

    on_cpu = device == "cpu" or (device == "here" and not torch.cuda.is_available())
    activations_of = ("cpu" if on_cpu else "cuda") if memory else None
    needs = needs_of(config, model, processes, device=activations_of)
    files = needs.files
    exchanged = None
    if ours and memory:
        # Each micro-batch of a step exchanges as much.
        exchanged = accumulation * exchanged_bytes(config, model_config)

    share = None
    if tp is not None:
        if not ours:
            raise InputError(
                f"--tp: {model_config.model_type} is no model of Nalanda; leave it out"
            )
        with in_one_line(f"--tp {tp}"):
            share = tensor_parallel_share(model, seq_len, tp)

    flops, flops_source = flops_per_token(model, seq_len)
    stages = [stage_figures(stage, model) for stage in config.in_stages()]
    training_flops = sum(x["tokens"] * x["training_flops_per_token"] for x in stages)
    peak, peak_source = peak_of(device, train.precision) if device else (None, None)

    return {
        "recipe": recipe,
        "model": model_config.model_type,
        "mixer": getattr(model_config, "mixer", None),
        "feature_map": getattr(model_config, "feature_map", None),
        "parameters": parameters,
        "parameters_without_embeddings": parameters - sum(embeddings.values()),
        # of training and of a generated token, on this machine
        "executors": executors_here(model_config, train.precision) if stateful and memory else None,
        "training_flops_per_token": flops,
        "flops_source": flops_source,
        # bytes: of the state, and on each device
        "state_bytes_per_sequence": model_config.state_bytes(seq_len) if stateful else None,
        "state_grows": stateful
        and model_config.state_bytes(2 * seq_len) > model_config.state_bytes(seq_len),
        "weights_and_optimizer_bytes": needs.held,
        "teacher_bytes": needs.teacher,  # of these
        "activation_bytes": needs.activations,
        "memory_bytes_per_device": None if needs.activations is None else needs.device,
        # for engines that read the model's plan
        "tensor_parallel_degrees": model_config.tensor_parallel_degrees if ours else None,
        "tensor_parallel": share,
        # on the disk
        "checkpoint_bytes": files.checkpoint,
        "checkpoints": files.checkpoints,
        "final_bytes": files.final,
        "disk_bytes": files.total,
        # the plan of the run
        "seq_len": seq_len,
        "rows_per_step": train.tokens_per_step // seq_len,
        "accumulation": accumulation,
        "compile": train.compile,
        "processes": processes,
        "context_parallel": train.context_parallel,
        "context_bytes_per_step": exchanged,
        "steps": train.steps,
        "stages": stages[1:],
        "tokens": sum(x["tokens"] for x in stages),
        "training_flops": training_flops,
        "peak_flops_per_device": peak,
        "peak_source": peak_source,
        "seconds": list(run_time(training_flops, peak * processes)) if peak else None,
    }


def executors_here(model_config: NalandaConfig, precision: str) -> dict[str, str]:
    """The executors on this machine by mixer, and why they are not faster ones.

    Runs a model with one layer of each mixer, and with a small GLU and vocabulary.
    """
    on_gpu = torch.cuda.is_available()
    if precision == "auto":
        precision = "bf16" if on_gpu else "fp32"
    small = copy.deepcopy(model_config)
    small.mixer = list(dict.fromkeys(model_config.layer_mixers))
    small.num_hidden_layers = len(small.mixer)
    small.vocab_size = small.intermediate_size = 64
    with torch.random.fork_rng():
        model: Any = NalandaForCausalLM(small).eval()
    dtype = getattr(torch, TORCH_NAMES[precision])
    return {row.mixer: row.text for row in model.to("cuda" if on_gpu else "cpu", dtype).executors()}


def peak_of(device: str, precision: str) -> tuple[float, str]:
    """Peak FLOP/s of "here", "cpu" or a GPU by name, and the source of the figure."""
    if device in ("here", "cpu"):
        gpu = device == "here" and torch.cuda.is_available()
        return peak_flops(torch.device("cuda" if gpu else "cpu"), precision)
    if peak := known_peak(device, precision):
        return peak
    raise InputError(f"--device: no data sheet of {device}{suggest(device, [*PEAK_FLOPS, 'cpu'])}")


def print_info(figures: dict[str, Any]) -> None:
    """Prints the figures of `info` as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    f = figures

    # The model.
    mixer = " + ".join(filter(None, [layers(f["mixer"] or ""), f["feature_map"]]))
    table.add_row("model", f["model"], mixer)
    table.add_row("parameters", f"{f['parameters'] / 1e6:,.1f} M", f"{f['parameters']:,}")
    inner = f"{f['parameters_without_embeddings'] / 1e6:,.1f} M"
    table.add_row("  without embeddings", inner, "neither embedding nor head")
    for name, text in (f["executors"] or {}).items():
        table.add_row("  layers here", name, text)
    per_token = f"{f['training_flops_per_token'] / 1e9:,.3f} G"
    table.add_row("training FLOPs per token", per_token, f["flops_source"])
    if f["state_bytes_per_sequence"] is not None:
        note = "of any length; bf16 model"
        if f["state_grows"]:
            note = f"after {f['seq_len']} tokens, and growing"
        table.add_row("state per sequence", size(f["state_bytes_per_sequence"]), note)
    if f["tensor_parallel_degrees"]:
        degrees = ", ".join(map(str, f["tensor_parallel_degrees"]))
        table.add_row("tensor parallelism", degrees, "degrees, for engines that read the plan")
    if share := f["tensor_parallel"]:
        table.add_row(
            "  parameters each", f"{share['parameters'] / 1e6:,.1f} M", f"{share['parameters']:,}"
        )
        if share["state_bytes"] is not None:
            table.add_row("  state each", size(share["state_bytes"]), "of a sequence; bf16 model")
        table.add_row("  whole in each", "", ", ".join(share["whole"]))

    # Memory of a process, and its disk.
    held = size(f["weights_and_optimizer_bytes"])
    table.add_row(
        "weights and optimizer", held, "fp32 weights, gradients, moments; one process's share"
    )
    if f["teacher_bytes"]:
        table.add_row("  of these the teacher", size(f["teacher_bytes"]))
    if f["activation_bytes"] is not None:
        table.add_row(
            "activations", size(f["activation_bytes"]), "of a micro-batch, by the torch path"
        )
        table.add_row(
            "memory per device", size(f["memory_bytes_per_device"]), "the two lines above"
        )
    each = f"{f['checkpoints']} of {size(f['checkpoint_bytes'])}, final/ {size(f['final_bytes'])}"
    table.add_row("disk", size(f["disk_bytes"]), f"at most; checkpoints {each}")
    if f["context_parallel"] > 1:
        note = f"sent by a device and step, at most; each row on {f['context_parallel']} processes"
        table.add_row("context parallelism", size(f["context_bytes_per_step"] or 0), note)

    # The training.
    rows = f"{f['rows_per_step']} rows each, {f['accumulation']} micro-batches on {f['processes']} process(es)"
    table.add_row("steps", f"{f['steps']:,}", rows)
    for stage in f["stages"]:
        table.add_row(
            f"  stage {stage['name']}",
            f"after {stage['after_step']:,}",
            f"{stage['steps']:,} steps; {stage['changes']}",
        )
    compiled = {True: "yes", False: "no"}.get(f["compile"], "on GPUs")
    table.add_row("compiled blocks", compiled, "train.compile; the first step takes longer")
    table.add_row("tokens", f"{f['tokens'] / 1e9:,.3f} B", f"{f['tokens']:,}")
    table.add_row("training FLOPs", f"{f['training_flops']:.3g}", "")
    if f["seconds"]:
        each = f"{f['peak_flops_per_device'] / 1e12:.3g} TFLOP/s ({f['peak_source']})"
        table.add_row("time", "", f"{time_range(f['seconds'])} of {f['processes']} × {each}")
    plain_console().print(table)
