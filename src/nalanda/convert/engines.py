"""Engines that run converted models: transformers, llama.cpp and mlx-lm. Each on the CPU, from the same ids."""

import contextlib
import dataclasses
import gc
import importlib
import io
import json
import math
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from nalanda_kernels import keep_fla_off_cpus
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from nalanda.common.errors import InputError
from nalanda.config.model import silence_transformers

PROMPT, CONTINUATION = 64, 32
_EVERY = 32
_ENDS = "the list of ids that end a text"
_SPECIAL = [f"{role}_token_id" for role in ("bos", "eos", "pad")]
_JSON = {"Content-Type": "application/json"}


@dataclasses.dataclass(frozen=True)
class Computed:
    """The results of an engine for T ids."""

    logps: Tensor
    """Log-probabilities of the next token, [positions, vocabulary]."""
    continuation: Tensor
    """[CONTINUATION], the greedy one of the first PROMPT ids, with a cache."""
    margins: Tensor
    """[CONTINUATION], how far the log-probability of each is above the next."""
    engine: str
    """Its package, with the version."""
    cuts: list[list[int]]
    """The ids of each probe, without bos; empty without a tokenizer."""
    special: dict[str, int | list[int] | None]
    """The ids of bos, eos and pad, those of the config (`config.`) and of the tokenizer (`tokenizer.`).
    Besides those that end a text, see `end_ids`."""
    logits: Tensor | None = None
    """[positions, vocabulary]; None where the engine does not return them."""
    every: int = 1
    """Ids from one position to the next."""


