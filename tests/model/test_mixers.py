"""Each mixer's formula, written out once more as a masked quadratic form in plain float64."""

import math
import traceback
from dataclasses import replace
from types import SimpleNamespace

import nalanda_kernels
import pytest
import torch
import torch.nn.functional as F
from drawn import drawn
from tiny_models import build as tiny

from nalanda import NalandaConfig
from nalanda.convert.fla import FORMATS
from nalanda.model import FEATURE_MAPS, MIXERS, chunk, recurrent
from nalanda.model.call import Inputs
from nalanda.model.decoder import Decoder
from nalanda.model.layers import place_angles, rotate
from nalanda.model.mixers import build_mixer
from nalanda.model.ops import l2norm
from nalanda.model.rwkv7 import LEAST_LOGIT
from nalanda.model.sequences import Sequences
from nalanda.testing import build_map, norm_awareness, normal

T, H, K = 23, 2, 6
BOTH = Sequences(bidirectional=True)
NORMED = ("direction", "rms", "relu_split")  # NaLa's angles that no length of q or k enters


def build(mixer: str, **options):
    """One mixer in float64, its parameters drawn at a size at which they matter."""
    torch.manual_seed(0)
    config = NalandaConfig(
        vocab_size=8, hidden_size=H * K, num_heads=H, mixer=mixer, **{"conv_size": 0, **options}
    )
    return drawn(build_mixer(mixer, config, 0), 0.6).double()


