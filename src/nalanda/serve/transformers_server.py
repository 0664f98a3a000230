"""The server of transformers, with one model."""

from pathlib import Path

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import app

import nalanda.model  # noqa: F401  behind the server, to which it names its class
from nalanda.common.errors import InputError, first_line
from nalanda.serve.options import ServeOptions


def run_transformers(folder: str, options: ServeOptions, others: list[str]) -> None:
    """Serves until ctrl-C. others: options of `transformers serve`.

    Raises:
        InputError: the model cannot be loaded.
    """
    # Its own list has models of the hub's cache. It leaves out the folder, and fails without a cache.
    created = int(Path(folder, "config.json").stat().st_mtime)
    listed = {"id": folder, "object": "model", "created": created, "owned_by": "nalanda"}
    ModelManager.get_gen_models = staticmethod(lambda: [listed])  # pyrefly: ignore[bad-assignment]

    command = ["serve", folder, "--host", options.host, "--port", str(options.port), *others]
    try:
        app(command, standalone_mode=False)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot serve {folder}: {first_line(error)}") from error
