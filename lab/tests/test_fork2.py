"""The second fork experiment: its sentences on synthetic records, its arms, kills, and shared folders."""

import collections
import copy
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from nalanda_kernels import use_backend
from nalanda_lab import fork
from nalanda_lab.fork import SECOND, Experiment, all_runs, load_study, missing, name_of
from nalanda_lab.fork2_report import bits_of_a_nat, gaps_of_pairs, judge, report
from nalanda_lab.fork_arms import beta_means, head_means, mixers_of
from test_fork import logits, shrunk, timeless, write_study
from test_paired import write_tokens
from transformers import AutoTokenizer

from nalanda.common.errors import InputError

STUDY = load_study()
D, G = "deltanet", "gated_deltanet"
SCATTER = np.array([1, -1] * 4) * (7 / 8) ** 0.5  # mean 0, standard deviation 1
BITS = 0.6

# ------------------------------ the sentences, on synthetic losses


def losses(**changes) -> dict:
    """Losses of all arms. changes: `arm_mixer` or `arm_mixer_fork`, the (mean, sd) of that arm less own.

    By default deaf costs 0.05, and every other arm is own's equal with a spread of 0.001.
    """
    trunk = 4 + 0.02 * np.random.default_rng(0).normal(0, 1, 8)
    values = {}
    for run in all_runs(STUDY):
        mixer, at, arm, seed = run["mixer"], run["fork"], run["arm"], run["seed"]
        usual = {"own": (0.0, 0.0), "deaf": (0.05, 0.001)}.get(arm, (0.0, 0.001))
        mean, sd = changes.get(f"{arm}_{mixer}_{at}", changes.get(f"{arm}_{mixer}", usual))
        # Orthogonal patterns: arms of one spread scatter apart from each other.
        pattern = SCATTER if arm in ("fixed", "free", "deaf", "held") else np.roll(SCATTER, 1)
        loss = trunk[seed - 1] + mean + sd * pattern[seed - 1]
        values.setdefault((mixer, at, arm), {})[seed] = float(loss)
    return values


def sentences(**changes) -> dict[str, list[str]]:
    """The sentences by outcome."""
    by_outcome = collections.defaultdict(list)
    for outcome, text in judge(STUDY, losses(**changes), BITS):
        assert "{" not in text
        by_outcome[outcome].append(text.strip())
    return by_outcome


def test_a_null_cannot_be_told_apart():
    told = sentences()
    assert not told.keys() & {"lowers", "raises", "norm_matters", "level_matters", "offered"}
    assert len(told["same"]) == 2 * 2 * 4
    # own − fixed has a standard deviation of 0.001: ± 2.3646 · 0.001 / √8
    half = 2.3646 * 0.001 / math.sqrt(8)
    expected = (
        f"own and fixed cannot be told apart at ± {half:.5f} nats a token (± {half * BITS:.5f} bits"
    )
    assert f"{D}, fork at 10 %: {expected} a byte)." in told["same"]
    assert len(told["norm_not_shown"]) == 2
    assert told["any"] == ["It speaks of models of 2 M parameters."]


def test_a_planted_effect_has_its_sentence():
    """fixed is worse by 0.003 in DeltaNet at 10 %: the norm lowers the loss at a fixed level."""
    told = sentences(fixed_deltanet_10=(0.003, 0.001))
    assert told["lowers"][0].startswith(
        f"{D}, fork at 10 %: own lowers the loss against fixed by 0.00300 nats a token [−0.00384, −0.00216], "
        "0.00180 bits a byte"
    )
    assert told["norm_matters"] == [
        "Fork at 10 %: ‖q‖ matters. Below 0 by Holm over four tests: −0.00300 [−0.00384, −0.00216] nats a "
        f"token ({D}, own − fixed)."
    ]
    assert told["norm_not_shown"] == [
        "Fork at 50 %: that ‖q‖ matters is not shown. No test of the norm is below 0 by Holm over four tests."
    ]
    # blind starts from fixed's level and learns it away
    assert told["level_matters"][0].startswith("Fork at 10 %: the level matters. blind − fixed is")
    assert "raises" not in told


