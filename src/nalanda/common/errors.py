"""What a person can mend, said in one line: bad input, full disks, too little memory."""

import errno
import os
import re
from pathlib import Path


class InputError(ValueError):
    """Something the user gave cannot work; the message is one line that says what to change."""

    exit_code = 2


class OutOfMemory(InputError):
    """The machine or its GPU has less memory than was asked for; files are unharmed."""

    exit_code = 71


class DiskFull(InputError):
    """A checkpoint did not fit; those before it are unharmed."""

    exit_code = 74


class SourceUnavailable(InputError):
    """Retries are used up: a server did not give what training needs next."""

    exit_code = 75


class NothingTrained(InputError):
    """A run came to its end and no step of it reached the weights."""

    exit_code = 65


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, and quotas and limits of a file's size, which are mended in the same way."""

# Libraries beneath torch and safetensors raise errors of their own, which have the system's words or numbers.
_NO_ROOM = re.compile(rf"\(os error ({'|'.join(map(str, NO_ROOM))})\)|disk is full")


_NO_MEMORY = re.compile(r"out of memory|(can't|cannot) allocate memory|not enough memory|bad_alloc", re.I)


_ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.I)


def no_room(error: BaseException) -> bool:
    """Whether a file could not be written for want of space, or because it may not grow further."""
    known = isinstance(error, OSError) and error.errno in NO_ROOM
    return known or _NO_ROOM.search(str(error)) is not None


def out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch (on any device) or the system had no memory left to give."""
    known = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return known or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)


def asked_for(error: BaseException) -> str:
    """`out of memory` with what was asked for last, where the error tells."""
    found = _ASKED.search(str(error))
    return "out of memory" + (f": {found[1]} more were asked for" if found else "")


def explained(error: BaseException) -> InputError | None:
    """`error` as one line for a person; None where only a traceback tells what is wrong."""
    if isinstance(error, InputError):
        return error
    if out_of_memory(error):
        return OutOfMemory(f"{asked_for(error)}; take a smaller model, fewer rows at a time or shorter ones")
    name = getattr(error, "filename", None)
    if no_room(error):
        what = "the file may not grow further" if _is(error, errno.EFBIG) else "the disk is full"
        return DiskFull(f"{f'{name}: ' if name else ''}{what}; make room, and start again")
    if isinstance(error, OSError) and isinstance(name, str | os.PathLike):
        return InputError(f"{name}: {_reason(error)}")
    return None


def output_folder(path: str | os.PathLike, option: str) -> Path:
    """`path` as a folder that can be written to, made where there is none; before any work that it is for.

    option: what the message calls it. Raises `InputError`.
    """
    path = Path(path).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "nothing may be written there", str(path))
    except OSError as error:
        at = "" if error.filename in (None, str(path)) else f"{error.filename}: "
        raise InputError(f"{option} {path}: {at}{_reason(error)}") from None
    return path


def output_file(path: str | os.PathLike, option: str) -> Path:
    """`path` as a file that can be written, its folder made; before any work that it is for.

    option: what the message calls it. Raises `InputError`.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise InputError(f"{option} {path}: a folder; name a file")
    if path.is_symlink() and not path.exists():
        raise InputError(f"{option} {path}: {_link(path)}")
    output_folder(path.parent, option)
    return path


def _reason(error: OSError) -> str:
    path = Path(os.fsdecode(error.filename)) if error.filename is not None else None
    if isinstance(error, FileExistsError) and path:  # mkdir: what is there is no folder
        return _link(path) if path.is_symlink() else "a file; name a folder"
    return error.strerror or type(error).__name__


def _link(path: Path) -> str:
    return f"a symbolic link to {os.readlink(path)}, which does not exist"


def _is(error: BaseException, number: int) -> bool:
    return getattr(error, "errno", None) == number or f"(os error {number})" in str(error)


def first_line(error: BaseException) -> str:
    """What it says, in one line; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
