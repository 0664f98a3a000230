"""Packed and padded batches: which tokens form a sequence, and which carried states it continues."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .growing import grown


class Rows(NamedTuple):
    """The place of a batch's rows among its N sequences, for carried states."""

    first: Tensor
    """Each row's first sequence, int64 `[B]`."""
    last: Tensor
    """Each row's last sequence, int64 `[B]`."""
    carried: Tensor
    """Whether the row's first sequence continues its carried state, bool `[B]`."""


class DevicePacking(NamedTuple):
    """A packed batch on a device.

    What else a layer needs to know follows by arithmetic, with shapes that depend on N, ΣT and B but on no
    value. So one compiled graph serves all packings.
    """

    cu_seqlens: Tensor
    """int64 `[N+1]`."""
    sequence: Tensor
    """Each token's sequence, int64 `[ΣT]`."""
    past: Tensor | None
    """int64 `[N]`; None: all zero."""
    rows: Rows | None


Method = TypeVar("Method", bound=Callable[..., Any])


def kept(method: Method) -> Method:
    """Keeps a method's results by its arguments, for the next layers.

    A compiled graph, which serves all layers, makes them itself: what one layer keeps would be another input for the
    next.
    """

    @functools.wraps(method)
    def call(self, *arguments):
        if torch.compiler.is_compiling():
            return method(self, *arguments)
        key = (method, *arguments)
        if key not in self._made:
            self._made[key] = method(self, *arguments)
        return self._made[key]

    return cast(Method, call)


