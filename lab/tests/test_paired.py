"""Paired runs: weights, branches, losses, text, the estimator, and changed query norms."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nalanda_lab import equal, paired
from nalanda_lab.estimate import document_variance, write_gap
from nalanda_lab.fork_arms import Fork
from nalanda_lab.norms import changed_norms
from nalanda_lab.texts import check_text, text_facts

from nalanda.common.errors import InputError
from nalanda.compare.verdict import pair_gap
from nalanda.config.load import section
from nalanda.config.schema import DataConfig, GroupConfig, RunConfig, TokenizerConfig
from nalanda.data.prepare import prepare
from nalanda.data.tokenizer import build_tokenizer
from nalanda.model import NalandaConfig, NalandaForCausalLM
from nalanda.model.mixers import build_mixer
from nalanda.train.build import open_batches
from nalanda.train.loss import count_labels, loss_sums

MODEL = {
    "mixer": "deltanet",
    "feature_map": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
}
RECIPE = {
    "output_dir": "unset",
    "model": MODEL,
    "seed": 1,
    "tokenizer": {"train": "bpe", "vocab_size": 300},
    "data": {"source": "unset", "seq_len": 32, "max_validation_rows": 24, "workers": 0},
    "optim": {"lr": 4e-3},
    "schedule": {"warmup_steps": 1},
    "train": {
        "steps": 4,
        "tokens_per_step": 128,
        "micro_batch_size": 2,
        "precision": "fp32",
        "cpu_threads": 1,
    },
}


def write_texts(folder: Path, seed: int = 0) -> str:
    draw = random.Random(seed)
    for part, count in (("train", 60), ("validation", 24)):
        (folder / part).mkdir(parents=True)
        lines = []
        for _ in range(count):
            words = draw.choices(["state", "gate", "query", "key", "value", "norm"], k=40)
            row = {"text": " ".join(words), "meta": {"redpajama_set_name": "web"}}
            lines.append(json.dumps(row) + "\n")
        (folder / part / "a.jsonl").write_text("".join(lines))
    return str(folder)


def write_tokens(recipe: dict, folder: Path, seed: int = 0) -> Path:
    """The token set of random texts, in the folder `text`."""
    source = write_texts(folder / "mini", seed)
    data = section(DataConfig, recipe["data"] | {"source": source}, "data.")
    prepare(data, section(TokenizerConfig, recipe["tokenizer"], ""), folder / "text", workers=1)
    return folder / "text"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a prepared text."""
    folder = tmp_path_factory.mktemp("paired")
    write_tokens(RECIPE, folder)
    return folder


@pytest.fixture(scope="module")
def one_run(work):
    """(config, text) of the run of SETTINGS."""
    text = work / "text"
    recipe = RECIPE | {"data": RECIPE["data"] | {"source": str(text)}}
    recipe |= {"tokenizer": f"{text}/tokenizer"}
    return section(RunConfig, recipe, ""), text


def drawn(model: dict, seed: int) -> dict[str, torch.Tensor]:
    net = NalandaForCausalLM(equal.configured(model, 300))
    paired.draw_weights(net, seed)
    return dict(net.named_parameters())


def opened(config: RunConfig, text: Path):
    tokenizer = build_tokenizer(config.tokenizer, config.data, text / "tokenizer")
    batches, validation = open_batches(config, tokenizer)
    return batches, list(itertools.chain(*validation.values())), tokenizer.bos_token_id


# ------------------------------ weights


def test_models_of_a_seed_share_what_they_have_in_common():
    forms = [MODEL, MODEL | {"feature_map": "nala"}, MODEL | {"mixer": "gated_deltanet"}]
    weights = [drawn(model, 1) for model in forms]
    for a, b in itertools.combinations(weights, 2):
        shared = [name for name in a.keys() & b.keys() if a[name].shape == b[name].shape]
        assert "model.layers.0.mixer.v_proj.weight" in shared
        assert all(torch.equal(a[name], b[name]) for name in shared)

    again, other = drawn(MODEL, 1), drawn(MODEL, 2)
    assert all(torch.equal(x, again[name]) for name, x in weights[0].items())
    matrices = [name for name, x in other.items() if x.ndim > 1]
    assert not any(torch.equal(other[name], weights[0][name]) for name in matrices)
    spread = weights[0]["model.embed_tokens.weight"].std().item()
    assert spread == pytest.approx(equal.configured(MODEL).initializer_range, rel=0.1)


def test_decays_are_stratified_over_heads():
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "num_hidden_layers": 2}
    model = NalandaForCausalLM(equal.configured({"mixer": "gated_deltanet", **sizes}, 16))
    before = torch.get_rng_state()
    for seed in range(3):
        paired.draw_weights(model, seed)
        for layer in model.model.layers:
            decay = layer.mixer.decay
            parts = (decay.A_log.exp() / 16 * 8).floor().sort().values
            dt = torch.nn.functional.softplus(decay.dt_bias)
            steps = ((dt.log10() + 3) / 2 * 8).floor().sort().values
            assert parts.tolist() == steps.tolist() == list(range(8))
        first, second = (layer.mixer.decay.A_log for layer in model.model.layers)
        assert not torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------ a run


def build_run(config: RunConfig, text: Path) -> Fork:
    model = NalandaForCausalLM(equal.configured(MODEL, 300))
    paired.draw_weights(model, 1)
    return Fork(model, config, opened(config, text)[0], keep=1)


