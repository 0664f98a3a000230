"""Measures what the papers say of entropy, signs, gradients, locality, inverses and speed, on trained models.

`measure_claims` trains small language models and appends a record for each of them to claims.jsonl.
`claims_report` holds the papers' claims, judges them, and writes figures and pages from these records alone.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from nalanda_eval.baselines import token_mixers
from torch import Tensor
from transformers import set_seed

from nalanda.common.errors import InputError, output_folder
from nalanda.common.versions import versions
from nalanda.config.load import section
from nalanda.config.schema import RunConfig
from nalanda.data.token_set import TokenSet
from nalanda.data.tokenizer import build_tokenizer
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.model.feature_maps import Pola
from nalanda.model.soft import gaussian_kernel, newton_inverse, pool_landmarks
from nalanda.train.build import build_model, open_batches
from nalanda.train.loss import count_labels, summed_loss
from nalanda.train.optim import build_optimizer, learning_rate
from nalanda_lab.analysis import local_score, positive_entropy, relative_std
from nalanda_lab.studies.paired import cpu_model
from nalanda_lab.studies.run import prepare_text, text_facts
from nalanda_lab.sweep import Record, follow, key, records

# The study's size. Sinusoidal positions and no short convolutions, as in the papers, for every mixer.
MODEL = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_heads": 3,
    "head_dim": 64,
    "intermediate_size": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "position_embedding": "sinusoidal",
    "scale_embeddings": True,
}
LM = {
    "tokenizer": {"train": "bpe", "vocab_size": 2048},
    "data": {"source": "python", "seq_len": 256, "workers": 0},
    "optim": {"lr": 4e-3},
    "schedule": {"warmup_steps": 30},
    "train": {"steps": 800, "tokens_per_step": 512, "micro_batch_size": 2, "precision": "fp32"},
}
NEWTON = {"landmarks": 32, "inverse": "newton", "iterations": 20, "ridge": 0.0}
SYSTEMS: dict[str, dict[str, Any]] = {
    "softmax": {"mixer": "softmax", "mixer_options": {"rope_theta": None}},
    "1+ELU": {"mixer": "linear_attention", "conv_size": 0},
    "ReLU": {"mixer": "linear_attention", "conv_size": 0, "feature_map": "relu"},
    "NaLa": {"mixer": "nala", "conv_size": 0},
    "NaLa, ‖q‖ unscaled": {"mixer": "nala", "conv_size": 0, "feature_map": "nala_paper"},
    "PolaFormer": {"mixer": "pola", "conv_size": 0},
    "MALA": {"mixer": "mala", "conv_size": 0},
    "MALA, literal": {"mixer": "mala", "conv_size": 0, "mixer_options": {"scale": "literal"}},
    "NormAttention": {"mixer": "norm_attention"},
    "TransNormer T2": {"mixer": ["diag_attention", "norm_attention"]},
    "SOFT": {"mixer": "soft", "conv_size": 0, "feature_map": "soft", "feature_map_options": NEWTON},
}
WITH_NORMS = ("softmax", "1+ELU", "ReLU", "NaLa", "NaLa, ‖q‖ unscaled", "PolaFormer", "MALA")
"""Systems whose entropy is measured against ‖q‖."""
TIMED = ("softmax", "1+ELU", "NormAttention", "TransNormer T2")
SCALES, BINS = (0.25, 0.5, 1.0, 2.0, 4.0), 8
"""Factors of all query norms, and groups of tokens by query norm."""
WINDOWS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
FULL: dict[str, Any] = {
    "seeds": (1, 2),
    "model": MODEL,
    "lm": LM,
    "rows": 16,
    "long": (4, 2048),
    "window": 50,
    "checkpoints": (0, 50, 100, 200, 400, 800),
    "lengths": (256, 512, 1024, 2048, 4096, 8192),
    "rounds": 7,
}
QUICK: dict[str, Any] = FULL | {
    "seeds": (1,),
    "rows": 2,
    "long": (2, 128),
    "window": 4,
    "checkpoints": (0, 2, 8),
    "lengths": (64, 128),
    "rounds": 2,
    "model": MODEL | {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "intermediate_size": 32},
    "lm": LM
    | {
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "data": LM["data"] | {"seq_len": 64},
        "train": LM["train"] | {"steps": 8, "tokens_per_step": 128},
    },
}
"""Sizes that only show that everything runs."""

# ------------------------------ measures


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Rank correlation over the last dimension, `[..., N]` twice to `[...]`; ties are ranked in order."""
    ranks = [v.argsort(-1).argsort(-1).double() for v in (x, y)]
    x, y = (r - r.mean(-1, keepdim=True) for r in ranks)
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


