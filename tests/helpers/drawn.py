"""Modules with parameters of a size at which they matter."""

import torch


@torch.no_grad()
def drawn(module: torch.nn.Module, std: float) -> torch.nn.Module:
    """`module`, its parameters drawn from N(0, std²) but for those that an `initial()` sets."""
    for parameter in module.parameters():
        parameter.normal_(0, std)
    for part in module.modules():
        for name, value in part.initial().items() if hasattr(part, "initial") else ():
            getattr(part, name).copy_(value)
    return module


def with_gaps(module: torch.nn.Module) -> torch.nn.Module:
    """`module`, its parameters the same numbers with gaps between them, as a slice of a larger tensor has."""
    for parameter in module.parameters():
        parameter.data = torch.stack([parameter.data, torch.full_like(parameter, 7)], -1)[..., 0]
    return module
