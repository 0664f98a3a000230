"""Documents → tokens → rows → batches: nothing is lost or repeated, also after interruptions."""

import copy
import gc
import io
import itertools
import random
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import reading_threads, same, through_json
from corpora import ragged_texts, write_jsonl
from covering import covering

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data import loader as data
from nalanda.data import packing, readers
from nalanda.data.corpus import DocumentStream
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.packing import StreamRows
from nalanda.data.readers import read_blocks
from nalanda.data.sources import open_corpus

pytestmark = pytest.mark.usefixtures("small_groups", "no_thread_left")


# ------------------------------ packing


def validating(source: str | Path, **settings) -> DataConfig:
    """Validation reads `source`, and training one other document."""
    other = write_jsonl(Path(source).parent / "other" / "a.jsonl", ["another document"])
    return DataConfig(source=str(other), validation_source=str(source), **settings)


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_the_documents_in_order_with_their_boundaries(tmp_path, bpe_of_bytes, seed):
    rng = random.Random(seed)
    texts = ragged_texts(rng.randint(1, 60), seed)
    bos, eos = bool(seed & 1), bool(seed & 2)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    config = validating(source, seq_len=rng.randint(2, 40), bos=bos, eos=eos)
    batch_size = rng.randint(1, 5)
    batches = validation_batches(config, bpe_of_bytes, batch_size=batch_size)[""]
    ids = bpe_of_bytes(texts, add_special_tokens=False)["input_ids"]
    documents = [[0] * bos + tokens + [0] * eos for tokens in ids]
    assert any(len(d) > config.seq_len for d in documents)

    tokens, starts, unlabelled = [], [], []
    for batch in batches:
        size = batch["input_ids"].shape
        assert (
            size
            == (batch_size, config.seq_len)
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


def test_single_leftover_token_is_a_segment_without_label(tmp_path, bpe_of_bytes):
    source = write_jsonl(tmp_path / "a.jsonl", ["abcdefgh"])  # with eos: 9 tokens in rows of 4
    config = validating(source, seq_len=4, bos=False)
    (batch,) = validation_batches(config, bpe_of_bytes, batch_size=3)[""]
    assert batch["cu_seqlens"].tolist() == [0, 4, 8, 9, 12]
    assert (batch["labels"][2] == -100).all()
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2]]


def test_every_document_once_an_epoch_in_a_new_order(bpe_of_bytes, shards):
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


def test_every_token_once_an_epoch(bpe_of_bytes, shards):
    batches = PackedBatches(shards, bpe_of_bytes, batch_size=1, epochs=2)
    counted = sum(
        (np.bincount(b["input_ids"].view(-1), minlength=257) for b in batches), np.zeros(257, int)
    )
    ids = bpe_of_bytes(ragged_texts(60), add_special_tokens=False)["input_ids"]
    expected = 2 * np.bincount([*itertools.chain(*ids), *[0] * 120], minlength=257)
    missing = expected - counted
    assert missing.min() >= 0
    assert missing.sum() == expected.sum() % 16  # training drops only what fills no row


def test_rows_of_a_long_document_do_not_fill_a_batch(tmp_path, bpe_of_bytes, monkeypatch):
    """Four files of fifty rows each; in order, most batches of four rows would come from one file."""
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 1 << 20)
    for letter in "abcd":
        (tmp_path / f"{letter}.txt").write_text(letter * 800)
    config = DataConfig(
        source=str(tmp_path), validation_share=1e-9, seq_len=16, bos=False, eos=False
    )

    def batches(seed: int) -> list[list[int]]:
        packed = PackedBatches(config, bpe_of_bytes, batch_size=4, seed=seed, epochs=1)
        return [batch["input_ids"][:, 0].tolist() for batch in packed]

    seen = batches(0)
    assert sorted(Counter(itertools.chain(*seen)).values()) == [50] * 4
    assert sum(len(set(batch)) > 1 for batch in seen) > 0.8 * len(seen)
    assert batches(0) == seen != batches(1)


