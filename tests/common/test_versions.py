"""Versions in records of results."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import nalanda
from nalanda.common.versions import _nalanda_version, list_versions, versions
from nalanda_cli import main

ROOT = Path(__file__).parents[2]


def test_versions_name_the_commit():
    own = versions("numpy")
    assert own["numpy"] == metadata.version("numpy")
    version, _, commit = own["nalanda"].partition("+g")
    assert version == metadata.version("nalanda")
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    head = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert len(commit) >= 9
    assert head.stdout.startswith(commit.removesuffix(".dirty"))


def test_a_tree_that_is_not_installed_has_a_version(monkeypatch):
    def version(name):
        if name == "nalanda":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    _nalanda_version.cache_clear()
    assert versions()["nalanda"].partition("+g")[0] == nalanda.__version__


def test_the_command_prints_them(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert not stop.value.code
    assert capsys.readouterr().out.startswith(f"nalanda {versions()['nalanda']} (python ")


def test_results_of_several_versions_name_them_all():
    found = [
        {"python": "3.11", "torch": "2.12"},
        {"python": "3.11", "torch": "2.13", "nalanda": "0.1"},
    ]
    assert list_versions(found) == "python 3.11, torch 2.12 and 2.13, nalanda 0.1"
