"""Linear layers of one input as one product: the same numbers as one by one, and never stale weights."""

import copy
import pickle

import pytest
import torch
from covering import covering
from safetensors.torch import load_file, save_file
from tiny_models import build, close, ids, logits
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

from nalanda import NalandaCache, NalandaForCausalLM
from nalanda.model import MIXERS, projections

ROWS = {mixer: {"mixer": mixer} for mixer in MIXERS} | {
    "no convolution": {"mixer": "gated_deltanet", "conv_size": 0},
    "no gate": {"mixer": "gated_deltanet", "use_gate": False},
    "gated": {"mixer": "deltanet", "use_gate": True, "mixer_options": {"num_v_heads": 4}},
    "grouped": {"mixer": "softmax", "mixer_options": {"num_kv_heads": 1}},
}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "linear")
        return function(*args, **(kwargs or {}))


def one_by_one(monkeypatch):
    monkeypatch.setattr(projections, "matrix_of", lambda layer: None)


def gradients(model, dtype=None) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(ids(2, 20), labels=ids(2, 20)).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def generated(model) -> torch.Tensor:
    """Logits of a prompt and two tokens."""
    cache = NalandaCache(len(model.model.layers))
    return torch.cat(
        [logits(model, t, past_key_values=cache) for t in ids(2, 9).split([7, 1, 1], 1)], 1
    )


FROZEN = {"nothing": (), "some": ("q_proj", "mlp.up_proj", "a_proj"), "all": ("_proj", "lm_head")}


@pytest.mark.sampled
@covering(strength=1, row=ROWS, frozen=FROZEN)
def test_one_product_is_one_by_one(row, frozen, monkeypatch):
    model = build(**ROWS[row]).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FROZEN[frozen]))
    with Products() as few:
        mine = gradients(model)
    with monkeypatch.context() as patch, Products() as many:
        one_by_one(patch)
        expected = gradients(model)
    for a, b in zip(mine, expected, strict=True):
        close(a, b, 1e-12 * max(1.0, float(b.abs().max())))
    assert few.count < many.count
    model.eval()
    mine = generated(model)
    one_by_one(monkeypatch)
    close(mine, generated(model), 1e-12 * float(mine.abs().max()))


def test_autocast(monkeypatch):
    """Weights stay fp32, products are bf16."""
    model = build(dtype=torch.float32).train()
    mine = gradients(model, torch.bfloat16)
    one_by_one(monkeypatch)
    for a, b in zip(mine, gradients(model, torch.bfloat16), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


def test_training_keeps_no_copy_of_the_weights():
    model, kept = build(dtype=torch.float32).train(), []
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model.model.layers[0].mixer.project(torch.randn(1, 3, 24, requires_grad=True))
    others = [x for x in kept if x.untyped_storage().data_ptr() not in weights]
    assert [tuple(x.shape) for x in others] == [(3, 24)]


def test_a_token_costs_four_products_a_layer():
    model = build()
    cache = NalandaCache(len(model.model.layers))
    logits(model, ids(1, 5), past_key_values=cache)
    with Products() as products:
        logits(model, ids(1, 1), past_key_values=cache)
    assert products.count == 4 * len(model.model.layers) + 1


def rows(weight):
    """A factor for each: twice the whole of q would be the same model behind the L2 norm."""
    return torch.linspace(1, 2, len(weight), dtype=weight.dtype)[:, None]


def write_into_data(weight):
    weight.data.mul_(rows(weight))


def write_without_gradient(weight):
    with torch.no_grad():
        weight.add_(1)


def replace_data(weight):
    weight.data = weight.data * rows(weight)


def shrink_then_replace(weight):
    whole = weight.data * rows(weight)
    weight.data = weight.data[:1]
    weight.data = whole


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["mixer.q_proj", "mixer.a_proj", "mixer.g_proj", "mlp.up_proj"])
@pytest.mark.parametrize(
    "change", [write_into_data, write_without_gradient, replace_data, shrink_then_replace]
)
def test_the_next_token_sees_a_changed_weight(name, change):
    model = build()
    before = generated(model)
    change(model.model.layers[0].get_submodule(name).weight)
    changed, fresh = generated(model), copy.deepcopy(model)
    assert all(layer.mixer._joined is None for layer in fresh.model.layers)
    close(changed, generated(fresh))
    assert (changed - before).abs().max() > 1e-3


@pytest.mark.parametrize("assign", [False, True])
def test_the_next_token_sees_a_loaded_state(assign):
    model = build()
    before, doubled = generated(model), {n: 2 * x for n, x in model.state_dict().items()}
    model.load_state_dict(doubled, assign=assign)
    fresh = NalandaForCausalLM(model.config).double()
    fresh.load_state_dict(doubled)
    close(generated(model), generated(fresh.eval()))
    assert (generated(model) - before).abs().max() > 1e-3


