"""Tokens to rows, and rows to batches. Rows are packed here and nowhere else.

A source of rows (`StreamRows`, `TokenSetRows`, `Mixture`) has:
    rows(state, tokenisers): starts at a state (plain JSON) and yields pairs: a function that loads the row,
        and the state after the row. A process loads only the rows that it trains on.
    start: the first state.
    identity: what a state belongs to.
    epochs(state): how many times the source was read by then; not of a `Mixture`.
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
from nalanda.data.documents import take_documents
from nalanda.data.shuffle import Permutation, next_source, whole_weights
from nalanda.data.token_set import TokenSet
from nalanda.data.workers import Tokenisers

IGNORED = -100
"""transformers' label of positions without loss."""

Batch = dict[str, torch.Tensor]
"""The tensors of some rows, by the names in `PackedBatches`."""

STREAM_GROUP = 1 << 19
"""Characters tokenised, and their rows shuffled, at a time. To resume, a group is tokenised again."""

PERMUTED_GROUP = 1 << 24
"""The same for shards of one document and for joined text. A small corpus is one group."""

LOOK_AHEAD = 4096
"""Positions of a permutation computed at a time."""


class Row(NamedTuple):
    """`seq_len` tokens of one or more documents."""

    tokens: np.ndarray
    """Tokens [T]; fewer in the last row of a validation pass."""
    starts: np.ndarray
    """Positions at which pieces of documents begin, 0 included."""
    slot: int | None = None
    """Batch slot, whose state the row takes over."""
    carried: bool = False
    """Whether the first piece continues a document of the slot's previous row."""


Rows = Iterator[tuple[Callable[[], Row], dict]]

PADDING = Row(np.zeros(0, np.int32), np.zeros(0, np.int64))


class StreamRows:
    """Rows of a corpus that is read and tokenised while it trains.

    Args:
        before: the token in front of the text with `data.documents: joined`.
    """

    def __init__(
        self, corpus: Corpus, data: DataConfig, *, seed: int | str, epochs: int | None, before: int
    ):
        self.corpus, self.seq_len, self.joined = corpus, data.seq_len, data.documents == "joined"
        self.before = before
        self.stream = partial(
            DocumentStream, corpus, seed=seed, buffer_size=data.shuffle_buffer, epochs=epochs
        )
        self.start = {
            "documents": self.stream().state_dict(),
            "carried": int(self.joined),  # the token in front of the text
            "done": 0,
            "rows": 0,
        }
        self.identity = {"corpus": corpus.fingerprint, "shuffle_buffer": data.shuffle_buffer}

    def epochs(self, state: dict) -> float:
        return state["documents"]["epoch"]

    def rows(self, state: dict, tokenisers: Tokenisers) -> Rows:
        """Rows from `state` on.

        Documents are tokenised in groups, and the rows of a group are shuffled. In order, the rows of one long
        document would fill batches by themselves, and cost a small model a fifth of its perplexity.

        The state of a row holds the stream's state before the group, and the group's end. It also counts the
        tokens left over from earlier groups, and the group's rows that are done. Resuming tokenises one group
        again. The leftover tokens are in the group's first row. It stays first, so every
        state is already past it.
        """
        documents = self.stream()
        documents.load_state_dict(state["documents"])
        done, rows = state["done"], state["rows"]
        # The line of tokens: those left over from earlier groups, then the next group's. Resuming puts
        # stand-ins for the former: the row that holds them is already past.
        tokens = np.full(state["carried"], self.before, np.int32)
        starts = np.zeros(0, np.int64)  # of documents in that line
        stride = self.seq_len - self.joined  # joined rows share a token with the row before
        current, has_tokens = state["documents"]["epoch"], rows > 0

        for (before, epoch, skipped), encoded in tokenisers.in_order(_text_groups(documents)):
            if before["epoch"] != current:
                _check_epoch(has_tokens)
                current, has_tokens = before["epoch"], False
            group_state = {"documents": before, "carried": len(tokens), **skipped}
            encoded = [ids for ids in encoded if len(ids)]
            has_tokens = has_tokens or bool(encoded)

            lengths = [len(tokens), *map(len, encoded)]
            tokens = np.concatenate([tokens, *encoded])
            if not self.joined:  # a joined row has no document start but its own
                starts = np.concatenate([starts, np.cumsum(lengths[:-1])])

            count = (len(tokens) - self.joined) // stride
            # The tokenisers read ahead, so `documents.epoch` may be a later one by now.
            order = _order_rows(documents, count, rows - done, epoch)
            for done, index in enumerate(order[done:], done + 1):  # noqa: B020  counts on from there
                rows += 1
                # The arrays are replaced and never changed, so a row may be loaded after its group.
                load = partial(cut_row, tokens, starts, index * stride, self.seq_len)
                yield load, {**group_state, "done": done, "rows": rows}

            # Fewer tokens than a row holds are left over; their documents' starts move along.
            tokens, done = tokens[count * stride :], 0
            starts = starts[np.searchsorted(starts, count * stride) :] - count * stride

        _check_epoch(has_tokens)


