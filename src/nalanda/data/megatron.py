"""Megatron's indexed datasets, read into token sets and written from them.

    PREFIX.idx    magic, version 1 (uint64), code of the dtype (uint8), number S of sequences and D + 1 of
                  bounds (uint64); then S lengths in tokens (int32), S positions in bytes (int64), and the
                  D + 1 bounds of D documents, counted in sequences (int64); all little-endian
    PREFIX.bin    the tokens

A directory may hold train.idx and validation.idx, as `write_megatron` writes them. (Megatron itself cuts its
splits out of one set when it trains.) Documents are taken token for token. Megatron puts its eod after a
document only if asked (--append-eod), and no bos before it. So the token set's settings say eos (bos) if
every document ends (begins) with the tokenizer's.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nalanda.common.errors import InputError, first_line, local_output
from nalanda.common.files import copy_contents, new_folder, verify_manifest, write_manifest
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare_run import ShardWriter
from nalanda.data.stored_sets import local_set
from nalanda.data.text_bytes import text_bytes
from nalanda.data.token_set import (
    SPLITS,
    is_token_set,
    megatron_splits,
    read_index,
    shard_entries,
    token_dtype,
    write_index,
)
from nalanda.data.tokenizer import (
    build_tokenizer,
    describe_tokenizer,
    load_tokenizer,
    vocabulary_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAGIC = b"MMIDIDX\x00\x00"

HEAD = struct.Struct("<9sQBQQ")
"""The head of PREFIX.idx: magic, version, code of the dtype, sequences, bounds."""

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of the dtypes of tokens; 6 and 7 are floats."""

SMALL = 65500
"""Vocabularies below this are uint16 in Megatron, others int32."""

SHARD = 1 << 26
"""Tokens after which a new shard of the token set begins."""


class MegatronSet:
    """The tokens of PREFIX.bin and the ends of their documents.

    Attributes:
        tokens: [T], mapped from the file.
        ends: [D] int64, in tokens.
    Raises:
        InputError: the files are missing, damaged, or not such a set.
    """

    def __init__(self, prefix: Path):
        self.idx = prefix.with_name(f"{prefix.name}.idx")
        self.bin = prefix.with_name(f"{prefix.name}.bin")
        try:
            content = self.idx.read_bytes()
            size = self.bin.stat().st_size
        except OSError as error:
            raise InputError(
                f"{error.filename}: {first_line(error)}; a Megatron set is .idx and .bin"
            ) from None

        dtype, lengths, positions, bounds = self._read_columns(content)
        sequences = len(lengths)
        ends = np.cumsum(lengths, dtype=np.int64)  # [S], in tokens
        # Sequences lie end to end in PREFIX.bin; the bounds [D + 1] count up from 0 to S.
        if (
            (lengths < 0).any()
            or (positions != (ends - lengths) * dtype.itemsize).any()
            or not len(bounds)
            or (bounds[0], bounds[-1]) != (0, sequences)
            or (np.diff(bounds) < 0).any()
        ):
            raise InputError(
                f"{self.idx}: damaged, its documents do not follow one another; copy it again"
            )
        self.ends = np.concatenate([[0], ends])[bounds[1:]]  # [D]: a document is some sequences

        stated = int(ends[-1] if sequences else 0) * dtype.itemsize
        if size != stated:
            raise InputError(
                f"{self.bin}: {size:,} bytes, and its index says {stated:,}; copy it again"
            )
        self.tokens = np.memmap(self.bin, dtype, mode="r") if size else np.zeros(0, dtype)

    def _read_columns(self, content: bytes) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
        """The dtype of the tokens, and lengths [S], positions [S] and bounds [D + 1] of the index."""
        if len(content) < HEAD.size or not content.startswith(MAGIC):
            raise InputError(
                f"{self.idx}: not the index of a Megatron set, which begins with MMIDIDX"
            )
        _, version, code, sequences, bounds = HEAD.unpack_from(content)
        if version != 1 or code not in DTYPES:
            raise InputError(
                f"{self.idx}: version {version}, dtype {code}; version 1 with integers is read"
            )

        # Behind the head: S int32, S int64, then D + 1 int64.
        stated = HEAD.size + 12 * sequences + 8 * bounds
        if len(content) != stated:
            raise InputError(
                f"{self.idx}: {len(content):,} bytes, and its head says {stated:,}; copy it again"
            )
        return (
            np.dtype(DTYPES[code]),
            np.frombuffer(content, "<i4", sequences, HEAD.size),
            np.frombuffer(content, "<i8", sequences, HEAD.size + 4 * sequences),
            np.frombuffer(content, "<i8", bounds, HEAD.size + 12 * sequences),
        )

    def ends_are(self, token: int | None, first: bool = False) -> bool:
        """Whether every document ends, or with `first` begins, with `token`."""
        begins = np.concatenate([[0], self.ends[:-1]])
        filled = self.ends > begins  # a document may have no token
        # The first or the last token of each document that has one.
        edges = begins[filled] if first else self.ends[filled] - 1
        return token is not None and len(edges) > 0 and bool((self.tokens[edges] == token).all())

    def documents(self) -> Iterator[np.ndarray]:
        """The documents that have a token, in order."""
        start = 0
        for end in self.ends.tolist():
            if end > start:
                yield self.tokens[start:end]
            start = end


