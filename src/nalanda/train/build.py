"""Sets up a run: the tokenizer, the data, the model, the optimizer, and the checkpoint to resume from."""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from nalanda_kernels import check_blocks, keep_fla_off_cpus
from torch import nn
from transformers import PreTrainedModel

from nalanda.common.errors import InputError
from nalanda.common.products import product_route
from nalanda.common.versions import versions
from nalanda.config.model import build_model_config, in_one_line, is_encoder, language_model
from nalanda.config.model_folder import check_hub, weight_files
from nalanda.config.schema import RunConfig, Stage
from nalanda.data.hashes import FileHashes
from nalanda.data.loader import PackedBatches, validation_batches, validation_files
from nalanda.data.masking import Masking
from nalanda.data.packing import Batch
from nalanda.data.peers import Peers, meet
from nalanda.data.sources import Sources
from nalanda.data.text_bytes import text_bytes
from nalanda.data.token_set import SumCheck
from nalanda.data.tokenizer import build_tokenizer, check_vocabulary, is_whole, save_tokenizer
from nalanda.model import chunk_forward
from nalanda.train import checkpoint, parallel
from nalanda.train.carried_states import check_carries, slots_of
from nalanda.train.checkpoint_dir import (
    checkpoint_folders,
    latest_checkpoint,
    saved_before_sums,
    step_of,
)
from nalanda.train.checks import check_causal, keeps_documents_apart
from nalanda.train.distill import load_teacher
from nalanda.train.ema import Averages
from nalanda.train.estimate import meta_model, stage_figures
from nalanda.train.flops import flops_per_token, hardware_name, peak_flops
from nalanda.train.guards import SpikeDetector
from nalanda.train.launch import check_shared, on_main_process, patience
from nalanda.train.mirror import Mirror
from nalanda.train.needs import Needs, check_disk, check_step, check_weights_fit, needs_of
from nalanda.train.optim import build_optimizer, loss_scale
from nalanda.train.run import Run, StageData, stage_at
from nalanda.train.run_dir import no_checkpoint_message


def set_up(
    recipe: RunConfig,
    stages: list[Stage],
    accelerator: Accelerator,
    resume: Path | None,
    mirror: Mirror | None,
    say: Callable[[str], None],
) -> Run:
    """Builds the run, from the checkpoint `resume` if there is one.

    recipe: as it was launched. stages: its own, which read local copies of a store's token sets. mirror: of a run in a
    store. say: gets the name of the current step.

    Raises:
        InputError: the data or the model cannot work, or no checkpoint is sound.
        ValueError: NALANDA_BLOCKS names no table that can be used.
    """
    stage = stage_at(stages, step_of(resume) if resume else 0)
    config = stage.config
    if mirror is None:
        check_shared(config.run_dir, accelerator)
    check_blocks()
    sources = Sources(config.data, validation=config.validation.every != 0)
    sharing = parallel.Sharing(accelerator, config.train)

    say("preparing the tokenizer")
    tokenizer = prepare_tokenizer(config, accelerator, sources, mirror)

    # As soon as the vocabulary is known: what does not fit is refused before any work.
    needs, encoder = check_machine(recipe, accelerator, sharing, tokenizer, resume)

    say("opening the data")
    open_stage = StageOpener(accelerator, tokenizer, encoder, sources, sharing)
    # Those of later stages too: what they lack is refused before the first step.
    opened = [open_stage(each) for each in stages[stages.index(stage) :]]
    sums = start_sums(config, accelerator, [data.sources for data in opened])
    validates = bool(opened[0].validation)

    # One seed on all processes while weights are drawn, then one of each process for dropout.
    say("building the model")
    set_seed(config.seed)
    model = build_model(recipe, tokenizer, weights=resume is None)
    teacher = load_teacher(config.distill, tokenizer, model.config, accelerator.device)

    # Of the bare model, before it is sharded.
    costs = count_flops(config, accelerator, model)
    if len(stages) > 1:
        costs["stages"] = [stage_figures(each, model) for each in stages]

    build = partial(build_optimizer, model, config.optim)
    wrapped, optimizer = parallel.parallelize(accelerator, model, sharing, config.train, build)
    # Before the first step: otherwise the first save would fail, and its steps be lost.
    checkpoint.check_optimizer(optimizer)
    set_seed((config.seed + accelerator.process_index) % 2**32)

    say("checking the model")
    carries = any(each.config.data.long_documents == "carry" for each in stages)
    kept_apart = verify_model(accelerator, model, carries)

    run = Run(
        stages=stages,
        stage=stage,
        open=open_stage,
        accelerator=accelerator,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        scaler=loss_scale(config.train.precision, accelerator.device),
        sums=sums,
        needs=needs,
        teacher=teacher,
        # Which tokens' text a loss counts is known of causal models only.
        text_bytes=text_bytes(tokenizer) if validates and not encoder else None,
        spikes=SpikeDetector(config.guard),
        averages=Averages(model, config.train.ema),
        saver=checkpoint.Saver(
            config.run_dir / "checkpoints",
            config.checkpoint,
            rank=accelerator.process_index,
            processes=accelerator.num_processes,
            timeout=patience(config),
            first=mirror.first if mirror else 0,
        ),
        mirror=mirror,
    )

    # Last, since it fills all that was built: weights, moments, positions, random states.
    if resume:
        restore(run, resume, say)
    run.facts |= describe(run, {"documents_kept_apart": kept_apart, **costs})
    return run


