"""Work ahead of the training loop: processes that tokenise, and a thread that reads.

The processes run this file. It imports neither torch nor other files of ours, so they start quickly and do
not run the training program again.
"""

from __future__ import annotations

import contextlib
import itertools
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from nalanda.data.peers import Peers


READ_AHEAD = 4
"""Batches read ahead."""

LEFT_TO_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LEFT_TO_THE_TRAINER |= {signal.SIGXCPU}
"""Signals blocked in the processes: the trainer still has a step to finish and a checkpoint to save."""


def processors() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Encoder:
    """Texts → tokens, int32, between `first` and `last`. A special token spelt in a text is read as text."""

    def __init__(self, backend: Tokenizer, first: list[int], last: list[int]):
        self.backend, self.first, self.last = backend, first, last
        backend.encode_special_tokens = True

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(self.first + encoding.ids + self.last, np.int32) for encoding in encodings]


class Tokenisers:
    """Tokenises groups of texts in order, in `workers` processes ahead of the reader, or in this one if < 2.

    A process takes one group at a time, so at most `workers` groups of a stream are under way. The processes
    start with the first groups. They end with `close`, with this object, with the interpreter, and however
    the trainer dies, since their input ends.

    peers: the L processes that take the same groups. Each tokenises every L-th group for all of them, so L
    times as many groups are under way. With `workers` < 2 a thread tokenises.
    """

    def __init__(self, encode: Encoder, workers: int, peers: Peers | None = None):
        self._encode, self._peers = encode, peers
        self._workers = [Worker(encode) for _ in range(workers if workers > 1 else 0)]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        # Beside peers the reader hands groups on while the next one is tokenised, else all would wait for it.
        threads = len(self._workers) or int(peers is not None)
        self._pool = ThreadPoolExecutor(threads) if threads else None
        # Of the groups ahead this process tokenises one in `count`, and each of its threads one of those.
        self._ahead = threads * (peers.count if peers else 1)
        # It holds the parts and not `self`, which would never be collected.
        self.close = weakref.finalize(self, _close_all, self._workers, self._pool, peers)

    def in_order(
        self, groups: Iterator[tuple[Any, list[str]]]
    ) -> Iterator[tuple[Any, list[np.ndarray]]]:
        """`(key, texts)` → `(key, tokens)`. An error in `groups` is raised after the groups before it."""
        waiting: deque[tuple[Any, Callable[[], list[np.ndarray]]]] = deque()
        failure = None
        try:
            for number in itertools.count():
                try:
                    group = None if failure else next(groups, None)
                except Exception as error:
                    group, failure = None, error  # raised once the groups before it are given

                # Groups are given in their order, each once `_ahead` more have begun, or at the end.
                if group:
                    key, texts = group
                    waiting.append((key, self._begin_share(number, texts)))
                if waiting and (not group or len(waiting) > self._ahead):
                    key, result = waiting.popleft()
                    yield key, result()
                elif not group:
                    break
            if failure:
                raise failure
        # A reader that is closed (GeneratorExit) must not leave its peers waiting either.
        except BaseException as error:
            if self._peers:
                self._peers.fail(error)
            raise

    def _begin_share(self, number: int, texts: list[str]) -> Callable[[], list[np.ndarray]]:
        """Begins group `number` if it is this process's. The result also hands it on, or waits for it."""
        if not self._peers:
            return self._begin_group(texts)
        if number % self._peers.count == self._peers.turn:
            return partial(self._peers.give, self._begin_group(texts))
        return partial(self._peers.take, number, len(texts))

    def _begin_group(self, texts: list[str]) -> Callable[[], list[np.ndarray]]:
        if self._pool is None:
            return partial(self._encode, texts)
        encode = self._encode_in_process if self._workers else self._encode
        return self._pool.submit(encode, texts).result

    def _encode_in_process(self, texts: list[str]) -> list[np.ndarray]:
        worker = self._free.get()  # the one that has waited longest
        try:
            return worker.encode(texts)
        finally:
            self._free.put(worker)


