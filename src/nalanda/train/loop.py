"""The training loop. `train` reads from top to bottom; what it calls stands below it, in that order."""

import contextlib
import copy
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor

from nalanda.common.errors import InputError, NothingTrained
from nalanda.common.progress import Progress
from nalanda.config.load import at_home
from nalanda.config.schema import RunConfig
from nalanda.data.records import Left, describe_left
from nalanda.data.stores import with_local_sets
from nalanda.train import memory, parallel
from nalanda.train.build import finish_sums, refuse_damage, set_up
from nalanda.train.checkpoint import random_state, set_random_state
from nalanda.train.checkpoint_dir import step_of
from nalanda.train.estimate import estimate, time_left
from nalanda.train.export import export
from nalanda.train.guards import SIGNALS, Interruptions, Watchdog, interruptible
from nalanda.train.launch import from_main_process, launch
from nalanda.train.log import RunLog, last_metrics, write_facts
from nalanda.train.loss import (
    count_labels,
    describe_perplexity,
    negative_share,
    summed_loss,
    validate,
)
from nalanda.train.mirror import Mirror, mirrored, staged
from nalanda.train.optim import LEAST_SCALE, describe_groups, follow_gradients, learning_rate
from nalanda.train.run import Run
from nalanda.train.run_dir import (
    claim,
    is_exported,
    last_good,
    lock_run_dir,
    make_newest,
    record_state,
    rollback_message,
)


def train(config: RunConfig) -> Path:
    """Trains the recipe `config`, from the start or from the newest checkpoint; returns `output_dir`.

    Every process of a launch calls it. The run's folder then holds config.yaml, run.json (facts about the
    run, its state included), metrics.jsonl, tensorboard/, tokenizer/, checkpoints/step-N/ and, at the end,
    final/: a transformers model folder.

    Raises:
        InputError: the settings, the data or the folder cannot work, or training diverges. If the data
            fails, a checkpoint of the last step is saved first.
        NothingTrained: every step was skipped.
        SystemExit: 128 + signal after a signal of `guards.SIGNALS` on any process. The step is finished and a
            checkpoint saved; the same command resumes from it. While the run is set up, it ends at once. So
            does a second signal of the same kind (`guards.interruptible`).
    """
    config = at_home(config)
    config.check()
    transformers.logging.disable_progress_bar()  # saving a few files needs none
    config, mirror = staged(config)
    kind = parallel.choose_parallel(config.train.parallel, os.environ)
    with memory.explain_out_of_memory(config, kind):
        accelerator = launch(config)
        with interruptible() as signals:
            if not accelerator.is_main_process:
                return _train(config, accelerator, kind, None, signals)
            with lock_run_dir(Path(config.output_dir)), mirrored(mirror):
                claimed = claim(Path(config.output_dir), config)
                return _train(config, accelerator, kind, claimed, signals, mirror)


