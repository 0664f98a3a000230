"""The folders that a run accepts and refuses."""

import contextlib
import functools
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from training import configured, contents, start

from nalanda.common.errors import InputError, OutOfMemory, output_folder
from nalanda.common.files import manifest_text
from nalanda.config.load import load_config, read_sections
from nalanda.config.model import build_model_config
from nalanda.model import FEATURE_MAPS, NalandaConfig
from nalanda.train import loop, run_dir
from nalanda.train.run_dir import refuse_other_data

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.mark.parametrize(
    "override",
    [
        "seed=4",
        "data.seq_len=16",
        "data.bos=false",
        "tokenizer.vocab_size=300",
        "model.use_gate=false",
    ],
)
def test_a_folder_of_another_run_is_refused(recipe, whole, override):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    key = override.split("=")[0]
    with pytest.raises(
        InputError, match=f"holds another run: {key} is .* choose another output_dir"
    ):
        loop.train(configured(recipe, whole, override))
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob("*")}


@pytest.mark.slow
def test_a_runs_config_yaml_is_its_model_whatever_the_defaults_are(recipe, tmp_path, monkeypatch):
    """Under another default the run is not resumed as another model, and its config.yaml trains its own."""
    run, again = tmp_path / "run", tmp_path / "again"
    settings = ["model.feature_map=nala", "validation.every=0", "schedule.name=constant"]
    loop.train(configured(recipe, run, "train.steps=2", *settings))
    before = contents(run)

    monkeypatch.setitem(FEATURE_MAPS, "nala", functools.partial(FEATURE_MAPS["nala"], power=3.0))
    made = NalandaConfig.__init__
    other_defaults = functools.wraps(made)(
        lambda self, **keys: made(self, **{"norm_eps": 1e-5, **keys})
    )
    monkeypatch.setattr(NalandaConfig, "__init__", other_defaults)
    with pytest.raises(
        InputError, match=r"model\.feature_map_options\.power is 2\.0 there and 3\.0 here; set "
    ):
        loop.train(configured(recipe, run, "train.steps=4", *settings))
    assert contents(run) == before

    loop.train(load_config(run / "config.yaml", [f"output_dir={again}"]))
    models = [json.loads((folder / "final" / "config.json").read_text()) for folder in (run, again)]
    assert models[0] == models[1]
    settings += [
        "model.feature_map_options.power=2.0",
        "model.norm_eps=1e-06",
    ]  # as the messages say
    loop.train(configured(recipe, run, "train.steps=4", *settings))
    wider = load_config(
        run / "config.yaml", ["model.hidden_size=64"]
    )  # what is derived is derived again
    assert (
        build_model_config(wider).head_dim
        == 2 * build_model_config(load_config(run / "config.yaml")).head_dim
    )


def test_a_model_that_a_folder_describes_is_the_runs_own(recipe, tmp_path):
    """The folder may change; the run is not resumed as another model."""
    run, settings = tmp_path / "run", ["validation.every=0", "schedule.name=constant"]
    loop.train(configured(recipe, run, "train.steps=2", *settings))
    folder = tmp_path / "folder"
    shutil.copytree(run / "final", folder)
    begun = tmp_path / "begun"
    more = [*settings, f"model={{init_from: {folder}}}", f"tokenizer={folder}"]
    loop.train(configured(recipe, begun, "train.steps=2", *more))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_eps": 1e-3}))
    with pytest.raises(InputError, match=r"model\.norm_eps is 1e-06 there and 0\.001 here"):
        loop.train(configured(recipe, begun, "train.steps=4", *more))


