"""One token of generation: a layer between its projections and o_proj, in one kernel.

With one token an operator costs as much as its launch, on a CPU too. Kernels take a layer's `Rule` and weights as
keywords, the fields of `nalanda_kernels.one_token`. Where none serves, the layer takes its three steps.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .call import Inputs
from .kernels import by_kernel, has_kernel
from .layers import LayerNorm, RMSNorm, altered, overrides, rotary_frequencies
from .projections import apply_linear, matrix_of
from .recurrent import LayerState
from .sequences import Sequences

MOST_READ = 2**20
"""Sequences of a token times entries of a second matrix, up to which the step's kernel multiplies by it."""


def is_described(layer: Any) -> bool:
    """Whether `step_fields` says all that a layer computes between its projections and o_proj."""
    rule = layer.rule
    if not layer.follows_rule or rule.shared_qk or rule.norm_write or rule.norm_read:
        return False
    if rule.write == "rows" and rule.decay != "none":
        return False
    # A kernel reads the norm's weight, which an adapter around the norm does not have.
    if rule.norm == "head" and not isinstance(layer.o_norm, RMSNorm):
        return False
    # It reads decays and convolutions too. Maps say themselves what computes them.
    parts = [x for name, x in layer.named_children() if name != "feature_map"]
    return not any(map(overrides, (layer, *parts)))


def decay_of(layer: Any) -> tuple[Tensor, Tensor] | None:
    """(A_log `[HV]`, dt_bias) of a layer whose decay is exp(−exp(A_log)·softplus(a + dt_bias)); None for others."""
    if layer.rule.decay not in ("head", "channel", "dt"):
        return None
    decay = layer.discretization if layer.rule.decay == "dt" else layer.decay
    return decay.A_log, decay.dt_bias


def filters_of(layer: Any) -> dict[str, Tensor]:
    """The short convolutions' filters, `[·, W]` or `[·, 1, W]`: of q, k and v, and `local`, of v in the output."""
    convs = layer.rule.projected if layer.rule.conv else ()
    filters = {name: getattr(layer, f"{name}_conv1d").weight for name in convs}
    return filters | ({"local": layer.dwc.weight} if layer.rule.value_conv else {})


