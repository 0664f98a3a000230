"""Conversion from and to other libraries' checkpoints; model cards and uploads of runs."""

import base64
import copy
import dataclasses
import functools
import http.server
import json
import math
import shutil
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
import typer.testing
from covering import covering, slow_but_for
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import nalanda_cli
from nalanda import NalandaConfig
from nalanda.common.errors import InputError, SourceUnavailable
from nalanda.convert import certificate, engines
from nalanda.convert import convert as converting
from nalanda.convert.convert import convert
from nalanda.convert.formats import resolved
from nalanda.model.state import fingerprint
from nalanda.testing import build
from nalanda.train import export as exporting
from nalanda.train.export import push

D, I, N, L = 32, 40, 50, 2  # hidden size, GLU, vocabulary, layers

# A config of each kind as flash-linear-attention 0.6.0 saves it, and the shapes of a layer's mixer.
SIZES = {
    "hidden_size": D,
    "num_hidden_layers": L,
    "intermediate_size": I,
    "vocab_size": N,
    "norm_eps": 1e-5,
}
FLA = {
    "delta_net": (
        {
            "num_heads": 2,
            "expand_k": 0.5,
            "use_gate": True,
            "qk_activation": "elu",
            "allow_neg_eigval": True,
        },
        {
            **{
                "q_proj": (16, D),
                "k_proj": (16, D),
                "v_proj": (32, D),
                "b_proj": (2, D),
                "g_proj": (32, D),
            },
            **{"q_conv1d": (16, 1, 4), "k_conv1d": (16, 1, 4), "v_conv1d": (32, 1, 4)},
            **{"o_norm": (16,), "o_proj": (D, 32)},
        },
    ),
    "gated_deltanet": (
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 12, "expand_v": 0.5},
        {
            **{
                "A_log": (4,),
                "dt_bias": (4,),
                "a_proj": (4, D),
                "b_proj": (4, D),
                "g_proj": (24, D),
            },
            **{"q_proj": (24, D), "k_proj": (24, D), "v_proj": (24, D)},
            **{"q_conv1d": (24, 1, 4), "k_conv1d": (24, 1, 4), "v_conv1d": (24, 1, 4)},
            **{"o_norm": (6,), "o_proj": (D, 24)},
        },
    ),
    "comba": (
        {
            "num_heads": 2,
            "num_v_heads": 4,
            "head_dim": 12,
            "expand_v": 0.5,
            "correction_factor": 0.02,
        },
        {
            **{"A_log": (4,), "dt_bias": (4,), "D": (2,), "decay": (2,)},
            **{"a_proj": (4, D), "b_proj": (4, D), "g_proj": (24, D)},
            **{"q_proj": (24, D), "k_proj": (24, D), "v_proj": (24, D)},
            **{"q_conv1d": (24, 1, 4), "k_conv1d": (24, 1, 4), "v_conv1d": (24, 1, 4)},
            **{"o_norm": (6,), "o_proj": (D, 24)},
        },
    ),
    "kda": (
        {
            "num_heads": 2,
            "num_v_heads": 4,
            "head_dim": 12,
            "expand_v": 0.5,
            "allow_neg_eigval": True,
        },
        {
            **{
                "A_log": (4,),
                "dt_bias": (48,),
                "f_proj.0": (6, D),
                "f_proj.1": (48, 6),
                "b_proj": (4, D),
            },
            **{"g_proj.0": (6, D), "g_proj.1": (24, 6), "g_proj.1.bias": (24,)},
            **{"q_proj": (24, D), "k_proj": (24, D), "v_proj": (24, D)},
            **{"q_conv1d": (24, 1, 4), "k_conv1d": (24, 1, 4), "v_conv1d": (24, 1, 4)},
            **{"o_norm": (6,), "o_proj": (D, 24)},
        },
    ),
    "gated_deltaproduct": (
        {
            "num_heads": 2,
            "head_dim": 12,
            "expand_v": 0.5,
            "num_householder": 2,
            "use_forget_gate": True,
        },
        {
            **{
                "A_log": (2,),
                "dt_bias": (2,),
                "a_proj": (2, D),
                "b_proj": (4, D),
                "g_proj": (12, D),
            },
            **{"q_proj": (24, D), "k_proj": (48, D), "v_proj": (24, D)},
            **{"q_conv1d": (24, 1, 4), "k_conv1d": (48, 1, 4), "v_conv1d": (24, 1, 4)},
            **{"o_norm": (6,), "o_proj": (D, 12)},
        },
    ),
    "gla": (
        {"num_heads": 2, "expand_k": 0.5, "tie_word_embeddings": True},
        {
            **{"q_proj": (16, D), "k_proj": (16, D), "v_proj": (32, D), "g_proj": (32, D)},
            **{"gk_proj.0": (16, D), "gk_proj.1": (16, 16), "gk_proj.1.bias": (16,)},
            **{"g_norm_swish_gate": (16,), "o_proj": (D, 32)},
        },
    ),
    "retnet": (
        {"num_heads": 2, "expand_v": 2.0, "fuse_norm": False},
        {
            **{"q_proj": (32, D), "k_proj": (32, D), "v_proj": (64, D), "g_proj": (64, D)},
            **{"g_norm": (32,), "o_proj": (D, 64)},
        },
    ),
    "transformer": (
        {"num_heads": 4, "num_kv_heads": 2, "window_size": 5, "rope_theta": 100.0},
        {"q_proj": (32, D), "k_proj": (16, D), "v_proj": (16, D), "o_proj": (D, 32)},
    ),
    "forgetting_transformer": (
        {"num_heads": 4, "num_kv_heads": 2, "use_output_gate": True},
        {
            **{"q_proj": (32, D), "k_proj": (16, D), "v_proj": (16, D), "o_proj": (D, 32)},
            **{"f_proj": (4, D), "f_proj.bias": (4,), "g_proj": (32, D)},
        },
    ),
}
# Softmax attention in the first layer: a "hybrid" kind.
ATTN = {"layers": [0], "qkv_bias": False, **FLA["transformer"][0]}
HYBRIDS = [f"{kind} hybrid" for kind in FLA if "transformer" not in kind]
KINDS = (*FLA, *HYBRIDS)
kinds = pytest.mark.parametrize("kind", KINDS)


