"""The kernels of the short convolution and of the one-token step."""

from kernel_device import DEVICE, INTERPRETED  # isort: skip  (before any kernel)
import contextlib
import copy
import math
import warnings

import nalanda_kernels
import pytest
import torch
import torch.nn.functional as F
from drawn import drawn, with_gaps
from nalanda_kernels.triton import short_conv as conv_module
from nalanda_kernels.triton import step as step_module

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model import decoding, one_token
from nalanda.model.base import convolve
from nalanda.model.layers import ShortConv
from nalanda.model.mixers import build_mixer
from nalanda.model.sequences import Sequences

LENGTHS = [1, 15, 0, 63, 64, 65, 2, 127, 200, 0]


@pytest.fixture(autouse=True)
def _poison():
    """Fills torch.empty with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=not INTERPRETED)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def served(monkeypatch):
    """Enables only this file's kernels; returns the list of ops that they served."""
    served = []

    class Recorded:
        def __init__(self, op):
            self.op, self.kernel = op, nalanda_kernels.KERNELS[op]["triton"]

        devices = ("cuda",)

        def serves(self, device):
            return self.kernel.serves(device)

        def load(self):
            function = self.kernel.load()

            def call(*inputs, **options):
                out = function(*inputs, **options)
                served.append(self.op)
                return out

            return call

    rows = {op: {"triton": Recorded(op)} for op in ("short_convs", "fused_step")}
    monkeypatch.setattr(nalanda_kernels, "KERNELS", rows)
    return served


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def near(a, b, tolerance):
    """Within `tolerance` of b's largest entry."""
    assert a.shape == b.shape
    if b.numel():
        error, scale = (a.double() - b.double()).abs().max(), b.double().abs().max()
        assert error <= tolerance * scale, f"{float(error):.3g} of {float(scale):.3g}"


# ------------------------------------------------------------------------------------------ the convolution


def check_convolution(
    shape, width, cu=None, silu=True, with_state=True, dtype=torch.float32, tolerance=3e-6
):
    """y, the new state and every gradient against `ShortConv` in float64 on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    N, D = shape[0] if cu is None else len(cu) - 1, shape[2]

    def draw(*size):
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    x, weight, state = draw(*shape), draw(D, width), draw(N, width - 1, D) if with_state else None
    d_y, d_final = draw(*shape), draw(N, width - 1, D)

    def run(function, *tensors):
        tensors = [None if t is None else t.clone().requires_grad_() for t in tensors]
        y, final = function(*tensors)
        given = [t for t in tensors if t is not None]
        gradients = torch.autograd.grad([y, final], given, [d_y.to(y.dtype), d_final.to(y.dtype)])
        return [y, final, *gradients]

    def kernel(x, weight, state):
        options = {"activation": "silu" if silu else None, "output_final_state": True}
        return short_conv(x, weight, state, cu_seqlens=cu, **options)

    def reference(x, weight, state):
        conv = ShortConv(D, width).to(DEVICE).double()
        y, final = torch.func.functional_call(
            conv, {"weight": weight[:, None]}, (x, Sequences(cu), state, True)
        )
        return F.silu(y) if silu else y, final

    wide = [None if t is None else t.double() for t in (x, weight, state)]
    for mine, theirs in zip(run(kernel, x, weight, state), run(reference, *wide), strict=True):
        assert mine.dtype == dtype
        near(mine, theirs, tolerance)


def short_conv(x, weight, state=None, *, activation=None, **options):
    """`short_convs` for one."""
    states = None if state is None else [state]
    (y,), final = conv_module.short_convs(
        [x], [weight], states, activations=[activation], **options
    )
    return y, None if final is None else final[0]


@pytest.mark.sampled
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_convolution(silu, with_state):
    cu = offsets(LENGTHS)
    check_convolution((1, int(cu[-1]), 20), 4, cu, silu, with_state)


@pytest.mark.parametrize("length", [1, 2, 64, 130])
def test_dense_convolution(length):
    check_convolution((2, length, 20), 4, with_state=length % 2 == 1)


@pytest.mark.parametrize("width", [2, 3, 8])
def test_widths_of_the_convolution(width):
    check_convolution((1, 75, 16), width, offsets([1, 0, 70, 4]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_convolution(dtype, tolerance):
    check_convolution((1, 69, 20), 4, offsets([3, 66]), dtype=dtype, tolerance=tolerance)


def test_the_tiles_of_a_card(monkeypatch):
    """Few rows per step and two blocks of channels; the interpreter's own tiles hold all of a block."""
    monkeypatch.setattr(conv_module, "interpreting", lambda: False)
    check_convolution((1, 6, 130), 3, offsets([5, 0, 1]))


