"""Models of flash-linear-attention 0.6.0."""

from nalanda.common.errors import InputError
from nalanda.convert.formats import (
    SHARED,
    Config,
    Field,
    Format,
    add_softmax,
    checked,
    only,
    softmax_options,
    unsupported,
)
from nalanda.model.options import check_types

_FLA = SHARED | {
    "norm_eps": Field(1e-6, "norm_eps"),
    "hidden_act": only("swish"),
    "hidden_ratio": Field(4),  # sets intermediate_size where that is None
    "attnres_block_size": only(None),
    "fuse_norm": Field(True),
    "fuse_swiglu": Field(True),
    "fuse_cross_entropy": Field(True),
    "fuse_linear_cross_entropy": Field(False),
    "use_l2warp": Field(False),
}
_RECURRENT = _FLA | {"attn": Field(None), "attn_mode": Field("chunk")}
_SOFTMAX = {
    "num_kv_heads": Field(None, ".num_kv_heads"),
    "qkv_bias": only(False),
    "window_size": Field(None, ".window"),
    "rope_theta": Field(10000.0, ".rope_theta"),
}
_ATTN = _SOFTMAX | {"layers": Field([]), "num_heads": Field(None)}
_CONV = _RECURRENT | {"use_short_conv": Field(True), "conv_size": Field(4, "conv_size")}
_DELTA = _CONV | {"allow_neg_eigval": Field(False, ".allow_neg_eigval")}
_GATED = {  # sizes of Gated DeltaNet and of those that began with its code
    "num_hidden_layers": Field(21, "num_hidden_layers"),
    "num_heads": Field(6, "num_heads"),
    "head_dim": Field(256),
    "expand_v": Field(2.0),
}
_RETENTION = _RECURRENT | {
    "num_kv_heads": Field(None),
    "feature_map": only(None),
    "use_short_conv": only(False),
    "conv_size": Field(4),
    "use_output_gate": Field(True, "use_gate"),
    "elementwise_affine": only(True),
}
_FLA_NAMES = {"embed_tokens.": "embeddings.", ".mixer_norm.": ".attn_norm.", ".mixer.": ".attn."}
_FUSED_NORM = _FLA_NAMES | {".o_norm.": ".g_norm_swish_gate."}
_QK_EPS = 1e-5  # of the norms of q and k in a Transformer++, whatever norm_eps
# The feature map of each qk_activation.
_MAPS = {"silu": "silu", "relu": "relu", "elu": "elu1", "identity": "identity"}


