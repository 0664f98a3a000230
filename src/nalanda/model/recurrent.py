"""The recurrences of mixers, from q, k, v and gates to outputs, as a layer's `Rule` says.

For every head, with a state S of [F, V], all of them are

    S_t = (I − k_t (e_t ⊙ k_t)⊤) Diag(e^{g_t}) S_{t−1} + k_t (w_t ⊙ v_t)⊤        o_t = scale · S_t⊤ q_t

with e = w = β for the delta rule, e = 0 and w = 1 for linear attention (`minimal.py`). Each `mix_…` takes a layer, its
`Inputs` and the state before the first token, and returns o and the state behind the last; see `base.Mixer.mix`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, Inputs, Options, wide_dtype
from .context import cut_recurrence
from .feature_maps import EPS, opposite
from .kernels import by_kernel
from .layers import at_least_fp32, excess, no_autocast, place_angles, rotate
from .ops import delta_rule_flops, linear_attention_flops, map_features, run_recurrence
from .plans import own_heads
from .rule import Rule
from .sequences import Sequences

LayerState = dict[str, Tensor]


def recurrence_of(rule: Rule) -> Callable[..., tuple[Tensor, LayerState]]:
    """The function of this file that computes o `[B, T, HV, V]` for a layer with this rule."""
    if rule.write == "delta":
        return mix_delta if rule.steps == 1 else mix_steps
    if rule.read != "plain":
        return mix_normalized
    return mix_discretized if rule.decay == "dt" else mix_sum


def recurrence(
    call: Call,
    options: Options,
    seq: Sequences,
    state: LayerState | None,
    name: str = "recurrent",
    steps: int = 1,
) -> tuple[Tensor, LayerState]:
    """The delta rule, or without β linear attention, over the sequences of `seq`.

    It goes on from the state `name`. Returns o, and that state behind the last token unless `state` is None.
    steps: those of a token of the text. One token needs no chunks.
    """
    carries = state is not None
    call = call._replace(initial_state=state.get(name) if carries else None)
    mode = "recurrent" if call.q.shape[1] <= steps else "chunk"
    options = options._replace(output_final_state=carries, mode=mode)
    if seq.parts is None:
        o, final = run_recurrence(call._replace(cu_seqlens=seq.cu_seqlens), options)
    else:
        o, final = cut_recurrence(call, options, seq)
    return o, {name: final} if carries and final is not None else {}


# ------------------------------------------------------------------------------------- the delta rule


def mix_delta(
    layer: Any, inputs: Inputs, seq: Sequences, state: LayerState | None
) -> tuple[Tensor, LayerState]:
    """Decays, erases what S holds under the key, and writes."""
    rule, features = layer.rule, layer.feature_map
    q, k, beta, erase = inputs.q, inputs.k, inputs.beta, inputs.erase
    assert beta is not None
    norm = "l2" if rule.qk_norm == "l2" else None
    if rule.norm_write:  # β' = 1 − exp(−β‖k‖²/K)
        beta = -torch.expm1(-beta * per_value(layer, at_least_fp32(k).square().mean(-1)))
        if rule.qk_norm != "l2":
            # The map runs here, because β needs the lengths of its features.
            (q, k, beta), features = _unnormed(layer, q, k, beta), None
    elif rule.beta_scale > 1 and k.dtype.itemsize < 4:
        # A rounded key may be longer than 1. Near β = 2 each token would then lengthen the state.
        with no_autocast(q):
            q, k = map_features(q, k, features, norm)
        features, norm = None, None  # q and k are features now
        length = per_value(layer, excess(k))
        beta, erase = (beta / length, None) if erase is None else (beta, erase / length[..., None])

    options = Options(features, norm, allow_neg_eigval=rule.beta_scale > 1)
    call = Call(q, k, inputs.v, beta, inputs.g, erase)
    return recurrence(call, options, seq, state, steps=rule.steps)


def _unnormed(layer: Any, q: Tensor, k: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """φ(q) and φ(k) as the op reads them under `qk_norm` none and rms, and the step β'/‖k‖² of those."""
    rms = layer.rule.qk_norm == "rms"
    with no_autocast(q):
        q, k = map_features(q, k, layer.feature_map, "l2" if rms else None)
    if rms:
        width = k.shape[-1]
        # ‖k‖² = F, so the step β'/‖k‖² is β'/F.
        return width**0.5 * q, width**0.5 * k, beta / width
    return q, k, beta / (per_value(layer, at_least_fp32(k).square().sum(-1)) + EPS)


def mix_steps(
    layer: Any, inputs: Inputs, seq: Sequences, state: LayerState | None
) -> tuple[Tensor, LayerState]:
    """Several steps of the delta rule a token, as one row of n·T steps."""
    n = layer.rule.steps
    o, new = mix_delta(layer, by_step(inputs, n), seq.repeated(n), state)
    return o[:, n - 1 :: n], new  # q reads after each token's last step


