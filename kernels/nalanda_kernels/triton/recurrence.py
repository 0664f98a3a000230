"""The chunkwise ops: they launch the kernels of `chunk.py` and refuse calls that those cannot serve.

    delta_rule, linear_attention, normalized_attention     the ops, as `nalanda.model.ops` calls them
    _chunkwise        checks a call, forms what kernels cannot, and enters autograd or torch.compile's operator
    _forward          features, then the pass over the states, then the outputs
    _backward         the same steps from the last to the first

Shapes: B rows of T tokens. H heads of q and k with K columns, HV heads of v with V. F = halves · K features.
N sequences. Chunks of BT tokens, counted over all sequences.
"""

import functools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.autograd import once_differentiable
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
    FUSION,
    PRECISION,
    TAGS,
    Chunks,
    blocks,
    chunks_of,
    map_in_torch,
    name_of,
    on_its_device,
    power_of_two,
    processors,
    schedule,
    variants,
)
from nalanda_kernels.triton.feature_maps import (
    Map,
    describe,
    form_features,
    map_features,
    unform_features,
)

# A program of these kernels takes one block of V; a program of the others loops over all of them.
_BY_VALUES = (states, compose, outputs, state_gradients)
_PLAIN = Readout()
FUSED = "states_and_outputs"  # block sizes of `states` where it also computes the outputs


# ------------------------------------------------------------------------------------ a call and its results


class States(NamedTuple):
    """S `[N, HV, F, V]`, z `[N, HV, F]` and u = Σv `[N, HV, V]` in fp32, or their gradients; None if absent."""

    s: Tensor | None = None
    z: Tensor | None = None
    u: Tensor | None = None


class ChunkInputs(NamedTuple):
    """The tensors of a call, contiguous; absent ones are None."""

    q: Tensor  # [B, T, H, K], or features [B, T, H, F] under the map "stored"
    k: Tensor  # as q
    v: Tensor  # [B, T, HV, V]
    beta: Tensor | None  # [B, T, HV]; None for linear attention
    g: Tensor | None  # [B, T, HV], or by key channel [B, T, HV, F]
    erase: Tensor | None = None  # [B, T, HV, F]
    initial: Tensor | None = None  # S before the first token
    z_initial: Tensor | None = None
    u_initial: Tensor | None = None
    positions: Tensor | None = None  # int64 [1 or B, T]
    cu_seqlens: Tensor | None = None  # [N + 1] on the host

    @property
    def starts(self) -> States:
        return States(self.initial, self.z_initial, self.u_initial)


class Request(NamedTuple):
    """The options of a call, as an op's user gives them. chunk_size is ignored: block sizes come from a table."""

    read: Readout  # no default: torch 2.11 cannot trace one that is an object
    feature_map: Any = None
    qk_norm: str | None = None
    scale: float | None = None
    output_final_state: bool = False
    allow_neg_eigval: bool = False
    chunk_size: int = 64


class ChunkOptions(NamedTuple):
    """The options of a call, as the kernels need them. An operator's schema has map and read as text."""

    map: Map
    read: Readout
    scale: float
    final: bool = False  # whether the final states are wanted
    wide: bool = False  # whether (I + L)⁻¹ is kept in fp32
    fused: bool = False  # whether `states` stores the outputs; then there is no backward

    @staticmethod
    def parse(map: str, read: str, *rest) -> "ChunkOptions":
        return ChunkOptions(Map.parse(map), Readout.parse(read), *rest)


class Saved(NamedTuple):
    """The output, and the other tensors of the forward that the backward reads; absent ones have no elements."""

    o: Tensor  # [B, T, HV, V]
    scores: Tensor  # P [chunks, HV, BT, BT]
    s: Tensor  # S before each chunk [chunks, HV, F, V]
    inverse: Tensor  # (I + L)⁻¹ [chunks, HV, BT, BT]
    e: Tensor  # the errors E of the delta rule [B, T, HV, V]
    decays: Tensor  # e^γ, e^{γ_C − γ}, and γ as a sum of two, in fp32 [B, T, HV, 4]
    zs: Tensor  # z before each chunk [chunks, HV, F]
    us: Tensor  # Σv before each chunk [chunks, HV, V]
    den: Tensor  # the readout's denominators [B, T, HV]