def prepare_tokenizer(
    config: RunConfig, accelerator: Accelerator, sources: Sources, mirror: Mirror | None = None
) -> Any:
    """Loads or trains the tokenizer. The main process does it first, and leaves it in the run's folder."""
    folder = config.run_dir / "tokenizer"
    build = partial(build_tokenizer, config.tokenizer, config.data, folder, sources.texts)
    tokenizer = build() if accelerator.is_main_process else None
    if tokenizer is not None and not is_whole(folder):
        save_tokenizer(tokenizer, folder)
    accelerator.wait_for_everyone()
    if mirror:
        mirror.share("tokenizer")
    return build() if tokenizer is None else tokenizer


def check_machine(
    config: RunConfig,
    accelerator: Accelerator,
    sharing: parallel.Sharing,
    tokenizer: Any,
    resume: Path | None,
) -> tuple[Needs, bool]:
    """Refuses a run whose model, steps or files this machine cannot hold. Sets which chunks a CPU saves.

    Returns what the run needs, and whether its model is an encoder.

    Raises:
        InputError: the memory is too small.
        DiskFull: the disk of the run's folder is.
    """
    device, processes = accelerator.device.type, accelerator.num_processes
    model, run_dir = meta_model(config, tokenizer), config.run_dir
    # Weights, gradients and one moment share a CPU's memory.
    check_weights_fit(
        model.num_parameters(), 12 if device == "cpu" and sharing.kind == "ddp" else 4
    )

    # Newer checkpoints than `resume` are set aside, and no longer the run's.
    last = step_of(resume) if resume else 0
    steps = map(step_of, checkpoint_folders(run_dir / "checkpoints"))
    saved = [step for step in steps if step <= last]
    needs = needs_of(config, model, processes, device, saved)
    # No value depends on it: chunks that are not saved are computed again.
    chunk_forward.SAVED_TOKENS = needs.saved_tokens
    if device == "cpu":
        check_step(needs)
    on_main_process(accelerator.is_main_process, lambda: check_disk(needs.files, run_dir))
    return needs, is_encoder(model.config)


class StageOpener:
    """Opens the data of stages. Stages that read the same rows share them, and a source is opened once.

    encoder: of the model. sources, sharing: those of one stage, which are there already.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        tokenizer: Any,
        encoder: bool,
        sources: Sources,
        sharing: parallel.Sharing,
    ):
        self.accelerator, self.tokenizer, self.encoder = accelerator, tokenizer, encoder
        self.hashes: FileHashes | None = None
        self.opened: list[tuple[Stage, StageData]] = []
        self.sources, self.sharings = [sources], {sharing.context_parallel: sharing}

    def __call__(self, stage: Stage) -> StageData:
        """The data of a stage. All processes must call it. Raises `InputError`."""
        config = stage.config
        for other, data in self.opened:
            if other.order == stage.order and all(
                getattr(other.config, name) == getattr(config, name)
                for name in ("data", "train", "validation")
            ):
                return data

        with stage.named_in_errors():
            data = self.open(stage)
        self.opened.append((stage, data))
        return data

    def open(self, stage: Stage) -> StageData:
        config, parts = stage.config, stage.config.train.context_parallel
        if parts not in self.sharings:
            self.sharings[parts] = parallel.Sharing(self.accelerator, config.train)
        sharing = self.sharings[parts]
        sources = next((each for each in self.sources if each.data == config.data), None)
        if self.accelerator.is_main_process and self.hashes is None:
            self.hashes = FileHashes(config.run_dir / "hashes.jsonl")
        batches, validation, sources = open_data(
            config,
            self.accelerator,
            sharing,
            self.tokenizer,
            sources or Sources(config.data, validation=config.validation.every != 0),
            stage.order,
            self.hashes,
        )
        self.sources.append(sources)

        masking = None
        if self.encoder:
            masking = Masking(self.tokenizer, config.data, config.seed)
            # The same masks at each validation, so that its losses compare.
            validation = masking.fixed(validation, sharing.rank, sharing.world_size)
        return StageData(sources, batches, validation, masking, sharing)


def open_data(
    config: RunConfig,
    accelerator: Accelerator,
    sharing: parallel.Sharing,
    tokenizer: Any,
    sources: Sources,
    order: str = "",
    hashes: FileHashes | None = None,
) -> tuple[PackedBatches, dict[str, list[Batch]], Sources]:
    """Opens this process's training batches and its validation batches. Returns the open sources too.

    order: of `Stage`. hashes: of the main process; without, they are read from the run's folder.
    """
    main, processes = accelerator.is_main_process, accelerator.num_processes
    # The main process lists the files, once for all.
    opened = on_main_process(main, sources.open_all)
    if opened.data == sources.data:  # else this node keeps its copies of token sets elsewhere
        sources = opened
    if main and hashes is None:
        hashes = FileHashes(config.run_dir / "hashes.jsonl")
    # The rows of this process, or of its context, for training and validation.
    batches, validation = open_batches(
        config,
        tokenizer,
        sharing.rank,
        sharing.world_size,
        say=partial(print, "nalanda:", file=sys.stderr, flush=True) if main else lambda line: None,
        peers=meet(gather_object) if processes > 1 else None,
        hashes=hashes,
        sources=sources,
        order=order,
    )
    if hashes and validation:
        batches.files |= validation_files(sources, batches, hashes)
    return batches, validation, sources


def count_flops(config: RunConfig, accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """Returns the facts about a token's FLOPs and the peak of all devices, each with its source."""
    flops, flops_source = flops_per_token(model, config.data.seq_len)
    peak, peak_source = peak_flops(accelerator.device, config.train.precision)
    # Devices may differ, so their peaks are added up.
    peak = accelerator.reduce(torch.tensor(peak, device=accelerator.device)).item()
    return {
        "training_flops_per_token": flops,
        "flops": flops_source,
        "peak_flops": peak,
        "peak": peak_source,
    }


