"""One token in C++: every rule with every map against float64, and products of few rows."""

import copy
import ctypes

import nalanda_kernels
import pytest
import torch
import torch.nn.functional as F
from drawn import drawn
from nalanda_kernels import Unsupported
from nalanda_kernels.cpu import build, step
from tiny_models import UNKNOWN_MAPS, rows

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model.decoding import StaticState
from nalanda.model.mixers import build_mixer
from nalanda.model.projections import apply_linear
from nalanda.model.sequences import Sequences

try:
    build.library()
except Unsupported as reason:
    pytest.skip(f"no C++ compiler: {reason}", allow_module_level=True)

SIZES = {"vocab_size": 8, "hidden_size": 28, "num_heads": 2, "expand_v": 1.5}  # K = 14, V = 21
MORE = {
    "wide": {"mixer": "gated_deltanet", "feature_map": "nala", "head_dim": 37, "expand_v": 1.0},
    "no_convolution": {"mixer": "gated_deltanet2", "conv_size": 0, "use_gate": False},
    "sums": {"mixer": "linear_attention", "mixer_options": {"denominator": False}},
    "gated_sums": {"mixer": "linear_attention", "use_gate": True, "conv_size": 2},
    "bias": {"mixer": "kda", "use_bias": True, "conv_size": 3},
}


@pytest.fixture(autouse=True)
def _poison():
    """Fills torch.empty with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


STEPPED = [
    *("deltanet", "gated_deltanet", "kda", "gated_deltanet2", "delta_product"),
    *("linear_attention", "nala", "retention", "gla"),
]


def described():
    """The rows of mixers that state a rule of a token, with maps that kernels know."""
    for row in (*rows(), *(pytest.param(options, id=name) for name, options in MORE.items())):
        options = {"mixer": "gated_deltanet"} | row.values[0]
        mixer = options["mixer"]
        if mixer in STEPPED and served(options):
            yield pytest.param(options, id=row.id, marks=row.marks)


def served(options) -> bool:
    unstated = {"norm_write", "norm_read"} & options.get("mixer_options", {}).keys()
    norm = options.get("feature_map_options", {}).get("norm")
    if options.get("value_conv"):  # a whole token serves it alone
        return False
    return not unstated and norm != "sum" and options.get("feature_map") not in UNKNOWN_MAPS


def make(options, dtype=torch.float32):
    torch.manual_seed(0)
    config = NalandaConfig(**SIZES | options)
    return drawn(build_mixer(options["mixer"], config, 0), 0.5).to(dtype).eval()


def prefill(module, x):
    """The state after x, by the torch path."""
    with nalanda_kernels.use_backend("torch"):
        return module(x, Sequences(), {})[1]


@pytest.fixture
def calls(monkeypatch):
    """Whether each call of the step was served."""
    calls = []

    def recorded(*inputs, run=step.step, **options):
        result = run(*inputs, **options)
        calls.append(result is not None)
        return result

    monkeypatch.setattr(step, "step", recorded)
    return calls


def distance(a, b) -> float:
    """The largest difference, as a share of b's largest entry."""
    return float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", described())
@torch.no_grad()
def test_steps(options, dtype, calls):
    """As near to float64 as torch, two tokens after a prompt of one token and of five."""
    module = make(options, dtype)
    exact = copy.deepcopy(module).double()
    for batch, prompt in ((3, 1), (1, 5)):
        x = torch.randn(batch, prompt + 2, 28).to(dtype)
        state = by_torch = prefill(module, x[:, :prompt])
        wide = {name: y.double() for name, y in state.items()}
        before = {name: y.clone() for name, y in state.items()}
        for i in range(prompt, prompt + 2):
            token, seq = x[:, i : i + 1], Sequences(past=torch.full((batch,), i))
            given, (y, state) = state, module(token, seq, state)
            with nalanda_kernels.use_backend("torch"):
                y_torch, by_torch = module(token, seq, by_torch)
                expected, wide = exact(token.double(), seq, wide)
            assert (y.dtype, list(state)) == (y_torch.dtype, list(state))
            pairs = [(y, y_torch, expected)]
            pairs += [(state[name], by_torch[name], wide[name]) for name in by_torch]
            for ours, other, reference in pairs:
                assert ours.dtype == other.dtype
                error = distance(ours, reference)
                assert error <= max(
                    1e-5 if dtype == torch.float32 else 0, 3 * distance(other, reference)
                )
            # Rounded where torch rounds, so only its order of sums differs.
            if dtype == torch.bfloat16:
                assert (y == y_torch).float().mean() >= 0.85
            # The old state can still be used.
            assert all(torch.equal(given[name], before[name]) for name in before)
            before = {name: y.clone() for name, y in state.items()}
    assert calls == [True] * 4


