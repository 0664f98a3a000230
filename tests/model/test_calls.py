"""A model's call takes what transformers gives, refuses what does not fit, and returns hidden states."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, build, close, ids, logits
from transformers import DataCollatorWithFlattening

from nalanda import NalandaCache
from nalanda.model import MIXERS


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


@pytest.mark.parametrize("mixer", MIXERS)
def test_calls_without_rows_or_without_tokens(mixer):
    model, past = build(mixer=mixer), NalandaCache(2)
    loss = model.train()(none := torch.zeros(0, 5, dtype=torch.long), labels=none).loss
    loss.backward()
    assert loss == 0
    model.eval()
    assert model(none).logits.shape == (0, 5, VOCAB)
    expected = logits(model, ids(2, 9))[:, -1]
    logits(model, ids(2, 9)[:, :8], past_key_values=past)
    assert logits(model, ids(2, 0), past_key_values=past).shape == (2, 0, VOCAB)
    close(logits(model, ids(2, 9)[:, 8:], past_key_values=past)[:, -1], expected)


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
        ({"input_ids": [[1] * 6]}, "input_ids must be a tensor, got list"),
        ({"inputs_embeds": [[[0.0] * 24]]}, "inputs_embeds must be a tensor, got list"),
        ({"attention_mask": [[1] * 6] * 2}, "attention_mask must be a tensor, got list"),
        ({"position_ids": [[*range(6)]] * 2}, "position_ids must be a tensor, got list"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1: give 0 for all, or the last n"),
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


def test_continuous_batching_is_refused(small):
    """`transformers serve` asks for the attribute, and then serves requests in turn."""
    assert not hasattr(small, "init_continuous_batching")
    for call in (
        lambda: small.generate_batch([[1, 2, 3]]),
        lambda: small.init_continuous_batching(),
        lambda: small.continuous_batching_context_manager().__enter__(),
    ):
        with pytest.raises(AttributeError, match="call generate with a padded batch, or serve"):
            call()


@pytest.mark.parametrize("bad", [[0, 3], [1, 4], [0, 5], [0, 3, 2, 4]])
def test_bad_packing_is_refused(small, bad):
    with pytest.raises(ValueError, match="cu_seqlens"):
        small(ids(1, 4), cu_seqlens=torch.tensor(bad))


def test_hidden_states(small):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    out = small(ids(2, 9), attention_mask=mask, output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 9, 24)] * 3
    close(small.lm_head(out.hidden_states[-1]), out.logits, 1e-6)


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
