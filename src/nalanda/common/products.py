"""The library behind fp32 matrix products on a CPU: torch's default, or oneDNN where it is faster and as exact.

torch's default on x86 is MKL, which reaches half of some AMD processors' speed. torch hands products to oneDNN where
bf16 is allowed inside of them. oneDNN then stays in fp32, unless the processor has bf16 units for matrices (AMX). So
the choice is by value and time, measured with the products of a training step.

The two routes round differently. So a machine measures once, and a second run of a recipe repeats the first's digits.
"""

import hashlib
import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from nalanda_kernels.cpu.build import cache_folder, processor
from torch import Tensor

ENVIRONMENT = "NALANDA_ONEDNN"  # 0: torch's default in this process
PRECISIONS = {"default": "none", "onednn": "bf16"}  # of torch's setting, by route
ROUNDS = 25
ERROR_FACTOR = 4.0
"""oneDNN's error to float64 is at most so many times the default's: its sums have another order."""
TIME_FACTOR = 0.95
"""oneDNN takes at most this share of the default's time."""
LOCK_SECONDS = 60

_setting = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]  it is an object


class Probe(NamedTuple):
    """Products of one kind. `share`: of a step's time in products that this kind takes."""

    share: float
    pairs: list[tuple[Tensor, Tensor]]


def product_route() -> str:
    """The route of this process, "default" or "onednn"."""
    return "onednn" if _setting.fp32_precision == PRECISIONS["onednn"] else "default"


def set_product_route(route: str) -> None:
    _setting.fp32_precision = PRECISIONS[route]


def choose_product_route() -> str:
    """The better route on this machine, measured once in about 250 ms; sets neither."""
    if os.environ.get(ENVIRONMENT) == "0" or not torch.backends.mkldnn.is_available():
        return "default"

    try:
        return recall_route(cache_folder())
    # Of a full or closed folder, a lock that is held too long.
    except (OSError, RuntimeError):
        return measure_route()


def recall_route(folder: Path) -> str:
    """Reads the choice that the first process of this processor, torch and number of threads left in a file."""
    parts = f"{processor()} {torch.__version__} {torch.get_num_threads()}"
    file = folder / f"products-{hashlib.sha256(parts.encode()).hexdigest()}"

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=LOCK_SECONDS):
        if not file.exists() or file.read_text() not in PRECISIONS:
            file.write_text(measure_route())
        return file.read_text()


def measure_route() -> str:
    """Multiplies on both routes, and returns the better one."""
    before, time_factor = product_route(), 0.0
    try:
        for probe in draw_probes():
            error, duration = compare_routes(probe.pairs)
            # NaN is no smaller than anything.
            if not error <= ERROR_FACTOR:
                return "default"
            time_factor += probe.share * duration
    finally:
        set_product_route(before)
    return "onednn" if time_factor <= TIME_FACTOR else "default"


def draw_probes() -> list[Probe]:
    """The three products of a Linear layer in training, and two of the chunk form."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # 256 tokens: forward, and the gradients of input and weight.
    x, weight, dy = draw(256, 512), draw(512, 512), draw(256, 512)
    linear = [(x, weight.mT), (dy, weight), (dy.mT, x)]

    # 32 chunks of 64 tokens, with 128 features: QKᵀ, and Q S.
    q, k, state = draw(32, 64, 128), draw(32, 64, 128), draw(32, 128, 128)
    chunk = [(q, k.mT), (q, state)]

    # In fp32 Linear layers take 81 % of a layer, and the chunk form's products 8 to 10 %.
    return [Probe(0.9, linear), Probe(0.1, chunk)]


def compare_routes(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """oneDNN's error to float64 and its time, both as multiples of the default's."""
    products: dict[str, list[Tensor]] = {}
    shortest = dict.fromkeys(PRECISIONS, math.inf)
    # In turn, since a processor's clock changes. The shortest time is the least disturbed by other processes.
    for _ in range(ROUNDS):
        for route in PRECISIONS:
            set_product_route(route)
            products[route], seconds = multiply(pairs)
            shortest[route] = min(shortest[route], seconds)

    errors = dict.fromkeys(PRECISIONS, 0.0)
    for route in PRECISIONS:
        for (a, b), product in zip(pairs, products[route], strict=True):
            exact = a.double() @ b.double()
            errors[route] += (product - exact).abs().max().item()
    return errors["onednn"] / errors["default"], shortest["onednn"] / shortest["default"]


def multiply(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], float]:
    """a b of each pair, and the seconds of all."""
    # CPU time counts the turns in which a library's threads wait: with two threads it varies fourfold.
    start = time.perf_counter()
    products = [a @ b for a, b in pairs]
    return products, time.perf_counter() - start