def parts_of(kind):
    """(model_type, the kind of each layer)"""
    kind, _, hybrid = kind.partition(" ")
    return kind, ["transformer" if hybrid and i == 0 else kind for i in range(L)]


def config_of(kind, **changes):
    kind, layers = parts_of(kind)
    config = {"model_type": kind, **SIZES, **FLA[kind][0], "eos_token_id": 7, "dtype": "float32"}
    return config | ({"attn": ATTN} if layers[0] != kind else {}) | changes


def tensors_of(kind, seed=0):
    """Random weights under its names; norms and decays close to trained values."""
    shapes = {"model.embeddings.weight": (N, D), "model.norm.weight": (D,)}
    kind, layers = parts_of(kind)
    for i in range(L):
        layer = {f"attn.{name}": shape for name, shape in FLA[layers[i]][1].items()}
        layer |= {"attn_norm": (D,), "mlp_norm": (D,)}
        layer |= {"mlp.gate_proj": (I, D), "mlp.up_proj": (I, D), "mlp.down_proj": (D, I)}
        bare = ("A_log", "dt_bias", "bias", ".D", ".decay")
        shapes |= {
            f"model.layers.{i}.{n}" + ".weight" * (not n.endswith(bare)): s
            for n, s in layer.items()
        }
    if not FLA[kind][0].get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (N, D)
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {n: 0.3 * x + (x.dim() == 1 and not n.endswith("bias")) for n, x in noise.items()}


def write(folder, config, tensors, shards=1):
    """A model folder as `save_pretrained` writes it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(sorted(tensors))
    }
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def read(folder):
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


# ------------------------------ reference models, token by token


def rms(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def conv(x, weight):
    """Causal and depthwise: x `[T, C]`, weight `[C, 1, W]`."""
    past = torch.cat([x.new_zeros(weight.shape[-1] - 1, x.shape[1]), x])
    return torch.stack(
        [(past[t : t + weight.shape[-1]].T * weight[:, 0]).sum(1) for t in range(len(x))]
    )


def rope(x, theta):
    """x `[T, H, K]`; a pair is a feature and the one K/2 after it."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None] * torch.complex(
        x[..., :half], x[..., half:]
    )
    return torch.cat([turn.real, turn.imag], -1)


