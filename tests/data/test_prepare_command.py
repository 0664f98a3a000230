"""The command `nalanda data prepare`."""

import pytest
from corpora import corpus, flip, sums
from typer.testing import CliRunner

from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.config.schema import TokenizerConfig
from nalanda.data import make_set
from nalanda.data.loader import validation_batches
from nalanda.data.tokenizer import build_tokenizer
from nalanda_cli import app


def test_command_trains_a_tokenizer_and_takes_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = CliRunner()
    source = corpus(tmp_path / "in")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}/run\nmodel: {{}}\n"
        "train: {steps: 1, tokens_per_step: 64, micro_batch_size: 1}\n"
        f"tokenizer: {{train: bpe, vocab_size: 300}}\ndata: {{source: {source}, seq_len: 64}}\n"
    )
    done = run.invoke(app, ["data", "prepare", str(recipe), str(tmp_path / "a"), "--workers", "1"])
    assert done.exit_code == 0
    assert "RedPajamaWikipedia" in done.output
    assert "300 tokens" in done.output
    arguments = [
        "data",
        "prepare",
        str(source),
        str(tmp_path / "b"),
        "--vocab-size",
        "300",
        "--workers",
        "2",
    ]
    assert run.invoke(app, arguments).exit_code == 0
    assert sums(tmp_path / "a") == sums(tmp_path / "b")
    arguments = ["data", "prepare", str(recipe), str(tmp_path / "a"), "--no-eos"]
    assert "was prepared with eos true, and this is false" in str(
        run.invoke(app, arguments).exception
    )
    for option in (["--tokenizer", "x"], ["--bos"]):
        arguments = [
            "data",
            "prepare",
            str(tmp_path / "a"),
            str(tmp_path / "m"),
            "--format=megatron",
        ]
        refused = run.invoke(app, [*arguments, *option]).exception
        assert str(refused) == f"{option[0]}: a prepared set is written as it is; leave it out"
    flip(tmp_path / "a/train/00000.tokens")
    assert run.invoke(app, ["data", "inspect", str(tmp_path / "a"), "--show", "1"]).exit_code == 0
    damaged = run.invoke(app, ["data", "inspect", str(tmp_path / "a"), "--verify"]).exception
    assert isinstance(damaged, InputError)
    assert "train/00000.tokens: damaged" in str(damaged)


def test_options_change_a_recipes_tokenizer_and_keep_the_rest(
    tmp_path, monkeypatch, byte_tokenizer
):
    recipe = tmp_path / "recipe.yaml"
    text = "model: {}\ntrain: {steps: 1, tokens_per_step: 2048, micro_batch_size: 1}\ndata: {source: python}\n"

    def made(tokenizer: str, **asked) -> TokenizerConfig:
        recipe.write_text(f"{text}output_dir: {tmp_path}/run\ntokenizer: {tokenizer}\n")
        found = []
        monkeypatch.setattr(
            make_set, "prepare", lambda data, config, *_, **__: found.append(config)
        )
        make_set.make_token_set(str(recipe), str(tmp_path / "out"), data={}, tokenizer=asked)
        return found[0]

    words = "{train: words, min_count: 3, mask: true}"
    kept = TokenizerConfig(train="words", min_count=3, mask=True, vocab_size=500)
    assert made(words, vocab_size=500, path=None) == kept
    assert made(words, path="mistral") == TokenizerConfig(path="mistral")
    assert made(words, train="bpe") == TokenizerConfig(train="bpe")
    assert made("mistral", train="words") == TokenizerConfig(train="words")
    with pytest.raises(InputError, match="vocab_size is 500; only a trained one has a size"):
        made("mistral", vocab_size=500).check()


def test_the_next_line_fits_the_set(tmp_path, monkeypatch):
    monkeypatch.setenv("NALANDA_NEXT_STEPS", "1")
    (tmp_path / "book.txt").write_text(
        "".join(f"some words of paragraph {i}\n\n" for i in range(9))
    )
    arguments = [
        "data",
        "prepare",
        str(tmp_path / "book.txt"),
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    done = CliRunner().invoke(app, [*arguments, "--vocab-size", "300", "--no-bos"])
    assert done.exit_code == 0
    assert "book.txt: 1 document, its last 2 % are held out for validation" in done.output
    (line,) = [line for line in done.output.splitlines() if "nalanda train demo" in line]
    assert "data.bos=false" in line
    assert "validation.every" not in line
    assert "data.eos" not in line
    settings = [word for word in line.split() if "=" in word]
    config = load_config("demo", settings)
    tokenizer = build_tokenizer(config.tokenizer, config.data, tmp_path / "tokenizer")
    config.data.seq_len = 4
    assert validation_batches(config.data, tokenizer, batch_size=1)
