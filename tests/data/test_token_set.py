"""Token sets: their contents depend only on the settings, and damage is found."""

import copy
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nalanda.common import files
from nalanda.common.errors import DiskFull, InputError
from nalanda.config.load import load_config
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data import hashes, make_set, prepare_plan, prepare_run
from nalanda.data.corpus import DocumentStream, held_out, open_corpora
from nalanda.data.documents import READERS, Document, hash_text
from nalanda.data.inspect import check_set, inspect
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.prepare import alone_in, begin, prepare
from nalanda.data.prepare_run import Preparation
from nalanda.data.token_set import SumCheck, TokenSet, is_token_set
from nalanda.data.tokenizer import build_tokenizer, encoder, tokenizer_fingerprint
from nalanda_cli import app

NAMES = ["RedPajamaWikipedia", "RedPajamaC4", "RedPajamaBook"]


@pytest.fixture(scope="module")
def byte_tokenizer(tokenizer, tmp_path_factory) -> TokenizerConfig:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return TokenizerConfig(path=str(path))


def records(count: int, first: int = 0) -> list[dict]:
    return [
        {
            "text": f"document {i}, größer: " + "wörd " * (i * 7 % 40),
            "meta": {"redpajama_set_name": NAMES[i % len(NAMES)]},
        }
        for i in range(first, first + count)
    ]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def corpus(folder: Path, files: int = 6, rows: int = 50) -> Path:
    """.jsonl and .jsonl.gz, with a blank document and a blank line."""
    folder.mkdir(parents=True)
    for i in range(files):
        content = lines([*records(rows, i * rows), {"text": " \n"}]) + b"\n"
        name, content = (
            (f"{i}.jsonl.gz", gzip.compress(content)) if i % 2 else (f"{i}.jsonl", content)
        )
        (folder / name).write_bytes(content)
    return folder


def sums(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_documents_are_the_tokens_that_training_reads(tmp_path, tokenizer, byte_tokenizer):
    """Its documents are the tokens of `encoder`, in the files' order, split by `held_out`."""
    data = DataConfig(source=str(corpus(tmp_path / "in")), validation_share=0.2)
    index = prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=4000)
    assert is_token_set(tmp_path / "out")
    assert not is_token_set(tmp_path / "in")
    assert len(index["train"]["shards"]) > 6
    texts = records(300)
    encode = encoder(tokenizer, data)
    for split in ("train", "validation"):
        found = TokenSet(tmp_path / "out", split)
        meant = [r for r in texts if held_out(r["text"], 0.2) == (split == "validation")]
        assert found.documents == len(meant) > 20
        expected = encode([r["text"] for r in meant])
        for i, (record, tokens) in enumerate(zip(meant, expected, strict=True)):
            given, source = found.document(i)
            assert given.dtype == np.int32
            np.testing.assert_array_equal(given, tokens)
            assert source == record["meta"]["redpajama_set_name"]
        whole = np.concatenate(expected)
        np.testing.assert_array_equal(found.read(0, found.tokens), whole)
        starts = np.cumsum([0, *map(len, expected)])[:-1]
        np.testing.assert_array_equal(found.starts(0, found.tokens), starts)
        random = np.random.default_rng(0)
        for a, b in np.sort(random.integers(0, found.tokens + 1, (300, 2))):
            np.testing.assert_array_equal(found.read(a, b), whole[a:b])
            np.testing.assert_array_equal(found.starts(a, b), starts[(starts >= a) & (starts < b)])
        for a in starts[:50]:  # at the edges
            assert found.starts(a, a + 1) == [a]
            assert not len(found.starts(a + 1, a + 2))
            assert not len(found.starts(a, a))
        assert found.sources == sorted(NAMES)
        assert sum(tokens for _, tokens in found.by_source.values()) == found.tokens
        for name in NAMES:
            chosen = [len(t) for r, t in zip(meant, expected, strict=True) if name in str(r)]
            assert found.by_source[name] == (len(chosen), sum(chosen))
        assert index[split]["text_bytes"] == sum(len(r["text"].encode()) for r in meant)
        with pytest.raises(IndexError):
            found.read(0, found.tokens + 1)
        with pytest.raises(IndexError):
            found.document(found.documents)
    settings = TokenSet(tmp_path / "out", "train").settings
    assert settings["bos"] is settings["eos"] is True
    assert settings["tokenizer"] == tokenizer_fingerprint(tokenizer)
    assert (settings["vocab_size"], settings["dtype"]) == (257, "uint16")


