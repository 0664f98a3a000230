"""Layers of the mixers and the decoder: norms, rotary positions, the short convolution."""

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .plans import LOCAL, SHARED, share
from .sequences import Sequences


def at_least_fp32(x: Tensor) -> Tensor:
    # A cast to the same dtype costs too.
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    # torch does not support it on meta.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def no_autocast(x: Tensor):
    """A context without autocast on the device of x."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def unrecorded() -> bool:
    """Whether calls are neither recorded for gradients nor compiled."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def on_host():
    """A context in which tensors without a named device are on the host, whatever the default device is."""
    # torch.compile cannot trace the question.
    if torch.compiler.is_compiling() or torch.get_default_device().type == "cpu":
        return nullcontext()
    return torch.device("cpu")


def linear_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a Linear layer reads x: autocast's where that is on, else that of x."""
    if x.dtype == torch.float64 or not autocasts(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def altered(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its class's `forward`: hooks, a patch, a parametrization.

    A kernel that reads the module's tensors would leave it out. accelerate's hooks only move tensors.
    """
    fields = module.__dict__
    return bool(
        _hooked(fields)
        or "parametrizations" in fields["_modules"]
        or _patched(fields)
        or _has_any_global_hook()
    )


def overrides(module: nn.Module) -> bool:
    """Whether a class from outside gives a module of this package or torch another `forward`."""
    return not type(module).forward.__module__.startswith((f"{__package__}.", "torch."))


def any_observed(modules: Iterable[nn.Module]) -> bool:
    """Whether code from outside sees shapes of inputs or outputs of the modules or their children.

    Such are hooks and patches of `forward`. Hooks of torch.distributed only move weights.
    """
    if _has_any_global_hook():
        return True
    remaining = [*modules]
    while remaining:
        fields = remaining.pop().__dict__
        if (_hooked(fields) and _foreign_hooks(fields)) or _patched(fields):
            return True
        remaining += [child for child in fields["_modules"].values() if child is not None]
    return False


def _hooked(fields: dict[str, Any]) -> bool:
    """Whether a module with these fields has hooks."""
    # Read one by one, because this runs for every layer of every token.
    return bool(
        fields["_forward_hooks"]
        or fields["_forward_pre_hooks"]
        or fields["_backward_hooks"]
        or fields["_backward_pre_hooks"]
    )


def _patched(fields: dict[str, Any]) -> bool:
    """Whether a module's `forward` was replaced, but by accelerate or by its own compiled form."""
    if "forward" not in fields or "_hf_hook" in fields:
        return False
    return not hasattr(fields["forward"], "_torchdynamo_orig_callable")  # torch.compile sets it


def _foreign_hooks(fields: dict[str, Any]) -> bool:
    """Whether some hook of a module with these fields is not of torch.distributed."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    origins = [
        getattr(hook, "__module__", None) for kind in kinds for hook in fields[kind].values()
    ]
    return not all((origin or "").startswith("torch.distributed.") for origin in origins)


class _NoContext:
    def save_for_backward(self, *tensors) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def run(function: type[torch.autograd.Function], *inputs):
    """`function.apply(*inputs)`; without gradients its forward alone, for half the cost with one token."""
    return (
        function.apply(*inputs)
        if torch.is_grad_enabled()
        else function.forward(_NoContext(), *inputs)
    )


def once_differentiable(backward: Callable) -> Callable:
    """A Function's backward whose result has no derivative. Raises RuntimeError where one could be asked for.

    torch's decorator alone leaves what lies behind it out of a second derivative by `torch.autograd.grad`.
    """
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            name = type(ctx).__name__
            raise RuntimeError(
                f"create_graph=True: {name} has no derivative; take the difference of two gradients"
            )
        return once(ctx, *grads)

    return run


class _Direction(torch.autograd.Function):
    """Autograd's backward would pass over x about ten times."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).sqrt_()
        direction = x / length
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(direction, length)
        return direction, length

    @staticmethod
    @once_differentiable
    def backward(
        ctx, d_direction: Tensor | None, d_length: Tensor | None
    ) -> tuple[Tensor | None, None]:
        direction, length = ctx.saved_tensors
        if d_direction is None:
            return None if d_length is None else direction * d_length, None
        # d x = (d_direction − direction (direction·d_direction − length·d_length)) / length
        along = (direction * d_direction).sum(-1, keepdim=True)
        along = along if d_length is None else along - length * d_length
        return torch.addcmul(d_direction, direction, along, value=-1).div_(length), None


def direction(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x/‖x‖ and ‖x‖ over the last dimension, kept: ‖x‖ = √(Σx² + eps), whose gradient at x = 0 is 0."""
    if torch.compiler.is_compiling():
        # torch.compile fuses this, and cannot give a Function a number that may change.
        length = (x.square().sum(-1, keepdim=True) + eps).sqrt()
        return x / length, length
    return run(_Direction, x, eps)


@torch.no_grad()  # rounding has no gradient
def excess(k: Tensor) -> Tensor:
    """max(1, Σk²) over the last dimension, in fp32 at least. A step β divided by it keeps β‖k‖² ≤ 2 for keys that
    rounding made longer than 1."""
    return at_least_fp32(k).square().sum(-1).clamp_min(1)


def fp32_parameter(*sizes: int) -> nn.Parameter:
    """A parameter of an `Fp32Module`, whose `initial()` fills it."""
    return nn.Parameter(torch.empty(*sizes, dtype=torch.float32))


class Fp32Module(nn.Module):
    """A module whose parameters stay fp32 when the model is cast, and have no weight decay.

    It is a module of its own so that sharding wrappers can keep its dtype too. Create its parameters by
    `fp32_parameter`, or with an explicit `dtype=torch.float32`: transformers changes the default dtype while it
    builds a model.
    """

    tp_style: str | None = LOCAL
    """Style of a tensor-parallel plan, `plans.py`: of a mixer's, the first dimension is of heads. None: whole."""

    def _apply(self, fn, recurse=True):
        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            return (
                moved if moved.dtype == t.dtype or moved.dtype.itemsize >= 4 else t.to(moved.device)
            )

        return super()._apply(keep_precision, recurse)


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) ⊙ weight, in fp32, returned in `linear_dtype(x)`: Linear layers read it."""

    tp_style = SHARED  # in mixers: each head has the same weight

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        weight, size = self.weight.to(wide.dtype), len(self.weight)
        if x.device.type == "cpu":  # where torch's own backward takes twice as long
            # √size · x/√(Σx² + size·ε) = x/√(mean x² + ε)
            return (direction(wide, size * self.eps)[0] * (weight * size**0.5)).to(linear_dtype(x))
        return F.rms_norm(wide, (size,), weight, self.eps).to(linear_dtype(x))

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """(x − mean x) / √(var x + ε) ⊙ weight + bias, in fp32, returned in `linear_dtype(x)`."""

    def forward(self, input: Tensor) -> Tensor:
        wide = at_least_fp32(input)
        weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
        y = F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps)
        return y.to(linear_dtype(input))


def rotary_angles(
    positions: Tensor,
    size: int,
    theta: float,
    dtype: torch.dtype,
    scaling: dict[str, float] | None = None,
) -> Tensor:
    """position · theta^(−2i/size) for i < size/2 (RoFormer, arXiv 2104.09864), `[…, size/2]`.

    The result is at least fp32, and fp64 for inputs of that `dtype`. scaling: of `slow_down`.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=wide, device=positions.device) / size)
    if scaling:
        frequencies = slow_down(frequencies, **scaling)
    return positions[..., None].to(wide) * frequencies


