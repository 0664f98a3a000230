"""A pytest plugin: appends a line of JSON for each test to a file, so that a kill loses no other.

    NALANDA_TESTS=file NALANDA_ASSEMBLER=bundled NALANDA_SOURCES=hash pytest -p gpu.stream …

A line has id, outcome, assembler, seconds and text (the traceback in full), or `collected`: tests by file.
Tests without an outcome in the first NALANDA_TESTS_READ bytes of the file come first, those that passed last.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

LONGEST, LARGEST = (
    20_000,
    10 * 2**20,
)  # characters of a traceback, bytes of the file with tracebacks
WITH = {
    "assembler": os.environ.get("NALANDA_ASSEMBLER"),
    "sources": os.environ.get("NALANDA_SOURCES"),
}


def file() -> Path:
    return Path(os.environ["NALANDA_TESTS"])


def append(line: dict) -> None:
    if file().exists() and file().stat().st_size > LARGEST:
        line = line | {"text": line.get("text", "")[-200:]}
    with file().open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line | WITH, ensure_ascii=False) + "\n")


def read(lines: Path, length: int | None = None) -> list[dict]:
    """The file's lines; the last one may be cut off."""
    text = lines.read_bytes()[:length] if lines.exists() else b""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


worker = "PYTEST_XDIST_WORKER" in os.environ


def pytest_collection_modifyitems(items):
    before = read(file(), int(os.environ.get("NALANDA_TESTS_READ", "0")))
    passed = {x["id"] for x in before if x.get("outcome") == "passed" and WITH.items() <= x.items()}
    items.sort(key=lambda item: item.nodeid in passed)


def pytest_collection_finish(session):
    first = getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0"
    if first and session.items:
        append({"collected": Counter(item.nodeid.partition("::")[0] for item in session.items)})


def pytest_collectreport(report):
    if report.failed and not worker:
        append(
            {
                "id": report.nodeid,
                "outcome": "failed",
                "seconds": 0.0,
                "text": report.longreprtext[-LONGEST:],
            }
        )


@pytest.hookimpl(trylast=True)  # after pytest-xdist has sent the report
def pytest_runtest_logreport(report):
    if worker:
        if report.failed and "CUDA error" in report.longreprtext:
            os._exit(1)  # nothing works in this process any more: pytest-xdist starts another
    elif report.when == "call" or report.outcome != "passed":
        text = report.longreprtext if report.failed else ""
        append(
            {
                "id": report.nodeid,
                "outcome": report.outcome,
                "seconds": report.duration,
                "text": text[-LONGEST:],
            }
        )