PACKED = offsets([3, 0, 66, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("cu", "with_state"), [(PACKED, True), (None, False)])
def test_convolutions_of_columns_in_one_launch(with_state, cu, monkeypatch):
    """q, k and v as columns of a product: each as by itself, without copies of inputs or of gradients."""
    sizes, width, silu = [20, 6, 130], 4, [None, None, "silu"]
    B, T, N = (2, 35, 2) if cu is None else (1, 70, 4)
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator).to(DEVICE).requires_grad_()

    whole, weights = draw(B, T, 160), [draw(D, width) for D in sizes]
    xs, states = whole.split([*sizes, 4], -1)[:3], [draw(N, width - 1, D) for D in sizes]
    states = states if with_state else None
    d_ys, launches = [draw(B, T, D).detach() for D in sizes], []
    launch = conv_module._launch

    def counted(kernel, name, *args, **options):
        launches.append(name)
        return launch(kernel, name, *args, **options)

    monkeypatch.setattr(conv_module, "_launch", counted)
    options = {"cu_seqlens": cu, "output_final_state": True}
    ys, finals = conv_module.short_convs(xs, weights, states, activations=silu, **options)
    d_xs = torch.autograd.grad(ys, xs, d_ys, retain_graph=True)
    assert launches == ["forward", "backward"] + ["state"] * with_state
    assert all(y.is_contiguous() for y in ys)
    ends = [d.data_ptr() + d.shape[2] * d.itemsize for d in d_xs]
    assert [d.data_ptr() for d in d_xs[1:]] == ends[:-1]
    given = [whole, *weights, *(states or ())]
    mine = torch.autograd.grad([*ys, *finals], given, [*d_ys, *map(torch.ones_like, finals)])
    alone = [
        short_conv(x, w, states and states[i], activation=act, **options)
        for i, (x, w, act) in enumerate(zip(xs, weights, silu, strict=True))
    ]
    both = [*(y for y, _ in alone), *(final for _, final in alone)]
    theirs = torch.autograd.grad(both, given, [*d_ys, *map(torch.ones_like, finals)])
    for a, b in zip([*ys, *finals, *mine], [*both, *theirs], strict=True):
        near(a, b, 1e-6)


def test_one_token_of_rows_that_lie_apart():
    """torch calls such an x contiguous whatever the stride of its one token is."""
    x = torch.randn(1, 3, 8, device=DEVICE).transpose(0, 1)
    weight = torch.randn(8, 4, device=DEVICE)
    near(
        short_conv(x, weight)[0],
        short_conv(x.clone(memory_format=torch.contiguous_format), weight)[0],
        0.0,
    )


def test_what_the_convolution_cannot_serve():
    x, weight = torch.ones(1, 3, 4, device=DEVICE), torch.ones(4, 2, device=DEVICE)
    for x_, w, options, message in (
        (x.double(), weight, {}, "float64"),
        (x, weight.repeat(1, 5), {}, "10 taps"),
        (x[:, :0], weight, {}, "without tokens"),
        (x, weight, {"activation": "tanh"}, "tanh"),
    ):
        with pytest.raises(nalanda_kernels.Unsupported, match=message):
            short_conv(x_, w, **options)
    with pytest.raises(ValueError, match="rise from 0 to the 3 tokens"):
        short_conv(x, weight, cu_seqlens=torch.tensor([0, 2]))


