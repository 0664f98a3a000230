"""What generation carries from token to token, behind transformers' cache interface."""

from torch import Tensor
from transformers.cache_utils import Cache


class NalandaCache(Cache):
    """A dict of named tensors for each layer, as its mixer's `state_spec` has them, batch first.

    The states are of constant size: nothing here grows with the text, except for mixers whose spec says so.
    """

    def __init__(self, num_layers: int):
        # transformers' own constructor builds key/value layers; a recurrent model has none.
        self.layers = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.states: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
        self.seen_tokens = 0  # columns read so far, padding included, as attention masks count them
        self.lengths: Tensor | None = None  # int64 [batch], on the host: real tokens of each sequence

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
        return self.seen_tokens > 0

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def batch_size(self) -> int:
        return 0 if self.lengths is None else len(self.lengths)

    def check_batch(self, batch: int) -> None:
        """Raise ValueError where a cache of another batch size would be read silently wrong."""
        if self.is_initialized and self.batch_size != batch:
            raise ValueError(f"past_key_values holds {self.batch_size} sequences, the input has {batch} rows")

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.seen_tokens > 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "a recurrent state cannot forget its last tokens: keep a copy from before them"
            )

    def reset(self) -> None:
        self.states = [{} for _ in self.states]
        self.seen_tokens = 0
        self.lengths = None

    def _map(self, function) -> None:
        self.states = [{name: function(t) for name, t in state.items()} for state in self.states]
        self.lengths = None if self.lengths is None else function(self.lengths)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda t: t.repeat_interleave(repeats, 0))
