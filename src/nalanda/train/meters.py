"""Meters of a run: its speed, the slowest process, and the data that it read."""

import contextlib
import functools
import platform
from collections.abc import Callable, Iterable, Iterator
from statistics import median_low
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from nalanda.data.loader import PackedBatches
from nalanda.data.records import Left, describe_left
from nalanda.train.log import RunLog


class TrainingSpeed:
    """Speed of training since the last line of metrics; validation and saving do not count.

    Attributes:
        last_step: seconds of the last step.
    """

    def __init__(self, tokens: int):
        self.last_step = 0.0
        self.restart(tokens)

    def restart(self, tokens: int) -> None:
        """Begins at `tokens` of the run."""
        self.tokens, self.seconds = tokens, 0.0

    def add(self, seconds: float) -> None:
        """Adds the time of a step."""
        self.last_step = seconds
        self.seconds += seconds

    def rate(self, tokens: int) -> float:
        """Tokens per second, up to `tokens` of the run."""
        return (tokens - self.tokens) / self.seconds


SLOW = 1.3
"""A process is slow from so many times the seconds of the median one."""

SHARE_OF_STEP = 0.05
"""It must also exceed the median by this share of a step: small times vary."""

WINDOW = 9
"""Steps between two lines of metrics, at least, for a process to be called slow: the 10 of `log.every` without
the first step of a launch."""


class RankTimes:
    """Seconds of a step that each process waits for rows and computes, since the last line of metrics.

    The time of a step is the same on all processes, since each waits for the slowest. So two spans are measured
    in which none waits for another: the loader is asked for rows, and the blocks' forward passes run. FSDP has
    gathered a block's weights when it begins; processes of one context wait for their neighbours within it. On a
    GPU, events measure the forward passes, and no step waits for them. The first step, which compiles, is left out.

    blocks: of the model; one process alone measures only the wait for rows.
    """

    def __init__(self, blocks: Iterable[nn.Module], accelerator: Accelerator):
        self.accelerator = accelerator
        self.steps, self.waited, self.spans = -1, 0.0, []
        self.named: set[tuple[str, int]] = set()  # the slow ones that were logged
        if accelerator.num_processes > 1:
            self.hosts = gather_object([platform.node()])
            for block in blocks:
                block.forward = self._timed(block.forward)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Surrounds a wait for the rows of a step."""
        began = perf_counter()
        yield
        self.waited += perf_counter() - began

    def end_step(self) -> None:
        """Counts a step, and forgets the first one."""
        self.steps += 1
        if self.steps == 0:
            self.waited, self.spans = 0.0, []

    def report(self, log: RunLog, step: int, step_seconds: float) -> dict[str, float]:
        """Returns the values for a line of metrics, and begins anew. Logs once that a process is slow.

        With several processes all must call it.
        """
        steps, waited, spans = self.steps, self.waited, self.spans
        if steps < 1:
            return {}
        self.steps, self.waited, self.spans = 0, 0.0, []
        if self.accelerator.num_processes == 1:
            return {"data_seconds": waited / steps}

        computed = sum(self._seconds(*span) for span in spans)
        local = torch.tensor([[waited / steps, computed / steps]], device=self.accelerator.device)
        # [processes, 2]
        data, forward = self.accelerator.gather(local).T.tolist()
        values: dict[str, float] = {}
        for span, seconds in (("data", data), ("forward", forward)):
            slowest = max(seconds)
            values |= {f"{span}_seconds": slowest, f"{span}_seconds_min": min(seconds)}
            values[f"{span}_slowest_rank"] = seconds.index(slowest)
            rank = straggler(seconds, step_seconds) if steps >= WINDOW else None
            if rank is not None and (span, rank) not in self.named:
                self.named.add((span, rank))
                does = "waits for rows" if span == "data" else "computes forward passes"
                reason = (
                    f"rank {rank} on {self.hosts[rank]} {does} {slowest:.3g} s a step, the median rank "
                    f"{median_low(seconds):.3g} s"
                )
                log.event(step, "slow rank", reason=reason, rank=rank, host=self.hosts[rank])
        return values

    def _timed(self, forward: Callable) -> Callable:
        @functools.wraps(forward)  # with the mark of what torch compiled
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            began = self._now()
            # Activation checkpointing ends a repeated pass by an exception.
            try:
                return forward(*args, **kwargs)
            finally:
                self.spans.append((began, self._now()))

        return timed

    def _now(self) -> Any:
        if self.accelerator.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        if self.accelerator.device.type != "cuda":
            return ended - began
        # The loss of the last step was read: all events are over.
        return began.elapsed_time(ended) / 1000


def straggler(seconds: list[float], step_seconds: float) -> int | None:
    """The process that takes much longer than the median one; None if there is none.

    seconds: of each process in a step that takes `step_seconds`.
    """
    slowest, usual = max(seconds), median_low(seconds)
    much = slowest > SLOW * usual and slowest - usual > SHARE_OF_STEP * step_seconds
    return seconds.index(slowest) if much else None


class ReadingLog:
    """Logs the documents that were left out, and the sources that begin again, since it last did."""

    def __init__(self, batches: PackedBatches):
        self.batches = batches
        self.skipped, self.epochs = batches.skipped(), batches.epochs_read()

    def report_left_out(self, log: RunLog, step: int) -> None:
        """Logs how many documents were left out."""
        before, self.skipped = self.skipped, self.batches.skipped()
        reason = describe_left(self.skipped - before)
        if not reason:
            return
        only_oversized = self.skipped.keys() == {Left.OVERSIZED.value}
        kind = "oversized" if only_oversized else "left out"
        log.event(step, kind, reason=reason, documents=self.skipped.total())

    def report_epochs(self, log: RunLog, step: int) -> None:
        """Logs the sources that were read to their end, at each doubling of their whole epochs."""
        before, self.epochs = self.epochs, self.batches.epochs_read()
        for name, epochs in self.epochs.items():
            count = int(epochs)
            # The bit length grows at each doubling.
            if count.bit_length() > int(before[name]).bit_length():
                times = "once" if count == 1 else f"{count} times"
                reason = f"{name or 'the corpus'} was read {times} and begins again"
                log.event(step, "epoch", reason=reason, source=name, epochs=count)
