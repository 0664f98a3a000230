"""Runs that were killed, stopped or finished, and go on."""

import json
import random
import shutil
import signal
import threading
import time

import pytest
import torch
from training import configured, contents, outcome, start

from nalanda.common.errors import InputError
from nalanda.common.files import verify_manifest
from nalanda.common.versions import versions
from nalanda.config.load import load_config
from nalanda.report.page import measure_speed
from nalanda.report.page_run import read_page_run
from nalanda.report.verify import verify
from nalanda.train import build, checkpoint, loop, tensor_files
from nalanda.train import step as training_step
from nalanda.train.checkpoint_dir import (
    checkpoint_folders,
    latest_checkpoint,
    mark_unsound,
    step_of,
)
from nalanda.train.log import read_facts, read_metrics

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.mark.slow
def test_sigkill_changes_nothing(recipe, tmp_path, whole):
    """Killed twice from outside, once at any moment and once within a save; then finished in this process."""
    run_dir, slow = tmp_path / "run", ("checkpoint.every=3",)
    lines, saves = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    some = random.randint(4, 12)

    def written() -> int:
        return lines.read_text().count("\n") if lines.exists() else 0

    moments = [
        lambda: written() >= some,
        lambda: (
            len(checkpoint_folders(saves)) >= 4
            and (any(saves.glob(".tmp-step-*")) or written() >= 21)
        ),
    ]
    for moment in moments:
        process = start(recipe, run_dir, *slow)
        deadline = time.monotonic() + 120
        while process.poll() is None and not moment() and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "finished before it was killed"
    assert not (run_dir / "final").exists()
    loop.train(configured(recipe, run_dir))
    assert outcome(run_dir) == outcome(whole)


def test_sigterm_saves_and_the_run_goes_on(recipe, tmp_path, whole, monkeypatch):
    def kick(step, *rest):
        if step == 7:
            signal.raise_signal(signal.SIGTERM)
        return learning_rate(step, *rest)

    learning_rate, before = training_step.learning_rate, signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(training_step, "learning_rate", kick)
    config = configured(recipe, tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        loop.train(config)
    assert stop.value.code == 143
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is before
    last = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert step_of(last) in (7, 8)  # the step that it struck, or the one after
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "interrupted"
    loop.train(config)
    assert outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_its_steps_only(recipe, tmp_path, whole, capsys):
    config = configured(recipe, tmp_path / "run")
    loop.train(config)
    run_dir = tmp_path / "run"
    facts = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**facts, "state": "running"}))
    (run_dir / "checkpoints" / "step-24" / "optimizer.safetensors").write_bytes(b"short")
    capsys.readouterr()
    loop.train(config)
    out = capsys.readouterr().out
    assert "step-24: damaged, passed over: optimizer.safetensors" in out
    assert "resumes from step-20" in out
    assert outcome(run_dir) == outcome(whole)


@pytest.mark.slow
def test_a_finished_run_says_so_and_goes_on_when_steps_are_raised(
    recipe, tmp_path, capsys, monkeypatch
):
    short = configured(recipe, tmp_path / "run", "train.steps=4", "validation.every=0")
    loop.train(short)
    model = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    capsys.readouterr()
    loop.train(short)
    assert "is finished, 4 steps" in capsys.readouterr().out
    other_text = configured(
        recipe, tmp_path / "run", "train.steps=4", "validation.every=0", "data.source=b.txt"
    )
    with pytest.raises(InputError, match=r"choose another output_dir for b\.txt$"):
        loop.train(other_text)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["versions"] == versions()
    facts["versions"]["torch"] = "2.0.1"
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    tokens_left, advance = [], loop.RunLog.advance

    def noted(log, step, seconds, left, **values):
        tokens_left.append(left * values["tokens_per_second"])
        advance(log, step, seconds, left, **values)

    monkeypatch.setattr(loop.RunLog, "advance", noted)
    other = ("validation.every=0", "optim.lr=1e-3", "train.tokens_per_step=512")
    loop.train(configured(recipe, tmp_path / "run", "train.steps=6", *other))
    out = capsys.readouterr().out
    assert f"steps      6 = {4 * 256 + 2 * 512:,} tokens" in out
    assert tokens_left == pytest.approx([512, 0])
    assert f"version of torch: 2.0.1 → {torch.__version__}" in out
    assert "train.steps: 4 → 6" in out
    assert "optim.lr: 0.003 → 0.001" in out
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["changes"][0]["step"] == 4
    assert facts["changes"][0]["optim.lr"] == [0.003, 0.001]
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() != model


