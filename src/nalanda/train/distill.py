"""A teacher beside the training loop: a causal language model that is only read."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from nalanda.common.errors import InputError
from nalanda.config.model import in_one_line, is_encoder
from nalanda.config.model_folder import check_hub
from nalanda.config.schema import DistillConfig
from nalanda.data.packing import Batch
from nalanda.data.tokenizer import tokenizer_fingerprint
from nalanda.model.loss import Distillation
from nalanda.train.flops import DTYPES


class Teacher:
    """A model that says how likely each next token is.

    Calling it with tokens `[B, T]` and their batch gives a `Distillation` for the student's loss.
    """

    def __init__(self, model: Any, config: DistillConfig, device: torch.device):
        """device: the student's, where the logits of both are made, in blocks."""
        self.model, self.config, self.device = model, config, device
        self.head = model.get_output_embeddings().weight.detach().to(device)  # [vocabulary, D]
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        """Σ KL and the number of labels on this process, since the last mean."""

    @torch.no_grad()
    def __call__(self, tokens: Tensor, batch: Batch) -> Distillation:
        described = {"cu_seqlens": batch["cu_seqlens"]}
        if self.model.config.model_type != "nalanda":
            # Positions that restart at 0 are packed documents to transformers.
            described = {"position_ids": batch["position_ids"].to(self.model.device)}
        hidden = self.hidden(tokens.to(self.model.device), **described)
        self.sums[1] += int((batch["labels"][:, 1:] != -100).sum())
        return Distillation(
            hidden=hidden.to(self.device).flatten(0, 1),
            head=self.head,
            weight=self.config.weight,
            temperature=self.config.temperature,
            divergence=self.sums[0],
        )

    def hidden(self, tokens: Tensor, **described: Tensor) -> Tensor:
        """The last hidden states `[B, T, D]`, which the head reads."""
        return self.model.base_model(tokens, use_cache=False, **described).last_hidden_state

    def mean_divergence(self, accelerator: Accelerator) -> float:
        """The mean KL of a label since the last call. A collective of all processes."""
        total, labels = accelerator.reduce(self.sums).tolist()
        self.sums.zero_()
        return total / max(1, labels)


def load_teacher(
    config: DistillConfig, tokenizer: Any, student: PreTrainedConfig, device: torch.device
) -> Teacher | None:
    """Loads the teacher of the recipe, None without one. student, device: the model's.

    Raises:
        InputError: its tokenizer or vocabulary is not the student's, which is found before its weights are
            read; or its logits are more than a product with its head.
    """
    name = config.teacher
    if name is None:
        return None
    where = f"distill.teacher: {name}"
    check_tokenizer(tokenizer, name, where)
    with in_one_line(where):
        settings = AutoConfig.from_pretrained(name)
    if student.model_type != "nalanda" or is_encoder(student):
        raise InputError(f"{where}: only Nalanda's decoders learn from a teacher")
    if settings.vocab_size != student.vocab_size:
        raise InputError(
            f"{where}: its vocab_size is {settings.vocab_size}, the model's {student.vocab_size}; "
            f"set model.vocab_size={settings.vocab_size}"
        )

    with in_one_line(where):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[config.precision])
        model = model.to(config.device or device).eval().requires_grad_(False)
    teacher = Teacher(model, config, device)
    check_head(teacher, where)
    return teacher


def check_tokenizer(tokenizer: Any, name: str, where: str) -> None:
    """Raises InputError if the run's tokenizer cuts texts otherwise than that of the model `name`."""
    with in_one_line(where):
        check_hub(name)
        other: Any = AutoTokenizer.from_pretrained(name)
    if tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer):
        raise InputError(f"{where}: its tokenizer is another than the run's; set tokenizer={name}")


@torch.no_grad()
def check_head(teacher: Teacher, where: str) -> None:
    """Raises InputError for logits that are scaled or capped behind the head."""
    tokens = torch.arange(1, 9, device=teacher.model.device)[None] % len(teacher.head)
    expected = teacher.model(tokens, use_cache=False).logits.float()
    product = (teacher.hidden(tokens).to(teacher.device) @ teacher.head.T).float()
    if (product.to(expected.device) - expected).abs().max() > 0.02 * expected.abs().max():
        raise InputError(f"{where}: its logits are more than a product with its head")
