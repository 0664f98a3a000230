"""Kernels behind Nalanda's ops. Imports nothing of nalanda, and each kernel on its first use."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

API = 3  # increased when callers must change; copies of the ops with another number use their torch path
ENVIRONMENT = "NALANDA_BACKEND"  # what `backend="auto"` means in this process


class Unsupported(Exception):
    """A backend cannot serve a call. The text names the cause, such as "float64 inputs".

    The user reads it as "delta_rule: triton cannot serve float64 inputs; trying the next backend". A second
    text stands for the op's name: a cause that is the same for many ops is then told once. It holds for the
    process, so no later call tries that backend.
    """


@dataclass(frozen=True)
class Kernel:
    """An implementation of an op, and what it needs to run.

    target: `"package.module:function"`. The function takes the op's arguments except `mode` and `backend`
        and returns what the op returns. If it cannot serve a call, it raises `Unsupported` before the
        recurrence runs.
    devices: the device types that it runs on ("cuda" includes ROCm).
    needs: the module that must be installed.
    """

    target: str
    devices: tuple[str, ...]
    needs: str

    def load(self) -> Callable:
        """Imports the module and returns the function."""
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)

    def serves(self, device_type: str) -> bool:
        """Whether it can run here on tensors of this device."""
        return device_type in self.devices and _is_installed(self.needs)


def _triton(target: str) -> Kernel:
    return Kernel(f"nalanda_kernels.triton.{target}", ("cuda",), "triton")


def _cpu(target: str) -> Kernel:
    return Kernel(f"nalanda_kernels.cpu.{target}", ("cpu",), "filelock")


# op → backend → implementation. "auto" tries the backend that was measured as fastest, then this order, then
# torch.
KERNELS: dict[str, dict[str, Kernel]] = {
    "delta_rule": {
        "triton": _triton("recurrence:delta_rule"),
        "fla": Kernel("nalanda_kernels.fla:delta_rule", ("cuda",), "fla"),
        "flash_qla": Kernel("nalanda_kernels.flash_qla:delta_rule", ("cuda",), "flash_qla"),
    },
    "linear_attention": {
        "triton": _triton("recurrence:linear_attention"),
        "fla": Kernel("nalanda_kernels.fla:linear_attention", ("cuda",), "fla"),
    },
    "normalized_attention": {"triton": _triton("recurrence:normalized_attention")},
    "map_features": {
        "triton": _triton("feature_maps:map_features"),
        "cpu": _cpu("feature_maps:map_features"),
    },
    "channel_scores": {"cpu": _cpu("channels:channel_scores")},
    "channel_gradients": {"cpu": _cpu("channels:channel_gradients")},
    "block_attention": {"triton": _triton("block_attention:block_attention")},
    "short_convs": {
        "triton": _triton("short_conv:short_convs"),
        "cpu": _cpu("epilogues:short_convs"),
    },
    "step": {"triton": _triton("step:step"), "cpu": _cpu("step:step")},
    # The kernel of `step`, asked for more: norms, rotations and readouts of all heads.
    "fused_step": {"triton": _triton("step:step")},
    "linear_rows": {"cpu": _cpu("step:linear_rows")},
    "token": {"cpu": _cpu("token:begin_token")},
    "glu_rows": {"triton": _triton("glu:glu_rows")},
    "swiglu": {"triton": _triton("epilogues:swiglu"), "cpu": _cpu("epilogues:swiglu")},
    "rms_norm": {"triton": _triton("epilogues:rms_norm"), "cpu": _cpu("epilogues:rms_norm")},
    "cross_entropy": {"triton": _triton("loss:cross_entropy")},
}


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# ------------------------------------------------------------------------------- the backend that is chosen


_chosen = [os.environ.get(ENVIRONMENT) or "auto"]


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """In this context `backend="auto"` means `name`: "torch", "triton", "fla", "flash_qla", "cpu" or "auto".

    Calls that `name` refuses, and ops that it lacks, go to the others in their order. A backend that does not
    run on the call's device raises ValueError. The context takes precedence over NALANDA_BACKEND.
    """
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def _at_compile_time(function: Callable) -> Callable:
    """Marks a function that torch.compile runs while it traces, for imports, files and warnings.

    As torch.compiler.assume_constant_result, without importing torch.
    """
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def _resolve_backend(backend: str) -> str:
    return _chosen[-1] if backend == "auto" else backend


@_at_compile_time
def _is_free(backend: str) -> bool:
    """Whether neither the call nor the process names a backend."""
    return _resolve_backend(backend) == "auto"


@_at_compile_time
def backends_for(op: str, backend: str, device_type: str) -> list[str]:
    """The backends to try for a call, in order; an empty list means torch.

    Raises ValueError for an unavailable backend.
    """
    name = _resolve_backend(backend)
    if name == "torch":
        return []

    kernels = KERNELS.get(op, {})
    if name not in kernels and any(name in others for others in KERNELS.values()):
        name = "auto"  # a backend chosen for the process may lack some ops

    kernels = {x: kernel for x, kernel in kernels.items() if (op, x) not in _left_out}
    serving = [x for x, kernel in kernels.items() if kernel.serves(device_type)]
    if name == "auto" or (op, name) in _left_out:
        return serving

    usable = [x for x, kernel in kernels.items() if _runs_if_named(kernel, device_type)]
    if name not in usable:
        from_environment = backend == "auto" and len(_chosen) == 1
        key = ENVIRONMENT if from_environment else "backend"
        choices = ", ".join(["auto", "torch", *usable])
        raise ValueError(f"{key}={name!r}: no {op} for {device_type}; choose one of {choices}")
    return [name, *(x for x in serving if x != name)]


def _runs_if_named(kernel: Kernel, device_type: str) -> bool:
    """Whether a call that names the kernel's backend can run on this device.

    The interpreter runs kernels for a GPU on CPU tensors, but only for calls that name their backend.
    """
    on_cpu = device_type == "cpu" and interpreting() and kernel.serves("cuda")
    return on_cpu or kernel.serves(device_type)


# ----------------------------------------------------------------------------------------- serving a call


def serve(op: str, backend: str, device_type: str, *inputs, **options):
    """The result of the first implementation that can serve the call; None if there is none.

    Warns once for each that cannot, with its reason.
    """
    names = backends_for(op, backend, device_type)
    # A named backend is tried first; only a free choice is by measured time.
    if len(names) > 1 and _is_free(backend):
        fastest = measured_backend(op, *inputs, **options)
        if fastest in names:
            names = [fastest, *(name for name in names if name != fastest)]

    for name in names:
        # Loaded at its turn, so that an unused backend is never imported.
        _load_kernel(op, name)
        try:
            served = getattr(_loaded, f"{op}_{name}")(*inputs, **options)
            # A kernel that leaves a call to torch without a word returns None.
            _note(op, "torch" if served is None else name)
            return served
        except Unsupported as reason:
            _note(op, name, str(reason.args[0]))
            subject = op
            if len(reason.args) > 1:
                # The process's fault, not the call's: no later call tries again.
                subject = reason.args[1]
                _leave_out(op, name)
            _warn(f"{subject}: {name} cannot serve {reason.args[0]}; trying the next backend")
        except Exception as error:
            if not exceeds_card(error):
                raise
            _note(op, name, f"this call on this card: {error}")
            _leave_out(op, name)
            _warn(f"{op}: {name} does not fit this card ({error}); trying the next backend")
    _note(op, "torch")
    return None


@dataclass(frozen=True)
class Attempt:
    """A backend that served a call of an op, or was refused. "torch" is the op's own form."""

    op: str
    backend: str
    refusal: str | None = None


