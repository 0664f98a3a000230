"""recipes/pretrain.py as it stands, with somebody looking over its shoulder and reaching into its arm.

    python paused.py RECIPE [section.key=value ...]          (also under torchrun)

What to do comes as JSON in NALANDA_TORTURE. Everything is a wrapper around a call that is then made as it is:
the trainer, its saves and its data run unchanged.

    folder   where this script writes what it saw
             Always in there, stream-R.jsonl: of every step the rows that the model was given and a hash of
             this rank's weights and moments after it
    pause    {at, path, nth, after_step, rank}: at the n-th call of a kind whose path matches, tell the parent
             (a file `paused` with this process's id) and wait until it kills us or writes a file `go`
    bad      {n: kind}: the n-th training pass of this process gives a nan_loss, a nan_gradient with a sound
             loss, a spike of both, or a gradient_spike with a sound loss
    bad_rank the rank that `bad` strikes; every one by default
    dump     true: what the first step was given and the gradient that came of it, to dump-R.pt
    timeout  seconds after which a server has stalled
    enospc   n: the n-th fsync in checkpoints/ says that the disk is full
    spoil    {nth, kind, rank}: before the n-th save of this rank a weight or a moment becomes "weight nan",
             "moment 1e30", …
    validation  nan or inf: what every validation finds
    clock    true: the clock of the wall jumps by years whenever it is looked at
    group    characters that a stream tokenises at a time: small ones make positions fall within an epoch
"""

import builtins
import errno
import functools
import hashlib
import io
import json
import os
import re
import runpy
import shutil  # noqa: F401  it looks at os.unlink when it is imported
import sys
import time
from pathlib import Path
from typing import Any

ORDERS = json.loads(os.environ["NALANDA_TORTURE"])
FOLDER = Path(ORDERS["folder"])
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PAUSE = ORDERS.get("pause")
step, seen, synced = (
    0,
    0,
    0,
)  # the last finished step; calls that matched the pause; fsyncs of checkpoints


def arrive(at: str, path: object = "") -> None:
    """Waits here if this is the call that the parent asked for."""
    global seen
    if not PAUSE or PAUSE["at"] != at or PAUSE.get("rank", RANK) != RANK:
        return
    if step < PAUSE.get("after_step", 0) or not re.search(PAUSE.get("path", ""), str(path)):
        return
    seen += 1
    if seen == PAUSE.get("nth", 1):
        part = FOLDER / f".paused-{RANK}"
        part.write_text(f"{os.getpid()}\n{at} {path} after step {step}")
        part.rename(FOLDER / "paused")
        while not (FOLDER / "go").exists():
            time.sleep(0.002)


