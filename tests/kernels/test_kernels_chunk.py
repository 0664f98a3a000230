"""The chunkwise kernels against the float64 reference: outputs, states, all gradients."""

from kernel_device import DEVICE, INTERPRETED, interpreted_only  # isort: skip  (before any kernel)
import copy
import itertools

import nalanda_kernels
import op_inputs
import pytest
import torch
from nalanda_kernels.triton import common, recurrence
from op_inputs import RESETS, ROWS, call, cases, errors, make, run, with_resets

from nalanda import ops
from nalanda.model.feature_maps import build_feature_map
from nalanda.model.layers import at_least_fp32

pytestmark = pytest.mark.slow

CHANNELS = ["vector_delta", "vector_gdn2_delta", "vector_linear"]  # decays per key channel
KINDS = ["delta", "gated_delta", "linear", "gated_linear", *CHANNELS]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_decay = pytest.mark.parametrize("kind", ["gated_delta", "gated_linear", *CHANNELS])
# Largest error relative to the largest entry of the same tensor.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def hold(inputs, dtype=torch.float32, tolerance=None, **options):
    """Runs the kernels on buffers full of NaN, and `minimal.py` on the same rounded inputs in float64."""
    return op_inputs.hold(
        inputs, dtype, tolerance or TOLERANCE[dtype], function=on_device, **options
    )


def evaluate(inputs, mode, dtype, function, **options):
    """`run` without gradients: outputs and final state."""
    inputs = {
        name: x.to(torch.promote_types(dtype, torch.float32) if name == "initial_state" else dtype)
        for name, x in inputs.items()
        if x is not None
    }
    with torch.no_grad():
        o, state = function(**inputs, mode=mode, output_final_state=True, **options)
    return {"o": o, "state": state}


def on_device(feature_map=None, **inputs):
    """The kernels' result, moved to the CPU, where tests make and compare tensors."""
    there = {
        n: x.to(DEVICE) if isinstance(x, torch.Tensor) and n != "cu_seqlens" else x
        for n, x in inputs.items()
    }
    if isinstance(feature_map, torch.nn.Module):
        feature_map = feature_map.to(DEVICE)
    o, state = call(**there, feature_map=feature_map, backend="triton")
    return o.cpu(), state.cpu()


def one_head(length, kind, **sizes):
    return make(
        1, length, kind=kind, **{"heads": 1, "value_heads": 1, "k_dim": 12, "v_dim": 20} | sizes
    )


# Where chunks and blocks end. The other lengths are those of torch's chunks.
TABLE = (
    *("part_of_a_chunk", "whole_chunks", "one_more", "packed", "zero_rows", "resets"),
    *("strong_decays", "some_strong_decays", "every_7th_decay_is_strong"),
    *("identical_keys", "reflections"),
)


@pytest.mark.parametrize(
    ("row", "kind"), [*cases(TABLE, KINDS), *cases(["groups"]), *cases(["map_and_norm"], ["delta"])]
)
def test_the_table(row, kind):
    length = 17 if row == "groups" else 70
    inputs, options = ROWS[row].make(kind, length, heads=1, value_heads=1, k_dim=12, v_dim=20)
    hold(inputs, tolerance=ROWS[row].exact, **options)


@every_kind
def test_nothing_but_empty_sequences(kind):
    inputs = {n: x if x is None else x.float() for n, x in one_head(0, kind, sequences=3).items()}
    options = {"cu_seqlens": torch.zeros(4, dtype=torch.int64)}
    results = run(inputs, "chunk", torch.float32, function=on_device, **options)
    assert torch.equal(results["state"].float(), inputs["initial_state"])
    assert results["initial_state"].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_decay
def test_half_precision(kind, dtype):
    hold(one_head(70, kind, k_dim=32, v_dim=32), dtype)


