"""Checks public classes by `nalanda check`, a process each, and makes the table of docs/field.md from the records.

`field.yaml` lists the classes, and the differences that were verified by hand. The table shows no other.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from nalanda.common.errors import InputError
from nalanda.common.text import markdown_table
from nalanda.common.versions import list_versions
from nalanda.config.load import read_yaml

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".yaml")
PAGE = ROOT / "docs" / "field.md"

COLUMNS = {
    "rows": ["causal", "batch is rows", "order of rows"],
    "padded": ["left padded is alone", "right padded is alone", "padded gradients"],
    "packed: positions": ["packed by positions"],
    "packed: lengths": ["packed by lengths"],
    "step": ["token by token"],
    "pieces": ["piece by piece"],
    "copy": ["copied cache", "saved cache"],
    "reorder": ["reordered cache"],
    "crop": ["cropped cache"],
    "greedy": ["greedy search", "padded greedy search"],
    "beam": ["beam search"],
    "assisted": ["assisted search"],
    "loss": ["loss of labels", "loss of parts", "gradient checkpointing"],
    "files": ["saved is loaded", "tied stays tied"],
    "export": ["exported is eager"],
    "bf16": ["half precision"],
}
"""The properties of each column. `packed by cu seqlens` is left out: it is no input of transformers."""

MARKS = {"holds": "✓", "rounding": "✓", "not offered": "–", "refused": "r"}
WORST = ["e", "r", "–", "✓"]
"""A column of several properties shows the worst of their marks: a number, or the first of these."""


def make_table(names: list[str] | None, records: str, minutes: int, again: bool) -> None:
    """Checks the classes that have no record yet, and writes the table into docs/field.md.

    names: classes of `field.yaml`; none means all. again: check them although they have a record.

    Raises InputError for a name that is not listed, and for a difference that nobody verified.
    """
    names, folder, listed = names or [], Path(records), read_yaml(LIST)
    folder.mkdir(parents=True, exist_ok=True)
    if unknown := set(names) - listed["classes"].keys():
        raise InputError(f"{min(unknown)}: not a class of {LIST.name}; add it there")

    for name in names or listed["classes"]:
        file = folder / f"{name}.json"
        if again or not file.exists():
            record = check_class(name, listed["classes"][name], minutes)
            text = json.dumps(record, indent=1, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")
            print(f"{name}: {record.get('problem', record.get('model'))}", flush=True)

    found = {name: folder / f"{name}.json" for name in listed["classes"]}
    table = table_of({k: json.loads(f.read_text()) for k, f in found.items() if f.exists()}, listed)
    page = PAGE.read_text(encoding="utf-8")
    block = f"<!-- field -->\n{table}\n<!-- end -->"
    page = re.sub("<!-- field -->\n.*?<!-- end -->", lambda _: block, page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")


def check_class(name: str, fields: str, minutes: int) -> dict[str, Any]:
    """The record of a class: what `nalanda check` prints as JSON, or its problem. fields: of its config."""
    words = ["check", name, *fields.split(), "--json"]
    record: dict[str, Any] = {"command": " ".join(["nalanda", *words])}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "nalanda_cli", *words],
            capture_output=True,
            text=True,
            timeout=60 * minutes,
        )
    except subprocess.TimeoutExpired:
        return record | {"problem": f"no answer within {minutes} minutes"}
    if done.returncode > 1 or not done.stdout:
        return record | {"problem": done.stderr.strip().splitlines()[-1]}
    return record | json.loads(done.stdout)


def table_of(records: dict[str, dict[str, Any]], listed: dict[str, Any]) -> str:
    """The table in Markdown, a class a row, and the versions below it."""
    lines = []
    for name, record in records.items():
        if "problem" in record:
            raise InputError(f"{name}: {record['problem']}")
        marks = {
            row["name"]: mark_of(name, row["name"], row["verdict"], listed)
            for row in record["properties"]
        }
        lines.append([f"`{name}`", *(worst(marks, each) for each in COLUMNS.values())])
    used = list_versions(record["versions"] for record in records.values())
    kept = [each for each in used.split(", ") if not each.startswith("nalanda")]
    return markdown_table(["", *COLUMNS], lines) + f"\n\nVersions: {', '.join(kept)}."


def mark_of(name: str, holds: str, verdict: str, listed: dict[str, Any]) -> str:
    """✓, –, r; of a difference its number on the page, or e where the page explains it."""
    if verdict in MARKS:
        return MARKS[verdict]
    for number, finding in listed["findings"].items():
        if name in finding["classes"] and holds in finding["properties"]:
            return str(number)
    if name in listed["explained"].get(holds, []):
        return "e"
    raise InputError(f"{name}, {holds}: {verdict}; verify it by hand and add it to {LIST.name}")


def worst(marks: dict[str, str], names: list[str]) -> str:
    """The numbers of several properties, or the worst of their marks. Empty: none was checked."""
    found = [marks[name] for name in names if name in marks]
    numbers = sorted({mark for mark in found if mark.isdecimal()}, key=int)
    return ", ".join(numbers) or min(found, key=WORST.index, default="")
