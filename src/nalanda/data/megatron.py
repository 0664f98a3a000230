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

import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nalanda.common.errors import InputError, first_line, local_output
from nalanda.common.files import verify_manifest, write_manifest
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare_run import ShardWriter, write_whole
from nalanda.data.text_bytes import text_bytes
from nalanda.data.token_set import (
    FORMAT,
    SPLITS,
    VERSION,
    is_token_set,
    megatron_splits,
    read_index,
    shard_entries,
    token_dtype,
    totals,
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
        self.prefix = prefix
        self.idx, self.bin = (prefix.with_name(f"{prefix.name}.{end}") for end in ("idx", "bin"))
        head = struct.Struct("<9sQBQQ")
        try:
            content = self.idx.read_bytes()
            size = self.bin.stat().st_size
        except OSError as error:
            raise InputError(
                f"{error.filename}: {first_line(error)}; a Megatron set is .idx and .bin"
            ) from None
        if len(content) < head.size or not content.startswith(MAGIC):
            raise InputError(
                f"{self.idx}: not the index of a Megatron set, which begins with MMIDIDX"
            )
        _, version, code, sequences, bounds = head.unpack_from(content)
        if version != 1 or code not in DTYPES:
            raise InputError(
                f"{self.idx}: version {version}, dtype {code}; version 1 with integers is read"
            )
        meant = head.size + 12 * sequences + 8 * bounds
        if len(content) != meant:
            raise InputError(
                f"{self.idx}: {len(content):,} bytes, and its head says {meant:,}; copy it again"
            )
        lengths = np.frombuffer(content, "<i4", sequences, head.size)
        places = np.frombuffer(content, "<i8", sequences, head.size + 4 * sequences)
        found = np.frombuffer(content, "<i8", bounds, head.size + 12 * sequences)
        dtype, ends = np.dtype(DTYPES[code]), np.cumsum(lengths, dtype=np.int64)
        if (
            (lengths < 0).any()
            or (places != (ends - lengths) * dtype.itemsize).any()
            or not bounds
            or (found[0], found[-1]) != (0, sequences)
            or (np.diff(found) < 0).any()
        ):
            raise InputError(
                f"{self.idx}: damaged, its documents do not follow one another; copy it again"
            )
        self.ends = np.concatenate([[0], ends])[found[1:]]
        meant = int(ends[-1] if sequences else 0) * dtype.itemsize
        if size != meant:
            raise InputError(
                f"{self.bin}: {size:,} bytes, and its index says {meant:,}; copy it again"
            )
        self.tokens = np.memmap(self.bin, dtype, mode="r") if size else np.zeros(0, dtype)

    def ends_are(self, token: int | None, first: bool = False) -> bool:
        """Whether every document ends, or with `first` begins, with `token`."""
        begins = np.concatenate([[0], self.ends[:-1]])
        filled = self.ends > begins
        edges = begins[filled] if first else self.ends[filled] - 1
        return token is not None and len(edges) > 0 and bool((self.tokens[edges] == token).all())

    def documents(self) -> Iterator[np.ndarray]:
        """The documents that have a token, in order."""
        start = 0
        for end in self.ends.tolist():
            if end > start:
                yield self.tokens[start:end]
            start = end


def read_megatron(data: DataConfig, tokenizer: TokenizerConfig, directory: str | Path) -> dict:
    """Makes the token set `directory` of the Megatron set `data.source`, in one pass. Returns the index.

    Without a validation part, `data.validation_share` of the documents is held out; the hash of their tokens
    decides.

    Raises:
        InputError: the set is damaged; the tokenizer is not named, or lacks some of the ids; the directory
            holds something.
    """
    splits, directory = megatron_splits(data.source), local_output(directory, "output")
    if tokenizer.path is None:
        raise InputError(
            f"{data.source}: holds token ids; name the tokenizer that made them: --tokenizer"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory}: exists; name another directory, or remove it")
    data.check()
    folder = Path(str(data.source)).expanduser()
    if (folder / "manifest.json").exists() and (problem := verify_manifest(folder)):
        raise InputError(f"{folder}: damaged, {problem}; copy it again")
    sets = {split: MegatronSet(prefix) for split, prefix in splits.items()}
    part = directory.with_name(f".tmp-{directory.name}")
    shutil.rmtree(part, ignore_errors=True)
    for split in SPLITS:
        (part / split).mkdir(parents=True)
    try:
        build_tokenizer(tokenizer, data, part / "tokenizer").save_pretrained(part / "tokenizer")
        index = _write_set(data, tokenizer, sets, part)
        if directory.exists():
            directory.rmdir()
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return index


def _write_set(
    data: DataConfig, config: TokenizerConfig, sets: dict[str, MegatronSet], directory: Path
) -> dict:
    tokenizer = load_tokenizer(directory / "tokenizer")
    count, bytes_of = vocabulary_of(tokenizer), _bytes_of(tokenizer)
    dtype = token_dtype(count)
    shards: dict[str, list[dict]] = {split: [] for split in SPLITS}
    open_shards: dict[str, ShardWriter] = {}

    def close(split: str) -> None:
        if entry := open_shards.pop(split).close():
            shards[split].append(entry)

    for part, found in sets.items():
        for document in found.documents():
            low, high = int(document.min()), int(document.max())
            if low < 0 or high >= count:
                raise InputError(
                    f"{found.bin}: holds token {min(low, 0) or high}, and the tokenizer has {count} tokens; "
                    "name the tokenizer that made the set"
                )
            split = part
            if len(sets) == 1:
                number = int.from_bytes(
                    blake2b(document.astype("<u4").tobytes(), digest_size=8).digest()
                )
                split = "validation" if number < data.validation_share * 2**64 else "train"
            if split not in open_shards:
                open_shards[split] = ShardWriter(
                    directory / split / f"{len(shards[split]):05d}", dtype
                )
            open_shards[split].add(document, "", bytes_of(document))
            if open_shards[split].tokens >= SHARD:
                close(split)
    for split in [*open_shards]:
        close(split)
    if not shards["train"]:
        raise InputError(f"{data.source}: no document with tokens is left for training")
    ends = {"bos": (tokenizer.bos_token_id, True), "eos": (tokenizer.eos_token_id, False)}
    filled = [found for found in sets.values() if len(found.tokens)]
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype.name,
        "settings": {
            "source": data.source,
            **{name: all(found.ends_are(*end) for found in filled) for name, end in ends.items()},
            "documents": "apart",
            **({"validation_share": data.validation_share} if len(sets) == 1 else {}),
            "tokenizer": asdict(config),
        },
        "tokenizer": describe_tokenizer(tokenizer),
        "sources": [""],
        **{split: totals(entries) for split, entries in shards.items()},
    }
    write_whole(directory / "index.json", json.dumps(index, indent=1, ensure_ascii=False).encode())
    return index


