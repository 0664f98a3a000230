"""The figures (results.jsonl, a line each) and their page (RESULTS.md)."""

import datetime
import hashlib
import json
import shutil
from collections.abc import Collection
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from gpu.card import ROOT, Card, Case, Values

FILES, BYTES = 8, 16 << 20
"""The most that a card's machine gives back: files, at the top of a folder, and bytes of each."""


FIGURES = ("results.jsonl", "RESULTS.md", "log.txt")
"""Files of every part."""


def take_former(former: Path, folder: Path, only: Collection[str] | None = None) -> None:
    """Copies a former call's files, to which this call appends. Files that are there stay. only: their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in former.iterdir():
        if only is not None and file.name not in only:
            continue
        if file.is_file() and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def fit(folder: Path) -> str | None:
    """Cuts the beginning of text files that are too long. Returns why the folder would not come back whole."""
    entries = sorted(folder.iterdir())
    for file in entries:
        if file.is_file() and file.suffix in (".txt", ".jsonl") and file.stat().st_size > BYTES:
            text = file.read_bytes()[-BYTES:]
            file.write_bytes(text[text.find(b"\n") + 1 :])
    bad = [x.name for x in entries if x.is_dir() or x.stat().st_size > BYTES]
    if bad or len(entries) > FILES:
        return f"{folder}: {len(entries)} entries, {FILES} come back; too large: {', '.join(bad) or 'none'}"
    return None


class Results:
    """All figures of a folder. Each is written at once, because a machine may be taken back at any moment."""

    def __init__(self, folder: Path, plan: list[Case]):
        self.file, self.page, self.plan = folder / "results.jsonl", folder / "RESULTS.md", plan
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.figures: list[Values] = [json.loads(line) for line in lines]
        self.facts: Values = {}

    def put(self, case: Case, values: Values) -> None:
        now = datetime.datetime.now().astimezone().isoformat()
        figure = {"group": case.group, "name": case.name, "date": now, "values": values}
        self.figures.append(figure | {"facts": self.facts})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.figures[-1], ensure_ascii=False) + "\n")
        self.page.write_text(self.markdown(), encoding="utf-8")

    def newest(self, case: Case, card: str) -> Values:
        """The newest figure of a case on a card: its `values` and `date`; {} if there is none."""
        name = {"group": case.group, "name": case.name}.items()
        figures = [x for x in self.figures if name <= x.items() and x["facts"]["card"] == card]
        return figures[-1] if figures else {}

    def markdown(self) -> str:
        """For each card its newest facts, and a table for each group of cases."""
        lines = ["# Measured on GPUs", "", "The newest figures; see tools/gpu/README.md."]
        cards = {x["facts"]["card"]: x["facts"] for x in self.figures}
        for card, facts in cards.items():
            lines += ["", f"## {card}", "", ", ".join(f"{k} {v}" for k, v in facts.items() if v)]
            for group in dict.fromkeys(case.group for case in self.plan):
                cases = [case for case in self.plan if case.group == group]
                rows = [self.newest(case, card).get("values", {}) for case in cases]
                lines += ["", f"### {group}", "", *group_table(cases, rows)]
        return "\n".join(lines) + "\n"


def group_table(cases: list[Case], rows: list[Values]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row)) or ["measured"]
    lines = [["", *columns, "targets"], ["---"] * (len(columns) + 2)]
    for case, row in zip(cases, rows, strict=True):
        targets = [f"{column} ≥ {least:g}" for column, least in case.targets.items()]
        lines.append(
            [case.name, *(show(row.get(x, "not measured")) for x in columns), ", ".join(targets)]
        )
    return [f"| {' | '.join(cells)} |" for cells in lines]


def show(value: Any) -> str:
    if isinstance(value, dict):  # errors by name
        value = "; ".join(f"{name}: {error}" for name, error in value.items())
    if isinstance(value, list):  # a curve
        return f"{len(value)} points"
    if isinstance(value, str):
        return value.replace("|", "/").replace("\n", "⏎")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def facts(card: Card) -> Values:
    """The card, its software, and what is tested."""
    name = "a CPU, dry" if card.dry else torch.cuda.get_device_name()
    packages = ("torch", "triton", "transformers", "fla-core", "flash-qla")
    versions = {x.name: x.version for x in distributions() if x.name in packages}
    return {"card": name, **versions, "sources": hash_sources()}


def hash_sources() -> str:
    """A hash of what is tested: a machine may have the files without their history."""
    digest = hashlib.sha256()
    for folder in ("src", "kernels/nalanda_kernels", "tests/kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]
