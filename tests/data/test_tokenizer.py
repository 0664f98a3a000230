"""The one form of a tokenizer in prepared sets, runs and exported models; SentencePiece's models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from training import configured

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig, TokenizerConfig
from nalanda.data.make_set import make_token_set
from nalanda.data.options import TokenizerOptions
from nalanda.data.python_docs import python_documents
from nalanda.data.text_bytes import text_bytes
from nalanda.data.tokenizer import (
    _load_sentencepiece,
    build_tokenizer,
    describe_tokenizer,
    encoder,
    load_tokenizer,
    mistral_model,
    tokenizer_fingerprint,
)
from nalanda.train.loop import train

# ------------------------------ what saving makes of a tokenizer


@pytest.fixture
def published(tmp_path) -> Path:
    """A tokenizer in the form of Mistral's and flash-linear-attention's models on the hub."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *"adefghiklnoqrstuvwy", "▁h", "ll", "▁he"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "h"), ("l", "l"), ("▁h", "e")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in pieces[:3]])
    folder = tmp_path / "published"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_llamas_older_form_is_one_tokenizer_everywhere(
    published, recipe, tmp_path, fresh_accelerate
):
    out, run = tmp_path / "set", tmp_path / "run"
    given = TokenizerOptions(path=str(published))
    for _ in range(2):  # the second time, it is the tokenizer in the folder
        make_token_set(str(recipe.parent), str(out), tokenizer=given, say=str)

    settings = [
        f"tokenizer={published}",
        f"data.source={out}",
        "train.steps=2",
        "validation.every=0",
    ]
    train(configured(recipe, run, *settings))

    built = build_tokenizer(TokenizerConfig(path=str(published)), DataConfig(), tmp_path / "unused")
    saved = [
        load_tokenizer(folder) for folder in (out / "tokenizer", run / "tokenizer", run / "final")
    ]
    for tokenizer in saved:
        assert describe_tokenizer(tokenizer) == describe_tokenizer(built)
        assert tokenizer("<s>hello").input_ids == built("<s>hello").input_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trained", "folder", "file", "mistral"])
def test_what_saving_does_not_change_stays_as_it_is(kind, tokenizer, tmp_path):
    if kind == "mistral":
        pytest.importorskip("mistral_common")
    tokenizer.save_pretrained(tmp_path / "folder")
    (tmp_path / "lone").mkdir()
    tokenizer.backend_tokenizer.save(str(tmp_path / "lone" / "file.json"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("a text to train on\n" * 99)
    paths = {"folder": str(tmp_path / "folder"), "file": str(tmp_path / "lone" / "file.json")}
    config = (
        TokenizerConfig(train="bpe", vocab_size=257)
        if kind == "trained"
        else TokenizerConfig(path=paths.get(kind, kind))
    )

    built = build_tokenizer(config, DataConfig(source=str(tmp_path / "text")), tmp_path / "own")
    built.save_pretrained(tmp_path / "again")

    assert describe_tokenizer(load_tokenizer(tmp_path / "again")) == describe_tokenizer(built)
    if kind == "mistral":  # the form of earlier runs and sets
        unsaved = _load_sentencepiece(mistral_model(), bos=True)
        assert describe_tokenizer(built) == describe_tokenizer(unsaved)
    elif kind != "trained":
        assert describe_tokenizer(built) == describe_tokenizer(tokenizer)


def test_a_folder_and_a_lone_file_have_the_same_bos_and_eos(tokenizer, tmp_path):
    tokenizer.backend_tokenizer.save(str(tmp_path / "lone.json"))
    (tmp_path / "folder").mkdir()
    tokenizer.backend_tokenizer.save(str(tmp_path / "folder" / "tokenizer.json"))
    nameless = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "folder" / "tokenizer_config.json").write_text(json.dumps(nameless))

    def build(name: str, **settings):
        config = TokenizerConfig(path=str(tmp_path / name))
        return build_tokenizer(config, DataConfig(**settings), tmp_path / "unused")

    assert describe_tokenizer(build("lone.json")) == describe_tokenizer(build("folder"))
    assert build("folder").bos_token == build("folder").eos_token == "<|endoftext|>"
    assert build("folder", bos=False, eos=False).bos_token is None  # as runs without them have it


# ------------------------------ SentencePiece


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(python_documents({"json", "heapq", "abc"}).values())


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """Trains a SentencePiece model, by default with the trainer's own settings, on texts with tags or without."""
    sentencepiece = pytest.importorskip("sentencepiece")

    def train(vocab_size: int = 500, tags: bool = True, without: str = "", **options) -> Path:
        tagged = ["<p>some</p> <b>0</b> a</s <0x4 <s <u"] * 200 if tags else []
        lines = "\n".join([*texts, *tagged]).replace(without or "\0", "").splitlines()
        prefix = tmp_path_factory.mktemp("spm") / "m"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=str(prefix),
            vocab_size=vocab_size,
            minloglevel=2,
            **options,
        )
        return prefix.with_suffix(".model")

    return train


