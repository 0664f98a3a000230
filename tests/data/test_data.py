"""Documents → tokens → rows → batches: nothing is lost or repeated, also after interruptions."""

import copy
import gc
import gzip
import io
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
import zstandard
from corpora import held_out
from covering import covering
from pyarrow import parquet

from nalanda.common.errors import InputError
from nalanda.config.schema import Component, DataConfig, TokenizerConfig
from nalanda.data import corpus, documents, packing, readers
from nalanda.data import loader as data
from nalanda.data.corpus import DocumentStream, open_corpora, open_corpus
from nalanda.data.documents import (
    Document,
    Fields,
    FileShard,
    Left,
    hash_text,
    not_blank,
    split_lines,
)
from nalanda.data.hold_out import NONE, PIECE, cut_text
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.packing import StreamRows
from nalanda.data.prepare import begin, prepare
from nalanda.data.python_docs import (
    PASSAGE,
    _find_passages,
    python_documents,
    split_families,
    without_copies,
)
from nalanda.data.readers import read_blocks
from nalanda.data.tokenizer import build_tokenizer, check_vocabulary

FIELDS = Fields("text", "meta.redpajama_set_name")


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
    return sorted(
        DocumentStream(open_corpus(config, split), seed=0, buffer_size=0, epochs=1).texts()
    )


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """A BPE without merges: each token is a byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text("some text")
    config = DataConfig(source=str(folder / "a.txt"), validation_share=1e-9)
    return build_tokenizer(
        TokenizerConfig(train="bpe", vocab_size=257), config, folder / "tokenizer"
    )


@pytest.fixture
def shards(tmp_path) -> DataConfig:
    """Three shards of ragged documents, a small shuffle buffer."""
    texts = ragged_texts(60)
    for i, part in enumerate((texts[:17], texts[17:20], texts[20:])):
        write_jsonl(tmp_path / "shards" / f"{i}.jsonl", part)
    return DataConfig(
        source=str(tmp_path / "shards"), validation_share=1e-9, seq_len=16, shuffle_buffer=7
    )


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Makes a few kilobytes cross many groups."""
    monkeypatch.setattr(packing, "STREAM_GROUP", 100)
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 200)


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    if reading_threads():
        gc.collect()
    assert not reading_threads()


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nalanda-data"]


def same(batch: dict, other: dict) -> bool:
    return batch.keys() == other.keys() and all(
        torch.equal(batch[key], other[key]) for key in batch
    )


# ------------------------------ packing


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_the_documents_in_order_with_their_boundaries(tmp_path, byte_tokenizer, seed):
    rng = random.Random(seed)
    texts = ragged_texts(rng.randint(1, 60), seed)
    bos, eos = bool(seed & 1), bool(seed & 2)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    config = DataConfig(
        source=str(source),
        validation_source=str(source),
        seq_len=rng.randint(2, 40),
        bos=bos,
        eos=eos,
    )
    batches = PackedBatches(
        config, byte_tokenizer, split="validation", batch_size=rng.randint(1, 5)
    )
    ids = byte_tokenizer(texts, add_special_tokens=False)["input_ids"]
    documents = [[0] * bos + tokens + [0] * eos for tokens in ids]
    assert any(len(d) > config.seq_len for d in documents)

    tokens, starts, unlabelled = [], [], []
    for batch in batches:
        size = batch["input_ids"].shape
        assert (
            size
            == (batches.batch_size, config.seq_len)
            == batch["labels"].shape
            == batch["position_ids"].shape
        )
        assert {batch[key].dtype for key in ("input_ids", "labels", "position_ids")} == {
            torch.int64
        }
        assert batch["cu_seqlens"].dtype == torch.int32
        bounds = batch["cu_seqlens"].tolist()
        assert bounds == sorted(set(bounds))
        assert set(range(0, size.numel() + 1, config.seq_len)) <= set(bounds)
        assert torch.equal(
            (batch["position_ids"].view(-1) == 0).nonzero()[:, 0], batch["cu_seqlens"][:-1].long()
        )
        assert batch["position_ids"].view(-1).diff().le(1).all()
        labels, inputs = batch["labels"].view(-1), batch["input_ids"].view(-1)
        unlabelled += [len(tokens) + place for place in (labels == -100).nonzero()[:, 0].tolist()]
        assert torch.equal(labels[labels != -100], inputs[labels != -100])
        starts += [len(tokens) + bound for bound in bounds[:-1]]
        tokens += inputs.tolist()
    total = sum(map(len, documents))
    assert tokens[:total] == list(itertools.chain(*documents))
    expected = set(itertools.accumulate(map(len, documents), initial=0)) | set(
        range(0, total, config.seq_len)
    )
    assert {start for start in starts if start <= total} == expected
    assert unlabelled == sorted(
        {start for start in starts if start < total} | set(range(total, len(tokens)))
    )


def test_single_leftover_token_is_a_segment_without_label(tmp_path, byte_tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", ["abcdefgh"])  # with eos: 9 tokens in rows of 4
    config = DataConfig(source=str(source), validation_source=str(source), seq_len=4, bos=False)
    (batch,) = PackedBatches(config, byte_tokenizer, split="validation", batch_size=3)
    assert batch["cu_seqlens"].tolist() == [0, 4, 8, 9, 12]
    assert (batch["labels"][2] == -100).all()
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2]]


def test_every_document_once_an_epoch_in_a_new_order(byte_tokenizer, shards):
    stream = DocumentStream(open_corpus(shards, "train"), seed=3, buffer_size=7, epochs=2)
    texts = list(stream.texts())
    first, second = texts[:60], texts[60:]
    assert sorted(first) == sorted(second) == sorted(ragged_texts(60))
    assert first != second
    assert first != sorted(first)
    again = DocumentStream(open_corpus(shards, "train"), seed=3, buffer_size=7, epochs=2)
    other = DocumentStream(open_corpus(shards, "train"), seed=4, buffer_size=7, epochs=2)
    assert list(again.texts()) == texts
    assert list(other.texts()) != texts


def test_every_token_once_an_epoch(byte_tokenizer, shards):
    batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=1, epochs=2)
    counted = sum(
        (np.bincount(b["input_ids"].view(-1), minlength=257) for b in batches), np.zeros(257, int)
    )
    ids = byte_tokenizer(ragged_texts(60), add_special_tokens=False)["input_ids"]
    expected = 2 * np.bincount([*itertools.chain(*ids), *[0] * 120], minlength=257)
    missing = expected - counted
    assert missing.min() >= 0
    assert missing.sum() == expected.sum() % 16  # training drops only what fills no row


