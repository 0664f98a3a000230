"""TransNormer's late layers, and the positions and norm that its early layers (`DiagAttention`) share.

The Devil in Linear Transformer (Qin et al. 2022, arXiv 2210.10340).
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Mixer
from .layers import Fp32Module, at_least_fp32, fp32_parameter, rotate
from .plans import SHARED
from .rule import Rule


class LRPE(Fp32Module):
    """Positions of TransNormer's released code: a reflection, then a rotation by learnt angles.

    x ↦ R(t·θ) (x − 2 (x·u) u), with a unit vector u drawn once a layer and fixed, and angles θ `[K/2]` that
    start at 10000^(−2i/K) and are shared by the heads. q and k share both, so that q_i·k_j depends only on
    i − j. All K features rotate; in one release only some do.
    """

    tp_style = SHARED

    def __init__(self, size: int):
        super().__init__()
        if size % 2:
            raise ValueError(
                f"lrpe rotates pairs of features, and a head has {size}: use an even number, or set "
                "mixer_options positions=none"
            )
        self.theta = fp32_parameter(size // 2)
        self.register_buffer("u", torch.empty(size, dtype=torch.float32))
        self.u: Tensor

    def initial(self) -> dict[str, Tensor]:
        i = torch.arange(len(self.theta), dtype=torch.float32, device=self.theta.device)
        return {
            "theta": 10000.0 ** (-i / len(self.theta)),
            "u": F.normalize(torch.randn_like(self.u), dim=0),
        }

    def token_fields(self) -> dict[str, Tensor]:
        """The fields of `nalanda_kernels.cpu.step.Step` for these positions."""
        return {"mirror": self.u, "frequencies": self.theta}

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x `[B, T, H, K]` and positions `[B or 1, T]` to `[B, T, H, K]`, in fp32 at least."""
        x = at_least_fp32(x)
        # A Householder reflection: orthogonal, so lengths and the products of q and k stay.
        x = x - 2 * (x * self.u).sum(-1, keepdim=True) * self.u
        return rotate(x, positions[..., None] * self.theta)

    def extra_repr(self) -> str:
        return f"{len(self.u)}"


def build_positions(name: str, size: int) -> LRPE | None:
    """The module for the option `positions`. Raises ValueError for an unknown name."""
    if name not in ("lrpe", "none"):
        raise ValueError(f"positions={name!r} is not one of lrpe, none")
    return LRPE(size) if name == "lrpe" else None


class SimpleRMSNorm(nn.Module):
    """RMSNorm without a gain, in fp32, returned in the dtype of x.

    placement of ε: "inside", x/√(mean x² + ε), with a gradient bounded by 1/√ε; or "outside" as in
    TransNormer's release, x/(√(mean x²) + 1e-8), with a gradient bounded by 1e8.
    """

    def __init__(self, eps: float, placement: str = "inside"):
        super().__init__()
        if placement not in ("inside", "outside"):
            raise ValueError(f"norm_eps_placement={placement!r} is not one of inside, outside")
        self.eps, self.placement = eps, placement

    def forward(self, x: Tensor) -> Tensor:
        wide, D = at_least_fp32(x), x.shape[-1]
        if self.placement == "inside":
            return F.rms_norm(wide, (D,), eps=self.eps).to(x.dtype)
        return (wide / (torch.linalg.vector_norm(wide, dim=-1, keepdim=True) / D**0.5 + 1e-8)).to(
            x.dtype
        )

    def extra_repr(self) -> str:
        return f"eps={self.eps if self.placement == 'inside' else 1e-8}, {self.placement}"


class NormAttention(Mixer):
    """TransNormer's late layers (Qin et al. 2022): O = RMSNorm(tril(φ(Q) φ(K)ᵀ) V).

    There is no denominator, scale or gain, and the norm is over all heads together. With ε inside its root, a
    loss with ‖∂L/∂o_t‖ ≤ c₁ and values with ‖v_j‖ ≤ c₂ have |∂L/∂s_tj| ≤ c₁c₂/√ε for every score s. With a
    denominator there is no such bound.

    Options: `positions`, "lrpe" (default: reflected and rotated after φ, see `LRPE`) or "none";
    `norm_eps_placement`, "inside" (default, ε = norm_eps) or "outside" (as released), see `SimpleRMSNorm`.
    Default map: 1 + ELU (T2); T1 takes `elu`. Xavier initialisation gives q, k and v a gain of 1/√2.
    Cost per token and head, F features: 4FV + 2·64·(F + V) FLOPs. State: F × V in fp32.
    """

    equation = "S ← S + k vᵀ; o = RMSNorm(Sᵀq), q and k reflected and rotated"
    source = "arXiv 2210.10340"
    rule = Rule(
        write="add", scale=1.0, map="elu1", norm="rms", rotate="lrpe", cut=True, unmasked=True
    )

    def __init__(
        self, config, layer_idx: int, *, positions: str = "lrpe", norm_eps_placement: str = "inside"
    ):
        if positions == "none":
            self.rule = replace(self.rule, rotate="none")
        super().__init__(config, layer_idx)
        self.o_norm = SimpleRMSNorm(config.norm_eps, norm_eps_placement)
        self.lrpe = build_positions(positions, self.feature_map.feature_dim)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.gain = 2**-0.5  # pyrefly: ignore[bad-argument-type]
