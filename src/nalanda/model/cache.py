"""The state of generation, with transformers' cache interface."""

import copy
import threading
import weakref
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from .precision import pack_state, unpack_state

CACHE = next(
    x.name for x in fields(BaseModelOutputWithPast) if x.name in ("cache", "past_key_values")
)
"""transformers' name of a cache, as a keyword and as an output: `past_key_values` before 5.24, then `cache`."""


def cache_of(output: Any) -> Any:
    """The cache in the output of any model of transformers, or of `generate`; None if it has none."""
    return output.get(CACHE)


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache that a call gave under either name. Raises ValueError for both."""
    if past_key_values is None:
        return cache
    if cache is not None:
        raise ValueError("cache and past_key_values are one thing: give one of them")
    return past_key_values


class NalandaCache(Cache):
    """Each layer's state: a dict of tensors as in its mixer's `state_spec`, batch first.

    States have constant size, except for mixers whose spec grows. Eager calls replace tensors and
    never write into them, so keeping an old state costs only references. Graphs and C++ write into buffers of their
    own, which `states` copies.

    A state cannot forget its last tokens. For assisted decoding (`activate_past_recording`) a mark is set
    before the candidates. `crop` returns to the mark and reads the accepted tokens again.

    While CUDA graphs or C++ decode, the newest states are in their buffers (`StateBuffers`); `states` copies them out.

    state_dtype: precision of matrices between calls, see `precision.py`. Other than float32 it decodes in torch.
    """

    static = False  # whether `lengths` are on the device and change where the host does not see it

    def __init__(self, num_layers: int, state_dtype: str = "float32"):
        # transformers' constructor would build key/value layers.
        self.layers = []
        self.layer_class_to_replicate = None
        self.offloading = False
        # `StateBuffers`, the last to decode for this cache, which keeps them alive.
        self.decoder: Any = None
        self.state_dtype = state_dtype
        self.states: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
        # A call replaces them layer by layer. This stays True where a call failed in between.
        self.being_read = False
        self.seen_tokens = 0  # columns read so far, with padding, as in attention masks
        self.lengths: Tensor | None = None  # int64 [batch], on the host: tokens of each sequence
        self.recording = False
        self.marked: NalandaCache | None = None  # a fork made at the mark
        # The decoder that reads since the mark, and what it read: embeddings [B, T, D], mask [B, T].
        self.reader: Any = None
        self.tail: list[tuple[Tensor, Tensor]] = []

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """Each layer's state."""
        self.release()
        return self._states

    @states.setter
    def states(self, states: list[dict[str, Tensor]]) -> None:
        self._states, self.live = states, False

    def release(self) -> None:
        """Copies the states out of the buffers."""
        if self.live:  # whether they are there
            self.decoder.give_back(self)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have no mark."""
        others = {"decoder": None, "marked": None, "reader": None, "tail": []}
        return {"_states": self.states} | vars(self) | others

    def seen(self, columns: int, tokens: Tensor) -> None:
        """Adds the columns of a call, and the tokens of each sequence in it."""
        self.seen_tokens += columns
        self.lengths = tokens if self.lengths is None else self.lengths + tokens

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return (
            f"NalandaCache({len(self)} layers, {self.seen_tokens} tokens seen, {self.nbytes} bytes)"
        )

    @property
    def nbytes(self) -> int:
        # Not `self.states`, which would copy them out of the buffers.
        states = self.decoder.newest if self.live else self.states
        return sum(t.nbytes for state in states for t in state.values())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # asked by peft
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.lengths is not None

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_linear(self) -> list[bool]:
        # Where all are true, `generate` gives a prompt whole, even the tokens that the cache has read.
        return [False] * len(self)

    @property
    def batch_size(self) -> int:
        return 0 if self.lengths is None else len(self.lengths)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.is_initialized

    def fork(self) -> "NalandaCache":
        """An independent cache of the same text, which shares the tensors."""
        other = copy.copy(self)
        other.states = list(self.states)
        other.recording = False
        return other

    def convert(self, state_dtype: str | None) -> "NalandaCache":
        """Keeps the states in another precision from now on; None: as they are. Returns itself."""
        if state_dtype is not None and state_dtype != self.state_dtype:
            self.states = [pack_state(unpack_state(state), state_dtype) for state in self.states]
            self.state_dtype = state_dtype
        return self

    def follow(self, dtype: torch.dtype) -> None:
        """Widens states for a model that was cast to fp64, or narrows those of a model that was in fp64."""
        wide = torch.promote_types(dtype, torch.float32)
        other = torch.float32 if wide == torch.float64 else torch.float64
        if any(x.dtype == other for state in self.states for x in state.values()):
            self.states = [
                {name: x.to(wide) if x.dtype == other else x for name, x in state.items()}
                for state in self.states
            ]

    @property
    def waits_for_mark(self) -> bool:
        """Whether recording was asked for and has not begun."""
        return self.recording and self.marked is None

    def activate_past_recording(self) -> None:
        self.recording = True

    def mark(self, decoder: Any) -> None:
        """Starts recording what `decoder` reads, which `crop` can remove. `crop` must be called to end it."""
        self.marked, self.reader, self.tail = self.fork(), decoder, []

    def record(self, embeddings: Tensor, mask: Tensor | None) -> None:
        """Records columns `[B, T, D]` with their mask `[B, T]`; None: no column is padding."""
        if self.marked is not None:
            if mask is None:
                mask = embeddings.new_ones(embeddings.shape[:2], dtype=torch.bool)
            self.tail.append((embeddings, mask))

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last −tokens_to_remove columns and the mark; 0 only forgets the mark.

        Raises ValueError if they begin before the mark, or there is no mark.
        """
        marked, decoder, tail = self.marked, self.reader, self.tail
        if tokens_to_remove == 0:
            self._forget()
            return
        if (
            marked is None
            or tokens_to_remove > 0
            or -tokens_to_remove > sum(m.shape[1] for _, m in tail)
        ):
            raise ValueError(
                f"crop({tokens_to_remove}): only recorded tokens can be removed; give a negative number, and "
                "call activate_past_recording before reading, or keep a fork()"
            )
        embeddings, mask = (
            torch.cat(parts, 1)[:, :tokens_to_remove] for parts in zip(*tail, strict=True)
        )
        self.states, self.lengths = marked.states, marked.lengths
        self.seen_tokens = marked.seen_tokens
        self._forget()
        if mask.shape[1]:  # the columns that stay
            decoder(inputs_embeds=embeddings, attention_mask=mask, cache=self)

    def _forget(self) -> None:
        self.marked, self.reader, self.tail = None, None, []

    def reset(self) -> None:
        self.__init__(len(self), self.state_dtype)

    def _map(self, function) -> None:
        self.states = [{name: function(t) for name, t in state.items()} for state in self.states]
        self.lengths = None if self.lengths is None else function(self.lengths)
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, 0))


