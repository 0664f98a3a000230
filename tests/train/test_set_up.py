"""A run opens each source once and hands it on."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training import configured

from nalanda.common.errors import DiskFull
from nalanda.config.load import load_config
from nalanda.config.schema import DataConfig
from nalanda.data import corpus, token_set
from nalanda.data.prepare import prepare
from nalanda.model.configuration import NalandaConfig
from nalanda.report.rehearse import rehearse
from nalanda.train import build, launch
from nalanda.train.checkpoint_dir import checkpoint_folders, step_of
from nalanda.train.estimate import meta_model
from nalanda.train.loop import train
from nalanda.train.needs import run_files


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """Counts the calls of what opens and checks, wherever it was imported."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        ours = [module for key, module in sys.modules.items() if key.startswith("nalanda.")]
        for holder in [owner] if isinstance(owner, type) else ours:
            if vars(holder).get(name) is function:
                monkeypatch.setattr(holder, name, counted)

    count(corpus, "_open_corpus")  # called for each source and split that is read as text
    count(corpus, "_find_files")
    count(token_set, "is_token_set")
    count(DataConfig, "check")
    count(DataConfig, "parts")
    count(NalandaConfig, "distinct_mixers")
    return counts


def texts(file: Path) -> str:
    lines = [{"text": " ".join(f"word{n} {word} text" for word in range(40))} for n in range(120)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


BPE = "tokenizer.vocab_size=300"


def short_run(folder: Path, *settings: str) -> None:
    """Two steps with validation, a checkpoint and the export."""
    config = load_config(
        "demo",
        [
            f"output_dir={folder}/run",
            "train.steps=2",
            "train.tokens_per_step=64",
            "train.micro_batch_size=1",
            "train.cpu_threads=1",
            "schedule.warmup_steps=0",
            "validation.every=1",
            "data.seq_len=64",
            "data.max_validation_rows=2",
            *settings,
        ],
    )
    train(config)


def test_a_run_of_texts(tmp_path, calls):
    source = texts(tmp_path / "a.jsonl")
    short_run(tmp_path, BPE, f"data.source={source}", "data.validation_share=0.1")
    assert calls["_open_corpus"] == calls["_find_files"] == 1  # one listing serves both splits
    assert calls["is_token_set"] == 1


def test_a_run_with_texts_of_its_own_for_validation(tmp_path, calls):
    source, held_out = texts(tmp_path / "a.jsonl"), texts(tmp_path / "b.jsonl")
    short_run(tmp_path, BPE, f"data.source={source}", f"data.validation_source={held_out}")
    assert calls["_open_corpus"] == calls["_find_files"] == calls["is_token_set"] == 2


def test_a_run_of_a_mixture(tmp_path, calls):
    parts = [
        {"name": name, "weight": 1, "source": texts(tmp_path / f"{name}.jsonl")} for name in "ab"
    ]
    short_run(tmp_path, BPE, f"data.mixture={json.dumps(parts)}", "data.source=''")
    assert calls["_open_corpus"] == calls["_find_files"] == calls["is_token_set"] == 2


@pytest.mark.slow
def test_a_run_of_a_token_set(tmp_path, calls):
    config = load_config("demo", [BPE])
    data = DataConfig(source=texts(tmp_path / "a.jsonl"), validation_share=0.1)
    prepare(data, config.tokenizer, tmp_path / "set")
    calls.clear()
    tokenizer = f"tokenizer.path={tmp_path}/set/tokenizer"
    short_run(tmp_path, f"data.source={tmp_path}/set", tokenizer)
    assert calls["is_token_set"] == 1
    assert calls["_open_corpus"] == 0


def test_settings_are_checked_once(tmp_path, calls):
    config_checks = 1  # `load_config` checks what the user wrote
    short_run(tmp_path, BPE, f"data.source={texts(tmp_path / 'a.jsonl')}")
    assert calls["check"] - config_checks == 1
    assert calls["parts"] == 1
    # One for the estimates, and one for the tensor-parallel plan of each model that is built.
    assert calls["distinct_mixers"] - config_checks <= 7


@pytest.mark.parametrize(
    ("threads", "limit", "setting", "why"),
    [
        (1, "1", "null", "1 of 4 CPU cores in use (OMP_NUM_THREADS=1, as launchers set it)"),
        (2, None, "null", "2 of 4 CPU cores in use (torch's default)"),
        (1, "4", "1", "1 of 4 CPU cores in use (train.cpu_threads=1)"),
    ],
)
def test_idle_cores_are_explained(monkeypatch, capsys, threads, limit, setting, why):
    monkeypatch.setattr(launch, "processors", lambda: 4)
    monkeypatch.setattr(launch.torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    config = load_config("demo", [f"train.cpu_threads={setting}"])
    launch.advise_on_threads(config, processes=1)
    assert capsys.readouterr().out == f"{why}; train.cpu_threads=4 uses all\n"


def with_room(monkeypatch, free: int) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_run_that_the_disk_cannot_hold_is_refused_before_data_are_read(
    recipe, tmp_path, monkeypatch
):
    config = configured(recipe, tmp_path / "run", "train.steps=2000")
    files = run_files(config, meta_model(config))
    message = r"^output_dir: .* 10 checkpoints of .* still to be written there, .* free; make room"
    with_room(monkeypatch, files.total // 2)  # enough for a rehearsal's own files
    with pytest.raises(DiskFull, match=message):
        rehearse(config)
    assert not list(tmp_path.iterdir())

    with_room(monkeypatch, files.total - 1)
    monkeypatch.setattr(build, "open_data", None)
    with pytest.raises(DiskFull, match=message) as error:
        train(config)
    assert error.value.exit_code == 74


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_resumed_run_needs_room_for_the_rest_alone(stopped, monkeypatch, capsys):
    """All checkpoints are there, and the model is still to be written."""
    run, config = stopped
    files = run_files(config, meta_model(config))
    with_room(monkeypatch, files.final - 1)
    with pytest.raises(DiskFull, match="still to be written"):
        train(config)
    with_room(monkeypatch, files.final)
    train(config)
    assert (run / "final" / "config.json").is_file()
    assert re.search(
        r"\ndisk       .* checkpoints of .* and final/ of .* free\n", capsys.readouterr().out
    )


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second disk")
def test_checkpoints_may_lie_on_another_disk(recipe, tmp_path, monkeypatch):
    """Each disk needs room for its own files, and the model has the run's tokenizer and recipe."""
    run, free = tmp_path / "run", {}
    config = configured(recipe, run, "train.steps=2", "validation.every=0")
    files = run_files(config, meta_model(config))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        run.mkdir()
        (run / "checkpoints").symlink_to(other)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
            for full in (run, run / "checkpoints"):
                free |= {run / "checkpoints": files.checkpoint, run: files.final}
                free[full] -= 1
                with pytest.raises(DiskFull, match=f"{full}: the run will take"):
                    train(config)

        train(config)
        names = {path.name for path in (run / "final").iterdir()}
        assert {"tokenizer.json", "config.yaml"} <= names


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_header_counts_the_checkpoints_that_are_there(stopped, capsys):
    """As the refusal does: they stay until the next save, whatever keep_last is now."""
    run, config = stopped
    config = replace(config, checkpoint=replace(config.checkpoint, keep_last=1, keep_every=None))
    saved = [step_of(path) for path in checkpoint_folders(run / "checkpoints")]
    expected, new = (run_files(config, meta_model(config), steps) for steps in (saved, []))
    assert expected.checkpoints > new.checkpoints
    train(config)
    assert f"\ndisk       {expected.describe()}; " in capsys.readouterr().out


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_backend_of_each_recurrence_is_said_once(recipe, tmp_path, capsys):
    run = train(
        configured(
            recipe,
            tmp_path / "run",
            "model.mixer=[gla, deltanet]",
            "model.num_hidden_layers=2",
            "train.steps=2",
        )
    )
    printed = capsys.readouterr().out
    assert printed.count("\nlayers     linear_attention by torch, delta_rule by torch\n") == 1
    executors = json.loads((run / "run.json").read_text())["executors"]
    assert executors == {"linear_attention": "torch", "delta_rule": "torch"}
