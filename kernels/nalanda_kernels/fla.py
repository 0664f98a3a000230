"""Both ops on flash-linear-attention's (fla's) kernels, with the contracts of `nalanda.model.ops`.

fla's chunk kernels take bf16 and fp16; its linear attention also fp32, with TF32 products. Every input gets
a gradient. Calls that fla cannot serve, or would serve wrongly, raise `Unsupported`.
"""

import functools

import torch
from torch import Tensor

from nalanda_kernels import Unsupported, serve
from nalanda_kernels.triton.common import bounds_of, map_in_torch, name_of, without_autocast

WIDEST = 256  # the most features of a key in fla's delta rule


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    feature_map=None,
    qk_norm: str | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """`nalanda.ops.delta_rule` by `chunk_delta_rule`; with g by `chunk_gated_delta_rule`; with g by key
    channel by `chunk_kda`; with erase or write by `chunk_gdn2`.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, beta `[B, T, HV]`, g `[B, T, HV (, K)]`, erase `[B, T, HV, K]`,
    write `[B, T, HV, V]`, states `[N, HV, K, V]` in fp32.

    Raises:
        Unsupported: β above 1, precision above 16 bits, more than 256 features, chunks below 16 tokens, no
            tokens, or a Triton that compiles fla's gated backward wrongly for this GPU.
    """
    no_negative(allow_neg_eigval)
    dtype = _common_dtype(q, v, allowed=(torch.bfloat16, torch.float16))
    _check_call(q, v, g, chunk_size)
    # Their norm is the same formula in fp32, with one cast.
    normed_inside = feature_map is None and qk_norm == "l2"

    with without_autocast(q):
        if not normed_inside:
            q, k = features_of(q, k, feature_map, qk_norm)

        # Only now is the number of features known: a map may change it.
        if q.shape[-1] > WIDEST:
            raise Unsupported(f"K = {q.shape[-1]}: at most {WIDEST} features")

        options = options_of(q, v, scale, initial_state, output_final_state, cu_seqlens)
        options |= {"use_qk_l2norm_in_kernel": normed_inside}
        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        size = {"chunk_size": min(chunk_size, 64)}

        # One of four kernels; two of them need a head of q and k for each head of v.
        if erase is not None or write is not None:
            from fla.ops.gdn2 import chunk_gdn2

            q, k = _repeat_heads(q, k, v)
            g = torch.zeros_like(beta) if g is None else g
            # A decay per head, or none, is the same for all channels [B, T, HV, K].
            g = (g if g.ndim == 4 else g[..., None]).float().expand(k.shape)
            # gdn2 has no β: it scales what is erased and what is written.
            erase = _scaled_gate(beta, erase, k, dtype)
            write = _scaled_gate(beta, write, v, dtype)
            o, state = chunk_gdn2(q, k, values, g, erase, write, **options)
        elif g is None:
            from fla.ops.delta_rule import chunk_delta_rule

            q, k = _repeat_heads(q, k, v)
            o, state = chunk_delta_rule(q, k, values, beta, **options, **size)
        elif g.ndim == 4:
            from fla.ops.kda import chunk_kda

            o, state = chunk_kda(q, k, values, g.float(), beta, **options)
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            o, state = chunk_gated_delta_rule(q, k, values, g.float(), beta, **options, **size)
    return o.to(v.dtype), state if output_final_state else None


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    feature_map=None,
    qk_norm: str | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """`nalanda.ops.linear_attention` by `chunk_simple_gla`, or `chunk_gla` for decays by key channel.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV]` or `[B, T, HV, K]`, states `[N, HV, K, V]` in fp32.
    Products take the higher precision of q and v.

    Raises:
        Unsupported: float64, an odd K or V in 16 bits, chunks below 16 tokens, no tokens, or a Triton that
            compiles fla's gated backward wrongly for this GPU.
    """
    dtype = _common_dtype(q, v, allowed=(torch.bfloat16, torch.float16, torch.float32))
    _check_call(q, v, g, chunk_size)
    with without_autocast(q):
        # [B, T, HV, K] each.
        q, k = _repeat_heads(*features_of(q, k, feature_map, qk_norm), v)

        K, V = q.shape[-1], v.shape[-1]
        if dtype.itemsize == 2 and (K % 2 or V % 2):
            raise Unsupported(f"K = {K} and V = {V}: in 16 bits both must be even")
        if g is not None and g.ndim == 4 and g.shape[3] != K:
            raise Unsupported(f"g with {g.shape[3]} key channels for K = {K}")

        options = options_of(q, v, scale, initial_state, output_final_state, cu_seqlens)
        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        if g is not None and g.ndim == 4:
            from fla.ops.gla import chunk_gla

            o, state = chunk_gla(q, k, values, g.float(), **options)
        else:
            from fla.ops.simple_gla import chunk_simple_gla

            options |= {"chunk_size": min(chunk_size, 64)}
            o, state = chunk_simple_gla(q, k, values, None if g is None else g.float(), **options)
    return o.to(v.dtype), state if output_final_state else None


