"""Both ops on flash-linear-attention's (fla's) kernels, with the contracts of `nalanda.model.ops`.

fla's chunk kernels take bf16 and fp16; its linear attention also fp32, with TF32 products. Every input gets
a gradient. Calls that fla cannot serve, or would serve wrongly, raise `Unsupported`.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nalanda_kernels import Unsupported, serve
from nalanda_kernels.tensors import bounds_of
from nalanda_kernels.triton.common import map_in_torch, name_of, without_autocast

WIDEST = 256  # the most features of a key in fla's delta rule


class Call(NamedTuple):
    """The arguments of both ops, as kernels of API 3 take them."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    beta: Tensor | None  # [B, T, HV]; None for linear attention
    g: Tensor | None  # [B, T, HV] or [B, T, HV, K]
    erase: Tensor | None = None  # [B, T, HV, K]
    write: Tensor | None = None  # [B, T, HV, V]
    initial_state: Tensor | None = None  # [N, HV, K, V]
    cu_seqlens: Tensor | None = None  # [N + 1]
    feature_map: Any = None
    qk_norm: str | None = None
    scale: float | None = None
    output_final_state: bool = False
    allow_neg_eigval: bool = False
    chunk_size: int = 64

    @property
    def normed_inside(self) -> bool:
        """Whether the kernel norms q and k: its norm is the same formula in fp32, with one cast."""
        return self.feature_map is None and self.qk_norm == "l2"


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`nalanda.ops.delta_rule` by `chunk_delta_rule`; with g by `chunk_gated_delta_rule`; with g by key
    channel by `chunk_kda`; with erase or write by `chunk_gdn2`.

    options: the other fields of `Call`.

    Raises:
        Unsupported: β above 1, precision above 16 bits, more than 256 features, chunks below 16 tokens, no
            tokens, or a Triton that compiles fla's gated backward wrongly for this GPU.
    """
    call = Call(q, k, v, beta, g, **options)
    refuse_negative(call)
    dtype = _common_dtype(call, allowed=(torch.bfloat16, torch.float16))
    _check_call(call)

    with without_autocast(q):
        if not call.normed_inside:
            call = map_call(call)
        # Only now is the number of features known: a map may change it.
        if call.q.shape[-1] > WIDEST:
            raise Unsupported(f"K = {call.q.shape[-1]}: at most {WIDEST} features")

        q, k, values = call.q.to(dtype), call.k.to(dtype), v.to(dtype)
        foreign = foreign_options(call) | {"use_qk_l2norm_in_kernel": call.normed_inside}
        size = {"chunk_size": min(call.chunk_size, 64)}

        # One of four kernels; two of them need a head of q and k for each head of v.
        if call.erase is not None or call.write is not None:
            from fla.ops.gdn2 import chunk_gdn2

            q, k = _repeat_heads(q, k, v)
            g = torch.zeros_like(beta) if g is None else g
            # A decay per head, or none, is the same for all channels [B, T, HV, K].
            g = (g if g.ndim == 4 else g[..., None]).float().expand(k.shape)
            # gdn2 has no β: it scales what is erased and what is written.
            erase = _scaled_gate(beta, call.erase, k, dtype)
            write = _scaled_gate(beta, call.write, v, dtype)
            o, state = chunk_gdn2(q, k, values, g, erase, write, **foreign)
        elif g is None:
            from fla.ops.delta_rule import chunk_delta_rule

            q, k = _repeat_heads(q, k, v)
            o, state = chunk_delta_rule(q, k, values, beta, **foreign, **size)
        elif g.ndim == 4:
            from fla.ops.kda import chunk_kda

            o, state = chunk_kda(q, k, values, g.float(), beta, **foreign)
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            o, state = chunk_gated_delta_rule(q, k, values, g.float(), beta, **foreign, **size)
    return o.to(v.dtype), state if call.output_final_state else None


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`nalanda.ops.linear_attention` by `chunk_simple_gla`, or `chunk_gla` for decays by key channel.

    options: the other fields of `Call`. Products take the higher precision of q and v.

    Raises:
        Unsupported: float64, an odd K or V in 16 bits, chunks below 16 tokens, no tokens, or a Triton that
            compiles fla's gated backward wrongly for this GPU.
    """
    call = Call(q, k, v, None, g, **options)
    dtype = _common_dtype(call, allowed=(torch.bfloat16, torch.float16, torch.float32))
    _check_call(call)
    with without_autocast(q):
        call = map_call(call)
        q, k = _repeat_heads(call.q, call.k, v)  # [B, T, HV, K] each

        K, V = q.shape[-1], v.shape[-1]
        if dtype.itemsize == 2 and (K % 2 or V % 2):
            raise Unsupported(f"K = {K} and V = {V}: in 16 bits both must be even")
        if g is not None and g.ndim == 4 and g.shape[3] != K:
            raise Unsupported(f"g with {g.shape[3]} key channels for K = {K}")

        foreign = foreign_options(call)
        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        if g is not None and g.ndim == 4:
            from fla.ops.gla import chunk_gla

            o, state = chunk_gla(q, k, values, g.float(), **foreign)
        else:
            from fla.ops.simple_gla import chunk_simple_gla

            foreign |= {"chunk_size": min(call.chunk_size, 64)}
            o, state = chunk_simple_gla(q, k, values, None if g is None else g.float(), **foreign)
    return o.to(v.dtype), state if call.output_final_state else None


