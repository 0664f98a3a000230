"""Sources of a token set: layouts, large and damaged files, odd documents."""

import gzip
import itertools
import json

import numpy as np
import pytest
from corpora import bytes_of, corpus, held_out, lines, records

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.documents import Document, hash_text
from nalanda.data.inspect import inspect
from nalanda.data.prepare import prepare
from nalanda.data.prepare_run import Preparation
from nalanda.data.readers import READERS
from nalanda.data.sources import open_corpora
from nalanda.data.token_set import TokenSet, is_token_set
from nalanda.data.tokenizer import encoder


def test_slimpajamas_layout(tmp_path, byte_tokenizer):
    for part, rows in {"train": 40, "validation": 7, "test": 5}.items():
        corpus(tmp_path / "in" / part / "chunk1", files=2, rows=rows)
    index = prepare(DataConfig(source=str(tmp_path / "in")), byte_tokenizer, tmp_path / "out")
    assert [index[split]["documents"] for split in ("train", "validation")] == [80, 14]
    assert "test" not in index
    assert index["train"]["shards"][0]["name"] == "00000"
    assert "validation_share" not in index["settings"]


def test_two_folders_of_equal_names_and_sizes_are_both_prepared(tmp_path, byte_tokenizer):
    for part, letter in (("a", "x"), ("b", "y")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "data.jsonl").write_bytes(lines([{"text": letter * 8}] * 20))
    data = DataConfig(source=str(tmp_path / "a"), validation_source=str(tmp_path / "b"))
    for _ in range(2):  # the second time it is finished
        index = prepare(data, byte_tokenizer, tmp_path / "out")
        assert [index[split]["documents"] for split in ("train", "validation")] == [20, 20]


@pytest.mark.parametrize("source", ["few", "one", "book.txt"])
def test_training_and_preparation_hold_the_same_out(tmp_path, tokenizer, byte_tokenizer, source):
    for name, count in (("few", 9), ("one", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(lines(records(count, 3)))
    (tmp_path / "book.txt").write_text(
        "".join(f"paragraph {i}\n\n" + "words " * 700 for i in range(20))
    )
    data = DataConfig(
        source=str(tmp_path / source), validation_share=1e-9 if source == "few" else 0.02
    )
    said: list[str] = []
    prepare(data, byte_tokenizer, tmp_path / "out", say=said.append)
    encode = encoder(tokenizer, data)
    for split, opened in open_corpora(data).items():
        assert opened.note in said
        assert opened.note
        opened.ordered = True
        texts = opened.once().texts()
        expected = np.concatenate(encode(list(texts)))
        found = TokenSet(tmp_path / "out", split)
        np.testing.assert_array_equal(found.read(0, found.tokens), expected)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("workers", [1, 2])
def test_documents_that_are_too_large(tmp_path, byte_tokenizer, capsys, suffix, workers):
    """A file that is cut into shards, with long lines across the cuts, and one that cannot be cut."""
    rows = records(60)
    for i in (20, 21, 59):
        rows[i]["text"] = "x" * 5000
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(gzip.compress(lines(rows)) if suffix else lines(rows))
    data = DataConfig(source=str(path), validation_share=0.1, max_document_bytes=1000)
    with pytest.raises(
        InputError, match=r"in\.jsonl.*, line (21|60): a document of more than 1,000 bytes"
    ):
        prepare(data, byte_tokenizer, tmp_path / "refused", shard_bytes=900, workers=workers)
    data.oversized = "skip"
    index = prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=900, workers=workers)
    assert index["skipped"] == 3
    kept = [r for r in rows if len(r["text"]) < 1000 and not held_out(r["text"], 0.1)]
    found = TokenSet(tmp_path / "out", "train")
    assert [bytes_of(found.document(i)[0]) for i in range(found.documents)] == [
        r["text"] for r in kept
    ]
    capsys.readouterr()
    inspect(tmp_path / "out", verify=True)
    shown = capsys.readouterr().out
    assert "3 documents above data.max_document_bytes were left out" in shown
    data.max_document_bytes = 2000
    with pytest.raises(
        InputError, match="was prepared with max_document_bytes 1000, and this is 2000"
    ):
        prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=900)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_corrupt_input_is_named_and_the_rest_prepared(tmp_path, byte_tokenizer, workers, capsys):
    source = corpus(tmp_path / "in")
    content = (source / "2.jsonl").read_bytes().splitlines(keepends=True)
    (source / "2.jsonl").write_bytes(b"".join([*content[:30], b'{"text": "cut\n', *content[31:]]))
    data, out = DataConfig(source=str(source)), tmp_path / "out"
    with pytest.raises(
        InputError, match=r"2\.jsonl, line 31: not JSON.* shards are finished and kept"
    ) as error:
        prepare(data, byte_tokenizer, out, shard_bytes=1500, workers=workers)
    assert "\n" not in str(error.value)
    assert "2.jsonl, line 31" in capsys.readouterr().err
    jobs = len(Preparation(out).jobs)
    assert len(list(out.glob("preparing/0*.json"))) == jobs - 1
    assert not is_token_set(out)


