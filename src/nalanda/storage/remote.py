"""Files far away: in stores (s3://, gs://, az://, hf://) through fsspec, and of http(s), which are only read.

`open_url` tells the two apart. Each operation is tried a bounded number of times (retry.py). Credentials come
from the environment alone, as each store's own tools read them. URLs and servers' answers may hold a password
or a signature, so messages pass through `redact`.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nalanda.common.errors import DiskFull, InputError, no_room
from nalanda.common.text import digest, redact, scheme_of
from nalanda.storage.cache import cache
from nalanda.storage.http import Http
from nalanda.storage.retry import Incomplete, T, describe_error, persist

STORES = {
    "s3": ("s3fs", "s3", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    "gs": ("gcsfs", "gs", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("adlfs", "az", "AZURE_STORAGE_CONNECTION_STRING"),
    "abfs": ("adlfs", "az", "AZURE_STORAGE_CONNECTION_STRING"),
    "abfss": ("adlfs", "az", "AZURE_STORAGE_CONNECTION_STRING"),
    "hf": ("huggingface_hub", "", "HF_TOKEN"),
    "memory": ("fsspec", "", ""),
}
"""Schemes → package, the extra that installs it, and the variables that hold credentials."""

READ = ("file", "http", "https", *STORES)
"""Schemes that are read."""

WRITTEN = tuple(scheme for scheme in STORES if scheme != "hf")
"""Stores that are written: on the Hub every file would be a commit."""

AT_ONCE = 16
"""Files that a store is asked for, or given, at a time."""

OPTIONS: dict[str, dict[str, Any]] = {
    # Its own retries are silent, and `persist` has ours.
    "s3": {
        "config_kwargs": {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 60,
        }
    }
}
"""Arguments of fsspec's file systems."""


class RemoteFile(NamedTuple):
    """A file far away, as the listing of its store describes it. Of http(s) only the URL is known."""

    url: str
    size: int | None = None
    content: str = ""
    """What tells its content apart, such as `ETag:…` or `md5Hash:…`; "" if the store states nothing."""


# ------------------------------ URLs


def is_store(url: Any) -> bool:
    """Whether `url` is of a store, and neither a local path nor http(s)."""
    return isinstance(url, str) and scheme_of(url) in STORES


def check_source(url: str, key: str) -> None:
    """Raises `InputError` for a URL that no documents can be read from. key: the name that it begins with."""
    _check(url, key, READ, "cannot be read; there are")


def check_output(url: str, key: str) -> None:
    """Raises `InputError` for a URL that nothing can be written to. A local path passes."""
    _check(url, key, WRITTEN, "cannot be written; name a local folder or one of")
    if is_store(url):
        open_url(url)  # so that a missing package is named before the work


def _check(url: str, key: str, schemes: tuple[str, ...], fails: str) -> None:
    scheme = scheme_of(url)
    if scheme not in ("", "file", *schemes):
        names = ", ".join(f"{name}://" for name in schemes if name != "memory")
        raise InputError(f"{key}: {redact(url)}: {scheme}:// {fails} {names}")

    host = url.partition("://")[2].partition("/")[0]
    azure = scheme.startswith(("az", "abfs"))  # its hosts are CONTAINER@ACCOUNT
    if is_store(url) and "@" in host and not azure:
        names = STORES[scheme][2]
        raise InputError(f"{key}: {redact(url)}: a key does not belong in a URL; set {names}")


# ------------------------------ asking


