"""The optimizer, its parameter groups, and the learning-rate schedule."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nalanda.common.errors import InputError
from nalanda.common.text import suggest
from nalanda.config.schema import OPTIMIZERS, GroupConfig, OptimConfig, ScheduleConfig
from nalanda.model.base import Mixer
from nalanda.model.layers import Fp32Module
from nalanda.model.width import Growth, growths


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
    # 0 at the end of the warm-up, 1 at the last step
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
            # Without the floor below: this schedule knows no last step.
            return peak * math.sqrt(max(1, warmup) / max(1, step, warmup))
        case "constant":
            return peak
    return peak * (floor + (1 - floor) * share)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Groups "matrices" (weight decay), "vectors" (no decay) and "muon" (Muon, decay), and a separate group
    of each kind for every pattern of `config.groups`.

    Besides torch's keys, a group has `name` and `lr_scale`, the factor of the schedule's rate. Those of Muon
    have `blocks`: how many equal blocks of rows of a parameter are matrices of their own.

    Raises `InputError` for a pattern that matches no parameter.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    vectors = undecayed(model, trained)
    blocks: dict[int, int] = {}
    if config.name == "muon":
        blocks = muon_blocks(model, [p for p in trained.values() if id(p) not in vectors])

    growth_of = growths(model)
    # (pattern, kind, blocks, width's factor) → group, in the order of the first parameter of each
    groups: dict[tuple, dict] = {}
    for name, p in trained.items():
        kind = "vectors" if id(p) in vectors else "muon" if id(p) in blocks else "matrices"
        # The first pattern that matches decides.
        rule = next((g for g in config.groups if re.search(g.match, name)), None)
        width_rate = 1.0
        if growth := growth_of.get(name.removesuffix(".weight")):
            width_rate = width_factor(growth, p, blocks.get(id(p)))
        # All parameters of a group share their number of blocks and their factor.
        key = rule and rule.match, kind, blocks.get(id(p)), width_rate
        if key not in groups:
            groups[key] = group_settings(kind, config, rule, blocks.get(id(p)), width_rate)
        groups[key]["params"].append(p)

    used = {pattern for pattern, *_ in groups}
    for rule in config.groups:
        if rule.match not in used:
            refuse_pattern(rule.match, trained)
    # Muon's groups come first: `build_adamw` cuts the list behind them.
    order = ["muon", "matrices", "vectors"]
    return sorted(groups.values(), key=lambda group: order.index(group["kind"]))


def undecayed(model: nn.Module, trained: dict[str, nn.Parameter]) -> set[int]:
    """The ids of the parameters without weight decay.

    Parameters with two or more dimensions decay, as in the literature: projections, embedding, head, and the
    filters of short convolutions [D, 1, W]. Norms, biases and other vectors do not. Neither do the parameters
    of an `Fp32Module` (decays, exponents, landmarks). Other libraries mark theirs with
    `_no_weight_decay = True`, or call them `A_log` (a matrix in Mamba).
    """
    ids = {id(p) for m in model.modules() if isinstance(m, Fp32Module) for p in m.parameters()}
    for name, p in trained.items():
        if p.ndim < 2 or getattr(p, "_no_weight_decay", False) or name.endswith("A_log"):
            ids.add(id(p))
    return ids


def muon_blocks(model: nn.Module, decaying: list[nn.Parameter]) -> dict[int, int]:
    """The parameters that Muon takes, by id, with the number of their blocks.

    Muon takes the decaying matrices between embedding and head. It leaves out the gates of a mixer's state:
    an orthogonal update moves each of their few rows as far as any other.
    """
    # Embedding and head are tables: their rows are tokens, not a map between spaces.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    mixers = [m for m in model.modules() if isinstance(m, Mixer)]
    excluded = {id(p) for table in tables for p in table.parameters()}
    excluded |= {id(p) for mixer in mixers for p in mixer.gate_parameters()}
    counts = {id(p): count for mixer in mixers for p, count in head_matrices(mixer)}
    return {id(p): counts.get(id(p), 1) for p in decaying if p.ndim == 2 and id(p) not in excluded}


def width_factor(growth: Growth, weight: nn.Parameter, blocks: int | None) -> float:
    """The factor of a weight's rate under µP, rounded so that equal ones share a group.

    blocks: into how many blocks of rows Muon cuts it; None for AdamW.
    """
    if blocks is None:
        return round(growth.adam_rate(), 12)
    n_out, n_in = weight.shape
    if blocks > 1:  # of heads, whose size does not grow
        growth = growth._replace(rows=1.0)
    return round(growth.muon_rate(n_out // blocks, n_in), 12)


def group_settings(
    kind: str, config: OptimConfig, rule: GroupConfig | None, blocks: int | None, width_rate: float
) -> dict[str, Any]:
    """An empty group of a kind.

    rule: of `config.groups`, if its parameters match one. width_rate: the factor of `width_factor`.
    """
    name, scale = kind, 1.0
    decay = 0.0 if kind == "vectors" else config.weight_decay
    if kind == "muon" and config.muon_lr is not None:
        # The schedule's peak is config.lr; this factor makes it Muon's.
        scale = config.muon_lr / config.lr
    if rule is not None:
        # A rule's factor comes on top of Muon's.
        name, scale = f"{rule.match} {kind}", scale * rule.lr_scale
        if rule.weight_decay is not None:
            decay = rule.weight_decay
    if blocks is not None and blocks > 1:
        name = f"{name} in {blocks} blocks"
    if width_rate != 1:
        name = f"{name} µP"
        # Rate times decay stays.
        scale, decay = scale * width_rate, decay / width_rate

    settings = {"name": name, "kind": kind, "weight_decay": decay, "lr_scale": scale, "params": []}
    return settings if blocks is None else settings | {"blocks": blocks}


def refuse_pattern(pattern: str, trained: dict[str, nn.Parameter]) -> NoReturn:
    """Raises `InputError` for a pattern whose group is empty."""
    if any(re.search(pattern, name) for name in trained):
        problem = "; earlier patterns take all that it matches"
    else:
        words = {word for name in trained for word in name.split(".") if not word.isdecimal()}
        problem = suggest(pattern, words)
    raise InputError(f"optim.groups: {pattern!r} matches no parameter{problem}")


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


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives each group the schedule's `rate` times its own `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def build_adamw(groups: list[dict], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW, and Muon for the groups of that kind, as one optimizer.

    AdamW is fused where torch has it: one pass over the moments instead of many.
    """
    everything = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in everything)
    muon_count = sum(group.pop("kind") == "muon" for group in groups)  # these come first
    muon_groups, adamw_groups = groups[:muon_count], groups[muon_count:]

    optimizers: list[torch.optim.Optimizer] = []
    if muon_groups:
        # Its updates have the usual RMS of AdamW's, so both can share a rate.
        optimizers.append(Muon(muon_groups, momentum=config.momentum))
    if adamw_groups:
        adamw = torch.optim.AdamW(
            adamw_groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused
        )
        optimizers.append(adamw)
    return optimizers[0] if len(optimizers) == 1 else Joined(optimizers)


