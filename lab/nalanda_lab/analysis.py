"""Measures a model's token mixers on a text: entropy, sign, locality and rank of their weights, q and k.

A mixer multiplies the values by a matrix of weights `w[t, j]`, j ≤ t: `weights` of our mixers, which is exact
because each is linear in v, or a transformer's attention probabilities. The measures take such causal
matrices, `[..., T, T]`, and know no model.
"""

import json
import math
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from nalanda_eval.baselines import token_mixers
from nalanda_eval.perplexity import documents
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from nalanda.common.errors import InputError, output_folder
from nalanda.common.progress import Progress
from nalanda.common.text import without_infinities
from nalanda.common.versions import versions
from nalanda.config.bounds import check_seed
from nalanda.config.load import is_recipe, load_config
from nalanda.config.schema import DataConfig
from nalanda.data.tokenizer import build_tokenizer
from nalanda.inference.load import bos_token, choose_device, load_model
from nalanda.model.sequences import Sequences
from nalanda.train.build import build_model
from nalanda.train.estimate import meta_model
from nalanda.train.needs import check_weights_fit
from nalanda.train.resolve import find_run, resolve
from nalanda_lab.plots import draw_analysis, print_analysis

WINDOWS = [i / 50 for i in range(51)]
"""Windows of the local score, as shares of the length."""
BATCHES = 8
"""Number of batches for the spread of gradients."""

# ------------------------------ measures


def positive_entropy(weights: Tensor) -> Tensor:
    """Positive-sequence entropy (NaLaFormer) in nats, of each row's positive entries scaled to sum 1.

    `[..., T]` to `[...]`; NaN for a row without a positive entry.
    """
    p = weights.clamp(min=0)
    return torch.special.entr(p / p.sum(-1, keepdim=True)).sum(-1)


def effective_rank(matrix: Tensor) -> Tensor:
    """exp of the entropy of the singular values scaled to sum 1 (Roy & Vetterli, 2007).

    `[..., M, N]` to `[...]`.
    """
    return positive_entropy(torch.linalg.svdvals(matrix)).exp()


def share_of_negatives(weights: Tensor) -> Tensor:
    """Share of negative entries among those at j ≤ t: `[..., T, T]` to `[...]`."""
    T = weights.shape[-1]
    return (weights.tril() < 0).sum((-2, -1)) / (T * (T + 1) / 2)


def local_score(weights: Tensor, windows: Iterable[float] = WINDOWS) -> Tensor:
    """Locally accumulated attention score (TransNormer): `[..., T, T]` to `[..., R]`, R = len(windows).

    For each r in `windows` it is the share of a row's |w| at keys at most r·T tokens from the query, averaged
    over rows. It rises with r to 1 at r = 1. Rows of zeros do not count.
    """
    T = weights.shape[-1]
    sizes = weights.abs()
    total = sizes.sum(-1, keepdim=True)  # [..., T, 1]
    shares = torch.where(total > 0, sizes / total, 0.0)
    reaches = [math.floor(r * T + 1e-9) for r in windows]  # in tokens
    inside = [shares.triu(-reach).tril(reach).sum((-2, -1)) for reach in reaches]
    return torch.stack(inside, -1) / (total > 0).sum(-2)


def relative_std(values: Tensor) -> Tensor:
    """Standard deviation over mean along the first dimension, which needs at least two values."""
    return values.std(0) / values.mean(0)


def measure_layer(weights: Tensor) -> dict[str, Any]:
    """Measures of one layer's weights `[B, H, T, T]`: means over texts, rows and heads, and by head."""
    if weights.dtype != torch.float64:
        weights = weights.float()
    heads = {
        "entropy": positive_entropy(weights).nanmean((0, -1)),
        "negative_share": share_of_negatives(weights).mean(0),
        "effective_rank": effective_rank(weights).nanmean(0),
    }
    return {
        **{name: values.nanmean().item() for name, values in heads.items()},
        "local_score": local_score(weights).nanmean((0, 1)).tolist(),
        "heads": {name: values.tolist() for name, values in heads.items()},
    }


