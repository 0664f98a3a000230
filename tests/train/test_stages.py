"""Runs of several stages: other data, another length or another schedule from a step on."""

import json
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate.state import AcceleratorState
from training import configured, contents, launched, outcome, write_recipe, write_texts
from transformers import AutoTokenizer

from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.data.make_set import make_token_set
from nalanda.data.options import TokenizerOptions
from nalanda.train import loop
from nalanda.train import step as training_step
from nalanda.train.build import open_batches
from nalanda.train.checkpoint_dir import checkpoint_folders, step_of
from nalanda.train.export import export
from nalanda.train.log import read_facts, read_metrics
from nalanda.train.tensor_files import read_weights

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def worker(folder: Path) -> None:
    """In each of two processes: a sharded run with averages, and the same from its checkpoints on."""
    recipe, shared = folder / "recipe.yaml", ("train.parallel=fsdp", "train.ema=[0.9]")
    for name, step in {"whole": None, "border": 8, "within": 12}.items():
        if step and dist.get_rank() == 0:
            resumed_from(step, folder / "whole", folder / name)
        if step:
            dist.barrier()
        AcceleratorState._reset_state(reset_partial_state=True)
        loop.train(configured(recipe, folder / name, *shared))
    dist.barrier()
    dist.destroy_process_group()


STEPS = 14
"""Of the run: 5 of the recipe's own, 3 of `anneal`, 6 of `long`."""


@pytest.fixture(scope="module")
def staged(recipe, tmp_path_factory):
    """A run whose learning rate falls from step 6 on, and that reads other, longer rows from step 9 on."""
    folder = tmp_path_factory.mktemp("staged")
    (folder / "books").mkdir()
    write_texts(folder / "books" / "b.jsonl", 300, (80, 3))
    sections = yaml.safe_load(recipe.read_text())
    sections["train"]["steps"] = STEPS
    sections["schedule"] = {"name": "constant", "warmup_steps": 2}
    sections["checkpoint"] = {"every": 4, "keep_last": 20}
    books = {"name": "books", "source": str(folder / "books"), "weight": 1}
    words = {"name": "words", "source": sections["data"]["source"], "weight": 2}
    sections["stages"] = {
        "anneal": {"after_step": 5, "schedule": {"name": "linear", "min_lr_ratio": 0}},
        "long": {
            "after_step": 8,
            "data": {"mixture": [words, books], "seq_len": 64},
            "train": {"micro_batch_size": 1},
            "optim": {"lr": 1e-3, "weight_decay": 0.5},
        },
    }
    return write_recipe(folder / "recipe.yaml", sections)


@pytest.fixture(scope="module")
def undisturbed(staged, tmp_path_factory):
    AcceleratorState._reset_state(reset_partial_state=True)
    return loop.train(configured(staged, tmp_path_factory.mktemp("runs") / "whole"))


def stop_after(step, config, monkeypatch):
    """Trains up to this step, where a signal stops the run."""

    def kick(run):
        if run.at.step == step - 1:
            signal.raise_signal(signal.SIGTERM)
        return forward_backward(run)

    forward_backward = loop.forward_backward
    with monkeypatch.context() as patch:
        patch.setattr(loop, "forward_backward", kick)
        with pytest.raises(SystemExit, match="143"):
            loop.train(config)
    assert read_facts(Path(config.output_dir))["step"] == step


def test_a_run_goes_through_its_stages(undisturbed):
    lines = list(read_metrics(undisturbed / "metrics.jsonl"))
    steps = {line["step"]: line for line in lines if "loss" in line}
    rates = [steps[step]["lr"] for step in range(1, STEPS + 1)]
    # Linear from step 5 on to 0 at the end, of a peak that falls at step 8.
    linear = [(STEPS - step) / (STEPS - 5) for step in range(6, STEPS + 1)]
    peaks = [3e-3] * 3 + [1e-3] * 6
    expected = [1.5e-3, *[3e-3] * 4, *(p * share for p, share in zip(peaks, linear, strict=True))]
    assert rates == pytest.approx(expected)
    assert [steps[step]["tokens"] for step in steps] == [256 * step for step in steps]

    events = [line for line in lines if "event" in line]
    assert [(e["step"], e["event"], e["name"], e["tokens"]) for e in events] == [
        (6, "stage", "anneal", 5 * 256),
        (9, "stage", "long", 8 * 256),
    ]
    # Each stage ends with a checkpoint and a validation.
    saved = [step_of(folder) for folder in checkpoint_folders(undisturbed / "checkpoints")]
    assert saved == [4, 5, 8, 12, 14]
    assert {5, 8, 10, 14} == {line["step"] for line in lines if "val_loss" in line}
    assert "val_loss/books" in lines[-1] or any("books" in key for key in lines[-1])

    facts = read_facts(undisturbed)["stages"]
    assert [(f["name"], f["after_step"], f["seq_len"]) for f in facts] == [
        (None, 0, 32),
        ("anneal", 5, 32),
        ("long", 8, 64),
    ]


