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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .call import Call, FeatureMap, Options, bounds_of, dtype_of, group_of
from .chunk import run_chunkwise
from .kernels import by_kernel
from .layers import at_least_fp32, direction, no_autocast


def delta_rule(  # noqa: PLR0913
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
    """Runs the delta rule over time.

    For each token the state S `[K, V]` of a head decays, the value stored under the key is erased, and the
    new value is written:

        S' = Diag(e^{g_t}) S_{t−1}
        S_t = S' − β_t k_t (erase_t ⊙ k_t)⊤ S' + β_t k_t (write_t ⊙ v_t)⊤        o_t = scale · S_t⊤ q_t

    A decay per key channel is KDA's (arXiv 2510.26692). With erase, write and β = 1 it is Gated DeltaNet 2
    (arXiv 2605.22791). DeltaProduct (arXiv 2502.10297) runs n recurrence steps per text token and reads the
    output after the last.

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
        chunk_size: the most tokens in a chunk of the torch form, a power of two; Triton's kernels choose their own.
        mode: "chunk" for training and prompts, "recurrent" for decoding token by token, "reference" for the
            literal formula. All are differentiable.
        backend: for mode "chunk": "auto" (Triton kernels on GPUs; elsewhere torch, with C++ in parts on a
            CPU), "torch", "triton", "fla" or "flash_qla". A backend that cannot serve a call warns once, and
            the next one serves it.
            `nalanda_kernels.use_backend` and the variable NALANDA_BACKEND change what "auto" means.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` or None. States, decays and sums
        are fp32 whatever the inputs are; float64 stays float64.

    Raises:
        ValueError: shapes that do not fit, an unknown option, or in mode "chunk" a backend that is not there.
    """
    call = Call(q, k, v, beta, g, erase, write, initial_state, cu_seqlens)
    options = Options(
        feature_map=feature_map,
        qk_norm=qk_norm,
        scale=scale,
        output_final_state=output_final_state,
        allow_neg_eigval=allow_neg_eigval,
        chunk_size=chunk_size,
        mode=mode,
        backend=backend,
    )
    return run_recurrence(call, options)


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
        ValueError: shapes that do not fit, an unknown option, or in mode "chunk" a backend that is not there.
    """
    call = Call(q, k, v, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = Options(
        feature_map=feature_map,
        qk_norm=qk_norm,
        scale=scale,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
        mode=mode,
        backend=backend,
    )
    return run_recurrence(call, options)


def run_recurrence(call: Call, options: Options) -> tuple[Tensor, Tensor | None]:
    """The delta rule, or without β linear attention, by a kernel or in torch.

    Returns the outputs, and the final state if the options ask for it. Raises ValueError as `delta_rule` does.
    """
    _check_tensors(call)
    _check_options(options)
    if options.mode == "chunk":
        op, inputs, named = _kernel_arguments(call, options)
        served = by_kernel(op, options.backend, call.q, *inputs, **named)
        if served is not None:
            return served
    with no_autocast(call.q):
        return _run_in_torch(call, options)


def _kernel_arguments(call: Call, options: Options) -> tuple[str, tuple[Tensor | None, ...], dict]:
    """The op's name, inputs and options as kernels of API 3 take them.

    Kernels need not know an option that an op gained later, so it is left out where it changes nothing.
    """
    named: dict[str, Any] = {
        "feature_map": options.feature_map,
        "qk_norm": options.qk_norm,
        "scale": options.scale,
        "chunk_size": options.chunk_size,
        "initial_state": call.initial_state,
        "output_final_state": options.output_final_state,
        "cu_seqlens": call.cu_seqlens,
    }
    if call.beta is None:
        return "linear_attention", (call.q, call.k, call.v, call.g), named

    if call.erase is not None:
        named["erase"] = call.erase
    if call.write is not None:
        named["write"] = call.write
    if options.allow_neg_eigval:
        named["allow_neg_eigval"] = True
    return "delta_rule", (call.q, call.k, call.v, call.beta, call.g), named


def _run_in_torch(call: Call, options: Options) -> tuple[Tensor, Tensor | None]:
    """`run_recurrence` by the torch form of the options' mode; call without autocast."""
    call, options = with_features(call, options)
    _check_features(call)
    assert options.scale is not None
    if options.mode == "chunk":
        backend = options.backend_of_parts
        o, state = run_chunkwise(call, options.scale, options.chunk_size, backend)
    else:
        o, state = _run_stepwise(call, options.scale, options.mode)
    return o, state if options.output_final_state else None


def with_features(call: Call, options: Options) -> tuple[Call, Options]:
    """The call with φ(q) and φ(k), and the options without map and norm, with the scale of this width K."""
    q, k = map_features(
        call.q, call.k, options.feature_map, options.qk_norm, backend=options.backend_of_parts
    )
    scale = q.shape[-1] ** -0.5 if options.scale is None else float(options.scale)
    return call._replace(q=q, k=k), options._replace(feature_map=None, qk_norm=None, scale=scale)


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


def l2norm(x: Tensor) -> Tensor:
    """`x / √(Σx² + 1e-6)` over the last dimension, in fp32 or float64, cast once to x's dtype."""
    return direction(at_least_fp32(x), 1e-6)[0].to(x.dtype)


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
    dtype, q, k = q.dtype, at_least_fp32(q), at_least_fp32(k)
    if feature_map is not None:
        q, k = feature_map(q, k)
    if qk_norm == "l2":
        q, k = l2norm(q), l2norm(k)
    return q.to(dtype), k.to(dtype)


def _check_tensors(call: Call) -> None:
    """Raises ValueError for tensors whose shapes do not fit, but for K after the map."""
    q, k, v, beta, g, erase, write, initial_state, cu_seqlens = call
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

    heads = v.shape[:3]
    if beta is not None and beta.shape != heads:
        raise ValueError(f"beta: {list(beta.shape)}; must be [B, T, HV] = {list(heads)}")
    if g is not None and (g.shape[:3] != heads or g.ndim not in (3, 4)):
        needs = f"[B, T, HV] or [B, T, HV, K] with {list(heads)}"
        raise ValueError(f"g: {list(g.shape)}; must be {needs}")
    if erase is not None and (erase.shape[:3] != heads or erase.ndim != 4):
        raise ValueError(f"erase: {list(erase.shape)}; must be [B, T, HV, K] with {list(heads)}")
    if write is not None and write.shape != v.shape:
        raise ValueError(f"write: {list(write.shape)}; must be [B, T, HV, V] = {list(v.shape)}")

    sequences = q.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.is_floating_point():
            bounds = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            raise ValueError(f"cu_seqlens: {bounds}; must be [N + 1] integers")
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens: B = {q.shape[0]}; flatten the batch into one row, B = 1")
        sequences = len(cu_seqlens) - 1
    if initial_state is not None:
        # K is that after the map, which `_check_features` compares.
        shape = [sequences, v.shape[2], "K", v.shape[3]]
        if initial_state.ndim != 4 or any(initial_state.shape[i] != shape[i] for i in (0, 1, 3)):
            raise ValueError(
                f"initial_state: {list(initial_state.shape)}; must be [N, HV, K, V] = {shape}"
            )


def _check_options(options: Options) -> None:
    """Raises ValueError for an unknown option."""
    if options.chunk_size < 1 or options.chunk_size & (options.chunk_size - 1):
        raise ValueError(f"chunk_size={options.chunk_size}: must be a power of two")
    if options.mode not in ("chunk", "recurrent", "reference"):
        raise ValueError(f"mode={options.mode!r}: must be chunk, recurrent or reference")
    if options.qk_norm not in (None, "l2"):
        raise ValueError(f"qk_norm={options.qk_norm!r}: must be None or 'l2'")


def _check_features(call: Call) -> None:
    """Raises ValueError for tensors that have not the K that q and k have after their map."""
    needs = call.q.shape[-1]
    if call.initial_state is not None and call.initial_state.shape[2] != needs:
        has = call.initial_state.shape[2]
        raise ValueError(f"initial_state: K = {has}; q and k have {needs} features after their map")
    for name, x in (("g", call.g), ("erase", call.erase)):
        if x is not None and x.ndim == 4 and x.shape[3] != needs:
            raise ValueError(
                f"{name}: {x.shape[3]} key channels; q and k have {needs} features after their map"
            )


# ------------------------------------------------------------------------------------------ token by token


class TokenInputs(NamedTuple):
    """One token as a step reads it, or all tokens: then each tensor has T after B."""

    q: Tensor  # [B, HV, K], scaled
    k: Tensor  # [B, HV, K]
    erased: Tensor  # [B, HV, K], erase ⊙ k
    written: Tensor  # [B, HV, V], write ⊙ v
    beta: Tensor | None  # [B, HV]
    decay: Tensor | None  # [B, HV, K or 1, 1]


def _run_stepwise(call: Call, scale: float, mode: str) -> tuple[Tensor, Tensor]:
    """The modes "reference" and "recurrent": one token after another, one packed sequence after another."""
    q, v = call.q, call.v
    dtype = dtype_of(call)
    tokens = _tokens_of(call, scale, dtype)
    literal = mode == "reference" and call.beta is not None  # of linear attention both are the same
    step = _reference_step if literal else _recurrent_step

    bounds = None if call.cu_seqlens is None else bounds_of(call.cu_seqlens, q.shape[1])
    sequences = q.shape[0] if bounds is None else len(bounds) - 1
    if call.initial_state is None:
        state = q.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    else:
        state = call.initial_state.to(dtype)

    outputs, states = [], []
    for n, (start, stop) in enumerate(itertools.pairwise(bounds or (0, q.shape[1]))):
        # The rows of a batch run together. Where they are packed B is 1, and each sequence has its own state.
        S = state if bounds is None else state[n : n + 1]
        for t in range(start, stop):
            of_token: Any = (None if x is None else x[:, t] for x in tokens)
            o, S = step(TokenInputs(*of_token), S)
            outputs.append(o)  # [B, HV, V]
        states.append(S)

    o = torch.stack(outputs, 1) if outputs else v  # without tokens o is empty, like v
    # Without any sequence there is no state to join; one needs no copy.
    final = states[0] if len(states) == 1 else torch.cat([state[:0], *states])  # [N, HV, K, V]
    return o.to(v.dtype), final


def _tokens_of(call: Call, scale: float, dtype: torch.dtype) -> TokenInputs:
    """All tokens of a call, in `dtype`, each head of q and k repeated for the heads of v."""
    wide: Any = (None if x is None else x.to(dtype) for x in call[:7])
    q, k, v, beta, g, erase, write = wide
    if group_of(call) > 1:
        q, k = (x.repeat_interleave(group_of(call), 2) for x in (q, k))  # [B, T, HV, K]

    decay = g
    if g is not None:
        # [B, T, HV, K or 1, 1], for rows of S
        decay = g.exp()[..., None] if g.ndim == 4 else g.exp()[..., None, None]
    return TokenInputs(
        q=q * scale,
        k=k,
        erased=k if erase is None else erase * k,
        written=v if write is None else write * v,
        beta=beta,
        decay=decay,
    )


def _reference_step(token: TokenInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The output [B, HV, V] and the new state [B, HV, K, V] by the delta rule's formula, term by term."""
    q, k, erased, written, beta, decay = token
    decay = 1 if decay is None else decay
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    # I − β k (erase ⊙ k)⊤, [B, HV, K, K]
    transition = eye - torch.einsum("bh,bhi,bhj->bhij", beta, k, erased)
    state = transition @ (decay * state) + torch.einsum("bh,bhk,bhv->bhkv", beta, k, written)
    return torch.einsum("bhk,bhkv->bhv", q, state), state


def _recurrent_step(token: TokenInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a rank-one update, so that products are of a matrix and a vector. Without β nothing is erased."""
    q, k, erased, written, beta, decay = token
    if decay is not None:
        state = state * decay
    if beta is not None:
        held = (erased.unsqueeze(-2) @ state).squeeze(-2)  # the value under the erased key
        written = beta[..., None] * (written - held)
    state = state + k.unsqueeze(-1) * written.unsqueeze(-2)  # [B, HV, K, V]
    return (q.unsqueeze(-2) @ state).squeeze(-2), state
