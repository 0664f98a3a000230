"""A text that was read, as the state that it left: saved, loaded, forked, continued."""

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all weights with their names, types and shapes, first 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
