"""The server of transformers, with one model."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
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
    for handler in (CompletionHandler, ChatCompletionHandler, ResponseHandler):
        handler.handle_request = refusing(handler.handle_request)  # pyrefly: ignore[bad-assignment]

    command = ["serve", folder, "--host", options.host, "--port", str(options.port), *others]
    try:
        app(command, standalone_mode=False)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot serve {folder}: {first_line(error)}") from error


async def refuse_chat(handler: Any, body: dict[str, Any], request_id: str) -> JSONResponse:
    return refusal(f"{body.get('model')}: {NO_TEMPLATE}")


def refusing(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`answer`, which refuses a length below 1, and says why a request's turns or values do not serve."""

    async def handle_request(handler: Any, body: dict[str, Any], request_id: str) -> Any:
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            length = body.get(name)
            if isinstance(length, int | float) and length < 1:
                return refusal(f"{name}={length}: take 1 or more")
        try:
            return await answer(handler, body, request_id)
        except TemplateError as error:
            return refusal(f"the chat template refuses: {error}")
        except ValueError as error:
            return refusal(first_line(error))

    return handle_request


def refusal(reason: str) -> JSONResponse:
    """Code 400 and the reason where OpenAI's client looks for it. transformers answers 500 without any."""
    return JSONResponse({"error": {"message": reason, "type": "invalid_request_error"}}, 400)
