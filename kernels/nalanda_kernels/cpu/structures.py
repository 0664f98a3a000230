"""The structures that Python fills and C++ reads, once: ctypes' fields and the C++ declarations are made of one table.

T is the model's dtype, N the sequences, H the heads of q, HV those of v, F features, W taps, G log-decays a head.
"""

import ctypes

SPAN = 256  # rows of a norm whose sums of dweight are one row
MOST_TAPS = 8  # of a short convolution
ARRAY = (
    # rows of bf16 (narrow) or fp32, so many entries apart; null for none
    ("void*", "data"),
    ("int64_t", "stride"),
    ("int32_t", "narrow"),
)
SETTINGS = (
    ("int32_t", "name angle l2 query"),
    # exponent: 0 for p(n)
    ("float", "alpha power n_scale scale exponent"),
)
STEP = (
    # as projected, [N·tokens, ·] of T
    ("const void*", "q k v b w a gate"),
    # of convolutions, [·, W] of T
    ("const void*", "q_filter k_filter v_filter local_filter"),
    # their last inputs, [N, W − 1, ·] of T; the same after this token, which may be the same memory
    ("const void*", "q_past k_past v_past local_past"),
    ("void*", "q_moved k_moved v_moved local_moved"),
    # weights of norms, [K], [K] and [V] of T
    ("const void*", "q_norm k_norm norm"),
    # of attention, [N, HV, room, K or V] of T
    ("void*", "k_rows v_rows"),
    # log-decays [N·tokens, HV·G]; parameters of decays [HV], [HV·G], and of Mamba 2's skip [HV]
    ("const float*", "g A_log dt_bias skip"),
    # of Pola, [H, K]
    ("const float*", "map_powers map_units"),
    # of a rotation, [pairs]; the normal of a reflection, [F]
    ("const float*", "frequencies mirror"),
    # [N, HV, F, V (+ 1)], and Σv [N, HV, V]; the same after this token, which may be the same memory
    ("const float*", "state sum"),
    ("float*", "new_state new_sum"),
    # tokens before this one [N]; rows written behind the `used` ones
    ("const int64_t*", "positions written"),
    # [N·tokens, heads of o, V], of T or fp32
    ("void*", "out"),
    # tokens: of each sequence, each a row of inputs; G: 0, 1 or F
    ("int32_t", "N tokens H HV K V W G steps"),
    ("int32_t", "pairs local_width local_copies k_room v_room used reach blocks"),
    ("int32_t", "delta denominator silu wide_out unit_queries swapped by_count"),
    ("int32_t", "scores activation gate_width gate_first"),
    ("float", "beta_scale scale eps map_alpha magnitude temperature"),
    ("Settings", "query key"),
)
OPERATION = (
    # arrays of T with N rows, but for x of a wide norm, in fp32, and a weight with scales of its rows, in int8
    ("const void*", "x weight scale bias added step"),
    ("void*", "y"),
    # waits: all threads wait behind it for each other
    ("int32_t", "kind N K M waits"),
    # ε of a norm, below its root; M: behind the root
    ("float", "number"),
)


KINDS: dict[str, type] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
}


def fields(table: tuple[tuple[str, str], ...]) -> list[tuple[str, type]]:
    """A table as ctypes has it. An address is one whatever lies there."""
    return [
        (name, KINDS.get(kind, ctypes.c_void_p)) for kind, names in table for name in names.split()
    ]


class Array(ctypes.Structure):
    """A tensor of two dimensions."""

    _fields_ = fields(ARRAY)


class Settings(ctypes.Structure):
    """A map of queries or of keys."""

    _fields_ = fields(SETTINGS)


KINDS["Settings"] = Settings


class Step(ctypes.Structure):
    """A token of a layer. Addresses are null for what a mixer lacks."""

    _fields_ = fields(STEP)


class Operation(ctypes.Structure):
    """An operation of a token of all layers."""

    _fields_ = fields(OPERATION)


FP32 = {
    name for kind, names in STEP for name in names.split() if kind in ("const float*", "float*")
}
"""Fields with tensors in fp32 beside any model."""


def header() -> str:
    """The declarations. They do not compile where C++ lays a structure out in another way than ctypes."""
    lines = ["#pragma once", "#include <cstdint>"]
    lines += [f"constexpr int SPAN = {SPAN}, MOST_TAPS = {MOST_TAPS};"]
    structures = ((Array, ARRAY), (Settings, SETTINGS), (Step, STEP), (Operation, OPERATION))
    for structure, table in structures:
        # `Step` has functions too: step.h adds them.
        name = "StepFields" if structure is Step else structure.__name__
        lines.append(f"struct {name} {{")
        lines += [f"    {kind} {field};" for kind, names in table for field in names.split()]
        lines += ["};", f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});"]
    return "\n".join([*lines, ""])
