"""The recurrences of mixers, from q, k, v and gates to outputs, as a layer's `Rule` says.

For every head, with a state S of [F, V], all of them are

    S_t = (I − k_t (e_t ⊙ k_t)⊤) Diag(e^{g_t}) S_{t−1} + k_t (w_t ⊙ v_t)⊤        o_t = scale · S_t⊤ q_t

with e = w = β for the delta rule, e = 0 and w = 1 for linear attention (`minimal.py`). Each function takes a layer,
its `heads`, the state before the first token, and `new`, which it fills unless that is None; see `base.Mixer.mix`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .call import Call, Options, wide_dtype
from .context import recurrence
from .feature_maps import EPS, opposite
from .layers import at_least_fp32, excess, no_autocast, place_angles, rotate
from .ops import by_kernel, delta_rule_flops, linear_attention_flops, map_features
from .rule import Rule
from .sequences import Sequences

Heads = dict[str, Tensor]
LayerState = dict[str, Tensor]


def recurrence_of(rule: Rule) -> Callable[..., Tensor]:
    """The function of this file that gives o `[B, T, HV, V]` from the heads of a layer with this rule."""
    if rule.write == "delta":
        return mix_delta if rule.steps == 1 else mix_steps
    if rule.read != "plain":
        return mix_normalized
    return mix_discretized if rule.decay == "dt" else mix_sum


# ------------------------------------------------------------------------------------- the delta rule


def mix_delta(
    layer: Any, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
) -> Tensor:
    """Decays, erases what S holds under the key, and writes."""
    rule, features = layer.rule, layer.feature_map
    q, k, beta, erase = heads["q"], heads["k"], heads["beta"], heads.get("erase")
    norm = "l2" if rule.qk_norm == "l2" else None
    if rule.norm_write:  # β' = 1 − exp(−β‖k‖²/K)
        beta = -torch.expm1(-beta * layer.per_value(at_least_fp32(k).square().mean(-1)))
        if rule.qk_norm != "l2":
            # The map runs here, because β needs the lengths of its features.
            (q, k, beta), features = _unnormed(layer, q, k, beta), None
    elif rule.beta_scale > 1 and k.dtype.itemsize < 4:
        # A rounded key may be longer than 1. Near β = 2 each token would then lengthen the state.
        with no_autocast(q):
            q, k = map_features(q, k, features, norm)
        features, norm = None, None  # q and k are features now
        length = layer.per_value(excess(k))
        beta, erase = (beta / length, None) if erase is None else (beta, erase / length[..., None])

    past = state.get("recurrent")
    call = Call(q, k, heads["v"], beta, heads.get("g"), erase, initial_state=past)
    options = Options(
        feature_map=features,
        qk_norm=norm,
        output_final_state=new is not None,
        allow_neg_eigval=rule.beta_scale > 1,
        mode="recurrent" if q.shape[1] <= rule.steps else "chunk",  # one token
    )
    o, final = recurrence(call, options, seq)
    if new is not None and final is not None:
        new["recurrent"] = final
    return o


def _unnormed(layer: Any, q: Tensor, k: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """φ(q) and φ(k) as the op reads them under `qk_norm` none and rms, and the step β'/‖k‖² of those."""
    rms = layer.rule.qk_norm == "rms"
    with no_autocast(q):
        q, k = map_features(q, k, layer.feature_map, "l2" if rms else None)
    if rms:
        width = k.shape[-1]
        # ‖k‖² = F, so the step β'/‖k‖² is β'/F.
        return width**0.5 * q, width**0.5 * k, beta / width
    return q, k, beta / (layer.per_value(at_least_fp32(k).square().sum(-1)) + EPS)


