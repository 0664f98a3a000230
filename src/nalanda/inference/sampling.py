"""Checks sampling options. Imports neither torch nor transformers."""

import math
from typing import Any

from nalanda.common.errors import InputError


def sampling_options(
    *, max_new_tokens: int = 128, temperature: float = 0.8, top_p: float = 1.0, top_k: int = 0
) -> dict[str, Any]:
    """The options for transformers' `generate`. Raises InputError for values out of range."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
    if not (temperature == 0 or 1e-6 <= temperature < math.inf):
        raise InputError(f"temperature is {temperature}: it must be 0 (greedy), or 1e-6 or more")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p}: it must be above 0 and at most 1")
    if top_k < 0:
        raise InputError(f"top_k is {top_k}: it must be 0 (all tokens) or above")
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    chosen = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, **chosen}
