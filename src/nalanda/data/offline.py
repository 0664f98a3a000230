"""The offline mirror: a directory with everything remote that a recipe needs, filled with a network and read
without one.

    DIR/fetched.json                       the complete entries; size and SHA-256 of every file
    DIR/tokenizers/OWNER--NAME/            as `save_pretrained` writes it
    DIR/datasets/OWNER--NAME[--CONFIG]…/   train/, validation/: the dataset's own files if they can be read,
                                           else its documents as .jsonl.zst; also by split and revision if set
    DIR/urls/NAME/                         the shards, below the names of their hosts
    DIR/models/OWNER--NAME/                config and safetensors, for model.init_from
    DIR/configs/OWNER--NAME/               config alone, for model.auto

Files and directories get their names when they are complete, so an interrupted download can be resumed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from nalanda.common.errors import InputError, SourceUnavailable, first_line, output_folder
from nalanda.common.files import sha256_of, write_atomically
from nalanda.common.progress import Progress
from nalanda.common.retry import persist
from nalanda.common.text import is_url, redact
from nalanda.config.model import config_source
from nalanda.config.schema import DataConfig, RunConfig
from nalanda.data.documents import Document, digest, files_of
from nalanda.data.hub import is_hub_id, open_hub, pinned
from nalanda.data.stores import copy_set, fetch, is_stored_set, list_parts
from nalanda.data.tokenizer import MISTRAL, build_tokenizer
from nalanda.data.urls import identity_of

INDEX = "fetched.json"

WEIGHTS = ("*.json", "*.safetensors")
"""Patterns of a model's files, without pickle and code."""

CONFIG = ("config.json", "generation_config.json")

MIRRORED_SUFFIXES = {
    ".jsonl.gz": ".jsonl.gz",
    ".jsonl.zst": ".jsonl.zst",
    ".jsonl": ".jsonl",
    ".parquet": ".parquet",
    ".json.gz": ".jsonl.gz",
    ".json.zst": ".jsonl.zst",
}
"""Suffixes of Hub files that are mirrored as they are → those in the mirror (.json.gz: a record a line)."""


@dataclass
class Need:
    """A remote thing that a recipe names."""

    key: str
    """Key of the recipe that names it, such as data.source."""
    name: str | list[str]
    """Hub id, URL or URLs."""
    path: str
    """Path in the mirror, which tells all that the content depends on."""
    holder: Any
    """Section or mapping that holds the key's last part."""
    data: DataConfig
    """Data settings of this source."""

    @property
    def title(self) -> str:
        return redact(self.name if isinstance(self.name, str) else f"{self.name[0]} and others")

    @property
    def kind(self) -> str:
        return self.path.split("/")[0]


def needs(config: RunConfig) -> list[Need]:
    """The tokenizer, data and model that `config` names on the Hub or by URL."""
    found = []
    name = config.tokenizer.path
    if name and name not in MISTRAL and _on_hub(name):
        found.append(
            Need(
                "tokenizer.path", name, f"tokenizers/{_plain(name)}", config.tokenizer, config.data
            )
        )
    parts = [("data", config.data, config.data)]
    parts += [
        (f"data.mixture.{part.name}", part, config.data.parts()[part.name])
        for part in config.data.mixture
    ]
    for where, holder, data in parts:
        for key in ("source", "validation_source"):
            source = getattr(holder, key)
            if is_url(source):
                found.append(Need(f"{where}.{key}", source, f"urls/{_slug(source)}", holder, data))
            elif isinstance(source, str) and is_hub_id(source) and _on_hub(source):
                path = f"datasets/{_dataset(source, data)}" + (
                    "--alone" if key == "validation_source" else ""
                )
                found.append(Need(f"{where}.{key}", source, path, holder, data))
    first = config.model.get("init_from")
    for key in ("auto", "init_from"):
        name = config.model.get(key)
        if (
            name
            and _on_hub(str(name))
            and (key == "init_from" or isinstance(config_source(config.model), str))
        ):
            path = f"{'models' if name == first else 'configs'}/{_plain(name)}"
            found.append(Need(f"model.{key}", name, path, config.model, config.data))
    return found


def _on_hub(name: str) -> bool:
    """Whether `name` has the form of a Hub id and is not a local path."""
    id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and not name.endswith((".json", ".model"))
    return bool(id) and not Path(name).exists()


def _dataset(source: str, data: DataConfig) -> str:
    usual = {"train_split": "train", "validation_split": "validation"}
    splits = [value for key, split in usual.items() if (value := getattr(data, key)) != split]
    pin = pinned(data, source).values()
    return "--".join(_plain(part) for part in [source, data.name, *splits, *pin] if part)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "-", name.replace("/", "--"))


def _slug(source: str | list[str]) -> str:
    if isinstance(source, str):
        parts = urlsplit(identity_of(source))
        slug = _plain(f"{parts.netloc}{parts.path}") + (f"-{parts.query}" if parts.query else "")
        if len(slug) < 200:
            return slug
        source = [source]
    return "list-" + digest("\n".join(map(identity_of, source)))


# ------------------------------ reading the mirror


