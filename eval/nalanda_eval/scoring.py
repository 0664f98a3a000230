"""Log-likelihoods of continuations, on token ids.

A context that several continuations share is read once. Each continuation starts from a copy of its state, or
of its keys and values in a transformer of another library. Answers do not depend on the batch or on the order
of the requests, up to rounding.
"""

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from nalanda.inference.load import is_ours
from nalanda.model.cache import CACHE, cache_of

Request = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a context and of its continuation, both non-empty."""
Answer = tuple[float, bool]
"""log P(continuation | context) in nats, and whether greedy decoding gives the continuation."""

COLUMNS = 2048
"""Tokens of a row that our models read at once; longer rows continue from the state."""
POSITIONS = 1024
"""Positions whose logits are in memory at once."""


class Reading(NamedTuple):
    """Tokens to read in one pass, and the predictions to score."""

    tokens: Sequence[int]
    wanted: list[tuple[int, int, int]]
    """Predictions as (position, next token, request)."""


Tally = list[Answer]
"""Partial answer of each request."""


@torch.no_grad()
def answers(
    model: PreTrainedModel, requests: Sequence[Request], *, batch_size: int = 8, share: bool = True
) -> Iterator[dict[Request, Answer]]:
    """The answers to `requests` batch by batch, longest first; equal requests are answered once.

    Log-probabilities are fp32 (float64 for a float64 model), their sums float64.

    Args:
        model: in eval mode; our own, or any causal language model of transformers.
        batch_size: rows read together; up to four times as many for short continuations of states.
        share: read a context once for all its continuations. Models whose cache may not resume exactly read
            it for each.
    """
    distinct = list(dict.fromkeys(requests))
    tally: Tally = [(0.0, True)] * len(distinct)
    share = share and _resumes_exactly(model)
    limited = not is_ours(model) and _keeps_positions(model)

    alone, shared = _make_readings(distinct, share)
    for rows in _cut_batches(alone, batch_size):
        _read_rows(model, rows, tally, limited=limited)
        yield _finished_answers(rows, distinct, tally)

    # Batches of equal length: padding between context and continuation would shift positions and caches.
    for rows in _cut_batches(shared, batch_size, even=not is_ours(model)):
        cache = _read_rows(model, rows, tally, keep=True, limited=limited)
        endings = []  # continuations without their first token, which the context predicts
        for origin, row in enumerate(rows):
            for _, _, i in row.wanted:
                continuation = distinct[i][1]
                if len(continuation) > 1:
                    endings.append((_make_row(continuation, 1, i), origin))
        endings.sort(key=lambda ending: _longest_first(ending[0]))
        while endings:
            # Short continuations leave room for more rows beside the copied states.
            size = batch_size * min(4, 1 + 128 // len(endings[0][0].tokens))
            # Each batch reads on from a copy: the context's cache must serve the next one too.
            batch, origins = zip(*endings[:size], strict=True)
            _read_rows(
                model, batch, tally, _copy_rows(cache, torch.tensor(origins)), limited=limited
            )
            del endings[:size]
        yield _finished_answers(rows, distinct, tally)


def _make_readings(requests: list[Request], share: bool) -> tuple[list[Reading], list[Reading]]:
    """Rows of a context with one continuation, and rows of a context that continuations share."""
    groups = defaultdict(list)
    for i, (context, _) in enumerate(requests):
        groups[context].append(i)

    alone, shared = [], []
    for context, members in groups.items():
        if share and len(members) > 1:
            last = len(context) - 1  # predicts the first token of each continuation
            shared.append(Reading(context, [(last, requests[i][1][0], i) for i in members]))
        else:
            # Tokens after the context are predicted, each from the position before it.
            alone += [_make_row(context + requests[i][1], len(context), i) for i in members]
    return alone, shared


def process_share(requests: Sequence[Request], rank: int, processes: int) -> list[Request]:
    """The requests of process `rank`: those of every `processes`-th context, sorted by length."""
    # Contexts are dealt out, not requests: each is read by one process alone.
    contexts = sorted({context for context, _ in requests}, key=lambda ids: (-len(ids), ids))
    share = set(contexts[rank::processes])
    return [request for request in requests if request[0] in share]


def _make_row(tokens: Sequence[int], first: int, request: int) -> Reading:
    """A row whose tokens from `first` on are predicted."""
    return Reading(tokens[:-1], [(i - 1, tokens[i], request) for i in range(first, len(tokens))])


def _longest_first(row: Reading) -> tuple[int, Sequence[int]]:
    """Sort key: memory is exhausted at once or never, and batches do not depend on the requests' order."""
    return -len(row.tokens), row.tokens