def by_step(inputs: Inputs, n: int) -> Inputs:
    """The inputs of n steps a token as those of n·T tokens: `[B, T, n·H, …]` to `[B, T·n, H, …]`.

    q and g have one entry a token. The decay comes before its first step, and q may read after each.
    """

    def apart(x: Tensor) -> Tensor:
        return x.unflatten(2, (n, -1)).flatten(1, 2)

    g, beta, erase = inputs.g, inputs.beta, inputs.erase
    if g is not None:
        # [B, T, HV] or [B, T, HV, F] to [B, T·n, …], with 0 at every later step.
        later = (0, 0) * (g.ndim - 2) + (0, n - 1)
        g = F.pad(g[:, :, None], later).flatten(1, 2)
    return Inputs(
        q=inputs.q.repeat_interleave(n, 1),
        k=apart(inputs.k),
        v=apart(inputs.v),
        beta=None if beta is None else apart(beta),
        g=g,
        erase=None if erase is None else apart(erase),
    )


def per_value(layer: Any, x: Tensor) -> Tensor:
    """`[B, T, H]` of the heads of k for each head of v, `[B, T, HV]`."""
    group = layer.num_v_heads // layer.num_heads
    return x.repeat_interleave(group, -1) if group > 1 else x


# ----------------------------------------------------------------------------------- linear attention


def mix_sum(
    layer: Any,
    inputs: Inputs,
    seq: Sequences,
    state: LayerState | None,
    *,
    mapped: bool = False,
    name: str = "recurrent",
) -> tuple[Tensor, LayerState]:
    """Adds to the state `name`, which may decay. mapped: whether q and k are features already."""
    rule, q, k, v = layer.rule, inputs.q, inputs.k, inputs.v
    if v.dtype == torch.float16:  # sums of 1000 terms may exceed its range before the norm
        v = v.float()
    mapped = mapped or rule.rotate == "lrpe"
    feature_map = None if mapped or rule.map is None else layer.feature_map
    # No recurrence where all tokens see all: one state, of the whole sequence, serves them.
    if seq.bidirectional:
        with no_autocast(v):
            q, k = map_features(q, k, feature_map)
            return sum_both(q, k, v, seq, rule.scale), {}

    options = Options(feature_map, scale=rule.scale)
    return recurrence(Call(q, k, v, g=inputs.g), options, seq, state, name)


def mix_discretized(
    layer: Any, inputs: Inputs, seq: Sequences, state: LayerState | None
) -> tuple[Tensor, LayerState]:
    """Adds Δ k v⊤, and D v to the output. The op has no step, so Δ multiplies v."""
    assert inputs.dt is not None
    assert inputs.skip is not None
    v = at_least_fp32(inputs.v)
    o, new = mix_sum(layer, inputs._replace(v=inputs.dt[..., None] * v), seq, state)
    return o + inputs.skip[:, None] * v, new


def mix_normalized(
    layer: Any, inputs: Inputs, seq: Sequences, state: LayerState | None
) -> tuple[Tensor, LayerState]:
    """Divides by the sum of a token's weights, φ(q_t)⊤ Σ_{j≤t} φ(k_j) + ε t."""
    rule, mirrored = layer.rule, layer.rule.read == "pola"
    read = inputs
    if mirrored:
        # Each half of v is a head, [B, T, 2H, V/2], read by queries of its own.
        halves = inputs.v.unflatten(-1, (2, -1)).flatten(2, 3)
        read = Inputs(inputs.q, inputs.k, halves)

    served = _by_one_kernel(layer, read, seq, state)
    if served is not None:
        o, new = served
        return o.unflatten(2, (-1, 2)).flatten(-2) if mirrored else o, new

    # Once: in MALA v's gradient is the difference of two, which are not to be rounded.
    read = read._replace(v=at_least_fp32(read.v))
    if mirrored:
        q, k = map_features(inputs.q, inputs.k, layer.feature_map)
        q = torch.stack([q, opposite(q)], 3).flatten(2, 3)  # [B, T, 2H, 2K]
        # Both halves have the same keys.
        read = read._replace(q=q, k=k.repeat_interleave(2, 2))
    r, z, new = _sums(layer, read, seq, state, mapped=mirrored)
    t = counts(inputs.v, seq)
    o = r / (z + EPS * t)
    if rule.read == "mala":
        # Σv over the tokens seen, [B, T, HV, V]: equal weights, beside the state of r and z.
        one = read.v.new_ones(*read.v.shape[:3], 1)
        equal = Inputs(one, one, read.v)
        total, total_state = mix_sum(layer, equal, seq, state, mapped=True, name="value_sum")
        # r/z + c (r − z v̄), with v̄ = Σv/t.
        c = 1.0 if rule.magnitude == "literal" else 1 / t
        if rule.magnitude == "code":
            c = c * layer.K**-0.5
        o, new = o + c * (r - z * total / t), new | total_state
    return o.unflatten(2, (-1, 2)).flatten(-2) if mirrored else o, new  # [B, T, H, V]


