"""How another library's config and tensors map to ours.

A `Format` checks that two configs mean the same model, and refuses those that do not. It names the tensors
of ours that each of theirs holds. Most formats store weights alike, RoPE's halves included, so only names
differ.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from nalanda.common.errors import InputError
from nalanda.config.model import silence_transformers
from nalanda.model import MIXERS, NalandaConfig
from nalanda.model.attention import SoftmaxAttention

Config = dict[str, Any]

# Keys that any config.json may hold beside the format's own fields.
_INHERITED = {
    *PreTrainedConfig().to_dict(),
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
}

# Keys that transformers reads from every config, whether or not the model's class has them.
_ALWAYS_READ = {
    "attention_chunk_size",
    "is_causal",
    "kv_sharing_modes",
    "layer_types",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "per_layer_config",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of another library's config. Without `means` or `only` it does not affect the result."""

    default: Any
    """Value where the config leaves the field out."""
    means: str = ""
    """Equivalent field of NalandaConfig, or `.name` for an option of the mixer."""
    only: tuple = ()
    """Values that NalandaConfig can express."""

    @property
    def option(self) -> str:
        """The equivalent option of the mixer, or ""."""
        return self.means[1:] if self.means.startswith(".") else ""


def only(*values: Any) -> Field:
    """A field that must have one of these values, the first by default."""
    return Field(values[0], only=values)


@dataclasses.dataclass(frozen=True)
class Tensors:
    """A tensor of another library, and the tensors of ours that it holds."""

    foreign: str
    """Its name there."""
    ours: tuple[str, ...]
    """Names of our tensors; none: a constant."""
    join: Callable[[list[Tensor]], Tensor] = lambda ours: ours[0]
    """Makes it of ours."""
    split: Callable[[Tensor, list[int]], list[Tensor]] = lambda foreign, lengths: [foreign]
    """Splits it into ours; lengths: their sizes along dim 0."""
    shape: tuple[int, ...] | None = None
    """Its shape; None: that of ours, one after the other along dim 0."""


def stacked(foreign: str, ours: tuple[str, ...]) -> Tensors:
    """A tensor that holds the rows of ours, one after the other."""
    return Tensors(foreign, ours, torch.cat, lambda x, lengths: list(x.split(lengths)))


