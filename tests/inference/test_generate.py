"""Generation with every mixer: states that are cropped, kept, saved and continued; the commands."""

import contextlib
import copy
import json
import math
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from covering import covering, slow_but_for
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tiny_models import SAME_STATES, VARIANTS, VOCAB, build, close, ids, llama, logits
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast, StoppingCriteria
from typer.testing import CliRunner

from nalanda import NalandaCache, NalandaForCausalLM, State
from nalanda.common.errors import InputError
from nalanda.inference import generate as generation
from nalanda.inference.generate import Printer, fingerprint, fingerprint_of
from nalanda.inference.load import bos_token, load_model, tokens_behind
from nalanda.model import MIXERS
from nalanda.model.state import file_sum
from nalanda.testing import in_threads
from nalanda_cli import app

ROWS = {name: {"mixer": name} for name in MIXERS} | VARIANTS
GREEDY = {"do_sample": False}
ENDLESS = {"eos_token_id": None}  # in the config: `generate` takes None for "as the model has it"
REPEATING = torch.cat([ids(1, 7), ids(1, 7), ids(1, 7)], 1)


every_row = pytest.mark.parametrize("row", [row for row in ROWS if row not in SAME_STATES])


@pytest.fixture
def model(row) -> NalandaForCausalLM:
    return build(**ROWS[row], **ENDLESS)


@pytest.fixture
def small() -> NalandaForCausalLM:
    return build(**ENDLESS)


