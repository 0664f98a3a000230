"""Which model a recipe means: its config, and the files of a model folder."""

import contextlib
import importlib.util
import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from nalanda import NalandaConfig
from nalanda.common.errors import InputError, out_of_memory
from nalanda.common.text import nearest
from nalanda.config.schema import RunConfig


def build_model_config(config: RunConfig, tokenizer: Any = None) -> PreTrainedConfig:
    """The model's config: `NalandaConfig`, or under `auto` that of a path, of a model type that transformers
    or flash-linear-attention knows, or of a hub id, whichever of them there is first.

    One that the recipe itself describes has `data.seq_len` positions and, without a `vocab_size`, the
    tokenizer's, rounded up to a multiple of 64, for the matrix products' sake. The special tokens are always
    the tokenizer's. Raises `InputError`.
    """
    keys = {key: value for key, value in config.model.items() if key not in ("auto", "init_from")}
    source = config_source(config.model)
    if isinstance(source, type):
        known = {*inspect.signature(source).parameters, *getattr(source, "attribute_map", {})}
        if source is not NalandaConfig and (unknown := sorted(keys.keys() - known)):
            # Other configs would keep them, and nothing would ever read them.
            raise InputError(
                f"model.{unknown[0]}: {source.model_type} has no such key{nearest(unknown[0], known)}"
            )
        if "max_position_embeddings" in known:
            keys.setdefault("max_position_embeddings", config.data.seq_len)
        if tokenizer is not None:
            keys.setdefault("vocab_size", 64 * math.ceil(len(tokenizer) / 64))
        with _in_one_line("model"):
            model_config: PreTrainedConfig = source(**keys)
    else:
        with _in_one_line(f"model: {not_here(source)}".removesuffix(": ")):
            found: Any = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **keys)
        model_config, unknown = found
        if unknown:
            raise InputError(f"model.{next(iter(unknown))}: {source} has no such key")
    longest = getattr(model_config, "max_position_embeddings", None) or config.data.seq_len
    if model_config.model_type != "nalanda" and longest < config.data.seq_len:
        raise InputError(f"data.seq_len: {config.data.seq_len} is more than the model's {longest} positions")
    if tokenizer is not None:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(model_config, key, getattr(tokenizer, key))
        if model_config.pad_token_id == model_config.eos_token_id:
            model_config.pad_token_id = None  # an embedding of padding is never trained, eos must be
        if not config.data.bos:  # prompts and evaluations begin as the training documents did
            model_config.bos_token_id = None
    return model_config


def config_source(model: dict[str, Any]) -> type[PreTrainedConfig] | str:
    """The config whose fields `model` of a recipe gives, or the path or hub id whose config.json does."""
    if model.get("auto") is None:
        bare = set(model) <= {"auto", "init_from"}
        return (model.get("init_from") if bare else None) or NalandaConfig
    name = str(model["auto"])
    if name not in CONFIG_MAPPING and importlib.util.find_spec("fla"):
        try:
            importlib.import_module("fla")  # registers its model types
        except Exception as error:  # it breaks with other libraries' releases, each time differently
            if "/" not in name:
                raise InputError(f"model.auto: {name}: flash-linear-attention fails: {error!r}") from None
    if name not in CONFIG_MAPPING or Path(name).exists():
        return name
    kind = CONFIG_MAPPING[name]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"model.auto: {name} is no causal language model")
    return kind


@contextlib.contextmanager
def _in_one_line(where: str) -> Iterator[None]:
    """Other libraries' complaints about what the user named, as one line."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
        if out_of_memory(error):
            raise
        first, *rest = [line.strip() for line in str(error).strip().splitlines()]
        raise InputError(f"{where}: {' '.join([first, *rest[: first.endswith(':')]])}") from None


def not_here(name: str) -> str:
    """What to put before the hub's complaint about `name`, which may well be a misspelt folder."""
    return "" if Path(name).expanduser().exists() else f"there is no folder {name}, and the hub says: "


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, all of them whole; [] where its weights are of another kind.

    Raises:
        InputError: a file is missing or damaged, or the index names one that is outside of the folder.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"] if (folder / "model.safetensors").is_file() else []
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            inside = all(Path(name).name == name for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{index.name}: damaged, or no index of weights") from None
        # The hub's cache has links from snapshots/REVISION to its blobs.
        root = (
            folder.resolve().parents[1] if folder.resolve().parent.name == "snapshots" else folder.resolve()
        )
        for name in names:
            if not inside or not (folder / name).resolve().is_relative_to(root):
                raise InputError(f"{index.name}: {name} is outside of the folder, and was not read")
    for file in (folder / name for name in names):
        if not file.is_file():
            raise InputError(f"no {file.name} there, which {index.name} names")
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{file.name}: damaged or cut short ({error}); copy or download it again"
            ) from None
    return [folder / name for name in names]
