"""Rows of a token set are read by their bytes: few of a cold disk, and a shard that shrinks kills no run."""

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nalanda.common.errors import InputError
from nalanda.data import token_set
from nalanda.data.token_set import FORMAT, VERSION, TokenSet, totals

LENGTHS = {
    "equal": lambda draw, count: np.full(count, 37),
    "by chance": lambda draw, count: draw.integers(1, 200, count),
    "sorted by source": lambda draw, count: (
        np.sort(draw.lognormal(3, 2, count).astype(np.int64)) + 1
    ),
    "one is long": lambda draw, count: np.where(np.arange(count) == count // 3, 90_000, 2),
    "of one token": lambda draw, count: np.ones(count, np.int64),
    "one document": lambda draw, count: np.array([5000]),
}


def write_set(folder: Path, shards: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A set of documents of these lengths. Returns its tokens and where its documents begin."""
    (folder / "train").mkdir(parents=True)
    (folder / "validation").mkdir()
    draw, entries, rows = np.random.default_rng(len(shards)), [], []
    for number, lengths in enumerate(shards):
        ends, name = np.cumsum(lengths), f"{number:05d}"
        rows.append(draw.integers(0, 1000, ends[-1]))
        (folder / "train" / f"{name}.tokens").write_bytes(rows[-1].astype("<u2").tobytes())
        sources = np.zeros(len(ends), "<u2")
        (folder / "train" / f"{name}.docs").write_bytes(
            ends.astype("<i8").tobytes() + sources.tobytes()
        )
        counts = [len(ends), int(ends[-1])]
        entries.append(
            {
                "name": name,
                "documents": counts[0],
                "tokens": counts[1],
                "text_bytes": 0,
                "sources": {"": counts},
                "files": {"tokens": [2 * counts[1], ""], "docs": [10 * counts[0], ""]},
            }
        )
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": "uint16",
        "settings": {},
        "tokenizer": {"fingerprint": "", "vocab_size": 1000, "bos": 0, "eos": 0},
        "sources": [""],
        "train": totals(entries),
        "validation": totals([]),
    }
    (folder / "index.json").write_text(json.dumps(index))
    starts = np.cumsum([0, *np.concatenate(shards)])[:-1]
    return np.concatenate(rows), starts


@pytest.mark.parametrize("kind", LENGTHS)
def test_rows_and_documents_are_those_of_the_whole_columns(tmp_path, kind):
    """The search for a row's documents guesses; every guess must end at the same documents."""
    draw = np.random.default_rng(3)
    tokens, starts = write_set(
        tmp_path, [LENGTHS[kind](draw, count) for count in (3000, 1, 512, 513)]
    )
    found = TokenSet(tmp_path, "train")
    places = np.sort(draw.integers(0, found.tokens + 1, (300, 2)))
    edges = [(start, start + 1) for start in draw.choice(starts, min(200, len(starts)))]
    near = [(max(0, low - 1), min(found.tokens, low + 70)) for low, _ in edges]
    for low, high in [*places.tolist(), *edges, *near, (0, found.tokens), (5, 5)]:
        np.testing.assert_array_equal(found.read(low, high), tokens[low:high])
        np.testing.assert_array_equal(
            found.starts(low, high), starts[(starts >= low) & (starts < high)]
        )
    ends = [*starts[1:], found.tokens]
    for number in [0, found.documents - 1, *draw.integers(0, found.documents, 100).tolist()]:
        np.testing.assert_array_equal(
            found.document(number)[0], tokens[starts[number] : ends[number]]
        )


@pytest.mark.parametrize("kind", ["tokens", "docs"])
def test_a_shard_that_becomes_shorter_is_bad_input_until_it_is_put_back(tmp_path, kind):
    tokens, starts = write_set(tmp_path, [np.full(4000, 9), np.full(4000, 9)])
    found, file = TokenSet(tmp_path, "train"), tmp_path / "train" / f"00001.{kind}"
    found.read(0, found.tokens)
    found.starts(0, found.tokens)
    content = file.read_bytes()
    os.truncate(file, 3000)
    with pytest.raises(
        InputError, match=rf"00001\.{kind}: .*ends before byte .*copy or prepare"
    ) as error:
        found.read(found.tokens - 9, found.tokens) if kind == "tokens" else found.starts(
            70_000, found.tokens
        )
    assert "\n" not in str(error.value)
    found.read(0, 36_000)  # the other shard
    whole = file.with_suffix(".whole")
    whole.write_bytes(content)
    whole.rename(file)  # as rsync does it
    np.testing.assert_array_equal(found.read(0, found.tokens), tokens)
    np.testing.assert_array_equal(found.starts(0, found.tokens), starts)


def test_a_disk_that_fails_is_one_line_with_the_name_of_the_file(tmp_path, monkeypatch):
    write_set(tmp_path, [np.full(40, 9)])

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(InputError, match=r"00000\.tokens: cannot be read \(.*Input/output error"):
        TokenSet(tmp_path, "train").read(0, 9)


def test_files_are_opened_once_shared_by_threads_and_closed(tmp_path, monkeypatch):
    """A reader keeps its file open while others make the cache drop it: no number is read in another."""
    tokens, _ = write_set(tmp_path, [np.full(300, 9)] * 6)
    found = TokenSet(tmp_path, "train")
    monkeypatch.setattr(
        token_set, "_open", functools.lru_cache(maxsize=2)(token_set._open.__wrapped__)
    )
    rows = np.random.default_rng(0).integers(0, found.tokens - 64, 2000).tolist()

    def read(low: int) -> bool:
        return np.array_equal(found.read(low, low + 64), tokens[low : low + 64])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, rows))
    assert token_set._open.cache_info().currsize == 2
    assert len(still_open(tmp_path)) == 2 * Path("/proc/self/fd").is_dir()
    token_set._open.cache_clear()
    assert not still_open(tmp_path)


