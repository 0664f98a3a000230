"""Shared by the Triton kernels: where chunks lie, block sizes, schedules, precision of fp32 products."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from nalanda_kernels.tensors import bounds_of

BLOCKS = "NALANDA_BLOCKS"  # a file like blocks.json, written by `nalanda tune`
FUSION = {"enable_fp_fusion": True}
"""The option of every launch: a product and a sum may be one instruction. Triton 3.10 stops doing so by default."""


# ------------------------------------------------------------------------------------- where the chunks lie


class Chunks(NamedTuple):
    """The chunks of all sequences, one after another, as tables on the device for the kernels.

    start: int64 [chunks], each chunk's first token, counted over the whole batch.
    count: int32 [chunks], the tokens from there to the end of the sequence, at least 1.
    bounds: int64 [N + 1], where sequences begin.
    first: int32 [N + 1], each sequence's first chunk.
    longest: the chunks of the longest sequence.
    made_from: the arguments of `chunks_between`.
    parts: None; in a table of segments int32 [N + 1], each sequence's first segment.
    """

    start: Tensor
    count: Tensor
    bounds: Tensor
    first: Tensor
    longest: int
    made_from: tuple
    parts: Tensor | None = None

    @property
    def total(self) -> int:
        return len(self.start)

    @property
    def sequences(self) -> int:
        return len(self.first) - 1

    def tables(self) -> dict[str, Tensor]:
        """The tables, by the names of kernels' arguments."""
        return {
            "start": self.start,
            "count": self.count,
            "bounds": self.bounds,
            "first": self.first,
        }

    def segments(self, length: int) -> "Chunks":
        """The same chunks with segments of `length` chunks as sequences; an empty sequence is a segment."""
        return chunks_between(*self.made_from, segment=length)


def chunks_of(
    shape: tuple[int, int], cu_seqlens: Tensor | None, size: int, device: torch.device
) -> Chunks:
    """The chunks of `size` tokens of a batch [B, T], or of the sequences that `cu_seqlens` bounds.

    Raises ValueError if cu_seqlens does not rise from 0 to T.
    """
    batch, length = shape
    bounds = None if cu_seqlens is None else bounds_of(cu_seqlens, length)
    return chunks_between(batch, length, bounds, size, device)


TAGS = (torch.Tag.cudagraph_unsafe,)
"""Of operators that keep these tables between calls: a graph of `torch.compile` may not own their memory."""


def on_its_device(function: Callable) -> Callable:
    """The function of an operator, run on the device of its first tensor.

    An eager call is there already. A compiled graph has only the operator: a change of the device in the graph
    would keep AOTAutograd from caching it. The backward runs in a thread of its device.
    """

    @functools.wraps(function)
    def run(*args):
        first = next(x for x in tree_leaves(args) if isinstance(x, Tensor))
        with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
            return function(*args)

    return run


