"""One token of generation: everything between a mixer's projections and its o_proj, in one launch.

A program has BV columns of one head's state. It reads the state once and writes it once, to a new tensor, so
callers may keep the old one. At batch 1 the flagship's six heads are 96 programs. All programs of a head need
its q and k after convolution, map and norm; each computes them from the L2 cache (4 KB; the state is 32 KB).
Only the norm needs a whole head, or all heads. Every program stores its columns of o and of the gate and takes a
ticket; the program with the last ticket applies the norm. One program per head would leave 126 of an
H200's 132 multiprocessors idle while six move 3 MB; a second launch for the norm would wait for the first to end.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nalanda_kernels import Unsupported
from nalanda_kernels.one_token import Token
from nalanda_kernels.tensors import rows_of
from nalanda_kernels.triton.common import FUSION, name_of, power_of_two
from nalanda_kernels.triton.epilogues import WIDEST
from nalanda_kernels.triton.feature_maps import (
    EPS,
    describe,
    features,
    guarded_log,
    halves,
    over_base,
)
from nalanda_kernels.triton.tiles import DTYPES, load

COLUMNS = ("q", "k", "v", "b", "w", "a", "g", "gate")  # inputs that may be columns of wider rows


@triton.jit
def softplus(x):
    """log(1 + e^x), with a small relative error where e^x is small."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log u is that of the rounded u; e / (u − 1) corrects the rounding of 1 + e.
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def convolved(y, conv, taps, n, c, m, owns, D: tl.constexpr, W: tl.constexpr):
    """Channels c [BD] of the token's own x, y, after the convolution Σ_i w_i x_{t−W+1+i}; W = 0 is none.

    conv: the weight, and the last W − 1 inputs [N, W−1, D] before and after the token; the new ones are stored
    if `owns`. taps: the channels' rows of the weight.
    """
    if W > 0:
        weight, past, new = conv
        last = y.to(new.dtype.element_ty)
        # The last tap is the token's own; the others read the state.
        y *= load(weight + taps * W + (W - 1), m)
        # Taps from the oldest input on.
        for i in tl.static_range(W - 1):
            p = (n * (W - 1) + i) * D + c
            before = load(past + p, m)
            y += before * load(weight + taps * W + i, m)
            if i > 0:  # the new state has moved on by one token
                tl.store(new + p - D, before.to(new.dtype.element_ty), mask=m & owns)
        tl.store(new + (n * (W - 1) + W - 2) * D + c, last, mask=m & owns)
    return y


@triton.jit
def rotated(x, pair, position, frequencies, f, PAIRS: tl.constexpr):
    """Features f of the pairs (x_i, x_{i+PAIRS}), rotated by angles of the position.

    pair: of each feature the other one of its pair.
    """
    angle = position * tl.load(frequencies + f % PAIRS)
    # Whole turns off in two parts, so that the hardware's sine and cosine are exact enough.
    turns = tl.floor(angle * 0.15915494 + 0.5)
    angle = (angle - turns * 6.28125) - turns * 0.0019353072
    return x * tl.cos(angle) + tl.where(f < PAIRS, -pair, pair) * tl.sin(angle)


@triton.jit
def load_input(source, n, row, m):
    """Entries `row` of an input of sequence n, or with a second matrix of W x + bias, in fp32.

    source: rows of x and their stride; W [·, R] or None, its bias or None, and R.
    """
    x, stride, weight, bias, R = source
    x += n * stride
    if weight is None:
        y = load(x + row, m)
    else:
        y = tl.zeros_like(row).to(tl.float32)
        for start in range(0, R, 32):
            c = start + tl.arange(0, 32)
            # [BK, 32]
            both = m[:, None] & (c < R)[None, :]
            w = load(weight + row[:, None] * R + c[None, :], both)
            x_c = load(x + c, c < R)
            y += tl.sum(w * x_c[None, :], 1)
        if bias is not None:
            y += load(bias + row, m)
        # Rounded as a product of its own would be.
        y = y.to(x.dtype.element_ty).to(tl.float32)
    return y


@triton.jit
def mapped(x, row, powers, units, h, MAP: tl.constexpr, IS_Q: tl.constexpr, K: tl.constexpr):
    """φ of the row x [1, BK] of head h, as columns [BK, 1] beside S. powers, units: of Pola, [H, K]."""
    BK: tl.constexpr = x.shape[1]
    if MAP.name == "pola":
        at = h * K + tl.arange(0, BK)[None, :]
        p = 1 + MAP.alpha * tl.sigmoid(load(powers + at, row))
        b = x
        if MAP.scaled:
            b /= softplus(load(units + at, row))
        f1, f2 = halves(over_base(b, guarded_log(b), p) * b, x, MAP)
    else:
        f1, f2 = features(x, row, MAP, IS_Q)
    return column(f1, BK), column(f2, BK)


