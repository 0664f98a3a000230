"""Processes of a machine share the tokenising: rows stay the same, and none waits for one that is gone."""

import itertools
import json
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from nalanda.common.errors import InputError, SourceUnavailable
from nalanda.config.schema import Component, DataConfig
from nalanda.data import packing
from nalanda.data.loader import PackedBatches
from nalanda.data.peers import Peers, meet
from nalanda.data.workers import Tokenisers

SOURCE = Path(__file__).parents[2] / "src" / "nalanda"
GROUP = 300
"""Characters of a group; the corpora have dozens of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two corpora: shards of many documents, and a document a file."""
    folder, draw = tmp_path_factory.mktemp("shared"), random.Random(0)

    def text() -> str:
        return "".join(draw.choices("abc é", k=draw.choice([5, 12, 30, 90])))

    for name in ("web/train/0", "web/train/1", "web/validation/0"):
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": text()}) + "\n" for _ in range(120)))
    for number in range(30):
        (folder / "files").mkdir(exist_ok=True)
        (folder / "files" / f"{number}.txt").write_text(text())
    return folder


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(packing, "STREAM_GROUP", GROUP)
    monkeypatch.setattr(packing, "PERMUTED_GROUP", GROUP)


def config(folder: Path, kind: str, workers: int) -> DataConfig:
    settings = {"seq_len": 16, "shuffle_buffer": 7, "validation_share": 1e-9, "workers": workers}
    if kind != "mixture":
        return DataConfig(source=str(folder / kind), **settings)
    mixture = [
        Component(name, str(folder / name), weight)
        for name, weight in (("web", 0.6), ("files", 0.4))
    ]
    return DataConfig(mixture=mixture, **settings)


def together(count: int, work: Callable) -> list:
    """What `work(rank, gather)` returns in each of `count` threads, which stand for processes."""
    barrier, items = threading.Barrier(count, timeout=60), [None] * count

    def of(rank: int):
        def gather(own: list) -> list:
            items[rank] = own[0]
            barrier.wait()
            return list(items)

        return work(rank, gather)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(of, range(count)))


