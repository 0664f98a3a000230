"""Read → tokenise → pack → batch; every iterator can say where it is and go on from there."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data.corpus import DocumentStream, is_local, open_corpus
from nalanda.data.packing import (
    STREAM_GROUP,
    Mixture,
    Rows,
    StreamRows,
    TokenSetRows,
    batched,
    cut_row,
    take_documents,
)
from nalanda.data.token_set import TokenSet, is_token_set, open_set
from nalanda.data.tokenizer import encoder, tokenizer_fingerprint, vocabulary_of
from nalanda.data.workers import ReadAhead, Tokenisers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        self.tokenizer, self.vocabulary = tokenizer_fingerprint(tokenizer), vocabulary_of(tokenizer)
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
        streams = {name: part for name, part in parts.items() if isinstance(part, StreamRows)}
        return {name: found for name, part in streams.items() if (found := part.corpus.contents())}

    def _open(self, name: str, data: DataConfig, lanes: int | None) -> TokenSetRows | StreamRows:
        seed = f"{self.seed}/{name}" if name else self.seed
        split = "train" if self.training else "validation"
        if tokens := _open_prepared(data, self.tokenizer, self.vocabulary, split):
            return TokenSetRows(
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
        return StreamRows(
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
            (partial(cut_row, tokens, starts, begin, data.seq_len), {})
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
    if tokens := _open_prepared(
        data, tokenizer_fingerprint(tokenizer), vocabulary_of(tokenizer), "validation"
    ):
        for number in range(tokens.documents):
            document, source = tokens.document(number)
            yield source, document
        return
    stream = DocumentStream(open_corpus(data, "validation"), seed=0, buffer_size=0, epochs=1)
    documents = iter(stream)
    try:
        while group := take_documents(documents, STREAM_GROUP):
            encoded = encode([document.text for document in group])
            pairs = zip(group, encoded, strict=True)
            yield from ((document.source, ids) for document, ids in pairs if len(ids))
    finally:  # whoever has enough reads no further
        _say_skipped(stream.skipped, rank)


def _set(data: DataConfig, split: str) -> TokenSet | None:
    """The source of `split`, where that is a prepared set."""
    source = _source(data, split)
    if not isinstance(source, str) or not is_token_set(source):
        return None
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
