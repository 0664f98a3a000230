"""Shards of http(s) URLs, and what fsspec lacks for them: resumed downloads, and links without their secrets.

A shard is downloaded as a whole, kept in a small cache, then read as a file. A download that fails is resumed
a bounded number of times. URLs and servers' answers may hold a password or a signature, so messages pass
through `redact`.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

from nalanda.common.errors import InputError
from nalanda.common.retry import Incomplete, Patience, persist
from nalanda.common.stores import (
    cache,
    file_at,
    has_magic,
    is_store,
    list_folder,
    match,
    reachable,
    read_bytes,
)
from nalanda.common.text import is_url, redact
from nalanda.data.documents import (
    NAMES,
    Document,
    Fields,
    FileShard,
    Left,
    digest,
    is_single,
    split_of,
    suffix_of,
    suffixes,
)

FAILS = "cannot be downloaded"

LISTS = (".urls", ".list")
"""Suffixes of a text file with one URL a line."""

TIMEOUT = (10.0, 60.0)
"""Seconds to connect, and seconds without a byte after which a download has failed."""

CACHED_SHARDS = 16
"""Downloaded shards that stay on disk; the next download removes the least recently used."""

STALE = 3600.0
"""Seconds after which a partial download belongs to a killed process."""

_SECRET = re.compile(
    r"x-(amz|goog)-.*|sig|signature|(access_|auth_|id_)?token|secret|password|credentials?|expires|policy"
    r"|(api|access|secret)[-_]?key|key-pair-id|awsaccesskeyid|googleaccessid",
    re.I,
)
"""Names of a query's parts that sign it."""

_SHARED_ACCESS = re.compile(r"s[a-z]|srt|skoid|sktid|spr|sip", re.I)
"""The same in Azure's links, which have a `sig`."""

_CACHED = re.compile(r"\.?[0-9a-f]{16}-")
"""Beginning of the names that the cache gives."""


def list_urls(source: str | list[str], retries: int) -> list[str]:
    """The shards' URLs in order. Those in a list may be relative to it; a folder or pattern of a store is
    replaced by its files."""
    named: list[str] = []
    for url in [source] if isinstance(source, str) else source:
        if "***" in url:
            raise InputError(
                f"{redact(url)}: the password or query was never stored; give data.source as it was"
            )
        lines = _fetch_text(url, retries).splitlines() if is_list(url) else [url]
        named += [
            _join_url(url, line.strip())
            for line in lines
            if line.strip() and line.strip()[0] != "#"
        ]

    # What a list names may itself be a folder or a pattern of a store.
    urls: list[str] = []
    for url in named:
        urls += _files_at(url, retries) if is_store(url) else [url]
    if not urls:
        raise InputError(f"{name_of(source)}: lists no shard; give one URL a line")
    _check_urls(urls)
    return urls


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


def is_list(url: str) -> bool:
    """Whether a URL is that of a list of URLs."""
    return path_of(url).endswith(LISTS)


def path_of(url: str) -> str:
    """A URL without its query. In a store, ? and # belong to the path."""
    return url if is_store(url) else urlsplit(url).path


def _join_url(beside: str, line: str) -> str:
    if is_url(line) or line.startswith("/") or not is_store(beside):
        return urljoin(beside, line)
    return f"{beside.rpartition('/')[0]}/{line}"


def _files_at(url: str, retries: int) -> list[str]:
    """The URLs of the files that a URL of a store names."""
    if has_magic(url):
        return [stored.url for stored in match(url, retries)]
    if suffix_of(url) or file_at(url, retries):
        return [url]
    return [stored.url for name, stored in list_folder(url, retries).items() if suffix_of(name)]


def split_urls(urls: list[str]) -> dict[str, list[str]]:
    """URLs by the split that the innermost folder or else the file's name tells, "" for none. A lone URL has
    none, since nothing is beside it."""
    splits: dict[str, list[str]] = {split: [] for split in (*NAMES, "")}
    for url in urls:
        *folders, file = path_of(url).split("/")
        split = split_of(reversed(folders), file) if len(urls) > 1 else ""
        splits[split].append(url)
    return splits


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


def name_of(source: str | list[str]) -> str:
    """The source in messages."""
    return redact(source if isinstance(source, str) else f"{source[0]} and others")


def _fetch_text(url: str, retries: int) -> str:
    if is_store(url):
        return read_bytes(url, retries).decode()
    import requests

    def get() -> str:
        reply = requests.get(url, timeout=TIMEOUT)
        reply.raise_for_status()
        return reply.content.decode()

    return reachable(lambda: persist(get, redact(url), retries), url, FAILS)


@dataclass(frozen=True)
class UrlShard:
    """A shard that is downloaded as a whole, then read. The cursor is its size and the rows read.

    The identity has no size, since asking a server for the sizes of ten thousand shards delays the start too
    long. The size is checked when reading resumes inside the shard.
    """

    url: str = field(repr=False)
    fields: Fields
    retries: int = 8

    @property
    def identity(self) -> str:
        return identity_of(self.url)

    @property
    def single(self) -> bool:
        return is_single(urlsplit(self.url).path)

    def read(self, cursor: list[int] | None) -> Iterator[tuple[Document | Left, list[int]]]:
        name = urlsplit(self.url).path.rpartition("/")[2]

        def fetch(file: Path) -> None:
            download(self.url, file, self.retries)

        path = reachable(lambda: cached(self.identity, name, fetch), self.url, FAILS)
        size = path.stat().st_size
        if cursor and cursor[0] != size:
            raise InputError(
                f"{self.identity}: {size} bytes, and {cursor[0]} when the run stopped in it; "
                "restore it, or start a new run from the checkpoint's weights with model.init_from"
            )
        file = FileShard(path, self.identity, self.fields)
        for document, row in read_copy(file, self.identity, cursor[1] if cursor else None):
            yield document, [size, row]


