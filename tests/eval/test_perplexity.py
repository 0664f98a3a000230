"""`nalanda perplexity`: each token's −log p against a plain forward pass, at any length, in any batch."""

import csv
import itertools
import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import yaml
from nalanda_eval import perplexity as module
from nalanda_eval.options import PerplexityOptions
from nalanda_eval.perplexity import (
    perplexity,
    perplexity_by_position,
    ratio,
    score_spans,
    spans,
    surprisal,
    tokenise_documents,
)
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig
from transformers import MambaForCausalLM as Mamba
from typer.testing import CliRunner

import nalanda_cli
from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.common import progress
from nalanda.common.errors import InputError
from nalanda.config.schema import MAX_DOCUMENT, DataConfig
from nalanda.inference.options import read_prompt
from nalanda.testing import in_threads

V = 320


def build(mixer="gated_deltanet", **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    settings = {
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.3,
    }
    return (
        NalandaForCausalLM(NalandaConfig(**sizes, **settings, mixer=mixer, **options))
        .double()
        .eval()
    )


def foreign(kind, config, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}
    return kind(config(**sizes, **options)).double().eval()


def texts(*lengths):
    draw = np.random.default_rng(1)
    return [draw.integers(1, V, length) for length in lengths]


@torch.no_grad()
def expected(model, tokens) -> np.ndarray:
    tokens = torch.as_tensor(tokens)[None]
    logp = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)[0, :-1]
    return -logp.gather(1, tokens[0, 1:, None])[:, 0].numpy()