def test_validation_reads_the_same_documents_of_texts_and_of_their_token_set(
    tmp_path, tokenizer, byte_tokenizer
):
    corpus(tmp_path / "in" / "train")
    corpus(tmp_path / "in" / "validation", rows=4)
    texts = DataConfig(source=str(tmp_path / "in"), seq_len=64, max_validation_rows=8)
    prepare(texts, byte_tokenizer, tmp_path / "out")
    tokens = DataConfig(source=str(tmp_path / "out"), seq_len=64, max_validation_rows=8)
    read, same = (validation_batches(data, tokenizer, batch_size=2) for data in (texts, tokens))
    assert read.keys() == same.keys()
    for source in read:
        pairs = zip(read[source], same[source], strict=True)
        assert all((a["input_ids"] == b["input_ids"]).all() for a, b in pairs)


def test_two_folders_of_equal_names_and_sizes_are_both_prepared(tmp_path, byte_tokenizer):
    for part, letter in (("a", "x"), ("b", "y")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "data.jsonl").write_bytes(lines([{"text": letter * 8}] * 20))
    data = DataConfig(source=str(tmp_path / "a"), validation_source=str(tmp_path / "b"))
    for _ in range(2):  # the second time it is finished
        index = prepare(data, byte_tokenizer, tmp_path / "out")
        assert [index[split]["documents"] for split in ("train", "validation")] == [20, 20]


def test_leftovers_of_killed_processes_go_and_other_files_stay(tmp_path, byte_tokenizer):
    data = DataConfig(source=str(corpus(tmp_path / "in", files=1)))
    begin(data, byte_tokenizer, tmp_path / "out")
    train = tmp_path / "out" / "train"
    for name in (".00000.123", ".00000.docs.123", ".hidden"):
        (train / name).touch()
    (train / ".checkpoints").mkdir()
    prepare(data, byte_tokenizer, tmp_path / "out")
    assert sorted(path.name for path in train.glob(".*")) == [".checkpoints", ".hidden"]


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


def test_parts_of_a_file_in_one_group_are_read_at_once():
    parts = [prepare_plan.Unit("train", 0, "a", 10, start, start + 7) for start in range(0, 42, 7)]
    groups = prepare_plan.group_units([*parts, prepare_plan.Unit("train", 1, "b", 10)], 40)
    assert [
        [(unit.shard, unit.start, unit.stop, unit.weight) for unit in group] for group in groups
    ] == [[(0, 0, 28, 40)], [(0, 28, 42, 20), (1, 0, None, 10)]]


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


