"""Sources and outputs in a store: an S3 server that the test starts, and fsspec's memory."""

import json
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import zstandard
from buckets import SECRET, Buckets
from servers import jsonl

from nalanda.common.errors import DiskFull, InputError, SourceUnavailable
from nalanda.common.text import is_url, redact, scheme_of
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.documents import identity_of_shard
from nalanda.data.hashes import FileHashes
from nalanda.data.inspect import inspect
from nalanda.data.loader import PackedBatches
from nalanda.data.megatron import read_megatron, write_megatron
from nalanda.data.prepare import prepare
from nalanda.data.sources import open_corpus
from nalanda.data.stored_sets import copy_set, is_stored_set
from nalanda.data.token_set import TokenSet, read_index
from nalanda.data.tokenizer import build_tokenizer, describe_tokenizer
from nalanda.storage.cache import cache


def compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def identities(source, split="train") -> list[str]:
    return [*map(identity_of_shard, open_corpus(DataConfig(source=source), split).shards)]


def texts(data: DataConfig, split="train") -> list[str]:
    corpus = open_corpus(data, split)
    corpus.ordered = True
    return [*corpus.once().texts()]


def checked_texts(data: DataConfig) -> list[str]:
    data.check()
    return texts(data)


def refusal(source) -> str:
    data = DataConfig(source=source, retries=1)
    with pytest.raises(InputError) as caught:
        checked_texts(data)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


# ------------------------------ reading


def fill(bucket: Buckets, folder: Path, files: dict[str, bytes]) -> None:
    """The same files in the bucket's folder `set` and in a local one."""
    for name, content in files.items():
        bucket.put(f"set/{name}", content)
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


@pytest.mark.slow
def test_a_folder_of_a_store_is_read_as_a_local_one(bucket, tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"text": ["p 0", "p 1"]}), table)
    files = {
        "train/deep/b.jsonl.zst": compressed(jsonl("b", 5)),
        "train/a.jsonl": jsonl("a", 5),
        "train/c.parquet": table.read_bytes(),
        "validation/v.jsonl": jsonl("v", 5),
        "test/t.jsonl": jsonl("t", 5),
        "train/.hidden/x.jsonl": jsonl("x", 1),
        "train/notes.csv": b"no",
    }
    fill(bucket, tmp_path / "set", files)
    for split in ("train", "validation"):
        there = open_corpus(DataConfig(source="s3://bucket/set"), split)
        here = open_corpus(DataConfig(source=str(tmp_path / "set")), split)
        assert [*map(identity_of_shard, there.shards)] == [*map(identity_of_shard, here.shards)]
        assert there.fingerprint == here.fingerprint
        assert dict(there.counts) == dict(here.counts)
    settings = {"shuffle_buffer": 4}
    here = texts(DataConfig(source=str(tmp_path / "set"), **settings))
    assert texts(DataConfig(source="s3://bucket/set", **settings)) == here
    assert texts(DataConfig(source="s3://bucket/set/", **settings)) == here
    assert texts(DataConfig(source=f"file://{tmp_path}/set", **settings)) == here
    assert DataConfig(source=f"file://{tmp_path}/set").source == str(tmp_path / "set")


def test_files_patterns_lists_and_several(bucket):
    for name in ("train-0.jsonl", "train-1.jsonl", "val-0.jsonl", "other#1?.jsonl"):
        bucket.put(f"set/{name}", jsonl(name, 2))
    bucket.put(
        "set/all.list", b"# shards\ntrain-1.jsonl\n\ns3://bucket/set/train-0.jsonl\nval-0.jsonl\n"
    )
    bucket.put("set/latin.list", "träin-1.jsonl\n".encode("latin-1"))
    root = "s3://bucket/set"
    size = len(jsonl("train-0.jsonl", 2))
    first, second = (f"{root}/train-{i}.jsonl:{size}" for i in (0, 1))
    assert identities(f"{root}/train-0.jsonl") == [first]
    assert identities(f"{root}/train-*.jsonl") == [first, second]
    assert identities(f"{root}/train-[1-9].jsonl") == [second]
    assert identities(f"{root}/all.list") == [second, first]
    assert identities(f"{root}/all.list", "validation")[0].startswith(f"{root}/val-0.jsonl:")
    assert identities([f"{root}/val-0.jsonl", f"{root}/train-*"]) == [first, second]
    assert len(identities(f"{root}/other#*.jsonl")) == 1
    for source, message in {
        f"{root}/none.jsonl": "s3://bucket/set/none.jsonl: cannot be read: it does not exist",
        "s3://missing/set": "s3://missing/set: cannot be read: it does not exist",
        f"{root}/none-*.jsonl": f"{root}/none-*.jsonl: no documents; files may end in .txt",
        f"{root}/latin.list": f"{root}/latin.list: cannot be read: UnicodeDecodeError: ",
        "foo://bucket/x": "data.source: foo://bucket/x: foo:// cannot be read; there are file://, http://",
        "gs://bucket/x.jsonl": "gs://bucket/x.jsonl: needs gcsfs; pip install 'nalanda[gs]'",
        "az://box/x.jsonl": "az://box/x.jsonl: needs adlfs; pip install 'nalanda[az]'",
        f"s3://key:{SECRET}@bucket/x": "data.source: s3://***@bucket/x: a key does not belong in a URL; set",
    }.items():
        assert refusal(source).startswith(message), source
    assert not Path("s3:").exists()