def _by_one_kernel(
    layer: Any, inputs: Inputs, seq: Sequences, state: LayerState | None
) -> tuple[Tensor, LayerState] | None:
    """`mix_normalized` by a kernel that forms sums and denominators; None if none serves the call."""
    rule, q, v, past = layer.rule, inputs.q, inputs.v, state or {}
    # Cut rows and both directions need the sums apart; one token needs no kernel of chunks.
    if q.shape[1] == 1 or seq.parts is not None or seq.bidirectional:
        return None

    served = by_kernel(
        "normalized_attention",
        "auto",
        q,  # its device
        *(q, inputs.k, v, inputs.g),
        feature_map=layer.feature_map,
        positions=seq.positions(v.shape[1], v.device),
        initial_state=past.get("recurrent"),
        initial_sum=past.get("value_sum"),
        output_final_state=state is not None,
        cu_seqlens=seq.cu_seqlens,
        magnitude=rule.magnitude if rule.read == "mala" else None,
        mirrored=rule.read == "pola",
    )
    if served is None:
        return None
    o, final, total = served
    if state is None:
        return o, {}
    # The second state is Σv of MALA.
    return o, {"recurrent": final} | ({} if total is None else {"value_sum": total})


def _sums(
    layer: Any, inputs: Inputs, seq: Sequences, state: LayerState | None, *, mapped: bool
) -> tuple[Tensor, Tensor, LayerState]:
    """φ(q)⊤ S `[B, T, HV, V]` and φ(q)⊤ z `[B, T, HV, 1]`, in fp32, by one op: z is S with v = 1."""
    rule, v = layer.rule, inputs.v
    one = v.new_ones(*v.shape[:3], 1)
    if rule.rotate != "features":
        wide = inputs._replace(v=torch.cat([v, one], -1))
        o, new = mix_sum(layer, wide, seq, state, mapped=mapped)
        return o[..., :-1], o[..., -1:], new

    # The denominator is of the features before they rotate.
    q, k = map_features(inputs.q, inputs.k, layer.feature_map)  # [B, T, H, F]
    z, _ = mix_sum(layer, Inputs(q, k, one), seq, state, mapped=True)
    width = stream_width(layer)
    angles = place_angles(q, seq, width, rule.theta)
    q, k = (_rotate_streams(x, angles, width) for x in (q, k))
    r, new = mix_sum(layer, Inputs(q, k, v), seq, state, mapped=True)
    return r, z, new


def counts(v: Tensor, seq: Sequences) -> Tensor:
    """How many tokens each token of v `[B, T, …]` sees, `[B or 1, T, 1, 1]`, in fp32 at least."""
    return seq.counts(v.shape[1], v.device).to(wide_dtype(v))[..., None, None]


def stream_width(layer: Any) -> int:
    """How many features rotate together: K where a map doubles them, which gives two streams."""
    features = layer.feature_map.feature_dim
    return layer.K if features == 2 * layer.K else features


def _rotate_streams(x: Tensor, angles: Tensor, width: int) -> Tensor:
    """Features `[B, T, H, F]` with each stream rotated apart, so that opposite signs never meet."""
    streams = x.unflatten(-1, (-1, width)).flatten(2, 3)
    return rotate(streams, angles).view_as(x)


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


def form_gates(layer: Any, projected: dict[str, Tensor], inputs: Inputs) -> Inputs:
    """The inputs with β, the log-decay g, and what else the rule forms from its projections."""
    rule = layer.rule
    if rule.decay in ("head", "channel"):
        inputs = inputs._replace(g=layer.decay(projected["a"]))
    elif rule.decay == "dt":
        dt, g, skip = layer.discretization(projected["a"])
        inputs = inputs._replace(dt=dt, g=g, skip=skip)
    elif rule.decay == "sigmoid":
        a = at_least_fp32(projected["a"]).unflatten(-1, (-1, layer.K))
        # The root of the decay divides its logarithm.
        inputs = inputs._replace(g=F.logsigmoid(a) / rule.temperature)
    elif rule.decay == "retention":
        decays = own_heads(layer, retention_decays(layer.num_heads, inputs.q))
        inputs = inputs._replace(g=decays.expand(*inputs.q.shape[:2], -1))
    if rule.write != "delta":
        return inputs

    beta = rule.beta_scale * at_least_fp32(layer.own_steps(projected["b"])).sigmoid()
    if not rule.erase:
        return inputs._replace(beta=beta)

    erase, v = beta.unflatten(-1, (inputs.v.shape[2], -1)), inputs.v
    # The write gate multiplies v here: one tensor fewer to split across processes.
    v = v * at_least_fp32(projected["w"]).sigmoid().view(v.shape).to(v.dtype)
    # β is 1: the two gates stand in its place.
    return inputs._replace(v=v, erase=erase, beta=erase.new_ones(erase.shape[:3]))


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
