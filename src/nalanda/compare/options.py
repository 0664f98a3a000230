"""Options of `nalanda compare`: what a study is, and how its runs are carried out."""

import re
import shlex
import sys
from dataclasses import dataclass

from nalanda.common.errors import InputError


@dataclass(frozen=True)
class StudyOptions:
    """A study beside a recipe; a study file has the same as keys. None: its default there."""

    arms: list[str] | None = None
    """An arm, and its settings beside the recipe's."""
    seeds: int | None = None
    """Runs of each arm; default 3."""
    rates: str | None = None
    """Learning rates, with commas, to choose each arm's from."""
    rate_seeds: int | None = None
    """Runs of each rate, on other seeds; default 1."""
    margin: float | None = None
    """Difference that matters, in bits a byte; default 0.01."""
    equal: str | None = None
    """Figure to make equal by --by: parameters, flops (a token) or state."""
    by: str | None = None
    """Key to fit, such as model.intermediate_size."""
    fork_at: float | None = None
    """Share of the steps after which the other arms leave the first arm's run."""
    tasks: str | None = None
    """Tasks of `nalanda eval`, with commas, on which the models are compared too."""


@dataclass(frozen=True)
class Execution:
    """Workers, share and launcher of the runs. None of them changes what a study is."""

    workers: int = 1
    """Runs at a time. On a CPU they share its cores, else the GPUs."""
    shard: str | None = None
    """Share I/N: this command makes the I-th of N parts of the runs; the folder is shared, or in a store."""
    launch: str | None = None
    """Launcher of each run, such as "accelerate launch --num_processes 2"."""

    def share(self) -> tuple[int, int]:
        """The number of this share, from 0, and of all. Raises `InputError`."""
        if self.shard is None:
            return 0, 1
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise InputError(f"--shard {self.shard}: expected I/N, such as 1/2")
        return int(match[1]) - 1, int(match[2])

    def launcher(self) -> list[str]:
        """The words before `-m nalanda_cli train`. Raises `InputError`."""
        try:
            return shlex.split(self.launch) if self.launch else [sys.executable]
        except ValueError as error:
            raise InputError(f"--launch {self.launch}: {error}") from None