def almost(model: NalandaForCausalLM) -> NalandaForCausalLM:
    """A draft model that sometimes agrees with another one."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    other.lm_head.weight.data += 0.1 * torch.randn_like(other.lm_head.weight)
    return other


def same(a: list[dict], b: list[dict]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in pairs)


# Left padding, lengths, splits


@pytest.mark.sampled
@every_row
def test_continued_as_if_alone(model):
    prompts = [ids(1, n, seed=n) for n in (3, 6)]
    tokens = torch.cat([F.pad(p, (6 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (6 - p.shape[1], 0)) for p in prompts])
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=8, **GREEDY)
    for row, prompt in zip(together, prompts, strict=True):
        alone = model.generate(prompt, max_new_tokens=8, **GREEDY)
        assert torch.equal(row[6:], alone[0, prompt.shape[1] :])


@pytest.mark.sampled
@covering(strength=1, times=2, row=ROWS, length=[1, 63, 64, 65, 1000])
def test_prompts_of_any_length(model, length):
    tokens = ids(1, length)
    found = model.generate(tokens, max_new_tokens=3, **GREEDY)
    assert torch.equal(found[:, :length], tokens)
    # Each new token is the likeliest behind those before it.
    greedy = logits(model, found[:, :-1])[:, -3:].argmax(-1)
    assert torch.equal(found[:, length:], greedy)


@pytest.mark.sampled
@covering(strength=1, row=ROWS, at=[1, 13, 64, 69])
def test_a_prompt_in_two_calls(model, at):
    """A shared prefix, given as a cache with the whole prompt and as a state."""
    tokens = ids(1, 70)
    whole = model.generate(tokens, max_new_tokens=4, **GREEDY)
    first = NalandaCache(2)
    logits(model, tokens[:, :at], past_key_values=first)
    assert torch.equal(
        model.generate(tokens, past_key_values=first.fork(), max_new_tokens=4, **GREEDY), whole
    )
    state = model.read(tokens[:, :at])
    continued = model.generate(tokens[:, at:], state=state, max_new_tokens=4, **GREEDY)
    assert torch.equal(continued, whole[:, at:])


def test_prefix_of_a_batch(small):
    """A prompt read once serves rows of different lengths, beams, and several samples of each."""
    tokens = ids(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    prefix = NalandaCache(2)
    logits(small, tokens[:, :9], attention_mask=mask[:, :9], past_key_values=prefix)
    for strategy in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        options = GREEDY | {"attention_mask": mask, "max_new_tokens": 5} | strategy
        whole = small.generate(tokens, **options)
        given = prefix.fork()
        assert torch.equal(small.generate(tokens, past_key_values=given, **options), whole)
        assert given.batch_size == 2
        assert prefix.get_seq_length() == 9


# Cropped tokens


@pytest.mark.sampled
@covering(strength=1, row=ROWS, draft=["lookup", "early_exit", "nalanda", "llama"])
def test_assisted_is_greedy(model, draft):
    drafts = {
        "lookup": {"prompt_lookup_num_tokens": 5},
        "early_exit": {"assistant_early_exit": 1},
        "nalanda": {"assistant_model": almost(model)},
        "llama": {"assistant_model": llama()},
    }[draft]
    plain = model.generate(REPEATING, max_new_tokens=9, **GREEDY)
    assert torch.equal(model.generate(REPEATING, max_new_tokens=9, **GREEDY, **drafts), plain)


def test_drafts_are_taken_and_refused(small, monkeypatch):
    """The premise of the test above."""
    cropped, crop, calls = [], NalandaCache.crop, []
    monkeypatch.setattr(NalandaCache, "crop", lambda self, n: cropped.append(n) or crop(self, n))
    drafting = almost(small)
    small.register_forward_hook(lambda *_: calls.append(1))
    small.generate(REPEATING, max_new_tokens=20, assistant_model=drafting, **GREEDY)
    assert min(cropped) < 0
    assert len(calls) < 15


def test_assisted_after_a_left_padded_prompt_and_with_hidden_states(small):
    tokens, options = F.pad(REPEATING, (4, 0)), GREEDY | {"max_new_tokens": 12}
    mask = F.pad(torch.ones_like(REPEATING), (4, 0))
    plain = small.generate(REPEATING, **options)
    lookup = options | {"attention_mask": mask, "prompt_lookup_num_tokens": 5}
    assert torch.equal(small.generate(tokens, **lookup)[:, 4:], plain)
    out = small.generate(tokens, **lookup, output_hidden_states=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences[:, 4:], plain)
    assert len(out.hidden_states) == 12
    assert out.hidden_states[0][0].shape[1] == tokens.shape[1]


@pytest.mark.parametrize("draft", [{"prompt_lookup_num_tokens": 5}, {"assistant_early_exit": 1}])
def test_a_filled_cache_takes_no_drafts(small, draft):
    options = GREEDY | draft | {"max_new_tokens": 4}
    first = small.generate(REPEATING, **options, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"start with an empty cache; .* pass state="):
        small.generate(first.sequences, past_key_values=first.past_key_values, **options)
    empty = NalandaCache(small.config.num_hidden_layers)
    again = small.generate(REPEATING, past_key_values=empty, **options)
    assert torch.equal(again, first.sequences)


def test_a_state_assisted_and_what_it_leaves(small):
    plain = small.generate(REPEATING, max_new_tokens=12, **GREEDY)
    state, options = small.read(REPEATING[:, :5]), GREEDY | {"return_dict_in_generate": True}
    out = small.generate(
        REPEATING[:, 5:], state=state, max_new_tokens=8, prompt_lookup_num_tokens=5, **options
    )
    assert torch.equal(out.sequences, plain[:, 5:-4])
    after = State(small, out.past_key_values, out.sequences[:, -1:])
    assert len(after) == plain.shape[1] - 4
    assert torch.equal(small.generate(state=after, max_new_tokens=4, **GREEDY), plain[:, -4:])


@pytest.mark.sampled
@every_row
def test_crop_forgets(model):
    tokens, other = ids(2, 9), ids(2, 4, seed=5)
    cache = NalandaCache(2)
    logits(model, tokens[:, :3], past_key_values=cache)
    cache.activate_past_recording()
    for piece in tokens[:, 3:].split([4, 1, 1], 1):
        logits(model, piece, past_key_values=cache)
    cache.crop(-3)  # three columns of two rows are read again
    assert cache.get_seq_length() == 6
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = torch.cat([tokens[:, :6].flip(0), other], 1)
    expected = logits(model, swapped)[:, 6:]
    close(
        logits(model, other, past_key_values=cache.fork()), expected
    )  # which can no longer be cropped
    close(logits(model, other, past_key_values=cache), expected)
    cache.crop(0)
    assert cache.get_seq_length() == 10
    with pytest.raises(ValueError, match="only recorded tokens"):
        cache.crop(-1)


def test_nothing_is_kept_where_nothing_is_taken_back(small):
    out = small.generate(REPEATING, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    cache = out.past_key_values
    assert (cache.recording, cache.marked, cache.reader, cache.tail) == (False, None, None, [])
    cache.activate_past_recording()  # as after an assisted call
    small.generate(out.sequences, past_key_values=cache, max_new_tokens=5, **GREEDY)
    assert (cache.recording, cache.marked, cache.tail) == (False, None, [])


@pytest.mark.sampled
@every_row
def test_states_are_never_written_to(model):
    """So forks, marks and states can share tensors with their continuations."""
    cache = NalandaCache(2)
    for piece in ids(1, 90).split([5, 1, 1, 70, 13], 1):
        before, kept = cache.fork(), [{n: t.clone() for n, t in s.items()} for s in cache.states]
        logits(model, piece, past_key_values=cache)
        assert same(before.states, kept)


# The state


@pytest.mark.sampled
@every_row
def test_read_in_any_pieces(model):
    tokens = ids(2, 40)
    whole = model.read(tokens)

    def together(context):  # of three threads, which cut 9 tokens, 6 and, in turns, 12
        state = model.read(tokens[:, :17], chunk_size=3, context=context)
        return model.read(tokens[:, 17:], state=state, chunk_size=4, context=context)

    for state in (
        model.read(tokens, chunk_size=7),
        in_threads(3, together)[1],
        model.read(
            tokens[:, 39:], state=model.read(tokens[:, 1:39], state=model.read(tokens[:, :1]))
        ),
    ):
        assert (len(state), state.batch_size, state.nbytes) == (40, 2, whole.nbytes)
        assert torch.equal(state.last, whole.last)
        for a, b in zip(state.cache.states, whole.cache.states, strict=True):
            for name in b:
                close(a[name], b[name])


@pytest.mark.sampled
@every_row
def test_a_state_is_continued_again_and_again(model):
    tokens, more = ids(1, 20), ids(3, 4, seed=3)
    state = model.read(tokens)
    kept = [{n: t.clone() for n, t in s.items()} for s in state.cache.states]
    whole = model.generate(tokens, max_new_tokens=4, **GREEDY)[:, 20:]
    asked = torch.cat([tokens.expand(3, -1), more], 1)
    answers = [model.generate(text[None], max_new_tokens=4, **GREEDY)[0, 20:] for text in asked]
    for _ in range(2):
        assert torch.equal(model.generate(state=state, max_new_tokens=4, **GREEDY), whole)
        questions = model.generate(more, state=state, max_new_tokens=4, **GREEDY)
        assert torch.equal(questions, torch.stack(answers))
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4}
    expected = model.generate(tokens, **beams, **GREEDY)[:, 20:]
    assert torch.equal(model.generate(state=state, **beams, **GREEDY), expected)
    assert same(state.cache.states, kept)
    assert len(state) == 20


def test_a_state_keeps_no_memory_of_the_caller(small):
    tokens = ids(1, 9).int()
    state = small.read(tokens)
    last = tokens[:, -1:].long()
    tokens.zero_()
    assert torch.equal(state.last, last)
    assert state.last.dtype == torch.int64  # as files have it


def test_a_state_is_continued_by_its_cache_alone(small):
    tokens, options = ids(1, 9), {"max_new_tokens": 4, **GREEDY}
    out = small.generate(state=small.read(tokens), return_dict_in_generate=True, **options)
    whole = torch.cat([tokens, out.sequences, more := ids(1, 3)], 1)
    turn = torch.cat([out.sequences, more], 1)
    again = small.generate(turn, past_key_values=out.past_key_values, **options)
    assert torch.equal(
        again[:, turn.shape[1] :], small.generate(whole, **options)[:, whole.shape[1] :]
    )


ONES, EMBEDDED = torch.ones, torch.ones(1, 5, 24, dtype=torch.float64)
BAD_MASK = r"attention_mask must be \[1, 5\], got"


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (
            ids(1, 0),
            {},
            r"input_ids must be integers \[batch, length\] with a token, not int64 \[1, 0\]",
        ),
        (ids(1, 5)[:0], {}, r"with a token, not int64 \[0, 5\]"),
        (ids(1, 5)[0], {}, r"with a token, not int64 \[5\]"),
        (ids(1, 5)[None], {}, r"with a token, not int64 \[1, 1, 5\]"),
        *(
            (ids(1, 5), {"attention_mask": ONES(x)}, BAD_MASK)
            for x in ((1, 3), (1, 4), (1, 6), (2, 5), (5,))
        ),
        (None, {"inputs_embeds": EMBEDDED, "attention_mask": ONES(1, 3)}, BAD_MASK),
        (
            ids(1, 5),
            {"past_key_values": True, "attention_mask": ONES(1, 2)},
            r"\[1, 5 or more\], got \[1, 2\]",
        ),
        (ids(1, 5)[0], {"state": True}, r"not int64 \[5\]"),
        (ids(1, 5), {"state": True, "attention_mask": ONES(1, 6)}, BAD_MASK),
        (ids(1, 5), {"state": True, "attention_mask": ONES(2, 5)}, BAD_MASK),
        (None, {"state": "text"}, "state must be of model.read or model.load_state, not str"),
        (None, {"state": True, "past_key_values": True}, "a state is a cache: leave cache out"),
        (
            None,
            {"state": True, "use_cache": False},
            "a state is a cache: leave use_cache=False out",
        ),
    ],
)
def test_generate_refuses_what_does_not_fit(small, prompt, options, says):
    if options.get("state") is True:
        options = options | {"state": small.read(ids(1, 5))}
    if "past_key_values" in options:
        cache = NalandaCache(2)
        logits(small, ids(1, 4), past_key_values=cache)
        options = options | {"past_key_values": cache}
    with pytest.raises(ValueError, match=says):
        small.generate(prompt, max_new_tokens=2, **options)
    if prompt is not None and "past_key_values" not in options:
        with pytest.raises(ValueError, match=says):
            small.read(prompt, **options)


def test_read_refuses_what_is_no_state(small):
    with pytest.raises(ValueError, match="not str"):
        small.read(ids(1, 5), state="text.safetensors")


def test_a_state_with_an_empty_prompt_or_a_cache_with_all_of_the_mask(small):
    tokens, more, options = ids(1, 9), ids(1, 3), {"max_new_tokens": 4, **GREEDY}
    state = small.read(tokens)
    alone = small.generate(state=state, use_cache=True, **options)
    assert torch.equal(small.generate(ids(1, 0), state=state, **options), alone)
    cache = NalandaCache(2)
    logits(small, tokens, past_key_values=cache)
    mask = torch.ones(1, 12).long()
    expected = small.generate(torch.cat([tokens, more], 1), **options)[:, 9:]
    found = small.generate(more, past_key_values=cache, attention_mask=mask, **options)
    assert torch.equal(found, expected)


def test_a_state_loads_whatever_the_order_of_options(tmp_path):
    options = {"window": 4, "num_kv_heads": 1}
    for order, name in ((options, "a"), (dict(sorted(options.items())), "b")):
        model = build("softmax", mixer_options=order)
        if name == "a":
            model.read(ids(1, 5)).save(tmp_path / "state")
        else:
            model.load_state(tmp_path / "state")


def test_a_state_of_offloaded_weights_is_not_saved(small, tmp_path):
    state = small.read(ids(1, 5))
    model = copy.deepcopy(small)
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"lm_head\.weight is offloaded"):
        State(model, state.cache, state.last).save(tmp_path / "state")


def test_samples_of_a_state(small):
    tokens, options = ids(1, 20), {"max_new_tokens": 6, "do_sample": True}
    torch.manual_seed(3)
    whole = small.generate(tokens, num_return_sequences=5, **options)[:, 20:]
    torch.manual_seed(3)
    assert torch.equal(
        small.generate(state=small.read(tokens), num_return_sequences=5, **options), whole
    )


def test_states_of_left_padded_rows(small):
    tokens, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    state = small.read(tokens, attention_mask=mask, chunk_size=3)
    assert state.lengths.tolist() == [5, 9]
    more = torch.cat([F.pad(ids(1, 2), (3, 0)), ids(1, 5)])
    real = F.pad(torch.ones(1, 2), (3, 0)).long()
    out = small.generate(
        more,
        state=state,
        attention_mask=torch.cat([real, torch.ones(1, 5).long()]),
        max_new_tokens=4,
        **GREEDY,
    )
    for row, text in enumerate(
        (torch.cat([tokens[:1, 4:], ids(1, 2)], 1), torch.cat([tokens[1:], ids(1, 5)], 1))
    ):
        alone = small.generate(text, max_new_tokens=4, **GREEDY)
        assert torch.equal(out[row, 5:], alone[0, text.shape[1] :])
    with pytest.raises(ValueError, match="pad on the left"):
        small.read(tokens, attention_mask=mask.flip(1))


def test_bos_in_mid_text_is_said(small, recwarn):
    """There is a warning with the bos that tokenizers add, and none for the README's tokenisation."""
    state, more = small.read(ids(1, 9)), ids(1, 5).clamp(min=2)
    begun = F.pad(more, (1, 0), value=small.config.bos_token_id)
    options = GREEDY | {"max_new_tokens": 2}
    small.generate(more, state=state, **options)
    small.read(more, state=state)
    small.read(begun)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="begins with bos .*add_special_tokens=False"):
        out = small.generate(begun, state=state, **options)
    assert torch.equal(out[:, :6], begun)  # bos is kept
    padded, mask = F.pad(begun, (3, 0)), F.pad(torch.ones_like(begun), (3, 0))
    with pytest.warns(UserWarning, match="begins with bos"):
        small.read(padded, state=state, attention_mask=mask)


