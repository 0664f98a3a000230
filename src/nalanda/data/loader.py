"""Read → tokenise → pack → batch; every iterator can say where it is and go on from there."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from nalanda.common.errors import InputError
from nalanda.data.corpus import (
    MAX_DOCUMENT,
    Corpus,
    Document,
    DocumentStream,
    is_local,
    is_prepared,
    open_corpus,
)
from nalanda.data.packing import Mixture, PreparedRows, Rows, batched, cut
from nalanda.data.tokenizer import fast_backend, fingerprint, vocabulary_of
from nalanda.data.workers import Encoder, ReadAhead, Tokenisers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nalanda.data.token_set import TokenSet


@dataclass
class Component:
    """One of `data.mixture`. What is null or absent is as `data:` has it."""

    name: str  # in the log, and of the perplexity on its validation documents
    source: str | list[str]  # as data.source, of any kind
    weight: float  # its share of the rows is this among the sum of all
    validation_source: str | list[str] | None = None
    text_field: str | None = None
    source_field: str | None = None
    config: str | None = None  # Hub: the dataset's configuration
    train_split: str | None = None  # Hub
    validation_split: str | None = None  # Hub


@dataclass
class DataConfig:
    """`data:` of a recipe.

    A local directory may hold `train/` and `validation/`, each with files at any depth (SlimPajama's layout).
    Where there is no validation part, `validation_share` of the training documents is held out: the hash of a
    text decides, so that the two parts are disjoint and stay the same when files are added.

    `documents: joined` is for a text whose rows are its lines, such as WikiText's: language models on it see
    one stream of tokens with an eos behind every line, blank ones too, cut into blocks (fairseq's
    `--sample-break-mode none`). Labels, state and attention then cross from row to row of the source, the
    order is the source's, and validation needs a part of its own.

    `mixture` takes rows from several sources by turns, so that after any number of rows each has given its
    share to within one row. Each has its own epochs. Their validation documents share `max_validation_rows`
    alike, and their sources are called after the component: `web`, or `web/ArXiv` where they name their own.

    `long_documents: carry` needs a prepared set: what follows in a document longer than a row is the next row
    of the same lane (a place in the step), `carry_rows` rows in a row, so that a model's recurrent state can
    be handed on. Validation cuts.
    """

    # "python" (this interpreter's documentation and library), a path, a glob, a Hub dataset id, the http(s)
    # URL of a shard or of a list of shards (.urls, .list: one a line), several URLs, or a prepared set
    source: str | list[str] = ""
    mixture: list[Component] = field(default_factory=list)  # of several sources, in place of `source`
    validation_source: str | list[str] | None = None  # a source of its own for validation
    validation_share: float = 0.02  # of the documents, held out where the source has no validation part
    max_validation_rows: int = 1024  # rows of seq_len tokens in a validation pass, at most
    seq_len: int = 2048  # tokens in a row
    text_field: str = "text"  # of .jsonl and .parquet files and of Hub datasets
    source_field: str = "meta.redpajama_set_name"  # which of its sources a document is from, where it says so
    bos: bool = True  # a document begins with the tokenizer's bos token ...
    eos: bool = True  # ... and ends with its eos token
    documents: Literal["apart", "joined"] = "apart"  # joined: one text, in the files' order, blank lines kept
    long_documents: Literal["cut", "carry"] = "cut"  # at the end of a row, or go on in the lane's next row
    carry_rows: int = 16  # carry: rows that follow one another in a lane, before it goes on elsewhere
    # Bytes of a document: a line of .jsonl, a .txt file, the text of a record. However much a compressed
    # shard holds, reading it takes little more memory than this.
    max_document_bytes: int = MAX_DOCUMENT
    oversized: Literal["refuse", "skip"] = "refuse"  # larger documents; those left out are counted and logged
    # When the files of a prepared set are compared with the SHA-256 sums of its index. background: by a
    # thread, before the first checkpoint is saved; sums: before training begins; sizes: never, only their
    # sizes are. Of files that are read as text a hash is in every checkpoint, whatever this says.
    verify: Literal["background", "sums", "sizes"] = "background"
    shuffle_buffer: int = 1024  # documents; they are saved in checkpoints. 0: the order of the files
    name: str | None = None  # Hub: the dataset's configuration
    train_split: str = "train"  # Hub
    validation_split: str = "validation"  # Hub; held out of train_split where the dataset has none
    streaming: bool = True  # Hub: read while training, or download first
    retries: int = 8  # Hub, URLs: tries in a row, further and further apart, before the run stops
    # 0: the training thread reads; 1: a thread reads ahead; n: n processes tokenise for that thread
    workers: int = 1

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if not self.source and not self.mixture:
            raise InputError("data.source is missing; give python, a path, a glob, or a Hub dataset id")
        self._check_mixture()
        if self.seq_len < 2:
            raise InputError(f"data.seq_len is {self.seq_len}; a row needs at least 2 tokens")
        if not 0 < self.validation_share < 1:
            raise InputError(f"data.validation_share is {self.validation_share}; it must lie between 0 and 1")
        if self.max_validation_rows < 1:
            raise InputError(f"data.max_validation_rows is {self.max_validation_rows}; it must be at least 1")
        if self.documents not in ("apart", "joined"):
            raise InputError(f"data.documents is {self.documents!r}; there are 'apart' and 'joined'")
        if self.documents == "joined" and self.bos:
            raise InputError("data.bos: joined documents are the lines of one text; set data.bos: false")
        if self.long_documents not in ("cut", "carry"):
            raise InputError(f"data.long_documents is {self.long_documents!r}; there are 'cut' and 'carry'")
        if self.carry_rows < 1:
            raise InputError(f"data.carry_rows is {self.carry_rows}; it must be 1 or more")
        if self.workers < 0:
            raise InputError(f"data.workers is {self.workers}; it must be 0 or more")
        if self.retries < 0:
            raise InputError(f"data.retries is {self.retries}; it must be 0 or more")
        if self.max_document_bytes < 1:
            raise InputError(f"data.max_document_bytes is {self.max_document_bytes}; it must be 1 or more")
        for key, known in (("oversized", ("refuse", "skip")), ("verify", ("background", "sums", "sizes"))):
            if getattr(self, key) not in known:
                raise InputError(f"data.{key} is {getattr(self, key)!r}; there are {', '.join(known)}")
        if self.shuffle_buffer < 0:
            raise InputError(f"data.shuffle_buffer is {self.shuffle_buffer}; it must be 0 or more")

    def _check_mixture(self) -> None:
        if not self.mixture:
            return
        if self.source:
            raise InputError("data: give either source or mixture")
        for part in self.mixture:
            if not part.name or not part.source or not 0 < part.weight < float("inf"):
                raise InputError(
                    f"data.mixture: {part.name or 'a component'}: needs a name, a source, a weight above 0"
                )
        names = [part.name for part in self.mixture]
        if len(set(names)) < len(names):
            raise InputError(f"data.mixture: each component needs another name; there are {', '.join(names)}")
        if self.documents == "joined":
            raise InputError("data.documents: joined documents are one text; a mixture has several")
        if self.long_documents == "carry":
            raise InputError("data.long_documents: carry reads one prepared set; a mixture cuts")

    def parts(self) -> dict[str, DataConfig]:
        """The components of the mixture by name, each with its own settings; without one, all of it as ""."""
        if not self.mixture:
            return {"": self}
        return {
            part.name: replace(
                self,
                mixture=[],
                name=part.config,
                **{key: value for key in OWN if (value := getattr(part, key))},
            )
            for part in self.mixture
        }


OWN = ("source", "validation_source", "text_field", "source_field", "train_split", "validation_split")


# ------------------------------ packing

# Characters that are tokenised and whose rows are shuffled at a time; states lie where a group begins.
STREAM_GROUP = 1 << 19  # ready in a second
PERMUTED_GROUP = 1 << 24  # of corpora whose documents need no buffer: a small one as a whole


class PackedBatches:
    """One rank's micro-batches of packed documents, and the place in them.

    Documents follow one another, `[bos] tokens [eos]`, cut into rows of `seq_len` tokens. A document longer
    than what is left of a row goes on in the next one as a segment of its own, since no state crosses rows.
    With `data.documents: joined` a row is one segment and begins with the last token of the row before, the
    first one with an eos, so that every token of the text is predicted once.
    The rows and their order depend on the corpus, the tokenizer and the seed alone. Micro-step s takes the
    rows [s·B·W, (s+1)·B·W); rank r of W takes every W-th of them, so that any number of ranks sees the same.
    A prepared set is read by index: each rank reads its own rows. Of anything else every rank reads and
    tokenises all.

    Each item is a dict of CPU tensors:
        input_ids: [B, T] int64.
        labels: [B, T] int64, unshifted; -100 at the first token of a segment and on padding.
        position_ids: [B, T] int64, from 0 in every segment.
        cu_seqlens: [N+1] int32, where the N segments begin in the B·T positions, every row start among them,
            and B·T.
    and with `data.long_documents: carry`, in training:
        lanes: [B] int64, the place of each row in the step; the same in each step for the i-th micro-batch.
        carried: [B] bool, whether its first segment goes on where this lane's row of the step before ended.

    Training goes on for `epochs` (without end by default) and never pads: what is left of the last epoch and
    fills no micro-step is dropped. Validation is one pass, always in the same order, over at most
    `data.max_validation_rows`; the last row is filled up, and rows of padding are added until every rank has
    the same number of full batches. A batch may therefore have no label at all: add up losses and counts of
    labels, do not average means.

    Iterating starts where the state is; after the end it begins again. Reading and tokenising happen in a
    thread (`data.workers`), which an error, `close`, or the end of the object or of the process stops.
    Batches and states are the same for any number of workers.

    Args:
        data: what to read.
        tokenizer: a fast one.
        split: "train" or "validation".
        batch_size: B, rows of this rank's batch.
        seed: of the order.
        rank, world_size: which rows.
        epochs: passes over the training documents, of each component of a mixture; None: no end.
        lanes: rows of a step, of all ranks together; only needed for `data.long_documents: carry`.
    Raises:
        InputError: settings, files or tokenizer cannot work; while iterating, a shard cannot be read.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        split: str,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        lanes: int | None = None,
    ):
        data.check()
        if split not in ("train", "validation"):
            raise ValueError(f"split is {split!r}; there are 'train' and 'validation'")
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size {batch_size}, rank {rank} of {world_size}: no such batch")
        self.data, self.training = data, split == "train"
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.seed = seed if self.training else 0
        self.epochs = epochs if self.training else 1
        self.encode = encoder(tokenizer, data)
        self.padding = tokenizer.eos_token_id or 0
        if data.mixture and not self.training:
            raise ValueError("a mixture has no single order for validation; use validation_batches")
        carry = data.long_documents == "carry" and self.training
        if carry and (not lanes or lanes % (batch_size * world_size)):
            raise ValueError(f"lanes is {lanes}: not a multiple of {batch_size} rows on {world_size} ranks")
        self.tokenizer, self.vocabulary = fingerprint(tokenizer), vocabulary_of(tokenizer)
        parts = {
            name: self._open(name, part, lanes if carry else None) for name, part in data.parts().items()
        }
        self.source: Any = parts.get("") or Mixture(parts, {part.name: part.weight for part in data.mixture})
        self.identity = {
            "split": split,
            "seed": self.seed,
            "seq_len": data.seq_len,
            "bos": data.bos,
            "eos": data.eos,
            "documents": data.documents,
            "long_documents": data.long_documents,
            **self.source.identity,
            "tokenizer": self.tokenizer,
        }
        self._start = self.source.start
        self._state: dict[str, Any] = self._start
        self._ended = False
        self._reader: Any = None

    def __iter__(self) -> PackedBatches:
        if self._ended:
            self._state, self._ended = self._start, False
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._ended:
            raise StopIteration
        if self._reader is None:
            tokenisers = Tokenisers(self.encode, self.data.workers)
            batches = self._batches(tokenisers)
            self._reader = ReadAhead(batches, tokenisers) if self.data.workers else batches
        try:
            batch, self._state = next(self._reader)
        except BaseException as stop:
            self.close()
            self._ended = isinstance(stop, StopIteration)
            raise
        return batch

    def state_dict(self) -> dict:
        """The place behind the last batch that was delivered, in plain JSON, shuffle buffer included.

        It is the same on every rank and good for any number of ranks and any batch size.
        """
        contents = {name: [*hashes.values()] for name, hashes in self.contents.items()}
        known = {"contents": contents} if contents else {}
        return {**self._state, "identity": {**self.identity, **known}}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from `state`: reads on in the shard where it stands, not from the beginning of the corpus.

        Raises:
            InputError: the state belongs to other data or settings.
        """
        for key, value in self.identity.items():
            saved = state["identity"].get(key)
            if saved != value:
                raise InputError(
                    f"the data changed since the checkpoint was saved: {key} was {saved!r} and is {value!r}; "
                    "restore it, or start a new run from the checkpoint's weights with model.init_from"
                )
        contents = state["identity"].get("contents", {})  # earlier versions saved none
        for part, hashes in self.contents.items():
            if part not in contents:
                continue
            if len(saved := contents[part]) != len(hashes):
                raise InputError(
                    f"the data changed since the checkpoint was saved: {part} had {len(saved)} files and has "
                    f"{len(hashes)}; restore them, or start a new run from the checkpoint's weights with "
                    "model.init_from"
                )
            if changed := [name for name, old in zip(hashes, saved, strict=True) if hashes[name] != old]:
                raise InputError(
                    f"{changed[0]} has another content than when the checkpoint was saved; restore it, or "
                    "start a new run from the checkpoint's weights with model.init_from"
                )
        self.close()
        self._state = {key: value for key, value in state.items() if key != "identity"}
        self._ended = False

    def close(self) -> None:
        """Stops the thread and its processes; iterating again starts others at the same place."""
        if self._reader:
            self._reader.close()
            self._reader = None

    def epochs_begun(self) -> dict[str, float]:
        """How often each component was read; of a single source, "", as well. Of a stream: whole epochs."""
        seen = self.source.epochs(self._state)
        return seen if isinstance(seen, dict) else {"": seen}

    def skipped(self) -> int:
        """Documents that were left out for their size (`data.oversized`), in all epochs."""
        return self.source.skipped(self._state)

    @functools.cached_property
    def contents(self) -> dict[str, dict[str, str]]:
        """`Corpus.contents` of each component whose files are read as text; part of the state, which is
        refused where one differs. Whoever has many processes computes it in one, and sets it in all."""
        parts = self.source.parts if isinstance(self.source, Mixture) else {"": self.source}
        streams = {name: part for name, part in parts.items() if isinstance(part, _StreamRows)}
        return {name: found for name, part in streams.items() if (found := part.corpus.contents())}

    def _open(self, name: str, data: DataConfig, lanes: int | None) -> PreparedRows | _StreamRows:
        seed = f"{self.seed}/{name}" if name else self.seed
        split = "train" if self.training else "validation"
        if tokens := _open_prepared(data, self.tokenizer, self.vocabulary, split):
            return PreparedRows(
                tokens,
                str(data.source),
                seed=seed if self.training else None,
                seq_len=data.seq_len,
                epochs=self.epochs,
                lanes=lanes,
                block=data.carry_rows if lanes else 1,
            )
        if lanes:
            raise InputError(
                f"data.long_documents: carry reads a prepared set; make one of {data.source} with "
                "nalanda data prepare"
            )
        return _StreamRows(
            open_corpus(data, split),
            data,
            seed=seed,
            epochs=self.epochs,
            whole=self.training,
            before=self.padding,
        )

    def _batches(self, tokenisers: Tokenisers) -> Iterator[tuple[dict[str, torch.Tensor], dict]]:
        rows = self.source.rows(self._state, tokenisers)
        if not self.training:
            rows = itertools.islice(rows, self.data.max_validation_rows - self._state["rows"])
        return batched(
            rows, self.data.seq_len, self.batch_size, self.rank, self.world_size, self.padding, self.training
        )


def validation_batches(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """One rank's batches of the validation documents by source, "" for documents that name none.

    Documents are taken in order until they fill `data.max_validation_rows`, of a mixture each component's its
    share by weight and at least one row, and those of a source are packed by themselves; joined ones are one
    group. A source's last batches are filled up as `PackedBatches` fills them: every rank has as many.

    Raises:
        InputError: as `PackedBatches`; or a component has no validation documents.
    """
    data.check()
    if data.documents == "joined":
        batches = PackedBatches(
            data, tokenizer, split="validation", batch_size=batch_size, rank=rank, world_size=world_size
        )
        with contextlib.closing(batches):
            found = {"": list(batches)}
        _say_skipped(batches.skipped(), rank)
        return found
    parts, total = _validation_parts(data), sum(part.weight for part in data.mixture)
    shares = {part.name: part.weight / total for part in data.mixture}
    groups: dict[str, list[np.ndarray]] = {}
    for name, part in parts.items():
        room = max(1, round(data.max_validation_rows * shares.get(name, 1.0))) * data.seq_len
        for source, tokens in _validation_documents(part, tokenizer, rank):
            groups.setdefault("/".join(filter(None, (name, source))), []).append(tokens[:room])
            room -= len(tokens)
            if room <= 0:
                break
    found = {}
    for source in sorted(groups):
        tokens = np.concatenate(groups[source])
        starts = np.cumsum([0, *map(len, groups[source])])[:-1]
        rows: Rows = (
            (partial(cut, tokens, starts, begin, data.seq_len), {})
            for begin in range(0, len(tokens), data.seq_len)
        )
        batches = batched(
            rows, data.seq_len, batch_size, rank, world_size, tokenizer.eos_token_id or 0, False
        )
        found[source] = [batch for batch, _ in batches]
    if not any(found.values()):
        raise InputError("the validation documents have no token; look at data.source and the tokenizer")
    return found


def validation_contents(data: DataConfig, training: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """As `PackedBatches.contents`, of what is validated on; of a component whose `training` documents are in
    the same files nothing, of a prepared set what its index states."""
    found = {}
    for name, part in _validation_parts(data).items():
        source = _source(part, "validation")
        if tokens := _set(part, "validation"):
            hashes = {f"{source}/index.json": tokens.identity}
        else:
            local = is_local(source)
            hashes = open_corpus(part, "validation").contents(training.get(name, {})) if local else {}
        if hashes and hashes != training.get(name):
            found[" ".join(filter(None, (name, "validation")))] = hashes
    return found


def token_sets(data: DataConfig, *, validation: bool) -> list[TokenSet]:
    """The prepared sets that training reads, and those of `validation`."""
    parts = [(part, "train") for part in data.parts().values()]
    parts += [(part, "validation") for part in _validation_parts(data).values()] if validation else []
    return [tokens for part, split in parts if (tokens := _set(part, split))]


def _validation_parts(data: DataConfig) -> dict[str, DataConfig]:
    """What is validated on, by component; a mixture may have one `validation_source` for all."""
    if data.mixture and data.validation_source:
        return {"": replace(data, mixture=[], source=data.validation_source)}
    return data.parts()


def _say_skipped(count: int, rank: int) -> None:
    if count and rank == 0:
        what = f"{count} documents above data.max_document_bytes were left out"
        print(f"nalanda: {what} among those read for validation", file=sys.stderr, flush=True)


def _validation_documents(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, rank: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Source and tokens of every validation document, in order."""
    encode = encoder(tokenizer, data)
    if tokens := _open_prepared(data, fingerprint(tokenizer), vocabulary_of(tokenizer), "validation"):
        for number in range(tokens.documents):
            document, source = tokens.document(number)
            yield source, document
        return
    stream = DocumentStream(open_corpus(data, "validation"), seed=0, buffer_size=0, epochs=1)
    documents = iter(stream)
    try:
        while group := _take(documents, STREAM_GROUP):
            encoded = encode([document.text for document in group])
            pairs = zip(group, encoded, strict=True)
            yield from ((document.source, ids) for document, ids in pairs if len(ids))
    finally:  # whoever has enough reads no further
        _say_skipped(stream.skipped, rank)


