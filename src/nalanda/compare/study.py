"""A study: the arms that `nalanda compare` trains. An arm is a recipe with overrides."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml

from nalanda.common.errors import InputError
from nalanda.common.text import local_path, option_of, redact
from nalanda.compare.options import StudyOptions
from nalanda.compare.results import RETRIES
from nalanda.config.bounds import (
    BETWEEN_0_AND_1,
    POSITIVE,
    at_least,
    between,
    check_bounds,
    check_choice,
    check_new_name,
    expand_home,
)
from nalanda.config.load import (
    differences,
    find_recipe,
    load_config,
    parse_yaml,
    parts_of,
    read_yaml,
    section,
)
from nalanda.config.schema import RunConfig
from nalanda.storage.remote import is_store, read_bytes

FIGURES = ("parameters", "flops", "state")
"""Figures of a model that arms may share: parameters, training FLOPs a token, bytes of state."""

BEGINNINGS = (
    *("model.init_from", "model.initializer", "model.initializer_range"),
    *("model.parametrization", "model.base_width"),
)
"""Keys by which modules of equal name and shape begin with other weights."""

OURS = {"seed", "output_dir", "seed_by_name", "train.resume"}
"""Keys of a recipe that the study sets for each run."""

FILES = {"arms", "eval", "compare.html", "compare.json", "compare.md", "compare.yaml"}
"""Names in a study's folder that no arm's folder may take."""


@dataclass
class Study:
    """The keys of a study file."""

    recipe: str
    """Recipe of the arms: a file, or the name of one that ships."""
    arms: dict[str, Any]
    """Name to settings in which an arm differs from the recipe, written as on the command line. A first word
    without `=` is a recipe of the arm's own."""
    output_dir: str
    """Folder of the study, on this machine or in a store."""
    overrides: list[str] = field(default_factory=list)
    """Settings of all arms, such as train.steps=200."""
    seeds: Annotated[int, between(1, 100)] = 3
    """Runs of each arm, with the seeds 1, 2, …. A verdict needs two or more."""
    rates: list[float] = field(default_factory=list)
    """Learning rates to choose each arm's from; []: all arms share the recipe's."""
    rate_seeds: Annotated[int, at_least(1)] = 1
    """Seeds that choose the rates. No verdict uses them."""
    margin: Annotated[float, POSITIVE] = 0.01
    """Difference that matters, in bits a byte."""
    equal: str | None = None
    """Figure that all arms share with the first: parameters, flops or state."""
    by: str | None = None
    """Key that is fitted to make it equal, such as model.intermediate_size."""
    fork_at: Annotated[float | None, BETWEEN_0_AND_1] = None
    """Share of the steps that all arms of a seed have in common: the first arm's run, which the others leave
    there. null: each arm begins on its own."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of `nalanda eval` that compare the finished models as well."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        check_bounds(self, "study")
        if len(self.arms) < 2:
            raise InputError(f"arms: {len(self.arms)} given; a comparison needs two or more")
        self._check_names()
        if not all(isinstance(rate, int | float) and rate > 0 for rate in self.rates):
            raise InputError(f"rates: expected positive numbers, got {self.rates}")
        if len({f"{rate:g}" for rate in self.rates}) < len(self.rates):
            raise InputError(f"rates: two of {write_rates(self.rates)} are equal in six digits")
        if len(self.rates) == 1:
            raise InputError("rates: one rate leaves no choice; give two or more, or set optim.lr")
        self._check_equal()
        for override in [*self.overrides, *itertools.chain(*self.settings.values())]:
            key = override.partition("=")[0]
            if key in OURS:
                raise InputError(f"{key}: the study sets it for each run; leave it out")
            if key == "optim.lr" and self.rates:
                raise InputError("optim.lr: each arm's is one of rates; leave out one of the two")

    def _check_names(self) -> None:
        for name, text in self.arms.items():
            check_new_name(name, "arms", marks="._+-", taken=FILES)
            if text is not None and not isinstance(text, str):
                raise InputError(
                    f"arms.{name}: expected settings as text, such as model.feature_map=nala"
                )
        # Some file systems take A and a for one folder.
        folders = [name.lower() for name in self.arms]
        if twice := next((name for name in self.arms if folders.count(name.lower()) > 1), None):
            raise InputError(f"arms.{twice}: two names differ by case alone; take another name")

    def _check_equal(self) -> None:
        if self.equal is not None:
            check_choice(self.equal, FIGURES, "equal")
        if (self.equal is None) != (self.by is None):
            raise InputError(
                "equal: give the figure and the key to fit, such as --equal parameters "
                "--by model.intermediate_size"
            )
        if self.by is not None and not self.by.startswith("model."):
            raise InputError(f"by: {self.by}: name a key of the model, such as model.hidden_size")

    @cached_property
    def settings(self) -> dict[str, list[str]]:
        """The overrides that each arm has of its own."""
        words = {name: split_settings(text) for name, text in self.arms.items()}
        return {name: [w for w in each if "=" in w] for name, each in words.items()}

    def overrides_of(self, arm: str) -> list[str]:
        """The overrides of an arm's recipe: those of all arms, then its own."""
        return [*self.overrides, *self.settings[arm]]

    def recipe_of(self, arm: str) -> str:
        """The recipe of an arm: its own, or the study's."""
        words = split_settings(self.arms[arm])
        recipes = [word for word in words if "=" not in word]
        if len(recipes) > 1 or (recipes and words[0] != recipes[0]):
            raise InputError(
                f"arms.{arm}: {recipes[-1]}: expected section.key=value, such as train.steps=100"
            )
        return recipes[0] if recipes else self.recipe

    @property
    def first(self) -> str:
        """The arm that others are made equal to, and that they leave."""
        return next(iter(self.arms))


