"""One token of generation in torch, with few operators: what a mixer does between projections and o_proj.

With one token an operator costs as much as its launch, on a CPU too. So this is the chunkwise formula without
the parts that only longer inputs need; the signature is the fused kernel's. It rounds to the model's dtype
wherever the chunkwise path does, so that in bf16 too generation from a cache equals a new read of the text.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .feature_maps import EPS
from .layers import at_least_fp32, excess
from .ops import l2norm


def step(
    inputs: Callable[[], dict[str, Tensor]],
    state: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    num_heads: int,
    num_v_heads: int,
    feature_map: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    qk_norm: str | None = None,
    scale: float | None = None,
    steps: int = 1,
    delta: bool = False,
    beta_scale: float = 1.0,
    decay: tuple[Tensor, Tensor] | None = None,
    denominator: bool = False,
    filters: dict[str, Tensor] | None = None,
    silu: bool = False,
    norm: tuple[Tensor, float] | None = None,
    gate_activation: str = "silu",
    out: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One token of N sequences through the delta rule or linear attention, from projections to o_proj.

    inputs: returns q `[N, 1, H·K]`, k `[N, 1, steps·H·K]` and v `[N, 1, steps·HV·V]` (or with heads apart) as
        projected, and as needed b (logits of beta, or of what is erased), w (of what is written), a or g (for
        the decay), positions and gate.
    state: recurrent `[N, HV, F, V (+ 1)]` and conv_q, conv_k, conv_v `[N, W−1, ·]`. It is not changed.
    Other options: as in `nalanda_kernels.triton.step.step`; of `out` only the recurrent state is filled.

    Returns o `[N, 1, HV, V]` in dtype or a wider one, and the new state under the same names.
    """
    x, new = inputs(), {}
    q, k, v = x["q"], x["k"], x["v"]
    narrow = v.dtype
    if filters:
        names, sizes = list(filters), [x[name].shape[-1] for name in filters]
        past = torch.cat([state[f"conv_{name}"] for name in names], -1)
        laid = torch.cat([past.to(q.dtype), torch.cat([x[name] for name in names], -1)], 1)
        taps = torch.cat([weight.flatten(1) for weight in filters.values()]).T  # [W, ·]
        q, k, v = (at_least_fp32(laid) * taps).sum(1).to(narrow).split(sizes, -1)
        # Clones, because views would keep each other's memory alive.
        new = {
            f"conv_{n}": y.clone() for n, y in zip(names, laid[:, 1:].split(sizes, -1), strict=True)
        }
    if silu:
        v = F.silu(v)
    if "w" in x:
        v = v * at_least_fp32(x["w"]).sigmoid().to(narrow).view(v.shape)
    q, k, v = (
        at_least_fp32(y).view(len(y), -1, heads, size)
        for y, heads, size in (
            (q, num_heads, key_dim),
            (k, num_heads, key_dim),
            (v, num_v_heads, value_dim),
        )
    )
    if feature_map is not None:
        q, k = feature_map(q.expand_as(k), k)
    if qk_norm is not None:
        q, k = l2norm(torch.stack([q.expand_as(k), k])).unbind()
    length = None
    if q.dtype != narrow:
        q, k = (at_least_fp32(y.to(narrow)) for y in (q, k))
        length = excess(k)[..., None] if beta_scale > 1 else None
    q = q[:, 0] * (q.shape[-1] ** -0.5 if scale is None else scale)
    if num_v_heads > num_heads:
        group = num_v_heads // num_heads
        q, k = (y.repeat_interleave(group, -2) for y in (q, k))
        length = None if length is None else length.repeat_interleave(group, -2)
    if denominator:
        v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], -1)

    # A head of a sequence is a matrix of a batch.
    shape, g = state["recurrent"].shape, x.get("g")
    S = state["recurrent"].flatten(0, 1)
    if decay is not None:
        A_log, dt_bias = decay
        dt = F.softplus(at_least_fp32(x["a"]) + dt_bias)
        g = -A_log.exp()[:, None] * dt.view(len(dt), len(A_log), -1)
    if g is not None:
        S = S * g.to(S.dtype).exp().view(len(S), -1, 1)
    into = None if g is None else S  # with a decay S is a new tensor
    if out is not None:
        into = out["recurrent"].view(S.shape)
    beta, erased = None, k
    if delta:
        beta = beta_scale * at_least_fp32(x["b"]).sigmoid().view(len(v), steps, num_v_heads, -1)
        beta = beta if length is None else beta / length
        erased = beta * k if "w" in x else k
    for j in range(steps):
        k_j, v_j = (y[:, j].reshape(len(S), 1, -1) for y in (k, v))
        if beta is not None:
            v_j = v_j - torch.bmm(erased[:, j].reshape(k_j.shape), S)
            if "w" not in x:
                v_j = beta[:, j].reshape(len(S), 1, 1) * v_j
        S = into = torch.addcmul(S, k_j.mT, v_j, out=into)
    new["recurrent"] = S.view(shape)
    o = torch.bmm(q.reshape(len(S), 1, -1), S).view(shape[0], 1, shape[1], -1)
    if denominator:
        o = o[..., :-1] / (o[..., -1:] + EPS * (x["positions"] + 1).to(o.dtype)[..., None, None])
    elif delta or narrow != torch.float16:  # sums may exceed fp16's range before the norm
        o = o.to(narrow)
    if norm is not None:
        o = F.rms_norm(at_least_fp32(o), (value_dim,), at_least_fp32(norm[0]), norm[1]).to(narrow)
    if "gate" in x:
        activation = F.silu if gate_activation == "silu" else torch.sigmoid
        o = o.to(narrow) * activation(x["gate"]).view(o.shape)
    return o if o.dtype == torch.float64 else o.to(dtype), new
