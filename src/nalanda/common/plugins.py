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
        sys.path += [
            place for folder in folders if (place := str(folder.resolve())) not in sys.path
        ]
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module's own code raises
            absent = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
            hint = (
                "; install it or put its file beside the recipe or in the working directory"
                * absent
            )
            raise InputError(
                f"plugins: {name} cannot be imported: {first_line(error)}{hint}"
            ) from None
        imported.append(name)
