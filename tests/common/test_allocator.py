"""The allocator's setting, in a process of its own: it cannot be taken back."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "src/nalanda/common/allocator.py"
FAULTS = f"""
import resource, runpy
keep_freed_memory = runpy.run_path({str(FILE)!r})["keep_freed_memory"]  # without importing torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(1 << 26)  # zero-filled, so every page is touched
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(*(faults() for _ in range(4)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_large_blocks_are_used_again():
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    first, *_, last = map(int, done.stdout.split())
    assert first > 10_000  # 64 MiB in pages of 4 KiB
    assert last < 100
