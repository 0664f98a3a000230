"""Which runs a study takes: for each system some that choose its rate, then one for each seed."""

import itertools
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nalanda.common.errors import InputError
from nalanda.config.load import section
from nalanda.config.schema import RunConfig
from nalanda_lab import equal, recall
from nalanda_lab.studies.spec import Study, nested
from nalanda_lab.sweep import Record, key
from nalanda_lab.synthetic import MQAR

CALIBRATION, BESIDE = "calibration", "beside"
RECALLED = 0.9
"""The score from which on a model recalls."""
OF_MIXERS = (
    "mixer",
    "mixer_options",
    "feature_map",
    "feature_map_options",
    "conv_size",
    "use_gate",
)
"""Model keys that a system sets; those of lm.yaml's model do not apply to it."""
IGNORED = ("output_dir", "log", "checkpoint", "guard", "validation", "model", "seed", "data")
"""Sections of lm.yaml that no run depends on, or that a run has in another place."""


@dataclass(frozen=True)
class System:
    """A model under study. group: its mixer, or `CALIBRATION` or `BESIDE`. keys: JSON of its model keys."""

    size: str
    group: str
    form: str
    keys: str

    @property
    def model(self) -> dict[str, Any]:
        return json.loads(self.keys)

    @property
    def name(self) -> str:
        return self.form if self.group == BESIDE else f"{self.group} + {self.form}"


def systems(study: Study, lm: dict[str, Any]) -> list[System]:
    """All systems. Those of a size have equal parameters, and those with a fixed state equal state."""
    found = []
    for i, (size, keys) in enumerate(study.sizes.items()):
        base = {k: v for k, v in lm["model"].items() if k not in OF_MIXERS} | nested(keys or {})
        asked = {
            (mixer, form): base | {"mixer": mixer} | nested(own)
            for mixer, (form, own) in itertools.product(study.mixers, study.forms.items())
        }
        reference = base | {"mixer": study.mixers[0]} | nested(study.forms[study.reference])
        more = {(BESIDE, name): base | nested(own) for name, own in study.beside.items()}
        found += [
            System(size, *place, keys) for place, keys in equalised(asked | more, reference).items()
        ]
        if i == 0 and (calibration := study.calibration):
            common = base | nested(calibration.model)
            asked = {(CALIBRATION, n): common | nested(own) for n, own in calibration.forms.items()}
            reference = asked[CALIBRATION, study.reference]
            found += [
                System(size, *place, keys) for place, keys in equalised(asked, reference).items()
            ]
    return found


Place = tuple[str, str]  # group, form


def equalised(models: dict[Place, dict[str, Any]], reference: dict[str, Any]) -> dict[Place, str]:
    """The models as JSON, with the state of `reference` by the width of their keys, and with the parameters
    of the largest by that of their GLU. Raises ValueError where no sizes allow that."""
    with warnings.catch_warnings(action="ignore"):  # a study may examine what a map warns of
        state = equal.configured(reference).state_bytes(1, torch.float32)
        narrow = {place: with_state_by_keys(model, state) for place, model in models.items()}
        most = max(map(equal.count, narrow.values()))
        return {place: key(equal.with_parameters(model, most)) for place, model in narrow.items()}


def with_state_by_keys(model: dict[str, Any], wanted: int) -> dict[str, Any]:
    """The model with a key width that gives `wanted` bytes of fp32 state; values keep theirs.

    A model whose state grows is not changed. Raises ValueError if no key width comes near.
    """
    config = equal.configured(model)
    if equal.grows(config):
        return model

    def with_keys(K: int) -> dict[str, Any]:
        return model | {"expand_k": K / config.head_dim}

    def off(K: int) -> float:
        return abs(equal.configured(with_keys(K)).state_bytes(1, torch.float32) / wanted - 1)

    if off(config.key_dim) <= equal.CLOSE:
        return model
    K = min(range(8, 4 * config.head_dim, 8), key=off)
    if off(K) > equal.FAR:
        raise ValueError(f"{model['mixer']}: no key width gives a state of {wanted} bytes")
    return with_keys(K)


# ------------------------------ the settings of runs


