"""Batches of a masked language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data.packing import IGNORED, Batch
from nalanda.data.tokenizer import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Masking:
    """Chooses a share `data.mask_share` of the tokens of packed rows, which the model must recover.

    As in BERT (arXiv 1810.04805), 80 % of the chosen become the mask token, 10 % a random token, and 10 %
    stay. The draws for a row depend on the seed, the step and the row's place in it. So they are the
    same for any number of processes and after a resume, and others in each epoch. A rollback repeats them.
    Special tokens and a row's first token are never chosen.

    Raises InputError for a tokenizer without a mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, seed: int):
        if tokenizer.mask_token_id is None:
            raise InputError(
                "tokenizer: no mask token, which the model, an encoder, needs; set tokenizer.mask: true, or "
                "give a tokenizer that has one"
            )
        self.share, self.seed, self.mask = data.mask_share, seed, tokenizer.mask_token_id
        self.special = np.zeros(vocabulary_of(tokenizer), bool)
        self.special[tokenizer.all_special_ids] = True
        self.begins, self.ends = word_borders(tokenizer) if data.whole_words else (None, None)

    def __call__(
        self,
        batch: Batch,
        number: int,
        rows: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
    ) -> Batch:
        """The batch with hidden tokens in `input_ids`, and `labels` [B, T] only where a token was chosen.

        number: of the micro-batch in the run; rows: of a full one.
        """
        tokens = batch["input_ids"].numpy()  # [B, T]
        B, T = tokens.shape
        # Row i of rank r is row i·W + r of all ranks (`packing.batched`).
        numbers = [(number * rows + row) * world_size + rank for row in range(B)]
        seed = self.seed if seed is None else seed
        # A generator for each row, [3, T]; stacked [3, B, T].
        draws = np.stack([np.random.default_rng([seed, n]).random((3, T)) for n in numbers], 1)
        choice, change, other = draws  # [B, T] each, in [0, 1)
        if self.begins is not None and self.ends is not None:
            # [B, T]: a token begins a word by its own mark, or behind one that ends in white space.
            begins = self.begins[tokens]
            begins[:, 1:] |= self.ends[tokens[:, :-1]]
            # A document's and a row's first token begins a word.
            begins.reshape(-1)[batch["cu_seqlens"][:-1].numpy()] = True
            # Every token of a word takes the draw of the word's first.
            # first: the position of that token in the row [B, T], a running maximum.
            first = np.maximum.accumulate(np.where(begins, np.arange(T), 0), 1)
            choice = np.take_along_axis(choice, first, 1)

        chosen = (choice < self.share) & ~self.special[tokens]
        chosen[:, 0] = False
        # `change` divides the chosen: [0, 0.8) mask, [0.8, 0.9) a random id, the rest as they are.
        random = (other * len(self.special)).astype(tokens.dtype)
        inputs = np.where(change < 0.9, random, tokens)
        inputs = np.where(change < 0.8, self.mask, inputs)
        return batch | {
            "input_ids": torch.from_numpy(np.where(chosen, inputs, tokens)),
            "labels": torch.from_numpy(np.where(chosen, tokens, IGNORED)),
        }

    def fixed(
        self, batches: dict[str, list[Batch]], rank: int, world_size: int
    ) -> dict[str, list[Batch]]:
        """Validation batches by source, with the same choice in every pass and for every seed."""
        masked: dict[str, list[Batch]] = {}
        for source, plain in batches.items():
            masked[source] = []
            for number, batch in enumerate(plain):
                rows = len(batch["input_ids"])
                masked[source].append(self(batch, number, rows, rank, world_size, seed=0))
        return masked


def word_borders(tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """Of each id, whether a word begins with its token, and whether one ends with it; bool [vocabulary].

    Words stand between white space: `Ġ` of byte-level tokens, `▁` of SentencePiece's. In WordPiece all tokens
    without `##` begin one, and in vocabularies without any of these marks all tokens do.
    """
    # The letters of byte-level and SentencePiece's vocabularies that stand for white space.
    spaces = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r"})
    vocabulary = [*range(vocabulary_of(tokenizer))]
    pieces = [(token or "") for token in tokenizer.convert_ids_to_tokens(vocabulary)]
    spaced = [piece.translate(spaces) for piece in pieces]
    # text[0:1] and text[-1:], so an empty piece has neither.
    begins, ends = (
        np.array([text[at : at + 1 or None].isspace() for text in spaced]) for at in (0, -1)
    )
    # A vocabulary has one kind of marks; without any, each token is a word.
    if any(piece.startswith("##") for piece in pieces):
        begins = np.array([not piece.startswith("##") for piece in pieces])
    elif not begins.any():
        begins = ~begins
    special = tokenizer.all_special_ids
    begins[special] = ends[special] = True
    return begins, ends
