"""What the Triton kernels share: where chunks lie, block sizes, and the precision of fp32 products."""

import functools
import itertools
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCKS = "NALANDA_BLOCKS"  # names a file like blocks.json, as `nalanda bench kernels --tune` writes it


# ------------------------------------------------------------------------------------- where the chunks lie


def bounds_of(cu_seqlens: Tensor, length: int) -> tuple[int, ...]:
    """The bounds as integers. Raises ValueError where they do not rise from 0 to `length`."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to the {length} tokens of the row")
    return bounds


class Chunks(NamedTuple):
    """The chunks of all sequences in a row, on the device: every kernel finds its tokens by these.

    start: int64 [chunks], the first token of each, counted over the whole batch.
    count: int32 [chunks], its tokens and all that follow in its sequence: at least 1.
    bounds: int64 [N + 1], where sequences begin.
    first: int32 [N + 1], each sequence's first chunk.
    """

    start: Tensor
    count: Tensor
    bounds: Tensor
    first: Tensor

    @property
    def total(self) -> int:
        return len(self.start)

    @property
    def sequences(self) -> int:
        return len(self.first) - 1


def chunks_of(shape: tuple[int, int], cu_seqlens: Tensor | None, size: int, device: torch.device) -> Chunks:
    """The chunks of `size` tokens of a batch [B, T], or of the sequences that `cu_seqlens` bounds.

    Raises ValueError where these do not rise from 0 to T.
    """
    batch, length = shape
    bounds = None if cu_seqlens is None else bounds_of(cu_seqlens, length)
    return chunks_between(batch, length, bounds, size, device)


@functools.lru_cache(maxsize=32)  # every layer asks for the same, forward and backward
def chunks_between(
    batch: int, length: int, bounds: tuple[int, ...] | None, size: int, device: torch.device
) -> Chunks:
    """`chunks_of`, for bounds that are known to rise from 0 to `length`."""
    cu = torch.arange(batch + 1) * length if bounds is None else torch.tensor(bounds)
    lengths = cu.diff()
    first = torch.cat([torch.zeros(1, dtype=torch.int64), ((lengths + size - 1) // size).cumsum(0)])
    sequence = torch.arange(len(lengths)).repeat_interleave(first.diff())
    step = torch.arange(len(sequence)) - first[sequence]
    start = cu[sequence] + step * size
    count = cu[sequence + 1] - start
    tables = start, count.to(torch.int32), cu, first.to(torch.int32)
    return Chunks(*(x.to(device, non_blocking=True) for x in tables))


# ---------------------------------------------------------------------------------------------- block sizes


@functools.cache
def _table() -> dict[str, dict[str, list[dict[str, int]]]]:
    path = Path(os.environ.get(BLOCKS) or Path(__file__).with_name("blocks.json"))
    return json.loads(path.read_text())


@functools.cache
def architecture() -> str:
    """`sm_90` and the like; `gfx942` on ROCm; `sm_90` where there is no card, which compiles for that."""
    if not torch.cuda.is_available():
        return os.environ.get("NALANDA_ARCH", "sm_90")
    if torch.version.hip:
        return torch.cuda.get_device_properties().gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def blocks(kernel: str, itemsize: int, features: int, arch: str | None = None) -> dict[str, int]:
    """Block sizes, warps and stages of a kernel, from the table that ships or the file NALANDA_BLOCKS names.

    The first row of the kernel that reaches `itemsize` (bytes of an input's element) and `features` (a
    head's); of a card that has no table of its own, the newest one before it.
    """
    table, arch = _table(), arch or architecture()
    if arch not in table:
        family = arch.rstrip("0123456789abcdef") if arch.startswith("gfx") else "sm_"
        older = [a for a in table if a.startswith(family) and _number(a) <= _number(arch)]
        arch = max(older, key=_number, default="sm_80")
    for row in table[arch].get(kernel, table["sm_80"][kernel]):
        if itemsize <= row["itemsize"] and features <= row["features"]:
            return {name: x for name, x in row.items() if name not in ("itemsize", "features")}
    raise ValueError(f"{kernel} has no blocks for {features} features of {itemsize} bytes")


def _number(arch: str) -> int:
    return int(arch.lstrip("smgfx_"), 16 if arch.startswith("gfx") else 10)


# --------------------------------------------------------------------------------- maps that no kernel forms


def map_in_torch(q: Tensor, k: Tensor, feature_map, qk_norm: str | None) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k), normed, by the map's own code, in fp32 with one cast to the dtype of q.

    Computed again in the backward, because what it would keep is much.
    """
    if torch.is_grad_enabled() and q.device.type != "cpu":
        return checkpoint(_map, q, k, feature_map, qk_norm, use_reentrant=False, preserve_rng_state=False)
    return _map(q, k, feature_map, qk_norm)


def _map(q: Tensor, k: Tensor, feature_map, qk_norm: str | None) -> tuple[Tensor, Tensor]:
    wide = q.float(), k.float()
    phi = wide if feature_map is None else feature_map(*wide)
    if qk_norm == "l2":
        phi = tuple(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in phi)
    return phi[0].to(q.dtype), phi[1].to(q.dtype)


# ------------------------------------------------------------------------------------------------ precision

# Of products of fp32 operands: three TF32 products have fp32's accuracy on NVIDIA's tensor cores.
PRECISION = "ieee" if torch.version.hip else "tf32x3"


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest one that is at least n, and wide enough for a matrix product."""
    return max(least, 1 << max(n - 1, 0).bit_length())
