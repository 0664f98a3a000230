"""Free memory of the host."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS = "/sys/fs/cgroup"


def host() -> int:
    """Bytes of host memory that this process can still allocate."""
    machine = psutil.virtual_memory().available + psutil.swap_memory().free
    return max(0, min([machine, *_limits()]))


def _limits() -> Iterator[int]:
    """Bytes left under the limits of the process and of its control group (a container's or Slurm's)."""
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - psutil.Process().memory_info().vms
    name = ""
    with contextlib.suppress(OSError):
        name = Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    group_of_process = Path(GROUPS, name)
    for group in (group_of_process, *group_of_process.parents):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group or limit
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            cached = dict(line.split() for line in lines)
            # File cache that was not used lately counts as used, but the system gives it up on demand.
            yield limit - used + int(cached["inactive_file"])
