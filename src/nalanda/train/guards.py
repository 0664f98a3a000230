"""What a long run must survive: steps that would spoil the weights, signals, and ranks that hang."""

import contextlib
import faulthandler
import math
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from nalanda.config.schema import EARLIEST, GuardConfig

HUNG = 70  # exit code, EX_SOFTWARE of sysexits.h


SIGNALS = {name: getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)}


class SpikeDetector:
    """Tells good steps from bad ones by the good ones before them.

    All that it knows is a window of numbers that every process has alike, so that all decide alike; it is
    saved with the checkpoint, or a resumed run would judge otherwise than an uninterrupted one.
    """

    def __init__(self, config: GuardConfig):
        self.sigma = config.sigma
        self.losses: deque[float] = deque(maxlen=config.window)
        self.norms: deque[float] = deque(maxlen=config.window)  # logarithms: norms vary by factors

    def judge(self, loss: float, norm: float) -> str | None:
        """Why a step with this loss and gradient norm must not reach the weights; None: it is good, and
        remembered as such."""
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"the {name} is {value:g}"
        logarithm = math.log(max(norm, 1e-30))
        for name, shown, value, seen in (
            ("loss", loss, loss, self.losses),
            ("gradient norm", norm, logarithm, self.norms),
        ):
            if self.sigma and len(seen) >= EARLIEST:
                mean = statistics.fmean(seen)
                # A floor: behind a stretch without noise the next small change is no spike.
                floor = 0.01 * abs(mean) if seen is self.losses else 0.1
                far = (value - mean) / max(statistics.pstdev(seen, mean), floor)
                if far > self.sigma:
                    usual = mean if seen is self.losses else math.exp(mean)
                    return f"the {name} {shown:.4g} is {far:.3g} σ above {usual:.4g}, its mean"
        self.losses.append(loss)
        self.norms.append(logarithm)
        return None

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        for name in ("losses", "norms"):
            own: deque[float] = getattr(self, name)
            own.clear()
            own.extend(state.get(name, []))


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collects SIGTERM, SIGINT and SIGUSR1 instead of dying of them; a second one of a kind acts as it always
    did."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(signum: int, frame: Any) -> None:
        received.append(signum)
        signal.signal(signum, previous[signum])

    if threading.current_thread() is threading.main_thread():
        previous = {s: signal.getsignal(s) for s in SIGNALS.values()}
        for signum in previous:
            signal.signal(signum, note)
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class Watchdog:
    """A thread that ends this process when nothing has moved for `timeout` seconds.

    A rank that hangs stops all others, which wait in a collective that never returns; a scheduler sees a job
    that runs. Every rank has its own watch and says what it was at, so that the one that does not wait for
    others is found. Call `beat` wherever something was finished.
    """

    def __init__(self, timeout: float | None, rank: int = 0):
        self.timeout, self.rank = timeout, rank
        self.what, self.since = "starting", time.monotonic()
        self.ended = threading.Event()
        if timeout is not None:
            threading.Thread(target=self._look, name="nalanda-watch", daemon=True).start()

    def beat(self, what: str) -> None:
        self.what, self.since = what, time.monotonic()

    def close(self) -> None:
        self.ended.set()

    def _look(self) -> None:
        assert self.timeout is not None
        while not self.ended.wait(min(1.0, self.timeout / 4)):
            silent = time.monotonic() - self.since
            if silent < self.timeout:
                continue
            print(
                f"nalanda: rank {self.rank} on {platform.node()} made no progress for {silent:.0f} s, "
                f"at: {self.what}; its stacks follow, then it ends with exit code {HUNG}. The same command "
                "goes on from the last checkpoint; guard.hang_timeout sets the time",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            sys.stderr.flush()
            os._exit(HUNG)  # the main thread may sit in a collective that no exception reaches
