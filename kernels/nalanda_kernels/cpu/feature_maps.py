"""Feature maps with their L2 norm in one pass over queries and keys, on a CPU."""

import ctypes
import functools

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.autograd import once_differentiable
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.structures import Settings
from nalanda_kernels.maps import Map, describe, exponents_and_units
from nalanda_kernels.tensors import pointer, threads

DTYPES = {torch.float32, torch.bfloat16}
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
    return run(q, k, p, unit, MAP)


def _forward(
    q: Tensor, k: Tensor, p: Tensor | None, unit: Tensor | None, MAP: Map
) -> tuple[Tensor, Tensor]:
    return _features(q, p, unit, MAP, True), _features(k, p, unit, MAP, False)


def _features(x: Tensor, p: Tensor | None, unit: Tensor | None, MAP: Map, query: bool) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], MAP.halves * x.shape[-1])
    library().map_forward(
        x.dtype == torch.bfloat16,
        *map(pointer, (x, y)),
        *_sizes(x),
        ctypes.byref(settings_of(MAP, query)),
        *map(pointer, (p, unit)),
        _threads(x),
    )
    return y


class _Mapped(torch.autograd.Function):
    """`_forward`, whose backward reads q, k and their features. The recurrence behind the map keeps those anyway."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, p: Tensor | None, unit: Tensor | None, MAP: Map
    ) -> tuple[Tensor, Tensor]:
        features = _forward(q, k, p, unit, MAP)
        ctx.save_for_backward(q, k, *features, p, unit)
        ctx.map = MAP
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, *features, p, unit = ctx.saved_tensors
        # A thread sums the gradients of Pola's parameters over its own rows, [q or k, parts, H, K].
        shape = 2, max(map(_threads, (q, k)))
        dp, d_unit = (None if w is None else w.new_zeros(*shape, *w.shape) for w in (p, unit))

        inputs = []
        for i, (x, y, dy) in enumerate(zip((q, k), features, gradients, strict=True)):
            x, dy = x.contiguous(), dy.contiguous()
            dx = torch.empty_like(x)
            library().map_backward(
                x.dtype == torch.bfloat16,
                *map(pointer, (x, y, dy, dx)),
                *_sizes(x),
                ctypes.byref(settings_of(ctx.map, i == 0)),
                *map(pointer, (p, unit, *(None if w is None else w[i] for w in (dp, d_unit)))),
                _threads(x),
            )
            inputs.append(dx)
        return *inputs, *(None if w is None else w.sum((0, 1)) for w in (dp, d_unit)), None


def _sizes(x: Tensor) -> tuple[ctypes.c_long, int, int]:
    """Rows, heads and K of x `[B, T, H, K]`."""
    return ctypes.c_long(x.numel() // x.shape[-1]), x.shape[-2], x.shape[-1]


def _threads(x: Tensor) -> int:
    return threads(x.numel() // x.shape[-1] // ROWS_A_THREAD)
