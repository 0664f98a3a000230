"""Figures of all runs (results.json) and their tables (RESULTS.md)."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu.card import ROOT, Card, Values

NOT_MEASURED = "not measured"


@dataclass
class Case:
    """A row of a table: `run` measures its columns.

    targets: the least value that a column should reach. seconds: time limit; to exceed it is an error.
    """

    group: str
    name: str
    run: Callable[[Card], Values] | None = None
    targets: dict[str, float] = field(default_factory=dict)
    seconds: float = 300.0


TIMES = {
    "forward": "forward ms",
    "peer_forward": "peer",
    "both": "forward + backward ms",
    "peer_both": "peer",
    "ratio": "peer / ours",
    "floor": "floor ms",
    "of_floor": "floor / ours",
    "difference": "difference",
}
COLUMNS = {  # table → key → heading
    "Decision": {"says": "what the tests say"},
    "Tests, compiled": {
        "passed": "passed",
        "failed": "failed",
        "skipped": "skipped",
        "left": "not reached",
        "names": "failing",
    },
    "Ceilings": {"value": "measured"},
    "Recurrences": TIMES
    | {
        "peer_fused": "peer, one kernel",
        "flash_qla": "FlashQLA",
        "qla_ratio": "FlashQLA / ours",
        "fed_torch": "peer, maps in torch",
        "peer_silu": "peer's SiLU job",
        "flash_attention": "FlashAttention",
    },
    "Other kernels": TIMES,
    "Decoding": {
        "tokens_per_second": "tokens/s",
        "limit": "weight-reading limit",
        "share": "share",
        "graphed": "as a CUDA graph",
        "graphed_share": "share",
        "limit_with_states": "limit, states too",
    },
    "Training": {
        "parameters": "parameters",
        "tokens_per_second": "tokens/s",
        "mfu": "MFU",
        "compiled": "compiled",
        "compiled_mfu": "MFU",
        "memory": "peak GiB",
        "peer": "fla's model",
        "peer_memory": "peak GiB",
        "ratio": "ours / it",
        "fed": "fla's kernels, fed",
        "fed_ratio": "ours / them",
        "fallbacks": "not by Triton",
    },
    "Profile": {
        "device": "ms of a step",
        "launches": "launches of a step",
        "top": "the longest, ms",
    },
    "Loss curves": {
        "steps": "steps",
        "torch": "torch's last",
        "triton": "Triton's",
        "difference": "largest difference",
    },
    "Block sizes": {"changes": "changes", "file": "file"},
}
PERCENT = ("share", "graphed_share", "of_floor", "mfu", "compiled_mfu")
TIMES_OVER = ("ratio", "qla_ratio", "fed_ratio")
TARGETS = {  # key → name in the table of targets
    "ratio": "peer / ours",
    "qla_ratio": "FlashQLA / ours",
    "compiled_mfu": "MFU, compiled",
    "graphed_share": "share of the weight-reading limit, as a CUDA graph",
    "fed_ratio": "ours / fla's kernels fed with NaLa's features",
}


class Results:
    """results.json: all runs and their figures. Tables show each card's newest figures.

    earlier: results.json of another machine, or its folder; it is read if `folder` has none yet.
    """

    def __init__(self, folder: Path, earlier: Path | None = None):
        self.file, self.table = folder / "results.json", folder / "RESULTS.md"
        if earlier is not None and earlier.is_dir():
            earlier = earlier / self.file.name
        source = self.file if earlier is None or self.file.is_file() else earlier
        found = json.loads(source.read_text()) if source.is_file() else {}
        self.runs: list[Values] = found.get("runs", [])
        self.figures: list[Values] = found.get("figures", [])
        self.plan: Callable[[str], list[Case]] = lambda card: []  # the rows of a card's tables

    @property
    def card(self) -> str:
        return self.runs[-1]["card"]

    def begin(self, facts: Values) -> None:
        self.runs.append(facts)

    def put(self, part: str, case: Case, values: Values) -> None:
        """A case's figures; they replace those that it already has in this run."""
        date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        row = {"run": len(self.runs) - 1, "part": part, "group": case.group, "name": case.name}
        self.figures = [x for x in self.figures if not row.items() <= x.items()]
        self.figures.append(row | {"date": date, "values": values})
        self.save()

    def save(self) -> None:
        runs, figures = (",\n".join(map(one_line, rows)) for rows in (self.runs, self.figures))
        write(self.file, f'{{"runs": [\n{runs}\n],\n"figures": [\n{figures}\n]}}\n')
        self.write_table()

    def write_table(self) -> None:
        write(self.table, markdown(self))

    def latest(self, card: str) -> dict[tuple[str, str], Values]:
        return {
            (f["group"], f["name"]): f for f in self.figures if self.runs[f["run"]]["card"] == card
        }

    def values(self, group: str, name: str) -> Values:
        return self.latest(self.card).get((group, name), {}).get("values", {})


