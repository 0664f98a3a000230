"""Fixtures of several test files: a failing HTTP server, waits that pass at once, a tokenizer and a prepared set."""

from pathlib import Path

import pytest
from corpora import corpus
from servers import Server

from nalanda.common import retry
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare import prepare


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "shards"))
    server = Server()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    found = []
    monkeypatch.setattr(retry, "sleep", found.append)
    return found


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
