"""Generated tasks that test what a token mixer remembers and tracks.

`task.batch(draw, n, split, case)` gives inputs `[n, T]` and labels `[n, T]`, −100 where nothing is asked. A
label is at the position that must predict it, not shifted; the answer itself is not in the input. Batches
depend only on the generator's state.

Train, validation and test are disjoint. The part of an instance that determines its answers is hashed to
select its split, and `Task.kept` drops instances of other splits. Each task's docstring names that part.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nalanda.common.errors import InputError

IGNORED = -100
SPLITS = {"test": (0,), "validation": (1,), "train": (2, 3, 4, 5, 6, 7)}
"""Values of the hash, from 0 to 7."""


def hash_rows(rows: Tensor) -> Tensor:
    """A hash from 0 to 7 of each row of integers `[n, L]`: a polynomial in the entries, then mixed."""
    h = torch.zeros(len(rows), dtype=torch.int64)
    for column in rows.to(torch.int64).unbind(1):
        h = h * 6364136223846793005 + column + 1442695040888963407  # wraps around
    for shift in (33, 29):
        h = (h ^ (h >> shift)) * -49064778989728563  # 0xFF51AFD7ED558CCD of MurmurHash3
    return (h >> 40) & 7


def best_constant(labels: Tensor) -> float:
    """The accuracy of the one answer that is right most often, of those that are asked."""
    answers = labels[labels != IGNORED]
    return answers.bincount().max().item() / len(answers)


@dataclass(frozen=True)
class Task:
    """A frozen dataclass of sizes. `trained` and `cases` are the cases of training and of the tests."""

    name: str
    axis: ClassVar[str]
    """Quantity that a case gives, with its unit."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens of questions and answers together."""
        raise NotImplementedError

    @property
    def cases(self) -> tuple:
        raise NotImplementedError

    @property
    def trained(self) -> tuple:
        return self.cases

    def length(self, case) -> int:
        """The largest T of a batch of this case."""
        raise NotImplementedError

    def batch(self, draw: torch.Generator, n: int, split: str, case) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def batches(
        self, seed: int, n: int, split: str, curriculum: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches, each of one trained case.

        They depend only on the arguments: models trained with one seed see the same data in order.

        curriculum: steps in which the trained cases come in turn, each for as long, and batches have about as
            many tokens as n rows of the first. None: cases are drawn, and batches have n rows.
        """
        draw = torch.Generator().manual_seed(seed)
        cases = self.trained
        for step in itertools.count():
            if curriculum is None:
                case = cases[int(torch.randint(len(cases), (), generator=draw))]
                yield self.batch(draw, n, split, case)
            else:
                case = cases[min(len(cases) * step // curriculum, len(cases) - 1)]
                rows = max(1, n * self.length(cases[0]) // self.length(case))
                yield self.batch(draw, rows, split, case)

    def kept(self, rows: Callable[[int], Tensor], n: int, split: str) -> Tensor:
        """The first n rows of the split; `rows(m)` makes m candidates.

        Raises `InputError` if no candidate is of the split.
        """
        values = torch.tensor(SPLITS[split])
        rounds, missing = [], n
        while missing > 0:
            if missing == n and len(rounds) == 100:  # of 16 or more candidates
                raise self.too_few(split)
            candidates = rows(max(16, missing * 9 // len(values)))
            rounds.append(candidates[torch.isin(hash_rows(candidates), values)])
            missing -= len(rounds[-1])
        return torch.cat(rounds)[:n]

    def too_few(self, split: str) -> InputError:
        return InputError(
            f"{self.name}: too few different instances for a {split} split; take larger sizes"
        )


def distinct(draw: torch.Generator, n: int, count: int, of: int) -> Tensor:
    """n rows of `count` different numbers below `of`, in random order."""
    return torch.rand(n, of, generator=draw).topk(count, 1).indices


def key_value_pairs(draw: torch.Generator, n: int, count: int, values: int) -> Tensor:
    """n rows of `count` pairs, one after the other, `[n, 2·count]`.

    Keys are below `values`, values from there to twice as many; none of either occurs twice.
    """
    keys = distinct(draw, n, count, values)
    answers = values + distinct(draw, n, count, values)
    return torch.stack([keys, answers], 2).flatten(1)


def check_room(name: str, kind: str, count: int, each: int, sequence: int, values: int) -> None:
    """Raises ValueError unless `count` things of a kind, of `each` tokens, fit into a sequence and differ."""
    if count > values or each * count > sequence:
        raise ValueError(
            f"{name}: {count} {kind} need a sequence of {each * count} or more, "
            f"and as many values; sequence is {sequence}, values {values}"
        )


@dataclass(frozen=True)
class MQAR(Task):
    """Multi-query associative recall (Zoology, arXiv 2312.04927).

    P keys, each followed by its value; then every key again among blanks, where its value is asked. The gaps
    before these queries follow a power law with density ∝ x^(power − 1). Case: P. Keys and values are two
    halves of the vocabulary, without repetition. Split by the ordered list of pairs.
    """

    name: str = "mqar"
    pairs: tuple[int, ...] = (2, 4, 8, 16)
    sequence: int = 64
    values: int = 32
    """Number of values, and of keys."""
    power: float = 0.01
    axis: ClassVar[str] = "key–value pairs"

    def __post_init__(self):
        check_room(self.name, "pairs", max(self.pairs), 4, self.sequence, self.values)

    vocab_size = property(lambda self: 1 + 2 * self.values)
    cases = property(lambda self: self.pairs)

    def length(self, case: int) -> int:
        return self.sequence

    def batch(self, draw: torch.Generator, n: int, split: str, case: int) -> tuple[Tensor, Tensor]:
        def pairs(m: int) -> Tensor:
            return 1 + key_value_pairs(draw, m, case, self.values)  # 0 is blank

        context = self.kept(pairs, n, split)  # [n, 2 · case]
        keys, values = context[:, ::2], context[:, 1::2]

        # Positions of the queries behind the context, [n, case].
        slots = (self.sequence - 2 * case) // 2
        density = torch.arange(1, slots + 1, dtype=torch.float64) ** (self.power - 1)
        queries = 2 * case + 2 * torch.multinomial(density.expand(n, -1), case, generator=draw)

        ids = torch.zeros(n, self.sequence, dtype=torch.int64)
        ids[:, : 2 * case] = context
        labels = torch.full_like(ids, IGNORED)
        return ids.scatter(1, queries, keys), labels.scatter(1, queries, values)


@dataclass(frozen=True)
class Needles(Task):
    """Keys and their values scattered in noise; then every key, in random order, and its value is asked.

    RULER's multi-key needles (arXiv 2404.06654) in symbols; all keys are asked, so that training sees more.
    Case: the number of keys. Split by the ordered list of pairs.
    """

    name: str = "needles"
    keys: tuple[int, ...] = (1, 4, 8, 16)
    sequence: int = 128
    values: int = 32
    """Number of values, of keys and of noise tokens."""
    axis: ClassVar[str] = "keys"

    def __post_init__(self):
        check_room(self.name, "keys", max(self.keys), 3, self.sequence, self.values)

    vocab_size = property(lambda self: 3 * self.values)
    cases = property(lambda self: self.keys)

    def length(self, case: int) -> int:
        return self.sequence

    def batch(self, draw: torch.Generator, n: int, split: str, case: int) -> tuple[Tensor, Tensor]:
        def pairs(m: int) -> Tensor:
            return key_value_pairs(draw, m, case, self.values)

        needles = self.kept(pairs, n, split)  # [n, 2 · case]
        keys, values = needles[:, ::2], needles[:, 1::2]
        end = self.sequence - case  # of the noise

        ids = torch.randint(2 * self.values, 3 * self.values, (n, self.sequence), generator=draw)
        first = 2 * distinct(draw, n, case, end // 2).sort(1).values
        ids = ids.scatter(1, torch.stack([first, first + 1], 2).flatten(1), needles)

        order = distinct(draw, n, case, case)
        labels = torch.full_like(ids, IGNORED)
        ids[:, end:] = keys.gather(1, order)
        labels[:, end:] = values.gather(1, order)
        return ids, labels


@dataclass(frozen=True)
class Copying(Task):
    """A random string, a separator, and the string again; from the separator on, the next symbol is asked.

    Case: the string's length. Split by the string.
    """

    name: str = "copying"
    lengths: tuple[int, ...] = (8, 16, 32)
    longer: tuple[int, ...] = (48,)
    """Lengths that are only tested."""
    symbols: int = 32
    axis: ClassVar[str] = "symbols to copy"

    vocab_size = property(lambda self: self.symbols + 1)
    cases = property(lambda self: self.lengths + self.longer)
    trained = property(lambda self: self.lengths)

    def length(self, case: int) -> int:
        return 2 * case

    def batch(self, draw: torch.Generator, n: int, split: str, case: int) -> tuple[Tensor, Tensor]:
        text = self.kept(lambda m: torch.randint(self.symbols, (m, case), generator=draw), n, split)
        ids = torch.cat([text, torch.full((n, 1), self.symbols), text[:, :-1]], 1)
        return ids, torch.cat([torch.full_like(text, IGNORED), text], 1)


@functools.cache
def cayley(group: str) -> Tensor:
    """The multiplication table `[G, G]` of a group: entry (a, b) is a·b.

    "Zp" is the numbers mod p, "S5" the permutations of 5 in lexicographic order, with (a·b)(i) = b(a(i)), and
    "A5" the even ones of them.
    """
    if group[0] == "Z":
        order = int(group[1:])
        return (torch.arange(order)[:, None] + torch.arange(order)) % order
    number = permutations(group)
    return torch.tensor([[number[tuple(b[i] for i in a)] for b in number] for a in number])


def permutations(group: str) -> dict[tuple[int, ...], int]:
    """The number of each permutation in "S5" or "A5"."""
    elements = itertools.permutations(range(int(group[1:])))
    if group[0] == "A":
        elements = (
            a for a in elements if sum(x > y for x, y in itertools.combinations(a, 2)) % 2 == 0
        )  # an even number of inversions
    return {element: i for i, element in enumerate(elements)}


def generators(group: str) -> list[int]:
    """A few elements whose products are the group.

    They are 1 in "Zp", the swaps of neighbours in "S5", and the cycles of three neighbours in "A5".
    """
    if group[0] == "Z":
        return [1]
    number, order = permutations(group), int(group[1:])
    moved = 2 if group[0] == "S" else 3
    return [
        number[(*range(i), *range(i + 1, i + moved), i, *range(i + moved, order))]
        for i in range(order - moved + 1)
    ]


@dataclass(frozen=True)
class StateTracking(Task):
    """The word problem of a group (arXiv 2404.08819): after each element, the product so far is asked.

    Z2 is parity, Zp addition mod p. A5 is the smallest group that is not solvable, S5 the smallest symmetric
    one. Case: the length. Training asks at every position of the trained length. Tests ask only after the
    first half of that length (of longer cases, of the case), so that no word is asked in both. Split by that
    first half.

    shorter: lengths that are trained as well. Their words are easier: elements are replaced by generators of
        the group, with a probability that differs from word to word.

    What mixers learn, measured and by their papers: `lab/pages/state_tracking.md`.
    """

    name: str
    group: str
    trained_length: int = 32
    times: tuple[int, ...] = (1, 2, 4)
    """Tested lengths in units of the trained one."""
    shorter: tuple[int, ...] = ()
    axis: ClassVar[str] = "length (elements)"

    def __post_init__(self):
        kind, order = self.group[:1], self.group[1:]
        if kind not in ("Z", "S", "A") or not order.isdecimal() or int(order) < 2 + (kind == "A"):
            raise ValueError(
                f"{self.name}: group={self.group!r}: must be Z, S or A and a number, such as Z2, S5 or A5"
            )

    vocab_size = property(lambda self: len(cayley(self.group)))
    cases = property(lambda self: tuple(k * self.trained_length for k in self.times))
    trained = property(lambda self: (*self.shorter, self.trained_length))

    def length(self, case: int) -> int:
        return case

    def batch(self, draw: torch.Generator, n: int, split: str, case: int) -> tuple[Tensor, Tensor]:
        table, head = cayley(self.group), self.trained_length // 2

        def words(m: int, length: int) -> Tensor:
            ids = torch.randint(len(table), (m, length), generator=draw)
            if split != "train" or case >= self.trained_length:
                return ids
            few = torch.tensor(generators(self.group))
            drawn = few[torch.randint(len(few), (m, length), generator=draw)]
            # The square: most elements of most words are generators, whose products are learnt first.
            share = torch.rand(m, 1, generator=draw).square()
            return torch.where(torch.rand(m, length, generator=draw) < share, ids, drawn)

        ids = self.kept(lambda m: words(m, head), n, split)[:, :case]
        ids = torch.cat([ids, words(n, max(0, case - head))], 1)
        products = list(itertools.accumulate(ids.unbind(1), lambda a, b: table[a, b]))
        labels = torch.stack(products, 1)
        if split != "train":
            labels[:, : max(head, case // 2)] = IGNORED  # longer: only what training never reached
        return ids, labels


OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: (
        (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) // 2
    ),
    "[SM": lambda values: sum(values) % 10,
}
LISTOPS_TOKENS = [*"0123456789", *OPERATORS, "]", "pad"]


@dataclass(frozen=True)
class ListOps(Task):
    """Long Range Arena's ListOps (arXiv 2011.04006): the value of nested MIN, MAX, MED and SM (sum mod 10).

    The published grammar: a node above `max_depth` is an operator of 2 to `max_arguments` arguments with
    probability 0.25, otherwise a digit; MED rounds a half down; the brackets of pairs are left out, as by the
    published reader. Case: (low, high), expressions of more than low and fewer than high tokens; published is
    (500, 2000). The value is asked at the last bracket; padding follows. Split by the expression.
    """

    name: str = "listops"
    bands: tuple[tuple[int, int], ...] = ((4, 12), (12, 24), (24, 48))
    max_depth: int = 10
    max_arguments: int = 10
    axis: ClassVar[str] = "length (tokens)"

    vocab_size = property(lambda self: len(LISTOPS_TOKENS))
    cases = property(lambda self: self.bands)

    def length(self, case: tuple[int, int]) -> int:
        return case[1] - 1

    def expression(
        self, draw: random.Random, depth: int, room: int
    ) -> tuple[list[int], int] | None:
        """(tokens, value) of a node; None as soon as it exceeds `room` tokens."""
        if depth == self.max_depth or draw.random() > 0.25:
            digit = draw.randrange(10)
            return [digit], digit
        tokens, values = [10 + draw.randrange(4)], []
        for _ in range(draw.randint(2, self.max_arguments)):
            argument = self.expression(draw, depth + 1, room - len(tokens) - 1)
            if argument is None or len(tokens) + len(argument[0]) >= room:
                return None
            tokens += argument[0]
            values.append(argument[1])
        return [*tokens, 14], OPERATORS[LISTOPS_TOKENS[tokens[0]]](values)

    def batch(
        self, draw: torch.Generator, n: int, split: str, case: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        low, high = case
        source = random.Random(int(torch.randint(2**62, (), generator=draw)))

        def rows(m: int) -> Tensor:
            """Tokens, padding, and in the last column the value, which the expression determines."""
            out = torch.full((m, high), len(LISTOPS_TOKENS) - 1)
            for row in out:
                for _ in range(10**6):
                    node = self.expression(source, 1, high - 1)
                    if node and len(node[0]) > low:
                        break
                else:
                    raise self.too_few(split)
                tokens, value = node
                row[: len(tokens)] = torch.tensor(tokens)
                row[-1] = value
            return out

        drawn = self.kept(rows, n, split)
        ids, values = drawn[:, :-1], drawn[:, -1:]
        last = (ids != len(LISTOPS_TOKENS) - 1).sum(1, keepdim=True) - 1
        labels = torch.full_like(ids, IGNORED).scatter(1, last, values)
        longest = int(last.max()) + 1
        return ids[:, :longest], labels[:, :longest]


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        MQAR(),
        Needles(),
        Copying(),
        StateTracking("parity", "Z2"),
        StateTracking("modular", "Z5"),
        StateTracking("s3", "S3", trained_length=16),
        StateTracking("a5", "A5", trained_length=16),
        StateTracking("s5", "S5", trained_length=16),
        ListOps(),
        ListOps("listops_lra", bands=((500, 2000),)),
    )
}
