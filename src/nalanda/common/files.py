"""Atomic, synced writes, and manifests with SHA-256 sums."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def verify_manifest(path: Path) -> str | None:
    """One line on what is wrong with a folder that has a manifest, or None."""
    try:
        return _problem_of(path)
    except OSError as error:  # such as a file in place of the folder, or a disk that cannot be read
        name = os.path.relpath(error.filename, path) if error.filename else path.name
        return f"{name}: {error.strerror or type(error).__name__}"


def _problem_of(path: Path) -> str | None:
    try:
        text = (path / "manifest.json").read_text()
        manifest = json.loads(text)
        if manifest.get("format") != 1 and text != manifest_text(manifest):  # format 1 had no sum
            return "manifest.json does not have the bytes that were written"
        files = {
            str(name): (entry["bytes"], entry["sha256"])
            for name, entry in manifest["files"].items()
        }
    except FileNotFoundError:
        return "no manifest.json"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is unreadable"
    for name, (size, _) in files.items():
        file = path / name
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or any(
            p.is_symlink() for p in (file, *file.parents[: len(Path(name).parts) - 1])
        ):
            return f"{name} leaves the checkpoint's folder"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    for file in path.rglob(
        "*"
    ):  # files that loading would read although the manifest has no sum of them
        name = file.relative_to(path).as_posix()
        if name not in files and file.suffix in (
            ".safetensors",
            ".pt",
            ".pth",
            ".bin",
            ".pkl",
            ".py",
        ):
            return f"{name} was not saved with it"
    with ThreadPoolExecutor(4) as pool:
        for name, digest in zip(
            files, pool.map(sha256_of, [path / name for name in files]), strict=True
        ):
            if digest != files[name][1]:
                return f"{name} does not have the bytes that were written"
    return None


def manifest_text(manifest: dict[str, Any]) -> str:
    """manifest.json, with its own sum as the last entry."""
    body = {key: value for key, value in manifest.items() if key != "sum"}
    body["sum"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps(body, indent=1) + "\n"


def write_manifest(folder: Path) -> None:
    """Syncs the files of `folder` and writes the manifest that `verify_manifest` checks."""
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        sync(file)
        files[file.relative_to(folder).as_posix()] = {
            "bytes": file.stat().st_size,
            "sha256": sha256_of(file),
        }
    write_atomically(folder / "manifest.json", manifest_text({"format": 2, "files": files}))


def write_atomically(file: Path, content: str | bytes) -> None:
    """Replaces the content of `file`: whenever the machine stops, it has the old content or the new."""
    part = file.with_name(f".tmp-{file.name}")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    rename_synced(part, file)


def rename_synced(part: Path, file: Path) -> None:
    """Renames `part` to `file`, in the same folder, with the content and then the name on the disk."""
    sync(part)
    part.rename(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """fsync of a file, or of the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_records(record: Path | None) -> Iterator[Any]:
    """The entries that `append_record` wrote, without lines that were cut short. None: no entry."""
    if record is None or not record.is_file():
        return
    for line in record.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def append_record(record: Path | None, entry: Any) -> None:
    """Appends an entry as a line of JSON, in one write, unless the disk refuses it. None: keeps nothing."""
    if record is None:
        return
    line = b"\n" + json.dumps(entry).encode() + b"\n"  # begins anew after a line that was cut short
    with contextlib.suppress(OSError), record.open("ab", buffering=0) as file:
        file.write(line)
