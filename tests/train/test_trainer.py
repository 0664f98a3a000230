"""transformers' own Trainer and collators train an encoder: masked tokens, then sequences and tokens."""

import copy
import random

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from nalanda import NalandaConfig

WORDS = ["state", "gate", "decay", "query", "key", "value", "head", "norm"]


@pytest.fixture(scope="module")
def encoded(tokenizer):
    """A byte tokenizer with the tokens that collators need, and some texts of up to five words."""
    full = copy.deepcopy(tokenizer)
    full.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 5))) for _ in range(256)]
    return full, [{"input_ids": ids} for ids in full(texts).input_ids]


def losses(model, rows, collator, folder, metric=None, **options) -> tuple[list[float], dict]:
    """The logged losses of a few steps, and the evaluation after them; the model is saved in `folder`."""
    options = {"max_steps": 40, "learning_rate": 1e-2, **options}
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=16,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        seed=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=rows,
        eval_dataset=rows[:64],
        compute_metrics=metric,
    )
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model(str(folder))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], found


@pytest.mark.slow
def test_smoothed_labels_are_those_of_the_next_token(encoded, tmp_path):
    """Trainer shifts them for the classes of language models that it knows."""
    torch.manual_seed(0)
    config = NalandaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_heads=2, intermediate_size=64
    )
    row = torch.arange(5, 13)
    rows = [{"input_ids": row, "labels": row}] * 64
    model = AutoModelForCausalLM.from_config(config)
    losses(model, rows, default_data_collator, tmp_path, label_smoothing_factor=0.1)
    assert model(row[None]).logits[0, :-1].argmax(-1).tolist() == row[1:].tolist()


@pytest.mark.slow
def test_rows_without_a_label_leave_the_weights_finite(tmp_path):
    """As a collator leaves them that finds no answer in its rows."""
    config = NalandaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_heads=2, intermediate_size=64
    )
    model = AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": torch.arange(8), "labels": torch.full((8,), -100)}] * 16
    losses(model, rows, default_data_collator, tmp_path, max_steps=2)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.fixture(scope="module")
def pretrained(encoded, tmp_path_factory):
    tokenizer, rows = encoded
    torch.manual_seed(0)
    config = NalandaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        intermediate_size=64,
        mixer=["mala", "softmax"],
        is_decoder=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder, model = tmp_path_factory.mktemp("mlm"), AutoModelForMaskedLM.from_config(config)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    found, _ = losses(model, rows, collator, folder, gradient_accumulation_steps=2)
    return folder, found


@pytest.mark.slow
def test_masked_tokens(pretrained):
    _, found = pretrained
    assert found[-1] < 0.7 * found[0]
    assert found[0] < np.log(300)  # a mean over the labels of both accumulated batches


def accuracy(predictions):
    logits, labels = predictions
    kept = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[kept].mean())}


@pytest.mark.slow
def test_sequences(encoded, pretrained, tmp_path):
    """As run_glue does: the body of the folder, a new head, padded batches."""
    tokenizer, rows = encoded
    gate = tokenizer("gate", add_special_tokens=False).input_ids
    rows = [
        {**row, "label": int(any(row["input_ids"][i : i + 4] == gate for i in range(40)))}
        for row in rows
    ]
    model, report = AutoModelForSequenceClassification.from_pretrained(
        pretrained[0], num_labels=2, output_loading_info=True
    )
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"score"}
    found, evaluated = losses(model, rows, DataCollatorWithPadding(tokenizer), tmp_path, accuracy)
    assert found[-1] < 0.6 * found[0]
    assert evaluated["eval_accuracy"] > 0.8
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.problem_type == "single_label_classification"


@pytest.mark.slow
def test_tokens(encoded, pretrained, tmp_path):
    """Vowels, without the first token's label."""
    tokenizer, rows = encoded
    vowels = tokenizer("aeiou", add_special_tokens=False).input_ids
    rows = [
        {**row, "labels": [-100, *(int(i in vowels) for i in row["input_ids"][1:])]} for row in rows
    ]
    model = AutoModelForTokenClassification.from_pretrained(pretrained[0], num_labels=2)
    collator = DataCollatorForTokenClassification(tokenizer)
    found, evaluated = losses(model, rows, collator, tmp_path, accuracy)
    assert found[-1] < 0.2 * found[0]
    assert evaluated["eval_accuracy"] > 0.95
