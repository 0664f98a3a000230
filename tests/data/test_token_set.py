"""A token set as it is read: its documents, and damage that is found."""

import copy
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import NAMES, corpus, flip, held_out, lines, records

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.inspect import check_set, inspect
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.prepare import prepare
from nalanda.data.token_set import StatedFile, SumCheck, TokenSet, is_token_set
from nalanda.data.tokenizer import encoder, tokenizer_fingerprint


def test_documents_are_the_tokens_that_training_reads(tmp_path, tokenizer, byte_tokenizer):
    """Its documents are the tokens of `encoder`, in the files' order, split by `held_out`."""
    data = DataConfig(source=str(corpus(tmp_path / "in")), validation_share=0.2)
    index = prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=4000)
    assert is_token_set(tmp_path / "out")
    assert not is_token_set(tmp_path / "in")
    assert len(index["train"]["shards"]) > 6
    texts = records(300)
    encode = encoder(tokenizer, data)
    for split in ("train", "validation"):
        found = TokenSet(tmp_path / "out", split)
        meant = [r for r in texts if held_out(r["text"], 0.2) == (split == "validation")]
        assert found.documents == len(meant) > 20
        expected = encode([r["text"] for r in meant])
        for i, (record, tokens) in enumerate(zip(meant, expected, strict=True)):
            given, source = found.document(i)
            assert given.dtype == np.int32
            np.testing.assert_array_equal(given, tokens)
            assert source == record["meta"]["redpajama_set_name"]
        whole = np.concatenate(expected)
        np.testing.assert_array_equal(found.read(0, found.tokens), whole)
        starts = np.cumsum([0, *map(len, expected)])[:-1]
        np.testing.assert_array_equal(found.starts(0, found.tokens), starts)
        random = np.random.default_rng(0)
        for a, b in np.sort(random.integers(0, found.tokens + 1, (300, 2))):
            np.testing.assert_array_equal(found.read(a, b), whole[a:b])
            np.testing.assert_array_equal(found.starts(a, b), starts[(starts >= a) & (starts < b)])
        for a in starts[:50]:  # at the edges
            assert found.starts(a, a + 1) == [a]
            assert not len(found.starts(a + 1, a + 2))
            assert not len(found.starts(a, a))
        counts = index[split]["sources"]
        assert [*counts] == sorted(NAMES)
        assert sum(tokens for _, tokens in counts.values()) == found.tokens
        for name in NAMES:
            chosen = [len(t) for r, t in zip(meant, expected, strict=True) if name in str(r)]
            assert counts[name] == [len(chosen), sum(chosen)]
        assert index[split]["text_bytes"] == sum(len(r["text"].encode()) for r in meant)
        with pytest.raises(IndexError):
            found.read(0, found.tokens + 1)
        with pytest.raises(IndexError):
            found.document(found.documents)
    settings = TokenSet(tmp_path / "out", "train").settings
    assert settings["bos"] is settings["eos"] is True
    assert settings["tokenizer"] == tokenizer_fingerprint(tokenizer)
    assert settings["vocab_size"] == 257


def test_validation_reads_the_same_documents_of_texts_and_of_their_token_set(
    tmp_path, tokenizer, byte_tokenizer
):
    corpus(tmp_path / "in" / "train")
    corpus(tmp_path / "in" / "validation", rows=4)
    texts = DataConfig(source=str(tmp_path / "in"), seq_len=64, max_validation_rows=8)
    prepare(texts, byte_tokenizer, tmp_path / "out")
    tokens = DataConfig(source=str(tmp_path / "out"), seq_len=64, max_validation_rows=8)
    read, same = (validation_batches(data, tokenizer, batch_size=2) for data in (texts, tokens))
    assert read.keys() == same.keys()
    for source in read:
        pairs = zip(read[source], same[source], strict=True)
        assert all((a["input_ids"] == b["input_ids"]).all() for a, b in pairs)


@pytest.mark.slow
def test_large_vocabularies_have_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, "small": 2, "large": 70_000}
    words |= {f"w{i}": i for i in range(3, 70_000)}
    backend = Tokenizer(models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    wrapped.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "in.jsonl").write_bytes(
        lines([{"text": f"small large w65536 {i}"} for i in range(60)])
    )
    data = DataConfig(source=str(tmp_path / "in.jsonl"), bos=False)
    config = TokenizerConfig(path=str(tmp_path / "tokenizer"))
    index = prepare(data, config, tmp_path / "out")
    found = TokenSet(tmp_path / "out", "train")
    assert (index["dtype"], found.settings["vocab_size"]) == ("uint32", 70_001)
    assert found.document(7)[0].tolist() == [2, 70_000, 65_536, 0, 1]
    assert [*index["train"]["sources"]] == [""]


