"""How the runs of a study are carried out: options of `nalanda compare` beside the study itself."""

import re
import shlex
import sys
from dataclasses import dataclass

from nalanda.common.errors import InputError


@dataclass(frozen=True)
class Execution:
    """Workers, share and launcher of the runs. None of them changes what a study is."""

    workers: int = 1
    """Runs at a time. On a CPU they share its cores, else the GPUs."""
    shard: str | None = None
    """I/N: this command makes the I-th of N shares of the runs; the folder is shared, or in a store."""
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
