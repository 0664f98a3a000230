"""Context parallelism: the processes of a group each hold a part of every row.

A row of T tokens is cut into N parts of T/N. Part r needs of the others only

- for a recurrence, the state S_r of its row's document at the part's first token. A part maps its incoming
  state S to M S + U. U is its final state from zero, M the product of its transitions (diagonal for linear
  attention).
  All M and U are exchanged, and S_r follows by a scan. The outputs from zero come with U; what they lack is
  linear in S_r;
- for a running sum, as of angles, the sum over the document's tokens before it;
- for a short convolution, the last W − 1 inputs before it; for attention, the keys and values that its
  tokens still see.

So the traffic of a recurrence does not depend on T. All exchanges have gradients.

Softmax over all tokens before has ever more to do towards the end of a row. Its layers share queries out by work, and
send back the outputs; other layers keep the contiguous parts.
"""

import copy
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .call import Call, Options, group_of, wide_dtype
from .layers import at_least_fp32, no_autocast, once_differentiable
from .ops import run_recurrence, with_features
from .sequences import Rows, Sequences, bounds_of_lengths, bounds_on_host, shaped_like

SCAN_FROM = 9
"""Processes from which a scan in ⌈log₂ N⌉ rounds replaces one all-gather. It sends less from N = 5 on, but in
rounds that wait for one another, each with a product of two transitions."""

PIECES = 8
"""Pieces of a part's queries that `Parts.pieces` shares out. With one document a row, the busiest of 2, 4 and 8
processes has 1.01, 1.05 and 1.01 times the mean work."""

# torch has renamed it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Context:
    """The processes that share rows. Each calls the model with the same whole rows, and all of them must call
    it: forward and backward exchange states.

    group: their process group; None: all processes. Its ranks are the parts in order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def part(self, x: Tensor) -> Tensor:
        """This process's part of x `[B, T, …]`: `[B, T/N, …]`. Raises ValueError if N does not divide T."""
        if x.shape[1] % self.size:
            raise ValueError(
                f"rows of {x.shape[1]} tokens cannot be cut into {self.size} equal parts"
            )
        return x.unflatten(1, (self.size, -1))[:, self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """Of every process: `[…]` to `[N, …]`, without gradients."""
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(out.unbind()), x.contiguous(), group=self.group)
        return out

    def shift(self, tensors: list[Tensor], by: int) -> list[Tensor]:
        """Those of the process `by` parts before this one, zeros if there is none; without gradients."""
        received = [x.new_zeros(x.shape) for x in tensors]
        to, source = self.rank + by, self.rank - by
        operations = []
        for x, buffer in zip(tensors, received, strict=True):
            if 0 <= to < self.size:
                operations.append(
                    dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=to)
                )
            if 0 <= source < self.size:
                operations.append(
                    dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source)
                )
        # In one batch: one after another, two processes could wait for each other.
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return received

    def sums(self, x: Tensor) -> Tensor:
        """x `[N, …]` summed over the processes: the entry for this one, without gradients."""
        out = x.new_empty(x.shape[1:])
        _reduce_scatter(out, x.contiguous().flatten(0, 1), group=self.group)
        return out

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """x `[Σ sent, …]`: its first `sent[0]` rows go to process 0, and so on. Returns `[Σ received, …]`, of which
        `received[r]` came from process r; without gradients."""
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    @torch.compiler.disable
    def from_last(self, x: Tensor) -> Tensor:
        """The last part's x, without gradients."""
        x = x.detach().contiguous()
        dist.broadcast(x, group=self.group, group_src=self.size - 1)
        return x


@dataclass(frozen=True, order=True)
class Piece:
    """Queries whose document began before their part.

    part, row, start, end: their place; `start` and `end` count from the part's first token of the row. past: tokens of
    the document before them.
    """

    part: int
    row: int
    start: int
    end: int
    past: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return len(self) * self.past + len(self) * (len(self) + 1) // 2


class Shares(NamedTuple):
    """This process's part in sharing the queries of softmax attention, see `Parts.pieces`.

    tokens: int64 `[Σ sent]`, its own queries in pieces, in the order of the processes that attend them. sent: their
        number by process.
    pieces: those that this process attends, in the order of the parts. received: their tokens by part.
    rest: int64, its queries of documents that begin here; sequences: these documents.
    """

    tokens: Tensor
    sent: list[int]
    pieces: list[Piece]
    received: list[int]
    rest: Tensor
    sequences: Sequences


