"""Feature maps φ for queries and keys. A new one is a class here and a row in `FEATURE_MAPS`."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6  # inside every root, and the floor of every base that is raised to a power


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def length(x: Tensor) -> Tensor:
    """‖x‖ over the last dimension, kept: √(Σx² + 1e-6), whose gradient at x = 0 is 0."""
    return (x.square().sum(-1, keepdim=True) + EPS).sqrt()


def power(base: Tensor, exponent: Tensor | float) -> Tensor:
    """base^exponent for base ≥ 0, and exactly 0 (value and gradient) where base ≤ 1e-6."""
    return torch.where(base > EPS, base.clamp_min(EPS).pow(exponent), 0.0)


class FeatureMap(nn.Module):
    """`forward(q, k) → (φ_q, φ_k)`, `[B, T, H, K] → [B, T, H, feature_dim]`.

    Computes in fp32 at least (its intermediates leave fp16's range) and returns that precision: whoever
    normalises the features casts them once, at the end.
    """

    feature_dim: int

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Elementwise(FeatureMap):
    """One function on q and k alike: `identity`, `silu`, `relu`, `elu1` (1 + ELU)."""

    def __init__(self, function, *, num_heads: int, head_dim: int):
        super().__init__()
        self.function = function
        self.feature_dim = head_dim

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(at_least_fp32(q)), self.function(at_least_fp32(k))


class NaLa(FeatureMap):
    """NaLaFormer's norm-aware map with cosine angles; `2K` features.

    With d(x) = x/‖x‖ and p(n) = λ(½ + tanh n):

        φ_q(q) = |s·d(q)|^p(n) ⊙ [cos θ(q); sin θ(q)],    φ_k(k) = |k|^λ ⊙ [cos θ(k); sin θ(k)]

    so that every term |s·d_i|^p |k_i|^λ cos(θ_q,i − θ_k,i) of φ_q·φ_k is ≥ 0, because |θ| ≤ π/4. The paper
    leaves λ and the argument of θ open; each reading is a named choice:

    angle: θ = π/4·tanh of d(x) (`direction`), √K·d(x) (`rms`) or x (`raw`); `relu_split` has no angle and
        splits the signs instead, [relu(x)^p; relu(−x)^p], as the authors' vision code does.
    power: λ. At λ ≥ 2 every exponent is ≥ 1 and the slope at 0 bounded; below, it can reach 500.
    power_norm: n = ‖q‖ (`raw`) or ‖q‖/√K (`rms`); at K = 128 the former saturates tanh, and p is then
        constant.
    direction_scale: s = 1 (`unit`) or √K (`sqrt`). The same after L2 normalisation, but `sqrt`
        keeps the squares of the features above that norm's epsilon.
    """

    ANGLES = ("direction", "rms", "raw", "relu_split")

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        angle: str = "rms",
        power: float = 2.0,
        power_norm: str = "rms",
        direction_scale: str = "sqrt",
    ):
        super().__init__()
        for option, value, allowed in (
            ("angle", angle, self.ANGLES),
            ("power_norm", power_norm, ("raw", "rms")),
            ("direction_scale", direction_scale, ("unit", "sqrt")),
        ):
            if value not in allowed:
                raise ValueError(f"nala: {option}={value!r} is none of {', '.join(allowed)}")
        if not power > 0:
            raise ValueError(f"nala: power={power} must be positive")
        self.angle, self.power_norm, self.power = angle, power_norm, float(power)
        self.root = math.sqrt(head_dim)
        self.scale = self.root if direction_scale == "sqrt" else 1.0
        self.feature_dim = 2 * head_dim

    def rotate(self, magnitude: Tensor, x: Tensor, direction: Tensor) -> Tensor:
        argument = {"direction": direction, "rms": direction * self.root, "raw": x}[self.angle]
        theta = math.pi / 4 * argument.tanh()
        return torch.cat([magnitude * theta.cos(), magnitude * theta.sin()], -1)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = at_least_fp32(q), at_least_fp32(k)
        n = length(q)
        d = q / n
        p = self.power * (0.5 + (n / self.root if self.power_norm == "rms" else n).tanh())
        if self.angle == "relu_split":
            return self.split(self.scale * d, p), self.split(k, self.power)
        phi_q = self.rotate(power((self.scale * d).abs(), p), q, d)
        return phi_q, self.rotate(power(k.abs(), self.power), k, k / length(k))

    @staticmethod
    def split(x: Tensor, exponent: Tensor | float) -> Tensor:
        return power(torch.cat([x.relu(), (-x).relu()], -1), exponent)

    def extra_repr(self) -> str:
        return f"angle={self.angle}, power={self.power}, power_norm={self.power_norm}, scale={self.scale:.4g}"


FEATURE_MAPS = {
    "identity": partial(Elementwise, lambda x: x),
    "silu": partial(Elementwise, F.silu),
    "relu": partial(Elementwise, F.relu),
    "elu1": partial(Elementwise, lambda x: 1 + F.elu(x)),
    "nala": NaLa,
    "nala_paper": partial(NaLa, angle="direction", power=3.0, power_norm="raw", direction_scale="unit"),
    "nala_released": partial(NaLa, angle="relu_split", power=3.0, power_norm="raw", direction_scale="unit"),
}


def build_feature_map(name: str, *, num_heads: int, head_dim: int, **options) -> FeatureMap:
    """The map called `name` for `num_heads` heads of `head_dim` features.

    Raises ValueError for an unknown name or a bad value, TypeError for an option that the map does not have.
    """
    if name not in FEATURE_MAPS:
        raise ValueError(f"unknown feature_map {name!r}: choose one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name](num_heads=num_heads, head_dim=head_dim, **options)