@triton.jit
def column(f, BK: tl.constexpr):
    """[1, BK] to [BK, 1]."""
    return tl.reshape(f, [BK])[:, None]


@triton.jit
def decay_of(g, a, A_log, dt_bias, temperature, n, h_v, f, m, G: tl.constexpr, DECAY: tl.constexpr):
    """e^g of a head (G = 1), or of its channels f, [BK, 1].

    g is "given", −exp(A_log) softplus(a + dt_bias), log σ(a) / temperature, or that of retention.
    """
    # One entry for the head: a scalar instead of a tile.
    if G == 1:
        f, m = 0, True
    if DECAY == "given":
        decay = tl.exp(load_input(g, n, h_v * G + f, m))
    elif DECAY == "retention":
        decay = 1 - tl.exp2(-5.0 - h_v)
    elif DECAY == "sigmoid":
        decay = tl.exp(-softplus(-load_input(a, n, h_v * G + f, m)) / temperature)
    else:
        dt = load_input(a, n, h_v * G + f, m)
        dt += load(dt_bias + h_v * G + f, m)
        decay = tl.exp(-tl.exp(tl.load(A_log + h_v).to(tl.float32)) * softplus(dt))
    if G > 1:
        decay = decay[:, None]
    return decay


@triton.jit
def share_of(gate, n, p, m, GATE: tl.constexpr):
    """The factor of an output: its gate, or σ or SiLU of that; 1 without a gate."""
    share = 1.0
    if GATE != "none":
        share = load_input(gate, n, p, m)
        if GATE == "silu":
            share *= tl.sigmoid(share)
        elif GATE == "sigmoid":
            share = tl.sigmoid(share)
    return share


@triton.jit
def normed(o, weight, bias, c, m, eps, V: tl.constexpr):
    """RMSNorm of V outputs o, 0 elsewhere: o / √(mean o² + ε) ⊙ weight. With a bias LayerNorm."""
    if bias is not None:
        o = tl.where(m, o - tl.sum(o, 0) / V, 0.0)
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps) * load(weight + c, m)
    if bias is not None:
        o += load(bias + c, m)
    return o


