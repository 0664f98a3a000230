"""Errors that the user can fix, in one line: bad input, full disks, too little memory."""

import contextlib
import errno
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from nalanda.common.text import is_url, local_path, redact


class ExitCode(IntEnum):
    """Exit codes of all commands; after a signal it is 128 + its number. Those from 64 on are of sysexits.h.

    After REFUSED and DIVERGED the same command would end in the same way. After all others it goes on.
    """

    REFUSED = 2
    """Bad input."""
    DIVERGED = 65
    """Bad steps ended a training, or no step changed the weights."""
    HUNG = 70
    """A process made no progress."""
    OUT_OF_MEMORY = 71
    DISK_FULL = 74
    UNAVAILABLE = 75
    """A server did not deliver the data."""


class InputError(ValueError):
    """Something in the user's input cannot work; the message is one line that says what to change."""

    exit_code: int = ExitCode.REFUSED


class OutOfMemory(InputError):
    """The machine or its GPU has too little memory; files are unharmed."""

    exit_code = ExitCode.OUT_OF_MEMORY


class DiskFull(InputError):
    """A file did not fit on the disk; finished ones are unharmed."""

    exit_code = ExitCode.DISK_FULL


class SourceUnavailable(InputError):
    """A server still fails after all retries."""

    exit_code = ExitCode.UNAVAILABLE


class Diverged(InputError):
    """Bad steps ended a training; the same command would meet them again."""

    exit_code = ExitCode.DIVERGED


class NothingTrained(Diverged):
    """A run ended and no step changed the weights."""


EXTRAS = {
    "PIL": "vision",
    "bokeh": "eval",
    "gguf": "deploy",
    "lm_eval": "eval",
    "matplotlib": "eval",
    "mlx": "mlx",
    "mlx_lm": "mlx",
    "scipy": "eval",
    "sentencepiece": "sentencepiece",
    "sklearn": "vision",
    "trl": "sft",
    "wonderwords": "eval",
    "xllamacpp": "deploy",
}
"""Packages that only some commands import, and the extra of `pyproject.toml` that installs each."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, and quotas and limits of a file's size, which have the same remedy."""

# Libraries below torch and safetensors raise their own errors, with the system's words or numbers.
_NO_ROOM = re.compile(rf"\(os error ({'|'.join(map(str, NO_ROOM))})\)|disk is full")
_NO_MEMORY = re.compile(
    r"out of memory|(can't|cannot) allocate memory|not enough memory|bad_alloc", re.I
)
_REQUESTED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.I)


def no_room(error: BaseException) -> bool:
    """Whether a file could not be written because the disk is full or the file may not grow."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return True
    return _NO_ROOM.search(str(error)) is not None


def full_problem(error: BaseException) -> str:
    """The words for an error of `no_room`: the disk is full, or a file is at its limit."""
    limited = getattr(error, "errno", None) == errno.EFBIG
    limited |= f"(os error {errno.EFBIG})" in str(error)
    return "the file may not grow further" if limited else "the disk is full"


def out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch (on any device) or the system is out of memory."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def asked_for(error: BaseException) -> str:
    """`out of memory`, with the amount asked for last if the error states it."""
    amount = _REQUESTED.search(str(error))
    return f"out of memory: {amount[1]} more were asked for" if amount else "out of memory"


def explained(error: BaseException) -> InputError | None:
    """`error` as an `InputError` of one line; None if only a traceback helps."""
    if isinstance(error, InputError):
        return error
    # Of an environment variable.
    if isinstance(error, ValueError) and str(error).startswith("NALANDA_"):
        return InputError(str(error))
    if out_of_memory(error):
        return OutOfMemory(
            f"{asked_for(error)}; take a smaller model, fewer rows at a time or shorter ones"
        )
    file = getattr(error, "filename", None)
    if no_room(error):
        # Of a copy the second name is of the file that was written.
        file = getattr(error, "filename2", None) or file
        prefix = f"{file}: " if file else ""
        return DiskFull(f"{prefix}{full_problem(error)}; make room, and start again")
    if isinstance(error, OSError) and isinstance(file, str | os.PathLike):
        return InputError(f"{file}: {_describe_error(error)}")
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of Path.expanduser
        return InputError(
            "a path begins with ~ and the name of an unknown user; write the whole path"
        )
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in EXTRAS:
        return InputError(f"{missing}: not installed; pip install 'nalanda[{EXTRAS[missing]}]'")
    return None


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program at an error that the user can fix, with one line on stderr and an exit code.

    An interrupt ends it with 130, a closed pipe with 1. Other errors keep their traceback.
    """
    repeat_failure()
    try:
        yield
    except BrokenPipeError:  # the reader of the pipe, `head` for one, has read enough
        # Else the flush at exit would fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        if caused_by_interrupt(error):
            line, exit_code = "interrupted", 130
        elif explanation := explained(error):
            line, exit_code = str(explanation), explanation.exit_code
        else:
            raise
        report_failure(f"nalanda: {line}", exit_code)
        raise SystemExit(exit_code) from None


