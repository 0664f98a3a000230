"""The optimizer, what it decays, and the learning rate as a function of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from nalanda.errors import InputError
from nalanda.model.layers import Fp32Module


@dataclass
class OptimConfig:
    """AdamW; the defaults are the literature's for linear attention at 340 M."""

    name: Literal["adamw"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm where it is longer."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if self.lr <= 0:
            raise InputError(f"optim.lr: expected a positive number, got {self.lr:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optim.betas: expected two numbers in [0, 1), got {list(self.betas)}")
        if self.weight_decay < 0:
            raise InputError(f"optim.weight_decay: expected 0 or more, got {self.weight_decay:g}")
        if self.max_grad_norm <= 0:
            raise InputError(f"optim.max_grad_norm: expected a positive number, got {self.max_grad_norm:g}")


@dataclass
class ScheduleConfig:
    name: Literal["cosine", "wsd", "linear", "inverse_sqrt", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    """Where cosine, wsd and linear end, as a share of `optim.lr`."""
    decay_share: float = 0.2
    """wsd: the share of all steps that the final decay takes."""

    def check(self) -> None:
        """Raises `InputError` for settings that cannot work."""
        if self.warmup_steps < 0:
            raise InputError(f"schedule.warmup_steps: expected 0 or more, got {self.warmup_steps}")
        for key in ("min_lr_ratio", "decay_share"):
            if not 0 <= getattr(self, key) <= 1:
                raise InputError(f"schedule.{key}: expected a number in [0, 1], got {getattr(self, key):g}")


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of update `step`, counted from 1 to `steps`.

    A pure function: nothing to save, nothing that a resume could make jump, nothing that another number of
    processes could step twice. Warm-up is linear and reaches `peak` at step `warmup_steps`; cosine, linear
    and wsd reach `min_lr_ratio * peak` at the last step. wsd stays at the peak and cools down as `1 -
    sqrt(x)` (Hägele et al., 2024); inverse_sqrt is `sqrt(warmup / step)` (Vaswani et al., 2017).
    """
    warmup, floor = schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    match schedule.name:
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            share = 1 - progress
        case "wsd":
            # The decay never reaches back into the warm-up.
            decay = min(max(1, round(schedule.decay_share * steps)), max(1, steps - warmup))
            share = 1 - math.sqrt(min(1.0, max(0.0, (step - (steps - decay)) / decay)))
        case "inverse_sqrt":
            return peak * math.sqrt(max(1, warmup) / max(1, step, warmup))
        case "constant":
            return peak
    return peak * (floor + (1 - floor) * share)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: what decays, and what does not.

    Everything with two dimensions or more decays: projections, the embedding and the head (the norm since
    GPT-2), and the filters of short convolutions [D, 1, W], as the models of the literature were trained.
    Norms, biases and all other vectors do not; nor do the parameters of an `Fp32Module` (decays, exponents,
    landmarks), nor what other libraries mark with `_no_weight_decay = True` or call `A_log` (Mamba's is a
    matrix).
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    spared = {id(p) for m in model.modules() if isinstance(m, Fp32Module) for p in m.parameters()}
    spared |= {id(p) for n, p in trained if getattr(p, "_no_weight_decay", False) or n.endswith("A_log")}
    decays = [(name, p) for name, p in trained if p.ndim >= 2 and id(p) not in spared]
    names = {name for name, _ in decays}
    rest = [(name, p) for name, p in trained if name not in names]
    groups = [
        {"name": "matrices", "weight_decay": weight_decay, "params": [p for _, p in decays]},
        {"name": "vectors", "weight_decay": 0.0, "params": [p for _, p in rest]},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: torch.nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`; fused where torch has it (one pass over the moments instead of many)."""
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in model.parameters())
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def describe_groups(groups: Iterable[dict]) -> str:
    """`matrices 2.8 M decay 0.1, vectors 5.2 K decay 0`, for the log."""
    return ", ".join(
        f"{group['name']} {sum(p.numel() for p in group['params']):,} decay {group['weight_decay']:g}"
        for group in groups
    )
