"""`nalanda study`: what is compared with what, by which seeds, and what follows from the records."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from nalanda_eval import recall
from nalanda_eval.studies import report as study_report
from nalanda_eval.studies import study as module
from nalanda_eval.studies.report import (
    Interval,
    ReportRow,
    judged,
    paired_differences,
    pooled,
    report,
    report_rows,
    table,
    verdict,
)
from nalanda_eval.studies.study import (
    NEAR,
    Claim,
    Question,
    Trial,
    begin_study,
    bigram_settings,
    chosen,
    finalists,
    folder,
    language,
    load_study,
    plan_trials,
    prepare_text,
    ranking,
    run_study,
    screening,
)
from nalanda_eval.sweep import key, records
from typer.testing import CliRunner

import nalanda_cli
from nalanda.common.errors import InputError
from nalanda.report.plot import STYLE
from nalanda.train import loop as trainer
from nalanda.train.loss import count_labels, summed_loss

SHIPPED = Path(__file__).parents[2] / "recipes" / "study"
SILU, NALA = "deltanet + silu", "deltanet + nala(power=2)"

TINY = {
    "recall": {
        "task": {"pairs": [1, 2], "sequence": 8, "values": 4},
        "model": {"mixer": "deltanet", "feature_map": "silu", "hidden_size": 16, "num_hidden_layers": 1,
                  "num_heads": 1, "head_dim": 8, "intermediate_size": 32},
        "training": {"steps": 2, "batch_size": 4, "rows": 4, "points": 1},
        "state": 1024,
    },
    "questions": {
        "maps": {"ask": "Which map?", "over": {"mixer": "deltanet", "feature_map": ["silu", "relu"]},
                 "match": {"lm": "parameters", "recall": "parameters"}},
        "readings": {"ask": "Which reading?", "over": {"mixer": "deltanet", "feature_map": "nala",
                     "feature_map_options.power": [2, 3]}, "match": {"lm": "state", "recall": "parameters"}},
        "rates": {"ask": "Which rate?", "tasks": ["lm"], "match": {"lm": "parameters"},
                  "systems": {"softmax, twice the rate": {"mixer": "softmax", "rate": 2}}},
        "twins": {"ask": "Are runs paired?", "match": {"lm": "parameters", "recall": "parameters"},
                  "systems": {"twin": {"mixer": "deltanet", "feature_map": "silu", "mixer_options": {}}}},
    },
    "finals": {"seeds": [1, 2], "systems": [SILU, NALA], "best": ["readings"], "lm": ["twin"],
               "match": {"recall": "parameters"}, "recall": {"steps": 3}},
    "decision": {"question": "readings", "default": "nala(power=2)", "against": "silu"},
    "claims": [{"claim": "NaLa wins", "a": "deltanet + best:readings", "b": SILU},
               {"claim": "NaLa is as good", "a": NALA, "b": SILU, "says": "equal"}],
}  # fmt: skip
LM = {
    "output_dir": "unset",
    "model": {"mixer": "deltanet", "feature_map": "silu", "hidden_size": 32, "num_hidden_layers": 1,
              "num_heads": 1, "head_dim": 16, "intermediate_size": 48, "tie_word_embeddings": True},
    "tokenizer": {"train": "bpe", "vocab_size": 300},
    "data": {"source": "unset", "seq_len": 32, "max_validation_rows": 24, "workers": 0},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 1},
    "train": {"steps": 4, "tokens_per_step": 128, "micro_batch_size": 4, "precision": "fp32",
              "cpu_threads": 1},
    "checkpoint": {"every": 0},
    "guard": {"sigma": 0},
    "log": {"every": 1, "tensorboard": False},
}  # fmt: skip


def write(folder: Path, study: dict = TINY, lm: dict = LM) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    (folder / "lm.yaml").write_text(yaml.safe_dump(lm))
    return folder


def texts(folder: Path, seed: int = 0) -> str:
    draw = random.Random(seed)
    for part, count in (("train", 60), ("validation", 24)):
        (folder / part).mkdir(parents=True)
        with (folder / part / "a.jsonl").open("w") as file:
            for i in range(count):
                words = " ".join(draw.choices(["state", "gate", "query", "key", "value", "norm"], k=40))
                source = {"redpajama_set_name": ("web", "books")[i % 2]}
                file.write(json.dumps({"text": words, "meta": source}) + "\n")
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def coarse():
    """Pictures of few pixels: that they are drawn is what is asked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STYLE, "savefig.dpi", 30)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return texts(tmp_path_factory.mktemp("text") / "mini")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A study that ran to its end in this process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    folder = write(tmp_path_factory.mktemp("study") / "tiny")
    run_study(folder, text=text, workers=1)
    report(folder)
    return folder