def still_open(folder: Path) -> list[str]:
    """The files below `folder` that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(descriptor))
    return [file for file in found if file.startswith(f"{folder}/")]


@pytest.mark.parametrize(("allowed", "opened"), [(1024, 100), (64, 16), (4, 2), (-1, 100)])
def test_files_stay_below_a_quarter_of_what_the_process_may_open(monkeypatch, allowed, opened):
    monkeypatch.setattr(token_set.resource, "getrlimit", lambda which: (allowed, allowed))
    assert token_set._most_open() == opened


def test_a_set_is_pickled_and_read_by_forked_processes(tmp_path):
    tokens, _ = write_set(tmp_path, [np.full(300, 9)] * 2)
    found = TokenSet(tmp_path, "train")
    found.read(0, 100)  # its files are open now
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(found)).read(90, 4000), tokens[90:4000])
    if "fork" in multiprocessing.get_all_start_methods():
        with multiprocessing.get_context("fork").Pool(2) as pool:
            parts = pool.starmap(found.read, [(low, low + 50) for low in range(0, 5000, 50)])
        np.testing.assert_array_equal(np.concatenate(parts), tokens[:5000])


def read_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count")
def test_a_row_costs_a_cold_disk_few_pages(tmp_path):
    """At most 16 KiB for a row of 4 KiB, with the documents that begin in it."""
    write_set(tmp_path, [np.random.default_rng(1).integers(1, 1000, 20_000)] * 2)
    found, rows = TokenSet(tmp_path, "train"), 100
    places = np.random.default_rng(0).integers(0, found.tokens - 2048, rows).tolist()
    os.sync()

    def forget() -> None:
        token_set._open.cache_clear()
        for file in (tmp_path / "train").iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    forget()
    before = read_from_disk()
    (tmp_path / "train" / "00000.tokens").read_bytes()
    if read_from_disk() - before < 4096:
        pytest.skip("this file system does not count what it reads")
    forget()
    before = read_from_disk()
    for low in places:
        found.read(low, low + 2048)
        found.starts(low, low + 2048)
    assert (read_from_disk() - before) / rows <= 16 * 1024
