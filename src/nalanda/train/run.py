"""A run on one process: its parts, its progress, and its checkpoints."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from nalanda.config.schema import RunConfig, Stage
from nalanda.data.loader import PackedBatches
from nalanda.data.masking import Masking
from nalanda.data.packing import Batch
from nalanda.data.sources import Sources
from nalanda.data.text_bytes import TextBytes
from nalanda.data.token_set import SumCheck
from nalanda.train import checkpoint, parallel
from nalanda.train.carried_states import CarriedStates
from nalanda.train.checkpoint_dir import mark_unsound
from nalanda.train.distill import Teacher
from nalanda.train.ema import Averages
from nalanda.train.guards import Interruptions, SpikeDetector, Watchdog
from nalanda.train.launch import from_main_process
from nalanda.train.log import RunLog, write_facts
from nalanda.train.meters import RankTimes, ReadingLog, TrainingSpeed
from nalanda.train.mirror import Mirror
from nalanda.train.needs import Needs
from nalanda.train.optim import parameter_groups


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
    """Reasons of the bad steps since the last good one. An overflow of fp16 counts as neither."""
    settled: int = 0
    """The last step that no bad step follows. A save that is due behind it waits for the next good step."""


def stage_at(stages: list[Stage], step: int) -> Stage:
    """The stage of a step. A checkpoint of a stage's last step belongs to it, and not to the next one."""
    return next((stage for stage in stages if step <= stage.end), stages[-1])


@dataclass(frozen=True)
class StageData:
    """The open data of a stage."""

    sources: Sources
    batches: PackedBatches
    validation: dict[str, list[Batch]]
    """Batches by source; {} without validation."""
    masking: Masking | None
    """Makes the batches of a masked language model."""
    sharing: parallel.Sharing