@pytest.mark.slow
def test_a_resume_keeps_the_warmup_that_followed_the_steps(recipe, tmp_path, capsys):
    longer = tmp_path / "recipe.yaml"
    longer.write_text(recipe.read_text().replace("warmup_steps: 2", "warmup_steps: 12"))
    run = tmp_path / "run"
    loop.train(configured(longer, run, "train.steps=4"))
    line = "changed    schedule.warmup_steps: 12 → 2 (in proportion to train.steps)"
    assert line in capsys.readouterr().out

    def recorded() -> int:
        return load_config(run / "config.yaml").schedule.warmup_steps

    assert recorded() == 2
    # Of a new run of 8 steps it would be 4: the rates of this one go on.
    loop.train(configured(longer, run, "train.steps=8"))
    assert recorded() == 2
    # Nor does the whole recipe lengthen it, which has as many steps of warm-up as when the run began.
    loop.train(configured(longer, run, "validation.every=0"))
    assert recorded() == 2
    assert "schedule.warmup_steps" not in capsys.readouterr().out

    more = ("validation.every=0", "train.steps=25", "schedule.warmup_steps=12")
    loop.train(configured(longer, run, *more))
    assert "changed    schedule.warmup_steps: 2 → 12" in capsys.readouterr().out


def test_a_refused_start_leaves_no_trace(recipe, tmp_path, capsys):
    """Its settings never ran: the next start says what changed since those that did."""
    run, settings = tmp_path / "run", ("train.steps=4", "validation.every=0")
    loop.train(
        configured(recipe, run, "train.steps=2", "validation.every=0", "schedule.name=constant")
    )
    before = contents(run)
    with pytest.raises(
        InputError,
        match=r"moments of another optimizer, model or version: .*; set optim\.name back, or begin",
    ):
        loop.train(configured(recipe, run, *settings, "optim.name=muon"))
    with pytest.raises(InputError, match=r"no-such-folder"):
        loop.train(
            configured(recipe, run, *settings, "optim.lr=1e-3", "data.source=no-such-folder")
        )
    assert contents(run) == before
    assert [verdict.good for verdict in verify(run)] == [True]
    capsys.readouterr()
    loop.train(configured(recipe, run, *settings, "optim.lr=1e-3"))
    assert "optim.lr: 0.003 → 0.001" in capsys.readouterr().out
    assert load_config(run / "config.yaml").optim.lr == 1e-3
    assert read_facts(run)["changes"][0]["optim.lr"] == [0.003, 0.001]


def test_steps_that_are_lowered(stopped, recipe, capsys):
    """To the step that was reached: the model is validated and written. Below it: refused."""
    run, _ = stopped
    shutil.rmtree(run / "checkpoints" / "step-24")
    before = contents(run)
    with pytest.raises(
        InputError, match=r"train\.steps: 15, but .* goes on from step-20: set 20 or more"
    ):
        loop.train(configured(recipe, run, "train.steps=15"))
    assert contents(run) == before
    loop.train(configured(recipe, run, "train.resume=15", "train.steps=15"))
    said = capsys.readouterr().out
    assert (
        "24 → 15 (already at step 15: nothing is trained, the learning rate did not fall)" in said
    )
    assert "validation at step 15" in said
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "val_loss" in line] == [
        10,
        15,
    ]
    assert "at step 15" in (run / "final" / "README.md").read_text()


@pytest.mark.parametrize("kept", ["run.json", "metrics.jsonl"])
def test_a_run_without_a_usable_checkpoint_is_refused_and_stays_as_it_is(stopped, kept):
    run, config = stopped
    for path in checkpoint_folders(run / "checkpoints"):
        (path / "trainer.json").write_text("{}")
    before = contents(run)
    with pytest.raises(
        InputError, match=r"step-5 is damaged: trainer\.json.*step-24 is damaged.* over"
    ) as error:
        loop.train(config)
    assert "\n" not in str(error.value)
    assert contents(run) == before
    # And where they are gone altogether, which run.json knows or the metrics tell.
    shutil.rmtree(run / "checkpoints")
    (run / "run.json").unlink() if kept == "metrics.jsonl" else (run / "metrics.jsonl").unlink()
    (run / "checkpoints").mkdir()
    before = contents(run)
    with pytest.raises(InputError, match="none is left"):
        loop.train(config)
    assert contents(run) == before


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(recipe, tmp_path, whole):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint.Saver, "save", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            loop.train(configured(recipe, run))
    assert max(line["step"] for line in read_metrics(run / "metrics.jsonl")) == 5
    loop.train(configured(recipe, run))
    assert outcome(run) == outcome(whole)


def test_an_asynchronous_checkpoint_is_whole_when_the_data_fail_behind_it(
    recipe, tmp_path, monkeypatch
):
    run, write, go = tmp_path / "run", checkpoint.write_file, threading.Event()
    monkeypatch.setattr(checkpoint, "write_file", lambda *args: go.wait(20) and write(*args))
    take, wait, taken = training_step.take_batches, checkpoint.Saver.wait, []

    def failing(batches, count):
        taken.append(take(batches, count))
        return taken[-1] if len(taken) <= 5 else (taken[-1][0], InputError("a shard is damaged"))

    def released(self):
        if self._thread is not None:
            go.set()
        wait(self)

    monkeypatch.setattr(training_step, "take_batches", failing)
    monkeypatch.setattr(checkpoint.Saver, "wait", released)
    settings = ("checkpoint.asynchronous=true", "checkpoint.every=5")
    with pytest.raises(InputError, match="a shard is damaged"):
        loop.train(configured(recipe, run, *settings))
    assert latest_checkpoint(run / "checkpoints") == run / "checkpoints" / "step-5"