def test_norms_that_cost_do_not_matter():
    told = sentences(fixed_deltanet=(-0.003, 0.001), fixed_gated_deltanet=(-0.003, 0.001))
    assert (
        len([text for text in told["raises"] if "own raises the loss against fixed" in text]) == 4
    )
    assert "norm_matters" not in told
    assert "level_matters" not in told  # blind − fixed is above 0


def test_free_less_blind_is_a_test_of_the_norm_too():
    told = sentences(free_gated_deltanet_50=(-0.003, 0.001))
    assert [text for text in told["norm_matters"] if "free − blind" in text and "50 %" in text]
    assert "level_matters" not in told


def test_holm_is_over_the_four_tests_of_a_fork():
    """own − fixed with p = 0.02: below 0.05, and above 0.05 / 4."""
    mean = 0.001 * 2.9980 / math.sqrt(8)  # t with 7 degrees of freedom
    told = sentences(fixed_deltanet_10=(mean, 0.001))
    assert [text for text in told["lowers"] if "own lowers the loss against fixed" in text]
    assert "norm_matters" not in told
    # p = 0.02 is the largest of four, whose others are small: Holm leaves it as it is
    small = dict.fromkeys((f"fixed_{G}_10", f"blind_{G}_10"), (0.004, 0.001))
    told = sentences(fixed_deltanet_10=(mean, 0.001), blind_deltanet_10=(0.004, 0.001), **small)
    assert f"({D}, own − fixed)" in told["norm_matters"][0]


@pytest.mark.parametrize("change", [(0.05, 0.2), (0.0019, 0.0001), (-0.05, 0.001)])
def test_a_control_that_does_not_answer_silences_all(change):
    effect = {"fixed_deltanet_10": (0.003, 0.001)}
    (only,) = judge(STUDY, losses(deaf_gated_deltanet=change, **effect), BITS)
    assert only[0] == "control_fails"
    assert "says nothing of ‖q‖" in only[1]
    assert "fixed" not in only[1]


def test_the_map_is_offered_only_for_both_mixers_and_forks():
    both = {f"free_{mixer}": (-0.003, 0.001) for mixer in (D, G)}
    assert "`nala_learned`" in sentences(**both)["offered"][0]
    for lacking in ((-0.0019, 0.0001), (-0.003, 0.02)):
        told = sentences(**both, free_gated_deltanet_10=lacking)
        assert "offered" not in told
        assert len(told["not_offered"]) == 1


def test_softmax_has_figures_and_no_verdict():
    told = sentences(**{"held_softmax_0.002_80": (-0.004, 0.0)})
    assert len(told["softmax"]) == 4
    expected = "softmax_0.002, fork at 80 %: own − held is +0.00400 [+0.00400, +0.00400]."
    assert [text for text in told["softmax"] if expected in text]


def test_the_parts_add_up_whichever_runs_diverged():
    values = losses()
    draw = np.random.default_rng(1)
    for by_seed in values.values():
        for seed in by_seed:
            by_seed[seed] = float(draw.normal(4, 0.1))
    del values[D, 50, "own"][3], values[D, 10, "blind"][5]

    for mixer, at in itertools.product((D, G), (10, 50)):
        gaps = gaps_of_pairs(values, mixer, at, STUDY["contrasts"])
        means = {name: gap.mean for name, gap in gaps.items()}
        parts = means["norm_learnt"] + means["level"] - means["norm_fixed"]
        assert means["rest"] == pytest.approx(parts, abs=1e-14)
    # own serves both forks, so its lost seed does, too
    assert len(gaps_of_pairs(values, D, 10, STUDY["contrasts"])["level"].differences) == 6
    assert len(gaps_of_pairs(values, D, 50, STUDY["contrasts"])["level"].differences) == 7

    told = [text for name, text in judge(STUDY, values, BITS) if name == "parts"]
    assert len(told) in (0, 4)
    del values[G, 10, "free"]
    assert set(gaps_of_pairs(values, G, 10, STUDY["contrasts"]).values()) == {None}


