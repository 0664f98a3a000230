"""Times of the recurrences beside flash-linear-attention and FlashQLA."""

import contextlib
import importlib
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.card import Card, Case, Values

os.environ["FLA_FLASH_QLA"] = "0"  # the peer is fla's own kernel, not FlashQLA behind its name
PLAIN = {"H": 8, "K": 128, "V": 128}
FLAGSHIP = {"H": 6, "K": 128, "V": 256, "feature_map": "nala"}
LINEAR = {"op": "linear_attention", **PLAIN}
RECURRENCES: dict[str, tuple[dict, dict]] = {  # name → options and targets
    "gated delta rule": (PLAIN | {"decays": True}, {"peer / ours": 1.2}),
    "delta rule": (PLAIN, {"peer / ours": 1.2}),
    "gated delta rule, NaLa": (FLAGSHIP | {"decays": True}, {"peer / ours": 1.2}),
    "delta rule, NaLa": (FLAGSHIP, {"peer / ours": 1.2}),
    "linear attention": (LINEAR, {}),
    "linear attention, NaLa": (LINEAR | {"feature_map": "nala"}, {}),
    "retention": (LINEAR | {"decays": True}, {}),
}
PACKED = "gated delta rule, packed"  # as FlashQLA needs it: with more than one row it uses none of its parts


def lift_guard() -> None:
    """Lets fla run where it refuses, to time it; its results there are wrong (its issue 640)."""
    with contextlib.suppress(ImportError):
        chunk_o: Any = importlib.import_module("fla.ops.common.chunk_o")
        chunk_o.TRITON_ABOVE_3_7_1 = True


