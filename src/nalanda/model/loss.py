"""The head's cross-entropy, computed in blocks of rows; and beside it, the divergence from a teacher."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import by_kernel
from .layers import autocasts, once_differentiable


@dataclass(eq=False)
class Distillation:
    """A teacher's next tokens for the rows of a loss, which becomes (1 − w)·cross-entropy + w·τ²·KL.

    Only gradients change; the value remains the cross-entropy. Sharding wrappers do not look into this class,
    so they cast no tensor of it.
    """

    hidden: Tensor
    """The teacher's last hidden states `[M, D]`."""
    head: Tensor
    """The matrix of its head `[V, D]`."""
    weight: float
    """w."""
    temperature: float
    """τ, which divides the logits of both."""
    divergence: Tensor
    """Σ KL(teacher, model) over the rows so far, fp64: each block adds its own."""

    def gradient(self, span: slice, logits: Tensor, ignored: Tensor) -> Tensor:
        """d(w τ² KL)/d logits of a block `[rows, V]`, of the student's logits."""
        target = (self.hidden[span] @ self.head.T).to(logits.dtype)  # [rows, V]
        log_q = torch.log_softmax(target.div_(self.temperature), -1)
        log_p = torch.log_softmax(logits / self.temperature, -1)
        q = log_q.exp()
        terms = log_q.sub_(log_p).mul_(q).sum(-1, keepdim=True)
        self.divergence += terms.masked_fill(ignored, 0).sum(dtype=torch.float64)
        return log_p.exp_().sub_(q).mul_(self.weight * self.temperature)


class _LinearCrossEntropy(torch.autograd.Function):
    """Σ cross-entropy of softmax(h Wᵀ), computed in blocks of rows so that not all logits exist at once.

    The forward computes the gradients from each block's logits and the backward only scales them, so the
    logits are not computed again.
    """

    @staticmethod
    def forward(
        ctx,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        block: int,
        training: bool = True,
        z_loss: float = 0.0,
        teacher: Distillation | None = None,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=h.device)
        # needs_input_grad is True under no_grad too; `training` is the grad mode.
        need_h, need_w = (training and needed for needed in ctx.needs_input_grad[:2])
        dh = torch.empty_like(h) if need_h else None
        # The sum of dw over all blocks is in fp32 at least.
        wide = torch.promote_types(weight.dtype, torch.float32)
        dw = torch.zeros_like(weight, dtype=wide) if need_w else None
        for start in range(0, len(h), block):
            span = slice(start, start + block)
            # Ignored rows are zeroed: gathering the others would synchronise with the device.
            ignored = labels[span, None] == -100
            rows = h[span].masked_fill(ignored, 0)
            logits = rows @ weight.T  # [block, V]
            losses, dlogits = _block_loss(
                logits, labels[span], z_loss, need_h or need_w, teacher, span
            )
            total += losses
            if dlogits is None:
                continue
            dlogits = dlogits.to(rows.dtype)
            if dh is not None:
                torch.mm(dlogits, weight, out=dh[span]).masked_fill_(ignored, 0)
            if dw is None:
                continue
            if dw.dtype == rows.dtype:
                dw = dw.addmm_(dlogits.T, rows)
            elif rows.dtype == torch.float16:
                # A sum over the rows of a frequent word may exceed its range.
                dw = dw.add_(dlogits.T @ (rows / 64), alpha=64)
            else:
                dw = dw.add_(dlogits.T @ rows)
        ctx.save_for_backward(dh, dw)
        ctx.weight_dtype, ctx.block = weight.dtype, block
        return total.to(torch.float64 if h.dtype == torch.float64 else torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal: Tensor):
        dh, dw = ctx.saved_tensors
        dh = None if dh is None else _scaled(dh, dtotal, ctx.block)
        dw = None if dw is None else (dw * dtotal.to(dw.dtype)).to(ctx.weight_dtype)
        return dh, dw, None, None, None, None, None


