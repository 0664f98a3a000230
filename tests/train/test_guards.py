"""What a run survives: bad steps, signals, a rank that hangs, data that stops."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import safetensors.torch
import torch
from covering import slow_but_for
from filelock import FileLock
from training import configured, outcome

from nalanda.common.errors import ExitCode, InputError, NothingTrained, SourceUnavailable
from nalanda.config.bounds import check_bounds
from nalanda.config.schema import MIN_GOOD_STEPS, GuardConfig
from nalanda.data import packing
from nalanda.data.loader import PackedBatches
from nalanda.report.runs import read_run
from nalanda.train import build, checkpoint, guards, loop
from nalanda.train import step as training_step
from nalanda.train.checkpoint_dir import (
    checkpoint_folders,
    latest_checkpoint,
    step_of,
    unsound_reason,
    why_unusable,
)
from nalanda.train.guards import SpikeDetector
from nalanda.train.log import read_facts, read_metrics
from nalanda.train.loss import count_labels, summed_loss
from nalanda.train.run import TrainerState
from nalanda.train.run_dir import lock_run_dir

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def seen(spikes: SpikeDetector, count: int = 40) -> SpikeDetector:
    for i in range(count):
        assert spikes.judge(3 + 0.05 * (-1) ** i, 0.5 * 1.1 ** ((-1) ** i)) is None
    return spikes


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (math.nan, 1.0, "loss is nan"),
        (3.0, math.nan, "gradient norm is nan"),
        (3.0, math.inf, "gradient norm is inf"),
        (3.4, 0.5, "the loss 3.4 is .* σ above 3, its mean"),
        (1e9, 0.5, "the loss 1e"),
        (3.0, 1e9, "the gradient norm 1e.* above 0.5"),
        (3.25, 0.5, None),  # five deviations
        (1.0, 0.01, None),  # a fall is no spike
    ],
)
def test_what_is_a_bad_step(loss, norm, words):
    spikes = seen(SpikeDetector(GuardConfig()))
    before = json.dumps(spikes.state_dict())
    problem = spikes.judge(loss, norm)
    if words is None:
        assert problem is None
        assert spikes.state_dict()["losses"][-1] == loss
    else:
        assert re.search(words, problem)
        assert json.dumps(spikes.state_dict()) == before  # a bad step widens no spread


def test_a_gradient_of_zero_is_a_good_step():
    """As of a step that only pads; its logarithm would be −∞."""
    spikes = seen(SpikeDetector(GuardConfig()))
    assert spikes.judge(3.0, 0.0) is None
    assert all(map(math.isfinite, spikes.state_dict()["norms"]))


def test_without_sigma_only_what_is_not_finite_is_bad():
    spikes = seen(SpikeDetector(GuardConfig(sigma=0)))
    assert spikes.judge(1e9, 1e9) is None
    assert spikes.judge(math.nan, 1.0) is not None


def test_the_window_slides_comes_back_and_begins_late():
    config = GuardConfig(window=20)
    spikes = SpikeDetector(config)
    for _ in range(MIN_GOOD_STEPS - 1):
        assert spikes.judge(3.0, 1.0) is None
    assert spikes.judge(50.0, 1.0) is None  # too few to tell
    for i in range(40):
        spikes.judge(8 - 0.01 * i, 1.0)
    assert len(spikes.losses) == 20
    again = SpikeDetector(config)
    again.load_state_dict(json.loads(json.dumps(spikes.state_dict())))
    assert again.state_dict() == spikes.state_dict()
    assert again.judge(9.5, 1.0) == spikes.judge(9.5, 1.0) is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [("sigma", -1), ("window", 3), ("max_bad_steps", 0), ("max_rollbacks", 0), ("hang_timeout", 0)],
)
def test_settings_that_cannot_work(key, value):
    with pytest.raises(InputError, match=f"guard.{key}"):
        check_bounds(GuardConfig(**{key: value}), "guard")


# ------------------------------ in the loop


def poisoned(monkeypatch, steps: dict[int, str]) -> Counter:
    """Spoils the loss or the gradients of the given optimizer steps, counted as they are tried."""
    tried: Counter = Counter()
    summed, judge = summed_loss, SpikeDetector.judge

    def loss(*arguments, **options):
        kind = steps.get(tried["steps"] + 1)
        value = summed(*arguments, **options)
        if kind == "nan loss":
            return value * math.nan
        if kind == "spike":
            return value * 1e9
        if kind == "nan gradient":
            value = value.clone()
            value.register_hook(lambda g: g * math.nan)
        return value

    def count(self, *values):
        tried["steps"] += 1
        return judge(self, *values)

    monkeypatch.setattr(training_step, "summed_loss", loss)
    monkeypatch.setattr(SpikeDetector, "judge", count)
    return tried


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step-{step}"
    files = ("model.safetensors", "optimizer.safetensors")
    return {k: v for name in files for k, v in safetensors.torch.load_file(folder / name).items()}


NO_VALIDATION = ("validation.every=0", "guard.window=16")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        pytest.param("nan loss", 4, marks=pytest.mark.slow),
        ("nan gradient", 4),
        ("spike", MIN_GOOD_STEPS + 2),
    ],
)
def test_a_bad_step_changes_nothing(recipe, tmp_path, monkeypatch, kind, bad):
    """Not a bit of weights, moments or their counts, although weight decay alone would move them."""
    poisoned(monkeypatch, {bad: kind})
    steps = f"train.steps={bad + 2}"
    loop.train(
        configured(
            recipe,
            tmp_path / "run",
            steps,
            "checkpoint.every=1",
            "checkpoint.keep_last=24",
            *NO_VALIDATION,
        )
    )
    before = tensors(tmp_path / "run", bad - 1)
    # A checkpoint between bad steps is none that a run could go back to.
    assert not (tmp_path / "run" / "checkpoints" / f"step-{bad}").exists()
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    (event,) = [line for line in lines if "event" in line]
    assert (event["step"], event["event"]) == (bad, "skipped")
    assert ("nan" in event["reason"]) == (kind != "spike")
    assert [line["step"] for line in lines if "loss" in line] == [
        *range(1, bad),
        *range(bad + 1, bad + 3),
    ]
    stopped = tmp_path / "stopped"
    poisoned(monkeypatch, {bad: kind})
    monkeypatch.setattr(
        training_step, "learning_rate", kicked(training_step.learning_rate, bad - 1, signal.SIGTERM)
    )
    with pytest.raises(SystemExit):
        loop.train(configured(recipe, stopped, steps, "checkpoint.every=50", *NO_VALIDATION))
    after = tensors(stopped, bad)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def kicked(function, step: int, signum: int):
    def kick(at, *rest):
        if at == step:
            signal.raise_signal(signum)
        return function(at, *rest)

    return kick


@pytest.mark.slow
def test_a_run_stopped_between_bad_steps_goes_on_as_if_it_had_not(recipe, tmp_path, monkeypatch):
    bad = dict.fromkeys((18, 19, 20), "spike")
    settings = ("guard.max_bad_steps=3", "train.steps=22", *NO_VALIDATION)
    with monkeypatch.context() as patch:
        poisoned(patch, bad)
        loop.train(configured(recipe, tmp_path / "whole", *settings))
    with monkeypatch.context() as patch:
        poisoned(patch, bad)
        patch.setattr(
            training_step, "learning_rate", kicked(training_step.learning_rate, 18, signal.SIGUSR1)
        )
        with pytest.raises(SystemExit) as stop:
            loop.train(configured(recipe, tmp_path / "run", *settings))
        assert stop.value.code == 128 + signal.SIGUSR1
    at = step_of(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    with monkeypatch.context() as patch:
        poisoned(patch, {s - at: kind for s, kind in bad.items()})
        loop.train(configured(recipe, tmp_path / "run", *settings))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_bad_steps_in_a_row_go_back_and_past_their_data(recipe, tmp_path, monkeypatch, capsys):
    """Checkpoints lie at 5, 10, 15; steps 17 to 19 are bad, so that 16 is done anew with other rows."""
    read = []
    monkeypatch.setattr(
        training_step, "count_labels", lambda batch, *_: read.append(batch) or count_labels(batch)
    )
    poisoned(monkeypatch, {17: "nan loss", 18: "nan gradient", 19: "nan loss"})
    loop.train(configured(recipe, tmp_path / "run", "guard.max_bad_steps=3", *NO_VALIDATION))
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 25))
    *skipped, event = [line for line in lines if "event" in line]
    # The bad steps' own events stay, although the run went back before them.
    assert [(line["event"], line["step"]) for line in skipped] == [
        ("skipped", s) for s in (17, 18, 19)
    ]
    assert (event["event"], event["to"], event["at"], len(event["reasons"])) == (
        "rollback",
        15,
        19,
        3,
    )
    rows = [tuple(row.tolist()) for batch in read for row in batch["input_ids"]]
    assert len(rows) == 8 * (24 + 4)
    assert rows[8 * 15 : 8 * 19] != rows[8 * 19 : 8 * 23]
    out = capsys.readouterr().out
    assert "step-15" in out
    assert (
        out.count("by steps 2 to 11") == out.count(" by steps ") == 1
    )  # the estimate of the launch
    assert (
        "causal attention is half of T × T"
        in json.loads((tmp_path / "run" / "run.json").read_text())["flops"]
    )


def test_a_run_that_does_not_get_past_it_stops(recipe, tmp_path, monkeypatch):
    poisoned(monkeypatch, dict.fromkeys(range(8, 99), "nan loss"))
    settings = ("guard.max_bad_steps=2", "guard.max_rollbacks=2", *NO_VALIDATION)
    with pytest.raises(
        InputError,
        match=r"step 7: 2 steps in a row were left out .*nan.*going back to .*step-5.*did not help",
    ) as e:
        loop.train(configured(recipe, tmp_path / "run", *settings))
    assert "\n" not in str(e.value)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["state"] == "failed"
    assert "left out" in facts["reason"]


def steps_named(monkeypatch) -> list[tuple[int, int]]:
    """Of each step that begins: how many the run has made, and how many `nalanda runs` names then."""
    named, make_step = [], loop.forward_backward

    def name_and_make(run):
        named.append((run.at.step, read_run(run.config.run_dir).step))
        return make_step(run)

    monkeypatch.setattr(loop, "forward_backward", name_and_make)
    return named


@pytest.mark.slow
def test_where_going_back_does_not_help_it_goes_further_back(recipe, tmp_path, monkeypatch, capsys):
    """Steps 17 to 20 are bad: back to 15 and bad again, back to 10, where the steps are good once more."""
    poisoned(monkeypatch, dict.fromkeys(range(17, 21), "nan loss"))
    named = steps_named(monkeypatch)
    loop.train(configured(recipe, tmp_path / "run", "guard.max_bad_steps=2", *NO_VALIDATION))
    assert named == [(step, step) for step in (*range(18), 15, 16, *range(10, 24))]
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [line["to"] for line in lines if line.get("event") == "rollback"] == [15, 10]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 25))
    folder = tmp_path / "run" / "checkpoints"
    assert all(
        why_unusable(path) is None for path in checkpoint_folders(folder)
    )  # 15 was made again


def test_a_later_spike_goes_back_to_the_newest_checkpoint(recipe, tmp_path, monkeypatch):
    """After a rollback to 4 steps are good again: the next one is to 6, and 4 stays sound."""
    poisoned(monkeypatch, dict.fromkeys((5, 6, 9, 10), "nan loss"))
    named = steps_named(monkeypatch)
    settings = ("guard.max_bad_steps=2", "checkpoint.every=2", "train.steps=8")
    loop.train(configured(recipe, tmp_path / "run", *settings, *NO_VALIDATION))
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [line["to"] for line in lines if line.get("event") == "rollback"] == [4, 6]
    folders = checkpoint_folders(tmp_path / "run" / "checkpoints")
    assert [step_of(path) for path in folders if why_unusable(path) is None] == [2, 4, 6, 8]
    assert named == [(step, step) for step in (0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7)]


def spoil(model, optimizer, kind: str) -> None:
    """One value of a weight or of a moment, as a broken machine or kernel leaves it."""
    weight = next(p for p in model.parameters() if p.ndim == 2)
    where, _, value = kind.partition(" ")
    tensor = weight.data if where == "weight" else optimizer.state[weight]["exp_avg_sq"]
    tensor.view(-1)[5] = float(value)


SPOILT = ["weight nan", "weight inf", "weight 1e30", "moment nan", "moment inf", "moment 1e30"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but_for(["weight nan", "moment 1e30"], SPOILT))
def test_spoilt_weights_and_moments_are_never_saved(recipe, tmp_path, monkeypatch, kind):
    """A value goes bad between the update of step 6 and its save: only the save can see it."""
    asked, unsound = [], checkpoint.Saver.unsound

    def struck(saver, model, optimizer):
        asked.append(1)
        if len(asked) == 3:
            spoil(model, optimizer, kind)
        return unsound(saver, model, optimizer)

    monkeypatch.setattr(checkpoint.Saver, "unsound", struck)
    run = tmp_path / "run"
    settings = ("train.steps=8", "checkpoint.every=2", "checkpoint.keep_last=1")
    loop.train(configured(recipe, run, *settings, *NO_VALIDATION))
    found = [line for line in read_metrics(run / "metrics.jsonl") if "event" in line]
    assert [(line["event"], line["step"]) for line in found] == [("unsound", 6), ("rollback", 5)]
    assert re.search("exp_avg_sq" if "moment" in kind else "weight", found[0]["reason"])
    assert all(torch.isfinite(t).all() and t.abs().max() < 1e3 for t in tensors(run, 8).values())


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(), ("train.resume=10",)], ids=("newest", "chosen"))
def test_a_spoilt_checkpoint_is_marked_and_passed_over(
    recipe, tmp_path, monkeypatch, capsys, chosen
):
    """One that an older version saved, or that went bad on its way to the disk: its sums fit."""
    run, save = tmp_path / "run", checkpoint.Saver.save

    def spoiled(saver, step, *, model, optimizer, **state):
        if step == 10:
            spoil(model, optimizer, "moment inf")
        return save(saver, step, model=model, optimizer=optimizer, **state)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Saver, "unsound", lambda *_: None)
        patch.setattr(checkpoint.Saver, "save", spoiled)
        loop.train(
            configured(recipe, run, "train.steps=10", "schedule.name=constant", *NO_VALIDATION)
        )
    assert why_unusable(run / "checkpoints" / "step-10") is None
    capsys.readouterr()
    settings = ("train.steps=12", "schedule.name=constant", *NO_VALIDATION)
    loop.train(configured(recipe, run, *settings, *chosen))
    out = capsys.readouterr().out
    assert re.search(r"step-10: unsound, passed over: .*exp_avg_sq has values of inf", out)
    assert "resumes from step-5" in out
    if chosen:  # it is later than the one that the run goes on from
        assert unsound_reason(run / "checkpoints" / "later-step-10") is not None
    loop.train(configured(recipe, tmp_path / "other", *settings))
    assert outcome(run) == outcome(tmp_path / "other")


def test_steps_that_overflowed_are_steps_that_were_left_out(recipe, tmp_path, monkeypatch):
    """Without one good step there is no model to write, whatever left them out."""
    judged = iter(("overflow", "skip", "overflow"))
    monkeypatch.setattr(
        loop, "judge", lambda run, step: training_step.Judgement(next(judged), "as it was told")
    )
    settings = ("train.steps=3", *NO_VALIDATION)
    with pytest.raises(NothingTrained, match="all 3 steps were left out"):
        loop.train(configured(recipe, tmp_path / "run", *settings))


def test_a_run_that_skipped_every_step_says_so(recipe, tmp_path, monkeypatch):
    settings = ("train.steps=3", *NO_VALIDATION)
    poisoned(monkeypatch, dict.fromkeys(range(1, 4), "nan loss"))
    for _ in range(2):  # and when it is started again
        with pytest.raises(NothingTrained, match="all 3 steps were left out") as error:
            loop.train(configured(recipe, tmp_path / "run", *settings))
        assert error.value.exit_code == 65
        assert read_facts(tmp_path / "run")["state"] == "failed"
        assert not (tmp_path / "run" / "final").exists()


@pytest.mark.slow
def test_without_a_checkpoint_what_was_learnt_before_bad_steps_is_saved(
    recipe, tmp_path, monkeypatch
):
    """Bad steps change no weight; the next start skips their rows."""
    run, settings = tmp_path / "run", ("checkpoint.every=0", *NO_VALIDATION)
    with monkeypatch.context() as patch:
        poisoned(patch, dict.fromkeys(range(18, 99), "spike"))
        with pytest.raises(
            InputError, match=r"learnt is saved in .*step-22\. .*guard.sigma"
        ) as error:
            loop.train(configured(recipe, run, *settings))
    assert "\n" not in str(error.value)
    with monkeypatch.context() as patch:
        poisoned(patch, {18: "nan loss"})
        patch.setattr(
            training_step, "learning_rate", kicked(training_step.learning_rate, 17, signal.SIGTERM)
        )
        with pytest.raises(SystemExit):
            loop.train(configured(recipe, tmp_path / "other", *settings))
    before, after = tensors(tmp_path / "other", 18), tensors(run, 22)
    assert all(torch.equal(before[name], after[name]) for name in before)
    loop.train(configured(recipe, run, "optim.lr=1e-3", *settings))
    assert read_facts(run)["state"] == "finished"


def test_without_a_checkpoint_it_stops_at_once(recipe, tmp_path, monkeypatch):
    poisoned(monkeypatch, dict.fromkeys(range(1, 99), "nan loss"))
    with pytest.raises(
        InputError, match=r"step 5: 5 steps in a row .*; there is no checkpoint from before them"
    ):
        loop.train(configured(recipe, tmp_path / "run", "checkpoint.every=1", *NO_VALIDATION))


@pytest.fixture(autouse=True)
def usual_signals():
    """The signals act as in a terminal, also where a launcher of the tests ignores SIGINT or SIGHUP."""
    usual = dict.fromkeys((signal.SIGHUP, signal.SIGTERM), signal.SIG_DFL)
    usual[signal.SIGINT] = signal.default_int_handler
    before = {signum: signal.signal(signum, handler) for signum, handler in usual.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def interrupt(recipe, run, monkeypatch, signum):
    with monkeypatch.context() as patch:
        patch.setattr(
            training_step, "learning_rate", kicked(training_step.learning_rate, 9, signum)
        )
        with pytest.raises(SystemExit) as stop:
            loop.train(configured(recipe, run))
    assert stop.value.code == 128 + signum


SAVING = (signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT)


@pytest.mark.sampled
@pytest.mark.parametrize("signum", slow_but_for([signal.SIGHUP, signal.SIGINT], SAVING))
def test_signals_save(recipe, tmp_path, whole, monkeypatch, capfd, signum):
    interrupt(recipe, tmp_path / "run", monkeypatch, signum)
    assert read_facts(tmp_path / "run")["state"] == "interrupted"
    # The next start makes the validation of step 10.
    assert not any("val_loss" in line for line in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    saved, expected = tensors(tmp_path / "run", 10), tensors(whole, 10)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert ("ctrl-C after 3 s ends at once" in capfd.readouterr().err) == (signum == signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("signum", slow_but_for([signal.SIGINT], [signal.SIGUSR1, signal.SIGINT]))
def test_a_run_that_a_signal_stopped_goes_on(recipe, tmp_path, whole, monkeypatch, signum):
    interrupt(recipe, tmp_path / "run", monkeypatch, signum)
    loop.train(configured(recipe, tmp_path / "run"))
    assert outcome(tmp_path / "run") == outcome(whole)


def kept_handlers(*signums: int):
    return {signum: signal.getsignal(signum) for signum in signums}


PAIRS = [
    ("SIGTERM", "SIGTERM"),
    ("SIGTERM", "SIGHUP"),
    ("SIGXCPU", "SIGXCPU"),
    ("SIGUSR1", "SIGINT"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_two_signals_that_save_together(recipe, tmp_path, monkeypatch, pair):
    """A scheduler and torchrun both send SIGTERM; systemd sends SIGTERM and SIGHUP; the system repeats SIGXCPU
    every second until the process ends."""
    first, second = (getattr(signal, name) for name in pair)
    before = kept_handlers(first, second)
    monkeypatch.setattr(
        training_step,
        "learning_rate",
        kicked(kicked(training_step.learning_rate, 3, second), 3, first),
    )
    with pytest.raises(SystemExit) as stop:
        loop.train(configured(recipe, tmp_path / "run", *NO_VALIDATION))
    assert stop.value.code in (128 + first, 128 + second)
    assert step_of(latest_checkpoint(tmp_path / "run" / "checkpoints")) == 4
    assert read_facts(tmp_path / "run")["state"] == "interrupted"
    assert kept_handlers(first, second) == before


@pytest.mark.parametrize("launched", [False, True])
def test_a_later_signal_of_the_same_kind_ends_a_process_that_has_no_launcher(monkeypatch, launched):
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    with guards.Interruptions() as signals:
        signals.first = lambda: None
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert not ended
        monkeypatch.setattr(guards, "SAME_SIGNAL", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert ended == [True] * (not launched)
        assert signals.received == [signal.SIGTERM] * 3


def test_nohup_keeps_a_run_going():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with guards.Interruptions() as signals:
            signals.first = lambda: None
            signal.raise_signal(signal.SIGHUP)
            assert signals.received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupted_set_up_has_no_reason_of_an_earlier_failure(tmp_path):
    """The list of runs shows the reason, and a page when the run ended."""
    failed = {
        "state": "failed",
        "reason": "out of memory",
        "diverged": False,
        "ended": "2026-01-01",
    }
    with pytest.raises(KeyboardInterrupt), loop.record_interruption(tmp_path, failed, main=True):
        raise KeyboardInterrupt
    assert read_facts(tmp_path) == {"state": "interrupted", "step": 0, "saved": 0}


@pytest.mark.slow
@pytest.mark.parametrize("signum", slow_but_for([signal.SIGINT], [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_while_the_run_is_set_up_ends_it_and_the_next_start_begins_again(
    recipe, tmp_path, whole, monkeypatch, capsys, signum
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_model", lambda *_, **__: signal.raise_signal(signum))
        with pytest.raises(SystemExit if signum == signal.SIGTERM else KeyboardInterrupt) as stop:
            loop.train(configured(recipe, run))
    assert getattr(stop.value, "code", None) in (128 + signum, None)
    assert "interrupted while setting up: the same command starts again" in capsys.readouterr().out
    assert read_facts(run)["state"] == "interrupted"
    loop.train(configured(recipe, run))
    assert outcome(run) == outcome(whole)


def test_run_json_says_interrupted_while_the_run_still_saves(recipe, tmp_path, monkeypatch):
    """A second signal may end it there."""
    states, commit = [], checkpoint.Saver._commit

    def read(saver, step, files):
        states.append((step, read_facts(tmp_path / "run")["state"]))
        return commit(saver, step, files)

    monkeypatch.setattr(checkpoint.Saver, "_commit", read)
    monkeypatch.setattr(
        training_step, "learning_rate", kicked(training_step.learning_rate, 6, signal.SIGTERM)
    )
    with pytest.raises(SystemExit):
        loop.train(configured(recipe, tmp_path / "run", "checkpoint.asynchronous=false"))
    assert states == [(5, "running"), (7, "interrupted")]


def test_a_signal_does_not_interrupt_a_finished_run():
    """Only its model is still to be written."""
    run = SimpleNamespace(facts={"state": "finished"})
    loop.note_stop(run)
    assert run.facts == {"state": "finished"}


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_under_way_when_the_signal_comes_is_the_last(
    recipe, tmp_path, monkeypatch, asynchronous
):
    """No further step is made and saved: that would take the time twice that a preemption leaves."""
    run, contents, saved = tmp_path / "run", checkpoint.shared_contents, []

    def signalled(step, *rest):
        saved.append(step)
        signal.raise_signal(signal.SIGTERM)
        return contents(step, *rest)

    monkeypatch.setattr(checkpoint, "shared_contents", signalled)
    settings = (f"checkpoint.asynchronous={asynchronous}", *NO_VALIDATION)
    with pytest.raises(SystemExit) as stop:
        loop.train(configured(recipe, run, *settings))
    assert stop.value.code == 128 + signal.SIGTERM
    assert saved == [5]
    assert latest_checkpoint(run / "checkpoints") == run / "checkpoints" / "step-5"
    assert read_facts(run)["saved"] == 5
    assert max(line["step"] for line in read_metrics(run / "metrics.jsonl")) == 5


def test_the_position_in_the_data_is_only_made_for_a_checkpoint(recipe, tmp_path, monkeypatch):
    made, state_dict = [], PackedBatches.state_dict
    monkeypatch.setattr(
        PackedBatches, "state_dict", lambda self: made.append(1) or state_dict(self)
    )
    loop.train(
        configured(recipe, tmp_path / "run", "train.steps=6", "checkpoint.every=3", *NO_VALIDATION)
    )
    assert len(made) == 2


@pytest.mark.slow
@pytest.mark.parametrize("step", [10, 24])
def test_a_run_killed_in_a_validation_has_saved_and_makes_it_up(
    recipe, tmp_path, whole, monkeypatch, step
):
    beats: list[str] = []

    def killed(*arguments):
        values = validate(*arguments)
        if beats[-1] == f"step {step}, validation":
            raise KeyboardInterrupt
        return values

    validate, run = loop.validate, tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "validate", killed)
        patch.setattr(guards.Watchdog, "beat", lambda watchdog, what: beats.append(what))
        with pytest.raises(KeyboardInterrupt):
            # A checkpoint of a thread might not be on the disk yet.
            loop.train(
                configured(recipe, run, "checkpoint.every=10", "checkpoint.asynchronous=false")
            )
    assert beats.count(f"step {step}, validation") == 2  # one for each batch
    assert beats.count("step 1, forward and backward") == 2
    assert step_of(latest_checkpoint(run / "checkpoints")) == step
    loop.train(configured(recipe, run, "checkpoint.every=10"))
    assert outcome(run) == outcome(whole)


@pytest.mark.slow
def test_a_checkpoint_that_falls_on_a_bad_step_is_saved_at_the_next_good_one(
    recipe, tmp_path, monkeypatch
):
    run, settings = tmp_path / "run", ("train.steps=13", *NO_VALIDATION)
    with monkeypatch.context() as patch:
        poisoned(patch, {5: "nan loss", 10: "nan loss", 11: "nan loss"})
        patch.setattr(
            training_step, "learning_rate", kicked(training_step.learning_rate, 9, signal.SIGTERM)
        )
        with pytest.raises(SystemExit):
            loop.train(configured(recipe, run, *settings))
    assert [step_of(path) for path in checkpoint_folders(run / "checkpoints")] == [
        6,
        10,
    ]  # 10: stopped there
    with monkeypatch.context() as patch:
        poisoned(patch, {1: "nan loss"})
        loop.train(configured(recipe, run, *settings))
    assert [step_of(path) for path in checkpoint_folders(run / "checkpoints")] == [6, 10, 12, 13]


def test_an_overflow_between_bad_steps_does_not_lose_a_save():
    """Steps 8 and 9 are bad, 10 overflows, 11 is good: the checkpoint of step 8 is due at 11."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    run = SimpleNamespace(
        at=TrainerState(step=7, settled=7),
        optimizer=optimizer,
        carried_states=None,
        rolled_back_to=None,
        log=SimpleNamespace(event=lambda *_, **__: None),
        facts={},
        speed=SimpleNamespace(add=lambda _: None),
        rank_times=SimpleNamespace(end_step=lambda: None),
        averages=SimpleNamespace(update=lambda: None),
        stage=SimpleNamespace(end=99),
        config=SimpleNamespace(
            train=SimpleNamespace(tokens_per_step=1), checkpoint=SimpleNamespace(every=8)
        ),
    )
    due = []
    for number, kind in enumerate(("skip", "skip", "overflow", "good", "good"), 8):
        step = training_step.Step(number, run.at.settled, 0.0, 1.0, 1.0, 1.0, None)
        training_step.apply(run, step, training_step.Judgement(kind, "a reason"))
        due.append(loop.save_is_due(run, step))
    assert due == [False, False, False, True, False]


