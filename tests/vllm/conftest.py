"""The engine of a test, and the table of all models at the end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import ROWS, Engine, Row


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts an `Engine`, and ends it with the test."""
    engines = []

    def start(folder: Path, **options: Any) -> Engine:
        engines.append(Engine(folder, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints a row for each mixer and hybrid: how many maps, how many texts, the largest difference."""
    groups: dict[str, list[Row]] = {}
    for row in ROWS:
        mixer, _, _ = row.name.partition(" + ")
        groups.setdefault(mixer, []).append(row)
    if not groups:
        return

    terminalreporter.section("certificate")
    terminalreporter.line("| model | maps | equal texts | log-probabilities differ by |")
    terminalreporter.line("|---|---|---|---|")
    for mixer, rows in groups.items():
        texts, largest = sum(row.texts for row in rows), max(row.difference for row in rows)
        terminalreporter.line(f"| {mixer} | {len(rows)} | {texts} | {largest:.1e} |")
