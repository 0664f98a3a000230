"""The table of token mixers. A new one is a class in its family's file and a row here."""

from .attention import DiagAttention, SoftmaxAttention
from .base import Mixer
from .delta import DeltaNet, GatedDeltaNet
from .linear import GLA, MALA, LinearAttention, NaLaAttention, PolaAttention, Retention, SoftAttention
from .options import check_names, check_types, did_you_mean
from .transnormer import NormAttention

MIXERS: dict[str, type[Mixer]] = {
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "linear_attention": LinearAttention,
    "nala": NaLaAttention,
    "mala": MALA,
    "pola": PolaAttention,
    "soft": SoftAttention,
    "retention": Retention,
    "gla": GLA,
    "softmax": SoftmaxAttention,
    "diag_attention": DiagAttention,
    "norm_attention": NormAttention,
}


def build_mixer(name: str, config, layer_idx: int) -> Mixer:
    """The mixer called `name`, with its share of `config.mixer_options`.

    Raises ValueError for an unknown name, a bad value, or an option that neither mixer nor map has.
    """
    if name not in MIXERS:
        near = did_you_mean(name, MIXERS)
        raise ValueError(f"unknown mixer {name!r}{near or ':'} choose one of {', '.join(MIXERS)}")
    options = config.mixer_options
    if MIXERS.keys() & options.keys():  # each mixer's own, by name
        options = options.get(name, {})
        check_types({name: options}, {name: dict}, "mixer_options.")
    check_types(options, MIXERS[name].__init__.__annotations__, f"mixer {name!r}: ")
    try:
        check_names(options, MIXERS[name])
        return MIXERS[name](config, layer_idx, **options)
    except TypeError as error:  # a misspelt option, of the mixer or of its map
        raise ValueError(f"mixer {name!r}: {error}") from None
