"""Where tokens see both ways: the properties of every mixer, and its matrix against the literal formula."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from covering import covering_cases
from tiny_models import build, close, encoder_rows, ids, logits

from nalanda.model import MIXERS
from nalanda.model.call import Inputs
from nalanda.model.layers import ShortConv
from nalanda.model.sequences import Sequences
from nalanda.testing import ENCODER_PROPERTIES

ROWS = {row.id: row.values[0] for row in encoder_rows()}


def own_map(row: str) -> bool:
    """Whether the row is a mixer with the map that it has by default."""
    mixer = ROWS[row].get("mixer")
    return row == f"{mixer}-{ROWS[row].get('feature_map')}" and (
        ROWS[row]["feature_map"] == MIXERS[mixer].rule.map
    )


def property_cases() -> list:
    """All properties of a mixer with its own map, and three of every other row."""
    cases = list(itertools.product(ROWS, ENCODER_PROPERTIES))
    chosen = covering_cases([case for case in cases if not own_map(case[0])], strength=1, times=3)
    return [
        pytest.param(ROWS[row], holds, id=f"{row}-{holds.__name__}")
        for row, holds in cases
        if own_map(row) or (row, holds) in chosen
    ]


def test_every_mixer_is_in_the_table():
    assert {ROWS[row]["mixer"] for row in ROWS if own_map(row)} == set(MIXERS)


@pytest.mark.sampled
@pytest.mark.parametrize(("options", "holds"), property_cases())
def test_property(options, holds):
    holds(build(**options))


IN_ORDER = {
    "linear_attention": {"conv_size": 4},  # a convolution
    "pola": {},  # a convolution of v
    "soft": {},  # landmarks are means of neighbours
    "softmax": {},  # rotary positions
    "norm_attention": {},  # LRPE
    "diag_attention": {"mixer_options": {"positions": "none", "block_size": 7}},  # blocks
    "deltanet": {},  # one pass each way
}
"""Encoders in which the order of tokens matters, each for another reason."""


@pytest.mark.parametrize(
    "options",
    [
        *({"mixer": "linear_attention", "feature_map": name} for name in ("elu1", "nala", "exp")),
        {"mixer": "nala"},
        *(
            {"mixer": "mala", "mixer_options": {"scale": scale}}
            for scale in ("code", "inverse_t", "literal")
        ),
        {"mixer": "softmax", "mixer_options": {"rope_theta": None, "num_kv_heads": 1}},
        {"mixer": "norm_attention", "mixer_options": {"positions": "none"}},
        {"mixer": "soft", "feature_map_options": {"window": 1, "inverse": "cholesky"}},
    ],
    ids=str,
)
def test_permuted_is_permuted(options):
    permuted_is_permuted(build(**options, is_decoder=False))


@pytest.mark.parametrize("mixer", IN_ORDER)
def test_order_matters(mixer):
    with pytest.raises(AssertionError, match="not close"):
        permuted_is_permuted(build(mixer, is_decoder=False, **IN_ORDER[mixer]))


def permuted_is_permuted(model) -> None:
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    tokens = ids(2, 37)
    close(logits(model, tokens[:, order]), logits(model, tokens)[:, order])


# The matrix that multiplies v


def mixed(name, T=37, **options):
    """One mixer, its inputs and their q and k `[B, H, T, ·]` after the map, and its `weights`."""
    mixer = build(name, is_decoder=False, num_hidden_layers=1, **options).model.layers[0].mixer
    x = torch.randn(2, T, 24, dtype=torch.float64)
    with torch.no_grad():
        inputs, _ = mixer.inputs(x, Sequences(bidirectional=True), None)
        q, k = inputs.q, inputs.k
        if mixer.rule.map is not None and name != "soft" and getattr(mixer, "lrpe", None) is None:
            q, k = mixer.feature_map(q, k)
    return mixer, inputs, q.transpose(1, 2), k.transpose(1, 2), mixer.weights(x)


def normalised(scores):
    return scores / (scores.sum(-1, keepdim=True) + 1e-6 * scores.shape[-1])


@pytest.mark.parametrize("name", ["elu1", "relu", "exp", "nala", "identity"])
def test_linear_attention(name):
    denominator = name != "identity"
    options = {"feature_map": name, "mixer_options": {"denominator": denominator}}
    _, _, q, k, weights = mixed("linear_attention", **options)
    scores = q @ k.mT
    close(weights, normalised(scores) if denominator else scores * q.shape[-1] ** -0.5)


def test_nala():
    _, _, q, k, weights = mixed("nala")
    close(weights, normalised(q @ k.mT))
    assert (weights >= 0).all()


@pytest.mark.parametrize("scale", ["code", "inverse_t", "literal"])
def test_mala(scale):
    """β s − γ with the mean of the whole sequence; the rows sum to 1, and some weights are negative."""
    mixer, _, q, k, weights = mixed("mala", mixer_options={"scale": scale})
    T = q.shape[2]
    s = q @ k.mT * {"code": mixer.K**-0.5 / T, "inverse_t": 1 / T, "literal": 1.0}[scale]
    z = s.sum(-1, keepdim=True)
    close(weights, (1 + 1 / z) * s - z / T, 1e-5)  # the epsilon of the denominator
    close(weights.sum(-1), torch.ones_like(weights.sum(-1)), 1e-5)
    assert (weights < 0).any()


def test_pola():
    mixer, inputs, _, _, weights = mixed("pola", feature_map_options={"scale": False})
    p = (1 + mixer.feature_map.alpha * mixer.feature_map.w.double().sigmoid())[:, None]
    q, k = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2)
    plus, minus = (
        [torch.where(y > 1e-6, y.clamp_min(1e-6) ** p, 0) for y in (s * q, s * k)] for s in (1, -1)
    )
    alike = plus[0] @ plus[1].mT + minus[0] @ minus[1].mT
    unlike = minus[0] @ plus[1].mT + plus[0] @ minus[1].mT
    close(weights, torch.stack([normalised(alike), normalised(unlike)], 2).flatten(1, 2))


def test_pola_recovers_negative_products():
    """Queries whose products with all keys are negative: a map that drops them sees nothing. Half of v is
    read through them, with weights that sum to 1."""
    mixer, inputs, _, _, _ = mixed("pola")
    ones = Inputs(-inputs.q.abs(), inputs.k.abs(), torch.ones_like(inputs.v))
    with torch.no_grad():
        o, _ = mixer.mix(ones, Sequences(bidirectional=True), None)
    alike, unlike = o.chunk(2, -1)
    close(alike, torch.zeros_like(alike))
    close(unlike, torch.ones_like(unlike), 1e-3)


@pytest.mark.parametrize("name", ["soft", "softpp"])
@pytest.mark.parametrize("T", [3, 30])
def test_soft(name, T):
    """Landmarks are means over 4 tokens: κ(x, Z) W κ(Z, x), symmetric, PSD, of rank at most ⌈T/4⌉."""
    options = {"inverse": "cholesky"}
    _, _, q, _, weights = mixed("soft", T, feature_map=name, feature_map_options=options)
    Z = torch.stack([x.mean(2) for x in q.split(4, 2)], 2)

    def kernel(a, b):
        squares = (a[..., :, None, :] - b[..., None, :, :]).square().sum(-1)
        return torch.exp(-squares / (2 * q.shape[-1] ** 0.5))

    A = kernel(Z, Z)
    W = torch.linalg.inv(A + 0.01 * torch.eye(Z.shape[2], dtype=A.dtype))
    if name == "softpp":
        W = W * (A.sum(-1, keepdim=True) * A.sum(-1)[..., None, :]) ** -0.5
    close(weights, kernel(q, Z) @ W @ kernel(Z, q))
    close(weights, weights.mT)
    eigenvalues = torch.linalg.eigvalsh(weights)  # rising
    assert (eigenvalues > -1e-12).all()
    assert (eigenvalues[..., : T - Z.shape[2]] < 1e-12).all()
    newton = mixed("soft", T, feature_map=name, feature_map_options={"iterations": 60})[-1]
    close(newton, weights, 1e-6)  # converged


def apart(T):
    t = torch.arange(T)
    return (t[:, None] - t).abs()


@pytest.mark.parametrize("T", [3, 37, 40])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_softmax(T, window):
    """With a window, the tokens less than `window` away on either side."""
    mixer, _, q, k, weights = mixed(
        "softmax", T, mixer_options={"window": window, "num_kv_heads": 1}
    )
    scores = q @ k.mT * mixer.K**-0.5
    expected = scores.masked_fill(apart(T) >= (window or T), -torch.inf).softmax(-1)
    close(weights, expected)


@pytest.mark.parametrize("T", [3, 37, 40])
@pytest.mark.parametrize("scores", ["softmax", "relu"])
def test_diag(T, scores):
    mixer, _, q, k, weights = mixed(
        "diag_attention", T, mixer_options={"block_size": 5, "scores": scores}
    )
    block = torch.arange(T) // 5
    apart, s = block[:, None] != block, q @ k.mT * mixer.K**-0.5
    close(
        weights,
        s.masked_fill(apart, -torch.inf).softmax(-1)
        if scores == "softmax"
        else s.relu().masked_fill(apart, 0),
    )


def test_norm_attention():
    _, _, q, k, weights = mixed("norm_attention")
    close(weights, q @ k.mT)


def test_one_pass_each_way_adds_up():
    """Retention: γ^|i−j| q·k on both sides, and twice q·k at the token itself."""
    _, inputs, q, k, weights = mixed("retention")
    decays = inputs.g[0, 0].exp()[:, None, None] ** apart(q.shape[2])
    close(weights, q @ k.mT * q.shape[-1] ** -0.5 * decays * (1 + torch.eye(q.shape[2])))


@pytest.mark.parametrize(
    "mixer", [name for name, x in MIXERS.items() if not x.rule.unmasked and x.rule.rotate == "none"]
)
def test_texts_may_be_read_from_either_end(mixer):
    """Where each pass has the gates of its own tokens."""
    model, tokens = build(mixer, is_decoder=False), ids(2, 37)
    close(logits(model, tokens.flip(1)), logits(model, tokens).flip(1))


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_convolutions_are_centred(width):
    """As `padding="same"`: of an even number of taps, the one more looks ahead."""
    conv, x = ShortConv(6, width).double(), torch.randn(2, 11, 6, dtype=torch.float64)
    torch.nn.init.normal_(conv.weight)
    close(
        conv(x, Sequences(bidirectional=True))[0],
        F.conv1d(x.mT, conv.weight, padding="same", groups=6).mT,
    )
