"""Readers: every format in every compression gives the same documents, from any row on."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import tarfile
import tracemalloc
from functools import partial
from pathlib import Path

import pyarrow
import pytest
import zstandard
from datasets import Dataset, DatasetDict
from pyarrow import ipc, parquet
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data import readers
from nalanda.data.corpus import DocumentStream, describe_files
from nalanda.data.documents import Document, Fields, FileShard, Left
from nalanda.data.inspect import inspect
from nalanda.data.prepare import prepare
from nalanda.data.readers import (
    FORMATS,
    READERS,
    is_single,
    register_reader,
    split_array,
    split_table,
    suffix_of,
)
from nalanda.data.records import describe_left, document_of, field_of
from nalanda.data.sources import open_corpus

FIELDS = Fields("doc.text", "meta.set")

DOCUMENTS = [
    Document("plain", "web"),
    Document('a "quoted", [bracketed] {text}\nof two lines\\', "web"),
    Document("é漢 \U0001f600", "7"),
    Document("\\u0041 \\", "book"),
    Document("x" * 300, "web"),
    Document("", "web"),
    Document("last", "book"),
]

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}

ROWS = [suffix for suffix in FORMATS if suffix != ".txt"]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> TokenizerConfig:
    """Each token is a byte."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return TokenizerConfig(path=str(path))


def records(documents: list[Document]) -> list[dict]:
    sets = [int(d.source) if d.source.isdigit() else d.source for d in documents]
    return [
        {"doc": {"text": d.text, "n": 1}, "meta": {"set": s}}
        for d, s in zip(documents, sets, strict=True)
    ]


def table(documents: list[Document]) -> pyarrow.Table:
    rows = [
        {"doc": {"text": d.text, "n": 1}, "meta": {"set": d.source}, "other": "x"}
        for d in documents
    ]
    return pyarrow.Table.from_pylist(rows)


def content(form: str, documents: list[Document]) -> bytes:
    """A file of the documents."""
    out = io.BytesIO()
    if form in (".jsonl", ".ndjson"):
        return b"".join(json.dumps(record).encode() + b"\n" for record in records(documents))
    if form == ".json":
        return json.dumps(records(documents), indent=1, ensure_ascii=False).encode()
    if form == ".csv":
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["doc.text", "n", "meta.set"])
        writer.writerows([d.text, 1, d.source] for d in documents)
        return text.getvalue().encode()
    if form == ".parquet":
        parquet.write_table(table(documents), out, row_group_size=3)
    elif form == ".arrow":
        with ipc.new_stream(out, table(documents).schema) as stream:
            stream.write_table(table(documents), max_chunksize=3)
    else:
        with tarfile.open(fileobj=out, mode="w") as archive:
            for i, record in enumerate(records(documents)):
                text = record["doc"].pop("text") if i % 2 else None
                add(archive, f"shard/{i:03}.json", json.dumps(record).encode())
                add(archive, f"shard/{i:03}.seg.png", b"pixels")
                if text is not None:
                    add(archive, f"shard/{i:03}.txt", text.encode())
    return out.getvalue()


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def read(path: Path, start: int = 0, fields: Fields = FIELDS) -> list:
    return list(FileShard(path, path.name, fields).read(start))


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def texts(source, split: str = "train", **settings) -> list[str]:
    config = DataConfig(source=source if isinstance(source, list) else str(source), **settings)
    corpus = open_corpus(config, split)
    corpus.ordered = True
    return list(corpus.once().texts())


def held_in(source, **settings) -> list[str]:
    return texts(source, validation_share=1e-9, **settings)


# ------------------------------ formats and compressions


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("form", ROWS)
def test_any_format_in_any_compression_from_any_row(tmp_path, form, compression):
    data = content(form, DOCUMENTS)
    path = write(tmp_path / f"a{form}{compression}".upper(), COMPRESS[compression](data))
    whole = read(path)
    assert whole == [(document, row) for row, document in enumerate(DOCUMENTS, 1)]
    for start in range(len(whole) + 1):
        assert read(path, start) == whole[start:]


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_text_file_is_one_document(tmp_path, compression):
    path = write(
        tmp_path / f"a.txt{compression}", COMPRESS[compression]("\ufeffone\n\ntwo é\n".encode())
    )
    assert read(path) == [(Document("one\n\ntwo é\n"), 1)]
    assert read(path, 1) == []
    assert is_single(path.name)
    write(path, COMPRESS[compression](b"one\ntwo \xff"))
    with pytest.raises(InputError, match=rf"a\.txt{compression}, line 2: not UTF-8"):
        read(path)


