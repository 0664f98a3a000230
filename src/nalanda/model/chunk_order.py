"""The order in which the chunkwise form computes the chunks of all sequences.

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences. A chunk has
C tokens, a segment R chunks and P = R·HV pairs of a chunk and a head.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call, bounds_of

# Tokens times heads in a segment. On a CPU about as many as the last-level cache holds (5 kB each at K = V =
# 128, 7 kB with decays per key channel): with half as many, calls of torch's operators cost up to a tenth of
# the time, and with four times as many, memory. Elsewhere many, to fill the device within bounded memory.
_CPU_TOKENS = 4096
_DEVICE_TOKENS = 262144


class ChunkOrder:
    """The order of the chunks of all sequences. Step s has chunk s of every sequence that is long enough.

    Sequences are ranked by their number of chunks, longest first. So the chunks of a step follow one another,
    and their states are a prefix of the states. `counts[s]` sequences have a chunk s.
    """

    def __init__(
        self, shape: tuple[int, int], bounds: tuple[int, ...] | None, chunk: int, device, rows: int
    ):
        """shape: (B, T). bounds: of packed sequences. rows: the most chunks in a segment of many steps."""
        batch, length = shape
        self.chunk, self.device = chunk, device
        self.plain = bounds is None and length % chunk == 0
        """Whether the batch is chunks already, so that no token needs an index."""
        self.rank: Tensor | None = None
        """int64 `[N]`, the sequences from the longest to the shortest; None: they are in this order."""

        if self.plain:
            self.sequences = batch
            self.counts = [batch] * (length // chunk)
        else:
            cu_seqlens = (
                torch.arange(batch + 1) * length if bounds is None else torch.tensor(bounds)
            )
            # Without bounds each row is a sequence, whose last chunk has padding.
            self._index_tokens(cu_seqlens)
        self.segments = self._split_steps(rows)

    def _index_tokens(self, cu_seqlens: Tensor) -> None:
        """Sets `token` and `real`, by position of all chunks: the token there, and whether there is one."""
        lengths = cu_seqlens.diff()  # [N]
        longest = int(lengths.max()) if len(lengths) else 0
        chunks = (lengths + self.chunk - 1) // self.chunk
        rank = torch.argsort(chunks, descending=True, stable=True)

        steps = torch.arange(-(-longest // self.chunk))
        active = steps[:, None] < chunks[rank]  # [steps, N]
        # By step, and by rank within a step: the order of the chunks.
        step, order = active.nonzero(as_tuple=True)
        sequence = rank[order]

        start = cu_seqlens[sequence] + step * self.chunk
        token = start[:, None] + torch.arange(self.chunk)  # [chunks, C]
        real = token < cu_seqlens[sequence + 1][:, None]

        self.sequences = len(lengths)
        self.counts = active.sum(1).tolist()
        # Padded positions point at token 0; `Segment.read` sets what it finds there to 0.
        self.token, self.real = token.where(real, 0).flatten(), real.flatten()
        if not torch.equal(rank, torch.arange(len(rank))):
            self.rank = rank.to(self.device)

    def _split_steps(self, rows: int) -> list["Segment"]:
        """Segments of as many steps as have `rows` chunks together, at least one step each."""
        segments = []
        start = first = size = 0
        for step, count in enumerate(self.counts):
            size += count
            last = step + 1 == len(self.counts)
            if last or size + self.counts[step + 1] > rows:
                segments.append(Segment(self, slice(start, step + 1), first))
                start, first, size = step + 1, first + size, 0
        return segments


class Indices(NamedTuple):
    """Flat indices of a segment's positions `[R, heads·group, C]` and of the rows of x as `[B·T·heads, …]`."""

    rows: Tensor  # of x, one a position
    padding: Tensor  # the positions without a token
    real: Tensor  # the other positions
    real_rows: Tensor  # of x, one a real position


