"""`make gpu-check`: every check that needs a GPU, in parts that can run on different days.

    python kernels/gpu_check.py [kernels] [bench] [train]    (default: all three, one after another)

kernels: every kernel test, compiled instead of interpreted.
bench: times of the ops, beside flash-linear-attention's kernels, FlashAttention and the card's limits; times
    of decoding.
train: every 340 M recipe beside flash-linear-attention's model of its shape; Triton's losses beside torch's.

A part stops within `--minutes`, lists the cases that it did not reach, and starts with them next time. Each
figure is written at once to results.json and RESULTS.md beside this file. Without a GPU the exit code is 2.
"""

import argparse
import contextlib
import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / "src"), str(ROOT / "kernels")]
sys.path[:0] = PATHS  # the package may not be installed on a GPU machine

PARTS = ("kernels", "bench", "train")
LENGTHS = (2048, 8192)
TOKENS = 16384  # of a call and of a training step, at every length
RECIPES = (  # those with targets first
    "nala_gated_deltanet", "gated_deltanet", "deltanet", "nala_deltanet", "transformer", "gla", "retnet",
    "nala", "linear_attention", "mala", "pola", "soft", "mamba",
)  # fmt: skip
NOT_MEASURED = "not measured"

Values = dict[str, Any]


@dataclass
class Case:
    """A row of a table: `run` measures its columns.

    targets: the least value that a column should reach. seconds: time limit; to exceed it is an error.
    """

    group: str
    name: str
    run: Callable[["Card"], Values]
    targets: dict[str, float] = field(default_factory=dict)
    seconds: float = 300.0


TIMES = {
    "forward": "forward ms", "peer_forward": "peer", "both": "forward + backward ms", "peer_both": "peer",
    "ratio": "peer / ours", "floor": "floor ms", "of_floor": "floor / ours", "difference": "difference",
}  # fmt: skip
COLUMNS = {  # table → key → heading
    "Tests, compiled": {"passed": "passed", "failed": "failed", "skipped": "skipped", "names": "failing"},
    "Ceilings": {"value": "measured"},
    "Recurrences": TIMES | {
        "peer_fused": "peer, one kernel", "fed_torch": "peer, maps in torch", "peer_silu": "peer's SiLU job",
        "flash_attention": "FlashAttention",
    },
    "Other kernels": TIMES,
    "Decoding": {
        "tokens_per_second": "tokens/s", "limit": "weight-reading limit", "share": "share",
        "graphed": "as a CUDA graph", "graphed_share": "share", "limit_with_states": "limit, states too",
    },
    "Training": {
        "parameters": "parameters", "tokens_per_second": "tokens/s", "mfu": "MFU", "memory": "peak GiB",
        "peer": "fla's model", "peer_memory": "peak GiB", "ratio": "ours / it", "fed": "fla's kernels, fed",
        "fed_ratio": "ours / them", "fallbacks": "not by Triton",
    },
    "Loss curves": {
        "steps": "steps", "torch": "torch's last", "triton": "Triton's", "difference": "largest difference",
    },
}  # fmt: skip
PERCENT = ("share", "graphed_share", "of_floor", "mfu")
TARGETS = {  # key → name in the table of targets
    "ratio": "peer / ours",
    "mfu": "MFU",
    "share": "share of the weight-reading limit",
    "fed_ratio": "ours / fla's kernels fed with NaLa's features",
}


# ----------------------------------------------------------------------------------------- the card, and time


class OutOfTime(BaseException):
    """Not an Exception, so that no library on the stack catches it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Card:
    """The device of measurements. dry: on a CPU, at tiny shapes, with torch in place of every kernel."""

    device: str = "cuda"
    dry: bool = False
    seconds: float = 540.0  # left for the current case
    tests: Path = ROOT / "tests"

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def lengths(self) -> tuple[int, ...]:
        return (32,) if self.dry else LENGTHS

    def kernel(self, op: str, backend: str = "triton") -> Callable:
        """The implementation itself: no other backend can serve in its place, so it raises `Unsupported`."""
        from nalanda_kernels import KERNELS

        return TORCH[op] if self.dry else KERNELS[op][backend].load()

    def clock(self, function: Callable, inputs: list[tuple], calls: int) -> list[float]:
        """Milliseconds of each call. Calls rotate through the inputs, so that caches do not hold them."""
        if self.dry:
            times = []
            for i in range(calls):
                start = time.perf_counter()
                function(*inputs[i % len(inputs)])
                times.append(1e3 * (time.perf_counter() - start))
            return times
        torch.cuda._sleep(40_000_000)  # 20 ms for the host to run ahead, so that launches cost no time
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for i, (start, end) in enumerate(events):
            start.record()
            function(*inputs[i % len(inputs)])
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def times(self, sides: dict[str, Callable], inputs: list[tuple]) -> tuple[Values, Values]:
        """Median milliseconds of each side, and the errors of sides that failed; sides take turns."""
        sides, failed = dict(sides), {}
        for name, function in list(sides.items()):
            try:
                for _ in range(1 if self.dry else 3):  # compiles, and autotunes the peer
                    function(*inputs[0])
            except Exception as error:
                failed[name] = in_a_line(error)
                del sides[name]
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 if self.dry else 3):
            for name, function in sides.items():
                taken[name] += self.clock(function, inputs, 1 if self.dry else 10)
        return {name: statistics.median(x) for name, x in taken.items()}, failed

    def sets(self, make: Callable[[int], tuple]) -> list[tuple]:
        """Input sets, together four times the last-level cache."""
        first = make(0)
        if self.dry:
            return [first]
        cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        size = sum(x.nbytes for x in first if isinstance(x, Tensor))
        return [first, *(make(i) for i in range(1, max(2, min(8, math.ceil(4 * cache_bytes / size)))))]

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy, read and written."""
        x = torch.randn(2**10 if self.dry else 2**29, device=self.device)
        y = torch.empty_like(x)
        taken = self.times({"copy": lambda: y.copy_(x)}, [()])[0]["copy"]
        return 2 * x.nbytes / taken * 1e3

    @cached_property
    def rate(self) -> float:
        """FLOPs per second of a large bf16 product of random matrices."""
        n = 64 if self.dry else 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * n**3 / self.times({"product": lambda: a @ b}, [()])[0]["product"] * 1e3

    def floor(self, bytes_moved: float, flops: float) -> float:
        """Approximate lower bound of any implementation, in milliseconds."""
        return 1e3 * max(bytes_moved / self.bandwidth, flops / self.rate)