@dataclass(kw_only=True)
class Run:
    """The parts of a run on one process, as `build.set_up` makes them."""

    stages: list[Stage]
    stage: Stage
    """The one under way."""
    open: Callable[[Stage], StageData]
    """Opens the data of a stage, once."""
    positions: dict[str, dict] = field(default_factory=dict)
    """Position in the data of each stage that was left, by `Stage.order`."""
    accelerator: Accelerator
    model: Any
    """The model without DDP, for saving and validation. accelerate patches autocast into its `forward`."""
    wrapped: Any
    """What training calls: the model under DDP; in one process `model` itself."""
    optimizer: torch.optim.Optimizer
    sums: SumCheck
    needs: Needs
    saver: checkpoint.Saver
    spikes: SpikeDetector
    averages: Averages
    scaler: torch.amp.GradScaler
    """fp16's loss scale; without fp16 it does nothing."""
    text_bytes: TextBytes | None = None
    """Bytes of the tokens' text, or None if the tokenizer loses some."""
    teacher: Teacher | None = None
    """Whose next tokens the model learns beside those of the text."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Contents of run.json."""
    at: TrainerState = field(default_factory=TrainerState)
    checkpoint: Path | None = None
    """The newest checkpoint, perhaps still being written: the same command resumes from it once it is whole."""
    mirror: Mirror | None = None
    """Copies a run in a store."""
    rollbacks: Counter[Path] = field(default_factory=Counter)
    """Rollbacks to each checkpoint since the launch."""
    rolled_back_to: Path | None = None
    """Checkpoint of the last rollback, until a step after it is good."""

    # Of the stage under way, from `take`.
    config: RunConfig = field(init=False)
    batches: PackedBatches = field(init=False)
    validation: dict[str, list[Batch]] = field(init=False)
    masking: Masking | None = field(init=False)
    sharing: parallel.Sharing = field(init=False)
    carried_states: CarriedStates | None = field(init=False)

    # What accompanies the steps, from `loop.train_together` and `loop.watched`.
    signals: Interruptions = field(init=False)
    watchdog: Watchdog = field(init=False)
    log: RunLog = field(init=False)
    speed: TrainingSpeed = field(init=False)
    rank_times: RankTimes = field(init=False)
    reading: ReadingLog = field(init=False)
    watching: ExitStack = field(init=False)
    """Holds the watch over the first step."""
    attempts: dict[Any, None] = field(init=False)
    """Which backends served its ops, see `nalanda_kernels.watch`."""

    def __post_init__(self) -> None:
        self.take(self.stage)

    def take(self, stage: Stage) -> None:
        """Takes the settings and the data of `stage`."""
        data = self.open(stage)
        self.stage, self.config = stage, stage.config
        self.batches, self.validation = data.batches, data.validation
        self.masking, self.sharing = data.masking, data.sharing
        carries = stage.config.data.long_documents == "carry"
        self.carried_states = CarriedStates() if carries else None

    def enter(self, stage: Stage) -> None:
        """Goes from the stage under way to another, which reads on where its data were left."""
        left, batches, states = self.stage, self.batches, self.carried_states
        self.positions[left.order] = batches.position
        self.take(stage)

        if self.batches is batches:
            self.carried_states = states
        else:
            batches.close()
            if position := self.positions.get(stage.order):
                self.batches.load_state_dict(position, checked=True)
                if self.carried_states:  # those of its rows are gone
                    self.carried_states.forget()

        if stage.config.optim != left.config.optim:
            settings = parameter_groups(self.model, stage.config.optim)
            for group, new in zip(self.optimizer.param_groups, settings, strict=True):
                group.update({key: new[key] for key in ("weight_decay", "lr_scale")})
        if stage_facts := self.facts.get("stages"):
            of_stage = stage_facts[self.stages.index(stage)]
            self.facts["training_flops_per_token"] = of_stage["training_flops_per_token"]

    @property
    def accumulation(self) -> int:
        """Micro-batches of one process in a step."""
        return self.config.accumulation(self.accelerator.num_processes)

    def load(self, path: Path | None, find_older: Callable[[], Path | None]) -> dict | None:
        """Loads `path`. If its weights or moments are unsound, marks it and loads what `find_older` returns.

        Returns the data state, or None if no checkpoint is left; `checkpoint` is then None as well.
        """
        # All processes load the same path. Soundness is known only once the values are in memory.
        accelerator = self.accelerator
        agree = self.mirror.bring if self.mirror else from_main_process
        while path := agree(path):
            state, data_state = checkpoint.load(
                path, model=self.model, optimizer=self.optimizer, rank=accelerator.process_index
            )
            problem = self.saver.unsound(self.model, self.optimizer)
            if problem is None:
                self.averages.load(path, state.get("averages", {}))
                self.spikes.load_state_dict(state.get("spikes", {}))
                if scale := state.get("loss_scale"):  # {} or missing without fp16
                    self.scaler.load_state_dict(scale)
                # Fields that an older checkpoint lacks keep their defaults.
                self.at = TrainerState(
                    **{f.name: state[f.name] for f in fields(TrainerState) if f.name in state}
                )
                self.checkpoint = path
                return data_state
            if accelerator.is_main_process:
                print(f"{path}: unsound, passed over: {problem}", flush=True)
                # The mark comes first: `find_older` passes over marked checkpoints.
                if path.parent == self.saver.directory:  # else it is of another run
                    mark_unsound(path, problem)
                path = find_older()
        self.checkpoint = None
        return None

    def complete(self, path: Path) -> None:
        """Fetches the files of a checkpoint that other machines wrote to the store."""
        if self.mirror is not None:
            self.mirror.complete(path)

    def put_together(self) -> None:
        """Waits until the store has the checkpoints of all machines, if each has a part. All processes must call it."""
        if self.mirror is not None:
            # As in a set-up, one process may work alone for long.
            with self.watchdog.long_work():
                self.mirror.put_together()

    def find_unsound(self) -> str | None:
        """Why the weights or moments of the current step must not be saved, with an event in the log; or None.

        A checkpoint of them would displace a sound one. All processes must call it.
        """
        reason = self.saver.unsound(self.model, self.optimizer)
        if reason:
            self.log.event(self.at.step, "unsound", reason=reason)
        return reason

    def save(self, data_state: dict, *, wait: bool) -> None:
        """Saves a checkpoint of the current step. wait: also for an asynchronous save.

        It does not wait for the sums of token sets: a signal leaves little time. The checkpoint says whether
        they were all compared.
        """
        self.checkpoint = self.saver.save(
            self.at.step,
            model=self.model,
            optimizer=self.optimizer,
            data_state=data_state,
            trainer_state={
                **asdict(self.at),
                "spikes": self.spikes.state_dict(),
                "loss_scale": self.scaler.state_dict(),
                "averages": self.averages.state_dict(),
                "processes": self.accelerator.num_processes,
                "sums_compared": self.sums.settled,
            },
            # Once a context: its processes all have the states behind the whole rows.
            carried_states=self.carried_states.state_tensors()
            if self.carried_states and self.sharing.first
            else None,
            averages=self.averages.tensors(),
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
        if self.facts["saved"] != self.saver.saved:
            self.facts["saved"] = self.saver.saved
            if self.accelerator.is_main_process:
                write_facts(self.config.run_dir, self.facts)
        if self.mirror is not None:
            self.mirror.start_copy()
