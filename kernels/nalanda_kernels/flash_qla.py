"""The gated delta rule on FlashQLA's kernels (TileLang), with the contract of `nalanda.model.ops`.

They serve heads of 128 keys and 128 values in 16 bits, with a decay, on Hopper and Blackwell.
"""

from typing import Any

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.fla import Call, foreign_options, map_call, refuse_channels, refuse_negative
from nalanda_kernels.triton.common import architecture, name_of, without_autocast

WIDTH = 128  # of keys after their map, and of values
CARDS = ("sm_90", "sm_100", "sm_103")  # others lack the backward


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`nalanda.ops.delta_rule` by `chunk_gated_delta_rule`. options: the other fields of `Call`.

    Parts of a long sequence run in parallel. A part forgets what decayed by e⁻¹⁰ before it begins, 5e-5 of a
    state, which bf16 rounds by 4e-3. chunk_size is ignored.

    Raises:
        Unsupported: no decay, gates by channel, β above 1, other widths than 128, precision above 16 bits,
            an empty sequence, another card, or torch.compile, whose graph its call would break.
    """
    if torch.compiler.is_compiling():
        raise Unsupported("torch.compile: its call would break the graph")
    if architecture() not in CARDS:
        raise Unsupported(f"{architecture()}: it needs one of {', '.join(CARDS)}")
    if g is None:
        raise Unsupported("a delta rule without a decay")
    call = Call(q, k, v, beta, g, **options)
    refuse_channels(call)
    refuse_negative(call)

    dtype = torch.promote_types(q.dtype, v.dtype)
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"{name_of(dtype)} inputs: it computes in 16 bits")

    # Asked of the map, so that a refused call maps nothing.
    features = getattr(call.feature_map, "feature_dim", q.shape[3])
    if (features, v.shape[3]) != (WIDTH, WIDTH):
        raise Unsupported(f"K = {features} and V = {v.shape[3]}: both must be {WIDTH}")
    bounds = call.cu_seqlens
    lengths = torch.tensor([q.shape[1]]) if bounds is None else bounds.diff()
    if 0 in (*q.shape, *v.shape) or bool((lengths == 0).any()):
        raise Unsupported("an empty sequence")
    from flash_qla import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

    with without_autocast(q):
        if not call.normed_inside:
            call = map_call(call)
        foreign = foreign_options(call) | {"use_qk_l2norm_in_kernel": call.normed_inside}
        # FlashQLA's function lacks this argument.
        foreign.pop("cu_seqlens_cpu", None)

        q, k, values = call.q.to(dtype), call.k.to(dtype), v.to(dtype)
        o, state = chunk_gated_delta_rule(q, k, values, g.float(), beta, **foreign)
    return o.to(v.dtype), state if call.output_final_state else None