def _train(
    config: RunConfig,
    accelerator: Accelerator,
    kind: parallel.Kind,
    claimed: Any,
    signals: Interruptions,
    mirror: Mirror | None = None,
) -> Path:
    """`train`, with the processes launched and the folder locked. claimed: what
    `claim` returned on the main process, None on others. mirror: copies the run to its store."""
    main, device, processes = (
        accelerator.is_main_process,
        accelerator.device,
        accelerator.num_processes,
    )
    accumulation = config.accumulation(processes)
    run_dir = Path(config.output_dir)
    recipe, config = config, with_local_sets(config)
    changes, facts, resume = from_main_process(claimed)
    done = step_of(resume) if resume else 0
    if (
        facts.get("state") == "finished"
        and done >= config.train.steps
        and is_exported(run_dir / "final")
    ):
        if main:
            print(
                f"{run_dir} is finished, {done} steps: raise train.steps to train further",
                flush=True,
            )
        return run_dir

    sharing = parallel.Sharing(accelerator, kind, config.train)
    with (
        record_interruption(run_dir, facts, main),
        Progress("setting up", stream=sys.stdout) as progress,
    ):
        run = set_up(config, accelerator, sharing, facts, changes, resume, progress.call)
    run.mirror = mirror
    generators = random_state()  # restored below: set-up draws numbers, as importing rich does
    model, optimizer, batches, row_states = run.model, run.optimizer, run.batches, run.row_states
    open_log = partial(RunLog, run_dir, config.log, steps=config.train.steps, quiet=not main)
    skipped, epochs = batches.skipped(), batches.epochs_read()
    seconds, since = (
        0.0,
        run.at.tokens,
    )  # since the last line of metrics, without validation and saving
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(
            contextlib.closing(Watchdog(config.guard.hang_timeout, accelerator.process_index))
        )
        stack.enter_context(contextlib.closing(batches))
        stack.enter_context(contextlib.closing(run.sums))
        if main:
            if resume and "train.resume" in changes and config.train.resume is not None:
                make_newest(resume)
            stack.enter_context(record_state(run_dir, run.facts, recipe, run.model.config))
        signals.first = partial(note_stop, run)
        stack.push(lambda error, *_: run.leave(error))
        log = open_log(step=run.at.step)
        stack.callback(lambda: log.close())
        announce(log, run, accumulation, changes)
        set_random_state(generators)

        while run.at.step < config.train.steps:
            validate_if_due(run, log, watchdog)
            at, step, began = run.at, run.at.step + 1, time.perf_counter()
            good = at.step - len(at.bad)  # the last good step
            watchdog.beat(f"step {step}, reading data")
            micro_batches, labels = next_step(run, accumulation, log)

            # The loss is the mean over all label tokens of the step, on all processes. A mean of means would
            # give the tokens of short micro-batches more weight.
            loss = torch.zeros((), device=device)
            for i, batch in enumerate(micro_batches):
                watchdog.beat(f"step {step}, forward and backward")
                with parallel.accumulating(run.wrapped, last=i == accumulation - 1):
                    carried = row_states, i
                    part = summed_loss(
                        run.wrapped, batch, device, config.train.z_loss, *carried, sharing.context
                    )
                    part = part / max(1, labels)
                    # DDP takes the mean over the processes.
                    accelerator.backward(run.scaler.scale(part * processes))
                loss += part.detach()
            run.scaler.unscale_(optimizer)
            norm = parallel.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm).item()
            loss, stop = gather_step(run, loss, signals.received)
            run.note_saved()

            overflow = overflowed(run, log, step)
            problem = overflow or run.spikes.judge(loss, norm)
            lr = learning_rate(step, config.train.steps, config.optim.lr, config.schedule)
            if problem is None:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
                optimizer.step()
                at.bad, run.rolled_back_to = [], None
            elif overflow:  # a matter of fp16, not of the step
                at.overflows += 1
                if row_states and not math.isfinite(loss):
                    row_states.forget()
            else:  # no update at all: weights, moments and step counts keep every bit
                at.bad, at.skipped = [*at.bad, problem], at.skipped + 1
                log.event(step, "skipped", reason=problem)
                if row_states:
                    row_states.forget()
            optimizer.zero_grad()
            at.step, at.tokens = step, at.tokens + config.train.tokens_per_step
            run.facts["step"] = step
            took = time.perf_counter() - began
            seconds += took

            end = step == config.train.steps
            saving = stop or end or (is_due(step, config.checkpoint.every, good) and not at.bad)
            # Unsound weights are never saved: they would displace a sound checkpoint.
            unsound = run.saver.unsound(model, optimizer) if saving else None
            if unsound:
                log.event(step, "unsound", reason=unsound)
            if (unsound or len(at.bad) >= config.guard.max_bad_steps) and not stop:
                event = roll_back(run, unsound, good)
                log.close()
                log = open_log(step=run.at.step, keep_events=True)
                log.event(run.at.step + 1, "rollback", **event)
                seconds, since = 0.0, run.at.tokens
                continue

            rate = (at.tokens - since) / seconds
            mfu = rate * run.facts["training_flops_per_token"] / run.facts["peak_flops"]
            values: dict[str, Any] = {"loss": loss, "grad_norm": norm, "lr": lr}
            values |= {"tokens_per_second": rate, "mfu": mfu}
            left = (config.train.steps - step) * config.train.tokens_per_step / rate
            log.advance(step, took, left, **values)
            if problem is None and (end or is_due(step, config.log.every)):
                scale = {"loss_scale": run.scaler.get_scale()} if run.scaler.is_enabled() else {}
                log.write(step=step, tokens=at.tokens, **values, **scale)
                seconds, since = 0.0, at.tokens
                if reason := describe_left(batches.skipped() - skipped):
                    skipped = batches.skipped()
                    only = skipped.keys() == {Left.OVERSIZED.value}
                    log.event(
                        step,
                        "oversized" if only else "left out",
                        reason=reason,
                        documents=skipped.total(),
                    )
            before, epochs = epochs, batches.epochs_read()
            report_epochs(before, epochs, log, step)
            if saving and not unsound:
                if end and not stop:  # no model is written of data that was not compared
                    beat = partial(watchdog.beat, "comparing the data with its sums")
                    finish_sums(run.sums, beat, run.saver.directory)
                watchdog.beat(f"step {step}, saving")
                log.doing("saving")
                run.save(batches.state_dict(), wait=bool(stop or end))
                stop = stop or received_stop(run, signals.received)  # one that came meanwhile
            if stop and (unsound or not end):
                run.saver.wait()  # this save, or an earlier one where nothing was saved now
                saved = f"not saved, {unsound}" if unsound else "saved"
                start = run.checkpoint or "the beginning"
                log.say(f"interrupted: {saved}; the same command resumes from {start}")
                raise SystemExit(128 + stop)

        validate_if_due(run, log, watchdog)
        watchdog.beat("writing the model")
        log.doing("writing the model")
        finish(run, log)
    accelerator.wait_for_everyone()
    return run_dir


