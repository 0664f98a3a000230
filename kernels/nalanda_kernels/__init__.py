"""Kernels behind Nalanda's ops; imports nothing of nalanda, and no kernel before it is asked for."""

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

API = 2  # raised when a caller must change: older copies of the ops then use their own torch path
ENVIRONMENT = "NALANDA_BACKEND"  # what `backend="auto"` means in this process


class Unsupported(Exception):
    """A call that a backend cannot serve, with the reason in one line; the next backend serves it."""


@dataclass(frozen=True)
class Kernel:
    """Where an implementation lives, and what must be there for it to run.

    target: `"package.module:function"`; the function takes the op's arguments except `mode` and `backend`,
        returns what the op returns, and raises `Unsupported` before any work where it cannot.
    devices: the device types that it runs on ("cuda" is ROCm's name as well).
    needs: the module that must be installed.
    """

    target: str
    devices: tuple[str, ...]
    needs: str

    def load(self) -> Callable:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)

    def serves(self, device_type: str) -> bool:
        """Whether it runs on such tensors here; in Triton's interpreter, on those of the CPU."""
        there = device_type in self.devices or (device_type == "cpu" and interpreting())
        return there and _installed(self.needs)


def _triton(target: str) -> Kernel:
    return Kernel(f"nalanda_kernels.triton.{target}", ("cuda",), "triton")


KERNELS: dict[str, dict[str, Kernel]] = {
    "delta_rule": {
        "triton": _triton("recurrence:delta_rule"),
        "fla": Kernel("nalanda_kernels.fla:delta_rule", ("cuda",), "fla"),
    },
    "linear_attention": {
        "triton": _triton("recurrence:linear_attention"),
        "fla": Kernel("nalanda_kernels.fla:linear_attention", ("cuda",), "fla"),
    },
    "normalized_attention": {"triton": _triton("recurrence:normalized_attention")},
    "map_features": {"triton": _triton("feature_maps:map_features")},
    "block_attention": {"triton": _triton("block_attention:block_attention")},
    "short_conv": {"triton": _triton("short_conv:short_conv")},
    "step": {"triton": _triton("step:step")},
}  # op → backend → implementation; "auto" asks them in this order, and torch last


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, which reads CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_chosen = [os.environ.get(ENVIRONMENT) or "auto"]


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within it, `backend="auto"` means `name`: "torch", "triton", "fla" or "auto"; over NALANDA_BACKEND."""
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def candidates(op: str, backend: str, device_type: str) -> list[tuple[str, Callable]]:
    """The implementations to ask, by backend and in order; none of them: torch.

    Raises ValueError for a backend that is not there.
    """
    known, backend = KERNELS.get(op, {}), _chosen[-1] if backend == "auto" else backend
    if backend == "auto":  # the interpreter is for those who name it
        return [(n, x.load()) for n, x in known.items() if device_type in x.devices and x.serves(device_type)]
    elsewhere = backend not in known and any(backend in rows for rows in KERNELS.values())
    if backend == "torch" or elsewhere:  # a choice for the process cannot refuse the ops that it lacks
        return []
    if backend not in known or not known[backend].serves(device_type):
        there = ", ".join(["auto", "torch", *(name for name, x in known.items() if x.serves(device_type))])
        raise ValueError(f"backend={backend!r} has no {op} for {device_type}: choose one of {there}")
    return [(backend, known[backend].load())]


def serve(op: str, backend: str, device_type: str, *inputs, **options):
    """What the first implementation returns that can serve the call; None where none can.

    Those that cannot say why, once.
    """
    for name in _names(op, backend, device_type):
        try:
            return _loaded[op, name](*inputs, **options)
        except Unsupported as reason:
            _say_once(f"{op}: not by {name}, {reason}")
    return None


_loaded: dict[tuple[str, str], Callable] = {}


def _names(op: str, backend: str, device_type: str) -> list[str]:
    """Of `candidates`, which are now in `_loaded`."""
    found = candidates(op, backend, device_type)
    _loaded.update({(op, name): function for name, function in found})
    return [name for name, _ in found]


# What torch.compiler.assume_constant_result does, without importing torch: it must not trace an import.
_names._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
