"""Reads a recipe, YAML and `section.key=value` overrides, and checks it."""

import math
import re
import shlex
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from nalanda.common.errors import InputError
from nalanda.common.number_formats import short_name
from nalanda.common.plugins import find_plugins, import_plugins
from nalanda.common.text import closest, redact, suggest
from nalanda.config.bounds import check_choice, expand_home
from nalanda.config.schema import (
    EXPONENT,
    SOURCES,
    STAGE_KEYS,
    RunConfig,
    StageConfig,
    TokenizerConfig,
)


def load_config(
    path: str | Path, overrides: typing.Sequence[str] = (), *, training: bool = False
) -> RunConfig:
    """Reads a recipe (`find_recipe`), applies `section.key=value` (values are YAML), and checks the result.

    training: as `RunConfig.check` takes it.

    Raises:
        InputError: a missing file, invalid YAML, an unknown or missing key, a value of the wrong type, or
            settings that contradict one another; in one line.
    """
    path = find_recipe(str(path))
    sections = read_sections(path, overrides)
    recipe_warmup = shorten_warmup(sections, path, overrides)

    config = recipe_of(sections, path.parent, training=training)
    config.schedule.recipe_warmup = recipe_warmup
    return config


def recipe_of(sections: dict, folder: Path, *, training: bool = False) -> RunConfig:
    """The recipe of these sections, whose plugins may lie in `folder`. Raises as `load_config` does."""
    config = section(RunConfig, sections, "")
    folders = [Path.cwd(), folder]
    if _came_with_weights(folder):
        folders = [each for each in folders if not each.samefile(folder)]
    config.plugins = find_plugins(config.plugins, *folders)
    import_plugins(config.plugins, *folders)
    config.check(training=training)
    return config


def _came_with_weights(folder: Path) -> bool:
    """Whether this is a run's or model's folder. It may come from anywhere, so its code is no plugin of the user's."""
    weights = ("checkpoints", "config.json")
    return (folder / "config.yaml").exists() and any((folder / x).exists() for x in weights)


def read_sections(path: Path, overrides: typing.Sequence[str] = ()) -> dict:
    """The sections of a recipe with overrides applied, unchecked. Raises `InputError` as `load_config`."""
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: expected sections such as `model:` and `data:`, got {_name(values)}"
        )

    # Before the overrides: they then add to a section without the settings that they replace.
    _drop_options_of_another_map(values, overrides)
    _drop_another_tokenizer(values, overrides)
    for override in overrides:
        _override(values, override)

    data = values.get("data")
    if isinstance(data, dict) and data.get("documents") == "joined":
        # The lines of one text have no bos. A recipe that asks for it is refused later.
        data.setdefault("bos", False)
    return values


def _drop_options_of_another_map(values: dict, overrides: typing.Sequence[str]) -> None:
    """Drops the recipe's options of a feature map, if an override names another map."""
    model = values.get("model")
    named = [text.partition("=")[2] for text in overrides if text.startswith("model.feature_map=")]
    if isinstance(model, dict) and named and named[-1] != model.get("feature_map"):
        model.pop("feature_map_options", None)


def _drop_another_tokenizer(values: dict, overrides: typing.Sequence[str]) -> None:
    """Drops the recipe's tokenizer, if an override gives one of the other kind.

    A tokenizer is either loaded or trained. `tokenizer.path=x` replaces one that the recipe trains, with its
    settings; `tokenizer.train=bpe` replaces one that it loads.
    """
    pairs = [override.partition("=") for override in overrides]
    # An override with null gives no tokenizer.
    overridden = {key for key, _, text in pairs if text not in ("", "null", "~")}
    tokenizer = values.get("tokenizer")
    if "tokenizer.path" in overridden and isinstance(tokenizer, dict):
        values["tokenizer"] = {key: value for key, value in tokenizer.items() if key == "path"}
    elif "tokenizer.train" in overridden and isinstance(tokenizer, str):
        values["tokenizer"] = {}
    elif "tokenizer.train" in overridden and isinstance(tokenizer, dict):
        tokenizer.pop("path", None)


