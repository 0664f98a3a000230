"""Prints our Python frames from an op's public function to its first kernel launch.

    python -m nalanda_lab.kernels.frames

The calls run on CPU tensors in Triton's interpreter, with launches that do nothing.
"""

import interpreter  # noqa: F401  # isort: skip  (before any kernel)
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import nalanda_kernels
from triton.runtime.interpreter import GridExecutor

from nalanda.model import kernels, ops
from nalanda_lab.kernels import static

BEGINNINGS = Path(ops.__file__), Path(kernels.__file__)
"""Files of the ops' functions, and of the way to a kernel."""
ROOTS = BEGINNINGS[0].parents[1], Path(nalanda_kernels.__file__).parent


def frames(call: Callable) -> list[str]:
    """`file:line function` of our frames at the first launch of `call`, from the op's function inwards."""
    found: list[str] = []

    def launch(*args, **options):
        for frame in [] if found else traceback.extract_stack():
            path = Path(frame.filename)
            if path in BEGINNINGS or (found and any(root in path.parents for root in ROOTS)):
                found.append(f"{path.parent.name}/{path.name}:{frame.lineno} {frame.name}")

    with mock.patch.object(GridExecutor, "__call__", launch):
        call()
    return found


def calls() -> dict[str, Callable]:
    """One call of each op, by name."""
    q, k, v, beta, g = static.tensors(static.Case("", 16, 16, 1), 1, 16, 16)
    step = partial(kernels.by_kernel, "step", "triton", q)
    token = static.Case("step", 16, 16, 1, gated=True, norm="l2")
    return {
        "delta_rule": lambda: ops.delta_rule(q, k, v, beta, backend="triton"),
        "gated delta_rule": lambda: ops.delta_rule(q, k, v, beta, g, backend="triton"),
        "linear_attention": lambda: ops.linear_attention(q, k, v, backend="triton"),
        "step": lambda: static._step(step, token, 1),
    }


if __name__ == "__main__":
    for name, call in calls().items():
        found = frames(call)
        files = {x.partition(":")[0] for x in found}
        print(f"{name}: {len(found)} frames, {len(files)} files", *found, sep="\n    ")
