"""Saves and loads checkpoints; an interrupted save leaves none.

    checkpoints/step-N/
        config.json                         model config
        model.safetensors                   weights; with config.json a folder for from_pretrained
        optimizer.safetensors               moments, `<parameter name>.<state>`
        ema-D.safetensors                   average of the weights with decay D, of `train.ema`
        model/, optimizer/, ema-D/          instead of those under FSDP: one part per process
        trainer.json                        step, tokens, processes
        rank-R.pt                           random states and data position of process R
        slots-R.safetensors                 carried states of process R, with `data.long_documents: carry`
        manifest.json                       size and SHA-256 of every file; written last
        unsound.txt                         why no run may resume from it (`mark_unsound`); usually absent

Files are written into `.tmp-step-N`, synced, and then the folder is renamed: `step-N` is complete. A run
resumes only from a checkpoint whose files match the manifest. `rank-R.pt` is read with `weights_only=True`.

Machines that share no disk have a folder each: with the whole manifest, and the files of its own processes.
mirror.py puts the parts together in a store.
"""

import errno
import inspect
import io
import json
import math
import pickle
import random
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nalanda.common.errors import DiskFull, InputError, first_line, no_room
from nalanda.common.files import discard, manifest_text, sync
from nalanda.common.processes import local_processes
from nalanda.common.text import size
from nalanda.common.versions import versions
from nalanda.config.schema import CheckpointConfig
from nalanda.train import memory
from nalanda.train.checkpoint_dir import checkpoint_folders, prune, step_of
from nalanda.train.tensor_files import (
    Content,
    Shapes,
    Tensors,
    bytes_of,
    copied,
    is_sharded,
    is_writer,
    local_part,
    read_tensors,
    safetensors_content,
    shapes,
    tensor_source,
    write_file,
)

LAST_SAVE = 60.0
"""Seconds that a failing run leaves to a running save. It would wait for ever for a process that is gone."""

LARGEST = 1e15
"""Largest sound weight or moment: a sum of squares of larger ones overflows fp32."""

Exchange = Callable[[Any], list[Any]]
"""Gathers one value from each process on all of them; every process must call it."""


class Saver:
    """Writes a run's checkpoints, one at a time, and removes those that `config` does not keep.

    All processes make the same calls. An asynchronous save is complete once `wait` has returned. `save` calls
    `wait` first; the caller must call it before loading a checkpoint or ending the run.

    A save that fails keeps the earlier checkpoints, and raises `DiskFull` or `InputError` on all processes. An
    asynchronous one raises in `wait`; until then `failed` is True.

    first: the lowest rank that writes to the same `directory`. It makes the folders, also for the others.

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
        first: int = 0,
    ):
        self.directory, self.config, self.rank, self.first = directory, config, rank, first
        self._exchange = exchange(processes, timeout)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Of an earlier start, until this one has saved.
        self.saved = max([0, *map(step_of, checkpoint_folders(directory))])

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_state: dict,
        trainer_state: dict,
        carried_states: Tensors | None = None,
        averages: dict[str, Tensors] | None = None,
    ) -> Path:
        """Writes `directory/step-N`, or starts to if asynchronous.

        carried_states: `CarriedStates.state_tensors`. averages: `Averages.tensors`.
        """
        # One save at a time. An error of the one before is raised here, on all processes.
        self.wait()
        # By the name of the file, or of the folder of parts.
        tensors = {
            "model": model_tensors(model),
            "optimizer": optimizer_tensors(model, optimizer),
            **(averages or {}),
        }
        files = tensor_contents(tensors, is_sharded(model), self.rank)
        copies = self._copies(files, is_sharded(model))
        if carried_states is not None:
            files[f"slots-{self.rank}.safetensors"] = safetensors_content(carried_states)
        files[f"rank-{self.rank}.pt"] = [rank_content(data_state)]
        if self.rank == 0:
            files |= shared_contents(step, model, optimizer, trainer_state)
        if not copies:
            return self._commit(step, files)

        # Training changes the tensors meanwhile.
        files = {name: copied(content) for name, content in files.items()}

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
        """Lets a running save end, if the run ends by an `error` that leaves time for it. The save's own error
        is not raised."""
        if self._thread is not None and error is not None and issubclass(error, Exception):
            self._thread.join(LAST_SAVE)

    def _copies(self, files: dict[str, Content], sharded: bool) -> bool:
        """Whether a save of these files is asynchronous. All processes agree: each must have the memory."""
        if self.config.asynchronous != "auto":
            return self.config.asynchronous
        # Without shards only one process of a machine writes.
        writers = local_processes() if sharded else 1
        fits = bytes_of(files) * writers <= memory.host() // 2
        return all(self._exchange(fits))

    def unsound(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
        """Why the weights or moments of any process are unsound (`find_unsound`), or None.

        Waits for a running save, whose thread gathers over the same group."""
        self.wait()
        problem = find_unsound({**model_tensors(model), **optimizer_tensors(model, optimizer)})
        return next(filter(None, self._exchange(problem)), None)

    @property
    def failed(self) -> bool:
        """Whether this process already knows that `wait` will raise."""
        return self._error is not None

    def _commit(self, step: int, files: dict[str, Content]) -> Path:
        """Writes every process's `files`, and then removes the checkpoints that are not kept."""
        commit = Commit(self.directory, step, files, self.rank, self._exchange, self.first)
        path = commit.run()
        self.saved = step
        commit.prune(self.config)
        return path


