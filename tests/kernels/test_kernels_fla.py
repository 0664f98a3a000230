"""The ops on flash-linear-attention's kernels, against the float64 reference."""

from kernel_device import DEVICE, INTERPRETED  # isort: skip  (before any kernel)
import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels import Unsupported
from nalanda_kernels import fla as backend

from nalanda import ops
from nalanda.model.feature_maps import build_feature_map

pytest.importorskip("fla.ops")

K, V = 16, 16
# Relative to the largest entry of the same tensor. bf16 has 8 bits; compiled, fp32 means TF32.
TOLERANCE = {
    torch.bfloat16: 4e-2,
    torch.float16: 6e-3,
    torch.float32: 2e-5 if INTERPRETED else 4e-3,
}


def make(kind, length, *, batch=1, heads=1, value_heads=1, key_dim=K, sequences=None, initial=True):
    """Inputs of `delta_rule` or `linear_attention` in float64, k of unit length."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    channels = (key_dim,) if kind.startswith("vector") else ()
    inputs = {
        "q": normal(batch, length, heads, key_dim),
        "k": F.normalize(normal(batch, length, heads, key_dim), dim=-1),
        "v": normal(batch, length, value_heads, V),
        "beta": normal(batch, length, value_heads).sigmoid() if kind.endswith("delta") else None,
        "g": F.logsigmoid(normal(batch, length, value_heads, *channels) + 2)
        if "_" in kind
        else None,
        "erase": normal(batch, length, value_heads, key_dim).sigmoid() if "gates" in kind else None,
        "write": normal(batch, length, value_heads, V).sigmoid() if "gates" in kind else None,
        "initial_state": normal(sequences or batch, value_heads, key_dim, V) / 4
        if initial
        else None,
    }
    return {name: x.to(DEVICE) for name, x in inputs.items() if x is not None}


def call(inputs, **options):
    op = ops.delta_rule if "beta" in inputs else ops.linear_attention
    return op(**inputs, output_final_state=True, **options)


def run(inputs, dtype, **options):
    """Outputs, state and every gradient of a fixed combination of the two."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {n: x.detach().clone().to(dtype if n in "qkv" else wide) for n, x in inputs.items()}
    for x in leaves.values():
        x.requires_grad_()
    o, state = call(leaves, **options)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state)]
    weights = [x.to(DEVICE) for x in weights]
    ((o * weights[0]).sum() + (state * weights[1]).sum()).backward()
    return {"o": o, "state": state} | {f"d{name}": x.grad for name, x in leaves.items()}


def check(inputs, dtype=torch.bfloat16, **options):
    """Both sides get the same rounded inputs, so only the arithmetic differs."""
    inputs = {
        n: x.to(dtype).double() if n in "qkv" else x.float().double() for n, x in inputs.items()
    }
    expected = run(inputs, torch.float64, mode="reference", **options)
    found = run(inputs, dtype, backend="fla", **options)
    assert found["o"].dtype == dtype
    assert found["state"].dtype == torch.float32
    for name, x in expected.items():
        error = (found[name].double() - x).abs().max() / x.abs().max().clamp_min(1e-3)
        assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.fixture(autouse=True)
def no_fallback(recwarn):
    """Fails if torch served a call, because such a call tests nothing."""
    yield
    assert not [w for w in recwarn if "fla cannot serve" in str(w.message)]


SLOW = [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("vector_delta", "vector_gates_delta")
]
LINEAR = ("linear", "gated_linear", "vector_linear")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["delta", "gated_delta", *SLOW, *LINEAR])
def test_outputs_states_and_gradients(kind):
    check(make(kind, 66))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["delta", "gated_delta", *SLOW, *LINEAR])
def test_packed(kind):
    check(make(kind, 40, sequences=4), cu_seqlens=torch.tensor([0, 1, 20, 20, 40]))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["delta", "gated_delta", *SLOW, "gated_linear"])
def test_grouped_heads(kind):
    check(make(kind, 16, heads=2, value_heads=4))


@pytest.mark.parametrize("kind", SLOW)
def test_strong_decays_of_channels(kind):
    inputs = make(kind, 40)
    check(inputs | {"g": 20 * inputs["g"]})  # sums far below fp32's range of e^g


