"""Models in KimiLinear's format whose layers are Kimi Delta Attention and dense GLUs.

Its latent attention norms what its keys and values are made of, and its other GLUs are experts: both have no
counterpart here. A config has the published form, with `linear_attn_config`, or that of transformers. The
published one is written; transformers reads both.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from nalanda.common.errors import InputError
from nalanda.convert.formats import (
    SHARED,
    Config,
    Field,
    Format,
    Tensors,
    checked,
    drop_null_layer,
    null_layer,
    only,
    unsupported,
)
from nalanda.model import NalandaConfig

_LINEAR, _FULL = "linear_attention", "full_attention"
_KDA = {  # fields of linear_attn_config, and transformers' names of the first three
    "head_dim": Field(128),
    "num_heads": Field(32),
    "short_conv_kernel_size": Field(4),
    "kda_layers": Field(None),
    "full_attn_layers": Field(None),
}
_TRANSFORMERS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_UNUSED = {  # of latent attention and of experts
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
}
_READ_ONLY = {  # of the other form, and of older releases
    "layer_types",
    "mlp_layer_types",
    *_TRANSFORMERS.values(),
    "attention_bias",
    "attention_dropout",
    "qk_head_dim",
    "rope_scaling",
    "output_router_logits",
    "pretraining_tp",
}


class KimiLinear(Format):
    """Every layer is `kda`. A null layer of latent attention is added at the end, see `null_layer`."""

    def takes(self, mixers: set[str]) -> bool:
        return mixers == {self.mixer}

    def text_model(self, settings: Config, files: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
        """Without a null layer. transformers saves a dense GLU under the name of the experts."""
        files = {
            name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in files.items()
        }
        return drop_null_layer(settings, _layer_types(settings), files)

    def foreign(self, config: NalandaConfig) -> Config:
        foreign = super().foreign(config)
        layers = foreign["num_hidden_layers"]
        foreign["linear_attn_config"]["full_attn_layers"] = [layers + 1]
        # Every layer has a dense GLU, the null layer too.
        return foreign | {"num_hidden_layers": layers + 1, "first_k_dense_replace": layers + 1}

    def tensors(self, names: Iterable[str], foreign: Config) -> list[Tensors]:
        decay_shape = (1, 1, _kda(foreign)["num_heads"], 1)
        tensors = []
        for name in names:
            tensor = Tensors(self.tensor(name, foreign), (name,))
            if name.endswith(".A_log"):  # [H] here
                tensor = dataclasses.replace(
                    tensor,
                    join=lambda ours: ours[0].view(decay_shape),
                    split=lambda foreign, lengths: [foreign.view(-1)],
                    shape=decay_shape,
                )
            tensors.append(tensor)

        kinds = _layer_types(foreign)
        if kinds[-1] == _FULL:
            # Weights of zeros that stand for none of ours, so that the null layer is written too.
            layer = f"model.layers.{len(kinds) - 1}."
            tensors += null_layer(layer, foreign, _null_attention(foreign))
        return tensors


def _null_attention(foreign: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of latent attention, by name."""
    D, H, latent = foreign["hidden_size"], foreign["num_attention_heads"], foreign["kv_lora_rank"]
    # K: entries without positions; shared: rotary ones, whose keys all heads share
    K, shared, V = foreign["qk_nope_head_dim"], foreign["qk_rope_head_dim"], foreign["v_head_dim"]
    return {
        "q_proj": (H * (K + shared), D),
        "kv_a_proj_with_mqa": (latent + shared, D),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (H * (K + V), latent),
        "o_proj": (D, H * V),
    }


def _kda(foreign: Config) -> Config:
    """The sizes of the layers of KDA, in either form, and which layers they are."""
    published = foreign.get("linear_attn_config") or {}
    of_transformers = {
        name: foreign[other]
        for name, other in _TRANSFORMERS.items()
        if foreign.get(other) is not None
    }
    # The published names overrule those of transformers.
    return checked(of_transformers | published, _KDA, "linear_attn_config.")


