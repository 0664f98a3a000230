"""The second half of a block for the few rows of a decoded token, without gradients, in two launches.

For rows x, y `[D]`, a norm's weight w and matrices W_gate, W_up `[I, D]` and W_down `[D, I]`:

    s = x + y,    h = s / √(mean s² + ε) ⊙ w,    result = s + W_down (SiLU(W_gate h) ⊙ W_up h).

The time of a token is that of reading the matrices. So each program forms h itself, from rows that lie in the cache,
and reads its own rows of W_gate and W_up once. The second launch is torch's product with a sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.triton.common import FUSION, PRECISION, name_of
from nalanda_kernels.triton.tiles import DTYPES, load

MOST = 16  # rows, the least of a product on tensor cores
COLUMNS = 16  # of a program: a 340 M model has 176 programs, a few more than a card has processors


@triton.jit
def load_sum(x, y, r, c, rows, D, dtype: tl.constexpr):
    """s of rows r and columns c, rounded as it is stored."""
    m = (r < rows)[:, None] & (c < D)[None, :]
    at = r[:, None] * D + c[None, :]
    s = load(x + at, m) + load(y + at, m)
    return s.to(dtype).to(tl.float32), at, m


@triton.jit
def glu_kernel(
    x,
    y,
    weight,
    gate,
    up,
    total,
    out,
    gate_stride,
    up_stride,
    rows,
    N,
    eps,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PREC: tl.constexpr,
):
    """SiLU(W_gate h) ⊙ W_up h, columns of BN of N; the first program stores s."""
    r = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    dtype = total.dtype.element_ty

    square = tl.zeros([BM], tl.float32)
    for start in range(0, D, BD):
        s, at, m = load_sum(x, y, r, start + tl.arange(0, BD), rows, D, dtype)
        square += tl.sum(s * s, 1)
        tl.store(total + at, s.to(dtype), m & (tl.program_id(0) == 0))
    scale = tl.rsqrt(square / D + eps)[:, None]

    a = tl.zeros([BM, BN], tl.float32)
    b = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D, BD):
        c = start + tl.arange(0, BD)
        s, _, _ = load_sum(x, y, r, c, rows, D, dtype)
        w = load(weight + c, c < D)
        h = (s * scale * w[None, :]).to(dtype)  # [BM, BD]

        # Rows of the matrices [BN, BD]; int64, as a matrix may have more than 2³¹ entries.
        m = (n < N)[:, None] & (c < D)[None, :]
        row = n.to(tl.int64)[:, None]
        w_gate = tl.load(gate + row * gate_stride + c[None, :], m, other=0.0)
        w_up = tl.load(up + row * up_stride + c[None, :], m, other=0.0)
        a = tl.dot(h, tl.trans(w_gate), a, input_precision=PREC)
        b = tl.dot(h, tl.trans(w_up), b, input_precision=PREC)

    # Rounded as products and their epilogue are where each is a launch.
    a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    at = r[:, None] * N + n[None, :]
    m = (r < rows)[:, None] & (n < N)[None, :]
    tl.store(out + at, (a * tl.sigmoid(a) * b).to(dtype), m)


def glu_rows(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """s + W_down (SiLU(W_gate h) ⊙ W_up h), with s = x + y and h its norm; no gradient.

    x, y: `[…, D]`, at most 16 rows; weight: `[D]`; gate, up: `[I, D]`; down: `[D, I]`. Sums are fp32.

    Raises Unsupported for other dtypes than fp32, bf16 and fp16, for several dtypes, and for more rows.
    """
    D, N = x.shape[-1], len(gate)
    rows = x.numel() // max(D, 1)
    kinds = {z.dtype for z in (x, y, gate, up, down)}
    if len(kinds) > 1 or x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise Unsupported(" and ".join(sorted(map(name_of, kinds))) + " inputs")
    if not 0 < rows <= MOST or not N:
        raise Unsupported(f"{rows} rows of {N} features")

    x_, y_ = (z.reshape(rows, D).contiguous() for z in (x, y))
    gate, up = (z if z.stride(1) == 1 else z.contiguous() for z in (gate, up))
    total, hidden = torch.empty_like(x_), x_.new_empty(rows, N)
    narrow = x.dtype.itemsize == 2
    glu_kernel[(triton.cdiv(N, COLUMNS),)](
        x_,
        y_,
        weight.contiguous(),
        gate,
        up,
        total,
        hidden,
        gate.stride(0),
        up.stride(0),
        rows,
        N,
        eps,
        D=D,
        BM=MOST,
        BN=COLUMNS,
        BD=128 if narrow else 64,
        PREC=PRECISION,
        num_warps=4,
        num_stages=4,
        **FUSION,
    )
    return torch.addmm(total, hidden, down.T).view(x.shape)
