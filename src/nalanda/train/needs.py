"""Does a run fit: what it needs of memory and disk, the refusal where a machine has less, and what would fit."""

import contextlib
import gc
import os
import shutil
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from nalanda_kernels import exceeds_card
from transformers import AutoConfig, PreTrainedModel

from nalanda.common.errors import DiskFull, InputError, OutOfMemory, asked_for, out_of_memory
from nalanda.common.processes import local_processes
from nalanda.common.text import size
from nalanda.config.model import in_one_line
from nalanda.config.model_folder import check_config, check_hub
from nalanda.config.schema import CheckpointConfig, DistillConfig, RunConfig, Stage
from nalanda.model import NalandaConfig, chunk_forward
from nalanda.train import memory, parallel
from nalanda.train.checkpoint_dir import checkpoint_folders
from nalanda.train.estimate import activation_bytes, meta_model, on_meta
from nalanda.train.flops import DTYPES
from nalanda.train.optim import parameter_groups

# ------------------------------ what a run needs


class RunFiles(NamedTuple):
    """Bytes that a run takes on its disk, without tokenizer and logs."""

    checkpoint: int
    """Of one checkpoint."""
    checkpoints: int
    """Most checkpoints at a time, the one that is being written among them."""
    final: int
    """Of the model in `final/`."""
    total: int
    """Most at a time."""
    more: int
    """Of `total`, those that are not on the disk yet."""

    def describe(self) -> str:
        """`13.9 GiB, for 4 checkpoints of 3.2 GiB and final/ of 1.1 GiB`."""
        count = f"{self.checkpoints} checkpoint{'s' * (self.checkpoints > 1)}"
        each = f"{count} of {size(self.checkpoint)} and final/ of {size(self.final)}"
        return f"{size(self.total)}, for {each}"


@dataclass(frozen=True)
class Needs:
    """Bytes that a run needs on each device, and on its disk."""

    held: int
    """Of weights, gradients and moments, and of a teacher."""
    teacher: int
    """Of `held`, those of the teacher."""
    activations: int | None
    """Of a micro-batch; None: not known, or not counted."""
    files: RunFiles
    saved_tokens: int = chunk_forward.FEW_TOKENS
    """`chunk_forward.SAVED_TOKENS` of the run."""

    @property
    def device(self) -> int:
        """Of one device, as far as they are known."""
        return self.held + (self.activations or 0)

    @property
    def machine(self) -> int:
        """Of all processes of this machine."""
        return local_processes() * self.device

    def describe_memory(self) -> str:
        """`4.2 GiB a device for weights, gradients and moments, at most 1.3 GiB for activations`."""
        teacher = " and the teacher" * bool(self.teacher)
        line = f"{size(self.held)} a device for weights, gradients and moments{teacher}"
        if self.activations is not None:
            line += f", at most {size(self.activations)} for activations"
        return line


def needs_of(
    config: RunConfig,
    model: PreTrainedModel,
    processes: int,
    device: str | None = "cpu",
    saved: Sequence[int] = (),
) -> Needs:
    """Counts what a run needs, in the stage that needs most. A CPU saves all chunks for the backward, if a step then
    takes at most half of the free memory.

    model: it may lie on the meta device. device: of `activation_bytes`; None: activations are not counted, which takes
    seconds. saved: of `run_files`.
    """
    teacher, configs = teacher_bytes(config.distill), [x.config for x in config.in_stages()]
    held = max(held_bytes(model, each, processes) for each in configs)
    files = run_files(config, model, saved)

    def with_chunks(tokens: int) -> Needs:
        activations = None
        if device and isinstance(model.config, NalandaConfig):
            activations = max(
                activation_bytes(each, model.config, device, tokens) for each in configs
            )
        return Needs(held + teacher, teacher, activations, files, tokens)

    if device == "cpu":
        needs = with_chunks(2**62)
        if needs.machine <= memory.host() // 2:
            return needs
    return with_chunks(chunk_forward.FEW_TOKENS)


def shards(config: RunConfig, processes: int) -> int:
    """Counts the processes that share one copy of the weights. Without a launcher, a node is taken to have 8."""
    node = local_processes(8)
    shared = {"fsdp": processes, "hybrid": min(processes, config.train.shard_size or node)}
    return shared.get(config.train.parallel, 1)


