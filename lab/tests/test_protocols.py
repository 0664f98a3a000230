"""How recall and Long Range Arena train, choose and score: no choice on test rows."""

import dataclasses

import numpy as np
import torch
from nalanda_lab import lra, recall
from nalanda_lab.lra_data import QUICK_ARENA
from nalanda_lab.recall import Training, run_recall
from nalanda_lab.synthetic import MQAR

TINY = {
    "mixer": "deltanet",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 1,
    "head_dim": 8,
}
TINY |= {"intermediate_size": 32}


def test_rates_are_not_chosen_on_the_test(monkeypatch):
    splits, scored, batch, evaluate = {}, [], MQAR.batch, recall.evaluate_recall

    def noted(self, draw, n, split, case):
        rows = batch(self, draw, n, split, case)
        splits[id(rows[1])] = (split, rows)  # kept alive
        return rows

    def look(net, batches):
        modes = []
        hook = net.model.register_forward_pre_hook(lambda m, *_: modes.append(m.training))
        found = evaluate(net, batches)
        hook.remove()
        scored.append(
            (
                {splits.get(id(labels), ("part",))[0] for _, labels in batches},
                set(modes),
                net.training,
            )
        )
        return found

    monkeypatch.setattr(MQAR, "batch", noted)
    monkeypatch.setattr(recall, "evaluate_recall", look)
    clip, norms = torch.nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda p, m: norms.append(m) or clip(p, m)
    )
    build, rate, made, rates = recall.build_optimizer, recall.learning_rate, [], []
    monkeypatch.setattr(recall, "build_optimizer", lambda *a: made.append(build(*a)) or made[0])
    monkeypatch.setattr(recall, "learning_rate", lambda *a: rates.append(rate(*a)) or rates[-1])
    training = Training(steps=20, batch_size=4, rows=4, points=1, weight_decay=0.3)
    run_recall(TINY, MQAR(pairs=(1, 2), sequence=8, values=4), 0, training)
    assert scored == [
        ({"part"}, {False}, True),
        ({"test"}, {False}, True),
        ({"validation"}, {False}, True),
    ]
    assert norms == [1.0] * 20
    assert {g["weight_decay"] for g in made[0].param_groups} == {0.0, 0.3}
    assert rates[:2] == [1.5e-3, 3e-3]
    assert rates[-1] < 1e-3


def test_the_weights_that_are_tested_are_the_best_in_validation(tmp_path, monkeypatch):
    task = dataclasses.replace(QUICK_ARENA["image"], rows=(40, 10, 12))
    draw, arrays = np.random.default_rng(0), {}
    for split, count in zip(("train", "validation", "test"), task.rows, strict=True):
        arrays[f"{split}_ids"] = draw.integers(1, 9, (count, 16)).astype(np.uint8)
        arrays[f"{split}_labels"] = draw.integers(1, 9, count)
    np.savez(tmp_path / "a.npz", **arrays)
    seen, answers = [], iter([0.1, 0.9, *[0.2] * 8, 0.5])

    def fake(net, ids, labels, batch):
        seen.append((len(ids), torch.cat([p.detach().flatten() for p in net.parameters()]).clone()))
        return next(answers)

    rate, rates = lra.learning_rate, []
    monkeypatch.setattr(lra, "learning_rate", lambda *a: rates.append(rate(*a)) or rates[-1])
    monkeypatch.setattr(lra, "accuracy", fake)
    model = {"mixer": "mala", "mixer_options": {}, "feature_map": "elu1"}
    record = lra.run_lra(model, task, tmp_path / "a.npz", "quick", 0, 10)
    assert [n for n, _ in seen] == [10] * 10 + [12]
    assert torch.equal(seen[-1][1], seen[1][1])
    assert not torch.equal(seen[-1][1], seen[9][1])
    assert record["accuracy"] == 0.5
    assert (rates[0], rates[-1]) == (3e-3, 0)
    assert rates == sorted(rates, reverse=True)


def test_accuracy_is_without_dropout():
    net = torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.Linear(8, 4))
    modes = []
    net.register_forward_pre_hook(lambda m, *_: modes.append(m.training))
    lra.accuracy(net, torch.randn(6, 8), torch.zeros(6, dtype=torch.int64), 3)
    assert modes == [False, False]
    assert net.training
