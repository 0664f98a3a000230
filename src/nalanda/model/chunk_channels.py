"""Scores within the chunks of `chunk_forward` where decays are per key channel, and their gradients.

A decay per key channel does not factor out of QK⊤, and e^{−γ} would overflow. But for tokens of two neighbouring spans
with border m, e^{γ_i − γ_j} = e^{γ_i − γ_m} · e^{γ_m − γ_j}, and neither factor exceeds 1. Spans of 1, 2, 4, … C/2
tokens cover every pair i > j once. The factors of longer spans are products of those of shorter ones, so each token
takes one exponential, and a decay of 0 gives no NaN. On a CPU a kernel computes the same.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .kernels import by_kernel

_switching = threading.Lock()


@contextmanager
def without_onednn() -> Iterator[None]:
    """torch's default library for fp32 products on a CPU. oneDNN takes up to four times as long for a few rows."""
    setting = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]  it is an object
    if setting.fp32_precision == "none":
        yield
        return

    # One thread at a time, so that each finds the setting of the process.
    with _switching:
        before = setting.fp32_precision
        setting.fp32_precision = "none"
        try:
            yield
        finally:
            setting.fp32_precision = before


def channel_scores(
    rows: Sequence[Tensor], k: Tensor, g: Tensor, backend: str
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """eᵞ and e^{γ_C − γ} [P, C, K]; tril(Δ QK⊤) and, with R, tril(Δ RK⊤, −1) [P, C, C].

    rows: Q, or Q and R, [P, C, K]. backend: "auto", or "torch" for no kernel.
    """
    served = by_kernel("channel_scores", backend, g, rows, k, g)
    if served is not None:
        return served[:2], [*served[2:]]

    decay_in, decay_out, factors = span_factors(g)
    scores = _scores(rows, k, factors)
    # Spans pair i > j alone. On the diagonal Δ is 1, and RK⊤ has none.
    scores[0].diagonal(0, 1, 2).copy_((rows[0] * k).sum(-1))
    return (decay_in, decay_out), scores


def channel_gradients(
    rows: Sequence[Tensor],
    k: Tensor,
    g: Tensor,
    d_scores: Sequence[Tensor],
    d_rows: Sequence[Tensor],
    d_k: Tensor,
    reads: Tensor,
    writes: Tensor,
    backend: str,
) -> None:
    """Adds what `d_scores` give to d_rows and d_k, and turns `reads` into dg, all in place.

    reads, writes: shares of dg at the tokens that read the state and that write to it, [P, C, K]. R may be K, and its
    gradient d_k.
    """
    if by_kernel(
        "channel_gradients", backend, d_k, rows, k, g, d_scores, d_rows, d_k, reads, writes
    ):
        return

    # Of the diagonal, where Δ is 1 and RK⊤ has nothing.
    diagonal = d_scores[0].diagonal(0, 1, 2)[..., None]  # [P, C, 1]
    d_rows[0].addcmul_(diagonal, k)
    d_k.addcmul_(diagonal, rows[0])
    # Below it, back through the products of `span_factors`, longest spans first.
    with without_onednn():
        for late, early in reversed(span_factors(g)[2]):
            size = late.shape[2]
            halves, d_halves, since, until = (
                x.unflatten(1, (-1, 2, size)) for x in (k, d_k, reads, writes)
            )
            # A product's share belongs to both of its factors.
            since[:, :, 0, -1].add_(since[:, :, 1].sum(2))
            since[:, :, 1, -1].add_(until[:, :, 0].sum(2))

            # The scores that used the factors of this length.
            k_early = halves[:, :, 0] * early  # [P, pairs, size, K]
            of_k = torch.zeros_like(k_early)
            for x, d_x, d_score in zip(rows, d_rows, d_scores, strict=True):
                x, d_x = (y.unflatten(1, (-1, 2, size))[:, :, 1] for y in (x, d_x))
                later, block = x * late, below_diagonal(d_score, size)
                # [P, pairs, size, K]; single tokens need no product.
                of_x = block @ k_early if size > 1 else block * k_early
                d_x.addcmul_(late, of_x)
                since[:, :, 1].addcmul_(later, of_x)
                of_k += block.mT @ later if size > 1 else later.mul_(block)

            d_halves[:, :, 0].addcmul_(early, of_k)
            until[:, :, 0].addcmul_(k_early, of_k)


@without_onednn()
def _scores(
    rows: Sequence[Tensor], k: Tensor, factors: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """tril(Δ XK⊤, −1) for each X [P, C, K] of `rows`."""
    P, C, _ = k.shape
    scores = [k.new_zeros(P, C, C) for _ in rows]
    for late, early in factors:
        size = late.shape[2]
        k_early = k.unflatten(1, (-1, 2, size))[:, :, 0] * early  # [P, pairs, size, K]
        for x, score in zip(rows, scores, strict=True):
            later = x.unflatten(1, (-1, 2, size))[:, :, 1] * late
            # [P, pairs, size, size]; between single tokens a sum is cheaper than a product.
            block = later @ k_early.mT if size > 1 else (later * k_early).sum(-1, keepdim=True)
            below_diagonal(score, size).copy_(block)
    return scores


def span_factors(g: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """eᵞ, e^{γ_C − γ} and the factors of spans of 1, 2, 4, … tokens, for g [P, C, K].

    A pair of spans has e^{γ_i − γ_m} of its second one and e^{γ_m − γ_j} of its first, [P, pairs, span, K].
    """
    since, until = flushed(g.exp()), torch.ones_like(g)
    factors, size = [], 1
    while size < g.shape[1]:
        since_pairs, until_pairs = (x.unflatten(1, (-1, 2, size)) for x in (since, until))
        late, early = since_pairs[:, :, 1], until_pairs[:, :, 0]
        factors.append((late.clone(), early.clone()))

        # In place: from the borders of these spans to those of spans twice as long.
        flushed(early.mul_(late[:, :, -1:]))
        flushed(late.mul_(since_pairs[:, :, 0, -1:]))
        size *= 2
    return since, until, factors


def below_diagonal(x: Tensor, size: int) -> Tensor:
    """The blocks of [P, C, C] that pair the second span with the first: a view [P, pairs, size, size]."""
    x = x.unflatten(2, (-1, 2, size)).unflatten(1, (-1, 2, size))[:, :, 1, :, :, 0]
    return x.diagonal(0, 1, 3).movedim(3, 1)


def flushed(x: Tensor) -> Tensor:
    """x ≥ 0 with values near the smallest normal number set to 0, in place. CPUs are slow below that."""
    return torch.threshold_(x, torch.finfo(x.dtype).tiny * 2**27, 0)
