"""Differences of losses with intervals: paired by seed, and by document."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats


def signed(number: float, form: str) -> str:
    """`+0.012`, `−0.012`, with `form` such as `.3f`."""
    return f"{number:+{form}}".replace("-", "−", number < 0)


@dataclass(frozen=True)
class Gap:
    """A difference, the half width of its 95 % interval, and the p of its being 0."""

    mean: float
    half: float
    p: float
    seeds: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def text(self, digits: int = 3) -> str:
        return f"{signed(self.mean, f'.{digits}f')} ± {self.half:.{digits}f}"


def paired_gap(a: np.ndarray, b: np.ndarray) -> Gap:
    """a − b, values by seed, with Student's t over the seeds' differences."""
    differences = np.subtract(a, b)
    n = len(differences)
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    if not error:
        return Gap(mean, 0.0, float(mean == 0), n)
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    return Gap(mean, float(stats.t.ppf(0.975, n - 1)) * error, p, n)


def document_variance(a: np.ndarray, b: np.ndarray, tokens: np.ndarray) -> float:
    """The sampling variance over documents of the difference in nats a token.

    The difference is a ratio of sums over documents, and its variance that of the usual linearisation.

    Args:
        a: sums of nats, `[seeds, documents]`.
        b: the same of the other model.
        tokens: `[documents]`.
    """
    n = len(tokens)
    if n < 2:
        return 0.0
    differences = (a - b).mean(0)
    ratio = differences.sum() / tokens.sum()
    residuals = differences - ratio * tokens
    return float(n / (n - 1) * (residuals**2).sum() / tokens.sum() ** 2)


def holm(ps: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's adjusted p of each test."""
    adjusted, least = {}, 0.0
    for i, name in enumerate(sorted(ps, key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - i) * ps[name]))
        adjusted[name] = least
    return adjusted
