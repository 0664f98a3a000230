"""The Llama and Qwen3 models of transformers."""

from transformers import LlamaConfig, Qwen3Config

from nalanda.convert.formats import (
    SHARED,
    Config,
    Field,
    Format,
    only,
    rope_settings,
    softmax_options,
    unsupported,
)


def _read_rope(foreign: Config, ours: Config) -> None:
    """Accepts RoPE in rope_parameters, and in the older rope_theta and rope_scaling, as transformers does."""
    rope = rope_settings(foreign, "rope_scaling", "rope_parameters")
    options = ours["mixer_options"]
    options["rope_theta"] = rope.pop("rope_theta", foreign["rope_theta"])
    kind = rope.pop("rope_type")
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", foreign["max_position_embeddings"])
        options["rope_scaling"] = {"rope_type": kind, **rope}
    elif kind != "default":
        raise unsupported("rope_type", kind)
    else:
        # Other keys are allowed if they change nothing, such as a factor of 1.
        for name, value in rope.items():
            if value not in (None, 1):
                raise unsupported(name, value)


def _write(ours: Config, foreign: Config) -> None:
    """Every release reads rope_theta and rope_scaling."""
    options = softmax_options(ours)
    foreign |= {name: options[name] for name in ("rope_theta", "rope_scaling")}
    del foreign["rope_parameters"]
    foreign["head_dim"] = ours["key_dim"]


def _read_llama(foreign: Config, ours: Config) -> None:
    _read_rope(foreign, ours)
    if foreign["attention_bias"] != foreign["mlp_bias"]:
        raise unsupported("attention_bias", foreign["attention_bias"])
    ours["head_dim"] = foreign["head_dim"]


def _read_qwen3(foreign: Config, ours: Config) -> None:
    _read_rope(foreign, ours)
    for kind in foreign["layer_types"] or ():
        if kind != "full_attention":
            raise unsupported("layer_types", kind)
    ours["mixer_options"]["qk_norm"] = True
    ours["head_dim"] = foreign["head_dim"]


_SHARED = SHARED | {
    "hidden_size": Field(4096, "hidden_size"),
    "num_hidden_layers": Field(32, "num_hidden_layers"),
    "num_attention_heads": Field(32, "num_heads"),
    "rms_norm_eps": Field(1e-6, "norm_eps"),
    "hidden_act": only("silu", "swish"),
    "attention_dropout": only(0.0),
    "rope_parameters": Field(None),
    "rope_scaling": Field(None),
    "rope_theta": Field(10000.0),
}
_NAMES = {
    ".mixer_norm.": ".input_layernorm.",
    ".mixer.": ".self_attn.",
    ".mlp_norm.": ".post_attention_layernorm.",
}

LLAMA = {
    "llama": Format(
        "LlamaForCausalLM",
        "softmax",
        _SHARED
        | {
            "intermediate_size": Field(11008, "intermediate_size"),
            "num_key_value_heads": Field(None, ".num_kv_heads"),
            "head_dim": Field(None),
            "attention_bias": Field(False, "use_bias"),
            "mlp_bias": Field(False, "use_bias"),
            "pretraining_tp": Field(1),  # changes only the order of sums
        },
        _read_llama,
        _write,
        _NAMES,
        LlamaConfig,
    )
}

QWEN3 = {
    "qwen3": Format(
        "Qwen3ForCausalLM",
        "softmax",
        _SHARED
        | {
            "vocab_size": Field(151936, "vocab_size"),
            "intermediate_size": Field(22016, "intermediate_size"),
            "max_position_embeddings": Field(32768, "max_position_embeddings"),
            "bos_token_id": Field(None, "bos_token_id"),
            "eos_token_id": Field(None, "eos_token_id"),
            "num_key_value_heads": Field(32, ".num_kv_heads"),
            "head_dim": Field(128),
            "attention_bias": only(False),
            "use_sliding_window": only(False),
            "sliding_window": Field(None),  # has no effect without use_sliding_window
            "max_window_layers": Field(28),
            "layer_types": Field(None),
        },
        _read_qwen3,
        _write,
        _NAMES,
        Qwen3Config,
    )
}
