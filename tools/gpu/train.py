"""The trainer on the 340 M recipes, beside flash-linear-attention's models.

python -m gpu.train RECIPE SETTINGS…        trains one run, with fla's guard lifted where fla computes
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.bench import lift_guard
from gpu.card import OUT_OF_TIME, ROOT, STUBS, Card, Case, Values

FLAGSHIP = "nala_gated_deltanet_340m"
GATED = "gated_deltanet_340m"
FLA_GATED = f"fla/{GATED}"
FLA_ALONE = "fla's kernels"  # instead of ours, in our model
LLAMA = (
    "model={auto: llama, num_hidden_layers: 24, hidden_size: 1024, num_attention_heads: 16, "
    "intermediate_size: 2816, vocab_size: 32000}"
)
SETTINGS = ["train.precision=bf16", "schedule.warmup_steps=1", "schedule.name=constant"]
SETTINGS += ["log.tensorboard=false", "validation.every=0", "checkpoint.every=0"]
MICRO_BATCHES = 8
"""Of a step. Recipes have 32; with one the optimizer and the wait for the loss would count too much."""
COMPARED = 10
"""The step whose losses are compared. The steps up to it compile, so they count for no rate."""
DRY = ["model.num_hidden_layers=1", "model.hidden_size=32", "model.head_dim=16"]


@dataclass(frozen=True)
class Training:
    """A run of a few steps.

    backend: NALANDA_BACKEND; "auto" is ours. beside: the case to which its tokens a second are a ratio.
    guarded: whether fla keeps its guard. rows: of T tokens in a micro-batch; None: as many as `card.tokens` fill.
    """

    recipe: str
    compiled: bool = True
    backend: str = "auto"
    steps: int = 16
    T: int = 2048
    rows: int | None = None
    settings: tuple[str, ...] = ()
    beside: str = ""
    guarded: bool = False


EAGER = f"{GATED}, eager"
RUNS: dict[str, Training] = {  # in the order of the plan in README.md
    FLAGSHIP: Training(FLAGSHIP, steps=30),
    f"{FLAGSHIP}, 16 rows": Training(FLAGSHIP, rows=16, beside=FLAGSHIP),
    GATED: Training(GATED),
    EAGER: Training(GATED, compiled=False),
    f"{FLA_GATED}, eager": Training(FLA_GATED, compiled=False, beside=EAGER),
    FLA_GATED: Training(FLA_GATED, beside=GATED),
    "transformer_340m": Training("transformer_340m"),
    f"{FLAGSHIP}, eager": Training(FLAGSHIP, compiled=False),
    f"{FLAGSHIP}, {FLA_ALONE}": Training(
        FLAGSHIP, compiled=False, backend="fla", beside=f"{FLAGSHIP}, eager"
    ),
    "llama of transformers": Training(
        "transformer_340m", compiled=False, settings=(LLAMA,), beside="transformer_340m"
    ),
    f"{FLAGSHIP}, T = 8192": Training(FLAGSHIP, T=8192),
    f"{FLA_GATED}, T = 8192": Training(FLA_GATED, T=8192, beside=f"{FLAGSHIP}, T = 8192"),
    f"{FLAGSHIP}, torch": Training(FLAGSHIP, compiled=False, backend="torch", steps=12),
}
REHEARSED = (FLAGSHIP, EAGER, f"{FLA_GATED}, eager", FLA_GATED, f"{FLAGSHIP}, {FLA_ALONE}")
REFUSED = {  # of rehearsals: their rows must be errors
    f"{FLA_GATED}, guarded": Training(FLA_GATED, compiled=False, guarded=True),
    f"{FLAGSHIP}, {FLA_ALONE}, guarded": Training(
        FLAGSHIP, compiled=False, backend="fla", guarded=True
    ),
}
TARGETS = {
    FLAGSHIP: {"tokens/s": 150_000.0},
    FLA_GATED: {"beside / this": 1.05},
    f"{FLAGSHIP}, {FLA_ALONE}": {"beside / this": 1.25},
}


# ------------------------------ runs


@dataclass
class Trained:
    """A run that ended: its lines of metrics, the facts of run.json, and why it ended early."""

    lines: list[Values]
    facts: Values
    problem: str = ""
    """The trainer's last line, or "out of time"."""

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines if "loss" in line}

    @property
    def validation(self) -> dict[int, float]:
        return {line["step"]: line["val_loss"] for line in self.lines if "val_loss" in line}