def test_the_convolution_is_one_op_to_the_compiler():
    x, weight, state = torch.randn(1, 5, 4), torch.randn(4, 3), torch.randn(2, 2, 4)
    inputs = [t.to(DEVICE).requires_grad_() for t in (x, weight, state)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    lists = ([t] for t in inputs)
    torch.library.opcheck(
        conv_module._forward_op, (*lists, offsets([2, 3]), [True]), test_utils=tests
    )


@pytest.mark.parametrize("copies", [1, 3])
def test_the_model_takes_the_convolution(served, copies):
    conv, cu = ShortConv(6, 4, copies), offsets([3, 1, 5])
    torch.nn.init.normal_(conv.to(DEVICE).weight)
    x, state = (torch.randn(*n, 6 * copies, device=DEVICE) for n in ((1, 9), (3, 3)))

    def run():
        (y,), new = convolve({"conv_v": conv}, [x], Sequences(cu), {"conv_v": state}, silu=True)
        return y, new["conv_v"], *torch.autograd.grad(y.square().sum(), conv.weight)

    run()
    assert served == ([] if INTERPRETED else ["short_convs"])  # no call names the interpreter
    served.clear()
    with nalanda_kernels.use_backend("torch"):
        expected = run()
    with nalanda_kernels.use_backend("triton"):
        for mine, theirs in zip(run(), expected, strict=True):
            near(mine, theirs, 3e-6)
    assert served == ["short_convs"]


# ----------------------------------------------------------------------------------------------- the step

WIDE = {
    "head_dim": 20,
    "expand_v": 1.5,
}  # K = 20 of 32 columns; V = 30 in two programs, the second partial
STEPS = {
    "deltanet": {},
    "deltanet, wide": {"feature_map": "identity", **WIDE},
    "deltanet, nala": {"feature_map": "nala", "use_gate": True, "conv_size": 0},
    "gated_deltanet": {"conv_size": 2},
    "gated_deltanet, nala": {"feature_map": "nala", **WIDE},
    "gated_deltanet, grouped": {
        "mixer_options": {"num_v_heads": 4, "allow_neg_eigval": True},
        "feature_map": "nala_released",
        "use_gate": False,
    },
    "kda": {"mixer_options": {"num_v_heads": 4}},
    "kda, nala": {"feature_map": "nala", **WIDE},
    "kda, nala_code": {"feature_map": "nala_code"},
    "deltanet, angle": {"feature_map": "angle"},
    "gated_deltanet2": {"mixer_options": {"allow_neg_eigval": True}},
    "gated_deltanet2, nala": {"feature_map": "nala", "conv_size": 0, **WIDE},
    "delta_product": {"mixer_options": {"num_v_heads": 4}},
    "delta_product, nala": {
        "mixer_options": {"num_householder": 3, "use_forget_gate": True},
        "feature_map": "nala",
        **WIDE,
    },
    "linear_attention": {},
    "linear_attention, wide": {"feature_map": "nala", "use_gate": True, **WIDE},
    "linear_attention, sums": {
        "mixer_options": {"denominator": False},
        "feature_map": "elu",
        **WIDE,
    },
    "nala": {"conv_size": 0},
    "nala, wide": WIDE,
    "nala, one head": {"num_heads": 1, "head_dim": 12, "use_gate": False},
    "nala, narrow": {"head_dim": 5},
    "retention": {"head_dim": 20},
    "gla": WIDE,
    "mamba2": {"mixer_options": {"num_v_heads": 4}},
    "mamba2, wide": {"feature_map": "nala", "conv_size": 0, **WIDE},
    "mamba2, ungated": {"use_gate": False},
    "mala": WIDE,
    "mala, inverse_t": {"mixer_options": {"scale": "inverse_t"}, "feature_map": "nala"},
    "mala, literal": {"mixer_options": {"scale": "literal"}, "value_conv": 3},
    "pola": {},
    "pola, wide": {
        "mixer_options": {"gate_first": True},
        "feature_map_options": {"scale": False},
        "head_dim": 20,
    },
    "pola, gate alone": {"mixer_options": {"gate_first": True}, "value_conv": 0},
    "linear_attention, pola": {"feature_map": "pola", "value_conv": 2, **WIDE},
    "deltanet, pola": {"feature_map": "pola", "value_conv": 3},
    "gated_deltanet, value_conv": {"conv_size": 0, "value_conv": 3},
    "gated_deltanet2, value_conv": {"value_conv": 3},
}


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    mixer = name.split(",")[0]
    config = NalandaConfig(
        **{"vocab_size": 8, "hidden_size": 32, "num_heads": 2, "mixer": mixer} | STEPS.get(name, {})
    )
    return drawn(build_mixer(mixer, config, 0), 0.5).to(DEVICE, dtype)


def prefill(module, x):
    """The state after x, by the torch path."""
    with nalanda_kernels.use_backend("torch"):
        return module(x, Sequences(), {})[1]


@torch.no_grad()
def check_steps(name, batch, dtype, tolerance, served, change=lambda module: module):
    """Two tokens after a prefill: outputs and states against the torch path in float64."""
    module = build(name, dtype)
    reference = copy.deepcopy(module).double()
    module = change(module)
    x = torch.randn(batch, 8, 32).to(DEVICE, dtype)
    state = prefill(module, x[:, :6])
    wide = {name: t.double() for name, t in state.items()}
    for i in range(6, 8):
        seq, before = (
            Sequences(past=torch.full((batch,), i)),
            {n: t.clone() for n, t in state.items()},
        )
        with nalanda_kernels.use_backend("triton"):
            y, new = module(x[:, i : i + 1], seq, state)
        with nalanda_kernels.use_backend("torch"):
            expected, wide = reference(x[:, i : i + 1].double(), seq, wide)
        assert y.dtype == dtype
        assert new.keys() == wide.keys()
        near(y, expected, tolerance)
        for n, t in new.items():
            assert t.dtype == state[n].dtype
            near(t, wide[n], tolerance)
            assert torch.equal(state[n], before[n])  # the old state can still be used
        state = new
    assert served.count("fused_step") == 2
    assert not any(t.any() for t in step_module._tickets.values())


def test_a_step_of_any_number_of_heads_can_be_launched(monkeypatch):
    grids = []

    class Launches:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(step_module, "step_kernel", Launches())
    N, HV, V = 35_000, 2, 40
    heads = {"q": torch.zeros(N, 1, HV), "k": torch.zeros(N, 1, HV), "v": torch.zeros(N, 1, HV * V)}
    sizes = {
        "key_dim": 1,
        "value_dim": V,
        "num_heads": HV,
        "num_v_heads": HV,
        "dtype": torch.float32,
    }
    step_module.step(lambda: heads, {"recurrent": torch.zeros(N, HV, 1, V)}, **sizes)
    assert len(grids) == 1
    assert math.prod(grids[0]) == N * HV * 2  # two tiles of columns
    assert all(axis <= 65_535 for axis in grids[0][1:])  # CUDA's limit for all but the first


@pytest.mark.sampled
@pytest.mark.parametrize("name", STEPS)
def test_steps(name, served):
    check_steps(name, 1 if "wide" in name else 2, torch.float32, 5e-6, served)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [
        *("gated_deltanet, nala", "linear_attention", "nala", "kda, nala", "gla"),
        *("retention", "mamba2", "mala", "pola", "mala, literal", "deltanet, pola"),
    ],
)
def test_steps_in_bf16(name, served):
    batch = {"nala": 3, "kda, nala": 2, "mamba2": 2, "pola": 2}.get(name, 1)
    check_steps(name, batch, torch.bfloat16, 2**-6, served)