def mixed(kind, c, w, x):
    """A layer's mixer: x `[T, D]` and its weights by name to `[T, heads, V]`."""
    T, H = len(x), c["num_heads"]
    q, k, v = (x @ w[f"{n}_proj.weight"].T for n in "qkv")
    if "q_conv1d.weight" in w:
        q, k, v = (conv(p, w[f"{n}_conv1d.weight"]) for n, p in zip("qkv", (q, k, v), strict=True))
    q = q.view(T, H, -1)
    k = k.view(T, -1, q.shape[-1])
    scale = q.shape[-1] ** -0.5
    if "transformer" in kind:
        v = v.view(T, k.shape[1], -1)
        place = torch.arange(T)
        seen = place[:, None] >= place
        if kind == "transformer":
            q, k = rope(q, c["rope_theta"]), rope(k, c["rope_theta"])
            seen = seen & (place[:, None] - place < c["window_size"])
        k, v = (p.repeat_interleave(H // p.shape[1], 1) for p in (k, v))
        scores = torch.einsum("thk,shk->hts", q, k) * scale
        if kind == "forgetting_transformer":
            c = F.logsigmoid(x @ w["f_proj.weight"].T + w["f_proj.bias"]).cumsum(0).T  # [H, T]
            scores = scores + c[:, :, None] - c[:, None]
        return torch.einsum("hts,shv->thv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    HV, steps = c.get("num_v_heads", H), c.get("num_householder", 1)
    delta = "delta" in kind or kind in ("kda", "comba")
    if delta:
        activation = (lambda p: F.elu(p) + 1) if kind == "delta_net" else F.silu
        q, k = activation(q), activation(k)
        if kind == "comba":
            q = q - (w["D"] * w["decay"].sigmoid())[:, None] * k
        q, k = (p / (p.square().sum(-1, keepdim=True) + 1e-6).sqrt() for p in (q, k))
        v, beta = (
            F.silu(v),
            (x @ w["b_proj.weight"].T).sigmoid() * (2 if c.get("allow_neg_eigval") else 1),
        )
    if kind == "kda":
        a = (x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]).view(T, HV, -1)
        g = -w["A_log"].exp()[:, None] * F.softplus(a)
    elif "a_proj.weight" in w:
        g = -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
    elif kind == "gla":
        rank = x @ w["gk_proj.0.weight"].T
        g = F.logsigmoid(rank @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]).view(T, H, -1) / 16
    elif kind == "retnet":
        q, k = rope(q, 10000.0), rope(k, 10000.0)
        g = (1 - 2.0 ** (-5 - torch.arange(H).double())).log().expand(T, H)
    else:
        g = x.new_zeros(T, H)
    q, k = (p.repeat_interleave(HV // H, 1) for p in (q, k))
    v = v.view(T, steps * HV, -1)
    S, out = x.new_zeros(HV, k.shape[-1], v.shape[-1]), []
    for t in range(T):
        before, S = S, S * g[t].exp().view(HV, -1, 1)
        for i in range(steps):
            mine = slice(i * HV, (i + 1) * HV)
            write, read = v[t, mine], before if kind == "comba" else S
            if delta:
                write = beta[t, mine, None] * (write - torch.einsum("hkv,hk->hv", read, k[t, mine]))
            S = S + k[t, mine, :, None] * write[:, None]
        out.append(torch.einsum("hkv,hk->hv", S, q[t]) * scale)
    return torch.stack(out)


def logits_of(kind, c, tensors, ids):
    """[T] to [T, N] in float64."""
    w = {name: t.double() for name, t in tensors.items()}
    x, eps = w["model.embeddings.weight"][ids], c["norm_eps"]
    for i in range(L):
        layer = {
            n.removeprefix(p): t for n, t in w.items() if n.startswith(p := f"model.layers.{i}.")
        }
        mixer = {n.removeprefix("attn."): t for n, t in layer.items() if n.startswith("attn.")}
        y = rms(x, layer["attn_norm.weight"], eps)
        here = parts_of(kind)[1][i]
        o = mixed(here, ATTN if here != c["model_type"] else c, mixer, y)
        for name in ("o_norm.weight", "g_norm.weight", "g_norm_swish_gate.weight"):
            o = rms(o, mixer[name], eps) if name in mixer else o
        o = o.flatten(1)
        activation = torch.sigmoid if here in ("forgetting_transformer", "comba") else F.silu
        o = o * activation(y @ mixer["g_proj.weight"].T) if "g_proj.weight" in mixer else o
        if "g_proj.0.weight" in mixer:
            gate = (
                y @ mixer["g_proj.0.weight"].T @ mixer["g_proj.1.weight"].T + mixer["g_proj.1.bias"]
            )
            o = o * gate.sigmoid()
        x = x + o @ mixer["o_proj.weight"].T
        y = rms(x, layer["mlp_norm.weight"], eps)
        gate, up = (y @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return (
        rms(x, w["model.norm.weight"], eps)
        @ w.get("lm_head.weight", w["model.embeddings.weight"]).T
    )


@pytest.mark.sampled
@kinds
def test_ours_computes_what_theirs_does(kind, tmp_path):
    source = write(tmp_path / "theirs", config_of(kind), tensors_of(kind), shards=2)
    model, report = AutoModelForCausalLM.from_pretrained(
        convert(str(source), str(tmp_path / "ours")), output_loading_info=True
    )
    assert not any(report.values())
    assert model.config.eos_token_id == 7
    ids = torch.randint(N, (30,), generator=torch.Generator().manual_seed(1))
    expected = logits_of(kind, config_of(kind), tensors_of(kind), ids)
    with torch.no_grad():
        found = model.eval()(ids[None]).logits[0]
    assert expected.abs().max() > 3
    assert (found.double() - expected).abs().max() < 1e-4


@pytest.mark.sampled
@covering(strength=1, kind=KINDS, dtype=(torch.float32, torch.bfloat16))
def test_there_and_back_bit_for_bit(kind, dtype, tmp_path):
    tensors = {name: t.to(dtype) for name, t in tensors_of(kind).items()}
    config = config_of(kind, fuse_norm=True, dtype=str(dtype)[6:])
    tensors = {name.replace(".g_norm.", ".g_norm_swish_gate."): t for name, t in tensors.items()}
    source = write(tmp_path / "theirs", config, tensors, shards=3)
    ours = convert(str(source), str(tmp_path / "ours"))
    back = convert(str(ours), str(tmp_path / "back"), "fla")
    assert same(read(back), tensors)
    written = json.loads((back / "config.json").read_text())
    assert {name: written[name] for name in config} == config
    assert {p.name for p in back.iterdir()} == {p.name for p in source.iterdir()} | {"README.md"}
    for folder, known in ((ours, False), (back, True)):
        assert ("import fla" in (folder / "README.md").read_text()) == known
    again = convert(str(back), str(tmp_path / "again"))
    assert same(read(again), read(ours))
    assert (again / "config.json").read_text() == (ours / "config.json").read_text()


def test_tables_of_softmax_layers_are_joined():
    one = config_of("gla", num_hidden_layers=3, attn={"layers": [0, 2], "num_heads": 4})
    two = one | {"attn": [{"layers": [i], "num_heads": 4, "rope_theta": 10000.0} for i in (2, 0)]}
    ours, joined = (converting.FORMATS["gla"].ours(config) for config in (one, two))
    assert ours.layer_mixers == ["softmax", "gla", "softmax"]
    assert ours.to_dict() == joined.to_dict()


@pytest.mark.slow
def test_what_we_train_goes_out_and_comes_back(tmp_path):
    """Sizes that their config expresses differently, such as heads that do not divide the hidden size."""
    for i, fields in enumerate(
        [
            {
                "mixer": "deltanet",
                "head_dim": 6,
                "expand_v": 2.0,
                "conv_size": 0,
                "feature_map": "identity",
            },
            {
                "mixer": "gated_deltanet",
                "head_dim": 6,
                "expand_k": 2.0,
                "conv_size": 2,
                "use_gate": False,
            },
            {"mixer": "kda", "head_dim": 6, "expand_v": 2.0, "mixer_options": {"num_v_heads": 4}},
            {"mixer": "delta_product", "head_dim": 6, "mixer_options": {"num_householder": 3}},
            {"mixer": "gla", "hidden_size": 30, "num_heads": 4, "head_dim": 6, "use_gate": False},
            {
                "mixer": ["retention"] * 2,
                "expand_v": 2.0,
                "bos_token_id": None,
                "eos_token_id": [3, 4],
            },
            {"mixer": "softmax", "mixer_options": {"window": 9}, "tie_word_embeddings": True},
            {"mixer": "softmax", "mixer_options": {"qk_norm": True}, "norm_eps": 1e-5},
            {"mixer": "forgetting", "mixer_options": {"num_kv_heads": 1}},
            {
                "mixer": "comba",
                "head_dim": 6,
                "expand_v": 2.0,
                "conv_size": 0,
                "mixer_options": {"correction": None, "inner_decay": False, "num_v_heads": 4},
            },
            {
                "mixer": "comba",
                "use_gate": False,
                "mixer_options": {"correction": 0.02, "inner_decay": False},
            },
            {"mixer": "forgetting", "mixer_options": {"gate": "channel"}, "norm_eps": 1e-5},
            {
                "mixer": ["softmax", "gla"],
                "expand_k": 0.5,
                "mixer_options": {"softmax": {"head_dim": 12}},
            },
            {
                "mixer": ["gated_deltanet", "softmax"],
                "mixer_options": {
                    "gated_deltanet": {"num_v_heads": 4},
                    "softmax": {"num_heads": 6, "head_dim": 4, "num_kv_heads": 3, "window": 5},
                },
            },
        ]
    ):
        sizes = {"hidden_size": 24, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 20}
        config = NalandaConfig(**(sizes | {"intermediate_size": 12} | fields))
        folder = tmp_path / str(i)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(folder / "a")
        convert(str(folder / "a"), str(folder / "b"), "fla")
        ours = convert(str(folder / "b"), str(folder / "c"))
        assert same(read(folder / "a"), read(ours))
        ids = torch.arange(15)[None]
        with torch.no_grad():
            back = AutoModelForCausalLM.from_pretrained(ours).eval()
            assert torch.equal(back(ids).logits, model(ids).logits)


def test_the_gate_and_up_projections_that_were_one(tmp_path):
    tensors = tensors_of("retnet")
    for i in range(L):
        gate, up = (f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        tensors[gate] = torch.cat([tensors[gate], tensors.pop(up)])
    a = convert(str(write(tmp_path / "old", config_of("retnet"), tensors)), str(tmp_path / "a"))
    b = convert(
        str(write(tmp_path / "new", config_of("retnet"), tensors_of("retnet"))), str(tmp_path / "b")
    )
    assert same(read(a), read(b))


def test_decays_of_a_half_precision_checkpoint_are_fp32_in_use(tmp_path):
    tensors = {name: t.bfloat16() for name, t in tensors_of("gated_deltanet").items()}
    source = write(tmp_path / "theirs", config_of("gated_deltanet", dtype="bfloat16"), tensors)
    model = AutoModelForCausalLM.from_pretrained(
        convert(str(source), str(tmp_path / "ours")), dtype="auto"
    )
    assert model.dtype == torch.bfloat16
    decay = model.model.layers[1].mixer.decay
    assert decay.A_log.dtype == torch.float32
    assert torch.equal(decay.A_log.bfloat16(), tensors["model.layers.1.attn.A_log"])


# ------------------------------ Llama

LLAMA = {"vocab_size": N, "hidden_size": D, "intermediate_size": I, "num_hidden_layers": L} | {
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        },
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {"num_key_value_heads": 1, "head_dim": 12, "eos_token_id": [3, 4], "pad_token_id": 0},
    ],
)
def test_llama_both_ways(fields, tmp_path):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA, **fields)).eval()
    with torch.no_grad():
        for p in llama.parameters():
            p.add_(0.3 * torch.randn_like(p))
    llama.save_pretrained(tmp_path / "llama")
    ours = convert(str(tmp_path / "llama"), str(tmp_path / "ours"))
    back = convert(str(ours), str(tmp_path / "back"), "llama")
    assert same(read(back), read(tmp_path / "llama"))
    ids = torch.randint(N, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        expected = llama(ids, attention_mask=mask).logits[mask == 1]
        assert expected.abs().max() > 3
        for folder in (ours, back):
            model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(report.values())
            found = model.eval()(ids, attention_mask=mask).logits[mask == 1]
            assert (found - expected).abs().max() < 1e-4, folder
    configs = [
        AutoConfig.from_pretrained(folder).to_dict() for folder in (back, tmp_path / "llama")
    ]
    assert configs[0] | {"_name_or_path": ""} == configs[1] | {"_name_or_path": ""}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
LLAMA3["original_max_position_embeddings"] = 16
PUBLISHED = {  # settings as in configs of the hub, and the keys among them that no model reads
    "smollm2": (
        {
            "rope_theta": 100000,
            "rope_scaling": None,
            "rope_interleaved": False,
            "tie_word_embeddings": True,
        },
        {
            "is_llama_config": True,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
            "_model_name_or_path": "SmolLM2",
            "unk_token_id": 3,
        },
    ),
    "llama 3.1": ({"rope_theta": 500.0, "rope_scaling": LLAMA3, "eos_token_id": [3, 4]}, {}),
    "llama 3.1, transformers 5": (
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
        {"unsloth_fixed": True},
    ),
    "qwen3": (
        {
            **{
                "model_type": "qwen3",
                "head_dim": 12,
                "num_key_value_heads": 2,
                "rope_theta": 1000000,
            },
            **{"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28},
            **{"eos_token_id": 4, "rope_scaling": None, "attention_bias": False},
        },
        {"_name": "x"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but_for(["llama 3.1", "qwen3"], PUBLISHED))
def test_published_configs(name, tmp_path, capsys):
    read_keys, unread = PUBLISHED[name]
    config = LLAMA | {"model_type": "llama"} | read_keys | unread
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config))).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.3 * torch.randn_like(p))
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    ours = convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    back = convert(str(ours), str(tmp_path / "back"), config["model_type"])
    for folder in (ours, back):
        assert (
            "| greedy tokens equal | 32 of 32, with a cache |" in (folder / "README.md").read_text()
        )
    line = f"not read: {', '.join(unread)}: no effect on the model"
    assert (line in capsys.readouterr().err.splitlines()) == bool(unread)
    assert same(read(back), read(tmp_path / "theirs"))
    before, after = (
        AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "theirs", back)
    )
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed <= {*unread, "_name_or_path", "architectures", "dtype", "rope_interleaved"}


