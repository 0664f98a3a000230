"""Tensor parallelism by plans: a mixer's heads over processes, by the engines that read transformers' plans.

A plan maps submodules and parameters to styles, the names below. An engine cuts the weights, so projections return
the columns of this process's heads, and all steps until o_proj see no others. o_proj sums over the processes.
`Mixer.tp_plan` has a layer's plan, `NalandaConfig.base_model_tp_plan` a model's. The functions of tensors serve steps
that need more than a process's heads; `weight` is that of a split Linear layer, from which they know the processes.
Where nothing is split they return what they are given.
"""

import re
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

COLUMNS, ROWS = "colwise", "rowwise"
"""A Linear layer whose outputs, or whose inputs, are of heads."""
GATHERED = "colwise_gather_output"
"""A Linear layer whose weight is cut, and whose outputs are gathered."""
FIRST = "embedding_rowwise"
"""A parameter cut along its first dimension, of heads or of their channels."""
LOCAL = "local_params"
"""A module that computes with its share of its own parameters, which are cut along their first dimension."""
SHARED = "replicated_with_grad_allreduce"
"""A module whose weights all heads share: each process has the gradient of its own heads, and all are summed."""


def share(x: Tensor) -> Tensor:
    """This process's share of a parameter."""
    return x.to_local() if isinstance(x, DTensor) else x


def own_heads(y: Tensor, weight: Tensor, dim: int = -1) -> Tensor:
    """This process's heads of y, which every process has whole, along `dim`. Gradients are gathered."""
    if not isinstance(weight, DTensor):
        return y
    whole = DTensor.from_local(y, weight.device_mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(dim % y.dim())]).to_local()


def all_heads(y: Tensor, weight: Tensor) -> Tensor:
    """The columns of all heads `[…, n]`, of which y has those of this process. Each gets its part of the gradient."""
    if not isinstance(weight, DTensor):
        return y
    part = DTensor.from_local(y, weight.device_mesh, [Shard(y.dim() - 1)], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local()


def style_of(parameter: str, plan: dict[str, str]) -> str | None:
    """A plan's style for a parameter, by its own name or its module's; None: no style, so it stays whole."""
    # As transformers writes names: `*` for the number of a layer.
    name = re.sub(r"\.\d+(?=\.|$)", ".*", parameter)
    return plan.get(name, plan.get(name.rpartition(".")[0]))


def is_cut(parameter: str, plan: dict[str, str]) -> bool:
    """Whether a process has a part of a parameter alone."""
    style = style_of(parameter, plan)
    return style in (COLUMNS, GATHERED, FIRST) or (style == ROWS and not parameter.endswith("bias"))


def joined_plan(mixers: dict[str, Any]) -> dict[str, str]:
    """The plan of blocks with these mixers. Raises ValueError for mixers that split one name differently."""
    plan = {"mlp.gate_proj": COLUMNS, "mlp.up_proj": COLUMNS, "mlp.down_proj": ROWS}
    seen: dict[str, tuple[str, str | None]] = {}
    for mixer_name, mixer in mixers.items():
        styles = mixer.tp_plan()
        for name, _ in mixer.named_parameters():
            style = style_of(name, styles)
            other, first = seen.setdefault(name, (mixer_name, style))
            if style != first:
                raise ValueError(
                    f"tensor parallelism: mixers {other!r} and {mixer_name!r} split {name} differently; "
                    "use one of them alone"
                )
        plan |= {f"mixer.{name}": style for name, style in styles.items()}
    return {f"layers.*.{name}": style for name, style in plan.items()}
