"""Chooses block sizes and backends for this GPU. Runs only on request.

`nalanda tune --json FILE` writes a table like triton/blocks.json, and the fastest backend for
some shapes. Every rank with NALANDA_BLOCKS=FILE reads it.
"""

import contextlib
import copy
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from nalanda_kernels import KERNELS

Rows = list[dict[str, int]]
Table = dict[str, dict[str, Rows]]
Results = list[Tensor]
Job = Callable[[], tuple[float, Results]]  # milliseconds and results

LENGTHS = (2048, 8192, 32768)  # of sequences, for the choice of a backend
# Element's bytes, head's features.
SIZES = ((2, 128), (2, 256), (4, 128), (4, 256), (2, 512), (4, 512))

CHOICES = {
    "BT": (16, 32, 64),
    "BV": (16, 32, 64, 128),
    "BC": (16, 32, 64, 128),
    "BF": (32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}
# Triton's pipeliner refills tiles of this kernel while products read them. A race may spare the calls that are timed.
FIXED = "input_gradients", "num_stages"
GAIN = 0.01  # the least share of the op's time to gain; less is noise
NALA = {
    "name": "nala",
    "angle": "rms",
    "power": 2.0,
    "power_norm": "rms",
    "direction_scale": "sqrt",
}
NALA |= {"query_power": None, "key_power": 2.0}
# ‖Δ‖ / ‖x‖ by bytes of an element: some compilers miscompile some sizes.
TOLERANCE = {2: 2e-2, 4: 1e-3}


def choose(out: str | Path, *, minutes: float) -> None:
    """Times candidate sizes on this GPU, one size of one kernel after another, and writes the best to `out`.

    Backends come first: each installed one is timed beside Triton's kernels. Then block sizes.

    A candidate is kept if forward plus backward get 1 % faster, and all outputs and gradients of the op stay within
    TOLERANCE. Where the chunk's length stays, they stay within a tenth of it. Sizes not reached
    within `minutes` stay unchanged.

    Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("tune: torch sees no GPU; tune on a machine with one")
    from nalanda_kernels.triton import common

    # Else fla hands calls on to FlashQLA, and each is timed twice.
    os.environ.setdefault("FLA_FLASH_QLA", "0")

    out, end = Path(out), time.monotonic() + 60 * minutes
    table: Table = copy.deepcopy(common._table())
    arch = common.architecture()
    # Every size has a row of its own, even where the shipped table has one for several.
    table[arch] = {
        name: spread(name, arch, common.variants)
        for name in {**table["sm_80"], **table.get(arch, {})}
        if name != "backends"
    }
    table[arch]["backends"] = []

    print(f"{torch.cuda.get_device_name()}, {arch}: at most {minutes:g} minutes", flush=True)
    # Kernels read their sizes from this table at each launch, so a changed row takes effect.
    with mock.patch.object(common, "_table", return_value=table):
        for row, message in fastest_backends(backend_jobs(), lambda: time.monotonic() > end):
            print(message, flush=True)
            table[arch]["backends"].append(row)
            # After every change, because a run may be cut off.
            write_blocks(table, out)
        for message in improve(table[arch], jobs, lambda: time.monotonic() > end):
            print(message, flush=True)
            write_blocks(table, out)
    print(f"export NALANDA_BLOCKS={out.resolve()}")


def backend_jobs() -> Iterator[tuple[dict, dict[str, Job]]]:
    """Calls that several installed backends serve, as (the row's keys, backend to job)."""
    from nalanda_kernels import backends_for

    silu = SimpleNamespace(fused={"name": "silu"}, feature_dim=128)
    for op, gated, map in itertools.product(
        ("delta_rule", "linear_attention"), (True, False), (None, silu)
    ):
        backends = backends_for(op, "auto", "cuda")
        # A choice needs two backends.
        for length in LENGTHS if len(backends) > 1 else ():
            row = {
                "op": op,
                "gated": gated,
                "mapped": map is not None,
                "K": 128,
                "V": 128,
                "length": length,
            }
            options = {"gated": gated, "delta": op == "delta_rule", "feature_map": map}
            yield (
                row,
                {
                    name: timed(
                        KERNELS[op][name].load(), torch.bfloat16, 128, 128, length=length, **options
                    )
                    for name in backends
                },
            )


def fastest_backends(
    jobs: Iterable[tuple[dict, dict[str, Job]]], late: Callable[[], bool]
) -> Iterator[tuple[dict, str]]:
    """A row with the fastest backend for each call, and a line about it.

    A backend counts if it serves the call and agrees with the first one, Triton's, within TOLERANCE.
    """
    for row, backends in jobs:
        if late():
            return
        times: dict[str, float] = {}
        expected: Results | None = None
        for name, job in backends.items():
            try:
                ms, results = job()
            except Exception:  # most often it cannot serve the call
                continue
            expected = results if expected is None else expected
            if same(results, expected, TOLERANCE[2]):
                times[name] = ms
        if times:
            best = min(times, key=lambda name: times[name])
            figures = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
            kind = " ".join(
                ["gated" * row["gated"], row["op"], "with a map" * row["mapped"]]
            ).strip()
            yield row | {"backend": best}, f"{kind}, {row['length']} tokens: {figures}"


def spread(kernel: str, arch: str, variants: Callable[..., Rows]) -> Rows:
    """A kernel's rows, apart for each of `SIZES` that it supports, so that each size is tuned on its own."""
    rows = []
    for itemsize, features in sorted(SIZES):
        with contextlib.suppress(ValueError):
            for sizes in variants(kernel, itemsize, features, arch):
                rows.append({"itemsize": itemsize, "features": features, **sizes})
    return rows


def improve(
    kernels: dict[str, Rows], jobs_of: Callable[[int, int], list[Job]], late: Callable[[], bool]
) -> Iterator[str]:
    """Changes the rows in place. Yields a line for each change, and one if time runs out. Takes no sizes that are
    known to be wrong.

    jobs_of: for an element's bytes and a head's features, the calls that use such rows.
    """
    from nalanda_kernels.triton.common import architecture, known_wrong

    arch = architecture()
    # All other sizes depend on the chunk's length.
    order = sorted(kernels, key=lambda name: name != "chunk")
    for itemsize, features in SIZES:
        where = f"{features} features of {itemsize} bytes"
        rows = [
            (name, row)
            for name in order
            for row in kernels[name]
            if key(row) == (itemsize, features)
        ]

        try:
            jobs = jobs_of(itemsize, features)
            # Time and results of the sizes so far are what a candidate must keep.
            best, expected = total(jobs)
        except Exception as error:
            yield f"{where}: {type(error).__name__}: {error}".splitlines()[0]
            continue
        yield f"{where}: {best:.3f} ms"

        # One size of one kernel after another; a size stays where no other is faster.
        for name, row in rows:
            for size in [size for size in CHOICES if size in row and (name, size) != FIXED]:
                chosen = row[size]
                # Another chunk rounds otherwise. Other sizes do not: with 3 stages an H100 was off by 6e-3.
                tolerance = TOLERANCE[itemsize] / (1 if size == "BT" else 10)
                for choice in CHOICES[size]:
                    if late():
                        row[size] = chosen
                        yield f"out of time at {name}, {where}"
                        return

                    row[size] = choice
                    if known_wrong(name, itemsize, row, arch):
                        continue
                    try:
                        ms, results = total(jobs) if choice != chosen else (best, expected)
                    except Exception:  # most often too much shared memory
                        continue

                    if ms < (1 - GAIN) * best and same(results, expected, tolerance):
                        best, chosen = ms, choice
                        expected = results if size == "BT" else expected
                        yield f"  {name} {size}={choice}: {ms:.3f} ms"
                row[size] = chosen


def key(row: dict[str, int]) -> tuple[int | None, int | None]:
    return row.get("itemsize"), row.get("features")  # rows of "backends" have neither


def jobs(itemsize: int, features: int) -> list[Job]:
    """The gated delta rule on given features, in many rows and in few long ones, which take narrower blocks,
    and with decays per key channel. At 256 features also with NaLa's map of 128.
    """
    from nalanda_kernels.triton.recurrence import delta_rule

    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    # Maps double the features, not the values.
    V = min(features, 256)
    calls = [
        timed(delta_rule, dtype, features, V),
        timed(delta_rule, dtype, features, V, length=8192),
    ]
    calls.append(timed(delta_rule, dtype, features, V, channels=True))
    if features == 256:
        calls.append(timed(delta_rule, dtype, 128, V, feature_map=SimpleNamespace(fused=NALA)))
    return calls


def timed(
    op: Callable,
    dtype: torch.dtype,
    K: int,
    V: int,
    *,
    length: int = 2048,
    gated: bool = True,
    delta: bool = True,
    channels: bool = False,
    **options,
) -> Job:
    """Forward and backward of 16 384 tokens or more and six heads; inputs exceed the last-level cache."""
    B, T, H = max(1, 16384 // length), length, 6
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    # q and k [B, T, H, K], v [B, T, H, V].
    inputs = [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)]
    inputs = [x.to(dtype) for x in inputs]
    gates = [normal(B, T, H).sigmoid()] if delta else []
    # By channel [B, T, H, K] or by head [B, T, H].
    decays = normal(B, T, H, K) if channels else normal(B, T, H)
    # Log-decays, most of them weak.
    gates += [torch.nn.functional.logsigmoid(decays + 3)] if gated else []

    leaves = [x.requires_grad_() for x in inputs + gates]
    d_o = normal(B, T, H, V).to(dtype)

    def call() -> Results:
        o = op(*leaves, qk_norm="l2", **options)[0]
        return [o.detach(), *torch.autograd.grad(o, leaves, d_o)]

    def job() -> tuple[float, Results]:
        results = call()  # compiles
        # The second call finds all caches warm.
        call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(12)]
        for start, stop in events:
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events), results

    return job


def total(jobs: list[Job]) -> tuple[float, Results]:
    done = [job() for job in jobs]
    return sum(ms for ms, _ in done), [x for _, results in done for x in results]


def same(results: Results, expected: Results, tolerance: float) -> bool:
    return all(
        bool((a.float() - b.float()).norm() <= tolerance * b.float().norm())
        for a, b in zip(results, expected, strict=True)
    )


def write_blocks(table: Table, out: Path) -> None:
    """Writes one row per line, as in blocks.json. Readers see the old file or the new one, never a part."""
    lines = []
    for arch, kernels in table.items():
        rows = [
            f'    "{name}": [\n      ' + ",\n      ".join(map(json.dumps, some)) + "\n    ]"
            for name, some in kernels.items()
        ]
        lines.append(f'  "{arch}": {{\n' + ",\n".join(rows) + "\n  }")
    # Written beside, then renamed: that is atomic within a folder.
    beside = out.with_name(out.name + ".new")
    beside.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    beside.replace(out)
