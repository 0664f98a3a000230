"""The library behind fp32 matrix products on a CPU: torch's default, or oneDNN where it is faster and as exact.

torch's default on x86 is MKL, which reaches half of some AMD processors' speed. torch hands products to oneDNN where
bf16 is allowed inside of them. oneDNN then stays in fp32, unless the processor has bf16 units for matrices (AMX). So
the choice is by value: both routes multiply the same matrices once.
"""

import os
import time

import torch
from torch import Tensor

ENVIRONMENT = "NALANDA_ONEDNN"  # 0: torch's default in this process
PRECISIONS = {"default": "none", "onednn": "bf16"}  # of torch's setting, by route
SIZE = 512  # of the matrices that both routes multiply
ROUNDS = 8
ERROR_FACTOR = 4.0
"""oneDNN's error to float64 is at most so many times the default's: its sums have another order."""
TIME_FACTOR = 0.8
"""oneDNN takes at most this share of the default's time: a closer choice could change from start to start."""

_setting = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]  it is an object


def product_route() -> str:
    """The route of this process, "default" or "onednn"."""
    return "onednn" if _setting.fp32_precision == PRECISIONS["onednn"] else "default"


def set_product_route(route: str) -> None:
    _setting.fp32_precision = PRECISIONS[route]


def choose_product_route() -> str:
    """Measures both routes in about 50 ms, and returns the better one; sets neither."""
    if os.environ.get(ENVIRONMENT) == "0" or not torch.backends.mkldnn.is_available():
        return "default"

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    before = product_route()
    errors, times = {}, dict.fromkeys(PRECISIONS, float("inf"))
    try:
        # In turn: a processor's clock changes.
        for _ in range(ROUNDS):
            for route in PRECISIONS:
                set_product_route(route)
                product, seconds = multiply(a, b)
                errors[route] = (product - exact).abs().max().item()
                times[route] = min(times[route], seconds)
    finally:
        set_product_route(before)

    as_exact = errors["onednn"] <= ERROR_FACTOR * errors["default"]
    faster = times["onednn"] <= TIME_FACTOR * times["default"]
    return "onednn" if as_exact and faster else "default"


def multiply(a: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """a b, and the CPU seconds it took."""
    start = time.process_time()
    product = a @ b
    return product, time.process_time() - start
