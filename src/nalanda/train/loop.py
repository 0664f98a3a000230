"""The training loop. `train` reads from top to bottom; what it calls stands below it, in that order."""

import contextlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from filelock import FileLock, Timeout
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from nalanda import NalandaConfig
from nalanda.common.errors import InputError, NothingTrained, explained, out_of_memory, output_folder
from nalanda.config.load import IDENTITY, MOVABLE, RunConfig, differences, load_config, nearest
from nalanda.data.loader import PackedBatches, token_sets, validation_batches, validation_contents
from nalanda.data.offline import offline
from nalanda.data.token_set import SumCheck
from nalanda.data.tokenizer import build_tokenizer, check_vocabulary, is_whole, save_tokenizer
from nalanda.inference.generate import not_here, weight_files
from nalanda.train import checkpoint, guards, memory, parallel
from nalanda.train import log as metrics
from nalanda.train import row_states as carry
from nalanda.train.export import export
from nalanda.train.optim import build_optimizer, learning_rate


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
    sharing = parallel.choose(config.train.parallel, os.environ)
    with memory.named(config):
        accelerator = launch(config)
        if not accelerator.is_main_process:
            return _train(config, accelerator, sharing, None)
        with alone(Path(config.output_dir)):
            return _train(config, accelerator, sharing, claim(Path(config.output_dir), config))