def timeless(file: Path) -> dict[str, dict]:
    return {name: {**record, "seconds": 0} for name, record in records(file).items()}


# ------------------------------ the run


def test_every_seed_and_system_has_its_line(finished):
    got = records(finished / "runs.jsonl")
    study, questions, lm = load_study(finished)
    first, _ = screening(study, questions, lm)
    last, _ = finalists(study, questions, lm, chosen(study, first, got))
    wanted = {key(asked) for cell in (*first, *last) for asked in cell.settings}
    bigrams = {key(bigram_settings(seed, lm)) for seed in (0, 1, 2)}
    assert set(got) == wanted | bigrams
    assert all(0 < got.pop(name)["score"] < math.log(1000) for name in bigrams)
    assert {record["settings"]["seed"] for record in got.values()} == {0, 1, 2}
    assert {c.task for c in last if c.system == "twin"} == {"lm"}
    assert {c.task for c in last if c.system == SILU} == {"lm", "recall"}
    for record in got.values():
        assert record["parameters"] > 0
        assert record["state_bytes"] > 0
        assert record["flops_per_token"] > 0
        assert record["curve"]
        assert record["seconds"] > 0
    lms = [record for record in got.values() if "task" not in record["settings"]]
    assert all(set(record["scores"]) == {"web", "books"} for record in lms)
    assert all(0 <= layer["mixer_parameters"] < 10 for r in lms for layer in r["gradient_spread"])
    assert sorted(path.name for path in (finished / "work").iterdir()) == [
        "text"
    ]  # the runs' folders are gone


def test_equal_models_have_equal_runs_of_a_seed_and_no_others(finished):
    """Runs of a seed see the same rows in the same order, whoever trains: twins do not differ by a digit."""
    study, questions, lm = load_study(finished)
    first, _ = screening(study, questions, lm)
    got = records(finished / "runs.jsonl")
    for task in ("lm", "recall"):
        here = {c.system: got[key(c.settings[0])] for c in first if c.task == task}
        assert here["twin"]["settings"] != here[SILU]["settings"]
        assert here["twin"]["curve"] == here[SILU]["curve"]
        assert here["twin"]["scores"] == here[SILU]["scores"]
        mine = here[SILU]["settings"]
        others = [r for r in got.values() if r["settings"].get("model") == mine["model"]]
        assert len({str(record["curve"]) for record in others}) == len(others) == 3


def test_bigrams_see_the_tokens_that_the_language_models_see(
    finished, tmp_path, monkeypatch, fresh_accelerate
):
    """Row by row, and the loss is over the same labels; another seed has other rows."""
    lm = load_study(finished)[2]
    got, rows = records(finished / "runs.jsonl"), {"model": [], "bigrams": []}
    lms = [r["settings"] for r in got.values() if "optim" in r["settings"] and r["settings"]["seed"] == 1]
    summed = summed_loss

    def note(model, batch, *args, **options):
        if torch.is_grad_enabled():
            rows["model"] += batch["input_ids"].tolist()
        return summed(model, batch, *args, **options)

    class Noted(module.Bigram):
        def __init__(self, batches, vocab_size):
            batches = list(batches)
            rows["bigrams"] += [row for batch in batches for row in batch["input_ids"].tolist()]
            super().__init__(batches, vocab_size)

        def perplexity(self, batches):
            batches = list(batches)
            rows["labels"] = sum(count_labels(batch) for batch in batches)
            return super().perplexity(batches)

    monkeypatch.setattr(trainer, "summed_loss", note)
    monkeypatch.setattr(module, "Bigram", Noted)
    language(lms[0], lm, finished / "work" / "text", tmp_path)
    record = module.measure_bigrams(bigram_settings(1, lm), lm, finished / "work" / "text")
    assert rows["bigrams"] == rows["model"]
    assert len(rows["model"]) * 32 == record["tokens"]
    assert rows["labels"] > 0
    kept = got[key(bigram_settings(1, lm))]
    assert record["score"] == kept["score"] != got[key(bigram_settings(2, lm))]["score"]


