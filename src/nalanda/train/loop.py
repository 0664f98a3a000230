"""The training loop. `train` reads from top to bottom; what it calls stands below it, in that order."""

import contextlib
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from nalanda.common.errors import InputError, NothingTrained
from nalanda.config.schema import RunConfig
from nalanda.data.offline import use_mirror
from nalanda.data.tokenizer import build_tokenizer, is_whole, save_tokenizer
from nalanda.train import checkpoint, guards, memory, parallel
from nalanda.train import log as metrics
from nalanda.train import row_states as carry
from nalanda.train.build import (
    build_model,
    content_hashes,
    finish_sums,
    from_main_process,
    launch,
    open_batches,
    start_sums,
)
from nalanda.train.checkpoint_dir import checkpoint_folders, latest_checkpoint, mark_unsound, step_of
from nalanda.train.checks import check_causal, keeps_documents_apart
from nalanda.train.estimate import estimate, time_left
from nalanda.train.export import export
from nalanda.train.flops import flops_per_token, peak_flops
from nalanda.train.log import RunLog
from nalanda.train.loss import (
    count_labels,
    describe_perplexity,
    negative_share,
    perplexity_of,
    summed_loss,
    validate,
)
from nalanda.train.optim import build_optimizer, describe_groups, learning_rate
from nalanda.train.run_dir import (
    claim,
    is_exported,
    last_good,
    lock_run_dir,
    no_checkpoint_message,
    record_state,
    rollback_message,
)


def train(config: RunConfig) -> Path:
    """Trains what `config` says, from the start or from where `output_dir` stopped; returns `output_dir`.

    Every process of a launch calls it. The run's folder then holds config.yaml, run.json (what is known
    about the run, its state among it), metrics.jsonl, tensorboard/, tokenizer/, checkpoints/step-N/ and, at
    the end, final/: a model folder as transformers has them.

    Raises:
        InputError: the settings, the data or the folder cannot work, or training diverges. Where it is the
            data that fails, a checkpoint of the last step was saved.
        NothingTrained: every step was left out.
        SystemExit: 128 + signal after a SIGTERM, SIGINT or SIGUSR1 on any process: the step was finished, a
            checkpoint saved, and the same command goes on from there. A second signal ends the process.
    """
    config.check()
    transformers.logging.disable_progress_bar()  # of saving a few files; the run has its own
    sharing = parallel.choose_parallel(config.train.parallel, os.environ)
    with memory.explain_out_of_memory(config):
        accelerator = launch(config)
        if not accelerator.is_main_process:
            return _train(config, accelerator, sharing, None)
        with lock_run_dir(Path(config.output_dir)):
            return _train(config, accelerator, sharing, claim(Path(config.output_dir), config))