class Commit:
    """One checkpoint on its way to the disk, in two phases.

    First all processes write their files into a temporary folder. Then the first process of each folder writes
    the manifest and renames the folder. After each step the processes exchange their errors: one is raised on
    all.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        files: dict[str, Content],
        rank: int,
        exchange: Exchange,
        first: int,
    ):
        self.directory, self.step, self.files = directory, step, files
        self.makes_folder, self.exchange = rank == first, exchange
        self.final = directory / f"step-{step}"
        self.temporary = directory / f".tmp-step-{step}"
        plans = exchange((first, bytes_of(files), versions()))
        self.bytes_needed = sum(count for _, count, _ in plans)
        self.bytes_in_folder = sum(count for folder, count, _ in plans if folder == first)
        # Those of the first process, so that all folders have the same manifest.
        self.versions = plans[0][2]
        self.bytes_written = 0  # by this process
        self.complete = False

    def run(self) -> Path:
        """Makes the steps; returns the checkpoint's folder."""
        # Each waits for the step before on all processes: the folder exists, then every file is synced.
        self.together(self.make_folder)
        written = self.together(self.write_files, writes=True)
        entries = {name: entry for process in written for name, entry in process.items()}
        self.together(partial(self.seal, entries))
        self.complete = True
        return self.final

    def make_folder(self) -> None:
        """Makes an empty temporary folder, if the disk has room."""
        if not self.makes_folder:
            return
        discard(self.temporary)
        self.temporary.mkdir(parents=True)
        free = shutil.disk_usage(self.directory).free
        if free < self.bytes_in_folder:
            lacking = size(self.bytes_in_folder - free)
            raise OSError(
                errno.ENOSPC,
                f"{size(self.bytes_in_folder)} are needed, {lacking} more than are free",
            )
        for folder in {Path(name).parent for name in self.files}:
            (self.temporary / folder).mkdir(exist_ok=True)

    def write_files(self) -> dict[str, dict]:
        """Writes this process's files; returns their entries in the manifest."""
        entries = {}
        for name, content in self.files.items():
            entries[name] = write_file(self.temporary / name, content)
            self.bytes_written += entries[name]["bytes"]
        return entries

    def seal(self, entries: dict[str, dict]) -> None:
        """Writes the manifest, syncs the folders, and gives the checkpoint its name."""
        if not self.makes_folder:
            return
        # The manifest comes last: a folder without one was cut short.
        head = {"format": 2, "step": self.step, "versions": self.versions}
        text = manifest_text({**head, "files": dict(sorted(entries.items()))})
        write_file(self.temporary / "manifest.json", [text.encode()])
        for folder in {file.parent for file in self.temporary.rglob("*")}:
            sync(folder)

        if self.final.exists():  # a damaged one, or one from before a rollback
            old = self.temporary.with_name(f"{self.temporary.name}-old")
            discard(old)
            self.final.rename(old)
        # From this rename on the checkpoint exists, and after the sync also through a power cut.
        self.temporary.rename(self.final)
        sync(self.directory)

    def prune(self, config: CheckpointConfig) -> None:
        """Removes the checkpoints that `config` does not keep."""
        self.together(lambda: self.makes_folder and prune(self.directory, config, self.step))

    def together(self, act: Callable[[], Any], *, writes: bool = False) -> list[Any]:
        """Calls `act` on all processes; returns all results. An error on one is raised on all.

        writes: whether `act` writes the files, so that a full disk leaves some of them unwritten.
        """
        result = error = None
        try:
            result = act()
        except OSError as raised:
            error = raised
        except Exception as raised:  # any error: the others must not wait forever
            error = RuntimeError(repr(raised))

        # The exchange is also the barrier between the steps.
        reply = self.exchange((result, error, self.bytes_written))
        results, errors, counts = zip(*reply, strict=True)
        first_error = next(filter(None, errors), None)
        if first_error is None:
            return list(results)
        if self.makes_folder:
            discard(self.temporary)
        raise self.explain(first_error, self.bytes_needed - sum(counts) if writes else 0)

    def explain(self, error: Exception, bytes_left: int) -> Exception:
        """The error to raise for one of a step: `DiskFull` or `InputError` for an error of the disk."""
        if not isinstance(error, OSError):
            return error
        if self.complete:
            return InputError(
                f"{self.final}: saved, but an older checkpoint cannot be removed: {error}; remove it, and start "
                "again"
            )
        others = [path for path in checkpoint_folders(self.directory) if path != self.final]
        stays = f"{others[-1].name} stays" if others else "there is no earlier one"
        if not no_room(error):
            return InputError(f"{self.final}: not saved, {stays}: {error}")

        limited = error.errno == errno.EFBIG
        cause = "a file may not grow further" if limited else "the disk is full"
        problem = error.strerror
        if bytes_left:
            problem = f"{size(bytes_left)} of {size(self.bytes_needed)} were still to be written"
        return DiskFull(
            f"{self.final}: not saved, {stays}: {cause}: {problem}; make room, and start again"
        )


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
def tensor_contents(tensors_of: dict[str, Tensors], sharded: bool, rank: int) -> dict[str, Content]:
    """The files of tensors that this process writes. tensors_of: by the name of the file."""
    files: dict[str, Content] = {}
    for name, tensors in tensors_of.items():
        written = {key: tensor for key, tensor in tensors.items() if is_writer(tensor, rank)}
        if sharded:
            # The file name of torch.distributed.checkpoint.
            file = f"{name}/shard-{rank + 1:05}-model-00001-of-00001.safetensors"
            files[file] = safetensors_content(written, sharded=True)
        # Whole tensors are the same on all processes.
        elif rank == 0:
            files[f"{name}.safetensors"] = safetensors_content(written)
    return files


