"""The way to `nalanda_kernels`, which a copy of these files in a checkpoint may lack, or have in another version."""

import warnings
from contextlib import nullcontext

import torch
from torch import Tensor, nn

_API = 3
try:
    import nalanda_kernels as package
except ImportError:
    package = None
else:
    if package.API != _API:
        _installed, package = package.API, None
        warnings.warn(
            f"nalanda_kernels: API {_installed}, not {_API}; using the torch path", stacklevel=2
        )


def by_kernel(op: str, backend: str, x: Tensor, *inputs, **options):
    """The result of a kernel for the device of x; None if the torch path must serve the call."""
    if package is not None and _is_plain(x):
        # A kernel runs on the current device, which is another one if a model is spread over several. In a
        # compiled graph the operator itself goes there: AOTAutograd caches no graph that does.
        moves = x.is_cuda and not torch.compiler.is_compiling()
        with torch.cuda.device(x.device) if moves else nullcontext():
            return package.serve(op, backend, x.device.type, *inputs, **options)
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend={backend!r}: needs nalanda_kernels; choose one of auto, torch")
    return None


def _is_plain(x: Tensor) -> bool:
    """Whether x has memory that kernels may read: subclasses, traces and transforms of functions have none."""
    if torch.compiler.is_compiling():
        return True
    transformed = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    return type(x) in (Tensor, nn.Parameter) and not transformed


def has_kernel(op: str, x: Tensor) -> bool:
    """Whether a kernel may serve a call of the op on the device of x."""
    return package is not None and package.backends_for(op, "auto", x.device.type) != []