@pytest.mark.parametrize("options", [{}, {"mixer": "delta_product"}, {"mixer": "nala"}])
@torch.no_grad()
def test_a_state_in_place(options):
    """The new state in the memory of the old one, as in memory of its own."""
    module = make({"mixer": "gated_deltanet"} | options)
    x = torch.randn(2, 6, 28)
    state = prefill(module, x[:, :5])
    seq = Sequences(past=torch.full((2,), 5))
    y, new = module(x[:, 5:], seq, state)
    addresses = {name: t.data_ptr() for name, t in state.items()}
    y_in_place, in_place = module(x[:, 5:], seq, StaticState(state, state))
    assert torch.equal(y, y_in_place)
    for name, t in in_place.items():
        assert t.data_ptr() == addresses[name]
        assert torch.equal(t, new[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_threads_do_not_change_a_token(dtype, monkeypatch):
    monkeypatch.setattr(step, "ENTRIES_A_THREAD", 1)
    module, x = make({"mixer": "gated_deltanet"}, dtype), torch.randn(3, 6, 28).to(dtype)
    state, threads, results = prefill(module, x[:, :5]), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            y, new = module(x[:, 5:], Sequences(past=torch.full((3,), 5)), state)
            results.append((y, *new.values()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@torch.no_grad()
def test_other_precisions_are_left_to_torch(dtype, calls, recwarn):
    module, x = make({"mixer": "gated_deltanet"}, dtype), torch.randn(1, 6, 28).to(dtype)
    state, seq = prefill(module, x[:, :5]), Sequences(past=torch.full((1,), 5))
    y, _ = module(x[:, 5:], seq, state)
    with nalanda_kernels.use_backend("torch"):
        assert torch.equal(y, module(x[:, 5:], seq, state)[0])
    assert calls == [False]
    assert not [w for w in recwarn if "step" in str(w.message)]


@pytest.mark.parametrize("feature_map", ["silu_shifted", "soft"])
@torch.no_grad()
def test_other_maps_are_left_to_torch(feature_map, calls):
    module = make({"mixer": "gated_deltanet", "feature_map": feature_map})
    x = torch.randn(1, 6, 28)
    module(x[:, 5:], Sequences(past=torch.full((1,), 5)), prefill(module, x[:, :5]))
    assert calls == [False]


@pytest.mark.parametrize(("N", "K", "M"), [(1, 3, 5), (2, 64, 6), (3, 100, 33), (8, 257, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_few_rows(N, K, M, dtype, monkeypatch):
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape).to(dtype) for shape in ((N, K), (M, K)))
    N = min(N, step.ROWS[dtype])
    exact = F.linear(x[:N].double(), weight.double())
    y = step.linear_rows(x[:N], weight)
    assert y.dtype == dtype
    assert distance(y, exact) <= (1e-6 if dtype == torch.float32 else 2**-8)
    # A row does not depend on the rows beside it, nor on threads.
    monkeypatch.setattr(step, "ENTRIES_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for n in range(N):
        assert torch.equal(step.linear_rows(x[n : n + 1], weight), y[n : n + 1])


@pytest.mark.parametrize(
    ("N", "K", "M"), [(1, 3, 5), (2, 64, 6), (3, 100, 33), (8, 257, 9), (65, 511, 7), (130, 600, 5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_weights_in_int8(N, K, M, dtype, monkeypatch):
    torch.manual_seed(0)
    x, scale, bias = (y.to(dtype) for y in (torch.randn(N, K), torch.rand(M), torch.randn(M)))
    codes = torch.randint(-127, 128, (M, K), dtype=torch.int8)
    exact = F.linear(x.double(), codes.double() * scale.double()[:, None], bias.double())
    y = step.linear_rows(x, codes, scale, bias)
    # x is rounded to int16.
    assert distance(y, exact) <= (1e-4 if dtype == torch.float32 else 2**-8)
    monkeypatch.setattr(step, "ENTRIES_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for n in range(N):
        assert torch.equal(step.linear_rows(x[n : n + 1], codes, scale, bias), y[n : n + 1])


HARNESS = """
#include "rows.h"
extern "C" void product(const int8_t* w, const float* x, int N, int K, int M, float* y) {
    CodeMemory memory;
    multiply_all(w, encode(x, N, K, memory), N, K, 0, M, [=](int n, long m, float sum) { y[n * M + m] = sum; });
}
"""


@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512"])
def test_int8_on_other_processors(processor, tmp_path):
    """Each form of the product gives the same numbers: its sums of integers are exact."""
    needed = {"haswell": "avx2", "skylake-avx512": "avx512bw"}.get(processor, "sse2")
    if f" {needed} " not in build.processor() + " ":
        pytest.skip(f"needs {needed}")
    source, library = tmp_path / "product.cpp", tmp_path / "product.so"
    source.write_text(HARNESS)
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    command = [*build._find_compiler(), *flags, f"-march={processor}", f"-I{build.SOURCES}"]
    build._run([*command, str(source), "-o", str(library)])

    torch.manual_seed(0)
    N, K, M = 5, 700, 6
    x, y = torch.randn(N, K), torch.empty(N, M)
    codes = torch.randint(-127, 128, (M, K), dtype=torch.int8)
    run = ctypes.CDLL(str(library)).product
    addresses = [ctypes.c_void_p(z.data_ptr()) for z in (codes, x, y)]
    run(*addresses[:2], N, K, M, addresses[2])
    torch.testing.assert_close(y, step.linear_rows(x, codes, torch.ones(M)), rtol=1e-5, atol=1e-3)


def test_a_bad_number_is_not_hidden_by_a_product():
    x, weight = torch.ones(2, 33), torch.ones(5, 33)
    weight[1, 32], weight[3, 0] = float("nan"), float("inf")
    assert torch.equal(step.linear_rows(x, weight).isfinite(), F.linear(x, weight).isfinite())
    # Codes have no such number: the scale of the group says it.
    x[0, 32], x[1, 0] = float("nan"), float("inf")
    y = step.linear_rows(x, torch.ones(5, 33, dtype=torch.int8), torch.ones(5))
    assert bool(y.isnan().all())


@torch.no_grad()
def test_which_products_are_left_to_torch(monkeypatch):
    served = []

    def recorded(*inputs, run=step.linear_rows):
        y = run(*inputs)
        served.append(y is not None)
        return y

    monkeypatch.setattr(step, "linear_rows", recorded)
    layer = torch.nn.Linear(8, 4, bias=False)
    for x, expected in (
        (torch.ones(8, 8), [True]),
        (torch.ones(2, 4, 8), [True]),
        (torch.ones(9, 8), [False]),
        (torch.ones(0, 8), [False]),
    ):
        served.clear()
        torch.testing.assert_close(apply_linear(layer, x), layer(x))
        assert served == expected
    served.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert apply_linear(layer, torch.ones(1, 8)).dtype == torch.bfloat16
    with torch.enable_grad():
        assert apply_linear(layer, torch.ones(1, 8)).requires_grad
    assert apply_linear(layer.double(), torch.ones(1, 8).double()).dtype == torch.float64
    assert served == [False]


@torch.no_grad()
def test_tokens_of_small_embeddings_follow_the_whole_text():
    """A norm of inputs near √ε depends on ε, and on its place below the root."""
    torch.manual_seed(0)
    config = NalandaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_heads=2)
    model = NalandaForCausalLM(config).eval()
    model.model.embed_tokens.weight.mul_(1e-3 / config.initializer_range)
    prompt = torch.randint(1, 64, (1, 18))
    generated = model.generate(
        prompt, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    whole = model(generated.sequences).logits[0, 17:-1]
    assert distance(torch.cat(generated.logits), whole) < 1e-5
