"""The block attention kernels, against the masked quadratic form in float64."""

from kernel_device import DEVICE, INTERPRETED, interpreted_only  # isort: skip  (before any kernel)
import itertools
import math

import nalanda_kernels
import nalanda_kernels.triton.block_attention as module
import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels.triton.block_attention import block_attention, sizes
from torch._subclasses import FakeTensorMode
from torch.utils import deterministic

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model.sequences import Sequences

# Largest error relative to the largest entry of the same tensor.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LENGTHS = (1, 15, 63, 64, 65, 127, 200)
every_score = pytest.mark.parametrize("scores", ["softmax", "relu"])


def draw(batch, length, heads=1, k_dim=8, v_dim=6, dtype=torch.float32, seed=0):
    """q, k, v and o's gradient; q is large enough for the weights to differ."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (k_dim, k_dim, v_dim, v_dim)
    q, *rest = (torch.randn(batch, length, heads, n, generator=generator) for n in sizes)
    return [x.to(dtype) for x in (3 * q, *rest)]


def packing(*lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def reference(q, k, v, *, block_size, scores, scale=None, cu_seqlens=None):
    T = q.shape[1]
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    document = torch.arange(len(bounds) - 1).repeat_interleave(torch.tensor(bounds).diff())
    i = torch.arange(T)
    block = (i - torch.tensor(bounds)[document]) // block_size
    seen = (i[:, None] >= i) & (document[:, None] == document) & (block[:, None] == block)
    s = torch.einsum("bihk,bjhk->bhij", q, k) * (
        1 / math.sqrt(q.shape[3]) if scale is None else scale
    )
    if scores == "softmax":
        p = s.masked_fill(~seen, -math.inf).softmax(-1)
    else:
        p = F.relu(s) * seen
    return torch.einsum("bhij,bjhv->bihv", p, v)


def run(function, inputs, **options):
    """o and the gradients of q, k, v, by name, in float64."""
    q, k, v, d_o = inputs if function is reference else (x.to(DEVICE) for x in inputs)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = function(*leaves, **options)
    assert o.dtype == v.dtype
    assert o.shape == v.shape
    grads = torch.autograd.grad(o, leaves, d_o)
    assert [x.dtype for x in grads] == [v.dtype] * 3
    return {
        name: x.double().cpu() for name, x in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True)
    }


def assert_matches(inputs, function=block_attention, tolerance=0.0, **options):
    exact = run(reference, [x.double() for x in inputs], **options)
    ours = run(function, inputs, **options)
    for name, x in exact.items():
        if x.numel():
            error, size = (ours[name] - x).abs().max(), x.abs().max().clamp_min(1e-3)
            assert error <= max(tolerance, TOLERANCE[inputs[0].dtype]) * size, (
                f"{name}: {error / size:.1e}"
            )
    return ours


def dtype_for(block: int) -> torch.dtype:
    """The kernels have larger blocks in 16 bits only; on a Hopper card from 33 tokens on."""
    return torch.float32 if block <= (64 if INTERPRETED else 32) else torch.bfloat16


@pytest.mark.parametrize("length", LENGTHS)
@every_score
def test_lengths(scores, length):
    assert_matches(draw(1, length, dtype=dtype_for(64)), block_size=64, scores=scores)


@pytest.mark.sampled
@pytest.mark.parametrize("block", [1, 7, 16, 33, 64, 128])
@every_score
def test_blocks(scores, block):
    heads, batch = (1, 1) if block < 33 else (3, 2)
    assert_matches(draw(batch, 65, heads, dtype=dtype_for(block)), block_size=block, scores=scores)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("block", "lengths"),
    [
        (1, (0, 1, 33, 0, 0, 5)),
        (7, (5, 0, 30)),
        (16, (15, 1, 0, 63)),
        (64, (0, *LENGTHS[:-1], 0)),
        (128, (200, 3)),
        (64, (5,)),
    ],
)
@every_score
def test_packed(scores, block, lengths):
    options = {"block_size": block, "scores": scores, "cu_seqlens": packing(*lengths)}
    assert_matches(draw(1, sum(lengths), 1 + (block == 128), dtype=dtype_for(block)), **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@every_score
def test_precisions(scores, dtype):
    for block in (7, 64):
        if dtype == torch.float32:
            dtype = dtype_for(block)
        inputs = draw(1, 40, k_dim=32, v_dim=16, dtype=dtype)
        assert_matches(inputs, block_size=block, scores=scores, cu_seqlens=packing(30, 0, 10))


@pytest.mark.sampled
@pytest.mark.parametrize(("k_dim", "v_dim"), [(1, 1), (16, 40), (256, 130), (100, 256)])
@every_score
def test_features(scores, k_dim, v_dim):
    for block in (20, 100):  # wide heads are read in several tiles
        inputs = draw(1, 50, 1, k_dim, v_dim, dtype=dtype_for(block))
        assert_matches(inputs, block_size=block, scores=scores)


def test_a_program_has_as_many_whole_blocks_as_fit():
    for block in range(1, 129):
        tile = sizes(block, 64, 64, 2)
        assert tile["BT"] in (16, 32, 64, 128)
        assert tile["SPAN"] % block == 0
        assert tile["BT"] - block < tile["SPAN"] <= tile["BT"]


@pytest.mark.parametrize("scale", [0.0, -0.7, 2])
@every_score
def test_scale(scores, scale):
    assert_matches(draw(1, 40), block_size=16, scores=scores, scale=scale)


@every_score
def test_zero_rows(scores):
    inputs = draw(2, 40)
    for x in inputs:
        x[:, 10:30] = 0
    inputs[1][:, 35] = 0
    ours = assert_matches(inputs, block_size=16, scores=scores)
    assert all(x.isfinite().all() for x in ours.values())
    nothing = assert_matches([0 * x for x in inputs], block_size=16, scores=scores)
    assert not any(x.any() for x in nothing.values())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_large_scores(dtype):
    """Without subtracting a row's maximum, exp overflows in some rows and underflows in others."""
    q, k, v, d_o = draw(1, 40, dtype=dtype)
    q[..., 0], k[..., 0] = 20, torch.linspace(-90, 90, 40)[:, None]
    k[:, 20:23] = k[:, 20:21]  # ties for the maximum
    inputs, options = [q, k, v, d_o], {"block_size": 16, "scores": "softmax"}
    if (
        dtype == torch.float32
    ):  # in half precision dS times keys of 90 has no digits for a dQ near 0
        assert_matches(inputs, **options, tolerance=1e-4)
    ours = run(block_attention, inputs, **options)
    assert all(x.isfinite().all() for x in ours.values())


