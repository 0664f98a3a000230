"""Tensor parallelism by plans: a mixer's heads over processes, by the engines that read transformers' plans.

A plan maps submodules and parameters to styles, the names below. An engine cuts the weights, so projections return
the columns of this process's heads, and all steps until o_proj see no others. o_proj sums over the processes.
`Mixer.tp_plan` has a layer's plan, `NalandaConfig.base_model_tp_plan` a model's. The functions of tensors serve steps
that see more than a process's heads. Where no heads are split they return what they are given.
"""

import re
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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


def head_mesh(mixer: Any) -> DeviceMesh | None:
    """The processes that share a mixer's heads, over which the inputs of o_proj are split; None for one process."""
    weight = getattr(mixer.o_proj, "weight", None)  # an adapter in its place may have none
    # FSDP cuts other dimensions.
    if isinstance(weight, DTensor) and weight.placements == (Shard(1),):
        return weight.device_mesh
    return None


def own_heads(mixer: Any, y: Tensor, dim: int = -1) -> Tensor:
    """This process's heads of y, which every process has whole, along `dim`. Gradients are gathered."""
    mesh = head_mesh(mixer)
    if mesh is None:
        return y
    replicated = DTensor.from_local(y, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(dim % y.dim())]).to_local()


def all_heads(mixer: Any, y: Tensor) -> Tensor:
    """The columns of all heads `[…, n]`, of which y has those of this process. Each gets its part of the gradient."""
    mesh = head_mesh(mixer)
    if mesh is None:
        return y
    sharded = DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local()


def own_outputs(mixer: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a mixer's projections, each with the columns of this process's heads alone.

    A plan leaves some whole. Those of several steps a token are cut behind their convolutions, by `own_steps`.
    """
    if head_mesh(mixer) is None:
        return outputs
    uncut = {
        name
        for name, layer in mixer.columns().items()
        if name not in mixer.stepped and outputs[name].shape[-1] == layer.out_features
    }
    return {name: own_heads(mixer, y) if name in uncut else y for name, y in outputs.items()}


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
        for path, module in mixer.named_modules():
            for name, _ in module.named_parameters(path, recurse=False):
                style = style_of(name, styles)
                other, first = seen.setdefault(name, (mixer_name, style))
                if style == first:
                    continue
                if not isinstance(module, nn.Linear):
                    raise ValueError(
                        f"mixers {other!r} and {mixer_name!r}: tensor parallelism splits {name} of each in "
                        "another way; use FSDP, or one of them alone"
                    )
                # Each mixer then takes the columns that it needs of all.
                seen[name], styles[path] = (other, GATHERED), GATHERED
        plan |= {f"mixer.{name}": style for name, style in styles.items()}
    return {f"layers.*.{name}": style for name, style in plan.items()}
