"""Batches of packed rows; every iterator can save its position and resume from it. From a file to a batch:

1. documents.py  FileShard.read                a file → documents, by the reader of its suffix (readers.py)
2. corpus.py     open_texts                    a source → shards (others: hub.py, urls.py, python_docs.py)
3. corpus.py     DocumentStream.rest_of_epoch  shards → shuffled documents
4. workers.py    Tokenisers.in_order           documents → tokens (tokenizer.py: encoder; peers.py: shares)
5. packing.py    StreamRows.rows               tokens → rows; a token set begins here: TokenSetRows.rows
6. packing.py    Mixture.rows                  rows of several sources in turn
7. packing.py    batched                       rows → batches of this rank
8. loader.py     PackedBatches.__next__        batches with their state, read ahead by workers.ReadAhead
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nalanda.common.errors import InputError
from nalanda.common.text import is_url
from nalanda.config.schema import DataConfig
from nalanda.data.corpus import check_apart, describe_files, is_local, source_of
from nalanda.data.documents import take_documents
from nalanda.data.hashes import FileHashes
from nalanda.data.packing import (
    STREAM_GROUP,
    Batch,
    Mixture,
    StreamRows,
    TokenSetRows,
    batched,
    pack,
)
from nalanda.data.peers import Peers
from nalanda.data.records import describe_left, left_out
from nalanda.data.resume import (
    ADVICE,
    Files,
    Hashing,
    check_all_same,
    check_held_out,
    go_on,
    in_turn,
)
from nalanda.data.sources import Source, Sources
from nalanda.data.token_set import SPLITS, TokenSet
from nalanda.data.tokenizer import describe_tokenizer, encoder, padding_of
from nalanda.data.workers import ReadAhead, Tokenisers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PackedBatches:
    """One rank's micro-batches of packed training documents, and the position in them.

    Documents follow one another, `[bos] tokens [eos]`, cut into rows of `seq_len` tokens. A document longer
    than the rest of its row continues in the next row. Its tokens in one row are a piece: cu_seqlens bounds
    pieces. No state crosses rows but under `data.long_documents: carry`. With `data.documents: joined` a row
    is one piece. It begins with the last token of the row before (the first row with an eos), so every token
    of the text is predicted once.

    The rows and their order depend only on the corpus, the tokenizer and the seed. The s-th batches of all W
    ranks, B rows each, are the rows [s·B·W, (s+1)·B·W); each rank takes every W-th of them. Any number of
    ranks sees the same rows.
    Of a token set each rank reads its own rows. Of other sources every rank reads all documents. It tokenises
    all of them, or with `peers` its share.

    Each item is a dict of CPU tensors:
        input_ids: [B, T] int64.
        labels: [B, T] int64, unshifted; -100 at the first token of a piece and on padding.
        position_ids: [B, T] int64, from 0 in every piece.
        cu_seqlens: [N+1] int32, the starts of the N pieces in the flattened batch, then B·T. Every row
            starts a piece.
    and with `data.long_documents: carry`:
        slots: [B] int64, the batch slot of each row; micro-batch i has the same slots in every step.
        carried: [B] bool, whether the first piece continues the slot's row of the step before.

    They last `epochs` and are never padded: rows at the end that fill no micro-step are dropped.

    Iteration continues from the saved position; after the end, `iter()` starts over. With `data.workers`
    above 0 a thread reads ahead; it ends with an error, with `close`, with the object and with the process.
    Batches and states are the same for any number of workers.

    Args:
        data: the sources and their settings.
        tokenizer: a fast tokenizer.
        batch_size: B, rows of this rank's batch.
        seed: of the shuffle.
        rank, world_size: r and W.
        epochs: passes over the documents, of each component of a mixture; None: without end.
        slots: rows of a step over all ranks; only needed for `data.long_documents: carry`.
        peers: from `peers.meet`; ranks of one machine, which then share the tokenising. They must read the
            same number of batches. After `close`, or an error, a rank goes on alone.
        hashes: keeps the hashes of the files that are read as text. They are then found in a thread, in the
            order in which the files are read, and `state_dict` has them. One of many processes does that.
        sources: those of `data`, open already and checked.
    Attributes:
        files: of each component that is read as text, if `hashes` is given; `state_dict` has them.
        changes: a line for each component whose files changed after the place of the loaded state.
    Raises:
        InputError: settings, files or tokenizer do not fit; while iterating, a shard cannot be read, or with
            `peers` another rank stopped.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        seed: int | str = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        slots: int | None = None,
        peers: Peers | None = None,
        hashes: FileHashes | None = None,
        sources: Sources | None = None,
    ):
        self.sources = sources or checked_sources(data)
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size {batch_size}, rank {rank} of {world_size}: no such batch")

        self.data, self.seed, self.epochs = data, seed, epochs
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self._peers = peers

        carries = data.long_documents == "carry"
        # A micro-batch has the same slots in every step, so they must divide evenly.
        if carries and (not slots or slots % (batch_size * world_size)):
            raise ValueError(
                f"slots is {slots}: not a multiple of {batch_size} rows on {world_size} ranks"
            )

        self.encode = encoder(tokenizer, data)
        self.padding = padding_of(tokenizer)
        self.tokenizer = describe_tokenizer(tokenizer)
        self.source = self._open_source(slots if carries else None)
        self.identity = self._describe_identity()

        # Reading starts with the first batch, so that a position can be loaded before.
        self._state: dict[str, Any] = self.source.start
        self._ended = False
        self._reader: Any = None
        self._hashing: Hashing | None = None
        self.files: dict[str, Files] = {} if hashes is None else self._list_files(hashes)
        self.changes: list[str] = []

    def _open_source(self, slots: int | None) -> Any:
        """The rows of the only component, or a mixture of all."""
        components = self.sources.train.items()
        rows = {name: self._open_rows(name, source, slots) for name, source in components}
        if not self.data.mixture:
            return rows[""]
        return Mixture(rows, self.data.weights())

    def _open_rows(self, name: str, source: Source, slots: int | None) -> TokenSetRows | StreamRows:
        data = source.data
        # A lone source keeps the seed itself, as saved positions have it.
        seed = f"{self.seed}/{name}" if name else self.seed
        if tokens := _matching_set(source, self.tokenizer, "train"):
            return TokenSetRows(
                tokens,
                str(data.source),
                seed=seed,
                seq_len=data.seq_len,
                epochs=self.epochs,
                slots=slots,
                block=data.carry_rows if slots else 1,
            )
        if slots:
            raise InputError(
                "data.long_documents: carry reads a token set; make one with nalanda data prepare "
                f"{data.source}"
            )
        return StreamRows(
            source.corpus("train"),
            data,
            seed=seed,
            epochs=self.epochs,
            # The padding token, eos where there is one, stands in front of joined text.
            before=self.padding,
        )

    def _describe_identity(self) -> dict[str, Any]:
        """All that the rows and their order depend on; a saved position fits only the same."""
        # Saved positions name the split.
        identity: dict[str, Any] = {"split": "train", "seed": self.seed}
        for key in ("seq_len", "bos", "eos", "documents", "long_documents"):
            identity[key] = getattr(self.data, key)
        identity |= self.source.identity
        identity["tokenizer"] = self.tokenizer["fingerprint"]
        # The fingerprint does not say which token is bos or eos.
        for end in ("bos", "eos"):
            if identity[end]:
                identity[f"{end}_id"] = self.tokenizer[end]
        return identity

    def __iter__(self) -> PackedBatches:
        if self._ended:
            self._state, self._ended = self.source.start, False
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        if self._reader is None:
            self._reader = self._start_reading()
            if self.files:
                self._hashing = Hashing(self._files_to_hash())
        try:
            # The state moves with the batch that is delivered, not with those read ahead.
            batch, self._state = next(self._reader)
        except BaseException as stop:
            # After an error the position stays, and the next call reads on from it.
            self.close()
            self._ended = isinstance(stop, StopIteration)
            raise
        return batch

    def _start_reading(self) -> Iterator[tuple[Batch, dict]] | ReadAhead:
        """Batches from the state on, each with the state after it."""
        tokenisers = Tokenisers(self.encode, self.data.workers, self._peers)
        self._peers = None  # they do not wait for a second reading
        rows = self.source.rows(self._state, tokenisers)
        share = self.batch_size, self.rank, self.world_size
        batches = batched(rows, self.data.seq_len, *share, self.padding, True)
        return ReadAhead(batches, tokenisers) if self.data.workers else batches

    def close(self) -> None:
        """Stops the thread and its processes; iterating again resumes at the same position."""
        if self._reader:
            self._reader.close()
            self._reader = None
        if self._hashing:
            self._hashing.close()
            self._hashing = None

    def state_dict(self) -> dict:
        """The position after the last batch that was delivered, in plain JSON, shuffle buffer included.

        It is valid for any number of ranks and any batch size. It is the same on every rank, "files" apart:
        they are in the state of those that hash them. Their hashes are those found so far.
        """
        state = {**self._state, "identity": self.identity}
        if self.files:
            state["files"] = {name: files.state_dict() for name, files in self.files.items()}
        return state

    def load_state_dict(self, state: dict, *, checked: bool = False) -> None:
        """Resumes from `state`, in the shard where it lies instead of from the start of the corpus.

        data/resume.py says which files must be as they were.

        Args:
            state: from `state_dict`.
            checked: whether another process has loaded it, and this is `position` there.

        Raises:
            InputError: the state belongs to other data or settings.
        """
        self.close()
        self._state = state if checked else self._find_position(state)
        self._ended = False

    @property
    def position(self) -> dict:
        """`state_dict` without what it belongs to: the same on every rank."""
        return self._state

    def _find_position(self, state: dict) -> dict:
        """The position of a saved state, over the files as they are now."""
        saved = state.get("files", {})
        streams = self._text_rows()
        # A corpus whose files were saved may change: they are compared one by one.
        self._check_identity(state["identity"], but=saved.keys() & streams.keys())

        # The position alone, by component.
        position = {key: value for key, value in state.items() if key not in ("identity", "files")}
        states = self._by_component(position)
        self.changes = []
        for name, files in (self.files or self._list_files(FileHashes())).items():
            if name not in saved:
                continue
            # Listings of no text component allow no change.
            if name not in streams:
                check_all_same(name, saved[name], files)
                continue

            if self.sources.validates:
                check_held_out(saved[name], files)
            documents = states[name]["documents"]
            documents, change = go_on(streams[name].stream(), documents, saved[name], files)
            # The place stays; the order of this epoch's files may be a new one.
            states[name] = {**states[name], "documents": documents}
            if line := str(change):
                self.changes.append(
                    f"data: {_prefix_of(name)}{line} ahead of where the run stopped"
                )
        if "parts" in position:
            return {**position, "parts": [*states.values()]}
        return states[""]

    def _check_identity(self, saved: dict[str, Any], but: Set[str]) -> None:
        """Raises `InputError` if a setting differs from the saved one, or a corpus that is not in `but`."""
        corpora = {f"{name}: corpus" if name else "corpus" for name in but}
        for key, value in self.identity.items():
            if key not in corpora and saved.get(key) != value:
                raise InputError(
                    f"data: changed since the checkpoint was saved: {key} was {saved.get(key)!r} and is "
                    f"{value!r}; {ADVICE}"
                )

    def _by_component(self, position: dict) -> dict[str, dict]:
        """The state of each component."""
        return dict(zip(self._components(), position.get("parts", [position]), strict=True))

    def _list_files(self, hashes: FileHashes) -> dict[str, Files]:
        return {name: Files(rows.corpus, hashes) for name, rows in self._text_rows().items()}

    def _files_to_hash(self) -> Iterator[tuple[Files, int]]:
        """All files, each with its number: those behind the position of each component in the order in which
        they are read, then the rest."""
        states, streams = self._by_component(self._state), self._text_rows()
        lists = []
        for name, files in self.files.items():
            order = [*range(len(files.names))]
            if name in streams:
                stream = streams[name].stream()
                stream.load_state_dict(states[name]["documents"])
                order = stream.order or stream.permutation(len(order))
                # Ahead of the position first: of files read before their hash, a resume compares name and size alone.
                order = order[stream.shard :] + order[: stream.shard]
            lists.append([(files, number) for number in order])
        return in_turn(lists)

    def epochs_read(self) -> dict[str, float]:
        """How many times each component was read, in whole epochs for a stream; a single source is ""."""
        states = self._by_component(self._state)
        return {name: rows.epochs(states[name]) for name, rows in self._components().items()}

    def skipped(self) -> Counter[str]:
        """Documents left out, in all epochs (`records.left_out`)."""
        states = self._by_component(self._state).values()
        return sum(map(left_out, states), Counter())

    def _text_rows(self) -> dict[str, StreamRows]:
        """The components that are read as text."""
        components = self._components().items()
        return {name: rows for name, rows in components if isinstance(rows, StreamRows)}

    def _components(self) -> dict[str, StreamRows | TokenSetRows]:
        """The rows of each component; the only one is ""."""
        return self.source.sources if isinstance(self.source, Mixture) else {"": self.source}

    def describe_files(self) -> list[str]:
        """Lines for each component: its number of files by split, those left out, and the share held out."""
        lines = []
        for name, rows in self._text_rows().items():
            corpus = rows.corpus
            if counts := describe_files(self.sources.train[name].data, corpus.counts):
                lines.append(counts)
            if corpus.note:
                lines.append(_prefix_of(name) + corpus.note)
        return lines


