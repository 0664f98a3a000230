"""Shares one model among processes: DDP, FSDP2 or hybrid FSDP2; and each row, by context parallelism.

accelerate launches, chooses the device and reduces the loop's values. FSDP2 is torch's `fully_shard`, over
nccl and gloo: accelerate 1.15 silently turns FSDP on CPUs into DDP.

The axes of processes have torchtitan's and accelerate's names: dp_replicate (each has a copy of the model), dp_shard
(each has a part of it) and cp (each has a part of every row). The model is sharded over dp_shard and cp together.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nalanda.common.errors import InputError
from nalanda.common.processes import local_processes
from nalanda.config.schema import TrainConfig
from nalanda.model.context import Context
from nalanda.model.layers import Fp32Module
from nalanda.train.flops import DTYPES

Kind = Literal["ddp", "fsdp", "hybrid"]


def as_launched(train: TrainConfig, environ: MutableMapping[str, str]) -> TrainConfig:
    """`train` as accelerate's config wants it, with "ddp", "fsdp" or "hybrid" for `parallel`.

    Raises:
        InputError: accelerate's config asks for something unsupported, or contradicts the recipe.
    """
    train = follow_parallelism_config(train, environ)
    return replace(train, parallel=choose_parallel(train.parallel, environ))


def follow_parallelism_config(train: TrainConfig, environ: MutableMapping[str, str]) -> TrainConfig:
    """`train` with `parallel`, `shard_size` and `context_parallel` as accelerate's `ParallelismConfig` has them.

    Removes that config from `environ`: accelerate would prepare the model by it, too.

    Raises:
        InputError: the config asks for something unsupported, for another number of processes than were
            launched, or for other values than the recipe's.
    """
    if not is_on(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return train
    environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG")
    source = "accelerate's parallelism_config"
    names = "dp_replicate", "dp_shard", "cp", "tp", "sp"
    sizes = {
        name: int(environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in names
    }

    for name in ("tp", "sp"):
        if sizes[name] != 1:
            raise InputError(
                f"{source}: {name}_size is {sizes[name]}, and training serves dp_replicate_size, "
                f"dp_shard_size and cp_size; set {name}_size to 1"
            )
    if (strategy := environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")) != "allgather":
        raise InputError(f"{source}: cp_comm_strategy {strategy} is not served; set allgather")

    processes = int(environ.get("WORLD_SIZE", "1"))
    if all(size == 1 for size in sizes.values()):
        sizes["dp_replicate"] = processes  # as accelerate reads it
    shards = sizes["dp_shard"] * sizes["cp"]
    if (product := sizes["dp_replicate"] * shards) != processes:
        raise InputError(
            f"{source}: dp_replicate_size × dp_shard_size × cp_size is {product}, and the launch has "
            f"{processes} process(es); change one of them"
        )

    kind = "ddp" if shards == 1 else "fsdp" if sizes["dp_replicate"] == 1 else "hybrid"
    shard_size = shards if kind == "hybrid" else None
    values: dict[str, Any] = {
        "parallel": kind,
        "shard_size": shard_size,
        "context_parallel": sizes["cp"],
    }
    for key, value in values.items():
        written, default = getattr(train, key), getattr(TrainConfig, key)
        if written not in (value, default):
            means = "null" if value is None else value
            raise InputError(
                f"train.{key}: the recipe has {written}, but {source} means {means}; change one of them"
            )
    return replace(train, **values)


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch of accelerate's environment is on."""
    return environ.get(name, "false").lower() in ("1", "true", "yes", "on")


