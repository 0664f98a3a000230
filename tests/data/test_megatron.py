"""Megatron's .bin and .idx: read and written byte for byte, checked like token sets."""

import hashlib
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.inspect import check_set, print_token_set
from nalanda.data.loader import PackedBatches
from nalanda.data.megatron import MegatronSet, read_megatron, write_megatron
from nalanda.data.prepare import prepare
from nalanda.data.sources import open_corpus
from nalanda.data.token_set import TokenSet
from nalanda_cli import app

TEXTS = [f"document {i}, größer: " + "wörd " * (i * 7 % 40) for i in range(60)]


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory) -> TokenizerConfig:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return TokenizerConfig(path=str(path))


def write_by_hand(prefix: Path, documents: list[list[list[int]]], code: int = 8) -> Path:
    """A set as the format's description says, without the code under test: documents of sequences."""
    dtype = {4: np.int32, 8: np.uint16}[code]
    sequences = [np.array(s, dtype) for document in documents for s in document]
    bounds = np.cumsum([0, *map(len, documents)])
    places = np.cumsum([0, *(s.nbytes for s in sequences)])[:-1]
    prefix.with_suffix(".bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(sequences))
        + struct.pack("<Q", len(bounds))
        + np.array([len(s) for s in sequences], np.int32).tobytes()
        + places.astype(np.int64).tobytes()
        + bounds.astype(np.int64).tobytes()
    )
    return prefix


def tokens_of(tokenizer, eod: bool = True) -> list[list[list[int]]]:
    """One sequence a document, as Megatron's preprocessing makes them with and without --append-eod."""
    end = [tokenizer.eos_token_id] * eod
    return [[tokenizer(text, add_special_tokens=False).input_ids + end] for text in TEXTS]


def test_a_set_comes_back_byte_for_byte(tokenizer, saved, tmp_path):
    folder = tmp_path / "megatron"
    folder.mkdir()
    documents = tokens_of(tokenizer)
    write_by_hand(folder / "train", documents[:50])
    write_by_hand(folder / "validation", documents[50:])
    index = read_megatron(DataConfig(source=str(folder)), saved, tmp_path / "set")
    check_set(tmp_path / "set", sums=True)
    assert (index["settings"]["bos"], index["settings"]["eos"]) == (False, True)
    assert index["train"]["text_bytes"] == sum(len(text.encode()) for text in TEXTS[:50])
    found = TokenSet(tmp_path / "set", "train")
    for i in (0, 7, 49):
        np.testing.assert_array_equal(found.document(i)[0], documents[i][0])
    assert write_megatron(tmp_path / "set", tmp_path / "back") == {
        split: (index[split]["documents"], index[split]["tokens"])
        for split in ("train", "validation")
    }
    for name in ("train.idx", "train.bin", "validation.idx", "validation.bin"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_token_set_comes_back_byte_for_byte(saved, tmp_path):
    """Shards become one file and back; training reads the same rows."""
    for split, texts in (("train", TEXTS), ("validation", TEXTS[:5])):
        (tmp_path / "texts" / split).mkdir(parents=True)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "texts" / split / "a.jsonl").write_text(lines)
    data = DataConfig(source=str(tmp_path / "texts"), seq_len=32, workers=0)
    shards = prepare(data, saved, tmp_path / "set", shard_bytes=2000)["train"]["shards"]
    assert len(shards) > 3
    write_megatron(tmp_path / "set", tmp_path / "megatron")
    index = read_megatron(DataConfig(source=str(tmp_path / "megatron")), saved, tmp_path / "back")
    assert index["settings"]["bos"] is index["settings"]["eos"] is True
    before, after = (
        b"".join((tmp_path / name / "train" / f"{s['name']}.tokens").read_bytes() for s in found)
        for name, found in (("set", shards), ("back", index["train"]["shards"]))
    )
    assert before == after
    assert hashlib.sha256(before).hexdigest() == index["train"]["shards"][0]["files"]["tokens"][1]
    for name in ("set", "back"):
        data.source = str(tmp_path / name)
        rows = PackedBatches(data, tokenizer_of(saved), batch_size=4, epochs=1)
        if name == "set":
            expected = [batch["input_ids"] for batch in rows]
        else:
            for batch, meant in zip(rows, expected, strict=True):
                assert (batch["input_ids"] == meant).all()