def _prefix_of(name: str) -> str:
    """Names the component at the beginning of a line; "" for the only one."""
    return f"{name}: " if name else ""


def validation_batches(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    say: Callable[[str], None] = lambda line: None,
    sources: Sources | None = None,
) -> dict[str, list[Batch]]:
    """One rank's batches of the validation documents by source; "" for documents that name none.

    Documents are taken in order until they fill `data.max_validation_rows`. Each component of a mixture fills
    its share by weight, and at least one row. The documents of a source are packed apart from the others.
    Of many sources, the small ones are packed together (`_join_small`). Joined documents are one group. The
    last row of a source is padded. Rows of padding are added until every rank has the same number of full
    batches. A batch may therefore have no label at all: add up losses and counts of labels instead of
    averaging means. say: gets a line if documents are left out. sources: those of `data`, open already and
    checked.

    Raises:
        InputError: as in `PackedBatches`; or a component has no validation documents.
    """
    sources = sources or checked_sources(data)
    for source in sources.train.values():
        if source.data.validation_source and not any(map(source.token_set, SPLITS)):
            check_apart(*map(source.corpus, SPLITS))

    # Each source is packed by itself, so that no row mixes two of them.
    documents = _join_small(_take_validation_documents(tokenizer, sources, rank, say))
    share, padding = (batch_size, rank, world_size), padding_of(tokenizer)
    before = padding if data.documents == "joined" else None
    batches = {}
    for source in sorted(documents):
        rows = pack(documents[source], data.seq_len, before)
        batches_and_states = batched(rows, data.seq_len, *share, padding, False)
        batches[source] = [batch for batch, _ in batches_and_states]
    if not any(batches.values()):
        raise InputError(
            "data.source: the validation documents have no token; look at data.source and the tokenizer"
        )
    return batches