def _layer_types(foreign: Config) -> list[str]:
    """The kind of each layer's mixer, by the names of transformers."""
    if foreign.get("layer_types"):
        return foreign["layer_types"]
    numbers = range(1, foreign.get("num_hidden_layers", 27) + 1)
    full = _kda(foreign)["full_attn_layers"]
    if full is None:  # transformers' default: every fourth layer, the first apart
        full = [n for n in numbers if n > 1 and n % 4 == 1]
    return [_FULL if n in full else _LINEAR for n in numbers]


def _read(foreign: Config, ours: Config) -> None:
    layers, kda, kinds = foreign["num_hidden_layers"], _kda(foreign), _layer_types(foreign)
    if full := [i + 1 for i, kind in enumerate(kinds) if kind != _LINEAR]:
        raise unsupported("full_attn_layers", full)
    if len(kinds) != layers:
        raise InputError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")

    # transformers lists the kind of each GLU; the published form counts the dense ones at the front.
    if glus := foreign["mlp_layer_types"]:
        sparse = "sparse" in glus
    else:
        sparse = foreign["num_experts"] and foreign["first_k_dense_replace"] < layers
    if sparse:
        raise unsupported("num_experts", foreign["num_experts"])

    ours |= {
        "num_heads": kda["num_heads"],
        "head_dim": kda["head_dim"],
        "conv_size": kda["short_conv_kernel_size"],
        "feature_map": "silu",
        "use_gate": True,
    }
    ours["mixer_options"]["gate_bias"] = False


def _write(ours: Config, foreign: Config) -> None:
    if not ours["conv_size"]:
        raise InputError("conv_size=0 of mixer 'kda' cannot be expressed there")
    layers = ours["num_hidden_layers"]
    foreign["linear_attn_config"] = {
        "head_dim": ours["key_dim"],
        "num_heads": ours["num_heads"],
        "short_conv_kernel_size": ours["conv_size"],
        "kda_layers": [i + 1 for i in range(layers)],
        "full_attn_layers": [],
    }
    foreign["first_k_dense_replace"] = layers
    for name in _READ_ONLY:
        del foreign[name]


FORMATS = {
    "kimi_linear": KimiLinear(
        "KimiLinearForCausalLM",
        "kda",
        {name: field for name, field in SHARED.items() if name != "max_position_embeddings"}
        | {name: Field(default) for name, default in _UNUSED.items()}
        | dict.fromkeys(_READ_ONLY, Field(None))
        | {
            "vocab_size": Field(163840, "vocab_size"),
            "hidden_size": Field(2304, "hidden_size"),
            "intermediate_size": Field(9216, "intermediate_size"),
            "num_hidden_layers": Field(27, "num_hidden_layers"),
            "model_max_length": Field(1048576, "max_position_embeddings"),
            "pad_token_id": Field(163839, "pad_token_id"),
            "bos_token_id": Field(163584, "bos_token_id"),
            "eos_token_id": Field(163586, "eos_token_id"),
            "rms_norm_eps": Field(1e-5, "norm_eps"),
            "hidden_act": only("silu", "swish"),
            "tie_word_embeddings": only(False),
            "linear_attn_config": Field(None),
            "first_k_dense_replace": Field(1),
            "moe_layer_freq": Field(1),
        },
        _read,
        _write,
        {
            ".mixer_norm.": ".input_layernorm.",
            ".mlp_norm.": ".post_attention_layernorm.",
            ".mixer.decay.": ".self_attn.",
            ".mixer.a_proj.": ".self_attn.f_a_proj.",
            ".mixer.a_up_proj.": ".self_attn.f_b_proj.",
            ".mixer.g_proj.": ".self_attn.g_a_proj.",
            ".mixer.g_up_proj.": ".self_attn.g_b_proj.",
            ".mixer.": ".self_attn.",
        },
    )
}
