"""The maps' formulas, written out once more in plain float64 and compared."""

import json
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from covering import covering, covering_cases

from nalanda.config.load import read_sections
from nalanda.config.model import recorded_model
from nalanda.model import FEATURE_MAPS, MIXERS, NalandaConfig, build_feature_map
from nalanda.model.feature_maps import opposite
from nalanda.model.mixers import build_mixer
from nalanda.model.options import defaults
from nalanda.testing import MAP_PROPERTIES, build_map, close, normal

K = 16
READINGS = [
    {"angle": angle, "power": power, "power_norm": norm, "direction_scale": scale}
    for angle in ("direction", "rms", 20.0, "raw", "relu_split")
    for power in (2.0, 3.0)
    for norm in ("raw", "rms")
    for scale in ("unit", "sqrt", "none")
]


def build(name: str, head_dim: int = K, **options):
    return build_map(name, head_dim=head_dim, **options)


def nala(options: dict):
    return build("nala", **options)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_maps_can_be_pickled(name):
    phi, x = build(name), torch.randn(1, 3, 2, K, dtype=torch.float64)
    for mine, copied in zip(phi(x, x), pickle.loads(pickle.dumps(phi))(x, x), strict=True):
        close(mine, copied, 0)


@pytest.mark.parametrize("options", READINGS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_nala_product(options):
    """φ_q·φ_k = Σ |b_i|^p |k_i|^λ cos(θ_q,i − θ_k,i), terms ≥ 0; without an angle, same signs only."""
    q, k = normal(3, 5, 2, K), normal(3, 5, 2, K, seed=1)
    phi_q, phi_k = nala(options)(q, k)
    assert phi_q.shape == phi_k.shape == (3, 5, 2, 2 * K)
    n, nk = ((x.square().sum(-1, keepdim=True) + 1e-6) ** 0.5 for x in (q, k))
    base = {"unit": q / n, "sqrt": math.sqrt(K) * q / n, "none": q}[options["direction_scale"]]
    p = options["power"] * (
        0.5 + torch.tanh(n / math.sqrt(K) if options["power_norm"] == "rms" else n)
    )
    weight = base.abs() ** p * k.abs() ** options["power"]
    if options["angle"] == "relu_split":
        factor = (q.sign() == k.sign()).double()
    else:
        argument = {
            "direction": lambda x, n: x / n,
            "rms": lambda x, n: math.sqrt(K) * x / n,
            20.0: lambda x, n: 20 * x / n,
            "raw": lambda x, n: x,
        }[options["angle"]]
        angle = [math.pi / 4 * torch.tanh(argument(x, n)) for x, n in ((q, n), (k, nk))]
        factor = torch.cos(angle[0] - angle[1])
    terms = weight * factor
    torch.testing.assert_close((phi_q * phi_k).sum(-1), terms.sum(-1), rtol=1e-12, atol=1e-12)
    assert (terms >= 0).all()
    torch.testing.assert_close(phi_q.square().sum(-1), (base.abs() ** (2 * p)).sum(-1))


@pytest.mark.parametrize("angle", ["direction", "rms", "raw"])
@pytest.mark.parametrize("key_power", [None, 1.0])
@pytest.mark.parametrize("signs", ["keep", "elu"])
def test_nalas_variants(signs, key_power, angle):
    """Signs behind the powers, sgn(x)|x|^p, or in their base, (1 + ELU(x))^p; a power of its own for k."""
    q, k = normal(3, 5, 2, K), normal(3, 5, 2, K, seed=1)
    plain = nala({"angle": angle})(q, k)
    features = nala({"angle": angle, "signs": signs, "key_power": key_power})
    n = (q.square().sum(-1, keepdim=True) + 1e-6) ** 0.5
    p = 2 * (0.5 + torch.tanh(n / math.sqrt(K)))
    r = 2 if key_power is None else key_power
    for phi, before, x, exponent, plain_exponent in zip(
        features(q, k), plain, (math.sqrt(K) * q / n, k), (p, r), (p, 2), strict=True
    ):
        base = torch.where(x > 0, 1 + x, x.exp()) if signs == "elu" else x.abs()
        raised = base**exponent * (x.sign() if signs == "keep" else 1)
        torch.testing.assert_close(
            phi, before * (raised / x.abs() ** plain_exponent).repeat(1, 1, 1, 2)
        )
    negative = (features(q, k)[0] * features(q, k)[1]).sum(-1) < 0
    assert features.nonnegative is not bool(negative.any())
    assert features.fused is None  # no kernel forms these
    assert ("sgn" in features.equation, "ELU" in features.equation) == (
        signs == "keep",
        signs == "elu",
    )


@pytest.mark.parametrize("angle", ["direction", "rms", "raw", "relu_split"])
def test_a_constant_exponent_of_q(angle):
    """Of queries whose length gives p(‖q‖) this value, the map is the same."""
    q, k = normal(3, 5, 2, K), normal(3, 5, 2, K, seed=1)
    constant = nala({"angle": angle, "query_power": 2.7})
    if angle != "raw":
        close(constant(q, k)[0], constant(3 * q, k)[0], 1e-5)  # the epsilon of the length
    n = (q.square().sum(-1, keepdim=True) + 1e-6) ** 0.5
    length = math.sqrt(K) * math.atanh(2.7 / 2 - 0.5)  # where p is 2.7
    d = length * q / n
    for ours, aware in zip(constant(d, k), nala({"angle": angle})(d, k), strict=True):
        torch.testing.assert_close(ours, aware, rtol=1e-5, atol=1e-5)
    assert constant.fused["query_power"] == 2.7
    assert "tanh(‖q‖" not in constant.equation
    assert "^2.7" in constant.equation


def test_the_angle_alone():
    """|x| ⊙ [cos θ; sin θ] for k, and for q at length √K."""
    q, k = normal(3, 5, 2, K), normal(3, 5, 2, K, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        angle = build("angle")
    for phi, x in zip(
        angle(q, k), (math.sqrt(K) * q / q.norm(dim=-1, keepdim=True), k), strict=True
    ):
        theta = math.pi / 4 * torch.tanh(math.sqrt(K) * x / x.norm(dim=-1, keepdim=True))
        expected = x.abs().repeat(1, 1, 1, 2) * torch.cat([theta.cos(), theta.sin()], -1)
        torch.testing.assert_close(phi, expected, rtol=1e-5, atol=1e-5)
    assert not {"^", "λ"} & {*angle.equation}


@pytest.mark.parametrize("angle", ["rms", "relu_split"])
def test_learnt_exponents(angle):
    q, k = normal(3, 5, 2, K), normal(3, 5, 2, K, seed=1)
    learnt, alone = build("nala_learned", angle=angle).double(), build("angle", angle=angle)
    for phi, start in zip(learnt(q, k), alone(q, k), strict=True):
        assert 0 < (phi - start).norm() < 0.03 * start.norm()  # softplus(−4) = 0.018
    with torch.no_grad():
        learnt.a.copy_(torch.tensor([0.5, 1.0]))
        learnt.b.copy_(torch.tensor([0.7, -9.0]))
    r = 1 + torch.log1p(torch.tensor([0.5, 1.0]).double().exp())[:, None]
    p = r + torch.tensor([0.7, -9.0])[:, None] * torch.tanh(
        q.norm(dim=-1, keepdim=True) / math.sqrt(K)
    )
    p = p.clamp(min=0.5)
    assert (p == 0.5).any()
    for phi, x, exponent in zip(learnt(q, k), (q, k), (p, r), strict=True):
        base = math.sqrt(K) * q / q.norm(dim=-1, keepdim=True) if x is q else k
        length = phi.unflatten(-1, (2, K)).norm(dim=-2)
        torch.testing.assert_close(length, base.abs() ** exponent, rtol=1e-5, atol=1e-5)


def test_shifted_silu_learns_its_shift():
    shifted, x = build("silu_shifted", shift=0.4).double(), normal(3, 5, 2, K)
    torch.testing.assert_close(shifted(x, x)[1], F.silu(x + 0.4), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        shifted.b.copy_(normal(2, K, seed=7))
    torch.testing.assert_close(shifted(x, x)[0], F.silu(x + shifted.b))
    assert bool((build("silu_shifted").b == 0.22).all())


@pytest.mark.parametrize(
    ("preset", "angle", "scale"),
    [
        ("nala_paper", "direction", "unit"),
        ("nala_released", "relu_split", "unit"),
        ("nala_code", 20.0, "none"),
    ],
)
def test_nala_presets_are_the_sources_readings(preset, angle, scale):
    q, k = normal(1, 3, 2, K), normal(1, 3, 2, K, seed=1)
    options = {"angle": angle, "power": 3.0, "power_norm": "raw", "direction_scale": scale}
    for ours, spelt in zip(build(preset)(q, k), nala(options)(q, k), strict=True):
        assert torch.equal(ours, spelt)


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_a_larger_alpha_keeps_signs_further_apart(head_dim):
    """Down to the split of signs, whose features of opposite signs share nothing."""
    x = normal(64, 1, 1, head_dim).abs()
    keys = -normal(64, 1, 1, head_dim, seed=1).abs()
    opposite_share = []
    for angle in ("direction", "rms", 20.0 * math.sqrt(head_dim), "relu_split"):
        phi_q, phi_k = build("nala", head_dim, num_heads=1, angle=angle)(x, keys)
        lengths = [phi.unflatten(-1, (2, head_dim)).norm(dim=-2) for phi in (phi_q, phi_k)]
        opposite_share.append(float((phi_q * phi_k).sum() / (lengths[0] * lengths[1]).sum()))
    assert opposite_share == sorted(opposite_share, reverse=True)
    assert opposite_share[0] > 0.8
    assert opposite_share[-1] == 0


SIZES = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2}


def first_layer(mixers: str | list[str], name: str, **options) -> str:
    """The layer as text, which is the same once its config was saved and read."""
    config = NalandaConfig(mixer=mixers, feature_map=name, **SIZES, **options)
    again = NalandaConfig.from_dict(config.to_dict())
    layer, read = (str(build_mixer(c.layer_mixers[0], c, 0)) for c in (config, again))
    assert layer == read
    return layer


def takes(mixer: str | list[str], name: str) -> bool:
    try:
        NalandaConfig(mixer=mixer, feature_map=name, **SIZES)
    except ValueError:
        return False
    return True


PAIRS = [(mixer, name) for mixer in MIXERS for name in FEATURE_MAPS if takes(mixer, name)]


def test_delta_rules_and_norm_attention_take_every_map():
    free = {
        "deltanet",
        "gated_deltanet",
        "kda",
        "gated_deltanet2",
        "delta_product",
        "norm_attention",
    }
    assert set(PAIRS) >= {(mixer, name) for mixer in free for name in FEATURE_MAPS}


SOME_PAIRS = covering_cases(PAIRS, strength=1, times=3)
"""Each mixer and each map three times."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mixer", "name"),
    [pytest.param(*pair, marks=() if pair in SOME_PAIRS else pytest.mark.slow) for pair in PAIRS],
)
def test_a_layers_equation_depends_on_its_own_name_and_options_alone(mixer, name):
    """Not on the other layers, nor on whether a default is written out."""
    alone = first_layer(mixer, name)
    assert f"(feature_map): {build(name, head_dim=16)}" in alone.replace(
        "landmarks=64", "landmarks=5"
    )
    written_out = defaults(FEATURE_MAPS[name])
    assert first_layer(mixer, name, feature_map_options=written_out) == alone
    for neighbour in ("gated_deltanet", "nala", "softmax"):
        if takes([mixer, neighbour], name):
            assert first_layer([mixer, neighbour], name) == alone


@pytest.mark.sampled
@covering(strength=1, times=2, before=FEATURE_MAPS, name=["nala", "nala_code", "angle", "silu"])
def test_another_name_begins_with_the_defaults_of_its_own_map(name, before, tmp_path):
    """Whether it is set on a config, on a saved one as it is loaded, or on the command line."""
    keys = {"mixer": "deltanet", "hidden_size": 32, "num_heads": 2, "num_hidden_layers": 1}
    expected = str(build(name))
    config = NalandaConfig(**keys, feature_map=before)
    config.save_pretrained(tmp_path)
    loaded = NalandaConfig.from_pretrained(tmp_path, feature_map=name)
    again = NalandaConfig.from_pretrained(tmp_path)
    for made in (config, again):
        made.feature_map = name
    for made in (config, loaded, again):
        assert str(build_mixer("deltanet", made, 0).feature_map) == expected

    model = recorded_model(
        keys | {"feature_map": before}, NalandaConfig(**keys, feature_map=before)
    )
    (tmp_path / "recipe.yaml").write_text(json.dumps({"model": model}))
    model = read_sections(tmp_path / "recipe.yaml", [f"model.feature_map={name}"])["model"]
    assert str(build_mixer("deltanet", NalandaConfig(**model), 0).feature_map) == expected


def test_a_config_keeps_the_options_that_its_maps_defaults_do_not_give():
    for name, options, kept in (
        ("silu", {"norm": None}, {"norm": None}),
        ("silu", {"norm": "l2"}, {"norm": "l2"}),
        ("pola", {"scale": True, "alpha": 4}, {}),
        (None, {"power": 3.0, "angle": "rms"}, {"power": 3.0}),  # NaLa's block chooses its own map
    ):
        config = NalandaConfig(
            mixer="norm_attention" if name else "nala",
            feature_map=name,
            feature_map_options=options,
        )
        assert config.feature_map_options == kept
    with pytest.raises(ValueError, match="scale=1 must be bool"):
        NalandaConfig(mixer="norm_attention", feature_map="pola", feature_map_options={"scale": 1})


@pytest.mark.parametrize(
    ("saved", "name", "options"),
    [
        ({"feature_map": "angle", "feature_map_options": {"power_norm": "rms"}}, "angle", {}),
        ({"feature_map": "angle", "feature_map_options": {"power": 3.0}}, "nala", {"power": 3.0}),
        ({"feature_map_options": {"power": None}, "mixer": "nala"}, "angle", {}),
        (
            {"feature_map": "nala_paper", "feature_map_options": {"power": None}},
            "nala_paper",
            {"query_power": 1.0, "key_power": 1.0},
        ),
    ],
)
def test_saved_maps_of_the_version_before_are_what_they_were(saved, name, options):
    config = NalandaConfig.from_dict({"mixer": "deltanet", "num_hidden_layers": 1} | saved)
    assert (config.feature_map, config.feature_map_options) == (name, options)


@pytest.mark.parametrize(
    "saved", [{"power": None}, {"power": None, "key_power": 3.0, "power_norm": "rms"}]
)
@pytest.mark.parametrize("name", ["nala", "angle"])
def test_a_saved_nala_without_exponents_is_the_angle(name, saved):
    config = NalandaConfig.from_dict(
        {"mixer": "deltanet", "feature_map": name, "feature_map_options": saved}
    )
    assert config.feature_map == "angle"
    kept = {option: value for option, value in saved.items() if option == "key_power"}
    assert config.feature_map_options == kept
    written = defaults(FEATURE_MAPS["angle"]) | kept
    assert json.loads(config.to_json_string())["feature_map_options"] == written


def test_nala_without_a_power_is_refused_by_its_name():
    for mixer in ("nala", "gated_deltanet"):
        with pytest.raises(ValueError, match="power null is the map angle: set feature_map: angle"):
            NalandaConfig(mixer=mixer, feature_map="nala", feature_map_options={"power": None})


def test_nala_entropy_falls_with_the_query_norm():
    """Entropy of the weights as one direction's query grows; under a homogeneous map it stays."""
    direction, k = normal(200, 1, 1, K), normal(200, 64, 1, K, seed=1)

    @torch.no_grad()
    def entropy(feature_map, scale):
        phi_q, phi_k = feature_map(scale * direction, k)
        w = (phi_q * phi_k).sum(-1).squeeze(-1)
        w = w / w.sum(-1, keepdim=True)
        return torch.special.entr(w).sum(-1).mean()

    norm_aware = build("nala", num_heads=1)
    falling = torch.stack([entropy(norm_aware, s) for s in (0.1, 0.3, 1.0, 3.0)])
    assert (falling.diff() < 0).all()
    for name in ("relu", "pola"):
        homogeneous = build(name, num_heads=1)
        assert entropy(homogeneous, 1.0) == pytest.approx(
            float(entropy(homogeneous, 3.0)), abs=1e-9
        )


PLAIN = {
    "identity": lambda x: x,
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(x)),
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "exp": torch.exp,
}


@pytest.mark.parametrize("norm", [None, "l2", "sum"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_maps(name, norm):
    if norm == "sum" and name in ("identity", "silu", "elu"):
        with pytest.raises(ValueError, match="use norm='l2'"):
            build(name, norm=norm)
        return
    feature_map = build(name, norm=norm)
    assert feature_map.feature_dim == K
    for x in (normal(3, 5, 2, K), normal(3, 5, 2, K, spread=1e-3)):  # the latter sees the epsilon
        y = PLAIN[name](x)
        if norm == "l2":
            y = y / (y.square().sum(-1, keepdim=True) + 1e-6) ** 0.5
        elif norm == "sum":
            y = y / (y.sum(-1, keepdim=True) + 1e-6)
        for phi in feature_map(x, x):
            torch.testing.assert_close(phi, y, rtol=1e-12, atol=1e-12)


def test_exp_is_finite_in_half_precision():
    x = torch.tensor([[[[9.0, 10.0, 11.0, 1e4]]]])
    phi, _ = build("exp", head_dim=4, num_heads=1)(x, x)
    torch.testing.assert_close(phi, x.clamp(max=10).exp())
    assert phi.half().isfinite().all()


@pytest.mark.sampled
@pytest.mark.parametrize("holds", MAP_PROPERTIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_property(name, holds):
    holds(partial(build, name))


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_products_are_negative_where_nothing_is_promised(name):
    phi_q, phi_k = build(name)(normal(1, 100, 2, K), normal(1, 100, 2, K, seed=1))
    smallest = torch.einsum("bthk,bshk->bhts", phi_q, phi_k).min()
    signed = ("identity", "silu", "silu_shifted", "elu", "soft", "softpp")
    assert build(name).nonnegative is (name not in signed)
    assert build(name).nonnegative or smallest < 0


@pytest.mark.parametrize(
    "name", ["nala", "nala_paper", "nala_released", "nala_code", "nala_learned", "angle", "pola"]
)
def test_powers_of_zero_are_zero(name):
    zero = torch.zeros(1, 4, 2, K)
    assert all((x == 0).all() for x in build(name)(zero, zero))


@pytest.mark.parametrize("scale", [True, False])
def test_pola(scale):
    """φ(x) = [relu(x̄)^p; relu(−x̄)^p], x̄ = x/softplus(s), p = 1 + α·σ(w), by head and feature."""
    feature_map = build("pola", alpha=5.0, scale=scale).double()
    with torch.no_grad():
        for parameter in feature_map.parameters():
            parameter.copy_(normal(2, K, seed=7))
    q, k = normal(3, 5, 2, K), normal(3, 5, 2, K, seed=1)
    p = 1 + 5 / (1 + torch.exp(-feature_map.w))
    divisor = torch.log(1 + torch.exp(feature_map.s)) if scale else 1.0
    phi_q, phi_k = feature_map(q, k)
    for x, phi in ((q / divisor, phi_q), (k / divisor, phi_k)):
        assert phi.shape[-1] == feature_map.feature_dim == 2 * K
        magnitude = x.abs() ** p
        torch.testing.assert_close(phi[..., :K], magnitude * (x > 0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(phi[..., K:], magnitude * (x < 0), rtol=1e-12, atol=1e-12)
    assert torch.equal(opposite(phi_q), torch.cat([phi_q[..., K:], phi_q[..., :K]], -1))


def test_pola_polarities():
    """At p = 1, q·k is the same-signed product less the opposite-signed one; both are sums of terms ≥ 0."""
    feature_map = build("pola", scale=False)
    torch.nn.init.constant_(feature_map.w, -200.0)
    q, k = normal(3, 5, 2, K), normal(3, 5, 2, K, seed=1)
    phi_q, phi_k = feature_map(q, k)
    assert (phi_q >= 0).all()
    assert (phi_k >= 0).all()
    same, other = ((x * phi_k).sum(-1) for x in (phi_q, opposite(phi_q)))
    # Bases below 1e-6 are 0 by definition of the power.
    torch.testing.assert_close(same - other, (q * k).sum(-1), rtol=1e-9, atol=1e-5)
    torch.testing.assert_close(same + other, (q * k).abs().sum(-1), rtol=1e-9, atol=1e-5)


def test_pola_starts_unscaled_in_the_middle_of_its_exponents():
    x = normal(1, 4, 2, K)
    for alpha in (3.0, 4.0):
        phi, _ = build("pola", alpha=alpha)(x, x)
        expected = torch.cat([x.relu(), (-x).relu()], -1) ** (1 + alpha / 2)
        torch.testing.assert_close(phi, expected, rtol=1e-5, atol=1e-6)


def test_polapp_by_its_formula():
    """Each query entry has its slope, keys have none; what exceeds 10 counts as 10."""
    feature_map = build("polapp").double()
    with torch.no_grad():
        feature_map.a.copy_(normal(2, 2 * K))
    q, k = normal(1, 4, 2, K).double(), normal(1, 4, 2, K).double()
    q[0, 0, 0, :2] = torch.tensor([12.0, -12.0])
    phi_q, phi_k = feature_map(q, k)
    s = 1 / (1 + (-feature_map.a.detach()).exp())
    for x, phi, slope in ((q, phi_q, s), (k, phi_k, torch.ones_like(s))):
        signs = torch.cat([x.clamp(0, 10), (-x).clamp(0, 10)], -1)
        torch.testing.assert_close(phi, (slope * signs).exp() - 1, rtol=1e-12, atol=1e-12)
    assert phi_q[0, 0, 0, 0].item() == pytest.approx(float((10 * s[0, 0]).exp() - 1))


def test_exponents_and_landmarks_stay_fp32():
    for name in ("pola", "polapp", "soft", "softpp", "nala_learned", "silu_shifted"):
        for parameter in build(name).bfloat16().parameters():
            assert parameter.dtype == torch.float32


def test_soft_starts_with_landmarks_apart():
    """Variance K^-½ a coordinate: two landmarks are √(2√K) apart, so that κ is about e^-1."""
    for head_dim in (16, 64):
        Z = build("softpp", head_dim=head_dim, landmarks=400).landmarks.detach()
        assert float(Z.var()) == pytest.approx(head_dim**-0.5, rel=0.05)
        assert abs(float(Z.mean())) < 0.02


@pytest.mark.parametrize("angle", ["rms", "relu_split"])
def test_slopes_of_exponents_below_1_are_bounded(angle):
    """x^½ has an infinite slope at 0; the power's floor keeps it at ½·(1e-6)^-½ = 500."""
    with pytest.warns(UserWarning, match="slopes"):
        feature_map = build("nala", angle=angle, power=1, direction_scale="unit")
    for size in (0.0, 1e-9, 1e-7, 2e-6, 1e-3):
        q = torch.full((1, 1, 2, K), size, requires_grad=True)
        phi_q, _ = feature_map(q, torch.zeros(1, 1, 2, K))
        phi_q.square().sum().backward()
        assert q.grad.isfinite().all()
        magnitude = phi_q[..., :K].max()
        assert magnitude == 0 or magnitude >= 1e-3 * 0.7  # √1e-6, times a cosine


def test_small_powers_warn():
    with pytest.warns(UserWarning, match="up to 500: set power to 2 or more"):
        build("nala", power=1)
    with pytest.warns(UserWarning, match="up to 500: set query_power to 1 or more"):
        build("nala", query_power=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("nala", power=2)
        build("nala", power=1, query_power=1, key_power=1)
        build("nala", power=1, signs="elu")  # whose base is above 0


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("softmax", {}, "choose one of"),
        ("nala", {"power": 0}, "positive"),
        ("nala", {"angle": "cosine"}, "direction, rms, raw"),
        ("nala", {"signs": "lost"}, "drop, keep, elu"),
        ("nala", {"signs": "keep", "angle": "relu_split"}, "take another angle"),
        ("nala", {"key_power": 0.0}, "key_power=0.0 must be positive"),
        ("nala", {"query_power": -1.0}, "query_power=-1.0 must be positive"),
        ("relu", {"norm": "l1"}, "l2, sum"),
        ("pola", {"alpha": 0}, "positive"),
        ("soft", {"landmarks": 0}, "must be"),
        ("soft", {"landmarks": 2.5}, "must be"),
        ("softpp", {"iterations": 0}, "must be"),
        ("softpp", {"ridge": -1}, "0 or more"),
        ("softpp", {"inverse": "qr"}, "cholesky, newton"),
    ],
)
def test_bad_options_are_refused(name, options, word):
    with pytest.raises(ValueError, match=word):
        build_feature_map(name, num_heads=1, head_dim=4, **options)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_misspelt_options_are_type_errors(name):
    with pytest.raises(TypeError, match="powr"):
        build_feature_map(name, num_heads=1, head_dim=4, powr=2)
