"""Records of a run: metrics.jsonl, run.json, TensorBoard, wandb or trackio, and the console."""

import contextlib
import importlib
import io
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from nalanda.common.errors import InputError, first_line
from nalanda.common.files import read_object, stored_recipe, write_atomically
from nalanda.common.progress import Progress
from nalanda.common.text import duration, fixed, si, without_infinities
from nalanda.config.schema import LogConfig

UTILISATION = (0.1, 0.4)
"""Expected range of a run's share of the peak FLOPs. Public figures for linear attention on one H100 are 20 %
at 340 M and 40 % at 1.3 B parameters. Small models and CPUs reach less, as the first steps then show."""

BLOCK = 1 << 16
"""Bytes that `last_metrics` reads at a time."""

FORKED = "tokens_before_fork"
"""Key of run.json, of a run that began with another one's checkpoint: that one's tokens."""

MEASURED = 10
"""Steps that tell the time of the run, after the first one, which allocates and compiles."""


class RunLog:
    """Writes to metrics.jsonl, TensorBoard, tracker and console.

    Opening at a step removes later lines from metrics.jsonl, so that a resumed run reports no step twice.
    `keep_events`, for a rollback, keeps their events. Processes other than the main one pass `quiet=True` and
    write nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        step: int,
        steps: int,
        quiet: bool = False,
        keep_events: bool = False,
    ):
        # Quiet processes get as far as the bar, so that `doing` and `advance` work on all.
        self.quiet, self.steps = quiet, steps
        self.board = self.tracker = None
        self.progress = Progress("step", steps, start=step, stream=sys.stdout, quiet=quiet)
        self.expected: tuple[int, float, float] | None = None
        self.taken: list[float] = []
        self.guarded = Guarded("TensorBoard", self.say)
        if quiet:
            return
        self.file = run_dir / "metrics.jsonl"
        # Before metrics.jsonl is cut below: it says which steps the tracker has.
        if config.tracker != "none":
            self.tracker = Tracker(config, run_dir, self.say)
        if bad := cut_metrics(self.file, step, keep_events):
            self.say(f"{self.file}: {bad} line(s) cannot be read; they are kept and ignored")
        self.stream = self.file.open("a", encoding="utf-8")
        if config.writes_board():
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            # purge_step hides what an earlier start wrote of the steps that are made again.
            folder = str(run_dir / "tensorboard")
            self.board = self.guarded(SummaryWriter, folder, purge_step=step + 1)
        self.progress.__enter__()

    def write(self, **values: Any) -> None:
        """Writes and syncs a line of metrics.jsonl. Unless it is an event, its numbers also go to TensorBoard
        and the tracker."""
        if self.quiet:
            return
        self.stream.write(json.dumps(without_infinities(values)) + "\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())
        if "event" in values:
            return
        numbers = {k: v for k, v in values.items() if k != "step" and isinstance(v, (int, float))}
        if self.board:
            for key, value in numbers.items():
                self.guarded(self.board.add_scalar, key, value, values["step"])
        if self.tracker:
            self.tracker.log(numbers, values["step"])

    def expect(self, steps: int, shortest: float, first: float) -> None:
        """Lets `advance` measure the first steps and say once how long `steps` take.

        shortest, first: seconds of all of them and of the first one, at the larger share of the peak in UTILISATION.
        """
        self.expected = steps, shortest, first

    def advance(
        self,
        step: int,
        seconds: float,
        left: float,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens_per_second: float,
        mfu: float,
    ) -> None:
        """Moves the progress bar, and writes a line now and then.

        seconds: of this step. left: seconds of all remaining steps.
        """
        self.doing("step")
        self.progress.to(
            step,
            f"loss {loss:.4f}",
            details=[
                f"{si(tokens_per_second)} tok/s",
                f"MFU {mfu:.1%}",
                f"grad norm {grad_norm:.2f}",
                f"lr {lr:.2e}",
            ],
            # The first step allocates and compiles: no time is foretold from it.
            left=0.0 if self.expected else left,
            end=step == self.steps,
        )
        if self.expected:
            self.taken.append(seconds)
            if len(self.taken) > MEASURED:
                self.say(f"time       {measured_time(*self.expected, self.taken[1:], step)}")
                self.expected = None

    def doing(self, what: str) -> None:
        """Names the current work on the bar."""
        self.progress.call(what)

    def event(self, step: int, kind: str, *, reason: str = "", **values: Any) -> None:
        """Records an event at `step` (skipped, rollback, …) in metrics.jsonl and on the console."""
        if reason:
            values = {"reason": reason, **values}
        self.write(step=step, event=kind, **values)
        self.say(": ".join(filter(None, [f"step {step}", kind, reason])))

    def say(self, line: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self.progress.say(line)

    def close(self) -> None:
        if self.quiet:
            return
        self.progress.__exit__()
        if self.board:
            self.guarded(self.board.close)
        if self.tracker:
            self.tracker.finish()
        self.stream.close()


class Guarded:
    """Calls functions that only show metrics. After one fails, on a full disk for example, it says so and makes
    no more calls. Training continues."""

    def __init__(self, name: str, say: Callable[[str], None]):
        self.name, self.say, self.failed = name, say, False

    def __call__(self, call: Callable, *arguments: Any, **options: Any) -> Any:
        if self.failed:
            return None
        try:
            return call(*arguments, **options)
        except Exception as error:
            self.failed = True
            self.say(
                f"{self.name} gets no more metrics; metrics.jsonl still does: {first_line(error)}"
            )


class Tracker:
    """The run at wandb or trackio, by their common functions: init, log, finish.

    tracker.json has the tracker's run id and the last step sent: a resumed run continues there, and sends no
    step twice. Later calls are `Guarded`.

    Raises:
        InputError: the tracker does not start. That it is installed was checked with the recipe.
    """

    def __init__(self, config: LogConfig, run_dir: Path, say: Callable[[str], None]):
        self.kind, self.guarded = config.tracker, Guarded(config.tracker, say)
        record = self._read_record(run_dir)
        write_atomically(run_dir / "tracker.json", json.dumps(record) + "\n")
        self.sent = record["step"]

        # wandb takes an id; a name alone would not continue its run.
        options = {"id": record["id"], "dir": str(run_dir)} if self.kind == "wandb" else {}
        try:
            self.module = importlib.import_module(self.kind)
            self.module.init(
                project=config.project,
                name=f"{run_dir.resolve().name}-{record['id']}",  # trackio finds a run by its name
                config=stored_recipe(run_dir),
                resume="allow",
                **options,
            )
        except Exception as error:
            raise InputError(f"log.tracker: {self.kind}: {first_line(error)}") from None

    def _read_record(self, run_dir: Path) -> dict[str, Any]:
        """The contents of tracker.json, with the last step sent; new ones for another tracker."""
        record: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # missing or damaged
            record = json.loads((run_dir / "tracker.json").read_text())
        if record.get("tracker") != self.kind:
            return {"tracker": self.kind, "id": secrets.token_hex(4), "step": 0}
        # All steps in metrics.jsonl were sent; the resume will cut that file.
        sent = [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")]
        record["step"] = max([record["step"], *sent])
        return record

    def log(self, numbers: dict[str, float], step: int) -> None:
        if step > self.sent:
            self.guarded(self.module.log, numbers, step=step)

    def finish(self) -> None:
        self.guarded(self.module.finish)


def read_facts(run_dir: Path) -> dict:
    """Reads run.json; {} if there is none. Raises `InputError` if it is unreadable."""
    file = run_dir / "run.json"
    return read_object(file) if file.is_file() else {}


def write_facts(run_dir: Path, facts: dict) -> None:
    """Writes run.json."""
    write_atomically(run_dir / "run.json", json.dumps(facts, indent=1) + "\n")


def read_metrics(file: Path) -> Iterator[dict]:
    """The readable lines of a metrics.jsonl; a kill may leave a torn one. "nan", "inf" and "-inf" become
    floats again. Without the file there are none."""
    if not file.is_file():
        return
    with file.open("rb") as stream:
        yield from filter(None, map(_values, stream))


def last_metrics(file: Path) -> Iterator[dict]:
    """The lines of `read_metrics`, the newest first. A caller that stops early reads only the file's end."""
    if not file.is_file():
        return
    with file.open("rb") as stream:
        at, rest = stream.seek(0, os.SEEK_END), b""
        while at:
            # The block before, with the line that the border to the block behind it has cut.
            at, stop = max(0, at - BLOCK), at
            stream.seek(at)
            lines = io.BytesIO(stream.read(stop - at) + rest).readlines()
            rest = lines.pop(0) if at else b""  # its beginning is in the block before
            yield from filter(None, map(_values, reversed(lines)))