class Worker:
    """A process that tokenises one group at a time.

    Not of a `ProcessPoolExecutor`: that imports the trainer's main module again in each process, and its
    processes outlive a trainer that is killed.
    """

    def __init__(self, encode: Encoder):
        self._encode = encode
        self.process: Any = None  # a Popen
        self._closed = False

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """`Encoder.__call__`. Raises `InputError` if the process ends."""
        try:
            process = self.process or self._start()
            self._send_message(texts)
            return pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._describe_end() from None

    def _start(self) -> Any:
        # A process inherits the blocked signals, so they cannot strike it while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_THE_TRAINER)
        try:
            # -P: this folder's inspect.py must not hide the standard library's.
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._closed:  # by another thread meanwhile
            self.close()
        self._send_message((self._encode.backend.to_str(), self._encode.first, self._encode.last))
        return self.process

    def _send_message(self, message: Any) -> None:
        pickle.dump(message, self.process.stdin, pickle.HIGHEST_PROTOCOL)
        self.process.stdin.flush()

    def _describe_end(self) -> Exception:
        from nalanda.common.errors import InputError

        code = self.process.wait()
        return InputError(
            f"data.workers: a process that tokenises ended by itself (exit code {code}; -9 may be a lack of "
            "memory); lower data.workers"
        )

    def close(self) -> None:
        self._closed = True
        if self.process:
            self.process.kill()
            self.process.wait()


def _close_all(workers: list[Worker], pool: ThreadPoolExecutor | None, peers: Peers | None) -> None:
    # Lines first, which wakes a thread that waits for a peer; killed processes end the groups under way.
    if peers:
        peers.close()
    if pool:
        pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.close()


class ReadAhead:
    """Runs an iterator in one thread, a few items ahead of the consumer. Errors reach the consumer."""

    def __init__(self, items: Iterator, tokenisers: Tokenisers):
        self._queue: queue.Queue = queue.Queue(READ_AHEAD)
        stop = threading.Event()
        # The thread must not hold `self`: the object would never be collected, and the thread never end.
        thread = threading.Thread(
            target=_fill_queue, args=(items, self._queue, stop), name="nalanda-data", daemon=True
        )
        # Also runs at the interpreter's exit, which a daemon thread inside a tokenizer must not outlive.
        self.close = weakref.finalize(
            self, _stop_thread, thread, self._queue, stop, tokenisers.close
        )
        thread.start()

    def __next__(self):
        item, error = self._queue.get()
        if error:
            raise error
        return item


def _fill_queue(items: Iterator, out: queue.Queue, stop: threading.Event) -> None:
    try:
        for item in items:
            out.put((item, None))
            if stop.is_set():
                return
        out.put((None, StopIteration()))
    except BaseException as error:
        out.put((None, error))


def _stop_thread(
    thread: threading.Thread, out: queue.Queue, stop: threading.Event, close: Callable[[], Any]
) -> None:
    stop.set()
    close()  # wakes a thread that waits for a process
    patience = 500  # a thread whose read from the network never returns is left behind
    while thread.is_alive() and thread is not threading.current_thread() and patience:
        patience -= 1
        with contextlib.suppress(queue.Empty):
            out.get_nowait()  # makes room for a `put` that waits
        thread.join(0.01)


def _serve_requests() -> None:
    """Reads pickled lists of texts on stdin and writes pickled lists of tokens on stdout."""
    from tokenizers import Tokenizer

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps printed text out of the answers
    gone = EOFError, BrokenPipeError, pickle.UnpicklingError  # the trainer has ended
    with contextlib.suppress(*gone):
        backend, first, last = pickle.load(sys.stdin.buffer)
        encode = Encoder(Tokenizer.from_str(backend), first, last)
        while True:
            pickle.dump(encode(pickle.load(sys.stdin.buffer)), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    os._exit(0)  # skips the flush at exit, which could block


if __name__ == "__main__":
    _serve_requests()