def _train(config: RunConfig, accelerator: Accelerator, sharing: parallel.Kind, claimed: Any) -> Path:
    """`train`, once the processes are there and the folder is held. claimed: the main one's from `claim`."""
    main, rank, processes = accelerator.is_main_process, accelerator.process_index, accelerator.num_processes
    accumulation = config.accumulation(processes)
    run_dir = Path(config.output_dir)
    config, (changes, facts, resume) = offline(config), agree(claimed)
    done = checkpoint.step_of(resume) if resume else 0
    if facts.get("state") == "finished" and done >= config.train.steps and exported(run_dir / "final"):
        if main:
            print(f"{run_dir} is finished, {done} steps: raise train.steps to go on", flush=True)
        return run_dir

    with accelerator.main_process_first():
        tokenizer = build_tokenizer(config.tokenizer, config.data, run_dir / "tokenizer")
        if main and not is_whole(run_dir / "tokenizer"):
            save_tokenizer(tokenizer, run_dir / "tokenizer")
    batches, validation = open_batches(config, tokenizer, rank, processes)
    contents = identify(config, batches, bool(validation)) if main else None
    batches.contents = agree(contents)  # one process reads the files' contents
    sums = sums_of(config, rank, processes)
    if config.data.verify == "sums":
        settle(sums)

    set_seed(config.seed)
    # On a CPU weights, gradients and moments come to lie beside each other, one moment at the least.
    each = 12 if accelerator.device.type == "cpu" and sharing == "ddp" else 4
    model = build_model(config, tokenizer, weights=resume is None, each=each)
    flops, flops_source = metrics.flops_per_token(model, config.data.seq_len)
    build = partial(build_optimizer, model, config.optim)
    wrapped, optimizer = parallel.prepare(accelerator, model, sharing, config.train, build)
    set_seed(config.seed, device_specific=True)
    check_causal(accelerator, model)
    kept_apart = keeps_documents_apart(accelerator, model)
    peak, peak_source = metrics.peak_flops(accelerator.device, config.train.precision)
    peak = accelerator.reduce(torch.tensor(peak, device=accelerator.device)).item()

    at, spikes, states = Progress(), guards.Spikes(config.guard), None
    if config.data.long_documents == "carry":
        carry.check(model)
        states = carry.RowStates()
    saver = checkpoint.Saver(run_dir / "checkpoints", config.checkpoint, rank=rank, processes=processes)

    def load(path: Path | None, other: Callable[[], Path | None]) -> tuple[Path | None, dict, dict]:
        """Loads `path`, or if its weights or moments are spoilt marks it and loads what `other` then finds.
        Returns the path that was loaded, its trainer state and its data state; None where nothing is left."""
        while path := agree(path):
            state, data_state = checkpoint.load(path, model=model, optimizer=optimizer, rank=rank)
            problem = saver.unsound(model, optimizer)
            if problem is None:
                return path, state, data_state
            if main:
                print(f"{path}: unsound, passed over: {problem}", flush=True)
                checkpoint.mark(path, problem)
                path = other()
        return None, {}, {}

    if resume:
        resume, state, data_state = load(resume, partial(checkpoint.latest, saver.directory))
        if resume is None:
            raise InputError(no_way_back(run_dir))
        batches.load_state_dict(data_state)
        at = restored(state, spikes)
        if states:
            own = carry.lanes_of(rank, processes, accumulation, config.train.micro_batch_size)
            states.load(carry.read_lanes(resume.glob("lanes-*"), own), own, accelerator.device)

    random_state = checkpoint.random_state()  # the loop's; what lies between may draw, as importing rich does

    def save(data_state: dict) -> Path:
        settle(sums, lambda: watch.beat("comparing the data with its sums"))
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
        watch = stack.enter_context(contextlib.closing(guards.Watch(config.guard.hang_timeout, rank)))
        stack.enter_context(contextlib.closing(batches))
        stack.enter_context(contextlib.closing(sums))
        stack.callback(lambda: log.close())
        if main:
            stack.enter_context(recorded(run_dir, facts))
        metrics.announce(log, config, facts, model, optimizer, accumulation, resume, changes)
        checkpoint.set_random_state(random_state)

        while at.step < config.train.steps:
            step, began = at.step + 1, time.perf_counter()
            watch.beat(f"step {step}, reading data")
            before = batches.state_dict()
            micro_batches, failure = take(batches, accumulation)
            # The loss is the mean over all label tokens of the step, wherever they lie: count them before the
            # first backward pass. A mean of means would weigh the tokens of short micro-batches more.
            labels = sum(count_labels(batch) for batch in micro_batches)
            code = failure.exit_code if failure else 0
            counts = torch.tensor([labels, code, code > 0])
            counts = counts.to(accelerator.device) if processes > 1 else counts  # alone: no synchronisation
            labels, code, failed = accelerator.reduce(counts).tolist()
            if failed:  # on some process: no other may wait for its gradients
                if at.step > (checkpoint.step_of(resume) if resume else 0):
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
                settle(sums)
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
                    raise InputError(gave_up(step, why, resume))
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
                values |= metrics.negative_share(model, next(iter(validation.values()))[0]["input_ids"])
                log.write(step=step, tokens=at.tokens, **values)
                log.say(f"validation at step {step}: loss {at.val_loss:.4f}, {perplexities(values)}")
                if not math.isfinite(at.val_loss):
                    log.say("WARNING    the validation loss is not finite: this model is of no use")
            if saving and not spoilt:
                watch.beat(f"step {step}, saving")
                resume = save(batches.state_dict())
                if stop or end:
                    saver.wait()
                if main:  # an asynchronous save is not there yet, the one before it is
                    facts["saved"] = max([0, *map(checkpoint.step_of, checkpoint.steps(saver.directory))])
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
            log.say(f"validation: loss {at.val_loss:.4f}, perplexity {perplexity(at.val_loss):.2f}")
    accelerator.wait_for_everyone()
    return run_dir


def identify(config: RunConfig, batches: PackedBatches, validation: bool) -> dict[str, dict[str, str]]:
    """The contents of the files that are read as text, those of `validation` among them."""
    contents = batches.contents
    return {**contents, **(validation_contents(config.data, contents) if validation else {})}


def sums_of(config: RunConfig, rank: int, processes: int) -> SumCheck:
    """This process's share of the prepared sets' files, being compared with their sums."""
    sets = token_sets(config.data, validation=config.validation.every != 0)
    files = [file for tokens in sets for file in tokens.files]
    return SumCheck(files[rank::processes] if config.data.verify != "sizes" else [])


