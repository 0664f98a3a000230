"""What every token mixer, under every feature map, must hold, and what transformers expects of a model."""

import itertools
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tiny_models import SOME_MAPS, VARIANTS, VOCAB, build, close, ids, logits, rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
)

from nalanda import NalandaCache, NalandaConfig, NalandaForCausalLM, testing
from nalanda.model import FEATURE_MAPS, MIXERS
from nalanda.model.attention import SoftmaxAttention
from nalanda.model.configuration import AUTO_MAP
from nalanda.model.delta import Decay
from nalanda.model.loss import linear_cross_entropy
from nalanda.model.sequences import Sequences
from nalanda.testing import MIXER_PROPERTIES


@pytest.fixture(params=rows())
def model(request) -> NalandaForCausalLM:
    return build(**request.param)


def test_every_mixer_and_map_is_in_the_table():
    seen = [tuple(p.values[0].get(key) for key in ("mixer", "feature_map")) for p in rows()]
    assert {mixer for mixer, _ in seen if isinstance(mixer, str)} == set(MIXERS)
    assert {row for row in seen if isinstance(row[0], str)} >= set(
        itertools.product(("deltanet", "linear_attention", *SOME_MAPS), FEATURE_MAPS)
    )


@pytest.mark.parametrize("holds", MIXER_PROPERTIES, ids=lambda f: f.__name__)
def test_property(model, holds):
    holds(model)


@pytest.mark.parametrize("mixer", SOME_MAPS)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_what_a_map_may_break(mixer, feature_map):
    """Quick properties, for the rows of the table that are slow."""
    if feature_map not in SOME_MAPS[mixer]:
        model = build(mixer, feature_map)
        testing.causal(model)
        testing.gradients_of_a_prefix_ignore_the_future(model)
        testing.chunkwise_is_recurrent_is_reference(model)
        testing.half_precision_agrees(model)
        testing.every_parameter_learns(model)


@pytest.mark.parametrize(
    "options",
    [
        {"expand_k": 0.5, "expand_v": 2.0},
        {"mixer_options": {"num_v_heads": 4}},
        {"mixer_options": {"allow_neg_eigval": True}},
        {"conv_size": 0},
        {"conv_size": 2, "use_gate": True},
        {"mixer": ["deltanet", "gated_deltanet"], "use_gate": False},
        {"tie_word_embeddings": True},
        {
            "position_embedding": "sinusoidal",
            "scale_embeddings": True,
            "use_bias": True,
            "initializer": "xavier",
        },
        {
            "mixer": ["gated_deltanet", "softmax"],
            "mixer_options": {"softmax": {"window": 5, "num_kv_heads": 1}},
        },
        {
            "mixer": ["diag_attention", "norm_attention"],
            "mixer_options": {"diag_attention": {"block_size": 3}},
        },
        {
            "mixer": "norm_attention",
            "feature_map": "elu",
            "mixer_options": {"norm_eps_placement": "outside"},
        },
        {
            "mixer": "diag_attention",
            "mixer_options": {"block_size": 7, "scores": "relu", "positions": "none"},
        },
        {"mixer": "softmax", "mixer_options": {"rope_theta": None}},
        {"mixer": "mala", "mixer_options": {"scale": "inverse_t"}, "conv_size": 0},
        {
            "mixer": "pola",
            "mixer_options": {"gate_first": True},
            "feature_map_options": {"scale": False},
        },
        {"mixer": "nala", "feature_map_options": {"power": 3}, "use_gate": False},
        {"mixer": "soft", "feature_map_options": {"landmarks": 7, "inverse": "newton"}},
        {
            "feature_map_options": {
                "angle": "raw",
                "power": 3,
                "power_norm": "raw",
                "direction_scale": "unit",
            }
        },
    ],
    ids=str,
)
def test_options(options):
    model, tokens = build(**options), ids(2, 20)
    whole, cache = logits(model, tokens), NalandaCache(2)
    close(
        torch.cat(
            [logits(model, t, past_key_values=cache) for t in tokens.split([7, 1, 12], 1)], 1
        ),
        whole,
    )
    assert not torch.allclose(whole, logits(build(), tokens))
    spec = [{n: (tuple(t.shape[1:]), t.dtype) for n, t in state.items()} for state in cache.states]
    for layer, state in zip(model.model.layers, spec, strict=True):
        promised = layer.mixer.state_spec(20)
        assert {n: shape for n, (shape, _) in promised.items()} == {
            n: shape for n, (shape, _) in state.items()
        }


def test_options_of_each_mixer_by_its_name():
    layers = build(**VARIANTS["hybrid"]).model.layers
    assert layers[1].mixer.reach == 9
    flat = build(
        mixer=["deltanet", "gated_deltanet"], mixer_options={"num_v_heads": 4}
    ).model.layers
    assert [layer.mixer.num_v_heads for layer in flat] == [4, 4]


def test_negative_eigenvalues_double_beta(monkeypatch):
    seen = []
    import nalanda.model.delta as mixers

    def spy(call, rule, seq):
        seen.append(call.beta)
        return recurrence(call, rule, seq)

    recurrence = mixers.recurrence
    monkeypatch.setattr(mixers, "recurrence", spy)
    plain, doubled = build(), build(mixer_options={"allow_neg_eigval": True})
    logits(plain, ids(1, 8)), logits(doubled, ids(1, 8))
    close(seen[2], 2 * seen[0])
    assert seen[2].max() > 1