def _block_loss(
    logits: Tensor,
    labels: Tensor,
    z_loss: float,
    training: bool,
    teacher: Distillation | None,
    span: slice,
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of a block's logits `[rows, V]`, which it may overwrite, and if training their gradient.

    Ignored rows have loss 0, and any gradient: their inputs are 0. span: the block's rows, for the teacher.
    """
    if teacher is None and not torch.compiler.is_compiling():
        losses = by_kernel("cross_entropy", "auto", logits, logits, labels, -100, z_loss, training)
        if losses is not None:
            return losses.sum(dtype=torch.float64), logits if training else None

    ignored = labels[:, None] == -100
    index = labels[:, None].masked_fill(ignored, 0)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # Read now: on a CPU log_softmax overwrites the logits.
    label = logits.gather(-1, index)
    pull = None if teacher is None else teacher.gradient(span, logits, ignored)

    # On a CPU in place: passes over memory cost it as much as products.
    log_p = torch.log_softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)
    log_p_label = log_p.gather(-1, index)
    loss = -log_p_label.masked_fill(ignored, 0).sum(dtype=torch.float64)
    if not training:
        return loss, None

    dlogits = log_p.exp_()  # softmax, in the memory of log_p
    if z_loss:  # the gradient of lse is the softmax
        # lse = logit − log p of the label, so d(z lse²) = 2 z lse · softmax.
        dlogits.mul_(1 + 2 * z_loss * (label - log_p_label))
    # Minus the one-hot label. Rows that are ignored are 0, so they add nothing to dw.
    dlogits.scatter_add_(-1, index, dlogits.new_full(index.shape, -1.0))
    if teacher is not None and pull is not None:
        dlogits.mul_(1 - teacher.weight).add_(pull.masked_fill_(ignored, 0))
    return loss, dlogits


def _scaled(x: Tensor, factor: Tensor, block: int) -> Tensor:
    """x times a number, in the dtype of x, but the number and the product have that of `factor`.

    A factor of 1/N that is rounded to bf16 is wrong by up to 0.4 %. Blocks bound the memory of copies.
    """
    scaled = torch.empty_like(x)

    for rows, into in zip(x.split(block), scaled.split(block), strict=True):
        torch.mul(rows, factor.view(1), out=into)  # a scalar tensor would take the dtype of x

    return scaled


def mean_over(total: Tensor, count: int | Tensor) -> Tensor:
    """total / count, or `total` where nothing was counted: 0/0 would make the gradients of all weights NaN.

    Raises ValueError if `count` is no number of labels.
    """
    if isinstance(count, Tensor):
        sound = count.numel() == 1 and count.dtype != torch.bool
        # A count on a device is not read, since that would wait for the device.
        if sound and count.device.type == "cpu" and not torch.compiler.is_compiling():
            sound = bool(count >= 0)
    else:
        sound = count >= 0 and not isinstance(count, bool)

    if not sound:
        raise ValueError(
            f"num_items_in_batch={count!r}: give the number of labels, one integer from 0 on"
        )
    if isinstance(count, Tensor):
        count = count.to(total.device).view(())

    return total / (count + (count == 0))


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float = 0.0,
    teacher: Distillation | None = None,
) -> Tensor:
    """Sum over rows of −log softmax(h Wᵀ)[label], without rows labelled −100.

    h `[M, D]`, weight `[V, D]`, labels int64 `[M]`. Returns a scalar in fp32 (fp64 for fp64 inputs).
    z_loss: adds the gradient of z_loss · Σ logsumexp(h Wᵀ)² (PaLM, arXiv 2204.02311). The value remains the
    cross-entropy, so that logged losses are comparable. teacher: of these rows, see `Distillation`.
    """
    if autocasts(h):
        dtype = torch.get_autocast_dtype(h.device.type)
        h, weight = h.to(dtype), weight.to(dtype)
    # Rows of a block: its logits are about as many numbers for every vocabulary.
    block = max(64, (2**22 if h.device.type == "cpu" else 2**26) // weight.shape[0])
    return _LinearCrossEntropy.apply(
        h, weight, labels, block, torch.is_grad_enabled(), z_loss, teacher
    )
