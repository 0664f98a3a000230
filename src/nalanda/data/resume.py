"""Which files a run needs unchanged to go on, and which may differ: those that it has not read yet.

A checkpoint names the files of each corpus, with their sizes and, as far as they are known, their hashes.
Within an epoch, the files before the saved place were read. They must be there with the same content, under
whatever name. Of the file in which the place lies, the rows up to it must be the same. The files after it
may have changed, gone or joined; the rest of the epoch is what is there now and was not read.

Hashes are found in the background, in the order in which files are read. Of a file that was read before its
hash was found and saved, only name and size are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from nalanda.common.errors import InputError
from nalanda.common.text import redact
from nalanda.data.corpus import Corpus, DocumentStream, digest_rows
from nalanda.data.documents import Document, FileShard
from nalanda.data.hashes import AT_A_TIME, FileHashes, is_stated
from nalanda.data.hold_out import HoldOut

ADVICE = "restore it, or choose another output_dir for other data"

OTHER_CONTENT = "other content than when the checkpoint was saved"


class Files:
    """The files of a corpus in the order of the listing, with their hashes as far as they are known.

    Attributes:
        names, sizes: of all files.
        hashes: their hashes; "" where one is not known yet. Entries are replaced, so states hold the list.
        likes: earlier hashes of the same files, or ""; a new one is made the same way (`Corpus.content`).
    """

    def __init__(
        self, corpus: Corpus | None, record: FileHashes, stated: dict[str, str] | None = None
    ):
        """record: keeps the hashes. stated: name → hash of each file, where there is no corpus."""
        self.corpus, self._record = corpus, record
        if corpus:
            self.names, self.sizes = corpus.names, corpus.sizes
            self.hashes = [""] * len(self.names)
        else:
            self.names, self.hashes = [*(stated or {})], [*(stated or {}).values()]
            self.sizes = [0] * len(self.names)
        self.likes = [""] * len(self.names)

    def state_dict(self) -> dict[str, list]:
        held_out = self.corpus.hold_out if self.corpus else None
        return {
            "names": self.names,
            "sizes": self.sizes,
            "hashes": self.hashes,
            "held_out": [*(held_out or ())],
        }

    def find(self, number: int) -> str:
        """The hash of a file. Raises `InputError` if it cannot be read."""
        if self.corpus and not self.hashes[number]:
            self.hashes[number] = self.corpus.content(number, self._record, self.likes[number])
        return self.hashes[number]

    def is_same(self, number: int, size: int, saved: str) -> bool:
        """Whether a file has that size and hash; "": not known. Raises `InputError`."""
        if self.sizes[number] != size:
            return False
        if not saved:
            return True
        if self.corpus:
            self.hashes[number] = self.corpus.content(number, self._record, saved)
        present = self.hashes[number]
        if is_stated(saved) != is_stated(present):
            return True  # the corpus was moved between a disk and a store, whose checksums do not compare
        return saved == present

    def path(self, number: int) -> str:
        shard = self.corpus.shards[number] if self.corpus else None
        if isinstance(shard, FileShard):
            return str(shard.path)
        return redact(getattr(shard, "url", self.names[number]))


class Hashing:
    """Hashes files in a thread, one after the other, up to the end or to `close`."""

    def __init__(self, jobs: Iterator[tuple[Files, int]]):
        self._closed = threading.Event()
        threading.Thread(target=self._run, args=(jobs,), name="nalanda-hashes", daemon=True).start()

    def _run(self, jobs: Iterator[tuple[Files, int]]) -> None:
        for files, number in jobs:
            if self._closed.is_set():
                return
            with contextlib.suppress(InputError):  # reading it says so
                files.find(number)

    def close(self) -> None:
        self._closed.set()


def in_turn(lists: Iterable[list[tuple[Files, int]]]) -> Iterator[tuple[Files, int]]:
    """The first of each list, the second of each, and so on."""
    for turn in itertools.zip_longest(*lists):
        yield from filter(None, turn)


class Change(NamedTuple):
    """How the files that are still to be read differ from those of the checkpoint."""

    changed: int
    added: int
    removed: int

    def __str__(self) -> str:
        """Such as "2 files changed, 1 added"; "" for no change."""
        counts = [f"{count} {what}" for what, count in self._asdict().items() if count]
        if counts:
            number, what = counts[0].split()
            counts[0] = f"{number} file{'s' * (number != '1')} {what}"
        return ", ".join(counts)


def check_held_out(saved: dict[str, list], files: Files) -> None:
    """Raises `InputError` if validation would read texts that were trained on."""
    now = files.corpus.hold_out if files.corpus else None
    if now is None or "held_out" not in saved:  # of an older version
        return
    if now.takes_from(HoldOut(*saved["held_out"] or [0.0])):
        raise InputError(
            "data: validation would read texts that were trained on before the checkpoint was saved; leave "
            "data.validation_source and the files as they were, or set validation.every=0"
        )


def check_all_same(name: str, saved: dict[str, list], files: Files) -> None:
    """Raises `InputError` unless every file is as it was saved, in the same order, under any names."""
    count = len(saved["hashes"])
    if count != len(files.names):
        raise InputError(
            f"data: changed since the checkpoint was saved: {name or 'the corpus'} had {count} files and has "
            f"{len(files.names)}; {ADVICE}"
        )
    _check_each(
        range(count), lambda i: files.is_same(i, saved["sizes"][i], saved["hashes"][i]), files.path
    )


def go_on(
    stream: DocumentStream, state: dict[str, Any], saved: dict[str, list], files: Files
) -> tuple[dict[str, Any], Change]:
    """The state of a stream over the present files, and what changed after its place.

    Args:
        stream: any stream of the corpus, with the run's seed.
        state: the saved state; "end": how far the group of documents reads that a resume reads again.
        saved: the listing at that time (`Files.state_dict`).
        files: the present listing.

    Raises:
        InputError: a file that was read has changed or is missing.
    """
    stream.load_state_dict(state)
    # The epoch's order in saved numbers: the files read, the one read in part, those ahead.
    before = state.get("order") or stream.permutation(len(saved["names"]))
    reached, cursor, digest = state.get("end") or stream.place(stream.epoch)
    if reached < 0:  # the epoch was read to its end
        reached = len(before)
    # With a cursor, the file at `reached` was read in part.
    begun = cursor is not None
    read, ahead = before[:reached], before[reached + begun :]

    # Nothing that was read may differ, except behind the cursor of the file read in part.
    now = _find_saved(saved, files, read)
    _check_each(
        read,
        lambda old: files.is_same(now[old], saved["sizes"][old], saved["hashes"][old]),
        lambda old: files.path(now[old]),
    )
    mended = False
    if begun:
        old = before[reached]
        mended = _check_begun(files, now.get(old), saved, old, cursor, digest)
        read = [*read, old]

    for old, new in now.items():
        files.likes[new] = files.likes[new] or saved["hashes"][old]
    # A file ahead may change: its size is compared for the report alone.
    changed = sum(old in now and files.sizes[now[old]] != saved["sizes"][old] for old in ahead)
    removed = sum(old not in now for old in ahead)
    added = sorted({*range(len(files.names))} - {*now.values()})

    # The rest of the epoch: the files that it would have read, and the new ones at places drawn by name.
    rest = [now[old] for old in ahead if old in now]
    if reached == len(before):
        pass  # the buffer is being emptied: another file would change what it gives
    elif stream.ordered:
        rest = sorted([*rest, *added])
    else:
        for new in added:
            rest.insert(stream.draw("added", files.names[new]) % (len(rest) + 1), new)

    order = [*(now[old] for old in read), *rest]
    # An order is saved only where the seed's permutation does not give it.
    position = {key: value for key, value in state.items() if key != "order"}
    if order != stream.permutation(len(files.names)):
        position["order"] = order
    return position, Change(changed + mended, len(added), removed)


def _find_saved(saved: dict[str, list], files: Files, read: list[int]) -> dict[int, int]:
    """Saved number → present number, by name. A file that was read is found by its content, too.

    Raises `InputError` if one is missing."""
    numbers = {name: new for new, name in enumerate(files.names)}
    now = {old: numbers[name] for old, name in enumerate(saved["names"]) if name in numbers}
    if not now and saved["sizes"] == files.sizes:
        # The corpus was moved. A shard of http(s) or the hub, without a size, is known by its name alone.
        now = {number: number for number, size in enumerate(files.sizes) if size}

    # Files without a saved name, by size, so that few of them are hashed.
    free = defaultdict(list)
    for new in sorted({*numbers.values()} - {*now.values()}):
        free[files.sizes[new]].append(new)
    for old in read:
        if old in now:
            continue
        size, saved_hash = saved["sizes"][old], saved["hashes"][old]
        candidates = free[size] if saved_hash else []
        new = next((new for new in candidates if files.is_same(new, size, saved_hash)), None)
        if new is None:
            raise InputError(
                f"{saved['names'][old]}: is missing, and was read before the checkpoint was saved; {ADVICE}"
            )
        now[old] = new
        free[size].remove(new)
    return now


def _check_each(
    numbers: Sequence[int], is_same: Callable[[int], bool], path: Callable[[int], str]
) -> None:
    """Raises `InputError` that names the first file which is not the same."""
    pool = ThreadPoolExecutor(AT_A_TIME)
    try:
        # In the order of the numbers, so the first bad file is named, whichever is hashed first.
        for number, same in zip(numbers, pool.map(is_same, numbers), strict=True):
            if not same:
                raise InputError(f"{path(number)}: {OTHER_CONTENT}; {ADVICE}")
    finally:
        pool.shutdown(cancel_futures=True)


def _check_begun(
    files: Files, number: int | None, saved: dict[str, list], old: int, cursor: Any, digest: str
) -> bool:
    """Whether the file that was read up to `cursor` has changed after it. Raises `InputError` if it changed
    before it.

    number: its present number. old: its saved one. digest: of its documents up to `cursor`."""
    if number is None:
        raise InputError(f"{saved['names'][old]}: is missing, and is read in part; {ADVICE}")
    size, saved_hash = saved["sizes"][old], saved["hashes"][old]
    shard = files.corpus.shards[number] if files.corpus else None
    # Rows can be compared in a local file; any other must be the same as a whole.
    if not isinstance(shard, FileShard):
        if not files.is_same(number, size, saved_hash):
            raise InputError(f"{files.path(number)}: {OTHER_CONTENT}; {ADVICE}")
        return False
    if saved_hash and files.is_same(number, size, saved_hash):
        return False

    if _digest_up_to(shard, cursor) != digest:
        raise InputError(
            f"{files.path(number)}: {OTHER_CONTENT}, in rows 1 to {cursor:,}, which were read; {ADVICE}"
        )
    # The rows read are the same. A known hash differed above; without one the size tells.
    return files.sizes[number] != size or bool(saved_hash)


def _digest_up_to(shard: FileShard, cursor: int) -> str:
    """The digest of a file's documents up to row `cursor`."""
    digest = ""
    for document, row in shard.read(None):
        if row > cursor:
            break
        if isinstance(document, Document):
            digest = digest_rows(digest, row, document.text)
        if row == cursor:
            break
    return digest