def test_a_card_tells_the_stages_that_had_begun(undisturbed, tmp_path):
    cards = {}
    for step in (8, 12):
        export(undisturbed, tmp_path / str(step), step=step)
        text = (tmp_path / str(step) / "README.md").read_text()
        cards[step] = dict(re.findall(r"\| (data|context) \| (.*) \|", text))
    stages = yaml.safe_load((undisturbed / "config.yaml").read_text())["stages"]
    words, books = (part["source"] for part in stages["long"]["data"]["mixture"])
    assert cards[8] == {"data": words, "context": "32 tokens"}
    assert cards[12] == {"data": f"{words}, then {words}, {books}", "context": "32, then 64 tokens"}


@pytest.mark.slow
def test_a_run_that_stops_in_every_stage_is_the_undisturbed_one(
    staged, undisturbed, tmp_path, monkeypatch
):
    config = configured(staged, tmp_path / "run")
    for step in (3, 5, 7, 8, 9, 12):  # 5 and 8 are the last steps of a stage
        stop_after(step, config, monkeypatch)
    loop.train(config)
    saved = outcome(tmp_path / "run")
    assert saved == outcome(undisturbed)


def resumed_from(step, source, folder):
    """A copy of a run, as if it had been killed behind this checkpoint."""
    run = Path(shutil.copytree(source, folder))
    shutil.rmtree(run / "final")
    for path in checkpoint_folders(run / "checkpoints"):
        if step_of(path) > step:
            shutil.rmtree(path)
    (run / "run.json").write_text(json.dumps({**read_facts(run), "state": "running"}))
    return run


def test_a_resume_at_a_border_enters_the_next_stage(staged, undisturbed, tmp_path):
    """Its checkpoint has the position of the stage that ended there."""
    run = resumed_from(8, undisturbed, tmp_path / "run")
    loop.train(configured(staged, run))
    assert outcome(run) == outcome(undisturbed)


@pytest.mark.slow
def test_a_stage_may_change_until_it_has_begun(staged, undisturbed, tmp_path):
    run = resumed_from(8, undisturbed, tmp_path / "run")
    begun = contents(run)
    length, moved = "stages.anneal.data.seq_len", "stages.anneal.after_step"
    for change, problem in {
        f"{length}=64": f"{length} is None there and 64 here; leave out {length}",
        f"{moved}=4": f"{moved} is 5 there and 4 here; set {moved}=5 to go on with it",
        "stages.new.after_step=7": "stages.long.after_step: 8 is not before",
        "data.seq_len=64": "data.seq_len is 32 there",
    }.items():
        with pytest.raises(InputError, match=problem):
            loop.train(configured(staged, run, change))
        assert contents(run) == begun

    # Neither `long` nor what follows has begun; a schedule is no identity.
    changed = ("stages.long.data.seq_len=32", "stages.anneal.schedule.name=cosine")
    loop.train(configured(staged, run, *changed, "train.steps=9"))
    last = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line][-1]
    assert last["step"] == 9
    assert read_facts(run)["stages"][2]["seq_len"] == 32
    # `long` has begun now.
    with pytest.raises(InputError, match=r"stages\.long\.data\.seq_len is 32 there and 64 here"):
        loop.train(configured(staged, run, "train.steps=10"))


