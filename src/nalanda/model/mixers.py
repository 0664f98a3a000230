"""The table of token mixers. A new one is a class in its family's file and a row here."""

import inspect

from .attention import DiagAttention, SoftmaxAttention
from .base import Mixer
from .delta import DeltaNet, GatedDeltaNet
from .linear import GLA, MALA, LinearAttention, NaLaAttention, PolaAttention, Retention, SoftAttention
from .options import check_names, check_types, did_you_mean
from .plugins import missing_plugins, register
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


def register_mixer(name: str, mixer: type[Mixer]) -> None:
    """Adds a mixer of the calling module to `MIXERS`, for recipes and configs to name.

    Raises ValueError for a name that is taken, or a class that lacks what `base.py` asks of a mixer.
    """
    missing = []
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        missing = ["is not a subclass of Mixer"]
    else:
        missing += [
            f"has no text `{n}`" for n in ("equation", "source") if not isinstance(getattr(mixer, n, 0), str)
        ]
        missing += [
            f"does not define {n}()"
            for n in ("mix", "state_spec", "flops")
            if getattr(mixer, n) is getattr(Mixer, n)
        ]
        classes = mixer.__mro__
        owner = {
            n: next(i for i, c in enumerate(classes) if n in vars(c))
            for n in ("step_options", "heads", "mix", "normalized", "gate", "read_out")
        }
        step = owner.pop("step_options")
        changed = [f"{n}()" for n, at in owner.items() if at < step] if classes[step] is not Mixer else []
        if changed:
            missing.append(
                f"changes {', '.join(changed)} but inherits the decoding kernel's step_options() from "
                f"{classes[step].__name__}; define step_options(), returning None for no kernel"
            )
        signature = list(inspect.signature(mixer.__init__).parameters.values())[1:]
        loose = [p.name for p in signature[2:] if p.kind is not p.KEYWORD_ONLY or p.default is p.empty]
        if [p.name for p in signature[:2]] != ["config", "layer_idx"] or loose:
            missing.append("needs __init__(self, config, layer_idx, *, options with defaults)")
    register("mixer", name, mixer, MIXERS, missing)


def build_mixer(name: str, config, layer_idx: int) -> Mixer:
    """The mixer called `name`, with its share of `config.mixer_options`.

    Raises ValueError for an unknown name, a bad value, or an option that neither the mixer nor its map has.
    """
    if missing := missing_plugins(getattr(config, "plugins", ())):
        raise ValueError(
            f"plugins: {', '.join(missing)} is not importable; import it first, put its file on PYTHONPATH "
            "or load the checkpoint's copy with trust_remote_code=True"
        )
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
