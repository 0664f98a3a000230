"""Fills Triton's cache for an absent Hopper card with what it would launch.

    python -m gpu.precompile bench|train        or, as a plugin: pytest -p gpu.precompile tests/kernels/…

Calls run at their real shapes on CPU tensors, and launches only compile: their results are garbage. The cache
is keyed by sources, options, ptxas and Triton's own files, not by paths, so that it fits the same Triton
elsewhere.
"""

import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu.card import Card, NotThere, Values

ARCH = "sm_90"
OURS = ("ours", "peer", "peer_fused")  # the sides that launch Triton's kernels


class Compiling(Card):
    """Calls everything once, at real shapes; models have one layer."""

    bandwidth = rate = 1.0

    def smaller(self) -> dict[str, int]:
        return {"num_hidden_layers": 1, "vocab_size": 512}

    def chosen(self, sides: dict[str, Callable]) -> dict[str, Callable]:
        return {name: side for name, side in sides.items() if name in OURS}

    @property
    def backend(self) -> str:
        return "triton"

    def compile(self, model: Any) -> None:
        raise NotThere("torch.compile's kernels are not compiled ahead of time")

    def clock(self, function: Callable, inputs: list[tuple], calls: int) -> list[float]:
        function(*inputs[0])
        return [1.0]

    def times(self, sides: dict[str, Callable], inputs: list[tuple]) -> tuple[Values, Values]:
        for function in sides.values():
            with contextlib.suppress(Exception):
                function(*inputs[0])
        return dict.fromkeys(sides, 1.0), {}

    def wall(self, step: Callable[[], None]) -> float:
        step()
        return 1.0

    def sets(self, make: Callable[[int], tuple]) -> list[tuple]:
        return [make(0)]

    def release(self) -> None:
        gc.collect()


class Idle(torch.autograd.Function):
    """A linear layer's shapes and dtypes without its product, which would take a CPU minutes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.like = x, weight, bias
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return x.new_zeros(*x.shape[:-1], len(weight), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else torch.zeros_like(x) for x in ctx.like)


def start() -> None:
    """From here on this process's launches compile for ARCH."""
    import nalanda_kernels
    from nalanda_lab.kernels import static
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build, driver
    from triton.runtime.jit import JITFunction

    def try_once(launch: Callable, quantiles: Any = None, **options: Any) -> list[float]:
        with contextlib.suppress(Exception):  # a configuration that does not compile
            launch()
        return [0.0] * 3

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel: Any = run(self, *args, grid=grid, warmup=True, **options)
        with contextlib.suppress(Exception):  # newer Tritons have no launcher for each signature
            nvidia.CudaLauncher(kernel.src, kernel.metadata)
        return kernel

    os.environ["NALANDA_ARCH"] = ARCH
    driver.set_active(static.Card(ARCH, try_once))  # pyrefly: ignore[bad-argument-type]
    mock.patch.object(
        build, "_load_module_from_path", return_value=mock.MagicMock()
    ).start()  # no libcuda here
    with contextlib.suppress(Exception):
        nvidia.CudaUtils()
    JITFunction.run = compile_only
    nalanda_kernels.interpreting = lambda: True  # kernels take CPU tensors
    if importlib.util.find_spec("fla"):
        static.pretend(ARCH)


def pytest_configure() -> None:
    start()
    torch.testing.assert_close = lambda *_, **__: None


def main(part: str) -> None:
    from gpu import bench, standin, train

    start()
    cases = {"bench": bench.bench_cases, "train": train.train_cases}[part](Compiling("cpu"))
    torch.nn.functional.linear = Idle.apply  # pyrefly: ignore[bad-assignment]
    with standin.cuda():
        for case in cases:
            if case.group in ("Ceilings", "Loss curves") or case.run is None:
                continue
            print(case.name, flush=True)
            try:
                print(case.run(Compiling("cpu")).get("errors", ""), flush=True)
            except Exception as error:
                print(f"{type(error).__name__}: {error}"[:300], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
