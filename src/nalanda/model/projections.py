"""Linear layers that read the same input, as one product.

The layers stay modules with weights of their own, so checkpoints, optimizers, adapters and sharding see
nothing of this. Layers that are more than a matrix (a bias, a hook, an adapter, a quantised weight) run one
by one.

In training a product copies the weights side by side, in its precision: autocast would copy them too. The
backward copies them again, so that no copy is kept. In evaluation mode the weights *lie* side by side
(`FusedLinears.join`): one token costs one product and nothing else.
"""

import threading
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels import by_kernel
from .layers import altered, autocasts, linear_dtype, once_differentiable, unrecorded

ALIGNED = 16  # fast kernels serve a product only if its rows begin at multiples of 16 bytes
NARROW = 64  # columns; a product this narrow costs as much as a wider one
LARGE = 2**20  # entries of a matrix, from which on threads share a product of one row in torch
BLOCKS = 8
_joining = threading.Lock()  # two threads would move the same weights


def side_by_side(
    weights: list[Tensor] | tuple[Tensor, ...], dtype: torch.dtype, aligned: int = 1
) -> Tensor:
    """The rows of all weights in `dtype`, then zeros up to a multiple of `aligned`."""
    if len(weights) == 1 and aligned == 1:
        return weights[0].to(dtype)
    heights = [*map(len, weights)]
    # The rows of zeros come last; `columns` leaves their outputs out.
    heights.append(-sum(heights) % aligned)
    joined = weights[0].new_empty(sum(heights), weights[0].shape[1], dtype=dtype)
    *targets, padding = joined.split(heights)
    torch._foreach_copy_(targets, weights)
    if len(padding):
        padding.zero_()
    return joined