class Scaled(MIXERS["gated_deltanet"]):
    """A mixer of one's own, with a parameter that nothing else here has."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scale = torch.nn.Parameter(torch.empty(self.V))
        self.taps = torch.nn.Conv1d(2, 2, 3)  # a module that draws its own parameters

    def read_out(self, o, heads, x):
        return super().read_out(o * self.scale, heads, x)


def test_a_parameter_that_nothing_sets_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(MIXERS, "scaled", Scaled)
    with pytest.raises(ValueError, match=r"nothing sets scale of Scaled: .* initial\(\)") as error:
        build("scaled")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(
        Scaled, "initial", lambda self: {"scale": torch.full_like(self.scale, 0.5)}, raising=False
    )
    model = build("scaled", dtype=torch.float32)
    assert all((layer.mixer.scale == 0.5).all() for layer in model.model.layers)

    # Also of what a checkpoint leaves out; and what one holds, `initial` need not know.
    weights = model.state_dict()
    absent = [name for name in weights if name.endswith(("mixer.scale", "taps.weight"))]
    assert len(absent) == 4
    model.save_pretrained(
        tmp_path, state_dict={n: x for n, x in weights.items() if n not in absent}
    )
    torch.manual_seed(0)
    again = NalandaForCausalLM.from_pretrained(tmp_path)
    for name, x in again.state_dict().items():
        if name.endswith("taps.weight"):
            assert 0 < x.abs().max() <= 6**-0.5
        else:
            assert torch.equal(x, weights[name])
    model.save_pretrained(tmp_path)
    monkeypatch.delattr(Scaled, "initial")
    assert torch.equal(
        NalandaForCausalLM.from_pretrained(tmp_path).state_dict()[absent[0]], weights[absent[0]]
    )


# Generation


@pytest.fixture
def small() -> NalandaForCausalLM:
    return build(dtype=torch.float32)


def test_generate_cached_equals_uncached(small):
    kwargs = {
        "max_new_tokens": 8,
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
        "pad_token_id": 0,
    }
    for strategy in (
        {"do_sample": False},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
    ):
        a = small.generate(ids(2, 9), **kwargs, **strategy)
        assert torch.equal(a, small.generate(ids(2, 9), use_cache=False, **kwargs, **strategy))
        assert torch.equal(a, small.generate(ids(2, 9), prefill_chunk_size=4, **kwargs, **strategy))
    torch.manual_seed(3)
    a = small.generate(ids(2, 9), do_sample=True, **kwargs)
    torch.manual_seed(3)
    assert torch.equal(a, small.generate(ids(2, 9), do_sample=True, use_cache=False, **kwargs))


def test_generate_continues_embeddings(small):
    embeddings = small.get_input_embeddings()(ids(1, 9))
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for strategy in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        expected = small.generate(ids(1, 9), **kwargs, **strategy)[:, 9:]
        assert torch.equal(small.generate(inputs_embeds=embeddings, **kwargs, **strategy), expected)
    with pytest.raises(ValueError, match="input_ids, not inputs_embeds"):
        small.generate(inputs_embeds=embeddings, state=small.read(ids(1, 5)), **kwargs)


def test_generate_left_padded_rows_as_alone(small):
    prompts = [ids(1, n, seed=n) for n in (2, 5, 9)]
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = torch.cat([F.pad(p, (9 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (9 - p.shape[1], 0)) for p in prompts])
    together = small.generate(tokens, attention_mask=mask, **kwargs)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row[9:], small.generate(prompt, **kwargs)[0, prompt.shape[1] :])


def test_padding_that_is_read_token_by_token(small):
    prompts = [ids(1, n, seed=n) for n in (2, 5)]
    tokens = torch.cat([F.pad(p, (5 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (5 - p.shape[1], 0)) for p in prompts])
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    whole = small.generate(tokens, **kwargs)
    for size in (1, 2, 3):
        assert torch.equal(small.generate(tokens, prefill_chunk_size=size, **kwargs), whole)
    # A single column that is padding, after the text has begun.
    gap = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1]])
    whole = logits(small, ids(2, 6), attention_mask=gap)[:, -1]
    for sizes in ([3, 3], [3, 2, 1], [3, 1, 1, 1]):
        cache, end = NalandaCache(2), 0
        for size in sizes:
            start, end = end, end + size
            options = {"attention_mask": gap[:, :end], "past_key_values": cache}
            last = logits(small, ids(2, 6)[:, start:end], **options)[:, -1]
        close(last, whole, 1e-4)
        assert cache.lengths.tolist() == [6, 4]


def test_decoding_does_not_look_at_the_mask(small):
    """On a device a look would wait for it, every token."""
    cache = NalandaCache(2)
    logits(small, ids(1, 5), past_key_values=cache)
    not_looked_at = torch.ones(1, 6, device="meta")
    assert (
        logits(small, ids(1, 1), attention_mask=not_looked_at, past_key_values=cache)
        .isfinite()
        .all()
    )


def test_generate_goes_on_from_a_cache(small):
    kwargs = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    whole = small.generate(ids(1, 9), max_new_tokens=8, **kwargs)
    half = small.generate(ids(1, 9), max_new_tokens=4, return_dict_in_generate=True, **kwargs)
    rest = small.generate(
        half.sequences, past_key_values=half.past_key_values, max_new_tokens=4, **kwargs
    )
    assert torch.equal(rest, whole)


@pytest.mark.parametrize("mixer", ["softmax", "mala"])
def test_reordered_rows_keep_their_length(mixer):
    """Rows of different lengths, as beams over a padded batch have them."""
    model, rows = build(mixer), [ids(1, n, seed=n) for n in (3, 9)]
    tokens = torch.cat([F.pad(row, (9 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([F.pad(torch.ones_like(row), (9 - row.shape[1], 0)) for row in rows])
    for rearrange, order in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        cache = NalandaCache(2)
        logits(model, tokens, attention_mask=mask, past_key_values=cache)
        rearrange(cache)
        after = logits(model, ids(1, 4).repeat(len(order), 1), past_key_values=cache)
        for i, row in zip(order, after, strict=True):
            close(row, logits(model, torch.cat([rows[i], ids(1, 4)], 1))[0, -4:])


def test_state_does_not_grow(small):
    sizes = set()
    cache = NalandaCache(2)
    for piece in ids(1, 200).split([64, *[1] * 136], 1):
        logits(small, piece, past_key_values=cache)
        sizes.add(cache.nbytes)
        for state in cache.states:  # a view would keep the text that it was cut from
            sizes.add(sum(t.untyped_storage().nbytes() for t in state.values()) * 2)
    assert sizes == {small.config.state_bytes(1, torch.float32)}


class Made(TorchDispatchMode):
    """Entries of all tensors that operators make."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.entries += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "softmax"])
def test_a_decoding_step_makes_nothing_that_grows_with_the_text(mixer):
    options = {"diag_attention": {"block_size": 4}}.get(mixer, {})
    model, entries = build(mixer, mixer_options=options), []
    tokens, cache = ids(1, 40), NalandaCache(2)
    with torch.no_grad():
        model(tokens[:, :4], past_key_values=cache)
        for t in range(4, 40):
            with Made() as made:
                model(tokens[:, t : t + 1], past_key_values=cache)
            entries.append(made.entries)
    assert entries[0] > 0
    assert entries[:4] * 9 == entries  # a block's steps differ from one another, blocks do not


def test_streamer(small):
    class Words:
        def decode(self, tokens, **_):
            return "".join(f" {int(t)}" for t in tokens)

    streamer = TextIteratorStreamer(Words(), skip_prompt=True)
    out = small.generate(
        ids(1, 5), max_new_tokens=6, do_sample=False, streamer=streamer, eos_token_id=None
    )
    assert "".join(streamer).split() == [str(int(t)) for t in out[0, 5:]]
    state, options = (
        small.read(ids(1, 5)),
        {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None},
    )
    for more in (
        ids(1, 2),
        None,
    ):  # behind a state it gets what `generate` returns, not the state's last token
        streamer = TextIteratorStreamer(Words())
        out = small.generate(more, state=state, streamer=streamer, **options)
        assert "".join(streamer).split() == [str(int(t)) for t in out[0]]


