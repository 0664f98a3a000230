"""Losses of a training micro-batch and of the validation batches."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from nalanda.data.packing import Batch
from nalanda.data.text_bytes import TextBytes
from nalanda.model import Mixer
from nalanda.model.context import Context
from nalanda.train.carried_states import CarriedStates
from nalanda.train.distill import Teacher


def count_labels(batch: Batch, context: Context | None = None) -> int:
    """Counts the tokens of the loss, in this process's part of the rows.

    The model shifts labels by one: a row's first label is no target. (Masked language models do not shift,
    and their batches have no label there.)
    """
    return _sum_of_part(batch["labels"][:, 1:] != -100, context)


def count_bytes(batch: Batch, text_bytes: TextBytes, context: Context | None = None) -> int:
    """Counts the UTF-8 bytes of the text of the tokens of `count_labels`."""
    sizes = torch.from_numpy(text_bytes(batch["input_ids"].numpy()))[:, 1:]  # [B, T − 1]
    return _sum_of_part(sizes * (batch["labels"][:, 1:] != -100), context)


def _sum_of_part(values: Tensor, context: Context | None) -> int:
    """The sum of `[B, T − 1]` values of a row's tokens behind the first, in this process's part of the rows."""
    # [B, T]: padded at the end as the model pads its targets, so a context cuts both alike
    padded = F.pad(values, (0, 1))
    return int((context.part(padded) if context else padded).sum())


def summed_loss(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    z_loss: float = 0.0,
    carried_states: CarriedStates | None = None,
    index: int = 0,
    context: Context | None = None,
    teacher: Teacher | None = None,
) -> Tensor:
    """The sum of a micro-batch's token losses, in this process's part of the rows.

    With `carried_states`, rows start from the states that the last step left for micro-batch `index`.

    model: may be wrapped. z_loss, teacher: change only the gradient.
    """
    tokens = batch["input_ids"].to(device, non_blocking=True)  # [B, T]
    labels = batch["labels"].to(device, non_blocking=True)  # [B, T]
    bare: Any = getattr(model, "module", model)
    if bare.config.model_type == "nalanda":
        packing: dict[str, Any] = {"cu_seqlens": batch["cu_seqlens"], "z_loss": z_loss}
        if bare.config.is_decoder:
            # In evaluation the model returns logits too: one position is the least.
            packing |= {"context": context, "logits_to_keep": 1}
        if teacher:
            packing["distillation"] = teacher(tokens, batch)
        if carried_states:
            packing |= carried_states.before(index, batch)
        # The model divides the sum of its losses by `num_items_in_batch`: with 1 it returns the sum.
        out = model(tokens, labels=labels, num_items_in_batch=1, use_cache=False, **packing)
        if carried_states:
            carried_states.after(index, out, batch)
        return out.loss

    # Other models average their loss in different ways.
    positions = batch["position_ids"].to(device, non_blocking=True)
    logits = packed_logits(model, tokens, positions, batch["cu_seqlens"])
    # [B (T − 1), vocabulary] and [B (T − 1)]: the target of a token is the next one
    logits, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    if z_loss:
        # Only its gradient counts: the logged loss stays comparable.
        term = z_loss * (logits.logsumexp(-1).square() * (targets != -100)).sum()
        loss = loss + (term - term.detach())
    return loss


def packed_logits(model: Any, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The logits `[B, T, vocabulary]` of another library's model, which may be wrapped.

    tokens, positions `[B, T]` and cu_seqlens `[N + 1]` are those of a batch. Without a cache, transformers
    reads positions that restart at 0 as packed documents. flash-linear-attention wants bounds, and one row.
    """
    bare = getattr(model, "module", model)
    # FSDP2 puts a class of its own before the model's.
    if any(kind.__module__.startswith("fla.") for kind in type(bare).__mro__):
        bounds = cu_seqlens.to(tokens.device, non_blocking=True)
        logits = model(input_ids=tokens.view(1, -1), cu_seqlens=bounds, use_cache=False).logits
        return logits.view(*tokens.shape, -1)  # [B, T, vocabulary]
    return model(input_ids=tokens, position_ids=positions, use_cache=False).logits


@torch.no_grad()
def validate(
    accelerator: Accelerator,
    model: nn.Module,
    batches: dict[str, list[Batch]],
    text_bytes: TextBytes | None = None,
    context: Context | None = None,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Mean losses over the label tokens of all processes, in total and per source.

    With `text_bytes` also bits a byte, `val_bpb`: the summed loss in bits over the bytes of the label
    tokens' text. This value does not depend on the tokenizer.

    model: the bare one. beat: called before each batch.
    """
    sums = []
    for source in batches.values():
        size = 0
        if text_bytes is not None:
            size = sum(count_bytes(batch, text_bytes, context) for batch in source)
        sums.append((*loss_sums(model, source, context, beat), size))
    model.train()

    # [sources, (loss, tokens, bytes)]
    # float64, since fp32 counts tokens exactly only up to 2²⁴
    table = torch.tensor(sums, dtype=torch.float64, device=accelerator.device)
    table = accelerator.reduce(table).tolist()
    total, count, size = (math.fsum(column) for column in zip(*table, strict=True))
    loss = total / max(1, count)
    values = {"val_loss": loss, "val_ppl": perplexity_of(loss), "val_tokens": int(count)}
    if size:
        values["val_bpb"] = bits_per_byte(total, size)

    for name, (total, count, size) in zip(batches, table, strict=True):
        if not name:
            continue
        values[f"val_ppl/{name}"] = perplexity_of(total / max(1, count))
        if size:
            values[f"val_bpb/{name}"] = bits_per_byte(total, size)
    return values


def perplexity_of(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def bits_per_byte(total: float, size: float) -> float:
    """The summed loss `total`, in bits, over `size` bytes of text."""
    return total / math.log(2) / size


@torch.no_grad()
def loss_sums(
    model: Any,
    batches: Iterable[Batch],
    context: Context | None = None,
    beat: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """(sum of the label tokens' losses, number of label tokens), in this process's part of the rows.

    Leaves the model in evaluation mode. beat: called before each batch.
    """
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        beat()
        # In float64 by `item`: the sum over many batches keeps its digits.
        total += summed_loss(model, batch, model.device, context=context).item()
        count += count_labels(batch, context)
    return total, count


@torch.no_grad()
def mixer_metrics(model: Any, tokens: torch.Tensor) -> dict[str, float]:
    """The mean of each of the mixers' `metrics` over the layers that have it. Empty without one.

    tokens: `[B, T]`; uses the first 256 of the first row.
    """
    values: dict[str, list[torch.Tensor]] = {}

    def measure(mixer: Any, inputs: tuple) -> None:
        for name, metric in mixer.metrics.items():
            values.setdefault(name, []).append(metric(mixer, inputs[0]))  # x is [1, T, D]

    mixers = [m for m in model.modules() if isinstance(m, Mixer) and m.metrics]
    hooks, training = [m.register_forward_pre_hook(measure) for m in mixers], model.training
    model.eval()
    try:
        if mixers:
            # The result is not used: the hooks have seen the inputs of the mixers.
            model(tokens[:1, :256].to(model.device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {name: torch.stack(each).mean().item() for name, each in values.items()}