def run(module):
    """x, what the mixer makes of it, its heads `[B, H, T, …]`, and the causal mask."""
    x = torch.randn(2, T, H * K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y, _ = module(x, Sequences())
        q, k, v = (
            getattr(module, f"{name}_proj")(x).unflatten(-1, (H, -1)).transpose(1, 2)
            for name in ("q", "k", "v")
        )
    return x, y, (q, k, v)


def same(a, b, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def joined(o):  # [B, H, T, V] → [B, T, H·V]
    return o.transpose(1, 2).flatten(-2)


def rms(o, weight):
    return o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def t_of(w):
    return torch.arange(1, T + 1, dtype=w.dtype)[:, None]


def normalised(scores):
    scores = scores.tril()
    return scores / (scores.sum(-1, keepdim=True) + 1e-6 * t_of(scores))


@pytest.mark.parametrize(
    ("name", "function"), [("elu1", lambda x: 1 + F.elu(x)), ("relu", F.relu), ("exp", torch.exp)]
)
def test_linear_attention_with_a_denominator(name, function):
    module = build("linear_attention", feature_map=name)
    _, y, (q, k, v) = run(module)
    same(y, module.o_proj(joined(normalised(function(q) @ function(k).mT) @ v)))


def test_linear_attention_without():
    module = build("linear_attention", feature_map="identity", mixer_options={"denominator": False})
    _, y, (q, k, v) = run(module)
    o = (q @ k.mT / K**0.5).tril() @ v
    same(y, module.o_proj(joined(rms(o, module.o_norm.weight))))


def test_nala_block():
    module = build("nala")
    x, y, (q, k, v) = run(module)
    phi_q, phi_k = module.feature_map(q, k)
    o = joined(normalised(phi_q @ phi_k.mT) @ v)
    o = F.layer_norm(o, o.shape[-1:], module.o_norm.weight, module.o_norm.bias, 1e-6)
    same(y, module.o_proj(o * F.silu(module.g_proj(x))))
    assert (module.weights(x) >= -1e-12).all()


@pytest.mark.parametrize("scale", ["code", "inverse_t", "literal"])
@pytest.mark.parametrize(
    ("name", "function"), [("elu1", lambda x: 1 + F.elu(x)), ("relu", F.relu), ("exp", torch.exp)]
)
def test_mala(scale, name, function):
    """With every kernel of its ablation that maps entry by entry."""
    module = build("mala", mixer_options={"scale": scale}, feature_map=name)
    x, y, (q, k, v) = run(module)
    sim = (function(q) @ function(k).mT).tril()
    t = t_of(sim)
    sim = sim * {"code": K**-0.5 / t, "inverse_t": 1 / t, "literal": torch.ones_like(t)}[scale]
    z = sim.sum(-1, keepdim=True)
    w = ((1 + 1 / z) * sim - z / t).tril()
    near = 1e-5 if name == "elu1" else 1e-3  # the epsilon of denominators, some of them small
    same(module.o_proj(joined(w @ v)), y, near)
    weights = module.weights(x)
    same(weights, w, near)
    same(weights.sum(-1), torch.ones_like(weights.sum(-1)), near)
    assert (weights < 0).any()


@pytest.mark.parametrize("taps", [3, 5, 7])
@pytest.mark.parametrize("both", [False, True])
def test_mala_adds_a_convolution_of_its_values(taps, both):
    module = build("mala", value_conv=taps, is_decoder=not both)
    x = torch.randn(2, T, H * K, generator=torch.Generator().manual_seed(1)).double()
    seq, v = BOTH if both else Sequences(), module.v_proj(x)
    y = module(x, seq)[0]
    # A filter a channel, centred where tokens see both ways.
    sides = (taps // 2, taps // 2) if both else (taps - 1, 0)
    local = F.conv1d(F.pad(v.mT, sides), module.dwc.weight, groups=H * K).mT
    module.rule = replace(module.rule, value_conv=0)
    same(y, module(x, seq)[0] + module.o_proj(local))
    assert module.dwc.weight.shape == (H * K, 1, taps)


def test_without_a_convolution_the_gate_of_pola_has_one_place():
    outputs = []
    for gate_first in (False, True):
        torch.manual_seed(0)
        options = {"mixer_options": {"gate_first": gate_first}, "value_conv": 0}
        outputs.append(tiny("pola", **options)(torch.arange(8)[None]).logits)
    assert torch.equal(*outputs)


def test_mala_sharpens_as_the_query_grows():
    """φ(q) → aφ(q) makes β' = (β + a − 1)/a and γ' = aγ; where all weights are positive, ratios sharpen."""
    phi_q, phi_k = (
        torch.rand(9, K, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in (1, 2)
    )
    module = build("mala", feature_map="relu", mixer_options={"scale": "literal"})
    q, k = (phi[None, :, None].expand(1, 9, H, K) for phi in (0.05 * phi_q, phi_k))
    eye = torch.eye(9, dtype=torch.float64)[None, :, None].expand(1, 9, H, 9)

    def weights(a):
        return module.mix(Inputs(a * q, k, eye), Sequences(), None)[0][0, :, 0]

    a, sim = 1.5, (0.05 * phi_q @ phi_k.mT).tril()
    z, t = sim.sum(-1, keepdim=True), torch.arange(1, 10, dtype=torch.float64)[:, None]
    beta, gamma = 1 + 1 / z, z / t
    grown = ((beta + a - 1) / a * a * sim - a * gamma).tril()
    same(weights(a), grown, 1e-4)
    small, large = weights(1.0)[-1], weights(a)[-1]
    assert (small > 0).all()
    assert (large > 0).all()
    assert large.max() / large.min() > small.max() / small.min()


@pytest.mark.parametrize(
    "seq",
    [
        BOTH,
        Sequences(torch.tensor([0, 1, 9, 9, T]), bidirectional=True),
        Sequences(bidirectional=True, grid=(T, 1)),
    ],
    ids=["dense", "packed", "image"],
)
@pytest.mark.parametrize("mixer", ["nala", "mala"])
def test_rotation_leaves_opposite_signs_apart(mixer, seq):
    """A channel's positive and negative parts stay features of their own, at any distance."""
    options = {"feature_map": "nala", "feature_map_options": {"angle": "relu_split"}}
    module = build(
        mixer, head_dim=8, is_decoder=False, mixer_options={"rope_theta": 10.0}, **options
    )
    q = F.one_hot(torch.arange(H), 8).double().expand(1, T, H, 8)  # a channel a head
    v = torch.randn(1, T, H, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert module.mix(Inputs(q, -q, v), seq, None)[0].abs().max() == 0
    assert module.mix(Inputs(q, q, v), seq, None)[0].abs().max() > 0.1


def test_both_streams_rotate_by_the_same_angles():
    module = build("nala", head_dim=8, is_decoder=False, mixer_options={"rope_theta": 10.0})
    q, k, v = torch.randn(
        3, 1, T, H, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    features, angles = module.feature_map(q, k), place_angles(q, BOTH, 8, 10.0)

    def scores(q, k):
        return torch.einsum("bthk,bshk->bhts", q, k)

    streams = zip(*(phi.chunk(2, -1) for phi in features), strict=True)
    rotated = sum(scores(*(rotate(x, angles) for x in stream)) for stream in streams)
    weights = rotated / (scores(*features).sum(-1, keepdim=True) + 1e-6 * T)
    o, _ = module.mix(Inputs(q, k, v), BOTH, None)
    same(o, torch.einsum("bhts,bshv->bthv", weights, v))


@pytest.mark.parametrize("gate_first", [False, True])
def test_pola(gate_first):
    module = build(
        "pola", mixer_options={"gate_first": gate_first}, feature_map_options={"alpha": 3}
    )
    torch.nn.init.normal_(module.feature_map.w)
    x, y, (q, k, v) = run(module)
    # The released code's softplus scale is at its start, where it divides by 1.
    p = (1 + 3 * module.feature_map.w.sigmoid())[:, None]  # [H, 1, K]
    positive, negative = (
        tuple(torch.where(sign * z > 1e-6, (sign * z).clamp_min(1e-6) ** p, 0) for z in (q, k))
        for sign in (1, -1)
    )
    alike = positive[0] @ positive[1].mT + negative[0] @ negative[1].mT
    unlike = negative[0] @ positive[1].mT + positive[0] @ negative[1].mT
    halves = v.chunk(2, -1)
    o = joined(torch.cat([normalised(alike) @ halves[0], normalised(unlike) @ halves[1]], -1))
    filters = module.dwc.weight.repeat(H, 1, 1)
    local = F.conv1d(F.pad(joined(v).mT, (4, 0)), filters, groups=H * K).mT
    gate = module.g_proj(x)
    # 1e-7: the learnt scale starts at 1 as nearly as fp32 has it
    same(y, module.o_proj(gate * o + local if gate_first else gate * (o + local)), 1e-7)


@pytest.mark.parametrize("name", ["softpp", "soft"])
def test_soft(name):
    module = build("soft", feature_map=name, feature_map_options={"landmarks": 5})
    x = torch.randn(2, T, H * K, dtype=torch.float64)
    q, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (module.q_proj, module.v_proj))
    z = next(p for n, p in module.feature_map.named_parameters()).detach().double()  # [H, m, K]

    def kernel(a, b):
        return torch.exp(-torch.cdist(a, b).square() / (2 * K**0.5))

    a = kernel(z, z)
    w = torch.linalg.inv(a + 0.01 * torch.eye(5, dtype=torch.float64))
    if name == "softpp":
        d = a.sum(-1) ** -0.5
        w = d[:, :, None] * w * d[:, None]
    o = (kernel(q, z) @ w @ kernel(z, q)).tril() @ v
    same(module(x, Sequences())[0], module.o_proj(joined(rms(o, module.o_norm.weight))), 1e-6)
    assert not hasattr(module, "k_proj")


def test_retention():
    module = build("retention")
    x, y, (q, k, v) = run(module)
    angles = torch.arange(T)[:, None] * 10000.0 ** (
        -torch.arange(0, K, 2) / K
    )  # fp32, as in the mixer
    turn = torch.polar(torch.ones(()), angles.float()).to(torch.complex128)

    def turned(z):
        a, b = z.chunk(2, -1)
        z = torch.complex(a, b) * turn
        return torch.cat([z.real, z.imag], -1)

    decay = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    apart = torch.arange(T)[:, None] - torch.arange(T)
    w = turned(q) @ turned(k).mT * decay[:, None, None] ** apart.clamp_min(0) / K**0.5
    o = joined(rms(w.tril() @ v, module.o_norm.weight))
    same(y, module.o_proj(o * F.silu(module.g_proj(x))), 1e-5)  # decays are fp32


def test_gla():
    module = build("gla", mixer_options={"gate_rank": 4, "gate_temperature": 2.0})
    x, y, (q, k, v) = run(module)
    first, second = module.gk_proj
    assert first.weight.shape == (4, H * K)
    alpha = torch.sigmoid(x @ first.weight.T @ second.weight.T + second.bias) ** 0.5
    log = alpha.log().unflatten(-1, (H, -1)).transpose(1, 2).cumsum(2)  # [B, H, T, K]
    decay = (log[:, :, :, None] - log[:, :, None]).exp()  # [B, H, T, T, K]
    w = torch.einsum("bhik,bhijk,bhjk->bhij", q, decay, k).tril() / K**0.5
    o = joined(rms(w @ v, module.o_norm.weight))
    same(y, module.o_proj(o * F.silu(module.g_proj(x))))


@pytest.mark.parametrize("mixer", ["deltanet", "gated_deltanet"])
@pytest.mark.parametrize("conv_size", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_write": True, "num_v_heads": 2 * H},
        {"norm_read": True, "num_v_heads": 2 * H},
        {"norm_write": True, "norm_read": True, "qk_norm": "none"},
        {"norm_write": True, "qk_norm": "rms", "num_v_heads": 2 * H},
    ],
    ids=str,
)
def test_delta_nets(mixer, conv_size, options):
    module = build(mixer, conv_size=conv_size, feature_map="silu", mixer_options=options)
    x, y, _ = run(module)

    def projected(name):
        z = getattr(module, f"{name}_proj")(x)
        if conv_size:
            filters = getattr(module, f"{name}_conv1d").weight
            z = F.conv1d(F.pad(z.mT, (conv_size - 1, 0)), filters, groups=len(filters)).mT
        z = z.unflatten(-1, (-1, K))
        return z if name == "v" else z.repeat_interleave(module.num_v_heads // H, 2)

    def length(z):
        return (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    raw_q, raw_k = projected("q"), projected("k")
    q, k, v, beta = F.silu(raw_q), F.silu(raw_k), F.silu(projected("v")), module.b_proj(x).sigmoid()
    if "norm_write" in options:
        beta = 1 - torch.exp(-beta * raw_k.square().sum(-1) / K)
    norm, step = options.get("qk_norm", "l2"), beta
    if norm == "none":
        step = beta / length(k).squeeze(-1) ** 2
    else:
        q, k = q / length(q), k / length(k)
    if norm == "rms":
        q, k, step = K**0.5 * q, K**0.5 * k, beta / K
    decay = torch.ones_like(beta)
    if mixer == "gated_deltanet":
        own = module.decay
        decay = torch.exp(-own.A_log.exp() * F.softplus(module.a_proj(x) + own.dt_bias))
    state, rows = torch.zeros(2, module.num_v_heads, K, K, dtype=torch.float64), []
    for t in range(T):
        state = decay[:, t, :, None, None] * state
        old = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", step[:, t], k[:, t], v[:, t] - old)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * K**-0.5)
    o = rms(torch.stack(rows, 1), module.o_norm.weight)
    if "norm_read" in options:
        o = o * (0.5 + torch.tanh(length(raw_q) / K**0.5))
    o = o.flatten(-2)
    if mixer == "gated_deltanet":
        o = o * F.silu(module.g_proj(x))
    same(y, module.o_proj(o), 1e-6)  # the decay's parameters are fp32


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"inner_decay": False, "num_v_heads": 2 * H}, {"correction": None, "inner_decay": False}],
    ids=str,
)
def test_comba(options, gate):
    module = build("comba", use_gate=gate, expand_v=1.5, mixer_options=options)
    x = torch.randn(2, T, H * K, dtype=torch.float64)
    q, k = (F.silu(getattr(module, f"{n}_proj")(x)).unflatten(-1, (H, K)) for n in "qk")
    if module.correction is not None:
        d = module.correction.D
        d = d * module.correction.decay.sigmoid() if options.get("inner_decay", True) else d
        q = q - d.double()[:, None] * k
    q, k = (
        (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            module.num_v_heads // H, 2
        )
        for z in (q, k)
    )
    v = F.silu(module.v_proj(x)).unflatten(-1, (-1, module.V))
    beta, own = module.b_proj(x).sigmoid(), module.decay
    decay = torch.exp(-own.A_log.exp() * F.softplus(module.a_proj(x) + own.dt_bias))

    state, rows = torch.zeros(2, module.num_v_heads, K, module.V, dtype=torch.float64), []
    for t in range(T):
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        written = torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], v[:, t] - held)
        state = decay[:, t, :, None, None] * state + written
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * K**-0.5)
    o = rms(torch.stack(rows, 1), module.o_norm.weight).flatten(-2)
    o = o * module.g_proj(x).sigmoid() if gate else o
    same(module(x, Sequences())[0], module.o_proj(o), 1e-6)  # the decay's parameters are fp32


