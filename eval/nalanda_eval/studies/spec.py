"""What a study compares: study.yaml and lm.yaml of its folder, read and checked.

Importing this does not import torch, so that usage errors of `nalanda study` are reported at once.
"""

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nalanda.common.errors import InputError, output_folder
from nalanda.common.text import suggest
from nalanda.config.load import load_config, read_yaml, recipe_folders, section

if TYPE_CHECKING:
    from nalanda_eval.synthetic import MQAR

TASKS = ("lm", "recall")
MATCHES = ("parameters", "state")


@dataclass
class Question:
    """Systems to compare: each combination of the lists in `over`, and the named `systems`.

    A system is a mapping of model keys; a dotted key sets an entry of a mapping, `rate` multiplies the
    learning rates.
    """

    ask: str
    over: dict[str, Any] = field(default_factory=dict)
    systems: dict[str, Any] = field(default_factory=dict)
    tasks: list[Literal["lm", "recall"]] = field(default_factory=lambda: list(TASKS))
    match: dict[str, Any] = field(default_factory=dict)
    """What a task's models have equal: parameters, state (and parameters), or both in turn (default)."""

    def expand(self) -> dict[str, dict[str, Any]]:
        """All systems by name."""
        found = {}
        lists = [values if isinstance(values, list) else [values] for values in self.over.values()]
        for values in itertools.product(*lists) if lists else ():
            keys = nested(dict(zip(self.over, values, strict=True)))
            found[title(keys)] = keys
        return found | {name: nested(keys) for name, keys in self.systems.items()}


@dataclass
class Finals:
    seeds: list[int]
    """Seeds of the final runs; the screening's seed, which chose the finalists, cannot be one of them."""
    systems: list[str]
    """Systems that take part whatever the screening says."""
    lm: list[str] = field(default_factory=list)
    """Systems that take part as language models only."""
    best: list[str] = field(default_factory=list)
    """Questions whose best form takes part as well, with every mixer; see `plan.ranking`."""
    match: dict[str, Any] = field(default_factory=dict)
    """What the models have equal, as in `Question.match`."""
    recall: dict[str, Any] = field(default_factory=dict)
    """Settings of recall training that differ from the screening's."""


@dataclass
class Claim:
    """States that `a` is better than `b`, or equal to it.

    Both are names of finalists, in which `best:QUESTION` stands for the form that the screening chose.
    """

    claim: str
    a: str
    b: str
    says: Literal["better", "equal"] = "better"


@dataclass
class Decision:
    """Asks whether the form that the screening chose for a question replaces the default."""

    question: str
    default: str
    against: str
    """A form that both are compared with."""


@dataclass
class Study:
    recall: dict[str, Any]
    """Sections `task` (settings of MQAR), `model` (over the bench's) and `training`; `state` in bytes."""
    questions: dict[str, Any]
    finals: Finals
    decision: Decision | None = None
    claims: list[Any] = field(default_factory=list)
    seed: int = 0


def matches(match: dict[str, Any], task: str) -> Sequence[str]:
    asked = match.get(task, "both")
    return MATCHES if asked == "both" else (asked,)


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    found: dict[str, Any] = {}
    for path, value in keys.items():
        *parents, last = path.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return found


def title(keys: dict[str, Any]) -> str:
    """A system's name, such as `deltanet + nala(angle=rms, power=2)`; other keys follow in parentheses."""

    def with_options(name: str, options: dict[str, Any]) -> str:
        return name + (f"({', '.join(f'{k}={v}' for k, v in options.items())})" if options else "")

    known = ("mixer", "mixer_options", "feature_map", "feature_map_options", "rate")
    name = with_options(str(keys.get("mixer", "")), keys.get("mixer_options", {}))
    if keys.get("feature_map"):
        name += " + " + with_options(keys["feature_map"], keys.get("feature_map_options", {}))
    rest = {k: v for k, v in keys.items() if k not in known}
    rate = f" at {keys['rate']:g}× the rate" if keys.get("rate", 1) != 1 else ""
    return with_options(name, rest) + rate


def form(system: str) -> str:
    """The part of a system's name after its mixer: `nala(power=2)` of `deltanet + nala(power=2)`."""
    return system.partition(" + ")[2] or system


def load_study(directory: Path) -> tuple[Study, dict[str, Question], dict[str, Any]]:
    """(study.yaml, its questions, lm.yaml as a mapping). Raises `InputError`."""
    files = directory / "study.yaml", directory / "lm.yaml"
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file; a study's folder has study.yaml and lm.yaml")
    values, lm = (read_yaml(file) for file in files)
    study: Study = section(Study, values, "")
    study.claims = [section(Claim, claim, f"claims[{i}].") for i, claim in enumerate(study.claims)]
    questions = {
        name: section(Question, asked, f"questions.{name}.") for name, asked in study.questions.items()
    }
    load_config(files[1])
    names = systems(questions)
    for name, part in [*((f"questions.{n}", q) for n, q in questions.items()), ("finals", study.finals)]:
        for task, match in part.match.items():
            if task not in TASKS or match not in (*MATCHES, "both"):
                known = "lm or recall; parameters, state or both"
                raise InputError(f"{name}.match: {task}: {match}: expected {known}")
    decided = [study.decision.question] if study.decision else []
    for name in (*study.finals.best, *decided):
        if name not in questions:
            raise InputError(f"finals.best: no question {name!r}{suggest(name, questions)}")
    for name in (*study.finals.systems, *study.finals.lm):
        if name not in names:
            raise InputError(f"finals: no system {name!r}{suggest(name, names)}")
    if study.seed in study.finals.seeds:
        raise InputError(f"finals.seeds: {study.seed} chose the finalists; take other seeds to judge them")
    from nalanda_eval.recall import Training  # imports torch: what needs it is checked last

    mqar(study.recall)
    section(Training, study.recall.get("training", {}), "recall.training.")
    section(Training, study.finals.recall, "finals.recall.")
    return study, questions, lm


def systems(questions: dict[str, Question]) -> dict[str, dict[str, Any]]:
    """Every question's systems by name. Raises `InputError` where a name stands for two systems."""
    found: dict[str, dict[str, Any]] = {}
    for question in questions.values():
        for name, keys in question.expand().items():
            if found.setdefault(name, keys) != keys:
                raise InputError(f"questions: {name!r} is two systems; rename one of them")
    return found


def mqar(values: dict[str, Any]) -> "MQAR":
    """The task of a `recall` section. Raises `InputError`."""
    from nalanda_eval.synthetic import MQAR  # imports torch

    try:
        return section(MQAR, values.get("task", {}), "recall.task.")
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"recall.task: {error}") from None


def study_folder(directory: str | None = None, *, quick: bool = False) -> Path:
    """The study's folder: recipes/study of a checkout, otherwise runs/study; runs/study-quick if `quick`."""
    usual = Path("recipes/study") if Path("recipes/study/study.yaml").is_file() else Path("runs/study")
    return Path(directory) if directory else Path("runs/study-quick") if quick else usual


def begin_study(place: Path, *, quick: bool = False) -> None:
    """Copies the study.yaml and lm.yaml that ship with Nalanda into a new folder. Raises `InputError`."""
    if (place / "study.yaml").is_file():
        return
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{place}: holds files and no study.yaml; choose another folder")
    shipped = next(recipes / "study" for recipes in recipe_folders() if (recipes / "study").is_dir())
    output_folder(place, "the study's folder")
    for name in ("study.yaml", "lm.yaml"):
        shutil.copy(shipped / ("quick" if quick else "") / name, place / name)
