"""Recurrent states in fewer bytes: bfloat16, or 8 bits a number and a residual of 4.

Between two calls of a model a matrix S `[B, H, F, V]` is packed; a call unpacks it, and all its sums are in fp32.
Each head and value channel has a scale s, of its largest number over the features. A code c is in int8 (m = 127) or
e4m3 (m = 448). Its residual r has 4 bits, in fourteenths of u, the distance of the codes around c.

    s = max|S| / m,   x = S / s,   c = round(x),   r = round(14 (x − c) / u), from −7 to 7 in 4 bits

u is 1 for int8, and a power of two for e4m3. The next call starts from s (c + u r / 14). So the error of a rounding
comes back before the next one, and decays with the state. Without r errors would add up over the text.

The sum of keys is a value channel. A scale for each key would be that of the sum, which outgrows its neighbours.

Short convolutions, the keys and values of attention, and MALA's sum of values stay as they are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .feature_maps import FEATURE_MAPS
from .mixers import MIXERS, mixer_options
from .options import beyond, defaults

STATE_DTYPES = ("float32", "bfloat16", "int8", "fp8")
LARGEST = {"int8": 127, "fp8": 448}
"""The largest code c."""
TINY = torch.finfo(torch.float32).tiny
Pair = tuple[str, str | None]
"""A mixer and its map."""
MEASURED: dict[str, tuple[str | None, ...]] = {
    "deltanet": tuple(name for name in FEATURE_MAPS if name != "polapp"),
    "gated_deltanet": ("silu", "nala"),
    "kda": ("silu", "nala"),
    "gated_deltanet2": ("silu",),
    "delta_product": ("silu",),
    "linear_attention": ("elu1",),
    "nala": ("nala",),
    "mala": ("elu1",),
    "pola": ("pola",),
    "soft": ("softpp",),
    "retention": (None,),
    "gla": (None,),
    "mamba2": ("silu",),
    "norm_attention": ("elu1",),
}
"""Mixers, and the maps with which a text of 16 k tokens was read in each precision."""
NO_MATRIX = ("softmax", "forgetting", "diag_attention")
"""Mixers without a state to round."""
_IN_NONE: set[Pair] = {("mala", "elu1"), ("norm_attention", "elu1")}
LOSES: dict[str, set[Pair]] = {
    "bfloat16": {
        *_IN_NONE,
        ("linear_attention", "elu1"),
        ("nala", "nala"),
        ("soft", "softpp"),
        ("gated_deltanet", "nala"),
        ("deltanet", "angle"),
        ("deltanet", "soft"),
        ("deltanet", "softpp"),
    },
    "int8": {*_IN_NONE, ("pola", "pola")},
    "fp8": {
        *_IN_NONE,
        ("soft", "softpp"),
        ("deltanet", "angle"),
        ("deltanet", "soft"),
        ("deltanet", "elu1"),
        ("deltanet", "nala_learned"),
        ("deltanet", "silu_shifted"),
        ("deltanet", "softpp"),
    },
}
"""Those that lost more than 0.01 nats or a point of recall there. They are refused, as all that were not measured."""
UNROUNDED = ("num_v_heads", "gate_bias")
"""Options of mixers that set a number of heads, or the output gate alone, so that the measurements hold for them.
All others had their defaults there."""
MATRIX = "recurrent"
"""The state that is packed."""


def check_state_dtype(state_dtype: str | None, config: Any) -> None:
    """Raises ValueError for a precision that states of the config's mixers cannot have; None is fine."""
    if state_dtype not in (None, *STATE_DTYPES):
        raise ValueError(
            f"state_dtype {state_dtype!r} is unknown; choose one of {', '.join(STATE_DTYPES)}"
        )
    if state_dtype in (None, "float32"):
        return

    for mixer in dict.fromkeys(config.layer_mixers):
        if mixer in NO_MATRIX:
            continue
        feature_map = MIXERS[mixer].rule.map and (config.feature_map or MIXERS[mixer].rule.map)
        measured = feature_map in MEASURED.get(mixer, ())
        if not measured or (mixer, feature_map) in LOSES[state_dtype]:
            with_map = f" with feature_map {feature_map!r}" if feature_map else ""
            raise ValueError(
                f"state_dtype {state_dtype!r} was not measured to hold for mixer {mixer!r}{with_map}; "
                "take float32"
            )
        options = unmeasured_options(mixer, config)
        if options:
            raise ValueError(
                f"state_dtype {state_dtype!r} was measured for mixer {mixer!r} with its defaults, not with "
                f"{', '.join(options)}; take float32"
            )


