"""Compares the models of a study on tasks: an evaluation scores them on the same documents."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nalanda.compare.plan import StudyRun, folder_of
from nalanda.compare.results import Result
from nalanda.compare.study import Study
from nalanda.compare.verdict import Gap, corrected, gaps_of
from nalanda.storage.remote import staging

REPEATED = ("word_perplexity", "byte_perplexity")
"""Metrics that say the same as bits_per_byte beside them."""


@dataclass(frozen=True)
class TaskScore:
    """A metric of a task: each arm's mean over the seeds, and the gaps of all pairs."""

    task: str
    metric: str
    means: dict[str, float]
    gaps: list[Gap]


Evaluate = Callable[[list[str], list[str], str], dict[str, Any]]
"""Scores models, by their folders, on tasks, with a folder for the answers; returns what results.json has."""


def score_tasks(
    study: Study,
    runs: Sequence[StudyRun],
    results: Mapping[str, Result],
    folder: Path,
    evaluate: Evaluate,
) -> list[TaskScore]:
    """Scores every finished model that is on this machine. An interrupted evaluation goes on from its answers."""
    finals = finished_models(study, runs, results)
    models = {run: str(final) for run, final in finals.items() if final.is_dir()}
    if not study.tasks or not models:
        return []

    scored = evaluate([*models.values()], study.tasks, str(folder / "eval"))["models"]
    tasks = {run: model["tasks"] for run, model in zip(models, scored, strict=True)}
    return gather(study, tasks)


def finished_models(
    study: Study, runs: Sequence[StudyRun], results: Mapping[str, Result]
) -> dict[StudyRun, Path]:
    """The folder of each finished run's model, which may be on another machine."""
    finished = [run for run in runs if not run.trial and results[run.name].finished]
    return {run: staging(folder_of(study, run)) / "final" for run in finished}


def absent_models(
    study: Study, runs: Sequence[StudyRun], results: Mapping[str, Result]
) -> list[str]:
    """The finished runs whose models are not on this machine."""
    finals = finished_models(study, runs, results)
    return [run.name for run, final in finals.items() if not final.is_dir()]


def gather(study: Study, tasks: Mapping[StudyRun, Mapping[str, dict]]) -> list[TaskScore]:
    """The scores by task and metric. Holm's correction covers the pairs of all metrics."""
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for run, by_task in tasks.items():
        for task, row in by_task.items():
            for metric, value in row["metrics"].items():
                if metric not in REPEATED or "bits_per_byte" not in row["metrics"]:
                    arms = values.setdefault((task, metric), {arm: {} for arm in study.arms})
                    arms[run.arm][run.seed] = float(value)

    pairs = [*itertools.combinations(study.arms, 2)]
    gaps = {name: gaps_of(pairs, arms) for name, arms in values.items()}
    corrected_gaps = iter(corrected([gap for each in gaps.values() for gap in each]))
    return [
        TaskScore(
            *name,
            {arm: float(np.mean([*arms[arm].values()])) for arm in arms if arms[arm]},
            [next(corrected_gaps) for _ in gaps[name]],
        )
        for name, arms in values.items()
    ]
