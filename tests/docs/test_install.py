"""The pinned packages install on every Python that the project claims to serve."""

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


def test_pins_serve_the_oldest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"  # 3.11 is 3.11.0, too
    refusing = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        try:
            package = importlib.metadata.distribution(pin.name)
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        needs = package.metadata.get("Requires-Python") or ""
        if package.version in pin.specifier and oldest not in SpecifierSet(needs):
            refusing[line] = needs
    assert not refusing