def _order_rows(documents: DocumentStream, count: int, first: int, epoch: int) -> list[int]:
    """The order of a group's `count` rows. first: the number of rows before the group."""
    order = list(range(count))
    # Row 0 stays first: it holds the tokens left over. A draw depends on a row's number and the epoch.
    order[1:] = sorted(order[1:], key=lambda i: documents.draw("row", first + i, epoch))
    return order


def _text_groups(documents: DocumentStream) -> Iterator[tuple[tuple[dict, int, dict], list[str]]]:
    """For each group of documents: the stream's state before it, the epoch and what was left out after it,
    and the texts. A group does not cross an epoch."""
    characters = PERMUTED_GROUP if documents.permuted or documents.ordered else STREAM_GROUP
    while not documents.ended:
        left = documents.rest_of_epoch()
        while True:
            before = documents.state_dict()
            group = take_documents(left, characters)
            if not group:
                break
            # Taken after the group, whose files up to here a resume needs unchanged.
            before["end"] = documents.place(before["epoch"])  # a resume reads the group again
            after = documents.epoch, dict(documents.left)
            yield (before, *after), [document.text for document in group]


def _check_epoch(has_tokens: bool) -> None:
    if not has_tokens:
        raise InputError(
            "data.source: an epoch of the corpus gave no token; look at data.source and the tokenizer"
        )


class TokenSetRows:
    """Rows of a token set: windows of `seq_len` tokens, read when needed. The state is the row's number.

    The set is cut into blocks of `block` consecutive rows, permuted anew each epoch. Tokens at the end that
    fill no row or block are left out. With L batch slots, row n goes to slot n % L: a step takes one
    row for each slot. A slot reads a block row by row. Its j-th block is number j·L + slot of the epochs'
    permutations laid end to end. With L = 2, slot 0 reads blocks 0, 2, 4, … of them and slot 1 the others.
    One slot and blocks of one row are the plain shuffle.

    Args:
        tokens, name: the set, and what messages call it.
        seed: of the shuffle.
        epochs: passes over the set; None: without end.
        slots, block: L and the rows of a block, for documents longer than a row; rows then state their slot
            and whether they continue the slot's previous row.
    Raises:
        InputError: the set has less than a block for every slot; while iterating, it is shorter than its
            index says.
    """

    def __init__(
        self,
        tokens: TokenSet,
        name: str,
        *,
        seed: int | str,
        seq_len: int,
        epochs: int | None,
        slots: int | None = None,
        block: int = 1,
    ):
        self.tokens, self.name, self.seed, self.seq_len = tokens, name, seed, seq_len
        self.slots, self.block = slots, block
        rows = tokens.tokens // seq_len
        if not rows:
            raise InputError(
                f"{name}: {tokens.tokens} tokens, fewer than data.seq_len {seq_len}; lower data.seq_len"
            )
        # A set of fewer blocks than slots would give a slot no row.
        self.blocks, lanes = rows // block, slots or 1
        if self.blocks < lanes:
            raise InputError(
                f"{name}: {self.blocks} blocks of {block} rows for the {slots} rows of a step; "
                "lower data.carry_rows or train.tokens_per_step"
            )

        self.end = math.inf
        if epochs is not None:  # all slots end with the same number of blocks
            self.end = epochs * self.blocks // lanes * lanes * block
        self.start = {"rows": 0}
        self.identity: dict[str, Any] = {"corpus": tokens.identity}
        if slots:
            self.identity |= {"lanes": slots, "carry_rows": block}  # the name that states have

    def epochs(self, state: dict) -> float:
        return state["rows"] / (self.blocks * self.block)

    def rows(self, state: dict, tokenisers: Tokenisers) -> Rows:
        number, slots = state["rows"], self.slots or 1
        while number < self.end:
            # Row numbers [n] → slots [n], then each slot's blocks and the rows within them [n].
            numbers = np.arange(number, min(number + LOOK_AHEAD, self.end), dtype=np.int64)
            slot = numbers % slots
            turn, row_of_block = np.divmod(numbers // slots, self.block)  # a slot's turn is a block
            # Block j·L + slot of the permutations, and from it the row of the set.
            rows = self._shuffle_blocks(turn * slots + slot) * self.block + row_of_block
            for row, *of_slot in np.stack([rows, slot, row_of_block], 1).tolist():
                number += 1
                yield partial(self._load_row, row, *of_slot), {"rows": number}

    def _shuffle_blocks(self, positions: np.ndarray) -> np.ndarray:
        """The blocks at these positions of the concatenated permutations."""
        epochs, positions = np.divmod(positions, self.blocks)
        # A look-ahead may cross epochs, and each has a permutation of its own.
        for epoch in np.unique(epochs):
            now = epochs == epoch
            positions[now] = Permutation(self.blocks, f"{self.seed}/{epoch}")(positions[now])
        return positions

    def _load_row(self, row: int, slot: int, row_of_block: int) -> Row:
        begin = row * self.seq_len
        end = begin + self.seq_len
        tokens, starts = self.tokens.read(begin, end), self.tokens.starts(begin, end) - begin
        if self.slots is None:
            return Row(tokens, _with_zero(starts))
        # A block's first row follows another block of its slot, so it continues nothing.
        starts_document = len(starts) > 0 and starts[0] == 0
        carried = row_of_block > 0 and not starts_document
        return Row(tokens, _with_zero(starts), slot, carried)


class Mixture:
    """Rows of several sources in turn (`shuffle.next_source`), each with its own order and epochs.

    The state is the list of their states; the number of rows that each has given decides whose turn it is.
    """

    def __init__(self, sources: dict[str, Any], weights: dict[str, float]):
        self.sources = sources
        self.weights = whole_weights([weights[name] for name in sources])
        self.start = {"rows": 0, "parts": [source.start for source in sources.values()]}
        self.identity: dict[str, Any] = {"mixture": weights}
        for name, source in sources.items():
            self.identity |= {f"{name}: {key}": value for key, value in source.identity.items()}

    def rows(self, state: dict, tokenisers: Tokenisers) -> Rows:
        number, states = state["rows"], list(state["parts"])
        pairs = zip(self.sources.values(), states, strict=True)
        rows = [source.rows(position, tokenisers) for source, position in pairs]
        while True:
            chosen = next_source(self.weights, [position["rows"] for position in states])
            item = next(rows[chosen], None)
            # The first source at the end of its epochs ends the mixture: the weights would not hold on.
            if item is None:
                return
            load, states[chosen] = item
            number += 1
            yield load, {"rows": number, "parts": list(states)}


def pack(documents: list[np.ndarray], seq_len: int, before: int | None = None) -> Rows:
    """All rows of tokenised documents in order, without states; the last may be shorter.

    before: the token in front of joined documents, which are one text.
    """
    front = [] if before is None else [np.array([before], np.int32)]
    tokens = np.concatenate([*front, *documents])
    starts = np.cumsum([0, *map(len, () if front else documents)])[:-1]
    for begin in range(0, len(tokens) - len(front), seq_len - len(front)):
        yield partial(cut_row, tokens, starts, begin, seq_len), {}


def cut_row(tokens: np.ndarray, starts: np.ndarray, begin: int, length: int) -> Row:
    """The row at `begin` of documents in a line, which begin at `starts`."""
    # The starts in [begin, begin + length).
    first, last = np.searchsorted(starts, (begin, begin + length))
    return Row(tokens[begin : begin + length], _with_zero(starts[first:last] - begin))


def _with_zero(starts: np.ndarray) -> np.ndarray:
    """`starts`, with 0 for the rest of a document from the row before."""
    return starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])


