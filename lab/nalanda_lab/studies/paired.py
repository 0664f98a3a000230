"""One training run of a study, made so that runs of the same seed differ only in what is compared.

Weights are drawn by module name, and the order of the data depends on the seed alone.
"""

import contextlib
import copy
import itertools
import platform
import re
import time
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nalanda.common.versions import versions
from nalanda.config.schema import RunConfig
from nalanda.data.token_set import TokenSet
from nalanda.data.tokenizer import build_tokenizer
from nalanda.model import NalandaForCausalLM
from nalanda.model.delta import Decay
from nalanda.train.build import open_batches
from nalanda.train.loss import count_labels, summed_loss
from nalanda.train.optim import build_optimizer
from nalanda_lab.equal import configured, grows
from nalanda_lab.sweep import Record

Batch = dict[str, Tensor]


def draw_weights(model: NalandaForCausalLM, seed: int) -> None:
    """Initialises the model again, each module by a generator of its own, seeded by its name and `seed`.

    Modules of the same name and shape are then equal in all models of a seed. The decays of a layer's heads
    are stratified: one from each of as many equal parts of their distribution, in an order of their own.
    """
    with torch.random.fork_rng():
        for name, module in model.named_modules():
            torch.manual_seed(int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:7]))
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False  # pyrefly: ignore[missing-attribute]
            model._init_weights(module)
            if isinstance(module, Decay):
                _stratify(module)


@torch.no_grad()
def _stratify(decay: Decay) -> None:
    """As `Decay.initial`: A ~ U(0, 16), dt log-uniform in [1e-3, 0.1]."""
    heads = len(decay.A_log)

    def shares() -> Tensor:
        return (torch.randperm(heads) + torch.rand(heads)) / heads

    values = decay.parameters_of((16 * shares()).clamp_min(1e-4), 10 ** (2 * shares() - 3))
    decay.load_state_dict(values)


def train_paired(settings: dict[str, Any], config: RunConfig, text: Path, work: Path) -> Record:
    """Trains a model to each of its budgets and returns the record.

    The rate warms up and stays. For each budget a copy of the model branches off when all but the last
    `cooldown` of it is spent, and cools down linearly to 0 over the next rows, which the trunk reads as well.

    Args:
        settings: what determines the run, the record's key: `model`, `seed`, `rate`, `budgets` in tokens,
            `cooldown` and `lengths`.
        config: the recipe with that model, seed and rate; gives the data and the optimizer.
        text: a token set with its tokenizer. work: a folder for the state at each budget, so that a killed
            run goes on there.

    Returns:
        `settings`; `budgets`, a list with `tokens`, `loss` in nats a token, `documents`, the sum of nats of
        each validation document, and `curve`, [tokens, mean training loss]; `lengths`, the nats a token by
        position of the last model on longer rows; `parameters`, `state_bytes`, `state_grows`, `text`,
        `machine`, `threads`, `versions`, `seconds`. A diverged run has `failed`.
    """
    start, length = time.perf_counter(), config.data.seq_len
    model = NalandaForCausalLM(
        configured(settings["model"], TokenSet(text, "train").settings["vocab_size"])
    )
    draw_weights(model, settings["seed"])
    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    batches, validation = open_batches(config, tokenizer)
    rows = list(itertools.chain(*validation.values()))
    trunk = Trunk(model, config, batches)
    state = work / (sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16] + ".pt")
    found, spent = trunk.restore(state)
    # What follows needs the last budget's model, which is not saved: it branches off once more.
    found, failed = found[: len(settings["budgets"]) - 1], None
    with contextlib.closing(batches):
        for budget in settings["budgets"][len(found) :]:
            steps = budget // config.train.tokens_per_step
            cool = round(settings["cooldown"] * steps)
            trunk.advance(steps - cool)
            branch = trunk.branch(cool)
            sums = document_sums(branch, rows, tokenizer.bos_token_id)
            loss = sum(sums) / sum(map(count_labels, rows))
            if not loss < 20:
                failed = f"diverged before {budget:,} tokens"
                break
            found.append(
                {"tokens": budget, "loss": loss, "documents": sums, "curve": trunk.curve()}
            )
            trunk.save(state, found, spent + time.perf_counter() - start)
    shape, longest = configured(settings["model"]), settings["lengths"]
    record: Record = {
        "settings": settings,
        "budgets": [{**row, "documents": [round(x, 3) for x in row["documents"]]} for row in found],
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": shape.state_bytes(length, torch.float32),
        "state_grows": grows(shape),
        "machine": cpu_model(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    if failed:
        record["failed"] = failed
    elif longest:
        tokens = torch.as_tensor(
            TokenSet(text, "validation").read(0, longest["rows"] * longest["tokens"])
        )
        tokens = tokens.view(longest["rows"], -1).long()
        record["lengths"] = losses_by_position(branch, tokens, length)
    state.unlink(missing_ok=True)
    return record | {"seconds": spent + time.perf_counter() - start}


class Trunk:
    """A model in training at a constant rate after the warm-up, and the batches that it has yet to read."""

    def __init__(self, model: NalandaForCausalLM, config: RunConfig, batches: Iterator[Batch]):
        self.model, self.optim, self.batches = model, config.optim, batches
        self.z_loss = config.train.z_loss
        self.optimizer = build_optimizer(model, config.optim)
        self.warmup, self.micro_steps = (
            config.schedule.warmup_steps,
            config.accumulation(processes=1),
        )
        self.size, self.step = config.train.tokens_per_step, 0
        self.losses: list[Tensor] = []

    def read(self) -> list[Batch]:
        """The micro-batches of the next step."""
        return list(itertools.islice(self.batches, self.micro_steps))

    def advance(self, until: int) -> None:
        """Trains up to step `until`."""
        while self.step < until:
            self.step += 1
            rate = self.optim.lr * min(1.0, self.step / max(1, self.warmup))
            self.losses.append(self._update(self.model, self.optimizer, self.read(), rate))

    def branch(self, steps: int) -> NalandaForCausalLM:
        """A copy of the model after a linear cooldown over the next `steps` steps; the trunk stays."""
        model = copy.deepcopy(self.model)
        optimizer = build_optimizer(model, self.optim)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        ahead = [self.read() for _ in range(steps)]
        self.batches = itertools.chain(itertools.chain.from_iterable(ahead), self.batches)
        for i, batch in enumerate(ahead):
            self._update(model, optimizer, batch, self.optim.lr * (1 - (i + 1) / steps))
        return model

    def _update(
        self,
        model: NalandaForCausalLM,
        optimizer: torch.optim.Optimizer,
        batches: list[Batch],
        rate: float,
    ) -> Tensor:
        model.train()
        count = max(1, sum(map(count_labels, batches)))
        total = torch.zeros(())
        for batch in batches:
            loss = summed_loss(model, batch, model.device, self.z_loss) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), self.optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    def curve(self, points: int = 20) -> list[list[float]]:
        """[tokens, mean loss of the steps since the last point], of the trunk."""
        ends = sorted({round(self.step * (i + 1) / points) for i in range(points)})
        starts = [0, *ends[:-1]]
        return [
            [b * self.size, round(torch.stack(self.losses[a:b]).mean().item(), 4)]
            for a, b in zip(starts, ends, strict=True)
            if b > a
        ]

    def save(self, file: Path, found: list[dict], seconds: float) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "losses": self.losses, "found": found, "seconds": seconds}
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def restore(self, file: Path) -> tuple[list[dict], float]:
        """The budgets that a killed run has finished, and its seconds."""
        if not file.is_file():
            return [], 0.0
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]
        for _ in range(self.step):
            self.read()
        return state["found"], state["seconds"]


