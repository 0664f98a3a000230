"""A resume needs the files that were read as they were; those that come later may have changed."""

import copy
import dataclasses
import itertools
import json
import pickle
import threading
from collections import Counter
from pathlib import Path

import pytest

from nalanda.common.errors import InputError
from nalanda.config.schema import Component, DataConfig
from nalanda.data import corpus, hashes, packing
from nalanda.data.hashes import FileHashes
from nalanda.data.loader import PackedBatches, validation_files
from nalanda.data.sources import Sources

EACH = 20
"""Documents of a file. A document is six characters, so with bos and eos it is a row of 8 tokens."""


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Ten documents, and twenty, so a file is several groups."""
    monkeypatch.setattr(packing, "STREAM_GROUP", 60)
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 120)


def texts(name: str, version: int = 0, count: int = EACH) -> list[str]:
    return [f"{name}{version}{i:04d}"[:6].ljust(6, "-") for i in range(count)]


def write(folder: Path, name: str, lines: list[str | None]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in "abcdef":
        write(tmp_path / "in", name, texts(name))
    return tmp_path / "in"


def settings(source: Path, **others) -> DataConfig:
    keys = {
        "source": str(source),
        "validation_share": 1e-9,
        "seq_len": 8,
        "shuffle_buffer": 0,
        "workers": 0,
    }
    return DataConfig(**keys | others)


def opened(data: DataConfig, tokenizer, **others) -> PackedBatches:
    keys = {"batch_size": 1, "epochs": 2, "seed": 1, "hashes": FileHashes()}
    return PackedBatches(data, tokenizer, **keys | others)


def given(batches: PackedBatches, tokenizer, count: int | None = None) -> list[str]:
    """The documents of the next rows."""
    rows = [
        row for batch in itertools.islice(batches, count) for row in batch["input_ids"].tolist()
    ]
    return [tokenizer.decode(row[1:-1]) for row in rows]


def saved(batches: PackedBatches, *, hashed: bool = True) -> dict:
    """The state once all files are hashed, or none, as a file would hold it."""
    batches.close()
    state = batches.state_dict()
    for files in batches.files.values():
        for number in range(len(files.names)):
            files.hashes[number] = files.find(number) if hashed else ""
    return json.loads(json.dumps(state))


def epoch_order(batches: PackedBatches, state: dict) -> tuple[list[str], list[str], list[str]]:
    """Names of the files that were read, that are read in part, and that are still to be read."""
    files, documents = state["files"][""], state["documents"]
    stream = batches.source.stream()
    stream.load_state_dict(documents)
    order = documents.get("order") or stream.permutation(len(files["names"]))
    names = [files["names"][number] for number in order]
    reached, cursor, _ = documents["end"]
    reached = len(names) if reached < 0 else reached
    begun = cursor is not None
    return names[:reached], names[reached : reached + begun], names[reached + begun :]


# ------------------------------ what comes later


@pytest.mark.sampled
@pytest.mark.parametrize("buffer", [0, 7])
@pytest.mark.parametrize("at", [25, 47, 70])
def test_files_that_come_later_may_change_go_and_join(folder, tokenizer, buffer, at):
    """The rest of the epoch is what is there and was not read; the next epoch is all that is there."""
    data = settings(folder, shuffle_buffer=buffer)
    batches = opened(data, tokenizer)
    first = given(batches, tokenizer, at)
    state = saved(batches)
    read, begun, ahead = epoch_order(batches, state)
    assert len(begun) == 1
    assert len(ahead) >= 1

    write(folder, ahead[0][0], texts(ahead[0][0], 1, EACH + 5))  # another size
    gone = ahead[1:2]
    for name in gone:
        (folder / name).unlink()
    for name in "xy":
        write(folder, name, texts(name))
    if read:
        (folder / read[0]).rename(folder / f"z{read[0]}")

    resumed = opened(data, tokenizer)
    resumed.load_state_dict(state)
    removed = ", 1 removed" * len(gone)
    assert resumed.changes == [
        f"data: 1 file changed, 2 added{removed} ahead of where the run stopped"
    ]
    rest = given(resumed, tokenizer)
    old = [text for name in [*read, *begun] for text in texts(name[0])]
    kept = [text for name in ahead[2:] for text in texts(name[0])]
    new = [*texts(ahead[0][0], 1, EACH + 5), *kept, *texts("x"), *texts("y")]
    whole = len(old) + len(new)
    assert Counter(first + rest[: whole - at]) == Counter(old + new)
    assert Counter(rest[whole - at :]) == Counter(old + new)

    again = opened(data, tokenizer, world_size=1, batch_size=2)
    again.load_state_dict(state)
    assert given(again, tokenizer) == rest[: len(rest) // 2 * 2]


def test_any_number_of_ranks_goes_on_alike(folder, tokenizer):
    data = settings(folder)
    batches = opened(data, tokenizer)
    given(batches, tokenizer, 30)
    state = saved(batches)
    write(folder, "x", texts("x"))
    alone = opened(data, tokenizer, batch_size=2)
    alone.load_state_dict(state)
    ranks = [opened(data, tokenizer, rank=rank, world_size=2, hashes=None) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(alone.position, checked=True)
        assert "files" not in rank.state_dict()
    shared = zip(*(given(rank, tokenizer) for rank in ranks), strict=True)
    assert [*itertools.chain(*shared)] == given(alone, tokenizer)


def test_a_listing_may_change_twice_within_an_epoch(folder, tokenizer):
    data = settings(folder)
    batches = opened(data, tokenizer)
    got = given(batches, tokenizer, 30)
    for name in "xy":
        state = saved(batches)
        write(folder, name, texts(name))
        batches = opened(data, tokenizer)
        batches.load_state_dict(state)
        got += given(batches, tokenizer, 25)
    got += given(batches, tokenizer, 8 * EACH - len(got))
    assert Counter(got) == Counter(text for name in "abcdefxy" for text in texts(name))
    assert "order" in saved(batches)["documents"]
    got = given(batches, tokenizer, 8 * EACH)
    assert Counter(got) == Counter(text for name in "abcdefxy" for text in texts(name))
    assert "order" not in saved(batches)["documents"]


def test_nothing_joins_an_epoch_whose_last_file_was_read(folder, tokenizer):
    """The buffer is being emptied. Another file would change which document comes next."""
    data = settings(folder, shuffle_buffer=30)
    batches = opened(data, tokenizer)
    whole = given(opened(data, tokenizer, epochs=1), tokenizer)
    first = given(batches, tokenizer, 6 * EACH - 15)
    state = saved(batches)
    write(folder, "x", texts("x"))
    resumed = opened(data, tokenizer)
    resumed.load_state_dict(state)
    rest = given(resumed, tokenizer)
    assert first + rest[:15] == whole
    assert Counter(rest[15:]) == Counter(text for name in "abcdefx" for text in texts(name))


def test_the_same_listing_moves_nothing(folder, tokenizer):
    data = settings(folder, shuffle_buffer=7)
    whole = given(opened(data, tokenizer), tokenizer)
    batches = opened(data, tokenizer)
    first = given(batches, tokenizer, 50)
    state = saved(batches)
    assert "order" not in state["documents"]
    resumed = opened(data, tokenizer)
    resumed.load_state_dict(state)
    assert resumed.changes == []
    assert first + given(resumed, tokenizer) == whole


def test_another_token_for_eos_makes_other_rows(folder, tokenizer):
    """The tokenizer's fingerprint is the same then."""
    batches = opened(settings(folder), tokenizer)
    given(batches, tokenizer, 5)
    state, other = saved(batches), copy.deepcopy(tokenizer)
    other.eos_token = "a"
    opened(settings(folder), tokenizer).load_state_dict(state)
    with pytest.raises(InputError, match="eos"):
        opened(settings(folder), other).load_state_dict(state)


