"""Rehearses a run: a few steps at its true shape, in a folder that is removed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import psutil
import torch
from rich.table import Table

from nalanda.common.errors import InputError, NothingTrained
from nalanda.common.files import missing_folders, remove_new_folders
from nalanda.common.processes import peak_resident
from nalanda.common.progress import first_process
from nalanda.common.terminal import plain_console
from nalanda.common.text import duration, size
from nalanda.config.schema import RunConfig, Stage
from nalanda.report.verify import verify
from nalanda.storage.remote import is_store, staging
from nalanda.train.checkpoint_dir import checkpoint_folders, step_of
from nalanda.train.estimate import meta_model, time_left
from nalanda.train.log import read_facts, read_metrics
from nalanda.train.loop import train
from nalanda.train.needs import check_disk, needs_of
from nalanda.train.run_dir import refuse_other_files, refuse_other_recipe

STEPS = 3
"""Steps of a rehearsal, of each stage. The first allocates and compiles, so it is not timed."""


def rehearse(config: RunConfig) -> dict[str, Any]:
    """Trains `STEPS` steps of each stage of a recipe at its true shape, and measures their time and memory.

    The data and the tokenizer are opened, a batch is validated, and a checkpoint is written and read back.
    Every process of a launch calls it. All files lie beside `output_dir`, and are removed at the end, also
    after an error or an interrupt.

    Returns:
        Seconds of the run and bytes of a device, estimated and measured. {} on all but the first process.

    Raises:
        InputError, NothingTrained, SystemExit: as `train`.
    """
    config.check()
    local = staging(config.output_dir)
    if not is_store(config.output_dir):
        refuse_other_files(local)
        refuse_other_recipe(local, config)

    # All processes of a launch have the same port, and no other launch of this machine has it.
    launch = os.environ.get("MASTER_PORT", os.getpid())
    folder = local.with_name(f".{local.name}.rehearsal-{launch}")
    before = psutil.Process().memory_info().rss
    with removed_at_end(folder):
        # fp16 may need more steps than these to find its loss scale.
        finds_scale = config.train.precision == "fp16"
        with contextlib.suppress(*[NothingTrained] * finds_scale):
            train(shortened(config, folder))
        return measured(config, folder, before) if first_process() else {}


def shortened(config: RunConfig, folder: Path) -> RunConfig:
    """The recipe of a rehearsal in `folder`: with few steps, a batch of validation, and one checkpoint."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    rows = processes * (config.validation.batch_size or config.train.micro_batch_size)
    every = STEPS if config.validation.every != 0 else 0
    stages = {}
    for number, (name, stage) in enumerate(config.stages.items(), 1):
        schedule = {key: value for key, value in stage.schedule.items() if key != "warmup_steps"}
        stages[name] = replace(stage, after_step=number * STEPS, schedule=schedule)
    return replace(
        config,
        output_dir=str(folder),
        train=replace(config.train, steps=(1 + len(stages)) * STEPS, resume=None),
        schedule=replace(config.schedule, warmup_steps=min(STEPS, config.schedule.warmup_steps)),
        stages=stages,
        data=replace(config.data, max_validation_rows=min(rows, config.data.max_validation_rows)),
        validation=replace(config.validation, every=every),
        checkpoint=replace(config.checkpoint, every=0),
        log=replace(config.log, every=1, tensorboard=False, tracker="none"),
    )


@contextlib.contextmanager
def removed_at_end(folder: Path) -> Iterator[None]:
    """Removes `folder` at the end, and the folders around it that did not exist. The first process does."""
    if not first_process():
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)  # of a launch that was killed
    missing = missing_folders(folder)
    try:
        yield
    finally:
        remove_new_folders(missing)


def measured(config: RunConfig, folder: Path, before: int) -> dict[str, Any]:
    """The figures of `rehearse`, from the folder of the rehearsal. before: bytes of this process before it.

    Raises `InputError` if the checkpoint cannot be read back, `DiskFull` if the whole run lacks room.
    """
    for verdict in verify(folder):
        if not verdict.good:
            raise InputError(f"{folder}: the checkpoint cannot be read back: {verdict}")
    [*_, checkpoint] = checkpoint_folders(folder / "checkpoints")

    facts = read_facts(folder) | {"step": 0}
    # With one process `parallel` is None, and counts for nothing.
    launched = replace(config, train=replace(config.train, parallel=facts["parallel"]))
    launch = facts["processes"], facts["device"]
    # Of the checkpoints that the run has already.
    saved = map(step_of, checkpoint_folders(staging(config.output_dir) / "checkpoints"))
    needs = needs_of(launched, meta_model(config), *launch, [*saved])
    files = needs.files
    # The run finds the room that these files take now.
    check_disk(files._replace(more=files.more - folder_bytes(folder)), folder.parent)

    stages = config.in_stages()
    return {
        "steps": config.train.steps,
        "estimated_seconds": list(time_left(stages, facts)),
        "seconds": sum(measured_seconds(folder, number, x) for number, x in enumerate(stages)),
        "estimated_bytes": needs.device,
        "bytes": peak_bytes(facts["device"], before),
        "estimated_checkpoint_bytes": files.checkpoint,
        "checkpoint_bytes": folder_bytes(checkpoint),
        "disk_bytes": files.total,
        "free_bytes": shutil.disk_usage(folder).free,
    }


def measured_seconds(folder: Path, number: int, stage: Stage) -> float:
    """Seconds of a stage, by the rate of its steps in the rehearsal. number: of the stage, from 0."""
    steps = range(number * STEPS + 1, (number + 1) * STEPS + 1)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    rates = [line["tokens_per_second"] for line in lines if line["step"] in steps]
    # Of the rates of equal steps: the seconds of a step are then the mean of theirs.
    return stage.tokens_after() / harmonic_mean(rates[1:] or rates or [float("nan")])


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


def peak_bytes(device: str, before: int) -> int | None:
    """The most memory that this process held at a time: of its GPU, or of the host beyond `before`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = peak_resident()
    return None if peak is None else peak - before


def print_rehearsal(figures: dict[str, Any]) -> None:
    """Prints the figures of `rehearse` as a table; nothing where there are none."""
    if not figures:
        return
    f, steps = figures, figures["steps"]
    table = Table("", "estimated", "measured", box=None, pad_edge=False)

    each = " to ".join(f"{seconds / steps:.3g}" for seconds in f["estimated_seconds"])
    table.add_row("seconds a step", each, f"{f['seconds'] / steps:.3g}")
    estimated = " to ".join(map(duration, f["estimated_seconds"]))
    table.add_row(f"{steps:,} steps", estimated, duration(f["seconds"]))
    peak = "unknown" if f["bytes"] is None else size(f["bytes"])
    if not torch.cuda.is_available():
        peak += ", with data and tokenizer"
    table.add_row("memory a device", size(f["estimated_bytes"]), peak)
    written = f"{size(f['checkpoint_bytes'])}, written and read back"
    table.add_row("checkpoint", size(f["estimated_checkpoint_bytes"]), written)
    table.add_row("disk, at most", size(f["disk_bytes"]), f"{size(f['free_bytes'])} free")
    plain_console().print(table)
    print("rehearsed: the data, the tokenizer and the model work; all files are removed again")
