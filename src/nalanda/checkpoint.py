"""Checkpoints that are whole or are not there.

    checkpoints/step-N/
        model.safetensors, config.json      a model folder: from_pretrained loads it
        optimizer.safetensors               moments, `<parameter name>.<state>`
        trainer.json                        step, tokens, processes
        rank-R.pt                           one a process: random states and position in the data
        manifest.json                       size and SHA-256 of every file; written last

All of it is written into `.tmp-step-N`, synced to the disk, and renamed: a name `step-N` means that every
byte was there. `latest` believes a checkpoint only if the manifest's sums hold. Nothing is pickled:
`rank-R.pt` is read with `weights_only=True`.
"""

import hashlib
import io
import json
import os
import platform
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from nalanda.errors import InputError


@dataclass
class CheckpointConfig:
    every: int = 1000
    """Steps between checkpoints; 0 saves only at the end and when interrupted."""
    keep_last: int = 3
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if self.every < 0:
            raise InputError(f"checkpoint.every: expected 0 or more, got {self.every}")
        if self.keep_last < 1:
            raise InputError(f"checkpoint.keep_last: expected 1 or more, got {self.keep_last}")
        if self.keep_every is not None and self.keep_every < 1:
            raise InputError(f"checkpoint.keep_every: expected 1 or more, got {self.keep_every}")


def save(
    directory: Path,
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_state: dict,
    trainer_state: dict,
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `directory/step-N`; every process calls it. `model` is the bare model, without DDP around it.

    A save that fails leaves the earlier checkpoints as they were.
    """
    final, part = directory / f"step-{step}", directory / f".tmp-step-{step}"
    try:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        barrier()
        own = io.BytesIO()  # torch.save onto a full disk raises no OSError; write_bytes does
        torch.save({"random": random_state(), "data": data_state}, own)
        (part / f"rank-{rank}.pt").write_bytes(own.getvalue())
        if rank == 0:
            safetensors.torch.save_file(_unique(model), part / "model.safetensors", metadata={"format": "pt"})
            if hasattr(model, "config"):
                model.config.save_pretrained(part)  # type: ignore[union-attr]
            safetensors.torch.save_file(_optimizer_tensors(model, optimizer), part / "optimizer.safetensors")
            (part / "trainer.json").write_text(json.dumps({**trainer_state, "step": step}, indent=1) + "\n")
        barrier()
        if rank == 0:
            _seal(part, step)
            shutil.rmtree(final, ignore_errors=True)  # only a damaged one can be there
            part.rename(final)
            _sync(directory)
        barrier()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise InputError(f"{final}: not saved, earlier checkpoints are unharmed: {error}") from None
    return final


def load(
    path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0
) -> tuple[dict, dict]:
    """Puts a checkpoint's weights, moments and random states back; returns (trainer state, data state).

    With more processes than saved it, those without random states of their own keep the ones they have; the
    data state serves any number.

    Raises:
        InputError: the checkpoint is of another model.
    """
    trainer_state = json.loads((path / "trainer.json").read_text())
    load_weights(path / "model.safetensors", model)
    names = dict(model.named_parameters())
    for key, tensor in safetensors.torch.load_file(path / "optimizer.safetensors").items():
        name, _, state = key.rpartition(".")
        parameter = names[name]
        # torch keeps the step count of a parameter wherever it put it at first; all else lies with the
        # parameter.
        on_host = tensor.ndim == 0 and not _fused(optimizer)
        optimizer.state[parameter][state] = tensor if on_host else tensor.to(parameter.device)
    own = path / f"rank-{rank}.pt"
    state = torch.load(own if own.exists() else path / "rank-0.pt", map_location="cpu", weights_only=True)
    if own.exists():
        set_random_state(state["random"])
    return trainer_state, state["data"]


def load_weights(file: Path, model: torch.nn.Module) -> None:
    """Loads safetensors into `model` in place. Raises `InputError` where names or shapes differ."""
    tensors = safetensors.torch.load_file(file)
    own = model.state_dict()
    for name, tensor in tensors.items():
        if name not in own:
            raise InputError(f"{file}: a checkpoint of another shape: this model has no {name}")
        if own[name].shape != tensor.shape:
            raise InputError(
                f"{file}: a checkpoint of another shape: {name} is {list(tensor.shape)} there, "
                f"{list(own[name].shape)} in this model"
            )
    absent = sorted(_unique(model).keys() - tensors.keys())
    if absent:
        raise InputError(f"{file}: a checkpoint of another shape: it lacks {absent[0]}")
    model.load_state_dict(tensors, strict=False)  # not strict: the second name of a tied weight is not stored


def latest(directory: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; a damaged one is named and passed over."""
    for path in reversed(steps(directory)):
        problem = verify(path)
        if problem is None:
            return path
        say(f"{path}: damaged, passed over: {problem}")
    return None


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return "no manifest.json"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is unreadable"
    for name, (size, digest) in files.items():
        file = path / name
        if Path(name).name != name or file.is_symlink():
            return f"{name} leaves the checkpoint's folder"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
        if _sha256(file) != digest:
            return f"{name} does not have the bytes that were written"
    return None


def steps(directory: Path) -> list[Path]:
    """Checkpoint folders, oldest first, damaged ones included."""
    found = [p for p in directory.glob("step-*") if p.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def prune(directory: Path, config: CheckpointConfig) -> None:
    """Removes all but the last `keep_last`, every `keep_every`-th, and what interrupted saves left."""
    for path in steps(directory)[: -config.keep_last]:
        if not (config.keep_every and step_of(path) % config.keep_every == 0):
            # Renamed first: killed half-way, the rest is not taken for a checkpoint.
            path.rename(directory / f".tmp-{path.name}")
    for part in directory.glob(".tmp-step-*"):
        shutil.rmtree(part, ignore_errors=True)


def random_state() -> dict:
    """The state of every generator of this process, in types that `weights_only` loads."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    inner = state["numpy"]["state"]
    key = inner["key"].numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {**inner, "key": key}})
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_atomically(file: Path, text: str) -> None:
    """`file` has the old text or the new, never a part of it."""
    part = file.with_name(f".tmp-{file.name}")
    part.write_text(text, encoding="utf-8")
    _sync(part)
    part.rename(file)
    _sync(file.parent)


def _unique(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, every tensor once: safetensors stores no tied weight under two names."""
    unique, seen = {}, set()
    for name, tensor in model.state_dict().items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() == 0 or place not in seen:
            seen.add(place)
            unique[name] = tensor.contiguous()
    return unique


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor.contiguous()
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _seal(part: Path, step: int) -> None:
    """Syncs every file, then writes the manifest over them, and syncs that."""
    files = {}
    for file in sorted(part.iterdir()):
        _sync(file)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    manifest: dict[str, Any] = {"format": 1, "step": step, "versions": versions, "files": files}
    (part / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    _sync(part / "manifest.json")
    _sync(part)


def _sync(path: Path) -> None:
    """fsync of a file or, for the names in it, of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
