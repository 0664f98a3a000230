"""What the mixers and the decoder are made of: norms, the GLU, the short convolution, the chunked loss."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sequences import Sequences


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def no_autocast(x: Tensor):
    """A context in which products on the device of x keep their operands' precision."""
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):  # meta has no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


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
        tokens, gaps = seq.with_gaps(gap, x.device)
        laid = x.new_zeros(len(tokens) + gaps.numel(), x.shape[2]).index_copy(0, tokens, x[0])
        if state is not None:
            laid = laid.index_copy(0, gaps.flatten(), state.to(x.dtype).flatten(0, 1))
        y = _CausalDepthwise.apply(laid[None], weight).index_select(1, tokens - gap)
        # A sequence's last W−1 rows lie `length` behind its gap's rows, whatever its length.
        return y, laid[gaps + seq.lengths.to(x.device)[:, None]] if carry else None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}"
