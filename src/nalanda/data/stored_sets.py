"""Token sets in a store: copied here to be read, made here and copied there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Any

from filelock import FileLock

from nalanda.common.errors import DiskFull, InputError
from nalanda.common.text import digest, redact, size
from nalanda.config.schema import DataConfig, RunConfig
from nalanda.data.documents import suffix_of
from nalanda.data.token_set import FORMAT, SPLITS, StatedFile, shard_entries
from nalanda.data.urls import is_list
from nalanda.storage.cache import cache
from nalanda.storage.remote import (
    AT_ONCE,
    RemoteFile,
    download,
    files_at,
    is_store,
    read_bytes,
    remove,
    staging,
    upload,
)

PARTS = ("index.json", "tokenizer", *SPLITS)
"""What the folder of a token set holds."""


def is_stored_set(source: Any, retries: int) -> bool:
    """Whether a source is the folder of a token set in a store."""
    if not is_store(source) or has_magic(source) or suffix_of(source) or is_list(source):
        return False
    index = read_bytes(f"{source.rstrip('/')}/index.json", retries, missing=b"")
    return FORMAT.encode() in index[:256]


def with_local_sets(config: RunConfig) -> RunConfig:
    """`config` with copies on this disk in place of token sets of stores: their rows are read at random.

    Use the result to build things only: a run is identified by `config` itself.
    """
    retries = config.data.retries

    def with_copies(section: Any) -> Any:
        copies = {}
        for key in ("source", "validation_source"):
            source = getattr(section, key)
            if is_stored_set(source, retries):
                copies[key] = str(copy_set(source, retries))
        return replace(section, **copies) if copies else section

    components = [with_copies(component) for component in config.data.mixture]
    data = replace(with_copies(config.data), mixture=components)
    return config if data == config.data else replace(config, data=data)


def copy_set(url: str, retries: int, to: Path | None = None) -> Path:
    """Downloads a token set into the cache, or to `to`, except what is there already. Returns its folder.

    Raises `InputError` if the disk has too little room."""
    root = url.rstrip("/")
    index = read_bytes(f"{root}/index.json", retries)
    stored_files = _files_of_set(root, index)
    stored_files += files_at(f"{root}/tokenizer", retries).values()
    # A folder for each index: a set that was made anew is copied anew.
    folder = to or cache() / "sets" / digest(root + index.decode())
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / stored.url[len(root) + 1 :]: stored for stored in stored_files}

    # One process copies; the others wait, and then find the files.
    with FileLock(f"{folder}.lock"):
        missing = {
            file: stored
            for file, stored in files.items()
            if not file.is_file() or file.stat().st_size != stored.size
        }
        need = sum(stored.size or 0 for stored in missing.values())
        free = shutil.disk_usage(folder).free
        if need > free:
            raise DiskFull(
                f"{redact(root)}: a token set is copied here to be read, and {folder} lacks "
                f"{size(need - free)}; make room, or set NALANDA_CACHE to a folder with room"
            )
        if missing:
            print(
                f"nalanda: {redact(root)}: copying {size(need)} to {folder}",
                file=sys.stderr,
                flush=True,
            )
        for file, stored in missing.items():
            download(stored, file, retries)
        # Last: a folder with an index is whole.
        (folder / "index.json").write_bytes(index)
    return folder


def local_set(directory: str | os.PathLike) -> Path:
    """The folder of a token set; of one in a store that of its copy."""
    name = os.fspath(directory)
    return copy_set(name, DataConfig.retries) if is_store(name) else Path(name).expanduser()


def _files_of_set(root: str, index: bytes) -> list[RemoteFile]:
    """The files of a set's shards, with the sizes in its index."""
    files: list[StatedFile] = []
    try:
        content = json.loads(index)
        for split in SPLITS:
            for entry in shard_entries("", content, split):
                files += entry.files()
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(
            f"{redact(root)}/index.json: damaged; copy or prepare the set again"
        ) from None
    return [RemoteFile(f"{root}/{file.path.as_posix()}", file.size) for file in files]


def make_in_store(url: str, make: Callable[[str], dict], say: Callable[[str], None]) -> dict:
    """Makes a token set in a local folder by `make(folder)`, and copies it to the folder `url` of a store.

    Files of the set that the store has are taken from there, so a set is not made twice. While it is copied,
    the store has no index.json, which comes last. Returns the index.
    """
    root, folder, retries = url.rstrip("/"), staging(url), DataConfig.retries
    say(f"{root}: is made in {folder} and copied from there")
    stored = files_at(root, retries)
    # A set in the store is fetched first, so that its shards are kept.
    if "index.json" in stored and not (folder / "index.json").is_file():
        copy_set(root, retries, folder)
    elif any(name.partition("/")[0] not in PARTS for name in stored):
        raise InputError(f"{root}: not empty and not a token set; name another folder")
    description = make(str(folder))

    index, stored_index = folder / "index.json", f"{root}/index.json"
    has_index = "index.json" in stored
    same = has_index and read_bytes(stored_index, retries) == index.read_bytes()
    # The old index goes first, so that the store never shows a mixture of two sets.
    if has_index and not same:
        remove(stored_index, retries)

    missing = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if not file.is_file() or file.name[0] == "." or name.partition("/")[0] not in PARTS[1:]:
            continue
        # Equal indexes state equal sums, so a file of the same size is taken for the same.
        if not same or name not in stored or stored[name].size != file.stat().st_size:
            missing.append(name)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        [*pool.map(lambda name: upload(folder / name, f"{root}/{name}", retries), missing)]
    # The index comes last, once all files are there.
    if not same or missing:
        upload(index, stored_index, retries)
    say(f"{root}: {len(missing)} files copied")
    return description
