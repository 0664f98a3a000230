"""Counts the bytes that kernels move in Triton's interpreter.

    python -m nalanda_lab.kernels.traffic [--case flagship] [--peer] [--record] [--json FILE]

Each load, store and atomic of a kernel counts its unmasked lanes times the size of an element. There is no
cache: bytes that several programs read count several times. Torch operations around the kernels (an addition,
a copy, a fill) count each operand once. Counts per token and head do not depend on the values, which are
zeros, nor on the number of tokens and heads.
"""

from nalanda_kernels import Unsupported, interpreting

if not interpreting():  # Triton reads the variable when kernels are decorated
    import interpreter as _mended  # noqa: F401  tests/helpers, see this package

import argparse
import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from nalanda_kernels.triton import recurrence
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

from nalanda_lab.kernels.static import (
    Call,
    Card,
    Case,
    check_peer,
    limits,
    ours,
    peer,
    pretend,
    print_wide,
    write_limits,
)

CASES = {
    "deltanet": Case(H=1),
    "gated_deltanet": Case(H=1, gated=True),
    "nala_deltanet": Case(H=1, map="nala"),
    "nala_deltanet 256": Case(H=1, V=256, map="nala"),
    "flagship": Case(H=1, V=256, map="nala", gated=True),
    "kda": Case(H=1, gated=True, channels=True),
    "gated_deltanet2": Case(H=1, gated=True, channels=True, erase=True),
}
TOKENS = 256
PASSES = ("forward", "backward")


# ----------------------------------------------------------------------------------------------- the counter


@dataclass
class Counts:
    """Bytes by kernel; bytes that torch moves are under `torch: ` and the operator's name."""

    loads: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    stores: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def total(self) -> int:
        return sum(self.loads.values()) + sum(self.stores.values())

    def add(self, name: str, loads: int = 0, stores: int = 0) -> None:
        self.loads[name] += loads
        self.stores[name] += stores


_counts = Counts()
_kernel = ""  # the running kernel


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts bytes moved in this context by kernels and torch. Autotuners choose the fewest bytes.

    Blocks are those of a grid that fills the card, so that bytes do not depend on the number of tokens.
    """
    global _counts
    before, _counts, active = _counts, Counts(), driver.active
    driver.set_active(Card("sm_90", _least_bytes))  # pyrefly: ignore
    try:
        with _hooks(), _Torch(), mock.patch.object(recurrence, "processors", return_value=1):
            yield _counts
    finally:
        _counts = before
        driver.set_active(active)


def _least_bytes(launch: Callable, quantiles=None, **options) -> list[float]:
    """An autotuner's benchmark: bytes in place of milliseconds."""
    global _counts
    kept, _counts = _counts, Counts()
    launch()
    moved, _counts = _counts.total, kept
    return [moved] * 3


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    Builder, Grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = Builder.create_masked_load, Builder.create_masked_store, Grid.__call__
    update, exchange, prune = (
        Builder.create_atomic_rmw,
        Builder.create_atomic_cas,
        Autotuner.prune_configs,
    )

    def size(pointers, mask=None) -> int:
        lanes = pointers.data.size if mask is None else np.count_nonzero(mask.data)
        return int(lanes) * max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    # Accesses without a mask, by block pointers or by descriptors also call these two.
    def masked_load(self, pointers, mask, *rest, **options):
        _counts.add(_kernel, loads=size(pointers, mask))
        return load(self, pointers, mask, *rest, **options)

    def masked_store(self, pointers, value, mask, *rest, **options):
        _counts.add(_kernel, stores=size(pointers, mask))
        return store(self, pointers, value, mask, *rest, **options)

    def atomic_update(self, operation, pointers, value, mask, *rest):
        _counts.add(_kernel, size(pointers, mask), size(pointers, mask))
        return update(self, operation, pointers, value, mask, *rest)

    def atomic_exchange(self, pointers, *rest):
        _counts.add(_kernel, size(pointers), size(pointers))
        return exchange(self, pointers, *rest)

    def launch(self, *args, **options):
        global _kernel
        _kernel = self.fn.__name__
        try:
            return call(self, *args, **options)
        finally:
            _kernel = ""

    def distinct(self, options):  # warps and stages do not change the bytes
        return list({str(config.kwargs): config for config in prune(self, options)}.values())

    Builder.create_masked_load, Builder.create_masked_store = masked_load, masked_store
    Builder.create_atomic_rmw, Builder.create_atomic_cas = atomic_update, atomic_exchange  # pyrefly: ignore
    Grid.__call__, Autotuner.prune_configs = launch, distinct  # pyrefly: ignore
    try:
        yield
    finally:
        Builder.create_masked_load, Builder.create_masked_store = load, store
        Builder.create_atomic_rmw, Builder.create_atomic_cas = update, exchange
        Grid.__call__, Autotuner.prune_configs = call, prune