def with_hours(run_dir: Path) -> Iterator[tuple[dict, float]]:
    """Each line of a run's metrics, and the hours of training up to it, without validation and saving.

    A fork's hours are its own: it begins with the tokens of the run that it forks.
    """
    hours, before = 0.0, read_facts(run_dir).get(FORKED, 0)
    for line in read_metrics(run_dir / "metrics.jsonl"):
        if {"loss", "tokens"} <= line.keys() and "event" not in line:
            # The rate of a line holds since the line before.
            if rate := line.get("tokens_per_second"):
                hours += (line["tokens"] - before) / rate / 3600
            before = line["tokens"]
        yield line, hours


def cut_metrics(file: Path, step: int, keep_events: bool = False) -> int:
    """Removes the lines after `step`, and a torn last line, from a metrics.jsonl; `keep_events` keeps events.

    Events before a rollback that stays are kept, too: their steps are not made again. Returns the number of
    other unreadable lines, which stay.
    """
    if not file.exists():
        return 0
    # beyond: whether the last readable line is of a step after `step`; a torn line behind it goes with it.
    lines, unreadable, beyond = [], 0, False
    removable: list[int] = []  # indices in `lines` of events that a rollback may follow
    for line in io.BytesIO(file.read_bytes()):
        values = _values(line)
        if values is None:
            if line.endswith(b"\n") and not beyond:
                unreadable += 1
                lines.append(line)
            continue

        beyond = values["step"] > step
        if values.get("event") == "rollback" and not beyond:
            # This rollback stays in the file, and so do the events that led to it.
            removable.clear()
        if beyond and "event" in values and not keep_events:
            removable.append(len(lines))
        if not beyond or "event" in values:
            lines.append(line)
    for index in removable:
        lines[index] = b""
    write_atomically(file, b"".join(lines))
    return unreadable