def _take_validation_documents(
    tokenizer: PreTrainedTokenizerBase, sources: Sources, rank: int, say: Callable[[str], None]
) -> dict[tuple[str, str], list[np.ndarray]]:
    """The tokens of the documents that fill the rows, by component and source."""
    data = sources.data
    weights = data.weights()
    taken: dict[tuple[str, str], list[np.ndarray]] = {}
    for name, component in sources.validation.items():
        share = weights[name] / sum(weights.values()) if name in weights else 1.0
        rows = max(1, round(data.max_validation_rows * share))
        # In tokens. A joined row begins with the last one of the row before.
        room = rows * (data.seq_len - (data.documents == "joined"))
        documents, describe = _validation_documents(component, tokenizer, rank)
        for count, (source, tokens) in enumerate(documents, 1):
            # The last document is cut where the rows are full.
            taken.setdefault((name, source), []).append(tokens[:room])
            room -= len(tokens)
            if room <= 0:
                say(
                    f"validation reads {_prefix_of(name)}{describe(count)} "
                    f"(data.max_validation_rows: {data.max_validation_rows})"
                )
                break
    return taken


SOURCES_APART = 16
"""Sources whose validation losses are told apart."""

SMALL_SOURCE = 0.01
"""Share of the tokens below which a source is not told apart, if there are more of them."""