def measure_signs(q: Tensor, k: Tensor, weights: Tensor) -> dict[str, float]:
    """How often an entry of q and the same one of k agree in sign: NaLaFormer's figure of strong pairs.

    q and k: `[B, H, T, K]`; weights: `[B, H, T, T]`. A strong pair is a query and the key of its largest weight.
    The other pairs are those that `weights` leaves in, j ≤ t. A map that drops negative entries loses the
    products of two negative ones.
    """
    K, seen = q.shape[-1], torch.ones_like(weights[0, 0], dtype=torch.bool).tril()
    partner = k.take_along_dim(weights.argmax(-1)[..., None], 2)  # [B, H, T, K]
    agreement = (q.sign() @ k.sign().mT / K + 1) / 2  # [B, H, T, T], where no entry is 0
    return {
        "equal in strong pairs": (q * partner > 0).float().mean().item(),
        "equal in all pairs": agreement[..., seen].mean().item(),
        "both negative in strong pairs": ((q < 0) & (partner < 0)).float().mean().item(),
    }


def measure_key_norms(k: Tensor, phi_k: Tensor) -> tuple[dict[str, float], float]:
    """Spreads of the lengths of keys and of their features over tokens, and the correlation of both lengths.

    k and phi_k: `[B, T, H, ·]`. Spreads are std over mean for each head. NaLaFormer calls it norm consistency
    where a map leaves the order of norms, so that the correlation is near 1.
    """
    norms = torch.stack([x.norm(dim=-1).flatten(0, 1) for x in (k, phi_k)])  # [2, B·T, H]
    centred = norms - norms.mean(1, keepdim=True)
    correlation = F.cosine_similarity(centred[0], centred[1], dim=0)
    spread, mapped_spread = (norms.std(1) / norms.mean(1)).nanmean(-1).tolist()
    spreads = {"spread of ‖k‖": spread, "spread of ‖φ(k)‖": mapped_spread}
    return spreads, correlation.nanmean().item()


# ------------------------------ measures of a model