def test_a_finished_study_trains_nothing_and_a_killed_one_goes_on(finished, tmp_path, text, fresh_accelerate):
    folder = tmp_path / "again"
    shutil.copytree(finished, folder)
    file = folder / "runs.jsonl"
    before = file.read_bytes()
    run_study(folder, text=text, workers=1)
    assert file.read_bytes() == before
    lines = before.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-2]) + lines[-2][:50])
    run_study(folder, workers=1)  # the text of before
    assert timeless(file) == timeless(finished / "runs.jsonl")
    assert len(file.read_text().splitlines()) == len(lines)


def test_another_text_is_refused_before_anything_is_trained(finished, tmp_path, fresh_accelerate):
    folder = tmp_path / "other"
    shutil.copytree(finished, folder)
    other = texts(tmp_path / "texts", seed=1)
    with pytest.raises(InputError, match="remove it, or give another folder"):
        run_study(folder, text=other)
    shutil.rmtree(folder / "work")
    with pytest.raises(InputError, match="has runs on another text, mini, than texts"):
        run_study(folder, text=other)
    assert (folder / "runs.jsonl").read_bytes() == (finished / "runs.jsonl").read_bytes()


def test_a_run_that_diverges_is_recorded_as_that(tmp_path, text, fresh_accelerate):
    lm = LM | {"optim": {"lr": 1e30}, "train": LM["train"] | {"steps": 12}}
    folder = write(tmp_path / "wild", lm=lm)
    study, questions, lm = load_study(folder)
    place = prepare_text(lm, text, folder / "work", 1)
    cell = next(cell for cell in screening(study, questions, lm)[0] if cell.task == "lm")
    record = language(cell.settings[0], lm, place, folder / "work")
    assert "left out" in record["failed"]
    assert "score" not in record
    places = report_rows([cell], {key(cell.settings[0]): record})
    assert math.isnan(places[cell.system, "lm", cell.match].values[0])
    assert "diverged" in table(places)[0]


# ------------------------------ what is compared


@pytest.mark.parametrize("folder", [SHIPPED, SHIPPED / "quick"], ids=["study", "quick"])
def test_the_shipped_systems_are_equal_in_what_they_are_said_to_be(folder):
    study, questions, lm = load_study(folder)
    first, _ = screening(study, questions, lm)
    wanted = {
        "lm": recall.configured(lm["model"]).state_bytes(1, torch.float32),
        "recall": study.recall["state"],
    }
    counts: dict[tuple, set[int]] = {}
    for asked in first:
        model = asked.settings[0]["model"]
        counts.setdefault((asked.question, asked.task), set()).add(recall.count(model))
        if asked.match == "state":
            state = recall.configured(model).state_bytes(1, torch.float32)
            assert state == pytest.approx(wanted[asked.task], rel=NEAR if asked.task == "lm" else recall.FAR)
    for those in counts.values():
        assert max(those) / min(those) < 1.02
    assert study.seed not in study.finals.seeds


