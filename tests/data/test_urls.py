"""Shards with a URL from a failing server, errors of the Hub, and messages without secrets."""

import gzip
import hashlib
import json
import os
import threading
from collections import Counter

import pytest
from servers import jsonl

from nalanda.common.errors import InputError, SourceUnavailable
from nalanda.common.retry import Incomplete, persist, persistent, transient
from nalanda.common.text import redact
from nalanda.config.schema import DataConfig
from nalanda.data import urls as remote
from nalanda.data.corpus import DocumentStream, open_corpus
from nalanda.data.documents import Fields
from nalanda.data.hub import HubShard
from nalanda.data.loader import PackedBatches
from nalanda.data.urls import UrlShard

FIELDS = Fields("text", "meta.redpajama_set_name")


def texts(shard, cursor=None):
    return [document.text for document, _ in shard.read(cursor)]


@pytest.mark.parametrize("ranges", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["503", "429", "half", "wrong", "stall"])
def test_a_failing_server_still_gives_its_bytes(server, monkeypatch, waits, capsys, fault, ranges):
    monkeypatch.setattr(remote, "TIMEOUT", (2.0, 0.2))
    server.ranges = ranges
    server.files["a.jsonl"] = body = jsonl("a", 15000)
    server.faults["a.jsonl"] = [fault] * 3
    shard = UrlShard(server.url("a.jsonl"), FIELDS, retries=3)
    assert texts(shard) == [json.loads(line)["text"] for line in body.splitlines()]
    starts = [asked for _, asked in server.asked]
    assert len(starts) == 4
    assert len(waits) == 3
    if ranges and fault in (
        "half",
        "stall",
    ):  # it resumes where it stopped, or a chunk of 64 KiB before
        half = len(body) // 2
        first, second = (int(start[6:-1]) for start in starts[1:3])
        assert half - (1 << 16) < first <= half
        assert first < second < len(body)
    elif fault not in ("half", "stall"):  # nothing came, or nothing trustworthy
        assert starts == [None] * 4
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert fault != "stall" or all("timed out" in line for line in said)
    assert all(line.startswith(f"nalanda: {server.url('a.jsonl')}: ") for line in said)
    assert texts(shard) == [json.loads(line)["text"] for line in body.splitlines()]
    assert len(server.asked) == 4  # the second reading is from the cache
    assert [path.name for path in (remote.cache()).iterdir() if path.suffix == ".partial"] == []


@pytest.mark.parametrize("fault", ["503", "wrong", "stall"])
def test_a_server_that_keeps_failing_stops_the_run(server, monkeypatch, waits, fault):
    monkeypatch.setattr(remote, "TIMEOUT", (2.0, 0.05))
    server.files["a.jsonl"], server.ranges = jsonl("a", 50), False
    server.faults["a.jsonl"] = [fault] * 99
    shard = UrlShard(server.url("a.jsonl") + "?sig=geheim", FIELDS, retries=4)
    with pytest.raises(
        SourceUnavailable, match=r"a\.jsonl\?\*\*\*: failed 5 times in a row"
    ) as caught:
        texts(shard)
    assert caught.value.exit_code == 75
    assert "geheim" not in str(caught.value)
    assert (len(server.asked), len(waits)) == (5, 4)
    assert not [path for path in remote.cache().iterdir() if path.suffix in (".jsonl", ".partial")]


def test_new_bytes_reset_the_retries(server):
    server.files["a.jsonl"] = body = jsonl("a", 400)
    server.faults["a.jsonl"] = ["half"] * 6  # more failures than retries, each after new bytes
    assert len(texts(UrlShard(server.url("a.jsonl"), FIELDS, retries=1))) == 400
    assert len(server.asked) == 7
    assert (
        hashlib.md5(next(remote.cache().glob("*.jsonl")).read_bytes()).digest()
        == hashlib.md5(body).digest()
    )


def test_an_etag_that_is_no_md5_is_not_compared(server, monkeypatch):
    import servers

    server.files["a.jsonl"] = jsonl("a", 5)
    monkeypatch.setattr(servers, "MD5_HEADER", "x-other")
    server.faults["a.jsonl"] = ["wrong"]
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: "):  # the bytes are read as they came
        texts(UrlShard(server.url("a.jsonl"), FIELDS))
    assert len(server.asked) == 1


def test_waits_grow_with_jitter_and_end_at_a_minute(waits):
    def fail():
        raise ConnectionResetError("reset")

    with pytest.raises(SourceUnavailable):
        persist(fail, "it", 200)
    assert len(waits) == 200
    assert all(0 <= wait <= min(60, 2.0 ** (i + 1)) for i, wait in enumerate(waits))
    assert max(waits) > 50
    assert min(waits[6:]) < 10
    assert len(set(waits)) == 200


