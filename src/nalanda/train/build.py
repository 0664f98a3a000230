"""Builds what the training loop needs: the launch, the data, the model."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nalanda.common.errors import InputError
from nalanda.config.model import build_model_config, in_one_line
from nalanda.config.model_folder import weight_files
from nalanda.config.schema import RunConfig
from nalanda.data.loader import PackedBatches, token_sets, validation_batches, validation_contents
from nalanda.data.token_set import SumCheck
from nalanda.data.tokenizer import check_vocabulary
from nalanda.train import memory


def content_hashes(config: RunConfig, batches: PackedBatches, validation: bool) -> dict[str, dict[str, str]]:
    """The contents of the files that are read as text, those of `validation` among them."""
    contents = batches.contents
    return {**contents, **(validation_contents(config.data, contents) if validation else {})}


def start_sums(config: RunConfig, rank: int, processes: int) -> SumCheck:
    """This process's share of the prepared sets' files, being compared with their sums."""
    sets = token_sets(config.data, validation=config.validation.every != 0)
    files = [file for tokens in sets for file in tokens.files]
    return SumCheck(files[rank::processes] if config.data.verify != "sizes" else [])


def finish_sums(sums: SumCheck, beat: Callable[[], None] = lambda: None) -> None:
    """Waits until every process has compared its share. Raises `InputError` on all if a file is damaged."""
    if sums.settled:
        return
    problems = [problem for problem in gather_object([sums.wait(beat)]) if problem]
    if problems:
        raise InputError(problems[0])
    sums.settled = True


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


def from_main_process(value: Any) -> Any:
    """The main process's value, on every process."""
    return broadcast_object_list([value])[0]


def open_batches(
    config: RunConfig, tokenizer: Any, rank: int = 0, processes: int = 1
) -> tuple[PackedBatches, dict[str, list[dict[str, Tensor]]]]:
    """What one process trains on, and what it validates on, by source; {} without validation."""
    share: Any = {"rank": rank, "world_size": processes}
    rows, lanes = config.train.micro_batch_size, config.train.tokens_per_step // config.data.seq_len
    batches = PackedBatches(
        config.data, tokenizer, split="train", batch_size=rows, seed=config.seed, slots=lanes, **share
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
        with in_one_line("model"):
            return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    with in_one_line(f"model.init_from: {path}"):
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
