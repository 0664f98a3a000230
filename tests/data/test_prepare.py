"""Preparing a token set: the same bytes for any number of workers, also after kills."""

import json
import multiprocessing
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import corpus, killed, sums

from nalanda.common import files
from nalanda.common.errors import DiskFull, InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data import prepare_plan, prepare_run
from nalanda.data.prepare import alone_in, begin, prepare
from nalanda.data.token_set import TokenSet, is_token_set


@pytest.mark.slow
def test_bytes_are_the_same_for_any_number_of_workers(tmp_path, byte_tokenizer):
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    prepare(data, byte_tokenizer, tmp_path / "one", shard_bytes=3000)
    prepare(data, byte_tokenizer, tmp_path / "three", shard_bytes=3000, workers=3)
    assert sums(tmp_path / "one") == sums(tmp_path / "three")
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".") or p.name == "preparing"]

    index = prepare(data, byte_tokenizer, tmp_path / "larger", shard_bytes=12000)
    one, larger = (TokenSet(tmp_path / name, "train") for name in ("one", "larger"))
    assert len(index["train"]["shards"]) < 10
    np.testing.assert_array_equal(one.read(0, one.tokens), larger.read(0, larger.tokens))
    (tmp_path / "one").rename(tmp_path / "moved")
    assert TokenSet(tmp_path / "moved", "train").identity == one.identity == open_three(tmp_path)
    assert TokenSet(tmp_path / "moved", "validation").identity != one.identity


def open_three(path: Path) -> str:
    return TokenSet(path / "three", "train").identity


def test_parts_of_a_file_in_one_group_are_read_at_once():
    parts = [prepare_plan.Unit("train", 0, "a", 10, start, start + 7) for start in range(0, 42, 7)]
    groups = prepare_plan.group_units([*parts, prepare_plan.Unit("train", 1, "b", 10)], 40)
    assert [
        [(unit.shard, unit.start, unit.stop, unit.weight) for unit in group] for group in groups
    ] == [[(0, 0, 28, 40)], [(0, 28, 42, 20), (1, 0, None, 10)]]


def test_a_shard_that_cannot_be_closed_is_removed(tmp_path):
    writer = prepare_run.ShardWriter(tmp_path / "00000", np.dtype("<u2"))

    class Full:
        def close(self):
            raise OSError(28, "No space left on device")

    writer.file.close()
    writer.file = Full()
    with pytest.raises(OSError, match="No space"):
        writer.abandon()
    assert not [*tmp_path.iterdir()]


@pytest.mark.sampled
@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6, 7, 24, 38, 39, 40, 50])  # 50: of the index
def test_resumes_after_a_kill(tmp_path, byte_tokenizer, place, monkeypatch):
    """Shards with a record are kept, the others are made, and the bytes are those of an undisturbed run."""
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    prepare(data, byte_tokenizer, tmp_path / "whole", shard_bytes=3000)
    out = tmp_path / "out"
    killed(place, lambda: prepare(data, byte_tokenizer, out, shard_bytes=3000))
    assert not is_token_set(out)
    with pytest.raises(InputError, match="does not exist"):
        TokenSet(out, "train")
    before = {p: p.stat().st_mtime_ns for p in out.glob("train/[0-9]*")}
    kept = len(list(out.glob("preparing/0*.json")))
    made = []
    close = prepare_run.ShardWriter.close
    monkeypatch.setattr(
        prepare_run.ShardWriter, "close", lambda self: made.append(self.path.name) or close(self)
    )
    index = prepare(data, byte_tokenizer, out, shard_bytes=3000)
    assert sums(out) == sums(tmp_path / "whole")
    assert len(set(made)) + kept == len(index["train"]["shards"])
    assert all(p.stat().st_mtime_ns == t for p, t in before.items() if p.stem not in made)


def test_a_set_below_its_source_resumes_and_is_no_text_of_it(tmp_path, byte_tokenizer):
    source = corpus(tmp_path / "in")
    data, whole, out = DataConfig(source=str(source)), source / "whole", source / "out"
    prepare(data, byte_tokenizer, whole, shard_bytes=3000)
    killed(24, lambda: prepare(data, byte_tokenizer, out, shard_bytes=3000))
    assert (out / "preparing" / "hashes.jsonl").exists()
    prepare(data, byte_tokenizer, out, shard_bytes=3000)
    assert sums(out) == sums(whole)


def test_a_record_without_its_file_is_ignored(tmp_path, byte_tokenizer):
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    prepare(data, byte_tokenizer, tmp_path / "whole", shard_bytes=3000)
    work = begin(data, byte_tokenizer, tmp_path / "out", shard_bytes=3000)
    for number in range(len(work.jobs) - 1):
        work.make(number)
    with pytest.raises(InputError, match=r"1 of .* shards are missing"):
        work.seal()
    tokens = tmp_path / "out/train/00001.tokens"
    os.truncate(tokens, tokens.stat().st_size - 2)
    assert work.record(1) is None
    prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=3000)
    assert sums(tmp_path / "out") == sums(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_worker_is_reported_and_finished_shards_stay(tmp_path, byte_tokenizer, capsys):
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    work = begin(data, byte_tokenizer, tmp_path / "out", shard_bytes=300)
    made = tmp_path / "out/preparing"

    def kill() -> None:
        while not list(made.glob("0*.json")):
            time.sleep(0.01)  # leaves the interpreter to the parent
        multiprocessing.active_children()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(InputError, match="was killed"):
        prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=300, workers=2)
    killer.join()
    assert 0 < len(list(made.glob("0*.json"))) < len(work.jobs)
    assert prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=300, say=print)
    assert "shards are finished already" in capsys.readouterr().out
    prepare(data, byte_tokenizer, tmp_path / "whole", shard_bytes=300)
    assert sums(tmp_path / "out") == sums(tmp_path / "whole")


