"""Differences of losses: how they are written, and their variance over documents."""

import numpy as np

from nalanda.compare.verdict import Gap


def signed(number: float, form: str) -> str:
    """`+0.012`, `−0.012`, with `form` such as `.3f`."""
    return f"{number:+{form}}".replace("-", "−", number < 0)


def write_gap(gap: Gap | None, digits: int, factor: float = 1.0) -> str:
    """`+0.00120 [+0.00080, +0.00160]`, times `factor`."""
    if gap is None:
        return "without two pairs"
    mean, low, high = (signed(x * factor, f".{digits}f") for x in (gap.mean, gap.low, gap.high))
    return f"{mean} [{low}, {high}]"


def half_width(gap: Gap) -> float:
    return (gap.high - gap.low) / 2


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
