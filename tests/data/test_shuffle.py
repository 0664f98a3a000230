"""The shuffle of rows depends only on the seed and the step, not on processes, workers or interruptions."""

import gc
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.config.schema import Component, DataConfig, TokenizerConfig
from nalanda.data import corpus, packing, sources
from nalanda.data import loader as data
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.prepare import prepare
from nalanda.data.shuffle import Permutation, next_source, whole_weights
from nalanda.data.tokenizer import encoder

T = 16
SETS = ["Book", "Github", ""]


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    lengths = [draw.choice([5, 6, 12, 30, 90]) for _ in range(count)]
    return [
        f"{seed}.{i:03d}" + "".join(draw.choices("abc é", k=length))
        for i, length in enumerate(lengths)
    ]


def write(path: Path, documents: list[str], sources=("",)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"text": text, "meta": {"redpajama_set_name": source} if source else {}}
        for text, source in zip(documents, itertools.cycle(sources))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """Two corpora with train/ and validation/, and each as a token set."""
    folder = tmp_path_factory.mktemp("order")
    tokenizer.save_pretrained(folder / "tokenizer")
    for seed, name in enumerate(("web", "code")):
        for i, count in enumerate((9, 20, 15)):
            write(folder / name / "train" / f"{i}.jsonl", texts(count, 10 * seed + i))
        sources = SETS if name == "web" else [""]
        write(folder / name / "validation" / "0.jsonl", texts(30, 10 * seed + 9), sources)
        own = TokenizerConfig(path=str(folder / "tokenizer"))
        prepare(DataConfig(source=str(folder / name)), own, folder / f"{name}-tokens")
    for i, text in enumerate(texts(12, 77)):
        (folder / "files").mkdir(exist_ok=True)
        (folder / "files" / f"{i}.txt").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(packing, "STREAM_GROUP", 300)
    monkeypatch.setattr(packing, "PERMUTED_GROUP", 200)
    few = {str(i): text for i, text in enumerate(texts(25, 55))}
    monkeypatch.setattr(corpus, "python_splits", lambda share: {"train": few, "validation": few})


def config(folder: Path, kind: str, **settings) -> DataConfig:
    settings = {"seq_len": T, "shuffle_buffer": 7, "validation_share": 1e-9, **settings}
    if kind == "python":
        return DataConfig(source=kind, **settings)
    if kind != "mixture":
        return DataConfig(source=str(folder / kind), **settings)
    parts = [("web", "web", 0.5), ("tokens", "code-tokens", 0.3), ("files", "files", 0.2)]
    mixture = [Component(name, str(folder / source), weight) for name, source, weight in parts]
    return DataConfig(mixture=mixture, **settings)


KINDS = ["web", "python", "web-tokens", "mixture"]


def take(batches: PackedBatches, count: int | None = None) -> list[dict]:
    return list(itertools.islice(batches, count))


def same(batch: dict, other: dict) -> bool:
    return batch.keys() == other.keys() and all(
        torch.equal(batch[key], other[key]) for key in batch
    )


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))


# ------------------------------ permutations and turns


def test_a_permutation_gives_every_number_once():
    for size in (*range(1, 70), 255, 256, 257, 1000, 65_537):
        order = Permutation(size, "0/0")(np.arange(size))
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(size))
        if size > 30:
            assert (order == np.arange(size)).mean() < 0.2
            assert (order != Permutation(size, "0/1")(np.arange(size))).mean() > 0.8
        some = np.random.default_rng(size).integers(0, size, 9)
        assert (Permutation(size, "0/0")(some) == order[some]).all()  # depends on the position only


def test_permutations_are_even_and_of_any_size():
    first = Counter(int(Permutation(5, str(key))(np.array([2]))[0]) for key in range(1000))
    assert all(abs(first[value] - 200) < 65 for value in range(5))  # 5 σ is 63
    pairs = Counter(tuple(Permutation(40, str(key))(np.array([7, 8]))) for key in range(1000))
    assert max(pairs.values()) < 9  # 0.6 expected
    size = 3 * 10**12 + 1
    order = Permutation(size, "key")(np.arange(size - 20_000, size))
    assert len(set(order.tolist())) == 20_000
    assert 0 <= order.min() < size * 0.01 < size * 0.99 < order.max() < size
    steps = np.diff(Permutation(100_000, "key")(np.arange(100_000)))
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1] + 0.5) < 0.02  # of independent draws: -1/2