def settle(sums: SumCheck, beat: Callable[[], None] = lambda: None) -> None:
    """Waits until every process has compared its share. Raises `InputError` on all if a file is damaged."""
    if sums.settled:
        return
    problems = [problem for problem in gather_object([sums.wait(beat)]) if problem]
    if problems:
        raise InputError(problems[0])
    sums.settled = True


@dataclass
class Progress:
    """Where a run is; every checkpoint has it."""

    step: int = 0
    tokens: int = 0
    val_loss: float | None = None
    skipped: int = 0  # steps that changed nothing, in all
    bad: list[str] = field(default_factory=list)  # what was wrong with the last steps, one after another


def restored(state: dict, spikes: guards.Spikes) -> Progress:
    """What a checkpoint's trainer state says, `spikes` set to it as well."""
    spikes.load_state_dict(state.get("spikes", {}))
    return Progress(**{f.name: state[f.name] for f in fields(Progress) if f.name in state})


def take(
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


def last_good(directory: Path, suspect: Path | None = None, reason: str = "") -> Path | None:
    """The newest usable checkpoint that was not saved between bad steps.

    suspect: one that the run went back to in vain. One before it is preferred; if there is one, the suspect
    is marked with `reason`.
    """
    for path in reversed(checkpoint.steps(directory)):
        if suspect is not None and checkpoint.step_of(path) >= checkpoint.step_of(suspect):
            continue
        if checkpoint.unusable(path) is not None or _between_bad_steps(path):
            continue
        if suspect is not None:
            checkpoint.mark(suspect, f"no step behind it was good: {reason}")
        return path
    return suspect


def _between_bad_steps(path: Path) -> bool:
    return bool(json.loads((path / "trainer.json").read_text()).get("bad"))


def gave_up(step: int, why: str, back: Path | None) -> str:
    last = "no checkpoint was saved yet"
    if back:
        last = f"going back to {back}, whose weights and moments are finite, did not help"
    return (
        f"step {step}: {why}; {last}. Lower optim.lr or lengthen schedule.warmup_steps; "
        "train.resume=step-N resumes from a checkpoint of your choice"
    )


def no_way_back(run_dir: Path) -> str:
    """Why a run that has saved something cannot be resumed, and what to do."""
    found = [f"{p.name} is {checkpoint.unusable(p)}" for p in checkpoint.steps(run_dir / "checkpoints")]
    return (
        f"{run_dir}: no checkpoint can be resumed from ({'; '.join(found) or 'none is left'}). Put one back "
        f"from a copy, or move {run_dir} away to start over; nothing was changed"
    )


def exported(final: Path) -> bool:
    """Whether the model folder has weights that can be read, and a config."""
    try:
        files = list(final.glob("*.safetensors"))
        return bool(files and all(map(checkpoint.shapes, files)) and (final / "config.json").stat().st_size)
    except (InputError, OSError):
        return False


@contextlib.contextmanager
def recorded(run_dir: Path, facts: dict) -> Iterator[None]:
    """run.json says "running" while the run does, and afterwards how it ended."""
    metrics.write_facts(run_dir, facts)
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, SystemExit | KeyboardInterrupt)
        facts |= {"state": "interrupted" if stopped else "failed"}
        if not stopped:
            facts["reason"] = (str(explained(error) or error).splitlines() or [type(error).__name__])[0]
        raise
    finally:
        metrics.write_facts(run_dir, facts)


