"""Keys and values, which grow by a row a head with every token, without a copy of all rows.

Rows are only ever added behind those that a state shows, so an older state keeps its values.
"""

import threading

import torch
from torch import Tensor

_claiming = threading.Lock()  # two threads may continue one state


class Memory:
    """Rows `[N, room, H, D]` of which the first `used` are written. States are views of them.

    A head's rows follow each other in memory, because attention reads head by head. A core reads rows that lie 2 kB
    apart at 9 GB/s, and neighbours at 22.
    """

    def __init__(self, first: Tensor, more: int):
        """Copies `first` `[N, R, H, D]`, with room for `more` rows and for a quarter beyond."""
        N, R, H, D = first.shape
        room = R + more + (R + more) // 4 + 64
        self.rows = first.new_empty(N, H, room, D).transpose(1, 2)
        self.rows[:, :R] = first
        self.used = R

    def claim(self, start: int, end: int) -> bool:
        """Takes rows `start` to `end`; False if they are written already or do not fit."""
        with _claiming:
            free = start == self.used and end <= self.rows.shape[1]
            if free:
                self.used = end
        return free


def grown(kept: Tensor, x: Tensor) -> Tensor:
    """The rows of kept `[N, R, H, D]`, then those of x `[N, L, H, D]`, as `torch.cat` on dim 1 gives them.

    If kept ends where its memory's used rows end, x is written behind it. Else kept moves to new memory first: a
    second continuation of one state does, and so does a state from a file. No gradient flows through it.
    """
    R = kept.shape[1]
    end = R + x.shape[1]
    memory = getattr(kept, "memory", None)
    # Outside of inference mode torch does not write into what was made inside.
    sealed = kept.is_inference() and not torch.is_inference_mode_enabled()

    if memory is None or sealed or not memory.claim(R, end):
        memory = Memory(kept, x.shape[1])
        memory.claim(R, end)
    memory.rows[:, R:end] = x
    state = memory.rows[:, :end]
    state.memory = memory  # pyrefly: ignore[missing-attribute]
    return state


def claim_room(kept: Tensor, more: int) -> Memory:
    """Memory whose first rows are those of kept, and whose other rows, at least `more`, are the caller's alone."""
    R = kept.shape[1]
    memory = getattr(kept, "memory", None)
    room = 0 if memory is None else memory.rows.shape[1]
    if memory is None or room < R + more or not memory.claim(R, room):
        memory = Memory(kept, more)
        memory.used = memory.rows.shape[1]
    return memory