def test_shards_that_were_saved_anew_as_one_file(tmp_path):
    """save_pretrained leaves the shards' index, which transformers does not read beside one file."""
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
    llama.save_pretrained(tmp_path / "llama", max_shard_size="10KB")
    with torch.no_grad():
        llama.lm_head.weight.add_(1.0)
    llama.save_pretrained(tmp_path / "llama")
    assert (tmp_path / "llama" / "model.safetensors.index.json").is_file()
    ours = convert(str(tmp_path / "llama"), str(tmp_path / "ours"), check=False)
    assert torch.equal(read(ours)["lm_head.weight"], llama.lm_head.weight)


def test_from_one_kind_of_theirs_to_another(tmp_path):
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "llama")
    fla = convert(str(tmp_path / "llama"), str(tmp_path / "fla"), "fla")
    assert "model.layers.1.attn.q_proj.weight" in read(fla)
    assert json.loads((fla / "config.json").read_text())["model_type"] == "transformer"
    assert same(read(convert(str(fla), str(tmp_path / "back"), "llama")), read(tmp_path / "llama"))


@pytest.mark.slow
def test_tokenizer_and_generation_config_go_along(tokenizer, tmp_path):
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
    llama.generation_config.max_new_tokens = 17
    llama.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "optimizer.pt").write_bytes(b"")
    ours = convert(str(tmp_path / "llama"), str(tmp_path / "ours"))
    loaded = AutoTokenizer.from_pretrained(ours)
    assert loaded("ab").input_ids == tokenizer("ab").input_ids
    padded = loaded(["ab", "c"], padding=True)
    assert padded.input_ids == [tokenizer("ab").input_ids, [0, *tokenizer("c").input_ids]]
    assert padded.attention_mask == [[1, 1, 1], [0, 1, 1]]
    assert AutoModelForCausalLM.from_pretrained(ours).generation_config.max_new_tokens == 17
    assert not (ours / "optimizer.pt").exists()
    assert (ours / "language.py").is_file()
    assert (
        json.loads((ours / "config.json").read_text())["bos_token_id"] == 0
    )  # it is put in front of a text
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save_pretrained(tmp_path / "llama")
    ours = convert(str(tmp_path / "llama"), str(tmp_path / "none"))
    assert (
        json.loads((ours / "config.json").read_text())["bos_token_id"] is None
    )  # although Llama's has one
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    ours = convert(str(tmp_path / "llama"), str(tmp_path / "torn"))
    assert (
        json.loads((ours / "config.json").read_text())["bos_token_id"] == LlamaConfig().bos_token_id
    )