def in_a_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


# ---------------------------------------------------------------------------------------------- part: kernels


def kernel_cases(card: Card) -> list[Case]:
    files = sorted(card.tests.rglob("test_kernels_*.py"))
    return [Case("Tests, compiled", x.stem[13:], partial(run_tests, x), seconds=500.0) for x in files]


def run_tests(file: Path, card: Card) -> Values:
    """One file's tests on the card, in another process: a process cannot leave the interpreter."""
    if "kernel_device" not in file.read_text():
        raise RuntimeError(f"{file.name}: it runs only in the interpreter; import kernel_device")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", str(file), "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist") and not card.dry:
            command += ["-n", str(min(8, os.cpu_count() or 1))]  # compilation takes most of the time
        said = python(command, card, NALANDA_TEST_DEVICE=card.device)[1]
        if not report.exists():
            raise RuntimeError(said)
        return count_tests(report)


def python(arguments: list[str], card: Card, **variables: str) -> tuple[int, str]:
    """Runs this Python in the repository's root. Returns its exit code and its last line of output."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NALANDA_BACKEND")}
    path = os.pathsep.join([*PATHS, *filter(None, [kept.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *arguments],
        env=kept | {"PYTHONPATH": path} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=card.seconds,
    )
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return done.returncode, lines[-1] if lines else ""


def count_tests(report: Path) -> Values:
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [x for x in tests if x.find("failure") is not None or x.find("error") is not None]
    skipped = [x for x in tests if x.find("skipped") is not None]
    return {
        "passed": len(tests) - len(bad) - len(skipped),
        "failed": len(bad),
        "skipped": len(skipped),
        "names": ", ".join(x.get("name", "?") for x in bad[:5]) + (" …" if len(bad) > 5 else "") or None,
    }


# ------------------------------------------------------------------------------------------------ part: bench


def torch_recurrence(q, k, v, beta, g, **options: Any) -> tuple[Tensor, Tensor | None]:
    from nalanda import ops

    if beta is None:
        return ops.linear_attention(q, k, v, g, **options, backend="torch")
    return ops.delta_rule(q, k, v, beta, g, **options, backend="torch")


def torch_map(q: Tensor, k: Tensor, feature_map=None, qk_norm: str | None = None) -> tuple[Tensor, Tensor]:
    """The map's own code, without recomputation in the backward."""
    q_, k_ = q.float(), k.float()
    if feature_map is not None:
        q_, k_ = feature_map(q_, k_)
    if qk_norm == "l2":
        q_, k_ = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q_, k_))
    return q_.to(q.dtype), k_.to(k.dtype)


def torch_conv(x: Tensor, weight: Tensor, *, activation: str | None = None) -> tuple[Tensor, None]:
    y = F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], groups=len(weight)).mT
    return F.silu(y) if activation else y, None


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, *, block_size: int) -> Tensor:
    """FlashAttention, if torch has it, with blocks as batch rows; T must be a multiple of block_size."""
    rows = [x.unflatten(1, (-1, block_size)).flatten(0, 1).transpose(1, 2) for x in (q, k, v)]
    return causal_attention(*rows).transpose(1, 2).reshape(v.shape)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


TORCH: dict[str, Callable] = {
    "delta_rule": torch_recurrence,
    "linear_attention": lambda q, k, v, g, **options: torch_recurrence(q, k, v, None, g, **options),
    "map_features": torch_map,
    "short_conv": torch_conv,
    "block_attention": blockwise_attention,
}


