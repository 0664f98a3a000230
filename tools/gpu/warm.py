"""Trainers of a rehearsal: forked from a process that has imported what they need, which takes most of their time.

The first trainer of a part starts as on a card's machine. Meanwhile the process to fork from gets ready.
"""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from gpu.card import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["__main__", "gpu.train", "nalanda_cli", "nalanda.model", "nalanda.train.loop"]
PROGRAM = ["-m", "gpu.train"]


class Forked:
    """A forked trainer, with those methods of a `subprocess.Popen` that are used of it."""

    ready = False
    """Whether the process to fork from was started."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path):
        process = CONTEXT.Process(target=run, args=(arguments, environment, str(log.resolve())))
        process.start()
        self.process, self.terminate, self.kill = process, process.terminate, process.kill

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("gpu.train", timeout or 0.0)
        return self.process.exitcode


def run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Trains in the forked process, with the environment and the log of a started one."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    os.chdir(ROOT)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from gpu import train

    train.main(arguments)


def start(command: list[str], environment: dict[str, str], log: Path) -> Forked | None:
    """Forks a trainer. Returns None for the first one of this process, and for what cannot be forked.

    That is another program, and a trainer in the interpreter, which must be there before any kernel is imported.
    """
    if command[:2] != PROGRAM or "NALANDA_INTERPRET" in environment:
        return None
    first, Forked.ready = not Forked.ready, True
    # Without the interpreter of this process, in which our kernels would serve CPUs.
    with mock.patch.dict(os.environ, environment, clear=True):
        CONTEXT.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    return None if first else Forked(command[2:], environment, log)
