"""What the kernels compile to and move, counted without a GPU."""

import sys
from pathlib import Path

# Triton's interpreter with its faults mended belongs to the product's tests.
sys.path.append(str(Path(__file__).parents[3] / "tests" / "helpers"))