MODELS = {
    "gated_deltanet": lambda: build(),
    "nala": lambda: build("deltanet", feature_map="nala"),
    "softmax": lambda: build("softmax"),
    "diag": lambda: build("diag_attention", mixer_options={"block_size": 8}),
    "llama": lambda: foreign(
        LlamaForCausalLM,
        LlamaConfig,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_pass_are_one_pass(name, monkeypatch):
    model, (text,) = MODELS[name](), texts(50)
    monkeypatch.setattr(module, "AT_ONCE", 13)
    found = surprisal(model, torch.from_numpy(text)[None])
    np.testing.assert_allclose(found[0], expected(model, text), atol=1e-10)
    if name == "llama":
        return
    tokens = torch.from_numpy(text)[None]
    for found in in_threads(2, lambda context: surprisal(model, tokens, context=context)):
        np.testing.assert_allclose(found[0], expected(model, text), atol=1e-10)


@pytest.mark.slow
def test_every_token_is_scored_once_behind_its_row(monkeypatch):
    model, many = build(), texts(2, 40, 7, 16, 17)
    for at_once in (4096, 20):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        for length in (1, 16, 100):
            for text, loss in zip(many, score_spans(model, many, length), strict=True):
                rows = [expected(model, text[a : b + 1]) for a, b in spans(len(text), length)]
                np.testing.assert_allclose(loss, np.concatenate(rows), atol=1e-10)


def test_spans_cover_a_text_without_overlap():
    for tokens in (2, 3, 8, 9, 10, 100):
        for length in (1, 2, 8, 1000):
            covered = [
                i for first, last in spans(tokens, length) for i in range(first + 1, last + 1)
            ]
            assert covered == list(range(1, tokens))
            assert all(0 < last - first <= length for first, last in spans(tokens, length))


def test_totals_and_curve_are_the_tokens_own():
    model, many = build(), texts(60, 9, 33, 90)
    found = perplexity_by_position(model, [(text, 5, 11) for text in many], window=8, length=32)
    whole, parts = score_spans(model, many, 32), score_spans(model, many, 8)
    mean, tokens = np.concatenate(whole).mean(), sum(len(text) - 1 for text in many)
    assert (found["tokens"], found["words"], found["bytes"], found["texts"]) == (tokens, 20, 44, 4)
    assert found["one_pass"]["perplexity"] == pytest.approx(math.exp(mean))
    assert found["windows"]["perplexity"] == pytest.approx(math.exp(np.concatenate(parts).mean()))
    assert found["one_pass"]["word_perplexity"] == pytest.approx(math.exp(mean * tokens / 20))
    assert found["one_pass"]["bits_per_byte"] == pytest.approx(mean * tokens / 44 / math.log(2))
    for points in (found["curve"], found["ranges"]):
        assert points[0]["after"] == 0
        assert points[-1]["up_to"] == 32
        assert all(a["up_to"] == b["after"] for a, b in pairwise(points))
        assert sum(point["tokens"] for point in points) == tokens
        assert sum(p["one_pass"] * p["tokens"] for p in points) == pytest.approx(mean * tokens)
    position = np.concatenate([np.arange(len(loss)) % 32 for loss in whole])
    for point in found["ranges"]:
        here = (point["after"] <= position) & (position < point["up_to"])
        one, part = np.concatenate(whole)[here].mean(), np.concatenate(parts)[here].mean()
        assert (point["one_pass"], point["windows"]) == (pytest.approx(one), pytest.approx(part))
        assert point["difference"] == pytest.approx(one - part)
    assert [p["after"] for p in found["ranges"]] == [0, 8, 16]
    assert found["ranges"][0]["difference"] == pytest.approx(0, abs=1e-12)
    assert found["ranges"][0]["rows"] == len([row for text in many for row in spans(len(text), 32)])


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity():
    model = build()
    torch.nn.init.zeros_(model.lm_head.weight)
    found = perplexity_by_position(
        model, [(text, 1, 100) for text in texts(30, 40)], window=8, length=16
    )
    for kind in ("one_pass", "windows"):
        assert found[kind]["perplexity"] == pytest.approx(V)
        assert found[kind]["stderr"] == pytest.approx(0, abs=1e-9)
        assert found[kind]["bits_per_byte"] == pytest.approx(68 * math.log2(V) / 200)


def test_the_error_of_a_ratio():
    values, weights = np.array([2.0, 3.0, 10.0]), np.array([1.0, 2.0, 4.0])
    rest = values - 15 / 7 * weights
    assert ratio(values, weights) == pytest.approx(
        (15 / 7, math.sqrt((rest**2).sum() / 2 / 3) / (7 / 3))
    )
    assert ratio(values[:1], weights[:1]) == (2.0, None)
    assert ratio(3 * weights, weights) == pytest.approx((3, 0))


def test_what_a_model_cannot_read_is_said(monkeypatch):
    gpt = foreign(GPT2LMHeadModel, GPT2Config, n_head=2, n_positions=16)
    many = [(text, 1, 1) for text in texts(40)]
    assert perplexity_by_position(gpt, many, 8, 16)["tokens"] == 39
    with pytest.raises(InputError, match="--length 32: the model cannot read rows of 32"):
        perplexity_by_position(gpt, many, 8, 32)
    monkeypatch.setattr(module, "AT_ONCE", 8)
    with pytest.raises(InputError, match="--length: mamba reads rows in parts"):
        surprisal(foreign(Mamba, MambaConfig, state_size=4), torch.from_numpy(many[0][0])[None])


# ------------------------------ texts


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A checkpoint, and a corpus with a validation part."""
    folder = tmp_path_factory.mktemp("perplexity")
    build().float().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for part, lines in (("train", ["not this"] * 9), ("validation", ["the weir", "", "a  mill é"])):
        (folder / "corpus" / part).mkdir(parents=True)
        content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / "corpus" / part / "a.jsonl").write_text(content)
    (folder / "novel.md").write_text("Below the weir the water is slow. " * 9)
    recipe = {
        "output_dir": "unset",
        "model": {"mixer": "deltanet", "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2},
        "tokenizer": str(folder / "model"),
        "train": {"steps": 1, "tokens_per_step": 2048, "micro_batch_size": 1},
        "data": {"source": str(folder / "corpus"), "documents": "joined", "bos": False},
    }
    (folder / "lines.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_texts_begin_and_join_as_in_training(folder, tokenizer):
    model, corpus = build(), str(folder / "corpus")

    def read(data, model=model, limit=99):
        return [
            (tokenizer.decode(t), w, b)
            for t, w, b in tokenise_documents(model, tokenizer, data, limit=limit)
        ]

    apart = module.text_data(corpus, [], joined=False)
    end = "<|endoftext|>"
    assert read(apart) == [(f"{end}the weir", 2, 8), (f"{end}a  mill é", 3, 10)]
    assert read(apart, limit=8) == [(f"{end}the weir", 2, 8)]
    assert read(apart, limit=3) == [(f"{end}the", 1, 3)]
    assert read(apart, limit=11) == [(f"{end}the weir", 2, 8), (f"{end}a  ", 2, 3)]
    assert (
        read(apart, model=foreign(GPT2LMHeadModel, GPT2Config, n_head=2))[0][0] == f"{end}the weir"
    )
    unmarked = build()
    unmarked.config.bos_token_id = None
    assert read(apart, model=unmarked)[0][0] == "the weir"
    assert read(apart, model=unmarked, limit=3) == [("the ", 2, 3)]
    (folder / "lone.txt").write_text("a")
    lone = module.text_data(str(folder / "lone.txt"), [], joined=False)
    assert read(lone) == [(f"{end}a", 1, 1)]
    with pytest.raises(InputError, match=r"no text has two tokens, .*; name a longer text"):
        read(lone, model=unmarked)
    joined = module.text_data(str(folder / "lines.yaml"), ["seed=1"], joined=False)
    assert joined.documents == "joined"
    # The blank line is one of the text.
    assert read(joined) == [(f"{end}the weir{end}{end}a  mill é{end}", 2 + 1 + 3, 18)]
    assert read(module.text_data(corpus, [], joined=True)) == read(joined)
    assert read(joined, limit=8) == [(f"{end}the weir", 2, 8)]
    assert read(joined, limit=9) == [(f"{end}the weir{end}", 2, 8)]
    assert read(joined, limit=12) == [(f"{end}the weir{end}{end}a ", 2 + 1 + 2, 10)]
    assert read(DataConfig(source=str(folder / "novel.md")), limit=999)[0][2] == 34 * 9


@pytest.mark.parametrize("name", ["novel", "novel.md", "novel.txt"])
def test_a_text_is_read_as_training_reads_it(tmp_path, name):
    (tmp_path / name).write_bytes("\ufeffthe weir\r\na mill é\r".encode())
    data = module.text_data(str(tmp_path / name), [], joined=False)
    assert list(module.documents(data)) == ["the weir\r\na mill é\r"]
    assert read_prompt(None, tmp_path / name) == "the weir\r\na mill é\r"


def test_a_named_text_may_be_of_any_size(tmp_path):
    with (tmp_path / "big.txt").open("wb") as file:
        file.truncate(MAX_DOCUMENT + 1)
    data = module.text_data(str(tmp_path / "big.txt"), [], joined=False)
    assert [len(text) for text in module.documents(data)] == [MAX_DOCUMENT + 1]


def test_a_special_token_that_a_text_spells_counts_as_text(folder, tokenizer, tmp_path):
    stories = "The weir.\n<|endoftext|>\nThe mill.\n<|endoftext|>\n"
    (tmp_path / "stories.txt").write_text(stories)
    model, unmarked = build(), build()
    unmarked.config.bos_token_id = None
    for joined, one, lost in ((False, model, 0), (True, model, 0), (False, unmarked, 1)):
        data = module.text_data(str(tmp_path / "stories.txt"), [], joined=joined)
        ((tokens, _, size),) = tokenise_documents(one, tokenizer, data, limit=999)
        assert size == len(stories) - lost
        assert (tokens == tokenizer.eos_token_id).sum() == 2 + (one is model) + joined


@pytest.mark.slow
def test_the_command(folder):
    arguments = [
        "perplexity",
        str(folder / "model"),
        str(folder / "model"),
        "--text",
        str(folder / "novel.md"),
    ]
    done = CliRunner().invoke(nalanda_cli.app, [*arguments, "--output", str(folder / "out")])
    assert done.exit_code == 0, done.output
    assert "windows of 16" in done.stdout
    assert "256" in done.stdout  # 16 windows
    result = json.loads((folder / "out" / "perplexity.json").read_text())
    first, second = result["models"]
    assert first == second
    assert (first["window"], first["length"], first["tokens"]) == (16, 256, 34 * 9)
    rows = list(csv.DictReader((folder / "out" / "perplexity.csv").open()))
    assert [float(row["one_pass"]) for row in rows[: len(rows) // 2]] == [
        p["one_pass"] for p in first["curve"]
    ]
    for name in result["figures"]:
        assert (folder / "out" / name).stat().st_size > 5000


def test_models_that_read_other_windows_or_texts_are_not_compared():
    same = {"window": 16, "length": 256, "bytes": 1000}
    assert module.incomparable([same, same]) == []
    (said,) = module.incomparable([same, same | {"window": 32}])
    assert said == "the models read windows of 16 and 32 tokens; --window sets one for all"
    assert len(module.incomparable([same, {"window": 8, "length": 128, "bytes": 1200}])) == 3


def test_a_picture_of_several_models_names_none_of_them():
    def title(*bits, **changes):
        same = {"name": "runs/a", "window": 16, "length": 256, "bytes": 1000}
        models = [same | {"one_pass": {"perplexity": 2**x, "bits_per_byte": x}} for x in bits]
        models[0] |= changes
        return module._title({"text": "python", "models": models}, ["a", "b"][: len(bits)])

    assert title(3.0) == "Perplexity on python: a, 8.00"
    assert title(3.0, 2.0) == "Perplexity on python: 2 models, 2.000 to 3.000 bits a byte"
    assert title(3.0, 2.0, window=32) == "Perplexity on python"


def test_weights_that_are_not_finite_are_said(folder, tokenizer, tmp_path):
    model = build().float()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="model: its losses are not finite"):
        perplexity(
            [str(tmp_path / "model")],
            str(folder / "novel.md"),
            PerplexityOptions(output=str(tmp_path / "out")),
        )


@pytest.mark.parametrize("name", ["bos", "no bos", "joined"])
@pytest.mark.parametrize("limit", [1, 2, 100, 305])
def test_as_many_tokens_are_scored_as_asked(folder, tokenizer, name, limit):
    model = build()
    model.config.bos_token_id = None if name == "no bos" else 0
    data = module.text_data(str(folder / "novel.md"), [], joined=name == "joined")
    read = list(tokenise_documents(model, tokenizer, data, limit=limit))
    assert perplexity_by_position(model, read, 16, 64)["tokens"] == limit
    assert read[0][2] == limit  # a byte a token


def test_of_a_character_that_is_cut_the_predicted_bytes_count(tokenizer, tmp_path):
    (tmp_path / "a.md").write_text("aé")
    [(tokens, words, size)] = tokenise_documents(
        build(), tokenizer, DataConfig(source=str(tmp_path / "a.md")), limit=2
    )
    assert (len(tokens), words, size) == (3, 1, 2)  # the bytes of the predicted tokens


@pytest.mark.slow
def test_progress_is_said_where_there_is_no_terminal(folder, monkeypatch, capsys, blank):
    """In parts of long rows too; a text that takes no time says nothing."""
    seconds = itertools.count(step=6)
    arguments = [str(folder / "model")], str(folder / "novel.md")
    output = str(folder / "progress")
    options = PerplexityOptions(length=256, output=output, tokens=200)
    monkeypatch.setattr(module, "AT_ONCE", 20)
    perplexity(*arguments, options)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(progress, "LAST", 10.0)
    perplexity(*arguments, options)
    said = capsys.readouterr().err.splitlines()
    counts = [
        int(re.fullmatch(r".*/model +(\d+)/400 tokens  ETA \d+ (s|min)", line)[1]) for line in said
    ]
    assert counts == sorted(set(counts))
    assert len([count for count in counts if count < 200]) >= 4


def test_bad_input_is_one_line(folder):
    model = str(folder / "model")
    for options, message in (
        ({"text": "nowhere"}, "nowhere"),
        ({"text": str(folder / "model" / "model.safetensors")}, "not UTF-8"),
        ({"window": 9, "length": 5}, "--window 9: is longer than --length 5"),
        ({"tokens": 0}, "--tokens 0"),
        ({"overrides": ["data.eos=true"]}, "settings change a recipe"),
        ({"output": str(folder / "novel.md" / "out")}, "--output"),
    ):
        text = options.pop("text", "python")
        settings = PerplexityOptions(**{"output": str(folder / "none")} | options)
        with pytest.raises(InputError, match=message) as raised:
            perplexity([model], text, settings)
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match="no model"):
        perplexity([])
    with pytest.raises(InputError, match="no such model"):
        perplexity(["./nowhere"])
