"""Compiles kernels for GPUs that are absent and shows registers, spills, shared memory and hazards.

    python -m nalanda_lab.kernels.static [--arch sm_90] [--case flagship] [--check] [--record] [--peer]

It calls wrappers as a model does, forward and backward, on CPU tensors, but launches only compile. So it
compiles exactly the specialised kernels that a call launches; their results are garbage. Triton caches
compiled kernels, so a second run takes seconds. The process must not have TRITON_INTERPRET set, which Triton
reads when a kernel is decorated.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from nalanda_kernels import KERNELS, interpreting
from nalanda_kernels.triton.common import PROCESSORS  # the peer asks for it, too
from nalanda_kernels.tune import NALA

from nalanda import NalandaConfig
from nalanda.model import one_token
from nalanda.model.mixers import build_mixer
from nalanda.model.sequences import Sequences
from nalanda_lab.kernels import hazards

SHARED = {  # most bytes of a program
    "sm_75": 65_536,
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
CORES = ("", "mma.sync", "wgmma", "tcgen05")  # tensor-core instructions, the newest last
Call = Callable[[], tuple[torch.Tensor, ...]]
HAZARDS = ("register_a", "overwritten", "transposed", "refilled")  # what hazards.py counts
# Of the longest loop with products in PTX, such as that over chunks: instructions, fp64 ones, barriers.
LOOP = ("loop", "fp64", "barriers")
COUNTS = (*LOOP, *HAZARDS)
FIGURES = ("registers", "spilled", "shared", *COUNTS)
BY_COMPILER = ("registers", "loop")  # compared only with those of the same Triton version
LIMITS = Path(__file__).with_name("limits.json")
# Rows, tokens and most heads of grids that fill a card, that take ever narrower blocks, that take segments.
SHAPES = (8, 2048, 8), (2, 8192, 8), (1, 8192, 8), (1, 8192, 4), (1, 32768, 4)


# ------------------------------------------------------------------------------------------------- the calls


@dataclass(frozen=True)
class Case:
    """A call of an op, as in a recipe.

    K, V: widths of a head before the map. H: heads. map: its name or None. norm: of q and k, "l2" or None.
    channels: decays per key channel. erase: also gates of what is erased and written. evaluated: the forward of
    a call that needs no gradients.
    """

    op: str = "delta_rule"
    K: int = 128
    V: int = 128
    H: int = 8
    map: str | None = None
    gated: bool = False
    norm: str | None = "l2"
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, object], ...] = ()  # further keyword arguments of the op
    channels: bool = False
    erase: bool = False
    evaluated: bool = False

    @property
    def F(self) -> int:
        """Features of a head, after the map."""
        return 2 * self.K if self.map in ("nala", "pola") else self.K


# Mixers whose whole token is a case, each with its map.
TOKENS = [("kda", "nala"), ("gated_deltanet2", "silu"), ("gla", None), ("nala", "nala")]
TOKENS += [("retention", None), ("mamba2", "silu"), ("mala", "elu1"), ("pola", "pola")]
LINEAR = {"op": "linear_attention", "norm": None}
FLAGSHIP = Case(V=256, H=6, map="nala", gated=True)
GATED = Case(map="silu", gated=True)
WIDE = Case(K=256, V=512, H=6, map="silu", gated=True)
CASES = {
    "flagship": FLAGSHIP,
    "gated_deltanet": replace(FLAGSHIP, map="silu"),
    "flagship fp16": replace(FLAGSHIP, dtype=torch.float16),
    "flagship fp32": replace(FLAGSHIP, dtype=torch.float32),
    "gated_deltanet 128": GATED,
    "deltanet": Case(map="silu"),
    "deltanet fp32": Case(map="silu", dtype=torch.float32),
    "nala_deltanet": Case(map="nala"),
    "gated_deltanet 128 evaluated": replace(GATED, evaluated=True),
    "nala_deltanet evaluated": Case(map="nala", evaluated=True),
    "deltanet fp32 evaluated": Case(map="silu", dtype=torch.float32, evaluated=True),
    "kda evaluated": replace(GATED, channels=True, evaluated=True),
    "linear_attention": Case(**LINEAR, map="elu1"),
    "retnet": Case(**LINEAR, K=256, V=512, H=4, gated=True),
    "gated_deltanet 256": WIDE,
    "gated_deltanet 256 fp32": replace(WIDE, dtype=torch.float32),
    # The mixer forms the features.
    "delta_product": Case(gated=True, norm=None, options=(("allow_neg_eigval", True),)),
    "kda": replace(GATED, channels=True),
    "kda fp32": Case(gated=True, channels=True, dtype=torch.float32),
    "nala gated_deltanet2": replace(FLAGSHIP, channels=True, erase=True),
    "gla": Case(**LINEAR, V=256, H=4, gated=True, channels=True),
    "linear_attention sums": Case("normalized_attention", map="elu1"),
    "mala sums": Case("normalized_attention", map="elu1", options=(("magnitude", "code"),)),
    "nala sums": Case("normalized_attention", map="nala"),
    "pola sums": Case("normalized_attention", V=64, map="pola", options=(("mirrored", True),)),
    "nala map": Case("map_features", map="nala"),
    "pola map": Case("map_features", map="pola", norm=None),
    "silu map": Case("map_features", map="silu"),
    "softmax blocks": Case("block_attention"),
    "relu blocks": Case("block_attention", map="relu"),
    "short_conv": Case("short_convs", V=256, H=6),
    "step": replace(FLAGSHIP, op="step"),
    "step deltanet": Case("step", map="silu"),
    "step kda": replace(GATED, op="step", channels=True),
    "step gated_deltanet2": replace(GATED, op="step", channels=True, erase=True),
    "step delta_product": Case("step", map="silu", options=(("steps", 4),)),
    **{f"token {x}": Case("fused_step", map=y, options=(("mixer", x),)) for x, y in TOKENS},
    "swiglu": Case("swiglu", 2816, 2816, 1),
    "head loss": Case("cross_entropy", 2048, 32_000, 1),
    "glu of a token": Case("glu_rows", 1024, 2816, 1),
    "residual norm": Case("rms_norm", 1024, 1024, 1),
    "head norm": Case("rms_norm", 256, 256, 6, gated=True),
}  # the calls of the 340 M recipes
TRAINED = ("flagship", "gated_deltanet 128", "gated_deltanet 128 evaluated", "short_conv", "step")
CASES_OF = {"sm_75": ("flagship fp16",), "sm_89": TRAINED, "sm_120": TRAINED}
"""The cases of cards that take another card's block sizes; sm_75 has no bf16. Other cards: all."""
PEERS = (
    "flagship",
    "gated_deltanet 128",
    "deltanet",
)  # cases also compiled with the peer's kernels


