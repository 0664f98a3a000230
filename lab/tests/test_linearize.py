"""The records of hybrids have the figures of their page, and the study distils what the fit leaves."""

import re
import tarfile

import pytest
from nalanda_lab.linearize import RECIPE, report
from pages import ROOT

from nalanda.compare.study import load_arms, read_study
from nalanda.config.load import load_config


@pytest.fixture
def records(tmp_path):
    with tarfile.open(ROOT / "lab/records/linearize.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path


def test_the_page_has_the_figures_of_the_records(records):
    page = (ROOT / "lab/pages/linearize.md").read_text(encoding="utf-8")
    plain = page.replace("**", "").replace(",", "").replace("the transformer", "teacher")
    printed = [line for line in report(records).splitlines() if re.match(r"\| \w", line)]
    assert len(printed) == 8
    assert [line for line in printed if re.sub(" +", " ", line) not in plain] == []
    assert (records / "linearize.png").stat().st_size > 10_000


def test_records_of_a_study_that_is_not_finished(records):
    for seed in (0, 1, 2):
        for arm in ("soft", "teacher"):
            (records / f"records/{seed}-{arm}-distilled.json").unlink()
    (row,) = (x for x in report(records).splitlines() if x.startswith("| soft |"))
    assert [cell.strip() for cell in row.split("|")[-3:]] == ["", "", ""], "no distance, not 0"
    assert "inf" not in report(records)


def test_every_arm_of_the_fit_is_distilled_over_seeds(monkeypatch):
    monkeypatch.chdir(ROOT)
    teacher = ["distill.teacher=smollm2", "tokenizer=smollm2", "data.source=corpus"]
    study = read_study(str(RECIPE.with_name("linearize_study.yaml")), teacher)
    recipe, configs = load_config(RECIPE), load_arms(study)
    assert [*configs] == [*recipe.linearize.arms, "teacher"]
    for name in recipe.linearize.arms:
        assert configs[name].model == {"init_from": f"{recipe.output_dir}/{name}"}
        assert configs[name].distill.weight == recipe.distill.weight == 0.9
        assert configs[name].train.steps == 30
