"""Datasets of the Hub: resumed exactly, pinned to a revision, refused in one line."""

import pytest
from batches import same, through_json
from corpora import ragged_texts, write_jsonl

from nalanda.common.errors import InputError
from nalanda.config.schema import Component, DataConfig
from nalanda.data.corpus import DocumentStream
from nalanda.data.loader import PackedBatches
from nalanda.data.sources import open_corpus

pytestmark = pytest.mark.usefixtures("small_groups", "no_thread_left")


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [True, False])
def test_hub_datasets_resume_exactly(tmp_path, bpe_of_bytes, monkeypatch, streaming):
    import datasets

    texts = ragged_texts(60)
    files = [
        str(write_jsonl(tmp_path / f"{i}.jsonl", texts[20 * i : 20 * i + 20])) for i in range(3)
    ]
    load = datasets.load_dataset

    def load_dataset(path, name, split, streaming):
        assert (path, name, split) == ("someone/texts", "tiny", "train")
        cache = str(tmp_path / "cache")
        return load(
            "json", data_files={"train": files}, split=split, streaming=streaming, cache_dir=cache
        )

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path, name: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(
        source="someone/texts",
        name="tiny",
        streaming=streaming,
        seq_len=16,
        shuffle_buffer=5,
        validation_share=0.2,
    )
    parts = [
        list(DocumentStream(open_corpus(config, split), seed=0, buffer_size=3, epochs=1).texts())
        for split in ("train", "validation")
    ]
    assert sorted(parts[0] + parts[1]) == texts
    assert min(map(len, parts)) > 2

    def new():
        return PackedBatches(config, bpe_of_bytes, batch_size=4, epochs=2)

    batches = new()
    whole = [(batch, through_json(batches.state_dict())) for batch in batches]
    assert len(whole) > 27
    for step in range(0, len(whole), 9):
        resumed = new()
        resumed.load_state_dict(whole[step][1])
        rest = list(resumed)
        assert len(rest) == len(whole) - step - 1
        assert all(same(a, b) for a, (b, _) in zip(rest, whole[step + 1 :], strict=True))


def test_a_revision_pins_a_hub_dataset(monkeypatch):
    import datasets

    asked = []
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}]).to_iterable_dataset()

    def split_names(path, name, revision=None):
        asked.append((path, revision))
        return ["train"]

    def load_dataset(path, name, split, streaming, revision=None):
        asked.append((path, revision))
        return rows

    monkeypatch.setattr(datasets, "get_dataset_split_names", split_names)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    part = Component("web", "someone/web", 1.0, revision="87f0914")
    prints = set()
    for revision in (None, "87f0914"):
        pinned = DataConfig(source="someone/web", revision=revision)
        prints.add(open_corpus(pinned, "train").fingerprint)
        assert set(asked) == {("someone/web", revision)}
        asked.clear()
    assert len(prints) == 2  # a run does not resume on another revision
    open_corpus(DataConfig(mixture=[part]).parts()["web"], "train")
    assert set(asked) == {("someone/web", "87f0914")}
    asked.clear()
    # A validation dataset of its own is not at that commit.
    other = DataConfig(source="someone/web", validation_source="someone/held", revision="87f0914")
    open_corpus(other, "validation")
    assert set(asked) == {("someone/held", None)}


def test_a_hub_dataset_that_does_not_exist(bpe_of_bytes, monkeypatch):
    import datasets

    def fail(path, name):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'no/such' doesn't exist\nat all")

    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    with pytest.raises(
        InputError, match=r"'no/such' is neither a local path nor a Hub dataset .*doesn't exist\)$"
    ):
        PackedBatches(DataConfig(source="no/such"), bpe_of_bytes, batch_size=1)