def _computed(
    package: str,
    logits: Tensor,
    steps: list[Tensor],
    config: Any,
    ends: list[int],
    tokenizer: Any,
    probes: list[str],
) -> Computed:
    """The results of logits `[T, vocabulary]`.

    steps: the logits `[vocabulary]` before each greedy token. ends: of `end_ids`.
    """
    # values and indices [CONTINUATION, 2]: the greedy token and the next best
    top = torch.stack(steps).float().topk(2)
    margins = top.values[:, 0] - top.values[:, 1]
    special: dict[str, Any] = {
        f"config.{name}": getattr(config, name) for name in _SPECIAL if hasattr(config, name)
    }
    special[_ENDS], cuts = ends, []
    if tokenizer:
        special |= {f"tokenizer.{name}": getattr(tokenizer, name) for name in _SPECIAL}
        cuts = [tokenizer.encode(text, add_special_tokens=False) for text in probes]
    return Computed(
        logits.log_softmax(-1),
        top.indices[:, 0],
        margins,
        f"{package} {version(package)}",
        cuts,
        special,
        logits,
    )


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The ids at which `generate` ends a text.

    They are the generation config's, else the config's, else the tokenizer's. The tokenizer's eos
    stands first if it is among them.
    """
    eos = tokenizer.eos_token_id if tokenizer else None
    ids: Any = []
    for holder in (model.generation_config, model.config, tokenizer):
        if (eos_ids := getattr(holder, "eos_token_id", None)) is not None:
            ids = eos_ids
            break
    ids = ids if isinstance(ids, list) else [ids]
    return sorted(dict.fromkeys(ids), key=lambda i: i != eos)


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder; None without one, or if it cannot be loaded.

    One with code of its own cannot: the code is not run.
    """
    if not any(folder.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # pyrefly: ignore
    except Exception:  # tokenizers and transformers share no exception class
        return None


@torch.no_grad()
def with_transformers(folder: Path, ids: Tensor, probes: list[str]) -> Computed:
    """Runs the model of a folder in transformers, in fp32."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        keep_fla_off_cpus(sys.modules[type(model).__module__])
        logits = model(ids[None], use_cache=False).logits[0].float()  # [T, vocabulary]
        tokenizer = tokenizer_of(folder)
        ends = end_ids(model, tokenizer)
        model.generation_config = transformers.GenerationConfig(  # theirs may sample, or end early
            max_new_tokens=CONTINUATION,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        prompt = ids[None, :PROMPT]  # [1, PROMPT]
        done = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    config = model.config.get_text_config()
    del model
    gc.collect()
    steps = [step[0] for step in done.logits]  # [vocabulary] each
    return _computed("transformers", logits, steps, config, ends, tokenizer, probes)


def with_mlx(folder: Path, ids: Tensor, probes: list[str]) -> Computed:
    """Runs the model of a folder in mlx-lm, in fp32."""
    import mlx.core as mx  # pyrefly: ignore[missing-import]  (an extra)
    from mlx_lm.models.cache import make_prompt_cache  # pyrefly: ignore[missing-import]

    mlx_lm: Any = importlib.import_module("mlx_lm")

    with quiet(), mx.stream(mx.cpu):
        model, tokenizer, config = mlx_lm.load(str(folder), return_config=True)
        model.set_dtype(mx.float32)

        def logits(tokens: list[int], cache: list | None = None) -> Tensor:
            return torch.from_numpy(np.array(model(mx.array(tokens)[None], cache=cache)[0]))

        all_logits = logits(ids.tolist())  # [T, vocabulary]
        cache = make_prompt_cache(model)
        unread, steps = ids[:PROMPT].tolist(), []
        while len(steps) < CONTINUATION:
            steps.append(logits(unread, cache)[-1])
            # From the second pass on the cache has all tokens but this one.
            unread = [int(steps[-1].argmax())]
    # mlx-lm overrules the config's ids that end a text by those of generation_config.json.
    eos = SimpleNamespace(eos_token_id=config.pop("eos_token_id", None))
    ends = end_ids(SimpleNamespace(generation_config=None, config=eos), tokenizer)
    settings = SimpleNamespace(**config)
    return _computed("mlx-lm", all_logits, steps, settings, ends, tokenizer, probes)


def with_llama_cpp(file: Path, ids: Tensor, probes: list[str]) -> Computed:
    """By llama.cpp as it runs on CPUs, its cache in fp32.

    It answers with the probabilities of one position at a time, so every 32nd is asked for, but not the last:
    a short context has no room for one more.

    Raises:
        InputError: the context is too short for a prompt and a continuation.
    """
    if len(ids) < PROMPT + CONTINUATION:
        raise InputError(
            f"max_position_embeddings={len(ids)}: the comparison in llama.cpp needs a context of "
            f"{PROMPT + CONTINUATION} tokens; --no-check skips it"
        )
    xllamacpp: Any = importlib.import_module("xllamacpp")  # an extra

    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = str(file), -1
    # Port 0 is any free one; no layer goes to a GPU.
    params.port, params.n_ctx, params.n_parallel, params.n_gpu_layers = 0, 2 * len(ids), 1, 0
    params.cpuparams.n_threads = torch.get_num_threads()
    # The sums of flash attention are fp16.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)

    def tokens(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": False}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body, _JSON)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)["tokens"]

    # A token that is no whole character would not be answered; this one is. The bias alters no probability.
    fixed = {
        "n_predict": 1,
        "temperature": 0,
        "logit_bias": [[tokens("a")[-1], 1e6]],
        "ignore_eos": True,
    }

    def ranked(prompt: list[int], n: int) -> list[tuple[float, int]]:
        """The n most probable next tokens. What it has read of the prompt before is in its cache."""
        answer = server.handle_completions(fixed | {"prompt": prompt, "n_probs": n})
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
        tokens = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return [
            (math.nan if (x := token["logprob"]) is None else x, token["id"]) for token in tokens
        ]

    # The greedy continuation, by one request a token.
    prompt, margins, logps = ids[:PROMPT].tolist(), [], []
    for _ in range(CONTINUATION):
        (first, token), (second, _) = ranked(prompt, 2)
        prompt.append(token)
        margins.append(first - second)
    for end in range(_EVERY, len(ids), _EVERY):
        # Each prompt continues the one before, which the server still has in its cache.
        pairs = ranked(ids[:end].tolist(), 1 << 30)
        # [vocabulary], in the order of the ids
        logps.append([logp for logp, _ in sorted(pairs, key=lambda pair: pair[1])])
    return Computed(
        torch.tensor(logps),
        torch.tensor(prompt[PROMPT:]),
        torch.tensor(margins),
        f"xllamacpp {version('xllamacpp')}",
        [tokens(text) for text in probes],
        _special_of_gguf(file),
        every=_EVERY,
    )


def _special_of_gguf(file: Path) -> dict[str, Any]:
    """The special tokens that a GGUF file names, as `Computed.special` has them."""
    gguf: Any = importlib.import_module("gguf")
    fields, keys = gguf.GGUFReader(file).fields, gguf.Keys.Tokenizer

    def token_of(key: str) -> int | None:
        return fields[key].contents() if key in fields else None

    ends = [token_of(key) for key in (keys.EOS_ID, keys.EOT_ID, keys.EOM_ID)]
    return {
        "tokenizer.bos_token_id": token_of(keys.BOS_ID),
        "tokenizer.pad_token_id": token_of(keys.PAD_ID),
        _ENDS: [token for token in ends if token is not None],
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings of transformers about a CPU, and mlx-lm's output."""
    with (
        silence_transformers(),
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield
