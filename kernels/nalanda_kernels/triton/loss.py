"""The cross-entropy of logits and its gradient, in the memory of the logits.

For a row x `[V]` with the label j, lse = log Σ exp x and the weight z of the z-loss:

    loss = lse − x_j,    x ← softmax(x) (1 + 2 z lse) − onehot(j).

A row is read twice and written once. torch's operators read and write an fp32 copy several times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.triton.common import FUSION, name_of, power_of_two
from nalanda_kernels.triton.tiles import DTYPES

WIDEST = 4096  # columns of a tile


@triton.jit
def loss_kernel(
    logits, labels, losses, stride, V, ignored, z_loss, GRADIENT: tl.constexpr, BV: tl.constexpr
):
    """One row: its loss, 0 where the label is `ignored` and NaN where it is no column, and its gradient in place."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * stride
    label = tl.load(labels + r)
    real, inside = label != ignored, (label >= 0) & (label < V)
    # Before the sums, whose barriers keep it from reading the gradient of a faster warp.
    of_label = tl.load(row + tl.where(inside, label, 0)).to(tl.float32)

    top, total = -float("inf"), 0.0
    for start in range(0, V, BV):
        c = start + tl.arange(0, BV)
        x = tl.load(row + c, c < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    loss = tl.where(inside, lse - of_label, float("nan"))
    tl.store(losses + r, tl.where(real, loss, 0.0))

    if GRADIENT:
        scale = tl.where(real, 1 + 2 * z_loss * lse, 0.0)
        for start in range(0, V, BV):
            c = start + tl.arange(0, BV)
            x = tl.load(row + c, c < V, other=-float("inf")).to(tl.float32)
            d = tl.exp(x - lse) * scale - tl.where(real & (c == label), 1.0, 0.0)
            tl.store(row + c, d.to(logits.dtype.element_ty), c < V)


def cross_entropy(
    logits: Tensor, labels: Tensor, ignored: int, z_loss: float, gradient: bool
) -> Tensor:
    """The loss of each row, fp32 `[rows]`. With `gradient` logits `[rows, V]` become those of the losses' sum.

    labels: int64 `[rows]`; rows with the label `ignored` have the loss and the gradient 0.

    Raises Unsupported for other dtypes than fp32, bf16 and fp16.
    """
    if logits.dtype not in DTYPES:
        raise Unsupported(f"{name_of(logits.dtype)} logits")
    rows, V = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        BV = min(power_of_two(V), WIDEST)
        sizes = {"GRADIENT": gradient, "BV": BV, "num_warps": 8}
        inputs = logits, labels.contiguous(), losses, logits.stride(0), V
        loss_kernel[(rows,)](*inputs, ignored, float(z_loss), **sizes, **FUSION)
    return losses
