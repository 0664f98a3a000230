"""The recurrences: their contracts, their references, and the choice of an implementation.

For every head, with a state S of [K, V] and the readout o_t = scale · S_t⊤ q_t:

    linear attention    S_t = Diag(e^{g_t}) S_{t−1} + k_t v_t⊤
    delta rule          S_t = (I − β_t k_t (e_t ⊙ k_t)⊤) Diag(e^{g_t}) S_{t−1} + β_t k_t (w_t ⊙ v_t)⊤

g has one entry a head or one a key channel; e, the gate of what is erased, and w, of what is written, are 1
unless given. (Linear attention: arXiv 2006.16236. RetNet, with a decay per head: arXiv 2307.08621. GLA, with
a decay per key channel: arXiv 2312.06635. DeltaNet: arXiv 2406.06484. Gated DeltaNet: arXiv 2412.06464. KDA,
with a decay per key channel: arXiv 2510.26692. Gated DeltaNet 2, with e and w and β = 1: arXiv 2605.22791.)

Shapes: B batch, T time, H heads of q and k, HV heads of v, K and V their features, N sequences.
"""

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .chunk import ChunkRecurrence, chunk_op
from .chunk_order import bounds_of, wide_dtype
from .layers import at_least_fp32, direction, no_autocast

_API = 3
try:  # checkpoints carry a copy of this file; the kernels there may be missing or newer
    import nalanda_kernels as _kernels
except ImportError:
    _kernels = None
else:
    if _kernels.API != _API:
        theirs, _kernels = _kernels.API, None
        warnings.warn(
            f"nalanda_kernels: API {theirs}, not {_API}; using the torch path", stacklevel=2
        )

