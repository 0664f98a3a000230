"""Prints what a token set holds, checks its files, and shows progress over bytes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from nalanda.common.errors import InputError
from nalanda.common.progress import Progress
from nalanda.common.text import size
from nalanda.data.records import describe_left
from nalanda.data.stored_sets import local_set
from nalanda.data.token_set import SPLITS, Entry, StatedFile, TokenSet, read_index, shard_entries
from nalanda.data.tokenizer import describe_tokenizer, load_tokenizer
from nalanda.data.workers import processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ByteProgress(Progress):
    """Progress over the bytes of input, which shards read in any order."""

    def __init__(self, what: str, weights: list[int], todo: Sequence[int]):
        total = sum(weights)
        super().__init__(
            what, total or 1, "%", start=total - sum(weights[number] for number in todo)
        )
        self.read: dict[int, tuple[int, int]] = {}
        self.text = 0
        """Bytes of text read."""

    def set(self, number: int, weight: int, text: int) -> None:
        """Shard `number` has read `weight` bytes of input and `text` bytes of text."""
        before = self.read.get(number, (0, 0))
        if (weight, text) == before:
            return
        self.read[number] = weight, text
        self.text += text - before[1]
        speed = self.text / 1e6 / max(time.monotonic() - self.pace.begun, 1e-3)
        self.advance(weight - before[0], f"{self.text / 1e6:,.0f} MB of text, {speed:.1f} MB/s")


def print_megatron(written: dict[str, tuple[int, int]], directory: str | os.PathLike) -> None:
    """Prints the totals that `write_megatron` returned."""
    for split, (documents, tokens) in written.items():
        line = f"{directory}/{split}: {documents:,} document{'s' * (documents != 1)}, {tokens:,} tokens"
        print(line if documents else f"no {split}")


def print_token_set(index: dict, directory: str | os.PathLike) -> None:
    """Prints the totals of a set, and its sources with their shares."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    def table(first: str, columns: tuple[str, ...], rows: list[list[str]]) -> None:
        printed = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in (first, *columns):
            printed.add_column(name, justify="left" if name == first else "right", no_wrap=True)
        for row in rows:
            printed.add_row(*map(escape, row))
        console.print(printed)

    console = Console(emoji=False)
    if left := describe_left(index):
        print(left)

    rows = [_split_row(split, index[split]) for split in SPLITS if index[split]["documents"]]
    table("split", ("documents", "tokens", "tokens/byte", "text", "on disk"), rows)
    if index["sources"] != [""]:
        rows = [_source_row(name, index) for name in index["sources"]]
        table("source", ("documents", "tokens", "share", "validation"), rows)

    tokenizer, settings = index["tokenizer"], index["settings"]
    shards = len(index["train"]["shards"])
    ends = " … ".join(name for name in ("bos", "eos") if settings[name]) or "no bos, no eos"
    print(
        f"{directory}: {shards:,} shard{'s' * (shards != 1)} of {index['dtype']}, tokenizer "
        f"{tokenizer['fingerprint'][:8]} of {tokenizer['vocab_size']:,} tokens, {ends}"
    )


def _split_row(split: str, entry: dict) -> list[str]:
    stored = 0
    for shard in entry["shards"]:
        stored += sum(size_and_sum[0] for size_and_sum in shard["files"].values())
    return [
        split,
        f"{entry['documents']:,}",
        f"{entry['tokens']:,}",
        f"{entry['tokens'] / max(1, entry['text_bytes']):.3f}",
        size(entry["text_bytes"]),
        size(stored),
    ]


def _source_row(name: str, index: dict) -> list[str]:
    documents, tokens = index["train"]["sources"].get(name, (0, 0))
    _, held_out = index["validation"]["sources"].get(name, (0, 0))
    return [
        name or "(not named)",
        f"{documents:,}",
        f"{tokens:,}",
        f"{tokens / index['train']['tokens']:.1%}",
        f"{held_out:,}",
    ]


def check_set(directory: str | os.PathLike, *, sums: bool = False) -> None:
    """Compares the files of a set with its index: their sizes, and with `sums` their contents.

    Raises:
        InputError: names the first damaged file; the others are printed.
    """
    directory = Path(directory).expanduser()
    index = read_index(directory)
    entries = [entry for split in SPLITS for entry in shard_entries(directory, index, split)]
    owned = [(entry, file) for entry in entries for file in entry.files()]
    sizes = [file.size for _, file in owned]

    def damage(owned_file: tuple[Entry, StatedFile]) -> str | None:
        entry, file = owned_file
        problem = file.damage(sums=sums)
        if problem or not sums:
            return problem
        try:
            # Bytes with the right sum may still hold ids or ends that do not fit the index.
            entry.check(file.path.suffix[1:])
        except (InputError, OSError) as error:
            return str(error)
        return None

    with (
        # Threads: reading and hashing release the interpreter's lock.
        ThreadPoolExecutor(processors()) as pool,
        ByteProgress("checking", sizes, range(len(sizes))) as progress,
    ):
        problems = []
        for number, problem in enumerate(pool.map(damage, owned)):
            progress.set(number, sizes[number], sizes[number])
            if problem:
                problems.append(problem)

    if sums:
        try:
            _open_tokenizer(directory, index)
        except InputError as error:
            problems.append(str(error))

    for problem in problems[1:]:
        print(problem)
    if problems:
        more = f" (and {len(problems) - 1} more, above)" if problems[1:] else ""
        raise InputError(problems[0] + more)


def _open_tokenizer(directory: Path, index: dict) -> PreTrainedTokenizerBase:
    """The tokenizer of a set. Raises `InputError` if it is not the one that the index names."""
    # An absolute path is no id of the hub.
    folder = (directory / "tokenizer").absolute()
    with contextlib.suppress(Exception):  # the libraries share no base class
        tokenizer = load_tokenizer(folder)
        if describe_tokenizer(tokenizer) == index["tokenizer"]:
            return tokenizer
    raise InputError(f"{folder}: not the tokenizer that the index names; copy it again")


def inspect(directory: str | os.PathLike, *, verify: bool = False, samples: int = 0) -> None:
    """Prints what a set holds, checks it (`check_set`) and prints the beginning of `samples` documents."""
    name, directory = directory, local_set(directory)
    index = read_index(directory)
    print_token_set(index, name)
    check_set(directory, sums=verify)
    files = sum(len(shard["files"]) for split in SPLITS for shard in index[split]["shards"])
    print(f"{files} files have {'the SHA-256 sums' if verify else 'the sizes'} of the index")
    if not samples:
        return
    train, tokenizer = TokenSet(directory, "train"), _open_tokenizer(directory, index)
    # Spread evenly over the set; of few documents each comes once.
    for number in dict.fromkeys(i * train.documents // samples for i in range(samples)):
        tokens, source = train.document(number)
        named = f" of {source}" if source else ""
        print(
            f"\ndocument {number:,}{named}, {len(tokens):,} tokens: {' '.join(map(str, tokens[:16]))} …"
        )
        print(f"{tokenizer.decode(tokens[:100].tolist())}{' …' * (len(tokens) > 100)}")
