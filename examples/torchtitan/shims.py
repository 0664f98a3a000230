"""What torchtitan 0.3 needs of torch 2.14, and of GPUs. Import it before torchtitan.

On a GPU with torch 2.14 nothing here acts.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torchtitan.tools.utils as device
from torch.distributed.distributed_c10d import _set_pg_timeout

if not torch.accelerator.is_available():
    # These two names are all that torchtitan knows of devices. Its modules copy them when they are imported.
    memory = SimpleNamespace(total_memory=psutil.virtual_memory().total)
    missing = {
        "current_device": lambda: 0,
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: memory,
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    device.device_type = "cpu"
    device.device_module = SimpleNamespace(**vars(torch.cpu) | missing)

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = _set_pg_timeout


def take_micro_batches(schedule: Any) -> None:
    """Gives a pipeline's schedule a `step` of micro-batches, if its own step cuts the batch itself."""

    def step(*, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, **options: Any) -> None:
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = True
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, **options)

    if "arg_mbs" not in inspect.signature(schedule.step).parameters:
        schedule.step = step
