"""One token on a CPU: a mixer's rule between projections and o_proj, and products of few rows."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.feature_maps import DTYPES, Settings, settings_of
from nalanda_kernels.maps import Map, describe
from nalanda_kernels.one_token import Token

ROWS = {torch.float32: 8, torch.bfloat16: 4}  # of a product; more are faster in torch
COLUMNS = ("q", "k", "v", "b", "w", "a", "gate")  # inputs that may be columns of wider rows
ENTRIES_A_THREAD = 32768  # of a matrix; for fewer a thread costs more than it gains


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Step(ctypes.Structure):
    """A token of a layer, as step.h reads it."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "q k v b w a gate"),
        *_fields(ctypes.c_int64, " ".join(f"{name}_stride" for name in COLUMNS)),
        *_fields(ctypes.c_void_p, "g positions q_filter k_filter v_filter q_past k_past v_past"),
        *_fields(ctypes.c_void_p, "q_moved k_moved v_moved A_log dt_bias map_powers map_units"),
        *_fields(ctypes.c_void_p, "norm state new_state out"),
        *_fields(ctypes.c_int32, "N H HV K V W G steps delta denominator silu sigmoid_gate"),
        *_fields(ctypes.c_int32, "wide_out position_stride"),
        *_fields(ctypes.c_float, "beta_scale scale eps map_alpha"),
        *_fields(Settings, "query key"),
    )