def tokenizer_of(config: TokenizerConfig):
    from nalanda.data.tokenizer import load_tokenizer

    return load_tokenizer(config.path)


def test_datatroves_writer_is_read(tokenizer, tmp_path):
    pytest.importorskip("datatrove")
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    documents = [sequences[0] for sequences in tokens_of(tokenizer)]
    for size, dtype in ((2, np.uint16), (4, np.int32)):
        file = MegatronTokenizedFile(str(tmp_path), f"of{size}", token_size=size)
        for document in documents:
            file.write(document)
        file.close()
        found = MegatronSet(tmp_path / f"of{size}")
        assert found.tokens.dtype == dtype
        for given, meant in zip(found.documents(), documents, strict=True):
            np.testing.assert_array_equal(given, meant)


def test_sequences_are_joined_and_a_share_held_out(tokenizer, saved, tmp_path):
    """Documents are those of the document index; the split and the set do not depend on the dtype."""
    cut = [[d[0][:9], d[0][9:], []] for d in tokens_of(tokenizer, eod=False)]
    cut.insert(3, [])  # a document without a sequence
    sets = []
    for code in (8, 4):
        prefix = write_by_hand(tmp_path / f"of{code}", cut, code)
        source = str(prefix) + (".idx" if code == 8 else "")
        data = DataConfig(source=source, validation_share=0.3)
        index = read_megatron(data, saved, tmp_path / f"set{code}")
        assert not index["settings"]["eos"]
        parts = [TokenSet(tmp_path / f"set{code}", split) for split in ("train", "validation")]
        assert parts[0].documents + parts[1].documents == len(TEXTS)
        assert parts[1].documents > 5
        sets.append(index["train"]["shards"])
    assert sets[0] == sets[1]


def test_an_empty_validation_set_says_nothing_about_ends(tokenizer, saved, tmp_path):
    folder = tmp_path / "megatron"
    folder.mkdir()
    write_by_hand(folder / "train", tokens_of(tokenizer))
    write_by_hand(folder / "validation", [])
    index = read_megatron(DataConfig(source=str(folder)), saved, tmp_path / "out")
    assert index["settings"]["eos"]
    assert index["validation"]["documents"] == 0


def test_a_split_of_ends_alone_is_printed(tokenizer, saved, tmp_path, capsys):
    write_by_hand(tmp_path / "train", tokens_of(tokenizer))
    write_by_hand(tmp_path / "validation", [[[tokenizer.eos_token_id]]] * 2)
    index = read_megatron(DataConfig(source=str(tmp_path)), saved, tmp_path / "out")
    print_token_set(index, tmp_path / "out")
    assert re.search(r"validation +2 +2 +2\.000 +0 B", capsys.readouterr().out)