def launch(config: RunConfig) -> Accelerator:
    """The Accelerator, once it is certain that it has the processes that were asked for."""
    asked, lone = os.environ.get("WORLD_SIZE"), "MASTER_ADDR" in os.environ and "RANK" not in os.environ
    if config.train.cpu_threads:
        torch.set_num_threads(config.train.cpu_threads)
    try:
        accelerator = Accelerator(mixed_precision="bf16" if config.train.precision == "bf16" else "no")
    except ValueError as error:
        raise InputError(f"train.precision: {config.train.precision}: {error}") from None
    if lone or (asked and int(asked) != accelerator.num_processes):
        raise InputError(
            f"the launcher was asked for {asked or 'several'} processes and each would train alone; "
            "on CPUs launch with ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node N …"
        )
    kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in kinds:
        raise InputError(
            f"{accelerator.distributed_type} with {accelerator.num_processes} process(es): "
            "Nalanda trains on one process, with DDP or with FSDP2; choose that in `accelerate config`"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if accelerator.device.type == "cpu" and accelerator.is_main_process:
        threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if threads < cores:
            print(
                f"{threads} of {cores} CPU cores in use: train.cpu_threads=N sets more (a launcher set less)"
            )
    return accelerator


def claim(run_dir: Path, config: RunConfig) -> tuple[dict[str, list], dict, Path | None]:
    """Makes `run_dir`, which is held, this run's.

    Returns the settings that changed since it stopped, `{key: [old, new]}`; what run.json says; and the
    checkpoint to resume from, None at the beginning.

    Raises:
        InputError: it holds another run, or one that cannot be resumed. Nothing in the folder was changed.
    """
    file, folder = run_dir / "config.yaml", run_dir / "checkpoints"
    changes: dict[str, tuple] = {}
    others: list[str] = []
    saved, begun = checkpoint.steps(folder), (run_dir / "metrics.jsonl").exists() or folder.exists()
    if file.is_file():
        changes = differences(recorded_recipe(file).to_dict(), config.to_dict())
        changes.pop("output_dir", None)  # the folder was moved
        others = [key for key in changes if key.split(".")[0] in IDENTITY and key not in MOVABLE]
        if others and begun:
            old, new = changes[others[0]]
            raise InputError(
                f"{run_dir} holds another run: {others[0]} is {old!r} there and {new!r} here; "
                "choose another output_dir"
            )
    elif begun:
        raise InputError(
            f"{file} is missing: put it back, or write there the recipe that the run was begun with"
        )
    try:
        facts = metrics.read_facts(run_dir)
    except InputError as error:
        print(f"{error}; it is written anew", flush=True)
        facts = {}
    if config.train.resume is not None and ("train.resume" in changes or not saved):
        go_back_to(folder, config.train.resume)
    resume = checkpoint.latest(folder)
    if resume is None and (saved or ever_saved(run_dir, facts)):
        raise InputError(no_way_back(run_dir))
    if not saved and changes.keys() & {*others, *MOVABLE}:
        # Stopped before anything was kept, by bad data for one: there is nothing to lose.
        shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
        changes = {}
    try:
        checkpoint.write_atomically(file, config.to_yaml())
    except OSError as error:
        raise InputError(f"output_dir: {explained(error) or error}") from None
    return {key: list(values) for key, values in changes.items()}, facts, resume


def recorded_recipe(file: Path) -> RunConfig:
    """The recipe that a run recorded. Raises `InputError`, which names the file as damaged."""
    try:
        return load_config(file)
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file}: the run's own record of its recipe is damaged ({error}); put a copy back, or write "
            "there the recipe that the run was begun with"
        ) from None


def ever_saved(run_dir: Path, facts: dict) -> bool:
    """Whether the run has saved a checkpoint, by run.json, or without one by how far metrics.jsonl goes."""
    if "saved" in facts:
        return facts["saved"] > 0
    file = run_dir / "metrics.jsonl"
    every = recorded_recipe(run_dir / "config.yaml").checkpoint if file.is_file() else None
    if every is None or not every.every:
        return False
    # A line behind a step means that its save has returned; an asynchronous one ends before the next begins.
    last = max((line["step"] for line in metrics.read(file)), default=0)
    return last > every.every * (2 if every.asynchronous else 1)


