"""`nalanda check` finds planted leaks, and no others."""

import functools
import importlib
import json
import math
import sys

import pytest
import torch
from tiny_models import build
from transformers import AutoConfig, DynamicCache, LlamaConfig, LlamaForCausalLM

from nalanda.check.command import against
from nalanda.check.page import findings_page, print_findings
from nalanda.common.errors import InputError
from nalanda.model.cache import CACHE, cache_of
from nalanda.testing import properties
from nalanda.testing.properties import PROPERTIES
from nalanda.testing.subject import Subject, around, kinds_of_layers, make
from nalanda.testing.verdicts import (
    Finding,
    check,
    judge_half_precision,
    judge_property,
    relative_difference,
)
from nalanda_cli import main

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
ALLOWED = 1e-4


class Leaky(LlamaForCausalLM):
    """A Llama whose inputs and outputs pass through a plant."""

    plant = None

    @functools.wraps(LlamaForCausalLM.forward)  # with its signature
    def forward(self, input_ids=None, **inputs):
        return type(self).plant(self, super().forward, {"input_ids": input_ids, **inputs})


def on_inputs(change):
    def plant(model, forward, inputs):
        change(inputs)
        return forward(**inputs)

    return plant


def on_outputs(change):
    def plant(model, forward, inputs):
        out = forward(**inputs)
        change(model, inputs, out)
        return out

    return plant


def scaled(when):
    """Logits are 1 % larger `when(model, inputs)`."""

    def change(model, inputs, out):
        if when(model, inputs):
            out.logits = out.logits * 1.01

    return on_outputs(change)


def drops(*names):
    return on_inputs(lambda inputs: [inputs.pop(name, None) for name in names])


def sees_later_tokens(model, inputs, out):
    out.logits = out.logits + 0.01 * out.logits.roll(-1, 1)


def sees_other_rows(model, inputs, out):
    out.logits = out.logits + 0.01 * out.logits.mean(0)


def counts_its_rows(model, inputs, out):
    out.logits = out.logits * (1 + 0.01 * torch.arange(len(out.logits)))[:, None, None]


def forgets_in_pieces(inputs):
    if inputs["input_ids"].shape[1] > 1:
        inputs[CACHE] = None


def remembers_its_last_cache(model, forward, inputs):
    # The cache of a class, as a module that keeps its state itself has it.
    if inputs.get(CACHE) is not None:
        inputs[CACHE] = type(model).kept
    out = forward(**inputs)
    type(model).kept = cache_of(out)
    return out


def keeps(method):
    """A cache whose method does nothing."""

    def change(model, inputs, out):
        if out.get(CACHE) is not None:
            setattr(out[CACHE], method, _nothing)

    return on_outputs(change)


def _nothing(*args):
    pass


def wrong_where_loaded(model, inputs, out):
    # A buffer that is not saved.
    out.logits = out.logits * getattr(model, "factor", 1.0)


def mean_over_all(model, inputs, out):
    if inputs.get("labels") is not None:
        real = (inputs["labels"][:, 1:] != -100).float().mean()
        out.loss = out.loss * real


def larger_where_masked(model, inputs, out):
    if out.loss is not None and inputs.get("attention_mask") is not None:
        out.loss = out.loss * 1.01


class Losing(DynamicCache):
    """A cache whose copy on disk is empty."""

    def __reduce__(self):
        return DynamicCache, ()


def loses_its_cache(model, inputs, out):
    if out.get(CACHE) is not None:
        out[CACHE].__class__ = Losing


def other_tokens(when):
    """The next token is the one after, `when(model, inputs)`."""

    def change(model, inputs, out):
        if when(model, inputs):
            out.logits = out.logits.roll(1, -1)

    return on_outputs(change)


def steps(model, inputs):
    return inputs.get(CACHE) and inputs["input_ids"].shape[1] == 1


def checks_guesses(model, inputs):
    cache = inputs.get(CACHE)
    return cache and cache.get_seq_length() and inputs["input_ids"].shape[1] > 1


def is_padded(model, inputs):
    mask = inputs.get("attention_mask")
    return mask is not None and bool((mask == 0).any())


def has(name):
    return lambda model, inputs: inputs.get(name) is not None


