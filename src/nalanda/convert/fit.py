"""Fits recurrent mixers to a transformer's attention, layer by layer.

The teacher reads each batch once, block by block. Every arm's mixer of a layer gets that attention's input,
and learns its output; no gradient passes between layers.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import set_seed
from torch import Tensor, nn

from nalanda.common.errors import InputError
from nalanda.common.files import write_atomically
from nalanda.config.load import differences, read_yaml
from nalanda.config.schema import RunConfig
from nalanda.convert.convert import local_folder
from nalanda.convert.linearize import (
    Transformer,
    build_hybrid,
    hybrid_config,
    open_transformer,
    replaced_layers,
    write_hybrid,
)
from nalanda.data.sources import Sources
from nalanda.model import NalandaConfig
from nalanda.model.decoder import Decoder
from nalanda.model.epilogues import add_norm
from nalanda.model.sequences import Packing, Sequences
from nalanda.train import checkpoint
from nalanda.train.build import finish_sums, open_data, prepare_tokenizer, start_sums
from nalanda.train.checkpoint_dir import latest_checkpoint
from nalanda.train.distill import check_tokenizer
from nalanda.train.flops import DTYPES
from nalanda.train.guards import Interruptions
from nalanda.train.launch import launch
from nalanda.train.log import RunLog
from nalanda.train.loop import is_due
from nalanda.train.optim import learning_rate
from nalanda.train.parallel import Sharing
from nalanda.train.run_dir import lock_run_dir, record_state, refuse_another_run

IDENTITY = {
    *("model", "tokenizer", "data", "seed", "linearize", "distill"),
    "train.tokens_per_step",
}
"""Sections and keys of the recipe that a fit which goes on must share."""


@dataclass
class Fit:
    """The parts of a fit under way."""

    config: RunConfig
    teacher: Any
    """The teacher's model, on its own device."""
    arms: Any
    """Each arm's mixers, by the numbers of their layers."""
    optimizer: torch.optim.Optimizer
    batches: Any
    accelerator: Any
    step: int = 0


def fit_layers(config: RunConfig, model: str) -> list[Path]:
    """Fits the recipe's hybrids to the transformer `model`; returns their folders, `output_dir/ARM`.

    output_dir gets config.yaml, run.json, metrics.jsonl with each arm's relative error, and checkpoints. The same
    command resumes from the newest, to the same values.

    Raises:
        InputError: the recipe, the transformer or the folder cannot work. Settings are checked before the
            transformer's weights are read.
        SystemExit: 128 + signal, once the step is finished and saved.
    """
    config = replace(config, distill=replace(config.distill, teacher=model))
    config.check(training=True)
    if config.stages:
        raise InputError("stages: a fit of layers has none; take them out of the recipe")
    if config.train.resume is not None:
        raise InputError("train.resume: a fit goes on from its newest checkpoint; leave it out")
    run_dir = config.run_dir
    if "://" in config.output_dir:
        raise InputError(f"output_dir: {config.output_dir}: fits are written to a local folder")
    teacher = open_transformer(local_folder(model))
    configs = arm_configs(config, teacher.config)

    transformers.logging.disable_progress_bar()  # of writing a few files
    accelerator = launch(config)
    if accelerator.num_processes > 1:
        raise InputError("linearize: one process fits all layers; the stages after it take several")
    with lock_run_dir(run_dir, config), Interruptions() as signals, ExitStack() as stack:
        claim_folder(run_dir, config)
        facts: dict[str, Any] = {"arms": list(configs)}
        stack.enter_context(record_state(run_dir, facts))

        fit, sums = start_fit(config, accelerator, teacher, configs, stack)
        run_steps(fit, signals, stack)
        finish_sums(sums)
        arms = fit.arms
        del fit  # its teacher and moments make room for the teacher in fp32
        folders = list(write_arms(arms, teacher, configs, run_dir))
        facts["state"] = "finished"
        return folders