@pytest.mark.parametrize(
    ("settings", "older", "pad"),
    [
        ({"eos_token": "</s>"}, None, "</s>"),
        ({"eos_token": {"content": "</s>"}, "padding_side": "right"}, None, {"content": "</s>"}),
        ({"eos_token": "</s>", "pad_token": "<pad>"}, None, "<pad>"),
        ({}, {"eos_token": "</s>"}, "</s>"),
        ({"eos_token": "</s>", "pad_token": None}, {"pad_token": "<pad>"}, "<pad>"),
        ({}, None, None),
    ],
)
def test_padding_takes_eos_where_there_is_no_token_for_it(settings, older, pad, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"extra": "ä"}))
    if older is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    exporting.pad_batches(tmp_path)
    found = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert found == settings | {"extra": "ä", "padding_side": "left", "pad_token": pad}
    exporting.pad_batches(tmp_path, token_types=False)
    found = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert found["model_input_names"] == ["input_ids", "attention_mask"]


# ------------------------------ errors


def refused(source, tmp_path, to=None):
    """The one-line message of the refused conversion, which writes nothing."""
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError) as caught:
        convert(str(source), str(tmp_path / "out"), to)
    assert set(tmp_path.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("delta_net", {"qk_norm": "sum"}),
        ("delta_net", {"use_beta": False}),
        ("delta_net", {"qk_activation": "gelu"}),
        ("delta_net", {"attn": {"layers": [1]}}),
        *(
            ("retnet", {"attn": {"layers": [1], "num_heads": 2} | changes})
            for changes in (
                *({"qkv_bias": True}, {"qk_norm": True}, {"rope_theta": None}),
                *(
                    {"layers": [0, 1]},
                    {"layers": [2]},
                    {"layers": [1, 1]},
                    {"layers": 1},
                    {"num_heads": 0},
                ),
            )
        ),
        ("retnet", {"attn": [1]}),
        (
            "retnet",
            {
                "attn": [{"layers": [i], "num_heads": i + 1} for i in range(2)],
                "num_hidden_layers": 3,
            },
        ),
        ("delta_net", {"share_conv_kernel": True}),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}),
        ("gated_deltanet", {"attnres_block_size": 2}),
        ("comba", {"use_inner_decay": True, "use_output_correction": False}),
        ("kda", {"safe_gate": True, "lower_bound": -5.0}),
        ("gla", {"clamp_min": -1.0}),
        ("gla", {"use_short_conv": True}),
        ("gla", {"num_kv_heads": 1}),
        ("retnet", {"feature_map": "relu"}),
        ("retnet", {"hidden_act": "gelu"}),
        ("transformer", {"qk_norm": True, "norm_eps": 1e-6}),
        ("transformer", {"qkv_bias": True}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}),
        ("llama", {"rope_parameters": [1]}),
        ("llama", {"attention_bias": True}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"sliding_window": 16}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"layer_types": ["sliding_attention"] * L}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen3", {"use_sliding_window": True}),
        ("qwen3", {"layer_types": ["sliding_attention"] * L}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_options_that_we_lack(kind, changes, tmp_path):
    own = kind in ("llama", "qwen3")
    config = LLAMA | {"model_type": kind} | changes if own else config_of(kind, **changes)
    source = write(tmp_path / "theirs", config, {"x": torch.zeros(1)})
    assert next(iter(changes)) in refused(source, tmp_path)


def test_rounded_weights_are_refused(tmp_path):
    """Codes without their scales would be taken for weights."""
    config = config_of("gated_deltanet", quantization_config={"quant_method": "nalanda_int8"})
    source = write(tmp_path / "theirs", config, {"x": torch.zeros(1)})
    assert "convert the folder that they came from" in refused(source, tmp_path)


def test_another_kind_of_rope_is_refused(tmp_path):
    config = LLAMA | {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 8.0}}
    source = write(tmp_path / "theirs", config, {"x": torch.zeros(1)})
    assert "rope_type='yarn' has no counterpart" in refused(source, tmp_path)


QWEN3_5 = {"gated_deltanet": {}, "softmax": {"qk_norm": True, "gate": "channel"}}


