"""Checkpoints that are whole, or are passed over by name."""

import random

import numpy as np
import pytest
import torch

from nalanda import checkpoint
from nalanda.checkpoint import CheckpointConfig
from nalanda.errors import InputError
from nalanda.optim import OptimConfig, build_optimizer


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
    return checkpoint.save(
        directory,
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
        assert optimizer.state[a].keys() == fresh.state[b].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, fresh.state[b][key]), (name, key)


FILES = ["model.safetensors", "optimizer.safetensors", "trainer.json", "rank-0.pt", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, file, damage):
    model, optimizer = made(updates=1)
    old, new = save(tmp_path, 9, model, optimizer), save(tmp_path, 10, model, optimizer)
    assert checkpoint.latest(tmp_path) == new
    content = bytearray((new / file).read_bytes())
    if damage == "remove":
        (new / file).unlink()
    else:
        content[len(content) // 2] ^= 1
        (new / file).write_bytes(content if damage == "flip" else content[:-7])
    said = []
    assert checkpoint.latest(tmp_path, said.append) == old
    assert len(said) == 1
    assert str(new) in said[0]
    assert save(tmp_path, 10, model, optimizer) == new == checkpoint.latest(tmp_path)


def test_a_half_written_checkpoint_is_none(tmp_path):
    model, optimizer = made()
    save(tmp_path, 1, model, optimizer)
    part = tmp_path / ".tmp-step-2"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    checkpoint.prune(tmp_path, CheckpointConfig())
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_failed_save_leaves_the_others(tmp_path, monkeypatch):
    model, optimizer = made()
    save(tmp_path, 1, model, optimizer)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(InputError, match="No space left") as error:
        save(tmp_path, 2, model, optimizer)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_retention(tmp_path):
    model, optimizer = made()
    for step in range(10, 110, 10):
        save(tmp_path, step, model, optimizer)
        checkpoint.prune(tmp_path, CheckpointConfig(keep_last=2, keep_every=40))
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-40", "step-80", "step-90", "step-100"]


def test_a_manifest_cannot_point_outside(tmp_path):
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    (tmp_path / "outside").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest = path / "manifest.json"
    entry = f'"../outside": {{"bytes": 0, "sha256": "{empty}"}}, "model.safetensors"'
    manifest.write_text(manifest.read_text().replace('"model.safetensors"', entry))
    assert "leaves" in checkpoint.verify(path)


def test_weights_of_another_shape_are_refused(tmp_path):
    model, optimizer = made()
    path = save(tmp_path, 1, model, optimizer)
    other, fresh = made(width=5)
    with pytest.raises(InputError, match=r"another shape: embedding.weight is \[8, 4\] there, \[8, 5\]"):
        checkpoint.load(path, model=other, optimizer=fresh)
    with pytest.raises(InputError, match="another shape"):
        checkpoint.load_weights(path / "model.safetensors", torch.nn.Linear(2, 2))
