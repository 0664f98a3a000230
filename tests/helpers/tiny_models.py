"""Tiny models of every mixer and map, and what is asked of them."""

import itertools

import pytest
import torch

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model import FEATURE_MAPS, MIXERS, build_feature_map

VOCAB = 61


VARIANTS = {  # what the table alone does not reach: windows, blocks, hybrids, positions of the decoder
    "window": {"mixer": "softmax", "mixer_options": {"window": 5, "num_kv_heads": 1}},
    "relu_blocks": {"mixer": "diag_attention", "mixer_options": {"block_size": 5, "scores": "relu"}},
    "hybrid": {"mixer": ["mala", "softmax"], "mixer_options": {"softmax": {"window": 9}}},
    "transnormer": {
        "mixer": ["diag_attention", "norm_attention"],
        "mixer_options": {"diag_attention": {"block_size": 7}},
        "position_embedding": "sinusoidal",
        "scale_embeddings": True,
        "use_bias": True,
        "initializer": "xavier",
    },
}


def rows() -> list:
    """Every mixer under every map that it takes; one that takes none, once; and the variants."""
    found = [pytest.param(options, id=name) for name, options in VARIANTS.items()]
    for mixer, feature_map in itertools.product(MIXERS, (None, *FEATURE_MAPS)):
        options = {}
        if mixer == "linear_attention" and feature_map:  # signed maps cannot have a denominator
            options = {"denominator": build_feature_map(feature_map, num_heads=1, head_dim=4).nonnegative}
        try:
            NalandaConfig(mixer=mixer, feature_map=feature_map, mixer_options=options)
        except ValueError:
            continue
        if feature_map or MIXERS[mixer].map_name is None:
            row = {"mixer": mixer, "feature_map": feature_map, "mixer_options": options}
            found.append(pytest.param(row, id=f"{mixer}-{feature_map}"))
    return found


def build(
    mixer="gated_deltanet", feature_map=None, mixer_options=None, dtype=torch.float64, **options
) -> NalandaForCausalLM:
    """A tiny model whose mixer matters: freshly initialised, most of these tests would pass without one."""
    torch.manual_seed(0)
    if mixer == "gated_deltanet" and feature_map is None:
        feature_map = "nala"
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "intermediate_size": 32,
    }
    config = NalandaConfig(
        mixer=mixer,
        feature_map=feature_map,
        mixer_options=mixer_options,
        initializer_range=0.3,
        **{**sizes, **options},
    )
    return NalandaForCausalLM(config).to(dtype).eval()


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, tokens, **kwargs) -> torch.Tensor:
    return model(tokens, **{"use_cache": False, **kwargs}).logits


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)