@pytest.mark.sampled
@every_row
def test_saved_and_loaded(model, tmp_path):
    model.float()
    state = model.read(ids(2, 30))
    state.save(tmp_path / "state", note="a word")
    again = model.load_state(tmp_path / "state")
    assert same(again.cache.states, state.cache.states)
    assert (again.lengths.tolist(), again.notes) == (state.lengths.tolist(), {"note": "a word"})
    options = GREEDY | {"max_new_tokens": 5}
    assert torch.equal(
        model.generate(state=again, **options), model.generate(state=state, **options)
    )
    assert not list(tmp_path.glob("*.part"))


def test_a_state_that_cannot_be_written_names_its_file(small, tmp_path, monkeypatch):
    def refuse(*_):
        raise SafetensorError("I/O error: Input/output error (os error 5)")

    monkeypatch.setattr("nalanda.model.state.save_file", refuse)
    with pytest.raises(OSError, match="not saved: I/O error") as error:
        small.read(ids(1, 5)).save(tmp_path / "state")
    assert error.value.filename == str(tmp_path / "state")


@pytest.mark.slow
def test_saved_and_continued_in_another_process(small, tmp_path):
    small.float().save_pretrained(tmp_path / "model")
    state = small.read(ids(1, 30))
    state.save(tmp_path / "state")
    options = GREEDY | {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    torch.save(torch.stack(small.generate(state=state, **options).logits), tmp_path / "expected.pt")
    program = f"""
import torch
from nalanda import NalandaForCausalLM
model = NalandaForCausalLM.from_pretrained({str(tmp_path / "model")!r}).eval()
state = model.load_state({str(tmp_path / "state")!r})
found = torch.stack(model.generate(state=state, **{options!r}).logits)
assert torch.equal(found, torch.load({str(tmp_path / "expected.pt")!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.sampled
@pytest.mark.parametrize("reader", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_a_state_is_of_the_weights_at_any_precision(reader, other, tmp_path):
    path, text, wide = tmp_path / "state", ids(1, 9), build(dtype=torch.float32)
    here, there = (copy.deepcopy(wide).to(dtype) for dtype in (reader, other))
    here.read(text).save(path)
    if {reader, other} == {torch.bfloat16, torch.float16}:
        with pytest.raises(
            ValueError, match=r"cannot be compared; load the model in \w+ or float32"
        ):
            there.load_state(path)
        return
    loaded = there.load_state(path)
    assert there.generate(state=loaded, max_new_tokens=3, do_sample=False).shape == (1, 3)
    assert torch.equal(loaded.last, text[:, -1:])
    there.lm_head.weight.data[0, 0] += 1
    with pytest.raises(
        ValueError,
        match=r"belongs to a model with other weights \(\w+ in \w+; this model is in \w+\)",
    ):
        there.load_state(path)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "mixer", slow_but_for(["retention"], ["retention", "gated_deltanet", "mala", "softmax"])
)
@pytest.mark.parametrize("reader", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
@torch.no_grad()
def test_states_in_memory_follow_a_model_that_is_cast(mixer, reader, other):
    model, tokens = build(mixer, dtype=torch.float32).to(reader), ids(2, 9)
    state, cache = model.read(tokens), NalandaCache(2)
    logits(model, tokens[:, :8], past_key_values=cache)
    model.to(other)
    expected = logits(model, tokens).float()[:, -1]
    coarse = any(dtype.itemsize == 2 for dtype in (reader, other))
    tolerance = 0.05 if coarse else 1e-4

    of_cache = logits(model, tokens[:, 8:], past_key_values=cache).float()[:, -1]
    asked = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    of_state = model.generate(state=state, **asked, **GREEDY).logits[0].float()
    for found in (of_cache, of_state):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    # The first token of another call reads the state itself.
    longer = model.generate(ids(2, 3), state=state, max_new_tokens=2, **GREEDY)
    assert longer.shape == (2, 5)


def contents(path) -> tuple[dict, dict]:
    """The tensors and the texts of a file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def save_again(path, tensors: dict, about: dict) -> None:
    """A file of these contents, with their sum."""
    about = {name: text for name, text in about.items() if name != "sum"}
    save_file(tensors, path, about | {"sum": file_sum(tensors, about)})


@pytest.fixture
def saved(tmp_path):
    """A model, and the file of a state of it."""
    model = build(hidden_size=8, num_heads=2, dtype=torch.float32, **ENDLESS)
    model.read(ids(1, 5)).save(tmp_path / "state", word="a note")
    return model, tmp_path / "state"


def refusal(model, path) -> str:
    with pytest.raises(ValueError) as error:
        model.load_state(path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(path))
    return str(error.value)


def test_a_state_file_with_a_changed_bit_is_refused(saved):
    model, path = saved
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        refusal(model, path)
    path.write_bytes(whole[: len(whole) // 2])
    assert "is not a state" in refusal(model, path)


def test_a_state_file_without_a_field_is_refused(saved):
    model, path = saved
    tensors, about = contents(path)
    for name in {**tensors, **about}:
        fewer = [{n: x for n, x in fields.items() if n != name} for fields in (tensors, about)]
        save_file(*fewer[:1], path, fewer[1])
        refusal(model, path)


def test_settings_of_an_older_file_are_read_as_those_of_a_config(tmp_path):
    """Which left out defaults, and had `nala` without a power for the map `angle`."""
    path = tmp_path / "state.safetensors"
    for name, left_out, other in (
        ("nala", {"power": 2.0}, {"power": 3.0}),
        ("angle", {"power": None}, {}),
    ):
        model = build("gated_deltanet", name, dtype=torch.float32)
        model.read(ids(1, 9)).save(path)
        tensors, about = contents(path)
        settings = json.loads(about["model"]) | {
            "feature_map": "nala",
            "feature_map_options": left_out,
        }
        save_again(path, tensors, about | {"model": json.dumps(settings)})
        model.load_state(path)
        settings["feature_map_options"] = other
        save_again(path, tensors, about | {"model": json.dumps(settings)})
        assert "was read with other settings: feature_map" in refusal(model, path)


def test_the_fields_of_a_state_file_are_checked_beside_its_sum(saved):
    model, path = saved
    tensors, about = contents(path)
    save_again(path, tensors, about)
    assert model.load_state(path).notes == {"word": "a note"}
    for name in ("fingerprint", "model", "notes", "last", "lengths", *tensors):
        fewer = [{n: x for n, x in fields.items() if n != name} for fields in (tensors, about)]
        save_again(path, *fewer)
        refusal(model, path)
    for name in ("fingerprint", "model", "notes"):
        for text in ("", "[]", "{", "null"):
            save_again(path, tensors, about | {name: text})
            refusal(model, path)
    last, lengths = tensors["last"], tensors["lengths"]
    for name, bad in (
        ("last", last.float()),
        ("last", last[0]),
        ("last", last.expand(2, 1).contiguous()),
        ("last", last + VOCAB),
        ("last", last - VOCAB),
        ("lengths", lengths.float()),
        ("lengths", lengths[0]),
        ("lengths", lengths[:0]),
        ("lengths", -lengths),
        ("layers.0.recurrent", tensors["layers.0.recurrent"].long()),
    ):
        save_again(path, tensors | {name: bad}, about)
        assert "is damaged" in refusal(model, path), (name, bad)
    save_again(path, {"last": last, "lengths": lengths}, about)  # no layer, where a text was read
    assert "has nothing for" in refusal(model, path)


def test_what_no_state_is_refused(saved, tmp_path):
    model, path = saved
    other = copy.deepcopy(model)
    other.lm_head.weight.data[0, 0] += 1e-3
    assert "belongs to a model with other weights" in refusal(other, path)
    other = copy.deepcopy(model)
    other.config.norm_eps = 1e-5
    assert "other settings: norm_eps 1e-06, here 1e-05;" in refusal(
        other, path
    )  # and no setting that agrees
    tensors, about = contents(path)
    for name, bad, says in (
        (
            "layers.1.recurrent",
            torch.zeros(1, 2, 3, 4),
            "has [1, 2, 3, 4] for recurrent of layer 1",
        ),
        ("layers.0.conv_q", None, "has nothing for conv_q of layer 0"),
        ("layers.2.recurrent", torch.zeros(1), "not in the model: layers.2.recurrent"),
    ):
        changed = {n: t for n, t in (tensors | {name: bad}).items() if t is not None}
        save_again(path, changed, about)
        assert says in refusal(model, path)
    for content in (b"", b"nothing of the kind", None):
        save_file({"x": torch.ones(1)}, path) if content is None else path.write_bytes(content)
        assert "is not a state that this version can load: read the text again" in refusal(
            model, path
        )
    with pytest.raises(ValueError, match="another model"):
        other.generate(state=model.read(ids(1, 5)), max_new_tokens=1)
    with pytest.raises(ValueError, match="holds 2 texts, the input has 3 rows"):
        model.read(ids(3, 1), state=model.read(ids(2, 5)))
    with pytest.raises(ValueError, match="with a token"):
        model.read(ids(1, 0))


def test_a_state_file_that_may_not_be_read_is_not_called_missing(saved, tmp_path):
    """A socket opens for nobody, as the file of another user does not."""
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(tmp_path):
        bound.bind("other")
        with pytest.raises(OSError, match=r"'other'$") as error:
            saved[0].load_state("other")
    assert not isinstance(error.value, FileNotFoundError)


def test_a_state_that_cannot_be_written_leaves_nothing(saved, tmp_path):
    model, path = saved
    state, before, pipe = model.load_state(path), path.read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)
    no_folder = "its folder does not exist; make it: "
    for there, says in (
        (tmp_path, "a folder; name a file: "),
        (pipe, "a device or a pipe; name a file: "),
        (tmp_path / "none" / "state", no_folder),
        (path / "state", no_folder),
    ):
        with pytest.raises(OSError) as error:
            state.save(there)
        assert str(error.value).endswith(f"{says}'{there}'")
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"no such file; write one with State\.save: "):
        model.load_state(tmp_path / "none")
    assert list(tmp_path.parent.glob(f"{tmp_path.name}*")) == [tmp_path]
    assert {*tmp_path.rglob("*")} == {path, pipe}
    assert path.read_bytes() == before
    assert pipe.is_fifo()


def test_a_saved_state_is_on_the_disk_before_its_name(saved, monkeypatch):
    """So that after a power cut the file is whole: the old one or the new one."""
    model, path = saved
    calls, inodes = [], {}
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.fstat(fd).st_ino) or fsync(fd))
    monkeypatch.setattr(
        os,
        "replace",
        lambda a, b: calls.append("renamed") or inodes.update(a=os.stat(a).st_ino) or replace(a, b),
    )
    model.load_state(path).save(path)
    assert calls == [inodes["a"], "renamed", path.parent.stat().st_ino]