def test_sums_beyond_the_range_of_half_precision():
    q, k, v = (
        torch.full((1, 256, 1, 16), x, dtype=torch.float16, device=DEVICE)
        for x in (1e-3, 8.0, 80.0)
    )
    o, state = recurrence.linear_attention(q, k, v, scale=1.0)
    right, _ = ops.linear_attention(q.double(), k.double(), v.double(), scale=1.0, mode="reference")
    assert o.dtype == torch.float16
    torch.testing.assert_close(o.double(), right, rtol=2e-3, atol=0.0)
    assert state is None


@pytest.mark.parametrize(("K", "V", "name"), [(64, 64, None), (128, 128, None), (128, 256, "nala")])
def test_heads_of_models(K, V, name):
    """With 2 stages an H200 refilled tiles of `input_gradients` while products read them: dk was 3 times as far off."""
    length = 70 if INTERPRETED else 130
    inputs = one_head(length, "gated_delta", k_dim=K, v_dim=V, initial=name is None)
    options = {"feature_map": build_feature_map(name, num_heads=1, head_dim=K)} if name else {}
    # What moves from call to call on a card must be right each time.
    for _ in range(1 if INTERPRETED else 5):
        hold(inputs, torch.bfloat16, **options)


@pytest.mark.parametrize("kind", ROWS["identical_keys"].kinds)
def test_identical_keys_with_beta_one_in_bf16(kind):
    inputs, _ = ROWS["identical_keys"].make(kind, 100, heads=1, value_heads=1, k_dim=12, v_dim=20)
    hold(inputs, torch.bfloat16, tolerance=0.06)  # intermediates are bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [70, 101])
def test_a_step_that_holds_the_decay(length, dtype):
    """Comba's: β e^−g and e^g v, where every seventh g is −20. Gradients are those of β, g and v themselves."""
    inputs = one_head(length, "gated_delta", k_dim=32, v_dim=32)
    inputs["beta"] = inputs["beta"] / 2
    inputs["g"][:, ::7] = -20

    def held(function):
        def comba(v, beta, g, **rest):
            beta, g = at_least_fp32(beta), at_least_fp32(g)  # as in a layer, whatever v is
            v = (g.exp()[..., None] * v).to(v.dtype)
            return function(**rest, v=v, beta=beta * (-g).exp(), g=g, allow_neg_eigval=True)

        return comba

    rounded = {name: x.to(dtype).double() for name, x in inputs.items()}
    expected = run(rounded, "reference", function=held(call))
    found = run(inputs, "chunk", dtype, function=held(on_device))
    wrong = {name: x for name, x in errors(found, expected).items() if not x <= TOLERANCE[dtype]}
    assert not wrong


@pytest.mark.parametrize("kind", ["delta", "gated_delta", "vector_delta"])
def test_beta_near_two_where_a_token_repeats(kind):
    """In bf16. Without `allow_neg_eigval` states and gradients are off by 0.4 to 270 times their size."""
    inputs = one_head(256, kind, k_dim=32)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["beta"] = (1.99 / inputs["k"].bfloat16().square().sum(-1)).clamp(max=1.99)
    if inputs["g"] is not None:
        inputs["g"] = torch.full_like(inputs["g"], -1e-4)
    hold(inputs, torch.bfloat16, tolerance=0.15, allow_neg_eigval=True)


MAPS = [
    *(
        (name, {})
        for name in (
            "silu",
            "elu1",
            "nala",
            "nala_paper",
            "nala_released",
            "nala_code",
            "pola",
            "soft",
        )
    ),
    ("nala", {"angle": "raw", "power": 2.5, "power_norm": "raw"}),
]


def test_a_map_under_decays_per_key_channel():
    inputs = one_head(70, "vector_gdn2_delta", initial=False)
    inputs |= {n: inputs[n].repeat(1, 1, 1, 2) for n in ("g", "erase")}
    nala = build_feature_map("nala", num_heads=1, head_dim=12)
    hold(inputs, feature_map=nala, qk_norm="l2")
    hold(inputs, torch.bfloat16, feature_map=nala, qk_norm="l2")