def _set(data: DataConfig, split: str) -> TokenSet | None:
    """The source of `split`, where that is a prepared set."""
    source = _source(data, split)
    if not isinstance(source, str) or not is_prepared(source):
        return None
    from nalanda.data.token_set import open_set

    return open_set(source, split)


def _source(data: DataConfig, split: str) -> str | list[str]:
    return data.validation_source if split == "validation" and data.validation_source else data.source


def _open_prepared(data: DataConfig, tokenizer: str, vocabulary: int, split: str) -> TokenSet | None:
    """The source of `split`, where that is a prepared set. Raises `InputError` if it was made otherwise."""
    source, tokens = _source(data, split), _set(data, split)
    if tokens is None:
        return None
    for key in ("bos", "eos", "documents"):
        asked, made = getattr(data, key), tokens.settings.get(key, getattr(data, key))
        if asked != made:
            raise InputError(
                f"{source} was prepared with {key}: {made}; set data.{key} so, or prepare it again"
            )
    if tokens.settings["tokenizer"] != tokenizer:
        raise InputError(
            f"{source} was prepared with another tokenizer; set tokenizer: {source}/tokenizer, or prepare it "
            "again"
        )
    if tokens.settings["vocab_size"] != vocabulary:
        raise InputError(
            f"{source}/index.json is damaged: its vocab_size is {tokens.settings['vocab_size']} and the "
            f"tokenizer has {vocabulary}; copy or prepare it again"
        )
    if data.documents == "joined":
        raise InputError(f"{source} is a prepared set; data.documents: joined reads files")
    return tokens