def test_the_data_of_all_stages_are_opened_before_the_first_step(staged, tmp_path):
    missing = "stages.long.data={source: nowhere/x.jsonl}"
    with pytest.raises(InputError, match=r"^stages\.long: .*nowhere/x\.jsonl"):
        loop.train(configured(staged, tmp_path / "run", missing))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ("{a: {after_step: 14}}", r"stages\.a\.after_step: 14 is not before train\.steps 14"),
        ("{a: {after_step: 5}, b: {after_step: 5}}", r"5 is not before stages\.b\.after_step 5"),
        ("{a: {after_step: 0}}", r"stages\.a\.after_step: expected 1 or more, got 0"),
        (
            "{a: {after_step: 9, schedule: {warmup_steps: 6}}}",
            r"stages\.a: schedule\.warmup_steps: 6 is more than the 5 steps of its schedule",
        ),
        ("{a: {after_step: 1, schedule: {name: linear}}}", r"^schedule\.warmup_steps: 2 is more"),
        (
            "{a: {after_step: 5, model: {mixer: gla}}}",
            r"stages\.a\.model: a stage cannot change it",
        ),
        ("{a: {after_step: 5, train: {precision: bf16}}}", r"train\.precision: a stage cannot"),
        ("{a: {after_step: 5, optim: {name: muon}}}", r"optim\.name: a stage cannot change it"),
        ("{a: {after_step: 5, data: {seqlen: 64}}}", r"did you mean stages\.a\.data\.seq_len"),
        ("{a: {after_step: 5, data: {seq_len: 48}}}", r"stages\.a: train\.tokens_per_step: 256"),
        ("{a b: {after_step: 5}}", r"stages\.a b: a name has"),
        ("[{after_step: 5}]", "stages: expected a section of keys"),
    ],
)
def test_stages_that_cannot_work(staged, tmp_path, stages, problem):
    with pytest.raises(InputError, match=problem):
        configured(staged, tmp_path / "run", f"stages={stages}")


def test_a_recipe_with_stages_is_written_as_it_is_read(staged, tmp_path):
    config = configured(staged, tmp_path / "run")
    file = tmp_path / "again.yaml"
    file.write_text(config.to_yaml())
    assert load_config(file) == config


def test_a_stage_changes_what_it_names_and_no_more(staged, tmp_path):
    first, anneal, long = configured(staged, tmp_path / "run").in_stages()
    assert (first.order, anneal.order, long.order) == ("", "", "long")
    assert anneal.config.data == first.config.data
    assert anneal.config.schedule.warmup_steps == 0  # not the recipe's
    assert [stage.schedule_end for stage in (first, anneal, long)] == [5, STEPS, STEPS]
    assert (long.config.data.source, long.config.data.shuffle_buffer) == ("", 50)
    assert (long.config.optim.betas, long.config.optim.weight_decay) == ((0.9, 0.95), 0.5)


def test_data_that_begin_anew_come_in_another_order(staged, undisturbed):
    config = configured(staged, undisturbed)
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "tokenizer")
    rows = []
    for order in ("", "long", "long"):
        batches, _ = open_batches(config, tokenizer, order=order)
        rows.append(next(batches)["input_ids"].tolist())
        batches.close()
    assert rows[0] != rows[1] == rows[2]


@pytest.mark.slow
def test_optimizer_and_guard_begin_anew(staged, undisturbed, tmp_path, monkeypatch):
    decays, windows = [], []

    def noted(run, step, verdict):
        windows.append(len(run.spikes.losses))
        decays.append([group["weight_decay"] for group in run.optimizer.param_groups])
        return apply(run, step, verdict)

    apply = loop.apply
    monkeypatch.setattr(loop, "apply", noted)
    run = resumed_from(5, undisturbed, tmp_path / "run")
    loop.train(configured(staged, run, "train.steps=9", "train.ema=[0.9]"))
    assert decays == [[0.1, 0.0]] * 3 + [[0.5, 0.0]]
    assert windows == [1, 2, 3, 1]


def rolled_back(staged, folder, bad, monkeypatch, *overrides):
    """The rows of every step of a run as they were tried. bad: of a step, how many of its first tries are bad."""
    left, rows = Counter(bad), []

    def judged(run, step):
        left[step.number] -= 1
        return loop.Judgement("skip" if left[step.number] >= 0 else "good", "for the test")

    take = training_step.take_batches

    def taken(batches, count):
        found, failure = take(batches, count)
        rows.append(torch.cat([batch["input_ids"] for batch in found]).tolist())
        return found, failure

    with monkeypatch.context() as patch:
        patch.setattr(loop, "judge", judged)
        patch.setattr(training_step, "take_batches", taken)
        loop.train(configured(staged, folder, "guard.max_bad_steps=2", *overrides))
    return rows