@functools.lru_cache(maxsize=32)  # all layers ask for the same one, forward and backward
def chunks_between(
    batch: int,
    length: int,
    bounds: tuple[int, ...] | None,
    size: int,
    device: torch.device,
    segment: int | None = None,
) -> Chunks:
    """`chunks_of` for bounds that have been checked. segment: see `Chunks.segments`."""
    cu = torch.arange(batch + 1) * length if bounds is None else torch.tensor(bounds)
    # Of each chunk, its sequence and its number there; lengths are rounded up to whole chunks.
    first, sequence, step = _number_pieces(-(-cu.diff() // size))
    start = cu[sequence] + step * size  # [chunks]
    # To the sequence's end, so kernels mask the last chunk only.
    count = cu[sequence + 1] - start
    longest, parts = max(first.diff().tolist(), default=0), None

    if segment:  # from here on a sequence is a segment
        parts, sequence, step = _number_pieces((-(-first.diff() // segment)).clamp(min=1))
        # Segments' first tokens and first chunks; the end of all closes both tables.
        cu = torch.cat([cu[sequence] + step * (segment * size), cu[-1:]])
        first = torch.cat([first[sequence] + step * segment, first[-1:]])
        parts = parts.to(device, torch.int32, non_blocking=True)

    tables = start, count.to(torch.int32), cu, first.to(torch.int32)
    on_device = [x.to(device, non_blocking=True) for x in tables]
    return Chunks(*on_device, longest, (batch, length, bounds, size, device), parts)


def _number_pieces(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's pieces begin [N + 1]; of each piece, its sequence and its place in it."""
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sequence = torch.arange(len(counts)).repeat_interleave(counts)
    return first, sequence, torch.arange(len(sequence)) - first[sequence]


# ---------------------------------------------------------------------------------------------- block sizes


Table = dict[str, dict[str, list[dict[str, int]]]]


@functools.cache
def _table() -> Table:
    """The shipped table. The cards of a file in NALANDA_BLOCKS replace those of their name."""
    path = os.environ.get(BLOCKS)
    return _shipped() | _read(path) if path else _shipped()


def _read(path: str) -> Table:
    """A table that a user names. Raises ValueError of one line."""
    try:
        table: Table = json.loads(Path(path).read_text())
        problem = next(_wrong_rows(table), None)
    except OSError as error:
        problem = f"{error.strerror}; name a file that nalanda tune wrote"
    except (ValueError, TypeError, AttributeError, KeyError):
        problem = "no table of block sizes; name a file that nalanda tune wrote"
    if problem:
        raise ValueError(f"{BLOCKS}={path}: {problem}")
    return table


def _wrong_rows(table: Table) -> Iterator[str]:
    """What is wrong with a table's rows."""
    for arch, kernels in table.items():
        for kernel, rows in kernels.items():
            widest = 0  # of the rows so far
            for row in rows if kernel != "backends" else ():
                # A call takes the first row that covers it, so one of fp32 may serve 16 bits too.
                itemsize = 2 if row["features"] > widest else row["itemsize"]
                widest = max(widest, row["features"])
                if reason := known_wrong(kernel, itemsize, row, arch):
                    yield f"{arch}, {kernel}: {reason}"


def known_wrong(kernel: str, itemsize: int, sizes: dict[str, int], arch: str) -> str | None:
    """Why a kernel may not take these sizes, and what to set; None if nothing speaks against them.

    A Hopper card was wrong with them in 16 bits, or ended in an illegal access: tools/gpu/RESULTS.md.
    """
    if arch != "sm_90" or itemsize > 2:
        return None
    warps, width = sizes.get("num_warps"), sizes.get("BV", 64)
    if kernel == "input_gradients" and warps == 4:
        return "4 warps give wrong gradients; set num_warps to 8"
    one_stage = sizes.get("num_stages") == 1
    if kernel in ("states", "state_gradients") and warps == 8 and one_stage and width <= 32:
        return f"8 warps with 1 stage and blocks of {width} columns are wrong; set num_stages to 2"
    return None


@functools.cache
def _shipped() -> Table:
    return json.loads(Path(__file__).with_name("blocks.json").read_text())


@functools.cache
def architecture() -> str:
    """Such as `sm_90`, or `gfx942` on ROCm. Without a card, NALANDA_ARCH or `sm_90`."""
    if not torch.cuda.is_available():
        return os.environ.get("NALANDA_ARCH", "sm_90")
    if torch.version.hip:
        return torch.cuda.get_device_properties().gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def measured_backends() -> list[dict]:
    """Rows of this card's "backends": an op, the call's shape, a sequence's length, the fastest backend."""
    return [dict(row) for row in _table().get(architecture(), {}).get("backends", ())]


def blocks(kernel: str, itemsize: int, features: int, arch: str | None = None) -> dict[str, int]:
    """Block sizes, warps and stages of a kernel, from blocks.json or the file that NALANDA_BLOCKS names.

    Takes the kernel's first row that covers `itemsize` (bytes of an input's element) and `features` (of a
    head). A card without a table takes that of the newest card before it. From sm_120 on that is sm_80's: a
    program there has 99 KB of shared memory, as on sm_86 and sm_89, and sm_100's table needs more.
    """
    return variants(kernel, itemsize, features, arch)[0]


def variants(
    kernel: str, itemsize: int, features: int, arch: str | None = None
) -> list[dict[str, int]]:
    """As `blocks`, with all rows of the same itemsize and features: of them `schedule` chooses one."""
    table, arch = _table(), arch or architecture()
    if arch not in table:
        family = arch.rstrip("0123456789abcdef") if arch.startswith("gfx") else "sm_"
        older = [a for a in table if a.startswith(family) and _arch_number(a) <= _arch_number(arch)]
        small = family == "sm_" and _arch_number(arch) >= 120
        arch = "sm_80" if small else max(older, key=_arch_number, default="sm_80")

    # A card's table may lack a kernel: then its shipped sizes serve, or those of sm_80.
    shipped = _shipped()
    rows = table[arch].get(kernel) or shipped.get(arch, {}).get(kernel) or shipped["sm_80"][kernel]
    for row in rows:
        cover = row["itemsize"], row["features"]
        if itemsize <= cover[0] and features <= cover[1]:
            same = [x for x in rows if (x["itemsize"], x["features"]) == cover]
            return [
                {name: x[name] for name in x if name not in ("itemsize", "features")} for x in same
            ]
    raise ValueError(
        f"{kernel}: no block sizes for {features} features of {itemsize} bytes; add a row"
    )


def _arch_number(arch: str) -> int:
    return int(arch.lstrip("smgfx_"), 16 if arch.startswith("gfx") else 10)


# ------------------------------------------------------------------------------ a sequential pass's schedule

PROCESSORS = {"sm_75": 40, "sm_80": 108, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170}
FULL_WAVE = 1.4
"""The time of a program where every processor runs one, relative to its time alone."""


@functools.cache
def processors() -> int:
    """Multiprocessors of the card; without a card, those of `architecture()`."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties().multi_processor_count
    return PROCESSORS.get(architecture(), 132)


@functools.lru_cache(maxsize=256)
def schedule(
    widths: tuple[int, ...],
    programs: int,
    longest: int,
    chunks: int,
    V: int,
    M: int,
    composing: float | None,
    processors: int,
) -> tuple[int, int]:
    """Which of the block widths a sequential pass takes, and the chunks of a segment, or 0 for no segments.

    It is the choice of the least time, counted in steps. A step is a chunk in a block of 64 columns. With BV
    columns it counts (64 + BV) / 128, as its instructions and bytes do: the part for k and (I + L)⁻¹ stays.
    Programs run in waves, one a processor. Memory feeds 70 % of the processors (an H100 does), so a full wave
    takes 1.4 times the steps of a program. The last wave takes as many as its longest program, or more if over
    70 % run.
    Segments take two passes, the first with M more columns, then `composing` steps for each segment of the
    longest sequence, and 8 for two more launches. They must save a fifth: a count is no measurement.

    programs: sequences times heads. longest: chunks of the longest sequence. chunks: of all sequences and
    heads. composing: None forbids segments. processors: of the card.
    """

    def steps(programs: int, run: int, columns: int, BV: int) -> float:
        tiles = -(-columns // BV)
        # The last wave has at least one program.
        full, rest = divmod(max(programs * tiles, 1) - 1, processors)
        mean = chunks / max(programs, 1)  # chunks of a program
        last = max(run, mean * FULL_WAVE * (rest + 1) / processors)
        return (64 + BV) / 128 * (FULL_WAVE * full * mean + last)

    # (steps, which width, chunks of a segment): first without segments, then with each length.
    # Least of (steps, index, 0): on a tie the first width.
    unsplit = min((steps(programs, longest, V, BV), i, 0) for i, BV in enumerate(widths))
    if composing is None:
        return unsplit[1:]
    split = []
    for length in [4 << i for i in range(longest.bit_length()) if 4 << i < longest]:
        segments = max(programs, chunks // length)
        for i, BV in enumerate(widths):
            # [U, M] over V + M columns, then the outputs over V.
            passes = steps(segments, length, V + M, BV) + steps(segments, length, V, BV)
            cost = passes + composing * -(-longest // length) + 8
            split.append((cost, i, length))

    best = min(split, default=unsplit)
    return best[1:] if best[0] < 0.8 * unsplit[0] else unsplit[1:]


# ------------------------------------------------------------------------------ maps that kernels cannot form


def map_in_torch(q: Tensor, k: Tensor, feature_map, qk_norm: str | None) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k), normed, by the map's own code in fp32, cast once to q's dtype.

    On a GPU the backward recomputes them, because their intermediates need much memory.
    """
    if torch.is_grad_enabled() and q.device.type != "cpu":
        return checkpoint(
            _apply_map, q, k, feature_map, qk_norm, use_reentrant=False, preserve_rng_state=False
        )
    return _apply_map(q, k, feature_map, qk_norm)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """A context without autocast on the device of x. It begins none where none is on: "meta" has none."""
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _apply_map(q: Tensor, k: Tensor, feature_map, qk_norm: str | None) -> tuple[Tensor, Tensor]:
    wide = q.float(), k.float()
    with without_autocast(q):
        phi = wide if feature_map is None else feature_map(*wide)
        if qk_norm == "l2":
            # As the kernels' norm: ε inside the root.
            phi = tuple(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in phi)
    return phi[0].to(q.dtype), phi[1].to(q.dtype)


# ------------------------------------------------------------------------------------------------ precision

# For products of fp32 operands. On NVIDIA's tensor cores three TF32 products have the accuracy of fp32.
PRECISION = "ieee" if torch.version.hip else "tf32x3"


def name_of(dtype: torch.dtype) -> str:
    """Such as "float64", for messages."""
    return str(dtype).removeprefix("torch.")


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two ≥ n and ≥ `least`, by default the least width of a matrix product."""
    return max(least, 1 << max(n - 1, 0).bit_length())
