"""Saves and loads checkpoints; an interrupted save leaves none.

    checkpoints/step-N/
        config.json                         model config
        model.safetensors                   weights; with config.json a folder for from_pretrained
        optimizer.safetensors               moments, `<parameter name>.<state>`
        model/, optimizer/                  instead of those two under FSDP: one part per process
        trainer.json                        step, tokens, processes
        rank-R.pt                           random states and data position of process R
        lanes-R.safetensors                 row states of process R, with `data.long_documents: carry`
        manifest.json                       size and SHA-256 of every file; written last
        unsound.txt                         why no run may resume from it (`mark_unsound`); usually absent

Files are written into `.tmp-step-N`, synced, and then the folder is renamed: `step-N` is complete. A run
resumes only from a checkpoint whose files match the manifest. `rank-R.pt` is read with `weights_only=True`.

Parts have the Hugging Face format of `torch.distributed.checkpoint`: safetensors whose header says where in
its tensor each part begins; torch's `HuggingFaceStorageReader` reads them too. Any number of processes,
sharded or not, loads either kind of checkpoint. torch's own writer is not used: it copies the file in memory,
communicates while it writes, and hides the disk's errors.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from nalanda.common.errors import DiskFull, InputError, first_line, no_room
from nalanda.common.files import manifest_text, sync
from nalanda.common.text import size
from nalanda.config.schema import CheckpointConfig
from nalanda.train import memory
from nalanda.train.checkpoint_dir import checkpoint_folders, prune, step_of

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
"""Dtypes by their names in safetensors."""

LAST_SAVE = 60.0
"""Seconds that a run which fails leaves to a checkpoint under way; of a process that is gone, it would wait
for ever."""

LARGEST = 1e15
"""Largest sound weight or moment: a sum of squares of larger ones overflows fp32."""

Content = list[bytes | torch.Tensor]
"""A file's contents, in pieces."""

Exchange = Callable[[Any], list[Any]]
"""Gathers one value from each process on all of them; every process must call it."""


