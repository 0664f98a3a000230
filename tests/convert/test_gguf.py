"""GGUF files, computed token by token as llama.cpp does, and by llama.cpp where it is installed."""

import copy
import functools
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer.testing
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import nalanda_cli
from nalanda import NalandaConfig
from nalanda.common.errors import InputError
from nalanda.convert import convert as converting
from nalanda.convert import gguf as writing
from nalanda.data.tokenizer import _load_sentencepiece

gguf = pytest.importorskip("gguf")
write_gguf = functools.partial(writing.write_gguf, check=False)

SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "num_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
}
SIZES |= {"num_hidden_layers": 2, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0}
SOFTMAX = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "rotary_dim": 10, "rope_theta": 500.0}
SOFTMAX |= {"qk_norm": True, "gate": "channel"}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
HYBRID = {
    "mixer": {"pattern": ["gated_deltanet", "gated_deltanet", "softmax"]},
    "num_hidden_layers": 4,
    "mixer_options": {"gated_deltanet": {"num_v_heads": 6}, "softmax": SOFTMAX},
}
SHAPES = {
    "pure": {"mixer_options": {"num_v_heads": 4}, "norm_eps": 1e-5},
    "tied": {"mixer_options": {"num_v_heads": 2}, "tie_word_embeddings": True},
    "hybrid": HYBRID,
}


@pytest.fixture
def tokenizer(tokenizer):
    """Bytes behind <|endoftext|>, which is put in front of a text, and three merges."""
    tokenizer = copy.deepcopy(tokenizer)
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"]]
    spec["model"]["merges"] = merges
    spec["model"]["vocab"] |= {"".join(pair): 257 + i for i, pair in enumerate(merges)}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(spec))
    return tokenizer


def save(folder, tokenizer, **changes):
    """A model folder with random weights, norms near 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        NalandaConfig(**SIZES | changes), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return model


class File:
    """The fields and the tensors, float64, of a GGUF file."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.types = {t.name: t.tensor_type.name for t in reader.tensors}
        self.tensors = {
            t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)).double()
            for t in reader.tensors
        }

    def __getitem__(self, name):
        return self.fields[f"qwen35.{name}"]