class StateBuffers:
    """States in memory that decoding writes into. They are those of one cache at a time, its owner.

    One thread decodes with them. Another one may continue their owner, and then takes its states out: buffers change
    owners under a lock.

    A subclass has `newest`, each layer's newest state, and `lengths`, int64 `[batch]`, which it counts on from.
    """

    lock = threading.RLock()  # one for all buffers, because a cache moves from some to others
    newest: list[dict[str, Tensor]]
    lengths: Tensor
    owner: "weakref.ref[NalandaCache] | None" = None

    def copied(self) -> list[dict[str, Tensor]]:
        """The newest states in tensors of their own."""
        return [{name: x.clone() for name, x in state.items()} for state in self.newest]

    def fits(self, states: list[dict[str, Tensor]]) -> bool:
        return alike(states, self.newest)

    def fill(self, states: list[dict[str, Tensor]]) -> None:
        """Copies states that fit into the buffers."""
        copy_all(self.newest, states)

    def give_back(self, cache: NalandaCache) -> None:
        """Copies the newest states into `cache`, if they are its own."""
        with self.lock:
            if cache.live and cache.decoder is self:
                cache.states = self.copied()

    def take(self, cache: NalandaCache) -> bool:
        """Moves the states of `cache` into the buffers, if they are not there; False if they do not fit."""
        if cache.decoder is self and cache.live:
            return True
        states = cache.states
        if not self.fits(states):
            return False
        assert cache.lengths is not None

        with self.lock:
            owner = None if self.owner is None else self.owner()
            if owner is not None:
                self.give_back(owner)
            self.lengths.copy_(cache.lengths)
            self.fill(states)
            self.owner = weakref.ref(cache)
            cache.states = []  # frees their memory
            cache.decoder, cache.live = self, True
        return True


def alike(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]], dtypes: bool = False) -> bool:
    """Whether states have the same names and shapes, and with `dtypes` the same precision."""
    return len(a) == len(b) and all(
        x.keys() == y.keys()
        and all(x[n].shape == y[n].shape and (x[n].dtype == y[n].dtype or not dtypes) for n in x)
        for x, y in zip(a, b, strict=True)
    )


def copy_all(targets: list[dict[str, Tensor]], sources: list[dict[str, Tensor]]) -> None:
    """Copies into the targets the tensors that the sources have under their names, in few launches."""
    pairs = [
        (target[name], source[name])
        for target, source in zip(targets, sources, strict=True)
        for name in target
        if target[name] is not source[name]
    ]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
