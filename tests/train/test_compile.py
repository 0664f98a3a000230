"""`train.compile`: a block is one graph, for every packing, and trains as it does eagerly."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

from nalanda import NalandaConfig
from nalanda.config.schema import OptimConfig
from nalanda.model.mixers import MIXERS
from nalanda.train import parallel
from nalanda.train.optim import build_optimizer

ROWS, LENGTH, VOCABULARY = 2, 20, 64
PACKINGS = ([0, 20, 40], [0, 7, 20, 31, 40], [0, 1, 2, 20, 21, 25, 35, 40], [0, 13, 20, 39, 40])


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def build(mixer: str | list[str], **options) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    config = NalandaConfig(mixer=mixer, num_hidden_layers=2, **sizes, **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def both(mixer: str | list[str], backend: str, **options) -> list[PreTrainedModel]:
    """A model, and its twin with compiled blocks."""
    models = [build(mixer, **options) for _ in range(2)]
    parallel.compile_blocks(parallel.units(models[1]), backend=backend, fullgraph=True)
    return models


def batch(step: int, rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(step))


def loss_of(model: PreTrainedModel, step: int, **packing) -> tuple:
    """The loss after its backward pass, and the output."""
    tokens = batch(step)
    out = model(tokens, labels=tokens, num_items_in_batch=40, use_cache=False, **packing)
    model.zero_grad()
    out.loss.backward()
    return out.loss.detach(), out


def assert_same_gradients(eager: PreTrainedModel, compiled: PreTrainedModel) -> None:
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("mixer", MIXERS)
def test_one_graph_serves_all_packings_and_layers(mixer):
    eager, compiled = both(mixer, "eager", **{"mixer_options": {"block_size": 8}} if mixer == "diag_attention" else {})
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, bounds in enumerate(PACKINGS):
            packing = {"cu_seqlens": torch.tensor(bounds)}
            right, mine = (loss_of(model, step, **packing)[0] for model in (eager, compiled))
            torch.testing.assert_close(mine, right)
            assert_same_gradients(eager, compiled)
    assert counters["stats"]["unique_graphs"] == 1