def verify_model(accelerator: Accelerator, model: Any, carries: bool) -> bool:
    """Checks that a decoder is causal, and that its state can pass from row to row if it must.

    Returns whether the model keeps packed documents apart. Raises `InputError`.
    """
    if not is_encoder(model.config):
        check_causal(accelerator, model)
    documents_apart = keeps_documents_apart(accelerator, model)
    if carries:
        check_carries(model)
    return documents_apart


def restore(run: Run, resume: Path, say: Callable[[str], None]) -> None:
    """Loads the checkpoint `resume`, or the newest sound one before it, into a new run.

    Raises:
        InputError: none is sound, or the data were changed.
    """
    say("loading the checkpoint")
    find_older = partial(latest_checkpoint, run.saver.directory, complete=run.complete)
    data_state = run.load(resume, find_older)
    if run.checkpoint is None or data_state is None:
        raise InputError(no_checkpoint_message(run.config.run_dir))
    # An unsound checkpoint was passed over, and the one before it is of an earlier stage.
    if run.at.step <= run.stage.begin and run.stage.begin:
        run.enter(stage_at(run.stages, run.at.step))

    say("comparing the files that were read")

    def load_data_state() -> dict:
        run.batches.load_state_dict(data_state)
        return run.batches.position

    # The main process compares the files with their hashes; the others take its position unchecked.
    position = on_main_process(run.accelerator.is_main_process, load_data_state)
    run.batches.load_state_dict(position, checked=True)

    if run.carried_states:
        rows, sharing = run.config.train.micro_batch_size, run.sharing
        # This rank's slots of a step; they were perhaps saved by other ranks.
        slots = slots_of(sharing.rank, sharing.world_size, run.accumulation, rows)
        run.carried_states.load(run.checkpoint, slots, run.accelerator.device)


