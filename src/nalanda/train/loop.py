"""The training loop: `train` opens the run, `train_together` sets it up, `train_steps` has the main loop.

The functions that they call stand below them, in the order of a run.
"""

import contextlib
import copy
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from accelerate import Accelerator
from nalanda_kernels import watch

from nalanda.common.errors import Diverged, NothingTrained
from nalanda.common.progress import Progress
from nalanda.common.text import size
from nalanda.config.schema import RunConfig, Stage
from nalanda.data.stored_sets import with_local_sets
from nalanda.model.executors import recurrences
from nalanda.train import parallel
from nalanda.train.build import finish_sums, set_up
from nalanda.train.checkpoint import random_state, set_random_state
from nalanda.train.checkpoint_dir import step_of
from nalanda.train.estimate import time_left
from nalanda.train.export import export
from nalanda.train.guards import Interruptions, Watchdog
from nalanda.train.launch import advise_on_threads, from_main_process, launch
from nalanda.train.log import FORKED, RunLog, describe_perplexity, last_metrics, write_facts
from nalanda.train.loss import mixer_metrics, validate
from nalanda.train.meters import RankTimes, ReadingLog, TrainingSpeed
from nalanda.train.mirror import Mirror, mirrored, staged
from nalanda.train.needs import checkpoint_disk, explain_out_of_memory
from nalanda.train.optim import describe_groups
from nalanda.train.profile import profiled
from nalanda.train.run import Run, stage_at
from nalanda.train.run_dir import (
    claim,
    is_exported,
    keep_warmup,
    last_good,
    lock_run_dir,
    make_newest,
    record_recipe,
    record_state,
    refuse_other_data,
    rollback_message,
)
from nalanda.train.step import Judgement, Step, apply, forward_backward, judge, received_stop


def train(config: RunConfig, profile: int = 0) -> Path:
    """Trains the recipe `config`, from the start or from the newest checkpoint; returns `output_dir`.

    Every process of a launch calls it. The run's folder then holds config.yaml, run.json (facts about the run
    and its state), metrics.jsonl, tensorboard/, tokenizer/ and checkpoints/step-N/. At the end it also holds
    final/, a transformers model folder.

    profile: steps that torch's profiler traces, see `profiled`.

    Raises:
        InputError: the settings, the data or the folder cannot work, or training diverges. If the data
            fails, a checkpoint of the last step is saved first.
        NothingTrained: every step was skipped.
        SystemExit: 128 + signal after a signal of `guards.SIGNALS` on any process. The step is finished and a
            checkpoint saved; the same command resumes from it. While the run is set up, it ends at once. So
            does a later signal of the same kind (`guards.Interruptions`).
    """
    recipe = copy.deepcopy(config)  # a resume gives it the warm-up of the run
    # Callers from Python come without `load_config`. The checks need neither processes nor a folder.
    launched = parallel.as_launched(recipe.train, os.environ)
    replace(recipe, train=launched).check(training=True)
    transformers.logging.disable_progress_bar()  # saving a few files needs none

    recipe, mirror = staged(recipe)
    config = replace(recipe, train=launched)
    with explain_out_of_memory(config):
        accelerator = launch(config)
        with Interruptions() as signals:
            run_dir, main = config.run_dir, accelerator.is_main_process
            if mirror:
                mirror.meet(accelerator)
            with contextlib.ExitStack() as stack:
                # One process locks the folder, or that of its machine.
                if mirror.copies if mirror else main:
                    stack.enter_context(lock_run_dir(run_dir, config))
                stack.enter_context(mirrored(mirror))
                return train_together(recipe, config, accelerator, signals, profile, mirror)