def mix_steps(
    layer: Any, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
) -> Tensor:
    """Several steps of the delta rule a token, as one row of n·T steps."""
    n = layer.rule.steps

    def by_step(x: Tensor) -> Tensor:
        """`[B, T, n·H, …]` to `[B, T·n, H, …]`."""
        return x.unflatten(2, (n, -1)).flatten(1, 2)

    # The decay comes before a token's first step, and q reads after its last.
    steps = {name: by_step(heads[name]) for name in ("k", "v", "beta")}
    steps["q"] = heads["q"].repeat_interleave(n, 1)
    if "g" in heads:
        # g [B, T, HV] to [B, T·n, HV], with 0 at every later step.
        g = heads["g"][:, :, None]
        steps["g"] = torch.nn.functional.pad(g, (0, 0, 0, n - 1)).flatten(1, 2)
    o = mix_delta(layer, steps, seq.repeated(n), state, new)
    return o[:, n - 1 :: n]  # of each token's last step


# ----------------------------------------------------------------------------------- linear attention


def mix_sum(
    layer: Any,
    heads: Heads,
    seq: Sequences,
    state: LayerState,
    new: LayerState | None,
    *,
    mapped: bool = False,
    name: str = "recurrent",
) -> Tensor:
    """Adds to the state `name`, which may decay. mapped: whether q and k are features already."""
    rule, q, k, v = layer.rule, heads["q"], heads["k"], heads["v"]
    if v.dtype == torch.float16:  # sums of 1000 terms may exceed its range before the norm
        v = v.float()
    mapped = mapped or rule.rotate == "lrpe"
    feature_map = None if mapped or rule.map is None else layer.feature_map
    # No recurrence where all tokens see all: one state, of the whole sequence, serves them.
    if seq.bidirectional:
        with no_autocast(v):
            q, k = map_features(q, k, feature_map)
            return sum_both(q, k, v, seq, rule.scale)

    options = Options(
        feature_map=feature_map,
        scale=rule.scale,
        output_final_state=new is not None,
        mode="recurrent" if q.shape[1] == 1 else "chunk",
    )
    call = Call(q, k, v, g=heads.get("g"), initial_state=state.get(name))
    o, final = recurrence(call, options, seq)
    if new is not None and final is not None:
        new[name] = final
    return o


def mix_discretized(
    layer: Any, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
) -> Tensor:
    """Adds Δ k v⊤, and D v to the output. The op has no step, so Δ multiplies v."""
    v = at_least_fp32(heads["v"])
    o = mix_sum(layer, heads | {"v": heads["dt"][..., None] * v}, seq, state, new)
    return o + heads["skip"][:, None] * v


def mix_normalized(
    layer: Any, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
) -> Tensor:
    """Divides by the sum of a token's weights, φ(q_t)⊤ Σ_{j≤t} φ(k_j) + ε t."""
    rule, mirrored = layer.rule, layer.rule.read == "pola"
    read = heads
    if mirrored:
        # Each half of v is a head, [B, T, 2H, V/2], read by queries of its own.
        halves = heads["v"].unflatten(-1, (2, -1)).flatten(2, 3)
        read = {"q": heads["q"], "k": heads["k"], "v": halves}

    o = _by_one_kernel(layer, read, seq, state, new)
    if o is None and mirrored:
        q, k = map_features(heads["q"], heads["k"], layer.feature_map)
        read["q"] = torch.stack([q, opposite(q)], 3).flatten(2, 3)  # [B, T, 2H, 2K]
        read["k"] = k.repeat_interleave(2, 2)  # both halves have the same keys
    if o is None:
        r, z = _sums(layer, read, seq, state, new, mapped=mirrored)
        t = counts(heads, seq)
        o = r / (z + EPS * t)
        if rule.read == "mala":
            # r/z + c (r − z v̄), with v̄ = Σv/t over the tokens seen.
            total = _value_sum(layer, heads, seq, state, new)
            c = 1.0 if rule.magnitude == "literal" else 1 / t
            if rule.magnitude == "code":
                c = c * layer.K**-0.5
            o = o + c * (r - z * total / t)
    return o.unflatten(2, (-1, 2)).flatten(-2) if mirrored else o  # [B, T, H, V]


