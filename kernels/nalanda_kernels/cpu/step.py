"""One token on a CPU: a mixer's rule between projections and o_proj, and products of few rows."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.feature_maps import DTYPES, settings_of
from nalanda_kernels.cpu.structures import FP32, Operation, Step
from nalanda_kernels.maps import describe
from nalanda_kernels.one_token import Token
from nalanda_kernels.tensors import threads

# Rows of a product, by the dtype of its weights; more are faster in torch.
ROWS = {torch.float32: 8, torch.bfloat16: 4, torch.int8: 2**31}
KINDS = ("product", "step", "norm", "wide_norm", "swiglu")
SCORES = (None, "softmax", "relu")
ACTIVATIONS = ("silu", "sigmoid", "plain")
# Tokens of all sequences that one program reads at once; more are faster by chunks.
PIECE = {torch.float32: 24, torch.bfloat16: 12, torch.int8: 64}
ENTRIES_A_THREAD = 32768  # of a matrix; for fewer a thread costs more than it gains


def step(
    inputs: Callable[[], dict[str, Tensor]], state: dict[str, Tensor], **options: Any
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """As `nalanda_kernels.triton.step.step`, for fp32 and bf16. The new state may have the memory of the old one.

    None for other dtypes and for maps that `describe` does not know: torch computes these. Raises Unsupported where
    the library cannot be built.
    """
    token = Token(**options)
    # A norm over all heads asks for fp32 in any model.
    dtypes = {token.dtype, state["recurrent"].dtype}
    if not dtypes <= DTYPES or torch.is_autocast_enabled("cpu"):
        return None

    library()  # refuses before the projections run
    try:
        describe(token.feature_map, token.qk_norm, token.key_dim)
    except Unsupported:
        return None
    # [N, 1, ·]: columns of one product, copied into rows of their own
    x = {name: y.contiguous() for name, y in inputs().items()}
    if token.denominator:
        x["positions"] = x["positions"].expand(len(x["v"]), 1).contiguous()
    # recurrent [N, HV, F, V (+ 1)], conv_q, conv_k and conv_v [N, W − 1, ·]
    old = {name: y.contiguous() for name, y in state.items()}
    new = token.out or {name: torch.empty_like(y) for name, y in old.items()}
    out = x["v"].new_empty(len(x["v"]), 1, token.num_v_heads, token.value_dim, dtype=token.dtype)
    try:
        described = describe_step(token, x, old, new, out)
    except Unsupported:
        return None
    count = threads_for(old["recurrent"].numel(), len(out) * token.num_heads)
    run_operation(x["v"].dtype, count, "step", step=ctypes.addressof(described))
    return out, new


def run_operation(dtype: torch.dtype, count: int, kind: str, **fields: int) -> None:
    """Runs one operation by `count` threads."""
    operation = Operation(kind=KINDS.index(kind), **fields)
    library().run_token(dtype == torch.bfloat16, ctypes.byref(operation), 1, count)


def describe_step(
    token: Token,
    x: dict[str, Any],
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    out: Tensor,
    tokens: int = 1,
) -> Step:
    """A token for the C++, with the addresses of all tensors. Raises Unsupported where it cannot read one of them.

    x: the rule's inputs with a row a token, and other fields of `Step`. old, new: the state before and after, which
    may be the same. tokens: of each sequence, at most.
    """
    MAP, parameters = describe(token.feature_map, token.qk_norm, token.key_dim)
    rows, H, HV, n = len(out), token.num_heads, token.num_v_heads, token.steps
    N = rows // tokens
    K, V, HK, heads = token.key_dim, token.value_dim, min(H, HV), max(H, HV)
    F, dtype, filters = MAP.halves * K, x["v"].dtype, token.filters or {}

    # Tensors by their field.
    tensors = {name: y for name, y in x.items() if isinstance(y, Tensor)}
    for name, weight in filters.items():
        tensors[f"{name}_filter"] = weight
        tensors[f"{name}_past"], tensors[f"{name}_moved"] = (s[f"conv_{name}"] for s in (old, new))
    for field, name in (("state", "recurrent"), ("sum", "value_sum")):
        if name in old:
            tensors[field], tensors[f"new_{field}"] = old[name], new[name]
    tensors |= dict(zip(("A_log", "dt_bias"), token.decay or ()))  # noqa: B905 (there may be no decay)
    tensors |= dict(zip(("map_powers", "map_units"), parameters))  # noqa: B905 (a map may lack units)
    weight, eps = token.norm or (None, 0.0)
    if weight is not None:
        tensors["norm"] = weight

    # Entries of a row: a log-decay a head or one a feature, and a gate a head or one a value.
    decays, gate = (
        0 if y is None else y.numel() // rows for y in (x.get("g", x.get("a")), x.get("gate"))
    )
    G, gate_width = decays // HV, gate // heads
    sizes = {"q": H * K, "k": n * HK * K, "v": n * HV * V, "w": n * HV * V}
    sizes |= {"b": n * HV * (F if "w" in x else 1), "a": HV * G, "g": HV * G}
    sizes |= {"gate": heads * gate_width}
    counts = {name: rows * size for name, size in sizes.items()}
    counts |= {"state": N * HV * F * (V + token.denominator), "sum": N * HV * V}
    fit = all(tensors[name].numel() == count for name, count in counts.items() if name in tensors)
    fit &= all(y.shape == (H, K) for y in parameters)
    fit &= G in (0, 1, F) and gate_width in (0, 1, V) and dtype in DTYPES
    # The C++ reads rows without gaps: a stride would go unseen.
    for name, y in tensors.items():
        wanted = torch.float32 if name in FP32 else dtype
        fit &= y.dtype == (torch.int64 if name in ("positions", "written") else wanted)
        fit &= y.is_contiguous()
    if not fit:
        raise Unsupported("a layer's shapes or precisions")

    widths = {name: weight.shape[-1] for name, weight in filters.items()}
    fields = {name: y.data_ptr() for name, y in tensors.items()} | {
        "out": out.data_ptr(),
        "wide_out": out.dtype != dtype,
        **{"N": N, "tokens": tokens, "steps": n, "gate_width": gate_width},
        **{"H": H, "HV": HV, "K": K, "V": V, "G": G},
        "W": widths.get("v", 0),
        "local_width": widths.get("local", 0),
        "local_copies": len(filters.get("local", ())) < HV * V,
        "pairs": len(x.get("frequencies", ())),
        # the rule
        **{name: getattr(token, name) for name in ("delta", "denominator", "silu", "beta_scale")},
        "scores": SCORES.index(x.get("scores")),
        "activation": ACTIVATIONS.index(token.gate_activation),
        "scale": F**-0.5 if token.scale is None else token.scale,
        "eps": eps,
        "map_alpha": MAP.alpha,
        "query": settings_of(MAP, True),
        "key": settings_of(MAP, False),
    }
    return Step(**fields | {name: y for name, y in x.items() if isinstance(y, int | float)})


def threads_for(entries: int, units: int) -> int:
    """Threads for a matrix of as many entries, in as many units that no two threads share."""
    return threads(min(units, entries // ENTRIES_A_THREAD))


def linear_rows(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor | None:
    """x Wᵀ for x `[…, K]` of few rows, with sums in fp32; None for more rows or other dtypes.

    scale: `[M]`, for W in int8, whose rows it multiplies. bias: `[M]`.
    """
    M, K = weight.shape
    if not K or x.shape[-1] != K:
        return None
    N = x.numel() // K
    codes = torch.int8 if scale is not None else x.dtype
    others = [y for y in (scale, bias) if y is not None]
    fit = x.dtype in DTYPES and weight.dtype == codes and 0 < N <= ROWS.get(codes, 0)
    fit &= all(y.dtype == x.dtype for y in others)
    if not (fit and all(y.is_cpu and y.is_contiguous() for y in (weight, *others))):
        return None
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], M)
    run_operation(
        x.dtype,
        threads_for(M * K, M),
        "product",
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=0 if scale is None else scale.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        N=N,
        K=K,
        M=M,
    )
    return y
