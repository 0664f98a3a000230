"""The second fork experiment: does ‖q‖ in NaLa's exponent lower the loss, or the exponent's level?

A trunk is trained once. Its forks get its weights, its optimizer's state and its batches, and differ in the
exponent alone. `fork2.yaml` has the models, arms, sentences and readings, fixed before the first record,
`fork_arms.py` the arms, `fork2_report.py` the estimator. Each run leaves one record, and goes on after a kill.
Several processes may share a folder. Of the first experiment there are `fork.yaml` and the records, which
`fork_levels.py` reads.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from nalanda_kernels import use_backend

import nalanda.model
import nalanda.train.loss
import nalanda.train.optim
from nalanda.common.errors import InputError
from nalanda.common.files import alone, write_atomically
from nalanda.common.versions import cpu_model, versions
from nalanda.config.load import read_yaml, section
from nalanda.config.schema import RunConfig
from nalanda.data.text_bytes import text_bytes
from nalanda.data.tokenizer import build_tokenizer
from nalanda.model import NalandaForCausalLM
from nalanda.train.build import open_batches
from nalanda_lab import equal, fork_arms, norms, paired, texts
from nalanda_lab.fork_arms import Fork, add_noise, beta_means, head_means, measure
from nalanda_lab.paired import draw_weights
from nalanda_lab.sweep import Record

FIRST, SECOND = (Path(__file__).with_name(name) for name in ("fork.yaml", "fork2.yaml"))
SAVE_EVERY = 240.0
"""Seconds between two saved states of a run."""


def load_study(file: Path = SECOND) -> dict[str, Any]:
    """A study like `fork2.yaml`. Raises `InputError` for another."""
    study = read_yaml(file)
    if "contrasts" not in study:
        raise InputError(f"{file}: has no contrasts; give a study like {SECOND.name}")
    return study


def hash_files(*files: Path) -> str:
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def code_hashes(study_file: Path) -> dict[str, str]:
    """The hashes `rule`, of the study's text, and `model`, of code that trains.

    Runs need both. A report needs the rule alone, so that it reads records of earlier code.
    """
    modules = [nalanda.train.loss, nalanda.train.optim, fork_arms, paired, norms, equal, texts]
    trains = [Path(__file__), *(Path(str(module.__file__)) for module in modules)]
    model_files = sorted(Path(str(nalanda.model.__file__)).parent.glob("*.py"))
    return {"rule": hash_files(study_file), "model": hash_files(*model_files, *trains)}


# ------------------------------ runs and records


def name_of(run: dict[str, Any]) -> str:
    """`trunks-deltanet-1-blind-80`."""
    return "-".join(str(run[key]) for key in ("part", "mixer", "seed", "arm", "fork"))


def all_runs(study: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms of all trunks, seed by seed over the mixers. An arm with seeds of its own has only those."""
    runs = []
    seeds = sorted({seed for mixer in study["mixers"].values() for seed in mixer["seeds"]})
    for seed, (mixer, settings) in itertools.product(seeds, study["mixers"].items()):
        if seed not in settings["seeds"]:
            continue
        kind = "softmax" if settings["model"]["mixer"] == "softmax" else "nala"
        for fork, arms in study["arms"].items():
            for arm in arms.get(kind, []):
                if seed in study.get(arm, {}).get("seeds", [seed]):
                    run = {"part": "trunks", "mixer": mixer, "seed": seed}
                    runs.append(run | {"rate": settings["rate"], "arm": arm, "fork": fork})
    return runs


def missing(study: dict[str, Any], records: dict[str, Record]) -> list[str]:
    """The names of the runs without a record."""
    return [name for run in all_runs(study) if (name := name_of(run)) not in records]