@pytest.mark.slow
def test_a_rollback_to_the_border_stays_in_the_stage(staged, tmp_path, monkeypatch):
    run = tmp_path / "run"
    rows = rolled_back(staged, run, {9: 1, 10: 1}, monkeypatch)
    lines = list(read_metrics(run / "metrics.jsonl"))
    assert [(e["to"], e["at"]) for e in lines if e.get("event") == "rollback"] == [(8, 10)]
    # Steps 9 and 10 are made twice, and no row of theirs is read again.
    assert len(rows) == STEPS + 2
    long = [tuple(row) for step in rows[8:] for row in step]
    assert {len(row) for row in long} == {64}
    assert len(set(long)) == len(long)
    assert [line["name"] for line in lines if line.get("event") == "stage"] == ["anneal", "long"]


@pytest.mark.slow
def test_a_rollback_goes_back_over_a_border(staged, tmp_path, monkeypatch):
    """The checkpoint of the border did not help: the steps before it are made again, of their own stages."""
    run = tmp_path / "run"
    rows = rolled_back(staged, run, {9: 2, 10: 2}, monkeypatch)
    lines = list(read_metrics(run / "metrics.jsonl"))
    events = [(e["to"], e["at"]) for e in lines if e.get("event") == "rollback"]
    assert events == [(8, 10), (5, 10)]
    lengths = [{len(row) for row in step} for step in rows]
    assert lengths == [{32}] * 8 + [{64}] * 4 + [{32}] * 3 + [{64}] * 6
    assert rows[12:15] == rows[5:8]
    # The rows of the bad steps are not read again.
    long = [tuple(row) for step in (*rows[8:12], *rows[15:]) for row in step]
    assert len(set(long)) == len(long)


@pytest.mark.slow
def test_two_processes_that_share_the_model(staged, tmp_path):
    """Stages and averages under FSDP: resumed bit for bit, and on one process with the same rows."""
    shutil.copytree(staged.parent, tmp_path / "two")
    folder = tmp_path / "two"
    launched(__file__, str(folder))
    whole = outcome(folder / "whole")
    assert outcome(folder / "border") == whole
    assert outcome(folder / "within") == whole

    alone = resumed_from(8, folder / "whole", folder / "alone")
    loop.train(configured(staged, alone, "train.ema=[0.9]"))
    assert outcome(alone)["data"] == whole["data"]
    for name in ("model", "ema-0.9"):
        there, here = (
            read_weights(folder / run / "checkpoints" / f"step-{STEPS}", name)
            for run in ("whole", "alone")
        )
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-5)


def carrying(staged, tmp_path) -> tuple[str, ...]:
    """Settings for stages whose rows carry states. That of another number of rows has other slots."""
    tokens = tmp_path / "tokens"
    data = yaml.safe_load(staged.read_text())["data"]
    make_token_set(data["source"], str(tokens), tokenizer=TokenizerOptions(vocab_size=320))
    return (
        f"data.source={tokens}",
        f"tokenizer={tokens}/tokenizer",
        "data.long_documents=carry",
        "stages={slow: {after_step: 4, optim: {lr: 1e-3}}, long: {after_step: 8, train: {micro_batch_size: 2}}}",
    )


@pytest.mark.slow
def test_a_stage_that_carries_states(staged, tmp_path):
    """The stage of other slots begins its data anew; resumed it is the same."""
    carry = carrying(staged, tmp_path)
    config = configured(staged, tmp_path / "run", *carry)
    assert [stage.order for stage in config.in_stages()] == ["", "", "long"]
    whole = loop.train(config)
    for step in (4, 8, 12):
        run = resumed_from(step, whole, tmp_path / f"from-{step}")
        loop.train(configured(staged, run, *carry))
        assert outcome(run) == outcome(whole)


@pytest.mark.slow
def test_a_rollback_over_a_border_cuts_documents_that_carry_states(staged, tmp_path, monkeypatch):
    """Both where the earlier stage is entered again, and where the later one reads on."""
    carry = carrying(staged, tmp_path)
    rolled_back(staged, tmp_path / "run", {9: 2, 10: 2}, monkeypatch, *carry)
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    events = [(e["to"], e["at"]) for e in lines if e.get("event") == "rollback"]
    assert events == [(8, 10), (4, 10)]
    assert [line["step"] for line in lines if "loss" in line][-1] == STEPS


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
