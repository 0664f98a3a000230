"""Prepares the token set of a recipe with datatrove, on this machine or on a Slurm cluster.

    python examples/datatrove/prepare.py RECIPE OUTPUT [SECTION.KEY=VALUE]... --tasks 64 --partition cpu

1. This process plans the shards and writes the plan into OUTPUT, which all machines must see under one name.
2. Task r of W makes every W-th shard.
3. A last task, after all others, writes the index.

The set has the bytes of `nalanda data prepare`. The shards' own records say what is done, so the same command
resumes, also with another number of tasks.

Slurm's tasks get the two steps pickled, without this file: each `run` imports its names itself.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from nalanda.config.load import load_config
from nalanda.data.prepare import alone_in, begin


class MakeShards(PipelineStep):
    """Makes the shards `rank`, `rank + world_size`, … of the plan in `directory`."""

    name, type = "token shards", "nalanda"

    def __init__(self, directory: str):
        super().__init__()
        self.directory = directory

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Raises `InputError` for the first damaged file of the source, after the other shards are made."""
        from nalanda.common.errors import InputError
        from nalanda.data.prepare_run import Preparation, record_entries

        preparation = Preparation(self.directory)
        errors = []

        for number in range(rank, len(preparation.jobs), world_size):
            try:
                with self.track_time("shard"):
                    record = preparation.make(number)
            except InputError as error:
                errors.append(error)
                continue

            for entry in record_entries(record).values():
                self.stat_update("documents", value=entry["documents"], unit="shard")
                self.stat_update("tokens", value=entry["tokens"], unit="shard")

        if errors:
            raise errors[0]
        yield from ()


class WriteIndex(PipelineStep):
    """Writes the index of the set in `directory`, whose shards are all made."""

    name, type = "index", "nalanda"

    def __init__(self, directory: str):
        super().__init__()
        self.directory = directory

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        from nalanda.data.prepare_run import Preparation

        Preparation(self.directory).seal()
        yield from ()


def slurm_options(partition: str, time: str, sbatch: list[str]) -> dict[str, Any]:
    """Options of both jobs. sbatch: further options of sbatch, as NAME=VALUE."""
    options: dict[str, Any] = {
        "partition": partition,
        "time": time,
        "mem_per_cpu_gb": 4,
        "sbatch_args": dict(option.lstrip("-").split("=", 1) for option in sbatch),
        "qos": "",
        "requeue_signals": None,
    }
    if sys.prefix != sys.base_prefix:  # a virtual environment
        options["venv_path"] = os.path.join(sys.prefix, "bin", "activate")
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", help="its data and tokenizer are taken")
    parser.add_argument("output", help="directory for the prepared set")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--tasks", type=int, default=1, help="tasks, which share the shards")
    parser.add_argument("--workers", type=int, default=-1, help="tasks at a time; default: all")
    parser.add_argument("--logs", help="directory for datatrove's logs; default: OUTPUT-logs")
    parser.add_argument("--shard-mb", type=int, help="MiB of input per shard")
    parser.add_argument("--partition", help="Slurm partition; default: work on this machine")
    parser.add_argument("--time", default="24:00:00", help="Slurm's time limit of a task")
    parser.add_argument("--sbatch", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()

    recipe = load_config(arguments.recipe, arguments.overrides)
    directory = os.path.abspath(arguments.output)
    shard_bytes = arguments.shard_mb and arguments.shard_mb << 20
    with alone_in(Path(directory)):
        plan = begin(recipe.data, recipe.tokenizer, directory, shard_bytes=shard_bytes, say=print)
    if plan is None:
        print(f"{directory}: prepared already, with these settings")
        return

    logs = Path(arguments.logs or f"{directory}-logs")
    shards: dict[str, Any] = {"tasks": arguments.tasks, "workers": arguments.workers}
    index: dict[str, Any] = {"tasks": 1}
    executor: Any = LocalPipelineExecutor
    if arguments.partition:
        executor = SlurmPipelineExecutor
        options = slurm_options(arguments.partition, arguments.time, arguments.sbatch)
        shards |= {"job_name": "nalanda-shards", **options}
        index |= {"job_name": "nalanda-index", **options}

    # skip_completed: datatrove's own records depend on the number of tasks, the shards' do not.
    make_shards = executor(
        [MakeShards(directory)], logging_dir=str(logs / "shards"), skip_completed=False, **shards
    )
    write_index = executor(
        [WriteIndex(directory)],
        logging_dir=str(logs / "index"),
        skip_completed=False,
        depends=make_shards,
        **index,
    )
    write_index.run()  # runs what it depends on first


if __name__ == "__main__":
    main()
