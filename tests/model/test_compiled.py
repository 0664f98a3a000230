"""torch.compile makes one graph of a model, whatever the mask and the sizes."""

import pytest
import torch
from covering import slow_but_for
from tiny_models import build, close, ids, logits


@pytest.mark.slow
def test_dense_batches_compile_into_one_graph():
    model = build("linear_attention", dtype=torch.float32, num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(ids(2, 9), use_cache=False).logits, logits(model, ids(2, 9)), 1e-5)


@pytest.mark.parametrize("feature_map", slow_but_for([], ["nala", "pola"]))
def test_compiles_where_sizes_and_numbers_may_change(feature_map):
    model = build("gated_deltanet", feature_map=feature_map, num_hidden_layers=1)
    tokens, results = ids(2, 9), []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for function in (model, compiled):
        model.zero_grad()
        loss = function(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for right, mine in zip(*results, strict=True):
        close(mine, right)


@pytest.mark.slow
def test_masked_batches_compile_into_one_graph():
    """Whatever the mask holds: no padding, on the left, the right, in the middle, a row of nothing else."""
    model, tokens = build(["gated_deltanet", "softmax"]), ids(5, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    mask = torch.ones(5, 9, dtype=torch.int64)
    mask[1, :4], mask[2, 6:], mask[3, 2:5], mask[4] = 0, 0, 0, 0
    results = []
    for function in (model, compiled):
        model.zero_grad()
        out = function(tokens, attention_mask=mask, labels=tokens, use_cache=False)
        out.loss.backward()
        results.append(
            [out.loss.detach(), out.logits.detach(), *(p.grad for p in model.parameters())]
        )
    for right, mine in zip(*results, strict=True):
        close(mine, right)
