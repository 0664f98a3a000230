"""Comba (Hu et al. 2025, arXiv 2506.02475): a gated delta rule that reads what it erases before the decay."""

from dataclasses import replace

import torch
from torch import Tensor

from .call import Call, Inputs, Options
from .delta import GatedDeltaNet
from .layers import Fp32Module, at_least_fp32, excess, fp32_parameter, no_autocast
from .ops import map_features
from .recurrent import LayerState, per_value, recurrence
from .sequences import Sequences

STRONGEST = -20.0
"""The least log-decay. A state that should vanish keeps 2e-9 of itself, less than fp32 shows."""


class Correction(Fp32Module):
    """q − d k with a learnt d of each head: D, or D·σ(decay) with `inner_decay`."""

    def __init__(self, num_heads: int, first: float, inner_decay: bool):
        """first: the initial D."""
        super().__init__()
        self.first = first
        self.D = fp32_parameter(num_heads)
        self.decay = fp32_parameter(num_heads) if inner_decay else None

    def initial(self) -> dict[str, Tensor]:
        """Those of flash-linear-attention: σ(1) is 0.73."""
        D = {"D": torch.full_like(self.D, self.first)}
        return D if self.decay is None else D | {"decay": torch.ones_like(self.decay)}

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """q and k `[B, T, H, F]`, behind the map, to `[B, T, H, F]` in the dtype of q."""
        d = self.D if self.decay is None else self.D * self.decay.sigmoid()
        return torch.addcmul(q, k, -d[:, None]).to(q.dtype)  # in fp32 at least, as d is


class Comba(GatedDeltaNet):
    """Comba (Hu et al. 2025): Gated DeltaNet whose erased value is read from the state before its decay,

        S_t = e^{g_t} S_{t-1} − β_t k_t k_tᵀ S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q'_t, q' ∝ q − d k.

    g is `Decay` of W_a x, and at least −20 here. β = σ(W_b x). d is `Correction`, of the mapped q and k; the L2
    norm follows it. The RMS-normed heads are multiplied by σ(W_g x), unless `use_gate` is off.

    With β e^{−g} for β and e^g v for v, the gated delta rule computes it: that one reads behind the decay.

    The paper multiplies the erased key by a learnt b in (0, 1). flash-linear-attention's layer brings that key to
    length 1 behind the factor, so b is left in d alone. So it is here.

    Options: `correction`, the initial D (1; flash-linear-attention suggests 0.02 for small models), None for q as
    it is; `inner_decay`, whether σ(decay) multiplies D (yes). `num_v_heads` as in `DeltaNet`.
    Cost: that of Gated DeltaNet. State: F × V in fp32.
    """

    equation = "S ← (e^g I − β k kᵀ) S + β k vᵀ; o = Sᵀ(q − d k)"
    source = "arXiv 2506.02475"
    rule = replace(GatedDeltaNet.rule, gate="sigmoid")

    def __init__(
        self,
        config,
        layer_idx: int,
        *,
        num_v_heads: int | None = None,
        correction: float | None = 1.0,
        inner_decay: bool = True,
    ):
        if correction is None and inner_decay:
            raise ValueError(
                "comba: inner_decay multiplies the correction: set inner_decay false without one"
            )
        super().__init__(config, layer_idx, num_v_heads=num_v_heads)
        self.correction = (
            None if correction is None else Correction(self.num_heads, correction, inner_decay)
        )

    def mix(
        self, inputs: Inputs, seq: Sequences, state: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        v, beta, g = inputs.v, inputs.beta, inputs.g
        assert beta is not None
        assert g is not None
        with no_autocast(v):
            # Rounded once, behind the norm.
            q, k = (at_least_fp32(x) for x in (inputs.q, inputs.k))
            q, k = map_features(q, k, self.feature_map)
            q = q if self.correction is None else self.correction(q, k)
            q, k = map_features(q, k, None, "l2")  # [B, T, H, F]
            q, k = q.to(inputs.q.dtype), k.to(inputs.k.dtype)

        g = g.clamp_min(STRONGEST)
        # From e^g S this step erases what β would erase from S. A rounded key may be longer than 1.
        beta = beta * (-g).exp() / per_value(self, excess(k))
        # e^−20 v is zero in fp16.
        v = v.float() if v.dtype == torch.float16 else v
        # The op multiplies, in fp32: under strong decays a rounded product loses more than the gradient of g.
        write = g.exp()[..., None].expand_as(v)
        # Behind a strong decay a token turns what it erases into its negative.
        options = Options(allow_neg_eigval=True)
        return recurrence(Call(q, k, v, beta, g, write=write), options, seq, state)