def test_rows_of_a_long_document_do_not_fill_a_batch(tmp_path, byte_tokenizer, monkeypatch):
    """Four files of fifty rows each; in order, most batches of four rows would come from one file."""
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 1 << 20)
    for letter in "abcd":
        (tmp_path / f"{letter}.txt").write_text(letter * 800)
    config = DataConfig(
        source=str(tmp_path), validation_share=1e-9, seq_len=16, bos=False, eos=False
    )

    def batches(seed: int) -> list[list[int]]:
        packed = PackedBatches(
            config, byte_tokenizer, split="train", batch_size=4, seed=seed, epochs=1
        )
        return [batch["input_ids"][:, 0].tolist() for batch in packed]

    seen = batches(0)
    assert sorted(Counter(itertools.chain(*seen)).values()) == [50] * 4
    assert sum(len(set(batch)) > 1 for batch in seen) > 0.8 * len(seen)
    assert batches(0) == seen != batches(1)


def test_training_has_no_padding_and_no_end(byte_tokenizer, shards):
    batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=8)
    rows = sum(len(text.encode()) + 2 for text in ragged_texts(60)) // 16
    for batch in itertools.islice(batches, 3 * rows // 8 + 2):
        bounds = batch["cu_seqlens"].long()
        assert (batch["labels"] == -100).sum() == len(bounds) - 1
    batches.close()


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_sees_the_same_rows(byte_tokenizer, shards, split, world_size):
    shards.validation_source = shards.source
    batch_size = 8 // world_size
    alone = list(PackedBatches(shards, byte_tokenizer, split=split, batch_size=8, epochs=2))
    ranks = [
        list(
            PackedBatches(
                shards,
                byte_tokenizer,
                split=split,
                batch_size=batch_size,
                epochs=2,
                rank=r,
                world_size=world_size,
            )
        )
        for r in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for step, batch in enumerate(alone):
        for rank in range(world_size):
            for key in ("input_ids", "labels", "position_ids"):
                assert torch.equal(batch[key][rank::world_size], ranks[rank][step][key])


def test_validation_is_one_pass_that_can_be_repeated(byte_tokenizer, shards):
    shards.validation_source = shards.source
    batches = PackedBatches(shards, byte_tokenizer, split="validation", batch_size=4, seed=1)
    once, twice = list(batches), list(batches)
    assert len(once) == len(twice) > 1
    assert all(map(same, once, twice))
    shards.max_validation_rows = 6
    limited = list(PackedBatches(shards, byte_tokenizer, split="validation", batch_size=4, seed=2))
    assert len(limited) == 2
    assert same(limited[0], once[0])
    assert torch.equal(limited[1]["labels"][:2], once[1]["labels"][:2])
    assert (limited[1]["labels"][2:] == -100).all()


def test_a_special_token_written_in_a_text_stays_text(tmp_path, byte_tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", ["a<|endoftext|>b"])
    config = DataConfig(source=str(source), validation_source=str(source), seq_len=17)
    (batch,) = PackedBatches(config, byte_tokenizer, split="validation", batch_size=1)
    assert batch["input_ids"].eq(0).sum() == 2  # bos and eos


# ------------------------------ one text in rows

LINES = [
    "",
    " = Title = \n",
    "",
    *(f" the {i} word of line {i} , <unk> .\n" for i in range(40)),
    "",
]


@pytest.fixture
def lines(tmp_path) -> DataConfig:
    """Three shards of the lines of one text, as the Hub has WikiText: blank lines are empty."""
    for i, part in enumerate((LINES[:13], LINES[13:30], LINES[30:])):
        for split in ("train", "validation"):
            write_jsonl(tmp_path / "lines" / split / f"{i}.jsonl", part)
    return DataConfig(source=str(tmp_path / "lines"), documents="joined", bos=False, seq_len=16)


@pytest.fixture
def word_tokenizer(tmp_path, lines):
    return build_tokenizer(TokenizerConfig(train="words"), lines, tmp_path / "words")


@pytest.mark.parametrize("seq_len", [2, 16])  # the last row is full, or not
def test_joined_rows_predict_every_token_of_the_text_once(lines, word_tokenizer, seq_len):
    lines.seq_len = seq_len
    text = [word for line in LINES for word in (*line.split(), "</s>")]
    targets, contexts = [], []
    batches = list(PackedBatches(lines, word_tokenizer, split="validation", batch_size=1))
    assert len(batches) == -(-len(text) // (seq_len - 1))
    for batch in batches:
        ids, labels, positions = (batch[key][0] for key in ("input_ids", "labels", "position_ids"))
        kept = labels[1:] != -100  # a model shifts: the first token of a row is no target
        assert kept.all() or batch is batches[-1]
        assert positions.diff()[kept].eq(1).all()  # a row is one segment
        targets += labels[1:][kept].tolist()
        contexts += ids[:-1][kept].tolist()
    assert word_tokenizer.convert_ids_to_tokens(targets) == text
    assert word_tokenizer.convert_ids_to_tokens(contexts) == ["</s>", *text[:-1]]


def test_joined_rows_of_training_are_the_same_text_in_another_order(lines, word_tokenizer):
    lines.seq_len = 6  # five targets a row
    text = [word for line in LINES for word in (*line.split(), "</s>")]
    batches = PackedBatches(lines, word_tokenizer, split="train", batch_size=1, epochs=2, seed=5)
    rows = [
        " ".join(word_tokenizer.convert_ids_to_tokens(batch["labels"][0, 1:].tolist()))
        for batch in batches
    ]
    both = text * 2
    expected = [" ".join(both[i : i + 5]) for i in range(0, len(both) - 4, 5)]
    assert sorted(rows) == sorted(expected)
    assert rows != expected
    assert all(len(batch["cu_seqlens"]) == 2 for batch in batches)  # a row is one segment


@pytest.mark.parametrize("split", ["train", "validation"])
def test_joined_rows_resume_at_every_batch(lines, word_tokenizer, split):
    batches = PackedBatches(lines, word_tokenizer, split=split, batch_size=2, epochs=2)
    states = [(batch, through_json(batches.state_dict())) for batch in batches]
    assert len(states) > 10
    for step, (_, state) in enumerate(states):
        resumed = PackedBatches(lines, word_tokenizer, split=split, batch_size=2, epochs=2)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) == len(states) - step - 1
        assert all(same(a, b) for a, (b, _) in zip(rest, states[step + 1 :], strict=True))


def test_a_joined_file_holds_out_its_last_share(tmp_path):
    text = "".join(f"line {i} of the text\n" + "\n" * (i % 7 == 0) for i in range(3000))
    (tmp_path / "book.txt").write_text(text)
    data = DataConfig(source=str(tmp_path / "book.txt"), documents="joined", bos=False)
    (train,), (validation,) = (texts_of(corpus) for corpus in open_corpora(data).values())
    assert train + validation == text
    assert 0.02 <= len(validation) / len(text) <= 0.04
    assert train.endswith("\n\n")
    assert (
        open_corpus(data, "train").note
        == "book.txt: one text, its last 2 % are held out for validation"
    )
    assert texts_of(open_corpus(data, "train", validation=False)) == [text]


def test_joined_documents_refuse_bos_and_held_out_shares(shards):
    shards.documents = "joined"
    with pytest.raises(InputError, match=r"set data\.bos=false"):
        shards.check()
    shards.bos = False
    with pytest.raises(InputError, match=r"no validation part.*give data\.validation_source"):
        open_corpus(shards, "train")
    shards.documents = "apar"
    with pytest.raises(
        InputError, match=r"data\.documents: expected one of apart, joined; got 'apar'"
    ):
        shards.check()


# ------------------------------ resume


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))


def through_torch(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@covering(strength=1, shuffle_buffer=(0, 7, 1000), trip=(through_json, through_torch))
def test_resume_at_every_batch_is_the_uninterrupted_run(
    byte_tokenizer, shards, shuffle_buffer, trip
):
    shards.shuffle_buffer = shuffle_buffer

    def new(**kwargs):
        return PackedBatches(
            shards, byte_tokenizer, split="train", batch_size=5, seed=9, epochs=2, **kwargs
        )

    batches, states = new(), []
    whole = []
    for batch in batches:
        whole.append(batch)
        states.append(trip(batches.state_dict()))
    assert len(whole) > 20
    for step, state in enumerate(states):
        resumed = new()
        resumed.load_state_dict(state)
        rest = list(resumed) if step % 5 == 0 else list(itertools.islice(resumed, 1))
        resumed.close()
        expected = whole[step + 1 :] if step % 5 == 0 else whole[step + 1 : step + 2]
        assert len(rest) == len(expected)
        assert all(map(same, rest, expected))


def test_resume_of_a_resumed_run_and_of_the_same_object(byte_tokenizer, shards):
    batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=3)
    start = batches.state_dict()
    whole = list(itertools.islice(batches, 30))
    batches.load_state_dict(start)
    seen = []
    while len(seen) < 30:
        seen += itertools.islice(batches, 4)
        state = batches.state_dict()
        batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=3)
        batches.load_state_dict(state)
    assert all(map(same, whole, seen))


