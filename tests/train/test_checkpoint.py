"""Checkpoints that are whole, or are passed over by name."""

import contextlib
import errno
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from nalanda.common import files
from nalanda.common.errors import DiskFull, InputError
from nalanda.common.files import manifest_text, verify_manifest, write_atomically
from nalanda.config.schema import CheckpointConfig, OptimConfig
from nalanda.train import checkpoint, tensor_files
from nalanda.train.checkpoint_dir import (
    MARK,
    checkpoint_folders,
    latest_checkpoint,
    mark_unsound,
    prune,
)
from nalanda.train.optim import build_optimizer
from nalanda.train.run_dir import last_good


class Tied(torch.nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, width)
        self.head = torch.nn.Linear(width, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.bias = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.head(self.embedding(x)) + self.bias


def made(width: int = 4, updates: int = 0):
    model = Tied(width)
    optimizer = build_optimizer(model, OptimConfig())
    for _ in range(updates):
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(directory, step, model, optimizer, **state):
    data = {"position": step, "tail": torch.arange(3)}
    return checkpoint.Saver(directory, CheckpointConfig(asynchronous=False, keep_last=99)).save(
        step,
        model=model,
        optimizer=optimizer,
        data_state=data,
        trainer_state={"tokens": 7, **state},
    )


def test_everything_comes_back(tmp_path):
    model, optimizer = made(updates=3)
    path = save(tmp_path, 3, model, optimizer)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1))
    other, fresh = made()
    trainer_state, data_state = checkpoint.load(path, model=other, optimizer=fresh)
    assert trainer_state == {"tokens": 7, "step": 3}
    assert data_state["position"] == 3
    assert torch.equal(data_state["tail"], torch.arange(3))
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1))
    assert other.head.weight is other.embedding.weight
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert (
            optimizer.state[a].keys() == fresh.state[b].keys() == {"step", "exp_avg", "exp_avg_sq"}
        )
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, fresh.state[b][key]), (name, key)


