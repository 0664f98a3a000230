"""Documents and token sets that have a URL: files, folders and patterns of a store, and shards of http(s)."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from nalanda.common.errors import DiskFull, InputError
from nalanda.common.stores import (
    StoreFile,
    cache,
    download_file,
    exists,
    file_at,
    has_magic,
    is_store,
    list_folder,
    match,
    read_bytes,
    remove_file,
    staging,
    upload_file,
)
from nalanda.common.text import redact, size
from nalanda.config.schema import DataConfig, RunConfig
from nalanda.data.documents import (
    EMPTY,
    NAMES,
    Document,
    Fields,
    FileShard,
    Left,
    Shard,
    digest,
    files_of,
    is_single,
    split_of,
    suffix_of,
    suffixes,
)
from nalanda.data.readers import documents_among, refuse_two_kinds
from nalanda.data.token_set import FORMAT, SPLITS
from nalanda.data.urls import UrlShard, cached, is_list, list_urls, name_of, split_urls

AT_ONCE = 16
"""Files that a store is asked for, or given, at a time."""

PARTS = ("index.json", "tokenizer", *SPLITS)
"""What the folder of a token set holds."""


class Named(NamedTuple):
    """A file of a source."""

    url: str
    name: str = ""
    """Its path in the source's folder, or its URL; "" for http(s)."""
    stored: StoreFile | None = None
    """What the store's listing says; None if it was not listed."""


@dataclass(frozen=True)
class StoreShard:
    """A file of a store, downloaded as a whole, then read. The cursor is the number of rows read.

    Name, size and cursor are those of a local file in the same place, so a corpus may move between the two.
    """

    name: str
    stored: StoreFile
    fields: Fields = field(repr=False)
    retries: int = 8

    @property
    def url(self) -> str:
        return self.stored.url

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.size}"

    @property
    def size(self) -> int:
        return self.stored.size

    @property
    def content(self) -> str:
        """What tells the content apart; "" if the store states nothing."""
        return self.stored.content

    @property
    def single(self) -> bool:
        return is_single(self.name)

    def read(self, cursor: int | None) -> Iterator[tuple[Document | Left, int]]:
        path = cached(repr(self.stored), self.url.rpartition("/")[2], self._download)
        try:
            yield from FileShard(path, self.name, self.fields).read(cursor)
        except InputError as error:
            path.unlink(missing_ok=True)  # so that a repaired one is downloaded
            raise InputError(str(error).replace(str(path), redact(self.url))) from None

    def _download(self, file: Path) -> None:
        if file_at(self.url, self.retries) != self.stored:
            raise InputError(
                f"{redact(self.url)}: changed while in use; restore it, "
                "or start a new run from the checkpoint's weights with model.init_from"
            )
        download_file(self.stored, file, self.retries)


# ------------------------------ sources


def open_urls(
    data: DataConfig, source: str | list[str], split: str
) -> tuple[list[Shard], Counter[str]]:
    """The shards of `split`, and the number of files by split, "" for none, and of those left out by suffix.

    `source` is the URL of a shard or of a list of shards (`LISTS`), a folder or pattern of a store, or
    several of them. As with a local directory, folders and files' names tell the split.

    Raises:
        InputError: a shard's suffix has no reader, a list is empty, or something does not exist; a URL of
            several belongs to no split.
        SourceUnavailable: a server or store keeps failing.
    """
    parts, counts = list_parts(source, data.retries)
    if not (files := files_of(parts, split)):
        raise InputError(
            f"{name_of(source)}: no shard for {split}; add some, or name another source"
        )
    taken = {
        *(
            files
            if data.validation_source
            else files_of(parts, "train") + files_of(parts, "validation")
        )
    }
    every = itertools.chain(*parts.values())
    if isinstance(source, list) and (
        lost := next((file for file in every if file not in taken), None)
    ):
        raise InputError(
            f"{redact(lost.url)}: by its name and those of the other URLs neither a training nor a "
            "validation shard, so it would not be read; leave it out, or list it apart as "
            "data.validation_source"
        )
    fields = Fields.of(data)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stored = [*pool.map(lambda file: _look(file, data.retries), files)]
    shards: list[Shard] = [
        StoreShard(file.name, found, fields, data.retries)
        if found
        else UrlShard(file.url, fields, data.retries)
        for file, found in zip(files, stored, strict=True)
    ]
    return shards, counts


def _look(file: Named, retries: int) -> StoreFile | None:
    if not is_store(file.url) or file.stored:
        return file.stored
    if (found := file_at(file.url, retries)) is None:
        raise InputError(
            f"{redact(file.url)}: a folder; name it alone as data.source, or name its files"
        )
    return found


def list_parts(
    source: str | list[str], retries: int
) -> tuple[dict[str, list[Named]], Counter[str]]:
    """A source's files by split, and `Corpus.counts`."""
    counts: Counter[str] = Counter()
    if not isinstance(source, str) or not is_store(source) or is_list(source):
        urls = split_urls(list_urls(source, retries))
        parts = {
            part: [Named(url, url * is_store(url)) for url in found] for part, found in urls.items()
        }
    elif has_magic(source):
        files = [Named(stored.url, stored.url, stored) for stored in match(source, retries)]
        parts = {**{part: [] for part in NAMES}, "": [_readable(file) for file in files]}
    elif not source.endswith("/") and (stored := file_at(source, retries)):
        parts = {**{part: [] for part in NAMES}, "": [_readable(Named(source, source, stored))]}
    else:
        parts = _folder_parts(source, retries, counts)
    counts.update({part: len(found) for part, found in parts.items()})
    if not any(parts.values()):
        raise InputError(
            f"{name_of(source)}: no documents; files may end in {', '.join(suffixes())}"
        )
    return parts, counts