def run_trainer(
    card: Card,
    recipe: str,
    folder: Path,
    *settings: str,
    backend: str = "auto",
    guarded: bool = False,
) -> Trained:
    """Trains a recipe in the folder until it is finished, or the card's time is over."""
    arguments = [f"recipes/{recipe}.yaml", *settings, f"output_dir={folder}"]
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    if backend != "auto":
        variables["NALANDA_BACKEND"] = backend
    if guarded:
        variables["NALANDA_GUARD"] = "1"
    if card.dry:
        # C++ for a CPU is none of the card's code, and takes a minute; tests/train compiles it.
        variables["NALANDA_COMPILER"] = "aot_eager"
    path = [str(STUBS), str(ROOT / "tests" / "helpers")] if card.dry else []
    if card.dry and backend == "fla":  # a GPU's backend serves a CPU in the interpreter alone
        variables["NALANDA_INTERPRET"] = "1"
    try:
        code, last = card.python(["-m", "gpu.train", *arguments], path, **variables)
        problem = last if code else ""
    except subprocess.TimeoutExpired:
        problem = OUT_OF_TIME
    return Trained(read_lines(folder / "metrics.jsonl"), read_facts(folder / "run.json"), problem)


def uses_fla(recipe: str, backend: str) -> bool:
    return recipe.startswith("fla/") or backend == "fla"


def uses_ours(recipe: str) -> bool:
    """Whether a recipe's model has a recurrence of ours."""
    return not recipe.startswith(("fla/", "transformer"))


def read_lines(file: Path) -> list[Values]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_facts(file: Path) -> Values:
    return json.loads(file.read_text()) if file.exists() else {}


def check_served(card: Card, facts: Values, recipe: str, backend: str) -> str | None:
    """Why a run's figures are those of another backend than the one that was asked; None if they are not."""
    if not uses_ours(recipe):
        return None
    asked = {"auto": "torch" if card.dry else "triton"}.get(backend, backend)
    served = facts.get("executors")
    if not served:
        return f"{asked} was asked, and run.json does not say what served"
    wrong = [f"{op}: {x} served, {asked} was asked" for op, x in served.items() if x != asked]
    return "; ".join(wrong) or None


def find_problems(card: Card, recipe: str, ended: Trained, backend: str = "auto") -> dict[str, str]:
    """Why a run ended early, as `run`; and as `backend` why its figures are not those that were asked."""
    problems = {"run": ended.problem} if ended.problem else {}
    if ended.lines and (wrong := check_served(card, ended.facts, recipe, backend)):
        problems["backend"] = wrong
    return problems


def text_of(card: Card, name: str) -> Path:
    """A token set of the bundle: `name`, else `web`, else `demo`. A rehearsal without one makes a tiny set."""
    names = [name] if name == "demo" else [name, "web", "demo"]
    sets = [card.bundle / "texts" / x for x in names] if card.bundle else []
    for folder in sets:
        if folder.exists():
            return folder
    if not card.dry:
        raise RuntimeError("training needs the text of a bundle: give --bundle")

    folder = card.work / "text"
    if not folder.exists():
        card.work.mkdir(parents=True, exist_ok=True)
        pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
        (card.work / "text.txt").write_text("\n\n".join(pages))
        command = ["data", "prepare", str(card.work / "text.txt"), str(folder)]
        code, last = card.python(["-m", "nalanda_cli", *command, "--vocab-size", "300"])
        if code:
            raise RuntimeError(last)
    return folder