@pytest.mark.parametrize("status", [404, 401, 403, 410])
def test_permanent_errors_are_not_retried(server, waits, status):
    server.files["a.jsonl"], server.faults["a.jsonl"] = b"x", [str(status)]
    with pytest.raises(InputError, match=f"a.jsonl: cannot be downloaded .*{status}") as caught:
        texts(UrlShard(server.url("a.jsonl"), FIELDS))
    assert not isinstance(caught.value, SourceUnavailable)
    assert waits == []
    assert len(server.asked) == 1


def test_a_corrupt_shard_is_named_and_not_kept(server, waits):
    whole = gzip.compress(jsonl("a", 50))
    server.files["a.jsonl.gz"] = whole[:-20]  # corrupt on the server, so length and MD5 agree
    shard = UrlShard(server.url("a.jsonl.gz"), FIELDS)
    with pytest.raises(
        InputError, match=r"^http://127.*/a\.jsonl\.gz, line \d+: corrupt or truncated"
    ):
        texts(shard)
    assert waits == []
    server.files["a.jsonl.gz"] = whole
    assert len(texts(shard)) == 50


def test_reading_resumes_at_a_cursor_of_the_same_shard_only(server):
    server.files["a.jsonl"] = jsonl("a", 30)
    shard = UrlShard(server.url("a.jsonl"), FIELDS)
    pairs = [
        (document.text, json.loads(json.dumps(cursor))) for document, cursor in shard.read(None)
    ]
    for i in (0, 7, 29):
        assert texts(shard, pairs[i][1]) == [text for text, _ in pairs[i + 1 :]]
    server.files["a.jsonl"] = jsonl("a", 31)
    next(remote.cache().glob("*.jsonl")).unlink()
    with pytest.raises(InputError, match=r"bytes, and \d+ when the run stopped in it"):
        texts(shard, pairs[7][1])


def test_few_shards_and_no_stale_partial_downloads_stay_on_disk(server, monkeypatch):
    monkeypatch.setattr(remote, "CACHED_SHARDS", 3)
    folder = remote.cache()
    folder.mkdir(parents=True)
    old, new = (f".0123456789abcdef-{name}.1.partial" for name in ("old", "new"))
    for name in (old, new, "own.jsonl", "own.partial"):
        (folder / name).write_text("x")
        time = os.stat(folder).st_mtime - (0 if name == new else 2 * remote.STALE)
        os.utime(folder / name, (time, time))
    for i in range(6):
        server.files[f"{i}.jsonl"] = jsonl(str(i), 2)
        assert len(texts(UrlShard(server.url(f"{i}.jsonl"), FIELDS))) == 2
        for path in folder.glob("*.jsonl"):  # as if each was used a minute after the other
            time = path.stat().st_mtime - 60
            os.utime(path, (time, time))
    assert sorted(path.name.split("-")[1] for path in folder.glob("*-*.jsonl")) == [
        f"{i}.jsonl" for i in (3, 4, 5)
    ]
    assert [path.name for path in folder.glob(".*.partial")] == [new]
    assert {path.name for path in folder.glob("own.*")} == {"own.jsonl", "own.partial"}


def test_a_download_of_several_processes_is_one(server):
    server.files["a.jsonl"] = jsonl("a", 100)
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(texts(UrlShard(server.url("a.jsonl"), FIELDS)))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(len(part) == 100 for part in found)
    assert len(server.asked) == 1


# ------------------------------ as data.source