def test_files_of_one_document_each(tmp_path, tokenizer):
    for i, text in enumerate(texts("a", count=60)):
        (tmp_path / f"{i:02}.txt").write_text(text)
    data = settings(tmp_path)
    batches = opened(data, tokenizer)
    first = given(batches, tokenizer, 25)
    state = saved(batches)
    read, _, ahead = epoch_order(batches, state)
    (tmp_path / ahead[0]).write_text("longer--longer")
    (tmp_path / "new.txt").write_text("new---")
    resumed = opened(data, tokenizer)
    resumed.load_state_dict(state)
    rest = given(resumed, tokenizer)
    assert rest.count("new---") == 2
    assert not set(first) & set(rest[:34])
    (tmp_path / read[0]).write_text("other-")
    with pytest.raises(
        InputError, match=f"{read[0]}: other content than when the checkpoint was saved"
    ):
        opened(data, tokenizer).load_state_dict(state)


def test_a_component_of_a_mixture_may_grow(tmp_path, tokenizer):
    for source in "pq":
        for name in "abc":
            write(tmp_path / source, f"{source}{name}", texts(f"{source}{name}", count=EACH))
    parts = [Component(source, str(tmp_path / source), 1) for source in "pq"]
    data = dataclasses.replace(settings(tmp_path), source="", mixture=parts)
    batches = opened(data, tokenizer)
    first = given(batches, tokenizer, 50)
    state = saved(batches)
    write(tmp_path / "q", "qx", texts("qx"))
    resumed = opened(data, tokenizer)
    resumed.load_state_dict(state)
    assert resumed.changes == ["data: q: 1 file added ahead of where the run stopped"]
    rest = given(resumed, tokenizer, 2 * 4 * EACH - 50)
    mine = [text for text in first + rest if text[0] == "q"]
    assert Counter(mine) == Counter(text for name in "abcx" for text in texts(f"q{name}"))


