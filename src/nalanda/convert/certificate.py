"""The proof of a conversion: source and target compute the same."""

import dataclasses
from pathlib import Path
from pydoc_data.topics import topics

import torch
from huggingface_hub import ModelCardData
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from nalanda.common.errors import InputError, explained, first_line
from nalanda.common.versions import versions
from nalanda.convert import engines
from nalanda.convert.engines import CONTINUATION, Computed, tokenizer_of

TOKENS = 512
TOLERANCE = 1e-3
"""Largest difference of log-probabilities where no weight was rounded, as a share of the largest logit. Right
conversions of trained models are below a tenth of it; one with a wrong tensor is at about 1."""

ROUNDED = {"fp16": 1e-2, "bf16": 4e-2, "q8_0": 0.1, "q8": 0.1}
"""The same of rounded weights, by what they were rounded to. It is wide because llama.cpp rounds activations
too. The weights before rounding have TOLERANCE, and each rounded tensor is compared exactly."""

_FINER = {"q8": "fp16", "q8_0": "fp16", "fp16": "fp32", "bf16": "fp32"}

_TEXTS = [
    "naïve Größe ½ ™ ﬁn",
    "cafe\u0301 A\u030angstro\u0308m n\u0303",
    "I'm sure we'LL, DON'T x's",
    "日本語の文章です。한국어 中文，测试",
    "👍🏽 👩\u200d👩\u200d👧 🇫🇷 ❤️",
    "0 7 42 1234567890 3.14 1,000,000 x2y ٣٤",
    "a\n\nb\r\n\n\n  c\t\td \n",
    "  two  blanks   three ",
    " a",
    "\n",
]
_PLACES = ("{} word", "a {} b", "x  {}  y", "word{}word")  # of an added token

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


def compare(
    source: Path, target: Path, libraries: list[str], rounded: tuple[str, Path] | None = None
) -> Certificate:
    """Compares both models' log-probabilities for TOKENS tokens of a text, and their greedy continuations.

    Besides, it compares the tokens that their tokenizers make of `probes`, and the ids of bos, eos and pad.
    Without a tokenizer the tokens are random. The models compute on the CPU, one after the other.
    libraries: of source and target; gguf and mlx have engines of their own, transformers computes the others.
    rounded: one of ROUNDED and the model that is `target` rounded to it, which is compared too.

    Raises:
        InputError: they differ by more than that, or in a greedy token that rounding does not explain.
    """
    if "fla" in libraries:  # its kernels have no path in torch
        return unchecked("flash-linear-attention's models compute on GPUs only")

    ids, text = _sample(source if target.is_file() else target)
    texts = probes(tokenizer_of(source), text)
    try:
        after = compute(target, libraries[1], ids, texts)
        coarse = compute(rounded[1], libraries[1], ids, texts) if rounded else None
        before = compute(source, libraries[0], ids, texts)
    except ModuleNotFoundError as error:
        return unchecked(str(explained(error) or error))
    _check_tokenizers(texts, before, after, libraries[1] == "nalanda")

    # The rows of the card.
    installed = versions()
    packages = [f"{name} {installed[name]}" for name in installed if name in ("nalanda", "torch")]
    facts = {
        "compared on": f"{len(ids)} tokens, {'English' if text else 'random'}; on a CPU, in fp32",
        **_differences(before, after, "fp32"),
    }
    if rounded and coarse:
        close = _differences(before, coarse, rounded[0])
        facts |= {f"{name}, {rounded[0]}": value for name, value in close.items()}
    if texts:
        facts["texts cut into the same tokens"] = f"{len(texts)} of {len(texts)}"
    facts["versions"] = ", ".join(dict.fromkeys([*packages, before.engine, after.engine]))
    return Certificate(facts)


def probes(tokenizer: PreTrainedTokenizerBase | None, *texts: str) -> list[str]:
    """Texts that tokenizers may cut in other ways; none without a tokenizer."""
    if tokenizer is None:
        return []
    added = tokenizer.added_tokens_decoder.values()
    in_place = [pattern.format(str(token)) for token in added for pattern in _PLACES]
    return [*filter(None, texts), *_TEXTS, *in_place]


