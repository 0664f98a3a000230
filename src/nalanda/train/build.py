"""Builds what the training loop needs: the processes, the data, the model, the optimizer."""

import os
import platform
import shlex
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object, set_seed
from nalanda_kernels import take_torch_path
from torch import Tensor
from transformers import PreTrainedModel

from nalanda.common.allocator import keep_freed_memory
from nalanda.common.errors import InputError
from nalanda.common.versions import versions
from nalanda.config.model import build_model_config, in_one_line, is_encoder, language_model
from nalanda.config.model_folder import weight_files
from nalanda.config.schema import RunConfig
from nalanda.data.hashes import FileHashes
from nalanda.data.loader import PackedBatches, token_sets, validation_batches, validation_files
from nalanda.data.masking import Masking
from nalanda.data.peers import Peers, meet
from nalanda.data.sources import Sources
from nalanda.data.text_bytes import TextBytes, text_bytes
from nalanda.data.token_set import SumCheck
from nalanda.data.tokenizer import build_tokenizer, check_vocabulary, is_whole, save_tokenizer
from nalanda.data.workers import processors
from nalanda.train import checkpoint, memory, parallel
from nalanda.train.checkpoint_dir import (
    checkpoint_folders,
    latest_checkpoint,
    mark_unsound,
    saved_before_sums,
)
from nalanda.train.checks import check_causal, keeps_documents_apart
from nalanda.train.flops import flops_per_token, peak_flops
from nalanda.train.guards import SpikeDetector
from nalanda.train.log import write_facts
from nalanda.train.mirror import Mirror
from nalanda.train.optim import build_optimizer, loss_scale
from nalanda.train.row_states import RowStates, check_carries, read_slots, slots_of
from nalanda.train.run_dir import no_checkpoint_message


@dataclass
class TrainerState:
    """Progress of a run; every checkpoint saves it."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    """Bad steps of the whole run: they changed nothing."""
    overflows: int = 0
    """Steps that changed nothing but fp16's loss scale."""
    bad: list[str] = field(default_factory=list)
    """Reasons of the consecutive bad steps up to this one."""


@dataclass
class Run:
    """One process's parts of a run, as `set_up` builds them."""

    config: RunConfig
    accelerator: Accelerator
    model: Any
    """The bare model."""
    wrapped: Any
    """The model under DDP or autocast: called in training."""
    optimizer: torch.optim.Optimizer
    batches: PackedBatches
    validation: dict[str, list[dict[str, Tensor]]]
    """Batches by source; {} without validation."""
    sums: SumCheck
    saver: checkpoint.Saver
    spikes: SpikeDetector
    row_states: RowStates | None
    scaler: torch.amp.GradScaler
    """fp16's loss scale; without fp16 it does nothing."""
    sharing: parallel.Sharing
    text_bytes: TextBytes | None = None
    """Bytes of the tokens' text, or None if the tokenizer loses some."""
    masking: Masking | None = None
    """Makes the batches of a masked language model."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Contents of run.json."""
    at: TrainerState = field(default_factory=TrainerState)
    checkpoint: Path | None = None
    """The checkpoint that the same command would resume from."""
    mirror: Mirror | None = None
    """Copies the run to its store, on the main process of a run in one."""
    rollbacks: Counter[Path] = field(default_factory=Counter)
    """Rollbacks to each checkpoint since the launch."""
    rolled_back_to: Path | None = None
    """Checkpoint of the last rollback, until a step after it is good."""

    def load(self, path: Path | None, find_older: Callable[[], Path | None]) -> dict | None:
        """Loads `path`. If its weights or moments are unsound, marks it and loads what `find_older` returns.

        Returns the data state, or None if no checkpoint is left; `checkpoint` is then None as well.
        """
        accelerator = self.accelerator
        while path := from_main_process(path):
            state, data_state = checkpoint.load(
                path, model=self.model, optimizer=self.optimizer, rank=accelerator.process_index
            )
            problem = self.saver.unsound(self.model, self.optimizer)
            if problem is None:
                self.spikes.load_state_dict(state.get("spikes", {}))
                if scale := state.get("loss_scale"):  # {} or missing without fp16
                    self.scaler.load_state_dict(scale)
                self.at = TrainerState(
                    **{f.name: state[f.name] for f in fields(TrainerState) if f.name in state}
                )
                self.checkpoint = path
                return data_state
            if accelerator.is_main_process:
                print(f"{path}: unsound, passed over: {problem}", flush=True)
                mark_unsound(path, problem)
                path = find_older()
        self.checkpoint = None
        return None

    def save(self, data_state: dict, *, wait: bool) -> None:
        """Saves a checkpoint of the current step. wait: also for an asynchronous save.

        It does not wait for the sums of token sets: a signal leaves little time. The checkpoint says whether
        they were all compared.
        """
        progress = {"processes": self.accelerator.num_processes, "sums_compared": self.sums.settled}
        self.checkpoint = self.saver.save(
            self.at.step,
            model=self.model,
            optimizer=self.optimizer,
            data_state=data_state,
            trainer_state={
                **asdict(self.at),
                "spikes": self.spikes.state_dict(),
                "loss_scale": self.scaler.state_dict(),
                **progress,
            },
            row_states=self.row_states.state_tensors()
            if self.row_states and self.sharing.first
            else None,
        )
        if wait:
            self.saver.wait()
        self.note_saved()

    def leave(self, error: type[BaseException] | None) -> None:
        """Lets a save that is under way end when the run fails, and notes it."""
        self.saver.close(error)
        self.facts["saved"] = self.saver.saved

    def note_saved(self) -> None:
        """Writes the newest checkpoint on the disk to run.json; an asynchronous save gets there later."""
        if not self.accelerator.is_main_process or self.facts["saved"] == self.saver.saved:
            return
        self.facts["saved"] = self.saver.saved
        write_facts(Path(self.config.output_dir), self.facts)
        if self.mirror is not None:
            self.mirror.start()


