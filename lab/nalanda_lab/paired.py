"""Paired training runs: weights drawn by module name, a step, and losses by document."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nalanda.model import NalandaForCausalLM
from nalanda.model.delta import Decay
from nalanda.train.build import draw_by_name, seeded_modules
from nalanda.train.optim import set_rates

Batch = dict[str, Tensor]

# ------------------------------ weights


def draw_weights(model: NalandaForCausalLM, seed: int) -> None:
    """Initialises the model again, each module by a generator of its own, seeded by its name and `seed`.

    Modules of the same name and shape are then equal in all models of a seed. The decays of a layer's heads
    are stratified: one from each of as many equal parts of their distribution, in an order of their own.
    """
    draw_by_name(model, seed)
    for module in seeded_modules(model, seed):
        if isinstance(module, Decay):
            model._init_weights(module)  # the draws that were before
            stratify_decay(module)


@torch.no_grad()
def stratify_decay(decay: Decay) -> None:
    """Draws as `Decay.initial`: A ~ U(0, 16), dt log-uniform in [1e-3, 0.1]."""
    heads = len(decay.A_log)

    def shares() -> Tensor:
        return (torch.randperm(heads) + torch.rand(heads)) / heads

    A = (16 * shares()).clamp_min(1e-4)
    dt = 10 ** (2 * shares() - 3)
    decay.load_state_dict(decay.parameters_of(A, dt))


# ------------------------------ a step


def take_step(
    optimizer: torch.optim.Optimizer, model: nn.Module, rate: float, max_norm: float
) -> None:
    """Clips the gradients, updates the weights and clears the gradients."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    set_rates(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------ losses


@torch.no_grad()
def document_sums(model: NalandaForCausalLM, batches: Iterable[Batch], bos: int) -> list[float]:
    """The sum of nats of each document of the validation rows."""
    model.eval()
    losses = []
    for batch in batches:
        tokens, labels = (batch[name].to(model.device) for name in ("input_ids", "labels"))
        out = model(tokens, cu_seqlens=batch["cu_seqlens"], use_cache=False)
        logits = out.logits[:, :-1].mT  # [B, vocabulary, T − 1]
        losses.append(F.cross_entropy(logits, labels[:, 1:], reduction="none").cpu())
    return sum_by_document(losses, batches, bos)


def sum_by_document(values: Iterable[Tensor], batches: Iterable[Batch], bos: int) -> list[float]:
    """Sums of values `[B, T − 1]` of each batch over documents. A row may continue the one before."""
    batches = list(batches)
    values = torch.cat(list(values)).double()
    tokens = torch.cat([batch["input_ids"] for batch in batches])
    positions = torch.cat([batch["position_ids"] for batch in batches])

    starts = ((tokens == bos) & (positions == 0)).flatten()
    index = starts.cumsum(0) - int(starts[0])
    index = index.view_as(tokens)[:, 1:].flatten()  # of the token that each value predicts
    sums = torch.zeros(int(index.max()) + 1, dtype=torch.float64)
    return sums.index_add(0, index, values.flatten()).tolist()
