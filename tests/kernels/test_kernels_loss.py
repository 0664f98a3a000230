"""The cross-entropy of logits in place, against float64, and the head's loss by it."""

from kernel_device import DEVICE  # isort: skip  (before any kernel)

import nalanda_kernels
import pytest
import torch
import torch.nn.functional as F
from nalanda_kernels import Unsupported
from nalanda_kernels.triton.loss import cross_entropy

from nalanda.model.loss import linear_cross_entropy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
IGNORED = -100


def draw(rows: int, V: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with large entries, and labels; the first label is ignored."""
    generator = torch.Generator().manual_seed(V)
    logits = (5 * torch.randn(rows, V, generator=generator)).to(dtype)
    labels = torch.randint(V, (rows,), generator=generator)
    labels[0] = IGNORED
    return logits, labels


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("V", "z_loss"), [(7, 0.0), (5000, 1e-2)])
def test_losses_and_gradients(V, z_loss, dtype):
    logits, labels = draw(5, V, dtype)
    mine = torch.cat([logits, logits], 1).to(DEVICE)[:, :V]  # rows that are apart
    losses = cross_entropy(mine, labels.to(DEVICE), IGNORED, z_loss, gradient=True)

    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORED)
    squares = z_loss * wide[labels != IGNORED].logsumexp(-1).square().sum()
    (expected.sum() + squares).backward()
    torch.testing.assert_close(losses.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert (mine.cpu().double() - wide.grad).abs().max() <= TOLERANCE[dtype] * (1 + 20 * z_loss)


def test_without_gradient_the_logits_stay():
    logits, labels = (x.to(DEVICE) for x in draw(3, 40, torch.bfloat16))
    before = logits.clone()
    cross_entropy(logits, labels, IGNORED, 0.0, gradient=False)
    assert torch.equal(logits, before)


def test_a_label_that_is_no_column_gives_nan():
    logits, labels = (x.to(DEVICE) for x in draw(3, 40, torch.float32))
    labels[1] = 40
    losses = cross_entropy(logits, labels, IGNORED, 0.0, gradient=True)
    assert losses.isnan().tolist() == [False, True, False]


def test_refuses_float64():
    logits, labels = draw(3, 40, torch.float64)
    with pytest.raises(Unsupported, match="float64 logits"):
        cross_entropy(logits.to(DEVICE), labels.to(DEVICE), IGNORED, 0.0, gradient=True)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_the_loss_of_a_head(z_loss):
    generator = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(n, 16, generator=generator).to(DEVICE) for n in (70, 50))
    _, labels = draw(70, 50, torch.float32)
    results = []
    for backend in ("torch", "triton"):
        leaves = [x.clone().requires_grad_() for x in (h, weight)]
        with nalanda_kernels.use_backend(backend):
            loss = linear_cross_entropy(*leaves, labels.to(DEVICE), z_loss=z_loss)
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