def encoder(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Encoder:
    """Texts → tokens, `[bos] tokens [eos]`. What looks like a special token in a text is read as text."""
    ends = {"bos": (data.bos, tokenizer.bos_token_id), "eos": (data.eos, tokenizer.eos_token_id)}
    for name, (wanted, token) in ends.items():
        if wanted and token is None:
            raise InputError(f"the tokenizer has no {name} token; set data.{name}: false")
    first, last = ([token] if wanted else [] for wanted, token in ends.values())
    return Encoder(fast_backend(tokenizer), first, last)


class _StreamRows:
    """Rows of a corpus that is read and tokenised while it trains, as `order` describes a source of rows."""

    def __init__(
        self,
        corpus: Corpus,
        data: DataConfig,
        *,
        seed: int | str,
        epochs: int | None,
        whole: bool,
        before: int,
    ):
        self.corpus, self.seq_len, self.joined = corpus, data.seq_len, data.documents == "joined"
        self.whole, self.before = whole, before
        buffer = data.shuffle_buffer if whole else 0
        self.stream = partial(DocumentStream, corpus, seed=seed, buffer_size=buffer, epochs=epochs)
        carried = int(self.joined)  # the eos before the text
        self.start = {"documents": self.stream().state_dict(), "carried": carried, "done": 0, "rows": 0}
        self.identity = {"corpus": corpus.fingerprint, "shuffle_buffer": data.shuffle_buffer}

    def epochs(self, state: dict) -> float:
        return state["documents"]["epoch"]

    def skipped(self, state: dict) -> int:
        return state.get("skipped", 0)

    def rows(self, state: dict, tokenisers: Tokenisers) -> Rows:
        return _pack(
            self.stream(),
            tokenisers,
            self.seq_len,
            state,
            whole=self.whole,
            joined=self.joined,
            before=self.before,
        )


def _pack(
    documents: DocumentStream,
    tokenisers: Tokenisers,
    seq_len: int,
    state: dict,
    *,
    whole: bool,
    joined: bool,
    before: int,
) -> Rows:
    """Rows from `state` on. `whole`: only full ones. `joined`: of one text with token `before` in front.

    Documents are tokenised in groups. In training a group's rows come in an order of their own: the rows of
    one long document would otherwise fill batches by themselves, which costs a small model a fifth of its
    perplexity. The state of a row is the stream's before its group, the number of tokens carried over from
    earlier groups, and how many rows of the group are done: restoring tokenises one group again. The carried
    tokens themselves lie in its first row, which is given first and so is done in every state.
    """
    documents.load_state_dict(state["documents"])
    done, rows = state["done"], state["rows"]
    tokens, starts = np.full(state["carried"], before, np.int32), np.zeros(0, np.int64)
    stride = seq_len - joined
    current, heard = state["documents"]["epoch"], rows > 0  # whether the current epoch gave tokens
    for (begun, epoch, skipped), encoded in tokenisers.in_order(_groups(documents)):
        if begun["epoch"] != current:
            _check_heard(heard)
            current, heard = begun["epoch"], False
        begun = {"documents": begun, "carried": len(tokens)} | ({"skipped": skipped} if skipped else {})
        encoded = [ids for ids in encoded if len(ids)]
        heard = heard or bool(encoded)
        lengths = [len(tokens), *map(len, encoded)]
        tokens = np.concatenate([tokens, *encoded])
        starts = starts if joined else np.concatenate([starts, np.cumsum(lengths[:-1])])
        count = (len(tokens) - joined) // stride
        order = list(range(count))
        if whole:
            first = rows - done
            order[1:] = sorted(order[1:], key=lambda index: documents.draw("row", first + index, epoch))
        for place, index in enumerate(order[done:], done + 1):
            rows += 1
            load = partial(cut, tokens, starts, index * stride, seq_len)
            yield load, {**begun, "done": place, "rows": rows}
        tokens, done = tokens[count * stride :], 0
        starts = starts[np.searchsorted(starts, count * stride) :] - count * stride
    _check_heard(heard)
    if len(tokens) > joined and not whole and not done:
        begun = {"documents": documents.state_dict(), "carried": len(tokens)}
        begun |= {"skipped": documents.skipped} if documents.skipped else {}
        yield partial(cut, tokens, starts, 0, seq_len), {**begun, "done": 1, "rows": rows + 1}


def _check_heard(heard: bool) -> None:
    """A run never trains on silence."""
    if not heard:
        raise InputError("an epoch of the corpus gave no token; look at data.source and the tokenizer")


def _groups(documents: DocumentStream) -> Iterator[tuple[tuple[dict, int, int], list[str]]]:
    """The stream's state before a group of documents; its epoch and skipped count after it; the texts.

    A group ends with the epoch.
    """
    characters = PERMUTED_GROUP if documents.permuted or documents.ordered else STREAM_GROUP
    while not documents.ended:
        left = documents.rest_of_epoch()
        while True:
            before = documents.state_dict()
            if not (group := _take(left, characters)):
                break
            yield (before, documents.epoch, documents.skipped), [document.text for document in group]


def _take(documents: Iterator[Document], characters: int) -> list[Document]:
    group = []
    while characters > 0 and (document := next(documents, None)) is not None:
        group.append(document)
        characters -= len(document.text)
    return group
