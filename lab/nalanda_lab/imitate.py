"""Teaches heads of linear attention to imitate a softmax head whose sharpness is set by ‖q‖ alone.

The teacher attends to random keys with queries of uniform direction and log-uniform length. A student has learnt
projections of queries and keys, a feature map and a readout. Its score on fresh data says how much of the
teacher the map can express. The seeds are heads of one batch, each with data and weights of its own.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from nalanda.common.versions import list_versions, versions
from nalanda.model import FEATURE_MAPS, build_feature_map
from nalanda.model.feature_maps import EPS
from nalanda.model.layers import direction
from nalanda_lab.track import figures_file, plain_table, track

READOUTS = {"denominator 24": 24, "denominator 64": 64, "delta rule 24": 24}
"""Name to the number of keys."""
CONSTANTS = {"nala, p = 1.74": 1.74, "nala, p = 3": 3.0}
"""NaLa with one exponent for all queries: its mean in untrained models, and its limit for long queries."""
NORMS = (0.5, 8.0)
SEEDS, RATE, WARMUP = 3, 0.02, 50


def draw(generators: list[torch.Generator], rows: int, queries: int, keys: int, width: int):
    """q, k, v and the teacher's outputs, `[rows, seeds, queries or keys, width]` each."""

    def normal(*shape: int) -> Tensor:
        return torch.stack([torch.randn(*shape, generator=each) for each in generators], 1)

    shares = torch.stack([torch.rand(rows, queries, 1, generator=each) for each in generators], 1)
    norms = NORMS[0] * (NORMS[1] / NORMS[0]) ** shares
    q = norms * F.normalize(normal(rows, queries, width), dim=-1)
    k, v = normal(rows, keys, width), normal(rows, keys, width)
    return q, k, v, (q @ k.mT).softmax(-1) @ v


class Student(nn.Module):
    """Heads `[seeds]` that read v by a map's features; the map `softmax` is the ceiling."""

    def __init__(self, name: str, readout: str, width: int, generators: list[torch.Generator]):
        super().__init__()
        self.readout, seeds = readout, len(generators)
        both = torch.stack([torch.randn(2, width, width, generator=g) for g in generators], 1)
        self.q_weight, self.k_weight = (nn.Parameter(each / math.sqrt(width)) for each in both)
        self.gain = nn.Parameter(torch.ones(seeds, 1, 1))
        self.step = nn.Parameter(torch.zeros(seeds, 1, 1))  # β = σ(step) of the delta rule

        self.map: Any = None
        if name != "softmax":
            options = {"query_power": CONSTANTS[name]} if name in CONSTANTS else {}
            kind = "nala" if options else name
            feature_map: Any = build_feature_map(kind, num_heads=seeds, head_dim=width, **options)
            if feature_map.state_dict():
                feature_map.load_state_dict(feature_map.initial())
            self.map = feature_map

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q @ self.q_weight, k @ self.k_weight
        if self.map is None:
            return self.gain * ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v)

        # Maps take [rows, T, seeds, width].
        q, k = (x.transpose(1, 2) for x in self.map(q.transpose(1, 2), k.transpose(1, 2)))
        if self.readout.startswith("denominator"):
            weights = q @ k.mT  # [rows, seeds, queries, keys]
            total = weights.sum(-1, keepdim=True) + EPS * k.shape[-2]
            return self.gain * (weights / total @ v)

        # The state behind all keys: S = Σ k uᵀ with (I + β tril(K Kᵀ, −1)) U = β V.
        q, k, beta = direction(q, EPS)[0], direction(k, EPS)[0], self.step.sigmoid()
        triangle = beta * (k @ k.mT).tril(-1)
        u = torch.linalg.solve_triangular(triangle, beta * v, upper=False, unitriangular=True)
        return self.gain * (q @ (k.mT @ u))

    def score(self, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Tensor:
        """The explained share of the variance, `[seeds]`; the delta rule's norm leaves the mean cosine."""
        o = self(q, k, v)
        if self.readout.startswith("delta"):
            return F.cosine_similarity(o, target, dim=-1).mean((0, 2))
        return 1 - (o - target).square().mean((0, 2, 3)) / target.square().mean((0, 2, 3))


def imitate_once(
    name: str, readout: str, *, steps: int, width: int, rows: int = 8, queries: int = 32
) -> list[float]:
    """Trains a student of the map `name`; returns its score on fresh data, by seed."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(SEEDS)]
    student = Student(name, readout, width, generators)
    optimizer = torch.optim.Adam(student.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / WARMUP) * (1 - i / steps)
    )

    # The same data for all maps.
    generators = [torch.Generator().manual_seed(100 + seed) for seed in range(SEEDS)]
    for _ in range(steps):
        loss = -student.score(*draw(generators, rows, queries, READOUTS[readout], width)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    fresh = [torch.Generator().manual_seed(1000 + seed) for seed in range(SEEDS)]
    with torch.no_grad():
        return student.score(*draw(fresh, 16 * rows, queries, READOUTS[readout], width)).tolist()


def serves(name: str, readout: str) -> bool:
    """Whether the readout can have the map: a denominator needs products of one sign."""
    if name in CONSTANTS or name == "softmax" or readout.startswith("delta"):
        return True
    return build_feature_map(name, num_heads=1, head_dim=4).nonnegative


def imitate(
    *, steps: int = 600, width: int = 32, json: str | Path | None = None
) -> dict[str, dict[str, list[float]]]:
    """Prints how well each map imitates the teacher; returns a score a seed, by readout and map."""
    write, begin = figures_file(json), time.time()
    names = ["softmax", *CONSTANTS, *FEATURE_MAPS]
    pairs = [(readout, name) for readout in READOUTS for name in names if serves(name, readout)]
    found: dict[str, dict[str, list[float]]] = {readout: {} for readout in READOUTS}
    for readout, name in track(pairs, "imitating"):
        found[readout][name] = imitate_once(name, readout, steps=steps, width=width)

    console = Console(emoji=False)
    means = {r: {name: sum(each) / SEEDS for name, each in found[r].items()} for r in READOUTS}
    lines = [[f"{means[r][n]:.3f}" if n in means[r] else "–" for r in READOUTS] for n in names]
    rows = [[name, *line] for name, line in zip(names, lines, strict=True)]
    console.print(plain_table(["map", *READOUTS], rows), markup=False)
    for readout, name in ((r, n) for r in READOUTS for n in CONSTANTS):
        pair = zip(found[readout]["nala"], found[readout][name], strict=True)
        gaps = ", ".join(f"{ours - theirs:+.4f}" for ours, theirs in pair)
        console.print(f"{readout}: nala less {name.removeprefix('nala, ')}: {gaps}")

    facts = f"{steps} steps, width {width}, {time.time() - begin:.0f} s"
    console.print(f"{facts}; {list_versions([versions()])}", soft_wrap=True)
    write(found)
    return found
