"""Versions of the code that made a result, for its record."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Of Python, Nalanda, the libraries that every result depends on, and of further `packages`."""
    names = ("torch", "transformers", "accelerate", *packages)
    return {
        "python": platform.python_version(),
        "nalanda": _own(),
        **{name: metadata.version(name) for name in names},
    }


def list_versions(records: Iterable[dict[str, str]]) -> str:
    """Those of several results: `python 3.11.7, torch 2.12.0 and 2.13.0`."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for name, version in record.items():
            found.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(each)}" for name, each in found.items())


@functools.cache
def _own() -> str:
    """`0.1.0`; in a checkout with its commit, `0.1.0+g5c1f2e03a`, and with `.dirty` if files were changed."""
    version, root = metadata.version("nalanda"), Path(__file__).parents[3]
    if not (root / ".git").exists():
        return version
    try:
        describe = ["describe", "--always", "--exclude=*", "--abbrev=9", "--dirty=.dirty"]
        found = subprocess.run(
            ["git", "-C", str(root), *describe],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a repository of another user
        return version
    return f"{version}+g{found.stdout.strip()}"