def split_settings(text: str | None) -> list[str]:
    """The words of an arm. Blanks within brackets, braces and quotes part none: `model.mixer=[gla, softmax]`."""
    words, depth, quote = [""], 0, ""
    for sign in text or "":
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        depth += (sign in "[{") - (sign in "]}")
        if sign.isspace() and not quote and depth <= 0:
            words.append("")
        else:
            words[-1] += sign
    return [word for word in words if word]


# ------------------------------ reading


def read_study(
    name: str, overrides: Sequence[str] = (), options: StudyOptions = StudyOptions()
) -> Study:
    """The study of a file, or of a recipe with `options` beside it.

    Args:
        name: a study file, the folder of a study (here or in a store), or a recipe.
        overrides: `section.key=value` for all arms, and output_dir.
        options: the study beside a recipe; that of a file stands in the file.

    Raises `InputError`.
    """
    chosen = {key: value for key, value in vars(options).items() if value not in (None, [], ())}
    path, study_folder = Path(name), None
    if (path / "compare.yaml").is_file():
        path, study_folder = path / "compare.yaml", name
    if is_store(name):
        study_folder = name.rstrip("/")
        stored = read_bytes(f"{name.rstrip('/')}/compare.yaml", RETRIES)
        values = parse_yaml(stored.decode(errors="replace"), name)
    else:
        values = read_yaml(path) if path.is_file() else None

    if isinstance(values, dict) and "arms" in values:
        if chosen:
            key = next(iter(chosen))
            option = {"arms": "--arm", "fork_at": "--from"}.get(key, option_of(key))
            raise InputError(f"{option}: {redact(name)} is a study; set its keys in the file")
    else:
        find_recipe(name)
        if "arms" not in chosen:
            raise InputError('give two arms or more, such as --arm "silu: model.feature_map=silu"')
        lists: dict[str, Any] = {"arms": read_arms(options.arms or [])}
        if options.rates is not None:
            lists["rates"] = read_rates(options.rates)
        if options.tasks is not None:
            lists["tasks"] = [task.strip() for task in options.tasks.split(",") if task.strip()]
        folder = f"runs/{Path(name).stem}-compare"
        values = {"recipe": name, "output_dir": folder, **chosen, **lists}

    if "recipe" not in values:
        raise InputError(f"{redact(name)}: recipe: missing; name the recipe of the arms")
    settings = [o for o in overrides if not o.startswith("output_dir=")]
    folders = [o.partition("=")[2] for o in overrides if o.startswith("output_dir=")]
    shared = values.get("overrides", [])
    # What is no list is left to `section`, which says so.
    values = {**values, "overrides": [*shared, *settings] if isinstance(shared, list) else shared}
    if folders:
        values["output_dir"] = folders[-1]
    elif study_folder:
        # The folder may have moved since it was recorded.
        values["output_dir"] = study_folder
    folder = values.get("output_dir", f"runs/{path.stem}")
    values["output_dir"] = expand_home(local_path(folder), "output_dir")

    study: Study = section(Study, values, "")
    study.check()
    return study


