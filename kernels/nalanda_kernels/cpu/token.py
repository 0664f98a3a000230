"""A token of several layers as a list of operations, which C++ runs in one call."""

import ctypes
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nalanda_kernels import Unsupported
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.feature_maps import DTYPES
from nalanda_kernels.cpu.step import KINDS, PIECE, ROWS, describe_step, threads_for
from nalanda_kernels.cpu.structures import Operation, Step
from nalanda_kernels.one_token import Token


def begin_token(
    batch: int, dtype: torch.dtype, weights: torch.dtype | None = None
) -> "Program | None":
    """An empty program; None for other dtypes or more rows. Raises Unsupported where the library cannot be built.

    weights: their dtype, if it is not the model's.
    """
    weights = weights or dtype
    served = dtype in DTYPES and batch <= ROWS.get(weights, 0)
    return Program(batch, dtype, max(1, PIECE[weights] // batch)) if served else None


class Program:
    """Operations on arrays with a row a token, in a model's dtype: of `batch` sequences with up to `most` tokens each.

    It reads weights where they are, so writes into them count. Raises Unsupported for what the C++ cannot read.
    """

    def __init__(self, batch: int, dtype: torch.dtype, most: int = 1):
        self.batch, self.dtype, self.most = batch, dtype, most
        self.tokens = most  # of each sequence, in the next run
        self.run_all = functools.partial(library().run_token, dtype == torch.bfloat16)
        # Tokens of each sequence before this one; who runs the program counts them.
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        # Keys and values of attention that C++ has written behind those of its caller.
        self.written_rows = torch.zeros((), dtype=torch.int64)
        self.operations: list[Operation] = []
        self.entries = 0  # of all matrices
        self.arrays: dict[tuple, Tensor] = {}
        # C++ holds addresses alone: modules and this program keep the memory.
        self.steps: list[Step] = []
        self.tables: list[Tensor] = []
        # Addresses of arrays since threads last waited for each other.
        self.written: set[int] = set()
        self.read: set[int] = set()

    def array(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory `[batch·most, width]`, the same for all layers that name it."""
        # Layers run one after another, so they may share it.
        key = (name, width, dtype)
        if key not in self.arrays:
            rows = self.batch * self.most
            self.arrays[key] = torch.empty(rows, width, dtype=dtype or self.dtype)
        return self.arrays[key]

    def add(
        self,
        kind: str,
        x: Tensor,
        y: Tensor,
        *,
        inputs: Iterable[Tensor] = (),
        added: Tensor | None = None,
        weights: Mapping[str, Tensor | None] | None = None,
        **numbers: Any,
    ) -> None:
        """An operation from x, `added` and `inputs` to y."""
        addresses = {"x": x.data_ptr(), "y": y.data_ptr()}
        addresses |= {} if added is None else {"added": added.data_ptr()}
        for name, weight in (weights or {}).items():
            addresses |= {} if weight is None else {name: self._address(weight)}

        # Threads wait for each other where one would read or overwrite what another works on.
        read = {z.data_ptr() for z in (x, added, *inputs) if z is not None}
        if read & self.written or addresses["y"] in self.written | self.read:
            self.operations[-1].waits = True
            self.written, self.read = set(), set()
        self.written.add(addresses["y"])
        self.read |= read

        sizes = {"N": self.batch * self.most, "K": x.shape[-1]}
        self.operations.append(Operation(kind=KINDS.index(kind), **addresses, **sizes, **numbers))

    def linear(self, x: Tensor, layer: Any, y: Tensor | str, added: Tensor | None = None) -> Tensor:
        """y = W x + bias (+ added, which may be y). y: an array, or the name of one."""
        scale = getattr(layer, "weight_scale", None)  # of weights in int8
        if type(layer) is not nn.Linear and scale is None:
            raise Unsupported(f"a layer of the class {type(layer).__name__}")
        if layer.weight.dtype != (self.dtype if scale is None else torch.int8):
            raise Unsupported(f"weights in {layer.weight.dtype} beside {self.dtype}")
        if isinstance(y, str):
            y = self.array(y, layer.out_features)
        self.entries += layer.weight.numel()
        weights = {"weight": layer.weight, "scale": scale, "bias": layer.bias}
        self.add("product", x, y, added=added, weights=weights, M=layer.out_features)
        return y

    def linears(self, x: Tensor, layers: dict[str, nn.Linear]) -> dict[str, Tensor]:
        """The outputs of layers that read x, by name."""
        return {name: self.linear(x, layer, name) for name, layer in layers.items()}

    def step(self, state: dict[str, Tensor], o: Tensor, **options: Any) -> Step:
        """The rule of a token, as `describe_step` takes it, with the new state in place of the old one."""
        token = Token(**{name: x for name, x in options.items() if name in Token._fields})
        names = [name for name, *_ in Step._fields_]
        fields = {name: x for name, x in options.items() if name in names}
        counts = {"positions": self.lengths, "written": self.written_rows}
        described = describe_step(token, fields | counts, state, state, o, self.most)
        self.steps.append(described)
        # Read and written once a token, as a matrix is read.
        self.entries += sum(x.numel() for x in state.values())
        inputs = [x for x in fields.values() if isinstance(x, Tensor)]
        self.tables += inputs
        self.add("step", o, o, inputs=inputs, step=ctypes.addressof(described))
        return described

    def finish(self) -> None:
        """Puts the operations side by side; none is added after that."""
        self.listed = (Operation * len(self.operations))(*self.operations)

    def take(self, tokens: int) -> None:
        """Sets how many tokens of each sequence the next runs read, at most `most`."""
        if tokens == self.tokens:
            return
        self.tokens = tokens
        for operation in self.listed:
            operation.N = self.batch * tokens
        for step in self.steps:
            step.tokens = tokens

    def run(self, first: int, end: int) -> None:
        """Runs the operations from `first` up to `end`."""
        # One team of threads for all operations, which share every one of them.
        start = ctypes.byref(self.listed, first * ctypes.sizeof(Operation))
        self.run_all(start, end - first, threads_for(self.entries, self.entries))

    def _address(self, weight: Tensor) -> int:
        readable = weight.dtype in (self.dtype, torch.int8)
        if not (readable and weight.is_contiguous() and weight.is_cpu):
            raise Unsupported(f"weights in {weight.dtype} beside {self.dtype}")
        return weight.data_ptr()
