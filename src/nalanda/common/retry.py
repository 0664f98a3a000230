"""Bounded retries of what may succeed later."""

from __future__ import annotations

import http.client
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from nalanda.common.errors import InputError, SourceUnavailable, first_line
from nalanda.common.progress import first_process
from nalanda.common.text import redact

T = TypeVar("T")


LONGEST_WAIT = 60.0
"""Seconds between two tries, at most."""

sleep = time.sleep
"""The wait between two tries; tests replace it."""


def describe_error(error: BaseException) -> str:
    return redact(
        f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    )


_TRANSIENT = (ConnectionError, TimeoutError, socket.gaierror, http.client.HTTPException)
_NETWORK_LIBRARIES = {
    "aiohttp",
    "hf_xet",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
}
_NO_ANSWER = {
    "HTTPClientError",
    "ConnectionError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TransportError",
}
"""Errors of botocore, azure and google when no whole answer came. Their other errors are final."""


class Incomplete(ConnectionError):
    """The server's answer is not all of what it announced."""


def transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: no connection, a stall, a cut, status 408, 425, 429 or 5xx.

    Libraries wrap one another's errors (fsspec turns a dropped connection into FileNotFoundError), so the
    causes count too. A status overrides everything else.
    """
    chain = [error]
    while cause := chain[-1].__cause__ or (
        None if chain[-1].__suppress_context__ else chain[-1].__context__
    ):
        if cause in chain:
            break
        chain.append(cause)
    for link in chain:
        if status := _status(link):
            return status in (408, 425, 429) or status >= 500
    if any(
        isinstance(link, (ssl.SSLCertVerificationError, InputError))
        or "OfflineModeIsEnabled"
        in describe_error(link)  # a ConnectionError that waiting cannot fix
        for link in chain
    ):
        return False
    return any(
        isinstance(link, _TRANSIENT)
        or (
            type(link).__module__.split(".")[0] in _NETWORK_LIBRARIES
            and not isinstance(link, ValueError)
        )
        or (
            type(link).__module__.split(".")[0] in ("botocore", "azure", "google")
            and any(base.__name__ in _NO_ANSWER for base in type(link).__mro__)
        )
        for link in chain
    )


def _status(error: BaseException) -> int | None:
    """The status of the server's answer, where each library keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        names = ("status", "status_code", "code")  # aiohttp, azure, gcsfs
        found = (getattr(error, name, None) for name in names)
        status = getattr(response, "status_code", None) or next(
            (v for v in found if isinstance(v, int)), None
        )
    return status if isinstance(status, int) and status >= 100 else None


class Patience:
    """Counts failures in a row and waits a random time after each, with a limit that doubles. Random, because
    many processes that fail together should not return together."""

    def __init__(self, what: str, retries: int):
        self.what, self.retries, self.failures = what, retries, 0

    def failed(self, error: Exception) -> None:
        """Returns when it is time to try again.

        Raises:
            SourceUnavailable: after `retries` failed retries in a row.
            Exception: `error` itself, if another try cannot help.
        """
        if not transient(error):
            raise error
        self.failures += 1
        if self.failures > self.retries:
            raise SourceUnavailable(
                f"{self.what}: failed {self.failures} times in a row, gave up ({describe_error(error)}); "
                "run the same command again later to resume, or raise data.retries"
            ) from None
        wait = random.uniform(0, min(LONGEST_WAIT, 2.0**self.failures))
        if first_process():
            again = f"try {self.failures} of {self.retries} in {wait:.0f} s"
            print(
                f"nalanda: {self.what}: {describe_error(error)}; {again}",
                file=sys.stderr,
                flush=True,
            )
        sleep(wait)


def persist(do: Callable[[], T], what: str, retries: int) -> T:
    """`do()`, tried again after `transient` errors. Raises as in `Patience.failed`."""
    patience = Patience(what, retries)
    while True:
        try:
            return do()
        except Exception as error:
            patience.failed(error)


def persistent(
    read: Callable[[Any], Iterator[tuple[T, Any]]], cursor: Any, what: str, retries: int
) -> Iterator[tuple[T, Any]]:
    """`read(cursor)`, pairs of an item and the cursor after it, reopened at the last cursor after a failure.

    Each item resets the count of failures. Raises as in `Patience.failed`.
    """
    patience = Patience(what, retries)
    while True:
        try:
            for item, cursor in read(cursor):  # noqa: B020  the next reading resumes there
                patience.failures = 0
                yield item, cursor
            return
        except Exception as error:
            patience.failed(error)
