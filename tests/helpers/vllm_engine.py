"""Models, what transformers makes of them, and what vLLM does."""

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Before vLLM is imported: its engine runs in this process, with 1 GiB for states.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
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
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Expected(NamedTuple):
    """Greedy continuations by transformers."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    """NEW of each prompt."""
    log_probabilities: list[list[float]]


def build(folder: Path, state_dtype: str | None = None, **options: Any) -> tuple[Path, Expected]:
    """A model with random weights in `folder`, and what it continues with states of this precision."""
    from nalanda import NalandaConfig, NalandaForCausalLM

    torch.manual_seed(0)
    layers = len(options["mixer"]) if isinstance(options.get("mixer"), list) else 2
    config = NalandaConfig(**SIZES | {"num_hidden_layers": layers} | options)
    model = NalandaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # tokens that differ from place to place
    model.save_pretrained(folder)
    return folder, expect(model, state_dtype)


@torch.no_grad()
def expect(model: Any, state_dtype: str | None) -> Expected:
    random = torch.Generator().manual_seed(0)
    found = Expected([], [], [])
    for length in LENGTHS:
        prompt = torch.randint(3, model.config.vocab_size, (1, length), generator=random)
        ids = model.generate(
            prompt,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            state_dtype=state_dtype,
        )
        logits = model(ids[:, :-1]).logits[0, length - 1 :]
        new = ids[0, length:]
        found.prompts.append(prompt[0].tolist())
        found.tokens.append(new.tolist())
        found.log_probabilities.append(
            logits.log_softmax(-1).gather(1, new[:, None])[:, 0].tolist()
        )
    return found


class Engine:
    """vLLM with a model's folder, its prefix cache and chunked prefill."""

    def __init__(self, folder: Path, **options: Any):
        from vllm import LLM

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

    def greedy(self, prompts: list[list[int]], new: int = NEW) -> list[Any]:
        """The continuations of all prompts, asked for together."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=1
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(asked, sampling, use_tqdm=False)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def difference(expected: Expected, outputs: list[Any]) -> float:
    """The largest difference of log-probabilities. Fails where a greedy token differs."""
    largest = 0.0
    for i, output in enumerate(outputs):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        assert tokens == expected.tokens[i], f"prompt of {len(expected.prompts[i])} tokens"
        for step, token in enumerate(tokens):
            theirs = completion.logprobs[step][token].logprob
            largest = max(largest, abs(theirs - expected.log_probabilities[i][step]))
    return largest


ROWS: list[tuple[str, float]] = []
"""The certificate's rows: a model, and the largest difference of its log-probabilities."""
