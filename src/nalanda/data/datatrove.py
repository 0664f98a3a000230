"""Prepares a token set as a datatrove pipeline, on one machine, Slurm or Ray.

The launching process writes the plan in the directory, which all machines must see under one name. Task r of
W makes every W-th shard (`Preparation.make`); a last task, after all others, writes the index. Bytes and
records are those of `nalanda data prepare` without an executor, so running it again, with any executor or
number of tasks, resumes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

from nalanda.common.errors import InputError, local_output
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare import PRELOAD, Preparation, alone_in, begin, record_entries

try:
    import multiprocess
    from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise InputError(
        f"datatrove: not installed ({error}); pip install 'nalanda[cluster]'"
    ) from None


class TokenShards(PipelineStep):
    """Task `rank` of `world_size` makes its part of the shards planned in `directory`."""

    name, type = "token shards", "nalanda"

    def __init__(self, directory: str):
        super().__init__()
        self.directory = directory

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Raises `InputError` for the first damaged file of the source, after the other shards are made."""
        preparation = Preparation(self.directory)
        errors = []
        for number in range(rank, len(preparation.jobs), world_size):
            try:
                with self.track_time("shard"):
                    record = preparation.make(number)
                for entry in record_entries(record).values():
                    self.stat_update("documents", value=entry["documents"], unit="shard")
                    self.stat_update("tokens", value=entry["tokens"], unit="shard")
            except InputError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        yield from ()


class TokenIndex(TokenShards):
    """Writes the index of `directory`, after all its shards."""

    name = "index"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        Preparation(self.directory).seal()
        yield from ()


def _executor(kind: Any, directory: str, logs: str | None, shards: dict, index: dict) -> Any:
    """The executor of the index, which runs the executor of the shards first."""

    def step(part: str, task: TokenShards, options: dict) -> Any:
        # The shards' own records say what is done; datatrove's depend on the number of tasks.
        folder = str(Path(logs or f"{directory}-logs") / part)
        return kind([task], logging_dir=folder, skip_completed=False, **options)

    depends = step("shards", TokenShards(directory), shards)
    return step("index", TokenIndex(directory), {"tasks": 1, "depends": depends, **index})


def local(
    directory: str, *, tasks: int, workers: int | None = None, logs: str | None = None
) -> Any:
    """An executor on this machine: `.run()` makes the shards, then the index."""
    cast(Any, multiprocess).set_forkserver_preload(PRELOAD)  # imported once, not by every task
    shards = {"tasks": tasks, "workers": workers or tasks}
    return _executor(LocalPipelineExecutor, directory, logs, shards, {"workers": 1})


def slurm(
    directory: str,
    *,
    tasks: int,
    partition: str,
    time: str,
    workers: int | None = None,
    logs: str | None = None,
    sbatch: dict[str, str] | None = None,
    memory_gb: int = 4,
) -> Any:
    """An executor whose `.run()` submits two jobs to Slurm: an array that makes the shards, and the index.

    Args:
        workers: tasks at a time; None: no limit.
        sbatch: further options of sbatch.
    """
    settings: dict[str, Any] = {
        "time": time,
        "partition": partition,
        "mem_per_cpu_gb": memory_gb,
        "sbatch_args": sbatch or {},
        "qos": "",
        "requeue_signals": None,
    }
    if sys.prefix != sys.base_prefix:
        settings["venv_path"] = os.path.join(sys.prefix, "bin", "activate")
    shards = {"tasks": tasks, "workers": workers or -1, "job_name": "nalanda-shards", **settings}
    index = {"job_name": "nalanda-index", **settings}
    return _executor(SlurmPipelineExecutor, directory, logs, shards, index)


def ray(directory: str, *, tasks: int, workers: int | None = None, logs: str | None = None) -> Any:
    """An executor on the Ray cluster that this process is connected to or finds."""
    shards = {"tasks": tasks, "workers": workers or -1, "mem_per_cpu_gb": 4}
    return _executor(RayPipelineExecutor, directory, logs, shards, {"workers": 1})


def prepare_with(
    executor: str,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    directory: str,
    *,
    tasks: int,
    workers: int | None = None,
    shard_bytes: int | None = None,
    logs: str | None = None,
    slurm: dict[str, Any] | None = None,
) -> None:
    """Plans the work and runs it with "local", "slurm" or "ray". With Slurm it returns once jobs are queued.

    Raises:
        InputError: as in `nalanda.data.prepare.begin`; or the executor does not start.
    """
    if executor not in _BUILD:
        raise InputError(f"executor: {executor!r} is unknown; there are local, slurm and ray")
    options: dict[str, Any] = {"tasks": tasks, "workers": workers, "logs": logs}
    if executor == "slurm":
        wanted = slurm or {}
        if not wanted.get("partition"):
            raise InputError("executor: slurm needs a partition; give --slurm-partition NAME")
        pairs = [text.lstrip("-").partition("=") for text in wanted.get("args", [])]
        options |= {
            "partition": wanted["partition"],
            "time": wanted.get("time", "24:00:00"),
            "sbatch": {name: value for name, _, value in pairs},
        }
    directory = os.path.abspath(local_output(directory, "output"))
    with alone_in(Path(directory)):
        if begin(data, tokenizer, directory, shard_bytes=shard_bytes) is None:
            return
    try:
        _BUILD[executor](directory, **options).run()
    except (ImportError, FileNotFoundError) as error:
        raise InputError(
            f"executor: {executor} does not start here ({error}); install it"
        ) from None


_BUILD = {"local": local, "slurm": slurm, "ray": ray}