def test_rates_of_groups_and_the_z_loss_are_followed(one_run):
    config, text = one_run
    group = GroupConfig("embed_tokens", lr_scale=0.0, weight_decay=0.0)
    frozen = replace(config.optim, groups=[group])

    def embedding(config: RunConfig) -> torch.Tensor:
        run = build_run(config, text)
        run.advance_one(), run.advance_one()
        return run.model.model.embed_tokens.weight

    usual = embedding(config)
    still = embedding(replace(config, optim=frozen))
    assert torch.equal(still, drawn(MODEL, 1)["model.embed_tokens.weight"])
    assert not torch.equal(usual, still)
    other = embedding(replace(config, train=replace(config.train, z_loss=1.0)))
    assert not torch.equal(usual, other)


# ------------------------------ losses


def test_losses_by_document_sum_to_the_loss(one_run):
    model = NalandaForCausalLM(equal.configured(MODEL, 300))
    batches, rows, bos = opened(*one_run)
    batches.close()
    sums = paired.document_sums(model, rows, bos)
    total, count = loss_sums(model, rows)
    assert sum(sums) == pytest.approx(total, rel=1e-5)

    labels = [row["labels"][:, 1:] != -100 for row in rows]
    counts = paired.sum_by_document(labels, rows, bos)
    segments = sum(len(row["cu_seqlens"]) - 1 for row in rows)
    continued = sum(int((row["input_ids"][:, 0] != bos).sum()) for row in rows)
    assert continued  # documents are longer than rows
    assert len(counts) == len(sums) == segments - continued
    assert sum(counts) == count == sum(map(count_labels, rows))


# ------------------------------ the text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer": {"train": "bpe", "vocab_size": 290}},
            "with tokenizer .*300.* this is .*290",
        ),
        ({"data": RECIPE["data"] | {"eos": False}}, "with eos true, and this is false"),
    ],
)
def test_a_text_that_was_prepared_otherwise_is_refused(work, change, message):
    with pytest.raises(InputError, match=message) as refused:
        check_text(RECIPE | change, work / "text")
    assert "\n" not in str(refused.value)
    check_text(RECIPE, work / "text")


def test_another_text_has_another_fingerprint(work, tmp_path):
    facts = text_facts(work / "text")
    assert facts["name"] == "mini"
    assert facts["vocab_size"] <= 300
    elsewhere = text_facts(write_tokens(RECIPE, tmp_path, seed=1))
    assert elsewhere["fingerprint"] != facts["fingerprint"]


# ------------------------------ the estimator


def test_a_gap_is_written_with_its_interval():
    gap = pair_gap("a", "b", [1.25, 1.0, 1.5], [1.0, 1.0, 1.0])
    assert write_gap(gap, 3) == "+0.250 [−0.371, +0.871]"
    assert write_gap(gap, 2, factor=-1) == "−0.25 [+0.37, −0.87]"
    assert write_gap(None, 3) == "without two pairs"


def test_documents_add_their_variance():
    draw = np.random.default_rng(0)
    tokens = draw.integers(50, 500, 4000).astype(float)
    b = tokens * 3.0
    a = b + tokens * draw.normal(0.1, 0.3, 4000)
    picked = [draw.integers(0, 4000, 40) for _ in range(2000)]
    means = [(a[i] - b[i]).sum() / tokens[i].sum() for i in picked]
    variances = [document_variance(a[None, i], b[None, i], tokens[i]) for i in picked]
    assert np.mean(variances) == pytest.approx(np.var(means), rel=0.1)


# ------------------------------ norms


def swapped_norm(norm: torch.Tensor) -> torch.Tensor:
    """The norm at the same position of another row: p is swapped, and its distribution stays."""
    return norm.roll(1, 0)


def mean_norm(norm: torch.Tensor) -> torch.Tensor:
    """Each head's mean: p is constant."""
    return norm.mean((0, 1), keepdim=True).expand_as(norm)


X = torch.randn(3, 32, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mixer(name: str, **keys):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
    }
    config = NalandaConfig(vocab_size=8, mixer=name, conv_size=0, **sizes, **keys)
    layer = build_mixer(name, config, 0)
    for module in layer.modules():
        for key, value in getattr(module, "initial", dict)().items():
            getattr(module, key).data.copy_(value)
    return layer.double()


@pytest.mark.parametrize(
    ("name", "keys", "moves"),
    [
        ("linear_attention", {"feature_map": "relu"}, False),  # the denominator cancels the norm
        ("nala", {}, True),
        # tanh 40 = 1: p is constant
        ("nala", {"feature_map_options": {"power_norm": "raw"}}, False),
    ],
)
def test_swapped_norms_matter_where_p_depends_on_them(name, keys, moves):
    layer = mixer(name, **keys)
    x = 3 * X if moves else 400 * X
    before = layer.weights(x)
    with changed_norms([layer], lambda norm: norm):
        assert torch.allclose(layer.weights(x), before)
    with changed_norms([layer], swapped_norm):
        gap = (layer.weights(x) - before).abs().max()
    assert (gap > 1e-2) if moves else (gap < 1e-6)
    assert torch.equal(layer.weights(x), before)  # the context leaves nothing behind


def test_swapping_a_constant_p_changes_nothing():
    layer, weights = mixer("nala"), []
    for change in (mean_norm, lambda norm: swapped_norm(mean_norm(norm))):
        with changed_norms([layer], change):
            weights.append(layer.weights(X))
    assert torch.equal(*weights)
