"""Bad input at `nalanda-lab`: the one line that it gets, and the exit code."""

import re
import shlex
from pathlib import Path

import pytest
from nalanda_lab.commands import main

from nalanda import NalandaConfig, NalandaForCausalLM

DANGLING = (
    r"dangling: a symbolic link to .*/nowhere, which does not exist; make it, or name another path"
)
MEMORY = r"model: .* parameters take .*, .* of memory is free: .*"
SEED = r"--seed: expected 0 to 4294967295, got -1"
TABLE = [
    ("lra --fast", r"nalanda-lab lra: No such option: --fast.*"),
    ("recall --output out --mixers deltanets", r"--mixers: unknown .*; did you mean deltanet\?"),
    (
        "recall --output out --mixers deltanet:allow_neg_eigvl=true",
        r"--mixers: .*: no option 'allow_neg_eigvl', did you mean 'allow_neg_eigval'\?",
    ),
    ("recall --output out --maps sillu", r"--maps: unknown map .*; did you mean silu\?"),
    ("recall --output out --tasks mqr", r"--tasks: unknown task .*; did you mean mqar\?"),
    ("recall --states big", r".*write numbers with commas between them"),
    ("coordinates demo --widths 32,b", r".*write numbers with commas between them"),
    ("fork --out out", r".*give the token set of the runs"),
    ("fork --out out --text folder", r"folder/index\.json: does not exist; .*"),
    ("linearize folder --fast", r".*No such option: --fast.*"),
    ("transfer folder", r".*folder.*"),
    ("lra --output out --tasks txt", r"--tasks: unknown name .*; did you mean text\?"),
    (
        "coordinates demo model.hiden_size=1",
        r"model: unknown model key .*did you mean 'hidden_size'\?",
    ),
    ("analyze demo model.hidden_size=500000", MEMORY),
    ("analyze model --seed -1", SEED),
    ("analyze runs/none", r"no such run: runs/none; go to the folder in which it was trained, .*"),
    ("analyze model", r"model has no tokenizer; .*"),
    ("analyze model --device teapot", r".*teapot.*"),
    ("recall --output dangling", rf"--output {DANGLING}"),
    ("ops --json dangling", rf"--json {DANGLING}"),
    ("decode --png folder", r"--png folder: a folder; name a file"),
    ("train folder", r".*folder.*no checkout of Nalanda.*"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("bad")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 32}
    model = NalandaForCausalLM(NalandaConfig(vocab_size=320, mixer="gla", **sizes))
    model.save_pretrained(place / "model")
    (place / "folder").mkdir()
    (place / "dangling").symlink_to(place / "nowhere")
    return place


@pytest.mark.parametrize(("typed", "line"), TABLE, ids=[typed for typed, _ in TABLE])
def test_one_line_and_its_code(place, monkeypatch, capsys, typed, line):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(typed))
    text = capsys.readouterr().err
    assert re.fullmatch(f"(nalanda: )?{line}\n", text), text
    assert end.value.code == 2
