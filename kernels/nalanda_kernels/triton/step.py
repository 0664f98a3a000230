"""One token of generation: everything between a mixer's projections and its o_proj, in one launch.

A program has BV columns of one head's state. It reads the state once and writes it once, to a new tensor, so
callers may keep the old one. At batch 1 the flagship's six heads are 96 programs. All programs of a head need
its q and k after convolution, map and norm; each computes them from the L2 cache (4 KB; the state is 32 KB).
Only the RMSNorm needs a whole head: every program stores its columns of o and takes a ticket, and the program
with the last ticket applies norm and gate. One program per head would leave 126 of an H200's 132
multiprocessors idle while six move 3 MB; a second launch for the norm would wait for the first to end.
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
from nalanda_kernels.triton.common import name_of, power_of_two, rows_of
from nalanda_kernels.triton.feature_maps import EPS, describe, features

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = ("q", "k", "v", "b", "w", "a", "gate")  # inputs that may be columns of wider rows


@triton.jit
def softplus(x):
    """log(1 + e^x), with a small relative error where e^x is small."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log u is that of the rounded u; e / (u − 1) corrects the rounding of 1 + e.
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def convolved(x, stride, weight, past, new, n, c, m, owns, D: tl.constexpr, W: tl.constexpr):
    """Channels c [BD] of x [N, D] after the convolution Σ_i w_i x_{t−W+1+i}, in fp32; W = 0 is none.

    x has rows `stride` apart. past, new: its last W − 1 inputs [N, W−1, D]; new is stored if `owns`.
    """
    last = tl.load(x + n * stride + c, mask=m, other=0.0)
    y = last.to(tl.float32)
    if W > 0:
        # The last tap is the token's own; the others read the state.
        y *= tl.load(weight + c * W + (W - 1), mask=m, other=0.0).to(tl.float32)
        # Taps from the oldest input on.
        for i in tl.static_range(W - 1):
            p = (n * (W - 1) + i) * D + c
            before = tl.load(past + p, mask=m, other=0.0)
            y += before.to(tl.float32) * tl.load(weight + c * W + i, mask=m, other=0.0).to(
                tl.float32
            )
            if i > 0:  # the new state has moved on by one token
                tl.store(new + p - D, before.to(new.dtype.element_ty), mask=m & owns)
        tl.store(new + (n * (W - 1) + W - 2) * D + c, last.to(new.dtype.element_ty), mask=m & owns)
    return y


@triton.jit
def column(f, BK: tl.constexpr):
    """[1, BK] to [BK, 1]."""
    return tl.reshape(f, [BK])[:, None]


@triton.jit
def load_sigmoid(logits, p, m):
    """σ of logits, in fp32."""
    return tl.sigmoid(tl.load(logits + p, mask=m, other=0.0).to(tl.float32))


@triton.jit
def decay_of(g, a, A_log, dt_bias, i, h_v, f, m, G: tl.constexpr, DECAY: tl.constexpr):
    """e^g of a head (G = 1), or of its channels f, [BK, 1]. a: of the head's sequence.

    g is "given", or −exp(A_log) softplus(a + dt_bias).
    """
    # One entry for the head: a scalar instead of a tile.
    if G == 1:
        f, m = 0, True
    if DECAY == "given":
        log = tl.load(g + i.to(tl.int64) * G + f, mask=m, other=0.0).to(tl.float32)
    else:
        dt = tl.load(a + h_v * G + f, mask=m, other=0.0).to(tl.float32)
        dt += tl.load(dt_bias + h_v * G + f, mask=m, other=0.0).to(tl.float32)
        log = -tl.exp(tl.load(A_log + h_v).to(tl.float32)) * softplus(dt)
    decay = tl.exp(log)
    if G > 1:
        decay = decay[:, None]
    return decay


@triton.jit
def gated(o, gate, p, m, GATE: tl.constexpr):
    """o times its gate's σ or SiLU, or o itself."""
    if GATE != "none":
        g = tl.load(gate + p, mask=m, other=0.0).to(tl.float32)
        o *= tl.sigmoid(g)
        if GATE == "silu":
            o *= g
    return o


@triton.jit
def normed(o, weight, c, m, eps, V: tl.constexpr):
    """RMSNorm of a head's output o, 0 outside its V columns: o / √(mean o² + ε) ⊙ weight."""
    root = tl.rsqrt(tl.sum(o * o, 0) / V + eps)
    return o * root * tl.load(weight + c, mask=m, other=0.0).to(tl.float32)


