"""Checkpoints of flash-linear-attention and of transformers' Llama, made ours, and ours made theirs.

All of them lay their weights out alike, RoPE's halves included, so that tensors are renamed and never turned.
The work is to see that two configs mean the same model, and to refuse where they cannot.
"""

import dataclasses
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save

from nalanda.common.errors import InputError
from nalanda.config.model_folder import weight_files
from nalanda.data.hub import is_hub_id
from nalanda.model import NalandaConfig
from nalanda.train.export import hub_errors, new_folder, pad_batches

Config = dict[str, Any]

# What a config.json of any kind may hold beside the fields of its own.
_INHERITED = {
    *PreTrainedConfig().to_dict(),
    *("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"),
}


_SIDE_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "additional_chat_templates", "generation_config.json", "LICENSE*", "NOTICE*"),
)


_COMPUTED = re.compile(r"rotary(_emb)?\.inv_freq$")  # older releases saved it; its base is in the config


# ------------------------------ two configs for one model


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of others' config: its default, and what it is with us.

    means: the field of NalandaConfig, or `.name` for an option of the mixer. Otherwise `only`, the values
    that we can express; a field without either changes no result.
    """

    default: Any
    means: str = ""
    only: tuple = ()


def _only(*values: Any) -> Field:
    return Field(values[0], only=values)


@dataclasses.dataclass(frozen=True)
class Format:
    """How others keep a model whose layers are all of one mixer of ours.

    `read(theirs, ours)` and `write(ours, theirs)` fill in what `fields` cannot say; ours is the arguments of
    a NalandaConfig there, and `resolved` here. `names`: what pieces of our tensors' names are with them.
    """

    architecture: str
    mixer: str
    fields: dict[str, Field]
    read: Callable[[Config, Config], None]
    write: Callable[[Config, Config], None]
    names: dict[str, str]

    def ours(self, given: Config) -> NalandaConfig:
        """Raises InputError for what we cannot express, by its name."""
        for name, value in given.items():
            if name not in self.fields and name not in _INHERITED and value not in (None, False):
                raise _unlike(name, value)
        theirs = {name: given.get(name, known.default) for name, known in self.fields.items()}
        ours: Config = {"mixer": self.mixer, "mixer_options": {}}
        for name, known in self.fields.items():
            if known.only and theirs[name] not in known.only:
                raise _unlike(name, theirs[name])
            if known.means.startswith("."):
                ours["mixer_options"][known.means[1:]] = theirs[name]
            elif known.means:
                ours[known.means] = theirs[name]
        self.read(theirs, ours)
        try:
            return NalandaConfig(**ours)
        except ValueError as error:
            raise InputError(str(error)) from None

    def theirs(self, config: NalandaConfig) -> Config:
        """Raises InputError where what can be read back from theirs is another model than `config`."""
        if {self.mixer} != set(config.layer_mixers):
            raise InputError(f"mixer={config.mixer!r} cannot be expressed there")
        ours, theirs = resolved(config), {}
        for name, known in self.fields.items():
            table = ours["mixer_options"] if known.means.startswith(".") else ours
            theirs[name] = table[known.means.lstrip(".")] if known.means else known.default
        self.write(ours, theirs)
        back = resolved(self.ours(theirs))
        for mine, other in ((ours["mixer_options"], back["mixer_options"]), (ours, back)):
            for name, value in mine.items():
                if other[name] != value:
                    raise InputError(f"{name}={value!r} of mixer {self.mixer!r} cannot be expressed there")
        return theirs

    def tensor(self, name: str, theirs: Config) -> str:
        """What they call our tensor `name`."""
        for mine, other in self.names.items():
            name = name.replace(mine, other)
        fused = theirs.get("fuse_norm", True) and theirs.get("use_output_gate", True)
        return name if fused else name.replace("g_norm_swish_gate", "g_norm")


def _unlike(name: str, value: Any) -> InputError:
    return InputError(f"{name}={value!r} has no counterpart here")


def resolved(config: NalandaConfig) -> Config:
    """All that decides what the model computes, what the config leaves open as its mixer takes it."""
    (mixer,) = config.distinct_mixers().values()
    keys = inspect.signature(type(mixer).__init__).parameters.values()
    options = {key.name: key.default for key in keys if key.kind is key.KEYWORD_ONLY}
    mine = [f.name for f in dataclasses.fields(config) if f.name in NalandaConfig.__annotations__]
    other = {"expand_k", "expand_v", "head_dim", "initializer", "mixer"}  # the first three: K and V
    return {name: getattr(config, name) for name in mine if name not in other} | {
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "mixer_options": options | config.mixer_options.get(config.layer_mixers[0], config.mixer_options),
        "feature_map": mixer.map_name,
        "conv_size": mixer.conv_size,
        "use_gate": mixer.gated,
    }


# ------------------------------ what flash-linear-attention's models are with us (0.6.0)

_SHARED = {
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


_FLA = _SHARED | {
    "norm_eps": Field(1e-6, "norm_eps"),
    "hidden_act": _only("swish"),
    "hidden_ratio": Field(4),  # of an intermediate_size that is not given
    "attnres_block_size": _only(None),
    "fuse_norm": Field(True),
    "fuse_swiglu": Field(True),
    "fuse_cross_entropy": Field(True),
    "fuse_linear_cross_entropy": Field(False),
    "use_l2warp": Field(False),
}


_RECURRENT = _FLA | {"attn": _only(None), "attn_mode": Field("chunk")}


_DELTA = _RECURRENT | {
    "use_short_conv": Field(True),
    "conv_size": Field(4, "conv_size"),
    "allow_neg_eigval": Field(False, ".allow_neg_eigval"),
}


_RETENTION = _RECURRENT | {
    "num_kv_heads": Field(None),
    "feature_map": _only(None),
    "use_short_conv": _only(False),
    "conv_size": Field(4),
    "use_output_gate": Field(True, "use_gate"),
    "elementwise_affine": _only(True),
}


_FLA_NAMES = {"embed_tokens.": "embeddings.", ".mixer_norm.": ".attn_norm.", ".mixer.": ".attn."}


_FUSED_NORM = _FLA_NAMES | {".o_norm.": ".g_norm_swish_gate."}


_MAPS = {"silu": "silu", "relu": "relu", "elu": "elu1", "identity": "identity"}  # by qk_activation


def _heads(count: int) -> Field:
    return Field(count, "num_heads")


def _read_fla(theirs: Config, ours: Config) -> None:
    if theirs["intermediate_size"] is None:
        width = int(theirs["hidden_size"] * (theirs["hidden_ratio"] or 4) * 2 / 3)
        ours["intermediate_size"] = 256 * -(-width // 256)


def _read_expanded(theirs: Config, ours: Config) -> None:
    """expand_k and expand_v of hidden_size, not of a head's."""
    _read_fla(theirs, ours)
    D, H = theirs["hidden_size"], theirs["num_heads"]
    K, V = (round(D * theirs[name]) // H for name in ("expand_k", "expand_v"))
    if D % H:
        ours |= {"head_dim": K, "expand_v": V / K}
    else:
        ours |= {"expand_k": theirs["expand_k"], "expand_v": theirs["expand_v"]}
    if theirs.get("num_kv_heads") not in (None, H):
        raise _unlike("num_kv_heads", theirs["num_kv_heads"])


def _write_expanded(ours: Config, theirs: Config) -> None:
    for name, size in (("expand_k", "key_dim"), ("expand_v", "value_dim")):
        theirs[name] = ours["num_heads"] * ours[size] / ours["hidden_size"]


def _read_conv(theirs: Config, ours: Config) -> None:
    if not theirs["use_short_conv"]:
        ours["conv_size"] = 0


def _write_conv(ours: Config, theirs: Config) -> None:
    theirs |= {"use_short_conv": ours["conv_size"] > 0, "conv_size": ours["conv_size"] or 4}


def _read_deltanet(theirs: Config, ours: Config) -> None:
    _read_expanded(theirs, ours)
    _read_conv(theirs, ours)
    if theirs["qk_activation"] not in _MAPS:
        raise _unlike("qk_activation", theirs["qk_activation"])
    ours["feature_map"] = _MAPS[theirs["qk_activation"]]


def _write_deltanet(ours: Config, theirs: Config) -> None:
    _write_expanded(ours, theirs)
    _write_conv(ours, theirs)
    theirs["qk_activation"] = next((k for k, v in _MAPS.items() if v == ours["feature_map"]), "silu")


def _read_gated_deltanet(theirs: Config, ours: Config) -> None:
    _read_fla(theirs, ours)
    _read_conv(theirs, ours)
    ours |= {name: theirs[name] for name in ("head_dim", "expand_v")} | {"feature_map": "silu"}


def _write_gated_deltanet(ours: Config, theirs: Config) -> None:
    _write_conv(ours, theirs)
    theirs |= {"head_dim": ours["key_dim"], "expand_v": ours["value_dim"] / ours["key_dim"]}


def _write_retnet(ours: Config, theirs: Config) -> None:
    if ours["key_dim"] > 256:
        raise InputError(f"key_dim={ours['key_dim']} cannot be expressed there: retnet has at most 256")
    _write_expanded(ours, theirs)


def _read_transformer(theirs: Config, ours: Config) -> None:
    _read_fla(theirs, ours)
    if theirs["rope_theta"] is None:
        raise _unlike("rope_theta", None)


def _nothing(ours: Config, theirs: Config) -> None:
    pass


# ------------------------------ what transformers' Llama is with us


def _read_llama(theirs: Config, ours: Config) -> None:
    """RoPE's base by its name of today (rope_parameters) and of yesterday (rope_theta, rope_scaling)."""
    rope = dict(theirs["rope_parameters"] or theirs["rope_scaling"] or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind != "default":
        raise _unlike("rope_type", kind)
    ours["mixer_options"]["rope_theta"] = rope.pop("rope_theta", theirs["rope_theta"])
    for name, value in rope.items():
        if value not in (None, 1):
            raise _unlike(name, value)
    if theirs["attention_bias"] != theirs["mlp_bias"]:
        raise _unlike("attention_bias", theirs["attention_bias"])
    ours |= {"use_bias": theirs["mlp_bias"], "head_dim": theirs["head_dim"]}


def _write_llama(ours: Config, theirs: Config) -> None:
    theirs |= {"attention_bias": ours["use_bias"], "mlp_bias": ours["use_bias"], "head_dim": ours["key_dim"]}
    theirs["rope_theta"] = ours["mixer_options"]["rope_theta"]
    del theirs["rope_parameters"], theirs["rope_scaling"]  # every release reads rope_theta
    if theirs["rope_theta"] is None:
        raise InputError("rope_theta=None of mixer 'softmax' cannot be expressed there")


FORMATS = {
    "delta_net": Format(
        "DeltaNetForCausalLM",
        "deltanet",
        _DELTA
        | {
            "num_heads": _heads(16),
            "expand_k": Field(1.0),
            "expand_v": Field(1.0),
            "use_gate": Field(False, "use_gate"),
            "use_beta": _only(True),
            "use_output_norm": _only(True),
            "qk_norm": _only("l2"),
            "qk_activation": Field("silu"),
        },
        _read_deltanet,
        _write_deltanet,
        _FLA_NAMES,
    ),
    "gated_deltanet": Format(
        "GatedDeltaNetForCausalLM",
        "gated_deltanet",
        _DELTA
        | {
            "num_hidden_layers": Field(21, "num_hidden_layers"),
            "num_heads": _heads(6),
            "num_v_heads": Field(None, ".num_v_heads"),
            "head_dim": Field(256),
            "expand_v": Field(2.0),
            "use_gate": Field(True, "use_gate"),
            "output_gate_activation": _only("swish", "silu"),
        },
        _read_gated_deltanet,
        _write_gated_deltanet,
        _FLA_NAMES | {".decay.": "."},
    ),
    "gla": Format(
        "GLAForCausalLM",
        "gla",
        _RETENTION
        | {
            "num_heads": _heads(4),
            "expand_k": Field(0.5),
            "expand_v": Field(1.0),
            "clamp_min": _only(None),
            "use_gk": _only(True),
            "use_gv": _only(False),
        },
        _read_expanded,
        _write_expanded,
        _FUSED_NORM,
    ),
    "retnet": Format(
        "RetNetForCausalLM",
        "retention",
        _RETENTION
        | {
            "hidden_ratio": Field(2),
            "num_heads": _heads(8),
            "expand_k": Field(1.0),
            "expand_v": Field(2.0),
        },
        _read_expanded,
        _write_retnet,
        _FUSED_NORM,
    ),
    "transformer": Format(
        "TransformerForCausalLM",
        "softmax",
        _FLA
        | {
            "num_heads": _heads(32),
            "num_kv_heads": Field(None, ".num_kv_heads"),
            "qkv_bias": _only(False),
            "qk_norm": _only(False),
            "window_size": Field(None, ".window"),
            "rope_theta": Field(10000.0, ".rope_theta"),
            "elementwise_affine": _only(True),
        },
        _read_transformer,
        _nothing,
        _FLA_NAMES,
    ),
    "llama": Format(
        "LlamaForCausalLM",
        "softmax",
        _SHARED
        | {
            "hidden_size": Field(4096, "hidden_size"),
            "intermediate_size": Field(11008, "intermediate_size"),
            "num_hidden_layers": Field(32, "num_hidden_layers"),
            "num_attention_heads": _heads(32),
            "num_key_value_heads": Field(None, ".num_kv_heads"),
            "head_dim": Field(None),
            "rms_norm_eps": Field(1e-6, "norm_eps"),
            "hidden_act": _only("silu", "swish"),
            "attention_bias": Field(False),
            "mlp_bias": Field(False),
            "attention_dropout": _only(0.0),
            "pretraining_tp": Field(1),  # the order of sums
            "rope_parameters": Field(None),
            "rope_scaling": Field(None),
            "rope_theta": Field(10000.0),
        },
        _read_llama,
        _write_llama,
        {
            ".mixer_norm.": ".input_layernorm.",
            ".mixer.": ".self_attn.",
            ".mlp_norm.": ".post_attention_layernorm.",
        },
    ),
}


# ------------------------------ weights


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file, or some of its rows."""

    file: Path
    name: str
    shape: tuple[int, ...]
    rows: slice | None = None

    def read(self) -> torch.Tensor:
        with safe_open(self.file, "pt") as tensors:
            return tensors.get_slice(self.name)[self.rows] if self.rows else tensors.get_tensor(self.name)


def _stored(folder: Path) -> dict[str, Stored]:
    """The tensors of a model folder, by name.

    Raises:
        InputError: weights that are no safetensors, or not whole.
    """
    files = weight_files(folder)
    if not files:
        if pickles := [*folder.glob("*.bin"), *folder.glob("*.pth")]:
            raise InputError(f"{pickles[0].name} is a pickle, which may run code: save it as safetensors")
        run = (folder / "manifest.json").is_file()
        raise InputError(
            "no model.safetensors there" + "; nalanda export makes a model of a checkpoint" * run
        )
    found = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dict
                found[name] = Stored(file, name, tuple(tensors.get_slice(name).get_shape()))
    return found


def _split_glu(stored: dict[str, Stored], width: int) -> None:
    """Of flash-linear-attention's first releases, whose gate_proj holds up_proj's rows behind its own."""
    for name, both in list(stored.items()):
        up = name.replace(".gate_proj.", ".up_proj.")
        if up != name and up not in stored and both.shape[0] == 2 * width:
            half = dataclasses.replace(both, shape=(width, *both.shape[1:]))
            stored[name] = dataclasses.replace(half, rows=slice(0, width))
            stored[up] = dataclasses.replace(half, rows=slice(width, None))


def _matched(
    stored: dict[str, Stored], config: NalandaConfig, theirs: Callable[[str], str]
) -> dict[str, Stored]:
    """Where our tensors are, by our names; `theirs` gives those in the files.

    Raises:
        InputError: a tensor is missing, not known, or of another shape.
    """
    stored = {name: tensor for name, tensor in stored.items() if not _COMPUTED.search(name)}
    _split_glu(stored, config.intermediate_size)
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
        head, embedding = (stored.get(theirs(n)) for n in ("lm_head.weight", "model.embed_tokens.weight"))
        if head and embedding:
            if not torch.equal(head.read(), embedding.read()):
                raise InputError(f"tie_word_embeddings=True, but {head.name} and {embedding.name} differ")
            del stored[head.name]
    found = {}
    for name, shape in shapes.items():
        tensor = stored.pop(theirs(name), None)
        if tensor is None:
            raise InputError(f"tensor {theirs(name)} is missing")
        if tensor.shape != shape:
            raise InputError(f"tensor {theirs(name)} is {list(tensor.shape)}, the config says {list(shape)}")
        found[name] = tensor
    if stored:
        raise InputError(f"{len(stored)} tensors have no counterpart, {min(stored)} for one")
    return found


def _save(tensors: dict[str, Stored], folder: Path) -> None:
    """Writes tensors under their new names into files called and filled like those that they come from."""
    files: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.file.name, {})[name] = tensor
    total = 0
    for file, group in sorted(files.items()):  # one at a time in memory
        content = {name: tensor.read().contiguous() for name, tensor in group.items()}
        save_file(content, folder / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in content.values())
    if set(files) != {"model.safetensors"}:
        places = {name: tensor.file.name for name, tensor in sorted(tensors.items())}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


# ------------------------------ the whole


def convert(source: str, destination: str, to: str | None = None) -> Path:
    """Writes the model of `source` as one of another kind to `destination`, and returns that.

    Args:
        source: a model folder or an id on the Hugging Face hub: ours, flash-linear-attention's (delta_net,
            gated_deltanet, gla, retnet, transformer), or transformers' llama.
        destination: a folder that does not exist; it is there when all of it is.
        to: nalanda, fla or llama; needed where the source's kind leaves a choice.

    Weights keep their dtype and their shards; tokenizer and generation config go along, see `pad_batches`.

    Raises:
        InputError: what the other kind cannot express, by its name; nothing has been written then.
    """
    out, folder = Path(destination), _folder(source)
    if os.path.lexists(out):
        raise InputError(f"{out} exists; choose another folder")
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no readable config.json ({error})") from None
    kind = given.get("model_type")
    if kind not in FORMATS and kind != "nalanda":
        raise InputError(f"{folder}: model_type {kind!r} is none of nalanda, {', '.join(FORMATS)}")
    target = ""
    try:
        config = NalandaConfig.from_pretrained(folder) if kind == "nalanda" else FORMATS[kind].ours(given)
        target = _target(kind, config, to)
        theirs = {} if target == "nalanda" else FORMATS[target].theirs(config)
        found = _matched(_stored(folder), config, _names(kind, given))
    except ValueError as error:
        arrow = f", {kind} to {target}" if target else ""
        raise InputError(f"{folder}{arrow}: {error}") from None
    dtype = given.get("dtype", given.get("torch_dtype"))
    names = _names(target, theirs)
    with new_folder(out) as part:
        if target == "nalanda":
            _save_config(config, dtype, part)
        else:
            about = {"model_type": target, "architectures": [FORMATS[target].architecture]}
            about |= {"dtype": dtype} if dtype else {}
            text = json.dumps(theirs | about, indent=2, sort_keys=True)
            (part / "config.json").write_text(text + "\n", encoding="utf-8")
        _save({names(name): tensor for name, tensor in found.items()}, part)
        for side in (path for pattern in _SIDE_FILES for path in folder.glob(pattern)):
            (shutil.copytree if side.is_dir() else shutil.copy)(side, part / side.name)
        pad_batches(part)
    return out


def _folder(source: str) -> Path:
    if Path(source).is_dir() or not is_hub_id(source):
        return Path(source).expanduser()
    with hub_errors(f"there is no folder {source}"):
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", *_SIDE_FILES]))


def _target(kind: str, config: NalandaConfig, to: str | None) -> str:
    """The model_type to write."""
    mixers = set(config.layer_mixers)
    kinds = {("llama" if k == "llama" else "fla"): k for k, f in FORMATS.items() if mixers == {f.mixer}}
    kinds = {name: k for name, k in ({"nalanda": "nalanda"} | kinds).items() if k != kind}
    if to is None and (kind != "nalanda" or len(kinds) == 1):
        to = next(iter(kinds))
    if to not in kinds:
        which = "choose by --to" if to is None and kinds else f"not {to or 'another kind'}"
        raise InputError(f"mixer {config.mixer!r} can become {' or '.join(kinds) or 'nothing else'}: {which}")
    return kinds[to]


def _names(kind: str, config: Config) -> Callable[[str], str]:
    return (lambda name: name) if kind == "nalanda" else (lambda name: FORMATS[kind].tensor(name, config))


def _save_config(config: NalandaConfig, dtype: str | None, folder: Path) -> None:
    """config.json and the model's code, as `save_pretrained` writes them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config = model.config
    config.architectures, config.dtype = [type(model).__name__], dtype
    custom_object_save(model, folder, config=config)  # pyrefly: ignore[bad-argument-type]
    config.save_pretrained(folder)
