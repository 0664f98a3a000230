"""Predicts step time, memory and traffic of a recipe on many devices, from the model's own counts.

Devices compute at a fixed share of their peak. An exchange takes its bytes over the bandwidth, and a latency
a message. `docs/scale.md` states the assumptions, and compares predictions with measurements.
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from nalanda.common.errors import InputError
from nalanda.common.text import duration, suggest
from nalanda.model import NalandaConfig
from nalanda.model.context import SCAN_FROM
from nalanda.model.delta import DeltaNet
from nalanda.model.ops import delta_rule_flops
from nalanda.report.info import describe_recipe
from nalanda.report.runs import narrowed, stdout
from nalanda.train import parallel
from nalanda.train.estimate import activation_bytes, logits_bytes
from nalanda.train.flops import DTYPES
from nalanda.train.needs import held_bytes, teacher_bytes

USABLE = 0.9
"""Share of a device's memory that tensors may take; the rest is the context's, the collectives' and lost."""
UPDATE = 28
"""Bytes that AdamW reads and writes a parameter."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices and their links. The defaults are nodes of eight H100."""

    devices: int
    node: int = 8
    """Devices of a node."""
    peak: float = 989
    """TFLOP/s of a device."""
    mfu: float = 0.4
    """Share of `peak` at which a device computes. A high one makes exchanges harder to hide."""
    memory: float = 80
    """GB of a device."""
    hbm: float = 3350
    """GB/s of a device's memory, for the optimizer."""
    nvlink: float = 450
    """GB/s that a device sends to others of its node."""
    network: float = 400
    """Gb/s that a node sends to others; its devices share them."""
    latency: float = 5
    """µs of a message between two devices."""
    overlap: float = 1.0
    """Share of a pass behind which exchanges of weights and gradients hide."""

    def seconds(self, flops: float) -> float:
        return flops / (self.mfu * self.peak * 1e12)

    def send(
        self, count: float, hops: int, reach: int, crossing: int = 1, messages: float = 1
    ) -> np.ndarray:
        """`hops` times, each device of a group sends `count` bytes to a next one, in so many messages.

        reach: devices that the group spans; crossing: devices of a node that send to other nodes at once.
        Returns (seconds, bytes that a device sends, bytes that a node sends to others).
        """
        inside = reach <= self.node
        shared = self.network * 1e9 / 8 / crossing
        speed = self.nvlink * 1e9 if inside else min(self.nvlink * 1e9, shared)
        seconds = count / speed + messages * self.latency * 1e-6
        return hops * np.array([seconds, count, 0 if inside else crossing * count])

    def gather(self, count: float, size: int, stride: int = 1, messages: float = 1) -> np.ndarray:
        """`send` of a ring's all-gather of `count` bytes, each of `size` devices having a part of them.

        A reduce-scatter takes the same, an all-reduce is both. stride: the distance of the devices.
        """
        crossing = min(self.node, stride)
        return self.send(count / size, size - 1, size * stride, crossing, messages)


@dataclass(frozen=True)
class Counts:
    """Counts of a recipe: FLOPs of the forward pass, and bytes that it keeps and exchanges."""

    seq_len: int
    steps: int
    rows: int
    """Rows of a step."""
    micro: int
    """Most rows of a micro-batch."""
    parameters: int
    matrices: int
    """Parameters of the blocks' Linear layers."""
    wire: int
    """Bytes of a matrix's entry that FSDP2 gathers."""
    layers: int
    hidden_size: int
    flops: float
    """Of a token."""
    held: Callable[[int, int, bool], int]
    """(processes, shards, whether micro-batches accumulate) to bytes of weights, gradients and moments of a
    device."""
    kept: Callable[[float, bool], float]
    """(tokens, whether blocks are recomputed) to bytes of activations."""
    recompute: bool = False
    """Whether the recipe asks for recomputation; otherwise it is taken where nothing else fits."""
    # Of rows that are cut over processes, see `model/context.py`; sums over layers:
    attention: float = 0.0
    """FLOPs of a token that grow with seq_len, a part of `flops`."""
    growing: float = 0.0
    """Number of these layers."""
    passing: float = 0.0
    """More FLOPs of a token in a part through which the state passes."""
    transitions: float = 0.0
    """Bytes of M, of a row."""
    states: float = 0.0
    """Bytes of U, of a row."""
    halos: float = 0.0
    """Bytes of what short convolutions and windows read of the part before, of a row."""
    keys: float = 0.0
    """Bytes of a token's keys and values in layers that attend to all tokens."""
    state_messages: float = 0.0
    halo_messages: float = 0.0
    key_messages: float = 0.0


