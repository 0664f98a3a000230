"""Every key of a recipe: dataclasses with defaults and checks."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml

from nalanda.common.errors import InputError
from nalanda.common.plugins import import_plugins
from nalanda.common.text import is_url, local_path, redact
from nalanda.config.bounds import (
    BETWEEN_0_AND_1,
    DECAY,
    POSITIVE,
    SHARE,
    Bound,
    at_least,
    between,
    check_bounds,
    check_choice,
    check_new_name,
    check_seed,
    expand_home,
)
from nalanda.storage.remote import check_output, check_source

OPTIMIZERS = ["adamw", "muon"]
"""Names that `optim.name` takes; `register_optimizer` adds to them."""

MAX_DOCUMENT = 64 << 20
"""Default of `data.max_document_bytes`."""

SOURCES = ("source", "validation_source")
"""Keys of `data`, and of a component of its mixture, that name documents."""

EXPONENT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
"""Numbers that recipes may have and YAML 1.1 reads as text, as a rule of PyYAML's."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that recipes would read as a number."""


_Dumper.add_implicit_resolver(*EXPONENT)


def write_yaml(sections: dict[str, Any]) -> str:
    """The sections of a recipe as YAML."""
    return yaml.dump(sections, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


@dataclass
class Component:
    """One source of `data.mixture`. A field that is null or absent is that of `data:`."""

    name: str
    """Name in the log, and of the perplexity on its validation documents."""
    source: str | list[str]
    """Source of any kind that `data.source` takes."""
    weight: float
    """Share of the rows, relative to the sum of all weights."""
    validation_source: str | list[str] | None = None
    """As `data.validation_source`."""
    text_field: str | None = None
    """As `data.text_field`."""
    source_field: str | None = None
    """As `data.source_field`."""
    config: str | None = None
    """Hub: configuration of the dataset."""
    revision: str | None = None
    """As `data.revision`."""
    train_split: str | None = None
    """As `data.train_split`."""
    validation_split: str | None = None
    """As `data.validation_split`."""

    def __post_init__(self) -> None:
        _write_out_paths(self)


@dataclass
class DataConfig:
    """`data:` of a recipe.

    A local directory may hold `train/` and `validation/` (or val, valid, dev), each with files at any depth:
    SlimPajama's layout. Or it holds files named after their split: `val.jsonl`,
    `train-00000-of-00009.parquet`. `test` is left out, and so are files of no split beside `train`; a line at
    the start says how many.
    Without a validation part, `validation_share` of the training documents is held out. The hash of a text
    decides: the two parts are disjoint, and stay the same when files are added. Of a small corpus (files of
    up to 64 MiB) at least one document is held out if validation is on. Of a single document it is the last
    share. A lone .txt file is cut at blank lines into documents of up to 8,192 characters.

    `documents: joined` is for a text whose rows are its lines, such as WikiText's. Language models see it as
    one stream of tokens with an eos after every line, blank ones too, cut into blocks (fairseq's
    `--sample-break-mode none`). Labels, state and attention cross the rows of the source, the order is the
    source's. Validation needs a part of its own; of a lone .txt file the last share is held out.

    `mixture` takes rows from several sources in turn: after any number of rows, each has given its share to
    within one row. Each has its own epochs. Their validation documents share `max_validation_rows` by weight.
    Their sources are named after the component: `web`, or `web/ArXiv` if documents name their own source.

    `long_documents: carry` needs a prepared token set. The rest of a document longer than a row becomes the
    next row of the same batch slot, up to `carry_rows` rows in sequence. A model's recurrent state then passes
    from row to row. Validation cuts.
    """

    source: str | list[str] = ""
    """Training documents: "python" (the documentation and library of this interpreter), a path, a glob, a Hub
    dataset id or a prepared token set. Or the URL of a file, of a list of URLs (.urls, .list: one a line), or
    in a store (s3://, gs://, az://, hf://). Or several."""
    mixture: list[Component] = field(default_factory=list)
    """Several sources, instead of `source`."""
    validation_source: str | list[str] | None = None
    """Separate source for validation."""
    validation_share: Annotated[float, BETWEEN_0_AND_1] = 0.02
    """Share of the documents held out if the source has no validation part."""
    max_validation_rows: Annotated[int, at_least(1)] = 1024
    """Most rows of `seq_len` tokens in a validation pass. They hold the first documents, so perhaps not all
    files."""
    seq_len: Annotated[int, at_least(2)] = 2048
    """Tokens in a row."""
    text_field: str = "text"
    """Field of a record that has the text. A dot leads into a nested field: `doc.text`."""
    source_field: str = "meta.redpajama_set_name"
    """Field that names a document's own source, if it has one; found as `text_field` is."""
    bos: bool = True
    """Whether a document begins with the tokenizer's bos token. false in recipes with `documents: joined`."""
    eos: bool = True
    """Whether a document ends with the tokenizer's eos token."""
    documents: Literal["apart", "joined"] = "apart"
    """joined: one text, in the files' order, with its blank lines."""
    long_documents: Literal["cut", "carry"] = "cut"
    """Documents longer than a row: cut at its end, or continued in the batch slot's next row."""
    carry_rows: Annotated[int, at_least(1)] = 16
    """carry: rows in sequence in a batch slot, before it moves to another place in the data."""
    mask_share: Annotated[float, BETWEEN_0_AND_1] = 0.15
    """Encoders: share of the tokens that the model must recover, by a mask token (80 %), a random one (10 %)
    or themselves."""
    whole_words: bool = False
    """Encoders: whether all tokens of a word, between white space, are chosen together."""
    max_document_bytes: Annotated[int, between(1, 1 << 40)] = MAX_DOCUMENT
    """Largest document: a line of .jsonl, a .txt file, the text of a record. Memory stays near this limit
    even for highly compressed files."""
    oversized: Literal["refuse", "skip"] = "refuse"
    """Treatment of larger documents; skipped ones are counted and logged."""
    unusable: Literal["refuse", "skip"] = "refuse"
    """Treatment of records without usable text: null, without the field, not text, not JSON, not UTF-8.
    Skipped ones are counted and logged."""
    verify: Literal["background", "sums", "sizes"] = "background"
    """Check of a token set's files against the SHA-256 sums of its index. background: in a thread, finished
    before the model is written; sums: before training; sizes: sizes alone."""
    shuffle_buffer: Annotated[int, at_least(0)] = 1024
    """Documents in the shuffle buffer, which checkpoints save. 0: none; only the files are shuffled."""
    name: str | None = None
    """Hub: configuration of the dataset."""
    revision: str | None = None
    """Hub: commit, tag or branch of `source`; a commit pins its files. null: the newest."""
    train_split: str = "train"
    """Hub: split for training."""
    validation_split: str = "validation"
    """Hub: split for validation; held out of `train_split` if the dataset has none."""
    streaming: bool = True
    """Hub: reading while training, instead of a download first."""
    retries: Annotated[int, at_least(0)] = 8
    """Hub, URLs, stores: consecutive tries, at growing intervals, before the run stops."""
    workers: Annotated[int, between(0, 256)] = 1
    """0: the training thread reads; 1: a thread reads ahead; 2 or more: as many processes tokenise for it."""

    def __post_init__(self) -> None:
        _write_out_paths(self)

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if not self.source and not self.mixture:
            raise InputError(
                "data.source is missing; give python, a path, a glob, or a Hub dataset id"
            )
        self._check_mixture()
        self._check_sources("data", self)
        for component in self.mixture:
            self._check_sources(f"data.mixture.{component.name}", component)
        check_bounds(self, "data")
        if self.documents == "joined" and self.bos:
            raise InputError(
                "data.bos: joined documents are the lines of one text; set data.bos=false"
            )

    def _check_sources(self, key: str, component: Any) -> None:
        """Checks the sources of a component, or of this section. key: of the component."""
        for name in SOURCES:
            sources = getattr(component, name) or []
            for source in sources if isinstance(sources, list) else [sources]:
                check_source(source, f"{key}.{name}")

    def _check_mixture(self) -> None:
        if not self.mixture:
            return
        if self.source:
            raise InputError(
                "data: give either source or mixture; data.source=[] drops the recipe's source"
            )
        for component in self.mixture:
            finite_weight = 0 < component.weight < float("inf")
            if not component.name or not component.source or not finite_weight:
                name = component.name or "a component"
                raise InputError(f"data.mixture: {name}: needs a name, a source, a weight above 0")
        names = [component.name for component in self.mixture]
        if len(set(names)) < len(names):
            raise InputError(
                f"data.mixture: each component needs another name; there are {', '.join(names)}"
            )
        if self.documents == "joined":
            raise InputError("data.documents: joined documents are one text; a mixture has several")
        if self.long_documents == "carry":
            raise InputError("data.long_documents: carry reads one prepared set; a mixture cuts")

    def parts(self) -> dict[str, DataConfig]:
        """The components of the mixture by name, each with its own settings; {"": self} without a mixture."""
        if not self.mixture:
            return {"": self}
        parts: dict[str, DataConfig] = {}
        for component in self.mixture:
            values = {key: getattr(component, key) for key in COMPONENT_KEYS}
            chosen = {key: value for key, value in values.items() if value}
            name = component.config or self.name
            parts[component.name] = replace(self, mixture=[], name=name, **chosen)
        return parts

    def weights(self) -> dict[str, float]:
        """The weights of the mixture's components by name."""
        return {component.name: component.weight for component in self.mixture}


COMPONENT_KEYS = {f.name for f in fields(Component)} - {"name", "weight", "config"}


@dataclass
class TokenizerConfig:
    """`tokenizer:` of a recipe, either `path` or `train`; a bare string is short for `{path: ...}`."""

    path: str | None = None
    """Directory, Hub id, tokenizer.json or SentencePiece .model, also of a store; mistral: the 32 000 entries
    of Mistral 7B from the installed package mistral-common."""
    train: str | None = None
    """Kind to train on the training documents: "bpe", byte-level, or "words", split at white space."""
    vocab_size: Annotated[int | None, between(4, 10**7)] = None
    """Size of a trained one, special tokens included; null: bpe 4096, words all."""
    min_count: Annotated[int, at_least(1)] = 1
    """words: occurrences that a word needs; rarer ones are unknown."""
    mask: bool = False
    """Whether a trained one has a mask token, which masked language models need."""

    def __post_init__(self) -> None:
        self.path = expand_home(self.path, "tokenizer.path")
        if self.vocab_size is None and self.train != "words":
            self.vocab_size = 4096

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if (self.path is None) == (self.train is None):
            raise InputError(
                "tokenizer: give either path (a directory, Hub id or file) or train: bpe or train: words"
            )
        check_source(self.path or "", "tokenizer.path")
        if self.train is not None:
            check_choice(self.train, ("bpe", "words"), "tokenizer.train")
        check_bounds(self, "tokenizer")
        # 4096 is the default, as stored runs have it.
        if self.path and self.vocab_size not in (None, 4096):
            raise InputError(
                f"tokenizer.vocab_size is {self.vocab_size}; only a trained one has a size to choose; leave "
                "it out, or leave the path out"
            )
        if self.mask and not self.train:
            raise InputError(
                "tokenizer.mask: only of a trained one; give a tokenizer with a mask token"
            )
        # The 256 bytes and the special tokens. Words need a size of 4: <unk>, </s>, <s> and a word.
        if self.train == "bpe" and (self.vocab_size or 0) < (least := 257 + self.mask):
            raise InputError(
                f"tokenizer.vocab_size is {self.vocab_size}; a byte-level BPE needs {least} or more"
            )
        if self.min_count > 1 and self.train != "words":
            raise InputError(
                f"tokenizer.min_count is {self.min_count}; only train: words counts words"
            )


@dataclass
class TrainConfig:
    steps: Annotated[int, at_least(1)]
    """Updates of the weights."""
    tokens_per_step: Annotated[int, at_least(1)]
    """Tokens of all processes together; reached by gradient accumulation."""
    micro_batch_size: Annotated[int, at_least(1)]
    """Rows of one forward pass of one process, or of the processes of one context."""
    precision: Literal["bf16", "fp16", "fp32", "auto"] = "bf16"
    """Precision of matrix products. bf16 and fp16 are autocast, with fp32 weights, moments and reductions.
    fp16, with a scaled loss, is for GPUs without bf16 (before Ampere). auto takes bf16 on a GPU that has it, else
    fp16. On a CPU auto takes bf16 where its products are a quarter faster, else fp32."""
    z_loss: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the mean of logsumexp(logits)² in the objective (PaLM: 1e-4); logged losses do not
    include it."""
    parallel: Literal["auto", "ddp", "fsdp", "hybrid"] = "auto"
    """Sharing of the model among processes. ddp: each has all of it. fsdp (FSDP2): each has a part. hybrid:
    each group of `shard_size` processes shares one. auto: as accelerate's `parallelism_config` says, fsdp
    if it has an `fsdp_config` alone, else ddp."""
    shard_size: int | None = None
    """hybrid: processes that share one model; null: those of a node."""
    context_parallel: Annotated[int, at_least(1)] = 1
    """Processes, neighbours in rank, that share each row. The result is that of whole rows; activations take
    about an N-th of the memory. A resumed run may have another number. accelerate's `cp_size` sets it too."""
    gradient_checkpointing: bool = False
    """Whether the backward computes each block again, to save its activations."""
    compile: Literal[True, False, "auto"] = "auto"
    """Whether torch.compile fuses the blocks' passes; auto: on GPUs. The first step then takes up to a minute
    longer."""
    resume: str | int | None = None
    """Checkpoint step-N to resume from; later ones are set aside. Applies once: later starts with the same
    value resume from the newest. A path, RUN/checkpoints/step-N, begins a new run there: weights, moments and
    data position are those of the other run."""
    cpu_threads: Annotated[int | None, between(1, 4096)] = None
    """Threads of one process on a CPU; null: the launcher's number (`accelerate launch` sets 1)."""
    ema: list[float] = field(default_factory=list)
    """Decays of moving averages of the weights, such as [0.999, 0.9999]. Each is written beside `final` as
    `final-ema-0.999`."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        for decay in self.ema:
            if not 0 < decay < 1 or self.ema.count(decay) > 1:
                raise InputError(
                    f"train.ema: {decay}: expected different decays between 0 and 1, such as 0.999"
                )
        if self.shard_size is not None and (self.parallel != "hybrid" or self.shard_size < 2):
            raise InputError("train.shard_size: 2 or more, and only with train.parallel=hybrid")


@dataclass
class ValidationConfig:
    every: Annotated[int | None, at_least(0)] = None
    """Steps between validations; null: only at the end, and at that of a stage; 0: never."""
    batch_size: Annotated[int | None, at_least(1)] = None
    """Rows of one forward pass; null: `train.micro_batch_size`."""


@dataclass
class GroupConfig:
    """A separate learning rate or decay for some parameters."""

    match: str
    """Regular expression, searched in parameter names; a parameter joins the first group that matches."""
    lr_scale: Annotated[float, at_least(0)] = 1.0
    """Factor of the schedule's learning rate."""
    weight_decay: Annotated[float | None, at_least(0)] = None
    """Weight decay; null: as without the group."""

    def check(self, where: str) -> None:
        """Raises `InputError` for settings that cannot work."""
        try:
            re.compile(self.match)
        except re.error as error:
            raise InputError(
                f"{where}.match: {self.match!r} is not a regular expression: {error}"
            ) from None
        check_bounds(self, where)


NORM = Bound("0, for none, or 1e-15 or more", lambda norm: norm == 0 or norm >= 1e-15)
"""Gradients of a smaller norm have squares that are 0 in float32, so AdamW would change nothing."""


@dataclass
class OptimConfig:
    """`optim:` of a recipe. The defaults are AdamW's in the literature on linear attention at 340 M."""

    name: str = "adamw"
    """Optimizer; muon: Muon for the matrices of the blocks, AdamW for the rest; or the name of a plugin's."""
    lr: Annotated[float, POSITIVE] = 3e-4
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], DECAY] = (0.9, 0.95)
    """AdamW's decays of its two moments."""
    # Not 0: a weight without a gradient would be 0/0.
    eps: Annotated[float, POSITIVE] = 1e-8
    """AdamW's ε."""
    weight_decay: Annotated[float, at_least(0)] = 0.1
    """Decay of matrices; norms, biases and decays of states have none."""
    max_grad_norm: Annotated[float, NORM] = 1.0
    """Norm that longer gradients are scaled down to; 0: none are."""
    momentum: Annotated[float, DECAY] = 0.95
    """Momentum of Muon."""
    muon_lr: Annotated[float | None, POSITIVE] = None
    """Learning rate of Muon's matrices; null: `lr`, since Muon's updates have AdamW's size (0.2 √max(rows,
    columns): Liu et al., 2025)."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Parameters with a rate or decay of their own."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        check_choice(self.name, OPTIMIZERS, "optim.name")
        for i, group in enumerate(self.groups):
            group.check(f"optim.groups[{i}]")
        if self.muon_lr is not None and self.name != "muon":
            raise InputError(
                f"optim.muon_lr: only Muon has it, and optim.name is {self.name}; set optim.name=muon, or "
                "leave it out"
            )


@dataclass
class ScheduleConfig:
    name: Literal["cosine", "wsd", "linear", "inverse_sqrt", "constant"] = "cosine"
    """Shape of the learning rate over the steps; wsd: constant, then a fall with 1 − √."""
    warmup_steps: Annotated[int, at_least(0)] = 0
    """Steps of the linear rise to `optim.lr`. Where an override lowers `train.steps` alone, they shrink in
    proportion."""
    min_lr_ratio: Annotated[float, SHARE] = 0.1
    """Final rate of cosine, wsd and linear, as a share of `optim.lr`."""
    decay_share: Annotated[float, SHARE] = 0.2
    """wsd: share of all steps in the final decay."""

    # That of the recipe's file, unless an override sets one, from `load_config`. Without an annotation it is no key.
    recipe_warmup = cast(int | None, None)


@dataclass
class StageConfig:
    """A stage of `stages:`: the settings that are others from a step on. They hold until a later stage changes them."""

    after_step: Annotated[int, at_least(1)]
    """Last step before the stage."""
    data: dict[str, Any] = field(default_factory=dict)
    """Keys of `data`. The stage then begins its data anew, in an order of its own; without, the data go on."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """A schedule of its own, with the defaults of `schedule`. It counts its steps from the beginning of the stage, up
    to that of the next stage with a schedule; without, the one before goes on."""
    optim: dict[str, Any] = field(default_factory=dict)
    """lr, muon_lr, weight_decay, max_grad_norm."""
    train: dict[str, Any] = field(default_factory=dict)
    """micro_batch_size, tokens_per_step, context_parallel."""
    validation: dict[str, Any] = field(default_factory=dict)
    """batch_size."""

    def applied(self, config: RunConfig) -> RunConfig:
        """`config` with the stage's settings. `data.mixture` replaces a source, and a source a mixture."""
        parts = {key: getattr(self, key) for key in STAGE_KEYS if key != "schedule"}
        if self.data.get("mixture"):
            parts["data"] = {"source": "", **self.data}
        elif self.data.get("source"):
            parts["data"] = {"mixture": [], **self.data}
        changed = {key: replace(getattr(config, key), **new) for key, new in parts.items() if new}
        if self.schedule:
            changed["schedule"] = ScheduleConfig(**self.schedule)
        return replace(config, **changed)

    def describe(self) -> str:
        """`data.mixture, optim.lr 0.0001`: the keys, with the values that are short."""
        texts = []
        for section in STAGE_KEYS:
            for key, value in getattr(self, section).items():
                short = not isinstance(value, (list, dict))
                texts.append(
                    f"{section}.{key} {redact(str(value))}" if short else f"{section}.{key}"
                )
        return ", ".join(texts) or "no other settings"


