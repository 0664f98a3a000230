"""The data of a run: sums, edits, files that come later, and what the log says of them."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from covering import covering
from training import configured, outcome

from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.config.schema import RunConfig
from nalanda.data import corpus, hashes, loader, packing, token_set
from nalanda.train import loop
from nalanda.train import step as training_step
from nalanda.train.checkpoint_dir import checkpoint_folders, latest_checkpoint, step_of
from nalanda.train.log import read_metrics

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def prepared_set(recipe, tmp_path_factory) -> Path:
    from nalanda.data.prepare import prepare

    config, folder = load_config(recipe), tmp_path_factory.mktemp("prepared")
    prepare(config.data, config.tokenizer, folder / "set")
    return folder / "set"


def flipped(path: Path) -> bytes:
    """A bit in the middle is another; what it was before."""
    before = path.read_bytes()
    content = bytearray(before)
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return before


@pytest.mark.slow
@covering(
    strength=1,
    verify=["background", "sums", "sizes"],
    name=["train/00000.tokens", "validation/00000.docs"],
)
def test_a_prepared_set_is_compared_with_its_sums(recipe, prepared_set, tmp_path, verify, name):
    settings = (
        f"data.source={prepared_set}",
        f"tokenizer={prepared_set / 'tokenizer'}",
        "train.steps=6",
    )
    run = configured(recipe, tmp_path / "run", *settings, f"data.verify={verify}")
    before = flipped(prepared_set / name)
    try:
        if verify == "sizes" and name.endswith("tokens"):
            loop.train(run)  # the id may be a wrong one; it is in the vocabulary
            return
        with pytest.raises(InputError, match=f"{name}: damaged, .*copy or prepare it again"):
            loop.train(run)
    finally:
        (prepared_set / name).write_bytes(before)
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    loop.train(run)
    before, saved = (
        flipped(prepared_set / name),
        latest_checkpoint(tmp_path / "run" / "checkpoints"),
    )
    try:
        with pytest.raises(InputError, match=f"{name}: damaged"):
            loop.train(configured(recipe, tmp_path / "run", *settings, "train.steps=8"))
    finally:
        (prepared_set / name).write_bytes(before)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") == saved
    loop.train(configured(recipe, tmp_path / "run", *settings, "train.steps=8"))


def on_set(recipe: Path, run: Path, folder: Path, *overrides: str) -> RunConfig:
    """A run on a prepared set."""
    return configured(
        recipe,
        run,
        f"data.source={folder}",
        f"tokenizer={folder / 'tokenizer'}",
        "validation.every=0",
        *overrides,
    )


def at_step(step: int, act):
    """A learning rate; behind `step`, `act` is called."""

    def rate(at, *rest, rate=training_step.learning_rate):
        if at == step:
            act()
        return rate(at, *rest)

    return rate


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "docs"])
def test_a_shard_that_shrinks_under_a_run_saves_and_stops_it(
    recipe, prepared_set, tmp_path, monkeypatch, kind
):
    folder = shutil.copytree(prepared_set, tmp_path / "set")
    file = folder / "train" / f"00000.{kind}"
    content = file.read_bytes()
    loop.train(on_set(recipe, tmp_path / "whole", folder, "train.steps=12"))
    config = on_set(recipe, tmp_path / "run", folder, "train.steps=12")
    with monkeypatch.context() as patch:
        patch.setattr(training_step, "learning_rate", at_step(7, lambda: os.truncate(file, 100)))
        with pytest.raises(InputError, match=rf"00000\.{kind}: ends before byte") as error:
            loop.train(config)
    assert error.value.exit_code == 2
    assert step_of(latest_checkpoint(tmp_path / "run" / "checkpoints")) >= 7
    file.write_bytes(content)
    loop.train(config)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_a_save_on_a_signal_does_not_wait_for_sums_and_the_next_start_goes_on_with_them(
    recipe, prepared_set, tmp_path, monkeypatch
):
    run, read, release = tmp_path / "run", [], threading.Event()
    sha256_of = token_set.sha256_of

    def slow(path: Path) -> str:
        if read:  # the first file is compared, the second takes its time
            release.wait(60)
        read.append(path.name)
        return sha256_of(path)

    with monkeypatch.context() as patch:
        patch.setattr(token_set, "sha256_of", slow)
        patch.setattr(
            training_step, "learning_rate", at_step(6, lambda: signal.raise_signal(signal.SIGTERM))
        )
        with pytest.raises(SystemExit):
            loop.train(on_set(recipe, run, prepared_set))
        assert read == ["00000.tokens"]
        release.set()
        for thread in threading.enumerate():
            if thread.name == "nalanda-sums":
                thread.join()
    assert [step_of(path) for path in checkpoint_folders(run / "checkpoints")] == [5, 7]
    last = run / "checkpoints" / "step-7"
    assert json.loads((last / "trainer.json").read_text())["sums_compared"] is False
    (run / "sums.jsonl").write_bytes(
        (run / "sums.jsonl").read_bytes().split(b"\n")[1] + b'\n["torn'
    )
    read.clear()
    monkeypatch.setattr(
        token_set, "sha256_of", lambda path: read.append(path.name) or sha256_of(path)
    )
    loop.train(on_set(recipe, run, prepared_set))
    assert read == ["00000.docs"]
    end = run / "checkpoints" / "step-24" / "trainer.json"
    assert json.loads(end.read_text())["sums_compared"] is True


def test_damage_that_is_found_after_a_save_names_what_may_have_learnt_from_it(
    recipe, prepared_set, tmp_path, monkeypatch
):
    folder, found = shutil.copytree(prepared_set, tmp_path / "set"), threading.Event()
    flipped(folder / "train" / "00000.tokens")
    sha256_of, config = token_set.sha256_of, on_set(recipe, tmp_path / "run", folder)
    with monkeypatch.context() as patch:
        patch.setattr(token_set, "sha256_of", lambda path: found.wait(60) and sha256_of(path))
        patch.setattr(training_step, "learning_rate", at_step(7, found.set))
        with pytest.raises(
            InputError, match=r"00000\.tokens: damaged, .*; step-5.* may have learnt from it"
        ):
            loop.train(config)
    with pytest.raises(InputError, match=r"00000\.tokens: damaged"):
        loop.train(config)  # a damaged file is never recorded as whole


class HashedAtOnce:
    """`Hashing` without its thread, so that the first save has all hashes."""

    def __init__(self, jobs):
        for files, number in jobs:
            files.find(number)

    def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", pytest.param("validation", marks=pytest.mark.slow)])
def test_data_that_was_edited_at_equal_size_is_not_resumed_on(recipe, tmp_path, monkeypatch, part):
    monkeypatch.setattr(loader, "Hashing", HashedAtOnce)
    text = (recipe.parent / "a.jsonl").read_bytes()
    for name in ("train", "validation"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "a.jsonl").write_bytes(text)
    settings = [f"data.source={tmp_path / 'data'}", "train.steps=6"]
    loop.train(configured(recipe, tmp_path / "run", *settings))
    file, saved = (
        tmp_path / "data" / part / "a.jsonl",
        latest_checkpoint(tmp_path / "run" / "checkpoints"),
    )
    file.write_bytes(text.replace(b"state", b"estat", 1))
    settings[1] = "train.steps=8"
    with pytest.raises(
        InputError, match=f"{part}/a.jsonl: other content than when the checkpoint was"
    ):
        loop.train(configured(recipe, tmp_path / "run", *settings))
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") == saved
    file.write_bytes(text)
    loop.train(configured(recipe, tmp_path / "run", *settings))


@pytest.mark.slow
def test_files_that_come_later_may_change(recipe, tmp_path, capsys, monkeypatch):
    """The run goes on and says so. Rows of validation may change as well."""
    monkeypatch.setattr(packing, "STREAM_GROUP", 1000)
    texts = (recipe.parent / "a.jsonl").read_text().splitlines(keepends=True)
    source, run = tmp_path / "data", tmp_path / "run"
    source.mkdir()
    for i in range(15):
        (source / f"{i:02}.jsonl").write_text("".join(texts[i * 100 : (i + 1) * 100]))
    settings = [f"data.source={source}", "data.shuffle_buffer=0", "train.steps=6"]
    loop.train(configured(recipe, run, *settings))
    assert (run / "hashes.jsonl").exists()
    state = torch.load(run / "checkpoints" / "step-6" / "rank-0.pt", weights_only=True)["data"]
    reached = state["documents"]["end"][0]
    assert 0 <= reached < 14

    (source / "new.jsonl").write_text(texts[0] * 100)
    capsys.readouterr()
    settings[2] = "train.steps=8"
    loop.train(configured(recipe, run, *settings, "data.max_validation_rows=5"))
    said = capsys.readouterr().out
    assert "changed    data: 1 file added ahead of where the run stopped" in said
    assert "changed    data.max_validation_rows: 7 → 5" in said
    assert "resumes from step-6" in said


@pytest.mark.slow
def test_a_run_below_its_source_goes_on(recipe, tmp_path, monkeypatch):
    """Its own metrics.jsonl and hashes.jsonl are no texts; nor are they those of another run."""
    source = load_config(recipe).data.source
    shutil.copytree(str(source), tmp_path / "texts")
    monkeypatch.chdir(tmp_path / "texts")
    for run, steps in (("runs/a", 2), ("runs/a", 3), ("runs/b", 2)):
        settings = ("data.source=.", f"train.steps={steps}", "validation.every=0")
        loop.train(configured(recipe, Path(run), *settings))
        assert step_of(latest_checkpoint(Path(run) / "checkpoints")) == steps


def test_no_file_is_hashed_before_the_first_step(recipe, tmp_path, monkeypatch):
    """At a resume those are that were read, if the record has them not."""
    seen, make = [], hashes.hash_file

    def hash_file(path: Path, *rest) -> str:
        seen.append(threading.current_thread().name)
        return make(path, *rest)

    monkeypatch.setattr(hashes, "hash_file", hash_file)
    run = tmp_path / "run"
    loop.train(configured(recipe, run, "train.steps=2"))
    assert {*seen} <= {"nalanda-hashes"}
    hashes.FileHashes(run / "hashes.jsonl").of(recipe.parent / "a.jsonl", hashes.WHOLE)
    seen.clear()
    loop.train(configured(recipe, run, "train.steps=4"))
    assert seen == []
    (run / "hashes.jsonl").unlink()
    loop.train(configured(recipe, run, "train.steps=6"))
    assert len(seen) == 1


def test_a_start_lists_the_files_once(recipe, tmp_path, monkeypatch):
    listed, find = [], corpus._find_files
    monkeypatch.setattr(corpus, "_find_files", lambda *args: listed.append(args) or find(*args))
    run = tmp_path / "run"
    shutil.copytree(recipe.parent, tmp_path / "data")
    settings = [f"data.source={tmp_path / 'data' / '*.jsonl'}", "validation.every=1"]
    loop.train(configured(recipe, run, *settings, "train.steps=2"))
    listed.clear()
    loop.train(configured(recipe, run, *settings, "train.steps=3"))
    assert len(listed) == 1


def test_documents_that_are_left_out_are_in_the_log(recipe, tmp_path, capsys):
    file = tmp_path / "data" / "a.jsonl"
    file.parent.mkdir()
    large = json.dumps({"text": "rule " * 5000}) + "\n"
    file.write_text(large + (recipe.parent / "a.jsonl").read_text() + large)
    settings = [f"data.source={file.parent}", "data.max_document_bytes=10000", "train.steps=4"]
    run = tmp_path / "run"
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: a document of more than 10,000 bytes"):
        loop.train(configured(recipe, run, *settings))
    loop.train(configured(recipe, run, *settings, "data.oversized=skip"))
    said = capsys.readouterr()
    assert "2 documents above data.max_document_bytes were left out" in said.out
    assert (
        "2 documents above data.max_document_bytes were left out among those read for val"
        in said.err
    )
    events = [
        line for line in read_metrics(run / "metrics.jsonl") if line.get("event") == "oversized"
    ]
    assert [event["documents"] for event in events] == [2]


@pytest.mark.slow
def test_the_log_says_when_the_data_begin_again(recipe, tmp_path, capsys):
    settings = ["train.steps=8", "log.every=100", "checkpoint.every=3", "data.shuffle_buffer=1"]
    loop.train(configured(recipe, tmp_path / "run", *settings))
    assert "begins again" not in capsys.readouterr().out
    file = tmp_path / "data" / "a.jsonl"
    file.parent.mkdir()
    file.write_text("".join((recipe.parent / "a.jsonl").read_text().splitlines(True)[:40]))
    settings += [f"data.source={file.parent}", "data.validation_share=1e-9", "validation.every=0"]
    run = tmp_path / "again"
    loop.train(configured(recipe, run, *settings))
    events = [line for line in read_metrics(run / "metrics.jsonl") if "event" in line]
    assert [line["event"] for line in events] == ["epoch"] * len(events)
    counts = [line["epochs"] for line in events]
    assert counts[0] == 1
    assert [count.bit_length() for count in counts] == [*range(1, len(counts) + 1)]
    assert "the corpus was read once and begins again" in capsys.readouterr().out
    # Killed behind step 3: the events after it come again, and those before it do not.
    assert {line["step"] > 3 for line in events} == {False, True}
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "state": "running"}))
    for folder in (run / "final", run / "checkpoints" / "step-6", run / "checkpoints" / "step-8"):
        shutil.rmtree(folder)
    loop.train(configured(recipe, run, *settings))
    assert [line for line in read_metrics(run / "metrics.jsonl") if "event" in line] == events