@pytest.mark.parametrize("length", [32, 64])
@pytest.mark.parametrize("kind", ["vector_gdn2_delta", "vector_linear"])
def test_longer_chunks_under_decays_per_key_channel(kind, length, monkeypatch):
    table = copy.deepcopy(common._shipped())
    table["sm_80"]["chunk_channels"] = [{"itemsize": 4, "features": 512, "BT": length}]
    monkeypatch.setattr(common, "_table", lambda: table)
    hold(with_resets(one_head(70, kind), *RESETS), tolerance=2e-6)


@every_kind
def test_a_prefix_does_not_depend_on_the_future(kind):
    """Neither its outputs nor its gradients, in any digit; the cut lies within a chunk."""
    cut, inputs = 20, {n: x.float() for n, x in one_head(40, kind).items() if x is not None}
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        leaves = {n: x.clone() for n, x in inputs.items()}
        for name in leaves.keys() - {"initial_state"}:
            leaves[name][:, cut:] = torch.rand_like(leaves[name][:, cut:]) * (
                -9 if name == "g" else 1
            )
        leaves = {n: x.to(DEVICE).requires_grad_() for n, x in leaves.items()}
        o, _ = call(**leaves, backend="triton")
        o[:, :cut].square().sum().backward()
        past = {n: x.grad if n == "initial_state" else x.grad[:, :cut] for n, x in leaves.items()}
        assert all(x.grad[:, cut:].eq(0).all() for n, x in leaves.items() if n != "initial_state")
        found.append({"o": o[:, :cut].detach()} | past)
    first, second = found
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(("name", "options"), MAPS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("kind", ["gated_delta", "linear"])
def test_maps_and_norm_are_formed_inside(kind, name, options):
    if kind == "linear" and name in ("elu1", "nala_paper", "nala_released", "nala_code"):
        pytest.skip("as under the delta rule")
    inputs = one_head(40, kind, initial=False)
    inputs["k"] = inputs["k"] * 3
    inputs["q"][:, 5], inputs["k"][:, 6] = 0, 0
    torch.manual_seed(0)
    feature_map = build_feature_map(name, num_heads=1, head_dim=12, **options)
    for parameter, value in getattr(feature_map, "initial", dict)().items():
        getattr(feature_map, parameter).data.copy_(value)
    hold(inputs, feature_map=feature_map, qk_norm="l2" if kind == "gated_delta" else None)
    if name == "nala" and not options:
        hold(inputs, torch.bfloat16, tolerance=2e-2, feature_map=feature_map, qk_norm="l2")


PASSES = "states", "states_and_outputs", "state_gradients"


@pytest.fixture
def scheduled(monkeypatch):
    """Sets the width of the sequential passes' blocks and the chunks of a segment; records all launches."""

    def choose(width=None, segments=0):
        table = copy.deepcopy(common._shipped())
        for kernel, rows in itertools.product(PASSES, table.values()):
            rows[kernel] = [
                row | {"segments": segments}
                for row in rows.get(kernel, ())
                if width in (None, row["BV"])
            ]
        monkeypatch.setattr(common, "_table", lambda: table)
        launched, real = [], recurrence._launch

        def launch(kernel, *args, **options):
            sizes = options.get("sizes") or {}
            assert {*sizes} <= {
                *kernel.arg_names,
                "num_warps",
                "num_stages",
            }  # the interpreter drops others
            launched.append((kernel.__name__, sizes))
            real(kernel, *args, **options)

        monkeypatch.setattr(recurrence, "_launch", launch)
        return launched

    return choose


SEGMENTED = {
    "every kind": ({"length": 70}, {}),
    "from nothing": ({"length": 70, "initial": False}, {}),
    "packed, with empty and short ones": (
        {"length": 103, "sequences": 7},
        {"cu_seqlens": torch.tensor([0, 0, 1, 16, 16, 86, 103, 103])},
    ),
}


@pytest.mark.parametrize("name", SEGMENTED)
@every_kind
def test_segments(kind, name, scheduled):
    launched = scheduled(segments=2)
    sizes, options = SEGMENTED[name]
    hold(one_head(kind=kind, **sizes), **options)
    passes = 0 if kind == "vector_linear" else 2  # forward and backward
    assert [kernel for kernel, _ in launched].count("compose") == passes


FUSED = SEGMENTED | {
    "odd": ({"length": 65, "v_dim": 7}, {}),
    "one token": ({"length": 1}, {}),
    "two halves": ({"length": 40, "k_dim": 132, "v_dim": 72}, {}),
    "groups": ({"length": 40, "value_heads": 2, "initial": False}, {}),
}


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        # Each pair of two of the three.
        (kind, name, (torch.float32, torch.bfloat16)[(i + j) % 2])
        for (i, kind), (j, name) in itertools.product(enumerate(KINDS), enumerate(FUSED))
    ],
)
def test_outputs_without_gradients(kind, name, dtype, scheduled):
    """The pass over the states computes the outputs; it stores neither states nor errors."""
    launched = scheduled()
    sizes, options = FUSED[name]
    hold(one_head(kind=kind, **sizes), dtype, run=evaluate, **options)
    kernels = {kernel for kernel, _ in launched}
    assert "states" in kernels
    assert "outputs" not in kernels


