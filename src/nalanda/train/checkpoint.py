"""Checkpoints that are whole or are not there.

    checkpoints/step-N/
        config.json                         of the model
        model.safetensors                   with config.json a model folder: from_pretrained loads it
        optimizer.safetensors               moments, `<parameter name>.<state>`
        model/, optimizer/                  instead of those two, under FSDP: every process's part of each
        trainer.json                        step, tokens, processes
        rank-R.pt                           one a process: random states and position in the data
        lanes-R.safetensors                 with `data.long_documents: carry`, the states of its rows
        manifest.json                       size and SHA-256 of every file; written last
        unsound.txt                         only in one that must not be resumed from: why (`mark_unsound`)

All of it is written into `.tmp-step-N`, synced to the disk, and renamed: a name `step-N` means that every
byte was there. `latest` believes a checkpoint only if the manifest's sums hold. Nothing is pickled:
`rank-R.pt` is read with `weights_only=True`.

Parts are files of `torch.distributed.checkpoint`'s Hugging Face form: safetensors whose header says where in
its tensor each part begins, so that its `HuggingFaceStorageReader` reads them too. Any number of processes,
sharded or not, loads either kind of checkpoint. They are written here, not by `torch.distributed.checkpoint`:
that makes a second copy of the file in memory, talks to the other processes while it writes, and hides what
the disk said.
"""

import errno
import hashlib
import inspect
import io
import json
import math
import os
import pickle
import platform
import random
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from nalanda.common.errors import DiskFull, InputError, first_line, no_room
from nalanda.common.files import manifest_text, sync
from nalanda.config.schema import CheckpointConfig
from nalanda.train.checkpoint_dir import checkpoint_folders, prune

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names."""

LARGEST = 1e15
"""Weights and moments beyond this are spoilt: the sum of their squares, in a norm, overflows fp32."""

Content = list[bytes | torch.Tensor]
"""What a file will hold, piece after piece."""

Exchange = Callable[[Any], list[Any]]
"""What every process says, to every process; all of them call it."""


class Saver:
    """Writes a run's checkpoints, one at a time, and removes those that `config` does not keep.

    Every process has one and calls it alike. An asynchronous save counts once `wait` has returned: the next
    `save` calls it first, and so must whoever loads a checkpoint or ends the run. A save that fails leaves
    the earlier checkpoints as they were and raises on all processes, `DiskFull` or `InputError`; if it was
    asynchronous, in `wait`, and `failed` is True until then.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, *, rank: int = 0, processes: int = 1):
        self.directory, self.config, self.rank = directory, config, rank
        self._exchange = exchange(processes)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_state: dict,
        trainer_state: dict,
        lanes: dict[str, torch.Tensor] | None = None,
    ) -> Path:
        """`directory/step-N`, written or, if asynchronous, under way. lanes: `RowStates.state_tensors()`."""
        self.wait()
        copy = self.config.asynchronous
        files = _contents(step, model, optimizer, data_state, trainer_state, self.rank, copy)
        if lanes is not None:
            files[f"lanes-{self.rank}.safetensors"] = _safetensors(
                {k: (t, []) for k, t in lanes.items()}, copy
            )
        write = (self.directory, step, files, self._exchange, self.rank, self.config)
        if not copy:
            return _commit(*write)

        def run() -> None:
            try:
                _commit(*write)
            except BaseException as error:
                self._error = error

        # A daemon: a process that dies of something else need not wait for the others' part of a save.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()
        return self.directory / f"step-{step}"

    def wait(self) -> None:
        """Until the save under way is on the disk. Raises what it failed of."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def unsound(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
        """Why these weights and moments are unsound (`find_unsound`), or None; alike on all processes."""
        mine = find_unsound({**_unique(model), **_optimizer_tensors(model, optimizer)})
        return next(filter(None, self._exchange(mine)), None)

    @property
    def failed(self) -> bool:
        """Whether `wait` would raise, as far as this process knows by now."""
        return self._error is not None


def exchange(processes: int) -> Exchange:
    """Over a gloo group of its own, so that a thread may use it beside the trainer's collectives."""
    if processes == 1:
        return lambda value: [value]
    group = dist.new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * processes
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def save(
    directory: Path,
    step: int,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_state: dict,
    trainer_state: dict,
) -> Path:
    """Writes `directory/step-N` from the only process there is; `Saver` does it for many."""
    files = _contents(step, model, optimizer, data_state, trainer_state, rank=0, copy=False)
    return _commit(directory, step, files, lambda value: [value], 0, None)