def _new_set(directory: Path) -> contextlib.AbstractContextManager[Path]:
    """`new_folder` in place of `directory`. Raises `InputError` if that holds something."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory}: exists; name another directory, or remove it")
    return new_folder(directory, replace=True)


# ------------------------------ Megatron's → ours


def read_megatron(data: DataConfig, tokenizer: TokenizerConfig, directory: str | Path) -> dict:
    """Makes the token set `directory` of the Megatron set `data.source`, in one pass. Returns the index.

    Without a validation part, `data.validation_share` of the documents is held out; the hash of their tokens
    decides.

    Raises:
        InputError: the set is damaged; the tokenizer is not named, or lacks some of the ids; the directory
            holds something.
    """
    splits = megatron_splits(data.source)
    directory = local_output(directory, "output")
    if tokenizer.path is None:
        raise InputError(
            f"{data.source}: holds token ids; name the tokenizer that made them: --tokenizer"
        )

    if data.validation_source:
        raise InputError(
            "data.validation_source: of a Megatron set the validation lies beside it; leave the key out, and name "
            "a folder that has train.idx and validation.idx"
        )
    data.check()
    source = Path(str(data.source)).expanduser()
    # A set that `write_megatron` wrote has a manifest.
    if (source / "manifest.json").exists() and (problem := verify_manifest(source)):
        raise InputError(f"{source}: damaged, {problem}; copy it again")
    sets = {split: MegatronSet(prefix) for split, prefix in splits.items()}

    with _new_set(directory) as folder:
        for split in SPLITS:
            (folder / split).mkdir()
        saved = folder / "tokenizer"
        build_tokenizer(tokenizer, data, saved).save_pretrained(saved)
        return _write_set(data, tokenizer, sets, folder)


def _write_set(
    data: DataConfig, config: TokenizerConfig, sets: dict[str, MegatronSet], directory: Path
) -> dict:
    tokenizer = load_tokenizer(directory / "tokenizer")
    dtype = token_dtype(vocabulary_of(tokenizer))
    shards = _write_shards(data, tokenizer, sets, directory, dtype)
    if not shards["train"]:
        raise InputError(f"{data.source}: no document with tokens is left for training")

    # Megatron writes eod only if asked, and no bos: the tokens say which of them documents have.
    filled = [megatron for megatron in sets.values() if len(megatron.tokens)]
    settings: dict[str, Any] = {
        "source": data.source,
        "bos": all(each.ends_are(tokenizer.bos_token_id, first=True) for each in filled),
        "eos": all(each.ends_are(tokenizer.eos_token_id) for each in filled),
        "documents": "apart",
    }
    if len(sets) == 1:
        settings["validation_share"] = data.validation_share
    settings["tokenizer"] = asdict(config)

    described = describe_tokenizer(tokenizer)
    return write_index(directory, shards, dtype=dtype.name, settings=settings, tokenizer=described)


def _write_shards(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sets: dict[str, MegatronSet],
    directory: Path,
    dtype: np.dtype,
) -> dict[str, list[dict]]:
    """Writes the documents of all sets. Returns the entries of the shards by split."""
    vocabulary = vocabulary_of(tokenizer)
    bytes_of = _byte_counter(tokenizer)
    shards: dict[str, list[dict]] = {split: [] for split in SPLITS}
    writers: dict[str, ShardWriter] = {}

    def close(split: str) -> None:
        if entry := writers.pop(split).close():
            shards[split].append(entry)

    for split_of_set, megatron in sets.items():
        for document in megatron.documents():
            # An id outside of the vocabulary shows that another tokenizer made the set.
            low, high = int(document.min()), int(document.max())
            if low < 0 or high >= vocabulary:
                raise InputError(
                    f"{megatron.bin}: holds token {min(low, 0) or high}, and the tokenizer has {vocabulary} "
                    "tokens; name the tokenizer that made the set"
                )

            split = split_of_set
            if len(sets) == 1:  # no validation part
                split = _choose_split(document, data.validation_share)
            if split not in writers:
                path = directory / split / f"{len(shards[split]):05d}"
                writers[split] = ShardWriter(path, dtype)
            writers[split].add(document, "", bytes_of(document))
            if writers[split].tokens >= SHARD:
                close(split)

    for split in [*writers]:
        close(split)
    return shards


def _choose_split(document: np.ndarray, validation_share: float) -> str:
    """The split of a document, by the hash of its tokens."""
    # uint32 whatever the set's dtype, so that equal tokens fall into the same split.
    content = document.astype("<u4").tobytes()
    number = int.from_bytes(blake2b(content, digest_size=8).digest())
    return "validation" if number < validation_share * 2**64 else "train"


def _byte_counter(tokenizer: PreTrainedTokenizerBase) -> Callable[[np.ndarray], int]:
    """Counts the bytes of a document's text: from a table, or by decoding it if the tokenizer loses some."""
    if table := text_bytes(tokenizer):
        return lambda document: int(table(document).sum())
    return lambda document: len(
        str(tokenizer.decode(document.tolist(), skip_special_tokens=True)).encode()
    )


