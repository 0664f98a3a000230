"""The fork experiment: its outcomes on synthetic records, its arms, and its resumption."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from nalanda_kernels import use_backend
from nalanda_lab import fork
from nalanda_lab.fork import Experiment, load_study, name_of, rate_runs, trunk_runs
from nalanda_lab.fork_arms import head_means, mixers_of
from nalanda_lab.fork_report import judge, missing, report
from test_paired import write_texts

from nalanda.common.errors import InputError
from nalanda.model.sequences import Sequences

STUDY = load_study()
SEEDS = range(1, 9)

# ------------------------------ the estimator, on synthetic losses

DRAW = np.random.default_rng(0)
SCATTER = np.array([1, -1] * 4) * (7 / 8) ** 0.5  # mean 0, standard deviation 1


def losses(**gaps):
    """Losses of all arms. A gap is (mean, sd) of the first arm less the second: own_deltanet, free_deltanet, …

    The control's default is far below 0; the other gaps' defaults are 0 with a wide spread.
    """
    trunk = 4 + 0.02 * DRAW.normal(0, 1, 8)
    values = {}
    for mixer in STUDY["mixers"]:
        last = "held" if mixer == "softmax" else "blind"
        usual = (-0.05, 0.001) if mixer == "softmax" else (0.0, 0.03)
        for fork_at in (80, 50):
            mean, sd = gaps.get(f"own_{mixer}", usual)
            values[mixer, fork_at, last] = trunk - mean - sd * SCATTER
        mean, sd = gaps.get(f"free_{mixer}", (0.0, 0.03))
        values[mixer, 80, "own"] = trunk
        values[mixer, 80, "free"] = (
            values[mixer, 80, "blind"] + mean + sd * SCATTER if last == "blind" else trunk
        )
        for fork_at in (80, 50):
            noise = gaps.get("noise", 0.001)
            values[mixer, fork_at, "noise"] = trunk + noise * np.resize([-1, 0, 1], 8)
    return {
        (mixer, fork_at, arm): {
            seed: float(loss)
            for seed, loss in zip(SEEDS, each, strict=True)
            if seed in STUDY["mixers"][mixer]["seeds"] and (arm != "noise" or seed <= 3)
        }
        for (mixer, fork_at, arm), each in values.items()
    }


def outcomes(fork_at: int = 80, **gaps) -> list[str]:
    """The outcomes with the mixer that each sentence begins with, except `any`."""
    found = judge(STUDY, losses(**gaps), fork_at)
    assert found[-1] == ("any", STUDY["outcomes"]["any"])
    names = []
    for outcome, sentence in found[:-1]:
        assert "{" not in sentence
        mixer, colon, _ = sentence.partition(":")
        names.append(f"{outcome} {mixer}" if colon and mixer in STUDY["mixers"] else outcome)
    return names


D, G = "deltanet", "gated_deltanet"
USED = "control_below_0"
UNCLEAR = [f"unclear {D}", f"unclear {G}"]


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ({}, [USED, *UNCLEAR]),
        ({"own_softmax": (0.0, 0.01)}, ["control_includes_0", *UNCLEAR]),
        ({"own_softmax": (-0.01, 0.01)}, ["control_includes_0", *UNCLEAR]),
        ({"own_softmax": (0.05, 0.001)}, ["control_above_0", *UNCLEAR]),
        # below 0 in both, in one, and as much as published
        ({f"own_{D}": (-0.015, 0.004), f"own_{G}": (-0.010, 0.002)}, [USED, "below_both"]),
        ({f"own_{D}": (-0.015, 0.004)}, [USED, f"below_one {D}", f"unclear {G}"]),
        (
            {f"own_{D}": (-0.03, 0.004), f"own_{G}": (-0.014, 0.004)},
            [USED, "below_both", f"as_published {D}"],
        ),
        (
            {f"own_{D}": (-0.03, 0.004), "own_softmax": (0.0, 0.01)},
            ["control_includes_0", f"below_one {D}", f"unclear {G}"],
        ),
        # Holm: p = 0.037 is below 0 beside a small p, and not beside a large one or another 0.037
        ({f"own_{D}": (-0.02, 0.022), f"own_{G}": (-0.010, 0.002)}, [USED, "below_both"]),
        ({f"own_{D}": (-0.02, 0.022), f"own_{G}": (-0.02, 0.022)}, [USED, *UNCLEAR]),
        ({f"own_{D}": (-0.02, 0.022)}, [USED, *UNCLEAR]),
        # within ± m/2, alone and beside another outcome
        ({f"own_{D}": (0.001, 0.004)}, [USED, f"within {D}", f"unclear {G}"]),
        ({f"own_{G}": (0.001, 0.004)}, [USED, f"unclear {D}", f"within {G}"]),
        ({f"own_{G}": (0.001, 0.007)}, [USED, *UNCLEAR]),
        (
            {f"own_{D}": (-0.004, 0.001), f"own_{G}": (0.003, 0.001)},
            [USED, f"below_one {D}", f"within {D}", f"above {G}", f"within {G}"],
        ),
        (
            {f"own_{D}": (0.001, 0.004), "own_softmax": (0.05, 0.001)},
            ["control_above_0", f"within_without_control {D}", f"unclear {G}"],
        ),
        ({f"own_{G}": (0.03, 0.004)}, [USED, f"unclear {D}", f"above {G}"]),
        # room: only where own − blind includes 0
        ({f"free_{D}": (-0.01, 0.002)}, [USED, f"room {D}", f"unclear {G}"]),
        (
            {f"free_{D}": (-0.01, 0.002), f"own_{D}": (0.001, 0.004)},
            [USED, f"within {D}", f"room {D}", f"unclear {G}"],
        ),
        (
            {f"free_{D}": (-0.01, 0.002), f"own_{D}": (-0.015, 0.002)},
            [USED, f"below_one {D}", f"unclear {G}"],
        ),
        ({f"free_{D}": (0.01, 0.002)}, [USED, *UNCLEAR]),
    ],
)
def test_every_outcome_is_reached(gaps, expected):
    assert outcomes(**gaps) == expected


def test_the_fork_at_half_has_a_verdict_only_with_little_noise():
    gaps = {f"own_{D}": (-0.015, 0.004)}
    assert outcomes(50, **gaps, noise=0.0039) == [USED, f"below_one {D}", f"unclear {G}"]
    noisy = [USED, f"too_noisy {D}", f"too_noisy {G}"]
    assert outcomes(50, **gaps, noise=0.0041) == noisy
    # at 80 % the noise arm decides nothing
    assert outcomes(80, **gaps, noise=0.0041) == [USED, f"below_one {D}", f"unclear {G}"]


def test_each_sentence_of_the_table_is_reached_by_a_test_above():
    cases = test_every_outcome_is_reached.pytestmark[0].args[1]
    reached = {name.split()[0] for _, expected in cases for name in expected}
    assert STUDY["outcomes"].keys() == reached | {"too_noisy", "any"}


def test_diverged_runs_leave_their_pairs_out():
    values = losses(**{f"own_{D}": (-0.015, 0.004)})
    del values[D, 80, "blind"][8], values[D, 80, "own"][7]
    (sentence,) = (text for name, text in judge(STUDY, values, 80) if name == "below_one")
    pairs = [values[D, 80, "own"][s] - values[D, 80, "blind"][s] for s in range(1, 7)]
    assert f"{abs(np.mean(pairs)):.4f} nats" in sentence
    for seed in range(2, 7):
        del values[D, 80, "own"][seed]
    assert ("unclear", f"{D}: it cannot be told (own − blind without two pairs).") in [
        (name, text.strip()) for name, text in judge(STUDY, values, 80)
    ]


# ------------------------------ runs


def rate_records(mixer: str, by_rate: dict[float, float]) -> dict:
    records = {}
    for rate, seed in itertools.product(by_rate, STUDY["rates"]["seeds"]):
        run = {
            "part": "rates",
            "mixer": mixer,
            "seed": seed,
            "rate": rate,
            "arm": "own",
            "fork": 80,
        }
        loss = by_rate[rate]
        records[name_of(run)] = {"run": run} | ({"failed": ""} if loss is None else {"loss": loss})
    return records


@pytest.mark.parametrize(
    ("losses", "more", "chosen"),
    [
        ({0.0005: 3.0, 0.001: 2.0, 0.002: 2.5, 0.004: None}, [], 0.001),
        ({0.0005: 1.0, 0.001: 2.0, 0.002: 2.5, 0.004: 3.0}, [0.00025], None),
        ({0.0005: 4.0, 0.001: 2.0, 0.002: 2.5, 0.004: 1.0}, [0.008], None),
        # one octave, once
        ({0.0005: 4.0, 0.001: 2.0, 0.002: 2.5, 0.004: 1.0, 0.008: 0.9}, [], 0.008),
        ({0.0005: 4.0, 0.001: 2.0, 0.002: 2.5, 0.004: 1.0, 0.008: 1.1}, [], 0.004),
    ],
)
def test_one_octave_more_is_tried_where_an_end_wins(losses, more, chosen):
    records = rate_records(D, losses)
    lacking = {run["rate"] for run in rate_runs(STUDY, records) if run["mixer"] == D}
    assert lacking - losses.keys() == set(more)
    assert fork.chosen_rates(STUDY, records).get(D) == chosen


def test_runs_are_balanced_and_complete():
    runs = trunk_runs(STUDY, {})
    assert len({name_of(run) for run in runs}) == len(runs) == 3 * (8 * 4 + 3 * 2) + 4 * 3
    order = [key for key, _ in itertools.groupby((run["seed"], run["mixer"]) for run in runs)]
    assert order[:5] == [(1, D), (1, G), (1, "nala"), (1, "softmax"), (2, D)]
    noise = {run["seed"] for run in runs if run["arm"] == "noise"}
    assert noise == {1, 2, 3}
    rates = rate_runs(STUDY, {})
    assert len(rates) == 4 * 4 * 2
    assert [run["seed"] for run in rates] == [101] * 16 + [102] * 16


# ------------------------------ arms, on a tiny shape


@pytest.fixture(autouse=True)
def maps_in_torch():
    """The rule's commit has no other: an arm's own map and the model's own must round alike."""
    with use_backend("torch"):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, str]:
    """A study of two seeds and 20 steps of tiny models, and its text."""
    folder = tmp_path_factory.mktemp("fork")
    study = shrunk(STUDY)
    study["rates"] = {"grid": [0.001, 0.002, 0.004], "seeds": [101]}
    return write_study(study, folder / "study.yaml"), write_texts(folder / "mini")


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
    runs = forked(experiment, "softmax", ["own", "held"])
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
    run.update = lambda model, optimizer, batches, rate: rates.append(rate) or torch.zeros(())
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


