"""Measures of the 340 M flagship on a GPU: a decoded token, the head's loss, and the kernels of a training step.

`tools/gpu` calls them. card: its device, clock and folder; a dry one is a CPU, with a model of toy size.
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from nalanda_kernels import use_backend, watch
from nalanda_kernels.triton import recurrence
from torch import Tensor
from torch.profiler import profile

from nalanda.config.load import load_config
from nalanda.model import NalandaConfig, NalandaForCausalLM, decoding
from nalanda.model.feature_maps import build_feature_map
from nalanda.model.loss import linear_cross_entropy
from nalanda.train.parallel import compile_blocks

FLAGSHIP = "nala_gated_deltanet_340m"
TOY = {"num_hidden_layers": 1, "hidden_size": 32, "head_dim": 16, "vocab_size": 64}
STEPS = 2  # of a profile
SHOWN = 8
"""Kernels of a profile that become figures; the file has more."""


def flagship(card: Any) -> NalandaForCausalLM:
    sizes: dict[str, Any] = load_config(FLAGSHIP).model | (TOY if card.dry else {})
    torch.manual_seed(0)
    model: Any = NalandaForCausalLM(NalandaConfig(**sizes))
    return model.to(card.device)


def bench_decoding(card: Any) -> dict[str, Any]:
    """Milliseconds of a token at batch 1 in bf16, as a captured graph and eager, beside the bytes of the weights."""
    model = flagship(card).bfloat16().eval()
    weights = sum(x.nbytes for x in model.parameters())
    values: dict[str, Any] = {"weights, MB": weights / 1e6}
    for name, switch in (("eager", "0"), ("graph", "1")):
        os.environ[decoding.ENVIRONMENT] = switch
        with torch.inference_mode(), decoding.choose_decoder(model):
            token = torch.ones(1, 1, dtype=torch.int64, device=card.device)
            cache = model(token.expand(1, 64), use_cache=True).past_key_values
            step = partial(model, past_key_values=cache, use_cache=True)
            for _ in range(decoding.EAGER_TOKENS + 2):
                step(token)
            values[f"{name}, ms"] = statistics.median(card.clock(step, [(token,)], calls=50))
            values["captured"] = "yes" if decoding.DecoderChoice.by_model.get(model) else "no"
    values["eager / graph"] = values["eager, ms"] / values["graph, ms"]
    return values


def head_loss(card: Any, compare: Callable[..., dict]) -> dict[str, Any]:
    """Times of the head's loss by our kernel and by torch. compare: times functions of the same inputs."""
    D, V = (16, 64) if card.dry else (1024, 32000)
    labels = torch.randint(V, (card.tokens,), device=card.device)

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator(card.device).manual_seed(seed)
        shapes = (card.tokens, D), (V, D)
        inputs = [torch.randn(x, generator=generator, device=card.device) / 8 for x in shapes]
        return tuple(x.bfloat16().requires_grad_() for x in inputs)

    def call(backend: str, h: Tensor, weight: Tensor) -> Tensor:
        with use_backend(backend), watch() as attempts:
            loss = linear_cross_entropy(h, weight, labels)
        if attempts and (served := list(attempts)[-1].backend) != backend:
            raise RuntimeError(f"cross_entropy: {served} served, {backend} was asked")
        return loss[None].bfloat16()  # `compare` takes outputs in bf16 with a dimension

    sides = {"ours": partial(call, "triton"), "peer": partial(call, "torch")}
    return compare(card, sides, card.input_sets(make))


def time_kernels(card: Any) -> dict[str, float]:
    """Milliseconds of each kernel of the flagship's recurrence by itself, forward and backward; 8 × 2048 tokens."""
    B, T, H, K, V = (1, 32, 1, 16, 16) if card.dry else (8, 2048, 6, 128, 256)
    normal = partial(torch.randn, device=card.device)
    inputs = [normal(B, T, H, size).bfloat16() for size in (K, K, V)]
    inputs += [normal(B, T, H).sigmoid(), F.logsigmoid(normal(B, T, H) + 3)]
    inputs = [x.requires_grad_() for x in inputs]
    phi: Any = build_feature_map("nala", num_heads=H, head_dim=K).to(card.device)

    launch, runs = recurrence._launch, {}

    def note(kernel: Any, *arguments: Any, **options: Any) -> None:
        runs[kernel.__name__] = partial(launch, kernel, *arguments, **options)
        launch(kernel, *arguments, **options)

    with mock.patch.object(recurrence, "_launch", note):
        o = recurrence.delta_rule(*inputs, feature_map=phi, qk_norm="l2")[0]
        torch.autograd.grad(o, inputs, torch.randn_like(o))
    return {name: statistics.median(card.clock(run, [()], calls=20)) for name, run in runs.items()}


def profile_step(card: Any) -> dict[str, float]:
    """Milliseconds of a packed micro-batch, compiled by blocks: the wall's, the device's, and the longest kernels'.

    The device is idle for the rest of the wall's time. profile.txt has the table.
    """
    model = flagship(card).train()
    # On a CPU, where a bundle is made, all activations would not fit.
    on_card = card.device == "cuda"
    if on_card:
        compile_blocks(model.model.layers)
    count = card.tokens if on_card else min(card.tokens, 2048)
    tokens = torch.randint(64, (1, count), device=card.device)
    bounds = torch.tensor([0, count // 4, count])

    def step() -> None:
        with torch.autocast(torch.device(card.device).type, torch.bfloat16):
            model(tokens, labels=tokens, cu_seqlens=bounds, use_cache=False).loss.backward()

    steps = STEPS if on_card else 1
    for _ in range(3 if on_card else 1):  # compiles
        step()
    card.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    card.synchronize()
    wall = 1e3 * (time.perf_counter() - start) / steps
    with profile() as profiled:
        for _ in range(steps):
            step()
        card.synchronize()
    averages = profiled.key_averages()
    key = "self_device_time_total" if on_card else "self_cpu_time_total"
    (card.output / "profile.txt").write_text(averages.table(sort_by=key, row_limit=60))
    times = {each.key: getattr(each, key) / 1e3 / steps for each in averages}
    if on_card:  # an operator has its kernels' time a second time
        kernels = [each for each in averages if str(each.device_type).endswith("CUDA")]
        times = {each.key: getattr(each, key) / 1e3 / steps for each in kernels}
    launches = sum(each.count for each in averages if each.key in times) / steps
    longest = sorted(times, key=lambda name: times[name], reverse=True)[:SHOWN]
    whole = {"wall": wall, "busy": sum(times.values()), "launches": launches}
    return whole | {name[:48]: times[name] for name in longest}