def columns(y: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The columns of y that belong to each weight."""
    widths = [*map(len, weights)]
    return y.split([*widths, y.shape[-1] - sum(widths)], -1)[:-1]


def adjacent(x: Tensor, y: Tensor) -> bool:
    """Whether the rows of y continue those of x in memory."""
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    return x.stride() == y.stride() and y.data_ptr() == x.data_ptr() + x.shape[1] * x.itemsize


def merged(tensors: Sequence[Tensor | None]) -> list[tuple[list[int], Tensor]]:
    """The columns of `[M, n]` tensors in few: the indices of those in each, and their columns.

    Adjacent ones are merged, and narrow ones copied; None is left out.
    """
    groups: list[tuple[list[int], Tensor]] = []
    for i, x in enumerate(tensors):
        if x is None:
            continue
        before, last = groups[-1] if groups else ([], x)
        if i - 1 in before and adjacent(last, x):
            # One view over both, without a copy.
            x = last.as_strided((len(x), last.shape[1] + x.shape[1]), x.stride())
        elif i - 1 in before and max(last.shape[1], x.shape[1]) < NARROW:
            x = torch.cat([last, x], 1)
        else:
            groups.append(([], x))
        groups[-1] = ([*groups[-1][0], i], x)
    return groups


class _Product(torch.autograd.Function):
    """x times the transpose of each weight, by one product."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, *weights: Tensor):
        tokens = x.flatten(0, -2).to(dtype)  # [M, D]
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.save_for_backward(tokens if any(ctx.needs_input_grad[2:]) else None, *weights)
        ctx.set_materialize_grads(False)
        y = tokens @ side_by_side(weights, dtype, ALIGNED).T  # [M, Σn], padded
        return columns(y.view(*x.shape[:-1], y.shape[1]), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        # A product for each run of adjacent gradients, which adds to that of x: to copy all of them side by
        # side for a single one would cost more than it saves.
        tokens, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        d_x, d_weights = None, [None] * len(weights)
        for group, d in merged([None if d is None else d.flatten(0, -2) for d in grads]):
            some = [weights[i] for i in group]
            if ctx.needs_input_grad[0]:
                joined = side_by_side(some, d.dtype)
                d_x = d @ joined if d_x is None else d_x.addmm_(d, joined)
            if any(needed[i] for i in group):
                # [n, D] of the group's layers together, then apart.
                d_some = (d.T @ tokens).to(some[0].dtype).split([*map(len, some)])
                for i, d_weight in zip(group, d_some, strict=True):
                    d_weights[i] = d_weight if needed[i] else None
        return None if d_x is None else d_x.view(ctx.shape).to(ctx.dtype), None, *d_weights


class _Joined:
    """Weights side by side in memory, and what must still hold for a product to have them."""

    def __init__(
        self, modules: dict[str, Any], layers: dict[str, nn.Linear], weights: list[Tensor]
    ):
        with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
            self.matrix = side_by_side(weights, weights[0].dtype, ALIGNED)
            for weight, transposed in zip(weights, columns(self.matrix.T, weights), strict=True):
                # By DLPack each weight has a storage of its own over the same memory.
                weight.data = torch.from_dlpack(transposed.T)
        self.modules, self.names, self.layers = dict(modules), list(layers), list(layers.values())
        self.widths = [*map(len, weights), len(self.matrix) - sum(map(len, weights))]
        self.memory = [(weight.data_ptr(), weight.numel()) for weight in weights]

    def holds(self, modules: dict[str, Any]) -> bool:
        """Whether the same layers are still matrices, each in its place."""
        if modules != self.modules:
            return False
        for layer, (address, count) in zip(self.layers, self.memory):  # noqa: B905 (it is called for every token)
            weight = matrix_of(layer)
            if weight is None or weight.data_ptr() != address:
                return False
            if weight.numel() != count or not weight.is_contiguous():
                return False
        return True


def compiled_products(layers: dict[str, nn.Linear]) -> list[dict[str, nn.Linear]]:
    """The layers by product where blocks are compiled. One kernel should write the gradients of a product.

    One product for q, k and v, one for the narrow layers, one for each other layer; without q all are one. One
    product for all needs all gradients in one tensor. To write that took 0.56 ms of an H100 at 16,384 tokens.
    """
    if "q" not in layers:
        return [layers]
    first = {name: layers[name] for name in ("q", "k", "v") if name in layers}
    others = {name: layer for name, layer in layers.items() if name not in first}
    narrow = {name: layer for name, layer in others.items() if layer.out_features < NARROW}
    wide = [{name: layer} for name, layer in others.items() if name not in narrow]
    return [product for product in (first, *wide, narrow) if product]


class FusedLinears(nn.Module):
    """A module with Linear layers that read the same input."""

    _joined: _Joined | None = None

    def linears(self) -> dict[str, nn.Linear]:
        """The layers, by the names of their outputs in `project`."""
        raise NotImplementedError

    def project(self, x: Tensor) -> dict[str, Tensor]:
        """x `[…, D]` to the layers' outputs `[…, out_features]`, by name.

        They are columns of one tensor: to read them as rows of their own costs a copy.
        """
        compiling = torch.compiler.is_compiling()
        if not torch.is_grad_enabled():  # generation: as few steps as possible
            joined = None if compiling else self._still_joined()
            if joined is not None:
                outputs = linear_rows(x, joined.matrix).split_with_sizes(joined.widths, -1)
                return dict(zip(joined.names, outputs))  # noqa: B905 (padding)
            return {name: apply_linear(layer, x) for name, layer in self.linears().items()}

        layers = self.linears()
        weights = [matrix_of(layer) for layer in layers.values()]
        # One layer, one that is more than a matrix, or another dtype: each runs by itself.
        if len(weights) < 2 or not _fit(weights, x):
            return {name: layer(x) for name, layer in layers.items()}
        if not compiling:
            outputs = _Product.apply(x, linear_dtype(x), *weights)
            return dict(zip(layers, outputs, strict=True))
        named: dict[str, Tensor] = {}
        for product in compiled_products(layers):
            weights = [layer.weight for layer in product.values()]
            joined = F.pad(torch.cat(weights), (0, 0, 0, -sum(map(len, weights)) % ALIGNED))
            named |= zip(product, columns(F.linear(x, joined), weights), strict=True)
        return named

    def _still_joined(self) -> _Joined | None:
        if self._joined is not None and not self._joined.holds(self._modules):
            self._joined = None  # frees the memory, which nothing may need any more
        return self._joined

    def join(self) -> None:
        """Moves the weights into one piece of memory, side by side; nothing else changes.

        Each has a storage of its own there, and is not a view of a shared one: those who save tensors refuse
        shared storage, or drop all but one. Whoever writes into a weight changes the product, and a weight
        that has left its place is noticed.
        """
        layers = self.linears()
        with _joining:
            weights = [matrix_of(layer) for layer in layers.values()]
            if self._still_joined() is None and len(weights) > 1 and _are_movable(weights):
                self._joined = _Joined(self._modules, layers, weights)

    def train(self, mode: bool = True):
        super().train(mode)
        if not mode:
            self.join()
        return self

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # A move or a cast gives the weights new memory, so they are joined again there.
        if self._joined is not None:
            self.join()
        return self

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_joined": None}  # copies and pickles have the weights alone


def matrix_of(layer: nn.Linear, biased: bool = False) -> Tensor | None:
    """The weight if a call of the layer is nothing but a product with it, in memory; else None.

    biased: whether a bias may be added.
    """
    if type(layer) is not nn.Linear:
        return None
    fields = layer.__dict__  # a module's own lookups would take longer than a product for one token
    # Replicas of DataParallel, FSDP1 and pruning keep the weight elsewhere.
    weight, bias = fields["_parameters"].get("weight"), fields["_parameters"].get("bias")
    if altered(layer) or "forward" in fields or not (biased or bias is None):
        return None
    return weight if type(weight) in (nn.Parameter, Tensor) else None


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ without gradients; of few rows on a CPU by a kernel, because torch reads weights at half memory's speed."""
    if x.device.type == "cpu" and not autocasts(x):
        served = by_kernel("linear_rows", "auto", x, x, weight)
        if served is not None:
            return served
        if x.numel() == x.shape[-1] and _gains_by_blocks(weight):
            blocks = weight.view(BLOCKS, -1, weight.shape[1])
            y = torch.bmm(x.reshape(1, 1, -1).expand(BLOCKS, -1, -1), blocks.mT)
            return y.view(*x.shape[:-1], -1)
    return F.linear(x, weight)


def _gains_by_blocks(weight: Tensor) -> bool:
    """Whether a product with one row is faster by blocks: torch gives each a thread, but a whole matrix one."""
    divisible = weight.is_contiguous() and len(weight) % BLOCKS == 0
    return divisible and weight.numel() >= LARGE and torch.get_num_threads() > 1


def apply_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x), by `linear_rows` where that is nothing but a product and has no gradient."""
    if not unrecorded():
        return layer(x)
    weight = matrix_of(layer)
    return layer(x) if weight is None else linear_rows(x, weight)


def _fit(weights: list[Tensor | None], x: Tensor) -> TypeGuard[list[Tensor]]:
    """Whether one product may have all weights and x; other inputs are for Linear to refuse."""
    dtypes = {None if weight is None else weight.dtype for weight in weights}
    return None not in dtypes and len(dtypes) == 1 and (autocasts(x) or x.dtype in dtypes)


def _are_movable(weights: list[Tensor | None]) -> TypeGuard[list[Tensor]]:
    """Whether one piece of memory can have them, and nothing relies on where they are now.

    FSDP fills the memory of its parameters again and again; others share it between processes or parameters.
    """
    present = [weight for weight in weights if weight is not None]
    kinds = {(weight.dtype, weight.device, weight.is_inference()) for weight in present}
    if len(present) < len(weights) or len(kinds) > 1 or present[0].device.type == "meta":
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    if present[0].device.type == "cpu" and any(weight.is_shared() for weight in present):
        return False
    return all(weight.untyped_storage().nbytes() == weight.nbytes for weight in present)