def around(owner: object, name: str, at: str, path_of) -> None:
    """`owner.name` with a pause before the call and one after it."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def paused(*arguments, **keywords):
        path = path_of(*arguments, **keywords)
        arrive(at, path)
        result = call(*arguments, **keywords)
        arrive(f"{at} done", path)
        return result

    setattr(owner, name, paused)


def of_descriptor(descriptor) -> str:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    return os.readlink(f"/proc/self/fd/{number}")


open_file = io.open


@functools.wraps(open_file)
def opened(file, mode="r", *arguments, **keywords):
    if not set("wax") & set(mode) or "/checkpoints/" not in str(file):
        return open_file(file, mode, *arguments, **keywords)
    arrive("open", file)
    stream = open_file(file, mode, *arguments, **keywords)
    around(stream, "write", "write", lambda content: file)
    return stream


builtins.open = io.open = opened
around(os, "fsync", "fsync", of_descriptor)
for name in ("rename", "replace"):
    around(os, name, "rename", lambda source, target, **_: f"{source} -> {target}")
for name in ("unlink", "rmdir", "remove"):  # shutil.rmtree calls them with a name and dir_fd
    around(
        os,
        name,
        "remove",
        lambda path, dir_fd=None: f"{of_descriptor(dir_fd)}/{path}" if dir_fd else path,
    )
if "enospc" in ORDERS:
    sync = os.fsync

    def full(descriptor):
        global synced
        synced += "/checkpoints/" in of_descriptor(descriptor)
        if synced == ORDERS["enospc"]:
            synced += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sync(descriptor)

    os.fsync = full

if ORDERS.get("clock"):
    wall, looks = time.time, 0

    def jumping() -> float:
        global looks
        looks += 1
        return wall() + (-1) ** looks * 3e8

    time.time = jumping

import torch  # noqa: E402

from nalanda.data import hashes, packing  # noqa: E402
from nalanda.storage import http  # noqa: E402
from nalanda.train import build, checkpoint, log, loss  # noqa: E402

around(hashes, "hash_file", "hash", lambda path, *_: path)
if "group" in ORDERS:
    packing.STREAM_GROUP = ORDERS["group"]
if "timeout" in ORDERS:
    http.TIMEOUT = (ORDERS["timeout"],) * 2

rows: list[list] = []  # of the step that is under way
batches: list[dict] = []
passes = 0  # training passes of this process


def looked_at(model, arguments, keywords):
    """Before every pass of the model."""
    global passes
    if not (model.training and torch.is_grad_enabled()):
        arrive("validation")
        return
    passes += 1
    tokens = arguments[0] if arguments else keywords["input_ids"]
    context = keywords.get("context")
    if context is None or context.rank == 0:  # the others of a context are given the same rows
        rows.extend(tokens.tolist())
    if ORDERS.get("dump") and step == 0:
        kept = {k: v.cpu() for k, v in keywords.items() if k in ("labels", "cu_seqlens")}
        batches.append({"input_ids": tokens.cpu(), **kept})
    arrive("forward")


def spoiled(model, arguments, output):
    """After every pass of the model."""
    kind = ORDERS.get("bad", {}).get(str(passes))
    if kind is None or not (model.training and torch.is_grad_enabled()):
        return
    if ORDERS.get("bad_rank", RANK) != RANK:
        return
    if kind == "nan_loss":
        output.loss = output.loss * float("nan")
    elif kind == "spike":
        output.loss = output.loss * 1e9
    else:
        factor = float("nan") if kind == "nan_gradient" else 1e9
        output.loss.register_hook(lambda gradient: gradient * factor)


models, optimizers = [], []
build_model, build_optimizer = build.build_model, build.build_optimizer


def watched_model(*arguments, **keywords):
    model = build_model(*arguments, **keywords)
    model.register_forward_pre_hook(looked_at, with_kwargs=True)
    model.register_forward_hook(spoiled)
    models.append(model)
    return model


def watched_optimizer(*arguments, **keywords):
    optimizer = build_optimizer(*arguments, **keywords)
    if ORDERS.get("dump"):
        optimizer.register_step_pre_hook(dumped)
    optimizers.append(optimizer)
    return optimizer


def dumped(optimizer, arguments, keywords):
    if step == 0:
        named = dict(models[0].named_parameters())
        weights = {name: p.detach().clone() for name, p in named.items()}
        gradients = {name: p.grad for name, p in named.items()}
        torch.save(
            {"batches": batches, "weights": weights, "gradients": gradients},
            FOLDER / f"dump-{RANK}.pt",
        )


def fingerprint() -> str:
    """Of the weights and moments, as far as this rank has them."""
    found = hashlib.sha256()
    for name, parameter in models[0].named_parameters():
        state = optimizers[0].state.get(parameter, {})
        for key, tensor in [(name, parameter), *sorted(state.items())]:
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                found.update(key.encode() + local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


if spoil := ORDERS.get("spoil"):
    saves, unsound = 0, checkpoint.Saver.unsound

    def spoiling(saver, model, optimizer):
        global saves
        saves += 1
        if saves == spoil["nth"] and spoil["rank"] == RANK:
            weight = next(p for p in model.parameters() if p.ndim == 2)
            what, value = spoil["kind"].split()
            tensor = weight.data if what == "weight" else optimizer.state[weight]["exp_avg_sq"]
            tensor.view(-1)[5] = float(value)
        return unsound(saver, model, optimizer)

    checkpoint.Saver.unsound = spoiling
if "validation" in ORDERS:
    loss.loss_sums = lambda *_: (float(ORDERS["validation"]), 100)

build.build_model, build.build_optimizer = watched_model, watched_optimizer
RunLog: Any = log.RunLog
finish_step, tell = RunLog.advance, getattr(RunLog, "event", None)
stream = (FOLDER / f"stream-{RANK}.jsonl").open("a")


def noted(self, number, *arguments, **keywords):
    global step
    step = number
    entry = {"step": number, "world": WORLD, "rows": rows, "state": fingerprint()}
    stream.write(json.dumps(entry) + "\n")
    stream.flush()
    rows.clear()
    return finish_step(self, number, *arguments, **keywords)


def told(self, number, what, *arguments, **keywords):
    if what == "rollback":
        rows.clear()
    return tell(self, number, what, *arguments, **keywords)


RunLog.advance = noted
if tell:
    RunLog.event = told

if __name__ == "__main__":
    script = Path(__file__).parents[2] / "recipes" / "pretrain.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