def encode(texts: list[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


# ------------------------------ the same rows


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["web", "files", "mixture"])
def test_rows_and_states_are_those_of_one_process_for_any_number_and_after_a_resume(
    folder, tokenizer, kind
):
    def reader(workers: int, peers: Peers | None = None, **rank) -> PackedBatches:
        settings = config(folder, kind, workers)
        return PackedBatches(settings, tokenizer, seed=5, epochs=3, peers=peers, **rank)

    expected = list(reader(0, batch_size=1))
    assert len(expected) > 150
    state = None
    rows = 0
    many = 4 if kind == "web" else 1
    for processes, workers, steps in ((3, 1, 5), (2, 0, 4), (1, 1, 5), (2, many, 3), (3, 0, None)):

        def read(
            rank: int,
            gather: Callable,
            processes=processes,
            workers=workers,
            steps=steps,
            before=state,
        ) -> tuple[list, dict, dict]:
            peers = meet(gather)
            assert (peers is None) == (processes == 1)
            batches = reader(workers, peers, batch_size=2, rank=rank, world_size=processes)
            if before:
                batches.load_state_dict(json.loads(json.dumps(before)))
            taken = list(itertools.islice(batches, steps))
            batches.close()
            return taken, batches.state_dict(), batches.epochs_read()

        results = together(processes, read)
        assert all(result[1:] == results[0][1:] for result in results)
        for step in zip(*(result[0] for result in results), strict=True):
            for row in range(2):
                for batch in step:
                    assert torch.equal(batch["input_ids"][row], expected[rows]["input_ids"][0])
                    assert torch.equal(batch["labels"][row], expected[rows]["labels"][0])
                    assert torch.equal(
                        batch["position_ids"][row], expected[rows]["position_ids"][0]
                    )
                    rows += 1
        state = results[0][1]
    assert rows > len(expected) - 6


@pytest.mark.parametrize("count", [2, 3])
def test_each_text_is_tokenised_once_on_a_machine(count):
    groups = [(number, [f"{number} {i}" for i in range(number % 4 + 1)]) for number in range(23)]
    expected = [[ids.tolist() for ids in encode(texts)] for _, texts in groups]

    def read(rank: int, gather: Callable) -> tuple[list, list[int]]:
        given: list[int] = []

        def count_and_encode(texts: list[str]) -> list[np.ndarray]:
            given.append(len(texts))
            return encode(texts)

        tokenisers = Tokenisers(count_and_encode, 0, meet(gather))
        return [
            (key, [ids.tolist() for ids in tokens])
            for key, tokens in tokenisers.in_order(iter(groups))
        ], given

    for rank, (found, given) in enumerate(together(count, read)):
        assert found == list(enumerate(expected))
        assert given == [len(texts) for _, texts in groups[rank::count]]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_process_holds_the_others_back(slow):
    """Groups are larger than a socket's buffer, and only so many of them are under way."""
    big, count = ["state " * 70_000], 12
    begun = [0, 0]
    taken = [threading.Event() for _ in range(count)]

    def groups(rank: int):
        for number in range(count):
            begun[rank] += 1
            yield number, big

    def read(rank: int, gather: Callable) -> list[int]:
        tokenisers, found = Tokenisers(encode, 0, meet(gather)), []
        for key, tokens in tokenisers.in_order(groups(rank)):
            assert len(tokens[0]) == 420_000
            assert begun[rank] == min(count, key + 3)  # this one and two more, one for each process
            found.append(key)
            if rank == slow:
                assert taken[key].wait(30)
            taken[key].set()
        return found

    assert together(2, read) == [list(range(count))] * 2


# ------------------------------ one of them ends


def test_the_others_stop_with_the_same_line_where_one_fails():
    def groups(rank: int):
        for number in range(9):
            if rank == 1 and number == 6:
                raise SourceUnavailable("hub: does not answer")
            yield number, ["text"]

    def read(rank: int, gather: Callable) -> tuple[list, str, int]:
        tokenisers, taken = Tokenisers(encode, 0, meet(gather)), []
        with pytest.raises(InputError) as caught:
            taken.extend(key for key, _ in tokenisers.in_order(groups(rank)))
        return taken, str(caught.value), caught.value.exit_code

    first, second, third = together(3, read)
    assert second == (list(range(6)), "hub: does not answer", 75)
    for taken, *error in (first, third):
        assert error == ["hub: does not answer", 75]
        assert taken in (list(range(6)), list(range(7)))  # whichever sees it first


def test_processes_that_read_other_documents_are_told():
    def read(rank: int, gather: Callable) -> str:
        tokenisers = Tokenisers(encode, 0, meet(gather))
        with pytest.raises(InputError) as caught:
            list(tokenisers.in_order((number, ["text"] * (rank + 1)) for number in range(9)))
        return str(caught.value)

    first, second = together(2, read)
    assert first == second
    assert "read 1 documents where this one read 2" in first


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_close_ends_the_others_and_each_goes_on_alone(folder, tokenizer, workers):
    expected = list(
        PackedBatches(config(folder, "web", 0), tokenizer, batch_size=2, seed=1, epochs=2)
    )
    closed = threading.Event()

    def read(rank: int, gather: Callable) -> tuple[list, str]:
        share = {"rank": rank, "world_size": 2, "peers": meet(gather)}
        settings = config(folder, "web", workers)
        batches = PackedBatches(settings, tokenizer, batch_size=1, seed=1, epochs=2, **share)
        taken, message = [next(batches), next(batches)], ""
        if rank == 0:
            batches.close()
            closed.set()
        else:
            closed.wait(30)
            with pytest.raises(InputError) as caught:
                taken.extend(iter(batches.__next__, None))
            message = str(caught.value)
        taken.extend(batches)
        return taken, message

    (first, _), (second, message) = together(2, read)
    assert message.startswith("data: process 0, which tokenises a share of the texts, has ended")
    for batch, *halves in zip(expected, first, second, strict=True):
        assert torch.equal(batch["input_ids"], torch.cat([half["input_ids"] for half in halves]))


def test_a_process_that_waits_is_woken_by_its_own_close():
    """A reader's thread waits for a group of a process that reads nothing."""
    met, done = threading.Barrier(2, timeout=30), threading.Event()

    def read(rank: int, gather: Callable) -> str:
        peers = meet(gather)
        met.wait()
        if rank == 0:
            done.wait(30)  # holds its end of the line
            return ""
        threading.Timer(0, peers.close).start()
        with pytest.raises(InputError) as caught:
            peers.take(0, 1)
        done.set()
        return str(caught.value)

    assert "has ended" in together(2, read)[1]


@pytest.mark.parametrize("read", [1, 3])
def test_processes_that_read_other_documents_end(read):
    """A file that changed, or differs between machines, would shift every row behind it."""

    def take(rank: int, gather: Callable) -> str:
        peers = meet(gather)
        if rank == 0:
            peers.give(lambda: [np.zeros(2, np.int64)] * read)
            return ""
        with pytest.raises(InputError) as caught:
            peers.take(0, 2)
        return str(caught.value)

    assert f"process 0 read {read} documents where this one read 2" in together(2, take)[1]


PROGRAM = """
    import json, sys, types
    package = types.ModuleType("nalanda"); package.__path__ = [{source!r}]
    sys.modules["nalanda"] = package
    import numpy as np
    from nalanda.data.peers import meet
    from nalanda.data.workers import Tokenisers

    def gather(own):
        print(json.dumps(own[0]), flush=True)
        return [(tuple(machine), address) for machine, address in json.loads(input())]

    def encode(texts):
        return [np.array([len(text)]) for text in texts]

    groups = ((number, ["x" * number]) for number in range(10**9))
    try:
        for number, (tokens,) in Tokenisers(encode, 0, meet(gather)).in_order(groups):
            assert number == tokens[0]
            if number == 20:
                print("ready", flush=True)
    except ValueError as error:
        print(error, flush=True)
"""


def test_the_others_stop_when_a_process_is_killed():
    program = textwrap.dedent(PROGRAM).format(source=str(SOURCE))
    command = [sys.executable, "-c", program]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        addresses = [json.loads(process.stdout.readline()) for process in running]
        for process in running:
            process.stdin.write(json.dumps(addresses) + "\n")
            process.stdin.flush()
        for process in running:
            assert process.stdout.readline() == "ready\n"

        running[1].kill()
        for process in (running[0], running[2]):
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            assert output.count("which tokenises a share of the texts, has ended") == 1
            assert len(output.splitlines()) == 1
    finally:
        for process in running:
            process.kill()
            process.communicate()
