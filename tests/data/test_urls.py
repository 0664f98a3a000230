"""Shards with a URL from a failing server, datasets of the Hub, and messages without secrets."""

import gzip
import hashlib
import itertools
import json
import os
import threading

import pytest
from servers import jsonl

from nalanda.common.errors import InputError, SourceUnavailable
from nalanda.common.text import digest, redact
from nalanda.config.schema import DataConfig
from nalanda.data.documents import Fields, identity_of_shard
from nalanda.data.hashes import FileHashes
from nalanda.data.hub import HubShard
from nalanda.data.loader import PackedBatches
from nalanda.data.records import UnusableRecord
from nalanda.data.sources import open_corpus
from nalanda.data.urls import RemoteShard, identity_of
from nalanda.storage import cache as caching
from nalanda.storage import http as downloads
from nalanda.storage.cache import cache
from nalanda.storage.remote import RemoteFile

FIELDS = Fields("text", "meta.redpajama_set_name")


def url_shard(url: str, retries: int = 8) -> RemoteShard:
    return RemoteShard(RemoteFile(url), identity_of(url), FIELDS, retries)


def texts(shard, cursor=None):
    return [document.text for document, _ in shard.read(cursor)]


@pytest.mark.sampled
@pytest.mark.parametrize("ranges", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["503", "429", "half", "wrong", "stall"])
def test_a_failing_server_still_gives_its_bytes(server, monkeypatch, waits, capsys, fault, ranges):
    monkeypatch.setattr(downloads, "TIMEOUT", (2.0, 0.2))
    server.ranges = ranges
    server.files["a.jsonl"] = body = jsonl("a", 15000)
    server.faults["a.jsonl"] = [fault] * 3
    shard = url_shard(server.url("a.jsonl"), retries=3)
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
    assert [path.name for path in cache().iterdir() if path.suffix == ".partial"] == []


@pytest.mark.parametrize("fault", ["503", "wrong", "stall"])
def test_a_server_that_keeps_failing_stops_the_run(server, monkeypatch, waits, fault):
    monkeypatch.setattr(downloads, "TIMEOUT", (2.0, 0.05))
    server.files["a.jsonl"], server.ranges = jsonl("a", 50), False
    server.faults["a.jsonl"] = [fault] * 99
    shard = url_shard(server.url("a.jsonl") + "?sig=geheim", retries=4)
    with pytest.raises(
        SourceUnavailable, match=r"a\.jsonl\?\*\*\*: failed 5 times in a row"
    ) as caught:
        texts(shard)
    assert caught.value.exit_code == 75
    assert "geheim" not in str(caught.value)
    assert (len(server.asked), len(waits)) == (5, 4)
    assert not [path for path in cache().iterdir() if path.suffix in (".jsonl", ".partial")]


def test_new_bytes_reset_the_retries(server):
    server.files["a.jsonl"] = body = jsonl("a", 400)
    server.faults["a.jsonl"] = ["half"] * 6  # more failures than retries, each after new bytes
    assert len(texts(url_shard(server.url("a.jsonl"), retries=1))) == 400
    assert len(server.asked) == 7
    assert (
        hashlib.md5(next(cache().glob("*.jsonl")).read_bytes()).digest()
        == hashlib.md5(body).digest()
    )


def test_an_etag_that_is_no_md5_is_not_compared(server, monkeypatch):
    import servers

    server.files["a.jsonl"] = jsonl("a", 5)
    monkeypatch.setattr(servers, "MD5_HEADER", "x-other")
    server.faults["a.jsonl"] = ["wrong"]
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: "):  # the bytes are read as they came
        texts(url_shard(server.url("a.jsonl")))
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [404, 401, 403, 410])
def test_permanent_errors_are_not_retried(server, waits, status):
    server.files["a.jsonl"], server.faults["a.jsonl"] = b"x", [str(status)]
    with pytest.raises(InputError, match=f"a.jsonl: cannot be downloaded .*{status}") as caught:
        texts(url_shard(server.url("a.jsonl")))
    assert not isinstance(caught.value, SourceUnavailable)
    assert waits == []
    assert len(server.asked) == 1


def test_a_corrupt_shard_is_named_and_not_kept(server, waits):
    whole = gzip.compress(jsonl("a", 50))
    server.files["a.jsonl.gz"] = whole[:-20]  # corrupt on the server, so length and MD5 agree
    shard = url_shard(server.url("a.jsonl.gz"))
    with pytest.raises(
        InputError, match=r"^http://127.*/a\.jsonl\.gz, line \d+: corrupt or truncated"
    ):
        texts(shard)
    assert waits == []
    server.files["a.jsonl.gz"] = whole
    assert len(texts(shard)) == 50


def test_an_error_keeps_its_kind_and_needs_no_copy(server):
    server.files["a.jsonl.gz"] = gzip.compress(jsonl("a", 3) + b"{}\n")
    documents = url_shard(server.url("a.jsonl.gz")).read(None)
    next(documents)
    next(cache().glob("*.gz")).unlink()  # another process needed the place
    with pytest.raises(
        UnusableRecord, match=r"^http://127.*/a\.jsonl\.gz, line 4: no field 'text'"
    ):
        next(itertools.islice(documents, 2, None))