def read_arms(texts: Sequence[str]) -> dict[str, str]:
    """The arms of `--arm "name: settings"`. Raises `InputError`."""
    arms: dict[str, str] = {}
    for text in texts:
        name, colon, settings = text.partition(":")
        if not colon:
            raise InputError(f'--arm {text}: expected a name first: --arm "name: {text}"')
        if name.strip() in arms:
            raise InputError(f"--arm {name.strip()}: given twice; each arm needs another name")
        arms[name.strip()] = settings.strip()
    return arms


def read_rates(text: str) -> list[float]:
    """The rates of `1e-3,2e-3`. Raises `InputError`."""
    rates = [parse_yaml(word, "--rates") for word in text.split(",") if word.strip()]
    if not rates or not all(isinstance(rate, int | float) for rate in rates):
        raise InputError(f"--rates {text}: expected numbers with commas, such as 1e-3,2e-3")
    return sorted(map(float, rates))


def write_rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted(rates))


def load_arms(study: Study) -> dict[str, RunConfig]:
    """The checked recipe of each arm, with the seed and folder of the study's first run.

    Raises `InputError` for an arm that cannot be trained, and for two that are equal.
    """
    configs = {}
    for name in study.arms:
        overrides = [*study.overrides_of(name), f"output_dir={study.output_dir}"]
        try:
            configs[name] = load_config(study.recipe_of(name), overrides, training=True)
        except InputError as error:
            raise InputError(f"arm {name}: {error}") from None

    for (a, one), (b, other) in itertools.combinations(configs.items(), 2):
        if one == other:
            raise InputError(f"arms {a} and {b}: their recipes are equal; change one")
    for name, config in configs.items():
        if config.validation.every == 0:
            raise InputError(
                f"arm {name}: validation.every: a comparison reads the validation loss; "
                "leave it out, or set 1 or more"
            )
        if study.fork_at is not None:
            check_fork(study, name, configs)
        if study.rates and config.train.steps == 1:
            raise InputError(f"arm {name}: train.steps: 1 step cannot tell rates apart")
    return configs


def check_fork(study: Study, arm: str, configs: Mapping[str, RunConfig]) -> None:
    """Raises `InputError` for an arm that cannot leave the first arm's run."""
    config, fork = configs[arm], fork_of(study, configs)
    if fork >= config.train.steps:
        raise InputError(
            f"arm {arm}: train.steps: its {config.train.steps} steps are over at step {fork}, where the arms "
            "part; set more"
        )
    first = configs[study.first]
    begun = first.begun_stages(fork) | config.begun_stages(fork)

    def is_fixed(key: str) -> bool:
        section, name, inner = parts_of(key)
        if section == "stages":  # without `inner`, a stage that only one of the two has
            return name in begun and inner.split(".")[0] in ("", "after_step", "data")
        return section in ("data", "tokenizer") or key == "optim.name"

    changed = differences(first.to_dict(), config.to_dict())
    for key in sorted(changed.keys() - {"data.workers"}):
        if is_fixed(key):
            raise InputError(
                f"arm {arm}: {key}: a checkpoint of {study.first}, whose run --from leaves, has no other; leave it out"
            )