def rank_content(data_state: dict) -> bytes:
    """`rank-R.pt`, which `load_rank` reads."""
    stream = io.BytesIO()
    torch.save({"random": random_state(), "data": data_state}, stream)
    return stream.getvalue()


def shared_contents(
    step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, trainer_state: dict
) -> dict[str, Content]:
    """The files that only the first process writes: the model's config and code, and trainer.json."""
    files: dict[str, Content] = {}
    if hasattr(model, "config"):
        config: Any = model.config
        files["config.json"] = [config.to_json_string().encode()]
        if hasattr(config, "plugin_files"):
            files |= {name: [text.encode()] for name, text in config.plugin_files().items()}

    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # A parameter that never had a gradient has no moments; a resume must not miss them.
    without_moments = [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in trained and not optimizer.state.get(parameter)
    ]
    record = {**trainer_state, "step": step, "without_moments": without_moments}
    files["trainer.json"] = [(json.dumps(record, indent=1) + "\n").encode()]
    return files


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
    # Each of the two checks all names and shapes before it changes a tensor.
    load_weights(tensor_source(path, "model"), model)
    without_moments = trainer_state.pop("without_moments", None)
    load_moments(tensor_source(path, "optimizer"), model, optimizer, without_moments)

    file = path / f"rank-{rank}.pt"
    saved_this_rank = file.exists()
    state = load_rank(file if saved_this_rank else path / "rank-0.pt")
    if saved_this_rank:
        set_random_state(state["random"])
    return trainer_state, state["data"]


