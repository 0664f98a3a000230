"""Guards of a long run: the spike detector, signal handling, and the watchdog."""

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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil

from nalanda.common.errors import ExitCode
from nalanda.common.progress import first_process
from nalanda.config.schema import MIN_GOOD_STEPS, GuardConfig

WAIT_FACTOR = 2
"""Collectives wait so many times `guard.hang_timeout`: the watchdogs come first, and say what each rank did."""

SIGNALS = {
    name: getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
    if hasattr(signal, name)
}
"""Signals that stop a run, once it has saved."""

REPEATED = {getattr(signal, "SIGXCPU", None)}
"""Signals that the system itself repeats: SIGXCPU comes every second above a limit of CPU time."""

SAME_SIGNAL = 3.0
"""Seconds in which a second signal of a kind is the first one, sent twice."""


class SpikeDetector:
    """Detects bad steps by comparing loss and gradient norm with a window of good steps.

    Its values are reduced over all processes, so all ranks agree. Checkpoints save the window: a resumed run
    judges as an uninterrupted one does.
    """

    def __init__(self, config: GuardConfig):
        self.sigma = config.sigma
        self.losses: deque[float] = deque(maxlen=config.window)
        self.norms: deque[float] = deque(maxlen=config.window)  # logarithms: norms vary by factors

    def judge(self, loss: float, norm: float) -> str | None:
        """Why a step with this loss and gradient norm is bad; None for a good one, which joins the window."""
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"the {name} is {value:g}"
        # A norm of 0 has no logarithm.
        log_norm = math.log(max(norm, 1e-30))

        for name, value, window in (
            ("loss", loss, self.losses),
            ("gradient norm", log_norm, self.norms),
        ):
            if not self.sigma or len(window) < MIN_GOOD_STEPS:
                continue
            is_loss = window is self.losses
            mean = statistics.fmean(window)
            # A floor: after steps without noise, a small change is no spike.
            floor = 0.01 * abs(mean) if is_loss else 0.1
            distance = (value - mean) / max(statistics.pstdev(window, mean), floor)
            # With its sign: a fall is no spike.
            if distance > self.sigma:
                actual = loss if is_loss else norm
                usual = mean if is_loss else math.exp(mean)
                return f"the {name} {actual:.4g} is {distance:.3g} σ above {usual:.4g}, its mean"

        self.losses.append(loss)
        self.norms.append(log_norm)
        return None

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        for name in ("losses", "norms"):
            window: deque[float] = getattr(self, name)
            window.clear()
            window.extend(state.get(name, []))


class Interruptions:
    """The signals of `SIGNALS` that this process received: the loop can finish its step and save.

    A second signal of the same kind ends the process at once, unless it is the first one, sent twice. Within
    `SAME_SIGNAL` seconds it is: a scheduler signals every process, and torchrun forwards its own. In a process
    of a launch it always is: the launcher itself ends processes that stay. One of another kind ends nothing:
    systemd sends SIGTERM and then SIGHUP. SIGXCPU never does: the system repeats it. SIGHUP stays ignored
    under nohup.

    Attributes:
        launched: whether a launcher started this process.
        received: their numbers.
        first: called with the first one, in the main thread; None while the run is set up. A signal then
            raises SystemExit, 128 + its number, or KeyboardInterrupt: there is nothing to save yet.
    """

    def __init__(self) -> None:
        self.launched = "RANK" in os.environ
        self.received: list[int] = []
        self.first: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}
        self._came: dict[int, float] = {}  # when the first of each kind did

    def __enter__(self) -> "Interruptions":
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS.values():
                handler = signal.getsignal(signum)
                if signum == SIGNALS.get("SIGHUP") and handler == signal.SIG_IGN:  # under nohup
                    continue
                self._previous[signum] = handler
                signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: Any) -> None:
        # Another signal may interrupt each line: then both are taken for the first, which does no harm.
        is_first, is_first_of_kind = not self.received, signum not in self._came
        self.received.append(signum)
        if not is_first_of_kind:
            # A second signal of a kind may be the first one, sent twice.
            age = time.monotonic() - self._came[signum]
            if not (age < SAME_SIGNAL or signum in REPEATED or self.launched):
                # Its usual effect, which ends the process.
                signal.signal(signum, self._previous[signum])
                signal.raise_signal(signum)
            return
        self._came[signum] = time.monotonic()

        if self.first is None:
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
        if signum == signal.SIGINT and first_process():
            again = "" if self.launched else f"; ctrl-C after {SAME_SIGNAL:.0f} s ends at once"
            with contextlib.suppress(OSError):  # not `print`, which this may have interrupted
                os.write(2, f"\nfinishing the step, then saving{again}\n".encode())
        if is_first:
            self.first()


class Watchdog:
    """A thread that ends this process after `timeout` seconds without a `beat`.

    If one rank hangs, the others wait in a collective that never returns, and the scheduler sees a running
    job. Every rank has its own watchdog, which prints the last `beat`. The rank that hangs is then known.
    """

    def __init__(self, timeout: float | None, rank: int = 0):
        self.timeout, self.rank = timeout, rank
        self.what, self.since = "starting", time.monotonic()
        self.ended = threading.Event()
        self._in_long_work = False
        self._work = Work(0.0, 0)
        if timeout is not None:
            threading.Thread(target=self._look, name="nalanda-watch", daemon=True).start()

    def beat(self, what: str) -> None:
        """Notes that the process goes on. what: names its work for the message."""
        self.what, self.since = what, time.monotonic()
        if self._in_long_work:
            self._work = work_done()

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """Set-up, saves and the export, which may take long without a beat: there work is progress, too (`Work`).

        The first rank may work alone for long. The others wait as long as collectives do.
        """
        timeout, self._in_long_work = self.timeout, True
        if timeout is not None and self.rank:
            self.timeout = WAIT_FACTOR * timeout
        try:
            yield
        finally:
            self.beat(self.what)
            self.timeout, self._in_long_work = timeout, False

    def close(self) -> None:
        self.ended.set()

    def silence(self) -> float:
        """Seconds since the last progress."""
        silent = time.monotonic() - self.since
        if self._in_long_work and (now := work_done()).exceeds(self._work, silent):
            self.since, self._work = time.monotonic(), now
        return silent

    def _look(self) -> None:
        assert self.timeout is not None
        while not self.ended.wait(min(1.0, self.timeout / 4)):
            silent = self.silence()
            if silent < self.timeout:
                continue
            print(
                f"nalanda: rank {self.rank} on {platform.node()} made no progress for {silent:.0f} s, "
                f"at: {self.what}; its stacks follow, then it ends with exit code {ExitCode.HUNG}. The same command "
                "resumes from the last checkpoint; guard.hang_timeout sets the time",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            sys.stderr.flush()
            os._exit(ExitCode.HUNG)  # no exception reaches a main thread inside a collective


class Work(NamedTuple):
    """What this process has done since it began."""

    seconds: float
    """Of CPU time."""
    transferred: int
    """Bytes read and written, those of pipes and downloads among them; 0 where the system does not say."""

    def exceeds(self, before: "Work", seconds: float) -> bool:
        """Whether it is more than that of a process that waited `seconds`: a twentieth of a core, or a MiB."""
        busy = self.seconds - before.seconds > max(seconds, 1.0) / 20
        return busy or self.transferred - before.transferred > 1 << 20


def work_done() -> Work:
    transferred = 0
    with contextlib.suppress(Exception):  # Linux alone counts them
        # bytes of system calls, from the page cache too
        counters = psutil.Process().io_counters()
        transferred = counters.read_chars + counters.write_chars
    return Work(time.process_time(), transferred)