PLANTS = {
    "causal": on_outputs(sees_later_tokens),
    "batch_is_rows": on_outputs(sees_other_rows),
    "order_of_rows": on_outputs(counts_its_rows),
    "left_padded_is_alone": drops("attention_mask", "position_ids"),
    "right_padded_is_alone": scaled(has("attention_mask")),
    "packed_by_positions": drops("position_ids"),
    "packed_by_lengths": scaled(has("cu_seq_lens_q")),
    "token_by_token": scaled(steps),
    "piece_by_piece": on_inputs(forgets_in_pieces),
    "copied_cache": remembers_its_last_cache,
    "reordered_cache": keeps("reorder_cache"),
    "cropped_cache": keeps("crop"),
    "saved_cache": on_outputs(loses_its_cache),
    "greedy_search": other_tokens(steps),
    "beam_search": other_tokens(steps),
    "assisted_search": other_tokens(checks_guesses),
    "padded_greedy_search": other_tokens(is_padded),
    "loss_of_labels": on_outputs(mean_over_all),
    "loss_of_parts": drops("num_items_in_batch"),
    "gradient_checkpointing": scaled(lambda model, inputs: model.is_gradient_checkpointing),
    "padded_gradients": on_outputs(larger_where_masked),
    "saved_is_loaded": on_outputs(wrong_where_loaded),
    "exported_is_eager": scaled(lambda model, inputs: torch.compiler.is_exporting()),
    "compiled_is_eager": scaled(lambda model, inputs: torch.compiler.is_compiling()),
    "tensor_parallel_is_whole": scaled(lambda model, inputs: torch.distributed.is_initialized()),
}


def subject(kind=LlamaForCausalLM, seed=0, **fields):
    torch.manual_seed(seed)
    config = LlamaConfig(**(SMALL | fields))
    model = kind(config).double().eval()
    return Subject("llama", model, torch.randint(3, 64, (2, 70)), "")


SLOW = {"exported_is_eager", "compiled_is_eager", "tensor_parallel_is_whole"}


def planted(plant):
    kind = type("Planted", (Leaky,), {"plant": staticmethod(plant)})
    return subject(kind, num_hidden_layers=1)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PLANTS]
)
def test_a_planted_leak_is_found(name, monkeypatch):
    # A compiler for CPUs takes half a minute, and the plant needs none.
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
    leaky = planted(PLANTS[name])
    leaky.model.factor = 1.01
    row = judge_property(leaky, getattr(properties, name), ALLOWED)
    assert row.verdict == "differs", row


@pytest.mark.parametrize(
    ("leak", "verdict"), [(1e-12, "holds"), (1e-7, "rounding"), (1e-3, "differs")]
)
def test_the_verdict_follows_the_size_of_a_leak(leak, verdict):
    def change(model, inputs, out):
        out.logits = out.logits * (1 + leak * (len(out.logits) > 1))

    row = judge_property(planted(on_outputs(change)), properties.batch_is_rows, ALLOWED)
    assert row.verdict == verdict
    assert row.difference == pytest.approx(leak, rel=0.1)


def test_numbers_that_are_nan_where_rows_are_padded_have_a_place():
    def change(model, inputs, out):
        if is_padded(model, inputs):
            out.logits[0, 33] = torch.nan

    leaky = planted(on_outputs(change))
    row = judge_property(leaky, properties.left_padded_is_alone, ALLOWED)
    assert (row.verdict, row.difference) == ("differs", math.inf)
    assert row.place == "row 0, token 3, layer 0 (llama)"


def test_padding_that_is_nan_in_float64_alone_is_judged_in_fp32():
    """Eager attention has its softmax in fp32, where the least number of float64 is −∞."""
    eager = around(subject(attn_implementation="eager").model)
    assert eager.source.startswith("model = model.float()")
    row = judge_property(eager, properties.left_padded_is_alone, ALLOWED)
    assert row.verdict in ("holds", "rounding"), row

    def change(model, inputs, out):
        if is_padded(model, inputs):
            out.logits[0, 33] = torch.nan

    broken = around(planted(on_outputs(change)).model)
    assert broken.model.dtype == torch.float64
    row = judge_property(broken, properties.left_padded_is_alone, ALLOWED)
    assert row.verdict == "differs"


def test_lengths_that_are_taken_and_not_used_are_found():
    class Deaf(LlamaForCausalLM):
        def forward(self, input_ids=None, cu_seqlens=None, **inputs):
            return super().forward(input_ids, **inputs)

    row = judge_property(subject(Deaf), properties.packed_by_cu_seqlens, ALLOWED)
    assert row.verdict == "differs"
    assert row.place.endswith("layer 0 (llama)")


