"""Bad input, said in one line."""

import contextlib
import sys
from collections.abc import Iterator


class InputError(ValueError):
    """Something the user gave cannot work; the message is one line that says what to change."""

    exit_code = 2


class DiskFull(InputError):
    """A checkpoint did not fit; those before it are unharmed."""

    exit_code = 74


class SourceUnavailable(InputError):
    """Retries are used up: a server did not give what training needs next."""

    exit_code = 75


class NothingTrained(InputError):
    """A run came to its end and no step of it reached the weights."""

    exit_code = 65


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """At a command line: an `InputError` becomes one line on stderr and its exit code, never a traceback."""
    try:
        yield
    except InputError as error:
        print(f"nalanda: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
