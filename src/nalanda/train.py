"""The training loop. `train` reads from top to bottom; what it calls stands below it, in that order."""

import contextlib
import importlib.util
import inspect
import json
import math
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, set_seed
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

from nalanda import NalandaConfig, carry, checkpoint, guards, metrics, parallel
from nalanda.config import IDENTITY, MOVABLE, RunConfig, differences, load_config, nearest
from nalanda.data import PackedBatches, validation_batches
from nalanda.errors import InputError
from nalanda.export import export
from nalanda.fetch import offline
from nalanda.optim import build_optimizer, learning_rate
from nalanda.tokenizer import build_tokenizer, check_vocabulary


def train(config: RunConfig) -> Path:
    """Trains what `config` says, from the start or from where `output_dir` stopped; returns `output_dir`.

    Every process of a launch calls it. The run's folder then holds config.yaml, run.json (what is known
    about the run, its state among it), metrics.jsonl, tensorboard/, tokenizer/, checkpoints/step-N/ and, at
    the end, final/: a model folder as transformers has them.

    Raises:
        InputError: the settings, the data or the folder cannot work, or training diverges. Where it is the
            data that fails, a checkpoint of the last step was saved.
        SystemExit: 128 + signal after a SIGTERM, SIGINT or SIGUSR1 on any process: the step was finished, a
            checkpoint saved, and the same command goes on from there. A second signal ends the process.
    """
    config.check()
    transformers.logging.disable_progress_bar()  # of saving a few files; the run has its own
    sharing = parallel.choose(config.train.parallel, os.environ)
    accelerator = launch(config)
    if not accelerator.is_main_process:
        return _train(config, accelerator, sharing, {})
    changes = claim(Path(config.output_dir), config)
    with alone(Path(config.output_dir)):
        return _train(config, accelerator, sharing, changes)


