"""The measurement of hybrids on a tiny transformer: records of all stages, their table, and its resumption."""

import gzip
import json
import re
import tarfile
from pathlib import Path

import yaml
from nalanda_lab import linearize
from nalanda_lab.linearize import RECIPE, Bench, report
from pages import ROOT
from transformers import LlamaConfig, LlamaForCausalLM


def test_all_stages_of_all_arms_are_recorded_once(recipe, tokenizer, tmp_path, monkeypatch, capsys):
    teacher = tmp_path / "llama"
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    with gzip.open(tmp_path / "words.gz", "wt") as file:
        file.write(json.dumps({"context": "a state is a", "continuation": " gate"}) + "\n")
    small = yaml.safe_load(RECIPE.read_text())
    small["linearize"]["steps"] = small["train"]["steps"] = 2
    small["schedule"]["warmup_steps"] = 0
    small["linearize"]["arms"] = {n: small["linearize"]["arms"][n] for n in ("silu", "soft")}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.setattr(linearize, "RECIPE", tmp_path / "small.yaml")

    text = str(Path(recipe).parent)
    bench = Bench(teacher, text, tmp_path / "words.gz", tmp_path / "out", words=1)
    whole = Bench.measure_decoding
    monkeypatch.setattr(Bench, "measure_decoding", lambda self: whole(self, length=600, steps=4))
    bench.run(2)
    stages = [
        f"{s}-{a}-{k}" for s in (0, 1) for a in ("silu", "soft") for k in ("fitted", "distilled")
    ]
    names = {"teacher", "decoding", "0-silu-before", "0-soft-before", *stages}
    names |= {"0-teacher-distilled", "1-teacher-distilled"}
    assert {file.stem for file in bench.records.iterdir()} == names

    printed = report(tmp_path / "out")
    (row,) = (x for x in printed.splitlines() if x.startswith("| teacher |"))
    before, _, distilled, *_, distance, _ = (cell.strip() for cell in row.split("|")[2:-1])
    assert distilled.split(" ± ")[0] != before, "the text changes the transformer too"
    assert " ± " in distance
    assert "| silu |" in printed
    assert (tmp_path / "out" / "linearize.png").is_file()
    capsys.readouterr()
    assert not (tmp_path / "out/seed-0/transformer").exists()
    bench.run(2)
    assert capsys.readouterr().out == ""

    for seed in (0, 1):  # a bench that is not finished
        for arm in ("soft", "teacher"):
            (bench.records / f"{seed}-{arm}-distilled.json").unlink()
    (row,) = (x for x in report(tmp_path / "out").splitlines() if x.startswith("| soft |"))
    assert [cell.strip() for cell in row.split("|")[-3:]] == ["", "", ""], "no distance, not 0"
    assert "inf" not in report(tmp_path / "out")


def test_the_page_has_the_figures_of_the_records(tmp_path):
    with tarfile.open(ROOT / "lab/records/linearize.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    page = (ROOT / "lab/pages/linearize.md").read_text(encoding="utf-8")
    plain = page.replace("**", "").replace(",", "").replace("the transformer", "teacher")
    printed = [line for line in report(tmp_path).splitlines() if re.match(r"\| \w", line)]
    assert len(printed) == 8
    assert [line for line in printed if re.sub(" +", " ", line) not in plain] == []
