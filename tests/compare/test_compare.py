"""`nalanda compare`: the plan of a study, its runs, its verdict, and what it refuses."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scipy import stats
from training import CLOCKED, ENVIRONMENT, tiny_recipe, write_recipe, write_texts

from nalanda.common.errors import InputError
from nalanda.compare.command import run_study
from nalanda.compare.options import Execution
from nalanda.compare.page import HEADINGS, Report, arm_rows
from nalanda.compare.plan import choose_rate, plan_runs, rates_at_an_end
from nalanda.compare.results import Result, other_setups, validated_of
from nalanda.compare.runs import Runner
from nalanda.compare.study import Study, load_arms, read_study, split_settings, warn_about
from nalanda.compare.verdict import (
    corrected,
    gap_by_seed,
    judge_study,
    pair_gap,
    power_of,
    seeds_needed,
    write_interval,
)
from nalanda.compare.widths import KEYS, figures_of, fit, with_equal_figures
from nalanda.config.load import load_config
from nalanda.config.schema import RunConfig
from nalanda.train.build import build_model
from nalanda_cli import main

PRETEND = Path(__file__).parents[1] / "helpers" / "pretend_train.py"
LAUNCH = f"{sys.executable} {PRETEND}"
ARMS = {"decay": "optim.weight_decay=0.1", "none": "optim.weight_decay=0"}


def study_of(tmp_path: Path, **keys) -> Study:
    values = {"recipe": "demo", "arms": dict(ARMS), "output_dir": str(tmp_path / "study"), **keys}
    study = Study(**values)
    study.check()
    return study


def compare(tmp_path: Path, *words: str, launch: str = LAUNCH) -> None:
    """The command line, with runs that only pretend to train."""
    arms = [word for name, text in ARMS.items() for word in ("--arm", f"{name}: {text}")]
    given = [] if "--arm" in words or words[0] != "demo" else arms
    main(["compare", *words, *given, "--launch", launch, f"output_dir={tmp_path / 'study'}"])


def read_json(tmp_path: Path) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = (tmp_path / "study" / "compare.json").read_text()
    return json.loads(text, parse_constant=refuse)


def starts(tmp_path: Path) -> dict[str, int]:
    """How often each run was started."""
    folder = tmp_path / "study"
    return {
        str(file.parent.relative_to(folder)): len(file.read_text().splitlines())
        for file in folder.rglob("starts")
    }


def finished(loss: float) -> Result:
    return Result("finished", 10, loss, loss / 4, 1000, 1.0)


# ------------------------------ the verdict


@pytest.fixture
def losses() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    shared = draw.normal(0, 0.1, 8)
    return 3.0 + shared + draw.normal(0, 0.004, 8), 3.01 + shared + draw.normal(0, 0.004, 8)


def test_a_gap_is_students_paired_interval(losses):
    a, b = losses
    gap = pair_gap("a", "b", a, b)

    # Spelled out, since the product asks scipy's test for the pair.
    differences = a - b
    half = stats.t.ppf(0.975, 7) * differences.std(ddof=1) / math.sqrt(8)
    assert gap.mean == pytest.approx(differences.mean(), rel=1e-12)
    assert (gap.low, gap.high) == pytest.approx((gap.mean - half, gap.mean + half), rel=1e-9)
    assert gap.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, rel=1e-9)


def test_arms_that_compute_alike_have_a_gap_of_zero():
    gap = pair_gap("a", "b", [3.0, 4.0], [3.0, 4.0])
    assert (gap.mean, gap.low, gap.high, gap.p) == (0, 0, 0, 1)


def test_a_gap_is_over_the_seeds_that_both_arms_have():
    gap = gap_by_seed("a", "b", {1: 3.0, 2: 4.0, 5: 9.0}, {2: 3.5, 1: 2.0, 7: 1.0})
    # With Holm's p: from Python 3.13 on two gaps with NaN there are not equal.
    assert corrected([gap]) == corrected([pair_gap("a", "b", [3.0, 4.0], [2.0, 3.5])])
    assert gap_by_seed("a", "b", {1: 3.0, 2: 4.0}, {2: 3.5, 3: 1.0}) is None


def test_holm_multiplies_by_the_tests_that_are_left_and_never_falls():
    gaps = [pair_gap("a", "b", [0.0, 1.0], [0.0, 0.9])] * 4
    for ps in ([0.01, 0.04, 0.03, 0.005], [0.5, 0.4, 0.3, 0.2]):
        given = [type(gap)(**{**vars(gap), "p": p}) for gap, p in zip(gaps, ps, strict=True)]
        got = [gap.holm for gap in corrected(given)]
        # Holm's step-down procedure, written as a loop over the sorted p.
        expected, least = {}, 0.0
        for left, i in enumerate(sorted(range(4), key=lambda i: ps[i])):
            least = max(least, min(1, (4 - left) * ps[i]))
            expected[i] = least
        assert got == pytest.approx([expected[i] for i in range(4)])


def test_power_is_that_of_drawn_studies():
    draw = np.random.default_rng(0)
    seeds, margin, deviation = 6, 0.01, 0.008
    trials = draw.normal(margin, deviation, (20_000, seeds))
    told = stats.ttest_1samp(trials, 0, axis=1).pvalue < 0.05
    assert power_of(margin, deviation, seeds) == pytest.approx(told.mean(), abs=0.01)

    # Of a small deviation scipy's lower tail is NaN.
    trials = draw.normal(margin, 0.0005, (20_000, 2))
    told = stats.ttest_1samp(trials, 0, axis=1).pvalue < 0.05
    assert power_of(margin, 0.0005, 2) == pytest.approx(told.mean(), abs=0.01) != 1

    needed = seeds_needed(margin, deviation)
    assert power_of(margin, deviation, needed) >= 0.8 > power_of(margin, deviation, needed - 1)


def same_recipe(arms: Iterable[str]) -> dict[str, RunConfig]:
    return dict.fromkeys(arms, load_config("demo", ["output_dir=runs/same"]))


def verdict_of(tmp_path, losses: dict[str, list[float]], **keys):
    study = study_of(
        tmp_path, arms=dict.fromkeys(losses, ""), seeds=max(map(len, losses.values())), **keys
    )
    runs = plan_runs(study, {})
    results = {
        run.name: finished(losses[run.arm][run.seed - 1])
        if math.isfinite(losses[run.arm][run.seed - 1])
        else Result("failed", 3, diverged=True, reason="step 3: loss is nan")
        for run in runs
    }
    return judge_study(study, runs, results, dict.fromkeys(losses, 2_000_000), same_recipe(losses))


def test_twenty_nulls_give_at_most_two_verdicts(tmp_path):
    """Arms that differ by the noise of their seeds alone."""
    draw = np.random.default_rng(0)
    told = 0
    for _ in range(20):
        shared = draw.normal(3, 0.1, 5)
        arms = {name: list(shared + draw.normal(0, 0.02, 5)) for name in ("a", "b")}
        told += verdict_of(tmp_path, arms).gaps[0].told
    assert told <= 2


def test_a_planted_difference_is_told(tmp_path):
    draw = np.random.default_rng(0)
    shared = draw.normal(3, 0.1, 5)
    arms = {"a": list(shared), "b": list(shared - 0.08 + draw.normal(0, 0.01, 5))}
    verdict = verdict_of(tmp_path, arms)
    (text,) = verdict.sentences
    gap = verdict.gaps[0]
    size = write_interval(gap.mean, gap.low, gap.high)
    assert gap.low < 0.02 < gap.high
    assert text == f"b is lower than a by {size} bits a byte (5 seeds, 1 K tokens, 2 M parameters)."


def test_what_cannot_be_told_names_the_seeds_that_would(tmp_path):
    draw = np.random.default_rng(1)
    shared = draw.normal(3, 0.1, 4)
    arms = {name: list(shared + draw.normal(0, 0.2, 4)) for name in ("a", "b")}
    verdict = verdict_of(tmp_path, arms, margin=0.01)
    (text,) = verdict.sentences
    needed = seeds_needed(0.01, verdict.gaps[0].deviation_limit)
    assert text.startswith("a and b cannot be told apart: ")
    assert text.endswith(f"; {needed:,} seeds would tell a difference of 0.01.")


def test_the_seeds_that_a_few_name_suffice_for_most_studies():
    draw, needed = np.random.default_rng(0), []
    for _ in range(200):
        a, b = draw.normal(0, 0.012, (2, 3))
        needed.append(seeds_needed(0.01, pair_gap("a", "b", a, b).deviation_limit))
    right = seeds_needed(0.01, 0.012 * math.sqrt(2))
    assert np.mean(np.array(needed) >= right) == pytest.approx(0.8, abs=0.06)


def test_a_small_difference_is_said_to_be_below_the_margin(tmp_path):
    draw = np.random.default_rng(1)
    arms = {
        "a": [3.0, 3.1, 3.2, 3.3],
        "b": [x + y for x, y in zip([3.0, 3.1, 3.2, 3.3], draw.normal(0, 0.002, 4), strict=True)],
    }
    (text,) = verdict_of(tmp_path, arms).sentences
    assert text.startswith("a and b differ by less than 0.01 bits a byte: ")


def test_one_seed_gives_no_verdict(tmp_path):
    verdict = verdict_of(tmp_path, {"a": [3.0], "b": [2.0]})
    assert verdict.gaps == []
    (text,) = verdict.sentences
    assert text == "a and b: no verdict, since they share fewer than two finished seeds."


def test_a_diverged_run_is_counted_and_its_seed_left_out_of_the_pair(tmp_path):
    losses = {"a": [3.0, 3.1, math.nan], "b": [2.0, 2.1, 2.5]}
    verdict = verdict_of(tmp_path, losses)
    assert len(verdict.gaps[0].differences) == 2
    assert verdict.arms["a"].diverged == (3,)
    assert verdict.arms["b"].loss == pytest.approx(2.2)
    assert verdict.sentences[0].endswith(" 1 of 3 runs of a diverged.")


def judge(tmp_path, bits: dict[str, bool], configs: dict[str, RunConfig] | None = None):
    """The verdict of arms of which some have bits a byte. configs: by default of one recipe."""
    study = study_of(tmp_path, arms=dict.fromkeys(bits, ""), seeds=2)
    results = {
        run.name: Result("finished", 10, 3 + run.seed, 1.0 + run.seed if bits[run.arm] else None)
        for run in plan_runs(study, {})
    }
    configs = configs or same_recipe(bits)
    return judge_study(study, plan_runs(study, {}), results, dict.fromkeys(bits, 1000), configs)


def test_an_arm_without_bits_a_byte_gets_no_verdict_beside_one_with_them(tmp_path):
    verdict = judge(tmp_path, {"a": True, "masked": False, "c": True})
    assert [(gap.first, gap.second) for gap in verdict.gaps] == [("a", "c")]
    reason = "no verdict, since masked has no bits a byte."
    assert verdict.sentences[0] == f"a and masked: {reason}"
    assert verdict.sentences[2] == f"masked and c: {reason}"
    assert verdict.arms["masked"].loss == pytest.approx(4.5)


def test_nats_of_two_tokenizers_give_no_verdict(tmp_path):
    bits = {"a": False, "b": False}
    configs = {arm: load_config("demo", [f"output_dir={tmp_path}"]) for arm in bits}
    assert len(judge(tmp_path, bits, configs=configs).gaps) == 1
    configs["b"].tokenizer.vocab_size //= 2
    (text,) = judge(tmp_path, bits, configs=configs).sentences
    assert text == "a and b: no verdict, since nats a token of two tokenizers do not compare."


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("stages.s.after_step=9 stages.s.data.source=other.jsonl", "data.source"),
        ("data.mask_share=0.3", "data.mask_share"),
        ("data.validation_source=other.jsonl", "data.validation_source"),
        ("data.source=other.jsonl", "data.source"),
        ("data.shuffle_buffer=10", None),
    ],
)
def test_other_rows_of_validation_give_no_verdict(tmp_path, setting, named):
    settings = [f"output_dir={tmp_path}"]
    configs = {
        "a": load_config("demo", settings),
        "b": load_config("demo", [*settings, *setting.split()]),
    }
    (text,) = judge(tmp_path, dict.fromkeys(configs, True), configs=configs).sentences
    if named is None:
        assert "no verdict" not in text
    else:
        assert text.startswith("a and b: no verdict, since they are validated on other rows: ")
        assert named in text


@pytest.mark.parametrize("gap", [0.25, 0.1])
def test_differences_that_are_all_equal_give_no_verdict(tmp_path, gap):
    """Their spread is zero, up to rounding, and t is not defined."""
    verdict = verdict_of(tmp_path, {"a": [3.0, 3.3, 3.7], "b": [3.0 + gap, 3.3 + gap, 3.7 + gap]})
    assert not verdict.gaps[0].told
    assert verdict.sentences[0].startswith("a and b: no verdict, since all differences are ")


@pytest.mark.parametrize("unit", ["bytes", "labels"])
def test_another_amount_of_validation_text_gives_no_verdict(tmp_path, unit):
    """As under another tokenizer, whose tokens fill the rows with more text."""
    study = study_of(tmp_path, arms={"a": "", "b": ""}, seeds=2)
    bits = 1.0 if unit == "bytes" else None
    for amount, refused in ((1005, False), (2000, True)):
        results = {
            run.name: Result(
                "finished",
                10,
                3 + run.seed,
                bits and bits + run.seed / 7,
                validated=((unit, amount if run.arm == "b" else 1000),),
            )
            for run in plan_runs(study, {})
        }
        runs, parameters = plan_runs(study, {}), dict.fromkeys("ab", 1000)
        verdict = judge_study(study, runs, results, parameters, same_recipe("ab"))
        assert ("validated on 1,000 and 2,000" in verdict.sentences[0]) == refused
        assert len(verdict.gaps) == (not refused)


def test_bytes_of_validation_follow_from_its_losses():
    line = {"val_tokens": 248, "val_loss": 5.2, "val_bpb": 248 * 5.2 / math.log(2) / 410}
    assert dict(validated_of(line)) == {"labels": 248, "bytes": pytest.approx(410)}
    assert dict(validated_of({"val_tokens": 248, "val_loss": 5.2})) == {"labels": 248}


def test_a_told_difference_within_the_margin_is_called_so(tmp_path):
    arms = {"a": [3.0, 3.1, 3.2], "b": [3.004, 3.105, 3.2041]}
    (text,) = verdict_of(tmp_path, arms).sentences
    assert "a is lower than b by " in text
    assert " bits a byte, less than the margin of 0.01 (3 seeds" in text


def test_the_seeds_that_would_tell_count_the_pairs_of_the_study(tmp_path):
    draw = np.random.default_rng(0)
    shared = draw.normal(3, 0.1, 5)
    arms = {f"a{i}": list(shared + 0.01 * i + draw.normal(0, 0.02, 5)) for i in range(5)}
    verdict = verdict_of(tmp_path, arms)
    told_alone = {i for i, gap in enumerate(verdict.gaps) if gap.p < 0.05 < gap.holm}
    assert told_alone
    for i in told_alone & {i for i, s in enumerate(verdict.sentences) if "told apart" in s}:
        gap, text = verdict.gaps[i], verdict.sentences[i]
        needed = seeds_needed(0.01, gap.deviation_limit, 10)
        assert needed > seeds_needed(0.01, gap.deviation_limit)
        holm = f", Holm's p over 10 pairs is {gap.holm:.2g}; {needed} seeds would tell"
        assert holm in text


def test_a_sentence_has_sizes_and_tokens_of_both_arms(tmp_path):
    study = study_of(tmp_path, arms=dict.fromkeys("ab", ""), seeds=2)
    results = {
        run.name: Result("finished", 10, 3.0 * run.seed, 1.0, 1000 if run.arm == "a" else 9000)
        for run in plan_runs(study, {})
    }
    sizes = {"a": 10_000_000, "b": 9_000_000}
    verdict = judge_study(study, plan_runs(study, {}), results, sizes, same_recipe(sizes))
    assert "(2 seeds, 1 K and 9 K tokens, 10 M and 9 M parameters)" in verdict.sentences[0]
    figures = {arm: {"rate": 0.1} for arm in "ab"}
    rows = arm_rows(Report(study, verdict, [], {}, figures, []))
    assert [row[HEADINGS.index("tokens")] for row in rows] == ["1 K", "9 K ≠"]


def test_an_interval_has_two_digits_of_its_half_width():
    assert write_interval(0.012345, 0.004, 0.0207) == "0.0123 [0.0040, 0.0207]"
    assert write_interval(-1.5, -2.0, -1.0, signed=True) == "−1.500 [−2.000, −1.000]"
    assert write_interval(2.5e-10, 2e-10, 3e-10) == "2.50e−10 [2.00e−10, 3.00e−10]"
    assert write_interval(0, 0, 0) == "0.0000 [0.0000, 0.0000]"


def test_figures_far_from_the_first_arms_are_marked(tmp_path):
    verdict = verdict_of(tmp_path, {"a": [3.0, 3.1], "b": [3.0, 3.2], "c": [2.0, 2.1]})
    study = study_of(tmp_path, arms=dict.fromkeys("abc", ""))
    sizes = {"a": (100, 64, True), "b": (101, 640, False), "c": (103, 700, False)}
    figures = {
        arm: {"rate": 0.1, KEYS["parameters"]: n, KEYS["flops"]: n, KEYS["state"]: state}
        | {"state_grows": grows}
        for arm, (n, state, grows) in sizes.items()
    }
    rows = arm_rows(Report(study, verdict, [], {}, figures, []))
    cells = {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in rows}
    assert [cells[arm]["parameters"] for arm in "abc"] == ["100", "101", "103 ≠"]
    # Fixed states compare with the first fixed one.
    assert [cells[arm]["state"] for arm in "abc"] == ["64 B, grows", "640 B", "700 B ≠"]


# ------------------------------ the plan


def test_settings_are_parted_outside_brackets_and_quotes():
    text = "model.mixer=[gla, softmax] data.source='a b' model={mixer: gla, x: 1}"
    assert split_settings(text) == [
        "model.mixer=[gla, softmax]",
        "data.source='a b'",
        "model={mixer: gla, x: 1}",
    ]


def test_a_rate_at_an_end_of_the_grid_asks_for_an_octave_more(tmp_path):
    study = study_of(tmp_path, rates=[0.001, 0.002])
    results: dict[str, Result] = {}
    grids = []
    while True:
        grid, chosen = choose_rate(study, "decay", results)
        grids.append(len(grid))
        if chosen is not None:
            break
        for rate in grid:
            loss = abs(math.log2(rate / 0.004))
            results[f"decay/rate-{rate:g}-seed-101"] = finished(3 + loss)
    assert chosen == 0.004
    assert sorted(grid) == [0.001, 0.002, 0.004, 0.008]
    assert grids == [2, 3, 4, 4]


def test_a_best_rate_at_an_end_of_the_grown_grid_is_named(tmp_path):
    study, results = study_of(tmp_path, rates=[0.001, 0.002]), {}
    while any(run.trial and run.name not in results for run in plan_runs(study, results)):
        results |= {run.name: finished(1 / run.rate) for run in plan_runs(study, results)}
    first, _ = rates_at_an_end(study, results)
    assert first.startswith("The best rate of decay, 0.032, stands at an end of 0.001, ")


def test_a_finished_trial_without_a_number_is_the_worst(tmp_path):
    study = study_of(tmp_path, rates=[0.1, 0.2, 0.3])
    losses = {0.1: math.nan, 0.2: 3.0, 0.3: 4.0}
    runs = plan_runs(study, {})
    results = {run.name: finished(losses[run.rate]) for run in runs}
    assert choose_rate(study, "decay", results)[1] == 0.2


def test_runs_of_two_versions_are_named():
    runs = [Result("finished", setup=(("torch", v), ("device", "cpu"))) for v in ("2.12", "2.13")]
    assert other_setups(runs[:1]) == []
    assert other_setups(runs) == ["The runs were not all computed alike: torch 2.12 and 2.13."]


def test_workers_have_a_gpu_each_of_those_that_the_user_names(tmp_path, monkeypatch):
    study = study_of(tmp_path)
    runner = Runner(study, load_arms(study), Execution(workers=2))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for named, cards in (({"CUDA_VISIBLE_DEVICES": "2,3"}, ["2", "3"]), ({}, ["0", "1"])):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        environments = [dict(named), dict(named)]
        for slot, environment in enumerate(environments):
            runner.place(plan_runs(study, {})[0], slot, environment)
        assert [x["CUDA_VISIBLE_DEVICES"] for x in environments] == cards


def test_a_diverged_rate_is_the_worst(tmp_path):
    study = study_of(tmp_path, rates=[0.001, 0.002, 0.004])
    results = {
        "decay/rate-0.001-seed-101": finished(3.2),
        "decay/rate-0.002-seed-101": finished(3.0),
        "decay/rate-0.004-seed-101": Result("failed", 5, diverged=True),
    }
    assert choose_rate(study, "decay", results)[1] == 0.002
    lost = {name: Result("failed", 5, diverged=True) for name in results}
    with pytest.raises(InputError, match=r"no rate of 0\.001, 0\.002, 0\.004 can be trained"):
        choose_rate(study, "decay", lost)


def test_trials_of_rates_share_no_seed_with_the_verdict(tmp_path):
    study = study_of(tmp_path, rates=[0.001, 0.002, 0.004], rate_seeds=2)
    trials = plan_runs(study, {})
    assert all(run.trial for run in trials)
    best = {run.name: finished(3 + abs(run.rate - 0.002)) for run in trials}
    runs = [run for run in plan_runs(study, best) if not run.trial]
    assert {run.rate for run in runs} == {0.002}
    assert not {run.seed for run in runs} & {run.seed for run in trials}


@pytest.mark.parametrize("count", [2, 3])
def test_shards_part_the_runs(tmp_path, count):
    study = study_of(tmp_path, seeds=5)
    numbers = [run.number % count for run in plan_runs(study, {})]
    sizes = [numbers.count(i) for i in range(count)]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ("data.seq_len=256", "b reads other rows than a: data.seq_len."),
        (
            "stages.s-2.after_step=9 stages.s-2.data.source=x.txt",
            "b reads other rows than a: stages.s-2.",
        ),
        ("tokenizer.vocab_size=1024", "b has another tokenizer than a: only bits a byte compare."),
        (
            "model.initializer_range=0.05",
            "b begins with other weights than a: model.initializer_range.",
        ),
        (
            "stages={x: {after_step: 9, optim: {lr: 0.1}}}",
            "b keeps these rates, whatever --rates tries: stages.x.optim.lr.",
        ),
        (
            "optim.name=muon optim.muon_lr=0.02",
            "b keeps these rates, whatever --rates tries: optim.muon_lr.",
        ),
        ("optim.weight_decay=0", None),
    ],
)
def test_notes_say_in_what_arms_do_not_compare(tmp_path, settings, note):
    study = study_of(tmp_path, arms={"a": "", "b": settings}, rates=[0.001, 0.002])
    assert warn_about(study, load_arms(study)) == ([note] if note else [])


# ------------------------------ runs that only pretend


def test_a_study_from_the_command_line(tmp_path, capsys):
    compare(tmp_path, "demo", "--seeds", "4", "train.steps=20")
    printed = capsys.readouterr().out
    assert "none is lower than decay by 0.06" in printed
    assert "All arms share the rate 0.006." in printed

    record = read_json(tmp_path)
    (pair,) = record["pairs"]
    losses = {
        arm: [record["runs"][f"{arm}/seed-{seed}"]["bits"] for seed in (1, 2, 3, 4)] for arm in ARMS
    }
    assert pair["mean"] == pytest.approx(np.mean(losses["decay"]) - np.mean(losses["none"]))
    page = (tmp_path / "study" / "compare.html").read_text()
    assert record["sentences"][0] in page
    assert "| decay | 0.006 | 4 |" in (tmp_path / "study" / "compare.md").read_text()

    # The recorded study is a study file, and nothing is trained again.
    main(["compare", str(tmp_path / "study"), "--launch", LAUNCH])
    assert set(starts(tmp_path).values()) == {1}


def test_rates_are_chosen_for_each_arm(tmp_path, capsys):
    compare(tmp_path, "demo", "--seeds", "2", "--rates", "1e-2,2e-2,4e-2")
    record = read_json(tmp_path)
    assert {name: arm["rate"] for name, arm in record["arms"].items()} == {
        "decay": 0.01,
        "none": 0.005,
    }
    # The grid grew to where both arms' rates lie within.
    rates = {run["rate"] for name, run in record["runs"].items() if name.startswith("none/rate")}
    assert rates == {0.0025, 0.005, 0.01, 0.02, 0.04}
    assert "All arms share the rate" not in capsys.readouterr().out


def test_arms_may_have_rates_of_their_own(tmp_path, capsys):
    arms = ["--arm", "a: optim.lr=1e-2", "--arm", "b: optim.lr=2e-2"]
    compare(tmp_path, "demo", "--seeds", "1", *arms)
    assert "share the rate" not in capsys.readouterr().out
    assert "| a | 0.01 | 1 |" in (tmp_path / "study/compare.md").read_text()
    assert "optim.lr=2e-2" in (tmp_path / "study/b/seed-1.log").read_text()


def test_a_run_that_diverged_is_named_and_not_tried_again(tmp_path, capsys):
    arms = ["--arm", "sound: optim.weight_decay=0.1", "--arm", "wild: optim.weight_decay=0"]
    words = ["demo", *arms, "--seeds", "2", "--rates", "2e-2,4e-2,1e-1"]
    compare(tmp_path, *words)
    assert "sound/rate-0.1-seed-101 diverged: step 7: loss is nan" in capsys.readouterr().err
    compare(tmp_path, *words)
    assert set(starts(tmp_path).values()) == {1}
    lost = read_json(tmp_path)["runs"]["sound/rate-0.1-seed-101"]
    assert lost["diverged"]
    assert lost["loss"] is None


@pytest.mark.slow
def test_shards_in_two_processes_end_with_one_verdict(tmp_path):
    words = [
        *(sys.executable, "-m", "nalanda_cli", "compare", "demo", "--rates", "5e-3,1e-2,2e-2"),
        *("--arm", "decay: optim.weight_decay=0.1", "--arm", "none: optim.weight_decay=0"),
        *("--launch", LAUNCH, f"output_dir={tmp_path / 'study'}"),
    ]
    shards = [
        subprocess.Popen([*words, "--shard", f"{i}/2"], stdout=subprocess.PIPE, text=True)
        for i in (1, 2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in shards]
    assert [process.returncode for process in shards] == [0, 0]
    assert set(starts(tmp_path).values()) == {1}
    assert any("none is lower than decay" in text for text in printed)
    assert (tmp_path / "study" / "compare.json").is_file()


def test_forked_arms_begin_at_a_checkpoint_of_the_first(tmp_path, capsys):
    compare(tmp_path, "demo", "--seeds", "2", "--from", "0.25", "train.steps=20")
    folder = tmp_path / "study"
    trunk = folder / "decay/seed-2"
    assert "All arms of a seed have step 5 of decay in common" in capsys.readouterr().out
    begun = (folder / "none/seed-2/starts").read_text().strip()
    assert begun == f"{trunk}/checkpoints/step-5"
    assert (trunk / "starts").read_text().strip() == ""
    log = (folder / "decay/seed-2.log").read_text()
    assert "checkpoint.every=5 checkpoint.keep_every=5" in log


def test_more_seeds_join_a_study_and_fewer_do_not(tmp_path, capsys):
    compare(tmp_path, "demo", "--seeds", "2")
    capsys.readouterr()
    compare(tmp_path, "demo", "--seeds", "3")
    assert "Seeds were added after a verdict over 2." in capsys.readouterr().out
    assert read_json(tmp_path)["looks"] == [[2, 0.01], [3, 0.01]]
    assert len(starts(tmp_path)) == 6
    assert set(starts(tmp_path).values()) == {1}
    with pytest.raises(SystemExit):
        compare(tmp_path, "demo", "--seeds", "2")
    assert "its study has 3 seeds" in capsys.readouterr().err


def test_a_margin_that_follows_a_verdict_is_noted(tmp_path, capsys):
    for _ in range(2):
        compare(tmp_path, "demo", "--seeds", "2", "--margin", "0.02")
    assert "The margin was" not in capsys.readouterr().out
    compare(tmp_path, "demo", "--seeds", "2", "--margin", "0.2")
    assert "The margin was 0.02 at the first verdict" in capsys.readouterr().out
    assert read_json(tmp_path)["looks"] == [[2, 0.02], [2, 0.2]]


def test_the_steps_of_a_study_count_runs_that_wait_for_a_rate(tmp_path):
    study = study_of(tmp_path, rates=[0.001, 0.002], seeds=5)
    configs = load_arms(study)
    runner = Runner(study, configs, Execution())
    steps = configs["decay"].train.steps
    assert runner.steps_of_all() == (2 * 2 + 2 * 5) * steps


def test_a_study_that_moved_trains_nothing_again(tmp_path):
    compare(tmp_path, "demo", "--seeds", "1")
    (tmp_path / "study").rename(tmp_path / "moved")
    main(["compare", str(tmp_path / "moved"), "--launch", LAUNCH])
    assert not (tmp_path / "study").exists()
    begun = [len(f.read_text().splitlines()) for f in (tmp_path / "moved").rglob("starts")]
    assert begun == [1, 1]


@pytest.mark.parametrize("folder", ["~/mine", "file://{home}/mine"])
def test_the_folder_of_a_study_is_expanded_as_that_of_a_run(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    study = {"recipe": "demo", "arms": ARMS, "output_dir": folder.format(home=tmp_path)}
    file = tmp_path / "maps.yaml"
    file.write_text(yaml.safe_dump(study))
    assert read_study(str(file)).output_dir == str(tmp_path / "mine")
    assert read_study(str(file), ["output_dir=~/other"]).output_dir == str(tmp_path / "other")


def test_a_task_or_prompt_that_fails_loses_nothing_before_it(tmp_path, capsys):
    study = study_of(tmp_path, seeds=2, tasks=["copy"])
    execution = Execution(launch=LAUNCH)
    run_study(study, execution)
    for run in plan_runs(study, {}):
        (tmp_path / "study" / run.name / "final").mkdir()
    files = [tmp_path / "study" / name for name in ("compare.json", "compare.html")]

    def refuse(*words):
        raise InputError("cannot")

    def score(models, tasks, folder):
        metrics = {"copy": {"metrics": {"acc": 0.5}}}
        return {"models": [{"tasks": metrics} for _ in models]}

    for evaluate, tasks in ((refuse, []), (score, ["copy"])):
        for file in files:
            file.unlink()
        capsys.readouterr()
        with pytest.raises(InputError, match="cannot"):
            run_study(study, execution, evaluate, refuse)
        record = read_json(tmp_path)
        assert record["sentences"][0] in capsys.readouterr().out
        assert record["sentences"][0] in files[1].read_text()
        assert [score["task"] for score in record["tasks"]] == tasks


def test_secrets_of_urls_are_in_no_report_and_no_log(tmp_path, capsys):
    url = "https://me:hunter2@host/a.jsonl?sig=s3cret"
    arms = ["--arm", f"a: data.source={url}", "--arm", f"b: data.source={url} train.z_loss=0.1"]
    compare(tmp_path, "demo", "--seeds", "1", *arms)
    printed, folder = capsys.readouterr(), tmp_path / "study"
    with_secrets = {
        file.name
        for file in folder.rglob("*")
        if file.is_file() and ("hunter2" in file.read_text() or "s3cret" in file.read_text())
    }
    # The study goes on from there.
    assert with_secrets == {"compare.yaml"}
    assert (folder / "compare.yaml").stat().st_mode & 0o077 == 0
    assert "hunter2" not in printed.out + printed.err
    assert "https://***@host/a.jsonl?***" in (folder / "compare.html").read_text()

    assert read_study(str(folder)).settings["a"] == [f"data.source={url}"]


# ------------------------------ bad input


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["demo", "--arm", "a: optim.lr=1", "--arm", "b:", "--rates", "1e-3,2e-3"],
            "optim.lr: each arm's is one of rates; leave out one of the two",
        ),
        (
            ["demo", "--arm", "a: train.z_loss=0", "--arm", "b:"],
            "arms a and b: their recipes are equal",
        ),
        (["demo", "--arm", "a:"], "arms: 1 given; a comparison needs two or more"),
        (
            ["demo", "--arm", "model.mixer=gla"],
            'expected a name first: --arm "name: model.mixer=gla"',
        ),
        (["demo", "--arm", "a:", "--arm", "a: seed=2"], "--arm a: given twice"),
        (["demo", "--arm", "a/b:", "--arm", "c:"], "arms.a/b: a name has letters"),
        (["demo", "--arm", "..:", "--arm", "c: optim.weight_decay=0"], "begins with a letter"),
        (["demo", "--arm", f"{'a' * 65}:", "--arm", "c:"], "has at most 64 characters"),
        (["demo", "--arm", "eval:", "--arm", "c:"], "arms.eval: the folder has eval already"),
        (["demo", "--arm", "A:", "--arm", "a: optim.weight_decay=0"], "differ by case alone"),
        (["demo", "--arm", "a: train.resume=never", "--arm", "b:"], "train.resume: the study sets"),
        (["demo", "--rates", "1e-3,1e-3,2e-3"], "rates: two of 0.001, 0.001, 0.002 are equal"),
        (
            ["demo", "--equal", "parameters", "--by", "train.steps"],
            "by: train.steps: name a key of",
        ),
        (
            ["demo", "--arm", "a: train.steps=40", "--arm", "b: train.steps=20", "--from", "0.5"],
            "arm b: train.steps: its 20 steps are over at step 20",
        ),
        (
            ["demo", "--arm", "a:", "--arm", "b: data.seq_len=256", "--from", "0.5"],
            "arm b: data.seq_len: a checkpoint of a, whose run --from leaves, has no other",
        ),
        (
            [
                *("demo", "--from", "0.5", "--arm", "a: stages={x: {after_step: 9}}"),
                *("--arm", "b: stages={x: {after_step: 9, data: {seq_len: 256}}}"),
            ],
            "arm b: stages.x.data.seq_len: a checkpoint of a, whose run --from leaves, has no other",
        ),
        (
            ["demo", "--arm", "a:", "--arm", "b: optim.name=muon", "--from", "0.5"],
            "arm b: optim.name: a checkpoint of a",
        ),
        (
            ["demo", "--arm", "a:", "--arm", "b: model.intermediate_size=64", "--from", "0.5"],
            "arm b: --from: model.layers.0.mlp.gate_proj.weight has another shape than in a",
        ),
        (
            [
                *("demo", "--arm", "a: model.hidden_size=512", "--arm", "b:"),
                *("--equal", "parameters", "--by", "model.expand_k"),
            ],
            "--by model.expand_k: arm b comes nearest with ",
        ),
        (
            ["demo", "--arm", "a: model.mixer=glaa", "--arm", "b:"],
            "arm a: model: unknown mixer 'glaa'",
        ),
        (["demo", "--arm", "a:", "--arm", "b: oops"], "arm b: oops: no such recipe or file"),
        (["demo", "--seeds", "2", "--rates", "1e-3"], "rates: one rate leaves no choice"),
        (["demo", "--rates", "fast,slow"], "--rates fast,slow: expected numbers with commas"),
        (["demo", "--equal", "parameters"], "equal: give the figure and the key to fit"),
        (["demo", "--equal", "speed", "--by", "model.hidden_size"], "equal: expected one of"),
        (["demo", "--from", "1.5"], "study.fork_at: expected a number between 0 and 1"),
        (["demo", "--shard", "3/2"], "--shard 3/2: expected I/N, such as 1/2"),
        (["demo", "validation.every=0"], "arm decay: validation.every: a comparison reads"),
        (["demo", "output_dir=elsewhere", "seed=3"], "seed: the study sets it for each run"),
        (["demo", "--tasks", "no_such_task"], "no_such_task"),
    ],
)
def test_bad_input_is_one_line_before_any_run(tmp_path, capsys, words, line):
    with pytest.raises(SystemExit) as stop:
        compare(tmp_path, *words)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert line in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"arms": {1: "", 2: "optim.weight_decay=0"}}, "arms: the name 1 is no text; quote it"),
        ({"overrides": None}, "overrides: expected a list, got nothing"),
        ({"overrides": "train.steps=20"}, "overrides: expected a list, got 'train.steps=20'"),
        ({"recipe": None}, "recipe: expected text, got nothing"),
    ],
)
def test_a_bad_study_file_is_one_line(tmp_path, capsys, values, line):
    file = tmp_path / "maps.yaml"
    study = {"recipe": "demo", "arms": ARMS, "output_dir": str(tmp_path / "study"), **values}
    file.write_text(yaml.safe_dump(study))
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(file), "--launch", LAUNCH])
    assert stop.value.code == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_launcher_with_an_open_quote_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare(tmp_path, "demo", launch="'accelerate")
    assert capsys.readouterr().err.strip() == "nalanda: --launch 'accelerate: No closing quotation"
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the finished run has no validation loss there"),
        ('{"step": 512, "tokens": 5, "val_loss": "x"}', "damaged: ValueError"),
        ('{"step": 512, "val_loss": 3.0}', "damaged: KeyError('tokens')"),
    ],
)
def test_a_finished_run_whose_metrics_are_damaged_is_not_called_diverged(
    tmp_path, capsys, text, line
):
    compare(tmp_path, "demo", "--seeds", "2")
    (tmp_path / "study/none/seed-1/metrics.jsonl").write_text(f"{text}\n")
    with pytest.raises(SystemExit) as stop:
        compare(tmp_path, "demo", "--seeds", "2")
    assert stop.value.code == 2
    assert f"none/seed-1/metrics.jsonl: {line}" in capsys.readouterr().err


def test_without_arms_the_line_shows_one(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["compare", "demo"])
    assert (
        'give two arms or more, such as --arm "silu: model.feature_map=silu"'
        in capsys.readouterr().err
    )


def test_a_study_file_takes_no_options_of_a_study(tmp_path, capsys):
    file = tmp_path / "maps.yaml"
    file.write_text(
        yaml.safe_dump({"recipe": "demo", "arms": ARMS, "output_dir": str(tmp_path / "s")})
    )
    with pytest.raises(SystemExit):
        main(["compare", str(file), "--seeds", "2"])
    assert f"--seeds: {file} is a study; set its keys in the file" in capsys.readouterr().err


def test_a_changed_arm_is_refused(tmp_path, capsys):
    compare(tmp_path, "demo", "--seeds", "2")
    words = [
        "demo",
        "--arm",
        "decay: optim.weight_decay=0.2",
        "--arm",
        "none: optim.weight_decay=0",
    ]
    with pytest.raises(SystemExit):
        compare(tmp_path, *words, "--seeds", "2")
    error = capsys.readouterr().err
    assert "another study: arms.decay is 'optim.weight_decay=0.1' there" in error
    assert "choose another output_dir" in error


def test_arms_in_another_order_are_refused(tmp_path, capsys):
    """The first arm is the one that others leave, and are made equal to."""
    compare(tmp_path, "demo", "--seeds", "1")
    swapped = [word for n, text in reversed(ARMS.items()) for word in ("--arm", f"{n}: {text}")]
    with pytest.raises(SystemExit):
        compare(tmp_path, "demo", "--seeds", "1", *swapped)
    assert "its arms stand in the order decay, none; keep it" in capsys.readouterr().err


def test_a_run_of_another_rate_is_refused(tmp_path, capsys):
    """Someone edited compare.yaml: the recorded study is that of the command then."""
    compare(tmp_path, "demo", "--seeds", "1")
    config = tmp_path / "study" / "decay" / "seed-1" / "config.yaml"
    config.write_text(config.read_text() + "optim: {lr: 0.5}\n")
    with pytest.raises(SystemExit):
        compare(tmp_path, "demo", "--seeds", "1")
    assert "this run has optim.lr 0.5, and the study has 0.006" in capsys.readouterr().err


def test_a_recipe_that_changed_under_a_study_is_refused(tmp_path, capsys):
    from nalanda.config.load import find_recipe

    recipe = tmp_path / "mine.yaml"
    recipe.write_text(find_recipe("demo").read_text())
    arms = ["--arm", "decay: optim.weight_decay=0.1", "--arm", "none: optim.weight_decay=0"]
    compare(tmp_path, str(recipe), *arms, "--seeds", "2")
    recipe.write_text(recipe.read_text().replace("warmup_steps: 40", "warmup_steps: 41"))
    with pytest.raises(SystemExit):
        compare(tmp_path, str(recipe), *arms, "--seeds", "2")
    assert "schedule.warmup_steps was 40 and is 41" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "notes.txt").touch()
    with pytest.raises(SystemExit):
        compare(tmp_path, "demo", "--seeds", "2")
    assert "has files that are no study; choose another output_dir" in capsys.readouterr().err


TORCHRUN = """
nalanda: https://host/a: 503; try 2 of 3
Root Cause (first observed failure):
  exitcode  : 75 (pid: 7)
  traceback : nalanda: https://host/a: 503