def text_settings(folder: Path) -> list[str]:
    return [f"data.source={folder}", f"tokenizer={folder}/tokenizer", "data.workers=1"]


# ------------------------------ the cases


def train_once(card: Card, *, run: Training) -> Values:
    """Tokens a second, MFU and a loss. A run that another backend served has an error and no figure.

    Losses are of the same step, weights and batches, so those of one recipe must agree.
    """
    T = 32 if card.dry else run.T
    steps, compared, every = (3, 1, 1) if card.dry else (run.steps, COMPARED, 2)
    rows = run.rows or max(1, card.tokens // T)
    settings = [*SETTINGS, *run.settings, *text_settings(text_of(card, "web"))]
    settings += [f"data.seq_len={T}", f"train.compile={str(run.compiled).lower()}"]
    settings += [f"train.tokens_per_step={rows * T * MICRO_BATCHES}"]
    settings += [f"train.micro_batch_size={rows}"]
    settings += [f"train.steps={steps}", f"log.every={every}", *(DRY if card.dry else ())]

    with run_folder(card) as folder:
        options = {"backend": run.backend, "guarded": run.guarded}
        ended = run_trainer(card, run.recipe, folder, *settings, **options)
    errors = find_problems(card, run.recipe, ended, run.backend)
    if "backend" in errors:
        return {"errors": errors}

    values: Values = {}
    timed = [line for line in ended.lines if line.get("step", 0) > compared and "mfu" in line]
    if timed:
        rates = [line["tokens_per_second"] for line in timed]
        values = {"tokens/s": statistics.median(rates), "least": min(rates), "most": max(rates)}
        values |= {"MFU": statistics.median(line["mfu"] for line in timed)}
    if compared in ended.losses:
        values[f"loss at step {compared}"] = ended.losses[compared]
    if ended.lines and uses_ours(run.recipe):
        values["served by"] = ", ".join(sorted(set(ended.facts["executors"].values())))
    peer = card.newest("Training", run.beside) if run.beside else {}
    if "tokens/s" in values and "tokens/s" in peer:
        values["beside / this"] = peer["tokens/s"] / values["tokens/s"]
    return values | ({"errors": errors} if errors else {})


@contextmanager
def run_folder(card: Card) -> Iterator[Path]:
    """A folder for a run that starts anew. It goes at the end: a run of 340 M leaves six GB."""
    card.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=card.work, ignore_cleanup_errors=True) as folder:
        yield Path(folder, "run")


def train_cases(card: Card) -> list[Case]:
    runs: dict[str, Training] = RUNS
    if card.dry:
        runs = {name: RUNS[name] for name in REHEARSED} | REFUSED
    return [
        Case("Training", name, partial(train_once, run=run), TARGETS.get(name, {}))
        for name, run in runs.items()
    ]


def tune(card: Card) -> Values:
    """`nalanda tune`: the table is written after each change."""
    minutes = f"{(card.end - time.monotonic() - 20) / 60:.2f}"
    file = str((card.output / "blocks.json").resolve())
    code, last = card.python(["-m", "nalanda_cli", "tune", "--json", file, "--minutes", minutes])
    if code and not card.dry:
        raise RuntimeError(last)
    return {"last line": last}


def main(arguments: list[str]) -> Any:
    if os.environ.get("NALANDA_INTERPRET"):
        import interpreter  # noqa: F401  before any kernel
    if compiler := os.environ.get("NALANDA_COMPILER"):
        torch.compile = partial(torch.compile, backend=compiler)
    fla = uses_fla(arguments[0].removeprefix("recipes/"), os.environ.get("NALANDA_BACKEND", ""))
    if fla and not os.environ.get("NALANDA_GUARD"):
        lift_guard()
    from nalanda_cli import main as command

    return command(["train", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