STAGE_KEYS: dict[str, tuple[str, ...]] = {
    "data": tuple(f.name for f in fields(DataConfig)),
    "schedule": tuple(f.name for f in fields(ScheduleConfig)),
    "optim": ("lr", "muon_lr", "weight_decay", "max_grad_norm"),
    "train": ("micro_batch_size", "tokens_per_step", "context_parallel"),
    "validation": ("batch_size",),
}
"""Keys that a stage may change, by section."""


@dataclass(frozen=True)
class Stage:
    """A stage of a run, as `RunConfig.in_stages` finds it; the first one has no name."""

    name: str
    config: RunConfig
    """The recipe within the stage."""
    begin: int
    """Steps before it."""
    end: int
    """Its last step."""
    order: str = ""
    """Name of the stage that began its data."""
    schedule_begin: int = 0
    """Steps before the stage that began its schedule."""
    schedule_end: int = 0
    """Last step of its schedule."""
    changes: str = ""
    """Its settings, for people."""

    def tokens_after(self, step: int = 0) -> int:
        """Tokens of its steps behind `step`."""
        steps = self.end - min(self.end, max(self.begin, step))
        return steps * self.config.train.tokens_per_step

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Puts the name of the stage in front of an `InputError`."""
        try:
            yield
        except InputError as error:
            if not self.name:
                raise
            raise type(error)(f"stages.{self.name}: {error}") from None


@dataclass
class CheckpointConfig:
    every: Annotated[int, at_least(0)] = 1000
    """Steps between checkpoints; 0: only at the end, when interrupted, and at the end of a stage."""
    keep_last: Annotated[int, at_least(1)] = 3
    """Newest checkpoints to keep."""
    keep_every: Annotated[int | None, at_least(1)] = None
    """Interval of the steps whose checkpoints are kept for good."""
    asynchronous: Literal[True, False, "auto"] = "auto"
    """Writing in a thread, from a copy in host memory. auto: where the copy takes at most half of the free
    memory."""

    def keeps_for_good(self, step: int) -> bool:
        return bool(self.keep_every) and step % self.keep_every == 0


MIN_GOOD_STEPS = 16
"""Good steps before the spike detector starts."""


@dataclass
class GuardConfig:
    sigma: Annotated[float, at_least(0)] = 6.0
    """A step is bad, and skipped, this many standard deviations above the mean of the last good ones, in loss or
    log gradient norm. 0: only if one is not finite."""
    window: Annotated[int, at_least(MIN_GOOD_STEPS)] = 128
    """Good steps that mean and deviation are computed over."""
    max_bad_steps: Annotated[int, at_least(1)] = 5
    """Consecutive bad steps that make the run reload its last good checkpoint and skip their data."""
    max_rollbacks: Annotated[int, at_least(1)] = 3
    """Rollbacks to the same checkpoint before the run stops."""
    hang_timeout: Annotated[float | None, POSITIVE] = 1800.0
    """Seconds without progress until a process prints its stacks and ends; null: never."""


@dataclass
class LogConfig:
    every: Annotated[int, at_least(1)] = 10
    """Steps between lines of metrics; a line has the loss of its step, not a mean over steps."""
    tensorboard: Literal[True, False, "auto"] = "auto"
    """Whether metrics go to tensorboard/ as well; auto: where TensorBoard is installed."""
    tracker: Literal["none", "wandb", "trackio"] = "none"
    """Tracker that gets the metrics as well, configured as usual: `wandb login`, WANDB_MODE=offline,
    TRACKIO_SPACE_ID, …"""
    project: str = "nalanda"
    """Project at the tracker."""

    def check_packages(self) -> None:
        """Raises `InputError` if the tracker, or TensorBoard where it is asked for, is not installed."""
        name = self.tracker
        if name != "none" and not _is_installed(name):
            raise InputError(f"log.tracker: {name} is not installed: pip install {name}")
        if self.tensorboard is True and not _is_installed("tensorboard"):
            raise InputError(
                "log.tensorboard: not installed: pip install 'nalanda[tensorboard]', or leave the key out"
            )

    def writes_board(self) -> bool:
        """Whether metrics go to tensorboard/."""
        return bool(self.tensorboard) and _is_installed("tensorboard")


@dataclass
class LinearizeConfig:
    """`linearize:` of a recipe: how `nalanda linearize` fits the mixers that replace a transformer's attention."""

    steps: Annotated[int, at_least(1)] = 1000
    """Steps of the fit, of `train.tokens_per_step` tokens."""
    lr: Annotated[float, POSITIVE] = 3e-3
    """Peak learning rate of the fit; its shape is that of `schedule`."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Hybrids that are fitted in one pass of the teacher: name to the keys of `model` that it has in place of the
    recipe's. {}: one, of `model` itself."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        for name in self.arms:
            check_new_name(name, "linearize.arms", taken=("checkpoints", "tokenizer"))


@dataclass
class DistillConfig:
    """`distill:` of a recipe: a teacher whose next tokens the model learns beside those of the text."""

    teacher: str | None = None
    """Folder or hub id of a causal language model with the same tokenizer; null: no teacher."""
    weight: Annotated[float, SHARE] = 0.5
    """w in the objective (1 − w)·cross-entropy + w·τ²·KL(teacher, model). Logged losses are the cross-entropy;
    the log has the KL as `kl`."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """τ, which divides the logits of both under the KL."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the teacher's weights."""
    device: str | None = None
    """Device of the teacher, such as cuda:1; null: the model's."""

    def __post_init__(self) -> None:
        self.teacher = expand_home(self.teacher, "distill.teacher")