def train_together(
    recipe: RunConfig,
    config: RunConfig,
    accelerator: Accelerator,
    signals: Interruptions,
    profile: int,
    mirror: Mirror | None,
) -> Path:
    """Sets the run up and trains it, on every process of the launch. The folder is locked.

    recipe: as it was written, for config.yaml. config: as it was launched. profile: of `train`. mirror: of a run in a
    store.
    """
    main, run_dir = accelerator.is_main_process, config.run_dir
    # Refuses a number of processes that cannot share a step.
    for stage in config.in_stages():
        with stage.named_in_errors():
            stage.config.accumulation(accelerator.num_processes)

    config = with_precision(config, accelerator)
    # The main process claims the folder. It tells the others the settings that changed, the contents of run.json, and
    # the checkpoint to resume from.
    changes, facts, resume = from_main_process(claim(run_dir, recipe) if main else None)
    if resume:
        keep_warmup(config, changes, facts)
        name_precision(config, facts, changes)
    if from_main_process(is_finished(config, facts, resume)):
        refuse_other_data(run_dir, changes)
        if main:
            done = f"{run_dir} is finished, {step_of(resume)} steps"
            unused = f" ({', '.join(changes)} not used)" if changes else ""
            print(f"{done}{unused}: raise train.steps to train further", flush=True)
        return run_dir

    # The run reads local copies of a store's token sets.
    stages = [replace(x, config=with_local_sets(x.config)) for x in config.in_stages()]
    watchdog = Watchdog(config.guard.hang_timeout, accelerator.process_index)
    with contextlib.closing(watchdog):
        with record_interruption(run_dir, facts, main), show_set_up(watchdog) as say:
            run = set_up(config, stages, accelerator, resume, mirror, say)
        # Those of earlier starts, which run.json keeps, and those of this one.
        now = [{"step": run.at.step, **changes}] if changes else []
        run.facts["changes"] = [*facts.get("changes", []), *now]
        forks = run.checkpoint and run.checkpoint.parent != run.saver.directory
        if before := run.at.tokens if forks else facts.get(FORKED):
            run.facts[FORKED] = before
        run.facts["recipe_warmup"] = config.schedule.recipe_warmup
        run.signals, run.watchdog = signals, watchdog
        if main and accelerator.device.type == "cpu":
            advise_on_threads(config, accelerator.num_processes)
        train_steps(run, recipe, changes, profile)
    accelerator.wait_for_everyone()
    return run_dir


def train_steps(run: Run, recipe: RunConfig, changes: dict, profile: int) -> None:
    """Trains a run that is set up, and writes its model.

    changes: as `claim` returns them. profile: of `train`.
    """
    generators = random_state()

    with watched(run, recipe, changes), profiled(run, profile) as end_profiled_step:
        announce(run, changes)
        # Opening the log drew random numbers, as importing rich does.
        set_random_state(generators)

        while run.at.step < run.config.train.steps:
            validate_if_due(run)  # after the step before, if there was one
            enter_stage_if_due(run)
            step = forward_backward(run)  # loss and norm over all processes; clips gradients
            verdict = judge(run, step)  # good, skip or overflow, with a reason
            apply(run, step, verdict)  # updates the weights of a good step, counts every step
            unsound = check_soundness(run, step)  # None, or why no checkpoint may be saved
            if must_roll_back(run, step, unsound):
                roll_back(run, step, unsound)
            else:
                report(run, step, verdict)
                save_if_due(run, step, unsound)
                leave_if_asked(run, step, unsound)
            end_profiled_step()

        validate_if_due(run)
        finish(run)


# ------------------------------ set-up


def with_precision(config: RunConfig, accelerator: Accelerator) -> RunConfig:
    """The settings, with the precision that `launch` took for `train.precision: auto`."""
    if config.train.precision != "auto":
        return config
    precision: Any = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    return replace(config, train=replace(config.train, precision=precision))


def name_precision(config: RunConfig, facts: dict, changes: dict[str, list]) -> None:
    """Adds a changed precision to `changes`: on another machine `train.precision: auto` may take another."""
    before = facts.get("precision", config.train.precision)
    if before != config.train.precision:
        changes["train.precision"] = [before, config.train.precision]


def is_finished(config: RunConfig, facts: dict, resume: Path | None) -> bool:
    """Whether the run in the folder has made all its steps and written its model."""
    return (
        facts.get("state") == "finished"
        and resume is not None
        and step_of(resume) >= config.train.steps
        and is_exported(config.run_dir / "final")
    )


@contextlib.contextmanager
def record_interruption(run_dir: Path, facts: dict, main: bool) -> Iterator[None]:
    """Surrounds the set-up. A signal that ends it is printed and written to run.json, but for a finished run."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        if main:
            print("interrupted while setting up: the same command starts again", flush=True)
            if facts.get("state") != "finished":
                # Without those of an earlier end.
                ends = ("reason", "diverged", "ended")
                rest = {key: facts[key] for key in facts if key not in ends}
                write_facts(run_dir, {"step": 0, "saved": 0} | rest | {"state": "interrupted"})
        raise


@contextlib.contextmanager
def show_set_up(watchdog: Watchdog) -> Iterator[Callable[[str], None]]:
    """Surrounds the set-up with progress and the watchdog. Yields a function that takes the current step's name."""
    with Progress("setting up", stream=sys.stdout) as progress, watchdog.long_work():

        def say(what: str) -> None:
            progress.call(what)
            watchdog.beat(f"setting up, {what}")

        yield say