def set_up(
    config: RunConfig,
    accelerator: Accelerator,
    sharing: parallel.Sharing,
    facts: dict,
    changes: dict[str, list],
    resume: Path | None,
    say: Callable[[str], None] = lambda what: None,
) -> Run:
    """Builds the run, from the checkpoint `resume` if there is one. facts, changes: from `run_dir.claim`.
    say: gets the name of what is under way.

    Raises:
        InputError: the data or the model cannot work, or no checkpoint is sound.
    """
    main, rank, processes = (
        accelerator.is_main_process,
        accelerator.process_index,
        accelerator.num_processes,
    )
    run_dir = Path(config.output_dir)
    check_shared(run_dir, accelerator)
    say("preparing the tokenizer")
    with accelerator.main_process_first():
        tokenizer = build_tokenizer(config.tokenizer, config.data, run_dir / "tokenizer")
        if main and not is_whole(run_dir / "tokenizer"):
            save_tokenizer(tokenizer, run_dir / "tokenizer")
    say("opening the data")
    note = partial(print, "nalanda:", file=sys.stderr, flush=True) if main else lambda line: None
    peers = meet(gather_object) if processes > 1 else None
    sources = on_main_process(
        main, lambda: Sources().open_all(config.data, validation=config.validation.every != 0)
    )
    hashes = FileHashes(run_dir / "hashes.jsonl") if main else None
    share = sharing.rank, sharing.world_size
    batches, validation = open_batches(config, tokenizer, *share, note, peers, hashes, sources)
    if hashes and validation:
        batches.files |= validation_files(config.data, batches, hashes, sources)
    sums = start_sums(config, rank, processes, sources)
    if config.data.verify == "sums":
        finish_sums(sums)

    say("building the model")
    set_seed(config.seed)
    # Weights, gradients and one moment per parameter share a CPU's memory.
    bytes_each = 12 if accelerator.device.type == "cpu" and sharing.kind == "ddp" else 4
    model = build_model(config, tokenizer, weights=resume is None, bytes_each=bytes_each)
    flops, flops_source = flops_per_token(model, config.data.seq_len)
    build = partial(build_optimizer, model, config.optim)
    wrapped, optimizer = parallel.parallelize(accelerator, model, sharing, config.train, build)
    checkpoint.check_optimizer(optimizer)
    set_seed(config.seed, device_specific=True)
    masking = Masking(tokenizer, config.data, config.seed) if is_encoder(model.config) else None
    say("checking the model")
    if masking is None:
        check_causal(accelerator, model)
    else:
        validation = masking.fixed(validation, sharing.rank, sharing.world_size)
    kept_apart = keeps_documents_apart(accelerator, model)
    peak, peak_source = peak_flops(accelerator.device, config.train.precision)
    peak = accelerator.reduce(torch.tensor(peak, device=accelerator.device)).item()

    row_states = None
    if config.data.long_documents == "carry":
        check_carries(model)
        row_states = RowStates()
    saver = checkpoint.Saver(
        run_dir / "checkpoints",
        config.checkpoint,
        rank=rank,
        processes=processes,
        timeout=patience(config),
    )
    spikes = SpikeDetector(config.guard)
    scaler = loss_scale(config.train.precision, accelerator.device)
    parts = (
        accelerator,
        model,
        wrapped,
        optimizer,
        batches,
        validation,
        sums,
        saver,
        spikes,
        row_states,
        scaler,
    )
    counts = validation and masking is None  # which tokens' text is only known of a causal model's
    run = Run(config, *parts, sharing, text_bytes(tokenizer) if counts else None, masking)
    if resume:
        say("loading the checkpoint")
        data_state = run.load(resume, partial(latest_checkpoint, saver.directory))
        if run.checkpoint is None or data_state is None:
            raise InputError(no_checkpoint_message(run_dir))
        say("comparing the files that were read")
        loaded = partial(_load_data_state, batches, data_state)
        batches.load_state_dict(on_main_process(main, loaded), checked=True)
        if row_states:
            rows = config.train.micro_batch_size
            slots = slots_of(sharing.rank, sharing.world_size, config.accumulation(processes), rows)
            saved = read_slots(run.checkpoint.glob("lanes-*"), slots)
            row_states.load(saved, slots, accelerator.device)
    run.facts |= {
        "state": "running",
        "step": run.at.step,
        "saved": saver.saved,
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
        "parallel": sharing.kind if processes > 1 else None,
        "context_parallel": config.train.context_parallel,
        "precision": config.train.precision,
        "compiled": parallel.compiles(config.train.compile, accelerator.device),
        "versions": versions(),
        "changes": [
            *facts.get("changes", []),
            *([{"step": run.at.step, **changes}] if changes else []),
        ],
        "host": platform.node(),
        "pid": os.getpid(),
    }
    return run