def lift_guard() -> str | None:
    """Lets the peer run where it refuses, to time it; its results there are wrong (its issue 640).

    Returns a note for readers of the figures, or None.
    """
    try:
        chunk_o: Any = importlib.import_module("fla.ops.common.chunk_o")
    except Exception as error:
        return f"no flash-linear-attention: {in_a_line(error)}"
    if getattr(chunk_o, "IS_NVIDIA_HOPPER", False) and not getattr(chunk_o, "TRITON_ABOVE_3_7_1", True):
        chunk_o.TRITON_ABOVE_3_7_1 = True
        return "fla refuses its gated backward under this Triton: timed with that check lifted"
    return None


def draw(
    card: Card, seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    generator = torch.Generator(card.device).manual_seed(seed)
    return [
        torch.randn(s, generator=generator, device=card.device).to(dtype).requires_grad_() for s in shapes
    ]


def compare(card: Card, sides: dict[str, Callable], inputs: list[tuple], flops: float) -> Values:
    """Times of forward, and of forward plus backward, of functions from inputs to one or more tensors.

    `ratio` compares `ours` with the faster of `peer` and `peer_fused`. Inputs may require gradients.
    flops: of the forward.
    """
    found, errors = {}, {}
    for name, function in sides.items():
        try:
            found[name] = outputs(function, inputs[0])
        except Exception as error:
            errors[name] = in_a_line(error)
    if not found:
        return {"errors": errors}
    sides, first = {name: sides[name] for name in found}, next(iter(found.values()))
    values: Values = {}
    if {"ours", "peer"} <= found.keys():
        values["difference"] = max(map(difference, found["ours"], found["peer"]))
    d_o = [torch.randn_like(x) for x in first]
    read, written = (sum(x.nbytes for x in xs if x is not None) for xs in (inputs[0], first))
    del found, first

    def forward(function: Callable, *x: Any) -> None:
        with torch.no_grad():
            function(*x)

    def both(function: Callable, *x: Any) -> None:
        o = function(*x)
        leaves = [t for t in x if t is not None and t.requires_grad]
        torch.autograd.grad(o, leaves, d_o if isinstance(o, tuple) else d_o[0], allow_unused=True)

    fast, failed = card.times({n: partial(forward, f) for n, f in sides.items()}, inputs)
    slow, failed_both = card.times({n: partial(both, f) for n, f in sides.items()}, inputs)
    floor = card.floor(read + written, flops) + card.floor(2 * read + written, 2 * flops)
    values |= {"forward": fast.get("ours"), "both": slow.get("ours"), "floor": floor}
    values |= {"peer_forward": fast.get("peer"), "peer_both": slow.get("peer")}
    values |= {name: ms for name, ms in slow.items() if name not in ("ours", "peer")}
    if "ours" in slow:
        values["of_floor"] = floor / slow["ours"]
        rivals = [slow[name] for name in ("peer", "peer_fused") if name in slow]
        values |= {"ratio": min(rivals) / slow["ours"]} if rivals else {}
    errors |= {f"{name}, forward": error for name, error in failed.items()}
    errors |= {f"{name}, backward": error for name, error in failed_both.items()}
    return values | ({"errors": errors} if errors else {})


@torch.no_grad()
def outputs(function: Callable, inputs: tuple) -> tuple[Tensor, ...]:
    o = function(*inputs)
    return o if isinstance(o, tuple) else (o,)


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def recurrence(
    card: Card, *, T: int, H: int, K: int, V: int, kind: str, feature_map: str | None = None
) -> Values:
    """Our op with map and norm inside, beside flash-linear-attention after separate passes for both.

    kind: delta, gated_delta, linear, gated_linear or vector_linear. Delta rules normalise q and k.
    """
    from nalanda import ops
    from nalanda.model.feature_maps import build_feature_map

    if card.dry:
        H, K, V = 1, 8, 8
    B, delta = max(1, (64 if card.dry else TOKENS) // T), kind.endswith("delta")
    norm = "l2" if delta else None
    phi = feature_map and build_feature_map(feature_map, num_heads=H, head_dim=K).to(card.device)
    channels = (K,) if kind == "vector_linear" else ()

    def make(seed: int) -> tuple:
        q, k, v, beta, g = draw(
            card, seed, *[(B, T, H, K)] * 2, (B, T, H, V), (B, T, H), (B, T, H, *channels)
        )
        beta = beta.detach().float().sigmoid().requires_grad_() if delta else None
        g = F.logsigmoid(g.detach().float() + 3).requires_grad_() if "_" in kind else None
        return q, k, v, beta, g

    def ours(q, k, v, beta, g) -> Tensor:
        rest = (beta, g) if delta else (g,)
        op = card.kernel("delta_rule" if delta else "linear_attention")
        return op(q, k, v, *rest, feature_map=phi, qk_norm=norm)[0]

    def theirs(q, k, v, beta, g, normed: bool = False, fused: bool = False) -> Tensor:
        if card.dry:
            return torch_recurrence(q, k, v, beta, g, qk_norm="l2" if normed else None)[0]
        if kind == "delta":
            return fla("delta_rule").chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=normed)[0]
        if kind == "gated_delta":
            rule = fla("gated_delta_rule").chunk_gated_delta_rule
            return rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=normed)[0]
        if kind == "vector_linear":
            return fla("gla").chunk_gla(q, k, v, g)[0]
        return getattr(fla("simple_gla"), f"{'fused_' * fused}chunk_simple_gla")(q, k, v, g)[0]

    def fed(map_features: Callable, q, k, *rest, **options: bool) -> Tensor:
        q, k = map_features(q, k, feature_map=phi, qk_norm=norm)
        return theirs(q, k, *rest, **options)

    ahead = partial(theirs, normed=delta) if phi is None else partial(fed, card.kernel("map_features"))
    sides: dict[str, Callable] = {"ours": ours, "peer": ahead}
    if kind in ("linear", "gated_linear"):
        sides["peer_fused"] = partial(ahead, fused=True)
    if phi is not None:
        sides["fed_torch"] = partial(fed, torch_map)
    if phi is not None and delta:
        sides["peer_silu"] = lambda q, k, *rest: theirs(F.silu(q), F.silu(k), *rest, normed=True)
    if phi is None and kind == "delta":
        sides["flash_attention"] = lambda q, k, v, *_: flash_attention(q, k, v)
    width = phi.feature_dim if phi else K
    flops = B * T * (ops.delta_rule_flops if delta else ops.linear_attention_flops)(H, width, V)
    return compare(card, sides, card.sets(make), flops)


