"""Every mixer and map as a row of tests, and a model on disk; `nalanda.testing` makes the tiny models."""

import copy
import functools
import itertools
from collections.abc import Hashable, Iterable

import pytest
import torch
from covering import covering_cases
from transformers import LlamaConfig, LlamaForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM, testing
from nalanda.model import FEATURE_MAPS, MIXERS, build_feature_map
from nalanda.testing import VOCAB, close, ids, logits

__all__ = [
    "SAME_STATES",
    "SOME_MAPS",
    "UNKNOWN_MAPS",
    "VARIANTS",
    "VOCAB",
    "build",
    "close",
    "encoder_rows",
    "ids",
    "logits",
    "rows",
    "save",
]


UNKNOWN_MAPS = ("nala_learned", "silu_shifted", "polapp", "soft", "softpp")
"""Maps that `nalanda_kernels.maps.describe` refuses: they are computed in Python."""

VARIANTS = {  # windows, blocks, hybrids, the decoder's positions, which the tables do not reach
    "window": {"mixer": "softmax", "mixer_options": {"window": 5, "num_kv_heads": 1}},
    "convolved": {
        "mixer": "softmax",
        "mixer_options": {"window": 5, "conv_size": 3, "gate": "head", "q_norm": "length"},
    },
    "forgetting_window": {
        "mixer": "forgetting",
        "mixer_options": {"window": 5, "num_kv_heads": 1, "gate": "channel"},
    },
    "gated": {
        "mixer": ["gated_deltanet", "softmax"],
        "mixer_options": {
            "softmax": {
                "num_heads": 3,
                "num_kv_heads": 1,
                "head_dim": 6,
                "rotary_dim": 4,
                "window": 9,
                "qk_norm": True,
                "gate": "channel",
            }
        },
    },
    "value_conv": {
        "mixer": ["gated_deltanet", "softmax"],
        "value_conv": 3,
        "mixer_options": {"softmax": {"num_kv_heads": 1, "window": 9}},
    },
    "value_conv_alone": {"mixer": "gated_deltanet", "value_conv": 3, "conv_size": 0},
    "value_conv_gated": {"mixer": "gated_deltanet2", "value_conv": 3},
    "rwkv7_unshifted": {
        "mixer": "rwkv7",
        "mixer_options": {"token_shift": False, "decay_rank": 5},
        "expand_v": 2.0,
        "use_gate": False,
        "value_conv": 3,
    },
    "mamba3_groups": {
        "mixer": "mamba3",
        "mixer_options": {"num_v_heads": 4, "rope_fraction": 1.0},
        "expand_v": 1.5,
        "use_gate": False,
        "value_conv": 3,
    },
    "relu_blocks": {
        "mixer": "diag_attention",
        "mixer_options": {"block_size": 5, "scores": "relu"},
    },
    "hybrid": {"mixer": ["mala", "softmax"], "mixer_options": {"softmax": {"window": 9}}},
    "transnormer": {
        "mixer": ["diag_attention", "norm_attention"],
        "mixer_options": {"diag_attention": {"block_size": 7}},
        "position_embedding": "sinusoidal",
        "scale_embeddings": True,
        "use_bias": True,
        "initializer": "xavier",
    },
    **{
        f"gated_deltanet-{name}": {"mixer_options": options, **others}
        for name, options, others in (
            ("norm_write", {"norm_write": True, "num_v_heads": 4}, {}),
            ("norm_read", {"norm_read": True, "num_v_heads": 4}, {}),
            ("plain_values", {"value_silu": False}, {}),
            (
                "raw",
                {"norm_write": True, "norm_read": True, "qk_norm": "none"},
                {"feature_map": "identity"},
            ),
            (
                "raw_nala",
                {"norm_write": True, "qk_norm": "none", "num_v_heads": 4},
                {"use_gate": False},
            ),
            (
                "rms",
                {"norm_write": True, "qk_norm": "rms"},
                {"mixer": "deltanet", "feature_map": "silu"},
            ),
            (
                "kda",
                {"norm_write": True, "norm_read": True, "num_v_heads": 4, "gate_bias": False},
                {"mixer": "kda"},
            ),
            (
                "uncorrected",
                {"correction": None, "inner_decay": False, "num_v_heads": 4},
                {"mixer": "comba", "use_gate": False},
            ),
            ("erase", {"allow_neg_eigval": True, "num_v_heads": 4}, {"mixer": "gated_deltanet2"}),
            (
                "steps",
                {"num_householder": 3, "use_forget_gate": True, "num_v_heads": 4},
                {"mixer": "delta_product"},
            ),
            ("groups", {"num_v_heads": 4}, {"mixer": "mamba2", "use_gate": False}),
            (
                "own_norm",
                {"qk_norm": "none"},
                {"feature_map": "elu1", "feature_map_options": {"norm": "sum"}},
            ),
        )
    },
}


