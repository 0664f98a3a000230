"""The command `nalanda data prepare`."""

import pytest
from corpora import corpus, flip, sums
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nalanda.common.errors import InputError
from nalanda.config.load import load_config
from nalanda.config.schema import TokenizerConfig
from nalanda.data import make_set
from nalanda.data.loader import validation_batches
from nalanda.data.options import TokenizerOptions
from nalanda.data.token_set import read_index
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
        options = TokenizerOptions(**asked)
        make_set.make_token_set(str(recipe), str(tmp_path / "out"), tokenizer=options)
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


def test_the_next_line_takes_both_parts_of_the_set(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "output_dir: run\nmodel: {}\ntrain: {steps: 1, tokens_per_step: 64, micro_batch_size: 1}\n"
        "tokenizer: {train: bpe}\ndata: {source: train, validation_source: more}\n"
    )
    index = {"settings": {"bos": True, "eos": True}, "validation": {"documents": 1}}
    overrides = ["data.validation_source=others", "data.seq_len=8"]
    settings = make_set.settings_to_train(str(recipe), index, overrides)["settings"]
    assert settings == ["data.seq_len=8", "data.validation_source=null"]
    assert load_config(str(recipe), settings).data.validation_source is None


def prepare(*arguments: object):
    words = ["data", "prepare", *map(str, arguments), "--workers", "1"]
    return CliRunner().invoke(app, words)


def test_a_key_without_a_recipe_leads_to_one(tmp_path, monkeypatch):
    """As the message about a bad record does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n{"text": null}\n')
    refused = str(prepare("in.jsonl", "out", "data.unusable=skip").exception)
    command = refused.partition("put one in front: nalanda data ")[2].split()
    assert prepare(*command[1:], "tokenizer.vocab_size=300").exit_code == 0
    assert read_index("out")["unusable"] == 1


@pytest.fixture
def without_bos(tmp_path):
    """A tokenizer of bytes, without special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "no_bos")
    return tmp_path / "no_bos"


def test_a_recipes_keys_change_the_set(tmp_path, recipe, monkeypatch):
    monkeypatch.setenv("NALANDA_NEXT_STEPS", "1")
    source = corpus(tmp_path / "in")
    keys = [f"data.source={source}", "data.eos=false", "tokenizer.vocab_size=310", "train.steps=3"]
    done = prepare(recipe, tmp_path / "a", *keys)
    assert done.exit_code == 0, done.exception
    settings = read_index(tmp_path / "a")["settings"]
    assert not settings["eos"]
    assert read_index(tmp_path / "a")["tokenizer"]["vocab_size"] == 310
    (line,) = [line for line in done.output.splitlines() if "nalanda train" in line]
    assert line.count("data.eos=false") == line.count("train.steps=3") == 1
    assert line.count("data.source=") == 1
    assert "tokenizer.vocab_size" not in line
    load_config(recipe, [word for word in line.split() if "=" in word])

    refused = str(prepare(source, tmp_path / "b", "data.eos=false").exception)
    assert refused.startswith(f"data.eos=false: {source} is not a recipe")
    assert "flags" in refused


def test_an_error_names_what_was_typed(tmp_path, recipe, without_bos):
    source = corpus(tmp_path / "in")
    message = str(prepare(source, tmp_path / "a", "--tokenizer", without_bos).exception)
    assert (
        message == "tokenizer: no bos and no eos token; set --no-bos --no-eos"
    )  # once, before the shards
    keys = (f"data.source={source}", f"tokenizer.path={without_bos}")
    message = str(prepare(recipe, tmp_path / "a", *keys).exception)
    assert message == "tokenizer: no bos and no eos token; set data.bos=false data.eos=false"

    options = ("--tokenizer", without_bos, "--vocab-size", 500)
    assert str(prepare(source, tmp_path / "a", *options).exception).startswith(
        "--vocab-size is 500"
    )
    message = str(prepare(source, tmp_path / "a", "--validation-share", "2").exception)
    assert message.startswith("--validation-share: ")
