"""Training steps of the 340 M recipes, their profile, loss curves, and block sizes for this card."""

import importlib
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType

from gpu.card import ROOT, Card, Values
from gpu.results import Case, write

RECIPES = (  # those with targets first; Mamba is transformers' own class, without a kernel of ours
    "nala_gated_deltanet",
    "gated_deltanet",
    "transformer",
    "deltanet",
    "nala_deltanet",
    "gla",
    "retnet",
    "nala",
    "linear_attention",
    "mala",
    "pola",
    "soft",
    "hybrid",
    "nala_hybrid",
)
COMPILED = RECIPES[:3]  # those that are timed under torch.compile too
GATED_DELTANET = ("GatedDeltaNet", {"num_heads": 6, "head_dim": 128, "expand_v": 2})
DELTANET = ("DeltaNet", {"num_heads": 8, "expand_k": 1, "expand_v": 1})
PEERS: dict[str, tuple[str, dict]] = {  # recipe → fla's model
    "gated_deltanet": GATED_DELTANET,
    "nala_gated_deltanet": GATED_DELTANET,
    "deltanet": DELTANET,
    "nala_deltanet": DELTANET,
    "gla": ("GLA", {"num_heads": 4, "expand_k": 0.5, "expand_v": 1}),
    "retnet": ("RetNet", {"num_heads": 4, "expand_k": 1, "expand_v": 2, "intermediate_size": 1472}),
    "transformer": ("Llama", {}),
}


def build(card: Card, recipe: str, T: int) -> tuple[Any, Any]:
    """A recipe's model with random weights in fp32, and the recipe."""
    from transformers import AutoModelForCausalLM

    from nalanda.config.load import load_config
    from nalanda.config.model import build_model_config

    overrides = [f"data.seq_len={T}", f"train.tokens_per_step={8 * T}"]
    overrides += [f"model.{key}={value}" for key, value in card.smaller().items()]
    config = load_config(ROOT / "recipes" / f"{recipe}_340m.yaml", overrides)
    torch.manual_seed(0)
    with torch.device(card.device):
        return AutoModelForCausalLM.from_config(
            build_model_config(config), dtype=torch.float32
        ), config


def build_peer(card: Card, recipe: str, T: int) -> Any:
    """flash-linear-attention's model of the recipe's shape, with its own defaults.

    Its softmax model needs flash-attn, which machines may lack: transformers' Llama stands for it.
    """
    shape: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "vocab_size": 32000,
    }
    shape["max_position_embeddings"] = T
    if recipe == "transformer":
        models: Any = importlib.import_module("transformers")
        name, own = "Llama", {"num_attention_heads": 16}
    else:
        models = importlib.import_module("fla.models")
        name, own = PEERS[recipe]
    if name == "GatedDeltaNet":
        shape["num_hidden_layers"] = 21
    torch.manual_seed(0)
    shape |= own | card.smaller()
    with torch.device(card.device):
        return getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**shape))


def training(
    card: Card, model: Any, config: Any, T: int, ours: bool
) -> tuple[Callable[[], None], int]:
    """A training step like the trainer's, and its tokens: bf16 autocast, packed rows, clipping, AdamW."""
    from nalanda.train.loss import summed_loss
    from nalanda.train.optim import build_optimizer

    device, rows = torch.device(card.device), card.rows(T)
    optimizer, vocabulary = build_optimizer(model, config.optim), model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (rows, T), device=device)
    batch = {"input_ids": tokens, "labels": tokens, "cu_seqlens": torch.arange(rows + 1) * T}
    model.train()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            if ours:
                loss = summed_loss(model, batch, device) / tokens.numel()
            else:
                loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            model.parameters(), config.optim.max_grad_norm or float("inf")
        ).item()
        optimizer.step()
        optimizer.zero_grad()

    return step, tokens.numel()


def train_speed(card: Card, model: Any, config: Any, T: int, ours: bool) -> Values:
    from nalanda.train.flops import flops_per_token, peak_flops

    step, tokens = training(card, model, config, T, ours)
    for _ in range(1 if card.dry else 3):
        step()
    torch.cuda.reset_peak_memory_stats()
    rate = 1e3 * tokens / statistics.median(card.clock(step, [()], 1 if card.dry else 6))
    values = {"parameters": sum(p.numel() for p in model.parameters()), "tokens_per_second": rate}
    if ours:
        peak = peak_flops(torch.device(card.device), "bf16")[0]
        values["mfu"] = rate * flops_per_token(model, T)[0] / peak
    return values | {"memory": torch.cuda.max_memory_allocated() / 2**30}


def recurrences_by_fla() -> Any:
    """Our model with flash-linear-attention's chunk kernels; everything else, maps included, is ours."""
    from nalanda_kernels import KERNELS

    ops = ("delta_rule", "linear_attention")
    return mock.patch.dict(KERNELS, {op: {"triton": KERNELS[op]["fla"]} for op in ops})


