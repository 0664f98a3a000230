"""Shards: each is read whole and from any row, and a damaged one is named with its line."""

import gzip
import itertools
import json
import random
from pathlib import Path

import pyarrow
import pytest
import zstandard
from batches import through_json
from corpora import FIELDS, ragged_texts, read_all, write_jsonl, write_parquet
from pyarrow import parquet

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data.corpus import DocumentStream
from nalanda.data.documents import Document, Fields, FileShard
from nalanda.data.loader import PackedBatches
from nalanda.data.sources import open_corpus

pytestmark = pytest.mark.usefixtures("small_groups", "no_thread_left")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_shards_are_read_whole_and_from_any_row(tmp_path, suffix):
    texts = ragged_texts(40)
    path = tmp_path / f"a{suffix}"
    _ = write_parquet(path, texts) if suffix == ".parquet" else write_jsonl(path, texts)
    assert read_all(path) == sorted(texts)
    shard = FileShard(path, path.name, FIELDS)
    for cursor in (0, 1, 13, 14, 39, 40):
        rest = list(shard.read(cursor))
        assert [document.text for document, _ in rest] == texts[cursor:]
        assert [row for _, row in rest] == list(range(cursor + 1, 41))


SOURCES = ["Wikipedia", "Github", "", "Book", "Wikipedia", "", "ArXiv"]


def write_with_sources(path: Path, how: str, texts: list[str]) -> Path:
    """`meta.redpajama_set_name` names the source; where SOURCES is blank, the field is missing."""
    sources = itertools.cycle(SOURCES)
    records = [
        {
            "text": text,
            **({"meta": {"redpajama_set_name": name}} if (name := next(sources)) else {}),
        }
        for text in texts
    ]
    if how == "parquet":
        kind = pyarrow.struct([("redpajama_set_name", pyarrow.string()), ("n", pyarrow.int64())])
        table = pyarrow.table(
            {"text": texts, "meta": pyarrow.array([record.get("meta") for record in records], kind)}
        )
        parquet.write_table(table, path, row_group_size=3)
        return path
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(zstandard.compress(content) if how == "jsonl.zst" else content)
    return path


@pytest.mark.parametrize("how", ["jsonl", "jsonl.zst", "parquet"])
def test_a_document_knows_its_source(tmp_path, how):
    texts = ragged_texts(20)
    path = write_with_sources(tmp_path / f"a.{how}", how, texts)
    expected = list(map(Document, texts, itertools.cycle(SOURCES)))
    assert [document for document, _ in FileShard(path, path.name, FIELDS).read(None)] == expected
    other = FileShard(path, path.name, Fields("text", "set"))
    assert [document for document, _ in other.read(15)] == [Document(text) for text in texts[15:]]

    config = DataConfig(source=str(path), validation_share=1e-9)
    stream = DocumentStream(open_corpus(config, "train"), seed=2, buffer_size=6, epochs=1)
    whole = list(stream)
    assert sorted(whole) == sorted(expected)
    start = {"epoch": 0, "shard": 0, "cursor": None, "digest": "", "documents": 0, "buffer": []}
    stream.load_state_dict(start)
    begun = list(itertools.islice(stream, 5))
    state = through_json(stream.state_dict())
    assert len(state["buffer"]) == 6
    resumed = DocumentStream(open_corpus(config, "train"), seed=2, buffer_size=6, epochs=1)
    resumed.load_state_dict(state)
    assert begun + list(resumed) == whole != expected
    assert all(isinstance(document, Document) for document in whole)


def test_lines_longer_than_a_chunk(tmp_path):
    texts = ["x" * 700_000, "y" * 3, "".join(map(chr, range(0x4E00, 0x9000))) * 20]
    assert read_all(write_jsonl(tmp_path / "a.jsonl.zst", texts)) == sorted(texts)


