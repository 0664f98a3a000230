"""Arms of the fork experiments, and their training: what happens to ‖q‖ or β after a fork."""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nalanda.config.schema import RunConfig
from nalanda.model import Mixer, NalandaForCausalLM
from nalanda.model.call import Inputs
from nalanda.model.feature_maps import EPS, NaLa
from nalanda.model.layers import Fp32Module
from nalanda.train.loss import count_bytes, count_labels, summed_loss
from nalanda.train.optim import build_optimizer
from nalanda_lab.norms import changed_norms
from nalanda_lab.paired import Batch, document_sums, sum_by_document, take_step

# ------------------------------ arms


class Blind(Fp32Module, NaLa):
    """NaLa with a learnt constant p_h = λ(½ + tanh m_h). mean: the p at which each head starts, `[H]`."""

    def __init__(self, *, num_heads: int, head_dim: int, mean: Tensor):
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.m = nn.Parameter((mean / self.power - 0.5).atanh())

    def exponents(self, n: Tensor) -> tuple[Tensor, float]:
        return self.power * (0.5 + self.m.tanh())[:, None], self.key_power


class Fixed(Blind):
    """NaLa with the p_h at which `Blind` starts. It is not learnt."""

    def __init__(self, *, num_heads: int, head_dim: int, mean: Tensor):
        super().__init__(num_heads=num_heads, head_dim=head_dim, mean=mean)
        m = self.m.detach()
        del self.m
        self.register_buffer("m", m)


class Free(Fp32Module, NaLa):
    """NaLa with p_h = λ(½ + tanh(g_h n + c_h)). It starts as NaLa."""

    def __init__(self, *, num_heads: int, head_dim: int, mean: Tensor):
        super().__init__(num_heads=num_heads, head_dim=head_dim)
        self.g = nn.Parameter(torch.ones_like(mean))
        self.c = nn.Parameter(torch.zeros_like(mean))

    def exponents(self, n: Tensor) -> tuple[Tensor, float]:
        n = n / self.root  # [B, T, H, 1]
        return self.power * (0.5 + (self.g[:, None] * n + self.c[:, None]).tanh()), self.key_power


def mixers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Mixer)]


def install(model: nn.Module, arm: str, means: list[Tensor]) -> None:
    """Replaces the maps of `fixed`, `blind` and `free`; other arms keep theirs. means: of each layer, `[H]`."""
    kind = {"fixed": Fixed, "blind": Blind, "free": Free}.get(arm)
    if kind is not None:
        for mixer, mean in zip(mixers_of(model), means, strict=True):
            mixer.feature_map = kind(num_heads=mixer.num_heads, head_dim=mixer.K, mean=mean)


@contextlib.contextmanager
def held_norms(model: nn.Module, means: list[Tensor]):
    """Holds ‖q‖ of each head at its mean, `[H]` of each layer."""

    def hold(mean: Tensor, norm: Tensor) -> Tensor:
        return mean[:, None].expand_as(norm)

    with contextlib.ExitStack() as stack:
        for mixer, mean in zip(mixers_of(model), means, strict=True):
            stack.enter_context(changed_norms([mixer], partial(hold, mean)))
        yield


@contextlib.contextmanager
def changed_betas(model: nn.Module, changes: list[Callable[[Tensor], Tensor]]):
    """Replaces β `[B, T, HV]` of each layer by the layer's `change(β)`. Decays stay."""

    def gates(original: Callable, change: Callable, *args: Any) -> Inputs:
        inputs = original(*args)
        return inputs._replace(beta=change(inputs.beta))

    mixers = mixers_of(model)
    for mixer, change in zip(mixers, changes, strict=True):
        mixer.gates = partial(gates, mixer.gates, change)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.gates


def held_betas(model: nn.Module, means: list[Tensor]) -> contextlib.AbstractContextManager:
    """Holds β of each head at its mean, `[HV]` of each layer."""

    def hold(mean: Tensor, beta: Tensor) -> Tensor:
        return mean.expand_as(beta)

    return changed_betas(model, [partial(hold, mean) for mean in means])


