"""The tasks of Long Range Arena (arXiv 2011.04006) as arrays: generated, from local files, or small.

A row is token ids `[T]`, or `[2, T]` for a pair of texts, as bytes: 0 is padding, behind the rest. Texts are
their bytes, pixels their grey values from 1 to 255. `prepare` writes a task's rows to a file, once.
"""

import dataclasses
import functools
import io
import json
import platform
import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, isqrt, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nalanda.common.errors import InputError
from nalanda.common.files import sha256_of
from nalanda.data.documents import hash_text
from nalanda.data.python_docs import python_documents
from nalanda_lab.synthetic import LISTOPS_TOKENS, ListOps

ARENA_SPLITS = ("train", "validation", "test")
Arrays = dict[str, np.ndarray]
"""SPLIT_ids, uint8 `[n, T]` or `[n, 2, T]`, and SPLIT_labels, int64 `[n]`, of each split."""


@dataclass(frozen=True)
class ArenaTask:
    """length: most tokens of a text or picture. rows: of train, validation and test; None: all of the files.

    columns: those of the files, the inputs before the label; empty for a task that is generated.
    """

    name: str
    length: int
    classes: int
    rows: tuple[int, int, int] | None = None
    columns: tuple[str, ...] = ()
    vocab_size: int = 256


ARENA = {
    task.name: task
    for task in (
        ArenaTask("listops", 2000, 10, (96_000, 2000, 2000), vocab_size=len(LISTOPS_TOKENS)),
        ArenaTask("text", 4096, 2, columns=("text", "label")),
        ArenaTask("retrieval", 4000, 2, columns=("text1", "text2", "label")),
        ArenaTask("image", 1024, 10, columns=("img", "label")),
        ArenaTask("pathfinder", 1024, 2, (160_000, 20_000, 20_000)),
    )
}
QUICK_ARENA = {
    task.name: task
    for task in (
        ArenaTask("listops", 32, 10, (6000, 200, 800), vocab_size=len(LISTOPS_TOKENS)),
        ArenaTask("text", 96, 4, (6000, 200, 800)),
        ArenaTask("retrieval", 64, 2, (6000, 200, 800)),
        ArenaTask("image", 64, 10, (1200, 200, 397)),
        ArenaTask("pathfinder", 256, 2, (6000, 200, 800)),
    )
}
MODULES = ("reference", "asyncio", "email", "multiprocessing")
"""Documents of the running Python's library that are the classes of the quick texts."""


def prepare(task: ArenaTask, data: Path | None, folder: Path) -> Path:
    """The file of the task's rows in `folder`, which is made if it is missing. data: the folder of all files.

    Raises InputError for files that are missing or have other columns.
    """
    parts = files(task, data) if task.columns else {}
    source = {file.name: sha256_of(file) for paths in parts.values() for file in paths}
    if not parts and task.name in ("text", "retrieval"):
        source = {"python": platform.python_version()}  # whose documents they are made of
    identity = json.dumps([dataclasses.asdict(task), source], sort_keys=True)
    target = folder / f"{task.name}-{hash_text(identity) % 16**8:08x}.npz"
    if not target.is_file():
        arrays = read(task, parts) if parts else generated(task)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".part.npz")
        np.savez(unfinished, **arrays)  # pyrefly: ignore[bad-argument-type]
        unfinished.replace(target)
    return target


def stacked(rows: Iterable[bytes], length: int) -> np.ndarray:
    """Rows of at most `length` bytes, padded: uint8 `[n, T]`."""
    cut = [row[:length].ljust(length, b"\0") for row in rows]
    return np.frombuffer(b"".join(cut), dtype=np.uint8).reshape(-1, length)


def text_bytes(text: str) -> bytes:
    """The bytes of a text. Zero stands for padding, so zero bytes become blanks."""
    return text.encode().replace(b"\0", b" ") or b" "


# ------------------------------ local files


def files(task: ArenaTask, data: Path | None) -> dict[str, list[Path]]:
    """The task's files by split, `DATA/TASK/SPLIT*.jsonl` or `.parquet`; validation may have none."""
    if data is None:
        raise InputError(
            f"{task.name}: its files are local; name their folder with --data (docs/lra.md)"
        )
    kinds = (".jsonl", ".parquet")
    parts = {
        split: sorted(f for f in (data / task.name).glob(f"{split}*") if f.suffix in kinds)
        for split in ARENA_SPLITS
    }
    for split in ("train", "test"):
        if not parts[split]:
            raise InputError(
                f"{data / task.name}: no {split}*.jsonl or {split}*.parquet (docs/lra.md)"
            )
    return parts