def announce(log: RunLog, run: Run, accumulation: int, changes: dict) -> None:
    """Describes the run for people, before the first step."""
    config, facts = run.config, run.facts
    c = config.train
    log.say(
        f"run        {config.output_dir}, seed {config.seed}"
        + (f", resumes from {run.checkpoint.name}" if run.checkpoint else "")
    )
    for key, (old, new) in changes.items():
        note = " (the schedule follows it from here on)" if key == "train.steps" else ""
        if note and run.at.step >= c.steps:
            note = f" (already at step {run.at.step}: nothing is trained, the learning rate did not fall)"
        log.say(f"changed    {key}: {old} → {new}{note}")
    for line in run.batches.changes:
        log.say(f"changed    {line}")
    for line in run.batches.describe_files():
        log.say(f"data       {line}")
    log.say(
        f"model      {run.model.config.model_type}, {facts['parameters']:,} parameters, "
        f"{facts['parameters_without_embeddings']:,} without embeddings"
    )
    log.say(f"optimizer  {config.optim.name}: {describe_groups(run.optimizer.param_groups)}")
    sharers = f"{facts['processes']} process(es)"
    if run.sharing.context:
        sharers = f"{run.sharing.world_size} context(s) of {c.context_parallel} processes, each a part of a row"
    log.say(
        f"step       {c.tokens_per_step:,} tokens = {c.micro_batch_size} rows × {config.data.seq_len} tokens"
        f" × {accumulation} accumulated × {sharers}"
    )
    tokens = (
        run.at.tokens + (c.steps - run.at.step) * c.tokens_per_step
    )  # of other steps before a resume
    log.say(f"steps      {c.steps:,} = {tokens:,} tokens")
    log.say(
        f"device     {facts['device']}, {c.precision}, {'compiled' if facts['compiled'] else 'eager'}"
        f", peak {facts['peak_flops'] / 1e12:.3g} TFLOP/s ({facts['peak']})"
    )
    log.say(f"FLOPs      {facts['training_flops_per_token']:.3g} a token ({facts['flops']})")
    if not log.quiet:
        log.say(f"estimate   {estimate(config, facts, run.model)}")
        log.expect(c.steps - facts["step"], time_left(config, facts))
    if not facts["documents_kept_apart"]:
        log.say(
            "WARNING    this model lets packed documents see one another; run.json is marked accordingly"
        )
    log.doing("compiling, first step" if facts["compiled"] else "first step")