def _join_small(groups: dict[tuple[str, str], list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """The documents by name of the component and source; with many sources, the small ones' are together.

    The rows of each name are padded to whole batches on every rank. Without a bound, a `source_field` that is
    a URL would cost a batch for each document.
    """
    sizes = {key: sum(map(len, documents)) for key, documents in groups.items()}
    apart = set(groups)
    if len(groups) > SOURCES_APART:
        # Ties by name, so that the choice does not depend on the order of the documents.
        largest = sorted(sizes, key=lambda key: (-sizes[key], key))[:SOURCES_APART]
        apart = {key for key in largest if sizes[key] >= SMALL_SOURCE * sum(sizes.values())}

    joined: dict[str, list[np.ndarray]] = {}
    for (name, source), documents in groups.items():
        if (name, source) not in apart:
            # Where no source of a component stands apart, its own name says enough.
            source = "others" if any(component == name for component, _ in apart) else ""
        joined.setdefault("/".join(filter(None, (name, source))), []).extend(documents)
    return joined


def _validation_documents(
    source: Source, tokenizer: PreTrainedTokenizerBase, rank: int
) -> tuple[Iterator[tuple[str, np.ndarray]], Callable[[int], str]]:
    """Source and tokens of every validation document, in order, and words for the first so many of them."""
    data = source.data
    encode, joined = encoder(tokenizer, data), data.documents == "joined"
    if tokens := _matching_set(source, describe_tokenizer(tokenizer), "validation"):
        pairs = map(tokens.document, range(tokens.documents))
        documents = ((name, ids) for ids, name in pairs)
        return documents, lambda count: f"the first {count:,} of {tokens.documents:,} documents"

    corpus = source.corpus("validation")
    # In the order of the files, as in a token set of them. The demo's text, which is read whole, keeps the
    # order that its published figures were measured in.
    stream = replace(corpus, ordered=data.source != "python").once()

    def read() -> Iterator[tuple[str, np.ndarray]]:
        documents = iter(stream)
        try:
            while group := take_documents(documents, STREAM_GROUP):
                encoded = encode([document.text for document in group])
                for document, ids in zip(group, encoded, strict=True):
                    if len(ids):
                        yield "" if joined else document.source, ids
        finally:  # the consumer may stop early
            left = describe_left(stream.left)
            if left and rank == 0:
                print(
                    f"nalanda: {left} among those read for validation", file=sys.stderr, flush=True
                )

    def describe(count: int) -> str:
        if joined:
            return "the beginning of the text"
        files = len(stream.corpus.shards)
        opened = files if stream.ended else min(stream.shard + 1, files)
        return f"the first {count:,} documents, of at most {opened:,} of {files:,} files"

    return read(), describe


def validation_files(
    sources: Sources, training: PackedBatches, hashes: FileHashes
) -> dict[str, Files]:
    """`PackedBatches.files` of the validation documents; of a token set the identity in its index.

    A component whose validation documents lie in the files of `training` is left out.
    """
    files = {}
    for name, source in sources.validation.items():
        location = source_of(source.data, "validation")
        key = f"{name} validation" if name else "validation"
        if tokens := source.token_set("validation"):
            files[key] = Files(None, hashes, {f"{location}/index.json": tokens.identity})
        elif is_local(location) or is_url(location):
            corpus, trained = source.corpus("validation"), training.files.get(name)
            if trained is None or trained.corpus is None or trained.corpus.shards != corpus.shards:
                files[key] = Files(corpus, hashes)
    return files


def checked_sources(data: DataConfig) -> Sources:
    """The sources of `data`, not open yet. Raises `InputError` for settings that cannot work."""
    data.check()
    return Sources(data)


def _matching_set(source: Source, tokenizer: dict[str, Any], split: str) -> TokenSet | None:
    """`Source.token_set`, checked against the settings and the tokenizer.

    tokenizer: from `describe_tokenizer`. Raises `InputError` if the set was made with others.
    """
    tokens = source.token_set(split)
    if tokens is None:
        return None

    data, location = source.data, source_of(source.data, split)
    # A setting that the set's index lacks fits any.
    for key in ("bos", "eos", "documents"):
        wanted = getattr(data, key)
        prepared = tokens.settings.get(key, wanted)
        if wanted != prepared:
            raise InputError(
                f"{location}: was prepared with {key}: {prepared}; set data.{key}={str(prepared).lower()}, "
                "or prepare it again"
            )

    if tokens.settings["tokenizer"] != tokenizer["fingerprint"]:
        raise InputError(
            f"{location}: was prepared with another tokenizer; set tokenizer: {location}/tokenizer, or prepare "
            "it again"
        )
    if tokens.settings["vocab_size"] != tokenizer["vocab_size"]:
        raise InputError(
            f"{location}/index.json: damaged, its vocab_size is {tokens.settings['vocab_size']} and the "
            f"tokenizer has {tokenizer['vocab_size']}; copy or prepare it again"
        )

    # The same vocabulary may name another token as bos or eos.
    ends = tokens.ends
    for end in ("bos", "eos"):
        if getattr(data, end) and ends[end] != tokenizer[end]:
            raise InputError(
                f"{location}: its {end} is token {ends[end]}, and the tokenizer's is {tokenizer[end]}; set "
                f"tokenizer: {location}/tokenizer, or prepare it again"
            )
    if data.documents == "joined":
        raise InputError(
            f"data.documents: joined reads files, and {location} is a token set; give its source"
        )
    return tokens
