"""Loads a model and its tokenizer for inference."""

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from nalanda_kernels import keep_fla_off_cpus, keep_model_types
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nalanda.common.errors import InputError, explained, first_line, out_of_memory
from nalanda.common.number_formats import LOADED, TORCH_NAMES, WEIGHTS, choose_format
from nalanda.common.products import choose_product_route, set_product_route
from nalanda.config.model import silence_transformers
from nalanda.config.model_folder import NO_TOKENIZER, tokenizer_files
from nalanda.model import Int8Config
from nalanda.model.context import Context
from nalanda.train.resolve import resolve


def load_model(
    name: str,
    *,
    device: str | None = None,
    dtype: str = "auto",
    weights: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, ready for inference.

    Args:
        name: a run, a checkpoint directory or an id on the Hugging Face hub, as `resolve` reads it.
        device: device for the model; by default a GPU if there is one, else the CPU.
        dtype: one of `number_formats.LOADED`, or torch's name of it; `auto` is the checkpoint's own.
        weights: one of `number_formats.WEIGHTS`, which the matrices are rounded to; None: as saved.
        trust_remote_code: run the modeling files of the checkpoint. Not needed for our own checkpoints.

    Raises:
        InputError: no such model, an unknown dtype or device, or weights that do not fill the model.
    """
    resolved = resolve(name)
    name = resolved.model
    device = choose_device(device)
    if device == "cpu":
        torch.set_flush_denormal(True)  # their products are slow
        set_product_route(choose_product_route())
    dtype = choose_format(dtype, LOADED, "--dtype")
    dtype = TORCH_NAMES.get(dtype, dtype)
    options = {}
    if weights is not None:
        choose_format(weights, WEIGHTS, "--weights")
        options["quantization_config"] = Int8Config()

    keep_model_types()
    with silence_transformers():
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                resolved.tokenizer, trust_remote_code=trust_remote_code
            )
            model, report = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
            )
            if keep_fla_off_cpus(sys.modules[type(model).__module__]) and device == "cpu":
                print(
                    "computing with torch: flash-linear-attention's kernels need a GPU",
                    file=sys.stderr,
                )
            model = model.to(device)
        except Exception as error:
            # tokenizers, safetensors and transformers share no exception class.
            raise _loading_error(name, error) from error

    if report["missing_keys"]:  # transformers only warns and initialises them randomly
        missing = sorted(report["missing_keys"])
        raise InputError(
            f"{name} lacks {len(missing)} of the model's tensors, such as {missing[0]}"
        )
    size = _vocabulary_size(model)
    if tokenizer.vocab_size > size:  # without added tokens, of which some models read none
        raise InputError(
            f"{name}: its tokenizer has {tokenizer.vocab_size} tokens, the model only {size}; give it the "
            "tokenizer that it was trained with"
        )
    return model.eval(), tokenizer  # type: ignore[bad-return]


def _loading_error(name: str, error: Exception) -> InputError:
    """The error in one line for a model or tokenizer that cannot be loaded."""
    folder = Path(name)
    if out_of_memory(error) and (explanation := explained(error)):
        return explanation
    if folder.is_dir() and not tokenizer_files(folder):
        return InputError(f"{name} {NO_TOKENIZER}")
    return InputError(f"cannot load {name}: {first_line(error)}")


def number_format(model: PreTrainedModel) -> str:
    """The formats of a model's weights: "bfloat16", or "int8 and bfloat16"."""
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters()}
    rest = str(model.dtype).removeprefix("torch.")
    return f"int8 and {rest}" if "int8" in dtypes else rest


def _vocabulary_size(model: PreTrainedModel) -> float:
    """Tokens that the model has an embedding of; infinity if it does not say."""
    return getattr(model.get_input_embeddings(), "num_embeddings", math.inf)


