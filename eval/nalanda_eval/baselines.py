"""Baselines for a trained model: bigrams of its training text, and the model without its token mixers."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nalanda.train.loss import loss_sums

IGNORED = -100


class Bigram:
    """Interpolated Kneser–Ney bigrams over token ids, the strongest of the simple bigram models.

        P(b|a)  = max(c(ab) − d, 0) / c(a) + d · n(a·) / c(a) · P(b)
        P(b)    = max(n(·b) − e, 0) / n(··) + e · n(·) / n(··) · 1/V

    c counts occurrences. n counts distinct items: followers n(a·) of a, predecessors n(·b) of b, bigrams
    n(··), tokens with a predecessor n(·). The discounts d and e are n₁/(n₁ + 2n₂) of the counts that they
    discount (Ney, Essen and Kneser, 1994), so nothing is tuned. After an unseen a, P(b|a) is P(b).

    Args:
        batches: dicts with input_ids [B, T] and labels [B, T], unshifted, −100 where ignored. A pair counts
            where its second token has a label, as in the model's loss.
        vocab_size: V.
    """

    def __init__(self, batches: Iterable[dict[str, Tensor]], vocab_size: int):
        self.vocab_size = vocab_size
        pairs = [_labelled_pairs(batch) for batch in batches]
        first, second = (np.concatenate(ids) for ids in zip(*pairs, strict=True))
        # A pair's key is a · V + b; unique keys are sorted, as the search needs.
        self.bigrams, self.counts = np.unique(first * vocab_size + second, return_counts=True)
        a, b = self.bigrams // vocab_size, self.bigrams % vocab_size

        # By token, [V]: c(a), n(a·) and n(·b).
        total = np.bincount(first, minlength=vocab_size)
        followers = np.bincount(a, minlength=vocab_size)
        predecessors = np.bincount(b, minlength=vocab_size)

        self.discount = _estimate_discount(self.counts)  # d
        e = _estimate_discount(predecessors)
        # e · n(·) / n(··), shared equally by all V tokens.
        spread = e * (predecessors > 0).sum() / len(self.bigrams)
        self.lower = np.maximum(predecessors - e, 0) / len(self.bigrams) + spread / vocab_size
        self.total = np.maximum(total, 1)
        # d · n(a·) / c(a); after an unseen a all weight is P(b)'s.
        self.backoff = np.where(total > 0, self.discount * followers / self.total, 1.0)

    def probabilities(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """P(second|first), elementwise."""
        keys = first * self.vocab_size + second
        # The place where the key would be; another key there means that the pair is unseen.
        nearest = np.minimum(np.searchsorted(self.bigrams, keys), len(self.bigrams) - 1)
        count = np.where(self.bigrams[nearest] == keys, self.counts[nearest], 0)
        seen = np.maximum(count - self.discount, 0) / self.total[first]
        return seen + self.backoff[first] * self.lower[second]

    def perplexity(self, batches: Iterable[dict[str, Tensor]]) -> float:
        """exp of the mean negative log-probability of the labels, without the first of each row."""
        nll = np.concatenate(
            [-np.log(self.probabilities(*_labelled_pairs(batch))) for batch in batches]
        )
        return math.exp(nll.mean())


def _labelled_pairs(batch: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    # [B, T − 1]: the second token of a pair has a label.
    labelled = batch["labels"][:, 1:] != IGNORED
    first, second = batch["input_ids"][:, :-1][labelled], batch["labels"][:, 1:][labelled]
    return first.numpy().astype(np.int64), second.numpy().astype(np.int64)


def _estimate_discount(counts: np.ndarray) -> float:
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    return float(once / (once + 2 * twice)) if once else 0.5


def measure_perplexity(model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]) -> float:
    """exp of the mean loss over the labels of packed batches, as validation in training computes it."""
    total, count = loss_sums(model, batches)
    return math.exp(total / count)


TOKEN_MIXERS = ("mixer", "self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba")
"""Names of a layer's token mixer here, in transformers and in flash-linear-attention."""


@contextlib.contextmanager
def zeroed_mixers(model: PreTrainedModel) -> Iterator[None]:
    """Makes token mixers output zeros in this context, so that each token sees only itself.

    Raises ValueError if the token mixer of a layer is not found.
    """
    hooks = [mixer.register_forward_hook(_zero_output) for mixer in token_mixers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def token_mixers(model: PreTrainedModel) -> list[nn.Module]:
    """The token mixer of each layer of a decoder; see `TOKEN_MIXERS`."""
    depth = model.config.num_hidden_layers
    # The list of layers is the first with as many modules as the config has layers.
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    mixers = []
    for layer in lists[0] if lists else []:
        mixers += [getattr(layer, name) for name in TOKEN_MIXERS if hasattr(layer, name)][:1]
    if not mixers or len(mixers) < len(lists[0]):
        raise ValueError(f"a {model.config.model_type} layer has none of {', '.join(TOKEN_MIXERS)}")
    return mixers


def _zero_output(mixer: nn.Module, inputs: tuple, output: Any) -> Any:
    """Zeros for the output, which may be the first of a tuple with weights and states."""
    if isinstance(output, Tensor):
        return torch.zeros_like(output)
    return (torch.zeros_like(output[0]), *output[1:])