def test_memory_and_schemes(tmp_path, monkeypatch):
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "cache"))
    with fsspec.open("memory://set/train/a.jsonl", "wb") as file:
        file.write(jsonl("a", 3))
    for source in ("memory://set", "memory://set/*/*.jsonl", "memory://set/train/[a-c].jsonl"):
        assert len(texts(DataConfig(source=source, validation_share=1e-9))) == 3
    (tmp_path / "file").touch()
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "file"))
    message = "^memory://set/train/a.jsonl: cannot be downloaded: FileExistsError"
    with pytest.raises(InputError, match=message):  # so that a run saves before it ends
        texts(DataConfig(source="memory://set", validation_share=1e-9))
    assert is_url("s3://b/*.jsonl")
    assert is_url(["hf://datasets/a/b/c.parquet", "https://h/x"])
    assert not is_url("a/b")
    assert not is_url("C:/x")
    assert (scheme_of("GS://b/x"), scheme_of("/a/s3://b")) == ("gs", "")
    assert (
        redact("abfs://box@account.dfs.core.windows.net/x")
        == "abfs://box@account.dfs.core.windows.net/x"
    )


def test_wrong_and_no_credentials_are_one_line(bucket, monkeypatch):
    bucket.put("set/a.jsonl", jsonl("a", 3))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refusal("s3://bucket/set/a.jsonl")
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refusal("s3://bucket/set")


def test_a_shard_that_changes_is_noticed(bucket, tokenizer):
    for name in "ab":
        bucket.put(f"set/{name}.jsonl", jsonl(name, 20))
    config = DataConfig(
        source="s3://bucket/set", seq_len=16, workers=0, shuffle_buffer=4, retries=1
    )

    def new():
        batches = PackedBatches(config, tokenizer, batch_size=4, epochs=1, hashes=FileHashes())
        for number in range(2):
            batches.files[""].find(number)
        return batches

    batches = new()
    whole = [
        (batch["input_ids"].tolist(), json.loads(json.dumps(batches.state_dict())))
        for batch in batches
    ]
    for file in cache().iterdir():
        file.unlink()  # as on another node
    resumed = new()
    resumed.load_state_dict(whole[1][1])
    assert [batch["input_ids"].tolist() for batch in resumed] == [rows for rows, _ in whole[2:]]

    bucket.put("set/b.jsonl", jsonl("c", 20))  # of the same size
    with pytest.raises(
        InputError, match=r"s3://bucket/set/b\.jsonl: other content than when the checkpoint"
    ):
        new().load_state_dict(whole[1][1])
    corpus = open_corpus(config, "train")
    bucket.put("set/b.jsonl", jsonl("d", 20))
    with pytest.raises(InputError, match=r"^s3://bucket/set/b\.jsonl: changed while in use"):
        [*corpus.once()]


def test_a_damaged_shard_is_named_and_downloaded_again(bucket):
    whole = compressed(jsonl("a", 50))
    bucket.put("a.jsonl.zst", whole[:-20])
    assert refusal("s3://bucket/a.jsonl.zst").startswith(
        "s3://bucket/a.jsonl.zst, line 1: corrupt or trunc"
    )
    bucket.put("a.jsonl.zst", whole)
    assert len(texts(DataConfig(source="s3://bucket/a.jsonl.zst", validation_share=1e-9))) == 50


def test_a_server_that_dies_is_asked_again_a_bounded_number_of_times(bucket, waits, capsys):
    bucket.put("set/a.jsonl", jsonl("a", 3))
    bucket.put("set/b.jsonl", jsonl("b", 3))
    data = DataConfig(source="s3://bucket/set", retries=2, validation_share=1e-9)
    corpus = open_corpus(data, "train")
    bucket.stop()
    try:
        with pytest.raises(
            SourceUnavailable, match=r"\.jsonl: failed 3 times in a row, gave up"
        ) as caught:
            next(iter(corpus.once()))
    finally:
        bucket.start()
    assert caught.value.exit_code == 75
    assert len(waits) == 2
    said = capsys.readouterr().err
    assert said.count("try ") == 2
    assert SECRET not in said
    assert len([*corpus.once()]) == 6
    assert [path.name for path in cache().glob(".*")] == []


# ------------------------------ token sets