class Saver:
    """Writes a run's checkpoints, one at a time, and removes those that `config` does not keep.

    All processes make the same calls. An asynchronous save is complete once `wait` has returned; `save` calls
    it first, and the caller must before it loads a checkpoint or ends the run. A save that fails keeps the
    earlier checkpoints and raises `DiskFull` or `InputError` on all processes; an asynchronous one raises in
    `wait`, and `failed` is True until then.

    Attributes:
        saved: the step of the newest checkpoint on the disk, 0 without one.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        rank: int = 0,
        processes: int = 1,
        timeout: timedelta | None = None,
    ):
        self.directory, self.config, self.rank = directory, config, rank
        self._exchange = exchange(processes, timeout)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved = max([0, *map(step_of, checkpoint_folders(directory))])

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_state: dict,
        trainer_state: dict,
        row_states: dict[str, torch.Tensor] | None = None,
    ) -> Path:
        """Writes `directory/step-N`, or starts to if asynchronous. row_states: `RowStates.state_tensors`."""
        self.wait()
        copy = self._copies(model, optimizer)
        files = _contents(step, model, optimizer, data_state, trainer_state, self.rank, copy)
        if row_states is not None:
            files[f"lanes-{self.rank}.safetensors"] = _safetensors(
                {name: (t, []) for name, t in row_states.items()}, copy
            )
        if not copy:
            return self._commit(step, files)

        def run() -> None:
            try:
                self._commit(step, files)
            except BaseException as error:
                self._error = error

        # A daemon: a process that fails otherwise does not wait for the other processes' parts.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()
        return self.directory / f"step-{step}"

    def wait(self) -> None:
        """Waits until the running save is on the disk. Raises its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, error: type[BaseException] | None) -> None:
        """Lets a running save end, if the run ends by an `error` that leaves time for it; its own error is
        nobody's any more."""
        if self._thread is not None and error is not None and issubclass(error, Exception):
            self._thread.join(LAST_SAVE)

    def _copies(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a save is asynchronous. All processes agree: each must have the memory."""
        if self.config.asynchronous != "auto":
            return self.config.asynchronous
        tensors = {**_unique(model), **_optimizer_tensors(model, optimizer)}
        own = sum(
            _local(tensor)[0].nbytes for tensor in tensors.values() if _writes(tensor, self.rank)
        )
        copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _is_sharded(model) else 1
        return all(self._exchange(own * copies <= memory.host() // 2))

    def unsound(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
        """Why the weights or moments of any process are unsound (`find_unsound`), or None.

        Waits for a running save, whose thread gathers over the same group."""
        self.wait()
        mine = find_unsound({**_unique(model), **_optimizer_tensors(model, optimizer)})
        return next(filter(None, self._exchange(mine)), None)

    @property
    def failed(self) -> bool:
        """Whether this process already knows that `wait` will raise."""
        return self._error is not None

    def _commit(self, step: int, files: dict[str, Content]) -> Path:
        """Writes every process's `files`, then the manifest, and renames the folder `step-N`."""
        directory, rank, exchange = self.directory, self.rank, self._exchange
        final, part = directory / f"step-{step}", directory / f".tmp-step-{step}"
        pieces = [piece for content in files.values() for piece in content]
        own = sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in pieces)
        need, done = sum(exchange(own)), 0

        def begin() -> None:
            if rank == 0:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                free = shutil.disk_usage(directory).free
                if free < need:
                    raise OSError(
                        errno.ENOSPC,
                        f"{size(need)} are needed, {size(need - free)} more than are free",
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
                if final.exists():  # a damaged one, or one from before a rollback
                    shutil.rmtree(old := part.with_name(f"{part.name}-old"), ignore_errors=True)
                    final.rename(old)
                part.rename(final)
                sync(directory)

        def clear() -> None:
            if rank == 0:
                prune(directory, self.config, step)

        def together(act: Callable[[], Any]) -> list[Any]:
            """The results of `act` on all processes; an error on one is raised on all."""
            try:
                mine = act(), None, done
            except OSError as error:
                mine = None, error, done
            except Exception as error:  # any error: the others must not wait forever
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
                left = f"{size(rest)} of {size(need)} were still to be written"
                problem = error.strerror if act is begin or not rest else left
                what = (
                    "a file may not grow further"
                    if error.errno == errno.EFBIG
                    else "the disk is full"
                )
                raise DiskFull(
                    f"{final}: not saved, {stays}: {what}: {problem}; make room, and start again"
                )
            return list(values)

        together(begin)
        entries = {name: entry for own in together(write) for name, entry in own.items()}
        together(lambda: seal(entries))
        self.saved = step
        together(clear)
        return final


def exchange(processes: int, timeout: timedelta | None = None) -> Exchange:
    """An `Exchange` over a gloo group of its own: a thread may use it during the trainer's collectives."""
    if processes == 1:
        return lambda value: [value]
    group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * processes
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


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
    """The files that this process writes. copy: copies tensors to host memory."""
    own = io.BytesIO()
    torch.save({"random": random_state(), "data": data_state}, own)
    files: dict[str, Content] = {f"rank-{rank}.pt": [own.getvalue()]}
    sharded = _is_sharded(model)
    for name, tensors in (
        ("model", _unique(model)),
        ("optimizer", _optimizer_tensors(model, optimizer)),
    ):
        if sharded:
            # The file name of torch.distributed.checkpoint.
            name = f"{name}/shard-{rank + 1:05}-model-00001-of-00001"
            parts = {
                key: _local(tensor) for key, tensor in tensors.items() if _writes(tensor, rank)
            }
            files[f"{name}.safetensors"] = _safetensors(parts, copy, sharded=True)
        elif rank == 0:
            files[f"{name}.safetensors"] = _safetensors(
                {k: (t, []) for k, t in tensors.items()}, copy
            )
    if rank == 0:
        if hasattr(model, "config"):
            config: Any = model.config
            files["config.json"] = [config.to_json_string().encode()]
            if hasattr(config, "plugin_files"):
                files |= {name: [text.encode()] for name, text in config.plugin_files().items()}
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        without = [
            n
            for n, p in model.named_parameters()
            if id(p) in trained and not optimizer.state.get(p)
        ]
        record = {**trainer_state, "step": step, "without_moments": without}
        files["trainer.json"] = [(json.dumps(record, indent=1) + "\n").encode()]
    return files


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _writes(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this process saves its part: only the first of several replicas does, and no empty part."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate() or []
    first = all(
        place.is_shard() or at == 0 for place, at in zip(tensor.placements, coordinate, strict=True)
    )
    return first and (tensor.to_local().numel() > 0 or rank == 0)


def _write(file: Path, content: Content) -> dict[str, Any]:
    """Writes and syncs a file. Returns its entry in the manifest, made from `content`, not read back."""
    digest, count = hashlib.sha256(), 0
    with file.open("wb") as stream:
        for piece in content:
            if isinstance(piece, torch.Tensor):
                piece = piece.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(piece)
            count += len(piece)
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": count, "sha256": digest.hexdigest()}


def load(
    path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0
) -> tuple[dict, dict]:
    """Restores a checkpoint's weights, moments and random states; returns (trainer state, data state).

    The data state fits any number of processes. A process of higher rank than those that saved it keeps its
    random states. The model may be sharded or whole, and the saved one too.

    Raises:
        InputError: the checkpoint is of another model or optimizer.
    """
    trainer_state = json.loads((path / "trainer.json").read_text())
    load_weights(tensor_source(path, "model"), model)
    names, source = dict(model.named_parameters()), tensor_source(path, "optimizer")
    saved = shapes(source)
    check_moments(source, saved, model, optimizer, trainer_state.pop("without_moments", None))
    targets: dict[str, torch.Tensor] = {}
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    optimizer.state.clear()
    for key, (shape, dtype) in saved.items():
        name, _, state = key.rpartition(".")
        parameter = names[name]
        if shape == parameter.shape and shape:
            targets[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # torch keeps step counts on the host, unless its kernels read them on the device.
            on_host = not shape and not fused
            targets[key] = torch.empty(
                shape, dtype=dtype, device="cpu" if on_host else parameter.device
            )
        optimizer.state[parameter][state] = targets[key]
    read_tensors(source, targets)
    own = path / f"rank-{rank}.pt"
    state = load_rank(own if own.exists() else path / "rank-0.pt")
    if own.exists():
        set_random_state(state["random"])
    return trainer_state, state["data"]


def load_rank(file: Path) -> dict[str, Any]:
    """Loads `rank-R.pt`: {"random": …, "data": …}. Raises `InputError`."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{file}: it holds more than numbers and text, and was not loaded"
        ) from None
    except (RuntimeError, EOFError, ValueError) as error:  # torch's errors for a truncated file
        raise InputError(f"{file}: cannot be read: {first_line(error)}") from None


def load_weights(source: Path, model: torch.nn.Module) -> None:
    """Loads a safetensors file, or a folder of parts, into `model`. Raises `InputError` if names or shapes
    differ."""
    own, saved = model.state_dict(), shapes(source)
    check_weights(source, saved, model)
    read_tensors(source, {name: own[name] for name in saved})


def check_weights(
    source: Path, saved: dict[str, tuple[torch.Size, torch.dtype]], model: torch.nn.Module
) -> None:
    """Raises `InputError` unless `saved` has the names and shapes of the weights of `model`."""
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


def check_moments(
    source: Path,
    saved: dict[str, tuple[torch.Size, torch.dtype]],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    without: list[str] | None,
) -> None:
    """Raises `InputError` unless `saved` has every moment of `optimizer` in its shape. Into smaller tensors,
    the optimizer's kernels would write past the end.

    without: parameters that had no moments when they were saved; None if an older version recorded none.
    """

    def refuse(problem: str) -> None:
        raise InputError(
            f"{source}: moments of another optimizer, model or version: {problem}; set optim.name back, or "
            "begin a new run with model.init_from"
        )

    found: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for key, kind in saved.items():
        name, _, state = key.rpartition(".")
        found.setdefault(name, {})[state] = kind
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        expected = _moments_of(optimizer, group)
        for parameter in group["params"]:
            name = names[id(parameter)]
            own = found.pop(name, None)
            if own is None:
                if without is not None and name not in without:
                    refuse(f"it lacks those of {name}")
                continue
            if own.keys() != expected.keys():
                refuse(
                    f"{name} has {', '.join(sorted(own))}; expected {', '.join(sorted(expected))}"
                )
            for state, (shape, dtype) in own.items():
                wanted = torch.Size() if expected[state] else parameter.shape
                if shape != wanted or not dtype.is_floating_point:
                    there = f"{dtype} of {list(shape)}".removeprefix("torch.")
                    refuse(f"{name}.{state} is {there}; expected {list(wanted)}")
    if found:
        refuse(f"this model trains no {next(iter(found))}")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises `InputError` for an optimizer whose moments a checkpoint cannot hold."""
    for group in optimizer.param_groups:
        _moments_of(optimizer, group)


def _moments_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, bool]:
    """Names of the moments that `optimizer` keeps per parameter of `group`, and whether each is a scalar.

    Found by a step with a parameter of shape 2 × 3. Raises `InputError` if they are no such tensors."""
    probe = torch.nn.Parameter(torch.zeros(2, 3))
    probe.grad = torch.zeros(2, 3)
    bare = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    parts = getattr(bare, "parts", [bare])  # of `optim.Joined`
    kind = next(type(part) for part in parts if any(own is group for own in part.param_groups))
    settings = inspect.signature(kind).parameters.keys() & group.keys() - {"params", "capturable"}
    try:
        fresh = kind([probe], **{key: group[key] for key in settings})
        fresh.step()
    except Exception as error:  # of a plugin
        raise InputError(
            f"optim.name: {kind.__name__} cannot be made again from a group's keys: {first_line(error)}"
        ) from None
    for key, moment in fresh.state[probe].items():
        is_tensor = isinstance(moment, torch.Tensor)
        if not (is_tensor and moment.is_floating_point() and moment.shape in ((), probe.shape)):
            what = f"{moment.dtype} of {list(moment.shape)}" if is_tensor else type(moment).__name__
            raise InputError(
                f"optim.name: {kind.__name__} keeps {key} of a matrix {list(probe.shape)} as {what}: "
                "checkpoints hold float tensors of the parameter's shape or without dimensions"
            )
    return {key: moment.ndim == 0 for key, moment in fresh.state[probe].items()}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's unsharded weights, in host memory."""
    source = tensor_source(path, "model")
    found = {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes(source).items()
    }
    read_tensors(source, found)
    return found


def random_state() -> dict:
    """The states of this process's random generators, in types that `weights_only` loads."""
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


def find_unsound(tensors: dict[str, torch.Tensor]) -> str | None:
    """Describes a tensor with a value of this process that is not finite or beyond `LARGEST`, or None."""
    values = {name: _local(tensor)[0].detach() for name, tensor in tensors.items()}
    values = {name: t for name, t in values.items() if t.is_floating_point() and t.numel()}
    if not values:
        return None
    # One fused reduction and one synchronisation; the loop below only runs if a value is bad.
    largest = torch.nn.utils.get_total_norm(values.values(), norm_type=math.inf)
    if largest <= LARGEST:
        return None
    for name, tensor in values.items():
        worst = tensor.abs().max().item()
        if not worst <= LARGEST:
            return f"{name} has values of {worst:g}"
    return None


def shapes(source: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, unsharded shapes and dtypes of the tensors of a safetensors file or a folder of parts."""
    found: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for file in _files(source):
        for name, offsets, part in _parts(file):
            ends = [o + n for o, n in zip(offsets, part.get_shape(), strict=True)]
            before = found[name][0] if name in found else ends
            found[name] = torch.Size(map(max, ends, before)), DTYPES[part.get_dtype()]
    return found


@torch.no_grad()
def read_tensors(source: Path, targets: dict[str, torch.Tensor]) -> None:
    """Fills `targets` from a safetensors file or a folder of parts, of a DTensor this process's part.

    Raises `InputError` if values are missing.
    """
    missing = {name: _local(target)[0].numel() for name, target in targets.items()}
    for file in _files(source):
        for name, offsets, part in _parts(file):
            if name not in targets:
                continue
            local, start = _local(targets[name])
            # The overlap, in coordinates of the unsharded tensor.
            low = list(map(max, offsets, start))
            high = [
                min(o + n, s + m)
                for o, n, s, m in zip(offsets, part.get_shape(), start, local.shape, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                here = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
                there = tuple(
                    slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True)
                )
                values = part[there] if there else part[...]
                local[here].copy_(values)
                missing[name] -= values.numel()
    if short := [name for name, count in missing.items() if count]:
        raise InputError(f"{source}: it lacks parts of {short[0]}")


def tensors(source: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, values) of every tensor of a safetensors file or part of a folder."""
    for file in _files(source):
        for name, _, part in _parts(file):
            yield name, part[...]


def tensor_source(path: Path, name: str) -> Path:
    """The folder of parts, or the file, of a checkpoint's `model` or `optimizer`."""
    return folder if (folder := path / name).is_dir() else path / f"{name}.safetensors"


def _files(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors")) if source.is_dir() else [source]


def _parts(file: Path) -> Iterable[tuple[str, list[int], Any]]:
    """(name, offsets of the part in each dimension, safetensors slice) of each tensor of a file."""
    try:
        with safe_open(file, framework="pt") as stream:
            offsets = json.loads((stream.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in stream.keys():  # noqa: SIM118  not a dict
                part = stream.get_slice(name)
                yield (
                    name,
                    offsets[name]["saved_offsets"] if offsets else [0] * len(part.get_shape()),
                    part,
                )
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(
            f"{file}: not a safetensors file of a checkpoint, and was not loaded: {error}"
        ) from None


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """This process's part of a tensor, and its offset in each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # torch.distributed.checkpoint's
    return tensor.to_local(), list(chunk.offsets)


def _unique(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, with tied weights under their first name only."""
    first = {id(p): name for name, p in reversed([*model.named_parameters(remove_duplicate=False)])}
    again = {n for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}


def _optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def _safetensors(
    parts: dict[str, tuple[torch.Tensor, list[int]]], copy: bool, sharded: bool = False
) -> Content:
    """A safetensors file. parts: name to tensor and its offset in the unsharded one."""
    metadata = {"format": "pt"}
    if sharded:
        places = {name: {"saved_offsets": offsets} for name, (_, offsets) in sorted(parts.items())}
        metadata |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    header: dict[str, Any] = {"__metadata__": metadata}
    codes, tensors, end = {dtype: code for code, dtype in DTYPES.items()}, [], 0
    # The widest dtype first: every value is then aligned to its size.
    for name, (tensor, _) in sorted(
        parts.items(), key=lambda item: (-item[1][0].itemsize, item[0])
    ):
        begin, end = end, end + tensor.nbytes
        place = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": codes[tensor.dtype], **place}
        tensors.append(tensor.detach().to("cpu", copy=True) if copy else tensor.detach())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *tensors]
