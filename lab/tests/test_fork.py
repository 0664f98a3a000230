"""The fork experiment's arms, and its resumption."""

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from nalanda_kernels import use_backend
from nalanda_lab import fork
from nalanda_lab.fork import FIRST, Experiment, load_study
from nalanda_lab.fork_arms import head_means, mixers_of
from test_paired import write_tokens

from nalanda.common.errors import InputError
from nalanda.config.load import read_yaml
from nalanda.model.sequences import Sequences

STUDY = load_study()
D, G, SOFTMAX = "deltanet", "gated_deltanet", "softmax_0.001"
NALA = read_yaml(FIRST)["mixers"]["nala"] | {"rate": 0.001}
"""The first experiment had this mixer too."""

# ------------------------------ arms, on a tiny shape


@pytest.fixture(autouse=True)
def maps_in_torch():
    """The rule's commit has no other: an arm's own map and the model's own must round alike."""
    with use_backend("torch"):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """A study of two seeds and 20 steps of tiny models, and its text."""
    folder = tmp_path_factory.mktemp("fork")
    study = shrunk(STUDY | {"mixers": STUDY["mixers"] | {"nala": NALA}})
    return write_study(study, folder / "study.yaml"), write_tokens(study["recipe"], folder)


def write_study(study: dict, file: Path) -> Path:
    file.write_text(yaml.safe_dump(study, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return file


def shrunk(study: dict) -> dict:
    """The study with two seeds, and 20 steps of tiny models."""
    study = copy.deepcopy(study)
    study["model"] |= {"hidden_size": 32, "num_heads": 2, "head_dim": 16}
    study["recipe"]["tokenizer"] = {"train": "bpe", "vocab_size": 300}
    study["recipe"]["data"] |= {"seq_len": 32, "max_validation_rows": 6}
    study["recipe"]["train"] |= {"steps": 20, "tokens_per_step": 64}
    study["recipe"]["schedule"]["warmup_steps"] = 2
    study["noise"]["seeds"] = [1, 2]
    for mixer in study["mixers"].values():
        mixer["model"]["intermediate_size"] = 32
        mixer["seeds"] = [1, 2]
    return study


def settings(mixer: str, arm: str = "trunk") -> dict:
    return {"part": "trunks", "mixer": mixer, "seed": 1, "rate": 0.004, "arm": arm, "fork": 80}


@pytest.fixture
def experiment(tiny, tmp_path) -> Experiment:
    torch.set_num_threads(1)
    return Experiment(tiny[1], tmp_path, tiny[0])


def forked(experiment: Experiment, mixer: str, arms: list[str]) -> dict[str, fork.Fork]:
    """A trunk at 80 %, and arms that left it there."""
    trunk = experiment.open(settings(mixer))
    experiment.advance(trunk, trunk.step_at(80), settings(mixer))
    runs = {"trunk": trunk}
    for arm in arms:
        runs[arm] = experiment.open(settings(mixer, arm))
        runs[arm].load(copy.deepcopy(trunk.state()))
        experiment.leave(runs[arm], settings(mixer, arm))
    return runs


def logits(run) -> torch.Tensor:
    batch = run.recent[-1]
    with torch.no_grad(), run.norms():
        out = run.model.eval()(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], use_cache=False)
    return out.logits


@pytest.mark.parametrize("mixer", [D, G, "nala"])
def test_arms_differ_in_the_exponent_alone(experiment, mixer):
    runs = forked(experiment, mixer, ["own", "blind", "free", "noise"])
    trunk = runs["trunk"]
    assert torch.equal(logits(runs["own"]), logits(trunk))
    assert torch.equal(logits(runs["free"]), logits(trunk))
    assert not torch.equal(logits(runs["blind"]), logits(trunk))

    means = head_means(trunk.model, list(trunk.recent))
    assert sum(len(batch["input_ids"]) for batch in trunk.recent) == min(64, 2 * trunk.step)
    for layer, mean in zip(mixers_of(runs["blind"].model), means, strict=True):
        exponent, _ = layer.feature_map.exponents(torch.ones(1, 1, 2, 1))
        assert torch.allclose(exponent.flatten(), mean, atol=1e-6)
        assert 1 < float(mean.min()) < float(mean.max()) < 3

    weights = dict(trunk.model.named_parameters())
    for arm in ("own", "blind", "free"):
        own = dict(runs[arm].model.named_parameters())
        assert all(torch.equal(own[name], p) for name, p in weights.items())
        added = {name.rpartition(".")[2] for name in own.keys() - weights.keys()}
        assert added == {"own": set(), "blind": {"m"}, "free": {"g", "c"}}[arm]
        for name, moments in trunk.moments().items():
            copied = runs[arm].moments()[name]
            assert all(torch.equal(copied[key], value) for key, value in moments.items())
        assert torch.equal(runs[arm].read()[0]["input_ids"], trunk_next(experiment, mixer))

    noisy = dict(runs["noise"].model.named_parameters())
    for name, p in weights.items():
        ratio = (noisy[name] / p)[p != 0] - 1
        assert not torch.equal(noisy[name], p)
        assert ratio.abs().max() < 6e-3


def trunk_next(experiment: Experiment, mixer: str) -> torch.Tensor:
    """The tokens of the step after the fork."""
    run = experiment.open(settings(mixer))
    for _ in range(run.step_at(80)):
        run.read()
    return run.read()[0]["input_ids"]


def test_own_ends_where_the_uninterrupted_trunk_does(experiment):
    runs = forked(experiment, D, ["own", "blind"])
    for run in runs.values():
        experiment.advance(run, run.steps, settings(D))
    assert torch.equal(logits(runs["own"]), logits(runs["trunk"]))
    m = mixers_of(runs["blind"].model)[0].feature_map.m
    assert not torch.allclose(0.5 + m.tanh(), runs["blind"].means[0] / 2, atol=1e-5)  # it is learnt


def test_softmax_holds_the_mean_norm(experiment):
    runs = forked(experiment, SOFTMAX, ["own", "held"])
    assert torch.equal(logits(runs["own"]), logits(runs["trunk"]))
    assert not torch.equal(logits(runs["held"]), logits(runs["trunk"]))
    for layer, mean in zip(mixers_of(runs["held"].model), runs["held"].means, strict=True):
        x = torch.randn(2, 8, 32)
        with runs["held"].norms():
            q = layer.inputs(x, Sequences(device=x.device), None)[0].q
        assert torch.allclose(q.norm(dim=-1), mean.expand(2, 8, 2), rtol=1e-5)
    names = {name for name, _ in runs["held"].model.named_parameters()}
    assert names == {name for name, _ in runs["own"].model.named_parameters()}


def test_the_rate_is_that_of_the_earlier_study(experiment):
    run = experiment.open(settings(D))
    rates = []
    run.update = lambda batches, rate: rates.append(rate) or torch.zeros(())
    while run.step < run.steps:
        run.advance_one()
    assert rates[:3] == pytest.approx([0.002, 0.004, 0.004])
    assert rates[14:] == pytest.approx([0.004, 0.004, 0.003, 0.002, 0.001, 0.0])


# ------------------------------ records and resumption


def timeless(folder: Path) -> dict[str, dict]:
    records = {}
    for file in sorted((folder / "records").glob("*.json")):
        records[file.stem] = json.loads(file.read_text())
        del records[file.stem]["seconds"]
    return records


def test_a_kill_resumes_to_the_same_record(tiny, tmp_path, monkeypatch):
    study, text = tiny
    runs = [settings(D, "own"), settings(D, "blind")]
    for folder, every in (("whole", 1e9), ("killed", 0.0)):
        monkeypatch.setattr(fork, "SAVE_EVERY", every)
        one = Experiment(text, tmp_path / folder, study)
        (one.out / "records").mkdir(parents=True)
        if folder == "killed":
            advance, steps = fork.Fork.advance_one, itertools.count(1)

            def fail_once(run, advance=advance, steps=steps):
                if next(steps) in (7, 19):  # in the trunk, and in the first arm
                    raise KeyboardInterrupt
                advance(run)

            monkeypatch.setattr(fork.Fork, "advance_one", fail_once)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    one.run_trunk(runs)
        one.run_trunk(runs)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "killed")
    assert len(timeless(tmp_path / "whole")) == 2


def test_a_trunk_that_diverges_is_recorded_as_that(experiment, monkeypatch):
    (experiment.out / "records").mkdir()
    monkeypatch.setattr(fork.Fork, "update", lambda *args: torch.tensor(float("nan")))
    experiment.run_trunk([settings(D, "own"), settings(D, "blind")])
    for record in timeless(experiment.out).values():
        assert record["failed"] == "diverged at step 1"


def test_records_of_another_code_are_refused(experiment):
    (experiment.out / "records").mkdir()
    record = {"run": settings(D, "own"), "hashes": experiment.hashes | {"rule": "other"}}
    (experiment.out / "records" / "a.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="its rule hash is other"):
        experiment.run()


def test_a_study_of_another_kind_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no contrasts; give a study like fork2\.yaml"):
        Experiment(tmp_path, tmp_path, FIRST)
