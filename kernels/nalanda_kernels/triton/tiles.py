"""Loads in fp32, and the dtypes that kernels take."""

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def load(p, m):
    """Entries at p in fp32, 0 where not m."""
    return tl.load(p, mask=m, other=0.0).to(tl.float32)