def measure_pairs(mixer: Any, x: Tensor, weights: Tensor) -> dict[str, Any]:
    """`measure_signs` and `measure_key_norms` of a mixer of ours with input x `[B, T, D]`."""
    inputs, _ = mixer.inputs(x, Sequences(bidirectional=mixer.bidirectional), None)
    q, k, steps = inputs.q.float(), inputs.k.float(), mixer.rule.steps
    count = weights.shape[1] // steps  # heads of one step
    k = k[
        :, :, -steps * q.shape[2] :
    ]  # the keys that are written; RWKV-7 has others that are erased

    # Heads of q and k stand beside those of the weights, step by step: [B, steps·count, T, K].
    of_q = q.repeat_interleave(count // q.shape[2], 2).repeat(1, 1, steps, 1)
    of_k = k.unflatten(2, (steps, -1))
    of_k = of_k.repeat_interleave(count // of_k.shape[3], 3).flatten(2, 3)
    signs = measure_signs(of_q.transpose(1, 2), of_k.transpose(1, 2), weights)

    phi_k = k
    if mixer.rule.map is not None:
        # The map of a head is the same in each of its steps.
        phi_k = torch.cat([mixer.feature_map(q, each)[1] for each in k.chunk(steps, 2)], 2)
    norms, correlation = measure_key_norms(k, phi_k)
    return {"signs": signs, "key_norms": norms, "key_norm_correlation": correlation}


@torch.no_grad()
def layer_measures(model: PreTrainedModel, rows: Tensor) -> list[dict[str, Any]]:
    """`measure_layer` of every layer on the texts `rows`, int64 `[B, T]`; {} for a layer without weights.

    Ours have `measure_pairs` too, because a layer of transformers does not give its q and k.
    Each layer's `[B, H, T, T]` is measured and dropped before the next layer's exists.
    """
    mixers = token_mixers(model)
    measures: dict[nn.Module, dict[str, Any]] = {}
    square = (rows.shape[1], rows.shape[1])

    def measure_ours(mixer: Any, args: tuple) -> None:
        weights = mixer.weights(args[0])
        measures[mixer] = measure_layer(weights) | measure_pairs(mixer, args[0], weights)

    def measure_output(mixer: nn.Module, args: tuple, output: Any) -> None:
        for t in output if isinstance(output, tuple) else ():
            if isinstance(t, Tensor) and t.dim() == 4 and t.shape[-2:] == square:
                measures[mixer] = measure_layer(t)

    with ExitStack() as hooks:
        if model.config.model_type == "nalanda":
            for mixer in mixers:
                hooks.enter_context(mixer.register_forward_pre_hook(measure_ours))
        else:
            model.set_attn_implementation("eager")  # other implementations do not form the weights
            for mixer in mixers:
                hooks.enter_context(mixer.register_forward_hook(measure_output))
        model.base_model(rows, use_cache=False)
    return [measures.get(mixer, {}) for mixer in mixers]


def projection_ranks(mixer: nn.Module) -> dict[str, float]:
    """Effective rank of a mixer's q, k and v projections, or of all its matrices if it has none of them."""
    matrices = {}
    for name, parameter in mixer.named_parameters():
        if name.endswith(".weight") and parameter.dim() == 2:
            matrices[name.removesuffix(".weight")] = parameter
    usual = {name: matrices[name] for name in ("q_proj", "k_proj", "v_proj") if name in matrices}
    return {
        name: effective_rank(matrix.detach().float()).item()
        for name, matrix in (usual or matrices).items()
    }


def gradient_spread(model: PreTrainedModel, rows: Tensor) -> list[dict[str, float]]:
    """Relative standard deviation of gradient norms over batches of one row each, layer by layer.

    TransNormer compares attentions by this deviation in the course of training; here the weights are fixed
    and the batches differ. The L2 norms are of the loss's gradient in the mixer's output, in the mixer's
    parameters, and in the other parameters of its layer.
    """
    mixers = token_mixers(model)
    layers = [next(m for m in model.modules() if mixer in set(m.children())) for mixer in mixers]
    norms = torch.zeros(len(rows), len(mixers), 3, dtype=torch.float64)

    def store_norm(entry: Tensor, gradient: Tensor) -> None:
        entry.fill_(gradient.norm().item())

    def watch(entry: Tensor, mixer: nn.Module, args: tuple, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        output.register_hook(partial(store_norm, entry))

    for row, norms_of_row in zip(rows, norms, strict=True):
        model.zero_grad()
        with ExitStack() as hooks:
            for i, mixer in enumerate(mixers):
                hooks.enter_context(mixer.register_forward_hook(partial(watch, norms_of_row[i, 0])))
            model(input_ids=row[None], labels=row[None], use_cache=False).loss.backward()
        for i, (layer, mixer) in enumerate(zip(layers, mixers, strict=True)):
            of_mixer = set(mixer.parameters())
            inside, outside = [], []
            for p in layer.parameters():
                if p.grad is not None:
                    (inside if p in of_mixer else outside).append(p.grad)
            norms_of_row[i, 1] = torch.nn.utils.get_total_norm(inside)
            norms_of_row[i, 2] = torch.nn.utils.get_total_norm(outside)
    model.zero_grad()
    names = ("mixer_output", "mixer_parameters", "other_parameters")
    return [dict(zip(names, values, strict=True)) for values in relative_std(norms).tolist()]


# ------------------------------ the command


def analyze(
    name: str,
    overrides: list[str] | None = None,
    *,
    text: str | None = None,
    length: int = 256,
    rows: int = 4,
    output: str | None = None,
    seed: int = 0,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Measures a model on a text, writes analysis.json and figures; returns the result and the directory.

    Args:
        name: a checkpoint directory, a hub id, or a recipe: the model that its run trained, or else a freshly
            initialised one.
        overrides: `section.key=value` for a recipe, whose model is then freshly initialised.
        text: a file; by default held-out documents of the `python` corpus.
        length: tokens in a row; weights are `[rows, heads, length, length]`, one layer at a time.
        rows: rows that the weights are averaged over; gradients take 8, if the text has them.
        output: a directory; by default `analysis` in the run's folder or beside the checkpoint, or below
            `runs` for a model of the hub.
        seed: of a fresh model's weights and of the documents' order.

    Raises:
        InputError: a missing model, recipe or file, or a text that is too short.
    """
    if length < 2 or rows < 1:
        raise InputError(f"--length {length} --rows {rows}: take at least 2 tokens and 1 row")
    check_seed(seed, "--seed")
    model, tokenizer, title, directory = open_model(
        name, overrides, seed, device, trust_remote_code
    )
    directory = output_folder(output or directory, "--output")
    config: Any = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if config.model_type != "nalanda" and longest and length > longest:
        raise InputError(f"--length {length}: is more than the model's {longest} positions")
    try:
        mixers = token_mixers(model)
    except ValueError as error:
        raise InputError(str(error)) from None
    tokens = text_rows(model, tokenizer, text, length, rows, seed).to(model.device)

    measures = layer_measures(model, tokens[:rows])
    spreads = gradient_spread(model, tokens)
    names = [type(mixer).__name__ for mixer in mixers]
    if config.model_type == "nalanda":
        names = config.layer_mixers
    layers: list[dict[str, Any]] = [
        {
            "layer": i,
            "mixer": names[i],
            **measures[i],
            "projections": projection_ranks(mixer),
            "gradients": spreads[i],
        }
        for i, mixer in enumerate(mixers)
    ]

    notes = []
    if lacking := [str(layer["layer"]) for layer in layers if "entropy" not in layer]:
        where = "any layer" if len(lacking) == len(layers) else f"layers {', '.join(lacking)}"
        notes.append(f"no attention weights in {where}: only gradients and projections")
    if any(layer.get("negative_share") for layer in layers):
        notes.append(
            "weights of both signs: entropy is of the positive ones, the local score of |w|"
        )

    uniform = torch.ones(1, 1, length, length, dtype=torch.float64).tril()
    result = {
        "model": title,
        "model_type": config.model_type,
        "text": text or "python, held out",
        "length": length,
        "rows": rows,
        "gradient_batches": len(tokens),
        "seed": seed,
        "versions": versions(),
        "notes": notes,
        "windows": WINDOWS,
        "uniform": measure_layer(uniform / uniform.sum(-1, keepdim=True)),
        "layers": layers,
    }
    figures = draw_analysis(result, directory)
    named = result | {"figures": [path.name for path in figures]}
    # JSON has neither NaN nor infinities.
    result = without_infinities(named, lambda _: None)
    content = json.dumps(result, indent=1, allow_nan=False)
    (directory / "analysis.json").write_text(content + "\n", encoding="utf-8")
    return result, directory


def show_analysis(model: str, **options: Any) -> None:
    """`analyze`, printed."""
    with Progress("measuring"):
        result = analyze(model, **options)
    print_analysis(*result)


def is_model(name: str) -> bool:
    """Whether a command that also takes recipes gets a run, a model folder or a hub id."""
    if is_recipe(name):
        return False
    path = find_run(name)
    return path.is_dir() or ("/" in name and not path.is_file())


def open_model(
    name: str, overrides: list[str] | None, seed: int, device: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str, Path]:
    """The model in fp32, its tokenizer, its title, and the default directory of its analysis."""
    path, device = Path(name).expanduser(), choose_device(device)
    options: Any = {"device": device, "dtype": "float32", "trust_remote_code": trust_remote_code}
    if is_model(name):
        if overrides:
            raise InputError(f"{overrides[0]}: settings change a recipe; {name} is a model")
        resolved = resolve(name)
        beside = resolved.run or (path.parent if path.is_dir() else Path("runs", path.name))
        return *load_model(resolved.model, **options), resolved.model, beside / "analysis"

    config = load_config(name, overrides or [])
    run = Path(config.output_dir)
    if (run / "final" / "config.json").is_file() and not overrides:
        return *load_model(str(run / "final"), **options), str(run / "final"), run / "analysis"

    with tempfile.TemporaryDirectory() as scratch:
        parent = run if (run / "tokenizer").is_dir() else Path(scratch)
        tokenizer = build_tokenizer(config.tokenizer, config.data, parent / "tokenizer")
    check_weights_fit(meta_model(config, tokenizer).num_parameters(), 4)
    set_seed(seed)
    model: Any = build_model(config, tokenizer)
    model = model.eval().to(device)
    state = "before training" if config.model.get("init_from") else f"untrained, seed {seed}"
    # Not in output_dir: a run refuses a folder with foreign files.
    beside = run.with_name(f"{run.name}-untrained")
    title = f"{' '.join([path.stem, *(overrides or [])])} ({state})"
    return model, tokenizer, title, beside / "analysis"


def text_rows(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    text: str | None,
    length: int,
    rows: int,
    seed: int,
) -> Tensor:
    """int64 `[≥ rows, length]`: beginnings of documents, then their later parts; bos as in training."""
    data = DataConfig(source=text or "python", validation_source=text)  # all of a file is used
    bos = bos_token(model, tokenizer)
    needed, wanted = max(rows, 2), max(rows, BATCHES)
    first, later = [], []
    step = length - len(bos)
    for document in documents(data, seed):
        ids = tokenizer(document, add_special_tokens=False).input_ids
        spans = [bos + ids[i : i + step] for i in range(0, len(ids) - step + 1, step)]
        first, later = first + spans[:1], later + spans[1:]
        if len(first) >= wanted:
            break
    spans = (first + later)[:wanted]
    if len(spans) < needed:
        raise InputError(
            f"{text or 'the python corpus'}: has {len(spans)} of the {needed} rows of {length} tokens "
            "needed; give a longer text, fewer --rows or a smaller --length"
        )
    return torch.tensor(spans)
