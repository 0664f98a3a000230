"""Times of the ops, beside flash-linear-attention, FlashQLA, FlashAttention and the card's limits."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.card import Card, Values
from gpu.results import Case
from gpu.train import build

os.environ["FLA_FLASH_QLA"] = "0"  # the peer is fla's own kernel, not FlashQLA behind its name


def lift_guard() -> str | None:
    """Lets the peer run where it refuses, to time it; its results there are wrong (its issue 640).

    Returns a note for readers of the figures, or None.
    """
    try:
        chunk_o: Any = importlib.import_module("fla.ops.common.chunk_o")
    except ImportError:
        return "no flash-linear-attention"
    if getattr(chunk_o, "IS_NVIDIA_HOPPER", False) and not getattr(
        chunk_o, "TRITON_ABOVE_3_7_1", True
    ):
        chunk_o.TRITON_ABOVE_3_7_1 = True
        return "fla refuses its gated backward under this Triton: timed with that check lifted"
    return None


def torch_map(
    q: Tensor, k: Tensor, feature_map=None, qk_norm: str | None = None
) -> tuple[Tensor, Tensor]:
    """The map's own code, without recomputation in the backward."""
    q_, k_ = q.float(), k.float()
    if feature_map is not None:
        q_, k_ = feature_map(q_, k_)
    if qk_norm == "l2":
        q_, k_ = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q_, k_))
    return q_.to(q.dtype), k_.to(k.dtype)


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, *, block_size: int) -> Tensor:
    """FlashAttention, if torch has it, with blocks as batch rows; T must be a multiple of block_size."""
    rows = [x.unflatten(1, (-1, block_size)).flatten(0, 1).transpose(1, 2) for x in (q, k, v)]
    return causal_attention(*rows).transpose(1, 2).reshape(v.shape)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def draw(
    card: Card, seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    generator = torch.Generator(card.device).manual_seed(seed)
    return [
        torch.randn(s, generator=generator, device=card.device).to(dtype).requires_grad_()
        for s in shapes
    ]


def compare(card: Card, sides: dict[str, Callable], inputs: list[tuple], flops: float) -> Values:
    """Times of forward, and of forward plus backward, of functions from inputs to one or more tensors.

    `ratio` compares `ours` with the faster of `peer` and `peer_fused`. Inputs may require gradients.
    flops: of the forward.
    """
    found, errors = {}, {}
    for name, function in card.chosen(sides).items():
        try:
            found[name] = outputs(function, inputs[0])
        except Exception as error:
            errors[name] = card.note(error)
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
        values |= {"qla_ratio": slow["flash_qla"] / slow["ours"]} if "flash_qla" in slow else {}
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
        H, K, V = 1, 16, 16
    B, delta = card.rows(T), kind.endswith("delta")
    norm = "l2" if delta else None
    phi: Any = feature_map and build_feature_map(feature_map, num_heads=H, head_dim=K).to(
        card.device
    )
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
        if kind == "delta":
            return fla("delta_rule").chunk_delta_rule(
                q, k, v, beta, use_qk_l2norm_in_kernel=normed
            )[0]
        if kind == "gated_delta":
            rule = fla("gated_delta_rule").chunk_gated_delta_rule
            return rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=normed)[0]
        if kind == "vector_linear":
            return fla("gla").chunk_gla(q, k, v, g)[0]
        return getattr(fla("simple_gla"), f"{'fused_' * fused}chunk_simple_gla")(q, k, v, g)[0]

    def fed(map_features: Callable, q, k, *rest, **options: bool) -> Tensor:
        q, k = map_features(q, k, feature_map=phi, qk_norm=norm)
        return theirs(q, k, *rest, **options)

    ahead = (
        partial(theirs, normed=delta) if phi is None else partial(fed, card.kernel("map_features"))
    )
    sides: dict[str, Callable] = {"ours": ours, "peer": ahead}
    if kind in ("linear", "gated_linear"):
        sides["peer_fused"] = partial(ahead, fused=True)
    if phi is not None:
        sides["fed_torch"] = partial(fed, torch_map)
    if phi is not None and delta:
        sides["peer_silu"] = lambda q, k, *rest: theirs(F.silu(q), F.silu(k), *rest, normed=True)
    if phi is None and kind == "delta":
        sides["flash_attention"] = lambda q, k, v, *_: flash_attention(q, k, v)
    if phi is None and kind == "gated_delta":
        sides["flash_qla"] = lambda *x: card.kernel("delta_rule", "flash_qla")(*x, qk_norm=norm)[0]
    width = phi.feature_dim if phi else K
    flops = B * T * (ops.delta_rule_flops if delta else ops.linear_attention_flops)(H, width, V)
    return compare(card, sides, card.sets(make), flops)


