"""`nalanda study`: paired runs, what is compared with what, the estimator, and what the rule concludes."""

import copy
import itertools
import json
import math
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from nalanda_lab import equal
from nalanda_lab.recall import recall_settings
from nalanda_lab.studies import paired
from nalanda_lab.studies import report as study_report
from nalanda_lab.studies import run as study_run
from nalanda_lab.studies.estimate import Gap, document_variance, gap_of, holm, residual, slopes
from nalanda_lab.studies.plan import (
    CALIBRATION,
    System,
    best_recall_rate,
    bigram_settings,
    chosen_rate,
    final_settings,
    recall_models,
    recall_run,
    run_config,
    steps_to,
    systems,
)
from nalanda_lab.studies.report import (
    SUPERSEDED,
    Results,
    calibrated,
    contrasts,
    decided,
    endpoint_table,
    equal_rate_text,
    norm_matters,
    report,
    verdicts,
)
from nalanda_lab.studies.run import prepare_text, run_study, train_lm
from nalanda_lab.studies.spec import begin_study, load_study, study_folder
from nalanda_lab.sweep import key, records
from typer.testing import CliRunner

import nalanda_cli
from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.config.schema import GroupConfig, RunConfig
from nalanda.data.packing import Row, collate
from nalanda.data.tokenizer import build_tokenizer
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.train.build import open_batches
from nalanda.train.loss import count_labels, loss_sums

SHIPPED = Path(__file__).parents[1] / "records" / "study"

