"""Gives the arms of a study an equal figure, by the key of the recipe that the study names."""

import bisect
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nalanda.common.errors import InputError
from nalanda.common.text import si
from nalanda.compare.study import Study, load_arms
from nalanda.config.schema import RunConfig
from nalanda.data.records import field_of
from nalanda.model.configuration import NalandaConfig
from nalanda.report.info import info
from nalanda.train.estimate import meta_model

CLOSE = 0.02
"""Relative difference up to which figures count as equal."""

STEPS = {int: 8, float: 1 / 16}
"""Steps of a key by its type: products run best at widths that are multiples of 8."""

KEYS = {
    "parameters": "parameters",
    "flops": "training_flops_per_token",
    "state": "state_bytes_per_sequence",
}
"""The figures by their keys in `info`."""


def figures_of(study: Study, arm: str, *extra: str) -> dict[str, Any]:
    """The figures of an arm's model, as `nalanda info` has them. Raises `InputError`."""
    overrides = [*study.overrides_of(arm), *extra, f"output_dir={study.output_dir}"]
    return info(study.recipe_of(arm), overrides, memory=False)


def with_equal_figures(study: Study) -> Study:
    """The study with the key `by` fitted in every arm but the first. Raises `InputError`."""
    if study.equal is None or study.by is None:
        return study
    configs, key, name = load_arms(study), study.by, KEYS[study.equal]
    wanted = figures_of(study, study.first)[name]
    if not wanted:
        raise InputError(f"--equal {study.equal}: arm {study.first} has none; name another figure")
    arms = dict(study.arms)
    for arm in list(arms)[1:]:
        value = field_of(configs[arm].to_dict(), key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"--by {key}: arm {arm} has no number there; name a width that it sets"
            )

        if NalandaConfig.__annotations__.get(key.removeprefix("model.")) is float:
            value = float(value)  # YAML reads 1 as an integer

        def figure(x: float, arm: str = arm) -> float:
            return figures_of(study, arm, f"{key}={x:g}")[name]

        fitted = fit(figure, value, wanted, f"arm {arm}: {key}")
        reached = figure(fitted)
        if abs(reached / wanted - 1) > CLOSE:
            raise InputError(
                f"--by {key}: arm {arm} comes nearest with {fitted:g}: {si(reached)} in place of {si(wanted)} "
                f"of {study.equal}; name another key"
            )
        arms[arm] = f"{arms[arm] or ''} {key}={fitted:g}".strip()
    return replace(study, arms=arms)


def fit(figure: Callable[[float], float], start: float, wanted: float, where: str) -> float:
    """The value whose figure comes nearest to `wanted`, among multiples of a step up to eight times `start`.

    figure: grows with the value; may raise `InputError` for one that does not suit the model.
    """
    step = STEPS[type(start)]

    @functools.cache
    def at(count: int) -> float | None:
        try:
            return figure(type(start)(count * step))
        except InputError:
            return None

    def up_to(count: int) -> float:
        """The figure of the largest value up to this one that suits the model; 0 if none does."""
        return next((f for n in range(count, 0, -1) if (f := at(n)) is not None), 0.0)

    most = max(8, round(8 * start / step))
    reaching = bisect.bisect_left(range(1, most + 1), wanted, key=up_to) + 1
    # Of the values at either side of the wanted figure, the nearer one.
    near = [n for n in range(max(1, reaching - 8), min(most, reaching + 8) + 1) if at(n)]
    if not near:
        raise InputError(f"{where}: no value suits the model")
    best = min(near, key=lambda n: abs((at(n) or 0) - wanted))
    return type(start)(best * step)


def shared_weights(study: Study, configs: Mapping[str, RunConfig]) -> list[str]:
    """Sentences about arms whose models begin with other weights than the first arm's.

    Runs of a seed draw each module's weights by its name (`seed_by_name`): equal names and shapes get equal values.
    Arms that leave a run have its weights. Raises `InputError` if those do not fit.
    """
    shapes = {
        arm: {name: parameter.shape for name, parameter in meta_model(config).named_parameters()}
        for arm, config in configs.items()
    }
    first = shapes[study.first]
    if study.fork_at is not None:
        for arm, arm_shapes in shapes.items():
            if other := next(
                (n for n in {**first, **arm_shapes} if first.get(n) != arm_shapes.get(n)), None
            ):
                raise InputError(
                    f"arm {arm}: --from: {other} has another shape than in {study.first}, whose run it leaves"
                )
        return []

    notes = []
    for arm, arm_shapes in shapes.items():
        total = sum(shape.numel() for shape in arm_shapes.values())
        shared = sum(
            shape.numel() for name, shape in arm_shapes.items() if first.get(name) == shape
        )
        if shared < total:
            # Rounded down: no arm that lacks some shares 100 %.
            percent = math.floor(1000 * shared / total) / 10
            notes.append(
                f"{arm} shares {percent:g} % of its initial weights with {study.first}; the others have no "
                "counterpart of their name and shape."
            )
    return notes
