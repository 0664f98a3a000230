"""One text in rows, `data.documents: joined`, and tokens that are its words."""

import pytest
import torch
from batches import same, through_json
from corpora import texts_of, write_jsonl

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.sources import Sources, open_corpora, open_corpus
from nalanda.data.tokenizer import build_tokenizer

pytestmark = pytest.mark.usefixtures("small_groups", "no_thread_left")


LINES = [
    "",
    " = Title = \n",
    "",
    *(f" the {i} word of line {i} , <unk> .\n" for i in range(40)),
    "",
]


@pytest.fixture
def lines(tmp_path) -> DataConfig:
    """Three shards of the lines of one text, as the Hub has WikiText: blank lines are empty."""
    for i, part in enumerate((LINES[:13], LINES[13:30], LINES[30:])):
        for split in ("train", "validation"):
            write_jsonl(tmp_path / "lines" / split / f"{i}.jsonl", part)
    return DataConfig(source=str(tmp_path / "lines"), documents="joined", bos=False, seq_len=16)


@pytest.fixture
def word_tokenizer(tmp_path, lines):
    return build_tokenizer(TokenizerConfig(train="words"), lines, tmp_path / "words")


@pytest.mark.parametrize("seq_len", [2, 16])  # the last row is full, or not
def test_joined_rows_predict_every_token_of_the_text_once(lines, word_tokenizer, seq_len):
    lines.seq_len = seq_len
    text = [word for line in LINES for word in (*line.split(), "</s>")]
    targets, contexts = [], []
    batches = validation_batches(lines, word_tokenizer, batch_size=1)[""]
    assert len(batches) == -(-len(text) // (seq_len - 1))
    for batch in batches:
        ids, labels, positions = (batch[key][0] for key in ("input_ids", "labels", "position_ids"))
        kept = labels[1:] != -100  # a model shifts: the first token of a row is no target
        assert kept.all() or batch is batches[-1]
        assert positions.diff()[kept].eq(1).all()  # a row is one segment
        targets += labels[1:][kept].tolist()
        contexts += ids[:-1][kept].tolist()
    assert word_tokenizer.convert_ids_to_tokens(targets) == text
    assert word_tokenizer.convert_ids_to_tokens(contexts) == ["</s>", *text[:-1]]

    said, lines.max_validation_rows = [], 3
    cut = validation_batches(lines, word_tokenizer, batch_size=1, say=said.append)[""]
    assert len(cut) == 3
    assert all(map(same, cut, batches))
    assert said == ["validation reads the beginning of the text (data.max_validation_rows: 3)"]


def test_joined_rows_of_training_are_the_same_text_in_another_order(lines, word_tokenizer):
    lines.seq_len = 6  # five targets a row
    text = [word for line in LINES for word in (*line.split(), "</s>")]
    batches = PackedBatches(lines, word_tokenizer, batch_size=1, epochs=2, seed=5)
    rows = [
        " ".join(word_tokenizer.convert_ids_to_tokens(batch["labels"][0, 1:].tolist()))
        for batch in batches
    ]
    both = text * 2
    expected = [" ".join(both[i : i + 5]) for i in range(0, len(both) - 4, 5)]
    assert sorted(rows) == sorted(expected)
    assert rows != expected
    assert all(len(batch["cu_seqlens"]) == 2 for batch in batches)  # a row is one segment


def test_joined_rows_resume_at_every_batch(lines, word_tokenizer):
    batches = PackedBatches(lines, word_tokenizer, batch_size=2, epochs=2)
    states = [(batch, through_json(batches.state_dict())) for batch in batches]
    assert len(states) > 10
    for step, (_, state) in enumerate(states):
        resumed = PackedBatches(lines, word_tokenizer, batch_size=2, epochs=2)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) == len(states) - step - 1
        assert all(same(a, b) for a, (b, _) in zip(rest, states[step + 1 :], strict=True))


def test_a_joined_file_holds_out_its_last_share(tmp_path):
    text = "".join(f"line {i} of the text\n" + "\n" * (i % 7 == 0) for i in range(3000))
    (tmp_path / "book.txt").write_text(text)
    data = DataConfig(source=str(tmp_path / "book.txt"), documents="joined", bos=False)
    (train,), (validation,) = (texts_of(corpus) for corpus in open_corpora(data).values())
    assert train + validation == text
    assert 0.02 <= len(validation) / len(text) <= 0.04
    assert train.endswith("\n\n")
    assert (
        open_corpus(data, "train").note
        == "book.txt: one text, its last 2 % are held out for validation"
    )
    assert texts_of(Sources(data, validation=False).texts("train")) == [text]