class Sequences:
    """The sequences of a batch, described once by the decoder; no mixer sees a mask.

    `cu_seqlens` None: the batch is dense, `[B, T]`. Otherwise it is `[1, ΣT]`, and `cu_seqlens` (int64
    `[N+1]`, on the host, where reading it needs no device synchronisation) bounds its N sequences, which may
    be empty. `past` (int64 `[N]`, on the host) counts the tokens of each that earlier calls read. With `rows`
    (on the host) mixers take and return the states of rows instead of sequences. `device`: that of the
    layers, whose `on_device` is then made at once, as compiled layers need them. `static`: `past` is on the
    device, and the call is captured as a CUDA graph, so the host must not read it. `parts` (`context.Parts`):
    the rows are cut over processes, and first sequences may continue documents of earlier parts. `bidirectional`:
    tokens see those behind them too. `grid`: each row is an image of (rows, columns) patches, row by row.

    `layout` is None while layers hand on packed tokens. Otherwise they hand on the batch's columns `[B, T, D]`: Linear
    layers and norms see those, and each mixer packs what `mix` takes and unpacks what it returns.
    """

    layout: "Layout | None" = None

    # FSDP2 would copy a dataclass for every layer; torch.compile breaks the graph at the lock in Python
    # 3.11's cached_property.
    def __init__(
        self,
        cu_seqlens: Tensor | None = None,
        past: Tensor | None = None,
        rows: Rows | None = None,
        device: torch.device | None = None,
        static: bool = False,
        parts: Any = None,
        bidirectional: bool = False,
        grid: tuple[int, int] | None = None,
    ):
        self.cu_seqlens, self.past, self.rows, self.static = cu_seqlens, past, rows, static
        self.parts, self.bidirectional, self.grid = parts, bidirectional, grid
        self._on_device: dict[torch.device, DevicePacking] = {}
        self._made: dict[tuple, Any] = {}
        if cu_seqlens is not None and device is not None:
            self.on_device(device)

    @property
    def lengths(self) -> Tensor:
        """int64 `[N]`, on the host."""
        assert self.cu_seqlens is not None, "a dense batch has no packed lengths"
        return self.cu_seqlens.diff()

    @property
    def ends(self) -> Tensor:
        """Tokens of each sequence up to the end of this call, int64 `[N]`, on the host."""
        return self.lengths if self.past is None else self.lengths + self.past

    def on_device(self, device: torch.device) -> DevicePacking:
        """The packed batch on `device`."""
        if device not in self._on_device:
            self._put_on_device(device)
        return self._on_device[device]

    @torch.compiler.disable  # their shapes depend on values
    def _put_on_device(self, device: torch.device) -> None:
        assert self.cu_seqlens is not None
        to_device = partial(Tensor.to, device=device, non_blocking=True)
        sequence = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        past = None if self.past is None else to_device(self.past)
        rows = None if self.rows is None else Rows(*map(to_device, self.rows))
        packing = self._on_device[device] = DevicePacking(
            to_device(self.cu_seqlens), to_device(sequence), past, rows
        )
        for x in (self.cu_seqlens, packing.cu_seqlens, past):  # N differs from batch to batch
            if x is not None:
                torch._dynamo.maybe_mark_dynamic(x, 0)

    def in_columns(self, function: Callable[..., Any], *xs: Tensor) -> Any:
        """function(*xs) of tensors as mixers see them; the function itself sees the batch's columns where layers do.

        It returns a tensor, or a dict of some.
        """
        if self.layout is None:
            return function(*xs)
        outputs = function(*map(self.layout.unpack, xs))
        if isinstance(outputs, Tensor):
            return self.layout.pack(outputs)
        return {name: self.layout.pack(y) for name, y in outputs.items()}

    @kept
    def repeated(self, n: int) -> "Sequences":
        """The same with n tokens in the place of each one, for a recurrence of n steps a token."""
        if self.cu_seqlens is None:
            return self
        parts = None if self.parts is None else self.parts.repeated(n)
        return Sequences(n * self.cu_seqlens, rows=self.rows, parts=parts)

    @kept
    def with_gaps(self, gap: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows of tokens and gaps, if `gap` rows are put before each sequence.

        Returns int64 `[ΣT]` and `[N, gap]`, indices into ΣT + N·gap rows.
        """
        cu, sequence, _, _ = self.on_device(device)
        # Before a token lie the gaps of its own sequence and of all earlier ones.
        tokens = torch.arange(len(sequence), device=device) + gap * (1 + sequence)
        starts = cu[:-1] + gap * torch.arange(cu.shape[0] - 1, device=device)
        return tokens, starts[:, None] + torch.arange(gap, device=device)

    @kept
    def positions(self, T: int, device: torch.device) -> Tensor:
        """Each token's position in its sequence: int64 `[1, T]` if equal in all rows, else `[B, T]`."""
        places = torch.arange(T, device=device)[None]
        if self.cu_seqlens is None:
            past = self.past
            return places if past is None else places + past.to(device, non_blocking=True)[:, None]
        cu, sequence, past, _ = self.on_device(device)
        # Where position 0 of each sequence would lie in this row, [N]; with a past, before it.
        first = cu[:-1] if past is None else cu[:-1] - past
        return places - first[sequence]

    def common_past(self) -> int | None:
        """The tokens before this call if all sequences have as many, and the host may know it."""
        if self.static or self.past is None:
            return None
        first = int(self.past[0])
        return first if bool((self.past == first).all()) else None

    def counts(self, T: int, device: torch.device) -> Tensor:
        """How many tokens each token sees, with itself: int64 `[1, T]` if equal in all rows, or `[B, T]`."""
        if not self.bidirectional:
            return self.positions(T, device) + 1
        if self.cu_seqlens is None:
            return torch.full((1, 1), T, device=device).expand(1, T)
        cu, sequence, _, _ = self.on_device(device)
        return cu.diff()[sequence][None]

    def reversed_tokens(self, x: Tensor) -> Tensor:
        """x `[B, T, …]` with the tokens of each sequence in the opposite order."""
        if self.cu_seqlens is None:
            return x.flip(1)
        cu, sequence, _, _ = self.on_device(x.device)
        ends = cu[:-1] + cu[1:] - 1  # a token and its place in the other order add up to these
        return x.index_select(1, ends[sequence] - torch.arange(len(sequence), device=x.device))

    def sums(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """Σ x over the tokens of each sequence so far, each token with itself: `[B, T, …]` in float64.

        before: the sums of earlier calls, `[N, …]`, or with `rows` those of carried states, `[B, …]`.
        """
        if self.parts is not None:
            x, before = self.parts.sums(x, before)  # before this part
        elif before is not None and self.rows is not None:
            before = self.scatter_states(before)

        sums = x.double().cumsum(1)
        if self.cu_seqlens is None:
            return sums if before is None else sums + before[:, None]
        cu, sequence, _, _ = self.on_device(x.device)
        # What sums over the whole row count too much: all before a sequence's first token.
        others = F.pad(sums[0], (0, 0) * (x.dim() - 2) + (1, 0)).index_select(0, cu[:-1])
        start = -others if before is None else before - others  # [N, …]
        return sums + start.index_select(0, sequence)

    def split(self, x: Tensor) -> list[Tensor]:
        """Each sequence of a packed row, `[1, ΣT, …]` to N times `[1, T, …]`, without the empty ones."""
        return [tokens for tokens in x.split(self.lengths.tolist(), 1) if tokens.shape[1]]

    @kept
    def causal(self) -> "Sequences":
        """The same sequences with a causal mask."""
        return Sequences(self.cu_seqlens)

    def longest(self, T: int) -> int:
        """Length of the longest sequence of a batch of T columns, including earlier calls."""
        if self.cu_seqlens is None:
            return T if self.past is None else T + int(self.past.max())
        return int(self.ends.max())

    @kept
    def last_positions(self, T: int, width: int, device: torch.device) -> Tensor:
        """The positions of each sequence's last `width` tokens after this call of T columns.

        int64 `[N or 1, width]`, negative before the first token.
        """
        if self.cu_seqlens is None:
            return self.positions(1, device) + torch.arange(T - width, T, device=device)
        return (self.ends[:, None] + torch.arange(-width, 0)).to(device, non_blocking=True)

    def pad(self, x: Tensor, held: Tensor | None = None, grows: bool = False) -> Tensor:
        """Each sequence's held tokens, then its tokens of this call, padded on the left.

        x `[B, T, …]` or `[1, ΣT, …]`, held `[N, R, …]` (None: R = 0) to `[N, R + L, …]`, where L is the
        longest sequence of this call. Padding is zero. grows: the result is kept for the next call.
        """
        if self.cu_seqlens is None:
            if held is None:
                return x
            # Autograd must see every value, and compiled code no memory of its own.
            copies = torch.is_grad_enabled() or torch.compiler.is_compiling()
            held = held.to(x.dtype)
            return grown(held, x) if grows and not copies else torch.cat([held, x], 1)
        rows = [x[0], x.new_zeros(1, *x.shape[2:])]
        rows += [] if held is None else [held.to(x.dtype).flatten(0, 1)]
        return torch.cat(rows)[self._padded(0 if held is None else held.shape[1], x.device)]

    @kept
    def _padded(self, R: int, device: torch.device) -> Tensor:
        """The rows that `pad` reads beside R kept ones, int64 `[N, R + L]`."""
        assert self.cu_seqlens is not None
        N, total, L = len(self.lengths), int(self.lengths.sum()), int(self.lengths.max())
        # Columns counted from the first new token: kept tokens are negative, padding is below −R.
        column = self.lengths[:, None] + torch.arange(-(R + L), 0)
        # Rows to read: ΣT tokens, then one of zeros (index `total`), then N·R kept ones.
        in_kept = torch.arange(N)[:, None] * R + R + column + total + 1
        index = torch.where(column >= -R, in_kept, total)
        index = torch.where(column >= 0, self.cu_seqlens[:-1, None] + column, index)
        return index.to(device, non_blocking=True)

    def unpad(self, x: Tensor, T: int) -> Tensor:
        """Undoes `pad` without kept tokens: `[N, L, …]` to `[B, T, …]` or `[1, ΣT, …]`."""
        if self.cu_seqlens is None:
            return x
        return x.flatten(0, 1).index_select(0, self._unpadded(T, x.shape[1], x.device))[None]

    @kept
    def _unpadded(self, T: int, width: int, device: torch.device) -> Tensor:
        """The rows that `unpad` reads of padded ones of this width, int64 `[T]`."""
        assert self.cu_seqlens is not None
        # A sequence ends at the end of its padded row; its tokens all move by as much.
        ends = torch.arange(1, len(self.lengths) + 1) * width - self.cu_seqlens[1:]
        index = torch.arange(T) + ends.repeat_interleave(self.lengths)
        return index.to(device, non_blocking=True)

    @kept
    def groups(self, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Groups sequences of similar length, rounded up to a power of two. Padding at most doubles a group.

        Returns for each group int64 `[n, L]`, the tokens of n sequences, right-padded to the longest with
        their last token, and bool `[n, L]`, which of these are no padding; and int64 `[ΣT]`, the index of
        each token in the flattened, concatenated groups.
        """
        # ⌈log₂ n⌉ of each length n, [N]
        sizes = torch.tensor([(n - 1).bit_length() if n else -1 for n in self.lengths.tolist()])
        starts = self.lengths.cumsum(0) - self.lengths
        groups, where, seen = [], torch.empty(int(self.lengths.sum()), dtype=torch.int64), 0
        for size in sizes.unique().tolist():
            if size < 0:  # empty sequences
                continue
            lengths, first = self.lengths[sizes == size], starts[sizes == size]
            column = torch.arange(int(lengths.max()))
            rows = first[:, None] + torch.minimum(column, lengths[:, None] - 1)  # [n, L]
            real = column < lengths[:, None]
            # Where each real token lies behind the groups before this one.
            where[rows[real]] = seen + real.flatten().nonzero().squeeze(1)
            groups.append(tuple(x.to(device, non_blocking=True) for x in (rows, real)))
            seen += rows.numel()
        return groups, where.to(device, non_blocking=True)

    def scatter_states(self, state: Tensor) -> Tensor:
        """Carried states `[B, …]` to initial states of sequences `[N, …]`, zero where none continues."""
        cu, _, _, rows = self.on_device(state.device)
        assert rows is not None
        # Selected, not multiplied by 0: a row that does not continue may hold NaN.
        held = state.where(shaped_like(rows.carried, state), 0)
        return state.new_zeros(cu.shape[0] - 1, *state.shape[1:]).index_copy(0, rows.first, held)

    def of_rows(self, state: Tensor) -> Tensor:
        """The states of each row's first sequence, `[N, …]` to `[B, …]`, as `sums` takes them; without rows, all."""
        if self.parts is not None:
            return state.index_select(0, self.parts.rows.first.to(state.device))
        rows = None if self.rows is None else self.on_device(state.device).rows
        return state if rows is None else state.index_select(0, rows.first)

    def gather_states(self, state: Tensor) -> Tensor:
        """Final states of sequences `[N, …]` to carried states `[B, …]`, detached."""
        rows = self.on_device(state.device).rows
        assert rows is not None
        return self.settled(state.detach().index_select(0, rows.last))

    def settled(self, state: Tensor) -> Tensor:
        """Carried states after whole rows, where rows are cut."""
        return state if self.parts is None else self.parts.context.from_last(state)

    @kept
    def with_kept(
        self, rows: int, wanted: tuple[int, ...], device: torch.device
    ) -> tuple["Sequences", Tensor, Tensor]:
        """The sequences with tokens of earlier calls before those that continue a carried state.

        Each row keeps `rows` tokens; its first sequence gets the last `wanted` (of N sequences).
        Returns the longer sequences of ΣT' tokens in all; int64 `[ΣT']`, the index of each of these in the ΣT
        tokens followed by the B·rows; and int64 `[ΣT]`, the index of this call's tokens in the ΣT'.
        """
        assert self.cu_seqlens is not None
        assert self.rows is not None
        lengths = self.lengths + self.lengths.new_tensor(wanted)
        bounds = bounds_of_lengths(lengths)
        # Columns counted from a sequence's first new token, [ΣT']: kept tokens are negative.
        begins = bounds[1:] - self.lengths
        column = torch.arange(int(lengths.sum())) - begins.repeat_interleave(lengths)
        # A row's other sequences want nothing, so their 0 here is never read.
        row = torch.zeros_like(lengths)
        row[self.rows.first] = torch.arange(len(self.rows.first))
        # The index of column 0, in this call's tokens and after a row's kept tokens.
        start = self.cu_seqlens[:-1].repeat_interleave(lengths)
        end = (int(self.cu_seqlens[-1]) + (row + 1) * rows).repeat_interleave(lengths)
        source = torch.where(column < 0, end, start) + column
        tokens = (column >= 0).nonzero().squeeze(1)
        longer = Sequences(bounds, rows=self.rows)
        return longer, source.to(device, non_blocking=True), tokens.to(device, non_blocking=True)

    def tails(self, x: Tensor, width: int) -> Tensor:
        """The last tokens of each row's last sequence, left-padded: `[1, ΣT, …]` to `[B, width, …]`."""
        cu, _, _, rows = self.on_device(x.device)
        assert rows is not None
        index = cu[1:][rows.last, None] + torch.arange(-width, 0, device=x.device)
        missing = index < cu[rows.last, None]  # bool [B, width], before the sequence
        tails = x[0, index.clamp_min(0)]
        return tails.masked_fill(shaped_like(missing, tails), 0)


@dataclass
class Packing:
    """Which columns of a batch are tokens of which documents; see `NalandaForCausalLM.forward`."""

    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    carried_cache: Any = None  # NalandaCache
    carried: Tensor | None = None
    return_carried_cache: bool = False
    context: Any = None  # Context

    @property
    def carries(self) -> bool:
        """Whether states pass between rows, in or out of this call."""
        return (
            self.return_carried_cache or self.carried_cache is not None or self.carried is not None
        )

    @property
    def tokens_read(self) -> Tensor | None:
        """Tokens read into the carried states, int64 `[B]`."""
        return None if self.carried_cache is None else self.carried_cache.lengths


class Layout:
    """The mapping between a batch's `[B, T]` columns and what the mixers see.

    Mixers see `[B, T]` if `cu_seqlens` is None, otherwise one row `[1, ΣT]` with these bounds and no padding.
    `mask`, bool `[B, T]`, marks tokens; None: all columns are tokens.

    Raises ValueError for a mask or bounds that do not fit the batch, or for a mask beside bounds. Beside bounds
    `position_ids` are positions alone.
    """

    def __init__(self, x: Tensor, packing: Packing):
        position_ids, cu_seqlens = packing.position_ids, packing.cu_seqlens
        self.B, self.T = B, T = x.shape[:2]
        self.cu_seqlens: Tensor | None = None
        self.mask: Tensor | None = None
        self.real: Tensor | None = None  # int64 `[ΣT]`, the tokens among the B·T columns
        self.order: Tensor | None = None  # int64 `[B, T]`, each row's columns with padding last

        # position_ids that restart are transformers' way to mark where packed documents begin.
        restart = None
        if position_ids is not None:
            if not isinstance(position_ids, Tensor):
                raise ValueError(
                    f"position_ids must be a tensor, got {type(position_ids).__name__}"
                )
            if position_ids.shape not in ((B, T), (1, T)):
                raise ValueError(
                    f"position_ids must be [batch, length] or [1, length] with batch {B} and length {T}, "
                    f"got {list(position_ids.shape)}"
                )
            restart = position_ids.diff(dim=1) != 1  # [B or 1, T − 1]

        mask = packing.attention_mask
        mask = None if mask is None else last_columns(mask, B, T)
        if mask is not None and not bool(mask.all()):
            if cu_seqlens is not None:
                raise ValueError("give cu_seqlens or an attention_mask with padding, not both")
            self._leave_out_padding(x, mask, restart)

        elif cu_seqlens is not None:
            bounds = bounds_on_host(cu_seqlens, B * T)
            # One document a row is a dense batch: no packing, and mixers keep [B, T].
            a_document_a_row = torch.equal(bounds, torch.arange(B + 1) * T)
            self.cu_seqlens = None if a_document_a_row else bounds

        elif restart is not None and bool(restart.any()):
            first = torch.ones(B, T, dtype=torch.bool)
            first[:, 1:] = restart.cpu()  # [B or 1, T − 1] to all rows
            starts = first.flatten().nonzero().squeeze(1)
            self.cu_seqlens = torch.cat([starts, torch.tensor([B * T])])

    def _leave_out_padding(self, x: Tensor, mask: Tensor, restart: Tensor | None) -> None:
        inside = mask[:, 1:] & mask[:, :-1]  # columns whose token follows another
        # Position ids of padding may be any: only a token behind another can restart.
        if restart is not None and bool((restart & inside.to(restart.device)).any()):
            raise ValueError(
                "give position_ids that restart or an attention_mask with padding, not both"
            )
        self.mask = mask
        self.real = mask.flatten().nonzero().squeeze(1).to(x.device)
        self.cu_seqlens = bounds_of_lengths(mask.sum(1).cpu())

    @classmethod
    def padding_last(cls, x: Tensor, attention_mask: Tensor) -> "Layout":
        """The layout `[B, T]` with each row's padding after its tokens, which do not see it there.

        For compiled graphs, whose shapes cannot depend on the values of a mask.
        """
        layout = cls(x, Packing())
        layout.mask = last_columns(attention_mask, *x.shape[:2]).to(x.device)
        # Stable: tokens keep their order, and so does padding behind them.
        layout.order = (~layout.mask).to(torch.uint8).argsort(dim=1, stable=True)
        return layout

    @classmethod
    def of_bounds(cls, x: Tensor, cu_seqlens: Tensor) -> "Layout":
        """The layout `[1, ΣT]` of these bounds, also where each row is one document."""
        layout = cls(x, Packing())
        layout.cu_seqlens = cu_seqlens
        return layout

    @property
    def packed(self) -> bool:
        """Whether rows may hold several documents."""
        return self.mask is None and self.cu_seqlens is not None

    @property
    def moves(self) -> bool:
        """Whether mixers see tokens in other places than the batch's columns."""
        flat = self.cu_seqlens is not None and (self.real is not None or self.B > 1)
        return flat or self.order is not None

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, …]` to what the mixers see."""
        if self.order is not None:
            return x.gather(1, shaped_like(self.order, x).expand_as(x))
        if self.cu_seqlens is None:
            return x
        x = x.flatten(0, 1)
        return (x if self.real is None else x.index_select(0, self.real))[None]

    def unpack(self, x: Tensor) -> Tensor:
        """What `pack` returned to `[B, T, …]`, zeros in the place of padding."""
        if self.order is not None:
            order = shaped_like(self.order, x).expand_as(x)
            return self.without_padding(torch.zeros_like(x).scatter(1, order, x))
        behind = x.shape[2:]
        if self.real is not None:
            columns = x.new_zeros(self.B * self.T, *behind)
            x = columns.index_copy(0, self.real.to(x.device), x[0])
        return x.view(self.B, self.T, *behind)

    def without_padding(self, x: Tensor) -> Tensor:
        """x `[B, T, …]` with zeros in the place of padding."""
        if self.mask is None:
            return x
        return x.masked_fill(~shaped_like(self.mask, x), 0)

    def rows(self, carried: Tensor | None, lengths: Tensor | None) -> tuple[Rows, Tensor | None]:
        """Each row's first and last nonempty sequence, and how many tokens earlier calls read of each one.

        carried: bool `[B]`, whether the row's first sequence continues its carried state; None: no row does.
        lengths: int64 `[B]`, tokens read into the carried states. The second result is None if no row continues.
        """
        if self.mask is not None:
            raise ValueError(
                "carried_cache is for packed rows: give no attention_mask with padding"
            )
        borders = torch.arange(self.B + 1) * self.T
        if self.cu_seqlens is None:
            self.cu_seqlens = borders
        # Empty sequences repeat a bound. The last of equal ones begins the nonempty sequence.
        first = torch.searchsorted(self.cu_seqlens, borders, right=True) - 1
        if self.T == 0 or bool((self.cu_seqlens[first] != borders).any()):
            raise ValueError(
                "carried_cache: every row must begin a sequence of cu_seqlens, and hold a token"
            )
        carried = torch.zeros(self.B, dtype=torch.bool) if carried is None else carried.cpu()
        # The first of equal bounds ends the row's last nonempty sequence.
        rows = Rows(first[:-1], torch.searchsorted(self.cu_seqlens, borders[1:]) - 1, carried)
        if lengths is None or not bool(carried.any()):
            return rows, None
        past = torch.zeros(len(self.cu_seqlens) - 1, dtype=torch.int64)
        past[rows.first[carried]] = lengths[carried]
        return rows, past


def bounds_on_host(cu_seqlens: Tensor, total: int) -> Tensor:
    """cu_seqlens as int64 on the host. Raises ValueError if it does not bound documents of `total` tokens."""
    integers = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)

    if integers and cu_seqlens.dim() == 1 and len(cu_seqlens) > 0:
        bounds = cu_seqlens.to("cpu", torch.int64)
        if bounds[0] == 0 and bounds[-1] == total and not bool((bounds.diff() < 0).any()):
            return bounds

    raise ValueError(
        f"cu_seqlens must be an int32 or int64 tensor [N + 1] that rises from 0 to the {total} tokens"
    )


_FOREIGN = (
    "cu_seq_lens_q",  # flash attention's name of cu_seqlens
    "cu_seq_lens_k",  # the same bounds, as keys and values are those of the queries' tokens
    "max_length_q",
    "max_length_k",
    "seq_idx",  # each token's document, int `[B, T]`
    "cache_position",  # the cache itself knows its length
    "token_type_ids",  # all zero
    "head_mask",  # None
    "cache",  # None, where a model has no cache
    "past_key_values",  # the same, before transformers 5.24
)


def foreign_bounds(cu_seqlens: Tensor | None, foreign: dict[str, Any]) -> Tensor | None:
    """The bounds of packed documents, as given or from other libraries' keywords for them.

    foreign: the keywords that `forward` does not name. Collators, trainers and tokenizers of transformers and
    TRL send those of `_FOREIGN`; the ones that say nothing new are ignored.

    Raises TypeError for any other keyword, and ValueError for a value that would change the result.
    """
    for name in foreign:
        if name not in _FOREIGN:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")

    for name in ("head_mask", "cache", "past_key_values"):
        if foreign.get(name) is not None:
            raise ValueError(f"{name}: this model does not use it; leave it out")

    types = foreign.get("token_type_ids")
    if types is not None and not torch.compiler.is_compiling() and bool(types.any()):
        raise ValueError(
            "token_type_ids: this model has no token types; give zeros, or leave them out"
        )

    others = {name: foreign.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")}
    others = {name: x for name, x in others.items() if x is not None}
    if (documents := others.pop("seq_idx", None)) is not None:
        if not isinstance(documents, Tensor) or documents.dim() != 2:
            raise ValueError("seq_idx: give each token's document, [batch, length]")
        begins = documents.diff(dim=1) != 0
        if bool(begins.any()):  # else every row is one document, as without it
            begins = F.pad(begins, (1, 0), value=True)  # bool [B, T]: each row begins a document
            edges = begins.flatten().nonzero().squeeze(1)
            # The last bound is B·T.
            others["seq_idx"] = F.pad(edges, (0, 1), value=begins.numel())

    # The first that is given counts, and the others must agree with it.
    bounds, named = cu_seqlens, "cu_seqlens"
    for name, other in others.items():
        if bounds is None:
            bounds, named = other, name
        elif bounds.shape != other.shape or bool((bounds.to(other.device) != other).any()):
            raise ValueError(f"{named} and {name} name different documents; give one of them")
    return bounds


def next_tokens(labels: Tensor, packing: Packing) -> Tensor:
    """The targets `[B, T]` of a batch: the label of the next column, or −100 where there is none, that is no
    token, or none of the same document comes before it. The batch is described as for `Layout`."""
    B, T = labels.shape
    position_ids, cu_seqlens = packing.position_ids, packing.cu_seqlens
    targets = labels[:, 1:]  # [B, T − 1]
    if packing.attention_mask is not None:
        real = last_columns(packing.attention_mask, B, T).to(labels.device)
        targets = targets.masked_fill(~(real[:, 1:] & real[:, :-1]), -100)
    if cu_seqlens is not None:
        # Columns where documents begin; the last bound, B·T, needs a place too.
        first = torch.zeros(B * T + 1, dtype=torch.bool, device=labels.device)
        first = first.index_fill(
            0, cu_seqlens.to(labels.device, torch.int64, non_blocking=True), True
        )
        targets = targets.masked_fill(first[:-1].view(B, T)[:, 1:], -100)
    elif position_ids is not None:
        targets = targets.masked_fill(position_ids.to(labels.device).diff(dim=1) != 1, -100)
    return F.pad(targets, (0, T - targets.shape[1]), value=-100)


def last_columns(attention_mask: Tensor, B: int, T: int) -> Tensor:
    """The mask of this call's tokens, bool `[B, T]`."""
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask must be [batch, length] with batch {B} and length ≥ {T}, "
            f"got {list(attention_mask.shape)}"
        )
    return attention_mask[:, attention_mask.shape[1] - T :].bool()


def only_tokens(attention_mask: Tensor | None, past: Tensor | None, T: int) -> bool:
    """Whether the last T columns are tokens of sequences that have all begun, with padding on the left.

    past: int64 `[B]`, tokens read before. A mask on a device is not read: it would wait for the device, every token.
    """
    if past is None or not bool((past > 0).all()):
        return False
    if attention_mask is None or attention_mask.device.type != "cpu":
        return True
    return bool(attention_mask[..., -T:].all())


def bounds_of_lengths(lengths: Tensor) -> Tensor:
    """The bounds `[N + 1]` of sequences of these lengths `[N]`, one behind another."""
    return F.pad(lengths.cumsum(0), (1, 0))


def shaped_like(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of x's first dimensions, on its device, with as many dimensions as x."""
    return mask.to(x.device).view(*mask.shape, *(1,) * (x.dim() - mask.dim()))