@torch.no_grad()
def beta_means(model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """The mean of β over tokens, `[HV]` of each layer."""
    betas: list[list[Tensor]] = [[] for _ in mixers_of(model)]

    def note(layer: list[Tensor], beta: Tensor) -> Tensor:
        layer.append(beta.flatten(0, 1))  # [B·T, HV]
        return beta

    with changed_betas(model, [partial(note, layer) for layer in betas]):
        read_all(model, batches)
    return [torch.cat(layer).mean(0) for layer in betas]


def read_all(model: nn.Module, batches: list[Batch]) -> None:
    """Evaluates the model on all batches, for what its mixers note."""
    model.eval()
    for batch in batches:
        model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], use_cache=False)


@torch.no_grad()
def head_means(model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """The mean over tokens of p(‖q‖), or of ‖q‖ without a map: `[H]` of each layer."""

    def note(seen: list[Tensor], norm: Tensor) -> Tensor:
        seen.append(norm.flatten(0, 1))  # [B·T, H, 1]
        return norm

    mixers = mixers_of(model)
    seen: list[list[Tensor]] = [[] for _ in mixers]
    with contextlib.ExitStack() as stack:
        for mixer, layer in zip(mixers, seen, strict=True):
            stack.enter_context(changed_norms([mixer], partial(note, layer)))
        read_all(model, batches)

    means = []
    for mixer, layer in zip(mixers, seen, strict=True):
        values = torch.cat(layer)
        if mixer.rule.map is not None:
            values, _ = mixer.feature_map.exponents((values.square() + EPS).sqrt())
        means.append(values.mean(0).flatten())
    return means


@torch.no_grad()
def add_noise(model: nn.Module, size: float, seed: int) -> None:
    """Multiplies every weight by 1 + size·ε, ε normal."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=draw))


def swapped(norm: Tensor, length: int) -> Tensor:
    """The norm of the token `length` places before, in the batch's rows put end to end."""
    return norm.flatten(0, 1).roll(length, 0).view_as(norm)


# ------------------------------ training


class Fork:
    """A model in training: a trunk, or one of its arms. `recent` has the last rows that it read."""

    def __init__(self, model: NalandaForCausalLM, config: RunConfig, batches: Any, keep: int):
        self.model, self.batches = model, batches
        self.optim, self.z_loss = config.optim, config.train.z_loss
        self.optimizer = build_optimizer(model, config.optim)
        self.warmup = config.schedule.warmup_steps
        self.micro_steps = config.accumulation(processes=1)
        self.tokens_per_step = config.train.tokens_per_step
        self.step, self.steps = 0, config.train.steps
        self.cool = self.steps - self.step_at(80)
        self.recent: deque[Batch] = deque(maxlen=keep)
        self.means: list[Tensor] | None = None
        self.arm, self.seconds, self.failed = "own", 0.0, ""
        self.rows: list[Batch] = []  # of validation
        self.bos = 0
        self.text_bytes: Any = None

    def step_at(self, percent: int) -> int:
        return self.steps - round((100 - percent) * self.steps / 100)

    def read(self) -> list[Batch]:
        """The micro-batches of the next step."""
        batches = list(itertools.islice(self.batches, self.micro_steps))
        self.recent.extend(batches)
        return batches

    def advance_one(self) -> None:
        self.step += 1
        share = min(1.0, self.step / self.warmup, (self.steps - self.step) / self.cool)
        loss = self.update(self.read(), self.optim.lr * share)
        if not loss.isfinite():
            self.failed = f"diverged at step {self.step}"

    def update(self, batches: list[Batch], rate: float) -> Tensor:
        """Takes one optimizer step and returns the mean loss of its batches."""
        model = self.model.train()
        labels = max(1, sum(map(count_labels, batches)))
        total = torch.zeros(())
        for batch in batches:
            loss = summed_loss(model, batch, model.device, self.z_loss) / labels
            loss.backward()
            total += loss.detach()

        take_step(self.optimizer, model, rate, self.optim.max_grad_norm)
        return total

    def become(self, arm: str, means: list[Tensor]) -> None:
        """Makes the trunk an arm. The optimizer's moments stay; new parameters have none."""
        moments = self.moments()
        self.arm, self.means = arm, means
        install(self.model, arm, means)
        self.load_moments(moments)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by the parameter's name."""
        state = self.optimizer.state
        return {name: state[p] for name, p in self.model.named_parameters() if p in state}

    def load_moments(self, moments: dict[str, dict[str, Tensor]]) -> None:
        self.optimizer = build_optimizer(self.model, self.optim)
        for name, parameter in self.model.named_parameters():
            if name in moments:
                copies = {key: value.clone() for key, value in moments[name].items()}
                self.optimizer.state[parameter] = copies

    def state(self) -> dict[str, Any]:
        names = ("step", "arm", "means", "seconds", "failed")
        return {name: getattr(self, name) for name in names} | {
            "model": self.model.state_dict(),
            "moments": self.moments(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state, in a stream of batches at its beginning."""
        if state["means"] is not None:
            install(self.model, state["arm"], state["means"])
        self.model.load_state_dict(state["model"])
        self.load_moments(state["moments"])
        for name in ("step", "arm", "means", "seconds", "failed"):
            setattr(self, name, state[name])
        for _ in range(self.step):
            self.read()

    def norms(self) -> contextlib.AbstractContextManager:
        """The context in which the arm's model runs."""
        hold = {"held": held_norms, "deaf": held_betas}.get(self.arm)
        if hold is None:
            return contextlib.nullcontext()
        assert self.means is not None
        return hold(self.model, self.means)


# ------------------------------ measuring


def measure(run: Fork, beside: bool) -> dict[str, Any]:
    """Losses on the validation rows.

    beside: measures an `own` model with p frozen and with norms swapped, too. That changes its maps.
    """
    masks = [row["labels"][:, 1:] != -100 for row in run.rows]
    tokens = sum(map(count_labels, run.rows))

    def loss_by_document() -> tuple[float, list[float]]:
        sums = document_sums(run.model, run.rows, run.bos)
        return sum(sums) / tokens, [round(x, 4) for x in sums]

    with run.norms():
        loss, documents = loss_by_document()
    record: dict[str, Any] = {"loss": loss, "rows": sum(len(row["labels"]) for row in run.rows)}
    record["bytes"] = sum(count_bytes(row, run.text_bytes) for row in run.rows)
    record |= {"documents": documents, "document_tokens": sum_by_document(masks, run.rows, run.bos)}
    record |= {"means_at_fork": as_lists(run.means or []), "learnt": learnt(run.model)}
    if not beside:
        return record

    means = head_means(run.model, list(run.recent))
    length = run.rows[0]["labels"].shape[1]
    with changed_norms(mixers_of(run.model), partial(swapped, length=length)):
        record["swapped"], _ = loss_by_document()

    has_map = mixers_of(run.model)[0].rule.map is not None
    frozen = contextlib.nullcontext() if has_map else held_norms(run.model, means)
    install(run.model, "blind" if has_map else "held", means)
    with frozen:
        record["frozen"], _ = loss_by_document()
    return record | {"means_at_end": as_lists(means)}


def as_lists(layers: list[Tensor]) -> list[list[float]]:
    return [layer.tolist() for layer in layers]


def learnt(model: nn.Module) -> list[dict[str, list[float]]]:
    """The parameters of each arm's map, by layer."""
    maps = [mixer.feature_map for mixer in mixers_of(model) if mixer.rule.map is not None]
    return [{name: p.tolist() for name, p in each.named_parameters()} for each in maps]