def test_a_forks_time_is_its_own(recipe, whole, tmp_path):
    """Its tokens go on from those of the run that it forks, whose hours it did not train."""
    settings = (f"train.resume={whole}/checkpoints/step-24", "validation.every=0", "log.every=2")
    for steps in (26, 28):  # the second start goes on from the fork's own checkpoint
        fork = loop.train(configured(recipe, tmp_path / "fork", *settings, f"train.steps={steps}"))

    lines = [line for line in read_metrics(fork / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [26, 28]
    seconds = sum(2 * 256 / line["tokens_per_second"] for line in lines)
    run = read_page_run(fork, 0)
    assert 3600 * run.hours == pytest.approx(seconds)
    assert measure_speed(run)[0] == pytest.approx(4 * 256 / seconds)


@pytest.mark.slow
def test_a_person_may_choose_the_checkpoint(stopped, recipe, whole, capsys):
    run, _ = stopped
    chosen = configured(recipe, run, "train.resume=step-10")
    mark_unsound(run / "checkpoints" / "step-10", "no step behind it was good")
    loop.train(configured(recipe, run, "train.resume=10", "train.steps=24"))
    out = capsys.readouterr().out
    assert "resumes from step-10" in out
    assert "step-24 is set aside as later-step-24" in out
    assert outcome(run) == outcome(whole)
    assert verify_manifest(run / "checkpoints" / "later-step-24") is None
    for again in range(2):  # the choice is made once, however often a scheduler repeats the command
        config = configured(
            recipe, run, "train.resume=10", f"train.steps={26 + again}", "validation.every=0"
        )
        loop.train(config)
        assert f"resumes from step-{(24, 26)[again]}" in capsys.readouterr().out
    loop.train(configured(recipe, run, "train.resume=20", "train.steps=24", "validation.every=0"))
    aside = sorted(p.name for p in (run / "checkpoints").glob("later-step-24*"))
    assert aside == ["later-step-24", "later-step-24.2"]  # what was set aside before is still there
    with pytest.raises(InputError, match=r"train\.resume: .* has no step-7; there are .*step-24"):
        loop.train(configured(recipe, run, "train.resume=step-7"))
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    with pytest.raises(InputError, match="optimizer"):  # a refused start changes nothing
        loop.train(
            configured(recipe, run, "train.resume=step-20", "train.steps=30", "optim.name=muon")
        )
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before
    (run / "checkpoints" / "step-10" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(
        InputError, match=r"train\.resume: .*step-10 is damaged: model\.safetensors"
    ):
        loop.train(chosen)


def test_a_run_that_begins_at_another_runs_checkpoint_leaves_that_run_alone(
    stopped, recipe, tmp_path, monkeypatch
):
    """Also after a start of its own that named no checkpoint and was interrupted."""
    other, _ = stopped
    before, run = contents(other), tmp_path / "fork"
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_model", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            loop.train(configured(recipe, run))

    settings = ("validation.every=0", "train.steps=21")
    chosen = f"train.resume={other}/checkpoints/step-20"
    with pytest.raises(InputError, match="goes on from step-20: set 21 or more"):
        loop.train(configured(recipe, run, chosen, "train.steps=20"))
    loop.train(configured(recipe, run, chosen, *settings))
    assert [path.name for path in checkpoint_folders(run / "checkpoints")] == ["step-21"]
    assert contents(other) == before

    monkeypatch.setattr(checkpoint.Saver, "unsound", lambda *_: "spoilt")
    with pytest.raises(InputError, match="no checkpoint can be resumed from"):
        loop.train(configured(recipe, tmp_path / "second", chosen, *settings))
    assert contents(other) == before


@pytest.mark.slow
def test_checkpoints_of_a_thread_are_those_of_the_loop(recipe, tmp_path):
    settings = (
        "train.steps=12",
        "checkpoint.every=1",
        "checkpoint.keep_last=99",
        "validation.every=0",
    )
    kinds = ("true", "false")
    for kind in kinds:
        loop.train(
            configured(recipe, tmp_path / kind, *settings, f"checkpoint.asynchronous={kind}")
        )
    a, b = (checkpoint_folders(tmp_path / kind / "checkpoints") for kind in kinds)
    assert len(a) == len(b) == 12
    for folder, other in zip(a, b, strict=True):
        for name in ("model", "optimizer"):
            found, expected = (
                dict(tensor_files.iterate_tensors(f / f"{name}.safetensors"))
                for f in (folder, other)
            )
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in found)
        assert torch.load(folder / "rank-0.pt")["data"] == torch.load(other / "rank-0.pt")["data"]