WORDS = {"model_type": "bpe", "byte_fallback": True}
SYMBOLS = {"user_defined_symbols": ["<sep>", "<cls>"], "control_symbols": ["<ctl>"]}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tags": False},
        {"byte_fallback": True},
        {"byte_fallback": True, "tags": False},
        {"byte_fallback": True, "tags": False, "without": ">"},
        {"model_type": "bpe"},
        {"normalization_rule_name": "nfkc", "byte_fallback": True},
        {"normalization_rule_name": "nmt_nfkc_cf"},
        {"remove_extra_whitespaces": False, "byte_fallback": True},
        {"add_dummy_prefix": False},
        SYMBOLS,
        WORDS | SYMBOLS,
    ],
    ids=[
        "default",
        "no tags",
        "bytes",
        "bytes, no tags",
        "bytes, one character of a tag",
        "bpe",
        "nfkc",
        "casefold",
        "spaces",
        "no prefix",
        "symbols",
        "bpe, symbols",
    ],
)
def test_sentencepiece_models_encode_as_sentencepiece_does(options, trained, texts, tmp_path):
    from sentencepiece import SentencePieceProcessor

    path = trained(**options)
    model = SentencePieceProcessor(model_file=str(path))
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path)), DataConfig(eos=False), tmp_path)

    spelt = "a </s> b<s> <unk> <0x41> <sep> c<cls><ctl>d"
    odd = ["", " ", "\n", "  Ｆｕｌｌ　ｗｉｄｔｈ \r\n ½ ﬁ e\u0301 ｶﾞ ", "漢字 ᚠ\U0001f9ec", spelt]
    documents = encoder(tokenizer, DataConfig(bos=False, eos=False))([*texts, *odd])
    for text, found in zip([*texts, *odd], documents, strict=True):
        expected = model.encode(text)
        assert found.tolist() == expected, text
        if model.unk_id() not in expected:
            assert tokenizer.decode(expected) == model.decode(expected)
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id == 1
    assert len(tokenizer) == len(model)
    # A model that loses characters has no bits a byte.
    assert (text_bytes(tokenizer) is None) == (not options.get("byte_fallback"))


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"model_type": "word", "vocab_size": 99}, "model_type=word"),
        ({"model_type": "char", "vocab_size": 60}, "model_type=char"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true"),
    ],
)
def test_a_sentencepiece_model_that_is_not_converted_says_its_one_cause(
    options, cause, trained, tmp_path
):
    config = TokenizerConfig(path=str(trained(**options)))
    with pytest.raises(InputError) as caught:
        build_tokenizer(config, DataConfig(), tmp_path)
    assert f"trained with {cause}, which is not converted; train it without, or give its" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("=") == 1


# ------------------------------ the fingerprint, and a tokenizer of a package


def test_the_fingerprint_depends_on_what_decides_tokens(tokenizer, tmp_path):
    first = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    reloaded = build_tokenizer(TokenizerConfig(path=str(tmp_path)), DataConfig(), tmp_path)
    assert tokenizer_fingerprint(reloaded) == first
    reloaded("a b c", truncation=True, max_length=2)
    assert tokenizer_fingerprint(reloaded) == first
    program = (
        "import hashlib, sys, tokenizers; backend = tokenizers.Tokenizer.from_file(sys.argv[1]);"
        "print(hashlib.blake2b(backend.to_str().encode(), digest_size=16).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert other.stdout.strip() == first

    backend = json.loads(tokenizer.backend_tokenizer.to_str())

    def changed(change):
        state = json.loads(json.dumps(backend))
        change(state)
        kind = transformers.PreTrainedTokenizerFast
        return tokenizer_fingerprint(kind(tokenizer_object=Tokenizer.from_str(json.dumps(state))))

    assert (
        changed(
            lambda state: (
                state["model"]["merges"].append(["a", "b"])
                or state["model"]["vocab"].update(ab=257)
            )
        )
        != first
    )
    assert changed(lambda state: state.update(normalizer={"type": "NFC"})) != first


def test_mistral_without_its_package(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mistral_common" else find(name)
    )
    for name in ("mistral", "mistral-common"):
        with pytest.raises(InputError, match=r"pip install 'nalanda\[mistral\]'") as caught:
            build_tokenizer(TokenizerConfig(path=name), None, tmp_path)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_mistral_out_of_its_package(tmp_path):
    pytest.importorskip("mistral_common")
    found = build_tokenizer(TokenizerConfig(path="mistral"), DataConfig(), tmp_path)
    assert (len(found), found.bos_token_id, found.eos_token_id) == (32000, 1, 2)
    assert found("Hello world").input_ids == [1, 22557, 1526]
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(mistral_model()))
    for text in (
        "def f(x):\n\n    return  x  # Größe 漢字\t",
        "  leading",
        "🦜🦜 \u200d",
        "½ e\u0301 \n \n",
    ):
        assert found(text).input_ids == [1, *model.encode(text)]