def test_every_outcome_has_a_test():
    both = {f"free_{mixer}": (-0.003, 0.001) for mixer in (D, G)}
    reached = {"control_fails", "without_pairs"}
    for changes in (
        {},
        {"fixed_deltanet": (0.003, 0.001), "fixed_gated_deltanet": (-0.003, 0.001)},
        both,
    ):
        reached |= sentences(**changes).keys()
    values = losses()
    del values[D, 10, "free"]
    assert "without_pairs" in dict(judge(STUDY, values, BITS))
    assert reached == STUDY["outcomes"].keys()


# ------------------------------ the list of runs, and the report on records


def test_runs_are_complete_and_go_seed_by_seed():
    runs = all_runs(STUDY)
    per_mixer = 8 * (3 + 4) + 2 * 2 + 4
    assert len({name_of(run) for run in runs}) == len(runs) == 2 * per_mixer + 2 * 4 * 3
    seeds = [run["seed"] for run in runs]
    assert seeds == sorted(seeds)
    own = [run for run in runs if run["arm"] == "own" and run["mixer"] in (D, G)]
    assert len(own) == 16  # one serves both forks
    assert {run["seed"] for run in runs if run["arm"] == "deaf"} == {1, 2, 3, 4}
    assert {run["rate"] for run in runs if run["mixer"] != "softmax_0.002"} == {0.001}


def test_nothing_is_missing_once_all_runs_have_records():
    records = {name_of(run): {"run": run} for run in all_runs(STUDY)}
    assert missing(STUDY, records) == []
    assert len(missing(STUDY, {})) == len(records)


def write_records(folder: Path, values: dict, **changes) -> None:
    hashes = {"rule": fork.hash_files(SECOND), "model": "earlier code", "text": "t"}
    (folder / "records").mkdir(parents=True, exist_ok=True)
    for run in all_runs(STUDY):
        loss = values[run["mixer"], run["fork"], run["arm"]][run["seed"]]
        record = {"run": run, "hashes": hashes, "text": {"fingerprint": "t"}, "loss": loss}
        record |= {"document_tokens": [600.0, 400.0], "bytes": 2000, "versions": {"nalanda": "1"}}
        (folder / "records" / f"{name_of(run)}.json").write_text(json.dumps(record | changes))


def test_the_report_reads_records_of_earlier_code(tmp_path, capsys):
    write_records(tmp_path, losses(fixed_deltanet_10=(0.003, 0.001)))
    assert report(tmp_path)
    printed = capsys.readouterr().out
    assert "own lowers the loss against fixed by 0.00300" in printed
    bits = 0.003 * 1000 / (2000 * math.log(2))
    assert f"{bits:.5f} bits a byte" in printed
    assert "noise − own" in printed
    assert "not SlimPajama" in printed


def test_a_silent_report_has_no_table(tmp_path, capsys):
    write_records(tmp_path, losses(deaf_deltanet=(0.0, 0.001)))
    assert report(tmp_path)
    printed = capsys.readouterr().out
    assert "control_fails" in printed
    assert "fixed" not in printed
    assert "held −" not in printed


def test_the_report_refuses_mixtures_another_rule_and_a_lacking_run(tmp_path, capsys):
    write_records(tmp_path, losses())
    file = tmp_path / "records" / f"trunks-{D}-1-free-10.json"
    good = file.read_text()
    for key in ("rule", "model", "text"):
        record = json.loads(good)
        record["hashes"][key] = "other"
        file.write_text(json.dumps(record))
        with pytest.raises(InputError, match=f"its {key} hash is"):
            report(tmp_path)

    file.unlink()
    capsys.readouterr()
    assert not report(tmp_path)
    printed = capsys.readouterr().out
    assert printed.endswith(f"Missing: trunks-{D}-1-free-10\n")
    assert "−" not in printed


# ------------------------------ arms, on a tiny shape


