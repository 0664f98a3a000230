"""A token of several layers as a list of operations, which C++ runs in one call."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.feature_maps import DTYPES
from nalanda_kernels.cpu.step import ROWS, Step, describe_map, describe_step, threads_for
from nalanda_kernels.one_token import Token

KINDS = ("norm", "product", "step", "layer_norm", "swiglu")


class Operation(ctypes.Structure):
    """An operation, as token.cpp reads it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "added", "step", "y")),
        *((name, ctypes.c_int32) for name in ("kind", "N", "K", "M", "waits")),
        ("eps", ctypes.c_float),
    )


def begin_token(batch: int, dtype: torch.dtype) -> "Program | None":
    """An empty program; None for other dtypes or more rows. Raises Unsupported where the library cannot be built."""
    return Program(batch, dtype) if batch <= ROWS.get(dtype, 0) else None


class Program:
    """Operations on arrays of `batch` rows, in a model's dtype.

    It reads weights where they are, so writes into them count. Raises Unsupported for what the C++ cannot read.
    """

    def __init__(self, batch: int, dtype: torch.dtype):
        self.batch, self.dtype = batch, dtype
        self.run_all = getattr(library(), f"token_{DTYPES[dtype]}")
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.operations: list[Operation] = []
        self.entries = 0  # of all matrices
        self.arrays: dict[tuple, Tensor] = {}
        self.steps: list[Step] = []

    def array(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory `[batch, width]`, the same for all layers that name it."""
        # Layers run one after another, so they may share it.
        key = (name, width, dtype)
        if key not in self.arrays:
            self.arrays[key] = torch.empty(self.batch, width, dtype=dtype or self.dtype)
        return self.arrays[key]

    def add(self, kind: str, x: Tensor, y: Tensor, waits: bool = True, **fields: Any) -> None:
        """An operation from x to y. waits: the next one reads y. Tensors among the fields are weights or arrays."""
        for name, value in fields.items():
            if isinstance(value, Tensor):
                fields[name] = self._address(value, self.dtype)
        # C++ holds addresses alone: modules and this program keep the memory.
        operation = Operation(
            x=x.data_ptr(), y=y.data_ptr(), kind=KINDS.index(kind), waits=waits, **fields
        )
        operation.N, operation.K = self.batch, x.shape[-1]
        self.operations.append(operation)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        y: Tensor,
        added: Tensor | None = None,
        waits: bool = True,
    ) -> None:
        """y = x Wᵀ + bias (+ added, which may be y)."""
        self.entries += weight.numel()
        self.add("product", x, y, waits, weight=weight, bias=bias, added=added, M=len(weight))

    def step(
        self, inputs: dict[str, Tensor], state: dict[str, Tensor], o: Tensor, **options: Any
    ) -> None:
        """The rule of a token, as `cpu.step.step` takes it, with the new state in place of the old one."""
        token, x = Token(**options), inputs | {"positions": self.lengths}
        mapped = describe_map(token)
        described = None if mapped is None else describe_step(token, mapped, x, state, state, o)
        if described is None:
            raise Unsupported("a layer")
        self.steps.append(described)
        # Read and written once a token, as a matrix is read.
        self.entries += state["recurrent"].numel()
        self.add("step", o, o, step=ctypes.addressof(described))

    def finish(self) -> None:
        """Puts the operations side by side; none is added after that."""
        self.listed = (Operation * len(self.operations))(*self.operations)

    def run(self, first: int, end: int) -> None:
        """Runs the operations from `first` up to `end`."""
        # One team of threads for all operations, which share every one of them.
        start = ctypes.byref(self.listed, first * ctypes.sizeof(Operation))
        self.run_all(start, end - first, threads_for(self.entries, self.entries))

    def _address(self, x: Tensor, dtype: torch.dtype) -> int:
        if x.dtype != dtype or not (x.is_contiguous() and x.is_cpu):
            raise Unsupported(f"weights and states in {x.dtype} beside {dtype}")
        return x.data_ptr()
