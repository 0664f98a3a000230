"""Log-likelihoods of continuations, on token ids.

A context that several continuations share is read once, and each of them goes on from a copy of the state (of
the keys and values, in another library's transformers). No answer depends on the batch or on the order of the
requests beyond the rounding of a sum.
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

Request = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids: a context and its continuation, neither of them empty."""
Answer = tuple[float, bool]
"""log P(continuation | context) in nats, and whether greedy decoding would give the continuation."""

COLUMNS = 2048  # that our models read at once: longer rows go on from the state
POSITIONS = 1024  # whose logits exist at once


class Row(NamedTuple):
    """Tokens that are read in one go, and what follows some of them: (position, next token, request)."""

    tokens: Sequence[int]
    wanted: list[tuple[int, int, int]]


Tally = list[Answer]
"""What has been read so far of each request's answer."""


def score(
    model: PreTrainedModel, requests: Sequence[Request], *, batch_size: int = 8, share: bool = True
) -> list[Answer]:
    """The answers to `requests`, in their order; see `answers`."""
    found: dict[Request, Answer] = {}
    for batch in answers(model, requests, batch_size=batch_size, share=share):
        found.update(batch)
    return [found[request] for request in requests]


@torch.no_grad()
def answers(
    model: PreTrainedModel, requests: Sequence[Request], *, batch_size: int = 8, share: bool = True
) -> Iterator[dict[Request, Answer]]:
    """The answers to `requests` batch by batch, the longest first; equal requests are answered once.

    Sums are float64, of log-probabilities in fp32 (float64 for a float64 model).

    Args:
        model: in eval mode; our own, or any causal language model of transformers.
        batch_size: rows that are read together; up to four times as many where short ones go on from states.
        share: read a context once for all its continuations. Models whose cache is not known to go on
            exactly read it again for each.
    """
    asked = list(dict.fromkeys(requests))
    tally: Tally = [(0.0, True)] * len(asked)
    groups = defaultdict(list)
    for i, (context, _) in enumerate(asked):
        groups[context].append(i)
    share = share and _goes_on(model)

    alone, shared = [], []
    for context, members in groups.items():
        if share and len(members) > 1:
            shared.append(Row(context, [(len(context) - 1, asked[i][1][0], i) for i in members]))
        else:
            alone += [_row(context + asked[i][1], len(context), i) for i in members]
    for rows in _batches(alone, batch_size):
        _read(model, rows, tally)
        yield _settled(rows, asked, tally)
    # Without padding between context and continuation, every other cache and position is as in one reading.
    for rows in _batches(shared, batch_size, even=not _ours(model)):
        cache = _read(model, rows, tally, keep=True)
        endings = [
            (_row(asked[i][1], 1, i), origin)
            for origin, row in enumerate(rows)
            for _, _, i in row.wanted
            if len(asked[i][1]) > 1
        ]
        endings.sort(key=lambda ending: _longest_first(ending[0]))
        while endings:
            size = batch_size * min(4, 1 + 128 // len(endings[0][0].tokens))
            batch, origins = zip(*endings[:size], strict=True)
            _read(model, batch, tally, _fork(cache, torch.tensor(origins)))
            del endings[:size]
        yield _settled(rows, asked, tally)


def part(requests: Sequence[Request], rank: int, processes: int) -> list[Request]:
    """What process `rank` answers: all requests of its contexts, whose lengths are those of the others'."""
    contexts = sorted({context for context, _ in requests}, key=lambda ids: (-len(ids), ids))
    own = set(contexts[rank::processes])
    return [request for request in requests if request[0] in own]


def _row(tokens: Sequence[int], first: int, request: int) -> Row:
    """A row that is asked for its tokens from `first` on."""
    return Row(tokens[:-1], [(i - 1, tokens[i], request) for i in range(first, len(tokens))])


def _longest_first(row: Row) -> tuple[int, Sequence[int]]:
    """Memory runs out at once or never, and the order of the requests does not reach the batches."""
    return -len(row.tokens), row.tokens


def _batches(rows: list[Row], size: int, even: bool = False) -> Iterator[list[Row]]:
    """even: only rows of one length in a batch."""
    rows = sorted(rows, key=_longest_first)
    for _, equal in itertools.groupby(rows, lambda row: len(row.tokens) if even else 0):
        same = list(equal)
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _settled(rows: Sequence[Row], asked: list[Request], tally: Tally) -> dict[Request, Answer]:
    return {asked[i]: tally[i] for row in rows for _, _, i in row.wanted}


def _ours(model: PreTrainedModel) -> bool:
    return model.config.model_type == "nalanda"


def _goes_on(model: PreTrainedModel) -> bool:
    """Whether reading on from the model's cache is exact: our states, or keys and values and nothing else."""
    if _ours(model):
        return True
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return False
    cache = model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True).past_key_values
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def _fork(cache: Any, rows: Tensor) -> Any:
    """A cache of its own for each of `rows`, which may repeat."""
    fork = copy.copy(cache)  # selecting replaces tensors and writes into none
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    fork.batch_select_indices(rows)
    return fork


def _read(model: Any, rows: Sequence[Row], tally: Tally, cache: Any = None, keep: bool = False) -> Any:
    """Adds to the tally what `rows`, padded on the right, are asked for; the cache after them, if kept."""
    width = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[i, : len(row.tokens)] = 1
    wanted = torch.tensor([(i, *want) for i, row in enumerate(rows) for want in row.wanted])
    row, position, token, request = wanted.unbind(1)
    if not _ours(model):
        kept, column = position.unique(return_inverse=True)
        limited = "logits_to_keep" in inspect.signature(model.forward).parameters
        some = {"logits_to_keep": kept.to(model.device)} if limited else {}
        # No mask: what stands right of a row's tokens reaches none of them.
        out = model(ids.to(model.device), past_key_values=cache, use_cache=keep, **some)
        hidden, head = out.logits[row, column if limited else position], lambda logits: logits
        _add(hidden, head, token, request, tally)
        return out.past_key_values if keep else None
    for start in range(0, width, COLUMNS):
        end = min(start + COLUMNS, width)
        out = model.model(
            ids[:, start:end].to(model.device),
            attention_mask=mask[:, start:end],
            past_key_values=cache,
            use_cache=keep or width > COLUMNS,
        )
        cache = out.past_key_values
        here = (position >= start) & (position < end)
        hidden = out.last_hidden_state[row[here], position[here] - start]
        _add(hidden, model.lm_head, token[here], request[here], tally)
    return cache


def _add(x: Tensor, head: Any, token: Tensor, request: Tensor, tally: Tally) -> None:
    """x `[N, …]`: what `head` makes logits of; token, request `[N]`."""
    for part in torch.arange(len(x)).split(POSITIONS):
        logits = head(x[part])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        target = token[part].to(logits.device)[:, None]
        logp = logits.log_softmax(-1).gather(1, target)[:, 0]
        hit = logits.argmax(-1) == target[:, 0]
        for i, value, same in zip(request[part].tolist(), logp.tolist(), hit.tolist(), strict=True):
            total, greedy = tally[i]
            tally[i] = total + value, greedy and same
