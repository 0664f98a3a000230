"""The Llama model of transformers."""

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


def _read_llama(theirs: Config, ours: Config) -> None:
    """Accepts RoPE's base in rope_parameters, and in the older rope_theta and rope_scaling."""
    rope = rope_settings(theirs, "rope_parameters", "rope_scaling")
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind != "default":
        raise unsupported("rope_type", kind)
    ours["mixer_options"]["rope_theta"] = rope.pop("rope_theta", theirs["rope_theta"])
    for name, value in rope.items():
        if value not in (None, 1):
            raise unsupported(name, value)
    if theirs["attention_bias"] != theirs["mlp_bias"]:
        raise unsupported("attention_bias", theirs["attention_bias"])
    ours |= {"use_bias": theirs["mlp_bias"], "head_dim": theirs["head_dim"]}


def _write_llama(ours: Config, theirs: Config) -> None:
    theirs |= {"attention_bias": ours["use_bias"], "mlp_bias": ours["use_bias"], "head_dim": ours["key_dim"]}
    theirs["rope_theta"] = softmax_options(ours)["rope_theta"]
    del theirs["rope_parameters"], theirs["rope_scaling"]  # every release reads rope_theta


FORMATS = {
    "llama": Format(
        "LlamaForCausalLM",
        "softmax",
        SHARED
        | {
            "hidden_size": Field(4096, "hidden_size"),
            "intermediate_size": Field(11008, "intermediate_size"),
            "num_hidden_layers": Field(32, "num_hidden_layers"),
            "num_attention_heads": Field(32, "num_heads"),
            "num_key_value_heads": Field(None, ".num_kv_heads"),
            "head_dim": Field(None),
            "rms_norm_eps": Field(1e-6, "norm_eps"),
            "hidden_act": only("silu", "swish"),
            "attention_bias": Field(False),
            "mlp_bias": Field(False),
            "attention_dropout": only(0.0),
            "pretraining_tp": Field(1),  # changes only the order of sums
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
    )
}
