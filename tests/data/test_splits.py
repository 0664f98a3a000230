"""Training and validation: what is held out, and which files belong to which; hashes of files."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import FIELDS, held_out, ragged_texts, read_all, texts_of, write_jsonl, write_parquet

from nalanda.common.errors import InputError
from nalanda.config.schema import Component, DataConfig, TokenizerConfig
from nalanda.data import corpus, readers
from nalanda.data import loader as data
from nalanda.data.corpus import DocumentStream
from nalanda.data.documents import hash_text, not_blank
from nalanda.data.hashes import FileHashes
from nalanda.data.hold_out import NONE, PIECE, HoldOut, cut_text
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.prepare import begin, prepare
from nalanda.data.sources import Sources, open_corpora, open_corpus

pytestmark = pytest.mark.usefixtures("small_groups", "no_thread_left")


@pytest.mark.parametrize("limit", ["LARGE", "AT_ONCE"])
def test_large_files_are_hashed_by_samples(tmp_path, monkeypatch, limit):
    """Head and tail are sampled. A file counts as large by its own size, or if all files together are."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 3_000_000)

    def known() -> str:
        return open_corpus(DataConfig(source=str(path)), "train").content(0, FileHashes())

    def seen(place: int) -> bool:
        before = known()
        with path.open("rb+") as file:
            file.seek(place)
            file.write(b"y")
        return known() != before

    assert seen(1_490_000)  # small enough to be read whole
    monkeypatch.setattr(corpus, limit, 1000)
    assert [seen(place) for place in (0, 1_500_000, 2_999_999)] == [True, False, True]


def test_slimpajamas_layout(tmp_path):
    texts = ragged_texts(40)
    write_jsonl(tmp_path / "train/chunk1/example_train_0.jsonl.zst", texts[:10])
    write_jsonl(tmp_path / "train/chunk2/example_train_1.jsonl.zst", texts[10:20])
    write_jsonl(tmp_path / "validation/chunk1/example_validation_0.jsonl.zst", texts[20:30])
    write_jsonl(tmp_path / "test/chunk1/example_test_0.jsonl.zst", texts[30:])
    assert read_all(tmp_path) == texts[:20]
    assert read_all(tmp_path, "validation") == texts[20:30]


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "validation.jsonl", "test.jsonl"),
        ("training/a.jsonl", "val/a.jsonl", "eval/a.jsonl"),
        ("en/train/test.jsonl", "en/valid/train.jsonl", "en/test/a.jsonl"),
        ("data/train-00000-of-00001.parquet", "data/dev-0.parquet", "data/test-0.parquet"),
        ("a.jsonl", "Validation_0.JSONL", "test.00001.jsonl.gz"),
    ],
)
def test_a_split_is_told_by_a_folder_or_a_files_name(tmp_path, names):
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (write_parquet if name.endswith("parquet") else write_jsonl)(
            tmp_path / name, [f"{i} a", f"{i} b"]
        )
    assert [read_all(tmp_path, split) for split in ("train", "validation")] == [
        ["0 a", "0 b"],
        ["1 a", "1 b"],
    ]


def test_a_list_may_mix_absolute_and_relative_paths(tmp_path, monkeypatch):
    for name in ("a/train/a.jsonl", "b/validation/b.jsonl"):
        write_jsonl(tmp_path / name, [name])
    monkeypatch.chdir(tmp_path)
    listed = [str(tmp_path / "a"), "b"]
    opened = open_corpora(DataConfig(source=listed))
    assert texts_of(opened["train"]) == ["a/train/a.jsonl"]
    assert texts_of(opened["validation"]) == ["b/validation/b.jsonl"]