def test_resume_on_another_number_of_ranks(byte_tokenizer, shards):
    one = PackedBatches(shards, byte_tokenizer, split="train", batch_size=4, epochs=1)
    two = PackedBatches(
        shards, byte_tokenizer, split="train", batch_size=2, epochs=1, rank=1, world_size=2
    )
    steps = [next(one) for _ in range(5)]
    two.load_state_dict(one.state_dict())
    rest, half = list(one), list(two)
    assert len(steps) == 5
    assert len(rest) == len(half) > 5
    assert all(torch.equal(a["labels"][1::2], b["labels"]) for a, b in zip(rest, half, strict=True))


@pytest.mark.parametrize("max_rows", [30, 1000])
def test_resume_in_the_middle_of_validation(byte_tokenizer, shards, max_rows):
    shards.validation_source = shards.source
    shards.max_validation_rows = max_rows
    batches = PackedBatches(shards, byte_tokenizer, split="validation", batch_size=4)
    states = [(batch, batches.state_dict()) for batch in batches]
    for step, (_, state) in enumerate(states):
        batches.load_state_dict(state)
        rest = list(batches)
        assert len(rest) == len(states) - step - 1
        assert all(same(a, b) for a, (b, _) in zip(rest, states[step + 1 :], strict=True))


def test_restoring_reads_no_earlier_shard(byte_tokenizer, shards, monkeypatch):
    batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=2, epochs=1)
    for _ in batches:
        state = batches.state_dict()
        if state["documents"]["shard"] == 2:
            break
    batches.close()
    opened = []
    monkeypatch.setattr(
        readers,
        "read_blocks",
        lambda path, *rest, of=read_blocks: (opened.append(path.name), of(path, *rest))[1],
    )
    batches.load_state_dict(state)
    list(batches)
    assert len(opened) == 1


@pytest.mark.parametrize("change", ["seq_len", "seed", "eos", "documents", "corpus", "tokenizer"])
def test_a_state_of_other_data_is_refused(byte_tokenizer, shards, change):
    shards.bos = change != "documents"
    batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=2)
    next(batches)
    state = batches.state_dict()
    batches.close()
    if change == "seq_len":
        shards.seq_len = 8
    if change == "eos":
        shards.eos = False
    if change == "documents":
        shards.documents, shards.validation_source = "joined", shards.source
    if change == "corpus":
        write_jsonl(Path(shards.source) / "9.jsonl", ["more"])
    if change == "tokenizer":
        byte_tokenizer = copy.deepcopy(byte_tokenizer)
        byte_tokenizer.add_tokens(["abc"])
    other = PackedBatches(
        shards, byte_tokenizer, split="train", batch_size=2, seed=change == "seed"
    )
    with pytest.raises(InputError, match=f"changed since the checkpoint was saved: {change} was"):
        other.load_state_dict(state)


# ------------------------------ readers


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
    stream.load_state_dict({"epoch": 0, "shard": 0, "cursor": None, "documents": 0, "buffer": []})
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
def test_a_damaged_shard_is_named_with_its_line(tmp_path, byte_tokenizer, suffix, how):
    path = tmp_path / f"shard{suffix}"
    texts = [f"{i} " + "".join(random.Random(i).choices("abcdefgh ", k=400)) for i in range(50)]
    _ = write_parquet(path, texts) if suffix == ".parquet" else write_jsonl(path, texts)
    damage(path, how)
    if how == "empty":
        path.write_bytes(b"")
    config = DataConfig(source=str(path), seq_len=64, validation_share=1e-9)
    with pytest.raises(InputError, match=rf"shard{suffix}, (line|row) \d+: ") as caught:
        list(PackedBatches(config, byte_tokenizer, split="train", batch_size=1, epochs=1))
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
def test_sources_that_cannot_work(tmp_path, byte_tokenizer, source, message):
    (tmp_path / "notes.md").write_text("not data")
    for name in ("mixed", "blank"):
        write_jsonl(tmp_path / name / "a.jsonl", ["", " \n"])
    (tmp_path / "mixed" / "a.txt").write_text("text")
    chosen = source.format(tmp=tmp_path) if source != "{tmp}" else str(tmp_path / "void")
    (tmp_path / "void").mkdir()
    with pytest.raises(InputError, match=message):
        next(
            PackedBatches(
                DataConfig(source=chosen, seq_len=8), byte_tokenizer, split="train", batch_size=1
            )
        )


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
def test_settings_that_cannot_work(byte_tokenizer, settings):
    with pytest.raises(InputError, match=f"data.{next(iter(settings))}: expected "):
        PackedBatches(
            DataConfig(source="python", **settings), byte_tokenizer, split="train", batch_size=1
        )


# ------------------------------ oversized documents

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
            print(row, document and document.text)
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
        assert found == [(line if len(line) <= limit else None, len(line)) for line in expected]
        refused = list(split_lines(iter(blocks), FIELDS._replace(max_bytes=limit)))
        first = next((i for i, line in enumerate(expected) if len(line) > limit), len(expected))
        assert [line for line, _ in refused[:first]] == expected[:first]
        assert all(line is None for line, _ in refused[first : first + 1])


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
        list(DocumentStream(open_corpus(config, "train"), seed=1, buffer_size=0, epochs=1))
    assert read_all(folder, max_document_bytes=4000) == sorted(texts)
    config.oversized = "skip"
    stream = DocumentStream(open_corpus(config, "train"), seed=1, buffer_size=0, epochs=2)
    assert sorted(stream.texts()) == sorted(2 * [text for text in texts if len(text) < 1000])
    assert stream.skipped == stream.state_dict()["skipped"] == 4


