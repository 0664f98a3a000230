"""Which errors are tried again, how often, and after what wait."""

from collections import Counter

import pytest

from nalanda.common.errors import InputError, SourceUnavailable
from nalanda.storage.retry import Incomplete, persist, persistent, transient


def test_waits_grow_with_jitter_and_end_at_a_minute(waits):
    def fail():
        raise ConnectionResetError("reset")

    with pytest.raises(SourceUnavailable):
        persist(fail, "it", 200)
    assert len(waits) == 200
    assert all(0 <= wait <= min(60, 2.0 ** (i + 1)) for i, wait in enumerate(waits))
    assert max(waits) > 50
    assert min(waits[6:]) < 10
    assert len(set(waits)) == 200


@pytest.mark.parametrize("error", [ConnectionResetError("x"), TimeoutError(), Incomplete("x")])
def test_an_iterator_is_reopened_after_the_last_item(error, waits):
    fails = Counter({3: 2, 7: 3})

    def read(cursor):
        for i in range(cursor or 0, 10):
            if fails[i]:
                fails[i] -= 1
                raise error
            yield i, i + 1

    assert [item for item, _ in persistent(read, None, "it", retries=3)] == list(range(10))
    assert len(waits) == 5
    fails[5] = 4
    given = persistent(read, 4, "it", retries=3)
    assert next(given) == (4, 5)
    with pytest.raises(SourceUnavailable, match=r"it: failed 4 times in a row"):
        next(given)


def test_transient_errors():
    import aiohttp
    import httpx2
    import requests
    import urllib3
    from fsspec.exceptions import FSTimeoutError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    request = httpx2.Request("GET", "https://h/x")

    def hub(status):
        return HfHubHTTPError("x", response=httpx2.Response(status, request=request))

    def behind(outer, inner):
        try:
            try:
                raise inner
            except Exception as error:
                raise outer from error
        except Exception as error:
            return error

    def meanwhile(outer, inner):
        try:
            try:
                raise inner
            except Exception:
                raise outer  # noqa: B904  like a library that hides the cause
        except Exception as error:
            return error

    def status(code):
        reply = requests.Response()
        reply.status_code = code
        return requests.HTTPError("x", response=reply)

    yes = [
        httpx2.ReadTimeout("x"),
        httpx2.RemoteProtocolError("x"),
        httpx2.ConnectError("x"),
        aiohttp.ClientPayloadError("x"),
        aiohttp.ServerDisconnectedError(),
        requests.exceptions.ChunkedEncodingError("x"),
        requests.exceptions.ConnectionError("x"),
        urllib3.exceptions.ProtocolError("x"),
        urllib3.exceptions.ReadTimeoutError(None, "u", "x"),
        FSTimeoutError(),
        ConnectionError("Server Disconnected"),
        *[hub(code) for code in (408, 429, 500, 502, 503, 504)],
        *[status(code) for code in (429, 503)],
        behind(FileNotFoundError("https://h/x"), aiohttp.ServerDisconnectedError()),
        behind(ValueError("x"), hub(503)),
        meanwhile(FileNotFoundError("https://h/x"), aiohttp.ServerDisconnectedError()),
    ]
    no = [
        *[hub(code) for code in (400, 401, 403, 404, 416)],
        *[status(code) for code in (401, 404)],
        OfflineModeIsEnabled("x"),
        ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"),  # of datasets
        FileNotFoundError("x"),
        ValueError("x"),
        EOFError("x"),
        InputError("x"),
        SourceUnavailable("x"),
        requests.exceptions.InvalidURL("x"),
        httpx2.InvalidURL("x"),
        httpx2.UnsupportedProtocol("x"),
        behind(ConnectionError("x"), hub(404)),
        behind(FileNotFoundError("x"), status(404)),
    ]
    assert [error for error in yes if not transient(error)] == []
    assert [error for error in no if transient(error)] == []