# ------------------------------ around the steps


@contextlib.contextmanager
def watched(run: Run, recipe: RunConfig, changes: dict) -> Iterator[None]:
    """Surrounds the steps: opens the log, keeps the run's state in run.json, and lets a signal wait for the end of
    the step."""
    # The end goes from bottom to top: the log closes, a running save ends, run.json gets the state. The
    # watchdog stays on, since a save may hang.
    config, main = run.config, run.accelerator.is_main_process
    run_dir = config.run_dir
    run.speed, run.reading = TrainingSpeed(run.at.tokens), ReadingLog(run.batches)
    run.rank_times = RankTimes(parallel.units(run.model), run.accelerator)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: run.batches.close())  # those of the stage at that time
        stack.enter_context(contextlib.closing(run.sums))

        if main:
            chosen = "train.resume" in changes and config.train.resume is not None
            # A checkpoint of another run stays as it is.
            if chosen and run.checkpoint and run.checkpoint.parent == run.saver.directory:
                make_newest(run.checkpoint)
            record_recipe(run_dir, recipe, run.model.config)
            stack.enter_context(record_state(run_dir, run.facts))
        if run.mirror is not None:
            run.mirror.clear_remains()
        # From here on a signal lets the step end; before, it ended the process at once.
        run.signals.first = partial(note_stop, run)
        stack.push(lambda error, *_: run.leave(error))

        # The first step notes which backends serve its ops; `say_executors` ends the watch.
        run.watching = stack.enter_context(contextlib.ExitStack())
        run.attempts = run.watching.enter_context(watch())
        run.log = open_log(run)
        stack.callback(lambda: run.log.close())  # the log at that time: a rollback opens another
        yield


def note_stop(run: Run) -> None:
    """Writes to run.json that the run was interrupted: a second signal may end it before it has saved.

    The handler of a signal calls it, perhaps while run.json is being written. So its temporary file has another
    name.
    """
    if run.facts["state"] == "finished":
        return  # only the model is still to be written
    run.facts["state"] = "interrupted"
    if run.accelerator.is_main_process:
        file = run.config.run_dir / "run.json"
        temporary = file.with_name(".tmp-interrupted")
        with contextlib.suppress(OSError):  # the signal counts, whatever the disk does
            temporary.write_text(json.dumps(run.facts, indent=1) + "\n")
            temporary.replace(file)


def open_log(run: Run, keep_events: bool = False) -> RunLog:
    """Opens the log at the run's step. keep_events: of `RunLog`."""
    return RunLog(
        run.config.run_dir,
        run.config.log,
        step=run.at.step,
        steps=run.config.train.steps,
        quiet=not run.accelerator.is_main_process,
        keep_events=keep_events,
    )