def _bytes_of(tokenizer: PreTrainedTokenizerBase):
    """The bytes of a document's text: from a table, or by decoding it if the tokenizer loses some."""
    if table := text_bytes(tokenizer):
        return lambda document: int(table(document).sum())
    return lambda document: len(
        str(tokenizer.decode(document.tolist(), skip_special_tokens=True)).encode()
    )


def write_megatron(token_set: str | Path, directory: str | Path) -> dict[str, tuple[int, int]]:
    """Writes train and validation of a token set as Megatron sets, with its tokenizer and a manifest.

    The shards are compared with the sums in their index as they are read. Documents keep their tokens, their
    order and their ends; the names of their sources are lost.

    Returns: split → (documents, tokens).
    Raises:
        InputError: not a token set, or a damaged one; the directory holds something.
    """
    token_set, directory = Path(token_set).expanduser(), local_output(directory, "output")
    if not is_token_set(token_set):
        raise InputError(
            f"{token_set}: not a token set; prepare one first, then write it as --format megatron"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory}: exists; name another directory, or remove it")
    index = read_index(token_set)
    code = 8 if index["tokenizer"]["vocab_size"] < SMALL else 4
    part = directory.with_name(f".tmp-{directory.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        shutil.copytree(Path(token_set) / "tokenizer", part / "tokenizer")
        for split in SPLITS:
            if index[split]["documents"]:
                _write_split(token_set, index, split, part / split, code)
        write_manifest(part)
        if directory.exists():
            directory.rmdir()
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {split: (index[split]["documents"], index[split]["tokens"]) for split in SPLITS}


def _write_split(token_set: str | Path, index: dict, split: str, prefix: Path, code: int) -> None:
    dtype, lengths = np.dtype(DTYPES[code]), []
    with prefix.with_suffix(".bin").open("wb") as file:
        for entry in shard_entries(token_set, index, split):
            found = sha256()
            for low in range(0, entry.tokens, SHARD):
                tokens = entry.tokens_between(low, min(low + SHARD, entry.tokens))
                found.update(tokens.tobytes())
                file.write(tokens.astype(dtype).tobytes())
            ends = entry.ends(0, entry.documents)
            entry.check_ends(np.concatenate([[0], ends]))
            tokens_file, docs_file = entry.files()
            if found.hexdigest() != tokens_file.sha256:
                raise entry.damaged("tokens", "its SHA-256 is not that of the index")
            if problem := docs_file.damage(sums=True):
                raise InputError(problem)
            lengths.append(np.diff(ends, prepend=0))
    sizes = np.concatenate(lengths)
    places = (np.cumsum(sizes) - sizes) * dtype.itemsize
    head = struct.pack("<9sQBQQ", MAGIC, 1, code, len(sizes), len(sizes) + 1)
    bounds = np.arange(len(sizes) + 1)
    body = b"".join(
        values.astype(kind).tobytes()
        for values, kind in ((sizes, "<i4"), (places, "<i8"), (bounds, "<i8"))
    )
    prefix.with_suffix(".idx").write_bytes(head + body)