def test_a_question_is_each_combination_and_the_systems_by_name():
    question = Question(
        "?",
        over={
            "mixer": ["deltanet", "gated_deltanet"],
            "feature_map": "nala",
            "feature_map_options.power": [2, 3],
        },
        systems={"mine": {"mixer": "softmax", "rate": 2}},
    )
    assert list(question.expand()) == [
        "deltanet + nala(power=2)",
        "deltanet + nala(power=3)",
        "gated_deltanet + nala(power=2)",
        "gated_deltanet + nala(power=3)",
        "mine",
    ]
    keys = question.expand()["deltanet + nala(power=3)"]
    assert keys == {"mixer": "deltanet", "feature_map": "nala", "feature_map_options": {"power": 3}}


def test_a_rate_multiplies_both_tasks_rates(tmp_path):
    study, _, lm = load_study(write(tmp_path))
    [[cell], [plain]] = (
        plan_trials("q", {"x": {"mixer": "softmax"} | extra}, ["lm"], {"lm": "parameters"}, [0], study, lm)[0]
        for extra in ({"rate": 2}, {})
    )
    assert cell.settings[0]["optim"]["lr"] == 2 * plain.settings[0]["optim"]["lr"] == 6e-3
    [cell] = plan_trials(
        "q", {"x": {"mixer": "softmax", "rate": 2}}, ["recall"], {"recall": "parameters"}, [0], study, lm
    )[0]
    assert cell.settings[0]["training"]["lr"] == 2 * recall.Training().lr


def test_softmax_has_no_row_at_equal_state_and_stands_there_with_its_own(tmp_path):
    study, _, lm = load_study(write(tmp_path))
    for match in ("both", "state"):
        cells, _ = plan_trials("q", {"softmax": {"mixer": "softmax"}}, ["lm"], {"lm": match}, [0], study, lm)
        assert [cell.match for cell in cells] == ["parameters"]
    places = {("softmax", "lm", "parameters"): ReportRow(cells[0], ({"state_grows": True},))}
    assert study_report.opponent(places, "softmax", "lm", "state") is places["softmax", "lm", "parameters"]
    places = {("softmax", "lm", "parameters"): ReportRow(cells[0], ({"state_grows": False},))}
    assert study_report.opponent(places, "softmax", "lm", "state") is None


# ------------------------------ who goes to the finals, and the verdicts


def cell(system: str, task: str, match: str = "parameters", seeds: tuple = (0,)) -> Trial:
    return Trial(
        "q", system, task, match, tuple({"s": system, "t": task, "m": match, "seed": s} for s in seeds)
    )


def test_ranks_are_means_over_columns_and_the_diverged_come_last():
    scores = {
        ("deltanet + a", "lm"): 5.0, ("deltanet + b", "lm"): 4.0, ("deltanet + c", "lm"): None,
        ("deltanet + a", "recall"): 0.9, ("deltanet + b", "recall"): 0.9, ("deltanet + c", "recall"): 0.1,
        ("gla + a", "lm"): 3.0, ("gla + b", "lm"): 2.0, ("gla + c", "lm"): 1.0,
    }  # fmt: skip
    cells = [cell(*place) for place in scores]
    got = {
        key(c.settings[0]): {} if score is None else {"score": score}
        for c, score in zip(cells, scores.values(), strict=True)
    }
    ranks = ranking(cells, got)
    assert list(ranks) == ["b", "a", "c"]
    assert ranks == pytest.approx({"b": (1 + 1.5 + 2) / 3, "a": (2 + 1.5 + 3) / 3, "c": (3 + 3 + 1) / 3})


def test_who_is_in_the_finals_anyway_is_not_chosen_again(finished):
    study, questions, lm = load_study(finished)
    first, _ = screening(study, questions, lm)
    assert chosen(study, first, records(finished / "runs.jsonl")) == {"readings": "nala(power=3)"}