def drop_null_layer(
    settings: Config, kinds: list[str], files: dict[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """A config and tensors without the last layer, if it is a null layer (`null_layer`).

    kinds: the layers' kinds, by the names of transformers.
    """
    if kinds.count("full_attention") != 1 or kinds[-1] != "full_attention":
        return settings, files
    layers = len(kinds) - 1
    last = f"model.layers.{layers}."
    # Both branches of its residual stream end in these: with zeros it adds nothing.
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        output = files.get(last + name)
        if output is None or output.read().any():
            return settings, files

    settings = settings | {"num_hidden_layers": layers, "layer_types": kinds[:-1]}
    return settings, {name: x for name, x in files.items() if not name.startswith(last)}


def null_layer(layer: str, foreign: Config, attention: dict[str, tuple[int, ...]]) -> list[Tensors]:
    """A layer of zeros, which is an exact identity, for engines whose caches need a layer of attention.

    layer: prefix of its tensors' names. attention: the shapes of its attention's weights, by name.
    """
    D, width = foreign["hidden_size"], foreign["intermediate_size"]
    shapes = {
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (width, D),
        "mlp.up_proj": (width, D),
        "mlp.down_proj": (D, width),
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
    }
    dtype = getattr(torch, foreign.get("dtype") or "float32")
    return [
        Tensors(f"{layer}{name}.weight", (), lambda _, shape=shape: torch.zeros(shape, dtype=dtype))
        for name, shape in shapes.items()
    ]


@dataclasses.dataclass(frozen=True)
class Format:
    """Another library's format of a model."""

    architecture: str
    """Class name of the model, for config.json."""
    mixer: str
    """Equivalent mixer of ours, in all layers but those of `softmax` in a hybrid."""
    fields: dict[str, Field]
    """Fields of its config, by name."""
    read: Callable[[Config, Config], None]
    """`read(foreign, ours)` fills in the NalandaConfig arguments that `fields` cannot express."""
    write: Callable[[Config, Config], None]
    """`write(ours, foreign)` fills in its fields; `ours` is as `resolved` returns it."""
    names: dict[str, str]
    """Parts of our tensor names, and their replacements there."""
    config: type[PreTrainedConfig] | None = None
    """Class of its config in transformers, where other keys have no effect; None: any key may have one."""

    def takes(self, mixers: set[str]) -> bool:
        """Whether it has models of these mixers."""
        return self.mixer in mixers and mixers <= {self.mixer, "softmax"}

    def text_model(self, settings: Config, files: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
        """Config and tensors by name, without parts that have no influence on the next token of a text."""
        return settings, files

    def unread(self, settings: Config) -> list[str]:
        """The keys that have a value and no effect: private ones, and those that transformers ignores."""
        unread = []
        for name, value in settings.items():
            if name in self.fields.keys() | _INHERITED or value in (None, False):
                continue
            if name.startswith("_") or self._ignores(name):
                unread.append(name)
        return unread

    def _ignores(self, name: str) -> bool:
        """Whether transformers ignores this key: it does if the config's class does not declare it."""
        if self.config is None or name in _ALWAYS_READ:
            return False
        return name not in {*self.config.__dataclass_fields__, *self.config.attribute_map}

    def ours(self, settings: Config) -> NalandaConfig:
        """The equivalent NalandaConfig. Raises InputError with the name of a field that it cannot express."""
        # What any config may hold is passed over, unless this format has a field of that name.
        left_out = _INHERITED.union(self.unread(settings)) - self.fields.keys()
        settings = {name: value for name, value in settings.items() if name not in left_out}
        foreign = checked(settings, self.fields)

        ours: Config = {"mixer": self.mixer, "mixer_options": {}}
        for name, entry in self.fields.items():
            if entry.option:
                ours["mixer_options"][entry.option] = foreign[name]
            elif entry.means:
                ours[entry.means] = foreign[name]
        self.read(foreign, ours)
        try:
            return NalandaConfig(**ours)
        except ValueError as error:
            raise InputError(str(error)) from None

    def foreign(self, config: NalandaConfig) -> Config:
        """The equivalent config there.

        Raises:
            InputError: reading it back would give a different model, or transformers refuses it.
        """
        if not self.takes(set(config.layer_mixers)):
            raise InputError(f"mixer={config.mixer!r} cannot be expressed there")

        ours, foreign = resolved(config), {}
        for name, entry in self.fields.items():
            if entry.option:
                foreign[name] = ours["mixer_options"][self.mixer][entry.option]
            else:
                foreign[name] = ours[entry.means] if entry.means else entry.default
        self.write(ours, foreign)

        # Read back and compare: a setting that this format has no field for comes back different.
        back = resolved(self.ours(foreign))
        options, options_back = ours.pop("mixer_options"), back.pop("mixer_options")
        pairs = [(mixer, options[mixer], options_back[mixer]) for mixer in options]
        pairs.append((self.mixer, ours, back))
        for mixer, before, after in pairs:
            for name, value in before.items():
                if after[name] != value:
                    raise InputError(
                        f"{name}={value!r} of mixer {mixer!r} cannot be expressed there"
                    )
        if self.config:
            try:
                with silence_transformers():
                    self.config(**copy.deepcopy(foreign))
            except StrictDataclassError as error:  # in lines, the last of which is its cause
                raise InputError(str(error.__cause__).rstrip(".")) from None
        return foreign

    def tensors(self, names: Iterable[str], foreign: Config) -> list[Tensors]:
        """Their tensors in a model with that config, whose tensors have these names here."""
        return [Tensors(self.tensor(name, foreign), (name,)) for name in names]

    def tensor(self, name: str, foreign: Config) -> str:
        """Their name of our tensor `name`."""
        for pattern, replacement in self.names.items():
            name = name.replace(pattern, replacement)
        # A norm of theirs that is not fused with a gate is called g_norm.
        fused = foreign.get("fuse_norm", True) and foreign.get("use_output_gate", True)
        return name if fused else name.replace("g_norm_swish_gate", "g_norm")


def unsupported(name: str, value: Any) -> InputError:
    return InputError(f"{name}={value!r} has no counterpart here")


def checked(settings: Config, fields: dict[str, Field], prefix: str = "") -> Config:
    """The value of every field. Raises InputError for a field or a value that NalandaConfig lacks."""
    for name, value in settings.items():
        if name not in fields and value not in (None, False):
            raise unsupported(prefix + name, value)
    values = {name: settings.get(name, entry.default) for name, entry in fields.items()}
    for name, entry in fields.items():
        if entry.only and values[name] not in entry.only:
            raise unsupported(prefix + name, values[name])
    return values


def rope_settings(foreign: Config, *names: str) -> Config:
    """A copy of the first of these fields that has a value, and its `rope_type`."""
    name = next((name for name in names if foreign[name]), names[-1])
    rope = foreign[name] or {}
    if not isinstance(rope, dict):
        raise unsupported(name, rope)
    # `type` is the older name of `rope_type`.
    older = {"rope_type": rope.get("type", "default")}
    return older | {key: value for key, value in rope.items() if key != "type"}


def add_softmax(ours: Config, layers: list[int], options: Config) -> None:
    """Makes those layers of the NalandaConfig's arguments `softmax` with these options.

    The options say `num_heads` and `head_dim` too, because the config's own are those of the other mixer.
    """
    if not layers:
        return
    recurrent = ours["mixer"]
    ours["mixer"] = [
        "softmax" if i in layers else recurrent for i in range(ours["num_hidden_layers"])
    ]
    ours["mixer_options"] = {recurrent: ours["mixer_options"], "softmax": options}


def softmax_options(ours: Config) -> Config:
    """The options of the `softmax` layers, empty without any; `ours` is as `resolved` returns it.

    Raises InputError for an option that no other library has.
    """
    options = ours["mixer_options"].get("softmax", {})
    if options and options["rope_theta"] is None:
        raise InputError("rope_theta=None of mixer 'softmax' cannot be expressed there")
    return options


def resolved(config: NalandaConfig) -> Config:
    """Every setting that affects the model's output, with the defaults for those left open.

    `mixer_options` has those of each mixer by its name. key_dim and value_dim stand for expand_k, expand_v and
    head_dim.
    """
    mixers: dict[str, Any] = config.distinct_mixers()
    options = {name: _resolved_options(config, name, mixer) for name, mixer in mixers.items()}
    # The recurrent mixer has the config's own sizes; softmax only where it is alone.
    main = mixers[next(iter(mixers.keys() - {"softmax"}), "softmax")]

    left_out = {"expand_k", "expand_v", "head_dim", "initializer", "mixer"}
    left_out |= {"parametrization", "base_width"}  # of initial weights and rates alone
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in NalandaConfig.__annotations__ and field.name not in left_out
    }
    return settings | {
        "layers": config.layer_mixers,
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "mixer_options": options,
        "feature_map": main.rule.map,
        "conv_size": main.rule.conv,
        "value_conv": main.rule.value_conv,
        "use_gate": main.rule.gated,
    }


def _resolved_options(config: NalandaConfig, name: str, mixer: Any) -> Config:
    """The options of one mixer, with the defaults, and the sizes that it takes from the config."""
    # The defaults first: an option left open equals one that is written out.
    parameters = inspect.signature(type(mixer).__init__).parameters.values()
    options = {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}
    # Options stand under the names of mixers, or are for all of them.
    by_name = MIXERS.keys() & config.mixer_options.keys()
    options |= config.mixer_options.get(name, {}) if by_name else config.mixer_options

    # None means as many as num_heads.
    if "num_v_heads" in options:
        options["num_v_heads"] = mixer.num_v_heads
    if not isinstance(mixer, SoftmaxAttention):
        return options

    sizes = {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_v_heads,
        "head_dim": mixer.K,
        "value_dim": mixer.V,
        "rotary_dim": mixer.rotary_dim,
    }
    # Sizes stand first, because messages name the first difference, and a head's size explains it best.
    return sizes | options | sizes


def attention_interval(config: NalandaConfig) -> int:
    """n of a GGUF file, where every n-th layer is softmax attention; layers + 1 for a model without any.

    Raises:
        InputError: names the first setting that llama.cpp cannot compute.
    """
    mixers: dict[str, Any] = config.distinct_mixers()
    if "gated_deltanet" not in mixers or mixers.keys() - {"gated_deltanet", "softmax"}:
        raise _not_in_gguf(f"mixer {' and '.join(mixers)}")
    delta, soft = mixers["gated_deltanet"], mixers.get("softmax")

    # (setting, its value, the only value that llama.cpp computes)
    needs = [
        ("use_bias", config.use_bias, False),
        ("position_embedding", config.position_embedding, "none"),
        ("scale_embeddings", config.scale_embeddings, False),
        # Settings of Gated DeltaNet.
        ("feature_map", delta.rule.map, "silu"),
        ("feature_map_options", config.feature_map_options, {}),
        ("use_gate", delta.rule.gated, True),
        ("allow_neg_eigval", delta.rule.beta_scale == 2, False),
        ("norm_write", delta.rule.norm_write, False),
        ("norm_read", delta.rule.norm_read, False),
        ("qk_norm", delta.rule.qk_norm, "l2"),
        ("value_silu", delta.rule.value_silu, True),
        ("conv_size", delta.rule.conv or 0, 4),
        ("value_conv", delta.rule.value_conv, 0),
    ]

    if soft:
        needs += [
            ("window", soft.reach, None),
            ("softmax's qk_norm", soft.qk_norm, True),
            ("rope_scaling", soft.rope_scaling, None),
            ("softmax's gate", soft.gate, "channel"),
            ("softmax's conv_size", soft.rule.conv or 0, 0),
        ]
    for name, value, needed in needs:
        if value != needed:
            raise _not_in_gguf(f"{name}={value!r} (it needs {needed!r})")
    if soft and soft.rope_theta is None:
        raise _not_in_gguf("rope_theta=None")
    for mixer in mixers.values():
        if mixer.K != mixer.V:
            raise _not_in_gguf(
                f"keys of {mixer.K} and values of {mixer.V} entries a head (they must be equal)"
            )

    # Softmax attention in every n-th layer, counted from 1, and nowhere else.
    layers = config.layer_mixers
    interval = layers.index("softmax") + 1 if soft else len(layers) + 1
    if any((name == "softmax") != (i % interval == 0) for i, name in enumerate(layers, 1)):
        raise _not_in_gguf("this order of mixers (softmax must be every n-th layer)")
    return interval


def _not_in_gguf(setting: str) -> InputError:
    return InputError(
        f"{setting} cannot be expressed in GGUF; recipes that llama.cpp runs are gated_deltanet_340m_deploy and "
        "hybrid_340m"
    )


# Fields that all formats share, with flash-linear-attention's defaults.
SHARED = {
    name: Field(default, name)
    for name, default in {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": None,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }.items()
}
