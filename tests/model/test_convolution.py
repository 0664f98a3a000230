"""The short convolution is torch's conv1d, with states and packed documents."""

import torch
import torch.nn.functional as F
from tiny_models import close

from nalanda.model.sequences import Sequences


def test_convolution_is_conv1d():
    from nalanda.model.layers import ShortConv

    conv, cu = ShortConv(6, 4).double(), torch.tensor([0, 2, 2, 7, 9])
    torch.nn.init.normal_(conv.weight)
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight, groups=6).transpose(1, 2)
    close(conv(x, Sequences())[0], expected)
    long = torch.randn(1, 600, 6, dtype=torch.float64, requires_grad=True)
    padded = F.pad(long.transpose(1, 2), (3, 0))
    whole = F.conv1d(padded, conv.weight, groups=6).transpose(1, 2)
    leaves, weights = (long, conv.weight), torch.randn_like(whole)
    ours, theirs = (
        torch.autograd.grad(y, leaves, weights) for y in (conv(long, Sequences())[0], whole)
    )
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other)

    def run(weight, x, state, cu):
        return torch.func.functional_call(conv, {"weight": weight}, (x, Sequences(cu), state, True))

    assert torch.autograd.gradcheck(run, (conv.weight, x, state[:2], None))
    assert torch.autograd.gradcheck(run, (conv.weight, x[:1], state, cu))
