"""Hashes of files' contents. Each is kept with the file's stamp, so that an unchanged file is read once."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from nalanda.common.errors import InputError
from nalanda.common.files import append_record, read_records

WHOLE = 0
"""Bytes of a sample that mean the whole file."""

SAMPLES = 16
"""Samples of a file, head and tail included."""

AT_A_TIME = 8
"""Files hashed at a time while a command waits for them."""


class FileHashes:
    """The hashes of files, computed at the first request.

    A hash is `SAMPLE:HEX`: of `SAMPLES` samples of that many bytes, or of the whole file (`WHOLE`). So a later
    reader can make it the same way.

    Threads and processes may ask at the same time.

    record: a file that keeps the hashes. Each is appended as soon as it is found. None: they are kept in
        memory alone.
    """

    def __init__(self, record: Path | None = None):
        self.record = record
        self._hashes: dict[tuple, str] = {}
        for entry in read_records(record):  # of another version, perhaps: those are left out
            try:
                path, stamp, content_hash = entry
                self._hashes[path, *stamp, sample_of(content_hash)] = content_hash
            except (ValueError, TypeError, AttributeError):
                continue

    def of(self, path: Path, sample: int) -> str:
        """The hash of a file.

        Args:
            path: the file.
            sample: bytes of each sample, or `WHOLE`. A file that the samples would cover is hashed whole.

        Raises:
            InputError: the file cannot be read.
        """
        try:
            status = path.stat()
            # The stamp changes with the file; a file that the samples would cover is read whole.
            if status.st_size <= SAMPLES * sample:
                sample = WHOLE
            stamp = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
            key = os.path.abspath(path), *stamp, sample
            if key not in self._hashes:
                self._hashes[key] = f"{sample}:{hash_file(path, status.st_size, sample)}"
                append_record(self.record, [key[0], stamp, self._hashes[key]])
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); restore it") from None
        return self._hashes[key]


def sample_of(content_hash: str) -> int:
    """The bytes of each sample of a hash, or `WHOLE`. Raises ValueError for a text of another form."""
    return int(content_hash.partition(":")[0])


def is_stated(content_hash: str) -> bool:
    """Whether a hash is the checksum that a store states, `KIND:…`, and so is none of `FileHashes`."""
    kind, colon, _ = content_hash.partition(":")
    return bool(colon) and not kind.isdigit()


def hash_file(path: Path, size: int, sample: int) -> str:
    """64 bits of BLAKE2b, in hexadecimal, over the size and the samples."""
    length = sample or size
    offsets = [0]
    if sample:  # from the head to the tail, evenly
        offsets = [(size - length) * i // (SAMPLES - 1) for i in range(SAMPLES)]

    hasher = blake2b(str(size).encode(), digest_size=8)
    with path.open("rb", buffering=0) as file:
        for offset in offsets:
            file.seek(offset)
            left = length
            # A read may give less than asked, and a file that shrinks ends early.
            while left and (piece := file.read(min(left, 1 << 20))):
                hasher.update(piece)
                left -= len(piece)
    return hasher.hexdigest()