def read_copy(
    file: FileShard, location: str, row: int | None
) -> Iterator[tuple[Document | Left, int]]:
    """Reads a downloaded file on behind `row`. Its errors name `location`, where it came from."""
    try:
        yield from file.read(row)
    except InputError as error:
        file.path.unlink(missing_ok=True)  # so that a repaired one is downloaded
        raise InputError(str(error).replace(str(file.path), location)) from None


def cached(identity: str, name: str, get: Callable[[Path], None]) -> Path:
    """The shard's file in the cache, which `get` downloads in one of the processes that ask for it."""
    from filelock import FileLock

    folder = cache()
    path = folder / f"{digest(identity)}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    # One process downloads; the others wait, and then find the file.
    with FileLock(f"{path}.lock"):
        if not path.exists():
            get(path)
            _prune_cache(folder, path)
        # The time of the last use, by which the cache is pruned.
        os.utime(path)
    return path


def _prune_cache(folder: Path, newest: Path) -> None:
    # A process that reads a removed file has it open and is not disturbed.
    ages = {}
    for path in folder.iterdir():
        if path != newest and _CACHED.match(path.name):
            ages[path] = _age_of(path)
    shards = [path for path in ages if suffix_of(path.name) and path.name[0] != "."]
    oldest = sorted(shards, key=ages.__getitem__)[CACHED_SHARDS - 1 :]
    stale = [path for path in ages if path.name.endswith(".partial") and ages[path] > STALE]
    for path in [*oldest, *stale]:
        path.unlink(missing_ok=True)


def _age_of(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # another process removed it
        return 0.0


def download(url: str, path: Path, retries: int) -> None:
    """Downloads `url` to `path`, which appears once its length and the server's checksum, if any, agree.

    After a failure it resumes where it stopped, if the server supports that.

    Raises:
        SourceUnavailable: after `retries` tries in a row without a new byte.
        Exception: of requests, urllib3 or the system, if another try cannot help.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    patience, validator, furthest = Patience(redact(url), retries), "", 0

    def receive() -> None:
        import requests

        nonlocal validator
        # What came before is continued only where a validator shows that the file is the same.
        start = partial.stat().st_size if validator and partial.exists() else 0
        headers = {"Accept-Encoding": "identity"}
        if start:  # the server sends all if the file is another one now
            headers |= {"Range": f"bytes={start}-", "If-Range": validator}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as reply:
            if reply.status_code == 416:
                validator = ""
                raise Incomplete("the server cannot resume the download")
            reply.raise_for_status()
            # Any other answer has the whole file, which replaces what came before.
            if reply.status_code != 206:
                start = 0
            elif not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                validator = ""
                raise Incomplete("the server resumed at another byte")
            # A weak ETag, W/"…", does not promise the same bytes.
            etag = reply.headers.get("ETag", "")
            validator = etag if etag[:1] == '"' else reply.headers.get("Last-Modified", "")
            with partial.open("ab" if start else "wb") as file:
                # Small chunks, since a stall loses one; stored bytes, so that .gz stays .gz.
                for chunk in reply.raw.stream(1 << 16, decode_content=False):
                    file.write(chunk)
                size, length = file.tell(), reply.headers.get("Content-Length")
            # Content-Length counts what this answer sends.
            if length and size != start + int(length):
                raise Incomplete(f"{size} of {start + int(length)} bytes came")
            # A wrong sum does not tell which byte is wrong, so the next try begins anew.
            if checksum := _stated_checksum(reply.headers):
                kind, stated = checksum
                with partial.open("rb") as file:
                    digest = hashlib.file_digest(file, kind).hexdigest()
                if digest != stated:
                    validator = ""
                    raise Incomplete(f"the bytes do not have the server's {kind}")

    try:
        while True:
            try:
                receive()
                break
            except Exception as error:
                size = partial.stat().st_size if partial.exists() else 0
                if size > furthest:
                    patience.failures, furthest = 0, size
                patience.failed(error)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _stated_checksum(headers: Any) -> tuple[str, str] | None:
    """(algorithm, hexadecimal digest) of the whole file, if the server states them."""
    for kind in ("sha256", "md5"):
        if value := headers.get(f"x-checksum-{kind}"):
            return kind, value.lower()
    # Other servers' ETags look the same and are hashes of other things.
    etag = "x-amz-request-id" in headers and re.fullmatch(
        r'"([0-9a-f]{32})"', headers.get("ETag", "")
    )
    encrypted = "kms" in headers.get("x-amz-server-side-encryption", "") or any(
        "server-side-encryption-customer" in name.lower() for name in headers
    )  # S3's ETag is then not the MD5 of the content
    return ("md5", etag[1]) if etag and not encrypted else None