def load(
    path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0
) -> tuple[dict, dict]:
    """Puts a checkpoint's weights, moments and random states back; returns (trainer state, data state).

    With more processes than saved it, those without random states of their own keep the ones they have; the
    data state serves any number. The model may be sharded or whole, whatever the one that was saved was.

    Raises:
        InputError: the checkpoint is of another model.
    """
    trainer_state = json.loads((path / "trainer.json").read_text())
    load_weights(source_of(path, "model"), model)
    names, source = dict(model.named_parameters()), source_of(path, "optimizer")
    saved = shapes(source)
    check_moments(source, saved, model, optimizer, trainer_state.pop("without_moments", None))
    targets: dict[str, torch.Tensor] = {}
    optimizer.state.clear()
    for key, (shape, dtype) in saved.items():
        name, _, state = key.rpartition(".")
        parameter = names[name]
        if shape == parameter.shape and shape:
            targets[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # torch keeps the step count of a parameter wherever it put it at first; all else lies with the
            # parameter.
            on_host = not shape and not _fused(optimizer)
            targets[key] = torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
        optimizer.state[parameter][state] = targets[key]
    read_tensors(source, targets)
    own = path / f"rank-{rank}.pt"
    state = load_rank(own if own.exists() else path / "rank-0.pt")
    if own.exists():
        set_random_state(state["random"])
    return trainer_state, state["data"]


def load_rank(file: Path) -> dict[str, Any]:
    """What `rank-R.pt` holds: `random` and `data`. Raises `InputError`."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(f"{file}: it holds more than numbers and text, and was not loaded") from None
    except (RuntimeError, EOFError, ValueError) as error:  # what torch says of a file that is cut short
        raise InputError(f"{file}: cannot be read: {first_line(error)}") from None


def check_moments(
    source: Path,
    saved: dict[str, tuple[torch.Size, torch.dtype]],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    without: list[str] | None,
) -> None:
    """Raises `InputError` unless `saved` are the moments of `optimizer`: all that it keeps of each parameter,
    each of the shape that it keeps. Its kernels would write past a tensor of another shape.

    without: the parameters that had no moments when they were saved; None: not recorded, by an older version.
    """

    def refuse(problem: str) -> None:
        raise InputError(f"{source}: moments of another optimizer or model: {problem}")

    found: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for key, kind in saved.items():
        name, _, state = key.rpartition(".")
        found.setdefault(name, {})[state] = kind
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        expected = _kept_of_a_parameter(optimizer, group)
        for parameter in group["params"]:
            name = names[id(parameter)]
            own = found.pop(name, None)
            if own is None:
                if without is not None and name not in without:
                    refuse(f"it lacks those of {name}")
                continue
            if own.keys() != expected.keys():
                refuse(f"{name} has {', '.join(sorted(own))}; expected {', '.join(sorted(expected))}")
            for state, (shape, dtype) in own.items():
                wanted = torch.Size() if expected[state] else parameter.shape
                if shape != wanted or not dtype.is_floating_point:
                    there = f"{dtype} of {list(shape)}".removeprefix("torch.")
                    refuse(f"{name}.{state} is {there}; expected {list(wanted)}")
    if found:
        refuse(f"this model trains no {next(iter(found))}")


def _kept_of_a_parameter(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
    """What `optimizer` keeps of a parameter of `group`, by name, and whether that is a scalar: seen in a step
    with a parameter of 2 × 2."""
    probe = torch.nn.Parameter(torch.zeros(2, 2))
    probe.grad = torch.zeros(2, 2)
    bare = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    parts = getattr(bare, "parts", [bare])  # of `optim.Joined`
    kind = next(type(part) for part in parts if any(own is group for own in part.param_groups))
    settings = inspect.signature(kind).parameters.keys() & group.keys() - {"params", "capturable"}
    fresh = kind([probe], **{key: group[key] for key in settings})
    fresh.step()
    return {key: tensor.ndim == 0 for key, tensor in fresh.state[probe].items()}


def load_weights(source: Path, model: torch.nn.Module) -> None:
    """Loads a safetensors file, or a folder of parts, into `model` in place.

    Raises `InputError` where names or shapes differ.
    """
    own, saved = model.state_dict(), shapes(source)
    check_weights(source, saved, model)
    read_tensors(source, {name: own[name] for name in saved})


def check_weights(
    source: Path, saved: dict[str, tuple[torch.Size, torch.dtype]], model: torch.nn.Module
) -> None:
    """Raises `InputError` unless `saved` are the names and shapes of the weights of `model`."""
    own = model.state_dict()
    for name, (shape, _) in saved.items():
        if name not in own:
            raise InputError(f"{source}: a checkpoint of another shape: this model has no {name}")
        if own[name].shape != shape:
            raise InputError(
                f"{source}: a checkpoint of another shape: {name} is {list(shape)} there, "
                f"{list(own[name].shape)} in this model"
            )
    absent = sorted(_unique(model).keys() - saved.keys())
    if absent:
        raise InputError(f"{source}: a checkpoint of another shape: it lacks {absent[0]}")


def weights(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, whole, in host memory."""
    source = source_of(path, "model")
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes(source).items()}
    read_tensors(source, found)
    return found


