"""Measures what `transformers serve` and vLLM give many clients at once, with our models and transformers' Llama."""

import contextlib
import importlib.util
import json as jsonlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nalanda.common.errors import InputError
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda_lab.speed.train import HEADS, OURS, SIZES
from nalanda_lab.track import figures_file, on_cpu, plain_table, ratios_of, track

PEER = "Llama"
PROMPT = "The state of a recurrent layer has a fixed size. " * 8
PATIENCE = 300.0
"""Seconds until a server must answer, and a request."""


def bench_serve(
    *,
    clients: tuple[int, ...] = (1, 8, 32),
    tokens: int = 64,
    threads: int = 2,
    rounds: int = 3,
    vllm: str | None = None,
    json: str | Path | None = None,
) -> dict:
    """Serves random models of the demo's size on this CPU and prints the tokens a second that n clients get.

    Each client sends one request of 400 characters, a token each, and takes `tokens` tokens. The servers of a
    model run at once and are asked in turn, so that both meet the same load.

    Args:
        clients: numbers of clients, in turn.
        tokens: new tokens of a request.
        threads: threads of a server.
        rounds: measurements of each number of clients; the table has their medians.
        vllm: the Python of an environment with vLLM and `nalanda[vllm]`, which then serves our models too.
        json: a file for the figures.

    Raises:
        InputError: the server's packages are missing, or it does not start.
    """
    write = figures_file(json)
    if importlib.util.find_spec("uvicorn") is None:
        raise InputError("transformers serve needs more packages: pip install 'nalanda[serving]'")
    console = Console(highlight=False, emoji=False)
    speeds: dict[str, dict[str, dict[int, list[float]]]] = {}
    with (
        tempfile.TemporaryDirectory() as place,
        on_cpu(threads, f"fp32, {SIZES}", shape=SIZES, tokens=tokens) as conditions,
    ):
        for name in track((*OURS, PEER), "serving"):
            folder = Path(place) / name.replace(", ", "-")
            save_random(name, folder)
            pythons = {"transformers": sys.executable}
            if vllm and name != PEER:
                pythons["vllm"] = vllm
            speeds[name] = measure_servers(folder, pythons, threads, clients, tokens, rounds)

    console.print(speed_table(speeds, clients))
    console.print(
        "tokens a second of all clients, medians; least and largest ratio of a round to transformers serve"
    )
    figures = conditions | {"tokens_per_second": speeds}
    write(figures)
    return figures


def measure_servers(
    folder: Path,
    pythons: dict[str, str],
    threads: int,
    clients: tuple[int, ...],
    tokens: int,
    rounds: int,
) -> dict[str, dict[int, list[float]]]:
    """The tokens a second of each server, by the number of clients: one value a round."""
    speeds = {server: {n: [] for n in clients} for server in pythons}
    with contextlib.ExitStack() as stack:
        urls = {
            server: stack.enter_context(serving(folder, threads, server, python))
            for server, python in pythons.items()
        }
        for url in urls.values():
            answer(url, folder, 2)
        for _ in range(rounds):
            for n in clients:
                for server, url in urls.items():
                    speeds[server][n].append(measure(url, folder, n, tokens))
    return speeds


def speed_table(
    speeds: dict[str, dict[str, dict[int, list[float]]]], clients: tuple[int, ...]
) -> Table:
    rows = []
    for name, servers in speeds.items():
        for server, values in servers.items():
            cells = []
            for n in clients:
                ratios = ratios_of(values[n], servers["transformers"][n])
                speed = f"{median(values[n]):,.0f}"
                if server != "transformers":
                    speed += f"  {min(ratios):.1f}–{max(ratios):.1f}×"
                cells.append(speed)
            rows.append([f"{name}: {server}", *cells])
    return plain_table(["tokens/s", *(f"{n} client{'s' * (n > 1)}" for n in clients)], rows)


def save_random(name: str, folder: Path) -> None:
    """A random model that never ends its text, and a tokenizer of bytes."""
    torch.manual_seed(0)
    shared = SIZES | {"bos_token_id": 0, "eos_token_id": 0}
    if name == PEER:
        model: Any = LlamaForCausalLM(
            LlamaConfig(**shared, num_attention_heads=HEADS, max_position_embeddings=4096)
        )
    else:
        model = NalandaForCausalLM(NalandaConfig(**shared, num_heads=HEADS, **OURS[name]))
    model.generation_config.suppress_tokens = [0, *range(257, SIZES["vocab_size"])]
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and some pairs of them. Token 0 ends a text."""
    end, alphabet = "<|endoftext|>", sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [end, *alphabet, *map("".join, merges)]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end)


@contextlib.contextmanager
def serving(
    folder: Path, threads: int, kind: str = "transformers", python: str | None = None
) -> Iterator[str]:
    """The address of a server of `folder`, which ends with the context. Raises `InputError`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    python = python or sys.executable
    if kind == "vllm":
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32"]
    else:
        command = [python, "-m", "transformers.cli.transformers", "serve", str(folder)]
        command += ["--trust-remote-code", "--device", "cpu"]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "NO_PROXY": "*",
        "HF_HOME": str(folder / "home"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    log = folder / f"{kind}.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [*command, *address],
            env=environment,
            cwd=folder,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if server.poll() is not None or time.monotonic() > deadline:
                last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
                raise InputError(f"{kind} does not start: {last}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def answer(url: str, folder: Path, tokens: int) -> str:
    """The text of one request."""
    asked = {"model": str(folder), "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    data, headers = jsonlib.dumps(asked).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return jsonlib.load(response)["choices"][0]["text"]


def measure(url: str, folder: Path, clients: int, tokens: int) -> float:
    """Tokens a second of `clients` simultaneous requests, together."""
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: answer(url, folder, tokens), range(clients)))
        return clients * tokens / (time.perf_counter() - start)
