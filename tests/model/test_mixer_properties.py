"""Every token mixer, under every feature map, has the properties of `nalanda.testing`; options change a model."""

import itertools

import pytest
import torch
from covering import covering_cases
from tiny_models import SOME_MAPS, VARIANTS, VOCAB, build, close, covered_rows, ids, logits, rows

from nalanda import NalandaCache
from nalanda.model import FEATURE_MAPS, MIXERS, recurrent
from nalanda.testing import MIXER_PROPERTIES

ROWS = {row.id: row.values[0] for row in rows()}


def property_cases() -> list:
    """All properties of the variants with other states, and two of each variant of the rule. Of the others a
    covering: every pair of a mixer, a map and a property occurs in it."""
    of_the_rule = [name for name in VARIANTS if name.startswith("gated_deltanet-")]
    rules = list(itertools.product(of_the_rule, MIXER_PROPERTIES))
    chosen = covered_rows(ROWS, MIXER_PROPERTIES)
    chosen |= covering_cases(rules, strength=1, times=2)
    chosen |= set(itertools.product(VARIANTS.keys() - of_the_rule, MIXER_PROPERTIES))
    return [
        pytest.param(ROWS[name], holds, id=f"{name}-{holds.__name__}")
        for name, holds in itertools.product(ROWS, MIXER_PROPERTIES)
        if (name, holds) in chosen
    ]


def test_every_mixer_and_map_is_in_the_table():
    seen = [
        tuple(options.get(key) for key in ("mixer", "feature_map")) for options in ROWS.values()
    ]
    assert {mixer for mixer, _ in seen if isinstance(mixer, str)} == set(MIXERS)
    assert {row for row in seen if isinstance(row[0], str)} >= set(
        itertools.product(("deltanet", "linear_attention", *SOME_MAPS), FEATURE_MAPS)
    )


def test_every_pair_of_a_mixer_a_map_and_a_property_is_tried():
    def pairs(cases) -> set:
        return {
            pair
            for options, holds in cases
            if options not in VARIANTS.values()
            for pair in itertools.combinations(
                enumerate((options["mixer"], options["feature_map"], holds)), 2
            )
        }

    every = itertools.product(ROWS.values(), MIXER_PROPERTIES)
    assert pairs(every) == pairs(case.values for case in property_cases())


@pytest.mark.sampled
@pytest.mark.parametrize(("options", "holds"), property_cases())
def test_property(options, holds):
    holds(build(**options))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"expand_k": 0.5, "expand_v": 2.0},
        {"mixer_options": {"num_v_heads": 4}},
        {"mixer_options": {"allow_neg_eigval": True}},
        {"conv_size": 0},
        {"conv_size": 2, "use_gate": True},
        {"mixer": ["deltanet", "gated_deltanet"], "use_gate": False},
        {"tie_word_embeddings": True},
        {
            "position_embedding": "sinusoidal",
            "scale_embeddings": True,
            "use_bias": True,
            "initializer": "xavier",
        },
        {
            "mixer": ["gated_deltanet", "softmax"],
            "mixer_options": {"softmax": {"window": 5, "num_kv_heads": 1}},
        },
        {
            "mixer": ["diag_attention", "norm_attention"],
            "mixer_options": {"diag_attention": {"block_size": 3}},
        },
        {
            "mixer": "norm_attention",
            "feature_map": "elu",
            "mixer_options": {"norm_eps_placement": "outside"},
        },
        {
            "mixer": "diag_attention",
            "mixer_options": {"block_size": 7, "scores": "relu", "positions": "none"},
        },
        {"mixer": "softmax", "mixer_options": {"rope_theta": None}},
        {"mixer": "mala", "mixer_options": {"scale": "inverse_t"}, "conv_size": 0},
        {
            "mixer": "pola",
            "mixer_options": {"gate_first": True},
            "feature_map_options": {"scale": False},
        },
        {"mixer": "nala", "feature_map_options": {"power": 3}, "use_gate": False},
        {"mixer": "soft", "feature_map_options": {"landmarks": 7, "inverse": "newton"}},
        {
            "feature_map_options": {
                "angle": "raw",
                "power": 3,
                "power_norm": "raw",
                "direction_scale": "unit",
            }
        },
    ],
    ids=str,
)
def test_options(options):
    model, tokens = build(**options), ids(2, 20)
    whole, cache = logits(model, tokens), NalandaCache(2)
    close(
        torch.cat(
            [logits(model, t, past_key_values=cache) for t in tokens.split([7, 1, 12], 1)], 1
        ),
        whole,
    )
    assert not torch.allclose(whole, logits(build(), tokens))
    spec = [{n: (tuple(t.shape[1:]), t.dtype) for n, t in state.items()} for state in cache.states]
    for layer, state in zip(model.model.layers, spec, strict=True):
        promised = layer.mixer.state_spec(20)
        assert {n: shape for n, (shape, _) in promised.items()} == {
            n: shape for n, (shape, _) in state.items()
        }


def test_options_of_each_mixer_by_its_name():
    layers = build(**VARIANTS["hybrid"]).model.layers
    assert layers[1].mixer.reach == 9
    flat = build(
        mixer=["deltanet", "gated_deltanet"], mixer_options={"num_v_heads": 4}
    ).model.layers
    assert [layer.mixer.num_v_heads for layer in flat] == [4, 4]


def test_negative_eigenvalues_double_beta(monkeypatch):
    seen, recurrence = [], recurrent.recurrence

    def spy(call, options, seq, state, **more):
        seen.append(call.beta)
        return recurrence(call, options, seq, state, **more)

    monkeypatch.setattr(recurrent, "recurrence", spy)
    plain, doubled = build(), build(mixer_options={"allow_neg_eigval": True})
    logits(plain, ids(1, 8)), logits(doubled, ids(1, 8))
    close(seen[2], 2 * seen[0])
    assert seen[2].max() > 1


@pytest.mark.sampled
@pytest.mark.parametrize("options", rows())
def test_no_tokens(options):
    model = build(**options)
    assert model(ids(2, 0)).logits.shape == (2, 0, VOCAB)