@pytest.mark.sampled
@pytest.mark.parametrize("compression", [c for c in COMPRESS if c])
@pytest.mark.parametrize("form", [".txt", *ROWS])
def test_a_truncated_file_is_named_in_one_line(tmp_path, form, compression):
    many = [Document(f"{i} " + os.urandom(300).hex(), "web") for i in range(60)]
    data = b"text\n" * 999 if form == ".txt" else content(form, many)
    whole = COMPRESS[compression](data)
    path = write(tmp_path / f"a{form}{compression}", whole)
    complete = read(path)
    for size in (len(whole) // 2, len(whole) - 1):
        write(path, whole[:size])
        given = []
        with pytest.raises(
            InputError, match=rf"a{form}{compression}, \w+ \d+: corrupt or truncated"
        ) as caught:
            given.extend(FileShard(path, path.name, FIELDS).read(0))
        assert "\n" not in str(caught.value)
        assert given == complete[: len(given)]
        if given:  # resumes exactly there
            with pytest.raises(InputError) as again:
                read(path, len(given))
            assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("form", [".json", ".parquet", ".arrow", ".tar"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_truncated_plain_file_is_named(tmp_path, form, share):
    many = [Document(f"{i} " + "text " * 60, "web") for i in range(60)]
    data = content(form, many)
    path = write(tmp_path / f"a{form}", data[: int(len(data) * share)])
    with pytest.raises(InputError, match=rf"a{form}, (row|item) \d+: corrupt or truncated"):
        read(path)


def test_a_record_spoilt_by_damage_of_its_file_is_not_called_unusable(tmp_path):
    """Stored without compression, so that only the sum at the end tells."""
    lines = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(9)).encode()
    whole = gzip.compress(lines, compresslevel=0)
    spoilt = whole.replace(b'"text 4"', b'"text 4!')
    path = write(tmp_path / "a.jsonl.gz", spoilt)
    with pytest.raises(InputError, match=r"gz: corrupt or truncated \(CRC .*; restore it") as error:
        read(path, fields=Fields("text", ""))
    assert "skip" not in str(error.value)
    write(path, gzip.compress(lines.replace(b'"text 4"', b'"text 4!')))
    with pytest.raises(InputError, match=r"line 5: not JSON.*; set data\.unusable=skip"):
        read(path, fields=Fields("text", ""))


def test_a_page_of_a_parquet_file_is_compared_with_its_sum(tmp_path):
    rows, path = pyarrow.table({"text": [f"text {i}" for i in range(9)]}), tmp_path / "a.parquet"
    parquet.write_table(
        rows, path, compression="none", use_dictionary=False, write_page_checksum=True
    )
    data = path.read_bytes()
    assert len(read(path, fields=Fields("text", ""))) == 9
    place = data.index(b"text 4")
    write(path, data[:place] + b"n" + data[place + 1 :])
    with pytest.raises(InputError, match=r"row 1: corrupt or truncated .*CRC checksum"):
        read(path, fields=Fields("text", ""))


@pytest.mark.parametrize("compression", [".gz", ".zst", ".bz2", ".xz"])
def test_streams_that_were_joined(tmp_path, compression):
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in ("one", "two")]
    parts = [COMPRESS[compression](line) for line in lines]
    fields = Fields("text", "")
    path = write(tmp_path / f"a.jsonl{compression}", b"".join(parts))
    assert read(path, fields=fields) == [(Document("one"), 1), (Document("two"), 2)]
    write(path, parts[0] + b"x" + parts[1][1:])  # the second begins wrongly
    with pytest.raises(InputError, match="line 2: corrupt or truncated"):
        read(path, fields=fields)


def test_an_archive_or_stream_cut_between_its_parts(tmp_path):
    data = content(".tar", DOCUMENTS)
    end = data.index(bytes(1024))  # the blocks of the end
    path = write(tmp_path / "a.tar", data[: end - end % 512])
    with pytest.raises(InputError, match=r"a\.tar, row 7: corrupt or truncated"):
        read(path)
    path = write(tmp_path / "a.arrow", content(".arrow", DOCUMENTS)[:-8])
    with pytest.raises(
        InputError, match=r"a\.arrow, row 8: corrupt or truncated \(the stream has no end"
    ):
        read(path)


def test_an_arrow_file_is_read_as_a_stream_is(tmp_path):
    path = tmp_path / "a.arrow"
    with ipc.new_file(str(path), table(DOCUMENTS).schema) as file:
        file.write_table(table(DOCUMENTS), max_chunksize=2)
    assert [document for document, _ in read(path)] == DOCUMENTS
    assert [document for document, _ in read(path, 3)] == DOCUMENTS[3:]


@pytest.mark.parametrize("blank", ["", " \r\n\n", "\ufeff"])
@pytest.mark.parametrize("array", [False, True])
def test_json_is_an_array_or_lines(tmp_path, blank, array):
    rows = [json.dumps({"doc": {"text": text}}) for text in ("one", "]", '\\"')]
    text = f"[{' , '.join(rows)} ]\n " if array else "\n".join(rows)
    path = write(tmp_path / "a.json", (blank + text).encode())
    assert [document.text for document, _ in read(path)] == ["one", "]", '\\"']
    assert [document.text for document, _ in read(write(path, b"[ ]"))] == []
    with pytest.raises(InputError, match=r"a\.json, item 2: not JSON"):
        read(write(path, b'[{"doc.text": "one"}, {"doc.text" "two"}]'))
    with pytest.raises(InputError, match=r"a\.json, item 2: corrupt or truncated \(text follows"):
        read(write(path, b'[{"doc.text": "one"}] {"doc.text": "two"}'))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_blocks_may_end_anywhere(size):
    for form, split in ((".json", split_array), (".csv", split_table)):
        data = content(form, DOCUMENTS)
        blocks = [data[i : i + size] for i in range(0, len(data), size)]
        assert list(split(iter(blocks), FIELDS)) == list(split(iter([data]), FIELDS))
        found = list(split(iter(blocks), FIELDS._replace(max_bytes=250, skip=True)))
        whole = list(split(iter([data]), FIELDS))
        assert found == [piece if len(piece) <= 250 else Left.OVERSIZED for piece in whole]
        assert Left.OVERSIZED in found


def test_a_table_as_other_programs_write_it(tmp_path):
    path = write(
        tmp_path / "a.csv", b'\xef\xbb\xbftext,n\r\n"a ""b"", c\r\nd",1\r\n\r\n5" disk,2\r\n"last"'
    )
    fields = Fields("text", "n")
    found = [Document('a "b", c\r\nd', "1"), Document('5" disk', "2"), Document("last")]
    assert read(path, fields=fields) == list(zip(found, (1, 3, 4), strict=True))
    write(path, b'text\n"one\ntwo\n')
    with pytest.raises(
        InputError, match=r"a\.csv, row 1: corrupt or truncated \(a quoted field has no end\)"
    ):
        read(path, fields=fields)
    write(path, b"body,n\none,1\n")
    with pytest.raises(InputError, match=r"a\.csv, row 1: no field 'text' \(there are: body, n\)"):
        read(path, fields=fields)


def test_samples_of_an_archive(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "./one.txt", b"one")
        add(archive, "./one.json", b'{"meta": {"set": 3}}')
        add(archive, f"{'deep/' * 40}two.json", b'{"doc": {"text": "two"}}')
        add(archive, "._three.txt", b"hidden")
        add(archive, "three.cls", b"7")
    path, skip = tmp_path / "a.tar", FIELDS._replace(skip_unusable=True)
    found = [Document("one", "3"), Document("two"), Left.UNUSABLE]
    assert [document for document, _ in read(path, fields=skip)] == found
    with pytest.raises(
        InputError, match=r"a\.tar, row 3: a sample without \.txt and \.json; set data.unusable"
    ):
        read(path)


# ------------------------------ memory


def bomb(form: str, size: int) -> bytes:
    """A document of `size` bytes."""
    text = b"x" * size
    if form == ".txt":
        return text
    if form in (".jsonl", ".ndjson"):
        return b'{"text": "' + text + b'"}\n'
    if form == ".json":
        return b'[{"text": "' + text + b'"}]'
    if form == ".csv":
        return b'text\n"' + text + b'"\n'
    out = io.BytesIO()
    if form == ".tar":
        with tarfile.open(fileobj=out, mode="w") as archive:
            add(archive, "a.txt", text)
        return out.getvalue()
    rows = pyarrow.table({"text": [text.decode()], "other": ["a"]})
    if form == ".parquet":
        parquet.write_table(rows, out, compression="zstd")
    else:
        with ipc.new_stream(out, rows.schema) as stream:
            stream.write_table(rows)
    return out.getvalue()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "compression", ["", ".gz", ".bz2", ".xz"]
)  # test_oversized.py has zstandard's
@pytest.mark.parametrize("form", [f for f in FORMATS if f != ".ndjson"])
def test_a_bomb_takes_little_memory(tmp_path, form, compression):
    size = 6 << 20
    compress = partial(lzma.compress, preset=0) if compression == ".xz" else COMPRESS[compression]
    path = write(
        tmp_path / f"a{form}{compression}", compress(bomb(form, size))
    )  # a small dictionary
    before = pyarrow.total_allocated_bytes()
    for skip in (False, True):
        fields = Fields("text", "", max_bytes=1 << 16, skip=skip)
        tracemalloc.start()
        try:
            if skip:
                assert [document for document, _ in read(path, fields=fields)] == [Left.OVERSIZED]
            else:
                with pytest.raises(
                    InputError, match=r"a document of .* data.max_document_bytes is 65,536"
                ):
                    read(path, fields=fields)
            peak = tracemalloc.get_traced_memory()[1] + pyarrow.total_allocated_bytes() - before
        finally:
            tracemalloc.stop()
        assert peak < 2 << 20, (skip, peak)