def shapes(source: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, whole shapes and dtypes of the tensors of a safetensors file or a folder of parts."""
    found: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for file in _files(source):
        for name, offsets, part in _parts(file):
            ends = [o + n for o, n in zip(offsets, part.get_shape(), strict=True)]
            before = found[name][0] if name in found else ends
            found[name] = torch.Size(map(max, ends, before)), DTYPES[part.get_dtype()]
    return found


@torch.no_grad()
def read_tensors(source: Path, targets: dict[str, torch.Tensor]) -> None:
    """Fills `targets` in place from a safetensors file or a folder of parts; a DTensor takes what is its own.

    Raises `InputError` if they are not all there.
    """
    missing = {name: _local(target)[0].numel() for name, target in targets.items()}
    for file in _files(source):
        for name, offsets, part in _parts(file):
            if name not in targets:
                continue
            local, start = _local(targets[name])
            # From where to where the two overlap, in the whole tensor's places.
            low = list(map(max, offsets, start))
            high = [
                min(o + n, s + m)
                for o, n, s, m in zip(offsets, part.get_shape(), start, local.shape, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
                there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
                values = part[there] if there else part[...]
                local[here].copy_(values)
                missing[name] -= values.numel()
    if short := [name for name, count in missing.items() if count]:
        raise InputError(f"{source}: it lacks parts of {short[0]}")


def tensors(source: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, values) of every tensor of a safetensors file, or of every part in a folder of them."""
    for file in _files(source):
        for name, _, part in _parts(file):
            yield name, part[...]


def find_unsound(tensors: dict[str, torch.Tensor]) -> str | None:
    """Names a tensor, of those that this process has, whose values are not finite or beyond `LARGEST`."""
    values = {name: _local(tensor)[0].detach() for name, tensor in tensors.items()}
    values = {name: t for name, t in values.items() if t.is_floating_point() and t.numel()}
    if not values:
        return None
    # One fused reduction and one synchronisation; which of them it is, only a bad one needs to know.
    largest = torch.nn.utils.get_total_norm(values.values(), norm_type=math.inf)
    if largest <= LARGEST:
        return None
    for name, tensor in values.items():
        worst = tensor.abs().max().item()
        if not worst <= LARGEST:
            return f"{name} has values of {worst:g}"
    return None


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


def source_of(path: Path, name: str) -> Path:
    """`model` or `optimizer` of a checkpoint: its folder of parts, or its file."""
    return folder if (folder := path / name).is_dir() else path / f"{name}.safetensors"


def _files(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def _parts(file: Path) -> Iterable[tuple[str, list[int], Any]]:
    """(name, where its part begins in each dimension, safetensors' slice of it) for each tensor of a file."""
    try:
        with safe_open(file, framework="pt") as stream:
            offsets = json.loads((stream.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in stream.keys():  # noqa: SIM118  not a dict
                part = stream.get_slice(name)
                yield name, offsets[name]["saved_offsets"] if offsets else [0] * len(part.get_shape()), part
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(
            f"{file}: not a safetensors file of a checkpoint, and was not loaded: {error}"
        ) from None


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """This process's part of a tensor, and where it begins in each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # torch.distributed.checkpoint's
    return tensor.to_local(), list(chunk.offsets)


def _unique(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, every parameter once: no tied weight is stored under two names."""
    first = {id(p): name for name, p in reversed([*model.named_parameters(remove_duplicate=False)])}
    again = {n for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


@torch.no_grad()
def _contents(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_state: dict,
    trainer_state: dict,
    rank: int,
    copy: bool,
) -> dict[str, Content]:
    """The files that this process writes; `copy`: of tensors as they are now, in host memory."""
    own = io.BytesIO()
    torch.save({"random": random_state(), "data": data_state}, own)
    files: dict[str, Content] = {f"rank-{rank}.pt": [own.getvalue()]}
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for name, tensors in (("model", _unique(model)), ("optimizer", _optimizer_tensors(model, optimizer))):
        if sharded:
            # torch.distributed.checkpoint's name for it
            name = f"{name}/shard-{rank + 1:05}-model-00001-of-00001"
            parts = {key: _local(tensor) for key, tensor in tensors.items() if _writes(tensor, rank)}
            files[f"{name}.safetensors"] = _safetensors(parts, copy, sharded=True)
        elif rank == 0:
            files[f"{name}.safetensors"] = _safetensors({k: (t, []) for k, t in tensors.items()}, copy)
    if rank == 0:
        if hasattr(model, "config"):
            config: Any = model.config
            files["config.json"] = [config.to_json_string().encode()]
            if hasattr(config, "plugin_files"):
                files |= {name: [text.encode()] for name, text in config.plugin_files().items()}
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        without = [n for n, p in model.named_parameters() if id(p) in trained and not optimizer.state.get(p)]
        record = {**trainer_state, "step": step, "without_moments": without}
        files["trainer.json"] = [(json.dumps(record, indent=1) + "\n").encode()]
    return files


def _writes(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this process is the one that saves its part: of replicas the first, of no rows none."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate() or []
    first = all(place.is_shard() or at == 0 for place, at in zip(tensor.placements, coordinate, strict=True))
    return first and (tensor.to_local().numel() > 0 or rank == 0)


def _safetensors(
    parts: dict[str, tuple[torch.Tensor, list[int]]], copy: bool, sharded: bool = False
) -> Content:
    """A safetensors file; `parts`: name to tensor and where it begins in the whole one."""
    metadata = {"format": "pt"}
    if sharded:
        places = {name: {"saved_offsets": offsets} for name, (_, offsets) in sorted(parts.items())}
        metadata |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    header: dict[str, Any] = {"__metadata__": metadata}
    codes, tensors, end = {dtype: code for code, dtype in DTYPES.items()}, [], 0
    # The widest first: each value then lies at a multiple of its size.
    for name, (tensor, _) in sorted(parts.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin, end = end, end + tensor.nbytes
        code = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = code
        tensors.append(tensor.detach().to("cpu", copy=True) if copy else tensor.detach())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *tensors]


def _size(content: Content) -> int:
    return sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in content)


def _commit(
    directory: Path,
    step: int,
    files: dict[str, Content],
    exchange: Exchange,
    rank: int,
    config: CheckpointConfig | None,
) -> Path:
    """Writes every process's `files`, then the manifest, and names the whole `step-N`."""
    final, part = directory / f"step-{step}", directory / f".tmp-step-{step}"
    need, done = sum(exchange(sum(map(_size, files.values())))), 0

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            free = shutil.disk_usage(directory).free
            if free < need:
                raise OSError(
                    errno.ENOSPC, f"{_amount(need)} are needed, {_amount(need - free)} more than are free"
                )
            for folder in {Path(name).parent for name in files}:
                (part / folder).mkdir(exist_ok=True)

    def write() -> dict[str, dict]:
        nonlocal done
        entries = {}
        for name, content in files.items():
            entries[name] = _write(part / name, content)
            done += entries[name]["bytes"]
        return entries

    def seal(entries: dict[str, dict]) -> None:
        if rank == 0:
            versions = {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            }
            head = {"format": 2, "step": step, "versions": versions}
            text = manifest_text({**head, "files": dict(sorted(entries.items()))})
            _write(part / "manifest.json", [text.encode()])
            for folder in {part / Path(name).parent for name in entries} | {part}:
                sync(folder)
            if final.exists():  # a damaged one, or one of steps that the run went back over
                shutil.rmtree(old := part.with_name(f"{part.name}-old"), ignore_errors=True)
                final.rename(old)
            part.rename(final)
            sync(directory)

    def clear() -> None:
        if rank == 0 and config is not None:
            prune(directory, config, step)

    def together(act: Callable[[], Any]) -> list[Any]:
        """What `act` gives on each process; if it fails on one, that is raised on all."""
        try:
            mine = act(), None, done
        except OSError as error:
            mine = None, error, done
        except Exception as error:  # whatever it is, the others must not wait for ever
            mine = None, RuntimeError(repr(error)), done
        values, errors, counts = zip(*exchange(mine), strict=True)
        for error in filter(None, errors):
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            if not isinstance(error, OSError):
                raise error
            kept = [p for p in checkpoint_folders(directory) if p != final]
            stays = f"{kept[-1].name} stays" if kept else "there is no earlier one"
            if not no_room(error):
                raise InputError(f"{final}: not saved, {stays}: {error}")
            rest = need - sum(counts)
            rest = f"{_amount(rest)} of {_amount(need)} were still to be written" if rest else error.strerror
            if act is begin:
                rest = error.strerror
            what = "a file may not grow further" if error.errno == errno.EFBIG else "the disk is full"
            raise DiskFull(f"{final}: not saved, {stays}: {what}: {rest}; make room, and start again")
        return list(values)

    together(begin)
    entries = {name: entry for own in together(write) for name, entry in own.items()}
    together(lambda: seal(entries))
    together(clear)
    return final


def _write(file: Path, content: Content) -> dict[str, Any]:
    """Writes and syncs a file; its entry in the manifest is of what was meant to be there."""
    digest, size = hashlib.sha256(), 0
    with file.open("wb") as stream:
        for piece in content:
            if isinstance(piece, torch.Tensor):
                piece = piece.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(piece)
            size += len(piece)
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _amount(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    raise AssertionError
