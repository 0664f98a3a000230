"""Tokenizers that are trained or read from files, and settings that cannot work."""

import pytest
from corpora import write_jsonl

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data import packing
from nalanda.data.loader import PackedBatches
from nalanda.data.python_docs import python_documents
from nalanda.data.sources import open_corpus
from nalanda.data.tokenizer import build_tokenizer, check_vocabulary

pytestmark = pytest.mark.usefixtures("small_groups", "no_thread_left")


@pytest.fixture
def prose(tmp_path, monkeypatch) -> DataConfig:
    monkeypatch.setattr(packing, "STREAM_GROUP", 1 << 19)
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 1 << 19)
    documents = python_documents({"json", "heapq", "abc"})
    write_jsonl(tmp_path / "prose" / "a.jsonl", list(documents.values()))
    return DataConfig(source=str(tmp_path / "prose"), seq_len=64, validation_share=0.3)


def test_trained_tokenizer_is_deterministic_and_reloaded(tmp_path, prose, monkeypatch):
    config = TokenizerConfig(train="bpe", vocab_size=500)
    tokenizer = build_tokenizer(config, prose, tmp_path / "run" / "tokenizer")
    build_tokenizer(config, prose, tmp_path / "again")
    saved = [(tmp_path / p / "tokenizer.json").read_bytes() for p in ("run/tokenizer", "again")]
    assert saved[0] == saved[1]
    assert not list(tmp_path.rglob("*.partial"))
    assert len(tokenizer) == 500
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.pad_token is None
    text = "def f(x):\n    return 'Größe 漢字 \x00'  # ok"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:]) == text
    assert set(tokenizer(text)) == {"input_ids", "attention_mask"}

    monkeypatch.setattr("nalanda.data.tokenizer._train_bpe", None)  # not called again
    reloaded = build_tokenizer(config, prose, tmp_path / "run" / "tokenizer")
    assert reloaded(text) == tokenizer(text)
    for path in (tmp_path / "again", tmp_path / "again" / "tokenizer.json"):
        named = build_tokenizer(TokenizerConfig(path=str(path)), prose, tmp_path / "unused")
        assert named(text) == tokenizer(text)
        assert named.eos_token_id == 0
    assert not (tmp_path / "unused").exists()


def test_lone_tokenizer_json_has_its_special_tokens(tmp_path, bpe_of_bytes, prose):
    path = tmp_path / "my.json"
    bpe_of_bytes.backend_tokenizer.save(str(path))
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path)), prose, tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|endoftext|>")


def test_tokenizer_is_trained_on_the_training_part_alone(tmp_path, prose):
    texts = [f"{word} {i} " + f"{word} " * 50 for i in range(30) for word in ("alpha", "beta")]
    write_jsonl(tmp_path / "t" / "train" / "a.jsonl", [t for t in texts if "alpha" in t])
    write_jsonl(tmp_path / "t" / "validation" / "a.jsonl", [t for t in texts if "beta" in t])
    config = DataConfig(source=str(tmp_path / "t"))
    vocabulary = build_tokenizer(
        TokenizerConfig(train="bpe", vocab_size=270), config, tmp_path / "x"
    ).get_vocab()
    assert "Ġalpha" in vocabulary
    assert not {"be", "ta", "et", "eta", "Ġb"} & vocabulary.keys()


def test_sentencepiece_models(tmp_path, prose):
    import sentencepiece

    texts = list(open_corpus(prose, "train").once().texts())

    def train(name: str, **options) -> str:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("\n".join(texts).splitlines()),
            model_prefix=str(tmp_path / name),
            vocab_size=500,
            byte_fallback=True,
            minloglevel=2,
            **options,
        )
        return str(tmp_path / f"{name}.model")

    exact = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    path = train("llama", model_type="bpe", **exact)
    tokenizer = build_tokenizer(TokenizerConfig(path=path), prose, tmp_path / "unused")
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    assert len(tokenizer) == 500
    for text in [*texts, "  two  spaces\n\n\tGröße 漢字"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == model.encode(text)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer("a")["input_ids"][0] == 1
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = build_tokenizer(
        TokenizerConfig(path=str(tmp_path / "saved")), prose, tmp_path / "unused"
    )
    assert saved(texts[0]) == tokenizer(texts[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either path"),
        ({"path": "a", "train": "bpe"}, "give either path"),
        ({"train": "wordpiece"}, "expected one of bpe, words; got 'wordpiece'"),
        ({"train": "bpe", "vocab_size": 256}, "needs 257 or more"),
        ({"train": "words", "vocab_size": 3}, "expected 4 to 10,000,000, got 3"),
        ({"train": "words", "min_count": 0}, "min_count: expected 1 or more, got 0"),
        ({"train": "bpe", "min_count": 2}, "only train: words counts words"),
        ({"path": "./nowhere"}, "./nowhere does not exist; give a folder"),
    ],
)
def test_tokenizers_that_cannot_work(tmp_path, settings, message):
    with pytest.raises(InputError, match=message) as caught:
        build_tokenizer(TokenizerConfig(**settings), DataConfig(source="python"), tmp_path)
    assert "\n" not in str(caught.value)


def test_vocabulary_larger_than_the_models_is_refused(bpe_of_bytes):
    check_vocabulary(bpe_of_bytes, 257)
    with pytest.raises(InputError, match="257 tokens and the model's vocab_size is 256"):
        check_vocabulary(bpe_of_bytes, 256)


def test_a_tokenizer_without_bos(bpe_of_bytes, shards):
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(
        tokenizer_object=bpe_of_bytes.backend_tokenizer, eos_token="<|endoftext|>"
    )
    with pytest.raises(InputError, match=r"no bos token; set data\.bos=false"):
        PackedBatches(shards, bare, batch_size=1)
    neither = PreTrainedTokenizerFast(tokenizer_object=bpe_of_bytes.backend_tokenizer)
    both = r"no bos and no eos token; set data\.bos=false data\.eos=false"
    with pytest.raises(InputError, match=both):
        PackedBatches(shards, neither, batch_size=1)
    shards.bos = False
    assert PackedBatches(shards, bare, batch_size=1)