@pytest.mark.parametrize("name", ["nala", "silu"])
def test_outputs_without_gradients_under_a_map_and_segments(name, scheduled):
    launched = scheduled(segments=2)
    feature_map = build_feature_map(name, num_heads=1, head_dim=12)
    sizes, options = SEGMENTED["packed, with empty and short ones"]
    inputs = one_head(kind="gated_delta", **sizes)
    if name == "nala":  # two halves of 12 features
        inputs["initial_state"] = inputs["initial_state"].repeat(1, 1, 2, 1)
    hold(inputs, run=evaluate, feature_map=feature_map, qk_norm="l2", **options)
    assert {"compose", "states"} <= {kernel for kernel, _ in launched}


def test_wide_values_keep_the_states_apart(scheduled):
    launched = scheduled()
    hold(one_head(40, "delta", v_dim=130), torch.bfloat16, run=evaluate)
    assert "outputs" in {kernel for kernel, _ in launched}


@pytest.mark.parametrize(
    ("dtype", "segments", "tolerance"), [(torch.float32, 3, 2e-5), (torch.bfloat16, 2, 2e-2)]
)
def test_segments_of_two_halves_of_features_under_strong_decays(
    dtype, segments, tolerance, scheduled
):
    """The last segment is shorter; two heads of v share their keys."""
    launched = scheduled(segments=segments)
    inputs = make(1, 130, kind="gated_delta", heads=1, value_heads=2, k_dim=12, v_dim=20)
    inputs["initial_state"] = inputs["initial_state"].repeat(1, 1, 2, 1)
    inputs["g"][:, ::7] = -20.0
    feature_map = build_feature_map("nala", num_heads=1, head_dim=12)
    inputs = with_resets(inputs, -torch.inf)
    hold(inputs, dtype, tolerance, feature_map=feature_map, qk_norm="l2")
    assert "compose" in [kernel for kernel, _ in launched]


def test_segments_are_as_exact_as_whole_sequences(scheduled):
    """In bf16, without decays, which would end errors: five segments are hardly farther off than none."""
    inputs = {
        n: x if x is None else x.bfloat16() for n, x in one_head(300, "delta", k_dim=32).items()
    }
    wide = {n: x if x is None else x.double() for n, x in inputs.items()}
    right = run(wide, "reference")
    errors = []
    for segments in (0, 1):
        scheduled(segments=segments)
        found = run(inputs, "chunk", torch.bfloat16, function=on_device)
        errors.append(
            {n: float((found[n].double() - x).norm() / x.norm()) for n, x in right.items()}
        )
    whole, split = errors
    assert all(split[n] <= 1.1 * whole[n] for n in right), errors