def test_another_eos_of_the_same_vocabulary_is_refused(tmp_path, tokenizer, byte_tokenizer):
    source = str(corpus(tmp_path / "in", files=1))
    data = DataConfig(source=source, validation_share=0.3, seq_len=16, workers=0)
    prepare(data, byte_tokenizer, tmp_path / "out")
    data.source = str(tmp_path / "out")
    other = copy.deepcopy(tokenizer)
    other.eos_token = "a"
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(tokenizer)
    file = tmp_path / "out/index.json"
    index = json.loads(file.read_bytes())
    assert index["tokenizer"].keys() == {"fingerprint", "vocab_size", "bos", "eos"}
    PackedBatches(data, tokenizer, batch_size=2)
    with pytest.raises(
        InputError, match=r"its eos is token 0, and the tokenizer's is \d+; set tokenizer"
    ):
        PackedBatches(data, other, batch_size=2)
    with pytest.raises(InputError, match="its eos is token 0"):
        validation_batches(data, other, batch_size=2)

    del index["tokenizer"]["bos"], index["tokenizer"]["eos"]
    file.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"names no bos and eos\); copy or prepare it again"):
        TokenSet(tmp_path / "out", "train")


@pytest.mark.slow
def test_more_shards_than_files_may_be_open(tmp_path, byte_tokenizer):
    data = DataConfig(source=str(corpus(tmp_path / "in")))
    prepare(data, byte_tokenizer, tmp_path / "out", shard_bytes=200)
    found = TokenSet(tmp_path / "out", "train")
    assert len(found._shards) > 100
    whole, starts = found.read(0, found.tokens), found.starts(0, found.tokens)
    for _ in range(2):
        for i in range(0, found.tokens, 97):
            assert (found.read(i, i + 1) == whole[i]).all()
    handles = [
        os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
    ]
    assert 0 < sum(str(tmp_path) in name for name in handles) <= 100
    wrong = []

    def read(seed: int) -> None:
        for a, b in np.sort(np.random.default_rng(seed).integers(0, found.tokens, (100, 2))):
            if (found.read(a, b) != whole[a:b]).any() or len(found.starts(a, b)) != (
                np.searchsorted(starts, b) - np.searchsorted(starts, a)
            ):
                wrong.append((a, b))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_damage_is_found(tmp_path, byte_tokenizer, capsys):
    data, out = DataConfig(source=str(corpus(tmp_path / "in", files=2))), tmp_path / "out"
    index = prepare(data, byte_tokenizer, out, shard_bytes=3000)
    inspect(out, verify=True, samples=2)
    shown = capsys.readouterr().out
    assert "RedPajamaWikipedia" in shown
    assert "document 0, größer" in shown
    names = [
        f"{split}/{shard['name']}.{kind}"
        for split in ("train", "validation")
        for shard in index[split]["shards"]
        for kind in ("tokens", "docs")
    ]
    for name in [names[0], names[3], names[-1]]:
        content = (out / name).read_bytes()
        flip(out / name)
        check_set(out)
        with pytest.raises(InputError, match=f"{name}: damaged"):
            check_set(out, sums=True)
        for cut in (content[:-1], content + b"\0", b""):
            (out / name).write_bytes(cut)
            with pytest.raises(InputError, match=f"{name}: .* bytes, and"):
                TokenSet(out, name.split("/")[0])
            with pytest.raises(InputError, match=f"{name}: .* bytes, and"):
                check_set(out)
        (out / name).unlink()
        with pytest.raises(InputError, match=name):
            TokenSet(out, name.split("/")[0])
        (out / name).write_bytes(content)
    check_set(out, sums=True)
    flip(out / names[0])
    flip(out / names[1])
    with pytest.raises(InputError, match="and 1 more"):
        inspect(out, verify=True)
    assert f"{names[1]}: damaged" in capsys.readouterr().out
    (out / "index.json").write_text('{"format": "nalanda token shards", "ver')
    with pytest.raises(InputError, match="damaged"):
        TokenSet(out, "train")


def times_ten(index: dict, split: str, key: str) -> None:
    index[split][key] *= 10


def shard_times_ten(index: dict, split: str, key: str) -> None:
    """In the shard, its sources and the split."""
    index[split]["shards"][0][key] *= 10
    index[split][key] += index[split]["shards"][0][key] * 9 // 10


def sources_times_ten(index: dict, split: str, key: str) -> None:
    place = ("documents", "tokens").index(key)
    for counts in index[split]["shards"][0]["sources"].values():
        counts[place] *= 10


def last_digit_of_size(index: dict, split: str, key: str) -> None:
    index[split]["shards"][0]["files"]["docs"][0] += 1


def other_vocabulary(index: dict, split: str, key: str) -> None:
    index["tokenizer"]["vocab_size"] -= 200


