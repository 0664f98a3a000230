"""Linear attention: mixers with a state S = Σ φ(k) vᵀ. They differ in its decay and its readout."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Heads, LayerState, Mixer, StateSpec
from .call import Call, Options, wide_dtype
from .context import recurrence
from .delta import Decay
from .epilogues import swiglu
from .feature_maps import EPS, opposite
from .layers import RMSNorm, at_least_fp32, no_autocast, place_angles, rotate
from .ops import by_kernel, linear_attention_flops, map_features
from .options import check_names, check_types
from .rule import Rule
from .sequences import Sequences
from .soft import PooledLandmarks


class LinearRecurrence(Mixer):
    """Mixers with a state S = Σ φ(k) vᵀ, which may decay; o_t = S_tᵀ φ(q_t)."""

    rule = Rule(cut=True)

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        return self.recur(heads, seq, state, new)

    def recur(
        self,
        heads: Heads,
        seq: Sequences,
        state: LayerState,
        new: LayerState | None,
        *,
        mapped: bool = False,
        scale: float | None = None,
        name: str = "recurrent",
    ) -> Tensor:
        """Calls the op with the state `name`. mapped: whether q and k are features already."""
        q, k, v = heads["q"], heads["k"], heads["v"]
        if v.dtype == torch.float16:  # sums of 1000 terms may exceed its range before the norm
            v = v.float()
        feature_map = None if mapped or self.rule.map is None else self.feature_map
        # No recurrence where all tokens see all: one state, of the whole sequence, serves them.
        if seq.bidirectional:
            with no_autocast(v):
                q, k = map_features(q, k, feature_map)
                return sum_both(q, k, v, seq, scale)

        options = Options(
            feature_map=feature_map,
            scale=scale,
            output_final_state=new is not None,
            mode="recurrent" if q.shape[1] == 1 else "chunk",
        )
        call = Call(q, k, v, g=heads.get("g"), initial_state=state.get(name))
        o, final = recurrence(call, options, seq)
        if new is not None and final is not None:
            new[name] = final
        return o

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The heads, features and values of the state."""
        features = self.K if self.rule.map is None else self.feature_map.feature_dim
        return self.num_v_heads, features, self.V

    def state_spec(self, T: int) -> StateSpec:
        return {"recurrent": (self.state_shape, torch.float32), **super().state_spec(T)}

    def flops(self, T: int) -> float:
        return self.rule_flops(T) + super().flops(T)

    def rule_flops(self, T: int) -> float:
        """Per token at length T, without convolutions and map."""
        return self.sum_flops(*self.state_shape)

    def sum_flops(self, num_heads: int, key_dim: int, value_dim: int) -> float:
        """`linear_attention_flops`; in both directions at once there are no chunks."""
        chunk = 0 if self.bidirectional and self.rule.unmasked else 64
        return linear_attention_flops(num_heads, key_dim, value_dim, chunk)


class NormalizedAttention(LinearRecurrence):
    """Mixers that divide by the sum of a token's weights, φ(q_t)ᵀ Σ_{j≤t} φ(k_j) + ε t."""

    rule = Rule(
        read="sum", scale=1.0, map="elu1", conv=4, gated=False, norm=None, cut=True, unmasked=True
    )
    other_readout = ""
    """How to do without the denominator, for the refusal of a map with negative products."""
    feature_theta: float | None = None
    """Base of the rotary angles of φ(q) and φ(k) above the denominator, not in it; None: no rotation."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if self.rule.read != "plain" and not self.feature_map.nonnegative:
            raise ValueError(
                f"feature_map {self.rule.map!r}: {type(self).__name__} divides by a sum of weights, which "
                f"may be negative; choose relu, exp, elu1, nala or pola{self.other_readout}"
            )

    def rotate_features(self, theta: float | None) -> None:
        """Sets feature_theta. Raises ValueError for one that cannot work."""
        if theta is not None and not self.bidirectional:
            raise ValueError(f"rope_theta={theta}: encoders rotate features; set is_decoder: false")
        if theta is not None and theta <= 0:
            raise ValueError(f"rope_theta={theta} must be positive")
        if theta is not None and self.stream_width % 4:
            raise ValueError(
                f"rope_theta={theta} rotates {self.stream_width} features together; set head_dim to a "
                "multiple of 4"
            )
        self.feature_theta = theta

    @property
    def stream_width(self) -> int:
        """How many features rotate together: K where a map doubles them, which gives two streams."""
        features = self.feature_map.feature_dim
        return self.K if features == 2 * self.K else features

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        o = self.readout(heads, seq, state, new)
        if o is not None:
            return o
        o, z = self.sums(heads, seq, state, new)
        return o / (z + EPS * self.counts(heads, seq))

    def readout(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None, **options
    ) -> Tensor | None:
        """`mix` by one kernel, which forms sums and denominators; None if none serves the call."""
        q, v = heads["q"], heads["v"]
        # Cut rows and both directions need the sums apart; one token needs no kernel of chunks.
        if q.shape[1] == 1 or seq.parts is not None or seq.bidirectional:
            return None

        served = by_kernel(
            *("normalized_attention", "auto", q, q, heads["k"], v, heads.get("g")),
            feature_map=self.feature_map,
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

    def sums(
        self,
        heads: Heads,
        seq: Sequences,
        state: LayerState,
        new: LayerState | None,
        *,
        mapped: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """φ(q)ᵀ S `[B, T, HV, V]` and φ(q)ᵀ z `[B, T, HV, 1]`, in fp32, by one op: z is S with v = 1."""
        v = at_least_fp32(heads["v"])
        one = v.new_ones(*v.shape[:3], 1)
        if self.feature_theta is not None:
            # The denominator is of the features before they rotate.
            q, k = map_features(heads["q"], heads["k"], self.feature_map)  # [B, T, H, F]
            z = self.recur({"q": q, "k": k, "v": one}, seq, state, new, mapped=True, scale=1.0)
            angles = place_angles(q, seq, self.stream_width, self.feature_theta)
            q, k = (self.rotate_streams(x, angles) for x in (q, k))
            return self.recur({"q": q, "k": k, "v": v}, seq, state, new, mapped=True, scale=1.0), z
        o = self.recur(
            heads | {"v": torch.cat([v, one], -1)}, seq, state, new, mapped=mapped, scale=1.0
        )
        return o[..., :-1], o[..., -1:]

    def rotate_streams(self, x: Tensor, angles: Tensor) -> Tensor:
        """Features `[B, T, H, F]` with each stream rotated apart, so that opposite signs never meet."""
        streams = x.unflatten(-1, (-1, self.stream_width)).flatten(2, 3)
        return rotate(streams, angles).view_as(x)

    @staticmethod
    def counts(heads: Heads, seq: Sequences) -> Tensor:
        """How many tokens each token sees, `[B or 1, T, 1, 1]`, in fp32 at least."""
        v = heads["v"]
        return seq.counts(v.shape[1], v.device).to(wide_dtype(v))[..., None, None]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """With a denominator a last value is 1, so that its sum is Σ φ(k)."""
        heads, features, values = super().state_shape
        return heads, features, values + (self.rule.read != "plain")


class LinearAttention(NormalizedAttention):
    """Linear attention (Katharopoulos et al. 2020): o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + ε t).

    S_t = Σ_{j≤t} φ(k_j) v_jᵀ and z_t = Σ_{j≤t} φ(k_j). The epsilon grows with t, as both sums do.

    Options: `denominator` (default: yes) needs a map with φ(q)·φ(k) ≥ 0. Without it, o_t = F^-½ φ(q_t)ᵀ S_t,
    RMS-normed per head. Default map: 1 + ELU.
    Cost per token and head with F features: 4FV + 2·64·(F + V) FLOPs. State: F × V and z, in fp32.
    """

    equation = "S ← S + k vᵀ, z ← z + k; o = Sᵀq / zᵀq"
    source = "arXiv 2006.16236"
    other_readout = ", or mixer_options denominator=false"

    def __init__(self, config, layer_idx: int, *, denominator: bool = True):
        if not denominator:
            self.rule = replace(self.rule, read="plain", scale=None, norm=self.rule.norm or "head")
        super().__init__(config, layer_idx)

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        if self.rule.read == "plain":
            return self.recur(heads, seq, state, new)
        return super().mix(heads, seq, state, new)


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


class NaLaAttention(NormalizedAttention):
    """NaLaFormer's block (2025), causal: `LinearAttention` with the NaLa map and the denominator.

    A LayerNorm over all heads follows, and a gate SiLU(W_g x), unless `use_gate` is off.
    Option of encoders: `rope_theta`, the base of rotary angles of φ(q) and φ(k), by row and column in
    images. The features with cos θ and those with sin θ rotate apart. Angles enter the sum over values but
    not the denominator; the releases have 10000.
    """

    equation = "S ← S + k vᵀ, z ← z + k; o = Sᵀq / zᵀq, LayerNorm"
    source = "arXiv 2506.21137"
    rule = replace(NormalizedAttention.rule, map="nala", gated=True, norm="layer")

    def __init__(self, config, layer_idx: int, *, rope_theta: float | None = None):
        super().__init__(config, layer_idx)
        self.rotate_features(rope_theta)


def negative_weights(mixer: Mixer, x: Tensor) -> Tensor:
    """The share of negative ones among the weights of the tokens that a token sees."""
    weights = mixer.weights(x)  # [B, heads, T, T]
    seen = torch.ones_like(weights[0, 0], dtype=torch.bool)
    if not mixer.bidirectional:
        seen = seen.tril()
    return (weights[..., seen] < 0).float().mean()


class MALA(NormalizedAttention):
    """Magnitude-aware linear attention (MALA, 2025), causal. With s_j = c_t φ(q_t)·φ(k_j) and z_t = Σ s_j,

        o_t = Σ_{j≤t} (β_t s_j − γ_t) v_j,    β = 1 + 1/z,  γ = z/t,

    so the weights of a row sum to 1 and sharpen as the query grows. Some may be negative; training logs their
    share. With r = φ(q)ᵀS and the mean value v̄, it is computed as o = r/Σs + c (r − Σs · v̄).

    Options: `scale`, c_t: "code" (default, K^-½/t as in the released code), "inverse_t" (1/t) or "literal"
    (1 as in the paper; ‖w‖₁ grows with t, so the difference loses digits). `rope_theta` as in
    `NaLaAttention`; rows then sum to 1 only approximately. Default map: 1 + ELU.
    Cost: that of `LinearAttention`, plus 4V. State: F × (V + 1) and Σv in fp32; the cache holds t.
    """

    equation = "S ← S + k vᵀ, z ← z + k; o = Sᵀq / zᵀq + c (Sᵀq − zᵀq v̄)"
    source = "arXiv 2507.00698"
    rule = replace(NormalizedAttention.rule, read="mala")
    metrics: ClassVar = {"negative_weights": negative_weights}

    def __init__(
        self, config, layer_idx: int, *, scale: str = "code", rope_theta: float | None = None
    ):
        if scale not in ("code", "inverse_t", "literal"):
            raise ValueError(
                f"mala: scale={scale!r} is unknown; choose one of code, inverse_t, literal"
            )
        self.rule = replace(self.rule, magnitude=scale)
        super().__init__(config, layer_idx)
        self.rotate_features(rope_theta)

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        o = self.readout(heads, seq, state, new, magnitude=self.rule.magnitude)
        if o is not None:
            return o
        r, z = self.sums(heads, seq, state, new)
        t, v = self.counts(heads, seq), at_least_fp32(heads["v"])
        one = v.new_ones(*v.shape[:3], 1)
        constant = {"q": one, "k": one, "v": v}  # equal weights: the state is Σv
        # [N, HV, 1, V], beside the state of r and z.
        total = self.recur(constant, seq, state, new, mapped=True, scale=1.0, name="value_sum")
        c = 1.0 if self.rule.magnitude == "literal" else 1 / t
        if self.rule.magnitude == "code":
            c = c * self.K**-0.5
        # r/z + c (r − z v̄), with v̄ = Σv/t over the tokens seen.
        return r / (z + EPS * t) + c * (r - z * total / t)

    def state_spec(self, T: int) -> StateSpec:
        total = ((self.num_v_heads, 1, self.V), torch.float32)  # Σv
        return super().state_spec(T) | {"value_sum": total}

    def flops(self, T: int) -> float:
        return super().flops(T) + self.sum_flops(self.num_v_heads, 1, self.V)


class PolaAttention(NormalizedAttention):
    """PolaFormer (2025), causal. φ splits q and k by sign, with learnt powers: [relu(x)^p; relu(−x)^p].

    The query [q⁺; q⁻] reads the first half of v, and [q⁻; q⁺], of opposite signs, the second half. Each has
    its own denominator. A depthwise convolution of v (`value_conv`: by default 5 taps, filters shared by
    heads) is added. Their sum is multiplied by G = W_g x, without activation.

    Options: `gate_first` multiplies by G before the convolution is added (default: after). The map's options
    (`alpha`, `scale`) are feature_map_options. V must be even.
    Cost: that of `LinearAttention` with twice the heads of V/2, plus 10V. State: 2 × 2K × (V/2 + 1) in fp32,
    and the last 4 values of v for the convolution.
    """

    equation = "S ← S + k vᵀ, z ← z + k, once over keys of q's sign, once over others; o = (Sᵀq / zᵀq + conv v) ⊙ W x"
    source = "arXiv 2501.15061"
    rule = replace(
        NormalizedAttention.rule,
        read="pola",
        map="pola",
        value_conv=5,
        shared_filters=True,
        gated=True,
        gate="plain",
    )

    def __init__(self, config, layer_idx: int, *, gate_first: bool = False):
        if config.feature_map not in (None, "pola"):
            raise ValueError(
                f"pola: feature_map is {config.feature_map!r}; it needs feature_map 'pola'"
            )
        if config.value_dim % 2:
            raise ValueError(
                f"pola: head_dim·expand_v is {config.value_dim}; it must be even to halve v"
            )
        self.rule = replace(self.rule, gate_first=gate_first)
        super().__init__(config, layer_idx)

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        halves = {name: heads[name] for name in ("q", "k")}
        # Each half of v is a head, [B, T, 2H, V/2], read by queries of its own.
        halves["v"] = heads["v"].unflatten(-1, (2, -1)).flatten(2, 3)
        o = self.readout(halves, seq, state, new, mirrored=True)
        if o is None:
            q, k = map_features(heads["q"], heads["k"], self.feature_map)
            halves["q"] = torch.stack([q, opposite(q)], 3).flatten(2, 3)  # [B, T, 2H, 2K]
            halves["k"] = k.repeat_interleave(2, 2)  # both halves have the same keys
            o, z = self.sums(halves, seq, state, new, mapped=True)
            o = o / (z + EPS * self.counts(heads, seq))
        return o.unflatten(2, (-1, 2)).flatten(-2)  # [B, T, H, V]

    def add_local(self, o: Tensor, heads: Heads) -> Tensor:
        if self.rule.gated and self.rule.gate_first:
            o = o * heads["gate"].view_as(o)
        return super().add_local(o, heads)

    def read_out(self, o: Tensor, heads: Heads, x: Tensor) -> Tensor:
        o = o.flatten(-2).to(x.dtype)
        return self.o_proj(o * heads["gate"] if self.rule.gated and not self.rule.gate_first else o)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Each half of the values is a head of its own, and has its own denominator."""
        return 2 * self.num_heads, self.feature_map.feature_dim, self.V // 2 + 1


class SoftAttention(LinearRecurrence):
    """SOFT++ (Lu et al. 2021, 2024), causal: o_t = κ(q_t, Z) W Σ_{j≤t} κ(Z, k_j) v_jᵀ.

    κ is a Gaussian kernel; q = k is one projection. The landmarks Z are learnt: pooled ones would leak the
    future. W is the regularised inverse of κ(Z, Z), normalised on both sides (`feature_map: softpp`, the
    default) or not (`soft`). The causal mask keeps the Nyström entries, but the masked matrix is not positive
    semidefinite. The output is RMS-normed per head.

    The map's options (`landmarks`, `ridge`, `inverse`, `iterations`) are feature_map_options.
    Where tokens see both ways, the landmarks are means of the sequence, as published: then the options are
    those of `soft.PooledLandmarks`, and the matrix is positive semidefinite.
    Cost: that of `LinearAttention` with F = m landmarks, plus 2m(2K + m) for the map. State: m × V in fp32.
    """

    equation = "S ← S + κ(Z, k) vᵀ; o = SᵀW κ(Z, q), q = k"
    source = "arXiv 2110.11945, 2207.03341"
    rule = Rule(
        scale=1.0, map="softpp", conv=4, shared_qk=True, gated=False, cut=True, unmasked=True
    )

    def __init__(self, config, layer_idx: int):
        if config.feature_map not in (None, "soft", "softpp"):
            raise ValueError(
                f"soft: feature_map is {config.feature_map!r}; it needs 'soft' or 'softpp', and for "
                "another map take mixer 'linear_attention'"
            )
        super().__init__(config, layer_idx)
        self.grid = config.grid

    def build_map(self, config) -> Any:
        if not self.bidirectional:
            return super().build_map(config)
        options = config.feature_map_options
        check_names(options, PooledLandmarks)
        check_types(options, PooledLandmarks.__init__.__annotations__, "feature_map_options: ")
        return PooledLandmarks(self.rule.map == "softpp", **options)

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        if not seq.bidirectional:
            # No F^-½: φ(q) has W in it.
            return self.recur(heads, seq, state, new, scale=1.0)
        q, v = heads["q"], heads["v"]
        if seq.cu_seqlens is None:
            return self.feature_map(q, v, seq.grid)
        return self.mix_packed(q, v, seq)

    @torch.compiler.disable  # the lengths are values of cu_seqlens
    def mix_packed(self, q: Tensor, v: Tensor, seq: Sequences) -> Tensor:
        sequences = zip(seq.split(q), seq.split(v), strict=True)
        return torch.cat([self.feature_map(*sequence) for sequence in sequences], 1)

    def rule_flops(self, T: int) -> float:
        if not self.bidirectional:
            return super().rule_flops(T)
        return self.num_heads * self.feature_map.flops_at(self.grid or (T,), self.K, self.V)


def retention_decays(num_heads: int, like: Tensor) -> Tensor:
    """log(1 − 2^{−5−h}) of each head, `[H]`, in the precision of `like`."""
    h = torch.arange(num_heads, device=like.device, dtype=like.dtype)
    return torch.log1p(-(2.0 ** (-5 - h)))


class Retention(LinearRecurrence):
    """RetNet's retention (Sun et al. 2023): S_t = (1 − 2^{−5−h}) S_{t-1} + k_t v_tᵀ for head h = 0, 1, …

    q and k are rotated by their positions. The output is RMS-normed per head and gated by SiLU(W_g x).
    Option: `rope_theta`, the base of the rotary angles.
    Cost: that of `LinearAttention`. State: K × V in fp32.
    """

    equation = "S ← (1 − 2^(−5−h)) S + k vᵀ; o = Sᵀq, q and k rotated"
    source = "arXiv 2307.08621"
    rule = Rule(decay="retention", gated=True, cut=True)

    def __init__(self, config, layer_idx: int, *, rope_theta: float = 10000.0):
        if not rope_theta > 0:
            raise ValueError(f"retention: rope_theta={rope_theta} must be positive")
        if config.key_dim % 2:
            raise ValueError(
                f"retention: head_dim·expand_k is {config.key_dim}; rotation needs an even one"
            )
        self.rule = replace(self.rule, theta=rope_theta)
        super().__init__(config, layer_idx)

    def heads(self, x: Tensor, seq: Sequences, state: LayerState, new: LayerState | None) -> Heads:
        heads = super().heads(x, seq, state, new)
        assert self.rule.theta is not None
        angles = place_angles(x, seq, self.K, self.rule.theta)
        g = retention_decays(self.num_heads, angles).expand(*x.shape[:2], -1)  # [B, T, H]
        return heads | {"q": rotate(heads["q"], angles), "k": rotate(heads["k"], angles), "g": g}