def choose_parallel(parallel: str, environ: MutableMapping[str, str]) -> Kind:
    """Resolves `train.parallel`; auto follows accelerate's config.

    Removes accelerate's FSDP setting from `environ`: accelerate would wrap the model again, and transformers
    would load weights on one process only.

    Raises:
        InputError: accelerate's config asks for something unsupported.
    """
    fsdp = is_on(environ, "ACCELERATE_USE_FSDP")
    if fsdp and is_on(environ, "FSDP_OFFLOAD_PARAMS"):
        raise InputError(
            "accelerate's fsdp_offload_params: parameters stay on the device; set it to false"
        )
    environ.pop("ACCELERATE_USE_FSDP", None)
    for name in [name for name in environ if name.startswith("ACCELERATE_DYNAMO_")]:
        environ.pop(name)  # it would compile the whole model; `train.compile` compiles its blocks
    if parallel != "auto":
        return parallel  # type: ignore[return-value]
    return "fsdp" if fsdp else "ddp"


class Sharing:
    """How the processes share the work, by the settings of `as_launched`.

    `train.context_parallel` processes, neighbours in rank, are a context: they read the same rows, and each
    computes a part of them. Weights are shared, and gradients summed, over all processes.

    kind: "ddp", "fsdp" or "hybrid".
    mesh: of FSDP2, `[dp_shard · cp]` or for hybrid `[dp_replicate, dp_shard · cp]`; None without it.
    context: None if every process has whole rows.
    rank, world_size: this context among all, as the loader of the rows counts.

    Raises InputError for a number of processes that cannot be split so.
    """

    def __init__(self, accelerator: Accelerator, train: TrainConfig):
        processes, parts = accelerator.num_processes, train.context_parallel
        self.kind, self.context_parallel = train.parallel, parts
        self.mesh, self.context = None, None
        # Neighbours in rank are one context, so these two count contexts.
        self.rank, self.world_size = accelerator.process_index // parts, processes // parts
        if self.kind != "ddp" and processes > 1:
            self.mesh = mesh(accelerator, train)
        if parts > 1:
            axes = init_device_mesh(
                accelerator.device.type, (self.world_size, parts), mesh_dim_names=("dp", "cp")
            )
            self.context = Context(axes["cp"].get_group())

    @property
    def first(self) -> bool:
        """Whether this process is the first of its context, which saves what they all have."""
        return self.context is None or self.context.rank == 0


