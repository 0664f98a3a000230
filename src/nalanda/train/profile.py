"""torch's profiler over some steps of a run: `nalanda train --profile`."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity

from nalanda.common.errors import InputError
from nalanda.train.run import Run

WARM_UP = 3
"""Steps before the traced ones: the first allocates and compiles, and the profiler starts in the last."""

OPS = 8
"""Ops that are printed."""


@contextlib.contextmanager
def profiled(run: Run, steps: int) -> Iterator[Callable[[], None]]:
    """Traces `steps` steps, after WARM_UP others. Yields a function to call after each step of the run.

    Each process writes profile/steps-FIRST-LAST/rank-R.json.gz into the run's folder, a trace for Perfetto or
    chrome://tracing. The main process prints the ops that took longest. A run that ends before LAST writes none.

    steps: 0 traces nothing.

    Raises:
        InputError: the run has fewer steps left.
    """
    if not steps:
        yield lambda: None
        return
    left = run.config.train.steps - run.at.step
    if left < WARM_UP + steps:
        raise InputError(
            f"--profile: {steps} steps behind {WARM_UP} others do not fit into the {left} that are left; "
            "raise train.steps"
        )
    first = run.at.step + WARM_UP + 1
    name = f"steps-{first}-{first + steps - 1}/rank-{run.accelerator.process_index}.json.gz"
    file = run.config.run_dir / "profile" / name
    on_card = run.accelerator.device.type == "cuda"

    def write(profiler: torch.profiler.profile) -> None:
        # torch also comes here where an error or a signal ends the run.
        if profiler.step_num < WARM_UP + steps:
            run.log.say("profile    not written: the run ended before the last of its steps")
            return
        run.watchdog.beat("writing the profile")
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        run.log.say(f"profile    {file}, for https://ui.perfetto.dev; its ops by their own time:")
        for line in longest_ops(profiler, on_card):
            run.log.say(f"           {line}")

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_card]
    schedule = torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write
    ) as profiler:
        yield profiler.step


def longest_ops(profiler: torch.profiler.profile, on_card: bool) -> list[str]:
    """The ops that took longest, without those that they call: share of the time of all, seconds, calls."""
    attribute = "self_device_time_total" if on_card else "self_cpu_time_total"
    averages = [op for op in profiler.key_averages() if not op.key.startswith("ProfilerStep")]
    ops = [(getattr(op, attribute), op) for op in averages]
    total = max(1, sum(time for time, _ in ops))
    ops = sorted(ops, key=lambda pair: -pair[0])[:OPS]
    return [
        f"{time / total:6.1%}  {time / 1e6:8.3f} s  {op.count:6,} calls  {op.key[:70]}"
        for time, op in ops
    ]