@pytest.mark.parametrize("name", ["kda", "mamba2", "retention", "deltanet, pola"])
def test_weights_with_gaps(name, served):
    check_steps(name, 2, torch.float32, 5e-6, served, change=with_gaps)


@pytest.mark.parametrize("name", ["kda, nala", "gla"])
def test_large_second_matrices_are_products_of_their_own(name, served, monkeypatch):
    monkeypatch.setattr(one_token, "MOST_READ", 0)
    check_steps(name, 2, torch.float32, 5e-6, served)


def empty(module, batch):
    return {
        n: torch.zeros(batch, *shape, device=DEVICE)
        for n, (shape, _) in module.state_spec(6).items()
    }


@torch.no_grad()
def test_sequences_of_their_own_lengths_and_zeros(served):
    """Each sequence counts its own tokens; zero inputs and decays of −20 give no NaN."""
    module = build("linear_attention")
    x, seq = torch.randn(2, 7, 32).to(DEVICE), Sequences(past=torch.tensor([6, 90_000_000]))
    state, x = prefill(module, x[:, :6]), x[:, 6:]
    with nalanda_kernels.use_backend("torch"):
        expected, _ = module(x, seq, state)
    with nalanda_kernels.use_backend("triton"):
        near(module(x, seq, state)[0], expected, 5e-6)
        module = build("gated_deltanet, nala")
        state, zero = empty(module, 2), torch.zeros_like(x)
        y, new = module(zero, Sequences(), state)
        assert not y.any()
        assert not any(t.any() for t in new.values())
        module.decay.A_log.fill_(3.0)
        module.decay.dt_bias.fill_(1.0)
        state["recurrent"] += 1
        _, new = module(zero, Sequences(), state)
        assert new["recurrent"].abs().max() < 1e-10
    assert served == ["fused_step"] * 3


