"""Settings that take the place of a recipe's where a token set is made."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DocumentOptions:
    """Settings of `data` in place of a recipe's; None keeps the recipe's."""

    validation_share: float | None = None
    """Share of documents to hold out if the source has no validation part."""
    text_field: str | None = None
    """Field of a record with its text."""
    source_field: str | None = None
    """Field of a record with its source, such as meta.source."""
    name: str | None = None
    """Hub: configuration of the dataset."""
    revision: str | None = None
    """Hub: commit, tag or branch; a commit pins the files."""
    bos: bool | None = None
    """Put bos before every document."""
    eos: bool | None = None
    """Put eos after every document."""


@dataclass(frozen=True)
class TokenizerOptions:
    """Settings of `tokenizer` in place of a recipe's; None keeps the recipe's."""

    path: str | None = None
    """Directory, hub id or file of a tokenizer; by default one is trained."""
    train: str | None = None
    """Kind of tokenizer to train on the documents: bpe or words."""
    vocab_size: int | None = None
    """Size of the trained tokenizer."""
