"""What a conversion proves: source and target compute the same."""

import dataclasses
from pathlib import Path
from pydoc_data.topics import topics

import torch
from huggingface_hub import ModelCardData
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from nalanda.common.errors import InputError, explained, first_line
from nalanda.common.versions import versions
from nalanda.convert import engines
from nalanda.convert.engines import CONTINUATION, Computed

TOKENS = 512
TOLERANCES = {"f32": 1e-3, "f16": 1e-2, "bf16": 4e-2, "q8_0": 0.1, "q8": 0.1}
"""Largest difference of log-probabilities by what the target's weights were rounded to, relative to the
source's largest logit; f32 where they were not. Right conversions of trained models are below a third of it,
in f32 below 1e-4; one with a wrong tensor is at about 1."""

_LEAST = -80.0  # engines whose probabilities are fp32 know no lower logarithm


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How far two models differ, or why they were not compared."""

    facts: dict[str, str]
    """Rows of the model card."""

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts.items())


def unchecked(why: str) -> Certificate:
    return Certificate({"source and target": f"not compared: {why}"})


def compare(source: Path, target: Path, libraries: list[str], dtype: str = "f32") -> Certificate:
    """Both models' log-probabilities for TOKENS tokens of a text, and their greedy continuations.

    Without a tokenizer the tokens are random. Both models compute on the CPU, one after the other.
    libraries: of source and target; gguf and mlx have engines of their own, transformers computes the others.
    dtype: one of TOLERANCES.

    Raises:
        InputError: they differ by more than that, or in a greedy token that rounding does not explain.
    """
    if "fla" in libraries:  # its kernels have no path in torch
        return unchecked("flash-linear-attention's models compute on GPUs only")
    sample = _sample(source if target.is_file() else target)
    try:
        after = compute(target, libraries[1], *sample)
        before = compute(source, libraries[0], *sample)
    except ModuleNotFoundError as error:
        return unchecked(str(explained(error) or error))
    assert before.logits is not None  # of transformers
    scale = before.logits.abs().max().item()
    limit = TOLERANCES[dtype] * scale
    spread = before.logps[after.every - 1 :: after.every][: len(after.logps)]
    logps = (spread.clamp(_LEAST) - after.logps.clamp(_LEAST)).abs().max().item()
    unequal = (before.continuation != after.continuation).nonzero().flatten().tolist()
    equal = unequal[0] if unequal else CONTINUATION
    if not logps <= limit:
        raise InputError(
            f"source and target differ: log-probabilities by {logps:.1e}, more than {limit:.1e}, which is "
            f"{TOLERANCES[dtype]:g} of the largest logit"
        )
    if unequal and before.margins[equal] > limit:
        raise InputError(f"source and target differ: greedy token {equal + 1} of {CONTINUATION} with a cache")
    facts = {
        "compared on": f"{len(sample[0])} tokens, {'English' if sample[1] else 'random'}; on a CPU, in fp32",
        "largest difference of log-probabilities": f"{logps:.1e}, tolerance {limit:.1e} ({dtype}); after "
        f"{len(after.logps)} of the tokens",
    }
    if after.logits is not None:
        facts["of logits"] = f"{(before.logits - after.logits).abs().max():.1e} of {scale:.3g}"
    packages = [f"{name} {version}" for name, version in versions().items() if name in ("nalanda", "torch")]
    return Certificate(
        facts
        | {
            "greedy tokens equal": f"{equal} of {CONTINUATION}, with a cache",
            "versions": ", ".join(dict.fromkeys([*packages, before.engine, after.engine])),
        }
    )


def compute(path: Path, library: str, ids: Tensor, text: str) -> Computed:
    """What the library's engine computes; `text` begins with `ids` `[T]`, or is empty."""
    known = {"gguf": engines.with_llama_cpp, "mlx": engines.with_mlx}
    try:
        return known.get(library, engines.with_transformers)(path, ids, text)
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:  # engines share no exception class
        name = path.name.removeprefix(".tmp-")
        raise InputError(f"{name}: cannot compute ({first_line(error)}); --no-check skips this") from error


def _sample(folder: Path) -> tuple[Tensor, str]:
    """TOKENS ids for the model of `folder`, fewer if its context is shorter, and the text that begins with
    them; empty if they are random."""
    config = AutoConfig.from_pretrained(folder)
    vocabulary, count = config.vocab_size, min(TOKENS, config.max_position_embeddings)
    if tokenizer := tokenizer_of(folder):
        text = topics["naming"]  # of Python's manual, as text of any kind will do
        ids = tokenizer(text, add_special_tokens=False).input_ids[:count]
        if len(ids) == count and max(ids) < vocabulary:
            return torch.tensor(ids), text
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0)), ""


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase | None:
    """None too for one that cannot be loaded, such as one with code of its own, which is not run."""
    if not any(folder.glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # pyrefly: ignore
    except Exception:  # tokenizers and transformers share no exception class
        return None


def card(name: str, source: str, libraries: list[str], found: Certificate) -> str:
    """The model card of a converted model."""
    package = "mlx" if libraries[1] == "mlx" else "transformers"
    about = ModelCardData(library_name=package, pipeline_tag="text-generation", model_name=name)
    table = "\n".join(f"| {key} | {value} |" for key, value in found.facts.items())
    trust = ", trust_remote_code=True" * (libraries[1] == "nalanda")
    known = "import fla  # makes its models known\n" * (libraries[1] == "fla")
    code = f"""{known}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})"""
    if package == "mlx":
        code = f"""from mlx_lm import generate, load

model, tokenizer = load("{name}")
print(generate(model, tokenizer, "Once"))"""
    return f"""---
{about.to_yaml()}
---

# {name}

Converted with Nalanda from {Path(source).name} ({libraries[0]} → {libraries[1]}).

| | |
|---|---|
{table}

```python
{code}
```
"""
