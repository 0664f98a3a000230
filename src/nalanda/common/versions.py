"""Versions of the code that made a result, and the processor's name, for its record."""

from __future__ import annotations

import functools
import json
import platform
import re
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


def cpu_model() -> str:
    """The processor's name."""
    file = Path("/proc/cpuinfo")
    line = re.search(r"model name\s*: (.*)", file.read_text()) if file.is_file() else None
    return line[1] if line else platform.processor() or platform.machine()


def kernel_packages() -> dict[str, str]:
    """The version of each package that brings kernels for GPUs; of one that is not there, `not installed`."""
    packages = {"triton": "triton", "fla": "flash-linear-attention", "flash_qla": "flash-qla"}
    versions = {}
    for backend, package in packages.items():
        try:
            versions[backend] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[backend] = "not installed"
    return versions


def list_versions(records: Iterable[dict[str, str]]) -> str:
    """Lists the versions of several results: `python 3.11.7, torch 2.12.0 and 2.13.0`."""
    by_name: dict[str, dict[str, None]] = {}  # keeps the order
    for record in records:
        for name, version in record.items():
            by_name.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(each)}" for name, each in by_name.items())


@functools.cache
def _nalanda_version() -> str:
    """`0.1.0`, with the commit of a checkout or of pip's clone behind it, `0.1.0+g5c1f2e03a`, where it is known.

    `.dirty` follows if files of a checkout were changed.
    """
    version = sys.modules["nalanda"].__version__  # without metadata, where it is not installed
    root = Path(__file__).parents[3]
    commit = _commit_of_checkout(root) if (root / ".git").exists() else _commit_of_install()
    return f"{version}+g{commit}" if commit else version


def _commit_of_checkout(root: Path) -> str:
    describe = ["describe", "--always", "--exclude=*", "--abbrev=9", "--dirty=.dirty"]
    try:
        git = subprocess.run(
            ["git", "-C", str(root), *describe],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a repository of another user
        return ""
    return git.stdout.strip()


def _commit_of_install() -> str:
    """That of `pip install git+URL`, which pip records."""
    try:
        record = metadata.distribution("nalanda").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    return json.loads(record or "{}").get("vcs_info", {}).get("commit_id", "")[:9]