def test_other_caches_are_refused(small):
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="NalandaCache"):
        small(ids(1, 3), past_key_values=DynamicCache())
    cache = NalandaCache(2)
    small(ids(2, 3), past_key_values=cache)
    with pytest.raises(ValueError, match="2 sequences"):
        small(ids(3, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="packed"):
        small(ids(1, 4), past_key_values=NalandaCache(2), cu_seqlens=torch.tensor([0, 2, 4]))
    for layers in (1, 3):
        with pytest.raises(ValueError, match=f"{layers} layers, the model 2"):
            small(ids(2, 1), past_key_values=NalandaCache(layers))
    with pytest.raises(ValueError, match=r"not fit: .*holds conv_q, .*recurrent, the model's k, v"):
        build("softmax", dtype=torch.float32)(ids(2, 1), past_key_values=cache)


def test_two_ways_to_say_the_same_are_refused(small):
    mask, restarting = torch.tensor([[1, 1, 1, 1, 0, 0]]), torch.tensor([[0, 1, 0, 1, 0, 1]])
    with pytest.raises(ValueError, match="restart"):
        small(ids(1, 6), attention_mask=mask, position_ids=restarting)
    with pytest.raises(ValueError, match="not both"):
        small(ids(1, 6), attention_mask=mask, cu_seqlens=torch.tensor([0, 2, 6]))
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # as generate makes them
    close(
        small(ids(1, 6), attention_mask=mask, position_ids=positions).logits,
        small(ids(1, 6), attention_mask=mask).logits,
    )


def test_misspelt_arguments_are_refused(small):
    for called in (small, small.model):
        with pytest.raises(TypeError, match="lables"):
            called(ids(1, 4), lables=ids(1, 4))
    assert isinstance(small(ids(1, 4), return_dict=False), tuple)


@pytest.mark.parametrize(
    "options",
    [
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {"return_seq_idx": True},
        {"return_seq_idx": True, "return_position_ids": False},
    ],
    ids=str,
)
def test_packed_batches_of_transformers(small, options):
    """Whatever of it says where documents begin; none sees another."""
    texts = [ids(5, seed=1), ids(9, seed=2), ids(3, seed=3)]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": text.tolist()} for text in texts])
    packed, alone = small(**batch), [small(text[None], labels=text[None]) for text in texts]
    close(packed.logits, torch.cat([out.logits for out in alone], 1), 1e-5)
    close(
        packed.loss,
        sum(out.loss * (len(text) - 1) for out, text in zip(alone, texts, strict=True)) / 14,
        1e-5,
    )
    hidden = torch.cat([small.model(text[None]).last_hidden_state for text in texts], 1)
    del batch["labels"]
    close(small.model(**batch).last_hidden_state, hidden, 1e-5)


def test_keywords_of_other_models_change_nothing_or_are_refused(small):
    tokens = ids(2, 6)
    empty = {
        "token_type_ids": torch.zeros_like(tokens),
        "cache_position": torch.arange(6),
        "head_mask": None,
    }
    assert torch.equal(small(tokens, **empty).logits, small(tokens).logits)
    types = empty["token_type_ids"]
    assert torch.equal(
        small.generate(tokens, token_type_ids=types, max_new_tokens=4, do_sample=False),
        small.generate(tokens, max_new_tokens=4, do_sample=False),
    )
    for call in (small, small.model, small.generate):
        with pytest.raises(ValueError, match=r"token_type_ids: .*give zeros"):
            call(tokens, token_type_ids=types + 1)
    with pytest.raises(ValueError, match="head_mask"):
        small(tokens, head_mask=torch.ones(2, 2))
    # Bounds may be given twice; another library's name for them alone says as much.
    bounds, other = torch.tensor([0, 4, 6, 12]), torch.tensor([0, 6, 12])
    packed = small(tokens, cu_seqlens=bounds).logits
    for described in (
        {"cu_seq_lens_k": bounds.int()},
        {"cu_seqlens": bounds, "cu_seq_lens_q": bounds},
        {"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6]), "cu_seq_lens_q": bounds},
    ):
        assert torch.equal(small(tokens, **described).logits, packed)
    for described in (
        {"cu_seqlens": bounds, "cu_seq_lens_q": other},
        {"cu_seq_lens_q": bounds, "cu_seq_lens_k": other},
        {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6]), "cu_seqlens": bounds},
    ):
        with pytest.raises(ValueError, match="name different documents"):
            small(tokens, **described)
    # One document a row says nothing new, beside padding too.
    mask = F.pad(torch.ones(2, 4), (2, 0))
    described = {"attention_mask": mask, "seq_idx": torch.zeros_like(tokens)}
    assert torch.equal(small(tokens, **described).logits, small(tokens, attention_mask=mask).logits)
    for wrong in (torch.zeros(6), [[0] * 6] * 2):
        with pytest.raises(ValueError, match="seq_idx: give each token's document"):
            small(tokens, seq_idx=wrong)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"input_ids": ids(6)}, r"input_ids must be integers \[batch, length\], got int64 \[6\]"),
        ({"input_ids": ids(2, 6).float()}, r"input_ids must be integers .*, got float32 \[2, 6\]"),
        ({"labels": [[1] * 6] * 2}, "labels must be a tensor, got list"),
        (
            {"inputs_embeds": torch.ones(6, 24)},
            r"inputs_embeds must be \[batch, length, 24\], got \[6, 24\]",
        ),
        ({"inputs_embeds": torch.ones(2, 6, 23)}, r"inputs_embeds must be .* got \[2, 6, 23\]"),
        ({"labels": ids(2, 5)}, r"labels must be integers .*\[2, 6\], got torch.int64 \[2, 5\]"),
        ({"labels": ids(6)}, r"labels must be .* got torch.int64 \[6\]"),
        ({"labels": torch.ones(2, 6)}, r"labels must be integers .* got torch.float32"),
        (
            {"labels": torch.full((2, 6), VOCAB)},
            f"label {VOCAB}: give token ids from 0 to {VOCAB - 1}, or -100",
        ),
        ({"labels": torch.full((2, 6), -1)}, "label -1: give token ids"),
        ({"shift_labels": ids(2, 5)}, "labels must be integers"),
        ({"cu_seqlens": [0, 12]}, "cu_seqlens must be an int32 or int64 tensor"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "cu_seqlens must be"),
        ({"cu_seqlens": torch.tensor([0.0, 12.0])}, "cu_seqlens must be"),
        *(
            ({"position_ids": places}, r"position_ids must be \[batch, length\] or \[1, length\]")
            for places in (
                torch.tensor([0, 1, 2, 0, 1, 2]),
                torch.arange(6),
                torch.arange(5)[None],
                torch.tensor([[0, 1, 0, 1, 2]]),
                torch.arange(6).expand(3, 6),
                torch.arange(6).expand(3, 2, 6),
            )
        ),
    ],
    ids=str,
)
def test_inputs_of_a_wrong_shape_or_kind_are_refused(small, inputs, says):
    tokens = {} if "inputs_embeds" in inputs else {"input_ids": ids(2, 6)}
    with pytest.raises(ValueError, match=says) as error:
        small(**tokens | inputs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, True])