def recipe_case(card: Card, *, recipe: str, T: int) -> Values:
    """Our model, eager and compiled, fla's model, and ours on fla's kernels if the map is NaLa's, in turn."""
    import nalanda_kernels

    values: Values = {}
    errors: dict[str, str] = {}

    def attempt(name: str, make: Callable[[], Values]) -> Values:
        card.keep(values)
        try:
            return make()
        except Exception as error:
            errors[name] = card.note(error)
            values["errors"] = errors
            return {}
        finally:
            card.release()

    def ours(compiled: bool = False) -> Values:
        model, config = build(card, recipe, T)
        if compiled:
            card.compile(model)
        return train_speed(card, model, config, T, True)

    def peer() -> Values:
        from nalanda.config.load import load_config

        config = load_config(ROOT / "recipes" / f"{recipe}_340m.yaml")
        return train_speed(card, build_peer(card, recipe, T), config, T, False)

    def beside(name: str, make: Callable[[], Values], ratio: str) -> None:
        found = attempt(name, make)
        values.update({name: found.get("tokens_per_second"), f"{name}_memory": found.get("memory")})
        values[f"{name}_parameters"] = found.get("parameters")
        if values[name] and values.get("tokens_per_second"):
            values[ratio] = values["tokens_per_second"] / values[name]

    nalanda_kernels._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught, nalanda_kernels.use_backend(card.backend):
        warnings.simplefilter("always")
        values |= attempt("ours", ours)
        values["fallbacks"] = (
            "; ".join(str(w.message) for w in caught if "triton cannot serve" in str(w.message))
            or None
        )
        if recipe in COMPILED and card.lengths()[0] == T:
            fast = attempt("compiled", partial(ours, compiled=True))
            values |= {"compiled": fast.get("tokens_per_second"), "compiled_mfu": fast.get("mfu")}
        if recipe in PEERS:
            beside("peer", peer, "ratio")
        if recipe.startswith("nala_"):
            with recurrences_by_fla():
                beside("fed", ours, "fed_ratio")
    return values


def profile_case(card: Card, *, recipe: str, T: int) -> Values:
    """Two steps under torch's profiler: a table by the device's time in profile.txt."""
    import nalanda_kernels
    from torch.profiler import ProfilerActivity, profile

    with nalanda_kernels.use_backend(card.backend):
        step, _ = training(card, *build(card, recipe, T), T, True)
        for _ in range(1 if card.dry else 3):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step()
            step()
            torch.cuda.synchronize()
    text = found.key_averages().table(
        sort_by="self_device_time_total", row_limit=80, max_name_column_width=70
    )
    write(card.output / "profile.txt", f"Two steps of {recipe}_340m, T = {T}\n{text}\n")
    return of_a_step(found.key_averages(), steps=2)


def of_a_step(rows: list[Any], steps: int) -> Values:
    """Times and launches of a profile's kernels; its rows of operators count their kernels again."""
    kernels = [x for x in rows if x.device_type == DeviceType.CUDA and not x.is_user_annotation]
    kernels.sort(key=lambda x: -x.self_device_time_total)
    return {
        "device": sum(x.self_device_time_total for x in kernels) / 1e3 / steps,
        "launches": sum(x.count for x in kernels) // steps,
        "top": ", ".join(
            f"{x.key[:40]} {x.self_device_time_total / 1e3 / steps:.2f}" for x in kernels[:5]
        ),
    }


def tune_case(card: Card) -> Values:
    """`nalanda bench kernels --tune`: the table is written after each change."""
    file, minutes = card.output / "blocks.json", (card.seconds - 20) / 60
    start = card.log.stat().st_size if card.log.exists() else 0
    code, said = card.python(
        ["-m", "nalanda_kernels.tune", "--json", str(file.resolve()), "--minutes", f"{minutes:.2f}"]
    )
    if code and not card.dry:
        raise RuntimeError(said)
    changes = card.log.read_bytes()[start:].decode(errors="replace").count("\n  ")
    return {"changes": changes, "file": file.name}


def curve_case(card: Card, *, precision: str) -> Values:
    """The demo recipe on the text that ships with Python, by each backend, from one seed."""
    steps = 2 if card.dry else 100
    with tempfile.TemporaryDirectory() as folder:
        curves = {}
        for backend in ("torch", "triton"):
            run = Path(folder) / backend
            settings = {
                "train.steps": steps,
                "train.precision": precision,
                "output_dir": run,
                "log.every": 1,
            }
            settings |= {"log.tensorboard": "false", "validation.every": 0, "checkpoint.every": 0}
            if card.dry:
                settings |= {
                    "schedule.warmup_steps": 1,
                    "data.seq_len": 64,
                    "train.tokens_per_step": 256,
                }
            command = [
                "recipes/pretrain.py",
                "recipes/demo.yaml",
                *(f"{k}={v}" for k, v in settings.items()),
            ]
            variables = {
                "NALANDA_BACKEND": "torch" if card.dry else backend
            }  # a child is not interpreted
            code, said = card.python(command, TOKENIZERS_PARALLELISM="false", **variables)
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
    recipes = ("nala_gated_deltanet", "transformer") if card.dry else RECIPES
    pairs = [(x, T) for T in card.lengths() for x in recipes if (x, T) != ("soft", 8192)]
    cases = []
    for recipe, T in sorted(pairs, key=lambda pair: pair[0] not in COMPILED):
        targets = {"compiled_mfu": 0.4} if recipe in COMPILED and card.lengths()[0] == T else {}
        if recipe == "nala_gated_deltanet":
            targets |= {"ratio": 0.95, "fed_ratio": 1.25}
        case = partial(recipe_case, recipe=recipe, T=T)
        cases.append(Case("Training", f"{recipe}_340m, T = {T}", case, targets, seconds=400.0))
    curves = [
        Case("Loss curves", f"demo.yaml, {precision}", partial(curve_case, precision=precision))
        for precision in (("bf16",) if card.dry else ("bf16", "fp32"))
    ]
    return [cases[0], curves[0], *cases[1:], *curves[1:]]


def profile_cases(card: Card) -> list[Case]:
    T = card.lengths()[0]
    run = partial(profile_case, recipe=RECIPES[0], T=T)
    return [Case("Profile", f"{RECIPES[0]}_340m, T = {T}", run, seconds=120.0)]


def tune_cases(card: Card) -> list[Case]:
    return [Case("Block sizes", "tune", tune_case, seconds=1800.0)]