def fla(name: str) -> Any:
    return importlib.import_module(f"fla.ops.{name}")


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def map_case(card: Card, *, T: int, name: str) -> Values:
    from nalanda.model.feature_maps import build_feature_map

    H, K = (1, 8) if card.dry else (8, 128)
    B = max(1, (64 if card.dry else TOKENS) // T)
    phi: Any = build_feature_map(name, num_heads=H, head_dim=K).to(card.device)
    if hasattr(phi, "initial"):
        with torch.no_grad():
            for key, value in phi.initial().items():
                getattr(phi, key).copy_(value)

    def both(map_features: Callable, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(map_features(q, k, feature_map=phi, qk_norm="l2"))

    sides = {"ours": partial(both, card.kernel("map_features")), "peer": partial(both, torch_map)}
    return compare(card, sides, card.sets(lambda i: tuple(draw(card, i, *[(B, T, H, K)] * 2))), 0.0)


def conv_case(card: Card, *, T: int) -> Values:
    D = 16 if card.dry else 1536  # v of the flagship: 6 heads of 256
    B = max(1, (64 if card.dry else TOKENS) // T)

    def peer(x: Tensor, weight: Tensor) -> Tensor:
        conv = torch_conv if card.dry else importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        return conv(x, weight, activation="silu")[0]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return card.kernel("short_conv")(x, weight, activation="silu")[0]

    sides = {"ours": ours, "peer": peer}
    return compare(card, sides, card.sets(lambda i: tuple(draw(card, i, (B, T, D), (D, 4)))), 8.0 * B * T * D)


def block_case(card: Card, *, T: int) -> Values:
    H, K, block = (1, 8, 16) if card.dry else (8, 128, 64)
    B = max(1, (64 if card.dry else TOKENS) // T)
    sides = {
        "ours": partial(card.kernel("block_attention"), block_size=block),
        "peer": partial(blockwise_attention, block_size=block),
    }
    flops = 2.0 * B * T * H * 2 * K * block / 2
    return compare(card, sides, card.sets(lambda i: tuple(draw(card, i, *[(B, T, H, K)] * 3))), flops)


@torch.no_grad()
def decode_case(card: Card, *, batch: int) -> Values:
    """The flagship in bf16: greedy decoding after a prompt of 64 tokens, with the calls of `generate`."""
    import nalanda_kernels

    with nalanda_kernels.use_backend("torch" if card.dry else "auto"):
        model, _ = build(card, "nala_gated_deltanet", 2048)
        model = model.to(torch.bfloat16).eval()
        prompt = torch.randint(0, model.config.vocab_size, (batch, 64), device=card.device)
        out = model(prompt, use_cache=True)

        def step() -> None:
            nonlocal out
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)

        values: Values = {"tokens_per_second": 1e3 * batch / wall(card, step)}
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)
        states = 2 * out.past_key_values.nbytes  # read and written
        values["limit"] = batch * card.bandwidth / weights
        values["limit_with_states"] = batch * card.bandwidth / (weights + states)
        values["share"] = values["tokens_per_second"] / values["limit"]
        if not card.dry:
            try:
                values["graphed"] = 1e3 * batch / wall(card, graphed(model, out))
                values["graphed_share"] = values["graphed"] / values["limit"]
            except Exception as error:
                values["errors"] = {"as a CUDA graph": in_a_line(error)}
    return values


def wall(card: Card, step: Callable[[], None]) -> float:
    """Milliseconds per call by the host's clock, over many calls, launches included."""
    for _ in range(1 if card.dry else 10):
        step()
    count, times = (2 if card.dry else 50), []
    for _ in range(3):
        card.wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        card.wait()
        times.append(1e3 * (time.perf_counter() - start) / count)
    return statistics.median(times)


def graphed(model: Any, out: Any) -> Callable[[], None]:
    """One decoding step as a CUDA graph that updates its states in place."""
    token, states = out.logits[:, -1:].argmax(-1), out.past_key_values
    old = [dict(layer) for layer in states.states]

    def step() -> None:
        states.states[:] = [dict(layer) for layer in old]
        logits = model(token, past_key_values=states, use_cache=True).logits
        for layer, kept in zip(states.states, old, strict=True):
            for name, x in kept.items():
                x.copy_(layer[name])
        token.copy_(logits[:, -1:].argmax(-1))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def bench_cases(card: Card) -> list[Case]:
    cases = [
        Case("Ceilings", "copy, GB/s read and written", lambda c: {"value": c.bandwidth / 1e9}),
        Case("Ceilings", "bf16 matrix product, TFLOP/s", lambda c: {"value": c.rate / 1e12}),
    ]
    flagship = {"H": 6, "K": 128, "V": 256, "feature_map": "nala"}
    plain = {"H": 8, "K": 128, "V": 128}
    jobs = (
        ("gated delta rule, K = V = 128", {"kind": "gated_delta", **plain}, {"ratio": 1.2}),
        ("delta rule, K = V = 128", {"kind": "delta", **plain}, {"ratio": 1.2}),
        ("gated delta rule, NaLa 128 → 256, V = 256", {"kind": "gated_delta", **flagship}, {}),
        ("delta rule, NaLa 128 → 256, V = 256", {"kind": "delta", **flagship}, {}),
        ("linear attention, K = V = 128", {"kind": "linear", **plain}, {}),
        ("linear attention, NaLa 128 → 256, V = 128", {"kind": "linear", **plain, "feature_map": "nala"}, {}),
        ("retention, K = V = 128", {"kind": "gated_linear", **plain}, {}),
        ("GLA, K = 128, V = 256", {"kind": "vector_linear", "H": 4, "K": 128, "V": 256}, {}),
    )
    for T in card.lengths():
        for name, options, targets in jobs:
            case = partial(recurrence, T=T, **options)
            cases.append(Case("Recurrences", f"{name}, T = {T}", case, targets))
    for batch in (1, 2) if card.dry else (1, 64):
        case, goal = partial(decode_case, batch=batch), {"share": 0.6} if batch == 1 else {}
        cases.append(Case("Decoding", f"NaLa + Gated DeltaNet, batch {batch}", case, goal))
    for T in card.lengths():
        others: dict[str, Callable[[Card], Values]] = {
            f"{name} and L2 norm, K = 128 (peer: torch)": partial(map_case, T=T, name=name)
            for name in ("nala", "pola", "silu")
        }
        others["convolution and SiLU, D = 1536"] = partial(conv_case, T=T)
        others["attention in blocks of 64 (peer: FlashAttention)"] = partial(block_case, T=T)
        cases += [Case("Other kernels", f"{name}, T = {T}", case) for name, case in others.items()]
    return cases


# ------------------------------------------------------------------------------------------------ part: train


def build(card: Card, recipe: str, T: int) -> tuple[Any, Any]:
    """A recipe's model with random weights in fp32, and the recipe."""
    from transformers import AutoModelForCausalLM

    from nalanda.config.load import load_config
    from nalanda.config.model import build_model_config

    overrides = [f"data.seq_len={T}", f"train.tokens_per_step={8 * T}"]
    if card.dry:
        sizes = ("hidden_size=32", "num_hidden_layers=1", "num_heads=2", "head_dim=16", "vocab_size=64")
        overrides += [f"model.{size}" for size in (*sizes, "intermediate_size=32")]
    config = load_config(ROOT / "recipes" / f"{recipe}_340m.yaml", overrides)
    torch.manual_seed(0)
    with torch.device(card.device):
        return AutoModelForCausalLM.from_config(build_model_config(config), dtype=torch.float32), config


def build_peer(recipe: str, T: int, device: str = "cuda") -> Any:
    """flash-linear-attention's model of the recipe's shape, with its own defaults; None if it has none."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "vocab_size": 32000}
    shape["max_position_embeddings"] = T
    rows: dict[str, tuple[str, dict]] = {
        "gated_deltanet": ("GatedDeltaNet", {"num_heads": 6, "head_dim": 128, "expand_v": 2}),
        "deltanet": ("DeltaNet", {"num_heads": 8, "expand_k": 1, "expand_v": 1}),
        "gla": ("GLA", {"num_heads": 4, "expand_k": 0.5, "expand_v": 1}),
        "retnet": ("RetNet", {"num_heads": 4, "expand_k": 1, "expand_v": 2, "intermediate_size": 1472}),
        "transformer": ("Transformer", {"num_heads": 16}),
        "mamba": ("Mamba", {"num_hidden_layers": 48, "state_size": 16, "expand": 2}),
    }
    rows |= {f"nala_{name}": rows[name] for name in ("gated_deltanet", "deltanet")}
    if recipe not in rows:
        return None
    name, own = rows[recipe]
    if name == "GatedDeltaNet":
        shape["num_hidden_layers"] = 21
    models = importlib.import_module("fla.models")
    if name == "Mamba":
        shape = {key: shape[key] for key in ("hidden_size", "vocab_size")}
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**shape | own))


def recurrences_by_fla() -> Any:
    """Our model with flash-linear-attention's chunk kernels; everything else, maps included, is ours."""
    from nalanda_kernels import KERNELS

    ops = ("delta_rule", "linear_attention")
    return mock.patch.dict(KERNELS, {op: {"triton": KERNELS[op]["fla"]} for op in ops})


def train_speed(card: Card, model: Any, config: Any, T: int, ours: bool) -> Values:
    """Training steps like the trainer's: bf16 autocast, packed rows, clipped gradients, AdamW."""
    from nalanda.train.flops import flops_per_token, peak_flops
    from nalanda.train.loss import summed_loss
    from nalanda.train.optim import build_optimizer

    device, rows = torch.device(card.device), max(1, (64 if card.dry else TOKENS) // T)
    optimizer, vocabulary = build_optimizer(model, config.optim), model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (rows, T), device=device)
    places = torch.arange(T, device=device).expand(rows, T)
    bounds = torch.arange(rows + 1) * T
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": places, "cu_seqlens": bounds}

    def step() -> None:
        with torch.autocast(card.device, torch.bfloat16):
            if ours:
                loss = summed_loss(model, batch, device) / tokens.numel()
            else:
                loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm).item()
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    for _ in range(1 if card.dry else 3):
        step()
    if not card.dry:
        torch.cuda.reset_peak_memory_stats()
    rate = 1e3 * tokens.numel() / statistics.median(card.clock(step, [()], 1 if card.dry else 6))
    values = {"parameters": sum(p.numel() for p in model.parameters()), "tokens_per_second": rate}
    if ours:
        values["mfu"] = rate * flops_per_token(model, T)[0] / peak_flops(device, "bf16")[0]
    return values | ({} if card.dry else {"memory": torch.cuda.max_memory_allocated() / 2**30})


def recipe_case(card: Card, *, recipe: str, T: int) -> Values:
    """Measures our model, ours on fla's kernels if the map is NaLa's, and fla's model, in turn."""
    import nalanda_kernels

    values: Values = {}
    errors: dict[str, str] = {}

    def attempt(name: str, make: Callable[[], Values | None]) -> Values:
        try:
            return make() or {}
        except Exception as error:
            errors[name] = in_a_line(error)
            return {}
        finally:
            release(card)

    def ours() -> Values:
        return train_speed(card, *build(card, recipe, T), T, True)

    def peer() -> Values | None:
        model = build_peer(recipe, T)
        if model is None:
            return None
        from nalanda.config.load import load_config

        return train_speed(card, model, load_config(ROOT / "recipes" / f"{recipe}_340m.yaml"), T, False)

    nalanda_kernels._say_once.cache_clear()
    with (
        warnings.catch_warnings(record=True) as caught,
        nalanda_kernels.use_backend("torch" if card.dry else "auto"),
    ):
        warnings.simplefilter("always")
        values |= attempt("ours", ours)
        said = [str(w.message) for w in caught if "not by triton" in str(w.message)]
        values["fallbacks"] = "; ".join(said) or None
        if recipe.startswith("nala_"):
            with contextlib.nullcontext() if card.dry else recurrences_by_fla():
                fed = attempt("fed", ours)
            values |= {"fed": fed.get("tokens_per_second"), "fed_memory": fed.get("memory")}
    if not card.dry:
        theirs = attempt("peer", peer)
        values |= {"peer": theirs.get("tokens_per_second"), "peer_memory": theirs.get("memory")}
        values["peer_parameters"] = theirs.get("parameters")
    rate = values.get("tokens_per_second")
    for other, ratio in (("peer", "ratio"), ("fed", "fed_ratio")):
        if rate and values.get(other):
            values[ratio] = rate / values[other]
    return values | ({"errors": errors} if errors else {})


def curve_case(card: Card, *, precision: str, steps: int = 100) -> Values:
    """The demo recipe on the text that ships with Python: `steps` steps by each backend, from one seed."""
    with tempfile.TemporaryDirectory() as folder:
        curves = {}
        for backend in ("torch", "triton"):
            run = Path(folder) / backend
            settings = {"train.steps": steps, "train.precision": precision, "output_dir": run, "log.every": 1}
            settings |= {"log.tensorboard": "false", "validation.every": 0, "checkpoint.every": 0}
            command = ["recipes/pretrain.py", "recipes/demo.yaml", *(f"{k}={v}" for k, v in settings.items())]
            code, said = python(command, card, NALANDA_BACKEND=backend, TOKENIZERS_PARALLELISM="false")
            if code:
                raise RuntimeError(f"{backend}: {said}")
            curves[backend] = losses(run / "metrics.jsonl")
    return compare_curves(curves["torch"], curves["triton"])


def losses(file: Path) -> list[float]:
    lines = map(json.loads, file.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def compare_curves(torch_losses: list[float], triton_losses: list[float]) -> Values:
    pairs = list(zip(torch_losses, triton_losses, strict=True))
    return {
        "steps": len(pairs),
        "torch": pairs[-1][0],
        "triton": pairs[-1][1],
        "difference": max(abs(a - b) for a, b in pairs),
        "curves": {"torch": torch_losses, "triton": triton_losses},
    }


def train_cases(card: Card) -> list[Case]:
    cases = []
    for recipe in ("nala_gated_deltanet", "transformer") if card.dry else RECIPES:
        for T in card.lengths():
            targets = {} if recipe == "mamba" else {"mfu": 0.45}  # mamba is transformers' own class
            if recipe == "nala_gated_deltanet":
                targets |= {"ratio": 0.95, "fed_ratio": 1.25}
            case = partial(recipe_case, recipe=recipe, T=T)
            cases.append(Case("Training", f"{recipe}_340m, T = {T}", case, targets))
    curves = [
        Case("Loss curves", f"demo.yaml, {precision}", partial(curve_case, precision=precision))
        for precision in ("bf16", "fp32")
    ]
    return cases if card.dry else [*cases[:2], *curves, *cases[2:]]


CASES: dict[str, Callable[[Card], list[Case]]] = {
    "kernels": kernel_cases,
    "bench": bench_cases,
    "train": train_cases,
}


# ---------------------------------------------------------------------------------------------------- results


class Results:
    """results.json: all runs and their figures. Tables show each card's newest figures."""

    def __init__(self, folder: Path):
        self.file, self.table = folder / "results.json", folder / "RESULTS.md"
        found = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.runs: list[Values] = found.get("runs", [])
        self.figures: list[Values] = found.get("figures", [])

    def begin(self, facts: Values) -> None:
        self.runs.append(facts)

    def add(self, part: str, case: Case, values: Values) -> None:
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        row = {"run": len(self.runs) - 1, "part": part, "group": case.group, "name": case.name, "date": date}
        self.figures.append(row | {"values": values})
        self.save()

    def save(self) -> None:
        runs, figures = (",\n".join(map(one_line, rows)) for rows in (self.runs, self.figures))
        write(self.file, f'{{"runs": [\n{runs}\n],\n"figures": [\n{figures}\n]}}\n')
        if not any(run.get("dry") for run in self.runs):
            write(self.table, markdown(self))

    def latest(self, card: str) -> dict[tuple[str, str], Values]:
        return {(f["group"], f["name"]): f for f in self.figures if self.runs[f["run"]]["card"] == card}


def one_line(row: Values) -> str:
    return json.dumps(row, ensure_ascii=False)


def write(file: Path, text: str) -> None:
    """Replaces the file atomically, because the machine may be taken back at any moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def facts(card: Card) -> Values:
    def version(name: str) -> str | None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
        return None

    def first_line(*command: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
            return done.stdout.strip().splitlines()[0]
        return None

    note, driver = (None, None) if card.dry else (lift_guard(), first_line("nvidia-smi", *DRIVER))
    return {
        "date": datetime.date.today().isoformat(),
        "card": "a CPU, dry" if card.dry else torch.cuda.get_device_name(),
        "driver": driver,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "fla": version("fla-core") or getattr(sys.modules.get("fla"), "__version__", None),
        "revision": first_line("git", "rev-parse", "--short", "HEAD"),
        "note": note,
        "dry": card.dry,
    }


DRIVER = ("--query-gpu=driver_version", "--format=csv,noheader")


INTRODUCTION = """# Measured on GPUs

Written by `make gpu-check` (`gpu_check.py`) from results.json, which keeps every figure; here are the newest.
The peer is flash-linear-attention's kernel or model for the same job. Times are medians by CUDA events, in
bf16, 16 384 tokens a call, inputs rotating through more than the last-level cache. A floor is the larger of
bytes over the copy's rate and FLOPs over the matrix product's; MFU is of the data sheet's dense bf16 peak.
Differences are ‖ours − peer‖ / ‖peer‖ of outputs, and nats of losses."""


def markdown(results: Results) -> str:
    """All tables of every card; empty tables if there is no card yet."""
    lines = [INTRODUCTION]
    plan = [case for part in PARTS for case in CASES[part](Card())]
    for card in list(dict.fromkeys(run["card"] for run in results.runs)) or ["No card yet"]:
        known = results.latest(card)
        lines += ["", f"## {card}", "", *run_table(results, card), *target_table(plan, known)]
        for group, columns in COLUMNS.items():
            cases = [case for case in plan if case.group == group]
            found = [known.get((group, case.name), {}).get("values", {}) for case in cases]
            columns = {
                key: head for key, head in columns.items() if any(x.get(key) is not None for x in found)
            }
            rows = [cells(case, columns, known) for case in cases]
            lines += ["", f"### {group}", "", *table(["", *(columns.values() or [""]), "run"], rows)]
        lines += error_table(plan, known)
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(x)} |" for x in (head, ["---"] * len(head), *rows)]


def run_table(results: Results, card: str) -> list[str]:
    keys = ("date", "driver", "python", "torch", "triton", "transformers", "fla", "revision", "note")
    runs = [(i, run) for i, run in enumerate(results.runs) if run["card"] == card]
    rows = [[str(i + 1), *(str(run.get(key) or "–") for key in keys)] for i, run in runs]
    return table(["run", *keys], rows) if rows else [NOT_MEASURED]


def target_table(plan: list[Case], known: dict) -> list[str]:
    rows = []
    for case in plan:
        values = known.get((case.group, case.name), {}).get("values", {})
        for key, least in case.targets.items():
            found, name = values.get(key), TARGETS[key]
            if key == "ratio" and case.group == "Training":
                name = "ours / fla's model"
            verdict = NOT_MEASURED if found is None else "hit" if found >= least else "missed"
            rows.append([f"{case.name}: {name}", f"≥ {shown(key, least)}", shown(key, found), verdict])
    return ["", "### Targets", "", *table(["", "target", "measured", ""], rows)]


def cells(case: Case, columns: dict[str, str], known: dict) -> list[str]:
    row = known.get((case.group, case.name))
    if row is None:
        return [case.name, NOT_MEASURED, *[""] * (len(columns) - 1), ""]
    return [case.name, *(shown(key, row["values"].get(key)) for key in columns), str(row["run"] + 1)]


def shown(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.replace("|", "/")
    if key in PERCENT:
        return f"{value:.0%}"
    if key in ("ratio", "fed_ratio"):
        return f"{value:.2f}×"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def error_table(plan: list[Case], known: dict) -> list[str]:
    """A table of failed measurements and their errors."""
    rows = []
    for case in plan:
        values = known.get((case.group, case.name), {}).get("values", {})
        for what, error in values.get("errors", {}).items():
            rows.append([case.name, what, error.replace("|", "/")])
    return ["", "### Failed", "", *table(["", "what", "error"], rows)] if rows else []


# ---------------------------------------------------------------------------------------------------- running


def run_part(part: str, card: Card, results: Results, minutes: float, only: str = "") -> None:
    """Runs a part's cases: first those never measured on this card, then the oldest figures."""
    end, name = time.monotonic() + 60 * minutes - (0 if card.dry else 15), results.runs[-1]["card"]
    last = {key: figure["date"] for key, figure in results.latest(name).items()}
    cases = sorted(
        (case for case in CASES[part](card) if only in case.name),
        key=lambda c: last.get((c.group, c.name), ""),
    )
    for i, case in enumerate(cases):
        card.seconds = end - time.monotonic()
        if card.seconds < (0 if card.dry else 20):
            return say_left(part, cases[i:])
        print(f"{case.name} …", end=" ", flush=True)
        try:
            with limited(min(card.seconds, case.seconds)):
                values = case.run(card)
        except (OutOfTime, subprocess.TimeoutExpired):
            if card.seconds < case.seconds:  # the part ends; next time the case gets all of its time
                print("out of time")
                return say_left(part, cases[i:])
            values = {"errors": {"all": f"more than {case.seconds:.0f} s"}}
        except Exception as error:
            values = {"errors": {"all": in_a_line(error)}}
        results.add(part, case, values)
        said = [f"{k} {shown(k, v)}" for k, v in values.items() if v is not None and not isinstance(v, dict)]
        print(", ".join([*said, *(f"{what}: {error}" for what, error in values.get("errors", {}).items())]))
        try:
            release(card)
        except Exception as error:  # this process cannot measure any more
            print(f"  {in_a_line(error)}")
            return say_left(part, cases[i + 1 :])
    return None


def release(card: Card) -> None:
    card.wait()
    if not card.dry:
        gc.collect()
        torch.cuda.empty_cache()


def say_left(part: str, cases: list[Case]) -> None:
    print(f"gpu-check {part}: cases not reached; run it again for {'; '.join(case.name for case in cases)}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or table: only rewrite RESULTS.md"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of a part")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the results")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU, torch for every kernel; needs --output"
    )
    options = parser.parse_args(arguments)
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - {*PARTS, "table"}:
        parser.error(f"part {sorted(unknown)[0]!r}: unknown; choose from {', '.join(PARTS)}")
    results = Results(options.output)
    if parts == ["table"]:
        write(results.table, markdown(results))
        return 0
    if options.dry_run and options.output == parser.get_default("output"):
        parser.error("--dry-run: its figures are no measurements; give another folder with --output")
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU; run it on a machine with one", file=sys.stderr)
        return 2
    card = Card("cpu", dry=True) if options.dry_run else Card()
    results.begin(facts(card))
    for part in parts:
        run_part(part, card, results, options.minutes, options.only)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