@pytest.mark.parametrize("kind", ["gated_delta", "linear"])
def test_a_width_changes_no_value(kind, scheduled):
    """Columns of V are independent, so narrower blocks give the same outputs, states and gradients."""
    inputs, found = one_head(70, kind, k_dim=16, v_dim=72), []
    for width in (64, 32, 16):
        launched = scheduled(width)
        found.append(hold(inputs, torch.bfloat16))
        assert {sizes["BV"] for _, sizes in launched if "BV" in sizes} == {width}
    wide, *others = found
    for narrow, name in itertools.product(others if INTERPRETED else (), wide):
        # The interpreter's products round by their width on some processors.
        torch.testing.assert_close(narrow[name], wide[name])


@pytest.mark.parametrize(
    ("sequences", "length", "heads", "F", "V", "expected"),
    [
        (8, 32, 8, 128, 128, (64, 0)),  # 2,048 tokens: 128 programs of 64 columns
        (2, 128, 8, 128, 128, (32, 0)),  # 8,192 tokens: 32
        (1, 128, 8, 128, 128, (16, 0)),
        (1, 512, 4, 128, 128, (64, 32)),  # 64 with segments
        (1, 128, 2, 128, 128, (32, 16)),
        (8, 32, 6, 256, 256, (64, 0)),  # an H100: 0.219 ms, 0.237 with 32 columns
        (2, 128, 6, 256, 256, (32, 0)),  # 0.309 ms, 0.425 with 64
        (1, 512, 6, 256, 256, (16, 0)),  # segments would be too much work
        (64, 512, 8, 128, 128, (64, 0)),
        (1, 0, 8, 128, 128, (64, 0)),
    ],
)
def test_schedule(sequences, length, heads, F, V, expected):
    widths = 64, 32, 16
    programs, chunks = sequences * heads, sequences * length * heads
    width, segments = common.schedule(widths, programs, length, chunks, V, F, F / 64, 132)
    assert (widths[width], segments) == expected
    assert common.schedule(widths, programs, length, chunks, V, F, None, 132)[1] == 0


@pytest.mark.parametrize(
    ("sequences", "chunks", "heads", "processors", "width"),
    [
        # 192 programs of 64 columns use 73 % of two waves; 96 of 128 fit in one.
        (8, 32, 6, 132, 128),
        (16, 32, 6, 132, 128),
        # 96 programs of 32 columns fit in one, and 96 of 16.
        (2, 128, 6, 132, 32),
        (1, 128, 6, 132, 16),
        (8, 32, 6, 1, 128),
    ],
)
def test_waves_choose_the_width(sequences, chunks, heads, processors, width):
    """Of the flagship with V = 256, for any number of processors."""
    widths, programs = (128, 64, 32, 16), sequences * heads
    arguments = widths, programs, chunks, programs * chunks, 256, 256, None, processors
    assert common.schedule(*arguments) == (widths.index(width), 0)


def test_a_last_wave_that_is_nearly_empty_costs_a_whole_run():
    """Segments of 32 chunks: 192 programs of the first pass, 60 of them in a wave that is under half full."""
    assert common.schedule((64, 32, 16), 2, 512, 1024, 128, 256, 4.0, 132) == (0, 64)


def test_a_map_of_ones_own_is_formed_in_fp32_under_autocast():
    """Products too, as on the torch path."""
    W = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    found = []

    def random_features(q, k):
        found.extend((x @ W.to(x.device)).dtype for x in (q, k))
        return (q @ W.to(q.device)).exp(), (k @ W.to(k.device)).exp()

    q, k, v, beta = (torch.randn(1, 20, 1, *n, device=DEVICE) for n in ([16], [16], [8], []))
    with torch.autocast(DEVICE, torch.bfloat16):
        recurrence.delta_rule(q, k, v, beta.sigmoid(), feature_map=random_features, qk_norm="l2")
    assert set(found) == {torch.float32}


