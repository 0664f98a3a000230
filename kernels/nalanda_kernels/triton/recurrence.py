"""The chunkwise ops: they launch the kernels of `chunk.py` and refuse calls that those cannot serve."""

from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nalanda_kernels import Unsupported
from nalanda_kernels.triton.channels import channel_gradients, prepare_channels
from nalanda_kernels.triton.chunk import (
    Readout,
    compose,
    input_gradients,
    outputs,
    pair_gradients,
    prepare,
    readout_gradients,
    state_gradients,
    states,
)
from nalanda_kernels.triton.common import (
    PRECISION,
    TAGS,
    Chunks,
    blocks,
    chunks_of,
    map_in_torch,
    name_of,
    power_of_two,
    schedule,
    variants,
)
from nalanda_kernels.triton.feature_maps import Map, describe, form, map_features, unform

# A program of these kernels takes one block of V; a program of the others loops over all of them.
_BY_VALUES = (states, compose, outputs, state_gradients)
_PLAIN = Readout()
_NO_STATES = (None,) * 3


def _launch(
    kernel, grid, *args, itemsize: int, features: int, sizes=None, M: int = 0, **options
) -> None:
    """sizes: block sizes, warps and stages; by default those of `blocks`. M: columns beside those of V."""
    sizes = dict(sizes or blocks(kernel.__name__, itemsize, features))
    if "BV" in sizes:
        sizes["BV"] = min(sizes["BV"], power_of_two(options["V"]))
    if "BC" in sizes:
        sizes["BC"] = min(sizes["BC"], power_of_two(options["F"]))
    tiles = -(-(options["V"] + M) // sizes["BV"]) if kernel in _BY_VALUES else 1
    tiles = -(-options["F"] // sizes["BC"]) if kernel is channel_gradients else tiles
    if grid[0]:
        kernel[(grid[0] * tiles, *grid[1:])](*args, **options, **sizes)


def _scan(kernel, chunks: Chunks, inputs, start, end, *rest, **options) -> None:
    """Launches `states` or `state_gradients` over all sequences, or over segments if `schedule` says so.

    inputs, rest: the kernel's arguments before the states and after the tables; the last is HV.
    start, end: S, z and Σv from which the pass starts and those that it stores; None where there are none.
    """
    HV, V, F, delta = rest[-1], options["V"], options["K"] * options["MAP"].halves, options["DELTA"]
    M = F if delta else 0
    alone = options["READ"] != _PLAIN or (options["CHANNELS"] and not delta)
    composing = None if alone else F / 64 if delta else 0.25
    rows = variants(kernel.__name__, options["itemsize"], options["features"])
    widths = tuple(min(row["BV"], power_of_two(V)) for row in rows)
    choice, length = schedule(widths, chunks.longest, chunks.total * HV, V, M, composing)
    sizes = rows[choice]
    length = sizes.pop("segments", length)

    def run(over, start, end, decay=None, AFFINE=False, M=0):
        _launch(
            kernel,
            (over.sequences * HV,),
            *inputs,
            *start,
            *end,
            decay,
            over.bounds,
            over.first,
            *rest,
            START=start[0] is not None,
            END=end[0] is not None,
            AFFINE=AFFINE,
            sizes=sizes,
            M=M,
            **options,
        )

    if composing is None or not 0 < length < chunks.longest:
        run(chunks, start, end)
        return
    segments = chunks.segments(length)
    new = partial(torch.empty, dtype=torch.float32, device=chunks.start.device)
    affine, starts = (new(segments.sequences, HV, F, n) for n in (V + M, V))
    decay = None if delta else new(segments.sequences, HV)
    run(segments, _NO_STATES, (affine, None, None), decay, AFFINE=True, M=M)
    _launch(
        compose,
        (chunks.sequences * HV,),
        affine,
        decay,
        starts,
        start[0],
        end[0],
        segments.parts,
        HV,
        F=F,
        V=V,
        DELTA=delta,
        START=start[0] is not None,
        END=end[0] is not None,
        PREC=PRECISION,
        REVERSE=kernel is state_gradients,
        itemsize=4,
        features=options["features"],
    )
    run(segments, (starts, None, None), _NO_STATES)


def _forward(ctx, *inputs) -> tuple[Tensor, ...]:
    """o, the final S, z and Σv, and tensors for the backward; absent ones have no elements.

    The backward reads P, S before each chunk, (I + A)⁻¹, E, z and Σv before each chunk, and the denominators.

    ctx: autograd's; None under torch.compile, whose operator calls `_setup_context` itself.
    inputs: as in the operator's schema; map and read are text. wide: whether (I + A)⁻¹ is kept in fp32.
    """
    (
        q,
        k,
        v,
        beta,
        g,
        erase,
        initial,
        z_initial,
        u_initial,
        positions,
        cu_seqlens,
        map,
        read,
        scale,
        final,
        wide,
    ) = inputs
    map, read = Map.parse(map), Readout.parse(read)
    H, HV, K, V = q.shape[2], v.shape[2], q.shape[3] // _stored_halves(map), v.shape[3]
    F, delta, mean, mala = K * map.halves, beta is not None, read.name != "", read.name == "mala"
    channels = g is not None and g.ndim == 4
    common = {"itemsize": v.itemsize, "features": power_of_two(K) * map.halves}
    BT = blocks("chunk_channels" if channels else "chunk", **common)["BT"]
    chunks = chunks_of((v.shape[0], v.shape[1]), cu_seqlens, BT, v.device)
    scores = v.new_empty(chunks.total, HV, BT, BT)
    inverse = (
        torch.empty_like(scores, dtype=torch.float32 if wide else None) if delta else v.new_empty(0)
    )
    s = v.new_empty(chunks.total, HV, F, V)
    e = torch.empty_like(v) if delta else v.new_empty(0)
    o = torch.empty_like(v)
    last = chunks.sequences if final else 0
    s_final = v.new_empty(last, HV, F, V, dtype=torch.float32)
    z_final, u_final = (
        v.new_empty(last if there else 0, HV, n, dtype=torch.float32)
        for there, n in ((mean, F), (mala, V))
    )
    zs, us = (
        v.new_empty(chunks.total if there else 0, HV, n, dtype=torch.float32)
        for there, n in ((mean, F), (mala, V))
    )
    z_sums = torch.empty_like(zs)
    den = v.new_empty(v.shape[:3] if mean else (0,), dtype=torch.float32)
    options = {
        "K": K,
        "DELTA": delta,
        "GATED": g is not None and not channels,
        "READ": read,
        "BT": BT,
    }
    options |= {"BK": power_of_two(K), "PREC": PRECISION, **common}
    reads = whole = None
    if channels:
        decayed = _decayed(q, k, v, beta, g, erase, chunks, scale, inverse, scores, BT=BT, **common)
        (q, k_features, reads, whole), H = decayed, HV
    else:
        k_features = k if map.name == "stored" else k.new_empty(*k.shape[:3], F)
        _launch(
            prepare,
            (chunks.total, HV),
            q,
            k,
            beta,
            g,
            inverse,
            scores,
            k_features,
            z_sums,
            chunks.start,
            chunks.count,
            scale,
            H,
            HV,
            MAP=map,
            **options,
        )
    _scan(
        states,
        chunks,
        (k_features, reads, whole, v, beta, g, inverse, s, e, z_sums, zs, us),
        (initial, z_initial, u_initial),
        (s_final, z_final, u_final) if final else _NO_STATES,
        H,
        HV,
        V=V,
        MAP=Map("stored", halves=map.halves),
        CHANNELS=channels,
        **options,
    )
    options["MAP"] = map
    _launch(
        outputs,
        (chunks.total, HV),
        q,
        e if delta else v,
        beta,
        g,
        scores,
        s,
        zs,
        us,
        o,
        den,
        positions,
        _count(positions),
        chunks.start,
        chunks.count,
        scale,
        H,
        HV,
        V=V,
        **options,
    )
    results = o, s_final, z_final, u_final, scores, s, inverse, e, zs, us, den
    if ctx is not None:
        _setup_context(ctx, inputs, results)
    return results


def _decayed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor,
    erase: Tensor | None,
    chunks: Chunks,
    scale: float,
    inverse: Tensor | None = None,
    scores: Tensor | None = None,
    **options,
) -> tuple[Tensor, ...]:
    """q, the k that writes and the k that reads, `[B, T, HV, F]` with their decays, and those of the state.

    With inverse and scores it also fills these.
    """
    H, HV, F = q.shape[2], v.shape[2], q.shape[3]
    q_in, k_out = (q.new_empty(*v.shape[:3], F) for _ in range(2))
    reads = k_out if beta is None else torch.empty_like(k_out)
    whole = q.new_empty(chunks.total, HV, F, dtype=torch.float32)
    _launch(
        prepare_channels,
        (chunks.total, HV),
        q,
        k,
        beta,
        g,
        erase,
        inverse,
        scores,
        q_in,
        k_out,
        reads,
        whole,
        chunks.start,
        chunks.count,
        scale,
        H,
        HV,
        F=F,
        DELTA=beta is not None,
        ERASE=erase is not None,
        PAIRS=scores is not None,
        PREC=PRECISION,
        **options,
    )
    return q_in, k_out, reads, whole


def _backward(
    d_o: Tensor,
    d_final: Tensor | None,
    dz_final: Tensor | None,
    du_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    g: Tensor | None,
    erase: Tensor | None,
    initial: Tensor | None,
    z_initial: Tensor | None,
    u_initial: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    scores: Tensor,
    s: Tensor,
    inverse: Tensor,
    e: Tensor,
    zs: Tensor,
    us: Tensor,
    den: Tensor,
    map_text: str,
    read_text: str,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, β, g, erase, the initial S, z and Σv; those of absent inputs have no elements."""
    map, read = Map.parse(map_text), Readout.parse(read_text)
    H, HV, K, V = q.shape[2], v.shape[2], q.shape[3] // _stored_halves(map), v.shape[3]
    F, delta, tokens = K * map.halves, beta is not None, v.shape[0] * v.shape[1]
    channels = g is not None and g.ndim == 4
    common = {"itemsize": v.itemsize, "features": power_of_two(K) * map.halves}
    BT, e = scores.shape[-1], e if delta else v
    chunks = chunks_of((v.shape[0], v.shape[1]), cu_seqlens, BT, v.device)
    stored = Map("stored", halves=map.halves)
    options = {
        "K": K,
        "V": V,
        "MAP": stored,
        "GATED": g is not None and not channels,
        "READ": read,
        "BT": BT,
    }
    options |= {"BK": power_of_two(K), "PREC": PRECISION, **common}
    q_features, k_features = (q, k) if map.name == "stored" else form(q, k, map)
    scanned = (q_features, k_features, None, None)
    if channels:
        scanned = _decayed(q, k, v, beta, g, erase, chunks, scale, BT=BT, **common)
    d_den = shares = dz_sums = du_sums = None
    if read.name:
        d_r, d_den, shares, dz_sums, du_sums = (
            torch.empty_like(x) for x in (d_o, den, den, zs, us)
        )
        _launch(
            readout_gradients,
            (chunks.total, HV),
            q_features,
            d_o,
            o,
            v,
            g,
            us,
            den,
            positions,
            _count(positions),
            d_r,
            d_den,
            shares,
            dz_sums,
            du_sums,
            chunks.start,
            chunks.count,
            H,
            HV,
            **options,
        )
        d_o = d_r
    options["DELTA"] = delta
    d_s, d_zs, d_v = torch.empty_like(s), torch.empty_like(zs), torch.empty_like(v)
    starts = initial, z_initial, u_initial
    d_starts = [None if x is None else torch.empty_like(x, dtype=torch.float32) for x in starts]
    inputs = *scanned, d_o, shares, dz_sums, du_sums, beta, g, inverse, scores, d_s, d_zs, d_v
    finals = d_final, dz_final, du_final
    _scan(
        state_gradients,
        chunks,
        inputs,
        finals,
        d_starts,
        scale,
        HV if channels else H,
        HV,
        CHANNELS=channels,
        **options,
    )
    # One share from each half of the features; the last one from pairs within a chunk.
    gates = (map.halves + 1, *v.shape[:3])
    if channels:  # one share from each tile of channels
        gates = (
            -(-F // min(blocks("channel_gradients", **common)["BC"], power_of_two(F))),
            *v.shape[:3],
        )
    d_beta = v.new_empty(gates if delta else (1, 0), dtype=torch.float32)
    d_g = v.new_empty(gates if options["GATED"] else (1, 0), dtype=torch.float32)
    d_scores = torch.empty_like(scores)
    d_keys = torch.empty_like(scores) if delta else d_scores
    _launch(
        pair_gradients,
        (chunks.total, HV),
        k_features,
        e,
        d_o,
        d_den,
        d_v,
        beta,
        g,
        scores,
        d_scores,
        d_keys,
        d_beta[-1],
        d_g[-1],
        chunks.start,
        chunks.count,
        scale,
        H,
        HV,
        CHANNELS=channels,
        **options,
    )
    inside = (
        map.halves == 1 and map.name != "stored"
    )  # the kernel applies the map's backward itself
    options["MAP"] = map if inside else stored
    inputs = (q, k) if inside else (q_features, k_features)
    d_q, d_k = (q.new_empty(*q.shape[:2], HV, F) for _ in range(2))
    d_erase = None
    if channels:
        d_g, d_erase = torch.empty_like(g), erase if erase is None else torch.empty_like(erase)
        _launch(
            channel_gradients,
            (chunks.total, HV),
            q,
            k,
            e,
            d_o,
            d_v,
            beta,
            g,
            erase,
            s,
            d_s,
            d_scores,
            d_keys,
            d_q,
            d_k,
            d_beta,
            d_g,
            d_erase,
            chunks.start,
            chunks.count,
            scale,
            tokens,
            H,
            HV,
            F=F,
            V=V,
            DELTA=delta,
            ERASE=erase is not None,
            BT=BT,
            PREC=PRECISION,
            **common,
        )
    else:
        _launch(
            input_gradients,
            (chunks.total * map.halves, HV),
            *inputs,
            e,
            d_o,
            d_den,
            d_v,
            beta,
            g,
            s,
            zs,
            d_s,
            d_zs,
            d_scores,
            d_keys,
            d_q,
            d_k,
            d_beta,
            d_g,
            chunks.start,
            chunks.count,
            scale,
            tokens,
            H,
            HV,
            **options,
        )
        d_g = d_g.sum(0)
    if HV > H:
        d_q, d_k = (x.unflatten(2, (H, HV // H)).sum(3) for x in (d_q, d_k))
    if not inside and map.name != "stored":
        d_q, d_k, _, _ = unform(q, k, d_q, d_k, map)
    gates = ((beta, d_beta.sum(0)), (g, d_g), (erase, d_erase), *zip(starts, d_starts, strict=True))
    return d_q, d_k, d_v, *(v.new_empty(0) if x is None else dx.to(x.dtype) for x, dx in gates)


def _stored_halves(map: Map) -> int:
    return map.halves if map.name == "stored" else 1


def _count(positions: Tensor | None) -> int:
    return 1 if positions is None else positions.numel()


class _Chunkwise(torch.autograd.Function):
    forward = staticmethod(_forward)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _gradients(_backward, ctx, *grads)


_TENSORS, _FINALS = (
    11,
    slice(1, 4),
)  # number of input tensors; where the results have the final states


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.map, ctx.read, ctx.scale, _, _ = inputs
    ctx.finals = [x.shape for x in output[_FINALS]]
    ctx.mark_non_differentiable(*output[_FINALS.stop :])
    ctx.set_materialize_grads(False)
    o = output[0] if len(output[-1]) else output[-1]  # only a readout's backward reads it
    ctx.save_for_backward(*tensors, o, *output[_FINALS.stop :])


def _gradients(function, ctx, d_o, *others) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing refuses to unpack twice
    tensors = saved[:_TENSORS]
    v, others = tensors[2], others[: len(ctx.finals)]
    d_o = torch.zeros_like(v) if d_o is None else d_o.contiguous()
    if any(x is not None and x.numel() for x in others):  # all or none
        zeros = (v.new_zeros(shape, dtype=torch.float32) for shape in ctx.finals)
        others = [
            zero if x is None else x.contiguous() for x, zero in zip(others, zeros, strict=True)
        ]
    else:
        others = [None] * len(ctx.finals)
    grads = function(d_o, *others, *saved, ctx.map, ctx.read, ctx.scale)
    grads = (None if x is None else dx for x, dx in zip(tensors, grads, strict=False))
    return *grads, *[None] * 7


# torch.compile sees forward and backward as one operator each, whose schema has maps and readouts as text.

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor? erase, Tensor? initial, "
    "Tensor? z_initial, Tensor? u_initial, Tensor? positions, Tensor? cu_seqlens"
)


def _tensors(count: int) -> str:
    return "(" + ", ".join(["Tensor"] * count) + ")"


_forward_op = torch.library.custom_op(
    "nalanda_kernels::chunkwise",
    partial(_forward, None),
    mutates_args=(),
    tags=TAGS,
    schema=f"({_INPUTS}, str map, str read, float scale, bool final, bool wide) -> {_tensors(11)}",
)
_backward_op = torch.library.custom_op(
    "nalanda_kernels::chunkwise_backward",
    _backward,
    mutates_args=(),
    tags=TAGS,
    schema=f"(Tensor d_o, Tensor? d_final, Tensor? dz_final, Tensor? du_final, {_INPUTS}, Tensor o, "
    "Tensor scores, Tensor s, Tensor inverse, Tensor e, Tensor zs, Tensor us, Tensor den, "
    f"str map, str read, float scale) -> {_tensors(9)}",
)


@_forward_op.register_fake
def _(
    q,
    k,
    v,
    beta,
    g,
    erase,
    initial,
    z_initial,
    u_initial,
    positions,
    cu_seqlens,
    map,
    read,
    scale,
    final,
    wide,
):
    map, read = Map.parse(map), Readout.parse(read)
    (B, T, HV, V), F = v.shape, q.shape[3] // _stored_halves(map) * map.halves
    delta, mean, mala = beta is not None, read.name != "", read.name == "mala"
    table = "chunk_channels" if g is not None and g.ndim == 4 else "chunk"
    BT = blocks(table, v.itemsize, power_of_two(F // map.halves) * map.halves)["BT"]
    if cu_seqlens is None:
        total, sequences = B * -(-T // BT), B
    else:  # the number of chunks depends on the values of the bounds
        total, sequences = torch.library.get_ctx().new_dynamic_size(), cu_seqlens.shape[0] - 1

    def made(*shape, there=True, dtype=torch.float32):
        return v.new_empty(shape if there else (0, *shape[1:]), dtype=dtype)

    last = sequences if final else 0
    scores = made(total, HV, BT, BT, dtype=v.dtype)
    return (
        torch.empty_like(v),
        made(last, HV, F, V),
        made(last, HV, F, there=mean),
        made(last, HV, V, there=mala),
        scores,
        made(total, HV, F, V, dtype=v.dtype),
        torch.empty_like(scores, dtype=torch.float32 if wide else None)
        if delta
        else v.new_empty(0),
        torch.empty_like(v) if delta else v.new_empty(0),
        made(total, HV, F, there=mean),
        made(total, HV, V, there=mala),
        made(B, T, HV) if mean else made(0),
    )


@_backward_op.register_fake
def _(d_o, d_final, dz_final, du_final, *args):
    return tuple(args[0].new_empty(0) if x is None else torch.empty_like(x) for x in args[:9])


_forward_op.register_autograd(
    lambda ctx, *grads: _gradients(_backward_op, ctx, *grads), setup_context=_setup_context
)


def delta_rule(
    q, k, v, beta, g=None, *, erase=None, write=None, **options
) -> tuple[Tensor, Tensor | None]:
    """See `nalanda.model.ops.delta_rule`."""
    if write is not None:
        v = (v * write).to(v.dtype)
    return _chunkwise(q, k, v, beta, g, erase, **options)[:2]


def linear_attention(q, k, v, g=None, **options) -> tuple[Tensor, Tensor | None]:
    """See `nalanda.model.ops.linear_attention`."""
    return _chunkwise(q, k, v, None, g, **options)[:2]


def normalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    feature_map=None,
    positions: Tensor,
    magnitude: str | None = None,
    mirrored: bool = False,
    initial_state: Tensor | None = None,
    initial_sum: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Linear attention whose weights are divided by their sum.

    With S_t = exp(g_t) S_{t−1} + φ(k_t) v_tᵀ, z_t = exp(g_t) z_{t−1} + φ(k_t), r = φ(q)ᵀS, d = φ(q)ᵀz and
    D = d + 1e-6 t, the output is o = r/D (arXiv 2006.16236). With a magnitude c_t it is
    o = r/D + c (r − d · v̄_t), where v̄_t is the mean of v up to t (MALA, arXiv 2507.00698).

    Args:
        q, k, v, g, feature_map, cu_seqlens: as in `nalanda.model.ops.linear_attention`; φ(q)·φ(k) ≥ 0.
        positions: int64 `[1 or B, T]`, each token's place in its sequence, from 0; t is the position + 1.
        magnitude: None, or c_t: "code", K^-½/t with the K before the map; "inverse_t", 1/t; "literal", 1.
        mirrored: v has twice the heads of q. Its odd heads are read by q's features with their halves
            swapped (PolaFormer, arXiv 2501.15061).
        initial_state: `[N, HV, F, V + 1]`, S with z as the last column; zero by default.
        initial_sum: `[N, HV, 1, V]`, Σv; needed where there are a magnitude and an initial_state.
        output_final_state: whether to return the state and Σv after each sequence's last token.

    Returns:
        o `[B, T, HV, V]` in the dtype of q and v (fp32 for fp16, whose range the sums exceed), and the final
        state and Σv in fp32, or None.

    Raises:
        Unsupported: float64, more than 512 features, a decay by key channel or under a magnitude.
    """
    if g is not None and magnitude is not None:
        raise Unsupported("a decay under a magnitude")
    starts = {}
    if initial_state is not None:
        S, z = initial_state[..., :-1].float(), initial_state[..., -1].float()
        starts = {"initial_state": S, "z_initial": z}
        if magnitude is not None:
            assert initial_sum is not None, (
                "initial_sum: missing; a state under a magnitude needs it"
            )
            starts["u_initial"] = initial_sum.squeeze(2).float()
    half = torch.float16 in (q.dtype, v.dtype)
    v = v.to(torch.float32 if half else torch.promote_types(q.dtype, v.dtype))
    root = q.shape[3] ** -0.5 if magnitude == "code" else 1.0
    read = Readout("mala" if magnitude else "mean", magnitude or "", root, mirrored)
    o, state, z, total = _chunkwise(
        q,
        k,
        v,
        None,
        g,
        feature_map=feature_map,
        scale=1.0,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        read=read,
        positions=positions,
        **starts,
    )
    if state is None:
        return o, None, None
    return o, torch.cat([state, z[..., None]], -1), None if magnitude is None else total[:, :, None]


def _chunkwise(
    q,
    k,
    v,
    beta,
    g,
    erase=None,
    *,
    feature_map=None,
    qk_norm=None,
    scale=None,
    initial_state=None,
    z_initial=None,
    u_initial=None,
    output_final_state=False,
    cu_seqlens=None,
    chunk_size=64,
    read=_PLAIN,
    positions=None,
    allow_neg_eigval=False,
):
    """o in v's dtype, and the final S, z and Σv, or None. Without beta it is linear attention.

    z_initial and u_initial: z and Σv before the first token. chunk_size is ignored: the table of block sizes
    has the chunk's length.
    """
    dtype = torch.promote_types(q.dtype, v.dtype)
    if dtype == torch.float16 and beta is None:
        dtype = torch.float32  # a state that only adds exceeds fp16's range
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unsupported(f"{name_of(dtype)} inputs")
    channels = erase is not None or (g is not None and g.ndim == 4)
    if channels and read != _PLAIN:
        raise Unsupported("a decay for each key channel under a readout")
    q, k, map = _prepared(q.to(dtype), k.to(dtype), feature_map, qk_norm, read.mirrored, channels)
    features = q.shape[3] * (1 if map.name == "stored" else map.halves)
    scale = features**-0.5 if scale is None else float(scale)
    if channels:
        g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
        g = g if g.ndim == 4 else g[..., None].expand(*g.shape, features)
        for name, x in (("g", g), ("erase", erase)):
            if x is not None and x.shape[3] != features:
                has = x.shape[3]
                raise ValueError(
                    f"{name}: {has} key channels; q and k have {features} features after their map"
                )
    if initial_state is not None and initial_state.shape[2] != features:
        has = initial_state.shape[2]
        raise ValueError(
            f"initial_state: K = {has}; q and k have {features} features after their map"
        )
    tensors = q, k, v.to(dtype), beta, g, erase, initial_state, z_initial, u_initial, positions
    tensors = (x if x is None else x.contiguous() for x in tensors)
    call = _forward_op if torch.compiler.is_compiling() else _Chunkwise.apply
    options = map.text(), read.text(), scale, output_final_state, allow_neg_eigval
    o, *finals = call(*tensors, cu_seqlens, *options)[:4]
    return o.to(v.dtype), *(finals if output_final_state else [None] * 3)


def _prepared(
    q: Tensor,
    k: Tensor,
    feature_map,
    qk_norm: str | None,
    mirrored: bool = False,
    stored: bool = False,
) -> tuple[Tensor, Tensor, Map]:
    """q and k as the kernels read them: raw if the kernels can form the features, else features ("stored").

    More than 128 features are two halves, because one tile of them would fill a program's registers.
    mirrored: the features must be two halves. stored: the kernels read features.
    """
    try:
        map, parameters = describe(feature_map, qk_norm, q.shape[3])
        one_tile = map.halves == 1 and map != Map()
        if stored or parameters or (one_tile and (mirrored or q.shape[3] > 128)):
            mapped = (
                map_in_torch if torch.compiler.is_compiling() else map_features
            )  # torch.compile fuses it
            (q, k), map = mapped(q, k, feature_map, qk_norm), Map()
    except Unsupported:
        map = Map()
        q, k = map_in_torch(q, k, feature_map, qk_norm)
    K = q.shape[3]
    if map == Map():
        halves = 2 if mirrored or (K > 128 and K % 2 == 0) else 1
        if K % halves or K > 512 or K // halves > 256:
            raise Unsupported(f"{K} features a head")
        return q, k, Map("stored", halves=halves)
    if K > 256:
        raise Unsupported(f"K = {K}: at most 256")
    return q, k, map
