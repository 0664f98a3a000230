"""Imports the modules that a recipe's `plugins` names; they register mixers, readers and the like."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from nalanda.common.errors import InputError, first_line

imported: list[str] = []
"""Names of the plugins that this process has imported, for the processes that it starts."""


def find_plugins(names: Iterable[str], *folders: Path) -> list[str]:
    """The names with the whole path of each that is a file `x.py`, from the first folder that has it.

    Raises `InputError` for a file that is in none.
    """
    full_names = []
    for name in names:
        if not name.endswith(".py"):
            full_names.append(name)
            continue
        paths = [folder / Path(name).expanduser() for folder in folders]
        file = next((path for path in paths if path.is_file()), None)
        if file is None:
            raise InputError(f"plugins: {name}: no such file; write its path from {Path.cwd()}")
        full_names.append(str(file.resolve()))
    return full_names


def import_plugins(names: Iterable[str], *folders: Path) -> None:
    """Imports each module, or file `x.py`, once.

    `folders`, and those of the files, extend the module search path, which child processes inherit.

    Raises `InputError` for a module that cannot be imported.
    """
    for name in names:
        file = Path(name).resolve() if name.endswith(".py") else None
        module = file.stem if file else name
        for folder in (*folders, file.parent) if file else folders:
            path = str(folder.resolve())
            if path not in sys.path:
                sys.path.append(path)

        if module not in imported:
            _import(module, name)
            imported.append(module)
        loaded = getattr(sys.modules.get(module), "__file__", None)
        if file and (loaded is None or Path(loaded).resolve() != file):
            raise InputError(
                f"plugins: {name}: {loaded or 'Python'} has a module {module} too; rename the file"
            )


def _import(module: str, name: str) -> None:
    """Imports the module of the plugin `name`. Raises `InputError`."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever the module's own code raises
        message = f"plugins: {name} cannot be imported: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            message += "; install it or put its file beside the recipe or in the working directory"
        raise InputError(message) from None
