"""A rehearsal measures a run, refuses what it would refuse, and leaves nothing."""

import os
import signal

import pytest
from training import configured, contents, start

import nalanda_cli
from nalanda.common.errors import InputError
from nalanda.report import rehearse as rehearsal
from nalanda.report.rehearse import rehearse
from nalanda.train import build, loop
from nalanda.train.log import read_metrics

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_a_rehearsal_measures_beside_the_estimate_and_leaves_nothing(
    recipe, tmp_path, monkeypatch, capsys
):
    seen = {}

    def look(folder):
        seen["steps"] = [path.name for path in (folder / "checkpoints").iterdir()]
        seen["validations"] = (folder / "metrics.jsonl").read_text().count("val_loss")
        seen["verdicts"] = list(verify(folder))
        return seen["verdicts"]

    verify = rehearsal.verify
    monkeypatch.setattr(rehearsal, "verify", look)
    output = tmp_path / "runs" / "mine"
    nalanda_cli.main(["train", str(recipe), f"output_dir={output}", "--rehearse"])

    assert seen["steps"] == ["step-3"]
    assert seen["validations"] == 1
    assert [verdict.good for verdict in seen["verdicts"]] == [True]
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    for row in ("seconds a step", "24 steps", "memory a device", "checkpoint", "disk, at most"):
        assert row in printed
    # On a CPU the peak is the process's own.
    assert ", with data and tokenizer" in printed


@pytest.mark.slow
def test_every_stage_is_rehearsed(recipe, tmp_path, monkeypatch):
    stages = "stages={long: {after_step: 20, data: {seq_len: 64}, train: {tokens_per_step: 512}}}"
    seen, verify = [], rehearsal.verify

    def look(folder):
        seen.extend(read_metrics(folder / "metrics.jsonl"))
        return verify(folder)

    monkeypatch.setattr(rehearsal, "verify", look)
    figures = rehearse(configured(recipe, tmp_path / "mine", stages))
    rates = {x["step"]: x["tokens_per_second"] for x in seen if "loss" in x}
    assert [*rates] == [1, 2, 3, 4, 5, 6]
    # A step has 256 tokens, then 512.
    first, last = (
        (tokens / rates[i] + tokens / rates[i + 1]) / 2 for i, tokens in ((2, 256), (5, 512))
    )
    assert figures["seconds"] == pytest.approx(20 * first + 4 * last)
    assert [x["name"] for x in seen if x.get("event") == "stage"] == ["long"]


def test_its_figures_are_those_of_the_whole_recipe(recipe, tmp_path):
    figures = rehearse(configured(recipe, tmp_path / "mine", "train.steps=2000"))
    assert figures["steps"] == 2000
    assert 0 < figures["estimated_seconds"][0] < figures["estimated_seconds"][1]
    assert figures["seconds"] > 0
    assert figures["bytes"] > 0
    estimated = figures["estimated_checkpoint_bytes"]
    assert figures["checkpoint_bytes"] == pytest.approx(estimated, rel=0.2)
    assert figures["disk_bytes"] == 10 * estimated  # nine are kept
    # Weights, gradients and two moments of at least the embedding.
    assert figures["estimated_bytes"] > 16 * 320 * 32


def test_an_error_and_an_interrupt_leave_nothing(recipe, tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError):
        rehearse(
            configured(recipe, tmp_path / "runs" / "x", f"data.source={tmp_path / 'empty.txt'}")
        )

    def interrupt(run, step, verdict):
        if step.number == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "report", interrupt)
    with pytest.raises(SystemExit) as stop:
        rehearse(configured(recipe, tmp_path / "runs" / "x"))
    assert stop.value.code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_a_step_that_a_machine_cannot_hold_is_refused_before_data_are_read(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "open_data", None)
    settings = ["train.micro_batch_size=1000000", "train.tokens_per_step=64000000"]
    for command in (rehearse, loop.train):
        with pytest.raises(
            InputError, match=r"train\.micro_batch_size: a step needs about .* has "
        ):
            command(configured(recipe, tmp_path / "mine", *settings))
        # A rehearsal leaves nothing, training at most its new tokenizer.
        assert not list(tmp_path.glob("mine/metrics.jsonl"))
        assert command is loop.train or not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_refuses_the_folder_that_training_refuses(recipe, tmp_path, whole):
    before = contents(whole)
    with pytest.raises(InputError, match="holds another run: seed is 3 there and 4 here"):
        rehearse(configured(recipe, whole, "seed=4"))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="no run of Nalanda's"):
        rehearse(configured(recipe, tmp_path))
    assert contents(whole) == before
    assert len(list(tmp_path.iterdir())) == 1
    rehearse(configured(recipe, whole, "optim.lr=1e-3"))  # a resume may change it
    assert contents(whole) == before


@pytest.mark.slow
def test_two_processes_rehearse_together(recipe, tmp_path):
    process = start(recipe, tmp_path / "runs" / "x", "--rehearse", processes=2)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "2 process(es)" in printed
    assert printed.count("memory a device") == 1
    assert not list(tmp_path.iterdir())