@pytest.mark.parametrize("kind", ["gated_delta", "linear"])
def test_fp16(kind):
    check(make(kind, 20, batch=2), torch.float16)


@pytest.mark.parametrize("kind", ["gated_linear", "vector_linear"])
def test_linear_attention_in_fp32(kind):
    check(make(kind, 20, key_dim=5), torch.float32)


@pytest.mark.parametrize("kind", ["gated_delta", "linear"])
def test_map_and_norm_are_those_of_the_op(kind):
    nala = build_feature_map("nala", num_heads=2, head_dim=8).to(DEVICE)
    inputs = make(kind, 20, heads=2, value_heads=2, key_dim=8, initial=False)
    check(inputs, feature_map=nala, qk_norm="l2", scale=0.7)


def test_its_own_norm_is_ours():
    inputs = make("delta", 20, initial=False)
    inputs["k"] = inputs["k"] * 1e-3  # an epsilon outside the root would show here
    check(inputs, qk_norm="l2")


def test_values_of_higher_precision_than_keys():
    inputs = {n: x.bfloat16() if n in "qk" else x.float() for n, x in make("linear", 40).items()}
    o, state = call(inputs, backend="fla")
    expected = call({n: x.double() for n, x in inputs.items()}, mode="reference")
    assert o.dtype == torch.float32
    for found, x in zip((o, state), expected, strict=True):
        assert (found - x).abs().max() < TOLERANCE[torch.float32] * x.abs().max()


def test_autocast_does_not_reach_inside():
    inputs = {n: x.float() for n, x in make("linear", 20).items()}
    turn = torch.randn(K, K, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def turned(q, k):
        return q @ turn, k @ turn

    expected = call(inputs, backend="fla", feature_map=turned)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = call(inputs, backend="fla", feature_map=turned)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_bad_bounds():
    inputs = {
        n: x.bfloat16() if n in "qkv" else x for n, x in make("delta", 20, sequences=1).items()
    }
    with pytest.raises(ValueError, match="does not rise from 0 to the 20 tokens"):
        call(inputs, backend="fla", cu_seqlens=torch.tensor([0, 19]))


def direct(kind, dtype, **options):
    """Calls the backend itself; the op would fall back to torch."""
    inputs = make(
        kind, 16, key_dim=options.pop("key_dim", K), initial=options.pop("initial", False)
    )
    inputs = {n: x.to(dtype) if n in "qkv" else x.float() for n, x in inputs.items()}
    op = backend.delta_rule if "beta" in inputs else backend.linear_attention
    return op(**inputs, **options)


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "reason"),
    [
        ("delta", torch.float32, {}, "float32 inputs: it computes in bfloat16, float16"),
        ("linear", torch.float64, {}, "float64 inputs"),
        ("gated_delta", torch.bfloat16, {"key_dim": 258}, "K = 258: at most 256 features"),
        (
            "linear",
            torch.bfloat16,
            {"key_dim": 15},
            "K = 15 and V = 16: in 16 bits both must be even",
        ),
        ("delta", torch.bfloat16, {"chunk_size": 8}, "chunk_size=8: at least 16"),
        ("delta", torch.bfloat16, {"allow_neg_eigval": True}, "β above 1: it keeps"),
        (
            "delta",
            torch.bfloat16,
            {"initial_state": torch.zeros(1, 1, 3, V, device=DEVICE)},
            "initial_state with K = 3",
        ),
    ],
)
def test_what_it_cannot_serve(kind, dtype, options, reason):
    with pytest.raises(Unsupported, match=reason):
        direct(kind, dtype, **options)


def test_refuses_the_compilers_that_are_wrong(monkeypatch):
    from fla.ops.common import chunk_o

    for name, value in (
        ("IS_NVIDIA_HOPPER", True),
        ("TRITON_ABOVE_3_4_0", True),
        ("TRITON_ABOVE_3_7_1", False),
    ):
        monkeypatch.setattr(chunk_o, name, value)
    with pytest.raises(Unsupported, match=r"take 3\.7\.1"):
        direct("gated_linear", torch.bfloat16)
    direct("vector_linear", torch.bfloat16)  # other kernels
    with torch.no_grad():
        direct("gated_linear", torch.bfloat16)
