"""The device of kernel tests. Import this before any module that defines kernels.

By default kernels run in Triton's interpreter, on CPU tensors, and cards of this machine are hidden. If
NALANDA_TEST_DEVICE names a device (`cuda`, in `make gpu-check PART=kernels`), they are compiled for it.
"""

import os

import pytest

DEVICE = os.environ.get("NALANDA_TEST_DEVICE", "cpu")
INTERPRETED = DEVICE == "cpu"

if INTERPRETED:
    # Before torch looks for cards: the interpreter would copy their tensors for each launch.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    import interpreter  # noqa: F401

interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
