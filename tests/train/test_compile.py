"""`train.compile`: a block is one graph for all packings and layers, and trains as it does eagerly."""

import pytest
import torch
from covering import slow_but_for
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from nalanda import NalandaConfig
from nalanda.config.model import language_model
from nalanda.config.schema import OptimConfig
from nalanda.model.mixers import MIXERS
from nalanda.train import parallel
from nalanda.train.optim import build_optimizer

ROWS, LENGTH, VOCABULARY = 2, 20, 64
PACKINGS = ([0, 20, 25, 40], [0, 7, 20, 31, 40], [0, 1, 2, 20, 21, 25, 35, 40], [0, 13, 20, 39, 40])
QUICK = ("gated_deltanet", "retention", "softmax", "diag_attention")
EVERY = [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in MIXERS]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def both(
    mixer: str | list[str], backend: str, fullgraph: bool = True, **options
) -> list[PreTrainedModel]:
    """A model, and its twin with compiled blocks."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    config = NalandaConfig(mixer=mixer, num_hidden_layers=2, **sizes, **options)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(language_model(config).from_config(config, dtype=torch.float32).train())
    parallel.compile_blocks(parallel.units(models[1]), backend=backend, fullgraph=fullgraph)
    return models


def run(model: PreTrainedModel, step: int, **packing):
    """The output after its backward pass. Tokens depend on the step alone."""
    tokens = torch.randint(
        VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    model.zero_grad()
    out = model(tokens, labels=tokens, num_items_in_batch=40, use_cache=False, **packing)
    out.loss.backward()
    return out


def assert_same(eager: PreTrainedModel, compiled: PreTrainedModel, step: int, **packing) -> None:
    """The loss and every gradient."""
    right, mine = (run(model, step, **packing).loss for model in (eager, compiled))
    torch.testing.assert_close(mine, right)
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        # A gradient whose terms cancel, such as that of SOFT's queries, is rounding.
        close = torch.allclose(
            b.grad, a.grad, rtol=1e-3, atol=max(1e-6, 1e-4 * float(a.grad.abs().max()))
        )
        assert close, f"{name}: {(a.grad - b.grad).abs().max():.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("mixer", slow_but_for(["mala"], ["mala", "soft", "softmax"]))
def test_encoders_compile_around_packed_sums(mixer):
    """Those that see both ways at once group packed rows eagerly; no packing compiles anew."""
    models = both(mixer, "eager", fullgraph=False, is_decoder=False)
    for step, starts in enumerate(PACKINGS):
        assert_same(*models, step, cu_seqlens=torch.tensor(starts))
        if step == 1:  # the second may turn a size into a symbol
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.parametrize("mixer", EVERY)
def test_one_graph_serves_all_packings_and_layers(mixer):
    options = {"mixer_options": {"block_size": 8}} if mixer == "diag_attention" else {}
    models = both(mixer, "eager", **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, bounds in enumerate(PACKINGS):
            assert_same(*models, step, cu_seqlens=torch.tensor(bounds))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [m for m in QUICK if m != "diag_attention"])
def test_backward_passes_and_recomputation(mixer):
    """The operators' backward, which autograd does not see; packed and dense."""
    models = both(mixer, "aot_eager")
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for step, bounds in enumerate(PACKINGS):
        assert_same(*models, step, cu_seqlens=torch.tensor(bounds))
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(*models, 0)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_row_states_pass_through_compiled_blocks():
    models, outs = both("gated_deltanet", "aot_eager"), [None, None]
    for step, bounds in enumerate(PACKINGS):
        carried = torch.tensor([step > 0, step > 1]) if step else None
        for i, model in enumerate(models):
            states = outs[i] and outs[i].carried_cache
            packing = {
                "cu_seqlens": torch.tensor(bounds),
                "carried_cache": states,
                "carried": carried,
            }
            outs[i] = run(model, step, return_carried_cache=True, **packing)
        torch.testing.assert_close(outs[1].loss, outs[0].loss)
        for right, mine in zip(*(out.carried_cache.states for out in outs), strict=True):
            for name, x in right.items():
                torch.testing.assert_close(mine[name], x, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2  # with states and without


def test_compiled_blocks_hand_on_packed_tokens():
    """A compiled form is nobody who looks at a layer's shapes; a hook beside it is."""
    _, model = both("gated_deltanet", "eager")
    assert not model.model.is_observed()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert model.model.is_observed()


def test_evaluation_stays_eager():
    _, model = both("gated_deltanet", "eager")
    with torch.no_grad():
        model.eval()(torch.ones(1, 9, dtype=torch.int64))
    assert not counters["stats"]


@pytest.mark.parametrize(
    ("asked", "device", "answer"),
    [("auto", "cuda", True), ("auto", "cpu", False), (True, "cpu", True), (False, "cuda", False)],
)
def test_who_compiles(asked, device, answer):
    assert parallel.compiles(asked, torch.device(device)) is answer


@pytest.mark.slow
def test_twenty_steps_have_the_losses_of_eager_ones():
    """With inductor, in bf16; meanwhile the loss falls by 3."""
    curves = []
    for model in both("gated_deltanet", "inductor"):
        optimizer, losses = build_optimizer(model, OptimConfig(lr=1e-2)), []
        for step in range(20):
            with torch.autocast("cpu", torch.bfloat16):
                out = run(model, 0, cu_seqlens=torch.tensor(PACKINGS[step % len(PACKINGS)]))
            optimizer.step()
            losses.append(out.loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] - 2
    assert curves[1] == pytest.approx(curves[0], abs=0.03)


def test_a_kernel_that_does_not_fit_the_card_ends_a_run_in_one_line():
    from triton.runtime.errors import OutOfResources

    from nalanda.common.errors import InputError
    from nalanda.train.needs import explain_out_of_memory

    line = r"^a kernel does not fit this card: .*shared memory.*; set NALANDA_BACKEND=torch$"
    with pytest.raises(InputError, match=line), explain_out_of_memory(None):
        raise OutOfResources(200_000, 101_376, "shared memory")
