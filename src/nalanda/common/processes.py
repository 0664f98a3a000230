"""Processes that work for another one."""

import os
import threading
from multiprocessing import parent_process


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
