"""The card that is measured: its clock, and processes with a log of all that they print."""

import hashlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / name) for name in ("src", "kernels", "eval", "lab", "tools")]
sys.path[:0] = PATHS  # the package may not be installed on a machine with a card
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # which may have no network

STUBS = Path(__file__).with_name("stubs")
OUT_OF_TIME = "out of time"
GRACE = 25  # seconds from SIGTERM to SIGKILL: a trainer saves a checkpoint
Values = dict[str, Any]


@dataclass
class Case:
    """A row of a table: `run` measures its columns. targets: the least value of a column."""

    group: str
    name: str
    run: Callable[["Card"], Values] | None = None
    targets: dict[str, float] = field(default_factory=dict)


@dataclass
class Card:
    """The device of measurements. dry: a CPU at tiny shapes, with Triton's interpreter."""

    device: str = "cuda"
    dry: bool = False
    output: Path = Path("gpu-results")
    tests: Path = ROOT / "tests" / "kernels"
    end: float = math.inf
    """When processes are asked to end, by `time.monotonic`."""
    bundle: Path | None = None
    """The unpacked bundle."""
    newest: Callable[[str, str], Values] = lambda group, name: {}
    """The newest figures of a case on this card."""

    def __post_init__(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        self.log = self.output / "log.txt"

    @property
    def work(self) -> Path:
        """The folder of runs and texts. It does not come back from a card's machine."""
        name = hashlib.sha256(str(self.output.resolve()).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir(), f"nalanda-runs-{name}")

    @property
    def lengths(self) -> tuple[int, ...]:
        return (32,) if self.dry else (2048, 8192)

    @property
    def tokens(self) -> int:
        """Of a call and of a training step, at every length."""
        return 32 if self.dry else 16384

    # ------------------------------ the clock

    def clock(self, function: Callable, inputs: list[tuple], calls: int) -> list[float]:
        """Milliseconds of each call. Calls rotate through the inputs, so that caches do not hold them."""
        if self.dry:
            start = time.perf_counter()
            function(*inputs[0])
            return [1e3 * (time.perf_counter() - start)]
        torch.cuda._sleep(40_000_000)  # 20 ms: the host runs ahead, so that launches cost no time
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for i, (start, end) in enumerate(events):
            start.record()
            function(*inputs[i % len(inputs)])
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def times(self, sides: dict[str, Callable], inputs: list[tuple]) -> tuple[Values, Values]:
        """Median milliseconds of each side, and the errors of sides that failed. Sides take turns."""
        working, errors = {}, {}
        for name, function in sides.items():
            try:
                function(*inputs[0])  # compiles, and autotunes the peer
                working[name] = function
            except Exception as error:
                errors[name] = self.note(error)

        taken: dict[str, list[float]] = {name: [] for name in working}
        for _ in range(3):
            for name, function in working.items():
                taken[name] += self.clock(function, inputs, calls=10)
        return {name: statistics.median(x) for name, x in taken.items()}, errors

    def input_sets(self, make: Callable[[int], tuple]) -> list[tuple]:
        """Sets of inputs, together four times the last-level cache."""
        first = make(0)
        if self.dry:
            return [first]
        cache = torch.cuda.get_device_properties().L2_cache_size
        count = math.ceil(4 * cache / sum(x.nbytes for x in first))
        return [first, *(make(i) for i in range(1, max(2, min(8, count))))]

    def synchronize(self) -> None:
        """Raises an error if the process has lost its GPU."""
        if not self.dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    # ------------------------------ log and processes

    def write_log(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text)

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.write_log(text + "\n")

    def note(self, error: BaseException) -> str:
        """The error in a line. Its traceback goes to the log, unless a peer is merely absent."""
        if not isinstance(error, ModuleNotFoundError):
            self.write_log("".join(traceback.format_exception(error)))
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"[:160]

    def start(self, arguments: list[str], path: Iterable[str] = (), **variables: str) -> Any:
        """Starts this Python in the repository's root. Its output goes to the log.

        path: more folders of packages, before all others.
        """
        dropped = ("TRITON_INTERPRET", "NALANDA_BACKEND", "PYTEST_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        folders = [*path, *PATHS, *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(folders)} | variables

        command = [sys.executable, *arguments]
        self.write_log(f"$ {' '.join(command)}\n")
        if self.dry:
            from gpu import warm

            if forked := warm.start(arguments, environment, self.log):
                return forked
        with self.log.open("ab") as file:
            return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)

    def python(
        self, arguments: list[str], path: Iterable[str] = (), **variables: str
    ) -> tuple[int, str]:
        """Runs this Python as `start` does, until `end`.

        Returns the exit code and the last line of output. Raises subprocess.TimeoutExpired.
        """
        process = self.start(arguments, path, **variables)
        start = self.log.stat().st_size
        limit = None if self.end == math.inf else max(self.end - time.monotonic(), 0.0)
        try:
            code = process.wait(limit)
        finally:
            stop([process])
        output = self.log.read_bytes()[start:].decode(errors="replace")
        return code, (output.strip().splitlines() or [""])[-1]


def stop(processes: list[subprocess.Popen]) -> None:
    """Asks processes to end, and kills those that have not after `GRACE` seconds."""
    for process in processes:
        process.terminate()  # nothing, if it has ended
    end = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