@pytest.mark.filterwarnings("ignore:The correction_factor", "ignore:ShortConvolution is crucial")
@pytest.mark.parametrize("inner_decay", [True, False])
def test_comba_is_that_of_fla(inner_decay, monkeypatch):
    """Its module with the form by chunks that stands beside its kernels, in float64: outputs and all gradients."""
    theirs = pytest.importorskip("fla.layers.comba")
    from fla.ops.comba import naive

    def chunk(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, **_):
        q, k, p = (l2norm(z) for z in (q, k, p))
        return naive.naive_chunk_comba(q, k, v, p, g, beta)

    class NormGate(torch.nn.Module):
        def __init__(self, size, activation, eps):
            super().__init__()
            assert activation == "sigmoid"
            self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

        def forward(self, o, gate):
            o = o / (o.square().mean(-1, keepdim=True) + self.eps).sqrt()
            return o * self.weight * gate.sigmoid()

    wide = {"float": torch.float64, "float32": torch.float64}
    monkeypatch.setattr(naive, "torch", SimpleNamespace(**vars(torch) | wide))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(theirs, "chunk_comba", chunk)
    monkeypatch.setattr(theirs, "FusedRMSNormGated", NormGate)

    ours = build("comba", expand_v=1.5, mixer_options={"inner_decay": inner_decay})
    layer = theirs.Comba(
        hidden_size=H * K,
        expand_v=1.5,
        head_dim=K,
        num_heads=H,
        use_short_conv=False,
        use_inner_decay=inner_decay,
        norm_eps=1e-6,
    ).double()
    names = FORMATS["comba"]
    pairs = {
        name: (layer.get_parameter(names.tensor(f".mixer.{name}", {}).removeprefix(".attn.")), mine)
        for name, mine in ours.named_parameters()
    }
    assert len({id(right) for right, _ in pairs.values()}) == len(list(layer.parameters()))
    with torch.no_grad():
        for right, mine in pairs.values():
            mine.data = mine.double()
            right.copy_(mine)

    x = torch.randn(2, T, H * K, dtype=torch.float64)
    expected, found = layer(x)[0], ours(x, Sequences())[0]
    # Behind the factor their norm adds 1e-6 to the square of a smaller length: all that it leaves in the state.
    slack = 1e-4 if inner_decay else 1e-9
    same(found, expected, slack)
    for y in (expected, found):
        y.square().sum().backward()
    for name, (right, mine) in pairs.items():
        size = right.grad.abs().max()
        assert size > 1e-3, name
        same(mine.grad / size, right.grad / size, slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_comba_under_decays_that_leave_nothing(dtype):
    """Every seventh decay is e^−200: values and all gradients beside float64, which has no floor either."""
    module = build("comba").to(dtype)
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (H, K), "k": (H, K), "v": (H, K), "beta": (H,), "g": (H,)}
    tokens = {
        name: torch.randn(2, 101, *shape, generator=generator).to(dtype).double()
        for name, shape in shapes.items()
    }
    tokens |= {"beta": tokens["beta"].sigmoid(), "g": -tokens["g"].abs()}
    tokens["g"][:, ::7] = -200

    def results(compute, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: x.to(dtype if name in "qkv" else wide, copy=True).requires_grad_()
            for name, x in tokens.items()
        }
        o = compute(**leaves).double()
        (
            o * torch.randn(o.shape, generator=torch.Generator().manual_seed(4)).double()
        ).sum().backward()
        return {"o": o.detach()} | {name: x.grad.double() for name, x in leaves.items()}

    def plainly(q, k, v, beta, g):
        q, k = F.silu(q), F.silu(k)
        own = module.correction
        q = q - (own.D * own.decay.sigmoid()).double()[:, None] * k
        q, k = l2norm(q), l2norm(k)
        state, rows = torch.zeros(2, H, K, K, dtype=torch.float64), []
        for t in range(q.shape[1]):
            held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            write = torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], v[:, t] - held)
            state = g[:, t, :, None, None].exp() * state + write
            rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * K**-0.5)
        return torch.stack(rows, 1)

    right = results(plainly, torch.float64)
    found = results(lambda **leaves: module.mix(Inputs(**leaves), Sequences(), None)[0], dtype)
    slack = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for name, x in right.items():
        assert (found[name] - x).abs().max() < slack * x.abs().max(), name


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_rwkv7(shift, gate):
    module = build("rwkv7", use_gate=gate, expand_v=1.5, mixer_options={"token_shift": shift})
    x = torch.randn(2, T, H * K, dtype=torch.float64)
    own, before = module.rates, F.pad(x, (0, 0, 1, 0))[:, :-1]

    def seen(name):
        return x + getattr(module.shift, f"x_{name}") * (before - x) if shift else x

    def heads(z):
        return z.unflatten(-1, (H, -1))

    q, k, v = (heads(getattr(module, f"{name}_proj")(seen(name))) for name in ("q", "k", "v"))
    w = module.w_up_proj(torch.tanh(module.w_proj(seen("w")))) + own.w_bias
    a = module.a_up_proj(module.a_proj(seen("a"))) + own.a_bias
    a = heads(a.clamp_min(LEAST_LOGIT).sigmoid())
    w = heads(torch.exp(-math.exp(-0.5) * w.sigmoid()))
    kappa = k * heads(own.k_k)
    kappa = kappa / (kappa.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    written = k * (1 + (a - 1) * heads(own.k_a))

    state, rows = torch.zeros(2, H, K, module.V, dtype=torch.float64), []
    for t in range(T):
        held = torch.einsum("bhk,bhkv->bhv", kappa[:, t], state)
        state = w[:, t, ..., None] * state + torch.einsum("bhk,bhv->bhkv", written[:, t], v[:, t])
        state = state - torch.einsum("bhk,bhv->bhkv", (a * kappa)[:, t], held)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o = torch.stack(rows, 1)
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + K * 1e-6).sqrt()
    o = o * heads(module.o_norm.weight) + heads(module.o_norm.bias)
    o = (o + (q * heads(own.r_k) * written).sum(-1, keepdim=True) * v).flatten(-2)
    if gate:
        o = o * module.g_up_proj(module.g_proj(seen("gate")).sigmoid())
    same(module(x, Sequences())[0], module.o_proj(o))