# ------------------------------ what was read


def test_what_was_read_must_be_there(folder, tokenizer):
    data = settings(folder)
    batches = opened(data, tokenizer)
    given(batches, tokenizer, 47)
    state = saved(batches)
    read, begun, _ = epoch_order(batches, state)
    path = folder / read[0]
    before = path.read_text()

    path.write_text(before.replace("0001", "1000", 1))
    with pytest.raises(
        InputError, match=f"{path}: other content than when the checkpoint was saved; restore"
    ):
        opened(data, tokenizer).load_state_dict(state)
    path.unlink()
    with pytest.raises(
        InputError, match=f"{read[0]}: is missing, and was read before the checkpoint"
    ):
        opened(data, tokenizer).load_state_dict(state)
    path.write_text(before)
    (folder / begun[0]).unlink()
    with pytest.raises(InputError, match=f"{begun[0]}: is missing, and is read in part"):
        opened(data, tokenizer).load_state_dict(state)


def test_without_a_hash_name_and_size_are_compared(folder, tokenizer):
    data = settings(folder)
    batches = opened(data, tokenizer)
    given(batches, tokenizer, 47)
    state = saved(batches, hashed=False)
    read, _, _ = epoch_order(batches, state)
    path = folder / read[0]
    path.write_text(path.read_text().replace("0001", "1000", 1))
    opened(data, tokenizer).load_state_dict(state)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(InputError, match=f"{path}: other content"):
        opened(data, tokenizer).load_state_dict(state)