@pytest.fixture(autouse=True)
def maps_in_torch():
    """As `Experiment.run` has it."""
    with use_backend("torch"):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """The study with one seed of tiny models, and its text."""
    folder = tmp_path_factory.mktemp("fork2")
    study = shrunk(STUDY)
    study["mixers"] = {name: study["mixers"][name] for name in (D, G, "softmax_0.002")}
    for mixer in study["mixers"].values():
        mixer["seeds"] = [1]
    return write_study(study, folder / "study.yaml"), write_tokens(study["recipe"], folder)


@pytest.fixture
def experiment(tiny, tmp_path) -> Experiment:
    torch.set_num_threads(1)
    return Experiment(tiny[1], tmp_path, tiny[0])


def forked(experiment: Experiment, mixer: str, at: int) -> dict[str, fork.Fork]:
    """A trunk at a fork, and all arms that left it there."""
    run = {"part": "trunks", "mixer": mixer, "seed": 1, "rate": 0.001, "fork": at}
    trunk = experiment.open(run | {"arm": "trunk"})
    experiment.advance(trunk, trunk.step_at(at), run | {"arm": "trunk"})
    runs = {"trunk": trunk}
    for arm in ("own", "fixed", "blind", "free", "deaf"):
        runs[arm] = experiment.open(run | {"arm": arm})
        runs[arm].load(copy.deepcopy(trunk.state()))
        experiment.leave(runs[arm], run | {"arm": arm})
    return runs


def betas(run: fork.Fork) -> list[torch.Tensor]:
    """β of each layer on the last batch, `[B·T, HV]`."""
    seen = []
    for mixer in mixers_of(run.model):
        mixer.mix = lambda inputs, *args, mix=mixer.mix: (
            seen.append(inputs.beta) or mix(inputs, *args)
        )
    logits(run)
    for mixer in mixers_of(run.model):
        del mixer.mix
    return [beta.flatten(0, 1) for beta in seen]


@pytest.mark.parametrize(("mixer", "at"), [(D, 10), (D, 50), (G, 50)])
def test_arms_start_equal_where_they_must(experiment, mixer, at):
    runs = forked(experiment, mixer, at)
    trunk = runs["trunk"]
    assert torch.equal(logits(runs["own"]), logits(trunk))
    assert torch.equal(logits(runs["free"]), logits(trunk))
    assert torch.equal(logits(runs["blind"]), logits(runs["fixed"]))
    assert not torch.equal(logits(runs["fixed"]), logits(trunk))

    # fixed is own with p at the head's mean, and nothing else
    means = head_means(trunk.model, list(trunk.recent))
    for layer, mean in zip(mixers_of(trunk.model), means, strict=True):
        layer.feature_map.exponents = lambda n, mean=mean: (mean[:, None], 2.0)
    assert torch.allclose(logits(runs["fixed"]), logits(trunk), atol=1e-5)

    weights = dict(trunk.model.named_parameters())
    for arm in ("fixed", "deaf"):
        parameters = dict(runs[arm].model.named_parameters())
        assert parameters.keys() == weights.keys()
        assert all(torch.equal(parameters[name], p) for name, p in weights.items())
        for name, moments in trunk.moments().items():
            held = runs[arm].moments()[name]
            assert all(torch.equal(held[key], value) for key, value in moments.items())


@pytest.mark.parametrize("mixer", [D, G])
def test_deaf_holds_beta_and_nothing_else(experiment, mixer):
    runs = forked(experiment, mixer, 50)
    deaf, own = runs["deaf"], runs["own"]
    means = beta_means(own.model, list(own.recent))
    assert all(own_beta.std(0).min() > 1e-4 for own_beta in betas(own))
    expected = torch.cat([batch["input_ids"] for batch in own.recent])
    assert len(expected) == 2 * own.step

    # β of the head's mean over the last rows, at the fork and after further steps
    projections = [layer.b_proj.weight.clone() for layer in mixers_of(deaf.model)]
    for _ in range(2):
        for beta, mean in zip(betas(deaf), means, strict=True):
            assert torch.equal(beta, mean.expand_as(beta))
        experiment.advance(deaf, deaf.step + 2, {**SETTINGS, "mixer": mixer, "arm": "deaf"})
    for layer, before in zip(mixers_of(deaf.model), projections, strict=True):
        assert torch.equal(layer.b_proj.weight, before)
    assert not torch.equal(deaf.model.lm_head.weight, own.model.lm_head.weight)