LEAST_SCALE = 1.0
"""A step whose gradients overflow at this fp16 loss scale has another problem, and is a bad step."""


def loss_scale(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """The factor of an fp16 run's loss, which keeps small gradients in fp16's range (arXiv 1710.03740).

    It halves at an overflow, and doubles after 2,000 steps without one. For other precisions it does nothing.
    """
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def follow_gradients(scaler: torch.amp.GradScaler) -> tuple[float, float] | None:
    """Changes the loss scale after `unscale_`.

    Returns (before, lowered) if gradients of any process overflowed, else None. The scale stays at
    `LEAST_SCALE` or above, even where `lowered` is below it.
    """
    before = scaler.get_scale()
    scaler.update()
    lowered = scaler.get_scale()
    # A disabled scaler always says 1, and so never falls.
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
    (not a Python number, and nothing in groups or attributes); `nalanda train` refuses another. To learn it, the
    class is called with the keys of a group that it takes. Raises ValueError for a name that is taken or for a
    `build` that cannot be called.
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
        self.parts = parts
        self.counts = [len(optimizer.param_groups) for optimizer in parts]
        # No defaults: the parts have filled in every option of their groups.
        super().__init__([group for optimizer in parts for group in optimizer.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Makes the parts share this object's groups and state."""
        groups = iter(self.param_groups)
        for optimizer, count in zip(self.parts, self.counts, strict=True):
            optimizer.param_groups = [next(groups) for _ in range(count)]
            optimizer.state = self.state

    def __setstate__(self, state: dict) -> None:
        # `load_state_dict` calls it with new groups and state.
        super().__setstate__(state)
        self._share()

    def step(self, closure: None = None) -> None:
        for optimizer in self.parts:
            optimizer.step()


class Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., 2024), also for matrices that FSDP2 has sharded or that hold several.

    A group's `blocks` are equal blocks of rows, each of which gets an orthogonal update of its own. An update
    has the usual RMS of AdamW's (torch's `match_rms_adamw`).

    Momenta and weights stay sharded. Each block has one owner among the processes of the shard dimension. The
    owner gathers the block's update, orthogonalises it and scatters the result, as in VeOmni and torchtitan.
    Replicas of a hybrid mesh repeat one another's work. The result is that of one process.
    """

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, adjust_lr_fn="match_rms_adamw", **options)

    def _init_group(self, group: dict, *lists: list) -> bool:
        """torch's: fills the lists of parameters, gradients and momenta. Blocks are views of them."""
        has_complex = super()._init_group(group, *lists)
        # Each [rows, D] becomes views [rows / blocks, D]: updates in place reach the whole.
        for tensors in lists:
            tensors[:] = [block for x in tensors for block in x.chunk(group.get("blocks", 1))]
        return has_complex

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        sharded = [
            (p, group)
            for group in self.param_groups
            for p in group["params"]
            if isinstance(p.grad, DTensor)
        ]
        if sharded:
            mesh = sharded[0][0].device_mesh
            shards = mesh.get_group(mesh.ndim - 1)  # replicas are the dimension before
            matrices = [m for p, group in sharded for m in self._matrices(p, group, shards)]
            update_by_owner(matrices, shards)
        return super().step(closure)  # of the parameters that still have a gradient

    def _matrices(self, p: Any, group: dict, shards: dist.ProcessGroup) -> Iterator["Matrix"]:
        """Cuts a sharded parameter into its blocks, with their updates before the orthogonalisation. Frees its
        gradient."""
        if p.placements[-1] != Shard(0):
            raise ValueError(f"Muon: parameters must be sharded by rows, not as {p.placements}")
        momentum, state = group["momentum"], self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        # B ← μ B + (1 − μ) G and Nesterov's look-ahead, as in torch's Muon
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        update = p.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        p.grad = None  # done: torch's step skips it

        # torch's Newton–Schulz begins with this cast, so the exchange is in bf16 too.
        update, weight = update.to_local().bfloat16(), p.to_local()
        size, rank = dist.get_world_size(shards), dist.get_rank(shards)
        # FSDP2 gives each process ⌈rows / N⌉ rows, and the last ones what is left.
        rows = len(p)
        edges = [min(r * -(-rows // size), rows) for r in range(size + 1)]

        height = rows // group.get("blocks", 1)
        for first in range(0, rows, height):
            cuts = [min(max(edge, first), first + height) for edge in edges]
            own_rows = slice(cuts[rank] - edges[rank], cuts[rank + 1] - edges[rank])
            counts = [end - begin for begin, end in itertools.pairwise(cuts)]
            yield Matrix(weight[own_rows], update[own_rows], counts, group)


class Matrix(NamedTuple):
    """A matrix that Muon orthogonalises, cut by rows over N processes.

    weight, update: this process's rows `[n, D]`; weight is a view. counts: rows of each process. group: of
    the optimizer.
    """

    weight: Tensor
    update: Tensor
    counts: list[int]
    group: dict

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.counts), self.weight.shape[1]

    def sizes(self) -> list[int]:
        """Elements of each process."""
        return [count * self.weight.shape[1] for count in self.counts]


def update_by_owner(matrices: list[Matrix], shards: dist.ProcessGroup) -> None:
    """Orthogonalises the updates of the matrices, each on its owner, and takes the step on this process's rows."""
    size, rank = dist.get_world_size(shards), dist.get_rank(shards)
    owned = share_out(matrices, size)
    own_matrices = owned[rank]
    ordered = [*itertools.chain(*owned)]

    # Elements that go to each owner, and those that come from each process.
    sent = [sum(matrix.update.numel() for matrix in each) for each in owned]
    received = [sum(matrix.sizes()[r] for matrix in own_matrices) for r in range(size)]
    flat = torch.cat([matrix.update.flatten() for matrix in ordered])
    gathered = flat.new_empty(sum(received))
    dist.all_to_all_single(gathered, flat, received, sent, group=shards)

    # By process, and within it by matrix: a matrix's rows are every len(own_matrices)-th piece.
    pieces = gathered.split([matrix.sizes()[r] for r in range(size) for matrix in own_matrices])
    orthogonalised = []
    for i, matrix in enumerate(own_matrices):
        full = torch.cat(pieces[i :: len(own_matrices)]).view(matrix.shape)
        orthogonalised.append(orthogonal(full, matrix.group).split(matrix.counts))

    # The way back, in the same order. A process that owns none sends nothing.
    parts = [rows[r].flatten() for r in range(size) for rows in orthogonalised]
    back = torch.cat([flat[:0], *parts])
    scattered = torch.empty_like(flat)
    dist.all_to_all_single(scattered, back, sent, received, group=shards)

    updates = scattered.split([matrix.update.numel() for matrix in ordered])
    for matrix, update in zip(ordered, updates, strict=True):
        lr, decay = matrix.group["lr"], matrix.group["weight_decay"]
        matrix.weight.mul_(1 - lr * decay)
        matrix.weight.add_(update.view_as(matrix.weight), alpha=-lr * rms_factor(matrix.shape))


def share_out(matrices: list[Matrix], size: int) -> list[list[Matrix]]:
    """The matrices of each of `size` owners, of about equal work; the same on all processes.

    A matrix that lies on one process stays there. The others go, the largest first, to the owner with the
    least work.
    """
    owned: list[list[Matrix]] = [[] for _ in range(size)]
    work = [0] * size

    def cost(matrix: Matrix) -> int:
        # Newton–Schulz multiplies [a, b] [b, a], [a, a] [a, a] and [a, a] [a, b] with a ≤ b.
        a, b = sorted(matrix.shape)
        return a * a * (2 * b + a)

    def is_cut(matrix: Matrix) -> bool:
        return max(matrix.counts) < sum(matrix.counts)

    for matrix in sorted(matrices, key=lambda matrix: (is_cut(matrix), -cost(matrix))):
        owner = work.index(min(work)) if is_cut(matrix) else matrix.counts.index(sum(matrix.counts))
        owned[owner].append(matrix)
        work[owner] += cost(matrix)
    return owned


def orthogonal(x: Tensor, group: dict) -> Tensor:
    """The orthogonal factor of x `[rows, D]` in bf16, by torch's Muon with the options of `group`."""
    # From zero, a step of size 1 along −x is the factor of x.
    weight = nn.Parameter(torch.zeros_like(x))
    weight.grad = -x
    options = {key: group[key] for key in ("ns_coefficients", "eps", "ns_steps")}
    lr = 1 / rms_factor(x.shape)
    Muon([weight], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
    return weight.detach()


def rms_factor(shape: Sequence[int]) -> float:
    """The factor of Muon's rate for a matrix of this shape: torch's `match_rms_adamw`."""
    return 0.2 * math.sqrt(max(shape))


def describe_groups(groups: Iterable[dict]) -> str:
    """Describes the groups: `matrices 2,800,000 decay 0.1, vectors 5,200 decay 0 lr × 0.5`."""
    texts = []
    for group in groups:
        count, scale = sum(p.numel() for p in group["params"]), group.get("lr_scale", 1.0)
        text = f"{group['name']} {count:,} decay {group['weight_decay']:g}"
        texts.append(text if scale == 1 else f"{text} lr × {scale:g}")
    return ", ".join(texts)