def test_intervals_are_students():
    found = Interval.of([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)  # t with 2 degrees of freedom, at 97.5 %
    assert found.sign == 0
    assert Interval.of([1.0, 1.1, 1.2]).sign == 1
    assert Interval.of([-1.0, -1.1, -1.2]).sign == -1
    alone = Interval.of([1.0])
    assert (alone.half, alone.sign) == (None, 0)


def test_differences_are_paired_by_seed():
    a, b = cell("a", "lm", seeds=(1, 2, 3)), cell("b", "lm", seeds=(1, 2, 3))
    first, second = (
        ReportRow(c, tuple({"score": s} for s in scores))
        for c, scores in ((a, (5.0, 6.0, 7.0)), (b, (5.2, 6.2, 7.2)))
    )
    gap = Interval.of(paired_differences(first, second))
    assert gap.mean == pytest.approx(-0.2)
    assert gap.half < 1e-9
    assert paired_differences(first, ReportRow(b, ({"score": 1.0}, {}, {"score": 2.0}))) is None


@pytest.mark.parametrize(
    ("says", "task", "mean", "half", "expected"),
    [
        ("better", "lm", -0.1, 0.05, "holds"),
        ("better", "lm", 0.1, 0.05, "the opposite holds"),
        ("better", "lm", -0.1, 0.2, "undecided"),
        ("better", "recall", 5.0, 2.0, "holds"),
        ("better", "recall", -5.0, 2.0, "the opposite holds"),
        ("equal", "lm", 0.005, 0.01, "holds"),
        ("equal", "lm", 0.01, 0.03, "undecided"),
        ("equal", "lm", 0.1, 0.03, "worse, not equal"),
        ("equal", "lm", -0.1, 0.03, "better, not equal"),
        ("equal", "recall", 0.5, 0.4, "holds"),
        ("equal", "recall", -9.0, 0.4, "worse, not equal"),
        ("better", "lm", -0.1, None, "undecided"),
        ("equal", "lm", 0.0, None, "undecided"),
    ],
)
def test_verdicts(says, task, mean, half, expected):
    assert verdict(Claim("c", "a", "b", says), task, Interval(mean, half, 3)) == expected


def test_pooled_differences_average_mixers_and_matches_within_a_seed():
    values = {
        ("x + a", "lm", "parameters"): (5.0, 6.0), ("x + b", "lm", "parameters"): (5.1, 6.3),
        ("x + b", "lm", "state"): (5.1, 6.3), ("y + b", "lm", "state"): (4.1, 4.1),
        ("x + a", "lm", "state"): (5.0, 6.0), ("y + a", "lm", "parameters"): (4.0, 4.0),
        ("y + b", "lm", "parameters"): (4.1, 4.1), ("y + a", "lm", "state"): (4.0, 4.0),
    }  # fmt: skip
    places = {
        place: ReportRow(cell(*place, seeds=(1, 2)), tuple({"score": s} for s in scores))
        for place, scores in values.items()
    }
    found = pooled(places, ["x + ", "y + "], "a", "b", "lm")
    assert found.mean == pytest.approx(((-0.1 - 0.1 - 0.1 - 0.1) / 4 + (-0.3 - 0.3 - 0.1 - 0.1) / 4) / 2)
    assert found.seeds == 2
    del places["y + a", "lm", "state"]
    assert pooled(places, ["x + ", "y + "], "a", "b", "lm") is None


@pytest.mark.parametrize(("lm", "right", "changes"), [(-0.1, 0, True), (0.0, 5, False), (-0.1, -5, False)])
def test_the_default_changes_only_for_a_better_loss_and_no_worse_recall(finished, lm, right, changes):
    study, questions, lm_recipe = load_study(finished)
    got = records(finished / "runs.jsonl")
    first, _ = screening(study, questions, lm_recipe)
    last, _ = finalists(study, questions, lm_recipe, chosen(study, first, got))
    places = report_rows(last, got)
    for place, row in places.items():
        gain = (lm if place[1] == "lm" else right / 100) if "power=3" in place[0] else 0.0
        noise = (0.0, 0.001)
        base = 5.0 if place[1] == "lm" else 0.5
        records_ = tuple(r | {"score": base + gain + e} for r, e in zip(row.records, noise, strict=True))
        places[place] = ReportRow(row.cell, records_)
    # Both seeds shift alike: the differences have no spread.
    lines = study_report.decided(study, questions, first, got, places)
    assert ("changes to nala(power=3)" in lines[1]) is changes
    assert ("stays nala(power=2)" in lines[1]) is not changes


# ------------------------------ the report


def test_the_report_has_all_of_it_and_keeps_the_words(finished, tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("study.yaml", "lm.yaml", "runs.jsonl"):
        shutil.copy(finished / name, folder)
    written = report(folder)
    names = {path.name for path in written}
    assert names == {
        "RESULTS.md",
        "claims.png",
        "finals.png",
        "maps.png",
        "readings.png",
        "rates.png",
        "twins.png",
    }
    assert all(path.stat().st_size > 1000 for path in written)
    text = (folder / "RESULTS.md").read_text()
    assert text == (finished / "RESULTS.md").read_text()  # no text, no training: the records are enough
    assert text.startswith("# The best reading by the screening is nala(power=")
    assert "in deltanet it" in text.splitlines()[0]
    assert text.splitlines()[0].count("±") == 2
    got = records(folder / "runs.jsonl").values()
    assert f"{sum('model' in record['settings'] for record in got)} runs" in text
    bigrams = [r["score"] for r in got if "bigrams" in r["settings"] and r["settings"]["seed"] in (1, 2)]
    assert f"that a language model sees have {Interval.of(bigrams).text(3)} nats on the same rows" in text
    assert "| NaLa wins | language model | state |" in text
    assert "| softmax, twice the rate | parameters |" in text
    assert "grows" in text
    assert "Perplexity by source" in text
    marked = text.replace(study_report.BEGIN, study_report.BEGIN + "\n\nWhat I think.")
    (folder / "RESULTS.md").write_text(marked)
    report(folder)
    assert (folder / "RESULTS.md").read_text() == marked


def test_a_report_of_half_a_study_decides_nothing(finished, tmp_path):
    folder = write(tmp_path / "half")
    lines = (finished / "runs.jsonl").read_text().splitlines(keepends=True)
    (folder / "runs.jsonl").write_text("".join(lines[:3]))
    report(folder)
    assert (folder / "RESULTS.md").read_text().startswith("# The screening is not finished.")
    study, questions, lm = load_study(folder)
    first, _ = screening(study, questions, lm)
    count = len({key(c.settings[0]) for c in first})
    (folder / "runs.jsonl").write_text("".join(lines[: count + 1]))
    report(folder)
    assert (folder / "RESULTS.md").read_text().startswith("# The finals are not finished")


def test_a_study_may_decide_and_claim_nothing_and_ask_twice(finished, tmp_path):
    study = {name: part for name, part in TINY.items() if name not in ("decision", "claims")}
    again = {"ask": "Once more?", "over": {"mixer": "deltanet", "feature_map": "silu"},
             "match": {"lm": "parameters", "recall": "parameters"}}  # fmt: skip
    folder = write(tmp_path / "plain", study | {"questions": TINY["questions"] | {"again": again}})
    shutil.copy(finished / "runs.jsonl", folder)
    written = {path.name for path in report(folder)}
    assert {"finals.png", "again.png"} <= written
    assert "claims.png" not in written
    text = (folder / "RESULTS.md").read_text()
    assert text.startswith("# What the runs say")
    assert "## Finals" in text


def test_claims_name_the_chosen_form(finished):
    study, questions, lm = load_study(finished)
    got = records(finished / "runs.jsonl")
    first, _ = screening(study, questions, lm)
    best = chosen(study, first, got)
    found = judged(study, best, report_rows(finalists(study, questions, lm, best)[0], got))
    assert {(claim.claim, task, match) for claim, task, match, *_ in found} == {
        (claim, *place)
        for claim in ("NaLa wins", "NaLa is as good")
        for place in (("lm", "parameters"), ("lm", "state"), ("recall", "parameters"))
    }
    with pytest.raises(InputError, match="its question is none of finals"):
        study_report.named("deltanet + best:others", best)


def test_the_shipped_records_flops_are_todays_count():
    """Softmax attention was counted as T × T when they were made; nothing else has changed."""
    changed = set()
    trained = [r for r in records(SHIPPED / "runs.jsonl").values() if "model" in r["settings"]]
    for record in trained:
        if (now := study_report.flops(record)) != (then := record["flops_per_token"]):
            mixers = record["settings"]["model"]["mixer"]
            changed |= set([mixers] if isinstance(mixers, str) else mixers)
            assert now < then
    others = {"norm_attention", "linear_attention"}  # in models with both
    assert {"softmax", "diag_attention"} <= changed <= {"softmax", "diag_attention"} | others


def test_the_shipped_records_give_the_shipped_results(tmp_path):
    for name in ("study.yaml", "lm.yaml", "runs.jsonl", "RESULTS.md"):
        shutil.copy(SHIPPED / name, tmp_path)
    report(tmp_path)
    assert (tmp_path / "RESULTS.md").read_text() == (SHIPPED / "RESULTS.md").read_text()
    assert {p.name for p in tmp_path.glob("*.png")} == {p.name for p in SHIPPED.glob("*.png")}


# ------------------------------ bad input, and the command


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"finals": {"seeds": [0, 1], "systems": [SILU]}}, "0 chose the finalists"),
        ({"finals": {"seeds": [1], "systems": ["deltanet + sillu"]}}, "did you mean deltanet"),
        ({"finals": {"seeds": [1], "systems": [SILU], "best": ["redings"]}}, "did you mean readings"),
        (
            {"finals": {"seeds": [1], "systems": [SILU], "match": {"lm": "speed"}}},
            "parameters, state or both",
        ),
        ({"questions": {"q": {"over": {}}}}, "questions.q.ask: missing"),
        (
            {"questions": {q: {"ask": "?", "systems": {"x": {"mixer": m}}} for q, m in ("ab", "cd")}},
            "'x' is two systems",
        ),
        ({"questions": {"q": {"ask": "?", "tasks": ["lm", "vision"]}}}, "questions.q.tasks"),
        ({"recall": {"task": {"pairs": [64]}}}, "64 pairs need a sequence"),
        ({"recall": {"training": {"step": 3}}}, r"recall.training.step: no such key; did you mean steps"),
        (
            {"finals": {"seeds": [1], "systems": [SILU], "recall": {"step": 3}}},
            "finals.recall.step: no such key",
        ),
        ({"seeds": 3}, "seeds: no such key"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(tmp_path, change, says):
    with pytest.raises(InputError, match=says):
        load_study(write(tmp_path, TINY | change))


def test_a_new_folder_gets_the_shipped_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folder(quick=True) == Path("runs/study-quick")
    assert folder() == Path("runs/study")
    assert folder("mine") == Path("mine")
    for place, source in ((folder("mine"), SHIPPED), (folder(quick=True), SHIPPED / "quick")):
        begin_study(place, quick=place.name == "study-quick")
        assert load_study(place)[0].finals.seeds
        for name in ("study.yaml", "lm.yaml"):
            assert (place / name).read_text() == (source / name).read_text()
    Path("full").mkdir()
    Path("full/thesis.tex").write_text("")
    with pytest.raises(InputError, match="holds files and no study"):
        begin_study(folder("full"))
    monkeypatch.chdir(SHIPPED.parents[1])
    assert folder() == Path("recipes/study")


def test_the_command_reports_and_refuses_in_one_line(finished, tmp_path):
    done = CliRunner().invoke(nalanda_cli.app, ["study", "report", str(finished)])
    assert done.exit_code == 0, done.output
    assert "NaLa wins" in done.output
    with pytest.raises(InputError, match="no run is recorded"):
        report(write(tmp_path / "new"))
    with pytest.raises(InputError, match="no such file; a study's folder has"):
        report(tmp_path / "recipes")
    assert not (tmp_path / "recipes").exists()