def test_what_is_left_out_is_said(tmp_path, bpe_of_bytes):
    names = (
        "train/a.jsonl",
        "train/b.JSONL",
        "train/train-1/c.jsonl",
        "val/a.jsonl",
        "test/a.jsonl",
    )
    for name in (*names, "more/a.jsonl", "val/a.json", "README"):
        write_jsonl(tmp_path / name, ["some text"])

    def said(**settings) -> list[str]:
        config = DataConfig(source=str(tmp_path), seq_len=8, **settings)
        return PackedBatches(config, bpe_of_bytes, batch_size=1).describe_files()

    files, rest = f"{tmp_path}: 3 files for training", "1 of a test split, 1 of no split"
    assert said() == [
        f"{files}, 1 for validation; left out: 1 without suffix, 1 that end in .json, {rest}"
    ]
    (tmp_path / "val/a.json").unlink()
    (tmp_path / "README").unlink()
    assert said(validation_source="python") == [
        f"{files}; left out: {rest}, 1 of a validation split"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "\n\n".join("a sentence of a paragraph. " * (1 + i % 40) for i in range(400)) + "\n \n\n",
        "".join(f"line {i}\r\n" for i in range(9000)),
        "word " * 9000,
        "x" * 30_001,
        "short",
    ],
)
def test_a_lone_text_is_cut_without_loss(text):
    pieces = list(cut_text(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE
    assert min(map(len, pieces[:-1]), default=PIECE) >= PIECE // 2
    ends = [piece[-1] for piece in pieces[:-1]]
    assert set(ends) <= ({"x"} if text[0] == "x" else {"\n", " "})
    if "\n\n" in text:
        assert all(piece.endswith("\n\n") for piece in pieces[:-1])


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_the_tail_of_a_text_without_spaces_is_its_share(share):
    """Nothing there is a better place for the cut."""
    text = "  " + "x" * 1000 + "\n"
    train, validation = (HoldOut(share, tail=True).part(text, x) for x in ("train", "validation"))
    assert train is not None
    assert validation is not None
    assert train + validation == text
    assert len(validation) == round(1000 * share) + 1  # with the line's end


@pytest.mark.parametrize("source", ["book.txt", "folder", "*.txt"])
def test_a_lone_text_is_a_corpus_of_many_documents(tmp_path, bpe_of_bytes, source):
    (tmp_path / "folder").mkdir()
    text = "".join(f"chapter {i}\n\n" + f"sentence {i}. " * 400 + "\n\n" for i in range(60))
    for file in (tmp_path / "folder/book.txt", tmp_path / "book.txt"):
        file.write_text(text)
    data = DataConfig(source=str(tmp_path / source), seq_len=64, shuffle_buffer=5, workers=0)
    found = open_corpora(data)
    train, validation = (texts_of(found[split]) for split in ("train", "validation"))
    assert sorted([*train, *validation]) == sorted(cut_text(text))
    assert validation == [piece for piece in cut_text(text) if piece not in train]
    count, held = len(train) + len(validation), len(validation)
    note = f"book.txt: 1 file cut into {count} documents, {held} held out for validation"
    assert found["train"].note.startswith(note)
    assert found["train"].note in PackedBatches(data, bpe_of_bytes, batch_size=1).describe_files()
    assert validation_batches(data, bpe_of_bytes, batch_size=1)

    stream = DocumentStream(open_corpus(data, "train"), seed=1, buffer_size=5, epochs=2)
    every = []
    for document in stream:
        every.append((document.text, json.loads(json.dumps(stream.state_dict()))))
    assert [text for text, _ in every[: len(train)]] != train
    for place in range(0, len(every), 17):
        again = DocumentStream(open_corpus(data, "train"), seed=1, buffer_size=5, epochs=2)
        again.load_state_dict(every[place][1])
        assert list(again.texts()) == [text for text, _ in every[place + 1 :]]


def splits_of(folder: Path, **settings) -> tuple[list[str], list[str], str]:
    """Texts of both splits, opened together and one by one, and the line about them."""
    data = DataConfig(source=str(folder), **settings)
    found = open_corpora(data)
    train, validation = texts_of(found["train"]), texts_of(found["validation"])
    share = data.validation_share
    assert texts_of(Sources(data, validation=True).texts("train")) == train
    assert share < NONE or texts_of(open_corpus(data, "train")) == train
    assert texts_of(open_corpus(data, "validation")) == validation
    return train, validation, found["train"].note


def test_a_small_corpus_holds_something_out(tmp_path):
    texts = [f"document {i}" for i in range(50)]
    by_hash = sorted(texts, key=hash_text)
    write_jsonl(tmp_path / "a" / "0.jsonl", texts[:20])
    write_jsonl(tmp_path / "a" / "1.jsonl", [*texts[20:], " "])
    train, validation, note = splits_of(tmp_path / "a", validation_share=1e-9)
    assert validation == by_hash[:1]
    assert sorted(train) == sorted(by_hash[1:])
    assert (
        note == "50 documents, 1 held out for validation (none fell under validation_share 1e-09)"
    )

    train, validation, note = splits_of(tmp_path / "a", validation_share=1 - 1e-9)
    assert train == by_hash[-1:]
    assert sorted(validation) == sorted(by_hash[:-1])
    assert "50 documents, 49 held out for validation (all fell under validation_share 1)" in note

    share = (hash_text(by_hash[3]) + (1 << 20)) / 2**64  # enough: nothing is forced
    train, validation, note = splits_of(tmp_path / "a", validation_share=share)
    assert sorted(validation) == sorted(by_hash[:4])
    assert note == "12.6 % of the documents are held out for validation"


def test_without_validation_the_share_alone_decides(tmp_path):
    texts = [f"document {i}" for i in range(10)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    for share, count in ((1e-9, 10), (0.5, sum(not held_out(text, 0.5) for text in texts))):
        data = DataConfig(source=str(tmp_path), validation_share=share)
        assert len(texts_of(Sources(data, validation=False).texts("train"))) == count
    one = write_jsonl(tmp_path / "one" / "a.jsonl", ["a single document"])
    data = DataConfig(source=str(one), validation_share=0.99)
    assert texts_of(Sources(data, validation=False).texts("train")) == ["a single document"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize(
    "text", ["one\ntwo\nthree\n", " \n\n some words on one line", "ab", "wörd " * 300]
)
def test_of_a_single_document_the_end_is_held_out(tmp_path, name, text):
    file = tmp_path / name
    file.write_bytes(text.encode()) if name == "a.txt" else write_jsonl(file, [text, " \n", text])
    train, validation, note = splits_of(tmp_path)
    assert len(train) == len(validation) == (1 if name == "a.txt" else 2)
    assert train[0] + validation[0] == text
    assert not_blank(train[0])
    assert not_blank(validation[0])
    assert note.endswith("1 document, its last 2 % are held out for validation")
    if text.startswith("wörd"):
        assert validation[0].startswith("wörd")
        assert 0.02 <= len(validation[0]) / len(text) < 0.25


def test_components_of_a_mixture_hold_something_out(tmp_path, bpe_of_bytes):
    write_jsonl(tmp_path / "few" / "a.jsonl", ["first text", "second text", "third text"])
    (tmp_path / "book.txt").write_text("some words of a book\n" * 20)
    parts = [
        Component("few", str(tmp_path / "few"), 1),
        Component("book", str(tmp_path / "book.txt"), 1),
    ]
    data = DataConfig(mixture=parts, seq_len=8, validation_share=1e-5, workers=0)
    batches = PackedBatches(data, bpe_of_bytes, batch_size=1)
    assert batches.describe_files() == [
        "few: 3 documents, 1 held out for validation (none fell under validation_share 1e-05)",
        "book: book.txt: 1 document, its last 0.001 % are held out for validation",
    ]
    assert validation_batches(data, bpe_of_bytes, batch_size=1).keys() == {"few", "book"}


def test_an_empty_split_is_named_with_its_numbers(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", " "])
    data = DataConfig(source=str(tmp_path), validation_share=1e-9)
    corpus = Sources(data, validation=False).texts("validation")
    with pytest.raises(InputError) as error:
        texts_of(corpus)
    assert str(error.value) == (
        "data.source: the corpus is empty for validation: of 3 documents (1 blank) none falls under "
        "data.validation_share 1e-09; change it, or give a data.validation_source"
    )
    write_jsonl(tmp_path / "a.jsonl", [" ", "\n"])
    with pytest.raises(
        InputError, match=r"is empty for train: of 2 documents all are blank; look at data\.source"
    ):
        texts_of(open_corpora(data)["train"])
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    small = replace(data, max_document_bytes=1, oversized="skip")
    with pytest.raises(InputError, match=r"train: 2 documents above data\.max_document_bytes were"):
        texts_of(open_corpora(small)["train"])


@pytest.mark.parametrize("parts", [("",), ("train/", "validation/")])
def test_both_splits_take_one_walk(tmp_path, monkeypatch, parts):
    for part in parts:
        write_jsonl(tmp_path / f"{part}a.jsonl", [f"{part}{i}" for i in range(200)])
    walks, walk = [], os.walk
    monkeypatch.setattr(
        os, "walk", lambda *where, **how: walks.append(where) or walk(*where, **how)
    )
    found = open_corpora(DataConfig(source=str(tmp_path)))
    assert len(walks) == 1
    assert (found["train"].shards is found["validation"].shards) == (parts == ("",))


def test_held_out_share_is_disjoint_complete_and_stable(tmp_path):
    texts = ragged_texts(400)
    path = write_jsonl(tmp_path / "a.jsonl", texts + texts[:100])  # copies fall on the same side

    def part(split: str) -> list[str]:
        config = DataConfig(source=str(tmp_path), validation_share=0.2)
        return list(open_corpus(config, split).once().texts())

    train, validation = part("train"), part("validation")
    assert len(train) + len(validation) == 500
    assert not set(train) & set(validation)
    assert 50 < len(set(validation)) < 110
    write_jsonl(path, texts[200:])
    assert set(part("validation")) == set(validation) & set(texts[200:])


def test_validation_source(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    own = write_jsonl(tmp_path / "b.jsonl", ["three"])
    config = DataConfig(source=str(train), validation_source=str(own), validation_share=0.99)
    parts = [sorted(open_corpus(config, split).once().texts()) for split in ("train", "validation")]
    assert parts == [["one", "two"], ["three"]]


def test_linked_folders_are_read_once(tmp_path):
    texts = ragged_texts(20)
    write_jsonl(tmp_path / "in" / "v2" / "a.jsonl", texts[:10])
    write_jsonl(tmp_path / "elsewhere" / "b.jsonl", texts[10:])
    write_jsonl(tmp_path / "in" / ".hidden" / "c.jsonl", ["c"])
    for name, target in (
        ("latest", "v2"),
        ("again", "."),
        ("v2/up", ".."),
        ("more", "../elsewhere"),
    ):
        (tmp_path / "in" / name).symlink_to(target)
    assert read_all(tmp_path / "in") == texts


def test_folders_of_runs_are_no_texts(tmp_path):
    """Neither below a folder nor below a pattern that goes through folders. One that is named is read."""
    write_jsonl(tmp_path / "a.jsonl", ["text"])
    write_jsonl(tmp_path / "more" / "b.jsonl", ["more"])
    (tmp_path / "more" / "config.yaml").touch()  # of the texts, not of a run
    for folder, names in {
        "runs/begun": ("config.yaml", ".lock"),
        "runs/copied": ("config.yaml", "run.json"),
        "study": ("compare.yaml",),
    }.items():
        write_jsonl(tmp_path / folder / "samples" / "c.jsonl", ["of a run"])
        for name in names:
            (tmp_path / folder / name).touch()
    assert read_all(tmp_path) == read_all(tmp_path / "**" / "*.jsonl") == ["more", "text"]
    assert read_all(tmp_path / "runs" / "begun") == ["of a run"]
    assert read_all(tmp_path / "runs" / "*" / "samples" / "*.jsonl") == ["of a run"] * 2


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a" / "x.jsonl", ["x"])
    write_jsonl(tmp_path / "b" / "y.jsonl", ["y"])
    scan = os.scandir

    def denied(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)  # root may read all
    with pytest.raises(InputError, match=r"/b: cannot be read \(Permission denied\)"):
        open_corpus(DataConfig(source=str(tmp_path)), "train")


def test_a_name_that_is_no_utf_8_is_refused(tmp_path):
    write_jsonl(tmp_path / "caf\udce9.jsonl", ["x"])
    with pytest.raises(InputError, match=r"caf.udce9.jsonl': the name is not UTF-8") as caught:
        open_corpus(DataConfig(source=str(tmp_path)), "train")
    str(caught.value).encode()


def test_a_parquet_file_that_is_removed_is_read_to_its_end(tmp_path):
    texts = [str(i) * 200 for i in range(30)]
    path = tmp_path / "a.parquet"
    write_parquet(path, texts)
    found = readers.read_parquet(path, FIELDS._replace(max_bytes=700), 0)
    read = [next(found)[0].text]
    path.unlink()  # as the cache of downloaded shards may
    assert read + [document.text for document, _ in found] == texts


def test_a_cut_validation_says_what_it_covers(tmp_path, bpe_of_bytes, monkeypatch):
    monkeypatch.setattr(data, "STREAM_GROUP", 20)
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"val/{name}.jsonl", ["x" * 18] * 10)
    write_jsonl(tmp_path / "train/a.jsonl", ["one"])
    config = DataConfig(source=str(tmp_path), seq_len=10)
    said: list[str] = []

    def read(rows: int) -> list[str]:
        said.clear()
        config.max_validation_rows = rows
        data.validation_batches(config, bpe_of_bytes, batch_size=1, say=said.append)
        return said

    cut = "the first 2 documents, of at most 1 of 3 files (data.max_validation_rows: 4)"
    assert read(61) == []
    assert read(4) == [f"validation reads {cut}"]
    prepare(config, TokenizerConfig(path=bpe_of_bytes.name_or_path), tmp_path / "set")
    config.source = str(tmp_path / "set")
    assert read(4)[0].startswith("validation reads the first 2 of 30 documents (")
    assert read(61) == []


def test_a_validation_source_that_is_trained_on_is_refused(tmp_path, bpe_of_bytes):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    held = write_jsonl(tmp_path / "held.jsonl", ["three"])
    part = Component("a", str(tmp_path), 1, validation_source=str(held))
    for settings in (
        {"source": str(tmp_path), "validation_source": str(held)},
        {"source": str(held), "validation_source": str(held)},
        {"source": f"{tmp_path}/h*.jsonl", "validation_source": str(tmp_path)},
        {"source": str(held), "validation_source": str(held), "documents": "joined", "bos": False},
        {"mixture": [part, Component("b", "python", 1)]},
    ):
        config = DataConfig(seq_len=8, **settings)
        with pytest.raises(
            InputError, match=f"data.validation_source: {held} is a training file too"
        ):
            data.validation_batches(config, bpe_of_bytes, batch_size=1)
        if not config.mixture and config.documents == "apart":
            with pytest.raises(
                InputError, match=f"data.validation_source: {held} is a training file too"
            ):
                begin(config, TokenizerConfig(train="bpe", vocab_size=257), tmp_path / "set")
