"""A prepared source that has changed: its own shards are made again."""

import os
from pathlib import Path

import pytest
from corpora import corpus, killed, lines, records, sums

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data import hashes, prepare_plan, prepare_run
from nalanda.data.inspect import check_set
from nalanda.data.loader import PackedBatches
from nalanda.data.prepare import begin, prepare
from nalanda.data.prepare_run import Preparation
from nalanda.data.token_set import TokenSet, read_index


def content_of(folder: Path) -> dict[str, list]:
    """Tokens, document starts and sources of each split."""
    found = {}
    for split in ("train", "validation"):
        part = TokenSet(folder, split)
        starts = part.starts(0, part.tokens).tolist()
        sources = read_index(folder)[split]["sources"]
        found[split] = [part.read(0, part.tokens).tolist(), starts, sources]
    return found


def mend_a_line(source: Path) -> None:
    file = source / "0.jsonl"
    file.write_bytes(file.read_bytes().replace(b"document 7,", b"document seven,"))


def edit_at_equal_size(source: Path) -> None:
    file = source / "2.jsonl"
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"document 45", b"document 54"))
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove_one(source: Path) -> None:
    (source / "3.jsonl.gz").unlink()


def add_one(source: Path) -> None:
    (source / "25.jsonl").write_bytes(lines(records(20, 900)))


def rename_one(source: Path) -> None:
    (source / "2.jsonl").rename(source / "9.jsonl")


CHANGES = [
    (mend_a_line, "0.jsonl changed"),
    (edit_at_equal_size, "2.jsonl changed"),
    (remove_one, "3.jsonl.gz is gone"),
    (add_one, "25.jsonl is new"),
    (rename_one, "2.jsonl is gone, 9.jsonl is new"),
]


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, byte_tokenizer):
    source = corpus(tmp_path / "in")
    work = begin(DataConfig(source=str(source)), byte_tokenizer, tmp_path / "out", shard_bytes=3000)
    with (source / "0.jsonl").open("ab") as file:
        file.write(lines(records(1, 1000)))
    with pytest.raises(InputError, match=r"0\.jsonl:\d+: now 0\.jsonl:\d+;"):
        work.make(0)


def test_a_source_that_changes_at_equal_size_is_refused(tmp_path, byte_tokenizer):
    """During a preparation, and between an interrupted one and its next start."""
    source, out = corpus(tmp_path / "in"), tmp_path / "out"
    data = DataConfig(source=str(source))
    work = begin(data, byte_tokenizer, out, shard_bytes=3000)
    work.make(0)
    file = source / "0.jsonl"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"document 40", b"document 04"))
    with pytest.raises(InputError, match=r"0\.jsonl:\d+: has other content now"):
        work.make(1)
    said: list[str] = []
    prepare(data, byte_tokenizer, out, shard_bytes=3000, say=said.append)
    assert any("shards are made again: 0.jsonl changed" in line for line in said)
    prepare(data, byte_tokenizer, tmp_path / "whole", shard_bytes=3000)
    assert sums(out) == sums(tmp_path / "whole")


@pytest.mark.sampled
@pytest.mark.parametrize(("change", "words"), CHANGES)
@pytest.mark.parametrize("finished", [True, False])
def test_a_changed_source_costs_its_own_shards(
    tmp_path, byte_tokenizer, monkeypatch, change, words, finished
):
    """The set is that of a fresh preparation; most of its shards are kept as they are."""
    source, out = corpus(tmp_path / "in", rows=20), tmp_path / "out"
    data = DataConfig(source=str(source), validation_share=0.2)
    work = begin(data, byte_tokenizer, out, shard_bytes=1500)
    for number in range(len(work.jobs)):
        work.make(number)
    if finished:
        work.seal()
    change(source)
    made, said = [], []
    close = prepare_run.ShardWriter.close
    monkeypatch.setattr(
        prepare_run.ShardWriter, "close", lambda self: made.append(self.path.name) or close(self)
    )
    index = prepare(data, byte_tokenizer, out, shard_bytes=1500, say=said.append)
    monkeypatch.undo()
    again, shards = len(set(made)), len(index["records"])
    assert 0 <= again <= shards / 2
    assert f"{again} of {shards} shards are made again: {words}" in said
    prepare(data, byte_tokenizer, tmp_path / "fresh", shard_bytes=1500)
    assert content_of(out) == content_of(tmp_path / "fresh")
    check_set(out, sums=True)
    stems = {path.stem for split in ("train", "validation") for path in (out / split).iterdir()}
    assert stems <= {*index["records"]}
    assert not (out / "preparing").exists()
    before = sums(out)
    prepare(data, byte_tokenizer, out, say=said.append)
    assert "prepared already" in said[-1]
    assert sums(out) == before