def open_url(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises `InputError` if its package is missing."""
    if not is_store(url):
        return Http(), url
    import fsspec

    package, extra, _ = STORES[scheme_of(url)]
    try:
        # A listing kept in memory would hide files that came or went.
        return fsspec.url_to_fs(url, use_listings_cache=False, **OPTIONS.get(scheme_of(url), {}))
    except ImportError:
        install = f"nalanda[{extra}]" if extra else package
        raise InputError(f"{redact(url)}: needs {package}; pip install '{install}'") from None


def ask(
    do: Callable[[Any, str], T],
    url: str,
    retries: int,
    fails: str = "cannot be read",
    received: Callable[[], int] = lambda: 0,
) -> T:
    """`do(fs, path)`, tried again a bounded number of times. received: as in `persist`.

    Raises:
        SourceUnavailable: the server still fails.
        InputError: another try cannot help; the message is one line.
    """
    with one_line(url, fails):
        fs, path = open_url(url)
        return persist(lambda: do(fs, path), redact(url), retries, received)


@contextlib.contextmanager
def one_line(url: str, fails: str) -> Iterator[None]:
    """Turns errors of other libraries about `url` into `InputError` or `DiskFull`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the libraries of stores and the system share no base class
        file = getattr(error, "filename", None)
        if no_room(error):
            raise DiskFull(
                f"{redact(url)}: no space left in {file or cache()}; make room, and start again"
            ) from None
        why = describe_error(error)
        if not is_store(url):
            raise InputError(f"{redact(url)}: cannot be downloaded ({why})") from None
        if isinstance(error, FileNotFoundError):
            why = "it does not exist"
        # An error with a file's name is of this machine.
        elif "Credential" in type(error).__name__ or (
            isinstance(error, PermissionError) and not file
        ):
            why += f"; set {STORES[scheme_of(url)][2]} in the environment"
        raise InputError(f"{redact(url)}: {fails}: {why}") from None


# ------------------------------ reading


def file_at(url: str, retries: int) -> RemoteFile | None:
    """A file, or None for a folder. Raises `InputError` if there is neither. http(s) is not asked."""
    if not is_store(url):
        return RemoteFile(url)
    info = ask(lambda fs, path: fs.info(path), url, retries)
    return _describe_file(url, info) if info["type"] == "file" else None


def files_at(url: str, retries: int, *, pattern: bool = False) -> dict[str, RemoteFile]:
    """The files below a folder of a store, or those that match a pattern; {} if there are none.

    They are sorted by their names, which begin behind the folder, or behind the last one in front of a `*?[`.
    """
    url = url.rstrip("/")
    head = re.split(r"[*?[]", url)[0]
    root = head[: head.rindex("/") + 1] if pattern else f"{url}/"

    def find(fs: Any, path: str) -> list[tuple[str, dict]]:
        try:
            infos = (fs.glob if pattern else fs.find)(path, detail=True)
        except FileNotFoundError:
            if pattern:
                raise
            return []
        # The path may lack what the URL has in front, such as an account, but both end alike.
        below = len(path.rstrip("/")) - len(url) + len(root)
        return sorted((name[below:], info) for name, info in infos.items() if name[below:])

    return {
        name: _describe_file(root + name, info)
        for name, info in ask(find, url, retries)
        if info["type"] == "file"
    }


def _describe_file(url: str, info: dict) -> RemoteFile:
    names = ("ETag", "md5Hash", "crc32c", "etag", "blob_id")
    stated = next((name for name in names if info.get(name)), None)
    content = f"{stated}:{info[stated]}".replace('"', "") if stated else ""
    return RemoteFile(url, info["size"], content)


def read_bytes(url: str, retries: int, missing: bytes | None = None) -> bytes:
    """The content of a file; `missing`, if given, where a store has none."""

    def read(fs: Any, path: str) -> bytes:
        try:
            return fs.cat_file(path)
        except FileNotFoundError:
            if missing is None:
                raise
            return missing

    return ask(read, url, retries)


def download(remote: RemoteFile, file: Path, retries: int) -> None:
    """Downloads a file, which appears once it is complete.

    A download of http(s) is resumed where it stopped. A try that brought new bytes begins the count anew.
    """
    url, size = remote.url, remote.size
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")

    def get(fs: Any, path: str) -> None:
        fs.get_file(path, str(partial))
        # A transfer that was cut short must not pass for the whole file.
        came = partial.stat().st_size
        if size is not None and came != size:
            raise Incomplete(f"{came} of {size} bytes came")

    def kept() -> int:
        return partial.stat().st_size if not is_store(url) and partial.exists() else 0

    try:
        ask(get, url, retries, "cannot be downloaded", kept)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def copy_here(url: str, folder: Path, retries: int) -> Path:
    """Downloads a file of a store, or a folder with its files, into `folder`. Returns its path there."""
    path = folder / posixpath.basename(url.rstrip("/"))
    file = file_at(url, retries)
    for name, remote in ({"": file} if file else files_at(url, retries)).items():
        download(remote, path / name, retries)
    return path


# ------------------------------ writing


def staging(output: str) -> Path:
    """The local folder in which the files of an output folder are made: this itself, unless it is in a store."""
    if not is_store(output):
        return Path(output)
    root = output.rstrip("/")
    return cache() / "output" / f"{digest(root)}-{posixpath.basename(root)}"


def upload(file: Path, url: str, retries: int) -> None:
    """Uploads a file. A store shows it once it is whole."""
    ask(lambda fs, path: fs.put_file(str(file), path), url, retries, "cannot be written")


def remove(url: str, retries: int) -> None:
    """Removes a file, or a folder with its files, if it is there."""

    def remove_all(fs: Any, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            fs.rm(path, recursive=True)

    ask(remove_all, url, retries, "cannot be removed")
