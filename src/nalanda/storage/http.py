"""http(s): whole files, and downloads that go on where they stopped."""

from __future__ import annotations

import hashlib
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from nalanda.storage.retry import Incomplete

TIMEOUT = (10.0, 60.0)
"""Seconds to connect, and seconds without a byte after which a download has failed."""


class Http:
    """A file of http(s) under the names of fsspec, whose own downloads neither resume nor compare checksums."""

    validator = ""
    """What shows that a server's file is the one whose bytes came before; "" if nothing does."""

    def cat_file(self, url: str) -> bytes:
        with _ask(url) as reply:
            reply.raise_for_status()
            return reply.read()

    def get_file(self, url: str, file: str) -> None:
        """Downloads `url`. After a failure the next call goes on in `file`, if the server supports that.

        Returns once the length and the server's checksum, if any, agree.
        """
        partial = Path(file)
        # What came before is continued only where a validator shows that the file is the same.
        start = partial.stat().st_size if self.validator and partial.exists() else 0
        headers = {"Accept-Encoding": "identity"}
        if start:  # the server sends all if the file is another one now
            headers |= {"Range": f"bytes={start}-", "If-Range": self.validator}
        with _ask(url, headers) as reply:
            if reply.status_code == 416:
                self._begin_anew("the server cannot resume the download")
            reply.raise_for_status()
            # Any other answer has the whole file, which replaces what came before.
            if reply.status_code != 206:
                start = 0
            elif not reply.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                self._begin_anew("the server resumed at another byte")
            # A weak ETag, W/"…", does not promise the same bytes.
            etag = reply.headers.get("ETag", "")
            self.validator = etag if etag[:1] == '"' else reply.headers.get("Last-Modified", "")
            with partial.open("ab" if start else "wb") as stream:
                # As they come, since a stall loses a chunk; as they are stored, so that .gz stays .gz.
                for chunk in reply.iter_raw():
                    stream.write(chunk)
                size, length = stream.tell(), reply.headers.get("Content-Length")
        # Content-Length counts what this answer sends.
        if length and size != start + int(length):
            raise Incomplete(f"{size} of {start + int(length)} bytes came")
        # A wrong sum does not tell which byte is wrong.
        if checksum := _stated_checksum(reply.headers):
            kind, stated = checksum
            with partial.open("rb") as stream:
                digest = hashlib.file_digest(stream, kind).hexdigest()
            if digest != stated:
                self._begin_anew(f"the bytes do not have the server's {kind}")

    def _begin_anew(self, why: str) -> NoReturn:
        """Fails so that the next try asks for the whole file."""
        self.validator = ""
        raise Incomplete(why)


def _ask(url: str, headers: dict[str, str] | None = None) -> AbstractContextManager[Any]:
    """The answer of a server, whose body is not read yet."""
    import httpx2  # takes a third of a second

    connect, read = TIMEOUT
    timeout = httpx2.Timeout(read, connect=connect)
    return httpx2.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True)


def _stated_checksum(headers: Any) -> tuple[str, str] | None:
    """(algorithm, hexadecimal digest) of the whole file, if the server states them."""
    for kind in ("sha256", "md5"):
        if value := headers.get(f"x-checksum-{kind}"):
            return kind, value.lower()
    # Other servers' ETags look the same and are hashes of other things.
    etag = "x-amz-request-id" in headers and re.fullmatch(
        r'"([0-9a-f]{32})"', headers.get("ETag", "")
    )
    encrypted = "kms" in headers.get("x-amz-server-side-encryption", "") or any(
        "server-side-encryption-customer" in name.lower() for name in headers
    )  # S3's ETag is then not the MD5 of the content
    return ("md5", etag[1]) if etag and not encrypted else None
