"""One token of generation: a layer between its projections and o_proj, in one kernel or with few operators.

With one token an operator costs as much as its launch, on a CPU too. So the torch form here is the chunkwise formula
without the parts that only longer inputs need. It rounds to the model's dtype wherever the chunkwise path does, so
that in bf16 too generation from a cache equals a new read of the text.

`step` reads a layer's `Rule` and weights. Kernels take them as keywords, the fields of `nalanda_kernels.one_token`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .call import Inputs
from .feature_maps import EPS
from .kernels import by_kernel, has_kernel
from .layers import (
    LayerNorm,
    RMSNorm,
    altered,
    at_least_fp32,
    excess,
    overrides,
    rotary_frequencies,
)
from .ops import l2norm
from .projections import apply_linear, matrix_of
from .recurrent import project_inputs, up_projections
from .sequences import Sequences

LayerState = dict[str, Tensor]

MOST_READ = 2**20
"""Sequences of a token times entries of a second matrix, up to which the step's kernel multiplies by it."""


def is_described(layer: Any) -> bool:
    """Whether `step_fields` says all that a layer computes between its projections and o_proj."""
    rule = layer.rule
    if not layer.follows_rule or rule.shared_qk or rule.norm_write or rule.norm_read:
        return False
    if rule.write == "rows" and rule.decay != "none":
        return False
    # A kernel reads the norm's weight, which an adapter around the norm does not have.
    if rule.norm == "head" and not isinstance(layer.o_norm, RMSNorm):
        return False
    # It reads decays and convolutions too. Maps say themselves what computes them.
    parts = [x for name, x in layer.named_children() if name != "feature_map"]
    return not any(map(overrides, (layer, *parts)))


def decay_of(layer: Any) -> tuple[Tensor, Tensor] | None:
    """(A_log `[HV]`, dt_bias) of a layer whose decay is exp(−exp(A_log)·softplus(a + dt_bias)); None for others."""
    if layer.rule.decay not in ("head", "channel", "dt"):
        return None
    decay = layer.discretization if layer.rule.decay == "dt" else layer.decay
    return decay.A_log, decay.dt_bias


def filters_of(layer: Any) -> dict[str, Tensor]:
    """The short convolutions' filters, `[·, W]` or `[·, 1, W]`: of q, k and v, and `local`, of v in the output."""
    convs = layer.rule.projected if layer.rule.conv else ()
    filters = {name: getattr(layer, f"{name}_conv1d").weight for name in convs}
    return filters | ({"local": layer.dwc.weight} if layer.rule.value_conv else {})


def step_fields(layer: Any, dtype: torch.dtype, out: LayerState | None = None) -> dict[str, Any]:
    """What the kernel `step` reads of a layer that follows its rule; `inputs` have its rotations.

    dtype: of the output. out: memory for the new state.
    """
    rule = layer.rule
    return {
        "dtype": dtype,
        "key_dim": layer.K,
        # Each half of Pola's v is a head, as in `mix`.
        "value_dim": layer.V // rule.streams,
        "num_heads": layer.num_heads,
        "num_v_heads": layer.num_v_heads * rule.streams,
        "steps": rule.steps,
        "delta": rule.write == "delta",
        "beta_scale": rule.beta_scale,
        "decay": decay_of(layer),
        "feature_map": None if rule.map is None else layer.feature_map,
        "qk_norm": "l2" if rule.qk_norm == "l2" else None,
        "scale": rule.scale,
        "denominator": rule.read != "plain",
        "silu": rule.silu_before_write,
        "filters": filters_of(layer) or None,
        "norm": (layer.o_norm.weight, layer.o_norm.eps) if rule.norm == "head" else None,
        "gate_activation": rule.gate,
        "out": out,
    }


def kernel_token(
    layer: Any, dtype: torch.dtype, out: LayerState | None = None
) -> dict[str, Any] | None:
    """`step_fields` with norms, rotations and readouts, for `fused_step` and C++; None for layers of other rules."""
    rule = layer.rule
    if not is_described(layer):
        return None
    fields = step_fields(layer, dtype, out)
    fields["gate_first"] = rule.gate_before != "o_proj"
    if rule.write == "rows":
        return fields | layer.token_fields()

    if rule.decay == "retention":
        fields["decay_kind"] = "retention"
        fields["frequencies"] = rotary_frequencies(layer.K, rule.theta, layer.o_proj.weight.device)
    elif rule.decay == "sigmoid":
        fields |= {"decay_kind": "sigmoid", "temperature": rule.temperature}
    elif rule.decay == "dt":
        fields["skip"] = layer.discretization.D
    if rule.read == "mala":
        fields["magnitude"] = layer.K**-0.5 if rule.magnitude == "code" else 1.0
        fields["by_count"] = rule.magnitude != "literal"
    elif rule.read == "pola":
        fields["swapped"] = True
    if rule.rotate == "lrpe":
        fields |= layer.lrpe.token_fields()
    return fields


