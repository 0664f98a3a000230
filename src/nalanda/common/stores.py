"""Files of stores (s3://, gs://, az://, hf://) through fsspec: listing them, and copying them here and there.

Credentials come from the environment alone, as each store's own tools read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nalanda.common.errors import DiskFull, InputError, no_room
from nalanda.common.retry import Incomplete, T, describe_error, persist
from nalanda.common.text import redact, scheme_of

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


class StoreFile(NamedTuple):
    """A file of a store."""

    url: str
    size: int
    content: str = ""
    """What tells its content apart, such as `ETag:…` or `md5Hash:…`; "" if the store states nothing."""


def is_store(url: Any) -> bool:
    """Whether `url` is of a store, and neither a local path nor http(s)."""
    return isinstance(url, str) and scheme_of(url) in STORES


def check_source(url: str, key: str) -> None:
    """Raises `InputError` for a URL that no documents can be read from. key: the name that it begins with."""
    scheme = scheme_of(url)
    if scheme and scheme not in READ:
        raise InputError(
            f"{key}: {redact(url)}: {scheme}:// cannot be read; there are {_list_schemes(READ)}"
        )
    if is_store(url):
        _check_no_secret(url, key)


def check_output(url: str, key: str) -> None:
    """Raises `InputError` for a URL that nothing can be written to. A local path passes."""
    scheme = scheme_of(url)
    if scheme and scheme not in (*WRITTEN, "file"):
        raise InputError(
            f"{key}: {redact(url)}: {scheme}:// cannot be written; name a local folder or one of "
            f"{_list_schemes(WRITTEN)}"
        )
    if is_store(url):
        _check_no_secret(url, key)
        open_store(url)  # so that a missing package is named before the work


def _list_schemes(schemes: tuple[str, ...]) -> str:
    return ", ".join(f"{name}://" for name in schemes if name != "memory")


def _check_no_secret(url: str, key: str) -> None:
    host = url.partition("://")[2].partition("/")[0]
    azure = scheme_of(url).startswith(("az", "abfs"))  # its hosts are CONTAINER@ACCOUNT
    if "@" in host and not azure:
        names = STORES[scheme_of(url)][2]
        raise InputError(f"{key}: {redact(url)}: a key does not belong in a URL; set {names}")


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises `InputError` if its package is missing."""
    import fsspec

    package, extra, _ = STORES[scheme_of(url)]
    try:
        # A listing kept in memory would hide files that came or went.
        return fsspec.url_to_fs(url, use_listings_cache=False, **OPTIONS.get(scheme_of(url), {}))
    except ImportError:
        install = f"nalanda[{extra}]" if extra else package
        raise InputError(f"{redact(url)}: needs {package}; pip install '{install}'") from None


def reachable(do: Callable[[], T], url: str, fails: str = "cannot be read") -> T:
    """`do()`, with errors of other libraries about `url` turned into `InputError` or `DiskFull`."""
    try:
        return do()
    except InputError:
        raise
    except Exception as error:  # the libraries of stores and the system share no base class
        if no_room(error):
            folder = getattr(error, "filename", None) or cache()
            raise DiskFull(
                f"{redact(url)}: no space left in {folder}; make room, and start again"
            ) from None
        why = describe_error(error)
        if not is_store(url):
            raise InputError(f"{redact(url)}: {fails} ({why})") from None
        if isinstance(error, FileNotFoundError):
            why = "it does not exist"
        elif isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            why += f"; set {STORES[scheme_of(url)][2]} in the environment"
        raise InputError(f"{redact(url)}: {fails}: {why}") from None


def ask(do: Callable[[Any, str], T], url: str, retries: int, fails: str = "cannot be read") -> T:
    """`do(fs, path)`, tried again a bounded number of times.

    Raises:
        SourceUnavailable: the store still fails.
        InputError: another try cannot help; the message is one line.
    """

    def try_again() -> T:
        return persist(lambda: do(*open_store(url)), redact(url), retries)

    return reachable(try_again, url, fails)


