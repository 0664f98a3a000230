"""Plugins: modules outside the package that register mixers or feature maps.

A checkpoint carries their files, so a plugin is one flat file whose imports exist wherever a checkpoint
loads: torch, numpy, transformers, the standard library and the files of `nalanda.model`.
"""

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.utils import cached_file

PORTABLE = {"torch", "numpy", "transformers", *sys.stdlib_module_names}
MODULES: dict[tuple[str, str], str] = {}
"""(`mixer` or `feature_map`, registered name) to the module that registered it."""


def register(kind: str, name: str, row: Any, table: dict, missing: list[str]) -> None:
    """Adds `row` to `table` on behalf of the module that called `register_<kind>`.

    Raises ValueError for a name that another module has taken, and for what the contract asks and `missing`
    lists.
    """
    module = sys._getframe(2).f_globals["__name__"]
    where = f"register_{kind}({name!r}): "
    if name in table and MODULES.get((kind, name)) != module:
        owner = MODULES.get((kind, name), __package__)
        raise ValueError(f"{where}{owner} has a {kind} of that name; choose another")
    if missing:
        called = getattr(getattr(row, "func", row), "__name__", row)
        raise ValueError(
            f"{where}{called} {'; '.join(missing)} (the contract: nalanda/model/base.py)"
        )
    table[name], MODULES[kind, name] = row, module


def plugins_of(mixers: dict[str, Any]) -> list[str]:
    """The flat names of the plugins that these mixers, by name, and their maps come from."""
    used = {("mixer", name) for name in mixers} | {
        ("feature_map", m.rule.map) for m in mixers.values()
    }
    return sorted({_flat(module) for key, module in MODULES.items() if key in used})


def _flat(module: str) -> str:
    """A module's name without the package, where it was loaded from a checkpoint's folder into this one."""
    return module.removeprefix(f"{__package__}.")


def missing_plugins(names: Iterable[str]) -> list[str]:
    """Those of a config's plugins that are not loaded, after an attempt to import them.

    Config files come from anywhere, so only what a user has put on the path as a plugin is imported: a flat
    module that `portable_source` accepts, that registers something, and that no checkpoint brought along.
    """
    for name in names:
        if name in map(_flat, MODULES.values()) or not str(name).isidentifier():
            continue
        spec = importlib.util.find_spec(name)
        path = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
        if path is None or path.suffix != ".py" or path.with_name("config.json").exists():
            continue
        if re.search(
            r"^from \.\w+ import .*\bregister_", portable_source(name, path), re.MULTILINE
        ):
            importlib.import_module(name)
    return [name for name in names if name not in map(_flat, MODULES.values())]


def load_copies(names: Iterable[str], source: str, **hub: Any) -> None:
    """Imports the plugins that a checkpoint (a folder or a hub id) carries, as siblings of this file."""
    for name in missing_plugins(names):
        if not str(name).isidentifier() or importlib.util.find_spec(f".{name}", __package__):
            raise ValueError(f"{source}: {name!r} cannot be the name of a plugin")
        path = cached_file(source, f"{name}.py", **hub)
        spec = importlib.util.spec_from_file_location(f"{__package__}.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def plugin_files(names: Iterable[str]) -> dict[str, str]:
    """File name to text of the plugins' copies, as they stand beside the weights.

    Raises ValueError, in one line, for a plugin whose file cannot travel.
    """
    modules = {_flat(module): module for module in MODULES.values()}
    files = {}
    for name in names:
        module = modules.get(name, name)
        path = Path(getattr(sys.modules.get(module), "__file__", None) or "")
        if path.name != f"{name}.py":
            raise ValueError(
                f"{name}: registers a mixer or a map, which must be done in one flat module file, so that "
                "checkpoints can carry it"
            )
        came_with_weights = module != name
        text = (
            path.read_text(encoding="utf-8") if came_with_weights else portable_source(name, path)
        )
        files[path.name] = text
    return files


def portable_source(name: str, path: Path) -> str:
    """A plugin's text, its imports of `nalanda` made relative. Raises ValueError where it cannot travel."""
    source = path.read_text(encoding="utf-8-sig")
    if path.with_name(f"{name}.py") != path or (Path(__file__).parent / f"{name}.py").exists():
        raise ValueError(
            f"{path}: a plugin must be one flat file, named unlike those of {__package__}"
        )
    # Columns of `ast` count bytes, and form feeds end no line of it.
    lines = source.encode().split(b"\n")
    # From the last one, so that columns of earlier ones stay.
    for node in reversed([*ast.walk(ast.parse(source, str(path)))]):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for module in _imported_modules(node):
            if module.partition(".")[0] in PORTABLE:
                continue
            files = _defining_files(node, module) if isinstance(node, ast.ImportFrom) else None
            if files is None:
                raise ValueError(
                    f"{path}, line {node.lineno}: imports {module}; checkpoints carry this file, so it may "
                    f"import only torch, numpy, transformers, the standard library and `from {__package__}`"
                )

            # One relative import for each file, in place of the statement.
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            indent, rest = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            imports = [
                indent + f"from .{file} import {', '.join(names)}".encode()
                for file, names in files.items()
            ]
            lines[first : last + 1] = [b"\n".join(imports) + rest, *[b""] * (last - first)]
    return b"\n".join(lines).decode()


def _imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["." * node.level + (node.module or "")]


def _defining_files(node: ast.ImportFrom, module: str) -> dict[str, list[str]] | None:
    """File of this folder ("" is the folder) to what `node` imports from it; None for other names."""
    package, files = str(__package__), {}
    for alias in node.names:
        owner = module
        if module in (package, package.rpartition(".")[0]):
            value = getattr(importlib.import_module(module), alias.name, None)
            owner = str(getattr(value, "__module__", ""))
            if isinstance(value, ModuleType):
                owner = value.__name__.rpartition(".")[0]
        if owner != package and not owner.startswith(f"{package}."):
            return None
        text = alias.name + (f" as {alias.asname}" if alias.asname else "")
        files.setdefault(owner.removeprefix(package).removeprefix("."), []).append(text)
    return files
