"""The text of paired runs: tokenized once, and known by a fingerprint."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError
from nalanda.config.load import section
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.prepare import prepare
from nalanda.data.prepare_plan import token_settings
from nalanda.data.token_set import is_token_set, read_index


def prepare_text(recipe: dict[str, Any], text: str | None, work: Path, workers: int) -> Path:
    """Tokenizes the text into `work`, unless an earlier call did, and returns the token set's folder.

    Args:
        recipe: a recipe as a mapping; its `data` and `tokenizer` say how to tokenize.
        text: a corpus, as `data.source`. Default: that of the earlier call, else the recipe's.
        work: the folder that gets `text`.
        workers: processes.

    Raises:
        InputError: `work` holds another text, or tokens of other settings.
    """
    folder = work / "text"
    held = read_index(folder)["settings"] if is_token_set(folder) else {}
    source = text or held.get("source") or recipe["data"]["source"]

    data = section(DataConfig, recipe["data"] | {"source": source}, "data.")
    tokenizer = section(TokenizerConfig, recipe["tokenizer"], "tokenizer.")
    if not held:
        prepare(data, tokenizer, folder, workers=workers, say=lambda line: print(line, flush=True))
        return folder

    wanted = token_settings(data, tokenizer, held["corpus"], held["shard_bytes"])
    for name in wanted | held:
        if wanted.get(name) != held.get(name):
            before, now = json.dumps(held.get(name)), json.dumps(wanted.get(name))
            raise InputError(
                f"{folder}: was prepared with {name} {before}, and this is {now}; remove it, or give "
                "another folder"
            )
    return folder


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