def _cut_batches(rows: list[Reading], size: int, even: bool = False) -> Iterator[list[Reading]]:
    """Batches of up to `size` rows, longest first; if `even`, all of a batch have one length."""
    rows = sorted(rows, key=_longest_first)
    for _, group in itertools.groupby(rows, lambda row: len(row.tokens) if even else 0):
        equal = list(group)
        for start in range(0, len(equal), size):
            yield equal[start : start + size]


def _finished_answers(
    rows: Sequence[Reading], requests: list[Request], tally: Tally
) -> dict[Request, Answer]:
    """The answers to all requests of `rows`."""
    return {requests[i]: tally[i] for row in rows for _, _, i in row.wanted}


def _resumes_exactly(model: PreTrainedModel) -> bool:
    """Whether the cache surely resumes exactly: it is our state, or holds only keys and values."""
    if is_ours(model):
        return True
    if CACHE not in inspect.signature(model.forward).parameters:
        return False
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    cache = cache_of(model(token, use_cache=True))
    if type(cache) is not DynamicCache:
        return False
    # Other layers, such as those of sliding windows, may drop or merge what they read.
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _keeps_positions(model: PreTrainedModel) -> bool:
    """Whether `logits_to_keep` may be the wanted positions: older code takes only a number, of the last."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return False
    ids = torch.arange(3, device=model.device)[None]
    positions = torch.tensor([0, 2], device=model.device)
    # Tried on three tokens: a signature does not say which kinds it takes.
    expected = model(ids, use_cache=False).logits[:, positions]
    try:
        logits = model(ids, use_cache=False, logits_to_keep=positions).logits
    except (TypeError, ValueError, IndexError, RuntimeError):
        return False
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-2, atol=1e-2)


def _copy_rows(cache: Any, rows: Tensor) -> Any:
    """A copy of the cache with the given `rows`, which may repeat."""
    fork = copy.copy(cache)  # selecting replaces tensors, it writes into none
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    fork.batch_select_indices(rows)
    return fork


def _read_rows(
    model: Any,
    rows: Sequence[Reading],
    tally: Tally,
    cache: Any = None,
    *,
    keep: bool = False,
    limited: bool = False,
) -> Any:
    """Reads `rows`, padded on the right, into the tally; returns the cache after them if `keep`.

    limited: whether a model of another library computes logits only where they are wanted.
    """
    # ids and mask [B, width].
    width = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[i, : len(row.tokens)] = 1

    # The predictions of all rows: four vectors [N].
    wanted = torch.tensor([(i, *want) for i, row in enumerate(rows) for want in row.wanted])
    row, position, token, request = wanted.unbind(1)
    if not is_ours(model):
        # The union over rows; `column` is each prediction's place in it.
        kept_positions, column = position.unique(return_inverse=True)
        some = {"logits_to_keep": kept_positions.to(model.device)} if limited else {}
        # No mask: padding on the right reaches no token.
        if cache is not None:
            some[CACHE] = cache
        out = model(ids.to(model.device), use_cache=keep, **some)
        logits = out.logits[row, column if limited else position]  # [N, vocabulary]
        _add_scores(logits, lambda logits: logits, token, request, tally)
        return cache_of(out) if keep else None

    for start in range(0, width, COLUMNS):
        end = min(start + COLUMNS, width)
        out = model.model(
            ids[:, start:end].to(model.device),
            attention_mask=mask[:, start:end],
            cache=cache,
            use_cache=keep or width > COLUMNS,
        )
        cache = cache_of(out)
        # Predictions in these columns; the head sees only their vectors.
        inside = (position >= start) & (position < end)
        hidden = out.last_hidden_state[row[inside], position[inside] - start]  # [N, D]
        _add_scores(hidden, model.lm_head, token[inside], request[inside], tally)
    return cache


def _add_scores(x: Tensor, head: Any, token: Tensor, request: Tensor, tally: Tally) -> None:
    """Adds log P(token) under `head(x)` to each request; x `[N, …]`, token and request `[N]`."""
    for chunk in torch.arange(len(x)).split(POSITIONS):
        # [≤ POSITIONS, vocabulary], then fp32 for the sum over the vocabulary.
        logits = head(x[chunk])
        if logits.dtype != torch.float64:
            logits = logits.float()
        target = token[chunk].to(logits.device)[:, None]
        logp = logits.log_softmax(-1).gather(1, target)[:, 0]
        hit = logits.argmax(-1) == target[:, 0]

        triples = zip(request[chunk].tolist(), logp.tolist(), hit.tolist(), strict=True)
        for i, value, is_greedy in triples:
            total, greedy = tally[i]
            tally[i] = total + value, greedy and is_greedy