def read_records(out: Path, hashes: dict[str, str]) -> dict[str, Record]:
    """The records of a folder by name.

    Raises `InputError` for one of another rule, or of another model code or text than the others.
    """
    records, expected = {}, dict(hashes)
    for file in sorted((out / "records").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        for key, value in record["hashes"].items():
            if value != expected.setdefault(key, value):
                raise InputError(
                    f"{file}: its {key} hash is {value}, not {expected[key]}; "
                    "use the code and text of its commit, or another folder"
                )
        records[name_of(record["run"])] = record
    return records


# ------------------------------ running


class Experiment:
    """Runs what a folder has no record for. `records`, `work`, `locks` and `log.txt` are in the folder."""

    def __init__(self, text: Path, out: Path, study_file: Path = SECOND):
        """text: a token set of the study's settings. Raises `InputError` for another."""
        self.study = load_study(study_file)
        self.text, self.out = text, out
        texts.check_text(self.study["recipe"], text)
        self.facts = texts.text_facts(self.text)
        self.hashes = code_hashes(study_file) | {"text": self.facts["fingerprint"]}
        self.saved_at = time.perf_counter()

    def say(self, line: str) -> None:
        """Prints a line and appends it to the log. No line has a loss of an arm: there are no looks."""
        line = f"{time.strftime('%m-%d %H:%M:%S')} {line}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def run(self) -> None:
        """Trains the trunks with their arms."""
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        (self.out / "records").mkdir(parents=True, exist_ok=True)
        read_records(self.out, self.hashes)  # refuses those of another code
        runs = itertools.groupby(all_runs(self.study), lambda run: (run["seed"], run["mixer"]))
        # Arms with a map of their own have no kernel: own and free must round alike.
        with use_backend("torch"):
            for (seed, mixer), arms in runs:
                with self.claim(f"{mixer}-{seed}") as ours:
                    # Read under the lock: another process may just have finished.
                    todo = [run for run in arms if self.lacks(run)] if ours else []
                    if todo:
                        self.run_trunk(todo)

    @contextlib.contextmanager
    def claim(self, trunk: str) -> Iterator[bool]:
        """Whether this process has the trunk and its arms for itself. If so, it keeps them from others."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(alone(self.out / "locks" / trunk, trunk))
            except InputError:
                self.say(f"{trunk}: another process has it")
                yield False
            else:
                yield True

    def run_trunk(self, todo: list[dict[str, Any]]) -> None:
        """Trains a trunk to its forks, then the arms that have no record."""
        any_arm = todo[0]
        trunk = {**any_arm, "arm": "trunk", "fork": 0}
        every = {fork: self.state_file({**trunk, "fork": fork}) for fork in self.study["arms"]}
        forks = {fork: every[fork] for fork in sorted({run["fork"] for run in todo})}
        if not all(self.usable(file) for file in forks.values()):
            run = self.open(trunk)
            for fork, file in forks.items():
                self.advance(run, run.step_at(fork), trunk)
                if run.failed or run.step == run.step_at(fork):
                    self.save(run, file)

        for settings in todo:
            run = self.open(settings)
            if not self.usable(self.state_file(settings)):
                run.load(torch.load(forks[settings["fork"]], weights_only=True)["run"])
                self.leave(run, settings)
            self.finish(run, settings)
        for file in (*every.values(), self.state_file(trunk)):
            file.unlink(missing_ok=True)

    def leave(self, run: Fork, settings: dict[str, Any]) -> None:
        """Makes a run that stands at its fork the arm of `settings`."""
        run.seconds = 0.0
        means = beta_means if settings["arm"] == "deaf" else head_means
        run.become(settings["arm"], means(run.model, list(run.recent)))
        if settings["arm"] == "noise":
            add_noise(run.model, self.study["noise"]["size"], settings["seed"])

    def lacks(self, run: dict[str, Any]) -> bool:
        return not self.record_file(run).is_file()

    def record_file(self, run: dict[str, Any]) -> Path:
        return self.out / "records" / f"{name_of(run)}.json"

    def state_file(self, run: dict[str, Any]) -> Path:
        return self.out / "work" / f"{name_of(run)}.pt"

    def usable(self, file: Path) -> bool:
        """Whether a saved state is there, and of this code and text."""
        return file.is_file() and torch.load(file, weights_only=True)["hashes"] == self.hashes

    def open(self, settings: dict[str, Any]) -> Fork:
        """A run at its last saved state, or at its beginning."""
        recipe = {**self.study["recipe"], "seed": settings["seed"]}
        model = self.study["model"] | self.study["mixers"][settings["mixer"]]["model"]
        recipe |= {"model": model, "optim": {"lr": settings["rate"]}}
        recipe |= {"data": recipe["data"] | {"source": str(self.text)}}
        config = section(RunConfig, recipe | {"tokenizer": f"{self.text}/tokenizer"}, "")

        tokenizer = build_tokenizer(config.tokenizer, config.data, self.text / "tokenizer")
        batches, validation = open_batches(config, tokenizer)
        net = NalandaForCausalLM(equal.configured(model, self.facts["vocab_size"]))
        draw_weights(net, settings["seed"])

        keep = self.study["mean_rows"] // config.train.micro_batch_size
        run = Fork(net, config, batches, keep)
        run.rows, run.bos = list(itertools.chain(*validation.values())), tokenizer.bos_token_id
        run.text_bytes = text_bytes(tokenizer)
        if self.usable(file := self.state_file(settings)):
            run.load(torch.load(file, weights_only=True)["run"])
        return run

    def advance(self, run: Fork, until: int, settings: dict[str, Any]) -> None:
        """Trains up to a step, and saves the state now and then."""
        name, first, start = name_of(settings), run.step, time.perf_counter()
        before = run.seconds
        with run.norms():
            while run.step < until and not run.failed:
                run.advance_one()
                run.seconds = before + time.perf_counter() - start
                if time.perf_counter() - self.saved_at > SAVE_EVERY:
                    self.save(run, self.state_file(settings))
                    tokens = (run.step - first) * run.tokens_per_step
                    speed = tokens / (time.perf_counter() - start)
                    self.say(f"{name}: step {run.step} of {run.steps}, {speed:,.0f} tokens/s")

    def save(self, run: Fork, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"run": run.state(), "hashes": self.hashes}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
        self.saved_at = time.perf_counter()

    def finish(self, run: Fork, settings: dict[str, Any]) -> None:
        """Trains a run to its end and writes its record."""
        self.advance(run, run.steps, settings)
        record: Record = {"run": settings, "hashes": self.hashes, "text": self.facts}
        beside = settings["part"] == "trunks" and settings["arm"] == "own"
        record |= {"failed": run.failed} if run.failed else measure(run, beside)
        if not record.get("failed") and not record["loss"] < 20:
            record["failed"] = f"diverged: its loss at the end is {record['loss']:.3g}"

        record |= {
            "machine": cpu_model(),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }
        record |= {"fp32_products": "default route", "seconds": round(run.seconds, 1)}
        file = self.record_file(settings)
        write_atomically(file, json.dumps(record, indent=1))
        self.state_file(settings).unlink(missing_ok=True)
        self.say(f"{file.stem}: {record.get('failed', 'done')}, {run.seconds:,.0f} s")
