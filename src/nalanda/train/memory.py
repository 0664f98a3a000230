"""Free memory, and advice on what would fit when a run needs more."""

import contextlib
import gc
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from nalanda_kernels import exceeds_card
from transformers import PreTrainedConfig, PreTrainedModel

from nalanda.common.errors import InputError, OutOfMemory, asked_for, out_of_memory
from nalanda.common.text import size
from nalanda.config.schema import RunConfig
from nalanda.model import NalandaConfig, chunk_forward
from nalanda.train.checkpoint_dir import checkpoint_folders
from nalanda.train.estimate import (
    activation_bytes,
    held_bytes,
    meta_model,
    parameters,
    shards,
    step_bytes,
)
from nalanda.train.flops import DTYPES

GROUPS = "/sys/fs/cgroup"


def host() -> int:
    """Bytes of host memory that this process can still allocate."""
    machine = psutil.virtual_memory().available + psutil.swap_memory().free
    return max(0, min([machine, *_limits()]))


def _limits() -> Iterator[int]:
    """Bytes left under the limits of the process and of its control group (a container's or Slurm's)."""
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - psutil.Process().memory_info().vms
    name = ""
    with contextlib.suppress(OSError):
        name = Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    group_of_process = Path(GROUPS, name)
    for group in (group_of_process, *group_of_process.parents):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group or limit
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            cached = dict(line.split() for line in lines)
            # File cache that was not used lately counts as used, but the system gives it up on demand.
            yield limit - used + int(cached["inactive_file"])


def check_model(config: PreTrainedConfig, bytes_each: int) -> None:
    """Raises `InputError` if the host lacks `bytes_each` for every parameter, in each of its processes.

    Most systems would grant the allocation, and kill the process when it uses the memory.
    """
    # Processes of one machine share its memory.
    count, processes = parameters(config), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, free = bytes_each * count * processes, host()
    if needed > free:
        each = f" in {processes} processes" if processes > 1 else ""
        raise InputError(
            f"model: {count / 1e6:,.1f} M parameters{each} take {size(needed)}, {size(free)} of memory is "
            "free: lower model.hidden_size, model.num_hidden_layers or the vocabulary"
        )


def save_chunks(config: RunConfig, facts: dict, model: PreTrainedModel) -> int:
    """Lets a CPU save all chunks for the backward, if a step then takes at most half of the free memory.

    No value depends on it: chunks that are not saved are computed again. facts: of `memory_parts`.

    Returns the bytes that a step takes on a CPU, 0 for other devices.
    """
    chunk_forward.SAVED_TOKENS = chunk_forward.FEW_TOKENS
    if facts["device"] != "cpu":
        return 0
    # The estimate is of what the chunk form would save.
    chunk_forward.SAVED_TOKENS = 2**62
    needed = step_bytes(config, facts, model)
    if needed <= host() // 2:
        return needed
    chunk_forward.SAVED_TOKENS = chunk_forward.FEW_TOKENS
    return step_bytes(config, facts, model)


def check_step(needed: int) -> None:
    """Raises `InputError` if the machine has less memory than a step needs by the estimate, of `save_chunks`.

    The system would kill the process in its first step. A GPU raises an error there, see `explain_out_of_memory`.
    """
    memory = psutil.virtual_memory()
    if needed > memory.total + psutil.swap_memory().total:
        raise InputError(
            f"train.micro_batch_size: a step needs about {size(needed)}, and this machine has {size(memory.total)}; "
            "take a smaller one, a smaller data.seq_len, or a smaller model"
        )


@contextlib.contextmanager
def explain_out_of_memory(config: RunConfig, kind: str) -> Iterator[None]:
    """Turns out-of-memory errors of a run into `OutOfMemory`: one line, with advice on what would fit.

    kind: of `choose_parallel`.
    """
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
            advice = would_fit(config, kind)
        if (rows := config.validation.batch_size or 0) > config.train.micro_batch_size:
            advice += f", or lower validation.batch_size, {rows} now"
        saved = checkpoint_folders(Path(config.output_dir) / "checkpoints")
        start = "no checkpoint was saved yet"
        if saved:
            start = f"the same command resumes from {saved[-1].name}"
        raise OutOfMemory(f"{asked_for(error)}; {advice}; {start}") from None


def would_fit(config: RunConfig, kind: str) -> str:
    """Names the largest `train.micro_batch_size` that fits in free memory, counted as by `nalanda info`."""
    train, model = config.train, meta_model(config)
    model_config = model.config
    if not isinstance(model_config, NalandaConfig):
        return f"lower train.micro_batch_size, {train.micro_batch_size} now"
    processes = int(os.environ.get("WORLD_SIZE", 1))
    held = held_bytes(model, config, processes, shards(config, processes, kind))
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # Weights and moments do not depend on the rows, activations do.
    def needed(rows: int) -> int:
        return held + activation_bytes(
            model_config,
            rows,
            config.data.seq_len,
            DTYPES[train.precision],
            train.gradient_checkpointing,
            train.context_parallel,
            device,
        )

    # Rows that divide a process's share of a step: accumulation then keeps the step as it is.
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else host()
    rows_a_step = train.tokens_per_step // config.data.seq_len
    rows_a_process = rows_a_step * train.context_parallel // processes
    for rows in range(train.micro_batch_size - 1, 0, -1):
        if rows_a_process % rows == 0 and needed(rows) <= free:
            return f"train.micro_batch_size={rows} needs {size(needed(rows))} of {size(free)} free"
    less = "" if train.gradient_checkpointing else "train.gradient_checkpointing=true, "
    return (
        f"one row needs {size(needed(1))} of {size(free)} free: take {less}a shorter data.seq_len or a "
        "smaller model"
    )
