"""Versions in records of results."""

import json
import re
import subprocess
import types
from importlib import metadata
from pathlib import Path

import pytest
from nalanda_kernels import API

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


def test_an_install_from_git_names_the_commit_that_pip_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr("nalanda.common.versions.__file__", str(tmp_path / "a/b/c/versions.py"))
    record = json.dumps({"url": "u", "vcs_info": {"vcs": "git", "commit_id": "5c1f2e03a77"}})
    installed = types.SimpleNamespace(read_text={"direct_url.json": record}.get)
    monkeypatch.setattr(metadata, "distribution", lambda name: installed)
    _nalanda_version.cache_clear()
    assert versions()["nalanda"] == f"{nalanda.__version__}+g5c1f2e03a"
    _nalanda_version.cache_clear()


def test_the_command_prints_them(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NALANDA_CPU_CACHE", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert not stop.value.code
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"nalanda {versions()['nalanda']} (python ")
    kernels = rf"kernels API {API}: (C\+\+ to be built by \S+|no C\+\+ compiler), triton \d.*, flash_qla .*"
    assert re.fullmatch(kernels, second)
    assert not list(tmp_path.iterdir())  # nothing was compiled


def test_results_of_several_versions_name_them_all():
    found = [
        {"python": "3.11", "torch": "2.12"},
        {"python": "3.11", "torch": "2.13", "nalanda": "0.1"},
    ]
    assert list_versions(found) == "python 3.11, torch 2.12 and 2.13, nalanda 0.1"