@triton.jit
def step_kernel(
    q,
    k,
    v,
    q_weight,
    k_weight,
    v_weight,
    q_past,
    k_past,
    v_past,
    q_new,
    k_new,
    v_new,
    b,
    w,
    a,
    A_log,
    dt_bias,
    g,
    positions,
    state,
    new_state,
    norm_weight,
    gate,
    o,
    o_raw,
    tickets,
    q_stride,
    k_stride,
    v_stride,
    b_stride,
    w_stride,
    a_stride,
    gate_stride,
    position_stride,
    scale,
    beta_scale,
    eps,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    MAP: tl.constexpr,
    STEPS: tl.constexpr,
    DELTA: tl.constexpr,
    ERASE: tl.constexpr,
    DECAY: tl.constexpr,
    G: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ALL: tl.constexpr,
):
    """BV columns of a head's new state and output, for one token of one sequence.

        S ← Diag(e^g) S;    for each step of the rule  S ← S + φ(k) u⊤;    o = gate ⊙ norm(scale · S⊤φ(q))

    where u is v (linear attention), β (v − S⊤φ(k)) (delta rule), or σ(w) ⊙ v − S⊤(σ(b) ⊙ φ(k)) (ERASE).
    q, k and v are taken after their convolutions. F = HALVES · K features, ALL ≥ V columns of a whole head.
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
    s1 = tl.load(state + tile, mask=m, other=0.0)
    if HALVES == 2:
        s2 = tl.load(state + tile + K * COLUMNS, mask=m, other=0.0)
    else:
        s2 = s1

    # q of the head; its features are formed after the loop, which needs the registers.
    row = in_K[None, :]
    owns = (i_v == 0) & (h_v % GROUP == 0)  # one program of a head stores its convolution's state
    x_q = convolved(q, q_stride, q_weight, q_past, q_new, n, h * K + f, in_K, owns, H * K, W)

    # For each step of the rule: read by k (delta rule) and write. The decay precedes the first.
    decay1, decay2 = 1.0, 1.0
    for j in tl.static_range(STEPS):
        # Step j's heads follow those of the steps before, [steps, heads, columns].
        at_k, at_v = (j * H + h) * K + f, (j * HV + h_v) * V + c
        x_k = convolved(k, k_stride, k_weight, k_past, k_new, n, at_k, in_K, owns, STEPS * H * K, W)
        # Every program has columns of v of its own, so each stores their past.
        u = convolved(v, v_stride, v_weight, v_past, v_new, n, at_v, in_V, in_V, STEPS * HV * V, W)
        if SILU:
            u *= tl.sigmoid(u)
        # Features as [1, BK], as rows of a tile; then as columns [BK, 1] beside S.
        k1, k2 = features(x_k[None, :], row, MAP, False)
        k1, k2 = column(k1, BK), column(k2, BK)

        if j == 0 and DECAY != "none":
            a_n = a + n * a_stride if DECAY == "softplus" else a
            decay1 = decay_of(g, a_n, A_log, dt_bias, i, h_v, f, in_K, G, DECAY)
            s1 *= decay1
            if HALVES == 2:
                # One decay a head serves both halves; decays by channel have F entries.
                decay2 = decay1
                if G > 1:
                    decay2 = decay_of(g, a_n, A_log, dt_bias, i, h_v, K + f, in_K, G, DECAY)
                s2 *= decay2

        if DELTA:
            # `held`: the value that S stores under the key, [BV].
            erased1, erased2 = k1, k2
            # β has an entry a head, erase one for each of F features.
            at_b = n * b_stride + (j * HV + h_v) * (F if ERASE else 1)
            if ERASE:
                erased1 *= beta_scale * load_sigmoid(b, at_b + f, in_K)[:, None]
                if HALVES == 2:
                    erased2 *= beta_scale * load_sigmoid(b, at_b + K + f, in_K)[:, None]
            held = tl.sum(erased1 * s1, 0)
            if HALVES == 2:
                held += tl.sum(erased2 * s2, 0)
            if ERASE:
                # u = σ(w) ⊙ v − S⊤(σ(b) ⊙ φ(k))
                u = u * load_sigmoid(w, n * w_stride + at_v, in_V) - held
            else:
                # u = β (v − S⊤φ(k))
                u = (u - held) * (beta_scale * load_sigmoid(b, at_b, True))

        # S + φ(k) u⊤
        s1 += k1 * u[None, :]
        if HALVES == 2:
            s2 += k2 * u[None, :]

    # The readout, [BV].
    tl.store(new_state + tile, s1, mask=m)
    q1, q2 = features(x_q[None, :], row, MAP, True)
    q1, q2 = column(q1, BK), column(q2, BK)
    y = tl.sum(q1 * s1, 0)
    if HALVES == 2:
        tl.store(new_state + tile + K * COLUMNS, s2, mask=m)
        y += tl.sum(q2 * s2, 0)
    y *= scale

    if DENOMINATOR:  # the state's last column, Σφ(k): all programs read it, the first writes it
        p = i.to(tl.int64) * (F * COLUMNS) + f[:, None] * COLUMNS + V
        # k1 is that of the last step: denominators come with linear attention of one step.
        z = tl.load(state + p, mask=in_K[:, None], other=0.0) * decay1 + k1
        tl.store(new_state + p, z, mask=in_K[:, None] & (i_v == 0))
        total = tl.sum(tl.sum(q1 * z, 0), 0)
        if HALVES == 2:
            z = tl.load(state + p + K * COLUMNS, mask=in_K[:, None], other=0.0) * decay2 + k2
            tl.store(new_state + p + K * COLUMNS, z, mask=in_K[:, None] & (i_v == 0))
            total += tl.sum(tl.sum(q2 * z, 0), 0)
        count = (tl.load(positions + n * position_stride) + 1).to(tl.float32)
        # scale cancels, except beside ε t.
        y /= total * scale + EPS * count

    # Norm and gate. A program with all columns of the head applies them itself.
    heads, gates = i.to(tl.int64) * V, n * gate_stride + h_v * V
    if not NORM:
        y = gated(y, gate, gates + c, in_V, GATE)
        tl.store(o + heads + c, y.to(o.dtype.element_ty), mask=in_V)
    elif BV >= V:
        y = gated(normed(y, norm_weight, c, in_V, eps, V), gate, gates + c, in_V, GATE)
        tl.store(o + heads + c, y.to(o.dtype.element_ty), mask=in_V)
    else:
        # Else the program with the last ticket does, for the columns of all.
        tl.store(o_raw + heads + c, y, mask=in_V)
        tl.debug_barrier()  # all threads have stored before the ticket
        # Release publishes this program's columns; acquire shows the last one those of all.
        if tl.atomic_add(tickets + i, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            all_c = tl.arange(0, ALL)
            in_all = all_c < V
            # Past L1, which may hold old lines: other processors wrote these.
            y_all = tl.load(o_raw + heads + all_c, mask=in_all, other=0.0, cache_modifier=".cg")
            y_all = normed(y_all, norm_weight, all_c, in_all, eps, V)
            y_all = gated(y_all, gate, gates + all_c, in_all, GATE)
            tl.store(o + heads + all_c, y_all.to(o.dtype.element_ty), mask=in_all)
            tl.store(tickets + i, 0)  # for the next launch


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
    state: recurrent `[N, HV, F, V]` in fp32, with a denominator V + 1 columns, the last one Σφ(k); with
        filters also conv_q, conv_k, conv_v `[N, W−1, ·]`. It is not changed.
    options: the fields of `Token`.

    Returns o `[N, 1, HV, V]`, and the new state under the same names.
    Raises Unsupported for float64, maps that kernels cannot form, states not in fp32, K > 256 and V > 512.
    """
    token = Token(**options)
    MAP, parameters = describe(token.feature_map, token.qk_norm, token.key_dim)
    if parameters:
        raise Unsupported(f"the parameters of the feature map {MAP.name!r}")
    _check_sizes(token, state["recurrent"].dtype)

    # Rows [N, columns] of each projection.
    x = {name: _rows_or_tensor(name, y) for name, y in inputs().items()}
    old = state["recurrent"].contiguous()
    convolutions, new = _convolution_arguments(token.filters or {}, state, x)
    new = token.out or {**new, "recurrent": torch.empty_like(old)}

    N, HV, K, V = len(x["q"]), token.num_v_heads, token.key_dim, token.value_dim
    o = x["q"].new_empty(N, 1, HV, V, dtype=token.dtype)
    blocks = tiles(N, HV, K, V, MAP.halves)
    # Only states that the caller keeps have tickets that last.
    buffer = new["recurrent"] if token.out else None

    kernel: Any = step_kernel
    kernel[(N * HV, triton.cdiv(V, blocks["BV"]))](
        # the projections, and their rows' strides
        **{name: x.get(name) for name in (*COLUMNS, "g", "positions")},
        **_stride_arguments(x),
        # steps around the rule
        **convolutions,
        **{f"{name}_new": new.get(f"conv_{name}") for name in "qkv"},
        **_decay_arguments(x, token.decay, HV),
        **_norm_arguments(token.norm, o, blocks["BV"], buffer),
        GATE=token.gate_activation if "gate" in x else "none",
        SILU=token.silu,
        # the state and the output
        state=old,
        new_state=new["recurrent"],
        o=o,
        # the rule
        MAP=MAP,
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
        ALL=power_of_two(V),
        **blocks,
    )
    return o, new


