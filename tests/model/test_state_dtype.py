"""States in bfloat16, int8 and fp8: the error of a rounding, what a text loses, how many bytes it saves."""

import functools

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VARIANTS, build, covered_rows, ids, logits, rows

from nalanda import NalandaCache
from nalanda.model import MIXERS
from nalanda.model.precision import (
    LOSES,
    MEASURED,
    NO_MATRIX,
    STATE_DTYPES,
    pack_state,
    packed_spec,
    unpack_state,
)

ROUNDED = STATE_DTYPES[1:]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


PAIRS = {row.id: row.values[0] for row in rows() if row.id not in VARIANTS}
"""Each mixer with each map that it takes."""


def pair_of(options):
    return options["mixer"], options["feature_map"] or MIXERS[options["mixer"]].rule.map


def test_the_table_has_pairs_that_exist():
    measured = {(mixer, name) for mixer, names in MEASURED.items() for name in names}
    assert measured < set(map(pair_of, PAIRS.values()))
    assert measured > set().union(*LOSES.values())


def rounded(state, state_dtype):
    return unpack_state(pack_state(state, state_dtype))


@pytest.mark.parametrize(
    ("state_dtype", "bound"), [("bfloat16", 2**-8), ("int8", 1 / 3500), ("fp8", 1 / 390)]
)
@pytest.mark.parametrize("features", [16, 33])
def test_the_error_of_a_rounding(state_dtype, bound, features):
    """Of a channel's largest number: half a step of the code, then half a step of the residual."""
    torch.manual_seed(0)
    S = torch.randn(2, 3, features, 9) * torch.logspace(-4, 4, 9)  # channels of different sizes
    S[0, 1, :, 2] = 0
    error = (rounded({"recurrent": S}, state_dtype)["recurrent"] - S).abs()
    assert bool((error <= bound * S.abs().amax(-2, keepdim=True)).all())


@functools.cache
def delta_rule(state_dtype, feedback=True, steps=1000):
    """The state of a delta rule that forgets slowly, rounded after each token."""
    generator = torch.Generator().manual_seed(0)
    S = torch.zeros(1, 2, 32, 16)
    for _ in range(steps):
        k = F.normalize(torch.randn(1, 2, 32, 1, generator=generator), dim=-2)
        v = torch.randn(1, 2, 1, 16, generator=generator)
        S = 0.9999 * S
        S = S + 0.02 * k @ (v - k.mT @ S)
        packed = pack_state({"recurrent": S}, state_dtype)
        if not feedback and state_dtype != "float32":
            packed["recurrent_residual"].fill_(8 | 8 << 4)  # two zeros
        S = unpack_state(packed)["recurrent"]
    return S


@pytest.mark.slow
@pytest.mark.parametrize(("state_dtype", "limit"), [("int8", 0.02), ("fp8", 0.06)])
def test_a_rounding_that_comes_back_does_not_add_up(state_dtype, limit):
    exact = delta_rule("float32")
    naive, fed_back = (
        (delta_rule(state_dtype, feedback) - exact).norm() / exact.norm()
        for feedback in (False, True)
    )
    assert fed_back < naive / 8
    assert fed_back < limit


@pytest.mark.sampled
@pytest.mark.parametrize(("row", "state_dtype"), sorted(covered_rows(PAIRS, STATE_DTYPES)))
def test_a_cache_is_as_small_as_stated_and_decodes(row, state_dtype):
    """Every pair of a mixer, a map and a precision."""
    model = build(**PAIRS[row], dtype=torch.float32)
    pair = pair_of(PAIRS[row])
    if (
        state_dtype in LOSES
        and pair[0] not in NO_MATRIX
        and (pair[1] not in MEASURED.get(pair[0], ()) or pair in LOSES[state_dtype])
    ):
        with pytest.raises(
            ValueError, match=f"measured to hold for mixer '{pair[0]}'.*; take float32"
        ):
            model.generate(ids(2, 12), state_dtype=state_dtype, **GREEDY)
        return
    tokens = ids(2, 12)
    out = model.generate(
        tokens, state_dtype=state_dtype, return_dict_in_generate=True, output_logits=True, **GREEDY
    )
    cache = out.past_key_values
    for layer, state in zip(model.model.layers, cache.states, strict=True):
        spec = packed_spec(layer.mixer.state_spec(cache.seen_tokens), state_dtype)
        assert {name: (tuple(x.shape[1:]), x.dtype) for name, x in state.items()} == {
            name: (shape, dtype or model.dtype) for name, (shape, dtype) in spec.items()
        }
    if state_dtype == "float32":
        assert torch.equal(out.sequences, model.generate(tokens, **GREEDY))
    exact = logits(model, out.sequences)[:, 11:-1]
    limit = 0.05 if state_dtype != "float32" else 1e-4
    assert float((torch.stack(out.logits, 1) - exact).abs().max()) < limit * exact.abs().max()


def test_bytes_shrink():
    """A matrix of F × V: 4 bytes a number to 2, or 1.5 and a scale a channel."""
    model, tokens = (
        build(mixer="deltanet", head_dim=64, conv_size=0, dtype=torch.float32),
        ids(1, 9),
    )
    sizes = {}
    for state_dtype in STATE_DTYPES:
        cache = NalandaCache(2, state_dtype)
        logits(model, tokens, past_key_values=cache)
        sizes[state_dtype] = cache.nbytes
    assert sizes["bfloat16"] == sizes["float32"] / 2
    features = cache.states[0]["recurrent"].shape[-2]
    share = 1.5 / 4 + 1 / features
    assert sizes["int8"] == sizes["fp8"] == pytest.approx(sizes["float32"] * share)