def read(task: ArenaTask, parts: dict[str, list[Path]]) -> Arrays:
    """The rows of files. Without files of validation every tenth row of training is held out for it."""
    arrays: Arrays = {}
    for split, paths in parts.items():
        if paths:
            arrays |= split_arrays(split, *columns(task, paths))
    if not parts["validation"]:
        held_out = np.arange(len(arrays["train_labels"])) % 10 == 0
        for kind in ("ids", "labels"):
            rows = arrays[f"train_{kind}"]
            arrays |= {f"train_{kind}": rows[~held_out], f"validation_{kind}": rows[held_out]}
    return arrays


def columns(task: ArenaTask, paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """ids and labels of the files' rows."""
    import pyarrow.json
    import pyarrow.parquet

    options = pyarrow.json.ReadOptions(block_size=2**27)  # a line must fit into a block
    inputs, labels = [[] for _ in task.columns[1:]], []
    for path in paths:
        try:
            if path.suffix == ".parquet":
                table = pyarrow.parquet.read_table(path)
            else:
                table = pyarrow.json.read_json(path, read_options=options)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        if missing := [name for name in task.columns if name not in table.column_names]:
            raise InputError(
                f"{path}: no column {missing[0]!r}; it has {', '.join(table.column_names)}"
            )
        for column, name in zip(inputs, task.columns[:-1], strict=True):
            tokens = [*map(grey if name == "img" else text_bytes, table[name].to_pylist())]
            if name == "img" and {len(row) for row in tokens} != {task.length}:
                raise InputError(
                    f"{path}: a picture has other than {task.length} pixels; give 32 × 32"
                )
            column.append(stacked(tokens, task.length))
        labels += table["label"].to_pylist()
        for label in labels:
            if not isinstance(label, int) or not 0 <= label < task.classes:
                raise InputError(
                    f"{path}: label {label!r}: must be an integer from 0 to {task.classes - 1}"
                )
    ids = [np.concatenate(column) for column in inputs]
    return ids[0] if len(ids) == 1 else np.stack(ids, 1), np.array(labels)


def grey(image: dict[str, Any]) -> bytes:
    """The grey pixels of a picture as datasets has it, {bytes: an encoded image}; black is 1."""
    from PIL import Image

    return np.maximum(np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("L")), 1).tobytes()


# ------------------------------ generated, and from packages


def generated(task: ArenaTask) -> Arrays:
    """The rows of a task that needs no files."""
    if task.name == "image":
        return digits(task)
    makers = {"listops": listops, "text": texts, "retrieval": text_pairs, "pathfinder": pathfinder}
    assert task.rows is not None
    arrays: Arrays = {}
    for split, n in zip(ARENA_SPLITS, task.rows, strict=True):
        arrays |= split_arrays(split, *makers[task.name](task, split, n))
    return arrays


def split_arrays(split: str, ids: np.ndarray, labels: np.ndarray) -> Arrays:
    return {f"{split}_ids": ids, f"{split}_labels": labels}