@torch.no_grad()
def document_sums(model: NalandaForCausalLM, batches: Iterable[Batch], bos: int) -> list[float]:
    """The sum of nats of each document of the validation rows."""
    model.eval()
    losses = [
        F.cross_entropy(
            model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], use_cache=False)
            .logits[:, :-1]
            .mT,
            batch["labels"][:, 1:],
            reduction="none",
        )
        for batch in batches
    ]
    return by_document(losses, batches, bos)


def by_document(values: Iterable[Tensor], batches: Iterable[Batch], bos: int) -> list[float]:
    """Sums of values `[B, T − 1]` of each batch over documents. A row may continue the one before."""
    values, batches = torch.cat(list(values)).double(), list(batches)
    tokens, positions = (
        torch.cat([b[name] for b in batches]) for name in ("input_ids", "position_ids")
    )
    starts = ((tokens == bos) & (positions == 0)).flatten()
    document = (starts.cumsum(0) - int(starts[0])).view_as(tokens)[:, 1:].flatten()
    sums = torch.zeros(int(document.max()) + 1, dtype=torch.float64)
    return sums.index_add(0, document, values.flatten()).tolist()


@torch.no_grad()
def losses_by_position(
    model: NalandaForCausalLM, tokens: Tensor, trained: int
) -> list[list[float]]:
    """[end, mean nats a token] of the positions up to each end: `trained`, 2·trained, 4·trained, … of T.

    tokens: `[rows, T]`, read without regard to where documents end.
    """
    model.eval()
    losses = []
    for row in tokens:
        logits = model(row[None], use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, row[1:], reduction="none").double())
    mean, found, first = torch.stack(losses).mean(0), [], 0
    ends = [trained * 2**i for i in range(32) if trained * 2**i <= tokens.shape[1]]
    for end in ends:
        found.append([end, round(mean[first : end - 1].mean().item(), 4)])
        first = end - 1
    return found


def cpu_model() -> str:
    """The processor's name."""
    file = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", file.read_text()) if file.is_file() else None
    return named[1] if named else platform.processor() or platform.machine()