"""


@pytest.mark.parametrize(
    ("program", "code", "line"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit(0)", 2, "exit code 0"),
        ("print('nalanda: no server'); sys.exit(75)", 75, "no server"),
        ("os.kill(os.getpid(), 9)", 137, "ended by SIGKILL"),
        (f"print({TORCHRUN!r}); sys.exit(1)", 75, "https://host/a: 503"),
        # A warning is not the cause of a traceback.
        ("print('nalanda: slow server'); sys.exit(1)", 1, "exit code 1"),
    ],
)
def test_a_run_that_fails_ends_the_study_with_its_line_and_code(
    tmp_path, capsys, program, code, line
):
    log = tmp_path / "study/decay/seed-1.log"
    script = tmp_path / "fails.py"
    script.write_text(f"import os, sys\n{program}\n")
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            compare(tmp_path, "demo", "--seeds", "1", launch=f"{sys.executable} {script}")
        assert stop.value.code == code
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"decay/seed-1: {line}; see {log}; nalanda compare" in error

        # A later start appends to this log, and its cause is its own.
        log.write_text(log.read_text() + "nalanda: the disk is full\n")


# ------------------------------ equal figures


def test_a_key_is_fitted_to_equal_parameters(tmp_path):
    arms = {"silu": "model.feature_map=silu model.expand_k=1", "nala": "model.feature_map=nala"}
    study = study_of(tmp_path, arms=arms, equal="parameters", by="model.intermediate_size")
    fitted = with_equal_figures(study)
    silu, nala = (figures_of(fitted, arm)["parameters"] for arm in arms)
    before = figures_of(study, "nala")["parameters"]
    assert abs(nala / silu - 1) < 0.002 < abs(before / silu - 1)
    assert fitted.settings["silu"] == study.settings["silu"]


def test_a_ratio_that_is_written_as_an_integer_is_fitted_in_parts(tmp_path):
    arms = {"silu": "model.feature_map=silu model.expand_k=1", "nala": "model.expand_k=1"}
    study = study_of(tmp_path, arms=arms, equal="state", by="model.expand_k")
    assert with_equal_figures(study).settings["nala"][-1] == "model.expand_k=0.5"


def test_values_that_do_not_suit_the_model_are_passed_over():
    def figure(x: float) -> float:
        if x % 32:
            raise InputError("heads")
        return 10 * x

    assert fit(figure, 64, 1000, "k") == 96
    assert fit(figure, 64, 1130, "k") == 128
    with pytest.raises(InputError, match="no value suits the model"):
        fit(lambda x: (_ for _ in ()).throw(InputError("no")), 64, 1000, "k")


# ------------------------------ weights by name


def test_models_of_a_seed_share_the_weights_of_equal_modules(tmp_path):
    import torch

    arms = {"wide": "model.intermediate_size=768", "narrow": "model.intermediate_size=512"}
    study = study_of(tmp_path, arms=arms)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 4095}, **ids)
    models = {}
    for by_name in (True, False):
        for name, config in load_arms(study).items():
            config.seed, config.seed_by_name = 5, by_name
            torch.manual_seed(5)
            models[name, by_name] = dict(build_model(config, tokenizer).named_parameters())

    def differing(by_name: bool) -> set[str]:
        wide, narrow = (models[name, by_name] for name in arms)
        same = {n for n in wide if wide[n].shape == narrow[n].shape}
        return {n for n in same if not torch.equal(wide[n], narrow[n])}

    assert differing(True) == set()
    assert len(differing(False)) > 5


def test_embeddings_begin_alike_whether_tied_or_not(tmp_path):
    import torch

    study = study_of(tmp_path, arms={"tied": "", "own": "model.tie_word_embeddings=false"})
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 4095}, **ids)
    tied, own = (
        build_model(replace(config, seed_by_name=True), tokenizer)
        for config in load_arms(study).values()
    )
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    assert torch.equal(tied.get_input_embeddings().weight, own.get_input_embeddings().weight)


def test_rows_of_a_seed_are_the_same_for_every_arm(tiny_study, tmp_path, tokenizer):
    from nalanda.train.build import open_batches

    arms = {
        "own": "",
        "rows": "train.micro_batch_size=1",
        "slow": "schedule.warmup_steps=7",
        "softmax": "model.mixer=softmax",
        "muon": "optim.name=muon",
    }
    study = study_of(tmp_path, recipe=str(tmp_path / "tiny.yaml"), arms=arms)

    def rows_of(config, seed: int) -> tuple[list[list[int]], list[list[int]]]:
        train, validation = open_batches(replace(config, seed=seed), tokenizer)
        batches = itertools.islice(train, 12 // config.train.micro_batch_size)
        read = [row for batch in batches for row in batch["input_ids"].tolist()]
        # Without the rows that only fill a last batch.
        checked = [
            row
            for batch in validation[""]
            for row, labels in zip(batch["input_ids"].tolist(), batch["labels"], strict=True)
            if (labels >= 0).any()
        ]
        return read, checked

    read = {name: rows_of(config, 2) for name, config in load_arms(study).items()}
    assert all(rows == read["own"] for rows in read.values())
    other = rows_of(load_arms(study)["own"], 3)
    assert other[0] != read["own"][0]
    assert other[1] == read["own"][1]


# ------------------------------ runs that train


@pytest.fixture
def tiny_study(tmp_path) -> Path:
    """A study of a tiny model: the second arm hardly learns."""
    write_texts(tmp_path / "texts.jsonl", 200, [20, 40])
    recipe = tiny_recipe(
        tmp_path,
        {"mixer": "linear_attention", "num_hidden_layers": 1},
        {"steps": 60, "tokens_per_step": 128, "micro_batch_size": 2},
        tokenizer={"train": "bpe", "vocab_size": 300},
        data={"source": str(tmp_path / "texts.jsonl"), "seq_len": 64},
        checkpoint={"every": 10},
    )
    study = {
        "recipe": str(write_recipe(tmp_path / "tiny.yaml", recipe)),
        "arms": {"own": "", "slow": "schedule.warmup_steps=60"},
        "seeds": 2,
        "output_dir": str(tmp_path / "study"),
    }
    file = tmp_path / "maps.yaml"
    file.write_text(yaml.safe_dump(study))
    return file


def start_compare(study: Path | str, *words: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "nalanda_cli", "compare", str(study), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | ENVIRONMENT | environment, **pipes)


def metrics_of(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in CLOCKED} for line in lines]


@pytest.mark.slow
def test_a_study_that_was_stopped_goes_on_to_the_same_losses(tiny_study, tmp_path):
    whole = start_compare(tiny_study, f"output_dir={tmp_path / 'whole'}")
    printed, error = whole.communicate(timeout=600)
    assert whole.returncode == 0, error
    assert "own is lower than slow by" in printed or "cannot be told apart" in printed

    # Two runs at a time, stopped once the first ones have saved.
    stopped = start_compare(tiny_study, "--workers", "2")
    saved = tmp_path / "study" / "own" / "seed-1" / "checkpoints" / "step-10"
    while not saved.is_dir():
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(timeout=120) == 130
    facts = json.loads((tmp_path / "study/own/seed-1/run.json").read_text())
    assert facts["state"] == "interrupted"

    again = start_compare(tiny_study)
    _, error = again.communicate(timeout=600)
    assert again.returncode == 0, error
    for arm in ("own", "slow"):
        for seed in (1, 2):
            run = f"{arm}/seed-{seed}"
            assert metrics_of(tmp_path / "study" / run) == metrics_of(tmp_path / "whole" / run)

    # Runs of a seed read the same rows, from the same weights: their first losses are equal.
    firsts = {
        run: metrics_of(tmp_path / "whole" / run)[0]["loss"]
        for run in ("own/seed-1", "slow/seed-1")
    }
    assert len(set(firsts.values())) == 1
    assert metrics_of(tmp_path / "whole" / "own/seed-2")[0]["loss"] not in firsts.values()


@pytest.mark.slow
def test_an_arm_that_leaves_a_run_without_a_change_ends_where_that_run_ends(tiny_study, tmp_path):
    values = yaml.safe_load(tiny_study.read_text())
    # Logging changes no weight.
    values |= {"fork_at": 0.5, "seeds": 1, "arms": {"own": "", "same": "log.every=2"}}
    tiny_study.write_text(yaml.safe_dump(values))
    process = start_compare(tiny_study)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0, error

    own, same = (metrics_of(tmp_path / "study" / arm / "seed-1") for arm in ("own", "same"))
    assert same[0]["step"] == 32
    assert own[-1]["val_loss"] == same[-1]["val_loss"]


@pytest.mark.slow
def test_machines_that_share_a_store_end_with_one_verdict(tiny_study, tmp_path, bucket):
    """Each has a cache of its own; one command is killed and starts again."""
    machines = [{"NALANDA_CACHE": str(tmp_path / f"machine-{i}")} for i in (1, 2)]
    output = "output_dir=s3://bucket/study"
    first, second = (
        start_compare(tiny_study, output, "--shard", f"{i}/2", **machine)
        for i, machine in enumerate(machines, 1)
    )
    while not [*(tmp_path / "machine-1").rglob("own/seed-1.log")]:
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.kill()
    first.wait()

    # The run of the killed command may still be at work; the new one waits for it.
    again = start_compare(tiny_study, output, "--shard", "1/2", **machines[0])
    printed = [process.communicate(timeout=600) for process in (again, second)]
    assert [again.returncode, second.returncode] == [0, 0], printed
    assert any("own is lower than" in text or "told apart" in text for text, _ in printed)
    assert "study/compare.html" in bucket.names("study/compare")

    # A third machine reads the verdict, and trains nothing.
    third = start_compare("s3://bucket/study", NALANDA_CACHE=str(tmp_path / "machine-3"))
    text, error = third.communicate(timeout=300)
    assert third.returncode == 0, error
    assert "s3://bucket/study/compare.html" in text
    assert not [*(tmp_path / "machine-3").rglob("*.log")]