@dataclass(frozen=True)
class StandIn:
    """The attributes of a feature map that kernels read."""

    fused: dict
    feature_dim: int


def feature_map(case: Case) -> StandIn | None:
    if case.map is None:
        return None
    fused = NALA if case.map == "nala" else {"name": case.map}
    if case.map == "pola":
        w, s = (torch.zeros(case.H, case.K, requires_grad=True) for _ in range(2))
        fused = fused | {"alpha": 4.0, "parameters": (w, s)}
    return StandIn(fused, case.F)


def tensors(case: Case, B: int, T: int, K: int) -> tuple[torch.Tensor, ...]:
    """q, k `[B, T, H, K]`, v `[B, T, H, V]`, beta and g `[B, T, H]`, or g `[B, T, H, F]` (fp32): zeros that
    require gradients."""
    decays = (case.H, case.F) if case.channels else (case.H,)
    shapes = (case.H, K), (case.H, K), (case.H, case.V), (case.H,), decays
    dtypes = *[case.dtype] * 3, torch.float32, torch.float32
    return tuple(
        torch.zeros(B, T, *shape, dtype=dtype, requires_grad=True)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def ours(case: Case, B: int = 2, T: int = 2048) -> Call:
    """A function that calls our kernels for a case and returns the outputs, for `backward`."""
    op, (q, k, v, beta, g) = KERNELS[case.op]["triton"].load(), tensors(case, B, T, case.K)
    map, gate = feature_map(case), g if case.gated else None
    if case.op == "delta_rule":
        gates = {"erase": g.to(case.dtype), "write": torch.zeros_like(v)} if case.erase else {}
        gates |= dict(case.options)
        return lambda: op(q, k, v, beta, gate, feature_map=map, qk_norm=case.norm, **gates)[:1]
    if case.op == "linear_attention":
        return lambda: op(q, k, v, gate, feature_map=map, qk_norm=case.norm)[:1]
    if case.op == "normalized_attention":
        positions, options = torch.arange(T)[None], dict(case.options)
        if options.get("mirrored"):
            v = torch.cat([v.detach()] * 2, 2).requires_grad_()
        return lambda: op(q, k, v, gate, feature_map=map, positions=positions, **options)[:1]
    if case.op == "map_features":
        return lambda: tuple(op(q, k, map, case.norm))
    if case.op == "short_convs":
        sizes = [case.H * case.K, case.H * case.K, case.H * case.V]
        product = torch.zeros(B, T, sum(sizes), dtype=case.dtype, requires_grad=True)
        weights = [torch.zeros(D, 4, requires_grad=True) for D in sizes]
        return lambda: tuple(
            op(product.split(sizes, -1), weights, activations=[None, None, "silu"])[0]
        )
    if case.op == "step":
        return lambda: _step(op, case, B)
    if case.op == "fused_step":
        return lambda: _token(op, case, B)
    if case.op == "cross_entropy":
        logits, labels = torch.zeros(case.K, case.V, dtype=case.dtype), torch.zeros(case.K).long()
        return lambda: (op(logits, labels, -100, 0.0, True),)
    if case.op == "glu_rows":
        return lambda: _glu_rows(op, case, B)
    if case.op == "swiglu":
        return lambda: (op(q, k),)
    if (
        case.op == "rms_norm"
    ):  # of bf16 heads with their gate, or of a fp32 residual stream and a bf16 output
        weight = torch.ones(case.V, requires_grad=True)
        around = {"gate": k.flatten(-2)} if case.gated else {"add": k}
        x = q if case.gated else q.float()
        return lambda: op(x, weight, 1e-6, dtype=case.dtype, **around)
    return lambda: (op(q, k, v, block_size=64, scores=case.map or "softmax"),)


def _step(op: Callable, case: Case, N: int) -> tuple[torch.Tensor, ...]:
    """One token of a delta rule for N sequences, with convolutions, gates and norm."""
    H, K, V, dtype, options = case.H, case.K, case.V, case.dtype, dict[str, Any](case.options)
    steps, G = options.get("steps", 1), case.F if case.channels else 1
    sizes = {"q": H * K, "k": steps * H * K, "v": steps * H * V}
    widths = sizes | ({"b": H * case.F, "w": H * V} if case.erase else {"b": steps * H})
    widths |= {"a": H * G, "gate": H * V} if case.gated else {}
    state = {f"conv_{x}": torch.zeros(N, 3, n, dtype=dtype) for x, n in sizes.items()}
    return op(
        lambda: {x: torch.zeros(N, 1, n, dtype=dtype) for x, n in widths.items()},
        state | {"recurrent": torch.zeros(N, H, case.F, V)},
        dtype=dtype,
        key_dim=K,
        value_dim=V,
        num_heads=H,
        num_v_heads=H,
        feature_map=feature_map(case),
        qk_norm=case.norm,
        delta=True,
        decay=(torch.zeros(H), torch.zeros(H * G)) if case.gated else None,
        filters={x: torch.zeros(n, 1, 4, dtype=dtype) for x, n in sizes.items()},
        silu=True,
        norm=(torch.ones(V, dtype=dtype), 1e-5),
        gate_activation="sigmoid" if case.channels else "silu",
        **options,
    )[:1]


@torch.no_grad()
def _token(op: Callable, case: Case, N: int) -> tuple[torch.Tensor, ...]:
    """One token of N sequences through a mixer."""
    name = dict[str, Any](case.options)["mixer"]
    sizes = {"head_dim": case.K, "expand_v": case.V / case.K, "num_heads": case.H}
    config = NalandaConfig(hidden_size=1024, mixer=name, feature_map=case.map, **sizes)
    mixer = build_mixer(name, config, 0).to(case.dtype)
    state = {
        part: torch.zeros(N, *shape, dtype=dtype or case.dtype)
        for part, (shape, dtype) in mixer.state_spec(1).items()
    }
    x, seq = torch.zeros(N, 1, 1024, dtype=case.dtype), Sequences(past=torch.zeros(N).long())

    def call(name: str, backend: str, like: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        return op(*inputs, **options)

    with mock.patch.object(one_token, "by_kernel", call):
        served = one_token.fused_step(mixer, x, seq, state)
    assert served is not None
    return served[:1]


def _glu_rows(op: Callable, case: Case, rows: int) -> tuple[torch.Tensor, ...]:
    """A GLU of K to V features and back, of one token of each row."""
    x, weight = torch.zeros(rows, 1, case.K, dtype=case.dtype), torch.ones(case.K)
    wide = torch.zeros(case.V, case.K, dtype=case.dtype)
    return (op(x, x, weight, 1e-5, wide, wide, wide.T.contiguous()),)


def peer(case: Case, B: int = 2, T: int = 2048) -> Call:
    """A function that calls the peer's kernels for a case. Its q and k are features already."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gdn2 import chunk_gdn2
    from fla.ops.kda import chunk_kda

    q, k, v, beta, g = tensors(case, B, T, case.F)
    norm = {"use_qk_l2norm_in_kernel": case.norm == "l2"}
    if case.op != "delta_rule":
        raise ValueError(f"op={case.op!r}: the peer's is not compared; choose delta_rule")
    if case.erase:
        erase, write = (torch.zeros_like(x, requires_grad=True) for x in (k, v))
        return lambda: chunk_gdn2(q, k, v, g, erase, write, **norm)[:1]
    if case.channels:
        return lambda: chunk_kda(q, k, v, g, beta, **norm)[:1]
    if case.gated:
        return lambda: chunk_gated_delta_rule(q, k, v, g, beta, **norm)[:1]
    return lambda: chunk_delta_rule(q, k, v, beta, **norm)[:1]


def check_peer(wanted: bool) -> None:
    if wanted and not importlib.util.find_spec("fla"):
        sys.exit("--peer: flash-linear-attention is missing; pip install flash-linear-attention")


def backward(outputs: tuple[torch.Tensor, ...]) -> None:
    """Runs the backward, if there is one; a step of generation has none."""
    if outputs[0].requires_grad:
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])


# ------------------------------------------------------------------------------------------ compiling alone


class Card:
    """Triton's driver for an absent GPU."""

    def __init__(self, arch: str, benchmark: Callable):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
        self.benchmark = benchmark
        facts = {"max_shared_mem": SHARED[arch], "multiprocessor_count": PROCESSORS[arch]}
        self.utils = SimpleNamespace(get_device_properties=lambda device: facts)

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable:
        return self.benchmark

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"{name}: there is no GPU; kernels can only be compiled")


def pretend(arch: str) -> None:
    """Shows that card to the peer, which looks for a card on import and chooses its block sizes for it."""
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.get_device_name = lambda device=None: f"a card of {arch}"
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    os.environ["FLA_CACHE_RESULTS"] = "0"  # its choices here are not a real card's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.utils import hardware
    shared = SHARED[arch]  # a CPU tensor's device has the index None
    hardware.get_all_max_shared_mem = lambda: {0: shared, None: shared}  # pyrefly: ignore


_built: list[dict] = []  # kernels compiled since the list was last emptied
_arch: str | None = None


def _start(arch: str) -> None:
    """Makes this process's launches compile for `arch`. A process can compile for only one arch."""
    global _arch
    if arch not in SHARED:
        raise ValueError(f"arch={arch!r}: unknown; choose one of {', '.join(SHARED)}")
    if interpreting():
        raise ValueError("TRITON_INTERPRET: the interpreter compiles nothing; unset it")
    if _arch not in (None, arch):
        raise ValueError(f"arch={arch!r}: this process compiles for {_arch}; start another process")
    if _arch is None:
        _arch = os.environ["NALANDA_ARCH"] = arch
        _patch(arch)


def _patch(arch: str) -> None:
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run, make_cubin, bench = JITFunction.run, CUDABackend.make_cubin, Autotuner._bench

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        _built.append(_figures(self.__name__, kernel))
        return kernel

    def keep_log(self, source, metadata, *rest):
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            cubin = make_cubin(self, source, metadata, *rest)
        early = (
            hazards.overwritten(hazards.machine_code(cubin)) if hazards.register_a(source) else 0
        )
        # Triton caches metadata with the kernel.
        return metadata.update(ptxas=log.getvalue(), overwritten=early) or cubin

    def until_none_spill(self, *args, config, **meta):
        if self.__dict__.get("settled") is self.nargs:  # the same launch, in another configuration
            return [math.inf] * 3
        spilled = bench(self, *args, config=config, **meta)
        self.settled = self.nargs if spilled[0] == 0 else None
        return spilled

    Autotuner._bench = until_none_spill  # pyrefly: ignore
    JITFunction.run, CUDABackend.make_cubin = compile_only, keep_log  # pyrefly: ignore
    knobs.nvidia.dump_ptxas_log = True
    knobs.cache.dir = str(
        Path(knobs.cache.dir, "nalanda_figures")
    )  # metadata there have what keep_log adds
    driver.set_active(Card(arch, _fewest_spills))  # pyrefly: ignore
    if importlib.util.find_spec("fla"):
        pretend(arch)


def _fewest_spills(launch: Callable, quantiles=None, **options) -> list[float]:
    """An autotuner's benchmark, which selects the configuration that fits and spills least."""
    start = len(_built)
    launch()
    tried = _built[start:]
    del _built[start:]
    fits = all(x["shared"] <= SHARED[x["arch"]] for x in tried)
    return [sum(x["spilled"] for x in tried) if fits else math.inf] * 3


def _figures(name: str, kernel) -> dict:
    ptx, log, about = kernel.asm["ptx"], kernel.metadata.ptxas, kernel.metadata
    there = [x for x in CORES if x and re.search(rf"\b{re.escape(x)}\.", ptx)]
    return {
        "arch": f"sm_{about.target.arch}",
        "kernel": name,
        "num_warps": about.num_warps,
        "num_stages": about.num_stages,
        "registers": _sum(r"Used (\d+) registers", log),
        "spilled": _sum(r"(\d+) bytes spill (?:stores|loads)", log),
        "shared": about.shared,
        **_loop(ptx),
        "register_a": hazards.register_a(ptx),
        "overwritten": about.overwritten,
        "transposed": hazards.transposed(kernel.asm["ttir"]),
        "refilled": hazards.refilled(kernel.asm["ttgir"], ptx),
        "tensor_cores": there[-1] if there else "",
    }


def _loop(ptx: str) -> dict[str, int]:
    """Instructions, those in fp64, and barriers, of the longest loop that has products; 0 without one."""
    bodies = [body for _, body in re.findall(r"(\$L__BB\w+):(.*?)bra\S*\s+\1;", ptx, re.DOTALL)]
    body: str = max((x for x in bodies if "mma" in x), key=lambda x: len(x), default="")
    patterns = zip(LOOP, (r";[ \t]*$", r"\.f64\b", r"\b(?:bar|barrier)\."), strict=True)
    return {name: len(re.findall(pattern, body, re.MULTILINE)) for name, pattern in patterns}


def _sum(pattern: str, log: str) -> int:
    return sum(map(int, re.findall(pattern, log)))


def compile_calls(arch: str, calls: Iterable[tuple[str, Callable[[], object]]]) -> list[dict]:
    """Compiles every kernel that the calls launch, for `sm_80`, `sm_90` or `sm_100`.

    calls: names, and functions that call kernels' wrappers on CPU tensors, forward and backward.

    Returns a row for each kernel of a call: job, arch, kernel, num_warps, num_stages and tensor_cores (`wgmma`, …; ""
    for none). Registers are a thread's; spilled (stores and loads) and shared are bytes. COUNTS are counts.
    A kernel compiled in several forms shows their maximum; an autotuned one the configuration that spills least.

    Raises ValueError in the interpreter, for an unknown arch, and for a second arch in a process.
    """
    _start(arch)
    rows = []
    for job, call in calls:
        _built.clear()
        call()
        forms: dict[str, list[dict]] = {}
        for built in _built:
            forms.setdefault(built["kernel"], []).append(built)
        rows += [{"job": job} | _most(found) for found in forms.values()]
    return rows


def _most(forms: list[dict]) -> dict:
    worst = max(forms, key=lambda x: (x["spilled"], x["registers"]))
    most = {figure: max(x[figure] for x in forms) for figure in FIGURES}
    return worst | most | {"tensor_cores": min((x["tensor_cores"] for x in forms), key=CORES.index)}


def compile_cases(arch: str, names: Iterable[str], by_peer: bool = False) -> list[dict]:
    """`compile_calls` for rows of CASES, with our kernels in all SHAPES or the peer's."""
    _start(arch)  # before the peer is imported

    def call(case: Case) -> None:
        if by_peer:
            backward(peer(case)())
        for B, T, H in () if by_peer else SHAPES:
            with torch.set_grad_enabled(not case.evaluated):
                outputs = ours(replace(case, H=min(case.H, H)), B, T)()
            backward(outputs)

    return compile_calls(arch, [(name, lambda case=CASES[name]: call(case)) for name in names])


# ------------------------------------------------------------------------------------------- recorded limits


def limits() -> dict:
    """The content of limits.json: our `limits` by Triton, arch, job and kernel; the peer's figures."""
    return json.loads(LIMITS.read_text()) if LIMITS.exists() else {}


def triton_version() -> str:
    """Such as 3.7; another one has another compiler and needs limits of its own."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def held_to(recorded: dict) -> str | None:
    """The Triton version whose limits hold here: this one, or if it has none the newest with limits."""
    versions = recorded.get("limits", {})
    here = triton_version()
    newest = max(versions, key=lambda x: [int(n) for n in x.split(".")], default=None)
    return here if here in versions else newest


def violations(rows: list[dict], recorded: dict) -> list[str]:
    """One line for each figure above the recorded one, the card's shared memory or the peer's spills.

    BY_COMPILER figures are compared only with those that this Triton version gave.
    """
    found, version = [], held_to(recorded)
    held = [x for x in FIGURES if x not in BY_COMPILER or version == triton_version()]
    for row in rows:
        arch, job, kernel = row["arch"], row["job"], row["kernel"]
        limit = recorded.get("limits", {}).get(version, {}).get(arch, {}).get(job, {}).get(kernel)
        name = f"{arch} {job}, {kernel}"
        if row["shared"] > SHARED[arch]:
            found.append(
                f"{name}: {row['shared']} bytes of shared memory, the card has {SHARED[arch]}"
            )
        if limit is None:
            found.append(f"{name}: no limit is recorded")
            continue
        most = {x: limit.get(x, 0) for x in held}  # counts of 0 are not recorded
        found += [f"{name}: {row[x]} {x}, recorded {most[x]}" for x in held if row[x] > most[x]]
        if CORES.index(row["tensor_cores"]) < CORES.index(limit["tensor_cores"]):
            found.append(
                f"{name}: {row['tensor_cores'] or 'no tensor cores'}, recorded {limit['tensor_cores']}"
            )
    for (arch, job), ours in _spills(rows).items():
        theirs = recorded.get("peer", {}).get(arch, {}).get(job)
        if theirs and ours > (most := sum(x["spilled"] for x in theirs.values())):
            found.append(f"{arch} {job}: {ours} bytes spilled, the peer spills {most}")
    return found


def _spills(rows: list[dict]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row["arch"], row["job"]
        sums[key] = sums.get(key, 0) + row["spilled"]
    return sums


def record(rows: list[dict], recorded: dict, peer: bool = False) -> dict:
    """`recorded`, with the rows' jobs replaced by the rows; ours under this Triton version."""
    table = recorded.setdefault("peer" if peer else "limits", {})
    if peer:
        recorded["peer_version"] = importlib.metadata.version("fla-core")
    else:
        table = table.setdefault(triton_version(), {})
    for row in rows:
        table.setdefault(row["arch"], {})[row["job"]] = {}
    for row in rows:
        figures = {x: row[x] for x in (*FIGURES, "tensor_cores") if x not in COUNTS or row[x]}
        table[row["arch"]][row["job"]][row["kernel"]] = figures
    return recorded


def write_limits(recorded: dict) -> None:
    """Writes one kernel per line, so that a diff shows each change."""
    text = json.dumps(recorded, indent=1, sort_keys=True)
    LIMITS.write_text(re.sub(r"\{\s+([^{}]*\"registers\"[^{}]*?)\s+\}", _one_line, text) + "\n")


def _one_line(found: re.Match) -> str:
    return "{" + re.sub(r"\s+", " ", found[1]) + "}"


# -------------------------------------------------------------------------------------------------- the table


def print_figures(rows: list[dict], recorded: dict, whose: str = "ours") -> None:
    """Prints kernels by job, with the peer's recorded kernels under each job."""
    lines = []
    for (arch, job), found in groupby(rows, lambda row: (row["arch"], row["job"])):
        theirs = recorded.get("peer", {}).get(arch, {}).get(job, {})
        lines += [[arch, job, whose, row["kernel"], *_cells(row)] for row in found]
        lines += [[arch, job, "peer", kernel, *_cells(row)] for kernel, row in theirs.items()]
    figures = [name.replace("_", " ") for name in FIGURES]
    header = ["arch", "job", "", "kernel", *figures, "tensor cores"]
    title = "bytes: spilled by a thread, shared by a program"
    print_wide(title, header, lines)
    if "peer_version" in recorded:
        print(f"peer: flash-linear-attention, fla-core {recorded['peer_version']}, as recorded")


def _cells(row: dict) -> list[str]:
    """The figures of a kernel; counts are only of ours."""
    return [*(f"{row[x]:,}" if x in row else "" for x in FIGURES), row["tensor_cores"]]


def print_wide(title: str, header: list[str], lines: list[list[str]]) -> None:
    """Prints a table that is wider than what rich takes for a file. Machines with a card may have no rich."""
    from rich.console import Console

    from nalanda_lab.track import plain_table

    width = None if sys.stdout.isatty() else 200
    Console(width=width).print(plain_table(header, lines, left=4, title=title))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m nalanda_lab.kernels.static", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--arch", action="append", choices=SHARED, help="default: all")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument(
        "--check", action="store_true", help=f"fail if figures exceed {LIMITS.name}"
    )
    parser.add_argument("--record", action="store_true", help=f"write figures to {LIMITS.name}")
    parser.add_argument(
        "--peer", action="store_true", help="compile the peer's kernels (many minutes, once)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write figures to FILE")
    options = parser.parse_args(arguments)
    check_peer(options.peer)
    archs = options.arch or [x for x in SHARED if not options.peer or x not in CASES_OF]
    cases = {arch: options.case or _cases_of(arch, options.peer) for arch in archs}
    rows = _in_processes(cases, options.peer)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    recorded = limits()
    if options.record:
        write_limits(record(rows, recorded, options.peer))
    print_figures(rows, {}, "peer") if options.peer else print_figures(rows, recorded)
    broken = violations(rows, recorded) if options.check else []
    if options.check and (version := held_to(recorded)) != triton_version():
        print(
            f"Triton {triton_version()} has no limits yet: held to those of {version}, without registers"
        )
    print(*broken, sep="\n", end="\n" if broken else "")
    sys.exit(1 if broken else 0)


def _cases_of(arch: str, peer: bool) -> Iterable[str]:
    return PEERS if peer else CASES_OF.get(arch, CASES)


def _in_processes(cases: dict[str, Iterable[str]], peer: bool) -> list[dict]:
    """Rows of one process per arch, two at a time; a compilation uses one core. cases: by arch."""
    os.environ.pop("TRITON_INTERPRET", None)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(2, spawn, max_tasks_per_child=1) as pool:
        rows = pool.map(compile_cases, cases, map(tuple, cases.values()), repeat(peer))
        return [row for each in rows for row in each]


if __name__ == "__main__":
    main()
