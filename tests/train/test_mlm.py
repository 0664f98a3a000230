"""A recipe of an encoder trains a masked language model: its batches, its run, and what is refused."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from training import configured, outcome
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from nalanda.common.errors import InputError
from nalanda.config.schema import DataConfig
from nalanda.data.loader import PackedBatches, validation_batches
from nalanda.data.masking import Masking, word_borders
from nalanda.data.tokenizer import build_tokenizer
from nalanda.inference.load import load_model
from nalanda.report.info import info
from nalanda.report.verify import verify
from nalanda.train.log import read_metrics
from nalanda.train.loop import train

ENCODER = (
    "model={mixer: [mala, softmax], mixer_options: {mala: {}, softmax: {window: 9}}, is_decoder: false, "
    "hidden_size: 32, num_hidden_layers: 2, num_heads: 2}",
    "tokenizer={train: bpe, vocab_size: 320, mask: true}",
    "optim.lr=1e-2",
    "schedule.name=constant",
)


@pytest.fixture(scope="module")
def masked_tokenizer(recipe, tmp_path_factory):
    config = configured(recipe, tmp_path_factory.mktemp("mlm"), *ENCODER)
    return build_tokenizer(
        config.tokenizer, config.data, tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    )


def rows(tokenizer, count, seq_len=64, documents=(20, 44)):
    """Rows of ordinary tokens, each of documents that begin with bos."""
    tokens = torch.randint(
        2, tokenizer.vocab_size, (count, seq_len), generator=torch.Generator().manual_seed(0)
    )
    starts = torch.tensor([0, *documents]).cumsum(0)[:-1]
    tokens[:, starts] = tokenizer.bos_token_id
    bounds = [row * seq_len + int(s) for row in range(count) for s in starts]
    cu = torch.tensor([*bounds, count * seq_len])
    return {"input_ids": tokens, "labels": tokens.clone(), "cu_seqlens": cu}


def test_tokens_are_hidden_as_bert_does(masked_tokenizer):
    batch = rows(masked_tokenizer, 400)
    out = Masking(masked_tokenizer, DataConfig(source="x"), seed=0)(batch, 0, 400)
    tokens, shown, labels = batch["input_ids"], out["input_ids"], out["labels"]
    chosen = labels != -100
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(shown[~chosen], tokens[~chosen])
    special = torch.isin(tokens, torch.tensor(masked_tokenizer.all_special_ids))
    assert not (chosen & special).any()
    assert not chosen[:, 0].any()
    assert abs(chosen[~special].float().mean() - 0.15) < 0.01
    masks = (shown == masked_tokenizer.mask_token_id)[chosen].float().mean()
    kept = (shown == tokens)[chosen].float().mean()
    assert abs(masks - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.02


def test_a_row_is_hidden_alike_on_any_process(masked_tokenizer):
    """By the row's number in the run; rows of other steps, seeds and epochs are hidden in other ways."""
    whole = rows(masked_tokenizer, 8)
    masking = Masking(masked_tokenizer, DataConfig(source="x"), seed=3)
    found = torch.cat(
        [
            masking({**whole, "input_ids": x}, i, 4)["input_ids"]
            for i, x in enumerate(whole["input_ids"].split(4))
        ]
    )
    for rank in (0, 1):
        own = masking({**whole, "input_ids": whole["input_ids"][rank::2]}, 0, 4, rank, 2)[
            "input_ids"
        ]
        assert torch.equal(own, found[rank::2])
    assert torch.equal(masking(whole, 0, 8)["input_ids"], found)
    for other in (
        Masking(masked_tokenizer, DataConfig(source="x"), 4)(whole, 0, 8),
        masking(whole, 1, 8),
    ):
        assert not torch.equal(other["input_ids"], found)
    again = [
        masking.fixed({"": [whole]}, 0, 1)[""][0],
        Masking(masked_tokenizer, DataConfig(source="x"), 4),
    ]
    assert torch.equal(
        again[0]["input_ids"], again[1].fixed({"": [whole]}, 0, 1)[""][0]["input_ids"]
    )


def test_padding_is_never_chosen(recipe, tmp_path, masked_tokenizer):
    """Nor with a tokenizer that has no eos, whose padding would be an ordinary token."""
    tokenizer = copy.deepcopy(masked_tokenizer)
    tokenizer.bos_token = tokenizer.eos_token = None
    assert 0 not in tokenizer.all_special_ids
    data = replace(configured(recipe, tmp_path, *ENCODER).data, bos=False, eos=False, seq_len=512)
    batches = validation_batches(data, tokenizer, batch_size=64)
    hidden = Masking(tokenizer, data, 0).fixed(batches, 0, 1)
    for source, part in batches.items():
        for plain, masked in zip(part, hidden[source], strict=True):
            padding = (plain["labels"] == -100) & (plain["position_ids"] > 0)
            assert padding.any()
            assert (masked["labels"][padding] == -100).all()
            assert (masked["labels"] != -100).any()