def check_tokens(
    ids: Iterable[int], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises `InputError` for a token without an embedding in the model, such as an added one."""
    size = _vocabulary_size(model)
    last = max(ids, default=0)
    if last >= size:
        raise InputError(
            f"{model.name_or_path or 'the model'}: the text has token {last} "
            f"({tokenizer.convert_ids_to_tokens(last)}), the model reads only {size} tokens; give it the "
            "tokenizer that it was trained with"
        )


def check_numbers(scores: Tensor, model: PreTrainedModel) -> Tensor:
    """The scores of tokens or texts. Raises `InputError` for NaN, which a comparison takes for an answer."""
    if bool(scores.isnan().any()):
        raise InputError(
            f"{model.name_or_path or 'the model'}: its log-probabilities are not numbers; its weights may be "
            "damaged, or --dtype too narrow for them"
        )
    return scores


def check_chat_template(tokenizer: PreTrainedTokenizerBase, name: str, option: str) -> None:
    """Raises `InputError` for a model without a chat template, which `option` needs."""
    if not tokenizer.chat_template:
        raise InputError(
            f"{name}: has no chat template, as base models have none; fine-tune it with examples/assistant, "
            f"or leave out {option}"
        )


def number_check(model: PreTrainedModel) -> dict[str, Any]:
    """The option of `generate` that ends it by `InputError` at the first scores that are not numbers."""
    check = LogitsProcessorList([lambda ids, scores: check_numbers(scores, model)])
    return {"logits_processor": check}


def choose_device(name: str | None) -> str:
    """`name`, or a GPU if there is one, else the CPU. Raises InputError for an unavailable device."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()  # `item` fails on meta, which has no values
    except (RuntimeError, AssertionError):
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise InputError(
            f"--device {name}: not on this machine, which has {', '.join(devices)}"
        ) from None
    return name


@contextlib.contextmanager
def launched_context(device: str) -> Iterator[Context | None]:
    """The context of all processes that a launcher such as torchrun started; None if there is one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    gpu = device.startswith("cuda")
    if gpu:
        # Before the group exists: nccl takes the current device.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        yield Context()
    finally:
        torch.distributed.destroy_process_group()


def bos_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The bos token that preceded every text in training, as a list of one id or none.

    Our checkpoints name it in their config if training used one. For other models the tokenizer decides.
    """
    bos = tokenizer.bos_token_id
    if is_ours(model):
        written = model.config.bos_token_id is not None
    else:
        written = tokenizer("a").input_ids[:1] == [bos]  # "a" alone may have no token
    return [bos] if bos is not None and written else []


def after_bos(tokens: list[int], bos: list[int]) -> list[int]:
    """The tokens of a text's start after bos, which a prompt may have already, as chat templates write it."""
    return tokens if tokens[: len(bos)] == bos else bos + tokens


def tokens_behind(text: str, tokenizer: PreTrainedTokenizerBase, before: str = "\n") -> list[int]:
    """The tokens of a text that stands behind another one, which may end with `before`.

    SentencePiece puts a blank before the text that it is given. So it gets a short one before it, whose tokens are
    then left out.
    """

    def cut(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    for start in (before, "."):
        first, both = cut(start), cut(start + text)
        # Tokens may join; of unknown characters several are one token.
        if both[: len(first)] == first and tokenizer.unk_token_id not in first:
            return both[len(first) :]
    return cut(text)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The options of `generate` for the tokens that end a text, the tokenizer's and the model's, and for
    padding. Empty if there are none.
    """
    ends: set[int] = set()
    for ids in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        if ids is not None:
            ends |= set(ids) if isinstance(ids, list) else {ids}
    options: dict[str, Any] = {}
    if ends:
        options["eos_token_id"] = sorted(ends)
    if tokenizer.pad_token_id is not None:
        options["pad_token_id"] = tokenizer.pad_token_id
    elif ends:
        options["pad_token_id"] = min(ends)
    return options


def is_ours(model: PreTrainedModel) -> bool:
    return model.config.model_type == "nalanda"