def _readable(file: Named) -> Named:
    if not suffix_of(file.name):
        raise InputError(
            f"{redact(file.url)}: no reader for this suffix; files may end in {', '.join(suffixes())}"
        )
    return file


def _folder_parts(source: str, retries: int, counts: Counter[str]) -> dict[str, list[Named]]:
    """The files of a folder by split, as of a local one: the outermost folder that names a split decides."""
    parts: dict[str, list[Named]] = {part: [] for part in (*NAMES, "")}
    names = list_folder(source, retries)
    if "index.json" in names and any(name.endswith(".tokens") for name in names):
        raise InputError(
            f"data.source: {redact(source)} is a token set, and texts are needed here; give its source"
        )
    if not names:
        raise InputError(f"{redact(source)}: it does not exist, or has no file")
    shown = [name for name in names if not any(step.startswith(".") for step in name.split("/"))]
    read = documents_among(shown)
    for name in shown:
        stored = names[name]
        *folders, file = name.split("/")
        if name in read and not stored.size and not is_single(file):
            counts[EMPTY] += 1
        elif name in read:
            parts[split_of(folders, file)].append(Named(stored.url, name, stored))
        else:
            counts[Path(file).suffix or "."] += 1
    refuse_two_kinds(redact(source), (file.name for found in parts.values() for file in found))
    return parts


# ------------------------------ token sets


def is_stored_set(source: Any, retries: int) -> bool:
    """Whether a source is the folder of a token set in a store."""
    if not is_store(source) or has_magic(source) or suffix_of(source) or is_list(source):
        return False
    index = f"{source.rstrip('/')}/index.json"
    return exists(index, retries) and FORMAT.encode() in read_bytes(index, retries)[:256]


def with_local_sets(config: RunConfig) -> RunConfig:
    """`config` with copies on this disk in place of token sets of stores: their rows are read at random.

    Use the result to build things only: a run is identified by `config` itself.
    """
    retries = config.data.retries

    def local(section: Any) -> Any:
        sources = {key: getattr(section, key) for key in ("source", "validation_source")}
        found = {
            key: str(copy_set(source, retries))
            for key, source in sources.items()
            if is_stored_set(source, retries)
        }
        return replace(section, **found) if found else section

    data = replace(local(config.data), mixture=[local(part) for part in config.data.mixture])
    return config if data == config.data else replace(config, data=data)


def copy_set(url: str, retries: int, to: Path | None = None) -> Path:
    """Downloads a token set into the cache, or to `to`, except what is there already. Returns its folder.

    Raises `InputError` if the disk has too little room."""
    root = url.rstrip("/")
    content = read_bytes(f"{root}/index.json", retries)
    try:
        index = json.loads(content)
        wanted = [
            StoreFile(f"{root}/{split}/{shard['name']}.{kind}", shard["files"][kind][0])
            for split in SPLITS
            for shard in index[split]["shards"]
            for kind in ("tokens", "docs")
        ]
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{redact(root)}/index.json: damaged; copy or prepare the set again"
        ) from None
    wanted += list_folder(f"{root}/tokenizer", retries).values()
    folder = to or cache() / "sets" / digest(root + content.decode())
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        missing = [
            stored
            for stored in wanted
            if not _is_there(folder / stored.url[len(root) + 1 :], stored)
        ]
        need, free = sum(stored.size for stored in missing), shutil.disk_usage(folder).free
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
        for stored in missing:
            download_file(stored, folder / stored.url[len(root) + 1 :], retries)
        (folder / "index.json").write_bytes(content)
    return folder


def _is_there(file: Path, stored: StoreFile) -> bool:
    return file.is_file() and file.stat().st_size == stored.size


def make_in_store(url: str, make: Callable[[str], dict], say: Callable[[str], None]) -> dict:
    """Makes a token set in a local folder by `make(folder)`, and copies it to the folder `url` of a store.

    Files of the set that the store has are taken from there, so a set is not made twice. While it is copied,
    the store has no index.json, which comes last. Returns the index.
    """
    root, folder, retries = url.rstrip("/"), staging(url), DataConfig.retries
    say(f"{root}: is made in {folder} and copied from there")
    there = list_folder(root, retries)
    if "index.json" in there and not (folder / "index.json").is_file():
        copy_set(root, retries, folder)
    elif any(name.partition("/")[0] not in PARTS for name in there):
        raise InputError(f"{root}: not empty and not a token set; name another folder")
    made = make(str(folder))

    index = folder / "index.json"
    same = "index.json" in there and read_bytes(f"{root}/index.json", retries) == index.read_bytes()
    if "index.json" in there and not same:
        remove_file(f"{root}/index.json", retries)
    missing = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if not file.is_file() or file.name[0] == "." or name.partition("/")[0] not in PARTS[1:]:
            continue
        if not same or name not in there or there[name].size != file.stat().st_size:
            missing.append(name)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        [*pool.map(lambda name: upload_file(folder / name, f"{root}/{name}", retries), missing)]
    if not same or missing:
        upload_file(index, f"{root}/index.json", retries)
    say(f"{root}: {len(missing)} files copied")
    return made