def announce(run: Run, changes: dict) -> None:
    """Prints the header: lines that describe the run, before the first step."""
    config, facts, say = run.config, run.facts, run.log.say
    resumed = f", resumes from {run.checkpoint.name}" if run.checkpoint else ""
    say(f"run        {config.output_dir}, seed {config.seed}{resumed}")
    for line in [*changed_settings(run, changes), *run.batches.changes]:
        say(f"changed    {line}")
    for line in run.batches.describe_files():
        say(f"data       {line}")
    say(
        f"model      {run.model.config.model_type}, {facts['parameters']:,} parameters, "
        f"{facts['parameters_without_embeddings']:,} without embeddings"
    )
    say(f"optimizer  {config.optim.name}: {describe_groups(run.optimizer.param_groups)}")

    train = config.train
    sharers = f"{facts['processes']} process(es)"
    if run.sharing.context:
        contexts = f"{run.sharing.world_size} context(s) of {train.context_parallel} processes"
        sharers = f"{contexts}, each a part of a row"
    say(
        f"step       {train.tokens_per_step:,} tokens = {train.micro_batch_size} rows × "
        f"{config.data.seq_len} tokens × {run.accumulation} accumulated × {sharers}"
    )
    # Steps before a resume may have had other sizes.
    tokens = run.at.tokens + sum(stage.tokens_after(run.at.step) for stage in run.stages)
    say(f"steps      {train.steps:,} = {tokens:,} tokens")
    for stage in run.stages[1:]:
        say(f"stage      {stage.name}, after step {stage.begin:,}: {stage.changes}")

    say(
        f"device     {facts['device']}, {train.precision}, {'compiled' if facts['compiled'] else 'eager'}"
        f", peak {facts['peak_flops'] / 1e12:.3g} TFLOP/s ({facts['peak']})"
    )
    say(f"FLOPs      {facts['training_flops_per_token']:.3g} a token ({facts['flops']})")
    if not run.log.quiet:
        say(f"memory     {run.needs.describe_memory()}")
        free = shutil.disk_usage(checkpoint_disk(config.run_dir)).free
        say(f"disk       {run.needs.files.describe()}; {size(free)} free")
        shortest = time_left(run.stages, facts)[0]
        behind_next = time_left(run.stages, facts | {"step": facts["step"] + 1})[0]
        run.log.expect(train.steps - facts["step"], shortest, shortest - behind_next)
    if not facts["documents_kept_apart"]:
        say(
            "WARNING    this model lets packed documents see one another; run.json is marked accordingly"
        )
    run.log.doing("compiling, first step" if facts["compiled"] else "first step")


def changed_settings(run: Run, changes: dict) -> Iterator[str]:
    """Describes the settings that changed since the run stopped, `{key: [old, new]}`."""
    for key, (old, new) in changes.items():
        note = ""
        if key == "train.steps":
            note = " (the schedule follows it from here on)"
            if run.at.step >= run.config.train.steps:
                note = f" (already at step {run.at.step}: nothing is trained, the learning rate did not fall)"
        if key == "train.ema" and set(new) - set(old):
            note = f" (a new average begins with the weights of step {run.at.step})"
        yield f"{key}: {old} → {new}{note}"

    schedule = run.config.schedule
    key, old = "schedule.warmup_steps", schedule.recipe_warmup
    if old not in (None, schedule.warmup_steps) and not run.checkpoint:
        yield f"{key}: {old} → {schedule.warmup_steps} (in proportion to train.steps)"


# ------------------------------ in the main loop


def validate_if_due(run: Run) -> None:
    """Validates the model and logs the result, if validation is due at this step and not yet in the log.

    A run that stops between saving and validating does it when it resumes.
    """
    step, every = run.at.step, run.config.validation.every
    if not run.validation or not step or not (step >= run.stage.end or is_due(step, every)):
        return
    # Only the main process has the log; all must agree, since validation is a collective.
    file = run.config.run_dir / "metrics.jsonl"
    if from_main_process(run.accelerator.is_main_process and is_validated(file, step)):
        return

    run.log.doing("validating")
    values = validate(
        run.accelerator,
        run.model,
        run.validation,
        run.text_bytes,
        run.sharing.context,
        lambda: run.watchdog.beat(f"step {step}, validation"),
    )
    loss = values["val_loss"]
    # On all processes: under FSDP2 a forward pass gathers weights.
    values |= mixer_metrics(run.model, next(iter(run.validation.values()))[0]["input_ids"])

    run.log.write(step=step, tokens=run.at.tokens, **values)
    run.log.say(f"validation at step {step}: loss {loss:.4f}, {describe_perplexity(values)}")
    if not math.isfinite(loss):
        run.log.say("WARNING    the validation loss is not finite: this model is of no use")
    run.log.doing("step")


def enter_stage_if_due(run: Run) -> None:
    """Begins the next stage, if the one under way has made its last step."""
    step = run.at.step
    if step < run.stage.end:
        return
    stage = run.stages[run.stages.index(run.stage) + 1]
    change_stage(run, stage)
    # Other data have another loss, which is no spike.
    run.spikes.load_state_dict({})
    # Of its first step: a resume from the checkpoint before it enters the stage again.
    reason = f"{stage.name}: {stage.changes}"
    run.log.event(step + 1, "stage", reason=reason, name=stage.name, tokens=run.at.tokens)


def change_stage(run: Run, stage: Stage) -> None:
    """Goes on with the settings and the data of another stage."""
    run.enter(stage)
    run.speed.restart(run.at.tokens)
    run.reading = ReadingLog(run.batches)