def test_unsound_weights_are_not_saved_when_the_data_stops(recipe, tmp_path, monkeypatch):
    def failing(batches, count, take=training_step.take_batches):
        taken, error = take(batches, count)
        calls.append(1)
        return (taken[:1], SourceUnavailable("hub: 9 times")) if len(calls) == 8 else (taken, error)

    calls: list = []
    monkeypatch.setattr(training_step, "take_batches", failing)
    monkeypatch.setattr(
        checkpoint.Saver, "unsound", lambda *_: "nan weights" if len(calls) == 8 else None
    )
    with pytest.raises(SourceUnavailable):
        loop.train(configured(recipe, tmp_path / "run"))
    assert step_of(latest_checkpoint(tmp_path / "run" / "checkpoints")) == 5
    events = [
        line
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line.get("event") == "unsound"
    ]
    assert [(line["step"], line["reason"]) for line in events] == [(7, "nan weights")]


@pytest.mark.slow
def test_data_that_stops_saves_what_was_learnt(recipe, tmp_path, whole, monkeypatch):
    def failing(batches, count, take=training_step.take_batches):
        taken, error = take(batches, count)
        calls.append(1)
        return (taken[:1], SourceUnavailable("hub: 9 times")) if len(calls) == 8 else (taken, error)

    calls: list = []
    with monkeypatch.context() as patch:
        patch.setattr(training_step, "take_batches", failing)
        with pytest.raises(SourceUnavailable) as error:
            loop.train(configured(recipe, tmp_path / "run"))
    assert error.value.exit_code == 75
    assert step_of(latest_checkpoint(tmp_path / "run" / "checkpoints")) == 7
    loop.train(configured(recipe, tmp_path / "run"))
    assert outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.slow
