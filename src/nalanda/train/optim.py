"""The optimizer, its parameter groups, and the learning-rate schedule."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from nalanda.common.errors import InputError
from nalanda.common.text import suggest
from nalanda.config.schema import OPTIMIZERS, OptimConfig, ScheduleConfig
from nalanda.model.base import Mixer
from nalanda.model.layers import Fp32Module


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of update `step`, counted from 1 to `steps`.

    A pure function, without state to save or restore. Warm-up is linear and reaches `peak` at step
    `warmup_steps`; cosine, linear and wsd reach `min_lr_ratio * peak` at the last step. wsd stays at the peak
    and cools down as `1 - sqrt(x)` (Hägele et al., 2024); inverse_sqrt is `sqrt(warmup / step)` (Vaswani et
    al., 2017).
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
            # The decay never overlaps the warm-up.
            decay = min(max(1, round(schedule.decay_share * steps)), max(1, steps - warmup))
            share = 1 - math.sqrt(min(1.0, max(0.0, (step - (steps - decay)) / decay)))
        case "inverse_sqrt":
            return peak * math.sqrt(max(1, warmup) / max(1, step, warmup))
        case "constant":
            return peak
    return peak * (floor + (1 - floor) * share)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Groups "matrices" (weight decay), "vectors" (no decay) and "muon" (Muon, decay), and a separate group
    of each kind for every pattern of `config.groups`.

    Parameters with two or more dimensions decay: projections, embedding and head (as since GPT-2), and the
    filters of short convolutions [D, 1, W], as in the literature. Not so norms, biases and other vectors, the
    parameters of an `Fp32Module` (decays, exponents, landmarks), and those that other libraries mark with
    `_no_weight_decay = True` or call `A_log` (a matrix in Mamba). Muon takes the decaying matrices between
    embedding and head, without the gates of a mixer's state: an orthogonal update moves each of a few rows as
    far as any other.

    Besides torch's keys, a group has `name` and `lr_scale`, the factor of the schedule's rate. Those of Muon
    have `blocks`: how many equal blocks of rows of a parameter are matrices of their own. Raises `InputError`
    for a pattern that matches no parameter.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    spared = {id(p) for m in model.modules() if isinstance(m, Fp32Module) for p in m.parameters()}
    spared |= {
        id(p) for n, p in trained if getattr(p, "_no_weight_decay", False) or n.endswith("A_log")
    }
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    outer = {id(p) for m in tables for p in m.parameters()}
    mixers = [m for m in model.modules() if isinstance(m, Mixer)]
    gates = {id(p) for mixer in mixers for p in mixer.gate_parameters()}
    heads = {id(p): count for mixer in mixers for p, count in head_matrices(mixer)}
    groups: dict[tuple, dict] = {}
    for name, p in trained:
        kind = "vectors" if p.ndim < 2 or id(p) in spared else "matrices"
        blocks = None
        if (
            config.name == "muon"
            and kind == "matrices"
            and p.ndim == 2
            and id(p) not in outer | gates
        ):
            kind, blocks = "muon", heads.get(id(p), 1)
        own = next((g for g in config.groups if re.search(g.match, name)), None)
        decay, scale = 0.0 if kind == "vectors" else config.weight_decay, 1.0
        if kind == "muon" and config.muon_lr is not None:
            scale = config.muon_lr / config.lr
        if own is not None:
            decay, scale = (
                decay if own.weight_decay is None else own.weight_decay,
                scale * own.lr_scale,
            )
        label = kind if own is None else f"{own.match} {kind}"
        settings = {
            "name": label,
            "kind": kind,
            "weight_decay": decay,
            "lr_scale": scale,
            "params": [],
        }
        if blocks is not None:
            settings |= {
                "blocks": blocks,
                "name": label if blocks == 1 else f"{label} in {blocks} blocks",
            }
        groups.setdefault((own and own.match, kind, blocks), settings)["params"].append(p)
    for group in config.groups:
        if not any(match == group.match for match, *_ in groups):
            if any(re.search(group.match, name) for name, _ in trained):
                problem = "; earlier patterns take all that it matches"
            else:
                parts = {
                    part for name, _ in trained for part in name.split(".") if not part.isdecimal()
                }
                problem = suggest(group.match, parts)
            raise InputError(f"optim.groups: {group.match!r} matches no parameter{problem}")
    order = ["muon", "matrices", "vectors"]
    return sorted(groups.values(), key=lambda group: order.index(group["kind"]))


def head_matrices(mixer: Mixer) -> Iterator[tuple[nn.Parameter, int]]:
    """The projections that hold a matrix for each head, and each step of a head, with the number of these."""
    for name, rows in (("q_proj", mixer.K), ("k_proj", mixer.K), ("v_proj", mixer.V)):
        projection = getattr(mixer, name, None)  # where q is k, one serves both
        for p in () if projection is None else projection.parameters():
            if p.ndim == 2 and len(p) % rows == 0:  # an adapter has other shapes
                yield p, len(p) // rows


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer called `config.name` over `parameter_groups`, each with its `lr` at the schedule's peak.

    Raises `InputError` for a pattern without a parameter.
    """
    groups = parameter_groups(model, config)
    for group in groups:
        group["lr"] = config.lr * group["lr_scale"]
    return BUILDERS[config.name](groups, config)


