"""A run that stopped on the way."""

import json
import shutil
from pathlib import Path

import pytest
from training import configured

from nalanda.config.schema import RunConfig


@pytest.fixture
def stopped(recipe, whole, tmp_path) -> tuple[Path, RunConfig]:
    """A copy of the whole run, as if it had been killed behind its last checkpoint."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "final")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "state": "running"}))
    return run, configured(recipe, run)
