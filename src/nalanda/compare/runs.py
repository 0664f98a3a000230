"""Carries out the runs of a study: each is `nalanda train` in a process of its own."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nalanda.common.errors import ExitCode, InputError, output_folder
from nalanda.common.files import alone, read_recipe, write_atomically
from nalanda.common.progress import Progress
from nalanda.common.text import redact
from nalanda.compare.options import Execution
from nalanda.compare.plan import (
    StudyRun,
    command_of,
    folder_of,
    fork_checkpoint,
    is_complete,
    plan_runs,
    trunk_of,
)
from nalanda.compare.results import RETRIES, Result, read_result
from nalanda.compare.study import Study, check_same, study_text
from nalanda.config.load import differences, load_config
from nalanda.config.schema import RunConfig
from nalanda.data.workers import processors
from nalanda.storage.remote import is_store, read_bytes, staging, upload
from nalanda.train.log import last_metrics

PAUSE = 0.1
"""Seconds between two looks at the processes."""

SHARED_PAUSE = 10.0
"""Seconds between two looks at the records of other shares."""


@contextlib.contextmanager
def claimed(
    study: Study, configs: Mapping[str, RunConfig], share: tuple[int, int]
) -> Iterator[Path]:
    """Claims the study's folder for one share of its runs, and records the study there. Yields the local folder.

    Raises `InputError` if the folder has another study, or another command makes this share.
    """
    folder = staging(study.output_dir)
    output_folder(folder, "output_dir")
    taken = (
        f"{study.output_dir}: another command makes these runs; wait for its end, or take another "
        "output_dir or --shard"
    )
    with alone(folder / f".lock-{share[0] + 1}-of-{share[1]}", taken):
        record_study(study, configs, folder)
        yield folder


def record_study(study: Study, configs: Mapping[str, RunConfig], folder: Path) -> None:
    """Writes compare.yaml, the study, and the recipe of each arm to `arms`. Raises `InputError` for another one."""
    file = folder / "compare.yaml"
    fetch(study, file, folder)
    others = [p for p in folder.iterdir() if p.name != "arms" and not p.name.startswith(".")]
    if not file.is_file() and others:
        raise InputError(f"{folder} has files that are no study; choose another output_dir")

    if file.is_file():
        check_same(file.read_text(encoding="utf-8"), study, str(file))
    recipes = folder / "arms"
    recipes.mkdir(exist_ok=True)
    for arm, config in configs.items():
        recipe = recipes / f"{arm}.yaml"
        fetch(study, recipe, folder)
        check_recipe(recipe, config)

    for arm, config in configs.items():
        write_atomically(recipes / f"{arm}.yaml", config.to_yaml())
    write_record(file, study_text(study))
    if is_store(study.output_dir):
        for written in (*(recipes / f"{arm}.yaml" for arm in configs), file):
            upload(written, f"{study.output_dir}/{written.relative_to(folder)}", RETRIES)


def fetch(study: Study, file: Path, folder: Path) -> None:
    """Copies a file of the study's folder from its store, if it is in one and has it."""
    if is_store(study.output_dir):
        url = f"{study.output_dir}/{file.relative_to(folder)}"
        if stored := read_bytes(url, RETRIES, missing=b""):
            write_record(file, stored.decode(errors="replace"))


def write_record(file: Path, text: str) -> None:
    """Writes a file of the study. Only this user may read one with a URL's password or signature."""
    write_atomically(file, text, private=redact(text) != text)


def check_recipe(file: Path, config: RunConfig) -> None:
    """Raises `InputError` if an arm was recorded with another recipe."""
    if not file.is_file():
        return
    changed = differences(load_config(file).to_dict(), config.to_dict())
    for key, (old, new) in changed.items():
        # The folder may move, and workers are no matter of the result.
        if key in ("output_dir", "data.workers"):
            continue
        raise InputError(
            f"{file}: the recipe was another when the study began: {key} was {old!r} and is {new!r}; "
            "set it back, or choose another output_dir"
        )


def check_trained(study: Study, run: StudyRun, configs: Mapping[str, RunConfig]) -> None:
    """Raises `InputError` if the records of a run are of another rate, or left the first arm's run elsewhere."""
    folder = staging(folder_of(study, run))
    try:
        recipe = read_recipe(folder)
    except ValueError:  # then the run is unreadable, which its state says
        return
    wanted: dict[str, Any] = {
        "optim.lr": configs[run.arm].optim.lr if run.rate is None else run.rate
    }
    if trunk := trunk_of(study, run):
        wanted["train.resume"] = fork_checkpoint(study, trunk, configs).name
    for key, value in wanted.items():
        section, name = key.split(".")
        stored = (recipe.get(section) or {}).get(name)
        # A folder may have moved: of a checkpoint its name alone is compared.
        stored = Path(stored).name if isinstance(stored, str) else stored
        alike = f"{stored:g}" == f"{value:g}" if isinstance(stored, float) else stored == value
        if stored is not None and not alike:
            raise InputError(
                f"{folder}: this run has {key} {stored}, and the study has {value}; set compare.yaml back, or "
                "remove the run"
            )


