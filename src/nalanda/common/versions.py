"""Versions of the code that made a result, for its record."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, Nalanda, the libraries that every result depends on, and further `packages`."""
    names = ("torch", "transformers", "accelerate", *packages)
    return {
        "python": platform.python_version(),
        "nalanda": _nalanda_version(),
        **{name: metadata.version(name) for name in names},
    }


def list_versions(records: Iterable[dict[str, str]]) -> str:
    """Lists the versions of several results: `python 3.11.7, torch 2.12.0 and 2.13.0`."""
    by_name: dict[str, dict[str, None]] = {}  # keeps the order
    for record in records:
        for name, version in record.items():
            by_name.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(each)}" for name, each in by_name.items())


@functools.cache
def _nalanda_version() -> str:
    """`0.1.0`; in a checkout with its commit, `0.1.0+g5c1f2e03a`, and with `.dirty` if files were changed."""
    version = sys.modules["nalanda"].__version__  # without metadata, where it is not installed
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return version
    try:
        describe = ["describe", "--always", "--exclude=*", "--abbrev=9", "--dirty=.dirty"]
        git = subprocess.run(
            ["git", "-C", str(root), *describe],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a repository of another user
        return version
    return f"{version}+g{git.stdout.strip()}"