@pytest.mark.parametrize(
    ("to", "fields", "message"),
    [
        ("fla", {"mixer": "deltanet", "feature_map": "nala"}, "feature_map='nala'"),
        ("fla", {"mixer": "gated_deltanet", "feature_map": "relu"}, "feature_map='relu'"),
        ("fla", {"mixer": "comba", "expand_k": 0.5, "feature_map": "nala"}, "feature_map='nala'"),
        ("mlx", {"mixer": "comba"}, "mixer 'comba' can become fla: not mlx"),
        ("fla", {"mixer": "deltanet", "mixer_options": {"num_v_heads": 4}}, "num_v_heads=4"),
        ("fla", {"mixer": "deltanet", "use_bias": True}, "use_bias=True"),
        ("fla", {"mixer": "kda", "use_gate": False}, "use_gate=False"),
        ("fla", {"mixer": "kda", "mixer_options": {"gate_bias": False}}, "gate_bias=False"),
        ("fla", {"mixer": "kda", "mixer_options": {"norm_write": True}}, "norm_write=True"),
        ("fla", {"mixer": "delta_product", "mixer_options": {"num_v_heads": 4}}, "num_v_heads=4"),
        (
            "fla",
            {"mixer": "gla", "mixer_options": {"gate_temperature": 8.0}},
            "gate_temperature=8.0",
        ),
        ("fla", {"mixer": "retention", "mixer_options": {"rope_theta": 9.0}}, "rope_theta=9.0"),
        ("fla", {"mixer": "retention", "dropout": 0.1}, "dropout=0.1"),
        ("fla", {"mixer": "softmax", "head_dim": 6}, "head_dim=6"),
        *(
            ("fla", {"mixer": ["gla", "softmax"], "mixer_options": {"softmax": options}}, message)
            for options, message in (
                ({"rope_theta": None}, "rope_theta=None of mixer 'softmax'"),
                ({"qk_norm": True}, "qk_norm=True of mixer 'softmax'"),
                ({"gate": "head"}, "gate='head' of mixer 'softmax'"),
                ({"q_norm": "length"}, "q_norm='length' of mixer 'softmax'"),
                ({"conv_size": 2}, "conv_size=2 of mixer 'softmax'"),
                ({"rotary_dim": 4}, "rotary_dim=4 of mixer 'softmax'"),
                ({"head_dim": 6}, "head_dim=6 of mixer 'softmax'"),
            )
        ),
        ("fla", {"mixer": ["gla", "softmax"], "expand_v": 2.0}, "value_dim=16 of mixer 'softmax'"),
        ("fla", {"mixer": ["gla", "softmax"], "use_bias": True}, "use_bias=True"),
        ("llama", {"mixer": "softmax", "mixer_options": {"window": 3}}, "window=3"),
        ("llama", {"mixer": "softmax", "mixer_options": {"rope_theta": None}}, "rope_theta=None"),
        ("llama", {"mixer": "softmax", "expand_v": 2.0}, "value_dim=16"),
        ("llama", {"mixer": "softmax", "scale_embeddings": True}, "scale_embeddings=True"),
        (
            "llama",
            {"mixer": "softmax", "num_heads": 3, "head_dim": 8},
            "to llama: The hidden size (16) is not a multiple of the number of attention heads (3)",
        ),
        ("llama", {"mixer": "gla"}, "mixer 'gla' can become fla: not llama"),
        ("llama", {"mixer": "softmax", "mixer_options": {"qk_norm": True}}, "qk_norm=True"),
        ("qwen3", {"mixer": "softmax"}, "qk_norm=False"),
        ("fla", {"mixer": "softmax", "mixer_options": {"rope_scaling": LLAMA3}}, "rope_scaling={"),
        *(
            (
                "fla",
                {"mixer": "forgetting", "mixer_options": options},
                f"{name} of mixer 'forgetting'",
            )
            for name, options in {
                "window=5": {"window": 5},
                "rope_theta=500.0": {"rope_theta": 500.0},
                "qk_norm=True": {"qk_norm": True},
                "gate='head'": {"gate": "head"},
            }.items()
        ),
        ("fla", {"mixer": ["forgetting", "softmax"]}, "softmax beside those of forgetting"),
        *(
            (to, {"mixer": "forgetting"}, f"mixer 'forgetting' can become fla: not {to}")
            for to in ("llama", "qwen3", "qwen3_5", "kimi_linear", "gguf", "mlx")
        ),
        (None, {"mixer": "softmax"}, "can become fla or llama: choose one with --to"),
        (
            None,
            {"mixer": "softmax", "mixer_options": {"qk_norm": True}},
            "nalanda to qwen3: tensor",
        ),
        (
            None,
            {"mixer": "softmax", "use_bias": True, "expand_v": 2.0},
            "nalanda to transformer: value_dim=16",
        ),
        (None, {"mixer": "gated_deltanet", "conv_size": 3}, "fla or qwen3_5 or mlx: choose"),
        (
            None,
            {
                "mixer": ["softmax", *["gated_deltanet"] * 3],
                "num_hidden_layers": 4,
                "mixer_options": QWEN3_5,
            },
            "nalanda to qwen3_5_text: tensor",
        ),
        (None, {"mixer": "nala"}, "mixer 'nala' can become nothing else"),
        (
            None,
            {"mixer": "gated_deltanet"},
            "can become fla or qwen3_5 or mlx or gguf: choose one with --to",
        ),
        (
            "fla",
            {"mixer": ["gla", "retention"]},
            "mixer ['gla', 'retention'] can become nothing else",
        ),
        ("nalanda", {"mixer": "gla"}, "can become fla: not nalanda"),
        ("gguf", {"mixer": "gla"}, "can become fla: not gguf"),
    ],
)
def test_options_that_they_lack(to, fields, message, tmp_path):
    sizes = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12}
    config = NalandaConfig(**(sizes | fields))
    assert message in refused(
        write(tmp_path / "ours", config.to_dict(), {"x": torch.zeros(1)}), tmp_path, to
    )


@pytest.mark.parametrize("kind", ["gated_deltanet", "transformer", "llama", "qwen3_5_text"])
def test_a_setting_that_is_left_open_equals_its_default(kind):
    format = converting.FORMATS[kind]
    sizes = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "mixer": format.mixer}
    left_open = NalandaConfig(**sizes)
    names = ("conv_size", "feature_map", "intermediate_size")
    written = {name: resolved(left_open)[name] for name in names} | {"value_conv": 0}
    for name, value in written.items():
        config = NalandaConfig(**sizes, **{name: value})
        assert format.foreign(config) == format.foreign(left_open), name


