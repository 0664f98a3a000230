"""Softmax, diagonal-block and norm attention against plain masked quadratic forms in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nalanda import NalandaCache, NalandaConfig, NalandaForCausalLM
from nalanda.model.attention import last
from nalanda.model.base import Mixer
from nalanda.model.call import Inputs
from nalanda.model.sequences import Sequences
from nalanda.model.transnormer import LRPE, SimpleRMSNorm

D, H, K, VOCAB = 32, 4, 8, 61
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64


def build(mixer, options=None, **more) -> NalandaForCausalLM:
    """Two layers whose weights are large enough for their mixers to matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 2, "num_heads": H}
    config = NalandaConfig(
        mixer=mixer,
        mixer_options=options,
        intermediate_size=32,
        initializer_range=0.3,
        **{**sizes, **more},
    )
    return NalandaForCausalLM(config).eval()


def mixer_of(name: str, options=None, **more) -> Mixer:
    return (
        build(name, options, num_hidden_layers=1, use_bias=True, **more)
        .double()
        .model.layers[0]
        .mixer
    )


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def packing(lengths) -> torch.Tensor:
    return F.pad(torch.as_tensor(lengths).cumsum(0), (1, 0))


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# The quadratic forms, from the projections


def projected(mixer: Mixer, x: torch.Tensor):
    """q, k, v as `[B, H, T, …]`, k and v repeated for the query heads that they serve."""
    q, k, v = (
        p(x).unflatten(-1, (-1, K)).transpose(1, 2)
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    return q, *(y.repeat_interleave(H // y.shape[1], 1) for y in (k, v))


def turned(x: torch.Tensor, positions: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """(x_i, x_{i+K/2}) as one complex number, times e^{i·position·θ_i}."""
    a, b = x.chunk(2, -1)
    z = torch.complex(a, b) * torch.exp(1j * positions[:, None] * theta)
    return torch.cat([z.real, z.imag], -1)


def placed(mixer: Mixer, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if mixer.lrpe is None:
        return x
    reflection = torch.eye(K).double() - 2 * torch.outer(mixer.lrpe.u, mixer.lrpe.u)
    return turned(x @ reflection, positions, mixer.lrpe.theta)


def joined_heads(o: torch.Tensor) -> torch.Tensor:
    return o.transpose(1, 2).flatten(-2)


def normed(o: torch.Tensor, placement: str) -> torch.Tensor:
    square = o.square().mean(-1, keepdim=True)
    return o / (square + 1e-6).sqrt() if placement == "inside" else o / (square.sqrt() + 1e-8)


def softmax_reference(
    mixer: Mixer, x: torch.Tensor, window: int | None, unit: bool = False
) -> torch.Tensor:
    q, k, v = projected(mixer, x)
    if unit:
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    i = torch.arange(x.shape[1])
    theta = 10000.0 ** (-torch.arange(0, K, 2).double() / K)
    s = turned(q, i, theta) @ turned(k, i, theta).mT / math.sqrt(K)
    seen = i[:, None] >= i
    if window is not None:
        seen &= i[:, None] - i < window
    return mixer.o_proj(joined_heads(s.masked_fill(~seen, -math.inf).softmax(-1) @ v))


def diag_weights(mixer: Mixer, x: torch.Tensor, block: int, scores: str) -> torch.Tensor:
    q, k, _ = projected(mixer, x)
    i = torch.arange(x.shape[1])
    s = placed(mixer, q, i % block) @ placed(mixer, k, i % block).mT / math.sqrt(K)
    unseen = ~((i[:, None] >= i) & (i[:, None] // block == i // block))
    if scores == "softmax":
        return s.masked_fill(unseen, -math.inf).softmax(-1)
    return s.clamp_min(0).masked_fill(unseen, 0)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_softmax(heads, window):
    mixer = mixer_of("softmax", {"num_kv_heads": heads, "window": window})
    for T in (1, 4, 5, 6, 10, 33):
        x = draw(2, T, D)
        weights = mixer.weights(x)
        close(weights.sum(-1), torch.ones(2, H, T).double())
        v = projected(mixer, x)[2]
        close(mixer.o_proj(joined_heads(weights @ v)), mixer(x, Sequences())[0])
        close(
            mixer(x, Sequences())[0], softmax_reference(mixer, x, window), 1e-5
        )  # angles are fp32


def test_a_forget_gate_is_that_of_flash_linear_attention():
    naive = pytest.importorskip("fla.ops.forgetting_attn.naive").naive_forgetting_attn
    for heads, window in itertools.product((1, 2, 4), (None, 1, 5, 100)):
        mixer = mixer_of("forgetting", {"num_kv_heads": heads, "window": window})
        for T in (1, 5, 33):
            x = draw(2, T, D).requires_grad_()
            inputs, _ = mixer.inputs(x, Sequences(), None)
            o, _ = mixer.mix(inputs, Sequences(), None)
            # theirs computes in fp32
            theirs = naive(inputs.q, inputs.k, inputs.v, inputs.g, window_size=window)
            close(o, theirs.double(), 1e-5)
            weights = [*mixer.f_proj.parameters(), x]
            sides = [
                torch.autograd.grad(y.sin().sum(), weights, retain_graph=True) for y in (o, theirs)
            ]
            for ours, right in zip(*sides, strict=True):
                close(ours, right, 1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "mean"), [(torch.float32, 1.0), (torch.bfloat16, 0.01), (torch.float16, 1.0)]
)
def test_long_texts_lose_no_digits_to_a_forget_gate(dtype, mean):
    """8192 tokens with Σ −log f of 80 and of 8000, whole and the last of them from a cache, beside float64."""
    T, width = 8192, 32
    mixer = build("forgetting", hidden_size=width, num_heads=1).model.layers[0].mixer.to(dtype)
    q, k, v = (draw(1, T, 1, width, seed=i).to(dtype) for i in range(3))
    inputs = Inputs(q, k, v, g=-mean * 2 * draw(1, T, 1, seed=3).sigmoid().float())

    def tokens(*span: int) -> Inputs:
        return Inputs(*(None if x is None else x[:, slice(*span)] for x in inputs))

    o, _ = mixer.mix(inputs, Sequences(), None)
    _, state = mixer.mix(tokens(T - 8), Sequences(), {})
    cached = []
    for t in range(T - 8, T):
        y, state = mixer.mix(tokens(t, t + 1), Sequences(past=torch.tensor([t])), state)
        cached.append(y)

    c = inputs.g[0, :, 0].double().cumsum(0)
    assert -c[-1] > 0.9 * mean * T
    s = (q[0, :, 0].double() @ k[0, :, 0].double().T) / math.sqrt(width) + c[:, None] - c
    right = (s + torch.full_like(s, -math.inf).triu(1)).softmax(-1) @ v[0, :, 0].double()
    slack = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype]
    close(o[0, :, 0].double(), right, slack)
    close(torch.cat(cached, 1)[0, :, 0].double(), right[-8:], slack)


@pytest.mark.parametrize("window", [None, 5])
def test_a_query_divided_by_its_length(window):
    """Scaled queries leave the output as it is on every path, whole, packed and cached; scaled keys do not."""
    options = {"window": window, "num_kv_heads": 2, "q_norm": "length"}
    mixer, x = mixer_of("softmax", options), draw(1, 33, D)
    packed = Sequences(cu_seqlens=packing([5, 28]))

    def outputs() -> list[torch.Tensor]:
        _, state = mixer(x[:, :32], Sequences(), {})
        cached, _ = mixer(x[:, 32:], Sequences(past=torch.tensor([32])), state)
        return [mixer(x, Sequences())[0], mixer(x, packed)[0], cached]

    with torch.no_grad():
        before = outputs()
        close(before[0], softmax_reference(mixer, x, window, unit=True), 1e-5)  # angles are fp32
        close(before[2], before[0][:, 32:])
        mixer.q_proj.weight *= 3
        mixer.q_proj.bias *= 3
        for a, b in zip(before, outputs(), strict=True):
            close(a, b, 1e-5)  # the epsilon of ‖q‖
        mixer.k_proj.weight *= 3
        assert all((a - b).abs().max() > 0.1 for a, b in zip(before, outputs(), strict=True))


def test_angles_of_llama_3_are_those_of_transformers():
    theta = {"rope_theta": 500.0}
    mixer = build("softmax", theta | {"rope_scaling": LLAMA3}).model.layers[0].mixer
    llama = LlamaConfig(num_attention_heads=H, hidden_size=D, rope_parameters=LLAMA3 | theta)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](llama)
    slower = 500.0 ** (-torch.arange(0, K, 2) / K) / frequencies
    assert {1.0, 8.0} < {*slower.tolist()}  # and between them
    x = draw(1, 40, D).float()
    q = mixer.inputs(x, Sequences(), None)[0].q[0].transpose(0, 1)
    close(q, turned(projected(mixer, x)[0][0], torch.arange(40), frequencies), 1e-5)


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("scores", ["softmax", "relu"])
def test_diag(scores, block):
    placement = "outside" if scores == "relu" and block == 7 else "inside"
    mixer = mixer_of(
        "diag_attention", {"block_size": block, "scores": scores, "norm_eps_placement": placement}
    )
    for T in (1, 63, 64, 65, 130):
        x = draw(2, T, D)
        weights = diag_weights(mixer, x, block, scores)
        o = joined_heads(weights @ projected(mixer, x)[2])
        close(
            mixer(x, Sequences())[0],
            mixer.o_proj(o if scores == "softmax" else normed(o, placement)),
        )
        ours, i = mixer.weights(x), torch.arange(T)
        close(ours, weights)
        outside = (i[:, None] < i) | (i[:, None] // block != i // block)
        assert (ours[..., outside] == 0).all()  # exactly


def test_local_score_of_a_block():
    """The share of a row's last r scores rises with r, to 1 at the block."""
    weights = mixer_of("diag_attention", {"block_size": 16}).weights(draw(2, 40, D))
    distance = torch.arange(40)[:, None] - torch.arange(40)
    score = torch.stack(
        [(weights * ((distance >= 0) & (distance < r))).sum(-1) for r in range(1, 41)]
    )
    assert (score.diff(dim=0) >= 0).all()
    close(score[15:], torch.ones_like(score[15:]))
    assert score[0].min() < 0.9


@pytest.mark.parametrize("placement", ["inside", "outside"])
@pytest.mark.parametrize("feature_map", [None, "elu", "relu"])
@pytest.mark.parametrize("positions", ["lrpe", "none"])
def test_norm_attention(feature_map, placement, positions):
    mixer = mixer_of(
        "norm_attention",
        {"norm_eps_placement": placement, "positions": positions},
        feature_map=feature_map,
    )
    phi = {None: lambda x: 1 + F.elu(x), "elu": F.elu, "relu": F.relu}[feature_map]
    for T in (1, 65, 130):
        x = draw(2, T, D)
        q, k, v = projected(mixer, x)
        q, k = (placed(mixer, phi(y), torch.arange(T)) for y in (q, k))
        o = normed(joined_heads((q @ k.mT).tril() @ v), placement)
        close(mixer(x, Sequences())[0], mixer.o_proj(o))


# The norm and its gradient


@pytest.mark.parametrize("both", [False, True])
def test_norm_bounds_the_gradient_of_every_score(both):
    """|∂L/∂s| ≤ c₁c₂/√ε for ‖∂L/∂o‖ ≤ c₁ and ‖v‖ ≤ c₂, if ε is inside the root."""
    T, eps = 24, 1e-4
    v, upstream = draw(T, D), draw(T, D, seed=1)
    bound = upstream.norm(dim=-1).max() * v.norm(dim=-1).max() / eps**0.5
    readouts = {
        "inside": lambda s: SimpleRMSNorm(eps)(s @ v),
        "outside": lambda s: SimpleRMSNorm(eps, "outside")(s @ v),
        "denominator": lambda s: s / s.sum(-1, keepdim=True) @ v,
    }
    largest = dict.fromkeys(readouts, 0.0)
    for size, (name, read) in itertools.product((1e-12, 1e-6, 1e-3, 1.0, 1e3), readouts.items()):
        s = size * draw(T, T, seed=2).abs()
        s = (s if both else s.tril()).requires_grad_()
        (ds,) = torch.autograd.grad((read(s) * upstream).sum(), s)
        largest[name] = max(largest[name], float(ds.abs().max()))
    assert 0.01 * bound < largest["inside"] <= bound
    assert largest["outside"] > 100 * bound
    assert largest["denominator"] > 100 * bound


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_norm_at_zero(placement):
    x = torch.zeros(2, D, dtype=torch.float64, requires_grad=True)
    SimpleRMSNorm(1e-6, placement)(x).sum().backward()
    assert x.grad.isfinite().all()
    y = draw(3, D).requires_grad_()
    assert torch.autograd.gradcheck(SimpleRMSNorm(1e-6, placement), y)
    assert not list(SimpleRMSNorm(1e-6).parameters())


# Positions


def lrpe() -> LRPE:
    module = LRPE(K)
    for name, value in module.initial().items():
        getattr(module, name).data.copy_(value)
    return module.double()


def test_lrpe_is_an_isometry_and_relative():
    module, q, k = lrpe(), draw(1, 1, H, K), draw(1, 1, H, K, seed=1)
    close(module.u.norm(), torch.ones(()).double(), 1e-7)
    close(module.theta, 10000.0 ** (-torch.arange(0, K, 2).double() / K), 1e-7)
    T = 20
    places = torch.arange(T)[None]
    q, k = (module(x.expand(1, T, H, K), places) for x in (q, k))
    close(q.norm(dim=-1), q[:, :1].norm(dim=-1).expand(1, T, H), 1e-6)
    scores = torch.einsum(
        "bihk,bjhk->hij", q, k
    )  # one q and one k everywhere: constant along diagonals
    for distance in range(-T + 1, T):
        diagonal = scores.diagonal(distance, 1, 2)
        close(diagonal, diagonal[:, :1].expand_as(diagonal))
    assert scores[:, 0].std(-1).min() > 1e-2
    mirrored = module(module.u.expand(1, 1, 1, K), places[:, :1])
    close(mirrored.flatten(), -module.u, 1e-6)
    assert not torch.equal(lrpe().u, lrpe().u)  # drawn for each layer


def test_positions_restart_with_blocks_and_documents():
    mixer = mixer_of("diag_attention", {"block_size": 4})
    x = draw(1, 4, D)
    close(mixer(x.repeat(1, 3, 1), Sequences())[0], mixer(x, Sequences())[0].repeat(1, 3, 1))
    q = mixer.inputs(x.repeat(1, 3, 1), Sequences(), None)[0].q
    assert torch.equal(q[:, :4], q[:, 4:8])
    mixer = mixer_of("norm_attention")
    packed = mixer(x.repeat(1, 3, 1), Sequences(packing([4, 4, 4])))[0]
    close(packed, mixer(x, Sequences())[0].repeat(1, 3, 1))


# Packing and caches

CASES = {
    "softmax": ("softmax", {}),
    "gqa": ("softmax", {"num_kv_heads": 2}),
    "window": ("softmax", {"window": 5, "num_kv_heads": 2}),
    "forgetting": ("forgetting", {"num_kv_heads": 2}),
    "forgetting_window": ("forgetting", {"window": 5}),
    "diag": ("diag_attention", {"block_size": 5}),
    "relu": ("diag_attention", {"block_size": 5, "scores": "relu"}),
    "norm": ("norm_attention", {}),
}
case = pytest.mark.parametrize("case", CASES)


@case
def test_packed_is_separate(case):
    mixer, lengths = mixer_of(*CASES[case]), [0, 1, 2, 0, 31, 5, 16, 3, 17, 0]
    x = draw(1, sum(lengths), D).requires_grad_()
    out = mixer(x, Sequences(packing(lengths)))[0]
    alone = torch.cat(
        [mixer(part, Sequences())[0] for part in x.split([n for n in lengths if n], 1)], 1
    )
    close(out, alone)
    grads = [torch.autograd.grad((y * draw(*y.shape, seed=3)).sum(), x)[0] for y in (out, alone)]
    close(*grads)


@case
def test_rows_read_in_pieces_of_any_length(case):
    """Rows with different lengths, with no token in a piece, or with no token yet."""
    mixer = mixer_of(*CASES[case])
    pieces = torch.tensor(
        [[3, 0, 2], [4, 0, 1], [0, 0, 9], [6, 3, 0], [1, 1, 1], [2, 7, 1], [1, 1, 1]]
    )
    total = pieces.sum(0)
    texts = [draw(1, int(n), D, seed=i) for i, n in enumerate(total)]
    whole = [mixer(text, Sequences())[0] for text in texts]
    out, state, past = [[] for _ in texts], {}, None
    for lengths in pieces:
        read = torch.zeros_like(total) if past is None else past
        rows = [text[:, p : p + n] for text, p, n in zip(texts, read, lengths, strict=True)]
        if (lengths == 1).all():  # decoding: dense
            y, state = mixer(torch.cat(rows), Sequences(None, past), state)
            parts = y.split(1)
        else:
            y, state = mixer(torch.cat(rows, 1), Sequences(packing(lengths), past), state)
            parts = y.split(lengths.tolist(), 1)
        past = read + lengths
        for row, part in zip(out, parts, strict=True):
            row.append(part)
        spec = mixer.state_spec(int(past.max()))
        assert {name: t.shape[1:] for name, t in state.items()} == {
            n: shape for n, (shape, _) in spec.items()
        }
        assert all(len(t) == 3 for t in state.values())
    for parts, expected in zip(out, whole, strict=True):
        close(torch.cat(parts, 1), expected)
    # The state does not depend on how it was filled; its rows before a text's first token are zeros.
    for i, text in enumerate(texts):
        alone = mixer(text, Sequences(), {})[1]
        for name, t in state.items():
            filled = t.shape[1] if name == "recurrent" else alone[name].shape[1]
            close(t[i, t.shape[1] - filled :], alone[name][0])
            assert not t[i, : t.shape[1] - filled].any()


@case
@pytest.mark.parametrize("pieces", [[1] * 13, [6, 1, 5, 1]], ids=str)
def test_dense_pieces(case, pieces):
    mixer, x, state, out = mixer_of(*CASES[case]), draw(2, 13, D), {}, []
    for piece in x.split(pieces, 1):
        read = sum(y.shape[1] for y in out)
        y, state = mixer(piece, Sequences(past=torch.tensor([read, read]) if read else None), state)
        out.append(y)
    close(torch.cat(out, 1), mixer(x, Sequences())[0])


@pytest.mark.parametrize("case", ["softmax", "window", "diag"])
def test_nothing_attends_to_nothing(case):
    """Every query sees a key, even padding: some backends return NaN for a softmax over nothing."""
    places = torch.tensor([[-7, -6, -5, -4], [-2, -1, 0, 1]])
    seen = mixer_of(*CASES[case]).visible(places, places[:, 1:])
    assert seen.any(-1).all()
    assert not seen[1, 1:, :2].any()  # and no token attends to padding


@case
def test_gradients_through_a_past(case):
    """Gradients stay finite also where sequences are empty, and padding could see nothing."""
    mixer, x = mixer_of(*CASES[case]), draw(1, 9, D).requires_grad_()
    state = mixer(x, Sequences(packing([0, 7, 2])), {})[1]
    past = torch.tensor([0, 7, 2])
    y, _ = mixer(x, Sequences(packing([0, 1, 8]), past), state)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isfinite().all()
    assert (dx != 0).all()


@case
def test_a_call_without_tokens(case):
    mixer, none = mixer_of(*CASES[case]), Sequences(packing([0, 0]))
    assert mixer(draw(1, 0, D), none)[0].shape == (1, 0, D)
    state = mixer(draw(1, 0, D), none, {})[1]
    x, past = draw(1, 5, D), torch.tensor([0, 0])
    y, _ = mixer(x, Sequences(packing([5, 0]), past), state)
    close(y, mixer(x, Sequences())[0])


def test_last():
    x = torch.arange(1.0, 7).view(1, 3, 2)
    assert torch.equal(last(x, 2), x[:, 1:])
    assert last(x, 2).untyped_storage().nbytes() == 4 * 4  # not that of the whole text
    assert torch.equal(last(x, 4), torch.cat([torch.zeros(1, 1, 2), x], 1))
    assert torch.equal(last(x, 3), x)


def test_groups_pad_little():
    lengths = [5, 0, 1, 8, 9, 16, 6]
    groups, where = Sequences(packing(lengths)).groups(torch.device("cpu"))
    assert [tuple(rows.shape) for rows, _ in groups] == [(1, 1), (3, 8), (2, 16)]
    assert torch.equal(torch.cat([rows.flatten() for rows, _ in groups])[where], torch.arange(45))
    assert [real.sum(1).tolist() for _, real in groups] == [[1], [5, 8, 6], [9, 16]]


@pytest.mark.parametrize(
    "case",
    [
        ("softmax", {}),
        ("softmax", {"window": 16}),
        ("diag_attention", {"block_size": 16, "scores": "softmax"}),
        ("forgetting", {}),
    ],
)
def test_flops_are_those_of_what_is_seen(case):
    """FLOPs count two products for each visible pair of tokens, up to half a token. Torch computes whole
    squares: at most twice as many, or four times with a window."""
    mixer, T = mixer_of(*case).float(), 128
    linear = sum(2 * m.weight.numel() for m in mixer.modules() if isinstance(m, torch.nn.Linear))
    x = torch.randn(1, T, D)
    with torch.no_grad():
        pairs = (mixer.weights(x)[0, 0] > 0).sum().item()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            mixer(x, Sequences())
    assert abs(pairs / T - mixer.seen(T)) <= 0.5
    assert mixer.flops(T) == 2 * mixer.num_heads * sum(mixer.widths()) * mixer.seen(T)
    done = counter.get_total_flops() / T - linear
    assert 1 < done / mixer.flops(T) <= (4 if "window" in case[1] else 2)


@pytest.mark.parametrize("mixer", ["softmax", "forgetting", "diag_attention"])
def test_an_encoder_sees_twice_as_much(mixer):
    """At once, or in two passes."""

    def grown(**options):
        directions = 2 if options and mixer == "forgetting" else 1
        config = NalandaConfig(mixer=mixer, directions=directions, **options)
        return config.flops_per_token(128) - config.flops_per_token(64)

    seen = 0 if mixer == "diag_attention" else 2 * grown()
    assert grown(is_decoder=False) == pytest.approx(seen)


# Whole models

T1 = {
    "diag_attention": {"scores": "relu", "norm_eps_placement": "outside"},
    "norm_attention": {"norm_eps_placement": "outside"},
}
T2 = {"diag_attention": {"scores": "softmax"}, "norm_attention": {}}


def transnormer(options, layers=6, **more) -> dict:
    half = layers // 2
    return {
        "mixer": ["diag_attention"] * half + ["norm_attention"] * half,
        "mixer_options": options,
        "feature_map": "elu" if options is T1 else "elu1",
        "num_hidden_layers": layers,
        "position_embedding": "sinusoidal",
        "scale_embeddings": True,
        "use_bias": True,
        "tie_word_embeddings": True,
        "initializer": "xavier",
        **more,
    }


def small_transnormer(options, **more) -> NalandaForCausalLM:
    options = {**options, "diag_attention": {**options["diag_attention"], "block_size": 4}}
    keys = {**transnormer(options, 2), **more}
    return build(keys.pop("mixer"), keys.pop("mixer_options"), **keys)


@pytest.mark.parametrize("options", [T1, T2], ids=["T1", "T2"])
def test_published_parameter_count(options):
    """WikiText-103: 155.99 M (table 2 of the paper)."""
    config = NalandaConfig(
        vocab_size=267744,
        hidden_size=512,
        num_heads=8,
        intermediate_size=1365,
        dropout=0.1,
        max_position_embeddings=512,
        **transnormer(options),
    )
    with torch.device("meta"):
        model = NalandaForCausalLM(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 155.99
    assert config.flops_per_token(512) > 0


MODELS = {
    "T1": lambda **more: small_transnormer(T1, **more),
    "T2": lambda **more: small_transnormer(T2, **more),
    "softmax": lambda **more: build("softmax", {"num_kv_heads": 2}, **more),
    "window": lambda **more: build("softmax", {"window": 5}, **more),
}
whole_model = pytest.mark.parametrize("name", MODELS)


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@whole_model
@torch.no_grad()
def test_cached_pieces_of_padded_rows(name):
    model, lengths, T = MODELS[name]().double(), [3, 9, 22], 22
    rows = [ids(1, n, seed=n) for n in lengths]
    tokens = torch.cat([F.pad(r, (T - r.shape[1], 0)) for r in rows])
    mask = torch.cat([F.pad(torch.ones_like(r), (T - r.shape[1], 0)) for r in rows])
    for pieces in ([22], [7, 13, 1, 1], [5, 8, 7, 2]):
        cache, out, end = NalandaCache(2), [], 0
        for piece in tokens.split(pieces, 1):
            end += piece.shape[1]
            out.append(model(piece, attention_mask=mask[:, :end], past_key_values=cache).logits)
        out = torch.cat(out, 1)
        for i, row in enumerate(rows):
            close(out[i, T - lengths[i] :], model(row, use_cache=False).logits[0])


@pytest.mark.sampled
@whole_model
@torch.no_grad()
def test_half_precision(name, tmp_path):
    full, tokens = MODELS[name](), ids(2, 30)
    expected = full(tokens).logits
    full.save_pretrained(tmp_path)
    cast = MODELS[name]().bfloat16()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").eval()
    for model in (cast, loaded):
        modules = {n: m for n, m in model.named_modules() if isinstance(m, LRPE)}
        assert bool(modules) == name.startswith("T")
        for n, m in modules.items():
            assert m.theta.dtype == m.u.dtype == torch.float32
            assert torch.equal(m.u, full.get_submodule(n).u)
            assert torch.equal(m.theta, full.get_submodule(n).theta)
        cache = NalandaCache(2)
        first = model(tokens[:, :28], past_key_values=cache).logits
        out = torch.cat(
            [first, *(model(t, past_key_values=cache).logits for t in tokens[:, 28:].split(1, 1))],
            1,
        )
        assert out.dtype == torch.bfloat16
        assert (out.float() - expected).norm() < 0.05 * expected.norm()
        spec = [layer.mixer.state_spec(30) for layer in model.model.layers]
        for state, promised in zip(cache.states, spec, strict=True):
            carried = {n: (tuple(t.shape[1:]), t.dtype) for n, t in state.items()}
            assert carried == {
                n: (shape, own or torch.bfloat16) for n, (shape, own) in promised.items()
            }
    with torch.autocast("cpu", torch.bfloat16):
        assert (full(tokens).logits.float() - expected).norm() < 0.05 * expected.norm()
    assert model.half()(tokens).logits.isfinite().all()


def test_norm_attention_stands_long_sums_in_fp16():
    """Sums of 4096 positive terms exceed fp16's range before the norm."""
    mixer = mixer_of("norm_attention", {"positions": "none"}).half()
    x = 6 * draw(1, 1, D).half().expand(1, 4096, D)
    assert mixer(x, Sequences())[0].isfinite().all()


def test_theta_learns_and_does_not_decay():
    model = small_transnormer(T2).train()
    model(ids(2, 20), labels=ids(2, 20)).loss.backward()
    for layer in model.model.layers:
        theta = layer.mixer.lrpe.theta
        assert theta.grad.isfinite().all()
        assert theta.grad.abs().max() > 0


def test_xavier_gain():
    model = small_transnormer(T2, hidden_size=128)
    diag, norm = (layer.mixer for layer in model.model.layers)
    limit = (6 / 256) ** 0.5
    for mixer, gain in ((diag, 1.0), (norm, 2**-0.5)):
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
            assert 0.98 * gain * limit < p.weight.abs().max() <= gain * limit
        assert 0.98 * limit < mixer.o_proj.weight.abs().max() <= limit


@pytest.mark.parametrize(
    ("mixer", "options", "says"),
    [
        ("softmax", {"num_kv_heads": 3}, "must divide num_heads=4"),
        ("softmax", {"num_kv_heads": 0}, "must divide num_heads=4"),
        ("softmax", {"window": 0}, "at least 1"),
        ("softmax", {"rope_theta": 0}, "positive"),
        ("softmax", {"windows": 4}, "windows"),
        ("softmax", {"q_norm": "l2"}, "q_norm='l2' must be length and without"),
        (
            "softmax",
            {"q_norm": "length", "qk_norm": True},
            "q_norm='length' must be length and without qk_norm",
        ),
        *(
            ("softmax", {"rope_scaling": LLAMA3 | wrong}, f"softmax: rope_scaling.*{says}")
            for wrong, says in (
                ({"rope_type": "yarn"}, "must have rope_type: llama3"),
                ({"beta_fast": 32.0}, "the numbers factor, low_freq_factor"),
                ({"factor": 0}, "factor=0 must be a positive number"),
                ({"factor": "8"}, "factor='8' must be a positive number"),
                ({"low_freq_factor": 4.0}, "must be below its high_freq_factor"),
            )
        ),
        ("softmax", {"rope_scaling": LLAMA3, "rope_theta": None}, "needs a rope_theta"),
        ("diag_attention", {"block_size": 0}, "from 1 to max_position_embeddings=128"),
        ("diag_attention", {"block_size": 129}, "must be from 1 to max_position"),
        ("diag_attention", {"scores": "gelu"}, "softmax, relu"),
        ("diag_attention", {"norm_eps_placement": "outside"}, "no norm"),
        ("diag_attention", {"positions": "rope"}, "lrpe, none"),
        ("norm_attention", {"positions": "rope"}, "lrpe, none"),
        ("norm_attention", {"norm_eps_placement": "between"}, "inside, outside"),
    ],
    ids=str,
)
def test_bad_options_are_refused(mixer, options, says):
    with pytest.raises(ValueError, match=says) as error:
        build(mixer, options, max_position_embeddings=128)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mixer", ["softmax", "diag_attention", "norm_attention"])
def test_odd_heads_are_refused(mixer):
    with pytest.raises(ValueError, match="even"):
        build(mixer, head_dim=7)