def killed(place: int, work: Callable) -> None:
    """Runs `work` in a process that is killed before its `place`-th rename."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        return
    left = itertools.count(place, -1)

    def deadly(self: Path, target: Path, move: Callable) -> Path:
        if next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return move(self, target)

    try:
        for name in ("rename", "replace"):
            setattr(Path, name, partialmethod(deadly, move=getattr(Path, name)))
        work()
    finally:
        os._exit(1)


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


def test_a_killed_worker_is_reported_and_finished_shards_stay(tmp_path, byte_tokenizer, capsys):
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    work = begin(data, byte_tokenizer, tmp_path / "out", shard_bytes=300)
    made = tmp_path / "out/preparing"

    def kill() -> None:
        while not list(made.glob("0*.json")):
            pass
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


def content_of(folder: Path) -> dict[str, list]:
    """Tokens, document starts and sources of each split."""
    found = {}
    for split in ("train", "validation"):
        part = TokenSet(folder, split)
        starts = part.starts(0, part.tokens).tolist()
        found[split] = [part.read(0, part.tokens).tolist(), starts, part.by_source]
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
    state = PackedBatches(data, tokenizer, split="train", batch_size=1).state_dict()
    add_one(source)
    prepare(DataConfig(source=str(source)), byte_tokenizer, out)
    with pytest.raises(InputError, match="changed since the checkpoint was saved: corpus"):
        PackedBatches(data, tokenizer, split="train", batch_size=1).load_state_dict(state)


def test_a_set_of_an_earlier_version(tmp_path, byte_tokenizer):
    """Its index names no files: unchanged it is finished, and changed it is all made again."""
    source, out = corpus(tmp_path / "in", rows=20), tmp_path / "out"
    data = DataConfig(source=str(source), validation_share=0.2)
    index = prepare(data, byte_tokenizer, out, shard_bytes=1500)
    del index["records"], index["made"]
    (out / "index.json").write_text(json.dumps(index))
    before, said = sums(out), []
    prepare(data, byte_tokenizer, out, say=said.append)
    assert "prepared already" in said[-1]
    assert sums(out) == before
    mend_a_line(source)
    prepare(data, byte_tokenizer, out, say=said.append)
    assert any("its index names no files; all is made again" in line for line in said)
    prepare(data, byte_tokenizer, tmp_path / "fresh", shard_bytes=1500)
    assert content_of(out) == content_of(tmp_path / "fresh")
    prepare(data, byte_tokenizer, out, say=said.append)
    assert "prepared already" in said[-1]


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


@pytest.mark.parametrize("source", ["few", "one", "book.txt"])
def test_training_and_preparation_hold_the_same_out(tmp_path, tokenizer, byte_tokenizer, source):
    for name, count in (("few", 9), ("one", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(lines(records(count, 3)))
    (tmp_path / "book.txt").write_text(
        "".join(f"paragraph {i}\n\n" + "words " * 700 for i in range(20))
    )
    data = DataConfig(
        source=str(tmp_path / source), validation_share=1e-9 if source == "few" else 0.02
    )
    said: list[str] = []
    prepare(data, byte_tokenizer, tmp_path / "out", say=said.append)
    encode = encoder(tokenizer, data)
    for split, opened in open_corpora(data).items():
        assert opened.note in said
        assert opened.note
        opened.ordered = True
        texts = DocumentStream(opened, seed=0, buffer_size=0, epochs=1).texts()
        expected = np.concatenate(encode(list(texts)))
        found = TokenSet(tmp_path / "out", split)
        np.testing.assert_array_equal(found.read(0, found.tokens), expected)


def test_the_next_line_fits_the_set(tmp_path, monkeypatch):
    monkeypatch.setenv("NALANDA_NEXT_STEPS", "1")
    (tmp_path / "book.txt").write_text(
        "".join(f"some words of paragraph {i}\n\n" for i in range(9))
    )
    arguments = [
        "data",
        "prepare",
        str(tmp_path / "book.txt"),
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    done = CliRunner().invoke(app, [*arguments, "--vocab-size", "300", "--no-bos"])
    assert done.exit_code == 0
    assert "book.txt: 1 document, its last 2 % are held out for validation" in done.output
    (line,) = [line for line in done.output.splitlines() if "nalanda train demo" in line]
    assert "data.bos=false" in line
    assert "validation.every" not in line
    assert "data.eos" not in line
    settings = [word for word in line.split() if "=" in word]
    config = load_config("demo", settings)
    tokenizer = build_tokenizer(config.tokenizer, config.data, tmp_path / "tokenizer")
    config.data.seq_len = 4
    assert validation_batches(config.data, tokenizer, batch_size=1)


def test_a_second_text_ends_the_cut_of_the_first(tmp_path, byte_tokenizer):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("".join(f"words of paragraph {i}\n\n" for i in range(2000)))
    data = DataConfig(source=str(tmp_path / "in"), validation_share=0.3)
    assert prepare(data, byte_tokenizer, tmp_path / "out")["train"]["documents"] > 1
    (tmp_path / "in/b.txt").write_text("another text")
    index = prepare(data, byte_tokenizer, tmp_path / "out")
    assert [index[split]["documents"] for split in ("train", "validation")] == [1, 1]


def test_a_refused_first_try_leaves_nothing(tmp_path, byte_tokenizer):
    data, out = DataConfig(source=str(corpus(tmp_path / "in", files=1))), tmp_path / "out"
    with pytest.raises(InputError, match=r"tokenizer: ~/no/such does not exist; give a folder"):
        prepare(data, TokenizerConfig(path="~/no/such"), out)
    assert not out.exists()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    with pytest.raises(InputError):
        prepare(data, TokenizerConfig(path=str(tmp_path / "broken")), out)
    assert not out.exists()
    prepare(data, byte_tokenizer, out)
    assert is_token_set(out)


def test_half_a_surrogate_as_a_source(tmp_path, byte_tokenizer):
    rows = [{**record, "meta": {"redpajama_set_name": "\ud800"}} for record in records(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = prepare(DataConfig(source=str(tmp_path / "a.jsonl")), byte_tokenizer, tmp_path / "out")
    assert index["sources"] == ["?"]
    assert TokenSet(tmp_path / "out", "train").sources == ["?"]


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
    monkeypatch.setattr(prepare_plan, "HASHING", 1)
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


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("workers", [1, 2])
def test_documents_that_are_too_large(tmp_path, byte_tokenizer, capsys, suffix, workers):
    """A file that is cut into shards, with long lines across the cuts, and one that cannot be cut."""
    rows = records(60)
    for i in (20, 21, 59):
        rows[i]["text"] = "x" * 5000
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(gzip.compress(lines(rows)) if suffix else lines(rows))
    data = DataConfig(source=str(path), validation_share=0.1, max_document_bytes=1000)
    with pytest.raises(
        InputError, match=r"in\.jsonl.*, line (21|60): a document of more than 1,000 bytes"
    ):
        prepare(data, byte_tokenizer, tmp_path / "refused", shard_bytes=900, workers=workers)
    data.oversized = "skip"
    index = prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=900, workers=workers)
    assert index["skipped"] == 3
    kept = [r for r in rows if len(r["text"]) < 1000 and not held_out(r["text"], 0.1)]
    found = TokenSet(tmp_path / "out", "train")
    assert [bytes_of(found.document(i)[0]) for i in range(found.documents)] == [
        r["text"] for r in kept
    ]
    capsys.readouterr()
    inspect(tmp_path / "out", verify=True)
    shown = capsys.readouterr().out
    assert "3 documents of more than 1,000 bytes were left out (data.oversized: skip)" in shown
    data.max_document_bytes = 2000
    with pytest.raises(
        InputError, match="was prepared with max_document_bytes 1000, and this is 2000"
    ):
        prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=900)


@pytest.mark.parametrize("workers", [1, 2])
def test_corrupt_input_is_named_and_the_rest_prepared(tmp_path, byte_tokenizer, workers, capsys):
    source = corpus(tmp_path / "in")
    content = (source / "2.jsonl").read_bytes().splitlines(keepends=True)
    (source / "2.jsonl").write_bytes(b"".join([*content[:30], b'{"text": "cut\n', *content[31:]]))
    data, out = DataConfig(source=str(source)), tmp_path / "out"
    with pytest.raises(
        InputError, match=r"2\.jsonl, line 31: not JSON.* shards are finished and kept"
    ) as error:
        prepare(data, byte_tokenizer, out, shard_bytes=1500, workers=workers)
    assert "\n" not in str(error.value)
    assert "2.jsonl, line 31" in capsys.readouterr().err
    jobs = len(Preparation(out).jobs)
    assert len(list(out.glob("preparing/0*.json"))) == jobs - 1
    assert not is_token_set(out)


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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_damage_is_found(tmp_path, byte_tokenizer, capsys):
    data, out = DataConfig(source=str(corpus(tmp_path / "in", files=2))), tmp_path / "out"
    index = prepare(data, byte_tokenizer, out, shard_bytes=3000)
    inspect(out, verify=True, samples=2)
    shown = capsys.readouterr().out
    assert "RedPajamaWikipedia" in shown
    assert "document 0, größer" in shown
    names = [
        f"{split}/{shard['name']}.{kind}"
        for split in ("train", "validation")
        for shard in index[split]["shards"]
        for kind in ("tokens", "docs")
    ]
    for name in [names[0], names[3], names[-1]]:
        content = (out / name).read_bytes()
        flip(out / name)
        check_set(out)
        with pytest.raises(InputError, match=f"{name}: damaged"):
            check_set(out, sums=True)
        for cut in (content[:-1], content + b"\0", b""):
            (out / name).write_bytes(cut)
            with pytest.raises(InputError, match=f"{name}: .* bytes, and"):
                TokenSet(out, name.split("/")[0])
            with pytest.raises(InputError, match=f"{name}: .* bytes, and"):
                check_set(out)
        (out / name).unlink()
        with pytest.raises(InputError, match=name):
            TokenSet(out, name.split("/")[0])
        (out / name).write_bytes(content)
    check_set(out, sums=True)
    flip(out / names[0])
    flip(out / names[1])
    with pytest.raises(InputError, match="and 1 more"):
        inspect(out, verify=True)
    assert f"{names[1]}: damaged" in capsys.readouterr().out
    (out / "index.json").write_text('{"format": "nalanda token shards", "ver')
    with pytest.raises(InputError, match="damaged"):
        TokenSet(out, "train")


def times_ten(index: dict, split: str, key: str) -> None:
    index[split][key] *= 10


def shard_times_ten(index: dict, split: str, key: str) -> None:
    """In the shard, its sources and the split."""
    index[split]["shards"][0][key] *= 10
    index[split][key] += index[split]["shards"][0][key] * 9 // 10


def sources_times_ten(index: dict, split: str, key: str) -> None:
    place = ("documents", "tokens").index(key)
    for counts in index[split]["shards"][0]["sources"].values():
        counts[place] *= 10


def last_digit_of_size(index: dict, split: str, key: str) -> None:
    index[split]["shards"][0]["files"]["docs"][0] += 1


def other_vocabulary(index: dict, split: str, key: str) -> None:
    index["tokenizer"]["vocab_size"] -= 200


@pytest.mark.parametrize("key", ["documents", "tokens"])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    "harm", [times_ten, shard_times_ten, sources_times_ten, last_digit_of_size]
)
def test_an_index_that_contradicts_itself_is_refused(prepared_set, split, key, harm):
    file = prepared_set / "index.json"
    index = json.loads(file.read_bytes())
    harm(index, split, key)
    file.write_text(json.dumps(index))
    for read in (lambda: inspect(prepared_set, verify=True), lambda: TokenSet(prepared_set, split)):
        with pytest.raises(
            InputError, match=r"index\.json: damaged, it contradicts itself .*copy or prepare"
        ):
            read()


@pytest.mark.parametrize("missing", ["dtype", "tokenizer", "train", "sources", "version"])
def test_an_index_that_lacks_something_is_refused(prepared_set, missing):
    file = prepared_set / "index.json"
    index = json.loads(file.read_bytes())
    del index[missing]
    file.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index\.json: (damaged|version None)"):
        inspect(prepared_set, verify=True)


@pytest.fixture
def prepared_set(tmp_path, byte_tokenizer) -> Path:
    data = DataConfig(source=str(corpus(tmp_path / "in", files=2)), validation_share=0.2)
    prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=3000)
    return tmp_path / "out"


def with_its_sums(
    folder: Path, file: Path, change: Callable[[np.ndarray], None], dtype: str
) -> None:
    """Changes a file and the index's sum of it, so that only the contents are wrong."""
    content = np.fromfile(file, dtype)
    change(content)
    content.tofile(file)
    index = json.loads((folder / "index.json").read_bytes())
    (shard,) = [s for s in index[file.parent.name]["shards"] if s["name"] == file.stem]
    shard["files"][file.suffix[1:]][1] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))


