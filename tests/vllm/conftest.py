"""The engine of a test, and the table of all models at the end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import LENGTHS, ROWS, Engine


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
    groups: dict[str, list[float]] = {}
    for name, largest in ROWS:
        mixer, _, _ = name.partition(" + ")
        groups.setdefault(mixer, []).append(largest)
    if not groups:
        return

    terminalreporter.section("certificate")
    terminalreporter.line("| model | maps | equal texts | log-probabilities differ by |")
    terminalreporter.line("|---|---|---|---|")
    for mixer, differences in groups.items():
        texts = 2 * len(LENGTHS) * len(differences)
        line = f"| {mixer} | {len(differences)} | {texts} | {max(differences):.1e} |"
        terminalreporter.line(line)
