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
from nalanda_kernels.triton.common import power_of_two, rows_of
from nalanda_kernels.triton.feature_maps import EPS, describe, features

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def softplus(x):
    """log(1 + e^x), with a small relative error where e^x is small."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def convolved(x, stride, weight, past, new, n, c, m, owns, D: tl.constexpr, W: tl.constexpr):
    """Channels c [BD] of x [N, D], its rows `stride` apart, after the convolution, in fp32.

    If `owns`, stores the new state too.
    """
    last = tl.load(x + n * stride + c, mask=m, other=0.0)
    y = last.to(tl.float32)
    if W > 0:
        y *= tl.load(weight + c * W + (W - 1), mask=m, other=0.0).to(tl.float32)
        for i in tl.static_range(W - 1):
            p = (n * (W - 1) + i) * D + c
            before = tl.load(past + p, mask=m, other=0.0)
            y += before.to(tl.float32) * tl.load(weight + c * W + i, mask=m, other=0.0).to(tl.float32)
            if i > 0:
                tl.store(new + p - D, before.to(new.dtype.element_ty), mask=m & owns)
        tl.store(new + (n * (W - 1) + W - 2) * D + c, last.to(new.dtype.element_ty), mask=m & owns)
    return y


@triton.jit
def column(f, BK: tl.constexpr):
    """[1, BK] to [BK, 1]."""
    return tl.reshape(f, [BK])[:, None]


@triton.jit
def gated(o, gate, p, m, GATED: tl.constexpr):
    if GATED:
        g = tl.load(gate + p, mask=m, other=0.0).to(tl.float32)
        o *= g * tl.sigmoid(g)
    return o


@triton.jit
def normed(o, weight, c, m, eps, V: tl.constexpr):
    return o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * tl.load(weight + c, mask=m, other=0.0).to(tl.float32)


@triton.jit
def step_kernel(
    q, k, v, q_weight, k_weight, v_weight, q_past, k_past, v_past, q_new, k_new, v_new,
    b, a, A_log, dt_bias, g, positions, state, new_state, norm_weight, gate, o, o_raw, tickets,
    q_stride, k_stride, v_stride, b_stride, a_stride, gate_stride, position_stride, scale, beta_scale, eps,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    MAP: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr, DENOMINATOR: tl.constexpr,
    SILU: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    i, i_v = tl.program_id(0), tl.program_id(1)  # the second axis ends at 65 535
    n, h_v = (i // HV).to(tl.int64), i % HV
    f, c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    in_K, in_V = f < K, c < V
    HALVES: tl.constexpr = MAP.halves  # pyrefly: ignore[missing-attribute]
    F: tl.constexpr = K * HALVES
    COLUMNS: tl.constexpr = V + 1 if DENOMINATOR else V
    tile = i.to(tl.int64) * (F * COLUMNS) + f[:, None] * COLUMNS + c[None, :]
    m = in_K[:, None] & in_V[None, :]
    s1 = tl.load(state + tile, mask=m, other=0.0)  # [BK, BV]; first, because it is the longest load
    if HALVES == 2:
        s2 = tl.load(state + tile + K * COLUMNS, mask=m, other=0.0)
    else:
        s2 = s1

    # q and k of the head, columns of v
    h, row = h_v // GROUP, in_K[None, :]
    owns = (i_v == 0) & (h_v % GROUP == 0)
    D_K: tl.constexpr = HV // GROUP * K
    x_q = convolved(q, q_stride, q_weight, q_past, q_new, n, h * K + f, in_K, owns, D_K, W)
    x_k = convolved(k, k_stride, k_weight, k_past, k_new, n, h * K + f, in_K, owns, D_K, W)
    u = convolved(v, v_stride, v_weight, v_past, v_new, n, h_v * V + c, in_V, in_V, HV * V, W)
    if SILU:
        u *= tl.sigmoid(u)
    q1, q2 = features(x_q[None, :], row, MAP, True)
    k1, k2 = features(x_k[None, :], row, MAP, False)
    q1, q2, k1, k2 = column(q1, BK), column(q2, BK), column(k1, BK), column(k2, BK)

    # the state: decay, read by k (delta rule), write
    decay = 1.0
    if DECAY == "given":
        decay = tl.exp(tl.load(g + i).to(tl.float32))
    elif DECAY == "softplus":
        dt = tl.load(a + n * a_stride + h_v).to(tl.float32) + tl.load(dt_bias + h_v).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(A_log + h_v).to(tl.float32)) * softplus(dt))
    if DECAY != "none":
        s1 *= decay
        if HALVES == 2:
            s2 *= decay
    if DELTA:
        held = tl.sum(k1 * s1, 0)
        if HALVES == 2:
            held += tl.sum(k2 * s2, 0)
        u = (u - held) * (beta_scale * tl.sigmoid(tl.load(b + n * b_stride + h_v).to(tl.float32)))
    s1 += k1 * u[None, :]
    tl.store(new_state + tile, s1, mask=m)
    y = tl.sum(q1 * s1, 0)
    if HALVES == 2:
        s2 += k2 * u[None, :]
        tl.store(new_state + tile + K * COLUMNS, s2, mask=m)
        y += tl.sum(q2 * s2, 0)
    y *= scale
    if DENOMINATOR:  # the state's last column, Σφ(k): all programs read it, the first writes it
        p = i.to(tl.int64) * (F * COLUMNS) + f[:, None] * COLUMNS + V
        z = tl.load(state + p, mask=in_K[:, None], other=0.0) * decay + k1
        tl.store(new_state + p, z, mask=in_K[:, None] & (i_v == 0))
        total = tl.sum(tl.sum(q1 * z, 0), 0)
        if HALVES == 2:
            z = tl.load(state + p + K * COLUMNS, mask=in_K[:, None], other=0.0) * decay + k2
            tl.store(new_state + p + K * COLUMNS, z, mask=in_K[:, None] & (i_v == 0))
            total += tl.sum(tl.sum(q2 * z, 0), 0)
        count = (tl.load(positions + n * position_stride) + 1).to(tl.float32)
        y /= total * scale + EPS * count

    # norm and gate
    heads, gates = i.to(tl.int64) * V, n * gate_stride + h_v * V
    if not NORM:
        y = gated(y, gate, gates + c, in_V, GATED)
        tl.store(o + heads + c, y.to(o.dtype.element_ty), mask=in_V)
    elif BV >= V:
        y = gated(normed(y, norm_weight, c, in_V, eps, V), gate, gates + c, in_V, GATED)
        tl.store(o + heads + c, y.to(o.dtype.element_ty), mask=in_V)
    else:
        tl.store(o_raw + heads + c, y, mask=in_V)
        tl.debug_barrier()  # all threads have stored before the ticket
        if tl.atomic_add(tickets + i, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            all_c = tl.arange(0, WHOLE)
            in_all = all_c < V
            whole = tl.load(o_raw + heads + all_c, mask=in_all, other=0.0, cache_modifier=".cg")
            whole = normed(whole, norm_weight, all_c, in_all, eps, V)
            whole = gated(whole, gate, gates + all_c, in_all, GATED)
            tl.store(o + heads + all_c, whole.to(o.dtype.element_ty), mask=in_all)
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
    BK, many = power_of_two(K), N * HV * V >= 2048 * 16
    BV = 32 if many and V > 16 else 16
    return {"BK": BK, "BV": BV, "num_warps": 8 if halves * BK > 256 else 4}


def step(
    inputs: Callable[[], dict[str, Tensor]],
    state: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    num_heads: int,
    num_v_heads: int,
    feature_map=None,
    qk_norm: str | None = None,
    scale: float | None = None,
    delta: bool = False,
    beta_scale: float = 1.0,
    decay: tuple[Tensor, Tensor] | None = None,
    denominator: bool = False,
    filters: dict[str, Tensor] | None = None,
    silu: bool = False,
    norm: tuple[Tensor, float] | None = None,
    out: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One token of N sequences through the delta rule or linear attention, from projections to o_proj.

    inputs: called after every check for `Unsupported`. Returns q, k `[N, 1, H·K]` and v `[N, 1, HV·V]` (or
        with heads apart) as projected. Delta rule: also b `[N, 1, HV]`, β = beta_scale·σ(b). Decay: either g,
        or a `[N, 1, HV]` together with `decay` = (A_log, dt_bias), g = −exp(A_log)·softplus(a + dt_bias).
        Denominator: positions, int64 `[N or 1, 1]`, from 0. Output gate: gate `[N, 1, HV·V]`, before SiLU.
        q, k, v, b, a and gate may be columns of wider rows.
    state: recurrent `[N, HV, F, V]` in fp32, with a denominator V + 1 columns, the last one Σφ(k); with
        filters also conv_q, conv_k, conv_v `[N, W−1, ·]`. It is not changed.
    dtype: of the output.
    filters: weights of the convolutions of q, k and v, `[·, W]` or `[·, 1, W]`; None or empty for none.
    silu: whether SiLU follows the convolution of v.
    norm: weight `[V]` and ε of the RMSNorm of each head of the output.
    out: contiguous tensors for the new state, none of `state`'s own; by default new ones.

    Returns o `[N, 1, HV, V]`, and the new state under the same names.
    Raises Unsupported for float64, maps that kernels cannot form, states not in fp32, K > 256 and V > 512.
    """
    MAP, parameters = describe(feature_map, qk_norm, key_dim)
    old, filters = state["recurrent"], filters or {}
    if parameters:
        raise Unsupported(f"the feature map {MAP.name!r} has parameters")
    if dtype not in DTYPES or old.dtype != torch.float32:
        raise Unsupported(f"no {dtype} with a state in {old.dtype}")
    if key_dim > 256 or value_dim > 512:
        raise Unsupported(f"heads of {key_dim} keys and {value_dim} values are wider than 256 and 512")
    columns = ("q", "k", "v", "b", "a", "gate")
    x = {
        name: rows_of(y, y.numel() // len(y)) if name in columns else y.contiguous()
        for name, y in inputs().items()
    }
    strides = [x[name].stride(0) if name in x else 0 for name in columns]
    q, N = x["q"], len(x["q"])
    old, taps, past = old.contiguous(), {}, {}
    for name, weight in filters.items():
        taps[name], past[name] = weight.contiguous(), state[f"conv_{name}"].contiguous()
    new = out or {f"conv_{n}": torch.empty_like(p, dtype=x[n].dtype) for n, p in past.items()}
    new = new if out else new | {"recurrent": torch.empty_like(old)}
    blocks = tiles(N, num_v_heads, key_dim, value_dim, MAP.halves)
    o = q.new_empty(N, 1, num_v_heads, value_dim, dtype=dtype)
    apart = norm is not None and blocks["BV"] < value_dim
    scale = (key_dim * MAP.halves) ** -0.5 if scale is None else scale
    A_log, dt_bias = decay or (None, None)
    weight, eps = norm or (None, 0.0)
    positions = x.get("positions")
    kernel: Any = step_kernel
    kernel[(N * num_v_heads, triton.cdiv(value_dim, blocks["BV"]))](
        *(x[name] for name in "qkv"),
        *(taps.get(name) for name in "qkv"),
        *(past.get(name) for name in "qkv"),
        *(new.get(f"conv_{name}") for name in "qkv"),
        *(x.get("b"), x.get("a"), A_log, dt_bias, x.get("g"), positions, old, new["recurrent"], weight),
        *(x.get("gate"), o, torch.empty_like(o, dtype=torch.float32) if apart else None),
        tickets_of(q, N * num_v_heads, new["recurrent"] if out else None) if apart else None,
        *(*strides, int(positions is not None and len(positions) > 1)),
        *(float(scale), float(beta_scale), float(eps)),
        HV=num_v_heads,
        GROUP=num_v_heads // num_heads,
        K=key_dim,
        V=value_dim,
        W=taps["q"].shape[-1] if taps else 0,
        MAP=MAP,
        DELTA=delta,
        DECAY="softplus" if decay is not None else "given" if "g" in x else "none",
        DENOMINATOR=denominator,
        SILU=silu,
        NORM=norm is not None,
        GATED="gate" in x,
        WHOLE=power_of_two(value_dim),
        **blocks,
    )
    return o, new
