"""NalandaConfig describes every architecture of Nalanda, with transformers' names."""

import dataclasses
import functools
import importlib
import math
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from .base import Mixer
from .feature_maps import FEATURE_MAPS
from .mixers import MIXERS, build_mixer
from .options import beyond, check_types, defaults, did_you_mean
from .plans import FIRST, joined_plan
from .plugins import missing_plugins, plugin_files, plugins_of
from .width import base_config

AUTO_MAP = {
    "AutoModel": "decoder.Decoder",
    "AutoModelForCausalLM": "language.NalandaForCausalLM",
    "AutoModelForMaskedLM": "heads.NalandaForMaskedLM",
    "AutoModelForSequenceClassification": "heads.NalandaForSequenceClassification",
    "AutoModelForTokenClassification": "heads.NalandaForTokenClassification",
    "AutoModelForQuestionAnswering": "heads.NalandaForQuestionAnswering",
    "AutoModelForMultipleChoice": "heads.NalandaForMultipleChoice",
    "AutoModelForImageClassification": "vision.NalandaForImageClassification",
}
"""transformers' Auto classes to ours, by file."""

# Keys that transformers adds to a config's own fields.
_FOREIGN_KEYS = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "plugins",
        "quantization_config",
        "torch_dtype",
    }
)

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "image_size",
    "patch_size",
    "num_channels",
    "norm_eps",
    "initializer_range",
    "base_width",
)


@functools.cache
def _register_models() -> None:
    """Lets transformers find the models."""
    # `transformers serve` looks up the class named in config.json in its own, earlier copy of `transformers`. The
    # Auto class there loads the code in the checkpoint.
    serving = sys.modules.get("transformers.cli.serving.model_manager")
    for module in (transformers, getattr(serving, "transformers", transformers)):
        setattr(module, "NalandaForCausalLM", transformers.AutoModelForCausalLM)  # noqa: B010

    if __package__ != "nalanda.model":
        return  # a copy beside weights: transformers registers what it loads of it
    # `save_pretrained` then copies these files, so that checkpoints load elsewhere with trust_remote_code.
    NalandaConfig.register_for_auto_class()
    for auto, name in AUTO_MAP.items():
        file, _, model = name.partition(".")
        model_class = getattr(importlib.import_module(f".{file}", __package__), model)
        getattr(transformers, auto).register(NalandaConfig, model_class)
        model_class.register_for_auto_class(auto)


def repeated(mixer: dict[str, Any], layers: int) -> list[str]:
    """One name per layer from `{"pattern": names}`."""
    pattern = mixer.get("pattern")
    if mixer.keys() != {"pattern"} or not isinstance(pattern, (list, tuple)) or not pattern:
        raise ValueError(
            f"mixer={mixer!r}: give a name, a list of names, or {{pattern: [names]}} to repeat"
        )
    if type(layers) is not int:
        raise TypeError(f"num_hidden_layers={layers!r} must be an int")
    return [pattern[i % len(pattern)] for i in range(layers)]