def decode_token(
    layer: Any, x: Tensor, seq: Sequences, state: LayerState
) -> tuple[Tensor, LayerState] | None:
    """`Mixer.forward` for one token of each sequence, in one kernel behind the projections or in torch.

    None if neither computes the layer's rule, or if calling its layers does more than theirs.
    """
    if any(map(altered, layer.children())):
        return None
    # A CPU has no such kernel: there the description below is all.
    if has_kernel("fused_step", x) and (fused := fused_step(layer, x, seq, state)):
        return fused
    rule = layer.rule
    # Kernels alone compute these in one step.
    apart = rule.write == "rows" or rule.read in ("mala", "pola") or rule.norm == "rms"
    if apart or rule.value_conv or not is_described(layer):
        return None

    # `step` norms heads, not all of them together. A norm over all reads fp32, and o_proj the dtype of x.
    dtype, out = x.dtype if rule.by_head else torch.float32, getattr(state, "out", None)
    fields = step_fields(layer, dtype, out)
    if any_offloaded(fields):
        return None

    rest: dict[str, Tensor] = {}

    @functools.cache  # torch may follow a kernel that has read them and refused
    def inputs() -> dict[str, Tensor]:
        if rule.decay in ("retention", "sigmoid"):
            # Rotations, and decays without `Decay`, are computed by `inputs`.
            whole, _ = layer.inputs(x, seq, None)
            heads = {name: y for name, y in whole._asdict().items() if y is not None}
        else:
            heads = project_inputs(layer, x)
        if rule.read != "plain":
            heads["positions"] = seq.positions(1, x.device)
        if rule.gated and not rule.by_head:
            # The gate follows the norm over all heads, which `read_out` computes.
            rest["gate"] = heads.pop("gate")
        return heads

    served = by_kernel("step", "auto", x, inputs, state, **fields)
    if served is None and torch.is_autocast_enabled(x.device.type):
        return None
    o, new = step(inputs, state, layer, dtype, out) if served is None else served
    if rule.by_head:
        return apply_linear(layer.o_proj, o.flatten(-2)), new
    # Behind a norm over all heads `read_out` reads the gate alone.
    return layer.read_out(o, Inputs(o, o, o, gate=rest.get("gate")), x), new


def fused_step(
    layer: Any, x: Tensor, seq: Sequences, state: LayerState
) -> tuple[Tensor, LayerState] | None:
    """`decode_token` by one kernel, with norms and gates of all heads; None if none serves."""
    norm = layer.o_norm if layer.rule.norm is not None else None
    # Without a recurrent state the mixer is attention. An adapter around the norm has no epsilon.
    if "recurrent" not in state or not isinstance(norm, RMSNorm | LayerNorm | None):
        return None
    if layer.rule.gate_before == "norm" and layer.rule.value_conv:
        return None  # the kernel's gate precedes the convolution of v
    token = kernel_token(layer, x.dtype, getattr(state, "out", None))
    if token is None:
        return None
    if norm is not None:
        token |= {"norm": (norm.weight, norm.eps), "norm_bias": getattr(norm, "bias", None)}
    if any_offloaded(token):
        return None

    def inputs() -> dict[str, Tensor]:
        heads = layer.project(x)
        for name, second in up_projections(layer).items():
            weight = matrix_of(second, biased=True)
            # Each program reads its rows of the matrix: with many, a product of its own is faster.
            if weight is None or len(x) * weight.numel() > MOST_READ:
                heads[name] = apply_linear(second, heads[name])
            else:
                # The kernel multiplies by the second matrix itself.
                heads |= {f"{name}_up": weight, f"{name}_bias": second.bias}
        if token["denominator"] or "frequencies" in token:
            heads["positions"] = seq.positions(1, x.device)
        return heads

    served = by_kernel("fused_step", "auto", x, inputs, state, **token)
    if served is None:
        return None
    o, new = served
    return apply_linear(layer.o_proj, o.flatten(-2)), new


def any_offloaded(fields: dict[str, Any]) -> bool:
    """Whether a tensor of a token is in memory only while its own module runs."""
    return any(x.is_meta for x in tree_leaves(fields) if isinstance(x, Tensor))