def put(place: int, value: int) -> Callable[[np.ndarray], None]:
    return lambda content: content.__setitem__(place, value)


def test_ids_beyond_the_vocabulary_are_refused_where_they_are_read(prepared_set, tokenizer):
    file = prepared_set / "train/00001.tokens"
    with_its_sums(prepared_set, file, put(17, 257), "<u2")
    found = TokenSet(prepared_set, "train")
    first = found._shards[0].tokens
    found.read(0, first + 17)
    message = r"train/00001\.tokens: damaged, token 17 is 257, in a vocabulary of 257"
    for read in (
        lambda: found.read(first, first + 32),
        lambda: [found.document(number) for number in range(found.documents)],
        lambda: check_set(prepared_set, sums=True),
    ):
        with pytest.raises(InputError, match=message):
            read()
    index = json.loads((prepared_set / "index.json").read_bytes())
    other_vocabulary(index, "train", "")
    (prepared_set / "index.json").write_text(json.dumps(index))
    data = DataConfig(source=str(prepared_set), seq_len=16)
    with pytest.raises(InputError, match="its vocab_size is 57 and the tokenizer has 257"):
        PackedBatches(data, tokenizer, split="train", batch_size=1)


@pytest.mark.parametrize(("place", "value"), [(3, 0), (3, 1 << 40), (-1, 5), (-1, 1 << 40)])
def test_documents_that_do_not_follow_one_another_are_refused(prepared_set, place, value):
    file = prepared_set / "train/00001.docs"
    count = json.loads((prepared_set / "index.json").read_bytes())["train"]["shards"][1][
        "documents"
    ]

    def change(content: np.ndarray) -> None:
        content[: 8 * count].view("<i8")[place] = value

    with_its_sums(prepared_set, file, change, "u1")
    found = TokenSet(prepared_set, "train")
    message = r"train/00001\.docs: damaged, its documents do not follow one another"
    with pytest.raises(InputError, match=message):
        check_set(prepared_set, sums=True)
    with pytest.raises(InputError, match=message):
        [found.document(number) for number in range(found.documents)]
    with pytest.raises(InputError, match=message):
        found.starts(0, found.tokens)