def load_moments(
    source: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    without_moments: list[str] | None,
) -> None:
    """Replaces the moments of `optimizer` by the saved ones. without_moments: of `check_moments`.

    Raises:
        InputError: they are of another optimizer or model.
    """
    # Checked before anything is changed.
    saved = shapes(source)
    check_moments(source, saved, model, optimizer, without_moments)
    parameters = dict(model.named_parameters())
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

    targets: Tensors = {}
    optimizer.state.clear()
    for key, (shape, dtype) in saved.items():
        name, _, moment = key.rpartition(".")
        parameter = parameters[name]
        if shape == parameter.shape and shape:
            # Sharded as its parameter: each process then reads its part alone.
            target = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            # torch keeps step counts on the host, unless its kernels read them on the device.
            on_host = not shape and not fused
            target = torch.empty(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
        targets[key] = target
        optimizer.state[parameter][moment] = target
    read_tensors(source, targets)


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
    saved = shapes(source)
    check_weights(source, saved, model)
    weights = model.state_dict()
    read_tensors(source, {name: weights[name] for name in saved})


def check_weights(source: Path, saved: Shapes, model: torch.nn.Module) -> None:
    """Raises `InputError` unless `saved` has the names and shapes of the weights of `model`."""
    weights = model.state_dict()
    for name, (shape, _) in saved.items():
        if name not in weights:
            raise InputError(f"{source}: a checkpoint of another shape: this model has no {name}")
        if weights[name].shape != shape:
            raise InputError(
                f"{source}: a checkpoint of another shape: {name} is {list(shape)} there, "
                f"{list(weights[name].shape)} in this model"
            )
    # Tied weights are saved under one name, so not every name of the state dict is needed.
    absent = sorted(model_tensors(model).keys() - saved.keys())
    if absent:
        raise InputError(f"{source}: a checkpoint of another shape: it lacks {absent[0]}")


def check_moments(
    source: Path,
    saved: Shapes,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    without_moments: list[str] | None,
) -> None:
    """Raises `InputError` unless `saved` has every moment of `optimizer` in its shape. Fused optimizers do not
    check bounds: into smaller tensors they would write past the end.

    without_moments: parameters that had none when they were saved; None if an older version recorded none.
    """

    def refuse(problem: str) -> None:
        raise InputError(
            f"{source}: moments of another optimizer, model or version: {problem}; set optim.name back, or "
            "begin a new run with model.init_from"
        )

    # parameter → moment → (shape, dtype), as saved
    remaining: dict[str, Shapes] = {}
    for key, kind in saved.items():
        name, _, moment = key.rpartition(".")
        remaining.setdefault(name, {})[moment] = kind

    # Groups hold parameters, the file their names.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        of_dimensions = moments_of(optimizer, group)
        for parameter in group["params"]:
            name, expected = names[id(parameter)], of_dimensions[parameter.ndim]
            moments = remaining.pop(name, None)
            if moments is None:
                if without_moments is not None and name not in without_moments:
                    refuse(f"it lacks those of {name}")
                continue

            # The same moments, in the shapes of this model.
            if moments.keys() != expected.keys():
                saved_names = ", ".join(sorted(moments))
                refuse(f"{name} has {saved_names}; expected {', '.join(sorted(expected))}")
            for moment, (shape, dtype) in moments.items():
                wanted = torch.Size() if expected[moment] else parameter.shape
                if shape != wanted or not dtype.is_floating_point:
                    actual = f"{dtype} of {list(shape)}".removeprefix("torch.")
                    refuse(f"{name}.{moment} is {actual}; expected {list(wanted)}")
    # What no parameter has taken belongs to another model.
    if remaining:
        refuse(f"this model trains no {next(iter(remaining))}")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises `InputError` for an optimizer whose moments a checkpoint cannot hold."""
    for group in optimizer.param_groups:
        moments_of(optimizer, group)


def moments_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> dict[int, dict[str, bool]]:
    """Names of the moments that `optimizer` keeps per parameter of `group`, and whether each is a scalar.

    By the parameters' numbers of dimensions: some optimizers treat vectors differently. They are read off a step
    with a small parameter. Raises `InputError` if a checkpoint cannot hold them.
    """
    bare = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    members = getattr(bare, "parts", [bare])  # of `optim.Joined`
    kind = next(type(member) for member in members if any(g is group for g in member.param_groups))
    # `capturable` is for GPUs, and the probe is on the CPU.
    names = inspect.signature(kind).parameters.keys() & group.keys() - {"params", "capturable"}
    settings = {name: group[name] for name in names}
    dimensions = sorted({p.ndim for p in group["params"]})
    return {ndim: _probed_moments(kind, settings, ndim) for ndim in dimensions}


def _probed_moments(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], ndim: int
) -> dict[str, bool]:
    """`moments_of` for a parameter of `ndim` dimensions."""
    # Its sides differ, so a factored moment has another shape.
    probe = torch.nn.Parameter(torch.zeros((2, 3, 4, 5, 6)[:ndim]))
    probe.grad = torch.ones_like(probe)
    try:
        fresh: Any = kind([probe], **settings)
        before = _outside_state(fresh)
        fresh.step()
    except Exception as error:  # of a plugin
        raise InputError(
            f"optim.name: {kind.__name__} cannot be made again from a group's keys: {first_line(error)}"
        ) from None

    moments = dict(fresh.state[probe])
    held = "checkpoints hold float tensors of the parameter's shape or without dimensions"
    for key, moment in moments.items():
        is_tensor = isinstance(moment, torch.Tensor)
        if not (is_tensor and moment.is_floating_point() and moment.shape in ((), probe.shape)):
            what = f"{moment.dtype} of {list(moment.shape)}" if is_tensor else type(moment).__name__
            raise InputError(
                f"optim.name: {kind.__name__} keeps {key} of a tensor {list(probe.shape)} as {what}: {held}"
            )
    for key, value in _outside_state(fresh).items():
        if before.get(key) != value:
            raise InputError(
                f"optim.name: {kind.__name__} keeps {key} outside the parameters' state: {held}"
            )
    return {key: moment.ndim == 0 for key, moment in moments.items()}


def _outside_state(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The optimizer's public attributes and its group's keys as text, without the parameters and their state."""
    (group,) = optimizer.param_groups
    left_out = ("params", "param_groups", "state")
    beside = {key: x for key, x in (vars(optimizer) | group).items() if key not in left_out}
    return {key: str(x) for key, x in beside.items() if not key.startswith("_")}


def random_state() -> dict:
    """The states of this process's random generators, in types that `weights_only` loads."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    # weights_only loads no NumPy arrays; int64 holds the uint32 words of the key.
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


def find_unsound(tensors: Tensors) -> str | None:
    """Describes a tensor with a value on this process that is not finite or is beyond `LARGEST`, or None."""
    values = {name: local_part(tensor)[0].detach() for name, tensor in tensors.items()}
    values = {name: t for name, t in values.items() if t.is_floating_point() and t.numel()}
    # One fused reduction and one synchronisation; the loop below only runs if a value is bad.
    largest = torch.nn.utils.get_total_norm(values.values(), norm_type=math.inf)
    if largest <= LARGEST:
        return None
    for name, tensor in values.items():
        worst = tensor.abs().max().item()
        # In this form NaN is bad too: it compares as false.
        if not worst <= LARGEST:
            return f"{name} has values of {worst:g}"
    return None


def model_tensors(model: torch.nn.Module) -> Tensors:
    """The state dict, with tied weights under their first name only."""
    # A tied parameter is listed under each of its names, and without duplicates under the first one.
    every_name = dict(model.named_parameters(remove_duplicate=False))
    repeated = every_name.keys() - dict(model.named_parameters()).keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in repeated}


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The moments, by `<parameter name>.<moment>`."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }
