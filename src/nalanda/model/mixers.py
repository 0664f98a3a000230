"""Token mixers. A new one is a class here and a row in `MIXERS`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .feature_maps import at_least_fp32, build_feature_map
from .layers import RMSNorm, Sequences, ShortConv
from .ops import delta_rule, delta_rule_flops

State = dict[str, Tensor]
StateSpec = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


class Mixer(nn.Module):
    """Mixes tokens over time, and nothing else.

    Raises ValueError from its constructor where its options cannot work, so that a config refuses them.
    """

    def forward(self, x: Tensor, seq: Sequences, state: State | None = None) -> tuple[Tensor, State | None]:
        """x `[B, T, D]` to y `[B, T, D]`. state: None carries nothing, {} starts a carried one."""
        raise NotImplementedError

    def state_spec(self) -> StateSpec:
        """Name to shape and dtype of what a sequence carries in generation; dtype None: the model's own."""
        raise NotImplementedError

    def flops(self, T: int) -> float:
        """Forward FLOPs a token at length T, without those of its Linear layers."""
        raise NotImplementedError


class Decay(nn.Module):
    """g = −exp(A_log) · softplus(a + dt_bias), the natural-log decay of Gated DeltaNet and Mamba 2, a head.

    Both parameters stay fp32 when a model is cast to half precision: a bf16 A_log moves in steps of 1 %. They
    are a module of their own so that a sharding wrapper can keep them so as well.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))

    def forward(self, a: Tensor) -> Tensor:  # [B, T, H]
        return -self.A_log.exp() * F.softplus(at_least_fp32(a) + self.dt_bias)

    def initial(self) -> tuple[Tensor, Tensor]:
        """A ~ U(0, 16); softplus(dt_bias) log-uniform in [1e-3, 0.1]. Returns (A_log, dt_bias)."""
        A = torch.empty_like(self.A_log).uniform_(0, 16).clamp_min_(1e-4)
        dt = torch.empty_like(self.dt_bias).uniform_(-3, -1)
        dt = 10**dt
        return A.log(), dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus

    def _apply(self, fn, recurse=True):
        def keep_precision(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype or moved.dtype.itemsize >= 4 else t.to(moved.device)

        return super()._apply(keep_precision, recurse)


class DeltaNet(Mixer):
    """DeltaNet (Yang et al. 2024): S_t = (I − β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t.

    q, k, v pass a short convolution; v a SiLU; q and k the feature map, which takes the place of their SiLU,
    and then an L2 norm. β = σ(W_b x). The output is RMS-normed by head, and gated where `use_gate` says so
    (default: no).

    Options: `allow_neg_eigval` doubles β, so that the transition's eigenvalue 1 − β reaches −1;
    `num_v_heads`, a multiple of `num_heads`, gives each query/key head several value heads (default: one).
    Sizes: K = head_dim·expand_k and V = head_dim·expand_v a head. `conv_size: 0` leaves the convolutions out.
    """

    gated = False  # the decay of GatedDeltaNet; also its output gate's default

    def __init__(
        self, config, layer_idx: int, *, allow_neg_eigval: bool = False, num_v_heads: int | None = None
    ):
        super().__init__()
        D, H = config.hidden_size, config.num_heads
        HV = H if num_v_heads is None else num_v_heads
        if HV < H or HV % H:
            raise ValueError(f"num_v_heads={HV} must be a multiple of num_heads={H}")
        self.layer_idx, self.num_heads, self.num_v_heads = layer_idx, H, HV
        self.K, self.V = config.key_dim, config.value_dim
        self.beta_scale = 2.0 if allow_neg_eigval else 1.0
        self.q_proj = nn.Linear(D, H * self.K, bias=False)
        self.k_proj = nn.Linear(D, H * self.K, bias=False)
        self.v_proj = nn.Linear(D, HV * self.V, bias=False)
        self.b_proj = nn.Linear(D, HV, bias=False)
        self.conv_size = config.conv_size
        if self.conv_size:
            self.q_conv1d = ShortConv(H * self.K, self.conv_size)
            self.k_conv1d = ShortConv(H * self.K, self.conv_size)
            self.v_conv1d = ShortConv(HV * self.V, self.conv_size)
        self.feature_map = build_feature_map(
            config.feature_map, num_heads=H, head_dim=self.K, **config.feature_map_options
        )
        if self.gated:
            self.a_proj = nn.Linear(D, HV, bias=False)
            self.decay = Decay(HV)
        self.use_gate = self.gated if config.use_gate is None else config.use_gate
        if self.use_gate:
            self.g_proj = nn.Linear(D, HV * self.V, bias=False)
        self.o_norm = RMSNorm(self.V, config.norm_eps)
        self.o_proj = nn.Linear(HV * self.V, D, bias=False)

    def convolve(
        self, name: str, x: Tensor, seq: Sequences, state: State | None, new: State | None
    ) -> Tensor:
        x = getattr(self, f"{name}_proj")(x)
        if not self.conv_size:
            return x
        past = state.get(f"conv_{name}") if state else None
        x, past = getattr(self, f"{name}_conv1d")(x, seq, past, carry=new is not None)
        if new is not None:
            new[f"conv_{name}"] = past
        return x

    def forward(self, x: Tensor, seq: Sequences, state: State | None = None) -> tuple[Tensor, State | None]:
        new: State | None = None if state is None else {}
        q = self.convolve("q", x, seq, state, new).unflatten(-1, (-1, self.K))  # [B, T, H, K]
        k = self.convolve("k", x, seq, state, new).unflatten(-1, (-1, self.K))
        v = F.silu(self.convolve("v", x, seq, state, new)).unflatten(-1, (-1, self.V))  # [B, T, HV, V]
        o, final = delta_rule(
            q,
            k,
            v,
            self.beta_scale * at_least_fp32(self.b_proj(x)).sigmoid(),
            self.decay(self.a_proj(x)) if self.gated else None,
            feature_map=self.feature_map,
            qk_norm="l2",
            initial_state=state.get("recurrent") if state else None,
            output_final_state=new is not None,
            cu_seqlens=seq.cu_seqlens,
            mode="recurrent" if x.shape[1] == 1 else "chunk",
        )
        if new is not None and final is not None:
            new["recurrent"] = final
        o = self.o_norm(o)
        if self.use_gate:
            o = o * F.silu(self.g_proj(x)).view_as(o)
        return self.o_proj(o.flatten(-2)), new

    def state_spec(self) -> StateSpec:
        H, HV, past = self.num_heads, self.num_v_heads, self.conv_size - 1
        spec: dict = {"recurrent": ((HV, self.feature_map.feature_dim, self.V), torch.float32)}
        if self.conv_size:
            keys, values = ((past, H * self.K), None), ((past, HV * self.V), None)
            spec |= {"conv_q": keys, "conv_k": keys, "conv_v": values}
        return spec

    def flops(self, T: int) -> float:
        convolved = 2 * self.num_heads * self.K + self.num_v_heads * self.V
        rule = delta_rule_flops(self.num_v_heads, self.feature_map.feature_dim, self.V)
        return rule + 2 * self.conv_size * convolved


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet (Yang et al. 2025): DeltaNet's state, decayed by exp(g_t) before each write,

    g = −exp(A_log)·softplus(W_a x + dt_bias), and an output gate SiLU(W_g x) unless `use_gate` is off.
    """

    gated = True


MIXERS = {"deltanet": DeltaNet, "gated_deltanet": GatedDeltaNet}


def build_mixer(name: str, config, layer_idx: int, **options) -> Mixer:
    """Raises ValueError for an unknown name, a bad value, or an option that neither mixer nor map has."""
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}: choose one of {', '.join(MIXERS)}")
    try:
        return MIXERS[name](config, layer_idx, **options)
    except TypeError as error:  # Python's own word on a misspelt keyword-only option
        raise ValueError(f"mixer {name!r} with feature_map {config.feature_map!r}: {error}") from None