def test_tensors_that_do_not_fit(tmp_path):
    tensors = tensors_of("gla")
    name = "model.layers.1.attn.gk_proj.1.bias"
    cases = {
        f"tensor {name} is missing": {n: t for n, t in tensors.items() if n != name},
        "1 tensors have no counterpart, model.x for one": tensors | {"model.x": torch.zeros(1)},
        f"tensor {name} is [15], the config says [16]": tensors | {name: tensors[name][:15]},
        "lm_head.weight and model.embeddings.weight differ": tensors
        | {"lm_head.weight": torch.zeros(N, D)},
    }
    for i, (message, changed) in enumerate(cases.items()):
        assert message in refused(write(tmp_path / str(i), config_of("gla"), changed), tmp_path)
    harmless = tensors | {"lm_head.weight": tensors["model.embeddings.weight"].clone()}
    harmless["model.layers.0.attn.rotary.inv_freq"] = torch.zeros(4)
    ours = convert(str(write(tmp_path / "more", config_of("gla"), harmless)), str(tmp_path / "out"))
    assert len(read(ours)) == len(tensors)


def test_folders_that_hold_no_model(tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere", tmp_path)
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[1]")
    assert "config.json is not a table" in refused(tmp_path / "list", tmp_path)
    source = write(tmp_path / "a", config_of("gla"), tensors_of("gla"))
    with pytest.raises(InputError, match="exists; choose another folder"):
        convert(str(source), str(tmp_path))
    (source / "config.json").write_text('{"model_type": "mamba2"}')
    assert "use_conv_bias: its convolutions have a bias" in refused(source, tmp_path)
    (source / "config.json").write_text('{"model_type": "mamba3"}')
    assert "no GLU follows its mixers, which may be MIMO" in refused(source, tmp_path)
    (source / "config.json").write_text('{"model_type": "rwkv7"}')
    assert "v_lora: its later layers mix in the first one's values" in refused(source, tmp_path)
    (source / "config.json").write_text('{"model_type": "mamba"}')
    assert "model_type 'mamba' is not one of nalanda, delta_net" in refused(source, tmp_path)
    (source / "config.json").write_text(json.dumps(config_of("gla")))
    (source / "model.safetensors").write_bytes(b"no")
    assert "model.safetensors: " in refused(source, tmp_path)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refused(source, tmp_path)


# ------------------------------ a run on the hub


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's API for uploads of small files; answers `server.status`, records in `server.seen`."""

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while "chunked" in self.headers.get("Transfer-Encoding", "") and (
            size := int(self.rfile.readline(), 16)
        ):
            body += self.rfile.read(size + 2)[:-2]
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        url = f"http://127.0.0.1:{self.server.server_port}"
        found = {"url": f"{url}/me/small", "id": "me/small", "name": "small", "private": False}
        found |= {
            "commitUrl": f"{url}/me/small/commit/0a1b",
            "commitOid": "0a1b",
            "warnings": [],
            "errors": [],
        }
        if "preupload" in self.path:
            files = [f["path"] for f in json.loads(body)["files"]]
            found["files"] = [
                {"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files
            ]
        text = json.dumps(found if self.server.status == 200 else {"error": "no"}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.status, server.seen = 200, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(exporting, "HfApi", functools.partial(huggingface_hub.HfApi, endpoint=url))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def evaluated(whole, tmp_path):
    """A run with results of `nalanda eval` for its model and for another one."""
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype="auto")
    tasks = {"copa": {"metrics": {"acc": 0.625, "ppl": None}, "stderr": {"acc": 0.0625}}}
    mine = {"name": "x", "fingerprint": fingerprint(model), "tasks": tasks}
    other = mine | {
        "fingerprint": "0" * 16,
        "tasks": {"piqa": {"metrics": {"acc": 0.5}, "stderr": {}}},
    }
    (run / "eval").mkdir()
    (run / "eval" / "results.json").write_text(json.dumps({"models": [mine, other]}))
    return run


@pytest.mark.slow
def test_results_that_cannot_be_read_lose_no_model(evaluated, tmp_path, capsys):
    for name, text in (("a", '{"models": [{'), ("b", "[]"), ("c", '{"models": [{"tasks": {}}]}')):
        (evaluated / name).mkdir()
        (evaluated / name / "results.json").write_text(text)
    card = (exporting.export(evaluated, tmp_path / "out") / "README.md").read_text()
    assert "| copa | acc | 0.6250 | 0.0625 |" in card
    said = capsys.readouterr().err
    assert all(f"{name}/results.json: unreadable" in said for name in "abc")


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["a: [", "- 5"])
def test_a_recipe_that_cannot_be_read_loses_no_model(evaluated, tmp_path, damaged):
    (evaluated / "config.yaml").write_text(damaged)
    card = (exporting.export(evaluated, tmp_path / "out") / "README.md").read_text()
    assert "| copa | acc | 0.6250 | 0.0625 |" in card


@pytest.mark.slow
def test_only_scores_of_all_documents_are_in_the_card(evaluated, tmp_path, capsys):
    results = json.loads((evaluated / "eval" / "results.json").read_text())
    mine = results["models"][0]

    def write(name, task, **settings):
        scores = {"metrics": {"acc": 0.5, "perplexity": "inf"}, "stderr": {"perplexity": "inf"}}
        model = mine | {"tasks": {task: scores}, "max_length": settings.pop("max_length", None)}
        (evaluated / name).mkdir()
        (evaluated / name / "results.json").write_text(json.dumps({"models": [model]} | settings))

    write("some", "boolq", limit=3)
    write("shots", "nq_open", num_fewshot=5, apply_chat_template=False)
    write("chat", "drop", apply_chat_template=True)
    write("zero", "openbookqa", num_fewshot=0, apply_chat_template=False, system_instruction=None)
    write("windows", "sciq", limit=None, max_length=64)
    write("whole", "piqa")
    card = (exporting.export(evaluated, tmp_path / "out") / "README.md").read_text()
    assert not any(task in card for task in ("boolq", "nq_open", "drop"))
    assert "| openbookqa | acc | 0.5000 |" in card
    assert "| copa | acc | 0.6250 | 0.0625 |  |" in card  # of an older version, which did not say
    assert "| sciq | acc | 0.5000 |  | windows of 64 tokens |" in card
    assert "| piqa | acc | 0.5000 |  | read whole |" in card
    assert "| sciq | perplexity | inf | inf | windows of 64 tokens |" in card
    said = capsys.readouterr().err
    for name, option in (
        ("some", "limit"),
        ("shots", "num-fewshot"),
        ("chat", "apply-chat-template"),
    ):
        assert f"{name}/results.json: its scores are with --{option}, and left out" in said


def test_a_run_is_pushed_with_its_card(hub, evaluated, tmp_path, capsys):
    out = tmp_path / "out"
    assert push(evaluated, out, "me/small").endswith("/me/small/commit/0a1b")
    said = capsys.readouterr()
    sizes = {str(p.relative_to(out)): p.stat().st_size for p in out.rglob("*") if p.is_file()}
    assert f"{sizes['model.safetensors']:,}  model.safetensors" in said.err
    assert f"{sum(sizes.values()):,}  bytes in {len(sizes)} files to me/small" in said.err
    assert "hf_secret" not in said.out + said.err
    assert {token for _, token, _ in hub.seen} == {"Bearer hf_secret"}
    (made,) = (json.loads(body) for path, _, body in hub.seen if path == "/api/repos/create")
    assert made["visibility"] == "public"
    (commit,) = (body for path, _, body in hub.seen if path.endswith("/commit/main"))
    lines = [json.loads(line)["value"] for line in commit.splitlines()]
    sent = {line["path"]: base64.b64decode(line["content"]) for line in lines if "path" in line}
    assert lines[0]["summary"] == "Step 24"
    assert sent == {name: (out / name).read_bytes() for name in sizes}
    card = huggingface_hub.ModelCard(sent["README.md"].decode())
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("copa", "acc", 0.625)
    assert card.data.model_name == "me/small"
    assert "| copa | acc | 0.6250 | 0.0625 |" in card.text
    assert 'from_pretrained("me/small", trust_remote_code=True)' in card.text
    assert "piqa" not in card.content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, InputError, "the hub refuses .*HF_TOKEN or `hf auth login`"),
        (403, InputError, "the hub refuses .*HF_TOKEN or `hf auth login`"),
        (400, InputError, "the hub refuses"),
        (None, SourceUnavailable, "the hub does not answer"),
    ],
)
def test_what_the_hub_refuses(hub, whole, tmp_path, status, kind, message):
    hub.status = status
    if status is None:
        hub.server_close()
    with pytest.raises(InputError, match=message) as caught:
        push(whole, tmp_path / "out", "me/small")
    assert type(caught.value) is kind
    assert caught.value.exit_code == (75 if kind is SourceUnavailable else 2)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_sent_at_all(hub, whole, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="is not a repository of the hub: write OWNER/NAME"):
        push(whole, tmp_path / "out", "small")
    with pytest.raises(InputError, match="neither a run's folder nor"):
        push(tmp_path, tmp_path / "out", "me/small")
    with pytest.raises(InputError, match="exists; choose another folder"):
        push(whole, tmp_path, "me/small")
    assert hub.seen == []
    with pytest.raises(InputError, match="exists and is public"):
        push(whole, tmp_path / "out", "me/small", private=True)
    assert json.loads(hub.seen[0][2])["visibility"] == "private"
    hub.seen.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="offline"):
        push(whole, tmp_path / "out", "me/small")
    monkeypatch.setattr(exporting, "get_token", lambda: None)
    with pytest.raises(InputError, match="no token for the hub: set HF_TOKEN"):
        push(whole, tmp_path / "out", "me/small")
    assert hub.seen == []
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_the_hub_is_converted(monkeypatch, tmp_path):
    """With its chat templates, and a tokenizer that may only be read there."""
    source = write(tmp_path / "theirs", config_of("gla"), tensors_of("gla"))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "tokenizer_config.json").chmod(0o444)
    monkeypatch.setattr("nalanda.config.model_folder.hub_problem", lambda: "")
    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        files = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
        for left in files - {*filter_repo_objects(files, allow_patterns=allow_patterns)}:
            (source / left).unlink()
        return str(source)

    monkeypatch.setattr(converting, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    ours = convert("fla-hub/gla", "ours")
    assert len(read(ours)) == len(tensors_of("gla"))
    assert asked == ["fla-hub/gla"]
    assert (ours / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"
    assert (ours / "tokenizer_config.json").stat().st_mode & 0o200


def test_the_commands(tmp_path, monkeypatch):
    source = write(tmp_path / "theirs", config_of("gla"), tensors_of("gla"))
    run = typer.testing.CliRunner().invoke(
        nalanda_cli.app, ["convert", str(source), str(tmp_path / "ours")]
    )
    assert run.stdout.strip() == str(tmp_path / "ours")
    assert "not compared: flash-linear-attention's models compute on GPUs only" in run.stderr
    asked = []
    monkeypatch.setattr(
        "nalanda.train.checkpoint_dir.find_checkpoint", lambda *args, **options: None
    )
    monkeypatch.setattr(
        exporting, "push", lambda *args, **options: asked.append((args, options)) or "url"
    )
    command = ["export", "a", "b", "--push", "me/small", "--private", "--step", "3"]
    assert typer.testing.CliRunner().invoke(nalanda_cli.app, command).stdout == "url\n"
    assert asked == [((Path("a"), Path("b"), "me/small"), {"step": 3, "private": True})]


def test_an_encoder_is_refused(tmp_path):
    build("softmax", is_decoder=False, dtype=torch.float32).save_pretrained(tmp_path / "encoder")
    with pytest.raises(InputError, match="is_decoder=False of mixer 'softmax' cannot be expressed"):
        convert(str(tmp_path / "encoder"), str(tmp_path / "out"), to="llama")


def test_a_model_that_computes_no_numbers_gets_no_certificate():
    """One NaN among the log-probabilities is a difference."""
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    greedy, margins = logits[:3].argmax(-1), torch.ones(3)
    before = engines.Computed(
        logits.log_softmax(-1), greedy, margins, "torch", [], {}, logits=logits
    )
    assert "largest difference" in str(certificate._differences(before, before, "fp32"))
    damaged = before.logps.clone()
    damaged[4, 2] = math.nan
    after = dataclasses.replace(before, logps=damaged)
    with pytest.raises(InputError, match="source and target differ: log-probabilities by nan"):
        certificate._differences(before, after, "fp32")
