"""Paired training runs: runs of a seed differ only in what is compared.

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
from nalanda.train.optim import build_optimizer, set_rates
from nalanda_lab.equal import configured, grows
from nalanda_lab.sweep import Record

Batch = dict[str, Tensor]

# ------------------------------ weights


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


# ------------------------------ a run


def train_paired(
    settings: dict[str, Any], config: RunConfig, text: Path, work: Path, device: str = "cpu"
) -> Record:
    """Trains a model to each of its budgets and returns the record.

    The rate warms up and stays. For each budget a copy of the model branches off when all but the last
    `cooldown` of it is spent, and cools down linearly to 0 over the next rows, which the trunk reads as well.

    Args:
        settings: the record's key, all that determines the run: `model`, `seed`, `rate`, `budgets` in tokens,
            `cooldown` and `lengths`.
        config: the recipe with that model, seed and rate; gives the data and the optimizer.
        text: a token set with its tokenizer.
        work: a folder for the state at each budget, so that a killed run goes on there.
        device: where the model trains. Weights are drawn on the CPU: they are the same everywhere.

    Returns:
        `settings`; `budgets`, a list with `tokens`, `loss` in nats a token, `documents`, the sum of nats of
        each validation document, and `curve`, [tokens, mean training loss]; `lengths`, the nats a token by
        position of the last model on longer rows; `parameters`, `state_bytes`, `state_grows`, `machine`,
        `threads`, `versions`, `seconds`. A diverged run has `failed`.
    """
    start = time.perf_counter()
    vocab_size = TokenSet(text, "train").settings["vocab_size"]
    model = NalandaForCausalLM(configured(settings["model"], vocab_size))
    draw_weights(model, settings["seed"])
    model.to(device)  # pyrefly: ignore[bad-argument-type]

    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    batches, validation = open_batches(config, tokenizer)
    rows = list(itertools.chain(*validation.values()))

    trunk = Trunk(model, config, batches)
    state = work / (sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16] + ".pt")
    done, seconds_before = trunk.restore(state)
    # The last budget's model is measured further and not saved, so it branches off once more.
    done = done[: len(settings["budgets"]) - 1]

    failed = None
    with contextlib.closing(batches):
        for budget in settings["budgets"][len(done) :]:
            steps = budget // config.train.tokens_per_step
            cool = round(settings["cooldown"] * steps)
            trunk.advance(steps - cool)
            branch = trunk.branch(cool)

            sums = document_sums(branch, rows, tokenizer.bos_token_id)
            loss = sum(sums) / sum(map(count_labels, rows))
            if not loss < 20:
                failed = f"diverged before {budget:,} tokens"
                break
            done.append({"tokens": budget, "loss": loss, "documents": sums, "curve": trunk.curve()})
            trunk.save(state, done, seconds_before + time.perf_counter() - start)

    shape = configured(settings["model"])
    record: Record = {
        "settings": settings,
        "budgets": [{**row, "documents": [round(x, 3) for x in row["documents"]]} for row in done],
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": shape.state_bytes(config.data.seq_len, torch.float32),
        "state_grows": grows(shape),
        "machine": cpu_model() if device == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    if failed:
        record["failed"] = failed
    elif lengths := settings["lengths"]:
        count = lengths["rows"] * lengths["tokens"]
        tokens = torch.as_tensor(TokenSet(text, "validation").read(0, count))
        tokens = tokens.view(lengths["rows"], -1).long()
        record["lengths"] = losses_by_position(branch, tokens, config.data.seq_len)

    state.unlink(missing_ok=True)
    return record | {"seconds": seconds_before + time.perf_counter() - start}


class Trunk:
    """A model in training at a constant rate after the warm-up, and the batches that it has yet to read."""

    def __init__(self, model: NalandaForCausalLM, config: RunConfig, batches: Iterator[Batch]):
        self.model = model
        self.optim = config.optim
        self.optimizer = build_optimizer(model, config.optim)
        self.batches = batches
        self.z_loss = config.train.z_loss
        self.warmup = config.schedule.warmup_steps
        self.micro_steps = config.accumulation(processes=1)
        self.tokens_per_step = config.train.tokens_per_step
        self.step = 0
        self.losses: list[Tensor] = []

    def read(self) -> list[Batch]:
        """The micro-batches of the next step."""
        return list(itertools.islice(self.batches, self.micro_steps))

    def advance(self, until: int) -> None:
        """Trains up to step `until`."""
        while self.step < until:
            self.step += 1
            rate = self.optim.lr * min(1.0, self.step / max(1, self.warmup))
            loss = self.update(self.model, self.optimizer, self.read(), rate)
            self.losses.append(loss)

    def branch(self, steps: int) -> NalandaForCausalLM:
        """A copy of the model after a linear cooldown over the next `steps` steps; the trunk stays."""
        model = copy.deepcopy(self.model)
        optimizer = build_optimizer(model, self.optim)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

        # The trunk reads these batches again.
        ahead = [self.read() for _ in range(steps)]
        self.batches = itertools.chain(itertools.chain.from_iterable(ahead), self.batches)

        for i, batches in enumerate(ahead):
            self.update(model, optimizer, batches, self.optim.lr * (1 - (i + 1) / steps))
        return model

    def update(
        self,
        model: NalandaForCausalLM,
        optimizer: torch.optim.Optimizer,
        batches: list[Batch],
        rate: float,
    ) -> Tensor:
        """Takes one optimizer step and returns the mean loss of its batches."""
        model.train()
        labels = max(1, sum(map(count_labels, batches)))
        total = torch.zeros((), device=model.device)
        for batch in batches:
            loss = summed_loss(model, batch, model.device, self.z_loss) / labels
            loss.backward()
            total += loss.detach()

        nn.utils.clip_grad_norm_(model.parameters(), self.optim.max_grad_norm)
        set_rates(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad()
        return total

    def curve(self, points: int = 20) -> list[list[float]]:
        """[tokens, mean loss of the steps since the last point], of the trunk."""
        ends = sorted({round(self.step * (i + 1) / points) for i in range(points)} - {0})
        curve = []
        for first, end in itertools.pairwise([0, *ends]):
            loss = torch.stack(self.losses[first:end]).mean().item()
            curve.append([end * self.tokens_per_step, round(loss, 4)])
        return curve

    def save(self, file: Path, done: list[dict], seconds: float) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "losses": self.losses,
            "done": done,
            "seconds": seconds,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def restore(self, file: Path) -> tuple[list[dict], float]:
        """The budgets that a killed run has finished, and its seconds."""
        if not file.is_file():
            return [], 0.0
        state = torch.load(file, weights_only=True, map_location=self.model.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]
        for _ in range(self.step):
            self.read()
        return state["done"], state["seconds"]


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


@torch.no_grad()
def losses_by_position(
    model: NalandaForCausalLM, tokens: Tensor, trained: int
) -> list[list[float]]:
    """[end, mean nats a token] of the positions up to each end: `trained`, 2·trained, 4·trained, … of T.

    tokens: `[rows, T]`, read without regard to where documents end.
    """
    model.eval()
    losses = []
    for row in tokens.to(model.device):
        logits = model(row[None], use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, row[1:], reduction="none").double())
    mean = torch.stack(losses).mean(0)  # [T − 1]

    by_position, first = [], 0
    end = trained
    while end <= tokens.shape[1]:
        by_position.append([end, round(mean[first : end - 1].mean().item(), 4)])
        first, end = end - 1, 2 * end
    return by_position


def cpu_model() -> str:
    """The processor's name."""
    file = Path("/proc/cpuinfo")
    line = re.search(r"model name\s*: (.*)", file.read_text()) if file.is_file() else None
    return line[1] if line else platform.processor() or platform.machine()
