"""What a study compares: study.yaml and lm.yaml of its folder, read and checked.

Importing this does not import torch, so that usage errors of `nalanda study` are reported at once.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError, output_folder
from nalanda.common.text import suggest
from nalanda.config.load import load_config, read_yaml, recipe_folders, section
from nalanda.config.schema import RunConfig


@dataclass
class Calibration:
    """Systems whose published gaps are known. A budget counts where the gaps here agree with them."""

    model: dict[str, Any]
    """Model keys of all of them, over those of the first size."""
    forms: dict[str, Any]
    """Model keys by name; the study's reference is among them."""
    published: dict[str, float]
    """Gaps to the reference in nats, by form."""
    source: str
    tokens_per_word: float = 1.0
    """Of the study's text. Published gaps are divided by it, where they are of perplexities a word."""


@dataclass
class Rates:
    values: list[float]
    rungs: list[int]
    """Budgets of successive halving: each keeps the better half of the rates, the last one the best."""
    seed: int = 0


@dataclass
class Recall:
    """Steps until a model recalls, with the best of the rates for each system."""

    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    state: int = 2048
    rates: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


@dataclass
class EqualRates:
    """Further runs, with one rate for all systems of a size. The rule does not use them."""

    rates: dict[str, float]
    """By size."""
    forms: list[str]


@dataclass
class Decision:
    """The default form changes to that candidate which is ahead of it, if one is; see `report.decided`."""

    default: str
    candidates: list[str]


@dataclass
class Study:
    mixers: list[str]
    reference: str
    forms: dict[str, Any]
    """Model keys by name; a dotted key sets an entry of a mapping. Every mixer gets every form."""
    sizes: dict[str, Any]
    """Model keys over lm.yaml's, by name."""
    seeds: list[int]
    budgets: list[int]
    """Tokens, rising; the last one decides."""
    rates: Rates
    cooldown: float = 0.2
    lengths: dict[str, int] = field(default_factory=dict)
    """`rows` and `tokens` of the rows on which the last model's losses by position are measured."""
    beside: dict[str, Any] = field(default_factory=dict)
    """Further systems, which no form is compared with."""
    calibration: Calibration | None = None
    recall: Recall | None = None
    equal_rates: EqualRates | None = None
    contrasts: list[list[str]] = field(default_factory=list)
    """Pairs of forms: one in which norms act, and its counterpart in which they do not."""
    decision: Decision | None = None


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


def load_study(directory: Path) -> tuple[Study, dict[str, Any]]:
    """(study.yaml, lm.yaml as a mapping). Raises `InputError`."""
    files = directory / "study.yaml", directory / "lm.yaml"
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file; a study's folder has study.yaml and lm.yaml")
    values, lm = (read_yaml(file) for file in files)
    load_config(files[1])
    study: Study = section(Study, values, "")
    named = [("reference", study.reference, study.forms)]
    if calibration := study.calibration:
        theirs = (study.reference, *calibration.published)
        named += [("calibration.forms", name, calibration.forms) for name in theirs]
    for pair in study.contrasts:
        if len(pair) != 2:
            raise InputError(f"contrasts: {pair} is no pair of forms")
        named += [("contrasts", name, study.forms) for name in pair]
    if study.decision:
        chosen = (study.decision.default, *study.decision.candidates)
        named += [("decision", name, study.forms) for name in chosen]
    if alike := study.equal_rates:
        named += [("equal_rates.forms", name, study.forms) for name in alike.forms]
        for size, rate in alike.rates.items():
            if size not in study.sizes:
                raise InputError(f"equal_rates.rates: no size {size!r}{suggest(size, study.sizes)}")
            if not rate > 0:
                raise InputError(f"equal_rates.rates: {rate} is no learning rate above 0")
    for where, name, forms in named:
        if name not in forms:
            raise InputError(f"{where}: no form {name!r}{suggest(name, forms)}")
    if study.rates.seed in study.seeds:
        raise InputError(
            f"seeds: {study.rates.seed} chooses the rates; take other seeds to judge them"
        )
    for where, budgets in (("budgets", study.budgets), ("rates.rungs", study.rates.rungs)):
        if not budgets or sorted(set(budgets)) != budgets:
            raise InputError(f"{where}: {budgets} are not rising numbers of tokens")
    if len(study.seeds) < 2:
        raise InputError("seeds: at least two are needed for an interval")
    if not 0 < study.cooldown < 1:
        raise InputError(f"cooldown: {study.cooldown} is no share of a budget between 0 and 1")
    return study, lm


def check_followed(lm: dict[str, Any], file: Path) -> None:
    """Raises `InputError` for settings of lm.yaml that change an ordinary run, and that a study ignores."""
    config: RunConfig = section(RunConfig, lm, "")
    shape = [f"schedule.{name}" for name in lm.get("schedule", {}) if name != "warmup_steps"]
    refused = {
        **dict.fromkeys(
            shape, "the rate stays, then falls over study.yaml's cooldown; leave this out"
        ),
        "model.dropout": lm["model"].get("dropout")
        and "runs of a seed would differ in it; leave it out",
        "optim.lr": "lr" in lm.get("optim", {}) and "study.yaml has the rates; leave this out",
        "train.precision": config.train.precision != "fp32"
        and "a study computes in fp32; set fp32",
        "data.bos": not config.data.bos
        and "a study tells documents apart by their bos token; set true",
        "data.long_documents": config.data.long_documents != "cut" and "a study cuts them; set cut",
    }
    for name, reason in refused.items():
        if reason:
            raise InputError(f"{file}: {name}: {reason}")


def study_folder(directory: str | None = None, *, quick: bool = False) -> Path:
    """The study's folder: recipes/study of a checkout, otherwise runs/study; runs/study-quick if `quick`."""
    usual = (
        Path("recipes/study") if Path("recipes/study/study.yaml").is_file() else Path("runs/study")
    )
    return Path(directory) if directory else Path("runs/study-quick") if quick else usual


def begin_study(place: Path, *, quick: bool = False) -> None:
    """Copies the study.yaml and lm.yaml that ship with Nalanda into a new folder. Raises `InputError`."""
    if (place / "study.yaml").is_file():
        return
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{place}: holds files and no study.yaml; choose another folder")
    shipped = next(
        recipes / "study" for recipes in recipe_folders() if (recipes / "study").is_dir()
    )
    output_folder(place, "the study's folder")
    for name in ("study.yaml", "lm.yaml"):
        shutil.copy(shipped / ("quick" if quick else "") / name, place / name)