def test_reading_in_pieces_of_nothing_is_refused(small, chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size={chunk_size} must be an integer from 1 on"):
        small.read(ids(1, 9), chunk_size=chunk_size)


def test_no_tokens(model):
    assert model(ids(2, 0)).logits.shape == (2, 0, VOCAB)


@pytest.mark.parametrize("bad", [[0, 3], [1, 4], [0, 5], [0, 3, 2, 4]])
def test_bad_packing_is_refused(small, bad):
    with pytest.raises(ValueError, match="cu_seqlens"):
        small(ids(1, 4), cu_seqlens=torch.tensor(bad))


# Loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blockwise_loss_is_cross_entropy(dtype):
    h, w = torch.randn(150, 8, dtype=dtype), torch.randn(VOCAB, 8, dtype=dtype)
    labels = torch.randint(0, VOCAB, (150,))
    labels[::7] = -100
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.2}[dtype]
    from nalanda.model.loss import _LinearCrossEntropy

    grads = []
    for one_go in (False, True):
        a, b = h.clone().requires_grad_(), w.clone().requires_grad_()
        if one_go:
            loss = F.cross_entropy((a @ b.T).double(), labels, reduction="sum")
        else:
            loss = _LinearCrossEntropy.apply(a, b, labels, -100, 64)
        (loss / 3).backward()
        grads.append((loss.detach().double(), a.grad, b.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=tolerance
        )
    assert linear_cross_entropy(h, w, torch.full((150,), -100)) == 0


@pytest.mark.parametrize("count", [3, 37, 1000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "autocast"])
def test_half_precision_gradients_are_not_scaled_by_a_rounded_divisor(dtype, count):
    """1/count rounded to bf16 would scale the gradient of all layers below the head by up to 0.4 %."""
    torch.manual_seed(0)
    half = torch.float16 if dtype == "float16" else torch.bfloat16
    h, w = torch.randn(1500, 64).to(half), (torch.randn(VOCAB, 64) / 10).to(half)
    labels, gradients = torch.randint(VOCAB, (1500,)), []
    for kind in (half, torch.float32):
        inputs = [
            x.to(torch.float32 if dtype == "autocast" else kind).detach().clone() for x in (h, w)
        ]
        a, b = (x.requires_grad_() for x in inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast" and kind is half):
            (linear_cross_entropy(a, b, labels) / count).backward()
        gradients.append([a.grad.double(), b.grad.double()])
    for rounded, exact in zip(*gradients, strict=True):
        assert (rounded * exact).sum() / exact.square().sum() == pytest.approx(1, abs=3e-4)


WITHOUT_A_LABEL = {
    "ignored": {"labels": torch.full((2, 6), -100)},
    "no items": {"num_items_in_batch": 0, "labels": torch.full((2, 6), -100)},
    "no items, a tensor": {
        "num_items_in_batch": torch.tensor(0),
        "labels": torch.full((2, 6), -100),
    },
    "z_loss": {"z_loss": 0.5, "labels": torch.full((2, 6), -100)},
    "a token a row": {"attention_mask": F.pad(torch.ones(2, 1), (0, 5))},
    "padding alone": {"attention_mask": torch.zeros(2, 6)},
    "a token a document": {"cu_seqlens": torch.arange(13)},
    "a column": {"input_ids": ids(2, 1), "labels": ids(2, 1)},
}
"""Batches in which no token has a target."""


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_batch_without_a_label_changes_no_weight(mixer):
    model = build(mixer, dtype=torch.float32).train()
    for name, described in WITHOUT_A_LABEL.items():
        model.zero_grad()
        loss = model(**{"input_ids": ids(2, 6), "labels": ids(2, 6), **described}).loss
        loss.backward()
        assert loss == 0, name
        changed = [
            n
            for n, p in model.named_parameters()
            if p.grad is not None and bool((p.grad != 0).any())
        ]
        assert not changed, name


@pytest.mark.parametrize(
    "count", [-1, True, torch.tensor(-1), torch.tensor(True), torch.tensor([3, 4])]
)
def test_a_number_of_labels_that_is_none_is_refused(small, count):
    with pytest.raises(ValueError, match="num_items_in_batch"):
        small(ids(2, 6), labels=ids(2, 6), num_items_in_batch=count)


def test_z_loss_is_in_the_gradient_alone(small):
    """Against float64 autograd over all logits, in several blocks, rows left out."""
    from nalanda.model.loss import _LinearCrossEntropy
    from nalanda.train.loss import summed_loss

    torch.manual_seed(0)
    labels = torch.randint(0, 31, (150,)).masked_fill(torch.rand(150) < 0.2, -100)
    h, w = torch.randn(150, 8, dtype=torch.float64), 2 * torch.randn(31, 8, dtype=torch.float64)
    (a, b), (c, d) = ([x.clone().requires_grad_() for x in (h, w)] for _ in range(2))
    everything = a @ b.T
    plain = F.cross_entropy(everything, labels, reduction="sum")
    term = 0.3 * everything.logsumexp(-1)[labels != -100].square().sum()
    ((plain + term) / 7).backward()
    value = _LinearCrossEntropy.apply(c, d, labels, -100, 64, True, 0.3)
    (value / 7).backward()
    close(value, plain, 1e-12)
    close(c.grad, a.grad, 1e-12)
    close(d.grad, b.grad, 1e-12)

    # The model hands it on, and the trainer does the same for models that are not ours.
    tokens, weight = ids(2, 11), small.lm_head.weight
    small.train()
    grads = []
    for z_loss in (0.0, 0.5):
        small.zero_grad()
        loss = small(tokens, labels=tokens, num_items_in_batch=1, z_loss=z_loss).loss
        loss.backward()
        grads.append((loss.detach(), weight.grad.clone()))
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    batch = {
        "input_ids": tokens % 31,
        "labels": (tokens % 31).masked_fill(torch.rand(2, 11) < 0.2, -100),
    }
    batch |= {"position_ids": torch.arange(11).repeat(2, 1), "cu_seqlens": torch.arange(3) * 11}
    for z_loss in (0.0, 0.5):
        llama.zero_grad()
        loss = summed_loss(llama, batch, torch.device("cpu"), z_loss)
        loss.backward()
        grads.append((loss.detach(), llama.lm_head.weight.grad.clone()))
    for (without, plain), (with_term, both) in (grads[:2], grads[2:]):
        assert with_term == without
        assert (both - plain).norm() > 0.1 * plain.norm()
    llama.zero_grad()
    logits = llama(batch["input_ids"]).logits[:, :-1][batch["labels"][:, 1:] != -100]
    (0.5 * logits.logsumexp(-1).square()).sum().backward()
    close(llama.lm_head.weight.grad, grads[3][1] - grads[2][1], 1e-4)


def test_loss_follows_transformers(small):
    tokens, labels = ids(2, 11), ids(2, 11)
    labels[0, :6] = -100
    expected = F.cross_entropy(
        logits(small, tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    count = (labels[:, 1:] != -100).sum()
    out = small(tokens, labels=labels)
    close(out.loss, expected.sum() / count, 1e-5)
    assert out.logits.shape == (2, 11, VOCAB)
    small.train()
    out = small(tokens, labels=labels, num_items_in_batch=40)
    close(out.loss, expected.sum() / 40, 1e-5)
    assert out.logits is None
    close(small(tokens, labels=labels, num_items_in_batch=torch.tensor([40])).loss, out.loss)
    assert small(tokens).logits.shape == (2, 11, VOCAB)


def test_labels_may_be_shifted_already(small):
    """As trainers that cut rows over processes send them; transformers' loss then reads no other labels."""
    tokens, labels = ids(2, 11), ids(2, 11, seed=1)
    labels[0, 3:6] = -100
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=0)).loss_function
    for count in (None, 40):
        expected = theirs(
            logits(small, tokens), labels, VOCAB, num_items_in_batch=count, shift_labels=labels
        )
        for mode in (small.train(), small.eval()):
            for others in ({}, {"labels": tokens}):
                out = mode(tokens, shift_labels=labels, num_items_in_batch=count, **others)
                close(out.loss, expected, 1e-5)
                assert (out.logits is None) == mode.training


def test_loss_is_that_of_the_texts_alone(small):
    """Nothing predicts a text's first token, nor padding: on either side, or packed."""
    texts = [ids(5, seed=1), ids(9, seed=2)]
    total = sum(small(row[None], labels=row[None]).loss * (len(row) - 1) for row in texts)
    for side in ((4, 0), (0, 4)):
        rows = torch.stack([F.pad(texts[0], side), texts[1]])
        mask = torch.stack([F.pad(torch.ones_like(texts[0]), side), torch.ones_like(texts[1])])
        close(small(rows, attention_mask=mask, labels=rows).loss, total / 12, 1e-5)
        close(
            small(rows, attention_mask=mask, labels=rows, num_items_in_batch=3).loss,
            total / 3,
            1e-5,
        )
    row = torch.cat(texts)[None]
    bounds, places = (
        torch.tensor([0, 5, 5, 14, 14]),
        torch.cat([torch.arange(5), torch.arange(9)])[None],
    )
    for described in ({"cu_seqlens": bounds}, {"position_ids": places}):
        close(small(row, labels=row, **described).loss, total / 12, 1e-5)
    whole = torch.stack([row[0], row[0]])
    close(small(whole, labels=whole, position_ids=places).loss, total / 12, 1e-5)


def test_loss_is_that_of_the_heads_call(small, tmp_path):
    """Not of its bare weight, where a hook changes the result or the weight is not in memory."""
    tokens = ids(2, 9)
    expected = small(tokens, labels=tokens).loss
    small.save_pretrained(tmp_path)
    places = {"model": "cpu", "lm_head": "disk"}
    away = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "off"
    )
    close(away.eval()(tokens, labels=tokens).loss, expected, 1e-5)
    small.lm_head.register_forward_hook(lambda module, inputs, out: 0 * out)
    close(small(tokens, labels=tokens).loss, torch.tensor(float(VOCAB)).log(), 1e-5)


def test_evaluation_forms_no_gradient(small):
    from torch.utils.flop_counter import FlopCounterMode

    h = torch.randn(10, 24)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        linear_cross_entropy(h, small.lm_head.weight, torch.arange(10))
    assert counter.get_total_flops() == 2 * 10 * 24 * VOCAB


def test_transformers_trainer_trains(small, tmp_path):
    rows = [{"input_ids": ids(12, seed=i), "labels": ids(12, seed=i)} for i in range(4)]
    before = small.lm_head.weight.clone()
    arguments = TrainingArguments(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    result = Trainer(model=small, args=arguments, train_dataset=rows).train()
    assert result.training_loss > 0
    assert not torch.equal(before, small.lm_head.weight)


def test_gradient_checkpointing_changes_nothing(small):
    small.train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            small.gradient_checkpointing_enable()
        small.zero_grad()
        small(ids(2, 9), labels=ids(2, 9), cu_seqlens=torch.tensor([0, 4, 18])).loss.backward()
        grads.append([p.grad.clone() for p in small.parameters()])
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-6)


def test_hidden_states(small):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    out = small(ids(2, 9), attention_mask=mask, output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 9, 24)] * 3
    close(small.lm_head(out.hidden_states[-1]), out.logits, 1e-6)


