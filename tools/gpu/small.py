"""The paper's table 4 in small: models of 30 M parameters, NaLa beside SiLU at an equal state.

Rates come from models 128 wide, and µP carries them to 512. Several runs share the card; each that ended is a line
of the results, so the next call starts with the others.
"""

import math
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from gpu.card import OUT_OF_TIME, Card, Case, Values, stop
from gpu.results import Results
from gpu.train import (
    SETTINGS,
    Trained,
    find_problems,
    read_facts,
    read_lines,
    text_of,
    text_settings,
)

GROUP = "Table 4 in small"
ARMS = {  # NaLa doubles the features, so half the key's width keeps the state
    "SiLU": ("silu", 1.0),
    "NaLa": ("nala", 0.5),
    "NaLa, learnt level": ("nala_learned", 0.5),
}
MIXERS = ("gated_deltanet", "deltanet")
RATES = (0.002, 0.004, 0.008)
SEEDS = (1, 2, 3)
BASE, WIDTH = 128, 512
AT_ONCE = 4


@dataclass(frozen=True)
class Run:
    mixer: str
    arm: str
    width: int
    seed: int
    rate: float | None = None
    """None: the best of the narrow models'."""

    @property
    def name(self) -> str:
        last = f"seed {self.seed}" if self.rate is None else f"rate {self.rate:g}"
        return f"{self.mixer}, {self.arm}, width {self.width}, {last}"

    def settings(self, card: Card, rate: float) -> list[str]:
        feature_map, expand_k = ARMS[self.arm]
        # The narrow runs are a quarter as long.
        steps = 4 if card.dry else 150 if self.width == BASE else 600
        T, rows, layers, tokens = (32, 1, 1, 64) if card.dry else (1024, 16, 8, 65536)
        head = 16 if card.dry else 64
        width = self.width // (4 if card.dry else 1)
        sizes = {
            **{"mixer": self.mixer, "feature_map": feature_map, "expand_k": expand_k},
            **{"hidden_size": width, "num_heads": width // head, "head_dim": head},
            **{"num_hidden_layers": layers, "intermediate_size": width * 11 // 4},
            **{"tie_word_embeddings": "true", "initializer_range": 0.05},
            **{"parametrization": "mup", "base_width": BASE // (4 if card.dry else 1)},
        }
        text = text_settings(text_of(card, "small"))
        model = ", ".join(f"{key}: {value}" for key, value in sizes.items())
        return [
            *SETTINGS,
            *text,
            f"model={{{model}}}",
            f"seed={self.seed}",
            f"optim.lr={rate}",
            "schedule.name=wsd",
            f"schedule.warmup_steps={steps // 10}",
            f"data.seq_len={T}",
            f"data.max_validation_rows={4 if card.dry else 256}",
            f"train.steps={steps}",
            f"train.tokens_per_step={tokens}",
            f"train.micro_batch_size={rows}",
            f"validation.every={steps}",
            f"checkpoint.every={max(1, steps // 4)}",
            "checkpoint.keep_last=1",
            f"train.compile={str(not card.dry).lower()}",
        ]


def plan(card: Card) -> tuple[list[Run], list[Run]]:
    """The narrow runs, one a rate, and the wide ones, one a seed."""
    rates, seeds, mixers = (
        (RATES[:1], SEEDS[:1], MIXERS[:1]) if card.dry else (RATES, SEEDS, MIXERS)
    )
    pairs = [(mixer, arm) for mixer in mixers for arm in ARMS]
    narrow = [Run(*pair, BASE, 1, rate) for pair in pairs for rate in rates]
    return narrow, [Run(*pair, WIDTH, seed) for seed in seeds for pair in pairs]


def small_cases(card: Card) -> list[Case]:
    narrow, wide = plan(card)
    gaps = [Case(GROUP, gap_name(mixer)) for mixer in dict.fromkeys(run.mixer for run in wide)]
    return [*(Case(GROUP, run.name) for run in (*narrow, *wide)), *gaps]


def gap_name(mixer: str) -> str:
    return f"{mixer}: less SiLU, nats a token"


def run_small(card: Card, results: Results) -> list[str]:
    """Runs what has no validation loss yet. Returns the names of the runs that the time did not reach."""
    narrow, wide = plan(card)
    rate_of = {run: run.rate for run in narrow if run.rate is not None}
    left = run_all(card, results, rate_of)
    if left:
        return [*left, *(run.name for run in wide)]

    chosen: dict[Run, float] = {}
    for run in wide:
        same = [x for x in narrow if (x.mixer, x.arm) == (run.mixer, run.arm)]
        tried = {x.rate: loss_of(results, x) for x in same if loss_of(results, x) is not None}
        if tried:
            chosen[run] = min(tried, key=lambda rate: tried[rate])
    left = run_all(card, results, chosen)
    for mixer in dict.fromkeys(run.mixer for run in wide):
        if values := gaps(results, [run for run in wide if run.mixer == mixer]):
            results.put(Case(GROUP, gap_name(mixer)), values)
    return [*left, *(run.name for run in wide if run not in chosen)]


def loss_of(results: Results, run: Run) -> float | None:
    figure = results.newest(Case(GROUP, run.name), results.facts["card"])
    return figure.get("values", {}).get("validation loss")


def gaps(results: Results, runs: list[Run]) -> Values:
    """Each arm's validation loss less SiLU's of the same seed: mean, deviation and number of seeds."""
    losses = {(run.arm, run.seed): loss_of(results, run) for run in runs}
    values: Values = {}
    for arm in list(ARMS)[1:]:
        pairs = [(losses[arm, seed], losses["SiLU", seed]) for seed in {run.seed for run in runs}]
        both = [a - b for a, b in pairs if a is not None and b is not None]
        if both:
            values[arm] = statistics.mean(both)
            values |= {f"{arm}, deviation": statistics.stdev(both)} if len(both) > 1 else {}
            values["seeds"] = len(both)
    return values


def run_all(card: Card, results: Results, rate_of: dict[Run, float]) -> list[str]:
    """Trains `AT_ONCE` runs at a time, and puts each one's figure when it ends.

    Returns the names of the unfinished ones: their folders have a checkpoint, from which the same command goes on
    while the machine is the same.
    """
    todo = [run for run in rate_of if loss_of(results, run) is None]
    running: dict[Run, subprocess.Popen] = {}
    late: list[Run] = []
    while todo or running:
        while todo and len(running) < AT_ONCE:
            run = todo.pop(0)
            settings = [*run.settings(card, rate_of[run]), f"output_dir={folder_of(card, run)}"]
            command = ["-m", "gpu.train", "recipes/demo.yaml", *settings]
            running[run] = card.start(command, TOKENIZERS_PARALLELISM="false")
        if time.monotonic() > card.end:
            stop([*running.values()])
            late, todo = [*running, *todo], []
        for run in [run for run, process in running.items() if process.poll() is not None]:
            code = running.pop(run).returncode
            values = read_run(card, run, code, OUT_OF_TIME if run in late else "")
            if "validation loss" in values:  # finished: its checkpoint is of no more use
                shutil.rmtree(folder_of(card, run), ignore_errors=True)
            results.put(Case(GROUP, run.name), values | {"rate": rate_of[run]})
            card.say(f"{GROUP}: {run.name}: {values.get('validation loss', values.get('errors'))}")
        time.sleep(0.2)
    return [run.name for run in late if loss_of(results, run) is None]


def folder_of(card: Card, run: Run) -> Path:
    return card.work / "small" / run.name.replace(", ", "-").replace(" ", "-")


def read_run(card: Card, run: Run, code: int, problem: str) -> Values:
    folder = folder_of(card, run)
    problem = (problem or f"exit code {code}, see log.txt") if code else ""
    ended = Trained(read_lines(folder / "metrics.jsonl"), read_facts(folder / "run.json"), problem)
    errors = find_problems(card, run.mixer, ended)
    if "backend" in errors:  # it must not go on from there
        shutil.rmtree(folder, ignore_errors=True)
        return {"errors": errors}
    values: Values = {"steps": max(ended.losses)} if ended.losses else {}
    if ended.validation:
        values["validation loss"] = ended.validation[max(ended.validation)]
        if not math.isfinite(values["validation loss"]):
            return {"errors": {"run": "the loss is not finite"}}
    return values | ({"errors": errors} if errors else {})