STUDY = {
    "mixers": ["deltanet", "gated_deltanet"],
    "reference": "SiLU",
    "forms": {
        "SiLU": {"feature_map": "silu"},
        "NaLa": {"feature_map": "nala"},
        "constant p": {"feature_map": "nala", "feature_map_options.query_power": 1.74},
        "norm-aware write": {"feature_map": "silu", "mixer_options.norm_write": True},
    },
    "sizes": {"tiny": {}, "wide": {"hidden_size": 48}},
    "seeds": [1, 2],
    "budgets": [256, 512],
    "lengths": {"rows": 2, "tokens": 128},
    "rates": {"values": [4e-3, 1e30], "rungs": [256], "seed": 0},
    "equal_rates": {"rates": {"tiny": 2e-3}, "forms": ["SiLU", "NaLa", "constant p"]},
    "contrasts": [["norm-aware write", "SiLU"], ["NaLa", "constant p"]],
    "calibration": {
        "model": {"mixer": "deltanet", "conv_size": 0},
        "forms": {"SiLU": {"feature_map": "silu"}, "ReLU": {"feature_map": "relu"}},
        "published": {"ReLU": 0.02},
        "source": "a paper",
    },
    "recall": {
        "task": {"pairs": [1, 2], "sequence": 8, "values": 4},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_heads": 1,
            "head_dim": 8,
            "intermediate_size": 64,
        },
        "training": {"steps": 2, "batch_size": 4, "rows": 4, "points": 1},
        "state": 2048,
        "rates": [3e-3],
        "seeds": [1],
    },
    "decision": {"default": "NaLa", "candidates": ["constant p"]},
}
LM = {
    "output_dir": "unset",
    "model": {
        "mixer": "deltanet",
        "feature_map": "silu",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_heads": 1,
        "head_dim": 32,
        "intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "tokenizer": {"train": "bpe", "vocab_size": 300},
    "data": {"source": "unset", "seq_len": 32, "max_validation_rows": 24, "workers": 0},
    "schedule": {"warmup_steps": 1},
    "train": {
        "steps": 4,
        "tokens_per_step": 128,
        "micro_batch_size": 2,
        "precision": "fp32",
        "cpu_threads": 1,
    },
    "checkpoint": {"every": 0},
    "log": {"tensorboard": False},
}


def write(folder: Path, study: dict = STUDY, lm: dict = LM) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    (folder / "lm.yaml").write_text(yaml.safe_dump(lm))
    return folder


def texts(folder: Path, seed: int = 0) -> str:
    draw = random.Random(seed)
    for part, count in (("train", 60), ("validation", 24)):
        (folder / part).mkdir(parents=True)
        with (folder / part / "a.jsonl").open("w") as file:
            for _ in range(count):
                words = " ".join(
                    draw.choices(["state", "gate", "query", "key", "value", "norm"], k=40)
                )
                file.write(
                    json.dumps({"text": words, "meta": {"redpajama_set_name": "web"}}) + "\n"
                )
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return texts(tmp_path_factory.mktemp("text") / "mini")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A study that ran to its end in this process."""
    folder = write(tmp_path_factory.mktemp("study") / "tiny")
    run_study(folder, text=text, workers=1)
    report(folder)
    return folder


@pytest.fixture
def one_run(finished):
    """(settings, config, text) of one judging run."""
    study, lm = load_study(finished)
    place = finished / "work" / "text"
    settings = final_settings(systems(study, lm)[1], 4e-3, 1, study, lm)
    return settings, run_config(settings, lm, str(place)), place


def timeless(record: dict) -> dict:
    return {**record, "seconds": 0}


# ------------------------------ paired runs


def test_systems_of_a_seed_share_what_they_have_in_common(finished):
    study, lm = load_study(finished)
    mine = [system for system in systems(study, lm) if system.size == "tiny"]

    def weights(model: dict, seed: int) -> dict[str, torch.Tensor]:
        made = NalandaForCausalLM(equal.configured(model, 300))
        paired.draw_weights(made, seed)
        return dict(made.named_parameters())

    drawn = [weights(system.model, 1) for system in mine]
    for a, b in itertools.combinations(drawn, 2):
        shared = [name for name in a.keys() & b.keys() if a[name].shape == b[name].shape]
        assert "model.layers.0.mixer.v_proj.weight" in shared
        assert all(torch.equal(a[name], b[name]) for name in shared)
    again, other = weights(mine[0].model, 1), weights(mine[0].model, 2)
    assert all(torch.equal(x, again[name]) for name, x in drawn[0].items())
    matrices = [name for name, x in other.items() if x.ndim > 1]
    assert not any(torch.equal(other[name], drawn[0][name]) for name in matrices)
    spread = drawn[0]["model.embed_tokens.weight"].std().item()
    assert spread == pytest.approx(equal.configured(mine[0].model).initializer_range, rel=0.1)


def test_decays_are_stratified_over_heads():
    keys = {
        "mixer": "gated_deltanet",
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "num_hidden_layers": 2,
    }
    model, before = NalandaForCausalLM(equal.configured(keys, 16)), torch.get_rng_state()
    for seed in range(3):
        paired.draw_weights(model, seed)
        for layer in model.model.layers:
            decay = layer.mixer.decay
            parts = (decay.A_log.exp() / 16 * 8).floor().sort().values
            dt = torch.nn.functional.softplus(decay.dt_bias)
            steps = ((dt.log10() + 3) / 2 * 8).floor().sort().values
            assert parts.tolist() == steps.tolist() == list(range(8))
        first, second = (layer.mixer.decay.A_log for layer in model.model.layers)
        assert not torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_a_branch_leaves_the_trunk_as_it_was(one_run):
    settings, config, text = one_run

    def trunk() -> paired.Trunk:
        model = NalandaForCausalLM(equal.configured(settings["model"], 300))
        paired.draw_weights(model, 1)
        tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
        return paired.Trunk(model, config, open_batches(config, tokenizer)[0])

    straight, branched = trunk(), trunk()
    straight.advance(6)
    branched.advance(2)
    cooled = branched.branch(3)
    branched.advance(6)
    for a, b, c in zip(
        straight.model.parameters(), branched.model.parameters(), cooled.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert straight.losses == branched.losses


def test_the_cooldown_reads_the_rows_that_follow_at_falling_rates(one_run, monkeypatch):
    settings, config, text = one_run
    seen = []
    update = paired.Trunk._update

    def noted(self, model, optimizer, batches, rate):
        seen.append((model is self.model, torch.cat([b["input_ids"] for b in batches]), rate))
        return update(self, model, optimizer, batches, rate)

    monkeypatch.setattr(paired.Trunk, "_update", noted)
    paired.train_paired(
        {**settings, "budgets": [640, 1280], "cooldown": 0.4}, config, text, text.parent / "w"
    )
    trunk = [tokens for of_trunk, tokens, _ in seen if of_trunk]
    branches = [(tokens, rate) for of_trunk, tokens, rate in seen if not of_trunk]
    assert len(trunk) == 6
    assert len(branches) == 2 + 4
    assert all(torch.equal(tokens, trunk[3 + i]) for i, (tokens, _) in enumerate(branches[:2]))
    assert [rate / 4e-3 for _, rate in branches] == pytest.approx([0.5, 0, 0.75, 0.5, 0.25, 0])
    assert [rate for of_trunk, _, rate in seen if of_trunk] == pytest.approx([4e-3] * 6)


def test_a_killed_run_goes_on_where_it_was(one_run, tmp_path, monkeypatch):
    settings, config, text = one_run
    whole = paired.train_paired(settings, config, text, tmp_path)
    assert list(tmp_path.iterdir()) == []
    branch, left = paired.Trunk.branch, [1]

    def killed(self, steps):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return branch(self, steps)

    monkeypatch.setattr(paired.Trunk, "branch", killed)
    with pytest.raises(KeyboardInterrupt):
        paired.train_paired(settings, config, text, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    assert timeless(paired.train_paired(settings, config, text, tmp_path)) == timeless(whole)
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_while_its_last_losses_are_measured_goes_on(one_run, tmp_path, monkeypatch):
    settings, config, text = one_run
    whole = paired.train_paired(settings, config, text, tmp_path)

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(paired, "losses_by_position", killed)
    with pytest.raises(KeyboardInterrupt):
        paired.train_paired(settings, config, text, tmp_path)
    monkeypatch.undo()
    assert timeless(paired.train_paired(settings, config, text, tmp_path)) == timeless(whole)


def test_rates_of_groups_and_the_z_loss_are_followed(one_run):
    settings, config, text = one_run
    frozen = replace(
        config.optim, groups=[GroupConfig("embed_tokens", lr_scale=0.0, weight_decay=0.0)]
    )

    def weights(config: RunConfig) -> dict[str, torch.Tensor]:
        model = NalandaForCausalLM(equal.configured(settings["model"], 300))
        paired.draw_weights(model, 1)
        tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
        trunk = paired.Trunk(model, config, open_batches(config, tokenizer)[0])
        trunk.advance(2)
        return dict(trunk.model.named_parameters())

    still, usual = weights(replace(config, optim=frozen)), weights(config)
    drawn = NalandaForCausalLM(equal.configured(settings["model"], 300))
    paired.draw_weights(drawn, 1)
    name = "model.embed_tokens.weight"
    assert torch.equal(still[name], dict(drawn.named_parameters())[name])
    assert not torch.equal(usual[name], still[name])
    other = weights(replace(config, train=replace(config.train, z_loss=1.0)))
    assert not torch.equal(usual[name], other[name])


def test_losses_by_document_sum_to_the_loss(one_run):
    settings, config, text = one_run
    model = NalandaForCausalLM(equal.configured(settings["model"], 300))
    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    batches, validation = open_batches(config, tokenizer)
    batches.close()
    rows = list(itertools.chain(*validation.values()))
    sums = paired.document_sums(model, rows, tokenizer.bos_token_id)
    total, count = loss_sums(model, rows)
    assert sum(sums) == pytest.approx(total, rel=1e-5)
    counts = paired.by_document(
        [row["labels"][:, 1:] != -100 for row in rows], rows, tokenizer.bos_token_id
    )
    segments = sum(len(row["cu_seqlens"]) - 1 for row in rows)
    continued = sum(int((row["input_ids"][:, 0] != tokenizer.bos_token_id).sum()) for row in rows)
    assert continued  # documents are longer than rows
    assert len(counts) == len(sums) == segments - continued
    assert sum(counts) == count == sum(map(count_labels, rows))


def test_losses_by_position_are_those_of_the_positions(one_run):
    model = NalandaForCausalLM(equal.configured(one_run[0]["model"], 300)).eval()
    tokens = torch.randint(300, (3, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    found = paired.losses_by_position(model, tokens, 16)
    assert [end for end, _ in found] == [16, 32, 64]
    parts = [losses[:, a:b].mean().item() for a, b in ((0, 15), (15, 31), (31, 63))]
    assert [loss for _, loss in found] == pytest.approx(parts, abs=1e-4)


def test_a_run_that_diverges_is_recorded_as_that(finished, planned):
    study, lm = load_study(finished)
    found = records(finished / "runs.jsonl")
    wild = [record for record in found.values() if record["settings"].get("rate") == 1e30]
    assert wild
    assert all("diverged before" in record["failed"] for record in wild)
    for system in planned:
        assert chosen_rate(system, study, lm, found)[0] == 4e-3


# ------------------------------ the command's part


def test_a_finished_study_trains_nothing_and_a_killed_one_goes_on(finished, tmp_path, text):
    folder = tmp_path / "again"
    shutil.copytree(finished, folder)
    file = folder / "runs.jsonl"
    before = file.read_bytes()
    run_study(folder, text=text, workers=1)
    assert file.read_bytes() == before
    lines = before.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]) + lines[-2][:50])
    run_study(folder, workers=1)  # the text of before
    again, whole = records(file), records(finished / "runs.jsonl")
    assert {k: timeless(r) for k, r in again.items()} == {k: timeless(r) for k, r in whole.items()}
    assert len(file.read_text().splitlines()) == len(lines)


def test_another_processor_is_said(finished, tmp_path, capsys):
    folder = tmp_path / "moved"
    shutil.copytree(finished, folder)
    run_study(folder, workers=1)
    assert "made on" not in capsys.readouterr().out
    file = folder / "runs.jsonl"
    file.write_text(file.read_text().replace(json.dumps(paired.cpu_model()), '"Abacus 9"', 1))
    run_study(folder, workers=1)
    assert f"runs made on Abacus 9; this is {paired.cpu_model()}" in capsys.readouterr().out


def test_another_text_is_refused_before_anything_is_trained(finished, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(finished, folder)
    other = texts(tmp_path / "texts", seed=1)
    with pytest.raises(InputError, match="remove it, or give another folder"):
        run_study(folder, text=other, workers=1)
    shutil.rmtree(folder / "work")
    with pytest.raises(InputError, match="has runs on another text, mini, than texts"):
        run_study(folder, text=other, workers=1)
    assert (folder / "runs.jsonl").read_bytes() == (finished / "runs.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer": {"train": "bpe", "vocab_size": 290}},
            "with tokenizer .*300.* this is .*290",
        ),
        ({"data": LM["data"] | {"eos": False}}, "was prepared with eos true, and this is false"),
    ],
)
def test_a_text_that_was_prepared_otherwise_is_refused(finished, change, message):
    with pytest.raises(InputError, match=message) as caught:
        prepare_text(LM | change, None, finished / "work", 1)
    assert "\n" not in str(caught.value)


def test_the_text_of_before_is_kept_unless_another_is_named(finished, text, capsys):
    place = finished / "work" / "text"
    assert prepare_text(LM, None, finished / "work", 1) == place
    assert f"the text is {text}, as before" in capsys.readouterr().out
    index = json.loads((place / "index.json").read_text())
    del index["settings"]["tokenizer"]["mask"]  # as sets were written before this key
    older = finished / "older" / "text"
    older.mkdir(parents=True)
    (older / "index.json").write_text(json.dumps(index))
    assert prepare_text(LM, None, older.parent, 1) == older


def test_bigrams_count_the_tokens_that_the_models_have_seen(finished, monkeypatch):
    _, lm = load_study(finished)
    counted = []

    class Noted(study_run.Bigram):
        def __init__(self, batches, vocab_size):
            batches = list(batches)
            counted.append(sum(batch["input_ids"].numel() for batch in batches))
            super().__init__(batches, vocab_size)

    monkeypatch.setattr(study_run, "Bigram", Noted)
    settings = bigram_settings(1, 512, lm)
    record = study_run.measure_bigrams(settings, lm, finished / "work" / "text")
    assert counted == [512]
    assert timeless(record) == timeless(records(finished / "runs.jsonl")[key(settings)])


# ------------------------------ what is compared


@pytest.mark.parametrize("folder", [SHIPPED, SHIPPED / "quick"], ids=["study", "quick"])
def test_the_shipped_systems_have_equal_parameters_and_equal_state(folder):
    study, lm = load_study(folder)
    planned = systems(study, lm)
    for size, calibration in itertools.product(study.sizes, (False, True)):
        mine = [
            s.model for s in planned if s.size == size and (s.group == CALIBRATION) == calibration
        ]
        counts = [equal.count(model) for model in mine]
        states = [
            c.state_bytes(1, torch.float32)
            for c in map(equal.configured, mine)
            if not equal.grows(c)
        ]
        for values, near in ((counts, 0.01), (states, 0.08)):
            assert not values or max(values) / min(values) < 1 + near
    states = [
        equal.configured(m).state_bytes(1, torch.float32) for m in recall_models(study).values()
    ]
    assert max(states) / min(states) < 1.12
    assert study.rates.seed not in study.seeds
    assert len({s.keys for s in planned}) == len(planned)


def test_halving_keeps_the_better_half_and_then_the_best():
    study, lm = load_study(SHIPPED)
    system, found, losses = (
        systems(study, lm)[0],
        {},
        {2e-3: 3.0, 4e-3: 1.0, 8e-3: 1.2, 16e-3: math.nan},
    )
    best, asked = chosen_rate(system, study, lm, found)
    assert (best, [s["rate"] for s in asked]) == (None, study.rates.values)
    for i, settings in enumerate(asked):
        record = {"settings": settings, "budgets": [{"loss": losses[settings["rate"]]}]}
        found[key(settings)] = record | ({"failed": "diverged"} if i == 3 else {})
    best, asked = chosen_rate(system, study, lm, found)
    assert best is None
    assert [s["rate"] for s in asked[4:]] == [4e-3, 8e-3]
    assert asked[-1]["budgets"] == [study.rates.rungs[1]]
    found |= {
        key(s): {"settings": s, "budgets": [{"loss": loss}]}
        for s, loss in zip(asked[4:], (2.0, 1.9), strict=True)
    }
    assert chosen_rate(system, study, lm, found)[0] == 8e-3


def test_steps_to_recall_is_where_the_score_stays():
    curve = [[10, 1.0, 0.95], [20, 1.0, 0.4], [30, 1.0, 0.9], [40, 1.0, 0.92]]
    assert steps_to(0.9, {"curve": curve}) == 30
    assert math.isinf(steps_to(0.93, {"curve": curve}))


def test_the_rate_of_recall_is_chosen_in_validation(tmp_path):
    write(tmp_path, STUDY | {"recall": STUDY["recall"] | {"rates": [1e-3, 1e-2]}})
    study, _ = load_study(tmp_path)
    model = next(iter(recall_models(study).values()))
    found = {}
    for rate, test, validation in ((1e-3, 0.8, 0.2), (1e-2, 0.3, 0.4)):
        settings = recall_settings(*recall_run(model, study, rate, study.rates.seed))
        found[key(settings)] = {"curve": [[2, 1.0, 0.1]], "score": test, "validation": validation}
    assert best_recall_rate(model, study, found) == 1e-2


# ------------------------------ the estimator


def test_intervals_cover_as_often_as_they_say():
    draw = np.random.default_rng(0)
    truth = np.array([0.0, 0.1, -0.3, 0.2, 0.0, 0.5])
    covered = []
    for _ in range(1500):
        values = truth[:, None] + draw.normal(0, 1, 3) + draw.normal(0, 0.1, (6, 3))
        gap = gap_of(values[1], values[0], residual(values))
        covered.append(gap.low <= 0.1 <= gap.high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_documents_add_their_variance():
    draw = np.random.default_rng(0)
    tokens = draw.integers(50, 500, 4000).astype(float)
    b = tokens * 3.0
    a = b + tokens * draw.normal(0.1, 0.3, 4000)
    picked = [draw.integers(0, 4000, 40) for _ in range(2000)]
    means = [(a[i] - b[i]).sum() / tokens[i].sum() for i in picked]
    said = np.mean([document_variance(a[None, i], b[None, i], tokens[i]) for i in picked])
    assert said == pytest.approx(np.var(means), rel=0.1)
    narrow = gap_of(np.array([0.1, 0.12]), np.zeros(2), (1e-4, 5))
    wide = gap_of(np.array([0.1, 0.12]), np.zeros(2), (1e-4, 5), documents=said)
    assert wide.half > narrow.half
    assert wide.p > narrow.p


def test_holm_and_slopes():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "c": 0.06, "b": 0.06}
    )
    values = np.array([[1.0, 0.5, 0.0], [2.0, 2.0, 2.0]])
    assert slopes(values, [1, 10, 100]) == pytest.approx([-0.5 / math.log(10), 0])


# ------------------------------ the rule


@pytest.fixture(scope="module")
def planned(finished):
    return systems(*load_study(finished))


def results_of(
    folder: Path, planned: list, losses: dict[str, float], noise: float = 1e-3
) -> Results:
    """Results whose records have these losses at the last budget, by form; others have 3."""
    study, lm = load_study(folder)
    forms = {system.keys: system.form for system in planned}
    draw, found = np.random.default_rng(0), records(folder / "runs.jsonl")
    for name, record in found.items():
        asked = record["settings"]
        if "budgets" not in record or asked["seed"] not in study.seeds or "failed" in record:
            continue
        form = forms[key(asked["model"])]
        record = copy.deepcopy(record)
        for row in record["budgets"]:
            row["loss"] = losses.get(form, 3.0) + draw.normal(0, noise)
            row["documents"] = [row["loss"]] * len(row["documents"])
        found[name] = record
    results = Results(study, lm, found)
    results.__dict__["planned"] = planned  # a cached property, which takes a second
    return results


@pytest.mark.parametrize(
    ("losses", "noise", "said"),
    [
        ({"norm-aware write": 2.9}, 1e-3, "matters"),
        ({"NaLa": 2.9}, 1e-3, "matters"),
        ({"norm-aware write": 3.1}, 1e-3, "cannot be told to matter"),
        ({}, 1e-3, "does not matter"),
        ({}, 0.05, "cannot be told to matter"),
    ],
)
def test_whether_norms_matter(finished, planned, losses, noise, said):
    results = results_of(finished, planned, losses, noise)
    assert len(contrasts(results)) == 8
    assert norm_matters(results) == said


@pytest.mark.parametrize(("relu", "early"), [(3.02, ""), (2.9, ", early in training,")])
def test_a_verdict_says_when_it_is_of_early_training_and_when_rates_differ(
    finished, planned, relu, early
):
    results = results_of(finished, planned, {"NaLa": 2.9, "ReLU": relu})
    system = next(s for s in planned if s.name == "deltanet + NaLa" and s.size == "tiny")
    assert results.runs[system]  # of the chosen rates
    results.__dict__["rates"] |= {system: 2e-3}
    said = next(line for line in verdicts(results) if "norm-awareness" in line)
    assert said.startswith(
        f"Withdrawn. By the rule, norm-awareness matters{early} inside the delta rule: "
    )
    assert re.findall(r"; ([^;]*) −0.1\d\d ± [\d.]+ \(rates 0.002 and 0.004\)", said) == [
        "tiny, deltanet + NaLa less constant p"
    ]
    assert said.count("(rates") == 1


def test_norms_matter_where_they_do_in_every_mixer(monkeypatch):
    def judged(*means):
        pairs = [
            tuple(System("1 M", f"mixer{i}", form, "{}") for form in "ab")
            for i in range(len(means))
        ]
        gaps = {pair: Gap(mean, 0.001, 0.0, 3) for pair, mean in zip(pairs, means, strict=True)}
        monkeypatch.setattr(study_report, "contrasts", lambda results: pairs)
        return norm_matters(SimpleNamespace(at=lambda a, b: gaps[a, b]))

    assert judged(-0.1, -0.05) == "matters"
    assert judged(-0.1, 0.1) == judged(-0.1, 0.0) == judged(0.03, 0.0) == "cannot be told to matter"
    assert judged(-0.01, 0.018) == "does not matter"


@pytest.mark.parametrize(
    ("losses", "noise", "default"),
    [
        ({"constant p": 2.9}, 1e-3, "constant p"),
        ({"constant p": 3.1}, 1e-3, "NaLa"),
        ({"constant p": 2.99}, 0.1, "NaLa"),
    ],
)
def test_the_default_changes_where_an_interval_says_so(finished, planned, losses, noise, default):
    choice = decided(results_of(finished, planned, losses, noise))
    assert choice
    assert choice[0] == default


def test_a_default_needs_the_runs_of_its_candidates_only(finished, planned):
    results = results_of(finished, planned, {"constant p": 2.9})
    results.__dict__["planned"] = [s for s in planned if s.form != "norm-aware write"]
    choice = decided(results)
    assert choice
    assert choice[0] == "constant p"
    results = results_of(finished, planned, {"constant p": 2.9})
    results.__dict__["planned"] = [s for s in planned if s.form != "constant p"]
    assert decided(results) is None


def test_a_gain_from_one_document_does_not_change_the_default(finished, planned):
    results = results_of(finished, planned, {"constant p": 2.9})
    gain = 0.1 * results.counts.sum()
    for system, got in results.runs.items():
        for record in got:
            sums = 3.0 * results.counts
            sums[0] -= gain if system.form == "constant p" else 0.0
            record["budgets"][-1]["documents"] = sums.tolist()
    choice = decided(results)
    assert choice
    assert choice[0] == "NaLa"
    assert choice[1]["constant p"].mean == pytest.approx(-0.1, abs=0.01)


@pytest.mark.parametrize(
    ("losses", "noise", "reproduced"),
    [({"ReLU": 3.02}, 1e-3, True), ({"ReLU": 2.95}, 1e-3, False), ({"ReLU": 3.02}, 0.5, False)],
)
def test_a_budget_is_calibrated_by_narrow_intervals_that_hold_the_published_gap(
    finished, planned, losses, noise, reproduced
):
    results = results_of(finished, planned, losses, noise)
    assert calibrated(results) == {256: reproduced, 512: reproduced}
    results.study.calibration.tokens_per_word = 2.0  # the published gap is then 0.01
    assert calibrated(results) == {256: False, 512: False}


def test_a_run_that_diverged_ends_the_study_and_leaves_its_questions_open(finished, planned):
    results = results_of(finished, planned, {})
    system = next(s for s in planned if s.name == "deltanet + NaLa" and s.size == "tiny")
    settings = final_settings(system, results.rates[system], 2, results.study, results.lm)
    results.found[key(settings)] |= {"failed": "diverged before 512 tokens"}
    assert results.finished()
    assert system not in results.runs
    said = "\n".join(verdicts(results))
    assert (
        "**Diverged**, and so in no table of means or gaps: tiny, deltanet + NaLa, seed 2." in said
    )
    assert "not finished" not in said
    assert "Whether norm-awareness matters cannot be judged" in said
    assert "The default of `nala` stays: a change cannot be judged" in said


def test_rates_at_the_edge_are_said(finished, planned):
    said = verdicts(results_of(finished, planned, {}))
    assert (
        "18 of 18 systems chose the lowest rate, 0.004; a lower one may be better for them." in said
    )


def test_an_unfinished_study_decides_nothing(finished, planned):
    results = results_of(finished, planned, {"NaLa": 2.5})
    system = next(s for s in results.planned if s.form == "NaLa")
    settings = final_settings(system, results.rates[system], 2, results.study, results.lm)
    rest = {name: record for name, record in results.found.items() if name != key(settings)}
    less = Results(results.study, results.lm, rest)
    assert not less.finished()
    assert decided(less) is None
    assert system not in less.runs
    assert "| – |" in endpoint_table(less), "Holm's family is not complete"
    assert "| – |" not in endpoint_table(results).replace("| – | softmax", "")


# ------------------------------ a step


@pytest.fixture
def trunk(recipe):
    config = load_config(
        recipe, ["output_dir=unset", "schedule.warmup_steps=4", "optim.max_grad_norm=0.01"]
    )

    def made():
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
        return paired.Trunk(NalandaForCausalLM(NalandaConfig(**sizes)), config, iter(()))

    return made


def test_a_step_of_a_study_is_the_mean_over_its_tokens_clipped(trunk):
    draw = np.random.default_rng(0)
    rows = [
        Row(draw.integers(64, size=16), np.array(starts)) for starts in ([0], [0, *range(2, 16, 2)])
    ]
    moments = []
    for batches in ([collate(rows, 16, 0)], [collate([row], 16, 0) for row in rows]):
        one = trunk()
        moments.append((one._update(one.model, one.optimizer, batches, 0.0), one.optimizer.state))
    (loss, a), (again, b) = moments
    torch.testing.assert_close(loss, again)
    norms = [
        sum((s["exp_avg"] / 0.1).square().sum() for s in state.values()).sqrt().item()
        for state in (a, b)
    ]
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)
    for x, y in zip(a.values(), b.values(), strict=True):
        torch.testing.assert_close(x["exp_avg"], y["exp_avg"], atol=1e-7, rtol=1e-3)


def test_a_study_warms_up(trunk, monkeypatch):
    rates = []
    monkeypatch.setattr(
        paired.Trunk, "_update", lambda *args: rates.append(args[-1]) or torch.zeros(())
    )
    one = trunk()
    one.advance(6)
    assert rates == pytest.approx([one.optim.lr * x for x in (0.25, 0.5, 0.75, 1, 1, 1)])


# ------------------------------ the report


def test_runs_at_equal_rates_are_reported_beside_the_rule(finished, planned):
    results = results_of(finished, planned, {"NaLa": 2.9})
    alike = results.alike
    assert {(s.size, rate) for s, rate in alike.rates.items()} == {("tiny", 2e-3)}
    assert {s.form for s in alike.runs if s.group in STUDY["mixers"]} == {
        "SiLU",
        "NaLa",
        "constant p",
    }
    assert len(alike.runs) == 6
    assert alike.finished()
    assert "tiny, deltanet + NaLa less constant p −0.1" in equal_rate_text(results)
    lines = [line.split(" | ") for line in endpoint_table(alike).splitlines()[2:]]
    assert {line[3] for line in lines} == {"0.002"}
    assert [line[2] for line in lines if line[6] == ""] == [
        "NaLa",
        "NaLa",
    ]  # gaps are measured from it
    assert "| 0.002 |" not in endpoint_table(results)
    chosen, other = (r.runs[next(iter(alike.planned))][0]["settings"] for r in (results, alike))
    assert {name for name in chosen if chosen[name] != other[name]} == {"rate"}
    gone = key(other)
    less = replace(results, found={name: r for name, r in results.found.items() if name != gone})
    assert less.finished()
    assert verdicts(less) == verdicts(results)
    assert "5 of 6 systems have all of them" in equal_rate_text(less)


def test_the_report_is_the_same_bytes_and_keeps_the_words(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    file = folder / "RESULTS.md"
    first = file.read_text()
    assert first.startswith(SUPERSEDED)
    pictures = {p.name: p.read_bytes() for p in folder.glob("*.p*")}
    assert pictures.keys() == {"gaps.png", "gaps.pdf", "calibration.png", "calibration.pdf"}
    report(folder)
    assert file.read_text() == first
    assert {p.name: p.read_bytes() for p in folder.glob("*.p*")} == pictures
    words = first.replace("report` -->\n", "report` -->\nWhat we think of it.\n", 1)
    file.write_text(words)
    report(folder)
    assert file.read_text() == words
    for system in systems(*load_study(folder)):
        assert f"| {system.size} | {system.name} |" in first


def test_the_shipped_report_begins_with_what_is_withdrawn():
    assert (SHIPPED / "RESULTS.md").read_text().startswith(f"{SUPERSEDED}\n\n# ")


def test_a_study_of_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"runs\.jsonl: no run is recorded"):
        report(write(tmp_path / "empty"))


# ------------------------------ the folder and its files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": "Silu"}, r"reference: no form 'Silu'; did you mean SiLU\?"),
        ({"contrasts": [["NaLa"]]}, r"contrasts: \['NaLa'\] is no pair of forms"),
        ({"contrasts": [["NaLa", "x"]]}, "contrasts: no form 'x'"),
        ({"decision": {"default": "y", "candidates": []}}, "decision: no form 'y'"),
        ({"seeds": [0, 1]}, "seeds: 0 chooses the rates"),
        ({"seeds": [1]}, "at least two"),
        ({"budgets": [512, 256]}, r"budgets: \[512, 256\] are not rising"),
        (
            {"equal_rates": {"rates": {"wider": 1e-3}, "forms": []}},
            "no size 'wider'; did you mean wide",
        ),
        (
            {"equal_rates": {"rates": {"wide": 0.0}, "forms": []}},
            "rates: 0.0 is no learning rate above 0",
        ),
        ({"equal_rates": {"rates": {}, "forms": ["x"]}}, "equal_rates.forms: no form 'x'"),
        ({"cooldown": 1.5}, "cooldown: 1.5 is no share"),
        ({"form": {}}, "form: no such key"),
    ],
)
def test_bad_studies_are_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(InputError, match=message) as caught:
        load_study(write(tmp_path, STUDY | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("schedule", {"name": "linear"}, r"schedule\.name: the rate stays"),
        ("train", {"precision": "bf16"}, r"train\.precision: a study computes in fp32"),
        ("optim", {"lr": 1e-3}, r"optim\.lr: study\.yaml has the rates"),
        ("model", {"dropout": 0.1}, r"model\.dropout: runs of a seed would differ"),
        ("data", {"bos": False}, r"data\.bos: a study tells documents apart"),
        ("data", {"long_documents": "carry"}, r"data\.long_documents: a study cuts"),
    ],
)
def test_settings_of_the_language_model_that_a_study_ignores_are_refused(
    tmp_path, part, change, message
):
    folder = write(tmp_path, lm=LM | {part: LM.get(part, {}) | change})
    load_study(folder)  # records of before are still reported
    with pytest.raises(InputError, match=message) as caught:
        run_study(folder, workers=1)
    assert "\n" not in str(caught.value)


def test_a_new_folder_gets_a_copy_of_the_study(tmp_path, monkeypatch):
    place = tmp_path / "mine"
    begin_study(place, quick=True)
    assert (place / "study.yaml").read_text() == (SHIPPED / "quick" / "study.yaml").read_text()
    (place / "study.yaml").write_text("seeds: [7]")
    begin_study(place)
    assert (place / "study.yaml").read_text() == "seeds: [7]"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(InputError, match=r"holds files and no study\.yaml"):
        begin_study(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert study_folder() == Path("runs/study")
    assert study_folder(quick=True) == Path("runs/study-quick")


def test_the_command_reports(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    answer = CliRunner().invoke(nalanda_cli.app, ["study", "report", str(folder)])
    assert answer.exit_code == 0
    assert "Calibration" in answer.output


def test_prepared_text_is_kept(finished, text):
    _, lm = load_study(finished)
    before = (finished / "work" / "text" / "index.json").stat().st_mtime_ns
    prepare_text(lm, text, finished / "work", 1)
    assert (finished / "work" / "text" / "index.json").stat().st_mtime_ns == before


def test_a_record_says_what_made_it(finished):
    study, lm = load_study(finished)
    settings = final_settings(systems(study, lm)[0], 4e-3, 1, study, lm)
    record = train_lm(settings, lm, finished / "work" / "text", finished / "work")
    assert record["machine"]
    assert record["threads"] == torch.get_num_threads()
    assert record["versions"].keys() >= {"torch", "python"}
    assert record["text"]["name"] == "mini"
    assert [row["tokens"] for row in record["budgets"]] == study.budgets
