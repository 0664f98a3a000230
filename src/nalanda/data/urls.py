"""Documents that have a URL: a file, folder or pattern of a store, a shard of http(s), a list of any of them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

from nalanda.common.errors import InputError
from nalanda.common.text import digest, is_url, redact
from nalanda.config.schema import DataConfig
from nalanda.data.documents import (
    EMPTY,
    NAMES,
    Document,
    Fields,
    FileShard,
    Left,
    Shard,
    files_of,
    is_single,
    split_of,
    suffix_of,
)
from nalanda.data.readers import documents_among, refuse_two_kinds, suffixes
from nalanda.data.token_set import refuse_token_set
from nalanda.storage.cache import cached
from nalanda.storage.remote import (
    AT_ONCE,
    RemoteFile,
    ask,
    download,
    file_at,
    files_at,
    is_store,
    one_line,
)

LISTS = (".urls", ".list")
"""Suffixes of a text file with one URL a line."""

RESTORE = "restore it, or start a new run from the checkpoint's weights with model.init_from"
"""What to do about a file that is another one now."""

_SECRET = re.compile(
    r"x-(amz|goog)-.*|sig|signature|(access_|auth_|id_)?token|secret|password|credentials?|expires|policy"
    r"|(api|access|secret)[-_]?key|key-pair-id|awsaccesskeyid|googleaccessid",
    re.I,
)
"""Names of a query's parts that sign it."""

_SHARED_ACCESS = re.compile(r"s[a-z]|srt|skoid|sktid|spr|sip", re.I)
"""The same in Azure's links, which have a `sig`."""


def path_of(url: str) -> str:
    """A URL without its query. In a store, ? and # belong to the path."""
    return url if is_store(url) else urlsplit(url).path


def is_list(url: str) -> bool:
    """Whether a URL is that of a list of URLs."""
    return path_of(url).endswith(LISTS)


def identity_of(url: str) -> str:
    """The URL without password and signature. It stays the same when a link is signed anew."""
    if is_store(url):
        return redact(url)
    parts, query = urlsplit(url), parse_qsl(urlsplit(url).query)
    azure = any(key.lower() == "sig" for key, _ in query)
    # The parts of the query that sign nothing, in a fixed order.
    lasting = []
    for key, value in sorted(query):
        if not (_SECRET.fullmatch(key) or (azure and _SHARED_ACCESS.fullmatch(key))):
            lasting.append((key, value))
    suffix = f"?{digest(repr(lasting))}" if lasting else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{suffix}"


def name_of_source(source: str | list[str]) -> str:
    """The source in messages."""
    return redact(source if isinstance(source, str) else f"{source[0]} and others")


# ------------------------------ shards


@dataclass(frozen=True)
class RemoteShard:
    """A file with a URL, downloaded as a whole, then read.

    A file of a store has the name, the size and the cursor (rows read) of a local one in the same place, so a
    corpus may move between the two. A shard of http(s) has no size, since asking a server for ten thousand
    sizes delays the start too long. Its cursor is [bytes, rows read], so that a resume inside it is checked.
    """

    file: RemoteFile = field(repr=False)
    name: str
    """Its path in the source's folder, or its URL, without password and signature."""
    fields: Fields = field(repr=False)
    retries: int = 8

    @property
    def url(self) -> str:
        return self.file.url

    @property
    def size(self) -> int | None:
        return self.file.size

    @property
    def single(self) -> bool:
        return is_single(path_of(self.url))

    def read(self, cursor: Any) -> Iterator[tuple[Document | Left, Any]]:
        with one_line(self.url, "cannot be downloaded"):
            path = cached(self._key(), path_of(self.url).rpartition("/")[2], self._download)

        size, start = path.stat().st_size, cursor
        if cursor and self.size is None:
            before, start = cursor
            if size != before:
                raise InputError(
                    f"{self.name}: {size} bytes, and {before} when the run stopped in it; {RESTORE}"
                )
        try:
            for document, row in FileShard(path, self.name, self.fields).read(start):
                yield document, [size, row] if self.size is None else row
        except InputError as error:
            path.unlink(missing_ok=True)  # so that a repaired one is downloaded
            message = str(error).replace(str(path), identity_of(self.url))
            raise type(error)(message) from None  # the type decides the exit code

    def _key(self) -> str:
        """The key of the copy in the cache. It never changes: copies on disks are found by it."""
        if self.size is None:
            return self.name
        return f"StoreFile(url={self.url!r}, size={self.size!r}, content={self.file.content!r})"

    def _download(self, path: Path) -> None:
        if file_at(self.url, self.retries) != self.file:
            raise InputError(f"{redact(self.url)}: changed while in use; {RESTORE}")
        download(self.file, path, self.retries)


# ------------------------------ sources


Files = dict[str, RemoteFile]
"""Files of a source by `RemoteShard.name`. Of one whose store was not asked the URL alone is known."""


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
    splits, counts = _list_splits(source, data.retries)
    files = files_of(splits, split)
    if not files:
        raise InputError(
            f"{name_of_source(source)}: no shard for {split}; add some, or name another source"
        )

    if isinstance(source, list):  # each was named, so each must be read
        others = [] if data.validation_source else ["train", "validation"]
        read = {*files, *(name for each in others for name in files_of(splits, each))}
        for name, file in itertools.chain(*(each.items() for each in splits.values())):
            if name not in read:
                raise InputError(
                    f"{redact(file.url)}: by its name and those of the other URLs neither a training nor a "
                    "validation shard, so it would not be read; leave it out, or list it apart as "
                    "data.validation_source"
                )

    fields = Fields.of(data)

    def shard_of(name: str) -> Shard:
        listed = files[name]
        file = file_at(listed.url, data.retries) if listed.size is None else listed
        if file is None:
            raise InputError(
                f"{redact(listed.url)}: a folder; name it alone as data.source, or name its files"
            )
        return RemoteShard(file, name, fields, data.retries)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(shard_of, files)], counts


