"""Validation of documents with many sources: what it computes is bounded, and no document is left out."""

import json
from pathlib import Path

import pytest

from nalanda.common.errors import InputError
from nalanda.config.schema import Component, DataConfig
from nalanda.data.loader import validation_batches


def documents(folder: Path, sizes: dict[str, int]) -> Path:
    """For each source so many documents of three words."""
    folder.mkdir()
    lines = [
        json.dumps({"text": f"three words {number}", "meta": {"redpajama_set_name": source}})
        for source, count in sizes.items()
        for number in range(count)
    ]
    (folder / "validation.jsonl").write_text("\n".join(lines))
    (folder / "train.jsonl").write_text('{"text": "other"}\n')
    return folder


def settings(folder: Path, **values) -> DataConfig:
    return DataConfig(
        source=str(folder / "train.jsonl"),
        validation_source=str(folder / "validation.jsonl"),
        seq_len=64,
        **values,
    )


def tokens(found: dict) -> dict[str, int]:
    """Those that are no padding, by name."""
    return {
        name: sum(int((b["input_ids"] != 0).sum()) for b in batches)
        for name, batches in found.items()
    }


def test_a_local_source_refuses_the_name_of_a_split(tmp_path, tokenizer):
    folder = documents(tmp_path / "in", {"book": 1})
    with pytest.raises(InputError, match=r"data\.validation_split: only Hub datasets take it"):
        validation_batches(settings(folder, validation_split="test"), tokenizer, batch_size=2)


def test_sources_of_a_document_each_cost_no_batch_each(tmp_path, tokenizer):
    folder = documents(tmp_path / "in", {f"https://site/{i}": 1 for i in range(400)})
    found = validation_batches(settings(folder), tokenizer, batch_size=8, world_size=4)
    assert list(found) == [""]
    one = documents(tmp_path / "one", {"": 400})
    alone = validation_batches(settings(one), tokenizer, batch_size=8, world_size=4)
    assert len(found[""]) <= len(alone[""])


def test_a_few_sources_are_told_apart_however_small(tmp_path, tokenizer):
    sizes = {"book": 500, **{f"small {i}": 1 for i in range(15)}}
    found = validation_batches(settings(documents(tmp_path / "in", sizes)), tokenizer, batch_size=2)
    assert list(found) == sorted(sizes)


def test_of_many_sources_the_large_ones_are_told_apart(tmp_path, tokenizer):
    sizes = {
        **{f"large {i:02d}": 20 + i for i in range(20)},
        **{f"small {i}": 1 for i in range(40)},
    }
    found = validation_batches(settings(documents(tmp_path / "in", sizes)), tokenizer, batch_size=2)
    assert list(found) == [*(f"large {i:02d}" for i in range(4, 20)), "others"]
    each = tokens(
        validation_batches(settings(documents(tmp_path / "one", {"": 1})), tokenizer, batch_size=2)
    )[""]
    counts = tokens(found)
    assert counts["large 04"] >= 24 * each
    assert sum(counts.values()) >= sum(sizes.values()) * each


@pytest.mark.parametrize("large", [{}, {"book": 900}])
def test_in_a_mixture_small_sources_belong_to_their_component(tmp_path, tokenizer, large):
    sizes = {**large, **{f"small {i}": 1 for i in range(80)}}
    parts = [
        Component(
            name=name,
            source=str((folder := documents(tmp_path / name, sizes)) / "train.jsonl"),
            validation_source=str(folder / "validation.jsonl"),
            weight=1,
        )
        for name in ("a", "b")
    ]
    found = validation_batches(DataConfig(mixture=parts, seq_len=64), tokenizer, batch_size=2)
    assert list(found) == (["a/book", "a/others", "b/book", "b/others"] if large else ["a", "b"])