def arm_configs(config: RunConfig, teacher: NalandaConfig) -> dict[str, NalandaConfig]:
    """Each arm's hybrid by name; `hybrid` without `linearize.arms`. Raises `InputError`."""
    arms = config.linearize.arms or {"hybrid": {}}
    configs = {name: hybrid_config(teacher, config.model | keys) for name, keys in arms.items()}
    for name, hybrid in configs.items():
        if not replaced_layers(hybrid):
            raise InputError(
                f"model.mixer: no layer of {name} is replaced; name another than softmax"
            )
    return configs


def claim_folder(run_dir: Path, config: RunConfig) -> None:
    """Writes the recipe into the folder. Raises InputError for a folder with another fit."""
    file = run_dir / "config.yaml"
    if file.is_file():
        changes = differences(read_yaml(file), config.to_dict())
        refuse_another_run(run_dir, changes, IDENTITY, "fit")
    write_atomically(file, config.to_yaml())


def start_fit(
    config: RunConfig,
    accelerator: Any,
    teacher: Transformer,
    configs: dict[str, NalandaConfig],
    stack: ExitStack,
) -> tuple[Fit, Any]:
    """Opens the data, loads the teacher and builds the arms, or restores them; with the check of the files."""
    sources = Sources(config.data, validation=False)
    tokenizer = prepare_tokenizer(config, accelerator, sources)
    check_tokenizer(tokenizer, str(teacher.folder), f"distill.teacher: {teacher.folder}")
    settings = replace(config, validation=replace(config.validation, every=0))
    sharing = Sharing(accelerator, replace(config.train, parallel="ddp"))
    batches, _, sources = open_data(settings, accelerator, sharing, tokenizer, sources)
    sums = start_sums(settings, accelerator, [sources])
    stack.callback(batches.close)
    stack.callback(sums.close)

    # In fp32 for the arms, which copy it; then where and as the teacher runs.
    model = teacher.load(torch.device("cpu"), torch.float32)
    arms, optimizer = build_arms(config, configs, model)
    arms.to(accelerator.device)
    device = torch.device(config.distill.device or accelerator.device)
    model.to(device, DTYPES[config.distill.precision])

    fit = Fit(config, model, arms, optimizer, batches, accelerator)
    newest = latest_checkpoint(config.run_dir / "checkpoints")
    if newest:
        state, data_state = checkpoint.load(newest, model=arms, optimizer=optimizer)
        fit.step = state["step"]
        batches.load_state_dict(data_state)
    return fit, sums