def _check_tokenizers(texts: list[str], before: Computed, after: Computed, to_ours: bool) -> None:
    """Raises InputError for a text that they cut differently, or another id of bos, eos or pad.

    Two differences are expected: our config names the bos that the tokenizer writes, and a tokenizer without a
    pad token gets one, see `pad_batches`.
    """
    for name in before.special.keys() & after.special.keys():
        first, second = before.special[name], after.special[name]
        expected = name == "tokenizer.pad_token_id" and first is None
        if name == "config.bos_token_id":
            expected = to_ours
        if first != second and not expected:
            raise InputError(f"source and target differ: {name} is {first} and {second}")

    if texts and before.cuts and not after.cuts:
        raise InputError("source and target differ: the target's tokenizer cannot be loaded")
    for text, first, second in zip(texts, before.cuts, after.cuts, strict=True):
        if first != second:
            excerpt = repr(text if len(text) < 40 else text[:40] + "…")
            raise InputError(
                f"source and target differ: their tokenizers cut {excerpt} into other tokens"
            )


def _differences(before: Computed, after: Computed, dtype: str) -> dict[str, str]:
    """The rows of the card; raises InputError as `compare`."""
    assert before.logits is not None  # of transformers
    scale = before.logits.abs().max().item()
    share = ROUNDED.get(dtype, TOLERANCE)
    limit = share * scale

    # [positions, vocabulary], only at the positions that the target's engine computes
    expected = before.logps[after.every - 1 :: after.every][: len(after.logps)]
    difference = (expected.clamp(_LEAST) - after.logps.clamp(_LEAST)).abs().max().item()
    rounding = f"rounding to {dtype}"
    finer = f": take --dtype {_FINER[dtype]}" if dtype in ROUNDED else ""
    # In this form NaN fails too.
    if not difference <= limit:
        moved = f"{rounding} moves" if finer else "source and target differ:"
        raise InputError(
            f"{moved} log-probabilities by {difference:.1e}, more than {limit:.1e}, which is "
            f"{share:g} of the largest logit{finer}"
        )

    # Where the two best tokens are closer than the tolerance, either may win; later tokens then follow from it.
    unequal = (before.continuation != after.continuation).nonzero().flatten().tolist()
    equal = unequal[0] if unequal else CONTINUATION
    if unequal and before.margins[equal] > limit:
        changed = f"{rounding} changes" if finer else "source and target differ:"
        raise InputError(
            f"{changed} greedy token {equal + 1} of {CONTINUATION} with a cache{finer}"
        )

    facts = {
        "largest difference of log-probabilities": f"{difference:.1e}, tolerance {limit:.1e} ({dtype}); after "
        f"{len(after.logps)} of the tokens"
    }
    if after.logits is not None:
        facts["of logits"] = f"{(before.logits - after.logits).abs().max():.1e} of {scale:.3g}"
    return facts | {"greedy tokens equal": f"{equal} of {CONTINUATION}, with a cache"}


def compute(path: Path, library: str, ids: Tensor, texts: list[str]) -> Computed:
    """Runs the library's engine on `ids` `[T]`, and its tokenizer on `texts`.

    Raises:
        InputError: the engine cannot compute.
    """
    compute_with = {"gguf": engines.with_llama_cpp, "mlx": engines.with_mlx}
    try:
        return compute_with.get(library, engines.with_transformers)(path, ids, texts)
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:  # engines share no exception class
        name = path.name.removeprefix(".tmp-")
        raise InputError(
            f"{name}: cannot compute ({first_line(error)}); --no-check skips this"
        ) from error


def _sample(folder: Path) -> tuple[Tensor, str]:
    """TOKENS ids for the model of `folder`, fewer if its context is shorter, and the text that begins with them.

    The text is empty if they are random.
    """
    config = AutoConfig.from_pretrained(folder)
    count = min(TOKENS, config.max_position_embeddings)
    if tokenizer := tokenizer_of(folder):
        text = topics["naming"]  # of Python's manual, as text of any kind will do
        ids = tokenizer(text, add_special_tokens=False).input_ids[:count]
        # The text may be too short, or have added tokens without an embedding.
        if len(ids) == count and max(ids) < config.vocab_size:
            return torch.tensor(ids), text
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (count,), generator=generator), ""


def card(name: str, source: str, libraries: list[str], certificate: Certificate) -> str:
    """The model card of a converted model."""
    target = libraries[1]
    package = "mlx" if target == "mlx" else "transformers"
    about = ModelCardData(library_name=package, pipeline_tag="text-generation", model_name=name)
    table = "\n".join(f"| {key} | {value} |" for key, value in certificate.facts.items())
    if target == "mlx":
        code = f"""from mlx_lm import generate, load

model, tokenizer = load("{name}")
print(generate(model, tokenizer, "Once"))"""
    else:
        registers = "import fla  # makes its models known\n" * (target == "fla")
        trust = ", trust_remote_code=True" * (target == "nalanda")
        code = f"""{registers}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})"""
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