FLA_NAMES = {
    "r_proj": "q_proj",
    "w_lora.lora.0": "w_proj",
    "w_lora.lora.2.weight": "w_up_proj.weight",
    "w_lora.lora.2.bias": "rates.w_bias",
    "a_lora.lora.0": "a_proj",
    "a_lora.lora.2.weight": "a_up_proj.weight",
    "a_lora.lora.2.bias": "rates.a_bias",
    "g_lora.lora.0": "g_proj",
    "g_lora.lora.2": "g_up_proj",
    "g_norm": "o_norm",
    "x_r": "shift.x_q",
    "x_g": "shift.x_gate",
    **{f"x_{name}": f"shift.x_{name}" for name in "wkva"},
    **{name: f"rates.{name}" for name in ("k_k", "k_a", "r_k")},
}


@pytest.mark.filterwarnings("ignore:According to Bo")
def test_rwkv7_is_the_first_layer_of_fla(monkeypatch):
    """Its module with the references that stand beside its kernels, in float64: outputs and all gradients."""
    theirs = pytest.importorskip("fla.layers.rwkv7")
    from fla.modules.token_shift import token_shift_ref
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.rwkv7 import fused_addcmul, fused_k_update, gate_output_correction

    def chunk(r, w, k, v, a, b, scale, **_):
        q = r * scale * r.shape[-1] ** 0.5
        o, state = dplr_recurrence(*(x.transpose(1, 2) for x in (q, k, v, a, b, w)))
        return o.transpose(1, 2), state

    for name, reference in {
        "token_shift": lambda x, *_, **__: (token_shift_ref(x), None),
        "fused_addcmul_rwkv7": fused_addcmul.torch_addcmul_rwkv7,
        "fused_k_rwkv7": fused_k_update.k_update_ref,
        "gate_output_correction": gate_output_correction.gate_output_correction_ref,
        "chunk_rwkv7": chunk,
    }.items():
        monkeypatch.setattr(theirs, name, reference)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    ranks = {"decay_rank": 8, "rate_rank": 4, "gate_rank": 5}
    ours = build("rwkv7", norm_eps=1e-5, mixer_options=ranks)
    low = {"decay_low_rank_dim": 8, "a_low_rank_dim": 4, "gate_low_rank_dim": 5}
    layer = theirs.RWKV7Attention(
        hidden_size=H * K, head_dim=K, layer_idx=0, num_hidden_layers=2, **low
    ).double()
    pairs = {}
    for name, parameter in layer.named_parameters():
        mine = next((n + name[len(p) :] for p, n in FLA_NAMES.items() if name.startswith(p)), name)
        pairs[name] = (parameter, ours.get_parameter(mine))
    assert len({id(mine) for _, mine in pairs.values()}) == len(list(ours.parameters()))
    with torch.no_grad():
        for parameter, mine in pairs.values():
            mine.data = mine.double()
            parameter.copy_(mine.view(parameter.shape))

    x = torch.randn(2, T, H * K, dtype=torch.float64)
    expected, found = layer(x)[0], ours(x, Sequences())[0]
    # Theirs adds 1e-6 to the length of κ only in a kernel.
    same(found, expected, 1e-5)
    for y in (expected, found):
        y.square().sum().backward()
    for name, (parameter, mine) in pairs.items():
        right = parameter.grad
        assert right.abs().max() > 1e-3, name
        same(mine.grad.view(right.shape) / right.abs().max(), right / right.abs().max(), 1e-4)