def test_wide_heads():
    """More than 128 features are two halves; K not a power of two is masked; V has several blocks."""
    K, V = (132, 24) if INTERPRETED else (260, 300)  # 24 are two blocks
    hold(one_head(20, "gated_delta", k_dim=K, v_dim=V))
    hold(one_head(20, "linear", k_dim=131, v_dim=8))  # odd: one tile
    hold(one_head(20, "vector_gdn2_delta", k_dim=136 if INTERPRETED else 200, v_dim=V))
    silu = build_feature_map("silu", num_heads=1, head_dim=130)
    hold(one_head(20, "delta", k_dim=130, v_dim=V), feature_map=silu, qk_norm="l2")


@interpreted_only
@pytest.mark.parametrize("kind", ["gated_delta", "linear", "vector_gdn2_delta"])
def test_one_operator_for_the_compiler(kind):
    inputs = {n: x.float() for n, x in one_head(20, kind).items() if x is not None}
    norm = None if kind in CHANNELS else "l2"  # formed outside the operator
    expected = run(inputs, "chunk", torch.float32, function=on_device, qk_norm=norm)
    torch._dynamo.reset()
    compiled = torch.compile(on_device, backend="aot_eager", fullgraph=True)
    results = run(inputs, "chunk", torch.float32, function=compiled, qk_norm=norm)
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@interpreted_only
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.zeros(1, 20, 1, 600), "k": torch.zeros(1, 20, 1, 600)}, "600 features a head"),
        ({"q": torch.zeros(1, 20, 1, 12).double()}, "float64 inputs"),
    ],
    ids=["features", "float64"],
)
def test_what_it_cannot_is_served_by_torch(change, reason):
    inputs = {
        n: x.float() for n, x in one_head(20, "delta", initial=False).items() if x is not None
    } | change
    nalanda_kernels._warn_once.cache_clear()
    with pytest.warns(
        UserWarning, match=f"delta_rule: triton cannot serve {reason}; trying the next backend"
    ):
        o, _ = ops.delta_rule(**inputs, backend="triton")
    assert torch.equal(o, ops.delta_rule(**inputs, backend="torch")[0])


@interpreted_only
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("delta", "initial_state: K = 12"),
        ("vector_delta", "g: 12 key channels"),
        ("gdn2_delta", "erase: 12 key"),
    ],
)
def test_what_does_not_fit_the_features(kind, message):
    inputs = {
        n: x.float()
        for n, x in one_head(20, kind, initial=kind == "delta").items()
        if x is not None
    }
    feature_map = build_feature_map("nala", num_heads=1, head_dim=12)
    with pytest.raises(ValueError, match=f"{message}.*; q and k have 24 features"):
        ops.delta_rule(**inputs, feature_map=feature_map, backend="triton")


def test_chunks_of_packed_sequences():
    bounds = [0, 0, 1, 16, 16, 81, 110, 110]
    found = common.chunks_of((1, 110), torch.tensor(bounds), 16, torch.device("cpu"))
    expected = [
        (start, stop - start)
        for first, stop in itertools.pairwise(bounds)
        for start in range(first, stop, 16)
    ]
    assert list(zip(found.start.tolist(), found.count.tolist(), strict=True)) == expected
    assert found.first.tolist() == [0, 0, 1, 2, 2, 7, 9, 9]
    assert found.longest == 5
    segments = found.segments(2)
    assert segments.bounds.tolist() == [0, 0, 1, 16, 16, 48, 80, 81, 110, 110]
    assert segments.first.tolist() == [0, 0, 1, 2, 2, 4, 6, 7, 9, 9]
    assert segments.parts.tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
    with pytest.raises(ValueError, match="cu_seqlens: does not rise from 0 to the 110 tokens"):
        common.chunks_of((1, 110), torch.tensor([0, 120]), 16, torch.device("cpu"))
