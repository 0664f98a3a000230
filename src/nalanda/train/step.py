"""One training step: read rows, add up gradients, judge the step, update the weights."""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nalanda.common.errors import InputError
from nalanda.data.packing import Batch
from nalanda.train import parallel
from nalanda.train.build import refuse_damage
from nalanda.train.checkpoint_dir import step_of
from nalanda.train.guards import SIGNALS
from nalanda.train.loss import count_labels, summed_loss
from nalanda.train.optim import LEAST_SCALE, follow_gradients, learning_rate, set_rates
from nalanda.train.run import Run


@dataclass
class Step:
    """A step under way. Its loss, norm and stop are the same on all processes."""

    number: int
    settled: int
    """`TrainerState.settled` before this step."""
    began: float
    """`time.perf_counter` before its rows were read."""
    lr: float
    loss: float
    """Mean over the step's label tokens."""
    norm: float
    """Norm of the gradients, before they are clipped."""
    stop: int | None
    """The signal to stop for."""


@dataclass
class Judgement:
    """Whether a step updates the weights. `reason` says why a step is skipped."""

    kind: Literal["good", "skip", "overflow"]
    """overflow: gradients too large for fp16's loss scale. This does not count against the guard."""
    reason: str = ""


def forward_backward(run: Run) -> Step:
    """Reads the rows of the next step, and adds up the gradients of its micro-batches.

    Raises:
        InputError: data failed on this process or is damaged, or an asynchronous save failed.
        SystemExit: data failed on another process.
    """
    config, at, device = run.config, run.at, run.accelerator.device
    number, began = at.step + 1, time.perf_counter()
    run.watchdog.beat(f"step {number}, reading data")
    micro_batches, labels = next_step(run)

    # The loss is the mean over all label tokens of the step, on all processes. A mean of means would
    # give the tokens of short micro-batches more weight.
    loss = torch.zeros((), device=device)
    for i, batch in enumerate(micro_batches):
        run.watchdog.beat(f"step {number}, forward and backward")
        with parallel.accumulating(run.wrapped, last=i == run.accumulation - 1):
            total = summed_loss(
                run.wrapped,
                batch,
                device,
                config.train.z_loss,
                run.carried_states,
                i,
                run.sharing.context,
                run.teacher,
            )
            # A step without any label has the loss 0, not 0 / 0.
            mean = total / max(1, labels)
            # DDP takes the mean over the processes.
            run.accelerator.backward(run.scaler.scale(mean * run.accelerator.num_processes))
        loss += mean.detach()  # the share of this process; `gather_step` adds them up

    # The norm is of the unscaled gradients, so the guard's window does not depend on fp16's scale.
    run.scaler.unscale_(run.optimizer)
    norm = parallel.clip_grad_norm_(run.model.parameters(), config.optim.max_grad_norm).item()
    total_loss, stop = gather_step(run, loss)
    run.note_saved()
    # The schedule counts from the stage that began it.
    begin, end = run.stage.schedule_begin, run.stage.schedule_end
    return Step(
        number=number,
        settled=at.settled,
        began=began,
        lr=learning_rate(number - begin, end - begin, config.optim.lr, config.schedule),
        loss=total_loss,
        norm=norm,
        stop=stop,
    )