def _common_dtype(call: Call, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    dtype = torch.promote_types(call.q.dtype, call.v.dtype)
    if dtype not in allowed:
        computed = ", ".join(map(name_of, allowed))
        raise Unsupported(f"{name_of(dtype)} inputs: it computes in {computed}")
    return dtype


def refuse_negative(call: Call) -> None:
    """For a delta rule's kernel that keeps (I + A)⁻¹ in 16 bits, as fla's and FlashQLA's do: where a token
    repeats and β nears 2, its rounding lengthens the state. Raises Unsupported if β may exceed 1."""
    if call.allow_neg_eigval:
        raise Unsupported("β above 1: it keeps a chunk's inverse in 16 bits")


def refuse_channels(call: Call) -> None:
    """For a delta rule's kernel with one gate a head. Raises Unsupported for others."""
    by_channel = call.g is not None and call.g.ndim == 4
    if by_channel or call.erase is not None or call.write is not None:
        raise Unsupported("a delta rule with gates by channel")


def _check_call(call: Call) -> None:
    from fla.ops.common import chunk_o

    if 0 in (*call.q.shape, *call.v.shape):
        raise Unsupported("inputs without tokens or features")
    if call.chunk_size < 16:
        raise Unsupported(f"chunk_size={call.chunk_size}: at least 16")
    # The fault lies in gates by head, and in their backward.
    if call.g is None or call.g.ndim == 4 or not torch.is_grad_enabled():
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


def map_call(call: Call) -> Call:
    """The call with φ(q) and φ(k), normed, in fp32 with one cast; by our kernel if it can, else by torch."""
    q, k, feature_map, qk_norm = call.q, call.k, call.feature_map, call.qk_norm
    if feature_map is None and qk_norm is None:
        return call
    served = serve("map_features", "auto", q.device.type, q, k, feature_map, qk_norm)
    if served is None:
        served = map_in_torch(q, k, feature_map, qk_norm)
    return call._replace(q=served[0], k=served[1])


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with one head for each head of v."""
    group = v.shape[2] // q.shape[2]
    return (q, k) if group == 1 else (q.repeat_interleave(group, 2), k.repeat_interleave(group, 2))


def foreign_options(call: Call) -> dict[str, Any]:
    """fla's keywords of a mapped call. Its scale is of features after the map, as in our kernels."""
    K, state = call.q.shape[-1], call.initial_state
    if state is not None and state.shape[2] != K:
        raise Unsupported(f"an initial_state with K = {state.shape[2]} for keys of {K}")
    options = {
        "scale": K**-0.5 if call.scale is None else float(call.scale),
        "initial_state": None if state is None else state.float(),
        "output_final_state": call.output_final_state,
    }

    if call.cu_seqlens is None:
        return options
    # fla takes the bounds on the device and on the host.
    bounds = bounds_of(call.cu_seqlens, call.q.shape[1])
    on_host, on_device = _bounds_on(bounds, call.q.device)
    return options | {"cu_seqlens": on_device, "cu_seqlens_cpu": on_host}


@functools.lru_cache(maxsize=32)
def _bounds_on(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The bounds on host and device. All layers get the same tensors, by which fla caches its tables."""
    on_host = torch.tensor(bounds)
    return on_host, on_host.to(device)