def step(
    inputs: Callable[[], dict[str, Tensor]],
    state: LayerState,
    layer: Any,
    dtype: torch.dtype,
    out: LayerState | None = None,
) -> tuple[Tensor, LayerState]:
    """One token of N sequences through the delta rule or linear attention, from projections to o_proj.

    inputs: returns q `[N, 1, H·K]`, k `[N, 1, steps·H·K]` and v `[N, 1, steps·HV·V]` (or with heads apart) as
        projected, and as needed b (logits of beta, or of the erase gate), w (of the write gate), a or g (for
        the decay), positions and gate.
    state: recurrent `[N, HV, F, V (+ 1)]` and conv_q, conv_k, conv_v `[N, W−1, ·]`. It is not changed.
    layer: `rule`, sizes and weights are read. dtype: of the output.
    out: memory for the new state, of which the recurrent one is filled.

    Returns o `[N, 1, HV, V]` in `dtype` or a wider one, and the new state under the same names.
    """
    rule, x = layer.rule, inputs()
    narrow = x["v"].dtype
    q, k, v, new = _convolve(x, state, filters_of(layer))
    if rule.silu_before_write:
        v = F.silu(v)
    if "w" in x:
        v = v * at_least_fp32(x["w"]).sigmoid().to(narrow).view(v.shape)

    # [N, 1, H, K], [N, n, H, K] and [N, n, HV, V], for n steps a token
    q, k = (_split_heads(y, layer.num_heads, layer.K) for y in (q, k))
    v = _split_heads(v, layer.num_v_heads, layer.V)
    q, k, length = _map(q, k, layer, narrow)
    if rule.read == "sum":
        v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], -1)

    S = _update(x, (k, v, length), state["recurrent"], layer, out)
    new["recurrent"] = S
    N, HV = S.shape[:2]
    # [N, 1, HV, V (+ 1)]
    o = torch.bmm(q.reshape(N * HV, 1, -1), S.flatten(0, 1)).view(N, 1, HV, -1)
    o = _read_out(o, x, layer, narrow)
    return o if o.dtype == torch.float64 else o.to(dtype), new


def _convolve(
    x: dict[str, Tensor], state: dict[str, Tensor], filters: dict[str, Tensor]
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
    q: Tensor, k: Tensor, layer: Any, narrow: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q `[N, HV, F]`, scaled, and k `[N, n, HV, F]` behind map and norm.

    The third is the squared length of rounded keys `[N, n, HV, 1]`, by which β is divided; None for 1.
    """
    rule = layer.rule
    if rule.map is not None:
        # A map takes q and k of one shape; q has one step a token, k has n.
        q, k = layer.feature_map(q.expand_as(k), k)
    if rule.qk_norm == "l2":
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
    layer: Any,
    out: LayerState | None,
) -> Tensor:
    """The new state `[N, HV, F, V (+ 1)]`. written: k, v and the keys' length, see `_map`."""
    rule, (k, v, length) = layer.rule, written
    S = state.flatten(0, 1)  # a head of a sequence is a matrix of a batch
    decay = _log_decay(x, layer)
    target = None
    if decay is not None:
        # A copy, which the steps may overwrite: `state` itself must not change.
        S = target = S * decay.to(S.dtype).exp().view(len(S), -1, 1)
    if out is not None:
        target = out["recurrent"].view(S.shape)

    erased, beta = k, None
    if rule.write == "delta":
        beta = rule.beta_scale * at_least_fp32(x["b"]).sigmoid()
        beta = beta.view(len(v), rule.steps, layer.num_v_heads, -1)  # a number, or an erase gate
        beta = beta if length is None else beta / length
        erased = beta * k if "w" in x else k  # with a write gate β is the erase gate, [N, n, HV, F]

    for j in range(rule.steps):
        k_j, v_j = (y[:, j].reshape(len(S), 1, -1) for y in (k, v))  # [N·HV, 1, F or V]
        if beta is not None:
            # S ← S + k (β (v − (erase ⊙ k)ᵀ S))ᵀ; a write gate is in v already.
            v_j = v_j - torch.bmm(erased[:, j].reshape(k_j.shape), S)
            if "w" not in x:
                v_j = beta[:, j].reshape(len(S), 1, 1) * v_j
        S = target = torch.addcmul(S, k_j.mT, v_j, out=target)
    return S.view(state.shape)


def _log_decay(x: dict[str, Tensor], layer: Any) -> Tensor | None:
    """g of the inputs `[N, 1, HV (, F)]`, or by the layer's decay `[N, HV, 1 or F]`; None for no decay."""
    decay = decay_of(layer)
    if decay is None:
        return x.get("g")
    A_log, dt_bias = decay
    # g = −exp(A_log) · softplus(a + dt_bias), A_log [HV], dt [N, HV, 1 or F]
    dt = F.softplus(at_least_fp32(x["a"]) + dt_bias)
    return -A_log.exp()[:, None] * dt.view(len(dt), len(A_log), -1)


def _read_out(o: Tensor, x: dict[str, Tensor], layer: Any, narrow: torch.dtype) -> Tensor:
    """Denominator, norm and gate."""
    rule = layer.rule
    if rule.read == "sum":
        count = (x["positions"] + 1).to(o.dtype)[..., None, None]  # tokens seen, [N or 1, 1, 1, 1]
        o = o[..., :-1] / (o[..., -1:] + EPS * count)
    elif (
        rule.write == "delta" or narrow != torch.float16
    ):  # sums may exceed fp16's range before the norm
        o = o.to(narrow)
    if rule.norm == "head":
        weight, eps = layer.o_norm.weight, layer.o_norm.eps
        o = F.rms_norm(at_least_fp32(o), (layer.V,), at_least_fp32(weight), eps).to(narrow)
    if "gate" in x:
        activation = F.silu if rule.gate == "silu" else torch.sigmoid
        o = o.to(narrow) * activation(x["gate"]).view(o.shape)
    return o