class GLA(LinearRecurrence):
    """Gated linear attention (Yang et al. 2023): S_t = Diag(α_t) S_{t-1} + k_t v_tᵀ.

    α_t = σ(W₂ W₁ x + b)^{1/16} is a decay per key channel, from a projection of rank 16. The output is
    RMS-normed per head and gated by SiLU(W_g x).
    Options: `gate_rank` (16) and `gate_temperature` (16, the root of the decay).
    Cost: that of `LinearAttention`. State: K × V in fp32.
    """

    equation = "S ← Diag(α) S + k vᵀ; o = Sᵀq"
    source = "arXiv 2312.06635"
    rule = Rule(decay="sigmoid", gated=True, cut=True)

    def __init__(
        self, config, layer_idx: int, *, gate_rank: int = 16, gate_temperature: float = 16.0
    ):
        if gate_rank < 1 or gate_temperature <= 0:
            raise ValueError(
                f"gla: gate_rank={gate_rank} and gate_temperature={gate_temperature} must be > 0"
            )
        self.rule = replace(self.rule, temperature=float(gate_temperature))
        super().__init__(config, layer_idx)
        self.gk_proj: Any = nn.Sequential(
            nn.Linear(config.hidden_size, gate_rank, bias=False),
            nn.Linear(gate_rank, self.num_heads * self.K),
        )

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | {"a": self.gk_proj[0]}

    def second_linears(self) -> dict[str, nn.Linear]:
        return {"a": self.gk_proj[1]}

    def heads(self, x: Tensor, seq: Sequences, state: LayerState, new: LayerState | None) -> Heads:
        heads = super().heads(x, seq, state, new)
        gates = at_least_fp32(heads["a"]).unflatten(-1, (-1, self.K))
        # log α: the root of the decay divides its logarithm.
        return heads | {"g": F.logsigmoid(gates) / self.rule.temperature}

    def gate_parameters(self) -> Iterator[nn.Parameter]:
        yield from super().gate_parameters()
        yield from self.gk_proj.parameters()


