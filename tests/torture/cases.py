"""The cases. A docstring is the invariant; what is returned is the figure; what does not hold raises."""

import contextlib
import hashlib
import http.server
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import buckets
import torch
import zstandard
from harness import (
    PATIENCE,
    Torn,
    Trainer,
    checkpoints,
    documents,
    finish,
    lines,
    make_recipe,
    need,
    notes,
    rows_given,
    same,
    stream,
    tensors,
)
from safetensors.torch import load_file, save_file
from training import PRETRAIN

from nalanda.common.files import manifest_text, verify_manifest
from nalanda.config.load import load_config
from nalanda.data.documents import hash_text
from nalanda.data.inspect import check_set
from nalanda.data.token_set import TokenSet, is_token_set
from nalanda.report.verify import verify
from nalanda.train import tensor_files
from nalanda.train.build import build_model
from nalanda.train.checkpoint_dir import latest_checkpoint


@dataclass
class Work:
    """Where the cases work, and the runs that nothing interrupts, made when first asked for."""

    folder: Path
    seed: int = 0
    quick: bool = False
    locks: dict[str, threading.Lock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe = make_recipe(self.folder)

    @property
    def steps(self) -> int:
        return 28 if self.quick else 80

    def run(self, name: str) -> Path:
        return self.folder / name

    def whole(self, *overrides: str, processes: int = 1) -> Path:
        name = hashlib.sha256(repr((overrides, processes)).encode()).hexdigest()[:8]
        run = self.run(f"whole-{name}")
        with self.locks.setdefault(name, threading.Lock()):
            if not (run / "final").exists():
                finish(
                    self.recipe, run, f"train.steps={self.steps}", *overrides, processes=processes
                )
        return run


def trained(run: Path) -> int:
    """The last step with a line in metrics.jsonl, also while somebody writes there."""
    steps = [line["step"] for line in lines(run) if "loss" in line]
    return steps[-1] if steps else 0


def check_saved(run: Path) -> None:
    """Every folder that has a checkpoint's name is whole."""
    for path in checkpoints(run).values():
        need((problem := verify_manifest(path)) is None, f"{path.name}: {problem}")


def loss_error(run: Path, expected: Path, limit: float) -> float:
    a, b = (
        {line["step"]: line["loss"] for line in lines(r) if "loss" in line} for r in (run, expected)
    )
    need(a.keys() == b.keys(), "metrics of other steps")
    error = max(abs(a[step] - b[step]) / abs(b[step]) for step in b)
    need(error <= limit, f"losses differ by {error:.1e}")
    return error


# ------------------------------ kills

SAVE = r"checkpoints/\.tmp-step-\d+"
POINTS = (
    {"at": "open", "path": rf"{SAVE}/"},
    {"at": "write done", "path": rf"{SAVE}/model", "nth": 5},
    {"at": "fsync", "path": rf"{SAVE}/optimizer"},
    {"at": "fsync done", "path": rf"{SAVE}/trainer"},
    {"at": "fsync", "path": rf"{SAVE}/manifest"},
    {"at": "rename", "path": rf"{SAVE} -> "},
    {"at": "rename done", "path": rf"{SAVE} -> "},
    {"at": "rename done", "path": rf"/step-\d+ -> .*{SAVE}"},
)


def sigkill(work: Work) -> str:
    """The trainer is killed at random moments, and before and after write, fsync and rename of a save.

    The finished run equals an uninterrupted one. Every folder step-N is a whole checkpoint.
    """
    draw, run = random.Random(work.seed), work.run("sigkill")
    settings = f"train.steps={work.steps}", "checkpoint.every=4"
    points = [POINTS[1], POINTS[5]] if work.quick else list(POINTS)
    kills = [*points, *["step"] * (1 if work.quick else 10), *["time"] * (0 if work.quick else 2)]
    draw.shuffle(kills)
    lost = 0
    for kill in kills:
        saved = max(checkpoints(run), default=0)
        # Retention has nothing to do before the third checkpoint.
        orders = {"pause": {**kill, "after_step": max(saved, 9)}} if isinstance(kill, dict) else {}
        with Trainer(work.recipe, run, *settings, **orders) as trainer:
            if orders:
                trainer.paused()
            elif kill == "time":
                time.sleep(draw.uniform(0.1, 8))
            else:
                target = saved + draw.randint(1, 5)
                # It has taken the lost steps' lines out of the metrics when it prints one of its own.
                trainer.until(
                    lambda: "\nstep " in trainer.text and trained(run) >= target,  # noqa: B023
                    f"step {target}",
                )
                time.sleep(draw.uniform(0, 0.15))
            trainer.kill()
            need(trainer.process.returncode == -signal.SIGKILL, "it ended before it was killed")
        lost += trained(run) - max(checkpoints(run), default=0)
        check_saved(run)
    finish(work.recipe, run, *settings)
    count = f"{len(kills)} kills, {len(points)} of them within saves; {lost} steps lost and made again; "
    return count + same(run, work.whole())


def retention(work: Work) -> str:
    """The trainer is killed while it removes old checkpoints.

    A partly removed checkpoint is never loaded, and is cleared away. In the end exactly the last k and every
    n-th are there.
    """
    run = work.run("retention")
    moments = (
        {"at": "rename done", "path": r"/step-7 -> "},
        {"at": "remove done", "path": r"tmp-step-14[^/]*/"},
        {"at": "remove", "path": r"tmp-step-21[^/]*$"},
    )
    for pause in moments:
        with Trainer(work.recipe, run, pause=pause) as trainer:
            _, where = trainer.paused()
            trainer.kill()
        need(list((run / "checkpoints").glob(".tmp-*")), f"{where}: nothing is left half removed")
        check_saved(run)
    finish(work.recipe, run)
    left = sorted(p.name for p in (run / "checkpoints").iterdir())
    need(left == ["step-35", "step-70", "step-77", "step-80"], left)
    return f"{len(moments)} kills; left: {', '.join(left)}; " + same(run, work.whole())


def killed_in_validation(work: Work) -> str:
    """The trainer is killed within a validation, and within that of the last step.

    The checkpoints before are whole. The run equals an uninterrupted one, validations included.
    """
    run, saved = work.run("validation-killed"), []
    for step in (15, work.steps):
        pause = {"at": "validation", "nth": 2, "after_step": step}
        with Trainer(work.recipe, run, f"train.steps={work.steps}", pause=pause) as trainer:
            _, where = trainer.paused()
            trainer.kill()
        need(where.strip().endswith(f"after step {step}"), f"killed elsewhere: {where}")
        check_saved(run)
        saved.append(max(checkpoints(run)))
    need(saved == [14, work.steps], f"saved before the kills: {saved}")
    finish(work.recipe, run, f"train.steps={work.steps}")
    return f"2 kills, behind steps 15 and {work.steps}; {same(run, work.whole())}"


def prepare(work: Work, source: str, output: Path, *options: str) -> subprocess.Popen:
    """`nalanda data prepare` of one of the two sources, with the tokenizer of the uninterrupted run."""
    command = [str(Path(sys.executable).with_name("nalanda")), "data", "prepare"]
    tokenizer = work.whole() / "tokenizer"
    command += [
        str(work.folder / "corpus" / source),
        str(output),
        "--tokenizer",
        str(tokenizer),
        *options,
    ]
    return subprocess.Popen(
        [*command, "--validation-share", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def mixture(folder: Path) -> str:
    """The recipe's two sources, taken from `folder`."""
    parts = (
        f"{{name: {n}, source: {folder / n}, weight: {w}}}" for n, w in (("web", 2), ("code", 1))
    )
    return f"data.mixture=[{', '.join(parts)}]"


def prepared(work: Work) -> tuple[str, ...]:
    """The settings of a run whose two sources are prepared sets."""
    with work.locks.setdefault("prepared", threading.Lock()):
        for source in ("web", "code"):
            output = work.folder / "prepared" / source
            if not output.exists():
                process = prepare(work, source, output, "--workers", "1")
                text, _ = process.communicate()
                need(process.returncode == 0, text[-600:])
    return mixture(work.folder / "prepared"), f"tokenizer={work.whole() / 'tokenizer'}"


def resumes(work: Work) -> str:
    """A run on a mixture of prepared sets is resumed three times an epoch.

    Each row comes once an epoch. The run equals an uninterrupted one.
    """
    run, settings = work.run("resumes"), prepared(work)
    stops = range(8, work.steps, 8)
    for stop in stops:
        with Trainer(work.recipe, run, "checkpoint.every=4", *settings) as trainer:
            trainer.until(lambda: stop in checkpoints(run), f"checkpoint {stop}")  # noqa: B023
            trainer.kill()
    finish(work.recipe, run, *settings)
    equal = same(run, work.whole(*settings), prepared=True)
    said = []
    for source, counts in rows_given(run).items():
        rows = TokenSet(work.folder / "prepared" / source, "train").tokens // 64
        need(len(counts) == rows, f"{source}: {len(counts)} rows of {rows} were trained on")
        epochs = sum(count for _, count in counts.values()) / rows
        need(len(stops) >= 3 * int(epochs), f"{len(stops)} resumes in {epochs} epochs")
        said.append(f"{epochs:.1f} epochs of {rows} rows of {source}")
    return f"{len(stops)} resumes in {' and '.join(said)}; {equal}"


def workers(work: Work) -> str:
    """A run is killed three times and goes on with 0, 1 or 2 data workers. Then only the trainer is killed.

    The run equals one with a fixed number of workers. No worker outlives the trainer.
    """
    run = work.run("workers")
    for count, target in ((2, 20), (0, 40), (2, 60)):
        with Trainer(work.recipe, run, f"data.workers={count}") as trainer:
            trainer.until(lambda: trained(run) >= target, f"step {target}")  # noqa: B023
            members = len(trainer.members())
            need(members == 1 + count * (count > 1), f"{members} processes with {count} workers")
            os.kill(trainer.process.pid, signal.SIGKILL)
            trainer.process.wait()
            deadline = time.monotonic() + 20
            while left := trainer.members():
                need(time.monotonic() < deadline, f"still there after their trainer: {left}")
                time.sleep(0.05)
    finish(work.recipe, run, "data.workers=1")
    return f"2 → 0 → 2 → 1 workers; no process left behind; {same(run, work.whole())}"


def preparation(work: Work) -> str:
    """`nalanda data prepare` is killed twice while it writes, and goes on with another number of workers.

    The set has the same bytes as without the kills.
    """
    expected = work.folder / "prepared" / "web"
    prepared(work)
    output = work.folder / "prepared-killed"
    for number in (1, 2):
        process = prepare(work, "web", output, "--workers", str(number))
        deadline = time.monotonic() + 60
        wanted = number  # files of tokens, whole or half
        while process.poll() is None and time.monotonic() < deadline:
            if len([p for p in output.rglob("*") if p.is_file()]) >= wanted:
                break
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    need(not (output / "index.json").exists(), "it had finished before it was killed")
    process = prepare(work, "web", output, "--workers", "2")
    text, _ = process.communicate()
    need(process.returncode == 0, text[-600:])
    sums = [
        {
            p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in folder.rglob("*")
            if p.is_file()
        }
        for folder in (expected, output)
    ]
    need(
        sums[0] == sums[1],
        f"other files: {sorted(map(str, dict(sums[0].items() ^ sums[1].items())))}",
    )
    return f"2 kills, 1 and 2 workers; sha256 of {len(sums[0])} files equal"


def carrying(work: Work) -> tuple[str, ...]:
    """The settings of a run of 40 steps whose long documents continue from row to row."""
    prepared(work)
    return (
        "data.mixture=[]",
        f"data.source={work.folder / 'prepared' / 'code'}",
        f"tokenizer={work.whole() / 'tokenizer'}",
        "data.long_documents=carry",
        "data.carry_rows=3",
        "train.steps=40",
    )


def carried(work: Work) -> str:
    """Documents are longer than a row, and their states pass from row to row. The trainer is killed three
    times.

    The run equals an uninterrupted one, states included.
    """
    run, settings = work.run("carried"), carrying(work)
    for target in (10, 20, 30):
        with Trainer(work.recipe, run, *settings) as trainer:
            trainer.until(lambda: trained(run) >= target, f"step {target}")  # noqa: B023
            trainer.kill()
    finish(work.recipe, run, *settings)
    # Where an epoch ends, one lane is still in it while another is in the next.
    return f"3 kills in 40 steps; {same(run, work.whole(*settings), prepared=True, spread=2)}"


def asynchronous(work: Work) -> str:
    """A thread writes checkpoints with the moments of Muon and AdamW while training goes on. The trainer is
    killed while that thread writes, syncs and renames.

    The run equals an uninterrupted one.
    """
    run, settings = work.run("asynchronous"), ("checkpoint.asynchronous=true", "optim.name=muon")
    points, ahead = (POINTS[1], POINTS[4], POINTS[5], POINTS[7]), []
    for number, point in enumerate(points):
        pause = {**point, "after_step": 14 * (number + 1)}
        with Trainer(work.recipe, run, *settings, pause=pause) as trainer:
            _, where = trainer.paused()
            at = int(re.search(r"after step (\d+)", where)[1])  # type: ignore[index]
            with contextlib.suppress(
                Torn
            ):  # the loop goes on until the next save waits for this one
                trainer.until(lambda: trained(run) >= at + 3, "more steps")  # noqa: B023
            ahead.append(trained(run) - at)
            trainer.kill()
        check_saved(run)
    need(max(ahead) >= 3, f"training stood still while a checkpoint was written: {ahead}")
    finish(work.recipe, run, *settings)
    return f"{len(points)} kills; {same(run, work.whole(*settings))}"


def fsdp(work: Work) -> str:
    """FSDP2 on two processes is killed at a random step and while one rank writes its part. Then a bit of one
    rank's part is flipped.

    On two processes the run goes on bit for bit. On one it has the same losses.
    """
    run, alone, settings = work.run("fsdp"), work.run("fsdp-alone"), ("train.parallel=fsdp",)
    target = random.Random(work.seed).randint(15, 40)
    with Trainer(work.recipe, run, *settings, processes=2) as trainer:
        trainer.until(lambda: trained(run) >= target, f"step {target}")
        trainer.kill()
    pause = {"at": "write done", "path": SAVE, "nth": 3, "after_step": 42, "rank": 1}
    with Trainer(work.recipe, run, *settings, processes=2, pause=pause) as trainer:
        trainer.paused()
        trainer.kill()
    check_saved(run)
    last = max(checkpoints(run))
    shutil.copytree(run, alone)
    for file in run.with_name("fsdp.notes").glob("stream-*"):
        alone.with_name("fsdp-alone.notes").mkdir(exist_ok=True)
        shutil.copy(file, alone.with_name("fsdp-alone.notes"))
    flip(max(checkpoints(run)[last].glob("model/*-00002-*"), key=lambda p: p.stat().st_size))
    text = finish(work.recipe, run, *settings, processes=2)
    need(f"step-{last}: damaged, passed over: model/" in text, text[:800])
    whole = work.whole(*settings, processes=2)
    equal = same(run, whole)
    finish(work.recipe, alone)
    need(stream(alone) == stream(whole), "other rows on one process")
    error = loss_error(alone, whole, 1e-5)
    return f"2 kills, damage; on 2 processes: {equal}; on 1: losses differ by {error:.1e} at most"


def processes(work: Work) -> str:
    """A run goes from 1 process to 2 and back to 1, and is killed in between.

    Each step has the same rows. The losses differ only by the order of their sums.
    """
    run = work.run("processes")
    for count, target in ((1, 25), (2, 50)):
        with Trainer(work.recipe, run, processes=count) as trainer:
            trainer.until(lambda: trained(run) >= target, f"step {target}")  # noqa: B023
            trainer.kill()
    finish(work.recipe, run)
    need(stream(run) == stream(work.whole()), "other rows than on one process")
    error = loss_error(run, work.whole(), 1e-4)  # 80 steps amplify what the sums' order changes
    return f"{work.steps} steps of equal rows; losses differ by {error:.1e} at most"


def rank_killed(work: Work) -> str:
    """One rank of two is killed within a step, and later the other one. recipes/launch.py may start them
    again.

    The run comes back by itself, and equals an uninterrupted one.
    """
    run = work.run("rank-killed")
    pause = {"at": "forward", "after_step": 25, "rank": 1}
    with Trainer(work.recipe, run, processes=2, restarts=2, pause=pause) as trainer:
        number, _ = trainer.paused()
        os.kill(number, signal.SIGKILL)
        trainer.go()  # for the next start, which comes to the same place
        trainer.until(lambda: trained(run) >= 50, "step 50")
        os.kill(json.loads((run / "run.json").read_text())["pid"], signal.SIGKILL)
        text = trainer.end()
    back = re.findall(r"resumes from (step-\d+)", text)
    need(len(back) == 2, f"resumed {len(back)} times: {text[-800:]}")
    equal = same(run, work.whole(processes=2))
    return f"2 kills, back from {' and '.join(back)} without a new command; {equal}"


def context(work: Work) -> str:
    """Two processes share each row. They are killed at a random step and while the second one saves, and
    stopped by a SIGTERM to the second one only.

    The run goes on bit for bit, states that pass from row to row included.
    """
    run, settings = work.run("context"), ("train.context_parallel=2", *carrying(work))
    target = random.Random(work.seed).randint(10, 14)
    with Trainer(work.recipe, run, *settings, processes=2) as trainer:
        trainer.until(lambda: trained(run) >= target, f"step {target}")
        trainer.kill()
    pause = {"at": "write done", "path": SAVE, "after_step": 21, "rank": 1}
    with Trainer(work.recipe, run, *settings, processes=2, pause=pause) as trainer:
        trainer.paused()
        trainer.kill()
    check_saved(run)
    pause = {"at": "forward", "after_step": 25, "rank": 1}
    with Trainer(work.recipe, run, *settings, processes=2, pause=pause) as trainer:
        number, _ = trainer.paused()
        os.kill(number, signal.SIGTERM)
        trainer.go()
        text = trainer.end(1)
    need(re.search(rf"exitcode\s*:\s*{128 + signal.SIGTERM}\b", text), text[-800:])
    need("interrupted: saved" in text, text[-300:])
    finish(work.recipe, run, *settings, processes=2)
    equal = same(run, work.whole(*settings, processes=2), prepared=True, spread=2)
    return f"2 kills and a SIGTERM in 40 steps; {equal}"


def contexts(work: Work) -> str:
    """A run goes from 1 process to 2 that share rows, to 2 × 2 under FSDP2, to 2 with rows of their own, and
    back to 1. States pass from row to row. It is killed or gets a SIGTERM in between.

    Each step has the same rows. The losses differ only by the order of their sums.
    """
    run, settings = work.run("contexts"), carrying(work)
    two = "train.context_parallel=2"
    launches = (
        (1, ()),
        (2, (two,)),
        (4, (two, "train.parallel=fsdp", "train.micro_batch_size=1")),
        (2, ()),
    )
    for target, (count, more) in zip((8, 16, 24, 32), launches, strict=True):
        with Trainer(work.recipe, run, *settings, *more, processes=count) as trainer:
            trainer.until(lambda: trained(run) >= target, f"step {target}")  # noqa: B023
            if target == 16:
                workers = [n for n in trainer.members() if n != trainer.process.pid]
                os.kill(max(workers), signal.SIGTERM)
                need("interrupted: saved" in trainer.end(1), trainer.tail())
            trainer.kill()
        check_saved(run)
    finish(work.recipe, run, *settings)
    whole = work.whole(*settings)
    need(stream(run) == stream(whole), "other rows than on one process")
    return f"40 steps of equal rows; losses differ by {loss_error(run, whole, 1e-4):.1e} at most"


# ------------------------------ damage and disks


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damaged(work: Work) -> str:
    """Each file of a checkpoint is cut short, emptied, removed, or a bit of it is flipped.

    The file is named and the checkpoint skipped. The run goes on from the one before, and equals an
    uninterrupted one.
    """
    run, settings = work.run("damaged"), f"train.steps={work.steps}"
    with Trainer(work.recipe, run, settings) as trainer:
        trainer.until(lambda: 21 in checkpoints(run), "checkpoint 21")
        trainer.kill()
    found = checkpoints(run)
    before, last = (found[step] for step in sorted(found)[-2:])
    files = sorted(p.relative_to(last) for p in last.rglob("*") if p.is_file())
    kept = work.run("damaged.kept")
    shutil.copytree(last, kept)
    harms: tuple[Callable[[Path], None], ...] = (cut, empty, flip, Path.unlink)
    for file in files:
        for harm in harms:
            harm(last / file)
            said: list[str] = []
            taken = latest_checkpoint(run / "checkpoints", say=said.append)
            need(taken == before, f"{harm.__name__} of {file}: {taken} was taken")
            named = file.name == "manifest.json" or file.as_posix() in said[0]
            need(last.name in said[0] and named, f"{harm.__name__} of {file}: not named in {said}")
            shutil.copy2(kept / file, last / file)
    need(latest_checkpoint(run / "checkpoints") == last, "undamaged, and not taken")
    flip(max(last.rglob("*"), key=lambda p: p.stat().st_size))
    said_by_run = finish(work.recipe, run, settings)
    need(f"{last.name}: damaged, passed over" in said_by_run, said_by_run[:600])
    need(f"resumes from {before.name}" in said_by_run, said_by_run[:600])
    return f"{len(files)} files × {len(harms)} harms, all named; {same(run, work.whole())}"


TMPFS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$0" && shift && "$@"; code=$?; cp -a "$0" "$0.kept"; exit $code'
FILLED = """mount -t tmpfs -o size="$1" tmpfs "$0" || exit
while [ ! -e "$0/checkpoints/step-12" ]; do sleep 0.02; done 2>/dev/null && head -c "$2" /dev/zero > "$0/other" &
filler=$!; shift 2; "$@"; code=$?; kill $filler 2>/dev/null; rm -f "$0/other"; cp -a "$0" "$0.kept"; exit $code"""
"""The folder, its size and the bytes of another file there, which comes behind step 12."""


def disk_full(work: Work) -> str:
    """The disk is too small for the run. Then it is large enough, and another program fills it up.

    The exit code is 74. One line says how much room is missing: in the first case before a step, in the second
    one at a save. The checkpoint before is whole, and nothing half-written stays. With room the run goes on.
    """
    run, settings = work.run("disk"), ("checkpoint.every=4", "checkpoint.keep_last=9")
    run.mkdir()
    size = sum(p.stat().st_size for p in checkpoints(work.whole())[work.steps].rglob("*"))
    able = (
        subprocess.run([*TMPFS, f"mount -t tmpfs tmpfs {run}"], capture_output=True).returncode == 0
    )
    if able:
        small = (*TMPFS, MOUNT, str(run), f"{7 * size // 2 // 1024}k")
        with Trainer(work.recipe, run, *settings, before=small) as trainer:
            text = trainer.end(74)
        need("nalanda: output_dir: " in text and "free; make room" in text, text[-600:])
        need(not trained(run.with_name("disk.kept")), "it trained although the disk is too small")
        shutil.rmtree(run.with_name("disk.kept"))

        room, other = 14 * size, 14 * size - 7 * size // 2
        filled = (*TMPFS, FILLED, str(run), f"{room // 1024}k", str(other))
        with Trainer(work.recipe, run, *settings, before=filled) as trainer:
            text = trainer.end(74)
        run.rmdir()
        run.with_name("disk.kept").rename(run)
    else:
        with Trainer(work.recipe, run, *settings, enospc=20) as trainer:
            text = trainer.end(74)
    said = [line for line in text.splitlines() if line.startswith("nalanda: ")]
    need(len(said) == 1 and "Traceback" not in text, text[-600:])
    need(
        not able or re.search(r"\d.*(bytes|[KMG]i?B)", said[0]),
        f"it does not say how much is missing: {said[0]}",
    )
    need(not list((run / "checkpoints").glob(".tmp-*")), "a half-written checkpoint stays")
    need(checkpoints(run), "no checkpoint is left")
    check_saved(run)
    saved = max(checkpoints(run))
    finish(work.recipe, run, *settings)
    how = "ENOSPC from an fsync (no tmpfs may be mounted here)"
    if able:
        how = f"a tmpfs of {room // 1024} kB, {other // 1024} of them taken at step 12"
    return f"{how}, full at step {saved + 4}, went on from {saved}; {same(run, work.whole())}"


# ------------------------------ signals

MOMENTS = (
    {"at": "forward", "nth": 3},
    {"at": "validation", "nth": 2},
    {"at": "fsync", "path": SAVE, "nth": 2},
)


def signals(work: Work) -> str:
    """A run gets SIGTERM and SIGUSR1 within a step, a validation and a save, and SIGHUP, SIGUSR2 and SIGXCPU
    within a step and a save; SIGTERM is followed by SIGHUP, as systemd does, and SIGXCPU by itself.

    The step is finished and saved; a save that is under way is the last. The exit code is 128 + signal. The
    same command goes on.
    """
    run, stopped = work.run("signals"), []
    within = {signal.SIGTERM: MOMENTS, signal.SIGUSR1: MOMENTS}
    within |= dict.fromkeys((signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU), MOMENTS[::2])
    behind = {signal.SIGTERM: signal.SIGHUP, signal.SIGXCPU: signal.SIGXCPU}
    for signum, moments in within.items():
        for moment in moments:
            saved = max(checkpoints(run), default=0)
            with Trainer(work.recipe, run, pause={**moment, "after_step": saved + 2}) as trainer:
                number, where = trainer.paused()
                os.kill(number, signum)
                if signum in behind:
                    os.kill(number, behind[signum])
                trainer.go()
                text = trainer.end(128 + signum)
            at = int(re.search(r"after step (\d+)", where)[1])  # type: ignore[index]
            # Within a step that one is finished; behind it, it is over, and one more may have been made.
            last = max(checkpoints(run), default=0)
            need(at <= last <= at + 1, f"{where}: the last checkpoint is of step {last}")
            need("fsync" not in where or last == at, f"{where}: another step was saved, {last}")
            need("interrupted: saved" in text, text[-300:])
            state = json.loads((run / "run.json").read_text())["state"]
            need(state == "interrupted", f"run.json says {state}")
            check_saved(run)
            stopped.append(last)
    finish(work.recipe, run)
    return f"stopped behind steps {', '.join(map(str, stopped))}; {same(run, work.whole())}"


def truncated(work: Work) -> str:
    """A shard of a token set is cut off under a run, its tokens and then its documents.

    The run saves and ends with code 2 and one line, which names the file. With the file back, the same
    command goes on.
    """
    run, (_, tokenizer), stopped = work.run("truncated"), prepared(work), []
    folder = shutil.copytree(
        work.folder / "prepared", work.folder / "cut"
    )  # other cases read that one
    settings = mixture(folder), tokenizer, "data.verify=sizes"
    for kind in ("tokens", "docs"):
        file = folder / "web" / "train" / f"00000.{kind}"
        content, saved = file.read_bytes(), max(checkpoints(run), default=0)
        pause = {"at": "forward", "after_step": saved + 5}
        with Trainer(work.recipe, run, *settings, pause=pause) as trainer:
            trainer.paused()
            os.truncate(file, 64)
            trainer.go()
            text = trainer.end(2)
        file.write_bytes(content)
        said = [line for line in text.splitlines() if line.startswith("nalanda: ")]
        need(len(said) == 1 and f"00000.{kind}: ends before" in said[0], text[-600:])
        need("Traceback" not in text, text[-600:])
        check_saved(run)
        stopped.append(max(checkpoints(run)))
        need(stopped[-1] >= saved + 5, f"saved {stopped[-1]} after step {saved + 5}")
    finish(work.recipe, run, *settings)
    equal = same(run, work.whole(*prepared(work)), prepared=True)
    return f"stopped behind steps {stopped[0]} and {stopped[1]}; {equal}"


def signals_on_one_rank(work: Work) -> str:
    """One rank of two gets SIGTERM and SIGUSR1 while the other waits for it.

    Both stop after the same step.
    """
    run, stopped = work.run("signals2"), []
    for signum, rank, moment in (
        (signal.SIGTERM, 1, MOMENTS[0]),
        (signal.SIGUSR1, 1, MOMENTS[1]),
        (signal.SIGUSR1, 0, MOMENTS[2]),
    ):
        saved = max(checkpoints(run), default=0)
        pause = {**moment, "after_step": saved + 2, "rank": rank}
        with Trainer(work.recipe, run, processes=2, pause=pause) as trainer:
            number, _ = trainer.paused()
            os.kill(number, signum)
            trainer.go()
            text = trainer.end(
                1
            )  # torchrun makes a 1 of every failure and names the workers' codes
        need(re.search(rf"exitcode\s*:\s*{128 + signum}\b", text), text[-800:])
        need("interrupted: saved" in text, text[-300:])
        check_saved(run)
        stopped.append(max(checkpoints(run)))
    finish(work.recipe, run, processes=2)
    return (
        f"stopped behind steps {', '.join(map(str, stopped))}; {same(run, work.whole(processes=2))}"
    )


def signals_to_all(work: Work) -> str:
    """Every process of a launch gets SIGTERM at once, torchrun's agent too: within a step, a validation and a
    save of one rank. Slurm and systemd do so. The agent forwards its own to the ranks.

    All ranks stop after the same step, which is saved. The same command goes on.
    """
    run, stopped = work.run("signals-all"), []
    for moment in MOMENTS:
        saved, rank = max(checkpoints(run), default=0), int(moment["at"] != "fsync")
        pause = {**moment, "after_step": saved + 2, "rank": rank}
        with Trainer(work.recipe, run, processes=2, pause=pause) as trainer:
            _, where = trainer.paused()
            members = trainer.members()
            need(len(members) == 3, f"{len(members)} processes of an agent and two ranks")
            for number in members:
                os.kill(number, signal.SIGTERM)
            trainer.until(lambda: trainer.text.count("closing signal SIGTERM") == 2, "the agent's")
            trainer.go()
            text = trainer.end(1)
        need("interrupted: saved" in text, text[-600:])
        state = json.loads((run / "run.json").read_text())["state"]
        need(state == "interrupted", f"run.json says {state}")
        check_saved(run)
        stopped.append(max(checkpoints(run), default=0))
        need(stopped[-1] > saved, f"{where}: nothing was saved behind step {saved}")
    finish(work.recipe, run, processes=2)
    return (
        f"stopped behind steps {', '.join(map(str, stopped))}; {same(run, work.whole(processes=2))}"
    )


def sleeping_rank(work: Work) -> str:
    """One rank of two sleeps within a step.

    Both ranks print where they are and their stacks, and end with code 70. The same command goes on.
    """
    run = work.run("sleeping")
    pause = {"at": "forward", "after_step": 16, "rank": 1}
    with Trainer(work.recipe, run, "guard.hang_timeout=6", processes=2, pause=pause) as trainer:
        trainer.paused()
        asleep = time.monotonic()
        text = trainer.end(1)
        after = time.monotonic() - asleep
    need("rank 1 on" in text and "made no progress" in text, text[-800:])
    need(re.search(r"exitcode\s*:\s*70\b", text), text[-800:])
    need("in arrive" in text and "most recent call first" in text, "no stack of the sleeping rank")
    finish(work.recipe, run, processes=2)
    return f"ended {after:.0f} s after it fell asleep; {same(run, work.whole(processes=2))}"


# ------------------------------ bad steps


def bad_steps(work: Work) -> str:
    """Some steps have a NaN loss, only a NaN gradient, or a spike of 1e9 in both or only in the gradient.
    Then there are five in a row.

    Such a step changes no bit of weights and moments. After five the run goes back to the last good
    checkpoint, and continues after their data.
    """
    run, whole = work.run("bad"), work.whole()
    kinds = {20: "nan_loss", 24: "nan_gradient", 28: "spike", 32: "gradient_spike"}
    kinds |= dict.fromkeys(range(40, 45), "nan_loss")
    # A step is two passes; the second one is spoilt.
    finish(work.recipe, run, bad={2 * step: kind for step, kind in kinds.items()})
    state = {step: ranks[0]["state"] for step, ranks in notes(run).items()}
    for step in (20, 24, 28, 32):
        need(
            state[step] == state[step - 1],
            f"step {step}, {kinds[step]}: weights or moments changed",
        )
        need(
            state[step - 1] != state[step - 2] and state[step + 1] != state[step],
            "steps without effect",
        )
    events = [line for line in lines(run) if "event" in line]
    skipped = [line["step"] for line in events if line["event"] == "skipped"]
    rollbacks = [line for line in events if line["event"] == "rollback"]
    need(skipped == [20, 24, 28, 32, *range(40, 45)], f"skipped steps in metrics.jsonl: {skipped}")
    need(len(rollbacks) == 1 and rollbacks[0]["to"] == 35, f"rollbacks: {rollbacks}")
    made, meant = stream(run), stream(whole)
    need(all(made[s] == meant[s] for s in range(1, 36)), "other rows before the rollback")
    need(all(made[s] == meant[s + 9] for s in range(36, 72)), "it did not go on past the bad rows")
    return "4 bad steps changed nothing; 5 in a row: from step 44 back to 35, on with the rows of step 45"


def spoilt_at_a_save(work: Work) -> str:
    """A weight or a moment is NaN, inf or 1e30 when a checkpoint is due, also on only one rank of two.

    Nothing of it is saved. The run goes back to the last sound checkpoint, and ends with sound weights.
    """
    kinds = ["weight nan", "weight 1e30", "moment inf"]
    for kind, processes in [*((kind, 1) for kind in kinds), ("moment nan", 2)]:
        run = work.run(f"spoilt-{kind.replace(' ', '-')}")
        orders = {"processes": processes, "spoil": {"nth": 4, "kind": kind, "rank": processes - 1}}
        finish(work.recipe, run, "train.steps=28", "checkpoint.keep_last=1", **orders)
        found = [(line["event"], line["step"]) for line in lines(run) if "event" in line]
        events = [(kind, step) for kind, step in found if kind != "epoch"]
        need(events == [("unsound", 28), ("rollback", 22)], f"{kind}: {events}")
        check_sound(run)
    return f"{len(kinds) + 1} harms at the save of step 28: back to 21, and the model is sound"


def check_sound(run: Path) -> None:
    """Weights and moments of every checkpoint are finite."""
    for verdict in verify(run):
        need(verdict.good, f"step-{verdict.step}: {verdict}")


def nan_validation(work: Work) -> str:
    """A validation loss is NaN or inf.

    The run finishes. The model is there, and its card says it.
    """
    for value in ("nan", "inf"):
        run = work.run(f"validation-{value}")
        text = finish(work.recipe, run, "train.steps=16", validation=value)
        need("not finite" in text, text[-400:])
        card = (run / "final" / "README.md").read_text()
        need("NOT FINITE" in card, card[:800])
        need(tensor_files.shapes(run / "final" / "model.safetensors"), "no weights")
    return "2 runs; final/ is whole, its card says NOT FINITE"


def bad_step_on_one_rank(work: Work) -> str:
    """Only one rank of two has a NaN loss, or a NaN gradient.

    No rank's weights or moments change.
    """
    run = work.run("bad2")
    bad = {"20": "nan_loss", "24": "nan_gradient"}
    finish(work.recipe, run, "train.steps=28", processes=2, bad=bad, bad_rank=1)
    state = {step: [e["state"] for e in ranks] for step, ranks in notes(run).items()}
    need(all(a == b for a, b in state.values()), "the ranks' weights part")
    for step in (20, 24):
        need(
            state[step] == state[step - 1] != state[step + 1],
            f"step {step} changed weights or moments",
        )
    return "2 bad steps changed nothing on either rank; 28 steps, both ranks equal after each"


# ------------------------------ servers


class Server:
    """Serves the corpus over HTTP, well or as `trouble` says: {path: [what goes wrong with each request, one
    after another]}. `down`: every request gets a 503."""

    def __init__(self, corpus: Path):
        self.trouble: dict[str, list[str]] = {}
        self.down, self.requests, self.after = False, [], 10**9
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                wrong = (outer.trouble.get(self.path) or ["well"]).pop(0)
                if outer.down or len(outer.requests) > outer.after or wrong == "503":
                    self.send_error(503)
                    return
                content = (corpus / self.path[1:]).read_bytes()
                sent = (
                    content[: len(content) // 2] if wrong in ("half", "short", "stall") else content
                )
                self.send_response(200)
                self.send_header("Content-Length", str(len(sent if wrong == "short" else content)))
                self.end_headers()
                self.wfile.write(sent)
                if wrong == "stall":
                    time.sleep(6)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def servers(work: Work) -> str:
    """A server answers 503, stalls, or sends half a shard. Another stays away. A third sends half a shard as
    if it were whole.

    The first is asked again, which changes nothing. The second stops the run with code 75 after a saved step.
    The third's shard is named, and never trained on.
    """
    corpus = work.folder / "corpus"
    paths = ["/" + p.relative_to(corpus).as_posix() for p in sorted(corpus.rglob("*.zst"))]
    listing = work.folder / "corpus" / "all.urls"
    listing.write_text("\n".join(path[1:] for path in paths) + "\n")
    with Server(corpus) as server:
        settings = (
            "data.mixture=[]",
            f"data.source={server.url}/all.urls",
            f"tokenizer={work.whole() / 'tokenizer'}",
            "validation.every=0",
            "train.steps=60",
        )

        def start(name: str, *overrides: str, cache: str = "") -> Trainer:
            env = {"NALANDA_CACHE": str(work.folder / f"cache-{cache or name}")}
            return Trainer(work.recipe, work.run(name), *settings, *overrides, env=env, timeout=2)

        with start("served") as trainer:
            trainer.end()
        troubles = ["503", "503"], ["half"], ["stall"], ["503", "half", "stall"]
        server.trouble = {path: list(troubles[i]) for i, path in enumerate(paths[: len(troubles)])}
        server.requests.clear()
        with start("served-badly") as trainer:
            text = trainer.end()
        again = len(server.requests) - len(paths) - 1
        need(again >= 7, f"{again} requests were made again: {text[-600:]}")
        equal = same(work.run("served-badly"), work.run("served"))

        server.requests.clear()
        server.after = 4  # the list and three shards
        with start("unserved", "data.retries=1") as trainer:
            text = trainer.end(75)
        said = [line for line in text.splitlines() if "gave up" in line]
        need(len(said) == 1 and said[0].startswith("nalanda: "), text[-600:])
        stopped = max(checkpoints(work.run("unserved")), default=0)
        need(
            stopped == trained(work.run("unserved")) > 0,
            f"saved {stopped}, trained to {trained(work.run('unserved'))}",
        )
        server.after = 10**9
        with start("unserved") as trainer:
            trainer.end()
        same(work.run("unserved"), work.run("served"))

        server.trouble = {paths[2]: ["short"] * 99}
        with start("short") as trainer:
            text = trainer.end(2)
        need(paths[2] in text and "Traceback" not in text, text[-600:])
    away = f"away: stopped at step {stopped} with code 75, then equal"
    return f"{again} requests made again, {equal}; {away}; half sent as whole: {paths[2]} named"


def dying_store(work: Work) -> str:
    """The data and the run's folder are in S3. The server dies under the run. It comes back, and the run is
    started again; then the machine dies, and another one, with an empty disk, trains on.

    The run saves before it ends with code 75, and names the folder that the store lacks. The finished run
    equals one on local files. No key is printed or stored.
    """
    run, corpus = work.run("stored"), work.folder / "corpus"
    url = "s3://bucket/run"
    with buckets.buckets() as server:
        for file in corpus.rglob("*.zst"):
            server.put(f"corpus/{file.relative_to(corpus).as_posix()}", file.read_bytes())
        sources = ("web", 2), ("code", 1)
        parts = (f"{{name: {n}, source: s3://bucket/corpus/{n}, weight: {w}}}" for n, w in sources)
        settings = (
            f"output_dir={url}",
            f"data.mixture=[{', '.join(parts)}]",
            f"train.steps={work.steps}",
            "data.retries=1",
        )
        text = ""

        def start(machine: str, **orders: object) -> Trainer:
            env = buckets.environment(server.endpoint) | {
                "NALANDA_CACHE": str(work.folder / machine)
            }
            return Trainer(work.recipe, run, *settings, env=env, **orders)

        def folder(machine: str) -> Path:
            return next((work.folder / machine / "output").glob("*-run"))

        with start("machine-1", pause={**POINTS[6], "after_step": 12}) as trainer:
            trainer.paused()
            server.stop()
            for file in (work.folder / "machine-1").glob("*.zst"):
                file.unlink()
            trainer.go()
            text += trainer.end(75)
        stopped = max(checkpoints(folder("machine-1")))
        need(stopped == trained(folder("machine-1")), f"saved {stopped}, trained on")
        need(f"lacks the newest files, which are in {folder('machine-1')}" in text, text[-600:])
        server.start()
        with start("machine-1") as trainer:
            trainer.until(
                lambda: f"run/checkpoints/step-{stopped}/manifest.json" in server.names(),
                "the copy",
            )
            trainer.kill()
            text += trainer.text
        with start("machine-2") as trainer:
            text += trainer.end()
        need("resumes from step-" in text.rpartition("works in")[2], "it began anew")
        shutil.copytree(folder("machine-2"), run)
        equal = same(run, work.whole())
        need("run/final/model.safetensors" in server.names(), "no final model in the store")
        found = [server.get(name) for name in server.names()]
        found += [
            file.read_bytes() for file in work.folder.glob("machine-*/**/*") if file.is_file()
        ]
        need(buckets.SECRET not in text, "the key was printed")
        need(
            not any(buckets.SECRET.encode() in content for content in found), "the key is in a file"
        )
    return f"stopped at step {stopped} with code 75, then resumed on two machines, {equal}"


class FailingStore:
    """Stands before the S3 server: refuses every tenth request of the trainers, and can stop an upload half-way."""

    def __init__(self, server: buckets.Buckets):
        self.server, self.answer = server, server.server._server.app
        self.asked = self.refused = 0
        self.hold = ""  # pattern of the path whose next upload stops
        self.held, self.released = threading.Event(), threading.Event()
        server.server._server.app = self

    def __call__(self, request: dict, start_response: Callable) -> Iterable[bytes]:
        ours = "aiobotocore" not in request["HTTP_USER_AGENT"]
        uploaded = request["PATH_INFO"] if request["REQUEST_METHOD"] == "PUT" else ""
        if self.hold and re.search(self.hold, uploaded):
            self.hold = ""
            request["wsgi.input"].read(int(request["CONTENT_LENGTH"]) // 2)
            self.held.set()
            self.released.wait(PATIENCE)  # the client is dead then
            start_response("400 Bad Request", [])
            return []

        self.asked += not ours
        if ours or self.asked % 10:
            return self.answer(request, start_response)
        self.refused += 1
        start_response("503 Slow Down", [("Content-Length", "0")])
        return []

    def newest(self) -> int:
        """The newest step whose checkpoint has a manifest."""
        found = re.findall(r"/step-(\d+)/manifest\.json", "\n".join(self.server.names()))
        return max(map(int, found), default=0)

    def check_whole(self) -> int:
        """Each checkpoint with a manifest has all its files. Returns their number."""
        manifests = [
            n for n in self.server.names("run/checkpoints/") if n.endswith("manifest.json")
        ]
        for name in manifests:
            for file, entry in json.loads(self.server.get(name))["files"].items():
                path = name.replace("manifest.json", file)
                need(path in self.server.names(path), f"{path} is missing")
                content = self.server.get(path)
                need(hashlib.sha256(content).hexdigest() == entry["sha256"], f"{path}: other bytes")
        return len(manifests)


def machines(work: Work) -> str:
    """Two machines without a shared disk save a sharded run in S3, whose server refuses every tenth request. They
    are killed while the second one uploads its part, and while the first one uploads a manifest. The second one
    loses its disk, then the first one does.

    A checkpoint with a manifest has all its files. Each start goes on from the newest of them, and the finished
    run equals one on a shared disk.
    """
    run, settings = work.run("machines"), ("output_dir=s3://bucket/run", "train.parallel=fsdp")

    def start(stack: contextlib.ExitStack, names: str, **orders: object) -> list[Trainer]:
        """A process on each machine, with a cache of its own."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        group = buckets.environment(server.endpoint) | {
            "ACCELERATE_USE_CPU": "true",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        trainers = []
        for rank, name in enumerate(names):
            env = {**group, "RANK": str(rank), "NALANDA_CACHE": str(work.folder / f"disk-{name}")}
            trainer = Trainer(work.recipe, run, *settings, env=env, **orders)
            trainers.append(stack.enter_context(trainer))
        return trainers

    text, back = "", []
    with buckets.buckets() as server:
        store = FailingStore(server)
        for names, after, hold, lost in (
            ("AB", 16, r"/step-\d+/model/shard-00002", "B"),
            ("AC", 37, r"/step-\d+/manifest", "A"),
        ):
            before, pause = store.newest(), {"at": "forward", "after_step": after, "rank": 1}
            with contextlib.ExitStack() as stack:
                first, _ = start(stack, names, pause=pause)
                first.paused()
                first.until(lambda: store.newest() > before, "a checkpoint in the store")  # noqa: B023
                store.hold = hold
                first.go()
                first.until(store.held.is_set, "the upload")
                first.kill()
                store.released.set()
                text += first.text
            store.held.clear()
            store.released.clear()
            store.check_whole()
            back.append(store.newest())
            shutil.rmtree(work.folder / f"disk-{lost}")

        with contextlib.ExitStack() as stack:
            first, second = start(stack, "DC")
            text += first.end()
            second.end()
        found = [int(step) for step in re.findall(r"resumes from step-(\d+)", text)]
        need(found == back, f"resumed from {found}, newest were {back}: {text[-800:]}")
        need("run/final/model.safetensors" in server.names(), "no final model in the store")
        kept = store.check_whole()
        shutil.copytree(next((work.folder / "disk-D" / "output").glob("*-run")), run)
    equal = same(run, work.whole("train.parallel=fsdp", processes=2))
    kills = f"2 kills, back from steps {back[0]} and {back[1]}; {store.refused} requests refused"
    return f"{kills}; {kept} whole checkpoints in the store; {equal}"


# ------------------------------ settings


def changed(work: Work) -> str:
    """Tokenizer, model, sequence length, order or corpus change in a run's folder. Then only the learning
    rate does.

    Each of the former is refused with code 2, and no byte of the run changes. The learning rate is taken,
    printed and recorded.
    """
    run, corpus = work.run("changed"), work.folder / "corpus-changed"
    shutil.copytree(work.folder / "corpus", corpus)  # other cases read the common one meanwhile
    settings = "train.steps=20", "schedule.warmup_steps=2", mixture(corpus)
    finish(work.recipe, run, *settings, "train.steps=10")

    def files() -> dict[str, str]:
        return {
            str(p): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(run.rglob("*"))
            if p.is_file()
        }

    other = work.folder / "other"
    shutil.copytree(corpus / "web", other)
    refusals = (
        "tokenizer.vocab_size=100",
        "model.use_gate=false",
        "data.seq_len=32",
        "data.shuffle_buffer=7",
        "seed=6",
        f"data.mixture=[{{name: web, source: {other}, weight: 2}}]",
    )
    before = files()
    for override in refusals:
        with Trainer(work.recipe, run, *settings, override) as trainer:
            text = trainer.end(2)
        key = override.split("=")[0]
        need(f"nalanda: {run} holds another run: {key}" in text, text[-400:])
        need(files() == before, f"{key}: refused, and yet something changed")
    shard = corpus / "web" / read_by(run, "web")[0]
    content = shard.read_bytes()
    shard.write_bytes(content + content)  # zstandard frames may follow one another
    try:
        with Trainer(work.recipe, run, *settings) as trainer:
            text = trainer.end(2)
        need("nalanda: " in text and "Traceback" not in text, text[-400:])
    finally:
        shard.write_bytes(content)
    text = finish(work.recipe, run, *settings, "optim.lr=1e-3")
    need("optim.lr: 0.003 → 0.001" in text, text[:600])
    recorded = json.loads((run / "run.json").read_text())["changes"]
    need(any(change.get("optim.lr") == [0.003, 0.001] for change in recorded), recorded)
    return f"{len(refusals) + 1} refused, one grown shard that was read; optim.lr in run.json and printed"


def accumulation(work: Work) -> str:
    """16 rows with ragged labels are one batch, or 1, 2, 4 or 8 accumulated micro-batches, on 1 and 2
    processes.

    The gradient is that of one batch in float64.
    """
    settings = (
        "train.steps=1",
        "data.seq_len=32",
        "train.tokens_per_step=512",
        "schedule.warmup_steps=0",
    )
    settings = *settings, "validation.every=0", "optim.max_grad_norm=1e9"
    errors, ragged, expected = {}, 0.0, None
    for count in (1, 2):
        for accumulated in (1, 2, 4, 8):
            run = work.run(f"accumulation{count}x{accumulated}")
            rows = 16 // accumulated // count
            finish(
                work.recipe,
                run,
                *settings,
                f"train.micro_batch_size={rows}",
                processes=count,
                dump=True,
            )
            ranks = [
                torch.load(run.with_name(f"{run.name}.notes") / f"dump-{rank}.pt")
                for rank in range(count)
            ]
            batches = [batch for rank in ranks for batch in rank["batches"]]
            need(len(batches) == accumulated * count, f"{len(batches)} micro-batches")
            labels = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
            ragged = max(ragged, max(labels) / min(labels))
            if expected is None:
                expected = float64_gradient(run, ranks[0]["weights"], batches)
            for rank in ranks:
                errors[count, accumulated] = relative_error(rank["gradients"], expected)
                need(
                    errors[count, accumulated] < 1e-5,
                    f"{count} × {accumulated}: {errors[count, accumulated]}",
                )
    need(ragged > 1.2, f"labels are not ragged: {ragged}")
    return (
        f"8 runs; error of the gradient at most {max(errors.values()):.1e} of its norm; "
        f"micro-batches of up to {ragged:.1f} times the labels of others"
    )


def float64_gradient(run: Path, weights: dict, batches: list[dict]) -> dict[str, torch.Tensor]:
    """Of the mean over all labels of all batches, made from one batch in float64."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    model = build_model(load_config(run / "config.yaml"), tokenizer).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    tokens, labels = (
        torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels")
    )
    starts, offset = [torch.zeros(1, dtype=torch.int32)], 0
    for batch in batches:
        starts.append(batch["cu_seqlens"][1:] + offset)
        offset += batch["input_ids"].numel()
    model(tokens, labels=labels, cu_seqlens=torch.cat(starts), use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    need(found.keys() == expected.keys(), "gradients of other parameters")
    difference = sum((found[n].double() - g).square().sum() for n, g in expected.items())
    return (difference / sum(g.square().sum() for g in expected.values())).sqrt().item()


# ------------------------------ two at once, and a folder that was harmed


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`; parts of files that are being written are left out."""
    found = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and ".tmp-" not in str(p)):
        with contextlib.suppress(FileNotFoundError):
            found[str(file.relative_to(folder))] = file.read_bytes()
    return found


def two_at_once(work: Work) -> str:
    """A second run is started in the folder of a running one: with the same settings, with others, and with
    another corpus.

    It is refused with code 2 and changes no byte. The first run equals one that was alone.
    """
    run, refused = work.run("twice"), 0
    pause, elsewhere = {"at": "forward", "after_step": 3}, work.folder / "corpus-copy"
    shutil.copytree(work.folder / "corpus", elsewhere)
    with Trainer(work.recipe, run, pause=pause) as first:
        first.paused()  # before its first checkpoint: then a tokenizer would be made anew
        before = snapshot(run)
        for settings in ((), ("optim.lr=1",), (mixture(elsewhere),), ("seed=9",)):
            command = [
                sys.executable,
                str(PRETRAIN),
                str(work.recipe),
                f"output_dir={run}",
                *settings,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            need(done.returncode == 2, f"exit code {done.returncode}: {done.stderr[-400:]}")
            need("another process is training there" in done.stderr, done.stderr[-400:])
            need(snapshot(run) == before, "the refused start changed the folder")
            refused += 1
        first.go()
        first.end()
    return f"{refused} refused; {same(run, work.whole())}"


def no_checkpoint_left(work: Work) -> str:
    """All checkpoints are damaged, or gone. The run is started several times. Then one is put back.

    It is refused with code 2 and a line that names each checkpoint, and no byte changes. With one put back
    the run goes on.
    """
    run = work.run("none-left")
    with Trainer(work.recipe, run) as trainer:
        trainer.until(lambda: 21 in checkpoints(run), "checkpoint 21")
        trainer.kill()
    shutil.copytree(run / "checkpoints", kept := work.run("none-left.kept"))
    named = {path.name for path in checkpoints(run).values()}
    for path in checkpoints(run).values():
        flip(path / "model.safetensors")
    for gone in (False, True):
        if gone:
            shutil.rmtree(run / "checkpoints")
        before = snapshot(run)
        for _ in range(2):
            with Trainer(work.recipe, run) as trainer:
                text = trainer.end(2)
            said = [line for line in text.splitlines() if line.startswith("nalanda: ")]
            need(len(said) == 1 and "Traceback" not in text, text[-600:])
            need(gone or all(name in said[0] for name in named), said[0])
            need(snapshot(run) == before, "the refused start changed the folder")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shutil.copytree(kept, run / "checkpoints")
    finish(work.recipe, run)
    return f"4 starts refused; then {same(run, work.whole())}"


def other_moments(work: Work) -> str:
    """A checkpoint has moments of other shapes, too few or too many, with the right SHA-256 sums. Adam's
    kernels would write past their end.

    It is refused in one line, with code 2.
    """
    run = work.run("moments")
    with Trainer(work.recipe, run, "train.steps=20") as trainer:
        trainer.until(lambda: 7 in checkpoints(run), "checkpoint 7")
        trainer.kill()
    last = checkpoints(run)[max(checkpoints(run))]
    file, kept = last / "optimizer.safetensors", (last / "optimizer.safetensors").read_bytes()
    moments = load_file(file)
    name = next(key for key in moments if key.endswith(".exp_avg") and moments[key].ndim == 2)
    harms: dict[str, dict[str, torch.Tensor | None]] = {
        "longer": {name: torch.zeros(1 << 20)},
        "shorter": {name: torch.zeros(1)},
        "transposed": {name: torch.zeros(*reversed(moments[name].shape), 2)},
        "a scalar": {name: torch.zeros(())},
        "gone": {name: None},
        "more": {"no.such.weight.exp_avg": torch.zeros(4)},
        "integers": {name: torch.zeros(moments[name].shape, dtype=torch.int64)},
    }
    for harm, change in harms.items():
        changed = {**moments, **change}
        save_file({key: t for key, t in changed.items() if t is not None}, file)
        reseal(last)
        need(verify_manifest(last) is None, "the sums do not fit")
        with Trainer(work.recipe, run, "train.steps=20") as trainer:
            text = trainer.end(2)
        need("Traceback" not in text and "nalanda: " in text, f"{harm}: {text[-400:]}")
        need("optimizer.safetensors" in text, f"{harm}: {text[-400:]}")
        file.write_bytes(kept)
    reseal(last)
    finish(work.recipe, run, "train.steps=20")
    return f"{len(harms)} harms refused; then {same(run, work.whole('train.steps=20'))}"


def harmed_folder(work: Work) -> str:
    """Each file of a run's folder outside checkpoints/ is cut short, emptied, removed, or a bit of it is
    flipped.

    The run resumes and ends with the same weights, or is refused with code 2 in a line that names the file.
    There is no traceback. No checkpoint changes.
    """
    origin, outcomes = work.run("harmed"), Counter()
    with Trainer(work.recipe, origin, "train.steps=20", "log.tensorboard=true") as trainer:
        trainer.until(lambda: 14 in checkpoints(origin), "checkpoint 14")
        trainer.kill()
    expected = tensors(work.whole("train.steps=20") / "final" / "model.safetensors")
    files = sorted(p.relative_to(origin) for p in origin.rglob("*") if p.is_file())
    files = [p for p in files if p.parts[0] != "checkpoints" and p.name != ".lock"]
    harms: tuple[Callable[[Path], None], ...] = (cut, empty, flip, Path.unlink)
    for file in files:
        for harm in harms:
            run = work.run("harmed.copy")
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(origin, run)
            harm(run / file)
            before, what = snapshot(run / "checkpoints"), f"{harm.__name__} of {file}"
            with Trainer(work.recipe, run, "train.steps=20", "log.tensorboard=true") as trainer:
                text = trainer.end(None)
            code = trainer.process.returncode
            need("Traceback" not in text, f"{what}: {text[-400:]}")
            if code == 0:
                need(
                    tensors(run / "final" / "model.safetensors") == expected,
                    f"{what}: other weights",
                )
                outcomes["resumed"] += 1
                continue
            said = [line for line in text.splitlines() if line.startswith("nalanda: ")]
            need(code == 2 and len(said) == 1, f"{what}: exit code {code}: {text[-400:]}")
            need(file.parts[0] in said[0] or "holds another run" in said[0], f"{what}: {said[0]}")
            need(snapshot(run / "checkpoints") == before, f"{what}: checkpoints changed")
            outcomes["refused"] += 1
    told = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    return f"{len(files)} files × {len(harms)} harms: {told}"


def clock(work: Work) -> str:
    """The clock jumps by years, forwards and back, within every step.

    The run is the same. The speeds in its metrics are positive.
    """
    run = work.run("clock")
    with Trainer(work.recipe, run, clock=True) as trainer:
        trainer.until(lambda: trained(run) >= 30, "step 30")
        trainer.kill()
    finish(work.recipe, run, clock=True)
    rates = [line["tokens_per_second"] for line in lines(run) if "tokens_per_second" in line]
    need(rates and all(0 < rate < 1e7 for rate in rates), f"tokens a second: {rates}")
    return f"a jump at every look at it; {same(run, work.whole())}"


# ------------------------------ the hostile


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path):
        self.file = str(file)

    def __reduce__(self):
        return Path.touch, (Path(self.file),)


def reseal(folder: Path) -> None:
    """A manifest that fits what lies there now, as somebody who means harm would write it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    (folder / "manifest.json").write_text(manifest_text(manifest))


def hostile_checkpoint(work: Work) -> str:
    """Each file of a checkpoint is replaced by a pickle, with the right sum. A manifest has paths that lead
    out of the folder, by name or by link.

    The pickle is never run. Both are refused in one line, with code 2.
    """
    run, proof, tried = work.run("hostile"), work.folder / "executed", 0
    settings = "train.steps=20", "validation.every=0"
    with Trainer(work.recipe, run, *settings) as trainer:
        trainer.until(lambda: 7 in checkpoints(run), "checkpoint 7")
        trainer.kill()
    last = checkpoints(run)[max(checkpoints(run))]
    kept = work.run("hostile.kept")
    shutil.copytree(last, kept)
    attacked = [p for p in sorted(kept.rglob("*")) if p.suffix not in (".json", "") and p.is_file()]
    for file in attacked if not work.quick else [p for p in attacked if p.suffix == ".pt"]:
        attacks = [zipped(Touch(proof), work.folder / "attack.pt"), pickle.dumps(Touch(proof))]
        for attack in attacks[: 1 if work.quick else 2]:
            (last / file.relative_to(kept)).write_bytes(attack)
            reseal(last)
            need(verify_manifest(last) is None, "the attack's sums do not fit")
            with Trainer(work.recipe, run, *settings) as trainer:
                text = trainer.end(None)
            tried += 1
            need(not proof.exists(), f"{file.name}: its pickle was run")
            code = trainer.process.returncode
            need(
                code == 2 and "Traceback" not in text,
                f"{file.name}: exit code {code}: {text[-400:]}",
            )
            shutil.rmtree(last)
            shutil.copytree(kept, last)
    outside = work.folder / "outside"
    outside.write_text("not yours")
    manifest = json.loads((kept / "manifest.json").read_text())
    name, entry = next(iter(manifest["files"].items()))
    sums = {"bytes": 9, "sha256": hashlib.sha256(b"not yours").hexdigest()}
    for path in ("../../../outside", str(outside), "link", "sub/../../../../outside"):
        (last / "link").unlink(missing_ok=True)
        (last / "link").symlink_to(outside)
        files = {name: entry, path: sums}
        (last / "manifest.json").write_text(manifest_text({**manifest, "files": files}))
        problem = verify_manifest(last)
        need(problem and "leaves" in problem, f"{path}: {problem}")
    return f"{tried} pickles, none was run; 4 paths out of the folder refused"


def zipped(payload: object, file: Path) -> bytes:
    torch.save({"random": payload, "data": payload}, file)
    return file.read_bytes()


EVIL = """
from pathlib import Path
Path({proof!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class EvilConfig(LlamaConfig): model_type = {kind!r}
class EvilModel(LlamaForCausalLM): config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast): pass
"""


def remote_code(work: Work) -> str:
    """The configs of models and tokenizers name code of their own.

    It is never run. A type that only that code knows is refused in one line; one that transformers knows is
    taken from there.
    """
    proof, ends = work.folder / "executed", []
    for kind in ("evil", "llama"):
        folder = work.folder / f"remote-{kind}"
        shutil.copytree(work.whole() / "tokenizer", folder)
        (folder / "evil.py").write_text(EVIL.format(proof=str(proof), kind=kind))
        names = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        vocabulary = {"vocab_size": 2048}
        (folder / "config.json").write_text(
            json.dumps({"model_type": kind, "auto_map": names, **sizes, **vocabulary})
        )
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["auto_map"] = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
        settings["tokenizer_class"] = (
            "EvilTokenizer" if kind == "evil" else "PreTrainedTokenizerFast"
        )
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        for override in (f"model={{auto: {folder}}}", f"tokenizer={{path: {folder}}}"):
            run = work.run(f"remote{len(ends)}")
            with Trainer(
                work.recipe, run, "train.steps=5", "validation.every=0", override
            ) as trainer:
                text = trainer.end(None)
            ends.append(trainer.process.returncode)
            need(not proof.exists(), f"{override}: its code was run")
            need(
                ends[-1] in (0, 2) and "Traceback" not in text,
                f"{override}: {ends[-1]}: {text[-400:]}",
            )
    need(ends[0] == 2 and ends[2] == 0, f"exit codes {ends}")
    return f"2 models and 2 tokenizers with code of their own, none of it run; exit codes {ends}"


def secrets(work: Work) -> str:
    """The environment holds tokens. One run ends well, one is refused, and one fails.

    The tokens are in no log, metrics, TensorBoard file, checkpoint or exported model.
    """
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
    env = {name: f"secret{number}x7Q9zK" for number, name in enumerate(names)}
    text, files = "", []
    ends = (("train.steps=10", 0), ("optim.learnin_rate=1", 2), ("optim.lr=1e38", None))
    for number, (override, code) in enumerate(ends):
        run = work.run(f"secrets{number}")
        settings = "log.tensorboard=true", "schedule.warmup_steps=1", "validation.every=5"
        with Trainer(work.recipe, run, *settings, override, env=env) as trainer:
            text += trainer.end(code)
        files += [p for p in run.rglob("*") if p.is_file()]
    for secret in env.values():
        need(secret not in text, "a token was printed")
        for file in files:
            need(secret.encode() not in file.read_bytes(), f"a token is in {file}")
    return (
        f"{len(names)} tokens; {len(files)} files and {len(text):,} characters of output searched"
    )


# ------------------------------ data


def swap(file: Path) -> bytes:
    """A bit in the middle flips, or in an index the last bit of a number: the size stays. What it was before."""
    before = file.read_bytes()
    content, place = bytearray(before), len(before) // 2
    if file.suffix == ".json":  # elsewhere it might change white space alone
        place = re.search(rb"\d\b", before[place:]).end() + place - 1  # type: ignore[union-attr]
    content[place] ^= 1
    file.write_bytes(content)
    return before


def read_by(run: Path, part: str = "") -> list[str]:
    """Names of the files of a component that the newest checkpoint of a run has read in its epoch."""
    data = torch.load(
        run / f"checkpoints/step-{max(checkpoints(run))}/rank-0.pt", weights_only=True
    )["data"]
    states = data.get("parts", [data])
    names, documents = (
        data["files"][part]["names"],
        states[[*data["files"]].index(part)]["documents"],
    )
    seed = f"5/{part}" if part else 5  # the recipe's
    draws = [
        hash_text(f"{seed}/{documents['epoch']}/shard/{number}") for number in range(len(names))
    ]
    order = sorted(range(len(names)), key=draws.__getitem__)
    reached = documents["end"][0]
    return [names[number] for number in (order if reached < 0 else order[:reached])]


def edited(work: Work) -> str:
    """Between two starts of a run, a shard of training that was read, one of validation, or a file of a
    prepared set, is edited without a change of its size.

    The second start is refused with code 2 in a line that names the file, and writes no checkpoint. With the
    file restored the run equals an uninterrupted one.
    """
    said, texts = [], work.folder / "edited"
    shutil.copytree(work.folder / "corpus", texts / "train")
    shutil.copytree(work.folder / "corpus" / "web", texts / "validation")
    sets = work.folder / "prepared-edited"
    tokenizer = prepared(work)[1]
    shutil.copytree(work.folder / "prepared", sets)
    kinds = {
        "texts": ("data.mixture=[]", f"data.source={texts}", tokenizer),
        "sets": (mixture(sets), tokenizer),
    }
    for name, settings in kinds.items():
        run = work.run(f"edited-{name}")
        with Trainer(work.recipe, run, *settings) as trainer:
            trainer.until(lambda: 14 in checkpoints(run), "checkpoint 14")  # noqa: B023
            trainer.kill()
        if name == "texts":
            files = [texts / read_by(run)[0], min((texts / "validation").glob("*.zst"))]
        if name == "sets":  # index.json; tokens and documents of train and of validation
            found = sorted((sets / "code").rglob("*"))
            files = [p for p in found if p.is_file() and p.parent.name != "tokenizer"]
        for file in files:
            saved, before = max(checkpoints(run)), swap(file)
            try:
                with Trainer(work.recipe, run, *settings) as trainer:
                    text = trainer.end(2)
            finally:
                file.write_bytes(before)
            lines_ = [line for line in text.splitlines() if line.startswith("nalanda: ")]
            named = file.name in lines_[0] or file.parent.name in lines_[0] if lines_ else False
            need(len(lines_) == 1 and named and "Traceback" not in text, f"{file}: {text[-600:]}")
            need(max(checkpoints(run)) == saved, f"{file}: a checkpoint was written")
            said.append(file)
        finish(work.recipe, run, *settings)
        same(run, work.whole(*settings), prepared=name == "sets", spread=10**9)
    return f"{len(said)} files, each refused with code 2; then equal to the runs that nothing interrupted"


def killed_while_hashing(work: Work) -> str:
    """The trainer is killed, and gets SIGTERM, at a resume while it hashes the files that were read.

    Each start goes on where the one before stopped: a hash that was found is kept, and made once.
    The finished run equals an uninterrupted one.
    """
    run, settings = work.run("hashing"), ("train.steps=20", "checkpoint.every=7")
    with Trainer(work.recipe, run, *settings) as trainer:
        trainer.until(lambda: 14 in checkpoints(run), "checkpoint 14")
        trainer.kill()
    record = run / "hashes.jsonl"
    record.unlink()

    found = []
    for sent, nth in ((signal.SIGKILL, 2), (signal.SIGTERM, 1)):
        with Trainer(work.recipe, run, *settings, pause={"at": "hash", "nth": nth}) as trainer:
            trainer.paused()
            trainer.process.send_signal(sent)
            if sent == signal.SIGTERM:
                trainer.go()  # a hash that is under way ends first
            ended = trainer.process.wait(60)
            need(
                ended == (128 + sent if sent == signal.SIGTERM else -sent), f"it ended with {ended}"
            )
            trainer.kill()
        found.append(record.exists())
    finish(work.recipe, run, *settings)
    entries = [json.loads(line) for line in record.read_text().splitlines() if line]
    paths = Counter(entry[0] for entry in entries)
    need(max(paths.values()) == 1, paths)
    return f"{len(found)} kills, {len(paths)} files hashed once each; " + same(
        run, work.whole(*settings)
    )


BOMB = """
import re, sys
from pathlib import Path
from nalanda.config.load import load_config
from nalanda.config.schema import DataConfig
from nalanda.data.sources import open_corpus
from nalanda.common.errors import InputError

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1000

before, source, skip = peak(), sys.argv[1], sys.argv[2] == "skip"
data = DataConfig(source=source, validation_share=1e-9, oversized="skip" if skip else "refuse")
stream, number = open_corpus(data, "train").once(), 0
try:
    for number, text in enumerate(stream.texts(), 1):
        if number == 100:
            break
except InputError as error:
    print(error)
print(f"{number} {stream.left.total()} {peak() - before:.0f}")
"""


def bombs(work: Work) -> str:
    """A zstandard shard of 0.3 MB holds three gigabytes, and a gzip shard of 3 MB one, as short lines or as
    one line.

    Reading takes less than 200 MB. A line above the limit is refused by file and number, or left out and
    counted.
    """
    folder, most = work.folder / "bombs", 0.0
    folder.mkdir()
    line, good = b'{"text": "abcd"}\n' * (1 << 16), b'{"text": "the last"}\n'
    for name, piece in (("lines", line), ("one", bytes(1 << 20))):
        for suffix, size, compressor in (
            ("zst", 3 << 30, zstandard.ZstdCompressor().compressobj()),
            ("gz", 1 << 30, zlib.compressobj(6, zlib.DEFLATED, 31)),
        ):
            with (folder / f"{name}.jsonl.{suffix}").open("wb") as file:
                for _ in range(size // len(piece)):
                    file.write(compressor.compress(piece))
                file.write(compressor.compress(b"\n" + good) + compressor.flush())
    for path in sorted(folder.iterdir()):
        for mode in ("refuse", "skip"):
            done = subprocess.run(
                [sys.executable, "-c", BOMB, str(path), mode], capture_output=True, text=True
            )
            need(done.returncode == 0, done.stderr[-600:])
            *said, counts = done.stdout.splitlines()
            documents, skipped, grown = counts.split()
            most = max(most, float(grown))
            need(float(grown) < 200, f"{path.name}: {grown} MB more")
            if path.name.startswith("lines"):
                need((documents, skipped) == ("100", "0"), f"{path.name}: {counts}")
            elif mode == "refuse":
                need(said and f"{path}, line 1: a document of more than" in said[0], done.stdout)
            else:
                need((documents, skipped) == ("1", "1"), f"{path.name}: {counts}")
    sizes = ", ".join(
        f"{p.name} {p.stat().st_size / 1e3:,.0f} kB" for p in sorted(folder.iterdir())
    )
    return f"{sizes}: at most {most:.0f} MB more than before reading"


def killed_preparations(work: Work) -> str:
    """`nalanda data prepare` is killed after every second file and at random moments, with 1 and 2 workers in
    turn.

    There is no index before it is whole. No finished shard is made again. The set has the same bytes.
    """
    expected, draw, output = (
        work.folder / "prepared" / "code",
        random.Random(work.seed),
        work.run("preparations"),
    )
    prepared(work)
    kills = 0
    for number in range(3 if work.quick else 12):
        process = prepare(work, "code", output, "--workers", str(1 + number % 2))
        count, wanted = 0, 1 + 2 * number
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            count = sum(p.is_file() for p in output.rglob("*"))
            if count >= wanted:
                break
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.01))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        whole = (output / "index.json").exists()
        need(whole or not is_token_set(output), "half a set is taken for a whole one")
        if whole:
            break
    process = prepare(work, "code", output, "--workers", "2")
    text, _ = process.communicate()
    need(process.returncode == 0, text[-600:])
    found = [
        {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (expected, output)
    ]
    need(
        found[0] == found[1],
        f"other files: {sorted({str(p) for p, _ in found[0].items() ^ found[1].items()})}",
    )
    check_set(output, sums=True)
    return f"{kills} kills; {len(found[0])} files equal, their sums those of the index"


# ------------------------------ evaluation

# `nalanda eval` that kills itself before or behind its n-th call of one kind: where answers are kept, or
# results are synced or renamed.
EVAL = """
import os, signal, sys
import nalanda_cli
from nalanda.common import files
from nalanda_eval import cache

at, nth, behind = sys.argv.pop(1), int(sys.argv.pop(1)), sys.argv.pop(1) == "behind"
owner = {"keep": cache.AnswerCache, "sync": files, "rename": os}.get(at)
if owner:
    call, calls = getattr(owner, at), 0

    def deadly(*arguments):
        global calls
        calls += 1
        if calls == nth and not behind:
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(*arguments)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, at, deadly)
nalanda_cli.main()
"""


def evaluation(
    work: Work, output: Path, *point: object, before: tuple[str, ...] = ()
) -> subprocess.Popen:
    """`nalanda eval` of the uninterrupted run's model on 40 documents of two tasks."""
    data = work.folder / "questions"
    with work.locks.setdefault("questions", threading.Lock()):
        if not data.exists():
            data.mkdir()
            words, asked = (
                " ".join(documents("code")[0]).split(),
                {"piqa_val": [], "arc_easy_test": []},
            )
            for k in range(40):
                goal, ends = " ".join(words[k : k + 9]), words[-k - 4 :][:4]
                asked["piqa_val"].append(
                    {"goal": goal, "sol1": ends[0], "sol2": ends[1], "label": k % 2}
                )
                asked["arc_easy_test"].append({"query": goal, "choices": ends, "gold": k % 4})
            for name, rows in asked.items():
                (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tasks = work.whole() / "final", ("--tasks", "piqa,arc_easy", "--batch-size", "2")
    command = [
        sys.executable,
        "-c",
        EVAL,
        *map(str, point or ("nowhere", 0, "")),
        "eval",
        str(model),
        *tasks,
    ]
    return subprocess.Popen(
        [*before, *command, "--data", str(data), "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def evaluated(work: Work, output: Path, code: int = 0, **options) -> str:
    process = evaluation(work, output, **options)
    text, _ = process.communicate()
    need(process.returncode == code, f"exit code {process.returncode}, not {code}: {text[-600:]}")
    need("Traceback" not in text, text[-600:])
    return text


def results(output: Path) -> dict:
    """results.json but for its clocks and for how many answers an earlier start had kept."""
    found = json.loads((output / "results.json").read_text())
    del found["date"]
    for model in found["models"]:
        del model["seconds"], model["found"]
    return found


def evaluation_killed(work: Work) -> str:
    """`nalanda eval --output` is killed at random moments, while it keeps answers, and while it syncs and
    renames its results.

    Started again it ends with the same results.json, which is never there in part.
    """
    output, expected = work.run("eval-killed"), work.run("eval-whole")
    evaluated(work, expected)
    draw, kept = random.Random(work.seed), 0
    points = [("keep", 2, "before"), ("keep", 4, "behind"), "time", "time", ("sync", 1, "before")]
    points += [("rename", nth, when) for nth, when in ((2, "behind"), (3, "before"), (3, "behind"))]
    for point in points:
        process = evaluation(work, output, *(point if point != "time" else ()))
        if point == "time":
            deadline = time.monotonic() + 120
            while not (output / "answers.sqlite").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 15))
            os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        need(process.returncode == -signal.SIGKILL or point == "time", f"{point}: {text[-400:]}")
        if (output / "results.json").exists():
            need(results(output) == results(expected), f"{point}: other results.json")
        else:
            kept += 1
    evaluated(work, output)
    need(results(output) == results(expected), "other results.json than without kills")
    for name in ("results.md", "results.csv"):
        need((output / name).stat().st_size > 0, f"{name} is empty")
    need(not list(output.glob(".tmp-*")), "a half-written file stays")
    again = json.loads((output / "results.json").read_text())["models"][0]
    need(again["found"] == again["log_likelihoods"] > 0, "answers were lost")
    return f"{len(points)} kills, {kept} of them before any results; results.json equal"


def evaluation_faults(work: Work) -> str:
    """The file of answers of `nalanda eval --output` is cut short, emptied, replaced, or a bit of it is
    flipped. A file stands where the folder should be, the folder cannot be written, or the disk is full.

    The results are the same, or there is one line and its exit code. Results never differ.
    """
    expected, output, named = work.run("eval-faults-whole"), work.run("eval-faults"), 0
    evaluated(work, expected)
    content = (expected / "answers.sqlite").read_bytes()
    draw = random.Random(work.seed)
    output.mkdir()

    def flipped(place: int) -> bytes:
        return (
            content[:place]
            + bytes([content[place] ^ 1 << draw.randrange(8)])
            + content[place + 1 :]
        )

    harms = [content[: len(content) // 2], b"", b"no database" * 99, flipped(20)]
    harms += [flipped(draw.randrange(len(content))) for _ in range(2)]
    for number, harmed in enumerate(harms):
        (output / "answers.sqlite").write_bytes(harmed)
        (output / "results.json").unlink(missing_ok=True)
        process = evaluation(work, output)
        text, _ = process.communicate()
        need(
            "Traceback" not in text and process.returncode in (0, 2),
            f"harm {number}: {text[-400:]}",
        )
        if process.returncode:
            said = [line for line in text.splitlines() if line.startswith("nalanda: ")]
            need(len(said) == 1 and "answers.sqlite" in said[0], f"harm {number}: {text[-400:]}")
            named += 1
        else:
            need(results(output) == results(expected), f"harm {number}: other results")
    places = {"a file": expected / "results.csv", "below a file": expected / "results.csv" / "x"}
    able = (
        subprocess.run([*TMPFS, f"mount -t tmpfs tmpfs {output}"], capture_output=True).returncode
        == 0
    )
    for name, place in places.items():
        text = evaluated(work, place, 2)
        need(f"nalanda: --output {place}: " in text, f"{name}: {text[-400:]}")
    if not able:
        return f"{len(harms)} harms, {named} named; 2 places refused; no tmpfs may be mounted here"
    locked = work.run("eval-locked")
    locked.mkdir()
    mount = 'mount -t tmpfs -o ro tmpfs "$0" && "$@"'
    text = evaluated(work, locked, 2, before=(*TMPFS, mount, str(locked)))
    need(f"nalanda: --output {locked}: nothing may be written there" in text, text[-400:])
    full = work.run("eval-full")
    full.mkdir()
    text = evaluated(work, full, 74, before=(*TMPFS, MOUNT, str(full), "24k"))
    need("nalanda: " in text and "the disk is full" in text, text[-400:])
    full.rmdir()
    full.with_name("eval-full.kept").rename(full)
    evaluated(work, full)
    need(results(full) == results(expected), "after the full disk: other results")
    return f"{len(harms)} harms, {named} named; 3 places refused; a tmpfs of 24 kB full, then equal with room"


QUICK = (sigkill, damaged, hostile_checkpoint)
CASES = (
    sigkill,
    retention,
    killed_in_validation,
    resumes,
    workers,
    processes,
    preparation,
    carried,
    asynchronous,
    fsdp,
    rank_killed,
    context,
    contexts,
    damaged,
    disk_full,
    signals,
    truncated,
    signals_on_one_rank,
    signals_to_all,
    sleeping_rank,
    bad_steps,
    bad_step_on_one_rank,
    spoilt_at_a_save,
    nan_validation,
    two_at_once,
    no_checkpoint_left,
    other_moments,
    harmed_folder,
    clock,
    servers,
    dying_store,
    machines,
    changed,
    accumulation,
    hostile_checkpoint,
    remote_code,
    secrets,
    edited,
    killed_while_hashing,
    bombs,
    killed_preparations,
    evaluation_killed,
    evaluation_faults,
)
