"""Bytes of the text behind tokens: those of the texts, whichever tokenizer made the tokens."""

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.loader import validation_batches
from nalanda.data.text_bytes import text_bytes
from nalanda.data.tokenizer import build_tokenizer, encoder
from nalanda.train.loss import count_bytes, validate

TEXTS = [
    "Größe 漢字 🙂 naïve, and  two spaces",
    " begins with a space",
    "\n\ttabs\r\nand lines\n",
    "e\u0301 decomposed, 👩‍👩‍👧 joined, \u200b zero width",
    "a",
]


@pytest.fixture(scope="module", params=["bytes", "bpe", "mistral"])
def tokenized(request, tokenizer, tmp_path_factory):
    """A tokenizer, and whether documents begin with bos."""
    if request.param == "bytes":
        return tokenizer
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_bytes("".join(TEXTS * 3).encode())
    if request.param == "mistral":
        pytest.importorskip("mistral_common")
        config = TokenizerConfig(path="mistral")
    else:
        config = TokenizerConfig(train="bpe", vocab_size=300)
    return build_tokenizer(
        config, DataConfig(source=str(folder / "text.txt")), folder / "tokenizer"
    )


@pytest.fixture(scope="module")
def sizes(tokenized):
    return text_bytes(tokenized)


@pytest.mark.slow
@pytest.mark.parametrize("bos", [True, False])
def test_the_bytes_of_tokens_are_those_of_the_text(tokenized, sizes, bos):
    for tokens, text in zip(encoder(tokenized, DataConfig(bos=bos))(TEXTS), TEXTS, strict=True):
        found = sizes(tokens)
        assert found.sum() == len(text.encode()), text
        assert found[-1] == 0  # eos
        assert (found[2:-1] > 0).all()
    # A line of documents: the same sum, however it is cut.
    line = np.concatenate(encoder(tokenized, DataConfig(bos=bos))(TEXTS))
    assert sizes(line).sum() == sum(len(text.encode()) for text in TEXTS)


def test_added_tokens_count_unless_they_are_special(tokenizer):
    import copy

    changed = copy.deepcopy(tokenizer)
    changed.add_tokens([AddedToken("größer", special=False), AddedToken("<mark>", special=True)])
    tokens = np.array(changed("größer <mark>é", add_special_tokens=False).input_ids)
    assert text_bytes(changed)(tokens).tolist() == [8, 1, 0, 1, 1]


def test_a_tokenizer_that_loses_text_has_no_bytes(tmp_path):
    (tmp_path / "text.txt").write_text("some words are rare", encoding="utf-8")
    data = DataConfig(source=str(tmp_path / "text.txt"))
    words = build_tokenizer(TokenizerConfig(train="words"), data, tmp_path / "tokenizer")
    assert text_bytes(words) is None


class Uniform(torch.nn.Module):
    """Gives every token the same probability."""

    device = torch.device("cpu")

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary
        self.config = type("Config", (), {"model_type": "uniform"})

    def forward(self, input_ids, **_):
        return type("Out", (), {"logits": torch.zeros(*input_ids.shape, self.vocabulary)})


class Alone:
    device = torch.device("cpu")

    def reduce(self, value):
        return value


@pytest.mark.slow
def test_bits_per_byte_of_validation(tokenized, sizes, tmp_path):
    """The direct computation: predicted bytes are those of all tokens but the first of each segment."""
    (tmp_path / "validation.jsonl").write_bytes(
        b"".join(
            f'{{"text": "{text}"}}\n'.encode() for text in (TEXTS[0], TEXTS[1], "größer 漢字 " * 9)
        )
    )
    texts = [TEXTS[0], TEXTS[1], "größer 漢字 " * 9]
    path = str(tmp_path / "validation.jsonl")
    (tmp_path / "train.jsonl").write_text('{"text": "other"}\n')
    data = DataConfig(
        source=str(tmp_path / "train.jsonl"), validation_source=path, seq_len=32, workers=0
    )
    batches = validation_batches(data, tokenized, batch_size=2)
    values = validate(Alone(), Uniform(len(tokenized)), batches, sizes)

    encoded = encoder(tokenized, data)(texts)
    line, starts = np.concatenate(encoded), np.cumsum([0, *map(len, encoded)])
    first = {*starts.tolist(), *range(0, len(line), 32)}
    predicted = [i for i in range(len(line)) if i not in first]
    size = int(sizes(line)[predicted].sum())
    lost = sum(len(text.encode()) for text in texts) - size
    assert 0 <= lost <= 4 * len(range(0, len(line), 32)) + 8  # what rows cut: one token each
    assert size == sum(count_bytes(batch, sizes) for batch in batches[""])
    nats = len(predicted) * np.log(len(tokenized))
    assert values["val_bpb"] == pytest.approx(nats / np.log(2) / size, rel=1e-6)
    assert "val_bpb" not in validate(Alone(), Uniform(len(tokenized)), batches)