def go_back_to(directory: Path, name: str | int) -> None:
    """Makes checkpoint `name`, `step-N` or N, the newest one; later ones stay there as `later-step-M`.

    Raises:
        InputError: there is no such checkpoint, or it is damaged. Nothing was changed.
    """
    there = checkpoint.steps(directory)
    chosen = next((p for p in there if p.name == f"step-{str(name).removeprefix('step-')}"), None)
    if chosen is None:
        names = ", ".join(p.name for p in there) or "none"
        raise InputError(f"train.resume: {directory} has no {name}; there are {names}")
    if (problem := checkpoint.verify(chosen)) is not None:
        raise InputError(f"train.resume: {chosen} is damaged: {problem}")
    (chosen / checkpoint.MARK).unlink(missing_ok=True)
    for path in there[there.index(chosen) + 1 :]:
        names = (f"later-{path.name}{f'.{n}' * (n > 1)}" for n in itertools.count(1))
        aside = next(a for a in map(path.with_name, names) if not a.exists())
        path.rename(aside)
        print(f"{path} is set aside as {aside.name}", flush=True)


@contextlib.contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Holds the run's folder, which is made where there is none. One who does not hold it changes nothing
    there: a process that a launcher left behind would go on writing beside this one.

    Raises:
        InputError: another process holds it, it cannot be made, or it holds something that is no run.
    """
    names = {path.name for path in run_dir.iterdir()} - {".lock"} if run_dir.is_dir() else set()
    if run_dir.is_file() or (
        names and not names & {"config.yaml", "run.json", "metrics.jsonl", "checkpoints"}
    ):
        raise InputError(f"{run_dir} holds files that are no run of Nalanda's; choose another output_dir")
    output_folder(run_dir, "output_dir")
    lock = FileLock(run_dir / ".lock")  # the system's kind, which ends with the process, however that ends
    try:
        lock.acquire(timeout=5)
    except Timeout:
        raise InputError(
            f"{run_dir}: another process is training there; stop it or choose another output_dir"
        ) from None
    except (OSError, NotImplementedError):
        print(f"{run_dir}: this file system has no locks: nothing keeps a second run out of it", flush=True)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def agree(value: Any) -> Any:
    """The main process's value, on every process."""
    return broadcast_object_list([value])[0]


def open_batches(
    config: RunConfig, tokenizer: Any, rank: int = 0, processes: int = 1
) -> tuple[PackedBatches, dict[str, list[dict[str, Tensor]]]]:
    """What one process trains on, and what it validates on, by source; {} without validation."""
    share: Any = {"rank": rank, "world_size": processes}
    rows, lanes = config.train.micro_batch_size, config.train.tokens_per_step // config.data.seq_len
    batches = PackedBatches(
        config.data, tokenizer, split="train", batch_size=rows, seed=config.seed, lanes=lanes, **share
    )
    if config.validation.every == 0:
        return batches, {}
    rows = config.validation.batch_size or rows
    return batches, validation_batches(config.data, tokenizer, batch_size=rows, **share)


def build_model(config: RunConfig, tokenizer: Any, *, weights: bool = True, each: int = 4) -> PreTrainedModel:
    """The model of `config.model` in fp32, initialised or, with `init_from` and `weights`, loaded.

    each: bytes of memory that there must be for a parameter. Raises `InputError`.
    """
    model_config = build_model_config(config, tokenizer)
    memory.check_model(model_config, each)
    check_vocabulary(tokenizer, model_config.vocab_size)
    path = config.model.get("init_from")
    if path is None or not weights:
        with _in_one_line("model"):
            return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    with _in_one_line(f"model.init_from: {path}"):
        if Path(path).is_dir():
            weight_files(Path(path))
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for problem in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if loaded[problem]:
            name = sorted(map(str, loaded[problem]))[0]
            raise InputError(f"model.init_from: {path}: a checkpoint of another shape: {problem}: {name}")
    return model