def build_arms(
    config: RunConfig, configs: dict[str, NalandaConfig], model: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """Each arm's new mixers, by the numbers of their layers, and their optimizer. model: of `build_hybrid`."""
    arms = nn.ModuleDict()
    for name, hybrid in configs.items():
        # One seed for all: parts that two arms share begin equal.
        set_seed(config.seed)
        built = build_hybrid(hybrid, model)
        layers = {str(i): built.model.layers[i].mixer for i in replaced_layers(hybrid)}
        arms[name] = nn.ModuleDict(layers)
    optim = config.optim
    return arms, torch.optim.AdamW(
        arms.parameters(), config.linearize.lr, optim.betas, optim.eps, weight_decay=0.0
    )


def empty_arms(config: RunConfig) -> tuple[Any, Any]:
    """`build_arms` of a fit's recorded recipe, on the meta device. Raises `InputError` without its transformer."""
    teacher = open_transformer(local_folder(str(config.distill.teacher)))
    with torch.device("meta"):
        return build_arms(config, arm_configs(config, teacher.config), None)


def run_steps(fit: Fit, signals: Interruptions, stack: ExitStack) -> None:
    """Makes the steps that are left. Raises SystemExit after a signal, when the step is saved."""
    config, run_dir = fit.config, fit.config.run_dir
    steps = config.linearize.steps
    # The schedule's shape over these steps, with a warm-up that is no longer than a tenth.
    schedule = config.schedule
    schedule = replace(schedule, warmup_steps=min(schedule.warmup_steps, steps // 10))

    saver = checkpoint.Saver(run_dir / "checkpoints", config.checkpoint)
    stack.push(lambda error, *_: saver.close(error))
    log = RunLog(run_dir, config.log, step=fit.step, steps=steps)
    stack.callback(log.close)
    signals.first = lambda: None  # from here on a signal lets the step end
    for _ in range(fit.step, steps):
        rate = learning_rate(fit.step + 1, steps, config.linearize.lr, schedule)
        errors = fit_step(fit, rate)
        fit.step += 1

        last = fit.step == steps
        if last or is_due(fit.step, config.log.every):
            named = {f"error/{name}": error for name, error in errors.items()}
            log.write(
                step=fit.step, tokens=fit.step * config.train.tokens_per_step, lr=rate, **named
            )
        text = "  ".join(f"{name} {error:.4f}" for name, error in errors.items())
        log.progress.to(fit.step, f"relative error {text}", end=last)

        stop = bool(signals.received)
        if last or stop or is_due(fit.step, config.checkpoint.every):
            saver.save(
                fit.step,
                model=fit.arms,
                optimizer=fit.optimizer,
                data_state=fit.batches.state_dict(),
                trainer_state={},
            )
        if stop and not last:
            saver.wait()
            raise SystemExit(128 + signals.received[0])
    saver.wait()


def fit_step(fit: Fit, rate: float) -> dict[str, float]:
    """One update of all mixers; returns each arm's relative error, the mean over its layers."""
    count = fit.config.accumulation(1)
    totals = dict.fromkeys(fit.arms, 0.0)
    for _ in range(count):
        for name, error in add_gradients(fit, next(fit.batches), count):
            totals[name] += error.item() / (count * len(fit.arms[name]))

    # Layers are problems of their own, so each has its own norm.
    limit = fit.config.optim.max_grad_norm or math.inf
    for mixers in fit.arms.values():
        for mixer in mixers.values():
            norm = nn.utils.clip_grad_norm_(mixer.parameters(), limit)
            if not norm.isfinite():
                mixer.zero_grad()
    for group in fit.optimizer.param_groups:
        group["lr"] = rate
    fit.optimizer.step()
    fit.optimizer.zero_grad()
    return totals


def add_gradients(fit: Fit, batch: dict[str, Tensor], count: int) -> Iterator[tuple[str, Tensor]]:
    """Adds the gradients of a micro-batch, one of `count`; yields each layer's arm and relative error.

    The error is ‖ŷ − y‖² / ‖y‖² over all tokens, y the output of the teacher's attention.
    """
    decoder: Decoder = fit.teacher.model
    device = fit.accelerator.device
    with torch.no_grad():
        x = decoder.embed_tokens(batch["input_ids"].to(decoder.device))
        packing = Packing(cu_seqlens=batch["cu_seqlens"])
        read = decoder.describe(x, None, None, False, packing)
        x = decoder.scaled(read.layout.pack(read.x), read.seq)  # [1, ΣT, D]
    seq = Sequences(read.layout.cu_seqlens, device=device)

    deepest = max(int(i) for mixers in fit.arms.values() for i in mixers)
    blocks: Any = decoder.layers[: deepest + 1]
    for i, block in enumerate(blocks):
        with torch.no_grad():
            x, h = add_norm(x, None, block.mixer_norm)
            y, _ = block.mixer(h, read.seq)
            inputs, targets = h.to(device).float(), y.to(device).float()

        for name, mixers in fit.arms.items():
            if str(i) in mixers:
                with fit.accelerator.autocast():
                    output, _ = mixers[str(i)](inputs, seq)
                error = (output.float() - targets).square().sum() / targets.square().sum()
                (error / count).backward()
                yield name, error.detach()

        with torch.no_grad():
            x, h = add_norm(x, y, block.mlp_norm)
            x = x + block.mlp(h)


def write_arms(
    arms: Any, teacher: Transformer, configs: dict[str, NalandaConfig], run_dir: Path
) -> Iterator[Path]:
    """Writes each arm's hybrid as a model folder."""
    source = teacher.load(torch.device("cpu"), torch.float32)
    for name, config in configs.items():
        hybrid = build_hybrid(config, source)
        for i, mixer in arms[name].items():
            hybrid.model.layers[int(i)].mixer.load_state_dict(mixer.state_dict())
        yield write_hybrid(hybrid, teacher, run_dir / name)
