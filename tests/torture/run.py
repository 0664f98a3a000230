"""Kills the trainer, fills its disk, harms its files and its data, and records whether it recovers.

    python tests/torture/run.py [--quick] [--only NAME ...] [--seed N] [--report FILE] [--keep FOLDER]

Trainers are child processes, started through the real command line (paused.py says what is wrapped around
them). Kills are SIGKILLs from this process. A case's docstring says what is done, and then what must hold.
Exit code 1 if that does not hold in any case.
"""

import argparse
import datetime
import inspect
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from training import ENVIRONMENT

os.environ |= ENVIRONMENT

import cases
import torch
from harness import Torn, kill_all
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

REPORT = Path(__file__).parents[1] / "TORTURE.md"


class Line(NamedTuple):
    name: str
    done: str
    holds: str
    measured: str
    seconds: float
    ok: bool


def run_case(case: Callable[[cases.Work], str], work: cases.Work) -> Line:
    began = time.monotonic()
    try:
        measured, ok = case(work), True
    except Torn as error:
        measured, ok = str(error), False
    except Exception:
        measured, ok = traceback.format_exc(limit=-3).strip(), False
    done, _, holds = inspect.cleandoc(case.__doc__ or "").partition("\n\n")
    return Line(
        case.__name__.replace("_", " "), done, holds, measured, time.monotonic() - began, ok
    )


def table(found: list[Line]) -> Table:
    grid = Table(box=box.HORIZONTALS, show_lines=True, title="Torture", title_justify="left")
    grid.add_column("case", style="bold", no_wrap=True)
    for heading in ("what is done", "what must hold", "measured"):
        grid.add_column(heading, ratio=1)
    grid.add_column("s", justify="right")
    grid.add_column("")
    for line in found:
        mark = "[green]ok[/]" if line.ok else "[bold red]FAILED[/]"
        cells = (" ".join(text.split()) for text in (line.done, line.holds, line.measured))
        grid.add_row(line.name, *map(escape, cells), f"{line.seconds:.0f}", mark)
    return grid


def report(found: list[Line], seconds: float, arguments: argparse.Namespace) -> str:
    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|")

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{len(os.sched_getaffinity(0))} CPU cores, {platform.system()}, {versions}"
    options = [f"--seed {arguments.seed}"] * (arguments.seed != 0) + ["--quick"] * arguments.quick
    options += [f"--only {' '.join(arguments.only)}"] if arguments.only else []
    command = " ".join(["python tests/torture/run.py", *options])
    failed = sum(not line.ok for line in found)
    outcome = f"{failed} of {len(found)} FAILED" if failed else f"all {len(found)} hold"
    rows = [
        f"| {line.name} | {' | '.join(map(cell, (line.done, line.holds, line.measured)))} | "
        f"{line.seconds:.0f} | {'ok' if line.ok else '**FAILED**'} |"
        for line in found
    ]
    return "\n".join(
        [
            "# Torture",
            "",
            f"{datetime.date.today()}, {machine}; `{command}`, {seconds / 60:.0f} minutes: {outcome}.",
            "Written by `make torture`. Trainers are child processes. Kills are SIGKILLs from outside.",
            "",
            "| case | what is done | what must hold | measured | s | |",
            "|---|---|---|---|---:|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    known = {case.__name__: case for case in cases.CASES}
    parser.add_argument(
        "--quick", action="store_true", help="a minute's worth; no report unless asked for"
    )
    parser.add_argument(
        "--only", nargs="+", choices=sorted(known), metavar="NAME", help=", ".join(known)
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    parser.add_argument(
        "--report", type=Path, help="where the table goes; tests/TORTURE.md if all ran"
    )
    parser.add_argument(
        "--keep", type=Path, help="work here and leave it; else a folder that is removed"
    )
    arguments = parser.parse_args()
    chosen = [known[name] for name in arguments.only or ()]
    chosen = chosen or list(cases.QUICK if arguments.quick else cases.CASES)
    if arguments.keep:
        shutil.rmtree(arguments.keep, ignore_errors=True)
        arguments.keep.mkdir(parents=True)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="nalanda-torture-"))
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    for variable in [name for name in os.environ if name.startswith(("SLURM_", "NALANDA_"))]:
        del os.environ[variable]  # trainers inherit the rest
    work, began = cases.Work(folder.resolve(), arguments.seed, arguments.quick), time.monotonic()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(arguments.jobs)  # a trainer keeps one core busy
    try:
        under_way = [pool.submit(run_case, case, work) for case in chosen]
        with console.status("torturing …"):
            for done in as_completed(under_way):
                line = done.result()
                mark = "[green]ok[/]    " if line.ok else "[bold red]FAILED[/]"
                said = f"{mark} {line.name}, {line.seconds:.0f} s: {escape(line.measured)}"
                console.print(said, highlight=False)
        found = [done.result() for done in under_way]
    except KeyboardInterrupt:
        kill_all(f"{work.folder}/", end="")
        os._exit(130)  # the threads would start others
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    console.print()
    console.print(table(found))
    ordinary = not (arguments.quick or arguments.only)
    if file := arguments.report or (REPORT if ordinary else None):
        file.write_text(report(found, seconds, arguments))
    return int(not all(line.ok for line in found))


if __name__ == "__main__":
    sys.exit(main())
