"""Nalanda's decoder as a model of torchtitan: sharded, cut by heads, and in stages of a pipeline."""

from dataclasses import dataclass
from typing import Annotated, Any

import shims
import torch
import torch.nn.functional as F
import tyro
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

# isort: split
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import ModuleDict

from nalanda.common.errors import InputError
from nalanda.config.model import build_model_config, in_one_line
from nalanda.model.decoder import Decoder
from nalanda.model.epilogues import add_norm
from nalanda.model.language import LanguageModel
from nalanda.model.sequences import Layout, Packing, Sequences
from nalanda.train.build import build_model
from nalanda.train.estimate import meta_model
from nalanda.train.parallel import compile_blocks, shard
from nalanda.train.tensor_files import local_part

Ours = Annotated[Any, tyro.conf.Suppress]
"""The type of a setting that is no option of torchtitan's command line."""


def titan_name(name: str) -> str:
    """The name here of a parameter of `NalandaForCausalLM`."""
    return name.removeprefix("model.").replace("embed_tokens", "tok_embeddings")


class Model(BaseModel):
    """`NalandaForCausalLM`, with its parts under torchtitan's names; of a pipeline, one stage of it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        recipe: Ours
        tokenizer: Ours

        @property
        def nalanda(self) -> Any:
            return build_model_config(self.recipe, self.tokenizer)

        @property
        def layers(self) -> list[str]:
            return self.nalanda.layer_mixers

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            check(self.recipe, self.nalanda, config)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            parameters = sum(p.numel() for p in model.parameters())
            return parameters, round(3 * self.nalanda.flops_per_token(seq_len))

    def __init__(self, config: Config):
        super().__init__()
        whole = meta_model(config.recipe, config.tokenizer)
        self.settings, self.config, self.dtype = config, whole.config, torch.float32
        self.tok_embeddings, self.norm = whole.model.embed_tokens, whole.model.norm
        # A dict keeps a layer's number in stages that have only some of them.
        self.layers = ModuleDict({str(i): layer for i, layer in enumerate(whole.model.layers)})
        self.lm_head = whole.lm_head

    def verify_module_protocol(self) -> None:
        """Nothing: the protocol is for torchtitan's own layers."""

    @torch.no_grad()
    def init_states(self, **kwargs: Any) -> None:
        """Takes this process's part of the weights with which `nalanda train` begins.

        Every process draws, or reads, the whole model in host memory.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight
        set_seed(self.settings.recipe.seed)
        whole = build_model(self.settings.recipe, self.settings.tokenizer)
        values = {titan_name(name): value for name, value in whole.state_dict().items()}
        for name, target in (*self.named_parameters(), *self.named_buffers()):
            local, start = local_part(target)
            part = tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))
            local.copy_(values[canonical_fqn(name)][part])

    def forward(self, x: Tensor, cu_seqlens: list[int], labels: Tensor) -> Tensor:
        """The next stage's hidden states `[B, T, D]`; in the last stage the sum of the losses.

        x: token ids `[B, T]`, behind the first stage hidden states. labels: the next tokens `[B, T]`.
        """
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            first = self.tok_embeddings is not None
            x = self.tok_embeddings(x) if first else x
            layout = Layout(x, Packing(cu_seqlens=torch.tensor(cu_seqlens)))
            seq = Sequences(layout.cu_seqlens, device=x.device)
            h = layout.pack(x)  # [1, B·T, D], or [B, T, D] if each row is one document
            if first:
                h = F.dropout(Decoder.scaled(self, h, seq), self.config.dropout, self.training)
            for layer in self.layers.values():
                h, _ = layer(h, seq)
            if self.norm is None:
                return layout.unpack(h)

            h = add_norm(h, None, self.norm)[1]
            # A head that is cut returns the logits of the whole vocabulary; else the loss needs none.
            is_cut = isinstance(self.lm_head.weight, DTensor)
            logits = self.lm_head(h).flatten(0, 1) if is_cut else None
            rows = h.flatten(0, 1), logits, labels.flatten()
            return LanguageModel._summed_loss(self, *rows, self.settings.recipe.train.z_loss)


def check(recipe: Any, model: Any, titan: Any) -> None:
    """Raises `InputError` for settings that are not carried over."""
    degrees = titan.parallelism
    pipeline, heads = degrees.pipeline_parallel_degree, degrees.tensor_parallel_degree
    ours = model.model_type == "nalanda" and model.is_decoder
    for key, refused in {
        "model: torchtitan trains Nalanda's decoders": not ours,
        "model.parametrization: mup is for nalanda train": ours and model.parametrization == "mup",
        "model: its heads have no plan; set --parallelism.tensor_parallel_degree 1": heads > 1
        and not model.base_model_tp_plan,
        "model.tie_word_embeddings: a pipeline has its ends apart; set it to false": pipeline > 1
        and model.tie_word_embeddings,
        "optim.name: muon takes no cut heads; set --parallelism.tensor_parallel_degree 1": heads > 1
        and recipe.optim.name == "muon",
        "train.precision: fp16 is for nalanda train": recipe.train.precision == "fp16",
        "data.long_documents: carry is for nalanda train": recipe.data.long_documents == "carry",
        "distill.teacher: is for nalanda train": recipe.distill.teacher,
        "stages: are for nalanda train": recipe.stages,
        "train.ema: is for nalanda train": recipe.train.ema,
        "train.resume: is for nalanda train": recipe.train.resume is not None,
        "train.context_parallel: is for nalanda train; set 1": recipe.train.context_parallel > 1
        or degrees.context_parallel_degree > 1,
        "--training.seq_len: set data.seq_len": titan.training.seq_len != recipe.data.seq_len,
    }.items():
        if refused:
            raise InputError(key)
    if heads > 1:
        with in_one_line("model"):
            model.check_tensor_parallel(heads)


def parallelize(
    model: Model,
    *,
    parallel_dims: Any,
    training: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    **kwargs: Any,
) -> Model:
    """Cuts the heads, recomputes activations as torchtitan does, and shards as `nalanda train` does."""
    model.dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    if parallel_dims.tp_enabled:
        split_heads(model, parallel_dims.get_mesh("tp"))
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)

    blocks = list(model.layers.values())
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    dtype = model.dtype if model.dtype.itemsize == 2 else None
    shard(model, blocks, parallel_dims.get_mesh(axes), dtype=dtype)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by all labels of the step, so gradients are added up.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can do nothing else
    if compile_config.enable:
        compile_blocks(blocks, backend=compile_config.backend)
    return model


def split_heads(model: Model, mesh: Any) -> None:
    """Tensor parallelism by the plan of the model's config, as transformers carries it out.

    The norm of gradients and the fused optimizer need all parameters as DTensors of one mesh. So the others become
    copies on all processes.
    """
    plan = {titan_name(name): style for name, style in model.config.base_model_tp_plan.items()}
    plan = PreTrainedModel._expand_parallel_plan(model, plan | LanguageModel._tp_plan)
    # Copies whose gradients are of each process's own heads.
    shared = {name for name, style in plan.items() if style == "replicated_with_grad_allreduce"}
    apply_tensor_parallelism(model, mesh, {name: plan[name] for name in plan.keys() - shared})

    paths = {module: path for path, module in model.named_modules()}
    # The blocks first: what is left is the model's own.
    for unit in (*model.layers.values(), model):
        copies = []
        for module in unit.modules():
            for name, p in module.named_parameters(recurse=False):
                if not isinstance(p, DTensor):
                    copy = distribute_tensor(p.detach(), mesh, [Replicate()], src_data_rank=None)
                    module._parameters[name] = nn.Parameter(copy)
                    gradient = Partial() if paths[module] in shared else Replicate()
                    copies.append((module, name, gradient))
        use_local_tensors(unit, copies)


def use_local_tensors(unit: nn.Module, copies: list[tuple[nn.Module, str, Any]]) -> None:
    """While `unit` runs, each (module, name) is a local tensor, whose gradient is placed as given."""
    kept: list[tuple[nn.Module, str, Any]] = []

    def before(*_: Any) -> None:
        for module, name, gradient in copies:
            kept.append((module, name, module._parameters[name]))
            local = module._parameters[name].to_local(grad_placements=[gradient])
            module._parameters[name] = local

    def after(*_: Any) -> None:
        while kept:
            module, name, parameter = kept.pop()
            module._parameters[name] = parameter

    unit.register_forward_pre_hook(before)
    unit.register_forward_hook(after)


def pipeline(model: Model, **settings: Any) -> tuple:
    """torchtitan's pipeline, whose schedule takes micro-batches."""
    schedule, *rest = pipeline_llm(model, **settings)
    shims.take_micro_batches(schedule)
    return schedule, *rest