# ------------------------------ looking


def file_at(url: str, retries: int) -> StoreFile | None:
    """A file, or None for a folder. Raises `InputError` if there is neither."""
    info = ask(lambda fs, path: fs.info(path), url, retries)
    return _describe_file(url, info) if info["type"] == "file" else None


def exists(url: str, retries: int) -> bool:
    """Whether there is a file. (fsspec's own `exists` takes a dead server for a missing file.)"""

    def is_file(fs: Any, path: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return fs.info(path)["type"] == "file"
        return False

    return ask(is_file, url, retries)


def list_folder(url: str, retries: int) -> dict[str, StoreFile]:
    """The files below a folder by name, sorted; {} if it does not exist."""

    def find(fs: Any, path: str) -> list[tuple[str, dict]]:
        try:
            infos = fs.find(path, detail=True)
        except FileNotFoundError:
            return []
        below = len(path.rstrip("/")) + 1
        return sorted((name[below:], info) for name, info in infos.items() if name[below:])

    root, files = url.rstrip("/"), {}
    for name, info in ask(find, url, retries):
        if info["type"] == "file":
            files[name] = _describe_file(f"{root}/{name}", info)
    return files


def match(url: str, retries: int) -> list[StoreFile]:
    """The files that a pattern names, sorted."""
    beginning = url[: url.index("://") + 3]

    def glob(fs: Any, path: str) -> list[tuple[str, Any]]:
        # The path may lack what the URL has before it, such as an account.
        lead = url.removeprefix(beginning).removesuffix(path)
        return [
            (beginning + lead + name.lstrip("/"), info)
            for name, info in fs.glob(path, detail=True).items()
        ]

    return [
        _describe_file(name, info)
        for name, info in sorted(ask(glob, url, retries))
        if info["type"] == "file"
    ]


def has_magic(url: str) -> bool:
    """Whether the URL of a store is a pattern."""
    return any(sign in url for sign in "*?[")


def _describe_file(url: str, info: dict) -> StoreFile:
    names = ("ETag", "md5Hash", "crc32c", "etag", "blob_id")
    stated = next((name for name in names if info.get(name)), None)
    content = f"{stated}:{info[stated]}".replace('"', "") if stated else ""
    return StoreFile(url, info["size"], content)


def read_bytes(url: str, retries: int) -> bytes:
    return ask(lambda fs, path: fs.cat_file(path), url, retries)


# ------------------------------ copying


def cache() -> Path:
    """The folder of what was downloaded (`NALANDA_CACHE`)."""
    return Path(os.environ.get("NALANDA_CACHE") or "~/.cache/nalanda/shards").expanduser()


def staging(url: str) -> Path:
    """The local folder in which the files of an output folder are made."""
    digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    return cache() / "output" / f"{digest}-{posixpath.basename(url.rstrip('/'))}"


def download_file(stored: StoreFile, file: Path, retries: int) -> None:
    """Downloads a file. It appears once it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")

    def get(fs: Any, path: str) -> None:
        fs.get_file(path, str(partial))
        # A transfer that was cut short must not pass for the whole file.
        size = partial.stat().st_size
        if size != stored.size:
            raise Incomplete(f"{size} of {stored.size} bytes came")

    try:
        ask(get, stored.url, retries, "cannot be downloaded")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def upload_file(file: Path, url: str, retries: int) -> None:
    """Uploads a file. A store shows it once it is whole."""
    ask(lambda fs, path: fs.put_file(str(file), path), url, retries, "cannot be written")


def remove_file(url: str, retries: int) -> None:
    """Removes a file, if it is there."""
    ask(_remove_all, url, retries, "cannot be removed")


def remove_folder(url: str, first: str, retries: int) -> None:
    """Removes a folder, and before all else its file `first`."""
    remove_file(f"{url}/{first}", retries)
    ask(_remove_all, url, retries, "cannot be removed")


def _remove_all(fs: Any, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        fs.rm(path, recursive=True)