def build_model_config(config: RunConfig, tokenizer: Any = None) -> PreTrainedConfig:
    """The model's config: `NalandaConfig`, or under `auto` that of a path, of a model type that transformers
    or flash-linear-attention knows, or of a hub id, whichever of them there is first.

    One that the recipe itself describes has `data.seq_len` positions and, without a `vocab_size`, the
    tokenizer's, rounded up to a multiple of 64, for the matrix products' sake. The special tokens are always
    the tokenizer's. Raises `InputError`.
    """
    keys = {key: value for key, value in config.model.items() if key not in ("auto", "init_from")}
    source = config_source(config.model)
    if isinstance(source, type):
        known = {*inspect.signature(source).parameters, *getattr(source, "attribute_map", {})}
        if source is not NalandaConfig and (unknown := sorted(keys.keys() - known)):
            # Other configs would keep them, and nothing would ever read them.
            raise InputError(
                f"model.{unknown[0]}: {source.model_type} has no such key{nearest(unknown[0], known)}"
            )
        if "max_position_embeddings" in known:
            keys.setdefault("max_position_embeddings", config.data.seq_len)
        if tokenizer is not None:
            keys.setdefault("vocab_size", 64 * math.ceil(len(tokenizer) / 64))
        with _in_one_line("model"):
            model_config: PreTrainedConfig = source(**keys)
    else:
        with _in_one_line(f"model: {not_here(source)}".removesuffix(": ")):
            found: Any = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **keys)
        model_config, unknown = found
        if unknown:
            raise InputError(f"model.{next(iter(unknown))}: {source} has no such key")
    longest = getattr(model_config, "max_position_embeddings", None) or config.data.seq_len
    if model_config.model_type != "nalanda" and longest < config.data.seq_len:
        raise InputError(f"data.seq_len: {config.data.seq_len} is more than the model's {longest} positions")
    if tokenizer is not None:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(model_config, key, getattr(tokenizer, key))
        if model_config.pad_token_id == model_config.eos_token_id:
            model_config.pad_token_id = None  # an embedding of padding is never trained, eos must be
        if not config.data.bos:  # prompts and evaluations begin as the training documents did
            model_config.bos_token_id = None
    return model_config


def config_source(model: dict[str, Any]) -> type[PreTrainedConfig] | str:
    """The config whose fields `model` of a recipe gives, or the path or hub id whose config.json does."""
    if model.get("auto") is None:
        bare = set(model) <= {"auto", "init_from"}
        return (model.get("init_from") if bare else None) or NalandaConfig
    name = str(model["auto"])
    if name not in CONFIG_MAPPING and importlib.util.find_spec("fla"):
        try:
            importlib.import_module("fla")  # registers its model types
        except Exception as error:  # it breaks with other libraries' releases, each time differently
            if "/" not in name:
                raise InputError(f"model.auto: {name}: flash-linear-attention fails: {error!r}") from None
    if name not in CONFIG_MAPPING or Path(name).exists():
        return name
    kind = CONFIG_MAPPING[name]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"model.auto: {name} is no causal language model")
    return kind


def count_labels(batch: dict[str, Tensor]) -> int:
    """Tokens that the loss counts. A row's first label is nobody's target: the model shifts labels by one."""
    return int((batch["labels"][:, 1:] != -100).sum())


def summed_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    device: torch.device,
    z_loss: float = 0.0,
    *,
    states: carry.RowStates | None = None,
    i: int = 0,
) -> Tensor:
    """The sum of the token losses of micro-batch `i`; `model` may be wrapped. z_loss acts on its gradient
    alone. With `states` rows go on where those of the last step ended."""
    tokens = batch["input_ids"].to(device, non_blocking=True)
    labels = batch["labels"].to(device, non_blocking=True)
    bare: Any = getattr(model, "module", model)
    if bare.config.model_type == "nalanda":
        packing = {"cu_seqlens": batch["cu_seqlens"], "logits_to_keep": 1, "z_loss": z_loss}
        if states:
            packing |= states.before(i, batch)
        out = model(tokens, labels=labels, num_items_in_batch=1, use_cache=False, **packing)
        if states:
            states.after(i, out, batch)
        return out.loss
    # A foreign model's own loss may average as it likes. Without a cache, transformers reads restarting
    # positions as packed documents.
    positions = batch["position_ids"].to(device, non_blocking=True)
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    logits, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    if z_loss:
        term = z_loss * (logits.logsumexp(-1).square() * (targets != -100)).sum()
        loss = loss + (term - term.detach())
    return loss