def test_many_rows_of_a_table_that_is_one_row(tmp_path):
    """A quoted field over many lines, and an archive's header without end, are bounded too."""
    path = write(tmp_path / "a.csv", b'text\n"' + b"x,\n" * (1 << 20) + b'"\nnext\n')
    fields = Fields("text", "", max_bytes=1 << 16, skip=True)
    assert read(path, fields=fields) == [(Left.OVERSIZED, 1), (Document("next"), 2)]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a.txt")
        member.pax_headers = {"comment": "x" * (2 << 20)}
        archive.addfile(member)
    with pytest.raises(InputError, match=r"b\.tar, row 1: corrupt or truncated \(a header of 2,"):
        read(write(tmp_path / "b.tar", out.getvalue()), fields=fields)


@pytest.mark.parametrize("new", [ipc.new_stream, ipc.new_file])
def test_a_compressed_batch_is_looked_at_before_it_is_opened(tmp_path, monkeypatch, new):
    rows = pyarrow.table({"text": ["x" * (1 << 20)] * 5})
    path = tmp_path / "a.arrow"
    with new(str(path), rows.schema, options=ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(rows)
    assert len(read(path, fields=Fields("text", ""))) == 5
    monkeypatch.setattr(readers, "WINDOW", 1 << 20)
    with pytest.raises(
        InputError, match=r"a\.arrow, row 1: .*a compressed batch of 5,242,904 bytes, above 1,"
    ):
        read(path, fields=Fields("text", "", max_bytes=1 << 16))


# ------------------------------ fields


def test_one_way_to_name_a_field():
    record = {"a": {"b": {"c": 1}, "b.c": 2}, "a.b": 3, "a.b.c": 4}
    assert [field_of(record, path) for path in ("a.b.c", "a.b", "a")] == [4, 3, record["a"]]
    assert field_of({"a": {"b": {"c": 1}, "b.c": 2}}, "a.b.c") == 2
    assert field_of({"a": {"b": {"c": 1}}}, "a.b.c") == 1
    assert field_of({"a": "text"}, "a.b", "none") == field_of(None, "a", "none") == "none"


def test_a_source_may_be_a_number():
    def source(value) -> str:
        return document_of({"text": "a", "s": value}, Fields("text", "s"), "x").source

    assert [source(value) for value in (7, 1.5, "web", True, None, ["web"])] == [
        "7",
        "1.5",
        "web",
        "",
        "",
        "",
    ]
    assert source("a\ud800b") == "a?b"


def test_a_source_with_half_a_surrogate_is_prepared(tmp_path, byte_tokenizer):
    write(tmp_path / "in" / "a.jsonl", b'{"text": "one", "s": "a\\ud800b"}\n')
    config = DataConfig(source=str(tmp_path / "in"), source_field="s", validation_share=1e-9)
    assert prepare(config, byte_tokenizer, tmp_path / "out")["sources"] == ["a?b"]


@pytest.mark.parametrize("form", [".parquet", ".arrow"])
def test_a_table_names_its_columns(tmp_path, form):
    path = write(tmp_path / f"a{form}", content(form, DOCUMENTS))
    with pytest.raises(
        InputError, match=rf"a{form}, row 1: no field 'text' \(there are: doc, meta, other\)"
    ):
        read(path, fields=Fields("text", ""))
    fields = Fields("text", "", skip_unusable=True)
    assert read(path, 4, fields) == [(Left.UNUSABLE, row) for row in (5, 6, 7)]
    assert [d.source for d, _ in read(path, fields=Fields("other", "doc.n"))] == ["1"] * len(
        DOCUMENTS
    )


# ------------------------------ records that cannot be used


UNUSABLE = {
    b'{"text": null}': "field 'text' is not text but NoneType",
    b'{"body": "a"}': r"no field 'text' \(there are: body\); set data\.text_field=body(?=;)",
    b'{"id": 1, "body": "a"}': r"no field .* \(there are: id, body\); set data\.text_field=body(?=;)",
    b'{"title": "a", "body": "b"}': r"no field .* \(there are: .*\); set data\.text_field(?=;)",
    b'{"text": ["a"]}': "field 'text' is not text but list",
    b'{"text": "cut': "not JSON, or cut short",
    b'{"text": "\xff"}': "not JSON, or cut short",
    b'["text"]': "not an object",
}


@pytest.mark.parametrize("line", UNUSABLE)
def test_an_unusable_record_is_refused_or_left_out(tmp_path, line):
    write(tmp_path / "a.jsonl", b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(
        InputError, match=rf"a\.jsonl, line 2: {UNUSABLE[line]}.*; set data.unusable=skip"
    ):
        held_in(tmp_path)
    config = DataConfig(source=str(tmp_path), validation_share=1e-9, unusable="skip")
    stream = DocumentStream(open_corpus(config, "train"), seed=0, buffer_size=0, epochs=2)
    assert sorted(stream.texts()) == ["one", "one", "two", "two"]
    assert stream.left == {"unusable": 2}
    assert stream.state_dict()["unusable"] == 2


def test_rows_of_tables_that_are_not_text(tmp_path):
    raw = pyarrow.array([b"one", b"\xff", None, b"two"], pyarrow.binary()).view(pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(
        4, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0], 1
    )
    rows = pyarrow.table({"text": texts})
    fields = Fields("text", "", skip_unusable=True)
    found = [Document("one"), Left.UNUSABLE, Left.UNUSABLE, Document("two")]
    parquet.write_table(rows, tmp_path / "a.parquet")
    with ipc.new_stream(str(tmp_path / "a.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    for form in (".parquet", ".arrow"):
        path = tmp_path / f"a{form}"
        for limit in (1 << 20, 5):  # read at once, and one by one
            read_so = fields._replace(max_bytes=limit)
            assert [document for document, _ in read(path, fields=read_so)] == found
            assert [document for document, _ in read(path, 1, read_so)] == found[1:]
        with pytest.raises(InputError, match=rf"a{form}, row 2: not UTF-8"):
            read(path, fields=Fields("text", ""))


def test_a_text_file_that_is_not_utf_8_is_left_out(tmp_path):
    write(tmp_path / "a.txt", b"\xff")
    write(tmp_path / "b.txt", b"text")
    assert held_in(tmp_path, unusable="skip") == ["text"]


def test_a_set_counts_what_was_left_out(tmp_path, byte_tokenizer, capsys):
    lines = [json.dumps({"text": f"text {i}"}).encode() for i in range(60)]
    lines[20:20] = [*UNUSABLE, json.dumps({"text": "x" * 4000}).encode()]
    write(tmp_path / "in" / "a.jsonl", b"\n".join(lines))
    write(tmp_path / "in" / "b.jsonl.gz", gzip.compress(b"\n".join(lines)))
    config = DataConfig(
        source=str(tmp_path / "in"), max_document_bytes=2000, oversized="skip", unusable="skip"
    )
    index = prepare(config, byte_tokenizer, tmp_path / "out", shard_bytes=900)
    assert (index["unusable"], index["skipped"]) == (2 * len(UNUSABLE), 2)
    assert index["train"]["documents"] + index["validation"]["documents"] == 120
    capsys.readouterr()
    inspect(tmp_path / "out")
    assert describe_left(index) == capsys.readouterr().out.splitlines()[0] != ""


def test_a_state_of_an_earlier_version_counts_on(tmp_path):
    write(tmp_path / "a.jsonl", b'{"text": "one"}\n{"text": 1}\n')
    config = DataConfig(source=str(tmp_path), validation_share=1e-9, unusable="skip")
    stream = open_corpus(config, "train").once()
    stream.load_state_dict(stream.state_dict() | {"skipped": 3})
    assert list(stream.texts()) == ["one"]
    assert stream.left == {"skipped": 3, "unusable": 1}
    assert stream.left.total() == 4


def test_there_are_two_policies():
    with pytest.raises(
        InputError, match=r"data\.unusable: expected one of refuse, skip; got 'drop'"
    ):
        DataConfig(source="python", unusable="drop").check()


# ------------------------------ which files are read


def said(source, **settings) -> str:
    config = DataConfig(source=source if isinstance(source, list) else str(source), **settings)
    return describe_files(config, open_corpus(config, "train").counts).partition("; left out: ")[2]


def test_empty_files_hold_no_documents(tmp_path):
    write(tmp_path / "in" / "b.jsonl", b'{"text": "one"}\n')
    before = open_corpus(DataConfig(source=str(tmp_path / "in")), "train").fingerprint
    for name in ("a.jsonl", "c.parquet", "d.jsonl.gz"):
        write(tmp_path / "in" / name, b"")
    assert held_in(tmp_path / "in") == ["one"]
    assert said(tmp_path / "in") == "3 empty"
    assert open_corpus(DataConfig(source=str(tmp_path / "in")), "train").fingerprint == before
    assert held_in(f"{tmp_path}/in/*.jsonl") == ["one"]
    (tmp_path / "in" / "b.jsonl").unlink()
    with pytest.raises(InputError, match="no documents for train; found 3 empty"):
        held_in(tmp_path / "in")


def test_a_file_and_a_link_to_it_are_read_once(tmp_path):
    write(tmp_path / "in" / "b.jsonl", b'{"text": "one"}\n')
    (tmp_path / "in" / "a.jsonl").symlink_to("b.jsonl")
    write(tmp_path / "other" / "x", b'{"text": "two"}\n')
    for name in ("c.jsonl", "d.jsonl"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "other" / "x")
    (tmp_path / "in" / "e.jsonl").symlink_to("nowhere")
    for source in (
        tmp_path / "in",
        f"{tmp_path}/in/*.jsonl",
        [f"{tmp_path}/in/*.jsonl", f"{tmp_path}/in"],
    ):
        assert held_in(source) == ["one", "two"]
        assert "that are second names of a file" in said(source)
    corpus = open_corpus(DataConfig(source=str(tmp_path / "in")), "train")
    assert [Path(shard.name).name for shard in corpus.shards] == ["b.jsonl", "c.jsonl"]


def test_files_that_describe_others_are_not_documents(tmp_path):
    write(tmp_path / "a.json", b'[{"text": "one"}]')
    assert held_in(tmp_path) == ["one"]
    write(tmp_path / "b.csv", b"text\ntwo\n")
    assert held_in(tmp_path) == ["two"]
    assert said(tmp_path) == "1 that end in .json"
    write(tmp_path / "c.json.gz", gzip.compress(b'{"text": "three"}'))
    assert held_in(tmp_path) == ["three"]
    assert said(tmp_path) == "1 that end in .json, 1 that end in .csv"


def test_a_folder_without_documents_names_what_it_holds(tmp_path):
    for name in ("a.bin", "b.bin", "c.bin", "d.doc", "e"):
        write(tmp_path / name, b"x")
    with pytest.raises(
        InputError, match=r"found 3 \.bin, 1 \.doc, 1 without suffix; files may end in \.txt, "
    ):
        held_in(tmp_path)


def test_a_list_of_local_files(tmp_path):
    for name in ("a/x.jsonl", "b/x.jsonl", "c.jsonl"):
        write(tmp_path / name, json.dumps({"text": name}).encode())
    given = [f"{tmp_path}/a/*.jsonl", f"{tmp_path}/b", f"{tmp_path}/c.jsonl"]
    assert sorted(held_in(given)) == ["a/x.jsonl", "b/x.jsonl", "c.jsonl"]
    write(tmp_path / "validation.jsonl", b'{"text": "held"}')
    given.append(f"{tmp_path}/validation.jsonl")
    assert texts(given, "validation") == ["held"]
    assert len(texts(given)) == 3
    with pytest.raises(InputError, match=r"nowhere\.jsonl' does not exist"):
        held_in([*given, f"{tmp_path}/nowhere.jsonl"])


@pytest.mark.parametrize(
    "source", ["~no-such-user/x", "~no-such-user/*.jsonl", ["~no-such-user/x.jsonl"]]
)
def test_a_user_that_does_not_exist(tmp_path, byte_tokenizer, source):
    with pytest.raises(InputError, match=r"~no-such-user/.*: there is no such user;"):
        prepare(DataConfig(source=source), byte_tokenizer, tmp_path / "out")


def test_a_saved_dataset_is_a_source(tmp_path):
    names = [f"text {i}" for i in range(20)]
    Dataset.from_dict({"text": names}).save_to_disk(tmp_path / "one", num_shards=3)
    assert held_in(tmp_path / "one") == names
    assert said(tmp_path / "one") == ""
    state = tmp_path / "one" / "state.json"
    listed = json.loads(state.read_text())
    listed["_data_files"].reverse()
    state.write_text(json.dumps(listed))
    write(tmp_path / "one" / "cache-1.arrow", b"left by a map")
    assert held_in(tmp_path / "one") == names[14:] + names[7:14] + names[:7]
    assert said(tmp_path / "one") == "1 that end in .arrow"
    (tmp_path / "one" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(
        InputError, match=r"data-00001-of-00003\.arrow: in the list of state.json, but missing"
    ):
        held_in(tmp_path / "one")


def test_splits_of_a_saved_dataset(tmp_path):
    parts = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "validation", "test")}
    DatasetDict(parts).save_to_disk(tmp_path / "in")
    assert [texts(tmp_path / "in", split) for split in ("train", "validation")] == [
        ["train"],
        ["validation"],
    ]
    assert said(tmp_path / "in") == "1 of a test split"


# ------------------------------ plugins


def test_a_plugin_may_take_what_was_free_before(monkeypatch):
    def mine(path, fields, start):
        yield from ()

    def other(path, fields, start):
        yield from ()

    for suffix in (".csv", ".chat.jsonl"):
        monkeypatch.setitem(READERS, suffix, READERS.get(suffix, mine))
        register_reader(suffix, mine)
        register_reader(suffix, mine)
        assert READERS[suffix_of(f"a{suffix.upper()}")] is mine
        with pytest.raises(ValueError, match="the suffix is taken"):
            register_reader(suffix, other)
    with pytest.raises(ValueError, match="the suffix is taken"):
        register_reader(".jsonl", mine)
    assert suffix_of("a.b.jsonl") == ".jsonl"
