"""The processes of one machine hand on the texts that each of them has tokenised.

They are connected by Unix sockets without a file, which end with the process, however it dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import socket
import struct
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nalanda.common.errors import InputError


class Peers:
    """Lines from a process to the others of its machine. `meet` makes them.

    All L processes take the same groups of texts in the same order. Process n % L tokenises group n. It sends
    the tokens when it has taken all groups before, so the process that is furthest behind waits for none in
    front of it. No process gets further ahead than a socket's buffer.
    """

    def __init__(self, rank: int, ranks: list[int], lines: dict[int, socket.socket]):
        """rank: of this process among all; ranks: of those on this machine; lines: to the others of them."""
        self.count, self.turn = len(ranks), ranks.index(rank)
        self._ranks, self._lines = ranks, lines
        self._streams = {other: line.makefile("rb") for other, line in lines.items()}
        self.close = weakref.finalize(self, _close_lines, lines)

    def give(self, result: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """Sends tokens to every other process, and returns them."""
        tokens = result()
        message = pickle.dumps(tokens, pickle.HIGHEST_PROTOCOL)
        for other, line in self._lines.items():
            try:
                line.sendall(message)
            except OSError:
                self._receive_tokens(other)  # raises the error that it left behind
                raise
        return tokens

    def take(self, number: int, texts: int) -> list[np.ndarray]:
        """The tokens of the group `number`, which has so many texts, from the process that tokenised it."""
        other = self._ranks[number % self.count]
        tokens = self._receive_tokens(other)
        if len(tokens) != texts:
            raise InputError(
                f"data.source: process {other} read {len(tokens)} documents where this one read {texts}; its "
                "files must not change, nor differ between processes"
            )
        return tokens

    def fail(self, error: BaseException) -> None:
        """Ends the lines. The others raise `error` when they need this process's next group."""
        if isinstance(error, InputError):
            message = pickle.dumps(error)
            for line in self._lines.values():
                # If its line is full, the other process sees only that the line ends.
                with contextlib.suppress(OSError):
                    line.send(message, socket.MSG_DONTWAIT)
        self.close()

    def _receive_tokens(self, other: int) -> list[np.ndarray]:
        try:
            message = pickle.load(self._streams[other])
        except (EOFError, OSError, pickle.UnpicklingError):
            message = InputError(
                f"data: process {other}, which tokenises a share of the texts, has ended; its own message "
                "says why"
            )
        if isinstance(message, Exception):
            raise message from None
        return message


def _close_lines(lines: dict[int, socket.socket]) -> None:
    for line in lines.values():
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits at either end
        line.close()


def meet(gather: Callable[[list], list]) -> Peers | None:
    """Connects the processes of this machine; None for one alone, or on a system without these sockets.

    All processes of a launch call it. gather: a list of one item → those of all processes, in order of rank.
    """
    # An address that begins with \0 is no file, and goes with the process.
    machine, address = _describe_machine(), f"\0nalanda-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        if machine:
            listener.bind(address)
            listener.listen(128)
        # All gather, also where no socket is possible. Every process listens before any of them connects.
        met = gather([(machine, address)])

        rank = met.index((machine, address))
        ranks = [other for other, (where, _) in enumerate(met) if where == machine]
        if not machine or len(ranks) == 1:
            return None

        # One line for each pair: a process connects to those before it, and accepts those behind it.
        lines: dict[int, socket.socket] = {}
        for other in ranks[: ranks.index(rank)]:
            lines[other] = socket.socket(socket.AF_UNIX)
            lines[other].connect(met[other][1])
            lines[other].sendall(rank.to_bytes(4, "big"))
        while len(lines) < len(ranks) - 1:
            line, _ = listener.accept()
            # The user at the other end, because what comes in is unpickled.
            peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", peer)[1] == os.getuid():
                lines[int.from_bytes(line.recv(4), "big")] = line
            else:
                line.close()
    return Peers(rank, ranks, lines)


def _describe_machine() -> tuple | None:
    """Names the running kernel and its network: a socket without a file connects processes that share both.
    None on other systems than Linux, which lack these sockets."""
    try:
        boot, network = Path("/proc/sys/kernel/random/boot_id"), os.readlink("/proc/self/ns/net")
        return platform.node(), boot.read_text(), network
    except OSError:
        return None