@pytest.mark.parametrize("packed", [False, True])
@every_score
def test_nothing_is_read_before_it_is_written(scores, packed):
    assert deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        assert torch.empty(1).isnan().all()
        cu_seqlens = packing(3, 0, 67, 60) if packed else None
        inputs = draw(1, 130, 2, dtype=dtype_for(48))
        ours = assert_matches(inputs, block_size=48, scores=scores, cu_seqlens=cu_seqlens)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in ours.values())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of NaN
@every_score
def test_a_sequence_does_not_see_the_other(scores):
    for batch, cu_seqlens in ((2, None), (1, packing(20, 20))):
        inputs = [x.reshape(batch, -1, *x.shape[2:]) for x in draw(2, 20)]
        for x in inputs:
            x.view(2, 20, *x.shape[2:])[0] = torch.nan
        ours = run(block_attention, inputs, block_size=7, scores=scores, cu_seqlens=cu_seqlens)
        for x in ours.values():
            x = x.view(2, 20, *x.shape[2:])
            assert x[1].isfinite().all()
        o = ours["o"].view(2, 20, *inputs[2].shape[2:])
        assert o[0].isnan().all()  # NaN must not be hidden


def test_views_and_expanded_gradients():
    q, k, v, d_o = draw(2, 20, 2)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert_matches([*views, d_o[:1, :1].expand(2, 20, 2, 6)], block_size=7, scores="softmax")


def test_no_tokens():
    assert_matches(draw(2, 0), block_size=7, scores="softmax")
    assert_matches(draw(1, 0), block_size=7, scores="relu", cu_seqlens=packing(0, 0))


