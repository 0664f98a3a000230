"""Imports the modules that a recipe's `plugins` names; they register mixers, readers and the like."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from nalanda.common.errors import InputError, first_line

imported: list[str] = []
"""Names of the plugins that this process has imported, for the processes that it starts."""


def import_plugins(names: Iterable[str], *folders: Path) -> None:
    """Imports each module once. `folders` extend the module search path, which child processes inherit.

    Raises `InputError` for a module that cannot be imported.
    """
    for name in names:
        if name in imported:
            continue
        for folder in folders:
            path = str(folder.resolve())
            if path not in sys.path:
                sys.path.append(path)
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module's own code raises
            message = f"plugins: {name} cannot be imported: {first_line(error)}"
            if name.endswith(".py"):
                message += f"; name the module without .py, plugins=[{name.removesuffix('.py')}]"
            elif isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
                message += (
                    "; install it or put its file beside the recipe or in the working directory"
                )
            raise InputError(message) from None
        imported.append(name)