def test_a_run_whose_tokeniser_is_killed_saves_and_ends_with_a_line(recipe, tmp_path, monkeypatch):
    """As the system kills one where memory is short."""
    this = psutil.Process()
    others = set(this.children())  # of other tests, such as a server that forks
    killed, report = [], loop.report

    def kill(run, step, verdict):
        report(run, step, verdict)
        for child in set(this.children()) - others if not killed else ():
            child.kill()
            killed.append(child.pid)

    monkeypatch.setattr(loop, "report", kill)
    monkeypatch.setattr(packing, "STREAM_GROUP", 3000)  # so that what was read ahead ends soon
    settings = ("train.steps=2000", "checkpoint.every=0", "data.workers=2", *NO_VALIDATION)
    with pytest.raises(
        InputError, match=r"^data\.workers: a process that tokenises ended"
    ) as error:
        loop.train(configured(recipe, tmp_path / "run", *settings))
    assert "\n" not in str(error.value)
    assert len(killed) == 2
    last = max(line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert step_of(latest_checkpoint(tmp_path / "run" / "checkpoints")) == last


@pytest.mark.slow
def test_a_process_that_hangs_says_where_and_ends():
    program = """
import time
from nalanda.train.guards import Watchdog
def asleep_on_purpose():
    time.sleep(60)
watch = Watchdog(0.2, rank=3)
watch.beat("step 7, reading data")
asleep_on_purpose()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == ExitCode.HUNG
    assert "rank 3 on " in done.stderr
    assert "step 7, reading data" in done.stderr
    assert "asleep_on_purpose" in done.stderr


def test_in_set_up_work_is_progress_too(monkeypatch):
    """A tokenizer takes a core for long, a download writes; a dead file system does neither."""
    now = SimpleNamespace(seconds=0.0, work=guards.Work(0.0, 0))
    monkeypatch.setattr(guards, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(guards, "work_done", lambda: now.work)

    def silence_after(
        watch: guards.Watchdog, seconds: float, cpu: float, transferred: int
    ) -> float:
        now.seconds += seconds
        now.work = guards.Work(now.work.seconds + cpu, now.work.transferred + transferred)
        watch.silence()
        return watch.silence()

    watch = guards.Watchdog(None)
    with watch.long_work():
        watch.beat("opening the data")
        assert silence_after(watch, 100, cpu=6, transferred=0) == 0
        assert silence_after(watch, 100, cpu=0, transferred=2 << 20) == 0
        assert silence_after(watch, 100, cpu=4, transferred=1 << 10) == 100
        assert silence_after(watch, 100, cpu=4, transferred=0) == 200
    assert (
        silence_after(watch, 100, cpu=100, transferred=2 << 20) == 100
    )  # in training a beat alone

    for rank, patience in ((0, 8), (1, 16)):
        watch = guards.Watchdog(8, rank)
        with watch.long_work():
            assert watch.timeout == patience
        assert watch.timeout == 8
        watch.close()


def test_the_export_may_take_as_long_as_it_works(stopped, monkeypatch):
    _, config = stopped
    entered, long_work = [], guards.Watchdog.long_work

    def noted(watchdog: guards.Watchdog):
        entered.append(watchdog.what)
        return long_work(watchdog)

    monkeypatch.setattr(guards.Watchdog, "long_work", noted)
    loop.train(config)
    assert entered == ["starting", "writing the model"]


@pytest.mark.slow
def test_a_set_up_that_hangs_says_where_and_ends(recipe, tmp_path):
    program = f"""
import time
from nalanda.config.load import load_config
from nalanda.train import build, loop
def asleep_on_purpose(*_):
    time.sleep(60)
build.open_data = asleep_on_purpose
loop.train(load_config({str(recipe)!r}, ["output_dir={tmp_path}/run", "guard.hang_timeout=2"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == ExitCode.HUNG
    assert "at: setting up, opening the data; its stacks follow" in done.stderr
    assert "asleep_on_purpose" in done.stderr


def test_a_process_that_moves_is_left_alone():
    watch = guards.Watchdog(0.4)
    for _ in range(20):
        watch.beat("moving")
        watch.ended.wait(0.05)
    watch.close()
    assert os.getpid()  # still here


@pytest.mark.slow
def test_two_runs_never_share_a_folder(recipe, tmp_path, monkeypatch):
    acquire = FileLock.acquire
    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout: acquire(lock, timeout=0))
    config = configured(recipe, tmp_path / "run", "train.steps=2", "validation.every=0")
    loop.train(config)
    longer = configured(recipe, tmp_path / "run", "train.steps=4", "validation.every=0")
    # Begun, with nothing saved yet, and another tokenizer: what the refused one would change.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "run.json").write_text('{"saved": 0}')
    moved = configured(
        recipe,
        tmp_path / "run",
        "train.steps=4",
        f"data.source={shutil.copytree(recipe.parent, tmp_path / 'copy')}",
    )

    def content() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}

    before = content()
    for other in (longer, moved):
        with (
            lock_run_dir(tmp_path / "run", config),
            pytest.raises(InputError, match="another process is training there"),
        ):
            loop.train(other)
        assert content() == before
    loop.train(longer)