def shorten_warmup(sections: dict, path: Path, overrides: typing.Sequence[str]) -> int | None:
    """Shortens the warm-up in proportion, if an override shortens the training and none sets the warm-up.

    Returns the warm-up steps of the recipe in the file `path`, or None if it has none or an override sets them.
    """
    overridden = {override.partition("=")[0] for override in overrides}
    if overridden & WARMUP_KEYS:
        return None
    if overridden.isdisjoint({"train", "train.steps"}):
        return _read_count(sections, "schedule", "warmup_steps") or None
    recipe = read_sections(path)
    before, steps = (_read_count(values, "train", "steps") for values in (recipe, sections))
    warmup = _read_count(recipe, "schedule", "warmup_steps")

    # A warm-up longer than its recipe's training is a mistake there, which `RunConfig.check` refuses.
    if not 0 < steps < before or not 0 < warmup <= before:
        return warmup or None
    sections["schedule"]["warmup_steps"] = max(1, round(warmup * steps / before))
    return warmup


WARMUP_KEYS = {"schedule", "schedule.warmup_steps"}
"""Overrides that set the warm-up."""


def _read_count(sections: dict, section: str, key: str) -> int:
    """The whole number at a key of unchecked sections; 0 if there is none."""
    values = sections.get(section)
    number = _number(values.get(key)) if isinstance(values, dict) else None
    return int(number) if number is not None and number.is_integer() else 0


TEXTS = (".txt", ".md", ".jsonl", ".ndjson", ".csv", ".parquet", ".arrow", ".tar", ".gz", ".zst")
"""Ends of the names of texts, which no recipe has."""

DOCUMENTS = (".doc", ".docx", ".epub", ".htm", ".html", ".odt", ".pdf", ".rtf")
"""Ends of the names of documents whose text must be extracted first."""


def find_recipe(name: str) -> Path:
    """The file `name`, or else the shipped recipe of that name, such as `demo` or `fla/deltanet_340m`.

    Raises `InputError` if there is neither, and for a text.
    """
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in recipe_folders())):
        if path.is_file() and not name.lower().endswith((*TEXTS, *DOCUMENTS)):
            return path
    inside = Path(name) / "config.yaml"
    if inside.is_file():
        raise InputError(f"{name}: a folder, not a recipe; its recipe is {inside}")
    if name.lower().endswith(DOCUMENTS):
        train = "nalanda train demo data.source=FILE.txt"
        raise InputError(f"{name}: not a recipe; save its text as .txt, then {train}")
    if name and Path(name).exists():
        settings = shlex.join([f"data.source={name}", f"output_dir=runs/{Path(name).stem}"])
        raise InputError(f"{name}: not a recipe; to train on it: nalanda train demo {settings}")
    if name.endswith(TEXTS):
        train = "nalanda train demo data.source=FILE"
        raise InputError(f"{name}: no such file; to train on a text: {train}")
    near = closest(name, shipped_recipes())
    advice = f"did you mean {near}?" if near else "nalanda recipes lists those that ship"
    raise InputError(f"{name or 'an empty name'}: no such recipe or file; {advice}")


def shipped_recipes() -> dict[str, Path]:
    """The recipes of the checkout or installed package, by name, without those of other libraries' models."""
    return {p.stem: p for folder in recipe_folders() for p in sorted(folder.glob("*.yaml"))}


def is_recipe(name: str) -> bool:
    """Whether this names a recipe, and not a folder or dataset."""
    shipped = any((folder / f"{name}.yaml").is_file() for folder in recipe_folders())
    return name.endswith((".yaml", ".yml")) or (shipped and not Path(name).exists())


def recipe_folders() -> tuple[Path, Path]:
    """The recipe folders of an installed package and of a checkout; one of them exists."""
    package = Path(__file__).parents[1]
    return package / "recipes", package.parents[1] / "recipes"