@torch.no_grad()
def validate(
    accelerator: Accelerator, model: nn.Module, batches: dict[str, list[dict[str, Tensor]]]
) -> dict[str, float]:
    """Mean losses over all label tokens of all processes: of everything, and of each source by its name."""
    # The bare model: what wraps it is for gradients.
    sums = [loss_sums(model, part) for part in batches.values()]
    model.train()
    table = torch.tensor(sums, dtype=torch.float64, device=accelerator.device)  # [sources, (loss, tokens)]
    table = accelerator.reduce(table).tolist()
    total, count = (math.fsum(column) for column in zip(*table, strict=True))
    loss = total / max(1, count)
    values = {"val_loss": loss, "val_ppl": perplexity(loss), "val_tokens": int(count)}
    named = [(name, row) for name, row in zip(batches, table, strict=True) if name]
    return values | {f"val_ppl/{name}": perplexity(total / max(1, count)) for name, (total, count) in named}


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def perplexities(values: dict[str, float]) -> str:
    """`perplexity 12.34 (web 11.20, code 5.31)`."""
    named = [f"{k.removeprefix('val_ppl/')} {v:.2f}" for k, v in values.items() if k.startswith("val_ppl/")]
    return f"perplexity {values['val_ppl']:.2f}" + (f" ({', '.join(named)})" if named else "")


@torch.no_grad()
def loss_sums(model: Any, batches: Iterable[dict[str, Tensor]]) -> tuple[float, int]:
    """(sum of all label tokens' losses, number of those tokens); leaves the model in evaluation mode."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        total += summed_loss(model, batch, model.device).item()
        count += count_labels(batch)
    return total, count


@torch.no_grad()
def check_causal(accelerator: Accelerator, model: Any) -> None:
    """Raises InputError for a model that looks at later tokens, as encoders do: it would learn to copy them.

    Asked of the model itself: two rows differ in their last token, and no earlier logit may.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.arange(1, 17, device=accelerator.device).repeat(2, 1) * 7 % vocabulary
    tokens[1, -1] = (tokens[1, -1] + 1) % vocabulary
    model.eval()
    first, second = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    model.train()
    if (first - second).abs().max() > 1e-4 * first.std():
        kind = model.config.model_type
        raise InputError(
            f"model: {kind} looks at later tokens and would learn to copy them; an encoder needs "
            "model.is_decoder=true"
        )


@torch.no_grad()
def keeps_documents_apart(accelerator: Accelerator, model: Any) -> bool:
    """Whether a document's logits ignore the document that was packed before it; asked of the model itself.

    Two rows of one packing differ in their first document only: where documents are apart, the second's
    logits agree.
    """
    length, device = 8, accelerator.device
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.arange(1, 4 * length + 1, device=device).view(2, 2 * length) * 7 % vocabulary
    tokens[1, length:] = tokens[0, length:]
    model.eval()
    if model.config.model_type == "nalanda":
        logits = model(tokens, cu_seqlens=torch.arange(5) * length, use_cache=False).logits
    else:
        positions = torch.arange(length, device=device).repeat(2, 2)
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    model.train()
    first, second = logits[:, length:].float()
    return bool((first - second).abs().max() <= 1e-4 * first.std())


@contextlib.contextmanager
def _in_one_line(where: str) -> Iterator[None]:
    """Other libraries' complaints about what the user named, as one line."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
        if out_of_memory(error):
            raise
        first, *rest = [line.strip() for line in str(error).strip().splitlines()]
        raise InputError(f"{where}: {' '.join([first, *rest[: first.endswith(':')]])}") from None
