"""Fixtures of several test files: a failing HTTP server, and waits that pass at once."""

import pytest
from servers import Server

from nalanda.common import retry


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