_watches: list[dict[Attempt, None]] = []


@contextlib.contextmanager
def watch() -> Iterator[dict[Attempt, None]]:
    """In this context calls of ops, in any thread, note each kind of attempt in the dict when it first happens.

    Compiled code notes its attempts while it is traced.
    """
    attempts: dict[Attempt, None] = {}
    _watches.append(attempts)
    try:
        yield attempts
    finally:
        _watches[:] = [others for others in _watches if others is not attempts]


@_at_compile_time
def _note(op: str, backend: str, refusal: str | None = None) -> None:
    for attempts in _watches:
        attempts.setdefault(Attempt(op, backend, refusal))


def exceeds_card(error: Exception) -> bool:
    """Whether Triton, which this package does not import, says that a kernel needs more than the card has."""
    return type(error).__name__ == "OutOfResources"


_left_out: set[tuple[str, str]] = set()
"""Ops and backends whose kernels did not fit the card or could not be built: no call tries them again, compiled ones
included."""


@_at_compile_time
def _leave_out(op: str, name: str) -> None:
    _left_out.add((op, name))


def candidates(op: str, backend: str, device_type: str) -> list[tuple[str, Callable]]:
    """Implementations to try, in order, as (backend, function); an empty list means torch.

    Exported checkpoints call it. Raises ValueError for an unavailable backend.
    """
    return [(name, KERNELS[op][name].load()) for name in backends_for(op, backend, device_type)]


