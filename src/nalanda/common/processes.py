"""Processes of a launch, those that work for another one, and the memory of this one."""

import os
import sys
import threading
from multiprocessing import parent_process


def local_processes(alone: int = 1) -> int:
    """Processes of the launch on this machine; `alone` without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", alone))


def end_with_parent() -> None:
    """Lets this process end as soon as the one that started it does, even by SIGKILL.

    Otherwise the workers of a killed pool finish their jobs, writing beside those of the command that
    resumes, and then wait for ever.
    """
    parent = parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def peak_resident() -> int | None:
    """The most bytes of host memory that this process held at a time; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