SETTINGS = {"part": "trunks", "seed": 1, "rate": 0.001, "fork": 50}


def test_fixed_keeps_its_level_and_blind_learns_one(experiment):
    runs = forked(experiment, D, 50)
    at_fork = {}
    for arm in ("fixed", "blind"):
        maps = [layer.feature_map for layer in mixers_of(runs[arm].model)]
        at_fork[arm] = [each.m.clone() for each in maps]
        experiment.advance(runs[arm], runs[arm].steps, {**SETTINGS, "mixer": D, "arm": arm})
        moved = [
            not torch.equal(each.m, before) for each, before in zip(maps, at_fork[arm], strict=True)
        ]
        assert moved == [arm == "blind"] * 2


# ------------------------------ kills, and two processes


@pytest.mark.slow
def test_kills_leave_the_same_records(tiny, tmp_path, monkeypatch, capsys):
    study, text = tiny
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    Experiment(text, whole, study).run()
    assert len(timeless(whole)) == 2 * 10 + 3

    class Killed(BaseException):
        pass

    advance, steps = fork.Fork.advance_one, itertools.count(1)

    def fail_now_and_then(run):
        if next(steps) % 31 == 0:
            raise Killed
        advance(run)

    monkeypatch.setattr(fork.Fork, "advance_one", fail_now_and_then)
    monkeypatch.setattr(fork, "SAVE_EVERY", 0.0)
    kills = 0
    for _ in range(200):
        try:
            Experiment(text, killed, study).run()
            break
        except Killed:
            kills += 1
    assert kills > 5
    assert timeless(killed) == timeless(whole)
    assert not list((whole / "work").iterdir())
    losses = {str(record["loss"])[:6] for record in timeless(whole).values()}
    assert not [loss for loss in losses if loss in (whole / "log.txt").read_text()]


def test_two_processes_share_the_runs(tiny, tmp_path, monkeypatch):
    """While the first is at work on a trunk, the second does all others and leaves that one alone."""
    study, text = tiny
    first, second = (Experiment(text, tmp_path, study) for _ in range(2))
    finished, run_trunk = [], Experiment.run_trunk

    def finish(self, run, settings):
        finished.append((self is first, settings["mixer"]))
        self.record_file(settings).write_text(json.dumps({"run": settings, "hashes": self.hashes}))

    def run_beside(self, todo):
        if self is first:
            second.run()
        run_trunk(self, todo)

    monkeypatch.setattr(Experiment, "finish", finish)
    monkeypatch.setattr(Experiment, "advance", lambda self, run, until, settings: None)
    monkeypatch.setattr(Experiment, "leave", lambda self, run, settings: None)
    monkeypatch.setattr(Experiment, "usable", lambda self, file: True)
    monkeypatch.setattr(fork.Fork, "load", lambda self, state: None)
    monkeypatch.setattr(torch, "load", lambda file, weights_only: {"run": None})
    monkeypatch.setattr(Experiment, "run_trunk", run_beside)
    first.run()
    expected = [(False, G)] * 10 + [(False, "softmax_0.002")] * 3 + [(True, D)] * 10
    assert finished == expected
    assert f"{D}-1: another process has it" in (tmp_path / "log.txt").read_text()


def test_bytes_are_those_of_the_text_of_all_targets(experiment):
    run = experiment.open({**SETTINGS, "mixer": D, "arm": "own"})
    tokenizer = AutoTokenizer.from_pretrained(experiment.text / "tokenizer")
    targets = [row["labels"][:, 1:] for row in run.rows]
    texts = [tokenizer.decode(each[each != -100], skip_special_tokens=True) for each in targets]

    record = fork.measure(run, beside=False)
    assert record["bytes"] == sum(len(text.encode()) for text in texts) > 100
    bits = sum(record["documents"]) / math.log(2) / record["bytes"]
    assert record["loss"] * bits_of_a_nat(record) == pytest.approx(bits, rel=1e-5)
