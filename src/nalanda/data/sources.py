"""The sources of a run, each opened once a process at most and handed on: token sets and corpora."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nalanda.config.schema import DataConfig
from nalanda.data.corpus import Corpus, MixtureShard, open_texts, source_of
from nalanda.data.documents import FileShard
from nalanda.data.token_set import SPLITS, TokenSet, is_token_set, refuse_token_set


class Source:
    """One component of the data, open: each split is a token set or a corpus.

    A split is opened at its first use. Where training and validation share the files, both are opened
    together, so the files are listed once.

    Args:
        data: checked settings without a mixture.
        validation: whether something must be held out, as in `open_texts`.
    """

    def __init__(self, data: DataConfig, validation: bool | None = None):
        self.data, self.validation = data, validation
        self._splits: dict[str, TokenSet | Corpus] = {}

    def open(self, split: str) -> TokenSet | Corpus:
        """The token set or the corpus of `split`, "train" or "validation".

        Raises:
            InputError: the source does not exist or cannot be read.
        """
        if split not in self._splits:
            self._open_split(split)
        return self._splits[split]

    def token_set(self, split: str) -> TokenSet | None:
        """The token set of `split`; None if it is read as text."""
        opened = self.open(split)
        return opened if isinstance(opened, TokenSet) else None

    def corpus(self, split: str) -> Corpus:
        """The texts of `split`. Raises `InputError` for a token set."""
        opened = self.open(split)
        if isinstance(opened, TokenSet):
            refuse_token_set(str(source_of(self.data, split)))
        return opened

    def _open_split(self, split: str) -> None:
        location = source_of(self.data, split)
        share_files = self.validation and not self.data.validation_source
        splits = SPLITS if share_files else (split,)
        if isinstance(location, str) and is_token_set(location):
            self._splits |= {each: TokenSet(location, each) for each in splits}
        else:
            self._splits |= open_texts(self.data, splits, self.validation)

    def __getstate__(self) -> dict[str, Any]:
        local = {}
        for split, opened in self._splits.items():
            shards = [] if isinstance(opened, TokenSet) else opened.shards
            if all(isinstance(shard, FileShard) for shard in shards):
                local[split] = opened
        return {**vars(self), "_splits": local}


class Sources:
    """The sources of a run by component; the only one is "".

    They may be sent to other processes, which then list no file themselves. Corpora with a shard that is
    no local file are left out, and each process opens those itself.

    Args:
        data: checked settings.
        validation: whether validation reads anything, so that something must be held out. None: a split
            decides when it is opened, as in `open_texts`.

    Attributes:
        train: the sources of training.
        validation: those of validation: the same, unless a mixture has one `validation_source` for all.
    """

    def __init__(self, data: DataConfig, *, validation: bool | None = None):
        self.data, self.validates = data, validation is not False
        self.train = {name: Source(each, validation) for name, each in data.parts().items()}
        self.validation = self.train
        if data.mixture and data.validation_source:
            held_out = replace(data, mixture=[], source=data.validation_source)
            self.validation = {"": Source(held_out, validation)}

    def open_all(self) -> Sources:
        """Opens all that training and validation read. Returns itself.

        Raises:
            InputError: a source does not exist or cannot be read.
        """
        for opened in self._open_splits():
            if isinstance(opened, Corpus):
                _ = opened.sizes  # so that no other process asks for them
        return self

    def token_sets(self) -> list[TokenSet]:
        """The token sets that training and validation read."""
        return [opened for opened in self._open_splits() if isinstance(opened, TokenSet)]

    def texts(self, split: str = "train") -> Corpus:
        """The documents of `split`, those of a mixture in proportion to their weights.

        Raises:
            InputError: a source is a token set.
        """
        components = self.train if split == "train" else self.validation
        corpora = {name: source.corpus(split) for name, source in components.items()}
        if "" in corpora:
            return corpora[""]
        return Corpus([MixtureShard(corpora, self.data.weights())])

    def _open_splits(self) -> list[TokenSet | Corpus]:
        opened = [source.open("train") for source in self.train.values()]
        if self.validates:
            opened += [source.open("validation") for source in self.validation.values()]
        return opened


def open_corpus(data: DataConfig, split: str) -> Corpus:
    """`Sources.texts` of one split."""
    return Sources(data).texts(split)


def open_corpora(data: DataConfig) -> dict[str, Corpus]:
    """`Sources.texts` of both splits."""
    sources = Sources(data, validation=True)
    return {split: sources.texts(split) for split in SPLITS}