class _Torch(TorchDispatchMode):
    """Counts torch's operators. Views, uninitialised tensors and integer tables move nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name, schema = function.overloadpacket.__name__, function._schema
        view = any(x.alias_info and not x.alias_info.is_write for x in schema.returns)
        if not (_kernel or view or "empty" in name):
            read = args[1:] if name in ("copy_", "fill_", "zero_") else args
            read = () if "_like" in name or name.startswith("new_") else read
            if moved := _bytes(result):
                _counts.add(f"torch: {name}", _bytes(read), moved)
        return result


def _bytes(x) -> int:
    if isinstance(x, Tensor):  # the host makes integer tables once for all layers
        return x.element_size() * x.numel() if x.is_floating_point() else 0
    return sum(map(_bytes, x)) if isinstance(x, (tuple, list)) else 0


# ------------------------------------------------------------------------------------------------- the passes


def count(call: Call, by: int) -> dict[str, dict[str, float]]:
    """Bytes moved by call() and by the backward of its outputs: pass → kernel → bytes / `by`."""
    with counting() as there:
        outputs = call()
    gradients = [torch.zeros_like(x) for x in outputs]
    with counting() as back:
        torch.autograd.backward(outputs, gradients)
    return {
        name: {x: (found.loads[x] + found.stores[x]) / by for x in found.loads}
        for name, found in zip(PASSES, (there, back), strict=True)
    }


def our_count(case: Case, B: int = 1, T: int = TOKENS) -> dict[str, dict[str, float]] | None:
    """Bytes of our kernels, by token and head; None if they do not serve the case."""
    try:
        return count(ours(case, B, T), B * T * case.H)
    except Unsupported:
        return None


def peer_count(case: Case, B: int = 1, T: int = TOKENS) -> dict[str, dict[str, float]]:
    """Bytes of the peer's kernels, with its block sizes for sm_90 and NaLa's map as a pass before them.

    No library has that pass, so its least bytes count, for q and k each: forward reads K and writes 2K,
    backward reads K and 2K and writes K. The L2 norm is the peer's own, also a pass.
    """
    pretend("sm_90")
    found = count(peer(case, B, T), B * T * case.H)
    if case.map is not None:
        width = 2 * case.dtype.itemsize
        found["forward"]["map"] = width * (case.K + case.F)
        found["backward"]["map"] = width * (2 * case.K + case.F)
    return found


def floor(case: Case) -> dict[str, int]:
    """The least bytes: each input read once, each output written once, β and decays in fp32."""
    size, decays = case.dtype.itemsize, case.gated * (case.F if case.channels else 1)
    gates = 4 * (1 + decays) + size * case.erase * (case.F + case.V)
    there = size * (2 * case.K + case.V)
    return {
        "forward": there + size * case.V + gates,
        "backward": 2 * (there + gates) + size * case.V,
    }


def totals(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return {name: sum(kernels.values()) for name, kernels in found.items()}


# -------------------------------------------------------------------------------------------------- the table


def print_traffic(rows: dict[str, dict]) -> None:
    lines = []
    for name, row in rows.items():
        case = CASES[name]
        for part in PASSES:
            mine, theirs = (totals(row[x])[part] if row[x] else None for x in ("ours", "peer"))
            shown = ["–" if x is None else f"{x:,.0f}" for x in (row["floor"][part], mine, theirs)]
            ratio = f"{mine / theirs:.0%}" if mine and theirs else "–"
            lines.append([name, f"{case.K} → {case.F}", str(case.V), part, *shown, ratio])
    header = ["case", "K → features", "V", "pass", "floor", "ours", "peer", "ours / peer"]
    print_wide("bytes by token and head, bf16", header, lines)
    print(
        "both with block sizes for sm_90; peer: flash-linear-attention's kernels, plus the least bytes of a"
    )
    print("pass for NaLa's map (forward K + 2K, backward 2K + 2K, for q and k each)")


def measure(names: list[str], with_peer: bool = False) -> dict[str, dict]:
    """Bytes of the floor, ours and the peer; the peer's from limits.json unless with_peer counts them."""
    recorded = limits().get("peer_traffic", {})
    return {
        name: {
            "floor": floor(CASES[name]),
            "ours": our_count(CASES[name]),
            "peer": peer_count(CASES[name]) if with_peer else recorded.get(name),
        }
        for name in names
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nalanda_lab.kernels.traffic", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--peer", action="store_true", help="count the peer's kernels, too")
    parser.add_argument(
        "--record", action="store_true", help="write the peer's counts to limits.json"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every kernel's bytes to FILE")
    options = parser.parse_args(arguments)
    check_peer(options.peer)
    rows = measure(options.case or list(CASES), options.peer)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.peer and options.record:
        known = limits()
        known.setdefault("peer_traffic", {}).update(
            {name: row["peer"] for name, row in rows.items()}
        )
        write_limits(known)
    print_traffic(rows)


if __name__ == "__main__":
    main()