def next_step(run: Run) -> tuple[list[Batch], int]:
    """The micro-batches of the next step, and the step's label tokens on all processes.

    If the data fails on one process, all processes save. That one raises its `InputError`, the others
    SystemExit with the same exit code.
    """
    before = copy.copy(run.batches)  # its position: a batch replaces it and changes none
    with run.rank_times.reading():
        micro_batches, failure = take_batches(run.batches, run.accumulation)
    if run.masking is not None:
        # The mask of a row depends on its place in the run, not on the number of processes.
        first, rows = run.at.step * run.accumulation, run.config.train.micro_batch_size
        micro_batches = [
            run.masking(batch, first + i, rows, run.sharing.rank, run.sharing.world_size)
            for i, batch in enumerate(micro_batches)
        ]

    # One collective: label tokens, the sum of exit codes, and the number of processes whose data failed.
    labels = sum(count_labels(batch, run.sharing.context) for batch in micro_batches)
    code = failure.exit_code if failure else 0
    counts = torch.tensor([labels, code, code > 0])
    if run.accelerator.num_processes > 1:  # one process alone needs no synchronisation
        counts = counts.to(run.accelerator.device)
    labels, code, failed = run.accelerator.reduce(counts).tolist()
    if not failed:
        return micro_batches, labels

    # The rows of this step were taken, but not learnt: the position before them is saved.
    outcome = "saved"
    if run.at.step > (step_of(run.checkpoint) if run.checkpoint else 0):
        if unsound := run.find_unsound():
            outcome = f"not saved, {unsound}"
        else:
            run.save(before.state_dict(), wait=True)
    run.saver.wait()
    if run.checkpoint:
        run.log.say(f"stopped: {outcome}; the same command resumes from {run.checkpoint}")
    # The sum of equal exit codes over their number is the code itself.
    raise failure or SystemExit(code // failed)


def take_batches(batches: Iterator[Batch], count: int) -> tuple[list[Batch], InputError | None]:
    """Takes the next `count` micro-batches; if the data fails, those before that, and the error."""
    taken = []
    try:
        for _ in range(count):
            taken.append(next(batches))
    except InputError as error:
        return taken, error
    return taken, None


def gather_step(run: Run, loss: Tensor) -> tuple[float, int | None]:
    """The loss summed over all processes, and the signal to stop for if any process received one.

    One collective for all of it. Raises on all processes if data is damaged or an asynchronous save failed.
    """
    # [loss, one flag a signal, comparing, damaged, unsaved], summed over the processes
    flags = [float(signum in run.signals.received) for signum in SIGNALS.values()]
    flags += [
        float(not run.sums.finished),
        float(run.sums.problem is not None),
        float(run.saver.failed),
    ]
    totals = torch.stack([loss, *torch.tensor(flags, device=loss.device)])
    total, *received, comparing, damaged, unsaved = run.accelerator.reduce(totals).tolist()
    if damaged:
        # A running save ends first: the error names the checkpoints of the folder.
        run.saver.wait()
        refuse_damage(run.sums, run.saver.directory)
    if unsaved:
        run.saver.wait()  # raises its error on every process
    # All processes have compared their files: no later step waits for them.
    run.sums.settled = not comparing
    return total, first_signal(received)


def received_stop(run: Run) -> int | None:
    """The signal to stop for if any process received one. All processes must call it."""
    flags = torch.tensor([signum in run.signals.received for signum in SIGNALS.values()]).long()
    return first_signal(run.accelerator.reduce(flags.to(run.accelerator.device)).tolist())


def first_signal(received: list[float]) -> int | None:
    """The first of `SIGNALS` that any process received. received: how many did, of each."""
    return next((n for n, count in zip(SIGNALS.values(), received, strict=True) if count), None)


def judge(run: Run, step: Step) -> Judgement:
    """Judges a step by its loss and gradient norm, the same on all processes."""
    # First: gradients that overflowed fp16 say nothing about the step.
    if reason := lower_loss_scale(run, step.number):
        return Judgement("overflow", reason)
    if reason := run.spikes.judge(step.loss, step.norm):
        return Judgement("skip", reason)
    return Judgement("good")


def lower_loss_scale(run: Run, step: int) -> str | None:
    """Lets fp16's loss scale follow the gradients. If they overflowed, the step must be skipped, and the
    reason is returned. None if they did not, or if no lower scale may help: the guard then judges the step."""
    changed = follow_gradients(run.scaler)
    if changed is None:
        return None
    before, lowered = changed
    if lowered < LEAST_SCALE:
        if not run.at.bad:
            run.log.say(
                f"WARNING    gradients overflow fp16 at loss scale {before:g}: set train.precision=fp32"
            )
        return None
    reason = f"{before:g} → {lowered:g}, gradients overflowed fp16"
    run.log.event(step, "loss scale", reason=reason, scale=lowered)
    return reason


def apply(run: Run, step: Step, verdict: Judgement) -> None:
    """Updates the weights after a good step, and counts the step. A skipped one changes no weight, moment or
    step count."""
    at, optimizer = run.at, run.optimizer
    if verdict.kind == "good":
        set_rates(optimizer, step.lr)
        optimizer.step()
        run.averages.update()
        # From here on a rollback may go to the same checkpoint again.
        at.bad, run.rolled_back_to = [], None

    elif verdict.kind == "overflow":
        # The forward pass was fine unless the loss overflowed too.
        at.overflows += 1
        if run.carried_states and not math.isfinite(step.loss):
            run.carried_states.forget()

    else:
        at.bad, at.skipped = [*at.bad, verdict.reason], at.skipped + 1
        run.log.event(step.number, "skipped", reason=verdict.reason)
        if run.carried_states:
            run.carried_states.forget()

    # Also after a skipped step, whose gradients must not join those of the next.
    optimizer.zero_grad()
    # A skipped step counts: its rows are read, and the schedule goes on.
    at.step, at.tokens = step.number, at.tokens + run.config.train.tokens_per_step
    if not at.bad:
        at.settled = step.number
    run.facts["step"] = step.number
    run.speed.add(time.perf_counter() - step.began)
    run.rank_times.end_step()