def differences(old: dict, new: dict, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The differences of two configs as dicts, `{"optim.lr": (old, new)}`; None for a missing value."""
    changes = {}
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changes |= differences(before, after, f"{where}{key}.")
        elif before != after:
            changes[f"{where}{key}"] = (before, after)
    return changes


def parts_of(key: str) -> tuple[str, str, str]:
    """Section, name and the rest of a key such as `stages.long.data.source`; "" for what it lacks."""
    section, name, inner = (*key.split(".", 2), "", "")[:3]
    return section, name, inner


def _override(values: dict, override: str) -> None:
    """Applies `section.key=value` to a recipe's sections."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        example = "train.steps=100"
        if override.endswith(TEXTS):
            example = f"data.source={override}"
        elif _type_of(override) is not None:
            example = f"{override}=VALUE"
        raise InputError(f"{override}: expected section.key=value, such as {example}")
    *path, last = key.split(".")
    for name in path:
        child = values.get(name)
        if name == "tokenizer" and isinstance(child, str):
            # A bare string is short for the path: written out, another key can join it.
            child = {"path": child}
        if not isinstance(child, dict):
            child = {}
        values[name] = child
        values = child

    try:
        value = parse_yaml(text, override)
    except InputError:  # such as the glob *.jsonl
        if not _holds_text(key):
            raise
        value = text
    if isinstance(value, str) and text.startswith(f"{value} ") and _holds_text(key):
        value = text.strip()  # " #b" of a file's name is no comment
    values[last] = value


def _holds_text(key: str) -> bool:
    """Whether a recipe's key, such as data.source, may have text as its value."""
    return str in _choices(_type_of(key))


def _type_of(key: str) -> Any:
    """The type of a recipe's key, such as data.source or stages.NAME.data.source; None for an unknown one."""
    kind: Any = RunConfig
    names = key.split(".")
    # A stage's sections have the recipe's names.
    for name in names[2:] if names[0] == "stages" else names:
        kind = typing.get_type_hints(kind).get(name) if is_dataclass(kind) else None
    return kind


def _choices(kind: Any) -> list[Any]:
    """The types of a union, None left out, or the one type."""
    union = get_origin(kind) in (typing.Union, types.UnionType)
    return [choice for choice in get_args(kind) if choice is not type(None)] if union else [kind]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 in which 1e-5 and 1.5e4 are numbers, not text, and a duplicate key an error.

    Integers are decimal. YAML 1.1 reads 010 and 1:30 as 8 and 90; here they are text. 010 becomes 10 where a
    number is needed. 3.2e4 is an integer, also where no type is known: of a key of `model`.
    """

    def construct_yaml_float(self, node: Any) -> float:
        number = super().construct_yaml_float(node)
        is_integer = "e" in node.value.lower() and number.is_integer()
        return int(number) if is_integer else number

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: dict[Any, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            # {steps:10} has the key "steps:10" and nothing for its value.
            if node.flow_style and name and not key.style and ":" in key.value and not value.value:
                pair = key.value.replace(":", ": ", 1)
                problem = f"{key.value} needs a blank after the colon; write {{{pair}}}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            # With its tag: 1 and '1' are two keys.
            if name in seen:
                problem = f"{key.value!r} is a duplicate of line {seen[name]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if name:
                seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_INT = "tag:yaml.org,2002:int"
# YAML 1.1's rules, without that of integers, which the next line replaces.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag != _INT]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(*EXPONENT)
_Loader.add_constructor(EXPONENT[0], _Loader.construct_yaml_float)


def read_yaml(path: Path) -> Any:
    """Parses a YAML file. Raises `InputError`, with the file's name and the line."""
    content = path.read_bytes()
    try:
        return parse_yaml(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        if b"\0" in content:
            raise InputError(f"{path}: not a text file; recipes are YAML") from None
        line = content[: error.start].count(b"\n") + 1
        raise InputError(f"{path}: line {line}: not UTF-8: save it as UTF-8") from None


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML. Raises `InputError`, with `source` and the line."""
    source = redact(source if len(source) < 100 else f"{source[:99]}…")
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise InputError(f"{source}: nested too deeply for a recipe") from None
    # An impossible date or number; a word that !!bool or !!timestamp calls one.
    except (ValueError, LookupError, AttributeError) as error:
        raise InputError(f"{source}: not YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = mark.line + 1 if mark else 1
        if r"'\t'" in problem:
            problem = "indented with a tab; indent with blanks"
        raise InputError(f"{source}: line {line}: not YAML: {problem}") from None


MAIN_KEYS = {"data": "source", "optim": "name", "schedule": "name"}
"""The key that a lone text in place of a section may be meant for."""

OTHER_VALIDATION = "data.validation_source=FILE, or validation.every=0 for none"
GUESSES = (
    *("data.val", "data.val_source", "data.validation", "data.validation_file"),
    *("validation", "validation.data", "validation.source"),
)
INSTEAD_OF_KEYS = dict.fromkeys(GUESSES, OTHER_VALIDATION) | {
    "batch_size": "train.micro_batch_size, or train.tokens_per_step",
    "learning_rate": "optim.lr",
    "model": "model.mixer=NAME, or model={auto: TYPE} for a model of transformers",
    **dict.fromkeys(("sequence_length", "train.sequence_length"), "data.seq_len"),
}
"""What is typed here for keys that people guess, and whose nearest names are others."""


def section(cls: type, values: Any, where: str) -> Any:
    """An instance of dataclass `cls` from a mapping; checks its keys and types.

    where: the prefix of its keys in errors, such as `optim.`.
    """
    if cls is TokenizerConfig and isinstance(values, str):
        values = {"path": values}
    if not isinstance(values, dict):
        name = where.rstrip(".") or "recipe"
        main_key = MAIN_KEYS.get(name) if isinstance(values, str) else None
        if main_key:
            advice = f"; write {shlex.quote(f'{name}.{main_key}={values}')}"
        else:
            advice = _meant(name)
        raise InputError(f"{name}: expected a section of keys, got {_name(values)}{advice}")
    kinds = typing.get_type_hints(cls)
    keys = {f.name: f for f in fields(cls) if f.init}
    for key in values:
        if key not in keys:
            raise InputError(f"{where}{key}: no such key{_instead(cls, str(key), [*keys], where)}")

    arguments = {}
    for f in keys.values():
        if f.name in values:
            arguments[f.name] = _convert(values[f.name], kinds[f.name], f"{where}{f.name}")
        elif f.default is MISSING and f.default_factory is MISSING:
            # A missing section is read as empty: the error then names the missing key.
            if not is_dataclass(kinds[f.name]):
                remedy = f"set {where}{f.name}=VALUE"
                if "[" in where:  # overrides reach no item of a list
                    remedy = f"add {f.name} to that item of {where.partition('[')[0]}"
                raise InputError(f"{where}{f.name}: missing from the recipe; {remedy}")
            arguments[f.name] = section(typing.cast(type, kinds[f.name]), {}, f"{where}{f.name}.")
    return cls(**arguments)


def _convert(value: Any, kind: Any, where: str) -> Any:
    """Converts `value` to `kind`; strings may become numbers. Raises `InputError`."""
    if kind is Any:
        return value
    if is_dataclass(kind):
        read = _stage if kind is StageConfig else partial(section, typing.cast(type, kind))
        return read(value, f"{where}.")

    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        for choice in _choices(kind):
            try:
                # The first type that takes the value.
                return _convert(value, choice, where)
            except InputError:
                if isinstance(value, get_origin(choice) or ()):  # a list with a wrong item
                    raise
    if origin is Literal:
        value = short_name(value)
        check_choice(value, arguments, where)
        return value
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        return _convert_items(value, kind, where)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(each, arguments[1], f"{where}.{key}") for key, each in value.items()}

    # 2e2 is an integer, "3e-4" a number, and true neither.
    number = _number(value)
    if kind is float and number is not None:
        return number
    if kind is int and number is not None and number.is_integer():
        # An int stays as it is: a float does not hold every large one.
        return value if isinstance(value, int) else int(number)
    if kind in (str, bool, list, tuple, dict) and isinstance(value, kind):
        return value
    expected = " or ".join(KIND_WORDS.get(get_origin(k) or k, str(k)) for k in _choices(kind))
    raise InputError(
        f"{where}: expected {expected}, got {_name(value)}{_advice(value, kind, where)}"
    )


def _stage(values: Any, where: str) -> StageConfig:
    """A stage, with the types of the sections that it changes. Raises `InputError`."""
    changeable = "data, schedule, optim, train and validation"
    for key in values if isinstance(values, dict) else ():
        if key in typing.get_type_hints(RunConfig) and key not in STAGE_KEYS:
            raise InputError(f"{where}{key}: a stage cannot change it, only {changeable}")
    stage = section(StageConfig, values, where)

    for name, allowed in STAGE_KEYS.items():
        kinds = typing.get_type_hints(typing.get_type_hints(RunConfig)[name])
        keys = getattr(stage, name)
        for key in keys:
            if key not in kinds:
                near = suggest(str(key), allowed, f"{where}{name}.")
                raise InputError(f"{where}{name}.{key}: no such key{near}")
            if key not in allowed:
                raise InputError(
                    f"{where}{name}.{key}: a stage cannot change it; of {name} only {', '.join(allowed)}"
                )
            keys[key] = _convert(keys[key], kinds[key], f"{where}{name}.{key}")
            if key in SOURCES:
                keys[key] = expand_home(keys[key], f"{where}{name}.{key}")
    return stage


def _convert_items(values: Any, kind: Any, where: str) -> Any:
    """Converts the items of a list or tuple."""
    container, kinds = get_origin(kind), get_args(kind)
    # All items of a list, or of a tuple of any length, have one kind.
    if container is list or kinds[-1] is Ellipsis:
        kinds = [kinds[0]] * len(values)
    if len(values) != len(kinds):
        raise InputError(f"{where}: expected {len(kinds)} values, got {len(values)}")
    pairs = zip(values, kinds, strict=True)
    return container(_convert(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(pairs))


KIND_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a section of keys",
}
"""Types of a recipe's values, as errors call them."""


def _advice(value: Any, kind: Any, where: str) -> str:
    """Advice for one name that should be a list or a section, and for a number or a boolean that should be text."""
    if get_origin(kind) is dict:
        return _meant(where)
    if get_origin(kind) is list and isinstance(value, (str, int, float)):
        return f"; write [{value}]"
    quotable = value is not None and not isinstance(value, (list, tuple, dict))
    return (
        """; quote it, on a command line as '"…"'""" if quotable and str in _choices(kind) else ""
    )


def _number(value: Any) -> float | None:
    # In Python a bool is an int; in a recipe it is no number.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _meant(key: str) -> str:
    """`; did you mean optim.lr?` for a key of `INSTEAD_OF_KEYS`, else an empty string."""
    instead = INSTEAD_OF_KEYS.get(key)
    return f"; did you mean {instead}?" if instead else ""


def _instead(cls: type, key: str, names: list[str], section: str) -> str:
    """Suggests a key in place of an unknown one of `cls`, from the same section, "optim.", or another one."""
    if correction := _meant(f"{section}{key}"):
        return correction
    hints = typing.get_type_hints(RunConfig)
    sections = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    if cls in (RunConfig, *sections.values()) and not closest(key, names, 0.75):
        keys = {name: [f.name for f in fields(kind)] for name, kind in sections.items()}
        from nalanda.model.configuration import NalandaConfig  # takes seconds: it imports torch

        keys["model"] = list(NalandaConfig.__annotations__)
        # Among the keys of all sections: this one may stand in the wrong section.
        near = closest(key, {name for section_keys in keys.values() for name in section_keys}, 0.75)
        candidates = [
            f"{name}.{near}" for name, section_keys in keys.items() if near in section_keys
        ]
        if candidates:
            return f"; did you mean {' or '.join(candidates)}?"
    return suggest(key, names, section)


def _name(value: Any) -> str:
    return "nothing" if value is None else repr(value)