def unmeasured_options(mixer: str, config: Any) -> list[str]:
    """The options of the mixer and of its map, as `name=value`, with which no precision was measured."""
    options = beyond(defaults(MIXERS[mixer]), mixer_options(mixer, config))
    options = {name: value for name, value in options.items() if name not in UNROUNDED}
    if MIXERS[mixer].rule.map:
        options |= config.feature_map_options  # without those at their defaults
    return [f"{name}={value!r}" for name, value in options.items() if value is not None]


def packed_spec(spec: dict[str, Any], state_dtype: str) -> dict[str, Any]:
    """A mixer's `state_spec`, as its tensors are in this precision."""
    if MATRIX not in spec or state_dtype == "float32":
        return spec
    heads, features, values = spec[MATRIX][0]
    if state_dtype == "bfloat16":
        return spec | {MATRIX: (spec[MATRIX][0], torch.bfloat16)}

    scale = ((heads, 1, values), torch.float32)
    codes = torch.int8 if state_dtype == "int8" else torch.uint8
    return spec | {
        MATRIX: ((heads, features, values), codes),
        f"{MATRIX}_scale": scale,
        f"{MATRIX}_residual": ((heads, -(-features // 2), values), torch.uint8),
    }


def pack_state(state: Any, state_dtype: str) -> Any:
    """A layer's state with its matrix in this precision. float32: as it is."""
    if state_dtype == "float32" or MATRIX not in state:
        return state
    S = state[MATRIX]
    if state_dtype == "bfloat16":
        return state | {MATRIX: S.bfloat16()}

    S = S.float()
    scale = S.abs().amax(-2, keepdim=True) / LARGEST[state_dtype]  # [B, H, 1, V]
    x = S / scale.clamp_min(TINY)
    if state_dtype == "int8":
        codes = x.round().to(torch.int8)
    else:
        # As bytes: not every operation on a cache knows the dtype.
        codes = x.to(torch.float8_e4m3fn).view(torch.uint8)

    values, distances = _decode(codes)
    residual = (14 * (x - values) / distances).round().to(torch.int8) + 8  # 1 to 15
    # Two in a byte: one of the first half of the features, one of the second.
    residual = F.pad(residual, (0, 0, 0, S.shape[-2] % 2)).view(torch.uint8)
    first, second = residual.chunk(2, -2)
    return state | {
        MATRIX: codes,
        f"{MATRIX}_scale": scale,
        f"{MATRIX}_residual": first | second << 4,
    }


def _decode(codes: Tensor) -> tuple[Tensor, Tensor | int]:
    """The numbers c of codes, and the distances u of those around them."""
    if codes.dtype == torch.int8:
        return codes.float(), 1
    # The bits of the exponent alone are the power of two below. Under 2^-6 the distance stays.
    powers = (codes & 0x78).view(torch.float8_e4m3fn).float().clamp_min(2**-6)
    return codes.view(torch.float8_e4m3fn).float(), powers / 8  # 3 bits follow the first


def unpack_state(state: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state that `pack_state` rounded, its matrix in fp32, or in the model's wider `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    S = state.get(MATRIX)
    if S is None or S.dtype == wide:
        return state
    if S.is_floating_point():
        return state | {MATRIX: S.to(wide)}

    both = state[f"{MATRIX}_residual"]
    residual = torch.cat([both & 15, both >> 4], -2)[..., : S.shape[-2], :].float() - 8
    values, distances = _decode(S)
    matrix = (values + residual * (distances / 14)) * state[f"{MATRIX}_scale"]
    others = {name: x for name, x in state.items() if not name.startswith(f"{MATRIX}_")}
    return others | {MATRIX: matrix.to(wide)}
