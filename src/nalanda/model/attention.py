"""Attention with a key/value cache: softmax over all tokens or a window, and TransNormer's blocks.

The state is the last R keys and values of each sequence, the latest last (`Sequences.pad`), so the position
of each follows from the sequence's length.
"""

import copy
import functools
import inspect
import re
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from .base import Mixer, StateSpec
from .call import Inputs
from .feature_maps import EPS
from .kernels import by_kernel
from .layers import (
    RMSNorm,
    at_least_fp32,
    direction,
    place_angles,
    rotary_angles,
    rotate,
    slow_down,
)
from .options import fits
from .recurrent import LayerState
from .rule import Rule
from .sequences import Sequences
from .transnormer import SimpleRMSNorm, build_positions


class CachedAttention(Mixer):
    """Attention whose state is the last keys and values of each sequence."""

    rule = Rule(write="rows", norm=None, cut=True, unmasked=True)
    reach: int | None = None
    """Largest number of tokens that a token sees, including itself; None: all before it."""
    blocks = False
    """Whether a token sees only those of its own block of `reach` tokens."""
    scores = "softmax"
    scale: float | None = None
    """Of q·k; None: by the width of q."""

    def mix(
        self, inputs: Inputs, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        q, k, v = inputs.q, inputs.k, inputs.v
        T = q.shape[1]
        if seq.parts is not None and self.reach is None:
            return self.mix_parts(q, k, v, seq, state)
        if seq.parts is not None or (seq.rows is not None and state is not None):
            return self.mix_rows(q, k, v, seq, state)
        if state is None:
            return self.attend_all(q, k, v, seq), {}

        # [N, R + L, H, ·]: kept rows, then new ones, so that all end in the last column.
        # Without a reach the state grows to the longest sequence.
        grows = not self.reach
        laid_k, laid_v = seq.pad(k, state.get("k"), grows), seq.pad(v, state.get("v"), grows)
        width = self.reach or seq.longest(T)
        new = {"k": last(laid_k, width), "v": last(laid_v, width)}
        if "k" not in state:
            return self.attend_all(q, k, v, seq), new
        return seq.unpad(self.attend_past(seq.pad(q), laid_k, laid_v, seq, T), T), new

    @torch.compiler.disable  # the values of cu_seqlens decide how much is kept
    def mix_rows(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        """Attends packed rows that continue carried states or parts of other processes, within `reach`.

        The kept keys that a continuing sequence still sees are put before it, with queries whose outputs are
        dropped. Then all are attended as whole sequences.
        """
        assert self.reach is not None, "carried states of whole rows cannot grow"
        tokens, past_k, past_v = None, *kept_of(state)
        if seq.parts is not None:
            k, past_k = seq.parts.left(k, self.reach, past_k)
            v, past_v = seq.parts.left(v, self.reach, past_v)

        if past_k is not None and past_v is not None:
            assert seq.past is not None
            wanted = tuple(self.wanted(seq.past).tolist())
            seq, source, tokens = seq.with_kept(self.reach, wanted, q.device)
            k, v = (
                torch.cat([x[0], past.flatten(0, 1).to(x.dtype)]).index_select(0, source)[None]
                for x, past in ((k, past_k), (v, past_v))
            )
            # Kept keys get zero queries, so that q and k are sequences of one length.
            q = q.new_zeros(k.shape[1], *q.shape[2:]).index_copy(0, tokens, q[0])[None]
        new = {}
        if state is not None:
            # With the kept keys: a short row's state still has those of earlier calls.
            new = {"k": seq.tails(k, self.reach), "v": seq.tails(v, self.reach)}
        o = self.attend_all(q, k, v, seq)
        return o if tokens is None else o.index_select(1, tokens), new

    @torch.compiler.disable  # lengths depend on the values of cu_seqlens
    def mix_parts(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        """Attends a part of rows without a `reach`, after the keys and values of all parts before it.

        Queries whose document began before their part are attended where `Parts.pieces` says.
        """
        parts, (past_k, past_v) = seq.parts, kept_of(state)
        # Each exchange is tied to q, so all processes go backward through them, and in one order.
        q, keys = parts.whole(q, k, past_k)  # [B, R + T, H, K]
        q, values = parts.whole(q, v, past_v)
        new = {} if state is None else {"k": keys, "v": values}  # the text so far

        shares = parts.shares()
        tokens, rest = shares.tokens.to(q.device), shares.rest.to(q.device)
        queries = q[0].index_select(0, tokens)
        q, queries = parts.exchange(q, queries, shares.sent, shares.received)

        attended = [q.new_zeros(0, q.shape[2], v.shape[3])]  # for `cat` without any
        for piece, x in zip(shares.pieces, queries.split([*map(len, shares.pieces)]), strict=True):
            # The columns of the document, up to the piece's last token.
            end = keys.shape[1] - parts.T + piece.part * parts.size + piece.end
            seen = piece.row, slice(end - piece.past - len(piece), end)
            o = weigh(x[None], keys[seen][None], values[seen][None], causal=True, scale=self.scale)
            attended.append(o[0])

        # Documents that begin here. Without any, q ties the way back.
        o = q
        if len(rest):
            q_own, k_own, v_own = (x.index_select(1, rest) for x in (q, k, v))
            o = self.attend_all(q_own, k_own, v_own, shares.sequences)
        o, outputs = parts.exchange(o, torch.cat(attended), shares.received, shares.sent)
        all_outputs = outputs.new_zeros(1, q.shape[1], *outputs.shape[1:])
        all_outputs = all_outputs.index_copy(1, tokens, outputs[None])
        return all_outputs.index_copy(1, rest, o) if len(rest) else all_outputs, new

    def wanted(self, past: Tensor) -> Tensor:
        """How many of its `past` tokens a sequence's next token sees."""
        assert self.reach is not None
        return past.clamp(max=self.reach - 1)

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences) -> Tensor:
        """Attends whole sequences, a batch `[B, T, …]` or `[1, ΣT, …]`."""
        rule = self.reach, self.blocks, self.scores, seq.bidirectional, self.scale
        if seq.cu_seqlens is None:
            dynamic = torch.compiler.is_exporting() and not isinstance(q.shape[1], int)
            return (_attend_op if dynamic and self.reach is not None else attend)(q, k, v, *rule)
        if torch.compiler.is_compiling():  # the groups depend on the values of cu_seqlens
            return _packed_op(q, k, v, seq.cu_seqlens, *rule)
        return attend_packed(q, k, v, seq, *rule)

    def attend_past(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences, T: int) -> Tensor:
        """Attends from q `[N, L, …]` to k and v `[N, W, …]`, past and new; all are right-aligned."""
        assert seq.past is not None, "a state needs its past"
        L, past = q.shape[1], seq.common_past()
        if L == 1 and past is not None:  # the common decoding step needs no mask
            seen = self.span(past)
            return weigh(q, k[:, -seen:], v[:, -seen:], scores=self.scores, scale=self.scale)
        if self.reach is not None:
            # The first of L queries sees reach − 1 keys before its own; older ones are seen by none.
            k, v = (x[:, -(self.reach - 1 + L) :] for x in (k, v))
        positions = seq.last_positions(T, k.shape[1], q.device)  # [N or 1, W]
        mask = self.visible(positions, positions[:, k.shape[1] - L :])
        return weigh(q, k, v, mask, scores=self.scores, scale=self.scale)

    def span(self, position: int) -> int:
        """The number of tokens that the token at `position` sees, including itself."""
        return position + 1 if self.reach is None else min(position + 1, self.reach)

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Which key positions `[B, W]` are visible from query positions `[B, L]`: bool `[B, L, W]`.

        Positions below 0 are padding. As queries they must see something to keep their softmax finite,
        although nothing reads their outputs.
        """
        keys, queries = keys[:, None], queries[..., None]
        seen = (keys <= queries) & ((keys >= 0) | (queries < 0))
        return seen if self.reach is None else seen & (keys > queries - self.reach)

    def token_fields(self) -> dict[str, Any]:
        return {"scores": self.scores, "reach": self.reach or 0, "blocks": self.blocks}

    def widths(self) -> tuple[int, int]:
        """The entries of a key and of a value as `attend` takes them."""
        return self.K, self.V

    def state_spec(self, T: int) -> StateSpec:
        rows, H = self.reach or T, self.num_v_heads
        of_key, of_value = self.widths()
        return {
            "k": ((rows, H, of_key), None),
            "v": ((rows, H, of_value), None),
            **super().state_spec(T),
        }

    def flops(self, T: int) -> float:
        return 2.0 * self.num_heads * sum(self.widths()) * self.seen(T) + super().flops(T)

    def seen(self, T: int) -> float:
        """How many tokens a token sees in one call of `mix`, the mean over length T: T/2, or up to the window;
        twice as many without a mask."""
        w = T if self.reach is None else min(T, self.reach)
        return (1 + (self.bidirectional and self.rule.unmasked)) * (w - w * w / (2 * T))


class SoftmaxAttention(CachedAttention):
    """Softmax attention (Vaswani et al. 2017) as in Transformer++:

        o_t = Σ_{j≤t} softmax_j(K^-½ q_t·k_j) v_j

    with rotary positions (RoFormer, arXiv 2104.09864) on q and k.

    Options: `num_kv_heads`, a divisor of `num_heads` (default: all), for groups of query heads that share
    keys and values (GQA, arXiv 2305.13245); `window`, the number of tokens that a token sees, including
    itself (default: all before it); `rope_theta`, the base of the rotary angles (10000; null: no rotation);
    `rotary_dim`, the entries of a head that rotate, its first (default: all). `rope_scaling`, Llama 3.1's
    slower angles, spelt as in transformers' configs: `{rope_type: llama3, factor: 8.0, low_freq_factor: 1.0,
    high_freq_factor: 4.0, original_max_position_embeddings: 8192}` (default: none).
    `qk_norm`, an RMSNorm of each head's q and k before the rotation, with one weight for all heads (Henry et
    al. 2020, arXiv 2010.04245; default: none). `q_norm`, "length" for d(q) = q/‖q‖ in place of q: queries of
    any length weigh alike, an ablation of MALA's paper, arXiv 2507.00698 (default: none). `gate`, o ⊙ σ(W x)
    with a factor for each "head" or each "channel" (arXiv 2505.06708; default: none). `conv_size`, the taps of
    short convolutions of q, k and v, with SiLU behind v's (default: 0, none). In hybrids,
    `num_heads` and `head_dim` may differ from those of the other mixers, which the config has.
    Cost per token and head: (K + V)·T FLOPs at length T, half of T × T; with a window w < T,
    2(K + V)·w·(1 − w/2T). State: T (or `window`) keys and values of each of the `num_kv_heads`,
    (K + V)·itemsize bytes per token and head.
    """

    equation = "o = Σ_j softmax_j(K^−½ q·k_j) v_j, q and k rotated"
    source = "arXiv 1706.03762, 2104.09864"
    rule = replace(CachedAttention.rule, gate="sigmoid")

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        num_kv_heads: int | None = None,
        window: int | None = None,
        rope_theta: float | None = 10000.0,
        rotary_dim: int | None = None,
        qk_norm: bool = False,
        q_norm: str | None = None,
        gate: str | None = None,
        conv_size: int = 0,
        num_heads: int | None = None,
        head_dim: int | None = None,
        rope_scaling: dict | None = None,
    ):
        if num_heads is not None or head_dim is not None:
            config = resized(config, num_heads or config.num_heads, head_dim)
        H = config.num_heads
        groups = H if num_kv_heads is None else num_kv_heads
        if groups < 1 or H % groups:
            raise ValueError(f"softmax: num_kv_heads={num_kv_heads} must divide num_heads={H}")
        if window is not None and window < 1:
            raise ValueError(f"softmax: window={window} must be at least 1 token, or left out")
        check_rotation(config, rope_theta, rotary_dim, rope_scaling)
        if q_norm not in (None, "length") or (q_norm and qk_norm):
            raise ValueError(
                f"softmax: q_norm={q_norm!r} must be length and without qk_norm, or left out"
            )
        if gate not in (None, "head", "channel"):
            raise ValueError(f"softmax: gate={gate!r} must be head or channel, or left out")
        if conv_size < 0 or conv_size == 1:
            raise ValueError(
                f"softmax: conv_size={conv_size} must be 0 (no convolution) or at least 2"
            )

        super().__init__(config, layer_idx, k_heads=groups, v_heads=groups, taps=conv_size)
        self.reach, self.rope_theta, self.rotary_dim = window, rope_theta, rotary_dim or self.K
        self.rope_scaling = None if rope_scaling is None else checked_scaling(rope_scaling)
        if qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.K, config.norm_eps) for _ in range(2))
        self.qk_norm, self.unit_queries, self.gate = qk_norm, bool(q_norm), gate
        if gate:
            factors = self.V if gate == "channel" else 1  # a head
            self.g_proj = nn.Linear(config.hidden_size, H * factors, bias=False)

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | ({"gate": self.g_proj} if self.gate else {})

    def inputs(
        self, x: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[Inputs, LayerState]:
        inputs, new = super().inputs(x, seq, state)
        q, k = inputs.q, inputs.k
        if self.qk_norm:
            # Before the rotation, which keeps lengths.
            q = seq.in_columns(self.q_norm, q).to(q.dtype)
            k = seq.in_columns(self.k_norm, k).to(k.dtype)
        if self.unit_queries:
            q = direction(at_least_fp32(q), EPS)[0].to(q.dtype)

        if self.rope_theta is not None:
            angles = place_angles(x, seq, self.rotary_dim, self.rope_theta, self.rope_scaling)
            q, k = rotate(q, angles), rotate(k, angles)
        return inputs._replace(q=q, k=k), new

    def token_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"unit_queries": self.unit_queries}
        if self.qk_norm:
            q, k = self.q_norm, self.k_norm
            fields |= {"q_norm": q.weight, "k_norm": k.weight, "eps": q.eps}
        if self.rope_theta is not None:
            # Those of position 1 are the frequencies.
            fields["frequencies"] = rotary_angles(
                torch.ones(()), self.rotary_dim, self.rope_theta, torch.float32, self.rope_scaling
            )
        return super().token_fields() | fields

    def read_out(self, o: Tensor, inputs: Inputs, x: Tensor) -> Tensor:
        if inputs.gate is None:
            return super().read_out(o, inputs, x)
        factor = inputs.gate.sigmoid().unflatten(-1, (o.shape[2], -1))
        return self.o_proj((o.to(x.dtype) * factor.to(x.dtype)).flatten(-2))


class ForgettingAttention(SoftmaxAttention):
    """Softmax attention with a forget gate (Forgetting Transformer, Lin et al. 2025, arXiv 2503.02130):

        o_t = Σ_{j≤t} softmax_j(K^-½ q_t·k_j + Σ_{j<i≤t} log f_i) v_j, f_t = σ(w_f·x_t + b_f) a head,

    without rotary positions. With d_t = −Σ_{i≤t} log f_i, from the document's first token on, the gates add
    d_j − d_t to a score. So keys have entries more for d_j, and queries for −d_t, and kernels of softmax attention
    compute the rest. bf16 has 8 bits, so d is three entries, each with the bits that those before it lack. A key has
    those of each query head that reads it.

    A row's softmax does not need d_t. With it the sums stay small; and errors of a score in half precision reach the
    gates between the two tokens alone, not all before them. The last kept key has d of the text so far.

    Options: those of `SoftmaxAttention`; `rope_theta` is null by default. Cost: that of softmax attention with keys,
    queries and values 3(n + 1) entries wider, rounded up to a multiple of 8, where n query heads share a key. State:
    as wide.
    """

    equation = "o = Σ_j softmax_j(K^−½ q·k_j + Σ_{i>j} log f_i) v_j"
    source = "arXiv 2503.02130"
    rule = replace(SoftmaxAttention.rule, decay="given", unmasked=False)
    unit = 32.0
    """Of d in the keys: fp16 ends at 65504."""

    def __init__(self, config, layer_idx: int, *, rope_theta: float | None = None, **options):
        super().__init__(config, layer_idx, rope_theta=rope_theta, **options)
        self.f_proj = nn.Linear(config.hidden_size, self.num_heads)
        self.scale = self.K**-0.5
        self.group = self.num_heads // self.num_v_heads
        # Kernels take widths that 8 divides, and those of q, k and v to be equal.
        width = self.K + 3 * (self.group + 1)
        self.width = width + -width % 8

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | {"f": self.f_proj}

    def gates(self, projected: dict[str, Tensor], inputs: Inputs) -> Inputs:
        return inputs._replace(g=F.logsigmoid(at_least_fp32(projected["f"])))  # [B, T, H]

    def mix(
        self, inputs: Inputs, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        assert inputs.g is not None
        q, k, v = inputs.q, inputs.k, inputs.v
        # d in the unit that the scale turns into 1: [B, T, H, 3] in the dtype of k.
        d = seq.sums(-(self.K**0.5) / self.unit * inputs.g, self.kept_sums(state))
        parts = split_in_three(d, k.dtype)

        # A key has d_j of each query head that reads it, then the unit; a query the unit at its own, then −d_i.
        of_keys = parts.unflatten(2, (-1, self.group)).transpose(-1, -2)  # [B, T, HK, 3, group]
        of_keys = F.pad(of_keys, (0, 1), value=self.unit)
        units = self.unit * torch.eye(self.group, dtype=q.dtype, device=q.device)
        units = units.repeat(k.shape[2], 1)[:, None].expand(*parts.shape, -1)
        of_queries = torch.cat([units, -parts[..., None]], -1)  # [B, T, H, 3, group + 1]
        # In front: there the large numbers cancel before the small ones are added.
        q = torch.cat([of_queries.flatten(-2), q], -1)
        k = torch.cat([of_keys.flatten(-2), k], -1)

        wide = (F.pad(x, (0, max(0, self.width - x.shape[-1]))) for x in (q, k, v))
        o, new = super().mix(Inputs(*wide), seq, state)
        return o[..., : v.shape[-1]], new

    def kept_sums(self, state: LayerState | None) -> Tensor | None:
        """d of the last kept key of each text, `[N, H]` in float64; None without any."""
        keys, _ = kept_of(state)
        if keys is None or not keys.shape[1]:
            return None
        of_keys = keys[:, -1, :, : 3 * (self.group + 1)].double()
        # [N, HK, 3, group + 1], without the unit
        return of_keys.unflatten(-1, (3, -1))[..., :-1].sum(-2).flatten(1)

    def widths(self) -> tuple[int, int]:
        return self.width, max(self.V, self.width)


def split_in_three(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x `[…]` as three numbers `[…, 3]` in `dtype`, whose sum it is: the first two have 8 bits, the last the rest.

    The gradient is that of the last one: all three have the same.
    """
    high = x.detach().to(torch.bfloat16).to(x.dtype)
    middle = (x.detach() - high).to(torch.bfloat16).to(x.dtype)
    return torch.stack([high, middle, x - high - middle], -1).to(dtype)


def check_rotation(
    config, rope_theta: float | None, rotary_dim: int | None, rope_scaling: dict | None
) -> None:
    """Raises ValueError for options of rotary positions that cannot work."""
    if rotary_dim is not None and (rotary_dim % 2 or not 0 < rotary_dim <= config.key_dim):
        raise ValueError(
            f"softmax: rotary_dim={rotary_dim} must be even and at most K = {config.key_dim}"
        )
    if rope_theta is None:
        if rope_scaling is not None:
            raise ValueError("softmax: rope_scaling needs a rope_theta; leave one of them out")
        return

    if not rope_theta > 0:
        raise ValueError(
            f"softmax: rope_theta={rope_theta} must be positive, or null for no rotation"
        )
    if config.key_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim·expand_k, not {config.key_dim}")
    if config.image_size and (rotary_dim or config.key_dim) % 4:
        raise ValueError(
            f"softmax: rotary_dim={rotary_dim or config.key_dim} must be a multiple of 4 in images: "
            "rows and columns rotate apart; or set rope_theta null"
        )


def resized(config, num_heads: int, head_dim: int | None):
    """The config with other heads, of the config's sizes or with keys and values of head_dim."""
    config = copy.copy(config)
    config.num_heads = num_heads
    if head_dim is not None:
        config.head_dim, config.expand_k, config.expand_v = head_dim, 1.0, 1.0
    return config


def checked_scaling(rope_scaling: dict) -> dict[str, float]:
    """The numbers of the option `rope_scaling`, for `layers.slow_down`."""
    numbers = {name: value for name, value in rope_scaling.items() if name != "rope_type"}
    parameters = inspect.signature(slow_down).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if rope_scaling.get("rope_type") != "llama3" or numbers.keys() != set(names):
        raise ValueError(
            f"softmax: rope_scaling={rope_scaling!r} must have rope_type: llama3 and the numbers "
            f"{', '.join(names)}"
        )
    for name, value in numbers.items():
        if not (fits(value, float) and value > 0):
            raise ValueError(f"softmax: rope_scaling's {name}={value!r} must be a positive number")
    if not numbers["low_freq_factor"] < numbers["high_freq_factor"]:
        raise ValueError(
            "softmax: rope_scaling's low_freq_factor must be below its high_freq_factor"
        )
    return numbers


def kept_of(state: LayerState | None) -> tuple[Tensor | None, Tensor | None]:
    """The kept keys and values of a state, if it has them."""
    return (None, None) if not state else (state.get("k"), state.get("v"))


class DiagAttention(CachedAttention):
    """TransNormer's early layers (Qin et al. 2022, arXiv 2210.10340): attention inside blocks.

    o_t = Σ_j p_tj v_j over the j ≤ t in t's block of `block_size` tokens. Blocks do not overlap and start at
    a document's first token. p is softmax_j(K^-½ q_t·k_j), masked before the softmax (T2), or
    relu(K^-½ q_t·k_j) followed by an RMSNorm over all heads (T1, ReLA).

    Options: `block_size` (64); `scores`, "softmax" (default) or "relu"; `positions`, "lrpe" (default, see
    `LRPE`, from 0 in every block) or "none"; `norm_eps_placement` of relu's norm, see `SimpleRMSNorm`.
    Cost per token and head: (K + V)·block_size FLOPs, half of each block. State: the last `block_size` keys
    and values of each head, (K + V)·itemsize bytes per token and head, at any length.
    """

    equation = "o = Σ_j softmax_j(K^−½ q·k_j) v_j within a block; or relu, then RMSNorm"
    source = "arXiv 2210.10340"
    blocks = True

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        block_size: int = 64,
        scores: str = "softmax",
        positions: str = "lrpe",
        norm_eps_placement: str = "inside",
    ):
        longest = config.max_position_embeddings
        if not 1 <= block_size <= longest:
            raise ValueError(
                f"diag_attention: block_size={block_size} must be from 1 to max_position_embeddings={longest}"
            )
        if scores not in ("softmax", "relu"):
            raise ValueError(f"diag_attention: scores={scores!r} is not one of softmax, relu")
        if scores == "softmax" and norm_eps_placement != "inside":
            raise ValueError(
                "diag_attention: softmax scores have no norm: set scores=relu, or drop norm_eps_placement"
            )
        if scores == "relu":
            self.rule = replace(self.rule, norm="rms")
        super().__init__(config, layer_idx)
        self.reach = self.block = block_size
        self.scores = scores
        if scores == "relu":
            self.o_norm = SimpleRMSNorm(config.norm_eps, norm_eps_placement)
        self.lrpe = build_positions(positions, self.K)

    def inputs(
        self, x: Tensor, seq: Sequences, state: LayerState | None
    ) -> tuple[Inputs, LayerState]:
        inputs, new = super().inputs(x, seq, state)
        if self.lrpe is None:
            return inputs, new
        # Positions start anew in each block, which sees no other one.
        places = seq.positions(x.shape[1], x.device) % self.block
        q, k = (self.lrpe(y, places).to(y.dtype) for y in (inputs.q, inputs.k))
        return inputs._replace(q=q, k=k), new

    def token_fields(self) -> dict[str, Any]:
        return super().token_fields() | ({} if self.lrpe is None else self.lrpe.token_fields())

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences) -> Tensor:
        if seq.bidirectional:
            return super().attend_all(q, k, v, seq)
        o = by_kernel(
            "block_attention",
            "auto",
            q,  # its device
            *(q, k, v),
            cu_seqlens=seq.cu_seqlens,
            block_size=self.block,
            scores=self.scores,
            scale=self.K**-0.5,
        )
        return super().attend_all(q, k, v, seq) if o is None else o

    def wanted(self, past: Tensor) -> Tensor:
        return past % self.block

    def span(self, position: int) -> int:
        return position % self.block + 1

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        # Padding falls into blocks below 0.
        same = (keys // self.block)[:, None] == (queries // self.block)[..., None]
        return super().visible(keys, queries) & same

    def seen(self, T: int) -> float:
        return (1 + self.bidirectional) * min(T, self.block) / 2


def weigh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scores: str = "softmax",
    scale: float | None = None,
) -> Tensor:
    """Attention of q `[B, L, H, K]` over k and v `[B, W, HK, …]`: `[B, L, H, V]`. scores: softmax or relu.

    causal: the last query sees all keys, and each before it one fewer. scale: of q·k; by default K^-½.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, L or W, ·]
    if mask is not None:
        mask = mask[:, None]  # [B, 1, L, W], for all heads

    if scores == "softmax":
        bias: Any = mask
        if causal and q.shape[2] < k.shape[2] and not q.is_meta:  # there shapes suffice
            # No matrix where a kernel knows the order.
            bias, causal = causal_lower_right(q.shape[2], k.shape[2]), False
        o = F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return o.transpose(1, 2)

    p = F.relu(q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale))  # [B, H, L, W]
    p = p if mask is None else p.masked_fill(~mask, 0)
    return ((p.tril() if causal else p) @ v).transpose(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: int | None,
    blocks: bool,
    scores: str,
    both: bool = False,
    scale: float | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Attends sequences `[B, T, …]` from their first tokens; linear in T with a reach.

    both: in both directions. real: bool `[B, T]`, which tokens are no padding, behind the others.
    """
    T = q.shape[1]
    if both:
        return _attend_both(q, k, v, reach, blocks, scores, scale, real)
    if reach is None or reach >= T:
        return weigh(q, k, v, causal=True, scores=scores, scale=scale)

    # Whole blocks of `reach` tokens, padded behind the last token, which no earlier one sees.
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -T % reach)) for x in (q, k, v))
    if blocks:
        o = weigh(
            *(x.unflatten(1, (-1, reach)).flatten(0, 1) for x in (q, k, v)),
            causal=True,
            scores=scores,
            scale=scale,
        )
        return o.unflatten(0, (len(q), -1)).flatten(1, 2)[:, :T]
    # The first block has none before it.
    start = (x[:, :reach] for x in (q, k, v))
    first = weigh(*start, causal=True, scores=scores, scale=scale)
    # Each further block of queries sees the keys of its own block and the previous one.
    q = q[:, reach:].unflatten(1, (-1, reach))
    # [B·(blocks − 1), 2·reach, H, ·]; windows overlap by a block.
    k, v = (x.unfold(1, 2 * reach, reach).movedim(-1, 2).flatten(0, 1) for x in (k, v))
    keys = torch.arange(2 * reach, device=q.device)
    queries = keys[reach:, None]
    seen = (keys <= queries) & (keys > queries - reach)  # [reach, 2·reach]
    rest = weigh(q.flatten(0, 1), k, v, seen[None], scores=scores, scale=scale)
    return torch.cat([first, rest.unflatten(0, q.shape[:2]).flatten(1, 2)[:, : T - reach]], 1)


def _attend_both(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: int | None,
    blocks: bool,
    scores: str,
    scale: float | None,
    real: Tensor | None,
) -> Tensor:
    """`attend` in both directions: all tokens, those of a block, or those less than `reach` away."""
    B, T = q.shape[:2]
    if reach is None or reach >= T:
        mask = None if real is None else real[:, None]
        return weigh(q, k, v, mask, scores=scores, scale=scale)
    if real is None:
        real = torch.ones(B, T, dtype=torch.bool, device=q.device)
    # Each block of `reach` queries sees the keys of its own block, and of one on each side.
    side, count = 0 if blocks else reach, -(-T // reach)
    after = count * reach - T
    q = F.pad(q, (0, 0, 0, 0, 0, after)).unflatten(1, (count, reach)).flatten(0, 1)
    k, v = (F.pad(x, (0, 0, 0, 0, side, side + after)) for x in (k, v))
    # [B·count, reach + 2·side, H, ·]
    k, v = (x.unfold(1, reach + 2 * side, reach).movedim(-1, 2).flatten(0, 1) for x in (k, v))
    real = F.pad(real, (side, side + after)).unfold(1, reach + 2 * side, reach).flatten(0, 1)
    # [reach, reach + 2·side], of a key from a query of the block in the middle.
    distance = (
        torch.arange(k.shape[1], device=q.device)
        - torch.arange(reach, device=q.device)[:, None]
        - side
    )
    itself = distance == 0  # padding sees itself: no empty row
    seen = (distance.abs() < reach) & real[:, None] | itself
    o = weigh(q, k, v, seen, scores=scores, scale=scale)
    return o.unflatten(0, (B, count)).flatten(1, 2)[:, :T]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, seq: Sequences, *rule) -> Tensor:
    """`attend` for the sequences of a packed row, in groups of similar lengths."""
    groups, where = seq.groups(q.device)
    out = [
        # Padding lies behind the tokens: causal ones never see it, others heed `real`.
        attend(q[0, rows], k[0, rows], v[0, rows], *rule, real=real).flatten(0, 1)
        for rows, real in groups
    ]
    none = q.new_zeros(0, q.shape[2], v.shape[3])  # for `cat` if all sequences are empty
    return torch.cat([none, *out]).index_select(0, where)[None]


# torch.compile sees forward and backward as one operator each. The backward attends once more: an operator
# can return tensors for it, but not autograd's graph.


@functools.lru_cache(maxsize=4)  # all layers ask for the same one, forward and backward
def _sequences(bounds: tuple[int, ...]) -> Sequences:
    return Sequences(torch.tensor(bounds))


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rule) -> Tensor:
    return attend_packed(q, k, v, _sequences(tuple(cu_seqlens.tolist())), *rule)


def _packed_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rule
) -> tuple[Tensor, Tensor, Tensor]:
    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _packed(q, k, v, cu_seqlens, *rule)

    # autograd does not record inside operators; torch.func does
    d_q, d_k, d_v = torch.func.vjp(attended, q, k, v)[1](d_o)
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous()


_NAMESPACE = re.sub(r"\W", "_", __name__)  # copies of this file in checkpoints have another
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, int? reach, bool blocks, str scores, "
    "bool bidirectional, float? scale"
)
_packed_op = torch.library.custom_op(
    f"{_NAMESPACE}::attend_packed", _packed, mutates_args=(), schema=f"({_INPUTS}) -> Tensor"
)
_packed_backward_op = torch.library.custom_op(
    f"{_NAMESPACE}::attend_packed_backward",
    _packed_backward,
    mutates_args=(),
    schema=f"(Tensor d_o, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)


def _attend_op(q: Tensor, k: Tensor, v: Tensor, *rule) -> Tensor:
    """`attend` for a program exported with a dynamic length, in which no branch may depend on it."""
    B, T = q.shape[:2]
    packed = (x.flatten(0, 1)[None] for x in (q, k, v))
    return _packed_op(*packed, torch.arange(B + 1) * T, *rule)[0].unflatten(0, (B, T))


@_packed_op.register_fake
def _(q, k, v, *options):
    return q.new_empty(*q.shape[:3], v.shape[3])


@_packed_backward_op.register_fake
def _(d_o, q, k, v, *options):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rule = inputs[4:]


def _gradients(ctx, d_o: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _packed_backward_op(d_o, *ctx.saved_tensors, *ctx.rule)
    return *gradients, *[None] * (1 + len(ctx.rule))  # cu_seqlens and the rule have none


_packed_op.register_autograd(_gradients, setup_context=_setup_context)


def last(x: Tensor, rows: int) -> Tensor:
    """The last `rows` rows of x `[N, W, …]`, zero-padded on the left."""
    missing = rows - x.shape[1]
    if missing >= 0:
        return F.pad(x, (0, 0) * (x.dim() - 2) + (missing, 0)) if missing else x
    return x[:, -rows:].clone()  # a view would keep x alive
