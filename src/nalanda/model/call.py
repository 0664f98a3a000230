"""The tensors of a layer, and the arguments of a recurrence.

`Inputs` are those of a mixer's `mix` and `read_out`. `Call` has the tensors of a recurrence, `Options` what is done
with them: `mix` makes the two, `recurrence` adds state and bounds, `ops.py` maps q and k. They become flat arguments at
two edges: the operators of `chunk.py`, and the kernels, whose entry takes the arguments of `ops.delta_rule`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FeatureMap = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Inputs(NamedTuple):
    """The tensors of a layer between its projections and o_proj. H heads of q, HK of k, HV of v."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HV, V]
    beta: Tensor | None = None  # [B, T, HV], the step of the delta rule, or Mamba 3's λ
    g: Tensor | None = None  # [B, T, HV] or [B, T, HV, F], the log-decay
    erase: Tensor | None = None  # [B, T, HV, F], erased in place of β
    dt: Tensor | None = None  # [B, T, HV], Mamba 2's step, which multiplies v
    skip: Tensor | None = None  # [HV] or [B, T, HV], the share of v in the output
    gate: Tensor | None = None  # [B, T, …], the output gate before its activation
    local: Tensor | None = None  # [B, T, HV, V], the convolution of v that is added to the output
    angles: Tensor | None = None  # [B, T, HV, R/2], of q and k since the token before, in Mamba 3


class Call(NamedTuple):
    """The tensors of a recurrence. Without β it is linear attention, with β the delta rule."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V], HV a multiple of H
    beta: Tensor | None = None  # [B, T, HV]
    g: Tensor | None = None  # [B, T, HV] or [B, T, HV, K], K after the map
    erase: Tensor | None = None  # [B, T, HV, K]
    write: Tensor | None = None  # [B, T, HV, V]
    initial_state: Tensor | None = None  # [N, HV, K, V]
    cu_seqlens: Tensor | None = None  # [N + 1] integers


class Options(NamedTuple):
    """The options of a recurrence; `ops.delta_rule` says what each does."""

    feature_map: FeatureMap | None = None
    qk_norm: str | None = None
    scale: float | None = None
    output_final_state: bool = False
    allow_neg_eigval: bool = False
    chunk_size: int = 64
    mode: str = "chunk"
    backend: str = "auto"

    @property
    def backend_of_parts(self) -> str:
        """Of the map, and other parts of the torch form: "auto" may take kernels for them, "torch" takes none."""
        return "torch" if self.backend == "torch" else "auto"


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of computations with these tensors, fp32 or float64."""
    dtypes = (x.dtype for x in tensors if x is not None)
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def dtype_of(call: Call) -> torch.dtype:
    """The dtype of the call's states, decays and sums, fp32 or float64."""
    return wide_dtype(*call[:-1])  # all but cu_seqlens


def group_of(call: Call) -> int:
    """The number of consecutive heads of v that one head of q and k serves."""
    return call.v.shape[2] // call.q.shape[2]


def bounds_of(cu_seqlens: Tensor, length: int) -> tuple[int, ...]:
    """The bounds as integers. Raises ValueError if they do not rise from 0 to `length`."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: does not rise from 0 to the {length} tokens; pass cumulative lengths"
        )
    return bounds