def _list_splits(source: str | list[str], retries: int) -> tuple[dict[str, Files], Counter[str]]:
    """A source's files by split, and `Corpus.counts`."""
    counts: Counter[str] = Counter()
    splits: dict[str, Files] = {split: {} for split in (*NAMES, "")}
    # Lists, http(s) or several URLs: the innermost folder or else the name tells the split of each, unless
    # it is alone.
    if not isinstance(source, str) or not is_store(source) or is_list(source):
        files = _list_urls(source, retries)
        for name, file in files.items():
            *folders, last = path_of(file.url).split("/")
            splits[split_of(reversed(folders), last) if len(files) > 1 else ""][name] = file
    # A pattern or a file that was named is read, whatever its folders are called.
    elif has_magic(source):
        splits[""] = _by_url(files_at(source, retries, pattern=True).values())
    elif not source.endswith("/") and (file := file_at(source, retries)):
        splits[""] = _by_url([file])
    else:
        _list_folder(source, retries, splits, counts)
    counts.update({split: len(files) for split, files in splits.items()})
    if not any(splits.values()):
        raise InputError(
            f"{name_of_source(source)}: no documents; files may end in {', '.join(suffixes())}"
        )
    return splits, counts


def _by_url(files: Iterable[RemoteFile]) -> Files:
    """Files of a store by their URLs. Raises `InputError` for one without a reader."""
    for file in files:
        if not suffix_of(file.url):
            raise InputError(
                f"{redact(file.url)}: no reader for this suffix; files may end in {', '.join(suffixes())}"
            )
    return {file.url: file for file in files}


def _list_folder(source: str, retries: int, splits: dict[str, Files], counts: Counter[str]) -> None:
    """Adds a folder's files to their splits, as of a local one: the outermost folder that names one decides."""
    files = files_at(source, retries)
    if "index.json" in files and any(name.endswith(".tokens") for name in files):
        refuse_token_set(redact(source.rstrip("/")))
    if not files:
        raise InputError(f"{redact(source)}: it does not exist, or has no file")

    # As in a local folder: no hidden names, and no files without documents or content.
    visible = {name: file for name, file in files.items() if "/." not in f"/{name}"}
    for name, file in documents_among(visible, counts).items():
        *folders, last = name.split("/")
        if not file.size and not is_single(last):
            counts[EMPTY] += 1
        else:
            splits[split_of(folders, last)][name] = file
    refuse_two_kinds(redact(source), itertools.chain(*splits.values()))


def _list_urls(source: str | list[str], retries: int) -> Files:
    """The files of URLs in order. Those in a list may be relative to it; a folder or pattern of a store is
    replaced by its files."""
    urls: list[str] = []
    for url in [source] if isinstance(source, str) else source:
        if "***" in url:
            raise InputError(
                f"{redact(url)}: the password or query was never stored; give data.source as it was"
            )
        lines = [url]
        if is_list(url):
            lines = ask(lambda fs, path: fs.cat_file(path).decode(), url, retries).splitlines()
        for line in map(str.strip, lines):
            if line and line[0] != "#":
                urls.append(_join_url(url, line))

    # What a list names may itself be a folder or a pattern of a store.
    files = [file for url in urls for file in _files_of_url(url, retries)]
    if not files:
        raise InputError(f"{name_of_source(source)}: lists no shard; give one URL a line")
    _check_urls([file.url for file in files])
    return {file.url if is_store(file.url) else identity_of(file.url): file for file in files}


def _join_url(beside: str, line: str) -> str:
    if is_url(line) or line.startswith("/") or not is_store(beside):
        return urljoin(beside, line)
    return f"{beside.rpartition('/')[0]}/{line}"


def _files_of_url(url: str, retries: int) -> list[RemoteFile]:
    pattern = has_magic(url)
    if not is_store(url) or (not pattern and (suffix_of(url) or file_at(url, retries))):
        return [RemoteFile(url)]
    files = files_at(url, retries, pattern=pattern)
    return [file for name, file in files.items() if pattern or suffix_of(name)]


def _check_urls(urls: list[str]) -> None:
    """Raises `InputError` for a URL that cannot be read, or one that is listed twice."""
    by_identity: dict[str, str] = {}
    for url in urls:
        if not is_url(url):
            raise InputError(
                f"{url}: not a URL; a list has URLs only; for files give a directory or a glob"
            )
        if not suffix_of(path_of(url)):
            kinds = ", ".join((*suffixes(), *LISTS))
            raise InputError(
                f"{redact(url)}: not the URL of a file that can be read; it may end in {kinds}"
            )
        identity = identity_of(url)
        if identity in by_identity:
            how = "another URL differs from it only in a password or signature"
            if by_identity[identity] == url:
                how = "listed twice"
            raise InputError(f"{redact(url)}: {how}; name a file once")
        by_identity[identity] = url
