"""The verdict of a study: differences paired by seed, with intervals, and one sentence for each pair of arms.

Student's t over the seeds' differences gives the interval and the p; Holm's correction covers all pairs.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from nalanda.common.text import si
from nalanda.compare.plan import StudyRun
from nalanda.compare.results import Result
from nalanda.compare.study import Study
from nalanda.config.load import differences
from nalanda.config.schema import RunConfig
from nalanda.report.runs import same_amount, validation_of

Unit = Literal["bits a byte", "nats a token"]

LEVEL = 0.05
"""Two-sided level of the tests; intervals cover 1 − LEVEL."""

POWER = 0.8
"""Power at which `seeds_needed` counts a difference as told."""

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Gap:
    """The difference of two arms' losses, the first less the second, over the seeds that both have finished."""

    first: str
    second: str
    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    p: float
    holm: float = math.nan
    """p with Holm's correction over all pairs of the study; NaN, as p, for differences that are all equal."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the differences over the seeds."""
        return float(np.std(self.differences, ddof=1))

    @property
    def deviation_limit(self) -> float:
        """The deviation's upper limit, which the true one is below with a probability of `POWER`."""
        freedom = len(self.differences) - 1
        return self.deviation * math.sqrt(freedom / stats.chi2.ppf(1 - POWER, freedom))

    @property
    def told(self) -> bool:
        """Whether the arms are told apart."""
        return self.holm < LEVEL


def pair_gap(first: str, second: str, a: Sequence[float], b: Sequence[float]) -> Gap:
    """The gap of losses `a` and `b`, by seed, two or more."""
    differences = tuple(float(x - y) for x, y in zip(a, b, strict=True))
    mean = math.fsum(differences) / len(differences)
    # Without a spread t is not defined. Arms that compute alike are equal; other gaps have no p.
    rounding = 1e-9 * max(map(abs, (*a, *b)))
    if np.ptp(differences) <= rounding:
        p = 1.0 if abs(mean) <= rounding else math.nan
        return Gap(first, second, differences, mean, mean, mean, p)
    test = stats.ttest_rel(a, b)
    low, high = test.confidence_interval(1 - LEVEL)
    return Gap(first, second, differences, mean, float(low), float(high), float(test.pvalue))


def gap_by_seed(
    first: str, second: str, a: Mapping[int, float], b: Mapping[int, float]
) -> Gap | None:
    """The gap of losses by seed, over the seeds that both have; None for fewer than two."""
    seeds = sorted(a.keys() & b.keys())
    if len(seeds) < 2:
        return None
    return pair_gap(first, second, [a[seed] for seed in seeds], [b[seed] for seed in seeds])


def gaps_of(
    pairs: Iterable[tuple[str, str]], losses: Mapping[str, Mapping[int, float]]
) -> list[Gap]:
    """The gaps of the pairs of arms that share two seeds or more. losses: by arm and seed."""
    by_pair = [gap_by_seed(a, b, losses[a], losses[b]) for a, b in pairs]
    return [gap for gap in by_pair if gap]


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's p of each test: the k-th smallest of n times n − k + 1, and never below the one before."""
    order, n = np.argsort(ps, kind="stable"), len(ps)
    adjusted = np.empty(n)
    adjusted[order] = np.maximum.accumulate(np.take(ps, order) * np.arange(n, 0, -1))
    return np.minimum(1, adjusted).tolist()


def corrected(gaps: Sequence[Gap]) -> list[Gap]:
    """The gaps with Holm's p."""
    adjusted = holm([gap.p for gap in gaps])
    return [replace(gap, holm=p) for gap, p in zip(gaps, adjusted, strict=True)]


def power_of(margin: float, deviation: float, seeds: int, level: float = LEVEL) -> float:
    """The probability that a paired t-test over `seeds` tells a true difference of `margin`."""
    if deviation == 0:
        return 1.0
    freedom, shift = seeds - 1, margin / deviation * math.sqrt(seeds)
    edge = stats.t.ppf(1 - level / 2, freedom)
    # Far out scipy gives NaN: there the upper tail has all of the probability, and the lower one none.
    upper = np.nan_to_num(stats.nct.sf(edge, freedom, shift), nan=1.0)
    lower = np.nan_to_num(stats.nct.cdf(-edge, freedom, shift), nan=0.0)
    return float(upper + lower)


