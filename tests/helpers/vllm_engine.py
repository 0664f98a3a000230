"""Models, what transformers makes of them, and what vLLM does: its engine in a process of its own."""

import contextlib
import ctypes
import http.client
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB for states
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

LENGTHS = (1, 5, 16, 64, 131, 17, 200, 40)
"""Tokens of the prompts: below, at and across the bounds of blocks of 16, and of calls of 64."""
NEW = 24
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "head_dim": 32,  # the least that vLLM's attention takes on a CPU
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PATIENCE = 900.0
"""Seconds until a server must answer, and a request."""


class Continuation(NamedTuple):
    """What follows a prompt greedily."""

    prompt: list[int]
    tokens: list[int]
    log_probabilities: list[float]
    cached: int = 0
    """Tokens of the prompt that came from the prefix cache."""


def build(
    folder: Path, state_dtype: str | None = None, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> tuple[Path, list[Continuation]]:
    """A model with random weights in `folder`, and how it continues a prompt of each length. Its tokens are numbers.

    state_dtype: the precision of its states meanwhile. options: of its config.
    """
    from nalanda import NalandaConfig, NalandaForCausalLM

    torch.manual_seed(0)
    layers = len(options["mixer"]) if isinstance(options.get("mixer"), list) else 2
    config = NalandaConfig(**SIZES | {"num_hidden_layers": layers} | options)
    model = NalandaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # tokens that differ from place to place
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)

    random = torch.Generator().manual_seed(0)
    shape = config.vocab_size
    prompts = [torch.randint(3, shape, (1, length), generator=random) for length in lengths]
    return folder, [expect(model, prompt, state_dtype) for prompt in prompts]


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer that takes each number between blanks for a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="2").save_pretrained(folder)


@torch.no_grad()
def expect(model: Any, prompt: torch.Tensor, state_dtype: str | None) -> Continuation:
    """The continuation by transformers. prompt: int64 `[1, T]`."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(prompt, state_dtype=state_dtype, **settings)

    T = prompt.shape[1]
    new = ids[0, T:]
    log_probabilities = model(ids[:, :-1]).logits[0, T - 1 :].log_softmax(-1)
    chosen = log_probabilities.gather(1, new[:, None])[:, 0]
    return Continuation(prompt[0].tolist(), new.tolist(), chosen.tolist())


class Engine:
    """vLLM with a model's folder, its prefix cache and chunked prefill."""

    def __init__(self, folder: Path, **options: Any):
        import vllm.envs
        from vllm import LLM

        # On a CPU vLLM imports all of itself anew in each process of an engine; a fork has it.
        vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
        for module in ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "compressed_tensors"):
            importlib.import_module(module)

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": True,
            "seed": 0,
        }
        self.llm = LLM(str(folder), **settings | options)

    def greedy(self, prompts: list[list[int]], new: int = NEW) -> list[Continuation]:
        """The continuations of all prompts, asked for together."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=1
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        continuations = []
        for output in self.llm.generate(asked, sampling, use_tqdm=False):
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            steps = zip(tokens, completion.logprobs, strict=True)
            chosen = [candidates[token].logprob for token, candidates in steps]
            cached = output.num_cached_tokens or 0
            continuations.append(Continuation(output.prompt_token_ids, tokens, chosen, cached))
        return continuations

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Server:
    """vLLM's HTTP server of a model's folder, at an address of this machine."""

    def __init__(self, process: subprocess.Popen, port: int, model: str):
        self.process, self.port, self.model = process, port, model

    @contextlib.contextmanager
    def answer(self, path: str, **question: Any) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET, or to a POST of a question. Leaving it early aborts the request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        method, body = ("POST", json.dumps(question)) if question else ("GET", None)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            yield connection.getresponse()

    def question(self, prompt: list[int], new: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def greedy(self, prompt: list[int], new: int = NEW) -> Continuation:
        """The continuation of a prompt."""
        with self.answer("/v1/completions", **self.question(prompt, new)) as response:
            assert response.status == 200, response.read().decode()
            (choice,) = json.load(response)["choices"]
        return Continuation(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def abort(self, prompt: list[int]) -> int:
        """Leaves a long continuation after its first token. Returns the number of tokens asked for."""
        new = 4 * NEW
        with self.answer("/v1/completions", **self.question(prompt, new), stream=True) as response:
            assert response.readline().startswith(b"data:")
        return new

    def count(self, metric: str) -> float:
        """A counter of vLLM's, such as `prefix_cache_hits`."""
        with self.answer("/metrics") as response:
            metrics = response.read().decode()
        return sum(map(float, re.findall(rf"^vllm:{metric}_total{{.*}} (.+)$", metrics, re.M)))


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """The server of the folder that `nalanda serve` starts; it ends with the context. options: vLLM's.

    Raises RuntimeError with its log where it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nalanda_cli", "serve", str(folder), "--port", str(port)]
    command += ["--", "--dtype", "float32", "--enforce-eager", *options]

    log = folder / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    server = Server(process, port, str(folder))
    deadline = time.monotonic() + PATIENCE
    try:
        while not is_healthy(server):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text(errors="replace"))
        yield server
    finally:
        # The engine's processes are in the server's group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_with_parent() -> None:
    """Lets Linux end this process where its parent is killed and cleans up nothing."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def is_healthy(server: Server) -> bool:
    try:
        with server.answer("/health") as response:
            return response.status == 200
    except OSError:
        return False


def difference(expected: Iterable[Continuation], answers: Iterable[Continuation]) -> float:
    """The largest difference of log-probabilities. Fails where a greedy token differs.

    An answer may have fewer tokens than expected, where fewer were asked for.
    """
    largest = 0.0
    for ours, theirs in zip(expected, answers, strict=True):
        new = len(theirs.tokens)
        assert theirs.tokens == ours.tokens[:new], f"prompt of {len(ours.prompt)} tokens"
        pairs = zip(ours.log_probabilities[:new], theirs.log_probabilities, strict=True)
        largest = max(largest, *(abs(a - b) for a, b in pairs))
    return largest


class Row(NamedTuple):
    """What the certificate says of a model."""

    name: str
    texts: int
    """Continuations, of which each was equal."""
    difference: float
    """The largest of their log-probabilities."""


ROWS: list[Row] = []
