"""Which runs a study takes: every system with one seed, then the finalists with several.

All models of a task have equal parameters, some of them equal state as well; `sized` chooses their sizes.
"""

import dataclasses
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch

from nalanda.config.load import section
from nalanda.config.schema import RunConfig
from nalanda_eval import recall
from nalanda_eval.studies.spec import TASKS, Question, Study, form, matches, mqar, systems
from nalanda_eval.sweep import Record, key

MIXERS_OWN = ("mixer", "mixer_options", "feature_map", "feature_map_options", "conv_size", "use_gate")
NEAR = 0.05
"""Relative distance to a wanted state, above `recall.CLOSE`: the states of short convolutions shrink with the
keys, and key sizes are multiples of 8."""


@dataclass(frozen=True)
class Trial:
    """A row of the tables: a system on a task, what it was matched in, and its runs' settings by seed."""

    question: str
    system: str
    task: str
    match: str
    settings: tuple[dict[str, Any], ...]


def plan_trials(
    question: str, asked: dict[str, dict[str, Any]], tasks: Iterable[str], match: dict[str, Any],
    seeds: Sequence[int], study: Study, lm: dict[str, Any],
) -> tuple[list[Trial], list[str]]:  # fmt: skip
    """The trials of systems on tasks, and a note on each that no sizes allow."""
    found, notes = [], []
    with warnings.catch_warnings(action="ignore"):  # a study may examine what a map warns of
        for task, (name, keys) in itertools.product(tasks, asked.items()):
            for equal in matches(match, task):
                try:
                    model = sized(task, equal, keys, study, lm)
                except ValueError as error:
                    notes.append(f"{name} is left out of {task} at equal {equal}: {error}")
                    continue
                if recall.grows(recall.configured(model)):  # no state to match: listed with the parameters
                    equal = "parameters"
                if (name, task, equal) in {(trial.system, trial.task, trial.match) for trial in found}:
                    continue
                rate = keys.get("rate", 1)
                runs = tuple(trial_settings(task, model, rate, seed, study, lm) for seed in seeds)
                found.append(Trial(question, name, task, equal, runs))
    return found, notes


def sized(task: str, match: str, keys: dict[str, Any], study: Study, lm: dict[str, Any]) -> dict[str, Any]:
    """The model keys of a system on a task.

    All models of a task have equal parameters, by the width of the GLU; with `match` "state" they have equal
    bytes of state as well. Raises ValueError where no sizes allow that.
    """
    base = lm["model"] if task == "lm" else recall.MODEL | study.recall.get("model", {})
    own = {k: v for k, v in keys.items() if k != "rate"}
    if "mixer" in own:  # settings of the recipe's mixer do not apply to another
        base = {k: v for k, v in base.items() if k not in MIXERS_OWN}
    wanted = None
    if match == "state":
        narrow = recall.configured(lm["model"])
        wanted = study.recall["state"] if task == "recall" else narrow.state_bytes(1, torch.float32)
    return json.loads(fitted(key(base), key(base | own), wanted, keep_values=task == "lm"))


@cache  # the same system is in several questions and in the finals
def fitted(base: str, model: str, state: int | None, keep_values: bool) -> str:
    """The model keys, as JSON, with the parameters of `base`'s largest mixer and `state` bytes, if given."""
    found = json.loads(model)
    recall.configured(found)
    if state is not None:
        found = narrowed(found, state) if keep_values else recall.with_state(found, state)
    return json.dumps(recall.with_parameters(found, most_lm_parameters(base)))


@cache
def most_lm_parameters(base: str) -> int:
    return recall.most_recall_parameters(json.loads(base))


