"""What a conversion proves: source and target compute the same."""

import dataclasses
import gc
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from huggingface_hub import ModelCardData
from nalanda_kernels import take_torch_path
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from nalanda.common.errors import InputError, first_line

TOKENS, PROMPT, CONTINUATION = 512, 64, 32
TOLERANCE = 1e-3
"""Largest difference of logits, relative to the largest logit. Both models compute in fp32, whatever the
dtype of their weights. Right conversions are below 1e-4 there, one with a wrong tensor about 1."""


@dataclasses.dataclass(frozen=True)
class Computed:
    """What a model computes; on a CPU, in fp32."""

    logits: Tensor
    """[TOKENS, vocabulary]"""
    continuation: Tensor
    """[CONTINUATION], the greedy one of the first PROMPT tokens, with a cache."""
    margins: Tensor
    """[CONTINUATION], how far the logit of each is above the next."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How far two models differ, or why they were not compared."""

    facts: dict[str, str]
    """Rows of the model card."""

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts.items())


def unchecked(why: str) -> Certificate:
    return Certificate({"source and target": f"not compared: {why}"})


def compare(source: Path, target: Path, libraries: list[str]) -> Certificate:
    """Both models' logits of TOKENS tokens of a text, and their greedy continuations.

    Without a tokenizer the tokens are random. Both models compute on the CPU in fp32, one after the other.
    libraries: of source and target.

    Raises:
        InputError: they differ by more than TOLERANCE, or in a greedy token that rounding does not explain.
    """
    if "fla" in libraries:  # its kernels have no path in torch
        return unchecked("flash-linear-attention's models compute on GPUs only")
    ids, text = _tokens(target)
    before, after = (compute(folder, ids) for folder in (source, target))
    scale = before.logits.abs().max().item()
    logits = (before.logits - after.logits).abs().max().item()
    logps = (before.logits.log_softmax(-1) - after.logits.log_softmax(-1)).abs().max().item()
    unequal = (before.continuation != after.continuation).nonzero().flatten().tolist()
    equal = unequal[0] if unequal else CONTINUATION
    versions = ", ".join(f"{name} {version(name)}" for name in ("nalanda", "torch", "transformers"))
    measured = f"{logits:.1e} of {scale:.3g}"
    if not logits <= TOLERANCE * scale:
        raise InputError(f"source and target differ: logits by {measured}, more than {TOLERANCE:g} of them")
    if unequal and before.margins[equal] > TOLERANCE * scale:
        raise InputError(f"source and target differ: greedy token {equal + 1} of {CONTINUATION} with a cache")
    return Certificate(
        {
            "compared on": f"{TOKENS} tokens, {text}; in fp32 on a CPU",
            "largest difference of logits": f"{measured}, tolerance {TOLERANCE * scale:.1e}",
            "of log-probabilities": f"{logps:.1e}",
            "greedy tokens equal": f"{equal} of {CONTINUATION}, with a cache",
            "versions": versions,
        }
    )


@torch.no_grad()
def compute(folder: Path, ids: Tensor) -> Computed:
    """What the model of `folder` computes for ids `[TOKENS]`."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):  # what other libraries say of a CPU
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            take_torch_path(sys.modules[type(model).__module__])
            logits = model(ids[None], use_cache=False).logits[0].float()
            model.generation_config = transformers.GenerationConfig(  # theirs may sample, or end early
                max_new_tokens=CONTINUATION,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            prompt = ids[None, :PROMPT]
            done = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    except Exception as error:  # transformers' models share no exception class
        name = folder.name.removeprefix(".tmp-")
        raise InputError(f"{name}: cannot compute ({first_line(error)}); --no-check skips this") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    top = torch.cat(done.logits).float().topk(2).values
    del model
    gc.collect()
    return Computed(logits, done.sequences[0, PROMPT:], top[:, 0] - top[:, 1])


def _tokens(folder: Path) -> tuple[Tensor, str]:
    """TOKENS ids for the model of `folder`, and what they are."""
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    if any(folder.glob("tokenizer*")):
        text = topics["naming"]  # of Python's manual, as text of any kind will do
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)  # pyrefly: ignore
        ids = tokenizer(text, add_special_tokens=False).input_ids[:TOKENS]
        if len(ids) == TOKENS and max(ids) < vocabulary:
            return torch.tensor(ids), "English"
    return torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0)), "random"


def card(name: str, source: str, libraries: list[str], found: Certificate) -> str:
    """The model card of a converted model."""
    about = ModelCardData(library_name="transformers", pipeline_tag="text-generation", model_name=name)
    table = "\n".join(f"| {key} | {value} |" for key, value in found.facts.items())
    trust = ", trust_remote_code=True" * (libraries[1] == "nalanda")
    return f"""---
{about.to_yaml()}
---

# {name}

Converted with Nalanda from {Path(source).name} ({libraries[0]} → {libraries[1]}).

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
```
"""