@pytest.mark.filterwarnings("ignore:According to Bo")
@pytest.mark.parametrize("i", [0, 2])
def test_rwkv7_begins_as_in_fla(i):
    """The numbers of channels; matrices have the initial weights of every mixer."""
    theirs = pytest.importorskip("fla.layers.rwkv7")
    layer = theirs.RWKV7Attention(hidden_size=64, head_dim=16, layer_idx=i, num_hidden_layers=3)
    model = tiny("rwkv7", hidden_size=64, num_heads=4, num_hidden_layers=3)
    ours = model.model.layers[i].mixer
    for name, mine in FLA_NAMES.items():
        if mine.startswith(("shift", "rates")):
            first = layer.get_parameter(name)
            same(ours.get_parameter(mine).view(first.shape), first.double(), 1e-6)
    same(ours.o_norm.weight, layer.g_norm.weight.double(), 1e-6)
    assert [ours.w_proj.out_features, ours.a_proj.out_features, ours.g_proj.out_features] == [
        getattr(layer, f"{name}_low_rank_dim") for name in ("decay", "a", "gate")
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixer_options": {"gate_rank": 0}}, "gate_rank=0 must be at least 1"),
        ({"mixer_options": {"token_shift": True}, "is_decoder": False}, "leave it out in encoders"),
    ],
)
def test_rwkv7_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        build("rwkv7", **options)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_repeated_token_does_not_lengthen_the_state_of_comba(dtype):
    """Behind decays that leave nothing it turns the state into its negative: a key longer than 1 would add up."""
    module = build("comba", feature_map="identity").to(dtype)
    some = torch.randn(1000, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    k = some[l2norm(some).float().square().sum(-1).argmax()].expand(1, 2000, H, K)
    gates = {"beta": torch.ones(1, 2000, H), "g": torch.full((1, 2000, H), -20.0)}
    state = {"recurrent": l2norm(k[:, 0].float())[..., None].repeat(1, 1, 1, K)}
    inputs = Inputs(k, k, torch.zeros_like(k), **gates)
    _, after = module.mix(inputs, Sequences(), state)
    grown = after["recurrent"].norm() / state["recurrent"].norm()
    assert 0.9 < grown < 1.1


def test_comba_refuses_a_factor_of_no_correction():
    with pytest.raises(ValueError, match="set inner_decay false"):
        build("comba", mixer_options={"correction": None})


def complex_states(q, k, v, g, dt, share, turn, skip):
    """Mamba 3's rule with complex states, as published: no key and no query is rotated."""
    turn = F.pad(turn, (0, k.shape[-1] - turn.shape[-1]))
    alpha = torch.exp(torch.complex(g[..., None], dt[..., None] * turn[:, :, None]))
    old, new = (1 - share) * dt, share * dt  # the two weights of the trapezoid
    state = k.new_zeros(*k[:, 0].shape, v.shape[-1])
    write, rows = torch.zeros_like(state), []
    for t in range(v.shape[1]):
        state = alpha[:, t, ..., None] * (state + old[:, t, :, None, None] * write)
        write = torch.einsum("bhk,bhv->bhkv", k[:, t].conj(), v[:, t].to(k.dtype))
        state = state + new[:, t, :, None, None] * write
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state).real)
    return torch.stack(rows, 1) + skip[:, None] * v


@pytest.mark.parametrize("fraction", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("gate", [True, False])
def test_mamba3(fraction, gate):
    options = {"num_v_heads": 2 * H, "rope_fraction": fraction}
    module = build("mamba3", use_gate=gate, expand_v=1.5, mixer_options=options)
    drawn(module.numbers, 0.6)
    with torch.no_grad():
        for parameter in module.numbers.parameters():
            parameter += torch.randn_like(parameter)
    x = torch.randn(2, T, H * K, dtype=torch.float64)
    own, R = module.numbers, module.pairs

    def heads(name):
        y = getattr(module, f"{name}_proj")(x).unflatten(-1, (H, K))
        y = rms(y, getattr(module, f"{name}_norm").weight).repeat_interleave(2, 2)
        y = y + getattr(own, f"{name}_bias")
        a, b, rest = y.split([R, R, K - 2 * R], -1)
        return torch.cat([torch.complex(a, b), rest], -1)

    v = module.v_proj(x).unflatten(-1, (2 * H, -1))
    dt = F.softplus(module.dt_proj(x) + own.dt_bias)
    g = -F.softplus(module.a_proj(x)) * dt
    turn = math.pi * torch.tanh(module.angle_proj(x))
    share = module.lambda_proj(x).sigmoid()
    o = complex_states(heads("q"), heads("k"), v, g, dt, share, turn, own.D).flatten(-2)
    if gate:
        o = o * F.silu(module.g_proj(x))
    same(module(x, Sequences())[0], module.o_proj(o))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_mamba3_is_the_layer_of_fla(fraction):
    """Its projections and gates, in front of the rule: its own kernel runs on a card alone."""
    theirs = pytest.importorskip("fla.layers.mamba3")
    width, N, V = H * K, 8, 6
    layer = theirs.Mamba3(
        **{"hidden_size": width, "state_size": N, "head_dim": V, "n_groups": 2},
        rope_fraction=fraction,
    )
    torch.manual_seed(0)
    layer.B_norm, layer.C_norm = (torch.nn.RMSNorm(N, eps=1e-5) for _ in range(2))
    drawn(layer, 0.6).double()
    HV, R = layer.num_heads, layer.num_rope_angles
    ours = build(
        "mamba3",
        **{"head_dim": N, "expand_v": V / N, "norm_eps": 1e-5},
        mixer_options={"num_v_heads": HV, "rope_fraction": fraction},
    )

    # Pairs are neighbours there; here they span the halves of the entries that turn.
    order = torch.cat(
        [torch.arange(0, 2 * R, 2), torch.arange(1, 2 * R, 2), torch.arange(2 * R, N)]
    )
    gate, v, k, q, dt, a, share, angle = layer.in_proj.weight.split(
        [HV * V, HV * V, 2 * N, 2 * N, HV, HV, HV, R]
    )
    k, q = (w.unflatten(0, (2, N))[:, order].flatten(0, 1) for w in (k, q))
    weights = {"q": q, "k": k, "v": v, "g": gate, "a": a, "dt": dt, "lambda": share, "angle": angle}
    weights = {f"{name}_proj.weight": w for name, w in weights.items()} | {
        "o_proj.weight": layer.out_proj.weight,
        "q_norm.weight": layer.C_norm.weight[order],
        "k_norm.weight": layer.B_norm.weight[order],
        "numbers.q_bias": layer.C_bias[:, 0, order],
        "numbers.k_bias": layer.B_bias[:, 0, order],
        "numbers.D": layer.D,
        "numbers.dt_bias": layer.dt_bias,
    }
    ours.load_state_dict(weights)

    x, rows = torch.randn(2, T, width, dtype=torch.float64), []
    for t in range(T):
        z, y, B, C, dd_dt, dd_A, trap, angles = layer._project_and_split(x[:, t])
        dt, B, C, y, z, trap, A, angles = layer._preprocess_step(
            dd_A, dd_dt, B, C, y, z, trap, angles
        )
        rows.append((B[:, 0], C[:, 0], y, A * dt, dt, trap, angles[:, 0], z))
    k, q, v, g, dt, share, angles, z = (torch.stack(of, 1) for of in zip(*rows, strict=True))

    def paired(y, bias):
        turned, rest = (y + bias[:, 0]).split([2 * R, N - 2 * R], -1)
        turned = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([turned, rest], -1)

    turn = math.pi * torch.tanh(angles)
    q, k = paired(q, layer.C_bias), paired(k, layer.B_bias)
    o = complex_states(q, k, v, g, dt, share, turn, layer.D)
    expected = layer.out_proj((o * F.silu(z)).flatten(-2))
    same(ours(x, Sequences())[0], expected, 1e-5)  # its A is fp32


@torch.no_grad()
def test_long_texts_lose_no_digits_of_an_angle():
    """4096 tokens turn by 12 000 in all: in fp32, whole and the last of them from a cache, beside float64."""
    long, module = 4096, build("mamba3", mixer_options={"rope_fraction": 1.0})
    x = torch.randn(1, long, H * K, dtype=torch.float64)
    wide, _ = module.inputs(x, Sequences(), None)
    angles = 3 + torch.rand_like(wide.angles)
    narrow = Inputs(*(y if y is None else y.float() for y in wide._replace(angles=angles)))

    def mixed(inputs, start=0, stop=long, state=None):
        some = Inputs(*(y if y is None or y.dim() < 2 else y[:, start:stop] for y in inputs))
        return module.mix(some, Sequences(), state)

    right = mixed(Inputs(*(y if y is None else y.double() for y in narrow)))[0].float()
    same(mixed(narrow)[0], right, 1e-4)
    rows, (_, state) = [], mixed(narrow, stop=long - 8, state={})
    for t in range(long - 8, long):
        o, state = mixed(narrow, t, t + 1, state)
        rows.append(o)
    same(torch.cat(rows, 1), right[:, -8:], 1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_v_heads": 3}, "num_v_heads=3 must be a multiple of num_heads=2"),
        ({"rope_fraction": 0.1}, "rope_fraction=0.1 must be at most 1 and rotate a pair of the 6"),
        ({"rope_fraction": 1.5}, "rope_fraction=1.5 must be at most 1"),
    ],
)
def test_mamba3_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        build("mamba3", mixer_options=options)


@pytest.mark.parametrize("name", ["nala", "silu"])
def test_norm_write(name, monkeypatch):
    """A step of 1 for a long key, of 0 for none; under qk_norm none and rms β‖k‖² ≤ 1 all the same."""
    seen, recurrence = [], recurrent.recurrence

    def spy(call, options, seq, state, **more):
        seen.append((call.k, call.beta))
        return recurrence(call, options, seq, state, **more)

    monkeypatch.setattr(recurrent, "recurrence", spy)
    for norm in ("l2", "rms", "none"):
        module = build(
            "deltanet", feature_map=name, mixer_options={"norm_write": True, "qk_norm": norm}
        )
        x = torch.randn(1, T, H * K, dtype=torch.float64)
        inputs, _ = module.inputs(x, Sequences(), None)
        for size in (0.0, 1e-9, 1.0, 1e4):
            k = (size * inputs.k).detach().requires_grad_()
            o, _ = module.mix(inputs._replace(k=k), Sequences(), None)
            assert o.isfinite().all()
            assert torch.autograd.grad(o.square().sum(), k)[0].isfinite().all()
            read, step = seen.pop()
            erased = step if norm == "l2" else step * read.square().sum(-1)
            assert (erased <= 1 + 1e-12).all()
            if size == 0:
                assert (step == 0).all()
            elif size == 1e4 and norm == "l2":
                same(step, torch.ones_like(step))


def awareness(**options):
    model = tiny(**{"num_hidden_layers": 1, "head_dim": 64, **options})
    return norm_awareness(model.model.layers[0].mixer, normal(2, 32, 24))


def agrees(found, seen: str) -> None:
    """The norms named in `seen` move the weights, the others do not."""
    for name, change in zip("qk", found, strict=True):
        assert 0.01 < change < 2 if name in seen else change < 1e-4, (name, found)


# Maps that norm q hide it where tanh ‖q‖ is 1 or not there; homogeneous ones leave both norms to the row's.
NORMING = ("angle", "nala_learned", "nala_paper", "nala_released")
HOMOGENEOUS = ("identity", "relu", "pola", "nala_code", *NORMING)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_whether_norms_move_the_normalised_weights(name):
    """In every mixer that takes the map. Two have another use for norms: MALA, and the norm-aware write."""
    seen = "" if name in HOMOGENEOUS else "q" if name == "nala" else "qk"
    expected = dict.fromkeys(
        ("deltanet", "gated_deltanet", "linear_attention", "norm_attention"), seen
    )
    if nonnegative := build_map(name).nonnegative:
        expected |= {"nala": seen, "mala": "k" if name in NORMING else "qk"}
    for mixer, these in expected.items():
        options = {"denominator": nonnegative} if mixer == "linear_attention" else {}
        agrees(awareness(mixer=mixer, feature_map=name, mixer_options=options), these)
    for norm in ("l2", "none"):
        options = {"norm_write": True, "qk_norm": norm}
        agrees(awareness(mixer="deltanet", feature_map=name, mixer_options=options), f"k{seen}")


@pytest.mark.parametrize(
    ("seen", "options"),
    [
        *(("", {"feature_map": "angle", "feature_map_options": {"angle": a}}) for a in NORMED),
        *(("q", {"feature_map_options": {"angle": a}}) for a in NORMED),
        ("qk", {"feature_map_options": {"angle": "raw"}}),
        ("", {"feature_map_options": {"query_power": 1.74}}),
        ("qk", {"mixer": "softmax"}),
        ("k", {"mixer": "softmax", "mixer_options": {"q_norm": "length"}}),
        ("qk", {"mixer": "diag_attention"}),
        ("qk", {"mixer": "soft"}),
        ("", {"mixer": "pola"}),
        ("", {"mixer": "retention"}),
        ("", {"mixer": "rwkv7"}),
        ("", {"mixer": "mamba3"}),
        ("", {"mixer": "gla"}),
    ],
    ids=str,
)
def test_readings_and_mixers_without_a_choice_of_map(seen, options):
    if "mixer" not in options:
        options = {"mixer": "deltanet", "feature_map": "nala"} | options
    agrees(awareness(**options), seen)


def test_norm_read_scales_each_head_by_its_query():
    plain, aware = (
        build("gated_deltanet", mixer_options={"norm_read": on}) for on in (False, True)
    )
    plain.o_proj, aware.o_proj = torch.nn.Identity(), torch.nn.Identity()
    x = torch.randn(1, T, H * K, dtype=torch.float64)
    q = plain.inputs(x, Sequences(), None)[0].q
    s = 0.5 + torch.tanh((q.square().sum(-1) + 1e-6).sqrt() / K**0.5)
    a, b = (module(x, Sequences())[0].unflatten(-1, (H, K)) for module in (plain, aware))
    same(b, a * s[..., None], 1e-12)


@pytest.mark.parametrize("name", ["silu", "nala"])
def test_rms_features_give_what_l2_gives(name):
    """Their length √F cancels, in the step and in the readout's scale."""
    a, b = (
        build(
            "gated_deltanet", feature_map=name, mixer_options={"norm_write": True, "qk_norm": norm}
        )
        for norm in ("l2", "rms")
    )
    same(run(a)[1], run(b)[1])


