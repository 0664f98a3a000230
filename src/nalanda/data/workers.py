"""Work that is done ahead: tokenising in processes of its own, reading in a thread.

This file is also what those processes run. It imports neither torch nor anything of ours, so that one starts
in a moment, and nothing of the program that trains is run a second time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


READ_AHEAD = 4  # batches


LEFT_TO_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class Encoder:
    """Texts → their tokens, int32, between `first` and `last`. A special token spelt in a text is text."""

    def __init__(self, backend: Tokenizer, first: list[int], last: list[int]):
        self.backend, self.first, self.last = backend, first, last
        backend.encode_special_tokens = True

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(self.first + encoding.ids + self.last, np.int32) for encoding in encodings]

    def __reduce__(self) -> tuple:
        return Encoder, (self.backend, self.first, self.last)


class Tokenisers:
    """Tokenises groups of texts in their order, in `workers` processes ahead of the reader, or here if < 2.

    A process takes one group at a time and they take turns, so that no more than `workers` groups a stream
    are under way. They start with the first group. They end when `close` is called, with this object or the
    interpreter, and, since their input ends, however the trainer dies. Signals that are sent to all processes
    of a run do not reach them: the trainer still has a step to finish and a checkpoint to save.
    """

    def __init__(self, encode: Encoder, workers: int):
        self.encode = encode
        self._workers = [_Worker() for _ in range(workers if workers > 1 else 0)]
        self._turn = 0
        self.close = weakref.finalize(self, _close, self._workers)

    def in_order(self, groups: Iterator[tuple[Any, list[str]]]) -> Iterator[tuple[Any, list[np.ndarray]]]:
        """`(what, texts)` → `(what, tokens)`. An error in `groups` is raised behind what was read before."""
        waiting: deque[tuple[Any, Callable[[], list[np.ndarray]]]] = deque()
        failure = None
        while True:
            try:
                group = None if failure else next(groups, None)
            except Exception as error:
                group, failure = None, error
            if group:
                waiting.append((group[0], self._begin(group[1])))
            if waiting and (not group or len(waiting) > len(self._workers)):
                what, result = waiting.popleft()
                yield what, result()
            elif not group:
                break
        if failure:
            raise failure

    def _begin(self, texts: list[str]) -> Callable[[], list[np.ndarray]]:
        if not self._workers:
            return lambda: self.encode(texts)
        worker = self._workers[self._turn]
        self._turn = (self._turn + 1) % len(self._workers)
        return worker.begin(self.encode, texts)


class _Worker:
    """One process and the group it is at."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.closed = False
        self._task: list | None = None  # becomes [tokens]

    def begin(self, encode: Encoder, texts: list[str]) -> Callable[[], list[np.ndarray]]:
        self._finish()  # with two under way both sides could wait for room in a pipe
        if not self.process:
            self._start()
            self._send((encode.backend.to_str(), encode.first, encode.last))
        self._send(texts)
        task: list = []
        self._task = task

        def result() -> list[np.ndarray]:
            if not task:
                self._finish()
            return task.pop()

        return result

    def _start(self) -> None:
        # A process inherits which signals are blocked: there is no moment at which they could strike it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_TRAINER)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.closed:  # meanwhile
            self.close()

    @property
    def _pipes(self) -> Any:
        return self.process

    def _send(self, message: Any) -> None:
        try:
            pickle.dump(message, self._pipes.stdin, pickle.HIGHEST_PROTOCOL)
            self._pipes.stdin.flush()
        except OSError:
            self._ended()

    def _finish(self) -> None:
        if self._task is not None:
            try:
                self._task.append(pickle.load(self._pipes.stdout))
            except (EOFError, OSError, pickle.UnpicklingError):
                self._ended()
            self._task = None

    def _ended(self) -> None:
        from nalanda.common.errors import InputError

        code = self._pipes.wait()
        raise InputError(
            f"a process that tokenises ended by itself (exit code {code}; -9 may be a lack of memory); "
            "lower data.workers"
        ) from None

    def close(self) -> None:
        self.closed = True
        if self.process:
            self.process.kill()  # it has nothing to lose
            self.process.wait()


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.close()


class ReadAhead:
    """Runs an iterator in one thread, a few items ahead of the consumer. Errors reach the consumer."""

    def __init__(self, items: Iterator, tokenisers: Tokenisers):
        self._queue: queue.Queue = queue.Queue(READ_AHEAD)
        stop = threading.Event()
        # The thread must not hold `self`, or the object would never be collected and the thread never end.
        thread = threading.Thread(
            target=_produce, args=(items, self._queue, stop), name="nalanda-data", daemon=True
        )
        # Also runs when the interpreter exits: a daemon thread inside a tokenizer must not outlive it.
        self.close = weakref.finalize(self, _stop, thread, self._queue, stop, tokenisers.close)
        thread.start()

    def __next__(self):
        item, error = self._queue.get()
        if error:
            raise error
        return item


def _produce(items: Iterator, out: queue.Queue, stop: threading.Event) -> None:
    try:
        for item in items:
            out.put((item, None))
            if stop.is_set():
                return
        out.put((None, StopIteration()))
    except BaseException as error:
        out.put((None, error))


def _stop(
    thread: threading.Thread, out: queue.Queue, stop: threading.Event, close: Callable[[], Any]
) -> None:
    stop.set()
    close()  # a thread that waits for a process is woken
    patience = 500  # a read from the network may not return; such a thread is left behind
    while thread.is_alive() and thread is not threading.current_thread() and patience:
        patience -= 1
        with contextlib.suppress(queue.Empty):
            out.get_nowait()  # room for a `put` that waits
        thread.join(0.01)


def _serve() -> None:
    """Reads pickled lists of texts on stdin and writes pickled lists of tokens on stdout."""
    from tokenizers import Tokenizer

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that is printed may lie between the answers
    with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):  # the trainer is gone
        backend, first, last = pickle.load(sys.stdin.buffer)
        encode = Encoder(Tokenizer.from_str(backend), first, last)
        while True:
            pickle.dump(encode(pickle.load(sys.stdin.buffer)), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    os._exit(0)  # without another try to write


if __name__ == "__main__":
    _serve()


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