@dataclass(frozen=True)
class Split:
    kind: parallel.Kind = "ddp"
    context: int = 1
    """Processes that share a row."""
    micro: int = 1
    """Rows of a micro-batch."""
    recompute: bool = False

    def __str__(self) -> str:
        name = {"ddp": "DDP", "fsdp": "FSDP2", "hybrid": "hybrid"}[self.kind]
        return name + (f" × context {self.context}" if self.context > 1 else "")


@dataclass(frozen=True)
class Cost:
    split: Split
    devices: int
    accumulation: int
    memory: float
    """Bytes of a device."""
    fits: bool
    compute: float
    """Seconds of the slowest device, with recomputation and second passes."""
    step: float
    """Seconds."""
    idle: float
    """Share of the step in which a device waits, the mean over devices."""
    sent: float
    """Bytes that a device sends in a step."""
    crossing: float
    """Bytes that a node sends to others in a step."""
    mfu: float
    """The model's FLOPs in a step's time, as a share of the peak."""


def count(recipe: str, overrides: list[str]) -> Counts:
    """The counts of a recipe. Raises InputError for one that cannot be trained, or is no Nalanda model."""
    config, model = describe_recipe(recipe, overrides)
    c: Any = model.config
    if not isinstance(c, NalandaConfig):
        raise InputError(
            f"--devices: counts Nalanda's own models only; {recipe} has a {c.model_type}"
        )
    train, T = config.train, config.data.seq_len
    dtype = DTYPES[train.precision]
    blocks = parallel.units(model)
    measured: dict[bool, tuple[float, float]] = {}

    def kept(tokens: float, recompute: bool) -> float:
        if recompute not in measured:  # bytes are linear in the tokens, but for the logits
            one, two = (
                activation_bytes(c, 1, n, dtype, recompute, device="cuda") - logits_bytes(c, n)
                for n in (2048, 4096)
            )
            measured[recompute] = (2 * one - two, (two - one) / 2048)
        fixed, each = measured[recompute]
        return fixed + each * tokens + logits_bytes(c, int(tokens))

    costs = {
        name: _cut_costs(mixer, T, dtype.itemsize) for name, mixer in c.distinct_mixers().items()
    }
    sums = sum((costs[name] for name in c.layer_mixers), Counter())
    linears = [linear for block in blocks for linear in parallel.linears(block)]
    teacher = teacher_bytes(config.distill)
    return Counts(
        seq_len=T,
        steps=train.steps,
        rows=train.tokens_per_step // T,
        micro=train.micro_batch_size,
        parameters=sum(p.numel() for p in model.parameters()),
        matrices=sum(p.numel() for linear in linears for p in linear.parameters()),
        wire=dtype.itemsize,
        layers=len(blocks),
        hidden_size=c.hidden_size,
        flops=c.flops_per_token(T),
        held=lambda processes, shards, more: (
            held_bytes(model, config, processes, shards, more) + teacher
        ),
        kept=kept,
        recompute=train.gradient_checkpointing,
        **sums,
    )