@functools.cache
def rotary_frequencies(size: int, theta: float, device: torch.device) -> Tensor:
    """`rotary_angles` of position 1 `[size/2]`, kept: a decoded token launches nothing for it."""
    return rotary_angles(torch.ones((), device=device), size, theta, torch.float32)


def slow_down(
    frequencies: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Llama 3.1's frequencies for a longer context than the original one (arXiv 2407.21783).

    Those below low_freq_factor turns in the original context are divided by `factor`. Those above
    high_freq_factor turns stay. Between them the share that stays grows linearly.
    """
    # Turns of each pair in the original context.
    turns = frequencies * (original_max_position_embeddings / (2 * math.pi))
    stays = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies * (stays + (1 - stays) / factor)


def place_angles(
    x: Tensor, seq: Sequences, size: int, theta: float, scaling: dict[str, float] | None = None
) -> Tensor:
    """`rotary_angles` of the positions of x `[B, T, …]`, `[B or 1, T, size/2]`.

    In images the first half of the pairs has the angles of the row, the second those of the column; size is a
    multiple of 4 there.
    """
    places = seq.positions(x.shape[1], x.device)
    if seq.grid is None:
        return rotary_angles(places, size, theta, x.dtype, scaling)
    axes = places // seq.grid[1], places % seq.grid[1]  # row and column, [B or 1, T]
    return torch.cat([rotary_angles(axis, size // 2, theta, x.dtype, scaling) for axis in axes], -1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i+R/2}) of a head's first R entries by its token's angles, in fp32 at least.

    x `[B, T, H, K]`, angles `[B or 1, T, R/2]`, R ≤ K. Pairs span the halves as in transformers and Llama's
    weights.
    """
    half = angles.shape[-1]
    a, b, rest = at_least_fp32(x).split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = (f(angles)[..., None, :].to(a.dtype) for f in (torch.cos, torch.sin))
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class _CausalDepthwise(torch.autograd.Function):
    """y_t = Σ_i w_i ⊙ x_{t+i} over `[B, W−1+T, D]`, whose first W−1 rows are the past. Sums are fp32.

    weight `[W, D]`; returned: the t of the outputs, int64; None: all T. Autograd's backward would zero-fill a whole
    buffer for each of the W shifted views.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, returned: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, returned)
        width, steps, dtype = len(weight), x.shape[1] - len(weight) + 1, x.dtype
        # Strided operands are slow on CPUs.
        x, weight = at_least_fp32(x), at_least_fp32(weight).contiguous()
        y = x[:, :steps] * weight[0]  # the oldest tap
        for i in range(1, width):
            y.addcmul_(x[:, i : i + steps], weight[i])
        if returned is not None:
            return y.to(dtype).index_select(1, returned)
        # A view: compiled, torch 2.11 drops gradients of a tensor that changed in place.
        return y.to(dtype).view_as(y)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, returned = ctx.saved_tensors
        steps, dtype = x.shape[1] - len(weight) + 1, dy.dtype
        x, weight, dy = at_least_fp32(x), at_least_fp32(weight).contiguous(), at_least_fp32(dy)
        if returned is not None:
            # [B, T, D], 0 where nothing was returned
            dy = dy.new_zeros(len(dy), steps, dy.shape[2]).index_copy_(1, returned, dy)
        dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
        for i in range(len(weight)):
            rows = slice(i, i + steps)
            dx[:, rows].addcmul_(dy, weight[i])  # y_t reads x_{t+i}
            dweight[i] += (dy * x[:, rows]).sum((0, 1))
        return dx.to(dtype), dweight.to(dtype), None


class ShortConv(nn.Module):
    """Causal depthwise convolution over time, separate for each sequence; centred where tokens see both ways.
    image: over the rows and columns of a grid of patches instead, `width` × `width` and centred.

    `forward(x, seq, state, carry)`: x `[B, T, D]`; state `[N, W−1, D]`, the inputs before the first token,
    oldest first (None: zeros). Returns the output and, with `carry`, the new state.
    copies: number of groups of `size` channels that share the filters.
    """

    def __init__(self, size: int, width: int, copies: int = 1, image: bool = False):
        super().__init__()
        self.copies = copies
        if width < 2:
            raise ValueError(f"conv_size={width}: a short convolution needs at least 2 taps")
        taps = (width, width) if image else (width,)
        # The layout of nn.Conv1d and nn.Conv2d.
        self.weight = nn.Parameter(torch.empty(size, 1, *taps))

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def filters(self, x: Tensor) -> Tensor:
        """The filters of the channels of x, `[D, W]`, or `[D, W, W]` over images."""
        weight = share(self.weight).squeeze(1)
        copies = x.shape[-1] // len(weight)
        return weight.repeat(copies, *[1] * (weight.dim() - 1)) if copies > 1 else weight

    def forward(
        self, x: Tensor, seq: Sequences, state: Tensor | None = None, carry: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        weight = self.filters(x)
        if weight.dim() == 3:  # of images, over a grid of patches
            assert seq.grid is not None, "the convolution of an image needs its grid"
            image = x.unflatten(1, seq.grid).movedim(-1, 1)  # [B, D, rows, columns]
            taps = weight.to(x.dtype)[:, None]
            y = F.conv2d(image, taps, padding=self.width // 2, groups=len(taps))
            return y.movedim(1, -1).flatten(1, 2), None

        gap, weight = self.width - 1, weight.T.to(x.dtype)  # [W, D]
        after = self.width // 2 if seq.bidirectional else 0  # of a centred one

        if seq.cu_seqlens is None:
            if after:
                return _CausalDepthwise.apply(
                    F.pad(x, (0, 0, gap - after, after)), weight, None
                ), None
            past = x.new_zeros(x.shape[0], gap, x.shape[2]) if state is None else state.to(x.dtype)
            laid = torch.cat([past, x], 1)  # [B, W−1+T, D]
            # Cloned, because a view of W−1 rows would keep the whole tensor alive.
            past = laid[:, x.shape[1] :].clone() if carry else None
            return _CausalDepthwise.apply(laid, weight, None), past

        # Packed: the sequences, each after its own W−1 rows of past, form one dense row.
        tokens, gaps = seq.with_gaps(gap, x.device)  # [ΣT], [N, W − 1]
        # [ΣT + N·(W−1) + after, D]
        laid = x.new_zeros(len(tokens) + gaps.numel() + after, x.shape[2]).index_copy_(
            0, tokens, x[0]
        )
        if state is not None:
            laid = laid.index_copy(0, gaps.flatten(), state.to(x.dtype).flatten(0, 1))
        # Output t reads rows t to t + W − 1: a token's is W − 1 rows before it, or fewer if centred.
        y = _CausalDepthwise.apply(laid[None], weight, tokens - gap + after)
        # A sequence's last W−1 rows are `length` rows after those of its gap.
        return y, laid[gaps + seq.on_device(x.device).cu_seqlens.diff()[:, None]] if carry else None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}"


class PreviousToken(nn.Module):
    """x_{t−1} for x `[B, T, D]`, 0 before each sequence: a `ShortConv` with the taps (1, 0) and no parameters."""

    width = 2
    forward = ShortConv.forward

    def filters(self, x: Tensor) -> Tensor:
        return F.pad(x.new_ones(x.shape[-1], 1), (0, 1))  # [D, 2], the older tap first


class PatchEmbedding(nn.Module):
    """Images `[B, C, H, W]` to a token for each patch, row by row, `[B, T, D]`, and the grid (rows, columns).

    learnt: a table of positions `[T, D]` is added. Images of another size than image_size × image_size are
    refused, or with `interpolate` read with that table interpolated (bicubic).
    """

    def __init__(
        self, channels: int, image_size: int, patch_size: int, hidden_size: int, learnt: bool
    ):
        super().__init__()
        self.channels, self.image_size, self.patch_size = channels, image_size, patch_size
        self.side = image_size // patch_size
        self.projection = nn.Linear(channels * patch_size**2, hidden_size)
        self.positions = nn.Embedding(self.side**2, hidden_size) if learnt else None

    def forward(self, images: Tensor, interpolate: bool = False) -> tuple[Tensor, tuple[int, int]]:
        size, patch = self.image_size, self.patch_size
        if images.dim() != 4 or images.shape[1] != self.channels:
            raise ValueError(
                f"pixel_values must be [batch, {self.channels}, height, width], got {list(images.shape)}"
            )
        H, W = images.shape[2:]
        if (size, size) != (H, W) and not interpolate:
            raise ValueError(
                f"images are {H} × {W}, the model reads {size} × {size}: resize them, or set "
                "interpolate_pos_encoding"
            )
        if H % patch or W % patch:
            raise ValueError(f"images are {H} × {W}: both must be multiples of patch_size={patch}")
        grid = H // patch, W // patch
        # Patches as rows, [B, T, C·patch²]
        x = self.projection(
            F.unfold(images.to(self.projection.weight.dtype), patch, stride=patch).mT
        )
        if self.positions is not None:
            table = self.positions.weight
            if grid != (self.side, self.side):
                # [1, D, side, side]
                square = at_least_fp32(table).T.unflatten(1, (self.side, self.side))[None]
                table = (
                    F.interpolate(square, grid, mode="bicubic", antialias=True)
                    .flatten(2)[0]
                    .T.to(x.dtype)
                )
            x = x + table
        return x, grid