FeatureMap = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    *,
    feature_map: FeatureMap | None = None,
    qk_norm: str | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
    mode: str = "chunk",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Runs the delta rule over time. For every token the state S `[K, V]` of a head decays, loses what it
    answers to the erased key, and takes the written value:

        S' = Diag(e^{g_t}) S_{t−1}
        S_t = S' − β_t k_t (erase_t ⊙ k_t)⊤ S' + β_t k_t (write_t ⊙ v_t)⊤        o_t = scale · S_t⊤ q_t

    A decay per key channel is KDA's (arXiv 2510.26692). With erase, write and β = 1 it is Gated DeltaNet 2
    (arXiv 2605.22791). DeltaProduct (arXiv 2502.10297) takes n tokens a token, of which the last is read.

    Args:
        q: `[B, T, H, K]`, before the map and the norm.
        k: as q.
        v: `[B, T, HV, V]`, HV a multiple of H: each head of q and k serves HV/H consecutive heads of v.
        beta: `[B, T, HV]`. The state cannot grow while `0 ≤ β‖k‖² ≤ 2`, erase aside. In 16 bits ‖k‖² may be
            1.004 after the norm: for β up to 2 norm keys first, and divide β by what exceeds 1.
        g: natural logarithm of the decay, ≤ 0: `[B, T, HV]`, or `[B, T, HV, K]` for a decay per key channel
            (K after the map). None for no decay.
        erase: `[B, T, HV, K]` (K after the map), the share of each key channel in what is erased; None for 1.
        write: `[B, T, HV, V]`, the share of each value channel that is written; None for 1.
        feature_map: maps (q, k) to (φ_q, φ_k) in fp32; it may change the width K.
        qk_norm: None, or "l2": `x / √(Σx² + 1e-6)` over the features after the map, in fp32.
        scale: of the readout; by default K^-0.5, with K after the map.
        initial_state: `[N, HV, K, V]`, zero by default; N is B, or the number of sequences in `cu_seqlens`.
        output_final_state: whether to return the state after each sequence's last token.
        cu_seqlens: `[N + 1]` integers, the bounds of independent sequences packed into one row (B = 1).
            Sequences may be empty. A CPU tensor avoids a synchronisation.
        allow_neg_eigval: whether β‖k‖² may exceed 1, so that a token turns what it erases into its negative.
            In 16 bits kernels then keep more digits, since rounding would lengthen the state where a token
            repeats. On the torch path it changes nothing.
        chunk_size: the most tokens in a chunk of the torch form, a power of two; kernels choose their own.
        mode: "chunk" for training and prompts, "recurrent" for decoding token by token, "reference" for the
            literal formula. All are differentiable.
        backend: for mode "chunk": "auto" (Triton kernels on GPUs, torch elsewhere), "torch", "triton",
            "fla" or "flash_qla". A backend that cannot serve a call warns once, and the next one serves it.
            `nalanda_kernels.use_backend` and the variable NALANDA_BACKEND change what "auto" means.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` or None. States, decays and sums
        are fp32 whatever the inputs are; float64 stays float64.

    Raises:
        ValueError: shapes that do not fit, an unknown option, or a backend that is not there.
    """
    return _recurrence(
        *(q, k, v, beta, g, erase, write),
        feature_map=feature_map,
        qk_norm=qk_norm,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        allow_neg_eigval=allow_neg_eigval,
        chunk_size=chunk_size,
        mode=mode,
        backend=backend,
    )


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Runs `S_t = exp(g_t) S_{t−1} + k_t v_t⊤`, `o_t = scale · S_t⊤ q_t` over time.

    There is no denominator. A column of ones beside v computes one: its output is `Σ_j φ(q_t)·φ(k_j)`.

    Args:
        q: as in `delta_rule`, and so k, v and all others.
        g: natural logarithm of the decay, ≤ 0: `[B, T, HV]`, or `[B, T, HV, K]` for a decay per key channel
            (K after the map). None for no decay.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` or None. States, decays and sums
        are fp32 whatever the inputs are; float64 stays float64.

    Raises:
        ValueError: shapes that do not fit, an unknown option, or a backend that is not there.
    """
    return _recurrence(
        *(q, k, v, None, g, None, None),
        feature_map=feature_map,
        qk_norm=qk_norm,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        mode=mode,
        backend=backend,
    )


def _recurrence(
    q,
    k,
    v,
    beta,
    g,
    erase,
    write,
    *,
    feature_map,
    qk_norm,
    scale,
    initial_state,
    output_final_state,
    cu_seqlens,
    chunk_size,
    mode,
    backend,
    allow_neg_eigval=False,
):
    """Either op, by a kernel or in torch. Without beta it is linear attention."""
    _check(q, k, v, beta, g, erase, write, initial_state, cu_seqlens, chunk_size, mode, qk_norm)
    op, inputs = (
        ("linear_attention", (q, k, v, g)) if beta is None else ("delta_rule", (q, k, v, beta, g))
    )
    if mode == "chunk":
        options = {
            "feature_map": feature_map,
            "qk_norm": qk_norm,
            "scale": scale,
            "chunk_size": chunk_size,
        }
        options |= {"initial_state": initial_state, "output_final_state": output_final_state}
        options |= {name: x for name, x in (("erase", erase), ("write", write)) if x is not None}
        options |= {"allow_neg_eigval": True} if allow_neg_eigval else {}
        served = by_kernel(op, backend, q, *inputs, cu_seqlens=cu_seqlens, **options)
        if served is not None:
            return served
    with no_autocast(q):
        q, k = map_features(
            q, k, feature_map, qk_norm, backend="torch" if backend == "torch" else "auto"
        )
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        if initial_state is not None and initial_state.shape[2] != q.shape[-1]:
            has, needs = initial_state.shape[2], q.shape[-1]
            raise ValueError(
                f"initial_state: K = {has}; q and k have {needs} features after their map"
            )
        for name, x in (("g", g), ("erase", erase)):
            if x is not None and x.ndim == 4 and x.shape[3] != q.shape[-1]:
                has, needs = x.shape[3], q.shape[-1]
                raise ValueError(
                    f"{name}: {has} key channels; q and k have {needs} features after their map"
                )
        if mode == "chunk":
            tensors = (q, k, v, beta, g, erase, write, initial_state)
            save = torch.is_grad_enabled() and any(
                x is not None and x.requires_grad for x in tensors
            )
            core = chunk_op if torch.compiler.is_compiling() else ChunkRecurrence.apply
            o, state, _ = core(*tensors, cu_seqlens, scale, chunk_size, save)
        else:
            o, state = _stepwise(
                mode, q, k, v, beta, g, erase, write, initial_state, cu_seqlens, scale
            )
    return o, state if output_final_state else None


def delta_rule_flops(
    num_heads: int, key_dim: int, value_dim: int, chunk_size: int = 64, *, channels: bool = False
) -> float:
    """Forward FLOPs per token of the chunkwise form; `key_dim` is K after the map.

    A multiply-add counts as two. Products count in full: three with the state (K·V), KK⊤, QK⊤ and T(βeᵞK)
    (C·K each), T(βV) and (QK⊤)V' (C·V each), the inverse (C²/6). The sequence's length does not matter.

    channels: a decay per key channel, which needs half of KK⊤ and QK⊤ (those below the diagonal). The gates
    of what is erased and written, like all work on single numbers, count as nothing.
    """
    scores = 1 if channels else 2
    within = (scores + 1) * key_dim + 2 * value_dim
    return 2.0 * num_heads * (3 * key_dim * value_dim + chunk_size * within + chunk_size**2 / 6)


def linear_attention_flops(
    num_heads: int, key_dim: int, value_dim: int, chunk_size: int = 64
) -> float:
    """Forward FLOPs per token of the chunkwise form, counted like `delta_rule_flops`.

    Two products with the state (K·V), QK⊤ (C·K) and (QK⊤)V (C·V). Decays per key channel need half of QK⊤.
    """
    return 2.0 * num_heads * (2 * key_dim * value_dim + chunk_size * (key_dim + value_dim))


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / √(Σx² + eps)` over the last dimension, in fp32 or float64, cast once to x's dtype."""
    return direction(at_least_fp32(x), eps)[0].to(x.dtype)


