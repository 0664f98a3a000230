"""The table of token mixers. A new one is a class in its family's file and a row here."""

import inspect
from collections.abc import Iterator
from typing import Any

from .attention import DiagAttention, ForgettingAttention, SoftmaxAttention
from .base import Mixer
from .comba import Comba
from .delta import KDA, DeltaNet, DeltaProduct, GatedDeltaNet, GatedDeltaNet2
from .linear import (
    GLA,
    MALA,
    LinearAttention,
    Mamba2,
    NaLaAttention,
    PolaAttention,
    Retention,
    SoftAttention,
)
from .mamba3 import Mamba3
from .options import check_names, check_types, did_you_mean
from .plugins import missing_plugins, register
from .rwkv7 import RWKV7
from .transnormer import NormAttention

MIXERS: dict[str, type[Mixer]] = {
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "comba": Comba,
    "kda": KDA,
    "gated_deltanet2": GatedDeltaNet2,
    "delta_product": DeltaProduct,
    "rwkv7": RWKV7,
    "linear_attention": LinearAttention,
    "nala": NaLaAttention,
    "mala": MALA,
    "pola": PolaAttention,
    "soft": SoftAttention,
    "retention": Retention,
    "gla": GLA,
    "mamba2": Mamba2,
    "mamba3": Mamba3,
    "softmax": SoftmaxAttention,
    "forgetting": ForgettingAttention,
    "diag_attention": DiagAttention,
    "norm_attention": NormAttention,
}


def register_mixer(name: str, mixer: type[Mixer]) -> None:
    """Adds a mixer of the calling module to `MIXERS`, for recipes and configs to name.

    Raises ValueError for a name that is taken, or a class that lacks what `base.py` asks of a mixer.
    """
    register("mixer", name, mixer, MIXERS, list(faults_of(mixer)))


RENAMED = {
    "heads": "inputs()",
    "state_gates": "gate_parameters()",
    "step_options": "rule",
    "step_rule": "rule",
    "token_rule": "rule",
    "signed_weights": "metrics",
    "conv_size": "rule.conv",
    "map_name": "rule.map",
    "gate_activation": "rule.gate",
    "cut": "rule.cut",
    "gated": "rule.gated",
    "norm": "rule.norm",
    "shared_filters": "rule.shared_filters",
    "shared_qk": "rule.shared_qk",
    "steps": "rule.steps",
    "unmasked": "rule.unmasked",
    "value_conv": "rule.value_conv",
    "value_silu": "rule.value_silu",
}
"""Names that a mixer's class had in earlier versions."""


def faults_of(mixer: type[Mixer]) -> Iterator[str]:
    """Each demand of the contract that a class does not meet."""
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        yield "is not a subclass of Mixer"
        return
    for name in ("equation", "source"):
        if not isinstance(getattr(mixer, name, None), str):
            yield f"has no text `{name}`"
    for name in ("mix", "state_spec", "flops"):
        if mixer.rule.write == "own" and getattr(mixer, name) is getattr(Mixer, name):
            yield f"does not define {name}()"
    for name, successor in RENAMED.items():
        if hasattr(mixer, name):  # it would be ignored, and another model trained
            yield f"has `{name}`, which is {successor} now"

    for name in ("inputs", "gates", "mix", "read_out"):
        wanted = inspect.signature(getattr(Mixer, name)).parameters
        try:
            inspect.signature(getattr(mixer, name)).bind(*wanted)
        except TypeError:
            yield f"needs {name}({', '.join(wanted)})"

    _, *parameters = inspect.signature(mixer.__init__).parameters.values()
    options = [p for p in parameters[2:] if p.kind is p.KEYWORD_ONLY and p.default is not p.empty]
    if [p.name for p in parameters[:2]] != ["config", "layer_idx"] or options != parameters[2:]:
        yield "needs __init__(self, config, layer_idx, *, options with defaults)"


def uncut_mixers(config) -> list[str]:
    """The mixers of a config that do not serve rows cut over processes."""
    return [name for name in dict.fromkeys(config.layer_mixers) if not MIXERS[name].rule.cut]


def mixer_options(name: str, config) -> dict[str, Any]:
    """The share of `config.mixer_options` of the mixer called `name`."""
    options = config.mixer_options
    by_name = bool(MIXERS.keys() & options.keys())
    return options.get(name, {}) if by_name else options


def build_mixer(name: str, config, layer_idx: int) -> Mixer:
    """The mixer called `name`, with its share of `config.mixer_options`.

    Raises ValueError for an unknown name, a bad value, or an option that neither the mixer nor its map has.
    """
    if missing := missing_plugins(getattr(config, "plugins", ())):
        raise ValueError(
            f"plugins: {', '.join(missing)} is not importable; import it first, put its file on PYTHONPATH, "
            "or run the checkpoint's copy: trust_remote_code=True, or --trust-remote-code on the command line"
        )
    if name not in MIXERS:
        near = did_you_mean(name, MIXERS)
        raise ValueError(f"unknown mixer {name!r}{near or ':'} choose one of {', '.join(MIXERS)}")
    options = mixer_options(name, config)
    check_types({name: options}, {name: dict}, "mixer_options.")
    check_types(options, MIXERS[name].__init__.__annotations__, f"mixer {name!r}: ")
    try:
        check_names(options, MIXERS[name])
        return MIXERS[name](config, layer_idx, **options)
    except TypeError as error:  # a misspelt option, of the mixer or of its map
        raise ValueError(f"mixer {name!r}: {error}") from None
