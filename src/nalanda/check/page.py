"""Shows the rows of a check: on the terminal, as JSON, and as a page."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from nalanda.common.terminal import stdout
from nalanda.common.text import without_infinities
from nalanda.common.versions import versions
from nalanda.report.page import render
from nalanda.testing.subject import Subject
from nalanda.testing.verdicts import Finding

STYLES = {"holds": "green", "differs": "bold red", "fails": "red"}


def cells(row: Finding) -> list[str]:
    """Property, verdict, largest difference, and its place or the reason."""
    difference = "" if row.difference is None else f"{row.difference:.1e}"
    return [row.name, row.verdict, difference, row.reason]


def describe_subject(subject: Subject) -> str:
    """The model in a line: `llama: LlamaForCausalLM, 1,844,480 parameters, float64`."""
    model = subject.model
    dtype = str(model.dtype).removeprefix("torch.")
    count = sum(p.numel() for p in model.parameters())
    return f"{subject.name}: {type(model).__name__}, {count:,} parameters, {dtype}"


def print_findings(subject: Subject, rows: Sequence[Finding]) -> None:
    """Prints the table, and each script of a difference below it."""
    console = stdout()
    console.print(describe_subject(subject))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("property", "verdict", "difference", "where or why"):
        table.add_column(heading, no_wrap=heading != "where or why")
    for row in rows:
        table.add_row(*cells(row), style=STYLES.get(row.verdict))
    console.print(table)
    for row in rows:
        if row.script:
            console.print(f"\n# {row.name}: save this as a file and run it\n")
            console.print(row.script, soft_wrap=True)


def findings_json(subject: Subject, rows: Sequence[Finding]) -> str:
    record = {
        "model": describe_subject(subject),
        "source": subject.source,
        "properties": [asdict(row) for row in rows],
        "versions": versions(),
    }
    return json.dumps(without_infinities(record, str), indent=1, ensure_ascii=False)


def findings_page(subject: Subject, rows: Sequence[Finding]) -> str:
    return render(
        "check/page.html",
        {},
        title=subject.name,
        model=describe_subject(subject),
        rows=[(row, cells(row)) for row in rows],
        versions=versions(),
    )
