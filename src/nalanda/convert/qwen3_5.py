"""The dense text models of Qwen3.5 in transformers: Gated DeltaNet and gated softmax attention."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig

from nalanda.common.errors import InputError
from nalanda.convert.formats import (
    SHARED,
    Config,
    Field,
    Format,
    Tensors,
    add_softmax,
    drop_null_layer,
    null_layer,
    only,
    rope_settings,
    softmax_options,
    stacked,
    unsupported,
)
from nalanda.model import NalandaConfig

_LAYER_TYPES = {"gated_deltanet": "linear_attention", "softmax": "full_attention"}
_DROPPED = ("model.visual.", "visual.", "mtp.")  # images, and predictions further ahead
_SHARED = ("tie_word_embeddings", "dtype", "torch_dtype")  # fields of a multimodal config itself
_NULL_HEAD_DIM = 64  # of the null layer's only head: the least that engines have kernels for


def shifted(foreign: str, ours: str, dtype: torch.dtype) -> Tensors:
    """A norm's weight w, which they store as w − 1.

    That is in fp32, where it is exact for all w ≥ ½ and for all of bf16 but the tiniest. `dtype` is that of
    ours, where it can hold w.
    """

    def add(stored: Tensor, lengths: list[int]) -> list[Tensor]:
        # Theirs plus 1 is ours, in `dtype` only where that loses no bit.
        wide = stored.float() + 1
        narrow = wide.to(dtype)
        return [narrow if torch.equal(narrow.float(), wide) else wide]

    return Tensors(foreign, (ours,), lambda weights: weights[0].float() - 1, add)


def _per_head(foreign: str, ours: tuple[str, ...], heads: int) -> Tensors:
    """A tensor that holds, head by head, the outputs of each of ours."""

    def join(weights: list[Tensor]) -> Tensor:
        by_head = [x.unflatten(0, (heads, -1)) for x in weights]  # [H, n, D] each
        return torch.cat(by_head, 1).flatten(0, 1)  # [H·Σn, D]

    def split(stored: Tensor, lengths: list[int]) -> list[Tensor]:
        by_head = stored.unflatten(0, (heads, -1))  # [H, Σn, D]
        return [x.flatten(0, 1) for x in by_head.split([n // heads for n in lengths], 1)]

    return Tensors(foreign, ours, join, split)


class Qwen3_5(Format):
    """Every layer is `gated_deltanet` or `softmax`.

    A model without a layer of attention gets a null layer at its end, which reading recognises and drops.
    """

    def text_model(self, settings: Config, files: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
        """Of a multimodal model, its text model. Says on stderr how many tensors are dropped."""
        if "text_config" in settings:
            shared = {name: settings[name] for name in _SHARED if name in settings}
            settings = settings["text_config"] | shared

        # Tensors of images, and of predictions further ahead.
        dropped = [name for name in files if name.startswith(_DROPPED)]
        if dropped:
            print(
                f"dropped {len(dropped)} tensors that no text needs, {min(dropped)} for one",
                file=sys.stderr,
            )
        text_files = {
            name.replace("model.language_model.", "model.", 1): tensor
            for name, tensor in files.items()
            if name not in dropped
        }
        # A null layer came in by a conversion, and goes by this one.
        return drop_null_layer(settings, _layer_types(settings), text_files)

    def foreign(self, config: NalandaConfig) -> Config:
        foreign = super().foreign(config)
        if "softmax" not in config.layer_mixers:
            foreign["layer_types"] = [*foreign["layer_types"], "full_attention"]
            foreign["num_hidden_layers"] += 1
        # None where no interval makes these layers: readers then need the list.
        interval = foreign["layer_types"].index("full_attention") + 1
        regular = _layer_types(foreign | {"layer_types": None, "full_attention_interval": interval})
        foreign["full_attention_interval"] = interval if regular == foreign["layer_types"] else None
        return foreign

    def tensors(self, names: Iterable[str], foreign: Config) -> list[Tensors]:
        names = set(names)
        dtype = getattr(torch, foreign.get("dtype") or foreign.get("torch_dtype") or "float32")
        embeddings = {"model.embed_tokens.weight", "lm_head.weight"} & names
        tensors = [Tensors(name, (name,)) for name in sorted(embeddings)]
        tensors.append(shifted("model.norm.weight", "model.norm.weight", dtype))
        heads = foreign.get("num_attention_heads", self.fields["num_attention_heads"].default)
        for i, kind in enumerate(_layer_types(foreign)):
            layer = f"model.layers.{i}."
            # A layer beyond ours is the null layer.
            if layer + "mixer_norm.weight" in names:
                tensors += _layer(layer, kind, heads, dtype)
            else:
                tensors += null_layer(layer, foreign, _null_attention(foreign))
        return tensors


def _layer(layer: str, kind: str, heads: int, dtype: torch.dtype) -> list[Tensors]:
    """The tensors of a layer. layer: prefix of their names; kind: of its mixer; heads: of attention."""
    ours = f"{layer}mixer."
    foreign = f"{layer}{'linear_attn' if kind == 'linear_attention' else 'self_attn'}."

    def weights(*names: str) -> tuple[str, ...]:
        return tuple(f"{ours}{name}.weight" for name in names)

    tensors = [
        shifted(f"{layer}input_layernorm.weight", f"{layer}mixer_norm.weight", dtype),
        shifted(f"{layer}post_attention_layernorm.weight", f"{layer}mlp_norm.weight", dtype),
    ]
    for name in ("gate", "up", "down"):
        glu = f"{layer}mlp.{name}_proj.weight"
        tensors.append(Tensors(glu, (glu,)))

    if kind == "full_attention":
        unchanged = {"k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "o_proj"}
        # One projection there has each head's query and output gate: [2·H·K, D].
        tensors.append(_per_head(f"{foreign}q_proj.weight", weights("q_proj", "g_proj"), heads))
        for norm in ("q_norm", "k_norm"):
            tensors.append(shifted(f"{foreign}{norm}.weight", f"{ours}{norm}.weight", dtype))
    else:
        unchanged = {
            "in_proj_z": "g_proj",
            "in_proj_b": "b_proj",
            "in_proj_a": "a_proj",
            "norm": "o_norm",
            "out_proj": "o_proj",
        }
        # Rows of q, then of k, then of v; so too the filters [channels, 1, W].
        qkv = weights("q_proj", "k_proj", "v_proj")
        filters = weights("q_conv1d", "k_conv1d", "v_conv1d")
        tensors.append(stacked(f"{foreign}in_proj_qkv.weight", qkv))
        tensors.append(stacked(f"{foreign}conv1d.weight", filters))
        for name in ("A_log", "dt_bias"):
            tensors.append(Tensors(foreign + name, (f"{ours}decay.{name}",)))

    for name, our_name in unchanged.items():
        tensors.append(Tensors(f"{foreign}{name}.weight", weights(our_name)))
    return tensors


def _null_attention(foreign: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of softmax attention, by name."""
    D, K = foreign["hidden_size"], foreign["head_dim"]
    H, groups = foreign["num_attention_heads"], foreign["num_key_value_heads"]
    return {
        "q_proj": (2 * H * K, D),
        "k_proj": (groups * K, D),
        "v_proj": (groups * K, D),
        "o_proj": (D, H * K),
        "q_norm": (K,),
        "k_norm": (K,),
    }


