"""Feature maps with their L2 norm in one pass over queries and keys, on a CPU."""

import ctypes
import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalanda_kernels import Unsupported
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.structures import Settings
from nalanda_kernels.maps import Map, describe, exponents_and_units

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
NAMES = ("identity", "silu", "relu", "elu", "elu1", "exp", "power")
ANGLES = ("relu_split", "raw", "direction")
ROWS_A_THREAD = 64  # for fewer a thread costs more than it gains


@functools.cache
def settings_of(MAP: Map, query: bool) -> Settings:
    raised = MAP.name in ("nala", "pola")
    return Settings(
        name=NAMES.index("power" if raised else MAP.name),
        angle=ANGLES.index(MAP.angle or "relu_split"),
        l2=MAP.l2,
        query=query,
        alpha=MAP.alpha,
        power=MAP.power,
        n_scale=MAP.n_scale,
        scale=MAP.scale if MAP.name == "nala" else 0.0,
        # Pola has an exponent a channel.
        exponent=1.0 if MAP.name == "pola" else MAP.query_power if query else MAP.key_power,
    )


def map_features(
    q: Tensor, k: Tensor, feature_map, qk_norm: str | None = None
) -> tuple[Tensor, Tensor] | None:
    """φ(q) and φ(k), normed, `[B, T, H, K] → [B, T, H, F]`, computed in fp32 and cast once to q's dtype.

    None for float64 and fp16 and for maps that `describe` does not know: torch computes these. Raises Unsupported where
    the library cannot be built.
    """
    K = q.shape[-1]
    if q.dtype not in DTYPES or k.dtype != q.dtype or not q.numel():
        return None
    try:
        MAP, parameters = describe(feature_map, qk_norm, K)
    except Unsupported:
        return None
    if MAP.name == "identity" and not MAP.l2:
        return q, k
    if any(w.shape != (x.shape[2], K) for w in parameters for x in (q, k)):
        return None

    p, unit = exponents_and_units(MAP, parameters)
    # The C++ reads a unit for each channel: 1 where the map has no scale.
    if p is not None and unit is None:
        unit = torch.ones_like(p)

    # Refuses before autograd records anything.
    library()
    run = _Mapped.apply if torch.is_grad_enabled() else _forward
    return run(q, p, unit, MAP, True), run(k, p, unit, MAP, False)


def _forward(x: Tensor, p: Tensor | None, unit: Tensor | None, MAP: Map, query: bool) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], MAP.halves * x.shape[-1])
    library().map_forward(
        x.dtype == torch.bfloat16,
        *map(_pointer, (x, y)),
        *_sizes(x),
        ctypes.byref(settings_of(MAP, query)),
        *map(_pointer, (p, unit)),
        _threads(x),
    )
    return y


class _Mapped(torch.autograd.Function):
    """`_forward`, whose backward forms the features again: it keeps no more than x."""

    @staticmethod
    def forward(
        ctx, x: Tensor, p: Tensor | None, unit: Tensor | None, MAP: Map, query: bool
    ) -> Tensor:
        ctx.save_for_backward(x, p, unit)
        ctx.map = MAP, query
        return _forward(x, p, unit, MAP, query)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, p, unit = ctx.saved_tensors
        x, dy = x.contiguous(), dy.contiguous()
        dx, parts = torch.empty_like(x), _threads(x)
        # A thread sums the gradients of Pola's parameters over its own rows, [parts, H, K].
        dp, d_unit = (None if y is None else y.new_zeros(parts, *y.shape) for y in (p, unit))

        library().map_backward(
            x.dtype == torch.bfloat16,
            *map(_pointer, (x, dy, dx)),
            *_sizes(x),
            ctypes.byref(settings_of(*ctx.map)),
            *map(_pointer, (p, unit, dp, d_unit)),
            parts,
        )
        return dx, *(None if y is None else y.sum(0) for y in (dp, d_unit)), None, None


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _sizes(x: Tensor) -> tuple[ctypes.c_long, int, int]:
    """Rows, heads and K of x `[B, T, H, K]`."""
    return ctypes.c_long(x.numel() // x.shape[-1]), x.shape[-2], x.shape[-1]


def _threads(x: Tensor) -> int:
    rows = x.numel() // x.shape[-1]
    return max(1, min(torch.get_num_threads(), rows // ROWS_A_THREAD))