def map_features(
    q: Tensor,
    k: Tensor,
    feature_map: FeatureMap | None,
    qk_norm: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k), normed, in fp32 or float64, cast once to q's dtype."""
    if feature_map is None and qk_norm is None:
        return q, k
    if not torch.compiler.is_compiling():  # torch.compile fuses the map's own code
        served = by_kernel("map_features", backend, q, q, k, feature_map, qk_norm)
        if served is not None:
            return served
    if torch.is_grad_enabled() and _scarce_memory(q):
        return checkpoint(
            _map, q, k, feature_map, qk_norm, use_reentrant=False, preserve_rng_state=False
        )
    return _map(q, k, feature_map, qk_norm)


def _scarce_memory(x: Tensor) -> bool:
    """Whether the backward recomputes maps, whose fp32 intermediates are up to ten times their inputs.

    A CPU has memory, and recomputation would cost it a tenth of a training step.
    """
    return x.device.type != "cpu"


def _map(q: Tensor, k: Tensor, feature_map: FeatureMap | None, qk_norm: str | None):
    dtype, wide = q.dtype, wide_dtype(q)
    q, k = q.to(wide), k.to(wide)
    if feature_map is not None:
        q, k = feature_map(q, k)
    if qk_norm == "l2":
        q, k = l2norm(q), l2norm(k)
    return q.to(dtype), k.to(dtype)


def by_kernel(op: str, backend: str, x: Tensor, *inputs, **options):
    """The result of a kernel for the device of x; None if the torch path must serve the call."""
    if _kernels is not None:
        # A kernel runs on the current device, which is another one if a model is spread over several.
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return _kernels.serve(op, backend, x.device.type, *inputs, **options)
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend={backend!r}: needs nalanda_kernels; choose one of auto, torch")
    return None