def seeds_needed(margin: float, deviation: float, pairs: int = 1) -> int:
    """The fewest seeds with which a difference of `margin` is told with a probability of `POWER`, or `MOST_SEEDS`.

    pairs: of the study. The smallest p of theirs is told below LEVEL / pairs (`corrected`).
    """

    def suffices(seeds: int) -> bool:
        return power_of(margin, deviation, seeds, LEVEL / pairs) >= POWER

    return bisect.bisect_left(range(MOST_SEEDS), True, lo=2, key=suffices)


# ------------------------------ a study's


@dataclass(frozen=True)
class ArmSummary:
    """An arm over its seeds. Its model's figures stand beside it, in `figures`."""

    name: str
    rate: float | None
    runs: int
    diverged: tuple[int, ...]
    """Seeds that diverged."""
    loss: float
    """Mean in nats a token over the finished seeds; NaN without one."""
    bits: float | None
    spread: float | None
    """Standard deviation over the seeds, in the verdict's unit; None for one seed."""
    tokens: int
    seconds: float
    """Mean time of training."""


@dataclass(frozen=True)
class StudyVerdict:
    """What a study says."""

    unit: Unit
    margin: float
    arms: dict[str, ArmSummary]
    gaps: list[Gap]
    """Of all pairs of arms that share two or more finished seeds."""
    sentences: list[str]
    """One for each pair of arms."""


def judge_study(
    study: Study,
    runs: Sequence[StudyRun],
    results: Mapping[str, Result],
    parameters: Mapping[str, int],
    configs: Mapping[str, RunConfig],
) -> StudyVerdict:
    """The verdict over the runs of a study that have ended.

    parameters: of each arm's model. configs: the arms' recipes.
    """
    by_arm: dict[str, dict[int, Result]] = {arm: {} for arm in study.arms}
    rates = {}
    for run in runs:
        if not run.trial and run.name in results and results[run.name].ended:
            by_arm[run.arm][run.seed] = results[run.name]
            rates[run.arm] = run.rate

    finished = [r for each in by_arm.values() for r in each.values() if r.finished]
    # Masked models, and foreign tokenizers that do not tell a token's text, have no bits a byte.
    some = not finished or any(r.bits is not None for r in finished)
    unit: Unit = "bits a byte" if some else "nats a token"
    losses = {
        arm: {s: loss for s, r in each.items() if (loss := _loss_in(unit, r)) is not None}
        for arm, each in by_arm.items()
    }
    texts = {arm: validation_of(config.to_dict()) for arm, config in configs.items()}
    pairs, reasons = [*itertools.combinations(study.arms, 2)], {}
    for a, b in pairs:
        lacking = [
            arm
            for arm in (a, b)
            if not losses[arm] and any(r.finished for r in by_arm[arm].values())
        ]
        if lacking:
            verb = "has" if len(lacking) == 1 else "have"
            reasons[a, b] = f"since {' and '.join(lacking)} {verb} no {unit}"
        elif changed := differences(texts[a], texts[b]):
            reasons[a, b] = f"since they are validated on other rows: {', '.join(changed)}"
        elif unit == "nats a token" and configs[a].tokenizer != configs[b].tokenizer:
            reasons[a, b] = "since nats a token of two tokenizers do not compare"
        elif unlike := _other_amounts(unit, by_arm[a], by_arm[b]):
            reasons[a, b] = unlike
    arms = {
        arm: summarise(arm, rates.get(arm), each, list(losses[arm].values()))
        for arm, each in by_arm.items()
    }

    gaps = corrected(gaps_of([pair for pair in pairs if pair not in reasons], losses))
    paired = {(gap.first, gap.second): gap for gap in gaps}
    sentences = []
    for pair in pairs:
        two = [arms[arm] for arm in pair]
        gap = paired.get(pair)
        if gap is None:
            reason = reasons.get(pair, "since they share fewer than two finished seeds")
            sentences.append(f"{pair[0]} and {pair[1]}: no verdict, {reason}.{lost_runs(two)}")
        else:
            sentences.append(sentence(gap, study.margin, unit, two, parameters, len(gaps)))
    return StudyVerdict(unit, study.margin, arms, gaps, sentences)