def test_a_huge_file_is_cut(tmp_path, byte_tokenizer):
    """Every line once, for cuts inside a line, inside a character and at a line's end."""
    rows = records(60)
    (tmp_path / "in.jsonl").write_bytes(lines(rows)[:-1])  # the last line has no end
    data = DataConfig(source=str(tmp_path / "in.jsonl"), validation_share=0.1)
    rows = [r for r in rows if not held_out(r["text"], 0.1)]
    sizes = np.cumsum([len(lines([r])) for r in records(60)])
    for limit in (97, 101, 1000, int(sizes[9]), int(sizes[9]) - 1, int(sizes[9]) + 1):
        out = tmp_path / f"out{limit}"
        index = prepare(data, byte_tokenizer, out, shard_bytes=limit)
        found = TokenSet(out, "train")
        assert found.documents == len(rows)
        given = [bytes_of(found.document(i)[0]) for i in range(found.documents)]
        assert given == [r["text"] for r in rows]
    assert len(index["train"]["shards"]) > 5


def test_a_huge_file_is_read_by_a_plugins_reader(tmp_path, byte_tokenizer, tokenizer, monkeypatch):
    def read(path, fields, start):
        for row, line in enumerate(path.read_text().splitlines(), 1):
            if row > start:
                yield Document(json.loads(line)["answer"]), row

    monkeypatch.setitem(READERS, ".chat.jsonl", read)
    rows = [
        {"text": f"question {i}", "answer": f"answer {i}" + " and so on" * 40} for i in range(90)
    ]
    (tmp_path / "a.chat.jsonl").write_bytes(lines(rows))
    prepare(
        DataConfig(source=f"{tmp_path}/*.jsonl"), byte_tokenizer, tmp_path / "out", shard_bytes=3000
    )
    found = TokenSet(tmp_path / "out", "train")
    assert found.documents > 80
    assert all("answer" in tokenizer.decode(found.document(i)[0]) for i in range(found.documents))


def test_a_huge_file_names_its_line(tmp_path, byte_tokenizer):
    rows = lines(records(60)).splitlines(keepends=True)
    rows[47] = b'{"txt": "no text"}\n'
    (tmp_path / "in.jsonl").write_bytes(b"".join([*rows[:20], b"\n", *rows[20:]]))
    with pytest.raises(InputError, match=r"in\.jsonl, line 49: no field 'text'"):
        prepare(
            DataConfig(source=str(tmp_path / "in.jsonl")),
            byte_tokenizer,
            tmp_path / "out",
            shard_bytes=500,
        )


def test_parquet_by_row_groups(tmp_path, byte_tokenizer):
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    table = pyarrow.Table.from_pylist(records(90))
    parquet.write_table(table, tmp_path / "in/a.parquet", row_group_size=20)
    parquet.write_table(table, tmp_path / "in/b.parquet")
    data = DataConfig(source=str(tmp_path / "in"))
    index = prepare(data, byte_tokenizer, tmp_path / "cut", shard_bytes=600)
    assert len(index["train"]["shards"]) == 6
    cut = TokenSet(tmp_path / "cut", "train")
    prepare(data, byte_tokenizer, tmp_path / "whole")
    whole = TokenSet(tmp_path / "whole", "train")
    np.testing.assert_array_equal(cut.read(0, cut.tokens), whole.read(0, whole.tokens))
    assert (
        whole.documents
        == cut.documents
        == 2 * sum(not held_out(r["text"], 0.02) for r in records(90))
    )


def test_half_a_surrogate_as_a_source(tmp_path, byte_tokenizer):
    rows = [{**record, "meta": {"redpajama_set_name": "\ud800"}} for record in records(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = prepare(DataConfig(source=str(tmp_path / "a.jsonl")), byte_tokenizer, tmp_path / "out")
    assert index["sources"] == ["?"]
    assert TokenSet(tmp_path / "out", "train").document(0)[1] == "?"


def test_documents_without_tokens_are_left_out(tmp_path):
    """Blank documents are not read; one whose words all vanish has no tokens and no start."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, "<unk>"))
    backend.normalizer = normalizers.Replace("gone", "")
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(
        tmp_path / "tokenizer"
    )
    texts = ["gone", "a a", "gone gone", " ", "a", "gone"]
    (tmp_path / "in.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    data = DataConfig(
        source=str(tmp_path / "in.jsonl"), bos=False, eos=False, validation_share=1e-9
    )
    prepare(data, TokenizerConfig(path=str(tmp_path / "tokenizer")), tmp_path / "out")
    found = TokenSet(tmp_path / "out", "train")
    lowest = min(texts[:3] + texts[4:], key=hash_text)
    left = [words for text in texts if text != lowest and (words := text.count("a"))]
    assert (found.documents, found.tokens) == (len(left), sum(left))
    assert found.starts(0, found.tokens).tolist() == [0, *itertools.accumulate(left)][:-1]
    if lowest.startswith("gone"):
        with pytest.raises(InputError, match="no documents for validation"):
            TokenSet(tmp_path / "out", "validation")


def test_an_empty_corpus_is_refused(tmp_path, byte_tokenizer):
    (tmp_path / "in.jsonl").write_bytes(lines([{"text": " "}]))
    with pytest.raises(InputError, match="no document with text"):
        prepare(DataConfig(source=str(tmp_path / "in.jsonl")), byte_tokenizer, tmp_path / "out")
    assert not is_token_set(tmp_path / "out")


def test_joined_documents_are_refused_before_the_work(tmp_path, byte_tokenizer):
    data = DataConfig(source="python", documents="joined", bos=False)
    with pytest.raises(InputError, match=r"data\.documents: joined is read as text"):
        prepare(data, byte_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
