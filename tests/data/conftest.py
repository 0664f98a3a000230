"""Fixtures of several test files: a failing HTTP server, waits that pass at once, tokenizers, shards, a set."""

import gc
from pathlib import Path

import pytest
from batches import reading_threads
from corpora import corpus, ragged_texts, write_jsonl
from servers import Server

from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data import packing
from nalanda.data.prepare import prepare
from nalanda.data.tokenizer import build_tokenizer


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "shards"))
    server = Server()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def waits(waits):
    return waits


@pytest.fixture(scope="module")
def byte_tokenizer(tokenizer, tmp_path_factory) -> TokenizerConfig:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return TokenizerConfig(path=str(path))


@pytest.fixture
def prepared_set(tmp_path, byte_tokenizer) -> Path:
    data = DataConfig(source=str(corpus(tmp_path / "in", files=2)), validation_share=0.2)
    prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=3000)
    return tmp_path / "out"


@pytest.fixture(scope="module")
def bpe_of_bytes(tmp_path_factory):
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


@pytest.fixture
def small_groups(monkeypatch):
    """Makes a few kilobytes cross many groups."""
    monkeypatch.setattr(packing, "STREAM_GROUP", 100)
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 200)


@pytest.fixture
def no_thread_left():
    """No thread that reads outlives its test."""
    yield
    if reading_threads():
        gc.collect()
    assert not reading_threads()
