"""Fills Triton's cache for an absent Hopper card with what it would launch.

    python -m gpu.precompile        or, as a plugin: pytest -p gpu.precompile tests/kernels/…

Calls run at their real shapes on CPU tensors, and launches only compile: their results are garbage.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from gpu.card import Card

ARCH = "sm_90"


def start() -> None:
    """From here on this process's launches compile for ARCH."""
    import nalanda_kernels
    from nalanda_kernels.triton import short_conv  # noqa: F401  its tiles are a card's, see below
    from nalanda_lab.kernels import static
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def try_once(launch: Callable, quantiles: Any = None, **options: Any) -> list[float]:
        with contextlib.suppress(Exception):  # a configuration that does not compile
            launch()
        return [0.0] * 3

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    os.environ["NALANDA_ARCH"] = ARCH
    driver.set_active(static.Card(ARCH, try_once))  # pyrefly: ignore[bad-argument-type]
    JITFunction.run = compile_only
    Card.clock = lambda self, function, inputs, calls: [1.0]
    Card.input_sets = lambda self, make: [make(0)]
    nalanda_kernels.interpreting = lambda: True  # kernels take CPU tensors
    if importlib.util.find_spec("fla"):
        static.pretend(ARCH)


def pytest_configure() -> None:
    start()
    torch.testing.assert_close = lambda *_, **__: None


def main() -> None:
    from gpu import bench

    start()
    bench.lift_guard()
    card = Card("cpu")
    for case in bench.bench_cases(card)[1:]:  # the first has no kernel of ours
        print(case.name, case.run and case.run(card), flush=True)


if __name__ == "__main__":
    main()
