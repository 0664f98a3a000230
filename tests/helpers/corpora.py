"""Texts to read and to prepare, and what tests do to a prepared set."""

import gzip
import hashlib
import itertools
import json
import os
import random
import signal
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import numpy as np
import pyarrow
import zstandard
from pyarrow import parquet

from nalanda.config.schema import DataConfig
from nalanda.data.documents import Fields, hash_text
from nalanda.data.hold_out import HoldOut
from nalanda.data.sources import open_corpus

FIELDS = Fields("text", "meta.redpajama_set_name")
NAMES = ["RedPajamaWikipedia", "RedPajamaC4", "RedPajamaBook"]


def records(count: int, first: int = 0) -> list[dict]:
    return [
        {
            "text": f"document {i}, größer: " + "wörd " * (i * 7 % 40),
            "meta": {"redpajama_set_name": NAMES[i % len(NAMES)]},
        }
        for i in range(first, first + count)
    ]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def corpus(folder: Path, files: int = 6, rows: int = 50) -> Path:
    """.jsonl and .jsonl.gz, with a blank document and a blank line."""
    folder.mkdir(parents=True)
    for i in range(files):
        content = lines([*records(rows, i * rows), {"text": " \n"}]) + b"\n"
        name, content = (
            (f"{i}.jsonl.gz", gzip.compress(content)) if i % 2 else (f"{i}.jsonl", content)
        )
        (folder / name).write_bytes(content)
    return folder


def sums(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def killed(place: int, work: Callable) -> None:
    """Runs `work` in a process that is killed before its `place`-th rename."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        return
    left = itertools.count(place, -1)

    def deadly(self: Path, target: Path, move: Callable) -> Path:
        if next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return move(self, target)

    try:
        for name in ("rename", "replace"):
            setattr(Path, name, partialmethod(deadly, move=getattr(Path, name)))
        work()
    finally:
        os._exit(1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def bytes_of(tokens: np.ndarray) -> str:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    of = {chr(b): b for b in plain}
    of |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in plain)}
    return bytes(of[alphabet[t - 1]] for t in tokens[1:-1]).decode()


def held_out(text: str, share: float) -> bool:
    """Whether a document is for validation. The text alone decides, so all its copies are in one split."""
    return HoldOut(share).holds(hash_text(text))


# ------------------------------ texts to read


def ragged_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct texts of 5 to 90 bytes, some of them several rows long."""
    rng = random.Random(seed)
    lengths = [rng.choice([5, 6, 7, 8, 12, 30, 90]) for _ in range(count)]
    return [
        f"{i:04d}" + "".join(rng.choices("abc é漢", k=length - 4))
        for i, length in enumerate(lengths)
    ]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(
        json.dumps({field: text, "meta": {"n": i}}) + "\n" for i, text in enumerate(texts)
    ).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":  # two frames, as concatenated files and parallel compressors have
        half = len(content) // 2
        content = b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))
    path.write_bytes(content)
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    table = pyarrow.table({"text": texts, "n": list(range(len(texts)))})
    parquet.write_table(table, path, row_group_size=7)
    return path


def read_all(source, split: str = "train", **settings) -> list[str]:
    config = DataConfig(source=str(source), validation_share=1e-9, **settings)
    return sorted(open_corpus(config, split).once().texts())


def texts_of(opened) -> list[str]:
    return list(opened.once().texts())