def _train(config: RunConfig, accelerator: Accelerator, sharing: parallel.Kind, claimed: Any) -> Path:
    """`train`, once the processes are there and the folder is held. claimed: the main one's from `claim`."""
    main, rank, processes = accelerator.is_main_process, accelerator.process_index, accelerator.num_processes
    accumulation = config.accumulation(processes)
    run_dir = Path(config.output_dir)
    config, (changes, facts, resume) = use_mirror(config), from_main_process(claimed)
    done = step_of(resume) if resume else 0
    if facts.get("state") == "finished" and done >= config.train.steps and is_exported(run_dir / "final"):
        if main:
            print(f"{run_dir} is finished, {done} steps: raise train.steps to go on", flush=True)
        return run_dir

    with accelerator.main_process_first():
        tokenizer = build_tokenizer(config.tokenizer, config.data, run_dir / "tokenizer")
        if main and not is_whole(run_dir / "tokenizer"):
            save_tokenizer(tokenizer, run_dir / "tokenizer")
    batches, validation = open_batches(config, tokenizer, rank, processes)
    contents = content_hashes(config, batches, bool(validation)) if main else None
    batches.contents = from_main_process(contents)  # one process reads the files' contents
    sums = start_sums(config, rank, processes)
    if config.data.verify == "sums":
        finish_sums(sums)

    set_seed(config.seed)
    # On a CPU weights, gradients and moments come to lie beside each other, one moment at the least.
    each = 12 if accelerator.device.type == "cpu" and sharing == "ddp" else 4
    model = build_model(config, tokenizer, weights=resume is None, each=each)
    flops, flops_source = flops_per_token(model, config.data.seq_len)
    build = partial(build_optimizer, model, config.optim)
    wrapped, optimizer = parallel.parallelize(accelerator, model, sharing, config.train, build)
    set_seed(config.seed, device_specific=True)
    check_causal(accelerator, model)
    kept_apart = keeps_documents_apart(accelerator, model)
    peak, peak_source = peak_flops(accelerator.device, config.train.precision)
    peak = accelerator.reduce(torch.tensor(peak, device=accelerator.device)).item()

    at, spikes, states = TrainerState(), guards.SpikeDetector(config.guard), None
    if config.data.long_documents == "carry":
        carry.check(model)
        states = carry.RowStates()
    saver = checkpoint.Saver(run_dir / "checkpoints", config.checkpoint, rank=rank, processes=processes)

    def load(path: Path | None, other: Callable[[], Path | None]) -> tuple[Path | None, dict, dict]:
        """Loads `path`, or if its weights or moments are spoilt marks it and loads what `other` then finds.
        Returns the path that was loaded, its trainer state and its data state; None where nothing is left."""
        while path := from_main_process(path):
            state, data_state = checkpoint.load(path, model=model, optimizer=optimizer, rank=rank)
            problem = saver.unsound(model, optimizer)
            if problem is None:
                return path, state, data_state
            if main:
                print(f"{path}: unsound, passed over: {problem}", flush=True)
                mark_unsound(path, problem)
                path = other()
        return None, {}, {}

    if resume:
        resume, state, data_state = load(resume, partial(latest_checkpoint, saver.directory))
        if resume is None:
            raise InputError(no_checkpoint_message(run_dir))
        batches.load_state_dict(data_state)
        at = restored(state, spikes)
        if states:
            own = carry.slots_of(rank, processes, accumulation, config.train.micro_batch_size)
            states.load(carry.read_slots(resume.glob("lanes-*"), own), own, accelerator.device)

    random_state = checkpoint.random_state()  # the loop's; what lies between may draw, as importing rich does

    def save(data_state: dict) -> Path:
        finish_sums(sums, lambda: watch.beat("comparing the data with its sums"))
        trainer_state = {**asdict(at), "spikes": spikes.state_dict(), "processes": processes}
        parts = {"model": model, "optimizer": optimizer, "data_state": data_state}
        carried = states.state_tensors() if states else None
        return saver.save(at.step, **parts, trainer_state=trainer_state, lanes=carried)

    facts = {
        "state": "running",
        "step": at.step,
        "saved": done,
        "steps": config.train.steps,
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(exclude_embeddings=True),
        "documents_kept_apart": kept_apart,
        "training_flops_per_token": flops,
        "flops": flops_source,
        "peak_flops": peak,
        "peak": peak_source,
        "device": str(accelerator.device.type),
        "processes": processes,
        "parallel": sharing if processes > 1 else None,
        "precision": config.train.precision,
        "versions": metrics.versions(),
        "changes": [*facts.get("changes", []), *([{"step": at.step, **changes}] if changes else [])],
        "host": platform.node(),
        "pid": os.getpid(),
    }
    open_log = partial(metrics.RunLog, run_dir, config.log, steps=config.train.steps, quiet=not main)
    log, rollbacks, back = open_log(step=at.step), Counter(), None
    left_out = batches.skipped()
    seconds, since = 0.0, at.tokens  # of training since the last line: neither validation nor saving counts
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(guards.interruptible())
        watch = stack.enter_context(contextlib.closing(guards.Watchdog(config.guard.hang_timeout, rank)))
        stack.enter_context(contextlib.closing(batches))
        stack.enter_context(contextlib.closing(sums))
        stack.callback(lambda: log.close())
        if main:
            stack.enter_context(record_state(run_dir, facts))
        announce(log, config, facts, model, optimizer, accumulation, resume, changes)
        checkpoint.set_random_state(random_state)

        while at.step < config.train.steps:
            step, began = at.step + 1, time.perf_counter()
            watch.beat(f"step {step}, reading data")
            before = batches.state_dict()
            micro_batches, failure = take_batches(batches, accumulation)
            # The loss is the mean over all label tokens of the step, wherever they lie: count them before the
            # first backward pass. A mean of means would weigh the tokens of short micro-batches more.
            labels = sum(count_labels(batch) for batch in micro_batches)
            code = failure.exit_code if failure else 0
            counts = torch.tensor([labels, code, code > 0])
            counts = counts.to(accelerator.device) if processes > 1 else counts  # alone: no synchronisation
            labels, code, failed = accelerator.reduce(counts).tolist()
            if failed:  # on some process: no other may wait for its gradients
                if at.step > (step_of(resume) if resume else 0):
                    resume = save(before)
                    saver.wait()
                if resume:
                    log.say(f"stopped: saved; the same command resumes from {resume}")
                raise failure or SystemExit(code // failed)
            watch.beat(f"step {step}, forward and backward")
            loss = torch.zeros((), device=accelerator.device)
            for i, batch in enumerate(micro_batches):
                with parallel.accumulating(wrapped, last=i == accumulation - 1):
                    part = summed_loss(
                        wrapped, batch, accelerator.device, config.train.z_loss, states=states, i=i
                    )
                    part = part / max(1, labels)
                    accelerator.backward(part * processes)  # DDP takes the mean over the processes
                loss += part.detach()
            norm: Any = parallel.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
            norm = norm.item()
            asked = [float(signum in signals) for signum in guards.SIGNALS.values()]
            asked += [float(sums.problem is not None), float(saver.failed)]
            totals = torch.stack([loss, *torch.tensor(asked, device=accelerator.device)])
            loss, *asked, damaged, unsaved = accelerator.reduce(totals).tolist()
            if damaged:
                finish_sums(sums)
            if unsaved:
                saver.wait()  # raises, on all processes, what an asynchronous save failed of
            stop = next((n for n, count in zip(guards.SIGNALS.values(), asked, strict=True) if count), None)
            problem = spikes.judge(loss, norm)
            lr = learning_rate(step, config.train.steps, config.optim.lr, config.schedule)
            if problem is None:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
                optimizer.step()
                at.bad, back = [], None
            else:  # nothing was multiplied by 0: weights, moments and their counts are as they were
                at.bad, at.skipped = [*at.bad, problem], at.skipped + 1
                log.event(step, "skipped", reason=problem)
                if states:
                    states.forget()
            optimizer.zero_grad()
            at.step, at.tokens = step, at.tokens + config.train.tokens_per_step
            facts["step"] = step
            took = time.perf_counter() - began
            seconds += took

            end = step == config.train.steps
            due = config.checkpoint.every and step % config.checkpoint.every == 0
            saving = stop or end or (due and not at.bad)
            # Nothing spoilt is ever saved: it would take the place of a checkpoint that is not.
            spoilt = saver.unsound(model, optimizer) if saving else None
            if spoilt:
                log.event(step, "unsound", reason=spoilt)
            if (spoilt or len(at.bad) >= config.guard.max_bad_steps) and not stop:
                why = spoilt or f"{len(at.bad)} steps in a row were left out ({at.bad[-1]})"
                saver.wait()
                good = partial(last_good, saver.directory)
                # Where no step was good behind the checkpoint that it went back to, one before that is taken.
                resume, state, _ = load(good(suspect=back, reason=why) if main else None, good)
                if resume is None or rollbacks[resume] == config.guard.max_rollbacks:
                    raise InputError(rollback_message(step, why, resume))
                rollbacks[resume] += 1
                # The data stays where it is: the run resumes behind the rows that spoilt it.
                reasons = at.bad or [why]
                at, back = restored(state, spikes), resume
                log.close()
                log, seconds, since = open_log(step=at.step, keep_events=True), 0.0, at.tokens
                reason = f"{why}: back to {resume.name}, on past their data"
                log.event(at.step + 1, "rollback", reason=reason, to=at.step, at=step, reasons=reasons)
                continue

            rate = (at.tokens - since) / seconds
            log.step(step, loss, rate, took)
            if problem is None and (end or step % config.log.every == 0):
                values = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens_per_second": rate}
                log.train(step=step, tokens=at.tokens, **values, mfu=rate * flops / peak)
                seconds, since = 0.0, at.tokens
                if (count := batches.skipped() - left_out) > 0:
                    left_out += count
                    reason = f"{count} documents above data.max_document_bytes were left out"
                    log.event(step, "oversized", reason=reason, documents=left_out)
            if validation and (end or (config.validation.every and step % config.validation.every == 0)):
                watch.beat(f"step {step}, validation")
                values = validate(accelerator, model, validation)
                at.val_loss = values["val_loss"]
                values |= negative_share(model, next(iter(validation.values()))[0]["input_ids"])
                log.write(step=step, tokens=at.tokens, **values)
                log.say(f"validation at step {step}: loss {at.val_loss:.4f}, {describe_perplexity(values)}")
                if not math.isfinite(at.val_loss):
                    log.say("WARNING    the validation loss is not finite: this model is of no use")
            if saving and not spoilt:
                watch.beat(f"step {step}, saving")
                resume = save(batches.state_dict())
                if stop or end:
                    saver.wait()
                if main:  # an asynchronous save is not there yet, the one before it is
                    facts["saved"] = max([0, *map(step_of, checkpoint_folders(saver.directory))])
                    metrics.write_facts(run_dir, facts)
            if stop and (spoilt or not end):
                saved = f"not saved, {spoilt}" if spoilt else "saved"
                log.say(f"interrupted: {saved}; the same command resumes from {resume or 'the beginning'}")
                raise SystemExit(128 + stop)

        if at.skipped >= at.step:
            raise NothingTrained(
                f"{run_dir}: all {at.step} steps were left out; metrics.jsonl says why of each"
            )
        watch.beat("writing the model")
        facts |= {"state": "finished", "step": at.step}
        if main:
            export(saver.directory / f"step-{at.step}", run_dir / "final", facts, replace=True)
        log.say(f"model: {run_dir / 'final'}")
        if at.val_loss is not None:
            log.say(f"validation: loss {at.val_loss:.4f}, perplexity {perplexity_of(at.val_loss):.2f}")
    accelerator.wait_for_everyone()
    return run_dir


@dataclass
class TrainerState:
    """Where a run is; every checkpoint has it."""

    step: int = 0
    tokens: int = 0
    val_loss: float | None = None
    skipped: int = 0  # steps that changed nothing, in all
    bad: list[str] = field(default_factory=list)  # what was wrong with the last steps, one after another


def restored(state: dict, spikes: guards.SpikeDetector) -> TrainerState:
    """What a checkpoint's trainer state says, `spikes` set to it as well."""
    spikes.load_state_dict(state.get("spikes", {}))
    return TrainerState(**{f.name: state[f.name] for f in fields(TrainerState) if f.name in state})


def take_batches(
    batches: Iterator[dict[str, Tensor]], count: int
) -> tuple[list[dict[str, Tensor]], InputError | None]:
    """The next `count` micro-batches; or those that came, and why no more did."""
    taken = []
    try:
        for _ in range(count):
            taken.append(next(batches))
    except InputError as error:
        return taken, error
    return taken, None


def announce(
    log: RunLog,
    config: Any,
    facts: dict,
    model: Any,
    optimizer: Any,
    accumulation: int,
    resume: Path | None,
    changes: dict,
) -> None:
    """What a person wants to see before the first step."""
    c, processes = config.train, facts["processes"]
    log.say(
        f"run        {config.output_dir}, seed {config.seed}"
        + (f", goes on from {resume.name}" if resume else "")
    )
    for key, (old, new) in changes.items():
        note = " (the schedule follows it from here on)" if key == "train.steps" else ""
        log.say(f"changed    {key}: {old} → {new}{note}")
    log.say(
        f"model      {model.config.model_type}, {facts['parameters']:,} parameters, "
        f"{facts['parameters_without_embeddings']:,} without embeddings"
    )
    log.say(f"optimizer  {config.optim.name}: {describe_groups(optimizer.param_groups)}")
    log.say(
        f"step       {c.tokens_per_step:,} tokens = {c.micro_batch_size} rows × {config.data.seq_len} tokens"
        f" × {accumulation} accumulated × {processes} process(es)"
    )
    log.say(f"steps      {c.steps:,} = {c.steps * c.tokens_per_step:,} tokens")
    log.say(
        f"device     {facts['device']}, {c.precision}, peak {facts['peak_flops'] / 1e12:.3g} TFLOP/s"
        f" ({facts['peak']})"
    )
    log.say(f"FLOPs      {facts['training_flops_per_token']:.3g} a token ({facts['flops']})")
    if not log.quiet:
        log.say(f"estimate   {estimate(config, facts, model)}")
        log.expect(c.steps - facts["step"], time_left(config, facts))
    if not facts["documents_kept_apart"]:
        log.say("WARNING    this model lets packed documents see one another; run.json is marked accordingly")