# ------------------------------ processes


@dataclass
class TrainingProcess:
    """A process that trains, and its number among those at work."""

    process: subprocess.Popen
    slot: int
    log: Path
    begin: int
    """Bytes of the log before its own: each start of a run appends."""


class Runner:
    """The processes that train, and the results so far."""

    def __init__(self, study: Study, configs: Mapping[str, RunConfig], execution: Execution):
        self.study, self.configs, self.execution = study, configs, execution
        self.share = execution.share()
        self.workers: dict[StudyRun, TrainingProcess] = {}
        self.results: dict[str, Result] = {}
        self.seen = 0.0

    @property
    def runs(self) -> list[StudyRun]:
        return plan_runs(self.study, self.results)

    def is_ours(self, run: StudyRun) -> bool:
        number, count = self.share
        return run.number % count == number

    def result_of(self, run: StudyRun) -> Result:
        return self.results.get(run.name, Result("empty"))

    def train_all(self) -> bool:
        """Trains this share of the runs. Returns whether all runs of the study have ended.

        Raises `InputError` if a run ended for another reason than bad steps.
        """
        self.look()
        with (
            Progress(
                "comparing", self.steps_of_all(), "steps", start=self.steps_done()
            ) as progress,
            self.ending(),
        ):
            while True:
                self.reap(progress)
                self.start()
                progress.to(self.steps_done(), self.describe(), total=self.steps_of_all())
                waiting = [run for run in self.runs if self.waits_for(run)]
                if not self.workers and not waiting:
                    break
                time.sleep(PAUSE)
                shared = bool(self.workers) or is_store(self.study.output_dir)
                if time.monotonic() - self.seen > (SHARED_PAUSE if shared else PAUSE):
                    self.look()
        # The last share to end sees what the others have finished meanwhile.
        self.look()
        return is_complete(self.study, self.runs) and all(
            self.result_of(r).ended for r in self.runs
        )

    def look(self) -> None:
        """Reads the records of all runs that have not ended here."""
        while True:
            before = self.runs
            for run in before:
                if self.result_of(run).ended or run in self.workers:
                    continue
                if result := read_result(folder_of(self.study, run)):
                    # Its recipe stays: once when the run is seen, and once when it has ended.
                    if run.name not in self.results or result.ended:
                        check_trained(self.study, run, self.configs)
                    self.results[run.name] = result
            # What was read may tell a rate, and so further runs.
            if self.runs == before:
                break
        self.seen = time.monotonic()

    def waits_for(self, run: StudyRun) -> bool:
        """Whether this command still has to wait for a run that it does not train itself now."""
        result = self.result_of(run)
        if result.ended or run in self.workers:
            return False
        if self.is_ours(run):
            return True
        # Of another share: only what decides on runs of ours.
        rates_lack = run.trial and not is_complete(self.study, self.runs)
        ours_leave_it = any(trunk_of(self.study, o) == run for o in self.runs if self.is_ours(o))
        return rates_lack or ours_leave_it

    def start(self) -> None:
        """Starts runs of this share, as many as there is room for."""
        for run in self.runs:
            if len(self.workers) >= self.execution.workers:
                break
            trunk = trunk_of(self.study, run)
            if (
                trunk is not None
                and self.result_of(trunk).diverged
                and not fork_checkpoint(self.study, trunk, self.configs).is_dir()
            ):
                lost = Result("failed", diverged=True, reason=f"{trunk.name} diverged")
                self.results[run.name] = lost
            if self.can_start(run):
                self.workers[run] = self.launch(run)

    def can_start(self, run: StudyRun) -> bool:
        """Whether a run is of this share, not at work anywhere, and has the checkpoint that it leaves."""
        result, trunk = self.result_of(run), trunk_of(self.study, run)
        idle = run not in self.workers and result.state != "running" and not result.ended
        return self.is_ours(run) and idle and (trunk is None or self.result_of(trunk).ended)

    def launch(self, run: StudyRun) -> TrainingProcess:
        """Starts a run. Its output goes to a .log beside its folder."""
        recipe, overrides = command_of(self.study, run, self.configs)
        environment = dict(os.environ)
        taken = {worker.slot for worker in self.workers.values()}
        slot = min(set(range(self.execution.workers)) - taken)
        overrides += self.place(run, slot, environment)

        train = ["-m", "nalanda_cli", "train", recipe, *overrides]
        command = [*self.execution.launcher(), *train]
        log = staging(self.study.output_dir) / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            stream.write(f"{redact(shlex.join(command))}\n".encode())
            stream.flush()
            begin = stream.tell()
            # A session of its own: an interrupt reaches this command alone, which then ends the run.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return TrainingProcess(process, slot, log, begin)

    def place(self, run: StudyRun, slot: int, environment: dict[str, str]) -> list[str]:
        """Gives one of several workers its GPU, or its cores by an override, which it returns."""
        workers = self.execution.workers
        if workers == 1 or self.execution.launch:
            return []
        if torch.cuda.is_available():
            # Without the variable all cards are this command's.
            cards = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(
                map(str, range(torch.cuda.device_count()))
            )
            names = cards.split(",")
            environment["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
            return []
        cores = max(1, processors() // workers)
        threads = self.configs[run.arm].train.cpu_threads
        return [f"train.cpu_threads={min(cores, threads or cores)}"]

    def reap(self, progress: Progress) -> None:
        """Takes the results of the processes that have ended."""
        for run, worker in list(self.workers.items()):
            code = worker.process.poll()
            if code is None:
                continue
            del self.workers[run]
            result = read_result(folder_of(self.study, run)) or Result("empty")
            self.results[run.name] = result
            if not result.ended:
                self.refuse(run, result, worker)
            progress.to(self.steps_done(), describe_result(run, result), end=True)

    def refuse(self, run: StudyRun, result: Result, worker: TrainingProcess) -> None:
        """Raises `InputError` for a run that ended without a result, with the exit code of its process."""
        output = worker.log.read_bytes()[worker.begin :].decode(errors="replace")
        code, line = cause_of(output, worker.process.returncode, result.reason)
        again = f"nalanda compare {shlex.quote(self.study.output_dir)} goes on"
        error = InputError(f"{run.name}: {line}; see {worker.log}; {again}")
        if code:
            error.exit_code = code if code > 0 else 128 - code
        raise error

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Ends the processes with this command: each finishes its step and saves a checkpoint."""
        before = signal.signal(signal.SIGTERM, _raise_exit)
        try:
            yield
        finally:
            for worker in self.workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGTERM)
            for worker in self.workers.values():
                worker.process.wait()
            signal.signal(signal.SIGTERM, before)

    # ------------------------------ progress

    def steps_of(self, run: StudyRun) -> int:
        return self.configs[run.arm].train.steps

    def steps_of_all(self) -> int:
        """Steps of all runs, also of those that wait for the choice of a rate."""
        runs = self.runs
        begun = {run.arm for run in runs if not run.trial}
        waiting = [self.configs[arm].train.steps for arm in self.study.arms if arm not in begun]
        return sum(map(self.steps_of, runs)) + sum(waiting) * self.study.seeds

    def steps_done(self) -> int:
        """Steps of all runs, as far as this command knows."""
        done = 0
        for run in self.runs:
            if run in self.workers:
                file = staging(folder_of(self.study, run)) / "metrics.jsonl"
                done += next((line["step"] for line in last_metrics(file)), 0)
            else:
                result = self.result_of(run)
                done += self.steps_of(run) if result.ended else result.step
        return done

    def describe(self) -> str:
        """What is under way: the runs of this command, or what it waits for."""
        if self.workers:
            return ", ".join(run.name for run in self.workers)
        waiting = [run.name for run in self.runs if self.waits_for(run)]
        return f"waiting for {', '.join(waiting[:3])}{' …' * (len(waiting) > 3)}" if waiting else ""


def cause_of(output: str, code: int, reason: str) -> tuple[int, str]:
    """The exit code of a training that ended, and its reason in a line.

    output: of this start alone. reason: that of run.json, which an earlier start may have written.
    """
    # torchrun ends with 1, and reports the code and the line of the process that failed first.
    _, launched, report = output.rpartition("\nRoot Cause ")
    if launched and (match := re.search(r"exitcode +: (-?\d+)", report)):
        output, code = report, int(match[1])

    if code < 0:
        return code, f"ended by {signal.Signals(-code).name}"
    lines = [x.partition("nalanda: ")[2] for x in output.splitlines() if "nalanda: " in x]
    if code in {*ExitCode} and (lines or reason):
        return code, [reason, *lines][-1]
    return code, f"exit code {code}"


def _raise_exit(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)


def describe_result(run: StudyRun, result: Result) -> str:
    if result.diverged:
        return f"{run.name} diverged: {result.reason or 'its loss is not finite'}"
    bits = "" if result.bits is None else f", {result.bits:.4f} bits a byte"
    return f"{run.name}: validation loss {result.loss:.4f}{bits}"
