"""One token of generation in torch, with few operators: a mixer between its projections and o_proj.

With one token an operator costs as much as its launch, on a CPU too. So this is the chunkwise formula without
the parts that only longer inputs need. It rounds to the model's dtype wherever the chunkwise path does, so
that in bf16 too generation from a cache equals a new read of the text.

The kernel of API 3 takes the fields of `StepRule` and `StepLayer` as keywords.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import FeatureMap
from .feature_maps import EPS
from .layers import at_least_fp32, excess
from .ops import l2norm


class StepRule(NamedTuple):
    """The recurrence of one token, as a mixer's class states it."""

    delta: bool = False  # the delta rule, or linear attention
    beta_scale: float = 1.0  # β = beta_scale · σ(b)
    decay: tuple[Tensor, Tensor] | None = None  # (A_log, dt_bias) of `delta.Decay`
    qk_norm: str | None = None
    scale: float | None = None  # of the readout; None: F^-½
    denominator: bool = False
    silu: bool = False  # whether SiLU precedes the values


class StepLayer(NamedTuple):
    """The sizes and layers around the recurrence, which `Mixer.step_layer` collects."""

    dtype: torch.dtype  # of the output
    key_dim: int
    value_dim: int
    num_heads: int
    num_v_heads: int
    steps: int = 1
    feature_map: FeatureMap | None = None
    filters: dict[str, Tensor] | None = None  # of the short convolutions
    norm: tuple[Tensor, float] | None = None  # weight and ε of the norm of each head
    gate_activation: str = "silu"
    out: dict[str, Tensor] | None = None  # memory for the new state


