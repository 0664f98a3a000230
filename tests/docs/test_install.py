"""The pinned packages install on every Python that the project claims to serve, and a version is one everywhere."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import nalanda

ROOT = Path(__file__).parents[2]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [
    f"{kind.removeprefix('Programming Language :: Python :: ')}.0"
    for kind in PROJECT["classifiers"]
    if "Python :: 3." in kind
]


def test_classifiers_are_the_pythons_that_are_served():
    served = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}.0" for minor in range(30) if f"3.{minor}.0" in served] == PYTHONS


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_serve_every_python(python):
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
        if package.version in pin.specifier and python not in SpecifierSet(needs):
            refusing[line] = needs
    assert not refusing


def test_the_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (heading, *_) = re.findall("^## ([^,]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {PROJECT["version"], nalanda.__version__, citation["version"], heading} == {heading}


def test_the_public_names_are_those_of_the_page():
    page = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^- \*\*`nalanda`\*\*: ((?:.+\n)+?)- ", page, re.MULTILINE)
    assert re.findall("`(.+?)`", listed) == nalanda.__all__


def test_the_workflow_runs_what_a_person_runs():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").is_file()
    assert job["timeout-minutes"] <= 90