def _read_fla(foreign: Config, ours: Config) -> None:
    if foreign["intermediate_size"] is None:
        # Theirs: ⅔ of the ratio, as a GLU has a third matrix, rounded up to a multiple of 256.
        width = int(foreign["hidden_size"] * (foreign["hidden_ratio"] or 4) * 2 / 3)
        ours["intermediate_size"] = 256 * -(-width // 256)
    if foreign.get("attn"):
        _read_attn(foreign, ours)


def _read_attn(foreign: Config, ours: Config) -> None:
    """Reads `attn`: a table of the layers that are softmax attention and their options, or a list of tables."""
    attn = foreign["attn"]
    check_types({"attn": attn}, {"attn": dict | list[dict]})
    layers, layer_options = [], []
    for table in [attn] if isinstance(attn, dict) else attn:
        table = checked(table, _ATTN, "attn.")
        check_types(table, {"layers": list[int], "num_heads": int}, "attn.")
        if (H := table["num_heads"]) < 1:
            raise unsupported("attn.num_heads", H)
        layers += table["layers"]
        options = {x.option: table[name] for name, x in _SOFTMAX.items() if x.option}
        layer_options.append(options | {"num_heads": H, "head_dim": foreign["hidden_size"] // H})

    # A proper subset, without repetition: at least one layer keeps the other mixer.
    if not set(layers) < {*range(foreign["num_hidden_layers"])} or len(layers) > len(set(layers)):
        raise unsupported("attn.layers", layers)
    options = layer_options[0]
    if any(others != options for others in layer_options):
        raise InputError("attn: all layers of softmax attention have the same options here")
    if options["rope_theta"] is None:
        raise unsupported("attn.rope_theta", None)
    add_softmax(ours, layers, options)


def _write_fla(ours: Config, foreign: Config) -> None:
    options = softmax_options(ours)
    if options and "attn" in foreign:
        foreign["attn"] = {
            name: options[field.option] if field.option else field.default
            for name, field in _SOFTMAX.items()
        }
        foreign["attn"]["layers"] = [
            i for i, name in enumerate(ours["layers"]) if name == "softmax"
        ]
        foreign["attn"]["num_heads"] = options["num_heads"]


def _read_expanded(foreign: Config, ours: Config) -> None:
    """Here expand_k and expand_v multiply hidden_size, not head_dim."""
    _read_fla(foreign, ours)
    D, H = foreign["hidden_size"], foreign["num_heads"]
    # The widths of a head, from those of all heads.
    K, V = (round(D * foreign[name]) // H for name in ("expand_k", "expand_v"))

    # Ours are ratios to head_dim, which is D / H by default: the same numbers if that is whole.
    if D % H:
        ours |= {"head_dim": K, "expand_v": V / K}
    else:
        ours |= {"expand_k": foreign["expand_k"], "expand_v": foreign["expand_v"]}
    if foreign.get("num_kv_heads") not in (None, H):
        raise unsupported("num_kv_heads", foreign["num_kv_heads"])


def _write_expanded(ours: Config, foreign: Config) -> None:
    _write_fla(ours, foreign)
    for name, size in (("expand_k", "key_dim"), ("expand_v", "value_dim")):
        # The inverse: the width of all heads over hidden_size.
        foreign[name] = ours["num_heads"] * ours[size] / ours["hidden_size"]


def _read_conv(foreign: Config, ours: Config) -> None:
    if not foreign["use_short_conv"]:
        ours["conv_size"] = 0


def _write_conv(ours: Config, foreign: Config) -> None:
    # Without convolutions the size has no effect; 4 is its default.
    foreign |= {"use_short_conv": ours["conv_size"] > 0, "conv_size": ours["conv_size"] or 4}


def _read_deltanet(foreign: Config, ours: Config) -> None:
    _read_expanded(foreign, ours)
    _read_conv(foreign, ours)
    if foreign["qk_activation"] not in _MAPS:
        raise unsupported("qk_activation", foreign["qk_activation"])
    ours["feature_map"] = _MAPS[foreign["qk_activation"]]


def _write_deltanet(ours: Config, foreign: Config) -> None:
    _write_expanded(ours, foreign)
    _write_conv(ours, foreign)
    names = {feature_map: name for name, feature_map in _MAPS.items()}
    foreign["qk_activation"] = names.get(ours["feature_map"], "silu")


def _read_gated_deltanet(foreign: Config, ours: Config) -> None:
    _read_fla(foreign, ours)
    _read_conv(foreign, ours)
    ours |= {name: foreign[name] for name in ("head_dim", "expand_v")} | {"feature_map": "silu"}


def _write_gated_deltanet(ours: Config, foreign: Config) -> None:
    _write_fla(ours, foreign)
    _write_conv(ours, foreign)
    foreign |= {"head_dim": ours["key_dim"], "expand_v": ours["value_dim"] / ours["key_dim"]}


def _read_comba(foreign: Config, ours: Config) -> None:
    _read_gated_deltanet(foreign, ours)
    if foreign["use_output_correction"]:
        return
    if foreign["use_inner_decay"]:
        raise InputError(
            "use_inner_decay: without use_output_correction it has no effect there; "
            "set it to false and leave out the tensors decay"
        )
    ours["mixer_options"]["correction"] = None


def _write_comba(ours: Config, foreign: Config) -> None:
    _write_gated_deltanet(ours, foreign)
    foreign["use_output_correction"] = foreign["correction_factor"] is not None
    if foreign["correction_factor"] is None:
        foreign["correction_factor"] = 1.0  # of no effect there


def _write_retnet(ours: Config, foreign: Config) -> None:
    if ours["key_dim"] > 256:
        raise InputError(
            f"key_dim={ours['key_dim']} cannot be expressed there: retnet has at most 256"
        )
    _write_expanded(ours, foreign)


def _read_transformer(foreign: Config, ours: Config) -> None:
    _read_fla(foreign, ours)
    if foreign["rope_theta"] is None:
        raise unsupported("rope_theta", None)
    if foreign["qk_norm"] and foreign["norm_eps"] != _QK_EPS:
        raise InputError(
            f"qk_norm: its norms of q and k add {_QK_EPS:g} there, norm_eps={foreign['norm_eps']:g} here"
        )


def _read_forgetting(foreign: Config, ours: Config) -> None:
    _read_fla(foreign, ours)
    if foreign["use_output_gate"]:
        ours["mixer_options"]["gate"] = "channel"


def _write_forgetting(ours: Config, foreign: Config) -> None:
    if "softmax" in ours["layers"]:
        raise InputError("layers of softmax beside those of forgetting cannot be expressed there")
    foreign["use_output_gate"] = ours["mixer_options"]["forgetting"]["gate"] == "channel"


FORMATS = {
    "delta_net": Format(
        "DeltaNetForCausalLM",
        "deltanet",
        _DELTA
        | {
            "num_heads": Field(16, "num_heads"),
            "expand_k": Field(1.0),
            "expand_v": Field(1.0),
            "use_gate": Field(False, "use_gate"),
            "use_beta": only(True),
            "use_output_norm": only(True),
            "qk_norm": only("l2"),
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
        | _GATED
        | {
            "num_v_heads": Field(None, ".num_v_heads"),
            "use_gate": Field(True, "use_gate"),
            "output_gate_activation": only("swish", "silu"),
        },
        _read_gated_deltanet,
        _write_gated_deltanet,
        _FLA_NAMES | {".decay.": "."},
    ),
    "comba": Format(
        "CombaForCausalLM",
        "comba",
        _CONV
        | _GATED
        | {
            "num_v_heads": Field(None, ".num_v_heads"),
            "use_output_gate": Field(True, "use_gate"),
            "use_output_correction": Field(True),
            "correction_factor": Field(1.0, ".correction"),
            "use_inner_decay": Field(True, ".inner_decay"),
        },
        _read_comba,
        _write_comba,
        _FLA_NAMES | {".decay.": ".", ".correction.": "."},
    ),
    "kda": Format(
        "KDAForCausalLM",
        "kda",
        _DELTA
        | {
            "num_heads": Field(16, "num_heads"),
            "num_v_heads": Field(None, ".num_v_heads"),
            "head_dim": Field(128),
            "expand_v": Field(1.0),
            "safe_gate": only(False),
            "lower_bound": only(None),
        },
        _read_gated_deltanet,
        _write_gated_deltanet,
        _FLA_NAMES
        | {".decay.": ".", ".a_proj.": ".f_proj.0.", ".a_up_proj.": ".f_proj.1."}
        | {".g_proj.": ".g_proj.0.", ".g_up_proj.": ".g_proj.1."},
    ),
    "gated_deltaproduct": Format(
        "GatedDeltaProductForCausalLM",
        "delta_product",
        _DELTA
        | _GATED
        | {
            "use_output_gate": Field(True, "use_gate"),
            "use_forget_gate": Field(False, ".use_forget_gate"),
            "num_householder": Field(1, ".num_householder"),
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
            "num_heads": Field(4, "num_heads"),
            "expand_k": Field(0.5),
            "expand_v": Field(1.0),
            "clamp_min": only(None),
            "use_gk": only(True),
            "use_gv": only(False),
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
            "num_heads": Field(8, "num_heads"),
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
        | _SOFTMAX
        | {
            "num_heads": Field(32, "num_heads"),
            "qk_norm": Field(False, ".qk_norm"),
            "elementwise_affine": only(True),
        },
        _read_transformer,
        _write_fla,
        _FLA_NAMES,
    ),
    "forgetting_transformer": Format(
        "ForgettingTransformerForCausalLM",
        "forgetting",
        _FLA
        | {
            "num_heads": Field(32, "num_heads"),
            "num_kv_heads": Field(None, ".num_kv_heads"),
            "qkv_bias": only(False),
            "qk_norm": only(False),  # its weights differ by head there
            "window_size": only(None),  # read there, and no token is left out
            "use_output_gate": Field(False),
            "elementwise_affine": only(True),
        },
        _read_forgetting,
        _write_forgetting,
        _FLA_NAMES,
    ),
}