def is_validated(file: Path, step: int) -> bool:
    """Whether the metrics.jsonl `file`, whose last lines are those of `step`, has its validation."""
    newest = itertools.takewhile(lambda line: line["step"] >= step, last_metrics(file))
    return any("val_loss" in line for line in newest)


def is_due(step: int, every: int | None, after: int | None = None) -> bool:
    """Whether (after, step] holds a multiple of `every`; `after` defaults to step − 1."""
    return bool(every) and step // every > (step - 1 if after is None else after) // every


def is_last(run: Run, step: Step) -> bool:
    return step.number == run.config.train.steps


def save_is_due(run: Run, step: Step) -> bool:
    """Whether a checkpoint is due after a step. One that falls on a bad step waits for the next good one."""
    if step.stop or step.number == run.stage.end:
        return True
    return is_due(step.number, run.config.checkpoint.every, step.settled) and not run.at.bad


def check_soundness(run: Run, step: Step) -> str | None:
    """If a checkpoint is due, returns why the weights or moments must not be saved: it would displace a sound one.

    Returns None if they are sound, or none is due.
    """
    # A collective: `save_is_due` is the same on all processes.
    return run.find_unsound() if save_is_due(run, step) else None


def must_roll_back(run: Run, step: Step, unsound: str | None) -> bool:
    """Whether the run goes back to a checkpoint: after too many bad steps in a row, or for unsound weights.

    A run that was asked to stop does not.
    """
    # The same on all processes, since loading a checkpoint needs all of them.
    too_many = len(run.at.bad) >= run.config.guard.max_bad_steps
    return (too_many or unsound is not None) and not step.stop


def roll_back(run: Run, step: Step, unsound: str | None) -> None:
    """Loads the last good checkpoint. The data is not rewound: the rows of the bad steps are not read again. Those
    of an earlier stage are, if the run goes back to it.

    Raises:
        InputError: there is no checkpoint, or it did not help.
    """
    bad = run.at.bad
    why = unsound or f"{len(bad)} steps in a row were left out ({bad[-1]})"
    # The save under way may be the checkpoint to go back to.
    run.saver.wait()
    run.put_together()

    # If no step after the last rollback was good, an older checkpoint is taken.
    find = partial(last_good, run.saver.directory, complete=run.complete)
    main = run.accelerator.is_main_process
    target = find(suspect=run.rolled_back_to, reason=why) if main else None
    data_state = run.load(target, find)
    go_back_to_stage(run, data_state)
    if run.carried_states:
        # They come from weights that are undone, and the rows go on behind the checkpoint's position.
        run.carried_states.forget()
    back = run.checkpoint

    # Without a checkpoint the run ends. It saves its weights, which are those of the last good step.
    if back is None and step.settled and run.saver.unsound(run.model, run.optimizer) is None:
        run.save(run.batches.state_dict(), wait=True)
    # A checkpoint is taken at most `max_rollbacks` times: its weights may lead to the same steps again.
    if back is None or run.rollbacks[back] == run.config.guard.max_rollbacks:
        saved = run.checkpoint if back is None else None
        raise Diverged(rollback_message(step.number, why, back, saved))
    run.rollbacks[back] += 1
    run.rolled_back_to = back
    run.facts["step"] = run.at.step
    if main:
        write_facts(run.config.run_dir, run.facts)

    # A new log: the lines of the steps that are undone go, their events stay.
    run.log.close()
    run.log = open_log(run, keep_events=True)
    run.log.event(
        run.at.step + 1,
        "rollback",
        reason=f"{why}: went back to {back.name}; the rows of the bad steps are skipped",
        to=run.at.step,
        at=step.number,
        reasons=bad or [why],
    )
    run.speed.restart(run.at.tokens)


def go_back_to_stage(run: Run, data_state: dict | None) -> None:
    """Enters the stage of the checkpoint of a rollback, if it is an earlier one. data_state: of that checkpoint."""
    if data_state is None or run.at.step > run.stage.begin or not run.stage.begin:
        return
    if run.at.step == run.stage.begin:
        run.spikes.load_state_dict({})  # its losses are of the stage before
        return
    left = run.stage
    change_stage(run, stage_at(run.stages, run.at.step))
    if run.stage.order != left.order:
        position = {k: v for k, v in data_state.items() if k not in ("identity", "files")}
        run.batches.load_state_dict(position, checked=True)


