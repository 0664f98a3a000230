"""What the mixers and the decoder are made of: norms, the GLU, the short convolution, the chunked loss."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def no_autocast(x: Tensor):
    """A context in which products on the device of x keep their operands' precision."""
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):  # meta has no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


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

    def spread(self, gap: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the tokens and the gaps lie if `gap` rows are put before each sequence.

        Returns int64 `[ΣT]` and `[N, gap]` rows of the layout of ΣT + N·gap rows; made once per gap and
        device.
        """
        key = ("spread", gap, device)
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

    def places(self, T: int, width: int, device: torch.device) -> Tensor:
        """Where each sequence's last `width` tokens stand in it after this call of T columns.

        int64 `[N or 1, width]`, < 0 before the first token.
        """
        if self.cu_seqlens is None:
            return self.positions(T, device)[:, :1] + torch.arange(T - width, T, device=device)
        key = ("places", width, device)
        if key not in self._made:
            ends = self.lengths if self.past is None else self.lengths + self.past
            places = ends[:, None] + torch.arange(-width, 0)
            self._made[key] = places.to(device, non_blocking=True)
        return self._made[key]

    def joined(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """Each sequence's tokens of this call behind those that it kept, its last in the last column.

        x `[B, T, …]` or `[1, ΣT, …]`, kept `[N, R, …]` (None: R = 0) to `[N, R + L, …]`, L the longest
        sequence of this call; zeros where a sequence has no such token.
        """
        R = 0 if kept is None else kept.shape[1]
        if self.cu_seqlens is None:
            return x if kept is None else torch.cat([kept.to(x.dtype), x], 1)
        key = ("joined", R, x.device)
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

    def parted(self, x: Tensor, T: int) -> Tensor:
        """`joined` without anything kept, undone: `[N, L, …]` to `[B, T, …]` or `[1, ΣT, …]`."""
        if self.cu_seqlens is None:
            return x
        key = ("parted", x.device)
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

    def opened(self, state: Tensor) -> Tensor:
        """What the sequences begin with: rows' states `[B, …]` to `[N, …]`, zeros but where a row goes on."""
        assert self.rows is not None
        key = ("opened", state.device)
        if key not in self._made:
            carried = self.rows.carried
            pair = (self.rows.first[carried], carried.nonzero().squeeze(1))
            self._made[key] = tuple(x.to(state.device, non_blocking=True) for x in pair)
        sequences, rows = self._made[key]
        # Selected, never multiplied by 0: what an uncarried row holds may be NaN.
        empty = state.new_zeros(len(self.lengths), *state.shape[1:])
        return empty.index_copy(0, sequences, state.index_select(0, rows))

    def closed(self, state: Tensor) -> Tensor:
        """What the rows end in: sequences' states `[N, …]` to `[B, …]`, without history."""
        assert self.rows is not None
        key = ("closed", state.device)
        if key not in self._made:
            self._made[key] = self.rows.last.to(state.device, non_blocking=True)
        return state.detach().index_select(0, self._made[key])

    def behind(self, kept: int, wanted: Tensor, device: torch.device) -> tuple["Sequences", Tensor, Tensor]:
        """These sequences with tokens of earlier calls in front of those that go on.

        Of `kept` tokens a row, its first sequence gets the last `wanted` (int64 `[N]`, on the host).
        Returns the longer sequences, ΣT' tokens in all; int64 `[ΣT']`, where each of these stands in the ΣT
        tokens with B·kept behind them; and int64 `[ΣT]`, where this call's tokens are among the ΣT'.
        """
        assert self.cu_seqlens is not None
        assert self.rows is not None
        key = ("behind", kept, tuple(wanted.tolist()), device)
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


class Fp32Module(nn.Module):
    """A module of decays, exponents, angles, landmarks: fp32 when a model is cast, and without weight decay.

    A module of its own, so that a sharding wrapper can keep it so as well. Create them with an explicit
    `dtype=torch.float32`: transformers builds models under the dtype that was asked for.
    """

    def _apply(self, fn, recurse=True):
        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype or moved.dtype.itemsize >= 4 else t.to(moved.device)

        return super()._apply(keep_precision, recurse)


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) ⊙ weight, in fp32, returned in the dtype of x."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """(x − mean x) / √(var x + ε) ⊙ weight + bias, in fp32, returned in the dtype of x."""

    def forward(self, input: Tensor) -> Tensor:
        wide = at_least_fp32(input)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        return F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(input.dtype)


def rotary_angles(positions: Tensor, size: int, theta: float, dtype: torch.dtype) -> Tensor:
    """position · theta^(−2i/size) for i < size/2 (RoFormer, arXiv 2104.09864), `[…, size/2]`.

    For inputs in `dtype`: in fp32 at least.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=wide, device=positions.device) / size)
    return positions[..., None].to(wide) * frequencies


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the pairs (x_i, x_{i+K/2}) of each head by its token's angles, in fp32 at least.

    x `[B, T, H, K]`, angles `[B or 1, T, K/2]`; halves are paired, as transformers and Llama's weights do.
    """
    wide = at_least_fp32(x)
    cos, sin = (f(angles)[..., None, :].to(wide.dtype) for f in (torch.cos, torch.sin))
    a, b = wide.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class GLU(nn.Module):
    """W_down(SiLU(W_gate x) ⊙ W_up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # what Linear makes of it too, but each for itself
        return self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows)).view(x.shape)


