"""Reads a recipe, YAML and `section.key=value` overrides, and checks it."""

import copy
import math
import os
import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from nalanda.common.errors import InputError
from nalanda.common.plugins import import_plugins
from nalanda.common.text import closest, redact, suggest
from nalanda.config.bounds import check_choice
from nalanda.config.schema import EXPONENT, RunConfig, TokenizerConfig


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> RunConfig:
    """Reads a recipe (`find_recipe`), applies `section.key=value` (values are YAML), and checks the result.

    Raises:
        InputError: a missing file, invalid YAML, an unknown or missing key, a value of the wrong type, or
            settings that contradict one another; in one line.
    """
    path = find_recipe(str(path))
    return recipe_of(read_sections(path, overrides), path.parent)


def recipe_of(sections: dict, folder: Path) -> RunConfig:
    """The recipe of these sections, whose plugins may lie in `folder`. Raises as `load_config` does."""
    config = at_home(section(RunConfig, sections, ""))
    import_plugins(config.plugins, Path.cwd(), folder)
    config.check()
    return config


def at_home(config: RunConfig) -> RunConfig:
    """`config` with the user's home in place of `~`. Raises `InputError` for the home of an unknown user."""
    config = copy.deepcopy(config)
    data, parts = config.data, config.data.mixture
    places: list[tuple[Any, str, str]] = [(config, "output_dir", "")]
    places += [
        (part, key, "data.") for part in (data, *parts) for key in ("source", "validation_source")
    ]
    places += [(config.tokenizer, "path", "tokenizer.")]
    places += [
        (config.model, key, "model.") for key in ("auto", "init_from") if key in config.model
    ]

    for holder, key, where in places:
        values = holder if isinstance(holder, dict) else vars(holder)
        value, name = values[key], f"{where}{key}"
        several = isinstance(value, list)
        values[key] = [_at_home(each, name) for each in value] if several else _at_home(value, name)
    return config


def _at_home(value: Any, key: str) -> Any:
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    path = os.path.expanduser(value)
    if path == value and not os.path.lexists(value):
        raise InputError(f"{key}: {value}: there is no such user; write the whole path")
    return path


def read_sections(path: Path, overrides: typing.Sequence[str] = ()) -> dict:
    """The sections of a recipe with overrides applied, unchecked. Raises `InputError` as `load_config`."""
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: expected sections such as `model:` and `data:`, got {_name(values)}"
        )
    _drop_options_of_another_map(values, overrides)
    _drop_another_tokenizer(values, overrides)
    for override in overrides:
        _override(values, override)
    return values


def _drop_options_of_another_map(values: dict, overrides: typing.Sequence[str]) -> None:
    """The options of a recipe are those of the map that it names."""
    model = values.get("model")
    named = [text.partition("=")[2] for text in overrides if text.startswith("model.feature_map=")]
    if isinstance(model, dict) and named and named[-1] != model.get("feature_map"):
        model.pop("feature_map_options", None)


def _drop_another_tokenizer(values: dict, overrides: typing.Sequence[str]) -> None:
    """A recipe's tokenizer is either loaded or trained: `tokenizer.path=x` replaces one that it trains, with
    its settings, and `tokenizer.train=bpe` one that it loads."""
    given = {
        key
        for key, _, text in (o.partition("=") for o in overrides)
        if text not in ("", "null", "~")
    }
    tokenizer = values.get("tokenizer")
    if "tokenizer.path" in given and isinstance(tokenizer, dict):
        values["tokenizer"] = {key: value for key, value in tokenizer.items() if key == "path"}
    elif "tokenizer.train" in given and isinstance(tokenizer, str):
        values["tokenizer"] = {}
    elif "tokenizer.train" in given and isinstance(tokenizer, dict):
        tokenizer.pop("path", None)


def find_recipe(name: str) -> Path:
    """The file `name`, or else the shipped recipe of that name, such as `demo` or `fla/deltanet_340m`.

    Raises `InputError` if there is neither.
    """
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in recipe_folders())):
        if path.is_file():
            return path
    if (kept := Path(name) / "config.yaml").is_file():
        raise InputError(f"{name}: a folder, not a recipe; its recipe is {kept}")
    raise InputError(f"{name}: no such recipe or file{suggest(name, shipped_recipes())}")


def shipped_recipes() -> dict[str, Path]:
    """The recipes of the checkout or installed package, by name, without those of other libraries' models."""
    return {p.stem: p for folder in recipe_folders() for p in sorted(folder.glob("*.yaml"))}


def is_recipe(name: str) -> bool:
    """Whether this names a recipe, and not a folder or dataset."""
    shipped = any((folder / f"{name}.yaml").is_file() for folder in recipe_folders())
    return name.endswith((".yaml", ".yml")) or (shipped and not Path(name).exists())


def recipe_folders() -> tuple[Path, Path]:
    """The recipe folders of an installed package and of a checkout; one of them exists."""
    here = Path(__file__).parents[1]
    return here / "recipes", here.parents[1] / "recipes"