@contextlib.contextmanager
def changed_norms(mixers: Sequence[Any], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In this context ‖q‖ `[B, T, H, 1]`, as `mix` gets q, becomes `change(‖q‖)`; directions stay."""

    def heads(own: Callable, *args: Any) -> dict[str, Tensor]:
        found = own(*args)
        norm = found["q"].norm(dim=-1, keepdim=True)
        return found | {"q": found["q"] * (change(norm) / norm.clamp_min(1e-12))}

    for mixer in mixers:
        mixer.heads = partial(heads, mixer.heads)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.heads


def own(norm: Tensor) -> Tensor:
    return norm


def swapped(norm: Tensor) -> Tensor:
    """The norm at the same position of another row: p is swapped, and its distribution stays."""
    return norm.roll(1, 0)


def mean_norm(norm: Tensor) -> Tensor:
    """Each head's mean: p is constant."""
    return norm.mean((0, 1), keepdim=True).expand_as(norm)


def below_uniform(weights: Tensor) -> Tensor:
    """log n − H of the rows of the second half, in nats; row n has n weights, and 0 means equal ones.

    `[B, H, T, T]` to `[B, H, T/2]`.
    """
    T = weights.shape[-1]
    rows = torch.arange(T // 2, T, device=weights.device)
    return (rows + 1).log() - positive_entropy(weights[..., T // 2 :, :])


def measure_norms(mixer: Any, x: Tensor) -> dict[str, Any]:
    """Entropy of a mixer's weights against ‖q‖, for its inputs x `[B, T, D]`; every list is by head.

    correlation, swapped: Spearman's ρ of the entropy (less log n) and a token's own norm over the second half
    of a row, mean over rows, with the weights as they are and with swapped norms. bins, bins_swapped: mean
    entropy less log n of `BINS` groups of tokens by rising norm. scaled: the same for all tokens, norms times
    `SCALES`.
    norms: quantiles 5, 50 and 95 % of ‖q‖/√K.
    """
    norm = torch.empty(0)

    def keep(n: Tensor) -> Tensor:
        nonlocal norm
        norm = n
        return n

    def entropy(change: Callable[[Tensor], Tensor]) -> Tensor:
        with changed_norms([mixer], change):
            return -below_uniform(mixer.weights(x))

    plain, blind = entropy(keep), entropy(swapped)
    copies = plain.shape[1] // norm.shape[2]
    n = norm[:, x.shape[1] // 2 :, :, 0].transpose(1, 2).repeat_interleave(copies, 1)
    order = n.argsort(-1)[..., : n.shape[-1] // BINS * BINS]

    def binned(values: Tensor) -> list[list[float]]:
        return values.gather(-1, order).unflatten(-1, (BINS, -1)).nanmean((0, -1)).tolist()

    return {
        "correlation": spearman(n, plain).mean(0).tolist(),
        "swapped": spearman(n, blind).mean(0).tolist(),
        "bins": binned(plain),
        "bins_swapped": binned(blind),
        "scaled": [entropy(lambda m, c=c: c * m).nanmean((0, 2)).tolist() for c in SCALES],
        "norms": (n / mixer.K**0.5).quantile(n.new_tensor([0.05, 0.5, 0.95])).tolist(),
    }


@contextlib.contextmanager
def power_one(mixer: Any) -> Iterator[None]:
    """In this context PolaFormer's exponents are 1."""
    before = mixer.feature_map.w.detach().clone()
    mixer.feature_map.w.fill_(-1e4)
    yield
    mixer.feature_map.w.copy_(before)


def signs_by_row(weights: Tensor, rows: Sequence[int]) -> dict[str, list[float]]:
    """Share of negative weights and ‖w‖₁ of some rows of `[B, H, T, T]`, counted from 1: means over B, H."""
    cut = [weights[..., t - 1, :t] for t in rows]
    return {
        "negative": [(w < 0).double().mean().item() for w in cut],
        "norm": [w.double().abs().sum(-1).mean().item() for w in cut],
    }


def newton_residuals(Z: Tensor, iterations: int = 20) -> dict[str, list[float]]:
    """How well Newton's Y inverts A = κ(Z, Z), by matrix; Z `[..., m, K]`, Y computed in Z's dtype.

    ratio: ‖A‖₁/σ_min. weighted: ‖AYA − A‖/‖A‖ (Frobenius). inverse: ‖I − YA‖₂.
    """
    A = gaussian_kernel(Z, Z).flatten(0, -3)
    return inverse_residuals(A, newton_inverse(A, iterations))


def inverse_residuals(A: Tensor, Y: Tensor) -> dict[str, list[float]]:
    A, Y = A.double(), Y.double()
    one = torch.eye(A.shape[-1], dtype=A.dtype)
    return {
        "ratio": (A.abs().sum(-2).amax(-1) / torch.linalg.svdvals(A)[..., -1]).tolist(),
        "weighted": ((A @ Y @ A - A).norm(dim=(-2, -1)) / A.norm(dim=(-2, -1))).tolist(),
        "inverse": torch.linalg.matrix_norm(one - Y @ A, 2).tolist(),
    }


# ------------------------------ runs


def mixers_of(model: Any) -> list[Any]:
    return list(token_mixers(model))


@torch.no_grad()
def mixer_inputs(model: Any, rows: Tensor) -> list[Tensor]:
    """The input of every token mixer for int64 rows `[B, T]`."""
    found: list[Tensor] = []
    hooks = [
        m.register_forward_pre_hook(lambda _, args: found.append(args[0])) for m in mixers_of(model)
    ]
    model.base_model(rows, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def read_rows_of(text: Path, count: int, length: int) -> Tensor:
    """`count` evenly spaced rows of held-out tokens, int64 `[count, length]`."""
    tokens = TokenSet(text, "validation")
    if (last := tokens.tokens - length) < 0:
        raise InputError(f"{text}: {tokens.tokens} held-out tokens; {length} are needed")
    starts = [last * i // max(1, count - 1) for i in range(count)]
    return torch.stack([torch.as_tensor(tokens.read(s, s + length)).long() for s in starts])


@torch.no_grad()
def at_checkpoint(name: str, model: Any, rows: Tensor) -> dict[str, Any]:
    """What is measured over the course of training: by layer, locality, and for SOFT its inverses."""
    found: dict[str, Any] = {"local": []}
    for mixer, x in zip(mixers_of(model), mixer_inputs(model, rows), strict=True):
        found["local"].append(local_score(mixer.weights(x), WINDOWS).nanmean((0, 1)).tolist())
        if name == "SOFT":
            q = mixer.project(x[:4])["q"].unflatten(-1, (-1, mixer.K)).transpose(1, 2)
            learnt = newton_residuals(mixer.feature_map.landmarks)
            pooled = newton_residuals(pool_landmarks(q, 4))
            found.setdefault("newton", []).append({"learnt": learnt, "pooled": pooled})
    return found


@torch.no_grad()
def at_end(name: str, model: Any, rows: Tensor, long: Tensor) -> dict[str, Any]:
    """What is measured on a trained model (MALA's signs also on an untrained one)."""
    mixers, found = mixers_of(model), {}
    if name.startswith("MALA"):
        places = [t for t in (2**i for i in range(4, 20)) if t <= long.shape[1]]
        signs = [
            signs_by_row(m.weights(x), places)
            for m, x in zip(mixers, mixer_inputs(model, long), strict=True)
        ]
        found |= {"rows": places, "signs": signs}
    inputs = list(zip(mixers, mixer_inputs(model, rows), strict=True))
    if name in WITH_NORMS:
        found["norms"] = [measure_norms(mixer, x) for mixer, x in inputs]
        found["below_uniform"] = [
            below_uniform(m.weights(x)).nanmean((0, 2)).tolist() for m, x in inputs
        ]
        for label, change in (("own", own), ("swapped", swapped), ("mean", mean_norm)):
            with changed_norms(mixers, change):
                logits = model(rows, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.mT, rows[:, 1:], reduction="none")
            found[f"loss_{label}"] = loss.mean(-1).tolist()
    for mixer, x in inputs:
        if isinstance(getattr(mixer, "feature_map", None), Pola):
            w = mixer.feature_map.w.double()
            found.setdefault("exponents", []).append(
                (1 + mixer.feature_map.alpha * w.sigmoid()).mean().item()
            )
            with power_one(mixer):
                flat = below_uniform(mixer.weights(x)).nanmean((0, 2)).tolist()
            found.setdefault("below_uniform_p1", []).append(flat)
    return found


def claim_settings(size: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of all records of a size, runs first."""
    lm = {
        **size["lm"],
        "data": {k: v for k, v in size["lm"]["data"].items() if k not in ("source", "workers")},
    }
    same = {name: size[name] for name in ("rows", "long", "window", "checkpoints")} | lm
    runs = [
        {"system": name, "seed": seed, "model": size["model"] | keys, **same}
        for seed in size["seeds"]
        for name, keys in SYSTEMS.items()
    ]
    speed = {name: size["model"] | SYSTEMS[name] for name in TIMED}
    asked = [*runs, {"speed": speed, "lengths": size["lengths"], "rounds": size["rounds"]}]
    return json.loads(json.dumps(asked))


def train_and_measure(asked: dict[str, Any], lm: dict[str, Any], text: Path) -> Record:
    """Trains one system and returns its record: `settings`, losses, and the measures above.

    gradients: by layer and window of steps, the standard deviation over the mean of the norms of the mixer's
    parameter gradients, before clipping.
    """
    start, name = time.perf_counter(), asked["system"]
    recipe = lm | {"model": asked["model"], "seed": asked["seed"], "output_dir": str(text)}
    recipe |= {"data": lm["data"] | {"source": str(text)}, "tokenizer": str(text / "tokenizer")}
    config = section(RunConfig, recipe | {"validation": {"every": 0}}, "")
    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    set_seed(config.seed)
    model: Any = build_model(config, tokenizer)
    optimizer, mixers = build_optimizer(model, config.optim), mixers_of(model)
    rows, long = (
        read_rows_of(text, asked["rows"], config.data.seq_len),
        read_rows_of(text, *asked["long"]),
    )
    steps, checkpoints, norms, curve = config.train.steps, [], [], []
    untrained = at_end(name, model.eval(), rows, long) if name.startswith("MALA") else {}
    with contextlib.closing(open_batches(config, tokenizer)[0]) as batches:
        stream = iter(batches)
        for step in range(steps + 1):
            if step in asked["checkpoints"]:
                checkpoints.append({"step": step, **at_checkpoint(name, model.eval(), rows)})
            if step == steps:
                break
            model.train()
            batch = next(stream)
            loss = summed_loss(model, batch, model.device) / max(1, count_labels(batch))
            loss.backward()
            gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in mixers]
            norms.append([torch.nn.utils.get_total_norm(found) for found in gradients])
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
            for group in optimizer.param_groups:
                rate = learning_rate(step + 1, steps, config.optim.lr, config.schedule)
                group["lr"] = rate * group.get("lr_scale", 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
    windows = torch.tensor(norms).unflatten(0, (-1, asked["window"]))  # [windows, steps, layers]
    return rounded(
        {
            "settings": asked,
            "training_loss": fmean(curve[-asked["window"] :]),
            "gradients": torch.stack([relative_std(w) for w in windows]).T.tolist(),
            "checkpoints": checkpoints,
            **at_end(name, model.eval(), rows, long),
            **({"untrained": untrained["signs"]} if untrained else {}),
            "text": text_facts(text),
            **facts_of_run(start),
        }
    )


def time_mixers(asked: dict[str, Any]) -> Record:
    """The record of the speed table: CPU seconds by length, "forward" or "training", system and round.

    A round runs every system once, one row of random tokens through the layers, without embedding and head.
    """
    start, seconds = time.perf_counter(), {}
    models = {}
    for name, keys in asked["speed"].items():
        set_seed(0)
        models[name] = NalandaForCausalLM(NalandaConfig(vocab_size=2048, **keys)).base_model
    for length in asked["lengths"]:
        tokens = torch.randint(2048, (1, length))
        found = seconds[str(length)] = {
            kind: {name: [] for name in models} for kind in ("forward", "training")
        }
        for i in range(asked["rounds"] + 1):
            for name, model in models.items():
                for kind, taken in found.items():
                    with torch.set_grad_enabled(kind == "training"):
                        began = time.process_time()
                        out = model(tokens, use_cache=False).last_hidden_state
                        if kind == "training":
                            out.mean().backward()
                    if i:  # the first round warms up
                        taken[name].append(time.process_time() - began)
                model.zero_grad()
    return rounded({"settings": asked, "cpu_seconds": seconds, **facts_of_run(start)})


def facts_of_run(start: float) -> dict[str, Any]:
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def rounded(value: Any) -> Any:
    """The value with 6 significant digits, and None for NaN and infinities."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def claims_folder(directory: str | None = None, *, quick: bool = False) -> Path:
    """recipes/study/claims of a checkout, otherwise runs/claims; runs/claims-quick if `quick`."""
    study = Path("recipes/study")
    usual = study / "claims" if (study / "study.yaml").is_file() else Path("runs/claims")
    return Path(directory) if directory else Path("runs/claims-quick") if quick else usual


def measure_claims(directory: Path, *, text: str | None = None, quick: bool = False) -> None:
    """Trains and measures what claims.jsonl in `directory` has no record of, in one process of one thread.

    text: a corpus, as `data.source` of a recipe; by default Python's documentation.
    """
    size, file = QUICK if quick else FULL, output_folder(directory, "DIR") / "claims.jsonl"
    known, asked = records(file), claim_settings(size)
    if all(key(settings) in known for settings in asked):
        return
    prepared = prepare_text(size["lm"], text, directory / "work", 1)
    for record in known.values():
        if record.get("text", text_facts(prepared)) != text_facts(prepared):
            raise InputError(
                f"{file}: has runs on another text, {record['text']['name']}; give that or another DIR"
            )
    jobs = {
        key(s): partial(time_mixers, s)
        if "speed" in s
        else partial(train_and_measure, s, size["lm"], prepared)
        for s in asked
    }
    follow(jobs, file, 1, describe_claim_run)


def describe_claim_run(record: Record) -> str:
    asked = record["settings"]
    if "speed" in asked:
        return f"speed, {record['seconds']:.0f} s"
    name = f"{asked['system']}, seed {asked['seed']}"
    return f"{name}: {record['training_loss']:.3f} nats, {record['seconds']:.0f} s"
