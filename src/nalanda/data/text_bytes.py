"""UTF-8 bytes of the text behind tokens, the unit of bits a byte."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from nalanda.data.tokenizer import fast_backend, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextBytes:
    """UTF-8 bytes that each token adds to the text; special tokens (bos, eos, unknown) add none.

    A text may spell one, as `<|endoftext|>` between stories. Its bytes are then missing, because rows do not
    tell it from one that was added. With the text at hand, take `of_text`.

    The bytes of a document's tokens add up to those of its text, wherever rows cut it and whichever tokenizer
    made them. They are exact for the tokenizers that keep every byte: byte-level ones, and SentencePiece's
    with byte fallback. (The latter's first piece of a text has a space that the text lacks.) If a tokenizer
    normalises the text (NFC), the normalised text counts.
    """

    def __init__(
        self, inside: np.ndarray, first: np.ndarray, special: np.ndarray, spelled: np.ndarray
    ):
        """Tables [vocabulary]: bytes of a token inside a text and at its beginning; whether it is special;
        the bytes of a special token's name."""
        self.inside, self.first, self.special, self.spelled = inside, first, special, spelled

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """The bytes of each token, int64 [..., T]: a text begins at the first and after special tokens."""
        begins = np.ones(tokens.shape, bool)
        begins[..., 1:] = self.special[tokens[..., :-1]]
        return np.where(begins, self.first[tokens], self.inside[tokens])

    def of_text(self, tokens: np.ndarray) -> np.ndarray:
        """The bytes of each token of a text, int64 [T]: special tokens are those that the text spells."""
        return self(tokens) + self.spelled[tokens]


def text_bytes(tokenizer: PreTrainedTokenizerBase) -> TextBytes | None:
    """The bytes behind a tokenizer's tokens, or None if it loses some, as words without their spaces do."""
    if not tokenizer.is_fast:
        return None
    backend = fast_backend(tokenizer)
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
    kinds = re.findall(r'"type": ?"(\w+)"', decoder)
    byte_level, ids = "ByteLevel" in kinds, range(vocabulary_of(tokenizer))
    if not byte_level and "ByteFallback" not in kinds:
        return None

    added: dict[int, Any] = backend.get_added_tokens_decoder()
    special_ids = {*tokenizer.all_special_ids, *(i for i in added if added[i].special)}
    # Tables over the vocabulary, [V] each.
    special = np.zeros(len(ids), bool)
    special[[i for i in special_ids if i in ids]] = True

    pieces = [backend.id_to_token(i) or "" for i in ids]
    if byte_level:  # a letter of a piece stands for a byte
        inside = np.array([len(piece) for piece in pieces])
        # An added token stands for its own text, not for letters of bytes.
        inside[[*added]] = [len(added[i].content.encode()) for i in added]
        first = inside
    else:
        # A piece alone is the first of a text; behind a letter's piece it is inside one.
        alone = backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
        letter = next(i for i in ids if re.fullmatch("[0-9A-Za-z]", alone[i]))
        after = backend.decode_batch([[letter, i] for i in ids], skip_special_tokens=False)
        byte = np.array([bool(re.fullmatch("<0x[0-9A-F]{2}>", piece)) for piece in pieces])
        # A byte's piece alone may be no valid text, so its decoding does not count.
        first = np.where(byte, 1, [len(text.encode()) for text in alone])
        inside = np.where(byte, 1, [len(text.encode()) - 1 for text in after])

    spelled = np.zeros(len(ids), int)
    for i in np.flatnonzero(special):
        if i != tokenizer.unk_token_id and i in added:
            spelled[i] = len(added[i].content.encode())
    return TextBytes(np.where(special, 0, inside), np.where(special, 0, first), special, spelled)