def use_mirror(config: RunConfig) -> RunConfig:
    """`config` with paths below `config.offline` in place of Hub ids and URLs; without `offline`, unchanged.

    The Hub's libraries open no connection from then on, in this process and those it starts. Use the result
    to build things only: a run is identified by `config` itself.

    Raises:
        InputError: the mirror lacks something, or a part of it.
    """
    if not config.offline:
        return config
    _close_the_hub()
    root = Path(config.offline).expanduser()
    config = copy.deepcopy(config)
    again = f"with a network, run nalanda data fetch RECIPE --to {root}"
    for need in needs(config):
        index = _read_index(root)
        if need.path not in index["whole"]:
            what = "only a part of" if (root / need.path).exists() else "no"
            raise InputError(f"offline: {root} has {what} {need.key} {need.title}; {again}")
        for file in _damaged(root, index, need):
            raise InputError(f"offline: {root / file} is missing or of another size; {again}")
        path = str(root / need.path)
        if isinstance(need.holder, dict):
            need.holder[need.key.rpartition(".")[2]] = path
        else:
            setattr(need.holder, need.key.rpartition(".")[2], path)
    return config


def _damaged(root: Path, index: dict, need: Need) -> list[str]:
    """Files of `need` that are missing or have another size."""
    return [
        name
        for name, facts in index["files"].items()
        if name.startswith(f"{need.path}/")
        and not ((root / name).is_file() and (root / name).stat().st_size == facts["size"])
    ]


def _close_the_hub() -> None:
    import huggingface_hub.constants

    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # read when it was imported
    if config := sys.modules.get("datasets.config"):
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            setattr(config, name, True)


# ------------------------------ filling the mirror


def fill_mirror(config: RunConfig, to: str | os.PathLike, *, max_shards: int | None = None) -> Path:
    """Downloads what `config` needs into the mirror `to`, except what is there already. Returns its path.

    Args:
        config: a run; its `offline` is ignored.
        to: the directory that `offline` then names.
        max_shards: most files of each split of each source, for a part of a large dataset.
    Raises:
        InputError: something cannot be downloaded.
        SourceUnavailable: a server failed too many times in a row; the same command resumes.
    """
    root = Path(to).expanduser()
    index = _read_index(root, missing={"whole": {}, "files": {}})
    output_folder(root, "--to")
    wanted = needs(config)
    for number, need in enumerate(wanted, 1):
        limit = max_shards if need.kind in ("datasets", "urls") else None
        known = index["whole"].get(need.path)
        damaged = _damaged(root, index, need)
        if known and not damaged and (known["max_shards"] is None or known["max_shards"] == limit):
            continue
        for name in damaged:
            del index["files"][name]
            (root / name).unlink(missing_ok=True)
        with Progress(f"[{number}/{len(wanted)}] {redact(need.title)}") as progress:

            def say(what: str, number: int = number, progress: Progress = progress) -> None:
                progress.call(f"[{number}/{len(wanted)}] {redact(what)}")

            _FETCH[need.kind](need, config, root / need.path, limit, say)
            say(f"{need.title}: hashing")
            _record(root, index, need.path)
        index["whole"][need.path] = {"from": need.title, "max_shards": limit}
        index["files"] = dict(sorted(index["files"].items()))
        write_atomically(root / INDEX, json.dumps(index, indent=1, ensure_ascii=False) + "\n")
    size = sum(facts["size"] for facts in index["files"].values())
    facts = f"{len(wanted)} things, {len(index['files'])} files, {size / 1e6:,.1f} MB"
    print(f"{root}: {facts}", file=sys.stderr)
    return root


def _read_index(root: Path, missing: dict | None = None) -> dict:
    file = root / INDEX
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise InputError(
            f"offline: {root} has no {INDEX}; with a network, run nalanda data fetch RECIPE --to {root}"
        ) from None
    except ValueError:
        raise InputError(f"{file}: damaged; remove it and fetch again") from None


def _record(root: Path, index: dict, path: str) -> None:
    """Records sizes and hashes of the files below `path`, and removes partial downloads."""
    for file in sorted((root / path).rglob("*")):
        if file.is_file() and file.name.endswith(".partial"):
            file.unlink()
        elif file.is_file():
            index["files"][file.relative_to(root).as_posix()] = {
                "size": file.stat().st_size,
                "sha256": sha256_of(file),
            }


def _from_hub(do: Callable[[], Any], what: str, retries: int) -> Any:
    try:
        return persist(do, what, retries)
    except SourceUnavailable:
        raise
    except Exception as error:  # datasets, huggingface_hub and httpx share no base class
        raise InputError(
            f"{what}: cannot be downloaded from the Hub ({redact(first_line(error))})"
        ) from None


def _fetch_tokenizer(
    need: Need, config: RunConfig, target: Path, shards: int | None, say: Callable
) -> None:
    tokenizer = build_tokenizer(config.tokenizer, config.data, target)
    shutil.rmtree(target, ignore_errors=True)
    part = target.with_name(f"{target.name}.partial")
    tokenizer.save_pretrained(part)
    part.replace(target)