@pytest.mark.parametrize("key", ["documents", "tokens"])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(
    "harm", [times_ten, shard_times_ten, sources_times_ten, last_digit_of_size]
)
def test_an_index_that_contradicts_itself_is_refused(prepared_set, split, key, harm):
    file = prepared_set / "index.json"
    index = json.loads(file.read_bytes())
    harm(index, split, key)
    file.write_text(json.dumps(index))
    for read in (lambda: inspect(prepared_set, verify=True), lambda: TokenSet(prepared_set, split)):
        with pytest.raises(
            InputError, match=r"index\.json: damaged, it contradicts itself .*copy or prepare"
        ):
            read()


@pytest.mark.parametrize("missing", ["dtype", "tokenizer", "train", "sources", "version"])
def test_an_index_that_lacks_something_is_refused(prepared_set, missing):
    file = prepared_set / "index.json"
    index = json.loads(file.read_bytes())
    del index[missing]
    file.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index\.json: (damaged|version None)"):
        inspect(prepared_set, verify=True)


def with_its_sums(
    folder: Path, file: Path, change: Callable[[np.ndarray], None], dtype: str
) -> None:
    """Changes a file and the index's sum of it, so that only the contents are wrong."""
    content = np.fromfile(file, dtype)
    change(content)
    content.tofile(file)
    index = json.loads((folder / "index.json").read_bytes())
    (shard,) = [s for s in index[file.parent.name]["shards"] if s["name"] == file.stem]
    shard["files"][file.suffix[1:]][1] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))


def put(place: int, value: int) -> Callable[[np.ndarray], None]:
    return lambda content: content.__setitem__(place, value)


def test_ids_beyond_the_vocabulary_are_refused_where_they_are_read(prepared_set, tokenizer):
    file = prepared_set / "train/00001.tokens"
    with_its_sums(prepared_set, file, put(17, 257), "<u2")
    found = TokenSet(prepared_set, "train")
    first = found._shards[0].tokens
    found.read(0, first + 17)
    message = r"train/00001\.tokens: damaged, token 17 is 257, in a vocabulary of 257"
    for read in (
        lambda: found.read(first, first + 32),
        lambda: [found.document(number) for number in range(found.documents)],
        lambda: check_set(prepared_set, sums=True),
    ):
        with pytest.raises(InputError, match=message):
            read()
    index = json.loads((prepared_set / "index.json").read_bytes())
    other_vocabulary(index, "train", "")
    (prepared_set / "index.json").write_text(json.dumps(index))
    data = DataConfig(source=str(prepared_set), seq_len=16)
    with pytest.raises(InputError, match="its vocab_size is 57 and the tokenizer has 257"):
        PackedBatches(data, tokenizer, batch_size=1)


@pytest.mark.parametrize(("place", "value"), [(3, 0), (3, 1 << 40), (-1, 5), (-1, 1 << 40)])
def test_documents_that_do_not_follow_one_another_are_refused(prepared_set, place, value):
    file = prepared_set / "train/00001.docs"
    count = json.loads((prepared_set / "index.json").read_bytes())["train"]["shards"][1][
        "documents"
    ]

    def change(content: np.ndarray) -> None:
        content[: 8 * count].view("<i8")[place] = value

    with_its_sums(prepared_set, file, change, "u1")
    found = TokenSet(prepared_set, "train")
    message = r"train/00001\.docs: damaged, its documents do not follow one another"
    with pytest.raises(InputError, match=message):
        check_set(prepared_set, sums=True)
    with pytest.raises(InputError, match=message):
        [found.document(number) for number in range(found.documents)]
    with pytest.raises(InputError, match=message):
        found.starts(0, found.tokens)


def test_sums_are_compared_in_a_thread(prepared_set):
    files = TokenSet(prepared_set, "train").files
    beats = []
    assert SumCheck(files).wait(lambda: beats.append(1)) is None
    flip(files[3].path)
    assert f"{files[3].path}: damaged, its SHA-256" in (SumCheck(files).wait() or "")


def test_a_tokenizer_that_was_exchanged_is_found(tmp_path, byte_tokenizer):
    data, out = DataConfig(source=str(corpus(tmp_path / "in", files=1))), tmp_path / "out"
    prepare(data, byte_tokenizer, out)
    file = out / "tokenizer/tokenizer.json"
    exchanged = file.read_text().replace('"Ġ"', '"ĠĠ"')
    for content in (exchanged, "{", '{"version": "1.0", "model": {"type": "Other"}}'):
        file.write_text(content)
        for options in ({"verify": True}, {"samples": 1}):
            with pytest.raises(InputError, match="not the tokenizer that the index names"):
                inspect(out, **options)


def test_a_file_is_compared_again_where_another_index_states_another_sum(tmp_path):
    """As after a set was prepared anew elsewhere and its index copied over the old one."""
    file, record = tmp_path / "00000.tokens", tmp_path / "sums.jsonl"
    file.write_bytes(b"tokens")
    sums = [hashlib.sha256(content).hexdigest() for content in (b"tokens", b"others")]
    assert SumCheck([StatedFile(file, 6, sums[0])], record).wait() is None
    assert "damaged" in SumCheck([StatedFile(file, 6, sums[1])], record).wait()