def step_fields(layer: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel `step` reads of a layer that follows its rule; `inputs` have its rotations.

    dtype: of the output.
    """
    rule = layer.rule
    return {
        "dtype": dtype,
        "key_dim": layer.K,
        # Each half of Pola's v is a head, as in `mix`.
        "value_dim": layer.V // rule.streams,
        "num_heads": layer.num_heads,
        "num_v_heads": layer.num_v_heads * rule.streams,
        "steps": rule.steps,
        "delta": rule.write == "delta",
        "beta_scale": rule.beta_scale,
        "decay": decay_of(layer),
        "feature_map": None if rule.map is None else layer.feature_map,
        "qk_norm": "l2" if rule.qk_norm == "l2" else None,
        "scale": rule.scale,
        "denominator": rule.read != "plain",
        "silu": rule.silu_before_write,
        "filters": filters_of(layer) or None,
        "norm": (layer.o_norm.weight, layer.o_norm.eps) if rule.norm == "head" else None,
        "gate_activation": rule.gate,
    }


def kernel_token(layer: Any, dtype: torch.dtype) -> dict[str, Any] | None:
    """`step_fields` with norms, rotations and readouts, for `fused_step` and C++; None for layers of other rules."""
    rule = layer.rule
    if not is_described(layer):
        return None
    fields = step_fields(layer, dtype)
    fields["gate_first"] = rule.gate_before != "o_proj"
    if rule.write == "rows":
        return fields | layer.token_fields()

    if rule.decay == "retention":
        fields["decay_kind"] = "retention"
        fields["frequencies"] = rotary_frequencies(layer.K, rule.theta, layer.o_proj.weight.device)
    elif rule.decay == "sigmoid":
        fields |= {"decay_kind": "sigmoid", "temperature": rule.temperature}
    elif rule.decay == "dt":
        fields["skip"] = layer.discretization.D
    if rule.read == "mala":
        fields["magnitude"] = layer.K**-0.5 if rule.magnitude == "code" else 1.0
        fields["by_count"] = rule.magnitude != "literal"
    elif rule.read == "pola":
        fields["swapped"] = True
    if rule.rotate == "lrpe":
        fields |= layer.lrpe.token_fields()
    return fields


def decode_token(
    layer: Any, x: Tensor, seq: Sequences, state: LayerState
) -> tuple[Tensor, LayerState] | None:
    """`Mixer.forward` for one token of each sequence, in one kernel behind the projections.

    None if none computes the layer's rule, or if calling its layers does more than theirs.
    """
    if any(map(altered, layer.children())):
        return None
    step = fused_step if has_kernel("fused_step", x) else step_on_cpu
    return step(layer, x, seq, state)


def step_on_cpu(
    layer: Any, x: Tensor, seq: Sequences, state: LayerState
) -> tuple[Tensor, LayerState] | None:
    """`decode_token` by C++, which has neither norms of all heads together nor readouts of others than sums."""
    rule = layer.rule
    apart = rule.write == "rows" or rule.read in ("mala", "pola") or rule.norm == "rms"
    if apart or rule.value_conv or not is_described(layer):
        return None

    # A norm over all heads reads fp32, and o_proj the dtype of x.
    fields = step_fields(layer, x.dtype if rule.by_head else torch.float32)
    if any_offloaded(fields):
        return None

    gate: list[Tensor] = []

    def inputs() -> dict[str, Tensor]:
        if rule.decay in ("retention", "sigmoid"):
            # Rotations, and decays without `Decay`, are computed by `inputs`.
            all_inputs, _ = layer.inputs(x, seq, None)
            heads = {name: y for name, y in all_inputs._asdict().items() if y is not None}
        else:
            heads = layer.project_inputs(x)
        if rule.read != "plain":
            heads["positions"] = seq.positions(1, x.device)
        if rule.gated and not rule.by_head:
            # The gate follows the norm over all heads, which `read_out` computes.
            gate.append(heads.pop("gate"))
        return heads

    out = getattr(state, "out", None)
    served = by_kernel("step", "auto", x, inputs, state, **fields, out=out)
    if served is None:
        return None
    o, new = served
    if rule.by_head:
        return apply_linear(layer.o_proj, o.flatten(-2)), new
    # Behind a norm over all heads `read_out` reads the gate alone.
    return layer.read_out(o, Inputs(o, o, o, gate=gate[0] if gate else None), x), new


def fused_step(
    layer: Any, x: Tensor, seq: Sequences, state: LayerState
) -> tuple[Tensor, LayerState] | None:
    """`decode_token` by one kernel, with norms and gates of all heads; None if none serves."""
    norm = layer.o_norm if layer.rule.norm is not None else None
    # Without a recurrent state the mixer is attention. An adapter around the norm has no epsilon.
    if "recurrent" not in state or not isinstance(norm, RMSNorm | LayerNorm | None):
        return None
    if layer.rule.gate_before == "norm" and layer.rule.value_conv:
        return None  # the kernel's gate precedes the convolution of v
    token = kernel_token(layer, x.dtype)
    if token is None:
        return None
    if norm is not None:
        token |= {"norm": (norm.weight, norm.eps), "norm_bias": getattr(norm, "bias", None)}
    if any_offloaded(token):
        return None

    def inputs() -> dict[str, Tensor]:
        heads = layer.project(x)
        for name, second in layer.up_projections().items():
            weight = matrix_of(second, biased=True)
            # Each program reads its rows of the matrix: with many, a product of its own is faster.
            if weight is None or len(x) * weight.numel() > MOST_READ:
                heads[name] = apply_linear(second, heads[name])
            else:
                # The kernel multiplies by the second matrix itself.
                heads |= {f"{name}_up": weight, f"{name}_bias": second.bias}
        if token["denominator"] or "frequencies" in token:
            heads["positions"] = seq.positions(1, x.device)
        return heads

    # A graph has buffers for the new state.
    out = getattr(state, "out", None)
    served = by_kernel("fused_step", "auto", x, inputs, state, **token, out=out)
    if served is None:
        return None
    o, new = served
    return apply_linear(layer.o_proj, o.flatten(-2)), new


def any_offloaded(fields: dict[str, Any]) -> bool:
    """Whether a tensor of a token is in memory only while its own module runs."""
    return any(x.is_meta for x in tree_leaves(fields) if isinstance(x, Tensor))