def test_text_files_globs_and_hidden_files(tmp_path):
    for name in ("b.txt", "sub/a.txt", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"the text of {name}\nin two lines")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "notes.md").write_text("not data")
    both = [f"the text of {name}\nin two lines" for name in ("b.txt", "sub/a.txt")]
    assert read_all(tmp_path) == both
    assert read_all(f"{tmp_path}/**/a*.txt") == both[1:]
    assert read_all(tmp_path / "b.txt") == both[:1]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        for i in range(len(content) // 3, len(content) * 2 // 3, 10):
            content[i] ^= 0xFF
    path.write_bytes(content[: len(content) * 2 // 3] if how == "truncated" else content)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_shard_is_named_with_its_line(tmp_path, bpe_of_bytes, suffix, how):
    path = tmp_path / f"shard{suffix}"
    texts = [f"{i} " + "".join(random.Random(i).choices("abcdefgh ", k=400)) for i in range(50)]
    _ = write_parquet(path, texts) if suffix == ".parquet" else write_jsonl(path, texts)
    damage(path, how)
    if how == "empty":
        path.write_bytes(b"")
    config = DataConfig(source=str(path), seq_len=64, validation_share=1e-9)
    with pytest.raises(InputError, match=rf"shard{suffix}, (line|row) \d+: ") as caught:
        list(PackedBatches(config, bpe_of_bytes, batch_size=1, epochs=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
)
def test_a_shard_cut_between_two_lines_is_not_taken_for_a_short_one(tmp_path, suffix, compress):
    path = tmp_path / f"a.jsonl{suffix}"
    whole = [compress(json.dumps({"text": text}).encode() + b"\n") for text in ("one", "two")]
    path.write_bytes(b"".join(whole)[:-1])
    with pytest.raises(InputError, match=rf"a\.jsonl\{suffix}, line \d: corrupt or truncated"):
        read_all(path)


def test_the_line_of_a_broken_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": "cut\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 3: not JSON"):
        read_all(path)
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 2"):
        read_all(path)
    path.write_text('{"text": "fine"}\n{"text": null}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: field 'text' is not text"):
        read_all(path)
    path.write_text('{"text": "fine"}\n["text"]\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: not an object"):
        read_all(path)
    (tmp_path / "b.txt").write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(InputError, match=r"b\.txt, line 2: not UTF-8"):
        read_all(tmp_path / "b.txt")


def test_a_missing_field_is_named_with_those_that_exist(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one"], field="content")
    with pytest.raises(
        InputError, match=r"a\.jsonl, line 1: no field 'text' \(there are: content, meta\)"
    ):
        read_all(path)
    assert read_all(path, text_field="content") == ["one"]
    table = write_parquet(tmp_path / "b.parquet", ["one"])
    with pytest.raises(
        InputError, match=r"b\.parquet, row 1: no field 'body' \(there are: text, n\)"
    ):
        read_all(table, text_field="body")


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert read_all(path) == ["a?b"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "data.source is missing"),
        ("{tmp}/nowhere", "does not exist; .* HuggingFaceFW/fineweb-edu"),
        ("nowhere.jsonl", "does not exist"),
        ("{tmp}/*.jsonl", "no documents for train"),
        ("{tmp}/notes.md", "no reader for this suffix"),
        ("{tmp}", "no documents for train"),
        ("{tmp}/mixed", ".txt files lie beside shards"),
        ("{tmp}/blank", "the corpus is empty"),
    ],
)
def test_sources_that_cannot_work(tmp_path, bpe_of_bytes, source, message):
    (tmp_path / "notes.md").write_text("not data")
    for name in ("mixed", "blank"):
        write_jsonl(tmp_path / name / "a.jsonl", ["", " \n"])
    (tmp_path / "mixed" / "a.txt").write_text("text")
    chosen = source.format(tmp=tmp_path) if source != "{tmp}" else str(tmp_path / "void")
    (tmp_path / "void").mkdir()
    with pytest.raises(InputError, match=message):
        next(PackedBatches(DataConfig(source=chosen, seq_len=8), bpe_of_bytes, batch_size=1))


@pytest.mark.parametrize(
    "settings",
    [
        {"seq_len": 0},
        {"seq_len": 1},
        {"validation_share": 0.0},
        {"shuffle_buffer": -1},
        {"max_validation_rows": 0},
    ],
)
def test_settings_that_cannot_work(bpe_of_bytes, settings):
    with pytest.raises(InputError, match=f"data.{next(iter(settings))}: expected "):
        PackedBatches(DataConfig(source="python", **settings), bpe_of_bytes, batch_size=1)