def stepped(model, **options):
    model.train()(input_ids=ids(1, 9), labels=ids(1, 9)).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3, **options).step()


def written(model):
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1e-3


def replaced(model):
    model.load_state_dict({n: x.clone() for n, x in model.state_dict().items()}, assign=True)
    model.lm_head.weight.data += 1e-3


CHANGES = {
    "step": stepped,
    "fused_step": lambda model: stepped(model, fused=True),  # which does not count as a write
    "one_value": written,
    "loaded": lambda model: model.load_state_dict(almost(model).state_dict()),
    "replaced": replaced,
    "resized": lambda model: model.resize_token_embeddings(VOCAB + 1),
    "data": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(1.01),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_of_earlier_weights_is_refused(change, tmp_path):
    model = build(hidden_size=8, num_heads=2, dtype=torch.float32, **ENDLESS)
    state = model.read(ids(1, 9))
    change(model.eval())
    for use in (
        lambda: model.generate(state=state, max_new_tokens=2),
        lambda: model.read(ids(1, 3), state=state),
        lambda: state.save(tmp_path / "state"),
        state.fork,
    ):
        with pytest.raises(ValueError, match=r"weights or adapters have changed: read .* again"):
            use()
    assert not list(tmp_path.iterdir())
    model.eval().generate(state=model.read(ids(1, 9)), max_new_tokens=2)


def test_a_state_outlives_what_leaves_the_weights_as_they_are(small):
    from accelerate import cpu_offload

    state, options = small.read(ids(1, 9)), {"max_new_tokens": 3, **GREEDY}
    expected = small.generate(state=state, **options)
    small.train().eval()  # which lays the weights side by side
    small.to("cpu").float().double()
    with_buffers = build(mixer="norm_attention", dtype=torch.float32, **ENDLESS).eval()
    read = with_buffers.read(ids(1, 9))
    with_buffers.double().generate(state=read, **options)
    small.train()(input_ids=ids(1, 9), labels=ids(1, 9)).loss.backward()
    small.eval().zero_grad()
    with torch.inference_mode():
        assert torch.equal(small.generate(state=state, **options), expected)
    assert torch.equal(small.generate(state=state.fork(), **options), expected)
    again = pickle.loads(pickle.dumps(state))
    assert torch.equal(again.model.generate(state=again, **options), expected)
    with torch.inference_mode():
        frozen = build(**ENDLESS)
        assert torch.equal(frozen.generate(state=frozen.read(ids(1, 9)), **options), expected)
    cpu_offload(small, torch.device("cpu"))  # from here, new tensors in every call
    assert torch.equal(small.generate(state=small.read(ids(1, 9)), **options), expected)


def test_states_of_a_model_with_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    model = build(dtype=torch.float32, **ENDLESS)
    base, options = model.read(ids(1, 9)), {"max_new_tokens": 4, **GREEDY}
    base.save(tmp_path / "base")
    expected = model.generate(state=base, **options)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head"])
    adapted = peft.get_peft_model(model, lora, "first").eval()
    adapted.add_adapter("second", lora)
    other = model.read(ids(1, 9))
    other.save(tmp_path / "adapted")
    model.load_state(tmp_path / "adapted")
    with pytest.raises(ValueError, match="changed"):
        model.generate(state=base, **options)
    with pytest.raises(ValueError, match="other weights"):
        model.load_state(tmp_path / "base")
    with adapted.disable_adapter():  # the base model's states are its own
        assert torch.equal(model.generate(state=base, **options), expected)
        assert torch.equal(
            model.generate(state=model.load_state(tmp_path / "base"), **options), expected
        )
        with pytest.raises(ValueError, match="changed"):
            model.generate(state=other, **options)
    adapted.set_adapter("second")
    with pytest.raises(ValueError, match="changed"):
        model.generate(state=other, **options)
    adapted.merge_and_unload()
    with pytest.raises(ValueError, match="changed"):
        model.generate(state=base, **options)


class Largest(TorchDispatchMode):
    """Measures the bytes of the largest tensor that operators create."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes = max(
            [self.bytes, *(x.nbytes for x in tree_leaves(result) if isinstance(x, torch.Tensor))]
        )
        return result


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gated_deltanet", "mala", "diag_attention"])
def test_long_prompts_take_constant_memory(mixer):
    """For ten times the text no operator creates larger tensors, and nothing is kept."""
    model, largest, kept = (
        build(mixer, dtype=torch.float32, hidden_size=8, num_hidden_layers=1),
        [],
        set(),
    )
    for length in (1_000, 10_000):
        tokens = ids(1, length)
        with Largest() as made:
            kept.add(model.read(tokens, chunk_size=250).nbytes)
        largest.append(made.bytes)
    assert len(kept) == 1
    assert largest[0] == largest[1] > 0
    with Largest() as made:  # the premise: reading in one piece does
        model.read(tokens, chunk_size=10_000)
    assert made.bytes > 2 * largest[0]


# Other features of transformers


def test_processors_criteria_and_constraints(small):
    class Tenth(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 10)

    out = small.generate(ids(1, 5), max_new_tokens=30, stopping_criteria=[Tenth()], **GREEDY)
    assert out.shape[1] == 10
    once = small.generate(ids(1, 5), max_new_tokens=30, no_repeat_ngram_size=1, **GREEDY)[0]
    assert len(set(once.tolist())) == len(once)
    allowed = small.generate(
        ids(1, 5), max_new_tokens=9, prefix_allowed_tokens_fn=lambda *_: [7, 8], **GREEDY
    )
    assert set(allowed[0, 5:].tolist()) <= {7, 8}
    torch.manual_seed(0)
    beams = {"num_beams": 3, "num_return_sequences": 3, "do_sample": True, "max_new_tokens": 6}
    whole = small.generate(ids(2, 9), attention_mask=torch.ones(2, 9).long(), **GREEDY | beams)
    torch.manual_seed(0)
    again = small.generate(
        ids(2, 9), attention_mask=torch.ones(2, 9).long(), use_cache=False, **GREEDY | beams
    )
    assert torch.equal(whole, again)


def test_no_warnings(small, tokenizer, recwarn, caplog):
    """Ordinary calls need no options for special tokens."""
    import transformers

    transformers.logging.get_logger("transformers").propagate = True
    try:
        for options in ({}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
            small.generate(ids(1, 5), max_new_tokens=3, **options)
        small.generate(state=small.read(ids(1, 5)), max_new_tokens=3)
    finally:
        transformers.logging.get_logger("transformers").propagate = False
    assert not recwarn.list, recwarn.list[0]
    assert not caplog.text


# Commands


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    build(dtype=torch.float32, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*args: str, input: str | None = None):
    result = CliRunner().invoke(app, list(args), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_generate_goes_on_from_a_saved_state(checkpoint, tmp_path):
    options = ("--max-new-tokens", "12", "--temperature", "0")
    whole = run("generate", checkpoint, "state and gate", *options).stdout
    (tmp_path / "prompt.txt").write_text("state and")
    state = str(tmp_path / "read.state")
    first = run(
        "generate",
        checkpoint,
        "--file",
        str(tmp_path / "prompt.txt"),
        "--save-state",
        state,
        *options,
    )
    result = run("generate", checkpoint, " gate", "--state", state, *options)
    assert "state and" + result.stdout == whole
    assert "tokens in" in result.stderr
    assert "iB of state" in result.stderr
    assert "MiB resident" in result.stderr
    piped = run("generate", checkpoint, "-", *options, input="state and gate")
    assert "state and gate" + piped.stdout == whole
    alone = run("generate", checkpoint, "--state", state, *options)
    assert alone.stdout == first.stdout


def other_rules(tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of the same tokens, of which two have each other's id."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = rules["model"]["vocab"]
    vocabulary["s"], vocabulary["t"] = vocabulary["t"], vocabulary["s"]
    backend = Tokenizer.from_str(json.dumps(rules))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)


def test_a_state_of_another_tokenizer_is_refused(checkpoint, tokenizer, tmp_path):
    options = ("--max-new-tokens", "4", "--temperature", "0")
    state, swapped = str(tmp_path / "read.state"), str(tmp_path / "swapped")
    run("generate", checkpoint, "state and", "--save-state", state, *options)
    shutil.copytree(checkpoint, swapped)
    other_rules(tokenizer).save_pretrained(swapped)
    says = "read.state was read with another tokenizer, .* generate --force"
    with pytest.raises(InputError, match=says):
        run("generate", swapped, " gate", "--state", state, *options)
    forced = run("generate", swapped, " gate", "--state", state, "--force", *options)
    assert "tokens in" in forced.stderr

    # In Python too, and a file without a tokenizer goes on with any.
    model, own = load_model(swapped)
    with pytest.raises(ValueError, match=says):
        model.load_state(state, fingerprint_of(own))
    model.load_state(state).save(state)
    run("generate", swapped, " gate", "--state", state, *options)
    with pytest.raises(InputError, match=r"--force goes on from .*; give --state"):
        run("generate", checkpoint, "hello", "--force")


def test_the_code_of_an_older_export_reads_its_state(checkpoint, tokenizer, tmp_path, monkeypatch):
    model, _ = load_model(checkpoint)
    path = tmp_path / "read.state"
    model.read(torch.tensor([[5, 6, 7]])).save(path, tokenizer="another")
    load = model.load_state
    monkeypatch.setattr(model, "load_state", lambda path: load(path))
    assert generation.load_state(path, model, tokenizer).notes == load(path).notes


@pytest.mark.slow
def test_a_file_is_read_once_for_all_prompts_behind_it(checkpoint, tmp_path, monkeypatch):
    options = ("--max-new-tokens", "12", "--temperature", "0")
    file, states = tmp_path / "instructions.txt", tmp_path / "states"
    file.write_text("state and")
    whole = run("generate", checkpoint, "state and gate", *options).stdout
    prompts = ("generate", checkpoint, " gate", "--file", str(file), *options)
    assert "state and" + run(*prompts).stdout == whole

    lengths = []
    read = generation.read_with_progress
    monkeypatch.setattr(
        generation,
        "read_with_progress",
        lambda model, tokens, *options, **more: (
            lengths.append(len(tokens)) or read(model, tokens, *options, **more)
        ),
    )
    kept = (*prompts, "--states", str(states))
    assert "state and" + run(*kept).stdout == whole
    first, second = lengths
    assert "state and" + run(*kept).stdout == whole
    assert lengths == [first, second, second]  # the second time only the prompt
    (saved,) = states.glob("*.safetensors")

    # The state of another text, or of another model's weights, has a file of its own.
    model, _ = load_model(checkpoint)
    tokens = [5, 6, 7]
    generation.kept_state(model, tokens, tmp_path / "both")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    generation.kept_state(model, tokens, tmp_path / "both")
    assert len(list((tmp_path / "both").glob("*.safetensors"))) == 2
    (kept_file,) = list((tmp_path / "both").glob(f"{fingerprint(model)}*.safetensors"))
    model.read(torch.tensor([[7, 6, 5]])).save(kept_file, text="another text's hash")
    generation.kept_state(model, tokens, tmp_path / "both")
    assert (
        generation.load_state(kept_file, model).notes["text"] != "another text's hash"
    )  # it was read again

    # Another text under this name, a damaged file and an empty one are read again, once.
    other, intact = tmp_path / "other", saved.read_bytes()
    run("generate", checkpoint, "hello", "--save-state", str(other), *options)
    for content in (other.read_bytes(), b"x" + intact[1:], intact[:-1] + b"x", b""):
        saved.write_bytes(content)
        lengths.clear()
        result = run(*kept)
        assert "state and" + result.stdout == whole
        assert f"{saved}: damaged, or the state of another text; reading" in result.stderr
        assert lengths == [first, second]
        assert "damaged" not in run(*kept).stderr


def test_states_of_eight_bits(checkpoint, tmp_path):
    options = ("--max-new-tokens", "12", "--temperature", "0")
    file, states = tmp_path / "instructions.txt", tmp_path / "states"
    file.write_text("state and")
    saved = {}
    for state_dtype in ("float32", "int8"):
        saved[state_dtype] = tmp_path / state_dtype
        flags = ("--state-dtype", state_dtype, *options)
        run("generate", checkpoint, "hello", "--save-state", str(saved[state_dtype]), *flags)
        run("generate", checkpoint, "hello", "--file", str(file), "--states", str(states), *flags)
    assert saved["int8"].stat().st_size < saved["float32"].stat().st_size
    # A precision has a file of its own, and a state goes on in another one.
    assert len(list(states.glob("*-int8.safetensors"))) == 1
    assert len(list(states.glob("*.safetensors"))) == 2
    for flags in ((), ("--state-dtype", "float32"), ("--state-dtype", "fp32", "--dtype", "bf16")):
        run("generate", checkpoint, " gate", "--state", str(saved["int8"]), *flags, *options)


def test_generate_refuses(checkpoint, tmp_path):
    run(
        "generate",
        checkpoint,
        "hello",
        "--save-state",
        str(tmp_path / "damaged"),
        "--max-new-tokens",
        "1",
    )
    whole = bytearray((tmp_path / "damaged").read_bytes())
    whole[-1] ^= 1
    (tmp_path / "damaged").write_bytes(whole)
    os.mkfifo(tmp_path / "pipe")
    load_model(checkpoint)[0].read(ids(2, 5)).save(tmp_path / "two")
    for args, says in (
        (
            ("hello", "--states", str(tmp_path)),
            "--states keeps the state of --file, .*; give --file",
        ),
        (("--file", str(tmp_path / "none")), "cannot read"),
        (("caf\udce9",), "cannot read the prompt: not UTF-8"),
        (
            ("hello", "--state", str(tmp_path / "none")),
            "none: no such file; write one with --save-state",
        ),
        (
            ("hello", "--state", str(tmp_path / "damaged")),
            "damaged does not have the bytes .* read the text",
        ),
        (("--state", str(tmp_path / "two")), "two: the state of 2 texts; save that of one"),
        (("hello", "--state", str(tmp_path)), "a folder; name a file"),
        (("hello", "--state", os.devnull), "a device or a pipe; name a file with a state"),
        (("hello", "--save-state", str(tmp_path / "pipe")), "a device or a pipe; name a file"),
        (("hello", "--state-dtype", "int4"), "--state-dtype int4: unknown; choose fp32"),
        (("hello", "--temperature", "nan"), "temperature is nan"),
        (("hello", "--temperature", "1e-40"), "temperature is 1e-40"),
    ):
        with pytest.raises(InputError, match=says) as error:
            run("generate", checkpoint, *args)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("kind", ["nalanda", "llama"])
def test_a_model_that_computes_no_numbers_generates_no_text(tokenizer, tmp_path, kind, temperature):
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    model = build(dtype=torch.float32, **sizes) if kind == "nalanda" else llama(len(tokenizer))
    model.get_output_embeddings().weight.data[7, 3] = math.nan
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="its log-probabilities are not numbers; its weights may"):
        run("generate", str(tmp_path), "hello", "--temperature", temperature)


def test_a_prompt_that_begins_with_bos_gets_no_second(checkpoint, tokenizer):
    options = ("--max-new-tokens", "12", "--temperature", "0")
    plain = run("generate", checkpoint, "state and", *options).stdout
    bos = tokenizer.decode([0])
    assert run("generate", checkpoint, f"{bos}state and", *options).stdout == bos + plain


def test_a_tokenizer_without_a_token_of_a(tmp_path):
    """As those of proteins are. Other libraries' tokenizers show by "a" whether bos precedes a text."""
    backend = Tokenizer(models.BPE({"<s>": 0, "M": 1, "K": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    model = llama(3)
    assert bos_token(model, tokenizer) == []
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    assert bos_token(model, tokenizer) == [0]


SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["state", "stat", "gate", "don", "'", "t", ",", ".", "naïve", "日本", "語", "🦆"]
LETTERS = sorted({*"abcdefghijklmnopqrstuvwxyz.,'ïéñ日本語文章🦆🎈"})


def wrapped(backend: Tokenizer, **options) -> PreTrainedTokenizerFast:
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama's and Mistral's: characters that are not in the vocabulary are tokens of bytes."""
    tokens = [
        *SPECIAL,
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,'é語",
    ]
    merges = [("▁", "s"), ("t", "a"), ("▁s", "ta"), ("a", "t"), ("at", "e")]
    vocabulary = {token: i for i, token in enumerate([*tokens, *(a + b for a, b in merges)])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    return wrapped(backend)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's; some tokens hold parts of characters, or of two."""
    alphabet, byte = (
        sorted(pre_tokenizers.ByteLevel.alphabet()),
        pre_tokenizers.ByteLevel(False, False),
    )
    pieces = [
        "".join(piece for piece, _ in byte.pre_tokenize_str(word)) for word in ("日本", "🦆", " st")
    ]
    merges = [(x[:n], x[n]) for x in pieces for n in range(1, min(len(x), 4))]
    vocabulary = {
        token: i for i, token in enumerate([*SPECIAL, *alphabet, *(a + b for a, b in merges)])
    }
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = byte, decoders.ByteLevel()
    return wrapped(backend)


def unigram() -> PreTrainedTokenizerFast:
    pieces = ["▁", *LETTERS, *WORDS, *(f"▁{word}" for word in WORDS)]
    scored = [
        (piece, -float(i % 7) - 8 / len(piece)) for i, piece in enumerate(dict.fromkeys(pieces))
    ]
    backend = Tokenizer(models.Unigram([*((token, 0.0) for token in SPECIAL), *scored], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return wrapped(backend)


def wordpiece() -> PreTrainedTokenizerFast:
    """With the cleaning of spaces, which changes text that came before."""
    pieces = dict.fromkeys([*SPECIAL, *LETTERS, *WORDS, *(f"##{letter}" for letter in LETTERS)])
    backend = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return wrapped(backend, clean_up_tokenization_spaces=True)


def wordlevel() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(backend)


TOKENIZERS = (byte_fallback, byte_level, unigram, wordpiece, wordlevel)


def decoded(tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def whole(tokenizer, tokens: list[int]) -> str:
    """The tokens' text, without a character of which only some bytes have come."""
    texts = [decoded(tokenizer, tokens[: len(tokens) - n]) for n in range(min(4, len(tokens) + 1))]
    return next((text for text in texts if not text.endswith("\ufffd")), texts[0])


def streamed(tokenizer, prompt: list[int], tokens: list[int], capsys) -> list[str]:
    """What has been printed after each token, and at the end."""
    capsys.readouterr()
    printer, printed = Printer(tokenizer, prompt), [""]
    printer.put(torch.tensor([prompt]))
    for token in tokens:
        printer.put(torch.tensor([token]))
        printed.append(printed[-1] + capsys.readouterr().out)
    printer.end()
    return [*printed[1:], printed[-1] + capsys.readouterr().out.removesuffix("\n")]


@pytest.mark.sampled
@pytest.mark.parametrize("make", TOKENIZERS)
def test_streamed_text_is_the_decoded_text(make, capsys):
    """At every token, except for the bytes of a character that is not whole yet."""
    tokenizer, draw = make(), random.Random(0)
    for _ in range(40):
        tokens = []
        for _ in range(draw.choice([1, 1, 3])):  # texts, with special tokens between
            words = draw.choices(WORDS, k=draw.randint(1, 40))
            text = "".join(word + draw.choice(["", " ", " ", "  "]) for word in words)
            tokens += tokenizer(text, add_special_tokens=False).input_ids + [1] * draw.choice(
                [0, 1, 12]
            )
        at = draw.randint(0, len(tokens))  # also inside a character
        prompt = [1] * draw.choice([0, 1, 9]) + tokens[:at]
        start = len(whole(tokenizer, prompt))
        *printed, last = streamed(tokenizer, prompt, tokens[at:], capsys)
        for n, shown in enumerate(printed, 1):
            assert shown == whole(tokenizer, prompt + tokens[at : at + n])[start:]
        assert last == decoded(tokenizer, prompt + tokens[at:])[start:]


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_bytes_that_are_no_text_do_not_hold_it_back(make, capsys):
    """As those of an untrained model. Text that has been printed stays."""
    tokenizer, draw = make(), random.Random(0)
    vocabulary = tokenizer.get_vocab()
    if make is byte_fallback:
        bytes_ = [vocabulary[f"<0x{i:02X}>"] for i in range(256)]
    else:
        bytes_ = [vocabulary[letter] for letter in pre_tokenizers.ByteLevel.alphabet()]
    before, after = (
        tokenizer(text, add_special_tokens=False).input_ids for text in ("ab日本", "ate 日 é")
    )
    for _ in range(20):
        noise = draw.choices(bytes_, k=draw.choice([1, 2, 5, 100]))
        *printed, last = streamed(tokenizer, [1], before + noise + after, capsys)
        assert last.startswith("ab日本")
        assert last.endswith("ate 日 é")
        assert len(printed[len(before) + len(noise) - 1]) >= len("ab日本") + len(noise) // 8
        if make is byte_level:
            assert last == decoded(tokenizer, before + noise + after)


@pytest.mark.parametrize("make", [byte_fallback, byte_level, unigram])
def test_text_behind_another_one_has_the_tokens_of_the_whole(make):
    """SentencePiece puts a blank before each text, which was then read in mid-text."""
    tokenizer, draw = make(), random.Random(0)
    for _ in range(40):
        words = draw.choices(WORDS, k=draw.randint(2, 12))
        text = "".join(word + draw.choice(["", " ", "  "]) for word in words)
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        at = draw.randint(1, len(whole.input_ids) - 1)
        start, before = whole.offset_mapping[at][0], whole.offset_mapping[at - 1][1]
        if start == before:  # not within a character
            assert tokens_behind(text[start:], tokenizer) == whole.input_ids[at:]


def test_a_word_behind_a_state_begins_with_its_space(tmp_path):
    """The first token's text depends on the token before it, which the state holds."""
    backend = Tokenizer(models.Unigram([("▁gate", 0.0), ("<unk>", 0.0)], unk_id=1))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    model = build(vocab_size=2, dtype=torch.float32, bos_token_id=None, **ENDLESS)
    model.lm_head.weight.data.zero_()  # so that each token is the first
    model.save_pretrained(tmp_path)

    (tmp_path / "text").write_text("gate")
    options = ("--max-new-tokens", "2", "--temperature", "0")
    text, state = ("--file", str(tmp_path / "text")), str(tmp_path / "read.state")
    read = run("generate", str(tmp_path), *text, "--save-state", state, *options)
    alone = run("generate", str(tmp_path), "--state", state, *options)
    kept = run("generate", str(tmp_path), *text, "--states", str(tmp_path), *options)
    assert read.stdout == alone.stdout == kept.stdout == " gate gate\n"


def test_printing_stops_at_the_stop_text(tokenizer, capsys):
    printer = Printer(tokenizer, [], "\nUser:")
    printer.put(torch.tensor([0]))
    for token in tokenizer(" a\nUser: b", add_special_tokens=False).input_ids:
        printer.put(torch.tensor([token]))
        if printer.stopped:
            break
    assert printer.stopped
    printer.end()
    assert capsys.readouterr().out.strip() == "a"
    assert printer.tokens == tokenizer(" a\nUser:", add_special_tokens=False).input_ids