def _layer_types(foreign: Config) -> list[str]:
    """The kind of each layer's mixer, by the names of transformers."""
    if foreign.get("layer_types"):
        return foreign["layer_types"]
    interval = foreign.get("full_attention_interval") or 4
    numbers = range(1, foreign.get("num_hidden_layers", 32) + 1)
    return ["linear_attention" if n % interval else "full_attention" for n in numbers]


def _read(foreign: Config, ours: Config) -> None:
    types = _layer_types(foreign)
    for kind in types:
        if kind not in _LAYER_TYPES.values():
            raise unsupported("layer_types", kind)
    if "linear_attention" not in types:
        raise unsupported("layer_types", types)
    if len(types) != foreign["num_hidden_layers"]:
        raise InputError(
            f"layer_types names {len(types)} layers, num_hidden_layers is {foreign['num_hidden_layers']}"
        )

    K, V = foreign["linear_key_head_dim"], foreign["linear_value_head_dim"]
    # Our sizes of a head: K = head_dim, V = head_dim · expand_v.
    ours |= {"head_dim": K, "expand_v": V / K, "feature_map": "silu", "use_gate": True}

    if full := [i for i, kind in enumerate(types) if kind == "full_attention"]:
        rope = rope_settings(foreign, "rope_parameters")
        if (kind := rope["rope_type"]) != "default":
            raise unsupported("rope_type", kind)
        factor = rope.get("partial_rotary_factor", foreign["partial_rotary_factor"])
        options = {
            "num_heads": foreign["num_attention_heads"],
            "num_kv_heads": foreign["num_key_value_heads"],
            "head_dim": foreign["head_dim"],
            "rotary_dim": int(foreign["head_dim"] * factor),
            "rope_theta": rope.get("rope_theta", foreign["rope_theta"]),
            "qk_norm": True,
            "gate": "channel",
        }
        add_softmax(ours, full, options)