def listops(task: ArenaTask, split: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Expressions of length/4 to length tokens: 500 to 2000 as published."""
    band = (task.length // 4, task.length)
    draw = torch.Generator().manual_seed(ARENA_SPLITS.index(split))
    ids, values = ListOps(bands=(band,)).batch(draw, n, split, band)
    # The padding, which is the last token there, becomes 0.
    ids = ((ids + 1) % len(LISTOPS_TOKENS)).to(torch.uint8)
    return ids.numpy(), values.amax(1).numpy()


def digits(task: ArenaTask) -> Arrays:
    """scikit-learn's 8 × 8 digits."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    ids = np.maximum(np.asarray(pixels) * 15.9, 1).astype(np.uint8)
    order, arrays = np.random.default_rng(0).permutation(len(ids)), {}
    assert task.rows is not None
    for split, part in zip(ARENA_SPLITS, np.split(order, np.cumsum(task.rows))[:3], strict=True):
        arrays |= split_arrays(split, ids[part], np.asarray(labels, dtype=np.int64)[part])
    return arrays


def split_documents(split: str) -> list[tuple[int, str]]:
    """(class, text) of the split's documents: a fifth each for validation and test."""
    split_of = {0: "test", 1: "validation"}
    documents = []
    for name, text in python_documents(only=MODULES).items():
        if split_of.get(hash_text(name) % 5, "train") == split:
            documents.append((MODULES.index(name.split("/")[0]), text))
    return documents


def passage(draw: random.Random, text: str, length: int) -> bytes:
    """`length` characters of a text from a random place on."""
    start = draw.randrange(max(1, len(text) - length))
    return text_bytes(text[start : start + length])


def texts(task: ArenaTask, split: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Passages of Python's documents; the class is the module."""
    draw = random.Random(f"text {split}")
    labels = np.arange(n) % task.classes
    of_class: list[list[str]] = [[] for _ in MODULES]
    for kind, text in split_documents(split):
        of_class[kind].append(text)

    rows = []
    for label in labels:
        choices = of_class[label]
        (text,) = draw.choices(choices, [*map(len, choices)])
        rows.append(passage(draw, text, task.length))
    return stacked(rows, task.length), labels


def text_pairs(task: ArenaTask, split: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of passages; the class is 1 if both are from one document."""
    draw = random.Random(f"retrieval {split}")
    labels = np.arange(n) % 2
    long = [text for _, text in split_documents(split) if len(text) > 2 * task.length]
    rows = []
    for label in labels:
        one, other = draw.sample(long, 2)
        rows += [passage(draw, text, task.length) for text in (one, one if label else other)]
    return stacked(rows, task.length).reshape(n, 2, -1), labels


DASH, CIRCLE = 160, 255
"""Grey values of Pathfinder's pictures on a background of 1."""


def pathfinder(task: ArenaTask, split: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of two long dashed paths, shorter ones and two circles; the class is 1 if a path joins these.

    At 32 × 32 the published sizes: dashes of 2 pixels and gaps of 1, 14 dashes in a long path, and up to 5
    distractors of 4, as many as find room; at other sizes in proportion to the area. Circles are at both ends
    of one long path, or at one end of each. At least two blank pixels are between paths, one between dashes.
    Pictures are not antialiased.
    """
    side, draw = isqrt(task.length), random.Random(f"pathfinder {split}")
    rows = [picture(draw, side, bool(i % 2)) for i in range(n)]
    return np.stack(rows), np.arange(n) % 2


def picture(draw: random.Random, side: int, joined: bool) -> np.ndarray:
    """Grey values `[side²]`."""
    long, others = 14 * side**2 // 1024, 5 * side**2 // 1024  # dashes, distractors
    while True:
        first = walk(draw, side, long, 0)
        # The second path has circles too: they need more room than its dashes.
        near = around(side, first, 3) | around(side, first[:1] + first[-1:], 4)
        second = walk(draw, side, long, near)
        if first and second and not around(side, first[:1], 3) >> first[-1] & 1:  # circles apart
            break

    paths = [first, second]
    taken = room(side, first) | room(side, second)
    for _ in range(others):
        paths.append(walk(draw, side, max(1, long // 3), taken))
        taken |= room(side, paths[-1])

    image = np.ones((side, side), dtype=np.uint8)
    for path in paths:
        for i, pixel in enumerate(path):
            if i % 3 < 2:  # two pixels of a dash, then a gap
                image.flat[pixel] = DASH
    for end in (first[0], first[-1] if joined else second[draw.choice((0, -1))]):
        y, x = divmod(end, side)
        image[y - 1 : y + 2, x - 1 : x + 2] = CIRCLE
    return image.reshape(-1)


def walk(draw: random.Random, side: int, dashes: int, taken: int, tries: int = 40) -> list[int]:
    """The pixels of a path of dashes and gaps that turns by at most 1 radian a dash; [] if none has room.

    Pixels are numbered row by row, and sets of them are the bits of an integer, here and below.
    """
    for _ in range(tries):
        y, x, angle = draw.uniform(1, side - 2), draw.uniform(1, side - 2), draw.uniform(0, 2 * pi)
        path: list[int] = []
        full = taken
        while len(path) < 3 * dashes:
            for turn in (draw.uniform(-1, 1) for _ in range(8)):
                down, right = sin(angle + turn), cos(angle + turn)
                dash = [(round(y + i * down), round(x + i * right)) for i in range(3)]
                if all(
                    0 < a < side - 1 and 0 < b < side - 1 and not full >> a * side + b & 1
                    for a, b in dash
                ):
                    break
            else:
                break
            # The dash before the last: a path may not meet itself.
            full |= around(side, path[-3:], 2)
            path += [a * side + b for a, b in dash]
            angle, y, x = angle + turn, y + 3 * down, x + 3 * right
        else:
            return path[:-1]
    return []


def room(side: int, path: list[int]) -> int:
    """The pixels that other paths may not use: those near the path, and near circles at its ends."""
    return around(side, path, 2) | around(side, path[:1] + path[-1:], 3)


def around(side: int, path: list[int], reach: int) -> int:
    """The pixels at most `reach` rows and columns from those of a path."""
    return functools.reduce(int.__or__, (neighbours(side, pixel, reach) for pixel in path), 0)


@functools.cache
def neighbours(side: int, pixel: int, reach: int) -> int:
    """`around` of a single pixel."""
    y, x = divmod(pixel, side)
    rows = range(max(0, y - reach), min(side, y + reach + 1))
    columns = range(max(0, x - reach), min(side, x + reach + 1))
    return sum(1 << a * side + b for a in rows for b in columns)
