"""The learning rate as a function of the step, and what decays."""

import math

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from nalanda import NalandaConfig, NalandaForCausalLM
from nalanda.optim import OptimConfig, ScheduleConfig, build_optimizer, learning_rate, parameter_groups


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("cosine", 1, 0.1),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 50 / 100))),
        ("cosine", 110, 0.1),
        ("cosine", 500, 0.1),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("wsd", 88, 1.0),
        ("wsd", 99, 0.1 + 0.9 * (1 - math.sqrt(0.5))),
        ("wsd", 110, 0.1),
        ("inverse_sqrt", 40, 0.5),
        ("constant", 110, 1.0),
    ],
)
def test_schedules(name, step, expected):
    schedule = ScheduleConfig(name=name, warmup_steps=10, min_lr_ratio=0.1, decay_share=0.2)
    assert learning_rate(step, 110, 2.0, schedule) == pytest.approx(2.0 * expected)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 20])
def test_schedules_stay_between_zero_and_the_peak(name, warmup):
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, decay_share=0.5)
    rates = [learning_rate(step, 20, 1.0, schedule) for step in range(1, 21)]
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) > 0.9


def test_only_matrices_decay():
    model = NalandaForCausalLM(NalandaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=2))
    model.model.layers[0].mlp_norm.weight._no_weight_decay = False
    model.lm_head.weight._no_weight_decay = True
    groups = {group["name"]: group for group in parameter_groups(model, 0.1)}
    names = {id(p): name for name, p in model.named_parameters()}
    spared = {names[id(p)] for p in groups["vectors"]["params"]}
    assert groups["vectors"]["weight_decay"] == 0
    assert groups["matrices"]["weight_decay"] == 0.1
    assert "lm_head.weight" in spared
    for part in ("A_log", "dt_bias", "norm"):
        assert any(part in name for name in spared)
    for name, p in model.named_parameters():
        assert (name in spared) == (p.ndim < 2 or name == "lm_head.weight"), name


def test_exponents_and_landmarks_do_not_decay(tmp_path):
    """Also where a checkpoint filled them, which replaces the parameters."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
    for mixer, own in (("pola", ["w", "s"]), ("soft", ["landmarks"]), ("gated_deltanet", ["A_log"])):
        NalandaForCausalLM(NalandaConfig(mixer=mixer, **sizes)).save_pretrained(tmp_path / mixer)
        model = NalandaForCausalLM.from_pretrained(tmp_path / mixer)
        matrices = {id(p) for p in parameter_groups(model, 0.1)[0]["params"]}
        parameters = dict(model.named_parameters())
        for name in own:
            assert not any(id(p) in matrices for n, p in parameters.items() if n.endswith(f".{name}")), name
        assert id(parameters["lm_head.weight"]) in matrices
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    logs = [p for n, p in mamba.named_parameters() if n.endswith("A_log")]
    assert logs[0].ndim == 2
    assert id(logs[0]) not in {id(p) for p in parameter_groups(mamba, 0.1)[0]["params"]}


def test_the_decay_is_what_adamw_applies():
    model = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    before = [p.detach().clone() for p in (model.weight, model.bias)]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.weight, before[0] * 0.95)
    torch.testing.assert_close(model.bias, before[1])
