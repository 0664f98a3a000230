"""Checks sampling options. Imports neither torch nor transformers."""

import math
from typing import Any

from nalanda.common.errors import InputError
from nalanda.config.schema import check_seed
from nalanda_options import Sampling


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """The options for transformers' `generate`. Raises InputError for values out of range."""
    length, temperature = sampling.max_new_tokens, sampling.temperature
    if length < 1:
        raise InputError(f"max_new_tokens is {length}: it must be at least 1")
    if not (temperature == 0 or 1e-6 <= temperature < math.inf):
        raise InputError(f"temperature is {temperature}: it must be 0 (greedy), or 1e-6 or more")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"top_p is {sampling.top_p}: it must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise InputError(f"top_k is {sampling.top_k}: it must be 0 (all tokens) or above")
    check_seed(sampling.seed, "--seed")

    if temperature == 0:
        return {"max_new_tokens": length, "do_sample": False}
    return {
        "max_new_tokens": length,
        "do_sample": True,
        "temperature": temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
