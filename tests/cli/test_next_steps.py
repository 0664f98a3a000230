"""Every line that a command prints behind `next:` is run, without a network, at a tiny size."""

import json
import shlex
from pathlib import Path

import pytest

import nalanda_cli
from nalanda.common.next_steps import next_steps
from nalanda.config.load import parse_yaml

TINY = (
    *("model.hidden_size=32", "model.num_hidden_layers=1", "model.intermediate_size=32"),
    *("tokenizer.vocab_size=300", "data.seq_len=128", "train.steps=2", "train.tokens_per_step=128"),
    *("train.micro_batch_size=1", "train.cpu_threads=1", "schedule.warmup_steps=1"),
    *("checkpoint.every=2", "log.tensorboard=false", "data.max_validation_rows=2"),
)
FOREIGN = ("llama-cli", "mlx_lm.generate")
"""Programs of other packages, whose lines are not run."""

TEXT = "".join(f"Some words of paragraph {i}, and of no other.\n\n" for i in range(400))


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch, fresh_accelerate):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NALANDA_NEXT_STEPS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def hints(capsys):
    """Runs a command; returns the lines behind its `next:`."""

    def run(line: str) -> list[str]:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        program, *words = shlex.split(line)
        if program == "python":
            exec(words[1], {})
            return []
        if words[0] == "train":
            words += [setting for setting in TINY if not is_set(setting, words)]
        if words[0] == "eval" and "--limit" not in words:
            words += ["--limit", "1"]
        capsys.readouterr()
        nalanda_cli.main(words)
        printed = capsys.readouterr().err.rpartition("\nnext: ")
        return [line.strip() for line in printed[2].splitlines()] if printed[1] else []

    return run


def is_set(setting: str, words: list[str]) -> bool:
    section = setting.partition(".")[0]
    return any(word.startswith(f"{section}=") for word in words)


def follow(hints, lines: list[str]) -> None:
    assert lines
    for line in lines:
        if not line.startswith(FOREIGN):
            hints(line)


def make_source(kind: str, folder: Path) -> list[str]:
    """Writes texts of a kind; returns the settings that name them."""
    if kind == "python":
        return []
    if kind == "one text":
        (folder / "book.txt").write_text(TEXT)
        return ["data.source=book.txt"]
    if kind == "two texts":
        (folder / "train.txt").write_text(TEXT)
        (folder / "held out.txt").write_text(TEXT[-2000:])
        return ["data.source=train.txt", "data.validation_source=held out.txt"]
    if kind == "a list":
        for name in ("a.txt", "b.txt"):
            (folder / name).write_text(TEXT)
        return ["data.source=[a.txt, b.txt]"]
    lines = [json.dumps({"text": text}) + "\n" for text in TEXT.split("\n\n") if text]
    (folder / "lines.jsonl").write_text("".join(lines))
    return ["data.source=lines.jsonl"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [slow("python"), "one text", slow("two texts"), slow("a list"), slow("lines")]
)
def test_after_a_training(kind, tmp_path, hints):
    settings = make_source(kind, tmp_path)
    lines = hints(shlex.join(["nalanda", "train", "demo", *settings, "output_dir=runs/x"]))
    assert [line.split()[1] for line in lines[:2]] == ["report", "generate"]
    follow(hints, lines)
    if kind == "two texts":
        assert lines[2] == "nalanda perplexity runs/x --text 'held out.txt'"


def test_text_that_was_trained_on_is_not_scored(tmp_path, hints):
    make_source("one text", tmp_path)
    run = "nalanda train demo data.source=book.txt output_dir=runs/x validation.every="
    assert hints(run + "0")[2] == "nalanda verify runs/x"


# A set may lie where a run of its name would.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "output"), [slow("--bos", "tokens"), ("--no-bos", "runs/tokens")]
)
def test_after_preparing_a_set(option, output, tmp_path, hints):
    make_source("one text", tmp_path)
    lines = hints(f"nalanda data prepare book.txt {output} --vocab-size 300 --workers 1 {option}")
    *others, train = lines
    follow(hints, others)
    follow(hints, hints(train))


@pytest.mark.slow
def test_after_commands_that_take_a_model(tmp_path, hints):
    make_source("one text", tmp_path)
    hints("nalanda train demo data.source=book.txt output_dir=runs/x")
    for line in (
        "nalanda export runs/x model",
        "nalanda perplexity runs/x",
        "nalanda generate runs/x 'Some words' --max-new-tokens 2 --save-state x.state",
        "nalanda eval runs/x --tasks python_docs --limit 1",
    ):
        follow(hints, hints(line))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "recipe"),
    [
        slow("gguf", "gated_deltanet_340m_deploy"),
        slow("fla", "gated_deltanet_340m"),
        slow("mlx", "gated_deltanet_340m_deploy"),
        ("llama", "transformer_340m"),
        slow("qwen3_5", "gated_deltanet_340m_deploy"),
    ],
)
def test_after_a_conversion(target, recipe, tmp_path, hints):
    make_source("one text", tmp_path)
    settings = "model.num_heads=2 train.precision=fp32 output_dir=runs/x data.source=book.txt"
    hints(f"nalanda train {recipe} tokenizer.train=bpe {settings}")
    lines = hints(f"nalanda convert runs/x out --to {target}")
    follow(hints, [line for line in lines if "import fla" not in line])


def test_tuning_says_nothing_more():
    from nalanda.common.next_steps import NEXT

    assert "tune" not in NEXT


@pytest.mark.parametrize("folder", ["runs/fit/final", "a[1], b", "a: b", "größe {x} #1", "x" * 300])
def test_a_folder_of_any_name_is_read_from_the_line(folder):
    line = next_steps("linearize", recipe="r", model="m", run="fit", folder=folder)[0]
    (model,) = (word for word in shlex.split(line) if word.startswith("model="))
    assert parse_yaml(model.removeprefix("model="), model) == {"init_from": folder}