def repeat_failure() -> None:
    """Ends a process that torchrun restarts after an error with a line of its own, as the process before it did.

    `--max-restarts` is for crashes: nobody has changed the input since.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return
    # LAUNCH/attempt_0/LOCAL_RANK/error.json; of a crash there is none.
    for report in Path(file).parents[2].glob("attempt_*/*/error.json"):
        failure = json.loads(report.read_text())
        report_failure(failure["message"], failure["exit_code"])
        raise SystemExit(failure["exit_code"])


def report_failure(line: str, exit_code: int) -> None:
    """Prints the line on stderr. Below torchrun or accelerate their report ends with it instead.

    Of a launch's processes that fail alike the first one reports. The others end with code 0: the launcher
    lists each process with another code.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        print(line, file=sys.stderr, flush=True)
        return

    # The folder around those of the processes is new at each start.
    mark = Path(file).parents[1] / f"{zlib.crc32(line.encode())}.reported"
    with contextlib.suppress(OSError):
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            raise SystemExit(0) from None

        # Before the second of those that the launcher then ends: it calls the first one the cause.
        timestamp = int(time.time()) - 1
        failure = {"message": line, "timestamp": timestamp, "exit_code": exit_code}
        Path(file).write_text(json.dumps(failure))


def caused_by_interrupt(error: BaseException | None) -> bool:
    """Whether ctrl-C caused `error`. Libraries raise other errors if it interrupts their import."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def output_folder(path: str | os.PathLike, option: str) -> Path:
    """`path` as a writable folder, created if missing. Call it before the work whose output goes there.

    option: the name that messages begin with. Raises `InputError`.
    """
    path = local_output(path, option)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "nothing may be written there", str(path))
    except OSError as error:
        other = "" if error.filename in (None, str(path)) else f"{error.filename}: "
        problem = _describe_error(error)
        remedy = "" if ";" in problem else "; name another folder"
        raise InputError(f"{option} {path}: {other}{problem}{remedy}") from None
    return path


def output_file(path: str | os.PathLike, option: str) -> Path:
    """`path` as a writable file, its folder created if missing. Call it before the work that it stores.

    option: the name that messages begin with. Raises `InputError`.
    """
    path = local_output(path, option)
    if path.is_dir():
        raise InputError(f"{option} {path}: a folder; name a file")
    if path.exists() and not path.is_file():  # a file would take its place
        raise InputError(f"{option} {path}: a device or a pipe; name a file")
    if path.is_symlink() and not path.exists():
        raise InputError(f"{option} {path}: {_describe_link(path)}")
    output_folder(path.parent, option)
    return path


def local_output(path: str | os.PathLike, option: str) -> Path:
    """`path` of this machine. Raises `InputError` for a URL, of which no folder may be made here."""
    name = local_path(os.fspath(path))
    if is_url(name):
        raise InputError(f"{option} {redact(name)}: a URL; name a local path")
    return Path(name).expanduser()


def _describe_error(error: OSError) -> str:
    if isinstance(error, FileExistsError) and error.filename is not None:  # mkdir met a file
        path = Path(os.fsdecode(error.filename))
        return _describe_link(path) if path.is_symlink() else "a file; name a folder"
    if isinstance(error, NotADirectoryError):
        return "a file; name a folder"
    return error.strerror or type(error).__name__


def _describe_link(path: Path) -> str:
    target = os.readlink(path)
    return f"a symbolic link to {target}, which does not exist; make it, or name another path"


def first_line(error: BaseException) -> str:
    """The first line of the error's message, with the next one if it ends in a colon; else its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
