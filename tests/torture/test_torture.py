"""A minute of `make torture`: kills from outside, damage, and a checkpoint that means harm."""

import subprocess
import sys
from pathlib import Path

import pytest

TORTURE = Path(__file__).with_name("run.py")


@pytest.mark.slow
def test_a_minute_of_torture():
    process = subprocess.run([sys.executable, TORTURE, "--quick"], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