def test_lists_of_urls_and_their_parts(server):
    for path in ("train/b.jsonl", "train/a.jsonl.gz", "validation/c.jsonl", "test/d.jsonl"):
        body = jsonl(path, 5)
        server.files[f"set/{path}"] = gzip.compress(body) if path.endswith(".gz") else body
    lines = [
        "# the shards",
        "",
        "train/b.jsonl",
        server.url("set/train/a.jsonl.gz"),
        "validation/c.jsonl",
    ]
    server.files["set/all.urls"] = "\n".join([*lines, "test/d.jsonl"]).encode()
    server.faults["set/all.urls"] = ["503"]

    def names(source, split):
        corpus = open_corpus(DataConfig(source=source), split)
        return [shard.identity.rpartition("/")[2] for shard in corpus.shards]

    for source in (
        server.url("set/all.urls"),
        [
            server.url(f"set/{path}")
            for path in ("train/b.jsonl", "train/a.jsonl.gz", "validation/c.jsonl")
        ],
    ):
        assert names(source, "train") == ["b.jsonl", "a.jsonl.gz"]
        assert names(source, "validation") == ["c.jsonl"]
    assert names(server.url("set/train/b.jsonl"), "validation") == ["b.jsonl"]  # a part is held out
    assert names([server.url("a.jsonl"), server.url("val-0.jsonl")], "validation") == [
        "val-0.jsonl"
    ]
    assert names(server.url("test.jsonl"), "train") == ["test.jsonl"]  # its name says nothing alone

    server.files["none.list"] = b"\n# nothing\n"
    for source, message in {
        server.url("none.list"): "lists no shard",
        server.url("no.list"): "404",
        server.url("a.pdf"): r"a\.pdf: not the URL of a file",
        "http://***@host/a.jsonl": "never stored",
        (
            "https://h/train/x.jsonl",
            "https://h/y.jsonl",
        ): r"^https://h/y\.jsonl: .* would not be read",
        (
            "https://h/train/x.jsonl",
            "https://h/test/y.jsonl",
        ): r"^https://h/test/y\.jsonl: .* not be read",
        (
            "https://h/x.jsonl?sig=a",
            "https://h/x.jsonl?sig=b",
        ): r"differs .* only in a .* signature",
        (
            "https://h/x.jsonl",
            "https://h/x.jsonl",
        ): r"^https://h/x\.jsonl: listed twice; name a file once",
        (
            "https://h/x.jsonl",
            "/data/b.jsonl",
        ): r"^/data/b\.jsonl: not a URL; .* give a directory or a glob",
        (
            "/data/a.jsonl",
            "/data/b.jsonl",
        ): r"'/data/a\.jsonl' does not exist; a list has files, folders and",
    }.items():
        with pytest.raises(InputError, match=message):
            open_corpus(
                DataConfig(source=source if isinstance(source, str) else [*source]), "train"
            )


def test_a_shuffled_run_from_urls_resumes_exactly(server, tokenizer):
    for i in range(3):
        server.files[f"{i}.jsonl"] = jsonl(str(i), 20)
    server.files["all.urls"] = b"0.jsonl\n1.jsonl\n2.jsonl\n"
    config = DataConfig(
        source=server.url("all.urls"), seq_len=16, shuffle_buffer=5, validation_share=0.2, workers=0
    )

    def new():
        return PackedBatches(config, tokenizer, split="train", batch_size=4, epochs=2)

    batches = new()
    whole = [(batch, json.loads(json.dumps(batches.state_dict()))) for batch in batches]
    assert len(whole) > 8
    for step in range(0, len(whole), 5):
        for path in remote.cache().glob("*.jsonl"):
            path.unlink()  # as on another node
        server.faults = {f"{i}.jsonl": ["503", "half"] for i in range(3)}
        resumed = new()
        resumed.load_state_dict(whole[step][1])
        rest = list(resumed)
        assert [b["input_ids"].tolist() for b in rest] == [
            b["input_ids"].tolist() for b, _ in whole[step + 1 :]
        ]


# ------------------------------ retries


@pytest.mark.parametrize("error", [ConnectionResetError("x"), TimeoutError(), Incomplete("x")])
def test_an_iterator_is_reopened_after_the_last_item(error, waits):
    fails = Counter({3: 2, 7: 3})

    def read(cursor):
        for i in range(cursor or 0, 10):
            if fails[i]:
                fails[i] -= 1
                raise error
            yield i, i + 1

    assert [item for item, _ in persistent(read, None, "it", retries=3)] == list(range(10))
    assert len(waits) == 5
    fails[5] = 4
    given = persistent(read, 4, "it", retries=3)
    assert next(given) == (4, 5)
    with pytest.raises(SourceUnavailable, match=r"it: failed 4 times in a row"):
        next(given)


def test_transient_errors():
    import aiohttp
    import httpx2
    import requests
    import urllib3
    from fsspec.exceptions import FSTimeoutError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    request = httpx2.Request("GET", "https://h/x")

    def hub(status):
        return HfHubHTTPError("x", response=httpx2.Response(status, request=request))

    def behind(outer, inner):
        try:
            try:
                raise inner
            except Exception as error:
                raise outer from error
        except Exception as error:
            return error

    def meanwhile(outer, inner):
        try:
            try:
                raise inner
            except Exception:
                raise outer  # noqa: B904  like a library that hides the cause
        except Exception as error:
            return error

    def status(code):
        reply = requests.Response()
        reply.status_code = code
        return requests.HTTPError("x", response=reply)

    yes = [
        httpx2.ReadTimeout("x"),
        httpx2.RemoteProtocolError("x"),
        httpx2.ConnectError("x"),
        aiohttp.ClientPayloadError("x"),
        aiohttp.ServerDisconnectedError(),
        requests.exceptions.ChunkedEncodingError("x"),
        requests.exceptions.ConnectionError("x"),
        urllib3.exceptions.ProtocolError("x"),
        urllib3.exceptions.ReadTimeoutError(None, "u", "x"),
        FSTimeoutError(),
        ConnectionError("Server Disconnected"),
        *[hub(code) for code in (408, 429, 500, 502, 503, 504)],
        *[status(code) for code in (429, 503)],
        behind(FileNotFoundError("https://h/x"), aiohttp.ServerDisconnectedError()),
        behind(ValueError("x"), hub(503)),
        meanwhile(FileNotFoundError("https://h/x"), aiohttp.ServerDisconnectedError()),
    ]
    no = [
        *[hub(code) for code in (400, 401, 403, 404, 416)],
        *[status(code) for code in (401, 404)],
        OfflineModeIsEnabled("x"),
        ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"),  # of datasets
        FileNotFoundError("x"),
        ValueError("x"),
        EOFError("x"),
        InputError("x"),
        SourceUnavailable("x"),
        requests.exceptions.InvalidURL("x"),
        behind(ConnectionError("x"), hub(404)),
        behind(FileNotFoundError("x"), status(404)),
    ]
    assert [error for error in yes if not transient(error)] == []
    assert [error for error in no if transient(error)] == []


