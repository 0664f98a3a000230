"""Damaged files of a run, and models that are of no use."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from covering import covering
from training import configured, contents, outcome
from transformers import AutoModelForCausalLM

from nalanda.common.errors import DiskFull, InputError, explained
from nalanda.common.files import manifest_text
from nalanda.report.verify import verify
from nalanda.train import loop, loss
from nalanda.train.checkpoint_dir import mark_unsound
from nalanda.train.log import read_facts

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


HARMS = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "flipped": lambda file: flip(file),
    "gone": Path.unlink,
}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
@covering(strength=1, harm=HARMS, name=("tokenizer.json", "tokenizer_config.json", "manifest.json"))
def test_a_damaged_tokenizer_is_made_again(stopped, whole, harm, name, capsys):
    """From the same documents; the checkpoint knows whether it is the same."""
    run, config = stopped
    HARMS[harm](run / "tokenizer" / name)
    loop.train(config)
    assert outcome(run) == outcome(whole)
    assert contents(run / "tokenizer") == contents(whole / "tokenizer") or name == "manifest.json"
    if harm != "gone":
        assert f"tokenizer: damaged, made again: {name}" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["num_hidden_layers", "dtype"])
def test_a_damaged_config_in_a_checkpoint_is_no_other_model(stopped, key, capsys):
    run, config = stopped
    file = run / "checkpoints" / "step-24" / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {key: values[key] * 2}))
    loop.train(config)
    out = capsys.readouterr().out
    assert "step-24: damaged, passed over: config.json" in out
    assert "resumes from step-20" in out


@pytest.mark.sampled
@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_run_json_blocks_nothing(stopped, whole, harm):
    run, config = stopped
    HARMS[harm](run / "run.json")
    loop.train(config)
    assert outcome(run) == outcome(whole)
    assert read_facts(run)["state"] == "finished"


@pytest.mark.sampled
@pytest.mark.parametrize("harm", ["emptied", "cut", "gone"])
def test_a_damaged_record_of_the_recipe_is_named(stopped, recipe, whole, harm):
    run, config = stopped
    HARMS[harm](run / "config.yaml")
    before = contents(run)
    words = "is missing: restore it" if harm == "gone" else "the run.s recipe is damaged"
    with pytest.raises(InputError, match=rf"{run / 'config.yaml'}.* {words}") as error:
        loop.train(config)
    assert "\n" not in str(error.value)
    assert contents(run) == before
    shutil.copy(recipe, run / "config.yaml")  # as the message says
    loop.train(config)
    assert outcome(run) == outcome(whole)


@pytest.mark.slow
def test_a_finished_run_whose_model_is_gone_or_cut_exports_it_again(recipe, tmp_path):
    config = configured(recipe, tmp_path / "run", "train.steps=2", "validation.every=0")
    final = loop.train(config) / "final"
    expected = (final / "model.safetensors").read_bytes()
    for harm in (
        lambda: shutil.rmtree(final),
        lambda: os.truncate(final / "model.safetensors", 999),
    ):
        harm()
        loop.train(config)
        assert (final / "model.safetensors").read_bytes() == expected


def test_a_disk_that_fills_up_while_the_model_is_written_is_named_by_the_model(
    stopped, tmp_path, whole, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, config = stopped
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "sendfile", full
        )  # of `shutil.copy`, to which the model's code falls first
        with pytest.raises(DiskFull, match=rf"^{run / 'final'}: the disk is full; make room, and"):
            loop.train(config)
        with pytest.raises(OSError, match="No space") as error:
            shutil.copy(run / "config.yaml", tmp_path / "copy")
    assert str(explained(error.value)).startswith(f"{tmp_path / 'copy'}: the disk is full")
    assert not list(run.glob(".tmp-final*"))
    loop.train(config)
    assert outcome(run) == outcome(whole)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_validation_loss_that_is_not_finite_loses_no_model(
    recipe, tmp_path, monkeypatch, capsys, value
):
    monkeypatch.setattr(loss, "loss_sums", lambda *_: (value, 100))
    run = loop.train(configured(recipe, tmp_path / "run", "train.steps=2"))
    assert AutoModelForCausalLM.from_pretrained(run / "final").config.model_type == "nalanda"
    assert read_facts(run)["state"] == "finished"
    card = (run / "final" / "README.md").read_text()
    assert re.search(rf"validation loss \| {value:g}, perplexity .* at step 2: NOT FINITE", card)
    assert "not finite" in capsys.readouterr().out


def test_verify_says_of_every_checkpoint_what_it_is_worth(stopped, capsys):
    from nalanda_cli import app

    run, _ = stopped
    folder = run / "checkpoints"
    with pytest.raises(SystemExit) as ended:
        app(["verify", str(run)])
    assert not ended.value.code
    assert capsys.readouterr().out.splitlines()[0] == "step-5: whole, finite, loadable"
    flip(folder / "step-5" / "rank-0.pt")

    def put(step: int, file: str, content: bytes) -> None:
        """With its sum."""
        path = folder / f"step-{step}"
        (path / file).write_bytes(content)
        manifest = json.loads((path / "manifest.json").read_text())
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][file] = {"bytes": len(content), "sha256": digest}
        (path / "manifest.json").write_text(manifest_text(manifest))

    for step, file, harm in (
        (10, "model.safetensors", lambda t: t["lm_head.weight"].view(-1)[3].fill_(math.nan)),
        (
            15,
            "optimizer.safetensors",
            lambda t: t.update({"lm_head.weight.exp_avg": torch.zeros(7)}),
        ),
        (20, "optimizer.safetensors", lambda t: t["lm_head.weight.exp_avg"][0, 3].fill_(math.inf)),
    ):
        tensors = safetensors.torch.load_file(folder / f"step-{step}" / file)
        harm(tensors)
        put(step, file, safetensors.torch.save(tensors))
    put(10, "rank-0.pt", b"no archive of torch's")
    mark_unsound(folder / "step-20", "no step behind it was good")
    with pytest.raises(SystemExit) as ended:
        app(["verify", str(run), "--json"])
    assert ended.value.code == 1
    found = {v["step"]: v for v in json.loads(capsys.readouterr().out)}
    assert [step for step, v in found.items() if v["good"]] == [24]
    assert "rank-0.pt" in found[5]["whole"]
    assert found[10]["finite"] == "lm_head.weight has values of nan"
    assert "rank-0.pt" in found[10]["loadable"]
    assert "expected [320, 32]" in found[15]["loadable"]
    assert found[20]["finite"] == "lm_head.weight.exp_avg has values of inf"
    assert found[20]["marked"] == "no step behind it was good"
    for path in (p for p in (folder / "step-24").iterdir() if p.name != "config.json"):
        os.truncate(path, path.stat().st_size // 2)
    *_, last = verify(run)  # every answer is a line, whatever the file
    assert "manifest.json" in last.whole
    assert "model.safetensors" in last.finite
    assert last.loadable != "yes"
    for file in ("trainer.json", "config.json"):  # JSON of another kind
        (folder / "step-24" / file).write_text("[]")
        assert [*verify(run)][-1].loadable != "yes"
    with pytest.raises(InputError, match="no checkpoints here"):
        next(verify(run.parent))
