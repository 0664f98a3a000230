"""Weights in int8: every mixer against float64, saved and loaded, beside kernels and without."""

import pytest
import torch
from nalanda_kernels import use_backend
from tiny_models import build, ids, llama, logits, main_rows, save
from torch import nn
from transformers import AutoModelForCausalLM

from nalanda.inference.load import load_model, number_format
from nalanda.model import Int8Config
from nalanda.model import int8 as module
from nalanda.model.int8 import Int8Embedding, Int8Linear, quantize_rows
from nalanda.testing import check_model

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(autouse=True)
def _small_matrices(monkeypatch):
    """Narrow layers are rounded too, so that a mixer's every layer is tried."""
    monkeypatch.setattr(module, "LEAST_ROWS", 1)


def rounded(model, path, **options):
    """The model as it is loaded from its folder, with weights in int8."""
    model.save_pretrained(path)
    options = {"quantization_config": Int8Config()} | options
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def in_float64(narrow, wide):
    """`wide` in float64 with the rounded weights of `narrow`."""
    wide.double()
    for name, layer in narrow.named_modules():
        if isinstance(layer, Int8Linear | Int8Embedding):
            weight = layer.weight.double() * layer.weight_scale.double()[:, None]
            wide.get_submodule(name).weight.data.copy_(weight)
    return wide


@pytest.mark.sampled
@pytest.mark.parametrize("options", main_rows())
@torch.no_grad()
def test_a_model_computes_with_the_rounded_weights(options, tmp_path):
    wide = build(**options, dtype=torch.float32)
    narrow = rounded(wide, tmp_path)
    assert {type(narrow.lm_head), type(narrow.model.embed_tokens)} == {Int8Linear, Int8Embedding}
    tokens = ids(2, 33)

    expected = logits(in_float64(narrow, wide), tokens)
    spread = expected.std()
    read = logits(narrow, tokens)
    assert bool(((read - expected).abs() < 5e-3 * spread).all())
    with use_backend("torch"):
        in_torch = logits(narrow, tokens)
    assert bool(((in_torch - expected).abs() < 5e-3 * spread).all())

    # A token at a time by the program of `generate`, in a batch.
    out = narrow.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        **GREEDY,
        return_dict_in_generate=True,
        output_logits=True,
    )
    whole = logits(narrow, out.sequences)[:, 32:-1]
    assert bool(((torch.stack(out.logits, 1) - whole).abs() < 5e-3 * spread).all())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_saved_folder_loads_the_same(tied, dtype, tmp_path):
    model = build(dtype=torch.float32, tie_word_embeddings=tied)
    narrow = rounded(model, tmp_path / "wide", dtype=dtype)
    narrow.save_pretrained(tmp_path / "narrow")
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "narrow", dtype=dtype, output_loading_info=True
    )
    assert not any(report.values())
    assert narrow.dtype == again.dtype == dtype
    assert torch.equal(logits(narrow, ids(1, 20)), logits(again.eval(), ids(1, 20)))
    shared = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    # A cast changes no scale.
    again.to(torch.bfloat16).to(dtype)
    assert torch.equal(again.lm_head.weight_scale, narrow.lm_head.weight_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_of_a_rounding(dtype):
    torch.manual_seed(0)
    # In fp16 the scales of the first rows are its least numbers.
    ends, least = ((-6, -1), 2.0**-24) if dtype == torch.float16 else ((-6, 6), 0)
    weight = (torch.randn(9, 100) * torch.logspace(*ends, 9)[:, None]).to(dtype)
    weight[4] = 0
    codes, scale = quantize_rows(weight)
    error = (codes.double() * scale.double()[:, None] - weight.double()).abs()
    # Half a code, and a scale of 8 bits whose largest code may be cut.
    largest = weight.double().abs().amax(1, keepdim=True)
    assert bool((error <= 0.76 * largest / 127 + least / 2).all())
    assert torch.equal(scale.bfloat16().to(dtype), scale)


@torch.no_grad()
def test_models_of_others(tmp_path):
    wide = llama()
    narrow = rounded(wide, tmp_path)
    assert isinstance(narrow.lm_head, Int8Linear)
    expected = logits(in_float64(narrow, wide), ids(1, 9))
    torch.testing.assert_close(logits(narrow, ids(1, 9)).double(), expected, rtol=0, atol=1e-3)


def test_gradients_reach_what_is_trained_beside_it(tmp_path):
    narrow = rounded(build(dtype=torch.float32), tmp_path)
    x = torch.randn(1, 5, 24, requires_grad=True)
    narrow(inputs_embeds=x, use_cache=False).logits.sum().backward()
    assert bool(x.grad.abs().sum() > 0)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert logits(narrow, ids(1, 5)).dtype == torch.bfloat16


def test_chosen_modules_stay(tmp_path):
    wide = build(dtype=torch.float32, tie_word_embeddings=False)
    kept = Int8Config(modules_to_not_convert=["lm_head"])
    narrow = rounded(wide, tmp_path, quantization_config=kept)
    assert type(narrow.lm_head) is nn.Linear
    with pytest.raises(ValueError, match="has no module 'head'"):
        rounded(wide, tmp_path, quantization_config=Int8Config(["head"]))


def test_tied_matrices_are_converted_together(tmp_path):
    wide = build(dtype=torch.float32, tie_word_embeddings=True)
    both = Int8Config(["lm_head", "model.embed_tokens"])
    assert type(rounded(wide, tmp_path / "both", quantization_config=both).lm_head) is nn.Linear
    with pytest.raises(ValueError, match="are tied; name both or none"):
        rounded(wide, tmp_path / "one", quantization_config=Int8Config(["lm_head"]))


def test_sums_of_codes_stay_in_the_range_of_fp16():
    layer = nn.Linear(1024, 64, bias=False)
    nn.init.constant_(layer.weight, 0.05)
    narrow = Int8Linear(layer)
    narrow.weight.data, narrow.weight_scale.data = quantize_rows(layer.weight.data)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        y = narrow(torch.ones(2, 1024))
    torch.testing.assert_close(y.float(), torch.full((2, 64), 51.2), rtol=1e-2, atol=0)


def test_an_id_that_the_table_lacks_is_refused():
    table = Int8Embedding(nn.Embedding(8, 4))
    with pytest.raises(IndexError):
        table(torch.tensor([-1]))


def test_loading_by_name(tokenizer, tmp_path):
    name = save(tokenizer, tmp_path, mixer="gated_deltanet")
    model, _ = load_model(name, device="cpu", weights="int8", dtype="bf16")
    assert number_format(model) == "int8 and bfloat16"
    assert number_format(load_model(name, device="cpu")[0]) == "float32"


def test_properties_hold(tmp_path):
    """As `nalanda check` finds them, in float64; half precision moves weights, but no codes."""
    narrow = rounded(build(dtype=torch.float32), tmp_path)
    rows = check_model(narrow, only=["causal", "token_by_token", "half_precision"])
    assert {row.verdict for row in rows} == {"holds", "rounding"}
