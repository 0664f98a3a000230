"""Differences of losses with intervals: paired by seed and by document, with a pooled residual."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from nalanda.common.text import signed


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


def residual(values: np.ndarray) -> tuple[float, int]:
    """(variance, degrees of freedom) of what a system and a seed do not explain in values `[systems, seeds]`.

    Runs of a seed share weights and data, so the seed's own part leaves every difference.
    """
    rest = values - values.mean(1, keepdims=True) - values.mean(0, keepdims=True) + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    return float((rest**2).sum() / freedom), freedom


def gap_of(a: np.ndarray, b: np.ndarray, pool: tuple[float, int], documents: float = 0.0) -> Gap:
    """a − b, values by seed, with the variance of `residual`. documents: the variance that the choice of
    validation documents adds, see `document_variance`."""
    n = len(a)
    mean = float(np.mean(np.subtract(a, b)))
    variance, freedom = pool
    of_seeds = 2 * variance / n
    error = math.sqrt(of_seeds + documents)
    # Welch and Satterthwaite's degrees of freedom; the documents' variance counts as known.
    freedom = freedom * ((of_seeds + documents) / of_seeds) ** 2 if of_seeds else math.inf
    if not error:
        return Gap(mean, 0.0, float(mean == 0), n)
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    return Gap(mean, float(stats.t.ppf(0.975, freedom)) * error, p, n)


def document_variance(a: np.ndarray, b: np.ndarray, tokens: np.ndarray) -> float:
    """The sampling variance over documents of the difference in nats a token.

    a, b `[seeds, documents]`: sums of nats. tokens `[documents]`. The difference is a ratio of sums over
    documents, and its variance that of the usual linearisation.
    """
    gaps = (a - b).mean(0)
    ratio = gaps.sum() / tokens.sum()
    rest, n = gaps - ratio * tokens, len(tokens)
    return float(n / (n - 1) * (rest**2).sum() / tokens.sum() ** 2) if n > 1 else 0.0


def holm(ps: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's adjusted p of each test."""
    found, least = {}, 0.0
    for i, name in enumerate(sorted(ps, key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - i) * ps[name]))
        found[name] = least
    return found


def slopes(values: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Slopes of values `[…, budgets]` against the logarithm of the tokens, by least squares."""
    x = np.log(np.asarray(tokens, dtype=float))
    x -= x.mean()
    return values @ x / (x @ x)
