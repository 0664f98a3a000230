"""Scores and decays of chunks whose keys decay by channel, and their backward, on a CPU.

The caller has the formulas (model/chunk_channels.py). A chunk has C tokens and K channels, P are of chunks and heads.
All tensors are fp32 without gaps and on a CPU, and C is at most 3 or a multiple of 4. Both functions return None for
others. They raise Unsupported where the library cannot be built.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nalanda_kernels.cpu.build import library
from nalanda_kernels.tensors import pointer, threads


def channel_scores(rows: Sequence[Tensor], k: Tensor, g: Tensor) -> tuple[Tensor, ...] | None:
    """eᵞ and e^{γ_C − γ} `[P, C, K]`; tril(Δ QK⊤) and, with R, tril(Δ RK⊤, −1) `[P, C, C]`.

    rows: Q, or Q and R `[P, C, K]`. k, g: keys and log-decays `[P, C, K]`.
    """
    if not _fit(*rows, k, g):
        return None
    P, C, _ = k.shape
    decays = torch.empty_like(g), torch.empty_like(g)
    scores = [k.new_empty(P, C, C) for _ in rows]
    _run("channel_scores", *_two(rows), k, g, *decays, *_two(scores))
    return *decays, *scores


def channel_gradients(
    rows: Sequence[Tensor],
    k: Tensor,
    g: Tensor,
    d_scores: Sequence[Tensor],
    d_rows: Sequence[Tensor],
    d_k: Tensor,
    reads: Tensor,
    writes: Tensor,
) -> bool | None:
    """Adds what the gradients of scores give to d_rows and d_k, and turns `reads` into dg, all in place.

    rows, k, g: as in `channel_scores`. d_scores: `[P, C, C]`, of which what lies above the scores is not read. d_rows
    and d_k: `[P, C, K]`; R's may be d_k. reads, writes: shares of dg at the tokens that read the state and that write
    to it, `[P, C, K]`.
    """
    if not _fit(*rows, k, g, *d_scores, *d_rows, d_k, reads, writes):
        return None
    pairs = *_two(d_scores), *_two(d_rows)
    _run("channel_gradients", *_two(rows), k, g, *pairs, d_k, reads, writes)
    return True


def _two(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Of Q and R, or of Q and none."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def _fit(*tensors: Tensor) -> bool:
    C = tensors[0].shape[1]
    # Rows of scores go in fours.
    are_readable = all(x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() for x in tensors)
    return are_readable and (C < 4 or C % 4 == 0)


def _run(name: str, q: Tensor, *tensors: Tensor | None) -> None:
    P, C, K = q.shape
    getattr(library(), name)(*map(pointer, (q, *tensors)), ctypes.c_long(P), C, K, threads(P))
