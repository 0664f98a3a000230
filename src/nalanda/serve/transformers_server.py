"""The server of transformers, with one model."""

from pathlib import Path
from typing import Any, NoReturn

from fastapi import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.transformers import app

from nalanda.common.errors import InputError, first_line
from nalanda.serve.options import ServeOptions
from nalanda.serve.server import NO_TEMPLATE, has_chat_template


def run_transformers(folder: str, options: ServeOptions, others: list[str]) -> None:
    """Serves until ctrl-C. others: options of `transformers serve`.

    Raises:
        InputError: the model cannot be loaded.
    """
    # Its own list, before transformers 5.24, has models of the hub's cache. It leaves out the folder, and fails
    # without a cache.
    if hasattr(ModelManager, "get_gen_models"):
        created = int(Path(folder, "config.json").stat().st_mtime)
        listed = {"id": folder, "object": "model", "created": created, "owned_by": "nalanda"}
        ModelManager.get_gen_models = staticmethod(lambda: [listed])  # pyrefly: ignore[bad-assignment]
    if not has_chat_template(Path(folder)):
        for handler in (ChatCompletionHandler, ResponseHandler):
            handler.handle_request = refuse_chat  # pyrefly: ignore[bad-assignment]

    command = ["serve", folder, "--host", options.host, "--port", str(options.port), *others]
    try:
        app(command, standalone_mode=False)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot serve {folder}: {first_line(error)}") from error


async def refuse_chat(handler: Any, body: dict[str, Any], request_id: str) -> NoReturn:
    """Answers 400 with the reason, where transformers answers 500 without any."""
    raise HTTPException(400, f"{body.get('model')}: {NO_TEMPLATE}")