def run_settings(
    system: System,
    study: Study,
    lm: dict[str, Any],
    *,
    rate: float,
    seed: int,
    budgets: list[int],
    lengths: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Everything that determines a run, except the text: the key of its record."""
    return {
        **{name: values for name, values in lm.items() if name not in IGNORED},
        "data": rows_of(lm),
        "model": system.model,
        "seed": seed,
        "rate": rate,
        "budgets": budgets,
        "cooldown": study.cooldown,
        "lengths": lengths,
    }


def final_settings(
    system: System, rate: float, seed: int, study: Study, lm: dict[str, Any]
) -> dict[str, Any]:
    """Of a run that judges."""
    lengths = study.lengths or None
    return run_settings(
        system, study, lm, rate=rate, seed=seed, budgets=study.budgets, lengths=lengths
    )


def halving(
    system: System, study: Study, lm: dict[str, Any], found: dict[str, Record]
) -> Iterator[tuple[list[dict[str, Any]], list[float]]]:
    """Rung by rung: the settings to run, and the rates that they leave; stops where a record is missing."""
    rates = study.rates.values
    for rung in study.rates.rungs:
        asked = [
            run_settings(system, study, lm, rate=rate, seed=study.rates.seed, budgets=[rung])
            for rate in rates
        ]
        got = [found.get(key(settings)) for settings in asked]
        if None in got:
            yield asked, []
            return
        loss = {rate: final_loss(record) for rate, record in zip(rates, got, strict=True) if record}
        last = rung == study.rates.rungs[-1]
        rates = sorted(rates, key=loss.__getitem__)[: 1 if last else math.ceil(len(rates) / 2)]
        yield asked, rates


def chosen_rate(
    system: System, study: Study, lm: dict[str, Any], found: dict[str, Record]
) -> tuple[float | None, list[dict[str, Any]]]:
    """The best rate, None until it is known, and all settings that choose it, as far as they are known."""
    rungs = list(halving(system, study, lm, found))
    left = rungs[-1][1]
    return (left[0] if len(left) == 1 else None), [
        settings for asked, _ in rungs for settings in asked
    ]


def equal_rates(planned: list[System], study: Study) -> dict[System, float]:
    """The systems that are also trained at the rate of their size, and that rate."""
    if (asked := study.equal_rates) is None:
        return {}
    return {
        s: asked.rates[s.size]
        for s in planned
        if s.group in study.mixers and s.size in asked.rates and s.form in asked.forms
    }


def final_loss(record: Record) -> float:
    return math.inf if "failed" in record else record["budgets"][-1]["loss"]


def bigram_settings(seed: int, budget: int, lm: dict[str, Any]) -> dict[str, Any]:
    """Everything that determines a bigram baseline: which tokens the models of a seed see."""
    same = {name: lm[name] for name in ("tokenizer", "train")}
    return {"bigrams": "Kneser-Ney", "seed": seed, "tokens": budget, "data": rows_of(lm), **same}


def rows_of(lm: dict[str, Any]) -> dict[str, Any]:
    """The keys of `data` that determine the rows, except the text."""
    return {name: value for name, value in lm["data"].items() if name not in ("source", "workers")}


def run_config(settings: dict[str, Any], lm: dict[str, Any], text: str) -> RunConfig:
    """The recipe of a run on a prepared text."""
    recipe = {k: v for k, v in lm.items() if k in IGNORED} | {
        k: v for k, v in settings.items() if k in lm
    }
    recipe |= {"data": lm["data"] | {"source": text}, "tokenizer": f"{text}/tokenizer"}
    recipe |= {"optim": lm.get("optim", {}) | {"lr": settings.get("rate", 1e-3)}}
    return section(RunConfig, recipe, "")


# ------------------------------ recall


def recall_models(study: Study) -> dict[str, dict[str, Any]]:
    """The recall models by name, at equal parameters and equal state."""
    asked = study.recall
    if asked is None:
        return {}
    base = equal.MODEL | asked.model
    with warnings.catch_warnings(action="ignore"):
        models = {
            f"{mixer} + {form}": equal.with_state(
                base | {"mixer": mixer} | nested(own), asked.state
            )
            for mixer, (form, own) in itertools.product(study.mixers, study.forms.items())
        }
        most = max(map(equal.count, models.values()))
        return {name: equal.with_parameters(model, most) for name, model in models.items()}


def recall_task(study: Study) -> MQAR:
    """Raises `InputError`."""
    assert study.recall is not None
    try:
        return section(MQAR, study.recall.task, "recall.task.")
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"recall.task: {error}") from None


def recall_training(study: Study, rate: float) -> recall.Training:
    """Raises `InputError`."""
    assert study.recall is not None
    return section(recall.Training, study.recall.training | {"lr": rate}, "recall.training.")


def recall_run(
    model: dict[str, Any], study: Study, rate: float, seed: int
) -> tuple[dict[str, Any], MQAR, int, recall.Training]:
    """The arguments of `recall.run_recall` and `recall.recall_settings`."""
    return model, recall_task(study), seed, recall_training(study, rate)


def steps_to(share: float, record: Record) -> float:
    """The first point of a recall run's curve from which on its score is at least `share`; inf for none."""
    steps = math.inf
    for step, _, score in reversed(record["curve"]):
        if score < share:
            break
        steps = step
    return steps


def best_recall_rate(model: dict[str, Any], study: Study, found: dict[str, Record]) -> float | None:
    """The rate with the fewest steps to `RECALLED` by the choosing seed, then the best validation, if known.

    The curves of older records are of test rows.
    """
    assert study.recall is not None
    got = {}
    for rate in study.recall.rates:
        record = found.get(
            key(recall.recall_settings(*recall_run(model, study, rate, study.rates.seed)))
        )
        if record is None:
            return None
        got[rate] = (steps_to(RECALLED, record), -record["validation"])
    return min(got, key=got.__getitem__)