def describe(run: Run, measured: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of run.json about a run that is set up; `measured` are among them."""
    config, model = run.config, run.model
    device, processes = run.accelerator.device, run.accelerator.num_processes
    return {
        "step": run.at.step,
        "saved": run.saver.saved,
        "steps": config.train.steps,
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(exclude_embeddings=True),
        **measured,
        "executors": None,  # by recurrence, once a step has run
        "device": str(device.type),
        "hardware": hardware_name(device),
        "products": product_route(),
        "processes": processes,
        "parallel": run.sharing.kind if processes > 1 else None,
        "context_parallel": config.train.context_parallel,
        "precision": config.train.precision,
        "compiled": parallel.compiles(config.train.compile, device),
        "versions": versions(),
    }


def start_sums(config: RunConfig, accelerator: Accelerator, sources: Iterable[Sources]) -> SumCheck:
    """Starts comparing this process's share of the token sets' files with their sums; waits for it if the recipe
    asks for that."""
    sets = [tokens for each in sources for tokens in each.token_sets()]
    # Once each, in one order on all processes.
    files = list(dict.fromkeys(file for tokens in sets for file in tokens.files))
    share = files[accelerator.process_index :: accelerator.num_processes]
    record = config.run_dir / "sums.jsonl"
    sums = SumCheck(share if config.data.verify != "sizes" else [], record)
    if config.data.verify == "sums":
        finish_sums(sums)
    return sums


def finish_sums(
    sums: SumCheck, beat: Callable[[], None] = lambda: None, checkpoints: Path | None = None
) -> None:
    """Waits until every process has compared its share; `refuse_damage`."""
    if sums.settled:
        return
    sums.wait(beat)
    refuse_damage(sums, checkpoints)
    sums.settled = True


def refuse_damage(sums: SumCheck, checkpoints: Path | None) -> None:
    """Raises `InputError` on all processes if one of them has read a damaged file.

    The error names the checkpoints of the folder that were saved before all files were compared.
    """
    problems = [problem for problem in gather_object([sums.problem]) if problem]
    if not problems:
        return
    folders = checkpoint_folders(checkpoints) if checkpoints else []
    doubtful = [path.name for path in folders if saved_before_sums(path)]
    advice = ""
    if doubtful:
        advice = f"; {', '.join(doubtful)} may have learnt from it: remove what you do not trust"
    raise InputError(problems[0] + advice)


def open_batches(
    config: RunConfig,
    tokenizer: Any,
    rank: int = 0,
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
    peers: Peers | None = None,
    hashes: FileHashes | None = None,
    sources: Sources | None = None,
    order: str = "",
) -> tuple[PackedBatches, dict[str, list[Batch]]]:
    """One process's training batches, and its validation batches by source; {} without validation.

    hashes, sources: of `PackedBatches`. order: of `Stage`."""
    share: Any = {"rank": rank, "world_size": processes, "sources": sources}
    # Slots: the rows of a step, on all processes together.
    rows, slots = config.train.micro_batch_size, config.train.tokens_per_step // config.data.seq_len
    validation = config.validation.every != 0
    batches = PackedBatches(
        config.data,
        tokenizer,
        batch_size=rows,
        seed=f"{config.seed}/{order}" if order else config.seed,
        slots=slots,
        peers=peers,
        hashes=hashes,
        **share,
    )
    if not validation:
        return batches, {}
    rows = config.validation.batch_size or rows
    return batches, validation_batches(config.data, tokenizer, batch_size=rows, say=say, **share)


def seeded_modules(model: nn.Module, seed: int) -> Iterator[nn.Module]:
    """Each module, with torch's generator seeded by its name and `seed`. The generator is restored after the last."""
    with torch.random.fork_rng():
        for name, module in model.named_modules():
            torch.manual_seed(int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:7]))
            yield module


def draw_by_name(model: PreTrainedModel, seed: int) -> None:
    """Initialises the model again, each module by a generator of its own, seeded by its name and `seed`.

    A matrix that modules share is drawn for the first of them: the embeddings, tied or not, are alike.
    """
    drawn: set[int] = set()
    for module in seeded_modules(model, seed):
        for parameter in module.parameters(recurse=False):
            # transformers draws no parameter that is marked.
            parameter._is_hf_initialized = id(parameter) in drawn  # pyrefly: ignore[missing-attribute]
            drawn.add(id(parameter))
        model._init_weights(module)


def build_model(config: RunConfig, tokenizer: Any, *, weights: bool = True) -> PreTrainedModel:
    """The model of `config.model` in fp32, initialised or, with `init_from` and `weights`, loaded.

    Raises `InputError`.
    """
    model_config = build_model_config(config, tokenizer)
    check_vocabulary(tokenizer, model_config.vocab_size)
    path = config.model.get("init_from")
    # A resume takes its checkpoint's weights, not those of init_from.
    if path is None or not weights:
        with in_one_line("model"):
            model = language_model(model_config).from_config(model_config, dtype=torch.float32)
        if config.seed_by_name:
            draw_by_name(model, config.seed)
        keep_fla_off_cpus(sys.modules[type(model).__module__])
        return model

    with in_one_line(f"model.init_from: {path}"):
        check_hub(path)
        if Path(path).is_dir():
            weight_files(Path(path))
        model, loaded = language_model(model_config).from_pretrained(
            path,
            config=model_config,
            dtype=torch.float32,
            output_loading_info=True,
            # Otherwise transformers itself raises, in many lines; the loop below writes one.
            ignore_mismatched_sizes=True,
        )
    for problem in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        if loaded[problem]:
            name = sorted(map(str, loaded[problem]))[0]
            raise InputError(
                f"model.init_from: {path}: a checkpoint of another shape: {problem}: {name}"
            )
    keep_fla_off_cpus(sys.modules[type(model).__module__])
    return model