def narrowed(model: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The model with a key width that gives `wanted` bytes of fp32 state.

    Values keep their width, as with the recipes' `expand_k`. If no key width comes near, keys and values both
    change.
    """
    config = recall.configured(model)
    if recall.grows(config):
        return model

    def with_keys(K: int) -> dict[str, Any]:
        return model | {"expand_k": K / config.head_dim}

    def measured(K: int) -> int:
        return recall.configured(with_keys(K)).state_bytes(1, torch.float32)

    least = measured(8)
    by_k = (measured(16) - least) / 8  # affine in K for every mixer

    def off(K: int) -> float:
        return abs((least + by_k * (K - 8)) / wanted - 1)

    if off(config.key_dim) <= recall.CLOSE:
        return model
    K = min(range(8, 4 * config.head_dim, 8), key=off)
    return with_keys(K) if off(K) <= NEAR else recall.with_state(model, wanted)


def trial_settings(
    task: str, model: dict[str, Any], rate: float, seed: int, study: Study, lm: dict[str, Any]
) -> dict[str, Any]:
    """Everything that determines a run, except the text: the key of its record."""
    if task == "recall":
        training = section(recall.Training, study.recall.get("training", {}), "recall.training.")
        training = dataclasses.replace(training, lr=training.lr * rate)
        return recall.recall_settings(model, mqar(study.recall), seed, training)
    recipe = {k: v for k, v in lm.items() if k not in ("output_dir", "log", "checkpoint", "data")}
    optim = lm.get("optim", {})
    lr = optim.get("lr", run_config(key(lm)).optim.lr)
    return recipe | {"model": model, "seed": seed, "data": rows_of(lm), "optim": optim | {"lr": lr * rate}}


def bigram_settings(seed: int, lm: dict[str, Any]) -> dict[str, Any]:
    """Everything that determines a bigram baseline: which tokens the language models of a seed see."""
    same = {name: lm[name] for name in ("tokenizer", "train")}
    return {"bigrams": "Kneser-Ney", "seed": seed, "data": rows_of(lm), **same}


def rows_of(lm: dict[str, Any]) -> dict[str, Any]:
    """The keys of `data` that determine the rows, except the text."""
    return {k: v for k, v in lm["data"].items() if k not in ("source", "workers")}


@cache
def run_config(recipe: str) -> RunConfig:
    return section(RunConfig, json.loads(recipe), "")


def screening(
    study: Study, questions: dict[str, Question], lm: dict[str, Any]
) -> tuple[list[Trial], list[str]]:
    """The trials of all questions with the first seed, and notes on what is left out."""
    found, notes = [], []
    for name, asked in questions.items():
        more, left_out = plan_trials(name, asked.expand(), asked.tasks, asked.match, [study.seed], study, lm)
        found += more
        notes += left_out
    return found, notes


def ranking(trials: Iterable[Trial], found: dict[str, Record]) -> dict[str, float]:
    """Mean ranks of forms by the screening's scores, best first, from 1.

    The mean is over mixers, tasks and ways of matching. A diverged run ranks last; ties share the mean rank.
    """
    columns: dict[tuple, dict[str, float]] = {}
    for trial in trials:
        record, mixer = found[key(trial.settings[0])], trial.system.removesuffix(form(trial.system))
        worse = -record["score"] if trial.task == "recall" else record.get("score", math.inf)
        columns.setdefault((mixer, trial.task, trial.match), {})[form(trial.system)] = worse
    ranks: dict[str, list[float]] = {}
    for column in columns.values():
        values = sorted(column.values())
        for name, value in column.items():
            ranks.setdefault(name, []).append(1 + values.index(value) + (values.count(value) - 1) / 2)
    return dict(sorted(((name, fmean(r)) for name, r in ranks.items()), key=lambda item: item[1]))


def chosen(study: Study, first: Iterable[Trial], found: dict[str, Record]) -> dict[str, str]:
    """The best form of each question of `finals.best` that `finals.systems` does not already have."""
    there = {form(name) for name in study.finals.systems}
    best = {}
    for question in study.finals.best:
        ranks = ranking((trial for trial in first if trial.question == question), found)
        best[question] = next(name for name in ranks if name not in there)
    return best


def finalists(
    study: Study, questions: dict[str, Question], lm: dict[str, Any], best: dict[str, str]
) -> tuple[list[Trial], list[str]]:
    """The trials of the finals, `best` from `chosen`, and notes on what is left out."""
    known = systems(questions)
    names = [*study.finals.systems]
    names += [name for q, won in best.items() for name in questions[q].expand() if form(name) == won]
    training = study.recall.get("training", {}) | study.finals.recall
    study = dataclasses.replace(study, recall=study.recall | {"training": training})
    final, found, notes = study.finals, [], []
    for some, tasks in ((dict.fromkeys(names), TASKS), (final.lm, ["lm"])):
        asked = {name: known[name] for name in some}
        more, left_out = plan_trials("finals", asked, tasks, final.match, final.seeds, study, lm)
        found += more
        notes += left_out
    return found, notes
