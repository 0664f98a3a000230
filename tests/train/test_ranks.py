"""What each process of a run waits for and computes: the slow one is named, and each can be traced."""

import contextlib
import gzip
import json
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import configured, contents, launched

from nalanda.common.errors import InputError
from nalanda.train import meters
from nalanda.train.log import read_metrics
from nalanda.train.loop import train
from nalanda.train.profile import profiled

SLOWED = """
import os, sys, time
from nalanda.train import meters
if os.environ["RANK"] == "1":
    # Its clock runs ahead: each of its spans is long, however busy the machine is.
    meters.perf_counter = lambda: 1000 * time.perf_counter()
from nalanda_cli import main
main(["train", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.0, 1.4, 1.0], 2),
        ([1.0, 1.4], 1),
        ([1.0, 1.0, 1.2, 1.0], None),
        ([0.001, 0.004], None),  # of a step of two seconds
        ([1.0, 1.0], None),
    ],
)
def test_a_process_is_slow_next_to_the_median_one(seconds, slow):
    assert meters.straggler(seconds, 2.0) == slow


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meters, "perf_counter", lambda: clock.now)
    return clock


def pace_of(ranks: list[list[float]], block: torch.nn.Module, monkeypatch) -> meters.RankTimes:
    """The pace of the first process; what others measure is `ranks`."""
    hosts = [f"node-{n}" for n in range(len(ranks) + 1)]
    monkeypatch.setattr(meters, "gather_object", lambda mine: hosts)
    gather = lambda own: torch.cat([own, *[torch.tensor([rank]) for rank in ranks]])  # noqa: E731
    accelerator = SimpleNamespace(
        num_processes=len(hosts), device=torch.device("cpu"), gather=gather
    )
    return meters.RankTimes([block], accelerator)


def make_step(pace: meters.RankTimes, block: torch.nn.Module, clock, waits: float) -> None:
    with pace.reading():
        clock.now += waits
    block(torch.zeros(1))
    with torch.no_grad():  # a validation
        block(torch.zeros(1))
    clock.now += 50  # the backward pass, where processes wait for others
    pace.end_step()


def test_a_line_has_the_extremes_of_the_processes(clock, monkeypatch):
    class Block(torch.nn.Module):
        def forward(self, x):
            clock.now += 2
            return x

    block, events = Block(), []
    log = SimpleNamespace(event=lambda step, kind, **values: events.append((step, kind, values)))
    pace = pace_of([[0.5, 2.1], [9.0, 2.0]], block, monkeypatch)
    make_step(pace, block, clock, waits=300)  # the first step is left out
    assert pace.report(log, 1, 60.0) == {}
    for _ in range(10):
        make_step(pace, block, clock, waits=1)
    line = pace.report(log, 11, 60.0)
    assert line == {
        "data_seconds_min": 0.5,
        "data_seconds": 9.0,
        "data_slowest_rank": 2,
        "forward_seconds_min": 2.0,
        "forward_seconds": pytest.approx(2.1),
        "forward_slowest_rank": 1,
    }
    reason = "rank 2 on node-2 waits for rows 9 s a step, the median rank 1 s"
    assert events == [(11, "slow rank", {"reason": reason, "rank": 2, "host": "node-2"})]
    for _ in range(10):
        make_step(pace, block, clock, waits=0.25)
    assert pace.report(log, 21, 60.0) == line | {"data_seconds_min": 0.25}
    assert len(events) == 1  # it is named once


def test_one_process_shows_its_wait_for_rows(recipe, tmp_path):
    train(configured(recipe, tmp_path / "run", "train.steps=3", "validation.every=0"))
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert ["data_seconds" in line for line in lines] == [False, True, True]
    assert not any("rank" in key for line in lines for key in line)


def traces(run: Path) -> dict[str, dict]:
    found = sorted((run / "profile").rglob("*.json.gz"))
    return {str(p.relative_to(run / "profile")): json.loads(gzip.open(p).read()) for p in found}


def test_a_profile_that_does_not_fit_is_refused(recipe, tmp_path):
    with pytest.raises(
        InputError, match="--profile: 9 steps behind 3 others do not fit into the 8"
    ):
        train(configured(recipe, tmp_path / "run", "train.steps=8"), profile=9)
    assert not [*read_metrics(tmp_path / "run" / "metrics.jsonl")]


@pytest.mark.parametrize("ends", [4, 6])
def test_a_run_that_ends_within_the_traced_steps_leaves_no_trace(tmp_path, ends):
    """Steps 4 and 5 are traced, which torch counts from 0."""
    said: list[str] = []
    run = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(steps=9), run_dir=tmp_path),
        at=SimpleNamespace(step=0),
        accelerator=SimpleNamespace(process_index=1, device=torch.device("cpu")),
        watchdog=SimpleNamespace(beat=lambda what: None),
        log=SimpleNamespace(say=said.append),
    )
    with contextlib.suppress(SystemExit), profiled(run, 2) as end_step:
        for _ in range(ends):
            torch.ones(2).sum()
            end_step()
        raise SystemExit(143)
    assert ("not written" in said[0]) == (ends == 4)
    found = {
        name: {event["name"] for event in trace["traceEvents"] if "ProfilerStep" in event["name"]}
        for name, trace in traces(tmp_path).items()
    }
    steps = {"ProfilerStep#3", "ProfilerStep#4"}
    assert found == ({} if ends == 4 else {"steps-4-5/rank-1.json.gz": steps})


@pytest.mark.slow
def test_the_slow_one_of_two_processes_is_named_and_both_are_traced(recipe, tmp_path):
    run, script = tmp_path / "run", tmp_path / "slowed.py"
    script.write_text(SLOWED)
    settings = ["log.every=10", "validation.every=0", "train.parallel=fsdp"]
    command = [str(script), str(recipe), f"output_dir={run}", *settings, "--profile", "2"]
    said = launched(*command, "train.steps=20")

    lines = [*read_metrics(run / "metrics.jsonl")]
    slow = [line for line in lines if line.get("event") == "slow rank"]
    assert [(line["step"], line["rank"], line["host"]) for line in slow] == [
        (10, 1, platform.node())
    ] * 2
    assert "step 10: slow rank: rank 1 on" in said
    for line in lines:
        if "loss" in line:
            assert (line["data_slowest_rank"], line["forward_slowest_rank"]) == (1, 1)
            assert line["forward_seconds"] > 10 * line["forward_seconds_min"] > 0

    assert traces(run).keys() == {f"steps-4-5/rank-{rank}.json.gz" for rank in (0, 1)}
    for trace in traces(run).values():
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"ProfilerStep#3", "ProfilerStep#4", "aten::mm"} <= names
        assert "ProfilerStep#5" not in names
    assert f"profile    {run}/profile/steps-4-5/rank-0.json.gz" in said
    assert said.count(" calls  ") == 8  # the longest ops, of the first process alone

    before = contents(run / "profile")
    launched(*command, "train.steps=30")
    after = contents(run / "profile")
    assert after.keys() - before.keys() == {
        Path(f"steps-24-25/rank-{rank}.json.gz") for rank in (0, 1)
    }
    assert after.items() >= before.items()
