"""torchrun for schedulers: with the trainer's own exit code, and signals that let it save.

    python recipes/launch.py --nnodes 4 --nproc_per_node 8 … recipes/pretrain.py recipes/demo.yaml

The options are torchrun's, whose own exit code is 1 for every failure. This launcher ends with the code of the
process that failed first, and 128 + signal if a signal killed it. docs/runs.md says what each code means.

A signal goes on to the processes. They save and end, however long that takes, and `--max-restarts` starts none again.

NALANDA_EXIT_CODES names a file that gets the code as a line, unless it is 0. On many nodes the first line is
the cause: a scheduler ends the other nodes.
"""

import contextlib
import os
import signal
import sys
from typing import Any

import psutil

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def hand_on(signum: int, frame: Any) -> None:
    """Sends a signal to the processes, and waits for their end. Only a finished training is left to torchrun."""
    children = [child.pid for child in psutil.Process().children()]
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    codes = []
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            # WNOWAIT: torchrun, too, is to see how they ended.
            codes.append(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status)
    if any(codes) or not codes:
        raise SystemExit(128 + signum)


def launch(arguments: list[str]) -> int:
    """Runs torchrun; returns the exit code."""
    # torchrun takes seconds to import, and a signal may come before.
    for signum in SIGNALS:
        signal.signal(signum, hand_on)
    # Else processes that start again find the addresses of those before: github.com/pytorch/pytorch/issues/167288.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main

        main(["--signals_to_handle", "SIGQUIT", *arguments])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        # Popen's code of a signal is negative.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    code = launch(sys.argv[1:])
    file = os.environ.get("NALANDA_EXIT_CODES")
    if code and file:
        with open(file, "a") as codes:
            codes.write(f"{code}\n")
    sys.exit(code)
