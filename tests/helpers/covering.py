"""Few cases of a large product that hold every pair of its values.

Under the mark `sampled` (tests/conftest.py) a fifteenth of them is fast, and the others are slow.
"""

import collections
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence

import pytest

Case = tuple[Hashable, ...]


def covering_cases(cases: Sequence[Case], strength: int = 2, times: int = 1) -> set[Case]:
    """Few of the cases, in which every pair of values occurs that occurs in any of them.

    strength: 1 for single values instead of pairs, 3 for triples.
    times: how often each occurs, where there are as many cases.
    """
    axes = [list(dict.fromkeys(axis)) for axis in zip(*cases, strict=True)]
    places = [{value: place for place, value in enumerate(axis)} for axis in axes]

    def diagonal(case: Case) -> int:
        """Cases of one diagonal seldom share values, so they have few pairs in common."""
        ranks = [ranks_of[value] for ranks_of, value in zip(places, case, strict=True)]
        return sum(ranks) % max(map(len, axes))

    ordered = sorted(cases, key=diagonal)
    groups = {case: list(itertools.combinations(enumerate(case), strength)) for case in ordered}
    chosen, seen = set(), collections.Counter()

    # Cases with many new groups come first, so that few are needed.
    for wanted in range(math.comb(len(axes), strength), 0, -1):
        for case in ordered:
            new = sum(seen[group] < times for group in groups[case])
            if new >= wanted and case not in chosen:
                chosen.add(case)
                seen.update(groups[case])
    return chosen


def slow_but_for(quick: Iterable, values: Iterable) -> list:
    """`values` as rows of a test. Those that are not among `quick` are slow."""
    quick = list(quick)
    return [pytest.param(v, marks=() if v in quick else pytest.mark.slow) for v in values]


def covering(strength: int = 2, times: int = 1, **axes: Iterable[Hashable]) -> pytest.MarkDecorator:
    """Parametrizes a test by the covering of the axes' product."""
    cases = list(itertools.product(*axes.values()))
    chosen = covering_cases(cases, strength, times)
    return pytest.mark.parametrize(tuple(axes), [case for case in cases if case in chosen])
