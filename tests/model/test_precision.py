"""Half precision and autocast: decays stay fp32, sums stay in range, likelihoods do not depend on the batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from tiny_models import build, ids, logits
from transformers import AutoModelForCausalLM

from nalanda import NalandaCache
from nalanda.model import MIXERS
from nalanda.model.attention import SoftmaxAttention
from nalanda.model.call import Inputs
from nalanda.model.sequences import Sequences


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decay_stays_fp32(small, tmp_path, dtype):
    wanted = [layer.mixer.decay.A_log.clone() for layer in small.model.layers]
    small.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    cast = build(dtype=torch.float32).to(getattr(torch, dtype))
    made = AutoModelForCausalLM.from_config(small.config, dtype=dtype)
    for m in (loaded, cast, made):
        assert m.lm_head.weight.dtype == getattr(torch, dtype)
        for layer, A_log in zip(m.model.layers, wanted, strict=True):
            assert layer.mixer.decay.A_log.dtype == layer.mixer.decay.dt_bias.dtype == torch.float32
            assert m is made or torch.equal(layer.mixer.decay.A_log, A_log)
        out = m(ids(2, 9), labels=ids(2, 9))
        assert out.loss.isfinite()


def test_decay_becomes_fp32_from_a_half_precision_checkpoint(small, tmp_path):
    """Other programs save everything in bf16."""
    from safetensors.torch import load_file, save_file

    small.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {n: t.bfloat16() for n, t in weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    decays = [p for layer in loaded.model.layers for p in layer.mixer.decay.parameters()]
    assert {p.dtype for p in decays} == {torch.float32}


@pytest.mark.parametrize("feature_map", ["elu1", "exp", "nala"])
def test_sums_do_not_leave_half_precisions_range(feature_map):
    """3000 equal tokens under features that are all positive."""
    options = {
        "mixer": "linear_attention",
        "mixer_options": {"denominator": False},
        "hidden_size": 64,
    }
    model = build(feature_map=feature_map, dtype=torch.float16, **options)
    assert logits(model, torch.full((1, 3000), 5)).isfinite().all()


def nats_a_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T − 1]: the log-likelihood of each token behind the first."""
    return logits.double().log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


@pytest.mark.sampled
@pytest.mark.parametrize("shift", [-4, 4])
@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_in_bf16(mixer, shift):
    """Of q, k, v and the gates of packed rows, under weak or strong decays: as near to float64 as bf16 is."""
    layer = build(mixer, hidden_size=64, num_hidden_layers=1).model.layers[0].mixer
    generator = torch.Generator().manual_seed(0)
    drawn = {}
    for name, linear in (layer.linears() | layer.columns()).items():
        x = torch.randn(1, 201, linear.out_features, generator=generator)
        drawn[name] = (x + (shift if name in ("a", "dt", "f", "w") else 0)).bfloat16()

    def gradients(module, dtype):
        leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in drawn.items()}
        sizes = {"q": module.K, "k": module.K, "v": module.V}
        heads = {n: x.unflatten(-1, (-1, sizes[n])) for n, x in leaves.items() if n in sizes}
        inputs = module.gates(leaves, Inputs(**{"k": heads["q"]} | heads))
        o, _ = module.mix(inputs, Sequences(torch.tensor([0, 1, 38, 101, 201])), None)
        o.backward(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o))
        return {name: x.grad.double() for name, x in leaves.items() if x.grad is not None}

    right = gradients(layer, torch.float64)
    found = gradients(copy.deepcopy(layer).bfloat16(), torch.bfloat16)
    # Of a forget gate docs/formulas.md says why.
    slack = 0.05 if mixer == "forgetting" else 8e-3
    for name, x in right.items():
        assert (found[name] - x).norm() < slack * x.norm(), name


@pytest.mark.sampled
@pytest.mark.parametrize("mixer", MIXERS)
def test_bf16_is_rounded_alike_with_a_cache_and_without(mixer):
    """Either may be away from the exact result; where both round alike, they are nearer to one another.
    torch's softmax attention rounds otherwise for one query than for many. `-rP` prints the figures."""
    model, tokens, cache = (
        build(mixer, dtype=torch.bfloat16, hidden_size=64),
        ids(4, 40),
        NalandaCache(2),
    )
    pieces = [
        logits(model, piece, past_key_values=cache) for piece in tokens.split([8] + [1] * 32, 1)
    ]
    cached, whole = torch.cat(pieces, 1).double(), logits(model, tokens).double()
    exact = logits(model.double(), tokens)
    apart = nats_a_token(cached, tokens) - nats_a_token(whole, tokens)
    print(f"{mixer}: {apart.square().mean().sqrt():.1e} nats a token, root mean square")
    share = 2 if issubclass(MIXERS[mixer], SoftmaxAttention) else 0.5
    assert (cached - whole).norm() < share * (whole - exact).norm()


@pytest.mark.parametrize("mixer", MIXERS)
def test_linear_layers_under_autocast_read_its_dtype(mixer):
    """A Linear casts fp32 inputs itself, each one again; a block has up to eight."""
    model, seen = build(mixer, dtype=torch.float32), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids(1, 9), output_hidden_states=True, labels=ids(1, 9))
    out.loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert {x.dtype for x in out.hidden_states[:-1]} == {torch.float32}, "the residual stream"
    assert {x.grad.dtype for x in model.parameters()} == {torch.float32}


@pytest.mark.sampled
@covering(strength=1, mixer=MIXERS, side=("left", "right"))
def test_likelihoods_in_bf16_do_not_depend_on_the_batch(mixer, side):
    """5e-3 nats a token; with other companions and padding, products round elsewhere."""
    model = build(mixer, dtype=torch.bfloat16, hidden_size=64)
    texts = [ids(1, n, seed=n) for n in (9, 40, 65, 70)]

    def scored(tokens, mask):
        said = nats_a_token(logits(model, tokens, attention_mask=mask), tokens)
        return (said * (mask[:, 1:] & mask[:, :-1])).sum(1)

    alone = torch.cat([scored(text, torch.ones_like(text)) for text in texts])
    lengths = torch.tensor([text.shape[1] for text in texts])
    for size in (2, 4):
        for i in range(0, 4, size):
            gaps = [int(lengths[i : i + size].max()) - n for n in lengths[i : i + size].tolist()]
            pads = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
            tokens, mask = (
                torch.cat([F.pad(x, pad) for x, pad in zip(part, pads, strict=True)])
                for part in (texts[i : i + size], [torch.ones_like(t) for t in texts[i : i + size]])
            )
            off = (scored(tokens, mask) - alone[i : i + size]) / (lengths[i : i + size] - 1)
            print(f"{mixer}: batch of {size}, {side}: {off.abs().max():.1e} nats a token")
            assert off.abs().max() <= 5e-3