class NalandaConfig(PreTrainedConfig):
    """Configuration of every model of Nalanda. Unknown keys are refused, and so is a value that no mixer of
    the model uses.

    Raises ValueError, in one line that says what to change, for values that cannot work.
    """

    model_type = "nalanda"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}

    vocab_size: int = 32000
    """Size of the vocabulary; by default in a recipe, the tokenizer's, rounded up to a multiple of 64."""
    hidden_size: int = 1024
    """Width of the decoder."""
    num_hidden_layers: int = 24
    """Blocks, of a mixer and a GLU each."""
    num_heads: int = 8
    """Heads of the mixer (transformers' `num_attention_heads`)."""
    head_dim: int = None  # pyrefly: ignore[bad-assignment]  (None is resolved in __post_init__)
    """Size of a head; None: hidden_size // num_heads."""
    expand_k: float = 1.0
    """K, the size of a head's queries and keys, is head_dim · expand_k."""
    expand_v: float = 1.0
    """V, the size of a head's values, is head_dim · expand_v."""
    intermediate_size: int = None  # pyrefly: ignore[bad-assignment]
    """Width of the GLU; None: 8/3 · hidden_size, rounded up to a multiple of 256."""
    mixer: str | list[str] = "gated_deltanet"
    """A name from `MIXERS`, or one name a layer, or `{pattern: names}`, repeated over the layers and kept as
    one name a layer."""
    mixer_options: dict[str, Any] = None  # pyrefly: ignore[bad-assignment]
    """Options of the mixer, or of each mixer by its name."""
    feature_map: str | None = None
    """A name from `FEATURE_MAPS`; None: the mixer's choice."""
    feature_map_options: dict[str, Any] = None  # pyrefly: ignore[bad-assignment]
    """Options of the map. Naming another map on the command line drops those of the recipe."""
    conv_size: int | None = None
    """Taps of the short convolutions of q, k and v, 0 for none; None: the mixer's choice. k × k in images."""
    value_conv: int | None = None
    """Taps of a depthwise convolution of v that is added to the mixer's output, 0 for none; None: 5 in pola,
    else none. k × k in images."""
    use_gate: bool | None = None
    """Whether the mixer has an output gate; None: the mixer's choice."""
    norm_eps: float = 1e-6
    """ε of the norms."""
    tie_word_embeddings: bool = False
    """Whether the head's weights are the embeddings."""
    position_embedding: str = "none"
    """"none", or what is added to the embeddings: "sinusoidal", or "learnt" in images."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by √hidden_size."""
    use_bias: bool = False
    """Whether the projections of q, k, v, output and its gate, and those of the GLU, have biases. Gates of low rank,
    gates of the state and that of softmax attention do not follow it."""
    dropout: float = 0.0
    """Rate for the embeddings and the outputs of mixers and GLU."""
    initializer: str = "normal"
    """"normal", with a standard deviation of initializer_range, or "xavier"."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    parametrization: str = "standard"
    """"standard", or "mup": initial weights and rates are those of a model `base_width` wide, carried over to
    `hidden_size` (`model/width.py`)."""
    base_width: int | None = None
    """hidden_size at which rate and initializer_range were tuned, under mup."""
    max_position_embeddings: int = 2048
    """The training length; the model does not depend on it. By default in a recipe, data.seq_len."""
    is_decoder: bool = True
    """Whether tokens see only those before them. Else the model is an encoder: mixers with an unmasked form
    take it, and short convolutions are centred (by default there are none)."""
    directions: int = 1
    """2: the mixers of an encoder that have no unmasked form mix once each way; the results are added."""
    image_size: int | None = None
    """Height and width of the images that an encoder reads instead of tokens; None: it reads tokens."""
    patch_size: int = 16
    """Height and width of a patch, which is one token of an image."""
    num_channels: int = 3
    """Channels of the images."""
    use_cache: bool = True
    """Whether a forward pass returns the states."""
    bos_token_id: int | None = 1
    """As in transformers; in a recipe, the tokenizer's."""
    eos_token_id: int | list[int] | None = 2
    """As in transformers; in a recipe, the tokenizer's."""
    pad_token_id: int | None = None
    """As in transformers; in a recipe, the tokenizer's."""

    def __post_init__(self, **kwargs):
        # Models and Auto classes take seconds to import, and nobody needs them without a config.
        _register_models()
        self._refuse_unknown(kwargs)
        # For a tied model transformers 5.19, which vLLM has, asks here for a plan that needs what comes below.
        tied, self.tie_word_embeddings = self.tie_word_embeddings, False
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = tied
        if isinstance(self.mixer, dict):
            self.mixer = repeated(self.mixer, self.num_hidden_layers)
        self.check_types()
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: "
                    "change one of them or set head_dim"
                )
            self.head_dim = self.hidden_size // self.num_heads
        if self.intermediate_size is None:
            self.intermediate_size = 256 * -(-self.hidden_size * 8 // (3 * 256))
        self.mixer_options = dict(self.mixer_options or {})
        self.feature_map_options = dict(self.feature_map_options or {})
        self._check_sizes()
        self._check_images()
        if isinstance(self.mixer, (list, tuple)):
            self.mixer = list(self.mixer)
            if len(self.mixer) != self.num_hidden_layers:
                raise ValueError(
                    f"mixer names {len(self.mixer)} layers, num_hidden_layers is {self.num_hidden_layers}: "
                    "give one name, or one for each layer"
                )
        # Without defaults, so that another name begins with those of its own map.
        self.feature_map_options = beyond(self._map_defaults(), self.feature_map_options)
        if missing_plugins(getattr(self, "plugins", ())):
            return  # a model that is loaded with trust_remote_code brings them; `build_mixer` refuses others
        mixers = self.distinct_mixers()  # building them refuses what cannot work
        if plugins := plugins_of(mixers):
            self.plugins = plugins
        self._check_mixers(mixers)
        self._check_parametrization()

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """As pickle does without it: a process may have no other config."""
        _register_models()
        vars(self).update(fields)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """transformers', of `migrated` keys."""
        return super().from_dict(cls.migrated(config_dict), **kwargs)

    @staticmethod
    def migrated(keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of an earlier version with today's names: a map with `power: null` had no exponents."""
        name, options = keys.get("feature_map"), dict(keys.get("feature_map_options") or {})
        without = "power" in options and options["power"] is None

        if without and name in ("nala_paper", "nala_released"):
            del options["power"]
            options = {"query_power": 1.0, "key_power": 1.0} | options
        elif without and name in (None, "nala"):
            name = "angle"
        elif name == "angle" and options.get("power") is not None:
            name = "nala"
        if name == "angle":  # neither has an effect there
            options = {
                key: value for key, value in options.items() if key not in ("power", "power_norm")
            }

        return keys | {"feature_map": name, "feature_map_options": options}

    def to_dict(self) -> dict[str, Any]:
        """transformers', with the defaults of the map written out: a saved model keeps its meaning."""
        values = super().to_dict()
        return values | {
            "feature_map_options": self._map_defaults() | (self.feature_map_options or {})
        }

    def _map_defaults(self) -> dict[str, Any]:
        """Those of the named map, else of the one map that all mixers choose."""
        mixers = [self.mixer] if isinstance(self.mixer, str) else self.mixer
        chosen = {MIXERS[name].rule.map for name in mixers if name in MIXERS} - {None}
        names = chosen if self.feature_map is None else {self.feature_map}
        rows = [FEATURE_MAPS[name] for name in names if name in FEATURE_MAPS]
        return defaults(rows[0]) if len(names) == len(rows) == 1 else {}

    def check_types(self) -> None:
        """Raises ValueError for a field of another type, or a size that is no size."""
        types = {
            f.name: f.type
            for f in dataclasses.fields(self)
            if f.name in NalandaConfig.__annotations__
        }
        values = {name: getattr(self, name) for name in types}
        for name in ("head_dim", "intermediate_size", "mixer_options", "feature_map_options"):
            if values[name] is None:  # resolved below
                del values[name]
        check_types(values, types)
        for name in _POSITIVE:
            value = 1 if values.get(name) is None else values[name]
            if value <= 0:
                raise ValueError(f"{name}={value!r} must be positive")
            if value > (most := 10**5 if name == "num_hidden_layers" else 2**31 - 1):
                raise ValueError(f"{name}={value!r} must be at most {most}")

    def _check_sizes(self) -> None:
        for name in ("expand_k", "expand_v"):
            size = self.head_dim * getattr(self, name)
            if size < 1 or size != int(size):
                raise ValueError(
                    f"head_dim·{name} = {self.head_dim}·{getattr(self, name)} must be a positive integer"
                )
        for name in ("conv_size", "value_conv"):
            taps = getattr(self, name)
            if taps is not None and (taps < 0 or taps == 1):
                raise ValueError(f"{name}={taps!r} must be 0 (no convolution) or at least 2")
            if self.image_size and taps and taps % 2 == 0:
                raise ValueError(f"{name}={taps} must be odd: convolutions of images are centred")
        for name, allowed in (
            ("position_embedding", ("none", "sinusoidal", "learnt")),
            ("initializer", ("normal", "xavier")),
            ("parametrization", ("standard", "mup")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} must be in [0, 1)")
        if self.position_embedding == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(
                f"sinusoidal positions need an even hidden_size, not {self.hidden_size}"
            )

    def _check_parametrization(self) -> None:
        if (self.parametrization == "mup") != (self.base_width is not None):
            raise ValueError(
                "parametrization: mup and base_width, the width of the tuned model, belong together; "
                "set both or none"
            )
        if self.base_width is not None:
            if self.initializer != "normal":
                raise ValueError(
                    f"parametrization=mup: initializer={self.initializer!r} has a width rule of its own; "
                    "take normal"
                )
            base_config(self)  # refuses a width that cannot work

    def _check_images(self) -> None:
        if self.image_size and self.is_decoder:
            raise ValueError("image_size: patches have no order; set is_decoder: false")
        if self.image_size and self.image_size % self.patch_size:
            raise ValueError(
                f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}"
            )
        if self.position_embedding == "learnt" and not self.image_size:
            raise ValueError(
                "position_embedding=learnt is a table for images; set image_size, or take sinusoidal"
            )

    def _check_mixers(self, mixers: dict[str, Mixer]) -> None:
        for field, wanted, default in (
            ("feature_map", self.feature_map or self.feature_map_options, "map"),
            ("conv_size", self.conv_size, "conv"),
            ("use_gate", self.use_gate, "gated"),
        ):
            if wanted and all(getattr(type(m).rule, default) is None for m in mixers.values()):
                names = " and ".join(mixers)
                raise ValueError(
                    f"{field}={getattr(self, field)!r}: {names} does not use it; leave it out"
                )

        # Decoders read one way. Encoders read both at once, or by one pass of causal mixers each way.
        causal = [name for name, mixer in mixers.items() if not mixer.rule.unmasked]
        if self.directions not in (1, 2):
            raise ValueError(
                f"directions={self.directions} must be 1, or 2 for an encoder that mixes each way"
            )
        if self.is_decoder and self.directions == 2:
            raise ValueError("directions=2: a decoder reads one way; set is_decoder: false")
        if not self.is_decoder and causal and self.directions == 1:
            raise ValueError(
                f"is_decoder=false: {' and '.join(causal)} has no form without a mask; set directions: 2 to "
                "add one pass each way"
            )
        if self.directions == 2 and not causal:
            raise ValueError(
                f"directions=2: {' and '.join(mixers)} sees both ways at once; leave it out"
            )

        if MIXERS.keys() & self.mixer_options.keys():  # options of each mixer, by its name
            for name in self.mixer_options:
                if name not in mixers:
                    near = did_you_mean(name, mixers)
                    raise ValueError(f"mixer_options names {name!r}, which no layer has{near}")

    @property
    def key_dim(self) -> int:
        """K, the size of a head's queries and keys before the feature map."""
        return int(self.head_dim * self.expand_k)

    @property
    def value_dim(self) -> int:
        """V, the size of a head's values."""
        return int(self.head_dim * self.expand_v)

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of an image's patches; None for text."""
        return None if self.image_size is None else (self.image_size // self.patch_size,) * 2

    @property
    def layer_mixers(self) -> list[str]:
        """The name of each layer's mixer."""
        return [self.mixer] * self.num_hidden_layers if isinstance(self.mixer, str) else self.mixer

    @property
    def base_model_tp_plan(self) -> dict[str, str] | None:
        """transformers' plan of tensor parallelism for the decoder, see `plans.py`.

        None for models that `check_tensor_parallel` refuses at every degree.
        """
        try:
            plan = joined_plan(self.distinct_mixers())
        except ValueError:
            return None
        return plan if self.image_size else {"embed_tokens": FIRST, **plan}

    @property
    def tensor_parallel_degrees(self) -> list[int]:
        """The numbers of processes over which the heads of all mixers can be split."""
        if self.base_model_tp_plan is None:
            return [1]
        heads = math.gcd(*(math.gcd(*m.head_counts()) for m in self.distinct_mixers().values()))
        return [n for n in range(1, heads + 1) if heads % n == 0]

    def check_tensor_parallel(self, degree: int) -> None:
        """Raises ValueError if the model's heads cannot be split over so many processes."""
        if degree == 1:
            return
        mixers = self.distinct_mixers()
        joined_plan(mixers)
        for name, mixer in mixers.items():
            for heads in mixer.head_counts():
                if heads % degree:
                    raise ValueError(
                        f"tensor parallelism over {degree} processes: they cannot share the {heads} head(s) of "
                        f"mixer {name!r} equally; take {', '.join(map(str, self.tensor_parallel_degrees))}"
                    )

    def _refuse_unknown(self, keys: dict[str, Any]) -> None:
        fields = [name for name in self.__dataclass_fields__ if not name.startswith("_")]
        for key in keys:
            if key.startswith("_") or key in _FOREIGN_KEYS or key in self.attribute_map:
                continue
            raise ValueError(f"unknown model key {key!r}{did_you_mean(key, fields)}")

    def plugin_files(self) -> dict[str, str]:
        """File name to text of what checkpoints carry of the plugins that define the mixers and maps.

        Raises ValueError, in one line, for a plugin whose file cannot travel.
        """
        return plugin_files(getattr(self, "plugins", ()))

    def save_pretrained(self, save_directory: Any, *args, **kwargs) -> None:
        """transformers', with the plugins' files copied beside the model's code, which imports them.

        transformers names and copies only the saved class; the others that fit the model load from the same
        folder. Raises ValueError as `plugin_files` does.
        """
        files, copies = self.plugin_files(), {}
        if AUTO_MAP.keys() & (auto_map := getattr(self, "auto_map", None) or {}):
            other = {"AutoModelForMaskedLM" if self.is_decoder else "AutoModelForCausalLM"}
            images = {"AutoModelForImageClassification"}
            other = AUTO_MAP.keys() - images - {"AutoModel"} if self.image_size else other | images
            for auto, name in AUTO_MAP.items():
                file = Path(__file__).with_name(f"{name.partition('.')[0]}.py")
                if auto not in other and file.exists():
                    auto_map[auto], copies[file.name] = name, file.read_text(encoding="utf-8")
                elif not file.exists() and not Path(save_directory, file.name).exists():
                    # transformers' cache has only the files that the loaded class needs
                    auto_map.pop(auto, None)
        super().save_pretrained(save_directory, *args, **kwargs)
        config_file = Path(save_directory) / "configuration.py"
        for name, text in (copies | files).items():
            (config_file.parent / name).write_text(text, encoding="utf-8")
            line = f"from .{name.removesuffix('.py')} import __name__ as _\n"
            if (
                name in files
                and config_file.exists()
                and line not in (code := config_file.read_text(encoding="utf-8"))
            ):
                config_file.write_text(f"{code}\n{line}", encoding="utf-8")

    def distinct_mixers(self) -> dict[str, Mixer]:
        """One module for each of the layers' mixers, on the meta device."""
        try:
            with torch.device("meta"):
                return {
                    name: build_mixer(name, self, 0) for name in dict.fromkeys(self.layer_mixers)
                }
        except (OverflowError, RuntimeError) as error:  # too large for a tensor
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"hidden_size={self.hidden_size}, num_heads={self.num_heads}: {reason}"
            ) from None

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token at length `seq_len`; training takes three times as many.

        Of an image's patch, at the number of its patches, with its share of the classifier.
        A multiply-add is two. Includes all matrix products with the head's, the convolutions, and the mixers'
        own terms in chunkwise form (half of T × T for causal attention). Excludes the embedding's look-up,
        norms and other elementwise work.
        """
        mixers = {
            name: sum(2 * m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear))
            + mixer.flops(seq_len) * (1 if self.is_decoder or mixer.rule.unmasked else 2)
            for name, mixer in self.distinct_mixers().items()
        }
        glu = 2 * 3 * self.hidden_size * self.intermediate_size
        head = 2 * self.hidden_size * self.vocab_size
        if self.image_size is not None:
            pixels = self.num_channels * self.patch_size**2
            head = 2 * self.hidden_size * (pixels + (self.num_labels or 0) / seq_len)
        return float(sum(mixers[name] + glu for name in self.layer_mixers) + head)

    def state_bytes(self, T: int, dtype: torch.dtype = torch.bfloat16, degree: int = 1) -> int:
        """Bytes of one sequence's state after T tokens in a model of `dtype`.

        degree: of tensor parallelism; bytes in each process.
        """
        sizes = {
            name: sum(
                torch.Size(shape).numel()
                * (state_dtype or dtype).itemsize
                // (1 if mixer.is_whole(state) else degree)
                for state, (shape, state_dtype) in mixer.state_spec(T).items()
            )
            for name, mixer in self.distinct_mixers().items()
        }
        return sum(sizes[name] for name in self.layer_mixers)
