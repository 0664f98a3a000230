"""Packed and padded batches: which tokens form a sequence, and which states pass from row to row."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Where a packed batch's rows lie among its N sequences, for states that cross from row to row.

    On the host: `first` and `last`, int64 `[B]`, each row's outermost sequences; `carried`, bool `[B]`,
    whether its first one goes on with what an earlier call ended in.
    """

    first: Tensor
    last: Tensor
    carried: Tensor


class Sequences:
    """What a batch's mixers must know of it, made once by the decoder; no mixer sees a mask.

    `cu_seqlens` None: the batch is `[B, T]` dense. Otherwise it is `[1, ΣT]` and `cu_seqlens` (int64 `[N+1]`,
    on the host, so that reading it costs no device synchronisation) bounds its N sequences; a sequence may be
    empty. `past` (int64 `[N]`, on the host) counts the tokens of each that earlier calls have read. `rows` is
    there where states go from row to row: mixers are then given, and give, those of rows.
    """

    # No dataclass: FSDP2 copies those for every layer. No cached_property: Python 3.11's takes a lock, at
    # which torch.compile breaks the graph.
    def __init__(
        self, cu_seqlens: Tensor | None = None, past: Tensor | None = None, rows: Rows | None = None
    ):
        self.cu_seqlens, self.past, self.rows, self._made = cu_seqlens, past, rows, {}

    @property
    def lengths(self) -> Tensor:
        """int64 `[N]`, on the host."""
        assert self.cu_seqlens is not None, "a dense batch has no packed lengths"
        return self.cu_seqlens.diff()

    def with_gaps(self, gap: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the tokens and the gaps lie if `gap` rows are put before each sequence.

        Returns int64 `[ΣT]` and `[N, gap]` rows of the layout of ΣT + N·gap rows; made once per gap and
        device.
        """
        key = ("with_gaps", gap, device)
        if key not in self._made:
            n, starts = torch.arange(len(self.lengths)), self.lengths.cumsum(0) - self.lengths
            tokens = torch.arange(int(self.lengths.sum())) + gap * (1 + n.repeat_interleave(self.lengths))
            gaps = (starts + gap * n)[:, None] + torch.arange(gap)
            self._made[key] = tuple(x.to(device, non_blocking=True) for x in (tokens, gaps))
        return self._made[key]

    def positions(self, T: int, device: torch.device) -> Tensor:
        """Each token's place in its sequence, from 0: int64 `[1, T]` if alike in all rows, else `[B, T]`."""
        key = ("positions", T, device)
        if key not in self._made:
            places = torch.arange(T)[None]
            if self.cu_seqlens is not None:
                first = self.cu_seqlens[:-1] if self.past is None else self.cu_seqlens[:-1] - self.past
                places = places - first.repeat_interleave(self.lengths)
            elif self.past is not None:
                places = places + self.past[:, None]
            self._made[key] = places.to(device, non_blocking=True)
        return self._made[key]

    def longest(self, T: int) -> int:
        """Tokens of the longest sequence of a batch of T columns, those of earlier calls included."""
        lengths = torch.tensor([T]) if self.cu_seqlens is None else self.lengths
        return int((lengths if self.past is None else lengths + self.past).max())

    def last_positions(self, T: int, width: int, device: torch.device) -> Tensor:
        """Where each sequence's last `width` tokens stand in it after this call of T columns.

        int64 `[N or 1, width]`, < 0 before the first token.
        """
        if self.cu_seqlens is None:
            return self.positions(T, device)[:, :1] + torch.arange(T - width, T, device=device)
        key = ("last_positions", width, device)
        if key not in self._made:
            ends = self.lengths if self.past is None else self.lengths + self.past
            places = ends[:, None] + torch.arange(-width, 0)
            self._made[key] = places.to(device, non_blocking=True)
        return self._made[key]

    def pad(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """Each sequence's tokens of this call behind those that it kept, its last in the last column.

        x `[B, T, …]` or `[1, ΣT, …]`, kept `[N, R, …]` (None: R = 0) to `[N, R + L, …]`, L the longest
        sequence of this call; zeros where a sequence has no such token.
        """
        R = 0 if kept is None else kept.shape[1]
        if self.cu_seqlens is None:
            return x if kept is None else torch.cat([kept.to(x.dtype), x], 1)
        key = ("pad", R, x.device)
        if key not in self._made:
            N, total, L = len(self.lengths), int(self.lengths.sum()), int(self.lengths.max())
            # Columns from a sequence's first new token: < 0 for what it kept, and < −R for nothing at all.
            column = self.lengths[:, None] + torch.arange(-(R + L), 0)
            mine = torch.arange(N)[:, None] * R + R + column + total + 1
            index = torch.where(column >= -R, mine, total)
            index = torch.where(column >= 0, self.cu_seqlens[:-1, None] + column, index)
            self._made[key] = index.to(x.device, non_blocking=True)
        rows = [x[0], x.new_zeros(1, *x.shape[2:])]
        rows += [] if kept is None else [kept.to(x.dtype).flatten(0, 1)]
        return torch.cat(rows)[self._made[key]]

    def unpad(self, x: Tensor, T: int) -> Tensor:
        """`pad` without anything kept, undone: `[N, L, …]` to `[B, T, …]` or `[1, ΣT, …]`."""
        if self.cu_seqlens is None:
            return x
        key = ("unpad", x.device)
        if key not in self._made:
            ends = torch.arange(1, len(self.lengths) + 1) * x.shape[1] - self.cu_seqlens[1:]
            index = torch.arange(T) + ends.repeat_interleave(self.lengths)
            self._made[key] = index.to(x.device, non_blocking=True)
        return x.flatten(0, 1).index_select(0, self._made[key])[None]

    def groups(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Packed sequences by the next power of two of their length, so that padding at most doubles them.

        For each group int64 `[n, L]`, the tokens of n sequences, padded on the right with their last one to
        the longest of them; and int64 `[ΣT]`, where each token is in the groups, flattened one after another.
        """
        key = ("groups", device)
        if key not in self._made:
            sizes = torch.tensor([(n - 1).bit_length() if n else -1 for n in self.lengths.tolist()])
            starts = self.lengths.cumsum(0) - self.lengths
            groups, where, seen = [], torch.empty(int(self.lengths.sum()), dtype=torch.int64), 0
            for size in sizes.unique().tolist():
                if size < 0:  # empty sequences
                    continue
                lengths, first = self.lengths[sizes == size], starts[sizes == size]
                column = torch.arange(int(lengths.max()))
                rows = first[:, None] + torch.minimum(column, lengths[:, None] - 1)
                real = column < lengths[:, None]
                where[rows[real]] = seen + real.flatten().nonzero().squeeze(1)
                groups.append(rows.to(device, non_blocking=True))
                seen += rows.numel()
            self._made[key] = (groups, where.to(device, non_blocking=True))
        return self._made[key]

    def scatter_states(self, state: Tensor) -> Tensor:
        """What the sequences begin with: rows' states `[B, …]` to `[N, …]`, zeros but where a row goes on."""
        assert self.rows is not None
        key = ("scatter_states", state.device)
        if key not in self._made:
            carried = self.rows.carried
            pair = (self.rows.first[carried], carried.nonzero().squeeze(1))
            self._made[key] = tuple(x.to(state.device, non_blocking=True) for x in pair)
        sequences, rows = self._made[key]
        # Selected, never multiplied by 0: what an uncarried row holds may be NaN.
        empty = state.new_zeros(len(self.lengths), *state.shape[1:])
        return empty.index_copy(0, sequences, state.index_select(0, rows))

    def gather_states(self, state: Tensor) -> Tensor:
        """What the rows end in: sequences' states `[N, …]` to `[B, …]`, without history."""
        assert self.rows is not None
        key = ("gather_states", state.device)
        if key not in self._made:
            self._made[key] = self.rows.last.to(state.device, non_blocking=True)
        return state.detach().index_select(0, self._made[key])

    def with_kept(
        self, kept: int, wanted: Tensor, device: torch.device
    ) -> tuple["Sequences", Tensor, Tensor]:
        """These sequences with tokens of earlier calls in front of those that go on.

        Of `kept` tokens a row, its first sequence gets the last `wanted` (int64 `[N]`, on the host).
        Returns the longer sequences, ΣT' tokens in all; int64 `[ΣT']`, where each of these stands in the ΣT
        tokens with B·kept behind them; and int64 `[ΣT]`, where this call's tokens are among the ΣT'.
        """
        assert self.cu_seqlens is not None
        assert self.rows is not None
        key = ("with_kept", kept, tuple(wanted.tolist()), device)
        if key not in self._made:
            lengths = self.lengths + wanted
            ends = lengths.cumsum(0)
            column = torch.arange(int(lengths.sum())) - (ends - lengths + wanted).repeat_interleave(lengths)
            row = torch.zeros_like(lengths)
            row[self.rows.first] = torch.arange(len(self.rows.first))
            # What stands at column 0, of this call and behind a row's kept tokens.
            start = self.cu_seqlens[:-1].repeat_interleave(lengths)
            end = (int(self.cu_seqlens[-1]) + (row + 1) * kept).repeat_interleave(lengths)
            indices = (torch.where(column < 0, end, start) + column, (column >= 0).nonzero().squeeze(1))
            longer = Sequences(torch.cat([ends.new_zeros(1), ends]), rows=self.rows)
            self._made[key] = (longer, *(x.to(device, non_blocking=True) for x in indices))
        return self._made[key]

    def tails(self, x: Tensor, width: int) -> Tensor:
        """The last tokens of each row's last sequence, behind zeros: `[1, ΣT, …]` to `[B, width, …]`."""
        assert self.cu_seqlens is not None
        assert self.rows is not None
        key = ("tails", width, x.device)
        if key not in self._made:
            index = self.cu_seqlens[1:][self.rows.last, None] + torch.arange(-width, 0)
            missing = index < self.cu_seqlens[self.rows.last, None]
            pair = (index.clamp_min(0), missing)
            self._made[key] = tuple(part.to(x.device, non_blocking=True) for part in pair)
        index, missing = self._made[key]
        return x[0, index].masked_fill(missing.view(*missing.shape, *(1,) * (x.dim() - 2)), 0)


def find_sequences(
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    B: int,
    T: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """What the three ways of describing a batch say: (rows to keep of the B·T, cu_seqlens on the host).

    (None, None) is a dense batch. Masks may cover the past as well (its last T columns count) and are looked
    at once a batch.
    """
    restart = None  # transformers' way to say where packed documents begin
    if position_ids is not None and T > 1 and position_ids.dim() == 2:
        restart = position_ids.diff(dim=1) != 1
    if attention_mask is not None:
        mask = last_columns(attention_mask, B, T)
        if not bool(mask.all()):
            if cu_seqlens is not None:
                raise ValueError("give cu_seqlens or an attention_mask with padding, not both")
            if restart is not None and bool(
                (restart & (mask[:, 1:] & mask[:, :-1]).to(restart.device)).any()
            ):
                raise ValueError("give position_ids that restart or an attention_mask with padding, not both")
            lengths = mask.sum(1).cpu()
            return mask.flatten().nonzero().squeeze(1).to(device), offsets(lengths)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to("cpu", torch.int64)
        if (
            cu_seqlens.dim() != 1
            or cu_seqlens[0] != 0
            or cu_seqlens[-1] != B * T
            or bool((cu_seqlens.diff() < 0).any())
        ):
            raise ValueError(f"cu_seqlens must rise from 0 to the batch's {B * T} tokens")
        return None, cu_seqlens
    if restart is not None and bool(restart.any()):
        first = torch.ones(B, T, dtype=torch.bool)
        first[:, 1:] = restart.cpu()
        return None, torch.cat([first.flatten().nonzero().squeeze(1), torch.tensor([B * T])])
    return None, None


def last_columns(attention_mask: Tensor, B: int, T: int) -> Tensor:
    """Those of this call's tokens, bool `[B, T]`."""
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask must be [batch, length] with batch {B} and length ≥ {T}, "
            f"got {list(attention_mask.shape)}"
        )
    return attention_mask[:, attention_mask.shape[1] - T :].bool()


def find_rows(carried: Tensor | None, cu_seqlens: Tensor, B: int, T: int) -> Rows:
    """Each row's first and last sequence, empty ones beside them left out."""
    borders = torch.arange(B + 1) * T
    first = torch.searchsorted(cu_seqlens, borders, right=True) - 1
    if T == 0 or bool((cu_seqlens[first] != borders).any()):
        raise ValueError("row_states: every row must begin a sequence of cu_seqlens, and hold a token")
    carried = torch.zeros(B, dtype=torch.bool) if carried is None else carried.cpu()
    return Rows(first[:-1], torch.searchsorted(cu_seqlens, borders[1:]) - 1, carried)


def offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
