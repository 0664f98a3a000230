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
    """The kind of an error and its first line, without secrets."""
    kind = type(error).__name__
    return redact(f"{kind}: {first_line(error)}" if str(error) else kind)


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
_BAD_URL = ("InvalidURL", "UnsupportedProtocol")
"""httpx's errors for it, which are no ValueError."""
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
    causes = _causes_of(error)
    for cause in causes:
        if status := _status_of(cause):
            return status in (408, 425, 429) or status >= 500
    return any(map(_no_answer, causes)) and not any(map(_is_final, causes))


def _causes_of(error: BaseException) -> list[BaseException]:
    """The error, and each one that it was raised from or beside."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause and cause not in causes:
        causes.append(cause)
        # `raise … from` hides the error beside it; a chain may lead back into itself.
        beside = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or beside
    return causes


def _is_final(error: BaseException) -> bool:
    """Whether waiting cannot fix it, although it may be a `ConnectionError`."""
    if isinstance(error, (ssl.SSLCertVerificationError, InputError)):
        return True
    return "OfflineModeIsEnabled" in describe_error(error)


def _no_answer(error: BaseException) -> bool:
    """Whether no whole answer came."""
    if isinstance(error, _TRANSIENT):
        return True
    library = type(error).__module__.split(".")[0]
    if library in _NETWORK_LIBRARIES:
        # A fault of the request.
        return not isinstance(error, ValueError) and type(error).__name__ not in _BAD_URL
    names = {base.__name__ for base in type(error).__mro__}
    return library in ("botocore", "azure", "google") and bool(names & _NO_ANSWER)


def _status_of(error: BaseException) -> int | None:
    """The status of the server's answer, where each library keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        statuses = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:  # httpx, requests; aiohttp, azure, gcsfs
        statuses = [getattr(response, "status_code", None)]
        statuses += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    for status in statuses:
        if isinstance(status, int) and status:
            # Smaller numbers are a library's own codes.
            return status if status >= 100 else None
    return None


def persist(
    do: Callable[[], T], what: str, retries: int, received: Callable[[], int] = lambda: 0
) -> T:
    """`do()`, tried again after `transient` errors.

    received: bytes that the next try need not bring. More than ever before begin the count of failures anew.

    Raises:
        SourceUnavailable: after `retries` failed retries in a row.
        Exception: that of `do`, if another try cannot help.
    """
    failures = most = 0
    while True:
        try:
            return do()
        except Exception as error:
            if (now := received()) > most:
                failures, most = 0, now
            failures += 1
            _wait_after(error, failures, what, retries)


def persistent(
    read: Callable[[Any], Iterator[tuple[T, Any]]], cursor: Any, what: str, retries: int
) -> Iterator[tuple[T, Any]]:
    """`read(cursor)`, pairs of an item and the cursor after it, reopened at the last cursor after a failure.

    Each item begins the count of failures anew. Raises as `persist`.
    """
    failures = 0
    while True:
        try:
            for item, cursor in read(cursor):  # noqa: B020  the next reading resumes there
                failures = 0
                yield item, cursor
            return
        except Exception as error:
            failures += 1
            _wait_after(error, failures, what, retries)


def _wait_after(error: Exception, failures: int, what: str, retries: int) -> None:
    """Returns when it is time to try again. Raises as `persist`. failures: how many came in a row."""
    if not transient(error):
        raise error
    if failures > retries:
        raise SourceUnavailable(
            f"{what}: failed {failures} times in a row, gave up ({describe_error(error)}); "
            "run the same command again later to resume, or raise data.retries"
        ) from None
    # Random, because many processes that fail together should not return together.
    wait = random.uniform(0, min(LONGEST_WAIT, 2.0**failures))
    if first_process():
        again = f"try {failures} of {retries} in {wait:.0f} s"
        print(f"nalanda: {what}: {describe_error(error)}; {again}", file=sys.stderr, flush=True)
    sleep(wait)