def reseal(path: Path, **files: dict | None) -> None:
    """Gives a checkpoint a manifest that vouches for these entries too (None: for what is there)."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name, entry in files.items():
        content = path / name
        manifest["files"][name] = entry or {
            "bytes": content.stat().st_size,
            "sha256": hashlib.sha256(content.read_bytes()).hexdigest(),
        }
    (path / "manifest.json").write_text(manifest_text(manifest))


FILES = ["model.safetensors", "optimizer.safetensors", "trainer.json", "rank-0.pt", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, file, damage):
    model, optimizer = made(updates=1)
    old, new = save(tmp_path, 9, model, optimizer), save(tmp_path, 10, model, optimizer)
    assert latest_checkpoint(tmp_path) == new
    content = bytearray((new / file).read_bytes())
    if damage == "remove":
        (new / file).unlink()
    else:
        content[len(content) // 2] ^= 1
        (new / file).write_bytes(content if damage == "flip" else content[:-7])
    said = []
    assert latest_checkpoint(tmp_path, said.append) == old
    assert len(said) == 1
    assert str(new) in said[0]
    assert save(tmp_path, 10, model, optimizer) == new == latest_checkpoint(tmp_path)


def test_what_cannot_be_read_does_not_block_an_older_checkpoint(tmp_path, monkeypatch):
    model, optimizer = made()
    old, new = save(tmp_path, 9, model, optimizer), save(tmp_path, 10, model, optimizer)
    (tmp_path / "step-11").write_text("no folder")

    def sha256_of(file: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    said = []
    assert latest_checkpoint(tmp_path, said.append) == new
    assert said == [f"{tmp_path}/step-11: damaged, passed over: manifest.json: Not a directory"]
    monkeypatch.setattr(files, "sha256_of", sha256_of)
    assert verify_manifest(old).endswith(": Input/output error")
    assert save(tmp_path, 11, model, optimizer) == tmp_path / "step-11"


def test_a_half_written_checkpoint_is_none(tmp_path):
    model, optimizer = made()
    save(tmp_path, 1, model, optimizer)
    part = tmp_path / ".tmp-step-2"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    prune(tmp_path, CheckpointConfig(), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_files_under_the_names_of_checkpoints_stop_no_save(tmp_path):
    """Such as a note, or what a copy left: a file is replaced and cleared away as a folder is."""
    model, optimizer = made()
    for name in ("step-1", ".tmp-step-2", ".tmp-step-1-old"):
        (tmp_path / name).write_text("a file")
    for step in (1, 2):
        save(tmp_path, step, model, optimizer)
        prune(tmp_path, CheckpointConfig(keep_last=1), step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_a_checkpoint_is_called_saved_though_an_older_one_cannot_be_removed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "step-1")

    model, optimizer = made()
    monkeypatch.setattr(checkpoint, "prune", refuse)
    with pytest.raises(InputError, match=r"step-2: saved, but .* be removed: .*busy.*; remove it"):
        save(tmp_path, 2, model, optimizer)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2"


@pytest.fixture
def disk(monkeypatch) -> list:
    """The inode of each fsync and the new name of each rename, in their order."""
    calls, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.fstat(fd).st_ino) or fsync(fd))
    for name in ("rename", "replace"):
        move = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda a, b, move=move, **at: calls.append(Path(b).name) or move(a, b, **at)
        )
    return calls


def test_a_checkpoint_is_on_the_disk_before_its_name(tmp_path, disk):
    """So that a power cut leaves whole checkpoints, and none that was saved is gone."""
    path = save(tmp_path, 1, *made(updates=1))
    named = disk.index("step-1")
    inodes = {p.stat().st_ino for p in (path, *path.rglob("*"))}
    assert inodes == {*disk[:named]}
    assert disk[named + 1 :] == [tmp_path.stat().st_ino]


def test_a_small_file_is_on_the_disk_before_its_name(tmp_path, disk):
    write_atomically(tmp_path / "run.json", "{}")
    file = tmp_path / "run.json"
    assert disk == [file.stat().st_ino, "run.json", tmp_path.stat().st_ino]


def broken(code: int, after: int):
    """An os.fsync that fails once it was called `after` times."""
    calls = iter(range(after, -1, -1))

    def fsync(descriptor: int) -> None:
        if next(calls) == 0:
            raise OSError(code, os.strerror(code))

    return fsync


@pytest.mark.parametrize("after", range(5))
def test_a_full_disk_leaves_the_others(tmp_path, monkeypatch, after):
    """At the first file's fsync, at a later one's, at the manifest's."""
    model, optimizer = made(updates=1)
    save(tmp_path, 1, model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken(errno.ENOSPC, after))
        with pytest.raises(
            DiskFull, match="step-2: not saved, step-1 stays: the disk is full"
        ) as error:
            save(tmp_path, 2, model, optimizer)
    assert ("still to be written" if after < 4 else "No space left on device") in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 74
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert save(tmp_path, 2, model, optimizer) == latest_checkpoint(tmp_path)


