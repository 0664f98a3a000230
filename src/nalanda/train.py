"""The training loop. `train` reads from top to bottom; what it calls stands below it, in that order."""

import contextlib
import importlib.util
import inspect
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, set_seed
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

from nalanda import NalandaConfig, checkpoint, metrics
from nalanda.config import IDENTITY, RunConfig, differences, load_config, nearest
from nalanda.data import PackedBatches, build_tokenizer, check_vocabulary
from nalanda.errors import InputError
from nalanda.optim import build_optimizer, learning_rate


def train(config: RunConfig) -> Path:
    """Trains what `config` says, from the start or from where `output_dir` stopped; returns `output_dir`.

    Every process of a launch calls it. The run's folder then holds config.yaml, run.json (what is known
    about the run, its state among it), metrics.jsonl, tensorboard/, tokenizer/, checkpoints/step-N/ and, at
    the end, final/: a model folder as transformers has them.

    Raises:
        InputError: the settings, the data or the folder cannot work, or the loss stopped being finite.
        SystemExit: 128 + signal after a SIGTERM or SIGINT: the step was finished and a checkpoint saved,
            and the same command goes on from there. A second signal ends the process at once.
    """
    config.check()
    transformers.logging.disable_progress_bar()  # of saving a few files; the run has its own
    accelerator = launch(config)
    main, rank, processes = accelerator.is_main_process, accelerator.process_index, accelerator.num_processes
    accumulation = config.accumulation(processes)
    run_dir = Path(config.output_dir)
    changes = claim(run_dir, config) if main else {}
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
    batches = open_batches(config, tokenizer, "train", rank, processes)
    validation = open_batches(config, tokenizer, "validation", rank, processes)
    validation = [] if config.validation.every == 0 else list(validation)

    set_seed(config.seed)
    model = build_model(config, tokenizer, weights=resume is None)
    if config.train.gradient_checkpointing:
        # transformers 5.23 has a new name for it, and warns of the old one.
        new = getattr(model, "activation_checkpointing_enable", None)
        (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if config.train.compile:
        model.compile()
    flops, flops_source = metrics.flops_per_token(model, config.data.seq_len)
    wrapped, optimizer = accelerator.prepare(model, build_optimizer(model, config.optim))
    set_seed(config.seed, device_specific=True)
    check_causal(accelerator, model)
    kept_apart = keeps_documents_apart(accelerator, model)
    peak, peak_source = metrics.peak_flops(accelerator.device, config.train.precision)
    peak = accelerator.reduce(torch.tensor(peak, device=accelerator.device)).item()

    tokens, val_loss = 0, None
    if resume:
        state, data_state = checkpoint.load(resume, model=model, optimizer=optimizer, rank=rank)
        batches.load_state_dict(data_state)
        tokens, val_loss = state["tokens"], state["val_loss"]

    def save(step: int) -> Path:
        path = checkpoint.save(
            run_dir / "checkpoints",
            step,
            model=model,
            optimizer=optimizer,
            data_state=batches.state_dict(),
            trainer_state={"tokens": tokens, "val_loss": val_loss, "processes": processes},
            rank=rank,
            barrier=accelerator.wait_for_everyone,
        )
        if main:
            checkpoint.prune(run_dir / "checkpoints", config.checkpoint)
        return path

    log = metrics.RunLog(run_dir, config.log, step=done, steps=config.train.steps, quiet=not main)
    with interruptible() as signals, contextlib.closing(log), contextlib.closing(batches):
        facts = {
            "state": "running",
            "step": done,
            "parameters": model.num_parameters(),
            "parameters_without_embeddings": model.num_parameters(exclude_embeddings=True),
            "documents_kept_apart": kept_apart,
            "training_flops_per_token": flops,
            "flops": flops_source,
            "peak_flops": peak,
            "peak": peak_source,
            "device": str(accelerator.device.type),
            "processes": processes,
            "precision": config.train.precision,
            "versions": metrics.versions(),
            "changes": [*facts.get("changes", []), *([{"step": done, **changes}] if changes else [])],
        }
        if main:
            metrics.write_facts(run_dir, facts)
        metrics.announce(log, config, facts, model, optimizer, accumulation, resume, changes)

        seconds, since = 0.0, tokens  # of training since the last line: neither validation nor saving counts
        for step in range(done + 1, config.train.steps + 1):
            began = time.perf_counter()
            micro_batches = [next(batches) for _ in range(accumulation)]
            # The loss is the mean over all label tokens of the step, wherever they lie: count them before the
            # first backward pass. A mean of means would weigh the tokens of short micro-batches more.
            labels = sum(count_labels(batch) for batch in micro_batches)
            labels = accelerator.reduce(torch.tensor(labels, device=accelerator.device)).clamp(min=1)
            loss = torch.zeros((), device=accelerator.device)
            for i, batch in enumerate(micro_batches):
                last = i == accumulation - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                    part = summed_loss(wrapped, batch, accelerator.device) / labels
                    accelerator.backward(part * processes)  # DDP takes the mean over the processes
                loss += part.detach()
            norm: Any = accelerator.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
            norm = norm.item()
            stop = torch.tensor(float(bool(signals)), device=accelerator.device)
            loss, stop = accelerator.reduce(torch.stack([loss, stop])).tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise InputError(
                    f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; stopped "
                    "before they reached the weights. Lower optim.lr or lengthen schedule.warmup_steps; "
                    + (f"{resume} is unharmed" if resume else "no checkpoint was saved yet")
                )
            lr = learning_rate(step, config.train.steps, config.optim.lr, config.schedule)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            tokens += config.train.tokens_per_step
            seconds += time.perf_counter() - began

            end = step == config.train.steps
            rate = (tokens - since) / seconds
            log.step(step, loss, rate)
            if end or step % config.log.every == 0:
                values = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens_per_second": rate}
                log.train(step=step, tokens=tokens, **values, mfu=rate * flops / peak)
                seconds, since = 0.0, tokens
            if validation and (end or (config.validation.every and step % config.validation.every == 0)):
                val_loss, val_tokens = validate(accelerator, model, validation)
                perplexity = math.exp(min(val_loss, 700.0))
                values = {"val_loss": val_loss, "val_ppl": perplexity, "val_tokens": val_tokens}
                values |= metrics.negative_share(model, validation[0]["input_ids"])
                log.write(step=step, tokens=tokens, **values)
                log.say(f"validation at step {step}: loss {val_loss:.4f}, perplexity {perplexity:.2f}")
            if stop or end or (config.checkpoint.every and step % config.checkpoint.every == 0):
                resume = save(step)
            if stop and not end:
                log.say(f"interrupted: saved {resume}; the same command goes on from there")
                if main:
                    metrics.write_facts(run_dir, {**facts, "state": "interrupted", "step": step})
                raise SystemExit(128 + (signals[0] if signals else signal.SIGTERM))

        if main:
            facts |= {"state": "finished", "step": config.train.steps}
            export(model, tokenizer, facts, run_dir / "final")
            metrics.write_facts(run_dir, facts)
        log.say(f"model: {run_dir / 'final'}")
        if val_loss is not None:
            log.say(f"validation: loss {val_loss:.4f}, perplexity {math.exp(min(val_loss, 700.0)):.2f}")
    accelerator.wait_for_everyone()
    return run_dir


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
    if accelerator.distributed_type not in kinds or (
        (accelerator.distributed_type == DistributedType.NO) != (accelerator.num_processes == 1)
    ):
        raise InputError(
            f"{accelerator.distributed_type} with {accelerator.num_processes} process(es): "
            "Nalanda trains on one process or with DDP; choose that in `accelerate config`"
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
        others = [key for key in changes if key.split(".")[0] in IDENTITY]
        begun = (run_dir / "metrics.jsonl").exists() or (run_dir / "checkpoints").exists()
        if others and begun:
            old, new = changes[others[0]]
            raise InputError(
                f"{run_dir} holds another run: {others[0]} is {old!r} there and {new!r} here; "
                "choose another output_dir"
            )
        if others:  # stopped before its first step, by bad data for one: nothing to lose
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


def agree(value: Any) -> Any:
    """The main process's value, on every process."""
    return broadcast_object_list([value])[0]


def open_batches(config: RunConfig, tokenizer: Any, split: str, rank: int, processes: int) -> PackedBatches:
    size = config.train.micro_batch_size
    return PackedBatches(
        config.data,
        tokenizer,
        split=split,
        batch_size=size if split == "train" else config.validation.batch_size or size,
        seed=config.seed,
        rank=rank,
        world_size=processes,
        epochs=None if split == "train" else 1,
    )


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


def summed_loss(model: nn.Module, batch: dict[str, Tensor], device: torch.device) -> Tensor:
    """The sum of a micro-batch's token losses; `model` may be wrapped."""
    tokens = batch["input_ids"].to(device, non_blocking=True)
    labels = batch["labels"].to(device, non_blocking=True)
    bare: Any = getattr(model, "module", model)
    if bare.config.model_type == "nalanda":
        packing = {"cu_seqlens": batch["cu_seqlens"], "logits_to_keep": 1}
        return model(tokens, labels=labels, num_items_in_batch=1, use_cache=False, **packing).loss
    # A foreign model's own loss may average as it likes. Without a cache, transformers reads restarting
    # positions as packed documents.
    positions = batch["position_ids"].to(device, non_blocking=True)
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def validate(accelerator: Accelerator, model: nn.Module, batches: list[dict]) -> tuple[float, int]:
    """(mean loss over all label tokens of all processes, number of those tokens)."""
    # The bare model: processes may hold different numbers of batches.
    sums = torch.tensor(loss_sums(model, batches), dtype=torch.float64, device=accelerator.device)
    total, count = accelerator.reduce(sums).tolist()
    model.train()
    return total / max(1, count), int(count)


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
def interruptible() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT instead of dying of them; a second one of a kind acts as it always did."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(signum: int, frame: Any) -> None:
        received.append(signum)
        signal.signal(signum, previous[signum])

    if threading.current_thread() is threading.main_thread():
        previous = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
        for signum in previous:
            signal.signal(signum, note)
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def export(model: PreTrainedModel, tokenizer: Any, facts: dict, path: Path) -> None:
    """Writes a model folder as transformers has them: weights, config, code, generation config, tokenizer.

    run.json goes with it, so that how a model was trained is known wherever it is copied.
    """
    part = path.with_name(f".tmp-{path.name}")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    metrics.write_facts(part, facts)
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)


@contextlib.contextmanager
def _in_one_line(where: str) -> Iterator[None]:
    """Other libraries' complaints about what the user named, as one line."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
        first, *rest = [line.strip() for line in str(error).strip().splitlines()]
        raise InputError(f"{where}: {' '.join([first, *rest[: first.endswith(':')]])}") from None