def test_leftovers_of_killed_processes_go_and_other_files_stay(tmp_path, byte_tokenizer):
    data = DataConfig(source=str(corpus(tmp_path / "in", files=1)))
    begin(data, byte_tokenizer, tmp_path / "out")
    train = tmp_path / "out" / "train"
    for name in (".00000.123", ".00000.docs.123", ".hidden"):
        (train / name).touch()
    (train / ".checkpoints").mkdir()
    prepare(data, byte_tokenizer, tmp_path / "out")
    assert sorted(path.name for path in train.glob(".*")) == [".checkpoints", ".hidden"]


def test_refuses_changed_settings(tmp_path, byte_tokenizer):
    source = corpus(tmp_path / "in")
    data = DataConfig(source=str(source))
    out = tmp_path / "out"
    begin(data, byte_tokenizer, out, shard_bytes=3000)

    def refuse(key: str) -> None:
        words = TokenizerConfig(train="words")
        for changed, tokenizer, size, name in [
            (DataConfig(source=str(source), bos=False), byte_tokenizer, 3000, "bos"),
            (
                DataConfig(source=str(source), validation_share=0.3),
                byte_tokenizer,
                3000,
                "validation_share",
            ),
            (data, byte_tokenizer, 4000, "shard_bytes"),
            (data, words, 3000, "tokenizer"),
        ]:
            with pytest.raises(InputError, match=f"{out}: was prepared with {name}"):
                prepare(changed, tokenizer, out, shard_bytes=size)

    refuse("begun")
    prepare(data, byte_tokenizer, out, shard_bytes=3000)
    refuse("finished")
    before = sums(out)
    said = []
    prepare(data, byte_tokenizer, out, shard_bytes=3000, say=said.append)
    assert "prepared already" in said[0]
    assert sums(out) == before
    with pytest.raises(InputError, match="not empty and not a token set"):
        prepare(data, byte_tokenizer, source)
    with pytest.raises(InputError, match="token set already"):
        prepare(DataConfig(source=str(out)), byte_tokenizer, tmp_path / "again")


def test_refuses_another_tokenizer_under_the_same_name(tmp_path, tokenizer):
    data = DataConfig(source=str(corpus(tmp_path / "in", files=1)))
    config = TokenizerConfig(path=str(tmp_path / "tokenizer"))
    tokenizer.save_pretrained(config.path)
    begin(data, config, tmp_path / "out")
    file = tmp_path / "tokenizer/tokenizer.json"
    content = json.loads(file.read_bytes())
    content["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match="tokenizer: not the one in"):
        begin(data, config, tmp_path / "out")


def test_a_refused_first_try_leaves_nothing(tmp_path, byte_tokenizer):
    data, out = DataConfig(source=str(corpus(tmp_path / "in", files=1))), tmp_path / "out"
    named = re.escape(str(Path.home() / "no/such"))
    with pytest.raises(InputError, match=rf"tokenizer: {named} does not exist; give a folder"):
        prepare(data, TokenizerConfig(path="~/no/such"), out)
    assert not out.exists()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    with pytest.raises(InputError):
        prepare(data, TokenizerConfig(path=str(tmp_path / "broken")), out)
    assert not out.exists()
    prepare(data, byte_tokenizer, out)
    assert is_token_set(out)


def test_an_output_that_cannot_be_made_is_refused_before_a_tokenizer_is_trained(
    tmp_path, monkeypatch
):
    data = DataConfig(source=str(corpus(tmp_path / "in", files=1)))
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        "nalanda.data.prepare.build_tokenizer", lambda *_: pytest.fail("trained first")
    )
    with pytest.raises(InputError, match=r"^output .*/file/out: a file; name a folder"):
        prepare(data, TokenizerConfig(train="bpe"), tmp_path / "file" / "out")


def test_a_second_preparation_is_refused_in_one_line(tmp_path, byte_tokenizer):
    data, out = DataConfig(source=str(corpus(tmp_path / "in", files=1))), tmp_path / "out"
    with alone_in(out), pytest.raises(InputError) as error:
        prepare(data, byte_tokenizer, out)
    assert (
        str(error.value)
        == f"{out}: another process is preparing it; wait for it, or name another directory"
    )
    killed(3, lambda: prepare(data, byte_tokenizer, out))  # its lock ends with it
    prepare(data, byte_tokenizer, out)
    assert is_token_set(out)
    with pytest.raises(InputError, match="not empty"), alone_in(tmp_path / "in"):
        pass
    assert not (tmp_path / "in/preparing").exists()


def test_disk_full(tmp_path, byte_tokenizer, monkeypatch):
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    sync, left = files.sync, [24]

    def full(path):
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(DiskFull, match="no space left"):
        prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=3000)
    assert (
        prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=3000)["train"]["documents"]
        > 200
    )