def test_sums_are_compared_in_a_thread(prepared_set):
    files = TokenSet(prepared_set, "train").files
    beats = []
    assert SumCheck(files).wait(lambda: beats.append(1)) is None
    flip(files[3].path)
    assert f"{files[3].path}: damaged, its SHA-256" in (SumCheck(files).wait() or "")


def test_a_tokenizer_that_was_exchanged_is_found(tmp_path, byte_tokenizer):
    data, out = DataConfig(source=str(corpus(tmp_path / "in", files=1))), tmp_path / "out"
    prepare(data, byte_tokenizer, out)
    file = out / "tokenizer/tokenizer.json"
    file.write_text(file.read_text().replace('"Ġ"', '"ĠĠ"'))
    with pytest.raises(InputError, match="not the tokenizer that the index names"):
        check_set(out, sums=True)


def test_slimpajamas_layout(tmp_path, byte_tokenizer):
    for part, rows in {"train": 40, "validation": 7, "test": 5}.items():
        corpus(tmp_path / "in" / part / "chunk1", files=2, rows=rows)
    index = prepare(DataConfig(source=str(tmp_path / "in")), byte_tokenizer, tmp_path / "out")
    assert [index[split]["documents"] for split in ("train", "validation")] == [80, 14]
    assert "test" not in index
    assert index["train"]["shards"][0]["name"] == "00000"
    assert "validation_share" not in index["settings"]