def test_every_component_has_its_share_to_within_one_row():
    draw = random.Random(0)
    drawn = [
        [draw.choice([0.1, 0.7, 1, 3, 1e-3, 17.3]) for _ in range(n)]
        for n in (1, 2, 2, 3, 3, 5, 8, 13)
    ]
    for weights in map(whole_weights, [[1, 1, 4], *drawn]):
        counts = [0] * len(weights)
        for number in range(1, 600):
            chosen = next_source(weights, counts)
            assert chosen == next_source(weights, list(counts))
            counts[chosen] += 1
            shares = [weight * number / sum(weights) for weight in weights]
            assert max(abs(c - s) for c, s in zip(counts, shares, strict=True)) < 1, (
                weights,
                number,
            )
    assert whole_weights([0.7, 0.3]) == [7, 3]
    assert whole_weights([2, 1e-2]) == [200, 1]


# ------------------------------ the same shuffle for all readers

# (processes, workers, micro-batches until the next interruption); then those without processes again
READERS = [(1, 3, 5), (4, 0, 4), (2, 1, 6), (1, 0, 1), (1, 2, 9), (1, 1, 3)]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_order_state_and_batches_for_any_processes_workers_and_interruptions(
    folder, tokenizer, kind
):
    def reader(batch_size: int, workers: int, **rank) -> PackedBatches:
        settings = config(folder, kind, workers=workers)
        return PackedBatches(settings, tokenizer, batch_size=batch_size, seed=5, epochs=2, **rank)

    alone = reader(4, 0)
    whole = [(batch, through_json(alone.state_dict())) for batch in alone]
    assert len(whole) > 30
    state, step = reader(4, 0).state_dict(), 0
    cheap = itertools.cycle(
        [(world_size, workers, 9) for world_size, workers, _ in READERS if workers < 2]
    )
    for world_size, workers, length in itertools.chain(READERS, cheap):
        ranks = [
            reader(4 // world_size, workers, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for batches in ranks:
            batches.load_state_dict(through_json(state))
        for expected, after in whole[step : step + length]:
            parts = [next(batches) for batches in ranks]
            for key in ("input_ids", "labels", "position_ids"):
                together = torch.stack([part[key] for part in parts], 1).flatten(0, 1)
                assert torch.equal(together, expected[key]), (step, world_size, workers, key)
            states = [batches.state_dict() for batches in ranks]
            assert states[0] == after
            assert all(other == states[0] for other in states)
            step += 1
        state = states[0]
        ended = step == len(whole)
        if ended:
            assert all(next(batches, None) is None for batches in ranks)
        for batches in ranks:
            batches.close()
        if ended:
            break


@pytest.mark.parametrize("kind", ["web-tokens", "code-tokens"])
def test_every_row_of_a_token_set_once_an_epoch(folder, tokenizer, kind):
    from nalanda.data.token_set import TokenSet

    tokens = TokenSet(folder / kind, "train")
    count = tokens.tokens // T
    windows = tokens.read(0, count * T).reshape(-1, T)
    rows = Counter(map(bytes, windows))
    seen, state, orders = [], None, []
    while len(seen) < 2 * count:
        batches = PackedBatches(config(folder, kind), tokenizer, batch_size=1, seed=1, epochs=2)
        if state:
            batches.load_state_dict(through_json(state))
        seen += [
            b["input_ids"][0].numpy().astype(np.int32).tobytes()
            for b in itertools.islice(batches, 17)
        ]
        state = batches.state_dict()
        assert state.keys() == {"rows", "identity"}  # the position is one number
        batches.close()
    epochs = seen[:count], seen[count:]
    assert Counter(epochs[0]) == Counter(epochs[1]) == rows
    orders = [list(map(bytes, windows)), *epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    other = PackedBatches(config(folder, kind), tokenizer, batch_size=1, seed=2, epochs=1)
    assert [b["input_ids"][0].numpy().astype(np.int32).tobytes() for b in other] not in orders
    bounds = [[*b["cu_seqlens"].tolist()] for b in take(batches, 9)]
    assert any(len(bound) > 2 for bound in bounds)


def test_rows_of_a_token_set_have_the_documents_boundaries(folder, tokenizer):
    """Unshuffled, it equals the packed stream of its files."""
    streamed, prepared = (
        validation_batches(config(folder, kind), tokenizer, batch_size=3)
        for kind in ("web", "web-tokens")
    )
    assert streamed.keys() == prepared.keys()
    for name, batches in streamed.items():
        assert len(batches) == len(prepared[name]) > 3
        assert all(map(same, batches, prepared[name]))


def test_a_process_reads_only_its_own_rows(folder, tokenizer, monkeypatch):
    from nalanda.data.token_set import TokenSet

    read = []
    monkeypatch.setattr(
        TokenSet, "read", lambda self, a, b, of=TokenSet.read: (read.append(a), of(self, a, b))[1]
    )
    batches = PackedBatches(
        config(folder, "web-tokens", workers=0), tokenizer, batch_size=1, rank=2, world_size=4
    )
    take(batches, 6)
    assert len(read) == 6
    state = batches.state_dict()
    batches.load_state_dict(state)
    take(batches, 1)
    assert len(read) == 7  # restoring reads nothing
    assert state["rows"] == 24


# ------------------------------ mixtures


def test_a_mixture_takes_its_components_in_turn_each_in_its_own_order(folder, tokenizer):
    settings = config(folder, "mixture")
    batches = PackedBatches(settings, tokenizer, batch_size=1, seed=5)
    owners = {}
    for name, part in settings.parts().items():
        stream = corpus.DocumentStream(
            sources.open_corpus(
                part if "tokens" not in part.source else config(folder, "code"), "train"
            ),
            seed=0,
            buffer_size=0,
            epochs=1,
        )
        owners |= {text[:6]: name for text in stream.texts()}
    counts, passed = Counter(), []
    for number in range(1, 500):
        before = [part["rows"] for part in batches.state_dict()["parts"]]
        row = tokenizer.decode(next(batches)["input_ids"][0])
        after = [part["rows"] for part in batches.state_dict()["parts"]]
        (chosen,) = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert chosen == next_source([5, 3, 2], before)
        counts[chosen] += 1
        for start in (
            place + 13 for place in range(len(row)) if row.startswith("<|endoftext|>", place)
        ):
            if (name := row[start : start + 6]) in owners:
                assert owners[name] == list(settings.parts())[chosen]
                passed.append(name)
        assert all(abs(counts[i] - number * share) < 1 for i, share in enumerate((0.5, 0.3, 0.2)))
    assert len(passed) > 100
    seen = batches.epochs_read()
    assert list(seen) == ["web", "tokens", "files"]
    assert seen["files"] > seen["web"] >= 1
    batches.close()


def test_a_source_listed_twice_gives_different_rows(folder, tokenizer):
    """Its seed contains its name, so a source that is listed twice gives different rows."""
    twice = [Component(name, str(folder / "web-tokens"), 1) for name in ("a", "b")]
    batches = PackedBatches(DataConfig(mixture=twice, seq_len=T), tokenizer, batch_size=2)
    rows = [batch["input_ids"] for batch in take(batches, 20)]
    assert sum(torch.equal(*row) for row in rows) < 3
    batches.close()


@pytest.mark.parametrize("change", ["weight", "name", "files"])
def test_a_mixture_that_changed_is_refused(folder, tokenizer, tmp_path, change):
    settings = config(folder, "mixture")
    batches = PackedBatches(settings, tokenizer, batch_size=1)
    state = batches.state_dict()
    if change == "files":
        settings.mixture[2].source = str(write(tmp_path / "a.jsonl", ["other"]))
    else:
        setattr(settings.mixture[0], change, {"weight": 0.6, "name": "wob"}[change])
    other = PackedBatches(settings, tokenizer, batch_size=1)
    what = "files: corpus" if change == "files" else "mixture"
    with pytest.raises(InputError, match=f"{what} was"):
        other.load_state_dict(state)


def test_a_mixture_of_a_recipe(folder, recipe, tmp_path):
    web, code = (str(folder / name) for name in ("web", "code"))
    mixture = f"[{{name: a, source: {web}, weight: 1}}, {{name: b, source: {code}, weight: 3, text_field: t}}]"
    settings = load_config(recipe, ["data.source=''", f"data.mixture={mixture}"])
    assert [part.weight for part in settings.data.mixture] == [1, 3]
    parts = settings.data.parts()
    assert [part.text_field for part in parts.values()] == ["text", "t"]
    assert parts["b"].source == code
    assert not parts["b"].mixture
    (tmp_path / "again.yaml").write_text(settings.to_yaml())
    assert load_config(tmp_path / "again.yaml") == settings


def test_texts_of_a_mixture_for_a_tokenizer(folder):
    settings = config(folder, "mixture")
    settings.mixture[1].source = str(folder / "code")
    stream = sources.open_corpus(settings, "train").once()
    found = list(stream.texts())
    assert len(found) == len(set(found)) == 44 + 44 + 12
    first = "".join(found[:20])
    assert (
        0.3 < sum(len(t) for t in found[:20] if t.startswith(("0.", "1.", "2."))) / len(first) < 0.7
    )
    settings.mixture[1].source = str(folder / "code-tokens")
    with pytest.raises(
        InputError, match=r"is a token set, and texts are needed.*set tokenizer=.*/tokenizer$"
    ):
        sources.open_corpus(settings, "train")


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ([("a", 1), ("a", 1)], {}, "another name; there are a, a"),
        ([("a", 0)], {}, "data.mixture: a: needs .* a weight above 0"),
        ([("", 1)], {}, "a component: needs a name"),
        ([("a", 1)], {"source": "python"}, r"either source or mixture; data.source=\[\] drops"),
        ([("a", 1)], {"documents": "joined", "bos": False}, "a mixture has several"),
        ([("a", 1)], {"long_documents": "carry"}, "a mixture cuts"),
    ],
)
def test_mixtures_that_cannot_work(parts, settings, message):
    mixture = [Component(name, "python", weight) for name, weight in parts]
    with pytest.raises(InputError, match=message):
        DataConfig(mixture=mixture, **settings).check()


# ------------------------------ validation by source


def tokens_of(batches: list[dict]) -> list[int]:
    """The tokens of the rows in order, without padding."""
    found = []
    for batch in batches:
        for row, labels, positions in zip(
            batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
        ):
            kept = (labels != -100) | (positions == 0)
            last = int(kept.nonzero().max()) + 1
            found += row[:last].tolist()
    return found


@pytest.mark.parametrize("max_rows", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["code", "code-tokens", "python"])
def test_validation_of_one_source_is_one_pass_on_any_ranks(folder, tokenizer, kind, max_rows):
    settings = config(folder, kind, max_validation_rows=max_rows)
    (name, rows), *others = validation_batches(settings, tokenizer, batch_size=1).items()
    assert (name, others) == ("", [])
    assert len(rows) == max_rows or 7 < len(rows) < max_rows
    ranks = [
        validation_batches(settings, tokenizer, batch_size=3, rank=rank, world_size=2)[""]
        for rank in range(2)
    ]
    for key, padding in (("input_ids", tokenizer.eos_token_id), ("labels", -100)):
        steps = [torch.stack([x[key] for x in step], 1) for step in zip(*ranks, strict=True)]
        found = torch.cat(steps).flatten(0, 1)
        assert torch.equal(found[: len(rows)], torch.cat([x[key] for x in rows]))
        assert (found[len(rows) :] == padding).all()


@pytest.mark.parametrize("kind", ["web", "web-tokens"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_by_source(folder, tokenizer, kind, world_size):
    settings = config(folder, kind)
    ranks = [
        validation_batches(settings, tokenizer, batch_size=2, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert all(list(found) == sorted(SETS) for found in ranks)
    documents = texts(30, 9)
    for name in SETS:
        lengths = {len(found[name]) for found in ranks}
        assert len(lengths) == 1
        rows = [
            {
                key: torch.stack([part[key] for part in parts], 1).flatten(0, 1)
                for key in parts[0]
                if key != "cu_seqlens"
            }
            for parts in zip(*(found[name] for found in ranks), strict=True)
        ]
        own = [text for text, source in zip(documents, itertools.cycle(SETS)) if source == name]
        expected = np.concatenate(encoder(tokenizer, settings)(own)).tolist()
        ids = torch.cat([batch["input_ids"] for batch in rows]).flatten()[: len(expected)].tolist()
        assert ids == expected
        assert (
            torch.cat([batch["labels"] for batch in rows]).flatten()[len(expected) :] == -100
        ).all()


def test_validation_takes_documents_in_order_until_the_rows_are_full(folder, tokenizer):
    settings = config(folder, "web", max_validation_rows=20)
    found = validation_batches(settings, tokenizer, batch_size=1)
    labels = sum(int((b["input_ids"] != 0).sum()) for batches in found.values() for b in batches)
    documents = encoder(tokenizer, settings)(texts(30, 9))
    expected = np.concatenate(documents)[: 20 * T]
    assert labels == (expected != 0).sum()
    assert len(found) == 3


def test_validation_of_a_mixture(folder, tokenizer, tmp_path):
    settings = config(folder, "mixture", max_validation_rows=20)
    held_out = shutil.copytree(folder / "files", tmp_path / "files")
    settings.mixture[2].validation_source = str(held_out)
    found = validation_batches(settings, tokenizer, batch_size=1)
    assert list(found) == ["files", "tokens", "web", "web/Book", "web/Github"]
    rows = {name: len(batches) for name, batches in found.items()}
    assert rows["files"] == 4
    assert rows["tokens"] == 6
    assert 10 <= sum(count for name, count in rows.items() if "web" in name) <= 12
    settings.validation_source = str(folder / "code")
    assert list(validation_batches(settings, tokenizer, batch_size=1)) == [""]


# ------------------------------ batch slots


@pytest.fixture(scope="module")
def long_documents(tmp_path_factory, folder) -> Path:
    made = tmp_path_factory.mktemp("long")
    documents = [
        "".join(random.Random(i).choices("abcdefgh", k=40 * (i % 5) + 9)) for i in range(60)
    ]
    write(made / "text" / "train" / "0.jsonl", documents)
    write(made / "text" / "validation" / "0.jsonl", documents[:9])
    prepare(
        DataConfig(source=str(made / "text")),
        TokenizerConfig(path=str(folder / "tokenizer")),
        made / "tokens",
    )
    return made / "tokens"


SLOTS, BLOCK = 8, 5


def in_slots(
    source: Path, tokenizer, world_size: int = 1, rank: int = 0, micro: int = 4, **more
) -> PackedBatches:
    settings = DataConfig(source=str(source), seq_len=T, long_documents="carry", carry_rows=BLOCK)
    where = {"rank": rank, "world_size": world_size, "batch_size": micro // world_size}
    return PackedBatches(settings, tokenizer, slots=SLOTS, seed=3, **where, **more)


def test_a_slot_continues_its_documents_in_the_next_step(long_documents, tokenizer):
    from nalanda.data.token_set import TokenSet

    tokens = TokenSet(long_documents, "train")
    rows = tokens.tokens // T
    blocks = rows // BLOCK
    windows = {bytes(tokens.read(i * T, i * T + T)): i for i in range(rows)}
    assert len(windows) == rows
    begins = set(tokens.starts(0, tokens.tokens).tolist())
    last, seen, carried = {}, [], 0
    batches = in_slots(long_documents, tokenizer, epochs=3)
    steps = list(zip(batches, batches, strict=False))  # two micro-batches each
    assert len(steps) == 3 * blocks // SLOTS * BLOCK
    for number, step in enumerate(steps):
        for half, batch in enumerate(step):
            assert batch["slots"].tolist() == [4 * half + i for i in range(4)]
            assert batch["carried"].dtype == torch.bool
            for i, slot in enumerate(batch["slots"].tolist()):
                row = windows[bytes(batch["input_ids"][i].numpy().astype(np.int32))]
                first = number % BLOCK == 0
                assert (row % BLOCK == 0) == first
                assert first or row == last[slot] + 1
                assert batch["carried"][i].item() == (not first and row * T not in begins)
                assert batch["labels"][i, 0] == -100
                assert i * T in batch["cu_seqlens"].tolist()
                carried += batch["carried"][i].item()
                last[slot] = row
                seen.append(row)
    assert carried > len(seen) / 3
    counts = Counter(row // BLOCK for row in seen)
    assert set(counts.values()) <= {2 * BLOCK, 3 * BLOCK}  # the end that fills no round is left out
    assert sum(count == 2 * BLOCK for count in counts.values()) == 3 * blocks % SLOTS
    order = list(dict.fromkeys(row // BLOCK for row in seen[: blocks // SLOTS * SLOTS * BLOCK]))
    assert order != sorted(order)


@pytest.mark.slow
def test_batch_slots_on_any_number_of_processes_with_interruptions(long_documents, tokenizer):
    whole = take(in_slots(long_documents, tokenizer, epochs=2))
    state, step = None, 0
    for world_size, length in itertools.cycle([(1, 7), (2, 4), (4, 10)]):
        ranks = [
            in_slots(long_documents, tokenizer, world_size, rank, epochs=2)
            for rank in range(world_size)
        ]
        for batches in ranks:
            if state:
                batches.load_state_dict(through_json(state))
        for expected in whole[step : step + length]:
            parts = [next(batches) for batches in ranks]
            for key in ("input_ids", "labels", "slots", "carried"):
                assert torch.equal(
                    torch.stack([part[key] for part in parts], 1).flatten(0, 1), expected[key]
                )
            step += 1
        state = ranks[0].state_dict()
        assert state["rows"] == 4 * step
        for batches in ranks:
            batches.close()
        if step == len(whole):
            break
    settings = DataConfig(
        source=str(long_documents), seq_len=T, long_documents="carry", carry_rows=BLOCK
    )
    other = PackedBatches(settings, tokenizer, slots=4, seed=3, batch_size=4)
    with pytest.raises(InputError, match="lanes was 8 and is 4"):
        other.load_state_dict(state)
    validation = validation_batches(settings, tokenizer, batch_size=2)[""]
    assert "slots" not in validation[0]


def test_batch_slots_that_cannot_work(folder, long_documents, tokenizer):
    with pytest.raises(InputError, match="carry reads a token set; make one"):
        in_slots(folder / "web", tokenizer)
    with pytest.raises(
        InputError, match=r"blocks of 5 rows for the 800 rows.*lower data\.carry_rows"
    ):
        PackedBatches(
            DataConfig(source=str(long_documents), seq_len=T, long_documents="carry", carry_rows=5),
            tokenizer,
            batch_size=4,
            slots=800,
        )
    with pytest.raises(ValueError, match="slots is 8: not a multiple"):
        in_slots(long_documents, tokenizer, micro=3)
    with pytest.raises(InputError, match=r"data\.carry_rows: expected 1 or more, got 0"):
        DataConfig(source="python", carry_rows=0).check()
    with pytest.raises(InputError, match="expected one of cut, carry; got 'kept'"):
        DataConfig(source="python", long_documents="kept").check()


# ------------------------------ refused data


def test_a_token_set_is_only_read_as_it_was_made(folder, tokenizer, tmp_path):
    import copy
    import shutil

    settings = config(folder, "web-tokens")
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["abc"])
    with pytest.raises(
        InputError, match=r"another tokenizer; set tokenizer: \S+/web-tokens/tokenizer"
    ):
        PackedBatches(settings, changed, batch_size=1)
    settings.bos = False
    for read in (PackedBatches, validation_batches):
        with pytest.raises(
            InputError, match=r"was prepared with bos: True; set data\.bos=true, or"
        ):
            read(settings, tokenizer, batch_size=1)
    long = config(folder, "web-tokens", seq_len=1 << 20)
    with pytest.raises(InputError, match=r"tokens, fewer than data\.seq_len"):
        PackedBatches(long, tokenizer, batch_size=1)

    shutil.copytree(folder / "web-tokens", tmp_path / "set")
    moved = config(tmp_path, "set", workers=0)
    batches = PackedBatches(moved, tokenizer, batch_size=1)
    state = PackedBatches(config(folder, "web-tokens"), tokenizer, batch_size=1).state_dict()
    batches.load_state_dict(state)  # the same set elsewhere
    next(batches)
    for file in (tmp_path / "set" / "train").iterdir():
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"set/train/\S+: .* bytes, and the index says"):
        PackedBatches(moved, tokenizer, batch_size=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_changes_or_vanishes_is_named(folder, tokenizer, tmp_path, workers):
    """Rows read before the change come first."""
    for how in ("gone", "longer"):
        for i in range(3):
            write(tmp_path / how / f"{i}.jsonl", texts(20, i))
        settings = DataConfig(
            source=str(tmp_path / how),
            seq_len=T,
            shuffle_buffer=0,
            validation_share=1e-9,
            workers=workers,
        )
        batches = PackedBatches(settings, tokenizer, batch_size=1, epochs=1)
        expected = take(PackedBatches(settings, tokenizer, batch_size=1, epochs=1))
        for i in range(3):
            if how == "gone":
                (tmp_path / how / f"{i}.jsonl").unlink()
            else:
                write(tmp_path / how / f"{i}.jsonl", texts(21, i))
        message = "cannot be read any more" if how == "gone" else "changed while in use"
        with pytest.raises(InputError, match=rf"{how}/\d\.jsonl: {message}") as caught:
            next(batches)
        assert "\n" not in str(caught.value)
        assert len(expected) > 30


def test_good_rows_come_before_an_error_for_any_number_of_workers(folder, tokenizer, tmp_path):
    write(tmp_path / "a.jsonl", texts(40, 1))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    good = []
    for workers in (0, 1, 3):
        settings = DataConfig(
            source=str(tmp_path / "a.jsonl"),
            seq_len=T,
            shuffle_buffer=0,
            validation_share=1e-9,
            workers=workers,
        )
        batches = PackedBatches(settings, tokenizer, batch_size=1)
        seen = []
        with pytest.raises(InputError, match=r"line 41: not JSON"):
            seen.extend(iter(batches.__next__, None))
        good.append((len(seen), batches.state_dict()))
    assert good[0][0] > 20
    assert good[0] == good[1] == good[2]


def test_an_epoch_without_a_token_is_an_error(tmp_path, tokenizer):
    """Blank lines of a joined text, a tokenizer without a token for them, and no eos."""
    for split in ("train", "validation"):
        write(tmp_path / split / "a.jsonl", ["", ""])
    settings = DataConfig(source=str(tmp_path), seq_len=T, documents="joined", bos=False, eos=False)
    for epochs in (None, 1):
        with pytest.raises(InputError, match="an epoch of the corpus gave no token"):
            next(PackedBatches(settings, tokenizer, batch_size=1, epochs=epochs))
    with pytest.raises(InputError, match="the validation documents have no token"):
        validation_batches(settings, tokenizer, batch_size=1)


# ------------------------------ processes that tokenise


@pytest.fixture
def running(monkeypatch):
    """() → the processes that tokenise and still run, by `poll`, since `ps` differs between systems."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr("nalanda.data.workers.subprocess.Popen", Recorded)
    return lambda: [process for process in started if process.poll() is None]


def test_processes_end_with_close_and_with_the_object(folder, tokenizer, running):
    batches = PackedBatches(config(folder, "web", workers=2), tokenizer, batch_size=1)
    assert not running()
    next(batches)
    assert len(running()) == 2
    batches.close()
    assert not running()
    next(batches)
    assert len(running()) == 2
    del batches
    gc.collect()
    assert not running()


def test_a_process_that_dies_gives_a_one_line_error(folder, tokenizer, running):
    batches = PackedBatches(config(folder, "web", workers=2), tokenizer, batch_size=1)
    next(batches)
    for process in running():
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(
        InputError, match=r"tokenises ended by itself \(exit code -9.*lower data\.workers"
    ):
        take(batches, 200)
    assert not running()
    assert len(take(batches, 40)) == 40  # resumes there with new processes
    batches.close()


@pytest.mark.slow
def test_signals_to_the_whole_group_leave_the_trainer_its_processes(folder, tokenizer):
    """Slurm and terminals signal every process of a run; the trainer reads on until its step is done."""
    code = textwrap.dedent(f"""
        import os, signal, sys, types
        package = types.ModuleType("nalanda"); package.__path__ = [{str(Path(data.__file__).parents[1])!r}]
        sys.modules["nalanda"] = package
        from transformers import AutoTokenizer
        from nalanda.data import loader as data, packing
        packing.STREAM_GROUP, tokenisers = 300, []
        class Tokenisers(data.Tokenisers):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                tokenisers.append(self)
        data.Tokenisers = Tokenisers
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            signal.signal(getattr(signal, name), lambda *_: None)
        settings = packing.DataConfig(source={str(folder / "web")!r}, seq_len=16, workers=2)
        tokenizer = AutoTokenizer.from_pretrained({str(folder / "tokenizer")!r})
        batches = data.PackedBatches(settings, tokenizer, batch_size=1)
        next(batches)
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            os.killpg(0, getattr(signal, name))
        for _ in range(200):
            next(batches)
        print(*(w.process.pid for w in tokenisers[0]._workers), flush=True)
        if sys.argv[1] == "end":
            raise SystemExit(7)
        while True:
            signal.pause()
    """)

    def alive(pids: list[int]) -> list[int]:
        return [
            pid
            for pid in pids
            if Path(f"/proc/{pid}/cmdline").exists()
            and b"workers.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    for how in ("end", "killed"):
        with subprocess.Popen(
            [sys.executable, "-c", code, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert len(pids) == 2, process.stderr.read()
            if how == "killed":
                assert alive(pids) == pids
                process.kill()
            _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (7 if how == "end" else -9, b"")
        until = time.monotonic() + 20
        while alive(pids) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive(pids)