def _load_data_state(batches: PackedBatches, state: dict) -> dict:
    batches.load_state_dict(state)
    return batches.position


def start_sums(
    config: RunConfig, rank: int, processes: int, sources: Sources | None = None
) -> SumCheck:
    """Starts comparing this process's share of the token sets' files with their sums."""
    sets = token_sets(config.data, validation=config.validation.every != 0, sources=sources)
    files = [file for tokens in sets for file in tokens.files]
    record = Path(config.output_dir) / "sums.jsonl"
    return SumCheck(files[rank::processes] if config.data.verify != "sizes" else [], record)


def finish_sums(
    sums: SumCheck, beat: Callable[[], None] = lambda: None, checkpoints: Path | None = None
) -> None:
    """Waits until every process has compared its share; `refuse_damage`."""
    if sums.settled:
        return
    sums.wait(beat)
    refuse_damage(sums, checkpoints)
    sums.settled = True


def refuse_damage(sums: SumCheck, checkpoints: Path | None = None) -> None:
    """Raises `InputError` on all processes if one of them has found a damaged file. It names the checkpoints
    of the folder that were saved before all files were compared."""
    problems = [problem for problem in gather_object([sums.problem]) if problem]
    if not problems:
        return
    doubtful = (
        [path.name for path in checkpoint_folders(checkpoints) if saved_before_sums(path)]
        if checkpoints
        else []
    )
    advice = (
        f"; {', '.join(doubtful)} may have learnt from it: remove what you do not trust"
        if doubtful
        else ""
    )
    raise InputError(problems[0] + advice)


def patience(config: RunConfig) -> timedelta:
    """How long a collective waits: longer than the watchdog, which says what every process was doing."""
    hang = config.guard.hang_timeout
    return timedelta(days=7) if hang is None else timedelta(seconds=2 * hang)


def check_shared(run_dir: Path, accelerator: Accelerator) -> None:
    """Raises `InputError` on all processes if one does not see the folder that the main process writes to."""
    if accelerator.num_processes == 1:
        return
    token = from_main_process(uuid.uuid4().hex if accelerator.is_main_process else None)
    file = run_dir / f".shared-{token}"
    if accelerator.is_main_process:
        file.touch()
    accelerator.wait_for_everyone()
    lacking = [host for host in gather_object([None if file.exists() else platform.node()]) if host]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        file.unlink()
    if lacking:
        raise InputError(
            f"output_dir: {lacking[0]} does not see what the first process writes to {run_dir}; name a "
            "folder that all nodes share"
        )


