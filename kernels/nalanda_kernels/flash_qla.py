"""The gated delta rule on FlashQLA's kernels (TileLang), with the contract of `nalanda.model.ops`.

They serve heads of 128 keys and 128 values in 16 bits, with a decay, on Hopper and Blackwell.
"""

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.fla import features_of, no_channels, no_negative, options_of
from nalanda_kernels.triton.common import architecture, name_of, without_autocast

WIDTH = 128  # of keys after their map, and of values
CARDS = ("sm_90", "sm_100", "sm_103")  # others lack the backward


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    feature_map=None,
    qk_norm: str | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """`nalanda.ops.delta_rule` by `chunk_gated_delta_rule`; shapes as in `nalanda_kernels.fla.delta_rule`.

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
    no_channels(g, erase, write)
    no_negative(allow_neg_eigval)

    dtype = torch.promote_types(q.dtype, v.dtype)
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"{name_of(dtype)} inputs: it computes in 16 bits")

    # Asked of the map, so that a refused call maps nothing.
    features = getattr(feature_map, "feature_dim", q.shape[3])
    if (features, v.shape[3]) != (WIDTH, WIDTH):
        raise Unsupported(f"K = {features} and V = {v.shape[3]}: both must be {WIDTH}")
    lengths = torch.tensor([q.shape[1]]) if cu_seqlens is None else cu_seqlens.diff()
    if 0 in (*q.shape, *v.shape) or bool((lengths == 0).any()):
        raise Unsupported("an empty sequence")
    from flash_qla import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

    # Their norm is the same formula in fp32, with one cast.
    normed_inside = feature_map is None and qk_norm == "l2"
    with without_autocast(q):
        if not normed_inside:
            q, k = features_of(q, k, feature_map, qk_norm)
        options = options_of(q, v, scale, initial_state, output_final_state, cu_seqlens)
        # FlashQLA's function lacks this argument.
        options.pop("cu_seqlens_cpu", None)

        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        o, state = chunk_gated_delta_rule(
            q, k, values, g.float(), beta, use_qk_l2norm_in_kernel=normed_inside, **options
        )
    return o.to(v.dtype), state if output_final_state else None