def _write(ours: Config, foreign: Config) -> None:
    if not ours["conv_size"]:
        raise InputError("conv_size=0 of mixer 'gated_deltanet' cannot be expressed there")
    # The null layer's single head, where the model has no attention of its own.
    full = softmax_options(ours) or {
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": _NULL_HEAD_DIM,
        "rotary_dim": 16,
        "rope_theta": 10000.0,
    }
    # A third of the rotary pairs for each axis of an image; the axes are equal in text.
    third = full["rotary_dim"] // 6
    foreign |= {
        "layer_types": [_LAYER_TYPES[mixer] for mixer in ours["layers"]],
        "linear_key_head_dim": ours["key_dim"],
        "linear_value_head_dim": ours["value_dim"],
        "num_attention_heads": full["num_heads"],
        "num_key_value_heads": full["num_kv_heads"],
        "head_dim": full["head_dim"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": full["rope_theta"],
            "partial_rotary_factor": full["rotary_dim"] / full["head_dim"],
            "mrope_interleaved": True,
            "mrope_section": [full["rotary_dim"] // 2 - 2 * third, third, third],
        },
    }
    # Both stand in rope_parameters now.
    del foreign["partial_rotary_factor"], foreign["rope_theta"]


FORMATS = {
    "qwen3_5_text": Qwen3_5(
        "Qwen3_5ForCausalLM",
        "gated_deltanet",
        SHARED
        | {
            "vocab_size": Field(248320, "vocab_size"),
            "hidden_size": Field(4096, "hidden_size"),
            "intermediate_size": Field(12288, "intermediate_size"),
            "num_hidden_layers": Field(32, "num_hidden_layers"),
            "max_position_embeddings": Field(32768, "max_position_embeddings"),
            "bos_token_id": Field(None, "bos_token_id"),
            "eos_token_id": Field(None, "eos_token_id"),
            "rms_norm_eps": Field(1e-6, "norm_eps"),
            "hidden_act": only("silu", "swish"),
            "layer_types": Field(None),
            "full_attention_interval": Field(None),
            "linear_num_key_heads": Field(16, "num_heads"),
            "linear_num_value_heads": Field(32, ".num_v_heads"),
            "linear_key_head_dim": Field(128),
            "linear_value_head_dim": Field(128),
            "linear_conv_kernel_dim": Field(4, "conv_size"),
            "num_attention_heads": Field(16),
            "num_key_value_heads": Field(4),
            "head_dim": Field(256),
            "attn_output_gate": only(True),
            "attention_bias": only(False),
            "attention_dropout": only(0.0),
            "rope_parameters": Field(None),
            "rope_theta": Field(10000.0),
            "partial_rotary_factor": Field(0.25),
            "mamba_ssm_dtype": Field("float32"),
            "mtp_num_hidden_layers": Field(0),
            "mtp_use_dedicated_embeddings": Field(False),
        },
        _read,
        _write,
        {},
        Qwen3_5TextConfig,
    )
}