def _check(
    q, k, v, beta, g, erase, write, initial_state, cu_seqlens, chunk_size, mode, qk_norm
) -> None:
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q, k: {list(q.shape)} and {list(k.shape)}; both must be [B, T, H, K]")
    if v.ndim != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v: {list(v.shape)}; must be [B, T, HV, V] with the B and T of q {list(q.shape)}"
        )
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"v: {v.shape[2]} heads; must be a multiple of the {q.shape[2]} heads of q and k"
        )
    if beta is not None and beta.shape != v.shape[:3]:
        raise ValueError(f"beta: {list(beta.shape)}; must be [B, T, HV] = {list(v.shape[:3])}")
    if g is not None and (g.shape[:3] != v.shape[:3] or g.ndim not in (3, 4)):
        needs = f"[B, T, HV] or [B, T, HV, K] with {list(v.shape[:3])}"
        raise ValueError(f"g: {list(g.shape)}; must be {needs}")
    if erase is not None and (erase.shape[:3] != v.shape[:3] or erase.ndim != 4):
        raise ValueError(
            f"erase: {list(erase.shape)}; must be [B, T, HV, K] with {list(v.shape[:3])}"
        )
    if write is not None and write.shape != v.shape:
        raise ValueError(f"write: {list(write.shape)}; must be [B, T, HV, V] = {list(v.shape)}")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.is_floating_point():
            found = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens: {found}; must be [N + 1] integers")
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens: B = {q.shape[0]}; flatten the batch into one row, B = 1")
        sequences = len(cu_seqlens) - 1
    if initial_state is not None:
        state = [sequences, v.shape[2], "K", v.shape[3]]
        if initial_state.ndim != 4 or any(initial_state.shape[i] != state[i] for i in (0, 1, 3)):
            raise ValueError(
                f"initial_state: {list(initial_state.shape)}; must be [N, HV, K, V] = {state}"
            )
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size={chunk_size}: must be a power of two")
    if mode not in ("chunk", "recurrent", "reference"):
        raise ValueError(f"mode={mode!r}: must be chunk, recurrent or reference")
    if qk_norm not in (None, "l2"):
        raise ValueError(f"qk_norm={qk_norm!r}: must be None or 'l2'")


# ------------------------------------------------------------------------------------------ token by token


def _stepwise(
    mode, q, k, v, beta, g, erase, write, initial_state, cu_seqlens, scale
) -> tuple[Tensor, Tensor]:
    """Modes "reference" and "recurrent", one sequence of a packed row after another."""
    dtype = wide_dtype(q, k, v, beta, g, erase, write, initial_state)
    group = v.shape[2] // q.shape[2]
    q, k = (x.to(dtype).repeat_interleave(group, 2) if group > 1 else x.to(dtype) for x in (q, k))
    step = (
        _linear_step
        if beta is None
        else _reference_step
        if mode == "reference"
        else _recurrent_step
    )
    bounds = None if cu_seqlens is None else bounds_of(cu_seqlens, q.shape[1])
    sequences = q.shape[0] if bounds is None else len(bounds) - 1
    if initial_state is None:
        state = q.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3])
    else:
        state = initial_state.to(dtype)
    q, values, beta = q * scale, v.to(dtype), None if beta is None else beta.to(dtype)
    erased = k if erase is None else erase.to(dtype) * k
    written = values if write is None else write.to(dtype) * values
    decay = None if g is None else g.to(dtype).exp()
    if decay is not None:
        decay = (
            decay[..., None] if decay.ndim == 4 else decay[..., None, None]
        )  # [B, T, HV, K or 1, 1]

    def run(start: int, stop: int, state: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs = []
        for t in range(start, stop):
            beta_t, decay_t = (None if x is None else x[:, t] for x in (beta, decay))
            o, state = step(q[:, t], k[:, t], erased[:, t], written[:, t], beta_t, decay_t, state)
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
    o = torch.stack(outputs, 1) if outputs else values  # without tokens o is empty, like v
    return o.to(v.dtype), state


def _linear_step(q, k, erased, v, beta, decay, state):
    """q, k, erased: [B, H, K], v: [B, H, V], decay: [B, H, K or 1, 1], state: [B, H, K, V]; beta None."""
    state = k.unsqueeze(-1) * v.unsqueeze(-2) + (state if decay is None else decay * state)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _reference_step(q, k, erased, v, beta, decay, state):
    """Like `_linear_step` with beta [B, H]: the delta rule's formula, term by term."""
    decay = 1 if decay is None else decay
    kept = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - torch.einsum(
        "bh,bhi,bhj->bhij", beta, k, erased
    )
    state = kept @ (decay * state) + torch.einsum("bh,bhk,bhv->bhkv", beta, k, v)
    return torch.einsum("bhk,bhkv->bhv", q, state), state


def _recurrent_step(q, k, erased, v, beta, decay, state):
    """The same with a rank-one update, so that all products are of a matrix and a vector."""
    if decay is not None:
        state = state * decay
    delta = beta[..., None] * (v - (erased.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state