def batched(
    rows: Rows,
    seq_len: int,
    batch_size: int,
    rank: int,
    world_size: int,
    padding: int,
    training: bool,
) -> Iterator[tuple[Batch, dict]]:
    """A rank's batches, each with the state after it.

    In training, rows at the end that fill no step are dropped. In validation, rows of padding are added until
    all ranks have the same number of full batches.
    """
    # The state is the one after the rows of all ranks, so it is the same on each.
    count = batch_size * world_size  # rows of all ranks
    while taken := list(itertools.islice(rows, count)):
        _, state = taken[-1]
        if len(taken) < count:
            if training:
                return
            taken += [(lambda: PADDING, state)] * (count - len(taken))
        own_rows = [load() for load, _ in taken[rank::world_size]]  # a rank loads no others
        yield collate(own_rows, seq_len, padding), state


def collate(rows: list[Row], seq_len: int, padding: int) -> Batch:
    """The batch of these rows, as `PackedBatches` documents it. Padding is a piece of its own."""
    input_ids = torch.full((len(rows), seq_len), padding)  # [B, T]
    labels = torch.full_like(input_ids, IGNORED)  # [B, T]
    # Pieces: those of a row's documents, and then its padding. A row of padding alone is one piece.
    starts = []  # of pieces, in the flattened batch
    for index, row in enumerate(rows):
        length = len(row.tokens)
        tokens = torch.from_numpy(row.tokens.astype(np.int64))  # [T], or fewer
        input_ids[index, :length] = labels[index, :length] = tokens
        ends = [length] if length < seq_len else []
        starts += [index * seq_len + start for start in (*row.starts.tolist(), *ends)]
    labels.view(-1)[starts] = IGNORED  # nothing before a piece predicts its first token

    cu_seqlens = torch.tensor([*starts, input_ids.numel()], dtype=torch.int32)  # [N + 1]

    # Position in the flattened batch less the start of the piece: lengths [N], positions [B·T].
    lengths = cu_seqlens.diff().long()
    positions = torch.arange(input_ids.numel()) - cu_seqlens[:-1].long().repeat_interleave(lengths)
    batch = {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions.view_as(input_ids),
        "cu_seqlens": cu_seqlens,
    }
    if rows[0].slot is not None:  # [B] each
        batch["slots"] = torch.tensor([row.slot for row in rows])
        batch["carried"] = torch.tensor([row.carried for row in rows])
    return batch
