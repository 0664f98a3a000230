"""Documents that are held out of a corpus without a validation part, and the cut of a lone text."""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nalanda.common.errors import InputError
from nalanda.data.documents import (
    Document,
    FileShard,
    Left,
    Shard,
    hash_text,
    identity_of_shard,
    not_blank,
)

PIECE = 8192
"""Most characters of a document that is cut out of a lone text."""

SMALL = 64 << 20
"""Most bytes of files that are read at the start, to see whether a document is held out."""

NONE = 1e-6
"""Share below which training alone holds nothing out for the sake of holding something out."""


# ------------------------------ a lone text


def cut_place(text: str, start: int, stop: int) -> int:
    """The position of a cut behind `start` and at most at `stop`.

    It lies behind the last blank line in between, or else the last line end, or else the last space, or else
    at `stop`.
    """
    for pattern in (r"\n\s*\n", r"\n", r"\s"):
        spaces = [*re.compile(pattern).finditer(text, start, stop)]
        if spaces:
            return spaces[-1].end()
    return stop


def cut_text(text: str) -> Iterator[str]:
    """Cuts the text into pieces of up to `PIECE` characters; white space between two pieces ends the first."""
    start = 0
    while len(text) - start > PIECE:
        # A piece is at least half full.
        stop = cut_place(text, start + PIECE // 2, start + PIECE)
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


@dataclass(frozen=True)
class CutFile(FileShard):
    """A lone file of text, cut into documents. The cursor is the number of pieces read."""

    @property
    def single(self) -> bool:
        return False

    def read(self, cursor: int | None) -> Iterator[tuple[Document | Left, int]]:
        for document, _ in super().read(None):
            for number, piece in enumerate(cut_document(document), 1):
                if number > (cursor or 0):
                    yield piece, number


@dataclass(frozen=True)
class CutShard:
    """A lone text that is no local file, cut into documents.

    The cursor is that of `shard` behind its text, and the number of pieces read.
    """

    single = False
    size = None
    shard: Shard

    @property
    def name(self) -> str:
        return identity_of_shard(self.shard)

    def read(self, cursor: list | None) -> Iterator[tuple[Document | Left, list]]:
        behind, read = cursor or (None, 0)
        if behind is not None:
            next(self.shard.read(behind), None)  # refuses a text that has changed
        for document, after in self.shard.read(None):
            for number, piece in enumerate(cut_document(document), 1):
                if number > read:
                    yield piece, [after, number]


def cut_document(document: Document | Left) -> Iterator[Document | Left]:
    """The pieces of a document; one that was left out stays one."""
    if isinstance(document, Left):
        yield document
    else:
        yield from (Document(text, document.source) for text in cut_text(document.text))


def cut_shard(shard: Shard) -> Shard:
    """The shard of a lone text, cut into documents."""
    if isinstance(shard, FileShard):
        return CutFile(shard.path, shard.name, shard.fields)
    return CutShard(shard)


# ------------------------------ held out


class HoldOut(NamedTuple):
    """The choice of documents, or of a part of a single one, for validation.

    The hash of a text decides, so all its copies are in one split, whatever other files there are.
    """

    share: float
    more: str = ""
    """Hash of a text that is held out although it does not fall under the share."""
    less: str = ""
    """Hash of a text that is trained on although it falls under the share."""
    tail: bool = False
    """Whether the last share of every text is held out: there is only one, and its copies."""

    def part(self, text: str, split: str) -> str | None:
        """The part of a document that belongs to `split`, or None."""
        if not not_blank(text):
            return None

        if self.tail:
            start = _tail_start(text, self.share)
            text = text[start:] if split == "validation" else text[:start]
            return text or None

        in_split = self.holds(hash_text(text)) == (split == "validation")
        return text if in_split else None

    def holds(self, number: int) -> bool:
        """Whether the text of this hash is for validation."""
        if self.more or self.less:
            name = _to_hex(number)
            if name in (self.more, self.less):
                return name == self.more
        return number < self.share * 2**64  # hashes are 64 bits

    def takes_from(self, before: HoldOut) -> bool:
        """Whether it holds out a text that the choice `before` left for training. Added texts do not count."""
        # `more` is the lowest hash. A lower one than before is that of an added text.
        more = self.more and (not before.more or self.more > before.more)
        return bool(more) or self.share > before.share or self.tail > before.tail


def _tail_start(text: str, share: float) -> int:
    """The position where the last share of a text begins.

    Both parts have more than white space, unless the text has a single character.
    """
    # [left, right): the text without the white space around it.
    left = len(text) - len(text.lstrip())
    right = len(text.rstrip())
    size = right - left
    wanted = max(1, round(size * share))
    # The first part keeps at least one character.
    stop = max(left + 1, right - wanted)
    start = max(left + size // 2, stop - max(256, wanted))  # a better place, at most so far before
    return cut_place(text, start, stop) if start < stop else stop


def choose(
    shards: Sequence[Shard], share: float, *, validation: bool, joined: bool = False
) -> tuple[HoldOut, str]:
    """Chooses the documents of these shards to hold out. Returns the choice, and a line about it.

    The line is "" without validation.

    Of one text that is read joined, the last share. Of a small corpus at least one document stays for
    training: that of the highest hash, if all fall under the share. With `validation` at least one is held
    out: that of the lowest hash, if none falls under the share. Of a single document the last share is.
    """
    lone = isinstance(shards[0], (CutFile, CutShard))
    if joined:
        line = f"{_name_of(shards[0])}: one text, {_last_share(share)}"
        return (HoldOut(share, tail=True), line) if validation else (HoldOut(0.0), "")

    # A large corpus surely has documents on both sides of the share.
    hold_out = HoldOut(share)
    how = ""
    usual = f"{100 * share:.3g} % of the documents are held out for validation" * validation
    sizes = [shard.size for shard in shards if isinstance(shard, FileShard)]
    if sum(sizes) > SMALL or not (lone or len(sizes) == len(shards)):
        return hold_out, usual

    hashes = _hash_texts(shards, hold_out, validation, lone)
    held = sum(map(hold_out.holds, hashes))
    # Copies of one text are one document: the hash cannot divide them.
    single = len(set(hashes)) == 1
    if single and validation:
        name = f"{_name_of(shards[0])}: " if lone else ""
        return HoldOut(share, tail=True), f"{name}1 document, {_last_share(share)}"

    # One document more or less, so that both splits have one.
    if hashes and held == len(hashes):
        hold_out = HoldOut(0.0) if single else HoldOut(share, less=_to_hex(max(hashes)))
        how = f" (all fell under validation_share {share:g})"
    elif hashes and validation and not held:
        hold_out = HoldOut(share, more=_to_hex(min(hashes)))
        how = f" (none fell under validation_share {share:g})"
    elif not lone:
        return hold_out, usual

    line = f"{len(hashes):,} document{'s' * (len(hashes) != 1)}"
    if lone:
        line = f"{_name_of(shards[0])}: 1 file cut into {line}"
    held = sum(map(hold_out.holds, hashes))
    return hold_out, f"{line}, {held:,} held out for validation{how}"


def _hash_texts(shards: Sequence[Shard], hold_out: HoldOut, validation: bool, lone: bool) -> array:
    """The hashes of the texts.

    Of a lone text they are all; of other shards only those that are needed to see that the share is enough.
    """
    hashes = array("Q")
    missing = {False, True} if validation else {False}
    for shard in shards:
        # A damaged file of several is named later, when it is read.
        damage = contextlib.nullcontext() if lone else contextlib.suppress(InputError)
        with damage:
            for document, _ in shard.read(None):
                if isinstance(document, Left) or not not_blank(document.text):
                    continue
                hashes.append(hash_text(document.text))
                missing.discard(hold_out.holds(hashes[-1]))
                if not missing and not lone:
                    return hashes
    return hashes


def _to_hex(number: int) -> str:
    return f"{number:016x}"


def _last_share(share: float) -> str:
    return f"its last {100 * share:g} % are held out for validation"


def _name_of(shard: Shard) -> str:
    return shard.path.name if isinstance(shard, FileShard) else identity_of_shard(shard)
