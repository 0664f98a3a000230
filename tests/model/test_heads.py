"""Encoders and decoders under transformers' other heads."""

import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, close, ids
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from nalanda import NalandaConfig, NalandaForCausalLM, NalandaForMaskedLM
from nalanda.model.configuration import AUTO_MAP
from nalanda.model.loss import linear_cross_entropy


def config(is_decoder=False, **options):
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 2}
    options = {
        "mixer": "linear_attention",
        "intermediate_size": 32,
        "initializer_range": 0.3,
        **options,
    }
    return NalandaConfig(**sizes, is_decoder=is_decoder, **options)


def made(auto, **options):
    torch.manual_seed(0)
    return auto.from_config(config(**options)).double().eval()


def some_labels():
    return ids(2, 40).where(
        torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) < 0.2, -100
    )


def test_masked_lm_loss_is_of_the_logits_in_place():
    """Not shifted. The same in training, with its gradients: there the head reads only labelled tokens."""
    model, tokens, labels = made(AutoModelForMaskedLM), ids(2, 40), some_labels()
    out = model(tokens, labels=labels)
    close(out.loss, F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    expected = torch.autograd.grad(out.loss, model.parameters())
    fused = mock.patch(
        "nalanda.model.language.linear_cross_entropy", side_effect=linear_cross_entropy
    )
    with fused as read:
        trained = model.train()(tokens, labels=labels)
    assert len(read.call_args.args[0]) == (labels != -100).sum()
    assert trained.logits is None
    close(trained.loss, out.loss)
    for a, b in zip(torch.autograd.grad(trained.loss, model.parameters()), expected, strict=True):
        close(a, b)
    divided = model(tokens, labels=labels, num_items_in_batch=torch.tensor(100)).loss
    close(divided * 100, out.loss * (labels != -100).sum())
    for count in (None, 0, torch.tensor(0)):
        nothing = model(tokens, labels=torch.full_like(tokens, -100), num_items_in_batch=count).loss
        gradients = torch.autograd.grad(nothing, model.parameters())
        assert nothing == 0
        assert not any(bool((x != 0).any()) for x in gradients)
    mask = torch.ones_like(tokens)
    mask[0, 30:] = 0  # the labels of padding count for nothing
    own = labels.masked_fill(mask == 0, -100)
    close(*(model(tokens, attention_mask=mask, labels=x).loss for x in (labels, own)))
    z = [
        torch.autograd.grad(model(tokens, labels=labels, z_loss=z).loss, model.lm_head.weight)
        for z in (0, 1)
    ]
    assert not torch.allclose(z[0][0], z[1][0])


def test_heads_refuse_the_other_direction():
    with pytest.raises(ValueError, match=r"is_decoder is true: .*AutoModelForCausalLM"):
        NalandaForMaskedLM(config(is_decoder=True))
    with pytest.raises(ValueError, match=r"is_decoder is false: .*AutoModelForMaskedLM"):
        NalandaForCausalLM(config())
    with pytest.raises(ValueError, match="an encoder has no states"):
        made(AutoModel)(ids(2, 9), use_cache=True)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_transformers(tied):
    model = made(AutoModelForMaskedLM, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    assert model(ids(2, 9)).logits.shape == (2, 9, VOCAB + 3)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("auto", [AutoModelForMaskedLM, AutoModelForSequenceClassification])
def test_gradient_checkpointing_changes_no_gradient(auto):
    model, found = made(auto).train(), []
    labels = some_labels() if auto is AutoModelForMaskedLM else torch.tensor([0, 1])
    for on in (False, True):
        model.gradient_checkpointing_enable() if on else None
        found.append(torch.autograd.grad(model(ids(2, 40), labels=labels).loss, model.parameters()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("is_decoder", [False, True])
def test_sequences_are_classified_alone_padded_or_packed(is_decoder):
    model = made(AutoModelForSequenceClassification, is_decoder=is_decoder, num_labels=3)
    tokens, mask = ids(3, 17), torch.ones(3, 17, dtype=torch.long)
    mask[0, 9:], mask[1, :4] = 0, 0
    rows = [tokens[:1, :9], tokens[1:2, 4:], tokens[2:]]
    alone = torch.cat([model(row).logits for row in rows])
    close(model(tokens, attention_mask=mask).logits, alone)
    cu, joined = torch.tensor([0, 9, 22, 39]), torch.cat(rows, 1)
    close(model(joined, cu_seqlens=cu).logits, alone)
    restart = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    close(model(joined, position_ids=restart).logits, alone)
    hidden = model.model(rows[0]).last_hidden_state[0]
    close(alone[:1], model.score(hidden[-1:] if is_decoder else hidden.mean(0, keepdim=True)))
    mask[2] = 0
    with pytest.raises(ValueError, match="without a token"):
        model(tokens, attention_mask=mask)


@pytest.mark.parametrize(
    "auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
@pytest.mark.parametrize("is_decoder", [False, True])
def test_without_a_mask_pad_ids_at_the_end_are_padding(auto, is_decoder):
    pad, lengths = VOCAB - 1, (9, 1, 17)
    model = made(auto, is_decoder=is_decoder, num_labels=3, pad_token_id=pad)
    tokens = ids(3, 17) % pad
    tokens[0, 4] = pad  # a token before others is no padding
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = pad
    padded = model(tokens).logits
    close(
        model(tokens, position_ids=torch.arange(17)[None]).logits, padded
    )  # these begin no document
    for row, length, scores in zip(tokens, lengths, padded, strict=True):
        alone = model(row[None, :length], attention_mask=torch.ones(1, length)).logits[0]
        close(scores if scores.dim() == 1 else scores[:length], alone)
    # A mask says itself what padding is.
    masked = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert not torch.allclose(masked[0], padded[0])


@pytest.mark.parametrize(
    "auto",
    [AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification],
)
def test_keywords_of_other_models(auto):
    """Those of trainers, collators and tokenizers; a misspelt one is refused."""
    model, row = made(auto), torch.cat([ids(9, seed=1), ids(4, seed=2)])[None]
    packed = {"cu_seq_lens_q": torch.tensor([0, 9, 13]), "max_length_q": 9}
    expected = model(row, cu_seqlens=packed["cu_seq_lens_q"]).logits
    none = {"use_cache": False, "past_key_values": None, "token_type_ids": torch.zeros_like(row)}
    assert torch.equal(model(row, **packed, **none).logits, expected)
    with pytest.raises(TypeError, match="lables"):
        model(row, lables=row)
    with pytest.raises(ValueError, match="cache"):
        model(row, use_cache=True)


def test_rows_of_a_decoder_end_at_a_known_place():
    """As transformers, a batch is refused that does not say where its rows end."""
    model = made(AutoModelForSequenceClassification, is_decoder=True)
    with pytest.raises(ValueError, match=r"pad_token_id is not set: .*attention_mask"):
        model(ids(2, 9))
    whole = model(ids(2, 9), attention_mask=torch.ones(2, 9)).logits
    close(model(inputs_embeds=model.get_input_embeddings()(ids(2, 9))).logits, whole)
    close(model(ids(2, 9)[:1]).logits, whole[:1])


@pytest.mark.parametrize(
    ("labels", "num_labels", "problem", "loss"),
    [
        (torch.tensor([2, 0]), 3, "single_label_classification", F.cross_entropy),
        (
            torch.tensor([[1.0, 0, 1], [0, 0, 1]]),
            3,
            "multi_label_classification",
            F.binary_cross_entropy_with_logits,
        ),
        (torch.tensor([0.5, -1]), 1, "regression", lambda x, y: F.mse_loss(x[:, 0], y.double())),
    ],
)
def test_problem_type_chooses_the_loss(labels, num_labels, problem, loss):
    model = made(AutoModelForSequenceClassification, num_labels=num_labels)
    out = model(ids(2, 9), labels=labels)
    close(out.loss, loss(out.logits, labels))
    assert model.config.problem_type == problem


def test_tokens_are_classified():
    model = made(AutoModelForTokenClassification, num_labels=5, dropout=0.5)
    labels = torch.arange(18).view(2, 9) % 5
    labels[0, 3:] = -100
    out = model(ids(2, 9), labels=labels)
    assert out.logits.shape == (2, 9, 5)
    expected = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    close(out.loss.double(), expected, 1e-6)  # transformers computes it in fp32
    model.train()
    assert not torch.equal(*(model(ids(2, 9)).logits for _ in range(2))), "dropout"


@pytest.mark.parametrize("is_decoder", [False, True])
def test_answers_are_found(is_decoder):
    model = made(AutoModelForQuestionAnswering, is_decoder=is_decoder)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    starts, ends = torch.tensor([2, 9]), torch.tensor([4, 5])  # 9 is behind the text
    out = model(ids(2, 9), attention_mask=mask, start_positions=starts, end_positions=ends)
    assert out.start_logits.shape == out.end_logits.shape == (2, 9)
    expected = F.cross_entropy(out.start_logits[:1], starts[:1])
    expected = (expected + F.cross_entropy(out.end_logits, ends)) / 2
    close(out.loss.double(), expected, 1e-6)
    close(model(ids(2, 9)[1:, :6]).start_logits, out.start_logits[1:, :6])
    out.loss.backward()
    assert model.qa_outputs.weight.grad.abs().sum() > 0  # the name that PEFT trains
    with pytest.raises(ValueError, match="use_cache"):
        model(ids(2, 9), use_cache=True)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_choices_are_scored_alone(is_decoder):
    """Each text as a row of its own; in training they differ by their last tokens or their means."""
    model = made(AutoModelForMultipleChoice, is_decoder=is_decoder, pad_token_id=0)
    texts = ids(2, 27).view(2, 3, 9).clamp_min(1)
    mask = torch.ones(2, 3, 9, dtype=torch.int64)
    mask[1, 2, 5:] = 0
    labels = torch.tensor([2, 0])
    out = model(texts, attention_mask=mask, labels=labels)
    assert out.logits.shape == (2, 3)
    close(out.loss, F.cross_entropy(out.logits, labels))
    close(model(texts[1:, 2:, :5]).logits, out.logits[1:, 2:])
    # Without a mask, pad ids at the end of a text are padding.
    close(model(texts.masked_fill(mask == 0, 0), labels=labels).logits, out.logits)
    embedded = model.get_input_embeddings()(texts)
    close(model(inputs_embeds=embedded, attention_mask=mask).logits, out.logits)
    with pytest.raises(
        ValueError, match=r"input_ids must be \[batch, choices, length\], got \[2, 9\]"
    ):
        model(ids(2, 9))
    for no_texts in ({}, {"attention_mask": mask, "labels": labels}):
        with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
            model(**no_texts)


@pytest.mark.parametrize(
    "auto", [AutoModelForMaskedLM, AutoModelForMultipleChoice, AutoModelForQuestionAnswering]
)
def test_heads_call_a_loss_that_somebody_sets(auto):
    model = made(auto)
    model.loss_function = lambda *args, **keywords: torch.tensor(7.0)
    tokens = ids(2, 27).view(2, 3, 9) if auto is AutoModelForMultipleChoice else ids(2, 9)
    labels = {"labels": torch.tensor([2, 0]) if tokens.dim() == 3 else tokens}
    if auto is AutoModelForQuestionAnswering:
        labels = {"start_positions": torch.tensor([2, 3]), "end_positions": torch.tensor([2, 3])}
    for training in (True, False):
        assert model.train(training)(tokens, **labels).loss == 7


def test_every_head_loads_from_every_other(tmp_path):
    """The body is one: a checkpoint of one head is a start for the others, by the Auto classes."""
    model = made(AutoModelForMaskedLM).float()
    model.save_pretrained(tmp_path)
    names = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert names == {"AutoConfig": "configuration.NalandaConfig"} | {
        auto: name
        for auto, name in AUTO_MAP.items()
        if auto not in ("AutoModelForCausalLM", "AutoModelForImageClassification")
    }
    hidden = model.model(ids(2, 9)).last_hidden_state
    body = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(body(ids(2, 9)).last_hidden_state, hidden)
    body.save_pretrained(tmp_path / "body")
    for name in names.keys() - {"AutoConfig", "AutoModel"}:
        assert name in json.loads((tmp_path / "body/config.json").read_text())["auto_map"]
    for auto, scores in (
        (AutoModelForSequenceClassification, 4),
        (AutoModelForTokenClassification, 4),
        (AutoModelForMultipleChoice, 1),
        (AutoModelForQuestionAnswering, 9),
    ):
        head = auto.from_pretrained(tmp_path, num_labels=4).eval()
        assert torch.equal(head.model(ids(2, 9)).last_hidden_state, hidden)
        tokens = ids(2, 9)[:, None] if auto is AutoModelForMultipleChoice else ids(2, 9)
        first = head(tokens)[0]
        assert first.shape[-1] == scores
        head.save_pretrained(tmp_path / "head")
        again = auto.from_pretrained(tmp_path / "head").eval()
        close(again(tokens)[0], first, 1e-6)
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_decoders_checkpoint_brings_the_heads(tmp_path):
    made(AutoModelForCausalLM, is_decoder=True).float().save_pretrained(tmp_path)
    assert (tmp_path / "heads.py").exists()
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert head.model.config.is_decoder