def _fetch_model(
    need: Need, config: RunConfig, target: Path, shards: int | None, say: Callable
) -> None:
    from huggingface_hub import snapshot_download

    weights = need.kind == "models"
    part = target.with_name(f"{target.name}.partial")  # the Hub's library resumes in it
    patterns = list(WEIGHTS if weights else CONFIG)
    _from_hub(
        lambda: snapshot_download(str(need.name), local_dir=part, allow_patterns=patterns),
        f"{need.key} {need.title}",
        config.data.retries,
    )
    shutil.rmtree(part / ".cache", ignore_errors=True)
    if not (part / "config.json").is_file() or (weights and not any(part.glob("*.safetensors"))):
        raise InputError(
            f"{need.key}: {need.title} has no {'safetensors' if weights else 'config.json'}"
        )
    shutil.rmtree(target, ignore_errors=True)
    part.replace(target)


def _fetch_urls(
    need: Need, config: RunConfig, target: Path, shards: int | None, say: Callable
) -> None:
    if is_stored_set(need.name, config.data.retries):
        copy_set(str(need.name), config.data.retries, target)
        return
    parts, _ = list_parts(need.name, config.data.retries)
    train, held = files_of(parts, "train"), files_of(parts, "validation")
    for part, files in (("train", train), ("validation", held if held != train else [])):
        for wanted in files[:shards]:
            place = urlsplit(identity_of(wanted.url), allow_fragments=False)
            file = target / part / f"{place.netloc}{place.path}".replace(":", "-")
            if place.query:
                file = file.with_name(f"{place.query}-{file.name}")
            if not file.exists():
                say(wanted.url)
                file.parent.mkdir(parents=True, exist_ok=True)
                fetch(wanted, file, config.data.retries)


def _fetch_dataset(
    need: Need, config: RunConfig, target: Path, shards: int | None, say: Callable
) -> None:
    import datasets

    name, data = str(need.name), dataclasses.replace(need.data, streaming=True)
    pin = pinned(data, name)
    builder = _from_hub(
        lambda: datasets.load_dataset_builder(name, data.name, **pin), name, data.retries
    )
    files = getattr(builder.config, "data_files", None) or {}
    _, separate = open_hub(data, name, "validation")
    splits = {"validation": data.validation_split} if separate else {}
    if not (need.key.endswith("validation_source") and separate):
        splits["train"] = data.train_split
    staging = target.with_name(
        f"{target.name}.partial"
    )  # the Hub's library resumes partial files in it
    for folder, split in splits.items():
        places = [_hub_file(str(file)) for file in files.get(split, [])]
        if places and all(places):
            for place in [place for place in places if place][:shards]:
                _copy(place, target / folder, staging, data.retries, say)
        else:
            _write(data, name, folder, target / folder, shards, say)
    shutil.rmtree(staging, ignore_errors=True)


def _hub_file(url: str) -> tuple[str, str | None, str] | None:
    """(dataset, revision, path) of a Hub file that can be mirrored as it is, else None."""
    match = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", url)
    if not match or not match[3].endswith(tuple(MIRRORED_SUFFIXES)):
        return None
    return match[1], unquote(match[2]) if match[2] else None, match[3]


def _copy(
    place: tuple[str, str | None, str], folder: Path, staging: Path, retries: int, say: Callable
) -> None:
    from huggingface_hub import hf_hub_download

    name, revision, path = place
    kind = next(kind for kind in MIRRORED_SUFFIXES if path.endswith(kind))
    local = path.removesuffix(kind) + MIRRORED_SUFFIXES[kind]
    file = folder / local.removeprefix(f"{folder.name}/")
    if file.exists():
        return
    say(f"{name}: {path}")
    found = _from_hub(
        lambda: hf_hub_download(
            name, path, repo_type="dataset", revision=revision, local_dir=staging
        ),
        f"{name}: {path}",
        retries,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    os.replace(found, file)


def _write(
    data: DataConfig, name: str, split: str, folder: Path, limit: int | None, say: Callable
) -> None:
    """Writes each shard of a dataset as a .jsonl.zst, for datasets whose own files cannot be mirrored."""
    import zstandard

    shards = open_hub(data, name, split)[0]
    for number, shard in enumerate(shards[:limit]):
        file = folder / f"part-{number:05}.jsonl.zst"
        if file.exists():
            continue
        say(f"{name}: {split} {number + 1} of {len(shards)}")
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.partial")
        with part.open("wb") as stream, zstandard.ZstdCompressor().stream_writer(stream) as writer:
            for document, _ in shard.read(None):
                if not isinstance(document, Document):  # left out
                    continue
                record: dict[str, Any] = {data.text_field: document.text}
                if document.source:
                    *path, last = data.source_field.split(".")
                    inner = record
                    for key in path:
                        inner = inner.setdefault(key, {})
                    inner[last] = document.source
                writer.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        part.replace(file)


_FETCH: dict[str, Callable[[Need, Any, Path, int | None, Callable], None]] = {
    "tokenizers": _fetch_tokenizer,
    "models": _fetch_model,
    "configs": _fetch_model,
    "urls": _fetch_urls,
    "datasets": _fetch_dataset,
}
