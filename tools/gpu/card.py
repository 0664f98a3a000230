"""The card that is measured, times on it, and other processes, with a log of everything that they say."""

import contextlib
import faulthandler
import gc
import importlib.util
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "src"), str(ROOT / "kernels")]
sys.path[:0] = PATHS  # the package may not be installed on a GPU machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # which may have no network
LENGTHS = (2048, 8192)
TOKENS = 16384  # of a call and of a training step, at every length
MOST_LOG = 12 * 2**20  # bytes; a machine may hand back no larger file than 16 MiB

Values = dict[str, Any]


class OutOfTime(BaseException):
    """Not an Exception, so that no library on the stack catches it."""


class NotThere(Exception):
    """A peer, or what it needs, is not installed."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Card:
    """The device of measurements. dry: a CPU at tiny shapes, with Triton's interpreter and `standin`'s CUDA.

    keep: takes what a case has measured so far, so that a kill in its middle loses nothing.
    """

    device: str = "cuda"
    dry: bool = False
    seconds: float = 540.0  # left for the current case
    output: Path = ROOT / "kernels"
    tests: Path = ROOT / "tests"
    keep: Callable[[Values], None] = field(default=lambda values: None)

    def lengths(self) -> tuple[int, ...]:
        return (32,) if self.dry else LENGTHS

    def rows(self, T: int) -> int:
        return max(1, (32 if self.dry else TOKENS) // T)

    def smaller(self) -> dict[str, int]:
        """Sizes of models that replace the recipes'."""
        keys = ("hidden_size", "head_dim", "intermediate_size", "vocab_size")
        return (
            {"num_hidden_layers": 1} | dict(zip(keys, (32, 16, 32, 64), strict=True))
            if self.dry
            else {}
        )

    def chosen(self, sides: dict[str, Callable]) -> dict[str, Callable]:
        """The sides that are measured."""
        return sides

    def compile(self, model: Any) -> None:
        model.compile(backend="eager" if self.dry else "inductor")

    @property
    def backend(self) -> str:
        """What serves a model's ops: in the interpreter, on CPU tensors, only a named backend does."""
        return "triton" if self.dry else "auto"

    def kernel(self, op: str, backend: str = "triton") -> Callable:
        """The implementation itself: no other backend can serve in its place, so it raises `Unsupported`."""
        from nalanda_kernels import KERNELS

        row = KERNELS[op].get(backend)
        if row is None or importlib.util.find_spec(row.needs) is None:
            raise NotThere(f"{backend} is not there")
        return row.load()

    def clock(self, function: Callable, inputs: list[tuple], calls: int) -> list[float]:
        """Milliseconds of each call. Calls rotate through the inputs, so that caches do not hold them."""
        torch.cuda._sleep(
            40_000_000
        )  # 20 ms for the host to run ahead, so that launches cost no time
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for i, (start, end) in enumerate(events):
            start.record()
            function(*inputs[i % len(inputs)])
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def times(self, sides: dict[str, Callable], inputs: list[tuple]) -> tuple[Values, Values]:
        """Median milliseconds of each side, and the errors of sides that failed; sides take turns."""
        sides, failed = dict(sides), {}
        for name, function in list(sides.items()):
            try:
                for _ in range(1 if self.dry else 3):  # compiles, and autotunes the peer
                    function(*inputs[0])
            except Exception as error:
                failed[name] = self.note(error)
                del sides[name]
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 if self.dry else 3):
            for name, function in sides.items():
                taken[name] += self.clock(function, inputs, 1 if self.dry else 10)
        return {name: statistics.median(x) for name, x in taken.items()}, failed

    def wall(self, step: Callable[[], None]) -> float:
        """Milliseconds per call by the host's clock, over many calls, launches included."""
        for _ in range(1 if self.dry else 10):
            step()
        count, times = (1 if self.dry else 50), []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start) / count)
        return statistics.median(times)

    def sets(self, make: Callable[[int], tuple]) -> list[tuple]:
        """Input sets, together four times the last-level cache."""
        first = make(0)
        cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        size = sum(x.nbytes for x in first if isinstance(x, Tensor))
        return [
            first,
            *(make(i) for i in range(1, max(2, min(8, math.ceil(4 * cache_bytes / size))))),
        ]

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy, read and written."""
        x = torch.randn(2**10 if self.dry else 2**29, device=self.device)
        y = torch.empty_like(x)
        taken = self.times({"copy": lambda: y.copy_(x)}, [()])[0]["copy"]
        return 2 * x.nbytes / taken * 1e3

    @cached_property
    def rate(self) -> float:
        """FLOPs per second of a large bf16 product of random matrices."""
        n = 64 if self.dry else 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * n**3 / self.times({"product": lambda: a @ b}, [()])[0]["product"] * 1e3

    def floor(self, bytes_moved: float, flops: float) -> float:
        """Approximate lower bound of any implementation, in milliseconds."""
        return 1e3 * max(bytes_moved / self.bandwidth, flops / self.rate)

    def release(self) -> None:
        torch.cuda.synchronize()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # it holds compiled models
        gc.collect()
        torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------------- log

    @property
    def log(self) -> Path:
        return self.output / "log.txt"

    def write_log(self, text: str) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        if not self.log.exists() or self.log.stat().st_size < MOST_LOG:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(text)

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.write_log(text + "\n")

    def note(self, error: BaseException) -> str:
        """The error in a line; its whole traceback goes to the log, unless a peer is merely absent."""
        if not isinstance(error, NotThere | ModuleNotFoundError):
            self.write_log("".join(traceback.format_exception(error)))
        return in_a_line(error)

    def python(
        self, arguments: list[str], *rest: Callable[[], Any], **variables: str
    ) -> tuple[int, str]:
        """`command` with this Python."""
        return self.command([sys.executable, *arguments], *rest, **variables)

    def command(
        self, arguments: list[str], each: Callable[[], Any] = lambda: None, **variables: str
    ) -> tuple[int, str]:
        """Runs a command in the repository's root, within `seconds`. Its output goes to the log.

        each: called every few seconds. Returns the exit code and the last line of output.

        Raises subprocess.TimeoutExpired, after the process and its children have been killed.
        """
        dropped = (
            "TRITON_INTERPRET",
            "NALANDA_BACKEND",
            "PYTEST_",
        )  # a test of this is no worker of that pytest
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        path = os.pathsep.join([*PATHS, *filter(None, [kept.get("PYTHONPATH")])])
        self.write_log(f"$ {' '.join(arguments)}\n")
        start, end = self.log.stat().st_size, time.monotonic() + self.seconds
        with self.log.open("ab") as file:
            process = subprocess.Popen(
                arguments,
                env=kept | {"PYTHONPATH": path} | variables,
                cwd=ROOT,
                stdout=file,
                stderr=file,
                process_group=0,
            )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(max(0.0, min(5.0, end - time.monotonic())))
                    break
                if time.monotonic() >= end:
                    raise subprocess.TimeoutExpired(arguments, self.seconds)
                each()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            each()
        with self.log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return code, lines[-1] if lines else ""


def in_a_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


@contextlib.contextmanager
def stacks_of_a_hang(card: Card, seconds: float) -> Iterator[None]:
    """A process that hangs in the driver hears no signal: it writes its stacks to the log and ends."""
    card.write_log("")
    with card.log.open("a") as file:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
