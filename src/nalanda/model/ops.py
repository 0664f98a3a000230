"""The delta rule, with and without decay: its contract, its reference and the torch path.

For every head, with a state S of [K, V] (DeltaNet, arXiv 2406.06484; Gated DeltaNet, arXiv 2412.06464):

    S_t = exp(g_t) (I − β_t k_t k_t⊤) S_{t−1} + β_t k_t v_t⊤        o_t = scale · S_t⊤ q_t

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences. Inside the
chunkwise form: C tokens a chunk, R chunks at hand ("rows"), P = R·HV pairs of a chunk and a head.
"""

import functools
import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_API = 1
try:  # this file travels with checkpoints, to places where the kernels may be missing or newer
    import nalanda_kernels
except ImportError:
    _KERNELS = {}
else:
    _KERNELS = nalanda_kernels.KERNELS if nalanda_kernels.API == _API else {}
    if nalanda_kernels.API != _API:
        theirs = nalanda_kernels.API
        warnings.warn(f"using the torch path: nalanda_kernels has API {theirs}, not {_API}", stacklevel=2)

FeatureMap = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Tokens of one head that are worked on at once. On a CPU about as many as the last-level cache holds (6 kB
# each at K = V = 128); elsewhere many, to fill the device within bounded memory.
_CPU_TOKENS = 4096
_DEVICE_TOKENS = 262144


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    feature_map: FeatureMap | None = None,
    qk_norm: str | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    mode: str = "chunk",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Runs `S_t = exp(g_t)(I − β_t k_t k_t⊤) S_{t−1} + β_t k_t v_t⊤`, `o_t = scale · S_t⊤ q_t` over time.

    Args:
        q: `[B, T, H, K]`, raw when a map or a norm is given; k likewise.
        k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H: head h of q and k serves HV/H consecutive heads of v.
        beta: `[B, T, HV]`. The state cannot grow while `0 ≤ β‖k‖² ≤ 2`.
        g: `[B, T, HV]`, natural logarithm of the decay, ≤ 0; None for no decay.
        feature_map: maps (q, k) to (φ_q, φ_k), possibly of another width K; computed in fp32.
        qk_norm: None, or "l2": `x / √(Σx² + 1e-6)` over the features, after the map and also in fp32.
        scale: of the readout; by default K^-0.5, with the K after the map.
        initial_state: `[N, HV, K, V]`, zero by default; N is B, or the number of sequences in `cu_seqlens`.
        output_final_state: whether to return the state after each sequence's last token.
        cu_seqlens: `[N + 1]` integers, the bounds of sequences that are packed into one row (B = 1) and do
            not see one another; empty ones are legal. A CPU tensor spares a synchronisation.
        chunk_size: the most tokens in a chunk, a power of two.
        mode: "chunk" for training and prompts, "recurrent" for decoding token by token, "reference" for the
            formula as it stands; gradients flow through each.
        backend: "auto", "torch", "triton" or "fla"; only for "chunk".

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` or None. States, decays and sums
        are fp32 whatever the inputs are; float64 stays float64.

    Raises:
        ValueError: shapes that do not fit, an unknown option, or a backend that is not there.
    """
    _check(q, k, v, beta, g, initial_state, cu_seqlens, chunk_size, mode, qk_norm)
    kernel = _kernel("delta_rule", backend, q.device.type)
    if kernel is not None and mode == "chunk":
        options = {"feature_map": feature_map, "qk_norm": qk_norm, "scale": scale, "chunk_size": chunk_size}
        options |= {"initial_state": initial_state, "output_final_state": output_final_state}
        return kernel(q, k, v, beta, g, cu_seqlens=cu_seqlens, **options)
    with _no_autocast(q.device.type):
        q, k = _map_features(q, k, feature_map, qk_norm)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        if initial_state is not None and initial_state.shape[2] != q.shape[-1]:
            has, needs = initial_state.shape[2], q.shape[-1]
            raise ValueError(
                f"initial_state has K = {has}, but q and k have {needs} features after their map"
            )
        if mode == "chunk":
            grads = (q, k, v, beta, g, initial_state)
            save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in grads)
            core = _chunk_op if torch.compiler.is_compiling() else _ChunkDeltaRule.apply
            o, state, _ = core(q, k, v, beta, g, initial_state, cu_seqlens, scale, chunk_size, save)
        else:
            o, state = _stepwise(mode, q, k, v, beta, g, initial_state, cu_seqlens, scale)
    return o, state if output_final_state else None


def delta_rule_flops(num_heads: int, key_dim: int, value_dim: int, chunk_size: int = 64) -> float:
    """Forward FLOPs a token of the chunkwise form, `key_dim` is K after the map.

    Counts a multiply-add as two and every product in full: three with the state (K·V), KK⊤, QK⊤ and T(βeᵞK)
    (C·K each), T(βV) and (QK⊤)V' (C·V each), the inverse (C²/6). The sequence's length does not enter.
    """
    products = 3 * key_dim * value_dim + chunk_size * (3 * key_dim + 2 * value_dim) + chunk_size**2 / 6
    return 2.0 * num_heads * products


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / √(Σx² + eps)` over the last dimension, in fp32 (or float64) with one cast at the end."""
    y = x.to(_at_least_fp32(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _map_features(q: Tensor, k: Tensor, feature_map: FeatureMap | None, qk_norm: str | None):
    if feature_map is None and qk_norm is None:
        return q, k
    dtype, wide = q.dtype, _at_least_fp32(q)
    q, k = q.to(wide), k.to(wide)
    if feature_map is not None:
        q, k = feature_map(q, k)
    if qk_norm == "l2":
        q, k = l2norm(q), l2norm(k)
    return q.to(dtype), k.to(dtype)


def _at_least_fp32(*tensors: Tensor | None) -> torch.dtype:
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors if x is not None), torch.float32)


def _no_autocast(device_type: str):
    """Autocast would run the op's own products in half precision."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # meta tensors have no autocast
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _kernel(op: str, backend: str, device_type: str) -> Callable | None:
    """The implementation that `backend` names, None for the torch path."""
    known = _KERNELS.get(op, {})
    if backend == "auto":
        fitting = [kernel for kernel in known.values() if device_type in kernel.devices]
        return fitting[0].load() if fitting else None
    if backend == "torch":
        return None
    if backend not in known or device_type not in known[backend].devices:
        there = ", ".join(["auto", "torch", *(name for name, x in known.items() if device_type in x.devices)])
        raise ValueError(f"backend={backend!r} has no {op} for {device_type}: choose one of {there}")
    return known[backend].load()


def _check(q, k, v, beta, g, initial_state, cu_seqlens, chunk_size, mode, qk_norm) -> None:
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q and k must both be [B, T, H, K], not {list(q.shape)} and {list(k.shape)}")
    if v.ndim != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v must be [B, T, HV, V] with the B and T of q {list(q.shape[:2])}, not {list(v.shape)}"
        )
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ValueError(f"v has {v.shape[2]} heads, which is not a multiple of the {q.shape[2]} of q and k")
    for name, x in (("beta", beta), ("g", g)):
        if x is not None and x.shape != v.shape[:3]:
            raise ValueError(f"{name} must be [B, T, HV] = {list(v.shape[:3])}, not {list(x.shape)}")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens must be [N + 1] integers, not {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        if q.shape[0] != 1:
            raise ValueError(
                f"cu_seqlens needs one packed row, B = 1, but B is {q.shape[0]}: flatten the batch"
            )
        sequences = len(cu_seqlens) - 1
    if initial_state is not None:
        state = [sequences, v.shape[2], "K", v.shape[3]]
        if initial_state.ndim != 4 or any(initial_state.shape[i] != state[i] for i in (0, 1, 3)):
            raise ValueError(
                f"initial_state must be [N, HV, K, V] = {state}, not {list(initial_state.shape)}"
            )
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, not {chunk_size}")
    if mode not in ("chunk", "recurrent", "reference"):
        raise ValueError(f"mode must be chunk, recurrent or reference, not {mode!r}")
    if qk_norm not in (None, "l2"):
        raise ValueError(f"qk_norm must be None or 'l2', not {qk_norm!r}")


def _bounds(cu_seqlens: Tensor, length: int) -> tuple[int, ...]:
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to the {length} tokens of the row")
    return bounds


# ------------------------------------------------------------------------------------------ token by token


def _stepwise(mode, q, k, v, beta, g, initial_state, cu_seqlens, scale) -> tuple[Tensor, Tensor]:
    """ "reference" and "recurrent": each sequence of a packed row in turn."""
    dtype = _at_least_fp32(q, k, v, beta, g, initial_state)
    group = v.shape[2] // q.shape[2]
    q, k = (x.to(dtype).repeat_interleave(group, 2) if group > 1 else x.to(dtype) for x in (q, k))
    step = _reference_step if mode == "reference" else _recurrent_step
    bounds = None if cu_seqlens is None else _bounds(cu_seqlens, q.shape[1])
    sequences = q.shape[0] if bounds is None else len(bounds) - 1
    if initial_state is None:
        state = q.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3])
    else:
        state = initial_state.to(dtype)
    q, values, beta = q * scale, v.to(dtype), beta.to(dtype)
    decay = None if g is None else g.to(dtype).exp()

    def run(start: int, stop: int, state: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs = []
        for t in range(start, stop):
            decay_t = None if decay is None else decay[:, t]
            o, state = step(q[:, t], k[:, t], values[:, t], beta[:, t], decay_t, state)
            outputs.append(o)
        return outputs, state

    if bounds is None:
        outputs, state = run(0, q.shape[1], state)
    else:
        outputs, states = [], []
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            some, last = run(start, stop, state[n : n + 1])
            outputs += some
            states.append(last)
        state = torch.cat(states) if states else state
    o = torch.stack(outputs, 1) if outputs else values  # no token at all: v is as empty as o
    return o.to(v.dtype), state


def _reference_step(q, k, v, beta, decay, state):
    """q, k: [B, H, K], v: [B, H, V], beta, decay: [B, H], state: [B, H, K, V]; the formula, term by term."""
    decay = 1 if decay is None else decay[..., None, None]
    erase = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - torch.einsum(
        "bh,bhi,bhj->bhij", beta, k, k
    )
    state = decay * (erase @ state) + torch.einsum("bh,bhk,bhv->bhkv", beta, k, v)
    return torch.einsum("bhk,bhkv->bhv", q, state), state


def _recurrent_step(q, k, v, beta, decay, state):
    """The same as a rank-one update: every product is a matrix and a vector."""
    if decay is not None:
        state = state * decay[..., None, None]
    delta = beta[..., None] * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


# ------------------------------------------------------------------------------------------------- layout


class _Segment:
    """A run of steps that is worked on at once; see `_Layout`."""

    def __init__(self, layout: "_Layout", steps: slice, first: int):
        self.layout, self.steps, self.counts = layout, steps, layout.counts[steps]
        self.rows = sum(self.counts)
        if not layout.plain:
            chunk, device = layout.chunk, layout.device
            token, real = (
                x[first * chunk : (first + self.rows) * chunk] for x in (layout.token, layout.real)
            )
            self.token = token.to(device)
            self.padding = (~real).nonzero().flatten().to(device)
            self.slot = real.nonzero().flatten().to(device)
            self.target = token[real].to(device)

    def read(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """[B, T, H, …] → [R·H·group, C, …], each head repeated `group` times; padded positions are 0."""
        if self.layout.plain:
            y = self._by_chunk(x)
        else:
            y = x.flatten(0, 1).index_select(0, self.token).index_fill_(0, self.padding, 0)
            y = y.unflatten(0, (self.rows, self.layout.chunk)).transpose(1, 2)[:, None]
        y = y.unsqueeze(3).expand(-1, -1, -1, group, *y.shape[3:])  # [·, ·, H, group, C, …]
        return torch.empty(y.shape, dtype=dtype, device=y.device).copy_(y).flatten(0, 3)

    def write(self, x: Tensor, y: Tensor, group: int) -> None:
        """Puts [R·H·group, C, …] into x, [B, T, H, …]; the heads of a group are summed."""
        y = y.view(self.rows, x.shape[2], group, *y.shape[1:])
        y = y.sum(2) if group > 1 else y.squeeze(2)  # [R, H, C, …]
        if self.layout.plain:
            into = self._by_chunk(x)
            into.copy_(y.view(into.shape))
        else:
            y = y.transpose(1, 2).to(x.dtype, memory_format=torch.contiguous_format).flatten(0, 1)
            x.flatten(0, 1).index_copy_(0, self.target, y.index_select(0, self.slot))

    def _by_chunk(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.layout.chunk))[:, self.steps].transpose(0, 1).transpose(2, 3)


class _Layout:
    """Where the chunks of all sequences lie: by step, in a step those that last so long.

    Sequences are ranked by their number of chunks, longest first, so that the chunks of one step are a block
    of rows and their states a prefix of the states. `counts[s]` of them have a chunk s.
    """

    def __init__(self, shape: tuple[int, int], bounds: tuple[int, ...] | None, chunk: int, device, rows: int):
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
                self.segments.append(_Segment(self, slice(start, step + 1), first))
                start, first, size = step + 1, first + size, 0


def _chunk_of(chunk_size: int, lengths: list[int], q: Tensor, v: Tensor) -> int:
    """The tokens a chunk really has: fewer than asked for where that is faster; the result is the same."""
    longest = max(lengths, default=0)
    chunk = min(chunk_size, _power_of_two(longest))  # all shorter than a chunk: no whole one is needed
    if v.device.type == "cpu":  # work within chunks grows with C, between them with 1/C, padding with C
        chunk = min(chunk, max(16, _power_of_two((q.shape[3] + v.shape[3]) // 4)))
        if min(lengths, default=0) < longest:
            chunk = min(chunk, max(16, _power_of_two(sum(lengths) // len(lengths) // 4)))
    return chunk


def _power_of_two(n: int) -> int:
    """The smallest one that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()


_layout = functools.lru_cache(maxsize=16)(_Layout)  # every layer asks for the same one, forward and backward


def _layout_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> _Layout:
    batch, length, heads, _ = v.shape
    bounds = None if cu_seqlens is None else _bounds(cu_seqlens, length)
    lengths = [length] * batch if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
    chunk = _chunk_of(chunk_size, lengths, q, v)
    tokens = _CPU_TOKENS if v.device.type == "cpu" else _DEVICE_TOKENS
    return _layout((batch, length), bounds, chunk, v.device, max(1, tokens // (chunk * heads)))


# -------------------------------------------------------------------------------------------- chunkwise form
#
# With γ the sum of g within a chunk up to and including a token, Δ_ij = exp(γ_i − γ_j) for i ≥ j and 0 else:
#
#     A = tril(β_i Δ_ij k_i⊤k_j, −1)    T = (I + A)⁻¹    U = T(βV)    W = T(β eᵞ K)    V' = U − W S
#     O = eᵞ Q S + tril(Δ QK⊤) V'       S ← e^{γ_C} S + (e^{γ_C − γ} K)⊤ V'
#
# Only V' and S go from chunk to chunk. Padding has β = k = g = 0: it neither writes nor decays, and γ_C is
# that of the last real token. Differences of γ are masked with −∞ before exp, so that no factor exceeds 1.
#
# The backward (d for gradients, S' the state after the chunk) needs no gradient of T, U or W, because
# V' = TX with X = β(V − eᵞ K S) gives dA = −dX V'⊤:
#
#     dV' = tril(Δ QK⊤)⊤ dO + e^{γ_C − γ} K dS'         dX = T⊤ dV'         dA = −tril(dX V'⊤, −1)
#     dS = e^{γ_C} dS' + (eᵞ Q)⊤ dO − W⊤ dV'


class _Chunk:
    """What forward and backward share: Q (already scaled) and K are [P, C, K], β and g [P, C]."""

    def __init__(self, q: Tensor, k: Tensor, beta: Tensor, g: Tensor | None):
        self.beta = beta[..., None]
        self.qk, self.kk = q @ k.mT, k @ k.mT  # tril(Δ QK⊤) and tril(Δ KK⊤, −1), [P, C, C]
        if g is None:
            self.q_in, self.k_out = q, k
            self.qk.tril_()
            self.kk.tril_(-1)
        else:
            gamma = g.cumsum(-1)
            future = torch.ones_like(self.kk[0], dtype=torch.bool).triu(1)
            self.delta = (gamma[..., None] - gamma[..., None, :]).masked_fill_(future, -torch.inf).exp_()
            self.decay_in = gamma.exp()[..., None]  # eᵞ, [P, C, 1]
            self.decay_out = (gamma[..., -1:] - gamma).exp()[..., None]  # e^{γ_C − γ}
            self.decay = self.decay_in[:, -1:]  # e^{γ_C}, [P, 1, 1]
            self.q_in, self.k_out = q * self.decay_in, k * self.decay_out
            self.qk.mul_(self.delta)
            self.kk.mul_(self.delta).tril_(-1)
        self.t = _unit_lower_inverse(self.kk * self.beta)
        self.t_beta = self.t * beta[..., None, :]
        self.w = (self.t_beta if g is None else self.t_beta * self.decay_in.mT) @ k


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)⁻¹ for strictly lower triangular a, [P, C, C] and C a power of two.

    Substitution in diagonal blocks of 16 (P innermost: it runs as wide vectors), then blocks are joined two
    by two: [[X, 0], [Y, Z]]⁻¹ = [[X⁻¹, 0], [−Z⁻¹YX⁻¹, Z⁻¹]]. Unlike a sum of powers of a,
    this stands identical keys with β = 1, where the powers grow like binomial coefficients.
    """
    p, c, _ = a.shape
    size = min(16, c)
    inverse = torch.zeros_like(a)

    def blocks(x: Tensor, size: int) -> Tensor:  # [P, C/size, size, size], the diagonal ones
        return x.unflatten(2, (-1, size)).unflatten(1, (-1, size)).diagonal(0, 1, 3).movedim(3, 1)

    x = blocks(a, size).permute(2, 3, 0, 1).contiguous()
    y = torch.zeros_like(x)
    for i in range(size):
        y[i, i] = 1
        if i:
            y[i, :i] = -(x[i, :i, None] * y[:i, :i]).sum(0)
    blocks(inverse, size).copy_(y.permute(2, 3, 0, 1))
    while size < c:
        low = blocks(a, 2 * size)[:, :, size:, :size].flatten(0, 1)
        pair = blocks(inverse, 2 * size)
        upper, lower = (pair[:, :, s, s].flatten(0, 1) for s in (slice(0, size), slice(size, None)))
        pair[:, :, size:, :size] = (lower @ (low @ upper)).neg_().unflatten(0, (p, -1))
        size *= 2
    return inverse


def _chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, final states, and the state before every chunk, [P, K, V] in the layout's order, if `save`."""
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    dtype = _at_least_fp32(q, k, v, beta, g, initial_state)
    layout = _layout_of(q, v, cu_seqlens, chunk_size)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = _ranked(
        initial_state, layout, dtype, v.new_empty(layout.sequences, heads, q.shape[3], v.shape[3])
    )
    saved = state.new_empty(sum(layout.counts) * heads if save else 0, *state.shape[1:])
    first = 0
    for segment in layout.segments:
        q_, k_ = (segment.read(x, group, dtype) for x in (q, k))
        v_, beta_ = (segment.read(x, 1, dtype) for x in (v, beta))
        g_ = None if g is None else segment.read(g, 1, dtype)
        chunk = _Chunk(q_.mul_(scale), k_, beta_, g_)
        pairs = segment.rows * heads
        states = saved[first : first + pairs] if save else state.new_empty(pairs, *state.shape[1:])
        v_new = chunk.t_beta @ v_
        row = 0
        for count in segment.counts:
            now, active = slice(row, row + count * heads), state[: count * heads]
            states[now].copy_(active)
            v_new[now].baddbmm_(chunk.w[now], active, alpha=-1)
            if g is not None:
                active.mul_(chunk.decay[now])
            active.baddbmm_(chunk.k_out[now].mT, v_new[now])
            row += count * heads
        segment.write(o, torch.bmm(chunk.q_in, states).baddbmm_(chunk.qk, v_new), 1)
        first += pairs
    return o, _unranked(state, layout, heads), saved


def _chunk_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, states: Tensor, scale: float, chunk_size: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, beta, g (unfilled without g), initial state; recomputes all but the states."""
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    dtype = states.dtype
    layout = _layout_of(q, v, cu_seqlens, chunk_size)
    c = layout.chunk
    straddling = torch.ones(c, c, dtype=dtype, device=v.device).triu()
    d_q, d_k, d_v, d_beta, d_g = (
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, beta, beta if g is None else g)
    )
    d_state = _ranked(d_final, layout, dtype, v.new_empty(layout.sequences, heads, *states.shape[1:]))
    first = len(states)
    for segment in reversed(layout.segments):
        q_, k_ = (segment.read(x, group, dtype) for x in (q, k))
        v_, beta_, do_ = (segment.read(x, 1, dtype) for x in (v, beta, d_o))
        g_ = None if g is None else segment.read(g, 1, dtype)
        chunk = _Chunk(q_.mul_(scale), k_, beta_, g_)
        first -= segment.rows * heads
        s = states[first : first + segment.rows * heads]
        v_new = torch.bmm(chunk.t_beta, v_).baddbmm_(chunk.w, s, alpha=-1)
        dv_new = chunk.qk.mT @ do_
        d_next = torch.empty_like(s)  # of the state after each chunk
        row = len(s)
        for count in reversed(segment.counts):
            row -= count * heads
            now, active = slice(row, row + count * heads), d_state[: count * heads]
            d_next[now].copy_(active)
            dv_new[now].baddbmm_(chunk.k_out[now], active)
            if g is not None:
                active.mul_(chunk.decay[now])
            active.baddbmm_(chunk.q_in[now].mT, do_[now]).baddbmm_(chunk.w[now].mT, dv_new[now], alpha=-1)

        dx = chunk.t.mT @ dv_new
        d_qk = do_ @ v_new.mT
        d_kk = (dx @ v_new.mT).neg_()  # dA
        through_a = d_kk * chunk.kk
        db = (dx * v_).sum(-1) + through_a.sum(-1)
        if g_ is None:
            dq, dk_in, dk_out = do_ @ s.mT, dx @ s.mT, v_new @ d_next.mT
            db -= (k_ * dk_in).sum(-1)
            d_qk.tril_()
        else:
            dq = (do_ * chunk.decay_in) @ s.mT
            dk_in = (dx * chunk.decay_in) @ s.mT
            dk_out = (v_new * chunk.decay_out) @ d_next.mT
            read = (k_ * dk_in).sum(-1)
            db -= read
            # dg_t gathers whatever decays at token t: pairs (i, j) with j < t ≤ i, reads of S by i ≥ t,
            # writes of j < t to S', and S on its way to S'. Nothing cancels: small gradients stay exact.
            pairs = through_a.mul_(chunk.beta).add_((d_qk * chunk.qk).tril_(-1))
            reads = (q_ * dq).sum(-1) - beta_ * read
            writes = (k_ * dk_out).sum(-1)
            dg = (straddling @ pairs).tril_(-1).sum(-1)
            dg += reads.flip(-1).cumsum(-1).flip(-1)
            dg[:, 1:] += writes[:, :-1].cumsum(-1)
            dg += chunk.decay[..., 0] * (s * d_next).sum((-2, -1))[:, None]
            segment.write(d_g, dg, 1)
            d_qk.mul_(chunk.delta)
            d_kk.mul_(chunk.delta)
        d_kk.mul_(chunk.beta).tril_(-1)
        dk = dk_out.sub_(dk_in.mul_(chunk.beta)).baddbmm_(d_qk.mT, q_).baddbmm_(d_kk + d_kk.mT, k_)
        segment.write(d_q, dq.baddbmm_(d_qk, k_).mul_(scale), group)
        segment.write(d_k, dk, group)
        segment.write(d_v, dx.mul_(chunk.beta), 1)
        segment.write(d_beta, db, 1)
    return d_q, d_k, d_v, d_beta, d_g, _unranked(d_state, layout, heads)


def _ranked(state: Tensor | None, layout: _Layout, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A working copy of the states [N, HV, K, V], or zeros: [N·HV, K, V] in the layout's order."""
    if state is None:
        return torch.zeros_like(like, dtype=dtype).flatten(0, 1)
    state = state if layout.rank is None else state[layout.rank]
    return torch.empty_like(like, dtype=dtype).copy_(state).flatten(0, 1)


def _unranked(state: Tensor, layout: _Layout, heads: int) -> Tensor:
    state = state.unflatten(0, (layout.sequences, heads))
    return state if layout.rank is None else torch.empty_like(state).index_copy_(0, layout.rank, state)


class _ChunkDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        o, state, saved = _chunk_forward(*args)
        _setup_context(ctx, args, (o, state, saved))
        return o, state, saved

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _backward(_chunk_backward, ctx, *grads)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.chunk_size, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])


def _backward(
    function: Callable, ctx, d_o: Tensor | None, d_final: Tensor | None, _
) -> tuple[Tensor | None, ...]:
    q, k, v, beta, g, initial_state, cu_seqlens, states = ctx.saved_tensors
    d_o = torch.zeros_like(v) if d_o is None else d_o
    with _no_autocast(v.device.type):
        *grads, d_g, d_initial = function(
            d_o, d_final, q, k, v, beta, g, initial_state, cu_seqlens, states, ctx.scale, ctx.chunk_size
        )
    d_g = None if g is None else d_g
    d_initial = None if initial_state is None else d_initial.to(initial_state.dtype)
    return *grads, d_g, d_initial, None, None, None, None


# To torch.compile the chunkwise form is one operator and its backward another, never an unrolled loop. Their
# namespace is this module's name, so that the copies of this file that travel with checkpoints do not meet.

_NAMESPACE = re.sub(r"\W", "_", __name__)
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens"
_chunk_op = torch.library.custom_op(
    f"{_NAMESPACE}::chunk_delta_rule",
    _chunk_forward,
    mutates_args=(),
    schema=f"({_INPUTS}, float scale, int chunk_size, bool save) -> (Tensor, Tensor, Tensor)",
)
_chunk_backward_op = torch.library.custom_op(
    f"{_NAMESPACE}::chunk_delta_rule_backward",
    _chunk_backward,
    mutates_args=(),
    schema=f"(Tensor d_o, Tensor? d_final, {_INPUTS}, Tensor states, float scale, int chunk_size) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_chunk_op.register_fake
def _(q, k, v, beta, g, initial_state, cu_seqlens, scale, chunk_size, save):
    batch, length, heads, width = v.shape
    chunk = _chunk_of(chunk_size, [length] * batch, q, v)
    rows = 0
    if save:  # with cu_seqlens known only when the bounds are
        rows = (
            -(-length // chunk) * batch if cu_seqlens is None else torch.library.get_ctx().new_dynamic_size()
        )
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = _at_least_fp32(q, k, v, beta, g, initial_state)
    state = v.new_empty(sequences, heads, q.shape[3], width, dtype=dtype)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    return o, state, state.new_empty(rows * heads, q.shape[3], width)


@_chunk_backward_op.register_fake
def _(d_o, d_final, q, k, v, beta, g, initial_state, cu_seqlens, states, scale, chunk_size):
    sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    d_initial = states.new_empty(sequences, v.shape[2], *states.shape[1:])
    like = (q, k, v, beta, beta if g is None else g)
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like), d_initial


_chunk_op.register_autograd(functools.partial(_backward, _chunk_backward_op), setup_context=_setup_context)
