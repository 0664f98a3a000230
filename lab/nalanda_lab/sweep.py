"""Sweeps over runs: finished ones are read from a file of records, the others are run in processes."""

import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nalanda.common.files import alone
from nalanda.common.processes import end_with_parent
from nalanda.common.progress import Progress
from nalanda.train.log import read_metrics

Record = dict[str, Any]
"""Results of a run; its `settings` determine them, and are its key."""
Jobs = Mapping[str, Callable[[], Record]]
"""Runs by `key` of the settings in their future records. Each must be picklable."""


def key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def records(file: Path) -> dict[str, Record]:
    """The records of a file by key; {} without a file. A torn line of a killed run is skipped."""
    return {key(record["settings"]): record for record in (read_metrics(file))}


def sweep(jobs: Jobs, file: Path, workers: int) -> Iterator[Record]:
    """The jobs' records: first those in the file, then the others as their runs end.

    Each finished run appends a line to the file, which others may read meanwhile. A killed run leaves no line
    and is run again. Raises `InputError` while another command appends to the file.
    """
    finished = records(file)
    yield from (finished[name] for name in jobs if name in finished)
    todo = [job for name, job in jobs.items() if name not in finished]
    if not todo:
        return
    with appended(file) as stream, contextlib.closing(trained(todo, workers)) as new:
        for record in new:
            stream.write(json.dumps(record).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
            yield record


@contextlib.contextmanager
def appended(file: Path) -> Iterator[BinaryIO]:
    """The file, open at its end, where a new line begins. One process at a time has it."""
    taken = f"{file}: another command adds its runs there; wait for its end, or take another folder"
    file.parent.mkdir(parents=True, exist_ok=True)
    with alone(file.with_name(f".{file.name}.lock"), taken), file.open("a+b") as stream:
        stream.seek(0)
        if last := stream.read().rpartition(b"\n")[2]:
            try:
                json.loads(last)
                stream.write(b"\n")
            except ValueError:  # a kill has torn it
                stream.truncate(stream.tell() - len(last))
        yield stream


def trained(jobs: list[Callable[[], Record]], workers: int) -> Generator[Record]:
    """Records in the order in which the runs end. Each run has one thread, in this process or its own."""
    torch.set_flush_denormal(True)
    if min(workers, len(jobs)) < 2:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in jobs:
                yield job()
        finally:
            torch.set_num_threads(threads)
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


def follow(jobs: Jobs, file: Path, workers: int, tell: Callable[[Record], str]) -> list[Record]:
    """The records of `sweep`, with a progress bar; without a terminal, with a line for each run."""
    ended: list[Record] = []
    finished = len(records(file).keys() & jobs.keys())
    with Progress("training", len(jobs), "runs", start=finished, stream=sys.stdout) as progress:
        for record in sweep(jobs, file, workers):
            ended.append(record)
            progress.to(len(ended), tell(record), end=True)
    return ended