def test_what_was_left_out_is_counted_over_a_resume(tmp_path, byte_tokenizer):
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
        return PackedBatches(config, byte_tokenizer, split="train", batch_size=2, epochs=2)

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


def test_a_window_that_takes_gigabytes_is_refused(tmp_path):
    settings = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compressor.compress(b'{"text": "a"}\n') + compressor.flush())
    with pytest.raises(InputError, match=r"a\.jsonl\.zst, line 1: .* a window above 128 MiB"):
        read_all(path)
    assert read_all(path, max_document_bytes=1 << 28) == ["a"]


def test_json_that_is_nested_without_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + "[" * 200_000 + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: not JSON"):
        read_all(path)


# ------------------------------ content hashes


@pytest.mark.parametrize("limit", ["LARGE", "AT_ONCE"])
def test_large_files_are_hashed_by_samples(tmp_path, monkeypatch, limit):
    """Head and tail are sampled. A file counts as large by its own size, or if all files together are."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 3_000_000)

    def known() -> str:
        return open_corpus(DataConfig(source=str(path)), "train").content(0)

    def seen(place: int) -> bool:
        before = known()
        with path.open("rb+") as file:
            file.seek(place)
            file.write(b"y")
        return known() != before

    assert seen(1_490_000)  # small enough to be read whole
    monkeypatch.setattr(corpus, limit, 1000)
    assert [seen(place) for place in (0, 1_500_000, 2_999_999)] == [True, False, True]


# ------------------------------ splits


def test_slimpajamas_layout(tmp_path):
    texts = ragged_texts(40)
    write_jsonl(tmp_path / "train/chunk1/example_train_0.jsonl.zst", texts[:10])
    write_jsonl(tmp_path / "train/chunk2/example_train_1.jsonl.zst", texts[10:20])
    write_jsonl(tmp_path / "validation/chunk1/example_validation_0.jsonl.zst", texts[20:30])
    write_jsonl(tmp_path / "test/chunk1/example_test_0.jsonl.zst", texts[30:])
    assert read_all(tmp_path) == texts[:20]
    assert read_all(tmp_path, "validation") == texts[20:30]


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "validation.jsonl", "test.jsonl"),
        ("training/a.jsonl", "val/a.jsonl", "eval/a.jsonl"),
        ("en/train/test.jsonl", "en/valid/train.jsonl", "en/test/a.jsonl"),
        ("data/train-00000-of-00001.parquet", "data/dev-0.parquet", "data/test-0.parquet"),
        ("a.jsonl", "Validation_0.JSONL", "test.00001.jsonl.gz"),
    ],
)
def test_a_split_is_told_by_a_folder_or_a_files_name(tmp_path, names):
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (write_parquet if name.endswith("parquet") else write_jsonl)(
            tmp_path / name, [f"{i} a", f"{i} b"]
        )
    assert [read_all(tmp_path, split) for split in ("train", "validation")] == [
        ["0 a", "0 b"],
        ["1 a", "1 b"],
    ]


def test_what_is_left_out_is_said(tmp_path, byte_tokenizer):
    names = (
        "train/a.jsonl",
        "train/b.JSONL",
        "train/train-1/c.jsonl",
        "val/a.jsonl",
        "test/a.jsonl",
    )
    for name in (*names, "more/a.jsonl", "val/a.json", "README"):
        write_jsonl(tmp_path / name, ["some text"])

    def said(**settings) -> list[str]:
        config = DataConfig(source=str(tmp_path), seq_len=8, **settings)
        return PackedBatches(config, byte_tokenizer, split="train", batch_size=1).describe_files()

    files, rest = f"{tmp_path}: 3 files for training", "1 of a test split, 1 of no split"
    assert said() == [
        f"{files}, 1 for validation; left out: 1 without suffix, 1 that end in .json, {rest}"
    ]
    (tmp_path / "val/a.json").unlink()
    (tmp_path / "README").unlink()
    assert said(validation_source="python") == [
        f"{files}; left out: {rest}, 1 of a validation split"
    ]


def texts_of(corpus) -> list[str]:
    return list(DocumentStream(corpus, seed=0, buffer_size=0, epochs=1).texts())


@pytest.mark.parametrize(
    "text",
    [
        "\n\n".join("a sentence of a paragraph. " * (1 + i % 40) for i in range(400)) + "\n \n\n",
        "".join(f"line {i}\r\n" for i in range(9000)),
        "word " * 9000,
        "x" * 30_001,
        "short",
    ],
)
def test_a_lone_text_is_cut_without_loss(text):
    pieces = list(cut_text(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE
    assert min(map(len, pieces[:-1]), default=PIECE) >= PIECE // 2
    ends = [piece[-1] for piece in pieces[:-1]]
    assert set(ends) <= ({"x"} if text[0] == "x" else {"\n", " "})
    if "\n\n" in text:
        assert all(piece.endswith("\n\n") for piece in pieces[:-1])


@pytest.mark.parametrize("source", ["book.txt", "folder", "*.txt"])
def test_a_lone_text_is_a_corpus_of_many_documents(tmp_path, byte_tokenizer, source):
    (tmp_path / "folder").mkdir()
    text = "".join(f"chapter {i}\n\n" + f"sentence {i}. " * 400 + "\n\n" for i in range(60))
    for file in (tmp_path / "folder/book.txt", tmp_path / "book.txt"):
        file.write_text(text)
    data = DataConfig(source=str(tmp_path / source), seq_len=64, shuffle_buffer=5, workers=0)
    found = open_corpora(data)
    train, validation = (texts_of(found[split]) for split in ("train", "validation"))
    assert sorted([*train, *validation]) == sorted(cut_text(text))
    assert validation == [piece for piece in cut_text(text) if piece not in train]
    count, held = len(train) + len(validation), len(validation)
    note = f"book.txt: 1 file cut into {count} documents, {held} held out for validation"
    assert found["train"].note.startswith(note)
    assert (
        found["train"].note
        in PackedBatches(data, byte_tokenizer, split="train", batch_size=1).describe_files()
    )
    assert validation_batches(data, byte_tokenizer, batch_size=1)

    stream = DocumentStream(open_corpus(data, "train"), seed=1, buffer_size=5, epochs=2)
    every = []
    for document in stream:
        every.append((document.text, json.loads(json.dumps(stream.state_dict()))))
    assert [text for text, _ in every[: len(train)]] != train
    for place in range(0, len(every), 17):
        again = DocumentStream(open_corpus(data, "train"), seed=1, buffer_size=5, epochs=2)
        again.load_state_dict(every[place][1])
        assert list(again.texts()) == [text for text, _ in every[place + 1 :]]


def splits_of(folder: Path, **settings) -> tuple[list[str], list[str], str]:
    """Texts of both splits, opened together and one by one, and the line about them."""
    data = DataConfig(source=str(folder), **settings)
    found = open_corpora(data)
    train, validation = texts_of(found["train"]), texts_of(found["validation"])
    share = data.validation_share
    assert texts_of(open_corpus(data, "train", validation=True)) == train
    assert share < NONE or texts_of(open_corpus(data, "train")) == train
    assert texts_of(open_corpus(data, "validation")) == validation
    return train, validation, found["train"].note


def test_a_small_corpus_holds_something_out(tmp_path):
    texts = [f"document {i}" for i in range(50)]
    by_hash = sorted(texts, key=hash_text)
    write_jsonl(tmp_path / "a" / "0.jsonl", texts[:20])
    write_jsonl(tmp_path / "a" / "1.jsonl", [*texts[20:], " "])
    train, validation, note = splits_of(tmp_path / "a", validation_share=1e-9)
    assert validation == by_hash[:1]
    assert sorted(train) == sorted(by_hash[1:])
    assert (
        note == "50 documents, 1 held out for validation (none fell under validation_share 1e-09)"
    )

    train, validation, note = splits_of(tmp_path / "a", validation_share=1 - 1e-9)
    assert train == by_hash[-1:]
    assert sorted(validation) == sorted(by_hash[:-1])
    assert "50 documents, 49 held out for validation (all fell under validation_share 1)" in note

    share = (hash_text(by_hash[3]) + (1 << 20)) / 2**64  # enough: nothing is forced
    train, validation, note = splits_of(tmp_path / "a", validation_share=share)
    assert sorted(validation) == sorted(by_hash[:4])
    assert note == "12.6 % of the documents are held out for validation"


def test_without_validation_the_share_alone_decides(tmp_path):
    texts = [f"document {i}" for i in range(10)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    for share, count in ((1e-9, 10), (0.5, sum(not held_out(text, 0.5) for text in texts))):
        data = DataConfig(source=str(tmp_path), validation_share=share)
        assert len(texts_of(open_corpus(data, "train", validation=False))) == count
    one = write_jsonl(tmp_path / "one" / "a.jsonl", ["a single document"])
    data = DataConfig(source=str(one), validation_share=0.99)
    assert texts_of(open_corpus(data, "train", validation=False)) == ["a single document"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize(
    "text", ["one\ntwo\nthree\n", " \n\n some words on one line", "ab", "wörd " * 300]
)
def test_of_a_single_document_the_end_is_held_out(tmp_path, name, text):
    file = tmp_path / name
    file.write_bytes(text.encode()) if name == "a.txt" else write_jsonl(file, [text, " \n", text])
    train, validation, note = splits_of(tmp_path)
    assert len(train) == len(validation) == (1 if name == "a.txt" else 2)
    assert train[0] + validation[0] == text
    assert not_blank(train[0])
    assert not_blank(validation[0])
    assert note.endswith("1 document, its last 2 % are held out for validation")
    if text.startswith("wörd"):
        assert validation[0].startswith("wörd")
        assert 0.02 <= len(validation[0]) / len(text) < 0.25


def test_components_of_a_mixture_hold_something_out(tmp_path, byte_tokenizer):
    write_jsonl(tmp_path / "few" / "a.jsonl", ["first text", "second text", "third text"])
    (tmp_path / "book.txt").write_text("some words of a book\n" * 20)
    parts = [
        Component("few", str(tmp_path / "few"), 1),
        Component("book", str(tmp_path / "book.txt"), 1),
    ]
    data = DataConfig(mixture=parts, seq_len=8, validation_share=1e-5, workers=0)
    batches = PackedBatches(data, byte_tokenizer, split="train", batch_size=1)
    assert batches.describe_files() == [
        "few: 3 documents, 1 held out for validation (none fell under validation_share 1e-05)",
        "book: book.txt: 1 document, its last 0.001 % are held out for validation",
    ]
    assert validation_batches(data, byte_tokenizer, batch_size=1).keys() == {"few", "book"}


def test_an_empty_split_is_named_with_its_numbers(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", " "])
    data = DataConfig(source=str(tmp_path), validation_share=1e-9)
    corpus = open_corpora(data, validation=False)["validation"]
    with pytest.raises(InputError) as error:
        texts_of(corpus)
    assert str(error.value) == (
        "data.source: the corpus is empty for validation: of 3 documents (1 blank) none falls under "
        "data.validation_share 1e-09; change it, or give a data.validation_source"
    )
    write_jsonl(tmp_path / "a.jsonl", [" ", "\n"])
    with pytest.raises(
        InputError, match=r"is empty for train: of 2 documents all are blank; look at data\.source"
    ):
        texts_of(open_corpora(data)["train"])


@pytest.mark.parametrize("parts", [("",), ("train/", "validation/")])
def test_both_splits_take_one_walk(tmp_path, monkeypatch, parts):
    for part in parts:
        write_jsonl(tmp_path / f"{part}a.jsonl", [f"{part}{i}" for i in range(200)])
    walks, walk = [], os.walk
    monkeypatch.setattr(
        os, "walk", lambda *where, **how: walks.append(where) or walk(*where, **how)
    )
    found = open_corpora(DataConfig(source=str(tmp_path)))
    assert len(walks) == 1
    assert (found["train"].shards is found["validation"].shards) == (parts == ("",))


def test_held_out_share_is_disjoint_complete_and_stable(tmp_path):
    texts = ragged_texts(400)
    path = write_jsonl(tmp_path / "a.jsonl", texts + texts[:100])  # copies fall on the same side

    def part(split: str) -> list[str]:
        config = DataConfig(source=str(tmp_path), validation_share=0.2)
        return list(
            DocumentStream(open_corpus(config, split), seed=0, buffer_size=0, epochs=1).texts()
        )

    train, validation = part("train"), part("validation")
    assert len(train) + len(validation) == 500
    assert not set(train) & set(validation)
    assert 50 < len(set(validation)) < 110
    write_jsonl(path, texts[200:])
    assert set(part("validation")) == set(validation) & set(texts[200:])


def test_validation_source(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    own = write_jsonl(tmp_path / "b.jsonl", ["three"])
    config = DataConfig(source=str(train), validation_source=str(own), validation_share=0.99)
    parts = [
        sorted(DocumentStream(open_corpus(config, split), seed=0, buffer_size=0, epochs=1).texts())
        for split in ("train", "validation")
    ]
    assert parts == [["one", "two"], ["three"]]


def test_linked_folders_are_read_once(tmp_path):
    texts = ragged_texts(20)
    write_jsonl(tmp_path / "in" / "v2" / "a.jsonl", texts[:10])
    write_jsonl(tmp_path / "elsewhere" / "b.jsonl", texts[10:])
    write_jsonl(tmp_path / "in" / ".hidden" / "c.jsonl", ["c"])
    for name, target in (
        ("latest", "v2"),
        ("again", "."),
        ("v2/up", ".."),
        ("more", "../elsewhere"),
    ):
        (tmp_path / "in" / name).symlink_to(target)
    assert read_all(tmp_path / "in") == texts


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a" / "x.jsonl", ["x"])
    write_jsonl(tmp_path / "b" / "y.jsonl", ["y"])
    scan = os.scandir

    def denied(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)  # root may read all
    with pytest.raises(InputError, match=r"/b: cannot be read \(Permission denied\)"):
        open_corpus(DataConfig(source=str(tmp_path)), "train")


def test_a_name_that_is_no_utf_8_is_refused(tmp_path):
    write_jsonl(tmp_path / "caf\udce9.jsonl", ["x"])
    with pytest.raises(InputError, match=r"caf.udce9.jsonl': the name is not UTF-8") as caught:
        open_corpus(DataConfig(source=str(tmp_path)), "train")
    str(caught.value).encode()


def test_a_parquet_file_that_is_removed_is_read_to_its_end(tmp_path):
    texts = [str(i) * 200 for i in range(30)]
    path = tmp_path / "a.parquet"
    write_parquet(path, texts)
    found = documents.read_parquet(path, FIELDS._replace(max_bytes=700), 0)
    read = [next(found)[0].text]
    path.unlink()  # as the cache of downloaded shards may
    assert read + [document.text for document, _ in found] == texts


def test_a_cut_validation_says_what_it_covers(tmp_path, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(data, "STREAM_GROUP", 20)
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"val/{name}.jsonl", ["x" * 18] * 10)
    write_jsonl(tmp_path / "train/a.jsonl", ["one"])
    config = DataConfig(source=str(tmp_path), seq_len=10)
    said: list[str] = []

    def read(rows: int) -> list[str]:
        said.clear()
        config.max_validation_rows = rows
        data.validation_batches(config, byte_tokenizer, batch_size=1, say=said.append)
        return said

    cut = "the first 2 documents, of at most 1 of 3 files (data.max_validation_rows: 4)"
    assert read(61) == []
    assert read(4) == [f"validation reads {cut}"]
    prepare(config, TokenizerConfig(path=byte_tokenizer.name_or_path), tmp_path / "set")
    config.source = str(tmp_path / "set")
    assert read(4)[0].startswith("validation reads the first 2 of 30 documents (")
    assert read(61) == []


def test_a_validation_source_that_is_trained_on_is_refused(tmp_path, byte_tokenizer):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    held = write_jsonl(tmp_path / "held.jsonl", ["three"])
    part = Component("a", str(tmp_path), 1, validation_source=str(held))
    for settings in (
        {"source": str(tmp_path), "validation_source": str(held)},
        {"source": str(held), "validation_source": str(held)},
        {"source": f"{tmp_path}/h*.jsonl", "validation_source": str(tmp_path)},
        {"source": str(held), "validation_source": str(held), "documents": "joined", "bos": False},
        {"mixture": [part, Component("b", "python", 1)]},
    ):
        config = DataConfig(seq_len=8, **settings)
        with pytest.raises(
            InputError, match=f"data.validation_source: {held} is a training file too"
        ):
            data.validation_batches(config, byte_tokenizer, batch_size=1)
        if not config.mixture and config.documents == "apart":
            with pytest.raises(
                InputError, match=f"data.validation_source: {held} is a training file too"
            ):
                begin(config, TokenizerConfig(train="bpe", vocab_size=257), tmp_path / "set")


# ------------------------------ the Hub


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_datasets_resume_exactly(tmp_path, byte_tokenizer, monkeypatch, streaming):
    import datasets

    texts = ragged_texts(60)
    files = [
        str(write_jsonl(tmp_path / f"{i}.jsonl", texts[20 * i : 20 * i + 20])) for i in range(3)
    ]
    load = datasets.load_dataset

    def load_dataset(path, name, split, streaming):
        assert (path, name, split) == ("someone/texts", "tiny", "train")
        cache = str(tmp_path / "cache")
        return load(
            "json", data_files={"train": files}, split=split, streaming=streaming, cache_dir=cache
        )

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(
        source="someone/texts",
        name="tiny",
        streaming=streaming,
        seq_len=16,
        shuffle_buffer=5,
        validation_share=0.2,
    )
    parts = [
        list(DocumentStream(open_corpus(config, split), seed=0, buffer_size=3, epochs=1).texts())
        for split in ("train", "validation")
    ]
    assert sorted(parts[0] + parts[1]) == texts
    assert min(map(len, parts)) > 2

    def new():
        return PackedBatches(config, byte_tokenizer, split="train", batch_size=4, epochs=2)

    batches = new()
    whole = [(batch, through_json(batches.state_dict())) for batch in batches]
    for step in range(0, len(whole), 4):
        resumed = new()
        resumed.load_state_dict(whole[step][1])
        rest = list(resumed)
        assert len(rest) == len(whole) - step - 1
        assert all(same(a, b) for a, (b, _) in zip(rest, whole[step + 1 :], strict=True))


def test_a_revision_pins_a_hub_dataset(monkeypatch):
    import datasets

    asked = []
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}]).to_iterable_dataset()

    def split_names(path, name, revision=None):
        asked.append((path, revision))
        return ["train"]

    def load_dataset(path, name, split, streaming, revision=None):
        asked.append((path, revision))
        return rows

    monkeypatch.setattr(datasets, "get_dataset_split_names", split_names)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    part = Component("web", "someone/web", 1.0, revision="87f0914")
    prints = set()
    for revision in (None, "87f0914"):
        pinned = DataConfig(source="someone/web", revision=revision)
        prints.add(open_corpus(pinned, "train").fingerprint)
        assert set(asked) == {("someone/web", revision)}
        asked.clear()
    assert len(prints) == 2  # a run does not resume on another revision
    open_corpus(DataConfig(mixture=[part]).parts()["web"], "train")
    assert set(asked) == {("someone/web", "87f0914")}
    asked.clear()
    # A validation dataset of its own is not at that commit.
    other = DataConfig(source="someone/web", validation_source="someone/held", revision="87f0914")
    open_corpus(other, "validation")
    assert set(asked) == {("someone/held", None)}


def test_a_hub_dataset_that_does_not_exist(byte_tokenizer, monkeypatch):
    import datasets

    def fail(path, name):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'no/such' doesn't exist\nat all")

    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    with pytest.raises(
        InputError, match=r"'no/such' is neither a local path nor a Hub dataset .*doesn't exist\)$"
    ):
        PackedBatches(DataConfig(source="no/such"), byte_tokenizer, split="train", batch_size=1)


# ------------------------------ the running Python

FEW_MODULES = {
    "reference",
    "bisect",
    "_bisect",
    "heapq",
    "_heapq",
    "json",
    "_json",
    "abc",
    "gzip",
    "bz2",
    "_bz2",
    "lzma",
}


@pytest.fixture(scope="module")
def few_documents():
    return without_copies(python_documents(FEW_MODULES))


def test_python_corpus_is_prose_without_tests_and_tables():
    names = python_documents().keys()
    assert {"json/decoder.py", "heapq.py", "itertools (C)", "reference/with"} <= names
    excluded = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "lib2to3"}
    assert not [name for name in names if excluded & set(name.split("/"))]
    assert "stringprep.py" not in names
    assert sum(map(len, python_documents().values())) > 5_000_000


def test_python_corpus_has_no_copies(few_documents):
    documents = python_documents(FEW_MODULES)
    assert "_heapq (C)" in documents
    assert "_heapq (C)" not in few_documents  # heapq.py holds the same docstrings
    assert "reference/with" not in few_documents  # a part of reference/compound
    passages = [set(_find_passages(text)) for text in few_documents.values()]
    for one, other in itertools.combinations(passages, 2):
        assert len(one & other) <= max(len(one), len(other)) / 2


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_no_docstring_of_training_is_in_validation(few_documents, share):
    import ast

    train, validation = split_families(few_documents, share)
    assert train.keys() | validation.keys() == few_documents.keys()
    assert not train.keys() & validation.keys()
    assert train
    assert validation
    sizes = [sum(map(len, part.values())) for part in (validation, few_documents)]
    assert share / 2 < sizes[0] / sizes[1] <= share
    held_out = " ".join(" ".join(validation.values()).split())
    for name, text in train.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                docstring = " ".join((ast.get_docstring(node) or "").split())
                assert len(docstring) < PASSAGE or docstring not in held_out, (name, docstring)
    shared = {b for t in train.values() for b in _find_passages(t)}
    assert not shared & {b for t in validation.values() for b in _find_passages(t)}


def test_python_corpus_does_not_depend_on_the_program(monkeypatch):
    """Command-line libraries replace sys.excepthook; a run must resume under any launcher."""
    before = python_documents({"sys"})
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    assert python_documents({"sys"}) == before


@pytest.mark.slow
def test_python_corpus_is_the_same_in_every_process():
    code = textwrap.dedent("""
        import sys, types
        from hashlib import sha256
        package = types.ModuleType("nalanda"); package.__path__ = [sys.argv[1]]
        sys.modules["nalanda"] = package
        from nalanda.data.python_docs import python_splits
        parts = [list(part.items()) for part in python_splits(0.05).values()]
        print(sha256(repr(parts).encode()).hexdigest())
    """)
    package = str(Path(corpus.__file__).parents[1])
    sums = {
        subprocess.run(
            [sys.executable, "-c", code, package],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(sums) == 1


def test_python_corpus_does_not_depend_on_the_order_of_the_file_system(monkeypatch):
    names = list(python_documents({"json", "email"}))
    monkeypatch.setattr(Path, "rglob", lambda *args, rglob=Path.rglob: reversed(list(rglob(*args))))
    assert list(python_documents({"json", "email"})) == names


def test_a_python_without_its_language_reference(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match=r"no pydoc_data\.topics"):
        python_documents()


# ------------------------------ tokenizers


@pytest.fixture
def prose(tmp_path, monkeypatch) -> DataConfig:
    monkeypatch.setattr(packing, "STREAM_GROUP", 1 << 19)
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 1 << 19)
    documents = python_documents({"json", "heapq", "abc"})
    write_jsonl(tmp_path / "prose" / "a.jsonl", list(documents.values()))
    return DataConfig(source=str(tmp_path / "prose"), seq_len=64, validation_share=0.3)


def test_trained_tokenizer_is_deterministic_and_reloaded(tmp_path, prose, monkeypatch):
    config = TokenizerConfig(train="bpe", vocab_size=500)
    tokenizer = build_tokenizer(config, prose, tmp_path / "run" / "tokenizer")
    build_tokenizer(config, prose, tmp_path / "again")
    saved = [(tmp_path / p / "tokenizer.json").read_bytes() for p in ("run/tokenizer", "again")]
    assert saved[0] == saved[1]
    assert not list(tmp_path.rglob("*.partial"))
    assert len(tokenizer) == 500
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.pad_token is None
    text = "def f(x):\n    return 'Größe 漢字 \x00'  # ok"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:]) == text
    assert set(tokenizer(text)) == {"input_ids", "attention_mask"}

    monkeypatch.setattr("nalanda.data.tokenizer._train_bpe", None)  # not called again
    reloaded = build_tokenizer(config, prose, tmp_path / "run" / "tokenizer")
    assert reloaded(text) == tokenizer(text)
    for path in (tmp_path / "again", tmp_path / "again" / "tokenizer.json"):
        named = build_tokenizer(TokenizerConfig(path=str(path)), prose, tmp_path / "unused")
        assert named(text) == tokenizer(text)
        assert named.eos_token_id == 0
    assert not (tmp_path / "unused").exists()


def test_lone_tokenizer_json_has_its_special_tokens(tmp_path, byte_tokenizer, prose):
    path = tmp_path / "my.json"
    byte_tokenizer.backend_tokenizer.save(str(path))
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path)), prose, tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|endoftext|>")


def test_tokenizer_is_trained_on_the_training_part_alone(tmp_path, prose):
    texts = [f"{word} {i} " + f"{word} " * 50 for i in range(30) for word in ("alpha", "beta")]
    write_jsonl(tmp_path / "t" / "train" / "a.jsonl", [t for t in texts if "alpha" in t])
    write_jsonl(tmp_path / "t" / "validation" / "a.jsonl", [t for t in texts if "beta" in t])
    config = DataConfig(source=str(tmp_path / "t"))
    vocabulary = build_tokenizer(
        TokenizerConfig(train="bpe", vocab_size=270), config, tmp_path / "x"
    ).get_vocab()
    assert "Ġalpha" in vocabulary
    assert not {"be", "ta", "et", "eta", "Ġb"} & vocabulary.keys()


def test_words_from_the_most_frequent_on(tmp_path, lines):
    write_jsonl(tmp_path / "t" / "train" / "a.jsonl", ["b a <unk> c\n", "", "a é\nd b </s> a\x1cb"])
    write_jsonl(tmp_path / "t" / "validation" / "a.jsonl", ["zebra zebra zebra"])
    corpus = DataConfig(source=str(tmp_path / "t"), bos=False)

    def vocabulary(name: str, data: DataConfig = corpus, **settings) -> list[str]:
        tokenizer = build_tokenizer(
            TokenizerConfig(train="words", **settings), data, tmp_path / name
        )
        entries = tokenizer.get_vocab()
        assert sorted(entries.values()) == list(range(len(tokenizer))), (
            "an id without a word, or with two"
        )
        return sorted(entries, key=entries.get)

    words = ["a", "b", "a\x1cb", "c", "d", "é"]
    assert vocabulary("all") == ["<unk>", "</s>", *words]
    assert vocabulary("frequent", min_count=2) == ["<unk>", "</s>", *words[:2]]
    assert vocabulary("few", vocab_size=5) == ["<unk>", "</s>", *words[:3]]
    assert vocabulary("roomy", vocab_size=500) == ["<unk>", "</s>", *words]
    with_bos = DataConfig(source=corpus.source)
    assert vocabulary("bos", with_bos) == ["<unk>", "</s>", "<s>", *words]


def test_only_words_have_no_size_of_their_own():
    assert TokenizerConfig(train="bpe").vocab_size == TokenizerConfig(path="a").vocab_size == 4096
    assert TokenizerConfig(train="words").vocab_size is None
    assert TokenizerConfig(train="words", vocab_size=99).vocab_size == 99


def test_word_tokenizer_in_use(tmp_path, lines, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr("nalanda.data.tokenizer.BPE_SAMPLE", 1)  # all words count
    config = TokenizerConfig(train="words")
    tokenizer = build_tokenizer(config, lines, tmp_path / "run" / "tokenizer")
    build_tokenizer(config, lines, tmp_path / "again")
    saved = [(tmp_path / p / "tokenizer.json").read_bytes() for p in ("run/tokenizer", "again")]
    assert saved[0] == saved[1]
    assert len(tokenizer) == len(
        {word for line in LINES for word in line.split()} | {"<unk>", "</s>"}
    )
    assert (tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.bos_token is tokenizer.pad_token is None

    monkeypatch.setattr("nalanda.data.tokenizer._train_words", None)  # not called again
    for loaded in (
        build_tokenizer(config, lines, tmp_path / "run" / "tokenizer"),
        AutoTokenizer.from_pretrained(tmp_path / "again"),
    ):
        ids = loaded(" the zebra  of\tline\n\n 3 word\n")["input_ids"]
        assert loaded.convert_ids_to_tokens(ids) == [
            *("the", "<unk>", "of", "line", "</s>", "</s>", "3", "word")
        ]
        assert loaded.decode(ids) == "the <unk> of line </s> </s> 3 word"
        assert loaded.decode(ids, skip_special_tokens=True) == "the of line 3 word"
        assert loaded("\n")["input_ids"] == []


def test_word_tokenizer_puts_bos_in_front_where_the_data_does(tmp_path, lines):
    lines.documents, lines.bos = "apart", True
    tokenizer = build_tokenizer(TokenizerConfig(train="words"), lines, tmp_path / "bos")
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the word")["input_ids"]) == [
        "<s>",
        "the",
        "word",
    ]
    batches = PackedBatches(lines, tokenizer, split="validation", batch_size=1)
    ids = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    assert ids.count(2) == 41  # blank lines are no documents
    assert "<s> = Title = </s> <s>" in tokenizer.decode(ids)


def test_sentencepiece_models(tmp_path, prose):
    import sentencepiece

    texts = list(
        DocumentStream(open_corpus(prose, "train"), seed=0, buffer_size=0, epochs=1).texts()
    )

    def train(name: str, **options) -> str:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("\n".join(texts).splitlines()),
            model_prefix=str(tmp_path / name),
            vocab_size=500,
            byte_fallback=True,
            minloglevel=2,
            **options,
        )
        return str(tmp_path / f"{name}.model")

    exact = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    path = train("llama", model_type="bpe", **exact)
    tokenizer = build_tokenizer(TokenizerConfig(path=path), prose, tmp_path / "unused")
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    assert len(tokenizer) == 500
    for text in [*texts, "  two  spaces\n\n\tGröße 漢字"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == model.encode(text)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer("a")["input_ids"][0] == 1
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = build_tokenizer(
        TokenizerConfig(path=str(tmp_path / "saved")), prose, tmp_path / "unused"
    )
    assert saved(texts[0]) == tokenizer(texts[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either path"),
        ({"path": "a", "train": "bpe"}, "give either path"),
        ({"train": "wordpiece"}, "expected one of bpe, words; got 'wordpiece'"),
        ({"train": "bpe", "vocab_size": 256}, "needs 257 or more"),
        ({"train": "words", "vocab_size": 3}, "and a word need 4"),
        ({"train": "words", "min_count": 0}, "min_count: expected 1 or more, got 0"),
        ({"train": "bpe", "min_count": 2}, "only train: words counts words"),
        ({"path": "./nowhere"}, "'./nowhere' cannot be loaded .*; give mistral, a directory"),
    ],
)
def test_tokenizers_that_cannot_work(tmp_path, settings, message):
    with pytest.raises(InputError, match=message) as caught:
        build_tokenizer(TokenizerConfig(**settings), DataConfig(source="python"), tmp_path)
    assert "\n" not in str(caught.value)


def test_vocabulary_larger_than_the_models_is_refused(byte_tokenizer):
    check_vocabulary(byte_tokenizer, 257)
    with pytest.raises(InputError, match="257 tokens and the model's vocab_size is 256"):
        check_vocabulary(byte_tokenizer, 256)


def test_a_tokenizer_without_bos(byte_tokenizer, shards):
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer.backend_tokenizer, eos_token="<|endoftext|>"
    )
    with pytest.raises(InputError, match=r"no bos token; set data\.bos=false"):
        PackedBatches(shards, bare, split="train", batch_size=1)
    neither = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.backend_tokenizer)
    both = r"no bos and no eos token; set data\.bos=false data\.eos=false"
    with pytest.raises(InputError, match=both):
        PackedBatches(shards, neither, split="train", batch_size=1)
    shards.bos = False
    assert PackedBatches(shards, bare, split="train", batch_size=1)


# ------------------------------ the thread


def test_an_error_in_the_thread_comes_after_the_good_batches(byte_tokenizer, shards, monkeypatch):
    expected = list(
        itertools.islice(PackedBatches(shards, byte_tokenizer, split="train", batch_size=1), 3)
    )

    def fail_after_three(*arguments, rows=StreamRows.rows):
        yield from itertools.islice(rows(*arguments), 3)
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(StreamRows, "rows", fail_after_three)
    batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=1)
    seen = [next(batches) for _ in range(3)]
    assert all(map(same, seen, expected))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(batches)


def test_no_thread_outlives_close_or_the_object(byte_tokenizer, shards):
    batches = PackedBatches(shards, byte_tokenizer, split="train", batch_size=1)
    assert not reading_threads()
    first = next(batches)
    assert len(reading_threads()) == 1
    batches.close()
    assert not reading_threads()
    assert not same(first, next(batches))  # resumes
    assert len(reading_threads()) == 1
    del batches
    gc.collect()
    assert not reading_threads()


@pytest.mark.slow
def test_a_process_that_stops_in_the_middle_ends_at_once(shards, byte_tokenizer, tmp_path):
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = textwrap.dedent(f"""
        import sys, types
        package = types.ModuleType("nalanda"); package.__path__ = [{str(Path(data.__file__).parents[1])!r}]
        sys.modules["nalanda"] = package
        from nalanda.config.schema import DataConfig, TokenizerConfig
        from nalanda.data.loader import *
        from nalanda.data.tokenizer import *
        data = DataConfig(source={shards.source!r}, seq_len=16)
        tokenizer = build_tokenizer(TokenizerConfig(path={str(tmp_path / "tokenizer")!r}), data, "unused")
        batches = PackedBatches(data, tokenizer, split="train", batch_size=2)
        next(batches)
        raise SystemExit(7)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (7, b"")