def test_a_leak_of_a_later_layer_names_it_and_leaves_the_model_whole():
    deep = subject(num_hidden_layers=5)
    layer = deep.model.model.layers[3].self_attn
    layer.register_forward_hook(lambda module, inputs, out: (out[0] + out[0].mean(0), *out[1:]))
    row = judge_property(deep, properties.batch_is_rows, ALLOWED)
    assert row.place.endswith(", layer 3 (llama)")
    assert len(deep.model.model.layers) == 5


class Experts(torch.nn.Module):
    """Four of a layer, in a list that is longer than that of the layers."""

    def __init__(self, kind):
        super().__init__()
        self.experts = torch.nn.ModuleList(kind() for _ in range(4))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Mean(torch.nn.Module):
    def forward(self, x):
        return x + x.mean(0)


def test_a_list_of_experts_is_none_of_layers():
    mixture = subject()
    for layer, kind in zip(mixture.model.model.layers, (torch.nn.Tanh, Mean), strict=True):
        layer.mlp = Experts(kind)
    row = judge_property(mixture, properties.batch_is_rows, ALLOWED)
    assert row.place.endswith(", layer 1 (llama)")


def test_the_page_says_what_differs_where_and_how_to_see_it():
    leaky = planted(on_outputs(sees_other_rows))
    row = judge_property(leaky, properties.batch_is_rows, ALLOWED)
    page = findings_page(leaky, [row])
    assert "1 of 1 properties differ or fail" in page
    assert 'href="#batch_is_rows"' in page
    assert f"the first at {row.place}" in page
    assert "def batch_is_rows(model, ids):" in page


def test_brackets_of_an_error_are_printed(capsys):
    row = Finding("causal", "", "fails", note="[batch, length] and [/INST]")
    print_findings(subject(), [row])
    assert row.note in capsys.readouterr().out


def test_an_error_is_told_apart_from_a_door_that_is_missing():
    def raises(error):
        def change(inputs):
            if inputs.get(CACHE) is not None:
                raise error

        return planted(on_inputs(change))

    for error, verdict in [
        (AttributeError("in the model"), "fails"),
        (ValueError("no"), "refused"),
        (TypeError("got an unexpected keyword argument 'use_cache'"), "not offered"),
        (TypeError("Block.forward() got an unexpected keyword argument 'x'"), "fails"),
    ]:
        row = judge_property(raises(error), properties.piece_by_piece, ALLOWED)
        assert (row.verdict, row.note) == (verdict, f"{type(error).__name__}: {error}")

    no_cache = on_inputs(lambda inputs: inputs.update(use_cache=False))
    row = judge_property(planted(no_cache), properties.reordered_cache, ALLOWED)
    assert row.verdict == "not offered"


def test_a_tied_head_that_is_saved_alone_is_found():
    class Untied(Leaky):
        plant = staticmethod(on_inputs(lambda inputs: None))

        def save_pretrained(self, folder):
            super().save_pretrained(folder)
            self.config.tie_word_embeddings = False
            self.config.save_pretrained(folder)
            self.config.tie_word_embeddings = True

    row = judge_property(
        subject(Untied, tie_word_embeddings=True), properties.tied_stays_tied, ALLOWED
    )
    assert row.verdict == "differs"


def test_a_coarse_half_precision_is_found():
    def is_half(model, inputs):
        return model.dtype == torch.bfloat16

    near, far = (
        judge_half_precision(planted(plant)) for plant in (scaled(is_half), other_tokens(is_half))
    )
    assert near.verdict == "rounding"
    assert near.note.endswith(" × its rounding of the weights")
    assert far.verdict == "differs"
    assert far.reason.startswith("row ")
    assert far.reason.endswith(" × its rounding of the weights")
    assert "def half_precision(model, ids):" in far.script


def test_dropout_is_no_difference_of_checkpointing():
    row = judge_property(subject(attention_dropout=0.5), properties.gradient_checkpointing, ALLOWED)
    assert row.verdict == "holds"


def test_a_head_of_zeros_is_judged():
    headless = subject()
    torch.nn.init.zeros_(headless.model.lm_head.weight)
    rows = [*check(headless, [properties.causal, properties.half_precision])]
    assert [(row.verdict, row.reason) for row in rows] == [("holds", ""), ("holds", "")]