def test_a_large_vocabulary_is_int32(saved, tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr("nalanda.data.megatron.SMALL", 257)  # as if the tokenizer had 65 500 tokens
    source = write_by_hand(tmp_path / "set", tokens_of(tokenizer), code=4)
    read_megatron(DataConfig(source=str(source), validation_share=1e-9), saved, tmp_path / "read")
    write_megatron(tmp_path / "read", tmp_path / "back")
    for end in (".idx", ".bin"):
        assert (tmp_path / "back" / f"train{end}").read_bytes() == source.with_suffix(
            end
        ).read_bytes()


def damage(idx: bytes, bin: bytes, how: str) -> tuple[bytes, bytes]:
    number = {
        "version": (9, "<Q", 2),
        "float": (17, "<B", 7),
        "documents": (-8, "<q", 59),
        "place": (34 + 4 * 60, "<q", 2),
    }
    if how in number:
        place, kind, value = number[how]
        place %= len(idx)
        return idx[:place] + struct.pack(kind, value) + idx[place + struct.calcsize(kind) :], bin
    return {
        "magic": (b"TNTIDX\x00\x00\x00" + idx[9:], bin),
        "short index": (idx[:-1], bin),
        "head": (idx[:20], bin),
        "empty": (b"", bin),
        "short": (idx, bin[:-2]),
        "foreign ids": (idx, bin[:-2] + b"\x01\x01"),
    }[how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("magic", r"set\.idx: not the index of a Megatron set"),
        ("head", r"set\.idx: not the index of a Megatron set"),
        ("empty", r"set\.idx: not the index of a Megatron set"),
        ("version", r"set\.idx: version 2"),
        ("float", r"set\.idx: version 1, dtype 7"),
        ("short index", r"set\.idx: 1,241 bytes, and its head says 1,242; copy it again"),
        ("documents", r"set\.idx: damaged"),
        ("place", r"set\.idx: damaged"),
        ("short", r"set\.bin: [\d,]+ bytes, and its index says [\d,]+; copy it again"),
        (
            "foreign ids",
            r"set\.bin: holds token 257, and the tokenizer has 257 tokens; name the tokenizer",
        ),
    ],
)
def test_damage_is_one_line(tokenizer, saved, tmp_path, how, message):
    prefix = write_by_hand(tmp_path / "set", tokens_of(tokenizer))
    idx, bin = (prefix.with_suffix(end) for end in (".idx", ".bin"))
    for file, content in zip(
        (idx, bin), damage(idx.read_bytes(), bin.read_bytes(), how), strict=True
    ):
        file.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        read_megatron(DataConfig(source=str(prefix)), saved, tmp_path / "read")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "read").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_damaged_token_set_is_not_written(tokenizer, saved, tmp_path):
    prefix = write_by_hand(tmp_path / "set", tokens_of(tokenizer))
    read_megatron(DataConfig(source=str(prefix)), saved, tmp_path / "read")
    tokens = tmp_path / "read" / "train" / "00000.tokens"
    content = bytearray(tokens.read_bytes())
    content[40] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(InputError, match=r"00000\.tokens: damaged, its SHA-256"):
        write_megatron(tmp_path / "read", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_that_are_not_one_megatron_set(tokenizer, saved, tmp_path):
    prefix = str(write_by_hand(tmp_path / "set", tokens_of(tokenizer)))
    data = DataConfig(source=prefix, validation_source=prefix)
    with pytest.raises(
        InputError, match=r"^data\.validation_source: .*; leave the key out, and name"
    ):
        read_megatron(data, saved, tmp_path / "read")
    texts = tmp_path / "a.jsonl"
    texts.write_text('{"text": "a"}\n' * 3)
    (tmp_path / "a.jsonl.idx").write_bytes(b"offsets of lines")
    assert open_corpus(DataConfig(source=str(texts)), "train").names == [texts.as_posix()]


def test_the_command(tokenizer, saved, tmp_path):
    prefix = write_by_hand(tmp_path / "set", tokens_of(tokenizer))
    read, back = str(tmp_path / "read"), str(tmp_path / "back")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["data", "prepare", *arguments])
        return str(done.exception) if done.exception else done.stdout

    assert "name the tokenizer" in run(f"{prefix}.idx", read)
    with pytest.raises(
        InputError, match=r"is a Megatron set; make a token set of it: nalanda data prepare"
    ):
        open_corpus(DataConfig(source=f"{prefix}.idx"), "train")
    assert "leave it out" in run(f"{prefix}.bin", read, "--tokenizer", saved.path, "--eos")
    assert "there are nalanda and megatron" in run(f"{prefix}.idx", read, "--format", "arrow")
    assert "of 257 tokens, eos\n" in run(f"{prefix}.idx", read, "--tokenizer", saved.path)
    assert "exists" in run(f"{prefix}.idx", read, "--tokenizer", saved.path)
    assert "not a token set" in run(str(prefix), back, "--format", "megatron")
    assert "documents" in run(read, back, "--format", "megatron")
    assert {p.name for p in Path(back).iterdir()} >= {
        "train.idx",
        "train.bin",
        "tokenizer",
        "manifest.json",
    }
    (Path(back) / "train.bin").write_bytes((Path(back) / "train.bin").read_bytes()[::-1])
    assert "train.bin does not have the bytes" in run(back, f"{back}2", "--tokenizer", saved.path)
