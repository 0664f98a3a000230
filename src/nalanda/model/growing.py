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

    def claim(self, start: int, end: int, rest: bool = False) -> bool:
        """Takes rows `start` to `end`, and with `rest` all behind; False if they are written already or do not fit."""
        with _claiming:
            room = self.rows.shape[1]
            free = start == self.used and end <= room
            if free:
                self.used = room if rest else end
        return free


def claim_rows(held: Tensor, more: int, rest: bool = False) -> Memory:
    """Memory whose first rows are those of held `[N, R, H, D]`, and the next `more` the caller's; rest: and all behind.

    If held ends where its memory's used rows end, that is its memory. Else held moves to new memory: a second
    continuation of one state does, and so does a state from a file.
    """
    R = held.shape[1]
    memory = getattr(held, "memory", None)
    # Outside of inference mode torch does not write into what was made inside.
    sealed = held.is_inference() and not torch.is_inference_mode_enabled()
    if memory is None or sealed or not memory.claim(R, R + more, rest):
        memory = Memory(held, more)
        memory.claim(R, R + more, rest)
    return memory


def grown(held: Tensor, x: Tensor) -> Tensor:
    """The rows of held `[N, R, H, D]`, then those of x `[N, L, H, D]`, as `torch.cat` on dim 1 gives them.

    No gradient flows through it.
    """
    R = held.shape[1]
    end = R + x.shape[1]
    memory = claim_rows(held, x.shape[1])
    memory.rows[:, R:end] = x
    state = memory.rows[:, :end]
    state.memory = memory  # pyrefly: ignore[missing-attribute]
    return state
