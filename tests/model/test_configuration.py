"""The config: patterns, refusals in one line, round trips, counts of parameters and operations."""

import json

import pytest
import torch
from tiny_models import VOCAB, build, logits
from transformers import AutoConfig, AutoModelForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM


def test_a_pattern_repeats_over_the_layers(tmp_path):
    names = ["gated_deltanet", "gated_deltanet", "softmax"]
    options = {"softmax": {"num_heads": 2, "head_dim": 8, "gate": "head", "qk_norm": True}}
    config = NalandaConfig(
        mixer={"pattern": names},
        num_hidden_layers=5,
        hidden_size=32,
        num_heads=4,
        mixer_options=options,
    )
    assert config.mixer == config.layer_mixers == [*names, *names[:2]]
    config.save_pretrained(tmp_path)
    assert NalandaConfig.from_pretrained(tmp_path).mixer == config.mixer
    softmax = NalandaForCausalLM(config).model.layers[2].mixer
    assert (softmax.num_heads, softmax.K, softmax.V) == (2, 8, 8)
    assert softmax.g_proj.weight.shape == (2, 32)
    assert softmax.q_norm.weight.shape == (8,)
    assert config.num_heads == 4  # of the other layers


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hiden_size": 8}, "did you mean 'hidden_size'"),
        ({"mixer": "delta_net"}, "choose one of deltanet"),
        ({"feature_map": "nahla"}, "choose one of identity"),
        ({"mixer_options": {"num_v_head": 4}}, "num_v_head"),
        ({"mixer_options": {"num_v_heads": 3}}, "multiple of num_heads=2"),
        ({"feature_map": "nala", "feature_map_options": {"angel": "rms"}}, "angel"),
        (
            {"feature_map": "nala", "feature_map_options": {"angle": "cosine"}},
            "direction, rms, raw",
        ),
        ({"feature_map": "nala", "feature_map_options": {"power": 0}}, "positive"),
        ({"num_heads": 5}, "multiple of num_heads=5"),
        ({"expand_k": 0.3}, "expand_k"),
        ({"conv_size": 1}, "conv_size"),
        ({"mixer": ["deltanet"]}, "names 1 layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"mixer": "linear_attention", "feature_map": "silu"}, "denominator=false"),
        ({"mixer": "mala", "feature_map": "identity"}, "choose relu, exp, elu1"),
        ({"mixer": "nala", "feature_map": "nala_vision"}, "nala_paper, nala_released, nala_code"),
        ({"mixer": "pola", "feature_map": "relu"}, "it needs 'pola' or 'polapp'"),
        ({"mixer": "pola", "head_dim": 5}, "must be even"),
        ({"mixer": "soft", "feature_map": "relu"}, "take mixer 'linear_attention'"),
        ({"mixer": "mala", "mixer_options": {"scale": "paper"}}, "code, inverse_t, literal"),
        (
            {"mixer": "diag_attention", "mixer_options": {"block_size": 4096}},
            "must be from 1 to max_position",
        ),
        ({"mixer": "softmax", "feature_map": "nala"}, "softmax does not use it"),
        ({"mixer": "softmax", "conv_size": 4}, "softmax does not use it"),
        ({"mixer": "softmax", "mixer_options": {"conv_size": 1}}, "at least 2"),
        ({"mixer": "softmax", "mixer_options": {"rotary_dim": 3}}, "must be even"),
        ({"mixer": "softmax", "mixer_options": {"gate": "row"}}, "must be head or channel"),
        ({"mixer": {"pattern": []}}, r"\{pattern: \[names\]\} to repeat"),
        ({"mixer": {"pattern": ["softmax"], "every": 4}}, r"\{pattern: \[names\]\} to repeat"),
        ({"mixer": "norm_attention", "use_gate": True}, "norm_attention does not use it"),
        ({"mixer": "retention", "feature_map_options": {"power": 3}}, "retention does not use it"),
        ({"mixer_options": {"gla": {"gate_rank": 4}}}, "'gla', which no layer has"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": "0.1"}, "dropout='0.1' must be float"),
        ({"norm_eps": "1e-5"}, "norm_eps='1e-5' must be float"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
        ({"intermediate_size": -1}, "intermediate_size=-1 must be positive"),
        ({"head_dim": 8.5}, "head_dim=8.5 must be int"),
        ({"use_gate": "false"}, "use_gate='false' must be bool"),
        ({"mixer": [["deltanet"], "gla"]}, "must be str"),
        ({"mixer_options": [1]}, "mixer_options"),
        ({"mixer_options": {"gated_deltanet": 3}}, "gated_deltanet=3 must be dict"),
        ({"mixer_options": {"allow_neg_eigval": "no"}}, "allow_neg_eigval='no' must be bool"),
        ({"mixer": "softmax", "mixer_options": {"window": 2.5}}, "window=2.5 must be int"),
        (
            {"mixer": "retention", "mixer_options": {"rope_theta": -1}},
            "rope_theta=-1 must be positive",
        ),
        ({"feature_map": "nala", "feature_map_options": {"power": "2"}}, "power='2' must be float"),
        (
            {"feature_map": "soft", "feature_map_options": {"landmarks": True}},
            "landmarks=True must be int",
        ),
        ({"position_embedding": "absolute"}, "none, sinusoidal, learnt"),
        ({"position_embedding": "learnt"}, "set image_size"),
        ({"initializer": "kaiming"}, "normal, xavier"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_configs_are_refused_in_one_line(options, says):
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 2}
    with pytest.raises(ValueError, match=says) as error:
        NalandaConfig(**{**sizes, **options})
    assert "\n" not in str(error.value)


def test_a_changed_value_of_a_wrong_type_is_refused(small, tmp_path):
    """transformers sets it after the config is made."""
    small.save_pretrained(tmp_path)
    for load in (NalandaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        for key in ("num_hidden_layers", "vocab_size"):
            with pytest.raises(ValueError, match=f"{key}='2' must be int"):
                load(tmp_path, **{key: "2"})


def test_a_config_of_ones_own_is_checked_like_ours():
    class Own(NalandaConfig):
        model_type = "own"
        extra: int = 3

    assert (Own(hidden_size=64, num_heads=2).head_dim, Own().extra) == (32, 3)
    with pytest.raises(ValueError, match="num_heads='two' must be int"):
        Own(num_heads="two")


def test_config_round_trip(tmp_path):
    config = build(num_hidden_layers=1, mixer=["deltanet"]).config
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_diff_dict() == config.to_diff_dict()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["mixer"] == ["deltanet"]
    assert NalandaConfig(num_attention_heads=4, hidden_size=32).num_heads == 4


@pytest.mark.parametrize(
    ("options", "millions"),
    [
        ({"mixer": "deltanet"}, 374.4),
        ({"mixer": "deltanet", "use_gate": True}, 399.5),
        ({"mixer": "deltanet", "expand_k": 0.5}, 349.0),
        ({"num_hidden_layers": 21, "num_heads": 6, "head_dim": 128, "expand_v": 2}, 379.9),
        ({"num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2}, 512.0),
    ],
    ids=str,
)
def test_literature_parameter_counts(options, millions):
    with torch.device("meta"):
        model = NalandaForCausalLM(NalandaConfig(intermediate_size=2816, **options))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1.5e-3)


def test_flops_count_what_is_done():
    """Every matrix product that torch sees is in the model's count, and little more, at whole chunks."""
    from torch.utils.flop_counter import FlopCounterMode

    def baddbmm_(_, a, b, **__):  # in place: torch's own table has only the other one
        return 2 * a[0] * a[1] * a[2] * b[2]

    model, T = build(dtype=torch.float32, hidden_size=64, num_heads=1, vocab_size=200), 128
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.baddbmm_: baddbmm_}
    ) as counter:
        logits(model, torch.zeros(1, T, dtype=torch.long))
    ratio = model.config.flops_per_token(T) * T / counter.get_total_flops()
    assert 0.98 < ratio < 1.05, ratio