class Form(NamedTuple):
    """The sizes of a call, and the choices among its formulas that kernels are compiled for."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    BT: int
    itemsize: int  # bytes of an element of v
    map: Map
    read: Readout
    scale: float
    delta: bool
    gated: bool  # a decay per head
    channels: bool  # gates per key channel

    @property
    def F(self) -> int:
        return self.K * self.map.halves

    @property
    def features(self) -> int:
        """The features of a head by which tables of block sizes are read."""
        return power_of_two(self.K) * self.map.halves

    @property
    def stored(self) -> Map:
        """The map under which kernels read features that are formed already."""
        return Map("stored", halves=self.map.halves)

    @property
    def mean(self) -> bool:
        return self.read.name != ""

    @property
    def mala(self) -> bool:
        return self.read.name == "mala"

    def constants(self) -> dict[str, Any]:
        """Arguments that kernels share, by their names there."""
        return {
            "scale": self.scale,
            "tokens": self.B * self.T,
            "H": self.H,
            "HV": self.HV,
            "K": self.K,
            "V": self.V,
            "F": self.F,
            "MAP": self.stored,
            "READ": self.read,
            "DELTA": self.delta,
            "GATED": self.gated,
            "CHANNELS": self.channels,
            "BT": self.BT,
            "BK": power_of_two(self.K),
            "PREC": PRECISION,
        }


class Pass(NamedTuple):
    """A pass over a call, forward or backward."""

    inputs: ChunkInputs
    saved: Saved
    form: Form
    chunks: Chunks

    @property
    def every_chunk(self) -> tuple[int, int]:
        """The grid of all chunks and heads."""
        return self.chunks.total, self.form.HV

    def named(self) -> dict[str, Any]:
        """Its tensors by the names of kernels' arguments; rows of a batch may share their P positions."""
        positions = self.inputs.positions
        P = 1 if positions is None else positions.numel()
        return self.inputs._asdict() | self.saved._asdict() | self.chunks.tables() | {"P": P}


def _form_of(inputs: ChunkInputs, options: ChunkOptions) -> Form:
    q, v, g = inputs.q, inputs.v, inputs.g
    map = options.map
    # Features that are stored have all F columns; K are those of a half.
    K = q.shape[3] // (map.halves if map.name == "stored" else 1)
    channels = g is not None and g.ndim == 4

    features = power_of_two(K) * map.halves
    BT = blocks("chunk_channels" if channels else "chunk", v.itemsize, features)["BT"]
    return Form(
        B=v.shape[0],
        T=v.shape[1],
        H=q.shape[2],
        HV=v.shape[2],
        K=K,
        V=v.shape[3],
        BT=BT,
        itemsize=v.itemsize,
        map=map,
        read=options.read,
        scale=options.scale,
        delta=inputs.beta is not None,
        gated=g is not None and not channels,
        channels=channels,
    )


def _empty_results(
    v: Tensor, form: Form, options: ChunkOptions, total: int, sequences: int
) -> tuple[States, Saved]:
    """The final states and the tensors to keep, not yet filled. total: chunks of all sequences."""
    HV, F, V = form.HV, form.F, form.V
    # Unwanted finals have no rows, because the operator returns tensors alone.
    last = sequences if options.final else 0

    def sums(count: int) -> tuple[Tensor, Tensor]:
        """z and Σv for the readouts that need them."""
        z = v.new_empty(count if form.mean else 0, HV, F, dtype=torch.float32)
        u = v.new_empty(count if form.mala else 0, HV, V, dtype=torch.float32)
        return z, u

    finals = States(v.new_empty(last, HV, F, V, dtype=torch.float32), *sums(last))
    scores = v.new_empty(total, HV, form.BT, form.BT)
    inverse = e = None
    if form.delta:
        # Where β may exceed 1, rounding it to 16 bits would let the state grow.
        inverse = torch.empty_like(scores, dtype=torch.float32 if options.wide else None)
        e = None if options.fused else torch.empty_like(v)
    zs, us = sums(total)

    saved = Saved(
        o=torch.empty_like(v),
        scores=scores,
        s=v.new_empty(0 if options.fused else total, HV, F, V),
        inverse=v.new_empty(0) if inverse is None else inverse,
        e=v.new_empty(0) if e is None else e,
        decays=v.new_empty((*v.shape[:3], 4) if form.gated else (0,), dtype=torch.float32),
        zs=zs,
        us=us,
        den=v.new_empty(v.shape[:3] if form.mean else (0,), dtype=torch.float32),
    )
    return finals, saved


# -------------------------------------------------------------------------------------------------- launches


def _launch(
    kernel,
    run: Pass,
    grid: tuple[int, ...] | None = None,
    *,
    sizes: dict[str, int] | None = None,
    M: int = 0,
    **values,
) -> None:
    """Launches a kernel with `values`, and with those constants and tensors of the pass that its arguments name.

    grid: the chunks or sequences, and perhaps heads, by default all chunks; kernels by tiles get a program for each
    tile of these. sizes: block sizes, warps and stages; by default those of `blocks`. M: columns beside those of V.
    """
    form, grid = run.form, grid or run.every_chunk
    sizes = sizes or blocks(kernel.__name__, form.itemsize, form.features)
    tiles, constants = _constants_of(kernel, form, M, tuple(sizes.items()))

    taken = _arguments_of(kernel)
    tensors = {name: x for name, x in run.named().items() if name in taken}
    if grid[0]:
        kernel[(grid[0] * tiles, *grid[1:])](**constants | tensors | values, **FUSION)


_arguments_of = functools.cache(lambda kernel: frozenset(kernel.arg_names))