def test_a_huge_file_is_cut(tmp_path, byte_tokenizer):
    """Every line once, for cuts inside a line, inside a character and at a line's end."""
    rows = records(60)
    (tmp_path / "in.jsonl").write_bytes(lines(rows)[:-1])  # the last line has no end
    data = DataConfig(source=str(tmp_path / "in.jsonl"), validation_share=0.1)
    rows = [r for r in rows if not held_out(r["text"], 0.1)]
    sizes = np.cumsum([len(lines([r])) for r in records(60)])
    for limit in (97, 101, 1000, int(sizes[9]), int(sizes[9]) - 1, int(sizes[9]) + 1):
        out = tmp_path / f"out{limit}"
        index = prepare(data, byte_tokenizer, out, shard_bytes=limit)
        found = TokenSet(out, "train")
        assert found.documents == len(rows)
        given = [bytes_of(found.document(i)[0]) for i in range(found.documents)]
        assert given == [r["text"] for r in rows]
    assert len(index["train"]["shards"]) > 5


def bytes_of(tokens: np.ndarray) -> str:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    of = {chr(b): b for b in plain}
    of |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in plain)}
    return bytes(of[alphabet[t - 1]] for t in tokens[1:-1]).decode()


def test_a_huge_file_is_read_by_a_plugins_reader(tmp_path, byte_tokenizer, tokenizer, monkeypatch):
    def read(path, fields, start):
        for row, line in enumerate(path.read_text().splitlines(), 1):
            if row > start:
                yield Document(json.loads(line)["answer"]), row

    monkeypatch.setitem(READERS, ".chat.jsonl", read)
    rows = [
        {"text": f"question {i}", "answer": f"answer {i}" + " and so on" * 40} for i in range(90)
    ]
    (tmp_path / "a.chat.jsonl").write_bytes(lines(rows))
    prepare(
        DataConfig(source=f"{tmp_path}/*.jsonl"), byte_tokenizer, tmp_path / "out", shard_bytes=3000
    )
    found = TokenSet(tmp_path / "out", "train")
    assert found.documents > 80
    assert all("answer" in tokenizer.decode(found.document(i)[0]) for i in range(found.documents))


def test_a_huge_file_names_its_line(tmp_path, byte_tokenizer):
    rows = lines(records(60)).splitlines(keepends=True)
    rows[47] = b'{"txt": "no text"}\n'
    (tmp_path / "in.jsonl").write_bytes(b"".join([*rows[:20], b"\n", *rows[20:]]))
    with pytest.raises(InputError, match=r"in\.jsonl, line 49: no field 'text'"):
        prepare(
            DataConfig(source=str(tmp_path / "in.jsonl")),
            byte_tokenizer,
            tmp_path / "out",
            shard_bytes=500,
        )


def test_parquet_by_row_groups(tmp_path, byte_tokenizer):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    table = pyarrow.Table.from_pylist(records(90))
    parquet.write_table(table, tmp_path / "in/a.parquet", row_group_size=20)
    parquet.write_table(table, tmp_path / "in/b.parquet")
    data = DataConfig(source=str(tmp_path / "in"))
    index = prepare(data, byte_tokenizer, tmp_path / "cut", shard_bytes=600)
    assert len(index["train"]["shards"]) == 6
    cut = TokenSet(tmp_path / "cut", "train")
    prepare(data, byte_tokenizer, tmp_path / "whole")
    whole = TokenSet(tmp_path / "whole", "train")
    np.testing.assert_array_equal(cut.read(0, cut.tokens), whole.read(0, whole.tokens))
    assert (
        whole.documents
        == cut.documents
        == 2 * sum(not held_out(r["text"], 0.02) for r in records(90))
    )


