"""Starts a run's processes, and lets them agree."""

import os
import platform
import shlex
import sys
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)

from nalanda.common.allocator import keep_freed_memory
from nalanda.common.errors import InputError
from nalanda.common.processes import local_processes
from nalanda.common.products import choose_product_route, set_product_route
from nalanda.common.text import redact
from nalanda.config.schema import RunConfig
from nalanda.data.workers import processors
from nalanda.train.flops import DTYPES, matmul_flops
from nalanda.train.guards import WAIT_FACTOR

BF16_GAIN = 1.25
"""On a CPU `train.precision: auto` asks so much more speed of bf16 products, since half-precision rounds."""


def launch(config: RunConfig) -> Accelerator:
    """Returns the Accelerator of this process, once all processes have met.

    Raises `InputError` if the launcher was asked for more processes than joined.
    """
    torch.set_flush_denormal(True)  # their products are slow; before threads start
    if config.train.cpu_threads:
        torch.set_num_threads(config.train.cpu_threads)
    precision = choose_precision(config.train.precision)

    try:
        groups = InitProcessGroupKwargs(timeout=patience(config))
        mixed = "no" if precision == "fp32" else precision
        accelerator = Accelerator(mixed_precision=mixed, kwargs_handlers=[groups])
    except ValueError as error:
        raise InputError(f"the launch cannot work: {error}") from None
    if precision == "fp16":
        # accelerate 1.15 has no fp16 on CPUs, and its loss scale would skip steps behind the loop's back.
        accelerator.native_amp, accelerator.scaler = True, None

    check_processes(accelerator)
    # Processors of two kinds may choose differently.
    chosen = sorted(set(gather_object([precision])))
    if len(chosen) > 1:
        raise InputError(f"train.precision: auto is {' and '.join(chosen)} here; set one of them")
    if accelerator.device.type == "cpu":
        keep_freed_memory()
        # One route in all processes, because Muon multiplies the same matrices in each.
        routes = set(gather_object([choose_product_route()]))
        set_product_route(routes.pop() if len(routes) == 1 else "default")
    return accelerator


def check_processes(accelerator: Accelerator) -> None:
    """Raises `InputError` if this process trains alone though others were launched, or in a way that
    Nalanda has not."""
    # On CPUs accelerate joins a launcher's processes only with ACCELERATE_USE_CPU; else each trains alone.
    launched = os.environ.get("WORLD_SIZE")
    alone = "MASTER_ADDR" in os.environ and "RANK" not in os.environ
    if alone or (launched and int(launched) != accelerator.num_processes):
        raise InputError(
            f"the launcher was asked for {launched or 'several'} processes, and each would train alone: there "
            "is no GPU; on CPUs launch with ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node N …"
        )

    kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in kinds:
        raise InputError(
            f"{accelerator.distributed_type} with {accelerator.num_processes} process(es): "
            "Nalanda trains on one process, with DDP or with FSDP2; choose that in `accelerate config`"
        )


def advise_on_threads(config: RunConfig, processes: int) -> None:
    """Prints how to use idle CPU cores, or how to use all of them better."""
    cores = processors()
    threads = torch.get_num_threads() * local_processes()
    if threads < cores:
        each = cores // local_processes()
        limit = os.environ.get("OMP_NUM_THREADS")
        why = f"OMP_NUM_THREADS={limit}, as launchers set it" if limit else "torch's default"
        if config.train.cpu_threads:
            why = f"train.cpu_threads={config.train.cpu_threads}"
        print(f"{threads} of {cores} CPU cores in use ({why}); train.cpu_threads={each} uses all")
        return

    # Processes of one thread share the rows of a micro-batch, so these must divide evenly.
    divisible = config.train.micro_batch_size % cores == 0
    if processes > 1 or not 1 < cores <= 8 or not divisible:
        return
    script, *arguments = sys.argv
    command = [script] if script.endswith("pretrain.py") else ["-m", "nalanda_cli"]
    command += map(redact, arguments)
    program = ["torchrun", "--standalone", "--nproc_per_node", str(cores), *command]
    rows = config.train.micro_batch_size // cores
    print(
        f"a small model trains faster in {cores} processes of one thread:\n"
        f"    ACCELERATE_USE_CPU=true {shlex.join(program)} train.cpu_threads=1 "
        f"train.micro_batch_size={rows}"
    )


def choose_precision(precision: str) -> str:
    """The precision of `train.precision: auto` on this process's device; the others stay.

    Raises `InputError` for bf16 on a card that only emulates it: one before Ampere.
    """
    if precision == "bf16" and on_card() and not has_bf16():
        raise InputError("train.precision: this card has no bf16; set train.precision=fp16")
    if precision != "auto":
        return precision
    if on_card():
        return "bf16" if has_bf16() else "fp16"
    # Without units for bf16 a CPU takes a hundred times as long.
    narrow, wide = (matmul_flops(torch.device("cpu"), DTYPES[name]) for name in ("bf16", "fp32"))
    return "bf16" if narrow >= BF16_GAIN * wide else "fp32"


def on_card() -> bool:
    """Whether this process will train on a GPU."""
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")


def has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def patience(config: RunConfig) -> timedelta:
    """How long a collective waits: longer than the watchdog, which says what every process was doing."""
    hang = config.guard.hang_timeout
    return timedelta(days=7) if hang is None else timedelta(seconds=min(WAIT_FACTOR * hang, 10**9))


def check_shared(run_dir: Path, accelerator: Accelerator) -> None:
    """Raises `InputError` on all processes if one does not see the folder that the main process writes to."""
    unseen = platform.node() if first_to_see(run_dir, accelerator) else None
    if lacking := [host for host in gather_object([unseen]) if host]:
        raise InputError(
            f"output_dir: {lacking[0]} does not see what the first process writes to {run_dir}; name a "
            "folder that all nodes share, or one in a store"
        )


def first_to_see(folder: Path, accelerator: Accelerator) -> int:
    """The lowest rank of the processes that see the same `folder` as this one, on this machine or a shared disk."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    if processes == 1:
        return 0
    # A new name at each start: the file of an earlier start proves nothing.
    token = from_main_process(uuid.uuid4().hex)
    files = [folder / f".seen-{token}-{number}" for number in range(processes)]
    if folder.is_dir():
        files[rank].touch()
    accelerator.wait_for_everyone()
    first = next((number for number in range(rank) if files[number].exists()), rank)
    # All have looked before a file is removed.
    accelerator.wait_for_everyone()
    files[rank].unlink(missing_ok=True)
    return first


def from_main_process(value: Any) -> Any:
    """Returns the main process's value on every process."""
    return broadcast_object_list([value])[0]


def on_main_process(main: bool, act: Callable[[], Any]) -> Any:
    """Calls `act` on the main process, and returns its result on every process. Its `InputError` is raised
    on all."""
    # The error travels too: a process that raised alone would leave the others waiting.
    result, problem = from_main_process(_attempt(act) if main else None)
    if problem:
        raise problem
    return result


def on_every_process(act: Callable[[], Any]) -> None:
    """Calls `act` on every process. The `InputError` of one is raised on all."""
    if first := next(filter(None, gather_object([_attempt(act)[1]])), None):
        raise first


def _attempt(act: Callable[[], Any]) -> tuple[Any, InputError | None]:
    """The result of `act`, or its `InputError`."""
    try:
        return act(), None
    except InputError as error:
        return None, error
