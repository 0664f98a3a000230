"""The order in which the chunkwise form computes the chunks of all sequences.

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences; C tokens a
chunk, R chunks of a segment ("rows"), P = R·HV pairs of a chunk and a head.
"""

import functools
import itertools

import torch
from torch import Tensor

# Tokens per head in a segment. On a CPU about as many as the last-level cache holds (6 kB each at K = V =
# 128, 9 kB with decays per key channel); elsewhere many, to fill the device within bounded memory.
_CPU_TOKENS = 2048
_DEVICE_TOKENS = 262144


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of computations with these tensors, fp32 or float64."""
    return functools.reduce(
        torch.promote_types, (x.dtype for x in tensors if x is not None), torch.float32
    )


def bounds_of(cu_seqlens: Tensor, length: int) -> tuple[int, ...]:
    """The bounds as integers. Raises ValueError if they do not rise from 0 to `length`."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: does not rise from 0 to the {length} tokens; pass cumulative lengths"
        )
    return bounds


class Segment:
    """Consecutive steps that are computed at once; see `ChunkOrder`."""

    def __init__(self, order: "ChunkOrder", steps: slice, first: int):
        self.order, self.steps, self.counts = order, steps, order.counts[steps]
        self.rows = sum(self.counts)
        if not order.plain:
            here = slice(first * order.chunk, (first + self.rows) * order.chunk)
            self.token, self.real = (
                x[here].view(self.rows, 1, 1, order.chunk) for x in (order.token, order.real)
            )
            self._made: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def read(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """[B, T, H, …] → [R·H·group, C, …], each head repeated `group` times; padded positions are 0."""
        if not self.order.plain:
            rows, padding, _, _ = self._places(x.shape[2], group)
            y = x.flatten(0, 2).index_select(0, rows).index_fill_(0, padding, 0)
            return y.unflatten(0, (-1, self.order.chunk)).to(dtype)
        y = self._by_chunk(x).unsqueeze(3)
        y = y.expand(-1, -1, -1, group, *y.shape[4:])  # [·, ·, H, group, C, …]
        return torch.empty(y.shape, dtype=dtype, device=y.device).copy_(y).flatten(0, 3)

    def write(self, x: Tensor, y: Tensor, group: int) -> None:
        """Puts [R·H·group, C, …] into x, [B, T, H, …]; the heads of a group are summed."""
        if group > 1:
            y = y.unflatten(0, (-1, group)).sum(1)
        if self.order.plain:
            into = self._by_chunk(x)
            into.copy_(y.view(into.shape))
        else:
            _, _, real, rows = self._places(x.shape[2])
            y = y.flatten(0, 1).to(x.dtype)
            y = y if len(real) == len(y) else y.index_select(0, real)
            x.flatten(0, 2).index_copy_(0, rows, y)

    def _places(self, heads: int, group: int = 1) -> tuple[Tensor, ...]:
        """The positions [R, heads·group, C] and the rows of x as [B·T·heads, …]. Four flat tensors: each
        position's row; the padded positions; the others; their rows. Made on the host, without waiting."""
        if (heads, group) not in self._made:
            head = torch.arange(heads)[:, None, None].expand(-1, group, 1)
            rows = (self.token * heads + head).flatten()
            real = self.real.expand(-1, heads, group, -1).flatten()
            places = rows, (~real).nonzero().flatten(), real.nonzero().flatten(), rows[real]
            self._made[heads, group] = tuple(
                x.to(self.order.device, non_blocking=True) for x in places
            )
        return self._made[heads, group]

    def _by_chunk(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.order.chunk))[:, self.steps].transpose(0, 1).transpose(2, 3)


class ChunkOrder:
    """The order of the chunks of all sequences. Step s has chunk s of every sequence that is long enough.

    Sequences are ranked by their number of chunks, longest first. So the chunks of a step are a block of
    rows, and their states a prefix of the states. `counts[s]` sequences have a chunk s.
    """

    def __init__(
        self, shape: tuple[int, int], bounds: tuple[int, ...] | None, chunk: int, device, rows: int
    ):
        batch, length = shape
        cu = torch.arange(batch + 1) * length if bounds is None else torch.tensor(bounds)
        lengths = cu.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        self.chunk, self.device, self.sequences, self.rank = chunk, device, len(lengths), None
        self.plain = bounds is None and length % chunk == 0
        if self.plain:
            self.counts = [batch] * (length // chunk)
        else:
            chunks = (lengths + chunk - 1) // chunk
            rank = torch.argsort(chunks, descending=True, stable=True)
            active = torch.arange(-(-longest // chunk))[:, None] < chunks[rank]
            step, place = active.nonzero(as_tuple=True)
            token = (cu[rank[place]] + step * chunk)[:, None] + torch.arange(chunk)
            real = token < cu[rank[place] + 1][:, None]
            self.counts = active.sum(1).tolist()
            self.token, self.real = token.where(real, 0).flatten(), real.flatten()
            if not torch.equal(rank, torch.arange(len(rank))):
                self.rank = rank.to(device)
        self.segments, start, first, size = [], 0, 0, 0
        for step, count in enumerate(self.counts):
            size += count
            if step + 1 == len(self.counts) or size + self.counts[step + 1] > rows:
                self.segments.append(Segment(self, slice(start, step + 1), first))
                start, first, size = step + 1, first + size, 0


def chunk_of(chunk_size: int, lengths: list[int], q: Tensor, v: Tensor) -> int:
    """The tokens of a chunk: at most chunk_size, fewer where that is faster with the same result."""
    longest = max(lengths, default=0)
    chunk = min(chunk_size, _power_of_two(longest))  # no sequence needs more
    if (
        v.device.type == "cpu"
    ):  # work within chunks grows with C, between them with 1/C, padding with C
        chunk = min(chunk, max(32, _power_of_two((q.shape[3] + v.shape[3]) // 4)))
        if min(lengths, default=0) < longest:
            mean = sum(lengths) // len(lengths)
            chunk = min(chunk, max(min(32, _power_of_two(mean)), _power_of_two(mean // 4)))
    return chunk


def _power_of_two(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << max(n - 1, 0).bit_length()


_order = functools.lru_cache(maxsize=16)(
    ChunkOrder
)  # all layers ask for the same one, forward and backward


def order_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> ChunkOrder:
    batch, length, heads, _ = v.shape
    bounds = None if cu_seqlens is None else bounds_of(cu_seqlens, length)
    lengths = [length] * batch if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
    chunk = chunk_of(chunk_size, lengths, q, v)
    tokens = _CPU_TOKENS if v.device.type == "cpu" else _DEVICE_TOKENS
    return _order((batch, length), bounds, chunk, v.device, max(1, tokens // (chunk * heads)))


def ranked(state: Tensor | None, order: ChunkOrder, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A working copy of the states [N, HV, K, V], or zeros: [N·HV, K, V] in the order of the chunks."""
    if state is None:
        return torch.zeros_like(like, dtype=dtype).flatten(0, 1)
    state = state if order.rank is None else state[order.rank]
    return torch.empty_like(like, dtype=dtype).copy_(state).flatten(0, 1)


def unranked(state: Tensor, order: ChunkOrder, heads: int) -> Tensor:
    state = state.unflatten(0, (order.sequences, heads))
    return (
        state if order.rank is None else torch.empty_like(state).index_copy_(0, order.rank, state)
    )