@pytest.mark.parametrize("hashed", [True, False])
def test_the_file_in_use_may_change_after_the_rows_that_were_read(folder, tokenizer, hashed):
    data = settings(folder)
    batches = opened(data, tokenizer)
    first = given(batches, tokenizer, 25)
    state = saved(batches, hashed=hashed)
    _, (name,), ahead = epoch_order(batches, state)
    row, path = state["documents"]["end"][1], folder / name
    lines = texts(name[0])
    assert 0 < row < EACH

    write(folder, name[0], [*lines[:row], *texts(name[0], 7, 30)])
    resumed = opened(data, tokenizer)
    resumed.load_state_dict(state)
    assert resumed.changes == ["data: 1 file changed ahead of where the run stopped"]
    rest = given(resumed, tokenizer, len(ahead) * EACH + EACH + row + 30 - 25)
    assert Counter(text for text in first + rest if text[0] == name[0]) == Counter(
        [*lines[:row], *texts(name[0], 7, 30)]
    )

    write(folder, name[0], ["edited", *lines[1:]])  # of equal size
    with pytest.raises(
        InputError,
        match=f"{path}: other content .* was saved, in rows 1 to {row}, which were read; restore",
    ):
        opened(data, tokenizer).load_state_dict(state)
    write(folder, name[0], lines[: row - 1])
    with pytest.raises(InputError, match=f"{path}: other content"):
        opened(data, tokenizer).load_state_dict(state)


def test_a_record_that_cannot_be_read_is_mended(tmp_path, tokenizer):
    """The run stops there; with the record mended it goes on, and gives each document once."""
    lines = texts("a", count=60)
    write(tmp_path / "in", "a", [*lines[:43], None, *lines[44:]])
    data = settings(tmp_path / "in")
    batches = opened(data, tokenizer)
    got = given(batches, tokenizer, 40)
    state = saved(batches)
    with pytest.raises(InputError, match=r"a\.jsonl, line 44: field 'text' is not text"):
        given(batches, tokenizer, 1)
    write(tmp_path / "in", "a", lines)
    resumed = opened(data, tokenizer, epochs=1)
    resumed.load_state_dict(state)
    assert resumed.changes == ["data: 1 file changed ahead of where the run stopped"]
    assert Counter(got + given(resumed, tokenizer)) == Counter(lines)


@pytest.mark.parametrize("place", ["a.jsonl", "*.jsonl"])
def test_files_that_were_moved_are_known_by_their_content(tmp_path, folder, tokenizer, place):
    """Names of a file or a glob are paths, those in a directory are not."""
    data = settings(folder / place)
    batches = opened(data, tokenizer)
    given(batches, tokenizer, 15)
    state = saved(batches)
    meant = given(batches, tokenizer, 3)
    batches.close()
    folder.rename(tmp_path / "moved")
    data.source = str(tmp_path / "moved" / place)
    moved = opened(data, tokenizer)
    moved.load_state_dict(state)
    assert moved.changes == []
    assert given(moved, tokenizer, 3) == meant
    name = Path(epoch_order(moved, state)[1][0]).name
    path = tmp_path / "moved" / name
    path.write_text(path.read_text().replace("0001", "1000", 1))
    with pytest.raises(
        InputError, match=f"moved/{name}: other content than when the checkpoint was saved"
    ):
        opened(data, tokenizer).load_state_dict(state)


def test_validation_files_stay_as_they_were(folder, tmp_path, tokenizer):
    data = settings(
        folder, validation_source=str(write(tmp_path / "v", "v", ["one", "two"]).parent)
    )

    def new(**others) -> PackedBatches:
        batches, kept = opened(data, tokenizer, **others), FileHashes()
        batches.files |= validation_files(batches.sources, batches, kept)
        return batches

    batches = new()
    state = saved(batches)
    assert list(state["files"]) == ["", "validation"]
    new().load_state_dict(state)
    write(tmp_path / "v", "v", ["two", "one"])
    with pytest.raises(InputError, match=r"v\.jsonl: other content"):
        new().load_state_dict(state)
    write(tmp_path / "v", "w", ["two", "one"])
    with pytest.raises(InputError, match="validation had 1 files and has 2"):
        new().load_state_dict(state)
    data.validation_source = None  # held out of the training files
    assert list(new().files) == [""]
    with pytest.raises(InputError, match="validation would read texts that were trained on"):
        new().load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, True), (True, False)])