def test_weights_side_by_side_are_saved_copied_and_moved_one_by_one(tmp_path):
    model = build(dtype=torch.float32)
    expected, mixer = generated(model), model.model.layers[0].mixer
    assert mixer._joined is not None
    parameters = {n: p for n, p in model.state_dict().items() if n.startswith("model.layers.")}
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters.values()
    }
    assert len(storages) == len(parameters)
    assert sum(storages.values()) == sum(p.nbytes for p in parameters.values())
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # refuses shared storage
    for name, x in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(x, model.state_dict()[name])
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert len(pickle.dumps(mixer)) < 1.2 * sum(p.nbytes for p in mixer.parameters()) + 20_000
    for again in copies:
        close(generated(again), expected, 1e-5)
        again.model.layers[0].mixer.q_proj.weight.data.zero_()
        assert torch.equal(generated(model), expected)
    whole = mixer._joined
    assert model.eval().model.layers[0].mixer._joined is whole  # nothing moves twice
    model.double()
    assert mixer._joined.matrix.dtype == torch.float64
    assert mixer._joined.matrix.data_ptr() == mixer.q_proj.weight.data_ptr()
    close(generated(model).float(), expected, 1e-4)


def test_what_is_more_than_a_matrix_runs_by_itself():
    """A hook, a new forward, a parametrisation, a bias: each changes q, in training and in generation."""

    def hook(layer):
        layer.register_forward_hook(lambda module, inputs, output: 2 * output)

    def forward(layer):
        own = layer.forward
        layer.forward = lambda x: 2 * own(x)

    def subclass(layer):
        layer.__class__ = type(
            "Doubled", (torch.nn.Linear,), {"forward": lambda self, x: 2 * x @ self.weight.T}
        )

    def bias(layer):
        layer.bias = torch.nn.Parameter(torch.ones(layer.out_features, dtype=torch.float64))

    def parametrised(layer):
        parametrizations.weight_norm(layer)
        layer.parametrizations.weight.original0.data.mul_(2)

    for change in (hook, forward, subclass, bias, parametrised):
        model = build()
        x = torch.randn(1, 3, 24, dtype=torch.float64)
        mixer = model.model.layers[0].mixer
        before = mixer.project(x)
        change(mixer.q_proj)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                found = mixer.project(x)
            expected = before["q"] + 1 if change is bias else 2 * before["q"]
            close(found["q"], expected)
            close(found["k"], before["k"])
        mixer.eval()
        close(mixer.project(x)["q"], expected)


def test_weights_that_wrappers_keep_elsewhere_are_left_to_them():
    """Replicas of nn.DataParallel have plain tensors in place of parameters; pruning computes the weight."""
    model, tokens = build(dtype=torch.float32), ids(1, 5)
    expected = logits(model, tokens)
    for layer in [m for m in model.modules() if type(m) is torch.nn.Linear]:
        weight = layer._parameters.pop("weight")
        layer.weight = weight.detach()
        assert projections.matrix_of(layer) is None
    torch.testing.assert_close(logits(model.train(), tokens), expected)
    pruned = build(dtype=torch.float32)
    prune.identity(pruned.model.layers[0].mixer.q_proj, "weight")
    torch.testing.assert_close(logits(pruned, tokens), expected)


def test_memory_that_others_hold_stays_where_it_is():
    mixer = build().model.layers[0].mixer
    for layer in mixer.linears().values():
        layer.weight.data = layer.weight.data.clone()
    flat = torch.nn.utils.parameters_to_vector([mixer.q_proj.weight, mixer.k_proj.weight])
    torch.nn.utils.vector_to_parameters(flat, [mixer.q_proj.weight, mixer.k_proj.weight])
    mixer.eval()
    assert mixer.q_proj.weight.data_ptr() == flat.data_ptr()
    mixer = build().model.layers[0].mixer.share_memory()
    mixer.eval()
    assert mixer.q_proj.weight.is_shared()
    meta = build().to("meta").eval().model.layers[0].mixer
    assert meta.project(torch.ones(1, 2, 24, device="meta", dtype=torch.float64))["q"].is_meta


def test_weights_stay_what_they_are_in_inference_mode():
    with torch.inference_mode():
        model, made = build().train().eval(), build()
        assert made.model.layers[0].mixer._joined is not None
        close(generated(made), generated(model))
    assert made.model.layers[0].mixer.q_proj.weight.is_inference()
    with torch.no_grad():
        close(generated(made), generated(model))
    model = build().train()
    model.model.layers[0].mlp.gate_proj.weight.data = model.model.layers[
        0
    ].mlp.gate_proj.weight.data.clone()
    with torch.inference_mode():
        model.eval()
    assert not model.model.layers[0].mlp.gate_proj.weight.is_inference()
    gradients(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_kernel_threads_share_a_large_product_of_one_row(dtype, monkeypatch):
    shapes = []

    def recorded(x, y, bmm=torch.bmm):
        shapes.append((*x.shape, *y.shape))
        return bmm(x, y)

    monkeypatch.setattr(torch, "bmm", recorded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(projections, "by_kernel", lambda *inputs: None)
    torch.manual_seed(0)
    for rows, height in ((1, 2**15), (1, 2**14), (1, 2**15 + 1), (2, 2**15)):
        x, weight = torch.randn(rows, 1, 33, dtype=dtype), torch.randn(height, 33, dtype=dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double())
        y = projections.linear_rows(x, weight)
        assert y.shape == (rows, 1, height)
        assert y.dtype == dtype
        torch.testing.assert_close(
            y.double(), expected, rtol=0, atol=1e-5 if dtype.itemsize == 4 else 0.1
        )
    assert shapes == [
        (8, 1, 33, 8, 33, 2**12)
    ]  # the first alone: smaller, uneven ones and two rows are not