class Dataset:
    """A stand-in for `datasets.IterableDataset` with a state and failures."""

    def __init__(self, rows, fails):
        self.rows, self.fails, self.at = rows, fails, 0

    def shard(self, num_shards, index):
        return Dataset(self.rows[index::num_shards], self.fails)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < len(self.rows):
            if self.fails.get(self.at):
                raise self.fails[self.at].pop()
            self.at += 1
            yield {"text": self.rows[self.at - 1]}


def test_a_hub_shard_resumes_where_the_connection_broke(waits):
    rows = [str(i) for i in range(20)]
    shard = HubShard(
        Dataset(rows, {3: [ConnectionError("Server Disconnected")] * 2}), "a/b", FIELDS, 1, 2
    )
    assert texts(shard) == rows[1::2]
    assert len(waits) == 2
    broken = HubShard(Dataset(rows, {3: [EOFError("cut\nshort")]}), "a/b", FIELDS, 0, 2)
    with pytest.raises(InputError, match=r"Hub dataset a/b:0/2: cannot be read \(EOFError: cut\)"):
        texts(broken)
    assert len(waits) == 2


def test_opening_a_hub_dataset_is_retried(monkeypatch, waits):
    import datasets

    names = ["READ_MAX_RETRIES", "OPEN_MAX_RETRIES"]
    names += [
        f"{k}_RETRY_INTERVAL"
        for k in ("READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT", "OPEN")
    ]
    for name in names:
        monkeypatch.setattr(datasets.config, f"STREAMING_{name}", 20)  # and set back afterwards
    fails = [ConnectionError("no route"), TimeoutError()]

    def split_names(path, name):
        if fails:
            raise fails.pop()
        return ["train"]

    monkeypatch.setattr(datasets, "get_dataset_split_names", split_names)
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    config = DataConfig(source="some/texts", validation_share=0.5)
    stream = DocumentStream(open_corpus(config, "train"), seed=0, buffer_size=0, epochs=1)
    assert set(stream.texts()) <= {"a", "b"}
    assert len(waits) == 2
    assert max(getattr(datasets.config, f"STREAMING_{name}") for name in names) <= 2
    fails += [ConnectionError("no route")] * 9
    with pytest.raises(SourceUnavailable, match="Hub dataset some/texts: failed 9 times"):
        open_corpus(config, "train")


# ------------------------------ secrets


def test_messages_have_no_password_and_no_signature():
    for text, plain in {
        "https://me:pass@host/a.jsonl": "https://***@host/a.jsonl",
        "GET https://host/a?X-Amz-Signature=geheim&x=1 failed": "GET https://host/a?*** failed",
        "with url: /a.jsonl?sig=geheim (Caused by": "with url: /a.jsonl?*** (Caused by",
        "is it there? x=1": "is it there? x=1",
        "https://host/a": "https://host/a",
    }.items():
        assert redact(text) == plain


def test_identity_is_the_same_when_a_link_is_signed_anew():
    def identity(url):
        return UrlShard(url, FIELDS).identity

    first = identity("https://me:pass@host/a.jsonl?X-Amz-Signature=1&X-Amz-Date=2&part=3")
    assert first == identity("https://host/a.jsonl?part=3&X-Amz-Signature=9")
    assert first != identity("https://host/a.jsonl?part=4")
    assert identity("https://host/a.jsonl?se=1&sp=r&sig=x") == "https://host/a.jsonl"
    for name in ("key", "keyword", "design", "assignment", "st"):
        assert identity(f"https://host/a.jsonl?{name}=1") != identity(
            f"https://host/a.jsonl?{name}=2"
        ), name
    assert "pass" not in first
    assert "pass" not in repr(UrlShard("https://me:pass@host/a.jsonl", FIELDS))