def step(
    inputs: Callable[[], dict[str, Tensor]], state: dict[str, Tensor], **options: Any
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """As `nalanda_kernels.triton.step.step`, for fp32 and bf16. The new state may have the memory of the old one.

    None for other dtypes and for maps that `describe` does not know: torch computes these. Raises Unsupported where
    the library cannot be built.
    """
    token = Token(**options)
    serving = token.dtype in DTYPES and state["recurrent"].dtype == torch.float32
    mapped = describe_map(token)
    if not serving or mapped is None or torch.is_autocast_enabled("cpu"):
        return None

    # Refuses before the projections run.
    run = library()
    x = {name: _rows(name, y) for name, y in inputs().items()}
    # recurrent [N, HV, F, V (+ 1)], conv_q, conv_k and conv_v [N, W − 1, ·]
    old = {name: y.contiguous() for name, y in state.items()}
    new = token.out or {name: torch.empty_like(y) for name, y in old.items()}
    out = x["v"].new_empty(len(x["v"]), 1, token.num_v_heads, token.value_dim, dtype=token.dtype)
    described = describe_step(token, mapped, x, old, new, out)
    if described is None:
        return None
    threads = threads_for(old["recurrent"].numel(), len(out) * token.num_heads)
    getattr(run, f"step_{DTYPES[x['v'].dtype]}")(ctypes.byref(described), threads)
    return out, new


def describe_map(token: Token) -> tuple[Map, tuple[Tensor, ...]] | None:
    """The token's map and its parameters; None for one that `describe` does not know."""
    try:
        MAP, parameters = describe(token.feature_map, token.qk_norm, token.key_dim)
    except Unsupported:
        return None
    fit = all(x.shape == (token.num_heads, token.key_dim) for x in parameters)
    return (MAP, parameters) if fit else None


def describe_step(
    token: Token,
    mapped: tuple[Map, tuple[Tensor, ...]],
    x: dict[str, Tensor],
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    out: Tensor,
) -> Step | None:
    """A token for the C++, with the addresses of all tensors; None where it cannot read one of them.

    mapped: of `describe_map`. x: the rule's inputs with N rows each. old, new: the state before and after, which may
    be the same.
    """
    MAP, parameters = mapped
    N, H, HV, n = len(out), token.num_heads, token.num_v_heads, token.steps
    K, V = token.key_dim, token.value_dim
    F, dtype, filters = MAP.halves * K, x["v"].dtype, token.filters or {}
    # A log-decay a head, or one a feature.
    decays = x.get("g" if token.decay is None else "a")
    G = 0 if decays is None else decays.numel() // (N * HV)

    # In the model's dtype; sums, decays and the recurrent state are in fp32.
    narrow = {name: x[name] for name in COLUMNS if name in x}
    narrow |= {f"{name}_filter": y for name, y in filters.items()}
    narrow |= {f"{name}_past": old[f"conv_{name}"] for name in filters}
    narrow |= {f"{name}_moved": new[f"conv_{name}"] for name in filters}
    weight, eps = token.norm or (None, 0.0)
    narrow |= {} if weight is None else {"norm": weight}
    wide = {"state": old["recurrent"], "new_state": new["recurrent"]}
    wide |= dict(zip(("A_log", "dt_bias"), token.decay or ()))  # noqa: B905 (there may be no decay)
    wide |= dict(zip(("map_powers", "map_units"), parameters))  # noqa: B905 (a map may lack units)
    wide |= {"g": x["g"]} if "g" in x else {}

    # Entries of a row.
    sizes = {"q": H * K, "k": n * H * K, "v": n * HV * V, "w": n * HV * V, "gate": HV * V}
    sizes |= {"b": n * HV * (F if "w" in x else 1), "a": HV * G, "g": HV * G}
    fit = all(x[name].numel() == N * size for name, size in sizes.items() if name in x)
    fit &= old["recurrent"].shape == (N, HV, F, V + token.denominator) and G in (0, 1, F)
    fit &= dtype in DTYPES and all(y.dtype == dtype for y in narrow.values())
    fit &= all(y.dtype == torch.float32 and y.is_contiguous() for y in wide.values())
    others = (y for name, y in narrow.items() if name not in COLUMNS)
    if not fit or not all(y.is_contiguous() for y in others):
        return None

    addresses = {name: y.data_ptr() for name, y in (narrow | wide).items()}
    if token.denominator:
        addresses["positions"] = x["positions"].data_ptr()
    return Step(
        **addresses,
        **{f"{name}_stride": x[name].stride(0) for name in COLUMNS if name in x},
        position_stride=int(token.denominator and len(x["positions"]) > 1),
        out=out.data_ptr(),
        wide_out=out.dtype != dtype,
        N=N,
        H=H,
        HV=HV,
        K=K,
        V=V,
        W=next((y.shape[-1] for y in filters.values()), 0),
        G=G,
        # the rule
        steps=n,
        delta=token.delta,
        denominator=token.denominator,
        silu=token.silu,
        sigmoid_gate=token.gate_activation == "sigmoid",
        beta_scale=token.beta_scale,
        scale=F**-0.5 if token.scale is None else token.scale,
        eps=eps,
        map_alpha=MAP.alpha,
        query=settings_of(MAP, True),
        key=settings_of(MAP, False),
    )


def _rows(name: str, x: Tensor) -> Tensor:
    """An input as the C++ reads it: columns of wider rows stay where they are."""
    apart = name in COLUMNS and x.dim() == 3 and x.stride(2) == 1
    return x if apart else x.contiguous()


def threads_for(entries: int, units: int) -> int:
    """Threads for a matrix of as many entries, in as many units that no two threads share."""
    return max(1, min(torch.get_num_threads(), units, entries // ENTRIES_A_THREAD))


def linear_rows(x: Tensor, weight: Tensor) -> Tensor | None:
    """x Wᵀ for x `[…, K]` of few rows, with sums in fp32; None for more rows or other dtypes."""
    M, K = weight.shape
    N = x.numel() // K
    if weight.dtype != x.dtype or not 0 < N <= ROWS.get(x.dtype, 0):
        return None
    if not (weight.is_cpu and weight.is_contiguous()):
        return None
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], M)
    run = getattr(library(), f"linear_{DTYPES[x.dtype]}")
    run(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, y)),
        N,
        K,
        M,
        threads_for(M * K, M),
    )
    return y