def test_what_the_kernels_do_not_have():
    q, k, v, _ = draw(1, 20, 2)
    wide = torch.zeros(1, 20, 2, 257)
    for inputs, block, why in (
        ((q.double(), k.double(), v.double()), 16, "float64"),
        ((q, k, v.bfloat16()), 16, "bfloat16"),
        ((q, k, v), 129, "block_size=129"),
        ((q, k, v), 65, "block_size=65: at most 64 with float32"),
        ((wide, wide, v), 16, "K=257"),
        ((q, k, wide), 16, "V=257"),
        ((q, k, v[:, :, :1]), 16, "heads"),
    ):
        with pytest.raises(nalanda_kernels.Unsupported, match=why):
            block_attention(*inputs, block_size=block)


def test_what_hopper_cards_compile_wrongly(monkeypatch):
    monkeypatch.setattr(module, "architecture", lambda: "sm_90")
    with FakeTensorMode():
        inputs = torch.empty(3, 1, 20, 2, 8, device="cuda")
        with pytest.raises(nalanda_kernels.Unsupported, match="on sm_90"):
            block_attention(*inputs, block_size=33)


def test_bad_calls():
    q, k, v, _ = draw(1, 20)
    for options, why in (
        ({"block_size": 0}, "block_size=0"),
        ({"scores": "sigmoid"}, "scores='sigmoid'"),
        ({"cu_seqlens": torch.tensor([0, 19])}, "rise from 0 to the 20"),
        ({"cu_seqlens": torch.tensor([0, 12, 8, 20])}, "rise from 0 to the 20"),
    ):
        with pytest.raises(ValueError, match=why):
            block_attention(q, k, v, **{"block_size": 16, **options})
    with pytest.raises(ValueError, match="B = 2; flatten"):
        block_attention(
            *(x.view(2, 10, 1, -1) for x in (q, k, v)), block_size=4, cu_seqlens=packing(10)
        )
    with pytest.raises(ValueError, match=r"\[1, 20, 1, 8\], \[1, 19, 1, 8\]"):
        block_attention(q, k[:, 1:], v, block_size=4)


@pytest.mark.sampled
@pytest.mark.parametrize("packed", [False, True])
@every_score
def test_compiled_it_is_one_operator(scores, packed):
    ops = []

    def backend(graph, _):
        ops.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(q, k, v, cu_seqlens):
        return block_attention(q, k, v, block_size=7, scores=scores, cu_seqlens=cu_seqlens)

    cu_seqlens = packing(11, 0, 9) if packed else None
    options = {"block_size": 7, "scores": scores, "cu_seqlens": cu_seqlens}
    assert_matches(draw(1, 20), lambda q, k, v, **_: block_attention(q, k, v, **options), **options)
    assert_matches(draw(1, 20), lambda q, k, v, **_: compiled(q, k, v, cu_seqlens), **options)
    assert any("nalanda_kernels.block_attention" in name for name in ops)


@interpreted_only
def test_the_operators_say_what_they_do():
    q, k, v, _ = (x.requires_grad_() for x in draw(1, 5))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (q, k, v, packing(3, 2), 7, True, 0.3)
    torch.library.opcheck(torch.ops.nalanda_kernels.block_attention.default, args, test_utils=tests)


# The mixer that uses the kernel


@pytest.mark.sampled
@interpreted_only
@pytest.mark.parametrize("packed", [False, True])
@every_score
def test_the_mixer_takes_the_kernel(scores, packed, monkeypatch):
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
    config = NalandaConfig(
        mixer="diag_attention",
        mixer_options={"block_size": 16, "scores": scores},
        initializer_range=0.3,
        **sizes,
    )
    mixer = NalandaForCausalLM(config).model.layers[0].mixer
    x, d_y = torch.randn(2, 2 - packed, 20, 32)
    seq = Sequences(packing(3, 0, 17) if packed else None)
    calls = []

    def spy(*inputs, **options):
        calls.append(options)
        return block_attention(*inputs, **options)

    monkeypatch.setattr(module, "block_attention", spy)

    def results(state=None):
        leaf = x.clone().requires_grad_()
        y, carried = mixer(leaf, seq, state)
        return (
            y,
            *torch.autograd.grad(y, [leaf, *mixer.parameters()], d_y),
            *(carried or {}).values(),
        )

    expected = results(), results({})
    assert not calls  # the interpreter serves only calls that name it
    with nalanda_kernels.use_backend("triton"):
        ours = results(), results({})
        assert len(calls) == 2
    for a, b in zip(itertools.chain(*ours), itertools.chain(*expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))
