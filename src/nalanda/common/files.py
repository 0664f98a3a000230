"""Atomic, synced writes, and manifests with SHA-256 sums."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nalanda.common.errors import DiskFull, InputError, full_problem, no_room, output_folder

FAST = 10_000
"""Bytes of a recipe that libyaml reads."""


@contextlib.contextmanager
def alone(lock: Path, taken: str, seconds: float = 0.0) -> Iterator[bool]:
    """Holds a lock file, which ends with the process. Yields whether the file system has locks at all.

    Raises `InputError` with the text `taken` if another process still has it after `seconds`.
    """
    from filelock import FileLock, Timeout  # 9 ms, which most commands do not need

    held = FileLock(lock)
    try:
        held.acquire(timeout=seconds)
    except Timeout:
        raise InputError(taken) from None
    except (OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def verify_manifest(path: Path) -> str | None:
    """The problem of a folder that has a manifest, in one line, or None."""
    try:
        return _find_problem(path)
    except OSError as error:  # such as a file in place of the folder, or a disk that cannot be read
        name = os.path.relpath(error.filename, path) if error.filename else path.name
        return f"{name}: {error.strerror or type(error).__name__}"


UNLISTED = (".safetensors", ".pt", ".pth", ".bin", ".pkl", ".py")
"""Suffixes of files that loading would read although the manifest has no sum of them."""


def _find_problem(path: Path) -> str | None:
    try:
        text = (path / "manifest.json").read_text()
        manifest = json.loads(text)
        if text != manifest_text(manifest):
            return "manifest.json does not have the bytes that were written"
        sizes = {str(name): entry["bytes"] for name, entry in manifest["files"].items()}
        sums = {str(name): entry["sha256"] for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return "no manifest.json"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is unreadable"

    # Sizes first, which cost no reading.
    for name, size in sizes.items():
        file = path / name
        if _leads_outside(path, name):
            return f"{name} leaves the checkpoint's folder"
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if name not in sizes and file.suffix in UNLISTED:
            return f"{name} was not saved with it"

    # The sums last: they read all bytes.
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(sha256_of, [path / name for name in sums])
        for name, digest in zip(sums, digests, strict=True):
            if digest != sums[name]:
                return f"{name} does not have the bytes that were written"
    return None


def _leads_outside(folder: Path, name: str) -> bool:
    """Whether a name in a manifest leads out of `folder`, by its parts or by a link."""
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        return True
    file = folder / name
    return any(path.is_symlink() for path in (file, *file.parents[: len(parts) - 1]))


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


def write_atomically(file: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replaces the content of `file`: whenever the machine stops, it has the old content or the new.

    private: only this user may read the file.
    """
    # A name of its own: several processes may write the file at once.
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    if private:
        temporary.touch(mode=0o600)
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    rename_synced(temporary, file)


def rename_synced(temporary: Path, file: Path) -> None:
    """Renames `temporary` to `file`, in the same folder: first its content is on the disk, then its name."""
    sync(temporary)
    temporary.rename(file)
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
    """Reads the entries that `append_record` wrote, without lines that were cut short. None: no entry."""
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


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a run or model as it stands in config.yaml. Raises ValueError without one, or for a damaged one."""
    import yaml

    file = folder / "config.yaml"
    try:
        # libyaml reads 7 times as fast, but deep nesting overflows its stack: long files go the other way.
        fast = getattr(yaml, "CSafeLoader", None) if file.stat().st_size < FAST else None
        recipe = yaml.load(file.read_bytes(), fast or yaml.SafeLoader)
    except FileNotFoundError:
        raise ValueError("config.yaml is missing") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise ValueError("config.yaml is not YAML") from None
    if not isinstance(recipe, dict):
        raise ValueError("config.yaml is not a recipe")
    return recipe


def stored_recipe(folder: Path) -> dict[str, Any]:
    """`read_recipe`; {} without one, or for a damaged one."""
    with contextlib.suppress(ValueError):
        return read_recipe(folder)
    return {}


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `InputError` for a file that holds none."""
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise InputError(f"{file}: unreadable: {error}") from None
    return content


def update_json(file: Path, **settings: Any) -> dict[str, Any]:
    """Adds settings to a JSON file, which may be missing; returns all of them."""
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    table |= settings
    file.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return table


def copy_contents(source: Path, folder: Path, patterns: Iterable[str] = ("**/*",)) -> None:
    """Copies the files of `source` that match, but for its manifest, which holds for it alone.

    Only their contents: a copy may be written to, also where the file may only be read.
    """
    for file in itertools.chain(*map(source.glob, patterns)):
        if file.is_file() and file.name != "manifest.json":
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def discard(path: Path) -> None:
    """Removes a folder with its files, a file or a link. What the system keeps stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def missing_folders(path: Path) -> list[Path]:
    """The folder `path` and those around it that do not exist yet, from the inside out."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_new_folders(folders: list[Path]) -> None:
    """Removes `missing_folders` that were made since: the first with all its files, the others if empty."""
    for folder in folders[:1]:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in folders[1:]:
        with contextlib.suppress(OSError):  # another run lies there
            folder.rmdir()


def refuse_existing(out: Path, kind: str = "folder") -> None:
    """Raises `InputError` if something lies at `out`, a dangling link included."""
    if os.path.lexists(out):
        raise InputError(f"{out} exists; choose another {kind}")


@contextlib.contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a folder to fill. It becomes `out` when the block ends, and is removed if the block fails.

    Raises:
        InputError: `out` exists and `replace` is False.
        DiskFull: the block found no room.
    """
    if not replace:
        refuse_existing(out)
    output_folder(out.parent, "the folder to make:")
    new, old = out.with_name(f".tmp-{out.name}"), out.with_name(f".tmp-{out.name}-old")
    discard(new)
    new.mkdir(parents=True)
    try:
        yield new
    except BaseException as error:
        discard(new)
        if no_room(error) and not isinstance(error, InputError):
            raise DiskFull(f"{out}: {full_problem(error)}; make room, and start again") from None
        raise

    # Complete on the disk before it gets its name; the old folder stays until then.
    for file in new.rglob("*"):
        sync(file)
    sync(new)
    discard(old)
    if out.exists():
        out.rename(old)
    new.rename(out)
    sync(out.parent)
    discard(old)
