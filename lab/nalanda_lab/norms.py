"""Changed query norms in trained mixers, to see how much of their work depends on ‖q‖."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from nalanda.model.call import Inputs


@contextlib.contextmanager
def changed_norms(mixers: Sequence[Any], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces ‖q‖ `[B, T, H, 1]`, as `mix` gets q, by `change(‖q‖)`. Directions stay."""

    def changed(original: Callable, *args: Any) -> tuple[Inputs, Any]:
        inputs, new = original(*args)
        norm = inputs.q.norm(dim=-1, keepdim=True)
        q = inputs.q * (change(norm) / norm.clamp_min(1e-12))
        return inputs._replace(q=q), new

    for mixer in mixers:
        mixer.inputs = partial(changed, mixer.inputs)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.inputs