# ------------------------------ ours → Megatron's


def write_megatron(token_set: str | Path, directory: str | Path) -> dict[str, tuple[int, int]]:
    """Writes train and validation of a token set as Megatron sets, with its tokenizer and a manifest.

    The shards are compared with the sums in their index as they are read. Documents keep their tokens, their
    order and their ends; the names of their sources are lost.

    Returns: split → (documents, tokens).
    Raises:
        InputError: not a token set, or a damaged one; the directory holds something.
    """
    directory = local_output(directory, "output")
    token_set = local_set(token_set)
    if not is_token_set(token_set):
        raise InputError(
            f"{token_set}: not a token set; prepare one first, then write it as --format megatron"
        )

    index = read_index(token_set)
    code = 8 if index["tokenizer"]["vocab_size"] < SMALL else 4
    with _new_set(directory) as folder:
        copy_contents(token_set / "tokenizer", folder / "tokenizer")
        for split in SPLITS:
            if index[split]["documents"]:
                _write_split(token_set, index, split, folder / split, code)
        write_manifest(folder)
    return {split: (index[split]["documents"], index[split]["tokens"]) for split in SPLITS}


def _write_split(token_set: Path, index: dict, split: str, prefix: Path, code: int) -> None:
    """Writes the documents of a split to PREFIX.bin, then PREFIX.idx."""
    dtype = np.dtype(DTYPES[code])
    lengths: list[np.ndarray] = []  # of the documents, a shard each
    with prefix.with_suffix(".bin").open("wb") as file:
        for entry in shard_entries(token_set, index, split):
            # The sum is over the token set's bytes, before the tokens take Megatron's dtype.
            digest = sha256()
            for low in range(0, entry.tokens, SHARD):
                tokens = entry.tokens_between(low, min(low + SHARD, entry.tokens))
                digest.update(tokens.tobytes())
                file.write(tokens.astype(dtype).tobytes())

            # Sizes, order and sums are checked here, so a damaged set is not passed on.
            ends = entry.ends(0, entry.documents)
            entry.check_ends(np.concatenate([[0], ends]))
            tokens_file, docs_file = entry.files()
            if digest.hexdigest() != tokens_file.sha256:
                raise entry.damaged("tokens", "its SHA-256 is not that of the index")
            if problem := docs_file.damage(sums=True):
                raise InputError(problem)
            lengths.append(np.diff(ends, prepend=0))

    # A document is one sequence here, so the bounds count up.
    sizes = np.concatenate(lengths)
    # Bytes in front of each document [D].
    positions = (np.cumsum(sizes) - sizes) * dtype.itemsize
    bounds = np.arange(len(sizes) + 1)
    content = HEAD.pack(MAGIC, 1, code, len(sizes), len(bounds))
    for values, kind in ((sizes, "<i4"), (positions, "<i8"), (bounds, "<i8")):
        content += values.astype(kind).tobytes()
    prefix.with_suffix(".idx").write_bytes(content)