def held_bytes(model: PreTrainedModel, config: RunConfig, processes: int) -> int:
    """Bytes of fp32 weights, their averages, gradients and moments on one device.

    DDP adds its gradient buckets. FSDP2 adds the tensors gathered at a time: the root, two blocks, and a
    block's gradient. Where it accumulates, it also adds whole gradients.
    """
    groups = parameter_groups(model, config.optim)
    # Weight and gradient of a parameter in fp32.
    total = moment_bytes(groups) + sum(8 * p.numel() for g in groups for p in g["params"])
    parameters = model.num_parameters()
    total += len(config.train.ema) * 4 * parameters
    parts = shards(config, processes)
    if parts == 1:
        return total + (4 * parameters if processes > 1 else 0)
    blocks = [sum(p.numel() for p in block.parameters()) for block in parallel.units(model)]
    if config.accumulation(processes) > 1:
        # Until the last micro-batch they are summed on each device.
        total += parts * 4 * parameters
    # Whole in fp32: the root's parameters, and three times the largest block (two gathered, one gradient).
    return total // parts + 4 * (parameters - sum(blocks)) + 3 * 4 * max(blocks, default=0)


def moment_bytes(groups: list[dict]) -> int:
    """Bytes of the moments of `parameter_groups` in fp32: two a parameter, one under Muon."""
    return sum(
        p.numel() * (4 if group["kind"] == "muon" else 8)
        for group in groups
        for p in group["params"]
    )


def teacher_bytes(config: DistillConfig) -> int:
    """Bytes of a teacher on the model's device: its weights, or its head if it has a device of its own."""
    if config.teacher is None:
        return 0
    with in_one_line(f"distill.teacher: {config.teacher}"):
        check_hub(config.teacher)
        check_config(config.teacher)
        settings = AutoConfig.from_pretrained(config.teacher)
    head = settings.vocab_size * settings.hidden_size
    count = head if config.device else on_meta(settings).num_parameters()
    return DTYPES[config.precision].itemsize * count