@functools.lru_cache(maxsize=1024)
def _constants_of(
    kernel, form: Form, M: int, sizes: tuple[tuple[str, int], ...]
) -> tuple[int, dict[str, Any]]:
    """The tiles of a launch; its constants and sizes by the names of the kernel's arguments."""
    fitted = dict(sizes)
    if "BV" in fitted:
        # No block wider than the head.
        fitted["BV"] = min(fitted["BV"], power_of_two(form.V))
    if "BC" in fitted:
        fitted["BC"] = min(fitted["BC"], power_of_two(form.F))

    # Tiles share the grid's first axis, the only one that may exceed 65,535.
    tiles = 1
    if kernel in _BY_VALUES:
        tiles = -(-(form.V + M) // fitted["BV"])
    elif kernel is channel_gradients:
        tiles = -(-form.F // fitted["BC"])

    shared = form.constants() | {"PIPELINED": fitted.get("num_stages", 1) > 1}
    return tiles, {name: x for name, x in shared.items() if name in kernel.arg_names} | fitted


def _scan(kernel, run: Pass, tensors: dict[str, Any], start: States, end: States) -> None:
    """Launches `states` or `state_gradients` over all sequences, or over segments if `schedule` says so.

    tensors: the kernel's arguments besides states and tables.
    start, end: the states from which the pass starts, and those that it stores.
    """
    form, chunks = run.form, run.chunks
    name = FUSED if tensors.get("FUSED") else kernel.__name__
    sizes, length = _choose_segments(name, form, chunks)

    def launch(over: Chunks, start: States, end: States, decay=None, AFFINE=False, M=0) -> None:
        _launch(
            kernel,
            run._replace(chunks=over),
            (over.sequences * form.HV,),
            sizes=sizes,
            **tensors,
            # the states
            s_start=start.s,
            z_start=start.z,
            u_start=start.u,
            s_end=end.s,
            z_end=end.z,
            u_end=end.u,
            START=start.s is not None,
            END=end.s is not None,
            # the map of a segment
            decay=decay,
            AFFINE=AFFINE,
            M=M,
        )

    if not length:
        launch(chunks, start, end)
        return

    # First, what each segment does to any S before it: S' = M S + U.
    segments = chunks.segments(length)
    new = partial(torch.empty, dtype=torch.float32, device=chunks.start.device)
    # M is F × F under the delta rule, else a number.
    count, M = segments.sequences, form.F if form.delta else 0
    affine = new(count, form.HV, form.F, form.V + M)  # [U, M]
    decay = None if form.delta else new(count, form.HV)  # M of linear attention
    launch(segments, States(), States(affine), decay, AFFINE=True, M=M)

    # Then S before each segment, and S after all.
    starts = new(count, form.HV, form.F, form.V)
    _launch(
        compose,
        run._replace(chunks=segments),
        (chunks.sequences * form.HV,),
        sizes=blocks("compose", 4, form.features),
        affine=affine,
        decay=decay,
        starts=starts,
        s_start=start.s,
        s_end=end.s,
        parts=segments.parts,
        START=start.s is not None,
        END=end.s is not None,
        REVERSE=kernel is state_gradients,
    )

    # Last, all segments at once, each from its own S.
    launch(segments, States(starts), States())


def _choose_segments(kernel: str, form: Form, chunks: Chunks) -> tuple[dict[str, int], int]:
    """Block sizes of a sequential pass by its name in the table, and the chunks of a segment, or 0 for no segments."""
    M = form.F if form.delta else 0
    # Steps for a segment: a product with M [F, F], or a scaling.
    composing = form.F / 64 if form.delta else 0.25
    if form.mean or (form.channels and not form.delta):
        composing = None  # `compose` has neither z and Σv nor a decay per channel

    rows = variants(kernel, form.itemsize, form.features)
    widths = tuple(min(row["BV"], power_of_two(form.V)) for row in rows)
    programs, total = chunks.sequences * form.HV, chunks.total * form.HV
    work = programs, chunks.longest, total, form.V, M
    choice, length = schedule(widths, *work, composing, processors())

    sizes = rows[choice]
    # A row that names its segments overrides the schedule.
    length = sizes.pop("segments", length)
    if composing is None or length >= chunks.longest:
        length = 0
    return sizes, length


# --------------------------------------------------------------------------------------------------- forward


class Features(NamedTuple):
    """q and k as a step reads them, and their heads. With gates per channel they have their decays."""

    q: Tensor
    k: Tensor  # the keys that write to S
    heads: int
    reads: Tensor | None = None  # the keys that read S, where they differ
    channel_decays: Tensor | None = None  # e^{γ_C} [chunks, HV, F]


def _forward(inputs: ChunkInputs, options: ChunkOptions) -> tuple[States, Saved]:
    """The final states, without elements unless they are wanted, and what is kept, o among it."""
    v, form = inputs.v, _form_of(inputs, options)
    chunks = chunks_of((form.B, form.T), inputs.cu_seqlens, form.BT, v.device)
    finals, saved = _empty_results(v, form, options, chunks.total, chunks.sequences)
    run = Pass(inputs, saved, form, chunks)

    # Within each chunk: P, (I + L)⁻¹, and the features that the next step reads.
    # [chunks, HV, F]
    z_sums = torch.empty_like(saved.zs)
    if form.channels:
        features = _decay_channels(run, pairs=True)
    else:
        features = _prepare_chunks(run, z_sums, options.fused)

    # From chunk to chunk: S, z and Σv before each, and the errors E; or o at once.
    tensors = {
        "q": features.q,
        "k": features.k,
        "reads": features.reads,
        "channel_decays": features.channel_decays,
        "H": features.heads,
        "z_sums": z_sums,
        "FUSED": options.fused,
    }
    _scan(states, run, tensors, inputs.starts, finals if options.final else States())
    if options.fused:
        return finals, saved

    # Within each chunk again: o.
    # Linear attention writes v itself.
    e = saved.e if form.delta else v
    _launch(outputs, run, q=features.q, MAP=form.map, H=features.heads, e=e)
    return finals, saved


def _prepare_chunks(run: Pass, z_sums: Tensor, fused: bool) -> Features:
    """q, or its features if `fused`, and the features of k; fills P, (I + L)⁻¹ and the chunks' sums for z."""
    form, q_features, k_features = run.form, run.inputs.q, run.inputs.k
    if form.map.name != "stored":
        k_features = k_features.new_empty(*k_features.shape[:3], form.F)  # [B, T, H, F]
        if fused:
            q_features = torch.empty_like(k_features)
    _launch(
        prepare,
        run,
        MAP=form.map,
        FUSED=fused,
        # what it stores beside the tensors of `run`
        q_features=q_features,
        k_features=k_features,
        z_sums=z_sums,
    )
    return Features(q_features, k_features, form.H)


def _decay_channels(run: Pass, pairs: bool) -> Features:
    """q and k with their decays, `[B, T, HV, F]`. pairs: whether to fill P and (I + L)⁻¹ too."""
    inputs, _, form, chunks = run
    q, shape = inputs.q, (*inputs.v.shape[:3], form.F)
    q_in, k_out = q.new_empty(shape), q.new_empty(shape)
    # Without the delta rule no key reads S.
    reads = torch.empty_like(k_out) if form.delta else k_out
    channel_decays = q.new_empty(chunks.total, form.HV, form.F, dtype=torch.float32)
    unfilled = {} if pairs else {"inverse": None, "scores": None}
    _launch(
        prepare_channels,
        run,
        ERASE=inputs.erase is not None,
        PAIRS=pairs,
        **unfilled,
        # what it stores
        q_in=q_in,
        k_out=k_out,
        reads=reads,
        channel_decays=channel_decays,
    )
    return Features(q_in, k_out, form.HV, reads, channel_decays)


# -------------------------------------------------------------------------------------------------- backward


class ReadoutGradients(NamedTuple):
    """Gradients through the readout. Without one, that of r is that of o, and there are no others."""

    d_r: Tensor  # of r = φ(q)ᵀS [B, T, HV, V]
    d_den: Tensor | None = None  # of the denominators [B, T, HV]
    shares: Tensor | None = None  # MALA's a, the factor of Σv [B, T, HV]
    dz_sums: Tensor | None = None  # a chunk's sum for the gradient of z [chunks, HV, F]
    du_sums: Tensor | None = None  # and of Σv [chunks, HV, V]


class StateGradients(NamedTuple):
    """Gradients of S and z after each chunk, of v, and of the first states."""

    s: Tensor  # [chunks, HV, F, V]
    z: Tensor  # [chunks, HV, F]
    v: Tensor  # [B, T, HV, V]
    starts: States


class PairGradients(NamedTuple):
    """Gradients of QK⊤ and KK⊤ `[chunks, HV, BT, BT]`, and shares of those of β and g `[shares, B, T, HV]`.

    The last share is that of pairs within a chunk; each half of the features has another one. With gates per
    channel each tile of channels has a share.
    """

    scores: Tensor
    keys: Tensor
    beta: Tensor
    g: Tensor


def _backward(
    d_o: Tensor, d_finals: States, inputs: ChunkInputs, saved: Saved, options: ChunkOptions
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, β, g, erase, the first S, z and Σv; those of absent inputs have no elements."""
    # The saved squares have the forward's BT; the table may have changed since.
    form = _form_of(inputs, options)._replace(BT=saved.scores.shape[-1])
    chunks = chunks_of((form.B, form.T), inputs.cu_seqlens, form.BT, d_o.device)
    if not form.delta:
        saved = saved._replace(e=inputs.v)  # nothing is erased: what is written is v
    run = Pass(inputs, saved, form, chunks)

    # The features again, which the forward did not keep.
    q, k = inputs.q, inputs.k
    if form.map.name != "stored":
        q, k = form_features(q, k, form.map)
    features = scanned = Features(q, k, form.H)
    if form.channels:
        # The pass over states reads decayed copies; pairs and inputs need the features as they are.
        scanned = _decay_channels(run, pairs=False)

    # The steps of the forward from the last to the first.
    readout = ReadoutGradients(d_o)
    if form.mean:
        readout = _readout_gradients(run, features, d_o)
    d_states = _state_gradients(run, scanned, readout, d_finals)
    d_pairs = _pair_gradients(run, features, readout, d_states)
    if form.channels:
        d_q, d_k, d_g, d_erase = _channel_gradients(run, readout, d_states, d_pairs)
    else:
        d_q, d_k = _input_gradients(run, features, readout, d_states, d_pairs)
        # The sum over shares is ordered, so results do not depend on timing.
        d_g, d_erase = d_pairs.g.sum(0), None

    def of(x: Tensor | None, d_x: Tensor | None) -> Tensor:
        return d_o.new_empty(0) if x is None or d_x is None else d_x.to(x.dtype)

    d_beta = d_pairs.beta.sum(0)
    d_gates = of(inputs.beta, d_beta), of(inputs.g, d_g), of(inputs.erase, d_erase)
    return d_q, d_k, d_states.v, *d_gates, *map(of, inputs.starts, d_states.starts)


def _readout_gradients(run: Pass, features: Features, d_o: Tensor) -> ReadoutGradients:
    saved = run.saved
    # dr [B, T, HV, V]; d_den and shares [B, T, HV]; sums by chunk.
    gradients = ReadoutGradients(
        d_r=torch.empty_like(d_o),
        d_den=torch.empty_like(saved.den),
        shares=torch.empty_like(saved.den),
        dz_sums=torch.empty_like(saved.zs),
        du_sums=torch.empty_like(saved.us),
    )
    _launch(readout_gradients, run, q=features.q, d_o=d_o, **gradients._asdict())
    return gradients


def _state_gradients(
    run: Pass, features: Features, readout: ReadoutGradients, d_finals: States
) -> StateGradients:
    """The sequential pass backwards, from the gradients of the final states."""
    inputs, saved, _, _ = run

    def gradient_of(start: Tensor | None) -> Tensor | None:
        return None if start is None else torch.empty_like(start, dtype=torch.float32)

    # dS [chunks, HV, F, V] in v's dtype, dz in fp32, dv [B, T, HV, V].
    gradients = StateGradients(
        s=torch.empty_like(saved.s),
        z=torch.empty_like(saved.zs),
        v=torch.empty_like(inputs.v),
        starts=States(*map(gradient_of, inputs.starts)),
    )
    tensors = {
        "q": features.q,
        "k": features.k,
        "reads": features.reads,
        "channel_decays": features.channel_decays,
        "H": features.heads,
        "d_o": readout.d_r,
        "shares": readout.shares,
        "dz_sums": readout.dz_sums,
        "du_sums": readout.du_sums,
        # what it stores
        "d_s": gradients.s,
        "d_zs": gradients.z,
        "d_v": gradients.v,
    }
    _scan(state_gradients, run, tensors, d_finals, gradients.starts)
    return gradients


def _pair_gradients(
    run: Pass, features: Features, readout: ReadoutGradients, d_states: StateGradients
) -> PairGradients:
    """Gradients of the products within a chunk, and the last of the shares for β and g."""
    inputs, saved, form, _ = run
    # A share for each half, and the last for pairs within a chunk.
    shares = form.map.halves + 1
    if form.channels:
        BC = blocks("channel_gradients", form.itemsize, form.features)["BC"]
        shares = -(-form.F // min(BC, power_of_two(form.F)))

    def gate_shares(present: bool) -> Tensor:
        shape = (shares, form.B, form.T, form.HV) if present else (1, 0)
        return inputs.v.new_empty(shape, dtype=torch.float32)

    d_scores = torch.empty_like(saved.scores)
    gradients = PairGradients(
        scores=d_scores,
        # Linear attention has no KK⊤; d_scores stands in, unused.
        keys=torch.empty_like(d_scores) if form.delta else d_scores,
        beta=gate_shares(form.delta),
        g=gate_shares(form.gated),
    )
    _launch(
        pair_gradients,
        run,
        k=features.k,
        d_o=readout.d_r,
        d_den=readout.d_den,
        d_v=d_states.v,
        # what it stores
        d_scores=gradients.scores,
        d_keys=gradients.keys,
        d_beta=gradients.beta[-1],
        d_g=gradients.g[-1],
    )
    return gradients


def _input_gradients(
    run: Pass,
    features: Features,
    readout: ReadoutGradients,
    d_states: StateGradients,
    d_pairs: PairGradients,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k; adds the other shares for β and g to `d_pairs`."""
    inputs, _, form, chunks = run
    # With one tile of features the kernel applies the map's backward itself.
    inside = form.map.halves == 1 and form.map.name != "stored"
    # By head of v; `_sum_groups` adds those of a group.
    d_q, d_k = (inputs.q.new_empty(form.B, form.T, form.HV, form.F) for _ in range(2))
    _launch(
        input_gradients,
        run,
        (chunks.total * form.map.halves, form.HV),
        q=inputs.q if inside else features.q,
        k=inputs.k if inside else features.k,
        MAP=form.map if inside else form.stored,
        d_o=readout.d_r,
        d_den=readout.d_den,
        d_v=d_states.v,
        d_s=d_states.s,
        d_zs=d_states.z,
        d_scores=d_pairs.scores,
        d_keys=d_pairs.keys,
        # what it stores
        d_q=d_q,
        d_k=d_k,
        d_beta=d_pairs.beta,
        d_g=d_pairs.g,
    )
    # [B, T, H, F]; two halves go back through the map together, because its norm joins them.
    d_q, d_k = _sum_groups(d_q, form), _sum_groups(d_k, form)
    if not inside and form.map.name != "stored":
        d_q, d_k, _, _ = unform_features(inputs.q, inputs.k, d_q, d_k, form.map)
    return d_q, d_k


def _channel_gradients(
    run: Pass, readout: ReadoutGradients, d_states: StateGradients, d_pairs: PairGradients
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, g and erase, where gates are per channel; adds the shares for β to `d_pairs`."""
    inputs, _, form, _ = run
    # By head of v; `_sum_groups` adds those of a group.
    d_q, d_k = (inputs.q.new_empty(form.B, form.T, form.HV, form.F) for _ in range(2))
    d_g = torch.empty_like(inputs.g)  # [B, T, HV, F]
    d_erase = None if inputs.erase is None else torch.empty_like(inputs.erase)
    _launch(
        channel_gradients,
        run,
        d_o=readout.d_r,
        d_v=d_states.v,
        ERASE=inputs.erase is not None,
        d_s=d_states.s,
        d_scores=d_pairs.scores,
        d_keys=d_pairs.keys,
        # what it stores
        d_q=d_q,
        d_k=d_k,
        d_beta=d_pairs.beta,
        d_g=d_g,
        d_erase=d_erase,
    )
    return _sum_groups(d_q, form), _sum_groups(d_k, form), d_g, d_erase


def _sum_groups(d_x: Tensor, form: Form) -> Tensor:
    """`[B, T, HV, F]` to `[B, T, H, F]`: heads of v that share a head of q and k."""
    if form.HV == form.H:
        return d_x
    # [B, T, H, HV / H, F], summed over the group.
    return d_x.unflatten(2, (form.H, form.HV // form.H)).sum(3)


# -------------------------------------------------------------- autograd, and the operators of torch.compile
#
# torch.compile sees forward and backward as one operator each, whose schema has maps and readouts as text.
# Both edges are flat: the tensors of `ChunkInputs`, then the options.

_INPUTS = len(ChunkInputs._fields)
_SAVED = len(Saved._fields)
_FINALS = slice(1, 4)  # of the results o, S, z, Σv, and the rest of `Saved`


def _unflatten(flat: tuple) -> tuple[ChunkInputs, ChunkOptions]:
    return ChunkInputs(*flat[:_INPUTS]), ChunkOptions.parse(*flat[_INPUTS:])


def _flatten(finals: States, saved: Saved) -> tuple[Tensor, ...]:
    """o, the final S, z and Σv, and the rest of `Saved`; absent ones have no elements."""
    return saved.o, *finals, *saved[1:]


def _flat_backward(d_o: Tensor, d_s, d_z, d_u, *flat) -> tuple[Tensor, ...]:
    """Gradients of the nine inputs that have one."""
    inputs, saved = ChunkInputs(*flat[:_INPUTS]), Saved(*flat[_INPUTS : _INPUTS + _SAVED])
    options = ChunkOptions.parse(*flat[_INPUTS + _SAVED :])
    return _backward(d_o, States(d_s, d_z, d_u), inputs, saved, options)


class _Chunkwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *flat):
        results = _flatten(*_forward(*_unflatten(flat)))
        _setup_context(ctx, flat, results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _gradients(_flat_backward, ctx, *grads)


def _setup_context(ctx, inputs, output) -> None:
    # The last three options matter to the forward alone.
    *tensors, ctx.map, ctx.read, ctx.scale, _, _, _ = inputs
    ctx.finals = [x.shape for x in output[_FINALS]]
    ctx.mark_non_differentiable(*output[_FINALS.stop :])
    # Absent gradients stay None, so that `_gradients` can leave out the finals.
    ctx.set_materialize_grads(False)
    den = output[-1]
    o = output[0] if len(den) else den  # only a readout's backward reads it
    ctx.save_for_backward(*tensors, o, *output[_FINALS.stop :])


def _gradients(backward, ctx, d_o, *others) -> tuple[Tensor | None, ...]:
    """Gradients of the flat inputs, by `_flat_backward` or its operator."""
    tensors = ctx.saved_tensors  # once: activation checkpointing refuses to unpack twice
    inputs = ChunkInputs(*tensors[:_INPUTS])
    d_o = torch.zeros_like(inputs.v) if d_o is None else d_o.contiguous()

    d_finals = [None] * len(ctx.finals)
    # Gradients of the finals; those of the rest of `Saved` do not exist.
    others = others[: len(ctx.finals)]
    if any(x is not None and x.numel() for x in others):  # all or none
        zeros = [inputs.v.new_zeros(shape, dtype=torch.float32) for shape in ctx.finals]
        d_finals = [
            zero if x is None else x.contiguous() for x, zero in zip(others, zeros, strict=True)
        ]

    grads = backward(d_o, *d_finals, *tensors, ctx.map, ctx.read, ctx.scale)
    # grads has nine entries: positions and cu_seqlens, the last two inputs, have none.
    grads = [None if x is None else d_x for x, d_x in zip(inputs, grads, strict=False)]
    without = [None] * (_INPUTS - len(grads) + len(ChunkOptions._fields))
    return *grads, *without


_INPUT_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor? erase, Tensor? initial, "
    "Tensor? z_initial, Tensor? u_initial, Tensor? positions, Tensor? cu_seqlens"
)


def _tensor_schema(count: int) -> str:
    return "(" + ", ".join(["Tensor"] * count) + ")"


_forward_op = torch.library.custom_op(
    "nalanda_kernels::chunkwise",
    on_its_device(lambda *flat: _flatten(*_forward(*_unflatten(flat)))),
    mutates_args=(),
    tags=TAGS,
    schema=f"({_INPUT_SCHEMA}, str map, str read, float scale, bool final, bool wide, "
    f"bool fused) -> {_tensor_schema(12)}",
)
_backward_op = torch.library.custom_op(
    "nalanda_kernels::chunkwise_backward",
    _flat_backward,
    mutates_args=(),
    tags=TAGS,
    schema="(Tensor d_o, Tensor? d_final, Tensor? dz_final, Tensor? du_final, "
    f"{_INPUT_SCHEMA}, Tensor o, Tensor scores, Tensor s, Tensor inverse, Tensor e, Tensor decays, "
    f"Tensor zs, Tensor us, Tensor den, str map, str read, float scale) -> {_tensor_schema(9)}",
)


@_forward_op.register_fake
def _(*flat):
    inputs, options = _unflatten(flat)
    form = _form_of(inputs, options)
    if inputs.cu_seqlens is None:
        total, sequences = form.B * -(-form.T // form.BT), form.B
    else:  # the number of chunks depends on the values of the bounds
        total = torch.library.get_ctx().new_dynamic_size()
        sequences = inputs.cu_seqlens.shape[0] - 1
    return _flatten(*_empty_results(inputs.v, form, options, total, sequences))


@_backward_op.register_fake
def _(d_o, d_s, d_z, d_u, *flat):
    def like(x: Tensor | None) -> Tensor:
        return d_o.new_empty(0) if x is None else torch.empty_like(x)

    return tuple(map(like, flat[:9]))


_forward_op.register_autograd(
    lambda ctx, *grads: _gradients(_backward_op, ctx, *grads), setup_context=_setup_context
)


# --------------------------------------------------------------------------------------------------- the ops


def delta_rule(
    q, k, v, beta, g=None, *, erase=None, write=None, initial_state=None, cu_seqlens=None, **options
) -> tuple[Tensor, Tensor | None]:
    """See `nalanda.model.ops.delta_rule`."""
    if write is not None:
        v = (v * write).to(v.dtype)
    inputs = ChunkInputs(q, k, v, beta, g, erase, initial_state, cu_seqlens=cu_seqlens)
    o, final = _chunkwise(inputs, Request(_PLAIN, **options))
    return o, final.s


def linear_attention(
    q, k, v, g=None, *, initial_state=None, cu_seqlens=None, **options
) -> tuple[Tensor, Tensor | None]:
    """See `nalanda.model.ops.linear_attention`."""
    inputs = ChunkInputs(q, k, v, None, g, None, initial_state, cu_seqlens=cu_seqlens)
    o, final = _chunkwise(inputs, Request(_PLAIN, **options))
    return o, final.s


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
    weighted = magnitude is not None
    if g is not None and weighted:
        raise Unsupported("a decay under a magnitude")
    starts = _split_state(initial_state, initial_sum, weighted)
    half = torch.float16 in (q.dtype, v.dtype)
    v = v.to(torch.float32 if half else torch.promote_types(q.dtype, v.dtype))
    # The K before the map: q is still raw here.
    root = q.shape[3] ** -0.5 if magnitude == "code" else 1.0
    read = Readout("mala" if magnitude else "mean", magnitude or "", root, mirrored)
    inputs = ChunkInputs(q, k, v, None, g, None, *starts, positions, cu_seqlens)
    request = Request(read, feature_map, scale=1.0, output_final_state=output_final_state)
    o, final = _chunkwise(inputs, request)

    if final.s is None or final.z is None:
        return o, None, None
    # [N, HV, F, V + 1]
    state = torch.cat([final.s, final.z[..., None]], -1)
    if not weighted or final.u is None:
        return o, state, None
    return o, state, final.u[:, :, None]


def _split_state(state: Tensor | None, total: Tensor | None, weighted: bool) -> States:
    """S, z and Σv in fp32 from a state `[N, HV, F, V + 1]` and the sum of v `[N, HV, 1, V]`."""
    if state is None:
        return States()
    # [N, HV, F, V] and [N, HV, F].
    S, z = state[..., :-1].float(), state[..., -1].float()
    if not weighted:
        return States(S, z)
    assert total is not None, "initial_sum: missing; a state under a magnitude needs it"
    return States(S, z, total.squeeze(2).float())


def _chunkwise(inputs: ChunkInputs, request: Request) -> tuple[Tensor, States]:
    """o in v's dtype, and the final states or None. Without β it is linear attention."""
    v, g, erase, read = inputs.v, inputs.g, inputs.erase, request.read
    dtype = _computed_dtype(inputs)
    channels = erase is not None or (g is not None and g.ndim == 4)
    if channels and read != _PLAIN:
        raise Unsupported("a decay for each key channel under a readout")

    q, k, map = _choose_map(inputs.q.to(dtype), inputs.k.to(dtype), request, stored=channels)
    # Features of a head; a map that kernels apply doubles K or keeps it.
    F = q.shape[3] * (1 if map.name == "stored" else map.halves)
    scale = F**-0.5 if request.scale is None else float(request.scale)
    if channels:
        # Gates by channel [B, T, HV, F]: without g no decay, with g by head the same for all channels.
        g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
        g = g if g.ndim == 4 else g[..., None].expand(*g.shape, F)
    _check_features(F, channels, g, erase, inputs.initial)

    *tensors, cu_seqlens = inputs._replace(q=q, k=k, v=v.to(dtype), g=g)
    # Kernels compute addresses from shapes alone.
    tensors = [x if x is None else x.contiguous() for x in tensors]
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    # More than one block of V would read q and k again for each.
    fused = not needs_grad and read == _PLAIN and v.shape[3] <= 128
    options = (
        map.text(),
        read.text(),
        scale,
        request.output_final_state,
        request.allow_neg_eigval,
        fused,
    )
    # Eager calls avoid the operator's overhead.
    call = _forward_op if torch.compiler.is_compiling() else _Chunkwise.apply
    o, *finals = call(*tensors, cu_seqlens, *options)[: _FINALS.stop]
    return o.to(v.dtype), States(*finals) if request.output_final_state else States()


def _computed_dtype(inputs: ChunkInputs) -> torch.dtype:
    dtype = torch.promote_types(inputs.q.dtype, inputs.v.dtype)
    if dtype == torch.float16 and inputs.beta is None:
        dtype = torch.float32  # a state that only adds exceeds fp16's range
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unsupported(f"{name_of(dtype)} inputs")
    return dtype


def _check_features(
    F: int, channels: bool, g: Tensor | None, erase: Tensor | None, initial_state: Tensor | None
) -> None:
    """Raises ValueError for gates per channel or a state that do not fit the F features."""
    for name, x in (("g", g), ("erase", erase)) if channels else ():
        if x is not None and x.shape[3] != F:
            raise ValueError(
                f"{name}: {x.shape[3]} key channels; q and k have {F} features after their map"
            )
    if initial_state is not None and initial_state.shape[2] != F:
        K = initial_state.shape[2]
        raise ValueError(f"initial_state: K = {K}; q and k have {F} features after their map")


def _choose_map(q: Tensor, k: Tensor, request: Request, stored: bool) -> tuple[Tensor, Tensor, Map]:
    """q and k as the kernels read them: raw if the kernels can form the features, else features ("stored").

    More than 128 features are two halves, because one tile of them would fill a program's registers. Under a
    mirrored readout they must be two stored halves, which the kernels exchange. stored: the kernels read
    features.
    """
    mirrored, K = request.read.mirrored, q.shape[3]
    try:
        map, parameters = describe(request.feature_map, request.qk_norm, K)
        # `Map()` is q and k as they are, which need no formed features.
        apart = map != Map() and (mirrored or (map.halves == 1 and K > 128))
        # A separate launch forms what the chunk kernels cannot: parameters, channels, one wide tile, and
        # halves that a mirrored head exchanges.
        if stored or parameters or apart:
            # torch.compile fuses the map's own code.
            mapped = map_in_torch if torch.compiler.is_compiling() else map_features
            q, k = mapped(q, k, request.feature_map, request.qk_norm)
            map = Map()
    except Unsupported:
        map = Map()
        q, k = map_in_torch(q, k, request.feature_map, request.qk_norm)

    if map != Map():
        if K > 256:
            raise Unsupported(f"K = {K}: at most 256")
        return q, k, map

    F = q.shape[3]
    # q and k hold features now; only their width decides about halves.
    halves = 2 if mirrored or (F > 128 and F % 2 == 0) else 1
    if F % halves or F > 512 or F // halves > 256:
        raise Unsupported(f"{F} features a head")
    return q, k, Map("stored", halves=halves)
