"""What generation carries from token to token, behind transformers' cache interface."""

import copy

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class NalandaCache(Cache):
    """A dict of named tensors for each layer, as its mixer's `state_spec` has them, batch first.

    The states are of constant size: nothing here grows with the text, except for mixers whose spec says so.
    Nothing writes into a state's tensors either: each call puts new ones in their place, so that to keep old
    ones is to keep references.

    A state cannot forget its last tokens. Where assisted decoding asks for that (`activate_past_recording`),
    a mark is set before the candidates, and `crop` goes back to it: those of the tokens behind it that stay
    are read again by the next call.
    """

    def __init__(self, num_layers: int):
        # transformers' own constructor builds key/value layers; a recurrent model has none.
        self.layers = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.states: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
        self.seen_tokens = 0  # columns read so far, padding included, as attention masks count them
        self.lengths: Tensor | None = None  # int64 [batch], on the host: real tokens of each sequence
        self.recording = False
        self.marked: NalandaCache | None = None  # as it was at the mark
        self.tail: list[tuple[Tensor, Tensor]] = []  # read since: embeddings [B, T, D] and mask [B, T]
        self.unread: tuple[Tensor, Tensor] | None = None  # the same of what `crop` has left to be read again

    def seen(self, columns: int, tokens: Tensor) -> None:
        """Counts what a call has read: columns of the batch, and real tokens of each sequence."""
        self.seen_tokens += columns
        self.lengths = tokens if self.lengths is None else self.lengths + tokens

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"NalandaCache({len(self)} layers, {self.seen_tokens} tokens seen, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for state in self.states for t in state.values())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
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
    def batch_size(self) -> int:
        return 0 if self.lengths is None else len(self.lengths)

    def check_batch(self, batch: int) -> None:
        """Raise ValueError where a cache of another batch size would be read silently wrong."""
        if self.is_initialized and self.batch_size != batch:
            raise ValueError(f"past_key_values holds {self.batch_size} sequences, the input has {batch} rows")

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.is_initialized

    def fork(self) -> "NalandaCache":
        """A cache of the same text that goes its own way, for the price of a few references."""
        other = copy.copy(self)
        other.states = list(self.states)
        other.recording = False
        other._forget()
        return other

    def activate_past_recording(self) -> None:
        self.recording = True

    def mark(self) -> None:
        """What is read from here on can be taken back by `crop`, which must be called to end it."""
        self.marked, self.tail = self.fork(), []

    def record(self, embeddings: Tensor, mask: Tensor | None) -> None:
        """Columns that were read, `[B, T, D]`; mask `[B, T]`, or None where no column is padding."""
        if self.marked is not None:
            if mask is None:
                mask = embeddings.new_ones(embeddings.shape[:2], dtype=torch.bool)
            self.tail.append((embeddings, mask))

    def take_unread(self) -> tuple[Tensor, Tensor] | None:
        unread, self.unread = self.unread, None
        if unread is not None:
            self.seen_tokens -= unread[1].shape[1]
        return unread

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last −tokens_to_remove columns; 0 keeps all, and lets go of the mark.

        Raises ValueError where they lie before the mark, or none was set.
        """
        marked, tail = self.marked, self.tail
        if tokens_to_remove == 0:
            return self._forget()
        if marked is None or tokens_to_remove > 0 or -tokens_to_remove > sum(m.shape[1] for _, m in tail):
            raise ValueError(
                f"crop({tokens_to_remove}): a recurrent state forgets only what it has recorded; give a "
                "negative number, and call activate_past_recording before reading, or fork() to return to"
            )
        embeddings, mask = (torch.cat(parts, 1)[:, :tokens_to_remove] for parts in zip(*tail, strict=True))
        self.states, self.lengths = marked.states, marked.lengths
        self.seen_tokens = marked.seen_tokens + mask.shape[1]
        self.unread = (embeddings, mask) if mask.shape[1] else None
        return self._forget()

    def _forget(self) -> None:
        self.marked, self.tail = None, []

    def reset(self) -> None:
        self.__init__(len(self))

    def _map(self, function) -> None:
        self.states = [{name: function(t) for name, t in state.items()} for state in self.states]
        self.lengths = None if self.lengths is None else function(self.lengths)
        self.unread = None if self.unread is None else (function(self.unread[0]), function(self.unread[1]))
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, 0))