@pytest.mark.parametrize("state_dtype", ROUNDED)
def test_beams_forks_and_drafts_keep_the_precision(state_dtype):
    small = build(mixer="gated_deltanet", feature_map="silu")
    tokens = ids(1, 9)
    for strategy in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        out = small.generate(
            tokens, state_dtype=state_dtype, return_dict_in_generate=True, **GREEDY, **strategy
        )
        assert out.past_key_values.state_dtype == state_dtype
    state = small.read(tokens, state_dtype=state_dtype)
    again = small.read(ids(1, 4), state=state)
    assert again.cache.state_dtype == state.cache.state_dtype == state_dtype
    wide = small.read(ids(1, 4), state=state, state_dtype="float32")
    assert wide.cache.states[0].keys() == small.read(tokens).cache.states[0].keys()
    assert state.cache.state_dtype == state_dtype  # a state never changes


def test_an_unknown_precision_is_refused(small):
    for call in (
        lambda: small.generate(ids(1, 9), state_dtype="int4"),
        lambda: small.read(ids(1, 9), state_dtype="int4"),
        lambda: small(ids(1, 9), past_key_values=NalandaCache(2, "int4")),
    ):
        with pytest.raises(ValueError, match="state_dtype 'int4' is unknown; choose one of"):
            call()


@pytest.mark.parametrize("state_dtype", ROUNDED)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixer": "deltanet", "mixer_options": {"norm_write": True}}, "norm_write=True"),
        (
            {"mixer": "deltanet", "mixer_options": {"qk_norm": "none", "norm_write": True}},
            "qk_norm='none', norm_write=True",
        ),
        (
            {
                "mixer": ["softmax", "delta_product"],
                "mixer_options": {"delta_product": {"num_householder": 3}},
            },
            "num_householder=3",
        ),
        (
            {"mixer": "deltanet", "feature_map": "relu", "feature_map_options": {"norm": "l2"}},
            "norm='l2'",
        ),
    ],
)
def test_options_that_were_not_measured_are_refused(options, says, state_dtype, tmp_path):
    model = build(**options, dtype=torch.float32)
    refusal = f"with its defaults, not with .*{says}; take float32"
    for call in (
        lambda: model.generate(ids(1, 9), state_dtype=state_dtype),
        lambda: model.read(ids(1, 9), state_dtype=state_dtype),
        lambda: model.read(ids(1, 9)).save(tmp_path / "state", state_dtype=state_dtype),
    ):
        with pytest.raises(ValueError, match=refusal):
            call()
    model.generate(ids(1, 9), state_dtype="float32", **GREEDY)


def test_options_that_round_nothing_are_served():
    for options in (
        {"mixer": "gated_deltanet", "mixer_options": {"num_v_heads": 4}},
        {"mixer": "kda", "mixer_options": {"gate_bias": False, "norm_write": False}},
        {"mixer": ["deltanet", "softmax"], "mixer_options": {"softmax": {"rope_theta": 1e4}}},
    ):
        model = build(**options, dtype=torch.float32)
        model.generate(ids(1, 9), state_dtype="int8", **GREEDY)


@pytest.mark.sampled
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_keeps_the_precision(tmp_path, state_dtype, dtype):
    model = build(mixer=["deltanet", "softmax"], dtype=dtype)
    state, file = model.read(ids(2, 9), state_dtype=state_dtype), tmp_path / "text.safetensors"
    state.save(file)
    loaded = model.load_state(file)
    assert loaded.cache.state_dtype == state_dtype
    for saved, held in zip(state.cache.states, loaded.cache.states, strict=True):
        assert saved.keys() == held.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, held[name])
            assert tensor.dtype == held[name].dtype
    assert torch.equal(
        model.generate(state=loaded, **GREEDY), model.generate(state=state, **GREEDY)
    )


@pytest.mark.parametrize("state_dtype", ROUNDED)
def test_a_file_may_be_smaller_than_the_state(tmp_path, state_dtype):
    model = build(mixer="deltanet", head_dim=64, conv_size=0, dtype=torch.float32)
    wide, file, exact = model.read(ids(1, 9)), tmp_path / "small", tmp_path / "exact"
    wide.save(file, state_dtype=state_dtype, title="a text")
    wide.save(exact)
    assert file.stat().st_size < 0.6 * exact.stat().st_size
    assert wide.cache.state_dtype == "float32"
    loaded = model.load_state(file)
    assert (loaded.cache.state_dtype, loaded.notes) == (state_dtype, {"title": "a text"})
    other = build(mixer="deltanet", head_dim=64, conv_size=0, dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    with pytest.raises(ValueError, match="other weights"):
        other.load_state(file)


def test_a_file_of_another_precision_than_it_names_is_refused(tmp_path, small):
    """The sum of a file shows damage, not a precision that this version does not know."""
    state, file = small.read(ids(1, 9), state_dtype="int8"), tmp_path / "text.safetensors"
    for name, problem in (
        ("int4", "'int4' is unknown"),
        ("fp8", "recurrent of layer 0 is missing"),
    ):
        state.cache.state_dtype = name
        state.save(file)
        with pytest.raises(ValueError, match=problem):
            small.load_state(file)
