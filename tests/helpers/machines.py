"""A run on several machines: processes that share no folder, with a cache each.

They are forked from a process that has imported the trainer, so a start takes a second.
"""

import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from buckets import Buckets
from buckets import environment as keys
from training import ENVIRONMENT, PRETRAIN

URL = "s3://bucket/run"

PATIENCE = 600
"""Seconds that a start may take on a busy machine."""


class Machines:
    """Machines whose folders are below `folder`; the run is in `bucket`."""

    def __init__(self, folder: Path, bucket: Buckets, recipe: Path):
        self.folder, self.bucket, self.recipe = folder, bucket, recipe
        self.starts = 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["machines", "nalanda.train.loop", "s3fs"])

    def cache(self, name: str) -> Path:
        return self.folder / name

    def run(
        self,
        *overrides: str,
        names: str = "AB",
        url: str = URL,
        kill: tuple[int, str, str] | None = None,
        roll_back: int | None = None,
    ) -> str:
        """Starts a process on each machine; returns all that they print.

        names: of the machines, a letter each; rank 0 is on the first.
        kill: (rank, "before" or "after", the pattern of a file's URL). This process kills itself around the upload
            of this file; then the others are killed. Otherwise all must end well.
        roll_back: a step at which the run goes back to its last good checkpoint, once.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.starts += 1
        logs = [self.folder / f"{self.starts}-{name}.log" for name in names]
        group = {
            **ENVIRONMENT,
            **keys(self.bucket.endpoint),
            "ACCELERATE_USE_CPU": "true",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(names)),
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        processes: list[BaseProcess] = []
        for rank, name in enumerate(names):
            own = {**group, "RANK": str(rank), "NALANDA_CACHE": str(self.cache(name))}
            command = [str(self.recipe), f"output_dir={url}", *overrides]
            process = self.context.Process(
                target=work, args=(command, own, logs[rank], kill, roll_back)
            )
            process.start()
            processes.append(process)

        if kill:
            processes[kill[0]].join(PATIENCE)
            assert processes[kill[0]].exitcode is not None, "it has not killed itself"
            for process in processes:
                process.kill()
        for process in processes:
            process.join(PATIENCE)
        printed = "".join(log.read_text() for log in logs)
        codes = [process.exitcode for process in processes]
        expected = [-signal.SIGKILL if kill else 0] * len(names)
        assert codes == expected, f"{codes}\n{printed[-6000:]}"
        return printed


def work(
    command: list[str],
    variables: dict[str, str],
    log: Path,
    kill: tuple[int, str, str] | None,
    roll_back: int | None,
) -> None:
    """recipes/pretrain.py in this process."""
    os.environ |= variables
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # a kill leaves what was printed
    if kill:
        pace()
    if kill and kill[0] == int(variables["RANK"]):
        die_around_upload(*kill[1:])
    if roll_back:
        go_back_once(roll_back)
    sys.argv = [str(PRETRAIN), *command]
    runpy.run_path(str(PRETRAIN), run_name="__main__")


def pace() -> None:
    """Steps of this model are faster than an upload: training waits after each save until the store has it.

    Only so a test knows which steps are there.
    """
    from nalanda.train import mirror
    from nalanda.train.run import Run

    mirror.PAUSE = 0.05
    note_saved = Run.note_saved

    def noted(run: Run) -> None:
        run.saver.wait()
        note_saved(run)
        if run.mirror and isinstance(run.mirror._thread, threading.Thread):
            run.mirror._thread.join()

    Run.note_saved = noted


def go_back_once(number: int) -> None:
    from nalanda.train import loop

    must_roll_back, steps = loop.must_roll_back, [number]

    def asked(run: Any, step: Any, unsound: str | None) -> bool:
        if step.number in steps:
            steps.clear()
            run.at.bad.append("the test asks for it")
            return True
        return must_roll_back(run, step, unsound)

    loop.must_roll_back = asked


def die_around_upload(when: str, pattern: str) -> None:
    from nalanda.train import mirror

    upload = mirror.upload

    def upload_and_die(file: Path, url: str, retries: int) -> None:
        matches = re.search(pattern, url)
        if matches and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        upload(file, url, retries)
        if matches:
            os.kill(os.getpid(), signal.SIGKILL)

    mirror.upload = upload_and_die