def parallelize(
    accelerator: Accelerator,
    model: nn.Module,
    sharing: Sharing,
    train: TrainConfig,
    build: Callable[[], torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns (the model to call in training, the optimizer), which `build` makes.

    The order is activation checkpointing, sharding, compilation, then optimizer and autocast: sharding replaces the
    parameters and the blocks' classes. `model` stays the bare model; under FSDP2 it is what is called.
    """
    if train.gradient_checkpointing:
        # transformers 5.23 renames the method, and warns about the old name.
        new = getattr(model, "activation_checkpointing_enable", None)
        (new or model.gradient_checkpointing_enable)({"use_reentrant": False})  # type: ignore[operator]
    # The blocks' list is taken before sharding changes their classes.
    blocks = units(model)
    if sharing.mesh is not None:
        dtype = DTYPES[train.precision]
        shard(model, blocks, sharing.mesh, dtype=dtype if dtype.itemsize == 2 else None)
    if compiles(train.compile, accelerator.device):
        compile_blocks(blocks)
    if sharing.mesh is None:
        # DDP among several processes, and autocast in any case.
        return accelerator.prepare(model, build())
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        raise RuntimeError("FSDP2 left parameters whole")
    # evaluation_mode adds autocast, but no wrapper.
    wrapped = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    return wrapped, accelerator.prepare_optimizer(build())


def compiles(setting: bool | str, device: torch.device) -> bool:
    """Resolves `train.compile`; auto: on GPUs."""
    return device.type == "cuda" if setting == "auto" else bool(setting)


def compile_blocks(blocks: Iterable[nn.Module], **options: Any) -> None:
    """Compiles the forward and backward pass of each block in training mode. options: of `torch.compile`.

    Equal blocks share one compilation; a whole model would repeat it for each. Evaluation stays eager: it
    has other shapes, and would compile for each of them.
    """
    # The number of chunks of packed rows depends on the data.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch._dynamo.config.optimize_ddp = False  # it would cut a block's graph at DDP's buckets

    def compiled(block: nn.Module) -> Callable:
        # Not the block itself: the collectives of FSDP2's hooks would break the graph.
        eager = block.forward
        graph = torch.compile(eager, **options)

        @functools.wraps(graph)  # with the mark of what torch compiled
        def forward(*args: Any, **kwargs: Any) -> Any:
            return (graph if block.training else eager)(*args, **kwargs)

        return forward

    for block in blocks:
        block.forward = compiled(block)


def mesh(accelerator: Accelerator, train: TrainConfig) -> DeviceMesh:
    """`[processes]`, or for hybrid `[replicas, processes of a replica]`; by default a node has one replica."""
    processes, device = accelerator.num_processes, accelerator.device.type
    if train.parallel != "hybrid":
        return init_device_mesh(device, (processes,), mesh_dim_names=("dp_shard_cp",))
    size = train.shard_size or local_processes(processes)
    if processes % size:
        raise InputError(f"train.shard_size: {processes} processes are not a multiple of {size}")
    # A context reads the same rows, and none may lie in two replicas.
    if size % train.context_parallel:
        raise InputError(
            f"train.shard_size: {size} is not a multiple of train.context_parallel {train.context_parallel}"
        )
    shape = (processes // size, size)
    return init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard_cp"))


def units(model: nn.Module) -> list[nn.Module]:
    """The model's blocks. FSDP2 gathers each for its forward and backward pass, and frees it afterwards."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 puts its name before that of a block's class.
    blocks = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in names]
    if not blocks:
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        # Without names: the longest list of modules is taken for the blocks.
        blocks = max(lists, key=len, default=[])
    # A block inside another belongs to the outer one's unit.
    within = {id(inner) for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if id(block) not in within]


def shard(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, *, dtype: torch.dtype | None
) -> None:
    """Shards the model over `mesh` by FSDP2: one unit per block, and one for the rest at the root.

    dtype: autocast's, of 16 bits, or None. The matrices of a Nalanda model's blocks are gathered in it, as
    autocast would cast them. That halves the traffic, and no copy stays for the backward pass. All other
    parameters (norms, filters, decays, embedding, head) are gathered in fp32 with the root. Some are read
    outside their owner's forward, and a block's dtype would round them. Gradients are reduced in fp32.

    Units of other models are all fp32: those models may use Linear layers in fp32, or their bare weights. Their marks
    of `optim.undecayed` stay.
    """
    if getattr(getattr(model, "config", None), "model_type", None) == "nalanda":
        matrices = {p for block in blocks for m in linears(block) for p in m.parameters()}
        cast = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=None if dtype is None else torch.float32,
            cast_forward_inputs=False,  # the residual stream is fp32, as without shards
        )
        # The root first: fully_shard skips blocks that are sharded already, and this unit has parameters in
        # all of them.
        fully_shard(model, mesh=mesh, ignored_params=matrices)
        for block in blocks:
            fully_shard(
                block, mesh=mesh, mp_policy=cast, ignored_params=set(block.parameters()) - matrices
            )
        return
    marked = [n for n, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in marked:  # of a new parameter by now
        model.get_parameter(name)._no_weight_decay = True  # pyrefly: ignore[missing-attribute]


def linears(block: nn.Module) -> Iterator[nn.Linear]:
    """The Linear layers that run under autocast, so none of an `Fp32Module`."""
    for child in block.children():
        if isinstance(child, nn.Linear):
            yield child
        elif not isinstance(child, Fp32Module):
            yield from linears(child)


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Defers the reduction of gradients to the last micro-batch; until then each process sums its own."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
        return
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)  # of DDP
    with contextlib.nullcontext() if last else no_sync():
        yield


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales longer gradients down to `max_norm`, if it is not 0.

    Returns the norm before, the same on all processes.
    """
    parameters = list(parameters)
    # Of sharded gradients it is a DTensor whose partial norms are still to be summed.
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