@dataclass
class RunConfig:
    output_dir: str
    """Folder of the run, on this machine or in a store (`s3://…`, `gs://…`, `az://…`), where finished
    checkpoints are copied from a local folder."""
    model: dict[str, Any]
    """Fields of `NalandaConfig`, or `auto: PATH_OR_ID` for any causal LM by its own config. `init_from: PATH`
    loads those weights, with a fresh optimizer; `tokenizer: PATH` belongs to it."""
    tokenizer: TokenizerConfig
    data: DataConfig
    train: TrainConfig
    seed: int = 0
    """Of weights, data order and dropout."""
    seed_by_name: bool = False
    """Whether each module draws its initial weights by the seed and its own name. Models of a seed then share
    the weights of modules with the same name and shape."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Later stages of the run by name, in their order: from a step on with other data, another length or another
    schedule. Weights and moments are kept."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    linearize: LinearizeConfig = field(default_factory=LinearizeConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    plugins: list[str] = field(default_factory=list)
    """Modules or files (`../mine/x.py`) to import, which register mixers, feature maps, optimizers or readers of
    the user's own."""

    def __post_init__(self) -> None:
        self.output_dir = expand_home(local_path(self.output_dir), "output_dir")
        paths = {"auto", "init_from"} & self.model.keys()
        self.model = self.model | {k: expand_home(self.model[k], f"model.{k}") for k in paths}

    @property
    def run_dir(self) -> Path:
        """The folder of the run on this machine."""
        return Path(self.output_dir)

    def check(self, *, training: bool = False) -> None:
        """Checks every section, then combinations of them. Raises `InputError`.

        training: also checks that this machine has what a training needs.
        """
        # Plugins first: they register names that the checks know.
        import_plugins(self.plugins)
        check_output(self.output_dir, "output_dir")
        # Every section alone, so that the combinations below compare sound values.
        for f in fields(self):
            section = getattr(self, f.name)
            if is_dataclass(section):
                check_bounds(section, f.name)
            if hasattr(section, "check"):
                section.check()
        if training:
            self.log.check_packages()
        if self.schedule.warmup_steps > self.train.steps:
            raise InputError(
                f"schedule.warmup_steps: {self.schedule.warmup_steps} is more than "
                f"train.steps {self.train.steps}; set {self.train.steps} or less"
            )
        self._check_stages()
        check_seed(self.seed)
        if self.data.seq_len % (parts := self.train.context_parallel):
            raise InputError(
                f"data.seq_len: {self.data.seq_len} is not a multiple of train.context_parallel {parts}"
            )
        # With the fewest processes: only the launch knows how many there are.
        self.accumulation(processes=parts)
        if self.distill.teacher and (parts > 1 or self.data.long_documents == "carry"):
            setting = "train.context_parallel=1" if parts > 1 else "data.long_documents=cut"
            raise InputError(
                f"distill.teacher: it reads whole rows from their start; set {setting}"
            )
        if self.tokenizer.train and (weights := self.model.get("init_from")):
            raise InputError(
                f"tokenizer: {weights} was trained with another tokenizer than this recipe would train; "
                f"take its own: tokenizer={weights}"
            )
        if "auto" not in self.model and set(self.model) != {"init_from"}:
            from nalanda.model.configuration import NalandaConfig  # takes seconds: it imports torch

            try:
                model = NalandaConfig(**{k: v for k, v in self.model.items() if k != "init_from"})
                model.plugin_files()  # refuses, before the training, what checkpoints could not carry
            except (TypeError, ValueError, OverflowError) as error:
                raise InputError(f"model: {error}") from None

    def _check_stages(self) -> None:
        """Raises `InputError` for stages that do not fit into the run, or whose settings cannot work."""
        for name, stage in self.stages.items():
            check_new_name(name, "stages")
            check_bounds(stage, f"stages.{name}")
        ends = {name: stage.after_step for name, stage in self.stages.items()}
        for (name, step), (later, limit) in pairwise([*ends.items(), ("", self.train.steps)]):
            if step >= limit:
                where = f"stages.{later}.after_step" if later else "train.steps"
                raise InputError(
                    f"stages.{name}.after_step: {step} is not before {where} {limit}; lower it, or set stages={{}}"
                )
        if not self.stages:
            return

        for stage in self.in_stages():
            with stage.named_in_errors():
                warmup = stage.config.schedule.warmup_steps
                steps = stage.schedule_end - stage.schedule_begin
                if warmup > steps:
                    raise InputError(
                        f"schedule.warmup_steps: {warmup} is more than the {steps} steps of its schedule; set "
                        f"{steps} or less"
                    )
                stage.config.check()

    def in_stages(self) -> list[Stage]:
        """The stages of the run, in order. The first one, and without `stages` the only one, is the recipe itself."""
        ends = [*(stage.after_step for stage in self.stages.values()), self.train.steps]
        stages = [Stage("", replace(self, stages={}), 0, ends[0])]
        for (name, changes), end in zip(self.stages.items(), ends[1:], strict=True):
            before = stages[-1]
            # A slot that carries its state holds a row of every step: other batches have other slots.
            slots_change = before.config.data.long_documents == "carry" and changes.train
            stages.append(
                Stage(
                    name,
                    changes.applied(before.config),
                    begin=before.end,
                    end=end,
                    order=name if changes.data or slots_change else before.order,
                    schedule_begin=before.end if changes.schedule else before.schedule_begin,
                    changes=changes.describe(),
                )
            )
        # A schedule ends where the next one begins.
        begins = {stage.schedule_begin for stage in stages}
        return [
            replace(
                stage,
                schedule_end=min(
                    (begin for begin in begins if begin > stage.schedule_begin), default=ends[-1]
                ),
            )
            for stage in stages
        ]

    def begun_stages(self, step: int) -> set[str]:
        """The names of the stages that begin before `step`."""
        return {name for name, stage in self.stages.items() if stage.after_step < step}

    def to_dict(self) -> dict[str, Any]:
        """Plain YAML values, which `load_config` reads as an equal config."""
        return _plain(asdict(self))

    def to_yaml(self) -> str:
        return write_yaml(self.to_dict())

    def accumulation(self, processes: int) -> int:
        """Micro-batches of a process per step. Raises `InputError` if they do not fill a step exactly, or the
        processes no whole number of contexts."""
        train, seq_len = self.train, self.data.seq_len
        contexts, rest = divmod(processes, train.context_parallel)
        if rest:
            raise InputError(
                f"train.context_parallel: {processes} process(es) are not a multiple of "
                f"{train.context_parallel}"
            )
        tokens = train.micro_batch_size * seq_len * contexts
        if train.tokens_per_step % tokens:
            # The nearest multiples at either side, as advice.
            below = train.tokens_per_step // tokens * tokens
            unit = "process(es)" if train.context_parallel == 1 else "context(s)"
            choices = " or ".join(str(n) for n in (below, below + tokens) if n)
            raise InputError(
                f"train.tokens_per_step: {train.tokens_per_step} is not a multiple of micro_batch_size "
                f"{train.micro_batch_size} × seq_len {seq_len} × {contexts} {unit} = {tokens}; "
                f"take {choices}"
            )
        return train.tokens_per_step // tokens


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _write_out_paths(data: Any) -> None:
    """Replaces file:// URLs of the sources by the paths they name, and `~` by the user's home."""
    for key in SOURCES:
        setattr(data, key, expand_home(local_path(getattr(data, key)), f"data.{key}"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if is_url(value) and isinstance(value, str):
        return redact(value)  # passwords and signatures are never written
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
