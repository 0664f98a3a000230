"""The text of paired runs: a token set that is known by a fingerprint."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError
from nalanda.config.load import section
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare_plan import token_settings
from nalanda.data.token_set import read_index


def check_text(recipe: dict[str, Any], text: Path) -> None:
    """Raises `InputError` unless `text` is a token set, of the settings in a recipe's `data` and `tokenizer`."""
    held = read_index(text)["settings"]
    data = section(DataConfig, recipe["data"] | {"source": held["source"]}, "data.")
    tokenizer = section(TokenizerConfig, recipe["tokenizer"], "tokenizer.")
    wanted = token_settings(data, tokenizer, held["corpus"], held["shard_bytes"])
    for name in wanted | held:
        if wanted.get(name) != held.get(name):
            before, now = json.dumps(held.get(name)), json.dumps(wanted.get(name))
            raise InputError(
                f"{text}: was prepared with {name} {before}, and this is {now}; prepare another"
            )


def text_facts(text: Path) -> dict[str, Any]:
    """A prepared text's name, fingerprint of documents and tokens, vocabulary size and training tokens."""
    index = read_index(text)
    source = index["settings"]["source"]
    contents = [index["settings"]["corpus"], index["tokenizer"]["fingerprint"]]
    return {
        "name": Path(source).name if isinstance(source, str) else ", ".join(source),
        "fingerprint": sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16],
        "vocab_size": index["tokenizer"]["vocab_size"],
        "tokens": index["train"]["tokens"],
    }