# Variants of the rule in states of the same form. Quick tests of states leave them out, or take them where
# rows meet other values.
SAME_STATES = {
    f"gated_deltanet-{name}"
    for name in (
        "norm_write",
        "norm_read",
        "plain_values",
        "raw",
        "raw_nala",
        "rms",
        "kda",
        "own_norm",
    )
}


# Mixers that hand their map to the same ops as those with all maps: quick tests take some.
SOME_MAPS = dict.fromkeys(
    ("kda", "gated_deltanet2", "delta_product", "mamba2"), ("silu", "nala", "pola")
)


BUILT: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {}


def build(*args, **options):
    """`nalanda.testing.build`, once for each set of options: then copies, and the random state behind it."""
    key = repr((args, sorted(options.items())))
    if key not in BUILT:
        BUILT[key] = testing.build(*args, **options), torch.get_rng_state()
    model, random_state = BUILT[key]
    torch.set_rng_state(random_state)
    return copy.deepcopy(model).eval()  # which joins the weights of a copy, as those of a new model


@functools.cache
def rows() -> tuple:
    """Every mixer with the maps that it takes, or once without a map; and the variants. Some are slow."""
    found = [pytest.param(options, id=name) for name, options in VARIANTS.items()]
    for mixer, feature_map in itertools.product(MIXERS, (None, *FEATURE_MAPS)):
        options = {}
        if mixer == "linear_attention" and feature_map:  # signed maps cannot have a denominator
            options = {
                "denominator": build_feature_map(feature_map, num_heads=1, head_dim=4).nonnegative
            }
        try:
            NalandaConfig(mixer=mixer, feature_map=feature_map, mixer_options=options)
        except ValueError:
            continue
        if feature_map or MIXERS[mixer].rule.map is None:
            row = {"mixer": mixer, "feature_map": feature_map, "mixer_options": options}
            marks = () if feature_map in SOME_MAPS.get(mixer, (feature_map,)) else pytest.mark.slow
            found.append(pytest.param(row, id=f"{mixer}-{feature_map}", marks=marks))
    return tuple(found)


@functools.cache
def main_rows() -> tuple:
    """Of `rows()` the variants, every mixer with its own map, and every map in one mixer."""
    names = {*VARIANTS, *(f"{name}-{mixer.rule.map}" for name, mixer in MIXERS.items())}
    return tuple(row for row in rows() if row.id in names or row.id.startswith("linear_attention-"))


def covered_rows(
    options_of: dict[str, dict], values: Iterable[Hashable], strength: int = 2, times: int = 1
) -> set[tuple]:
    """Pairs (row, value), in which every pair of a mixer, a map and a value occurs. Variants are left out.

    options_of: the rows' options by their names.
    strength, times: those of `covering_cases`.
    """
    named = {
        (options["mixer"], options["feature_map"], value): (name, value)
        for name, options in options_of.items()
        if name not in VARIANTS
        for value in values
    }
    return {named[case] for case in covering_cases(list(named), strength, times)}


def save(tokenizer, path, **fields) -> str:
    """Saves a random model of two layers and the tokenizer of bytes; returns the path."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    config = NalandaConfig(
        **sizes,
        intermediate_size=64,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        **fields,
    )
    NalandaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def encoder_rows() -> list:
    """Rows for encoders: every mixer, linear attention with every map, the variants, convolutions."""
    found = []
    for row in rows():
        options = row.values[0]
        mixer, feature_map = (options.get(key) for key in ("mixer", "feature_map"))
        whole = mixer == "linear_attention" and feature_map not in ("soft", "softpp")
        if (
            row.id in VARIANTS
            or whole
            or (isinstance(mixer, str) and feature_map == MIXERS[mixer].rule.map)
        ):
            found.append(row)
    more = {
        "convolved_sums": {"mixer": "linear_attention", "feature_map": "elu1", "conv_size": 4},
        "convolved_rule": {"mixer": "gated_deltanet", "feature_map": "nala", "conv_size": 3},
        "soft_exact": {
            "mixer": "soft",
            "feature_map": "soft",
            "feature_map_options": {"inverse": "cholesky", "window": 3},
        },
    }
    found += [pytest.param(options, id=name) for name, options in more.items()]
    return [pytest.param({**row.values[0], "is_decoder": False}, id=row.id) for row in found]


def llama(vocabulary: int = VOCAB) -> LlamaForCausalLM:
    """A tiny model of transformers' own, in float64."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    special = {"bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **special)).double().eval()
