"""Sweeps over runs: finished ones are read from their files, the others are run in processes."""

import json
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from nalanda.common.files import write_atomically
from nalanda.common.processes import end_with_parent
from nalanda.common.progress import Progress
from nalanda.common.text import digest
from nalanda_lab.track import torch_threads

Record = dict[str, Any]
"""Results of a run; its `settings` determine them, and are its key."""
Jobs = Mapping[str, Callable[[], Record]]
"""Runs by `key` of the settings in their future records. Each must be picklable."""


def key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def follow(jobs: Jobs, folder: Path, workers: int, tell: Callable[[Record], str]) -> list[Record]:
    """The jobs' records, a file each in the folder. Runs that have none are trained, with a progress bar.

    A run that is killed leaves no file, and is trained again.
    """
    files = {name: folder / f"{digest(name)}.json" for name in jobs}
    todo = [job for name, job in jobs.items() if not files[name].is_file()]
    folder.mkdir(parents=True, exist_ok=True)
    done = len(jobs) - len(todo)
    with Progress("training", len(jobs), "runs", start=done, stream=sys.stdout) as progress:
        for record in trained(todo, workers):
            write_atomically(files[key(record["settings"])], json.dumps(record) + "\n")
            done += 1
            progress.to(done, tell(record), end=True)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files.values()]


def trained(jobs: Sequence[Callable[[], Record]], workers: int) -> Generator[Record]:
    """Records in the order in which the runs end. Each run has one thread, in this process or its own."""
    torch.set_flush_denormal(True)
    if min(workers, len(jobs)) < 2:
        with torch_threads(1):
            for job in jobs:
                yield job()
        return
    context = get_context("spawn")  # a fork would inherit torch's threads
    with ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_begin_worker) as pool:
        # Child processes inherit the ignored signal: an interrupt while they load prints no tracebacks.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            futures = [pool.submit(job) for job in jobs]
        finally:
            signal.signal(signal.SIGINT, before)
        try:
            for done in as_completed(futures):
                yield done.result()
        except BaseException:
            for child in active_children():
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # only the parent reports an interrupt,
    warnings.simplefilter("ignore")  # and warnings of feature maps
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
