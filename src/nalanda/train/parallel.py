"""How several processes share one model: DDP, or FSDP2 whole or hybrid.

accelerate launches, names the device and reduces what the loop counts. FSDP2 is torch's `fully_shard` itself,
over nccl and gloo alike: accelerate 1.15 turns FSDP on CPUs into DDP without a word.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nalanda.common.errors import InputError
from nalanda.model.layers import Fp32Module

Kind = Literal["ddp", "fsdp", "hybrid"]


def choose_parallel(asked: str, environ: MutableMapping[str, str]) -> Kind:
    """What `train.parallel` comes to under the launcher's environment; auto is what accelerate's config says.

    That setting is taken out of `environ`: accelerate would wrap the model once more, and transformers load
    weights on one process only.

    Raises:
        InputError: the config asks for what Nalanda does not do.
    """

    def on(name: str) -> bool:
        return environ.get(name, "false").lower() in ("1", "true", "yes", "on")

    if on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise InputError(
            "accelerate's parallelism_config is not read: take it out of its config and set "
            "train.parallel=hybrid and train.shard_size"
        )
    fsdp = on("ACCELERATE_USE_FSDP")
    if fsdp and on("FSDP_OFFLOAD_PARAMS"):
        raise InputError("accelerate's fsdp_offload_params: parameters stay on the device; set it to false")
    environ.pop("ACCELERATE_USE_FSDP", None)
    if asked != "auto":
        return asked  # type: ignore[return-value]
    return "fsdp" if fsdp else "ddp"


def parallelize(
    accelerator: Accelerator,
    model: nn.Module,
    kind: Kind,
    train: Any,
    build: Callable[[], torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """(what to call for training, the optimizer). `train` is a `TrainConfig`; `build` makes the optimizer.

    In this order: activation checkpointing, compilation, sharding, autocast; and only then the optimizer,
    whose parameters sharding replaces. `model` stays the bare model, which under FSDP2 is what is called.
    """
    sharded = kind != "ddp" and accelerator.num_processes > 1
    if train.gradient_checkpointing:
        # transformers 5.23 has a new name for it, and warns of the old one.
        new = getattr(model, "activation_checkpointing_enable", None)
        (new or model.gradient_checkpointing_enable)({"use_reentrant": False})  # type: ignore[operator]
    if train.compile and not sharded:
        model.compile()
    if not sharded:
        return accelerator.prepare(model, build())
    blocks = units(model)
    if train.compile:
        # What FSDP2 hangs on a block stays outside: its collectives would break the graph.
        for block in blocks:
            block.forward = torch.compile(block.forward)
    bf16 = train.precision == "bf16"
    shard(model, blocks, mesh(kind, accelerator, train.shard_size), bf16=bf16)
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        raise RuntimeError("FSDP2 left parameters whole")
    # evaluation_mode: autocast around forward, and no wrapper of its own.
    wrapped = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    return wrapped, accelerator.prepare_optimizer(build())


def mesh(kind: Kind, accelerator: Accelerator, shard_size: int | None) -> DeviceMesh:
    """`[processes]`, or for hybrid `[replicas, shards]` with a node's processes as the shards."""
    processes = accelerator.num_processes
    if kind == "fsdp":
        return init_device_mesh(accelerator.device.type, (processes,), mesh_dim_names=("shard",))
    size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", str(processes)))
    if processes % size:
        raise InputError(f"train.shard_size: {processes} processes are no multiple of {size}")
    shape = (processes // size, size)
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("replicate", "shard"))


def units(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: each is gathered for its own forward and backward pass, and let go of after it."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = max(lists, key=len, default=[])
    within = {id(inner) for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if id(block) not in within]


def shard(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, *, bf16: bool) -> None:
    """FSDP2 over `mesh`: a unit for each block, and one for the rest at the root.

    Under bf16 the matrices of a Nalanda model's blocks are gathered in bf16: what autocast would make of
    them, at half the traffic; and no bf16 copy stays for the backward pass of a block that was let go of. All
    else (norms, filters, decays, embedding, head) is gathered in fp32, with the root: modules read it outside
    of its owner's forward, and under a block's dtype it would lose its own. Gradients are reduced in fp32.
    A foreign model may use its Linear layers in fp32 or as bare weights, so that its units are all fp32.
    """
    if getattr(getattr(model, "config", None), "model_type", None) == "nalanda":
        matrices = {p for block in blocks for m in linears(block) for p in m.parameters()}
        cast = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32 if bf16 else None,
            cast_forward_inputs=False,  # the residual stream is fp32, as it is without shards
        )
        # From the top: fully_shard looks into no block that has a unit already, and this one's parameters lie
        # in all of them.
        fully_shard(model, mesh=mesh, ignored_params=matrices)
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=cast, ignored_params=set(block.parameters()) - matrices)
        return
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def linears(block: nn.Module) -> Iterator[nn.Linear]:
    """The Linear layers that run under autocast: those of an `Fp32Module` do not."""
    for child in block.children():
        if isinstance(child, nn.Linear):
            yield child
        elif not isinstance(child, Fp32Module):
            yield from linears(child)


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are reduced with the last micro-batch only; until then each process adds up its own."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    else:
        with contextlib.nullcontext() if last else getattr(model, "no_sync", contextlib.nullcontext)():
            yield


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales the gradients down to `max_norm` where they are longer; their norm before it, alike on all
    processes."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