def check_card(precision: str) -> None:
    """Raises `InputError` for bf16 on a card that only emulates it: one before Ampere."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes", "on")
    if precision != "bf16" or on_cpu or not torch.cuda.is_available():
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InputError("train.precision: this card has no bf16; set train.precision=fp16")


def launch(config: RunConfig) -> Accelerator:
    """The Accelerator. Raises `InputError` if the launcher was asked for more processes than joined."""
    asked, lone = (
        os.environ.get("WORLD_SIZE"),
        "MASTER_ADDR" in os.environ and "RANK" not in os.environ,
    )
    torch.set_flush_denormal(True)  # their products are slow; before threads start
    if config.train.cpu_threads:
        torch.set_num_threads(config.train.cpu_threads)
    check_card(config.train.precision)
    try:
        groups = InitProcessGroupKwargs(timeout=patience(config))
        precision = "no" if config.train.precision == "fp32" else config.train.precision
        accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[groups])
    except ValueError as error:
        raise InputError(f"train.precision: {config.train.precision}: {error}") from None
    if precision == "fp16":
        # accelerate 1.15 has no fp16 on CPUs, and its loss scale would skip steps behind the loop's back.
        accelerator.native_amp, accelerator.scaler = True, None
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
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    cores = processors()
    if accelerator.device.type == "cpu" and accelerator.is_main_process:
        threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if threads < cores:
            print(
                f"{threads} of {cores} CPU cores in use: train.cpu_threads=N sets more (a launcher set less)"
            )
        elif (
            accelerator.num_processes == 1
            and 1 < cores <= 8
            and config.train.micro_batch_size % cores == 0
        ):
            script = sys.argv[0].endswith("pretrain.py")
            launched = sys.argv if script else ["-m", "nalanda_cli", *sys.argv[1:]]
            program = ["torchrun", "--standalone", "--nproc_per_node", str(cores), *launched]
            rows = config.train.micro_batch_size // cores
            print(
                f"a small model trains faster in {cores} processes of one thread:\n"
                f"    ACCELERATE_USE_CPU=true {shlex.join(program)} train.cpu_threads=1 "
                f"train.micro_batch_size={rows}"
            )
    return accelerator


def from_main_process(value: Any) -> Any:
    """The main process's value, on every process."""
    return broadcast_object_list([value])[0]


def on_main_process(main: bool, act: Callable[[], Any]) -> Any:
    """What `act` returns on the main process, on every process. Its `InputError` is raised on all."""
    found = problem = None
    if main:
        try:
            found = act()
        except InputError as error:
            problem = error
    found, problem = from_main_process((found, problem))
    if problem:
        raise problem
    return found


def open_batches(
    config: RunConfig,
    tokenizer: Any,
    rank: int = 0,
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
    peers: Peers | None = None,
    hashes: FileHashes | None = None,
    sources: Sources | None = None,
) -> tuple[PackedBatches, dict[str, list[dict[str, Tensor]]]]:
    """One process's training batches, and its validation batches by source; {} without validation.

    hashes, sources: of `PackedBatches`."""
    share: Any = {"rank": rank, "world_size": processes, "sources": sources}
    rows, slots = config.train.micro_batch_size, config.train.tokens_per_step // config.data.seq_len
    validation = config.validation.every != 0
    batches = PackedBatches(
        config.data,
        tokenizer,
        split="train",
        batch_size=rows,
        seed=config.seed,
        slots=slots,
        peers=peers,
        hashes=hashes,
        **share,
    )
    if not validation:
        return batches, {}
    rows = config.validation.batch_size or rows
    return batches, validation_batches(config.data, tokenizer, batch_size=rows, say=say, **share)


def build_model(
    config: RunConfig, tokenizer: Any, *, weights: bool = True, bytes_each: int = 4
) -> PreTrainedModel:
    """The model of `config.model` in fp32, initialised or, with `init_from` and `weights`, loaded.

    bytes_each: host memory that every parameter must find free. Raises `InputError`.
    """
    model_config = build_model_config(config, tokenizer)
    memory.check_model(model_config, bytes_each)
    check_vocabulary(tokenizer, model_config.vocab_size)
    path = config.model.get("init_from")
    if path is None or not weights:
        with in_one_line("model"):
            model = language_model(model_config).from_config(model_config, dtype=torch.float32)
        take_torch_path(sys.modules[type(model).__module__])
        return model
    with in_one_line(f"model.init_from: {path}"):
        if Path(path).is_dir():
            weight_files(Path(path))
        model, loaded = language_model(model_config).from_pretrained(
            path,
            config=model_config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for problem in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if loaded[problem]:
            name = sorted(map(str, loaded[problem]))[0]
            raise InputError(
                f"model.init_from: {path}: a checkpoint of another shape: {problem}: {name}"
            )
    take_torch_path(sys.modules[type(model).__module__])
    return model