def one_line(row: Values) -> str:
    return json.dumps(row, ensure_ascii=False)


def write(file: Path, text: str) -> None:
    """Replaces the file atomically, because the machine may be taken back at any moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def first_line(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return done.stdout.strip().splitlines()[0]
    return None


def version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def sources() -> str:
    """A hash of what is tested: a machine may have the files without their history."""
    found = hashlib.sha256()
    for folder in ("src", "kernels/nalanda_kernels", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:8]


FACTS = (
    "date",
    "driver",
    "python",
    "torch",
    "triton",
    "transformers",
    "fla",
    "flash_qla",
    "assembler",
    "revision",
    "sources",
    "note",
)


def facts() -> Values:
    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "transformers")},
        "revision": first_line("git", "rev-parse", "--short", "HEAD"),
        "sources": sources(),
    }


# ----------------------------------------------------------------------------------------------------- tables


INTRODUCTION = """# Measured on GPUs

Written by `make gpu-check` (`gpu_check.py`) from results.json, which keeps every figure; here are the newest.
The peer is flash-linear-attention's kernel or model for the same job, without FlashQLA behind it; that of the
softmax model is transformers' Llama. Times are medians by CUDA events, in bf16, 16 384 tokens a call, inputs
rotating through more than the last-level cache. A floor is the larger of bytes over the copy's rate and FLOPs
over the matrix product's; MFU is of the data sheet's dense bf16 peak. Models are compared with peers without
torch.compile on either side. Differences are ‖ours − peer‖ / ‖peer‖ of outputs, and nats of losses."""


def markdown(results: Results) -> str:
    """All tables of every card; empty tables if there is no card yet."""
    lines = [INTRODUCTION]
    for card in list(dict.fromkeys(run["card"] for run in results.runs)) or ["No card yet"]:
        known, plan = results.latest(card), results.plan(card)
        lines += ["", f"## {card}", "", *run_table(results, card), *target_table(plan, known)]
        for group, columns in COLUMNS.items():
            cases = [case for case in plan if case.group == group]
            if not cases:
                continue
            found = [known.get((group, case.name), {}).get("values", {}) for case in cases]
            columns = {
                key: head
                for key, head in columns.items()
                if any(x.get(key) is not None for x in found)
            }
            rows = [cells(case, columns, known) for case in cases]
            lines += [
                "",
                f"### {group}",
                "",
                *table(["", *(columns.values() or [""]), "run"], rows),
            ]
        lines += error_table(plan, known)
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(x)} |" for x in (head, ["---"] * len(head), *rows)]


def run_table(results: Results, card: str) -> list[str]:
    runs = [(i, run) for i, run in enumerate(results.runs) if run["card"] == card]
    rows = [[str(i + 1), *(str(run.get(key) or "–") for key in FACTS)] for i, run in runs]
    return table(["run", *FACTS], rows) if rows else [NOT_MEASURED]


def target_table(plan: list[Case], known: dict) -> list[str]:
    rows = []
    for case in plan:
        values = known.get((case.group, case.name), {}).get("values", {})
        for key, least in case.targets.items():
            found, name = values.get(key), TARGETS[key]
            if key == "ratio" and case.group == "Training":
                name = "ours / fla's model"
            verdict = NOT_MEASURED if found is None else "hit" if found >= least else "missed"
            rows.append(
                [f"{case.name}: {name}", f"≥ {shown(key, least)}", shown(key, found), verdict]
            )
    return ["", "### Targets", "", *table(["", "target", "measured", ""], rows)]


def cells(case: Case, columns: dict[str, str], known: dict) -> list[str]:
    row = known.get((case.group, case.name))
    if row is None:
        return [case.name, NOT_MEASURED, *[""] * (len(columns) - 1), ""]
    return [
        case.name,
        *(shown(key, row["values"].get(key)) for key in columns),
        str(row["run"] + 1),
    ]


def shown(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.replace("|", "/")
    if key in PERCENT:
        return f"{value:.0%}"
    if key in TIMES_OVER:
        return f"{value:.2f}×"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def error_table(plan: list[Case], known: dict) -> list[str]:
    """A table of failed measurements and their errors."""
    rows = []
    for case in plan:
        values = known.get((case.group, case.name), {}).get("values", {})
        for what, error in values.get("errors", {}).items():
            rows.append([case.name, what, error.replace("|", "/")])
    return ["", "### Failed", "", *table(["", "what", "error"], rows)] if rows else []