def report(run: Run, step: Step, verdict: Judgement) -> None:
    """Moves the progress bar. Writes a line of metrics every `log.every` steps, if the step is good."""
    config, tokens, rate = run.config, run.at.tokens, run.speed.rate(run.at.tokens)
    # MFU: the share of all devices' peak that training FLOPs reach.
    values: dict[str, Any] = {
        "loss": step.loss,
        "grad_norm": step.norm,
        "lr": step.lr,
        "tokens_per_second": rate,
        "mfu": rate * run.facts["training_flops_per_token"] / run.facts["peak_flops"],
    }
    if run.facts["executors"] is None:  # the first step of this launch
        say_executors(run)

    # Validation and saving are not in the rate, so the real time is a little longer.
    tokens_left = sum(stage.tokens_after(step.number) for stage in run.stages)
    run.log.advance(step.number, run.speed.last_step, tokens_left / rate, **values)

    if verdict.kind == "good" and (is_last(run, step) or is_due(step.number, config.log.every)):
        if run.scaler.is_enabled():
            values["loss_scale"] = run.scaler.get_scale()
        if run.teacher:
            values["kl"] = run.teacher.mean_divergence(run.accelerator)
        values |= run.rank_times.report(run.log, step.number, run.speed.last_step)
        run.log.write(step=step.number, tokens=tokens, **values)
        run.speed.restart(tokens)
        run.reading.report_left_out(run.log, step.number)
    run.reading.report_epochs(run.log, step.number)


def say_executors(run: Run) -> None:
    """Says which backend computes each recurrence, writes it to run.json, and ends the watch."""
    run.watching.close()
    run.facts["executors"] = executors = recurrences(run.attempts)
    if executors:
        run.log.say("layers     " + ", ".join(f"{op} by {x}" for op, x in executors.items()))


def save_if_due(run: Run, step: Step, unsound: str | None) -> None:
    """Saves a checkpoint of sound weights. A signal that came meanwhile is put into `step.stop`."""
    if unsound or not save_is_due(run, step):
        return
    last = is_last(run, step)
    if last and not step.stop:  # the model is written only once the data was compared
        beat = partial(run.watchdog.beat, "comparing the data with its sums")
        finish_sums(run.sums, beat, run.saver.directory)
    run.watchdog.beat(f"step {step.number}, saving")
    run.log.doing("saving")
    # A run that ends here has nothing to compute beside the save.
    with run.watchdog.long_work():
        run.save(run.batches.state_dict(), wait=bool(step.stop or last))
    # A collective: `step.stop` is the same on all processes, so all or none call it.
    step.stop = step.stop or received_stop(run)


def leave_if_asked(run: Run, step: Step, unsound: str | None) -> None:
    """Ends the run if a signal asks for it. A run that has saved its last step finishes instead.

    Raises:
        SystemExit: 128 + signal.
    """
    if not step.stop or (is_last(run, step) and not unsound):
        return
    run.saver.wait()  # this save, or an earlier one where nothing was saved now
    saved = f"not saved, {unsound}" if unsound else "saved"
    start = run.checkpoint or "the beginning"
    run.log.say(f"interrupted: {saved}; the same command resumes from {start}")
    raise SystemExit(128 + step.stop)


# ------------------------------ the end


def finish(run: Run) -> None:
    """Exports the final model. Raises `NothingTrained` if every step was skipped."""
    at, run_dir = run.at, run.config.run_dir
    run.watchdog.beat("writing the model")
    run.log.doing("writing the model")
    if at.skipped + at.overflows >= at.step:
        raise NothingTrained(
            f"{run_dir}: all {at.step} steps were left out; metrics.jsonl says why of each"
        )
    run.facts |= {"state": "finished", "step": at.step}
    run.put_together()
    if run.accelerator.is_main_process:
        checkpoint, config = run.saver.directory / f"step-{at.step}", run.model.config
        with run.watchdog.long_work():
            run.complete(checkpoint)
            # `final` comes last: where it is, all are.
            for name in (*run.averages.tensors(), None):
                out = run_dir / "-".join(filter(None, ("final", name)))
                export(checkpoint, out, run.facts, replace=True, config=config, average=name)
    run.log.say(f"model: {run_dir / 'final'}")