def fla(name: str) -> Any:
    return importlib.import_module(f"fla.ops.{name}")


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def map_case(card: Card, *, T: int, name: str) -> Values:
    from nalanda.model.feature_maps import build_feature_map

    (H, K), B = (1, 16) if card.dry else (8, 128), card.rows(T)
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
    D, B = 16 if card.dry else 1536, card.rows(T)  # v of the flagship: 6 heads of 256

    def peer(x: Tensor, weight: Tensor) -> Tensor:
        conv = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        return conv(x, weight, activation="silu")[0]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return card.kernel("short_convs")([x], [weight], activations=["silu"])[0][0]

    sides = {"ours": ours, "peer": peer}
    return compare(
        card, sides, card.sets(lambda i: tuple(draw(card, i, (B, T, D), (D, 4)))), 8.0 * B * T * D
    )


def block_case(card: Card, *, T: int) -> Values:
    (H, K, block), B = (1, 16, 16) if card.dry else (8, 128, 64), card.rows(T)
    sides = {
        "ours": partial(card.kernel("block_attention"), block_size=block),
        "peer": partial(blockwise_attention, block_size=block),
    }
    flops = 2.0 * B * T * H * 2 * K * block / 2
    return compare(
        card, sides, card.sets(lambda i: tuple(draw(card, i, *[(B, T, H, K)] * 3))), flops
    )


@torch.no_grad()
def decode_case(card: Card, *, batch: int) -> Values:
    """The flagship in bf16: greedy decoding after a prompt of 64 tokens, with the calls of `generate`."""
    import nalanda_kernels

    from nalanda.model import decoding_graphs

    with nalanda_kernels.use_backend(card.backend):
        model, _ = build(card, "nala_gated_deltanet", 2048)
        model = model.to(torch.bfloat16).eval()
        prompt = torch.randint(0, model.config.vocab_size, (batch, 64), device=card.device)
        out = model(prompt, use_cache=True)

        def step() -> None:
            nonlocal out
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)

        values: Values = {"tokens_per_second": 1e3 * batch / card.wall(step)}
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)
        states = 2 * out.past_key_values.nbytes  # read and written
        values["limit"] = batch * card.bandwidth / weights
        values["limit_with_states"] = batch * card.bandwidth / (weights + states)
        values["share"] = values["tokens_per_second"] / values["limit"]
        card.keep(values)
        try:
            with decoding_graphs(model):
                taken = card.wall(step)
            if out.past_key_values.graphs is None and not card.dry:
                raise RuntimeError("no graph was captured")
            values["graphed"] = 1e3 * batch / taken
            values["graphed_share"] = values["graphed"] / values["limit"]
        except Exception as error:
            values["errors"] = {"as a CUDA graph": card.note(error)}
    return values


def bench_cases(card: Card) -> list[Case]:
    cases = [
        Case("Ceilings", "copy, GB/s read and written", lambda c: {"value": c.bandwidth / 1e9}),
        Case("Ceilings", "bf16 matrix product, TFLOP/s", lambda c: {"value": c.rate / 1e12}),
    ]
    flagship = {"H": 6, "K": 128, "V": 256, "feature_map": "nala"}
    plain = {"H": 8, "K": 128, "V": 128}
    jobs = (
        (
            "gated delta rule, K = V = 128",
            {"kind": "gated_delta", **plain},
            {"ratio": 1.2, "qla_ratio": 1.0},
        ),
        ("delta rule, K = V = 128", {"kind": "delta", **plain}, {"ratio": 1.2}),
        (
            "gated delta rule, NaLa 128 → 256, V = 256",
            {"kind": "gated_delta", **flagship},
            {"ratio": 1.2},
        ),
        ("delta rule, NaLa 128 → 256, V = 256", {"kind": "delta", **flagship}, {"ratio": 1.2}),
        ("linear attention, K = V = 128", {"kind": "linear", **plain}, {}),
        (
            "linear attention, NaLa 128 → 256, V = 128",
            {"kind": "linear", **plain, "feature_map": "nala"},
            {},
        ),
        ("retention, K = V = 128", {"kind": "gated_linear", **plain}, {}),
        ("GLA, K = 128, V = 256", {"kind": "vector_linear", "H": 4, "K": 128, "V": 256}, {}),
    )
    for T in card.lengths():
        for name, options, targets in jobs:
            case = partial(recurrence, T=T, **options)
            cases.append(Case("Recurrences", f"{name}, T = {T}", case, targets))
    for batch in (1, 2) if card.dry else (1, 64):
        case, goal = partial(decode_case, batch=batch), {"graphed_share": 0.6} if batch == 1 else {}
        cases.append(Case("Decoding", f"NaLa + Gated DeltaNet, batch {batch}", case, goal))
    for T in card.lengths():
        others: dict[str, Callable[[Card], Values]] = {
            f"{name} and L2 norm, K = 128 (peer: torch)": partial(map_case, T=T, name=name)
            for name in ("nala", "pola", "silu")
        }
        others["convolution and SiLU, D = 1536"] = partial(conv_case, T=T)
        others["attention in blocks of 64 (peer: FlashAttention)"] = partial(block_case, T=T)
        cases += [Case("Other kernels", f"{name}, T = {T}", case) for name, case in others.items()]
    return [
        *cases[:2],
        *sorted(cases[2:], key=lambda case: not case.targets),
    ]  # those with targets first
