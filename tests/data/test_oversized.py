"""Documents above `data.max_document_bytes`: refused or left out, in little memory."""

import gzip
import itertools
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
import zstandard
from batches import same, through_json
from corpora import FIELDS, read_all, write_jsonl, write_parquet
from pyarrow import ipc, parquet

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data import corpus
from nalanda.data.corpus import DocumentStream
from nalanda.data.documents import Document, FileShard
from nalanda.data.loader import PackedBatches
from nalanda.data.readers import split_lines
from nalanda.data.records import Left, describe_left
from nalanda.data.sources import open_corpus

pytestmark = pytest.mark.usefixtures("small_groups", "no_thread_left")


PEAK = """
import re, sys, types
package = types.ModuleType("nalanda"); package.__path__ = [sys.argv[1]]
sys.modules["nalanda"] = package
from pathlib import Path
from nalanda.data.documents import Fields, FileShard
from nalanda.common.errors import InputError

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1000

before = peak()
for path in map(Path, sys.argv[2:]):
    for skip in (False, True):
        given = FileShard(path, path.name, Fields("text", "", skip=skip)).read(None)
        try:
            document, row = [next(given) for _ in range(100 if path.name[0] == "s" else 1)][-1]
            print(row, getattr(document, "text", document))
        except InputError as error:
            print(error)
print(peak() - before)
"""


