"""Checks of a model before the first step, by running it."""

from typing import Any

import torch
from accelerate import Accelerator

from nalanda.common.errors import InputError
from nalanda.train.loss import packed_logits


@torch.no_grad()
def check_causal(accelerator: Accelerator, model: Any) -> None:
    """Raises InputError for a model that looks at later tokens, as encoders do: it would learn to copy them.

    Runs two rows that differ only in their last token; their earlier logits must agree.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    # [2, 16], the second row with another last token
    tokens = torch.arange(1, 17, device=accelerator.device).repeat(2, 1) * 7 % vocabulary
    tokens[1, -1] = (tokens[1, -1] + 1) % vocabulary
    model.eval()
    # [15, vocabulary] each, in fp32 for the comparison
    first, second = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    model.train()
    if (first - second).abs().max() > 1e-4 * first.std():
        kind = model.config.model_type
        raise InputError(
            f"model: {kind} looks at later tokens and would learn to copy them; an encoder needs "
            "model.is_decoder=true"
        )


@torch.no_grad()
def keeps_documents_apart(accelerator: Accelerator, model: Any) -> bool:
    """Whether a document's logits ignore the document packed before it.

    Runs two rows of two documents each that differ only in the first; the second's logits must agree.
    """
    length, device = 8, accelerator.device
    vocabulary = model.get_input_embeddings().num_embeddings
    # [2, 16]: the second documents of both rows are equal, the first ones are not
    tokens = torch.arange(1, 4 * length + 1, device=device).view(2, 2 * length) * 7 % vocabulary
    tokens[1, length:] = tokens[0, length:]
    model.eval()
    # Four documents, bounds over the flattened tokens.
    bounds = torch.arange(5) * length
    if model.config.model_type == "nalanda":
        logits = model(tokens, cu_seqlens=bounds, use_cache=False).logits
    else:
        positions = torch.arange(length, device=device).repeat(2, 2)
        logits = packed_logits(model, tokens, positions, bounds)
    model.train()
    first, second = logits[:, length:].float()  # [8, vocabulary] each
    return bool((first - second).abs().max() <= 1e-4 * first.std())
