"""Bad input, said in one line."""

import contextlib
import sys
from collections.abc import Iterator


class InputError(ValueError):
    """Something the user gave cannot work; the message is one line that says what to change."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """At a command line: an `InputError` becomes one line on stderr and exit code 2, never a traceback."""
    try:
        yield
    except InputError as error:
        print(f"nalanda: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