def test_joined_documents_refuse_bos_and_held_out_shares(shards):
    shards.documents = "joined"
    with pytest.raises(InputError, match=r"set data\.bos=false"):
        shards.check()
    shards.bos = False
    with pytest.raises(InputError, match=r"no validation part.*give data\.validation_source"):
        open_corpus(shards, "train")
    shards.documents = "apar"
    with pytest.raises(
        InputError, match=r"data\.documents: expected one of apart, joined; got 'apar'"
    ):
        shards.check()


def test_words_from_the_most_frequent_on(tmp_path, lines):
    write_jsonl(tmp_path / "t" / "train" / "a.jsonl", ["b a <unk> c\n", "", "a é\nd b </s> a\x1cb"])
    write_jsonl(tmp_path / "t" / "validation" / "a.jsonl", ["zebra zebra zebra"])
    corpus = DataConfig(source=str(tmp_path / "t"), bos=False)

    def vocabulary(name: str, data: DataConfig = corpus, **settings) -> list[str]:
        tokenizer = build_tokenizer(
            TokenizerConfig(train="words", **settings), data, tmp_path / name
        )
        entries = tokenizer.get_vocab()
        assert sorted(entries.values()) == list(range(len(tokenizer))), (
            "an id without a word, or with two"
        )
        return sorted(entries, key=entries.get)

    words = ["a", "b", "a\x1cb", "c", "d", "é"]
    assert vocabulary("all") == ["<unk>", "</s>", *words]
    assert vocabulary("frequent", min_count=2) == ["<unk>", "</s>", *words[:2]]
    assert vocabulary("few", vocab_size=5) == ["<unk>", "</s>", *words[:3]]
    assert vocabulary("roomy", vocab_size=500) == ["<unk>", "</s>", *words]
    with_bos = DataConfig(source=corpus.source)
    assert vocabulary("bos", with_bos) == ["<unk>", "</s>", "<s>", *words]


def test_only_words_have_no_size_of_their_own():
    assert TokenizerConfig(train="bpe").vocab_size == TokenizerConfig(path="a").vocab_size == 4096
    assert TokenizerConfig(train="words").vocab_size is None
    assert TokenizerConfig(train="words", vocab_size=99).vocab_size == 99


def test_word_tokenizer_in_use(tmp_path, lines, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr("nalanda.data.tokenizer.BPE_SAMPLE", 1)  # all words count
    config = TokenizerConfig(train="words")
    tokenizer = build_tokenizer(config, lines, tmp_path / "run" / "tokenizer")
    build_tokenizer(config, lines, tmp_path / "again")
    saved = [(tmp_path / p / "tokenizer.json").read_bytes() for p in ("run/tokenizer", "again")]
    assert saved[0] == saved[1]
    assert len(tokenizer) == len(
        {word for line in LINES for word in line.split()} | {"<unk>", "</s>"}
    )
    assert (tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.bos_token is tokenizer.pad_token is None

    monkeypatch.setattr("nalanda.data.tokenizer._train_words", None)  # not called again
    for loaded in (
        build_tokenizer(config, lines, tmp_path / "run" / "tokenizer"),
        AutoTokenizer.from_pretrained(tmp_path / "again"),
    ):
        ids = loaded(" the zebra  of\tline\n\n 3 word\n")["input_ids"]
        assert loaded.convert_ids_to_tokens(ids) == [
            *("the", "<unk>", "of", "line", "</s>", "</s>", "3", "word")
        ]
        assert loaded.decode(ids) == "the <unk> of line </s> </s> 3 word"
        assert loaded.decode(ids, skip_special_tokens=True) == "the of line 3 word"
        assert loaded("\n")["input_ids"] == []


def test_word_tokenizer_puts_bos_in_front_where_the_data_does(tmp_path, lines):
    lines.documents, lines.bos = "apart", True
    tokenizer = build_tokenizer(TokenizerConfig(train="words"), lines, tmp_path / "bos")
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the word")["input_ids"]) == [
        "<s>",
        "the",
        "word",
    ]
    batches = validation_batches(lines, tokenizer, batch_size=1)[""]
    ids = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    assert ids.count(2) == 41  # blank lines are no documents
    assert "<s> = Title = </s> <s>" in tokenizer.decode(ids)
