"""Initial weights are as defined, in every wrapper; a parameter that nothing sets is refused."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tiny_models import build, ids
from transformers import AutoModelForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.model import MIXERS
from nalanda.model.delta import Decay
from nalanda.model.loss import linear_cross_entropy


class Scaled(MIXERS["gated_deltanet"]):
    """A mixer of one's own, with a parameter that nothing else here has."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scale = torch.nn.Parameter(torch.empty(self.V))
        self.taps = torch.nn.Conv1d(2, 2, 3)  # a module that draws its own parameters

    def read_out(self, o, inputs, x):
        return super().read_out(o * self.scale, inputs, x)


def test_a_parameter_that_nothing_sets_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(MIXERS, "scaled", Scaled)
    with pytest.raises(ValueError, match=r"nothing sets scale of Scaled: .* initial\(\)") as error:
        build("scaled")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(
        Scaled, "initial", lambda self: {"scale": torch.full_like(self.scale, 0.5)}, raising=False
    )
    model = build("scaled", dtype=torch.float32)
    assert all((layer.mixer.scale == 0.5).all() for layer in model.model.layers)

    # Also of what a checkpoint leaves out; and what one holds, `initial` need not know.
    weights = model.state_dict()
    absent = [name for name in weights if name.endswith(("mixer.scale", "taps.weight"))]
    assert len(absent) == 4
    model.save_pretrained(
        tmp_path, state_dict={n: x for n, x in weights.items() if n not in absent}
    )
    torch.manual_seed(0)
    again = NalandaForCausalLM.from_pretrained(tmp_path)
    for name, x in again.state_dict().items():
        if name.endswith("taps.weight"):
            assert 0 < x.abs().max() <= 6**-0.5
        else:
            assert torch.equal(x, weights[name])
    model.save_pretrained(tmp_path)
    monkeypatch.delattr(Scaled, "initial")
    assert torch.equal(
        NalandaForCausalLM.from_pretrained(tmp_path).state_dict()[absent[0]], weights[absent[0]]
    )


MANY_HEADS = {
    "vocab_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 256,
    "head_dim": 1,
    "intermediate_size": 8,
}
"""A layer whose decays show their distribution."""


def check_decay(decay: Decay) -> None:
    A, dt = decay.A_log.detach().exp(), F.softplus(decay.dt_bias.detach())
    assert 0 < A.min() < 2
    assert 14 < A.max() <= 16
    assert 0.999e-3 < dt.min() < 2e-3
    assert 0.05 < dt.max() < 0.1001
    # log-uniform: about half of it below the geometric mean
    assert 0.35 < (dt < 0.01).float().mean() < 0.65


def test_decay_starts_as_defined(tmp_path):
    config = NalandaConfig(**MANY_HEADS)
    made = AutoModelForCausalLM.from_config(config)
    check_decay(made.model.layers[0].mixer.decay)
    with torch.device("meta"):
        empty = NalandaForCausalLM(config)
    empty.to_empty(device="cpu").init_weights()
    check_decay(empty.model.layers[0].mixer.decay)
    assert empty.model.layers[0].mixer.o_norm.weight.eq(1).all()
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(
        again.model.layers[0].mixer.decay.A_log, made.model.layers[0].mixer.decay.A_log
    )


@pytest.fixture
def process_group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_decay_stays_as_defined_in_distributed_wrappers(wrapper, process_group, monkeypatch):
    """Wrapped before anything is allocated, then initialised, then trained a step in bf16 compute."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config = NalandaConfig(**MANY_HEADS)
    with torch.device("meta"):
        model = NalandaForCausalLM(config)
    decay, seen = model.model.layers[0].mixer.decay, []
    if wrapper == "fsdp2":
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(decay)  # a unit of its own, whose parameters no policy casts
        fully_shard(model.model.layers[0], mp_policy=half)
        fully_shard(model, mp_policy=half)
    model.to_empty(device="cpu").init_weights()
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if wrapper == "ddp" else model
    whole = [getattr(p, "full_tensor", p.detach)() for p in (decay.A_log, decay.dt_bias)]
    plain = Decay(256)
    plain.load_state_dict({"A_log": whole[0], "dt_bias": whole[1]})
    check_decay(plain)
    decay.register_forward_hook(lambda m, args, out: seen.append((m.A_log.dtype, out.dtype)))
    wrapped.train()
    # Nor do they make the head more than a matrix, whose loss needs all logits at once.
    fused = mock.Mock(side_effect=linear_cross_entropy)
    monkeypatch.setattr("nalanda.model.language.linear_cross_entropy", fused)
    with torch.autocast("cpu", torch.bfloat16, enabled=wrapper == "ddp"):
        wrapped(ids(2, 9) % 8, labels=ids(2, 9) % 8).loss.backward()
    fused.assert_called_once()
    assert seen == [(torch.float32, torch.float32)]
    assert decay.A_log.grad.dtype == torch.float32
