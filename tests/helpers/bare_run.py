"""Steps of the trainer, as its loop takes them, without data, log, guards and a folder."""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nalanda.config.schema import OptimConfig, ScheduleConfig
from nalanda.train.ema import Averages
from nalanda.train.optim import loss_scale
from nalanda.train.run import TrainerState
from nalanda.train.step import Judgement, Step, apply, forward_backward

CPU = torch.device("cpu")


def accelerator_of(alike: int) -> Any:
    """An accelerator of several processes with the same rows, of which only this one exists."""
    return SimpleNamespace(
        num_processes=alike,
        device=CPU,
        backward=torch.Tensor.backward,
        reduce=lambda tensor: alike * tensor,
    )


def bare_run(
    model: Any,
    optimizer: torch.optim.Optimizer,
    accelerator: Any,
    wrapped: Any = None,
    beat: Callable[[str], None] = lambda _: None,
    **optim: Any,
) -> Any:
    """What `forward_backward` and `apply` read of a `Run`, at a constant rate.

    wrapped: the model as it is called; itself by default. beat: told of each micro-batch. optim: of `OptimConfig`.
    """
    train = SimpleNamespace(z_loss=0.0, tokens_per_step=0)
    schedule = ScheduleConfig(name="constant", warmup_steps=0)
    return SimpleNamespace(
        config=SimpleNamespace(train=train, optim=OptimConfig(**optim), schedule=schedule),
        model=model.train(),
        wrapped=model if wrapped is None else wrapped,
        optimizer=optimizer,
        accelerator=accelerator,
        at=TrainerState(),
        facts={},
        scaler=loss_scale("fp32", CPU),
        sharing=SimpleNamespace(context=None),
        averages=Averages(model, []),
        stage=SimpleNamespace(schedule_begin=0, schedule_end=100),
        signals=SimpleNamespace(received=[]),
        sums=SimpleNamespace(finished=True, problem=None),
        saver=SimpleNamespace(failed=False),
        speed=SimpleNamespace(add=lambda _: None),
        rank_times=SimpleNamespace(reading=contextlib.nullcontext, end_step=lambda: None),
        watchdog=SimpleNamespace(beat=beat),
        note_saved=lambda: None,
        carried_states=None,
        masking=None,
        teacher=None,
    )


def add_gradients(run: Any, micro_batches: list[dict[str, Tensor]]) -> Step:
    """The next step on these micro-batches, up to its gradients."""
    run.batches, run.accumulation = iter(micro_batches), len(micro_batches)
    return forward_backward(run)


def update(run: Any, step: Step) -> None:
    """Updates the weights, as after a good step."""
    apply(run, step, Judgement("good"))