def _other_amounts(unit: Unit, a: Mapping[int, Result], b: Mapping[int, Result]) -> str:
    """Why two arms' validations are of other texts, by how much they read; "" if it is alike.

    Rows are a budget of tokens, so a tokenizer decides how much text they hold.
    """
    name = "bytes" if unit == "bits a byte" else "labels"
    for seed in sorted(a.keys() & b.keys()):
        x, y = (dict(each[seed].validated).get(name, 0) for each in (a, b))
        if not same_amount([x, y]):
            return (
                f"since they are validated on {x:,.0f} and {y:,.0f} {name} of text; a higher "
                "data.max_validation_rows lets both read the whole text"
            )
    return ""


def _loss_in(unit: Unit, result: Result) -> float | None:
    """The loss of a finished run in the unit, if it has that."""
    if not result.finished:
        return None
    return result.loss if unit == "nats a token" else result.bits


def summarise(
    arm: str, rate: float | None, by_seed: Mapping[int, Result], losses: Sequence[float]
) -> ArmSummary:
    done = [result for result in by_seed.values() if result.finished]
    bits = [result.bits for result in done if result.bits is not None]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values) if values else math.nan

    return ArmSummary(
        name=arm,
        rate=rate,
        runs=len(by_seed),
        diverged=tuple(sorted(seed for seed, result in by_seed.items() if result.diverged)),
        loss=mean([result.loss for result in done]),
        bits=mean(bits) if len(bits) == len(done) and done else None,
        spread=float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
        tokens=max((result.tokens for result in done), default=0),
        seconds=mean([result.seconds for result in done]),
    )


# ------------------------------ words


def lost_runs(arms: Sequence[ArmSummary]) -> str:
    """How many runs diverged, as an end of the sentence about two arms; "" if none did."""
    lost = [
        f"{len(arm.diverged)} of {arm.runs} runs of {arm.name} diverged"
        for arm in arms
        if arm.diverged
    ]
    return f" {'; '.join(lost)}." if lost else ""


def sentence(
    gap: Gap,
    margin: float,
    unit: Unit,
    arms: Sequence[ArmSummary],
    parameters: Mapping[str, int],
    pairs: int,
) -> str:
    """The sentence about two arms that may be quoted. pairs: of the study, which Holm's correction covers."""
    a, b = gap.first, gap.second
    end = lost_runs(arms)
    # In the order of the arms; equal ones once.
    sizes = " and ".join(dict.fromkeys(si(parameters[name]) for name in (a, b)))
    tokens = " and ".join(dict.fromkeys(si(arm.tokens) for arm in arms))
    setting = f"({len(gap.differences)} seeds, {tokens} tokens, {sizes} parameters)"
    within = max(abs(gap.low), abs(gap.high)) < margin
    if gap.told:
        lower, higher = (a, b) if gap.mean < 0 else (b, a)
        low, high = (
            sorted((abs(gap.low), abs(gap.high))) if gap.low * gap.high > 0 else (gap.low, gap.high)
        )
        size = write_interval(abs(gap.mean), low, high)
        small = f", less than the margin of {margin:g}" if within else ""
        return f"{lower} is lower than {higher} by {size} {unit}{small} {setting}.{end}"

    if math.isnan(gap.p):
        return f"{a} and {b}: no verdict, since all differences are {gap.mean:+.4g} {unit} {setting}.{end}"
    interval = f"{write_interval(gap.mean, gap.low, gap.high, signed=True)} {unit} {setting}"
    if within:
        return f"{a} and {b} differ by less than {margin:g} {unit}: {interval}.{end}"
    if gap.p < LEVEL:
        interval += f", Holm's p over {pairs} pairs is {gap.holm:.2g}"
    # A few seeds show the deviation badly; by itself it would promise too much.
    needed = seeds_needed(margin, gap.deviation_limit, pairs)
    more = f"{needed:,} seeds" if needed < MOST_SEEDS else "more seeds than are practical"
    return f"{a} and {b} cannot be told apart: {interval}; {more} would tell a difference of {margin:g}.{end}"


def write_interval(mean: float, low: float, high: float, signed: bool = False) -> str:
    """`0.012 [0.004, 0.020]`, with two digits of the half width."""
    half = (high - low) / 2
    digits = min(6, max(3, 1 - math.floor(math.log10(half)))) if half > 0 else 4
    # Such as of arms that differ by rounding alone, or of a loss beyond all measure.
    largest = max(map(abs, (mean, low, high)))
    plain = largest == 0 or 10.0**-digits <= largest < 1e6
    form = f"{'+' if signed else ''}.{f'{digits}f' if plain else '2e'}"
    return "{} [{}, {}]".format(*(format(x, form).replace("-", "−") for x in (mean, low, high)))