def test_training_has_no_padding_and_no_end(bpe_of_bytes, shards):
    batches = PackedBatches(shards, bpe_of_bytes, batch_size=8)
    rows = sum(len(text.encode()) + 2 for text in ragged_texts(60)) // 16
    for batch in itertools.islice(batches, 3 * rows // 8 + 2):
        bounds = batch["cu_seqlens"].long()
        assert (batch["labels"] == -100).sum() == len(bounds) - 1
    batches.close()


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_sees_the_same_rows(bpe_of_bytes, shards, split, world_size):
    def read(**share) -> list[dict]:
        if split == "train":
            return list(PackedBatches(shards, bpe_of_bytes, epochs=2, **share))
        return validation_batches(validating(shards.source, seq_len=16), bpe_of_bytes, **share)[""]

    batch_size = 8 // world_size
    alone = read(batch_size=8)
    ranks = [
        read(batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for step, batch in enumerate(alone):
        for rank in range(world_size):
            for key in ("input_ids", "labels", "position_ids"):
                assert torch.equal(batch[key][rank::world_size], ranks[rank][step][key])


def test_validation_ends_after_its_rows(bpe_of_bytes, shards):
    config = validating(shards.source, seq_len=16)
    once = validation_batches(config, bpe_of_bytes, batch_size=4)[""]
    config.max_validation_rows = 6
    limited = validation_batches(config, bpe_of_bytes, batch_size=4)[""]
    assert len(limited) == 2
    assert same(limited[0], once[0])
    assert torch.equal(limited[1]["labels"][:2], once[1]["labels"][:2])
    assert (limited[1]["labels"][2:] == -100).all()


def test_a_special_token_written_in_a_text_stays_text(tmp_path, bpe_of_bytes):
    source = write_jsonl(tmp_path / "a.jsonl", ["a<|endoftext|>b"])
    (batch,) = validation_batches(validating(source, seq_len=17), bpe_of_bytes, batch_size=1)[""]
    assert batch["input_ids"].eq(0).sum() == 2  # bos and eos


# ------------------------------ resume


def through_torch(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.sampled
@covering(strength=1, shuffle_buffer=(0, 7, 1000), trip=(through_json, through_torch))
def test_resume_at_every_batch_is_the_uninterrupted_run(bpe_of_bytes, shards, shuffle_buffer, trip):
    shards.shuffle_buffer = shuffle_buffer

    def new(**kwargs):
        return PackedBatches(shards, bpe_of_bytes, batch_size=5, seed=9, epochs=2, **kwargs)

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


def test_resume_of_a_resumed_run_and_of_the_same_object(bpe_of_bytes, shards):
    batches = PackedBatches(shards, bpe_of_bytes, batch_size=3)
    start = batches.state_dict()
    whole = list(itertools.islice(batches, 30))
    batches.load_state_dict(start)
    seen = []
    while len(seen) < 30:
        seen += itertools.islice(batches, 4)
        state = batches.state_dict()
        batches = PackedBatches(shards, bpe_of_bytes, batch_size=3)
        batches.load_state_dict(state)
    assert all(map(same, whole, seen))


def test_resume_on_another_number_of_ranks(bpe_of_bytes, shards):
    one = PackedBatches(shards, bpe_of_bytes, batch_size=4, epochs=1)
    two = PackedBatches(shards, bpe_of_bytes, batch_size=2, epochs=1, rank=1, world_size=2)
    steps = [next(one) for _ in range(5)]
    two.load_state_dict(one.state_dict())
    rest, half = list(one), list(two)
    assert len(steps) == 5
    assert len(rest) == len(half) > 5
    assert all(torch.equal(a["labels"][1::2], b["labels"]) for a, b in zip(rest, half, strict=True))


def test_restoring_reads_no_earlier_shard(bpe_of_bytes, shards, monkeypatch):
    batches = PackedBatches(shards, bpe_of_bytes, batch_size=2, epochs=1)
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
def test_a_state_of_other_data_is_refused(bpe_of_bytes, shards, change):
    shards.bos = change != "documents"
    batches = PackedBatches(shards, bpe_of_bytes, batch_size=2)
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
        bpe_of_bytes = copy.deepcopy(bpe_of_bytes)
        bpe_of_bytes.add_tokens(["abc"])
    other = PackedBatches(shards, bpe_of_bytes, batch_size=2, seed=change == "seed")
    with pytest.raises(InputError, match=f"changed since the checkpoint was saved: {change} was"):
        other.load_state_dict(state)


# ------------------------------ the thread


def test_an_error_in_the_thread_comes_after_the_good_batches(bpe_of_bytes, shards, monkeypatch):
    expected = list(itertools.islice(PackedBatches(shards, bpe_of_bytes, batch_size=1), 3))

    def fail_after_three(*arguments, rows=StreamRows.rows):
        yield from itertools.islice(rows(*arguments), 3)
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(StreamRows, "rows", fail_after_three)
    batches = PackedBatches(shards, bpe_of_bytes, batch_size=1)
    seen = [next(batches) for _ in range(3)]
    assert all(map(same, seen, expected))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(batches)


def test_no_thread_outlives_close_or_the_object(bpe_of_bytes, shards):
    batches = PackedBatches(shards, bpe_of_bytes, batch_size=1)
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
def test_a_process_that_stops_in_the_middle_ends_at_once(shards, bpe_of_bytes, tmp_path):
    bpe_of_bytes.save_pretrained(tmp_path / "tokenizer")
    code = textwrap.dedent(f"""
        import sys, types
        package = types.ModuleType("nalanda"); package.__path__ = [{str(Path(data.__file__).parents[1])!r}]
        sys.modules["nalanda"] = package
        from nalanda.config.schema import DataConfig, TokenizerConfig
        from nalanda.data.loader import *
        from nalanda.data.tokenizer import *
        data = DataConfig(source={shards.source!r}, seq_len=16)
        tokenizer = build_tokenizer(TokenizerConfig(path={str(tmp_path / "tokenizer")!r}), data, "unused")
        batches = PackedBatches(data, tokenizer, batch_size=2)
        next(batches)
        raise SystemExit(7)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (7, b"")
