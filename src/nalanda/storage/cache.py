"""Copies on this disk of files far away."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from nalanda.common.text import digest

CACHED_FILES = 16
"""Downloaded files that stay on disk; the next download removes the least recently used."""

STALE = 3600.0
"""Seconds after which a partial download belongs to a killed process."""

_CACHED = re.compile(r"\.?[0-9a-f]{16}-")
"""Beginning of the names that `cached` gives."""


def cache() -> Path:
    """The folder of all copies (`NALANDA_CACHE`)."""
    return Path(os.environ.get("NALANDA_CACHE") or "~/.cache/nalanda/shards").expanduser()


def cached(identity: str, name: str, get: Callable[[Path], None]) -> Path:
    """A file of the cache, which `get` downloads in one of the processes that ask for it."""
    from filelock import FileLock

    folder = cache()
    path = folder / f"{digest(identity)}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    # One process downloads; the others wait, and then find the file.
    with FileLock(f"{path}.lock"):
        if not path.exists():
            get(path)
            _prune(folder, path)
        # The time of the last use, by which the cache is pruned.
        os.utime(path)
    return path


def _prune(folder: Path, newest: Path) -> None:
    # A process that reads a removed file has it open and is not disturbed.
    used = {}
    for path in folder.iterdir():
        if path != newest and _CACHED.match(path.name) and path.suffix != ".lock":
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                used[path] = path.stat().st_mtime
    partial = [path for path in used if path.suffix == ".partial"]
    stale = [path for path in partial if used[path] < time.time() - STALE]
    newest_first = sorted(used.keys() - set(partial), key=used.__getitem__, reverse=True)
    for path in [*newest_first[CACHED_FILES - 1 :], *stale]:
        path.unlink(missing_ok=True)
