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
from nalanda.data.urls import UrlShard, cached, is_list, list_urls, name_of, read_copy, split_urls

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
        """A checksum that the store states; "" if it states none."""
        return self.stored.content

    @property
    def single(self) -> bool:
        return is_single(self.name)

    def read(self, cursor: int | None) -> Iterator[tuple[Document | Left, int]]:
        path = cached(repr(self.stored), self.url.rpartition("/")[2], self._download)
        yield from read_copy(FileShard(path, self.name, self.fields), redact(self.url), cursor)

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
    splits, counts = list_splits(source, data.retries)
    files = files_of(splits, split)
    if not files:
        raise InputError(
            f"{name_of(source)}: no shard for {split}; add some, or name another source"
        )

    if isinstance(source, list):  # each was named, so each must be read
        others = [] if data.validation_source else ["train", "validation"]
        read = {*files, *(file for name in others for file in files_of(splits, name))}
        for file in itertools.chain(*splits.values()):
            if file not in read:
                raise InputError(
                    f"{redact(file.url)}: by its name and those of the other URLs neither a training nor a "
                    "validation shard, so it would not be read; leave it out, or list it apart as "
                    "data.validation_source"
                )

    fields = Fields.of(data)

    def shard_of(file: Named) -> Shard:
        if stored := _look_up(file, data.retries):
            return StoreShard(file.name, stored, fields, data.retries)
        return UrlShard(file.url, fields, data.retries)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(shard_of, files)], counts


def _look_up(file: Named, retries: int) -> StoreFile | None:
    """Asks the store for a file that it has not listed; None for http(s)."""
    if not is_store(file.url) or file.stored:
        return file.stored
    stored = file_at(file.url, retries)
    if stored is None:
        raise InputError(
            f"{redact(file.url)}: a folder; name it alone as data.source, or name its files"
        )
    return stored


def list_splits(
    source: str | list[str], retries: int
) -> tuple[dict[str, list[Named]], Counter[str]]:
    """A source's files by split, and `Corpus.counts`."""
    counts: Counter[str] = Counter()
    splits: dict[str, list[Named]] = {split: [] for split in (*NAMES, "")}
    # Lists, http(s) or several URLs: each URL's path tells its split, unless it is alone.
    if not isinstance(source, str) or not is_store(source) or is_list(source):
        for split, urls in split_urls(list_urls(source, retries)).items():
            splits[split] = [Named(url, url * is_store(url)) for url in urls]
    # A pattern or a file that was named is read, whatever its folders are called.
    elif has_magic(source):
        splits[""] = [_check_suffix(stored) for stored in match(source, retries)]
    elif not source.endswith("/") and (stored := file_at(source, retries)):
        splits[""] = [_check_suffix(stored)]
    else:
        _list_folder(source, retries, splits, counts)
    counts.update({split: len(files) for split, files in splits.items()})
    if not any(splits.values()):
        raise InputError(
            f"{name_of(source)}: no documents; files may end in {', '.join(suffixes())}"
        )
    return splits, counts


def _check_suffix(stored: StoreFile) -> Named:
    if not suffix_of(stored.url):
        raise InputError(
            f"{redact(stored.url)}: no reader for this suffix; files may end in {', '.join(suffixes())}"
        )
    return Named(stored.url, stored.url, stored)


def _list_folder(
    source: str, retries: int, splits: dict[str, list[Named]], counts: Counter[str]
) -> None:
    """Adds a folder's files to their splits, as of a local one: the outermost folder that names one decides."""
    names = list_folder(source, retries)
    if "index.json" in names and any(name.endswith(".tokens") for name in names):
        raise InputError(
            f"data.source: {redact(source)} is a token set, and texts are needed here; to train "
            "on it, set tokenizer to the one that it was prepared with"
        )
    if not names:
        raise InputError(f"{redact(source)}: it does not exist, or has no file")

    # As in a local folder: no hidden names, and no files without documents or content.
    visible = [name for name in names if not any(step[:1] == "." for step in name.split("/"))]
    with_documents = documents_among(visible)
    for name in visible:
        stored = names[name]
        *folders, file = name.split("/")
        if name not in with_documents:
            counts[Path(file).suffix or "."] += 1
        elif not stored.size and not is_single(file):
            counts[EMPTY] += 1
        else:
            splits[split_of(folders, file)].append(Named(stored.url, name, stored))
    refuse_two_kinds(redact(source), (file.name for file in itertools.chain(*splits.values())))


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
    stored_files += list_folder(f"{root}/tokenizer", retries).values()
    # A folder for each index: a set that was made anew is copied anew.
    folder = to or cache() / "sets" / digest(root + index.decode())
    folder.mkdir(parents=True, exist_ok=True)

    # One process copies; the others wait, and then find the files.
    with FileLock(f"{folder}.lock"):
        missing = []
        for stored in stored_files:
            file = folder / stored.url[len(root) + 1 :]
            if not file.is_file() or file.stat().st_size != stored.size:
                missing.append(stored)

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
        # Last: a folder with an index is whole.
        (folder / "index.json").write_bytes(index)
    return folder


def _files_of_set(root: str, index: bytes) -> list[StoreFile]:
    """The files of a set's shards, with the sizes in its index."""
    files = []
    try:
        content = json.loads(index)
        for split in SPLITS:
            for shard in content[split]["shards"]:
                for kind in ("tokens", "docs"):
                    url = f"{root}/{split}/{shard['name']}.{kind}"
                    files.append(StoreFile(url, shard["files"][kind][0]))
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{redact(root)}/index.json: damaged; copy or prepare the set again"
        ) from None
    return files


def make_in_store(url: str, make: Callable[[str], dict], say: Callable[[str], None]) -> dict:
    """Makes a token set in a local folder by `make(folder)`, and copies it to the folder `url` of a store.

    Files of the set that the store has are taken from there, so a set is not made twice. While it is copied,
    the store has no index.json, which comes last. Returns the index.
    """
    root, folder, retries = url.rstrip("/"), staging(url), DataConfig.retries
    say(f"{root}: is made in {folder} and copied from there")
    stored = list_folder(root, retries)
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
        remove_file(stored_index, retries)

    missing = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if not file.is_file() or file.name[0] == "." or name.partition("/")[0] not in PARTS[1:]:
            continue
        # Equal indexes state equal sums, so a file of the same size is taken for the same.
        if not same or name not in stored or stored[name].size != file.stat().st_size:
            missing.append(name)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        [*pool.map(lambda name: upload_file(folder / name, f"{root}/{name}", retries), missing)]
    # The index comes last, once all files are there.
    if not same or missing:
        upload_file(index, stored_index, retries)
    say(f"{root}: {len(missing)} files copied")
    return description
