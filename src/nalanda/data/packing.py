"""Sources of rows, and batches of them.

A source has `rows(state, tokenisers)`: from a state (plain JSON) on it yields, for each row, a function that
loads it and the state behind it, so that a process loads no row that another one trains on. Its `start` is
the first state, `identity` what a state is good for, `epochs(state)` how often it was read by then, and
`skipped(state)` how many documents were left out for their size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data.corpus import Corpus, DocumentStream
from nalanda.data.documents import Document
from nalanda.data.shuffle import Permutation, next_source, whole_weights
from nalanda.data.token_set import TokenSet
from nalanda.data.workers import Tokenisers

IGNORED = -100  # transformers' label for positions without loss


LOOK_AHEAD = 4096  # places of a permutation that are computed at a time


class Row(NamedTuple):
    """`seq_len` tokens of one or more documents."""

    tokens: np.ndarray  # [T], fewer in the last row of a validation pass
    starts: np.ndarray  # where a document begins, 0 included
    lane: int | None = None  # whose state it goes on with ...
    carried: bool = False  # ... if its first document began in an earlier row


PADDING = Row(np.zeros(0, np.int32), np.zeros(0, np.int64))


Rows = Iterator[tuple[Callable[[], Row], dict]]


def cut_row(tokens: np.ndarray, starts: np.ndarray, begin: int, length: int) -> Row:
    """A row out of many documents, of which `starts` says where they begin."""
    first, last = np.searchsorted(starts, (begin, begin + length))
    return Row(tokens[begin : begin + length], from_zero(starts[first:last] - begin))


def from_zero(starts: np.ndarray) -> np.ndarray:
    """What is left of a document at the beginning of a row is a segment."""
    return starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])


class TokenSetRows:
    """Rows of a prepared set: windows of `seq_len` tokens, read when they are needed. The state is a number.

    The set is a list of blocks of `block` rows that follow one another, permuted anew each epoch; what is
    less than a row or a block at the end of the set is left out. With L lanes, row n of the run is of lane
    n % L: a step takes one row for each lane. A lane goes through its blocks row by row, and its j-th block
    is the (j·L + lane)-th in the order of all epochs, one behind the other, so that between two epochs no
    block is left out. One lane and blocks of one row are the plain shuffled order.

    Args:
        tokens: the set; `name` is what messages call it.
        seed: of the order; None: the set's own, its last row shorter than the others.
        epochs: None: no end.
        lanes, block: L and rows a block, for documents that are longer than a row; rows then say whether
            they go on where the row before in the block ended.
    Raises:
        InputError: the set has not a block for every lane; while iterating, it is shorter than it says.
    """

    def __init__(
        self,
        tokens: TokenSet,
        name: str,
        *,
        seed: int | str | None,
        seq_len: int,
        epochs: int | None,
        lanes: int | None = None,
        block: int = 1,
    ):
        self.tokens, self.name, self.seed, self.seq_len = tokens, name, seed, seq_len
        self.lanes, self.block = lanes, block
        rows = tokens.tokens // seq_len if seed is not None else -(-tokens.tokens // seq_len)
        if not rows:
            raise InputError(f"{name} has {tokens.tokens} tokens, fewer than data.seq_len {seq_len}")
        self.blocks = rows // block
        if self.blocks < (lanes or 1):
            raise InputError(
                f"{name} has {self.blocks} blocks of {block} rows for the {lanes} rows of a step; "
                "lower data.carry_rows or train.tokens_per_step"
            )
        self.end = math.inf if epochs is None else epochs * self.blocks // (lanes or 1) * (lanes or 1) * block
        self.start = {"rows": 0}
        self.identity: dict[str, Any] = {"corpus": tokens.identity}
        if lanes:
            self.identity |= {"lanes": lanes, "carry_rows": block}

    def epochs(self, state: dict) -> float:
        return state["rows"] / (self.blocks * self.block)

    def skipped(self, state: dict) -> int:
        return 0

    def rows(self, state: dict, tokenisers: Tokenisers) -> Rows:
        number, lanes = state["rows"], self.lanes or 1
        while number < self.end:
            numbers = np.arange(number, min(number + LOOK_AHEAD, self.end), dtype=np.int64)
            turns, within = np.divmod(numbers // lanes, self.block)
            rows = self._permuted(turns * lanes + numbers % lanes) * self.block + within
            for row, lane, place in zip(
                rows.tolist(), (numbers % lanes).tolist(), within.tolist(), strict=True
            ):
                number += 1
                yield partial(self._load, row, lane, place), {"rows": number}

    def _permuted(self, places: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(places, self.blocks)
        if self.seed is None:
            return places
        for epoch in np.unique(epochs):
            now = epochs == epoch
            places[now] = Permutation(self.blocks, f"{self.seed}/{epoch}")(places[now])
        return places

    def _load(self, row: int, lane: int, place: int) -> Row:
        begin = row * self.seq_len
        end = min(begin + self.seq_len, self.tokens.tokens)
        tokens, starts = self.tokens.read(begin, end), self.tokens.starts(begin, end) - begin
        if len(tokens) != end - begin:
            raise InputError(f"{self.name} is shorter than its index says; copy or prepare it again")
        if self.lanes is None:
            return Row(tokens, from_zero(starts))
        return Row(tokens, from_zero(starts), lane, place > 0 and not (len(starts) and starts[0] == 0))


class Mixture:
    """Rows of several sources by turns (`turn`), each in its own order and with epochs of its own.

    The state is the list of theirs; how many rows each has given decides whose turn it is.
    """

    def __init__(self, parts: dict[str, Any], weights: dict[str, float]):
        self.parts, self.weights = parts, whole_weights([weights[name] for name in parts])
        self.start = {"rows": 0, "parts": [part.start for part in parts.values()]}
        self.identity: dict[str, Any] = {"mixture": weights}
        for name, part in parts.items():
            self.identity |= {f"{name}: {key}": value for key, value in part.identity.items()}

    def epochs(self, state: dict) -> dict[str, float]:
        parts = zip(self.parts.items(), state["parts"], strict=True)
        return {name: part.epochs(its) for (name, part), its in parts}

    def skipped(self, state: dict) -> int:
        return sum(part.skipped(its) for part, its in zip(self.parts.values(), state["parts"], strict=True))

    def rows(self, state: dict, tokenisers: Tokenisers) -> Rows:
        number, states = state["rows"], list(state["parts"])
        rows = [part.rows(its, tokenisers) for part, its in zip(self.parts.values(), states, strict=True)]
        while True:
            chosen = next_source(self.weights, [its["rows"] for its in states])
            if (item := next(rows[chosen], None)) is None:
                return
            load, states[chosen] = item
            number += 1
            yield load, {"rows": number, "parts": list(states)}


def batched(
    rows: Rows,
    seq_len: int,
    batch_size: int,
    rank: int,
    world_size: int,
    padding: int,
    training: bool,
) -> Iterator[tuple[dict[str, torch.Tensor], dict]]:
    """A rank's batches, each with the state behind it: all full; or, not in training, filled up with rows of
    padding until every rank has as many."""
    block = batch_size * world_size
    while chunk := list(itertools.islice(rows, block)):
        state = chunk[-1][1]
        if len(chunk) < block:
            if training:
                return
            chunk += [(lambda: PADDING, state)] * (block - len(chunk))
        yield collate([load() for load, _ in chunk[rank::world_size]], seq_len, padding), state


def collate(rows: list[Row], seq_len: int, padding: int) -> dict[str, torch.Tensor]:
    input_ids = torch.full((len(rows), seq_len), padding)
    labels = torch.full_like(input_ids, IGNORED)
    starts = []
    for index, row in enumerate(rows):
        length = len(row.tokens)
        input_ids[index, :length] = labels[index, :length] = torch.from_numpy(row.tokens.astype(np.int64))
        ends = [length] if length < seq_len else []  # padding is a segment
        starts += [index * seq_len + start for start in (*row.starts.tolist(), *ends)]
    labels.view(-1)[starts] = IGNORED
    cu_seqlens = torch.tensor([*starts, input_ids.numel()], dtype=torch.int32)
    lengths = cu_seqlens.diff().long()
    positions = torch.arange(input_ids.numel()) - cu_seqlens[:-1].long().repeat_interleave(lengths)
    batch = {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions.view_as(input_ids),
        "cu_seqlens": cu_seqlens,
    }
    if rows[0].lane is not None:
        batch["lanes"] = torch.tensor([row.lane for row in rows])
        batch["carried"] = torch.tensor([row.carried for row in rows])
    return batch


# ------------------------------ packing

# Characters that are tokenised and whose rows are shuffled at a time; states lie where a group begins.
STREAM_GROUP = 1 << 19  # ready in a second


PERMUTED_GROUP = 1 << 24  # of corpora whose documents need no buffer: a small one as a whole


class StreamRows:
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
            load = partial(cut_row, tokens, starts, index * stride, seq_len)
            yield load, {**begun, "done": place, "rows": rows}
        tokens, done = tokens[count * stride :], 0
        starts = starts[np.searchsorted(starts, count * stride) :] - count * stride
    _check_heard(heard)
    if len(tokens) > joined and not whole and not done:
        begun = {"documents": documents.state_dict(), "carried": len(tokens)}
        begun |= {"skipped": documents.skipped} if documents.skipped else {}
        yield partial(cut_row, tokens, starts, 0, seq_len), {**begun, "done": 1, "rows": rows + 1}


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
            if not (group := take_documents(left, characters)):
                break
            yield (before, documents.epoch, documents.skipped), [document.text for document in group]


def take_documents(documents: Iterator[Document], characters: int) -> list[Document]:
    group = []
    while characters > 0 and (document := next(documents, None)) is not None:
        group.append(document)
        characters -= len(document.text)
    return group
