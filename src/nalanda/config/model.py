"""Builds the model config of a recipe."""

import contextlib
import dataclasses
import importlib.util
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from nalanda_kernels import import_fla, keep_model_types
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
)

from nalanda.common.errors import InputError, out_of_memory
from nalanda.common.text import suggest
from nalanda.config.model_folder import not_here
from nalanda.config.schema import RunConfig
from nalanda.model import NalandaConfig
from nalanda.model.mixers import uncut_mixers

FLA = ("delta_net", "gated_deltanet", "gla", "retnet")
"""Model types of flash-linear-attention with recipes here; no hub is asked for these names."""


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether the model is an encoder of Nalanda's, trained as a masked language model."""
    return config.model_type == "nalanda" and not config.is_decoder


def language_model(config: PreTrainedConfig) -> Any:
    """transformers' Auto class for training a model of `config`."""
    return AutoModelForMaskedLM if is_encoder(config) else AutoModelForCausalLM


def build_model_config(config: RunConfig, tokenizer: Any = None) -> PreTrainedConfig:
    """The model's config: `NalandaConfig`, or with `auto` the first of: a path, a model type of transformers
    or flash-linear-attention, a hub id.

    A config described by the recipe has `data.seq_len` positions. Its default vocabulary is the tokenizer's,
    rounded up to a multiple of 64 for faster matrix products. Special tokens are always the tokenizer's.
    Raises `InputError`.
    """
    keys = {key: value for key, value in config.model.items() if key not in ("auto", "init_from")}
    source = config_source(config.model)
    if isinstance(source, type):
        known = {*inspect.signature(source).parameters, *getattr(source, "attribute_map", {})}
        if source is not NalandaConfig and (unknown := sorted(keys.keys() - known)):
            # Other configs would accept them, and ignore them.
            raise InputError(
                f"model.{unknown[0]}: {source.model_type} has no such key{suggest(unknown[0], known)}"
            )
        if "max_position_embeddings" in known:
            keys.setdefault("max_position_embeddings", config.data.seq_len)
        if tokenizer is not None:
            keys.setdefault(
                "vocab_size", padded_vocabulary(max(tokenizer.get_vocab().values()) + 1)
            )
        with in_one_line("model"):
            model_config: PreTrainedConfig = source(**keys)
    else:
        with in_one_line(f"model: {not_here(source)}".removesuffix(": ")):
            found: Any = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **keys)
        model_config, unknown = found
        if unknown:
            raise InputError(f"model.{next(iter(unknown))}: {source} has no such key")
    longest = getattr(model_config, "max_position_embeddings", None) or config.data.seq_len
    if model_config.model_type != "nalanda" and longest < config.data.seq_len:
        raise InputError(
            f"data.seq_len: {config.data.seq_len} is more than the model's {longest} positions"
        )
    if is_encoder(model_config):
        carry = config.data.long_documents == "carry"
        for key, asked, value in (
            ("data.long_documents", carry, "cut"),
            ("train.context_parallel", config.train.context_parallel > 1, "1"),
        ):
            if asked:
                raise InputError(
                    f"{key}: the model is an encoder, which has no state to pass on; set {value}"
                )
    if config.train.context_parallel > 1 and model_config.model_type != "nalanda":
        raise InputError(
            f"train.context_parallel: needs one of Nalanda's own models, not {model_config.model_type}; set 1"
        )
    if config.train.context_parallel > 1 and (names := uncut_mixers(model_config)):
        raise InputError(f"train.context_parallel: mixer {names[0]} does not serve cut rows; set 1")
    if tokenizer is not None:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(model_config, key, getattr(tokenizer, key))
        if model_config.pad_token_id == model_config.eos_token_id:
            model_config.pad_token_id = (
                None  # a padding embedding is not trained, that of eos must be
            )
        if not config.data.bos:  # prompts and evaluations begin as training documents do
            model_config.bos_token_id = None
    return model_config


DERIVED = ("vocab_size", "head_dim", "intermediate_size", "max_position_embeddings")
"""Keys of a model whose values, where a recipe has none, follow from the tokenizer and other keys."""


def written_out(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of a recipe's `model` that describe a model of Nalanda's, with today's defaults written out.

    Special tokens are left to the tokenizer.
    """
    elsewhere = {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
    names = [
        f.name for f in dataclasses.fields(NalandaConfig) if f.name in NalandaConfig.__annotations__
    ]
    values = config.to_dict()
    return {name: values[name] for name in names if name not in elsewhere}


def recorded_model(recipe: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """A recipe's `model` with the defaults that its config has, so that it keeps its meaning under others.

    What the recipe says stays as it is, and what is derived is left to be derived again.
    """
    defaults = {name: value for name, value in written_out(config).items() if name not in DERIVED}
    options = {"feature_map_options": defaults["feature_map_options"]}
    return defaults | recipe | options


def padded_vocabulary(tokens: int) -> int:
    """A model's default vocabulary: a multiple of 64, for faster matrix products."""
    return 64 * math.ceil(tokens / 64)


def config_source(model: dict[str, Any]) -> type[PreTrainedConfig] | str:
    """The config class that `model` of a recipe describes, or the path or hub id of a config.json."""
    if model.get("auto") is None:
        bare = set(model) <= {"auto", "init_from"}
        return (model.get("init_from") if bare else None) or NalandaConfig
    name = str(model["auto"])
    keep_model_types()
    if name not in CONFIG_MAPPING and importlib.util.find_spec("fla"):
        try:
            import_fla()  # registers its model types
        except Exception as error:  # releases of other libraries break it in many ways
            if "/" not in name:
                raise InputError(
                    f"model.auto: {name}: flash-linear-attention fails: {error!r}"
                ) from None
    if name not in CONFIG_MAPPING and name in FLA and not Path(name).exists():
        raise InputError(
            f"model.auto: {name} is of flash-linear-attention; pip install 'nalanda[fla]'"
        )
    if name not in CONFIG_MAPPING or Path(name).exists():
        return name
    kind = CONFIG_MAPPING[name]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"model.auto: {name} is not a causal language model")
    return kind


@contextlib.contextmanager
def in_one_line(where: str) -> Iterator[None]:
    """Turns other libraries' errors about the user's input into an `InputError` of one line."""
    try:
        yield
    except (
        ImportError,
        OSError,
        TypeError,
        ValueError,
        RuntimeError,
        StrictDataclassError,
    ) as error:
        if out_of_memory(error):
            raise
        first, *rest = [line.strip() for line in str(error).strip().splitlines()]
        raise InputError(f"{where}: {' '.join([first, *rest[: first.endswith(':')]])}") from None