class Segment:
    """Consecutive steps that are computed at once; see `ChunkOrder`."""

    def __init__(self, order: ChunkOrder, steps: slice, first: int):
        self.order, self.steps = order, steps
        self.counts = order.counts[steps]
        self.rows = sum(self.counts)  # R

        if not order.plain:
            tokens = slice(first * order.chunk, (first + self.rows) * order.chunk)
            shape = (self.rows, 1, 1, order.chunk)
            self.token, self.real = order.token[tokens].view(shape), order.real[tokens].view(shape)
            self._indices: dict[tuple[int, int], Indices] = {}

    def read(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """[B, T, H, …] → [R·H·group, C, …], each head repeated `group` times; padded positions are 0."""
        if not self.order.plain:
            index = self._index(x.shape[2], group)
            y = x.flatten(0, 2).index_select(0, index.rows).index_fill_(0, index.padding, 0)
            return y.unflatten(0, (-1, self.order.chunk)).to(dtype)

        y = self._by_chunk(x).unsqueeze(3)  # [steps, B, H, 1, C, …]
        y = y.expand(-1, -1, -1, group, *y.shape[4:])  # [·, ·, H, group, C, …]
        # One copy repeats the heads, lays them out by chunk, and casts.
        return torch.empty(y.shape, dtype=dtype, device=y.device).copy_(y).flatten(0, 3)

    def write(self, x: Tensor, y: Tensor, group: int = 1) -> None:
        """Puts [R·H·group, C, …] into x, [B, T, H, …]; the heads of a group are summed."""
        if group > 1:
            y = y.unflatten(0, (-1, group)).sum(1)
        if self.order.plain:
            target = self._by_chunk(x)
            target.copy_(y.view(target.shape))
            return

        index = self._index(x.shape[2], 1)
        y = y.flatten(0, 1).to(x.dtype)  # [R·H·C, …]
        # Padded positions have no row in x.
        if len(index.real) < len(y):
            y = y.index_select(0, index.real)
        x.flatten(0, 2).index_copy_(0, index.real_rows, y)

    def _index(self, heads: int, group: int) -> Indices:
        """Made on the host, so that nothing waits for the device."""
        if (heads, group) not in self._indices:
            head = torch.arange(heads)[:, None, None].expand(-1, group, 1)  # [H, group, 1]
            rows = (self.token * heads + head).flatten()  # from [R, H, group, C]
            real = self.real.expand(-1, heads, group, -1).flatten()
            indices = rows, (~real).nonzero().flatten(), real.nonzero().flatten(), rows[real]
            on_device = (x.to(self.order.device, non_blocking=True) for x in indices)
            self._indices[heads, group] = Indices(*on_device)
        return self._indices[heads, group]

    def _by_chunk(self, x: Tensor) -> Tensor:
        """A view [steps, B, H, C, …] of x [B, T, H, …]."""
        chunks = x.unflatten(1, (-1, self.order.chunk))[:, self.steps]
        return chunks.transpose(0, 1).transpose(2, 3)


def chunk_of(chunk_size: int, lengths: list[int], q: Tensor, v: Tensor) -> int:
    """The tokens of a chunk: at most chunk_size, fewer where that is faster with the same result."""
    longest = max(lengths, default=0)
    chunk = min(chunk_size, _power_of_two(longest))  # no sequence needs more
    if v.device.type != "cpu":
        return chunk

    # On a CPU work within chunks grows with C, between them with 1/C, padding with C.
    chunk = min(chunk, max(32, _power_of_two((q.shape[3] + v.shape[3]) // 4)))
    if min(lengths, default=0) < longest:
        mean = sum(lengths) // len(lengths)
        chunk = min(chunk, max(min(32, _power_of_two(mean)), _power_of_two(mean // 4)))
    return chunk


def _power_of_two(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << max(n - 1, 0).bit_length()


# All layers ask for the same order, in forward and backward.
_order = functools.lru_cache(maxsize=16)(ChunkOrder)


def order_of(call: Call, chunk_size: int) -> ChunkOrder:
    """The order of the chunks of a call."""
    q, v = call.q, call.v
    batch, length, heads, _ = v.shape
    if call.cu_seqlens is None:
        bounds, lengths = None, [length] * batch
    else:
        bounds = bounds_of(call.cu_seqlens, length)
        lengths = [end - start for start, end in itertools.pairwise(bounds)]

    chunk = chunk_of(chunk_size, lengths, q, v)
    tokens = _CPU_TOKENS if v.device.type == "cpu" else _DEVICE_TOKENS
    rows = max(1, tokens // (chunk * heads))
    return _order((batch, length), bounds, chunk, v.device, rows)


def ranked(state: Tensor | None, order: ChunkOrder, target: Tensor) -> Tensor:
    """A working copy of the states [N, HV, K, V], or zeros: [N·HV, K, V] in the order of the chunks.

    target: an empty tensor [N, HV, K, V], which the copy fills.
    """
    if state is None:
        target.zero_()
    else:
        target.copy_(state if order.rank is None else state[order.rank])
    return target.flatten(0, 1)


def unranked(state: Tensor, order: ChunkOrder, heads: int) -> Tensor:
    """The states [N, HV, K, V] in the order of the sequences, from [N·HV, K, V]."""
    state = state.unflatten(0, (order.sequences, heads))
    if order.rank is None:
        return state
    return torch.empty_like(state).index_copy_(0, order.rank, state)