def _by_one_kernel(
    layer: Any, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
) -> Tensor | None:
    """`mix_normalized` by a kernel that forms sums and denominators; None if none serves the call."""
    rule, q, v = layer.rule, heads["q"], heads["v"]
    # Cut rows and both directions need the sums apart; one token needs no kernel of chunks.
    if q.shape[1] == 1 or seq.parts is not None or seq.bidirectional:
        return None

    options: dict[str, Any] = {}
    if rule.read == "mala":
        options["magnitude"] = rule.magnitude
    elif rule.read == "pola":
        options["mirrored"] = True
    served = by_kernel(
        *("normalized_attention", "auto", q, q, heads["k"], v, heads.get("g")),
        feature_map=layer.feature_map,
        positions=seq.positions(v.shape[1], v.device),
        initial_state=state.get("recurrent"),
        initial_sum=state.get("value_sum"),
        output_final_state=new is not None,
        cu_seqlens=seq.cu_seqlens,
        **options,
    )
    if served is None:
        return None
    o, final, total = served
    if new is not None:
        new["recurrent"] = final
    if new is not None and total is not None:  # Σv of MALA
        new["value_sum"] = total
    return o


def _sums(
    layer: Any,
    heads: Heads,
    seq: Sequences,
    state: LayerState,
    new: LayerState | None,
    *,
    mapped: bool = False,
) -> tuple[Tensor, Tensor]:
    """φ(q)⊤ S `[B, T, HV, V]` and φ(q)⊤ z `[B, T, HV, 1]`, in fp32, by one op: z is S with v = 1."""
    rule, v = layer.rule, at_least_fp32(heads["v"])
    one = v.new_ones(*v.shape[:3], 1)
    if rule.rotate != "features":
        wide = heads | {"v": torch.cat([v, one], -1)}
        o = mix_sum(layer, wide, seq, state, new, mapped=mapped)
        return o[..., :-1], o[..., -1:]

    # The denominator is of the features before they rotate.
    q, k = map_features(heads["q"], heads["k"], layer.feature_map)  # [B, T, H, F]
    z = mix_sum(layer, {"q": q, "k": k, "v": one}, seq, state, new, mapped=True)
    width = stream_width(layer)
    angles = place_angles(q, seq, width, rule.theta)
    q, k = (_rotate_streams(x, angles, width) for x in (q, k))
    return mix_sum(layer, {"q": q, "k": k, "v": v}, seq, state, new, mapped=True), z


def counts(heads: Heads, seq: Sequences) -> Tensor:
    """How many tokens each token sees, `[B or 1, T, 1, 1]`, in fp32 at least."""
    v = heads["v"]
    return seq.counts(v.shape[1], v.device).to(wide_dtype(v))[..., None, None]


def stream_width(layer: Any) -> int:
    """How many features rotate together: K where a map doubles them, which gives two streams."""
    features = layer.feature_map.feature_dim
    return layer.K if features == 2 * layer.K else features


def _rotate_streams(x: Tensor, angles: Tensor, width: int) -> Tensor:
    """Features `[B, T, H, F]` with each stream rotated apart, so that opposite signs never meet."""
    streams = x.unflatten(-1, (-1, width)).flatten(2, 3)
    return rotate(streams, angles).view_as(x)


def _value_sum(
    layer: Any, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
) -> Tensor:
    """Σv over the tokens that each token sees, `[B, T, HV, V]`: equal weights, beside the state of r and z."""
    v = at_least_fp32(heads["v"])
    one = v.new_ones(*v.shape[:3], 1)
    constant = {"q": one, "k": one, "v": v}
    return mix_sum(layer, constant, seq, state, new, mapped=True, name="value_sum")