def _train(config: RunConfig, accelerator: Accelerator, sharing: parallel.Kind, changes: dict) -> Path:
    """`train`, once the processes are there and the folder is held."""
    main, rank, processes = accelerator.is_main_process, accelerator.process_index, accelerator.num_processes
    accumulation = config.accumulation(processes)
    run_dir = Path(config.output_dir)
    config = offline(config)
    resume = agree(checkpoint.latest(run_dir / "checkpoints") if main else None)
    done = checkpoint.step_of(resume) if resume else 0
    facts = metrics.read_facts(run_dir)
    if facts.get("state") == "finished" and done >= config.train.steps:
        if main:
            print(f"{run_dir} is finished, {done} steps: raise train.steps to go on", flush=True)
        return run_dir

    with accelerator.main_process_first():
        tokenizer = build_tokenizer(config.tokenizer, config.data, run_dir / "tokenizer")
        if main and not (run_dir / "tokenizer").exists():
            tokenizer.save_pretrained(run_dir / "tokenizer")
    batches, validation = open_batches(config, tokenizer, rank, processes)

    set_seed(config.seed)
    model = build_model(config, tokenizer, weights=resume is None)
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
    if resume:
        state, data_state = checkpoint.load(resume, model=model, optimizer=optimizer, rank=rank)
        batches.load_state_dict(data_state)
        at = restored(state, spikes)
        if states:
            own = carry.lanes_of(rank, processes, accumulation, config.train.micro_batch_size)
            states.load(carry.read_lanes(resume.glob("lanes-*"), own), own, accelerator.device)

    random_state = checkpoint.random_state()  # the loop's; what lies between may draw, as importing rich does
    saver = checkpoint.Saver(run_dir / "checkpoints", config.checkpoint, rank=rank, processes=processes)

    def save(data_state: dict) -> Path:
        trainer_state = {**asdict(at), "spikes": spikes.state_dict(), "processes": processes}
        parts = {"model": model, "optimizer": optimizer, "data_state": data_state}
        carried = states.state_tensors() if states else None
        return saver.save(at.step, **parts, trainer_state=trainer_state, lanes=carried)

    facts = {
        "state": "running",
        "step": at.step,
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
    log, rollbacks = open_log(step=at.step), Counter()
    seconds, since = 0.0, at.tokens  # of training since the last line: neither validation nor saving counts
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(guards.interruptible())
        watch = stack.enter_context(contextlib.closing(guards.Watch(config.guard.hang_timeout, rank)))
        stack.enter_context(contextlib.closing(batches))
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
                    log.say(f"stopped: saved {resume}; the same command goes on from there")
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
            asked = [float(signum in signals) for signum in guards.SIGNALS.values()] + [float(saver.failed)]
            totals = torch.stack([loss, *torch.tensor(asked, device=accelerator.device)])
            loss, *asked, unsaved = accelerator.reduce(totals).tolist()
            if unsaved:
                saver.wait()  # raises, on all processes, what an asynchronous save failed of
            stop = next((n for n, count in zip(guards.SIGNALS.values(), asked, strict=True) if count), None)
            problem = spikes.judge(loss, norm)
            lr = learning_rate(step, config.train.steps, config.optim.lr, config.schedule)
            if problem is None:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
                optimizer.step()
                at.bad = []
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

            if len(at.bad) >= config.guard.max_bad_steps and not stop:
                saver.wait()
                resume, why = agree(last_good(run_dir / "checkpoints") if main else None), at.bad
                if resume is None or rollbacks[resume] == config.guard.max_rollbacks:
                    raise InputError(gave_up(step, why, resume))
                rollbacks[resume] += 1
                # The data stays where it is: the run goes on past the rows that spoilt it.
                at = restored(checkpoint.load(resume, model=model, optimizer=optimizer, rank=rank)[0], spikes)
                log.close()
                log, seconds, since = open_log(step=at.step), 0.0, at.tokens
                reason = f"{len(why)} bad steps ({why[-1]}): back to {resume.name}, on past their data"
                log.event(at.step + 1, "rollback", reason=reason, to=at.step, at=step, reasons=why)
                continue

            end = step == config.train.steps
            rate = (at.tokens - since) / seconds
            log.step(step, loss, rate, took)
            if problem is None and (end or step % config.log.every == 0):
                values = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens_per_second": rate}
                log.train(step=step, tokens=at.tokens, **values, mfu=rate * flops / peak)
                seconds, since = 0.0, at.tokens
            if validation and (end or (config.validation.every and step % config.validation.every == 0)):
                watch.beat(f"step {step}, validation")
                values = validate(accelerator, model, validation)
                at.val_loss = values["val_loss"]
                values |= metrics.negative_share(model, next(iter(validation.values()))[0]["input_ids"])
                log.write(step=step, tokens=at.tokens, **values)
                log.say(f"validation at step {step}: loss {at.val_loss:.4f}, {perplexities(values)}")
            due = config.checkpoint.every and step % config.checkpoint.every == 0
            if stop or end or (due and not at.bad):
                watch.beat(f"step {step}, saving")
                resume = save(batches.state_dict())
                if stop or end:
                    saver.wait()
            if stop and not end:
                log.say(f"interrupted: saved {resume}; the same command goes on from there")
                raise SystemExit(128 + stop)

        watch.beat("writing the model")
        facts |= {"state": "finished", "step": at.step}
        if main:
            export(saver.directory / f"step-{at.step}", run_dir / "final", facts, replace=True)
        log.say(f"model: {run_dir / 'final'}")
        if at.val_loss is not None:
            log.say(f"validation: loss {at.val_loss:.4f}, perplexity {perplexity(at.val_loss):.2f}")
    accelerator.wait_for_everyone()
    return run_dir


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


def last_good(directory: Path) -> Path | None:
    """The newest whole checkpoint that was not saved between bad steps."""
    for path in reversed(checkpoint.steps(directory)):
        if checkpoint.verify(path) is None and not json.loads((path / "trainer.json").read_text()).get("bad"):
            return path
    return None


def gave_up(step: int, why: list[str], back: Path | None) -> str:
    last = f"{back} is unharmed and the run went back to it before" if back else "no checkpoint was saved yet"
    return (
        f"step {step}: {len(why)} steps in a row were left out ({why[-1]}); none reached the weights. Lower "
        f"optim.lr or lengthen schedule.warmup_steps; {last}"
    )


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
            facts["reason"] = (str(error).splitlines() or [type(error).__name__])[0]
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


def claim(run_dir: Path, config: RunConfig) -> dict[str, list]:
    """Makes `run_dir` this run's; returns the settings that changed since it stopped, `{key: [old, new]}`.

    Raises:
        InputError: it holds another run, or something that is no run.
    """
    file, changes = run_dir / "config.yaml", {}
    if file.is_file():
        changes = differences(load_config(file).to_dict(), config.to_dict())
        changes.pop("output_dir", None)  # the folder was moved
        others = [key for key in changes if key.split(".")[0] in IDENTITY and key not in MOVABLE]
        begun = (run_dir / "metrics.jsonl").exists() or (run_dir / "checkpoints").exists()
        if others and begun:
            old, new = changes[others[0]]
            raise InputError(
                f"{run_dir} holds another run: {others[0]} is {old!r} there and {new!r} here; "
                "choose another output_dir"
            )
        if not checkpoint.steps(run_dir / "checkpoints") and (others or MOVABLE & changes.keys()):
            # Stopped before anything was kept, by bad data for one: there is nothing to lose.
            shutil.rmtree(run_dir / "tokenizer", ignore_errors=True)
            changes = {}
    elif run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise InputError(f"{run_dir} holds files that are no run of Nalanda's; choose another output_dir")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomically(file, config.to_yaml())
    except OSError as error:
        raise InputError(f"output_dir: {run_dir}: {error.strerror}") from None
    return {key: list(values) for key, values in changes.items()}


@contextlib.contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Holds the run's folder. Raises `InputError` while another process does: one that a launcher left behind
    would go on writing beside this one."""
    lock = FileLock(run_dir / ".lock")  # the system's kind, which ends with the process, however that ends
    try:
        lock.acquire(timeout=5)
    except Timeout:
        raise InputError(
            f"{run_dir}: another process is training there; stop it or choose another output_dir"
        ) from None
    except (OSError, NotImplementedError):  # a file system without locks
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


def build_model(config: RunConfig, tokenizer: Any, *, weights: bool = True) -> PreTrainedModel:
    """The model of `config.model` in fp32, initialised or, with `init_from` and `weights`, loaded."""
    model_config = build_model_config(config, tokenizer)
    check_vocabulary(tokenizer, model_config.vocab_size)
    path = config.model.get("init_from")
    if path is None or not weights:
        with _in_one_line("model"):
            return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    with _in_one_line("model.init_from"):
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
        with _in_one_line("model"):
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
        first, *rest = [line.strip() for line in str(error).strip().splitlines()]
        raise InputError(f"{where}: {' '.join([first, *rest[: first.endswith(':')]])}") from None