@contextlib.contextmanager
def record_interruption(run_dir: Path, facts: dict, main: bool) -> Iterator[None]:
    """Set-up: if a signal ends it, says so and writes it to run.json. A finished run stays finished."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        if main:
            print("interrupted while setting up: the same command starts again", flush=True)
            if facts.get("state") != "finished":
                write_facts(run_dir, {"step": 0, "saved": 0} | facts | {"state": "interrupted"})
        raise


def note_stop(run: Run) -> None:
    """Writes to run.json that the run was interrupted: a second signal may end it before it has saved.

    A signal's handler calls it, perhaps while run.json is being written: it has a temporary file of its own.
    """
    run.facts["state"] = "interrupted"
    if run.accelerator.is_main_process:
        file = Path(run.config.output_dir) / "run.json"
        part = file.with_name(".tmp-interrupted")
        with contextlib.suppress(OSError):  # the signal counts, whatever the disk does
            part.write_text(json.dumps(run.facts, indent=1) + "\n")
            part.replace(file)


def next_step(run: Run, accumulation: int, log: RunLog) -> tuple[list[dict[str, Tensor]], int]:
    """The micro-batches of the next step, and the step's label tokens on all processes.

    If the data fails on one process, all processes save. That one raises its `InputError`, the others
    SystemExit with the same exit code.
    """
    before = copy.copy(run.batches)  # its position: a batch replaces it and changes none
    micro_batches, failure = take_batches(run.batches, accumulation)
    if run.masking is not None:
        first, rows = run.at.step * accumulation, run.config.train.micro_batch_size
        micro_batches = [
            run.masking(batch, first + i, rows, run.sharing.rank, run.sharing.world_size)
            for i, batch in enumerate(micro_batches)
        ]
    labels = sum(count_labels(batch, run.sharing.context) for batch in micro_batches)
    code = failure.exit_code if failure else 0
    counts = torch.tensor([labels, code, code > 0])
    if run.accelerator.num_processes > 1:  # one process alone needs no synchronisation
        counts = counts.to(run.accelerator.device)
    labels, code, failed = run.accelerator.reduce(counts).tolist()
    if not failed:
        return micro_batches, labels
    if run.at.step > (step_of(run.checkpoint) if run.checkpoint else 0):
        run.save(before.state_dict(), wait=True)
    run.saver.wait()
    if run.checkpoint:
        log.say(f"stopped: saved; the same command resumes from {run.checkpoint}")
    raise failure or SystemExit(code // failed)


def take_batches(
    batches: Iterator[dict[str, Tensor]], count: int
) -> tuple[list[dict[str, Tensor]], InputError | None]:
    """The next `count` micro-batches; if the data fails, those before that, and the error."""
    taken = []
    try:
        for _ in range(count):
            taken.append(next(batches))
    except InputError as error:
        return taken, error
    return taken, None


def report_epochs(before: dict[str, float], now: dict[str, float], log: RunLog, step: int) -> None:
    """Logs the sources that were read to their end, at each doubling of their whole epochs."""
    for name, count in ((name, int(epochs)) for name, epochs in now.items()):
        if count.bit_length() > int(before[name]).bit_length():
            times = "once" if count == 1 else f"{count} times"
            reason = f"{name or 'the corpus'} was read {times} and begins again"
            log.event(step, "epoch", reason=reason, source=name, epochs=count)


def gather_step(run: Run, loss: Tensor, signals: list[int]) -> tuple[float, int | None]:
    """The loss summed over all processes, and the signal to stop for if any process received one.

    One collective for all of it. Raises on all processes if data is damaged or an asynchronous save failed.
    """
    seen = [float(signum in signals) for signum in SIGNALS.values()]
    seen += [
        float(not run.sums.finished),
        float(run.sums.problem is not None),
        float(run.saver.failed),
    ]
    totals = torch.stack([loss, *torch.tensor(seen, device=loss.device)])
    total, *received, comparing, damaged, unsaved = run.accelerator.reduce(totals).tolist()
    if damaged:
        run.saver.wait()
        refuse_damage(run.sums, run.saver.directory)
    if unsaved:
        run.saver.wait()
    run.sums.settled = not comparing
    return total, first_of(received)


def received_stop(run: Run, signals: list[int]) -> int | None:
    """The signal to stop for if any process received one. All processes must call it."""
    seen = torch.tensor([signum in signals for signum in SIGNALS.values()]).long()
    return first_of(run.accelerator.reduce(seen.to(run.accelerator.device)).tolist())


def first_of(received: list[float]) -> int | None:
    """The first of `SIGNALS` that any process received. received: how many did, of each."""
    return next((n for n, count in zip(SIGNALS.values(), received, strict=True) if count), None)


def overflowed(run: Run, log: RunLog, step: int) -> str | None:
    """Lets fp16's loss scale follow the gradients. Says why the step must be left out if they overflowed.
    None if they did not, or if no lower scale may help: the guard then judges the step."""
    changed = follow_gradients(run.scaler)
    if changed is None:
        return None
    before, lowered = changed
    if lowered < LEAST_SCALE:
        if not run.at.bad:
            log.say(
                f"WARNING    gradients overflow fp16 at loss scale {before:g}: set train.precision=fp32"
            )
        return None
    reason = f"{before:g} → {lowered:g}, gradients overflowed fp16"
    log.event(step, "loss scale", reason=reason, scale=lowered)
    return reason


def is_due(step: int, every: int | None, after: int | None = None) -> bool:
    """Whether a multiple of `every` lies behind step `after`, by default the one before, and up to `step`."""
    return bool(every) and step // every > (step - 1 if after is None else after) // every


def roll_back(run: Run, unsound: str | None, good: int) -> dict[str, Any]:
    """Loads the last good checkpoint. The data is not rewound: the rows of the bad steps are not read again.
    good: the last good step. Returns the event for the log. Raises `InputError` if there is no checkpoint or
    it did not help."""
    step, bad = run.at.step, run.at.bad
    why = unsound or f"{len(bad)} steps in a row were left out ({bad[-1]})"
    run.saver.wait()
    find = partial(last_good, run.saver.directory)
    # If no step after the last rollback was good, an older checkpoint is taken.
    run.load(
        find(suspect=run.rolled_back_to, reason=why) if run.accelerator.is_main_process else None,
        find,
    )
    back = run.checkpoint
    if back is None and good and run.saver.unsound(run.model, run.optimizer) is None:
        run.save(run.batches.state_dict(), wait=True)  # bad steps changed no weight
    if back is None or run.rollbacks[back] == run.config.guard.max_rollbacks:
        raise InputError(
            rollback_message(step, why, back, run.checkpoint if back is None else None)
        )
    run.rollbacks[back] += 1
    run.rolled_back_to = back
    reason = f"{why}: back to {back.name}, on past their data"
    return {"reason": reason, "to": run.at.step, "at": step, "reasons": bad or [why]}


def validate_if_due(run: Run, log: RunLog, watchdog: Watchdog) -> None:
    """Validates the model, and writes the result to the log, if this step's is due and not yet there. A run
    that ended in between makes it up when it resumes, from this step or from an earlier one."""
    step, steps, every = run.at.step, run.config.train.steps, run.config.validation.every
    if not run.validation or not step or not (step >= steps or is_due(step, every)):
        return
    file = Path(run.config.output_dir) / "metrics.jsonl"
    if from_main_process(run.accelerator.is_main_process and is_validated(file, step)):
        return
    log.doing("validating")
    values = validate(
        run.accelerator,
        run.model,
        run.validation,
        run.text_bytes,
        run.sharing.context,
        lambda: watchdog.beat(f"step {step}, validation"),
    )
    loss = values["val_loss"]
    values |= negative_share(run.model, next(iter(run.validation.values()))[0]["input_ids"])
    log.write(step=step, tokens=run.at.tokens, **values)
    log.say(f"validation at step {step}: loss {loss:.4f}, {describe_perplexity(values)}")
    if not math.isfinite(loss):
        log.say("WARNING    the validation loss is not finite: this model is of no use")
    log.doing("step")


def is_validated(file: Path, step: int) -> bool:
    """Whether the metrics.jsonl `file`, whose last lines are those of `step`, has its validation."""
    newest = itertools.takewhile(lambda line: line.get("step", 0) >= step, last_metrics(file))
    return any("val_loss" in line for line in newest)


def finish(run: Run, log: RunLog) -> None:
    """Exports the final model. Raises `NothingTrained` if every step was skipped."""
    at, run_dir = run.at, Path(run.config.output_dir)
    if at.skipped + at.overflows >= at.step:
        raise NothingTrained(
            f"{run_dir}: all {at.step} steps were left out; metrics.jsonl says why of each"
        )
    run.facts |= {"state": "finished", "step": at.step}
    if run.accelerator.is_main_process:
        checkpoint, config = run.saver.directory / f"step-{at.step}", run.model.config
        export(checkpoint, run_dir / "final", run.facts, replace=True, config=config)
    log.say(f"model: {run_dir / 'final'}")
