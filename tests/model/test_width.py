"""µP: matrices and their updates keep spectral norms ~ √(n_out / n_in), in every mixer."""

import math

import pytest
import torch
from torch import nn

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.config.schema import GroupConfig, OptimConfig
from nalanda.convert.formats import resolved
from nalanda.model import FEATURE_MAPS, MIXERS
from nalanda.train.optim import build_optimizer

BASE, FACTOR = 32, 4
NARROW = {
    "hidden_size": BASE,
    "num_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 96,
}
WIDE = NARROW | {
    "hidden_size": FACTOR * BASE,
    "num_heads": 2 * FACTOR,
    "intermediate_size": 64 * FACTOR,
}
MUP = {"parametrization": "mup", "base_width": BASE}


def model_of(keys, **changes):
    torch.manual_seed(0)
    return NalandaForCausalLM(NalandaConfig(**keys | changes))


def rates(model, name):
    """lr_scale and decay of each parameter."""
    optimizer = build_optimizer(model, OptimConfig(name=name, weight_decay=0.1))
    by_id = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            by_id[id(p)] = (group["lr_scale"], group["weight_decay"], group.get("blocks"))
    return {n: by_id[id(p)] for n, p in model.named_parameters()}


def linears(model):
    tied = model.config.tie_word_embeddings
    named = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {n: w for n, w in named.items() if not (tied and n == "lm_head")}


def against_condition(norm, weight):
    """A spectral norm over the one that the condition asks for, √(n_out / n_in)."""
    n_out, n_in = weight.shape
    return norm / math.sqrt(n_out / n_in)


ROWS = [(mixer, None) for mixer in MIXERS] + [("gated_deltanet", name) for name in FEATURE_MAPS]


@pytest.mark.sampled
@pytest.mark.parametrize(("mixer", "feature_map"), ROWS)
def test_matrices_and_updates_keep_the_condition(mixer, feature_map):
    keys = {"mixer": mixer, "feature_map": feature_map}
    narrow, wide = model_of(NARROW | keys), model_of(WIDE | keys, **MUP)
    narrow_weights, wide_weights = linears(narrow), linears(wide)
    narrow_rates, wide_rates = rates(narrow, "adamw"), rates(wide, "adamw")
    assert narrow_weights.keys() == wide_weights.keys()

    for name, weight in wide_weights.items():
        before = narrow_weights[name]
        first, last = (
            against_condition(torch.linalg.matrix_norm(w.detach(), 2).item(), w)
            for w in (before, weight)
        )
        # A narrow matrix's largest singular value differs from its limit by its shape.
        assert last / first == pytest.approx(1, rel=0.45), name

        # Adam's first update has entries ± rate: its norm is rate · √(n_out · n_in) if they agree.
        updates = []
        for w, (scale, decay, _) in (
            (before, narrow_rates[f"{name}.weight"]),
            (weight, wide_rates[f"{name}.weight"]),
        ):
            updates.append(against_condition(scale * math.sqrt(w.numel()), w))
            assert scale * decay == pytest.approx(0.1)
        assert updates[1] == pytest.approx(updates[0]), name

    others = wide_rates.keys() - {f"{name}.weight" for name in wide_weights}
    assert others
    for name in others:
        assert wide_rates[name] == narrow_rates[name], name


@pytest.mark.parametrize(
    "mixer", ["gated_deltanet", "gla", "kda", "rwkv7", "mamba3", "norm_attention"]
)
def test_orthogonal_updates_keep_the_condition(mixer):
    keys = {"mixer": mixer}
    norms = []
    for model in (model_of(NARROW | keys), model_of(WIDE | keys, **MUP)):
        by_name = rates(model, "muon")
        conditions = {}
        for name, weight in linears(model).items():
            scale, _, blocks = by_name[f"{name}.weight"]
            if blocks is not None:
                block = weight[: len(weight) // blocks]
                # torch's match_rms_adamw: an orthogonal matrix times 0.2 √max(n_out, n_in)
                conditions[name] = against_condition(scale * math.sqrt(max(block.shape)), block)
        norms.append(conditions)
    assert norms[0]
    assert norms[1] == pytest.approx(norms[0])


def test_the_base_width_itself_is_the_standard_model():
    standard, same = model_of(NARROW), model_of(NARROW, **MUP)
    for (name, p), q in zip(standard.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert rates(standard, "muon") == rates(same, "muon")


def test_tied_embeddings_scale_the_norm_before_the_head():
    """By the root of 1 / c: with 1 / c wide models trained worse than in the standard parametrization."""
    model = model_of(WIDE, tie_word_embeddings=True, **MUP)
    factor = FACTOR**-0.5
    assert torch.equal(model.model.norm.weight, torch.full((FACTOR * BASE,), factor))
    by_name = rates(model, "adamw")
    assert by_name["model.norm.weight"] == (factor, 0.0, None)
    assert by_name["model.embed_tokens.weight"] == (1.0, 0.1, None)
    # Logits of other tokens are sums over independent weights: they keep their size.
    ids = torch.arange(64)[None]
    sizes = [
        m(ids).logits[0, :, 64:].std().item()
        for m in (model_of(NARROW, tie_word_embeddings=True), model)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


def test_rates_of_a_recipe_come_on_top():
    model = model_of(WIDE, **MUP)
    optim = OptimConfig(lr=1e-2, groups=[GroupConfig("o_proj", lr_scale=0.5)])
    group = next(
        g for g in build_optimizer(model, optim).param_groups if g["name"].startswith("o_proj")
    )
    assert group["lr"] == pytest.approx(1e-2 * 0.5 / FACTOR)


def test_a_saved_model_keeps_its_rates_and_loads_everywhere(tmp_path):
    model = model_of(WIDE, **MUP)
    model.save_pretrained(tmp_path)
    loaded = NalandaForCausalLM.from_pretrained(tmp_path)
    assert rates(loaded, "muon") == rates(model, "muon")
    for p, q in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q)
    assert resolved(model.config) == resolved(NalandaConfig(**WIDE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parametrization": "mup"}, "set both or none"),
        ({"base_width": 32}, "set both or none"),
        (MUP | {"base_width": 24}, "num_heads would be 1.5 there"),
        (MUP | {"initializer": "xavier"}, "take normal"),
        ({"parametrization": "mu"}, "standard, mup"),
        (
            MUP | {"mixer": "softmax", "mixer_options": {"num_kv_heads": 2}},
            "num_kv_heads would be 0.5",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NalandaConfig(**WIDE | changes)