def fork_of(study: Study, configs: Mapping[str, RunConfig]) -> int:
    """The step at which the other arms leave the first arm's run."""
    return max(1, round((study.fork_at or 0) * configs[study.first].train.steps))


def is_of_rows(key: str, values: tuple[Any, Any]) -> bool:
    """Whether a key that differs decides which rows are read. values: it has two, of which one may be None."""
    section, _, inner = parts_of(key)
    if section == "stages" and not inner:  # a stage that only one of the two has
        return any(stage and stage.get("data") for stage in values)
    return section == "data" or (section == "stages" and inner.startswith(("data", "after_step")))


def warn_about(study: Study, configs: Mapping[str, RunConfig]) -> list[str]:
    """Sentences about arms that do not compare in all but their settings."""
    first = configs[study.first]
    notes = []
    if study.fork_at is not None:
        notes.append(
            f"All arms of a seed have step {fork_of(study, configs)} of {study.first} in common, and leave it there."
        )
    for name, config in configs.items():
        changed = differences(first.to_dict(), config.to_dict())
        if data := [key for key, values in changed.items() if is_of_rows(key, values)]:
            notes.append(f"{name} reads other rows than {study.first}: {', '.join(data)}.")
        if any(key.startswith("tokenizer") for key in changed):
            notes.append(
                f"{name} has another tokenizer than {study.first}: only bits a byte compare."
            )
        if begun := [key for key in changed if key in BEGINNINGS]:
            notes.append(
                f"{name} begins with other weights than {study.first}: {', '.join(begun)}."
            )
        own_rates = [
            f"stages.{key}.optim.lr" for key, stage in config.stages.items() if "lr" in stage.optim
        ]
        own_rates += ["optim.muon_lr"] * (config.optim.muon_lr is not None)
        if study.rates and own_rates:
            notes.append(
                f"{name} keeps these rates, whatever --rates tries: {', '.join(own_rates)}."
            )
    if not study.rates and study.fork_at is None:
        rates = {config.optim.lr for config in configs.values()}
        if len(rates) == 1:
            notes.append(
                f"All arms share the rate {rates.pop():g}. An arm may prefer another; --rates gives each its own."
            )
    if study.seeds == 1:
        notes.append("One seed each gives no verdict; --seeds 2 or more does.")
    return notes


# ------------------------------ records


def study_text(study: Study) -> str:
    """The study as a file."""
    default = Study(recipe="", arms={}, output_dir="")
    values = {
        key: value
        for key, value in asdict(study).items()
        if key in ("recipe", "arms", "output_dir", "seeds", "margin")
        or value != getattr(default, key)
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def check_same(text: str, study: Study, where: str) -> None:
    """Compares the recorded study of a folder with this one.

    Margin and tasks may change, and seeds be added. Raises `InputError` for any other change.
    """
    recorded: Study = section(Study, parse_yaml(text, where), "")
    free = ("output_dir", "seeds", "margin", "tasks")
    for each in fields(Study):
        old, new = getattr(recorded, each.name), getattr(study, each.name)
        if each.name in free or old == new:
            continue
        key = each.name
        if isinstance(old, dict):
            key, (old, new) = next(iter(differences(old, new, f"{key}.").items()))
        values = redact(f"{key} is {old!r} there and {new!r} here")
        raise InputError(
            f"{redact(where)}: another study: {values}; go on with that one, or choose another output_dir"
        )
    if list(study.arms) != list(recorded.arms):
        raise InputError(
            f"{redact(where)}: another study: its arms stand in the order {', '.join(recorded.arms)}; keep it, "
            "or choose another output_dir"
        )
    if study.seeds < recorded.seeds:
        raise InputError(
            f"{redact(where)}: its study has {recorded.seeds} seeds, and fewer would drop runs; give "
            f"{recorded.seeds} or more"
        )