def test_a_model_of_nan_is_refused():
    broken = subject().model
    torch.nn.init.constant_(broken.lm_head.weight[5], float("nan"))
    with pytest.raises(InputError, match="LlamaForCausalLM: its logits are NaN or infinite"):
        around(broken)


@pytest.mark.slow
def test_a_llama_has_every_property():
    rows = {row.name: row for row in check(subject())}
    wrong = {
        row.name: row.verdict for row in rows.values() if row.verdict not in ("holds", "rounding")
    }
    assert wrong == {"packed by cu seqlens": "not offered"}
    assert len(rows) == len(PROPERTIES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
def test_no_seed_of_a_llama_raises_a_false_alarm(seed):
    # An exported program does not depend on the weights.
    chosen = [each for each in PROPERTIES if each is not properties.exported_is_eager]
    verdicts = {row.verdict for row in check(subject(seed=seed), chosen)}
    assert verdicts <= {"holds", "rounding", "not offered"}


@pytest.mark.slow
def test_a_llama_of_two_processes_is_whole():
    row = judge_property(subject(), properties.tensor_parallel_is_whole, ALLOWED)
    assert row.verdict == "holds"


def test_every_property_has_a_planted_leak():
    apart = {"packed_by_cu_seqlens", "tied_stays_tied", "half_precision"}
    names = {each.__name__ for each in [*PROPERTIES, *properties.OPTIONAL]}
    assert names == PLANTS.keys() | apart


# ------------------------------ the command

ONE = ["--only", "causal", "--only", "packed by positions"]
TINY = ["hidden_size=32", "intermediate_size=48", "num_attention_heads=2", "num_key_value_heads=2"]


def run_check(*words):
    """The exit code of `nalanda check`."""
    try:
        main(["check", *words])
    except SystemExit as stop:
        return stop.code
    return 0


def test_the_command_prints_json_and_a_page(tmp_path, capsys):
    page = tmp_path / "new" / "check.html"
    assert run_check("llama", *TINY, *ONE, "--json", "--html", str(page)) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in record["properties"]] == ["holds", "holds"]
    assert "LlamaForCausalLM" in record["model"]
    assert "packed by positions" in page.read_text()