@pytest.mark.sampled
@pytest.mark.parametrize("place", [1, 2, 3, 5, 8, 9, 10])
def test_an_update_that_is_killed_goes_on(tmp_path, byte_tokenizer, place):
    """Until the new index is there, the old set opens with its own tokens."""
    source, out = corpus(tmp_path / "in", rows=20), tmp_path / "out"
    data = DataConfig(source=str(source), validation_share=0.2)
    prepare(data, byte_tokenizer, out, shard_bytes=1500)
    old = content_of(out)
    mend_a_line(source)
    prepare(data, byte_tokenizer, tmp_path / "fresh", shard_bytes=1500)
    new = content_of(tmp_path / "fresh")
    killed(place, lambda: prepare(data, byte_tokenizer, out, shard_bytes=1500))
    assert content_of(out) == old
    check_set(out, sums=True)
    prepare(data, byte_tokenizer, out, shard_bytes=1500)
    assert content_of(out) == new
    check_set(out, sums=True)


def test_a_changed_set_refuses_the_run_that_read_it(tmp_path, tokenizer, byte_tokenizer):
    source, out = corpus(tmp_path / "in", rows=20), tmp_path / "out"
    prepare(DataConfig(source=str(source)), byte_tokenizer, out)
    data = DataConfig(source=str(out), seq_len=16, workers=0)
    state = PackedBatches(data, tokenizer, batch_size=1).state_dict()
    add_one(source)
    prepare(DataConfig(source=str(source)), byte_tokenizer, out)
    with pytest.raises(InputError, match="changed since the checkpoint was saved: corpus"):
        PackedBatches(data, tokenizer, batch_size=1).load_state_dict(state)


def test_a_damaged_file_that_is_mended_costs_its_own_shards(tmp_path, byte_tokenizer, monkeypatch):
    source, out = corpus(tmp_path / "in"), tmp_path / "out"
    whole = (source / "3.jsonl.gz").read_bytes()
    (source / "3.jsonl.gz").write_bytes(whole[:-40])
    data = DataConfig(source=str(source))
    with pytest.raises(InputError, match=r"3\.jsonl\.gz, line \d+: corrupt or truncated"):
        prepare(data, byte_tokenizer, out, shard_bytes=3000)
    (source / "3.jsonl.gz").write_bytes(whole)
    made = []
    close = prepare_run.ShardWriter.close
    monkeypatch.setattr(
        prepare_run.ShardWriter, "close", lambda self: made.append(self.path.name) or close(self)
    )
    prepare(data, byte_tokenizer, out, shard_bytes=3000)
    assert len(set(made)) == 1
    prepare(data, byte_tokenizer, tmp_path / "whole", shard_bytes=3000)
    assert content_of(out) == content_of(tmp_path / "whole")


@pytest.mark.slow
def test_the_recorded_size_of_shards_is_taken(tmp_path, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(prepare_plan, "SMALLEST", 1000)
    source, out = corpus(tmp_path / "in"), tmp_path / "out"
    data = DataConfig(source=str(source))
    index = prepare(data, byte_tokenizer, out)
    (source / "7.jsonl").write_bytes(lines(records(2000, 5000)))
    assert (
        prepare(data, byte_tokenizer, out)["settings"]["shard_bytes"]
        == index["settings"]["shard_bytes"]
    )


def test_a_second_text_ends_the_cut_of_the_first(tmp_path, byte_tokenizer):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("".join(f"words of paragraph {i}\n\n" for i in range(2000)))
    data = DataConfig(source=str(tmp_path / "in"), validation_share=0.3)
    assert prepare(data, byte_tokenizer, tmp_path / "out")["train"]["documents"] > 1
    (tmp_path / "in/b.txt").write_text("another text")
    index = prepare(data, byte_tokenizer, tmp_path / "out")
    assert [index[split]["documents"] for split in ("train", "validation")] == [1, 1]


def test_a_file_is_hashed_once(tmp_path, byte_tokenizer, monkeypatch):
    """By a start that was killed while hashing, the next start and the workers together."""
    source, out = corpus(tmp_path / "in"), tmp_path / "out"
    data, read = DataConfig(source=str(source)), hashes.hash_file
    found: list[str] = []

    def killed_at_the_third(path, *how):
        if len(found) == 3:
            raise KeyboardInterrupt
        found.append(path.name)
        return read(path, *how)

    monkeypatch.setattr(hashes, "hash_file", killed_at_the_third)
    monkeypatch.setattr(prepare_plan, "AT_A_TIME", 1)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, byte_tokenizer, out, shard_bytes=3000)
    monkeypatch.setattr(
        hashes, "hash_file", lambda path, *how: found.append(path.name) or read(path, *how)
    )
    work = begin(data, byte_tokenizer, out, shard_bytes=3000)
    assert sorted(found) == sorted(path.name for path in source.iterdir())
    monkeypatch.setattr(os, "walk", None)  # nor is the source walked again
    again = Preparation(out)
    for number in range(len(work.jobs)):
        again.make(number)
    assert len(found) == 6