@pytest.mark.filterwarnings("ignore:short_convs. triton cannot serve")
@torch.no_grad()
def test_where_the_step_does_not_serve(served):
    x, seq = torch.randn(1, 7, 32).to(DEVICE), Sequences(past=torch.tensor([6]))
    module = build("deltanet")
    state, x = prefill(module, x[:, :6]), x[:, 6:]
    with nalanda_kernels.use_backend("torch"):
        expected, _ = module(x, seq, state)
    with nalanda_kernels.use_backend("triton"):
        with torch.enable_grad():
            assert module(x, seq, state)[0].requires_grad
        y, _ = module(x, Sequences(torch.tensor([0, 1])), state)
        near(y, expected, 5e-6)
        assert "fused_step" not in served
        module = build("soft")
        module(x, seq, empty(module, 1))
        module = build("deltanet").double()
        state = {name: t.double() for name, t in empty(module, 1).items()}
        nalanda_kernels._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="fused_step: triton cannot serve float64 outputs"):
            module(x.double(), seq, state)
    assert "fused_step" not in served


@torch.no_grad()
def test_a_gate_behind_the_convolution_of_v_is_not_the_kernels(served, monkeypatch):
    monkeypatch.setitem(STEPS, "mamba2, value_conv", {"value_conv": 3})
    module, x = build("mamba2, value_conv"), torch.randn(2, 7, 32).to(DEVICE)
    state, seq = prefill(module, x[:, :6]), Sequences(past=torch.full((2,), 6))
    with nalanda_kernels.use_backend("torch"):
        expected, _ = module(x[:, 6:], seq, state)
    with nalanda_kernels.use_backend("triton"):
        near(module(x[:, 6:], seq, state)[0], expected, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_deltanet, nala", "linear_attention, wide", "nala"])
@torch.no_grad()
def test_a_step_into_given_buffers(name, served):
    """As decoding graphs have it: no new memory, the old state and the tickets as before."""
    module, x = build(name), torch.randn(2, 8, 32).to(DEVICE)
    old = prefill(module, x[:, :6])
    new, third = ({n: torch.full_like(t, torch.nan) for n, t in old.items()} for _ in range(2))
    with nalanda_kernels.use_backend("triton"):
        for i, (state, out) in enumerate([(old, new), (new, third)]):
            seq, x_i = Sequences(past=torch.full((2,), 6 + i)), x[:, 6 + i : 7 + i]
            before = {n: t.clone() for n, t in state.items()}
            expected, expected_state = module(x_i, seq, state)
            y, found = module(x_i, seq, decoding.StaticState(state, out))
            assert torch.equal(y, expected)
            for n in state:
                assert found[n] is out[n]
                assert torch.equal(out[n], expected_state[n])
                assert torch.equal(state[n], before[n])
    held = step_module._tickets_of_buffers
    tiles_share_a_norm = name != "linear_attention, wide"
    assert [out["recurrent"] in held for out in (new, third)] == [tiles_share_a_norm] * 2
    assert not any(t.any() for t in held.values())


def tiny_model():
    torch.manual_seed(0)
    mixers = ["gated_deltanet", "linear_attention"]
    config = NalandaConfig(
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        mixer=mixers,
        feature_map="nala",
        initializer_range=0.3,
    )
    return NalandaForCausalLM(config).eval().to(DEVICE)


@pytest.mark.slow
def test_generation_is_that_of_the_torch_path(served):
    model = tiny_model()
    tokens, mask = (
        torch.randint(31, (2, 7)).to(DEVICE),
        torch.ones(2, 7, dtype=torch.int64, device=DEVICE),
    )
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    with nalanda_kernels.use_backend("torch"):
        expected = model.generate(tokens, **options)
    with nalanda_kernels.use_backend("triton"), warnings.catch_warnings():
        warnings.filterwarnings("error", ".* cannot serve")
        out = model.generate(tokens, **options)
    assert torch.equal(out.sequences, expected.sequences)
    near(torch.stack(out.logits), torch.stack(expected.logits), 2e-5)
    assert served.count("fused_step") == 2 * 3  # the prefill gives the first of the four
    assert served.count("short_convs") == 2


# ------------------------------------------------------------------------------------------- CUDA graphs

compiled_only = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


@compiled_only
@pytest.mark.parametrize("sampled", [False, True])
def test_graphs_generate_what_eager_calls_do(sampled, monkeypatch):
    model, tokens = tiny_model(), torch.randint(31, (3, 7)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[1:, :3] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 64,
        "do_sample": sampled,
        "pad_token_id": 0,
    }
    options |= {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for switch in ("0", "1", "1"):  # the last call finds the graphs of the second
        monkeypatch.setenv(decoding.ENVIRONMENT, switch)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "decoding without CUDA graphs")
            found.append(model.generate(tokens, **options))
    eager, *graphed = found
    assert all(out.past_key_values.decoder is not None for out in graphed)
    for out in graphed:
        assert torch.equal(out.sequences, eager.sequences)
        near(torch.stack(out.logits), torch.stack(eager.logits), 2e-5)
        for a, b in zip(out.past_key_values.states, eager.past_key_values.states, strict=True):
            for name in b:
                near(a[name], b[name], 2e-5)


@compiled_only
def test_a_failed_capture_spares_the_random_numbers(monkeypatch):
    class Waits(torch.nn.Module):
        def forward(self, x):
            return x * float(x.new_ones(1))

    model, tokens = tiny_model(), torch.randint(31, (1, 7)).to(DEVICE)
    layer = model.model.layers[0]
    layer.mlp = torch.nn.Sequential(layer.mlp, Waits())
    monkeypatch.setattr(decoding, "OnDevice", lambda device: contextlib.nullcontext())
    with pytest.warns(UserWarning, match="decoding without CUDA graphs"):
        model.generate(tokens, do_sample=True, max_new_tokens=32, eos_token_id=None, pad_token_id=0)
    assert torch.rand(3, device=DEVICE).isfinite().all()
