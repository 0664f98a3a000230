"""Tensors as the kernels of all devices take them: rows, bounds of sequences, states of short convolutions."""

import ctypes
import itertools

import torch
from torch import Tensor


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """The address of x for C++; 0 for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def threads(most: int) -> int:
    """The CPU threads of a call that is worth at most so many."""
    return max(1, min(torch.get_num_threads(), most))


def rows_of(x: Tensor, width: int) -> Tensor:
    """x as `[rows, width]` whose columns are neighbours; a view if its strides allow one."""
    x = x.reshape(x.numel() // width, width)
    # Rows may be apart, but a row's entries may not.
    return x if x.stride(1) == 1 else x.contiguous()


def bounds_of(cu_seqlens: Tensor, length: int) -> tuple[int, ...]:
    """The bounds as integers. Raises ValueError if they do not rise from 0 to `length`."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: does not rise from 0 to the {length} tokens; pass cumulative lengths"
        )
    return bounds


def last_inputs(x: Tensor, state: Tensor | None, past: int, cu_seqlens: Tensor | None) -> Tensor:
    """The last `past` inputs of each sequence, `[N, past, D]`, by torch, which differentiates it."""
    if cu_seqlens is None:
        # A short row leaves some of the old state in the new one.
        if x.shape[1] < past:
            x = torch.cat([x.new_zeros(len(x), past, x.shape[2]) if state is None else state, x], 1)
        return x[:, x.shape[1] - past :].clone()  # a view would keep all of x alive
    first, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    # [N, past], counted over the packed row.
    row = end + torch.arange(-past, 0)
    inside = row >= first
    taken = x[0][row.clamp_min(0).to(x.device, non_blocking=True)]
    inside = inside.to(x.device, non_blocking=True)[..., None]
    if state is None:
        return taken.where(inside, 0.0)
    # Places before the sequence move up in the old state by its tokens.
    index = (row - first + past).clamp(0, past - 1).to(x.device, non_blocking=True)
    return taken.where(inside, state.gather(1, index[..., None].expand(-1, -1, x.shape[2])))