def rms(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def logits(file, ids):
    """What llama.cpp computes from the file, `[T, vocabulary]`: its equations, a token at a time."""
    eps, t = file["attention.layer_norm_rms_epsilon"], file.tensors
    x = t["token_embd.weight"][ids]
    for i in range(file["block_count"]):
        w = {
            n.removeprefix(f"blk.{i}.").removesuffix(".weight"): v
            for n, v in t.items()
            if f"blk.{i}." in n
        }
        mix = delta if (i + 1) % file["full_attention_interval"] else attention
        x = x + mix(file, w, rms(x, w["attn_norm"], eps), eps)
        h = rms(x, w["post_attention_norm"], eps)
        x = x + (F.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return rms(x, t["output_norm.weight"], eps) @ t.get("output.weight", t["token_embd.weight"]).T


def delta(file, w, h, eps):
    K, H, HV = (file[f"ssm.{name}"] for name in ("state_size", "group_count", "time_step_rank"))
    taps = file["ssm.conv_kernel"]
    past = F.pad(h @ w["attn_qkv"].T, (0, 0, taps - 1, 0))
    mixed = F.silu(sum(past[j : j + len(h)] * w["ssm_conv1d"][:, j] for j in range(taps)))
    q, k, v = mixed.split([H * K, H * K, file["ssm.inner_size"]], -1)
    q, k = (F.normalize(y.view(-1, H, K), dim=-1, eps=eps).repeat(1, HV // H, 1) for y in (q, k))
    v = v.view(len(h), HV, -1)
    decay = (w["ssm_a"] * F.softplus(h @ w["ssm_alpha"].T + w["ssm_dt.bias"])).exp()
    beta = (h @ w["ssm_beta"].T).sigmoid()
    S, out = h.new_zeros(HV, K, v.shape[-1]), []
    for q_, k_, v_, g, b in zip(q, k, v, decay, beta, strict=True):
        S = g[:, None, None] * S
        S = S + k_[..., None] * (b[:, None] * (v_ - (k_[:, None] @ S)[:, 0]))[:, None]
        out.append((q_[:, None] @ S)[:, 0] / K**0.5)
    gate = F.silu(h @ w["attn_gate"].T)
    return (rms(torch.stack(out), w["ssm_norm"], eps).flatten(1) * gate) @ w["ssm_out"].T


def attention(file, w, h, eps):
    H, HK, K = (file[f"attention.{n}"] for n in ("head_count", "head_count_kv", "key_length"))
    R, T = file["rope.dimension_count"], len(h)
    assert sum(file["rope.dimension_sections"]) == R // 2
    q, gate = (h @ w["attn_q"].T).view(T, H, 2 * K).split(K, -1)
    k, v = ((h @ w[f"attn_{n}"].T).view(T, HK, K) for n in "kv")
    angles = torch.arange(T)[:, None] * file["rope.freq_base"] ** (
        -torch.arange(0, R, 2).double() / R
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(x, weight):
        x = rms(x, weight, eps)
        z = torch.complex(x[..., : R // 2], x[..., R // 2 : R]) * turn
        return torch.cat([z.real, z.imag, x[..., R:]], -1)

    q = rotated(q, w["attn_q_norm"])
    k, v = (y.repeat_interleave(H // HK, 1) for y in (rotated(k, w["attn_k_norm"]), v))
    scores = torch.einsum("ihk,jhk->hij", q, k) / K**0.5
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    o = torch.einsum("hij,jhk->ihk", weights, v) * gate.sigmoid()
    return o.flatten(1) @ w["attn_output"].T


@pytest.mark.parametrize("shape", SHAPES)
def test_the_file_computes_the_model(shape, tokenizer, tmp_path):
    model = save(tmp_path / "m", tokenizer, **SHAPES[shape])
    file = File(write_gguf(tmp_path / "m", tmp_path / "new" / "m.gguf"))
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.QWEN35]}
    for name in file.tensors:
        bare = name.removesuffix(".weight").removesuffix(".bias")
        assert ".".join(["blk.{bid}", *bare.split(".")[2:]] if "blk." in bare else [bare]) in known
    ids = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model.double()(ids).logits[0]
    assert ours.abs().max() > 3
    # The two norms of q and k have their epsilons in other places.
    torch.testing.assert_close(logits(file, ids[0]), ours, rtol=0, atol=2e-4)
    assert not list(tmp_path.rglob(".tmp*"))


@pytest.mark.parametrize(("dtype", "error"), [("fp16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 127)])
def test_matrices_have_the_dtype(dtype, error, tokenizer, tmp_path):
    save(tmp_path / "m", tokenizer, **HYBRID, intermediate_size=100)
    exact, file = (
        File(write_gguf(tmp_path / "m", tmp_path / f"{d}.gguf", d)) for d in ("fp32", dtype)
    )
    assert set(exact.types.values()) == {"F32"}
    assert exact.tensors["blk.0.ffn_down.weight"].shape[-1] == 100
    for name, x in exact.tensors.items():
        small = x.dim() == 1 or "conv1d" in name
        other = "F16" if dtype == "q8_0" and x.shape[-1] % 32 else dtype.upper().replace("FP", "F")
        assert file.types[name] == ("F32" if small else other)
        assert (x - file.tensors[name]).abs().max() <= (0 if small else error * x.abs().max())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixer": "deltanet"}, "mixer deltanet"),
        ({"mixer": "softmax"}, "mixer softmax"),
        ({"feature_map": "nala"}, "feature_map='nala'"),
        ({"feature_map_options": {"norm": "l2"}}, "feature_map_options"),
        ({"use_gate": False}, "use_gate=False"),
        ({"conv_size": 0}, "conv_size=0"),
        ({"use_bias": True}, "use_bias=True"),
        ({"expand_v": 2.0}, "keys of 32 and values of 64"),
        ({"position_embedding": "sinusoidal"}, "position_embedding='sinusoidal'"),
        ({"scale_embeddings": True}, "scale_embeddings=True"),
        *(
            ({"mixer_options": {name: True}}, name)
            for name in ("allow_neg_eigval", "norm_write", "norm_read")
        ),
        ({"mixer_options": {"value_silu": False}}, "value_silu"),
        (
            {"mixer": ["softmax", "gated_deltanet"], "mixer_options": {"softmax": SOFTMAX}},
            "order of mixers",
        ),
        *(
            (
                HYBRID | {"mixer_options": {"softmax": SOFTMAX | {name: value}}},
                f"softmax's {name}" if name in ("gate", "qk_norm", "conv_size") else name,
            )
            for name, value in (
                *(("gate", "head"), ("qk_norm", False), ("conv_size", 4)),
                *(("window", 8), ("rope_theta", None), ("rope_scaling", LLAMA3)),
            )
        ),
    ],
)
def test_refuses_by_name_what_llama_cpp_cannot_compute(changes, said, tokenizer, tmp_path):
    NalandaConfig(**SIZES | changes).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match=said) as refused:
        write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert "gated_deltanet_340m_deploy" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_refuses_what_is_not_there(tokenizer, tmp_path):
    save(tmp_path / "m", tokenizer)
    with pytest.raises(InputError, match=r"--dtype int4: unknown; choose fp32, bf16, fp16, q8_0"):
        write_gguf(tmp_path / "m", tmp_path / "m.gguf", "int4")
    (tmp_path / "m.gguf").touch()
    with pytest.raises(InputError, match="exists"):
        write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    with pytest.raises(InputError, match=r"the file to make: .*m\.gguf: a file; name a folder"):
        write_gguf(tmp_path / "m", tmp_path / "m.gguf" / "n.gguf")
    (tmp_path / "m" / "config.json").rename(tmp_path / "m" / "kept")
    (tmp_path / "m" / "config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"config\.json is not a table"):
        write_gguf(tmp_path / "m", tmp_path / "n.gguf")
    (tmp_path / "m" / "kept").rename(tmp_path / "m" / "config.json")
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer\.json in it"):
        write_gguf(tmp_path / "m", tmp_path / "n.gguf")
    assert not (tmp_path / "n.gguf").exists()


# ------------------------------------------------------------------------------------------------ tokenizers


def written(folder, tokenizer, **changes) -> dict:
    save(folder / "m", tokenizer, num_hidden_layers=1, **changes)
    fields = File(write_gguf(folder / "m", folder / "m.gguf")).fields
    return {name.removeprefix("tokenizer."): value for name, value in fields.items()}


def test_byte_level_bpe(tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<call>"])
    found = written(tmp_path, tokenizer)
    assert (found["ggml.model"], found["ggml.pre"]) == ("gpt2", "gpt-2")
    tokens = found["ggml.tokens"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(set(tokens)) == len(tokens) == SIZES["vocab_size"]
    assert found["ggml.token_type"] == [3] + [1] * 259 + [4] + [5] * (272 - 261)
    assert found["ggml.merges"] == ["t h", "th e", "Ġ the"]
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"]) == (0, 0)
    assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (True, False)
    assert found["chat_template"] == "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_model_of_the_hub(tokenizer, tmp_path, monkeypatch):
    save(tmp_path / "m", tokenizer, num_hidden_layers=1)
    monkeypatch.setattr("nalanda.config.model_folder.hub_problem", lambda: "")
    monkeypatch.setattr(
        converting, "snapshot_download", lambda name, **_: {"me/small": tmp_path / "m"}[name]
    )
    monkeypatch.chdir(tmp_path)
    file = File(write_gguf("me/small", tmp_path / "small.gguf"))
    assert file.fields["general.name"] == "small"


def test_bos_as_in_training(tokenizer, tmp_path):
    assert written(tmp_path, tokenizer, bos_token_id=None)["ggml.add_bos_token"] is False


def test_sentencepiece_bpe(tmp_path):
    """llama.cpp merges the pair with the highest score first, as the merges' order says."""
    train = pytest.importorskip("sentencepiece").SentencePieceTrainer.train
    text = "The state of a recurrent layer has a fixed size:  def f(x): return x + 1"
    train(
        sentence_iterator=iter([text, text.lower()] * 20),
        model_prefix=str(tmp_path / "bpe"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = _load_sentencepiece(tmp_path / "bpe.model", True)
    found = written(tmp_path, tokenizer, vocab_size=344)
    assert (found["ggml.model"], found["ggml.add_space_prefix"]) == ("llama", True)
    assert found["ggml.token_type"][:4] == [2, 3, 3, 6]
    scores, tokens = found["ggml.scores"], found["ggml.tokens"]

    def pieces(text: str) -> list[str]:
        symbols = list("▁" + text.replace(" ", "▁"))
        rank = dict(zip(tokens, scores, strict=True))
        while pairs := [
            (rank[a + b], -i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in rank
        ]:
            i = -max(pairs)[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        return symbols

    text = "a fixed layer of the recurrent state:  f(x) has size 1"
    assert pieces(text) == tokenizer.tokenize(text)


def test_unigram(tmp_path):
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("a", -1.0), ("▁a", -1.5)], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    found = written(tmp_path, PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert (found["ggml.model"], found["ggml.add_space_prefix"]) == ("t5", True)
    assert found["ggml.scores"][:4] == [0.0, -2.0, -1.0, -1.5]
    assert found["ggml.token_type"][:5] == [2, 1, 1, 1, 5]
    assert found["ggml.unknown_token_id"] == 0
    assert found["ggml.add_bos_token"] is False


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


@pytest.mark.parametrize(
    ("model", "step", "said"),
    [
        (models.WordLevel({"a": 0}, "a"), pre_tokenizers.WhitespaceSplit(), "like this WordLevel"),
        (models.BPE({"a": 0}, []), pre_tokenizers.WhitespaceSplit(), "like this BPE"),
        (
            models.BPE({"a": 0}, []),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            "add_prefix_space",
        ),
        (models.BPE({"a": 0}, []), pre_tokenizers.ByteLevel(add_prefix_space=False), "no merges"),
        (
            models.BPE({"a": 0}, [], byte_fallback=True),
            pre_tokenizers.Metaspace(),
            "like this BPE: its merges",
        ),
        (  # "abc" may come from "a" and "bc" too
            models.BPE(
                BYTES
                | {piece: 256 + i for i, piece in enumerate(("a", "b", "c", "ab", "bc", "abc"))},
                [("a", "b"), ("b", "c"), ("ab", "c")],
                byte_fallback=True,
            ),
            pre_tokenizers.Metaspace(),
            "like this BPE: its merges",
        ),
        (models.Unigram([("a", 0.0)], 0, True), pre_tokenizers.Metaspace(), "byte_fallback"),
        (models.Unigram([("a", 0.0)], 0), pre_tokenizers.Digits(), "Digits"),
    ],
)
def test_refuses_other_tokenizers(model, step, said, tmp_path):
    backend = Tokenizer(model)
    backend.pre_tokenizer = step
    with pytest.raises(InputError, match=said):
        written(tmp_path, PreTrainedTokenizerFast(tokenizer_object=backend))
    assert not (tmp_path / "m.gguf").exists()
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_refuses_flags_of_added_tokens(flag, special, tokenizer, tmp_path):
    tokenizer.add_tokens([AddedToken("<call>", special=special, **{flag: True})])
    with pytest.raises(
        InputError, match=f"no {flag}, which '<call>' has: set it to false in tokenizer.json"
    ):
        written(tmp_path, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("step", ["NFC", "NFKC", "Lowercase", "StripAccents"])
def test_refuses_normalizers(step, tokenizer, tmp_path):
    tokenizer.backend_tokenizer.normalizer = getattr(normalizers, step)()
    with pytest.raises(
        InputError, match=f'no step {{"type": "{step}"}}: .* remove it from tokenizer.json'
    ):
        written(tmp_path, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# --------------------------------------------------------------------------------------------------- engine


def facts(path):
    lines = File(path).fields["nalanda.certificate"].rstrip().splitlines()
    return dict(line.split(": ", 1) for line in lines)


TAME = {
    "initializer_range": 0.05
}  # rounding errors grow in a random model, in a trained one they do not


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("hybrid", "fp32"),
        ("pure", "q8_0"),
        pytest.param("pure", "fp32", marks=pytest.mark.slow),
        pytest.param("hybrid", "fp16", marks=pytest.mark.slow),
    ],
)
def test_llama_cpp_computes_the_same(shape, dtype, tokenizer, tmp_path, capfd):
    pytest.importorskip("xllamacpp")
    tokenizer.add_tokens(
        [AddedToken("<call>"), AddedToken("<|end|>", special=True, normalized=True)]
    )
    save(tmp_path / "m", tokenizer, **SHAPES[shape] | TAME)
    capfd.readouterr()
    found = facts(writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf", dtype))
    assert found["compared on"] == "512 tokens, English; on a CPU, in fp32"
    name = "largest difference of log-probabilities"
    for kind in {"fp32", dtype}:
        line = found[name if kind == "fp32" else f"{name}, {kind}"]
        difference, limit = (float(x.split(" ")[0]) for x in line.split(", tolerance "))
        assert f"({kind})" in line
        assert difference < limit * (0.05 if kind == "fp32" else 1)
    assert found["greedy tokens equal"] == "32 of 32, with a cache"
    assert found["texts cut into the same tokens"] == "23 of 23"
    assert ", xllamacpp 20" in found["versions"]
    shown = capfd.readouterr()
    assert shown.err.splitlines() == [f"{name}: {value}" for name, value in found.items()]
    assert shown.out == ""  # of llama.cpp's own log
    assert [path.name for path in tmp_path.iterdir() if path.name != "m"] == ["m.gguf"]


WRONG = [
    ("q8_0", "ffn_down", torch.neg),
    ("bf16", "ssm_norm", torch.ones_like),
    ("bf16", "ssm_norm", lambda x: x.lerp(torch.ones_like(x), 0.02)),
    ("q8_0", "ssm_a", lambda x: x * math.exp(0.1)),  # 0.1 more in A_log
    ("q8_0", "blk.0.ssm_a", lambda x: x * 1.01),
]
SMALLEST = (WRONG[0], WRONG[2], WRONG[4])  # of each tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "broken", "change", "files"),
    [
        ("fp32", "ssm_a", torch.neg, "both files"),
        ("fp32", "attn_k_norm", torch.neg, "both files"),
        (*WRONG[0], "both files"),
        *(pytest.param(*wrong, "both files", marks=pytest.mark.slow) for wrong in WRONG[1:]),
        *(
            pytest.param(
                *wrong, "the rounded file", marks=() if wrong in SMALLEST else pytest.mark.slow
            )
            for wrong in WRONG
        ),
    ],
)
def test_a_wrong_tensor_leaves_nothing(
    dtype, broken, change, files, tokenizer, tmp_path, monkeypatch
):
    pytest.importorskip("xllamacpp")
    save(tmp_path / "m", tokenizer, **HYBRID | TAME)
    right, write, written = writing._tensors, writing._write, []

    def wrong(config, ours):
        exact = files != "both files" and written[-1] == "fp32" != dtype
        return ((n, x if exact or broken not in n else change(x)) for n, x in right(config, ours))

    monkeypatch.setattr(writing, "_write", lambda *args: written.append(args[2]) or write(*args))
    monkeypatch.setattr(writing, "_tensors", wrong)
    said = (
        "log-probabilities by"
        if files == "both files" or dtype == "fp32"
        else rf"\S*{broken}\S* is not"
    )
    with pytest.raises(InputError, match=f"source and target differ: {said}"):
        writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "key", "change", "said"),
    [
        (
            "merges",
            "merges",
            lambda merges: merges[:1],
            "their tokenizers cut 'Naming.*…' into other tokens",
        ),
        (
            "types",
            "token_type",
            lambda types: [1 if x == 4 else x for x in types],
            "cut '<call> word' into",
        ),
    ],
)
def test_a_wrong_tokenizer_leaves_nothing(
    method, key, change, said, tokenizer, tmp_path, monkeypatch
):
    pytest.importorskip("xllamacpp")
    tokenizer.add_tokens(["<call>"])
    save(tmp_path / "m", tokenizer, num_hidden_layers=1)

    def wrong(writer, right):
        writer.add_array(f"tokenizer.ggml.{key}", change(right))

    monkeypatch.setattr(gguf.GGUFWriter, f"add_token_{method}", wrong)
    with pytest.raises(InputError, match=said):
        writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_another_end_of_text_leaves_nothing(tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    save(tmp_path / "m", tokenizer, num_hidden_layers=1)
    right = gguf.GGUFWriter.add_eos_token_id
    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", lambda writer, i: right(writer, i + 1))
    with pytest.raises(
        InputError, match=r"differ: the list of ids that end a text is \[0\] and \[1\]"
    ):
        writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [(5, None, [5]), ([5, 0, 7], None, [0, 5, 7]), (0, [5, 7], [5, 7]), (None, None, [0])],
)
def test_ends_a_text_where_the_model_does(config, generation, ends, tokenizer, tmp_path):
    pytest.importorskip("xllamacpp")
    model = save(tmp_path / "m", tokenizer, num_hidden_layers=1, eos_token_id=config, **TAME)
    if generation:
        model.generation_config.eos_token_id = generation
        model.generation_config.save_pretrained(tmp_path / "m")
    fields = File(writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf")).fields
    written = [fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    assert [i for i in written if i is not None] == ends


def test_refuses_more_ends_than_gguf_has(tokenizer, tmp_path):
    save(tmp_path / "m", tokenizer, num_hidden_layers=1, eos_token_id=[0, 5, 7, 9])
    with pytest.raises(InputError, match=r"eos_token_id=\[0, 5, 7, 9\]: GGUF has room for 3 ids"):
        write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_pad_token_like_that_of_exported_runs(tokenizer, tmp_path):
    pytest.importorskip("xllamacpp")
    tokenizer = copy.deepcopy(tokenizer)  # other tests have the same one
    tokenizer.pad_token = tokenizer.eos_token
    save(tmp_path / "m", tokenizer, num_hidden_layers=1, **TAME)
    file = File(writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf"))
    assert file.fields["tokenizer.ggml.padding_token_id"] == 0
    assert file.fields["nalanda.certificate"].startswith("compared on: 512 tokens")


@pytest.mark.parametrize("context", [48, 95, 96])
def test_short_contexts(context, tokenizer, tmp_path):
    pytest.importorskip("xllamacpp")
    save(tmp_path / "m", tokenizer, max_position_embeddings=context, num_hidden_layers=1, **TAME)
    if context >= 96:
        assert facts(writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf"))[
            "compared on"
        ].startswith("96")
        return
    with pytest.raises(InputError) as refused:
        writing.write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    said = f"max_position_embeddings={context}: the comparison in llama.cpp needs a context of 96 tokens"
    assert str(refused.value) == f"{said}; --no-check skips it"


@pytest.mark.parametrize("check", [True, False])
def test_says_why_it_was_not_compared(check, tokenizer, tmp_path, monkeypatch):
    """The format is named by the output, or the output gets the format's ending."""
    save(tmp_path / "m", tokenizer, num_hidden_layers=1)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    run = typer.testing.CliRunner().invoke(
        nalanda_cli.app,
        [
            "convert",
            str(tmp_path / "m"),
            *([str(tmp_path / "m.gguf")] if check else [str(tmp_path / "m"), "--to", "gguf"]),
            *["--no-check"][check:],
        ],
    )
    assert run.exit_code == 0
    why = (
        "xllamacpp: not installed; pip install 'nalanda[deploy]'"
        if check
        else "asked for with --no-check"
    )
    assert facts(tmp_path / "m.gguf") == {"source and target": f"not compared: {why}"}


@pytest.mark.parametrize("shape", ["pure", "hybrid"])
def test_llama_cpp_answers_with_the_same_text(shape, tokenizer, tmp_path):
    engine = pytest.importorskip("xllamacpp")
    model = save(tmp_path / "m", tokenizer, **SHAPES[shape])
    params = engine.CommonParams()
    params.model.path = str(write_gguf(tmp_path / "m", tmp_path / "m.gguf"))
    params.port, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 0, 256, 1, 1
    params.flash_attn_type = (
        engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )  # its sums are fp16
    params.cache_type_k = params.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    prompt = "The state of a recurrent layer:\n  def f(x): return x + 1"
    answer = engine.Server(params).handle_completions(
        {"prompt": prompt, "n_predict": 24, "temperature": 0, "ignore_eos": True}
    )
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    new = model.generate(
        **inputs, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert answer["choices"][0]["text"] == tokenizer.decode(new[0, inputs.input_ids.shape[1] :])


@pytest.mark.slow
def test_the_example_shows_equal_texts_with_a_tokenizer_like_llamas(tmp_path):
    """Its decoder drops the blank before a text; llama.cpp's answer begins with it."""
    pytest.importorskip("xllamacpp")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
    changes = {"vocab_size": len(tokens), "bos_token_id": None, "eos_token_id": 2}
    model = save(tmp_path / "m", tokenizer, **SHAPES["pure"], **changes)
    with torch.no_grad():
        # All tokens are alike, and the likeliest next one is the last.
        model.model.embed_tokens.weight.fill_(0.1)
        h = model.model(input_ids=torch.tensor([[259]])).last_hidden_state[0, -1]
        model.lm_head.weight.zero_()
        model.lm_head.weight[-1] = h
    model.save_pretrained(tmp_path / "m")

    file = write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    script = Path(__file__).parents[2] / "examples" / "llama_cpp.py"
    command = [sys.executable, str(script), str(tmp_path / "m"), str(file), "a a"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert said.endswith(f"llama.cpp  {' a' * 64!r}\nequal: True\n")
