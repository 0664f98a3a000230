"""Feature maps φ for queries and keys. A new one is a class here and a row in `FEATURE_MAPS`."""

import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    Fp32Module,
    altered,
    at_least_fp32,
    direction,
    fp32_parameter,
    no_autocast,
    once_differentiable,
    run,
)
from .options import check_names, check_types, did_you_mean
from .plugins import register
from .soft import INVERSES, gaussian_kernel, landmark_weights

EPS = 1e-6  # in every root, and the floor of every base of a power


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, base: Tensor, exponent: Tensor | float) -> Tensor:
        ctx.exponent = None if isinstance(exponent, Tensor) else exponent
        # y is 0 where the base is at most EPS, and so is dy·y, from which both gradients come.
        y = F.threshold(base, EPS, 0.0).pow(exponent)
        ctx.save_for_backward(base, y, exponent if ctx.exponent is None else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        base, y, exponent = ctx.saved_tensors
        base, dy = base.clamp_min(EPS), dy * y  # the clamp keeps log and quotient finite
        d_exponent = None
        if ctx.needs_input_grad[1]:
            d_exponent = (base.log() * dy).sum_to_size(exponent.shape)
        # d base = p base^(p−1) dy = p y dy / base
        return dy.mul_(ctx.exponent if exponent is None else exponent).div_(base), d_exponent


def power(base: Tensor, exponent: Tensor | float) -> Tensor:
    """base^exponent for base ≥ 0 and exponent > 0, and exactly 0 (value and gradient) where base ≤ 1e-6."""
    if torch.compiler.is_compiling():  # see `direction`
        return torch.where(base > EPS, base.clamp_min(EPS).pow(exponent), 0.0)
    return run(_Power, base, exponent)


class _Polar(torch.autograd.Function):
    @staticmethod
    def forward(ctx, magnitude: Tensor, argument: Tensor, scale: float) -> Tensor:
        share = (scale * argument).tanh_()  # θ as a share of π/4
        theta = math.pi / 4 * share
        cos, sin = theta.cos(), theta.sin()
        ctx.scale = scale
        ctx.save_for_backward(magnitude, share, cos, sin)
        return torch.cat([magnitude * cos, magnitude * sin], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        magnitude, share, cos, sin = ctx.saved_tensors
        dx, dy = dy.chunk(2, -1)
        # dθ = m (dy cos θ − dx sin θ), for y = [m cos θ; m sin θ]
        d_theta = (dy * cos).addcmul_(dx, sin, value=-1).mul_(magnitude)
        # dθ/d argument = π/4 · scale · (1 − tanh²)
        slope = (share * share).sub_(1).mul_(-math.pi / 4 * ctx.scale)
        return (dx * cos).addcmul_(dy, sin), d_theta.mul_(slope), None


def polar(magnitude: Tensor, argument: Tensor, scale: float = 1.0) -> Tensor:
    """magnitude ⊙ [cos θ; sin θ], θ = π/4·tanh(scale·argument): twice as many features."""
    if torch.compiler.is_compiling():  # see `direction`
        theta = math.pi / 4 * (scale * argument).tanh()
        return torch.cat([magnitude * theta.cos(), magnitude * theta.sin()], -1)
    return run(_Polar, magnitude, argument, scale)


def split_signs(x: Tensor) -> Tensor:
    """[relu(x); relu(−x)], twice as many features."""
    return torch.cat([x.relu(), (-x).relu()], -1)


def identity(x: Tensor) -> Tensor:
    return x


def elu1(x: Tensor) -> Tensor:
    return 1 + F.elu(x)


def exp(x: Tensor) -> Tensor:
    """e^min(x, 10): finite in all dtypes (e^11.1 overflows fp16) and in sums over time; no gradient above 10.

    Subtracting a token's maximum instead would be exact only for q, and only with a denominator.
    """
    return x.clamp_max(10).exp()


class FeatureMap(nn.Module):
    """`forward(q, k) → (φ_q, φ_k)`, `[B, T, H, K] → [B, T, H, feature_dim]`.

    It computes in fp32 at least, because intermediates overflow fp16, and returns that precision. The
    contract of a map is in `base.py`.
    """

    equation: str
    source: str
    feature_dim: int
    flops: float = 0.0
    """FLOPs of matrix products per token and head."""
    nonnegative: bool = False
    """Whether φ_q·φ_k ≥ 0 for all q and k, which a readout with a denominator needs."""

    def __init__(self) -> None:
        super().__init__()
        # Read here, because sharding wrappers make a module's class a subclass.
        self._states_settings = "kernel_settings" in vars(type(self))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @property
    def fused(self) -> dict | None:
        """Settings for kernels that compute the map themselves; None: only a call of the module computes it.

        A class states them in a method `kernel_settings` of its own body. It is not inherited, because a
        subclass may change the map; one that only sets options writes `kernel_settings = Parent.kernel_settings`.
        """
        return self.kernel_settings() if self._states_settings and not altered(self) else None

    def kernel_settings(self) -> dict | None:
        raise NotImplementedError


class OneFunction(FeatureMap):
    """Maps with the same function of q and of k, `features`."""

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.features(q), self.features(k)


class Elementwise(OneFunction):
    """One function f of every entry of q and k; `K` features, O(K) FLOPs per token and head.

    identity: x. silu: x·σ(x) (DeltaNet, Gated DeltaNet). relu: max(x, 0). elu: ELU(x) (TransNormer T1).
    elu1: 1 + ELU(x) (Linear Transformer, TransNormer T2, MALA). exp: e^min(x, 10), see `exp`.

    norm: None; `l2`: f/√(Σf² + 1e-6); `sum`: f/(Σf + 1e-6), for nonnegative functions.
    """

    def __init__(
        self,
        function,
        nonnegative: bool,
        equation: str,
        source: str = "–",
        *,
        num_heads: int,
        head_dim: int,
        norm: str | None = None,
    ):
        super().__init__()
        self.equation, self.source = equation, source
        if norm not in (None, "l2", "sum"):
            raise ValueError(f"norm={norm!r} must be l2, sum or None")
        if norm == "sum" and not nonnegative:
            raise ValueError(
                "norm='sum' divides by nearly 0 where signs cancel: use norm='l2' or another map"
            )
        self.function, self.norm, self.nonnegative = function, norm, nonnegative
        self.feature_dim = head_dim

    def features(self, x: Tensor) -> Tensor:
        phi = self.function(at_least_fp32(x))
        if self.norm == "l2":
            return direction(phi, EPS)[0]
        if self.norm == "sum":
            return phi / (phi.sum(-1, keepdim=True) + EPS)
        return phi

    def kernel_settings(self) -> dict | None:
        # The function tells which map this is: all rows of this kind share the class.
        for name, row in FEATURE_MAPS.items():
            if getattr(row, "args", ())[:1] == (self.function,):
                return {"name": name, "norm": self.norm}
        return None  # a function of another module

    def extra_repr(self) -> str:
        return f"norm={self.norm}"


def raised_to(exponent: float) -> str:
    """An exponent in an equation, none for 1."""
    return "" if exponent == 1 else f"^{exponent:g}"


class NaLa(FeatureMap):
    """NaLaFormer's map with cosine angles; `2K` features, O(K) FLOPs per token and head.

    With d(x) = x/‖x‖ and p(n) = λ(½ + tanh n):

        φ_q(q) = |s·d(q)|^p(n) ⊙ [cos θ(q); sin θ(q)],    φ_k(k) = |k|^λ ⊙ [cos θ(k); sin θ(k)]

    Every term |s·d_i|^p |k_i|^λ cos(θ_q,i − θ_k,i) of φ_q·φ_k is ≥ 0, because |θ| ≤ π/4. The paper leaves λ
    and the argument of θ open; each reading is an option:

    angle: θ = π/4·tanh(α·d(x)). A number is α, `rms` is α = √K, `direction` is α = 1. `raw` is
        θ = π/4·tanh(x). `relu_split` has no angle and splits the signs instead, [relu(x)^p; relu(−x)^p], as
        the authors' vision code does: the limit of α → ∞. The larger α, the further apart are the signs:
        cos(θ_q,i − θ_k,i) of opposite ones is 0.99 on average for α = 1 at K = 64, 0.61 for √K, 0.30 for 20.
    power: λ. For λ ≥ 2 every exponent is ≥ 1 and the slope at 0 is bounded. For less it can reach 500
        (λ = 1), and a warning says so.
    power_norm: n = ‖q‖ (`raw`) or ‖q‖/√K (`rms`). At K = 128, `raw` saturates tanh, and p is constant.
    direction_scale: s = 1 (`unit`) or √K (`sqrt`); `none` raises q itself, |q|^p(n). L2 normalisation cancels
        s, but `sqrt` keeps squares of features above that norm's epsilon.
    signs: `drop`, |x|^p, as in the paper. `keep`, sgn(x)|x|^p, for the delta rules: φ_q·φ_k may be negative,
        and their readout has no denominator. `elu`, (1 + ELU(x))^p, which is positive and rises with x.
    query_power: a constant exponent of q in place of p(n). ‖q‖ then acts only through the `raw` angle.
    key_power: the exponent of k, if not λ.

    The L2 norm of the delta rules cancels ‖k‖ exactly under every angle but `raw`. Of ‖q‖ only p(n) remains,
    which `power_norm` raw saturates. In these rules norm_write and norm_read let lengths act (`delta.py`).
    """

    source = "arXiv 2506.21137"
    ANGLES = ("direction", "rms", "raw", "relu_split")
    nonnegative = True

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        angle: str | float = "rms",
        power: float = 2.0,
        power_norm: str = "rms",
        direction_scale: str = "sqrt",
        signs: str = "drop",
        query_power: float | None = None,
        key_power: float | None = None,
    ):
        super().__init__()
        for option, value, allowed in (
            ("power_norm", power_norm, ("raw", "rms")),
            ("direction_scale", direction_scale, ("unit", "sqrt", "none")),
            ("signs", signs, ("drop", "keep", "elu")),
        ):
            if value not in allowed:
                raise ValueError(f"nala: {option}={value!r} must be one of {', '.join(allowed)}")

        if isinstance(angle, str) and angle not in self.ANGLES:
            raise ValueError(
                f"nala: angle={angle!r} must be a number or one of {', '.join(self.ANGLES)}"
            )

        numbers = {"power": power, "query_power": query_power, "key_power": key_power}
        if not isinstance(angle, str):
            numbers["angle"] = angle
        for option, value in numbers.items():
            if value is not None and not value > 0:
                raise ValueError(f"nala: {option}={value} must be positive")

        if signs != "drop" and angle == "relu_split":
            raise ValueError(
                "nala: angle=relu_split splits the signs: take another angle, or signs=drop"
            )

        self.root = math.sqrt(head_dim)
        self.angle, self.power_norm, self.direction_scale, self.signs = (
            angle,
            power_norm,
            direction_scale,
            signs,
        )
        alphas: dict[str | float, float] = {"direction": 1.0, "rms": self.root}
        self.alpha = alphas.get(angle, angle)  # a number, "raw" or "relu_split"
        self.power = float(power)
        self.query_power = None if query_power is None else float(query_power)
        self.key_power = self.power if key_power is None else float(key_power)
        self.scale = {"unit": 1.0, "sqrt": self.root, "none": None}[direction_scale]
        self.nonnegative = signs != "keep"
        self.feature_dim = 2 * head_dim
        self.equation = self._equation()
        self._warn_of_steep_slopes()

    def _warn_of_steep_slopes(self) -> None:
        option, value, least = "power", self.power, 2  # p(n) > λ/2
        if self.query_power is not None:
            option, value, least = "query_power", self.query_power, 1

        smallest = value / least
        if smallest < 1 and self.signs != "elu":  # (1 + ELU(x))^p has slope p at 0
            warnings.warn(
                f"nala: {option}={value:g} has exponents below 1, with slopes at 0 of up to "
                f"{smallest * EPS ** (smallest - 1):.3g}: set {option} to {least} or more",
                stacklevel=3,
            )

    def _equation(self) -> str:
        of_q = "^p" if self.query_power is None else raised_to(self.query_power)
        of_k = (
            "^λ"
            if self.key_power == self.power and self.query_power is None
            else raised_to(self.key_power)
        )
        base = {"unit": "d(q)", "sqrt": "√K d(q)", "none": "q"}[self.direction_scale]

        if self.angle == "relu_split":
            parts = f"[relu({base}); relu(−{base})]{of_q}, [relu(k); relu(−k)]{of_k}"
        else:
            named = {"direction": "d(x)", "rms": "√K d(x)", "raw": "x"}
            argument = named[self.angle] if isinstance(self.angle, str) else f"{self.angle:g} d(x)"
            powers = {"drop": "|{x}|{p}", "keep": "sgn({x}) |{x}|{p}", "elu": "(1 + ELU({x})){p}"}[
                self.signs
            ]
            first, second = powers.format(x=base, p=of_q), powers.format(x="k", p=of_k)
            parts = f"{first} ⊙ [cos θ; sin θ], {second} ⊙ [cos θ; sin θ], θ = π/4 tanh({argument})"

        if self.query_power is None:
            length = "‖q‖/√K" if self.power_norm == "rms" else "‖q‖"
            parts += f", p = λ(½ + tanh({length})), λ = {self.power:g}"
        return parts

    def rotate(self, magnitude: Tensor, x: Tensor, d: Tensor) -> Tensor:
        if isinstance(self.alpha, str):
            return polar(magnitude, x)
        return polar(magnitude, d, self.alpha)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = at_least_fp32(q), at_least_fp32(k)
        d, n = direction(q, EPS)  # d(q) [B, T, H, K] and ‖q‖ [B, T, H, 1]
        p, r = self.exponents(n)  # each [B, T, H, 1], [H, 1] or a number
        base = q if self.scale is None else self.scale * d  # s·d(q)

        if self.alpha == "relu_split":
            return self.split(base, p), self.split(k, r)
        raised_q, raised_k = self.magnitude(base, p), self.magnitude(k, r)  # [B, T, H, K]
        return self.rotate(raised_q, q, d), self.rotate(raised_k, k, direction(k, EPS)[0])

    def exponents(self, n: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Those of q and k, for the lengths n of the queries, `[B, T, H, 1]`."""
        if self.query_power is not None:
            return self.query_power, self.key_power
        n = n / self.root if self.power_norm == "rms" else n
        return self.power * (0.5 + n.tanh()), self.key_power

    def magnitude(self, x: Tensor, exponent: Tensor | float) -> Tensor:
        if self.signs == "elu":
            return power(1 + F.elu(x), exponent)
        raised = power(x.abs(), exponent)
        return raised * x.sign() if self.signs == "keep" else raised

    def kernel_settings(self) -> dict | None:
        if self.signs != "drop":  # kernels raise |x| alone
            return None
        options = ("power", "power_norm", "direction_scale", "query_power", "key_power")
        return {"name": "nala", "angle": self.alpha} | {
            option: getattr(self, option) for option in options
        }

    @staticmethod
    def split(x: Tensor, exponent: Tensor | float) -> Tensor:
        return power(split_signs(x), exponent)

    def extra_repr(self) -> str:
        exponents = f"power={self.power:g}, power_norm={self.power_norm}"
        if self.query_power is not None:
            exponents = f"query_power={self.query_power:g}, key_power={self.key_power:g}"
        return f"angle={self.angle}, {exponents}, direction_scale={self.direction_scale}"


class Angle(NaLa):
    """`NaLa` without exponents, |√K d(q)| ⊙ [cos θ; sin θ] and |k| ⊙ [cos θ; sin θ]; `2K` features.

    The options are those of `NaLa`. Exponents that are set are constants, so ‖q‖ has no effect on them.
    """

    kernel_settings = NaLa.kernel_settings

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        angle: str | float = "rms",
        direction_scale: str = "sqrt",
        signs: str = "drop",
        query_power: float = 1.0,
        key_power: float = 1.0,
    ):
        super().__init__(
            num_heads=num_heads,
            head_dim=head_dim,
            angle=angle,
            direction_scale=direction_scale,
            signs=signs,
            query_power=query_power,
            key_power=key_power,
        )


class LearnedNaLa(Fp32Module, Angle):
    """`NaLa` with exponents that each head learns, `a` and `b` `[H]`; `2K` features.

        p_h = 1 + softplus(a_h) + b_h·tanh(‖q‖/√K) for q,    1 + softplus(a_h) for k

    It starts as nearly the angle alone, a = −4 and b = 0. p is ½ at least, where a power's slope is 500.

    angle: as in `NaLa`.
    """

    source = "–"

    def __init__(self, *, num_heads: int, head_dim: int, angle: str | float = "rms"):
        super().__init__(num_heads=num_heads, head_dim=head_dim, angle=angle)
        powers = self.equation.replace("d(q)|", "d(q)|^p").replace("|k|", "|k|^r")
        self.equation = f"{powers}, r = 1 + softplus(a), p = r + b tanh(‖q‖/√K)"
        self.a = fp32_parameter(num_heads)
        self.b = fp32_parameter(num_heads)

    def initial(self) -> dict[str, Tensor]:
        return {"a": torch.full_like(self.a, -4), "b": torch.zeros_like(self.b)}

    def extra_repr(self) -> str:
        return f"angle={self.angle}"

    def exponents(self, n: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (x.to(n.dtype)[:, None] for x in (self.a, self.b))
        r = 1 + F.softplus(a)  # [H, 1] beside n [B, T, H, 1]
        return (r + b * (n / self.root).tanh()).clamp_min(0.5), r


class ShiftedSiLU(Fp32Module, OneFunction):
    """SiLU(x + b), b `[H, K]` learnt, shared by q and k; `K` features. b gives all features a common part.

    shift: where b starts. With 0.22 the mean cosine of φ(q_t) and φ(k_j), j < t, is 0.3 (without: 0.03) in an
        untrained Gated DeltaNet of 2 M parameters (random tokens), whose queries
        and keys have a spread of 0.40 behind their convolutions. The value is in proportion to that spread.
    """

    equation = "SiLU(x + b)"
    source = "–"

    def __init__(self, *, num_heads: int, head_dim: int, shift: float = 0.22):
        super().__init__()
        self.shift, self.feature_dim = float(shift), head_dim
        self.b = fp32_parameter(num_heads, head_dim)

    def initial(self) -> dict[str, Tensor]:
        return {"b": torch.full_like(self.b, self.shift)}

    def features(self, x: Tensor) -> Tensor:
        x = at_least_fp32(x)
        return F.silu(x + self.b.to(x.dtype))

    def extra_repr(self) -> str:
        return f"shift={self.shift:g}"


class Pola(Fp32Module, OneFunction):
    """PolaFormer's polarity-aware map; `2K` features, O(K) FLOPs per token and head.

        φ(x) = [relu(x)^p; relu(−x)^p],    p = 1 + α·σ(w),    w `[H, K]` learnt, shared by q and k.

    φ_q·φ_k sums the pairs of equal signs, and `opposite(φ_q)·φ_k` those of opposite signs. At p = 1 (w → −∞)
    their difference is q·k.

    alpha: α > 0, the span of the exponents; they start at 1 + α/2 (w = 0).
    scale: whether q and k are first divided by softplus(s), s `[H, K]` learnt, as in the authors' code. It
        starts at s = ln(e − 1), so that softplus(s) = 1; the authors start at s = 0, where it is ln 2.
    """

    equation = "[relu(x)^p; relu(−x)^p], p = 1 + α σ(w)"
    source = "arXiv 2501.15061"
    nonnegative = True

    def __init__(self, *, num_heads: int, head_dim: int, alpha: float = 4.0, scale: bool = True):
        super().__init__()
        if not alpha > 0:
            raise ValueError(f"pola: alpha={alpha} must be positive")
        self.alpha = float(alpha)
        self.feature_dim = 2 * head_dim
        self.w = fp32_parameter(num_heads, head_dim)
        self.s = fp32_parameter(num_heads, head_dim) if scale else None

    def initial(self) -> dict[str, Tensor]:
        values = {"w": torch.zeros_like(self.w)}
        if self.s is not None:
            values["s"] = torch.full_like(self.s, math.log(math.e - 1))
        return values

    def features(self, x: Tensor) -> Tensor:
        x = at_least_fp32(x)
        if self.s is not None:
            x = x / F.softplus(self.s.to(x.dtype))
        p = 1 + self.alpha * self.w.to(x.dtype).sigmoid()  # [H, K], from 1 to 1 + α
        return power(split_signs(x), torch.cat([p, p], -1))

    def kernel_settings(self) -> dict:
        return {"name": "pola", "alpha": self.alpha, "parameters": (self.w, self.s)}

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}, scale={self.s is not None}"


def opposite(phi_q: Tensor) -> Tensor:
    """`Pola`'s query of opposite signs, [q⁻; q⁺] from [q⁺; q⁻] `[…, 2K]`."""
    return phi_q.roll(phi_q.shape[-1] // 2, -1)


class PolaPP(Fp32Module, FeatureMap):
    """PolaFormer++'s map, by its authors' code; `2K` features, O(K) FLOPs per token and head.

        φ(q) = e^(s ⊙ [relu(q); relu(−q)]) − 1,    φ(k) = e^[relu(k); relu(−k)] − 1,    s = σ(a), a `[H, 2K]` learnt.

    s starts at ½. Entries above 10 count as 10, as in `exp`. The query of opposite signs is `opposite(φ(q))`;
    the authors learn an s of its own for it.
    """

    equation = "q: e^(s [relu(q); relu(−q)]) − 1, s = σ(a); k: s = 1"
    source = "arXiv 2501.15061"
    nonnegative = True

    def __init__(self, *, num_heads: int, head_dim: int):
        super().__init__()
        self.feature_dim = 2 * head_dim
        self.a = fp32_parameter(num_heads, 2 * head_dim)

    def initial(self) -> dict[str, Tensor]:
        return {"a": torch.zeros_like(self.a)}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (split_signs(at_least_fp32(x)).clamp_max(10) for x in (q, k))
        s = self.a.to(q.dtype).sigmoid()
        return torch.expm1(s * q), torch.expm1(k)


class Soft(Fp32Module, FeatureMap):
    """SOFT with learnt landmarks Z `[H, m, K]`, for causal readouts; pooled ones would leak the future.

        φ_q(q) = κ(q, Z) W,    φ_k(k) = κ(k, Z),    κ(q, k) = exp(−‖q − k‖²/(2√K)),

    with W = (A + ρI)^-1 and A = κ(Z, Z), computed once per forward. φ_q·φ_k is the (q, k) entry of the
    regularised Nyström approximation and may be negative. A causal mask keeps the entries, but the masked
    matrix is not PSD. `m` features; 2m(2K + m) FLOPs per token and head. W costs O(m²(m + K)) per forward and
    head, or O(m³) per Newton iteration.

    landmarks: m. They start with variance K^-½ per coordinate, so that they do not coincide.
    ridge: ρ ≥ 0. The papers have none; A is then singular if landmarks come close to one another.
    inverse: `cholesky`, or the papers' `newton`, whose 20 iterations serve condition numbers below 300.
    iterations: of Newton.
    """

    equation = "κ(q, Z) (κ(Z, Z) + ρI)⁻¹, κ(k, Z)"
    source = "arXiv 2110.11945"
    normalized = False

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        landmarks: int = 64,
        ridge: float = 0.01,
        inverse: str = "cholesky",
        iterations: int = 20,
    ):
        super().__init__()
        for option, value in (("landmarks", landmarks), ("iterations", iterations)):
            if value < 1:
                raise ValueError(f"soft: {option}={value!r} must be a positive integer")
        if not ridge >= 0:
            raise ValueError(f"soft: ridge={ridge} must be 0 or more")
        if inverse not in INVERSES:
            raise ValueError(f"soft: inverse={inverse!r} must be one of {', '.join(INVERSES)}")
        self.ridge, self.inverse, self.iterations = float(ridge), inverse, iterations
        self.feature_dim = landmarks
        self.flops = 2.0 * landmarks * (2 * head_dim + landmarks)
        self.landmarks = fp32_parameter(num_heads, landmarks, head_dim)

    def initial(self) -> dict[str, Tensor]:
        return {"landmarks": torch.randn_like(self.landmarks) * self.landmarks.shape[-1] ** -0.25}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        with no_autocast(q):
            q, k = (at_least_fp32(x).transpose(1, 2) for x in (q, k))  # [B, H, T, K]
            Z = self.landmarks.to(q.dtype)
            # W [H, m, m] is of the landmarks alone, so all tokens share it.
            W = landmark_weights(Z, self.ridge, self.normalized, self.inverse, self.iterations)
            phi_q, phi_k = gaussian_kernel(q, Z) @ W, gaussian_kernel(k, Z)
        return phi_q.transpose(1, 2), phi_k.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"landmarks={self.feature_dim}, ridge={self.ridge:g}, inverse={self.inverse}"


class SoftPP(Soft):
    """SOFT++: `Soft` with W = D^-½(A + ρI)^-1 D^-½, D = diag(A·1), whose norm is at most that of Soft's W."""

    equation = "κ(q, Z) D^−½ (κ(Z, Z) + ρI)⁻¹ D^−½, κ(k, Z)"
    source = "arXiv 2207.03341"
    normalized = True


FEATURE_MAPS = {
    "identity": partial(Elementwise, identity, False, "x"),
    "silu": partial(Elementwise, F.silu, False, "x σ(x)", "arXiv 2406.06484"),
    "relu": partial(Elementwise, F.relu, True, "max(x, 0)"),
    "elu": partial(Elementwise, F.elu, False, "ELU(x)", "arXiv 2210.10340"),
    "elu1": partial(Elementwise, elu1, True, "1 + ELU(x)", "arXiv 2006.16236"),
    "exp": partial(Elementwise, exp, True, "e^min(x, 10)"),
    "nala": NaLa,
    "nala_paper": partial(
        NaLa, angle="direction", power=3.0, power_norm="raw", direction_scale="unit"
    ),
    "nala_released": partial(
        NaLa, angle="relu_split", power=3.0, power_norm="raw", direction_scale="unit"
    ),
    "nala_code": partial(NaLa, angle=20.0, power=3.0, power_norm="raw", direction_scale="none"),
    "angle": Angle,
    "nala_learned": LearnedNaLa,
    "silu_shifted": ShiftedSiLU,
    "pola": Pola,
    "polapp": PolaPP,
    "soft": Soft,
    "softpp": SoftPP,
}


def register_feature_map(name: str, row: Any) -> None:
    """Adds a map of the calling module, a class or a `partial` of one, to `FEATURE_MAPS`.

    Raises ValueError for a name that is taken, or a class that lacks what the contract in `base.py` asks.
    """
    register("feature_map", name, row, FEATURE_MAPS, list(_missing_of_map(name, row)))


def _missing_of_map(name: str, row: Any) -> Iterator[str]:
    """Each demand of the contract that a map does not meet. Raises ValueError for one that cannot be built."""
    kind = getattr(row, "func", row)
    if not (isinstance(kind, type) and issubclass(kind, FeatureMap)):
        yield "is not a subclass of FeatureMap"
        return
    if kind.forward is FeatureMap.forward:
        yield "does not define forward()"
        return

    try:
        # Shapes suffice here, so no memory is filled.
        with torch.device("meta"):
            feature_map = row(num_heads=2, head_dim=4)
    except TypeError as error:
        raise ValueError(
            f"register_feature_map({name!r}): {kind.__name__} needs __init__(self, *, num_heads, "
            f"head_dim, options with defaults): {error} (the contract: nalanda/model/base.py)"
        ) from None

    for attribute in ("equation", "source", "feature_dim"):
        if not hasattr(feature_map, attribute):
            yield f"has no `{attribute}`"
    if dict(feature_map.named_parameters(recurse=False)):
        if not isinstance(feature_map, Fp32Module):
            yield "has parameters but is no Fp32Module"
        if not hasattr(feature_map, "initial"):
            yield "has parameters but no initial()"


def build_feature_map(name: str, *, num_heads: int, head_dim: int, **options) -> FeatureMap:
    """The map called `name` for `num_heads` heads of `head_dim` features.

    Raises ValueError for an unknown name or a bad value, TypeError for an unknown option.
    """
    if name not in FEATURE_MAPS:
        near = did_you_mean(name, FEATURE_MAPS)
        if name == "softmax":
            near = ", which is a mixer: set model.mixer=softmax, or"
        raise ValueError(
            f"unknown feature_map {name!r}{near or ':'} choose one of {', '.join(FEATURE_MAPS)}"
        )
    row = FEATURE_MAPS[name]
    if options.get("power", 2.0) is None:
        raise ValueError(
            f"feature_map {name} with power null is the map angle: set feature_map: angle"
        )
    try:
        check_names(options, row)
    except TypeError as error:
        raise TypeError(f"feature_map {name!r}: {error}") from None
    check_types(
        options, getattr(row, "func", row).__init__.__annotations__, f"feature_map {name!r}: "
    )
    return row(num_heads=num_heads, head_dim=head_dim, **options)