class _Loaded:
    """The functions of implementations whose turn has come, as attributes.

    No dict, because torch.compile looks at a dict once, but at an attribute where it is read.
    """


_loaded = _Loaded()


@_at_compile_time
def _load_kernel(op: str, name: str) -> None:
    setattr(_loaded, f"{op}_{name}", KERNELS[op][name].load())


@_at_compile_time
def _warn(message: str) -> None:
    _warn_once(message)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


# --------------------------------------------------------------------------------- the measured backend


_UNMEASURED = ("erase", "write", "allow_neg_eigval")


def measured_backend(op: str, *inputs, **options) -> str | None:
    """The backend that was measured as the fastest for a call like this one, if any was.

    `nalanda tune` measures 16-bit calls without gates by channel and with β up to 1. The shipped rows are of such
    calls, too, in a batch of at least "batch" rows.
    """
    rows = [row for row in _measured_rows() if row.get("op") == op]
    if not rows:
        return None
    q, _, v, *gates = inputs
    # Both ops have g as the last positional input: (β, g) or (g).
    g = gates[-1]
    if g is not None and g.ndim == 4:
        return None
    if q.dtype.itemsize > 2 or any(options.get(name) is not None for name in _UNMEASURED):
        return None

    bounds, feature_map = options.get("cu_seqlens"), options.get("feature_map")
    sequences = 1 if bounds is None else max(1, bounds.shape[0] - 1)  # of a row of the batch
    length = q.shape[1] // sequences
    call = {
        "gated": g is not None,
        "mapped": feature_map is not None,
        "K": getattr(feature_map, "feature_dim", q.shape[3]),
        "V": v.shape[3],
    }
    like_it = [
        row
        for row in rows
        if all(row.get(key) == x for key, x in call.items()) and q.shape[0] >= row.get("batch", 1)
    ]
    # Rows rise in length. The first that covers this one decides, else the longest.
    covering = [row for row in like_it if row["length"] >= length] or like_it[-1:]
    return covering[0]["backend"] if covering else None


def check_blocks() -> None:
    """Reads the file that NALANDA_BLOCKS names, if it is set. Raises ValueError of one line."""
    _measured_rows()


@_at_compile_time
def _measured_rows() -> list[dict]:
    """The measured choices for this card, shipped or in the file that NALANDA_BLOCKS names."""
    from nalanda_kernels.triton.common import measured_backends

    return measured_backends()


# ------------------------------------------------------- other packages that register or choose kernels


def import_fla() -> None:
    """Imports flash-linear-attention, whose models transformers' Auto classes then know."""
    with warnings.catch_warnings(action="ignore"):  # that there is no GPU
        importlib.import_module("fla")
    keep_model_types()


def keep_model_types() -> None:
    """Gives transformers' model types back to transformers: importing flash-linear-attention, which
    transformers does too, registers other models as "mamba" and "mamba2"."""
    if "fla.models" not in sys.modules:
        return
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for model in vars(sys.modules["fla.models"]).values():
        kind = str(getattr(model, "model_type", None))
        if kind in CONFIG_MAPPING_NAMES:
            config = getattr(transformers, CONFIG_MAPPING_NAMES[kind])
            transformers.CONFIG_MAPPING.register(kind, config, exist_ok=True)


def keep_fla_off_cpus(module: ModuleType) -> bool:
    """Lets a modeling module of transformers compute on a CPU although flash-linear-attention is installed.

    transformers chooses the kernels of that and similar packages when the module is imported. They need a
    GPU: tensors on a CPU now take the functions in torch beside them. Returns whether that changes anything;
    the second call for a module does not.
    """
    changed = False
    for name in (*_RULES, *_CONVOLUTIONS):
        chosen = getattr(module, name, None)
        if chosen is not None and (plain := inspect.unwrap(chosen)) is not chosen:
            setattr(module, name, _by_device(chosen, plain))
            changed = _is_installed("fla")
    return changed


_RULES = (
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    *("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


def _by_device(chosen: Callable, plain: Callable) -> Callable:
    def call(x, *args, **kwargs):
        if x.device.type != "cpu":
            return chosen(x, *args, **kwargs)
        if any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx")):
            # The function in torch ignores both. transformers refuses them around it.
            raise ValueError(f"{plain.__name__}: packed rows need a GPU; pass one document a row")
        return plain(x, *args, **kwargs)

    return call


@functools.cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
