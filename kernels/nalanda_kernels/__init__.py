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
    """A backend cannot serve the call, for the reason given in one line. The next backend serves it."""


@dataclass(frozen=True)
class Kernel:
    """An implementation of an op, and what it needs to run.

    target: `"package.module:function"`. The function takes the op's arguments except `mode` and `backend`
        and returns what the op returns. It raises `Unsupported` before any work if it cannot serve a call.
    devices: the device types that it runs on ("cuda" includes ROCm).
    needs: the module that must be installed.
    """

    target: str
    devices: tuple[str, ...]
    needs: str

    def load(self) -> Callable:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)

    def serves(self, device_type: str) -> bool:
        """Whether it runs here on tensors of this device; Triton's interpreter takes CPU tensors."""
        there = device_type in self.devices or (device_type == "cpu" and interpreting())
        return there and _installed(self.needs)


def _triton(target: str) -> Kernel:
    return Kernel(f"nalanda_kernels.triton.{target}", ("cuda",), "triton")


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
    "map_features": {"triton": _triton("feature_maps:map_features")},
    "block_attention": {"triton": _triton("block_attention:block_attention")},
    "short_convs": {"triton": _triton("short_conv:short_convs")},
    "step": {"triton": _triton("step:step")},
    "swiglu": {"triton": _triton("epilogues:swiglu")},
    "rms_norm": {"triton": _triton("epilogues:rms_norm")},
}  # op → backend → implementation; "auto" tries what was measured as fastest, then this order, then torch


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_chosen = [os.environ.get(ENVIRONMENT) or "auto"]


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """In this context `backend="auto"` means `name`: "torch", "triton", "fla", "flash_qla" or "auto".

    Ops and calls that `name` does not serve go to the others in their order. It takes precedence over
    NALANDA_BACKEND.
    """
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def candidates(op: str, backend: str, device_type: str) -> list[tuple[str, Callable]]:
    """Implementations to try, in order, as (backend, function); an empty list means torch.

    Raises ValueError for an unavailable backend.
    """
    from_environment = backend == "auto" and len(_chosen) == 1
    known, backend = KERNELS.get(op, {}), _meant(backend)
    if backend == "torch":
        return []
    # The interpreter serves only calls that name "triton".
    rest = [
        n
        for n, x in known.items()
        if device_type in x.devices and x.serves(device_type) and n != backend
    ]
    elsewhere = backend not in known and any(backend in rows for rows in KERNELS.values())
    if backend == "auto" or elsewhere:  # a backend chosen for the process may lack some ops
        names = rest
    elif backend in known and known[backend].serves(device_type):
        names = [backend, *rest]
    else:
        there = ", ".join(
            ["auto", "torch", *(name for name, x in known.items() if x.serves(device_type))]
        )
        key = ENVIRONMENT if from_environment else "backend"
        raise ValueError(f"{key}={backend!r}: no {op} for {device_type}; choose one of {there}")
    return [(name, known[name].load()) for name in names]


def _meant(backend: str) -> str:
    return _chosen[-1] if backend == "auto" else backend


def _at_compile_time(function: Callable) -> Callable:
    """As torch.compiler.assume_constant_result, without importing torch: for imports, files and warnings,
    which the compiler cannot trace."""
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def serve(op: str, backend: str, device_type: str, *inputs, **options):
    """The result of the first implementation that can serve the call; None if there is none.

    Warns once for each that cannot, with its reason.
    """
    names = _names(op, backend, device_type)
    if (
        len(names) > 1
        and not _named(backend)
        and (fastest := _measured(op, *inputs, **options)) in names
    ):
        names = [fastest, *(name for name in names if name != fastest)]
    for name in names:
        try:
            return _loaded[op][name](*inputs, **options)
        except Unsupported as reason:
            _say(f"{op}: not by {name}, {reason.args[0]}")
    return None


# A dict for each op: torch.compile looks at one once, so it must then hold what `_names` puts there.
_loaded: dict[str, dict[str, Callable]] = {op: {} for op in KERNELS}


@_at_compile_time
def _names(op: str, backend: str, device_type: str) -> list[str]:
    """The backends of `candidates`; puts their functions into `_loaded`."""
    found = candidates(op, backend, device_type)
    _loaded[op].update(found)
    return [name for name, _ in found]


@_at_compile_time
def _named(backend: str) -> bool:
    return _meant(backend) != "auto"


_UNMEASURED = ("erase", "write", "allow_neg_eigval")


def _measured(op: str, *inputs, **options) -> str | None:
    """The backend that `nalanda bench kernels --tune` found fastest for such a call, if it measured any.

    It measures 16-bit calls without gates by channel and with β up to 1.
    """
    if not (rows := _rows()):
        return None
    q, _, v, *gates = inputs
    if gates[-1] is not None and gates[-1].ndim == 4:
        return None
    if q.dtype.itemsize > 2 or any(options.get(name) is not None for name in _UNMEASURED):
        return None
    bounds, map = options.get("cu_seqlens"), options.get("feature_map")
    length = q.shape[1] if bounds is None else q.shape[1] // max(1, bounds.shape[0] - 1)
    call = {
        "op": op,
        "gated": gates[-1] is not None,
        "mapped": map is not None,
        "K": getattr(map, "feature_dim", q.shape[3]),
        "V": v.shape[3],
    }
    fitting = [row for row in rows if all(row.get(key) == x for key, x in call.items())]
    # Rows rise in length. The first that covers this one decides, else the longest.
    covering = [row for row in fitting if row["length"] >= length] or fitting[-1:]
    return covering[0]["backend"] if covering else None


@_at_compile_time
def _rows() -> list[dict]:
    return _choices()


@functools.cache
def _choices() -> list[dict]:
    """The measured choices for this card, in the file that NALANDA_BLOCKS names."""
    from nalanda_kernels.triton.common import measured_backends

    return measured_backends()


@_at_compile_time
def _say(message: str) -> None:
    _say_once(message)


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


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

    models = vars(sys.modules["fla.models"]).values()
    for kind in {
        str(getattr(model, "model_type", None)) for model in models
    } & CONFIG_MAPPING_NAMES.keys():
        own = getattr(transformers, CONFIG_MAPPING_NAMES[kind])
        transformers.CONFIG_MAPPING.register(kind, own, exist_ok=True)


def take_torch_path(module: ModuleType) -> bool:
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
            changed = _installed("fla")
    return changed


_RULES = (
    *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    *("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


def _by_device(chosen: Callable, plain: Callable) -> Callable:
    return lambda x, *args, **kwargs: (plain if x.device.type == "cpu" else chosen)(
        x, *args, **kwargs
    )


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
