"""Runs that are trained once: records in a file of lines, and processes for those that it does not have."""

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nalanda.common.files import write_atomically
from nalanda.train.log import read_metrics

Record = dict[str, Any]
"""What a run gave; `settings` is what it follows from, and its key."""


Jobs = Mapping[str, Callable[[], Record]]
"""Runs by `key` of the settings that their records will have; other processes must be able to unpickle
them."""


def key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def records(file: Path) -> dict[str, Record]:
    """The records of a file by key, none where there is no file; a line that a killed run tore is none."""
    return {key(record["settings"]): record for record in (read_metrics(file) if file.is_file() else ())}


def sweep(jobs: Jobs, file: Path, workers: int) -> Iterator[Record]:
    """The jobs' records: those that the file has, then the others as their runs end.

    A finished run is a line of the file; one that was killed leaves none, and is run again.
    """
    known = records(file)
    yield from (known[name] for name in jobs if name in known)
    todo = [job for name, job in jobs.items() if name not in known]
    if not todo:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(record) + "\n" for record in known.values()))  # no torn line
    with file.open("a", encoding="utf-8") as stream, contextlib.closing(trained(todo, workers)) as new:
        for record in new:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
            yield record


def trained(jobs: list[Callable[[], Record]], workers: int) -> Generator[Record]:
    """Records in the order in which runs end; each runs on one thread, here or in a process of its own."""
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
        # Processes inherit what is ignored: an interrupt while they load must not give a traceback from each.
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted grid is said once, by the parent,
    warnings.simplefilter("ignore")  # and so is what a map warns of
    torch.set_num_threads(1)


def follow(
    jobs: Jobs, file: Path, workers: int, console: Console, tell: Callable[[Record], str]
) -> list[Record]:
    """The records of `sweep`, behind a progress bar; without a terminal, a line for each run."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{len(jobs)} runs", total=len(jobs))
        for record in sweep(jobs, file, workers):
            found.append(record)
            progress.update(bar, advance=1, description=tell(record))
            if not console.is_terminal:
                print(f"{len(found)}/{len(jobs)}  {tell(record)}", flush=True)
    return found
