"""Where the tests of kernels run: import this before any module that defines kernels.

In Triton's interpreter, on tensors of the CPU; compiled, where NALANDA_TEST_DEVICE names a device (`cuda`),
as `make gpu-check PART=kernels` does.
"""

import os

import pytest

DEVICE = os.environ.get("NALANDA_TEST_DEVICE", "cpu")
INTERPRETED = DEVICE == "cpu"

if INTERPRETED:
    import nalanda_kernels.triton.interpreter  # noqa: F401

interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="looks into the interpreter")
