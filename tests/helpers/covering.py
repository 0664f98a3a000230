"""Few cases of a large product that hold every pair of its values: these are quick, the others are slow."""

import itertools
from collections.abc import Hashable, Sequence

import pytest

Case = tuple[Hashable, ...]


def covering_cases(cases: Sequence[Case]) -> set[Case]:
    """Cases in which every pair of values of two axes occurs that occurs in any of `cases`."""
    axes = [list(dict.fromkeys(axis)) for axis in zip(*cases, strict=True)]
    places = [{value: place for place, value in enumerate(axis)} for axis in axes]

    def diagonal(case: Case) -> int:
        """Neighbours on a diagonal share no value, so they have no pair in common."""
        ranks = [ranks_of[value] for ranks_of, value in zip(places, case, strict=True)]
        return sum(ranks) % max(map(len, axes))

    ordered = sorted(cases, key=diagonal)
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in ordered}
    chosen, seen = set(), set()

    # Cases with many new pairs come first, so that few are needed.
    for new in range(len(axes) * (len(axes) - 1) // 2, 0, -1):
        for case in ordered:
            if len(pairs[case] - seen) >= new:
                chosen.add(case)
                seen |= pairs[case]
    return chosen


def covering(**axes: Sequence[Hashable]) -> pytest.MarkDecorator:
    """Parametrizes a test by the product of the axes, of which the cases outside a covering are slow."""
    cases = list(itertools.product(*axes.values()))
    quick = covering_cases(cases)
    rows = [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(tuple(axes), rows)