def sum_both(q: Tensor, k: Tensor, v: Tensor, seq: Sequences, scale: float | None) -> Tensor:
    """scale · (Σ_j k_j v_jᵀ)ᵀ q_t over all tokens j of a sequence, `[B, T, HV, V]` in v's dtype.

    q and k: features `[B, T, H, F]`; v: `[B, T, HV, V]`, HV a multiple of H. scale: by default F^-½. The sum
    is the state behind the last token of the causal form, in fp32 at least.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (
        _sum_packed(q, k, v, seq, scale)
        if seq.cu_seqlens is not None
        else _sum_rows(q, k, v, scale)
    )


def _sum_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    dtype, (q, k, v) = v.dtype, (at_least_fp32(x).transpose(1, 2) for x in (q, k, v))
    group = v.shape[1] // k.shape[1]
    # The group's values lie side by side, so that one product with k serves them all.
    v = v.unflatten(1, (-1, group)).transpose(2, 3).flatten(3)  # [B, H, T, group·V]
    o = q @ (k.mT @ v).mul(scale)  # the state first, [B, H, F, group·V]: linear in T
    return o.unflatten(3, (group, -1)).transpose(1, 2).flatten(2, 3).to(dtype)


@torch.compiler.disable  # the groups depend on the values of cu_seqlens
def _sum_packed(q: Tensor, k: Tensor, v: Tensor, seq: Sequences, scale: float) -> Tensor:
    groups, where = seq.groups(v.device)
    out = [v.new_zeros(0, *v.shape[2:])]
    for rows, real in groups:
        keys = k[0, rows] * real[..., None, None]  # padding adds nothing
        # Outputs of padding are computed too; `where` never picks them.
        out.append(_sum_rows(q[0, rows], keys, v[0, rows], scale).flatten(0, 1))
    return torch.cat(out).index_select(0, where)[None]


# ----------------------------------------------------------------------------- gates, states and FLOPs


def form_gates(layer: Any, heads: Heads) -> Heads:
    """β and the log-decay g, and what else the rule forms from its projections."""
    rule, found = layer.rule, {}
    if rule.decay in ("head", "channel"):
        found["g"] = layer.decay(heads["a"])
    elif rule.decay == "dt":
        found["dt"], found["g"], found["skip"] = layer.discretization(heads["a"])
    elif rule.decay == "sigmoid":
        a = at_least_fp32(heads["a"]).unflatten(-1, (-1, layer.K))
        # The root of the decay divides its logarithm.
        found["g"] = torch.nn.functional.logsigmoid(a) / rule.temperature
    elif rule.decay == "retention":
        q = heads["q"]
        found["g"] = retention_decays(layer.num_heads, q).expand(*q.shape[:2], -1)
    if rule.write != "delta":
        return found

    beta = found["beta"] = rule.beta_scale * at_least_fp32(heads["b"]).sigmoid()
    if rule.erase:
        v = heads["v"]
        erase = found["erase"] = beta.unflatten(-1, (layer.num_v_heads, -1))
        # The write gate multiplies v here: one tensor fewer to split across processes.
        found["v"] = v * at_least_fp32(heads["w"]).sigmoid().view(v.shape).to(v.dtype)
        # β is 1: the two gates stand in its place.
        found["beta"] = erase.new_ones(erase.shape[:3])
    return found


def retention_decays(num_heads: int, like: Tensor) -> Tensor:
    """log(1 − 2^{−5−h}) of each head, `[H]`, in the precision of `like`."""
    h = torch.arange(num_heads, device=like.device, dtype=wide_dtype(like))
    return torch.log1p(-(2.0 ** (-5 - h)))


def state_shape(layer: Any) -> tuple[int, int, int]:
    """The heads, features and values of the state. A denominator is a last value that is 1, so its sum is Σφ(k)."""
    rule = layer.rule
    features = layer.K if rule.map is None else layer.feature_map.feature_dim
    # Each half of Pola's values is a head of its own, and has its own denominator.
    heads, values = (
        (2 * layer.num_heads, layer.V // 2) if rule.read == "pola" else (layer.num_v_heads, layer.V)
    )
    return heads, features, values + (rule.read != "plain")


def rule_flops(layer: Any) -> float:
    """Forward FLOPs per token of the rule, without convolutions and map."""
    rule, shape = layer.rule, state_shape(layer)
    if rule.write == "delta":
        return rule.steps * delta_rule_flops(*shape, channels=rule.decay == "channel")
    # In both directions at once there are no chunks.
    chunk = 0 if layer.bidirectional and rule.unmasked else 64
    total = linear_attention_flops(*shape, chunk)
    if rule.read == "mala":
        total += linear_attention_flops(layer.num_v_heads, 1, layer.V, chunk)
    return total + (2.0 * layer.num_v_heads * layer.V if rule.decay == "dt" else 0.0)