def test_reading_resumes_at_a_cursor_of_the_same_shard_only(server):
    server.files["a.jsonl"] = jsonl("a", 30)
    shard = url_shard(server.url("a.jsonl"))
    pairs = [
        (document.text, json.loads(json.dumps(cursor))) for document, cursor in shard.read(None)
    ]
    for i in (0, 7, 29):
        assert texts(shard, pairs[i][1]) == [text for text, _ in pairs[i + 1 :]]
    server.files["a.jsonl"] = jsonl("a", 31)
    next(cache().glob("*.jsonl")).unlink()
    with pytest.raises(InputError, match=r"bytes, and \d+ when the run stopped in it"):
        texts(shard, pairs[7][1])


def test_few_shards_and_no_stale_partial_downloads_stay_on_disk(server, monkeypatch):
    monkeypatch.setattr(caching, "CACHED_FILES", 3)
    folder = cache()
    folder.mkdir(parents=True)
    old, new = (f".0123456789abcdef-{name}.1.partial" for name in ("old", "new"))
    for name in (old, new, "own.jsonl", "own.partial"):
        (folder / name).write_text("x")
        time = os.stat(folder).st_mtime - (0 if name == new else 2 * caching.STALE)
        os.utime(folder / name, (time, time))
    for i in range(6):
        server.files[f"{i}.jsonl"] = jsonl(str(i), 2)
        assert len(texts(url_shard(server.url(f"{i}.jsonl")))) == 2
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
        threading.Thread(target=lambda: found.append(texts(url_shard(server.url("a.jsonl")))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(len(part) == 100 for part in found)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("file", "key"),
    [
        (RemoteFile("https://me:geheim@h/a.jsonl?sig=1"), "https://h/a.jsonl"),
        (
            RemoteFile("s3://b/a.jsonl", 9, "ETag:c0"),
            "StoreFile(url='s3://b/a.jsonl', size=9, content='ETag:c0')",
        ),
    ],
)
def test_a_copy_of_an_earlier_start_is_read(file, key, tmp_path, monkeypatch):
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path))
    (tmp_path / f"{digest(key)}-a.jsonl").write_bytes(jsonl("a", 3))
    assert len(texts(RemoteShard(file, identity_of(file.url), FIELDS))) == 3


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
        return [identity_of_shard(shard).rpartition("/")[2] for shard in corpus.shards]

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
        return PackedBatches(config, tokenizer, batch_size=4, epochs=2)

    batches = new()
    whole = [(batch, json.loads(json.dumps(batches.state_dict()))) for batch in batches]
    assert len(whole) > 8
    for step in range(0, len(whole), 5):
        for path in cache().glob("*.jsonl"):
            path.unlink()  # as on another node
        server.faults = {f"{i}.jsonl": ["503", "half"] for i in range(3)}
        resumed = new()
        resumed.load_state_dict(whole[step][1])
        rest = list(resumed)
        assert [b["input_ids"].tolist() for b in rest] == [
            b["input_ids"].tolist() for b, _ in whole[step + 1 :]
        ]


def test_a_shard_without_a_size_is_known_by_its_name(server, tokenizer):
    for name in "abxy":
        server.files[f"{name}.jsonl"] = jsonl(name, 20)

    def new(names: str) -> PackedBatches:
        source = [server.url(f"{name}.jsonl") for name in names]
        data = DataConfig(source=source, seq_len=16, shuffle_buffer=0, workers=0)
        return PackedBatches(data, tokenizer, batch_size=1, epochs=1, hashes=FileHashes())

    batches = new("ab")
    next(batches)
    state = batches.state_dict()
    batches.close()
    new("ba").load_state_dict(state)
    with pytest.raises(InputError, match=r"\.jsonl: is missing, and "):
        new("xy").load_state_dict(state)


# ------------------------------ datasets of the Hub


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
        Dataset(rows, {3: [ConnectionError("Server Disconnected")] * 2}), "a/b:1/2", FIELDS, 1, 2
    )
    assert texts(shard) == rows[1::2]
    assert len(waits) == 2
    broken = HubShard(Dataset(rows, {3: [EOFError("cut\nshort")]}), "a/b:0/2", FIELDS, 0, 2)
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
    stream = open_corpus(config, "train").once()
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
        return identity_of_shard(url_shard(url))

    first = identity("https://me:pass@host/a.jsonl?X-Amz-Signature=1&X-Amz-Date=2&part=3")
    assert first == identity("https://host/a.jsonl?part=3&X-Amz-Signature=9")
    assert first != identity("https://host/a.jsonl?part=4")
    assert identity("https://host/a.jsonl?se=1&sp=r&sig=x") == "https://host/a.jsonl"
    for name in ("key", "keyword", "design", "assignment", "st"):
        assert identity(f"https://host/a.jsonl?{name}=1") != identity(
            f"https://host/a.jsonl?{name}=2"
        ), name
    assert "pass" not in first
    assert "pass" not in repr(url_shard("https://me:pass@host/a.jsonl"))