class _CausalDepthwise(torch.autograd.Function):
    """y_t = Σ_i w_i ⊙ x_{t+i} over a layout `[B, W−1+T, D]` whose first W−1 rows are the past; backward by
    hand, because autograd would zero-fill a whole buffer for each of the W shifted views. Sums are fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # x [B, W-1+T, D], weight [W, D]
        ctx.save_for_backward(x, weight)
        width, steps, dtype = len(weight), x.shape[1] - len(weight) + 1, x.dtype
        x, weight = at_least_fp32(x), at_least_fp32(weight)
        y = x[:, :steps] * weight[0]
        for i in range(1, width):
            y.addcmul_(x[:, i : i + steps], weight[i])
        return y.to(dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dtype, steps = dy.dtype, dy.shape[1]
        x, weight, dy = (at_least_fp32(tensor) for tensor in (*ctx.saved_tensors, dy))
        dx = torch.zeros_like(x)
        dweight = torch.empty_like(weight)
        for i in range(len(weight)):
            dx[:, i : i + steps].addcmul_(dy, weight[i])
            dweight[i] = (dy * x[:, i : i + steps]).sum((0, 1))
        return dx.to(dtype), dweight.to(dtype)


class ShortConv(nn.Module):
    """Causal depthwise convolution over time that never crosses from one sequence into the next.

    `forward(x, seq, state, carry)`: x `[B, T, D]`; state `[N, W−1, D]`, the inputs before the first token
    (None: zeros).
    Returns the output and, where `carry` asks for it, the new state, oldest input first.
    copies: so many groups of `size` channels share the filters.
    """

    def __init__(self, size: int, width: int, copies: int = 1):
        super().__init__()
        self.copies = copies
        if width < 2:
            raise ValueError(f"conv_size={width}: a short convolution needs at least 2 taps")
        self.weight = nn.Parameter(
            torch.empty(size, 1, width)
        )  # nn.Conv1d's layout, as other libraries save it

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def forward(
        self, x: Tensor, seq: Sequences, state: Tensor | None = None, carry: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        gap, weight = self.width - 1, self.weight.squeeze(1).T.to(x.dtype)
        weight = weight.repeat(1, self.copies) if self.copies > 1 else weight
        if seq.cu_seqlens is None:
            past = x.new_zeros(x.shape[0], gap, x.shape[2]) if state is None else state.to(x.dtype)
            laid = torch.cat([past, x], 1)
            # The clone lets go of the text: a view would keep all of it alive for W−1 rows.
            return _CausalDepthwise.apply(laid, weight), laid[:, x.shape[1] :].clone() if carry else None
        # Packed: every sequence gets its own W−1 rows of past, then all of them are one dense row.
        tokens, gaps = seq.spread(gap, x.device)
        laid = x.new_zeros(len(tokens) + gaps.numel(), x.shape[2]).index_copy(0, tokens, x[0])
        if state is not None:
            laid = laid.index_copy(0, gaps.flatten(), state.to(x.dtype).flatten(0, 1))
        y = _CausalDepthwise.apply(laid[None], weight).index_select(1, tokens - gap)
        # A sequence's last W−1 rows lie `length` behind its gap's rows, whatever its length.
        return y, laid[gaps + seq.lengths.to(x.device)[:, None]] if carry else None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}"


class _LinearCrossEntropy(torch.autograd.Function):
    """Σ cross-entropy of softmax(h Wᵀ), a block of rows at a time: all logits never exist at once.

    The gradients are formed with the block's logits in hand and only scaled in the backward, so that the
    head's product is computed once, as it is without blocks.
    """

    @staticmethod
    def forward(
        ctx,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        block: int,
        training: bool = True,
        z_loss: float = 0.0,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=h.device)
        # Under no_grad a weight still says that it needs a gradient: `training` has grad mode's own word.
        need_h, need_w = (training and needed for needed in ctx.needs_input_grad[:2])
        dh = torch.empty_like(h) if need_h else None
        dw = (
            torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            if need_w
            else None
        )
        for start in range(0, len(h), block):
            rows, index = h[start : start + block], labels[start : start + block, None]
            # Rows that do not count are zeroed, not left out: gathering the others costs a device sync.
            ignored = index == ignore_index
            index = index.masked_fill(ignored, 0)
            logits = rows @ weight.T
            logits = logits if logits.dtype == torch.float64 else logits.float()
            lse = logits.logsumexp(-1, keepdim=True)
            total += (lse - logits.gather(-1, index)).masked_fill_(ignored, 0).sum(dtype=torch.float64)
            if not (need_h or need_w):
                continue
            dlogits = logits.sub_(lse).exp_()
            if z_loss:
                dlogits.mul_(1 + 2 * z_loss * lse)  # the softmax is lse's gradient
            dlogits.scatter_add_(-1, index, dlogits.new_full(index.shape, -1.0))
            dlogits = dlogits.masked_fill_(ignored, 0).to(rows.dtype)
            if dh is not None:
                torch.mm(dlogits, weight, out=dh[start : start + block])
            if dw is not None:
                dw += dlogits.T @ rows
        ctx.save_for_backward(dh, dw)
        ctx.weight_dtype = weight.dtype
        return total.to(torch.float64 if h.dtype == torch.float64 else torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal: Tensor):
        dh, dw = ctx.saved_tensors
        dh = None if dh is None else dh * dtotal.to(dh.dtype)
        dw = None if dw is None else (dw * dtotal.to(dw.dtype)).to(ctx.weight_dtype)
        return dh, dw, None, None, None, None, None


def linear_cross_entropy(
    h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100, z_loss: float = 0.0
) -> Tensor:
    """Sum over rows of −log softmax(h Wᵀ)[label], rows labelled `ignore_index` left out.

    h `[M, D]`, weight `[V, D]`, labels int64 `[M]`; a scalar in fp32 (fp64 for fp64
    inputs), 0 when no row counts.
    z_loss: the gradient is that of the sum + z_loss · Σ logsumexp(h Wᵀ)² (PaLM, arXiv 2204.02311); the value
    stays the cross-entropy, so that what is logged means the same with it and without.
    """
    if torch.is_autocast_enabled(h.device.type):
        dtype = torch.get_autocast_dtype(h.device.type)
        h, weight = h.to(dtype), weight.to(dtype)
    block = max(64, (2**22 if h.device.type == "cpu" else 2**26) // weight.shape[0])
    return _LinearCrossEntropy.apply(h, weight, labels, ignore_index, block, torch.is_grad_enabled(), z_loss)