@triton.jit
def step_kernel(
    q,
    k,
    v,
    q_conv,
    k_conv,
    v_conv,
    local_conv,
    b,
    w,
    a,
    A_log,
    dt_bias,
    g,
    skip,
    positions,
    frequencies,
    powers,
    units,
    state,
    new_state,
    value_sum,
    new_sum,
    norm_weight,
    norm_bias,
    gate,
    o,
    o_raw,
    tickets,
    position_stride,
    scale,
    beta_scale,
    temperature,
    magnitude,
    eps,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    LOCAL_W: tl.constexpr,
    LOCAL: tl.constexpr,
    MAP: tl.constexpr,
    STEPS: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE: tl.constexpr,
    DECAY: tl.constexpr,
    G: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    BY_COUNT: tl.constexpr,
    SWAPPED: tl.constexpr,
    SILU: tl.constexpr,
    NORMED: tl.constexpr,
    GATE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ALL: tl.constexpr,
):
    """BV columns of a head's new state and output, for one token of one sequence.

        S ← Diag(e^g) S;    for each step of the rule  S ← S + φ(k) u⊤;    o = gate ⊙ norm(scale · S⊤φ(q))

    where u is v (linear attention), β (v − S⊤φ(k)) (delta rule), or σ(w) ⊙ v − S⊤(σ(b) ⊙ φ(k)) (ERASE).
    q, k and v are taken after their convolutions. F = HALVES · K features. NORMED: outputs of a norm, 0 for
    none, V for a head or HV · V for all; ALL ≥ NORMED. LOCAL: filters of the convolution of v in o.
    """
    i, i_v = tl.program_id(0), tl.program_id(1)  # the second axis ends at 65 535
    # Axis 0 has sequences × heads of v, which may be many.
    n, h_v = (i // HV).to(tl.int64), i % HV
    f, c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    in_K, in_V = f < K, c < V
    h = h_v // GROUP  # the head of q and k
    H: tl.constexpr = HV // GROUP
    HALVES: tl.constexpr = MAP.halves  # pyrefly: ignore[missing-attribute]
    F: tl.constexpr = K * HALVES
    COLUMNS: tl.constexpr = V + 1 if DENOMINATOR else V  # a row of the state

    # The state first, because it is the longest load: [BK, BV] of each half of the features.
    # State [N, HV, F, COLUMNS].
    tile = i.to(tl.int64) * (F * COLUMNS) + f[:, None] * COLUMNS + c[None, :]
    m = in_K[:, None] & in_V[None, :]
    s1 = load(state + tile, m)
    if HALVES == 2:
        s2 = load(state + tile + K * COLUMNS, m)
    else:
        s2 = s1
    if positions is not None:
        position = tl.load(positions + n * position_stride)

    # q of the head; its features are formed after the loop, which needs the registers.
    row = in_K[None, :]
    owns = (i_v == 0) & (h_v % GROUP == 0)  # one program of a head stores its convolution's state
    at_q = h * K + f
    x_q = load_input(q, n, at_q, in_K)
    x_q = convolved(x_q, q_conv, at_q, n, at_q, in_K, owns, H * K, W)
    if frequencies is not None:
        # Mixers that rotate have no convolution.
        at_pair = h * K + (f + K // 2) % K
        x_q = rotated(x_q, load_input(q, n, at_pair, in_K), position, frequencies, f, K // 2)

    # For each step of the rule: read by k (delta rule) and write. The decay precedes the first.
    decay1, decay2 = 1.0, 1.0
    for j in tl.static_range(STEPS):
        # Step j's heads follow those of the steps before, [steps, heads, columns].
        at_k, at_v = (j * H + h) * K + f, (j * HV + h_v) * V + c
        x_k = load_input(k, n, at_k, in_K)
        x_k = convolved(x_k, k_conv, at_k, n, at_k, in_K, owns, STEPS * H * K, W)
        if frequencies is not None:
            x_k = rotated(x_k, load_input(k, n, at_pair, in_K), position, frequencies, f, K // 2)

        # Every program has columns of v of its own, so each stores their past.
        u = load_input(v, n, at_v, in_V)
        u = convolved(u, v_conv, at_v, n, at_v, in_V, in_V, STEPS * HV * V, W)
        value = u
        if SILU:
            u *= tl.sigmoid(u)
            # Without a short convolution the one of v in o precedes SiLU.
            value = u if W > 0 else value
        # Features as a row [1, BK]; then as columns [BK, 1] beside S.
        k1, k2 = mapped(x_k[None, :], row, powers, units, h, MAP, False, K)

        if j == 0 and DECAY != "none":
            decay1 = decay_of(g, a, A_log, dt_bias, temperature, n, h_v, f, in_K, G, DECAY)
            s1 *= decay1
            if HALVES == 2:
                # One decay a head serves both halves; decays by channel have F entries.
                decay2 = decay1
                if G > 1:
                    decay2 = decay_of(
                        g, a, A_log, dt_bias, temperature, n, h_v, K + f, in_K, G, DECAY
                    )
                s2 *= decay2

        if DELTA:
            # `held`: the value that S stores under the key, [BV].
            erased1, erased2 = k1, k2
            # β has an entry a head, erase one for each of F features.
            at_b = (j * HV + h_v) * (F if ERASE else 1)
            if ERASE:
                erased1 *= beta_scale * tl.sigmoid(load_input(b, n, at_b + f, in_K))[:, None]
                if HALVES == 2:
                    erased2 *= (
                        beta_scale * tl.sigmoid(load_input(b, n, at_b + K + f, in_K))[:, None]
                    )
            held = tl.sum(erased1 * s1, 0)
            if HALVES == 2:
                held += tl.sum(erased2 * s2, 0)
            if ERASE:
                # u = σ(w) ⊙ v − S⊤(σ(b) ⊙ φ(k))
                u = u * tl.sigmoid(load_input(w, n, at_v, in_V)) - held
            else:
                # u = β (v − S⊤φ(k))
                u = (u - held) * (beta_scale * tl.sigmoid(load_input(b, n, at_b, True)))
        elif skip is not None:
            # The step Δ of the head multiplies v.
            u *= softplus(load_input(a, n, h_v, True) + tl.load(dt_bias + h_v))

        # S + φ(k) u⊤
        s1 += k1 * u[None, :]
        if HALVES == 2:
            s2 += k2 * u[None, :]

    # The readout, [BV].
    tl.store(new_state + tile, s1, mask=m)
    q1, q2 = mapped(x_q[None, :], row, powers, units, h, MAP, True, K)
    if SWAPPED:
        # A head's second half of v reads the query with its signs swapped.
        odd, q0 = h_v % 2 == 1, q1
        q1, q2 = tl.where(odd, q2, q1), tl.where(odd, q0, q2)
    y = tl.sum(q1 * s1, 0)
    if HALVES == 2:
        tl.store(new_state + tile + K * COLUMNS, s2, mask=m)
        y += tl.sum(q2 * s2, 0)
    y *= scale

    at = i.to(tl.int64) * V + c
    if DENOMINATOR:  # the state's last column, Σφ(k): all programs read it, the first writes it
        p = i.to(tl.int64) * (F * COLUMNS) + f[:, None] * COLUMNS + V
        # k1 is that of the last step: denominators come with linear attention of one step.
        z = load(state + p, in_K[:, None]) * decay1 + k1
        tl.store(new_state + p, z, mask=in_K[:, None] & (i_v == 0))
        total = tl.sum(tl.sum(q1 * z, 0), 0)
        if HALVES == 2:
            z = load(state + p + K * COLUMNS, in_K[:, None]) * decay2 + k2
            tl.store(new_state + p + K * COLUMNS, z, mask=in_K[:, None] & (i_v == 0))
            total += tl.sum(tl.sum(q2 * z, 0), 0)
        total *= scale
        count = (position + 1).to(tl.float32)
        # scale cancels, except beside ε t.
        r, y = y, y / (total + EPS * count)
        if value_sum is not None:
            # MALA: r/z + c (r − z v̄), v̄ the mean value of the tokens seen.
            values = load(value_sum + at, in_V) + value
            tl.store(new_sum + at, values, mask=in_V)
            y += (magnitude / count if BY_COUNT else magnitude) * (r - total * values / count)

    if skip is not None:
        y += tl.load(skip + h_v) * value

    # The gate, around the convolution of v where there is one.
    at_gate = h_v * V + c
    share = share_of(gate, n, at_gate, in_V, GATE)
    if GATE_FIRST:
        y *= share
    if LOCAL_W > 0:
        taps = at_gate % LOCAL
        y += convolved(value, local_conv, taps, n, at_gate, in_V, in_V, HV * V, LOCAL_W)

    # The norm. A program with all its columns applies it itself.
    if NORMED > V or NORMED > BV:
        # Else the program with the last ticket does, for the columns of all.
        shares = o_raw + tl.num_programs(0).to(tl.int64) * V
        LATER: tl.constexpr = GATE != "none" and not GATE_FIRST
        tl.store(o_raw + at, y, mask=in_V)
        if LATER:
            tl.store(shares + at, share, mask=in_V)
        tl.debug_barrier()  # all threads have stored before the ticket
        unit, of_unit = i // (NORMED // V), tl.num_programs(1) * (NORMED // V)
        # Release publishes this program's columns; acquire shows the last one those of all.
        if tl.atomic_add(tickets + unit, 1, sem="acq_rel") == of_unit - 1:
            all_c = tl.arange(0, ALL)
            in_all = all_c < NORMED
            all_at = unit.to(tl.int64) * NORMED + all_c
            # Past L1, which may hold old lines: other processors wrote these.
            y_all = tl.load(o_raw + all_at, mask=in_all, other=0.0, cache_modifier=".cg")
            y_all = normed(y_all, norm_weight, norm_bias, all_c, in_all, eps, NORMED)
            if LATER:
                y_all *= tl.load(shares + all_at, mask=in_all, other=0.0, cache_modifier=".cg")
            tl.store(o + all_at, y_all.to(o.dtype.element_ty), mask=in_all)
            tl.store(tickets + unit, 0)  # for the next launch
    else:
        if NORMED > 0:
            y = normed(y, norm_weight, norm_bias, c, in_V, eps, V)
        if not GATE_FIRST:
            y *= share
        tl.store(o + at, y.to(o.dtype.element_ty), mask=in_V)


# ---------------------------------------------------------------------------------------------------- launch

_tickets: dict[tuple, Tensor] = {}
_tickets_of_buffers = WeakTensorKeyDictionary()


def tickets_of(x: Tensor, count: int, buffer: Tensor | None = None) -> Tensor:
    """int32 zeros; every launch leaves them zero. Each stream has one buffer: its launches never overlap.

    A graph under capture gets a buffer in its own memory, which every replay fills with zeros. A `buffer` for
    states has tickets of its own, which stay with it; made before a capture, they need not be filled by it.
    """
    if buffer is not None:
        if buffer not in _tickets_of_buffers:
            _tickets_of_buffers[buffer] = x.new_zeros(count, dtype=torch.int32)
        return _tickets_of_buffers[buffer]
    stream = 0
    if x.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return x.new_zeros(count, dtype=torch.int32)
        stream = torch.cuda.current_stream(x.device).cuda_stream
    key = (x.device, stream)
    if key not in _tickets or len(_tickets[key]) < count:
        _tickets[key] = torch.zeros(power_of_two(count, 1024), dtype=torch.int32, device=x.device)
    return _tickets[key]


def tiles(N: int, HV: int, K: int, V: int, halves: int) -> dict[str, int]:
    """Tile sizes: 16 columns spread few heads over the card; 32 share q and k better if heads are many."""
    # From 2,048 programs of 16 columns on, every processor has several.
    BK, many = power_of_two(K), N * HV * V >= 2048 * 16
    BV = 32 if many and V > 16 else 16
    return {"BK": BK, "BV": BV, "num_warps": 8 if halves * BK > 256 else 4}


def step(
    inputs: Callable[[], dict[str, Tensor]], state: dict[str, Tensor], **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """One token of N sequences through the delta rule or linear attention, from projections to o_proj.

    inputs: called after every check for `Unsupported`. Returns q `[N, 1, H·K]`, k `[N, 1, steps·H·K]` and v
        `[N, 1, steps·HV·V]` (or with heads apart) as projected. Delta rule: also b `[N, 1, steps·HV]`, β =
        beta_scale·σ(b); or b `[N, 1, steps·HV·F]` and w, shaped like v, for the shares of k that are erased,
        beta_scale·σ(b), and of v that are written, σ(w), with β = 1. Decay: either g `[N, 1, HV (, F)]`, or a
        with as many entries and `decay` = (A_log `[HV]`, dt_bias), g = −exp(A_log)·softplus(a + dt_bias).
        Denominator: positions, int64 `[N or 1, 1]`, from 0. Output gate: gate `[N, 1, HV·V]`, before its
        activation. q, k, v, b, w, a and gate may be columns of wider rows.
        a may also be `[N, 1, R]` with a_up `[HV·F, R]` and a_bias or None, whose product is a; and so gate.
    state: recurrent `[N, HV, F, V]` in fp32, with a denominator V + 1 columns, the last one Σφ(k); with
        filters also conv_q, conv_k, conv_v `[N, W−1, ·]`; of MALA value_sum `[N, HV, 1, V]`. It is not changed.
    options: the fields of `Token`.

    Returns o `[N, 1, HV, V]`, and the new state under the same names.
    Raises Unsupported for float64, maps that kernels cannot form, states not in fp32, K > 256 and V > 512.
    """
    token = Token(**options)
    MAP, parameters = describe(token.feature_map, token.qk_norm, token.key_dim)
    _check_sizes(token, state["recurrent"].dtype)
    powers, units = map(_dense, (*parameters, None, None)[:2])
    HV, K, V = token.num_v_heads, token.key_dim, token.value_dim

    x = inputs()
    sources = {name: _source(name, x) for name in COLUMNS}
    N, narrow = len(x["v"]), x["v"].dtype
    positions = x.get("positions")

    old = {name: y.contiguous() for name, y in state.items()}
    new = token.out or {
        # The convolutions' inputs, and the recurrence in fp32.
        name: torch.empty_like(y, dtype=narrow if name.startswith("conv") else None)
        for name, y in old.items()
    }
    o = x["v"].new_empty(N, 1, HV, V, dtype=token.dtype)
    blocks = tiles(N, HV, K, V, MAP.halves)
    # Only states that the caller keeps have tickets that last.
    buffer = new["recurrent"] if token.out else None
    normed = 0 if token.norm is None else token.norm[0].numel()

    kernel: Any = step_kernel
    kernel[(N * HV, triton.cdiv(V, blocks["BV"]))](
        **sources,
        positions=positions,
        # One position for all sequences has stride 0.
        position_stride=int(positions is not None and len(positions) > 1),
        # steps around the rule
        **_convolution_arguments(token.filters or {}, old, new),
        **_decay_arguments(sources, token),
        **_norm_arguments(token, o, blocks["BV"], buffer),
        GATE=token.gate_activation if "gate" in x else "none",
        GATE_FIRST=token.gate_first,
        SILU=token.silu,
        # the state and the output
        state=old["recurrent"],
        new_state=new["recurrent"],
        value_sum=old.get("value_sum"),
        new_sum=new.get("value_sum"),
        o=o,
        # the rule
        MAP=MAP,
        powers=powers,
        units=units,
        frequencies=token.frequencies,
        skip=_dense(token.skip),
        magnitude=float(token.magnitude),
        BY_COUNT=token.by_count,
        SWAPPED=token.swapped,
        scale=float((K * MAP.halves) ** -0.5 if token.scale is None else token.scale),
        beta_scale=float(token.beta_scale),
        STEPS=token.steps,
        DELTA=token.delta,
        ERASE="w" in x,
        DENOMINATOR=token.denominator,
        # sizes
        HV=HV,
        GROUP=HV // token.num_heads,
        K=K,
        V=V,
        NORMED=normed,
        ALL=power_of_two(normed),
        **blocks,
        **FUSION,
    )
    return o, new


def _check_sizes(token: Token, state: torch.dtype) -> None:
    if token.dtype not in DTYPES or state != torch.float32:
        raise Unsupported(f"{name_of(token.dtype)} outputs with a state in {name_of(state)}")
    K, V = token.key_dim, token.value_dim
    if K > 256 or V > 512:
        raise Unsupported(f"heads of {K} keys and {V} values: at most 256 and 512")
    if token.norm is not None and token.norm[0].numel() > WIDEST:
        raise Unsupported(f"a norm of {token.norm[0].numel()} outputs: at most {WIDEST}")


def _source(name: str, x: dict[str, Tensor]) -> tuple | None:
    """An input as `load_input` reads it: columns of wider rows stay where they are."""
    if name not in x:
        return None
    y, up, bias = x[name], _dense(x.get(f"{name}_up")), _dense(x.get(f"{name}_bias"))
    y = rows_of(y, y.numel() // len(y))
    return y, y.stride(0), up, bias, 0 if up is None else up.shape[1]


def _dense(x: Tensor | None) -> Tensor | None:
    """A weight without gaps: the kernel computes addresses from shapes alone."""
    return None if x is None else x.contiguous()


def _convolution_arguments(
    filters: dict[str, Tensor], old: dict[str, Tensor], new: dict[str, Tensor]
) -> dict[str, Any]:
    """The kernel's arguments for convolutions of W taps, and LOCAL_W of v in o; 0 for none."""
    arguments: dict[str, Any] = {f"{name}_conv": None for name in (*"qkv", "local")}
    arguments |= {"W": 0, "LOCAL_W": 0, "LOCAL": len(filters.get("local", (0,)))}
    for name, weight in filters.items():
        past = f"conv_{name}"  # [N, W−1, ·]
        arguments[f"{name}_conv"] = weight.contiguous(), old[past], new[past]
        arguments["LOCAL_W" if name == "local" else "W"] = weight.shape[-1]
    return arguments


def _decay_arguments(sources: dict[str, Any], token: Token) -> dict[str, Any]:
    """The kernel's arguments for the decay: its kind, and its G entries for each head."""
    kind, G = token.decay_kind, 1
    A_log, dt_bias = map(_dense, token.decay or (None, None))
    if token.decay is not None:
        kind = "softplus"
    if sources["g"] is not None:
        kind = "given"
    source = sources["g"] or sources["a"]
    if source is not None:
        y, _, up, *_ = source
        # 1, or F with decays by channel.
        G = (y.shape[1] if up is None else len(up)) // token.num_v_heads
    arguments = {"A_log": A_log, "dt_bias": dt_bias, "temperature": float(token.temperature)}
    return arguments | {"DECAY": kind, "G": G}


def _norm_arguments(token: Token, o: Tensor, BV: int, buffer: Tensor | None) -> dict[str, Any]:
    """The kernel's arguments for the norm. Programs that share one store o apart and take tickets.

    o: `[N, 1, HV, V]`. buffer: as in `tickets_of`.
    """
    weight, eps = token.norm or (None, 0.0)
    arguments: dict[str, Any] = {"norm_weight": _dense(weight), "eps": float(eps)}
    arguments["norm_bias"] = _dense(token.norm_bias)
    if weight is None or weight.numel() == o.shape[3] <= BV:
        return arguments | {"o_raw": None, "tickets": None}
    tickets = tickets_of(o, o.numel() // weight.numel(), buffer)
    # The outputs before their norm, and their gates.
    return arguments | {"o_raw": o.new_empty(2, *o.shape, dtype=torch.float32), "tickets": tickets}
