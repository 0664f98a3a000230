"""`nalanda check` finds planted leaks, and no others."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from tiny_models import build
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from nalanda.testing import properties
from nalanda.testing.properties import PROPERTIES
from nalanda.testing.subject import Subject, make, narrow
from nalanda.testing.verdicts import check, half_precision, judge_property
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
        inputs["past_key_values"] = None


def remembers_its_last_cache(model, forward, inputs):
    # The cache of a class, as a module that keeps its state itself has it.
    if inputs.get("past_key_values") is not None:
        inputs["past_key_values"] = type(model).kept
    out = forward(**inputs)
    type(model).kept = out.past_key_values
    return out


def keeps(method):
    """A cache whose method does nothing."""

    def change(model, inputs, out):
        if out.past_key_values is not None:
            setattr(out.past_key_values, method, _nothing)

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
    if out.past_key_values is not None:
        out.past_key_values.__class__ = Losing


def other_tokens(when):
    """The next token is the one after, `when(model, inputs)`."""

    def change(model, inputs, out):
        if when(model, inputs):
            out.logits = out.logits.roll(1, -1)

    return on_outputs(change)


def steps(model, inputs):
    return inputs.get("past_key_values") and inputs["input_ids"].shape[1] == 1


def checks_guesses(model, inputs):
    cache = inputs.get("past_key_values")
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
}


def subject(kind=LlamaForCausalLM, seed=0, **fields):
    torch.manual_seed(seed)
    config = LlamaConfig(**(SMALL | fields))
    model = kind(config).double().eval()
    return Subject("llama", model, torch.randint(3, 64, (2, 70)), "")


SLOW = {"exported_is_eager"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PLANTS]
)
def test_a_planted_leak_is_found(name):
    kind = type("Planted", (Leaky,), {"plant": staticmethod(PLANTS[name])})
    leaky = subject(kind)
    leaky.model.factor = 1.01
    row = judge_property(leaky, getattr(properties, name), ALLOWED)
    assert row.verdict == "differs", row


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
    plant = scaled(lambda model, inputs: model.dtype == torch.bfloat16)
    leaky = subject(type("Planted", (Leaky,), {"plant": staticmethod(plant)}))
    assert half_precision(leaky).verdict == "rounding"
    plant = other_tokens(lambda model, inputs: model.dtype == torch.bfloat16)
    leaky = subject(type("Planted", (Leaky,), {"plant": staticmethod(plant)}))
    assert half_precision(leaky).verdict == "differs"


@pytest.mark.slow
def test_a_llama_has_every_property():
    rows = {row.name: row for row in check(subject())}
    wrong = {
        row.name: row.verdict for row in rows.values() if row.verdict not in ("holds", "rounding")
    }
    assert wrong == {"packed by cu seqlens": "not offered"}
    assert len(rows) == len(PROPERTIES) + 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
def test_no_seed_of_a_llama_raises_a_false_alarm(seed):
    verdicts = {row.verdict for row in check(subject(seed=seed))}
    assert verdicts <= {"holds", "rounding", "not offered"}


def test_every_property_has_a_planted_leak():
    apart = {"packed_by_cu_seqlens", "tied_stays_tied"}
    assert {each.__name__ for each in PROPERTIES} == PLANTS.keys() | apart


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
    page = tmp_path / "check.html"
    assert run_check("llama", *TINY, *ONE, "--json", "--html", str(page)) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in record["properties"]] == ["holds", "holds", "rounding"]
    assert "LlamaForCausalLM" in record["model"]
    assert "packed by positions" in page.read_text()


def test_a_run_of_ours_is_checked_as_it_is(tmp_path, capsys):
    model = build("gated_deltanet", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert run_check(str(tmp_path), "--only", "packed by cu seqlens", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert f"{model.num_parameters():,} parameters" in record["model"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_model"], "no_such_model"),
        (["distilbert"], "distilbert: the model cannot be made"),
        (["llama", "--only", "casual"], "--only casual: no such property; did you mean causal"),
        (["llama", "hidden_size=33"], "llama: the model cannot be made"),
        (["llama", "hidden_size"], "each needs FIELD=VALUE"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert run_check(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_fixture_is_a_plugin_of_pytest(check_model):
    model = subject().model
    assert [row.verdict for row in check_model(model, only=["causal"])][:1] == ["holds"]
    plant = {"plant": staticmethod(on_outputs(sees_later_tokens))}
    with pytest.raises(AssertionError, match="causal: differs row 0, token"):
        check_model(subject(type("Planted", (Leaky,), plant)).model, only=["causal"])


@pytest.mark.slow
def test_the_script_of_a_difference_runs_without_us(tmp_path):
    # Its recurrent layers take no positions.
    hybrid = make("qwen3_next")
    (row,) = [judge_property(hybrid, properties.packed_by_positions, ALLOWED)]
    assert row.verdict == "differs"
    assert "linear_attention" in row.place
    assert "nalanda" not in row.script
    assert len([line for line in row.script.splitlines() if line]) <= 30
    (tmp_path / "shown.py").write_text(row.script)
    done = subprocess.run(
        [sys.executable, tmp_path / "shown.py"], capture_output=True, text=True, check=True
    )
    difference, value = (float(line.split()[-1]) for line in done.stdout.splitlines()[-2:])
    assert difference / value == pytest.approx(row.difference, rel=1e-3)


@pytest.mark.parametrize("kind", ["kimi_linear", "jamba", "zamba2", "nemotron_h", "minimax"])
def test_a_config_is_narrowed_and_keeps_every_kind_of_layer(kind):
    whole = AutoConfig.for_model(kind)
    fields = narrow(whole, None, None)
    small = AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    assert model.num_parameters() < 2e7
    kinds = set(getattr(whole, "layer_types", None) or [])
    assert set(getattr(small, "layer_types", None) or []) == kinds
