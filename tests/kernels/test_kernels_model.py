"""Whole models on the kernels: every mixer gives torch's logits, state, gradients and training step."""

from kernel_device import DEVICE, INTERPRETED, interpreted_only  # isort: skip  (before any kernel)

import nalanda_kernels
import pytest
import torch
from covering import slow_but_for
from nalanda_kernels.triton.common import architecture
from tiny_models import build, ids
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from nalanda import NalandaCache
from nalanda.config.schema import OptimConfig
from nalanda.model import MIXERS, projections
from nalanda.model.sequences import Sequences
from nalanda.train import parallel
from nalanda.train.loss import summed_loss
from nalanda.train.optim import build_optimizer

BLOCK = {"rms_norm", "swiglu", "cross_entropy"}  # the kernels of every model
# On a card heads are as wide as in the recipes, so that the compiler takes its tensor cores' widest products.
SHAPE = {"num_hidden_layers": 1} | (
    {} if INTERPRETED else {"hidden_size": 256, "intermediate_size": 512}
)
LENGTHS = (7, 13) if INTERPRETED else (70, 130)  # documents of a row
PROMPT = LENGTHS[0] + 2
KERNELS = {  # the kernels that serve a mixer's tokens; no other kernel may serve them
    "deltanet": {"delta_rule", "short_convs"},
    "gated_deltanet": {"delta_rule", "short_convs"},
    "comba": {"delta_rule", "short_convs", "map_features"},
    "kda": {"delta_rule", "short_convs"},
    "gated_deltanet2": {"delta_rule", "short_convs"},
    "delta_product": {"delta_rule", "short_convs"},
    "rwkv7": {"delta_rule", "short_convs"},
    "mamba2": {"linear_attention", "short_convs"},
    "mamba3": {"linear_attention", "short_convs"},
    "linear_attention": {"normalized_attention", "short_convs"},
    "nala": {"normalized_attention", "short_convs"},
    "mala": {"normalized_attention", "short_convs"},
    "pola": {"normalized_attention", "short_convs"},
    "soft": {"linear_attention", "short_convs"},
    "retention": {"linear_attention"},
    "gla": {"linear_attention"},
    "softmax": set(),
    "forgetting": set(),
    "diag_attention": {"block_attention"},
    "norm_attention": {"linear_attention", "map_features"},
}
# Their kernels serve other mixers too, which are in the quick tests of a model.
SAME_KERNELS = (
    *("deltanet", "gated_deltanet2", "delta_product", "linear_attention", "mala"),
    *("soft", "retention", "mamba3", "softmax", "forgetting"),
)
# In a training step few mixers are quick: with all their kernels but those that `test_every_mixer` runs.
STEPPED = ("gated_deltanet", "gla", "diag_attention", "nala")
# In half precision their kernels do the same for gated_deltanet, nala and mamba2; attention has none of its own.
ALIKE = ("deltanet", "linear_attention", "soft", "retention", "softmax", "forgetting")
NORMS = {"norm_write": True, "norm_read": True}
ROWS = [
    *(
        pytest.param(mixer, {}, marks=pytest.mark.slow if mixer in SAME_KERNELS else ())
        for mixer in MIXERS
    ),
    pytest.param("gated_deltanet", NORMS | {"num_v_heads": 4}, marks=pytest.mark.slow),
    pytest.param("gated_deltanet", NORMS | {"qk_norm": "none"}, marks=pytest.mark.slow),
]


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def count(self, name: str) -> int:
        return self.names.count(name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


unserved = pytest.mark.filterwarnings("ignore:.*feature map Soft")


@pytest.mark.sampled
@unserved
@pytest.mark.parametrize(("mixer", "options"), ROWS, ids=str)
def test_every_mixer(mixer, options, monkeypatch):
    """Packed documents in training, then a prompt and a step of generation."""
    model = build(mixer, dtype=torch.float32, mixer_options=options, **SHAPE).to(DEVICE).train()
    tokens, served = ids(1, sum(LENGTHS)).to(DEVICE), set()
    places = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(DEVICE)
    serve = nalanda_kernels.serve

    def watched(op, *rest, **options):
        result = serve(op, *rest, **options)
        served.update({op} if result is not None else {})
        return result

    monkeypatch.setattr(nalanda_kernels, "serve", watched)

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(tokens, labels=tokens, position_ids=places)
        out.loss.backward()
        grads = [x.grad.clone() for x in model.parameters()]
        cache = NalandaCache(1)
        with torch.no_grad():
            prompt = model(tokens[:, :PROMPT], past_key_values=cache).logits
            step = model(tokens[:, PROMPT : PROMPT + 1], past_key_values=cache).logits
        return [out.loss.detach(), prompt, step, *cache.states[0].values(), *grads]

    with nalanda_kernels.use_backend("torch"):
        expected = results()
    assert not served
    with nalanda_kernels.use_backend("triton"):
        found = results()
    general = {"map_features"} if options else set()  # the fused step knows no norms
    # Blocks of 64 tokens in fp32 run in torch on Hopper, see `block_attention`.
    refused = {"block_attention"} if architecture() == "sm_90" and not INTERPRETED else set()
    assert mixer in KERNELS, "name in KERNELS the kernels that serve it"
    # On a CPU products of few rows have a kernel, too.
    assert (
        served - {"step", "fused_step", "linear_rows", "glu_rows"}
        == (KERNELS[mixer] - refused) | BLOCK | general
    )
    slack = 2e-5 if INTERPRETED else 2e-4
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=slack * max(1.0, float(b.abs().max())))