def _cut_costs(mixer: Any, T: int, itemsize: int) -> Counter:
    """The summands of a layer in the sums of `Counts`."""
    costs: Counter = Counter()
    longer = mixer.state_spec(2 * T)
    for name, (shape, dtype) in mixer.state_spec(T).items():
        entries = math.prod(shape)
        if longer[name][0] != shape:  # keys or values of all tokens
            costs.update(keys=itemsize * entries // T, key_messages=1)
        elif dtype is None:
            costs.update(halos=itemsize * entries)
            costs["halo_messages"] = 1
        else:
            HV, F, V = shape
            is_delta = isinstance(mixer, DeltaNet)
            reading = 2.0 * HV * F * V  # of the state that arrives
            if is_delta:
                reading += delta_rule_flops(HV, F, F, channels=mixer.rule.decay == "channel")
            costs["state_messages"] += 1
            costs["states"] += 4 * HV * F * V
            costs["transitions"] += 4 * HV * F * (F if is_delta else 1)
            costs["passing"] += mixer.rule.steps * reading  # pyrefly: ignore[unsupported-operation]
    if costs["keys"]:
        costs.update(growing=1, attention=mixer.flops(2 * T) - mixer.flops(T))
    return costs


def predict(counts: Counts, cluster: Cluster, split: Split) -> Cost:
    """The cost of a step. Raises ValueError if the rows of a step do not fill the processes."""
    c, C, N = counts, split.context, cluster.devices
    if N % C or c.seq_len % C or c.rows % (N // C * split.micro):
        raise ValueError(
            f"{c.rows} rows of {c.seq_len} tokens do not fill {N} processes by {split}"
        )
    passes = 4 if split.recompute else 3
    accumulation = c.rows // (N // C * split.micro)
    tokens = split.micro * c.seq_len // C

    # FLOPs of a token in each part. The first part passes no state on; the last one waits for its state.
    more = [0.0, *[c.passing] * (C - 2), 0.0][:C]
    share = [(2 * r + 1) / C for r in range(C)]  # a part's queries see all keys of the parts before
    fixed = c.flops - c.attention
    parts = [fixed + m + s * c.attention for m, s in zip(more, share, strict=True)]
    # Parts meet in each layer, so the slowest of each kind of layer counts.
    slowest = fixed + max(more) + max(share) * c.attention

    micro = cluster.seconds(passes * tokens * slowest)
    shards = {"ddp": 1, "fsdp": N, "hybrid": min(N, cluster.node)}[split.kind]
    update = UPDATE * c.parameters / shards / (cluster.hbm * 1e9)
    weights, exposed = _weights(c, cluster, shards, accumulation, micro / passes, passes)
    rows = _context(c, cluster, split) * ((passes - 1) * accumulation)
    step = accumulation * micro + exposed + rows[0] + update
    busy = accumulation * cluster.seconds(passes * tokens * sum(parts) / C) + update

    memory = c.held(N, shards, accumulation > 1) + c.kept(tokens, split.recompute)
    if C > 1 and c.growing:
        layers = c.growing if split.recompute else 1
        memory += c.keys / layers * (split.micro * c.seq_len - tokens)

    _, sent, crossing = weights + rows
    model = 3 * c.flops * c.rows * c.seq_len
    return Cost(
        split=split,
        devices=N,
        accumulation=accumulation,
        memory=memory,
        fits=memory <= USABLE * cluster.memory * 1e9,
        compute=accumulation * micro,
        step=step,
        idle=1 - busy / step,
        sent=float(sent),
        crossing=float(crossing),
        mfu=model / (step * N * cluster.peak * 1e12),
    )


def _weights(
    c: Counts, cluster: Cluster, shards: int, accumulation: int, forward: float, passes: int
) -> tuple[np.ndarray, float]:
    """A step's exchanges of weights and gradients, as `Cluster.send`, and the seconds that nothing hides.

    forward: seconds of a micro-batch's forward pass. DDP reduces gradients behind the last backward pass.
    FSDP2 gathers a block behind the computation of the one before; the root and the first block wait.
    """
    N, gradients = cluster.devices, 4 * c.parameters
    backward = (passes - 1) * forward * cluster.overlap
    if shards == 1:
        reduced = 2 * cluster.gather(gradients, N)
        return reduced, max(0.0, reduced[0] - backward)

    root = cluster.gather(4 * (c.parameters - c.matrices), shards)
    blocks = cluster.gather(c.wire * c.matrices, shards, messages=c.layers)
    reduced = cluster.gather(gradients, shards, messages=c.layers + 1)
    if shards < N:
        reduced += 2 * cluster.gather(gradients / shards, N // shards, shards, c.layers + 1)

    first = root[0] + blocks[0] / c.layers
    ahead = max(0.0, blocks[0] * (1 - 1 / c.layers) - forward * cluster.overlap)
    again = max(0.0, blocks[0] - backward)
    last = max(0.0, blocks[0] + reduced[0] - backward)
    exposed = accumulation * (first + ahead) + (accumulation - 1) * again + last
    return (root + 2 * blocks) * accumulation + reduced, exposed


def _context(c: Counts, cluster: Cluster, split: Split) -> np.ndarray:
    """The exchanges between the parts of a micro-batch in a pass, as `Cluster.send`; nothing hides them.

    The backward pass sends the same.
    """
    C, B = split.context, split.micro
    sent = cluster.gather(B * C * c.halos, C, messages=c.halo_messages)
    sent += cluster.gather(B * c.keys * c.seq_len, C, messages=c.key_messages)
    both = B * (c.transitions + c.states)  # M and U

    if 2 < C < SCAN_FROM:
        return sent + cluster.gather(C * both, C, messages=c.state_messages)
    if C > 2:
        for step in range(math.ceil(math.log2(C))):
            sent += cluster.send(
                both, 1, C, min(cluster.node, 2**step), messages=2 * c.state_messages
            )
    return sent + cluster.send(B * c.states, int(C > 1), C, messages=c.state_messages)


def plan(counts: Counts, cluster: Cluster) -> list[Cost]:
    """The fastest DDP, FSDP2 and hybrid that fit, and the fastest that cuts rows over processes.

    Where none fits, the one with least memory; nothing where the rows of a step do not fill the processes.
    """
    N = cluster.devices
    kinds: list[parallel.Kind] = ["ddp", "fsdp"]
    if cluster.node < N:
        kinds.append("hybrid")
    uncut = [[(kind, 1)] for kind in kinds] if N > 1 else [[("ddp", 1)]]
    cut = [(kind, 2**i) for kind in kinds for i in range(1, N.bit_length())]

    best = []
    for choices in (*uncut, cut):
        costs = []
        for kind, context in choices:
            for micro in range(counts.micro, 0, -1):  # of equals the first is taken
                for recompute in {counts.recompute, True}:
                    split = Split(kind, context, micro, recompute)
                    with contextlib.suppress(ValueError):
                        costs.append(predict(counts, cluster, split))
        fitting = [cost for cost in costs if cost.fits]
        if fitting:
            best.append(min(fitting, key=lambda cost: cost.step))
        elif costs:
            best.append(min(costs, key=lambda cost: cost.memory))
    return best


def tensor_parallelism(counts: Counts, cluster: Cluster) -> dict[str, float]:
    """Limits from which tensor parallelism over a node would pay; it is not built.

    activations: time of its all-reduces, as a share of that of the products. A block all-reduces 2·D bytes a
        token four times, and nothing hides it.
    tokens: of a device's micro-batch, behind which FSDP2 hides 2 + 2 + 4 bytes a parameter within a node. To
        other nodes both send the same.
    parameters: of the smallest model where so many tokens do not fit beside FSDP2's shards and three fp32
        copies of a block. It has 12·D² parameters a block, D = 128 a layer, and recomputes: a token keeps 2·D
        bytes a layer, and 34·D in one.
    """
    t, D = cluster.node, counts.hidden_size
    reduced = counts.layers * 4 * 2 * (t - 1) / t * 2 * D / (cluster.nvlink * 1e9)
    tokens = 8 / (cluster.nvlink * 1e9) / cluster.seconds(6)

    def needed(layers: int) -> float:
        width = 128 * layers
        block = 12 * width**2
        shards = 16 * layers * block / cluster.devices
        return shards + 12 * block + tokens * width * (2 * layers + 34)

    layers = next(n for n in itertools.count(1) if needed(n) > USABLE * cluster.memory * 1e9)
    share = reduced / cluster.seconds(3 * counts.flops / t)
    return {"activations": share, "tokens": tokens, "parameters": 12 * layers * (128 * layers) ** 2}


def clusters(devices: str, settings: str = "") -> list[Cluster]:
    """The clusters of `8,64,512` and `network=3200,mfu=0.3`. Raises InputError for other text."""
    names = [field.name for field in fields(Cluster) if field.name != "devices"]
    values: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        name, _, value = setting.partition("=")
        if name not in names:
            raise InputError(f"--cluster: no setting {name!r}{suggest(name, names)}")
        try:
            values[name] = int(value) if name == "node" else float(value)
        except ValueError:
            values[name] = -1
        least = 0 if name in ("latency", "overlap") else 1e-9
        share = name in ("mfu", "overlap")
        if not least <= values[name] <= (1 if share else 1e99):
            wanted = "a share from 0 to 1" if share else "a positive number"
            raise InputError(f"--cluster: {setting!r}: expected {wanted}")

    parsed = []
    for number in devices.split(","):
        if not number.strip().isdecimal() or not int(number):
            raise InputError(
                f"--devices: {number!r} is no number of devices; give such as 8,64,512"
            )
        cluster = Cluster(int(number), **values)
        if cluster.devices > cluster.node and cluster.devices % cluster.node:
            raise InputError(f"--devices: {number} devices do not fill nodes of {cluster.node}")
        parsed.append(cluster)
    return parsed


def plan_rows(plans: dict[Cluster, list[Cost]]) -> list[dict[str, Any]]:
    """A row for each way on each cluster."""
    return [
        {"devices": each.devices, **asdict(cost)} for each, costs in plans.items() for cost in costs
    ]


def fastest(costs: list[Cost]) -> Cost | None:
    return min((cost for cost in costs if cost.fits), key=lambda cost: cost.step, default=None)


def print_plan(
    counts: Counts, plans: dict[Cluster, list[Cost]], console: Console | None = None
) -> None:
    """Prints the costs on each cluster as a table, the fastest of those that fit in bold."""
    console = console or stdout()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    columns = (
        "devices",
        "split",
        "batches",
        "GB",
        "step, s",
        "idle, %",
        "sent, GB",
        "crossing",
        "MFU, %",
    )
    for head in columns:
        table.add_column(head, justify="left" if head == "split" else "right", no_wrap=True)
    for cluster, costs in plans.items():
        best = fastest(costs)
        if not costs:
            table.add_row(str(cluster.devices), "none", end_section=True)
        for cost in costs:
            split = cost.split
            table.add_row(
                str(cluster.devices),
                f"{split} ← best" if cost is best else str(split),
                f"{cost.accumulation} × {split.micro}{' *' if split.recompute else ''}",
                f"{cost.memory / 1e9:,.1f}{'' if cost.fits else ' ✗'}",
                f"{cost.step:.3g}",
                f"{100 * cost.idle:.1f}",
                f"{cost.sent / 1e9:,.3g}",
                f"{cost.crossing / 1e9:,.3g}",
                f"{100 * cost.mfu:.1f}",
                style="bold" if cost is best else "" if cost.fits else "dim",
                end_section=cost is costs[-1],
            )
    console.print(narrowed(table, console, ("crossing", "sent, GB", "idle, %")))
    note = "* recomputed; ✗ does not fit; splits that the step's rows do not fill are left out"
    console.print(note, style="dim")
    for cluster, costs in plans.items():
        t = tensor_parallelism(counts, cluster)
        best = fastest(costs)
        outcome = f"take {duration(counts.steps * best.step)}" if best else "do not fit"
        console.print(
            f"{cluster.devices} devices: {counts.steps:,} steps {outcome}; tensor parallelism (not built) "
            f"would help only above {t['parameters'] / 1e9:,.0f} B parameters; here it would communicate for "
            f"{t['activations']:.2f} s per second of computing",
            soft_wrap=True,
        )
