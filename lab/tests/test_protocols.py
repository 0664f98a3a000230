"""How recall trains, chooses and scores: no choice on test rows."""

import torch
from nalanda_lab import recall
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
