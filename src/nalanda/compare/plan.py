"""The runs of a study: those of `nalanda train`, in folders of their own."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.compare.results import Result
from nalanda.compare.study import Study, fork_of, write_rates
from nalanda.config.schema import RunConfig
from nalanda.storage.remote import staging

FIRST_RATE_SEED = 101
"""Rates are chosen on seeds from here on, which no verdict uses."""

OCTAVES = 4
"""Most octaves that a grid of rates grows by, at both ends together."""


@dataclass(frozen=True)
class StudyRun:
    """A run of the study."""

    arm: str
    seed: int
    number: int
    """Place in its stage, by which shards divide the runs."""
    rate: float | None = None
    """`optim.lr` in place of the recipe's."""
    trial: bool = False
    """Whether it only chooses a rate."""

    @property
    def name(self) -> str:
        """Its folder in the study's: `silu/seed-1`, or for a trial `silu/rate-0.004-seed-101`."""
        rate = f"rate-{self.rate:g}-" if self.trial else ""
        return f"{self.arm}/{rate}seed-{self.seed}"


Results = Mapping[str, Result]
"""Results by the names of runs; a run that did not begin has none."""


def plan_runs(study: Study, results: Results) -> list[StudyRun]:
    """The runs that are known so far: trials of the rates, and the runs of each arm whose rate is chosen."""
    swept = swept_arms(study)
    runs: list[StudyRun] = []
    rates: dict[str, float | None] = dict.fromkeys(study.arms)
    if study.rates:
        for position, arm in enumerate(swept):
            grid, chosen = choose_rate(study, arm, results)
            trials = itertools.product(range(study.rate_seeds), enumerate(grid))
            for seed, (step, rate) in trials:
                number = (step * study.rate_seeds + seed) * len(swept) + position
                runs.append(StudyRun(arm, FIRST_RATE_SEED + seed, number, rate, trial=True))
            rates[arm] = chosen
        runs.sort(key=lambda run: run.number)

    for seed, (position, arm) in itertools.product(range(study.seeds), enumerate(study.arms)):
        rate = rates[study.first if study.fork_at is not None else arm]
        if rate is not None or not study.rates:
            # The arms that leave a run stay with its share, whose machine has the checkpoint.
            number = seed if study.fork_at is not None else seed * len(study.arms) + position
            runs.append(StudyRun(arm, seed + 1, number, rate))
    return runs


def is_complete(study: Study, runs: Sequence[StudyRun]) -> bool:
    """Whether the plan has every run of the study: no rate is still to be chosen."""
    return sum(not run.trial for run in runs) == study.seeds * len(study.arms)


def choose_rate(study: Study, arm: str, results: Results) -> tuple[list[float], float | None]:
    """The grid of an arm, in the order in which its rates came, and the chosen rate once it is known.

    The rate with the lowest mean validation loss over the trials is chosen. While it stands at an end of the
    grid, an octave is added there. Raises `InputError` if every rate has failed.
    """
    grid = list(study.rates)
    seeds = range(FIRST_RATE_SEED, FIRST_RATE_SEED + study.rate_seeds)
    while True:
        losses: dict[float, float] = {}
        for rate in grid:
            names = [StudyRun(arm, seed, 0, rate, trial=True).name for seed in seeds]
            ended = [results[n] for n in names if n in results and results[n].ended]
            if len(ended) < len(names):
                return grid, None
            loss = math.fsum(result.loss for result in ended) / len(ended)
            losses[rate] = math.inf if math.isnan(loss) else loss

        best = min(grid, key=losses.__getitem__)
        if not math.isfinite(losses[best]):
            raise InputError(f"arm {arm}: no rate of {write_rates(grid)} can be trained")
        further = {min(grid): min(grid) / 2, max(grid): max(grid) * 2}.get(best)
        if further is None or len(grid) >= len(study.rates) + OCTAVES:
            return grid, best
        grid.append(further)


def swept_arms(study: Study) -> list[str]:
    """The arms whose rates are tried. Arms that leave a run have its rate."""
    return [study.first] if study.fork_at is not None else list(study.arms)


def rates_at_an_end(study: Study, results: Results) -> list[str]:
    """Sentences about chosen rates that stand at an end of their grid, which grew as far as it may."""
    notes = []
    for arm in swept_arms(study) if study.rates else ():
        grid, best = choose_rate(study, arm, results)
        if best in (min(grid), max(grid)):
            notes.append(
                f"The best rate of {arm}, {best:g}, stands at an end of {write_rates(grid)}; a further one may "
                "be better."
            )
    return notes


def command_of(
    study: Study, run: StudyRun, configs: Mapping[str, RunConfig]
) -> tuple[str, list[str]]:
    """The recipe and the overrides with which `nalanda train` makes a run."""
    overrides = [*study.overrides_of(run.arm), f"seed={run.seed}", "seed_by_name=true"]
    if run.rate is not None:
        overrides.append(f"optim.lr={run.rate:g}")

    if study.fork_at is not None and not run.trial:
        fork, trunk = fork_of(study, configs), trunk_of(study, run)
        if trunk is None:
            overrides += [f"checkpoint.every={fork}", f"checkpoint.keep_every={fork}"]
        else:
            overrides.append(f"train.resume={fork_checkpoint(study, trunk, configs)}")
    return study.recipe_of(run.arm), [*overrides, f"output_dir={folder_of(study, run)}"]


def folder_of(study: Study, run: StudyRun) -> str:
    return f"{study.output_dir.rstrip('/')}/{run.name}"


def fork_checkpoint(study: Study, trunk: StudyRun, configs: Mapping[str, RunConfig]) -> Path:
    """The checkpoint at which others leave a run."""
    step = fork_of(study, configs)
    return staging(folder_of(study, trunk)) / "checkpoints" / f"step-{step}"


def trunk_of(study: Study, run: StudyRun) -> StudyRun | None:
    """The run that this one leaves, and waits for."""
    if study.fork_at is None or run.trial or run.arm == study.first:
        return None
    return replace(run, arm=study.first)