@pytest.mark.slow
def test_a_run_of_nala_without_exponents_goes_on_as_the_angle(recipe, tmp_path):
    """`nala` meant the angle alone under delta rules, in runs that do not write their model out."""
    run, settings = tmp_path / "run", ["validation.every=0", "schedule.name=constant"]
    loop.train(configured(recipe, run, "train.steps=2", "model.feature_map=angle", *settings))
    older = configured(recipe, run, "train.steps=2", "model.feature_map=nala", *settings)
    (run / "config.yaml").write_text(older.to_yaml())
    file = run / "checkpoints" / "step-2" / "config.json"
    model = json.loads(file.read_text()) | {
        "feature_map": "nala",
        "feature_map_options": {"power": None},
    }
    file.write_text(json.dumps(model))
    more = ["model.feature_map=nala", "model.feature_map_options={power: null}"]
    (run / "config.yaml").write_text(yaml.safe_dump(read_sections(run / "config.yaml", more)))
    manifest = json.loads((file.parent / "manifest.json").read_text())
    content = file.read_bytes()
    manifest["files"][file.name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (file.parent / "manifest.json").write_text(manifest_text(manifest))
    with pytest.raises(
        InputError, match=r"is 'angle' there and 'nala' here; set model\.feature_map=angle to go"
    ):
        loop.train(configured(recipe, run, "train.steps=4", "model.feature_map=nala", *settings))
    loop.train(configured(recipe, run, "train.steps=4", "model.feature_map=angle", *settings))
    assert "feature_map: angle" in (run / "config.yaml").read_text()


def test_a_folder_that_is_no_run_is_refused(recipe, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(InputError, match="no run of Nalanda's"):
            loop.train(configured(recipe, folder))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_start_leaves_no_new_folder(recipe, tmp_path, monkeypatch):
    bad = f"data.source={tmp_path / 'missing.txt'}"
    with pytest.raises(InputError):
        loop.train(configured(recipe, tmp_path / "runs" / "x", bad))
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError):
        loop.train(configured(recipe, tmp_path / "there", bad))
    assert (tmp_path / "there").is_dir()

    # In the first step, after the run was announced: the tokenizer that was trained is left, or nothing.
    def fail(*_):
        raise InputError("the first step fails")

    monkeypatch.setattr(loop, "forward_backward", fail)
    run = tmp_path / "run"
    with pytest.raises(InputError, match="the first step fails"):
        loop.train(configured(recipe, run))
    tokenizer = contents(run / "tokenizer")
    assert tokenizer
    with pytest.raises(InputError, match="the first step fails"):
        loop.train(configured(recipe, tmp_path / "runs" / "x", f"tokenizer.path={run}/tokenizer"))
    assert not (tmp_path / "runs").exists()


def test_of_two_starts_at_once_the_second_leaves_the_folder_of_the_first(
    recipe, tmp_path, monkeypatch
):
    """It saw no folder yet when it began."""
    run = tmp_path / "run"
    config, acquire, first = configured(recipe, run), FileLock.acquire, contextlib.ExitStack()
    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout: acquire(lock, timeout=0))

    def overtaken(folder: Path, option: str) -> None:
        monkeypatch.setattr(run_dir, "output_folder", output_folder)
        first.enter_context(run_dir.lock_run_dir(run, config))

    monkeypatch.setattr(run_dir, "output_folder", overtaken)
    with first:
        with (
            pytest.raises(InputError, match="another process is training there"),
            run_dir.lock_run_dir(run, config),
        ):
            pass
        assert run.is_dir()


def test_bad_data_may_be_corrected_in_the_same_folder(recipe, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError):
        loop.train(configured(recipe, tmp_path / "run", f"data.source={tmp_path / 'empty.txt'}"))
    loop.train(configured(recipe, tmp_path / "run", "train.steps=2"))
    assert (tmp_path / "run" / "final" / "config.json").exists()


@pytest.mark.slow
def test_a_run_that_made_no_step_may_become_another(recipe, tmp_path, monkeypatch):
    run, settings = tmp_path / "run", ("train.steps=1", "validation.every=0")
    with monkeypatch.context() as patch:
        full = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        patch.setattr(loop, "forward_backward", lambda _: (_ for _ in ()).throw(full))
        with pytest.raises(OutOfMemory, match="no checkpoint was saved yet"):
            loop.train(configured(recipe, run, *settings))
    loop.train(configured(recipe, run, *settings, "data.seq_len=16"))
    assert load_config(run / "config.yaml").data.seq_len == 16


def test_the_command_line_gives_bad_input_one_line_and_code_2(recipe, tmp_path):
    process = start(recipe, tmp_path / "run", "optim.learnin_rate=1")
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 2
    assert stderr.strip().splitlines()[-1].startswith("nalanda: optim.learnin_rate: no such key")
    assert "Traceback" not in stderr
    assert stdout == ""


def test_a_source_that_is_refused_is_told_without_its_password(tmp_path):
    changes = {"data.source": ["python", "https://me:geheim@host/b.txt"]}
    with pytest.raises(
        InputError, match=r"choose another output_dir for https://.*host/b\.txt$"
    ) as caught:
        refuse_other_data(tmp_path, changes)
    assert "geheim" not in str(caught.value)