def build_adamw(groups: list[dict], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW, and Muon for the groups of that kind, as one optimizer. AdamW is fused where torch has it: one
    pass over the moments instead of many."""
    everything = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in everything)
    first = sum(group.pop("kind") == "muon" for group in groups)
    rest: Any = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": fused}
    parts: list[torch.optim.Optimizer] = []
    if first:
        parts.append(Muon(groups[:first], momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
    if groups[first:]:
        parts.append(torch.optim.AdamW(groups[first:], **rest))
    return parts[0] if len(parts) == 1 else Joined(parts)


LEAST_SCALE = 1.0
"""An fp16 run whose gradients overflow at this loss scale has another problem: such a step is a bad one."""


def loss_scale(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """The factor of an fp16 run's loss, which keeps small gradients in fp16's range (arXiv 1710.03740).

    It halves at an overflow, and doubles after 2,000 steps without one. For other precisions it does nothing.
    """
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def follow_gradients(scaler: torch.amp.GradScaler) -> tuple[float, float] | None:
    """Changes the loss scale after `unscale_`. Returns (before, lowered) if gradients of any process
    overflowed. It is never below `LEAST_SCALE`, even where the second of these is."""
    before = scaler.get_scale()
    scaler.update()
    lowered = scaler.get_scale()
    if lowered >= before:
        return None
    if lowered < LEAST_SCALE:
        scaler.update(LEAST_SCALE)
    return before, lowered


Builder = Callable[[list[dict], OptimConfig], torch.optim.Optimizer]
# `OPTIMIZERS` in config/schema.py has the same names: recipes are checked without importing torch.
BUILDERS: dict[str, Builder] = {"adamw": build_adamw, "muon": build_adamw}


def register_optimizer(name: str, build: Builder) -> None:
    """Lets `optim.name` be `name`: `build(groups, config)` makes the optimizer of `parameter_groups`' groups.

    Checkpoints hold its state, which must be float tensors by parameter, of its shape or without dimensions
    (not a Python number); `nalanda train` refuses another. To learn it, the class is called with the keys of
    a group that it takes. Raises ValueError for a name that is taken or for a `build` that cannot be called.
    """
    if BUILDERS.get(name, build) is not build:
        raise ValueError(f"register_optimizer({name!r}): the name is taken; choose another")
    if not callable(build):
        raise ValueError(
            f"register_optimizer({name!r}): expected a function (groups, config), got {build!r}"
        )
    BUILDERS[name] = build
    OPTIMIZERS.extend({name} - set(OPTIMIZERS))


class Joined(torch.optim.Optimizer):
    """Several optimizers with separate parameters as one: one `state`, one list of `param_groups`."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts, self.counts = parts, [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Makes the parts share this object's groups and state."""
        groups = iter(self.param_groups)
        for part, count in zip(self.parts, self.counts, strict=True):
            part.param_groups = [next(groups) for _ in range(count)]
            part.state = self.state

    def __setstate__(
        self, state: dict
    ) -> None:  # `load_state_dict` calls it with new groups and state
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


class Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., 2024), also for matrices that FSDP2 has sharded or that hold several.

    A group's `blocks` are equal blocks of rows, each of which gets an orthogonal update of its own.

    torch's Newton–Schulz works on shards too, but with two all-gathers per iteration, and with other rounding
    than one process. Here the momentum stays sharded; each matrix in turn is gathered, updated by torch's
    code on every process, and sharded again.
    """

    def _init_group(self, group: dict, *lists: list) -> bool:
        """torch's: fills the lists of parameters, gradients and momenta. Blocks are views of them."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [block for x in tensors for block in x.chunk(group.get("blocks", 1))]
        return has_complex

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        sharded = [
            (p, g) for g in self.param_groups for p in g["params"] if isinstance(p.grad, DTensor)
        ]
        for p, group in sharded:
            momentum, state = group["momentum"], self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
            whole = nn.Parameter(p.full_tensor())
            whole.grad = p.grad.lerp(buffer, momentum).full_tensor()
            keys = ("lr", "weight_decay", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
            settings = {key: group[key] for key in keys}
            one = {"params": [whole], "blocks": group.get("blocks", 1)}
            Muon([one], momentum=0.0, nesterov=False, **settings).step()
            p.copy_(
                distribute_tensor(whole.detach(), p.device_mesh, p.placements, src_data_rank=None)
            )
            p.grad = None  # done: torch's step skips it
        return super().step(closure)


def describe_groups(groups: Iterable[dict]) -> str:
    """Describes the groups: `matrices 2,800,000 decay 0.1, vectors 5,200 decay 0 lr × 0.5`."""
    return ", ".join(
        f"{group['name']} {sum(p.numel() for p in group['params']):,} decay {group['weight_decay']:g}"
        + (f" lr × {group['lr_scale']:g}" if group.get("lr_scale", 1.0) != 1 else "")
        for group in groups
    )