def bench_recurrence(
    card: Card,
    *,
    T: int,
    H: int,
    K: int,
    V: int,
    op: str = "delta_rule",
    decays: bool = False,
    feature_map: str | None = None,
    packed: bool = False,
) -> Values:
    """Our op with map and norm inside, beside the other backends of the same contract.

    packed: sequences of T tokens in one row, beside FlashQLA too.
    """
    from nalanda_kernels import KERNELS

    from nalanda.model.feature_maps import build_feature_map

    if card.dry:
        H, K, V = 1, 16, 16
    B, delta = max(1, card.tokens // T), op == "delta_rule"
    bounds = torch.arange(B + 1) * T if packed else None
    B, T = (1, B * T) if packed else (B, T)
    phi: Any = None
    if feature_map:
        phi = build_feature_map(feature_map, num_heads=H, head_dim=K).to(card.device)

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator(card.device).manual_seed(seed)
        normal = partial(torch.randn, generator=generator, device=card.device)
        inputs = [normal(B, T, H, size).bfloat16() for size in (K, K, V)]
        inputs += [normal(B, T, H).sigmoid()] if delta else []
        inputs += [F.logsigmoid(normal(B, T, H) + 3)] if decays else []
        return tuple(x.requires_grad_() for x in inputs)

    def call(backend: str, *inputs: Tensor) -> Tensor:
        serve = KERNELS[op][backend].load()  # no other backend serves in its place
        options = {"feature_map": phi, "qk_norm": "l2" if delta else None, "cu_seqlens": bounds}
        return serve(*inputs, **options)[0]

    sides = {"ours": partial(call, "triton"), "peer": partial(call, "fla")}
    if packed:
        sides["FlashQLA"] = partial(call, "flash_qla")
    return compare(card, sides, card.input_sets(make))


def compare(card: Card, sides: dict[str, Callable], inputs: list[tuple]) -> Values:
    """Times of functions from inputs with gradients to a tensor.

    Forward is without gradients; training's forward keeps what its backward reads, and may be another program;
    the third is training's forward plus backward.
    """

    def forward(function: Callable, *x: Tensor) -> None:
        with torch.no_grad():
            function(*x)

    def both(function: Callable, *x: Tensor) -> None:
        torch.autograd.grad(function(*x), x, d_o)

    forward_sides = {name: partial(forward, function) for name, function in sides.items()}
    fast, errors = card.times(forward_sides, inputs)
    if not fast:
        return {"errors": errors}
    with torch.no_grad():
        outputs = {name: sides[name](*inputs[0]).float() for name in fast}
    d_o = torch.randn_like(next(iter(outputs.values()))).bfloat16()
    kept, _ = card.times({name: sides[name] for name in fast}, inputs)
    slow, failed = card.times({name: partial(both, sides[name]) for name in fast}, inputs)
    errors |= {f"{name}, backward": error for name, error in failed.items()}

    values: Values = {}
    if {"ours", "peer"} <= outputs.keys():
        ours, peer = outputs["ours"], outputs["peer"]
        values["difference"] = ((ours - peer).norm() / peer.norm()).item()
    values |= {f"{name}, forward ms": ms for name, ms in fast.items()}
    values |= {f"{name}, training's forward ms": ms for name, ms in kept.items()}
    values |= {f"{name}, ms": ms for name, ms in slow.items()}
    if ours := slow.get("ours"):
        values |= {f"{name} / ours": ms / ours for name, ms in slow.items() if name != "ours"}
    return values | ({"errors": errors} if errors else {})


def measure_ceilings(card: Card) -> Values:
    """What the card does at best: bytes copied, and products of bf16, a second."""
    size, n = (1 << 12, 64) if card.dry else (1 << 30, 8192)
    x = torch.ones(size, dtype=torch.uint8, device=card.device)
    a, b = (torch.randn(n, n, device=card.device).bfloat16() for _ in range(2))
    copy = statistics.median(card.clock(torch.Tensor.copy_, [(torch.empty_like(x), x)], calls=20))
    product = statistics.median(card.clock(torch.mm, [(a, b)], calls=20))
    return {"copy, TB/s": 2e-9 * size / copy, "bf16, TFLOP/s": 2e-9 * n**3 / product}


def bench_toy(card: Card) -> Values:
    """A delta rule of 70 tokens and K = 16, whose initial state's gradient an H200 had wrong by 1.5 %.

    Errors beside float64: the worst of five calls, and torch's own in bf16. same: calls with the first one's bits.
    """
    from nalanda_kernels import KERNELS

    from nalanda.model import ops

    generator = torch.Generator().manual_seed(0)
    B, T, H, K, V = 2, 70, 2, 16, 32
    normal = partial(torch.randn, generator=generator)
    q, k, v, d_o = (normal(B, T, H, size).bfloat16() for size in (K, K, V, V))
    inputs = (q, k, v, normal(B, T, H).sigmoid(), normal(B, H, K, V))

    def gradient(op: Callable, double: bool) -> Tensor:
        x = [each.double() if double else each for each in inputs]
        x = [each.to(card.device).requires_grad_() for each in x]
        o = op(*x[:4], initial_state=x[4], qk_norm="l2")[0]
        return torch.autograd.grad(o, x[4], d_o.to(card.device, o.dtype))[0]

    def error(x: Tensor) -> float:
        return ((x.double() - exact).norm() / exact.norm()).item()

    in_torch = partial(ops.delta_rule, backend="torch")
    exact = gradient(in_torch, double=True)
    ours = [gradient(KERNELS["delta_rule"]["triton"].load(), double=False) for _ in range(5)]
    return {
        "ours": max(map(error, ours)),
        "torch": error(gradient(in_torch, double=False)),
        "same": sum(torch.equal(x, ours[0]) for x in ours),
    }


def bench_cases(card: Card) -> list[Case]:
    from nalanda_lab.speed import gpu  # imports kernels, after the interpreter of a dry run

    cases = [Case("Ceilings", "copy and product", measure_ceilings)]
    cases += [Case("Toy, error of the initial state's gradient", "delta rule", bench_toy)]
    cases += [Case("Kernels alone, ms", gpu.FLAGSHIP, gpu.time_kernels)]
    for name, (options, targets) in RECURRENCES.items():  # those with targets first
        for T in card.lengths:
            sizes = "K = {K}, V = {V}".format(**options)
            run = partial(bench_recurrence, T=T, **options)
            cases.append(Case("Recurrences", f"{name}, {sizes}, T = {T}", run, targets))
    options, _ = RECURRENCES["gated delta rule"]
    for T in card.lengths:
        run = partial(bench_recurrence, T=T, packed=True, **options)
        cases.append(Case("Recurrences", f"{PACKED}, T = {T}", run, {"FlashQLA / ours": 1.0}))
    head = partial(gpu.head_loss, compare=compare)
    cases.append(Case("Decoding", gpu.FLAGSHIP, gpu.bench_decoding, {"eager / graph": 3.0}))
    cases.append(Case("Head loss", "beside torch", head, {"peer / ours": 1.0}))
    return [*cases, Case("Profile of a step, ms", gpu.FLAGSHIP, gpu.profile_step)]
