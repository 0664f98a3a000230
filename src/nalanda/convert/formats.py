"""How another library's config and tensors map to ours.

A `Format` checks that two configs mean the same model, and refuses those that do not. It names the tensors
of ours that each of theirs holds. Most formats store weights alike, RoPE's halves included, so only names
differ.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from nalanda.common.errors import InputError
from nalanda.model import MIXERS, NalandaConfig

Config = dict[str, Any]

# Keys that any config.json may hold beside the format's own fields.
_INHERITED = {
    *PreTrainedConfig().to_dict(),
    *("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"),
}

# Keys that transformers reads from every config, whether or not the model's class has them.
_ALWAYS_READ = {
    *("attention_chunk_size", "is_causal", "kv_sharing_modes", "layer_types", "per_layer_config"),
    *(
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_parameters",
        "rope_scaling",
    ),
    *("quantization_config", "rope_theta", "sliding_window"),
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


def only(*values: Any) -> Field:
    return Field(values[0], only=values)


@dataclasses.dataclass(frozen=True)
class Tensors:
    """A tensor of another library, and the tensors of ours that it holds."""

    foreign: str
    """Its name there."""
    ours: tuple[str, ...]
    """Names of our tensors; none: a constant."""
    join: Callable[[list[Tensor]], Tensor] = lambda parts: parts[0]
    """Makes it of ours."""
    split: Callable[[Tensor, list[int]], list[Tensor]] = lambda tensor, rows: [tensor]
    """Splits it into ours, which have that many rows each."""
    shape: tuple[int, ...] | None = None
    """Its shape; None: the rows of ours together."""


def stacked(foreign: str, ours: tuple[str, ...]) -> Tensors:
    """The rows of ours, one after the other."""
    return Tensors(foreign, ours, torch.cat, lambda tensor, rows: list(tensor.split(rows)))


def without_null_layer(kinds: list[str], files: dict[str, Any]) -> dict[str, Any] | None:
    """The files without the last layer, if it is a null layer, see `null_layer`; kinds: of the layers."""
    last = f"model.layers.{len(kinds) - 1}."
    outputs = [
        files.get(last + name) for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    ]
    if kinds.count("full_attention") != 1 or kinds[-1] != "full_attention":
        return None
    # Both branches of its residual stream end in these: with zeros it adds nothing.
    if any(x is None or x.read().any() for x in outputs):
        return None
    return {name: tensor for name, tensor in files.items() if not name.startswith(last)}


def null_layer(layer: str, foreign: Config, attention: dict[str, tuple[int, ...]]) -> list[Tensors]:
    """A layer of zeros, which is an exact identity, for engines whose caches need a layer of attention.

    attention: the shapes of its attention's weights, by name.
    """
    D, width = foreign["hidden_size"], foreign["intermediate_size"]
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
    shapes |= {"mlp.gate_proj": (width, D), "mlp.up_proj": (width, D), "mlp.down_proj": (D, width)}
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
        # transformers ignores keys that the class of a config does not declare.
        read = self.config and {
            *self.config.__dataclass_fields__,
            *self.config.attribute_map,
            *_ALWAYS_READ,
        }
        return [
            name
            for name, value in settings.items()
            if name not in self.fields.keys() | _INHERITED
            and value not in (None, False)
            and (name.startswith("_") or (read and name not in read))
        ]

    def ours(self, settings: Config) -> NalandaConfig:
        """The equivalent NalandaConfig. Raises InputError with the name of a field that it cannot express."""
        # What any config may hold is passed over, unless this format has a field of that name.
        left_out = (_INHERITED | {*self.unread(settings)}) - self.fields.keys()
        foreign = checked(
            {n: value for n, value in settings.items() if n not in left_out}, self.fields
        )
        ours: Config = {"mixer": self.mixer, "mixer_options": {}}
        for name, entry in self.fields.items():
            if entry.means.startswith("."):
                ours["mixer_options"][entry.means[1:]] = foreign[name]
            elif entry.means:
                ours[entry.means] = foreign[name]
        self.read(foreign, ours)
        try:
            return NalandaConfig(**ours)
        except ValueError as error:
            raise InputError(str(error)) from None

    def foreign(self, config: NalandaConfig) -> Config:
        """The equivalent config there. Raises InputError where reading it back would give a different model."""
        if not self.takes(set(config.layer_mixers)):
            raise InputError(f"mixer={config.mixer!r} cannot be expressed there")
        ours, foreign = resolved(config), {}
        for name, entry in self.fields.items():
            table = ours["mixer_options"][self.mixer] if entry.means.startswith(".") else ours
            foreign[name] = table[entry.means.lstrip(".")] if entry.means else entry.default
        self.write(ours, foreign)
        # Read back and compare: a setting that this format has no field for comes back different.
        back = resolved(self.ours(foreign))
        options, options_back = ours.pop("mixer_options"), back.pop("mixer_options")
        tables = [(mixer, options[mixer], options_back[mixer]) for mixer in options]
        for mixer, before, after in [*tables, (self.mixer, ours, back)]:
            for name, value in before.items():
                if after[name] != value:
                    raise InputError(
                        f"{name}={value!r} of mixer {mixer!r} cannot be expressed there"
                    )
        return foreign

    def tensors(self, names: Iterable[str], foreign: Config) -> list[Tensors]:
        """Their tensors in a model with that config, whose tensors have these names here."""
        return [Tensors(self.tensor(name, foreign), (name,)) for name in names]

    def tensor(self, name: str, foreign: Config) -> str:
        """Their name of our tensor `name`."""
        for part, replacement in self.names.items():
            name = name.replace(part, replacement)
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
    """A copy of the first of these fields that has a value."""
    name = next((name for name in names if foreign[name]), None)
    if name and not isinstance(foreign[name], dict):
        raise unsupported(name, foreign[name])
    return dict(foreign[name]) if name else {}


def add_softmax(ours: Config, layers: list[int], options: Config) -> None:
    """Makes those layers of the NalandaConfig's arguments `softmax` with these options.

    The options say `num_heads` and `head_dim` too, because the config's own are those of the other mixer.
    """
    recurrent = ours["mixer"]
    if layers:
        ours["mixer"] = [
            "softmax" if i in layers else recurrent for i in range(ours["num_hidden_layers"])
        ]
        ours["mixer_options"] = {recurrent: ours["mixer_options"], "softmax": options}


def softmax_options(ours: Config) -> Config:
    """The options of the `softmax` layers, empty without such; `ours` is as `resolved` returns it.

    Raises InputError for one that no other library has.
    """
    options = ours["mixer_options"].get("softmax", {})
    if options and options["rope_theta"] is None:
        raise InputError("rope_theta=None of mixer 'softmax' cannot be expressed there")
    return options


def resolved(config: NalandaConfig) -> Config:
    """Every setting that affects the model's output, with the defaults for those left open. `mixer_options`
    has those of each mixer by its name."""
    mixers, options = config.distinct_mixers(), {}
    # Options stand under the names of mixers, or are for all of them.
    by_name = MIXERS.keys() & config.mixer_options.keys()
    for name, mixer in mixers.items():
        keys = inspect.signature(type(mixer).__init__).parameters.values()
        # The defaults first: an option left open equals one that is written out.
        options[name] = {key.name: key.default for key in keys if key.kind is key.KEYWORD_ONLY}
        options[name] |= config.mixer_options.get(name, {}) if by_name else config.mixer_options
        # Resolved: None means as many as num_heads.
        if "num_v_heads" in options[name]:
            options[name]["num_v_heads"] = mixer.num_v_heads
    if "softmax" in mixers:  # its sizes, the config's where it has none of its own
        full: Any = mixers["softmax"]
        sizes = {"num_heads": full.num_heads, "num_kv_heads": full.num_v_heads, "head_dim": full.K}
        sizes |= {"value_dim": full.V, "rotary_dim": full.rotary_dim}
        options["softmax"] = sizes | {n: x for n, x in options["softmax"].items() if n not in sizes}
    # The recurrent mixer has the config's own sizes; softmax only where it is alone.
    main = mixers[next(iter(mixers.keys() - {"softmax"}), "softmax")]
    fields = [f.name for f in dataclasses.fields(config) if f.name in NalandaConfig.__annotations__]
    # key_dim and value_dim stand for expand_k, expand_v and head_dim.
    left_out = {"expand_k", "expand_v", "head_dim", "initializer", "mixer"}
    return {name: getattr(config, name) for name in fields if name not in left_out} | {
        "layers": config.layer_mixers,
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "mixer_options": options,
        "feature_map": main.map_name,
        "conv_size": main.conv_size,
        "use_gate": main.gated,
    }


def attention_interval(config: NalandaConfig) -> int:
    """n of a GGUF file, where every n-th layer is softmax attention; layers + 1 for a model without any.

    Raises:
        InputError: names the first setting that llama.cpp cannot compute.
    """
    mixers: dict[str, Any] = config.distinct_mixers()
    if "gated_deltanet" not in mixers or mixers.keys() - {"gated_deltanet", "softmax"}:
        raise _not_in_gguf(f"mixer {' and '.join(mixers)}")
    delta, soft = mixers["gated_deltanet"], mixers.get("softmax")
    # Settings of the whole model.
    fields = {"use_bias": False, "position_embedding": "none", "scale_embeddings": False}
    # (setting, its value, the only value that llama.cpp computes)
    needs = [(name, getattr(config, name), wanted) for name, wanted in fields.items()]
    # Settings of Gated DeltaNet.
    needs += [
        ("feature_map", delta.map_name, "silu"),
        ("feature_map_options", config.feature_map_options, {}),
        ("use_gate", delta.gated, True),
        ("allow_neg_eigval", delta.beta_scale == 2, False),
        ("norm_write", delta.norm_write, False),
        ("norm_read", delta.norm_read, False),
        ("qk_norm", delta.qk_norm, "l2"),
        ("conv_size", delta.conv_size or 0, 4),
        ("value_conv", delta.value_conv, 0),
    ]
    # Settings of softmax attention.
    if soft:
        needs += [("window", soft.reach, None), ("softmax's qk_norm", soft.qk_norm, True)]
        needs += [("rope_scaling", soft.rope_scaling, None)]
        needs += [
            ("softmax's gate", soft.gate, "channel"),
            ("softmax's conv_size", soft.conv_size or 0, 0),
        ]
    for name, value, wanted in needs:
        if value != wanted:
            raise _not_in_gguf(f"{name}={value!r} (it needs {wanted!r})")
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


def _not_in_gguf(what: str) -> InputError:
    return InputError(
        f"{what} cannot be expressed in GGUF; recipes that llama.cpp runs are gated_deltanet_340m_deploy and "
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