@pytest.mark.parametrize(
    ("options", "map_options", "words"),
    [
        ({"norm_write": True, "allow_neg_eigval": True}, {}, "take one of them"),
        ({"qk_norm": "l1"}, {}, "l2, rms, none"),
        ({"qk_norm": "rms"}, {"norm": "l2"}, "set norm_write$"),
        ({"qk_norm": "none"}, {}, "set norm_write, or .* norm: l2"),
    ],
)
def test_delta_rules_refuse_a_state_that_grows(options, map_options, words):
    with pytest.raises(ValueError, match=words):
        build("deltanet", mixer_options=options, feature_map_options=map_options)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("deltanet", {"mixer_options": {"allow_neg_eigval": True}}),
        (
            "deltanet",
            {
                "mixer_options": {"allow_neg_eigval": True, "num_v_heads": 32, "qk_norm": "none"},
                "feature_map_options": {"norm": "l2"},
            },
        ),
        ("gated_deltanet2", {"mixer_options": {"allow_neg_eigval": True}}),
        ("delta_product", {"mixer_options": {"use_forget_gate": True}}),
    ],
)
def test_one_token_again_and_again_does_not_lengthen_the_state(mixer, options):
    """In bf16, with β near 2 and no decay: the length of a rounded key is not 1."""
    model = tiny(
        mixer, dtype=torch.float32, hidden_size=64, num_heads=16, head_dim=8, conv_size=0, **options
    )
    layer = model.model.layers[0].mixer
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.b_proj.weight.copy_(8 * x[0] / x.square().sum())
        if layer.rule.decay != "none":
            layer.decay.A_log.fill_(-20)
        layer, x = layer.bfloat16(), x.bfloat16()
        _, state = layer(x.expand(1, 2048, -1), Sequences(), {})
        _, decoded = layer(x.expand(1, 4, -1), Sequences(), {})
        for t in range(4, 516):
            _, decoded = layer(x, Sequences(past=torch.tensor([t])), decoded)
        longest = F.silu(layer.v_proj(x)).unflatten(-1, (-1, 8)).float().norm(dim=-1).max()
    for found in (state, decoded):
        assert found["recurrent"].norm(dim=(2, 3)).max() < 4 * longest


@pytest.mark.parametrize(
    "mixer", ["deltanet", "gated_deltanet", "kda", "gated_deltanet2", "delta_product"]
)
@pytest.mark.parametrize("negative", [True, False])
def test_kernels_learn_of_negative_eigenvalues(mixer, negative, monkeypatch):
    rules, recurrence = [], recurrent.recurrence

    def spy(call, options, seq, state, **more):
        rules.append(options)
        return recurrence(call, options, seq, state, **more)

    monkeypatch.setattr(recurrent, "recurrence", spy)
    run(build(mixer, mixer_options={"allow_neg_eigval": negative}))
    assert [rule.allow_neg_eigval for rule in rules] == [negative]


def test_values_pass_a_convolution_and_silu():
    module = build("linear_attention", conv_size=4)
    _, y, (q, k, v) = run(module)
    q, k, v = (
        F.conv1d(F.pad(joined(z).mT, (3, 0)), getattr(module, f"{n}_conv1d").weight, groups=H * K)
        .unflatten(1, (H, K))
        .mT
        for n, z in (("q", q), ("k", k), ("v", v))
    )
    same(y, module.o_proj(joined(normalised((1 + F.elu(q)) @ (1 + F.elu(k)).mT) @ F.silu(v))))


EXPORTED = {name: (name, {}) for name in MIXERS} | {
    "window": ("softmax", {"window": 5}),
    "blocks": ("diag_attention", {"block_size": 8}),
}
QUICK = ("gated_deltanet", "window")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in EXPORTED]
)
def test_an_exported_program_serves_other_lengths(case):
    torch.manual_seed(0)
    mixer, options = EXPORTED[case]
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = NalandaConfig(num_heads=2, mixer=mixer, mixer_options=options, **sizes)
    decoder = Decoder(config).eval()

    def ids(*shape):
        return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))

    batch, length = torch.export.Dim("batch", max=8), torch.export.Dim("length", min=2, max=256)
    exported = torch.export.export(
        *(decoder, (ids(2, 12),), {"use_cache": False}),
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "use_cache": None},
    ).module()
    for shape in ((3, 37), (1, 150), (1, 5)):
        ours, theirs = (
            model(ids(*shape), use_cache=False).last_hidden_state for model in (decoder, exported)
        )
        same(theirs, ours, 1e-5)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "gla"])
def test_mix_is_seven_frames_from_its_kernel(mixer, monkeypatch):
    """And the chunkwise form eight, autograd's own left out."""
    names = []

    def record(*inputs, **options):
        frames = [frame.name for frame in traceback.extract_stack()]
        names.append(frames[len(frames) - frames[::-1].index("mix") - 1 :])

    class Served:
        devices, load = ("cpu",), staticmethod(lambda: record)
        serves = staticmethod(lambda device: True)

    def counted(*inputs, **options):
        record()
        return forward(*inputs, **options)

    forward = chunk.chunk_forward
    monkeypatch.setattr(chunk, "chunk_forward", counted)
    rows = {op: {"triton": Served()} for op in ("delta_rule", "linear_attention")}
    monkeypatch.setattr(nalanda_kernels, "KERNELS", rows)
    monkeypatch.setattr(nalanda_kernels, "_chosen", ["triton"])
    module = build(mixer)
    # The kernel returns None, so that the torch form serves the same call.
    module(torch.randn(2, T, H * K, dtype=torch.float64), Sequences())
    kernel, torch_form = names
    assert len(kernel) <= 7, kernel
    assert len([name for name in torch_form if name not in ("apply", "record")]) <= 8, torch_form