def test_large_vocabularies_have_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, "small": 2, "large": 70_000}
    words |= {f"w{i}": i for i in range(3, 70_000)}
    backend = Tokenizer(models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    wrapped.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "in.jsonl").write_bytes(
        lines([{"text": f"small large w65536 {i}"} for i in range(60)])
    )
    data = DataConfig(source=str(tmp_path / "in.jsonl"), bos=False)
    config = TokenizerConfig(path=str(tmp_path / "tokenizer"))
    index = prepare(data, config, tmp_path / "out")
    found = TokenSet(tmp_path / "out", "train")
    assert (index["dtype"], found.settings["vocab_size"]) == ("uint32", 70_001)
    assert found.document(7)[0].tolist() == [2, 70_000, 65_536, 0, 1]
    assert found.sources == [""]


def test_documents_without_tokens_are_left_out(tmp_path):
    """Blank documents are not read; one whose words all vanish has no tokens and no start."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, "<unk>"))
    backend.normalizer = normalizers.Replace("gone", "")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(
        tmp_path / "tokenizer"
    )
    texts = ["gone", "a a", "gone gone", " ", "a", "gone"]
    (tmp_path / "in.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    data = DataConfig(
        source=str(tmp_path / "in.jsonl"), bos=False, eos=False, validation_share=1e-9
    )
    prepare(data, TokenizerConfig(path=str(tmp_path / "tokenizer")), tmp_path / "out")
    found = TokenSet(tmp_path / "out", "train")
    lowest = min(texts[:3] + texts[4:], key=hash_text)
    left = [words for text in texts if text != lowest and (words := text.count("a"))]
    assert (found.documents, found.tokens) == (len(left), sum(left))
    assert found.starts(0, found.tokens).tolist() == [0, *itertools.accumulate(left)][:-1]
    if lowest.startswith("gone"):
        with pytest.raises(InputError, match="no documents for validation"):
            TokenSet(tmp_path / "out", "validation")


def test_an_empty_corpus_is_refused(tmp_path, byte_tokenizer):
    (tmp_path / "in.jsonl").write_bytes(lines([{"text": " "}]))
    with pytest.raises(InputError, match="no document with text"):
        prepare(DataConfig(source=str(tmp_path / "in.jsonl")), byte_tokenizer, tmp_path / "out")
    assert not is_token_set(tmp_path / "out")


def test_joined_documents_are_refused_before_the_work(tmp_path, byte_tokenizer):
    data = DataConfig(source="python", documents="joined", bos=False)
    with pytest.raises(InputError, match=r"data\.documents: joined is read as text"):
        prepare(data, byte_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_eos_of_the_same_vocabulary_is_refused(tmp_path, tokenizer, byte_tokenizer):
    source = str(corpus(tmp_path / "in", files=1))
    data = DataConfig(source=source, validation_share=0.3, seq_len=16, workers=0)
    prepare(data, byte_tokenizer, tmp_path / "out")
    data.source = str(tmp_path / "out")
    other = copy.deepcopy(tokenizer)
    other.eos_token = "a"
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)
    file = tmp_path / "out/index.json"
    index = json.loads(file.read_bytes())
    assert index["tokenizer"].keys() == {"fingerprint", "vocab_size", "bos", "eos"}
    del index["tokenizer"]["bos"], index["tokenizer"]["eos"]
    for _ in ("in the index", "in the tokenizer beside it"):
        PackedBatches(data, tokenizer, split="train", batch_size=2)
        with pytest.raises(
            InputError, match=r"its eos is token 0, and the tokenizer's is \d+; set tokenizer"
        ):
            PackedBatches(data, other, split="train", batch_size=2)
        with pytest.raises(InputError, match="its eos is token 0"):
            validation_batches(data, other, batch_size=2)
        file.write_text(json.dumps(index))  # as earlier versions wrote it


def test_no_password_or_signature_is_stored(tmp_path, byte_tokenizer, server):
    server.files["a.jsonl"] = lines(records(60))
    url, out = (
        server.url("a.jsonl").replace("//", "//me:geheim@") + "?sig=geheim&part=1",
        tmp_path / "out",
    )
    data = DataConfig(source=[url])
    begin(data, byte_tokenizer, out)
    stored = [path for path in out.rglob("*") if path.is_file() and "geheim" in path.read_text()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in stored] == [("urls.json", 0o600)]
    server.faults["a.jsonl"] = ["404"]
    with pytest.raises(InputError, match="404"):
        prepare(data, byte_tokenizer, out)
    assert not stored[0].exists()
    data.source = [url.replace("sig=geheim", "sig=anew")]
    prepare(data, byte_tokenizer, out, workers=2)
    assert not [
        path for path in out.rglob("*") if path.is_file() and b"geheim" in path.read_bytes()
    ]
    index = json.loads((out / "index.json").read_bytes())
    index["settings"]["source"] = [url]  # as earlier versions stored it
    (out / "index.json").write_text(json.dumps(index))
    said = []
    prepare(data, byte_tokenizer, out, say=said.append)
    assert "prepared already" in said[-1]
    data.source = [url.replace("part=1", "part=2")]
    with pytest.raises(InputError, match="was prepared with") as caught:
        prepare(data, byte_tokenizer, out)
    assert "geheim" not in str(caught.value)


def test_options_change_a_recipes_tokenizer_and_keep_the_rest(
    tmp_path, monkeypatch, byte_tokenizer
):
    recipe = tmp_path / "recipe.yaml"
    text = "model: {}\ntrain: {steps: 1, tokens_per_step: 2048, micro_batch_size: 1}\ndata: {source: python}\n"

    def made(tokenizer: str, **asked) -> TokenizerConfig:
        recipe.write_text(f"{text}output_dir: {tmp_path}/run\ntokenizer: {tokenizer}\n")
        found = []
        monkeypatch.setattr(
            make_set, "prepare", lambda data, config, *_, **__: found.append(config)
        )
        make_set.make_token_set(str(recipe), str(tmp_path / "out"), data={}, tokenizer=asked)
        return found[0]

    words = "{train: words, min_count: 3, mask: true}"
    kept = TokenizerConfig(train="words", min_count=3, mask=True, vocab_size=500)
    assert made(words, vocab_size=500, path=None) == kept
    assert made(words, path="mistral") == TokenizerConfig(path="mistral")
    assert made(words, train="bpe") == TokenizerConfig(train="bpe")
    assert made("mistral", train="words") == TokenizerConfig(train="words")
    with pytest.raises(InputError, match="vocab_size is 500; only a trained one has a size"):
        made("mistral", vocab_size=500).check()


def test_more_shards_than_files_may_be_open(tmp_path, byte_tokenizer):
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=200)
    found = TokenSet(tmp_path / "out", "train")
    assert len(found._shards) > 100
    whole, starts = found.read(0, found.tokens), found.starts(0, found.tokens)
    for _ in range(2):
        for i in range(0, found.tokens, 97):
            assert (found.read(i, i + 1) == whole[i]).all()
    handles = [
        os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
    ]
    assert 0 < sum(str(tmp_path) in name for name in handles) <= 100
    wrong = []

    def read(seed: int) -> None:
        for a, b in np.sort(np.random.default_rng(seed).integers(0, found.tokens, (100, 2))):
            if (found.read(a, b) != whole[a:b]).any() or len(found.starts(a, b)) != (
                np.searchsorted(starts, b) - np.searchsorted(starts, a)
            ):
                wrong.append((a, b))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_command_trains_a_tokenizer_and_takes_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = CliRunner()
    source = corpus(tmp_path / "in")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}/run\nmodel: {{}}\n"
        "train: {steps: 1, tokens_per_step: 64, micro_batch_size: 1}\n"
        f"tokenizer: {{train: bpe, vocab_size: 300}}\ndata: {{source: {source}, seq_len: 64}}\n"
    )
    done = run.invoke(app, ["data", "prepare", str(recipe), str(tmp_path / "a"), "--workers", "1"])
    assert done.exit_code == 0
    assert "RedPajamaWikipedia" in done.output
    assert "300 tokens" in done.output
    arguments = [
        "data",
        "prepare",
        str(source),
        str(tmp_path / "b"),
        "--vocab-size",
        "300",
        "--workers",
        "2",
    ]
    assert run.invoke(app, arguments).exit_code == 0
    assert sums(tmp_path / "a") == sums(tmp_path / "b")
    arguments = ["data", "prepare", str(recipe), str(tmp_path / "a"), "--no-eos"]
    assert "was prepared with eos true, and this is false" in str(
        run.invoke(app, arguments).exception
    )
    for option in (["--tokenizer", "x"], ["--bos"]):
        arguments = [
            "data",
            "prepare",
            str(tmp_path / "a"),
            str(tmp_path / "m"),
            "--format=megatron",
        ]
        refused = run.invoke(app, [*arguments, *option]).exception
        assert str(refused) == f"{option[0]}: a prepared set is written as it is; leave it out"
    flip(tmp_path / "a/train/00000.tokens")
    assert run.invoke(app, ["data", "inspect", str(tmp_path / "a"), "--show", "1"]).exit_code == 0
    damaged = run.invoke(app, ["data", "inspect", str(tmp_path / "a"), "--verify"]).exception
    assert isinstance(damaged, InputError)
    assert "train/00000.tokens: damaged" in str(damaged)