@pytest.mark.slow
def test_a_bomb_takes_little_memory(tmp_path):
    """A quarter of a gigabyte of lines in one zstandard frame, and as one line of each kind of shard."""
    size, text = 1 << 28, b'{"text": "abcd"}\n'
    (tmp_path / "short.jsonl.zst").write_bytes(zstandard.compress(text * (size // len(text))))
    (tmp_path / "one.jsonl.zst").write_bytes(zstandard.compress(bytes(size)))
    (tmp_path / "one.jsonl.gz").write_bytes(gzip.compress(bytes(size // 32)) * 32)
    (tmp_path / "one.jsonl").touch()
    os.truncate(tmp_path / "one.jsonl", size)
    files = [str(path) for path in sorted(tmp_path.iterdir(), key=lambda path: path.name)]
    package = str(Path(corpus.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PEAK, package, *files], capture_output=True, text=True
    )
    *said, grown = done.stdout.splitlines()
    assert done.stderr == ""
    for i, kind in enumerate((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        assert f"one{kind}, line 1: a document of more than 67,108,864 bytes" in said[2 * i]
        assert said[2 * i + 1] == "1 Left.OVERSIZED"
    assert said[6:] == ["100 abcd"] * 2
    assert float(grown) < 160  # MB; at most a line of 64 MB and a block are held


@pytest.mark.parametrize("limit", [1, 5, 40, 1000])
def test_lines_are_split_alike_wherever_blocks_end(limit):
    rng = random.Random(limit)
    for _ in range(200):
        content = bytes(rng.choices(b"ab\n", weights=(5, 5, 1 + limit % 3), k=rng.randint(0, 90)))
        places = sorted(rng.choices(range(len(content) + 1), k=rng.randint(0, 8)))
        blocks = [content[a:b] for a, b in itertools.pairwise([0, *places, len(content)])]
        expected = content.split(b"\n")
        expected = expected if expected[-1] else expected[:-1]
        found = list(split_lines(iter(blocks), FIELDS._replace(max_bytes=limit, skip=True)))
        kept = [line if len(line) <= limit else Left.OVERSIZED for line in expected]
        assert found == [(line, len(text)) for line, text in zip(kept, expected, strict=True)]
        refused = list(split_lines(iter(blocks), FIELDS._replace(max_bytes=limit)))
        first = next((i for i, line in enumerate(expected) if len(line) > limit), len(expected))
        assert [line for line, _ in refused[:first]] == expected[:first]
        assert all(line is Left.OVERSIZED for line, _ in refused[first : first + 1])


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt"])
def test_a_document_above_the_limit_is_refused_or_left_out(tmp_path, suffix):
    texts = [f"{i} " + "x" * (3000 if i in (4, 9) else 20) for i in range(12)]
    folder = tmp_path / "in"
    folder.mkdir()
    if suffix == ".txt":
        for i, text in enumerate(texts):
            (folder / f"{i:02}.txt").write_text(text)
    else:
        path = folder / f"a{suffix}"
        _ = write_parquet(path, texts) if suffix == ".parquet" else write_jsonl(path, texts)
    where = "04.txt: " if suffix == ".txt" else f"a{suffix}, (line|row) 5: "
    config = DataConfig(source=str(folder), validation_share=1e-9, max_document_bytes=1000)
    with pytest.raises(
        InputError, match=where + r"a document of .* data\.max_document_bytes is 1,000; raise"
    ):
        list(open_corpus(config, "train").once(1))
    assert read_all(folder, max_document_bytes=4000) == sorted(texts)
    config.oversized = "skip"
    stream = DocumentStream(open_corpus(config, "train"), seed=1, buffer_size=0, epochs=2)
    assert sorted(stream.texts()) == sorted(2 * [text for text in texts if len(text) < 1000])
    assert stream.left.total() == stream.state_dict()["skipped"] == 4


def test_what_was_left_out_is_counted_over_a_resume(tmp_path, bpe_of_bytes):
    texts = ["x" * (500 if i % 7 == 3 else 30) for i in range(50)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    config = DataConfig(
        source=str(source),
        validation_share=1e-9,
        seq_len=16,
        max_document_bytes=200,
        oversized="skip",
    )

    def new() -> PackedBatches:
        return PackedBatches(config, bpe_of_bytes, batch_size=2, epochs=2)

    batches = new()
    states = [(batch, through_json(batches.state_dict())) for batch in batches]
    assert batches.skipped() == {"skipped": 14}
    resumed = new()
    resumed.load_state_dict(states[20][1])
    assert all(same(a, b) for a, (b, _) in zip(resumed, states[21:], strict=True))
    assert resumed.skipped() == {"skipped": 14}
    config.max_document_bytes, config.oversized = 1000, "refuse"
    whole = new()
    assert len(list(whole)) > len(states)
    assert not whole.skipped()
    assert "skipped" not in {**whole.state_dict(), **whole.state_dict()["documents"]}


def test_a_value_that_many_rows_share_is_held_once(tmp_path):
    """600 rows of 1 MB in a parquet file of a few kilobytes, and one row among them that is small."""
    values = pyarrow.array(["x" * (1 << 20), "small"])
    rows = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 600 + [1], pyarrow.int32()), values
    )
    path = tmp_path / "a.parquet"
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}
    parquet.write_table(pyarrow.table({"text": rows}), path, **options)
    fields = FIELDS._replace(max_bytes=1 << 19, skip=True)
    before = pyarrow.total_allocated_bytes()
    found = []
    for document, _ in FileShard(path, path.name, fields).read(None):
        found.append(document)
        assert pyarrow.total_allocated_bytes() - before < 32 << 20
    assert found == [Left.OVERSIZED] * 600 + [Document("small")]


def test_a_value_that_rows_of_an_arrow_file_share_is_taken_out_row_by_row(tmp_path):
    """256 rows of 256 kB in a file of little more than one of them."""
    values = pyarrow.array(["x" * (1 << 18)])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 256, pyarrow.int32()), values)
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": rows})
    with ipc.new_file(str(path), table.schema) as out:
        out.write_table(table)

    tracemalloc.start()
    try:
        given = sum(1 for _ in FileShard(path, path.name, FIELDS).read(None))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert given == 256
    assert peak < 16 << 20


def test_a_window_that_takes_gigabytes_is_refused(tmp_path):
    settings = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressor.compress(b'{"text": "a"}\n') + compressor.flush())
    with pytest.raises(InputError, match=r"a\.jsonl\.zst, line 1: .* a window above 128 MiB"):
        read_all(path)
    for limit in (1 << 28, 1 << 33):  # the second is above what the library takes
        assert read_all(path, max_document_bytes=limit) == ["a"]


def test_json_that_is_nested_without_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + "[" * 200_000 + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: not JSON"):
        read_all(path)


def test_one_document_that_is_left_out_is_singular():
    left = {Left.UNUSABLE.value: 0, Left.OVERSIZED.value: 1}
    assert describe_left(left) == "1 document above data.max_document_bytes was left out"
    left[Left.UNUSABLE.value] = 1
    assert describe_left(left).startswith("1 document without usable text, 1 above ")
    assert describe_left(left).endswith(" were left out")