def test_whole_words(recipe, tmp_path):
    """Every word of the documents is hidden entirely or not at all."""
    # With few merges, words have several tokens.
    config = configured(
        recipe, tmp_path, *ENCODER, "tokenizer={train: bpe, vocab_size: 270, mask: true}"
    )
    tokenizer = build_tokenizer(config.tokenizer, config.data, tmp_path / "tokenizer")
    batches = PackedBatches(config.data, tokenizer, batch_size=32)
    masking = Masking(tokenizer, DataConfig(source="x", whole_words=True), seed=0)
    split = seen = parts = 0
    for number in range(3):
        batch = next(batches)
        out = masking(batch, number, 32)
        for tokens, labels in zip(batch["input_ids"], out["labels"], strict=True):
            pieces = tokenizer.convert_ids_to_tokens(tokens.tolist())
            words: list[list[bool]] = [[]]
            for before, piece, label in zip(["<", *pieces], pieces, labels, strict=False):
                words += (
                    [[]]
                    if piece.startswith(("Ġ", "<")) or before[0] == "<" or before == "Ġ"
                    else []
                )
                words[-1].append(bool(label != -100))
            seen += sum(any(word) for word in words[2:])  # a row's first token is never chosen
            parts += sum(len(word) > 1 for word in words[2:] if any(word))
            split += sum(len(set(word)) > 1 for word in words[2:])
    batches.close()
    assert parts > 0.5 * seen > 50
    assert split == 0


def test_word_borders_of_other_tokenizers(masked_tokenizer):
    class Fixed:
        all_special_ids = (0,)

        def __init__(self, *pieces):
            self.pieces = pieces

        def get_vocab(self):
            return {piece: i for i, piece in enumerate(self.pieces)}

        def convert_ids_to_tokens(self, ids):
            return [self.pieces[i] for i in ids]

    for pieces, begins, ends in (
        (("[CLS]", "play", "##ing"), (1, 1, 0), (1, 0, 0)),
        (("<s>", "▁play", "ing", "▁"), (1, 1, 0, 1), (1, 0, 0, 1)),
        (("<s>", "Ġplay", "ing", "Ċ"), (1, 1, 0, 1), (1, 0, 0, 1)),
        (("<s>", "play", "in"), (1, 1, 1), (1, 0, 0)),
    ):
        for found, expected in zip(word_borders(Fixed(*pieces)), (begins, ends), strict=True):
            assert np.array_equal(found, np.array(expected, bool)), pieces


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_trains_resumes_and_exports(recipe, tmp_path, capsys):
    config = configured(recipe, tmp_path / "whole", *ENCODER)
    run = train(config)
    lines = list(read_metrics(run / "metrics.jsonl"))
    losses = [line["loss"] for line in lines if "loss" in line]
    validated = [line for line in lines if "val_loss" in line]
    assert losses[-1] < 0.75 * losses[0]
    assert validated[-1]["val_loss"] < validated[0]["val_loss"]
    assert 0 < validated[-1]["val_tokens"] < 0.2 * 7 * 32
    assert 0 < validated[-1]["negative_weights"] < 1
    assert "val_bpb" not in validated[-1]
    assert "generate" not in capsys.readouterr().out

    shortened = ["train.steps=10", "schedule.warmup_steps=2"]
    train(configured(recipe, tmp_path / "run", *ENCODER, *shortened))
    train(configured(recipe, tmp_path / "run", *ENCODER))
    assert outcome(tmp_path / "run") == outcome(run)
    assert all(verdict.good for verdict in verify(run))

    model = AutoModelForMaskedLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    fill = pipeline("fill-mask", model, tokenizer=tokenizer)
    assert len(fill(f"the {tokenizer.mask_token} gate")) == 5
    assert tokenizer.padding_side == "right"
    assert tokenizer.pad_token == tokenizer.eos_token
    pair = tokenizer("a", "b").input_ids
    assert pair.count(tokenizer.eos_token_id) == 2
    card = (run / "final/README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    assert "AutoModelForMaskedLM.from_pretrained" in card
    assert "CausalLM" not in card
    names = json.loads((run / "final/config.json").read_text())["auto_map"]
    assert "AutoModelForSequenceClassification" in names
    with pytest.raises(InputError, match=r"is_decoder is false: .*AutoModelForMaskedLM") as error:
        load_model(str(run / "final"))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_micro_batches_hide_what_one_batch_hides(recipe, tmp_path):
    """A row's mask depends on its place in the run: losses of 8 rows a step and of 4 + 4 are equal."""
    curves = []
    for rows_at_once in (8, 4):
        settings = ("train.steps=3", "validation.every=0", "schedule.warmup_steps=0")
        settings += (f"train.micro_batch_size={rows_at_once}",)
        run = train(configured(recipe, tmp_path / str(rows_at_once), *ENCODER, *settings))
        curves.append([line["loss"] for line in read_metrics(run / "metrics.jsonl")])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_figures_have_no_state(recipe, tmp_path):
    figures = info(str(recipe), [f"output_dir={tmp_path}", *ENCODER, "model.vocab_size=320"])
    assert figures["state_bytes_per_sequence"] is None
    assert figures["activation_bytes"] > 0


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tokenizer.mask=false", "tokenizer: no mask token"),
        ("data.long_documents=carry", "data.long_documents: the model is an encoder"),
        ("train.context_parallel=2", "train.context_parallel: the model is an encoder"),
        ("data.mask_share=1", "data.mask_share: expected a number between 0 and 1, got 1.0"),
        ("tokenizer={path: mistral, mask: true}", "tokenizer.mask: only of a trained one"),
        ("model.mixer=gla", "gla has no form without a mask; set directions: 2"),
    ],
)
def test_refused_in_one_line(recipe, tmp_path, override, says):
    def run():
        if "encoder" in says:  # of the model's config
            info(str(recipe), [f"output_dir={tmp_path}", *ENCODER, override])
        train(configured(recipe, tmp_path / "run", *ENCODER, override))

    with pytest.raises(InputError, match=says) as error:
        run()
    assert "\n" not in str(error.value)