def _values(line: bytes) -> dict | None:
    """The values of a line of a metrics.jsonl; None if it is unreadable."""
    try:
        values = json.loads(line)
        if not (
            line.endswith(b"\n")
            and isinstance(values, dict)
            and isinstance(values.get("step"), int)
        ):
            return None
    except ValueError:
        return None
    return {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in values.items()}


def describe_perplexity(values: dict[str, float]) -> str:
    """`perplexity 12.34 (web 11.20, code 5.31), bits a byte 0.912 (web 0.950, code 0.641)`."""
    texts = []
    for title, key, form in (("perplexity", "val_ppl", ".2f"), ("bits a byte", "val_bpb", ".3f")):
        if key not in values:
            continue
        text = f"{title} {fixed(values[key], form)}"
        by_source = [
            f"{name.partition('/')[2]} {fixed(value, form)}"
            for name, value in values.items()
            if name.startswith(f"{key}/")
        ]
        texts.append(f"{text} ({', '.join(by_source)})" if by_source else text)
    return ", ".join(texts)


def measured_time(steps: int, shortest: float, first: float, taken: list[float], step: int) -> str:
    """The time of `steps` steps, from the seconds `taken` by the last of the first ones, up to `step`.

    shortest, first: of `RunLog.expect`. Steps of later stages may cost more than the first ones.
    """
    # `first` assumes this share of the peak; the time is inverse to it.
    share = UTILISATION[1] * first / median(taken)
    seconds = shortest * UTILISATION[1] / share
    measured = (
        f"{duration(seconds)} for {steps:,} steps, by steps {step - len(taken) + 1} to {step}"
    )
    text = f"{measured}: {100 * share:.1f} % of the peak"
    low, high = UTILISATION
    if low <= share <= high:
        return text
    return f"{text}, where nalanda info assumes {100 * low:.0f} to {100 * high:.0f} %"
