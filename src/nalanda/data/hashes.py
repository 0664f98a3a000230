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


class FileHashes:
    """The hashes of files, computed when they are first asked for.

    A hash is `SAMPLE:HEX`. It says how it was made, so a later reader makes it the same way: of the whole
    file (`WHOLE`), or of `SAMPLES` samples of that many bytes.

    Threads and processes may ask at the same time.

    record: a file that keeps the hashes. Each is appended as soon as it is found. None: they are kept in
        memory alone.
    """

    def __init__(self, record: Path | None = None):
        self.record = record
        self._known: dict[tuple, str] = {}
        for entry in read_records(record):
            try:
                path, stamp, found = entry
                self._known[path, *stamp, sample_of(found)] = found
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
            found = path.stat()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); restore it") from None
        sample = WHOLE if found.st_size <= SAMPLES * sample else sample
        stamp = found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
        key = os.path.abspath(path), *stamp, sample
        if key not in self._known:
            self._known[key] = f"{sample}:{hash_file(path, found.st_size, sample)}"
            append_record(self.record, [key[0], stamp, self._known[key]])
        return self._known[key]


def sample_of(found: str) -> int:
    """The bytes of each sample of a hash, or `WHOLE`. Raises ValueError for what is no such hash."""
    return int(found.partition(":")[0])


def is_stated(found: str) -> bool:
    """Whether a hash is the checksum that a store states, `KIND:…`, and so is none of `FileHashes`."""
    return ":" in found and not found.partition(":")[0].isdigit()


def hash_file(path: Path, size: int, sample: int) -> str:
    """64 bits of BLAKE2b, in hexadecimal, over the size and the samples. Raises `InputError`."""
    length = sample or size
    places = [(size - length) * i // (SAMPLES - 1) for i in range(SAMPLES)] if sample else [0]
    found = blake2b(str(size).encode(), digest_size=8)
    try:
        with path.open("rb", buffering=0) as file:
            for place in places:
                file.seek(place)
                left = length
                while left and (piece := file.read(min(left, 1 << 20))):
                    found.update(piece)
                    left -= len(piece)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); restore it") from None
    return found.hexdigest()