def test_a_disk_that_fills_up_in_the_middle_of_a_file(tmp_path, monkeypatch):
    model, optimizer = made(updates=1)
    save(tmp_path, 1, model, optimizer)
    opened = Path.open

    def open_full(path, *args, **kwargs):
        stream = opened(path, *args, **kwargs)
        if path.name == "optimizer.safetensors":
            write = stream.write

            def half(piece):
                write(piece[: len(piece) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            stream = type(
                "Stream",
                (),
                {
                    "__enter__": lambda s: s,
                    "__exit__": lambda *_: None,
                    "write": staticmethod(half),
                },
            )()
        return stream

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(DiskFull, match="still to be written"):
        save(tmp_path, 2, model, optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_disk_that_is_too_small_is_known_before_a_byte_is_written(tmp_path, monkeypatch):
    model, optimizer = made(updates=1)
    wrote = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(checkpoint, "write_file", lambda *_: wrote.append(1))
    with pytest.raises(
        DiskFull, match=r"there is no earlier one: .* are needed, .* more than are free"
    ):
        save(tmp_path, 1, model, optimizer)
    assert not wrote
    assert not list(tmp_path.iterdir())


def test_another_error_is_no_full_disk(tmp_path, monkeypatch):
    model, optimizer = made()
    monkeypatch.setattr(os, "fsync", broken(errno.EIO, 0))
    with pytest.raises(InputError, match=r"not saved.*Input/output error") as error:
        save(tmp_path, 1, model, optimizer)
    assert not isinstance(error.value, DiskFull)


def held(monkeypatch) -> threading.Event:
    """Writing waits for it."""
    go, write = threading.Event(), checkpoint.write_file
    monkeypatch.setattr(checkpoint, "write_file", lambda *args: go.wait(20) and write(*args))
    return go


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    model, optimizer = made(updates=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {k: v.clone() for k, v in checkpoint.optimizer_tensors(model, optimizer).items()}
    saver = checkpoint.Saver(tmp_path, CheckpointConfig(asynchronous=True))
    state = {"data_state": {"position": 1}, "trainer_state": {"tokens": 7}}
    go = held(monkeypatch)
    drawn = random.getstate()
    path = saver.save(1, model=model, optimizer=optimizer, **state)
    assert (
        latest_checkpoint(tmp_path) is None
    )  # it counts when it was renamed, and training goes on until then
    state["data_state"]["position"] = 2
    random.random()
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    go.set()
    saver.save(2, model=model, optimizer=optimizer, **state)  # waits for the one before
    assert verify_manifest(path) is None
    saver.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2"
    other, fresh = made()
    _, data = checkpoint.load(path, model=other, optimizer=fresh)
    assert data == {"position": 1}
    assert random.getstate() == drawn
    assert all(torch.equal(before[name], p) for name, p in other.named_parameters())
    loaded = checkpoint.optimizer_tensors(other, fresh)
    assert all(torch.equal(moments[key], loaded[key]) for key in moments)
    assert not torch.equal(before["bias"], model.bias)


@pytest.mark.parametrize(("free", "threads"), [(1 << 40, 1), (700, 0)])
def test_a_save_is_asynchronous_where_the_copy_takes_at_most_half_of_the_free_memory(
    tmp_path, monkeypatch, free, threads
):
    """Weights of 40 numbers and their two moments are 480 bytes."""
    model, optimizer = made(updates=1)
    monkeypatch.setattr(checkpoint.memory, "host", lambda: free)
    saver = checkpoint.Saver(tmp_path, CheckpointConfig())
    saver.save(1, model=model, optimizer=optimizer, data_state={}, trainer_state={})
    assert (saver._thread is not None) == threads
    saver.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    assert saver.saved == 1


def test_a_saver_knows_the_steps_of_earlier_starts(tmp_path):
    model, optimizer = made(updates=1)
    save(tmp_path, 3, model, optimizer)
    save(tmp_path, 12, model, optimizer)
    assert checkpoint.Saver(tmp_path, CheckpointConfig()).saved == 12
    assert checkpoint.Saver(tmp_path / "none", CheckpointConfig()).saved == 0


@pytest.mark.parametrize("spoilt", ["bias", "bias.exp_avg"])
def test_weights_and_moments_are_looked_at_before_a_save(tmp_path, spoilt):
    model, optimizer = made(updates=1)
    saver = checkpoint.Saver(tmp_path, CheckpointConfig())
    assert saver.unsound(model, optimizer) is None
    tensor = model.bias.data if spoilt == "bias" else optimizer.state[model.bias]["exp_avg"]
    tensor[3] = math.nan
    assert saver.unsound(model, optimizer) == f"{spoilt} has values of nan"


def test_a_process_without_the_memory_makes_all_save_in_the_loop(tmp_path, monkeypatch):
    model, _ = made(updates=1)
    monkeypatch.setattr(checkpoint.memory, "host", lambda: 1 << 40)
    saver = checkpoint.Saver(tmp_path, CheckpointConfig())
    files = checkpoint.tensor_contents({"model": checkpoint.model_tensors(model)}, False, rank=0)
    assert saver._copies(files, sharded=False)
    saver._exchange = lambda value: [value, False]
    assert not saver._copies(files, sharded=False)


def test_a_save_under_way_ends_when_the_run_fails_and_not_at_a_second_ctrl_c(tmp_path, monkeypatch):
    model, optimizer = made(updates=1)
    commit, go = checkpoint.Saver._commit, threading.Event()
    monkeypatch.setattr(checkpoint.Saver, "_commit", lambda *args: go.wait(20) and commit(*args))
    saver = checkpoint.Saver(tmp_path, CheckpointConfig(asynchronous=True))
    saver.save(1, model=model, optimizer=optimizer, data_state={}, trainer_state={})
    saver.close(KeyboardInterrupt)
    assert latest_checkpoint(tmp_path) is None
    go.set()
    saver.close(InputError)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_weights_are_judged_after_the_running_save(tmp_path, monkeypatch):
    """Both gather over one group of processes: at the same time they would take one another's values."""
    model, optimizer = made()
    saver = checkpoint.Saver(tmp_path, CheckpointConfig(asynchronous=True))
    running = []
    monkeypatch.setattr(checkpoint, "find_unsound", lambda _: running.append(saver._thread))
    saver.save(1, model=model, optimizer=optimizer, data_state={}, trainer_state={})
    assert saver.unsound(model, optimizer) is None
    assert running == [None]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_what_an_asynchronous_save_fails_of_is_told(tmp_path, monkeypatch):
    model, optimizer = made()
    saver = checkpoint.Saver(tmp_path, CheckpointConfig(asynchronous=True))
    state = {"model": model, "optimizer": optimizer, "data_state": {}, "trainer_state": {}}
    for last in ("wait", "save"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken(errno.ENOSPC, 1))
            saver.save(1, **state)
            saver._thread.join()
        assert saver.failed
        with pytest.raises(DiskFull):
            saver.wait() if last == "wait" else saver.save(2, **state)
        assert not saver.failed
    assert not list(tmp_path.iterdir())
    saver.save(3, **state)
    saver.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-3"


class Killed(BaseException):
    """What no handler expects, as a SIGKILL."""


@pytest.mark.parametrize("point", range(12))
def test_killed_anywhere_the_newest_whole_one_is_found(tmp_path, monkeypatch, point):
    """At the n-th file operation of a save with its retention; what was there stays, or the new one is."""
    model, optimizer = made(updates=1)
    config = CheckpointConfig(asynchronous=False, keep_last=1)
    state = {"model": model, "optimizer": optimizer, "data_state": {}, "trainer_state": {}}
    for step in (1, 2):
        checkpoint.Saver(tmp_path, CheckpointConfig(asynchronous=False, keep_last=5)).save(
            step, **state
        )
    count = iter(range(point, -1, -1))

    def struck(act):
        def wrapped(*args, **kwargs):
            if next(count, -1) == 0:
                raise Killed
            return act(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for place, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")):
            patch.setattr(place, name, struck(getattr(place, name)))
        try:
            checkpoint.Saver(tmp_path, config).save(3, **state)
            struck_at_all = False
        except Killed:
            struck_at_all = True
    assert struck_at_all or point >= 11
    found = latest_checkpoint(tmp_path)
    assert found in (tmp_path / "step-2", tmp_path / "step-3")
    checkpoint.Saver(tmp_path, config).save(4, **state)  # and the next save tidies up
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]


def test_a_step_saved_again_takes_the_place_of_the_other(tmp_path):
    """After a rollback: what stands there is whole, and of the steps that were left."""
    model, optimizer = made()
    save(tmp_path, 1, model, optimizer)
    model, optimizer = made(updates=2)
    path = save(tmp_path, 1, model, optimizer)
    assert torch.equal(tensor_files.read_weights(path)["bias"], model.bias)
    prune(tmp_path, CheckpointConfig(), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_every_dtype_and_shape_comes_back(tmp_path):
    drawn = torch.randn(5, 3)
    parts = {
        name.lower(): ((drawn * 10).to(dtype) if name != "BOOL" else drawn > 0)
        for name, dtype in tensor_files.DTYPES.items()
    }
    parts |= {
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "long": drawn.T,
        "ü.ß": drawn[1:, 1],
    }
    file = tmp_path / "some.safetensors"
    tensor_files.write_file(file, tensor_files.copied(tensor_files.safetensors_content(parts)))
    theirs = safetensors.torch.load_file(file)
    ours = {name: torch.zeros_like(t) for name, t in parts.items()}
    tensor_files.read_tensors(file, ours)
    for name, tensor in parts.items():
        assert theirs[name].dtype == ours[name].dtype == tensor.dtype
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours[name], tensor)


def test_retention(tmp_path):
    model, optimizer = made()
    for step in range(10, 110, 10):
        save(tmp_path, step, model, optimizer)
        prune(tmp_path, CheckpointConfig(keep_last=2, keep_every=40), step)
    assert [p.name for p in checkpoint_folders(tmp_path)] == [
        "step-40",
        "step-80",
        "step-90",
        "step-100",
    ]


def test_the_checkpoint_that_a_rollback_would_take_stays(tmp_path):
    """Stops within a run of bad steps save checkpoints, too."""
    model, optimizer = made()
    for step, bad in ((4, []), (5, []), (6, ["nan"]), (7, ["nan", "nan"])):
        save(tmp_path, step, model, optimizer, bad=bad)
        prune(tmp_path, CheckpointConfig(keep_last=1), step)
    assert [p.name for p in checkpoint_folders(tmp_path)] == ["step-5", "step-7"]
    assert last_good(tmp_path) == tmp_path / "step-5"
    save(tmp_path, 8, model, optimizer)
    prune(tmp_path, CheckpointConfig(keep_last=1), 8)
    assert [p.name for p in checkpoint_folders(tmp_path)] == ["step-8"]


def test_a_manifest_cannot_point_outside(tmp_path):
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    (tmp_path / "outside").write_bytes(b"")
    reseal(path, **{"../outside": None})
    assert "leaves" in verify_manifest(path)


def test_weights_of_another_shape_are_refused(tmp_path):
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    other, fresh = made(width=5)
    with pytest.raises(
        InputError, match=r"another shape: embedding.weight is \[8, 4\] there, \[8, 5\]"
    ):
        checkpoint.load(path, model=other, optimizer=fresh)
    with pytest.raises(InputError, match="another shape"):
        checkpoint.load_weights(path / "model.safetensors", torch.nn.Linear(2, 2))


RAN = []


def run() -> None:
    RAN.append(True)


class Code:
    def __reduce__(self):
        return run, ()


def test_a_pickle_is_refused_and_its_code_not_run(tmp_path):
    """Even where the manifest vouches for it."""
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    torch.save(Code(), path / "rank-0.pt")
    reseal(path, **{"rank-0.pt": None})
    assert verify_manifest(path) is None
    with pytest.raises(InputError, match=r"rank-0.pt: it holds more than numbers and text"):
        checkpoint.load(path, model=model, optimizer=optimizer)
    (path / "optimizer.pt").write_bytes(pickle.dumps(Code()))
    assert verify_manifest(path) == "optimizer.pt was not saved with it"
    assert not RAN
    pickle.loads(pickle.dumps(Code()))
    assert RAN  # it would have


@pytest.mark.parametrize("name", ["model.safetensors", "inner"])
def test_a_link_is_refused(tmp_path, name):
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    outside = tmp_path / "outside"
    if name == "inner":  # a folder of parts that lies elsewhere
        (path / "inner").mkdir()
        (path / "model.safetensors").rename(path / "inner" / "model.safetensors")
        reseal(path, **{"inner/model.safetensors": None})
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["files"]["model.safetensors"]
        (path / "manifest.json").write_text(manifest_text(manifest))
        assert verify_manifest(path) is None
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    assert "leaves the checkpoint's folder" in verify_manifest(path)


@pytest.mark.parametrize("name", ["/etc/hostname", "inner/../../outside"])
def test_a_path_out_of_the_folder_is_refused(tmp_path, name):
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    reseal(path, **{name: {"bytes": 0, "sha256": ""}})
    assert verify_manifest(path) == f"{name} leaves the checkpoint's folder"


def test_any_bit_of_the_manifest_counts(tmp_path):
    """The step and the versions too, which no file's sum covers."""
    model, optimizer = made()
    manifest = save(tmp_path, 1, model, optimizer) / "manifest.json"
    content = manifest.read_bytes()
    for place in range(0, len(content), 7):
        manifest.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert verify_manifest(manifest.parent) is not None, content[place:]
    manifest.write_bytes(content[:-1])
    assert verify_manifest(manifest.parent) is not None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rank-0.pt"])
def test_a_pickle_with_the_right_sums_is_refused_in_one_line(tmp_path, name):
    model, optimizer = made(updates=1)
    path = save(tmp_path, 1, model, optimizer)
    (path / name).write_bytes(pickle.dumps(Harm()))
    reseal(path, **{name: None})
    assert verify_manifest(path) is None
    with pytest.raises(InputError, match="not loaded") as error:
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert "\n" not in str(error.value)


class Harm:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def resaved(file: Path, change) -> None:
    """The moments of a checkpoint as `change` leaves them, with sums that fit."""
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)
    reseal(file.parent, **{file.name: None})


MISFITS = {
    "longer": (
        lambda t: t.update({"bias.exp_avg": torch.zeros(4096)}),
        r"bias\.exp_avg is float32 of \[4096\]",
    ),
    "shorter": (lambda t: t.update({"bias.exp_avg": torch.zeros(1)}), r"\[1\]; expected \[8\]"),
    "transposed": (
        lambda t: t.update({"embedding.weight.exp_avg_sq": torch.zeros(4, 8)}),
        r"\[4, 8\]; expected \[8, 4\]",
    ),
    "a scalar": (
        lambda t: t.update({"bias.exp_avg_sq": torch.zeros(())}),
        r"of \[\]; expected \[8\]",
    ),
    "a long count": (
        lambda t: t.update({"bias.step": torch.zeros(8)}),
        r"bias\.step is float32 of \[8\]",
    ),
    "integers": (lambda t: t.update({"bias.exp_avg": torch.zeros(8, dtype=torch.int64)}), "int64"),
    "one less": (
        lambda t: t.pop("bias.exp_avg_sq"),
        "bias has exp_avg, step; expected exp_avg, exp_avg_sq",
    ),
    "one more": (
        lambda t: t.update({"bias.other": torch.zeros(8)}),
        "bias has exp_avg, exp_avg_sq, other",
    ),
    "none": (
        lambda t: [t.pop(f"bias.{k}") for k in ("step", "exp_avg", "exp_avg_sq")],
        "it lacks those of bias",
    ),
    "a stranger": (
        lambda t: t.update({"stranger.step": torch.zeros(())}),
        "this model trains no stranger",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_moments_of_another_shape_are_refused(tmp_path, kind):
    """Adam's kernels would write past them."""
    change, words = MISFITS[kind]
    model, optimizer = made(updates=1)
    path = save(tmp_path, 1, model, optimizer)
    resaved(path / "optimizer.safetensors", change)
    assert verify_manifest(path) is None
    with pytest.raises(InputError, match=words) as error:
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert "\n" not in str(error.value)


def test_moments_that_were_never_there_are_not_missed(tmp_path):
    """Of a parameter that got no gradient; and before the first update none has any."""
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    stepped, other = made(updates=1)
    checkpoint.load(path, model=stepped, optimizer=other)
    assert not any(other.state[p] for p in stepped.parameters())
    model.bias.requires_grad_(False)
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    model.bias.requires_grad_(True)
    checkpoint.load(save(tmp_path, 2, model, optimizer), model=stepped, optimizer=other)
    assert [name for name, p in stepped.named_parameters() if other.state[p]] == [
        "embedding.weight"
    ]


def test_muons_moments_are_held_to_their_own_shape(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    optimizer = build_optimizer(model, OptimConfig(name="muon"))
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    path = save(tmp_path, 1, model, optimizer)
    checkpoint.load(path, model=model, optimizer=optimizer)
    resaved(
        path / "optimizer.safetensors",
        lambda t: t.update({"0.weight.momentum_buffer": torch.zeros(4, 5)}),
    )
    with pytest.raises(InputError, match=r"0\.weight\.momentum_buffer is float32 of \[4, 5\]"):
        checkpoint.load(path, model=model, optimizer=optimizer)


class Counting(torch.optim.SGD):
    """Counts its steps with a Python number."""

    def step(self, closure=None):
        for state in map(self.state.__getitem__, self.param_groups[0]["params"]):
            state["step"] = state.get("step", 0) + 1


class CountingInGroups(torch.optim.SGD):
    """Its step count would begin anew in a resumed run."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


class CountingItself(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1


class ByDimensions(torch.optim.Optimizer):
    """Momentum for matrices, mean squares for vectors."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"momentum" if p.ndim == 2 else "squares": p.grad.square()}


class Demanding(torch.optim.SGD):
    def __init__(self, params, lr, secret):
        super().__init__(params, lr)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda groups: torch.optim.Adafactor(groups),
            r"Adafactor keeps row_var .* as torch.float32 of \[2, 1\]",
        ),
        (
            lambda groups: Counting(groups),
            "Counting keeps step .* as int: checkpoints hold float tensors",
        ),
        (lambda groups: CountingInGroups(groups), "CountingInGroups keeps step outside the"),
        (lambda groups: CountingItself(groups), "CountingItself keeps steps outside the"),
        (
            lambda groups: Demanding(groups, 1.0, 2.0),
            "Demanding cannot be made again from a group's keys",
        ),
        (lambda groups: torch.optim.SGD(groups, momentum=0.9), None),
        (lambda groups: torch.optim.NAdam(groups), None),
    ],
)
def test_optimizers_whose_moments_no_checkpoint_holds_are_refused(make, words):
    optimizer = make([{"params": [torch.nn.Parameter(torch.zeros(4, 4))]}])
    with pytest.raises(InputError, match=words) if words else contextlib.nullcontext():
        checkpoint.check_optimizer(optimizer)


def test_vectors_may_have_other_moments_than_matrices(tmp_path):
    model, _ = made()
    optimizer = ByDimensions(model.parameters())
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    path = save(tmp_path, 1, model, optimizer)
    other = ByDimensions(model.parameters())
    checkpoint.load(path, model=model, optimizer=other)
    for p in model.parameters():
        (squares,) = other.state[p].values()
        assert torch.equal(squares, p.grad.square())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_one_spoilt_value_is_found(value):
    sound = {
        "w": torch.randn(40, 5),
        "h": torch.randn(9).bfloat16(),
        "n": torch.arange(3),
        "e": torch.zeros(0),
    }
    assert checkpoint.find_unsound(sound) is None
    for name, place in (("w", (39, 4)), ("h", 8)):
        harmed = {key: tensor.clone() for key, tensor in sound.items()}
        harmed[name][place] = value
        assert checkpoint.find_unsound(harmed).startswith(f"{name} has values of ")
    assert checkpoint.find_unsound({}) is None


def test_a_mark_keeps_a_checkpoint_from_being_resumed_until_it_is_removed(tmp_path):
    model, optimizer = made()
    for step in (1, 2):
        save(tmp_path, step, model, optimizer)
    mark_unsound(tmp_path / "step-2", "w has values of nan")
    said = []
    assert latest_checkpoint(tmp_path, said.append) == tmp_path / "step-1"
    assert said == [f"{tmp_path / 'step-2'}: unsound, passed over: w has values of nan"]
    (tmp_path / "step-2" / MARK).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_a_damaged_later_checkpoint_never_makes_retention_drop_a_whole_one(tmp_path):
    model, optimizer = made()
    for step in (5, 10):
        save(tmp_path, step, model, optimizer)
    (tmp_path / "step-10" / "trainer.json").write_text("")
    config = CheckpointConfig(asynchronous=False, keep_last=1)
    state = {"model": model, "optimizer": optimizer, "data_state": {}, "trainer_state": {}}
    checkpoint.Saver(tmp_path, config).save(
        6, **state
    )  # stopped behind the step that it went back to
    assert latest_checkpoint(tmp_path) == tmp_path / "step-6"
