"""Qwen3.5's text models: conversion both ways, refusals, and the proof that both models compute the same."""

import copy
import json
import math
import re
import shutil
import sys
import typing

import pytest
import torch
import typer.testing
from covering import slow_but_for
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from training import configured
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

import nalanda_cli
from nalanda import NalandaConfig
from nalanda.common.errors import InputError
from nalanda.convert import certificate, mlx
from nalanda.convert import convert as converting
from nalanda.convert.convert import convert
from nalanda.inference.load import load_model
from nalanda.train.log import read_metrics
from nalanda.train.loop import train

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_heads": 2, "head_dim": 8, "initializer_range": 0.2, "feature_map": "silu"}
FULL = {
    "qk_norm": True,
    "gate": "channel",
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "rotary_dim": 4,
}
HYBRID: dict[str, typing.Any] = {
    "num_hidden_layers": 4,
    "mixer": {"pattern": ["gated_deltanet"] * 3 + ["softmax"]},
}
HYBRID["mixer_options"] = {
    "gated_deltanet": {"num_v_heads": 4},
    "softmax": FULL | {"rope_theta": 100.0},
}
MODELS = {
    "pure": {},
    "grouped": {"mixer_options": {"num_v_heads": 4}, "expand_v": 2.0, "tie_word_embeddings": True},
    "hybrid": HYBRID | {"expand_v": 0.5, "conv_size": 3},
    "tied": HYBRID | {"mixer": ["softmax", *["gated_deltanet"] * 3], "tie_word_embeddings": True},
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16


def write(folder, fields, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(NalandaConfig(**(SIZES | fields))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand_like(weight) - 0.4)
    model.to(dtype).save_pretrained(folder)
    return folder


def read(folder):
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def rows(folder):
    """The table of a model card."""
    lines = (folder / "README.md").read_text().splitlines()
    cells = (line.strip("| ").split(" | ") for line in lines if line.startswith("| "))
    return dict(row for row in cells if len(row) == 2)


@pytest.mark.parametrize("name", slow_but_for(["hybrid"], MODELS))
def test_there_and_back_in_bf16(name, tmp_path):
    go_there_and_back(MODELS[name], torch.bfloat16, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but_for(["grouped", "hybrid"], MODELS))
def test_there_and_back(name, tmp_path):
    go_there_and_back(MODELS[name], torch.float32, tmp_path)


def go_there_and_back(fields, dtype, tmp_path):
    ours = write(tmp_path / "ours", fields, dtype)
    theirs = convert(str(ours), str(tmp_path / "theirs"), "qwen3_5", check=dtype == torch.float32)
    model, report = AutoModelForCausalLM.from_pretrained(theirs, output_loading_info=True)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert not any(report.values())
    if dtype == torch.float32:
        found = rows(theirs)
        assert found["greedy tokens equal"].startswith("32 of 32")
        difference, scale = (float(x) for x in found["of logits"].split(" of "))
        assert scale > 2
        assert difference < 1e-4 * scale
    back = convert(str(theirs), str(tmp_path / "back"), "nalanda", check=False)
    assert same(read(back), read(ours))
    config = json.loads((back / "config.json").read_text())
    assert {
        k: config[k] for k in ("mixer", "num_hidden_layers", "num_heads", "head_dim", "dtype")
    } == {
        k: json.loads((ours / "config.json").read_text())[k]
        for k in ("mixer", "num_hidden_layers", "num_heads", "head_dim", "dtype")
    }
    again = convert(str(back), str(tmp_path / "again"), "qwen3_5", check=False)
    assert same(read(again), read(theirs))
    assert (again / "config.json").read_text() == (theirs / "config.json").read_text()


def test_shards_stay_and_a_null_layer_is_added(tmp_path):
    ours = write(tmp_path / "ours", {})
    AutoModelForCausalLM.from_pretrained(ours).save_pretrained(ours, max_shard_size="10KB")
    (ours / "model.safetensors").unlink(missing_ok=True)
    theirs = convert(str(ours), str(tmp_path / "theirs"), "qwen3_5", check=False)
    places = json.loads((theirs / "model.safetensors.index.json").read_text())["weight_map"]
    assert places.keys() == read(theirs).keys()
    assert not read(theirs)["model.layers.2.self_attn.o_proj.weight"].any()
    assert json.loads((theirs / "config.json").read_text())["full_attention_interval"] == 3


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A model with eyes and a multi-token predictor, as it is published."""
    torch.manual_seed(0)
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    text = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    text |= linear | {
        "linear_value_head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text |= {
        "eos_token_id": 7,
        "initializer_range": 0.2,
        "full_attention_interval": 4,
        "layer_types": None,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = Qwen3_5Config(
        text_config=text, vision_config=vision | {"patch_size": 2, "num_position_embeddings": 4}
    )
    folder = tmp_path_factory.mktemp("multimodal") / "model"
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    tensors = read(folder) | {"mtp.norm.weight": torch.zeros(32)}
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_the_text_model_of_a_multimodal_one(multimodal, tmp_path, capsys):
    ours = convert(str(multimodal), str(tmp_path / "ours"))
    assert "tensors that no text needs, model.visual." in capsys.readouterr().err
    assert rows(ours)["greedy tokens equal"].startswith("32 of 32")
    config = NalandaConfig.from_pretrained(ours)
    assert config.eos_token_id == 7
    assert config.layer_mixers == ["gated_deltanet"] * 3 + ["softmax"]
    theirs = convert(str(ours), str(tmp_path / "theirs"), "qwen3_5", check=False)
    text = {
        n.replace(".language_model", ""): t for n, t in read(multimodal).items() if "language" in n
    }
    found = read(theirs)
    assert found.keys() == text.keys() | {"lm_head.weight"}
    for name, tensor in text.items():  # norms have lost the bits of w below those of w + 1
        assert torch.allclose(found[name], tensor, rtol=0, atol=2e-7 * ("norm" in name)), name


def test_a_tokenizer_stays_what_transformers_made_of_it(multimodal, tokenizer, tmp_path):
    """Which, for this type of model, is not what its files say."""
    folder = shutil.copytree(multimodal, tmp_path / "theirs")
    tokenizer.save_pretrained(folder)
    before = AutoTokenizer.from_pretrained(folder)
    ours = convert(str(folder), str(tmp_path / "ours"))
    after = AutoTokenizer.from_pretrained(ours)
    assert (
        tokenizer.encode("cafe\u0301") != before.encode("cafe\u0301") == after.encode("cafe\u0301")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"layer_types": ["sliding_attention"] * 4}},
            "layer_types='sliding_attention'",
        ),
        (
            {"text_config": {"layer_types": ["full_attention"] * 4}},
            "layer_types=['full_attention',",
        ),
        ({"text_config": {"attention_bias": True}}, "attention_bias=True"),
        ({"text_config": {"attn_output_gate": False}}, "attn_output_gate=False"),
        ({"text_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type='yarn'"),
        ({"text_config": {"rope_parameters": {"type": "linear"}}}, "rope_type='linear'"),
        ({"text_config": {"attention_chunk_size": 3}}, "attention_chunk_size=3"),
        (
            {"text_config": {"linear_key_head_dim": 6}},
            "linear_attn.in_proj_qkv.weight is [64, 32], the config says",
        ),
        ({"model_type": "qwen3_5_moe", "text_config": {"num_experts": 8}}, "num_experts=8"),
        ({"model_type": "olmo_hybrid"}, "layer_types: its full_attention layers norm their output"),
    ],
)
def test_what_we_lack(changes, message, multimodal, tmp_path):
    folder = shutil.copytree(multimodal, tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    changes = changes | {"text_config": config["text_config"] | changes.get("text_config", {})}
    (folder / "config.json").write_text(json.dumps(config | changes))
    refused(folder, "nalanda", message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feature_map": "nala"}, "feature_map='nala'"),
        ({"mixer_options": {"allow_neg_eigval": True}}, "allow_neg_eigval=True"),
        ({"mixer_options": {"norm_write": True}}, "norm_write=True"),
        ({"mixer_options": {"norm_read": True}}, "norm_read=True"),
        (
            {
                "mixer_options": {"qk_norm": "none"},
                "feature_map": "elu1",
                "feature_map_options": {"norm": "sum"},
            },
            "qk_norm='none'",
        ),
        ({"use_gate": False}, "use_gate=False"),
        ({"use_bias": True}, "use_bias=True"),
        ({"conv_size": 0}, "conv_size=0"),
        ({"position_embedding": "sinusoidal"}, "position_embedding='sinusoidal'"),
        ({"scale_embeddings": True}, "scale_embeddings=True"),
        ({"mixer": ["gated_deltanet", "gla"]}, "can become nothing else"),
        ({"mixer": "softmax"}, "not qwen3_5"),
        *(
            (
                {
                    "mixer": ["gated_deltanet", "softmax"],
                    "mixer_options": {"softmax": FULL | options},
                },
                message,
            )
            for options, message in (
                ({"window": 3}, "window=3"),
                ({"gate": "head"}, "gate='head'"),
                ({"gate": None}, "gate=None"),
                ({"qk_norm": False}, "qk_norm=False"),
                ({"conv_size": 2}, "conv_size=2"),
                ({"rope_theta": None}, "rope_theta=None"),
                ({"rope_scaling": LLAMA3}, "rope_scaling={"),
            )
        ),
        (
            {
                "mixer": ["gated_deltanet", "softmax"],
                "expand_v": 2.0,
                "mixer_options": {"softmax": {"qk_norm": True, "gate": "channel"}},
            },
            "value_dim=16 of mixer 'softmax'",
        ),
    ],
)
def test_what_they_lack(fields, message, tmp_path):
    (tmp_path / "ours").mkdir()
    NalandaConfig(**(SIZES | {"feature_map": None} | fields)).save_pretrained(tmp_path / "ours")
    save_file({"x": torch.zeros(1)}, tmp_path / "ours" / "model.safetensors")
    refused(tmp_path / "ours", "qwen3_5", message)


def refused(source, to, message):
    before = set(source.parent.iterdir())
    with pytest.raises(InputError) as caught:
        convert(str(source), str(source.parent / "out"), to)
    assert set(source.parent.iterdir()) == before
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_field_that_is_left_out_has_its_default():
    format = converting.FORMATS["qwen3_5_text"]
    config = format.foreign(NalandaConfig(**SIZES | HYBRID))

    def meaning(config):
        try:
            ours = format.ours(config)
        except InputError as error:
            return str(error)
        names = converting._shapes(ours)
        return ours.to_dict(), [layout.foreign for layout in format.tensors(names, config)]

    for name, field in format.fields.items():
        left_out = {key: value for key, value in config.items() if key != name}
        assert meaning(left_out) == meaning(config | {name: field.default}), name


def test_a_tied_model_whose_config_leaves_a_field_out_is_read(tmp_path):
    """Layouts are made of all names: a layer without any passes for a null layer, which needs each field."""
    settings = SIZES | MODELS["tied"] | {"num_heads": 16, "head_dim": 4}
    settings["mixer_options"] = {"softmax": FULL | {"num_heads": 16, "num_kv_heads": 4}}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(NalandaConfig(**settings))
    model.save_pretrained(tmp_path / "ours")
    convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), "qwen3_5", check=False)

    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("num_attention_heads") == 16
    file.write_text(json.dumps(config))
    convert(str(tmp_path / "theirs"), str(tmp_path / "again"), "nalanda", check=False)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    ids = torch.arange(20)[None]
    assert torch.equal(back(ids).logits, model(ids).logits)


# ------------------------------ the certificate


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["in_proj_qkv", "q_norm", "dt_bias"])
def test_a_wrong_tensor_leaves_nothing(broken, monkeypatch, tmp_path):
    """One number of the target is changed after it was written."""
    ours, load = write(tmp_path / "ours", HYBRID), certificate.compute

    def compute(folder, *sample):
        for file in folder.glob("*.safetensors") if folder.name == ".tmp-out" else ():
            tensors = load_file(file)
            name = next(name for name in tensors if broken in name)
            tensors[name].view(-1)[0] += 3
            save_file(tensors, file, metadata={"format": "pt"})
        return load(folder, *sample)

    monkeypatch.setattr(certificate, "compute", compute)
    command = ["convert", str(ours), str(tmp_path / "out"), "--to", "qwen3_5"]
    run = typer.testing.CliRunner().invoke(nalanda_cli.app, command)
    assert isinstance(run.exception, InputError)
    assert "source and target differ: log-probabilities by" in str(run.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    run = typer.testing.CliRunner().invoke(nalanda_cli.app, [*command, "--no-check"])
    assert run.exit_code == 0
    assert rows(tmp_path / "out") == {
        "source and target": "not compared: asked for with --no-check"
    }


@pytest.mark.slow
def test_a_cache_that_goes_wrong_is_found(monkeypatch, tmp_path):
    """Greedy tokens may differ where two are about equal, and nowhere else."""
    ours, load = write(tmp_path / "ours", {}), certificate.compute

    def compute(folder, *sample):
        found = load(folder, *sample)
        if folder.name == ".tmp-out":
            found.continuation[5] += 1
        else:
            found.margins[5] = margin
        return found

    monkeypatch.setattr(certificate, "compute", compute)
    margin = 1e-5
    out = convert(str(ours), str(tmp_path / "out"), "qwen3_5")
    assert rows(out)["greedy tokens equal"].startswith("5 of 32")
    shutil.rmtree(out)
    margin = 1.0
    refused(ours, "qwen3_5", "greedy token 6 of 32 with a cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("config.json", '"eos_token_id": 2', '"eos_token_id": 3', "config.eos_token_id is 2 and 3"),
        pytest.param(
            "config.json",
            '"bos_token_id": 1',
            '"bos_token_id": 3',
            "config.bos_token_id is 1 and 3",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "config.json",
            '"pad_token_id": null',
            '"pad_token_id": 1',
            "config.pad_token_id is None and 1",
            marks=pytest.mark.slow,
        ),
        (
            "tokenizer_config.json",
            '"eos_token": "<|endoftext|>"',
            '"eos_token": "<call>"',
            "tokenizer.eos_token",
        ),
        (
            "tokenizer.json",
            '"lstrip": true',
            '"lstrip": false',
            "cut 'a <call> b' into other tokens",
        ),
    ],
)
def test_a_wrong_token_leaves_nothing(
    file, right, wrong, message, tokenizer, monkeypatch, tmp_path
):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([AddedToken("<call>", lstrip=True)])
    ours, load = write(tmp_path / "ours", {"vocab_size": len(tokenizer)}), certificate.compute
    tokenizer.save_pretrained(ours)

    def compute(folder, *sample):
        if folder.name == ".tmp-out":
            text = (folder / file).read_text()
            assert right in text
            (folder / file).write_text(text.replace(right, wrong))
        return load(folder, *sample)

    monkeypatch.setattr(certificate, "compute", compute)
    refused(ours, "qwen3_5", message)


def test_text_of_the_tokenizer_is_compared(tokenizer, tmp_path):
    ours = write(tmp_path / "ours", {"vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(ours)
    theirs = convert(str(ours), str(tmp_path / "theirs"), "qwen3_5")
    assert "English" in rows(theirs)["compared on"]
    model, _ = load_model(str(theirs), device="cpu")  # although flash-linear-attention is installed
    assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, eos_token_id=None).shape == (
        1,
        7,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_pretraining_continues_from_an_import_and_goes_back(recipe, tokenizer, tmp_path):
    """A Qwen3.5 of random weights with a tokenizer of its own: in, ten steps, and out again."""
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    delta |= {"linear_value_head_dim": 8, "full_attention_interval": 4, "layer_types": None}
    full = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    published = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**sizes, **delta, **full))
    published.save_pretrained(tmp_path / "published")
    tokenizer.save_pretrained(tmp_path / "published")
    ours = convert(str(tmp_path / "published"), str(tmp_path / "ours"))

    settings = (
        f"model={{init_from: {ours}}}",
        f"tokenizer={ours}",
        "train.steps=10",
        "validation.every=0",
    )
    run = train(configured(recipe, tmp_path / "run", *settings))
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert losses[0] == pytest.approx(math.log(260), abs=0.1)  # that of the random weights
    assert losses[-1] < losses[0] - 0.5

    back = convert(str(run / "final"), str(tmp_path / "back"), "qwen3_5")
    assert rows(back)["greedy tokens equal"].startswith("32 of 32")
    assert "English" in rows(back)["compared on"]
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "published", back)
    )
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}  # training takes the tokenizer's
    assert changed <= tokens | {"rope_parameters"}  # which names an image's axes too
    assert read(back).keys() == read(tmp_path / "published").keys()


# ------------------------------ mlx-lm


# Rounding errors grow in a random model with narrow heads or large weights.
TAME = {"head_dim": 32, "hidden_size": 64, "initializer_range": 0.02, "vocab_size": 272}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "dtype", "stored"),
    [
        ("float32", None, "float32"),
        pytest.param("bfloat16", None, "bfloat16", marks=pytest.mark.slow),
        pytest.param("bfloat16", "fp32", "float32", marks=pytest.mark.slow),
        pytest.param("float32", "fp16", "float16", marks=pytest.mark.slow),
        ("float32", "q8", "uint32"),
    ],
)
def test_mlx_computes_the_same(source, dtype, stored, tokenizer, tmp_path, capfd):
    mlx_lm = pytest.importorskip("mlx_lm")
    write(tmp_path / "ours", (HYBRID if dtype else {}) | TAME, getattr(torch, source))
    tokenizer.save_pretrained(tmp_path / "ours")
    out = convert(str(tmp_path / "ours"), str(tmp_path / "out"), "mlx", dtype=dtype)
    found = rows(out)
    lines = {k: found[k] for k in found if k.startswith("largest difference of log-probabilities")}
    assert len(lines) == (2 if dtype in ("fp16", "q8") else 1)
    for line, share in zip(lines.values(), (0.1, 1), strict=False):
        difference, limit = (float(x.split(" ")[0]) for x in line.split(", tolerance "))
        assert difference < limit * share
    assert found["greedy tokens equal"].startswith("32 of 32")
    assert ", mlx-lm 0" in found["versions"]
    assert capfd.readouterr().out == ""
    model, loaded = mlx_lm.load(str(out))
    assert loaded.encode("the") == tokenizer.encode("the")
    assert str(model.layers[0].mlp.up_proj.weight.dtype) == f"mlx.core.{stored}"
    assert str(model.layers[0].linear_attn.dt_bias.dtype) == "mlx.core.float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out"]
    assert not [path for path in out.iterdir() if path.is_dir()]


@pytest.mark.sampled
@pytest.mark.parametrize("inner", ["", pytest.param("rounded", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "broken", "change"),
    [
        ("bf16", "0.linear_attn.norm.weight", lambda x: x.lerp(torch.ones_like(x), 0.1)),
        ("q8", "0.linear_attn.A_log", lambda x: x + 0.1),
    ],
)
def test_a_wrong_tensor_of_mlx_leaves_nothing(
    dtype, broken, change, inner, tokenizer, tmp_path, monkeypatch
):
    """In the exact model, which is rounded, or in the rounded one alone."""
    pytest.importorskip("mlx_lm")
    write(tmp_path / "ours", TAME | {"initializer_range": 0.1})
    tokenizer.save_pretrained(tmp_path / "ours")
    right = mlx._save

    def wrong(model, config, folder):
        right(model, config, folder)
        if folder.name == (inner or "exact"):
            file = folder / "model.safetensors"
            tensors = load_file(file)
            (name,) = (name for name in tensors if name.endswith(broken))
            save_file(tensors | {name: change(tensors[name])}, file, metadata={"format": "mlx"})

    monkeypatch.setattr(mlx, "_save", wrong)
    said = f"{broken} is not the source's, rounded to {dtype}" if inner else "log-probabilities by"
    with pytest.raises(InputError, match=re.escape(said)):
        convert(str(tmp_path / "ours"), str(tmp_path / "out"), "mlx", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "finer"), [("q8", "fp16"), ("bf16", "fp32")])
def test_rounding_that_moves_too_much_names_a_finer_dtype(
    dtype, finer, tokenizer, tmp_path, monkeypatch
):
    pytest.importorskip("mlx_lm")
    write(tmp_path / "ours", TAME)
    tokenizer.save_pretrained(tmp_path / "ours")
    monkeypatch.setitem(certificate.ROUNDED, dtype, 1e-6)
    said = (
        rf"^rounding to {dtype} moves log-probabilities by \S+, more than .*: take --dtype {finer}$"
    )
    with pytest.raises(InputError, match=said):
        convert(str(tmp_path / "ours"), str(tmp_path / "out"), "mlx", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_mlx_ends_a_text_where_the_model_does(tokenizer, tmp_path, monkeypatch):
    """A chat model's generation config often names other ids than its config."""
    mlx_lm = pytest.importorskip("mlx_lm")
    ours, load = write(tmp_path / "ours", TAME), certificate.compute
    tokenizer.save_pretrained(ours)
    (ours / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    out = convert(str(ours), str(tmp_path / "mlx"), "mlx")
    assert mlx_lm.load(str(out))[1].eos_token_ids >= {2, 5}

    def compute(folder, *sample):
        if folder.name == ".tmp-out":
            (folder / "generation_config.json").write_text('{"eos_token_id": [2]}')
        return load(folder, *sample)

    monkeypatch.setattr(certificate, "compute", compute)
    refused(ours, "mlx", "the list of ids that end a text is [5, 2] and [2]")


def test_a_folder_of_mlx_is_a_target_only(tokenizer, tmp_path):
    pytest.importorskip("mlx_lm")
    write(tmp_path / "ours", TAME)
    tokenizer.save_pretrained(tmp_path / "ours")
    mlx_folder = convert(str(tmp_path / "ours"), str(tmp_path / "mlx"), "mlx", check=False)
    said = (
        "mlx: a folder of mlx-lm, which is a target only; convert the model that it was made from"
    )
    with pytest.raises(InputError, match=said):
        convert(str(mlx_folder), str(tmp_path / "back"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlx", "ours"]


@pytest.mark.parametrize(
    ("fields", "dtype", "message"),
    [
        ({}, "q4", "--dtype q4: unknown; choose fp32, bf16, fp16, q8"),
        (
            HYBRID | {"mixer": ["softmax", *["gated_deltanet"] * 3]},
            "fp32",
            "softmax must be every n-th layer",
        ),
        ({"feature_map": "nala"}, "fp32", "feature_map='nala'"),
        ({}, None, "pip install 'nalanda[mlx]'"),
    ],
)
def test_what_mlx_lacks(fields, dtype, message, tokenizer, tmp_path, monkeypatch):
    write(tmp_path / "ours", fields | {"vocab_size": 272})
    tokenizer.save_pretrained(tmp_path / "ours")
    if dtype:
        pytest.importorskip("mlx_lm")
    else:
        monkeypatch.setitem(sys.modules, "mlx_lm", None)
    command = ["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "mlx"]
    command += ["--dtype", dtype] if dtype else []
    run = typer.testing.CliRunner().invoke(nalanda_cli.app, command)
    assert isinstance(run.exception, InputError)
    assert run.exception.exit_code == 2
    assert message in str(run.exception)
    assert "\n" not in str(run.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