def differences(old: dict, new: dict, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The differences of two configs as dicts, `{"optim.lr": (old, new)}`; None for a missing value."""
    found = {}
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found |= differences(before, after, f"{where}{key}.")
        elif before != after:
            found[f"{where}{key}"] = (before, after)
    return found


def _override(values: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"{override}: expected section.key=value, such as train.steps=100")
    *path, last = key.split(".")
    for part in path:
        child = values.get(part)
        if part == "tokenizer" and isinstance(child, str):
            child = {"path": child}
        values[part] = values = child if isinstance(child, dict) else {}
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
    kind: Any = RunConfig
    for part in key.split("."):
        kind = typing.get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return str in _choices(kind)


def _choices(kind: Any) -> list[Any]:
    """The types of a union, None left out, or the one type."""
    union = get_origin(kind) in (typing.Union, types.UnionType)
    return [choice for choice in get_args(kind) if choice is not type(None)] if union else [kind]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 in which 1e-5 and 1.5e4 are numbers, not text, and a duplicate key an error. Integers are
    decimal: 010 and 1:30, which YAML 1.1 reads as 8 and 90, are text; 010 becomes 10 where a number is
    needed."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                problem = f"{key.value!r} is a duplicate of line {seen[name]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if name:
                seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_INT = "tag:yaml.org,2002:int"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag != _INT]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(*EXPONENT)


def read_yaml(path: Path) -> Any:
    """Parses a YAML file. Raises `InputError`, with the file's name and the line."""
    content = path.read_bytes()
    try:
        return parse_yaml(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(f"{path}: line {line}: not UTF-8: save it as UTF-8") from None


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML. Raises `InputError`, with `source` and the line."""
    source = redact(source if len(source) < 100 else f"{source[:99]}…")
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise InputError(f"{source}: nested too deeply for a recipe") from None
    except ValueError as error:  # an impossible date or number
        raise InputError(f"{source}: not YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = mark.line + 1 if mark else 1
        raise InputError(f"{source}: line {line}: not YAML: {problem}") from None


def section(cls: type, values: Any, where: str) -> Any:
    """An instance of dataclass `cls` from a mapping; checks its keys and types. where: `optim.` or empty."""
    if cls is TokenizerConfig and isinstance(values, str):
        values = {"path": values}
    if not isinstance(values, dict):
        raise InputError(
            f"{where.rstrip('.') or 'recipe'}: expected a section of keys, got {_name(values)}"
        )
    kinds = typing.get_type_hints(cls)
    known = [f for f in fields(cls) if f.init]
    for key in values:
        if key not in {f.name for f in known}:
            raise InputError(
                f"{where}{key}: no such key{_instead(cls, str(key), [f.name for f in known])}"
            )
    arguments = {}
    for f in known:
        if f.name in values:
            arguments[f.name] = _convert(values[f.name], kinds[f.name], f"{where}{f.name}")
        elif f.default is MISSING and f.default_factory is MISSING:
            # A missing section is read as empty: the error then names the missing key.
            if not is_dataclass(kinds[f.name]):
                raise InputError(f"{where}{f.name}: missing from the recipe")
            arguments[f.name] = section(typing.cast(type, kinds[f.name]), {}, f"{where}{f.name}.")
    return cls(**arguments)


def _convert(value: Any, kind: Any, where: str) -> Any:
    """Converts `value` to `kind`; strings may become numbers. Raises `InputError`."""
    if is_dataclass(kind):
        return section(typing.cast(type, kind), value, f"{where}.")
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        for choice in _choices(kind):
            try:
                return _convert(value, choice, where)
            except InputError:
                if isinstance(value, get_origin(choice) or ()):  # a list with a wrong item
                    raise
    if origin is Literal:
        check_choice(value, arguments, where)
        return value
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        variadic = origin is list or arguments[-1] is Ellipsis
        if not variadic and len(value) != len(arguments):
            raise InputError(f"{where}: expected {len(arguments)} values, got {len(value)}")
        kinds = [arguments[0]] * len(value) if variadic else arguments
        return origin(
            _convert(v, k, f"{where}[{i}]")
            for i, (v, k) in enumerate(zip(value, kinds, strict=True))
        )
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if kind is float and (number := _number(value)) is not None:
        return number
    if kind is int and (number := _number(value)) is not None and number.is_integer():
        return value if isinstance(value, int) else int(number)
    if kind in (str, bool, list, tuple, dict) and isinstance(value, kind):
        return value
    words: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
    }
    words |= {list: "a list", tuple: "a list", dict: "a section of keys"}
    expected = " or ".join(words.get(get_origin(k) or k, str(k)) for k in _choices(kind))
    quote = (
        str in _choices(kind) and value is not None and not isinstance(value, (list, tuple, dict))
    )
    advice = """; quote it, on a command line as '"…"'""" if quote else ""
    raise InputError(f"{where}: expected {expected}, got {_name(value)}{advice}")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _instead(cls: type, key: str, known: list[str]) -> str:
    """Suggests known keys for an unknown key of `cls`, from the same section or another one."""
    sections = {
        name: kind for name, kind in typing.get_type_hints(RunConfig).items() if is_dataclass(kind)
    }
    if cls in (RunConfig, *sections.values()) and not closest(key, known, 0.75):
        keys = {name: [f.name for f in fields(kind)] for name, kind in sections.items()}
        from nalanda.model.configuration import NalandaConfig  # takes seconds: it imports torch

        keys["model"] = list(NalandaConfig.__annotations__)
        near = closest(key, {key for names in keys.values() for key in names}, 0.75)
        if places := [f"{name}.{near}" for name, names in keys.items() if near in names]:
            return f"; did you mean {' or '.join(places)}?"
    return suggest(key, known)


def _name(value: Any) -> str:
    return "nothing" if value is None else repr(value)
