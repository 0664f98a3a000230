"""Makes a token set of texts, of a recipe's data, or of a Megatron set."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nalanda.common.errors import InputError
from nalanda.common.text import local_path
from nalanda.config.load import is_recipe, load_config
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.megatron import read_megatron
from nalanda.data.options import DocumentOptions, TokenizerOptions
from nalanda.data.prepare import prepare
from nalanda.data.stored_sets import make_in_store
from nalanda.data.token_set import megatron_splits
from nalanda.data.workers import processors
from nalanda.storage.remote import check_output, is_store


def make_token_set(
    source: str,
    directory: str,
    *,
    documents: DocumentOptions = DocumentOptions(),
    tokenizer: TokenizerOptions = TokenizerOptions(),
    overrides: Sequence[str] = (),
    workers: int | None = None,
    shard_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """Makes a token set in `directory`, which may be a folder of a store; returns its index.

    Args:
        source: of documents, or a recipe, whose data and tokenizer are taken; or PREFIX.idx of Megatron.
        documents, tokenizer: in place of the recipe's settings, or of the defaults.
        overrides: settings of the recipe, as `section.key=value`.
        workers: by default one per core.
        shard_bytes, say: as in `prepare`.
    Raises:
        InputError: as in `prepare` or `read_megatron`; overrides without a recipe.
    """
    check_output(directory, "output")
    directory = local_path(directory)

    data_config, tokenizer_config = DataConfig(source=source), TokenizerConfig(train="bpe")
    if is_recipe(source):
        recipe = load_config(source, overrides)
        data_config, tokenizer_config = recipe.data, recipe.tokenizer
        if others := [name for name, stage in recipe.stages.items() if stage.data]:
            say(
                f"without the data of stages {', '.join(others)}: prepare each of their sources, with "
                f"--tokenizer {directory}/tokenizer"
            )
    elif overrides:
        raise InputError(
            f"{overrides[0]}: {source} is not a recipe; write flags (see --help), or put one in front: nalanda "
            f"data prepare demo {directory} data.source={source} {shlex.join(overrides)}"
        )

    # Flags of the command change the recipe's settings, or the defaults.
    changes, tokenizer_changes = _without_none(vars(documents)), _without_none(vars(tokenizer))
    data_config = replace(data_config, **changes)
    tokenizer_config = _changed_tokenizer(tokenizer_config, tokenizer_changes)

    def make(folder: str) -> dict:
        if megatron_splits(data_config.source):
            if {"bos", "eos"} & changes.keys():
                raise InputError(
                    "--bos, --eos: a Megatron set is taken as it is, in one process; leave it out"
                )
            return read_megatron(data_config, tokenizer_config, folder)

        # Without a recipe there are no keys: every message names flags.
        named = is_recipe(source)
        flags = (changes, tokenizer_changes) if named else (vars(documents), vars(tokenizer))
        with _messages_name(*flags):
            return prepare(
                data_config,
                tokenizer_config,
                folder,
                workers=workers or processors(),
                shard_bytes=shard_bytes,
                say=say,
            )

    return make_in_store(directory, make, say) if is_store(directory) else make(directory)


@contextlib.contextmanager
def _messages_name(data: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Iterator[None]:
    """Puts the flags of the command in place of these keys, in the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for section, keys in {"data": data, "tokenizer": tokenizer}.items():
            for key in keys:
                flag = "tokenizer" if key == "path" else key.replace("_", "-")
                message = message.replace(f"{section}.{key}=false", f"--no-{flag}")
                message = re.sub(rf"\b{section}\.{key}\b", f"--{flag}", message)
        raise type(error)(message) from None


def _changed_tokenizer(config: TokenizerConfig, changes: dict[str, Any]) -> TokenizerConfig:
    """The tokenizer's settings with changes. A path or another kind of training leaves none of the others."""
    if "path" in changes or changes.get("train", config.train) != config.train:
        return TokenizerConfig(**changes)
    return replace(config, **changes)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def settings_to_train(
    source: str, index: Mapping[str, Any], overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """The `recipe` to train on a set of `source`, and the `settings` that it must have for that."""
    recipe = source if is_recipe(source) else "demo"
    config = load_config(recipe, overrides).data
    # The set has its own source and tokenizer.
    gone = ("data.source=", "data.validation_source=", "tokenizer")
    settings = [override for override in overrides if not override.startswith(gone)]
    for key in ("bos", "eos"):
        value = index["settings"][key]
        if value != getattr(config, key):
            settings.append(f"data.{key}={str(value).lower()}")
    if config.validation_source:  # the set has its documents
        settings.append("data.validation_source=null")
    if not index["validation"]["documents"]:
        settings.append("validation.every=0")
    return {"recipe": recipe, "settings": settings}