def _check_sizes(token: Token, state: torch.dtype) -> None:
    if token.dtype not in DTYPES or state != torch.float32:
        raise Unsupported(f"{name_of(token.dtype)} outputs with a state in {name_of(state)}")
    K, V = token.key_dim, token.value_dim
    if K > 256 or V > 512:
        raise Unsupported(f"heads of {K} keys and {V} values: at most 256 and 512")


def _rows_or_tensor(name: str, x: Tensor) -> Tensor:
    """An input as the kernel reads it: columns of wider rows stay where they are."""
    return rows_of(x, x.numel() // len(x)) if name in COLUMNS else x.contiguous()


def _convolution_arguments(
    filters: dict[str, Tensor], state: dict[str, Tensor], x: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The kernel's arguments for convolutions of W taps, 0 for none, and empty tensors for their new states."""
    arguments: dict[str, Any] = {
        f"{name}_{kind}": None for name in "qkv" for kind in ("weight", "past")
    }
    arguments["W"] = 0
    new = {}
    for name, weight in filters.items():
        past = state[f"conv_{name}"].contiguous()  # [N, W−1, ·]
        new[f"conv_{name}"] = torch.empty_like(past, dtype=x[name].dtype)
        arguments |= {f"{name}_weight": weight.contiguous(), f"{name}_past": past}
        arguments["W"] = weight.shape[-1]
    return arguments, new


def _stride_arguments(x: dict[str, Tensor]) -> dict[str, int]:
    """Entries between rows of the inputs, and between positions; 0 where there is one for all sequences."""
    strides = {f"{name}_stride": x[name].stride(0) if name in x else 0 for name in COLUMNS}
    # One position for all sequences has stride 0.
    return strides | {"position_stride": int(len(x.get("positions", ())) > 1)}


def _decay_arguments(
    x: dict[str, Tensor], decay: tuple[Tensor, Tensor] | None, num_v_heads: int
) -> dict[str, Any]:
    """The kernel's arguments for the decay: where it comes from, and its G entries for each head."""
    kind = "given" if "g" in x else "none"
    if decay is not None:
        kind = "softplus"
    A_log, dt_bias = decay or (None, None)
    gates = x.get("g", x.get("a"))
    # 1, or F with decays by channel.
    G = 1 if gates is None else gates.numel() // len(gates) // num_v_heads
    return {"A_log": A_log, "dt_bias": dt_bias, "DECAY": kind, "G": G}


def _norm_arguments(
    norm: tuple[Tensor, float] | None, o: Tensor, BV: int, buffer: Tensor | None
) -> dict[str, Any]:
    """The kernel's arguments for the norm. Programs that share a head store o apart and take tickets.

    o: `[N, 1, HV, V]`. buffer: as in `tickets_of`.
    """
    weight, eps = norm or (None, 0.0)
    arguments = {"NORM": norm is not None, "norm_weight": weight, "eps": float(eps)}
    if norm is None or o.shape[3] <= BV:
        return arguments | {"o_raw": None, "tickets": None}
    tickets = tickets_of(o, o.shape[0] * o.shape[2], buffer)
    return arguments | {"o_raw": torch.empty_like(o, dtype=torch.float32), "tickets": tickets}
