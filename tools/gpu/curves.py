"""Loss curves of the trainer: the demo in bf16 beside a CPU's, and 340 M models for minutes."""

import math
import time
from contextlib import contextmanager
from functools import partial

from gpu.card import OUT_OF_TIME, Card, Case, Values
from gpu.train import (
    DRY,
    FLAGSHIP,
    GATED,
    MICRO_BATCHES,
    SETTINGS,
    Trained,
    find_problems,
    read_lines,
    run_folder,
    run_trainer,
    text_of,
    text_settings,
)

GROUP = "Curves"
RESUMED = 20  # steps behind the checkpoint
AGREES = {"agreement": 0.995}
DRY_DEMO = ["train.steps=4", "train.tokens_per_step=128", "train.micro_batch_size=1", "log.every=1"]
DRY_DEMO += ["model.hidden_size=64", "data.seq_len=64", "validation.every=0"]


def demo_settings(text) -> list[str]:
    """Of the demo on a bundle's text, on a CPU and on a card alike."""
    return ["log.tensorboard=false", "checkpoint.every=0", *text_settings(text)]


def compare_demo(card: Card) -> Values:
    """recipes/demo.yaml in bf16, beside the CPU's losses of the same steps in fp32, which the bundle brings.

    agreement: 1 less the largest relative difference.
    """
    text = text_of(card, "demo")
    settings = demo_settings(text)
    if card.dry:
        settings += DRY_DEMO
        with run_folder(card) as folder:
            on_cpu = run_trainer(card, "demo", folder, *settings)
    else:
        lines = read_lines(card.bundle / "demo.jsonl") if card.bundle else []
        if not lines:
            return {"errors": {"CPU": "the bundle has no demo.jsonl; make it again"}}
        on_cpu = Trained(lines, {})

    settings += ["train.precision=bf16"]
    with run_folder(card) as folder:
        ended = run_trainer(card, "demo", folder, *settings)
    errors = find_problems(card, "demo", ended)
    theirs = on_cpu.losses
    pairs = [(ours, theirs[step]) for step, ours in ended.losses.items() if step in theirs]
    if not pairs:
        return {"errors": errors | {"losses": f"no step to compare: {on_cpu.problem or 'none'}"}}
    values: Values = {"agreement": 1 - max(abs(a / b - 1) for a, b in pairs), "steps": len(pairs)}
    values |= {"last loss": pairs[-1][0], "the CPU's": pairs[-1][1], "curve": points(ended)}
    return values | ({"errors": errors} if errors else {})


def train_for(card: Card, *, recipe: str, minutes: float, resume: bool) -> Values:
    """Trains for minutes, with validation and checkpoints. resume: then 20 steps behind the last checkpoint.

    Two recipes see the same batches.
    """
    T, rows, steps = (32, 1, 4) if card.dry else (2048, 8, 100_000)
    every, held_out = (2, 4) if card.dry else (25, 64)
    settings = [*SETTINGS, *text_settings(text_of(card, "web")), *(DRY if card.dry else ())]
    settings += [f"data.seq_len={T}", f"data.max_validation_rows={held_out}", "log.every=1"]
    settings += ["schedule.warmup_steps=2" if card.dry else "schedule.warmup_steps=20"]
    settings += [f"train.tokens_per_step={MICRO_BATCHES * rows * T}"]
    settings += [f"train.micro_batch_size={rows}", f"validation.every={every}"]
    settings += [f"checkpoint.every={4 * every}", "checkpoint.keep_last=1"]

    values: Values = {}
    with run_folder(card) as folder:
        with ending_in(card, minutes):
            ended = run_trainer(card, recipe, folder, *settings, f"train.steps={steps}")
        if ended.problem == OUT_OF_TIME and ended.losses:
            ended.problem = ""  # as it should: it has saved a checkpoint
        saved = ended.facts.get("saved", 0)
        if resume and saved and not ended.problem:
            more = 2 if card.dry else RESUMED
            ended = run_trainer(card, recipe, folder, *settings, f"train.steps={saved + more}")
            values = {"resumed from step": saved} | jump(ended, saved, more)
    errors = find_problems(card, recipe, ended)
    if resume and not saved:
        errors["resume"] = "no checkpoint was saved"

    losses, validation = ended.losses, ended.validation
    if not losses:
        return {"errors": errors or {"run": "no step"}}
    values |= {"steps": max(losses), "loss": losses[max(losses)], "curve": points(ended)}
    if not all(map(math.isfinite, losses.values())):
        errors["loss"] = "not finite"
    if validation:
        values["validation"] = [*validation.items()]
        values["validation loss"] = validation[max(validation)]
    theirs = dict(card.newest(GROUP, FLAGSHIP).get("validation", ()))
    if recipe != FLAGSHIP and (common := theirs.keys() & validation.keys()):
        values["less the flagship's"] = validation[max(common)] - theirs[max(common)]
    return values | ({"errors": errors} if errors else {})


def jump(ended: Trained, saved: int, steps: int) -> Values:
    """The mean loss of the steps behind a resume, less that of as many before."""
    before = [loss for step, loss in ended.losses.items() if saved - steps < step <= saved]
    after = [loss for step, loss in ended.losses.items() if step > saved]
    if not before or not after:
        return {}
    return {"jump": sum(after) / len(after) - sum(before) / len(before)}


def points(ended: Trained) -> list[tuple[int, float]]:
    return [(step, round(loss, 4)) for step, loss in ended.losses.items()]


@contextmanager
def ending_in(card: Card, minutes: float):
    """Here processes end after the minutes, if the card's time is not over before."""
    end = card.end
    card.end = min(end, time.monotonic() + 60 * minutes)
    try:
        yield
    finally:
        card.end = end


def curve_cases(card: Card) -> list[Case]:
    flagship = partial(train_for, recipe=FLAGSHIP, minutes=5.0, resume=True)
    gated = partial(train_for, recipe=GATED, minutes=2.0, resume=False)
    return [
        Case(GROUP, "demo.yaml in bf16", compare_demo, AGREES),
        Case(GROUP, FLAGSHIP, flagship),
        Case(GROUP, GATED, gated),
    ]