@pytest.mark.sampled
@unserved
@pytest.mark.parametrize(
    "mixer", slow_but_for(STEPPED, [name for name in MIXERS if name not in ALIKE])
)
def test_a_training_step(mixer):
    """The trainer's step on packed rows under bf16 autocast is as near to fp32 as torch's is."""
    tokens, bounds = ids(1, sum(LENGTHS)), torch.tensor([0, *LENGTHS]).cumsum(0)
    batch, device = (
        {"input_ids": tokens, "labels": tokens, "cu_seqlens": bounds},
        torch.device(DEVICE),
    )

    def step(backend: str, bf16: bool) -> tuple[torch.Tensor, ...]:
        model = build(mixer, dtype=torch.float32, initializer_range=0.1, **SHAPE).to(DEVICE).train()
        optimizer = build_optimizer(model, OptimConfig(lr=1e-3))
        with (
            nalanda_kernels.use_backend(backend),
            torch.autocast(device.type, torch.bfloat16, enabled=bf16),
        ):
            before = summed_loss(model, batch, device) / tokens.numel()
        with nalanda_kernels.use_backend(backend):
            before.backward()
        gradients = [x.grad.clone() for x in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with nalanda_kernels.use_backend("torch"), torch.no_grad():
            return before.detach(), summed_loss(model, batch, device) / tokens.numel(), *gradients

    before, after, *gradients = step("triton", bf16=True)
    expected, later, *exact = step("torch", bf16=False)
    _, _, *rounded = step("torch", bf16=True)
    assert (before - expected).abs() < 5e-3
    assert (after - later).abs() < 0.02 * (expected - later)
    whole = torch.cat([x.flatten() for x in exact]).norm()
    for a, b, c in zip(gradients, exact, rounded, strict=True):
        assert (a - b).norm() < 1.5 * (c - b).norm() + 2e-3 * whole


@interpreted_only
@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["pola", "gla", "diag_attention", "delta_product"])
def test_compiled_blocks_take_the_kernels_without_a_graph_break(mixer):
    """Packed, forward and backward, with a document's number and lengths that change."""
    # DeltaProduct keeps more digits than its inputs have.
    dtype, slack = (torch.bfloat16, 2e-2) if mixer == "delta_product" else (torch.float32, 2e-5)
    options = {"use_forget_gate": True} if mixer == "delta_product" else {}
    model = build(mixer, dtype=dtype, mixer_options=options, num_hidden_layers=1).train()
    tokens, packings = ids(1, 20), ([0, 7, 20], [0, 5, 6, 18, 20])

    def results() -> list[torch.Tensor]:
        found = []
        for bounds in packings:
            model.zero_grad()
            loss = model(
                tokens, labels=tokens, cu_seqlens=torch.tensor(bounds), use_cache=False
            ).loss
            loss.backward()
            found += [loss.detach(), *(x.grad.clone() for x in model.parameters())]
        return found

    torch._dynamo.reset()
    counters.clear()
    with nalanda_kernels.use_backend("triton"):
        expected = results()
        parallel.compile_blocks(parallel.units(model), backend="aot_eager", fullgraph=True)
        found = results()
    assert counters["stats"]["unique_graphs"] == 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=50 * slack, atol=slack * max(1.0, float(b.abs().max()))
        )


@interpreted_only
def test_gradients_of_projections_are_not_copied(monkeypatch):
    """q, k and v have their gradients in one tensor: with the gate's and the narrow ones, three products."""
    monkeypatch.setattr(projections, "NARROW", 8)
    mixer = build(dtype=torch.float32).train().model.layers[0].mixer
    x = torch.randn(1, 20, 24, requires_grad=True)
    with nalanda_kernels.use_backend("triton"):
        y = mixer(x, Sequences())[0]
    with Operators() as seen:
        y.sum().backward()
    assert seen.count("mm") + seen.count("addmm_") == 2 * 3 + 2  # two for o_proj
    assert seen.count("addmm_") == 2
