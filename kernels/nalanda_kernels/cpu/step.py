"""One token on a CPU: a mixer's rule between projections and o_proj, and products of few rows."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nalanda_kernels import Unsupported
from nalanda_kernels.cpu.build import library
from nalanda_kernels.cpu.feature_maps import DTYPES, Settings, settings_of
from nalanda_kernels.maps import describe
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
    if not serving or torch.is_autocast_enabled("cpu"):
        return None
    fields = describe_layer(token)
    if fields is None:
        return None

    # Refuses before the projections run.
    run = library()
    x = {name: _rows(name, y) for name, y in inputs().items()}
    filters = token.filters or {}
    # recurrent [N, HV, F, V (+ 1)], conv_q, conv_k and conv_v [N, W − 1, ·]
    old = {name: y.contiguous() for name, y in state.items()}
    new = token.out or {name: torch.empty_like(y) for name, y in old.items()}
    out = x["v"].new_empty(len(x["v"]), 1, token.num_v_heads, token.value_dim, dtype=token.dtype)
    if not _fits(token, x, old, new):
        return None

    fields |= {name: y.data_ptr() for name, y in x.items()}
    fields |= {f"{name}_stride": x[name].stride(0) for name in COLUMNS if name in x}
    for name in filters:
        fields[f"{name}_past"] = old[f"conv_{name}"].data_ptr()
        fields[f"{name}_moved"] = new[f"conv_{name}"].data_ptr()

    # A log-decay a head, or one a feature.
    decays = x.get("g" if token.decay is None else "a")
    N, HV = len(out), token.num_v_heads
    described = Step(
        N=N,
        G=0 if decays is None else decays.numel() // (N * HV),
        position_stride=int("positions" in x and len(x["positions"]) > 1),
        state=old["recurrent"].data_ptr(),
        new_state=new["recurrent"].data_ptr(),
        out=out.data_ptr(),
        wide_out=token.dtype != x["v"].dtype,
        **fields,
    )
    function = getattr(run, f"step_{DTYPES[x['v'].dtype]}")
    function(ctypes.byref(described), threads_for(old["recurrent"].numel(), N * token.num_heads))
    return out, new


def describe_layer(token: Token) -> dict[str, Any] | None:
    """The fields of `Step` that are the same for all tokens; None where the map is not described."""
    try:
        MAP, parameters = describe(token.feature_map, token.qk_norm, token.key_dim)
    except Unsupported:
        return None
    if any(x.shape != (token.num_heads, token.key_dim) for x in parameters):
        return None
    filters, (A_log, dt_bias) = token.filters or {}, token.decay or (None, None)
    weight, eps = token.norm or (None, 0.0)
    features = MAP.halves * token.key_dim
    # Of these the C++ keeps addresses: none may be a view with gaps.
    weights = {f"{name}_filter": y for name, y in filters.items()}
    weights |= {"A_log": A_log, "dt_bias": dt_bias, "norm": weight}
    weights |= dict(zip(("map_powers", "map_units"), parameters))  # noqa: B905 (a map may lack units)
    if any(x is not None and not x.is_contiguous() for x in weights.values()):
        return None
    return {
        **{name: None if x is None else x.data_ptr() for name, x in weights.items()},
        "H": token.num_heads,
        "HV": token.num_v_heads,
        "K": token.key_dim,
        "V": token.value_dim,
        "W": next((y.shape[-1] for y in filters.values()), 0),
        "steps": token.steps,
        "delta": token.delta,
        "denominator": token.denominator,
        "silu": token.silu,
        "sigmoid_gate": token.gate_activation == "sigmoid",
        "beta_scale": token.beta_scale,
        "scale": features**-0.5 if token.scale is None else token.scale,
        "eps": eps,
        "map_alpha": MAP.alpha,
        "query": settings_of(MAP, True),
        "key": settings_of(MAP, False),
    }


def _rows(name: str, x: Tensor) -> Tensor:
    """An input as the C++ reads it: columns of wider rows stay where they are."""
    apart = name in COLUMNS and x.dim() == 3 and x.stride(2) == 1
    return x if apart else x.contiguous()


def _fits(
    token: Token, x: dict[str, Tensor], old: dict[str, Tensor], new: dict[str, Tensor]
) -> bool:
    """Whether all tensors have the dtypes and shapes that the C++ reads."""
    dtype, filters = x["v"].dtype, token.filters or {}
    # In the model's dtype; sums, decays and the state are in fp32.
    narrow = [x[name] for name in COLUMNS if name in x]
    narrow += [*filters.values(), *(token.norm or ())[:1]]
    narrow += [states[f"conv_{name}"] for states in (old, new) for name in filters]
    wide = [new["recurrent"], *(token.decay or ()), *([x["g"]] if "g" in x else ())]
    if dtype not in DTYPES or token.dtype not in (dtype, torch.float32):
        return False
    if any(y.dtype != dtype for y in narrow) or any(y.dtype != torch.float32 for y in wide):
        return False
    shape = old["recurrent"].shape
    columns = token.value_dim + token.denominator
    return shape[:2] == (len(x["v"]), token.num_v_heads) and shape[3] == columns


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
