"""The shuffle: permutations computed from a key instead of drawn, and the turns of a mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b

import numpy as np

ROUNDS = 6
"""Rounds of the Feistel network; four make a pseudo-random permutation (Luby and Rackoff 1988)."""


class Permutation:
    """A pseudo-random permutation of `range(size)`. Called with positions, int64 [N], it gives their values.

    It takes no memory. A Feistel network permutes pairs of k-bit halves, with the least k for which 4^k ≥
    size. A value outside of the range is permuted again until it falls inside. That keeps the map one to one
    (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The round function is
    splitmix64's finaliser (Steele, Lea and Flood 2014): it shuffles well and keeps no secret.
    """

    def __init__(self, size: int, key: str):
        self.size = size
        # k = ⌈bits / 2⌉, so 4^k is at most 4 · size and a value is inside after a few turns.
        self.half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        keys = blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(keys, "<u8").astype(np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        # uint64 [N], since the bits are mixed modulo 2^64.
        values = self._permute_once(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self.size)):
            values[outside] = self._permute_once(values[outside])
        return values.astype(np.int64)

    def _permute_once(self, values: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self.half) - np.uint64(1)
        # The halves, k bits each, uint64 [N].
        left, right = values >> self.half, values & mask
        # A round is undone by itself, whatever the round function, so all of them are one to one.
        for key in self.keys:
            left, right = right, left ^ (_mix_bits(right ^ key) & mask)
        return left << self.half | right


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest integers in proportion to the weights. These are read as decimals: 0.7 is 7/10."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * scale) for weight in exact]
    return [number // math.gcd(*numbers) for number in numbers]


def next_source(weights: Sequence[int], counts: Sequence[int]) -> int:
    """The source that gives the next row after `counts` rows of each.

    Every count stays within 1 of its share of the sum. Among the sources not ahead of their share, the next
    row is from the one that is due first. This is the quota method of Balinski and Young (1975); as a
    schedule, earliest deadline first.
    """
    total, number = sum(weights), sum(counts) + 1
    # Below its share, count < number · weight / total, without a division.
    ready = [i for i, count in enumerate(counts) if count * total < weights[i] * number]
    # The next row of a source is due at (count + 1) / weight; fractions compare exactly.
    return min(ready, key=lambda i: Fraction(counts[i] + 1, weights[i]))