def test_validation_reads_no_text_that_was_trained_on(folder, tokenizer, before, after):
    """Of a small corpus a document is held out only if validation is on."""
    data = settings(folder)

    def new(validation: bool) -> PackedBatches:
        return opened(data, tokenizer, sources=Sources(data, validation=validation))

    batches = new(before)
    given(batches, tokenizer, 3)
    state = saved(batches)
    if after and not before:
        with pytest.raises(InputError, match=r"trained on .*; .* or set validation\.every=0"):
            new(after).load_state_dict(state)
        return
    new(after).load_state_dict(state)
    write(folder, "g", texts("g", count=9))  # one of them may be held out in place of the first
    new(after).load_state_dict(state)


# ------------------------------ hashes and listings


def test_files_are_hashed_in_the_order_in_which_they_are_read(folder, tokenizer, monkeypatch):
    """And none before the first batch, or by the thread that trains."""
    seen, done, make = [], threading.Event(), hashes.hash_file

    def hash_file(path: Path, *rest) -> str:
        seen.append((threading.current_thread().name, path.name))
        if len(seen) == 6:
            done.set()
        return make(path, *rest)

    monkeypatch.setattr(hashes, "hash_file", hash_file)
    batches = opened(settings(folder), tokenizer)
    assert seen == []
    state = batches.state_dict()
    assert state["files"][""]["hashes"] == [""] * 6
    given(batches, tokenizer, 1)
    assert done.wait(20)
    batches.close()
    order = batches.source.stream().permutation(6)
    assert seen == [("nalanda-hashes", "abcdef"[number] + ".jsonl") for number in order]


def test_a_state_is_made_without_work(folder, tokenizer):
    batches = opened(settings(folder), tokenizer)
    given(batches, tokenizer, 3)
    one, other = batches.state_dict(), batches.state_dict()
    for key in ("names", "sizes", "hashes"):
        assert one["files"][""][key] is other["files"][""][key]
    assert one["documents"] is other["documents"]


def test_a_resume_hashes_what_was_read(folder, tokenizer, tmp_path, monkeypatch):
    """And nothing of that if the record has it, although the listing has grown."""
    monkeypatch.setattr(corpus, "AT_ONCE", 5000)
    monkeypatch.setattr(corpus, "SMALLEST", 8)
    data, record = settings(folder), tmp_path / "hashes.jsonl"
    batches = opened(data, tokenizer, hashes=FileHashes(record))
    given(batches, tokenizer, 47)
    state = saved(batches)
    read, begun, _ = epoch_order(batches, state)
    for i in range(60):  # the policy takes smaller samples now
        write(folder, f"x{i}", texts("x"))
    seen, make = [], hashes.hash_file
    monkeypatch.setattr(
        hashes, "hash_file", lambda path, *rest: seen.append(path.name) or make(path, *rest)
    )
    opened(data, tokenizer, hashes=FileHashes(record)).load_state_dict(state)
    assert seen == []
    opened(data, tokenizer).load_state_dict(state)
    assert sorted(seen) == sorted([*read, *begun])


def test_sources_are_listed_once_and_sent(folder, tokenizer, monkeypatch):
    listed, find = [], corpus._find_files
    monkeypatch.setattr(corpus, "_find_files", lambda *args: listed.append(args) or find(*args))
    data = settings(folder, validation_share=0.3)
    sources = Sources(data, validation=True).open_all()
    assert len(listed) == 1
    sent = pickle.loads(pickle.dumps(sources))
    for name in "abcdef":
        (folder / f"{name}.jsonl").rename(folder / f"{name}.hidden")
    for split in ("train", "validation"):
        one, other = (opened.train[""].corpus(split) for opened in (sources, sent))
        assert one.names == other.names == [f"{name}.jsonl" for name in "abcdef"]
        assert one.sizes == other.sizes
        kept = [[found.part(text) is None for text in texts("a")] for found in (one, other)]
        assert kept[0] == kept[1]
        assert len({*kept[0]}) == 2
    assert len(listed) == 1