def step(
    inputs: Callable[[], dict[str, Tensor]],
    state: dict[str, Tensor],
    rule: StepRule,
    layer: StepLayer,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One token of N sequences through the delta rule or linear attention, from projections to o_proj.

    inputs: returns q `[N, 1, H·K]`, k `[N, 1, steps·H·K]` and v `[N, 1, steps·HV·V]` (or with heads apart) as
        projected, and as needed b (logits of beta, or of the erase gate), w (of the write gate), a or g (for
        the decay), positions and gate.
    state: recurrent `[N, HV, F, V (+ 1)]` and conv_q, conv_k, conv_v `[N, W−1, ·]`. It is not changed.

    Of `layer.out` only the recurrent state is filled. Returns o `[N, 1, HV, V]` in `layer.dtype` or a wider
    one, and the new state under the same names.
    """
    x = inputs()
    narrow = x["v"].dtype
    q, k, v, new = _convolve(x, state, layer.filters)
    if rule.silu:
        v = F.silu(v)
    if "w" in x:
        v = v * at_least_fp32(x["w"]).sigmoid().to(narrow).view(v.shape)

    # [N, 1, H, K], [N, n, H, K] and [N, n, HV, V], for n steps a token
    q, k = (_split_heads(y, layer.num_heads, layer.key_dim) for y in (q, k))
    v = _split_heads(v, layer.num_v_heads, layer.value_dim)
    q, k, length = _map(q, k, rule, layer, narrow)
    if rule.denominator:
        v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], -1)

    S = _update(x, (k, v, length), state["recurrent"], rule, layer)
    new["recurrent"] = S
    N, HV = S.shape[:2]
    # [N, 1, HV, V (+ 1)]
    o = torch.bmm(q.reshape(N * HV, 1, -1), S.flatten(0, 1)).view(N, 1, HV, -1)
    return _read_out(o, x, rule, layer, narrow), new


def _convolve(
    x: dict[str, Tensor], state: dict[str, Tensor], filters: dict[str, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """q, k and v behind their convolutions, by one product, and the convolutions' new states."""
    if not filters:
        return x["q"], x["k"], x["v"], {}

    names = list(filters)
    sizes = [x[name].shape[-1] for name in names]
    past = torch.cat([state[f"conv_{name}"] for name in names], -1)
    now = torch.cat([x[name] for name in names], -1)
    laid = torch.cat([past.to(now.dtype), now], 1)  # [N, W, ·]
    taps = torch.cat([weight.flatten(1) for weight in filters.values()]).T  # [W, ·]
    # One product for all three: a depthwise filter sees no other channel.
    q, k, v = (at_least_fp32(laid) * taps).sum(1).to(x["v"].dtype).split(sizes, -1)

    # Clones, because views would keep each other's memory alive.
    states = laid[:, 1:].split(sizes, -1)
    return q, k, v, {f"conv_{name}": y.clone() for name, y in zip(names, states, strict=True)}


def _split_heads(y: Tensor, heads: int, size: int) -> Tensor:
    return at_least_fp32(y).view(len(y), -1, heads, size)


def _map(
    q: Tensor, k: Tensor, rule: StepRule, layer: StepLayer, narrow: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q `[N, HV, F]`, scaled, and k `[N, n, HV, F]` behind map and norm.

    The third is the squared length of rounded keys `[N, n, HV, 1]`, by which β is divided; None for 1.
    """
    if layer.feature_map is not None:
        # A map takes q and k of one shape; q has one step a token, k has n.
        q, k = layer.feature_map(q.expand_as(k), k)
    if rule.qk_norm is not None:
        q, k = l2norm(torch.stack([q.expand_as(k), k])).unbind()

    length = None
    if q.dtype != narrow:
        # Rounded as the chunkwise path rounds features, then wide again for the sums.
        q, k = (at_least_fp32(y.to(narrow)) for y in (q, k))
        if rule.beta_scale > 1:
            length = excess(k)[..., None]
    # One q a token reads, after its last step.
    q = q[:, 0] * (q.shape[-1] ** -0.5 if rule.scale is None else rule.scale)

    group = layer.num_v_heads // layer.num_heads
    if group > 1:
        q, k = (y.repeat_interleave(group, -2) for y in (q, k))
        length = None if length is None else length.repeat_interleave(group, -2)
    return q, k, length


def _update(
    x: dict[str, Tensor],
    written: tuple[Tensor, Tensor, Tensor | None],
    state: Tensor,
    rule: StepRule,
    layer: StepLayer,
) -> Tensor:
    """The new state `[N, HV, F, V (+ 1)]`. written: k, v and the keys' length, see `_map`."""
    k, v, length = written
    S = state.flatten(0, 1)  # a head of a sequence is a matrix of a batch
    decay = _log_decay(x, rule)
    target = None
    if decay is not None:
        # A copy, which the steps may overwrite: `state` itself must not change.
        S = target = S * decay.to(S.dtype).exp().view(len(S), -1, 1)
    if layer.out is not None:
        target = layer.out["recurrent"].view(S.shape)

    erased, beta = k, None
    if rule.delta:
        beta = rule.beta_scale * at_least_fp32(x["b"]).sigmoid()
        beta = beta.view(len(v), layer.steps, layer.num_v_heads, -1)  # a number, or an erase gate
        beta = beta if length is None else beta / length
        erased = beta * k if "w" in x else k  # with a write gate β is the erase gate, [N, n, HV, F]

    for j in range(layer.steps):
        k_j, v_j = (y[:, j].reshape(len(S), 1, -1) for y in (k, v))  # [N·HV, 1, F or V]
        if beta is not None:
            # S ← S + k (β (v − (erase ⊙ k)ᵀ S))ᵀ; a write gate is in v already.
            v_j = v_j - torch.bmm(erased[:, j].reshape(k_j.shape), S)
            if "w" not in x:
                v_j = beta[:, j].reshape(len(S), 1, 1) * v_j
        S = target = torch.addcmul(S, k_j.mT, v_j, out=target)
    return S.view(state.shape)


def _log_decay(x: dict[str, Tensor], rule: StepRule) -> Tensor | None:
    """g of the inputs `[N, 1, HV (, F)]`, or by `rule.decay` `[N, HV, 1 or F]`; None for no decay."""
    if rule.decay is None:
        return x.get("g")
    A_log, dt_bias = rule.decay
    # g = −exp(A_log) · softplus(a + dt_bias), A_log [HV], dt [N, HV, 1 or F]
    dt = F.softplus(at_least_fp32(x["a"]) + dt_bias)
    return -A_log.exp()[:, None] * dt.view(len(dt), len(A_log), -1)


def _read_out(
    o: Tensor, x: dict[str, Tensor], rule: StepRule, layer: StepLayer, narrow: torch.dtype
) -> Tensor:
    """Denominator, norm and gate."""
    if rule.denominator:
        count = (x["positions"] + 1).to(o.dtype)[..., None, None]  # tokens seen, [N or 1, 1, 1, 1]
        o = o[..., :-1] / (o[..., -1:] + EPS * count)
    elif rule.delta or narrow != torch.float16:  # sums may exceed fp16's range before the norm
        o = o.to(narrow)
    if layer.norm is not None:
        weight, eps = layer.norm
        o = F.rms_norm(at_least_fp32(o), (layer.value_dim,), at_least_fp32(weight), eps).to(narrow)
    if "gate" in x:
        activation = F.silu if layer.gate_activation == "silu" else torch.sigmoid
        o = o.to(narrow) * activation(x["gate"]).view(o.shape)
    return o if o.dtype == torch.float64 else o.to(layer.dtype)
