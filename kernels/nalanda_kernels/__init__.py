"""Kernels behind Nalanda's ops; imports nothing of nalanda, and no kernel before it is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

API = 1  # raised when the arguments of an op change: older copies of the ops then use their own torch path


@dataclass(frozen=True)
class Kernel:
    """Where an implementation lives (`"package.module:function"`) and the device types that it runs on.

    The function takes the op's arguments except `mode` and `backend`, and returns what the op returns.
    """

    target: str
    devices: tuple[str, ...]

    def load(self) -> Callable:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


KERNELS: dict[str, dict[str, Kernel]] = {
    "delta_rule": {},
    "linear_attention": {},
}  # op → backend → implementation
