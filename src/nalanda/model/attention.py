"""Attention with a key/value cache: softmax over all tokens or a window, and TransNormer's blocks.

The state is the last R keys and values of each sequence, the latest last (`Sequences.pad`), so the position
of each follows from the sequence's length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Heads, Mixer, State, StateSpec
from .layers import rotary_angles, rotate
from .ops import by_kernel
from .sequences import Sequences
from .transnormer import SimpleRMSNorm, build_positions


class SoftmaxAttention(Mixer):
    """Softmax attention (Vaswani et al. 2017) as in Transformer++:

        o_t = Σ_{j≤t} softmax_j(K^-½ q_t·k_j) v_j

    with rotary positions (RoFormer, arXiv 2104.09864) on q and k, and without convolution, gate or norm.

    Options: `num_kv_heads`, a divisor of `num_heads` (default: all), for groups of query heads that share
    keys and values (GQA, arXiv 2305.13245); `window`, the number of tokens that a token sees, including
    itself (default: all before it); `rope_theta`, the base of the rotary angles (10000; null: no rotation).
    Cost per token and head: (K + V)·T FLOPs at length T, half of T × T; with a window w < T,
    2(K + V)·w·(1 − w/2T). State: T (or `window`) keys and values of each of the `num_kv_heads`,
    (K + V)·itemsize bytes per token and head.
    """

    equation = "o = Σ_j softmax_j(K^−½ q·k_j) v_j, q and k rotated"
    source = "arXiv 1706.03762, 2104.09864"
    norm = None
    reach: int | None = None
    """Largest number of tokens that a token sees, including itself; None: all before it."""

    def __init__(
        self, config, layer_idx: int, *, num_kv_heads: int | None = None, window: int | None = None,
        rope_theta: float | None = 10000.0,
    ):  # fmt: skip
        H, groups = config.num_heads, config.num_heads if num_kv_heads is None else num_kv_heads
        if groups < 1 or H % groups:
            raise ValueError(f"softmax: num_kv_heads={num_kv_heads} must divide num_heads={H}")
        if window is not None and window < 1:
            raise ValueError(f"softmax: window={window} must be at least 1 token, or left out")
        if rope_theta is not None and not rope_theta > 0:
            raise ValueError(f"softmax: rope_theta={rope_theta} must be positive, or null for no rotation")
        if rope_theta is not None and config.key_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim·expand_k, not {config.key_dim}")
        super().__init__(config, layer_idx, k_heads=groups, v_heads=groups)
        self.reach, self.rope_theta = window, rope_theta

    def heads(self, x: Tensor, seq: Sequences, state: State, new: State | None) -> Heads:
        heads = super().heads(x, seq, state, new)
        if self.rope_theta is None:
            return heads
        angles = rotary_angles(seq.positions(x.shape[1], x.device), self.K, self.rope_theta, x.dtype)
        return heads | {"q": rotate(heads["q"], angles), "k": rotate(heads["k"], angles)}

    def mix(self, heads: Heads, seq: Sequences, state: State, new: State | None) -> Tensor:
        q, k, v = (heads[name] for name in ("q", "k", "v"))
        T = q.shape[1]
        if seq.rows is not None and new is not None:
            return self.mix_rows(q, k, v, seq, state, new)
        if new is not None:
            laid = {name: seq.pad(heads[name], state.get(name)) for name in ("k", "v")}
            kept = self.reach or seq.longest(T)
            new |= {name: last(x, kept) for name, x in laid.items()}
            if state:
                return seq.unpad(self.attend_past(seq.pad(q), laid["k"], laid["v"], seq, T), T)
        return self.attend_all(q, k, v, seq)

    def scatter_states(self, state: State, seq: Sequences) -> State:
        return state  # kept per row, see `mix_rows`

    def gather_states(self, new: State, seq: Sequences) -> State:
        return {name: x.detach() for name, x in new.items()}

    def mix_rows(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences, state: State, new: State) -> Tensor:
        """Attends packed rows that continue row states, in linear time.

        The kept keys that a continuing sequence still sees are put before it, with queries whose outputs are
        dropped. Then all are attended as whole sequences.
        """
        assert self.reach is not None, "row states cannot grow"
        tokens = None
        if state:
            assert seq.past is not None
            seq, source, tokens = seq.with_kept(self.reach, self.wanted(seq.past), q.device)
            kept = {name: x.flatten(0, 1) for name, x in state.items()}
            k, v = (
                torch.cat([x[0], kept[name].to(x.dtype)]).index_select(0, source)[None]
                for name, x in (("k", k), ("v", v))
            )
            q = q.new_zeros(k.shape[1], *q.shape[2:]).index_copy(0, tokens, q[0])[None]
        new |= {"k": seq.tails(k, self.reach), "v": seq.tails(v, self.reach)}
        o = self.attend_all(q, k, v, seq)
        return o if tokens is None else o.index_select(1, tokens)

    def wanted(self, past: Tensor) -> Tensor:
        """How many of its `past` tokens a sequence's next token sees."""
        return past if self.reach is None else past.clamp(max=self.reach - 1)

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences) -> Tensor:
        """Attends whole sequences, a batch `[B, T, …]` or `[1, ΣT, …]`."""
        if seq.cu_seqlens is None:
            return self.attend(q, k, v)
        groups, where = seq.groups(q.device)
        out = [self.attend(q[0, rows], k[0, rows], v[0, rows]).flatten(0, 1) for rows in groups]
        none = q.new_zeros(0, q.shape[2], v.shape[3])  # for `cat` if all sequences are empty
        return torch.cat([none, *out]).index_select(0, where)[None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends sequences `[B, T, …]` from their first tokens; linear in T with a window."""
        w, T = self.reach, q.shape[1]
        if w is None or w >= T:
            return self.weigh(q, k, v, causal=True)
        first = self.weigh(q[:, :w], k[:, :w], v[:, :w], causal=True)
        # Each further block of w queries sees the keys of its own block and the previous one.
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -T % w)) for x in (q, k, v))
        q = q[:, w:].unflatten(1, (-1, w))
        k, v = (x.unfold(1, 2 * w, w).movedim(-1, 2).flatten(0, 1) for x in (k, v))
        places = torch.arange(2 * w, device=q.device)[None]
        rest = self.weigh(q.flatten(0, 1), k, v, self.visible(places, places[:, w:]))
        return torch.cat([first, rest.unflatten(0, q.shape[:2]).flatten(1, 2)[:, : T - w]], 1)

    def attend_past(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences, T: int) -> Tensor:
        """Attends from q `[N, L, …]` to k and v `[N, W, …]`, past and new; all are right-aligned."""
        assert seq.past is not None, "a state needs its past"
        L, past = q.shape[1], seq.common_past()
        if L == 1 and past is not None:  # the common decoding step needs no mask
            seen = self.span(past)
            return self.weigh(q, k[:, -seen:], v[:, -seen:])
        if self.reach is not None:
            k, v = (x[:, -(self.reach - 1 + L) :] for x in (k, v))
        places = seq.last_positions(T, k.shape[1], q.device)
        return self.weigh(q, k, v, self.visible(places, places[:, k.shape[1] - L :]))

    def span(self, place: int) -> int:
        """How many tokens the token at position `place` sees, including itself."""
        return place + 1 if self.reach is None else min(place + 1, self.reach)

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Which key positions `[B, W]` are visible from query positions `[B, L]`: bool `[B, L, W]`.

        Positions below 0 are padding. As queries they must see something to keep their softmax finite,
        although nothing reads their outputs.
        """
        keys, queries = keys[:, None], queries[..., None]
        seen = (keys <= queries) & ((keys >= 0) | (queries < 0))
        return seen if self.reach is None else seen & (keys > queries - self.reach)

    def weigh(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Softmax attention of q `[B, L, H, K]` over k and v `[B, W, HK, …]`: `[B, L, H, V]`."""
        return F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=None if mask is None else mask[:, None],
            is_causal=causal,
            enable_gqa=q.shape[2] != k.shape[2],
        ).transpose(1, 2)

    def state_spec(self, T: int) -> StateSpec:
        rows, H = self.reach or T, self.num_v_heads
        return {"k": ((rows, H, self.K), None), "v": ((rows, H, self.V), None)}

    def flops(self, T: int) -> float:
        return 2.0 * self.num_heads * (self.K + self.V) * self.seen(T)

    def seen(self, T: int) -> float:
        """How many tokens a token sees, the mean over length T: T/2, or up to the window."""
        w = T if self.reach is None else min(T, self.reach)
        return w - w * w / (2 * T)


class DiagAttention(SoftmaxAttention):
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

    def __init__(
        self, config, layer_idx: int, *, block_size: int = 64, scores: str = "softmax",
        positions: str = "lrpe", norm_eps_placement: str = "inside",
    ):  # fmt: skip
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
        Mixer.__init__(self, config, layer_idx)
        self.reach = self.block = block_size
        self.scores = scores
        if scores == "relu":
            self.norm, self.o_norm = "rms", SimpleRMSNorm(config.norm_eps, norm_eps_placement)
        self.lrpe = build_positions(positions, self.K)

    def heads(self, x: Tensor, seq: Sequences, state: State, new: State | None) -> Heads:
        heads = Mixer.heads(self, x, seq, state, new)
        if self.lrpe is None:
            return heads
        places = seq.positions(x.shape[1], x.device) % self.block
        return heads | {name: self.lrpe(heads[name], places).to(heads[name].dtype) for name in ("q", "k")}

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequences) -> Tensor:
        options = {"block_size": self.block, "scores": self.scores, "scale": self.K**-0.5}
        o = by_kernel("block_attention", "auto", q, q, k, v, cu_seqlens=seq.cu_seqlens, **options)
        return super().attend_all(q, k, v, seq) if o is None else o

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, b = q.shape[1], min(max(q.shape[1], 1), self.block)
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -T % b)).unflatten(1, (-1, b)) for x in (q, k, v))
        o = self.weigh(*(x.flatten(0, 1) for x in (q, k, v)), causal=True)
        return o.unflatten(0, q.shape[:2]).flatten(1, 2)[:, :T]

    def wanted(self, past: Tensor) -> Tensor:
        return past % self.block

    def span(self, place: int) -> int:
        return place % self.block + 1

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        same = (keys // self.block)[:, None] == (queries // self.block)[..., None]
        return super().visible(keys, queries) & same

    def weigh(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        if self.scores == "softmax":
            return super().weigh(q, k, v, mask, causal)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        p = F.relu(q @ k.mT * self.K**-0.5)
        if mask is not None:
            p = p.masked_fill(~mask[:, None], 0)
        p = p.tril() if causal else p
        return (p @ v).transpose(1, 2)

    def seen(self, T: int) -> float:
        return min(T, self.block) / 2


def last(x: Tensor, rows: int) -> Tensor:
    """The last `rows` rows of x `[N, W, …]`, zero-padded on the left."""
    missing = rows - x.shape[1]
    if missing >= 0:
        return F.pad(x, (0, 0) * (x.dim() - 2) + (missing, 0)) if missing else x
    return x[:, -rows:].clone()  # a view would keep x alive