class Parts:
    """A batch of rows, cut over a context.

    cu_seqlens: bounds of the documents in the B·T tokens of the whole rows, on the host; None: one a row.
    carried: bool `[B]`, whether the row's first document continues its carried state; None: no row does.
    lengths: int64 `[B]`, tokens read into the carried states.
    """

    def __init__(
        self,
        context: Context,
        B: int,
        T: int,
        cu_seqlens: Tensor | None,
        carried: Tensor | None,
        lengths: Tensor | None,
    ):
        N, size = context.size, T // context.size
        self.context, self.B, self.T, self.size = context, B, T, size
        documents = _document_bounds(cu_seqlens, B, T)

        # Tokens read into the carried states that go on, int64 [B].
        read = torch.zeros(B, dtype=torch.int64)
        if carried is not None and lengths is not None:
            read = torch.where(carried.cpu(), lengths, 0)

        # For each part, how many tokens of its first document lie before it, int64 [B, N].
        edges = torch.arange(B * N) * size  # where the parts begin
        # The first document of a part begins at bound next_bound − 1 and ends at next_bound.
        next_bound = torch.searchsorted(documents, edges, right=True)
        past = (edges - documents[next_bound - 1]).view(B, N)
        # Only a document from the row's first token on continues a carried state.
        in_first_document = past == torch.arange(N) * size
        past = past + in_first_document * read[:, None]

        self._documents, self._read = documents, read
        self._shares: Shares | None = None
        edges = edges.view(B, N)
        ends_behind = documents[next_bound].view(B, N) >= edges + size
        passes = (past > 0) & ends_behind  # bool [B, N]: begun before the part, reaching its end
        self.passing = [r for r in range(1, N - 1) if passes[:, r].any()]
        """Parts through which the state of a document passes, from one before to one behind."""

        # The sequences of this part: it begins one in every row, and so does each document in it.
        before = context.rank * size
        starts = torch.cat([edges[:, context.rank], documents]).unique()
        columns = starts % T
        # The last bound, B·T, begins nothing.
        inside = (columns >= before) & (columns < before + size) & (starts < B * T)
        starts = starts[inside]
        bounds = starts // T * size + starts % T - before  # in this part's B·T/N tokens
        self.cu_seqlens = torch.cat([bounds, torch.tensor([B * size])])

        borders = torch.arange(B + 1) * size
        # Each row's first and last sequence, int64 [B].
        first = torch.searchsorted(self.cu_seqlens, borders[:-1])
        last = torch.searchsorted(self.cu_seqlens, borders[1:]) - 1
        self.rows = Rows(first, last, read > 0)
        past = past[:, context.rank]
        # Of all sequences here; only the first of a row has tokens before this part.
        self.past = torch.zeros(len(starts), dtype=torch.int64).index_copy(0, first, past)

        ends = torch.arange(1, B + 1) * T
        # A document that fills its row continues the carried one, and counts what that read.
        tail = ends - documents[torch.searchsorted(documents, ends) - 1]
        self.lengths = tail + (tail == T) * read
        """Tokens of each row's last document, int64 `[B]`, after this call."""

        continued = past > 0
        self.continued = continued.nonzero().squeeze(1)
        """Rows whose first document here began before this part."""
        self.through = (first == last)[continued].nonzero().squeeze(1)
        """Those of them, by index, of which this part has nothing else."""

        spans = [torch.arange(*self.cu_seqlens[i : i + 2].tolist()) for i in first[continued]]
        self.tokens = torch.cat(spans) if spans else first.new_zeros(0)
        """The tokens of these documents, int64 `[M]`, and their bounds among themselves."""
        self.bounds = torch.tensor([0, *map(len, spans)]).cumsum(0)

    def repeated(self, n: int) -> "Parts":
        """The same with n tokens in the place of each one, for a recurrence of n steps a token."""
        longer = copy.copy(self)
        longer.tokens = (n * self.tokens[:, None] + torch.arange(n)).flatten()
        longer.bounds = n * self.bounds
        return longer

    def pieces(self) -> list[list[Piece]]:
        """For each process, the queries of which it computes the attention; the same on all processes.

        Documents that begin in a part stay there. The other queries are cut into pieces, and these go, the largest
        first, to the process with the least work.
        """
        # Segments: every document, cut at the parts' edges.
        edges = torch.arange(self.B * self.context.size) * self.size
        cuts = torch.cat([self._documents, edges]).unique()
        starts, counts = cuts[:-1], cuts.diff()
        row, column = starts // self.T, starts % self.T

        # Tokens of the document before each; one that begins its row may go on from a carried state.
        begins = self._documents[torch.searchsorted(self._documents, starts, right=True) - 1]
        past = starts - begins + torch.where(begins % self.T == 0, self._read[row], 0)
        segments = torch.stack([column // self.size, row, column % self.size, counts, past], 1)

        # Pairs of a query and a key are the work. A document's first segment stays where it is.
        work, pieces = [0] * self.context.size, []
        for part, row, start, count, past in segments.tolist():
            if past == 0:
                work[part] += count * (count + 1) // 2
                continue
            bounds = [start + count * i // PIECES for i in range(PIECES + 1)]
            pieces += [
                Piece(part, row, first, end, past + first - start)
                for first, end in itertools.pairwise(bounds)
                if first < end
            ]

        taken: list[list[Piece]] = [[] for _ in work]
        for piece in sorted(pieces, key=lambda piece: -piece.pairs):
            process = work.index(min(work))
            work[process] += piece.pairs
            taken[process].append(piece)
        return [sorted(pieces) for pieces in taken]

    def shares(self) -> Shares:
        """Of the queries; made once for all layers."""
        if self._shares is not None:
            return self._shares
        taken, rank = self.pieces(), self.context.rank

        # This part's pieces, by the process that attends them.
        sent = [[piece for piece in pieces if piece.part == rank] for pieces in taken]
        spans = [
            torch.arange(piece.start, piece.end) + piece.row * self.size
            for piece in itertools.chain(*sent)
        ]
        received = [0] * len(taken)
        for piece in taken[rank]:
            received[piece.part] += len(piece)

        fresh, lengths = self.past == 0, self.cu_seqlens.diff()  # of each sequence here
        self._shares = Shares(
            tokens=torch.cat([self.tokens[:0], *spans]),
            sent=[sum(map(len, pieces)) for pieces in sent],
            pieces=taken[rank],
            received=received,
            rest=fresh.repeat_interleave(lengths).nonzero().squeeze(1),
            sequences=Sequences(bounds_of_lengths(lengths[fresh])),
        )
        return self._shares

    def whole(self, y: Tensor, x: Tensor, held: Tensor | None) -> tuple[Tensor, Tensor]:
        """y, and x of all parts: `[1, B·T/N, …]` to `[B, R + T, …]`. held: `[B, R, …]`, tokens before the rows.

        y: it ties the exchange to its gradient, see `left`.
        """
        y, parts = _Gather.apply(y, self.context, x[0].unflatten(0, (self.B, -1)))
        rows = parts.transpose(0, 1).flatten(1, 2)
        return y, rows if held is None else torch.cat([held.to(x.dtype), rows], 1)

    def exchange(
        self, y: Tensor, x: Tensor, sent: list[int], received: list[int]
    ) -> tuple[Tensor, Tensor]:
        """y, see `whole`, and `Context.exchange` of x, with gradients."""
        return _Exchange.apply(y, self.context, x, sent, received)

    @torch.compiler.disable  # parts have graphs of their own; all must exchange in one order
    def left(self, x: Tensor, width: int, held: Tensor | None) -> tuple[Tensor, Tensor]:
        """The `width` tokens before this part in each row: x `[1, B·T/N, …]` to x and `[B, width, …]`.

        held: `[B, R, …]`, tokens before the row. Where there are none it is zero. Use the first result in
        place of x: it ties the exchange to x's gradient. Otherwise some process skips the backward exchange
        and all hang.
        """
        # Each part sends its last tokens. Where width < T/N, those of the nearest part alone remain.
        size = min(width, self.size)
        x, parts = _Gather.apply(
            x, self.context, x[0].unflatten(0, (self.B, -1))[:, self.size - size :]
        )
        # parts [N, B, size, …]: those before this one, behind what came before the row.
        before = [x.new_zeros(self.B, width, *x.shape[2:])]
        before += [] if held is None else [held.to(x.dtype)]
        left = torch.cat([*before, *parts[: self.context.rank].unbind()], 1)
        return x, left[:, left.shape[1] - width :]

    @torch.compiler.disable
    def conv_states(
        self, xs: list[Tensor], width: int, states: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """xs, see `left`, and the `width` inputs before each sequence, `[N, width, …]` as convolutions take
        them. states: those before the rows, by sequence."""
        sizes, first = [x.shape[-1] for x in xs], self.rows.first.to(xs[0].device)
        held = None if states is None else torch.cat(states, -1).index_select(0, first)
        x, left = self.left(torch.cat(xs, -1), width, held)
        ages = torch.arange(width, 0, -1)  # the first column is the oldest
        in_document = ages <= self.past[self.rows.first, None]  # not of a document before
        left = left.where(in_document.to(x.device)[..., None], 0)  # [B, width, ΣD]

        # [N, width, ΣD]; sequences that begin here have zeros before them.
        inputs_before = left.new_zeros(len(self.past), *left.shape[1:]).index_copy(0, first, left)
        return list(x.split(sizes, -1)), list(inputs_before.split(sizes, -1))

    @torch.compiler.disable
    def sums(self, x: Tensor, held: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, see `left`, and the sum of each sequence's tokens before this part, `[N, …]`. held: `[B, …]`, the
        sums of the carried states."""
        # Each row's sum over the tokens of the last document here.
        rows = x[0].unflatten(0, (self.B, -1))  # [B, T/N, …]
        begins = self.cu_seqlens[self.rows.last] - torch.arange(self.B) * self.size
        of_last = torch.arange(self.size) >= begins[:, None]
        x, ends = _Gather.apply(
            x, self.context, rows.double().where(shaped_like(of_last, rows), 0).sum(1)
        )

        # Parts that the document of this part's first token reaches back to, and the row's carried sum.
        past, before = self.past[self.rows.first], self.context.rank
        reached = past > torch.arange(before - 1, -1, -1)[:, None] * self.size  # bool [before, B]
        total = ends[:before].where(shaped_like(reached, ends), 0).sum(0)  # [B, …]
        if held is not None:
            total = total + held.double().where(shaped_like(past > before * self.size, held), 0)
        first = self.rows.first.to(x.device)
        return x, total.new_zeros(len(self.past), *total.shape[1:]).index_copy(0, first, total)


def _document_bounds(cu_seqlens: Tensor | None, B: int, T: int) -> Tensor:
    """The bounds of the documents in B·T tokens, without empty ones. Raises ValueError for other bounds."""
    rows = torch.arange(B + 1) * T
    if cu_seqlens is None:
        return rows
    bounds = bounds_on_host(cu_seqlens, B * T).unique()
    if not bool(torch.isin(rows, bounds).all()):
        raise ValueError(
            f"cu_seqlens must rise from 0 to {B * T} and begin a document in every row"
        )
    return bounds


class _Gather(torch.autograd.Function):
    """(y, `x` of every process, `[N, …]`)."""

    @staticmethod
    def forward(ctx, y: Tensor, context: Context, x: Tensor):
        ctx.context = context
        return y.view_as(y), context.gather(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor, d_all: Tensor):
        return d_y, None, ctx.context.sums(d_all)


class _Exchange(torch.autograd.Function):
    """(y, `Context.exchange` of x)."""

    @staticmethod
    def forward(ctx, y: Tensor, context: Context, x: Tensor, sent: list[int], received: list[int]):
        ctx.context, ctx.counts = context, (received, sent)
        return y.view_as(y), context.exchange(x, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor, d_out: Tensor):
        return d_y, None, ctx.context.exchange(d_out, *ctx.counts), None, None


def scan(context: Context, M: Tensor | None, U: Tensor, reverse: bool = False) -> Tensor:
    """The state S `[…, F, V]` at this part: S = 0 at the first, and M S + U behind each; without gradients.

    M: `[…, F, F]`, `[…, F, 1]` for a diagonal, or None where no part passes a state on. reverse: from the
    last part to the first.
    """
    toward = -1 if reverse else 1
    if M is None:
        return context.shift([U], toward)[0]
    if context.size < SCAN_FROM:
        # [N, …, F, F or 1] and [N, …, F, V]
        parts = context.gather(torch.cat([M, U], -1)).split([M.shape[-1], U.shape[-1]], -1)
        # Each process takes the parts before it (reverse: behind it), the farthest first.
        S = torch.zeros_like(U)
        places = range(context.size - 1, context.rank, -1) if reverse else range(context.rank)
        for n in places:
            S = _apply(parts[0][n], S) + parts[1][n]
        return S
    step = 1
    # Doubling: M and U are those of the `step` parts that end with this one.
    while step < context.size:
        before, state = context.shift([M, U], toward * step)
        first = context.rank >= context.size - step if reverse else context.rank < step
        # No part lies before the first one, so its state is zero and there is nothing to compose.
        if not first:
            U = _apply(M, state) + U  # before M: it needs that of these parts alone
            M = _apply(M, before)
        step *= 2
    return context.shift([U], toward)[0]


def _apply(M: Tensor, S: Tensor) -> Tensor:
    with no_autocast(S):  # states stay in their own precision
        return M * S if M.shape[-1] == 1 else M @ S


class _Incoming(torch.autograd.Function):
    """(o, the state at this part), see `scan`.

    With E_r the gradient of the state at part r from there on, E_r = dS_r + Mᵀ E_{r+1}: the same scan
    backward. dU = E_{r+1} and dM = E_{r+1} Sᵀ. It returns o so that every process takes part in the backward.
    """

    @staticmethod
    def forward(ctx, o: Tensor, context: Context, M: Tensor | None, U: Tensor):
        S = scan(context, M, U)
        ctx.context = context
        ctx.save_for_backward(M, S)
        return o.view_as(o), S

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o: Tensor, d_S: Tensor):
        M, S = ctx.saved_tensors
        d_M, transposed = None, M
        if M is not None and M.shape[-1] > 1:
            transposed = M.transpose(-1, -2)
        d_U = scan(ctx.context, transposed, d_S, reverse=True)
        if M is not None and ctx.needs_input_grad[2]:
            d_M = (d_U * S).sum(-1, keepdim=True) if M.shape[-1] == 1 else d_U @ S.transpose(-1, -2)
        return d_o, None, d_M, d_U


def cut_recurrence(call: Call, options: Options, seq: Sequences) -> tuple[Tensor, Tensor]:
    """`ops.run_recurrence` over the sequences of `seq`, whose rows are cut: o of this part, and its final state.

    The last part waits for its state and takes one pass. Every other part runs once from zero, or the first one from
    the carried state, and then adds the contribution of its incoming state. Let F be the features and V the values of
    a head.

    A delta rule computes the contribution by a second pass, over the tokens of documents that began before
    the part. Its width is F where the state passes through to a next part, since it gives M too, else V.
    Linear attention multiplies exp(Σ g) q with the state, without a pass.
    """
    with no_autocast(call.q):
        call, options = with_features(call, options)
    return _run_part(call, options._replace(output_final_state=True, mode="chunk"), seq)


@torch.compiler.disable  # which tokens continue a document depends on values
def _run_part(call: Call, options: Options, seq: Sequences) -> tuple[Tensor, Tensor]:
    """`cut_recurrence` on this part of the rows, with mapped q and k."""
    rank = seq.parts.context.rank
    if rank and rank == seq.parts.context.size - 1:  # nobody waits for its state
        return _run_last_part(call, options, seq)

    parts, v = seq.parts, call.v
    linear = call.beta is None
    rows, tokens = seq.on_device(v.device).rows, parts.tokens.to(v.device)
    assert rows is not None
    continued = (parts.continued if rank else parts.continued[:0]).to(v.device)

    # Carried states enter at the first part, and are in its U.
    initial_state = None if rank else call.initial_state
    call = call._replace(initial_state=initial_state, cu_seqlens=seq.cu_seqlens)
    o, ends = _run(call, options)

    # The tokens of documents that began before this part, and their products with its incoming state.
    some: Any = None
    products: Any = None
    M: Any = None
    if len(continued):
        every = len(tokens) == v.shape[1]  # then no copy is needed
        of_tokens: Any = (x if x is None or every else x[:, tokens] for x in call[:7])
        some = Call(*of_tokens, cu_seqlens=parts.bounds)
        if linear:
            products, M = _decayed(some, options)
        elif rank in parts.passing:
            products, M = _transitions(some, options)

    # U [B, HV, F, V], passed_on [B, HV, F, F or 1]: zero for rows through which nothing passes.
    U, passed_on = ends.index_select(0, rows.last), None
    if parts.passing:
        passed_on = U.new_zeros(*U.shape[:3], 1 if linear else U.shape[2])
        if rank in parts.passing:
            through = parts.through.to(v.device)
            M = M.expand(-1, *passed_on.shape[1:])
            passed_on = passed_on.index_copy(0, continued[through], M[through])
    # Every part calls this, also one that continues nothing: the others wait for it.
    o, S = _Incoming.apply(o, parts.context, passed_on, U)
    if not len(continued):
        return o, ends

    S = S.index_select(0, continued)  # [n, HV, F, V]
    if products is None:
        # A delta rule that passes nothing on: with values 0, o is what S alone contributes.
        some = some._replace(v=torch.zeros_like(some.v), initial_state=S)
        more, reached = _run(some, options)
        more = more[0]
    else:
        # [HV, L, F] times [HV, F, V] for each document.
        added = [p.transpose(0, 1) @ s.to(p.dtype) for p, s in zip(products, S, strict=True)]
        more, reached = torch.cat(added, 1).transpose(0, 1), _apply(M, S)
    # o and the final states are linear in the incoming state: its share adds to the pass from zero.
    o = o.index_add(1, tokens, more.to(o.dtype)[None])
    return o, ends.index_add(0, rows.first[continued], reached)


def _run_last_part(call: Call, options: Options, seq: Sequences) -> tuple[Tensor, Tensor]:
    """`_run_part` on the last part: it waits for its state and takes one pass."""
    parts, v = seq.parts, call.v
    rows, continued = seq.on_device(v.device).rows, parts.continued.to(v.device)
    assert rows is not None

    F, V = call.k.shape[3], v.shape[3]
    shape, dtype = (parts.B, v.shape[2], F), wide_dtype(*call[:7])
    U = v.new_zeros(*shape, V, dtype=dtype)
    width = 1 if call.beta is None else F
    # Zeros, because nothing follows; but all must exchange equal shapes.
    M = v.new_zeros(*shape, width, dtype=dtype) if parts.passing else None
    # v in place of o, which needs S first: this too ties every backward to the exchange.
    v, S = _Incoming.apply(v, parts.context, M, U)

    # Documents that begin here start from zero, [N, HV, F, V].
    S = S.index_select(0, continued)
    begin = S.new_zeros(len(parts.past), *S.shape[1:]).index_copy(0, rows.first[continued], S)
    call = call._replace(v=v, initial_state=begin, cu_seqlens=seq.cu_seqlens)
    return _run(call, options)


def _run(call: Call, options: Options) -> tuple[Tensor, Tensor]:
    o, state = run_recurrence(call, options)
    assert state is not None
    return o, state


def _transitions(call: Call, options: Options) -> tuple[list[Tensor], Tensor]:
    """The outputs of documents as products with their initial states, and M.

    Returns for each document `[L, HV, F]`, which times a state `[HV, F, V]` is its output; and M
    `[n, HV, F, F]`.
    """
    bounds, v = call.cu_seqlens, call.v
    assert bounds is not None
    F, HV = call.k.shape[-1], v.shape[2]
    # From the identity and with values 0, the final state is M; o reads the products up to each token.
    unit = torch.eye(F, dtype=at_least_fp32(v).dtype, device=v.device)
    unit = unit.expand(len(bounds) - 1, HV, F, F).contiguous()

    # The values are zero, and have another width than `write`.
    silent = v.new_zeros(*v.shape[:3], F)
    products, M = _run(call._replace(v=silent, write=None, initial_state=unit), options)
    return list(products[0].split(bounds.diff().tolist())), M


def _decayed(call: Call, options: Options) -> tuple[list[Tensor], Tensor]:
    """`_transitions` of linear attention; M is `[n, HV, F or 1, 1]`."""
    assert call.cu_seqlens is not None
    assert options.scale is not None
    q, g = call.q[0], call.g
    lengths = call.cu_seqlens.diff().tolist()
    queries = (options.scale * at_least_fp32(q)).repeat_interleave(group_of(call), 1).split(lengths)
    if g is None:
        return list(queries), queries[0].new_ones(len(lengths), call.v.shape[2], 1, 1)

    g = at_least_fp32(g[0])
    g = g if g.dim() == 3 else g[..., None]  # [M, HV, F or 1]
    sums = [x.cumsum(0) for x in g.split(lengths)]  # [L, HV, F or 1] each
    products = [x * total.exp() for x, total in zip(queries, sums, strict=True)]
    return products, torch.stack([total[-1] for total in sums]).exp()[..., None]
