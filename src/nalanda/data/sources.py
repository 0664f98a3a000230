"""The sources of a run, opened once: its corpora and token sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from nalanda.config.schema import DataConfig
from nalanda.data.corpus import Corpus, open_corpora, open_corpus, source_of
from nalanda.data.documents import FileShard
from nalanda.data.token_set import TokenSet, is_token_set


class Sources:
    """Opens each source when it is first asked for, and keeps it open.

    It may be sent to other processes, which then list no file themselves. What is read over a network is left
    out of it: every process opens that itself.
    """

    def __init__(self) -> None:
        self.validation: bool | None = None
        """Whether something must be held out, as in `open_corpora`."""
        self._opened: dict[tuple[str, str, str], Any] = {}

    def corpus(self, data: DataConfig, split: str) -> Corpus:
        """`open_corpus`."""
        return self._once("corpus", data, split, partial(open_corpus, validation=self.validation))

    def token_set(self, data: DataConfig, split: str) -> TokenSet | None:
        """The source of `split` if it is a token set, else None."""
        return self._once("tokens", data, split, _open_set)

    def open_all(self, data: DataConfig, *, validation: bool) -> Sources:
        """Opens what training reads, and with `validation` also that. Returns itself.

        Raises:
            InputError: a source does not exist or cannot be read.
        """
        self.validation = validation
        held_out = validation_parts(data) if validation else {}
        for name, part in data.parts().items():
            if self.token_set(part, "train"):
                continue
            if held_out.get(name) != part or self.token_set(part, "validation"):
                self.corpus(part, "train")
                continue
            for split, corpus in open_corpora(part, validation=validation).items():
                self._opened["corpus", repr(part), split] = corpus
        for part in held_out.values():
            if not self.token_set(part, "validation"):
                self.corpus(part, "validation")
        for found in self._opened.values():
            if isinstance(found, Corpus):
                _ = found.sizes  # so that no other process asks for them
        return self

    def _once(
        self, kind: str, data: DataConfig, split: str, opened: Callable[[DataConfig, str], Any]
    ) -> Any:
        key = kind, repr(data), split
        if key not in self._opened:
            self._opened[key] = opened(data, split)
        return self._opened[key]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "validation": self.validation,
            "_opened": {key: found for key, found in self._opened.items() if _can_be_sent(found)},
        }


def _can_be_sent(found: Any) -> bool:
    return not isinstance(found, Corpus) or all(
        isinstance(shard, FileShard) for shard in found.shards
    )


def _open_set(data: DataConfig, split: str) -> TokenSet | None:
    source = source_of(data, split)
    return TokenSet(source, split) if isinstance(source, str) and is_token_set(source) else None


def validation_parts(data: DataConfig) -> dict[str, DataConfig]:
    """The validation settings by component; a mixture may have one `validation_source` for all."""
    if data.mixture and data.validation_source:
        return {"": replace(data, mixture=[], source=data.validation_source)}
    return data.parts()