def prepared(source: str, output: str, *options: str) -> None:
    import nalanda_cli

    nalanda_cli.app(
        ["data", "prepare", source, output, "--vocab-size", "300", "--workers", "1", *options],
        standalone_mode=False,
    )


@pytest.mark.slow
def test_a_token_set_is_prepared_in_a_store_and_read_from_it(bucket, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("train/a.jsonl", "validation/v.jsonl"):
        bucket.put(f"texts/{name}", jsonl(name, 200))
    prepared("s3://bucket/texts", "s3://bucket/tokens")
    names = bucket.names("tokens/")
    assert {
        "tokens/index.json",
        "tokens/train/00000.tokens",
        "tokens/tokenizer/tokenizer.json",
    } <= {*names}
    assert not [name for name in names if "preparing" in name]
    assert not Path("s3:").exists()

    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "another"))  # as on another machine
    before = bucket.get("tokens/train/00000.tokens")
    capsys.readouterr()
    prepared("s3://bucket/texts", "s3://bucket/tokens")
    said = capsys.readouterr().out
    assert "prepared already" in said
    assert "0 files copied" in said
    with pytest.raises(InputError, match="was prepared with text_field"):
        prepared("s3://bucket/texts", "s3://bucket/tokens", "--text-field", "other")

    local = copy_set("s3://bucket/tokens", 1)
    assert (local / "train/00000.tokens").read_bytes() == before
    assert TokenSet(local, "train").documents == 200
    assert is_stored_set("s3://bucket/tokens", 1)
    assert not is_stored_set("s3://bucket/texts", 1)
    assert "is a token set, and texts are needed" in refusal("s3://bucket/tokens")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5))
    (local / "train/00000.tokens").unlink()
    with pytest.raises(
        DiskFull, match=r"^s3://bucket/tokens: a token set is copied here to be read, and .* lacks"
    ):
        copy_set("s3://bucket/tokens", 1)


def test_a_set_of_a_store_is_inspected_written_and_gives_its_tokenizer(
    prepared_set, tmp_path, monkeypatch, capsys
):
    """The commands that `nalanda data prepare` prints name the set in the store."""
    monkeypatch.setenv("NALANDA_CACHE", str(tmp_path / "cache"))
    fsspec.filesystem("memory").put(str(prepared_set), "/copied", recursive=True)
    inspect("memory://copied", verify=True, samples=1)
    assert "\nmemory://copied: " in capsys.readouterr().out
    written = write_megatron("memory://copied", tmp_path / "megatron")
    index = read_index(prepared_set)
    assert written["train"] == (index["train"]["documents"], index["train"]["tokens"])

    for name in ("tokenizer", "tokenizer/tokenizer.json"):
        config = TokenizerConfig(path=f"memory://copied/{name}")
        built = build_tokenizer(config, DataConfig(source="python"), tmp_path)
        assert describe_tokenizer(built) == index["tokenizer"]
    for path, message in {
        "memory://none": "^tokenizer: 'memory://none': memory://none: cannot be read: it does not",
        "s3://key:geheim@bucket/x": r"^tokenizer\.path: s3://\*\*\*@bucket/x: a key does not belong",
    }.items():
        with pytest.raises(InputError, match=message):
            build_tokenizer(TokenizerConfig(path=path), DataConfig(source="python"), tmp_path)


@pytest.mark.parametrize(
    ("output", "message"),
    {
        "http://host/out": "output: http://host/out: http:// cannot be written; name a local folder or",
        "hf://datasets/a/b": "output: hf://datasets/a/b: hf:// cannot be written",
        "foo://bucket/out": "output: foo://bucket/out: foo:// cannot be written",
        "gs://bucket/out": "gs://bucket/out: needs gcsfs; pip install 'nalanda[gs]'",
    }.items(),
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    output, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        prepared("python", output)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 2
    for write in (prepare, read_megatron):
        with pytest.raises(InputError, match="output s3://bucket/out: a URL; name a local path"):
            write(DataConfig(source="python"), TokenizerConfig(train="bpe"), "s3://bucket/out")
    assert not [*tmp_path.iterdir()]


def test_a_set_of_a_store_follows_a_file_that_keeps_its_size(bucket, tmp_path):
    for name in "ab":
        bucket.put(f"set/{name}.jsonl", jsonl(name, 20))
    data = DataConfig(source="s3://bucket/set", bos=False, eos=False, workers=0, retries=1)
    tokenizer = TokenizerConfig(train="bpe", vocab_size=270)
    before = prepare(data, tokenizer, tmp_path / "out", shard_bytes=1)

    said: list[str] = []
    assert prepare(data, tokenizer, tmp_path / "out", shard_bytes=1, say=said.append) == before
    assert "prepared already" in said[-1]

    bucket.put("set/b.jsonl", jsonl("c", 20))  # of the same size
    after = prepare(data, tokenizer, tmp_path / "out", shard_bytes=1)
    assert after["train"]["shards"] != before["train"]["shards"]