# Loading, precision, initialisation


@pytest.mark.parametrize("mask", [None, [1, 1, 1, 1, 0, 0]])
def test_hidden_states_have_gradients(small, mask):
    mask = None if mask is None else torch.tensor([mask, [1] * 6])
    out = small(ids(2, 6), attention_mask=mask, output_hidden_states=True)
    for hidden in out.hidden_states:
        hidden.retain_grad()
    out.logits[0, 3].square().sum().backward()
    for hidden in out.hidden_states:
        assert bool((hidden.grad[0, 3] != 0).all())
        assert bool((hidden.grad[0, 4:] == 0).all())  # nothing before sees them


def test_a_model_loads_by_the_keyword_of_transformers(small, tmp_path):
    small.save_pretrained(tmp_path)
    for load in (NalandaForCausalLM.from_pretrained, NalandaConfig.from_pretrained):
        assert load(pretrained_model_name_or_path=tmp_path)


def test_loads_where_nalanda_is_not(small, tmp_path):
    """The checkpoint carries its code: a process that cannot import any of ours gives the same logits."""
    small.save_pretrained(tmp_path / "model")
    hidden = small(ids(2, 9), output_hidden_states=True).hidden_states
    torch.save((logits(small, ids(2, 9)), hidden), tmp_path / "expected.pt")
    encoder = build("mala", is_decoder=False, dtype=torch.float32)
    encoder.save_pretrained(tmp_path / "encoder")
    torch.save(encoder(ids(2, 9)).logits, tmp_path / "encoded.pt")
    program = f"""
import sys
for name in ("nalanda", "nalanda_kernels", "nalanda_eval"):
    sys.modules[name] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers import AutoModelForSequenceClassification
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
assert "transformers_modules" in type(model).__module__
tokens = torch.randint(0, {VOCAB}, (2, 9), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    logits, hidden = torch.load({str(tmp_path / "expected.pt")!r})
    assert torch.equal(model(tokens).logits, logits)
    decoder = AutoModel.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
    assert "transformers_modules" in type(decoder).__module__
    assert torch.equal(decoder(tokens).last_hidden_state, hidden[-1])
    model.generate(tokens, max_new_tokens=3, attention_mask=torch.ones_like(tokens), pad_token_id=0)
    masked = AutoModelForMaskedLM.from_pretrained({str(tmp_path / "encoder")!r}, trust_remote_code=True)
    assert torch.equal(masked.eval()(tokens).logits, torch.load({str(tmp_path / "encoded.pt")!r}))
    for folder in ("model", "encoder"):
        folder = {str(tmp_path)!r} + "/" + folder
        head = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        assert head(tokens, attention_mask=torch.ones_like(tokens)).logits.shape == (2, 2)
model.save_pretrained({str(tmp_path / "again")!r})
"""
    environment = {
        **os.environ,
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {p.name for p in (tmp_path / "again").glob("*.py")} >= {
        "decoder.py",
        "language.py",
        "ops.py",
        "mixers.py",
    }


def test_auto_model_is_the_decoder(small, tmp_path):
    """Its hidden states are transformers': the embeddings, then after each block, the last after the norm."""
    small.save_pretrained(tmp_path)
    names = {"AutoConfig": "configuration.NalandaConfig", **AUTO_MAP}
    del names["AutoModelForMaskedLM"], names["AutoModelForImageClassification"]
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == names
    decoder, tokens = (
        AutoModel.from_pretrained(tmp_path, output_hidden_states=True).eval(),
        ids(2, 9),
    )
    with torch.no_grad():
        out, head = decoder(tokens), small(tokens, output_hidden_states=True)
        assert len(out.hidden_states) == 1 + len(decoder.layers)
        assert torch.equal(out.hidden_states[0], decoder.embed_tokens(tokens))
        assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
        assert all(map(torch.equal, out.hidden_states, head.hidden_states))
        assert torch.equal(small.lm_head(out.last_hidden_state), head.logits)
        assert torch.equal(decoder(tokens, return_dict=False)[0], out.last_hidden_state)
    assert "hidden_states" not in AutoModel.from_pretrained(tmp_path)(tokens)
    decoder.save_pretrained(tmp_path / "decoder")
    again = AutoModel.from_pretrained(tmp_path / "decoder").eval()
    assert torch.equal(again(tokens).last_hidden_state, out.last_hidden_state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decay_stays_fp32(small, tmp_path, dtype):
    wanted = [layer.mixer.decay.A_log.clone() for layer in small.model.layers]
    small.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    cast = build(dtype=torch.float32).to(getattr(torch, dtype))
    made = AutoModelForCausalLM.from_config(small.config, dtype=dtype)
    for m in (loaded, cast, made):
        assert m.lm_head.weight.dtype == getattr(torch, dtype)
        for layer, A_log in zip(m.model.layers, wanted, strict=True):
            assert layer.mixer.decay.A_log.dtype == layer.mixer.decay.dt_bias.dtype == torch.float32
            assert m is made or torch.equal(layer.mixer.decay.A_log, A_log)
        out = m(ids(2, 9), labels=ids(2, 9))
        assert out.loss.isfinite()


def test_decay_becomes_fp32_from_a_half_precision_checkpoint(small, tmp_path):
    """Other programs save everything in bf16."""
    from safetensors.torch import load_file, save_file

    small.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {n: t.bfloat16() for n, t in weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    decays = [p for layer in loaded.model.layers for p in layer.mixer.decay.parameters()]
    assert {p.dtype for p in decays} == {torch.float32}


@pytest.mark.parametrize("feature_map", ["elu1", "exp", "nala"])
def test_sums_do_not_leave_half_precisions_range(feature_map):
    """3000 equal tokens under features that are all positive."""
    options = {
        "mixer": "linear_attention",
        "mixer_options": {"denominator": False},
        "hidden_size": 64,
    }
    model = build(feature_map=feature_map, dtype=torch.float16, **options)
    assert logits(model, torch.full((1, 3000), 5)).isfinite().all()


def test_dense_batches_compile_into_one_graph():
    model = build("linear_attention", dtype=torch.float32)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(ids(2, 9), use_cache=False).logits, logits(model, ids(2, 9)), 1e-5)


@pytest.mark.parametrize("feature_map", ["nala", "pola"])
def test_compiles_where_sizes_and_numbers_may_change(feature_map):
    model, tokens, results = build("gated_deltanet", feature_map=feature_map), ids(2, 9), []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for function in (model, compiled):
        model.zero_grad()
        loss = function(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for right, mine in zip(*results, strict=True):
        close(mine, right)


def test_masked_batches_compile_into_one_graph():
    """Whatever the mask holds: no padding, on the left, the right, in the middle, a row of nothing else."""
    model, tokens = build(["gated_deltanet", "softmax"]), ids(5, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    mask = torch.ones(5, 9, dtype=torch.int64)
    mask[1, :4], mask[2, 6:], mask[3, 2:5], mask[4] = 0, 0, 0, 0
    results = []
    for function in (model, compiled):
        model.zero_grad()
        out = function(tokens, attention_mask=mask, labels=tokens, use_cache=False)
        out.loss.backward()
        results.append(
            [out.loss.detach(), out.logits.detach(), *(p.grad for p in model.parameters())]
        )
    for right, mine in zip(*results, strict=True):
        close(mine, right)


def nats_a_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T − 1]: the log-likelihood of each token behind the first."""
    return logits.double().log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("mixer", MIXERS)
def test_bf16_is_rounded_alike_with_a_cache_and_without(mixer):
    """Either may be away from the exact result; where both round alike, they are nearer to one another.
    torch's softmax attention rounds otherwise for one query than for many. `-rP` prints the figures."""
    model, tokens, cache = (
        build(mixer, dtype=torch.bfloat16, hidden_size=64),
        ids(4, 40),
        NalandaCache(2),
    )
    pieces = [
        logits(model, piece, past_key_values=cache) for piece in tokens.split([8] + [1] * 32, 1)
    ]
    cached, whole = torch.cat(pieces, 1).double(), logits(model, tokens).double()
    exact = logits(model.double(), tokens)
    apart = nats_a_token(cached, tokens) - nats_a_token(whole, tokens)
    print(f"{mixer}: {apart.square().mean().sqrt():.1e} nats a token, root mean square")
    share = 2 if issubclass(MIXERS[mixer], SoftmaxAttention) else 0.5
    assert (cached - whole).norm() < share * (whole - exact).norm()


@pytest.mark.parametrize("mixer", MIXERS)
def test_linear_layers_under_autocast_read_its_dtype(mixer):
    """A Linear casts fp32 inputs itself, each one again; a block has up to eight."""
    model, seen = build(mixer, dtype=torch.float32), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids(1, 9), output_hidden_states=True, labels=ids(1, 9))
    out.loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert {x.dtype for x in out.hidden_states[:-1]} == {torch.float32}, "the residual stream"
    assert {x.grad.dtype for x in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_likelihoods_in_bf16_do_not_depend_on_the_batch(mixer, side):
    """5e-3 nats a token; with other companions and padding, products round elsewhere."""
    model = build(mixer, dtype=torch.bfloat16, hidden_size=64)
    texts = [ids(1, n, seed=n) for n in (9, 40, 65, 70)]

    def scored(tokens, mask):
        said = nats_a_token(logits(model, tokens, attention_mask=mask), tokens)
        return (said * (mask[:, 1:] & mask[:, :-1])).sum(1)

    alone = torch.cat([scored(text, torch.ones_like(text)) for text in texts])
    lengths = torch.tensor([text.shape[1] for text in texts])
    for size in (2, 4):
        for i in range(0, 4, size):
            gaps = [int(lengths[i : i + size].max()) - n for n in lengths[i : i + size].tolist()]
            pads = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
            tokens, mask = (
                torch.cat([F.pad(x, pad) for x, pad in zip(part, pads, strict=True)])
                for part in (texts[i : i + size], [torch.ones_like(t) for t in texts[i : i + size]])
            )
            off = (scored(tokens, mask) - alone[i : i + size]) / (lengths[i : i + size] - 1)
            print(f"{mixer}: batch of {size}, {side}: {off.abs().max():.1e} nats a token")
            assert off.abs().max() <= 5e-3


def check_decay(decay: Decay) -> None:
    A, dt = decay.A_log.detach().exp(), F.softplus(decay.dt_bias.detach())
    assert 0 < A.min() < 2
    assert 14 < A.max() <= 16
    assert 0.999e-3 < dt.min() < 2e-3
    assert 0.05 < dt.max() < 0.1001
    # log-uniform: about half of it below the geometric mean
    assert 0.35 < (dt < 0.01).float().mean() < 0.65


def test_decay_starts_as_defined(tmp_path):
    config = NalandaConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=256,
        head_dim=1,
        intermediate_size=8,
    )
    made = AutoModelForCausalLM.from_config(config)
    check_decay(made.model.layers[0].mixer.decay)
    with torch.device("meta"):
        empty = NalandaForCausalLM(config)
    empty.to_empty(device="cpu").init_weights()
    check_decay(empty.model.layers[0].mixer.decay)
    assert empty.model.layers[0].mixer.o_norm.weight.eq(1).all()
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(
        again.model.layers[0].mixer.decay.A_log, made.model.layers[0].mixer.decay.A_log
    )


@pytest.fixture
def process_group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_decay_stays_as_defined_in_distributed_wrappers(wrapper, process_group, monkeypatch):
    """Wrapped before anything is allocated, then initialised, then trained a step in bf16 compute."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config = NalandaConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=256,
        head_dim=1,
        intermediate_size=8,
    )
    with torch.device("meta"):
        model = NalandaForCausalLM(config)
    decay, seen = model.model.layers[0].mixer.decay, []
    if wrapper == "fsdp2":
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(decay)  # a unit of its own, whose parameters no policy casts
        fully_shard(model.model.layers[0], mp_policy=half)
        fully_shard(model, mp_policy=half)
    model.to_empty(device="cpu").init_weights()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if wrapper == "ddp" else model
    whole = [getattr(p, "full_tensor", p.detach)() for p in (decay.A_log, decay.dt_bias)]
    plain = Decay(256)
    plain.load_state_dict({"A_log": whole[0], "dt_bias": whole[1]})
    check_decay(plain)
    decay.register_forward_hook(lambda m, args, out: seen.append((m.A_log.dtype, out.dtype)))
    wrapped.train()
    # Nor do they make the head more than a matrix, whose loss needs all logits at once.
    fused = mock.Mock(side_effect=linear_cross_entropy)
    monkeypatch.setattr("nalanda.model.language.linear_cross_entropy", fused)
    with torch.autocast("cpu", torch.bfloat16, enabled=wrapper == "ddp"):
        wrapped(ids(2, 9) % 8, labels=ids(2, 9) % 8).loss.backward()
    fused.assert_called_once()
    assert seen == [(torch.float32, torch.float32)]
    assert decay.A_log.grad.dtype == torch.float32


def test_device_map(small, tmp_path):
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").eval()
    assert torch.equal(logits(again, ids(2, 9)), logits(small, ids(2, 9)))


@pytest.mark.parametrize("mixer", MIXERS)
def test_offloaded_weights(mixer):
    """They are in memory only while the module that has them runs."""
    from accelerate import cpu_offload

    model, kwargs = build(mixer), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected, loss = (
            model.generate(ids(2, 9), **kwargs),
            model(ids(2, 9), labels=ids(2, 9)).loss,
        )
        cpu_offload(model, torch.device("cpu"))
        assert all(p.is_meta for p in model.parameters())
        assert torch.equal(model.generate(ids(2, 9), **kwargs), expected)
        close(model(ids(2, 9), labels=ids(2, 9)).loss, loss)


def test_tied_embeddings_stay_tied(tmp_path):
    model = build(dtype=torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again, ids(2, 9)), logits(model, ids(2, 9)))


# Config


def test_a_pattern_repeats_over_the_layers(tmp_path):
    names = ["gated_deltanet", "gated_deltanet", "softmax"]
    options = {"softmax": {"num_heads": 2, "head_dim": 8, "gate": "head", "qk_norm": True}}
    config = NalandaConfig(
        mixer={"pattern": names},
        num_hidden_layers=5,
        hidden_size=32,
        num_heads=4,
        mixer_options=options,
    )
    assert config.mixer == config.layer_mixers == [*names, *names[:2]]
    config.save_pretrained(tmp_path)
    assert NalandaConfig.from_pretrained(tmp_path).mixer == config.mixer
    softmax = NalandaForCausalLM(config).model.layers[2].mixer
    assert (softmax.num_heads, softmax.K, softmax.V) == (2, 8, 8)
    assert softmax.g_proj.weight.shape == (2, 32)
    assert softmax.q_norm.weight.shape == (8,)
    assert config.num_heads == 4  # of the other layers


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hiden_size": 8}, "did you mean 'hidden_size'"),
        ({"mixer": "delta_net"}, "choose one of deltanet"),
        ({"feature_map": "nahla"}, "choose one of identity"),
        ({"mixer_options": {"num_v_head": 4}}, "num_v_head"),
        ({"mixer_options": {"num_v_heads": 3}}, "multiple of num_heads=2"),
        ({"feature_map": "nala", "feature_map_options": {"angel": "rms"}}, "angel"),
        (
            {"feature_map": "nala", "feature_map_options": {"angle": "cosine"}},
            "direction, rms, raw",
        ),
        ({"feature_map": "nala", "feature_map_options": {"power": 0}}, "positive"),
        ({"num_heads": 5}, "multiple of num_heads=5"),
        ({"expand_k": 0.3}, "expand_k"),
        ({"conv_size": 1}, "conv_size"),
        ({"mixer": ["deltanet"]}, "names 1 layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"mixer": "linear_attention", "feature_map": "silu"}, "denominator=false"),
        ({"mixer": "mala", "feature_map": "identity"}, "choose relu, exp, elu1"),
        ({"mixer": "nala", "feature_map": "nala_vision"}, "nala_paper, nala_released, nala_code"),
        ({"mixer": "pola", "feature_map": "relu"}, "needs feature_map 'pola'"),
        ({"mixer": "pola", "head_dim": 5}, "must be even"),
        ({"mixer": "soft", "feature_map": "relu"}, "take mixer 'linear_attention'"),
        ({"mixer": "mala", "mixer_options": {"scale": "paper"}}, "code, inverse_t, literal"),
        (
            {"mixer": "diag_attention", "mixer_options": {"block_size": 4096}},
            "must be from 1 to max_position",
        ),
        ({"mixer": "softmax", "feature_map": "nala"}, "softmax does not use it"),
        ({"mixer": "softmax", "conv_size": 4}, "softmax does not use it"),
        ({"mixer": "softmax", "mixer_options": {"conv_size": 1}}, "at least 2"),
        ({"mixer": "softmax", "mixer_options": {"rotary_dim": 3}}, "must be even"),
        ({"mixer": "softmax", "mixer_options": {"gate": "row"}}, "must be head or channel"),
        ({"mixer": {"pattern": []}}, r"\{pattern: \[names\]\} to repeat"),
        ({"mixer": {"pattern": ["softmax"], "every": 4}}, r"\{pattern: \[names\]\} to repeat"),
        ({"mixer": "norm_attention", "use_gate": True}, "norm_attention does not use it"),
        ({"mixer": "retention", "feature_map_options": {"power": 3}}, "retention does not use it"),
        ({"mixer_options": {"gla": {"gate_rank": 4}}}, "'gla', which no layer has"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": "0.1"}, "dropout='0.1' must be float"),
        ({"norm_eps": "1e-5"}, "norm_eps='1e-5' must be float"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
        ({"intermediate_size": -1}, "intermediate_size=-1 must be positive"),
        ({"head_dim": 8.5}, "head_dim=8.5 must be int"),
        ({"use_gate": "false"}, "use_gate='false' must be bool"),
        ({"mixer": [["deltanet"], "gla"]}, "must be str"),
        ({"mixer_options": [1]}, "mixer_options"),
        ({"mixer_options": {"gated_deltanet": 3}}, "gated_deltanet=3 must be dict"),
        ({"mixer_options": {"allow_neg_eigval": "no"}}, "allow_neg_eigval='no' must be bool"),
        ({"mixer": "softmax", "mixer_options": {"window": 2.5}}, "window=2.5 must be int"),
        (
            {"mixer": "retention", "mixer_options": {"rope_theta": -1}},
            "rope_theta=-1 must be positive",
        ),
        ({"feature_map": "nala", "feature_map_options": {"power": "2"}}, "power='2' must be float"),
        (
            {"feature_map": "soft", "feature_map_options": {"landmarks": True}},
            "landmarks=True must be int",
        ),
        ({"position_embedding": "absolute"}, "none, sinusoidal, learnt"),
        ({"position_embedding": "learnt"}, "set image_size"),
        ({"initializer": "kaiming"}, "normal, xavier"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_configs_are_refused_in_one_line(options, says):
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 2}
    with pytest.raises(ValueError, match=says) as error:
        NalandaConfig(**{**sizes, **options})
    assert "\n" not in str(error.value)


def test_a_changed_value_of_a_wrong_type_is_refused(small, tmp_path):
    """transformers sets it after the config is made."""
    small.save_pretrained(tmp_path)
    for load in (NalandaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        for key in ("num_hidden_layers", "vocab_size"):
            with pytest.raises(ValueError, match=f"{key}='2' must be int"):
                load(tmp_path, **{key: "2"})


def test_config_round_trip(tmp_path):
    config = build(num_hidden_layers=1, mixer=["deltanet"]).config
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_diff_dict() == config.to_diff_dict()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["mixer"] == ["deltanet"]
    assert NalandaConfig(num_attention_heads=4, hidden_size=32).num_heads == 4


@pytest.mark.parametrize(
    ("options", "millions"),
    [
        ({"mixer": "deltanet"}, 374.4),
        ({"mixer": "deltanet", "use_gate": True}, 399.5),
        ({"mixer": "deltanet", "expand_k": 0.5}, 349.0),
        ({"num_hidden_layers": 21, "num_heads": 6, "head_dim": 128, "expand_v": 2}, 379.9),
        ({"num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2}, 512.0),
    ],
    ids=str,
)
def test_literature_parameter_counts(options, millions):
    with torch.device("meta"):
        model = NalandaForCausalLM(NalandaConfig(intermediate_size=2816, **options))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1.5e-3)


def test_flops_count_what_is_done():
    """Every matrix product that torch sees is in the model's count, and little more, at whole chunks."""
    from torch.utils.flop_counter import FlopCounterMode

    def baddbmm_(_, a, b, **__):  # in place: torch's own table has only the other one
        return 2 * a[0] * a[1] * a[2] * b[2]

    model, T = build(dtype=torch.float32, hidden_size=64, num_heads=1, vocab_size=200), 128
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.baddbmm_: baddbmm_}
    ) as counter:
        logits(model, torch.zeros(1, T, dtype=torch.long))
    ratio = model.config.flops_per_token(T) * T / counter.get_total_flops()
    assert 0.98 < ratio < 1.05, ratio


# Layers


def test_convolution_is_conv1d():
    from nalanda.model.layers import ShortConv

    conv, cu = ShortConv(6, 4).double(), torch.tensor([0, 2, 2, 7, 9])
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight, groups=6).transpose(1, 2)
    close(conv(x, Sequences())[0], expected)
    long = torch.randn(
        1, 600, 6, dtype=torch.float64, requires_grad=True
    )  # more than the backward's block
    padded = F.pad(long.transpose(1, 2), (3, 0))
    whole = F.conv1d(padded, conv.weight, groups=6).transpose(1, 2)
    leaves, weights = (long, conv.weight), torch.randn_like(whole)
    ours, theirs = (
        torch.autograd.grad(y, leaves, weights) for y in (conv(long, Sequences())[0], whole)
    )
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other)

    def run(weight, x, state, cu):
        return torch.func.functional_call(conv, {"weight": weight}, (x, Sequences(cu), state, True))

    assert torch.autograd.gradcheck(run, (conv.weight, x, state[:2], None))
    assert torch.autograd.gradcheck(run, (conv.weight, x[:1], state, cu))