def test_a_run_of_ours_is_checked_as_it_is(tmp_path, capsys):
    model = build("gated_deltanet", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert run_check(str(tmp_path), "--only", "half precision", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in record["properties"]] == ["half precision"]
    assert f"{model.num_parameters():,} parameters" in record["model"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_model"], "no_such_model"),
        (["."], ". holds no config.json"),
        pytest.param(["t5"], "t5: the model cannot be made", marks=pytest.mark.slow),
        (["bert"], "bert: the model cannot be made (an encoder, whose tokens see later ones"),
        (["lfm2_moe"], "lfm2_moe: the model cannot be made"),
        (["llama", "--only", "casual"], "--only casual: no such property; did you mean causal"),
        (["llama", *TINY, *ONE, "--against", "jax"], "--against jax: no such library; take"),
        (["no_such_model", "--against", "jax"], "--against jax: no such library; take"),
        (["llama", "hidden_size=33"], "llama: the model cannot be made"),
        (["llama", "hidden_size"], "each needs FIELD=VALUE"),
        (["llama", "vocab_size=["], "vocab_size=[: line 1: not YAML"),
        (["llama", "--plugin", "no_such_module"], "module no_such_module: it cannot be imported"),
        (["no_such_model", "--html", "."], "--html .: a folder; name a file"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert run_check(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_fixture_is_a_plugin_of_pytest(check_model):
    model = subject().model.float().train()
    assert [row.verdict for row in check_model(model, only=["causal"])] == ["holds"]
    assert model.training
    assert model.dtype == torch.float32
    plant = {"plant": staticmethod(on_outputs(sees_later_tokens))}
    with pytest.raises(AssertionError, match="causal: differs row 0, token"):
        check_model(subject(type("Planted", (Leaky,), plant)).model, only=["causal"])
    with pytest.raises(InputError, match="only casual: no such property; did you mean causal"):
        check_model(model, only=["casual"])


@pytest.mark.slow
def test_the_script_of_a_difference_runs_without_us(monkeypatch, capsys):
    # Its recurrent layers take no positions.
    hybrid = make("qwen3_next", width=32)
    row = judge_property(hybrid, properties.packed_by_positions, ALLOWED)
    assert row.verdict == "differs"
    assert row.place.endswith("layer 0 (linear_attention)")
    assert "nalanda" not in row.script
    assert len([line for line in row.script.splitlines() if line]) <= 30

    monkeypatch.setitem(sys.modules, "fla", sys.modules.get("fla"))  # the script blocks it
    with torch.enable_grad():
        exec(row.script, {})
    difference, value = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert difference / value == pytest.approx(row.difference, rel=1e-3)


RECURRENT = ["mamba", "mamba2", "falcon_mamba", "falcon_h1", "bamba", "granitemoehybrid", "jamba"]
RECURRENT += [
    "zamba",
    "zamba2",
    "nemotron_h",
    "lfm2",
    "minimax",
    "rwkv",
    "recurrent_gemma",
    "xlstm",
]
RECURRENT += ["qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid", "bailing_hybrid"]

# A pattern that is a number, settings of layers by their numbers, and `moe_k`.
ATTENTION = ["gemma3_text", "exaone4", "gemma4_text", "ernie4_5_moe"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*RECURRENT, *ATTENTION])
def test_a_config_of_any_size_becomes_a_small_model_that_a_leak_moves(kind):
    small = make(kind)
    assert small.model.num_parameters() < 3e6
    assert small.model.dtype == torch.float64
    kinds = kinds_of_layers(small.model.config)
    assert set(kinds) == set(kinds_of_layers(AutoConfig.for_model(kind)))

    # The first 40 tokens reach beyond the convolutions of the later ones.
    changed = torch.cat([small.ids[:, :40].flip(0), small.ids[:, 40:]], 1)
    with torch.no_grad():
        moved = [small.model(t, use_cache=False).logits[:, 44:] for t in (small.ids, changed)]
    assert relative_difference(*moved) > 5e-4


@pytest.mark.slow
def test_a_type_of_transformers_stays_its_own_behind_another_that_imports_fla():
    pytest.importorskip("fla")
    importlib.import_module("fla.models")  # registers its own Mamba
    model = make("mamba").model
    assert type(model).__module__ == "transformers.models.mamba.modeling_mamba"


def test_a_decoder_that_its_config_calls_none_is_checked():
    pythia = make("gpt_neox")
    assert pythia.model.config.is_decoder is False
    assert judge_property(pythia, properties.causal, ALLOWED).verdict == "holds"
    with pytest.raises(InputError, match="an encoder, whose tokens see later ones"):
        around(build("linear_attention", is_decoder=False))


def test_sizes_and_layers_are_taken_as_asked():
    config = make("llama", layers=3, width=64, changes={"intermediate_size": 80}).model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 64, 80)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 4)


def test_a_key_of_a_config_is_no_code(tmp_path):
    run = tmp_path / "run"
    key = f"x=open({str(run)!r}, 'w') or 1, y_size"
    LlamaConfig(**SMALL, **{key: 4096}).save_pretrained(tmp_path)
    config = make(str(tmp_path), width=16).model.config
    assert getattr(config, key) < 4096
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "package"), [("transformers", ""), ("llama.cpp", "xllamacpp"), ("mlx", "mlx_lm")]
)
def test_another_library_computes_our_model(library, package, tokenizer, tmp_path):
    if package:
        pytest.importorskip(package)
    sizes = {"vocab_size": 272, "hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    ours = build("gated_deltanet", "silu", {"num_v_heads": 4}, torch.float32, **sizes, **ids)
    ours.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokens = json.loads(file.read_text())
    tokens["model"]["merges"] = [["t", "h"]]  # llama.cpp needs one
    tokens["model"]["vocab"]["th"] = 257
    file.write_text(json.dumps(tokens))
    row = against(make(str(tmp_path)), library)
    assert row.verdict == "rounding", row
    assert row.difference < 1e-2


@pytest.mark.slow
def test_what_no_library_can_compute_is_said_in_a_line():
    ours = around(build("comba"))
    for library, verdict in [
        ("transformers", "refused"),
        ("llama.cpp", "refused"),
        ("fla", "not offered"),
        ("vllm", "not offered"),
    ]:
        row = against(ours, library)
        assert row.verdict == verdict, row
        assert "\n" not in row.note
