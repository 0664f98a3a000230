"""Every token mixer, under every feature map, has the properties of `nalanda.testing`; options change a model."""

import itertools

import pytest
import torch
from tiny_models import SOME_MAPS, VARIANTS, VOCAB, build, close, ids, logits, rows

from nalanda import NalandaCache, NalandaForCausalLM, testing
from nalanda.model import FEATURE_MAPS, MIXERS
from nalanda.testing import MIXER_PROPERTIES


@pytest.fixture(params=rows())
def model(request) -> NalandaForCausalLM:
    return build(**request.param)


def test_every_mixer_and_map_is_in_the_table():
    seen = [tuple(p.values[0].get(key) for key in ("mixer", "feature_map")) for p in rows()]
    assert {mixer for mixer, _ in seen if isinstance(mixer, str)} == set(MIXERS)
    assert {row for row in seen if isinstance(row[0], str)} >= set(
        itertools.product(("deltanet", "linear_attention", *SOME_MAPS), FEATURE_MAPS)
    )


@pytest.mark.parametrize("holds", MIXER_PROPERTIES, ids=lambda f: f.__name__)
def test_property(model, holds):
    holds(model)


@pytest.mark.parametrize("mixer", SOME_MAPS)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_what_a_map_may_break(mixer, feature_map):
    """Quick properties, for the rows of the table that are slow."""
    if feature_map not in SOME_MAPS[mixer]:
        model = build(mixer, feature_map)
        testing.causal(model)
        testing.gradients_of_a_prefix_ignore_the_future(model)
        testing.chunkwise_is_recurrent_is_reference(model)
        testing.half_precision_agrees(model)
        testing.every_parameter_learns(model)


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
    seen = []
    import nalanda.model.delta as mixers

    def spy(call, rule, seq):
        seen.append(call.beta)
        return recurrence(call, rule, seq)

    recurrence = mixers.recurrence
    monkeypatch.setattr(mixers, "recurrence", spy)
    plain, doubled = build(), build(mixer_options={"allow_neg_eigval": True})
    logits(plain, ids(1, 8)), logits(doubled, ids(1, 8))
    close(seen[2], 2 * seen[0])
    assert seen[2].max() > 1


def test_no_tokens(model):
    assert model(ids(2, 0)).logits.shape == (2, 0, VOCAB)
