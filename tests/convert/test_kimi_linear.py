"""KimiLinear's models of dense layers of KDA: conversion both ways and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, KimiLinearConfig, KimiLinearForCausalLM

from nalanda import NalandaConfig
from nalanda.common.errors import InputError
from nalanda.convert.convert import convert

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"initializer_range": 0.2}
OURS = {"mixer": "kda", "num_heads": 3, "head_dim": 8, "mixer_options": {"gate_bias": False}}
# As Kimi-Linear-48B-A3B has them: layers are counted from 1, all of the GLUs but the first are experts.
PUBLISHED = {
    "model_type": "kimi_linear",
    **{"num_hidden_layers": 4, "num_experts": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1},
    "linear_attn_config": {
        **{"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
        **{"head_dim": 8, "num_heads": 3, "short_conv_kernel_size": 4},
    },
}


def read(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_there_and_back(dtype, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        NalandaConfig(**SIZES, **OURS, conv_size=3, norm_eps=1e-3)
    )
    model.to(dtype).save_pretrained(tmp_path / "ours")
    theirs = convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), "kimi_linear")
    card = (theirs / "README.md").read_text()
    assert "greedy tokens equal | 32 of 32" in card
    model, report = AutoModelForCausalLM.from_pretrained(theirs, output_loading_info=True)
    assert isinstance(model, KimiLinearForCausalLM)
    assert not any(report.values())
    assert model.config.layer_types == ["linear_attention", "linear_attention", "full_attention"]
    back = convert(str(theirs), str(tmp_path / "back"), "nalanda", check=False)
    assert same(read(back), read(tmp_path / "ours"))
    before, after = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "ours", back))
    assert {name for name in before if before[name] != after[name]} <= {
        "feature_map",
        "use_gate",
    }  # defaults


def test_what_transformers_saves(tmp_path):
    """Its config has another form, and its dense GLUs the names of experts."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    torch.manual_seed(0)
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    sizes = {
        "linear_head_dim": 8,
        "linear_num_heads": 3,
        "num_attention_heads": 2,
        "pad_token_id": 0,
    } | latent
    layers = {"num_hidden_layers": 3, "layer_types": kinds, "mlp_layer_types": ["dense"] * 3}
    model = KimiLinearForCausalLM(KimiLinearConfig(**(SIZES | sizes | layers)))
    model.save_pretrained(tmp_path / "attention")
    assert "full_attn_layers=[3]" in refused(tmp_path / "attention")
    with torch.no_grad():
        last = model.model.layers[2]
        for weight in (last.self_attn.o_proj.weight, last.mlp.down_proj.weight):
            weight.zero_()
    model.save_pretrained(tmp_path / "theirs")
    ours = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert "greedy tokens equal | 32 of 32" in (ours / "README.md").read_text()
    assert NalandaConfig.from_pretrained(ours).layer_mixers == ["kda", "kda"]


@pytest.mark.slow
def test_mlx_computes_the_same(tokenizer, tmp_path):
    mlx_lm = pytest.importorskip("mlx_lm")
    torch.manual_seed(0)
    config = NalandaConfig(**(SIZES | OURS | {"vocab_size": 272}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    out = convert(str(tmp_path / "ours"), str(tmp_path / "out"), "mlx")
    card = (out / "README.md").read_text()
    assert "greedy tokens equal | 32 of 32" in card
    assert ", mlx-lm 0" in card
    assert len(mlx_lm.load(str(out))[0].layers) == 3


def refused(source, to=None):
    with pytest.raises(InputError) as caught:
        convert(str(source), str(source.parent / "out"), to)
    assert not (source.parent / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "full_attn_layers=[4]"),
        ({"layer_types": ["linear_attention"] * 4}, "num_experts=8"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types names 3 layers"),
        (
            {"layer_types": ["linear_attention"] * 4, "mlp_layer_types": ["sparse"] * 4},
            "num_experts=8",
        ),
        (
            {"linear_attn_config": {"full_attn_layers": [], "gate_lower_bound": -5.0}},
            "gate_lower_bound=-5.0",
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"some_new_option": 3}, "some_new_option=3"),
    ],
)
def test_what_we_lack(changes, message, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(PUBLISHED | changes))
    save_file({"x": torch.zeros(1)}, tmp_path / "theirs" / "model.safetensors")
    assert message in refused(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer_options": {}}, "gate_bias=True"),
        ({"mixer_options": {"gate_bias": False, "num_v_heads": 6}}, "num_v_heads=6"),
        (
            {"mixer_options": {"gate_bias": False, "allow_neg_eigval": True}},
            "allow_neg_eigval=True",
        ),
        ({"expand_v": 2.0}, "value_dim=16"),
        ({"conv_size": 0}, "conv_size=0"),
        ({"feature_map": "nala"}, "feature_map='nala'"),
        ({"use_bias": True}, "use_bias=True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        (
            {"mixer": ["kda", "softmax"], "mixer_options": {}},
            "can become nothing else: not kimi_linear",
        ),
    ],
)
def test_what_they_lack(changes, message, tmp_path):
    NalandaConfig(**(SIZES | OURS | changes)).save_pretrained(tmp_path / "ours")
    save_file({"x": torch.zeros(1)}, tmp_path / "ours" / "model.safetensors")
    assert message in refused(tmp_path / "ours", "kimi_linear")