def run_files(config: RunConfig, model: PreTrainedModel, saved: Sequence[int] = ()) -> RunFiles:
    """The bytes of a run's checkpoints and model. A run in a store takes them in its local folder.

    saved: steps of the checkpoints that the run has.
    """
    # In a checkpoint, and in the models at the end: the weights and each average.
    weights = (1 + len(config.train.ema)) * 4 * model.num_parameters()
    checkpoint = weights + moment_bytes(parameter_groups(model, config.optim))
    carried = 0
    for stage in config.in_stages():
        data = stage.config.data
        if data.long_documents == "carry" and isinstance(model.config, NalandaConfig):
            rows = stage.config.train.tokens_per_step // data.seq_len
            carried = max(carried, rows * model.config.state_bytes(data.seq_len))
    checkpoint += carried

    # The steps that are saved from here on: multiples of `every`, and the ends of the stages.
    begun, steps, keep = max(saved, default=0), config.train.steps, config.checkpoint
    due = {stage.end for stage in config.in_stages() if stage.end > begun}
    if every := keep.every:
        planned = range((begun // every + 1) * every, steps, every)
        # Of a long run's, those that stay at its end suffice.
        due.update(planned[-keep.keep_last - 1 :])
        if keep.keep_every:
            due.update(filter(keep.keeps_for_good, planned))
    new = sorted(due)
    saves = [*sorted(saved), *new]

    # A save comes before what it removes: the first one meets all that are there, the last one most others.
    most = len(saved)
    if new:
        most = 1 + max(len(saved), count_kept(saves[:-1], config.checkpoint))
    total = max(most * checkpoint, count_kept(saves, config.checkpoint) * checkpoint + weights)
    return RunFiles(checkpoint, most, weights, total, total - len(saved) * checkpoint)


def count_kept(saves: list[int], config: CheckpointConfig) -> int:
    """Counts the checkpoints that stay of `saves`, their steps in order."""
    newest, older = saves[-config.keep_last :], saves[: -config.keep_last]
    return len(newest) + len(list(filter(config.keeps_for_good, older)))


# ------------------------------ whether it is there


def check_weights_fit(count: int, bytes_each: int) -> None:
    """Raises `InputError` if the host lacks `bytes_each` for `count` parameters, in each of its processes.

    Most systems would grant the allocation, and kill the process when it uses the memory.
    """
    # Processes of one machine share its memory.
    processes = local_processes()
    needed, free = bytes_each * count * processes, memory.host()
    if needed > free:
        each = f" in {processes} processes" if processes > 1 else ""
        raise InputError(
            f"model: {count / 1e6:,.1f} M parameters{each} take {size(needed)}, {size(free)} of memory is "
            "free: lower model.hidden_size, model.num_hidden_layers or the vocabulary"
        )


def check_step(needs: Needs) -> None:
    """Raises `InputError` if the machine has less memory than a step needs on its CPU.

    The system would kill the process in its first step. A GPU raises an error there, see `explain_out_of_memory`.
    """
    total = psutil.virtual_memory().total
    if needs.machine > total + psutil.swap_memory().total:
        raise InputError(
            f"train.micro_batch_size: a step needs about {size(needs.machine)}, and this machine has {size(total)}; "
            "take a smaller one, a smaller data.seq_len, or a smaller model"
        )


def checkpoint_disk(run_dir: Path) -> Path:
    """A folder on the disk of a run's checkpoints: their own, perhaps a link, or the run's before it is made."""
    folder = run_dir / "checkpoints"
    return folder if folder.exists() else run_dir


def check_disk(files: RunFiles, run_dir: Path) -> None:
    """Raises `DiskFull` if a disk has less room than the run will still take. run_dir: an existing folder."""
    needed, folder = {run_dir: files.more}, checkpoint_disk(run_dir)
    if folder.stat().st_dev != run_dir.stat().st_dev:
        written = files.total - files.more
        needed = {folder: files.checkpoints * files.checkpoint - written, run_dir: files.final}

    for directory, more in needed.items():
        free = shutil.disk_usage(directory).free
        if more > free:
            raise DiskFull(
                f"output_dir: {directory}: the run will take {files.describe()}; {size(more)} of that are still to be "
                f"written there, and {size(free)} are free; make room, lower checkpoint.keep_last, or choose "
                "another disk"
            )


@contextlib.contextmanager
def explain_out_of_memory(config: RunConfig) -> Iterator[None]:
    """Turns out-of-memory errors of a run into `OutOfMemory`: one line, with advice on what would fit."""
    try:
        yield
    except Exception as error:
        # Of a backward pass or a compiled block; an eager forward pass takes the next backend.
        if exceeds_card(error):
            raise InputError(
                f"a kernel does not fit this card: {error}; set NALANDA_BACKEND=torch"
            ) from None
        if isinstance(error, InputError) or not out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        advice = f"lower train.micro_batch_size, {config.train.micro_batch_size} now"
        with contextlib.suppress(Exception):  # the estimate needs memory too
            advice = would_fit(config) or advice
        if (rows := config.validation.batch_size or 0) > config.train.micro_batch_size:
            advice += f", or lower validation.batch_size, {rows} now"
        saved = checkpoint_folders(config.run_dir / "checkpoints")
        start = "no checkpoint was saved yet"
        if saved:
            start = f"the same command resumes from {saved[-1].name}"
        raise OutOfMemory(f"{asked_for(error)}; {advice}; {start}") from None


def would_fit(config: RunConfig) -> str | None:
    """Names the largest micro-batch that fits in free memory, of the stage that needs most; None where activations are
    not known."""
    model = meta_model(config)
    if not isinstance(model.config, NalandaConfig):
        return None
    processes = int(os.environ.get("WORLD_SIZE", 1))
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def needed(stage: Stage, rows: int) -> int:
        train = replace(stage.config.train, micro_batch_size=rows)
        return needs_of(replace(stage.config, train=train), model, processes, device).device

    stage = max(config.in_stages(), key=lambda x: needed(x, x.config.train.micro_batch_size))
    train, seq_len = stage.config.train, stage.config.data.seq_len
    key = f"stages.{stage.name}." * bool(stage.name) + "train.micro_batch_size"

    # Rows that divide a process's share of a step: accumulation then keeps the step as it is.
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else memory.host()
    rows_a_step = train.tokens_per_step // seq_len
    rows_a_process = rows_a_step * train.context_parallel // processes
    for rows in range(train.micro_batch_size - 1, 0, -1):
        if rows_a_process % rows == 0 and (bytes_needed := needed(stage, rows)) <= free:
            return f"{key}={rows} needs {size(bytes_needed)} of {size(free)} free"
    less = "" if train.gradient_checkpointing else "train.gradient_checkpointing=true, "
    return (
        f"one row needs {size(needed(stage, 1))} of {size(free)} free: take {less}a shorter data.seq_len or a "
        "smaller model"
    )
