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
    logging,
)

from nalanda.common.errors import InputError, first_line, out_of_memory
from nalanda.common.text import suggest
from nalanda.config.model_folder import check_config, check_hub, not_here
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

    A config described by the recipe has as many positions as `data.seq_len` of its longest stage. Its default
    vocabulary is the tokenizer's, rounded up to a multiple of 64 for faster matrix products. Special tokens are
    always the tokenizer's. Raises `InputError`.
    """
    keys = {key: value for key, value in config.model.items() if key not in ("auto", "init_from")}
    source = config_source(config.model)
    if isinstance(source, type):
        longest = max(stage.config.data.seq_len for stage in config.in_stages())
        model_config = described_config(source, keys, longest, tokenizer)
    else:
        model_config = stored_config(source, keys)
    for stage in config.in_stages():
        check_training(stage.config, model_config)
    if tokenizer is not None:
        take_special_tokens(model_config, tokenizer, bos=config.data.bos)
    return model_config


def described_config(
    source: type[PreTrainedConfig], keys: dict[str, Any], seq_len: int, tokenizer: Any
) -> PreTrainedConfig:
    """The config of class `source` that the recipe's `keys` describe."""
    accepted = {*inspect.signature(source).parameters, *getattr(source, "attribute_map", {})}
    unknown = sorted(keys.keys() - accepted)
    if source is not NalandaConfig and unknown:
        # Other configs would accept them, and ignore them.
        hint = suggest(unknown[0], accepted)
        raise InputError(f"model.{unknown[0]}: {source.model_type} has no such key{hint}")

    keys = dict(keys)
    if "max_position_embeddings" in accepted:
        keys.setdefault("max_position_embeddings", seq_len)
    if tokenizer is not None:
        # Not the number of tokens: ids may have gaps.
        tokens = max(tokenizer.get_vocab().values()) + 1
        keys.setdefault("vocab_size", padded_vocabulary(tokens))
    with in_one_line("model"):
        return source(**keys)


def stored_config(source: str, keys: dict[str, Any]) -> PreTrainedConfig:
    """The config.json of a path or hub id, with the recipe's `keys` in place of its own."""
    with in_one_line("model"):
        check_hub(source)
    with in_one_line(f"model: {source}"):
        check_config(source)
    with in_one_line(f"model: {not_here(source)}".removesuffix(": ")):
        loaded: Any = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **keys)
    model_config, unknown = loaded
    if unknown:
        raise InputError(f"model.{next(iter(unknown))}: {source} has no such key")
    return model_config


def check_training(config: RunConfig, model_config: PreTrainedConfig) -> None:
    """Raises `InputError` for a way of training that the model cannot serve."""
    seq_len, contexts = config.data.seq_len, config.train.context_parallel
    ours = model_config.model_type == "nalanda"
    positions = getattr(model_config, "max_position_embeddings", None) or seq_len
    if not ours and positions < seq_len:
        raise InputError(f"data.seq_len: {seq_len} is more than the model's {positions} positions")

    if is_encoder(model_config):
        problem = "the model is an encoder, which has no state to pass on"
        if config.data.long_documents == "carry":
            raise InputError(f"data.long_documents: {problem}; set cut")
        if contexts > 1:
            raise InputError(f"train.context_parallel: {problem}; set 1")

    if contexts > 1 and not ours:
        raise InputError(
            f"train.context_parallel: needs one of Nalanda's own models, not {model_config.model_type}; set 1"
        )
    if contexts > 1 and (names := uncut_mixers(model_config)):
        raise InputError(f"train.context_parallel: mixer {names[0]} does not serve cut rows; set 1")


def take_special_tokens(model_config: PreTrainedConfig, tokenizer: Any, *, bos: bool) -> None:
    """Gives the config the tokenizer's special tokens. bos: whether training documents begin with one."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model_config, key, getattr(tokenizer, key))
    if model_config.pad_token_id == model_config.eos_token_id:
        # A padding embedding is not trained; that of eos must be.
        model_config.pad_token_id = None
    if not bos:  # prompts and evaluations begin as training documents do
        model_config.bos_token_id = None


DERIVED = ("vocab_size", "head_dim", "intermediate_size", "max_position_embeddings")
"""Keys of a model whose values, where a recipe has none, follow from the tokenizer and other keys."""


def written_out(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of a recipe's `model` that describe a model of Nalanda's, with today's defaults written out.

    Special tokens are left to the tokenizer.
    """
    excluded = {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
    described = NalandaConfig.__annotations__.keys() - excluded
    names = [f.name for f in dataclasses.fields(NalandaConfig) if f.name in described]
    values = config.to_dict()
    return {name: values[name] for name in names}


def recorded_model(recipe: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """A recipe's `model` with the defaults that its config has, so that it keeps its meaning under others.

    The recipe's own values stay, and derived keys are left to be derived again.
    """
    defaults = {name: value for name, value in written_out(config).items() if name not in DERIVED}
    # These are resolved ones: a recipe's would miss the defaults of its map.
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
    # A folder of that name comes before the model type.
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
        OverflowError,
        TypeError,
        ValueError,
        RuntimeError,
        StrictDataclassError,
    ) as error:
        if out_of_memory(error):
            raise
        raise InputError(f"{where}: {first_line(error)}") from None


@contextlib.contextmanager
def silence_transformers() -> Iterator[None]:
    """Silences the warnings and progress bars of transformers."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
