"""Feature maps as kernels see them: a description by constants, and the parameters of those that have any."""

import ast
import functools
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nalanda_kernels import Unsupported

NAMES = ("identity", "silu", "relu", "elu", "elu1", "exp", "nala", "pola")


@dataclass(frozen=True)
class Map:
    """A feature map, a compile-time constant of kernels.

    name: identity, silu, relu, elu, elu1, exp, nala or pola.
    angle (raw, relu_split, or direction: α·d(x)), power (λ), n_scale (ν: n = ‖q‖ν), scale (s; 0: q itself):
        of NaLa. query_power, key_power: the exponents of q and k; for q 0 stands for p(n).
    alpha: of NaLa the factor in θ = π/4·tanh(α·d(x)), of Pola the span of exponents.
    scaled: whether Pola has a scale.
    l2: whether features are divided by √(Σφ² + 1e-6).
    halves: the number of tiles of width K that the features fill, 1 or 2.
    """

    name: str = "identity"
    angle: str = ""
    power: float = 1.0
    n_scale: float = 1.0
    scale: float = 1.0
    alpha: float = 1.0
    scaled: bool = False
    l2: bool = False
    halves: int = 1
    query_power: float = 0.0
    key_power: float = 1.0

    def text(self) -> str:
        """The map as an argument of an operator."""
        return ",".join(repr(getattr(self, name)) for name in self.__dataclass_fields__)

    @staticmethod
    @functools.cache
    def parse(text: str) -> "Map":
        return Map(*ast.literal_eval(f"({text})"))


def describe(feature_map, qk_norm: str | None, head_dim: int) -> tuple[Map, tuple[Any, ...]]:
    """The map as a constant of kernels, and its parameters (Pola's w, and s if it has one).

    Raises Unsupported for maps that kernels cannot form: those without a known `fused` description.
    """
    l2 = qk_norm == "l2"
    fused: Any = {"name": "identity"}
    if feature_map is not None:
        fused = getattr(feature_map, "fused", None)
        if fused is None:
            raise Unsupported(f"the feature map {type(feature_map).__name__}")

    # A norm may stand in the map or follow it, but not both.
    name, norm = fused["name"], fused.get("norm")
    if name not in NAMES:
        raise Unsupported(f"the feature map {name!r}")
    if norm is not None and (norm != "l2" or l2):
        raise Unsupported(f"norm={norm!r} inside the map with qk_norm={qk_norm!r}")

    l2 = l2 or norm == "l2"
    root = head_dim**0.5

    if name == "nala":
        # Older exports name α = 1 and √K, and have no power where both exponents are constants.
        angle = {"direction": 1.0, "rms": root}.get(fused["angle"], fused["angle"])
        directed = not isinstance(angle, str)
        options: dict[str, Any] = {
            "angle": "direction" if directed else angle,
            "alpha": float(angle) if directed else 1.0,
            "power": float(fused["power"] or 0.0),
            "n_scale": 1 / root if fused["power_norm"] == "rms" else 1.0,
            "scale": {"sqrt": root, "unit": 1.0, "none": 0.0}[fused["direction_scale"]],
            "query_power": fused["query_power"] or 0.0,
            "key_power": fused["key_power"],
        }
        return Map("nala", l2=l2, halves=2, **options), ()

    if name == "pola":
        w, s = fused["parameters"]
        if w.is_meta:
            raise Unsupported("offloaded weights of a feature map")
        pola = Map("pola", alpha=fused["alpha"], scaled=s is not None, l2=l2, halves=2)
        return pola, (w,) if s is None else (w, s)
    return Map(name, l2=l2), ()


def exponents_and_units(
    MAP: Map, parameters: tuple[Tensor, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Pola's 1 + α σ(w) and 1/softplus(s), fp32 `[H, K]`, which torch differentiates; None for what a map lacks."""
    if MAP.name != "pola":
        return None, None
    # Few entries beside those of q and k, so torch's own operators cost nothing here. Kernels read them without gaps.
    w, *s = (x.float().contiguous() for x in parameters)
    p = 1 + MAP.alpha * w.sigmoid()
    return p, F.softplus(s[0]).reciprocal() if MAP.scaled else None