@pytest.mark.slow
def test_a_whole_experiment_with_kills_has_the_same_records(tiny, tmp_path, monkeypatch, capsys):
    study, text = tiny
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    Experiment(text, whole, study).run()

    class Killed(BaseException):
        pass

    advance, steps = fork.Fork.advance_one, itertools.count(1)

    def fail_now_and_then(run):
        if next(steps) % 53 == 0:
            raise Killed
        advance(run)

    monkeypatch.setattr(fork.Fork, "advance_one", fail_now_and_then)
    monkeypatch.setattr(fork, "SAVE_EVERY", 0.0)
    for _ in range(200):
        try:
            Experiment(text, killed, study).run()
            break
        except Killed:
            assert not report(killed, study)
            assert "−" not in capsys.readouterr().out.partition("No estimate")[2]
    assert timeless(killed) == timeless(whole)
    assert not list((whole / "work").iterdir())
    assert report(whole, study)
    printed = capsys.readouterr().out
    assert "No default changes" in printed
    assert "not SlimPajama" in printed
    assert (whole / "fork.png").stat().st_size > 10_000

    # a record of another rule, and of another text than the others
    file = next((whole / "records").glob("trunks-nala-1-own-80.json"))
    good = file.read_text()
    for key in ("rule", "text", "model"):
        record = json.loads(good)
        record["hashes"][key] = "other"
        file.write_text(json.dumps(record))
        with pytest.raises(InputError, match=f"its {key} hash is other|not other"):
            report(whole, study)
    file.unlink()
    assert not report(whole, study)
    assert "Missing: trunks-nala-1-own-80" in capsys.readouterr().out


def test_a_kill_resumes_to_the_same_record(tiny, tmp_path, monkeypatch):
    study, text = tiny
    runs = [settings(D, "own"), settings(D, "blind")]
    for folder, every in (("whole", 1e9), ("killed", 0.0)):
        monkeypatch.setattr(fork, "SAVE_EVERY", every)
        one = Experiment(text, tmp_path / folder, study)
        (one.out / "records").mkdir()
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


def test_nothing_is_missing_once_all_runs_have_records():
    study = copy.deepcopy(STUDY)
    records = {}
    for mixer in study["mixers"]:
        records |= rate_records(mixer, {0.0005: 3.0, 0.001: 2.0, 0.002: 2.5, 0.004: 3.0})
    assert len(missing(study, records)) == len(trunk_runs(study, {}))
    records |= {name_of(run): {"run": run} for run in trunk_runs(study, {})}
    assert missing(study, records) == []