class Discretization(Decay):
    """Mamba 2's step Δ = softplus(a + dt_bias) and log-decay −exp(A_log)·Δ per head; and D, of the skip."""

    least = 1.0

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        self.D = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, T, H]; D: [H]
        dt = F.softplus(at_least_fp32(a) + self.dt_bias)
        g = -self.A_log.exp() * dt
        return dt, g, self.D.clone()  # the wrapper that shards or offloads D frees its own

    def initial(self) -> dict[str, Tensor]:
        """Those of `Decay` with A ~ U(1, 16); D = 1."""
        return super().initial() | {"D": torch.ones_like(self.D)}


class Mamba2(LinearRecurrence):
    """Mamba 2 (Dao and Gu 2024): S_t = e^{−Δ_t A} S_{t-1} + Δ_t k_t v_tᵀ, o_t = S_tᵀ q_t + D v_t.

    It calls q, k and v C, B and x. Δ, of W_a x, and A have a number a head, see `Discretization`. The output
    is multiplied by SiLU(W_g x), then RMS-normed over all heads.

    Options: `num_v_heads`, a multiple of `num_heads`: the heads; `num_heads` are its groups of B and C.
    Cost: that of `LinearAttention`, plus 2V. State: F × V in fp32.
    """

    equation = "S ← e^(−ΔA) S + Δ k vᵀ; o = Sᵀq + D v"
    source = "arXiv 2405.21060"
    rule = Rule(
        decay="dt", scale=1.0, map="silu", conv=4, gated=True, gate_first=True, norm="rms", cut=True
    )

    def __init__(self, config, layer_idx: int, *, num_v_heads: int | None = None):
        if num_v_heads is not None and (num_v_heads < 1 or num_v_heads % config.num_heads):
            raise ValueError(
                f"num_v_heads={num_v_heads} must be a multiple of num_heads={config.num_heads}"
            )
        super().__init__(config, layer_idx, v_heads=num_v_heads)
        self.a_proj = nn.Linear(config.hidden_size, self.num_v_heads, bias=False)
        self.discretization = Discretization(self.num_v_heads)
        self.o_norm = RMSNorm(self.num_v_heads * self.V, config.norm_eps)

    def linears(self) -> dict[str, nn.Linear]:
        return super().linears() | {"a": self.a_proj}

    def heads(self, x: Tensor, seq: Sequences, state: LayerState, new: LayerState | None) -> Heads:
        heads = super().heads(x, seq, state, new)
        dt, g, skip = self.discretization(heads["a"])
        return heads | {"dt": dt, "g": g, "skip": skip}

    def mix(
        self, heads: Heads, seq: Sequences, state: LayerState, new: LayerState | None
    ) -> Tensor:
        v = at_least_fp32(heads["v"])
        # Δ k vᵀ: the op has no step, so Δ multiplies v.
        o = self.recur(heads | {"v": heads["dt"][..., None] * v}, seq, state, new, scale=1.0)
        return o + heads["skip"][:, None] * v  # D v, without Δ

    def read_out(self, o: Tensor, heads: Heads, x: Tensor) -> Tensor:
        o = o.flatten(-2)
        # The gate comes before the norm, unlike that of other mixers.
        gated = swiglu(at_least_fp32(heads["gate"]), o) if self.rule.gated else o
        return self.o_proj(self.o_norm(gated).to(x.dtype))

    def gate_parameters(self) -> Iterator[nn.Parameter]:
        yield from super().gate_parameters()
        yield from self.a_proj.parameters()

    def flops(self, T: int) -> float:
        return super().flops(T) + 2.0 * self.num_v_heads * self.V