def _common_dtype(q: Tensor, v: Tensor, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    dtype = torch.promote_types(q.dtype, v.dtype)
    if dtype not in allowed:
        computed = ", ".join(map(name_of, allowed))
        raise Unsupported(f"{name_of(dtype)} inputs: it computes in {computed}")
    return dtype


def no_negative(allow_neg_eigval: bool) -> None:
    """For a delta rule's kernel that keeps (I + A)⁻¹ in 16 bits, as fla's and FlashQLA's do: where a token
    repeats and β nears 2, its rounding lengthens the state. Raises Unsupported if β may exceed 1."""
    if allow_neg_eigval:
        raise Unsupported("β above 1: it keeps a chunk's inverse in 16 bits")


def no_channels(g: Tensor | None, erase: Tensor | None, write: Tensor | None) -> None:
    """For a delta rule's kernel with one gate a head. Raises Unsupported for others."""
    if erase is not None or write is not None or (g is not None and g.ndim == 4):
        raise Unsupported("a delta rule with gates by channel")


def _check_call(q: Tensor, v: Tensor, g: Tensor | None, chunk_size: int) -> None:
    from fla.ops.common import chunk_o

    if 0 in (*q.shape, *v.shape):
        raise Unsupported("inputs without tokens or features")
    if chunk_size < 16:
        raise Unsupported(f"chunk_size={chunk_size}: at least 16")
    if g is None or g.ndim == 4 or not torch.is_grad_enabled():  # the fault lies elsewhere
        return
    # fla's own flags of the Triton versions; without them nothing is refused.
    wrong = getattr(chunk_o, "TRITON_ABOVE_3_4_0", False) and not getattr(
        chunk_o, "TRITON_ABOVE_3_7_1", True
    )
    if wrong and getattr(chunk_o, "IS_NVIDIA_HOPPER", False):
        raise Unsupported(
            "a gated backward on Hopper: Triton 3.4 to 3.7.0 compiles it wrongly, take 3.7.1"
        )


def _scaled_gate(beta: Tensor, gate: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """β times a gate by channel, in the shape and the dtype of the x that it multiplies."""
    scaled = beta[..., None] if gate is None else beta[..., None] * gate
    return scaled.to(dtype).expand(x.shape)


def features_of(q: Tensor, k: Tensor, feature_map, qk_norm: str | None) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k), normed, in fp32 with one cast; by our kernel if it can, else by torch."""
    if feature_map is None and qk_norm is None:
        return q, k
    served = serve("map_features", "auto", q.device.type, q, k, feature_map, qk_norm)
    return map_in_torch(q, k, feature_map, qk_norm) if served is None else served


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with one head for each head of v."""
    group = v.shape[2] // q.shape[2]
    return (q, k) if group == 1 else (q.repeat_interleave(group, 2), k.repeat_interleave(group, 2))


def options_of(q, v, scale, initial_state, output_final_state, cu_seqlens) -> dict:
    K = q.shape[-1]
    if initial_state is not None and initial_state.shape[2] != K:
        raise Unsupported(f"an initial_state with K = {initial_state.shape[2]} for keys of {K}")
    # The scale is of features after the map, as in our kernels.
    options = {
        "scale": K**-0.5 if scale is None else float(scale),
        "initial_state": None if initial_state is None else initial_state.float(),
        "output_final_state": output_final_state,
    }

    if cu_seqlens is None:
        return options
    # fla takes the bounds on the device and on the host.
    bounds = bounds_of(cu_seqlens, q.shape[1])
    on_host, on_device = _bounds_on(bounds, q.device)
    return options | {"cu_seqlens": on_device, "cu_seqlens_cpu": on_host}


@functools.lru_cache(maxsize=32)
def _bounds_on(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The bounds on host and device. All layers get the same tensors, by which fla caches its tables."""
    on_host = torch.tensor(bounds)
    return on_host, on_host.to(device)
