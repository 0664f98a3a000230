"""Load a checkpoint with transformers' Auto classes and stream a continuation of a prompt."""

import sys
import time
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from nalanda.errors import InputError


def load(
    name: str, *, device: str | None = None, dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, ready for inference.

    Args:
        name: a checkpoint directory or an id on the Hugging Face hub.
        device: where the model goes; the GPU if there is one, else the CPU.
        dtype: `auto` keeps the checkpoint's own, or `float32`, `bfloat16`, `float16`, `float64`.
        trust_remote_code: run the modeling files that a checkpoint brings with it. Never needed for our own.

    Raises:
        InputError: no such model, an unknown dtype or device, or weights that do not fill the model.
    """
    check_name(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype not in ("auto", "float32", "bfloat16", "float16", "float64"):
        raise InputError(f"unknown dtype {dtype!r}: use auto, float32, bfloat16, float16 or float64")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model, report = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        model = model.to(device)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise InputError(f"cannot load {name}: {reason}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    if report["missing_keys"]:  # transformers fills them with random numbers and only warns
        missing = sorted(report["missing_keys"])
        raise InputError(f"{name} lacks {len(missing)} of the model's tensors, {missing[0]} for one")
    return model.eval(), tokenizer  # type: ignore[bad-return]


def check_name(name: str) -> None:
    """Refuse a local path that holds no checkpoint before anything slow is imported; a hub id passes."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return
    if (path / "final" / "config.json").is_file():
        raise InputError(f"{name} is the directory of a run, its model is {path / 'final'}")
    if path.exists():
        raise InputError(f"{name} holds no config.json: give the directory of a checkpoint")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise InputError(f"no such model: {name} (a checkpoint directory, or OWNER/NAME on the hub)")


def bos_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that stood before every text in training, as a list of one id, or of none.

    Our checkpoints' config has a bos token if training wrote one; of other models the tokenizer knows.
    """
    bos = tokenizer.bos_token_id
    if model.config.model_type == "nalanda":
        written = model.config.bos_token_id is not None
    else:
        written = tokenizer("a").input_ids[0] == bos
    return [bos] if bos is not None and written else []


def generate(
    model: str,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stream: bool = True,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> str:
    """Continue `prompt`, printing each token as it comes, and return the continuation.

    Args:
        model: a checkpoint directory or hub id, see `load`.
        prompt: the text to continue; `-` reads it from standard input.
        max_new_tokens: stop after so many tokens, or at the end-of-text token.
        temperature: 0 is greedy decoding.
        top_p, top_k: keep the most probable tokens that make up `top_p`, at most `top_k`; 1 and 0 keep all.
        seed: of the sampling; by default every call differs.
        stream: print prompt and continuation to stdout, and the speed to stderr.
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
    if temperature < 0:
        raise InputError(f"temperature is {temperature}: it must be 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p}: it must be above 0 and at most 1")
    if top_k < 0:
        raise InputError(f"top_k is {top_k}: it must be 0 (all tokens) or above")
    if prompt == "-":
        prompt = sys.stdin.read()
    network, tokenizer = load(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    prompt_ids = bos_token(network, tokenizer) + tokenizer(prompt, add_special_tokens=False).input_ids
    if not prompt_ids:
        raise InputError("the prompt is empty, and the tokenizer has no bos token to begin with")
    input_ids = torch.tensor([prompt_ids], device=network.device)
    if seed is not None:
        transformers.set_seed(seed)
    if temperature == 0:
        sampling = {"do_sample": False}
    else:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    start = time.perf_counter()
    output = network.generate(  # type: ignore[not-callable]
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if stream else None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        **sampling,
    )
    seconds = time.perf_counter() - start
    new = output[0, len(prompt_ids) :]
    if stream:
        print(f"{len(new)} tokens in {seconds:.1f} s, {len(new) / seconds:.0f} tokens/s", file=sys.stderr)
    return str(tokenizer.decode(new, skip_special_tokens=True))
